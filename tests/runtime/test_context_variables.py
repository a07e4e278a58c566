"""Context variables in which stages collect: a recompute neither holds what is in them nor adds to it."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import WAYS, run_again
from odd.harness import WIDTH
from odd.layers import DEPTH, layer_of, layers_of
from small_models import assert_same, gradients
from torch import nn

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.state import variables

STAGES = [str(i) for i in range(DEPTH)]
SEEN: contextvars.ContextVar[Any] = contextvars.ContextVar("SEEN", default=None)
Collect = Callable[[Any, torch.Tensor], object]


@dataclasses.dataclass
class Found:
    states: list[torch.Tensor] = dataclasses.field(default_factory=list)


COLLECTORS: dict[str, tuple[Callable[[], Any], Collect]] = {
    "list": (list, lambda c, x: c.append(x)),
    "dict of lists": (lambda: {"a": [], "b": []}, lambda c, x: c["b"].append(x)),
    "default dict": (lambda: collections.defaultdict(list), lambda c, x: c["a"].append((x, 1))),
    "deque": (collections.deque, lambda c, x: c.append(x)),
    "dataclass": (Found, lambda c, x: c.states.append(x)),
    "tuple": (tuple, lambda c, x: SEEN.set((*c, x))),
}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Found):
        return value.states
    items = value.values() if isinstance(value, dict) else value if not isinstance(value, int) else ()
    return [t for item in items for t in leaves(item)]


def model_of(collect: Collect, given: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> nn.Sequential:
    """Stages whose input is `given`, and which collect their outputs."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(m.linear(given(x)))
        collect(SEEN.get(), out * 2)
        return out.sin()

    torch.manual_seed(0)
    return nn.Sequential(*layers_of(layer_of(forward)))


def forward(model: nn.Module, start: Any) -> tuple[torch.Tensor, Any]:
    token = SEEN.set(start)
    out = model(torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH))
    found = SEEN.get()
    SEEN.reset(token)
    return out, found


def step(model: nn.Module, start: Any, watched: list[Any] | None = None, *, stays: bool = False) -> dict[str, Any]:
    """The gradients of a step whose loss reads what was collected, or in which that is gone before backward."""
    model.zero_grad()
    out, found = forward(model, start)
    count = len(leaves(found))
    assert count >= DEPTH - 1
    loss = out.sum() + sum(t.square().sum() for t in leaves(found) if stays)
    if not stays and watched is not None:
        watched += [weakref.ref(t) for t in leaves(found)]
        gc.disable()
        del found, start
        assert not any(ref() is not None for ref in watched)
        gc.enable()
        watched.clear()
    loss.backward()
    if stays:
        assert len(leaves(found)) == count, "a recompute has added to it"
    return gradients(model)


@pytest.mark.parametrize(("kind", "plan"), [(kind, WAYS[i % 3]) for i, kind in enumerate(COLLECTORS)])
def test_collected_tensors(kind: str, plan: str) -> None:
    start, collect = COLLECTORS[kind]
    model = model_of(collect)
    expected = {stays: step(model, start(), stays=stays) for stays in (True, False)}
    with run_again(model, plan, STAGES) as controller:
        assert_same(step(model, start(), stays=True), expected[True])
        assert_same(step(model, start(), []), expected[False])
    assert controller.counters.recomputed_stages >= 2 * DEPTH


@pytest.mark.parametrize(("kind", "plan"), [("list", "segment"), ("dataclass", "segment"), ("tuple", "recompute")])
def test_tensors_collected_between_stages(kind: str, plan: str) -> None:
    """As by hooks of the blocks around them: a segment holds the outputs of none of its stages."""
    start, collect = COLLECTORS[kind]
    model = model_of(lambda c, x: None)
    variables._collected.clear()
    watched: list[weakref.ref[torch.Tensor]] = []

    def collecting(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        if plan == "segment":
            watched.append(weakref.ref(out))
        collect(SEEN.get(), out)

    for stage in model[:-1]:
        stage.register_forward_hook(collecting)
    expected = step(model, start())
    watched.clear()
    with run_again(model, plan, STAGES):
        for _ in range(2):  # also in the pass in which the place is found
            assert_same(step(model, start(), watched if plan == "segment" else None), expected)


def test_given_tensors() -> None:
    """Stages read them beside a list in which they collect, and all that is gone when they run again."""
    model = model_of(lambda c, x: c["seen"].append(x), lambda x: x * SEEN.get()["scale"][0])
    scale = torch.full((WIDTH,), 1.5)
    expected = step(model, {"scale": [scale.clone()], "seen": []})
    model.zero_grad()
    with run_again(model, "segment", STAGES):
        given = {"scale": [scale.clone()], "seen": []}
        out, _ = forward(model, given)
        given.clear()
        out.sum().backward()
    assert_same(gradients(model), expected)


def test_stages_that_read_what_was_collected() -> None:
    """As long as it is there; afterwards that is an error rather than another result."""
    model = model_of(lambda c, x: c.append(x), lambda x: x + SEEN.get()[-1] if SEEN.get() else x)
    expected = step(model, [], stays=True)
    with run_again(model, "recompute", STAGES):
        assert_same(step(model, [], stays=True), expected)
        out, found = forward(model, [])
        del found
        with pytest.raises(UnsupportedModelError, match="collected in a context variable"):
            out.sum().backward()
