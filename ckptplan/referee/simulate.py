"""A replay of a plan, with bytes at each step and all lanes, independent of core's rules and of every planner.

It adds and drops holders one at a time and shares no code with the solver, so that an error in one is detected by the
other. It implements the rules of NOTE [Residency] in core/rules.py, and these of time:

1. Compute runs forward 0..L-1, then backward L-1..0; a recomputed stage's backward has its recompute in front.
2. A stage's transfers join the outward queue, one after the other, when its forward ends. Compute waits at the end of
   forward step `release` until a transfer is done.
3. At the start of backward step k the returns of all transfers with `prefetch == k` join the inward queue, those of the
   highest stage first, and of a stage the last one first. Compute waits at the start of a stage's backward until its
   returns are done; at the start of the backward of an outermost segment's last stage, until those of all its stages
   are.
4. Queues are first in, first out, one transfer at a time, each direction alone; backlog carries over. Both tiers share
   them: a transfer takes its latency and the time of its bytes at the rate of `link`, or of `disk` for that tier.
5. A segment's sweep runs after these waits and before its last stage's own recompute; each of its runs takes the
   stage's `forward_s`, less `forward_wait_s`, and `rerun_overhead_s`. The sweep of an inner segment runs at the start
   of its own last stage's backward. In its backward step, a stage that a sweep kept takes only `backward_s`, the last
   stage of a segment also the `recompute_s` and `overhead_s` of its recompute, any other stage those of its option. A
   stage of a segment that moves something also takes what the `overhead_s` of its option is above that of its
   recompute.
6. The host launches each of these runs: a forward in `forward_launch_s`, one of a sweep in `rerun_overhead_launch_s`
   more, a backward in `backward_launch_s` and the `launch_s` of the option whose times it takes, and in a segment what
   moving takes, as in rule 5. The step is no shorter than the sum.

Worked example: two stages with `forward_s` 1 and `backward_s` 2 s each, and a link that needs 3 s for stage 0's
transfer in each direction. Stage 0 moves with release 1 and prefetch 1. Forward ends at 2 s; the transfer, queued at 1
s, ends at 4 s, for which compute waits (rule 2). Backward of stage 1 starts at 4 s and queues the return (rule 3),
which ends at 7 s; it ends at 6 s itself, so compute waits for 1 s more, and the step ends at 9 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptplan.core.checks import check_kind
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Phase
from ckptplan.core.storage import Storage
from ckptplan.referee.rules import broken_rules, holds, outermost

Lane = Literal["compute", "out", "in"]
What = Literal["forward", "recompute", "backward", "wait", "out", "in"]


@dataclass(frozen=True, slots=True)
class Event:
    """One busy or waiting interval [start_s, end_s) of a lane; `nbytes` are those of a transfer."""

    lane: Lane
    what: What
    stage: str
    start_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes on the device in one program step: at its start, and at its worst moment.

    With `sweep`, the run of `stage` in a segment's sweep, which is a part of the following backward step. The step
    lasts from `start_s`, waits for transfers included, to the next one's.
    """

    phase: Phase
    stage: str
    start_bytes: int
    peak_bytes: int
    sweep: bool = False
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stay:
    """A storage that is on the device at the start of the steps `first` to `last`, by their numbers in the timeline.

    With `again`, it is the block that a segment's sweep made again. Every step starts with its base bytes and those of
    the stays that include it.
    """

    storage: int
    first: int
    last: int
    again: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The result of a replay: peak, makespan, bytes per step and one event per interval of each lane.

    Events are those of compute and links. If the host takes longer to launch them, the makespan is `launch_s`.
    `runs` is the number of times that each stage's forward runs; a selective option's partial recompute counts as one.
    `stays` covers all storages and all steps but the last, the update. `between_bytes` are the bytes that forward
    leaves for backward, the output included.
    """

    peak_bytes: int
    peak_stage: str
    peak_phase: Phase
    makespan_s: float
    launch_s: float
    host_bytes: int
    disk_bytes: int
    between_bytes: int
    steps: tuple[StepBytes, ...]
    events: tuple[Event, ...]
    runs: tuple[int, ...]
    stays: tuple[Stay, ...]

    @property
    def forward_peak_bytes(self) -> int:
        """Peak of the bytes on the device in forward."""
        return max(step.peak_bytes for step in self.steps if step.phase == "forward")

    @property
    def stall_s(self) -> float:
        """Time in which compute waits for transfers."""
        return sum(event.end_s - event.start_s for event in self.events if event.what == "wait")


def simulate(profile: Profile, plan: Plan | Sequence[Decision], segments: Sequence[Segment] = ()) -> Timeline:
    """Replay `plan`, or decisions with their segments, on `profile`, without any limit.

    Returns
    -------
    Timeline
        Peak, makespan, bytes per step and one event per interval on the three lanes.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another profile.
    InvalidInputError
        If the decisions break a rule of structure (`validate` lists all violations).
    """
    check_kind(Profile, profile=profile)
    choices: Sequence[Decision]
    if isinstance(plan, Plan):
        profile = plan.require_profile(profile)
        choices, segments = plan.choices, plan.segments
    else:
        check_kind(Sequence, plan=plan)
        check_kind(Sequence, segments=segments)
        for number, choice in enumerate(plan):
            check_kind(Decision, **{f"decision {number}": choice})
        choices = plan
    broken = broken_rules(profile, choices, segments)
    if broken:
        raise InvalidInputError(f"the plan can't be replayed: stage {broken[0].stage!r}: {broken[0].detail}")
    return replay(profile, choices, segments)


def replay(profile: Profile, choices: Sequence[Decision], segments: Sequence[Segment]) -> Timeline:
    """Replay decisions whose structure has been checked; see `simulate`."""
    step = _Step(profile, choices, segments)
    n = len(choices)
    for k in range(n):
        step.forward(k)
    step.turn()
    between_bytes = max(profile.base_backward_bytes[-1] + step.device.total - step.steps[0].start_bytes, 0)
    for k in reversed(range(n)):
        step.backward(k)
    step.update()
    worst = max(step.steps, key=lambda entry: entry.peak_bytes)
    return Timeline(
        worst.peak_bytes,
        worst.stage,
        worst.phase,
        step.makespan_s,
        step.launch_s,
        sum(sent.nbytes for found in step.sent for sent in found if choices[sent.stage].tier == "host"),
        sum(sent.nbytes for found in step.sent for sent in found if choices[sent.stage].tier == "disk"),
        between_bytes,
        tuple(step.steps),
        tuple(step.clock.events),
        tuple(step.runs),
        tuple(step.device.stays),
    )


Block = tuple[int, int]
"""A storage, and 0 if forward made it, or the number of the sweep that made it again."""

_PROGRAM, _CALLER, _SWEEP = -1, -2, -3
"""Holders other than stages: the program's variables, the caller, and a sweep until a linked stage has run."""


class _Device:
    """Blocks with their holders; a block without holders is freed."""

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = storages
        self._holders: dict[Block, set[int]] = {}
        self._away: set[Block] = set()
        self._since: dict[Block, int] = {}  # block on the device -> the first step that starts with it
        self.total = 0
        self.steps = 0  # steps that have started
        self.stays: list[Stay] = []

    def _arrives(self, block: Block) -> None:
        self.total += self._storages[block[0]].nbytes
        self._since[block] = self.steps

    def _leaves(self, block: Block) -> None:
        self.total -= self._storages[block[0]].nbytes
        first = self._since.pop(block)
        if first < self.steps:
            self.stays.append(Stay(block[0], first, self.steps - 1, block[1] > 0))

    def end(self) -> None:
        """Note the stays of what is still there."""
        for block in list(self._since):
            self._leaves(block)

    def _is_here(self, block: Block) -> bool:
        """Whether a holder has the block on the device: if it is away, only the program can."""
        holders = self._holders.get(block, ())
        return _PROGRAM in holders if block in self._away else bool(holders)

    def _changed(self, block: Block, was_here: bool) -> None:
        """Count what arrives or leaves by a change of holders."""
        if self._is_here(block) != was_here:
            if was_here:
                self._leaves(block)
            else:
                self._arrives(block)

    def hold(self, block: Block, holder: int) -> None:
        was_here = self._is_here(block)
        self._holders.setdefault(block, set()).add(holder)
        self._changed(block, was_here)

    def drop(self, block: Block, holder: int) -> None:
        holders = self._holders.get(block)
        if holders is None or holder not in holders:
            return
        was_here = self._is_here(block)
        holders.remove(holder)
        self._changed(block, was_here)
        if not holders:
            del self._holders[block]
            self._away.discard(block)

    def send_away(self, block: Block) -> None:
        """The stages that hold it let go of its bytes; the program, if it holds it, doesn't."""
        if block in self._holders:
            was_here = self._is_here(block)
            self._away.add(block)
            self._changed(block, was_here)

    def bring_back(self, block: Block) -> None:
        if block in self._away:
            was_here = self._is_here(block)
            self._away.remove(block)
            self._changed(block, was_here)


class _Clock:
    """The time of compute, and the times at which the transfer queues become free."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self._out_free = self._in_free = 0.0

    def run(self, what: What, stage: str, seconds: float) -> None:
        self.events.append(Event("compute", what, stage, self.now, self.now + seconds))
        self.now += seconds

    def wait(self, until: float, stage: str) -> None:
        if until > self.now:
            self.events.append(Event("compute", "wait", stage, self.now, until))
            self.now = until

    def send(self, stage: str, nbytes: int, way: Link) -> float:
        begin = max(self.now, self._out_free)
        self._out_free = begin + (way.latency_s + nbytes / way.out_bytes_per_s)
        self.events.append(Event("out", "out", stage, begin, self._out_free, nbytes))
        return self._out_free

    def fetch(self, stage: str, nbytes: int, way: Link) -> float:
        begin = max(self.now, self._in_free)
        self._in_free = begin + (way.latency_s + nbytes / way.in_bytes_per_s)
        self.events.append(Event("in", "in", stage, begin, self._in_free, nbytes))
        return self._in_free


@dataclass(slots=True)
class _Sent:
    """A transfer, and when its latest copy, out or in, is complete."""

    stage: int
    storages: tuple[int, ...]
    nbytes: int
    done_s: float = 0.0


class _Step:
    """The state of a step that is being replayed."""

    def __init__(self, profile: Profile, choices: Sequence[Decision], segments: Sequence[Segment]) -> None:
        n = len(choices)
        self.profile, self.stages, self.storages = profile, profile.stages, profile.storages
        self.steps: list[StepBytes] = []
        self.runs = [1] * n
        self.device = _Device(profile.storages)
        self.clock = _Clock()
        self.launch_s = 0.0
        self.ways = [
            profile.disk if choice.tier == "disk" and profile.disk is not None else profile.link for choice in choices
        ]
        # The option with which each stage ran last: that of its decision, or the sweep's.
        self.option: list[Option] = [
            stage.option(choice.option) for stage, choice in zip(self.stages, choices, strict=True)
        ]
        outer = outermost(segments)
        self.swapping: dict[int, Option] = {i: self.option[i] for i in outer if self.option[i].moves}
        self.forward_holds = [holds(profile, i, choice, outer.get(i)) for i, choice in enumerate(choices)]
        self.held: list[dict[int, Block]] = [{} for _ in range(n)]  # per stage: storage -> the block it holds
        self.sweep_before: dict[int, Segment] = {}  # backward step -> segment whose sweep stands in front of it
        self._find_sweeps(segments)
        self.sweeps = 0

        self.sent: list[list[_Sent]] = [[] for _ in range(n)]
        self.release_at: list[list[_Sent]] = [[] for _ in range(n)]
        self.fetch_at: list[list[_Sent]] = [[] for _ in range(n)]
        self.wait_at: list[list[_Sent]] = [[] for _ in range(n)]
        for i, choice in enumerate(choices):
            for transfer in choice.transfers:
                moved = tuple(self.option[i].saved[p] for p in transfer.moves)
                sent = _Sent(i, moved, sum(self.storages[s].nbytes for s in moved))
                self.sent[i].append(sent)
                self.release_at[transfer.release].append(sent)
                self.fetch_at[transfer.prefetch].append(sent)
                self.wait_at[outer[i].last if i in outer else i].append(sent)

        self.made: list[list[int]] = [[] for _ in range(n)]
        self.program_ends: list[list[int]] = [[] for _ in range(n)]
        self.graph_ends: list[list[int]] = [[] for _ in range(n)]
        until = self._program_until()
        for s, storage in enumerate(self.storages):
            if storage.born < 0:
                if until[s] >= 0:
                    self.device.hold((s, 0), _PROGRAM)
                if storage.to_end:
                    self.device.hold((s, 0), _CALLER)
            elif storage.born < n:
                self.made[storage.born].append(s)
            self.program_ends[min(max(until[s], 0), n - 1)].append(s)
            if storage.graph_until is not None:
                self.graph_ends[min(max(storage.graph_until, 0), n - 1)].append(s)

    def _program_until(self) -> list[int]:
        """Return the program's last step with each storage; it passes the storage to the first stage that holds it."""
        until = [storage.program_until for storage in self.storages]
        held: set[int] = set()
        for i, storages in enumerate(self.forward_holds):
            for s in storages:
                if s not in held:
                    held.add(s)
                    until[s] = max(until[s], i)
        return until

    def _find_sweeps(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self.sweep_before[segment.last] = segment
            self._find_sweeps(segment.inner)

    def _record(
        self, phase: Phase, stage: int, base_bytes: int, added_bytes: int, start_s: float, *, sweep: bool = False
    ) -> None:
        start = base_bytes + self.device.total
        self.steps.append(StepBytes(phase, self.stages[stage].name, start, start + added_bytes, sweep, start_s))
        self.device.steps += 1

    def _take(self, stage: int, s: int, block: Block) -> None:
        """Let `stage` hold `block` of storage `s`, unless it holds one of `s` already."""
        if s not in self.held[stage]:
            self.held[stage][s] = block
            self.device.hold(block, stage)

    def forward(self, k: int) -> None:
        name, option = self.stages[k].name, self.option[k]
        self._record("forward", k, self.profile.base_forward_bytes[k], option.forward_bytes, self.clock.now)
        self.clock.run("forward", name, self.stages[k].forward_s)
        self.launch_s += self.stages[k].forward_launch_s
        for s in self.made[k]:
            self.device.hold((s, 0), _PROGRAM)
            if self.storages[s].to_end:
                self.device.hold((s, 0), _CALLER)
        for s in self.forward_holds[k]:
            self._take(k, s, (s, 0))
        for s in self.program_ends[k]:
            self.device.drop((s, 0), _PROGRAM)
        for s in self.graph_ends[k]:
            for stage, held in enumerate(self.held):
                if held.pop(s, None) is not None:
                    self.device.drop((s, 0), stage)
        for sent in self.sent[k]:
            new = sum(self.storages[s].nbytes for s in sent.storages if not self.storages[s].on_host)
            sent.done_s = self.clock.send(name, new, self.ways[k]) if new else self.clock.now
        self.clock.wait(max((sent.done_s for sent in self.release_at[k]), default=0.0), name)
        for sent in self.release_at[k]:
            for s in sent.storages:
                self.device.send_away((s, 0))

    def turn(self) -> None:
        """Drop the storages held by variables of the program, which don't last into backward."""
        for s in range(len(self.storages)):
            self.device.drop((s, 0), _PROGRAM)

    def backward(self, k: int) -> None:
        stage, start_s = self.stages[k], self.clock.now
        for sent in reversed(self.fetch_at[k]):
            sent.done_s = self.clock.fetch(self.stages[sent.stage].name, sent.nbytes, self.ways[sent.stage])
            for s in sent.storages:
                self.device.bring_back((s, 0))
        self.clock.wait(max((sent.done_s for sent in self.wait_at[k]), default=0.0), stage.name)
        if k in self.sweep_before:
            start_s = self._sweep(self.sweep_before[k], start_s)
        option = self.option[k]
        self._record("backward", k, self.profile.base_backward_bytes[k], option.backward_bytes, start_s)
        if option.recomputes and option.name != "discard":
            self.runs[k] += not option.ratio
            self.clock.run("recompute", stage.name, option.recompute_s)
        overhead_s, launch_s = option.overhead_s, option.launch_s
        if k in self.swapping:
            again, swap = self._recompute(k), self.swapping[k]
            overhead_s += max(0.0, swap.overhead_s - again.overhead_s)
            launch_s += max(0.0, swap.launch_s - again.launch_s)
        self.clock.run("backward", stage.name, stage.backward_s + overhead_s)
        self.launch_s += stage.backward_launch_s + launch_s
        for block in self.held[k].values():
            self.device.drop(block, k)

    def _sweep(self, segment: Segment, start_s: float) -> float:
        """Run `segment` again up to its last stage, which is recomputed next (rules 6 and 7 of NOTE [Residency]).

        Its first run starts at `start_s`, waits included; return the start of the last stage's recompute.
        """
        self.sweeps += 1
        number = self.sweeps
        inner = outermost(segment.inner)
        base_bytes = self.profile.base_backward_bytes[segment.last]
        runs = [k for k in range(segment.first, segment.last) if not self.stages[k].is_glue]
        awaited_by: dict[int, int] = {}  # storage -> the last stage that is linked to it
        for k in (*runs, segment.last):
            awaited_by.update(dict.fromkeys(self.stages[k].linked, k))
        for k in runs:
            stage, again = self.stages[k], self._recompute(k)
            option = again if k in inner else stage.keep
            self._record("backward", k, base_bytes, option.forward_bytes, start_s, sweep=True)
            self.clock.run("recompute", stage.name, stage.forward_s - stage.forward_wait_s + stage.rerun_overhead_s)
            self.launch_s += stage.forward_launch_s + stage.rerun_overhead_launch_s
            start_s = self.clock.now
            self.runs[k] += 1
            for s in self.made[k]:
                if s in awaited_by:
                    self.device.hold((s, number), _SWEEP)
            if k in inner:
                first = inner[k].first
                kept = [s for s in again.held if s not in stage.linked or self.storages[s].born < first]
            else:
                kept = list(option.held)
            self._arrive(k, kept, number, awaited_by)
            self.option[k] = option
        last = self._recompute(segment.last)
        self._arrive(segment.last, last.held, number, awaited_by)
        self.option[segment.last] = last
        return start_s

    def _arrive(self, k: int, kept: Iterable[int], number: int, awaited_by: dict[int, int]) -> None:
        """Let stage `k`, which sweep `number` has run or is about to recompute, hold `kept`."""
        for s in kept:
            if self.storages[s].graph_until is None:  # a slot of a graph that is gone isn't filled
                self._take(k, s, (s, number))
        for s in self.stages[k].linked:
            if awaited_by[s] == k:
                self.device.drop((s, number), _SWEEP)

    def _recompute(self, k: int) -> Option:
        option = self.stages[k].recompute
        if option is None:
            raise InvalidInputError(f"stage {self.stages[k].name!r} is in a segment, but can't be recomputed")
        return option

    @property
    def makespan_s(self) -> float:
        return max(self.clock.now, self.launch_s)

    def update(self) -> None:
        self.device.end()
        peak = self.profile.update_peak_bytes
        self.steps.append(StepBytes("update", self.stages[0].name, peak, peak, start_s=self.makespan_s))
