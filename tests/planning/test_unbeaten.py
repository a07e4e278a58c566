"""No plan that is handed out or shown is beaten in memory and time by a published rule, or by another that is shown."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from random_chains import homogeneous_chain, random_chain, textbook_chain

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.planning import by_rules

pytestmark = pytest.mark.planning

WIDE_GAP = 0.1
"""Searches end at it with plans that rules and single changes can beat."""
LONG_S = 60.0
"""A time limit that no search of these tests meets, however busy the machine is."""
CHAINS: dict[str, Profile] = {
    "equal": homogeneous_chain(16, link_ratio=0.5),
    "textbook": textbook_chain(random.Random(2), 16),
    "rich": random_chain(0, 14),
}


@pytest.fixture(params=CHAINS)
def chain(request: pytest.FixtureRequest) -> Profile:
    return CHAINS[request.param]


def solved(profile: Profile, budget: str = "50%") -> Plan:
    return ckptplan.solve(profile, budget=budget, gap=WIDE_GAP, time_limit_s=LONG_S)


def by_rule(profile: Profile, budget_bytes: int) -> Iterator[Plan]:
    """The plans of published rules."""
    for rule in by_rules.QUICK:
        with contextlib.suppress(InfeasibleBudgetError):
            yield BASELINES[rule](profile, budget_bytes)


def beats(one: Plan, other: Plan) -> bool:
    """Whether a plan is faster with no more memory; 1e-9 for sums of the same seconds in another order."""
    return one.peak_bytes <= other.peak_bytes and one.step_s < other.step_s * (1 - 1e-9)


@pytest.mark.parametrize(("budget", "step_error"), [("30%", 0.0), ("50%", 0.3)])
@pytest.mark.long(but=["equal-30%-0.0"])
def test_no_rule_beats_a_plan(chain: Profile, budget: str, step_error: float) -> None:
    """Though its search ended early, and though a simpler plan may be taken that is slower within the error."""
    profile = replace(chain, step_error=step_error)
    plan = solved(profile, budget)
    assert plan.gap <= WIDE_GAP + 1e-9
    assert ckptplan.validate(profile, plan, plan.budget_bytes) == ()
    for limit in (plan.budget_bytes, plan.peak_bytes):
        assert not [other.planner for other in by_rule(profile, limit) if beats(other, plan)]


def test_no_alternative_beats_the_plan_that_is_explained(chain: Profile) -> None:
    plan = solved(chain)
    found = ckptplan.explain(chain, plan, time_limit_s=LONG_S)
    alternatives = [a for choice in found.choices for a in (choice.leaner, choice.richer) if a is not None]
    assert alternatives
    assert [a for a in alternatives if a.extra_s <= 0 and not a.missing_bytes] == []


def test_a_change_that_gains_no_more_than_the_error_is_no_alternative() -> None:
    """A swap of what need not move is as fast, and leaves no more memory than the plan has."""
    profile = homogeneous_chain(4, link_ratio=2.0)
    plan = ckptplan.solve(profile, 1.0)
    assert plan.host_bytes == 0
    assert all(c.leaner is None or c.leaner.extra_s > 0 for c in ckptplan.explain(profile, plan).choices)
    # What another plan than the solver's leaves on the table is shown.
    wasteful = BASELINES["recompute_all"](profile, plan.budget_bytes)
    richer = [c.richer for c in ckptplan.explain(profile, wasteful).choices]
    assert any(r is not None and r.option == "keep" and r.extra_s < 0 and not r.missing_bytes for r in richer)


def test_a_plan_that_is_better_takes_the_place_of_those_it_beats() -> None:
    plans = ckptplan.frontier(CHAINS["rich"], points=3, gap=WIDE_GAP, time_limit_s=LONG_S)
    first, middle, last = plans
    slower = replace(middle, step_s=middle.step_s * 1.001)
    smaller = replace(middle, peak_bytes=middle.peak_bytes - 1)
    faster = replace(middle, step_s=last.step_s)
    between = replace(first, peak_bytes=first.peak_bytes + 1, step_s=first.step_s * 0.999)
    assert plans.improved([slower, between]) == plans
    assert list(plans.improved([smaller])) == [first, smaller, last]
    assert list(plans.improved([smaller, faster])) == [first, faster]
    assert list(Frontier.of([last, slower, first, middle])) == list(plans)


@pytest.mark.long
def test_no_rule_beats_a_frontier() -> None:
    chain = CHAINS["rich"]
    plans = ckptplan.frontier(chain, points=3, gap=WIDE_GAP, time_limit_s=4 * LONG_S)
    for plan in plans:
        assert ckptplan.validate(chain, plan, plan.budget_bytes) == ()
        assert not [other.step_s for other in plans if other is not plan and beats(other, plan)]
        assert not [rule.planner for rule in by_rule(chain, plan.peak_bytes) if beats(rule, plan)]


@pytest.mark.long
def test_a_page_shows_no_beaten_point() -> None:
    """Neither the plan nor the rules, whose points lie beside it, beat a point of the frontier; it has what did."""
    chain = textbook_chain(random.Random(2), 8)
    plan, (first, *_, last) = solved(chain), ckptplan.frontier(chain, points=2, time_limit_s=LONG_S)
    slower = BASELINES["recompute_all"](chain, max(plan.peak_bytes, last.peak_bytes))
    data = plan.report(chain, frontier=[first, slower, last]).data["frontier"]
    points = [(point["peak"], point["s"]) for point in data["plans"]]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))
    shown = [(other["peak"], other["s"]) for other in data["others"]] + [(plan.peak_bytes, plan.step_s)]
    for peak, seconds in shown:
        assert not any(peak <= p and seconds < s * (1 - 1e-9) for p, s in points)
