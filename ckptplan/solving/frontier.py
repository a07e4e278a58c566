"""The time/memory trade-off: plans from the smallest peak to everything kept, and the smallest peak in a slowdown."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

from ckptplan.core.checks import is_number
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import Plan, status_of
from ckptplan.core.profile import Profile
from ckptplan.core.progress import Message, limited, search_state
from ckptplan.core.request import NO_LIMITS, Limits, OnPlan
from ckptplan.core.schedule import residency, tightest_peak
from ckptplan.core.units import format_bytes
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.parameters import CLOSE, DEFAULT, ROUNDING, Parameters
from ckptplan.solving.peak import plan_space_of
from ckptplan.solving.planner import OnProgress, Start, smallest_peak, solve_profile
from ckptplan.solving.room import Room


def everything_kept_bytes(profile: Profile) -> int:
    """Peak of the step with everything kept."""
    return tightest_peak(profile, residency(profile, [stage.keep for stage in profile.stages])).bytes


def frontier_profile(profile: Profile, points: int, limits: Limits = NO_LIMITS) -> tuple[Plan, ...]:
    """Return plans along the trade-off, smallest peak first; the last one keeps everything.

    Budgets are placed where they tell most: the widest rectangle between two neighbouring plans is split next. A plan
    serves any larger budget too and a bound holds for any smaller one, so each search begins with the plan below it and
    the bound above it.

    Parameters
    ----------
    points : int
        Largest number of budgets to solve for, 2 or more: the two ends are included.
    limits : Limits
        The time is for all of them together.

    Returns
    -------
    tuple of Plan
        By rising peak and falling time; none is beaten in both by another.

    Raises
    ------
    InvalidInputError
        If the arguments can't be used.
    """
    began_s = time.monotonic()
    each = replace(limits, time_limit_s=limits.time_limit_s / (points + 1), on_plan=None)
    limits.on_progress(limited("looking for the smallest peak", each.time_limit_s))
    least = smallest_peak(profile, each)
    most = max(everything_kept_bytes(profile), least.peak_bytes)

    def solve(budget_bytes: int, start: Start | None = None) -> Plan:
        what = f"budget {len(found) + 1} of {points}"
        report = _reporting(limits, what, began_s, done=len(found) + 1, total=points)
        plan = _solved(profile, budget_bytes, each, limits.on_plan, start=start, on_progress=report)
        if limits.on_plan is not None:
            limits.on_plan(plan)
        return plan

    found: list[Plan] = []
    found.append(solve(least.peak_bytes, (least, 0.0)))  # another search may not find it again in its time
    if most > least.peak_bytes:
        found.append(solve(most))
    while len(found) < points:
        gaps = [(b.budget_bytes - a.budget_bytes) * (a.step_s - b.step_s) for a, b in pairwise(found)]
        widest = max(range(len(gaps)), key=gaps.__getitem__, default=0)
        if not gaps or gaps[widest] <= 0:
            break
        below, above = found[widest], found[widest + 1]
        if above.budget_bytes - below.budget_bytes < 2:
            break
        middle = (below.budget_bytes + above.budget_bytes) // 2
        found.insert(widest + 1, solve(middle, (below, above.lower_bound_s)))
        found = _passed_along(found)
    out: list[Plan] = []
    for plan in _passed_along(found):
        if not out or plan.step_s < out[-1].step_s * (1 - ROUNDING):
            out.append(plan)
    return tuple(out)


def _reporting(
    limits: Limits, what: str, began_s: float, *, done: int | None = None, total: int | None = None
) -> OnProgress:
    """A function that reports the state of a search, as part of a work that began at `began_s`."""

    def report(part: str, best_s: float, bound_s: float, peak_bytes: int | None) -> None:
        text = f"{what} ({part}): {search_state(best_s, bound_s, peak_bytes)}"
        limits.on_progress(Message(text, done=done, total=total, began_s=began_s, limit_s=limits.time_limit_s))

    return report


def _solved(
    profile: Profile,
    budget_bytes: int,
    limits: Limits,
    on_interrupt: OnPlan | None,
    *,
    start: Start | None = None,
    on_progress: OnProgress | None = None,
    parameters: Parameters | None = None,
) -> Plan:
    """`solve_profile` without `on_plan`; a plan found before an interrupt goes to `on_interrupt`."""
    handed: list[Plan] = []
    within = replace(limits, on_plan=handed.append)
    try:
        return solve_profile(profile, budget_bytes, within, start=start, on_progress=on_progress, parameters=parameters)
    except KeyboardInterrupt:
        if handed and on_interrupt is not None:
            on_interrupt(handed[-1])
        raise


def _passed_along(plans: list[Plan]) -> list[Plan]:
    """The same budgets, each with the best plan of smaller ones and the best bound of larger ones."""
    best: list[Plan] = []
    for plan in plans:
        faster = best and best[-1].step_s < plan.step_s
        best.append(
            replace(best[-1], budget_bytes=plan.budget_bytes, lower_bound_s=plan.lower_bound_s) if faster else plan
        )
    bound_s = 0.0
    for i in reversed(range(len(best))):
        bound_s = max(bound_s, best[i].lower_bound_s)
        best[i] = replace(
            best[i], lower_bound_s=min(bound_s, best[i].step_s), status=status_of(best[i].step_s, bound_s)
        )
    return best


def smallest_within(
    profile: Profile,
    max_overhead: float,
    limits: Limits = NO_LIMITS,
    parameters: Parameters | None = None,
) -> Plan:
    """Return the plan of the smallest peak found whose step is at most `max_overhead` longer than with everything kept.

    Bisection on the budget; the plan's `peak_bound_bytes` says what no plan within the slowdown can go below.

    Parameters
    ----------
    max_overhead : float
        0.10 for ten per cent.

    Raises
    ------
    InvalidInputError
        If `max_overhead` is not a number, 0 or more.
    """
    if not is_number(max_overhead) or not 0 <= max_overhead < math.inf:
        raise InvalidInputError(f"max_overhead={max_overhead!r} must be a number, 0 or more; 0.10 stands for 10 %")
    parameters = parameters or DEFAULT
    share = parameters.small_share
    began_s = time.monotonic()
    end = began_s + limits.time_limit_s
    deadline = end - share * limits.time_limit_s  # the rest is for the bound
    limit_s = profile.baseline_step_s * (1 + max_overhead) * (1 + ROUNDING)
    peak_s = share * limits.time_limit_s
    limits.on_progress(limited("looking for the smallest peak", peak_s))
    least = smallest_peak(profile, replace(limits, time_limit_s=peak_s), parameters)
    low, proven = least.peak_bytes, least.bound_bytes  # no plan within the slowdown needs less than `proven`

    def solve(budget_bytes: int) -> Plan | None:
        """Return the plan for a budget if it is fast enough; otherwise note what its bound proves, and return None."""
        nonlocal proven
        share_s = share * max(parameters.least_s, deadline - time.monotonic())
        report = _reporting(limits, f"trying {format_bytes(budget_bytes)}", began_s)
        # Whether any plan is fast enough has to be decided, however close the best one is.
        within = replace(limits, time_limit_s=share_s, gap=0.0)
        try:
            plan = _solved(profile, budget_bytes, within, fast_enough, on_progress=report, parameters=parameters)
        except InfeasibleBudgetError:
            return None
        fast_enough(plan)
        if plan.step_s <= limit_s:
            return plan
        if plan.lower_bound_s > limit_s:
            proven = max(proven, budget_bytes + 1)
        return None

    def fast_enough(plan: Plan) -> None:
        """Hand out what a search has found, an interrupted one as well, if it is within the slowdown."""
        if plan.step_s <= limit_s and limits.on_plan is not None:
            limits.on_plan(plan)

    best = solve(low)
    if best is None:
        most = max(everything_kept_bytes(profile), low)
        best = solve(most)
        if best is None:  # with everything kept, only weights that return for their forward can make the step slower
            raise InfeasibleBudgetError(
                f"no plan is within a slowdown of {max_overhead:.1%}: copies of weights that are away between steps "
                "take longer; raise max_overhead, or leave 'weights' out of offload",
                budget_bytes=most, min_peak_bytes=most, stage=profile.stages[0].name, phase="forward",
            )  # fmt: skip
        while best.peak_bytes - low > max(1, CLOSE * best.peak_bytes) and time.monotonic() < deadline:
            middle = (low + best.peak_bytes) // 2
            found = solve(middle)
            low, best = (middle, best) if found is None else (low, found)
    limits.on_progress(limited("proving how much memory is needed", max(0.0, end - time.monotonic())))
    room = Room.of(profile, limits)
    space = plan_space_of(room.movable(profile), limits.actions, limits.segments, parameters)
    high = best.peak_bytes
    while high - proven > CLOSE * high and (left_s := end - time.monotonic()) > 0:
        # What the search above happened to prove, and what bounds alone prove further up.
        middle = (proven + high) // 2
        bound = lower_bound(space, middle, host_bytes=room.total_bytes, deadline=end - (1 - share) * left_s)
        proven, high = (middle + 1, high) if bound.bound_s > limit_s else (proven, middle)
    return replace(best, budget_bytes=best.peak_bytes, peak_bound_bytes=min(proven, best.peak_bytes))
