"""Steps that start with gradients: planned with them, measured with them, and noticed where they weren't planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Transformer, plan_of
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError, PlanMismatchError, UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.profiling.profiler import profile
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Gradients as large as activations."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(128, 64)


def tied() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer(depth=2, tied=True), torch.randint(0, 50, (4, 32))


def partly_frozen() -> tuple[nn.Module, torch.Tensor]:
    model, x = wide()
    for p in [*model[0].parameters(), model[2][0].weight]:  # type: ignore[index]
        p.requires_grad_(False)
    return model, x


MODELS = {f.__name__: f for f in (wide, tied, partly_frozen)}


def gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def give_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    return [p.grad for p in model.parameters()]


def micro_batches(model: nn.Module, x: torch.Tensor, count: int = 2, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    for _ in range(count):
        output = model(x)  # kept until the end of backward, as callers do
        output.mean().backward()
        del output


def measured_bytes(model: nn.Module, x: torch.Tensor, plan: Plan, run: Callable[[], Any]) -> int:
    """Most bytes that `run` holds at once; it must start without gradients, whose release isn't recorded."""
    held = unique_bytes([*held_tensors(model), x])
    with ckptplan.apply(model, plan):
        return held + peak_above_start(run)


# ---------------------------------------------------------------- profile and plan


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long("tied")
def test_gradients_count_from_the_start(name: str) -> None:
    model, x = MODELS[name]()
    without = profile(model, x, accumulate=False, menus=False)
    having = profile(model, x, accumulate=True, menus=False)
    assert having.resident_bytes == without.resident_bytes + gradient_bytes(model)
    assert having.base_forward_bytes == tuple(b + gradient_bytes(model) for b in without.base_forward_bytes)
    assert having.update_peak_bytes == without.update_peak_bytes
    assert (having.fingerprint.accumulates, without.fingerprint.accumulates) == (True, False)


@pytest.mark.parametrize(("kind", "set_to_none"), [("adamw", True), ("momentum", False)])
@pytest.mark.long
def test_a_training_that_accumulates_keeps_its_budget(kind: str, set_to_none: bool) -> None:
    model, x = wide()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters) if kind == "adamw" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )
    measured = profile(model, x, optimizer=optimizer, accumulate=True, menus=False)
    least = ckptplan.solve(measured, max_overhead=9.0, time_limit_s=0.3).peak_bytes
    plan = ckptplan.solve(measured, 1.1 * least / 2**30, time_limit_s=0.3)

    def training() -> None:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(2):
                model(x).mean().backward()
            optimizer.step()

    assert measured_bytes(model, x, plan, training) <= plan.budget_bytes


@pytest.mark.long
def test_whether_gradients_exist_is_found() -> None:
    model, x = wide()
    assert not profile(model, x, menus=False).fingerprint.accumulates
    kept = give_gradients(model)
    values = [g.clone() for g in kept if g is not None]
    found = profile(model, x, menus=False)
    assert found.fingerprint.accumulates
    assert any("accumulate=False" in note for note in found.notes)
    assert not profile(model, x, accumulate=False, menus=False).fingerprint.accumulates
    assert ckptplan.solve(model, 1.0, inputs=x, menus=False).fingerprint.accumulates
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), values, strict=True) if p.grad is not None)
    model.zero_grad()
    (model[0][0].weight).requires_grad_(False).grad = torch.zeros_like(model[0][0].weight)  # type: ignore[index]
    assert not profile(model, x, menus=False).fingerprint.accumulates


@pytest.mark.parametrize("given", ["yes", 1])
def test_only_true_false_and_none(given: Any) -> None:
    model, x = wide()
    with pytest.raises(InvalidInputError, match="it is True, False or None"):
        profile(model, x, accumulate=given)
    with pytest.raises(InvalidInputError, match="accumulate can't be given with a profile"):
        ckptplan.solve(profile(model, x, menus=False), 1.0, accumulate=True)


# ---------------------------------------------------------------- estimate


@pytest.mark.long
def test_an_estimate_starts_with_gradients() -> None:
    model, x = wide()
    without = ckptplan.estimate(model, x)
    having = ckptplan.estimate(model, x, accumulate=True)
    loaded = without.phase("loaded").end_bytes, having.phase("loaded").end_bytes
    assert loaded[1] - loaded[0] == gradient_bytes(model)
    measured = profile(model, x, accumulate=True, menus=False)
    plan = plan_of(measured, ["keep"] * len(measured.stages))
    assert ckptplan.estimate(model, x, plan=plan).peak_bytes >= plan.peak_bytes - 16
    give_gradients(model)
    assert ckptplan.estimate(model, x).peak_bytes == having.peak_bytes


# ---------------------------------------------------------------- verify


@pytest.mark.long
def test_verify_measures_steps_with_gradients_and_leaves_the_user_s() -> None:
    model, x = wide()
    plan = ckptplan.solve(model, 1.0, inputs=x, accumulate=True)
    found = ckptplan.verify(model, plan, x, repeats=1)
    assert found.measured_peak_bytes == plan.peak_bytes == found.plain_peak_bytes
    assert found.gradients_equal
    assert all(p.grad is None for p in model.parameters())
    kept = give_gradients(model)
    values = [g.clone() for g in kept if g is not None]
    assert ckptplan.verify(model, plan, x, repeats=1).measured_peak_bytes == plan.peak_bytes
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), values, strict=True) if p.grad is not None)


@pytest.mark.long
def test_verify_measures_the_planned_kind_of_step_by_default() -> None:
    model, x = wide()
    plan = ckptplan.solve(model, max_overhead=0.0, inputs=x)
    assert ckptplan.verify(model, plan, x, repeats=1).within_budget
    give_gradients(model)
    assert ckptplan.verify(model, plan, x, repeats=1).within_budget
    with pytest.warns(RuntimeWarning, match="gradients of"):
        found = ckptplan.verify(model, plan, x, repeats=1, accumulate=True)
    assert found.gradients_equal
    assert not found.within_budget


def test_a_trace_starts_with_gradients() -> None:
    model, x = wide()
    plan = ckptplan.solve(model, 1.0, inputs=x, accumulate=True)
    drawn = ckptplan.trace(model, plan, x)
    assert drawn.measured.peak_bytes == plan.peak_bytes
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------- the guard


def applied(model: nn.Module, x: torch.Tensor, room_bytes: int, *, accumulate: bool = False) -> Any:
    measured = profile(model, x, accumulate=accumulate, menus=False)
    plan = plan_of(measured, ["recompute"] * len(measured.stages))
    plan = dataclasses.replace(plan, budget_bytes=plan.peak_bytes + room_bytes)
    return ckptplan.apply(model, plan, strict=True)


def test_gradients_that_were_not_planned_are_noticed_at_the_first_forward() -> None:
    model, x = tied()
    with applied(model, x, gradient_bytes(model) - 1) as handle:
        model(x).mean().backward()
        runs = handle.stats().runs
        for _ in range(2):
            with pytest.raises(
                PlanMismatchError, match=r"reckoned with none.*zero_grad\(set_to_none=True\).*accumulate=True"
            ):
                model(x)
        assert handle.stats().runs == runs
        model.zero_grad()
        model(x).mean().backward()


@pytest.mark.long
def test_gradients_that_fit_below_the_budget_or_are_planned_for_are_no_difference() -> None:
    model, x = partly_frozen()
    with applied(model, x, gradient_bytes(model)):
        micro_batches(model, x, 3)
    model.zero_grad(set_to_none=True)
    with applied(model, x, 0, accumulate=True):
        micro_batches(model, x, 3)
        model.zero_grad(set_to_none=False)
        model(x).mean().backward()


def test_gradients_of_others_do_not_count_twice_and_larger_storages_do() -> None:
    """Gradients may be views of one storage, which is larger than they are together."""
    model, x = wide()
    whole = torch.zeros(gradient_bytes(model) // 4 + 1)
    begin = 0
    for p in model.parameters():
        p.grad = whole[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    with applied(model, x, 3, accumulate=True), pytest.raises(PlanMismatchError, match=r"reckoned with 517\.00 KiB"):
        model(x)
    with applied(model, x, 4, accumulate=True):
        model(x)


def test_sparse_gradients_count_with_their_indices() -> None:
    model, x = wide()
    weight = next(model.parameters())
    weight.grad = torch.zeros_like(weight).index_fill_(0, torch.tensor([3]), 1.0).to_sparse()
    nbytes = 64 * (4 + 2 * 8)
    with applied(model, x, nbytes - 1), pytest.raises(PlanMismatchError, match=r"gradients of 1\.25 KiB"):
        model(x)
    with applied(model, x, nbytes):
        model(x)


def test_gradients_that_grow_later_are_noticed() -> None:
    """What was found in order is not looked at again while it is the same."""
    model, x = wide()
    first, second, *_ = model.parameters()
    with applied(model, x, first.numel() * 4):
        first.grad = torch.zeros_like(first)
        model(x)
        model(x)
        second.grad = torch.zeros_like(second)
        with pytest.raises(PlanMismatchError, match="gradients of"):
            model(x)


def test_forwards_without_gradients_are_not_held_up() -> None:
    model, x = wide()
    with applied(model, x, 0):
        give_gradients(model)
        with torch.no_grad():
            model(x)


# ---------------------------------------------------------------- step=


def test_a_step_that_runs_backward_by_itself_is_refused() -> None:
    model, x = wide()

    def step() -> torch.Tensor:
        model(x).mean().backward()
        return model(x).mean()

    for run in (profile, ckptplan.estimate):
        with pytest.raises(UnsupportedModelError, match=r"one micro-batch, with accumulate=True"):
            run(model, step=step)  # type: ignore[operator]
    assert all(p.grad is None for p in model.parameters())
