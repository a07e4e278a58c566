"""Reports of plans, as the `report` methods and the command line write them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ckptplan.api import explain
from ckptplan.api import frontier as frontier_of
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError, PlanMismatchError
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import reporting
from ckptplan.core.units import format_bytes
from ckptplan.report.page.planned import Measured, Rival, plan_report
from ckptplan.report.page.render import Report

RIVALS = {"greedy (PoocH)": "pooch", "uniform": "uniform", "checkpoint every block": "recompute_all"}
"""Planners whose plans are points beside a frontier: a greedy one, the uniform rule, and a framework's own switch."""
RIVALS_S = 15.0
"""Time limit for each of them."""
GREEDY_STAGES = 100
"""Largest number of stages for the greedy planner: its time grows with their square and is 5 s a budget at 100."""
PRICES_S = 2.0
"""Time limit for the prices of memory."""


def report_of_plan(
    profile: Profile,
    plan: Plan,
    *,
    frontier: Sequence[Plan] = (),
    time_limit_s: float | None = None,
    commands: Sequence[str] = (),
    on_progress: Callable[[str], None] | None = None,
    **measured: Any,
) -> Report:
    """See `Plan.report`; `measured` are the fields of `Measured`."""
    found = Measured(**measured)
    profile = plan.require_profile(profile)
    for other in frontier:
        other.require_profile(profile)
    traced = set() if found.trace is None else {span.stage for span in found.trace.measured.spans if span.stage}
    if traced and traced.isdisjoint(plan.stages):
        raise PlanMismatchError(
            f"the trace is of another model: it has stages such as {min(traced)!r}, the plan {plan.stages[0]!r}; "
            "give a trace of a step under this plan"
        )
    tell = reporting(on_progress)
    if not frontier and time_limit_s is not None:
        frontier = frontier_of(profile, time_limit_s=time_limit_s, on_progress=tell)
    fits = plan.counted_bytes <= plan.budget_bytes  # a plan beyond its budget has no prices
    each_s = RIVALS_S if time_limit_s is None else min(RIVALS_S, time_limit_s / len(RIVALS))
    rivals = _rivals(profile, frontier, each_s, tell)
    if frontier:
        frontier = Frontier.of(frontier).improved([*(rival.plan for rival in rivals), *([plan] if fits else [])])
    tell("explaining the plan")
    return plan_report(
        profile,
        plan,
        explanation=explain(profile, plan, time_limit_s=PRICES_S) if fits else None,
        frontier=frontier,
        rivals=rivals,
        measured=found,
        commands=commands,
    )


def _rivals(profile: Profile, frontier: Sequence[Plan], limit_s: float, tell: Callable[[str], None]) -> list[Rival]:
    """Return the plans of other planners, each within the peak of one of the frontier's plans, as time allows."""
    found = []
    for name, planner in RIVALS.items():
        if planner == "pooch" and len(profile.stages) > GREEDY_STAGES:
            continue
        began, longest_s = time.monotonic(), 0.0
        for like in frontier:
            tell(f"planning by another rule: {name}, {format_bytes(like.peak_bytes)}")
            at = time.monotonic()
            if at - began + longest_s > limit_s:
                break
            with contextlib.suppress(InfeasibleBudgetError):
                plan = BASELINES[planner](profile, like.peak_bytes)
                plan = plan.within(like.budget_bytes, like.lower_bound_s)
                # Without the model it can't be replayed, so it is assumed to reserve as much as the frontier's plan.
                plan = replace(plan, allocated_bytes=like.allocated_bytes, reserved_bytes=like.reserved_bytes)
                found.append(Rival(name, like.counted_bytes, plan))
            longest_s = max(longest_s, time.monotonic() - at)
    return found
