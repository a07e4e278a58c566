"""What only the loss reads counts as part of the step: targets in a closure, a teacher, a part of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from made_plans import plan_of
from torch import nn

import ckptplan

Loss = Callable[[torch.Tensor], torch.Tensor]
ROWS, WIDTH, WIDE = 64, 16, 256


def target(model: nn.Module, x: torch.Tensor) -> tuple[Loss, int]:
    values = torch.ones(ROWS, WIDTH)
    return lambda y: (y - values).square().mean(), values.nbytes


def teacher(model: nn.Module, x: torch.Tensor) -> tuple[Loss, int]:
    other = nn.Linear(WIDTH, WIDE).requires_grad_(False)
    return lambda y: other(y).square().mean(), sum(p.nbytes for p in other.parameters())


def teacher_of_the_input(model: nn.Module, x: torch.Tensor) -> tuple[Loss, int]:
    other = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return lambda y: (other(x) - y).square().mean(), sum(p.nbytes for p in other.parameters())


def the_model(model: nn.Module, x: torch.Tensor) -> tuple[Loss, int]:
    return lambda y: y.square().mean() + sum(p.abs().sum() for p in model.parameters()), 0


LOSSES = [target, teacher, teacher_of_the_input, the_model]


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: make.__name__)
def test_what_only_the_loss_reads_counts(make: Callable[[nn.Module, torch.Tensor], tuple[Loss, int]]) -> None:
    """In the profile, what is measured and the estimate alike."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)
    loss, beside_bytes = make(model, x)
    profile = ckptplan.profile(model, x, loss_fn=loss, menus=False)
    assert profile.resident_bytes == sum(t.nbytes for t in (*model.parameters(), x)) + beside_bytes
    plan = plan_of(profile, ["keep"] * len(profile.stages))
    assert ckptplan.verify(model, plan, x, loss_fn=loss, repeats=1).measured_peak_bytes == plan.peak_bytes
    assert ckptplan.estimate(model, x, loss_fn=loss).peak_bytes == plan.peak_bytes


def test_a_step_given_as_a_function_has_the_same_bytes() -> None:
    """Besides the output, which `inputs=` takes to be held until backward has ended."""
    layers = [nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)
    loss, _ = teacher(model, x)
    given = ckptplan.profile(model, x, loss_fn=loss, menus=False)
    called = ckptplan.profile(model, step=lambda: loss(model(x)), menus=False)
    peaks = [plan_of(profile, ["keep"] * len(profile.stages)).peak_bytes for profile in (given, called)]
    assert peaks[0] - peaks[1] == ROWS * WIDTH * 4
