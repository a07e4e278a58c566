"""Measure what a running plan takes of compute besides the stages' work, once for each device and process.

Steps of a few small stages run as a plan runs them: kept, swapped and recomputed together. Stages of tiny tensors give
the time of the runtime's own code. The same stages with larger tensors give, on the CPU, what each byte moved takes
from compute: the bandwidth of its copy, and the caches, since the thread that copies runs on another core. There it is
the computing thread's own time, in which neither waits for copies nor other processes count.

An accelerator copies by itself, and all that compute loses is bandwidth of its memory: for each byte moved, the time of
one byte. The runtime's code is the host's there, and its time that until all is launched.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ckptplan.core.link import Tier
from ckptplan.core.overheads import Overheads
from ckptplan.core.plan import Decision, Decisions
from ckptplan.core.segment import Segment
from ckptplan.runtime.accelerator import is_accelerator, synchronize
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.observe.measure import timed
from ckptplan.runtime.swap.stores import Store, make_store

_STAGES = 4
_MANY, _FEW = 9, 1  # storages that a stage saves: their difference is what each takes, the rest is a stage's
_TINY_BYTES = 256
_LARGE_BYTES = 1 << 19  # as activations have them, and in all more than a core's own caches
_LARGE_COUNT = 4
_WARM_UPS = 2
_STEPS = 9  # timed with each plan, of which the median counts
_BANDWIDTH_BYTES = 64 << 20


@functools.cache
def measure_overheads(device: torch.device, swap_dir: str | Path | None = None) -> Overheads:
    """Measure a device, or return what was measured before in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waits for other threads would count as the thread's own time
    try:
        return _measured(device, swap_dir)
    finally:
        torch.set_num_threads(threads)


def _measured(device: torch.device, swap_dir: str | Path | None) -> Overheads:
    many = _Steps(_MANY, _TINY_BYTES, device)
    few = _Steps(_FEW, _TINY_BYTES, device)
    large = _Steps(_LARGE_COUNT, _LARGE_BYTES, device)
    capacity = max(steps.count * steps.nbytes for steps in (many, large)) * _STAGES
    store = make_store(device, capacity_bytes=capacity, directory=swap_dir, limit_bytes=None)
    try:
        with torch.enable_grad():
            many_s, few_s = many.swap_s({"host": store}), few.swap_s({"host": store})
            storage_s = max(many_s - few_s, 0.0) / (_MANY - _FEW)
            swap_s = max(few_s - _FEW * storage_s, 0.0)
            call_s, rerun_s = many.call_s(), few.rerun_s()
            if is_accelerator(device):
                byte_s = _bandwidth_s(device)
            else:
                runtime_s = swap_s + _LARGE_COUNT * storage_s
                byte_s = max(large.swap_s({"host": store}) - runtime_s, 0.0) / (_LARGE_COUNT * _LARGE_BYTES)
    finally:
        store.close()
    return Overheads(call_s, swap_s, storage_s, byte_s, rerun_s)


class _Stage(nn.Module):
    """Operations each of which saves a storage."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones((), device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(self.count - 1):
            x = x.sin()
        return x


class _Steps:
    """Training steps of stages that each save `count` storages of `nbytes`; all times are those of one stage."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        self.count, self.nbytes, self._device = count, nbytes, device
        self._model = nn.Sequential(*(_Stage(count, device) for _ in range(_STAGES)))
        self._x = torch.ones(nbytes // 4, device=device, requires_grad=True)

    @functools.cached_property
    def _kept_s(self) -> float:
        return self._planned_s(Decision("keep"))

    def call_s(self) -> float:
        """A kept stage's time beyond its time without a plan."""
        return max(self._kept_s - self._median_s(self._step), 0.0)

    def swap_s(self, stores: dict[Tier, Store]) -> float:
        """A stage's time beyond that of a kept one, if all that it saves moves."""
        swap = Decision("swap", tuple(range(self.count)), _STAGES - 1, _STAGES - 1)
        return max(self._planned_s(swap, stores) - self._kept_s, 0.0)

    def rerun_s(self) -> float:
        """A stage's time in a segment of all of them, beyond that of a kept one and of another forward."""
        again_s = self._planned_s(Decision("recompute"), segments=(Segment(0, _STAGES - 1),))
        return max(again_s - self._kept_s - self._median_s(self._forward), 0.0)

    def _forward(self) -> torch.Tensor:
        return self._model(self._x).sum()

    def _step(self) -> None:
        self._forward().backward()

    def _planned_s(
        self, decision: Decision, stores: dict[Tier, Store] | None = None, segments: tuple[Segment, ...] = ()
    ) -> float:
        decisions = Decisions(tuple(map(str, range(_STAGES))), (decision,) * _STAGES, segments)
        controller = Controller(self._model, decisions, stores or {}, self._device, counters=Counters())
        controller.install()
        try:
            return self._median_s(self._step)
        finally:
            controller.remove()

    def _median_s(self, run: Callable[[], object]) -> float:
        clock = time.perf_counter if is_accelerator(self._device) else time.thread_time
        found = []
        for number in range(-_WARM_UPS, _STEPS):
            synchronize(self._device)
            begin = clock()
            run()
            if number >= 0:
                found.append(clock() - begin)
        synchronize(self._device)
        return statistics.median(found) / _STAGES


def _bandwidth_s(device: torch.device) -> float:
    """Seconds in which a device's memory reads or writes one byte."""
    source = torch.ones(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(timed(lambda: target.copy_(source), device) for _ in range(4)) / (2 * _BANDWIDTH_BYTES)
