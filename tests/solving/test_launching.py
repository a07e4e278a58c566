"""A host that launches as a second sum: plans, proofs and bounds where it takes about as long as the device."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import brute_force
import pytest
from exactly import LONG_S, ROUNDING, between
from random_chains import homogeneous_chain, launched, rich_chain, textbook_chain, with_options, with_stages

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.stage import Stage
from ckptplan.referee import validate
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes, smallest_within
from ckptplan.solving.launching import mixed
from ckptplan.solving.planner import smallest_peak, solve_profile

pytestmark = pytest.mark.planning


def slow_host(profile: Profile, pace: float) -> Profile:
    """The host launches each forward, backward and recompute in `pace` times what it computes; a swap takes little."""

    def launching(stage: Stage) -> Stage:
        forward_s, backward_s = stage.forward_s, stage.backward_s
        slower = with_options(
            stage, lambda o: replace(o, launch_s=pace * forward_s * o.recomputes + 0.05 * forward_s * len(o.moves))
        )
        return replace(slower, forward_launch_s=pace * forward_s, backward_launch_s=pace * backward_s)

    return with_stages(profile, launching)


def drawn(seed: int, size: int) -> Profile:
    rng = random.Random(seed)
    return launched(rng, textbook_chain(rng, size) if seed % 2 else rich_chain(rng, size, most_options=4))


def test_the_linear_program_bounds_both_sums_together() -> None:
    """Either sum alone could be as short as 0.90 s, one by swapping and the other by recompute."""
    profile = slow_host(homogeneous_chain(16, link_ratio=0.3), 1.2)
    least, most = smallest_peak(profile, Limits(time_limit_s=2)).peak_bytes, everything_kept_bytes(profile)
    budget, menu = least + (most - least) // 10, menus(profile, ACTIONS)

    def bound_s(of: Profile) -> float:
        return lower_bound(PlanSpace(of, menu), budget, deadline=time.monotonic() + LONG_S).bound_s

    fast = replace(profile, link=replace(profile.link, out_bytes_per_s=1e15, in_bytes_per_s=1e15))
    launching_alone = with_stages(
        fast,
        lambda stage: replace(
            with_options(stage, lambda o: replace(o, recompute_s=0.0)), forward_s=0.0, backward_s=1e-9
        ),
    )
    together = bound_s(profile)
    assert together > 1.08 * max(bound_s(mixed(profile, 0.0)), bound_s(launching_alone))
    plan = solve_profile(profile, budget, Limits(gap=0.05, time_limit_s=LONG_S))
    assert validate(profile, plan, budget) == ()
    assert together <= plan.step_s * ROUNDING
    assert plan.gap <= 0.05


def test_copies_need_not_be_shorter_than_launching() -> None:
    """A search over transfers ends where the host takes longer, and keeps the lazy ones."""
    profile = slow_host(homogeneous_chain(8, link_ratio=1.0), 3.0)
    plan = solve_profile(profile, between(profile, 50))
    assert plan.step_s == plan.launch_s
    assert all(len(choice.transfers) <= 1 for choice in plan.choices)
    assert "the time in which the host launches it" in str(plan)


def test_the_smallest_peak_within_a_slowdown_counts_launching() -> None:
    for seed in range(2):
        profile = drawn(seed, 4)
        plan = smallest_within(profile, 0.1, Limits(time_limit_s=20))
        assert plan.step_s <= 1.1 * profile.baseline_step_s * ROUNDING
        assert plan.peak_bound_bytes is not None
        assert brute_force.fastest(profile, plan.peak_bound_bytes - 1, below_s=1.1 * profile.baseline_step_s) is None
