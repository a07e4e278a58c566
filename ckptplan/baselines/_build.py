"""From a baseline's options and segments to a finished plan: schedule, peak, makespan, and the error when nothing fits.

All baselines share this, so they differ in their rule alone: release and prefetch points are the best there are for
the options chosen (core/schedule.py), and an option that a stage doesn't have becomes keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Plan, launch_s, saved_bytes
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import Overflow, Residency, residency, schedule
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Phase, Stage
from ckptplan.core.units import format_bytes

SPACE = "none: a rule, bound is the compute time alone"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rule chose: an option per stage, and the segments.

    Parameters
    ----------
    options : tuple of Option
        One per stage, of its menu.
    segments : tuple of Segment
        Top level, in order; their module stages' options are "recompute" or "recompute+swap".
    """

    options: tuple[Option, ...]
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Makespan of scheduled decisions and, per stage, how long compute waits for its copies.

    Attributes
    ----------
    makespan_s : float
    out_wait_s, in_wait_s : tuple of float
        Unhidden swap-out and swap-in per stage.
    """

    makespan_s: float
    out_wait_s: tuple[float, ...]
    in_wait_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst step of a plan."""

    bytes: int
    stage: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Replay:
    """A choice under its best schedule within a budget.

    Attributes
    ----------
    choice : Choice
        As it is scheduled: a swap that moves nothing is a keep where that makes no difference.
    decisions : tuple of Decision
    peak : Peak
    times : Times
    host_bytes : int
        What moves.
    """

    choice: Choice
    decisions: tuple[Decision, ...]
    peak: Peak
    times: Times
    host_bytes: int


def pick(stage: Stage, *names: str) -> Option:
    """The first of the options `names` that `stage` has; keep where it has none of them."""
    return next((option for name in names if (option := stage.find(name)) is not None), stage.keep)


def named(profile: Profile, names: Sequence[str], segments: Iterable[Segment] = ()) -> Choice:
    """The choice of one option name per stage.

    A stage that lacks its option keeps, and "recompute+swap" without it is recompute. Module stages of `segments`
    recompute whatever `names` says, and a segment of one stage becomes that stage's option.
    """
    wanted = list(names)
    longer = []
    for segment in segments:
        for i in range(segment.first, segment.last + 1):
            if profile.stages[i].is_glue:
                wanted[i] = "keep"
            elif wanted[i] not in ("recompute", "recompute+swap"):
                wanted[i] = "recompute"
        if segment.first < segment.last:
            longer.append(segment)
    options = tuple(
        pick(stage, name, "recompute") if name == "recompute+swap" else pick(stage, name)
        for stage, name in zip(profile.stages, wanted, strict=True)
    )
    return Choice(options, tuple(longer))


def runs(profile: Profile) -> list[list[int]]:
    """Module stages that may lie in one segment: maximal runs without a module that can't be recomputed."""
    found: list[list[int]] = [[]]
    for i, stage in enumerate(profile.stages):
        if stage.is_glue:
            continue
        if stage.recompute is None:
            found.append([])
        else:
            found[-1].append(i)
    return [run for run in found if run]


def joined(profile: Profile, options: Sequence[Option]) -> tuple[Segment, ...]:
    """Consecutive stages whose whole forward is recomputed, as segments of two and more; glue between is skipped."""
    segments = []
    run: list[int] = []
    for i, (stage, option) in enumerate(zip(profile.stages, options, strict=True)):
        if stage.is_glue:
            continue
        if option.recomputes and not option.ops:
            run.append(i)
        else:
            segments.append(run)
            run = []
    return tuple(Segment(run[0], run[-1]) for run in (*segments, run) if len(run) > 1)


def own_bytes(profile: Profile) -> list[int]:
    """Per stage, the bytes that recompute would free: held by keep and not by recompute, each storage counted once.

    0 where the stage can't be recomputed.
    """
    counted: set[int] = set()
    sizes = []
    for stage in profile.stages:
        again = stage.recompute
        mine = set(stage.keep.held) - counted
        counted |= mine
        free = mine - set(again.held) if again is not None else set()
        sizes.append(sum(profile.storages[s].nbytes for s in free if not profile.storages[s].to_end))
    return sizes


def movable_bytes(profile: Profile) -> tuple[int, ...]:
    """Per stage, the bytes that it moves when every stage swaps."""
    return residency(profile, named(profile, ["swap"] * len(profile.stages)).options).moved_bytes


def costly(profile: Profile) -> list[bool]:
    """Per stage, whether its forward takes at least as much time per byte saved as the median module stage's.

    Stands in for "is a convolution or linear layer" of rules that know layers: a profile has stages, and the split
    those rules are after is between what is dear to recompute and what is cheap. So in a chain of equal stages all are
    costly. Bytes saved by several stages count for the first. Glue and stages that save nothing are not costly.
    """
    counted: set[int] = set()
    rates: list[float | None] = []
    for stage in profile.stages:
        nbytes = sum(profile.storages[s].nbytes for s in set(stage.keep.held) - counted)
        counted.update(stage.keep.held)
        rates.append(stage.forward_s / nbytes if nbytes and not stage.is_glue else None)
    known = sorted(rate for rate in rates if rate is not None)
    middle = known[len(known) // 2] if known else 0.0
    return [rate is not None and rate >= middle for rate in rates]


def times(profile: Profile, decisions: Sequence[Decision], r: Residency) -> Times:
    """Three first-in-first-out lanes, as the design's time model has them; O(stages).

    Parameters
    ----------
    r : Residency
        Of the decisions' options: what each stage moves, when it must be back, and the time of each backward step.
    """
    n = len(decisions)
    out_wait, in_wait, done = [0.0] * n, [0.0] * n, [0.0] * n
    now = out_free = in_free = 0.0
    released: list[list[int]] = [[] for _ in range(n)]
    returned: list[list[int]] = [[] for _ in range(n)]
    awaited: list[list[int]] = [[] for _ in range(n)]
    for i, choice in enumerate(decisions):
        if choice.release is not None and choice.prefetch is not None:
            released[choice.release].append(i)
            returned[choice.prefetch].append(i)
            awaited[r.needed[i]].append(i)
    for k, stage in enumerate(profile.stages):
        now += stage.forward_s
        if decisions[k].moves:
            out_free = done[k] = max(now, out_free) + profile.link.out_s(r.moved_bytes[k])
        for i in released[k]:
            out_wait[i] = max(0.0, done[i] - now)
            now = max(now, done[i])
    for k in reversed(range(n)):
        for i in reversed(returned[k]):
            in_free = done[i] = max(now, in_free) + profile.link.in_s(r.moved_bytes[i])
        for i in reversed(awaited[k]):
            in_wait[i] = max(0.0, done[i] - now)
            now = max(now, done[i])
        now += r.backward_s[k]
    return Times(now, tuple(out_wait), tuple(in_wait))


def tightest_peak(profile: Profile, r: Residency) -> Peak:
    """Find the worst step with everything that moves away: no schedule of these options has a smaller peak."""
    return _worst(profile, r.forward_bytes, r.backward_bytes)


def excess_bytes(profile: Profile, r: Residency, budget_bytes: int) -> int:
    """Bytes over the budget, summed over all program steps, with everything that moves away."""
    needs = (*r.forward_bytes, *r.backward_bytes, profile.update_peak_bytes)
    return sum(max(0, need - budget_bytes) for need in needs)


def peak(profile: Profile, decisions: Sequence[Decision], r: Residency) -> Peak:
    """Find the worst step of scheduled decisions, where `r` is the residency of their options."""
    n = len(decisions)
    staying_forward, staying_backward = [0] * (n + 1), [0] * (n + 1)
    for i, choice in enumerate(decisions):
        for staying, begin, point in (
            (staying_forward, i, choice.release),
            (staying_backward, r.needed[i], choice.prefetch),
        ):
            # What never needs to leave has no points and stays to the end.
            staying[begin + 1] += r.moved_bytes[i]
            staying[(n - 1 if point is None else point) + 1] -= r.moved_bytes[i]
    forward, backward = (
        [need + more for need, more in zip(needs, accumulate(staying), strict=False)]
        for needs, staying in ((r.forward_bytes, staying_forward), (r.backward_bytes, staying_backward))
    )
    return _worst(profile, forward, backward)


def smallest_peak(profile: Profile, choice: Choice) -> Peak:
    """The worst step of `choice` under its tightest schedule."""
    return tightest_peak(profile, residency(profile, choice.options, choice.segments))


def replay(profile: Profile, choice: Choice, budget_bytes: int, r: Residency | None = None) -> Replay | None:
    """`choice` under its best schedule within the budget; None where none fits. `r` is its residency, where known."""
    decisions = schedule(profile, choice.options, budget_bytes, choice.segments)
    if isinstance(decisions, Overflow):
        return None
    settled = tuple(stage.option(decision.option) for stage, decision in zip(profile.stages, decisions, strict=True))
    if r is None or settled != choice.options:
        r = residency(profile, settled, choice.segments)
    return Replay(
        choice=Choice(settled, choice.segments),
        decisions=decisions,
        peak=peak(profile, decisions, r),
        times=times(profile, decisions, r),
        host_bytes=sum(size for size, decision in zip(r.moved_bytes, decisions, strict=True) if decision.moves),
    )


def build(profile: Profile, choice: Choice, budget_bytes: int, planner: str) -> Plan:
    """Make the plan of `choice` under its best schedule.

    Raises
    ------
    InfeasibleBudgetError
        If no schedule of these options fits; `min_peak_bytes` is that of the tightest.
    """
    return build_fastest(profile, [choice], budget_bytes, planner)


def build_fastest(profile: Profile, choices: Iterable[Choice], budget_bytes: int, planner: str) -> Plan:
    """Make the plan of the fastest of `choices` that fits, the first among equals.

    Raises
    ------
    InfeasibleBudgetError
        If none fits; `min_peak_bytes` is the smallest among them.
    """
    best: Replay | None = None
    smallest: Peak | None = None
    for choice in choices:
        found = replay(profile, choice, budget_bytes)
        if found is None:
            if best is None:
                tightest = smallest_peak(profile, choice)
                smallest = tightest if smallest is None or tightest.bytes < smallest.bytes else smallest
        elif best is None or found.times.makespan_s < best.times.makespan_s * (1 - 1e-12):
            best = found
    if best is not None:
        return finish(profile, best, budget_bytes, planner)
    assert smallest is not None, "a rule has at least one choice"
    raise_infeasible(profile, smallest, budget_bytes, planner)


def finish(profile: Profile, found: Replay, budget_bytes: int, planner: str) -> Plan:
    """The plan of a replay that fits."""
    bound_s = profile.baseline_step_s
    step_s = found.times.makespan_s
    return Plan(
        stages=tuple(stage.name for stage in profile.stages),
        choices=found.decisions,
        # No plan computes less than the step with everything kept, so meeting that is proof enough.
        status="optimal" if step_s <= bound_s * (1 + 1e-6) else "feasible",
        budget_bytes=budget_bytes,
        peak_bytes=found.peak.bytes,
        host_bytes=found.host_bytes,
        step_s=step_s,
        baseline_step_s=bound_s,
        lower_bound_s=min(bound_s, step_s),  # the same seconds added in another order may differ in the last bit
        space=SPACE,
        planner=planner,
        fingerprint=profile.fingerprint,
        inputs=tuple(stage.inputs for stage in profile.stages),
        segments=found.choice.segments,
        saved_bytes=saved_bytes(profile, found.decisions),
        launch_s=launch_s(profile, found.decisions, found.choice.segments),
        baseline_launch_s=profile.baseline_launch_s,
        outside=profile.outside,
    )


def raise_infeasible(profile: Profile, smallest: Peak, budget_bytes: int, planner: str) -> NoReturn:
    """Raise the error that names the smallest budget `planner` can do with."""
    stage = profile.stages[smallest.stage].name
    raise InfeasibleBudgetError(
        f"{planner}: budget {format_bytes(budget_bytes)} is below the smallest peak of its plan, "
        f"{format_bytes(smallest.bytes)} (stage {stage!r}, {smallest.phase}); raise the budget, or use ckptplan.solve",
        budget_bytes=budget_bytes,
        min_peak_bytes=smallest.bytes,
        stage=stage,
        phase=smallest.phase,
    )


def _worst(profile: Profile, forward: Sequence[int], backward: Sequence[int]) -> Peak:
    phases: tuple[tuple[Phase, Sequence[int]], ...] = (("forward", forward), ("backward", backward))
    steps = [Peak(nbytes, k, phase) for phase, needs in phases for k, nbytes in enumerate(needs)]
    return max((*steps, Peak(profile.update_peak_bytes, 0, "update")), key=lambda step: step.bytes)
