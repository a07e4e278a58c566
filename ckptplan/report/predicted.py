"""Predicted times in the form in which a running step measures them."""

from __future__ import annotations

from collections import defaultdict

from ckptplan.core.measured import StageTimes, as_measured
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
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
