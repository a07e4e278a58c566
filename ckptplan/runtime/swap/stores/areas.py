"""Page-locked host memory: registered in one piece, passed on from plan to plan, freed with its last holder."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ckptplan.core.errors import SwapFullError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.accelerator import is_accelerator, lock_pages, synchronize, unlock_pages
from ckptplan.runtime.observe.meter import Way
from ckptplan.runtime.swap.stores.base import Extents

CUDA_ALIGN = 512
"""Alignment of blocks: the device's allocator rounds to it too, so a plan's host bytes are exactly the bytes taken."""
_SLICE_BYTES = 64 << 20
"""Least memory for which one more thread makes pages; for less, starting a thread takes longer than it saves."""
_THREADS = 16
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


class HostArea:
    """Host memory for copies to and from devices, page-locked for all of them as long as this object lives.

    If page-locking fails (`ulimit -l`, a container's limit), ordinary memory is used: copies are slower and don't
    overlap, but device memory is as planned. That is a warning, not an error.

    Parameters
    ----------
    nbytes : int
    device : torch.device
        The device that copies; for the CPU nothing is page-locked.
    warn : bool
        Whether to warn if page-locking fails.

    Attributes
    ----------
    memory : torch.Tensor
    extents : Extents
        The pieces of the area that are taken.
    is_locked : bool
    uses : dict
        The last copy of each store in each direction; the next write to this memory waits for them.
    devices : set of torch.device
        The devices that copy: all are synchronized before the memory is freed.

    Raises
    ------
    SwapFullError
        If the memory can't be allocated.
    """

    __slots__ = ("__weakref__", "_ending", "devices", "extents", "is_locked", "memory", "uses")

    def __init__(self, nbytes: int, device: torch.device, *, warn: bool = True) -> None:
        self.memory = _pages(nbytes)
        self.extents = Extents(CUDA_ALIGN, nbytes)
        self.uses: dict[tuple[int, Way], Any] = {}
        self.devices = {device}
        code = lock_pages(self.memory, device) if is_accelerator(device) else None
        self.is_locked = code == 0
        if code and warn:
            warnings.warn(
                f"page-locking {format_bytes(nbytes)} of host memory failed (CUDA error {code}); swapping goes through "
                "ordinary memory, slower than planned: raise the limit on locked memory (ulimit -l), or lower host_gb=",
                RuntimeWarning,
                stacklevel=1,
            )
        if self.is_locked:
            # Runs when the last store or ticket that holds the area is freed: memory freed while still registered would
            # break page-locking for its next owner.
            self._ending = weakref.finalize(self, _unlock, os.getpid(), self.memory, self.devices)

    @property
    def nbytes(self) -> int:
        """Size of the area in bytes."""
        return self.memory.numel()


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


def _unlock(pid: int, memory: torch.Tensor, devices: set[torch.device]) -> None:
    """End the page-locking of `memory`, after all copies of `devices` are done."""
    if os.getpid() != pid:
        return  # in a forked process: the memory is registered for the parent
    for device in devices:
        with contextlib.suppress(RuntimeError):  # the device has failed: no copy is under way
            synchronize(device)
    unlock_pages(memory)


class _Kept:
    """Areas that wait for the next store; only inside `keep_pinned_memory`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._areas: list[HostArea] = []

    def enter(self) -> None:
        with self._lock:
            self._depth += 1

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            dropped = [] if self._depth else self._areas
            if not self._depth:
                self._areas = []
        del dropped  # outside of the lock, because freeing an area waits for the device

    def add(self, areas: list[HostArea]) -> None:
        """Keep `areas` for the next store, if inside `keep_pinned_memory`."""
        with self._lock:
            if self._depth:
                self._areas += [area for area in areas if area.is_locked and area not in self._areas]

    def take(self, nbytes: int, most: int | None) -> HostArea | None:
        """Take the smallest area of at least `nbytes`, otherwise the largest; none above `most` or `2 * nbytes`."""
        with self._lock:
            most = 2 * nbytes if most is None else min(2 * nbytes, most)
            fitting = sorted((area for area in self._areas if area.nbytes <= most), key=lambda area: area.nbytes)
            found = next((area for area in fitting if area.nbytes >= nbytes), fitting[-1] if fitting else None)
            if found is not None:
                self._areas.remove(found)
            return found


KEPT = _Kept()


@contextlib.contextmanager
def keep_pinned_memory() -> Iterator[None]:
    """Inside, page-locked host memory that a plan frees is kept for the next plan.

    Page-locking takes some tenths of a second per GiB, and a plan may swap to a hundred GiB. If several plans are
    applied one after the other inside this block, the memory is registered once, and freed at the end of the block.
    Without it, `handle.remove()` frees all of it.
    """
    KEPT.enter()
    try:
        yield
    finally:
        KEPT.leave()
