"""estimate() of loops that hold output, loss and batch for longer or shorter, against the CPU allocator's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from measured_phases import assert_measured
from test_batches import Language, tokens
from torch import nn

from ckptplan import InvalidInputError, estimate
from ckptplan.core.estimate import KEPT


def square(output: torch.Tensor) -> torch.Tensor:
    return (output * output).mean()


def layers(n: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(n)))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, Any]]] = {
    "loss of the output": lambda: (layers(1), torch.randn(256, 64), square),
    "equal layers": lambda: (layers(8), torch.randn(64, 64), square),
    "loss in the output": lambda: (Language(), tokens(16)[0], None),
}
LOOPS = [
    ("loss of the output", True, ()),
    ("loss of the output", False, ()),
    ("equal layers", True, KEPT),
    ("loss in the output", True, ("output",)),
    ("loss in the output", False, ("loss", "batch")),
]


@pytest.mark.parametrize(("name", "holds_output", "keeps"), LOOPS)
def test_what_a_loop_holds(name: str, holds_output: bool, keeps: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x, loss_fn = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = estimate(model, x, loss_fn=loss_fn, optimizer=optimizer, holds_output=holds_output, keeps=keeps)
    assert_measured(found, model, x, optimizer, loss_fn=loss_fn, holds_output=holds_output, keeps=keeps)


def test_the_loop_is_named() -> None:
    model, x, _ = MODELS["loss in the output"]()
    assert "loop      holds the output during backward, and nothing of a step until the next" in str(estimate(model, x))
    found = estimate(model, x, holds_output=False, keeps={"batch", "loss"})
    assert (found.holds_output, found.keeps) == (False, ("loss", "batch"))
    assert "loop      drops the output during backward, and keeps loss and batch until the next" in str(found)


@pytest.mark.parametrize("how", [{"keeps": "output"}, {"keeps": ["graph"]}, {"keeps": KEPT, "holds_output": False}])
def test_bad_input(how: dict[str, Any]) -> None:
    model, x, _ = MODELS["loss in the output"]()
    with pytest.raises(InvalidInputError, match="keeps"):
        estimate(model, x, **how)
