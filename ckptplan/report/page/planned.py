"""The report of a plan: verdict, texts and what the page draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptplan.core.checks import check_kind
from ckptplan.core.frontier import Frontier
from ckptplan.core.option import ACTIONS
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.trace import Trace
from ckptplan.core.units import format_bytes, format_seconds, format_swapped
from ckptplan.referee import Timeline, simulate
from ckptplan.report.explain import Explanation
from ckptplan.report.page.render import Attached, Part, Report, View
from ckptplan.report.page.step import COMPUTES, WHAT_COLOURS, Arc, arcs, step_data
from ckptplan.report.page.waterline import MEANINGS

_LETTERS = {"keep": "K", "swap": "S", "recompute": "R"}


@dataclass(frozen=True, slots=True)
class Rival:
    """The plan of another planner for a budget, as a point beside the frontier.

    At its own peak, which may be lower, it would lie beside plans for smaller budgets.
    """

    planner: str
    budget_bytes: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a plan; None for those that weren't made.

    Attributes
    ----------
    trace : Trace or None
        A measured step, which is drawn.
    verification : Verification or None
        The result of `verify`; it is printed.
    stats : Stats or None
        Measurements in training; they are printed.
    """

    trace: Trace | None = None
    verification: object = None
    stats: object = None

    def __post_init__(self) -> None:
        if self.trace is not None:
            check_kind(Trace, trace=self.trace)


def plan_report(
    profile: Profile,
    plan: Plan,
    *,
    explanation: Explanation | None = None,
    frontier: Sequence[Plan] = (),
    rivals: Sequence[Rival] = (),
    measured: Measured = Measured(),
    commands: Sequence[str] = (),
) -> Report:
    """Return the report of `plan`, which was made for `profile`.

    Parameters
    ----------
    profile : Profile
    plan : Plan
        Its `budget_bytes` may be below its peak: then the report says that it doesn't fit.
    explanation : Explanation, optional
        Prices and next choices of the stages.
    frontier : sequence of Plan
        Best plans for other budgets, none of which is beaten by another in memory and time (`Frontier.of`).
    rivals : sequence of Rival
        Points beside the frontier.
    measured : Measured, optional
    commands : sequence of str
        How to make the plan again.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another profile.
    """
    timeline = simulate(profile, plan)
    data = step_data(profile, plan, timeline, explanation, measured.trace)
    if frontier:
        data["frontier"] = _frontier_data(plan, frontier, rivals)
    verified, trained = ("" if found is None else str(found) for found in (measured.verification, measured.stats))
    view = View(
        title=_title(plan),
        fits=plan.counted_bytes <= plan.budget_bytes,
        answer=f"{plan.verdict[0].upper()}{plan.verdict[1:]}.",
        verdict=_verdict(plan, timeline),
        facts=_facts(profile, plan),
        commands=list(commands),
        parts=[part for part in _parts(plan, explanation, frontier, verified, trained) if part.table or part.lines],
        notes=(*plan.notes, *_beaten(plan, frontier)),
    )
    counts = Counter(choice.action for choice in plan.choices)
    together = {i for segment in plan.segments for i in range(segment.first, segment.last + 1)}
    shown = {
        "stages": [
            {
                "name": name, "option": choice.option, "action": choice.action, "letter": _LETTERS[choice.action],
                "together": i in together,
            }
            for i, (name, choice) in enumerate(zip(plan.stages, plan.choices, strict=True))
        ],
        "counts": [(action, _LETTERS[action], counts[action]) for action in ACTIONS],
        "segments": len(plan.segments),
        "glue": next((stage.name for stage in profile.stages if stage.is_glue), ""),
        "meanings": [
            (name, MEANINGS[name], colour)
            for name, colour, row in zip(data["categories"], data["colours"], data["stacked"], strict=True)
            if any(row)
        ],
        "computes": [
            (COMPUTES[what], WHAT_COLOURS[what]) for what in COMPUTES if any(e.what == what for e in timeline.events)
        ],
        "has_frontier": bool(frontier),
        "explanation": "" if explanation is None else str(explanation).partition("\n\n")[0],
        "verification": verified,
        "stats": trained,
        "graph": _Graph.of(len(plan.stages), arcs(profile)),
    }  # fmt: skip
    attached = [
        Attached("plan.json", "Save the plan", plan),
        Attached("profile.json", "Save the profile", profile),
    ]
    return Report("step.html", view, data, attached, shown)


def _title(plan: Plan) -> str:
    made = plan.fingerprint
    planned = made.device.startswith("planned for")
    where = f"{',' if planned else ' on'} {made.device}" if made.device else ""
    return f"{made.model.rpartition('.')[2] or f'A chain of {len(plan.stages)} stages'}{where}"


def _verdict(plan: Plan, timeline: Timeline) -> str:
    stage = timeline.peak_stage
    called = f"what runs {stage[1:-1]}" if stage.startswith("(") else stage
    where = f"The peak is in the {timeline.peak_phase} of {called}"
    if timeline.peak_phase == "update":
        where = "The peak is in the optimizer's update"
    slower = (
        f"a step takes {format_seconds(plan.step_s)}, {max(plan.overhead, 0.0):.1%} more than with everything kept "
        f"({format_seconds(plan.baseline_step_s)})"
    )
    useful = ""
    least_bytes, most_bytes = plan.least_peak_bytes, plan.most_peak_bytes
    if least_bytes is not None and most_bytes is not None and least_bytes < most_bytes:
        least, most = format_bytes(least_bytes), format_bytes(most_bytes)
        useful = f" Budgets from {least} (the smallest peak found) to {most} (everything kept) make a difference."
    return f"{where}; {slower}.{useful}"


def _facts(profile: Profile, plan: Plan) -> list[tuple[str, str]]:
    made = plan.fingerprint
    link = profile.link
    facts = [
        ("model", made.model),
        ("inputs", made.inputs),
        ("parameters", made.parameters),
        ("device", made.device),
        ("torch", made.torch_version),
        ("optimizer", made.optimizer),
        ("several devices", made.parallel),
        ("link", f"{link.out_bytes_per_s / 1e9:.1f} GB/s out, {link.in_bytes_per_s / 1e9:.1f} GB/s in"),
        ("planner", f"{plan.planner}, over {plan.space}"),
        ("swapped in a step", format_swapped(plan.host_bytes, plan.disk_bytes)),
    ]
    return [(name, value) for name, value in facts if value]


def _parts(
    plan: Plan, explanation: Explanation | None, frontier: Sequence[Plan], verified: str, trained: str
) -> list[Part]:
    """Return the sections of the Markdown."""
    decisions = str(plan).partition("\n\n")[2]
    explained = "" if explanation is None else str(explanation)
    return [
        Part("Decisions", decisions),
        Part("Why", explained),
        Part("Memory against time", str(Frontier(tuple(frontier))) if frontier else ""),
        Part("Verified", verified),
        Part("In training", trained),
    ]


def _beaten(plan: Plan, frontier: Sequence[Plan]) -> Iterator[str]:
    """Yield a note if one of the frontier's plans is faster within the plan's memory."""
    better = [p for p in frontier if p.counted_bytes <= plan.counted_bytes and p.step_s < plan.step_s]
    if better:
        best = min(better, key=lambda p: p.step_s)
        yield (
            f"the frontier has a plan by {best.planner} that takes {format_seconds(best.step_s)} a step within "
            f"{format_bytes(best.counted_bytes)}, less than this one in both"
        )


def _frontier_data(plan: Plan, frontier: Sequence[Plan], rivals: Sequence[Rival]) -> dict[str, Any]:
    plans = sorted(frontier, key=lambda p: p.counted_bytes)
    fitting = [k for k, found in enumerate(plans) if found.counted_bytes <= plan.budget_bytes]
    return {
        "plans": [{"peak": p.counted_bytes, "s": p.step_s, "bound": p.lower_bound_s} for p in plans],
        "others": [{"name": rival.planner, "peak": rival.budget_bytes, "s": rival.plan.step_s} for rival in rivals],
        "baseline": plan.baseline_step_s or 1.0,
        "chosen": fitting[-1] if fitting else 0,
    }


@dataclass(frozen=True, slots=True)
class _Path:
    d: str
    width: float
    skips: bool


@dataclass(frozen=True, slots=True)
class _Graph:
    """Boxes in a row with arcs above them, in SVG's pixels; arcs of about the same bytes are one path."""

    width: int
    height: int
    base: int
    box: float
    paths: tuple[_Path, ...]

    @classmethod
    def of(cls, count: int, found: Sequence[Arc]) -> _Graph:
        gap = 22 if count <= 60 else 12
        most = max((arc.nbytes for arc in found), default=1) or 1
        span = max((arc.user - arc.maker for arc in found), default=1)
        height = min(20 + 8 * span, 160)
        parts: dict[tuple[float, bool], list[str]] = {}
        for arc in found:
            width = round(0.75 + 3 * arc.nbytes / most, 1)
            left, right = (round(gap * (k + 0.5), 1) for k in (arc.maker, arc.user))
            # The curve gets three quarters as high as its handles.
            rise = round(max(1.3 * height * (arc.user - arc.maker) / span, 8.0), 1)
            d = f"M{left} {height}C{left} {height - rise} {right} {height - rise} {right} {height}"
            parts.setdefault((width, arc.skips), []).append(d)
        paths = tuple(_Path("".join(d), width, skips) for (width, skips), d in sorted(parts.items()))
        return cls(gap * count, height + 18, height + 2, gap - 3, paths)

    def left(self, stage: int) -> float:
        """The left side of a stage's box."""
        return (self.box + 3) * stage + 1.5
