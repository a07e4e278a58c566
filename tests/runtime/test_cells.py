"""Python state that a stage reaches is put back for a recompute if it is its own, and otherwise it isn't recomputed."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import plan_of
from torch import nn

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.state.cells import Contents, Snapshot
from ckptplan.state.restore import restored

WIDTH = 64
COUNT = 0
CALLS = [0]
TABLE = {"calls": [0]}


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
        self.queue = collections.deque([1.0, 2.0, 3.0])
        self.array = np.zeros(3)
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


def of_what_an_object_holds(stage: Stage) -> float:
    stage.counter.inner[0] += 1
    return stage.counter.inner[0]


def of_an_object_in_a_list(stage: Stage) -> float:
    return stage.counters[0].next()


def of_nested(stage: Stage) -> float:
    stage.table["calls"][0].append(1)
    stage.table["last"][1][0] += 1
    return float(len(stage.table["calls"][0]) + stage.table["last"][1][0])


def of_queue(stage: Stage) -> float:
    stage.queue.rotate()
    return stage.queue[0]


def of_array(stage: Stage) -> float:
    stage.array += 0.5
    return float(stage.array.sum())


def of_iterators(stage: Stage) -> float:
    return next(stage.numbers) * next(stage.rates[0])


def of_partial(stage: Stage) -> float:
    """Of an object to which nothing can refer weakly, found through one whose attributes can't be set."""
    stage.count(stage.space.calls + 1)
    return float(stage.space.calls)


def of_global(stage: Stage) -> float:
    global COUNT
    COUNT += 1
    return COUNT


def of_global_container(stage: Stage) -> float:
    CALLS[0] += 1
    return CALLS[0] % 5


def of_what_a_global_container_holds(stage: Stage) -> float:
    TABLE["calls"][0] += 1
    return TABLE["calls"][0] % 5


def of_bound_method(stage: Stage) -> float:
    stage.note(1.0)
    return len(stage.notes)


OWN = [of_object, of_what_an_object_holds, of_nested, of_queue, of_array, of_iterators, of_partial, of_bound_method]
ELSEWHERE = [of_an_object_in_a_list, of_global, of_global_container, of_what_a_global_container_holds]


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


def steps(model: nn.Module, x: torch.Tensor, count: int = 6) -> list[torch.Tensor]:
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
        assert handle.stats().recomputed_stages == 36
    assert all(map(torch.equal, found, wanted))


def not_recomputed(model: nn.Module, x: torch.Tensor, **options: Any) -> str:
    """Return the notes of a profile all of whose stages can be kept or swapped alone."""
    profile = ckptplan.profile(model, x, menus=False, **options)
    assert {option.action for stage in profile.stages for option in stage.options} == {"keep", "swap"}
    return "; ".join(profile.notes)


@pytest.mark.parametrize("device", [None, "a100-80gb"])
@pytest.mark.parametrize("number", [*ELSEWHERE, enclosed()])
def test_a_stage_that_changes_what_is_not_its_own_is_not_recomputed(
    number: Callable[[Stage], float], device: str | None
) -> None:
    options = {} if device is None else {"device": device}
    assert "which isn't put back for another run" in not_recomputed(*made(number), **options)


def test_nor_is_one_whose_output_is_another_each_time() -> None:
    note = not_recomputed(*made(lambda stage: next(TURNS) + 1.0))
    assert "0 and its like" in note
    assert "global variable" in note


class Later(Stage):
    """Changes what lies in a dictionary in a dictionary, from a step on that isn't checked, and saves nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table["steps"] = self.table.get("steps", 0) + 1
        if self.table["steps"] in (5, 7):
            self.table["calls"][0][0] += 1
        return torch.tanh(self.linear(x)) * (1 + self.table["calls"][0][0])


def test_what_begins_to_change_in_a_later_step() -> None:
    def trained(model: nn.Module) -> list[torch.Tensor]:
        return steps(model, x, count=8)

    torch.manual_seed(0)
    model, x = nn.Sequential(Later(one), Later(one)), torch.randn(16, WIDTH)
    other = copy.deepcopy(model)
    wanted = trained(model)
    with ckptplan.apply(other, recomputed(other, x)):
        assert all(map(torch.equal, trained(other), wanted))


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


class Numbered(nn.Module):
    """Tells its stages by an object that all share which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.space = types.SimpleNamespace(number=0)
        self.stages = nn.ModuleList(Stage(lambda stage: self.space.number) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, stage in enumerate(self.stages):
            self.space.number = i + 1
            x = stage(x)
        return x


def test_nor_is_one_that_reads_what_others_change_before_its_backward() -> None:
    torch.manual_seed(0)
    profile = ckptplan.profile(Numbered(), torch.randn(16, WIDTH), menus=False)
    can = {stage.name: stage.recompute is not None for stage in profile.stages if not stage.is_glue}
    assert can == {"stages.0": False, "stages.1": False, "stages.2": True}


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


def test_a_recompute_takes_its_own_changes_back_where_they_were_reset() -> None:
    class Toggles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.on, self.seen = nn.Linear(WIDTH, WIDTH), False, [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.on, self.seen[0] = not self.on, self.seen[0] + 1
            return x + torch.tanh(self.linear(x) * (2.0 if self.on else 3.0))

    model, x = nn.Sequential(Toggles(), Toggles()), torch.randn(16, WIDTH)
    with ckptplan.apply(model, recomputed(model, x), check="off"):
        loss = model(x).square().mean()
        for stage in model:
            stage.on, stage.seen[0] = False, 0
        loss.backward()
    assert [(stage.on, stage.seen) for stage in model] == [(False, [0])] * 2


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


def test_a_place_that_a_property_hides_is_no_attribute() -> None:
    class Slotted:
        __slots__ = ("value",)

    class Computed(Slotted):
        @property
        def value(self) -> list[int]:  # type: ignore[override]
            return []

    stage = nn.Linear(2, 2)
    stage.held = Computed()  # type: ignore[assignment]
    assert Contents.of([stage]).differences(Contents.of([stage])) == []
    Snapshot([stage], deep=True).put()()


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


def test_profiling_leaves_no_names() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(WIDTH))
                self.register_buffer("shift", torch.zeros(WIDTH))
                self.more = nn.Linear(WIDTH, WIDTH)
            return self.more(self.linear(x) * self.scale + self.shift)

    model = nn.Sequential(Late(), Late())
    ckptplan.profile(model, torch.randn(4, WIDTH))
    assert [set(m.__dict__) for m in model] == [set(nn.Module().__dict__)] * 2
    assert [list(m.state_dict()) for m in model] == [["linear.weight", "linear.bias"]] * 2


def test_names_that_a_run_registers_are_gone_before_the_next() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with restored(model) as rewind:
        model[0].register_buffer("late", torch.zeros(1))
        rewind()
        assert not model[0]._buffers
