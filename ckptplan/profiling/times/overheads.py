"""Measure what a running plan takes of compute besides the stages' work, once for each device and process.

Steps of a few small stages run as a plan runs them: kept, swapped and recomputed together. Stages of tiny tensors give
the time of the runtime's own code. The same stages with larger tensors give, on the CPU, what each byte moved takes
from compute: the bandwidth of its copy, and the caches, since the thread that copies runs on another core. There it is
the computing thread's own time, in which neither waits for copies nor other processes count.

An accelerator copies by itself, and all that compute loses is bandwidth of its memory: for each byte moved, the time of
one byte. The runtime's code is the host's there, and its time that until all is launched.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ckptplan.core.link import Tier
from ckptplan.core.option import Action
from ckptplan.core.overheads import Overheads
from ckptplan.core.plan import Decision, Decisions
from ckptplan.core.segment import Segment
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.stores import Store, make_store
from ckptplan.tensors.accelerator import is_accelerator, synchronize
from ckptplan.training.measure import timed

_STAGES = 4
_MANY, _FEW = 9, 1  # storages that a stage saves: their difference is what each takes, the rest is a stage's
_TINY_BYTES = 256
_LARGE_BYTES = 1 << 19  # as activations have them, and in all more than a core's own caches
_LARGE_COUNT = 4
_WARM_UPS = 2
_ROUNDS = 9  # in each of which the steps to compare run one after the other
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
    capacity = max(_MANY * _TINY_BYTES, _LARGE_COUNT * _LARGE_BYTES) * _STAGES
    store = make_store(device, capacity_bytes=capacity, directory=swap_dir, limit_bytes=None)
    try:
        with torch.enable_grad(), contextlib.ExitStack() as stack:

            def steps(count: int, nbytes: int, action: Action | None, *segments: Segment) -> _Steps:
                return stack.enter_context(_Steps(count, nbytes, device, action, {"host": store}, segments))

            actions: tuple[Action | None, ...] = (None, "keep", "swap")
            many, few, large = (
                [steps(count, nbytes, action) for action in actions]
                for count, nbytes in ((_MANY, _TINY_BYTES), (_FEW, _TINY_BYTES), (_LARGE_COUNT, _LARGE_BYTES))
            )
            again = steps(_FEW, _TINY_BYTES, "recompute", Segment(0, _STAGES - 1))
            plain, kept, swapped, kept_few, swapped_few, reran, forward = _in_turn(
                device, *(s.step for s in (*many, *few[1:], again)), few[0].forward
            )
            call_s = _beyond(kept, plain)
            swapping_s, few_swapping_s = _beyond(swapped, kept), _beyond(swapped_few, kept_few)
            storage_s = max(swapping_s - few_swapping_s, 0.0) / (_MANY - _FEW)
            swap_s = max(few_swapping_s - _FEW * storage_s, 0.0)
            rerun_s = _beyond(reran, [a + b for a, b in zip(kept_few, forward, strict=True)])
            if is_accelerator(device):
                byte_s = _bandwidth_s(device)
            else:
                kept, swapped = _in_turn(device, *(s.step for s in large[1:]))
                copies_s = _beyond(swapped, kept) - swap_s - _LARGE_COUNT * storage_s
                byte_s = max(copies_s, 0.0) / (_LARGE_COUNT * _LARGE_BYTES)
    finally:
        store.close()
    return Overheads(call_s, swap_s, storage_s, byte_s, rerun_s)


def _in_turn(device: torch.device, *runs: Callable[[], object]) -> list[list[float]]:
    """Seconds of a stage in each of `runs`, per round in which they ran one after the other."""
    clock = time.perf_counter if is_accelerator(device) else time.thread_time
    found: list[list[float]] = [[] for _ in runs]
    for number in range(-_WARM_UPS, _ROUNDS):
        for took_s, run in zip(found, runs, strict=True):
            synchronize(device)
            begin = clock()
            run()
            if number >= 0:
                took_s.append((clock() - begin) / _STAGES)
    synchronize(device)
    return found


def _beyond(longer_s: list[float], shorter_s: list[float]) -> float:
    """The median of the differences between two runs of each round; at least 0."""
    return max(statistics.median(a - b for a, b in zip(longer_s, shorter_s, strict=True)), 0.0)


class _SavingStage(nn.Module):
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


class _Steps(contextlib.AbstractContextManager["_Steps"]):
    """Training steps of stages that each save `count` storages of `nbytes`; inside, all take one action of a plan."""

    def __init__(
        self,
        count: int,
        nbytes: int,
        device: torch.device,
        action: Action | None,
        stores: dict[Tier, Store],
        segments: tuple[Segment, ...],
    ) -> None:
        self._model = nn.Sequential(*(_SavingStage(count, device) for _ in range(_STAGES)))
        self._x = torch.ones(nbytes // 4, device=device, requires_grad=True)
        self._controller = None
        if action is not None:
            last = _STAGES - 1
            moves = tuple(range(count)) if action == "swap" else ()
            decision = Decision.moving(action, moves, last, last)
            decisions = Decisions(tuple(map(str, range(_STAGES))), (decision,) * _STAGES, segments)
            self._controller = Controller(self._model, decisions, stores, device, counters=Counters())
            self._controller.install()

    def __exit__(self, *_: object) -> None:
        if self._controller is not None:
            self._controller.remove()

    def forward(self) -> torch.Tensor:
        return self._model(self._x).sum()

    def step(self) -> None:
        self.forward().backward()


def _bandwidth_s(device: torch.device) -> float:
    """Seconds in which a device's memory reads or writes one byte."""
    source = torch.ones(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(timed(lambda: target.copy_(source), device) for _ in range(4)) / (2 * _BANDWIDTH_BYTES)
