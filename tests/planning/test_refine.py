"""Correcting a profile by what was measured; the referee's replay of the true profile stands for the measurement."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from made_plans import scheduled
from random_chains import random_chain, random_options, random_segments

import ckptplan
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.link import Link
from ckptplan.core.measured import Copied, Measured, StageTimes, as_measured, backward_groups
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.stage import Stage
from ckptplan.planning.adviser import Adviser
from ckptplan.planning.job import Job
from ckptplan.referee import simulate
from ckptplan.report.refine import corrected, stage_times

pytestmark = pytest.mark.planning


def test_what_is_backward_groups() -> None:
    glue = [True, False, True, True, False, False, True]
    assert backward_groups(glue) == ((), (0, 1), (), (), (2, 3, 4), (5,), (6,))
    times = [StageTimes(1.0, 0.0, 10.0 * i) for i in range(7)]
    found = as_measured(glue, times)
    assert [t.backward_s for t in found] == [0.0, 10.0, 0.0, 0.0, 90.0, 50.0, 0.0]
    assert [t.forward_s for t in found] == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 61.0]


def as_if_measured(true: Profile, plan: Plan, **more: Any) -> Measured:
    timeline = simulate(true, plan)
    moved = sum(e.end_s - e.start_s for e in timeline.events if e.lane == "out")
    back = sum(e.end_s - e.start_s for e in timeline.events if e.lane == "in")
    return Measured(
        stages=stage_times(true, plan),
        step_s=timeline.makespan_s,
        steps=5,
        host=Copied(timeline.host_bytes, moved, timeline.host_bytes, back),
        **more,
    )


@pytest.mark.parametrize("seed", [*range(60), 124, 692, 719, 797])
def test_corrected_profile_predicts_what_was_measured(seed: int) -> None:
    rng = random.Random(seed)
    true = random_chain(seed, rng.randint(2, 8))
    true = dataclasses.replace(true, link=Link(true.link.out_bytes_per_s, true.link.in_bytes_per_s))
    segments = random_segments(rng, true)
    plan = scheduled(true, random_options(rng, true, segments), segments, share=rng.choice((0.0, 0.5)))
    by_kind = {stage.kind: (rng.uniform(0.2, 5), rng.uniform(0.2, 5)) for stage in true.stages}

    def wrong(stage: Stage) -> Stage:
        forward, backward = by_kind[stage.kind]
        options = tuple(dataclasses.replace(o, recompute_s=o.recompute_s * forward) for o in stage.options)
        return dataclasses.replace(
            stage, forward_s=stage.forward_s * forward, backward_s=stage.backward_s * backward, options=options
        )

    link = Link(true.link.out_bytes_per_s * rng.uniform(0.2, 5), true.link.in_bytes_per_s * rng.uniform(0.2, 5))
    false = dataclasses.replace(true, stages=tuple(map(wrong, true.stages)), link=link)
    measured = as_if_measured(true, plan)
    found = corrected(false, plan, measured)
    assert compute_s(found, plan) == pytest.approx(compute_s(true, plan), rel=1e-9)
    if measured.host.out_bytes:
        assert found.link.out_bytes_per_s == pytest.approx(true.link.out_bytes_per_s, rel=1e-9)
        assert found.link.in_bytes_per_s == pytest.approx(true.link.in_bytes_per_s, rel=1e-9)
    else:
        assert found.link == false.link


def compute_s(profile: Profile, plan: Plan) -> float:
    """Without waits."""
    events = simulate(profile, plan).events
    return sum(e.end_s - e.start_s for e in events if e.lane == "compute" and e.what != "wait")


def textbook(rate: float, **more: Any) -> Profile:
    n, mib = 8, 1 << 20
    return Profile.from_chain(
        [0.010] * n,
        [0.020] * n,
        [1 * mib] * n,
        [16 * mib] * n,
        input_bytes=mib,
        out_bytes_per_s=rate,
        in_bytes_per_s=rate,
    )


def test_a_link_said_to_be_fast_is_found_slow_and_recompute_is_chosen() -> None:
    """The whole of refine but the model: the false profile swaps, the corrected one recomputes."""
    true, false = textbook(2e8), textbook(2e10)
    budget = simulate(false, [ckptplan.Decision("keep")] * 8).peak_bytes // 2
    adviser = Adviser(Job(false, Limits(time_limit_s=30.0, workers=1)))  # ends by itself at a gap of 1 %
    plan = adviser.job.solved(budget)
    assert plan.host_bytes
    truth = simulate(true, plan)
    assert truth.makespan_s > 1.3 * plan.step_s
    after, told = adviser.refined(plan, as_if_measured(true, plan))
    assert told.step_s == pytest.approx(truth.makespan_s, rel=1e-6)
    assert told.choices == plan.choices
    assert after.step_s < 0.9 * told.step_s
    assert sum(c.action == "recompute" for c in after.choices) > sum(c.action == "recompute" for c in plan.choices)
    assert after.step_s == pytest.approx(simulate(true, after).makespan_s, rel=1e-6)
    assert after.peak_bytes <= budget
    # Kept: a second refinement goes on from the corrected profile, and finds nothing new.
    again, _ = adviser.refined(after, as_if_measured(true, after))
    assert again.step_s == pytest.approx(after.step_s, rel=1e-6)


def test_measured_bytes_lead_to_a_leaner_plan_or_to_none() -> None:
    chain = textbook(2e10)
    full = simulate(chain, [ckptplan.Decision("keep")] * 8).peak_bytes
    job = Job(chain, Limits(time_limit_s=2.0, workers=1))
    plan = job.solved(full // 2)
    over = 5 << 20
    after, told = Adviser(job).refined(plan, as_if_measured(chain, plan, peak_bytes=plan.peak_bytes + over))
    assert told.peak_bytes == plan.peak_bytes + over
    assert after.peak_bytes <= plan.budget_bytes
    assert simulate(chain, after).peak_bytes <= plan.budget_bytes - over
    # Fewer bytes than predicted aren't taken for granted.
    same, _ = Adviser(job).refined(plan, as_if_measured(chain, plan, peak_bytes=plan.peak_bytes - over))
    assert same.peak_bytes <= plan.budget_bytes
    assert simulate(chain, same).peak_bytes == same.peak_bytes
    with pytest.raises(InfeasibleBudgetError):
        Adviser(job).refined(plan, as_if_measured(chain, plan, peak_bytes=plan.peak_bytes + full))


def test_what_is_reserved_beside_the_tensors_stays_reserved() -> None:
    """On CUDA: the plan keeps its budget, the bound is one of that budget, and the fragments are those of before."""
    chain, fragments = textbook(2e10), 7 << 20
    full = simulate(chain, [ckptplan.Decision("keep")] * 8).peak_bytes
    plan = Job(chain, Limits(time_limit_s=2.0, workers=1)).solved(full // 2)
    plan = dataclasses.replace(
        plan, reserved_bytes=plan.peak_bytes + fragments, budget_bytes=plan.budget_bytes + fragments
    )
    for more in (0, 5 << 20):
        measured = as_if_measured(chain, plan, peak_bytes=plan.peak_bytes + more)
        after, told = Adviser(Job(chain, Limits(time_limit_s=2.0, workers=1))).refined(plan, measured)
        for found in (after, told):
            assert found.reserved_bytes == found.peak_bytes + fragments
            assert found.budget_bytes == plan.budget_bytes
            assert found.lower_bound_s == pytest.approx(found.baseline_step_s)
        assert after.counted_bytes <= plan.budget_bytes
