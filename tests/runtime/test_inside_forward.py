"""Forwards that do more than compute: they run backward, write to parameters or arguments, call themselves."""

from __future__ import annotations

import secrets
import types
from typing import Any

import pytest
import torch
from made_plans import plan_of
from torch import nn
from torch.nn.utils import parametrize

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.profile import Profile

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Sloped(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        (slope,) = torch.autograd.grad(torch.sin(y).sum(), y, create_graph=True)
        return x + y * slope


class Shrinking(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.mul_(0.9)
        return super().forward(x)


class Reading(Sloped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.mean().item()


class Chain(nn.Module):
    """Layers whose first has one kind and whose others are plain."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def profiled(model: nn.Module) -> Profile:
    return ckptplan.profile(model, batch(), loss_fn=loss_of, menus=False)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Sloped, "runs backward inside its own forward"), (Shrinking, "forward changes its parameter 'linear.weight'")],
)
def test_such_a_stage_is_kept_or_swapped_and_no_other(kind: type[nn.Module], why: str) -> None:
    profile = profiled(Chain(kind))
    again = [stage.recompute is not None for stage in profile.stages if not stage.is_glue]
    assert again == [False, True, True]
    assert any(note.startswith(f"kept or swapped alone: layers.0: {why}") for note in profile.notes)


def test_a_parameter_written_behind_a_stage_that_read_it() -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second, third = self.layers
            second.linear.weight.data.mul_(0.9)  # type: ignore[union-attr, operator]
            x = second(first(x))
            first.linear.weight.data.mul_(0.9)  # type: ignore[union-attr, operator]
            return third(x)  # type: ignore[no-any-return]

    again = [stage.recompute is not None for stage in profiled(Model(Layer)).stages if not stage.is_glue]
    assert again == [False, True, True]


class Passing(Chain):
    """Layers with a further argument."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counter = types.SimpleNamespace(number=0)
        for layer in self.layers:
            x = layer(x, counter)
        return x


def test_an_argument_that_counts() -> None:
    class Counting(Layer):
        def forward(self, x: torch.Tensor, counter: Any) -> torch.Tensor:  # type: ignore[override]
            counter.number += 1
            return super().forward(x * counter.number)

    profile = profiled(Passing(Counting))
    assert all(stage.recompute is None for stage in profile.stages)
    assert any("layers.0, layers.1: forward changes a SimpleNamespace" in note for note in profile.notes)


def test_an_argument_that_is_read_alone() -> None:
    class Using(Layer):
        def forward(self, x: torch.Tensor, counter: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + counter.number)

    assert all(stage.recompute for stage in profiled(Passing(Using)).stages if not stage.is_glue)


def test_a_stage_that_draws_from_the_system() -> None:
    class Drawing(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            unlikely = secrets.randbelow(1 << 40) == 0  # so two runs are alike
            return super().forward(x * (2 if unlikely else 1))

    profile = profiled(Chain(Drawing))
    assert [stage.recompute is None for stage in profile.stages if not stage.is_glue] == [True, False, False]
    assert any("draws from the system's entropy" in note for note in profile.notes)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model(x)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Bounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(weight)


def cached_model() -> nn.Module:
    model = Chain(Layer)
    for layer in model.layers:
        parametrize.register_parametrization(layer.linear, "weight", Bounded())  # type: ignore[arg-type]
    return model


def test_cached_weights_of_an_earlier_call() -> None:
    model, x = cached_model(), batch()
    profile = profiled(model)

    def step() -> list[Any]:
        model.zero_grad()
        with parametrize.cached():
            loss = loss_of(model(x)) + loss_of(model(0.5 * x))
        loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = step()
    plan = plan_of(profile, ["recompute"] * len(profile.stages))
    with ckptplan.apply(model, plan) as handle:
        with pytest.warns(RuntimeWarning) as said:
            assert all(map(torch.equal, step(), wanted))
        assert sum("is kept: a Layer that is to run again takes parametrized" in str(w.message) for w in said) == 1
        assert handle.stats().differences["repeat"] == 3
        assert handle.stats().recomputed_stages == 3
    with ckptplan.apply(model, plan, strict=True), parametrize.cached():
        model(x)
        with pytest.raises(UnsupportedModelError, match=r"parametrize.cached\(\) has kept from an earlier call"):
            model(x)


def test_weights_cached_in_forward_alone() -> None:
    """A recompute makes them once, as the forward did, whether or not they are cached around it."""
    model, x = cached_model(), batch()
    profile = profiled(model)
    want = gradients(model, x)
    model.zero_grad()
    with ckptplan.apply(model, plan_of(profile, ["recompute"] * len(profile.stages))):
        with parametrize.cached():
            loss = loss_of(model(x))
        loss.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True) if p.grad is not None)


def test_verify_begins_each_step_with_the_same_parameters() -> None:
    model = Chain(Shrinking)
    profile = profiled(model)
    before = [p.clone() for p in model.parameters()]
    plan = plan_of(profile, ["swap"] * len(profile.stages))
    found = ckptplan.verify(model, plan, batch(), loss_of, repeats=1)
    assert found.gradients_equal
    assert found.within_budget
    assert all(map(torch.equal, before, model.parameters()))


def test_backward_inside_where_the_step_runs_for_real() -> None:
    with pytest.raises(UnsupportedModelError, match=r"runs backward inside .* and also reads values"):
        profiled(Chain(Reading))


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "module '0', a LazyLinear, has no shape for 'weight'"),
        (nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d()), "module '1', a LazyBatchNorm1d, has no shape"),
    ],
)
def test_lazy_modules(module: nn.Module, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        ckptplan.profile(module, torch.randn(4, 3))


def test_sparse_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedModelError, match="module '1' has a sparse buffer, 'graph'"):
        ckptplan.profile(model, torch.randn(4, 3))
