"""The interface of a store, and the code that its implementations share.

A store copies groups of blocks to a tier and back, and lets compute wait for a whole group; it has no notion of stages.
The order of calls per ticket is `start_out`, `finish_out`, `start_in`, `finish_in`, then `free`. The last three may be
left out, and `start_in` and `finish_in` may be repeated. Only the calling thread allocates or frees device memory.
"""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ckptplan.core.errors import SwapError
from ckptplan.core.link import Tier
from ckptplan.core.ranges import Ranges
from ckptplan.runtime.observe.meter import OnCopy


class Space:
    """The resources that a store keeps open for its blocks (memory, a file, threads); closed with their last holder."""

    __slots__ = ("__weakref__", "areas")

    def __init__(self) -> None:
        self.areas: list[Any] = []  # `HostArea` objects


class Ticket:
    """A group of blocks on its way to, in, or back from a tier; its piece of the tier is taken as long as it is held.

    Attributes
    ----------
    sizes, offsets : sequence of int
        Size of each block, and its offset within the piece, in bytes.
    out_done, in_done
        Completion of the copy out, and of the last copy in: an event or a `Done`, depending on the store.
    sources : sequence of torch.Tensor
        What a worker thread copies out, so that it isn't this thread that frees them.
    """

    def __init__(self, sizes: Sequence[int], offsets: Sequence[int], extent: Extent, space: Space) -> None:
        self.sizes = sizes
        self.offsets = offsets
        self.nbytes = sum(sizes)
        self.offset = extent.offset
        self.extent: Extent | None = extent
        self.space: Space | None = space
        self.out_done: Any = None
        self.in_done: Any = None
        self.sources: Sequence[torch.Tensor] = ()

    def let_go(self) -> None:
        """Free the piece for other groups, as soon as no copy holds it either."""
        self.extent = self.space = None
        self.sources = ()


class Store:
    """The swap state machine's interface to a tier; this class copies nothing, for replays that only count bytes.

    Attributes
    ----------
    name : str
        Place of the bytes, for messages.
    on_copy : callable or None
        Called for each copy issued from now on.
    peak_bytes : int
        Most bytes that were in use at once.
    """

    name = "nowhere"
    on_copy: OnCopy | None = None
    peak_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the store holds now, used or not."""
        return 0

    @property
    def used_bytes(self) -> int:
        """Bytes of them in use now."""
        return 0

    def start_out(self, *sources: torch.Tensor, place: Hashable = None) -> Ticket:
        """Begin to copy contiguous tensors out; the caller keeps them until `finish_out`.

        Parameters
        ----------
        place : hashable, optional
            A group with the same place and size as an earlier one gets the same memory, unless that is still taken.
        """
        return Ticket([source.nbytes for source in sources], [0] * len(sources), Extent(0, 0), Space())

    def finish_out(self, ticket: Ticket) -> None:
        """Make compute wait until the whole group is copied out."""

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        """Begin to copy blocks back into `targets`, after the copy out is done.

        Parameters
        ----------
        parts : sequence of int, optional
            Indices of the blocks in the group; by default all, in order.

        Returns
        -------
        Completion of these copies, to be passed to `finish_in`.
        """

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        """Make compute wait for the copies in with completion `done`; by default those of the last `start_in`."""

    def free(self, ticket: Ticket) -> None:
        """Free the host bytes of the group once no copy uses them."""
        ticket.let_go()

    def lend(self) -> None:
        """Let stores that are made inside `handing_over` use this store's host memory too, if it is worth that."""

    def close(self) -> None:
        """End threads and free memory and files: now, or when the last block in use is freed."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as one dimension of bytes."""
    return (tensor if tensor.dim() == 1 else tensor.view(-1)).view(torch.uint8)


NULL_STORES: Mapping[Tier, Store] = {"host": Store(), "disk": Store()}


class Extent:
    """A piece of a linear area, taken as long as this object lives."""

    __slots__ = ("__weakref__", "offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size


_ENDLESS = 1 << 62
"""End of an area without a capacity."""


class Extents:
    """The pieces of one linear area. Thread-safe.

    A piece lies where an earlier piece of the same place and size was; otherwise it is placed first fit.

    A piece is free again when nothing holds its `Extent`. There is no call to free it, which an interrupt or an error
    could skip, or which the garbage collector could make in the middle of `take`. The weak references in `_taken` are
    the source of truth. Gaps and sums are derived from them, one change at a time, and computed from scratch after an
    exception has interrupted a change.

    Parameters
    ----------
    align : int
        Sizes are rounded up to multiples of this, in bytes.
    capacity : int, optional
        Size of the area in bytes; by default it has no end.
    """

    def __init__(self, align: int, capacity: int | None = None) -> None:
        self._align = align
        self._end = _ENDLESS if capacity is None else capacity
        self._taken: dict[int, tuple[int, int, weakref.ref[Extent]]] = {}  # id of the reference -> offset, size
        self._dead: collections.deque[weakref.ref[Extent]] = collections.deque()
        self._gaps = Ranges()
        self._used = 0
        self._places: dict[Hashable, tuple[int, int]] = {}  # offset, size
        self._learns = True  # whether new places are remembered
        self._unsure = True
        self._lock = threading.RLock()  # reentrant: an interrupt may skip a release in the same thread

    def size(self, nbytes: int) -> int:
        """Return `nbytes` rounded up to the alignment."""
        return -(-nbytes // self._align) * self._align

    def layout(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Return the offsets of blocks laid out one after the other, and the end of the last."""
        offsets, end = [], 0
        for nbytes in sizes:
            offsets.append(end)
            end += self.size(nbytes)
        return offsets, end

    def _alive(self) -> list[tuple[int, int, weakref.ref[Extent]]]:
        alive = [piece for piece in list(self._taken.values()) if piece[2]() is not None]
        return sorted(alive, key=lambda piece: piece[:2])

    @property
    def used(self) -> int:
        """Bytes that are taken now."""
        with self._lock:
            self._settle()
            return self._used

    def take(self, nbytes: int, place: Hashable = None) -> Extent | None:
        """Take a piece of `nbytes`; None if there is no gap of that size.

        Parameters
        ----------
        place : hashable, optional
            Remembered with its offset and size, for `again`. A place that comes with another size than before, or a
            new place after the area was filled before, means that other shapes begin. Then all places are forgotten,
            and pieces are taken first fit until the area is empty: the places of two layouts would overlap.
        """
        size = self.size(nbytes)
        with self._lock:
            self._settle()
            extent = self.again(nbytes, place)
            if extent is not None:
                return extent
            start = self._first_fit(size)
            if start is None:
                return None
            if place is not None:
                known = self._places.get(place)
                if known is None and self._learns:
                    self._places[place] = start, size
                elif known is None or known[1] != size:
                    self._places.clear()
                    self._learns = False
            return self._cut(start, size)

    def again(self, nbytes: int, place: Hashable) -> Extent | None:
        """Take the piece that `place` had before with this size; None if it had none or the piece is taken."""
        size = self.size(nbytes)
        with self._lock:
            self._settle()
            if not self._used:
                self._learns = not self._places
            start, known = self._places.get(place, (0, -1))
            return self._cut(start, size) if known == size else None

    def _first_fit(self, size: int) -> int | None:
        for begin, end in self._gaps.pairs:
            if end - begin >= size:
                return begin
        return None

    def _cut(self, start: int, size: int) -> Extent | None:
        """Take the piece from `start` of `size`; None if it isn't free."""
        self._unsure = True
        extent = None
        if self._gaps.remove(start, start + size):
            extent = Extent(start, size)
            reference = weakref.ref(extent, self._dead.append)
            self._taken[id(reference)] = start, size, reference
            self._used += size
        self._unsure = False
        return extent

    def _settle(self) -> None:
        """Turn the pieces that nothing holds any more into gaps."""
        if self._unsure:
            self._start_anew()
        while self._dead:
            self._unsure = True
            piece = self._taken.pop(id(self._dead.popleft()), None)
            if piece is not None:
                self._gaps.add(piece[0], piece[0] + piece[1])
                self._used -= piece[1]
            self._unsure = False

    def _start_anew(self) -> None:
        alive = self._alive()
        self._taken = {id(piece[2]): piece for piece in alive}
        edges = [0, *(edge for begin, size, _ in alive for edge in (begin, begin + size)), self._end]
        self._gaps = Ranges(zip(edges[::2], edges[1::2], strict=True))
        self._used = sum(size for _, size, _ in alive)
        self._unsure = False


class OfOneProcess(Store):
    """A store for the process that made it; its space is freed once it is closed and no ticket holds it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._space: Space | None = Space()

    def _issued(self, ticket: Ticket) -> Ticket:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return ticket

    @property
    def _foreign(self) -> bool:
        """Whether this is a copy in a forked process; bytes, threads and streams belong to the parent."""
        return os.getpid() != self._pid

    def _require_owner(self) -> None:
        if self._foreign:
            raise SwapError(
                f"the swap space belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: "
                "call remove() on the handle before the fork, or apply the plan in the new process"
            )

    def _open(self) -> Space:
        self._require_owner()
        if self._space is None:
            raise SwapError("the swap space is closed: remove() was called on its handle; apply the plan again")
        return self._space

    def close(self) -> None:
        self._space = None
