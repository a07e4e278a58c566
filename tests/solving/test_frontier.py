"""The trade-off as a whole, the smallest peak within a slowdown, and explanations of plans."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from exactly import LONG_S, Limits, check, solve_profile
from random_chains import homogeneous_chain, random_chain
from steered import steer

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency
from ckptplan.core.units import format_seconds
from ckptplan.referee import validate
from ckptplan.report.explain import Alternative, Explanation, OptionStep, Worth
from ckptplan.solving import peak, planner
from ckptplan.solving.frontier import everything_kept_bytes, frontier_profile, smallest_within
from ckptplan.solving.planner import smallest_peak

pytestmark = pytest.mark.planning

CHAINS = {
    "homogeneous": homogeneous_chain(6, link_ratio=0.2),
    "rich": random_chain(7, 6),
    "textbook": random_chain(6, 6),
}


@functools.cache
def least_bytes(name: str) -> int:
    return smallest_peak(CHAINS[name]).peak_bytes


def test_a_search_that_does_not_find_the_smallest_peak_again_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on long chains, where each search has its own time."""

    def cut_short(*args: Any) -> planner.MinPeak:
        found = peak.least_peak(*args)
        return replace(found, peak_bytes=found.peak_bytes + 1, proven=False)

    profile = random_chain(1, 6)
    least = smallest_peak(profile).peak_bytes
    monkeypatch.setattr(planner, "least_peak", cut_short)
    steer(monkeypatch, few_plans=0)
    for search in ("segments", "labels"):
        monkeypatch.setattr(planner._PlanSearch, search, lambda *args: None)
    plans = frontier_profile(profile, points=2, limits=Limits(time_limit_s=LONG_S))
    assert plans[0].peak_bytes == least
    assert validate(profile, plans[0], least) == ()


@pytest.mark.parametrize("name", ["rich", "textbook"])
def test_frontier_runs_from_the_smallest_peak_to_everything_kept(name: str) -> None:
    profile = CHAINS[name]
    plans = frontier_profile(profile, points=4, limits=Limits(time_limit_s=LONG_S))
    assert plans[0].budget_bytes == least_bytes(name)
    assert plans[-1].step_s == pytest.approx(profile.baseline_step_s)
    for plan in plans:
        assert validate(profile, plan, plan.budget_bytes) == ()
    for a, b in pairwise(plans):
        assert a.budget_bytes < b.budget_bytes
        assert a.step_s > b.step_s
        assert a.lower_bound_s >= b.lower_bound_s


def test_frontier_of_a_chain_that_always_fits_is_one_plan() -> None:
    profile = Profile.from_chain([1.0], [2.0], [8], [8], input_bytes=8)
    (plan,) = frontier_profile(profile, points=12)
    assert plan.overhead == 0
    assert plan.budget_bytes == everything_kept_bytes(profile)


def test_plans_of_a_frontier_are_handed_out() -> None:
    seen: list[Plan] = []
    plans = ckptplan.frontier(CHAINS["rich"], points=4, time_limit_s=8, on_plan=seen.append)
    assert len(seen) == 4
    assert {plan.budget_bytes for plan in plans} <= {plan.budget_bytes for plan in seen}
    assert all(plan.forward_peak_bytes is not None for plan in seen)  # the referee has seen it
    seen.clear()
    plan = ckptplan.solve(CHAINS["rich"], max_overhead=0.05, time_limit_s=4, on_plan=seen.append)
    assert plan.peak_bytes == seen[-1].peak_bytes
    assert all(found.forward_peak_bytes is not None for found in seen)
    assert all(found.overhead <= 0.05 + 1e-9 for found in seen)


@pytest.mark.parametrize(
    ("name", "overhead"), [("homogeneous", 0.0), ("rich", 0.05), ("textbook", 0.3), ("textbook", 10.0)]
)
@pytest.mark.long("homogeneous-0.0")
def test_smallest_peak_within_a_slowdown(name: str, overhead: float) -> None:
    profile = CHAINS[name]
    plan = smallest_within(profile, overhead, Limits(time_limit_s=LONG_S))
    check(profile, plan, plan.budget_bytes)
    assert plan.overhead <= overhead + 1e-9
    assert plan.budget_bytes == plan.peak_bytes
    assert plan.peak_bound_bytes is not None
    assert plan.peak_bound_bytes <= plan.peak_bytes
    if plan.peak_bound_bytes > least_bytes(name):
        below = solve_profile(profile, plan.peak_bound_bytes - 1)
        assert below.overhead > overhead


def test_bad_requests() -> None:
    for bad in (-0.1, float("nan"), True, "10%"):
        with pytest.raises(InvalidInputError, match="max_overhead"):
            ckptplan.solve(CHAINS["rich"], max_overhead=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="pass one"):
        ckptplan.solve(CHAINS["rich"], budget_gb=1, max_overhead=0.1)
    for points in (1, -3, 2.5, True):
        with pytest.raises(InvalidInputError, match="points"):
            ckptplan.frontier(CHAINS["rich"], points=points)  # type: ignore[arg-type]


def tight(profile: Profile) -> int:
    least, most = smallest_peak(profile).peak_bytes, everything_kept_bytes(profile)
    return least + (most - least) // 4


def test_explanation_adds_up() -> None:
    profile = CHAINS["homogeneous"]
    plan = solve_profile(profile, tight(profile))
    found = ckptplan.explain(profile, plan)
    assert plan.overhead > 0
    spent_s = found.recompute_s + found.out_wait_s + found.in_wait_s
    assert spent_s == pytest.approx(plan.step_s - plan.baseline_step_s)
    assert 0 < max(found.out_busy, found.in_busy) <= 1 or plan.host_bytes == 0
    assert found.bindings
    assert min(b.spare_bytes for b in found.bindings) == plan.budget_bytes - plan.peak_bytes
    assert sum(c.count for c in found.choices) == len(profile.stages)
    # The bound is convex in the budget, so its price there is at least what the next MiB saves of it.
    more = solve_profile(profile, tight(profile) + (1 << 20))
    assert found.worth is not None
    assert plan.lower_bound_s - more.lower_bound_s <= found.worth.gib_s / 1024 * 1.5 + 1e-6 * plan.step_s
    # In units of which one more can save what is said.
    told = str(replace(found, worth=Worth(gib_s=100 * spent_s, out_s=0.0, in_s=0.0)))
    assert f"one more MiB saves about {format_seconds(100 * spent_s / 1024)} a step" in told
    roomy = ckptplan.explain(profile, solve_profile(profile, 2 * everything_kept_bytes(profile)))
    assert roomy.bindings == ()
    assert roomy.worth is None or roomy.worth.gib_s == 0
    assert "binds nowhere" in str(roomy)


def test_a_change_of_less_than_is_printed_is_none() -> None:
    for extra_s, told in ((-4e-7, "as fast"), (4e-7, "as fast"), (-6e-7, "-1 µs"), (2e-3, "+2.0 ms")):
        choice = OptionStep("a", (0,), "keep", Alternative("swap", extra_s, 0), None)
        assert f"swap: {told}" in str(Explanation(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), None, (choice,)))


def test_alternatives_are_what_the_referee_finds() -> None:
    profile = CHAINS["homogeneous"]
    plan = solve_profile(profile, tight(profile), Limits(segments=False))
    found = ckptplan.explain(profile, plan)
    for choice in found.choices:
        i = [stage.name for stage in profile.stages].index(choice.stage)
        for other in filter(None, (choice.leaner, choice.richer)):
            # A plan that is optimal within the budget can't be beaten by changing one choice.
            assert other.missing_bytes or other.extra_s >= -1e-6 * plan.step_s
            options = [stage.option(c.option) for stage, c in zip(profile.stages, plan.choices, strict=True)]
            options[i] = profile.stages[i].option(other.option)
            r = residency(profile, options)
            over = max(*r.forward_bytes, *r.backward_bytes) - plan.budget_bytes
            assert other.missing_bytes == max(0, over)
