"""Lower bounds against plans of longer chains, for how tight they are, and their prices."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import pytest
from exactly import LONG_S, NO_RECOMPUTE, ROUNDING
from random_chains import homogeneous_chain, random_chain, random_options, random_segments, textbook_chain

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import StepNeed, evaluate, residency, tightest_peak
from ckptplan.core.segment import Segment
from ckptplan.referee import simulate
from ckptplan.solving.bound.pricing import Bound, lower_bound
from ckptplan.solving.cost import menus
from ckptplan.solving.enumerate import PlanSpace

pytestmark = pytest.mark.planning


def peak_of(profile: Profile, name: str) -> int:
    """The smallest peak with option `name` wherever there is one."""
    options = [stage.find(name) or stage.keep for stage in profile.stages]
    return tightest_peak(profile, residency(profile, options)).bytes


def bound(profile: Profile, budget_bytes: int, **more: object) -> Bound:
    given: dict[str, object] = {"menu": menus(profile, ACTIONS), "segments": True, **more}
    space = PlanSpace(profile, given.pop("menu"), segments=given.pop("segments"))  # type: ignore[arg-type]
    return lower_bound(space, budget_bytes, **{"deadline": time.monotonic() + LONG_S, **given})  # type: ignore[arg-type]


def seconds_of(profile: Profile, budget_bytes: int, codes: Sequence[int], segments: Sequence[Segment]) -> float:
    """The makespan of these options and segments by the referee's clock; infinite where they don't fit."""
    options = [stage.options[code] for stage, code in zip(profile.stages, codes, strict=True)]
    found = evaluate(profile, options, budget_bytes, segments)
    if isinstance(found, StepNeed):
        return math.inf
    timeline = simulate(profile, found.decisions(), segments)
    assert timeline.peak_bytes <= budget_bytes
    return timeline.makespan_s


def test_never_above_any_plan_of_longer_chains() -> None:
    compared = 0
    for seed in range(18):  # two of each size, each against thirty plans
        profile, rng = random_chain(seed, 8 + seed % 9), random.Random(seed)
        least = min(peak_of(profile, name) for name in ("recompute", "recompute+swap", "swap"))
        most = peak_of(profile, "keep")
        budget = rng.randint(least, max(least, most))
        bound_s = bound(profile, budget).bound_s
        for _ in range(30):
            segments = random_segments(rng, profile)
            options = random_options(rng, profile, segments)
            codes = [stage.options.index(option) for stage, option in zip(profile.stages, options, strict=True)]
            step_s = seconds_of(profile, budget, codes, segments)
            compared += step_s < math.inf
            assert bound_s <= step_s * ROUNDING, (seed, budget)
    assert compared > 40


# Makespans of plans that were found for 40 equal stages; seconds, by the share of the link and the budget in per cent.
KNOWN = {0.3: {20: 1.373333, 60: 1.23}, 1e-6: {40: 1.42}}


@pytest.mark.parametrize("link_ratio", KNOWN)
def test_tight_on_equal_stages(link_ratio: float) -> None:
    profile = homogeneous_chain(40, link_ratio=link_ratio)
    least, most = peak_of(profile, "recompute"), peak_of(profile, "keep")
    for percent, step_s in KNOWN[link_ratio].items():
        found = bound(profile, least + (most - least) * percent // 100)
        # What remains is whole transfers, and the bytes of parts of a stage.
        assert step_s / 1.008 <= found.bound_s <= step_s * (1 + 1e-6), percent


def test_prices_are_the_slope_of_the_bound() -> None:
    """Between two vertices the linear program's optimum is a line, so the price is the difference quotient."""
    profile = homogeneous_chain(24, link_ratio=0.4)
    menu = menus(profile, NO_RECOMPUTE)
    budget = (3 * peak_of(profile, "swap") + peak_of(profile, "keep")) // 4
    prices = bound(profile, budget, menu=menu).prices
    assert prices is not None
    step = budget // 10_000
    less, more = (bound(profile, budget + d, menu=menu).bound_s for d in (-step, step))
    assert less > more
    assert prices.budget_s_per_byte == pytest.approx((less - more) / (2 * step), rel=0.01)
    total = sum(prices.forward_s_per_byte) + sum(prices.backward_s_per_byte)
    assert total == pytest.approx(prices.budget_s_per_byte)
    # Both links at once, per relative gain of their rates.
    more, less = (bound(homogeneous_chain(24, link_ratio=0.4 * f), budget, menu=menu).bound_s for f in (1.005, 0.995))
    assert prices.out_s + prices.in_s == pytest.approx((less - more) / 0.01, rel=0.05)


def test_equal_calls_give_equal_answers_and_one_without_time_the_baseline() -> None:
    profile = textbook_chain(random.Random(5), 20)
    budget = (peak_of(profile, "recompute") + peak_of(profile, "keep")) // 2
    answers = []
    for _ in range(2):
        bounds: list[float] = []
        answers.append((repr(bound(profile, budget, on_bound=bounds.append)), bounds))
    assert answers[0] == answers[1]
    late = bound(profile, budget, deadline=time.monotonic() - 1)
    assert (late.bound_s, late.prices, late.complete) == (profile.baseline_step_s, None, False)
