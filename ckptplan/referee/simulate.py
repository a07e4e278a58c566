"""Replay a plan from the profile alone: bytes at every step, and three lanes of time.

An interpreter, on purpose: it walks the step, adds and drops holders one at a time, and shares no code with what chose
the plan. The rules it follows are NOTE [Residency] in core/chain.py and these, for time:

1. Compute runs forward 0..L-1, then backward L-1..0; a recomputed stage's backward has its recompute in front.
2. What a swapped stage moves joins the outward queue, as one transfer, when its forward ends. Compute waits at the end
   of forward step `release` until that transfer is done.
3. At the start of backward step k the returns of all stages with `prefetch == k` join the inward queue, the highest
   stage first. Compute waits at the start of a stage's backward until its return is done.
4. Queues are first in, first out, one transfer at a time, each direction alone; backlog carries over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptplan.core.chain import Phase
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile

Lane = Literal["compute", "out", "in"]


@dataclass(frozen=True, slots=True)
class Event:
    """One busy or waiting interval [start_s, end_s) of a lane."""

    lane: Lane
    what: Literal["forward", "recompute", "backward", "wait", "out", "in"]
    stage: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes on the device in one program step: at its start, and at its worst moment."""

    phase: Phase
    stage: str
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a plan does, by the referee's reckoning."""

    peak_bytes: int
    peak_stage: str
    peak_phase: Phase
    makespan_s: float
    host_bytes: int
    steps: tuple[StepBytes, ...]
    events: tuple[Event, ...]

    @property
    def stall_s(self) -> float:
        """Time compute waits for transfers."""
        return sum(event.end_s - event.start_s for event in self.events if event.what == "wait")


def simulate(profile: Profile, plan: Plan | tuple[Decision, ...]) -> Timeline:
    """Replay `plan`, or bare decisions, on `profile`; no limit is applied.

    Returns
    -------
    Timeline
        Peak, makespan, bytes per step and one event per interval on the three lanes.
    """
    choices = plan.choices if isinstance(plan, Plan) else plan
    if isinstance(plan, Plan):
        plan.require_profile(profile)
    steps = _bytes_per_step(profile, choices)
    events, makespan_s = _lanes(profile, choices)
    worst = max(steps, key=lambda step: step.peak_bytes)
    moved = sum(_moved_bytes(profile, i, choices[i]) for i in range(len(choices)))
    return Timeline(worst.peak_bytes, worst.stage, worst.phase, makespan_s, moved, steps, events)


def _moved_bytes(profile: Profile, stage: int, choice: Decision) -> int:
    return sum(profile.storages[profile.stages[stage].saved[p]].nbytes for p in choice.moves)


def _bytes_per_step(profile: Profile, choices: tuple[Decision, ...]) -> tuple[StepBytes, ...]:
    n = len(profile.stages)
    holders: dict[int, set[int]] = {s: set() for s in range(len(profile.storages))}
    made: list[list[int]] = [[] for _ in range(n)]
    leaves_program: list[list[int]] = [[] for _ in range(n)]
    released: list[list[int]] = [[] for _ in range(n)]
    returned: list[list[int]] = [[] for _ in range(n)]
    here: set[int] = set()
    for s, storage in enumerate(profile.storages):
        if storage.born < 0:
            here.add(s)
        else:
            made[storage.born].append(s)
        leaves_program[min(max(storage.program_until, 0), n - 1)].append(s)
    for i, choice in enumerate(choices):
        moved = [profile.stages[i].saved[p] for p in choice.moves]
        if choice.release is not None and choice.prefetch is not None:
            released[choice.release].extend(moved)
            returned[choice.prefetch].extend(moved)
    total = sum(profile.storages[s].nbytes for s in here)
    steps: list[StepBytes] = []

    def arrive(s: int) -> int:
        if s in here:
            return 0
        here.add(s)
        return profile.storages[s].nbytes

    def leave(s: int) -> int:
        if s not in here:
            return 0
        here.remove(s)
        return profile.storages[s].nbytes

    for k in range(n):
        stage, choice = profile.stages[k], choices[k]
        transient = stage.transient(choice.action)
        added = transient.forward_bytes if transient else 0
        start = profile.base_forward_bytes[k] + total
        steps.append(StepBytes("forward", stage.name, start, start + added))
        total += sum(arrive(s) for s in made[k])
        for s in stage.held(choice.action):
            holders[s].add(k)
        for s in {*made[k], *leaves_program[k]}:
            storage = profile.storages[s]
            if storage.program_until <= k and not holders[s] and not storage.to_end:
                total -= leave(s)
        total -= sum(leave(s) for s in released[k])
    # The program's own variables are gone by now; what is left is held by stages or kept by the caller.
    for s in list(here):
        if not holders[s] and not profile.storages[s].to_end:
            total -= leave(s)
    for k in reversed(range(n)):
        stage, choice = profile.stages[k], choices[k]
        total += sum(arrive(s) for s in returned[k] if holders[s])
        transient = stage.transient(choice.action)
        added = transient.backward_bytes if transient else 0
        start = profile.base_backward_bytes[k] + total
        steps.append(StepBytes("backward", stage.name, start, start + added))
        for s in stage.held(choice.action):
            holders[s].discard(k)
            if not holders[s] and not profile.storages[s].to_end:
                total -= leave(s)
    steps.append(StepBytes("update", profile.stages[0].name, profile.update_peak_bytes, profile.update_peak_bytes))
    return tuple(steps)


def _lanes(profile: Profile, choices: tuple[Decision, ...]) -> tuple[tuple[Event, ...], float]:
    n = len(profile.stages)
    events: list[Event] = []
    out_done: dict[int, float] = {}
    in_done: dict[int, float] = {}
    now = out_free = in_free = 0.0

    def wait(until: float, stage: str) -> float:
        if until > now:
            events.append(Event("compute", "wait", stage, now, until))
        return max(now, until)

    for k, (stage, choice) in enumerate(zip(profile.stages, choices, strict=True)):
        events.append(Event("compute", "forward", stage.name, now, now + stage.forward_s))
        now += stage.forward_s
        if choice.moves:
            begin = max(now, out_free)
            out_free = out_done[k] = begin + profile.link.out_s(_moved_bytes(profile, k, choice))
            events.append(Event("out", "out", stage.name, begin, out_free))
        for i in range(k + 1):
            if choices[i].release == k:
                now = wait(out_done[i], stage.name)
    for k in reversed(range(n)):
        stage, choice = profile.stages[k], choices[k]
        for i in reversed(range(n)):
            if choices[i].prefetch == k:
                begin = max(now, in_free)
                in_free = in_done[i] = begin + profile.link.in_s(_moved_bytes(profile, i, choices[i]))
                events.append(Event("in", "in", profile.stages[i].name, begin, in_free))
        if choice.moves:
            now = wait(in_done[k], stage.name)
        if choice.action == "recompute":
            events.append(Event("compute", "recompute", stage.name, now, now + stage.recompute_s))
            now += stage.recompute_s
        events.append(Event("compute", "backward", stage.name, now, now + stage.backward_s))
        now += stage.backward_s
    return tuple(events), now
