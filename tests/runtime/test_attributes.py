"""Stages that read and change plain Python objects: run again, they find what forward found, and leave no trace."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from odd.harness import BATCH, WIDTH
from odd.layers import DEPTH, Around, Layer, factored, layer_of, layers_of, passing
from small_models import assert_same, plan_for, step
from torch import nn

import ckptplan
from ckptplan.core.errors import UnsupportedModelError

HOW = ("recompute", "segment")


def made(kind: Any, more: Callable[[], Any] = tuple) -> tuple[Any, torch.Tensor]:
    """Layers, which may be given more, and their input."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    odd = passing(kind, more)
    return odd.model, odd.inputs


def test_a_stage_that_changes_and_draws_in_later_steps_alone() -> None:
    def factor(m: Any) -> Any:
        if not m.known:
            return 1
        m.seen.append(len(m.seen) + 1)
        return len(m.seen) * random.random() * float(np.random.randn()) + torch.rand(1, generator=m.generator)  # noqa: NPY002

    kind = factored(factor, known=dict, seen=list, generator=lambda: torch.Generator().manual_seed(1))

    def steps(model: nn.Module, x: torch.Tensor) -> list[Any]:
        out = [step(model, x), step(model, x)]
        for layer in model.layers:  # type: ignore[union-attr]
            layer.known["begun"] = 1
        return [*out, step(model, x), step(model, x), random.random()]

    wanted = steps(*made(kind))
    plan = plan_for(*made(kind), "segment")
    model, x = made(kind)
    with ckptplan.apply(model, plan):
        assert_same(steps(model, x), wanted)
    assert [layer.seen for layer in model.layers] == [[1, 2]] * DEPTH


@pytest.mark.parametrize("how", HOW)
def test_what_a_stage_adds_to_its_callers_containers_gets_there(how: str) -> None:
    def forward(m: Any, x: torch.Tensor, losses: list[torch.Tensor], sums: dict[str, Any]) -> torch.Tensor:
        y = torch.tanh(m.linear(x))
        losses.append((y**2).mean())
        sums["all"] = sums.get("all", 0) + y.mean()
        return torch.sin(y) * len(losses)

    def reported(layers: Any, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        sums: dict[str, Any] = {}
        for layer in layers:
            x = layer(x, losses, sums)
        return x * (1 + sum(losses)) + sums["all"]

    model, x = Around(layers_of(layer_of(forward)), reported), torch.randn(BATCH, WIDTH)
    wanted = step(model, x)
    with ckptplan.apply(model, plan_for(model, x, how)):
        assert_same(step(model, x), wanted)


def from_numbers(m: Any, x: torch.Tensor, numbers: Iterable[float]) -> torch.Tensor:
    return torch.tanh(m.linear(x)) * next(iter(numbers), 1.0)


def halved(m: Any) -> torch.Tensor:
    before = m.mean.clone()
    m.mean.mul_(0.5)
    return before  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "more", "error"),
    [
        (layer_of(from_numbers), lambda: (iter((2.0, 3.0, 4.0)),), r"to run again gets a \w+iterator"),
        (factored(halved, mean=lambda: torch.ones(BATCH, WIDTH)), tuple, "to run again writes to its tensor attribute"),
    ],
)
def test_stages_that_can_not_run_again_have_no_such_option(kind: Any, more: Any, error: str) -> None:
    model, x = made(kind, more)
    profile = ckptplan.profile(model, x, menus=False)
    assert {o.action for stage in profile.stages for o in stage.options} == {"keep", "swap"}
    plan, forced = plan_for(model, x, "keep"), plan_for(*made(Layer), "recompute")
    plan = dataclasses.replace(plan, choices=forced.choices)
    with ckptplan.apply(model, plan, strict=True), pytest.raises(UnsupportedModelError, match=error):
        model(x)


def test_a_stage_that_can_not_run_again_in_this_step_is_kept() -> None:
    give: Callable[[list[float]], Any] = list

    def giving(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(layers):
            x = layer(x, give([k + 2.0]))
        return x

    model, x = Around(layers_of(layer_of(from_numbers)), giving), torch.randn(BATCH, WIDTH)
    wanted = step(model, x)
    with ckptplan.apply(model, plan_for(model, x, "segment")) as handle:
        assert_same(step(model, x), wanted)
        again = handle.stats().recomputed_stages
        assert again > 0
        assert not handle.stats().differences
        give = iter
        with pytest.warns(RuntimeWarning, match="is kept: .* gets a list_iterator, which its first run uses up"):
            assert_same(step(model, x), wanted)
        assert_same(step(model, x), wanted)  # said once
        assert handle.stats().differences == {"repeat": 2 * len(model.layers)}
        assert handle.stats().recomputed_stages == again
        give = list
        assert_same(step(model, x), wanted)
        assert handle.stats().recomputed_stages == 2 * again


@pytest.mark.parametrize("how", HOW)
def test_outputs_kept_as_attributes_hold_no_graphs(how: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        found = torch.sin(m.linear(x))
        m.previous = found  # with its graph
        m.seen = {"last": [*m.seen["last"][-1:], found]}
        return x + torch.tanh(found)

    kind = layer_of(forward, previous=lambda: None, seen=lambda: {"last": []})
    model, x = made(kind)
    with ckptplan.apply(model, plan_for(*made(kind), how)):
        model(x)
        watch = weakref.ref(model.layers[0].previous)
        for _ in range(4):
            model(x)  # nobody runs backward
        gc.collect()
        assert watch() is None


class Meter:
    """A plain object with the step's outputs, which a stage reaches in more than one way."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: torch.Tensor | None = None

    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        return x * self.calls


@pytest.mark.parametrize("how", HOW)
def test_an_object_with_outputs_stays_the_same_object_in_a_recompute(how: str) -> None:
    class Noting(Layer):
        def set_up(self) -> None:
            self.meter = Meter()
            self.note = self.meter.note

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * self.note(torch.sin(x))

    plain, x = made(Noting)
    model, _ = made(Noting)
    with ckptplan.apply(model, plan_for(*made(Noting), how)):
        for _ in range(3):
            assert_same(step(model, x), step(plain, x))


def test_a_sparse_attribute_that_the_step_does_not_use_is_no_obstacle() -> None:
    model, x = made(Layer)
    model.graph = torch.eye(WIDTH).to_sparse()
    plan = ckptplan.solve(model, budget="50%", inputs=x, time_limit_s=0.2)
    with ckptplan.apply(model, plan):
        model(x).sum().backward()
    assert model.graph.is_sparse
