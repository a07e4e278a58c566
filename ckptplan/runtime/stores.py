"""Where swapped bytes go: a file through worker threads (CPU tier), pinned memory on side streams (CUDA tier).

A store moves bytes and says when it is done; it knows nothing of stages. The order of calls per ticket is
`start_out`, `finish_out`, `start_in`, `finish_in`, then `free`; the last three may be left out or, for `start_in` and
`finish_in`, come again. Only the calling thread allocates or frees device memory.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import queue
import tempfile
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import torch

from ckptplan.core.errors import InvalidInputError, SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.meter import OnCopy, Way

DISK_BLOCK_BYTES = 4096
_CUDA_ALIGN = 512
"""What the device's allocator rounds to: a plan's host bytes, summed over its storages, are exactly what is taken."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


class Ticket:
    """One block on its way to, in, or back from the host tier."""

    def __init__(self, nbytes: int, offset: int) -> None:
        self.nbytes = nbytes
        self.offset = offset
        self.out_done: Any = None
        self.in_done: Any = None


class Store(Protocol):
    """What the swap state machine needs of a tier; `on_copy`, if set, is told of copies issued from then on."""

    on_copy: OnCopy | None

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

    on_copy: OnCopy | None = None

    def start_out(self, source: torch.Tensor) -> Ticket:
        return Ticket(source.nbytes, 0)

    def finish_out(self, ticket: Ticket) -> None: ...

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None: ...

    def finish_in(self, ticket: Ticket) -> None: ...

    def free(self, ticket: Ticket) -> None: ...

    def close(self) -> None: ...


class Extents:
    """Offsets in one linear host area: first fit in address order, neighbours merged when freed. Thread-safe.

    `give` takes no lock, since the garbage collector may call it in the middle of `take`: what is given waits
    in a queue for the next `take`.
    """

    def __init__(self, align: int = DISK_BLOCK_BYTES) -> None:
        self.end = 0
        self._align = align
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset
        self._given: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def size(self, nbytes: int) -> int:
        """`nbytes` as they are taken."""
        return -(-nbytes // self._align) * self._align

    def take(self, nbytes: int) -> int:
        size = self.size(nbytes)
        with self._lock:
            while self._given:
                self._merge(*self._given.popleft())
            for i, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
            offset, self.end = self.end, self.end + size
            return offset

    def give(self, offset: int, nbytes: int) -> None:
        if nbytes:
            self._given.append((offset, self.size(nbytes)))

    def _merge(self, offset: int, size: int) -> None:
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            before, room = self._free.pop(i - 1)
            offset, size, i = before, room + size, i - 1
        self._free.insert(i, (offset, size))


class _Done:
    """An event of a worker thread that carries the error, if there was one."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None

    def wait(self, what: str) -> None:
        self.event.wait()
        if self.error is not None:
            raise SwapError(f"{what} failed: {self.error}; discard this step's gradients") from self.error


class _Worker:
    """One thread, one first-in-first-out queue."""

    def __init__(self, name: str) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, args=(self.jobs,), name=name, daemon=True)
        self.thread.start()

    @staticmethod
    def _loop(jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            work, arguments, done = job
            try:
                work(*arguments)
            except BaseException as error:
                done.error = error
            # Nothing of the job may outlive the signal: the waiting thread frees the memory, not this one.
            del job, work, arguments
            done.event.set()
            del done

    def submit(self, work: Any, *arguments: Any) -> _Done:
        done = _Done()
        if not self.thread.is_alive():
            done.error = RuntimeError(f"the worker thread {self.thread.name} has ended")
            done.event.set()
        else:
            self.jobs.put((work, arguments, done))
        return done

    def stop(self) -> None:
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()


class _Counted:
    """Closes when asked to and no ticket is left."""

    on_copy: OnCopy | None = None

    def __init__(self) -> None:
        # A set, not a count: `add` and `discard` are atomic, and records die in any thread, at any line.
        self._tickets: set[Ticket] = set()
        self._closing = False

    def _shut(self) -> None:
        raise NotImplementedError

    def _issued(self, ticket: Ticket) -> Ticket:
        self._tickets.add(ticket)
        return ticket

    def _freed(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        if self._closing and not self._tickets:
            self._shut()

    def close(self) -> None:
        self._closing = True
        if not self._tickets:
            self._shut()


class DiskStore(_Counted):
    """Swaps CPU tensors to one unnamed file: nothing is left behind, whatever happens to the process.

    Parameters
    ----------
    directory : str or Path, optional
        Where the file lives; the system's temporary directory by default.
    capacity_bytes : int
        Reserved on disk at once, so that a full disk is an error before the first step.

    Raises
    ------
    InvalidInputError
        If the directory can't be written or has no room.
    """

    def __init__(self, directory: str | Path | None = None, *, capacity_bytes: int = 0) -> None:
        super().__init__()
        where = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise InvalidInputError(
                f"swap directory {where} can't be written: {error}; pass swap_dir= a directory that can"
            ) from error
        self._where = where
        self._reserved = 0
        self._extents = Extents()
        try:
            self._reserve(capacity_bytes)
        except SwapError as error:
            self._file.close()
            raise InvalidInputError(str(error)) from error
        self._out = _Worker("ckptplan-swap-out")
        self._in = _Worker("ckptplan-swap-in")
        self._close = weakref.finalize(self, _close_disk, self._out, self._in, self._file)

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._reserved:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise SwapError(
                f"swap directory {self._where} has no room for {format_bytes(nbytes)}: {error}; "
                "free some, pass another swap_dir=, or solve with a smaller host_gb="
            ) from error
        self._reserved = nbytes

    def start_out(self, source: torch.Tensor) -> Ticket:
        ticket = Ticket(source.nbytes, self._extents.take(source.nbytes))
        try:
            self._reserve(ticket.offset + self._extents.size(ticket.nbytes))
        except SwapError:
            self._extents.give(ticket.offset, ticket.nbytes)
            raise
        view = memoryview(source.view(torch.uint8).numpy())  # type: ignore[arg-type]
        ticket.out_done = self._out.submit(
            _timed, self.on_copy, "out", None, _write, self._file.fileno(), view, ticket.offset
        )
        return self._issued(ticket)

    def finish_out(self, ticket: Ticket) -> None:
        ticket.out_done.wait(f"writing {format_bytes(ticket.nbytes)} to {self._where}")

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
        ticket.in_done = self._in.submit(
            _timed,
            self.on_copy,
            "in",
            ticket.out_done,
            functools.partial(_read, ticket.out_done),
            self._file.fileno(),
            view,
            ticket.offset,
        )

    def finish_in(self, ticket: Ticket) -> None:
        # A worker gets here when it happens to collect garbage; its own queue must not wait for itself.
        if threading.current_thread() not in (self._out.thread, self._in.thread):
            ticket.in_done.wait(f"reading {format_bytes(ticket.nbytes)} from {self._where}")

    def free(self, ticket: Ticket) -> None:
        for done, worker in ((ticket.in_done, self._in), (ticket.out_done, self._out)):
            if done is None or done.event.is_set():
                continue
            if threading.current_thread() in (self._out.thread, self._in.thread):
                worker.submit(self._give, ticket)  # in its turn, after the copy
                return
            done.event.wait()
        self._give(ticket)

    def _give(self, ticket: Ticket) -> None:
        self._extents.give(ticket.offset, ticket.nbytes)
        self._freed(ticket)

    def _shut(self) -> None:
        self._close()


def _close_disk(out: _Worker, back: _Worker, file: Any) -> None:
    out.stop()
    back.stop()
    with contextlib.suppress(OSError):
        file.close()


def _timed(
    tell: OnCopy | None, way: Way, after: _Done | None, work: Any, fd: int, view: memoryview, offset: int
) -> None:
    if after is not None:
        after.event.wait()  # waiting isn't copying
    begin = time.perf_counter()
    work(fd, view, offset)
    if tell is not None:
        tell(way, len(view), begin, time.perf_counter())


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _read(after: _Done, fd: int, view: memoryview, offset: int) -> None:
    after.wait("the copy out")
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"the swap file ends {len(view) - done} bytes early")
        done += count


class PinnedStore(_Counted):
    """Swaps CUDA tensors to page-locked host memory on two side streams.

    The area is ordinary memory registered with CUDA at its exact size: PyTorch's own pinned allocator rounds up to
    powers of two. An area that overflows (more graphs alive than the plan knew) gets a further one.

    Streams: a copy out waits for the compute stream of its caller; the compute stream waits for it at the release
    point, so the block is free for reuse on that stream and no `record_stream` is needed. A copy in waits for the
    compute stream, on which its target was allocated, and for its own copy out. An extent is written again only after
    the copy in that read it last: `free` makes the outward stream wait for that copy.
    """

    def __init__(self, device: torch.device, *, capacity_bytes: int, limit_bytes: int | None = None) -> None:
        super().__init__()
        self._device = device
        self._limit = limit_bytes
        self._extents = Extents(_CUDA_ALIGN)
        self._areas: list[tuple[int, torch.Tensor]] = []  # (offset of its first byte, area)
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        # Also when nobody calls close(): memory that is freed while registered poisons its next owner.
        self._close = weakref.finalize(self, _unpin, self._areas, device)
        try:
            self._grow(max(capacity_bytes, _CUDA_ALIGN))
        except SwapError as error:
            raise InvalidInputError(str(error)) from error

    @property
    def _covered(self) -> int:
        """Offset at which the last area ends."""
        return self._areas[-1][0] + self._areas[-1][1].numel() if self._areas else 0

    def _grow(self, nbytes: int) -> int:
        """Add an area of at least `nbytes`, up to a quarter of what there is; returns its first offset."""
        held = sum(area.numel() for _, area in self._areas)
        room = None if self._limit is None else self._limit - held
        if room is not None and nbytes > room:
            raise SwapError(
                f"swapping needs {format_bytes(held + nbytes)} of pinned host memory, the limit is "
                f"{format_bytes(self._limit or 0)}; raise host_gb="
            )
        nbytes = self._extents.size(max(nbytes, held // 4 if room is None else min(held // 4, room)))
        # A block of distance, so that free extents of neighbouring areas never merge into one across the seam.
        start = self._covered + _CUDA_ALIGN if self._areas else 0
        try:
            area = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device is
        except RuntimeError as error:
            raise SwapError(f"no host memory for {format_bytes(nbytes)} of swap space: {error}") from error
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(area.data_ptr(), nbytes, _PORTABLE))
            if code != 0:
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)  # takes up the error, which the next kernel would report else
                raise SwapError(
                    f"page-locking {format_bytes(nbytes)} of host memory failed (CUDA error {code}); lower host_gb="
                )
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
        self._extents.give(offset, max(covered - offset, 0))  # what is left of the last area
        self._extents.end = covered
        size = self._extents.size(nbytes)
        start = self._grow(size)
        self._extents.end = start + size
        return start

    def start_out(self, source: torch.Tensor) -> Ticket:
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
        torch.cuda.current_stream(self._device).wait_event(ticket.out_done)

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(ticket.out_done)
        with torch.cuda.stream(self._in):
            begin = self._timing()
            target.view(torch.uint8).copy_(self._host(ticket), non_blocking=True)
            ticket.in_done = self._in.record_event()
            self._tell("in", ticket.nbytes, begin)

    def finish_in(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket.in_done)

    def free(self, ticket: Ticket) -> None:
        # Extents are split and merged, so the next writer waits for every read issued so far: one event, no host wait.
        if ticket.in_done is not None:
            self._out.wait_event(ticket.in_done)
        self._extents.give(ticket.offset, ticket.nbytes)
        self._freed(ticket)

    def _shut(self) -> None:
        self._close()


def _unpin(areas: list[tuple[int, torch.Tensor]], device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # a device that failed, or a forked process: nothing to wait for or undo
        if areas:
            torch.cuda.synchronize(device)
        while areas:
            torch.cuda.cudart().cudaHostUnregister(areas.pop()[1].data_ptr())


def make_store(
    device: torch.device, *, capacity_bytes: int, directory: str | Path | None, limit_bytes: int | None
) -> Store:
    """The store for tensors on `device`: pinned memory for CUDA, a file for the CPU."""
    if device.type == "cuda":
        return PinnedStore(device, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes)
    return DiskStore(directory, capacity_bytes=capacity_bytes)
