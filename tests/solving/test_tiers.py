"""Three tiers: what goes to the disk and how long that takes; and swaps that gain nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import brute_force
import numpy as np
import pytest
from exactly import Limits, solve_profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_chains import homogeneous_chain, random_chain, random_options, random_segments
from steered import steer
from typer.testing import CliRunner

import ckptplan
from ckptplan.cli.app import app
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.link import STAGING_BYTES, Link
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import StepNeed, evaluate, residency
from ckptplan.core.segment import Segment
from ckptplan.core.units import GIB, format_swapped
from ckptplan.planning.job import staged
from ckptplan.referee import simulate, validate
from ckptplan.solving import planner, smallest_peak
from ckptplan.solving.cost import Evaluator, Schedule
from ckptplan.solving.frontier import everything_kept_bytes, frontier_profile, smallest_within
from ckptplan.solving.incumbent import AT_THE_HOSTS_RATE, Incumbent
from ckptplan.solving.room import Room

pytestmark = pytest.mark.planning

PROFILES = Path(__file__).parents[1] / "profiles"
LONG_S = 60.0
"""A time limit that no search of these tests meets, however busy the machine is."""
# Times are sums of the same seconds in another order.
SAME = {"rel": 1e-9, "abs": 1e-9}
NO_RECOMPUTE: tuple[Action, ...] = ("keep", "swap")


def with_disk(profile: Profile, rng: random.Random) -> Profile:
    link = profile.link
    disk = Link(
        link.out_bytes_per_s / rng.choice((1, 2, 4, 10)),
        link.in_bytes_per_s / rng.choice((1, 2, 8)),
        link.latency_s + rng.choice((0, 0.25)),
    )
    return replace(profile, disk=disk)


def tight_chain() -> Profile:
    """Six stages that save 10 bytes each, no room for them, links as fast as a stage's forward, a disk half as fast."""
    return Profile.from_chain(
        [1.0] * 6, [1.0] * 6, [2] * 6, [10] * 6, input_bytes=2, out_bytes_per_s=10.0, in_bytes_per_s=10.0,
        disk_out_bytes_per_s=5.0, disk_in_bytes_per_s=4.0,
    )  # fmt: skip


def sound(profile: Profile, plan: Plan, budget: int, host: int | None, disk: int | None) -> None:
    assert validate(profile, plan, budget, host_bytes=host, disk_bytes=disk) == ()
    timeline = simulate(profile, plan)
    assert (timeline.host_bytes, timeline.disk_bytes) == (plan.host_bytes, plan.disk_bytes)
    assert timeline.makespan_s == pytest.approx(plan.step_s, **SAME)
    assert plan.lower_bound_s <= plan.step_s


def check_host_is_full(profile: Profile, plan: Plan, host: int) -> None:
    """No stage's bytes are on the disk for which the host had room."""
    for i, choice in enumerate(plan.choices):
        if choice.tier == "disk":
            back = [*plan.choices[:i], replace(choice, tier="host"), *plan.choices[i + 1 :]]
            assert simulate(profile, back, plan.segments).host_bytes > host


def test_the_host_is_filled_in_the_order_of_the_stages() -> None:
    moved = (4, 5, 0, 3, 2)
    assert Room(8, 7).on_disk(moved) == {1, 4}  # the host has 4 and 3
    assert Room(8, 6).on_disk(moved) == {0, 4}  # 5 and 3: the disk has no room for 5 and 2
    assert Room(8, 5).on_disk(moved) is None
    assert Room(14, 5).on_disk(moved) == Room(None).on_disk(moved) == frozenset()
    assert Room(0, 14).on_disk(moved) == {0, 1, 3, 4}


MOST_WORK = 20_000
"""Choices that brute force tries in half a minute, with every division between the tiers."""


@pytest.mark.parametrize("part", range(4))
def test_equals_brute_force(part: int) -> None:
    """Options and segments, with tiers by the rule; no division between the tiers is faster than the bound."""
    on_disk = slower = 0
    for seed in range(part, 64, 4):
        rng = random.Random(seed)
        profile = with_disk(random_chain(seed, 3 + seed % 5, most_options=5), rng)
        host, disk = rng.choice((0, 10, 25, 40)), rng.choice((15, 40, 1000))
        actions = NO_RECOMPUTE if rng.random() < 0.7 else ACTIONS
        combinations = brute_force.combinations(profile, actions=actions)
        if len(combinations) > 1500 or brute_force.work(profile, combinations) > MOST_WORK:
            continue
        limits = {"actions": actions, "host_bytes": host, "disk_bytes": disk}
        least = brute_force.smallest_peak(profile, within=combinations, **limits)
        assert smallest_peak(profile, Limits(**limits)).peak_bytes == least
        for budget in (least, least + rng.randint(0, 40)):
            plan = solve_profile(profile, budget, Limits(**limits))
            sound(profile, plan, budget, host, disk)
            check_host_is_full(profile, plan, host)
            by_rule = brute_force.fastest(profile, budget, within=combinations, placed=brute_force.by_rule, **limits)
            assert plan.step_s == pytest.approx(by_rule, **SAME), (seed, budget)
            best = brute_force.fastest(profile, budget, within=combinations, **limits)
            at_the_link = brute_force.fastest(
                profile, budget, within=combinations, actions=actions, host_bytes=host + disk
            )
            assert best is not None
            assert plan.lower_bound_s <= best * (1 + 1e-9)
            assert plan.lower_bound_s == pytest.approx(at_the_link, **SAME), (seed, budget)
            on_disk += plan.disk_bytes > 0
            slower += plan.step_s > best * (1 + 1e-9)
    assert on_disk >= 2
    assert slower <= on_disk


def test_the_way_for_long_chains_is_sound_on_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """No exact search: never better than brute force, bounds never above it."""
    # Each search ends with its rounds, long before its time limit.
    steer(monkeypatch, few_plans=0, many_plans=0, rounds=20, tried=8)
    equal = count = on_disk = 0
    # Half of these plans use the disk, of the first thirty seeds' one in six. A search takes 0.4 s.
    for seed in (1, 3, 6, 8, 9, 12, 14, 15, 20, 26):
        rng = random.Random(seed)
        profile = with_disk(random_chain(seed, 3 + seed % 4, most_options=5), rng)
        host, disk = rng.choice((0, 10, 25)), rng.choice((15, 40, 1000))
        actions = NO_RECOMPUTE if rng.random() < 0.7 else ACTIONS
        combinations = brute_force.combinations(profile, actions=actions)
        limits = {"actions": actions, "host_bytes": host, "disk_bytes": disk}
        least = brute_force.smallest_peak(profile, within=combinations, **limits)
        found = smallest_peak(profile, Limits(time_limit_s=LONG_S, **limits))
        assert found.bound_bytes <= least <= found.peak_bytes
        budget = found.peak_bytes + rng.randint(0, 20)
        plan = solve_profile(profile, budget, Limits(time_limit_s=LONG_S, **limits))
        sound(profile, plan, budget, host, disk)
        check_host_is_full(profile, plan, host)
        best = brute_force.fastest(profile, budget, within=combinations, **limits)
        by_rule = brute_force.fastest(profile, budget, within=combinations, placed=brute_force.by_rule, **limits)
        assert best is not None
        assert by_rule is not None
        assert plan.step_s >= by_rule * (1 - 1e-9), seed
        assert plan.lower_bound_s <= best * (1 + 1e-9), seed
        equal += plan.step_s <= by_rule * (1 + 1e-9)
        on_disk += plan.disk_bytes > 0
        count += 1
    assert on_disk >= 3
    # On chains this short a search may end beside the optimum.
    assert equal >= 0.8 * count


def three_stages() -> tuple[Profile, int]:
    """A second per stage and direction; the position of the middle one's 10 bytes that no other stage holds."""
    profile = Profile.from_chain(
        [1.0] * 3, [1.0] * 3, [10] * 3, [20] * 3, input_bytes=0, out_bytes_per_s=10.0, in_bytes_per_s=10.0,
        disk_out_bytes_per_s=5.0, disk_in_bytes_per_s=4.0,
    )  # fmt: skip
    inner = next(s for s, storage in enumerate(profile.storages) if storage.name == "s1.inner")
    return profile, profile.stages[1].option("swap").saved.index(inner)


@pytest.mark.parametrize(("tier", "out_s", "in_s"), [("host", 1.0, 1.0), ("disk", 2.0, 2.5)])
def test_times_of_the_tiers_by_hand(tier, out_s, in_s) -> None:  # type: ignore[no-untyped-def]
    profile, at = three_stages()
    keep = Decision("keep")
    # Out by the end of forward 1, back from the start of backward 1 on: compute waits for all of both.
    timeline = simulate(profile, [keep, Decision.moving("swap", (at,), 1, 1, tier=tier), keep])
    assert (timeline.makespan_s, timeline.stall_s) == (6.0 + out_s + in_s, out_s + in_s)
    assert (timeline.host_bytes, timeline.disk_bytes) == ((10, 0) if tier == "host" else (0, 10))
    # A step later each, a second of both is hidden.
    late = simulate(profile, [keep, Decision.moving("swap", (at,), 2, 2, tier=tier), keep])
    assert late.makespan_s == 4.0 + out_s + in_s
    assert late.peak_bytes >= timeline.peak_bytes


def test_both_tiers_share_the_queues() -> None:
    """A copy to the host waits for the one to the disk before it."""
    profile, _ = three_stages()
    swap = profile.stages[0].option("swap")
    own = [p for p, s in enumerate(swap.saved) if profile.storages[s].name == "s0.inner"]
    _, at = three_stages()
    choices = [
        Decision.moving("swap", tuple(own), 2, 1, tier="disk"),
        Decision.moving("swap", (at,), 2, 1, tier="host"),
        Decision("keep"),
    ]
    timeline = simulate(profile, choices)
    times = [(e.lane, e.stage, e.start_s, e.end_s) for e in timeline.events if e.lane != "compute"]
    assert times == [
        ("out", "s0", 1.0, 3.0),
        ("out", "s1", 3.0, 4.0),
        ("in", "s1", 5.0, 6.0),
        ("in", "s0", 6.0, 8.5),
    ]
    assert timeline.makespan_s == 9.5


def test_violations_of_tiers() -> None:
    profile = tight_chain()
    host, disk = 10, 1000
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE, host_bytes=host, disk_bytes=disk)).peak_bytes
    plan = solve_profile(profile, budget, Limits(actions=NO_RECOMPUTE, host_bytes=host, disk_bytes=disk))
    assert 0 < plan.host_bytes <= host
    assert plan.disk_bytes > 0

    def kinds(profile: Profile, plan: Plan, host: int | None, disk: int | None) -> list[str]:
        return [v.kind for v in validate(profile, plan, budget, host_bytes=host, disk_bytes=disk)]

    assert kinds(profile, plan, host, disk) == []
    assert kinds(profile, plan, None, plan.disk_bytes) == []
    assert kinds(profile, plan, plan.host_bytes - 1, disk) == ["host budget"]
    assert kinds(profile, plan, host, plan.disk_bytes - 1) == ["disk budget"]
    assert kinds(profile, plan, host, None) == kinds(profile, plan, host, 0) == ["disk budget"]
    assert kinds(profile, replace(plan, disk_bytes=plan.disk_bytes + 1), host, disk) == ["prediction"]
    gone = kinds(replace(profile, disk=None), plan, host, disk)
    assert gone
    assert set(gone) == {"tier"}
    with pytest.raises(InvalidInputError, match="the profile has no disk tier"):
        simulate(replace(profile, disk=None), plan)
    at_host = replace(plan, choices=tuple(replace(c, tier="host") for c in plan.choices))
    assert set(kinds(profile, at_host, host, disk)) == {"host budget", "prediction"}


def test_decisions_put_stages_on_the_tier_asked_for() -> None:
    found = 0
    for seed in range(180):
        rng = random.Random(seed)
        profile = with_disk(random_chain(seed, 6), rng)
        segments = random_segments(rng, profile)
        options = random_options(rng, profile, segments)
        evaluator = Evaluator(profile)
        codes = [stage.options.index(o) for stage, o in zip(profile.stages, options, strict=True)]
        budget = evaluator.peak(codes, segments) + rng.randint(0, 10)
        on_disk = {i for i in range(6) if rng.random() < 0.5}
        scheduled = evaluate(profile, options, budget, segments)
        assert not isinstance(scheduled, StepNeed)
        plain, tiered = scheduled.decisions(), scheduled.decisions(on_disk)
        assert [replace(c, tier="host") for c in tiered] == list(plain)  # points don't depend on tiers
        assert [c.tier == "disk" for c in tiered] == [bool(c.moves) and i in on_disk for i, c in enumerate(tiered)]
        here, there = (simulate(profile, choices, segments) for choices in (plain, tiered))
        assert there.peak_bytes == here.peak_bytes
        assert there.makespan_s >= here.makespan_s
        assert there.host_bytes + there.disk_bytes == here.host_bytes
        found += there.disk_bytes > 0
    assert found > 15


def test_evaluator_equals_referee() -> None:
    """Times of single plans, of many at once, and of the schedule, with tiers by the rule."""
    on_disk = 0
    for seed in range(180):
        rng = random.Random(seed)
        profile = with_disk(random_chain(seed, 4 + seed % 11), rng)
        host, disk = rng.choice((0, 20, 60)), rng.choice((30, 1000))
        evaluator, fast = Evaluator(profile, Room(host, disk)), Evaluator(profile, Room(host + disk))
        segments = random_segments(rng, profile)
        options = random_options(rng, profile, segments)
        codes = [stage.options.index(o) for stage, o in zip(profile.stages, options, strict=True)]
        least = evaluator.peak(codes, segments)
        assert least >= fast.peak(codes, segments)
        for budget in (least - 1, least, least + rng.randint(1, 40)):
            one = evaluator.step_s(codes, budget, segments)
            assert one == evaluator.makespans(np.array([codes], np.int8), budget, segments)[0]
            assert (one < math.inf) == (budget >= least)
            assert one >= fast.step_s(codes, budget, segments)
            found = evaluator.schedule(codes, budget, segments)
            # Without what moves for nothing a plan may keep the limits after all.
            assert found is not None or one == math.inf
            if found is not None:
                timeline = simulate(profile, found.choices, found.segments)
                assert timeline.makespan_s == pytest.approx(found.step_s, **SAME)
                assert (timeline.peak_bytes, timeline.host_bytes, timeline.disk_bytes) == (
                    found.peak_bytes,
                    found.host_bytes,
                    found.disk_bytes,
                )
                assert found.host_bytes <= host
                assert found.disk_bytes <= disk
                on_disk += found.disk_bytes > 0
    assert on_disk > 30


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_disk_makes_no_plan_slower(seed: int, n: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    profile = with_disk(random_chain(seed, n, most_options=4), rng)
    actions = data.draw(st.sampled_from([NO_RECOMPUTE, ACTIONS]))
    host, disk = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 60))
    limits = Limits(actions=actions, host_bytes=host, disk_bytes=disk)
    alone = replace(limits, disk_bytes=None)
    least = smallest_peak(profile, alone).peak_bytes
    assert smallest_peak(profile, limits).peak_bytes <= least
    budget = least + data.draw(st.integers(0, 30))
    plan = solve_profile(profile, budget, limits)
    sound(profile, plan, budget, host, disk)
    check_host_is_full(profile, plan, host)
    # Chains this short are solved exactly.
    assert plan.step_s <= solve_profile(profile, budget, alone).step_s * (1 + 1e-9)


def test_other_placements_are_valid_and_start_a_search() -> None:
    """As in plans of earlier versions; a search that begins with one returns nothing slower."""
    profile = tight_chain()
    limits = Limits(actions=NO_RECOMPUTE, host_bytes=20, disk_bytes=1000)
    budget = smallest_peak(profile, limits).peak_bytes
    plan = solve_profile(profile, budget, limits)
    moving = [i for i, choice in enumerate(plan.choices) if choice.moves]
    starts = 0
    for away in itertools.product((False, True), repeat=len(moving)):
        on_disk = set(itertools.compress(moving, away))
        choices = tuple(replace(c, tier="disk" if i in on_disk else "host") for i, c in enumerate(plan.choices))
        timeline = simulate(profile, choices)
        if timeline.host_bytes > 20:
            continue
        other = replace(
            plan,
            choices=choices,
            host_bytes=timeline.host_bytes,
            disk_bytes=timeline.disk_bytes,
            step_s=timeline.makespan_s,
            status="feasible",
        )
        sound(profile, Plan.from_json(other.to_json()), budget, 20, 1000)
        assert solve_profile(profile, budget, limits, start=(other, 0.0)).step_s <= other.step_s
        starts += 1
    assert starts > 3


def test_no_disk_where_the_host_has_room() -> None:
    profile = tight_chain()
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE)).peak_bytes
    free = solve_profile(profile, budget, Limits(actions=NO_RECOMPUTE))
    for host in (free.host_bytes, None):
        plan = solve_profile(profile, budget, Limits(actions=NO_RECOMPUTE, host_bytes=host, disk_bytes=1000))
        assert (plan.step_s, plan.disk_bytes) == (free.step_s, 0)
    less = solve_profile(profile, budget, Limits(actions=NO_RECOMPUTE, host_bytes=free.host_bytes - 1, disk_bytes=1000))
    assert less.disk_bytes > 0
    assert less.step_s > free.step_s


def test_a_disk_makes_smaller_peaks_possible() -> None:
    profile = tight_chain()
    limits = {"actions": NO_RECOMPUTE, "host_bytes": 10}
    alone = smallest_peak(profile, Limits(**limits)).peak_bytes
    both = smallest_peak(profile, Limits(disk_bytes=1000, **limits)).peak_bytes
    assert both < alone
    with pytest.raises(InfeasibleBudgetError):
        solve_profile(profile, alone - 1, Limits(**limits))
    assert solve_profile(profile, alone - 1, Limits(disk_bytes=1000, **limits)).disk_bytes > 0


def test_frontier_and_slowdown_with_a_disk() -> None:
    profile = tight_chain()
    limits = {"actions": NO_RECOMPUTE, "host_bytes": 10, "disk_bytes": 1000}
    plans = frontier_profile(profile, points=5, limits=Limits(time_limit_s=LONG_S, **limits))
    assert plans[0].peak_bytes == smallest_peak(profile, Limits(**limits)).peak_bytes
    assert plans[0].disk_bytes > 0
    for plan in plans:
        sound(profile, plan, plan.budget_bytes, 10, 1000)
    slow = plans[0].overhead
    leanest = smallest_within(profile, slow, Limits(time_limit_s=LONG_S, **limits))
    assert leanest.peak_bytes == plans[0].peak_bytes
    sound(profile, leanest, leanest.budget_bytes, 10, 1000)


@pytest.mark.usefixtures("short_search")
def test_longer_chains_are_sound() -> None:
    for seed in range(3):
        rng = random.Random(seed)
        profile = with_disk(random_chain(seed, 13), rng)
        limits = {"host_bytes": 60, "disk_bytes": 1000, "actions": NO_RECOMPUTE}
        least = smallest_peak(profile, Limits(time_limit_s=LONG_S, **limits)).peak_bytes
        plan = solve_profile(profile, least + 5, Limits(time_limit_s=LONG_S, **limits))
        sound(profile, plan, least + 5, 60, 1000)
        check_host_is_full(profile, plan, 60)
    # With times that are hardly known transfers of a stage are joined, in the tier that they were in.
    rough = solve_profile(replace(profile, step_error=0.3), least + 5, Limits(time_limit_s=LONG_S, **limits))
    sound(profile, rough, least + 5, 60, 1000)


# ---- Swaps that gain nothing (checklist 24)


def leaner_choices(profile: Profile, plan: Plan) -> list[tuple[str, str]]:
    """Stages that swap and could keep, or do the same and move less, as fast and within the budget; by the referee."""
    names = [choice.option for choice in plan.choices]
    on_disk = [i for i, choice in enumerate(plan.choices) if choice.tier == "disk"]
    inside = {i for s in plan.segments for i in range(s.first, s.last + 1)}
    found = []
    for i, (stage, choice) in enumerate(zip(profile.stages, plan.choices, strict=True)):
        now = stage.option(choice.option)
        if not now.moves:
            continue
        for other in stage.options:
            plain = other.name == "keep" and i not in inside
            same = (other.recomputes, other.ops) == (now.recomputes, now.ops) and set(other.moved) < set(now.moved)
            allowed = i not in inside or other.name in ("recompute", "recompute+swap")
            if not (plain or (same and allowed)):
                continue
            options = [s.option(other.name if k == i else names[k]) for k, s in enumerate(profile.stages)]
            scheduled = evaluate(profile, options, plan.budget_bytes, plan.segments)
            if isinstance(scheduled, StepNeed):
                continue
            timeline = simulate(profile, scheduled.decisions(on_disk), plan.segments)
            assert timeline.peak_bytes <= plan.budget_bytes
            if timeline.host_bytes <= plan.host_bytes and timeline.makespan_s <= plan.step_s * (1 + 1e-12):
                found.append((stage.name, other.name))
    return found


@pytest.mark.usefixtures("short_search")
def test_no_swap_gains_nothing() -> None:
    """Chains of all kinds, however little time there was: no swap can be a keep, or a smaller one, and as fast."""
    swaps = 0
    for seed in range(24):
        rng = random.Random(seed)
        cut = seed % 3 > 0  # what is found then is up to the machine
        profile = with_disk(random_chain(seed, 4 + seed % 9 if cut else 3 + seed % 4), rng)
        host, disk = (None, None) if seed % 2 else (20, 1000)
        least = smallest_peak(profile, Limits(host_bytes=host, disk_bytes=disk, time_limit_s=0.2 if cut else LONG_S))
        budget = least.peak_bytes + rng.randint(0, 40)
        limit_s = 0.02 if cut else LONG_S
        plan = solve_profile(profile, budget, Limits(host_bytes=host, disk_bytes=disk, time_limit_s=limit_s))
        sound(profile, plan, budget, host, disk)
        assert leaner_choices(profile, plan) == [], seed
        if not cut:
            swaps += sum(bool(choice.moves) for choice in plan.choices)
    assert swaps > 4


def test_a_swap_that_gains_nothing_is_dropped() -> None:
    """Given plans that swap for nothing, the last pass takes the swaps back, though the time is over."""
    profile = homogeneous_chain(8, link_ratio=2.0)
    names = [[option.name for option in stage.options] for stage in profile.stages]
    evaluator, kept = Evaluator(profile), everything_kept_bytes(profile)

    def left_over(codes: list[int], budget: int, segments: tuple[Segment, ...] = ()) -> Schedule:
        """What the last pass makes, for a larger budget, of a plan made for the least it can do with."""
        schedule = evaluator.schedule(codes, evaluator.peak(codes, segments), segments)
        assert schedule is not None
        assert schedule.host_bytes > 0
        incumbent = Incumbent(profile, budget, Limits(), evaluator, best=schedule, lazy=schedule)
        return planner._PlanSearch(incumbent, time.monotonic() - 1).result()

    swaps = left_over([row.index("swap") for row in names], kept)
    assert (swaps.host_bytes, {choice.action for choice in swaps.choices}) == (0, {"keep"})
    # In a segment a stage can't keep: it recomputes without moving its input, or the segment goes.
    segment = (Segment(1, 2),)
    together = [
        row.index("recompute" if i == 0 else "recompute+swap" if i < 3 else "keep") for i, row in enumerate(names)
    ]
    again = left_over(together, kept, segment)
    assert (again.host_bytes, again.choices[1].option, again.segments) in ((0, "recompute", segment), (0, "keep", ()))


@pytest.mark.usefixtures("short_search")
def test_the_last_stage_never_swaps() -> None:
    """Its bytes are needed at once: no schedule and no plan has it move any."""
    for seed in range(60):
        profile = random_chain(seed, 2 + seed % 6)
        codes = [next((c for c, o in enumerate(s.options) if o.moves), 0) for s in profile.stages]
        options = Evaluator(profile).options(codes)
        assert residency(profile, options).moves[-1] == ()
        roomy = evaluate(profile, options, 1 << 40)
        assert not isinstance(roomy, StepNeed)
        assert not any(choice.moves for choice in roomy.decisions())
        for budget in (Evaluator(profile).peak(codes), everything_kept_bytes(profile)):
            found = evaluate(profile, options, budget)
            if not isinstance(found, StepNeed):
                assert found.decisions()[-1].moves == ()
    for n in (6, 12):
        profile = homogeneous_chain(n, link_ratio=0.5)
        kept = everything_kept_bytes(profile)
        for part in (0.5, 0.7, 0.9):
            plan = solve_profile(profile, int(part * kept), Limits(actions=NO_RECOMPUTE, time_limit_s=LONG_S))
            assert plan.choices[-1].action == "keep"
            assert any(choice.moves for choice in plan.choices)
            assert leaner_choices(profile, plan) == []


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", ["conv_norm", "transformer"])
def test_no_swap_gains_nothing_in_real_models(name: str) -> None:
    measured = Profile.load(PROFILES / f"{name}.json")
    least = smallest_peak(measured, Limits(time_limit_s=LONG_S)).peak_bytes
    kept = everything_kept_bytes(measured)
    swaps = 0
    for actions, share in itertools.product((ACTIONS, NO_RECOMPUTE), (0.05, 0.4, 0.8)):
        floor = (
            least
            if actions is ACTIONS
            else smallest_peak(measured, Limits(actions=actions, time_limit_s=LONG_S)).peak_bytes
        )
        budget = floor + int(share * (kept - floor))
        plan = solve_profile(measured, budget, Limits(actions=actions, time_limit_s=LONG_S))
        assert leaner_choices(measured, plan) == []
        assert plan.choices[-1].moves == ()
        swaps += sum(bool(choice.moves) for choice in plan.choices)
    assert swaps > 0


# ---- The interface


def test_a_disk_no_faster_than_the_link() -> None:
    link = Link(10.0, 10.0, 0.1)
    for disk in (Link(11.0, 5.0, 0.1), Link(5.0, 11.0, 0.1), Link(5.0, 5.0, 0.0)):
        with pytest.raises(InvalidInputError, match="faster than"):
            replace(tight_chain(), link=link, disk=disk)
        assert replace(tight_chain(), link=link, disk=disk.behind(link)).disk == disk.behind(link)
    for one in ({"disk_out_bytes_per_s": 1.0}, {"disk_in_bytes_per_s": 1.0}):
        with pytest.raises(InvalidInputError, match="needs both"):
            Profile.from_chain([1.0], [1.0], [1], [1], input_bytes=0, **one)


def test_limits_that_cannot_be_used() -> None:
    profile = tight_chain()
    without = replace(profile, disk=None)
    for solve in (
        lambda: ckptplan.solve(without, 1.0, host_gb=1.0, disk_gb=1.0),
        lambda: ckptplan.frontier(without, host_gb=1.0, disk_gb=1.0),
        lambda: solve_profile(without, 1000, Limits(host_bytes=10, disk_bytes=10)),
        lambda: smallest_peak(without, Limits(host_bytes=10, disk_bytes=10)),
    ):
        with pytest.raises(InvalidInputError, match=r"no disk tier.*swap_dir=.*host_gb=.*disk=Link"):
            solve()
    with pytest.raises(InvalidInputError, match="without host_gb"):
        ckptplan.solve(profile, 1.0, disk_gb=1.0)
    with pytest.raises(InvalidInputError, match="disk_gb"):
        ckptplan.solve(profile, 1.0, host_gb=1.0, disk_gb=-1.0)
    with pytest.raises(InvalidInputError, match="disk_bytes=-1 must be"):
        solve_profile(profile, 1000, Limits(host_bytes=1, disk_bytes=-1))


def test_staging_buffers_count_against_the_host() -> None:
    assert staged(Limits(host_bytes=STAGING_BYTES + 70, disk_bytes=1)).host_bytes == 70
    with pytest.raises(InvalidInputError, match="raise host_gb"):
        staged(Limits(host_bytes=STAGING_BYTES - 1, disk_bytes=1))
    small = tight_chain()
    scaled = tuple(replace(s, nbytes=s.nbytes << 20) for s in small.storages)
    profile = replace(small, storages=scaled, fingerprint=replace(small.fingerprint, device="NVIDIA H100"))
    host_gb = (STAGING_BYTES + (10 << 20)) / GIB
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE)).peak_bytes / GIB
    plan = ckptplan.solve(profile, budget, actions=NO_RECOMPUTE, host_gb=host_gb, disk_gb=1.0)
    assert 0 < plan.host_bytes <= 10 << 20
    assert plan.disk_bytes > 0
    on_cpu = replace(profile, fingerprint=small.fingerprint)
    more = ckptplan.solve(on_cpu, budget, actions=NO_RECOMPUTE, host_gb=host_gb, disk_gb=1.0)
    assert more.disk_bytes == 0


def test_command_line_and_tables(tmp_path) -> None:  # type: ignore[no-untyped-def]
    small = tight_chain()
    profile = replace(small, storages=tuple(replace(s, nbytes=s.nbytes << 20) for s in small.storages))
    profile.save(tmp_path / "profile.json")
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE)).peak_bytes / GIB
    limits = ["--host-gb", str((10 << 20) / GIB), "--disk-gb", "1", "--actions", "keep,swap"]
    runner, plan_file = CliRunner(), tmp_path / "plan.json"
    done = runner.invoke(
        app, ["solve", str(tmp_path / "profile.json"), "--budget-gb", str(budget), *limits, "-o", str(plan_file)]
    )
    assert done.exit_code == 0, done.output
    plan = Plan.load(plan_file)
    assert plan.disk_bytes > 0
    assert plan.notes == (AT_THE_HOSTS_RATE,)
    assert AT_THE_HOSTS_RATE in done.output
    assert "to the disk" in done.output
    assert "swap to disk" in done.output
    assert format_swapped(plan.host_bytes, plan.disk_bytes).endswith("to disk")
    replayed = runner.invoke(app, ["simulate", str(tmp_path / "profile.json"), str(plan_file)])
    assert replayed.exit_code == 0, replayed.output
    assert format_swapped(plan.host_bytes, plan.disk_bytes) in replayed.output
    explained = runner.invoke(app, ["explain", str(tmp_path / "profile.json"), str(plan_file)])
    assert explained.exit_code == 0, explained.output
    assert "the disk's copies count at the rate of the host's link" in explained.output
    listed = runner.invoke(
        app, ["frontier", str(tmp_path / "profile.json"), "--points", "3", "--time-limit", "3", *limits]
    )
    assert listed.exit_code == 0, listed.output
    assert "to disk" in listed.output


def test_a_plan_names_its_space_and_tiers() -> None:
    profile = tight_chain()
    plan = solve_profile(profile, 1000, Limits(host_bytes=10, disk_bytes=1000))
    assert "to host or disk" in plan.space
    assert "to host or disk" not in solve_profile(profile, 1000, Limits(host_bytes=10)).space
    assert {f.name for f in dataclasses.fields(plan)} >= {"host_bytes", "disk_bytes"}
