"""Parameters that forward rebinds through `.data` in a step that also runs for real: put back after profiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toy_modules import Lambda

import ckptplan

Write = Callable[[nn.Parameter, nn.Parameter], Any]


def rebound(mine: nn.Parameter, other: nn.Parameter) -> None:
    mine.data = mine.data * 0.9 + other.data * 0.1


def written_and_rebound(mine: nn.Parameter, other: nn.Parameter) -> None:
    mine.data.mul_(0.5)
    rebound(mine, other)


def rebound_and_written(mine: nn.Parameter, other: nn.Parameter) -> None:
    rebound(mine, other)
    mine.data.add_(1)


def momentum(model: Any, x: torch.Tensor) -> torch.Tensor:
    for mine, other in zip(model.key.parameters(), model.query.parameters(), strict=True):
        model.write(mine, other)
    order = torch.randperm(len(x))
    rows = int(model.at) + len(x)  # reads a value, so the step runs for real
    model.at[0] = rows
    return (model.query(x).tanh() * model.key(x[order])[torch.argsort(order)])[:rows]


@pytest.mark.parametrize(
    ("call", "write"), [(ckptplan.profile, written_and_rebound), (ckptplan.estimate, rebound_and_written)]
)
def test_parameters_are_put_back(call: Callable[..., Any], write: Write) -> None:
    torch.manual_seed(0)
    query, key = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
    model = Lambda(momentum, query=query, key=key, at=torch.zeros(1, dtype=torch.long), write=write)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    memory, drawn = [p.data_ptr() for p in model.parameters()], torch.get_rng_state()
    call(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), loss_fn=lambda y: y.mean())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == memory
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in model.parameters())
