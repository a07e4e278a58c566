"""Points of transfers that leave early and return late, for plans whose fragments exceed the budget."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from random_chains import homogeneous_chain, odd_chain, rich_chain

import ckptplan
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.request import Limits
from ckptplan.planning.job import Job
from ckptplan.planning.points import away_longest
from ckptplan.referee.simulate import simulate
from ckptplan.referee.validate import validate

pytestmark = pytest.mark.planning


def lingering(plan: ckptplan.Plan) -> int:
    """Steps that the plan's transfers have their storages on the device beyond the stage that saves them."""
    return sum(t.release - i + t.prefetch - i for i, choice in enumerate(plan.choices) for t in choice.transfers)


@pytest.mark.parametrize("seed", range(4))
def test_as_fast_and_as_small(seed: int) -> None:
    rng = random.Random(seed)
    chain = (odd_chain if seed % 2 else rich_chain)(rng, rng.randint(4, 8))
    low, high = Job(chain, Limits(time_limit_s=1.0)).range_bytes(1.0)
    for share in (0.0, 0.4):
        plan = ckptplan.solve(chain, (low + int((high - low) * share)) / 2**30, time_limit_s=1.0)
        found = away_longest(chain, plan)
        before, after = simulate(chain, plan), simulate(chain, found)
        assert not validate(chain, replace(found, peak_bytes=after.peak_bytes), plan.budget_bytes)
        assert after.makespan_s <= before.makespan_s * (1 + 1e-9)
        assert after.peak_bytes <= plan.budget_bytes
        assert lingering(found) <= lingering(plan)


def test_a_plan_that_fits_with_its_points_moved_needs_no_smaller_budget() -> None:
    """What lingers leaves fragments, as forward fills the budget with it."""
    chain = homogeneous_chain(8, link_ratio=1.0)
    tight = ckptplan.solve(chain, 1.0).peak_bytes // 2
    fastest = ckptplan.solve(chain, tight / 2**30)
    assert lingering(fastest) > lingering(away_longest(chain, fastest))

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes + lingering(plan))

    budget = tight + lingering(away_longest(chain, fastest))
    plan = Job(chain, Limits(time_limit_s=2.0), needs, on_cuda=True).solved(budget)
    assert plan.budget_bytes == budget
    assert plan.step_s <= fastest.step_s * (1 + 1e-9)
    assert plan.reserved_bytes is not None
    assert plan.reserved_bytes <= budget
    assert any(choice.transfers for choice in plan.choices)
