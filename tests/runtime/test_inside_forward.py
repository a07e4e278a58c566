"""Forwards that do more than compute: they run backward, write to parameters or arguments, call themselves."""

from __future__ import annotations

import secrets
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_plans import plan_of
from odd.harness import BATCH, WIDTH, loss_of
from odd.layers import Bounded, Layer, layer_of, passing
from torch import nn
from torch.nn.utils import parametrize

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.profile import Profile


def sloped(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.linear(x))
    (slope,) = torch.autograd.grad(torch.sin(y).sum(), y, create_graph=True)
    return x + y * slope


def shrinking(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.linear.weight.data.mul_(0.9)
    return Layer.forward(m, x)


def reading(m: Any, x: torch.Tensor) -> torch.Tensor:
    return sloped(m, x) * x.mean().item()


def drawing(m: Any, x: torch.Tensor) -> torch.Tensor:
    unlikely = secrets.randbelow(1 << 40) == 0  # so two runs are alike
    return Layer.forward(m, x * (2 if unlikely else 1))


def model_of(run: Callable[..., torch.Tensor] = Layer.forward) -> nn.Sequential:
    """Layers, the first of which runs so."""
    return nn.Sequential(layer_of(run)(), Layer(), Layer())


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def profiled(model: nn.Module) -> Profile:
    return ckptplan.profile(model, batch(), loss_fn=loss_of, menus=False)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (sloped, "runs backward inside its own forward"),
        (shrinking, "forward changes its parameter 'linear.weight'"),
        (drawing, "draws from the system's entropy"),
    ],
)
def test_such_a_stage_is_kept_or_swapped_and_no_other(run: Callable[..., torch.Tensor], why: str) -> None:
    profile = profiled(model_of(run))
    again = [stage.recompute is not None for stage in profile.stages if not stage.is_glue]
    assert again == [False, True, True]
    assert any(note.startswith("kept or swapped alone: 0: ") and why in note for note in profile.notes)


@pytest.mark.parametrize("counts", [True, False])
def test_an_argument_that_counts_or_is_read_alone(counts: bool) -> None:
    def forward(m: Any, x: torch.Tensor, counter: Any) -> torch.Tensor:
        counter.number += counts
        return Layer.forward(m, x + counter.number)

    profile = profiled(passing(layer_of(forward), lambda: (types.SimpleNamespace(number=0),)).model)
    assert [stage.recompute is None for stage in profile.stages if not stage.is_glue] == [counts] * 3
    assert any("forward changes a SimpleNamespace" in note for note in profile.notes) == counts


def cached_model() -> nn.Module:
    model = model_of()
    for layer in model:
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
        assert sum("is kept: a Stage that is to run again takes parametrized" in str(w.message) for w in said) == 1
        assert handle.stats().differences["repeat"] == 3
        assert handle.stats().recomputed_stages == 3
    with ckptplan.apply(model, plan, strict=True), parametrize.cached():
        model(x)
        with pytest.raises(UnsupportedModelError, match=r"parametrize.cached\(\) has kept from an earlier call"):
            model(x)


def test_verify_begins_each_step_with_the_same_parameters() -> None:
    model = model_of(shrinking)
    profile = profiled(model)
    before = [p.clone() for p in model.parameters()]
    plan = plan_of(profile, ["swap"] * len(profile.stages))
    found = ckptplan.verify(model, plan, batch(), loss_of, repeats=1)
    assert found.gradients_equal
    assert found.within_budget
    assert all(map(torch.equal, before, model.parameters()))


def test_backward_inside_where_the_step_runs_for_real() -> None:
    with pytest.raises(UnsupportedModelError, match=r"runs backward inside .* and also reads values"):
        profiled(model_of(reading))


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
