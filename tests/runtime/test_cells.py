"""Python state that a stage reaches is put back for a recompute if it is its own, and otherwise it isn't recomputed."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import plan_of
from torch import nn

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.state.cells import Snapshot

WIDTH = 64


CALLS = [0]


class Counter:
    """A plain object with attributes of its own."""

    def __init__(self) -> None:
        self.inner, self.seen = [0], 0

    def next(self) -> int:
        self.seen += 1
        self.inner[0] += self.seen
        return self.inner[0]


class Stage(nn.Module):
    """Multiplies by a number that changes at every call."""

    def __init__(self, number: Callable[[Stage], float]) -> None:
        super().__init__()
        self.linear, self.counter, self.counters = nn.Linear(WIDTH, WIDTH), Counter(), [Counter()]
        self.table: dict[str, Any] = {"calls": [[0]], "last": (1, [2])}
        self.numbers, self.rates = itertools.count(1), [iter(range(1, 1000))]
        self.space = types.SimpleNamespace(calls=0)
        self.count = functools.partial(setattr, self.space, "calls")
        self.number = number
        self.notes: list[float] = []
        self.note = self.notes.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.number(self))


def of_object(stage: Stage) -> float:
    return stage.counter.next()


def of_an_object_in_a_list(stage: Stage) -> float:
    return stage.counters[0].next()


def of_nested(stage: Stage) -> float:
    stage.table["calls"][0].append(1)
    stage.table["last"][1][0] += 1
    return float(len(stage.table["calls"][0]) + stage.table["last"][1][0])


def of_iterators(stage: Stage) -> float:
    return next(stage.numbers) * next(stage.rates[0])


def of_partial(stage: Stage) -> float:
    """Of an object to which nothing can refer weakly, found through one whose attributes can't be set."""
    stage.count(stage.space.calls + 1)
    return float(stage.space.calls)


def of_global_container(stage: Stage) -> float:
    CALLS[0] += 1
    return CALLS[0] % 5


def of_bound_method(stage: Stage) -> float:
    stage.note(1.0)
    return len(stage.notes)


OWN = [of_object, of_nested, of_iterators, of_partial, of_bound_method]


def enclosed() -> Callable[[Stage], float]:
    calls = 0

    def number(stage: Stage) -> float:
        nonlocal calls
        calls += 1
        return calls

    return number


def made(number: Callable[[Stage], float]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Stage(number) for _ in range(3))), torch.randn(16, WIDTH)


def steps(model: nn.Module, x: torch.Tensor, count: int = 3) -> list[torch.Tensor]:
    found = []
    for _ in range(count):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def recomputed(model: nn.Module, x: torch.Tensor) -> Plan:
    profile = ckptplan.profile(model, x, menus=False)
    assert all(stage.is_glue or stage.recompute for stage in profile.stages), profile.notes
    return plan_of(profile, ["recompute"] * len(profile.stages))


@pytest.mark.parametrize("number", OWN)
def test_gradients_are_those_of_plain_steps(number: Callable[[Stage], float]) -> None:
    wanted = steps(*made(number))
    model, x = made(number)
    plan = recomputed(model, x)
    with ckptplan.apply(model, plan) as handle:
        found = steps(model, x)
        assert handle.stats().recomputed_stages == 18
    assert all(map(torch.equal, found, wanted))


def not_recomputed(model: nn.Module, x: torch.Tensor, **options: Any) -> str:
    """Return the notes of a profile all of whose stages can be kept or swapped alone."""
    profile = ckptplan.profile(model, x, menus=False, **options)
    assert {option.action for stage in profile.stages for option in stage.options} == {"keep", "swap"}
    return "; ".join(profile.notes)


@pytest.mark.parametrize(
    ("number", "device"), [(of_an_object_in_a_list, None), (of_global_container, "a100-80gb"), (enclosed(), None)]
)
def test_a_stage_that_changes_what_is_not_its_own_is_not_recomputed(
    number: Callable[[Stage], float], device: str | None
) -> None:
    options = {} if device is None else {"device": device}
    assert "which isn't put back for another run" in not_recomputed(*made(number), **options)


def test_nor_is_one_whose_output_is_another_each_time() -> None:
    note = not_recomputed(*made(lambda stage: next(TURNS) + 1.0))
    assert "0 and its like" in note
    assert "global variable" in note


class Keeps(Stage):
    """Keeps a graph in a list in a dictionary, which the loss has no part of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.table = {"last": [y * 3.0]}
        return y * 2.0


def test_what_a_stage_keeps_holds_no_graphs_of_earlier_steps() -> None:
    model, x = nn.Sequential(Keeps(one), Keeps(one)), torch.randn(16, WIDTH)
    kept = []
    with ckptplan.apply(model, recomputed(model, x)):
        for _ in range(4):
            model(x).sum().backward()
            kept.append(weakref.ref(model[0].table["last"][0]))
    gc.collect()
    assert [ref() is not None for ref in kept] == [False, False, False, True]


SCALE = 1.0


class ScalesGlobally(Stage):
    """Takes back what it changes behind the last tensor that it saves, where a recompute has ended."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global SCALE
        SCALE = 2.0
        y = super().forward(x) * SCALE
        SCALE = 1.0
        return y


class SetsAFlag(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        y = super().forward(x) * 2.0
        torch.use_deterministic_algorithms(False)
        return y


@pytest.mark.parametrize(
    ("kind", "what"), [(ScalesGlobally, "test_cells.SCALE"), (SetsAFlag, "deterministic algorithms")]
)
def test_a_stage_that_takes_back_too_late_is_not_recomputed(kind: type[Stage], what: str) -> None:
    profile = ckptplan.profile(nn.Sequential(*(kind(one) for _ in range(3))), torch.randn(16, WIDTH))
    assert {option.action for stage in profile.stages for option in stage.options} == {"keep", "swap"}
    assert any(f"{what} and takes that back when a recompute has ended already" in note for note in profile.notes)
    assert SCALE == 1.0
    assert not torch.are_deterministic_algorithms_enabled()


def one(stage: Stage) -> float:
    return 1.0


def hooked(model: nn.Module) -> list[torch.Tensor]:
    """Have hooks of modules in the stages fill a list, as those that collect features or statistics do."""
    seen: list[torch.Tensor] = []
    for stage in model:  # type: ignore[attr-defined]
        stage.linear.register_forward_hook(lambda module, args, output: seen.append(output.detach().abs().mean()))
    return seen


def hooked_steps(model: nn.Module, x: torch.Tensor, seen: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for _ in range(4):
        model.zero_grad()
        loss = model(x).square().mean()
        found.append(torch.stack(seen))
        loss = loss / torch.stack(seen).sum()
        seen.clear()
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("first", ["hooks", "plan"])
def test_what_hooks_inside_a_stage_enclose(first: str) -> None:
    plain, x = made(one)
    wanted = hooked_steps(plain, x, hooked(plain))
    model, _ = made(one)
    seen = hooked(model) if first == "hooks" else []
    with ckptplan.apply(model, recomputed(model, x)) as handle:
        found = hooked_steps(model, x, seen if first == "hooks" else hooked(model))
        assert handle.stats().recomputed_stages == 12
    assert all(map(torch.equal, found, wanted))


SCALES = [torch.ones(WIDTH), torch.full((WIDTH,), 0.5)]


TURNS = (i % 2 for i in itertools.count())
"""Goes on where nothing can put it back."""


def of_global_tensors(stage: Stage) -> Any:
    return SCALES[next(TURNS)]


def test_each_stage_is_tried_though_others_run_the_same_operations() -> None:
    torch.manual_seed(0)
    others = [Stage(lambda stage: SCALES[0]) for _ in range(2)]  # type: ignore[arg-type, return-value]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *others, Stage(of_global_tensors))
    profile = ckptplan.profile(model, torch.randn(16, WIDTH), menus=False)
    assert len({stage.kind for stage in profile.stages if stage.name in "123"}) == 1
    assert any("global variable" in note for note in profile.notes)
    assert profile.stages[-2 if profile.stages[-1].is_glue else -1].recompute is None


def test_what_is_put_back_are_the_very_objects() -> None:
    class Shared(nn.Module):
        names = ["a"]  # noqa: RUF012 - of the class

        def __init__(self, values: list[int]) -> None:
            super().__init__()
            self.values, self.table = values, collections.OrderedDict(x=1)

    values = [1, 2]
    first, second = Shared(values), Shared(values)
    snapshot = Snapshot([first, second], deep=True)
    values.append(3)
    first.table["y"] = 2
    first.table.move_to_end("x")
    Shared.names.append("b")
    Shared.later = 1  # type: ignore[attr-defined]
    second.values = [4]
    back = snapshot.put()
    assert (values, list(first.table.items()), Shared.names) == ([1, 2], [("x", 1)], ["a"])
    assert first.values is second.values is values
    assert not hasattr(Shared, "later")
    back()
    assert (values, list(first.table), Shared.names, second.values) == ([1, 2, 3], ["y", "x"], ["a", "b"], [4])
    assert Shared.later == 1  # type: ignore[attr-defined]
    del Shared.later  # type: ignore[attr-defined]


def test_a_parent_is_looked_at_without_its_other_children() -> None:
    parent = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parent.calls = 0  # type: ignore[assignment]
    parent[0].above = [parent]  # type: ignore[assignment, union-attr]
    snapshot = Snapshot([parent[0]], deep=True)  # type: ignore[list-item]
    assert snapshot.modules == [parent[0], parent]
    parent.calls = 1  # type: ignore[assignment]
    back = snapshot.put()
    assert parent.calls == 0
    back()
    assert parent.calls == 1
