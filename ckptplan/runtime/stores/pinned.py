"""A tier in page-locked host memory, copied to and from on side streams."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.meter import Way
from ckptplan.runtime.stores.base import Counted, Ticket

CUDA_ALIGN = 512
"""What the device's allocator rounds to: a plan's host bytes, summed over its storages, are exactly what is taken."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


class PinnedStore(Counted):
    """Swaps CUDA tensors to page-locked host memory on two side streams.

    The area is ordinary memory registered with CUDA at its exact size: PyTorch's own pinned allocator rounds up to
    powers of two. Blocks are multiples of `CUDA_ALIGN`, of any size. An area that overflows (more graphs alive than the
    plan knew) gets a further one, of at least a quarter of what there is; `limit_bytes` bounds them all. All are given
    back by `close`.

    Streams: a copy out waits for the compute stream of its caller; the compute stream waits for it at the release
    point, so the block is free for reuse on that stream and no `record_stream` is needed. A copy in waits for the
    compute stream, on which its target was allocated, and for its own copy out. An extent is written again only after
    the copy in that read it last: `free` makes the outward stream wait for that copy.
    """

    def __init__(self, device: torch.device, *, capacity_bytes: int, limit_bytes: int | None = None) -> None:
        super().__init__(CUDA_ALIGN)
        self._device = device
        self._limit = limit_bytes
        self._areas: list[tuple[int, torch.Tensor]] = []  # (offset of its first byte, area)
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        # Also when nobody calls close(): memory that is freed while registered poisons its next owner.
        self._locked: list[torch.Tensor] = []
        self._close = weakref.finalize(self, _close_pinned, self._pid, self._locked, self._areas, device)
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
    def _covered(self) -> int:
        """Offset at which the last area ends."""
        return self._areas[-1][0] + self._areas[-1][1].numel() if self._areas else 0

    def _grow(self, nbytes: int) -> int:
        """Add an area of at least `nbytes`, up to a quarter of what there is; returns its first offset."""
        held = self.reserved_bytes
        room = None if self._limit is None else self._limit - held
        if room is not None and nbytes > room:
            raise SwapError(
                f"swapping needs {format_bytes(held + nbytes)} of pinned host memory, the limit is "
                f"{format_bytes(self._limit or 0)}; raise host_gb="
            )
        nbytes = self._extents.size(max(nbytes, held // 4 if room is None else min(held // 4, room)))
        # A block of distance, so that free extents of neighbouring areas never merge into one across the seam.
        start = self._covered + CUDA_ALIGN if self._areas else 0
        area, locked = host_area(nbytes, self._device, warn=len(self._locked) == len(self._areas))
        if locked:
            self._locked.append(area)
        self._areas.append((start, area))
        return start

    def _host(self, ticket: Ticket) -> torch.Tensor:
        for start, area in self._areas:
            if start <= ticket.offset and ticket.offset + ticket.nbytes <= start + area.numel():
                return area[ticket.offset - start : ticket.offset - start + ticket.nbytes]
        raise SwapError(f"no pinned area holds bytes {ticket.offset}..{ticket.offset + ticket.nbytes}")

    def _take(self, nbytes: int) -> int:
        """An extent within one area, a new one if need be."""
        offset, covered = self._extents.take(nbytes), self._covered
        if self._extents.end <= covered:
            return offset
        self._extents.cut(offset, nbytes, covered)
        self._extents.end = self._grow(self._extents.size(nbytes))
        return self._extents.take(nbytes)

    def start_out(self, source: torch.Tensor) -> Ticket:
        self._require_owner()
        compute = torch.cuda.current_stream(self._device)
        ticket = Ticket(source.nbytes, self._take(source.nbytes))
        host = self._host(ticket)
        self._out.wait_stream(compute)
        with torch.cuda.stream(self._out):
            begin = self._timing()
            host.copy_(source.view(torch.uint8), non_blocking=True)
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

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        self._require_owner()
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(ticket.out_done)
        with torch.cuda.stream(self._in):
            begin = self._timing()
            target.view(torch.uint8).copy_(self._host(ticket), non_blocking=True)
            ticket.in_done = self._in.record_event()
            self._tell("in", ticket.nbytes, begin)

    def finish_in(self, ticket: Ticket) -> None:
        self._require_owner()
        torch.cuda.current_stream(self._device).wait_event(ticket.in_done)

    def free(self, ticket: Ticket) -> None:
        if self._foreign:
            return
        # Extents are split and merged, so the next writer waits for every read issued so far: one event, no host wait.
        if ticket.in_done is not None:
            self._out.wait_event(ticket.in_done)
        self._extents.give(ticket.offset, ticket.nbytes)
        self._freed(ticket)

    def _shut(self) -> None:
        self._close()


def _close_pinned(
    pid: int, locked: list[torch.Tensor], areas: list[tuple[int, torch.Tensor]], device: torch.device
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
