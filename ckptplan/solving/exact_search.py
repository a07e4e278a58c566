"""Every decision vector, evaluated: exact for any actions, and short enough to be read as its own proof."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from ckptplan.solving.evaluate import Codes, Evaluator, Menu

CHUNK = 1 << 14


def vector_count(menu: Menu) -> int:
    """How many decision vectors a menu per stage allows."""
    return math.prod(len(codes) for codes in menu)


def vectors(menu: Menu) -> Iterator[Codes]:
    """All decision vectors in chunks, the last stage changing fastest."""
    total = vector_count(menu)
    for start in range(0, total, CHUNK):
        index = np.arange(start, min(start + CHUNK, total), dtype=np.int64)
        block = np.empty((len(index), len(menu)), np.int8)
        for i in reversed(range(len(menu))):
            index, digit = np.divmod(index, len(menu[i]))
            block[:, i] = np.array(menu[i], np.int8)[digit]
        yield block


def fastest(
    evaluator: Evaluator, menu: Menu, budget_bytes: int, deadline: float
) -> tuple[Codes | None, bool]:
    """The fastest vector that fits, and whether all were seen before `deadline` (`time.monotonic`).

    Among vectors as fast as each other the one with the most stages kept is taken.
    """
    best, best_s, best_kept = None, math.inf, -1
    for block in vectors(menu):
        if time.monotonic() > deadline:
            return best, False
        cost = evaluator.makespans(block, budget_bytes)
        least = float(cost.min())
        if least == math.inf:
            continue
        # 1e-12: sums of the same seconds in another order are the same time.
        tied = np.flatnonzero(cost <= min(least, best_s) * (1 + 1e-12))
        if len(tied) == 0:
            continue
        kept = (block[tied] == 0).sum(axis=1)
        if least < best_s * (1 - 1e-12) or kept.max() > best_kept:
            row = tied[kept.argmax()]
            best, best_s, best_kept = block[row].copy(), float(cost[row]), int(kept.max())
    return best, True


def smallest(evaluator: Evaluator, menu: Menu) -> tuple[Codes, int]:
    """The vector with the smallest peak and that peak in bytes."""
    best, best_bytes = np.zeros(len(menu), np.int8), 1 << 62
    for block in vectors(menu):
        peaks = evaluator.smallest_peaks(block)
        row = int(peaks.argmin())
        if peaks[row] < best_bytes:
            best, best_bytes = block[row].copy(), int(peaks[row])
    return best, best_bytes
