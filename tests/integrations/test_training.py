"""What the frameworks' callbacks have in common."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.integrations.training import PlanningCallback
from ckptplan.planning.model_job import default_budget
from ckptplan.tensors import accelerator


def test_a_plan_of_an_earlier_run_fits_what_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9}
    profile = ckptplan.Profile.from_chain([1e-3], [1e-3], [1 << 20], [1 << 20], input_bytes=0, **link)
    plan, model = ckptplan.solve(profile, budget_gb=1), nn.Linear(1, 1)
    for free_bytes, fits in ((plan.counted_bytes, False), (2 * plan.counted_bytes, True)):
        monkeypatch.setattr("ckptplan.integrations.training.default_budget", lambda *_, free=free_bytes, **__: free)
        assert PlanningCallback(budget="auto").fits(plan, model, None) is fits
        assert PlanningCallback(budget_gb=1).fits(plan, model, None)


def test_how_to_check_is_looked_at_before_the_first_batch() -> None:
    with pytest.raises(InvalidInputError, match="check='x'; it is 'sampled', 'always' or 'off'"):
        PlanningCallback(budget_gb=1, check="x")


def test_the_state_that_an_optimizer_has_is_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that goes on has it from the beginning, and a plan counts it."""
    monkeypatch.setattr(accelerator, "free_bytes", lambda _: 1 << 30)
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = default_budget(model, None, optimizer=optimizer)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert default_budget(model, None, optimizer=optimizer) - before == model.weight.nbytes
