"""What the swap state machine needs of a tier, and what its stores have in common.

A store moves bytes and says when it is done; it knows nothing of stages. The order of calls per ticket is
`start_out`, `finish_out`, `start_in`, `finish_in`, then `free`; the last three may be left out or, for `start_in` and
`finish_in`, come again. Only the calling thread allocates or frees device memory.
"""

from __future__ import annotations

import abc
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ckptplan.core.chain import Tier
from ckptplan.core.errors import SwapError
from ckptplan.runtime.meter import OnCopy


class Space:
    """What a store keeps open for its blocks (memory, a file, threads): ended when nobody holds it."""

    __slots__ = ("__weakref__",)


class Ticket:
    """One block on its way to, in, or back from a tier; the block is taken as long as this holds it."""

    def __init__(self, nbytes: int, extent: Extent, space: Space) -> None:
        self.nbytes = nbytes
        self.offset = extent.offset
        self.extent: Extent | None = extent
        self.space: Space | None = space
        self.out_done: Any = None
        self.in_done: Any = None

    def let_go(self) -> None:
        """Leave the block to others, once no copy holds it either."""
        self.extent = self.space = None


class Store(Protocol):
    """What the swap state machine needs of a tier; `on_copy`, if set, is told of copies issued from then on."""

    on_copy: OnCopy | None

    @property
    def name(self) -> str:
        """Where the bytes are, for messages."""

    @property
    def reserved_bytes(self) -> int:
        """What the tier holds for swapped bytes now, used or not."""

    @property
    def used_bytes(self) -> int:
        """What of it is in use now."""

    @property
    def peak_bytes(self) -> int:
        """The most of it that was in use at once."""

    def start_out(self, source: torch.Tensor) -> Ticket:
        """Begin to copy a one-dimensional contiguous tensor out; the caller keeps `source` until `finish_out`."""

    def finish_out(self, ticket: Ticket) -> None:
        """Make compute wait until the copy out is done."""

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        """Begin to copy the bytes back into `target`, after the copy out is done."""

    def finish_in(self, ticket: Ticket) -> None:
        """Make compute wait until the copy in is done."""

    def free(self, ticket: Ticket) -> None:
        """Give the host bytes back once no copy touches them."""

    def close(self) -> None:
        """End threads, give memory and files back: now, or when the last block that is still in use is freed."""


class NullStore:
    """Moves nothing: for replays that only count bytes."""

    name = "nowhere"
    on_copy: OnCopy | None = None
    reserved_bytes = used_bytes = peak_bytes = 0

    def start_out(self, source: torch.Tensor) -> Ticket:
        return Ticket(source.nbytes, Extent(0, 0), Space())

    def finish_out(self, ticket: Ticket) -> None: ...

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None: ...

    def finish_in(self, ticket: Ticket) -> None: ...

    def free(self, ticket: Ticket) -> None: ...

    def close(self) -> None: ...


NULL_STORES: Mapping[Tier, Store] = {"host": NullStore(), "disk": NullStore()}


class Extent:
    """A piece of a linear area, taken as long as this object lives."""

    __slots__ = ("__weakref__", "offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size


class Extents:
    """The pieces of one linear area: first fit in address order. Thread-safe.

    A piece is free again when nobody holds its `Extent`: there is no call to give it back that an interrupt or an error
    could skip, or that the garbage collector could make in the middle of `take`.

    Parameters
    ----------
    align : int
        Sizes are multiples of it.
    capacity : int, optional
        Where the area ends.
    """

    def __init__(self, align: int, capacity: int | None = None) -> None:
        self._align = align
        self._capacity = capacity
        self._taken: list[tuple[int, int, weakref.ref[Extent]]] = []  # (offset, size, whose), by offset
        self._lock = threading.RLock()  # its thread gets it again, should an interrupt have kept it from releasing

    def size(self, nbytes: int) -> int:
        """`nbytes` as they are taken."""
        return -(-nbytes // self._align) * self._align

    def _alive(self) -> list[tuple[int, int, weakref.ref[Extent]]]:
        return [piece for piece in self._taken if piece[2]() is not None]

    @property
    def used(self) -> int:
        """Bytes taken now."""
        return sum(size for _, size, _ in self._alive())

    def take(self, nbytes: int) -> Extent | None:
        """A piece of `nbytes`; None if there is none before the end."""
        size = self.size(nbytes)
        with self._lock:
            taken = self._alive()
            start, place = 0, len(taken)
            for i, (offset, held, _) in enumerate(taken):
                if offset - start >= size:
                    place = i
                    break
                start = offset + held
            if self._capacity is not None and start + size > self._capacity:
                return None
            extent = Extent(start, size)
            taken.insert(place, (start, size, weakref.ref(extent)))
            self._taken = taken
            return extent


class OfOneProcess(abc.ABC):
    """A store that works in the process that made it, and whose space goes when it is closed and no ticket holds it."""

    on_copy: OnCopy | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._space: Space | None = Space()
        self._peak = 0

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def _issued(self, ticket: Ticket) -> Ticket:
        self._peak = max(self._peak, self.used_bytes)
        return ticket

    @property
    def _foreign(self) -> bool:
        """Whether this is a copy in a forked process, whose bytes, threads and streams are the other's."""
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
