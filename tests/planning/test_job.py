"""Jobs: plans tightened until what their replay needs fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from random_chains import homogeneous_chain

import ckptplan
from ckptplan import api
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.request import Limits
from ckptplan.core.resident import PARTS, Resident
from ckptplan.planning import job as jobs

pytestmark = pytest.mark.planning


def test_no_plan_is_returned_whose_replay_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = homogeneous_chain(3, link_ratio=1.0)
    plan = ckptplan.solve(chain, 1.0)
    budget = plan.budget_bytes
    monkeypatch.setattr(jobs, "solve_profile", lambda *args, **kwargs: plan)  # as if it fitted any limit
    replayed: list[ckptplan.Plan] = []

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        replayed.append(plan)
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, budget + (len(replayed) < enough))

    job = jobs.Job(chain, Limits(actions=("keep",), segments=False, time_limit_s=1.0), needs)
    enough = 7
    assert job.solved(budget) == job.sound(plan)
    assert len(replayed) == enough
    replayed.clear()
    enough = 8
    with pytest.raises(ckptplan.CkptPlanError, match="please report"):
        job.solved(budget)


def test_a_second_attempt_hands_out_its_own_plans() -> None:
    chain = homogeneous_chain(6, link_ratio=1.0)
    budget = ckptplan.solve(chain, 1.0).peak_bytes
    seen: list[ckptplan.Plan] = []

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes + budget // 8)

    plan = jobs.Job(chain, Limits(actions=("keep", "recompute"), on_plan=seen.append, time_limit_s=2.0), needs).solved(
        budget
    )
    first, last = ([found for found in seen if found.budget_bytes == n] for n in (budget, plan.budget_bytes))
    assert seen == first + last
    assert plan.step_s == last[-1].step_s > first[-1].step_s  # the first attempt's were too large in the replay
    for times in ([found.step_s for found in plans] for plans in (first, last)):
        assert times == sorted(set(times), reverse=True)


@pytest.mark.long
def test_plans_that_leave_fewer_fragments_are_tried_where_fragments_exceed_the_budget() -> None:
    """As a caching allocator does: swaps leave fragments of their bytes, and decisions inside stages others."""
    chain = homogeneous_chain(6, link_ratio=4.0)
    least = jobs.smallest_peak(chain, Limits()).peak_bytes
    whole = ckptplan.solve(chain, least * 1.5 / 2**30, actions=("keep", "recompute"))

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        fragments = plan.host_bytes
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes + fragments)

    budget = whole.peak_bytes
    seen: list[ckptplan.Plan] = []
    job = jobs.Job(chain, Limits(time_limit_s=1.0, on_plan=seen.append), needs, on_cuda=True)
    plan = job.solved(budget)
    assert plan.host_bytes == 0
    assert plan.reserved_bytes is not None
    assert plan.reserved_bytes <= budget
    assert plan.step_s <= whole.step_s * (1 + 1e-9)
    assert seen[-1] == plan
    assert any(found.host_bytes for found in seen)
    # The budget is the one that was asked for, the bound holds for every plan within it.
    assert plan.budget_bytes == budget
    assert plan.counted_bytes <= plan.budget_bytes
    assert plan.tensor_budget_bytes == budget - (plan.reserved_bytes - plan.peak_bytes)
    assert plan.lower_bound_s <= ckptplan.solve(chain, budget / 2**30).step_s <= plan.step_s


def test_what_smaller_fragments_leave_unused_is_used() -> None:
    """The first plan's fragments say by how much to go down, and those of the next are smaller."""
    chain = homogeneous_chain(12, link_ratio=4.0)
    budget = ckptplan.solve(chain, 1.0).peak_bytes
    replayed: list[ckptplan.Plan] = []

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        replayed.append(plan)
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes + plan.peak_bytes**2 // (2 * budget))

    limits = Limits(actions=("keep", "recompute"), segments=False, time_limit_s=2.0)
    plan = jobs.Job(chain, limits, needs, on_cuda=True).solved(budget)
    fitting = [found for found in list(replayed) if needs(found).reserved_bytes <= budget]
    assert plan.reserved_bytes is not None
    assert 0.9 * budget <= plan.reserved_bytes <= budget
    assert plan.step_s < fitting[0].step_s


def beside(more: int) -> Callable[[ckptplan.Plan], DeviceBytes]:
    """A replay in which every plan needs `more` bytes beside its tensors."""
    return lambda plan: DeviceBytes(plan.peak_bytes, plan.peak_bytes + more, plan.peak_bytes + more)


def test_the_bound_counts_what_every_plan_has_beside_its_tensors_and_nothing_else() -> None:
    chain = homogeneous_chain(6, link_ratio=1.0)
    budget = ckptplan.solve(chain, 1.0).peak_bytes  # everything kept, with nothing beside
    limits, workspace = Limits(actions=("keep", "recompute"), time_limit_s=1.0), 1 << 20
    alone = jobs.Job(chain, limits)
    # A library's workspace is there under every plan.
    plan = jobs.Job(chain, limits, beside(workspace), on_cuda=True, library_bytes=workspace).solved(budget)
    assert plan.reserved_bytes is not None
    assert plan.reserved_bytes <= budget == plan.budget_bytes
    assert plan.status == "optimal"
    assert plan.lower_bound_s == pytest.approx(alone.solved(budget - workspace).lower_bound_s)
    assert plan.lower_bound_s > plan.baseline_step_s
    # Another plan may have less of rounding, and of fragments: in tensors everything fits.
    for more, library_bytes in ((workspace, 3 * workspace), (budget // 2, 0)):
        plan = jobs.Job(chain, limits, beside(more), on_cuda=True, library_bytes=library_bytes).solved(budget)
        assert plan.counted_bytes <= budget == plan.budget_bytes
        assert plan.lower_bound_s == pytest.approx(alone.solved(budget).lower_bound_s)
        assert plan.status == "feasible"


def test_the_smallest_budget_that_is_named_works() -> None:
    chain = homogeneous_chain(6, link_ratio=4.0)

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes + plan.host_bytes)

    job = jobs.Job(chain, Limits(time_limit_s=1.0), needs, on_cuda=True)
    with pytest.raises(ckptplan.InfeasibleBudgetError) as raised:
        job.solved(1 << 20)
    assert job.solved(raised.value.min_peak_bytes).counted_bytes <= raised.value.min_peak_bytes


def test_a_slowdown_on_cuda_is_proven_for_the_budget_that_is_named() -> None:
    chain = homogeneous_chain(6, link_ratio=1.0)

    def needs(plan: ckptplan.Plan) -> DeviceBytes:
        return DeviceBytes(plan.peak_bytes, plan.peak_bytes, 2 * plan.peak_bytes)

    job = jobs.Job(chain, Limits(time_limit_s=1.0), needs, on_cuda=True)
    plan = api._solved(job, None, None, 0.2)
    assert plan.budget_bytes == plan.reserved_bytes == 2 * plan.peak_bytes
    assert plan.lower_bound_s <= ckptplan.solve(chain, plan.budget_bytes / 2**30).step_s


def test_a_share_of_the_weights_that_may_fit_is_bounded_by_its_smallest_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it isn't proven that nothing fits, the bound isn't the time of keeping everything."""
    times, sizes = ([0.01] * 4, [0.02] * 4), ([1 << 10] * 4, [8 << 10] * 4)
    chain = ckptplan.Profile.from_chain(*times, *sizes, input_bytes=1 << 10, out_bytes_per_s=1e6, in_bytes_per_s=1e6)
    chain = with_weights(chain, 16 << 10)
    proven = ckptplan.solve(chain, budget="0%", offload="all")
    assert proven.between == PARTS
    assert proven.status == "optimal"
    monkeypatch.setattr(jobs.Job, "_is_infeasible", lambda *_: False)
    plan = ckptplan.solve(chain, budget="0%", offload="all")
    assert plan.step_s == proven.step_s
    assert chain.baseline_step_s * 1.1 < plan.lower_bound_s < plan.step_s


def test_a_share_whose_smallest_peak_is_not_found_again_leaves_the_others_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = with_weights(homogeneous_chain(3, link_ratio=1.0), 1 << 30)
    wanted = ckptplan.solve(chain, budget="0%", offload="all")
    monkeypatch.setattr(jobs.Job, "_is_infeasible", lambda *_: False)
    found = jobs.solve_profile

    def searched(profile: ckptplan.Profile, *args: Any, **kwargs: Any) -> ckptplan.Plan:
        return (
            found(profile, 1, *args[1:], **kwargs)
            if profile.between < wanted.between
            else found(profile, *args, **kwargs)
        )

    budget = wanted.budget_bytes
    job = jobs.Job.of(chain, Limits(offload=wanted.offload))
    monkeypatch.setattr(jobs, "solve_profile", searched)
    plan = job.solved(budget)
    assert plan.step_s == wanted.step_s
    assert plan.lower_bound_s <= wanted.lower_bound_s


@pytest.mark.long
def test_shares_of_the_weights_that_may_be_faster_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share has a part of the time at first, which may end with a bound far below its plans."""
    chain = with_weights(homogeneous_chain(4, link_ratio=1.0), 1 << 30)
    job = jobs.Job.of(chain, Limits(offload=ckptplan.solve(chain, budget="0%", offload="all").offload))
    budget, found, starts = job.range_bytes(1.0)[0] * 3 // 2, jobs.solve_profile, list[Any]()

    def searched(profile: ckptplan.Profile, *args: Any, start: Any = None, **kwargs: Any) -> ckptplan.Plan:
        starts.append(start)
        plan = found(profile, *args, **kwargs)
        return plan if start else replace(plan, lower_bound_s=chain.baseline_step_s)

    wanted, seen = job.solved(budget), list[ckptplan.Plan]()
    monkeypatch.setattr(jobs, "solve_profile", searched)
    plan = replace(job, limits=replace(job.limits, on_plan=seen.append)).solved(budget)
    assert seen[-1].step_s == plan.step_s
    assert all(each.lower_bound_s <= plan.step_s and each.budget_bytes == budget for each in seen)
    assert all(each.status != "optimal" for each in seen if each.step_s > plan.step_s)
    assert chain.baseline_step_s * 1.1 < wanted.lower_bound_s
    assert sum(start is not None for start in starts) > 1
    assert (plan.step_s, plan.lower_bound_s) == (wanted.step_s, wanted.lower_bound_s)


def test_what_one_share_of_the_weights_proves_is_not_said_of_all() -> None:
    chain, seen = with_weights(homogeneous_chain(4, link_ratio=1.0), 1 << 28), list[ckptplan.Plan]()
    limits: dict[str, Any] = {"offload": "all", "time_limit_s": 2, "on_plan": seen.append}
    found = [*ckptplan.frontier(chain, points=2, **limits), ckptplan.solve(chain, max_overhead=0.4, **limits), *seen]
    assert {plan.between for plan in seen} == set(range(PARTS + 1))
    for plan in found:
        assert plan.lower_bound_s <= min(other.step_s for other in found if other.peak_bytes <= plan.budget_bytes)


def with_weights(chain: ckptplan.Profile, nbytes: int) -> ckptplan.Profile:
    """The chain with a frozen weight in each stage."""
    weights = tuple(Resident((f"w{i}",), nbytes, (i,), trained=False) for i in range(len(chain.stages)))
    held = nbytes * len(weights)
    return replace(
        chain,
        base_forward_bytes=tuple(nbytes + held for nbytes in chain.base_forward_bytes),
        base_backward_bytes=tuple(nbytes + held for nbytes in chain.base_backward_bytes),
        update_peak_bytes=chain.update_peak_bytes + held,
        resident_bytes=chain.resident_bytes + held,
        residents=weights,
    )
