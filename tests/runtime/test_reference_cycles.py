"""Planned steps leave no tensor to Python's garbage collector, which may run long after."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from odd.harness import BATCH, WIDTH
from odd.layers import Around, layer_of, layers_of
from small_models import decided
from torch import nn

import ckptplan
from ckptplan.core.profile import Profile


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    others: Any = None


class Cache:
    """A plain object with tensors in a list, as caches of keys and values are."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.layers = [hidden, hidden.detach().clone()]


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x: x, lambda s: s),
    "tuple": (lambda x: (x, 1), lambda s: s[0]),
    "dict": (lambda x: {"x": x, "y": [x]}, lambda s: s["y"][0]),
    "dataclass": (State, lambda s: s.hidden),
    "nested objects": (lambda x: State(x, SimpleNamespace(inner=State(x))), lambda s: s.hidden),
    "object with a list": (lambda x: State(x, [x, (x, 1)]), lambda s: s.hidden),
    "object in a dict": (lambda x: {"x": x, "state": State(x)}, lambda s: s["state"].hidden),
    "cache": (Cache, lambda s: s.layers[0]),
}
ABLE = [kind for kind in KINDS if kind != "cache"]
"""Kinds of arguments with which stages can run again."""


def net(kind: str) -> Any:
    wrap, unwrap = KINDS[kind]

    def run(m: Any, state: Any) -> Any:
        x = unwrap(state)
        hidden = torch.sigmoid(m.linear(x))
        if m.fails():
            raise ValueError("as the test wants it")
        return wrap(x + m.down(hidden))

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        state = wrap(x)
        for layer in layers:
            state = layer(state)
        return unwrap(state)

    stage = layer_of(run, down=lambda: nn.Linear(WIDTH, WIDTH), fails=lambda: lambda: False)
    return Around(layers_of(stage), forward)


@functools.cache
def chain(kind: str) -> Profile:
    return ckptplan.profile(net(kind), torch.randn(BATCH, WIDTH), menus=False)


ACTIONS = ("recompute", "segment", "selective", "swap")
CASES = [("tensor", "keep"), ("cache", "swap"), ("cache", "keep"), ("nested objects", "segment"), ("tensor", "segment")]
CASES += [(kind, ACTIONS[i % len(ACTIONS)]) for i, kind in enumerate(ABLE)]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The collector is off, and none of the objects that exist already are of its youngest generation."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def new_tensors() -> list[torch.Tensor]:
    """Tensors with bytes; the check's places are tensors without."""
    tensors = [o for o in gc.get_objects(generation=0) if issubclass(type(o), torch.Tensor)]
    return [t for t in tensors if t.untyped_storage().nbytes()]


@pytest.mark.parametrize(("kind", "action"), CASES)
def test_steps_without_the_collector(kind: str, action: str, no_collector: None) -> None:
    plan = decided(chain(kind), action, op=1)  # the sigmoids
    model, x = net(kind), torch.randn(BATCH, WIDTH)
    with ckptplan.apply(model, plan, check="always") as handle:
        model(x).sum().backward()
        counted = handle.stats()
        assert (counted.recomputed_stages > 0) == (action not in ("keep", "swap"))
        gc.collect()
        for _ in range(2):
            model(x).sum().backward()
            model(x)  # a graph that no backward reads
            model.zero_grad()
        assert not new_tensors()


@pytest.mark.parametrize(
    ("kind", "action", "when"),
    [
        ("tensor", "swap", "backward"), ("nested objects", "recompute", "recompute"), ("tensor", "segment", "backward"),
        ("tensor", "selective", "recompute"), ("nested objects", "segment", "recompute"),
    ],
)  # fmt: skip
@pytest.mark.long("tensor-swap-backward", "nested objects-recompute-recompute")
def test_steps_that_fail_without_the_collector(kind: str, action: str, when: str, no_collector: None) -> None:
    plan = decided(chain(kind), action, op=1)  # the sigmoids
    model, x = net(kind), torch.randn(BATCH, WIDTH)
    failing = {"forward": 1, "recompute": 2, "backward": 0}[when]

    def step() -> None:
        calls = itertools.count(1)
        model.layers[1].fails = lambda: next(calls) == failing
        out = model(x)
        if when == "backward":
            out.register_hook(lambda gradient: 1 / 0)
        out.sum().backward()

    with ckptplan.apply(model, plan):
        model(x).sum().backward()
        gc.collect()
        for _ in range(2):
            with contextlib.suppress(ValueError, ZeroDivisionError):
                step()
            model.layers[1].fails = lambda: False
            model(x).sum().backward()  # drops what a failed backward leaves in PyTorch's queue
            model.zero_grad()
        assert not new_tensors()
