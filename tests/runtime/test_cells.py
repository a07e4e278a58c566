"""Python state that a stage reaches is put back for a recompute if it is its own, and otherwise it isn't recomputed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from odd.generated.parts import Plain
from odd.harness import BATCH, WIDTH
from odd.layers import Layer, counter, factored, layer_of
from small_models import assert_same, plan_for, step
from torch import nn

import ckptplan
from ckptplan.state.cells import Snapshot
from ckptplan.state.restore import kept

CALLS = [0]
COUNT = counter()
SCALES = [torch.ones(WIDTH), torch.full((WIDTH,), 0.5)]
TURNS = (i % 2 for i in itertools.count())
"""Goes on where nothing can put it back."""


def of_global_container(m: Any) -> float:
    CALLS[0] += 1
    return CALLS[0] % 5


def made(*kinds: Callable[[], nn.Module]) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds)), torch.randn(BATCH, WIDTH)


def not_recomputed(kind: Callable[[], nn.Module], **options: Any) -> str:
    """Return the notes of a profile all of whose stages can be kept or swapped alone."""
    profile = ckptplan.profile(*made(kind, kind, kind), menus=False, **options)
    assert {option.action for stage in profile.stages for option in stage.options} == {"keep", "swap"}
    return "; ".join(profile.notes)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (factored(lambda m: m.objects[0].next(), objects=lambda: [Plain()]), {}),
        (factored(of_global_container), {"device": "a100-80gb"}),
        (factored(lambda m: m.count(), count=lambda: COUNT), {}),
    ],
)
def test_a_stage_that_changes_what_is_not_its_own_is_not_recomputed(kind: Any, options: dict[str, Any]) -> None:
    assert "which isn't put back for another run" in not_recomputed(kind, **options)


SCALE = 1.0


def scales_globally(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes back what it changes behind the last tensor that it saves, where a recompute has ended."""
    global SCALE
    SCALE = 2.0
    y = Layer.forward(m, x) * SCALE
    SCALE = 1.0
    return y


def sets_a_flag(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    y = Layer.forward(m, x) * 2.0
    torch.use_deterministic_algorithms(False)
    return y


@pytest.mark.parametrize(
    ("run", "what"), [(scales_globally, "test_cells.SCALE"), (sets_a_flag, "deterministic algorithms")]
)
def test_a_stage_that_takes_back_too_late_is_not_recomputed(run: Callable[..., torch.Tensor], what: str) -> None:
    notes = not_recomputed(layer_of(run))
    assert f"{what} and takes that back when a recompute has ended already" in notes
    assert SCALE == 1.0
    assert not torch.are_deterministic_algorithms_enabled()


def hooked(model: nn.Module) -> list[torch.Tensor]:
    """Have hooks of modules in the stages fill a list, as those that collect features or statistics do."""
    seen: list[torch.Tensor] = []
    for stage in model:  # type: ignore[attr-defined]
        stage.linear.register_forward_hook(lambda module, args, output: seen.append(output.detach().abs().mean()))
    return seen


def hooked_steps(model: nn.Module, x: torch.Tensor, seen: list[torch.Tensor]) -> list[Any]:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() / torch.stack(seen).sum()
        seen.clear()
        return loss

    return [step(model, x, loss_of) for _ in range(4)]


@pytest.mark.parametrize("first", ["hooks", "plan"])
def test_what_hooks_inside_a_stage_enclose(first: str) -> None:
    plain, x = made(Layer, Layer, Layer)
    wanted = hooked_steps(plain, x, hooked(plain))
    model, _ = made(Layer, Layer, Layer)
    seen = hooked(model) if first == "hooks" else []
    with ckptplan.apply(model, plan_for(model, x, "recompute")) as handle:
        found = hooked_steps(model, x, seen if first == "hooks" else hooked(model))
        assert handle.stats().recomputed_stages == 12
    assert_same(found, wanted)


def test_each_stage_is_tried_though_others_run_the_same_operations() -> None:
    plain, odd = factored(lambda m: SCALES[0]), factored(lambda m: SCALES[next(TURNS)])
    profile = ckptplan.profile(*made(Layer, plain, plain, odd), menus=False)
    assert len({stage.kind for stage in profile.stages if stage.name in "123"}) == 1
    assert any("global variable" in note for note in profile.notes)
    assert "3" in [stage.name for stage in profile.stages if stage.recompute is None]


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


def test_what_can_be_put_back_is_even_where_something_cannot() -> None:
    model = nn.Linear(1, 1)
    model.calls, model.numbers = [1], np.zeros(2)  # type: ignore[assignment]

    def changed() -> None:
        with kept(model):
            model.calls.append(2)
            model.count = 1  # type: ignore[assignment]
            model.numbers[0] = 1
            model.numbers.flags.writeable = False

    with pytest.raises(ValueError, match="read-only"):
        changed()
    assert model.calls == [1]
    assert not hasattr(model, "count")
