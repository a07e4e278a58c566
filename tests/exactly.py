"""The solver for tests that compare with the optimum, which goes on until no gap is left; a check of its plans."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from ckptplan import Plan, Profile
from ckptplan.core import request
from ckptplan.core.option import Action
from ckptplan.referee import simulate, validate
from ckptplan.solving import planner
from ckptplan.solving.frontier import everything_kept_bytes

LONG_S = 60.0
"""A time limit that no search of these tests meets, however busy the machine is."""
ROUNDING = 1 + 1e-9  # sums of the same seconds in another order
SAME = {"rel": 1e-9, "abs": 1e-9}
NOTHING_MOVES: tuple[Action, ...] = ("keep", "recompute")
NO_RECOMPUTE: tuple[Action, ...] = ("keep", "swap")

Limits = functools.partial(request.Limits, gap=0.0)


def solve_profile(profile: Profile, budget_bytes: int, limits: request.Limits = Limits(), **options: Any) -> Plan:  # noqa: B008
    """`ckptplan.solving.solve_profile` without a gap."""
    return planner.solve_profile(profile, budget_bytes, limits, **options)


def between(profile: Profile, percent: int, limits: request.Limits = request.Limits()) -> int:  # noqa: B008
    """A budget so far on the way from the smallest peak to everything kept."""
    least = planner.smallest_peak(profile, limits).peak_bytes
    return least + (everything_kept_bytes(profile) - least) * percent // 100


def check(
    profile: Profile, plan: Plan, budget_bytes: int, host_bytes: int | None = None, disk_bytes: int | None = None
) -> None:
    """Check that the referee finds a plan as it says it is, within the limits, and the host full before the disk."""
    assert validate(profile, plan, budget_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes) == ()
    timeline = simulate(profile, plan)
    found = timeline.host_bytes, timeline.disk_bytes, timeline.peak_bytes
    assert found == (plan.host_bytes, plan.disk_bytes, plan.peak_bytes)
    assert timeline.makespan_s == pytest.approx(plan.step_s, **SAME)
    assert plan.lower_bound_s <= plan.step_s
    assert plan.gap >= 0
    assert plan.step_s >= profile.fastest_step_s / ROUNDING
    for i, choice in enumerate(plan.choices):
        if choice.tier == "disk" and host_bytes is not None:
            back = [*plan.choices[:i], replace(choice, tier="host"), *plan.choices[i + 1 :]]
            assert simulate(profile, back, plan.segments).host_bytes > host_bytes
