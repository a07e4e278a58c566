"""Plans that would silently not run, or beside the model's own checkpointing, and what they are given in passing."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from small_models import assert_same, gradients
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError, PlanMismatchError, UnsupportedModelError
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.tensors.private import saved_tensors_hooks

X = torch.randn(512, 16)


class Layer(nn.Module):
    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, count: torch.Tensor | int | None = None) -> torch.Tensor:
        return self.inner(x) if count is None else self.inner(x) / count


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **more)
        return x


def made() -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    return model, ckptplan.solve(model, budget="20%", inputs=X, menus=False, time_limit_s=0.2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_by_its_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    twin = copy.deepcopy(model)
    twin(X).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = q.grad
    optimizer.step()
    optimizer.zero_grad()


def test_a_plan_that_has_not_acted_in_the_first_step_is_noticed() -> None:
    model, plan = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckptplan.apply(model, plan) as handle, warnings.catch_warnings(action="error"):
        other = nn.Linear(16, 2)
        train(other, torch.optim.SGD(other.parameters(), lr=0.1))  # that of another model
        with handle.paused():
            train(model, optimizer)
        with pytest.raises(RuntimeWarning, match=r"no forward has followed the plan.*not a copy of it"):
            train_by_its_copy(model, optimizer)
        train_by_its_copy(model, optimizer)  # once is enough
    with ckptplan.apply(model.train(), plan), warnings.catch_warnings(action="error"):
        train(model, optimizer)
        train_by_its_copy(model, optimizer)


def test_training_in_evaluation_mode_follows_the_plan() -> None:
    (model, plan), (plain, _) = made(), made()
    with ckptplan.apply(model, plan, strict=True) as handle:
        for _ in range(2):
            for each in (plain, model):
                each.eval().zero_grad()
                loss = each(X).sum()
                each.train()
                loss.backward()
            assert_same([gradients(model)], [gradients(plain)])
        found = handle.stats()
        assert found.recomputed_stages + found.swapped_out_bytes > 0
        assert not found.differences


def test_no_plan_is_made_for_a_larger_batch_in_evaluation_mode() -> None:
    model, plan = made()
    with ckptplan.apply(model, plan) as handle:
        model.eval()
        with pytest.warns(RuntimeWarning, match="the peak may exceed the budget"):
            model(torch.cat([X, X])).sum().backward()
        assert not handle.replans


@pytest.mark.long
def test_a_copy_that_is_trained_is_noticed() -> None:
    model, plan = made()
    with ckptplan.apply(model, plan) as handle:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        twin = copy.deepcopy(model)
        with pytest.warns(RuntimeWarning, match=r"a copy of the model, and copies have no plan"):
            train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
        assert handle.stats().differences == {"copy": 1}
        with ckptplan.apply(twin, ckptplan.solve(twin, budget="20%", inputs=X)):
            train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
        assert handle.stats().differences == {"copy": 1}


def test_another_training_between_forward_and_backward_is_noticed() -> None:
    model, plan = made()
    other = nn.Linear(16, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    with ckptplan.apply(model, plan) as handle:
        train(other, theirs)
        loss = model(X).sum()
        with pytest.warns(RuntimeWarning, match=r"updates other parameters while a forward waits"):
            train(other, theirs)
        loss.backward()
        train(other, theirs)
        assert handle.stats().differences == {"beside": 1}


def test_a_frozen_model_is_planned_for_inputs_that_need_gradients() -> None:
    model, _ = made()
    model.requires_grad_(False)
    prompt = torch.randn(512, 16, requires_grad=True)
    plan = ckptplan.solve(model, budget="20%", inputs=2 * prompt)
    with ckptplan.apply(model, plan, strict=True) as handle:
        found = []
        for context in (contextlib.nullcontext(), handle.paused()):
            with context:
                torch.manual_seed(1)
                found += torch.autograd.grad(model(2 * prompt).sum(), prompt)
        assert torch.equal(*found)
        assert handle.stats().recomputed_stages + handle.stats().swapped_out_bytes > 0
    with pytest.raises(InvalidInputError, match="does not depend on a parameter that needs gradients"):
        ckptplan.solve(model, budget="20%", inputs=X)
    with pytest.raises(InvalidInputError, match="has no parameters"):
        ckptplan.solve(nn.Tanh(), budget="20%", inputs=X)


def test_checkpointing_that_is_switched_on_later_is_noticed() -> None:
    model, plan = made()
    with ckptplan.apply(model, plan):
        model.layers[2].gradient_checkpointing = True
        with pytest.raises(UnsupportedModelError, match=r"'layers\.2' already checkpoints; set its"):
            model(X)


def test_advice_fits_what_is_larger() -> None:
    model, plan = made()
    with ckptplan.apply(model, plan, on_larger="follow"):
        with (
            pytest.warns(RuntimeWarning, match="was made without it"),
            pytest.warns(RuntimeWarning, match=r"solve again with the inputs of this step"),
            pytest.warns(RuntimeWarning, match="a stage saved 5 storages") as told,
        ):
            model(X, count=torch.ones(512, 16))
        assert len(told) == 3
        model(torch.cat([X, X]))  # of the same kind
    with ckptplan.apply(model, plan, strict=True):
        with pytest.raises(PlanMismatchError, match="was made without it"):
            model(X, count=torch.ones(512, 16))
        with pytest.raises(PlanMismatchError, match=r"with the largest shapes, or apply on_larger='replan'"):
            model(torch.cat([X, X]))


def test_verify_says_that_the_optimizer_is_missing() -> None:
    model, _ = made()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = ckptplan.solve(model, 1, inputs=X, optimizer=optimizer)
    assert "the plan counts the state of AdamW" in str(ckptplan.verify(model, plan, X, repeats=1))
    train(model, optimizer)
    assert "the plan counts" not in str(ckptplan.verify(model, plan, X, optimizer=optimizer, repeats=1))


def test_other_parameters_are_said_in_words() -> None:
    model, plan = made()
    model.layers[0].inner[0].weight.requires_grad_(False)
    with pytest.raises(PlanMismatchError, match=r"parameters with other names, shapes, types or requires_grad"):
        ckptplan.apply(model, plan)
    model.layers[0].inner[0].weight.requires_grad_(True)
    del model.layers[3]
    with pytest.raises(PlanMismatchError, match=r"was made for 8512 parameters, this model has 6384"):
        ckptplan.apply(model, plan)


class Masked(nn.Module):
    """Leaves its mask out where that has only ones, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        scores = None
        if attention_mask is not None and not bool(attention_mask.all()):
            scores = attention_mask[:, None, :, None].expand(-1, 64, -1, 64).float().exp()  # larger than all else
        for layer in self.layers:
            x = layer(x).tanh()
        return x if scores is None else x * scores.mean()


def test_a_mask_of_ones_is_planned_with_padding_too() -> None:
    torch.manual_seed(0)
    model, x, mask = Masked(), torch.randn(4, 64, 16), torch.ones(4, 64, dtype=torch.long)
    plan = ckptplan.solve(model, 0.05, inputs={"x": x, "attention_mask": mask})
    mask[1, -3:] = 0
    found = ckptplan.verify(model, plan, {"x": x, "attention_mask": mask}, repeats=1)
    assert found.within_budget
    need = found.measured_peak_bytes
    least = ckptplan.solve(model, budget="100%", inputs={"x": x, "attention_mask": torch.ones_like(mask)})
    assert least.budget_bytes >= need


def test_wrappers_that_plans_can_not_cover_are_refused_by_name() -> None:
    model, _ = made()
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        ckptplan.solve(nn.DataParallel(model), 1, inputs=X)
    model.hf_device_map = {"layers.0": 0, "layers.1": "cpu"}  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"device_map has spread the model over 0, cpu"):
        ckptplan.solve(model, 1, inputs=X)
    engine = type("DeepSpeedEngine", (Model,), {"__module__": "deepspeed.runtime.engine"})()
    with pytest.raises(UnsupportedModelError, match="DeepSpeed"):
        ckptplan.solve(engine, 1, inputs=X)


def test_hooks_that_a_ctrl_c_leaves_behind_are_taken_off() -> None:
    """It may come at the very beginning of `__exit__`: then nothing ends the context but the end of its object."""
    with OwnHooks(torch.clone, torch.clone):
        outer = saved_tensors_hooks(False)
        left = OwnHooks(torch.clone, torch.clone)
        left.__enter__()
        assert saved_tensors_hooks(False) != outer
        del left
        assert saved_tensors_hooks(False) == outer
    assert saved_tensors_hooks(False) is None
