"""What the frameworks' callbacks have in common."""

from __future__ import annotations

import pytest
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.integrations.training import PlanningCallback


def test_a_plan_of_an_earlier_run_fits_what_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9}
    profile = ckptplan.Profile.from_chain([1e-3], [1e-3], [1 << 20], [1 << 20], input_bytes=0, **link)
    plan, model = ckptplan.solve(profile, budget_gb=1), nn.Linear(1, 1)
    for free_bytes, fits in ((plan.counted_bytes, False), (2 * plan.counted_bytes, True)):
        monkeypatch.setattr("ckptplan.integrations.training.default_budget", lambda *_, free=free_bytes: free)
        assert PlanningCallback(budget="auto").fits(plan, model) is fits
        assert PlanningCallback(budget_gb=1).fits(plan, model)


def test_how_to_check_is_looked_at_before_the_first_batch() -> None:
    with pytest.raises(InvalidInputError, match="check='x'; it is 'sampled', 'always' or 'off'"):
        PlanningCallback(budget_gb=1, check="x")
