"""Steps whose forward runs a backward of its own: penalties, forces, Hessian products, inner loops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.observe.measure import held_tensors, peak_above_start, unique_bytes

WIDTH = 64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, WIDTH, generator=GENERATOR)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.b(torch.sigmoid(self.a(x))))


def layers(n: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(n)), nn.Linear(WIDTH, 4))


Made = tuple[nn.Module, Callable[[], Tensor]]
"""A model and its step."""


def of_weights() -> Made:
    model = layers()

    def step() -> Tensor:
        loss = model(X).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 1e-2 * sum((g.square().sum() for g in found), torch.zeros(()))

    return model, step


def hessian_product() -> Made:
    model = layers()

    def step() -> Tensor:
        parameters = list(model.parameters())
        found = torch.autograd.grad(model(X).square().mean(), parameters, create_graph=True)
        return sum((g.sum() for g in found), torch.zeros(()))

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


class Energy(nn.Module):
    """Forces are taken within the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = h = x.detach().requires_grad_()
        for block in self.blocks:
            h = block(h)
        energy = self.out(h).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return 1e-6 * energy.square() + forces.square().mean()


def forces() -> Made:
    model = Energy()
    return model, lambda: model(X)


def inner_loop(*, second_order: bool) -> Made:
    model = layers()

    def step() -> Tensor:
        weights = dict(model.named_parameters())
        loss = functional_call(model, weights, (X[:24],)).square().mean()
        found = torch.autograd.grad(loss, list(weights.values()), create_graph=second_order)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
        result: Tensor = functional_call(model, fast, (X[24:],)).square().mean()
        return result

    return model, step


MADE: dict[str, Callable[[], Made]] = {
    "of weights": of_weights,
    "Hessian product": hessian_product,
    "critic": critic,
    "forces": forces,
    "inner loop": lambda: inner_loop(second_order=True),
    "inner loop of first order": lambda: inner_loop(second_order=False),
}


@pytest.mark.parametrize("share", ["100%", "0%"])
@pytest.mark.parametrize("name", MADE)
def test_a_step_that_differentiates_in_forward_is_planned(name: str, share: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, step = MADE[name]()
    profile = ckptplan.profile(model, step=step)
    plan = ckptplan.solve(profile, budget=share, time_limit_s=1)
    plan.save(tmp_path / "plan.json")
    plan = ckptplan.Plan.load(tmp_path / "plan.json")
    assert plan.differentiated
    assert plan.differentiated == profile.differentiated
    assert all(c.action == "keep" for n, c in plan.decisions.items() if n in plan.differentiated)
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
    assert profile.differentiated == tuple(f"critic.{i}" for i in range(6))
    options = {stage.name: len(stage.options) for stage in profile.stages if not stage.is_glue}
    assert all(options[name] == 1 for name in profile.differentiated)
    assert all(options[f"{name}#2"] > 3 for name in profile.differentiated[1:])
    assert all(options[f"generator.{i}"] > 2 for i in range(5))
    assert any("kept: critic.0" in note and "forward itself runs backward" in note for note in profile.notes)


def test_gradients_that_a_step_leaves_itself_are_refused() -> None:
    model = layers()

    def step() -> Tensor:
        loss: Tensor = model(X).square().mean()
        loss.backward()
        return loss

    with pytest.raises(UnsupportedModelError, match=r"step= has run backward already.*return the loss without"):
        ckptplan.profile(model, step=step)


def test_an_estimate_counts_the_graph_of_the_gradient() -> None:
    model, step = of_weights()
    plain = layers()
    single = ckptplan.estimate(plain, step=lambda: plain(X).square().mean())
    double = ckptplan.estimate(model, step=step)
    assert double.peak_bytes > 1.3 * single.peak_bytes
