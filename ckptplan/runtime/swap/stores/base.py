"""The interface of a store, and the code that its implementations share.

A store copies groups of blocks to a tier and back, and lets compute wait for a whole group; it has no notion of stages.
The order of calls per ticket is `start_out`, `finish_out`, `start_in`, `finish_in`, then `free`. The last three may be
left out, and `start_in` and `finish_in` may be repeated. Only the calling thread allocates or frees device memory.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptplan.core.errors import SwapError
from ckptplan.core.link import Tier
from ckptplan.runtime.observe.meter import OnCopy, Way
from ckptplan.runtime.swap.stores.arena import Arena, Extent
from ckptplan.tensors.accelerator import synchronize


class Ticket:
    """A group of blocks on its way to, in, or back from a tier; its piece of the arena is taken as long as it is held.

    Attributes
    ----------
    sizes, offsets : sequence of int
        Size of each block, and its offset in the arena, in bytes.
    out_done, in_done
        Completion of the copy out, and of the last copy in: an event or a `Job`, depending on the store.
    sources : sequence of torch.Tensor
        What a worker thread copies out, so that it isn't this thread that frees them.
    """

    def __init__(self, sizes: Sequence[int], offsets: Sequence[int], extent: Extent | None = None) -> None:
        self.sizes = sizes
        self.offsets = offsets
        self.nbytes = sum(sizes)
        self.extent: Any = extent
        self.out_done: Any = None
        self.in_done: Any = None
        self.sources: Sequence[torch.Tensor] = ()


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
    synchronous : bool
        Wait on the host for every copy as soon as it is issued, for finding faults.
    """

    name = "nowhere"
    synchronous = False
    on_copy: OnCopy | None = None
    peak_bytes = 0
    _arena: Arena | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the store holds now, used or not."""
        return 0 if self._arena is None else self._arena.reserved_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of them in use now."""
        return 0 if self._arena is None else self._arena.used_bytes

    def start_out(self, *sources: torch.Tensor) -> Ticket:
        """Begin to copy contiguous tensors out; the caller keeps them until `finish_out`."""
        return Ticket([source.nbytes for source in sources], [0] * len(sources))

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
        ticket.extent, ticket.sources = None, ()

    def lend(self) -> None:
        """Let stores that are made inside `handing_over` use this store's host memory too, if it is worth that."""

    def close(self) -> None:
        """End threads and free memory and files: now, or when the last block in use is freed."""
        self._arena = None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as one dimension of bytes."""
    return (tensor if tensor.dim() == 1 else tensor.view(-1)).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, which the caller holds, as bytes.

    `numpy()` would do, but its storage couldn't be resized any more.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


NULL_STORES: Mapping[Tier, Store] = {"host": Store(), "disk": Store()}


class ArenaStore(Store):
    """A store with memory, for the process that made it; freed once it is closed and no ticket or copy holds it.

    Parameters
    ----------
    limit_bytes : int or None
        Most bytes of the arena.
    """

    def __init__(self, device: torch.device, arena: Arena, limit_bytes: int | None) -> None:
        self._device = device
        self._arena = arena
        self._limit = limit_bytes
        self._pid = os.getpid()

    def _grow(self, arena: Arena, start: int, size: int) -> int:
        """Add memory for a piece of `size`, if possible from `start` on; return where the piece begins.

        Raises
        ------
        SwapFullError
            If that is above the limit, or there is no memory.
        """
        raise NotImplementedError

    def _copy(self, way: Way, ticket: Ticket, tensors: Sequence[torch.Tensor], parts: Sequence[int]) -> Any:
        """Issue the copies of blocks of a group, out of or into `tensors`; return their completion."""
        raise NotImplementedError

    def _wait(self, way: Way, ticket: Ticket, done: Any) -> None:
        """Make compute wait for copies of a group."""
        raise NotImplementedError

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

    def start_out(self, *sources: torch.Tensor) -> Ticket:
        self._require_owner()
        arena = self._arena
        if arena is None:
            raise SwapError("the swap space is closed: remove() was called on its handle; apply the plan again")
        sizes = [source.nbytes for source in sources]
        extent = arena.take(sum(map(arena.rounded, sizes)), self._grow)
        offsets = list(itertools.accumulate(map(arena.rounded, sizes[:-1]), initial=extent.offset))
        ticket = Ticket(sizes, offsets, extent)
        self.peak_bytes = max(self.peak_bytes, arena.used_bytes)
        ticket.out_done = self._copy("out", ticket, sources, range(len(sources)))
        if self.synchronous:
            self.finish_out(ticket)
            synchronize(self._device)
        return ticket

    def finish_out(self, ticket: Ticket) -> None:
        self._require_owner()
        self._wait("out", ticket, ticket.out_done)
        ticket.sources = ()

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        self._require_owner()
        parts = range(len(targets)) if parts is None else parts
        ticket.in_done = self._copy("in", ticket, targets, parts)
        if self.synchronous:
            self.finish_in(ticket)
            synchronize(self._device)
        return ticket.in_done

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        self._require_owner()
        self._wait("in", ticket, ticket.in_done if done is None else done)
