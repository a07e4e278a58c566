"""A tier in page-locked host memory, copied to and from on side streams."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapFullError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.accelerator import own_module, timing_event
from ckptplan.runtime.observe.meter import Way
from ckptplan.runtime.swap.stores.areas import CUDA_ALIGN, KEPT, HostArea
from ckptplan.runtime.swap.stores.base import Extent, OfOneProcess, Ticket, bytes_of

_NUMBERS = itertools.count()


class PinnedTicket(Ticket):
    """A ticket with the host memory of each block, and the last copies of its area (`HostArea.uses`)."""

    hosts: Sequence[torch.Tensor]
    uses: dict[tuple[int, Way], Any]


class PinnedStore(OfOneProcess):
    """Swaps CUDA tensors to page-locked host memory on two side streams.

    An area is ordinary memory registered with CUDA at its exact size, since PyTorch's own pinned allocator rounds up to
    powers of two. Block sizes are multiples of `CUDA_ALIGN`. If the areas are full (more graphs are alive than
    planned), another one is added, of at least a quarter of the bytes held so far. `limit_bytes` bounds their sum. All
    are freed with `close` and the last ticket, or passed on to the next store (`lend`, `keep_pinned_memory`).

    Streams: a group's copies out wait for the compute stream of the caller. At the release point the compute stream
    waits for all of them with one event, so the device blocks can be reused on that stream without `record_stream`.
    Copies in wait for the compute stream, on which their targets were allocated, and for their group's copies out.
    Host memory that is reused is written only after the copies that used it. So copies out wait for all copies in that
    were issued before them, and for the copies out of an earlier store of the memory, whose graphs may be gone.
    """

    name = "the host memory for swapping"

    def __init__(self, device: torch.device, *, capacity_bytes: int, limit_bytes: int | None = None) -> None:
        super().__init__()
        self._device = device
        self._limit = limit_bytes
        self._own = own_module(device)
        self._out = self._own.Stream(device)
        self._in = self._own.Stream(device)
        self._number = next(_NUMBERS)
        self._waited: dict[tuple[int, int, Way], Any] = {}  # area, store, direction -> last copy waited for
        needed = max(capacity_bytes, CUDA_ALIGN)
        try:
            while (held := self.reserved_bytes) < needed:
                self._grow(needed - held, exactly=True)
        except SwapFullError as error:
            raise InvalidInputError(str(error)) from error

    @property
    def reserved_bytes(self) -> int:
        return sum(area.nbytes for area in self._areas)

    @property
    def used_bytes(self) -> int:
        return sum(area.extents.used for area in self._areas)

    @property
    def _areas(self) -> list[HostArea]:
        """The areas; they belong to the store's space, which its tickets hold too."""
        return [] if self._space is None else self._space.areas

    def lend(self) -> None:
        KEPT.add(self._areas)

    def close(self) -> None:
        self.lend()
        super().close()

    def _grow(self, nbytes: int, *, exactly: bool = False) -> None:
        """Add an area of at least `nbytes`, or of a quarter of the bytes held if that is more and within the limit.

        With `exactly`, add an area kept by `keep_pinned_memory`, which may be smaller, or a new one of `nbytes`.
        """
        held = self.reserved_bytes
        room = None if self._limit is None else self._limit - held
        if room is not None and nbytes > room:
            raise SwapFullError(
                f"swapping needs {format_bytes(held + nbytes)} of pinned host memory, the limit is "
                f"{format_bytes(self._limit or 0)}; raise host_gb="
            )
        if exactly:
            area = KEPT.take(nbytes, room)
        else:
            area, nbytes = None, max(nbytes, held // 4 if room is None else min(held // 4, room))
        if area is None:
            nbytes = -(-nbytes // CUDA_ALIGN) * CUDA_ALIGN
            area = HostArea(nbytes, self._device, warn=all(area.is_locked for area in self._areas))
        area.devices.add(self._device)
        self._areas.append(area)

    def _take(self, nbytes: int, place: Hashable) -> tuple[Extent, HostArea]:
        """Take a piece within one area, a new area if necessary; return piece and area."""
        areas = self._areas
        for again in (True, False):
            for area in areas:
                extent = (area.extents.again if again else area.extents.take)(nbytes, place)
                if extent is not None:
                    return extent, area
        self._grow(nbytes)
        extent = areas[-1].extents.take(nbytes, place)
        assert extent is not None, "a new area holds what it was made for"
        return extent, areas[-1]

    def start_out(self, *sources: torch.Tensor, place: Hashable = None) -> Ticket:
        space = self._open()
        compute = self._own.current_stream(self._device)
        sizes = [source.nbytes for source in sources]
        offsets, nbytes = self._areas[0].extents.layout(sizes)
        extent, area = self._take(nbytes, place)
        ticket = PinnedTicket(sizes, offsets, extent, space)
        begins = (extent.offset + offset for offset in offsets)
        ticket.uses = area.uses
        ticket.hosts = [area.memory[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        self._out.wait_stream(compute)
        for (store, way), use in area.uses.items():
            before = (store, way) != (self._number, "out")  # own copies out are on one stream, in order
            if before and self._waited.get((id(area), store, way)) is not use:
                self._out.wait_event(use)
                self._waited[id(area), store, way] = use
        with self._own.stream(self._out):
            begin = self._timing()
            for host, source in zip(ticket.hosts, sources, strict=True):
                host.copy_(bytes_of(source), non_blocking=True)
            area.uses[self._number, "out"] = ticket.out_done = self._out.record_event()
            self._tell("out", ticket.nbytes, begin)
        return self._issued(ticket)

    def _timing(self) -> Any:
        """Return an event on the current (copying) stream; None if no times are needed."""
        return None if self.on_copy is None else timing_event(self._device)

    def _tell(self, way: Way, nbytes: int, begin: Any) -> None:
        if self.on_copy is not None and begin is not None:
            self.on_copy(way, nbytes, begin, self._timing())

    def finish_out(self, ticket: Ticket) -> None:
        self._require_owner()
        self._own.current_stream(self._device).wait_event(ticket.out_done)

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        self._require_owner()
        assert isinstance(ticket, PinnedTicket)
        hosts = ticket.hosts if parts is None else [ticket.hosts[part] for part in parts]
        self._in.wait_stream(self._own.current_stream(self._device))
        self._in.wait_event(ticket.out_done)
        with self._own.stream(self._in):
            begin = self._timing()
            for target, host in zip(targets, hosts, strict=True):
                bytes_of(target).copy_(host, non_blocking=True)
            ticket.uses[self._number, "in"] = ticket.in_done = self._in.record_event()
            self._tell("in", sum(target.nbytes for target in targets), begin)
        return ticket.in_done

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        self._require_owner()
        self._own.current_stream(self._device).wait_event(ticket.in_done if done is None else done)
