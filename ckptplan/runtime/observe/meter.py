"""Accounts of a step's time: one is open at any moment, and stages, recompute and waits switch between them.

NOTE [Accounts]
1. At every moment, time is added to one account: a stage's forward, recompute, backward or stall. `mark` closes it and
   opens another. Time between the forwards of two stages is added to the later stage. In backward, time
   outside of any stage is added to the stage whose backward began last (`core.measured.backward_groups`).
2. A stall or a recompute interrupts another account, which is opened again afterwards. A stall belongs to the stage
   whose forward or backward was under way, even if a sweep runs another stage on its behalf.
3. A step is the time from the beginning of a pass to the end of its backward. Passes in another order (a forward
   without backward, two forwards before one backward) aren't counted as steps.
4. A mark takes some microseconds. So only the first passes are measured, then one in `EVERY`, and none inside `off`,
   where the caller times the steps. Marks are summed in `steps`, not during training. On the CPU a mark is a time; on
   CUDA it is an event on the compute stream, so a step waits for nothing.

Example, with the times of the marks in ms: stage 0 forward 0, stage 1 forward 2, stage 1 backward 5, stage 0 backward
9, stage 0 recompute 9, stage 0 stall 10, stage 0 recompute 11, stage 0 backward 12, end 16. Then stage 0 has 2 ms of
forward, 2 of recompute, 1 of stall and 4 of backward, stage 1 has 3 of forward and 4 of backward; the step takes 16 ms.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ckptplan.core.link import Tier
from ckptplan.core.measured import Copied, StageTimes
from ckptplan.tensors.accelerator import device_bytes, is_accelerator, is_capturing, timing_event

FORWARD, RECOMPUTE, BACKWARD, STALL = range(4)
KINDS = 4
"""Number of kinds of accounts; an account's number is `stage * KINDS + kind`."""
NONE = -KINDS
"""Account of the time outside of steps: before a pass, or after its backward."""

_KEPT = {"cpu": 16, "cuda": 8}
"""Number of last steps that are kept, by device type."""
_FIRST = 9
EVERY = 8
"""After the first `_FIRST` passes, one in `EVERY` is measured on average, chosen at random: if a step has several
passes, each of them is measured now and then."""
_MOST_MARKS = 1 << 15  # a bound for passes through which backward runs again and again

Way = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """One copy between tiers.

    Attributes
    ----------
    way : "out" or "in"
    tier : "host" or "disk"
        The tier at the other end of the copy.
    nbytes : int
    begin, end : float or torch.cuda.Event
        In seconds of `time.perf_counter`, or an event of the stream that copied.
    """

    way: Way
    tier: Tier
    nbytes: int
    begin: Any
    end: Any


OnCopy = Callable[[Way, int, Any, Any], None]
"""Callback for a copy: way, bytes, begin, end as in `TimedCopy`. Called from any thread; on CUDA when it is issued."""


@dataclass
class Step:
    """The marks of one pass and its backward; `regular` if they are complete and in order (NOTE [Accounts], rule 3)."""

    regular: bool
    marks: list[tuple[int, Any]] = field(default_factory=list)
    copies: list[TimedCopy] = field(default_factory=list)
    memory: list[int] | None = None
    ended: bool = False

    def copied(self, tier: Tier, way: Way, nbytes: int, begin: Any, end: Any) -> None:
        """Note a copy; arguments as of `OnCopy` after the tier."""
        if len(self.copies) < _MOST_MARKS:
            self.copies.append(TimedCopy(way, tier, nbytes, begin, end))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, in all and by account, and its copies."""

    step_s: float
    accounts: dict[int, float]
    host: Copied
    disk: Copied


class Meter:
    """Keeps the accounts of one applied plan.

    Parameters
    ----------
    device : torch.device or None
        Device whose compute is measured; None: nothing is measured.
    clock : callable
        Returns the time in seconds; used where marks are times.

    Attributes
    ----------
    passes : int
        Number of passes that have begun.
    every : bool
        Whether every step is measured, on CUDA with the device's allocated bytes at every mark.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._cuda = device is not None and is_accelerator(device)
        self._clock: Callable[[], Any] = functools.partial(timing_event, device) if device and self._cuda else clock
        self._off = False
        self.restart()

    def restart(self) -> None:
        """Forget all steps, because another plan runs from now on."""
        self._now = self._base = NONE
        self._step: Step | None = None
        self.passes = 0
        self._left_out = False
        self.every = False
        self._random = random.Random(0)
        self._next = _FIRST + EVERY
        self._kept: deque[Step] = deque(maxlen=_KEPT["cuda" if self._cuda else "cpu"])

    def begin(self) -> Callable[[Tier, Way, int, Any, Any], None] | None:
        """Note that a pass begins; return the callback for its copies, or None if the step isn't measured."""
        if self._device is None:
            return None
        former, self._step = self._step, None
        if former is not None and former.ended:
            self._keep(former)
        unfinished = self._now != NONE
        self._now = self._base = NONE
        self.passes += 1
        left_out = _FIRST < self.passes < self._next
        if self.passes == self._next:
            self._next += self._random.randint(EVERY // 2, EVERY + EVERY // 2)
        if not self.every and (self._off or left_out or is_capturing(self._device)):
            self._now = FORWARD  # lets the next pass see whether this one has ended
            return None
        self._step = Step(regular=not unfinished, memory=[] if self._cuda and self.every else None)
        self.mark(FORWARD)
        return self._step.copied

    def mark(self, account: int) -> int:
        """Open `account`, to which time is added from now on; return the one that was open."""
        before, self._now = self._now, account
        if account & 1 == 0:  # forward, backward, none
            self._base = account
        step = self._step
        if step is None or (before == account and step.memory is None):
            return before
        if len(step.marks) == _MOST_MARKS:
            step.regular = False
            return before
        step.marks.append((account, self._clock()))
        if step.memory is not None and self._device is not None:
            step.memory.append(device_bytes(self._device).allocated_bytes)
        return before

    def stall(self) -> int:
        """Note that compute begins to wait for a copy; pass the result to `mark` when the wait ends."""
        return self.mark(self._base + STALL - self._base % KINDS) if self._base != NONE else NONE

    def backward_ended(self) -> None:
        """Note that the backward has ended."""
        self.mark(NONE)
        if self._step is not None:
            self._step.ended = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Don't measure passes that begin inside."""
        former, self._off = self._off, True
        try:
            yield
        finally:
            self._off = former

    @property
    def last(self) -> Step | None:
        """The present step if its backward has ended, otherwise None."""
        return self._step if self._step is not None and self._step.ended else None

    def steps(self) -> list[StepTimes]:
        """Return the times of the last steps, oldest first, without the first of all. On CUDA, wait for the device."""
        last = self.last if self._left_out else None
        return [_summed(step) for step in (*self._kept, last) if step is not None and step.regular]

    def _keep(self, step: Step) -> None:
        if not step.regular:
            return
        if not self._left_out:
            self._left_out = True  # the first step: caches, allocators and libraries warm up
        else:
            self._kept.append(step)


def seconds(begin: Any, end: Any) -> float:
    """Return the seconds from one mark to another."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    begin.synchronize()
    return begin.elapsed_time(end) / 1e3


def _summed(step: Step) -> StepTimes:
    accounts: dict[int, float] = {}
    last = max(i for i, (account, _) in enumerate(step.marks) if account == NONE)
    for (account, begin), (_, end) in zip(step.marks[:last], step.marks[1 : last + 1], strict=True):
        accounts[account] = accounts.get(account, 0.0) + seconds(begin, end)
    outside = accounts.pop(NONE, 0.0)  # between two backwards through the same pass
    step_s = seconds(step.marks[0][1], step.marks[last][1]) - outside
    copies = list(step.copies)
    return StepTimes(step_s, accounts, _copied(copies, "host"), _copied(copies, "disk"))


def _copied(copies: list[TimedCopy], tier: Tier) -> Copied:
    sums = {"out": [0, 0.0], "in": [0, 0.0]}
    for copy in copies:
        if copy.tier == tier:
            sums[copy.way][0] += copy.nbytes
            sums[copy.way][1] += seconds(copy.begin, copy.end)
    return Copied(int(sums["out"][0]), sums["out"][1], int(sums["in"][0]), sums["in"][1])


def median_step(steps: Sequence[StepTimes], stages: int) -> tuple[StageTimes, ...]:
    """Return, per stage, the medians of its accounts."""

    def of(stage: int, kind: int) -> float:
        return statistics.median(step.accounts.get(stage * KINDS + kind, 0.0) for step in steps)

    return tuple(StageTimes(of(i, FORWARD), of(i, RECOMPUTE), of(i, BACKWARD), of(i, STALL)) for i in range(stages))


def median_copied(copied: Sequence[Copied]) -> Copied:
    """Return the copies of the step whose copies took the median time."""
    return sorted(copied, key=lambda c: c.out_s + c.in_s)[len(copied) // 2]
