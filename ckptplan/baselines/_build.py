"""From a baseline's options and segments to a finished plan: schedule, peak, makespan, and the error when nothing fits.

All baselines share this, so they differ in their rule alone: release and prefetch points are the best there are for
the options chosen (core/schedule.py), and an option that a stage doesn't have becomes keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import DISCARD, Option
from ckptplan.core.plan import Plan, plan_of
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S, Evaluation, Residency, StepNeed, evaluate, residency, tightest_peak
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.units import format_bytes

SPACE = "none: a rule, bound is the compute time alone"


@dataclass(frozen=True, slots=True)
class Selection:
    """An option per stage, and segments.

    Parameters
    ----------
    options : tuple of Option
        One per stage, of its menu.
    segments : tuple of Segment
        Top level, in order; their module stages' options are "recompute" or "recompute+swap".
    """

    options: tuple[Option, ...]
    segments: tuple[Segment, ...] = ()


def pick(stage: Stage, *names: str) -> Option:
    """The first of the options `names` that `stage` has; keep where it has none of them."""
    return next((option for name in names if (option := stage.find(name)) is not None), stage.keep)


def named(
    profile: Profile, names: Sequence[str], segments: Iterable[Segment] = (), *, chained: bool = False
) -> Selection:
    """The selection of one option name per stage; if `chained`, neighbours that recompute do so in one segment.

    A stage that lacks its option keeps, but "recompute+swap" without it is recompute, and that without it "discard".
    Module stages of `segments` recompute whatever `names` says, and a segment of one stage becomes that stage's option.
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
        pick(stage, name, "recompute", DISCARD) if name.startswith("recompute") else pick(stage, name)
        for stage, name in zip(profile.stages, wanted, strict=True)
    )
    return Selection(options, joined(profile, options) if chained else tuple(longer))


def everywhere(profile: Profile, name: str) -> Selection:
    """The selection of the option `name` for every stage that has it."""
    return named(profile, [name] * len(profile.stages))


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
        if option.recomputes and not option.ops and stage.recompute is not None:
            run.append(i)
        else:
            segments.append(run)
            run = []
    return tuple(Segment(run[0], run[-1]) for run in (*segments, run) if len(run) > 1)


def ways_to_recompute(profile: Profile) -> list[tuple[str, bool]]:
    """Ways to recompute that a rule leaves open: the option's name, and whether neighbours form a segment (`named`)."""
    found = [("recompute", False), ("recompute", True)]
    if any(stage.find("recompute+swap") for stage in profile.stages):
        found.insert(1, ("recompute+swap", False))
    return found


def first_held(profile: Profile) -> list[frozenset[int]]:
    """Per stage, the storages that it is the first to hold under keep."""
    counted: set[int] = set()
    found = []
    for stage in profile.stages:
        found.append(frozenset(stage.keep.held) - counted)
        counted.update(stage.keep.held)
    return found


def own_storages(profile: Profile) -> list[frozenset[int]]:
    """Per stage, those of its `first_held` storages that recompute would drop; none where it can't be recomputed."""
    return [
        held if stage.recompute is None else held - set(stage.recompute.held)
        for stage, held in zip(profile.stages, first_held(profile), strict=True)
    ]


def own_bytes(profile: Profile) -> list[int]:
    """Per stage, the bytes that recompute would free, each storage counted once; 0 where it can't be recomputed."""
    return [
        sum(profile.storages[s].nbytes for s in found if not profile.storages[s].to_end)
        if stage.recompute is not None
        else 0
        for stage, found in zip(profile.stages, own_storages(profile), strict=True)
    ]


def movable_bytes(profile: Profile) -> tuple[int, ...]:
    """Per stage, the bytes that it moves when every stage swaps."""
    return residency(profile, everywhere(profile, "swap").options).moved_bytes


def costly(profile: Profile) -> list[bool]:
    """Per stage, whether its forward takes at least as much time per byte saved as the median module stage's.

    Stands in for "is a convolution or linear layer" of rules that know layers: a profile has stages, and the split
    those rules are after is by the time that recomputing takes. So in a chain of equal stages all are
    costly. Bytes saved by several stages count for the first. Glue and stages that save nothing are not costly.
    """
    rates: list[float | None] = []
    for stage, held in zip(profile.stages, first_held(profile), strict=True):
        nbytes = sum(profile.storages[s].nbytes for s in held)
        rates.append(stage.forward_s / nbytes if nbytes and not stage.is_glue else None)
    known = sorted(rate for rate in rates if rate is not None)
    middle = known[len(known) // 2] if known else 0.0
    return [rate is not None and rate >= middle for rate in rates]


def smallest_peak(profile: Profile, selection: Selection) -> StepNeed:
    """The worst step of `selection` under its tightest schedule."""
    return tightest_peak(profile, residency(profile, selection.options, selection.segments))


def first_over(r: Residency, budget_bytes: int) -> tuple[int, bool, int] | None:
    """Stage, whether in backward, and bytes of the first step beyond the budget, in program order; None: all fit."""
    forward = ((k, False, need) for k, need in enumerate(r.forward_bytes))
    backward = ((k, True, need) for k, need in reversed(list(enumerate(r.backward_bytes))))
    return next((step for step in (*forward, *backward) if step[2] > budget_bytes), None)


def scheduled(profile: Profile, selection: Selection, budget_bytes: int) -> Evaluation | None:
    """`selection` under its best schedule within the budget; None where none fits."""
    found = evaluate(profile, selection.options, budget_bytes, selection.segments)
    return found if isinstance(found, Evaluation) else None


def build(profile: Profile, selection: Selection, budget_bytes: int, planner: str) -> Plan:
    """Make the plan of `selection` under its best schedule.

    Raises
    ------
    InfeasibleBudgetError
        If no schedule of these options fits; `min_peak_bytes` is that of the tightest.
    """
    return build_fastest(profile, [selection], budget_bytes, planner)


def build_fastest(profile: Profile, selections: Iterable[Selection], budget_bytes: int, planner: str) -> Plan:
    """Make the plan of the fastest of `selections` that fits, the first among equals.

    Raises
    ------
    InfeasibleBudgetError
        If none fits; `min_peak_bytes` is the smallest among them.
    """
    best: Evaluation | None = None
    smallest: StepNeed | None = None
    for selection in selections:
        found = scheduled(profile, selection, budget_bytes)
        if found is None:
            if best is None:
                tightest = smallest_peak(profile, selection)
                smallest = tightest if smallest is None or tightest.bytes < smallest.bytes else smallest
        elif best is None or found.makespan_s < best.makespan_s * (1 - EQUAL_S):
            best = found
    if best is not None:
        return finish(profile, best, budget_bytes, planner)
    assert smallest is not None, "a rule makes at least one selection"
    raise_infeasible(profile, smallest, budget_bytes, planner)


def finish(profile: Profile, found: Evaluation, budget_bytes: int, planner: str) -> Plan:
    """The plan of an evaluation that fits."""
    return plan_of(
        profile,
        found.decisions(),
        found.segments,
        budget_bytes=budget_bytes,
        peak_bytes=found.peak.bytes,
        host_bytes=found.moved_bytes,
        step_s=found.makespan_s,
        # No plan computes less than the step with everything kept, so meeting that is proof enough.
        lower_bound_s=profile.baseline_step_s,
        space=SPACE,
        planner=planner,
    )


def raise_infeasible(profile: Profile, smallest: StepNeed, budget_bytes: int, planner: str) -> NoReturn:
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
