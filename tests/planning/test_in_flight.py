"""Plans for several forwards in flight: against all plans of small chains, and in loops."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import brute_force
import pytest
import torch
from random_chains import random_chain, rich_chain
from torch import nn

import ckptplan
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError, PlanMismatchError
from ckptplan.core.option import Option
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.stage import Stage
from ckptplan.planning import in_flight
from ckptplan.referee import validate
from ckptplan.referee.simulate import Timeline
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.guard.gradients import GradientGuard


def fastest(profile: Profile, budget_bytes: int, count: int) -> float | None:
    """The smallest step of any plan of which `count` forwards fit, by trying all.

    A stage without bytes or time at the end lets the last one move what it saves, which is away while it waits.
    """
    n, end = len(profile.stages), Stage("(end)", "(end)", (Option("keep", (), (), 0, 0),), 0.0, 0.0)
    longer = replace(
        profile,
        stages=(*profile.stages, end),
        storages=tuple(s if s.program_until < n else replace(s, program_until=n - 1) for s in profile.storages),
        base_forward_bytes=(*profile.base_forward_bytes, 0),
        base_backward_bytes=(*profile.base_backward_bytes, 0),
    )

    def needs(timeline: Timeline) -> int:
        left = profile.base_backward_bytes[-1] + timeline.steps[n].start_bytes - timeline.steps[0].start_bytes
        return timeline.peak_bytes + (count - 1) * (max(left, 0) + profile.input_bytes)

    return brute_force.fastest_of_all_points(longer, budget_bytes, needs=needs)


# Without 11, which has so many points that it would take as long as the others together.
@pytest.mark.parametrize("seed", [*range(11), 12])
def test_no_plan_of_a_small_chain_is_faster(seed: int) -> None:
    profile = replace(random_chain(seed, 3, most_options=4), input_bytes=seed)
    count = 2 + seed % 3
    kept = ckptplan.solve(profile, 1024, in_flight=count)
    assert (kept.in_flight, kept.overhead) == (count, 0)
    for share in (0.4, 0.6, 0.8, 0.95):
        budget = int(share * kept.needed_bytes)
        best = fastest(profile, budget, count)
        try:
            plan = ckptplan.solve(profile, budget / 2**30, in_flight=count, gap=0.0)
        except InfeasibleBudgetError:
            assert best is None
            continue
        assert best is not None
        assert not validate(profile, plan, budget)
        assert validate(profile, replace(plan, others_bytes=plan.others_bytes + 1), budget)
        assert validate(profile, plan, plan.needed_bytes - 1)
        assert plan.lower_bound_s <= best * (1 + 1e-9)
        assert plan.step_s == pytest.approx(best)


def test_bounds_hold_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends with the first interval has a bound on all plans, those that it hasn't seen included."""
    profile = replace(rich_chain(random.Random(2), 3, most_options=4), input_bytes=2)
    budget = int(0.8 * ckptplan.solve(profile, 1024, in_flight=4).needed_bytes)
    best = fastest(profile, budget, 4)
    assert best is not None
    monkeypatch.setattr(in_flight, "FINEST", 1)
    plan = ckptplan.solve(profile, budget / 2**30, in_flight=4, gap=0.0)
    assert plan.lower_bound_s <= best * (1 + 1e-9) <= plan.step_s * (1 + 2e-9)
    assert plan.gap > 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def planned(count: int, budget: str = "30%") -> tuple[nn.Module, torch.Tensor, Plan]:
    torch.manual_seed(0)
    model, x = Net().train(), torch.randn(256, 64)
    plan = ckptplan.solve(model, budget=budget, inputs=x, in_flight=count, time_limit_s=0.5)
    return model, x, plan


def test_plans_that_are_handed_out_have_bounds_that_hold() -> None:
    profile = replace(random_chain(5, 3, most_options=4), input_bytes=5)
    budget = int(0.8 * ckptplan.solve(profile, 1024, in_flight=4).needed_bytes)
    best = fastest(profile, budget, 4)
    assert best is not None
    handed: list[Plan] = []
    ckptplan.solve(profile, budget / 2**30, in_flight=4, gap=0.0, on_plan=handed.append)
    assert handed
    assert all(plan.lower_bound_s <= best * (1 + 1e-9) for plan in handed)


def test_what_a_step_takes_with_all_in_flight() -> None:
    model, x, plan = planned(3)
    assert plan.fingerprint.accumulates
    assert 0 < plan.others_bytes < plan.needed_bytes <= plan.budget_bytes
    verified = ckptplan.verify(model, plan, x, repeats=1)
    assert verified.gradients_equal
    assert verified.measured.requested_bytes == pytest.approx(plan.needed_bytes, rel=0.01)
    assert verified.measured.requested_bytes <= plan.budget_bytes
    assert "3 forwards in flight: one step takes" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    on_cuda = replace(plan, allocated_bytes=plan.peak_bytes, reserved_bytes=plan.peak_bytes)
    with ckptplan.apply(model, on_cuda) as handle:
        assert handle.stats().planned_reserved_bytes == plan.needed_bytes


def test_more_than_planned_are_noticed() -> None:
    model, x, plan = planned(2, "80%")
    plan = replace(plan, budget_bytes=plan.needed_bytes)
    text = r"made for 2 at a time, includes; .* solve with in_flight=3"

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        for _ in range(2):
            sum(model(x).mean() for _ in range(3)).backward()  # type: ignore[union-attr]
        return [p.grad for p in model.parameters() if p.grad is not None]

    with ckptplan.apply(model, plan) as handle, pytest.warns(RuntimeWarning, match=text) as told:
        found = gradients()
    assert len(told) == 1
    assert handle.stats().differences == {"forwards": 2}
    assert all(map(torch.equal, found, gradients()))
    model.zero_grad()
    with ckptplan.apply(model, plan, strict=True), warnings.catch_warnings(action="error"):
        first, second = model(x), model(x)
        first.mean().backward()
        third = model(x)
        with pytest.raises(PlanMismatchError, match=text):
            model(x)
        second.mean().backward()
        third.mean().backward()
    more = nn.Parameter(torch.zeros(plan.others_bytes // 4))
    more.grad = torch.zeros_like(more)
    model.register_parameter("more", more)
    unaware = replace(plan, fingerprint=replace(plan.fingerprint, accumulates=False))
    guard = GradientGuard(model, unaware, Differences("raise"))
    with pytest.raises(PlanMismatchError, match="exist at the start of this forward"):
        guard.pass_begins(None)


def test_what_is_for_one_forward_says_so() -> None:
    profile = random_chain(0, 3)
    with pytest.raises(InvalidInputError, match="in_flight=0 must be a whole number from 1"):
        ckptplan.solve(profile, 1, in_flight=0)
    model, x, _ = planned(2)
    with pytest.raises(InvalidInputError, match="in_flight=2 of steps that start without gradients"):
        ckptplan.solve(model, 1, inputs=x, in_flight=2, accumulate=False)
    with pytest.raises(InvalidInputError, match="max_overhead is for one forward in flight"):
        ckptplan.solve(profile, max_overhead=0.1, in_flight=2)
    with pytest.raises(InvalidInputError, match="frontier is for one forward in flight"):
        ckptplan.frontier(profile, in_flight=2)
    with pytest.raises(InfeasibleBudgetError, match="with 4 forwards in flight") as caught:
        ckptplan.solve(profile, 1e-9, in_flight=4)
    least = ckptplan.solve(profile, caught.value.min_peak_bytes / 2**30, in_flight=4)
    assert least.needed_bytes <= caught.value.min_peak_bytes
