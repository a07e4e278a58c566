"""Searches, bounds and programs against brute force over every plan of small drawn chains, and the referee."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import brute_force
import pytest
from exactly import LONG_S, NO_RECOMPUTE, NOTHING_MOVES, ROUNDING, SAME, Limits, check, solve_profile
from random_chains import (
    compiled,
    enlarged,
    launched,
    moving_alone,
    odd_chain,
    on_the_host,
    random_chain,
    rich_chain,
    with_disk,
    with_residents,
    with_stages,
)

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits as AnyLimits
from ckptplan.solving import peak, smallest_peak
from ckptplan.solving.bound import cp_sat, process, scip
from ckptplan.solving.bound.mixed_integer import PeakModel
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import Evaluator, menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.parameters import Parameters

pytestmark = pytest.mark.planning

FOR_LONG_CHAINS = Parameters(few_plans=0, many_plans=0, rounds=20)
"""No exact search; each of the others ends with its rounds, long before its time limit."""
MOST_PLANS, MOST_WORK = 1500, 5000
"""What brute force tries in a second or two; chains with more are left out."""
KINDS = ("any", "odd", "launched", "compiled", "no room", "disk", "on the host", "residents")


@dataclass(frozen=True)
class Case:
    """A chain and what its plans may do, with the answers of brute force."""

    profile: Profile
    limits: AnyLimits
    budgets: tuple[int, ...]  # above the smallest peak

    @cached_property
    def plans(self) -> list[brute_force.Combination]:
        return brute_force.combinations(self.profile, actions=self.limits.actions, segments=self.limits.segments)

    @cached_property
    def least_bytes(self) -> int:
        return brute_force.smallest_peak(
            self.profile, host_bytes=self.limits.host_bytes, disk_bytes=self.limits.disk_bytes or 0, within=self.plans
        )

    def fastest_s(self, budget_bytes: int, *, host_bytes: int | None = None, any_tier: bool = False) -> float:
        """The fastest step; with `host_bytes` without a disk, with `any_tier` wherever a plan could put its bytes."""
        limits = self.limits
        host, disk = (limits.host_bytes, limits.disk_bytes or 0) if host_bytes is None else (host_bytes, 0)
        placed = brute_force.divisions if any_tier else brute_force.by_rule
        found = brute_force.fastest(
            self.profile, budget_bytes, host_bytes=host, disk_bytes=disk, within=self.plans, placed=placed
        )
        assert found is not None
        return found


def drawn(kind: str, seed: int) -> Case:
    """A chain with ties and extreme links, or with what its kind says.

    Host limits, sets of actions and segments are drawn with it.
    """
    rng = random.Random(f"{kind} {seed}")
    size = rng.randint(1, 5)
    host, disk, actions = rng.choice((None, 0, rng.randint(0, 60))), None, rng.choice((ACTIONS, NOTHING_MOVES))
    if kind == "odd":
        profile = odd_chain(rng, min(size, 4))
    elif kind == "launched":
        profile = launched(rng, random_chain(seed, size, most_options=4))
    elif kind == "compiled":
        profile = compiled(rng, random_chain(seed, min(size, 4), most_options=4))
    elif kind == "no room":
        chain, host = rich_chain(rng, 2 + seed % 2), 0
        profile = with_stages(chain, moving_alone)
    elif kind == "disk":
        profile = with_disk(rng, random_chain(seed, 3 + seed % 4, most_options=5))
        host, disk, actions = (
            rng.choice((0, 10, 25, 40)),
            rng.choice((15, 40, 1000)),
            rng.choice((NO_RECOMPUTE, ACTIONS)),
        )
    elif kind == "on the host":
        chain = (
            with_disk(rng, random_chain(seed, size, most_options=5)) if seed % 5 == 0 else odd_chain(rng, min(size, 4))
        )
        profile = on_the_host(rng, chain)
        disk = None if host is None or seed % 5 else rng.choice((15, 40, 1000))
    elif kind == "residents":
        chain = random_chain(seed, min(size, 4), most_options=4) if seed % 2 else odd_chain(rng, min(size, 3))
        profile = with_residents(rng, chain)
    else:
        profile = random_chain(seed, size, most_options=7 if size < 5 else 4)
        actions = rng.choice((actions, NO_RECOMPUTE, ("keep",)))
    actions = ACTIONS if rng.random() < 0.3 else actions
    limits = Limits(actions=actions, segments=rng.random() < 0.8, host_bytes=host, disk_bytes=disk, time_limit_s=LONG_S)
    return Case(profile, limits, (0, rng.randint(1, 40)))


@pytest.mark.parametrize("kind", KINDS)
def test_all_agree_with_brute_force(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        case = drawn(kind, seed)
        if len(case.plans) > MOST_PLANS or brute_force.work(case.profile, case.plans) > MOST_WORK:
            continue
        seen["cases"] += 1
        check_the_smallest_peak(case, seen, programs=seed % 3 == 0)
        for more in case.budgets:
            budget = case.least_bytes + more
            best_s = case.fastest_s(budget)
            plan = solve_profile(case.profile, budget, case.limits)
            check(case.profile, plan, budget, case.limits.host_bytes, case.limits.disk_bytes)
            assert plan.step_s == pytest.approx(best_s, **SAME), (seed, budget)
            used = [stage.option(c.option) for stage, c in zip(case.profile.stages, plan.choices, strict=True)]
            assert all(option.allowed(case.limits.actions) for option in used)
            seen["moves nothing"] += any(o.moves and not c.moves for o, c in zip(used, plan.choices, strict=True))
            seen["on disk"] += plan.disk_bytes > 0
            if case.limits.disk_bytes:  # bounded by the link's rate, whatever is on the disk
                at_the_link_s = case.fastest_s(budget, host_bytes=case.limits.host_bytes + case.limits.disk_bytes)
                assert plan.lower_bound_s == pytest.approx(at_the_link_s, **SAME), (seed, budget)
                assert plan.lower_bound_s <= case.fastest_s(budget, any_tier=True) * ROUNDING
            else:
                assert plan.status == "optimal", (seed, budget)
                check_bounds(case, budget, best_s, seen, programs=more > 0 and seed % 3 == 0)
        if seed % 3 == 0:
            check_the_way_for_long_chains(case, seen)
    assert seen["cases"] >= 12
    assert seen["moves nothing"] or kind != "no room"
    assert seen["on disk"] or kind != "disk"
    assert seen["too small"] or kind == "disk"
    # A linear bound is below what whole transfers of few stages cost; the program leaves inner sweeps out, and its
    # links are fluids; on chains this short a search may end beside the optimum.
    assert seen["bound equal"] >= 0.1 * seen["bound"]
    assert seen["program equal"] >= 0.6 * seen["program"]
    assert seen["program's peak equal"] >= 0.6 * seen["program's peak"]
    assert seen["search equal"] >= 0.7 * seen["search"]


def check_the_smallest_peak(case: Case, seen: Counter[str], *, programs: bool) -> None:
    profile, limits, least = case.profile, case.limits, case.least_bytes
    found = smallest_peak(profile, limits)
    assert (found.peak_bytes, found.bound_bytes, found.proven) == (least, least, True)
    if limits.disk_bytes is None:
        assert Evaluator(profile).peak(found.codes, found.segments) == least or limits.host_bytes is not None
        space = PlanSpace(profile, menus(profile, limits.actions), segments=limits.segments)
        assert peak.step_bound(space) <= least
        assert not peak.nothing_fits(space, least, limits.host_bytes, time.monotonic() + LONG_S)
        seen["too small"] += peak.nothing_fits(space, least * 3 // 4, limits.host_bytes, time.monotonic() + LONG_S)
    if least > 0:
        with pytest.raises(InfeasibleBudgetError, match="smallest feasible peak") as caught:
            solve_profile(profile, least - 1, limits)
        error = caught.value
        assert (error.budget_bytes, error.min_peak_bytes) == (least - 1, least)
        assert (error.min_peak_bound_bytes, error.min_peak_proven) == (least, True)
        missing = [a for a in ("swap", "recompute") if a not in limits.actions]
        assert all(repr(a) in str(error) for a in missing) or error.phase == "update"
    if programs and limits.host_bytes is None:
        # Bytes of large models leave the solver's whole numbers less room.
        large, times = enlarged(profile, 10**10), 10**10
        most = max(least, everything_kept_bytes(profile)) * times
        model = PeakModel(PlanSpace(large, menus(large, limits.actions), segments=limits.segments), most)
        bound, _ = cp_sat.smallest_peak(model, time.monotonic() + LONG_S)
        assert bound <= least * times
        seen["program's peak"] += 1
        seen["program's peak equal"] += bound == least * times


def check_bounds(case: Case, budget: int, best_s: float, seen: Counter[str], *, programs: bool) -> None:
    profile, limits = case.profile, case.limits
    space = PlanSpace(profile, menus(profile, limits.actions), segments=limits.segments)
    linear = lower_bound(space, budget, host_bytes=limits.host_bytes, deadline=time.monotonic() + LONG_S)
    assert linear.complete
    assert profile.fastest_step_s <= linear.bound_s <= best_s * ROUNDING
    seen["bound"] += 1
    seen["bound equal"] += linear.bound_s >= best_s * (1 - 1e-6)
    if programs:
        # In this process: the start of another one would take most of the time. CP-SAT raises bounds, and the last
        # part of an amount that flows takes it long.
        problem = process.Problem(space, budget, limits.host_bytes, best_s)
        exact = scip.solve(problem, time.monotonic() + LONG_S, 1e-7)
        whole = cp_sat.solve(problem, time.monotonic() + 0.2, 1e-4)
        assert max(exact.bound_s, whole.bound_s) <= best_s * ROUNDING
        seen["program"] += 1
        seen["program equal"] += exact.bound_s >= best_s * (1 - 1e-6)


def check_the_way_for_long_chains(case: Case, seen: Counter[str]) -> None:
    """Its plans are never faster than the fastest, and its bounds never above them."""
    profile, limits = case.profile, case.limits
    found = smallest_peak(profile, limits, parameters=FOR_LONG_CHAINS)
    assert found.bound_bytes <= case.least_bytes <= found.peak_bytes
    budget = found.peak_bytes + case.budgets[-1]
    best_s = case.fastest_s(budget)
    plan = solve_profile(profile, budget, limits, parameters=FOR_LONG_CHAINS)
    check(profile, plan, budget, limits.host_bytes, limits.disk_bytes)
    assert plan.lower_bound_s <= case.fastest_s(budget, any_tier=True) * ROUNDING
    assert plan.step_s >= best_s / ROUNDING
    seen["search"] += 1
    seen["search equal"] += plan.step_s <= best_s * ROUNDING
