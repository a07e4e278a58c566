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

# Instruction -> bytes of its argument.
_ARGUMENT = {pickle.PROTO: 1, pickle.FRAME: 8, pickle.BINGET: 1, pickle.LONG_BINGET: 4, pickle.BINPUT: 1}
_ARGUMENT |= dict.fromkeys((pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP), 0)
_ARGUMENT |= dict.fromkeys((pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.MEMOIZE), 0)
_MAKES = {pickle.NONE: 0, pickle.NEWTRUE: 0, pickle.NEWFALSE: 0, pickle.BINFLOAT: 8}
_MAKES |= dict.fromkeys((pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.LIST, pickle.DICT), 0)
_NUMBERS = {pickle.BININT: 4, pickle.BININT1: 1, pickle.BININT2: 2}
# Instruction -> bytes of its length, which is followed by that many bytes.
_TEXTS = {pickle.SHORT_BINUNICODE: 1, pickle.BINUNICODE: 4, pickle.BINUNICODE8: 8, pickle.SHORT_BINSTRING: 1}
_TEXTS |= {pickle.BINSTRING: 4, pickle.SHORT_BINBYTES: 1, pickle.BINBYTES: 4, pickle.BINBYTES8: 8}
_LONGS = {pickle.LONG1: 1, pickle.LONG4: 4}
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}

_OTHER, _SKIP, _MAKE, _NUMBER, _TEXT, _LONG, _TUPLE = range(7)
_KINDS = [(_OTHER, 0)] * 256
for _kind, _table in enumerate((_ARGUMENT, _MAKES, _NUMBERS, _TEXTS, _LONGS, _TUPLES), start=_SKIP):
    for _code, _size in _table.items():
        _KINDS[_code[0]] = (_kind, _size)
_FRAME, _LONG_BINPUT, _MEMOIZE, _STOP = (
    code[0] for code in (pickle.FRAME, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.STOP)
)


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
        raise InvalidInputError(f"{path} holds no plain data that can be read: {error}") from error


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
    at, size = 0, len(data)
    objects = memo = numbers = 0  # `numbers`: consecutive whole numbers made by the instructions just before
    kinds = _KINDS
    while at < size and objects <= MOST_OBJECTS:
        kind, n = kinds[data[at]]
        if kind == _SKIP:
            code = data[at]
            memo += code == _MEMOIZE
            if code != _FRAME:  # a frame may begin between any two instructions
                numbers = 0
            at += 1 + n
            continue
        if kind == _NUMBER:
            objects += 1
            numbers += 1
            at += 1 + n
            continue
        objects += 1
        if kind in (_TEXT, _LONG):
            length = int.from_bytes(data[at + 1 : at + 1 + n], "little")
            if length > size - at - 1 - n:
                left = size - at - 1 - n
                raise pickle.UnpicklingError(f"the text at byte {at} claims {length} bytes, {left} are left")
            if kind == _LONG and length > MOST_NUMBER_BYTES:
                raise pickle.UnpicklingError(f"the number at byte {at} has {length} bytes, the limit is 16")
            numbers = numbers + 1 if kind == _LONG else 0
            at += 1 + n + length
        elif kind == _MAKE:
            numbers = 0
            at += 1 + n
        elif kind == _TUPLE:
            if numbers < n:
                raise pickle.UnpicklingError(f"the tuple at byte {at} holds other things than numbers")
            numbers = 0
            at += 1
        else:
            objects -= 1
            if data[at] == _STOP:
                return
            if data[at] != _LONG_BINPUT:
                raise pickle.UnpicklingError(_unknown(data[at : at + 1], at))
            place = int.from_bytes(data[at + 1 : at + 5], "little")
            if place > memo + 256:  # BINPUT writes the places below 256
                raise pickle.UnpicklingError(f"at byte {at} place {place} of the memo is written, after {memo} others")
            memo += 1
            at += 5
    if objects > MOST_OBJECTS:
        raise pickle.UnpicklingError(
            f"more than {MOST_OBJECTS} objects; record with max_entries=1000000, or with context=None"
        )
    raise pickle.UnpicklingError(f"it ends after {size} bytes without an end of the pickle; the file was cut off")


def _unknown(code: bytes, at: int) -> str:
    name = next((known.name for known in pickletools.opcodes if known.code == code.decode("latin-1")), None)
    if name is None:
        return f"it is no pickle: byte {at} is 0x{code.hex()}"
    return f"instruction {name} at byte {at}; only dicts, lists, texts and numbers are read"
