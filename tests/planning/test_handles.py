"""Plans whose handle wasn't kept are taken off by the model, and replaced; a budget beyond the device is warned of."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError, UnsupportedModelError

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def is_plain(model: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in model.modules())


def planned(model: nn.Module, share: str = "50%") -> ckptplan.Plan:
    return ckptplan.solve(model, budget=share, inputs=X, loss_fn=loss_of, time_limit_s=0.2)


@functools.cache
def plan_of_blocks() -> ckptplan.Plan:
    return planned(blocks())


def by_plan(model: nn.Module, **options: Any) -> None:
    ckptplan.apply(model, plan_of_blocks(), **options)


def by_budget(model: nn.Module, **options: Any) -> None:
    ckptplan.apply(model, budget="50%", loss_fn=loss_of, time_limit_s=0.2, **options)


def by_budget_and_forward(model: nn.Module, **options: Any) -> None:
    by_budget(model, **options)
    loss_of(model(X)).backward()
    model.zero_grad()


WAYS: list[Callable[..., None]] = [by_plan, by_budget, by_budget_and_forward]


@pytest.mark.parametrize("applied", WAYS)
@pytest.mark.long("by_budget_and_forward")
def test_a_plan_is_taken_off_without_its_handle_and_a_model_freed_with_it(applied: Callable[..., None]) -> None:
    model = blocks()
    assert not ckptplan.remove(model)  # there is none
    applied(model)
    gc.collect()
    assert not is_plain(model)
    assert ckptplan.remove(model)
    assert is_plain(model)
    assert not ckptplan.remove(model)
    applied(model, replace=True)  # nothing
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(WAYS), (WAYS[2], WAYS[0])])
def test_a_plan_replaces_another(before: Callable[..., None], after: Callable[..., None]) -> None:
    model, plain = blocks(), blocks()
    before(model)
    with pytest.raises(UnsupportedModelError, match=r"already.*ckptplan\.remove\(.*replace=True"):
        by_plan(model)
    after(model, replace=True)
    for each in (model, plain):
        loss_of(each(X)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert ckptplan.remove(model)
    assert is_plain(model)


@pytest.mark.parametrize("before", WAYS)
def test_a_plan_that_cant_be_applied_leaves_the_former(before: Callable[..., None]) -> None:
    model, plan = blocks(), plan_of_blocks()
    before(model)
    for options in ({"check": "never"}, {"strict": 2}):
        with pytest.raises(InvalidInputError):
            ckptplan.apply(model, plan, replace=True, **options)
    assert not is_plain(model)
    loss_of(model(X)).backward()
    assert ckptplan.remove(model)
    assert is_plain(model)


@pytest.mark.long
def test_a_budget_beyond_the_device_is_warned_of() -> None:
    there = psutil.virtual_memory().total / 2**30
    for budget, model, options in ((there + 1, blocks(), {}), (25, blocks().to("meta"), {"device": "rtx4090"})):
        with pytest.warns(RuntimeWarning, match=r"the budget, .* GiB, is more than all memory of .*units of 2\*\*30"):
            ckptplan.solve(model, budget, inputs=X.to(next(model.parameters()).device), time_limit_s=0.2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptplan.solve(blocks(), there - 1, inputs=X, time_limit_s=0.2)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.long("True")
def test_solving_in_a_pause_ends_no_pause(forward: bool) -> None:
    model = blocks()
    with ckptplan.apply(model, budget="50%", loss_fn=loss_of, time_limit_s=0.2) as handle:
        if forward:
            loss_of(model(X)).backward()
        with handle.paused():
            planned(model)
            assert is_plain(model)
        assert not is_plain(model)
    assert not ckptplan.remove(model)
