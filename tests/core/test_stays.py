"""What no plan can move is named, with what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ckptplan
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.fsdp import WITH_WHOLE_GRADIENTS
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


class Head(nn.Module):
    """Few layers and many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(32, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def refused(profile: Profile) -> tuple[str, Plan]:
    """The error for a budget that is too small, and the plan with the smallest peak."""
    with pytest.raises(InfeasibleBudgetError) as raised:
        ckptplan.solve(profile, budget_gb=1e-6, time_limit_s=2)
    return str(raised.value), ckptplan.solve(profile, budget="0%", time_limit_s=2)


def test_logits_are_named() -> None:
    profile = ckptplan.profile(Head(), torch.randn(512, 32), loss_fn=loss_of, menus=False)
    error, plan = refused(profile)
    for text in (error, str(ckptplan.explain(profile, plan, time_limit_s=1))):
        assert "no plan can move: " in text
        assert "LigerFusedLinearCrossEntropyLoss" in text
        assert "linear_cross_entropy" in text


def test_a_stage_too_large_by_itself_is_named() -> None:
    temporary = [1 << 10, 1 << 10, 1 << 24, 1 << 10]
    profile = Profile.from_chain(
        [0.01] * 4, [0.02] * 4, [1 << 10] * 4, [1 << 20] * 4, input_bytes=1 << 10, backward_temp_bytes=temporary
    )
    error, plan = refused(profile)
    for text in (error, str(ckptplan.explain(profile, plan, time_limit_s=1))):
        assert "in backward of 's2' are its own" in text
        assert "split it" in text


def test_the_update_is_named() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    error, plan = refused(ckptplan.profile(model, torch.randn(1, 64), optimizer=torch.optim.AdamW, menus=False))
    assert "the update needs weights, gradients and optimizer state at once" in error
    assert plan.peak_bytes


def test_what_moves_is_not_named() -> None:
    profile = Profile.from_chain([0.01] * 8, [0.02] * 8, [1 << 20] * 8, [8 << 20] * 8, input_bytes=1 << 10)
    error, _ = refused(profile)
    assert "no plan can move" not in error or "its own" in error


@pytest.mark.parametrize(("amp", "named"), [("bfloat16", True), (None, False)])
def test_sums_of_gradients_in_fp32_are_named(amp: str | None, *, named: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    error, _ = refused(ckptplan.profile(model, torch.randn(64, 64), accumulate=True, amp=amp, menus=False))
    assert "gradients, state and inputs that stay" in error
    assert ("sums of gradients over micro-batches, in fp32" in error) == named


def test_whole_sums_of_gradients_of_a_sharded_model_are_named() -> None:
    profile = ckptplan.Profile.from_chain([0.01] * 2, [0.02] * 2, [1 << 10] * 2, [1 << 20] * 2, input_bytes=1 << 10)
    kind = replace(profile.fingerprint, parallel="fsdp of 2" + WITH_WHOLE_GRADIENTS, accumulates=True)
    profile = replace(profile, fingerprint=kind, base_backward_bytes=(1 << 30,) * 2)
    error, _ = refused(profile)
    assert "set_requires_gradient_sync" in error
