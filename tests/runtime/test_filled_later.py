"""Operations that save an argument which their kernel fills afterwards, as the noise of a randomized ReLU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import CPU, carried_out, run_again
from odd.harness import WIDTH
from odd.layers import DEPTH, layer_of, layers_of
from small_models import assert_same, gradients
from torch import nn
from torch.nn import functional as F

import ckptplan
from ckptplan.runtime.guard.check import Checks

STAGES = [str(i) for i in range(DEPTH)]


ENDS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "at the end": lambda stage, x: F.rrelu(x, 0.1, 0.9, training=stage.training),
    "in place": lambda stage, x: F.rrelu(x, 0.1, 0.9, training=stage.training, inplace=True),
    "before a view": lambda stage, x: F.rrelu(x, 0.1, 0.9, training=stage.training).view(-1, WIDTH)[:] + 1,
    "before other work": lambda stage, x: stage.out(F.rrelu(x, 0.1, 0.9, training=stage.training)).tanh(),
    "twice": lambda stage, x: torch.rrelu(torch.rrelu(x, 0.1, 0.9, stage.training), 0.2, 0.5, stage.training),
    "of a part": lambda stage, x: torch.cat([F.rrelu(x[:, :4], 0.1, 0.9, training=stage.training), x[:, 4:]], 1),
}


def model_of(end: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Sequential:
    kind = layer_of(lambda m, x: end(m, m.linear(x)), out=lambda: nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers_of(kind))


def step(model: nn.Module) -> list[Any]:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)).square().sum().backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize(
    ("end", "plan"),
    [
        ("at the end", "recompute"), ("in place", "segment"), ("before a view", "selective"),
        ("before other work", "recompute"), ("twice", "segment"), ("of a part", "selective"),
    ],
)  # fmt: skip
def test_noise_of_a_randomized_relu(end: str, plan: str) -> None:
    """Where operation number 1 is saved ("selective"), that is the new memory for the noise."""
    for training in (True, False):
        torch.manual_seed(0)
        model = model_of(ENDS[end]).train(training)
        expected = step(model)
        with run_again(model, plan, STAGES, checks=Checks(CPU, always=True)) as controller:
            assert_same(step(model), expected)
        assert controller.counters.recomputed_stages == 2 * DEPTH


def test_changes_beside_the_noise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise itself isn't compared; what is made from it is."""

    def end(stage: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return stage.out(F.rrelu(x, 0.1, float(os.environ["UPPER"]), training=False)).tanh()

    monkeypatch.setenv("UPPER", "0.9")
    model = model_of(end)
    with carried_out(model, STAGES, checks=Checks(CPU, always=True)):
        loss = model(torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)).square().sum()
        monkeypatch.setenv("UPPER", "0.2")
        with pytest.raises(ckptplan.CheckError, match=r"run ckptplan\.verify, and"):
            loss.backward()
