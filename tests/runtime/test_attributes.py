"""Stages that read and change plain Python objects: run again, they find what forward found, and leave no trace."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import small_models
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.segment import Segment

WIDTH = 64
HOW = ("recompute", "segment")


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.count = 0
        self.previous: torch.Tensor | None = None
        self.seen: list[int] = []
        self.known: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.factor(x)

    def factor(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class _Counts(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.count


class _Remembers(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        found = torch.sin(self.other(x))
        before, self.previous = self.previous, found.detach()
        return found if before is None else found * before


class _Collects(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        self.seen.append(1)
        self.known["calls"] = self.known.get("calls", 0) + 2
        return len(self.seen) + self.known["calls"]


class _DrawsInPython(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        return random.random()


class _DrawsFromItsOwn(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand(x.shape, generator=self.generator)


class _Chain(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


STATEFUL = (_Counts, _Remembers, _Collects, _DrawsInPython, _DrawsFromItsOwn)


def made(kind: type[nn.Module], chain: type[nn.Module] = _Chain) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    return chain(kind), torch.randn(32, WIDTH)


def planned(model: nn.Module, x: torch.Tensor, how: str) -> Plan:
    profile = ckptplan.profile(model, x, menus=False)
    assert all(stage.is_glue or stage.recompute for stage in profile.stages)
    if how == "recompute":
        return small_models.plan_of(profile, ["recompute"] * len(profile.stages))
    choices = tuple(Decision("keep" if stage.is_glue else "recompute") for stage in profile.stages)
    return small_models.plan_with(profile, choices, segments=(Segment(0, 3, (Segment(0, 2),)),))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.filterwarnings("ignore:.*another path than the one profiled")  # with what it remembers
@pytest.mark.parametrize(("kind", "how"), list(zip(STATEFUL, itertools.cycle(HOW), strict=False)))
def test_gradients_are_those_of_plain_steps(kind: type[nn.Module], how: str) -> None:
    model, x = made(kind)
    wanted = [step(model, x) for _ in range(3)]
    plan = planned(*made(kind), how)
    other, x = made(kind)
    with ckptplan.apply(other, plan) as handle:
        assert all(same(step(other, x), want) for want in wanted)
        assert handle.stats().recomputed_stages == 3 * handle.stats().planned_recomputed_stages > 0
    for a, b in zip(model.layers, other.layers, strict=True):  # type: ignore[arg-type]
        assert (a.count, a.seen, a.known) == (b.count, b.seen, b.known)
        assert torch.equal(a.generator.get_state(), b.generator.get_state())
    assert random.random() == _after(kind, wanted)


class _BeginsLater(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        if not self.known:
            return 1
        self.count += 1
        self.seen.append(self.count)
        return len(self.seen) * random.random() * float(np.random.randn()) + torch.rand(1, generator=self.generator)  # noqa: NPY002


def test_a_stage_that_changes_and_draws_in_later_steps_alone() -> None:
    def steps(model: nn.Module, x: torch.Tensor) -> list[list[torch.Tensor]]:
        out = [step(model, x), step(model, x)]
        for layer in model.layers:  # type: ignore[union-attr]
            layer.known["begun"] = 1
        return [*out, step(model, x), step(model, x)]

    wanted = steps(*made(_BeginsLater))
    plan = planned(*made(_BeginsLater), "segment")
    model, x = made(_BeginsLater)
    with ckptplan.apply(model, plan):
        assert all(same(found, want) for found, want in zip(steps(model, x), wanted, strict=True))
    assert [layer.seen for layer in model.layers] == [[1, 2]] * 4  # type: ignore[union-attr]


def _after(kind: type[nn.Module], wanted: list[list[torch.Tensor]]) -> float:
    """What Python's generator gives behind as many plain steps."""
    state = random.getstate()
    model, x = made(kind)
    for _ in wanted:
        step(model, x)
    found = random.random()
    random.setstate(state)
    return found


class _Reports(_Stage):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor], sums: dict[str, Any]) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        losses.append((y**2).mean())
        sums["all"] = sums.get("all", 0) + y.mean()
        return torch.sin(y) * len(losses)


class _Reported(_Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        sums: dict[str, Any] = {}
        for layer in self.layers:
            x = layer(x, losses, sums)
        return x * (1 + sum(losses)) + sums["all"]


@pytest.mark.parametrize("how", HOW)
def test_what_a_stage_adds_to_its_callers_containers_gets_there(how: str) -> None:
    model, x = made(_Reports, _Reported)
    wanted = step(model, x)
    with ckptplan.apply(model, planned(model, x, how)):
        assert same(step(model, x), wanted)


class _Draws(_Stage):
    def forward(self, x: torch.Tensor, numbers: Iterator[float]) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * next(numbers, 1.0)


class _Drawn(_Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = iter((2.0, 3.0, 4.0, 5.0))
        for layer in self.layers:
            x = layer(x, numbers)
        return x


class _WritesInPlace(_Stage):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(32, WIDTH)

    def factor(self, x: torch.Tensor) -> Any:
        before = self.mean.clone()
        self.mean.mul_(0.5)
        return before


@pytest.mark.parametrize(("kind", "chain"), [(_Draws, _Drawn), (_WritesInPlace, _Chain)])
def test_stages_that_can_not_run_again_have_no_such_option(kind: type[nn.Module], chain: type[nn.Module]) -> None:
    model, x = made(kind, chain)
    profile = ckptplan.profile(model, x)
    assert {o.action for stage in profile.stages for o in stage.options} == {"keep", "swap"}
    plan = small_models.plan_with(profile, tuple(Decision("keep") for _ in profile.stages))
    forced = small_models.plan_of(ckptplan.profile(*made(_Counts)), ["recompute"] * len(profile.stages))
    plan = ckptplan.Plan(**{f: getattr(plan if f != "choices" else forced, f) for f in Plan.__dataclass_fields__})
    errs = r"to run again (gets a \w+iterator|writes to its tensor attribute)"
    with ckptplan.apply(model, plan, strict=True), pytest.raises(UnsupportedModelError, match=errs):
        model(x)


class _Takes(_Stage):
    def forward(self, x: torch.Tensor, numbers: Iterable[float]) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * next(iter(numbers))


class _Gives(_Chain):
    give: Callable[[list[float]], Iterable[float]] = list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x, type(self).give([k + 2.0]))
        return x


def test_a_stage_that_can_not_run_again_in_this_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(_Takes, _Gives)
    wanted = step(model, x)
    with ckptplan.apply(model, planned(model, x, "segment")) as handle:
        assert same(step(model, x), wanted)
        again = handle.stats().recomputed_stages
        assert again > 0
        assert not handle.stats().differences
        monkeypatch.setattr(_Gives, "give", iter)
        with pytest.warns(RuntimeWarning, match="is kept: .* gets a list_iterator, which its first run uses up"):
            assert same(step(model, x), wanted)
        assert same(step(model, x), wanted)  # said once
        assert handle.stats().differences == {"repeat": 2 * len(model.layers)}  # type: ignore[arg-type]
        assert handle.stats().recomputed_stages == again
        monkeypatch.setattr(_Gives, "give", list)
        assert same(step(model, x), wanted)
        assert handle.stats().recomputed_stages == 2 * again


class _KeepsOutputs(_Stage):
    def factor(self, x: torch.Tensor) -> Any:
        found = torch.sin(self.other(x))
        self.previous = found  # with its graph
        self.seen = [*self.seen[-1:], found]  # type: ignore[list-item]
        return found


@pytest.mark.parametrize("how", HOW)
def test_outputs_kept_as_attributes_hold_no_graphs(how: str) -> None:
    model, x = made(_KeepsOutputs)
    plan = planned(*made(_Counts), how)
    with ckptplan.apply(model, plan):
        model(x)
        first = model.layers[0].previous  # type: ignore[index, union-attr]
        assert first is not None
        watch = weakref.ref(first)
        del first
        for _ in range(4):
            model(x)  # nobody runs backward
        gc.collect()
        assert watch() is None


class _Meter:
    """A plain object with the step's outputs, which a stage reaches in more than one way."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: torch.Tensor | None = None

    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        return x * self.calls


class _NotesInAnObject(_Stage):
    def __init__(self) -> None:
        super().__init__()
        self.meter = _Meter()
        self.note = self.meter.note

    def factor(self, x: torch.Tensor) -> Any:
        return self.note(torch.sin(self.other(x)))


@pytest.mark.parametrize("how", HOW)
def test_an_object_with_outputs_stays_the_same_object_in_a_recompute(how: str) -> None:
    plain, x = made(_NotesInAnObject)
    model, _ = made(_NotesInAnObject)
    with ckptplan.apply(model, planned(*made(_NotesInAnObject), how)):
        for _ in range(3):
            assert same(step(model, x), step(plain, x))


def test_a_sparse_attribute_that_the_step_does_not_use_is_no_obstacle() -> None:
    model, x = made(_Counts)
    model.graph = torch.eye(WIDTH).to_sparse()  # type: ignore[assignment]
    plan = ckptplan.solve(model, budget="50%", inputs=x, time_limit_s=0.2)
    with ckptplan.apply(model, plan):
        model(x).sum().backward()
    assert model.graph.is_sparse
