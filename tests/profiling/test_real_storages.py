"""What stages save and return in a real forward is held against what was traced without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from small_models import assert_kept, plan_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from toy_modules import Lambda

import ckptplan
from ckptplan.core.units import format_bytes

ROWS, WIDTH = 128, 64
BYTES = ROWS * WIDTH * 4


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class _Square(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class _More(_Square):
    """Saves a mask and its input, of fake tensors its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*((x,) if _is_fake(x) else (x, x.exp(), x.sin())))
        return x.square()


class _Wide(_Square):
    """Saves a part of a large storage; of a fake tensor as much as it needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(1 if _is_fake(x) else 5, *x.shape)
        whole[-1].copy_(x)
        ctx.save_for_backward(whole[-1])
        return x.square()


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """A view of a large storage, of a fake tensor of a small one."""
    return x.tanh().expand(1 if _is_fake(x) else 4, *x.shape).contiguous()[0]


def _branch(x: torch.Tensor) -> torch.Tensor:
    """Another operation on real values."""
    return x.sin() if _is_fake(x) else x.sin() * x.cos()


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "more": _More.apply,
    "wide": _Wide.apply,
    "narrow": _narrow,
    "branch": _branch,
}
REFUSED = {"more": 2 * BYTES, "narrow": 4 * BYTES, "branch": 2 * BYTES}
LARGER = {"wide": 4 * BYTES}


def model_with(odd: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    layers = (torch.tanh, odd, odd, torch.tanh)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), Lambda(lambda self, x: self.f(x), f=f)) for f in layers)
    )


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize("name", ODD)
def test_peaks_gradients_and_notes_are_right(name: str) -> None:
    """Notes say which stages are kept, and by how much they differ."""
    model = model_with(ODD[name])
    measured = ckptplan.profile(model, inputs(), menus=False)
    for action in ("keep", "swap", "recompute") if name in LARGER else ("swap", "recompute"):
        plan = plan_of(measured, [action] * len(measured.stages))
        assert_kept(model, plan, inputs())
    notes = [note for note in measured.notes if "in a real forward" in note]
    kept = [stage.name for stage in measured.stages if len(stage.options) == 1 and not stage.is_glue]
    more = {**REFUSED, **LARGER}.get(name)
    assert kept == (["1", "2"] if name in REFUSED else [])
    wanted = [note for note in notes if name not in REFUSED or "it is kept" in note]
    assert [note.partition(" ")[0] for note in wanted] == ([] if more is None else ["1", "2"])
    assert all(f"{format_bytes(more)} more" in note for note in wanted)


@pytest.mark.parametrize("name", small_models.BUILDERS)
@pytest.mark.long("transformer", "tied")
def test_nothing_is_said_of_models_that_are_traced_right(name: str) -> None:
    assert not [note for note in small_models.measured(name).notes if "in a real forward" in note]
