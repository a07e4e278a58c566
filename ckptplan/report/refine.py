"""Predicted times in the form of measured ones, and a profile corrected by measurements."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ckptplan.core.link import Link
from ckptplan.core.measured import Copied, Measured, StageTimes, as_measured, backward_groups
from ckptplan.core.option import Option
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.rules import last_runs, moving_s, sweeps_of
from ckptplan.core.stage import Stage
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


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean by kind of stage: equal stages stay equal, and their sum is that of the measurements."""
    found: dict[str, list[float]] = defaultdict(list)
    for kind, value in values:
        found[kind].append(value)
    return {kind: statistics.fmean(each) for kind, each in found.items()}


def corrected(profile: Profile, plan: Plan, measured: Measured) -> Profile:
    """Return `profile` with the times, links and bytes measured in steps with `plan`.

    - A stage's forward and backward times are the measured means over the stages of its kind, less the overhead that
      the profile has of the plan's options. Times measured together (a module's backward and that of the glue in front
      of it, the last glue's forward and backward) are divided in the proportion of the profile. Example: of 6 ms
      measured for glue and module predicted at 1 and 2 ms, the glue gets 2.
    - A recompute time is the measured one; if a segment's sweep ran a stage's forward again, forward and sweep each get
      the mean, less the overhead that the profile has of the sweep's runs. A kind's other recomputing options change by
      the same factor; those of kinds without any recompute change by the factor of their forward.
    - A link that moved bytes gets the measured bandwidth; another link stays as it is.
    - Bytes measured beyond the predicted peak are added to every moment. Fewer bytes change nothing, since a prediction
      is an upper bound.
    """
    stages, glue = profile.stages, [stage.is_glue for stage in profile.stages]
    timeline = simulate(profile, plan)
    sweeps = {stage.name: 0 for stage in stages}
    for step in timeline.steps:
        sweeps[step.stage] += step.sweep
    own = {stage.name: -sweeps[stage.name] for stage in stages}
    for event in timeline.events:
        own[event.stage] += event.what == "recompute"

    options = [stage.option(choice.option) for stage, choice in zip(stages, plan.choices, strict=True)]
    last_run = last_runs(options, sweeps_of(profile, plan.segments))
    moving = moving_s(profile, options, last_run)
    overhead_s = [option.overhead_s + moves_s for option, (moves_s, _) in zip(last_run, moving, strict=True)]
    forward, backward, recompute = [0.0] * len(stages), [0.0] * len(stages), {}
    for i, members in enumerate(backward_groups(glue)):
        found = measured.stages[i]
        predicted_s = sum(stages[m].backward_s for m in members)
        if glue[i]:
            both_s = stages[i].forward_s + predicted_s
            share = stages[i].forward_s / both_s if members and both_s else 1.0
            forward[i] = found.forward_s * share
            backward[i] += found.forward_s * (1 - share)
            continue
        left_s = max(found.backward_s - sum(overhead_s[m] for m in members), 0.0)
        for m in members:
            backward[m] += left_s * (stages[m].backward_s / predicted_s if predicted_s else float(m == i))
        name = stages[i].name
        rerun_s = sweeps[name] * stages[i].rerun_overhead_s
        if sweeps[name] and not own[name]:
            forward[i] = max(found.forward_s + found.recompute_s - rerun_s, 0.0) / (1 + sweeps[name])
        else:
            forward[i] = found.forward_s
            if own[name]:
                recompute[i] = max(found.recompute_s - rerun_s - sweeps[name] * found.forward_s, 0.0)

    kinds = [stage.kind for stage in stages]
    forwards = _means(zip(kinds, forward, strict=True))
    backwards = _means(zip(kinds, backward, strict=True))
    before = _means((stage.kind, stage.forward_s) for stage in stages)
    # Per kind, the ratios of measured and predicted recompute times of the chosen options.
    ratios: dict[str, list[float]] = defaultdict(list)
    for i, measured_s in recompute.items():
        if predicted_s := stages[i].option(plan.choices[i].option).recompute_s:
            ratios[kinds[i]].append(measured_s / predicted_s)

    def scaled(option: Option, kind: str) -> Option:
        if not option.recomputes:
            return option
        if kind in ratios:
            return replace(option, recompute_s=option.recompute_s * statistics.mean(ratios[kind]))
        factor = forwards[kind] / before[kind] if before[kind] else 1.0
        return replace(option, recompute_s=option.recompute_s * factor)

    def again(stage: Stage) -> Stage:
        return replace(
            stage,
            forward_s=forwards[stage.kind],
            backward_s=backwards[stage.kind],
            options=tuple(scaled(option, stage.kind) for option in stage.options),
        )

    over = max((measured.peak_bytes or 0) - timeline.peak_bytes - plan.others_bytes, 0)
    return replace(
        profile,
        stages=tuple(map(again, stages)),
        link=_link(profile.link, measured.host),
        disk=None if profile.disk is None else _link(profile.disk, measured.disk),
        base_forward_bytes=tuple(b + over for b in profile.base_forward_bytes),
        base_backward_bytes=tuple(b + over for b in profile.base_backward_bytes),
        update_peak_bytes=profile.update_peak_bytes + over,
        resident_bytes=profile.resident_bytes + over,
    )


def _link(link: Link, copied: Copied) -> Link:
    def rate(nbytes: int, taken_s: float, before: float) -> float:
        return nbytes / taken_s if nbytes and taken_s > 0 else before

    return replace(
        link,
        out_bytes_per_s=rate(copied.out_bytes, copied.out_s, link.out_bytes_per_s),
        in_bytes_per_s=rate(copied.in_bytes, copied.in_s, link.in_bytes_per_s),
    )
