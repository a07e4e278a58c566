"""A tier in a file, read and written by worker threads; tensors of an accelerator pass through a small staging area."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapFullError
from ckptplan.core.link import STAGING_BYTES
from ckptplan.core.units import format_bytes
from ckptplan.runtime.accelerator import is_accelerator, own_module, recorded_event
from ckptplan.runtime.observe.meter import OnCopy, Way
from ckptplan.runtime.swap.stores.areas import CUDA_ALIGN, HostArea
from ckptplan.runtime.swap.stores.base import Extent, Extents, OfOneProcess, Space, Ticket, bytes_of
from ckptplan.runtime.swap.stores.workers import Done, Worker

DISK_BLOCK_BYTES = 4096
CHUNK_BYTES = STAGING_BYTES // 4
"""Bytes of one copy between a device and its staging: it takes some ms, and some µs to issue."""
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of file systems that can't reserve space."""


Part = tuple[torch.Tensor, int]
"""A tensor of bytes, and its offset in the file."""


class Staging:
    """Two chunks of host memory and a stream, for one direction; used by one worker thread only.

    While the device copies one chunk, the thread reads or writes the other.
    """

    def __init__(self, device: torch.device, area: torch.Tensor) -> None:
        self._device, self._streams = device, own_module(device)
        self._stream = self._streams.Stream(device)
        self._chunks = area.chunk(2)
        self._chunk = self._chunks[0].numel()

    def out(self, ready: Any, parts: Iterable[Part], write: Callable[[memoryview, int], None]) -> None:
        """Write `parts` to the file a chunk at a time, after event `ready`: their bytes are computed then."""
        waiting: tuple[memoryview, int] | None = None
        with self._streams.stream(self._stream):
            self._stream.wait_event(ready)
            try:
                for number, (begin, end, pieces) in enumerate(_chunks(parts, self._chunk)):
                    chunk = self._chunks[number % 2][: end - begin]
                    for piece, at in pieces:
                        chunk[at - begin : at - begin + piece.numel()].copy_(piece, non_blocking=True)
                    copied = recorded_event(self._device)
                    if waiting is not None:
                        write(*waiting)
                    copied.synchronize()
                    waiting = memoryview(chunk.numpy()), begin  # type: ignore[arg-type]
                if waiting is not None:
                    write(*waiting)
            finally:
                # Also after a failed write: when this returns, the sources and the chunks may be overwritten.
                recorded_event(self._device).synchronize()

    def back(self, ready: Any, parts: Iterable[Part], read: Callable[[memoryview, int], None]) -> None:
        """Read the file into `parts` a chunk at a time, after event `ready`: they may be overwritten then."""
        used: list[Any] = [None, None]
        with self._streams.stream(self._stream):
            self._stream.wait_event(ready)
            try:
                for number, (begin, end, pieces) in enumerate(_chunks(parts, self._chunk)):
                    chunk = self._chunks[number % 2][: end - begin]
                    if used[number % 2] is not None:
                        used[number % 2].synchronize()
                    read(memoryview(chunk.numpy()), begin)  # type: ignore[arg-type]
                    for piece, at in pieces:
                        piece.copy_(chunk[at - begin : at - begin + piece.numel()], non_blocking=True)
                    used[number % 2] = recorded_event(self._device)
            finally:
                recorded_event(self._device).synchronize()


def _chunks(parts: Iterable[Part], most_bytes: int) -> Iterator[tuple[int, int, list[Part]]]:
    """Cut `parts`, given in the order of their offsets, into groups that are one range of the file and fit a chunk.

    Yields
    ------
    tuple
        Begin and end of the range in the file, and its pieces. Gaps between pieces are smaller than a disk block.
    """
    begin = end = 0
    pieces: list[Part] = []
    for data, offset in parts:
        done = 0
        while done < data.numel():
            at = offset + done
            if pieces and (at - end >= DISK_BLOCK_BYTES or at - begin >= most_bytes):
                yield begin, end, pieces
                pieces = []
            if not pieces:
                begin = at
            piece = data[done : done + begin + most_bytes - at]
            pieces.append((piece, at))
            done += piece.numel()
            end = offset + done
    if pieces:
        yield begin, end, pieces


class DiskStore(OfOneProcess):
    """Swaps tensors to one unnamed file, which disappears with the process even if that is killed.

    CPU tensors are written and read in place. Tensors of an accelerator pass through staging memory, on a stream of the
    worker thread. That stream waits for the work issued to the compute stream before the copy was requested.
    `finish_out` and `finish_in` wait on the host.

    Parameters
    ----------
    directory : str or Path, optional
        Directory of the file; by default the system's temporary directory.
    capacity_bytes : int
        Reserved on disk at once, so that a full disk raises before the first step.
    limit_bytes : int, optional
        Largest size of the file.
    device : torch.device
        Device of the tensors; by default the CPU.
    chunk_bytes : int, optional
        Size of a staging chunk, on the CPU too; by default no staging on the CPU, otherwise `CHUNK_BYTES`.

    Raises
    ------
    InvalidInputError
        If the directory can't be written or has no room, or `capacity_bytes` is above `limit_bytes`.
    """

    reserved_bytes = 0

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        capacity_bytes: int = 0,
        limit_bytes: int | None = None,
        device: torch.device | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        super().__init__()
        # On CUDA sizes are multiples of `CUDA_ALIGN` already, so a plan's bytes are exactly the bytes taken.
        self._extents = Extents(CUDA_ALIGN if is_accelerator(self._device) else DISK_BLOCK_BYTES)
        where = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise InvalidInputError(
                f"swap directory {where} can't be written: {error}; pass swap_dir= a directory that can"
            ) from error
        self._where = where
        self.name = f"the swap file in {where}"
        self._limit = limit_bytes
        self._stages: tuple[Staging, Staging] | None = None
        try:
            self._reserve(capacity_bytes)
            if chunk_bytes is not None or is_accelerator(self._device):
                area = HostArea(4 * (chunk_bytes or CHUNK_BYTES), self._device)
                self._open().areas.append(area)
                out, back = area.memory.chunk(2)
                self._stages = Staging(self._device, out), Staging(self._device, back)
        except SwapFullError as error:
            self._file.close()
            raise InvalidInputError(str(error)) from error
        self._out = Worker("ckptplan-swap-out")
        self._in = Worker("ckptplan-swap-in")
        self._close = weakref.finalize(self._space, _close_disk, self._pid, self._out, self._in, self._file)

    @property
    def used_bytes(self) -> int:
        return self._extents.used

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self.reserved_bytes:
            return
        if self._limit is not None and nbytes > self._limit:
            raise SwapFullError(
                f"the swap file in {self._where} needs {format_bytes(nbytes)}, the limit is "
                f"{format_bytes(self._limit)}; raise disk_gb=, or solve for less"
            )
        try:
            _allocate(self._file.fileno(), self.reserved_bytes, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # give a partial reservation back
                os.ftruncate(self._file.fileno(), self.reserved_bytes)
            raise SwapFullError(
                f"swap directory {self._where} has no room for {format_bytes(nbytes)}: {error}; "
                "free some, pass another swap_dir=, or solve with less to swap to (host_gb=, disk_gb=)"
            ) from error
        self.reserved_bytes = nbytes

    def start_out(self, *sources: torch.Tensor, place: Hashable = None) -> Ticket:
        space = self._open()
        sizes = [source.nbytes for source in sources]
        offsets, nbytes = self._extents.layout(sizes)
        extent = self._extents.take(nbytes, place)
        assert extent is not None, "a file has no end"
        self._reserve(extent.offset + extent.size)
        ticket = Ticket(sizes, offsets, extent, space)
        ticket.sources = sources
        ticket.out_done = self._submit("out", ticket, sources, range(len(sizes)))
        return self._issued(ticket)

    def _submit(self, way: Way, ticket: Ticket, tensors: Sequence[torch.Tensor], parts: Sequence[int]) -> Done:
        """Queue one job for the worker of direction `way`: copy blocks of a group in the order of their offsets."""
        fd = self._file.fileno()
        blocks = [
            (bytes_of(tensor), ticket.offset + ticket.offsets[part])
            for part, tensor in sorted(zip(parts, tensors, strict=True), key=lambda block: block[0])
        ]
        copy = functools.partial(_write if way == "out" else _read, fd)
        if self._stages is None:
            views = [(memoryview(data.numpy()), at) for data, at in blocks]  # type: ignore[arg-type]
            work = functools.partial(_each, copy, views)
        else:
            run = self._stages[0].out if way == "out" else self._stages[1].back
            work = functools.partial(run, recorded_event(self._device), blocks, copy)
        nbytes = sum(self._extents.size(data.numel()) for data, _ in blocks)
        worker, after = (self._out, None) if way == "out" else (self._in, ticket.out_done)
        return worker.submit(_timed, self.on_copy, way, nbytes, (ticket.extent, ticket.space), work, after)

    def finish_out(self, ticket: Ticket) -> None:
        self._require_owner()
        ticket.out_done.wait(f"writing {format_bytes(ticket.nbytes)} to {self._where}")
        ticket.sources = ()

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        self._require_owner()
        ticket.in_done = self._submit("in", ticket, targets, range(len(targets)) if parts is None else parts)
        return ticket.in_done

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        self._require_owner()
        # The garbage collector may call this in a worker thread, which must not wait for its own queue.
        if threading.current_thread() not in (self._out.thread, self._in.thread):
            done = ticket.in_done if done is None else done
            done.wait(f"reading {format_bytes(ticket.nbytes)} from {self._where}")

    def free(self, ticket: Ticket) -> None:
        # The garbage collector may call this in a worker thread; copies under way hold their piece themselves.
        if not self._foreign and threading.current_thread() not in (self._out.thread, self._in.thread):
            for done in (ticket.in_done, ticket.out_done):
                if done is not None:
                    done.settle()
        super().free(ticket)


def _close_disk(pid: int, out: Worker, back: Worker, file: Any) -> None:
    if os.getpid() != pid:
        return  # in a forked process: threads and file belong to the parent
    out.stop()
    back.stop()
    with contextlib.suppress(OSError):
        file.close()


def _allocate(fd: int, held: int, nbytes: int) -> None:
    """Grow a file from `held` to `nbytes` bytes; if space can't be reserved, require that it is free now."""
    try:
        os.posix_fallocate(fd, held, nbytes - held)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
        disk = os.fstatvfs(fd)
        if disk.f_bavail * disk.f_frsize < nbytes - held:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(fd, nbytes)


def _timed(
    tell: OnCopy | None,
    way: Way,
    nbytes: int,
    held: tuple[Extent | None, Space | None],
    work: Callable[[], None],
    after: Done | None,
) -> None:
    """Do `work` and report its time to `tell`, the store's `on_copy`.

    `held`, the job's piece and the open file, is unused but keeps both alive while the job is queued or running.
    Otherwise the file would be closed before queued copies if the last ticket is freed in a worker thread.
    """
    if after is not None:
        after.wait("the copy out")  # its own; before the clock starts, since waiting isn't copying
    begin = time.perf_counter()
    work()
    if tell is not None:
        tell(way, nbytes, begin, time.perf_counter())


def _each(copy: Callable[[memoryview, int], None], blocks: Sequence[tuple[memoryview, int]]) -> None:
    for view, at in blocks:
        copy(view, at)


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.pwrite(fd, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, f"the file takes no more after {done} of {len(view)} bytes")
        done += count


def _read(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"the swap file ends {len(view) - done} bytes early")
        done += count
