"""A tier in page-locked host memory, copied to and from on side streams."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.meter import Way
from ckptplan.runtime.stores.base import Extent, Extents, OfOneProcess, Ticket, bytes_of

CUDA_ALIGN = 512
"""What the device's allocator rounds to: a plan's host bytes, summed over its storages, are exactly what is taken."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


class PinnedTicket(Ticket):
    """With the memory of each block."""

    hosts: Sequence[torch.Tensor]


class PinnedStore(OfOneProcess):
    """Swaps CUDA tensors to page-locked host memory on two side streams.

    The area is ordinary memory registered with CUDA at its exact size: PyTorch's own pinned allocator rounds up to
    powers of two. Blocks are multiples of `CUDA_ALIGN`, of any size. An area that overflows (more graphs alive than the
    plan knew) gets a further one, of at least a quarter of what there is; `limit_bytes` bounds them all. All are given
    back by `close`.

    Streams: a group's copies out wait for the compute stream of its caller; the compute stream waits for all of them at
    the release point, by one event, so the blocks are free for reuse on that stream and no `record_stream` is needed.
    Copies in wait for the compute stream, on which their targets were allocated, and for their group's copies out.
    Memory that is taken again is written only after the copy in that read it last: copies out wait for all copies in
    that were issued before them.
    """

    def __init__(self, device: torch.device, *, capacity_bytes: int, limit_bytes: int | None = None) -> None:
        super().__init__()
        self._device = device
        self._limit = limit_bytes
        self._areas: list[tuple[Extents, torch.Tensor]] = []
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._last_read: Any = None
        # Also when nobody calls close(): memory that is freed while registered poisons its next owner.
        self._locked: list[torch.Tensor] = []
        self._close = weakref.finalize(self._space, _close_pinned, self._pid, self._locked, self._areas, device)
        try:
            self._grow(max(capacity_bytes, CUDA_ALIGN))
        except SwapError as error:
            raise InvalidInputError(str(error)) from error

    @property
    def name(self) -> str:
        return "the host memory for swapping"

    @property
    def reserved_bytes(self) -> int:
        return sum(area.numel() for _, area in self._areas)

    @property
    def used_bytes(self) -> int:
        return sum(extents.used for extents, _ in self._areas)

    def _grow(self, nbytes: int) -> None:
        """Add an area of at least `nbytes`, up to a quarter of what there is."""
        held = self.reserved_bytes
        room = None if self._limit is None else self._limit - held
        if room is not None and nbytes > room:
            raise SwapError(
                f"swapping needs {format_bytes(held + nbytes)} of pinned host memory, the limit is "
                f"{format_bytes(self._limit or 0)}; raise host_gb="
            )
        nbytes = max(nbytes, held // 4 if room is None else min(held // 4, room))
        nbytes = -(-nbytes // CUDA_ALIGN) * CUDA_ALIGN
        area, locked = host_area(nbytes, self._device, warn=len(self._locked) == len(self._areas))
        if locked:
            self._locked.append(area)
        self._areas.append((Extents(CUDA_ALIGN, nbytes), area))

    def _take(self, nbytes: int, place: Hashable) -> tuple[Extent, torch.Tensor]:
        """A piece within one area, a new one if need be, and the area's memory."""
        for extents, area in self._areas:
            extent = extents.again(nbytes, place)
            if extent is not None:
                return extent, area
        piece = _piece(self._areas, nbytes, place)
        if piece is None:
            self._grow(nbytes)
            piece = _piece(self._areas[-1:], nbytes, place)
        assert piece is not None, "a new area holds what it was made for"
        return piece

    def start_out(self, *sources: torch.Tensor, place: Hashable = None) -> Ticket:
        space = self._open()
        compute = torch.cuda.current_stream(self._device)
        sizes = [source.nbytes for source in sources]
        offsets, nbytes = self._areas[0][0].layout(sizes)
        extent, area = self._take(nbytes, place)
        ticket = PinnedTicket(sizes, offsets, extent, space)
        begins = (extent.offset + offset for offset in offsets)
        ticket.hosts = [area[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        self._out.wait_stream(compute)
        if self._last_read is not None:
            self._out.wait_event(self._last_read)
            self._last_read = None
        with torch.cuda.stream(self._out):
            begin = self._timing()
            for host, source in zip(ticket.hosts, sources, strict=True):
                host.copy_(bytes_of(source), non_blocking=True)
            ticket.out_done = self._out.record_event()
            self._tell("out", ticket.nbytes, begin)
        return self._issued(ticket)

    def _timing(self) -> Any:
        """An event on the stream that copies now; None where nobody asks for times."""
        if self.on_copy is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _tell(self, way: Way, nbytes: int, begin: Any) -> None:
        if self.on_copy is not None and begin is not None:
            self.on_copy(way, nbytes, begin, self._timing())

    def finish_out(self, ticket: Ticket) -> None:
        self._require_owner()
        torch.cuda.current_stream(self._device).wait_event(ticket.out_done)

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        self._require_owner()
        assert isinstance(ticket, PinnedTicket)
        hosts = ticket.hosts if parts is None else [ticket.hosts[part] for part in parts]
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(ticket.out_done)
        with torch.cuda.stream(self._in):
            begin = self._timing()
            for target, host in zip(targets, hosts, strict=True):
                bytes_of(target).copy_(host, non_blocking=True)
            self._last_read = ticket.in_done = self._in.record_event()
            self._tell("in", sum(target.nbytes for target in targets), begin)
        return ticket.in_done

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        self._require_owner()
        torch.cuda.current_stream(self._device).wait_event(ticket.in_done if done is None else done)

    def free(self, ticket: Ticket) -> None:
        ticket.let_go()


def _piece(
    areas: list[tuple[Extents, torch.Tensor]], nbytes: int, place: Hashable
) -> tuple[Extent, torch.Tensor] | None:
    for extents, area in areas:
        extent = extents.take(nbytes, place)
        if extent is not None:
            return extent, area
    return None


def _close_pinned(
    pid: int, locked: list[torch.Tensor], areas: list[tuple[Extents, torch.Tensor]], device: torch.device
) -> None:
    if os.getpid() == pid:  # else a forked copy: the memory is registered for the other process
        unlock(locked, device)
        areas.clear()


def host_area(nbytes: int, device: torch.device, *, warn: bool = True) -> tuple[torch.Tensor, bool]:
    """Host memory for copies to and from `device`, and whether it is page-locked.

    Where page-locking fails (`ulimit -l`, a container's limit), copies through ordinary memory are slower and don't
    overlap, but device memory is as planned: that is a warning, not an error.

    Raises
    ------
    SwapError
        If there is no such memory.
    """
    try:
        area = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device is
    except RuntimeError as error:
        raise SwapError(f"no host memory for {format_bytes(nbytes)} of swap space: {error}; lower host_gb=") from error
    if device.type != "cuda":
        return area, False
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(area.data_ptr(), nbytes, _PORTABLE))
        if code == 0:
            return area, True
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # takes up the error, which the next kernel would report else
    if warn:
        warnings.warn(
            f"page-locking {format_bytes(nbytes)} of host memory failed (CUDA error {code}); swapping goes through "
            "ordinary memory, slower than planned: raise the limit on locked memory (ulimit -l), or lower host_gb=",
            RuntimeWarning,
            stacklevel=2,
        )
    return area, False


def unlock(areas: list[torch.Tensor], device: torch.device) -> None:
    """End the page-locking of `areas`, once no copy touches them."""
    with contextlib.suppress(RuntimeError):  # a device that failed: nothing to wait for
        if areas:
            torch.cuda.synchronize(device)
    while areas:
        torch.cuda.cudart().cudaHostUnregister(areas.pop().data_ptr())
