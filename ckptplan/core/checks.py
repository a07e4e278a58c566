"""Checks of the values in plain data: bytes, seconds, counts, indices, types."""

from __future__ import annotations

import functools
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

from ckptplan.core.errors import InvalidInputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_BYTES = 1 << 60
"""Above the memory of any device or host; sums of a few such numbers fit 64 bits."""
MOST_SECONDS = 1e9
LEAST_RATE, MOST_RATE = 1e-3, 1e18
"""Outside this range a transfer takes longer than the age of the universe, or no time at all."""


def is_int(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer other than True and False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an integer or float other than True and False; it may be infinite or NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_kind(kind: type, /, **values: object) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise InvalidInputError(f"{name}={short_repr(value)} must be a {kind.__name__}")


def check_whole(owner: str, least: int, most: int, /, **values: object) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a whole number from `least` to `most`.

    Messages begin with `owner`, unless it is empty.
    """
    for name, value in values.items():
        if not is_int(value) or not least <= value <= most:
            raise InvalidInputError(
                f"{owner and f'{owner}: '}{name}={short_repr(value)} must be a whole number, from {least} to {most}"
            )


def check_number(owner: str, least: float, most: float, unit: str = "", /, **values: object) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a number from `least` to `most`, of a unit if any.

    Messages begin with `owner`, unless it is empty.
    """
    of = unit and f" of {unit}"
    for name, value in values.items():
        if not is_number(value) or not least <= value <= most:  # a comparison with NaN is false
            raise InvalidInputError(
                f"{owner and f'{owner}: '}{name}={short_repr(value)} must be a finite number{of}, from {least:g} to "
                f"{most:g}"
            )


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
    check_number(owner, 0, MOST_SECONDS, "seconds", **values)


def check_rates(owner: str, /, **values: float) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a usable rate, of bytes or of operations."""
    for name, value in values.items():
        unit = "bytes per second" if "bytes" in name else "operations per second"
        check_number(owner, LEAST_RATE, MOST_RATE, unit, **{name: value})


def check_indices(owner: str, /, **values: tuple[int, ...]) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a tuple of distinct indices."""
    for name, indices in values.items():
        if not isinstance(indices, tuple) or not all(is_int(i) and 0 <= i < 1 << 31 for i in indices):
            raise InvalidInputError(f"{owner}: {name}={short_repr(indices)} must be a tuple of indices, 0 to 2**31")
        if len(set(indices)) != len(indices):
            raise InvalidInputError(f"{owner}: {name}={indices} has an index twice; give each once")


def check_fields(owner: str, record: DataclassInstance) -> None:
    """Raise `InvalidInputError` for the first field of `record` whose value isn't of its annotated type.

    A float named `..._per_s` must be a rate (`check_rates`), one named `..._s` a number of seconds (`check_seconds`),
    an integer named `...bytes` one of bytes (`check_bytes`), and the fields in `_INDICES` tuples of distinct indices.
    Other numbers aren't checked.
    """
    for name, kind in types_of(type(record)).items():
        _check_value(owner, name, kind, getattr(record, name))


_INDICES = ("saved", "pinned", "moves", "ops", "linked", "users")


@functools.cache
def types_of(kind: type[DataclassInstance]) -> dict[str, Any]:
    """Return the annotated type of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _check_value(owner: str, name: str, kind: Any, value: Any) -> None:
    if kind is int:
        if "bytes" in name:
            check_bytes(owner, **{name: value})
        return
    if kind is float:
        if name.endswith("_per_s"):
            check_rates(owner, **{name: value})
        elif name.endswith("_s"):
            check_seconds(owner, **{name: value})
        return
    if name in _INDICES:
        return check_indices(owner, **{name: value})
    origin, args = (kind, ()) if type(kind) is type else (get_origin(kind), get_args(kind))
    if origin is UnionType:  # with None
        if value is not None:
            _check_value(owner, name, args[0], value)
    elif origin is Literal:
        if value not in args:
            raise InvalidInputError(f"{owner}: unknown {name} {short_repr(value)}; choose from {', '.join(args)}")
    elif not isinstance(value, origin):
        of = f" of {getattr(args[0], '__name__', args[0])}" if origin is tuple else ""
        raise InvalidInputError(f"{owner}: {name}={short_repr(value)} must be a {origin.__name__}{of}")
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            _check_value(owner, f"{name}[{k}]", args[0], item)


def short_repr(value: object) -> str:
    """Return `repr(value)`, cut to a length that fits an error message."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
