"""Predicted times and bytes of a plan, in the form in which a running step measures them."""

from __future__ import annotations

from collections import defaultdict

from ckptplan.core.measured import StageTimes, as_measured
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.stage import Phase
from ckptplan.core.trace import Drawn, DrawnStep, Lane, Span
from ckptplan.referee import simulate

_DRAWN: dict[str, Drawn] = {"wait": "stall"}
_LANES: dict[str, Lane] = {"disk_out": "disk out", "disk_in": "disk in"}


def stage_times(profile: Profile, plan: Plan) -> tuple[StageTimes, ...]:
    """Return the predicted times of each stage, in the form in which a running step measures them."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for event in simulate(profile, plan).events:
        if event.lane == "compute":
            sums[event.stage, event.what] += event.end_s - event.start_s
    kinds = ("forward", "recompute", "backward", "wait")
    times = [StageTimes(*(sums[stage.name, kind] for kind in kinds)) for stage in profile.stages]
    return as_measured([stage.is_glue for stage in profile.stages], times)


def drawn(profile: Profile, plan: Plan) -> DrawnStep:
    """Return the referee's replay as spans, and the peak of each step as the bytes from its beginning on."""
    timeline = simulate(profile, plan)
    spans = []
    for event in timeline.events:
        what, lane = _DRAWN.get(event.what, event.what), _LANES.get(event.lane, event.lane)
        spans.append(Span(lane, what, event.stage, event.start_s, event.end_s, event.nbytes))  # type: ignore[arg-type]
    # Steps and compute's events have the same order; a backward step may begin with a recompute.
    running = iter([e for e in timeline.events if e.lane == "compute" and e.what != "wait"])
    memory = []
    for step in timeline.steps:
        if step.phase == "update":
            memory.append((timeline.makespan_s, step.peak_bytes))
            continue
        event = next(running)
        memory.append((event.start_s, step.peak_bytes))
        if event.what == "recompute" and not step.sweep:
            next(running)
    return DrawnStep(tuple(spans), tuple(memory), timeline.makespan_s)


def planned_bytes(profile: Profile, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
    """Return the predicted bytes at the start and at the peak of `stage` in `phase`.

    A stage includes the glue that runs after it in the same phase, whose beginning isn't measured, and a backward
    includes the sweep in front of it. None as a stage is the glue behind the last stage.
    """
    steps = [step for step in simulate(profile, plan).steps if step.phase == phase]
    if phase == "update":
        return steps[0].start_bytes, steps[0].peak_bytes
    names = [s.name for s in profile.stages]
    glue = {s.name for s in profile.stages if s.is_glue}
    own = [i for i, step in enumerate(steps) if not step.sweep]
    name = names[-1] if stage is None else names[stage]
    first = at = next(i for i in own if steps[i].stage == name)
    while first > 0 and steps[first - 1].sweep:
        first -= 1
    last = at
    while last + 1 < len(steps) and steps[last + 1].stage in glue and not steps[last + 1].sweep:
        last += 1
    return steps[first].start_bytes, max(step.peak_bytes for step in steps[first : last + 1])
