"""Units of input and output: budgets in GiB are rounded down to bytes, figures are formatted as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptplan.core.checks import MOST_BYTES, is_number
from ckptplan.core.errors import InvalidInputError

GIB = 1 << 30
LEAST_S = 5e-7
"""Seconds below which a time is shown as none: half of the last digit."""


def budget_to_bytes(budget_gb: float, *, name: str = "budget_gb") -> int:
    """Return the whole bytes in `budget_gb` units of 2**30 bytes, rounded down.

    Raises
    ------
    InvalidInputError
        Unless the budget is a finite number above zero.
    """
    if not is_number(budget_gb):
        raise InvalidInputError(
            f"{name}={budget_gb!r} is not a number; give it in units of 2**30 bytes, such as {name}=12 or {name}=0.5"
        )
    if not 0 < budget_gb < MOST_BYTES // GIB:  # false for NaN
        raise InvalidInputError(
            f"{name}={budget_gb!r} must be finite and above 0, and below 2**30; it counts units of 2**30 bytes"
        )
    return math.floor(budget_gb * GIB)


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` as text in B, KiB, MiB, GiB or TiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"


def format_swapped(host_bytes: int, disk_bytes: int) -> str:
    """Return the bytes that a step moves as text, by tier if some go to the disk."""
    return format_bytes(host_bytes) + (f" + {format_bytes(disk_bytes)} to disk" if disk_bytes else "")


def format_seconds(seconds: float) -> str:
    """Return `seconds` as text in s, ms or µs."""
    if abs(seconds) < LEAST_S:
        return "0.00 s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with left-aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
