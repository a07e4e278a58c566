"""Explanation of a plan: the steps that limit it, the value of memory and links, and alternatives per stage."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ckptplan.core.option import ACTIONS, Action, Option
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S, StepNeed, evaluate
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Phase
from ckptplan.core.stays import what_stays
from ckptplan.core.units import LEAST_S, format_bytes, format_seconds, format_table
from ckptplan.referee import Timeline, simulate

NEAR_PEAK = 0.01
"""A step binds if its bytes are within this share of the peak."""
MOST_STAGES = 60
"""Largest number of runs of equal decisions that are examined, the longest first: each takes several schedules."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds per step that more of a resource would save, to first order: the prices of a proven bound.

    Attributes
    ----------
    gib_s : float
        Saved by one more GiB of budget.
    out_s, in_s : float
        Saved by doubling the bandwidth out and in.
    forward_gib_s, backward_gib_s : tuple of float
        Per stage, saved by one GiB less in its forward and its backward; they add up to `gib_s`.
    """

    gib_s: float
    out_s: float
    in_s: float
    forward_gib_s: tuple[float, ...] = ()
    backward_gib_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """Neighbouring steps of one phase within 1 % of the peak, and the bytes of the budget that are free in them."""

    phase: Phase
    first: str
    last: str
    steps: int
    spare_bytes: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same plan with another option for one stage (or one segment), under its lazy schedule.

    A plan whose step time gains no more than the error of the profile's times, and that doesn't move fewer bytes or
    keep more stages, isn't an alternative: it would add copies or decisions for nothing.

    Attributes
    ----------
    option : str
        Name of the option, or "each by itself" for a segment's stages.
    extra_s : float
        Predicted step time less the plan's.
    missing_bytes : int
        Bytes missing in the budget; 0 if the alternative fits.
    """

    option: str
    extra_s: float
    missing_bytes: int

    @property
    def as_fast(self) -> bool:
        """Whether the change is too small to be shown."""
        return abs(self.extra_s) < LEAST_S

    def __str__(self) -> str:
        change = f"{'+' if self.extra_s > 0 else '-'}{format_seconds(abs(self.extra_s))}"
        missing = f", needs {format_bytes(self.missing_bytes)} more" if self.missing_bytes else ""
        return f"{self.option}: {'as fast' if self.as_fast else change}{missing}"


@dataclass(frozen=True, slots=True)
class OptionStep:
    """One option that neighbouring stages share, and its best alternatives with less and with more memory.

    Attributes
    ----------
    stage : str
        Name of the stage that was examined, or both ends of a segment.
    stages : tuple of int
        All neighbours with this option.
    option : str
    leaner, richer : Alternative or None
    """

    stage: str
    stages: tuple[int, ...]
    option: str
    leaner: Alternative | None
    richer: Alternative | None

    @property
    def count(self) -> int:
        """Number of the neighbours."""
        return len(self.stages)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The causes of a plan's overhead, its binding steps and alternatives.

    Attributes
    ----------
    recompute_s, beside_s, out_wait_s, in_wait_s : float
        Overhead by cause: recompute, compute that is slower beside copies and the runtime's own code, waiting for
        copies out, and for copies in.
    out_busy, in_busy : float
        Share of the step in which each link is busy.
    bindings : tuple of Binding
        Steps that limit the plan; empty if everything is kept.
    worth : Worth or None
        None if no prices were found within the time limit.
    choices : tuple of OptionStep
    launch_s : float or None
        Time in which the host launches the step, if that is longer than what compute and copies take.
    to_disk : bool
        Whether anything goes to the disk; prices count its copies at the rate of the host's link.
    stays : str
        The tensors at the peak that no plan can move, and what would help; empty if they are few.
    """

    recompute_s: float
    beside_s: float
    out_wait_s: float
    in_wait_s: float
    out_busy: float
    in_busy: float
    bindings: tuple[Binding, ...]
    worth: Worth | None
    choices: tuple[OptionStep, ...]
    launch_s: float | None = None
    to_disk: bool = False
    stays: str = ""

    @property
    def price_unit(self) -> tuple[str, float]:
        """The largest unit of bytes of which one more saves at most the overhead, and the unit's share of a GiB."""
        overhead_s = self.recompute_s + self.beside_s + self.out_wait_s + self.in_wait_s
        gib_s = 0.0 if self.worth is None else self.worth.gib_s
        units = (("GiB", 1.0), ("MiB", 2.0**-10), ("KiB", 2.0**-20))
        return next((found for found in units if gib_s * found[1] <= overhead_s + LEAST_S), units[-1])

    def __str__(self) -> str:
        lines = [
            f"overhead  {format_seconds(self.recompute_s)} recompute, {format_seconds(self.beside_s)} beside copies "
            f"and in the runtime, {format_seconds(self.out_wait_s)} waiting for copies out, "
            f"{format_seconds(self.in_wait_s)} for copies in",
            f"links     busy {self.out_busy:.0%} of the step outwards, {self.in_busy:.0%} inwards",
        ]
        if self.launch_s is not None:
            lines.append(f"host      launches the step in {format_seconds(self.launch_s)}: all of the above is shorter")
        if not self.bindings:
            lines.append("memory    binds nowhere: everything is kept, and more budget would change nothing")
        for b in self.bindings:
            where = b.first if b.steps == 1 else f"{b.first} .. {b.last} ({b.steps})"
            lines.append(f"memory    binds in {b.phase} of {where}: {format_bytes(b.spare_bytes)} free")
        if self.stays:
            lines.append(f"stays     at the peak, no plan can move: {self.stays}")
        if self.worth is not None:
            unit, share = self.price_unit
            more, out, back = map(format_seconds, (self.worth.gib_s * share, self.worth.out_s, self.worth.in_s))
            lines.append(
                f"prices    one more {unit} saves about {more} a step; "
                f"a link twice as fast {out} outwards, {back} inwards"
                + ("; the disk's copies count at the rate of the host's link" if self.to_disk else "")
            )
        rows = [("stage", "chosen", "with less memory", "with more memory")]
        for c in self.choices:
            name = c.stage if c.count == 1 else f"{c.stage} (one of {c.count})"
            rows.append((name, c.option, str(c.leaner or "-"), str(c.richer or "-")))
        return "\n".join([*lines, "", *format_table(rows)])


def explain(
    profile: Profile,
    plan: Plan,
    *,
    worth: Worth | None = None,
    actions: tuple[Action, ...] = ACTIONS,
    deadline: float = math.inf,
) -> Explanation:
    """Return an explanation of `plan`, which was made for `profile`.

    Parameters
    ----------
    worth : Worth, optional
        Becomes `Explanation.worth`.
    actions : tuple of str
        Actions that alternatives may use.
    deadline : float
        As of `time.monotonic()`: alternatives of stages not reached by then are left out, except the first ones.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another profile.
    """
    timeline = simulate(profile, plan)
    menu = tuple(
        tuple(i for i, option in enumerate(stage.options) if option.allowed(actions)) for stage in profile.stages
    )
    left = {event.end_s for event in timeline.events if event.lane == "out"}
    waits = [(event.end_s in left, event.end_s - event.start_s) for event in timeline.events if event.what == "wait"]
    busy = {lane: sum(e.end_s - e.start_s for e in timeline.events if e.lane == lane) for lane in ("out", "in")}
    backward_s = sum(event.end_s - event.start_s for event in timeline.events if event.what == "backward")
    return Explanation(
        recompute_s=sum(e.end_s - e.start_s for e in timeline.events if e.what == "recompute"),
        beside_s=backward_s - sum(stage.backward_s for stage in profile.stages),
        out_wait_s=sum(seconds for out, seconds in waits if out),
        in_wait_s=sum(seconds for out, seconds in waits if not out),
        out_busy=busy["out"] / timeline.makespan_s if timeline.makespan_s else 0.0,
        in_busy=busy["in"] / timeline.makespan_s if timeline.makespan_s else 0.0,
        bindings=_bindings(plan, timeline) if any(c.action != "keep" for c in plan.choices) else (),
        worth=worth,
        choices=_choices(profile, plan, menu, deadline),
        launch_s=timeline.launch_s if timeline.launch_s == timeline.makespan_s > 0.0 else None,
        to_disk=plan.disk_bytes > 0,
        stays=_stays(profile, timeline),
    )


def _stays(profile: Profile, timeline: Timeline) -> str:
    most = max(timeline.steps, key=lambda step: step.peak_bytes)
    return what_stays(profile, most.stage, most.phase, most.peak_bytes)


def _bindings(plan: Plan, timeline: Timeline) -> tuple[Binding, ...]:
    out = []
    tight = [(step, step.peak_bytes >= timeline.peak_bytes * (1 - NEAR_PEAK)) for step in timeline.steps]
    for (binds, phase), run in groupby(tight, key=lambda pair: (pair[1], pair[0].phase)):
        if binds:
            steps = [step for step, _ in run]
            spare = plan.budget_bytes - max(step.peak_bytes for step in steps)
            out.append(Binding(phase, steps[0].stage, steps[-1].stage, len(steps), spare))
    return tuple(out)


def _choices(profile: Profile, plan: Plan, menu: Sequence[Sequence[int]], deadline: float) -> tuple[OptionStep, ...]:
    options = [stage.option(choice.option) for stage, choice in zip(profile.stages, plan.choices, strict=True)]
    grouped = {i for segment in plan.segments for i in range(segment.first, segment.last + 1)}
    alone = [i for i, stage in enumerate(profile.stages) if not stage.is_glue and i not in grouped]
    runs = [list(run) for _, run in groupby(alone, key=lambda i: (profile.stages[i].kind, plan.choices[i].option))]
    longest = sorted(runs, key=len, reverse=True)[:MOST_STAGES]
    out: dict[int, OptionStep] = {}
    for run in longest:
        if out and time.monotonic() > deadline:
            break
        out[run[0]] = _stage_choice(profile, plan, options, menu, run)
    for segment in plan.segments[:MOST_STAGES]:
        if out and time.monotonic() > deadline:
            break
        out[segment.first] = _segment_choice(profile, plan, options, segment)
    return tuple(choice for _, choice in sorted(out.items()))


def _stage_choice(
    profile: Profile, plan: Plan, options: list[Option], menu: Sequence[Sequence[int]], run: list[int]
) -> OptionStep:
    """Return the choice of the middle stage of `run`, neighbours with the same option."""
    i = run[len(run) // 2]
    kept = _on_device(profile, options[i])
    leaner: list[Alternative] = []
    richer: list[Alternative] = []
    for other in (profile.stages[i].options[code] for code in menu[i]):
        if other.name == options[i].name:
            continue
        found = _alternative(profile, plan, other.name, [*options[:i], other, *options[i + 1 :]], plan.segments)
        if found is not None:
            (leaner if _on_device(profile, other) < kept else richer).append(found)

    def next_best(found: list[Alternative]) -> Alternative | None:
        return min(found, key=lambda a: (a.extra_s, a.missing_bytes), default=None)

    return OptionStep(profile.stages[i].name, tuple(run), options[i].name, next_best(leaner), next_best(richer))


def _segment_choice(profile: Profile, plan: Plan, options: list[Option], segment: Segment) -> OptionStep:
    rest = tuple(s for s in plan.segments if s is not segment)
    apart = _alternative(profile, plan, "each by itself", options, rest)
    first, last = profile.stages[segment.first].name, profile.stages[segment.last].name
    return OptionStep(f"{first} .. {last}", tuple(range(segment.first, segment.last + 1)), "together", None, apart)


def _on_device(profile: Profile, option: Option) -> int:
    """Return the bytes that an option holds on the device."""
    moved = set(option.moved)
    return sum(profile.storages[s].nbytes for s in option.held if s not in moved)


def _alternative(
    profile: Profile, plan: Plan, name: str, options: Sequence[Option], segments: tuple[Segment, ...]
) -> Alternative | None:
    """Return the plan with `options` and `segments` under its lazy schedule, if it is an alternative to `plan`."""
    missing = 0
    found = evaluate(profile, options, plan.budget_bytes, segments)
    while isinstance(found, StepNeed):
        missing = found.bytes - plan.budget_bytes
        found = evaluate(profile, options, found.bytes, segments)
    # Stages that move now keep their tier; others would move to the host.
    on_disk = [i for i, choice in enumerate(plan.choices) if choice.tier == "disk"]
    other = replace(plan, choices=found.decisions(on_disk), segments=segments)
    timeline = simulate(profile, other)
    extra_s = timeline.makespan_s - plan.step_s
    error_s = profile.error_s(plan.step_s, plan.host_bytes, plan.disk_bytes) + EQUAL_S * plan.step_s
    if not missing and -error_s <= extra_s <= EQUAL_S * plan.step_s:
        moved = timeline.host_bytes + timeline.disk_bytes
        if (moved, _decided(other)) >= (plan.host_bytes + plan.disk_bytes, _decided(plan)):
            return None
    return Alternative(name, extra_s, missing)


def _decided(plan: Plan) -> int:
    """Return the number of stages that aren't kept."""
    return sum(choice.action != "keep" for choice in plan.choices)
