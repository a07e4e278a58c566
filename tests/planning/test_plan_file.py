"""A plan in a file: taken by later runs of the same request, made anew for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_chains import random_chain
from small_models import build
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.planning import model_job
from ckptplan.planning.model_job import profile_step
from ckptplan.planning.plan_file import settings_of

HOW: dict[str, Any] = {"budget": "50%", "time_limit_s": 0.05, "menus": False}


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were profiled."""
    seen: list[str] = []

    def noted(step: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(step.model).__name__)
        return profile_step(step, *args, **kwargs)

    monkeypatch.setattr(model_job, "profile_step", noted)
    return seen


def test_the_next_run_takes_it(tmp_path: Path, profiled: list[str]) -> None:
    model, x = build("mlp")
    file = tmp_path / "plan.json"
    first = ckptplan.solve(model, inputs=x, plan_file=file, **HOW)
    again, x = build("mlp")
    assert ckptplan.solve(again, inputs=x, plan_file=file, **HOW) == first == ckptplan.Plan.load(file)
    assert len(profiled) == 1
    with ckptplan.apply(again, first) as handle:
        again(x).sum().backward()
        assert handle.stats().forwards == 1


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


CHANGES: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Any]]] = {
    "budget": ({"budget": "60%"}, lambda model: None),
    "actions": ({"actions": ("keep", "recompute")}, lambda model: None),
    "host": ({"host_gb": 0.0}, lambda model: None),
    "optimizer": ({"optimizer": "adamw"}, lambda model: None),
    "autocast": ({"amp": "bf16"}, lambda model: None),
    "accumulation": ({"accumulate": True}, lambda model: None),
    "loss": ({"loss_fn": lambda out: out.square().mean()}, lambda model: None),
    "settings": ({}, lambda model: setattr(model.get_submodule("0"), "scale", 2)),
    "batch": ({"inputs": torch.randn(7, 64)}, lambda model: None),
    "frozen": ({}, freeze),
    "mode": ({}, lambda model: model.eval()),
}


@pytest.mark.long
def test_another_request_has_another_plan(tmp_path: Path, profiled: list[str]) -> None:
    model, x = build("mlp")
    file = tmp_path / "plan.json"
    first = ckptplan.solve(model, plan_file=file, **{"inputs": x, **HOW})
    for name, (how, changed) in CHANGES.items():
        first.save(file)
        profiled.clear()
        model, x = build("mlp")
        changed(model)
        second = ckptplan.solve(model, plan_file=file, **{"inputs": x, **HOW, **how})
        assert profiled, name
        assert ckptplan.Plan.load(file) == second != first, name


@pytest.mark.long
def test_settings_of_an_optimizer_count_but_its_learning_rate(tmp_path: Path, profiled: list[str]) -> None:
    model, x = build("mlp")
    for number, how in ((1, {}), (1, {"lr": 0.5}), (2, {"momentum": 0.9}), (3, {"momentum": 0.9, "foreach": False})):
        optimizer = torch.optim.SGD(model.parameters(), **how)
        ckptplan.solve(model, inputs=x, optimizer=optimizer, plan_file=tmp_path / "plan.json", **HOW)
        assert len(profiled) == number


def test_settings_in_configs_count() -> None:
    class Config:
        def __init__(self, kernels: str) -> None:
            self._kernels, self.sizes, self.kind = kernels, (3, 4), torch.float32

    digests = []
    for kernels in ("sdpa", "sdpa", "eager"):
        model = nn.Linear(3, 3)
        model.config = Config(kernels)  # type: ignore[assignment]
        digests.append(settings_of(model))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.long
def test_a_file_that_can_not_be_written(tmp_path: Path, profiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is known before, it is an error; afterwards it costs the next run its time, not this one its plan."""
    model, x = build("mlp")
    with pytest.raises(InvalidInputError, match="there is no such folder"):
        ckptplan.solve(model, inputs=x, plan_file=tmp_path / "absent" / "plan.json", **HOW)
    assert not profiled
    file = tmp_path / "plan.json"
    first = ckptplan.solve(model, inputs=x, plan_file=file, **HOW)

    def full(self: Any, path: Path) -> None:
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ckptplan.Plan, "save", full)
    with pytest.warns(RuntimeWarning, match="isn't kept in .*No space left"):
        assert ckptplan.solve(model, inputs=x[:16], plan_file=file, **HOW) != first
    assert ckptplan.Plan.load(file) == first


@pytest.mark.long
def test_less_free_memory_than_the_plan_needs(
    tmp_path: Path, profiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the budget is what the device has free."""
    model, x = build("transformer")
    file = tmp_path / "plan.json"
    most = ckptplan.solve(model, inputs=x, plan_file=file, time_limit_s=0.05)
    assert most.least_peak_bytes is not None
    free = (most.least_peak_bytes + most.counted_bytes) // 2
    monkeypatch.setattr(model_job, "default_budget", lambda *args: free)
    assert ckptplan.solve(model, inputs=x, plan_file=file, time_limit_s=0.05).counted_bytes <= free
    assert len(profiled) == 2


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    model, x = build("mlp")
    plan = ckptplan.solve(model, inputs=x, **HOW)
    other, by_hand = tmp_path / "notes.json", tmp_path / "plan.json"
    other.write_text("{}")
    plan.save(by_hand)
    for file, text in ((other, "schema"), (by_hand, "wasn't made with plan_file=")):
        before = file.read_text()
        with pytest.raises(InvalidInputError, match=text):
            ckptplan.solve(model, inputs=x, plan_file=file, **HOW)
        assert file.read_text() == before


def test_a_function_is_not_told_from_another(tmp_path: Path) -> None:
    model, x = build("mlp")
    with pytest.raises(InvalidInputError, match="save the plan of a step="):
        ckptplan.solve(model, step=lambda: model(x).sum(), plan_file=tmp_path / "plan.json", **HOW)


def test_of_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    first, other = random_chain(3, 4), random_chain(4, 4)
    plan = ckptplan.solve(first, plan_file=file, **HOW)
    assert ckptplan.solve(first, plan_file=file, **HOW) == plan
    assert ckptplan.solve(other, plan_file=file, **HOW).step_s != plan.step_s
