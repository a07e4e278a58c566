"""What `verify` measures and says: bytes and times in separate steps, peaks by account, other paths than profiled."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import build, measured, plan_of

from ckptplan import demo
from ckptplan.core.plan import Plan
from ckptplan.runtime import verify as verifying
from ckptplan.runtime.apply import apply
from ckptplan.runtime.meter import Meter
from ckptplan.runtime.step import default_loss
from ckptplan.runtime.verify import verify


@functools.cache
def planned(name: str, action: Any) -> Plan:
    return plan_of(measured(name), [action] * len(measured(name).stages))


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Grows with every mark of a meter."""
    found: list[float] = []

    def clock() -> float:
        found.append(time.perf_counter())
        return found[-1]

    monkeypatch.setattr(Meter.__init__, "__defaults__", (None, clock))
    return found


def test_timed_steps_are_not_metered(marks: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("transformer")
    inside: list[int] = []
    real = verifying.timed

    def watched(run: Callable[[], Any], device: torch.device) -> float:
        before = len(marks)
        seconds = real(run, device)
        inside.append(len(marks) - before)
        return seconds

    monkeypatch.setattr(verifying, "timed", watched)
    found = verify(model, planned("transformer", "recompute"), inputs, repeats=2)
    assert found.gradients_equal
    assert inside == [0] * 4
    assert marks, "steps that aren't timed are metered"


def test_steps_inside_unmetered_are_as_most_of_a_training(marks: list[float]) -> None:
    model, inputs = build("mlp")

    def step() -> None:
        model.zero_grad()
        default_loss(model(inputs)).backward()

    with apply(model, planned("mlp", "recompute")) as handle:
        step()
        step()
        before, timed = len(marks), handle.stats().timed_steps
        with handle.unmetered():
            for _ in range(3):
                step()
        assert len(marks) == before
        assert handle.stats().timed_steps == timed
        step()
        assert len(marks) > before
        assert handle.stats().timed_steps == timed + 1


def test_other_paths_than_profiled_are_reported() -> None:
    """As where an operation's fake twin saves other storages than the real one: bytes decide, not positions."""
    model, inputs = build("transformer")
    plan = planned("transformer", "swap")
    found = verify(model, plan, inputs, repeats=1)
    assert found.other_paths == 0
    assert "saved something else" not in str(found)
    assert demo._row("as profiled", plan, found).sound

    moving = sum(bool(choice.moves) for choice in plan.choices)
    assert moving > 1
    one_more = tuple(
        (*sizes, 1 << 30) if choice.moves else sizes
        for sizes, choice in zip(plan.saved_bytes, plan.choices, strict=True)
    )
    found = verify(model, dataclasses.replace(plan, saved_bytes=one_more), inputs, repeats=1)
    assert found.gradients_equal
    assert found.other_paths == found.stats.other_paths == moving
    assert f"{moving} runs of stages saved something else than profiled" in str(found)
    assert f"saved something else than profiled: {moving}" in str(found.stats)
    assert not demo._row("otherwise", plan, found).sound
