"""Page-locked host memory: registered in one piece, handed on from plan to plan, given back with its last holder."""

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

from ckptplan.core.errors import SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.accelerator import is_accelerator, lock_pages, synchronize, unlock_pages
from ckptplan.runtime.observe.meter import Way
from ckptplan.runtime.swap.stores.base import Extents

CUDA_ALIGN = 512
"""What the device's allocator rounds to: a plan's host bytes, summed over its storages, are exactly what is taken."""
_SLICE_BYTES = 64 << 20
"""What a thread makes pages for at least; below that starting one isn't worth it."""
_THREADS = 16
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone


class HostArea:
    """Host memory for copies to and from devices, page-locked for all of them as long as this object lives.

    Where page-locking fails (`ulimit -l`, a container's limit), copies through ordinary memory are slower and don't
    overlap, but device memory is as planned: that is a warning, not an error.

    Parameters
    ----------
    nbytes : int
    device : torch.device
        The one that copies; for the CPU nothing is page-locked.
    warn : bool
        Whether to warn.

    Attributes
    ----------
    memory : torch.Tensor
    extents : Extents
        What of it is taken.
    is_locked : bool
    uses : dict
        The last copy of each store in each direction: whatever is written here next waits for them.
    devices : set of torch.device
        Those that copy: all are waited for before the memory goes.

    Raises
    ------
    SwapError
        If there is no such memory.
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
            # With the last store or ticket that holds the area: memory freed while registered poisons its next owner.
            self._ending = weakref.finalize(self, _unlock, os.getpid(), self.memory, self.devices)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.numel()


def _pages(nbytes: int) -> torch.Tensor:
    """Memory whose pages are there.

    Registering memory makes its pages first, one by one in one thread, which is nearly all of the time that it takes.
    Large pages are made with fewer faults, and threads make them side by side.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise SwapError(f"no host memory for {format_bytes(nbytes)} of swap space: {error}; lower host_gb=") from error
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
    """End the page-locking of `memory`, once no copy touches it."""
    if os.getpid() != pid:
        return  # a forked copy: the memory is registered for the other process
    for device in devices:
        with contextlib.suppress(RuntimeError):  # a device that failed: nothing to wait for
            synchronize(device)
    unlock_pages(memory)


class _Kept:
    """Areas that wait for a store to take them over, inside of `keep_pinned_memory` alone."""

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
        del dropped  # outside of the lock: their ends wait for the device

    def add(self, areas: list[HostArea]) -> None:
        """Keep `areas`, if anybody keeps any."""
        with self._lock:
            if self._depth:
                self._areas += [area for area in areas if area.is_locked and area not in self._areas]

    def take(self, nbytes: int, most: int | None) -> HostArea | None:
        """The smallest area of `nbytes` or the largest below that, but none larger than `most` or twice `nbytes`."""
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
    """Inside, page-locked host memory that a plan gives back waits for the next plan, instead of going at once.

    Page-locking takes some tenths of a second per GiB, and a plan may swap to a hundred of them. Where several plans
    are applied one after the other, memory is registered once inside of this block, and given back at its end. Without
    it `handle.remove()` gives all of it back.
    """
    KEPT.enter()
    try:
        yield
    finally:
        KEPT.leave()
