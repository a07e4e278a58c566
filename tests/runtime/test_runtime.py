from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import gc
import inspect
import io
import itertools
import os
import pickle
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_plans import one_transfer
from small_models import BUILDERS, Transformer, build, gradients, measured, plan_of, plan_with, uniform
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckptplan
from ckptplan.core.errors import InvalidInputError, PlanMismatchError, SwapError, UnsupportedModelError
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.plan import Decision, Plan, Transfer
from ckptplan.core.schedule import residency
from ckptplan.profiling.profiler import profile
from ckptplan.profiling.target import MIN_SWAP_BYTES
from ckptplan.runtime.handle import apply
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import unpack
from ckptplan.runtime.swap.record import Record, Whereabouts, start_leaving
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import NULL_STORES, Store, disk
from ckptplan.runtime.verify import verify
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start
from ckptplan.training.step import default_loss

MIXED = ("recompute", "swap", "mixed 0", "mixed 1")


pytestmark = pytest.mark.usefixtures("no_leak")


@functools.cache
def planned(name: str, what: str) -> Plan:
    chain = measured(name)
    n = len(chain.stages)
    if what in ACTIONS:
        return plan_of(chain, [what] * n)  # type: ignore[list-item]
    rng = random.Random(f"{name} {what}")
    actions: list[Action] = [rng.choice(ACTIONS) for _ in range(n)]
    return plan_of(chain, actions)


def call(model: nn.Module, inputs: Any) -> torch.Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return default_loss(output)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit, through lists and dicts."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        different = [key for key in wanted if not torch.equal(found[key], wanted[key])]
        assert different == []
    else:
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)


def train(
    model: nn.Module, inputs: Any, steps: int = 3, context: Callable[[], Any] = contextlib.nullcontext
) -> list[Any]:
    """Loss, gradients and buffers of each step, the parameters updated in between."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        with context():
            loss = call(model, inputs)
        loss.backward()
        out.append([loss.detach(), gradients(model), {n: b.clone() for n, b in model.named_buffers()}])
        optimizer.step()
    out.append([torch.rand(3)])  # the generator has moved alike
    return out


@functools.cache
def plain(name: str, steps: int = 3) -> list[Any]:
    return train(*build(name), steps)


def clean_step(model: nn.Module, inputs: Any) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = call(model, inputs)
    loss.backward()
    return [loss.detach(), gradients(model)]


@functools.cache
def plain_step(name: str) -> list[Any]:
    return clean_step(*build(name))


# Gradients, counts and peaks


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("name", BUILDERS)
def test_steps_are_bitwise_those_of_the_plain_model(name: str, what: str) -> None:
    """Losses, gradients, buffers (updated once) and the generator, over steps with updates; counts as planned."""
    plan = planned(name, what)
    model, inputs = build(name)
    with apply(model, plan) as handle:
        found = train(model, inputs)
        stats = handle.stats()
    assert_same(found, plain(name))
    assert stats.forwards == 3
    recomputed = sum(choice.action == "recompute" for choice in plan.choices)
    assert stats.recomputed_stages == 3 * recomputed == 3 * stats.planned_recomputed_stages
    assert stats.swapped_out_bytes == stats.swapped_in_bytes == 3 * plan.host_bytes == 3 * stats.planned_swapped_bytes
    assert what != "recompute" or recomputed >= 3
    if what == "swap" and name != "unet":  # whose stages save nothing but what the glue saves too
        assert plan.host_bytes >= 2 * MIN_SWAP_BYTES


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("name", BUILDERS)
def test_peak_is_as_predicted(name: str, what: str) -> None:
    plan = planned(name, what)
    model, inputs = build(name)
    found = verify(model, plan, inputs, repeats=1)
    assert found.gradients_equal, found.differing
    assert found.other_paths == 0
    assert found.measured_peak_bytes <= plan.peak_bytes
    # Toy models: the generator states that recomputed stages hold (5 kB each) and small temporaries weigh much.
    assert plan.peak_bytes - found.measured_peak_bytes <= max(0.02 * plan.peak_bytes, 16 << 10)


def test_predicted_peaks_differ_by_action() -> None:
    """Else the peak tests would hold for plans that do nothing."""
    keep, again, away = (planned("transformer", what).peak_bytes for what in ("keep", "recompute", "swap"))
    assert again < 0.6 * keep
    assert away < 0.6 * keep


@pytest.mark.filterwarnings("ignore:the peak may exceed the budget. forward runs under autocast to bfloat16")
@pytest.mark.parametrize("what", ["recompute", "swap", "mixed 1"])
def test_autocast(what: str) -> None:
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    want = train(*build("transformer"), context=context)
    assert not torch.equal(want[0][0], plain("transformer")[0][0])
    model, inputs = build("transformer")
    with apply(model, planned("transformer", what)) as handle:
        assert_same(train(model, inputs, context=context), want)
        stats = handle.stats()
        assert stats.recomputed_stages == 3 * stats.planned_recomputed_stages
        if what == "swap":
            assert stats.swapped_out_bytes > 0


@pytest.mark.parametrize("name", ["transformer", "views", "nested", "complex_valued"])
def test_slow_copies_cost_time_not_memory_or_correctness(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)

    def late(real: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            time.sleep(rng.random() * 0.004)
            real(*arguments)

        return run

    monkeypatch.setattr(disk, "_write", late(disk._write))
    monkeypatch.setattr(disk, "_read", late(disk._read))
    plan = planned(name, "swap")
    model, inputs = build(name)
    with apply(model, plan) as handle:
        assert_same(train(model, inputs, 2)[:2], plain(name)[:2])
        assert handle.stats().host_wait_s > 0.002
        model.zero_grad()
        held = unique_bytes([*held_tensors(model), inputs])
        assert held + peak_above_start(lambda: call(model, inputs).backward()) <= plan.peak_bytes


def test_release_and_prefetch_points_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the forward of `release` the bytes are gone, however slow the link; they aren't back before `prefetch`."""
    real = disk._write
    monkeypatch.setattr(disk, "_write", lambda *a: (time.sleep(0.01), real(*a)))
    plan = planned("mlp", "swap")
    moving = [i for i, choice in enumerate(plan.choices) if choice.moves]
    assert moving == [0, 1, 2, 3]
    points = {0: (1, 2), 1: (2, 1), 2: (2, 3), 3: (3, 3)}
    choices = [
        Decision.moving(c.action, c.moves, *points[i], c.option) if i in points else c
        for i, c in enumerate(plan.choices)
    ]
    plan = dataclasses.replace(plan, choices=tuple(choices))
    seen: list[tuple[weakref.ref[Record], StorageWeakRef]] = []

    def noted(records: list[Record], store: Store) -> None:
        for record in records:
            assert record._watch is not None
            seen.append((weakref.ref(record), StorageWeakRef(record._watch.untyped_storage())))
        start_leaving(records, store)

    monkeypatch.setattr("ckptplan.runtime.swap.session.start_leaving", noted)
    model, inputs = build("mlp")
    gone: dict[tuple[int, int], bool] = {}
    back: dict[tuple[int, int], bool] = {}
    of: list[range] = []

    def after(k: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            of.append(range(of[-1].stop if of else 0, len(seen)))
            assert len(of[k]) == len(plan.choices[k].moves)

            # Runs when the gradient is there, before the stage's backward begins.
            def gradient(_: torch.Tensor) -> None:
                for i in range(k + 1):
                    records = [record for j in of[i] if (record := seen[j][0]()) is not None]
                    assert records
                    back[i, k] = any(record.state is not Whereabouts.AWAY for record in records)

            output.register_hook(gradient)

        return hook

    def next_begins(k: int) -> None:
        for i in range(k + 1):
            gone[i, k] = all(seen[j][1].expired() for j in of[i])

    for k in range(4):
        if k:
            model[k].register_forward_pre_hook(lambda _, __, k=k: next_begins(k - 1))
        model[k].register_forward_hook(after(k))
    with apply(model, plan):
        loss = call(model, inputs)
        next_begins(3)
        loss.backward()
    for i in range(4):
        release, prefetch = points[i]
        for k in range(i, 4):
            assert gone[i, k] or k < release, (i, k)
            assert back[i, k] == (k < prefetch), (i, k)


class _Residual(nn.Module):
    """Stage "b.0" saves what the program holds until the glue behind "b.1" has added it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(256, 256) for _ in range(3))
        self.b = nn.Sequential(nn.Linear(256, 256), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x + self.b(x)
        return self.d(self.c(x))


@pytest.mark.parametrize("release", [1, 2, 3, 4])
def test_what_the_program_still_holds_is_gone_when_it_lets_go(release: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the link; in the glue (3) too, and its bytes count until then."""
    torch.manual_seed(0)
    model, inputs = _Residual().train(), torch.randn(512, 256)
    chain = profile(model, inputs, menus=False)
    names = [stage.name for stage in chain.stages]
    assert names == ["a", "b.0", "b.1", "(before c)", "c", "d", "(after d)"]
    moving = Decision("swap", transfers=(Transfer((0,), release, 2),))
    plan = plan_with(chain, tuple(moving if name == "b.0" else Decision("keep") for name in names))
    real = disk._write
    monkeypatch.setattr(disk, "_write", lambda *a: (time.sleep(0.02), real(*a)))
    found = verify(model, plan, inputs, repeats=1)
    assert found.gradients_equal, found.differing
    assert found.measured_peak_bytes <= plan.peak_bytes
    held: list[StorageWeakRef] = []
    gone: dict[str, bool] = {}
    model.a.register_forward_hook(lambda _, __, output: held.append(StorageWeakRef(output.untyped_storage())))
    for name, module in (("b.1", model.b[1]), ("c", model.c), ("d", model.d)):
        # Within the stage: the point in front of it has passed.
        def watching(x: torch.Tensor, name: str = name, forward: Callable[..., Any] = module.forward) -> torch.Tensor:
            gone[name] = held[-1].expired()
            return forward(x)

        module.forward = watching
    with apply(model, plan):
        call(model, inputs).backward()
    assert not gone["b.1"]
    assert gone["c"] or release > 3
    assert gone["d"]


def test_swapped_bytes_go_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is what the file held, not something kept aside."""
    real = disk._read

    def spoilt(fd: int, view: memoryview, offset: int) -> None:
        real(fd, view, offset)
        view[:] = bytes(len(view))

    model, inputs = build("mlp")
    with apply(model, planned("mlp", "swap"), swap_dir=tmp_path, check="off"), monkeypatch.context() as patch:
        patch.setattr(disk, "_read", spoilt)
        found = clean_step(model, inputs)
    assert torch.equal(found[0], plain_step("mlp")[0])
    assert any(not torch.equal(g, plain_step("mlp")[1][n]) for n, g in found[1].items())
    assert list(tmp_path.iterdir()) == []


# Autograd used in unusual ways


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("name", ["mlp", "nested", "shared", "routed"])
def test_two_backwards_through_one_graph(name: str, what: str) -> None:
    def run(model: nn.Module, inputs: Any) -> list[Any]:
        torch.manual_seed(1)
        loss = call(model, inputs)
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        return [first, gradients(model), dict(model.named_buffers())]

    want = run(*build(name))
    model, inputs = build(name)
    with apply(model, planned(name, what)) as handle:
        assert_same(run(model, inputs), want)
        assert handle.stats().recomputed_stages == 2 * handle.stats().planned_recomputed_stages


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("name", ["mlp", "nested", "unet"])
def test_double_backward(name: str, what: str) -> None:
    def run(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        torch.manual_seed(1)
        x = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(call(model, x), x, create_graph=True)
        slope.square().sum().backward()
        return [slope.detach(), x.grad, gradients(model)]

    want = run(*build(name))
    assert any(g.abs().sum() > 0 for g in want[2].values())
    model, inputs = build(name)
    with apply(model, planned(name, what)), pytest.warns(RuntimeWarning, match="makes a graph of its own") as told:
        assert_same(run(model, inputs), want)
    assert len(told) == 1


@pytest.mark.parametrize("what", MIXED)
def test_partial_backward_then_the_rest(what: str) -> None:
    """The gradient of one stage's output first, then the whole; and graphs that never run backward."""

    def run(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
        torch.manual_seed(1)
        kept: list[torch.Tensor] = []
        hook = model[1].register_forward_hook(lambda _, __, output: kept.append(output))
        loss = call(model, inputs)
        hook.remove()
        part = torch.autograd.grad(kept[0].sum(), list(model[1].parameters()), retain_graph=True)
        loss.backward()
        call(model, inputs)  # dropped
        return [list(part), gradients(model)]

    want = run(*build("mlp"))
    model, inputs = build("mlp")
    with apply(model, planned("mlp", what)):
        for _ in range(2):
            model.zero_grad()
            assert_same(run(model, inputs), want)


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("name", ["conv_norm", "shared", "routed", "tied"])
def test_several_forwards_before_one_backward(name: str, what: str) -> None:
    def run(model: nn.Module, inputs: Any) -> list[Any]:
        torch.manual_seed(1)
        losses = [call(model, inputs) for _ in range(3)]
        (losses[0] + losses[2] - losses[1]).backward()
        call(model, inputs).backward()  # accumulates
        return [gradients(model), dict(model.named_buffers())]

    want = run(*build(name))
    model, inputs = build(name)
    with apply(model, planned(name, what)) as handle:
        assert_same(run(model, inputs), want)
        assert handle.stats().forwards == 4
        assert handle.stats().recomputed_stages == 4 * handle.stats().planned_recomputed_stages


@pytest.mark.filterwarnings("ignore:the peak may exceed the budget. a forward without gradients")
@pytest.mark.parametrize("what", ["recompute", "swap"])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
def test_forwards_that_train_nothing_count_nothing(what: str, inside: Callable[[], Any]) -> None:
    model, inputs = build("transformer")
    with apply(model, planned("transformer", what)) as handle:
        torch.manual_seed(3)
        loss = call(model, inputs)
        state = torch.get_rng_state()
        before = dataclasses.replace(handle.stats(), host_wait_s=0.0)
        with inside():
            model(inputs)
        assert dataclasses.replace(handle.stats(), host_wait_s=0.0, differences={}) == before
        torch.set_rng_state(state)
        loss.backward()
        assert_same([loss.detach(), gradients(model)], plain_step("transformer"))
        # Longer than planned for, too: there is nothing to plan.
        with torch.no_grad():
            model(torch.cat([inputs, inputs]))


def test_backward_in_evaluation_mode_recomputes_what_ran() -> None:
    model, inputs = build("transformer")
    with apply(model, planned("transformer", "recompute")):
        torch.manual_seed(3)
        loss = call(model, inputs)
        model.eval()
        loss.backward()
        assert_same([loss.detach(), gradients(model)], plain_step("transformer"))
        assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("what", MIXED)
def test_parameters_updated_before_backward(what: str) -> None:
    """An error, as without a plan: a recompute with other weights would be silently wrong."""
    model, inputs = build("mlp")
    with apply(model, planned("mlp", what)):
        loss = call(model, inputs)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.temperature.clone())


def test_buffers_written_before_backward() -> None:
    """PyTorch doesn't notice, for nothing saved was written to; a recompute would read the new value."""
    model = nn.Sequential(*(_Scaled() for _ in range(3)))
    x = torch.randn(32, 64)
    plan = plan_of(chain := profile(model, x, menus=False), ["recompute"] * len(chain.stages))
    with apply(model, plan):
        loss = call(model, x)
        model[1].temperature.fill_(3.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        # A buffer that was replaced is still there as it was.
        model.zero_grad()
        loss = call(model, x)
        model[1].temperature = torch.tensor(9.0)
        loss.backward()
        found = gradients(model)
        assert float(model[1].temperature) == 9.0
        model[1].temperature = torch.tensor(3.0)
    assert_same([found], [clean_step(model, x)[1]])


class _Spoils(nn.Module):
    """Writes over an activation between stages, where asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.spoil: int | None = None
        self.in_place = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.spoil:
                x = x.mul_(0.5) if self.in_place else x * 0.5
        return x


@pytest.mark.parametrize("what", ["keep", "recompute", "swap"])
def test_activations_written_over(what: Action) -> None:
    """PyTorch's error, or the right gradient; nothing else."""
    torch.manual_seed(0)
    model, x = _Spoils(), torch.randn(32, 64)
    chain = profile(model, x, menus=False)
    with apply(model, plan_of(chain, [what] * len(chain.stages))):
        model.spoil = 1
        try:
            found = clean_step(model, x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017 - either outcome is right
        else:
            assert what == "recompute", "tanh's saved result was written over: PyTorch refuses"
            model.in_place = False
            assert_same(found, clean_step(model, x))
        model.spoil = None
        found = clean_step(model, x)
    assert_same(found, clean_step(model, x))


# Shapes


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("name", ["transformer", "conv_norm"])
def test_smaller_inputs_run_and_larger_ones_are_noticed(name: str, what: str) -> None:
    model, inputs = build(name)
    plain_model, _ = build(name)
    larger = torch.cat([inputs, inputs])
    with apply(model, planned(name, what), strict=True):
        assert_same(clean_step(model, inputs[:3]), clean_step(plain_model, inputs[:3]))
        with pytest.raises(PlanMismatchError, match="solve again with the largest shapes"):
            call(model, larger)
        assert_same(clean_step(model, inputs), plain_step(name))
    with (
        apply(model, planned(name, what)),
        pytest.warns(RuntimeWarning, match="solve again with the largest shapes|another path than the one profiled"),
    ):
        assert_same(clean_step(model, larger), clean_step(plain_model, larger))


def test_longer_sequences_are_noticed_though_they_have_as_many_bytes() -> None:
    model, tokens = build("transformer")
    with apply(model, planned("transformer", "keep"), strict=True):
        with pytest.raises(PlanMismatchError, match=r"float32\[1, 128, 32\]; the plan holds for up to .*\[4, 32, 32\]"):
            call(model, tokens.reshape(1, -1))
        with pytest.raises(PlanMismatchError, match=r"float64"):
            call(model.double(), tokens)


def test_too_many_calls_are_noticed() -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> Any:
        model.zero_grad()
        torch.manual_seed(3)
        (model(inputs).mean() + model.blocks[1](inputs).mean()).backward()
        return gradients(model)

    model, inputs = build("shared")
    with apply(model, planned("shared", "recompute"), strict=True):
        model(inputs)
        with pytest.raises(PlanMismatchError, match="more than the 1 times"):
            model.blocks[1](inputs)
        assert_same(clean_step(model, inputs), plain_step("shared"))
    with apply(model, planned("shared", "recompute")):
        with pytest.warns(RuntimeWarning, match="more than the 1 times"):
            assert_same(step(model, inputs), step(*build("shared")))
        assert_same(clean_step(model, inputs), plain_step("shared"))


# Failures


class Planted(Exception):
    """Thrown by the tests on purpose."""


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("where", ["forward", "glue", "backward"])
def test_after_an_exception_the_next_step_is_right(what: str, where: str) -> None:
    model, inputs = build("transformer")
    plan = planned("transformer", what)
    with apply(model, plan) as handle:

        def fail(*_: Any) -> None:
            raise Planted

        for layer in (0, 2, 3):
            module = model.layers[layer]
            if where == "forward":
                hook = module.up.register_forward_hook(fail)
            elif where == "glue":
                hook = module.register_forward_hook(fail)
            else:
                hook = module.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
            with pytest.raises(Planted):
                clean_step(model, inputs)
            hook.remove()
            assert_same(clean_step(model, inputs), plain_step("transformer"))
        before = handle.stats()
        clean_step(model, inputs)
        added = handle.stats().since(before)
        assert added.recomputed_stages == added.planned_recomputed_stages
        assert added.swapped_out_bytes == added.swapped_in_bytes == added.planned_swapped_bytes


@pytest.mark.parametrize("which", ["_write", "_read"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_failed_copy(which: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SwapError, never a gradient; then a clean step, on the same handle and on a new one."""
    model, inputs = build("mlp")
    plan = planned("mlp", "swap")
    real = getattr(disk, which)
    calls = 0

    def fails(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    with apply(model, plan):
        with monkeypatch.context() as patch:
            patch.setattr(disk, which, fails)
            with pytest.raises(SwapError, match="No space left"):
                clean_step(model, inputs)
        assert calls > count
        assert_same(clean_step(model, inputs), plain_step("mlp"))
    with apply(model, plan):
        assert_same(clean_step(model, inputs), plain_step("mlp"))


def test_a_full_disk_and_a_bad_directory_leave_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mlp")
    plan = planned("mlp", "swap")
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for directory in (tmp_path / "absent", Path("/proc")):
        with pytest.raises(InvalidInputError, match="can't be written"):
            apply(model, plan, swap_dir=directory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InvalidInputError, match=r"has no room.*swap_dir"):
            apply(model, plan, swap_dir=tmp_path)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    with apply(model, plan):
        assert_same(clean_step(model, inputs), plain_step("mlp"))


def test_removed_between_forward_and_backward() -> None:
    for what in MIXED:
        model, inputs = build("transformer")
        handle = apply(model, planned("transformer", what))
        torch.manual_seed(3)
        loss = call(model, inputs)
        handle.remove()
        loss.backward()
        assert_same([loss.detach(), gradients(model)], plain_step("transformer"))


def test_steps_leave_nothing_behind() -> None:
    """Nor do handles: the tensors alive after many steps are those after one."""
    model, inputs = build("transformer")

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with apply(model, planned("transformer", "mixed 0")) as handle:
        clean_step(model, inputs)
        before = alive()
        for _ in range(5):
            clean_step(model, inputs)
            call(model, inputs)
        assert alive() == before
        assert not handle._applied.stores["host"].used_bytes  # type: ignore[attr-defined]
        assert handle._applied.stores["host"].peak_bytes <= 2 * handle.plan.host_bytes + (1 << 18)  # type: ignore[attr-defined]
    watch = weakref.ref(model)
    del model, handle
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("ends", ["next forward", "remove"])
def test_what_a_failed_backward_leaves_in_the_engine_goes(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[weakref.ref[Record]] = []
    original = Record.__init__

    def noted(self: Record, *args: Any) -> None:
        original(self, *args)
        records.append(weakref.ref(self))

    monkeypatch.setattr(Record, "__init__", noted)
    model, inputs = build("transformer")
    with apply(model, planned("transformer", "swap")) as handle:
        hook = model.head.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clean_step(model, inputs)
        hook.remove()
        gc.collect()
        assert any(record() is not None for record in records), "PyTorch's queue held nothing: is all this needed?"
        before = len(records)
        if ends == "remove":
            handle.remove()
        else:
            call(model, inputs)
        gc.collect()
        assert not any(record() is not None for record in records[:before])


@pytest.mark.parametrize("name", ["tied", "conv_norm", "routed"])
def test_nothing_of_the_models_own_is_a_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, packed = planned(name, "swap"), list[int]()
    original = Record.__init__

    def noted(self: Record, tensor: torch.Tensor, *rest: Any) -> None:
        packed.append(tensor.untyped_storage().data_ptr())
        original(self, tensor, *rest)

    monkeypatch.setattr(Record, "__init__", noted)
    model, inputs = build(name)
    tensors = (*model.parameters(), *model.buffers())  # alive, so that nothing else comes to lie where a buffer was
    own = {t.untyped_storage().data_ptr() for t in tensors}
    wanted = plain_step(name)
    with apply(model, plan):
        assert_same(clean_step(model, inputs), wanted)
    assert packed
    assert not own.intersection(packed)


def test_a_model_dropped_with_its_plan_applied() -> None:
    model, inputs = build("mlp")
    apply(model, planned("mlp", "swap"))
    clean_step(model, inputs)
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None  # and no thread is left: see the fixture


def test_a_handle_that_is_dropped() -> None:
    """The plan stays, with all that guards it."""
    model, inputs = build("mlp")
    model.config = _Config()
    apply(model, planned("mlp", "recompute"))
    gc.collect()
    assert model.config.use_cache is False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    loss = model(inputs).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="updated by an optimizer's step between forward and backward"):
        loss.backward()


# Putting on, taking off


def snapshot(model: nn.Module) -> Any:
    return {
        name: {k: (dict(v) if isinstance(v, dict) else v) for k, v in m.__dict__.items()}
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize("what", MIXED)
def test_remove_restores_exactly(what: str) -> None:
    model, inputs = build("conv_norm")
    model[0].register_forward_hook(lambda *_: None)
    before, keys, text = snapshot(model), list(model.state_dict()), repr(model)
    handle = apply(model, planned("conv_norm", what))
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in build("conv_norm")[0].named_parameters()]
    assert repr(model) == text
    assert isinstance(model, nn.Sequential)
    assert type(model[0]) is nn.Sequential
    patched = [name for name, m in model.named_modules() if "forward" in m.__dict__]
    assert patched
    handle.remove()
    handle.remove()
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name in before:
        assert list(after[name]) == list(before[name])
        for key, value in before[name].items():
            assert after[name][key] is value or after[name][key] == value, (name, key)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert_same(clean_step(model, inputs), plain_step("conv_norm"))


def _round_trips() -> list[Any]:
    def saved(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved]


@pytest.mark.parametrize("duplicate", _round_trips(), ids=["deepcopy", "pickle", "torch.save"])
def test_copies_are_plain_models(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, inputs = build("transformer")
    with apply(model, planned("transformer", "mixed 0")) as handle:
        twin = duplicate(model)
        assert type(twin) is Transformer
        plain, _ = build("transformer")
        assert inspect.signature(model.forward) == inspect.signature(twin.forward) == inspect.signature(plain.forward)
        shallow = copy.copy(twin.layers[0].eval())
        shallow._modules = {name: copy.deepcopy(module) for name, module in shallow._modules.items()}
        for parameter in shallow.parameters():
            parameter.data.mul_(2)
        x = torch.randn(2, 8, 32)
        assert not torch.equal(shallow(x), twin.layers[0](x))
        assert "forward" not in vars(shallow)
        twin.train()
        assert_same(clean_step(twin, inputs), plain_step("transformer"))
        assert handle.stats().forwards == 0
        assert not any("forward" in vars(module) for module in twin.modules())
        twin.embedding.weight.data.zero_()
        assert not torch.equal(call(twin, inputs), plain_step("transformer")[0])
        assert_same(clean_step(copy.deepcopy(twin.cpu()), inputs)[0], clean_step(twin, inputs)[0])
        assert_same(clean_step(model, inputs), plain_step("transformer"))
        assert handle.stats().forwards == 1


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


def test_a_forward_of_the_users_own_survives() -> None:
    model, inputs = build("mlp")
    model[2].forward = doubled
    want = clean_step(model, inputs)
    chain = profile(model, inputs, menus=False)
    assert model[2].__dict__["forward"] is doubled
    with apply(model, plan_of(chain, ["recompute"] * len(chain.stages))) as handle:
        assert_same(clean_step(model, inputs), want)
        for duplicate in _round_trips():
            assert_same(clean_step(duplicate(model), inputs), want)
        assert handle.stats().forwards == 1
        assert handle.stats().recomputed_stages >= 3
    assert model[2].__dict__["forward"] is doubled
    assert not any("forward" in m.__dict__ for m in model.modules() if m is not model[2])


def test_somebody_patches_on_top() -> None:
    """Their patch stays; the plan under it is off after remove(), and on again where it was paused."""
    model, inputs = build("mlp")
    handle = apply(model, planned("mlp", "recompute"))
    below = model[1].forward
    calls = 0

    def on_top(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return below(x)

    model[1].forward = on_top
    with handle.paused():
        assert_same(clean_step(model, inputs), plain_step("mlp"))
        assert handle.stats().recomputed_stages == 0
    assert_same(clean_step(model, inputs), plain_step("mlp"))
    once = handle.stats().recomputed_stages
    assert once == handle.stats().planned_recomputed_stages
    handle.remove()
    assert_same(clean_step(model, inputs), plain_step("mlp"))
    assert handle.stats().recomputed_stages == once
    assert model[1].forward is on_top
    assert calls >= 3


def test_paused() -> None:
    model, inputs = build("mlp")
    with apply(model, planned("mlp", "mixed 0")) as handle:
        with pytest.raises(Planted), handle.paused():  # noqa: PT012 - it has to leave by an exception
            assert not any("forward" in m.__dict__ for m in model.modules())
            clean_step(model, inputs)
            assert handle.stats().forwards == 0
            raise Planted
        clean_step(model, inputs)
        assert handle.stats().forwards == 1
        with handle.paused():
            handle.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_paused_within_paused() -> None:
    model, x = build("mlp")
    with apply(model, planned("mlp", "recompute")) as handle:
        with handle.paused():
            with handle.paused():
                pass
            model(x)
            assert handle.stats().forwards == 0
        model(x)
        assert handle.stats().forwards == 1


def test_stats_read_well() -> None:
    model, inputs = build("transformer")
    plan = planned("transformer", "mixed 0")
    with apply(model, plan) as handle:
        clean_step(model, inputs)
        first = handle.stats()
        clean_step(model, inputs)
        assert handle.stats().since(first).forwards == 1
        text = str(handle.stats())
    assert "2 training forwards" in text
    assert f"(planned {first.planned_recomputed_stages})" in text
    assert "nan" not in text


# What is refused


def test_applying_twice() -> None:
    model, inputs = build("mlp")
    plan = planned("mlp", "recompute")
    with apply(model, plan) as handle:
        with pytest.raises(UnsupportedModelError, match=r"applied to this model already.*remove"):
            apply(model, plan)
        with pytest.raises(UnsupportedModelError, match="applied to this model already"):
            verify(model, plan, inputs)
        clean_step(model, inputs)
        assert handle.stats().recomputed_stages == handle.stats().planned_recomputed_stages
    with apply(model, plan):
        assert_same(clean_step(model, inputs), plain_step("mlp"))


def test_a_plan_for_another_model() -> None:
    model, _ = build("mlp")
    with pytest.raises(PlanMismatchError, match="model"):
        apply(model, planned("transformer", "swap"))
    model[0][0].weight.requires_grad_(False)
    with pytest.raises(PlanMismatchError, match="parameters"):
        apply(model, planned("mlp", "swap"))
    model, _ = build("mlp")
    wrong = planned("mlp", "recompute")
    wrong = dataclasses.replace(wrong, stages=("elsewhere", *wrong.stages[1:]))
    with pytest.raises(PlanMismatchError, match="'elsewhere' names no module"):
        apply(model, wrong)
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(("field", "value"), [("torch_version", "1.0.0"), ("device", "cuda"), ("training", False)])
def test_the_fingerprint_names_what_differs(field: str, value: Any) -> None:
    model, inputs = build("mlp")
    plan = planned("mlp", "recompute")
    other = dataclasses.replace(plan, fingerprint=dataclasses.replace(plan.fingerprint, **{field: value}))
    with pytest.raises(PlanMismatchError, match=field.replace("_", ".")):
        apply(model, other)
    with pytest.raises(PlanMismatchError, match=field.replace("_", ".")):
        verify(model, other, inputs)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_verify_wants_the_planned_shapes() -> None:
    model, inputs = build("mlp")
    with pytest.raises(PlanMismatchError, match="inputs"):
        verify(model, planned("mlp", "recompute"), inputs[:2])


def test_models_that_checkpoint() -> None:
    model, _ = build("mlp")
    plan = planned("mlp", "recompute")
    model[1].gradient_checkpointing = True
    with pytest.raises(UnsupportedModelError, match="'1' already checkpoints"):
        apply(model, plan)
    model[1].gradient_checkpointing = False
    assert not any("forward" in m.__dict__ for m in model.modules())


class _Config:
    use_cache = True


def test_generation_caches_are_off_meanwhile() -> None:
    model, _ = build("mlp")
    model.config = _Config()
    handle = apply(model, planned("mlp", "recompute"))
    assert model.config.use_cache is False
    handle.remove()
    assert model.config.use_cache is True
    model.config.use_cache = False
    apply(model, planned("mlp", "recompute")).remove()
    assert model.config.use_cache is False


class _Late(nn.Module):
    """Makes a table in its first forward and keeps it as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("table", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 64 * 64).reshape(64, 64).sin()
        return x + torch.tanh(self.linear(x) @ self.table)


def test_a_buffer_that_a_forward_registers_is_saved_as_in_the_traced_step() -> None:
    model, x = nn.Sequential(*(_Late() for _ in range(4))), torch.randn(128, 64)
    plan = uniform(model, x, "swap")
    with ckptplan.apply(model, plan) as handle:
        for step in range(1, 4):
            model(x).square().mean().backward()
            stats = handle.stats()
            assert stats.other_paths == 0
            assert stats.swapped_out_bytes == step * plan.host_bytes > 0


def test_no_host_memory_is_a_limit_too() -> None:
    model, inputs = build("mlp")
    chain = measured("mlp")
    plan = ckptplan.solve(chain, budget="50%", host_gb=0, time_limit_s=1)
    assert not plan.host_bytes
    with ckptplan.apply(model, plan, host_gb=0, disk_gb=0):
        assert_same(clean_step(model, inputs), plain_step("mlp"))


class _Fixed:
    __slots__ = ()
    use_cache = True


def test_a_configuration_that_can_not_be_written_to_leaves_all_as_it_was() -> None:
    model, _ = build("mlp")
    model.config, model[1].config = _Config(), _Fixed()
    with pytest.raises(UnsupportedModelError, match=r"use_cache of the model's _Fixed is True and can't be set"):
        apply(model, planned("mlp", "recompute"))
    assert model.config.use_cache is True
    assert not any("forward" in m.__dict__ for m in model.modules())
    del model[1].config
    apply(model, planned("mlp", "recompute")).remove()


# verify() leaves no trace


@pytest.mark.parametrize("fails", [None, 1, 2, 4])
@pytest.mark.parametrize("name", ["conv_norm", "routed", "transformer"])
def test_verify_changes_nothing(name: str, fails: int | None) -> None:
    plan = planned(name, "mixed 0")  # which seeds the generators
    model, inputs = build(name)
    clean_step(model, inputs)  # gradients to be kept
    model[0].eval() if name == "conv_norm" else None
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    values, flags = [t.clone() for t in tensors], [m.training for m in model.modules()]
    grads = [p.grad for p in model.parameters()]
    before = snapshot(model)
    random.seed(5)
    torch.manual_seed(5)
    states = (torch.get_rng_state(), random.getstate())
    calls = (n for n in itertools.count(1))  # unlike a number, nothing puts it back

    def loss_fn(output: Any) -> torch.Tensor:
        random.random()
        torch.rand(2)
        if next(calls) == fails:
            raise Planted
        return default_loss(output)

    if fails is None:
        found = verify(model, plan, inputs, loss_fn, repeats=1)
        assert found.gradients_equal
        assert found.stats.forwards == 1
    else:
        with pytest.raises(Planted):
            verify(model, plan, inputs, loss_fn, repeats=1)
    after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert {n: list(d) for n, d in snapshot(model).items()} == {n: list(d) for n, d in before.items()}
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_verify_tells_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every test above that trusts it would prove nothing."""
    real = disk._read

    def spoilt(fd: int, view: memoryview, offset: int) -> None:
        real(fd, view, offset)
        view[0] ^= 1

    monkeypatch.setattr(disk, "_read", spoilt)
    model, inputs = build("mlp")
    found = verify(model, planned("mlp", "swap"), inputs, repeats=1)
    assert found.gradients_equal is False
    assert found.differing
    assert "DIFFER" in str(found)


# Steps of several calls, and models used in part


@pytest.mark.parametrize("what", ["recompute", "swap"])
def test_a_step_of_two_forwards(what: Action) -> None:
    def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, x = build("mlp")
        return model, lambda: model(x).square().mean() + model(x * 2).mean()

    def run(model: nn.Module, step: Callable[[], torch.Tensor]) -> list[Any]:
        out = []
        torch.manual_seed(2)
        for _ in range(3):
            model.zero_grad()
            loss = step()
            loss.backward()
            out.append([loss.detach(), gradients(model)])
        return out

    want = run(*make())
    model, step = make()
    chain = profile(model, step=step, menus=False)
    plan = plan_of(chain, [what] * len(chain.stages))
    assert sum(not name.startswith("(") for name in plan.stages) == 8
    with apply(model, plan) as handle:
        assert_same(run(model, step), want)
        stats = handle.stats()
    assert stats.forwards == 3
    assert stats.recomputed_stages == 3 * stats.planned_recomputed_stages
    assert stats.swapped_out_bytes == stats.swapped_in_bytes == 3 * stats.planned_swapped_bytes
    assert (stats.recomputed_stages if what == "recompute" else stats.swapped_out_bytes) > 0
    model.zero_grad()
    assert verify(model, plan, step=step, repeats=1).measured_peak_bytes <= plan.peak_bytes


def test_a_gradient_taken_in_the_middle_of_a_step() -> None:
    """A penalty on a gradient, then more forward: what came back from the host is not mistaken for new activations."""

    def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, x = build("nested")
        x = x.requires_grad_()

        def step() -> torch.Tensor:
            slope = torch.autograd.grad(default_loss(model(x)), x, create_graph=True)[0]
            return slope.square().mean() + default_loss(model(x * 2))

        return model, step

    model, step = make()
    step().backward()
    want = gradients(model)
    for what in ("recompute", "swap"):
        model, step = make()
        with apply(model, planned("nested", what)) as handle:
            with pytest.warns(RuntimeWarning, match="makes a graph of its own"):
                step().backward()
            for _ in range(2):
                assert_same(gradients(model), want)
                model.zero_grad()
                step().backward()
            assert_same(gradients(model), want)
            assert handle.stats().forwards == 6
            assert handle.stats().differences == {"graph": 3}


class SelfAttention(nn.Module):
    """Asks whether its arguments are one tensor, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


@pytest.mark.parametrize("action", ["recompute", "swap"])
def test_arguments_that_are_the_same_tensor_stay_the_same(action: Any) -> None:
    torch.manual_seed(0)
    model, x = SelfAttention(), torch.randn(4, 32, 16)
    report = verify(model, uniform(model, x, action), x, repeats=1)
    assert report.gradients_equal
    assert report.stats.runs == report.stats.planned_runs


@pytest.mark.parametrize("moves", [(), (0,), (0, 1)])
def test_what_is_saved_goes_with_its_own_node_and_not_with_its_stages_last(moves: tuple[int, ...]) -> None:
    """Autograd keeps the hook that packed, so what the hook knows must not hold what is saved."""
    session = SwapSession(NULL_STORES, torch.device("cpu"), lambda storage: False, Counters())
    x = torch.randn(2048, requires_grad=True)

    def alive() -> list[int]:
        return [sum(ref() is not None for ref in refs) for refs in (held, session._records.values())]

    packing = session.packing()
    with packing.hooks():
        first, second = x.exp(), x.sigmoid()
    held = [weakref.ref(each) for each in packing.saved]
    session.leave(0, packing.saved, one_transfer(moves))
    assert alive() == [2, len(moves)]
    del first
    assert alive() == [1, int(1 in moves)]
    second.sum().backward()
    assert alive() == [0, 0]


@pytest.mark.parametrize("seen_as", [lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], torch.conj, lambda t: t.imag])
def test_what_stays_is_given_as_it_was_saved(seen_as: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of a storage that stays no view of the whole is made, which is most of what packing it would take."""
    session = SwapSession({}, torch.device("cpu"), lambda storage: False, Counters())
    packing = session.packing()
    base = torch.randn(6, 4, dtype=torch.complex64)
    tensor = seen_as(base)
    first, again, part = packing.pack(tensor), packing.pack(tensor), packing.pack(base[2:])
    session.leave(0, packing.saved, ())
    for given in (unpack(first), unpack(again)):
        assert torch.equal(given, tensor)
        assert (given.stride(), given.storage_offset()) == (tensor.stride(), tensor.storage_offset())
        assert (given.is_conj(), given.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert given.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert torch.equal(unpack(part), base[2:])
    base.add_(1)
    for packed in (first, again, part):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            unpack(packed)


class _WritesToWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result = gradient * x
        x.mul_(3)
        return result


class _Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WritesToWhatItSaved.apply(self.linear(x))


@pytest.mark.parametrize("what", [None, "keep", "swap"])
def test_a_backward_that_writes_to_what_came_back(what: Action | None) -> None:
    model, x = nn.Sequential(_Overwriting(), _Overwriting()), torch.randn(32, 64)
    with contextlib.nullcontext() if what is None else apply(model, uniform(model, x, what)):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _Skipping(nn.Module):
    """Layers that are left out now and then, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(5)
        )
        self.skip = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                x = layer(x)
        return x


def test_a_skipped_stage_delays_no_release() -> None:
    model, x = _Skipping(), torch.randn(512, 64)
    chain = profile(model, x, menus=False)
    choices = []
    for i, stage in enumerate(chain.stages):
        moves = residency(chain, [s.find("swap") or s.keep for s in chain.stages]).moves[i]
        choices.append(
            Decision.moving("swap", moves, min(i + 1, 4), i) if moves and not stage.is_glue else Decision("keep")
        )
    plan = plan_with(chain, tuple(choices))

    def peak(skip: int) -> int:
        model.skip = skip
        model.zero_grad()
        return peak_above_start(lambda: model(x).sum().backward())

    with apply(model, plan):
        peak(-1)
        whole = peak(-1)
        assert all(peak(skip) <= whole for skip in range(5))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"on_oom": "replan"}, "has no option 'on_oom' any more"),
        ({"actions": ("keep", "bogus")}, "'bogus'"),
        ({"segments": 3}, "segments=3"),
        ({"time_limit_s": 0}, "time_limit_s=0"),
        ({"swap_dir": 3}, "swap_dir=3"),
        ({"profile": 3}, "profile is a int"),
        ({"plan": "plan.json"}, "plan is a str"),
    ],
    ids=str,
)
def test_arguments_are_checked_also_where_they_are_not_needed(arguments: dict[str, Any], text: str) -> None:
    model, _ = build("mlp")
    given = {"plan": plan_of(measured("mlp"), ["keep"] * len(measured("mlp").stages)), **arguments}
    with pytest.raises(InvalidInputError, match=text):
        ckptplan.apply(model, **given)
    assert "forward" not in vars(model[0])
