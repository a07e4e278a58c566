"""Models whose path depends on values, or with operations that fake tensors can't run: planned all the same."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import assert_kept, state_of
from torch import nn
from torch.nn import functional as F
from toy_modules import InTurn, Lambda, Residual, times

import ckptplan
from ckptplan.core.request import Limits
from ckptplan.core.schedule import residency
from ckptplan.profiling.values import answers, real_run
from ckptplan.solving import smallest_peak
from ckptplan.state.generators import Generators
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ALL = ("keep", "swap", "recompute")
WIDTH = 64


class Stacked(InTurn):
    """Blocks in a loop and a head."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = 4) -> None:
        super().__init__(blocks=times(blocks, block), head=nn.Linear(WIDTH, 10))


class Scaled(nn.Module):
    """A number read out of a tensor is put into the next operation, after dropout has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.2)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.inner(x)))
        rows = int(hidden.abs().sum().item()) % 100 + 50
        return x + self.outer(hidden / hidden.abs().max().item()) * F.pad(
            torch.tanh(hidden[:rows, :1]), (0, 0, 0, len(x) - rows)
        )


class Routed(nn.Module):
    """A small mixture of experts: each gets the rows that score highest with it."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.drop = nn.Linear(WIDTH, experts), nn.Dropout(0.1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = best == i
            if chosen.any():
                part = expert(x[chosen]) * scores[chosen][:, i : i + 1]
                out = out.index_put((chosen.nonzero()[:, 0],), part)
        return x + self.drop(out)


class ReadingAll(nn.Module):
    """Lists, arrays, masks, distinct values, and numbers drawn after dropout has drawn others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(x)
        if torch.rand(()) < 0.5:
            hidden = torch.tanh(self.inner(hidden))
        positive = int((hidden.detach().numpy()[:, 0] > 0).sum())
        counts = (hidden > 0).sum(0).tolist()
        rows = torch.randperm(len(x))[:positive]
        distinct = len((hidden[:, 0] * 3).round().unique())
        mixed = torch.tanh(self.outer(hidden[rows])) * (distinct / (1 + counts[0]))
        return hidden.index_add(0, rows, mixed) + hidden.masked_select(hidden > 0.5).mean()


@torch.library.custom_op("ckptplan_tests::soft", mutates_args=())
def soft(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


@torch.library.custom_op("ckptplan_tests::soft_backward", mutates_args=())
def soft_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(gradient, x)


def _keep_input(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


soft.register_autograd(lambda ctx, g: soft_backward(g, *ctx.saved_tensors), setup_context=_keep_input)


def custom() -> nn.Module:
    """An operation without a fake kernel, and another in its backward."""
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return Residual(up, Lambda(lambda _, x: soft(x)), down)


def stacked(block: Callable[[], nn.Module], blocks: int = 3) -> tuple[nn.Module, torch.Tensor]:
    return Stacked(block, blocks), torch.randn(512, WIDTH)


class Packed(nn.Module):
    """Recurrent layers on sequences of different lengths, which the program gets as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "numbers": (lambda: stacked(Scaled), "aten._local_scalar_dense"),
    "routing": (lambda: stacked(Routed, 2), "aten.index.Tensor"),
    "reading": (lambda: stacked(ReadingAll), "Tensor.numpy"),
    "custom": (lambda: stacked(custom), "ckptplan_tests.soft_backward"),
    "packed": (
        lambda: (Packed(), (torch.randn(64, 5, WIDTH), torch.tensor([5, 2, 1, 4] * 16))),
        "aten._pack_padded_sequence",
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long(but=["numbers"])
def test_the_promises_hold(name: str) -> None:
    torch.manual_seed(0)
    make, asks = MODELS[name]
    model, inputs = make()
    profile = ckptplan.profile(model, inputs)
    assert any(asks in note and "run for real" in note for note in profile.notes)
    r = residency(profile, [stage.keep for stage in profile.stages])
    least, most = smallest_peak(profile, Limits(actions=ALL)).peak_bytes, max(*r.forward_bytes, *r.backward_bytes)
    assert least < most
    plan = ckptplan.solve(profile, least / 2**30)
    assert any(choice.action != "keep" for choice in plan.choices)
    report = assert_kept(model, plan, inputs)
    assert report.stats.runs == report.stats.planned_runs
    # 2 %, and the random states that are kept (5 KB a stage, as much again while one recomputes).
    assert report.predicted_peak_bytes <= 1.02 * report.measured_peak_bytes + 3 * 5056
    found = ckptplan.estimate(model, inputs)
    assert any(asks in note for note in found.notes)
    peak = max(found.phase("forward").peak_bytes, found.phase("backward").peak_bytes)
    assert peak == pytest.approx(report.plain_peak_bytes, rel=0.02)


def test_tensors_of_lists_have_the_types_that_pytorch_gives_them() -> None:
    numbers = [torch.tensor(0.5).half(), torch.tensor(3), torch.tensor(True), torch.tensor(2.0)]
    lists = [[a, b] for a in numbers for b in (*numbers, 1, 0.5, False)]
    calls: list[Callable[[], torch.Tensor]] = [
        *(functools.partial(torch_function, name, data) for name in ("tensor", "as_tensor") for data in lists),
        lambda: torch.tensor(data=lists[0], dtype=torch.float64),
        lambda: torch.asarray(obj=lists[1]),
        lambda: torch.ones(2).new_tensor(lists[1]),
    ]
    with answers.reading_watched(lambda tensor: None, by_item=lambda: True):
        found = [call() for call in calls]
    for tensor, call in zip(found, calls, strict=True):
        assert tensor.dtype is call().dtype
        assert torch.equal(tensor, call())


def torch_function(name: str, *args: Any) -> Any:
    return getattr(torch, name)(*args)


@pytest.mark.long
def test_a_block_of_experts_is_the_stage() -> None:
    torch.manual_seed(0)
    model, x = stacked(Routed, 2)
    profile = ckptplan.profile(model, x, menus=False)
    assert [stage.name for stage in profile.stages if not stage.is_glue][:2] == ["blocks.0", "blocks.1"]
    plan = ckptplan.solve(profile, budget="30%", time_limit_s=0.5)
    with ckptplan.apply(model, plan) as handle:
        model(torch.randn_like(x)).sum().backward()  # each expert gets another number of rows
        assert not handle.stats().differences


def writing() -> nn.Module:
    """Writes to its input, to a parameter and to a buffer, and reads a value."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x[1] += 1.0
            x[0] += 1.0
            self.scale[2].mul_(2.0)
            self.calls.add_(1)
        return torch.tanh(self.inner(x)) * (2.0 if x.sum() > 0 else 1.0)

    scale, calls = nn.Parameter(torch.ones(3, WIDTH)), torch.zeros(())
    return Lambda(forward, inner=nn.Linear(WIDTH, WIDTH), scale=scale, calls=calls)


@pytest.mark.parametrize("make", [MODELS["reading"][0], lambda: (Stacked(writing), torch.randn(512, WIDTH))])
@pytest.mark.long("<lambda>0")
def test_nothing_is_left_changed(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, inputs = make()
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), 3.0)
    before, given = state_of(model), inputs.clone()
    methods = torch.Tensor.tolist, torch.Tensor.numpy
    ckptplan.estimate(model, inputs)
    assert state_of(model) == before
    assert torch.equal(inputs, given)
    assert (torch.Tensor.tolist, torch.Tensor.numpy) == methods


@pytest.mark.long
def test_the_real_run_takes_less_than_the_smallest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = stacked(lambda: Routed(experts=2), blocks=6)
    plain = real_run._Witness.watch
    peaks: list[int] = []

    def watch(self: Any, run: Callable[[], Any]) -> None:
        peaks.append(peak_above_start(lambda: plain(self, run)))

    monkeypatch.setattr(real_run._Witness, "watch", watch)
    profile = ckptplan.profile(model, inputs, menus=False)
    held = unique_bytes([*held_tensors(model), inputs])
    r = residency(profile, [stage.keep for stage in profile.stages])
    assert peaks
    assert held + max(peaks) <= smallest_peak(profile, Limits(actions=("keep", "recompute"))).peak_bytes
    assert max(peaks) < (max(*r.forward_bytes, *r.backward_bytes) - held) / 3


def test_plain_models_never_run_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_run, "_witness", None)
    profile = ckptplan.profile(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), torch.randn(8, WIDTH))
    assert not any("for real" in note for note in profile.notes)


def counting() -> nn.Module:
    """Another path each time."""
    numbers = (n for n in itertools.count(1))  # unlike a number, nothing puts it back

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls = next(numbers)
        hidden = torch.tanh(self.inner(x))
        return hidden[:calls][hidden[:calls] > 0].sum() + hidden

    return Lambda(forward, inner=nn.Linear(WIDTH, WIDTH))


def test_a_step_that_differs_from_run_to_run_is_refused() -> None:
    with pytest.raises(ckptplan.UnsupportedModelError, match=r"test_values.py:\d+.*doesn't do the same each time"):
        ckptplan.profile(Stacked(counting), torch.randn(512, WIDTH))


class Dropped(Stacked):
    """Leaves blocks out at random; what is drawn in between is another amount in a real step than in a fake one."""

    def __init__(self, chance: Callable[[], float]) -> None:
        super().__init__(Scaled if chance is torch_and_values else plain, 6)
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.chance() >= 0.4:
                x = block(x)
        return self.head(x)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH))


def torch_and_values() -> float:
    return float(torch.rand(()))


OWN = np.random.default_rng(4)
CHANCES: dict[str, Callable[[], float]] = {"numpy's new one": OWN.random, "values besides": torch_and_values}


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.long
def test_layers_that_are_left_out_at_random(chance: str) -> None:
    torch.manual_seed(0)
    model, inputs = Dropped(CHANCES[chance]), torch.randn(256, WIDTH)
    ran: list[str] = []

    def note(block: nn.Module, args: Any, output: Any) -> None:
        ran.append(names[block])

    names = {block: f"blocks.{k}" for k, block in enumerate(model.blocks)}
    paths = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        drawn, torch_before = Generators([OWN]), torch.get_rng_state()
        profile = ckptplan.profile(model, inputs, menus=False)
        if seed == 1:
            plan = ckptplan.solve(profile, smallest_peak(profile, Limits(actions=ALL)).peak_bytes / 2**30)
            assert_kept(model, plan, inputs)
        drawn.settle()
        assert not drawn.drew
        assert torch.equal(torch.get_rng_state(), torch_before)
        assert any("take the same path" in text for text in profile.notes)
        hooks = [block.register_forward_hook(note) for block in model.blocks]
        model(inputs)
        for hook in hooks:
            hook.remove()
        assert [stage.name for stage in profile.stages if stage.name.startswith("blocks")] == ran
        paths.add(tuple(ran))
        ran.clear()
    assert len(paths) == 2


class Entropy(Stacked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[0](x)
        for block in self.blocks:
            if random.SystemRandom().random() < 0.5:
                x = block(x)
        return self.head(x)


def test_layers_left_out_by_what_can_t_be_put_back_are_refused() -> None:
    with pytest.raises(ckptplan.UnsupportedModelError, match="takes another path each time"):
        ckptplan.profile(Entropy(plain, 32), torch.randn(8, WIDTH))


def test_code_between_a_call_and_its_watcher_is_where_it_is_looked_for() -> None:
    """A file that is moved without its path here would be taken for the model's own code."""
    assert [path for path in answers._BETWEEN if not Path(path).exists()] == []
