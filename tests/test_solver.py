"""The solver against brute force, the referee and its own bounds."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_chains import homogeneous_chain, random_chain, rich_chain, textbook_chain

from ckptplan.core.chain import ACTIONS, Action
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import Overflow, residency, schedule
from ckptplan.referee import simulate, validate
from ckptplan.solving import planner, smallest_peak, solve_profile
from ckptplan.solving.chain_dp import nothing_moves
from ckptplan.solving.evaluate import Evaluator, menus
from ckptplan.solving.fluid_model import FluidModel, PeakModel

Vector = tuple[Action, ...]
# Times are sums of the same seconds in another order.
SAME = {"rel": 1e-9, "abs": 1e-9}


def all_vectors(profile: Profile, actions: tuple[Action, ...] = ACTIONS) -> list[Vector]:
    return list(itertools.product(*[[a for a in stage.actions if a in actions] for stage in profile.stages]))


def peak_of(profile: Profile, vector: Vector) -> int:
    r = residency(profile, vector)
    return max(*r.forward_bytes, *r.backward_bytes, profile.update_peak_bytes)


def enforceable(profile: Profile) -> tuple[list[int], list[int]]:
    """Release and prefetch points that a runtime can meet: a module ends or begins there."""
    modules = [i for i, stage in enumerate(profile.stages) if not stage.name.startswith("(")]
    if not modules:
        return list(range(len(profile.stages))), list(range(len(profile.stages)))
    return list(range(modules[-1] + 1)), modules


def lazy_decisions(profile: Profile, vector: Vector, budget_bytes: int) -> tuple[Decision, ...] | None:
    """Everything that moves leaves as late and returns as early as fits; what never needs to be away doesn't move."""
    if peak_of(profile, vector) > budget_bytes:
        return None
    r, n = residency(profile, vector), len(vector)
    last = []
    for needs in (r.forward_bytes, r.backward_bytes):
        points, here = [n - 1] * n, []
        for k in range(n):
            while needs[k] + sum(r.moved_bytes[i] for i in here) > budget_bytes:
                points[here.pop(0)] = k - 1
            here += [k] if r.moves[k] else []
        last.append(points)
    away = [bool(r.moves[i]) and (last[0][i] < n - 1 or last[1][i] < n - 1) for i in range(n)]
    releases, prefetches = enforceable(profile)
    return tuple(
        Decision(
            "swap",
            r.moves[i],
            max(x for x in releases if x <= last[0][i]),
            max(x for x in prefetches if x <= last[1][i]),
        )
        if away[i]
        else Decision(vector[i])
        for i in range(n)
    )


def brute_force(
    profile: Profile, budget_bytes: int, actions: tuple[Action, ...] = ACTIONS, host_bytes: int | None = None
) -> float:
    """Smallest makespan over all vectors, by the referee's clock; infinite where nothing fits."""

    def compute_s(vector: Vector) -> float:
        return profile.baseline_step_s + sum(
            stage.recompute_s for stage, a in zip(profile.stages, vector, strict=True) if a == "recompute"
        )

    best = math.inf
    for vector in sorted(all_vectors(profile, actions), key=compute_s):
        if compute_s(vector) >= best:
            break
        choices = lazy_decisions(profile, vector, budget_bytes)
        if choices is None:
            continue
        timeline = simulate(profile, choices)
        assert timeline.peak_bytes <= budget_bytes
        if host_bytes is None or timeline.host_bytes <= host_bytes:
            best = min(best, timeline.makespan_s)
    return best


def budgets(profile: Profile, rng: random.Random, actions: tuple[Action, ...] = ACTIONS) -> list[int]:
    """The smallest feasible budget, and one between it and what keeping everything needs."""
    least = min(peak_of(profile, v) for v in all_vectors(profile, actions))
    most = peak_of(profile, ("keep",) * len(profile.stages))
    return [least, rng.randint(least, most)]


def check(profile: Profile, plan: Plan, budget_bytes: int, host_bytes: int | None = None) -> None:
    assert validate(profile, plan, budget_bytes, host_bytes=host_bytes) == ()
    assert simulate(profile, plan).host_bytes == plan.host_bytes
    assert plan.lower_bound_s <= plan.step_s
    assert plan.gap >= 0
    assert plan.overhead >= 0


SIZES = [1, 2, 3, 4, 5] * 32 + [6] * 20 + [7] * 10 + [8] * 30


@pytest.mark.parametrize("part", range(10))
def test_equals_brute_force(part: int) -> None:
    for seed in range(part, len(SIZES), 10):
        profile, rng = random_chain(seed, SIZES[seed]), random.Random(seed)
        for budget in budgets(profile, rng):
            plan = solve_profile(profile, budget)
            check(profile, plan, budget)
            assert plan.status == "optimal"
            assert plan.step_s == pytest.approx(brute_force(profile, budget), **SAME), (seed, budget)


def test_never_slower_than_the_shared_schedule_of_any_vector() -> None:
    for seed in range(60):
        profile, rng = random_chain(seed, 1 + seed % 5), random.Random(seed)
        for budget in budgets(profile, rng):
            step_s = solve_profile(profile, budget).step_s
            for vector in all_vectors(profile):
                choices = schedule(profile, vector, budget)
                if not isinstance(choices, Overflow):
                    assert step_s <= simulate(profile, choices).makespan_s * (1 + 1e-9), (seed, budget, vector)


def every_schedule(profile: Profile, budget_bytes: int) -> float:
    """Smallest makespan over all vectors and all release and prefetch points, with no idea which are good."""
    n, best = len(profile.stages), math.inf
    for vector in all_vectors(profile):
        moves = residency(profile, vector).moves
        movers = [i for i in range(n) if moves[i]]
        for moving in range(len(movers) + 1):
            # The first `moving` of them move: the others' bytes never need to be away.
            spans = [[x for x in points if x >= i] for points in enforceable(profile) for i in movers[:moving]]
            for points in itertools.product(*spans):
                choices = [Decision(a) for a in vector]
                for at, i in enumerate(movers[:moving]):
                    choices[i] = Decision("swap", moves[i], points[at], points[moving + at])
                timeline = simulate(profile, tuple(choices))
                if timeline.peak_bytes <= budget_bytes:
                    best = min(best, timeline.makespan_s)
    return best


@pytest.mark.parametrize(("size", "seeds"), [(2, range(30)), (3, range(100, 125)), (4, range(200, 204))])
def test_no_other_points_are_faster(size: int, seeds: range) -> None:
    for seed in seeds:
        profile, rng = random_chain(seed, size), random.Random(seed)
        for budget in budgets(profile, rng)[: 1 if size == 4 else 2]:
            found = solve_profile(profile, budget).step_s
            assert found == pytest.approx(every_schedule(profile, budget), **SAME), (seed, budget)


def test_smallest_peak_and_the_error_below_it() -> None:
    for seed in range(120):
        profile = random_chain(seed, 1 + seed % 6)
        for actions in (ACTIONS, ("keep", "recompute"), ("keep", "swap"), ("keep",)):
            least = min(peak_of(profile, v) for v in all_vectors(profile, actions))
            found = smallest_peak(profile, actions=actions)
            assert (found.peak_bytes, found.bound_bytes, found.proven) == (least, least, True)
            assert peak_of(profile, found.actions) == least
            plan = solve_profile(profile, least, actions=actions)
            check(profile, plan, least)
            assert {choice.action for choice in plan.choices} <= set(actions)
            if least == 0:
                continue
            with pytest.raises(InfeasibleBudgetError, match="smallest feasible peak") as caught:
                solve_profile(profile, least - 1, actions=actions)
            error = caught.value
            assert (error.budget_bytes, error.min_peak_bytes) == (least - 1, least)
            timeline = simulate(profile, tuple(Decision(a) for a in found.actions)) if actions == ("keep",) else None
            if timeline is not None:
                assert error.phase in {step.phase for step in timeline.steps if step.peak_bytes == least}
            missing = [a for a in ("swap", "recompute") if a not in actions]
            assert all(repr(a) in str(error) for a in missing) or error.phase == "update"


def test_peak_model_is_exact_in_bytes() -> None:
    for seed in range(24):
        profile = random_chain(seed, 3 + seed % 4)
        profile = replace(profile, base_forward_bytes=tuple(b + (1 << 41) + seed for b in profile.base_forward_bytes))
        for host in (None, 25):
            evaluator = Evaluator(profile, host)
            menu = menus(profile, ACTIONS)
            rows = np.array(list(itertools.product(*menu)), np.int8)
            result = PeakModel(profile, menu, host).solve(deadline=time.monotonic() + 20)
            assert result.proven
            assert result.codes is not None
            assert (
                evaluator.smallest_peaks(np.array([result.codes], np.int8))[0] == evaluator.smallest_peaks(rows).min()
            )


def test_host_limit() -> None:
    for seed in range(60):
        profile, rng = random_chain(seed, 1 + seed % 5), random.Random(seed)
        for host in (0, rng.randint(1, 60)):
            least = smallest_peak(profile, host_bytes=host)
            for budget in (least.peak_bytes, least.peak_bytes + rng.randint(1, 20)):
                plan = solve_profile(profile, budget, host_bytes=host)
                check(profile, plan, budget, host)
                assert plan.step_s == pytest.approx(brute_force(profile, budget, host_bytes=host), **SAME), (seed, host)
            assert least.peak_bytes == 0 or brute_force(profile, least.peak_bytes - 1, host_bytes=host) == math.inf


def test_dp_equals_brute_force_over_keep_and_recompute() -> None:
    actions: tuple[Action, ...] = ("keep", "recompute")
    for seed in range(150):
        profile, rng = random_chain(seed, 1 + seed % 8), random.Random(seed)
        menu = menus(profile, actions)
        for budget in budgets(profile, rng, actions):
            result = nothing_moves(profile, menu, budget, deadline=time.monotonic() + 20)
            assert result.exact
            assert result.codes is not None
            assert result.step_s == pytest.approx(brute_force(profile, budget, actions), **SAME), (seed, budget)
            assert peak_of(profile, tuple(ACTIONS[code] for code in result.codes)) <= budget
        assert nothing_moves(profile, menu, budgets(profile, rng, actions)[0] - 1, deadline=math.inf).codes is None


def test_fluid_bound_is_below_the_optimum() -> None:
    for seed in range(24):
        profile, rng = random_chain(seed, 3 + seed % 4), random.Random(seed)
        # Sizes that don't divide by the unit, and a unit of many bytes: rounding must only relax.
        scale = 1 if seed % 2 else 12_345_677
        grown = scaled(profile, scale)
        for budget in budgets(grown, rng):
            best = brute_force(grown, budget)
            for whole in (False, True):
                model = FluidModel(grown, menus(grown, ACTIONS), budget, whole_transfers=whole)
                result = model.solve(lambda *_: False, deadline=time.monotonic() + 1)
                assert result.bound <= best * (1 + 1e-12), (seed, budget, whole)
                # With latency, or units of many bytes, the bound is below the optimum, if not by much.
                if whole and scale == 1 and not grown.link.latency_s and result.proven:
                    assert result.bound >= best * 0.999 - 2 * len(grown.stages) / min_rate(grown), (seed, budget)


def min_rate(profile: Profile) -> float:
    """Bytes per second of the slower direction: a stall may carry one byte for free."""
    return min(profile.link.out_bytes_per_s, profile.link.in_bytes_per_s)


def scaled(profile: Profile, scale: int) -> Profile:
    """The same profile with every size, and the link, `scale` times as large."""

    def transient(t):  # type: ignore[no-untyped-def]
        return t and replace(t, forward_bytes=t.forward_bytes * scale, backward_bytes=t.backward_bytes * scale)

    return replace(
        profile,
        storages=tuple(replace(s, nbytes=s.nbytes * scale) for s in profile.storages),
        stages=tuple(
            replace(s, keep=transient(s.keep), swap=transient(s.swap), recompute=transient(s.recompute))
            for s in profile.stages
        ),
        base_forward_bytes=tuple(b * scale for b in profile.base_forward_bytes),
        base_backward_bytes=tuple(b * scale for b in profile.base_backward_bytes),
        update_peak_bytes=profile.update_peak_bytes * scale,
        link=replace(
            profile.link,
            out_bytes_per_s=profile.link.out_bytes_per_s * scale,
            in_bytes_per_s=profile.link.in_bytes_per_s * scale,
        ),
    )


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_makespan_never_rises_with_the_budget(seed: int, n: int, data: st.DataObject) -> None:
    profile = random_chain(seed, n)
    least = smallest_peak(profile).peak_bytes
    most = max(least, peak_of(profile, ("keep",) * n))
    steps = sorted(data.draw(st.lists(st.integers(least, most), min_size=2, max_size=5)))
    found = [solve_profile(profile, budget).step_s for budget in steps]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("make", [textbook_chain, rich_chain])
@pytest.mark.parametrize("actions", [ACTIONS, ("keep", "recompute")])
def test_longer_chains_are_sound_and_in_time(make, actions) -> None:  # type: ignore[no-untyped-def]
    for seed in range(2):
        profile, rng = make(random.Random(seed), 18), random.Random(seed)
        least = smallest_peak(profile, actions=actions).peak_bytes
        budget = rng.randint(least, max(least, peak_of(profile, ("keep",) * 18)))
        begin = time.monotonic()
        plan = solve_profile(profile, budget, actions=actions, time_limit_s=1.5)
        # 1.5 s more: building models and loading OR-Tools on a busy machine.
        assert time.monotonic() - begin < 3
        check(profile, plan, budget)
        assert actions == ACTIONS or plan.status == "optimal"


def test_homogeneous_blocks_come_within_a_percent() -> None:
    profile = homogeneous_chain(24, link_ratio=0.8)
    least = smallest_peak(profile).peak_bytes
    budget = least + (peak_of(profile, ("keep",) * 24) - least) // 5
    plan = solve_profile(profile, budget, time_limit_s=3)
    check(profile, plan, budget)
    assert plan.gap <= 0.01


def test_everything_kept_when_it_fits() -> None:
    profile = homogeneous_chain(30, link_ratio=1.0)
    plan = solve_profile(profile, peak_of(profile, ("keep",) * 30))
    assert (plan.status, plan.gap, plan.overhead, plan.host_bytes) == ("optimal", 0.0, 0.0, 0)
    assert {choice.action for choice in plan.choices} == {"keep"}


def test_swaps_that_move_nothing_do_not_appear_without_need() -> None:
    for seed in range(0, 90, 3):
        profile, rng = random_chain(seed, 5), random.Random(seed)
        plan = solve_profile(profile, budgets(profile, rng)[1])
        for i, choice in enumerate(plan.choices):
            if choice.action != "keep":
                vector = [c.action for c in plan.choices]
                vector[i] = "keep"
                choices = lazy_decisions(profile, tuple(vector), plan.budget_bytes)
                assert choices is None or simulate(profile, choices).makespan_s > plan.step_s * (1 + 1e-12)


def test_same_seed_same_plan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for n, seed in ((6, 3), (9, 1), (14, 0)):
        profile = textbook_chain(random.Random(seed), n)
        actions: tuple[Action, ...] = ACTIONS if n < 10 else ("keep", "recompute")
        budget = smallest_peak(profile, actions=actions).peak_bytes + 10
        first, second = (solve_profile(profile, budget, actions=actions, seed=7, workers=1) for _ in range(2))
        assert first == second
        first.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == first


def test_small_chains_are_quick() -> None:
    chains = [random_chain(seed, 8) for seed in range(10)]
    least = [smallest_peak(profile).peak_bytes for profile in chains]
    begin = time.perf_counter()
    for profile, budget in zip(chains, least, strict=True):
        solve_profile(profile, budget + 5)
    # Measured 10-30 ms each; the limit leaves room for a busy machine.
    assert (time.perf_counter() - begin) / 10 < 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"actions": ("swap",)}, "'keep' is missing"),
        ({"actions": ("keep", "offload")}, "unknown action 'offload'"),
        ({"time_limit_s": 0}, "time_limit_s=0 must be"),
        ({"time_limit_s": math.nan}, "time_limit_s=nan must be"),
        ({"time_limit_s": math.inf}, "time_limit_s=inf must be"),
        ({"host_bytes": -1}, "host_bytes=-1 must be"),
        ({"host_bytes": 1.5}, "host_bytes=1.5 must be"),
        ({"budget_bytes": -1}, "budget_bytes=-1 must be"),
        ({"budget_bytes": 1.5}, "budget_bytes=1.5 must be"),
        ({"workers": 0}, "workers=0 must be"),
    ],
)
def test_bad_input(arguments, message) -> None:  # type: ignore[no-untyped-def]
    profile = random_chain(0, 2)
    with pytest.raises(InvalidInputError, match=message):
        solve_profile(profile, **{"budget_bytes": 1000, **arguments})


def test_the_update_can_bind() -> None:
    profile = replace(random_chain(0, 3), update_peak_bytes=10_000)
    with pytest.raises(InfeasibleBudgetError, match="optimizer update") as caught:
        solve_profile(profile, 9_999, actions=("keep",))
    assert (caught.value.phase, caught.value.min_peak_bytes) == ("update", 10_000)
    assert "allow" not in str(caught.value)
    assert solve_profile(profile, 10_000).status == "optimal"


def test_progress_is_reported() -> None:
    seen: list[tuple[str, float, float]] = []
    profile = textbook_chain(random.Random(5), 16)
    plan = solve_profile(
        profile, smallest_peak(profile).peak_bytes, time_limit_s=1, on_progress=lambda *report: seen.append(report)
    )
    assert seen[-1] == ("done", plan.step_s, plan.lower_bound_s)
    assert all(bound <= best * (1 + 1e-9) for _, best, bound in seen)


def test_the_way_for_long_chains_is_sound_on_short_ones(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(planner, "ENUMERATE", 0)
    monkeypatch.setattr(planner, "ENUMERATE_WITH_TIME", 0)
    proven = 0
    for seed in range(20):
        profile, rng = random_chain(seed, 3 + seed % 4), random.Random(seed)
        host = None if seed % 4 else 30
        least = smallest_peak(profile, host_bytes=host)
        assert least.proven
        assert brute_force(profile, least.peak_bytes, host_bytes=host) < math.inf
        assert least.peak_bytes == 0 or brute_force(profile, least.peak_bytes - 1, host_bytes=host) == math.inf
        for budget in (least.peak_bytes, least.peak_bytes + rng.randint(1, 20)):
            plan = solve_profile(profile, budget, host_bytes=host, time_limit_s=0.4)
            check(profile, plan, budget, host)
            best = brute_force(profile, budget, host_bytes=host)
            assert plan.lower_bound_s <= best * (1 + 1e-9), (seed, budget)
            assert plan.step_s >= best * (1 - 1e-9), (seed, budget)
            proven += plan.status == "optimal"
    # Latency and units of bytes leave a gap now and then; most are proven.
    assert proven >= 20
