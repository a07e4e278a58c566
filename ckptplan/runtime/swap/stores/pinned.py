"""A tier in page-locked host memory, copied to and from on side streams."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapFullError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.observe.meter import Way
from ckptplan.runtime.swap.stores.arena import Arena
from ckptplan.runtime.swap.stores.base import ArenaStore, Ticket, bytes_of
from ckptplan.tensors.accelerator import is_accelerator, lock_pages, own_module, timing_event, unlock_pages

CUDA_ALIGN = 512
"""Alignment of blocks: the device's allocator rounds to it too, so a plan's host bytes are exactly the bytes taken."""
_SLICE_BYTES = 64 << 20
"""Least memory for which one more thread makes pages; for less, starting a thread takes longer than it saves."""
_THREADS = 16
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def host_memory(nbytes: int, device: torch.device, arena: Arena) -> torch.Tensor:
    """Return host memory for copies to and from devices, page-locked for all of them as long as `arena` lives.

    If page-locking fails (`ulimit -l`, a container's limit), ordinary memory is used: copies are slower and don't
    overlap, but device memory is as planned. That is a warning, not an error. For the CPU nothing is page-locked.

    Raises
    ------
    SwapFullError
        If the memory can't be allocated.
    """
    memory = _pages(nbytes)
    if is_accelerator(device) and arena.can_lock:
        code = lock_pages(memory, device)
        arena.can_lock = code == 0
        if arena.can_lock:
            # Runs when the last store, ticket or copy that holds the arena is gone: memory freed while still registered
            # would break page-locking for its next owner.
            weakref.finalize(arena, _unlock, os.getpid(), memory, arena.streams)
        else:
            warnings.warn(
                f"page-locking {format_bytes(nbytes)} of host memory failed (CUDA error {code}); swapping goes through "
                "ordinary memory, slower than planned: raise the limit on locked memory (ulimit -l), or lower host_gb=",
                RuntimeWarning,
                stacklevel=1,
            )
    return memory


def _pages(nbytes: int) -> torch.Tensor:
    """Return `nbytes` of host memory whose pages exist already.

    Registering memory first makes its pages, one by one in one thread, which takes nearly all of the time. Large pages
    need fewer page faults, and several threads make them at the same time.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        wanted = f"{format_bytes(nbytes)} of swap space"
        raise SwapFullError(f"no host memory for {wanted}: {error}; lower host_gb=") from error
    threads = min(os.cpu_count() or 1, _THREADS, nbytes // _SLICE_BYTES)
    if threads and _HUGE is not None:
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(_HUGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if threads:
        with ThreadPoolExecutor(threads, "ckptplan-pages") as pool:
            list(pool.map(lambda part: part.fill_(0), memory[:: mmap.PAGESIZE].chunk(threads)))
    return memory


def _unlock(pid: int, memory: torch.Tensor, streams: set[Any]) -> None:
    """End the page-locking of `memory`, after all copies of `streams` are done."""
    if os.getpid() != pid:
        return  # in a forked process: the memory is registered for the parent
    for stream in streams:
        with contextlib.suppress(RuntimeError):  # the device has failed: no copy is under way
            stream.synchronize()
    unlock_pages(memory)


_KEPT: list[set[Arena]] = []
"""Arenas that wait for the next store: a set for each `keep_pinned_memory` that is entered."""


@contextlib.contextmanager
def keep_pinned_memory() -> Iterator[None]:
    """Keep page-locked host memory that a plan frees within the block for the next plan.

    Page-locking takes some tenths of a second per GiB, and a plan may swap to a hundred GiB. If several plans are
    applied one after the other inside this block, the memory is registered once, and freed at the end of the block.
    Without it, `handle.remove()` frees all of it.
    """
    _KEPT.append(set())
    try:
        yield
    finally:
        kept = _KEPT.pop()
        for around in _KEPT[-1:]:
            around |= kept


def _take_kept(most_bytes: int) -> Arena | None:
    """Take the largest arena of at most `most_bytes` that waits for a store."""
    fitting = [(kept, arena) for kept in _KEPT for arena in kept if arena.reserved_bytes <= most_bytes]
    if not fitting:
        return None
    kept, arena = max(fitting, key=lambda found: found[1].reserved_bytes)
    kept.remove(arena)
    return arena


class PinnedStore(ArenaStore):
    """Swaps CUDA tensors to page-locked host memory on two side streams.

    Blocks of the arena are ordinary memory registered with CUDA at its exact size, since PyTorch's own pinned allocator
    rounds up to powers of two. If they are full (more graphs are alive than planned), another one is added, of at least
    a quarter of the bytes held so far. All are freed with `close` and the last ticket, or passed on to the next store
    (`lend`, `keep_pinned_memory`).

    Streams: a group's copies out wait for the compute stream of the caller. At the release point the compute stream
    waits for all of them with one event, so the device blocks can be reused on that stream without `record_stream`.
    Copies in wait for the compute stream, on which their targets were allocated, and for their group's copies out.
    Host memory that is reused is written only after the copies that used it. So copies out wait for all copies that
    were issued before them, also by an earlier store of the memory, whose graphs may be gone.
    """

    name = "the host memory for swapping"

    def __init__(self, device: torch.device, *, capacity_bytes: int, limit_bytes: int | None = None) -> None:
        needed = max(capacity_bytes, CUDA_ALIGN)
        most = 2 * needed if limit_bytes is None else min(2 * needed, limit_bytes)
        arena = _take_kept(most) or Arena(CUDA_ALIGN)
        super().__init__(device, arena, limit_bytes)
        self._own = own_module(device)
        self._out, self._in = self._own.Stream(device), self._own.Stream(device)
        arena.streams |= {self._out, self._in}
        try:
            if arena.reserved_bytes < needed:
                self._add(arena, needed - arena.reserved_bytes)
        except SwapFullError as error:
            raise InvalidInputError(str(error)) from error

    def lend(self) -> None:
        for kept in _KEPT[-1:]:
            if self._arena is not None:
                kept.add(self._arena)

    def close(self) -> None:
        self.lend()
        super().close()

    def _grow(self, arena: Arena, start: int, size: int) -> int:
        held = arena.reserved_bytes
        self._add(arena, max(size, held // 4 if self._limit is None else min(held // 4, self._limit - held)))
        return held

    def _add(self, arena: Arena, nbytes: int) -> None:
        """Add a block of `nbytes`."""
        needed = arena.reserved_bytes + arena.rounded(nbytes)
        if self._limit is not None and arena.reserved_bytes + nbytes > self._limit:
            raise SwapFullError(
                f"swapping needs {format_bytes(needed)} of pinned host memory, the limit is "
                f"{format_bytes(self._limit)}{arena.in_pieces}; raise host_gb="
            )
        arena.blocks.append((needed, host_memory(arena.rounded(nbytes), self._device, arena)))

    def _copy(self, way: Way, ticket: Ticket, tensors: Sequence[torch.Tensor], parts: Sequence[int]) -> Any:
        arena: Arena = ticket.extent.arena
        stream = self._out if way == "out" else self._in
        stream.wait_stream(self._own.current_stream(self._device))
        if way == "in":
            stream.wait_event(ticket.out_done)
        else:
            for other in arena.streams - {stream}:
                stream.wait_stream(other)
        end, memory = next(block for block in arena.blocks if ticket.extent.offset < block[0])
        begin = end - memory.numel()
        with self._own.stream(stream):
            started = None if self.on_copy is None else timing_event(self._device)
            for tensor, part in zip(tensors, parts, strict=True):
                data, at = bytes_of(tensor), ticket.offsets[part] - begin
                host = memory[at : at + data.numel()]
                target, source = (host, data) if way == "out" else (data, host)
                target.copy_(source, non_blocking=True)
            done = stream.record_event()
            if self.on_copy is not None:
                self.on_copy(way, sum(tensor.nbytes for tensor in tensors), started, timing_event(self._device))
        return done

    def _wait(self, way: Way, ticket: Ticket, done: Any) -> None:
        self._own.current_stream(self._device).wait_event(done)
