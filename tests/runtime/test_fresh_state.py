"""The allocator's cache is emptied once an optimizer has made its state, and not otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_memory import FakeMemory
from small_models import build, measured, plan_of
from torch import nn

import ckptplan
from ckptplan.core.request import Training
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling.target import find_target
from ckptplan.runtime import accelerator
from ckptplan.runtime.guard import fresh_state
from ckptplan.runtime.step import default_loss, make_step

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the forwards before which the cache was emptied; tensors on the CPU count as on the device."""
    found: list[int] = []
    monkeypatch.setattr(fresh_state, "is_accelerator", lambda device: True)
    monkeypatch.setattr(fresh_state, "is_capturing", lambda device: False)
    monkeypatch.setattr(fresh_state, "empty_cache", lambda device: found.append(forward[0]))
    return found


forward = [0]


def steps(model: nn.Module, inputs: torch.Tensor, *optimizers: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        forward[0] += 1
        default_loss(model(inputs)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "options", "at"),
    [
        ("AdamW", {}, [2]),
        ("SGD", {"momentum": 0.9}, [2]),
        ("SGD", {}, []),  # has no state
        ("Adagrad", {}, []),  # makes it when it is made
    ],
)
def test_once_when_state_is_made(emptied: list[int], name: str, options: Any, at: list[int]) -> None:
    forward[0] = 0
    model, inputs = build("mlp")
    plan = plan_of(measured("mlp"), ["recompute"] * len(measured("mlp").stages))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)
    with ckptplan.apply(model, plan):
        steps(model, inputs, optimizer, count=4)
        assert emptied == at
        optimizer.state.clear()  # as where training begins anew
        steps(model, inputs, optimizer, count=2)
    assert emptied == at + [6] * (name != "SGD" or bool(options))


def test_micro_batches_and_other_models(emptied: list[int]) -> None:
    """Not before an update, and not for the optimizer of another model."""
    forward[0] = 0
    model, inputs = build("mlp")
    other = nn.Linear(3, 3)
    plan = plan_of(measured("mlp"), ["keep"] * len(measured("mlp").stages))
    ours, theirs = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    with ckptplan.apply(model, plan):
        steps(model, inputs, count=3)
        other(torch.ones(3)).sum().backward()
        theirs.step()
        steps(model, inputs, ours)
        assert emptied == []
        steps(model, inputs, count=2)
        assert emptied == [5]
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, inputs, optimizer, count=2)
    assert emptied == [5]


def test_state_on_the_host_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    watch = fresh_state.FreshState(model, DEVICE)
    monkeypatch.setattr(fresh_state, "empty_cache", lambda device: pytest.fail("nothing on the device"))
    with watch.watching():
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    monkeypatch.setattr(accelerator, "is_capturing", lambda device: False)
    watch.pass_begins(None)


def trained(plan: ckptplan.Plan, model: nn.Module, x: torch.Tensor, *, empties: bool) -> int:
    """The peak of reserved bytes over four steps of training under a plan."""
    memory = FakeMemory()
    memory.hold(*model.parameters(), x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    with pytest.MonkeyPatch.context() as patch, memory.installed():
        patch.setattr(fresh_state, "is_accelerator", lambda device: empties)
        patch.setattr(fresh_state, "is_capturing", lambda device: False)
        patch.setattr(fresh_state, "empty_cache", lambda device: memory.allocator.empty_cache())
        with ckptplan.apply(model, plan, check="off"):
            for _ in range(4):
                output = model(x)
                default_loss(output).backward()
                optimizer.step()
                optimizer.zero_grad()
                del output
    return memory.allocator.peak_reserved_bytes


def test_the_prediction_is_what_training_reserves() -> None:
    """By the allocator's model; without emptying, the state's place among the first step's blocks costs more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(2)), nn.Linear(512, 8192))
    x = torch.randn(1000, 512)
    chain = ckptplan.profile(model, x)
    plan = plan_of(chain, ["recompute"] * 2 + ["keep"] * (len(chain.stages) - 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    sizes = TrainingBytes(model, find_target(model, "a100-40gb"), Training(optimizer=optimizer))
    predicted = sizes.peaks(make_step(model, Training(x)), plan).reserved_bytes
    assert trained(plan, model, x, empties=True) == predicted < trained(plan, model, x, empties=False)
