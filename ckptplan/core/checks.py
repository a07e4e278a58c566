"""Checks of the values in plain data: bytes, seconds, counts, indices, types."""

from __future__ import annotations

from typing import TypeGuard

from ckptplan.core.errors import InvalidInputError

MOST_BYTES = 1 << 60
"""Above the memory of any device or host; sums of a few such numbers fit 64 bits."""
MOST_SECONDS = 1e9


def is_int(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer other than True and False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an integer or float other than True and False; it may be infinite or NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_count(**values: object) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a whole number, at least 1."""
    for name, value in values.items():
        if not (is_int(value) and value >= 1):
            raise InvalidInputError(f"{name}={value!r} must be a whole number, at least 1")


def check_bytes(owner: str, /, **values: int) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a whole number of bytes, 0 or more."""
    for name, value in values.items():
        if not is_int(value) or not 0 <= value < MOST_BYTES:
            raise InvalidInputError(
                f"{owner}: {name}={short_repr(value)} must be a whole number of bytes, 0 or more and below 2**60"
            )


def check_seconds(owner: str, /, **values: float) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a finite number of seconds, 0 or more."""
    for name, value in values.items():
        # A comparison with NaN is false.
        if not is_number(value) or not 0 <= value <= MOST_SECONDS:
            raise InvalidInputError(
                f"{owner}: {name}={short_repr(value)} must be a finite number of seconds, 0 or more and at most 1e9"
            )


def check_indices(owner: str, /, **values: tuple[int, ...]) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a tuple of distinct indices."""
    for name, indices in values.items():
        if not isinstance(indices, tuple) or not all(is_int(i) and 0 <= i < 1 << 31 for i in indices):
            raise InvalidInputError(f"{owner}: {name}={short_repr(indices)} must be a tuple of indices, 0 to 2**31")
        if len(set(indices)) != len(indices):
            raise InvalidInputError(f"{owner}: {name}={indices} has an index twice; give each once")


def check_type(owner: str, kind: type, /, **values: object) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise InvalidInputError(f"{owner}: {name}={short_repr(value)} must be a {kind.__name__}")


def check_each(owner: str, kind: type, /, **values: tuple[object, ...]) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a tuple of `kind`."""
    for name, items in values.items():
        if not isinstance(items, tuple) or not all(isinstance(item, kind) for item in items):
            raise InvalidInputError(f"{owner}: {name}={short_repr(items)} must be a tuple of {kind.__name__}")


def short_repr(value: object) -> str:
    """Return `repr(value)`, cut to a length that fits an error message."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
