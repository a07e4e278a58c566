"""A tier in a file, read and written by worker threads; tensors of an accelerator pass through a small staging area."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapFullError
from ckptplan.core.link import STAGING_BYTES
from ckptplan.core.units import format_bytes
from ckptplan.runtime.observe.meter import Way
from ckptplan.runtime.swap.stores.arena import Arena, Extent
from ckptplan.runtime.swap.stores.base import ArenaStore, Ticket, bytes_of, memory_of
from ckptplan.runtime.swap.stores.pinned import CUDA_ALIGN, host_memory
from ckptplan.runtime.swap.stores.workers import CopyJob, Worker
from ckptplan.tensors.accelerator import is_accelerator, own_module, recorded_event

DISK_BLOCK_BYTES = 4096
CHUNK_BYTES = STAGING_BYTES // 4
"""Bytes of one copy between a device and its staging: it takes some ms, and some µs to issue."""

Block = tuple[torch.Tensor, int]
"""A tensor of bytes, and its offset in the file."""
Transfer = Callable[[memoryview, int], None]
"""Writes memory to an offset of the file, or reads it from there."""
Run = Callable[[Any, Iterable[Block], Transfer], None]
"""Transfers blocks, on an accelerator after an event."""


class Staging:
    """Two chunks of host memory and a stream, for one direction; used by one worker thread only.

    While the device copies one chunk, the thread reads or writes the other.
    """

    def __init__(self, device: torch.device, memory: torch.Tensor) -> None:
        self._device, self._streams = device, own_module(device)
        self._stream = self._streams.Stream(device)
        self._chunks = memory.chunk(2)

    @contextlib.contextmanager
    def _after(self, ready: Any) -> Iterator[None]:
        """Make the stream current within the block, and wait for it at the end: its memory may be overwritten then."""
        with self._streams.stream(self._stream):
            self._stream.wait_event(ready)
            try:
                yield
            finally:
                recorded_event(self._device).synchronize()

    def _pieces(self, blocks: Iterable[Block]) -> Iterator[tuple[torch.Tensor, int, torch.Tensor, memoryview]]:
        """Yield pieces of `blocks` with their offsets, and a chunk for each, the two in turn."""
        chunks = itertools.cycle(self._chunks)
        for data, offset in blocks:
            for piece in data.split(self._chunks[0].numel()):
                chunk = next(chunks)[: piece.numel()]
                yield piece, offset, chunk, memory_of(chunk)
                offset += piece.numel()

    def out(self, ready: Any, blocks: Iterable[Block], write: Transfer) -> None:
        """Write `blocks` to the file, after event `ready`: their bytes are computed then."""
        write_former: Callable[[], None] = lambda: None  # noqa: E731
        with self._after(ready):
            for piece, offset, chunk, view in self._pieces(blocks):
                chunk.copy_(piece, non_blocking=True)
                copied = recorded_event(self._device)
                write_former()
                copied.synchronize()
                write_former = functools.partial(write, view, offset)
            write_former()

    def back(self, ready: Any, blocks: Iterable[Block], read: Transfer) -> None:
        """Read the file into `blocks`, after event `ready`: they may be overwritten then."""
        used: list[Any] = []
        with self._after(ready):
            for piece, offset, chunk, view in self._pieces(blocks):
                if len(used) == 2:
                    used.pop(0).synchronize()
                read(view, offset)
                piece.copy_(chunk, non_blocking=True)
                used.append(recorded_event(self._device))


class DiskStore(ArenaStore):
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

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        capacity_bytes: int = 0,
        limit_bytes: int | None = None,
        device: torch.device | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        # On CUDA sizes are multiples of `CUDA_ALIGN` already, so a plan's bytes are exactly the bytes taken.
        arena = Arena(CUDA_ALIGN if is_accelerator(device) else DISK_BLOCK_BYTES)
        super().__init__(device, arena, limit_bytes)
        self._where = Path(tempfile.gettempdir() if directory is None else directory)
        self.name = f"the swap file in {self._where}"
        try:
            self._file = tempfile.TemporaryFile(dir=self._where, buffering=0)  # noqa: SIM115 - closed with the arena
        except OSError as error:
            raise InvalidInputError(
                f"swap directory {self._where} can't be written: {error}; pass swap_dir= a directory that can"
            ) from error
        self._run: dict[Way, Run] = {"out": _in_place, "in": _in_place}
        try:
            if capacity_bytes:
                self._grow(arena, 0, capacity_bytes)
            if chunk_bytes is not None or is_accelerator(device):
                out, back = host_memory(4 * (chunk_bytes or CHUNK_BYTES), device, arena).chunk(2)
                self._run = {"out": Staging(device, out).out, "in": Staging(device, back).back}
        except SwapFullError as error:
            self._file.close()
            raise InvalidInputError(str(error)) from error
        self._out = Worker("ckptplan-swap-out")
        self._in = Worker("ckptplan-swap-in")
        # Made last, so it runs first: the threads are done with the staging when that is unlocked.
        self._close = weakref.finalize(arena, _close_disk, self._pid, self._out, self._in, self._file)

    def _grow(self, arena: Arena, start: int, size: int) -> int:
        held, needed = arena.reserved_bytes, start + size
        if self._limit is not None and needed > self._limit:
            raise SwapFullError(
                f"the swap file in {self._where} needs {format_bytes(needed)}, the limit is "
                f"{format_bytes(self._limit)}{arena.in_pieces}; raise disk_gb=, or solve with less to swap"
            )
        try:
            os.posix_fallocate(self._file.fileno(), held, needed - held)
        except OSError as error:
            with contextlib.suppress(OSError):  # give a partial reservation back
                os.ftruncate(self._file.fileno(), held)
            raise SwapFullError(
                f"swap directory {self._where} has no room for {format_bytes(needed)}: {error}; "
                "free some, pass another swap_dir=, or solve with less to swap to (host_gb=, disk_gb=)"
            ) from error
        arena.blocks = [(needed, None)]
        return start

    def _copy(self, way: Way, ticket: Ticket, tensors: Sequence[torch.Tensor], parts: Sequence[int]) -> CopyJob:
        blocks = [(bytes_of(tensor), ticket.offsets[part]) for part, tensor in zip(parts, tensors, strict=True)]
        transfer, worker, after = functools.partial(_read, self._file.fileno()), self._in, ticket.out_done
        if way == "out":
            ticket.sources = tensors
            transfer, worker = functools.partial(_write, self._file.fileno()), self._out
        work = functools.partial(self._run[way], recorded_event(self._device), blocks, transfer)
        nbytes = sum(ticket.extent.arena.rounded(data.numel()) for data, _ in blocks)
        tell = None if self.on_copy is None else functools.partial(self.on_copy, way, nbytes)
        return worker.submit(functools.partial(_timed, tell, ticket.extent, work, after))

    def _wait(self, way: Way, ticket: Ticket, done: Any) -> None:
        done.wait(f"{'writing' if way == 'out' else 'reading'} {format_bytes(ticket.nbytes)} of {self.name}")

    @property
    def _in_worker(self) -> bool:
        """Whether the garbage collector made this call in a worker thread, which must not wait for its own queue."""
        return threading.current_thread() in (self._out.thread, self._in.thread)

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        if not self._in_worker:
            super().finish_in(ticket, done)

    def free(self, ticket: Ticket) -> None:
        for done in (ticket.in_done, ticket.out_done):
            if done is not None and not self._foreign and not self._in_worker:
                done.settle()  # copies under way hold their piece themselves
        super().free(ticket)


def _close_disk(pid: int, out: Worker, back: Worker, file: Any) -> None:
    if os.getpid() != pid:
        return  # in a forked process: threads and file belong to the parent
    out.stop()
    back.stop()
    with contextlib.suppress(OSError):
        file.close()


def _timed(tell: Callable[..., None] | None, extent: Extent, work: Callable[[], None], after: CopyJob | None) -> None:
    """Do `work` and report its time to `tell`, the store's `on_copy`.

    `extent` is unused, but keeps the piece and the open file alive while the job is queued or running. Otherwise the
    file would be closed before queued copies if the last ticket is freed in a worker thread.
    """
    if after is not None:
        after.wait("the copy out")  # its own; before the clock starts, since waiting isn't copying
    begin = time.perf_counter()
    work()
    if tell is not None:
        tell(begin, time.perf_counter())


def _in_place(ready: Any, blocks: Iterable[Block], transfer: Transfer) -> None:
    for data, at in blocks:
        transfer(memory_of(data), at)


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
