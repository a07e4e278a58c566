"""Steps whose forward runs a backward of its own: penalties, forces, Hessian products, inner loops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from toy_modules import Lambda, Residual, times

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.stage import Differentiated
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start

WIDTH = 64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, WIDTH, generator=GENERATOR)


def block() -> Residual:
    return Residual(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def layers(n: int = 2) -> nn.Sequential:
    return nn.Sequential(*times(n, block), nn.Linear(WIDTH, 4))


Made = tuple[nn.Module, Callable[[], Tensor]]
"""A model and its step."""


def of_weights() -> Made:
    model = layers()

    def step() -> Tensor:
        loss = model(X).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 1e-2 * sum((g.square().sum() for g in found), torch.zeros(()))

    return model, step


def critic() -> Made:
    """A generator's stages have all options; of the critic's three calls one is differentiated."""
    model = nn.ModuleDict({"generator": layers(), "critic": nn.Sequential(nn.Linear(4, WIDTH), *layers())})

    def step() -> Tensor:
        made, real = model["generator"](X), X[:, :4]
        mixed = (0.3 * made + 0.7 * real).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model["critic"](mixed).sum(), mixed, create_graph=True)
        score: Tensor = model["critic"](made).mean() - model["critic"](real).mean()
        return score + 10 * (slope.norm(2, 1) - 1).square().mean()

    return model, step


def with_forces(model: Any, x: Tensor) -> Tensor:
    """Forces are taken within the model's own forward."""
    x = x.detach().requires_grad_()
    energy = model.out(model.blocks(x)).sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    return 1e-6 * energy.square() + forces.square().mean()


def forces() -> Made:
    model = Lambda(with_forces, blocks=nn.Sequential(*times(3, block)), out=nn.Linear(WIDTH, 1))
    return model, lambda: model(X)


def inner_loop() -> Made:
    model = layers()

    def step() -> Tensor:
        weights = dict(model.named_parameters())
        loss = functional_call(model, weights, (X[:24],)).square().mean()
        found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
        result: Tensor = functional_call(model, fast, (X[24:],)).square().mean()
        return result

    return model, step


MADE: dict[str, Callable[[], Made]] = {
    "of weights": of_weights,
    "critic": critic,
    "forces": forces,
    "inner loop": inner_loop,
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.long("critic")
def test_a_step_that_differentiates_in_forward_is_planned(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, step = MADE[name]()
    profile = ckptplan.profile(model, step=step)
    plan = ckptplan.solve(profile, budget="0%", time_limit_s=0.3)
    plan.save(tmp_path / "plan.json")
    plan = ckptplan.Plan.load(tmp_path / "plan.json")
    assert plan.differentiated
    assert plan.differentiated == profile.differentiated
    assert all(plan.decisions[each.stage].action == "keep" for each in plan.differentiated)
    step().backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ckptplan.apply(model, plan) as handle:
            for _ in range(2):
                model.zero_grad()
                before = unique_bytes([*held_tensors(model), X])
                peak = before + peak_above_start(lambda: step().backward())
            assert not handle.stats().differences
    assert plan.peak_bytes * 0.98 < peak <= plan.peak_bytes
    for n, p in model.named_parameters():
        assert (p.grad is None) == (want[n] is None)
        assert p.grad is None or torch.equal(p.grad, want[n]), n  # type: ignore[arg-type]


def test_what_is_not_differentiated_has_all_options() -> None:
    model, step = critic()
    profile = ckptplan.profile(model, step=step)
    assert profile.differentiated == tuple(Differentiated(f"critic.{i}", 0, 1) for i in range(4))
    options = {stage.name: len(stage.options) for stage in profile.stages if not stage.is_glue}
    assert all(options[each.stage] == 1 for each in profile.differentiated)
    assert all(options[f"{each.stage}#2"] > 3 for each in profile.differentiated[1:])
    assert all(options[f"generator.{i}"] > 2 for i in range(3))
    assert any("kept: critic.0" in note and "forward itself runs backward" in note for note in profile.notes)


def step_peak(model: nn.Module, step: Callable[[], object]) -> int:
    model.zero_grad()
    before = unique_bytes([*held_tensors(model), X])
    return before + peak_above_start(step)


@pytest.mark.parametrize(
    ("kind", "what"), [("critic", "two forwards"), ("forces", "graph kept"), ("critic", "graph made")]
)
@pytest.mark.long(but=["forces-graph kept"])
def test_backwards_beyond_those_planned_are_noticed(kind: str, what: str) -> None:
    """Also where all stages are differentiated."""
    model, step = MADE[kind]()
    plan = ckptplan.solve(model, step=step, budget="50%", time_limit_s=0.3)

    def one() -> None:
        if what == "two forwards":
            (step() + step()).backward()
        elif what == "graph kept":
            step().backward(retain_graph=True)
        else:
            torch.autograd.grad(step(), list(model.parameters()), create_graph=True)

    with ckptplan.apply(model, plan) as handle:
        step().backward()
        assert not handle.stats().differences
        with pytest.warns(RuntimeWarning, match="the peak may exceed the budget"):
            peak = step_peak(model, one)
        assert set(handle.stats().differences) & {"forwards", "graph", "calls"}
    assert peak > plan.budget_bytes


def test_a_graph_that_only_later_steps_make_is_noticed() -> None:
    """An inner loop of first order becomes one of second order, as MAML++ does."""
    torch.manual_seed(0)
    model = layers()
    orders = {"second": False}

    def step() -> Tensor:
        loss = model(X[:24]).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=orders["second"])
        weights = dict(zip(dict(model.named_parameters()), found, strict=True))
        fast = {name: p - 0.1 * weights[name] for name, p in model.named_parameters()}
        result: Tensor = functional_call(model, fast, (X[24:],)).square().mean()
        return result

    plan = ckptplan.solve(model, step=step, budget="50%", time_limit_s=0.3)
    assert {(each.plain, each.creating) for each in plan.differentiated} == {(1, 0)}
    with ckptplan.apply(model, plan) as handle:
        assert step_peak(model, lambda: step().backward()) <= plan.budget_bytes
        assert not handle.stats().differences
        orders["second"] = True
        with pytest.warns(RuntimeWarning, match="makes a graph of its own"):
            step_peak(model, lambda: step().backward())


@pytest.mark.parametrize("order", ["first", "mid"])
@pytest.mark.long
def test_a_backward_in_forward_that_was_not_planned_is_noticed_and_ends_with_its_step(order: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": layers(), "critic": nn.Sequential(nn.Linear(4, WIDTH), *layers())})
    penalized = {"now": False}

    def slope() -> Tensor:
        mixed = X[:, :4].clone().requires_grad_()
        (found,) = torch.autograd.grad(model["critic"](mixed).sum(), mixed)
        return found

    def step() -> Tensor:
        extra = slope().mean() if penalized["now"] and order == "first" else 0.0
        made = model["generator"](X)
        score: Tensor = model["critic"](made).mean()
        extra += slope().mean() if penalized["now"] and order == "mid" else 0.0
        return score - model["critic"](X[:, :4]).mean() + extra

    plan = ckptplan.solve(model, step=step, budget="0%", time_limit_s=0.3)
    with ckptplan.apply(model, plan) as handle:
        step().backward()
        penalized["now"] = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is called after a backward that hasn't come to")
            peak = step_peak(model, lambda: step().backward())
        assert handle.stats().differences if order == "mid" else peak <= plan.budget_bytes
        penalized["now"] = False
        seen = dict(handle.stats().differences)
        assert step_peak(model, lambda: step().backward()) <= plan.budget_bytes
        assert handle.stats().differences == seen


def test_a_step_that_updates_is_refused_and_changes_nothing() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> Tensor:
        loss: Tensor = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedModelError, match="step= has run backward already"):
        ckptplan.profile(model, step=step)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(type(v) is Tensor and not v.is_meta for state in optimizer.state.values() for v in state.values())
