"""Peaks under every choice of the stages, each of which may hold what another one frees where that was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_plans import scheduled
from torch import nn

from ckptplan import apply
from ckptplan.core.request import Training
from ckptplan.profiling.profiler import traced_bytes
from ckptplan.profiling.target import find_target
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start, run_step
from ckptplan.training.step import make_step

WIDTH = 64


class Lambda(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class LargeBackward(torch.autograd.Function):
    """A copy whose backward takes 40 times its bytes, and which saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradients[0].repeat(1, 40)
        return gradients[0].clone()


class LargeForward(nn.Module):
    """Blocks that don't save what they read, and between them the model's own code, which takes most of the bytes."""

    def __init__(self) -> None:
        super().__init__()
        doubled = (Lambda(lambda x: 2 * x) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(d, nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)) for d in doubled)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 2 * x
        for block in self.blocks:
            x = block(x)
            x.detach().repeat(1, 40)
        return self.head(x)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + mask[:, :WIDTH]


class Masked(nn.Module):
    """Layers that read a mask, of which only the code after them saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifted() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.detach() > 0).float().repeat(1, 8)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(LargeBackward.apply(x) * mask[:, :WIDTH])


class Holding(nn.Module):
    """Two layers, the first of which saves a tensor that the program or the graph itself holds, and large backwards."""

    def __init__(self, hold: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hold = hold
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(hold is not as_leaf)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hold(self, self.first(x))
        for layer in self.layers:
            x = layer(x)
        return LargeBackward.apply(self.head(LargeBackward.apply(x)))


def as_leaf(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()  # as `enable_input_require_grads` of transformers does


def in_attribute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.seen = x
    return x


def in_hook(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = 2 * x
    held = y.detach()
    x.register_hook(lambda gradient: gradient + 0 * held)
    return y


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "forward": lambda: (LargeForward(), torch.randn(256, WIDTH)),
    "mask": lambda: (Masked(), torch.randn(256, WIDTH)),
    **{
        hold.__name__: lambda hold=hold: (Holding(hold), torch.randn(256, WIDTH))  # type: ignore[misc]
        for hold in (as_leaf, in_attribute, in_hook)
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_has_a_higher_peak_than_predicted(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    step = make_step(model, Training(inputs))
    measured = traced_bytes(step, None, find_target(model))
    menus = [
        [option for option in stage.options if option.name in ("keep", "swap", "recompute")]
        for stage in measured.stages
    ]
    plans = [scheduled(measured, options) for options in itertools.product(*menus)]
    assert len(plans) >= 4
    before = unique_bytes([*held_tensors(model), *step.tensors()])
    found = []
    for plan in plans:
        with apply(model, plan, check="off"):
            found.append(before + peak_above_start(lambda: run_step(step)))
        model.zero_grad()
    above = [(plan.choices, plan.peak_bytes, peak) for plan, peak in zip(plans, found, strict=True)
             if peak > plan.peak_bytes]  # fmt: skip
    assert not above
    # What a step leaves in an attribute counts twice throughout the next one, which replaces it in forward.
    least = 0.999 if name != "in_attribute" else 0.97
    assert any(peak > least * plan.peak_bytes for plan, peak in zip(plans, found, strict=True))
