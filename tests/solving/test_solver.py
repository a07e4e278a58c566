"""The parts of the solver: each against the referee and the others; what its plans promise, and when it ends."""

from __future__ import annotations

import functools
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from exactly import LONG_S, NOTHING_MOVES, SAME, Limits, between, check, solve_profile
from random_chains import (
    homogeneous_chain,
    random_chain,
    random_options,
    random_segments,
    rich_chain,
    textbook_chain,
    with_disk,
)

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.plan import OPTIMAL_GAP, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency
from ckptplan.core.units import GIB
from ckptplan.referee import simulate, validate
from ckptplan.solving import smallest_peak
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import Evaluator, menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.room import Room

pytestmark = pytest.mark.planning


def space_of(profile: Profile, actions: tuple[Action, ...] = ACTIONS) -> PlanSpace:
    return PlanSpace(profile, menus(profile, actions), segments="recompute" in actions)


def test_evaluator_equals_residency_and_referee() -> None:
    """Bytes, and times of single plans, of many at once, and of the schedule, with tiers by the rule."""
    schedules = on_disk = 0
    for seed in range(60):
        rng = random.Random(seed)
        profile = with_disk(rng, random_chain(seed, 2 + seed % 11))
        host, disk = rng.choice(((None, None), (30, None), (0, 30), (20, 1000)))
        evaluator, fast = Evaluator(profile, Room(host, disk or 0)), Evaluator(profile)
        segments = random_segments(rng, profile)
        options = random_options(rng, profile, segments)
        codes = [stage.options.index(o) for stage, o in zip(profile.stages, options, strict=True)]
        row = np.array([codes], np.int8)
        r, needs = residency(profile, options, segments), evaluator.needs(row, segments)
        assert tuple(needs.forward[0]) == r.forward_bytes
        assert tuple(needs.backward[0]) == r.backward_bytes
        assert tuple(needs.moved[0]) == r.moved_bytes
        least = evaluator.peak(codes, segments)
        for budget in (least - 1, least, least + rng.randint(1, 40)):
            one = evaluator.step_s(codes, budget, segments)
            assert one == evaluator.makespans(row, budget, segments)[0]
            assert (one < math.inf) == (budget >= least)
            assert one >= fast.step_s(codes, budget, segments)
            found = evaluator.schedule(codes, budget, segments)
            # Without what moves for nothing a plan may keep the limits after all.
            assert found is not None or one == math.inf
            if found is not None:
                timeline = simulate(profile, found.choices, found.segments)
                assert timeline.makespan_s == pytest.approx(found.step_s, **SAME)
                peaks = timeline.peak_bytes, timeline.host_bytes, timeline.disk_bytes
                assert peaks == (found.peak_bytes, found.host_bytes, found.disk_bytes)
                assert host is None or found.host_bytes <= host
                assert found.disk_bytes <= (disk or 0)
                assert found.step_s <= one * (1 + 1e-12)
                schedules += 1
                on_disk += found.disk_bytes > 0
    assert schedules > 80
    assert on_disk > 5


def test_error_of_a_long_chain_says_whether_the_peak_is_proven() -> None:
    # Neither one step alone nor the linear program asks for all that whole options and shared storages do.
    with pytest.raises(InfeasibleBudgetError, match="the smallest peak found") as caught:
        solve_profile(rich_chain(random.Random(11), 30), 1, Limits(time_limit_s=1))
    assert 0 < caught.value.min_peak_bound_bytes < caught.value.min_peak_bytes
    assert not caught.value.min_peak_proven
    # Where everything can move, the step that needs most by itself is the proof.
    profile = textbook_chain(random.Random(1), 30)
    with pytest.raises(InfeasibleBudgetError, match="the smallest feasible peak"):
        solve_profile(profile, 1, Limits(time_limit_s=LONG_S))
    # Where nothing moves the segment DP is.
    with pytest.raises(InfeasibleBudgetError, match="the smallest feasible peak") as caught:
        solve_profile(profile, 1, Limits(actions=NOTHING_MOVES, time_limit_s=LONG_S))
    least = caught.value.min_peak_bytes
    assert solve_profile(profile, least, Limits(actions=NOTHING_MOVES, time_limit_s=LONG_S)).peak_bytes == least


def test_recompute_only_is_what_rotor_finds() -> None:
    """The published dynamic program, written apart; in units of one byte it is exact."""
    for seed in range(3):
        rng = random.Random(seed)
        profile = textbook_chain(rng, 8 + 3 * seed)
        least = smallest_peak(profile, Limits(actions=NOTHING_MOVES)).peak_bytes
        for budget in (least, least + rng.randint(1, 100)):
            plan = solve_profile(profile, budget, Limits(actions=NOTHING_MOVES))
            check(profile, plan, budget)
            assert plan.status == "optimal"
            assert plan.step_s == pytest.approx(BASELINES["rotor"](profile, budget).step_s, **SAME)
        with pytest.raises(InfeasibleBudgetError):
            BASELINES["rotor"](profile, least - 1)


def test_segments_beat_single_stages_where_they_must() -> None:
    """Boundaries are as large as what is saved besides: only segments get below one boundary per stage."""
    profile = Profile.from_chain([1.0] * 12, [2.0] * 12, [10] * 12, [20] * 12, input_bytes=10)
    limits, apart = Limits(actions=NOTHING_MOVES), Limits(actions=NOTHING_MOVES, segments=False)
    single, together = (smallest_peak(profile, each) for each in (apart, limits))
    assert together.peak_bytes < single.peak_bytes - 30
    assert max(segment.depth(i) for segment in together.segments for i in range(12)) >= 2
    plan, alone = (solve_profile(profile, single.peak_bytes, each) for each in (limits, apart))
    check(profile, plan, single.peak_bytes)
    assert plan.segments
    assert not alone.segments
    assert plan.step_s < alone.step_s
    assert ("nested segments" in plan.space, "no segments" in alone.space) == (True, True)


def test_the_time_limit_ends_the_search() -> None:
    """Of a chain on which the search would go on for minutes; in time of this process, which others can't take away."""
    profile = rich_chain(random.Random(1), 18)
    begin = time.process_time()
    least = smallest_peak(profile, Limits(time_limit_s=0.3)).peak_bytes
    plan = solve_profile(profile, least + 20, Limits(time_limit_s=0.3))
    assert time.process_time() - begin < 15
    check(profile, plan, least + 20)


@pytest.mark.usefixtures("short_search")
def test_homogeneous_blocks_come_within_a_percent() -> None:
    profile = homogeneous_chain(24, link_ratio=0.8)
    budget = between(profile, 20, Limits(time_limit_s=LONG_S))
    plan = solve_profile(profile, budget, Limits(time_limit_s=LONG_S))
    check(profile, plan, budget)
    assert plan.gap <= 0.01


def test_a_long_chain_has_a_plan_from_the_start() -> None:
    profile = homogeneous_chain(300, link_ratio=0.5)
    budget = everything_kept_bytes(profile) // 3
    plan = solve_profile(profile, budget, Limits(time_limit_s=1))
    check(profile, plan, budget)


def test_everything_kept_when_it_fits() -> None:
    profile = homogeneous_chain(30, link_ratio=1.0)
    plan = solve_profile(profile, everything_kept_bytes(profile))
    assert (plan.status, plan.gap, plan.overhead, plan.host_bytes) == ("optimal", 0.0, 0.0, 0)
    assert {choice.action for choice in plan.choices} == {"keep"}


def test_options_that_gain_nothing_do_not_appear_without_need() -> None:
    for seed in range(0, 18, 3):
        profile = random_chain(seed, 5)
        budget = smallest_peak(profile).peak_bytes + seed % 20
        plan = solve_profile(profile, budget)
        evaluator = Evaluator(profile)
        codes = [
            [option.name for option in stage.options].index(choice.option)
            for stage, choice in zip(profile.stages, plan.choices, strict=True)
        ]
        inside = {i for segment in plan.segments for i in range(segment.first, segment.last + 1)}
        for i, code in enumerate(codes):
            if code and i not in inside:
                kept = [*codes[:i], 0, *codes[i + 1 :]]
                assert evaluator.step_s(kept, budget, plan.segments) > plan.step_s * (1 + 1e-12)


def test_same_seed_same_plan() -> None:
    for n, actions in ((6, ACTIONS), (14, NOTHING_MOVES)):
        profile = textbook_chain(random.Random(n), n)
        budget = smallest_peak(profile, Limits(actions=actions)).peak_bytes + 10
        limits = Limits(actions=actions, seed=7, workers=1, time_limit_s=LONG_S)
        assert solve_profile(profile, budget, limits) == solve_profile(profile, budget, limits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"actions": ("keep", "offload")}, "unknown action 'offload'"),
        ({"time_limit_s": 0}, "time_limit_s=0 must be"),
        ({"time_limit_s": math.nan}, "time_limit_s=nan must be"),
        ({"time_limit_s": math.inf}, "time_limit_s=inf must be"),
        ({"host_bytes": 1.5}, "host_bytes=1.5 must be"),
        ({"budget_bytes": 1.5}, "budget_bytes=1.5 must be"),
    ],
)
def test_bad_input(arguments, message) -> None:  # type: ignore[no-untyped-def]
    profile = random_chain(0, 2)
    with pytest.raises(InvalidInputError, match=message):
        solve_profile(profile, arguments.pop("budget_bytes", 1000), Limits(**arguments))


def test_the_update_can_bind() -> None:
    profile = replace(random_chain(0, 3), update_peak_bytes=10_000)
    with pytest.raises(InfeasibleBudgetError, match="optimizer update") as caught:
        solve_profile(profile, 9_999, Limits(actions=("keep",)))
    assert (caught.value.phase, caught.value.min_peak_bytes) == ("update", 10_000)
    assert "allow" not in str(caught.value)
    assert solve_profile(profile, 10_000).status == "optimal"


def test_progress_is_reported() -> None:
    seen: list[tuple[str, float, float, int | None]] = []
    profile = textbook_chain(random.Random(5), 16)
    plan = solve_profile(
        profile,
        smallest_peak(profile, Limits(time_limit_s=1)).peak_bytes,
        Limits(time_limit_s=1),
        on_progress=lambda *report: seen.append(report),
    )
    assert seen[-1] == ("done", plan.step_s, plan.lower_bound_s, plan.peak_bytes)
    assert all(bound <= best * (1 + 1e-9) for _, best, bound, _ in seen)
    assert [best for _, best, *_ in seen] == sorted((best for _, best, *_ in seen), reverse=True)


@functools.cache
def tight_chain() -> tuple[Profile, int]:
    """A chain on which the bound comes near the plan long before it meets it."""
    profile = rich_chain(random.Random(6), 24)
    least, most = smallest_peak(profile).peak_bytes, everything_kept_bytes(profile)
    return profile, least + (most - least) // 3


@pytest.mark.long
def test_the_search_ends_at_the_gap_that_is_asked_for() -> None:
    profile, budget = tight_chain()

    def parts(gap: float) -> list[str]:
        found: list[str] = []
        plan = solve_profile(profile, budget, Limits(gap=gap), on_progress=lambda part, *_: found.append(part))
        assert OPTIMAL_GAP < plan.gap <= gap
        assert plan.status == "feasible"
        assert validate(profile, plan, budget) == ()
        return found

    assert len(parts(0.5)) < len(parts(0.05))


def test_plans_are_handed_out_as_they_are_found() -> None:
    profile, budget = tight_chain()
    seen: list[Plan] = []
    plan = ckptplan.solve(profile, budget / GIB, gap=0.05, on_plan=seen.append)
    assert len(seen) > 1
    for found in (*seen, plan):
        assert validate(profile, found, budget) == ()
        assert found.forward_peak_bytes is not None
    assert [found.step_s for found in seen] == sorted({found.step_s for found in seen}, reverse=True)
    assert [found.lower_bound_s for found in seen] == sorted(found.lower_bound_s for found in seen)
    assert plan.step_s <= seen[-1].step_s


def test_a_search_begins_with_what_is_known() -> None:
    profile, budget = tight_chain()
    plan = solve_profile(profile, budget, Limits(gap=0.05))
    found: list[float] = []
    again = solve_profile(
        profile, budget, Limits(gap=0.05), start=(plan, plan.lower_bound_s), on_progress=lambda *r: found.append(r[1])
    )
    assert (again.step_s, again.lower_bound_s) == (plan.step_s, plan.lower_bound_s)
    assert len(found) == 1  # there was nothing to do
    # A plan that doesn't fit isn't taken.
    less = solve_profile(profile, plan.peak_bytes - 1, Limits(gap=0.05), start=(plan, 0.0))
    assert validate(profile, less, plan.peak_bytes - 1) == ()


@pytest.mark.parametrize(("seconds", "stages"), [(0.0, 4), (1e-300, 20)])
def test_bounds_hold_for_chains_that_compute_next_to_nothing(seconds: float, stages: int) -> None:
    """What takes time is the copies alone."""
    times, sizes = [seconds] * stages, [50 + i for i in range(stages)]
    profile = Profile.from_chain(
        times, times, [10] * stages, sizes, input_bytes=10, out_bytes_per_s=1000.0, in_bytes_per_s=1000.0
    )
    budget = everything_kept_bytes(profile) * 2 // 3
    plan = solve_profile(profile, budget, Limits(actions=("keep", "swap"), time_limit_s=1.0))
    check(profile, plan, budget)
    found = lower_bound(space_of(profile, ("keep", "swap")), budget, deadline=time.monotonic() + LONG_S)
    assert found.bound_s <= plan.step_s


def test_the_exact_search_is_the_last_resort() -> None:
    """Of a chain with few plans, though with many ways to choose segments, where the bounds leave a gap."""
    rng = random.Random(78)
    profile = random_chain(78, rng.randint(1, 7))
    budget = between(profile, 70)
    plan = solve_profile(profile, budget, Limits(gap=0.0, time_limit_s=LONG_S))
    assert len(profile.stages) == 7
    assert plan.status == "optimal"
    check(profile, plan, budget)


def changed_s(profile: Profile, plan: Plan) -> float:
    """Seconds that a plan adds to keeping everything, and those of its copies."""
    link = profile.link
    copies_s = plan.host_bytes / link.out_bytes_per_s + plan.host_bytes / link.in_bytes_per_s
    return min(plan.step_s - plan.baseline_step_s + copies_s, plan.step_s)


def test_what_gains_no_more_than_the_error_is_given_up() -> None:
    """A swap that is faster than recompute by less than measurements tell isn't faster; the gap is that of the plan.

    What two plans share is no part of their difference, and its error isn't either.
    """
    given_up = 0
    for seed in (0, 1, 2, 15):
        chain = textbook_chain(random.Random(seed), 5)
        for budget in (between(chain, 25), 2 * between(chain, 25)):
            exact = solve_profile(chain, budget)
            for error in (0.02, 0.3):
                noisy = replace(chain, step_error=error)
                plan = solve_profile(noisy, budget, Limits(gap=0.01))
                longest_s = exact.step_s + min(error * changed_s(chain, exact), 0.01 * exact.step_s)
                assert exact.step_s <= plan.step_s <= longest_s * (1 + 1e-9)  # sums are rounded
                assert plan.lower_bound_s <= exact.step_s * (1 + 1e-9)
                assert (plan.status == "optimal") == (plan.step_s <= plan.lower_bound_s * (1 + 1e-6))
                decided, before = ([c.action for c in p.choices] for p in (plan, exact))
                costs = plan.host_bytes, len(decided) - decided.count("keep")
                assert costs <= (exact.host_bytes, len(before) - before.count("keep"))
                given_up += plan.host_bytes < exact.host_bytes
                told = [note for note in plan.notes if "faster by the profile was found and not taken" in note]
                assert len(told) == (plan.step_s > exact.step_s * (1 + 1e-9))  # sums are rounded
                for gap in (0.0, 0.002):  # no more is given up than was asked for
                    closer = solve_profile(noisy, budget, Limits(gap=gap))
                    assert closer.gap <= max(gap, exact.gap) + 1e-9
    assert given_up
