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
from by_hand import run_again
from small_models import assert_same, gradients
from torch import nn

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.state import variables

DEPTH, WIDTH = 3, 8
STAGES = [str(i) for i in range(DEPTH)]
SEEN: contextvars.ContextVar[Any] = contextvars.ContextVar("SEEN", default=None)
Collect = Callable[[Any, torch.Tensor], None]


@dataclasses.dataclass
class Found:
    states: list[torch.Tensor] = dataclasses.field(default_factory=list)


def _longer(value: tuple[torch.Tensor, ...], new: torch.Tensor) -> None:
    SEEN.set((*value, new))


COLLECTORS: dict[str, tuple[Callable[[], Any], Collect]] = {
    "list": (list, lambda c, x: c.append(x)),
    "dict of lists": (lambda: {"a": [], "b": []}, lambda c, x: c["b"].append(x)),
    "default dict": (lambda: collections.defaultdict(list), lambda c, x: c["a"].append((x, 1))),
    "deque": (collections.deque, lambda c, x: c.append(x)),
    "dataclass": (Found, lambda c, x: c.states.append(x)),
    "tuple": (tuple, _longer),
}


class Stage(nn.Module):
    def __init__(self, collect: Collect) -> None:
        super().__init__()
        self.linear, self.collect = nn.Linear(WIDTH, WIDTH), collect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.linear(x))
        if (value := SEEN.get()) is not None:
            self.collect(value, out * 2)
        return out.sin()


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Found):
        return value.states
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in (value if isinstance(value, collections.deque) else items) for t in leaves(item)]


def loss_of(out: torch.Tensor, found: Any, read: bool) -> torch.Tensor:
    return out.sum() + sum(t.square().sum() for t in leaves(found) if read)


def forward(model: nn.Module, start: Any) -> tuple[torch.Tensor, Any]:
    token = SEEN.set(start)
    out = model(torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH))
    found = SEEN.get()
    SEEN.reset(token)
    return out, found


@pytest.mark.parametrize("kind", COLLECTORS)
def test_collected_tensors(kind: str) -> None:
    start, collect = COLLECTORS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(*(Stage(collect) for _ in range(DEPTH)))
    expected = {}
    for held in (True, False):
        model.zero_grad()
        loss_of(*forward(model, start()), held).backward()
        expected[held] = gradients(model)
    plan = ("recompute", "selective", "segment")[list(COLLECTORS).index(kind) % 3]
    with run_again(model, plan, STAGES) as controller:
        for held in (True, False):
            model.zero_grad()
            out, found = forward(model, start())
            assert len(leaves(found)) == DEPTH
            loss = loss_of(out, found, held)
            if not held:
                watched = [weakref.ref(t) for t in leaves(found)]
                gc.disable()
                del found
                assert not any(ref() is not None for ref in watched)
                gc.enable()
            loss.backward()
            if held:
                assert len(leaves(found)) == DEPTH, "a recompute has added to it"
            assert_same(gradients(model), expected[held])
    assert controller.counters.recomputed_stages >= 2 * DEPTH


@pytest.mark.parametrize(("kind", "plan"), [("list", "segment"), ("dataclass", "segment"), ("tuple", "recompute")])
def test_tensors_collected_between_stages(kind: str, plan: str) -> None:
    """As by hooks of the blocks around them: a segment holds the outputs of none of its stages."""
    start, collect = COLLECTORS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(*(Stage(lambda c, x: None) for _ in range(DEPTH)))
    variables._collected.clear()

    def collecting(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        watched.append(weakref.ref(out))
        collect(SEEN.get(), out)

    for stage in model[:-1]:  # type: ignore[index]
        stage.register_forward_hook(collecting)
    watched: list[weakref.ref[torch.Tensor]] = []
    out, found = forward(model, start())
    out.sum().backward()
    expected = gradients(model)
    with run_again(model, plan, STAGES):
        for _ in range(2):  # also in the pass in which the place is found
            model.zero_grad()
            watched.clear()
            out, found = forward(model, start())
            assert len(leaves(found)) == DEPTH - 1
            gc.disable()
            del found
            assert plan != "segment" or not any(ref() is not None for ref in watched)
            gc.enable()
            out.sum().backward()
            assert_same(gradients(model), expected)


def test_given_tensors() -> None:
    """Stages read them beside a list in which they collect, and all that is gone when they run again."""

    class Reading(Stage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = SEEN.get()
            given["seen"].append(x)
            return super().forward(x) * given["scale"][0]

    torch.manual_seed(0)
    model = nn.Sequential(*(Reading(lambda c, x: None) for _ in range(DEPTH)))
    scale = torch.full((WIDTH,), 1.5)
    forward(model, {"scale": [scale.clone()], "seen": []})[0].sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with run_again(model, "segment", STAGES):
        given = {"scale": [scale.clone()], "seen": []}
        out, _ = forward(model, given)
        given.clear()
        out.sum().backward()
    assert_same(gradients(model), expected)


def test_stages_that_read_what_was_collected() -> None:
    """As long as it is there; afterwards that is an error rather than another result."""

    class Reading(Stage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = SEEN.get()
            return super().forward(x + before[-1] if before else x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Reading(lambda c, x: c.append(x)) for _ in range(DEPTH)))
    forward(model, [])[0].sum().backward()
    expected = gradients(model)
    with run_again(model, "recompute", STAGES):
        model.zero_grad()
        out, found = forward(model, [])
        out.sum().backward()
        assert_same(gradients(model), expected)
        out, found = forward(model, [])
        del found
        with pytest.raises(UnsupportedModelError, match="collected in a context variable"):
            out.sum().backward()
