"""What a loop holds of the forward before: noticed where the plan has no room for it, and not a word where it has."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start

WIDTH, BATCH = 64, 128
OUTPUT_BYTES = 4 * WIDTH * BATCH


class Model(nn.Module):
    """Layers, and logits with a loss in a dictionary, as many models give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": y.square().mean(), "logits": y, "given": x}


def loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"]


@pytest.fixture(scope="module")
def solved() -> tuple[Model, torch.Tensor, Plan]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, WIDTH)
    plan = ckptplan.solve(model, 1, inputs=(x,), loss_fn=loss_of, menus=False, time_limit_s=0.2)
    return model, x, plan


def with_budget(plan: Plan, above: int) -> Plan:
    """The plan with a budget so far above what its forward, and so its step, needs."""
    needed = plan.forward_peak_bytes
    assert needed is not None
    return dataclasses.replace(plan, peak_bytes=needed, budget_bytes=needed + above)


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings(action="error"):
        yield


def a_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    output = model(x)
    loss_of(output).backward()
    model.zero_grad()
    return output


def held_in_a_variable(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(4):
        output = a_step(model, x)
    del output


def deleted(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(4):
        output = a_step(model, x)
        del output


def loss_and_input(model: nn.Module, x: torch.Tensor) -> None:
    kept: Any = None
    for _ in range(4):
        output = a_step(model, x)
        kept = output["loss"], output["given"]
        del output
    del kept


def two_forwards(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        (loss_of(model(x)) + loss_of(model(x))).backward()
        model.zero_grad()


def thrown_away(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        model(x)
        a_step(model, x)


def test_bytes_of_forward_are_those_measured(solved: tuple[Model, torch.Tensor, Plan]) -> None:
    model, x, plan = solved
    assert plan.forward_peak_bytes is not None
    assert plan.between_bytes is not None
    held: list[Any] = []
    before = unique_bytes([*held_tensors(model), x])
    with ckptplan.apply(model, plan):
        peak_bytes = before + peak_above_start(lambda: held.append(model(x)))
        one = peak_above_start(lambda: held.append(model(x)))
        two = peak_above_start(lambda: held.extend((model(x), model(x))))
    assert 0.97 * plan.forward_peak_bytes <= peak_bytes <= plan.forward_peak_bytes
    assert 0.97 * plan.between_bytes <= two - one <= plan.between_bytes


@pytest.mark.parametrize("loop", [held_in_a_variable, deleted, loss_and_input])
def test_an_output_that_is_held(
    loop: Callable[[nn.Module, torch.Tensor], None], solved: tuple[Model, torch.Tensor, Plan], no_warning: None
) -> None:
    model, x, plan = solved
    with ckptplan.apply(model, with_budget(plan, OUTPUT_BYTES)):
        loop(model, x)
    with ckptplan.apply(model, with_budget(plan, OUTPUT_BYTES - 1)):
        if loop is not held_in_a_variable:
            loop(model, x)
            return
        with pytest.warns(RuntimeWarning, match="output of the previous forward, 32.00 KiB, is still held") as told:
            loop(model, x)
        assert len(told) == 1
    with (
        ckptplan.apply(model, with_budget(plan, OUTPUT_BYTES - 1), strict=True),
        pytest.raises(PlanMismatchError, match="is still held"),
    ):
        loop(model, x)


def test_two_forwards_before_a_backward(solved: tuple[Model, torch.Tensor, Plan], no_warning: None) -> None:
    model, x, plan = solved
    assert plan.between_bytes is not None
    with ckptplan.apply(model, with_budget(plan, plan.between_bytes)):
        two_forwards(model, x)
    with ckptplan.apply(model, with_budget(plan, plan.between_bytes - 1), strict=True):
        with pytest.raises(PlanMismatchError, match="plan them as one step"):
            two_forwards(model, x)
        deleted(model, x)


def test_forwards_that_were_thrown_away_hold_nothing(
    solved: tuple[Model, torch.Tensor, Plan], no_warning: None
) -> None:
    model, x, plan = solved
    with ckptplan.apply(model, with_budget(plan, 0)):
        thrown_away(model, x)
        with torch.no_grad():
            kept = model(x)
        a_step(model, x)
        del kept


def test_a_planned_step_that_was_thrown_away_holds_nothing(no_warning: None) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, WIDTH)
    plan = ckptplan.solve(model, 1, step=lambda: loss_of(model(x)), menus=False, time_limit_s=0.2)
    with ckptplan.apply(model, dataclasses.replace(plan, budget_bytes=plan.peak_bytes)):
        thrown_away(model, x)
