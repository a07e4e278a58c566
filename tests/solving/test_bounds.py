"""Lower bounds against brute force, against plans, and for how tight they are."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import pytest
from brute_force import combinations, fastest, smallest_peak
from random_chains import homogeneous_chain, random_chain, random_options, random_segments, textbook_chain

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import StepNeed, evaluate, residency, tightest_peak
from ckptplan.core.segment import Segment
from ckptplan.referee import simulate
from ckptplan.solving.bound.pricing import Bound, lower_bound
from ckptplan.solving.enumerate import PlanSpace

pytestmark = pytest.mark.planning

# Bounds and makespans are sums of the same seconds in another order.
ROUNDING = 1 + 1e-9


def menu_of(profile: Profile, actions: Sequence[str] = ACTIONS) -> list[tuple[int, ...]]:
    return [tuple(i for i, o in enumerate(stage.options) if o.allowed(actions)) for stage in profile.stages]


def bound(profile: Profile, budget_bytes: int, **more: object) -> Bound:
    given: dict[str, object] = {"menu": menu_of(profile), "segments": True, "deadline": time.monotonic() + 60, **more}
    space = PlanSpace(profile, given.pop("menu"), segments=given.pop("segments"))  # type: ignore[arg-type]
    return lower_bound(space, budget_bytes, **given)  # type: ignore[arg-type]


def peak_of(profile: Profile, name: str) -> int:
    """The smallest peak with option `name` wherever there is one."""
    options = [stage.find(name) or stage.keep for stage in profile.stages]
    return tightest_peak(profile, residency(profile, options)).bytes


def seconds_of(profile: Profile, budget_bytes: int, codes: Sequence[int], segments: Sequence[Segment]) -> float:
    """The makespan of these options and segments by the referee's clock; infinite where they don't fit."""
    options = [stage.options[code] for stage, code in zip(profile.stages, codes, strict=True)]
    found = evaluate(profile, options, budget_bytes, segments)
    if isinstance(found, StepNeed):
        return math.inf
    timeline = simulate(profile, found.decisions(), segments)
    assert timeline.peak_bytes <= budget_bytes
    return timeline.makespan_s


@pytest.mark.parametrize("part", range(6))
def test_never_above_the_optimum_of_small_chains(part: int) -> None:
    closed = 0
    for seed in range(part, 90, 6):
        rng, size = random.Random(seed), 1 + seed % 5
        profile = random_chain(seed, size, most_options=5 if size < 5 else 4)
        actions = rng.choice([ACTIONS, ACTIONS, ("keep", "recompute"), ("keep", "swap")])
        segments = rng.random() < 0.7
        host = rng.choice((None, None, rng.randint(0, 60)))
        space = combinations(profile, actions=actions, segments=segments)
        least = smallest_peak(profile, host_bytes=host, within=space)
        most = max(least, smallest_peak(profile, actions=("keep",)))
        for budget in {least, (least + most) // 2, rng.randint(least, most)}:
            best = fastest(profile, budget, host_bytes=host, within=space)
            assert best is not None
            found = bound(profile, budget, menu=menu_of(profile, actions), host_bytes=host, segments=segments)
            assert found.complete
            assert profile.baseline_step_s <= found.bound_s <= best * ROUNDING, (seed, budget)
            closed += found.bound_s >= best * (1 - 1e-6)
    assert closed > 5  # of about 40; the rest is what whole transfers of few stages cost


def test_never_above_any_plan_of_longer_chains() -> None:
    compared = 0
    for seed in range(36):  # four of each size, each against sixty plans
        profile, rng = random_chain(seed, 8 + seed % 9), random.Random(seed)
        least = min(peak_of(profile, name) for name in ("recompute", "recompute+swap", "swap"))
        most = peak_of(profile, "keep")
        budget = rng.randint(least, max(least, most))
        bound_s = bound(profile, budget).bound_s
        for _ in range(60):
            segments = random_segments(rng, profile)
            options = random_options(rng, profile, segments)
            codes = [stage.options.index(option) for stage, option in zip(profile.stages, options, strict=True)]
            step_s = seconds_of(profile, budget, codes, segments)
            compared += step_s < math.inf
            assert bound_s <= step_s * ROUNDING, (seed, budget)
    assert compared > 180


def test_a_smaller_space_has_no_smaller_bound() -> None:
    for seed in range(30):
        profile = random_chain(seed, 10)
        least, most = peak_of(profile, "recompute"), peak_of(profile, "keep")
        if least >= most:
            continue
        budget = (least + most) // 2
        whole = bound(profile, budget).bound_s
        for smaller in ({"segments": False}, {"host_bytes": 0}, {"menu": menu_of(profile, ("keep", "recompute"))}):
            assert bound(profile, budget, **smaller).bound_s >= whole * (1 - 1e-4), (seed, smaller)


def test_an_update_that_does_not_fit_is_no_plan() -> None:
    profile = next(p for p in (random_chain(seed, 3) for seed in range(100)) if p.update_peak_bytes > 0)
    assert bound(profile, profile.update_peak_bytes - 1).bound_s == math.inf


# Makespans of plans that were found for 40 equal stages; seconds, by the share of the link and the budget in per cent.
KNOWN = {
    0.3: {20: 1.373333, 40: 1.3, 60: 1.23, 80: 1.2},
    1e-6: {20: 1.49, 40: 1.42, 60: 1.35, 80: 1.28},
}


@pytest.mark.parametrize("link_ratio", KNOWN)
def test_tight_on_equal_stages(link_ratio: float) -> None:
    profile = homogeneous_chain(40, link_ratio=link_ratio)
    least, most = peak_of(profile, "recompute"), peak_of(profile, "keep")
    for percent, step_s in KNOWN[link_ratio].items():
        found = bound(profile, least + (most - least) * percent // 100)
        # What remains is whole transfers, and the bytes of parts of a stage.
        assert step_s / 1.008 <= found.bound_s <= step_s * (1 + 1e-6), percent


def test_segments_lower_the_bound_of_a_chain_without_a_link() -> None:
    profile = homogeneous_chain(30, link_ratio=1e-6)
    menu = menu_of(profile, ("keep", "recompute"))
    budget = peak_of(profile, "recompute")
    alone = bound(profile, budget, menu=menu, segments=False).bound_s
    assert bound(profile, budget, menu=menu).bound_s < alone * 0.999


def test_prices_are_the_slope_of_the_bound() -> None:
    """Between two vertices the linear program's optimum is a line, so the price is the difference quotient."""
    for ratio in (0.2, 0.4):
        profile = homogeneous_chain(24, link_ratio=ratio)
        menu = menu_of(profile, ("keep", "swap"))
        budget = (3 * peak_of(profile, "swap") + peak_of(profile, "keep")) // 4
        found = bound(profile, budget, menu=menu)
        assert found.prices is not None
        step = budget // 10_000
        less, more = (bound(profile, budget + d, menu=menu).bound_s for d in (-step, step))
        quotient = (less - more) / (2 * step)
        assert quotient > 0
        assert found.prices.budget_s_per_byte == pytest.approx(quotient, rel=0.01)
        total = sum(found.prices.forward_s_per_byte) + sum(found.prices.backward_s_per_byte)
        assert total == pytest.approx(found.prices.budget_s_per_byte)


def test_the_price_of_bandwidth_is_the_slope_of_the_bound() -> None:
    base = homogeneous_chain(24, link_ratio=0.4)
    menu = menu_of(base, ("keep", "swap"))
    budget = (3 * peak_of(base, "swap") + peak_of(base, "keep")) // 4
    found = bound(base, budget, menu=menu)
    assert found.prices is not None
    more, less = (bound(homogeneous_chain(24, link_ratio=0.4 * f), budget, menu=menu).bound_s for f in (1.005, 0.995))
    # Both links at once, per relative gain of their rates.
    assert found.prices.out_s + found.prices.in_s == pytest.approx((less - more) / 0.01, rel=0.05)


def test_equal_calls_give_equal_answers() -> None:
    profile = textbook_chain(random.Random(5), 20)
    budget = (peak_of(profile, "recompute") + peak_of(profile, "keep")) // 2
    answers = []
    for _ in range(2):
        bounds: list[float] = []
        answers.append((repr(bound(profile, budget, on_bound=bounds.append)), bounds))
    assert answers[0] == answers[1]


def test_a_deadline_that_has_passed_leaves_the_baseline() -> None:
    profile = homogeneous_chain(10, link_ratio=0.5)
    found = bound(profile, peak_of(profile, "recompute"), deadline=time.monotonic() - 1)
    assert (found.bound_s, found.prices, found.complete) == (profile.baseline_step_s, None, False)
