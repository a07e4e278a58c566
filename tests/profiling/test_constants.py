"""Small floating tensors whose values follow from inputs and constants can be read while a step is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import assert_kept
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from toy_modules import Lambda, times

import ckptplan
from ckptplan.profiling.bytes.fake import FakeWorld
from ckptplan.profiling.values.answers import NeedsValues

MADE: dict[str, Callable[[], torch.Tensor]] = {
    "made of ones": lambda: torch.ones(4, 8),
    "a list": lambda: torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
    "a triangle": lambda: torch.full((4, 4), float("-inf")).triu(1),
    "like another": lambda: torch.zeros_like(torch.rand(4, 8)) + 1.0,
    "a view": lambda: torch.arange(12.0).view(3, 4)[:, 1:].t(),
    "expanded": lambda: torch.eye(3)[:, None].expand(3, 2, 3),
    "written to": lambda: torch.ones(4, 8).index_fill_(1, torch.tensor([0]), 0.0),
    "written to through a view": lambda: (mask := torch.ones(4, 8), mask[1].fill_(0.0))[0],
    "of another type": lambda: torch.ones(4, 8).half().double(),
}


@pytest.mark.parametrize("name", MADE)
def test_constants_have_values(name: str) -> None:
    with FakeWorld():
        mask = MADE[name]()
        assert isinstance(mask, FakeTensor)
        found = mask.detach() > 0, (mask == mask.max()).sum().item(), mask.argmax().tolist(), mask.nonzero()
    real = MADE[name]()
    assert not isinstance(found[0], FakeTensor)
    assert torch.equal(found[0], real > 0)
    assert found[1:3] == ((real == real.max()).sum().item(), real.argmax().tolist())
    assert torch.equal(found[3], real.nonzero())


UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a weight": lambda weight: weight,
    "written to": lambda weight: (mask := torch.ones(4, 8), mask[0].copy_(weight[0]))[0],
    "written to before": lambda weight: (mask := torch.ones(4, 8), view := mask[1], mask.mul_(weight), view)[-1],
    "drawn": lambda weight: torch.rand(4),
    "without values": lambda weight: torch.empty(4),
    "large": lambda weight: torch.ones(1 << 20),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_others_have_none(name: str) -> None:
    weight = nn.Parameter(torch.ones(4, 8))
    with FakeWorld() as world, pytest.raises(NeedsValues):
        bool((UNKNOWN[name](world.fake(weight).detach()) == 1).all())


def test_inputs_that_are_no_masks_have_none() -> None:
    """Estimates and stored profiles compare them by their layout alone."""
    given = torch.full((4, 8), -1.0)
    with FakeWorld() as world, pytest.raises(NeedsValues):
        bool((world.fake(given) == 1).all())


def test_floating_masks_have_values_and_are_left_alone() -> None:
    given = torch.ones(2, 3)
    with FakeWorld() as world:
        mask = world.fake(given)
        mask[0] = 0.0
        assert (world.fake(given) == 1).sum().item() == 3
    assert given.eq(1).all()


def masked(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Floating masks, one of its own and one that it is given, decide what its layers are given."""
    hidden = x @ torch.eye(32)
    own = None if torch.ones(len(x)).all() else torch.zeros(len(x), 1)
    for layer in model.layers:
        hidden = hidden + layer(hidden if mask.bool().all() else hidden * mask[:, None])
        hidden = hidden if own is None else hidden * own
    return hidden


@pytest.mark.long
def test_masks_need_no_real_run() -> None:
    torch.manual_seed(0)
    layers = times(3, lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))
    model = Lambda(masked, layers=layers)
    for last in (1.0, 0.0):
        mask = torch.ones(128)
        mask[-1] = last
        inputs = torch.randn(128, 32), mask
        plan = ckptplan.solve(model, budget="30%", inputs=inputs, time_limit_s=0.5)
        assert not any("real" in note for note in plan.notes)
        assert_kept(model, plan, inputs)
