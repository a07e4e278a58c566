"""Models that people train and that planning once refused: they are planned within their budget, bitwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import assert_kept
from torch import nn
from torch.utils import _pytree as pytree
from toy_modules import Lambda, times

import ckptplan


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


class SomeAbsent(nn.Module):
    """Its lists have entries that are None, as blocks without attention have in diffusers."""

    def __init__(self, *present: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(feed_forward() if there else None for there in present)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if layer is not None:
                x = x + layer(x)
        return x


class Box:
    """A container that PyTorch's trees know, registered in the tests without keys."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


@pytest.fixture
def _registered() -> Iterator[None]:
    pytree.register_pytree_node(Box, lambda box: (list(box.tensors), None), lambda tensors, _: Box(*tensors))
    yield
    pytree._deregister_pytree_node(Box)


def box_layer(self: Any, box: Any, more: Any = None) -> Box:
    x, y = box.tensors
    return Box(x + self.f(x), y if more is None else y + more[0].tensors[0])


def boxes(model: Any, x: torch.Tensor) -> torch.Tensor:
    box = Box(x, x * 2)
    for layer in model.layers:
        box = layer(box, more=[box])
    return box.tensors[0] * box.tensors[1]


def with_leaf() -> nn.Module:
    """Frozen; a leaf that needs a gradient begins in its midst, as under adapters."""
    begun = Lambda(lambda self, x: nn.Parameter(self.a(x).detach()), a=nn.Linear(32, 32))
    return nn.Sequential(begun, nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).requires_grad_(False)


class Tagged(torch.Tensor):
    def twice(self) -> torch.Tensor:
        return self * 2


def as_subclass(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Works on its input as on one of a subclass, whose results are of it, too."""
    tagged = x.as_subclass(Tagged)
    tagged.factor = 3  # type: ignore[attr-defined]
    hidden = self.f(tagged.twice())
    assert isinstance(hidden, Tagged)
    return x + torch.Tensor.as_subclass(hidden, torch.Tensor) * tagged.factor  # type: ignore[attr-defined]


def added_to(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds to its residual stream in place, which autocast's casts allow: no layer saves the stream itself."""
    x = x + model.shift
    for layer in model.layers:
        x += layer(x)
    return x


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers that are in no list."""
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lists with absent modules": lambda: nn.Sequential(
        SomeAbsent(False, True, True), SomeAbsent(True, False), feed_forward()
    ),
    "containers registered without keys": lambda: Lambda(
        boxes, layers=times(4, lambda: Lambda(box_layer, f=feed_forward()))
    ),
    "frozen, with a leaf": lambda: nn.Sequential(with_leaf(), *times(3, feed_forward)),
    "tensors of a subclass": lambda: nn.Sequential(*times(3, lambda: Lambda(as_subclass, f=feed_forward()))),
}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long("tensors of a subclass")
def test_plans_keep_their_budgets(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(128, 32)
    profile = ckptplan.profile(model, x)
    for actions in (("keep", "recompute"), ("keep", "swap"))[: 1 if name == "tensors of a subclass" else 2]:
        plan = ckptplan.solve(profile, budget="30%", actions=actions, time_limit_s=0.2)  # type: ignore[arg-type]
        assert any(choice.action != "keep" for choice in plan.choices)
        assert_kept(model, plan, x)


def test_inputs_of_stages_that_are_written_to_later() -> None:
    torch.manual_seed(0)
    model = Lambda(added_to, shift=nn.Parameter(torch.randn(32)), layers=times(3, feed_forward))
    x = torch.randn(128, 32)
    plan = ckptplan.solve(model, budget="30%", inputs=x, amp=torch.bfloat16, time_limit_s=0.5)
    assert any("layers.2: what it is given is written to before its backward" in note for note in plan.notes)
    assert_kept(model, plan, x, amp=torch.bfloat16)


@pytest.mark.long
def test_models_in_a_container_are_planned_layer_by_layer() -> None:
    torch.manual_seed(0)
    one: nn.Module = Lambda(plain, a=nn.Linear(32, 128), b=nn.Linear(128, 128), c=nn.Linear(128, 32))
    models = nn.ModuleList([one, nn.Sequential(feed_forward(), feed_forward())])
    x = torch.randn(128, 32)
    one, other = models.children()

    def step() -> torch.Tensor:
        return (other(one(x)) + other(x)).square().mean()

    profile = ckptplan.profile(models, step=step, menus=False)
    stages = [stage.name.partition(".")[2] for stage in profile.stages if not stage.is_glue]
    assert stages == ["a", "b", "c", "0", "1", "0#2", "1#2"]
    plan = ckptplan.solve(profile, budget="30%", time_limit_s=0.5)
    assert_kept(models, plan, step=step)


def test_a_model_s_error_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    failing = Lambda(lambda _, x: x @ torch.ones(5, 3))
    with pytest.raises(ckptplan.InvalidInputError, match="cannot be multiplied"):
        ckptplan.profile(nn.Sequential(feed_forward(), failing), torch.randn(128, 32))
    assert not capfd.readouterr().err
