"""The arena of a tier: linear memory whose pieces swapped bytes take."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ckptplan.core.units import format_bytes


class Extent:
    """A piece of an arena, taken as long as this object lives; it keeps the arena open too."""

    __slots__ = ("__weakref__", "arena", "offset")

    def __init__(self, arena: Arena, offset: int) -> None:
        self.arena, self.offset = arena, offset


class Arena:
    """Memory of one tier, in one block; further blocks are added for bytes that weren't planned. Thread-safe.

    Groups leave in the plan's order and lie one behind the other, so that each step puts them at the same offsets. What
    wasn't planned (larger groups, graphs of several steps alive) goes to the first gap that is large enough, and if
    there is none the arena grows.

    A piece is free again when nothing holds its `Extent`. There is no call to free it, which an interrupt or an error
    could skip, or which the garbage collector could make in the middle of `take`.

    Parameters
    ----------
    align : int
        Sizes are rounded up to multiples of this, in bytes.

    Attributes
    ----------
    blocks : list of (int, tensor or None)
        End of each block, and its memory if it isn't a file. No piece lies across an end.
    streams : set
        The streams that copy to and from the memory: it is written and freed behind all of them.
    can_lock : bool
        Whether page-locking of its memory hasn't failed.
    """

    def __init__(self, align: int) -> None:
        self.blocks: list[tuple[int, Any]] = []
        self.streams: set[Any] = set()
        self.can_lock = True
        self._align = align
        self._taken: list[tuple[int, int, weakref.ref[Extent]]] = []  # begin and end, in order
        self._lock = threading.RLock()  # reentrant: an interrupt may skip a release in the same thread

    def rounded(self, nbytes: int) -> int:
        """Return `nbytes` rounded up to the alignment."""
        return -(-nbytes // self._align) * self._align

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks[-1][0] if self.blocks else 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken now."""
        return sum(end - begin for begin, end, extent in self._taken if extent() is not None)

    @property
    def in_pieces(self) -> str:
        """Text on its free memory for a message that there is no piece as large as wanted."""
        free_bytes = self.reserved_bytes - self.used_bytes
        return f", and {format_bytes(free_bytes)} are free in pieces that are too small" if free_bytes else ""

    def take(self, nbytes: int, grow: Callable[[Arena, int, int], int]) -> Extent:
        """Take a piece of `nbytes`.

        Parameters
        ----------
        grow : callable
            Called with the arena, the begin of its last gap and the bytes wanted: adds memory, and returns where the
            piece begins.
        """
        size = self.rounded(nbytes)
        with self._lock:
            taken = self._taken = [piece for piece in self._taken if piece[2]() is not None]
            start = taken[-1][1] if taken else 0
            if not self.blocks or start + size > self.blocks[0][0]:
                start = self._first_gap(size)
                if start + size > self.reserved_bytes:
                    start = grow(self, start, size)
            extent = Extent(self, start)
            bisect.insort(taken, (start, start + size, weakref.ref(extent)), key=lambda piece: piece[0])
            return extent

    def _first_gap(self, size: int) -> int:
        """Return the begin of the first gap of `size`, or of the last one."""
        start = 0
        for begin, end in sorted([piece[:2] for piece in self._taken] + [(end, end) for end, _ in self.blocks[:-1]]):
            if begin - start >= size:
                break
            start = end
        return start
