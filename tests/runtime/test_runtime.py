from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import gc
import inspect
import io
import os
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_plans import one_transfer
from odd.harness import BATCH, WIDTH
from odd.layers import Around, in_turn, layer_of
from small_models import BUILDERS, assert_same, build, call, gradients, measured, plan_of, planned, step, train, uniform
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError, PlanMismatchError, UnsupportedModelError
from ckptplan.core.option import Action
from ckptplan.profiling.profiler import profile
from ckptplan.profiling.target import MIN_SWAP_BYTES
from ckptplan.runtime.handle import apply
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import unpack
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import NULL_STORES, disk
from ckptplan.runtime.verify import verify
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start
from ckptplan.training.step import default_loss

MIXED = ("recompute", "swap", "mixed 0", "segment")


pytestmark = pytest.mark.usefixtures("no_leak")


@functools.cache
def plain(name: str, steps: int = 3) -> list[Any]:
    return train(*build(name), steps)


def clean_step(model: nn.Module, inputs: Any) -> list[Any]:
    torch.manual_seed(3)
    return step(model, inputs)


@functools.cache
def plain_step(name: str) -> list[Any]:
    return clean_step(*build(name))


# Gradients, counts and peaks


EACH = [(name, MIXED[i % len(MIXED)]) for i, name in enumerate(BUILDERS)]


@pytest.mark.parametrize(("name", "what"), EACH)
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


@pytest.mark.parametrize("name", ["transformer", "views", "shared"])
def test_slow_copies_cost_time_not_memory_or_correctness(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what the program holds itself until code between stages has added it, as `shared` does."""
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


# Autograd used in unusual ways


@pytest.mark.filterwarnings("ignore:the peak may exceed the budget. a forward without gradients")
@pytest.mark.parametrize(("what", "inside"), [("recompute", torch.no_grad), ("swap", torch.inference_mode)])
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


@pytest.mark.parametrize("what", ["recompute", "swap", "segment"])
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


# Failures


class Planted(Exception):
    """Thrown by the tests on purpose."""


@pytest.mark.parametrize(("what", "where"), [("mixed 0", "forward"), ("recompute", "backward"), ("swap", "glue")])
def test_after_an_exception_the_next_step_is_right(what: str, where: str) -> None:
    model, inputs = build("transformer")
    plan = planned("transformer", what)
    with apply(model, plan) as handle:

        def fail(*_: Any) -> None:
            raise Planted

        for layer in (0, 3):
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


def test_a_full_disk_and_a_bad_directory_leave_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mlp")
    plan = planned("mlp", "swap")
    before = snapshot(model)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for directory in (tmp_path / "absent", Path("/proc")):
        with pytest.raises(InvalidInputError, match="can't be written"):
            apply(model, plan, swap_dir=directory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InvalidInputError, match=r"has no room.*swap_dir"):
            apply(model, plan, swap_dir=tmp_path)
    assert snapshot(model) == before
    with apply(model, plan):
        assert_same(clean_step(model, inputs), plain_step("mlp"))


def test_removed_between_forward_and_backward() -> None:
    model, inputs = build("transformer")
    handle = apply(model, planned("transformer", "mixed 0"))
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


def test_remove_restores_exactly() -> None:
    model, inputs = build("conv_norm")
    model[0].register_forward_hook(lambda *_: None)
    before, keys, text = snapshot(model), list(model.state_dict()), repr(model)
    handle = apply(model, planned("conv_norm", "mixed 0"))
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

    return [copy.deepcopy, saved]


@pytest.mark.parametrize("duplicate", _round_trips(), ids=["deepcopy", "torch.save"])
def test_copies_are_plain_models(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, inputs = build("transformer")
    with apply(model, planned("transformer", "mixed 0")) as handle:
        twin = duplicate(model)
        plain, _ = build("transformer")
        assert type(twin) is type(plain)
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
            with handle.paused():
                pass
            clean_step(model, inputs)
            assert handle.stats().forwards == 1
            handle.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strict": 1}, "strict=1; it is True or False"),
        ({"check": "sometimes"}, "check='sometimes'; it is 'sampled', 'always' or 'off'"),
        ({"on_larger": "bigger"}, "on_larger='bigger'; it is 'follow' or 'replan'"),
    ],
)
def test_options_that_are_none(given: dict[str, Any], said: str) -> None:
    model, _ = build("mlp")
    with pytest.raises(InvalidInputError, match=said):
        ckptplan.apply(model, planned("mlp", "swap"), **given)


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


class _Config:
    use_cache = True


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
    model, step = make()
    with apply(model, planned("nested", "mixed 0")) as handle:
        with pytest.warns(RuntimeWarning, match="makes a graph of its own"):
            step().backward()
        assert_same(gradients(model), want)
        model.zero_grad()
        step().backward()
        assert_same(gradients(model), want)
        assert handle.stats().forwards == 4
        assert handle.stats().differences == {"graph": 2}


def test_arguments_that_are_the_same_tensor_stay_the_same() -> None:
    """`nn.MultiheadAttention` asks whether they are."""
    torch.manual_seed(0)
    layers = (nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1) for _ in range(3))
    model, x = Around(layers, in_turn(lambda layer, x: x + layer(x, x, x)[0])), torch.randn(4, 32, 16)
    report = verify(model, uniform(model, x, "recompute"), x, repeats=1)
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


overwriting = layer_of(lambda m, x: _WritesToWhatItSaved.apply(m.linear(x)))


@pytest.mark.parametrize("what", ["keep", "swap"])
def test_a_backward_that_writes_to_what_came_back(what: Action) -> None:
    model, x = nn.Sequential(overwriting(), overwriting()), torch.randn(BATCH, WIDTH)
    with apply(model, uniform(model, x, what)):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
