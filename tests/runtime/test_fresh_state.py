"""The allocator's cache is emptied once an optimizer has made its state, and not otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_memory import FakeMemory
from small_models import build, measured, plan_of
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import ckptplan
from ckptplan.core.request import Training
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling.target import find_target
from ckptplan.runtime.guard import fresh_state
from ckptplan.training.step import default_loss, make_step


class Sums(SGD):
    """Keeps its state in an attribute."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not hasattr(self, "sums"):
            self.sums = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        for total, p in zip(self.sums, self.param_groups[0]["params"], strict=True):
            total.add_(p.grad)
        super().step()


class Prepared(SGD):
    """Has entries for its parameters before there is state in them, as whoever reads `state[p]` makes them."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        for p in self.param_groups[0]["params"]:
            self.state[p]


def trained(
    plan: ckptplan.Plan,
    model: nn.Module,
    x: torch.Tensor,
    optimizer: Optimizer,
    *,
    count: int = 4,
    empties: bool = True,
) -> tuple[int, list[int]]:
    """The peak of reserved bytes in steps of training, and the numbers of those before which the cache was emptied."""
    memory = FakeMemory()
    memory.hold(*model.parameters(), x)
    memory.hold(*(t for state in optimizer.state.values() for t in state.values()))
    emptied: list[int] = []
    begun: list[int] = []

    def empty(device: torch.device) -> None:
        emptied.append(len(begun))
        memory.allocator.empty_cache()

    with pytest.MonkeyPatch.context() as patch, memory.installed():
        patch.setattr(fresh_state, "is_accelerator", lambda device: empties)
        patch.setattr(fresh_state, "is_capturing", lambda device: False)
        patch.setattr(fresh_state, "empty_cache", empty)
        with ckptplan.apply(model, plan, check="off"):
            for step in range(count):
                begun.append(step)
                output = model(x)
                default_loss(output).backward()
                optimizer.step()
                optimizer.zero_grad()
                del output
    return memory.allocator.peak_reserved_bytes, emptied


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda parameters: AdamW(parameters), [2]),
        (lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9), [2]),
        (lambda parameters: Sums(parameters, lr=1e-3), [2]),
        (lambda parameters: Prepared(parameters, lr=1e-3, momentum=0.9), [2]),
        (lambda parameters: SGD(parameters, lr=1e-3), []),  # has no state
        (lambda parameters: Adagrad(parameters), []),  # makes it when it is made
    ],
)
def test_once_when_state_is_made(make: Callable[[Any], Optimizer], at: list[int]) -> None:
    model, inputs = build("mlp")
    plan = plan_of(measured("mlp"), ["recompute"] * len(measured("mlp").stages))
    _, emptied = trained(plan, model, inputs, make(list(model.parameters())))
    assert emptied == at


def test_state_for_further_parameters() -> None:
    """Layers that are trained in turn: each update that makes state counts."""
    model, inputs = build("mlp")
    plan = plan_of(measured("mlp"), ["keep"] * len(measured("mlp").stages))
    parameters = list(model.parameters())

    class InTurn(SGD):
        updates = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.updates += 1
            if self.updates < 4:
                parameters[-1].grad = None
            super().step()

    _, emptied = trained(plan, model, inputs, InTurn(parameters, lr=1e-3, momentum=0.9), count=7)
    assert emptied == [2, 5]


def test_the_prediction_is_what_training_reserves() -> None:
    """By the allocator's model; without emptying, the state's place among the first step's blocks costs more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(2)), nn.Linear(512, 8192))
    x = torch.randn(1000, 512)
    chain = ckptplan.profile(model, x)
    plan = plan_of(chain, ["recompute"] * 2 + ["keep"] * (len(chain.stages) - 2))

    def optimizer() -> Optimizer:
        return SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    sizes = TrainingBytes(model, find_target(model, "a100-40gb"), Training(optimizer=optimizer()))
    predicted = sizes.peaks(make_step(model, Training(x)), plan).reserved_bytes
    with_, without = (trained(plan, model, x, optimizer(), empties=empties)[0] for empties in (True, False))
    assert with_ == predicted < without
