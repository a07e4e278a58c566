"""Random generators that a stage may draw from besides PyTorch's own: Python's, numpy's, those of modules.

NOTE [Generators' memory]
Each call of a stage compares the states of the global generators of Python and numpy before and after its forward.
Their `getstate` and `get_state` take tens of microseconds, since they convert 624 words to Python numbers one by one.
So the state is read directly from the memory of the generator object: the 624 words, the position, and the cached
normal number, if any (drawing that number changes neither words nor position).

Example: `random.random()` takes two of the 624 words. The position in memory goes from 10 to 12, say, the words stay,
and comparing 2500 bytes before and after finds the difference. `random.gauss(0, 1)` computes two normal numbers and
caches one; the next call returns the cached one and changes `gauss_next` alone, so `gauss_next` is compared as well.

The memory layout is checked when this module is imported: a state read from memory must equal the one that the
generator returns. In a version of Python or numpy with another layout, `getstate` and `get_state` are called instead.
"""

from __future__ import annotations

import ctypes
import operator
import random
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
"""Types of generators that a module may hold in an attribute."""


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


class Access(NamedTuple):
    """Getter and setter of a generator's state, and a comparison of two states."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    same: Callable[[Any, Any], bool] = _equal


def _access(generator: Any) -> Access:
    if isinstance(generator, random.SystemRandom):  # has no state; such a stage isn't recomputed
        return Access(lambda: None, lambda state: None)
    if isinstance(generator, torch.Generator):
        return Access(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return Access(generator.getstate, generator.setstate, operator.eq)
    if isinstance(generator, np.random.RandomState):
        return Access(generator.get_state, generator.set_state)
    bits = generator.bit_generator
    return Access(lambda: bits.state, lambda state: setattr(bits, "state", state))


def reseed(generators: Collection[Any], seed: int) -> None:
    """Seed PyTorch's, Python's and numpy's global generators, and the given ones."""
    torch.manual_seed(seed)
    for generator in (random, np.random, *generators):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(seed).state  # type: ignore[call-arg]
        else:
            generator.seed(seed)


_WORDS = 624  # in the state of a Mersenne twister
_BYTES = 4 * (_WORDS + 1)


def _memory(address: int, count: int) -> Any:
    """Return a view of `count` bytes of memory at `address`; its `raw` reads their present values."""
    return (ctypes.c_char * count).from_address(address)


def pythons(generator: random.Random) -> Access:
    """Return access to a `random.Random`, through its memory where possible (NOTE [Generators' memory])."""
    plain = _access(generator)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return plain
    words = _memory(id(generator) + object.__basicsize__, _BYTES)

    def get() -> tuple[bytes, float | None]:
        return words.raw, generator.gauss_next  # type: ignore[attr-defined]

    def decoded(state: tuple[bytes, float | None]) -> tuple[Any, ...]:
        position, *words = struct.unpack(f"i{_WORDS}I", state[0])
        return random.Random.VERSION, (*words, position), state[1]

    if decoded(get()) != generator.getstate():
        return plain
    return Access(get, lambda state: generator.setstate(decoded(state)), operator.eq)


def _gauss_offset() -> int | None:
    """Return the offset of the cached normal number and its flag in a `RandomState`; None if it isn't found."""
    if sys.implementation.name != "cpython":
        return None
    probe, mark, found = np.random.RandomState(0), 0.8414709848078965, set()
    words = probe.get_state()[1]  # type: ignore[index]
    for waits in (0, 1):
        probe.set_state(("MT19937", words, 1, waits, mark))
        raw = _memory(id(probe), np.random.RandomState.__basicsize__).raw
        found.add(raw.find(struct.pack("iid", waits, 0, mark)))
    return found.pop() if len(found) == 1 and -1 not in found else None


_GAUSS_OFFSET = _gauss_offset()


def numpys(generator: np.random.RandomState) -> Access:
    """Return access to a `numpy.random.RandomState`, through its memory where possible (NOTE [Generators' memory])."""
    plain = _access(generator)
    if type(generator) is not np.random.RandomState or _GAUSS_OFFSET is None:
        return plain
    gauss = _memory(id(generator) + _GAUSS_OFFSET, 16)
    known: list[Any] = [None, None]  # the bit generator, and a view of its words in memory

    def get() -> tuple[Any, bytes, Any]:
        bits = generator._bit_generator  # type: ignore[attr-defined]
        if bits is not known[0]:
            raw = type(bits) is np.random.MT19937  # `np.random.set_bit_generator` may have set another kind
            known[:] = bits, _memory(bits.ctypes.state_address, _BYTES) if raw else None
        words = known[1]
        return bits.state if words is None else words.raw, gauss.raw, bits

    def decoded(state: tuple[Any, bytes, Any]) -> dict[str, Any]:
        words, normal, _ = state
        if isinstance(words, bytes):
            *key, position = struct.unpack(f"{_WORDS}Ii", words)
            words = {
                "bit_generator": "MT19937",
                "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
            }
        waits, _, number = struct.unpack("iid", normal)
        return {**words, "has_gauss": waits, "gauss": number}

    def put(state: tuple[Any, bytes, Any]) -> None:
        if generator._bit_generator is not state[2]:  # type: ignore[attr-defined]
            generator.__init__(state[2])  # type: ignore[misc]
        generator.set_state(decoded(state))

    if not _equal(decoded(get()), generator.get_state(legacy=False)):
        return plain
    return Access(get, put, _same_bits)


def _same_bits(a: tuple[Any, bytes, Any], b: tuple[Any, bytes, Any]) -> bool:
    return a[2] is b[2] and a[1] == b[1] and (a[0] == b[0] if type(a[0]) is bytes else _equal(a[0], b[0]))


_PROCESS = (
    pythons(random.getstate.__self__),  # type: ignore[attr-defined]
    numpys(np.random.get_state.__self__),  # type: ignore[attr-defined]
)


class SystemDraws:
    """Context that records whether code inside draws from the system's entropy through `random` or `secrets`.

    Attributes
    ----------
    any : bool
        Whether it did.
    """

    def __init__(self) -> None:
        self.any = False
        self._former: list[Callable[[int], bytes]] = []

    def restart(self) -> None:
        """Set `any` to False."""
        self.any = False

    def __enter__(self) -> None:
        self._former.append(random._urandom)  # type: ignore[attr-defined]
        random._urandom = self._draw  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        random._urandom = self._former.pop()  # type: ignore[attr-defined]

    def _draw(self, count: int) -> bytes:
        self.any = True
        return self._former[-1](count)


class Generators:
    """The states of Python's and numpy's global generators, and of the generators `held`, at construction."""

    def __init__(self, held: Collection[Any] = ()) -> None:
        accesses = (*_PROCESS, *map(_access, {id(g): g for g in held}.values())) if held else _PROCESS
        self._states = [(access, access.get()) for access in accesses]

    def settle(self) -> None:
        """Drop the generators that the forward, which has just ended, didn't draw from."""
        self._states = [(access, state) for access, state in self._states if not access.same(access.get(), state)]

    @property
    def drew(self) -> bool:
        """Whether the forward drew from any of the generators; valid after `settle`."""
        return bool(self._states)

    def put(self) -> Callable[[], None]:
        """Set the generators to the stored states; return a function that sets them back to their present ones."""
        if not self._states:
            return lambda: None
        now = [(access, access.get()) for access, _ in self._states]
        for access, state in self._states:
            access.put(state)

        def back() -> None:
            for access, state in now:
                access.put(state)

        return back
