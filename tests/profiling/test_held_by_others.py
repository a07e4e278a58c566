"""Peaks under every choice of the stages, each of which may hold what another one frees where that was measured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_plans import scheduled
from torch import nn
from toy_modules import Lambda, times

from ckptplan import apply
from ckptplan.core.request import Training
from ckptplan.profiling.profiler import traced_bytes
from ckptplan.profiling.target import find_target
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start, run_step
from ckptplan.training.step import make_step

WIDTH = 64


class LargeBackward(torch.autograd.Function):
    """A copy whose backward takes 40 times its bytes, and which saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradients[0].repeat(1, 40)
        return gradients[0].clone()


def large_forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Blocks that don't save what they read, and between them the model's own code, which takes most of the bytes."""
    x = 2 * x
    for block in model.blocks:
        x = block(x)
        x.detach().repeat(1, 40)
    return model.head(x)


def narrowed() -> nn.Module:
    return nn.Sequential(Lambda(lambda _, x: 2 * x), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))


def shifted() -> nn.Module:
    return Lambda(lambda self, x, mask: self.inner(x) + mask[:, :WIDTH], inner=nn.Linear(WIDTH, WIDTH))


def masked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers that read a mask, of which only the code after them saves it."""
    mask = (x.detach() > 0).float().repeat(1, 8)
    for layer in model.blocks:
        x = layer(x, mask)
    return model.head(LargeBackward.apply(x) * mask[:, :WIDTH])


def holding(hold: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Two layers, the first of which saves a tensor that the program or the graph itself holds, and large backwards."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = hold(model, model.first(x))
        for layer in model.layers:
            x = layer(x)
        return LargeBackward.apply(model.head(LargeBackward.apply(x)))

    first = nn.Linear(WIDTH, WIDTH).requires_grad_(hold is not as_leaf)
    layers = times(2, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return Lambda(forward, first=first, layers=layers, head=nn.Linear(WIDTH, 4))


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "forward": lambda: Lambda(large_forward, blocks=times(3, narrowed), head=nn.Linear(WIDTH, 4)),
    "mask": lambda: Lambda(masked, blocks=times(3, shifted), head=nn.Linear(WIDTH, 4)),
    **{hold.__name__: functools.partial(holding, hold) for hold in (as_leaf, in_attribute, in_hook)},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long("forward")
def test_no_plan_has_a_higher_peak_than_predicted(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](), torch.randn(256, WIDTH)
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
