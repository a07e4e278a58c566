"""Pickles of plain data from untrusted files: dicts, lists, texts and numbers, within limits of memory.

Reading a pickle can run code, and a few bytes can make it take all memory (a memo of four billion places, a text that
claims 2**60 bytes) or crash the interpreter (tuples nested a million deep as a dict's key). So all instructions are
checked before any is executed: each must be known, each length must lie within the file, each place in the memo must be
the next one, tuples hold numbers only, and the number of objects is limited. For example, the instruction BINUNICODE8
with a length of 2**60 in a file of 100 bytes is an error at its first byte. Then Python's own reader, which still
refuses all classes and functions, builds the data.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.units import format_bytes

MOST_FILE_BYTES = 4 << 30
MOST_OBJECTS = 100_000_000  # each takes 60 bytes or more; a recorded entry has about ten
MOST_NUMBER_BYTES = 16  # addresses and sizes take 9 at most

# Names of the instructions that are read, in `pickletools`.
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OBJECTS = {"NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "LIST", "DICT"}
_OBJECTS |= {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES"}
_OBJECTS |= {"BINBYTES", "BINBYTES8", *_NUMBERS, *_TUPLES}
_OTHERS = {"PROTO", "FRAME", "MARK", "POP", "POP_MARK", "DUP", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"}
_OTHERS |= {"MEMOIZE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "STOP"}


def load_plain(path: str | Path) -> Any:
    """Return the data in a pickle file.

    Raises
    ------
    InvalidInputError
        If the file can't be read, is no pickle, is cut off, holds anything but plain data, or exceeds the limits.
    """
    try:
        with open(path, "rb") as file:
            size = Path(path).stat().st_size  # 0 for a pipe
            if size > MOST_FILE_BYTES:
                raise InvalidInputError(
                    f"{path} has {format_bytes(size)}, the limit is {format_bytes(MOST_FILE_BYTES)}; record with"
                    " max_entries=1000000, or with context=None"
                )
            data = file.read(MOST_FILE_BYTES)
    except OSError as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from error
    if not data:
        raise InvalidInputError(f"{path} is empty; the program may have ended before its snapshot was written")
    try:
        _check(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _REFUSED as error:
        raise InvalidInputError(
            f"{path} holds no plain data that can be read (no pickle, or cut off): {error}"
        ) from error


_REFUSED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,  # also texts that aren't UTF-8
    IndexError,
    KeyError,
    AttributeError,
    TypeError,
    OverflowError,
    MemoryError,
)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}; only dicts, lists, texts and numbers are read")


def _check(data: bytes) -> None:
    """Check all instructions up to the end of the pickle."""
    objects = memo = numbers = 0  # `numbers`: consecutive whole numbers made by the instructions just before
    argument: Any
    for instruction, argument, at in pickletools.genops(data):  # a ValueError for lengths beyond the end
        name = instruction.name
        if name in _OBJECTS:
            objects += 1
            if objects > MOST_OBJECTS:
                raise pickle.UnpicklingError(
                    f"more than {MOST_OBJECTS} objects; record with max_entries=1000000, or with context=None"
                )
        elif name not in _OTHERS:
            raise pickle.UnpicklingError(
                f"instruction {name} at byte {at}; only dicts, lists, texts and numbers are read"
            )
        if name == "FRAME":  # it may begin between any two instructions
            continue
        if name == "LONG_BINPUT" and argument > memo + 256:  # BINPUT writes the places below 256
            raise pickle.UnpicklingError(f"at byte {at} place {argument} of the memo is written, after {memo} others")
        memo += name in ("MEMOIZE", "LONG_BINPUT")
        if numbers < _TUPLES.get(name, 0):
            raise pickle.UnpicklingError(f"the tuple at byte {at} holds other things than numbers")
        if name not in _NUMBERS:
            numbers = 0
            continue
        numbers += 1
        if argument.bit_length() > 8 * MOST_NUMBER_BYTES:
            raise pickle.UnpicklingError(
                f"the number at byte {at} has {argument.bit_length()} bits, the limit is {8 * MOST_NUMBER_BYTES}"
            )
