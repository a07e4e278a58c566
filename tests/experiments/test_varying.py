"""A few of the trainings that experiments/varying.py draws and experiments/rebuilt.py has, and what compares them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("peft")

import trainings
import varying
from rebuilt import TABLE, drive
from trainings import NAMED, Record, Step, compared, over
from varying_models import FAMILIES

import ckptplan
from ckptplan.core.errors import PlanMismatchError

SEEDS = (16, 118)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.long
def test_a_drawn_training_breaks_no_promise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying, "STEPS", 4)
    result = varying.trial(seed)
    assert not result.broken, (result.failed, result.row.detail, result.row.over)
    assert result.row.kind == "infeasible" or len(result.row.peaks_bytes) > 1


@pytest.mark.long
def test_a_rebuilt_training_breaks_no_promise() -> None:
    row = compared(lambda record: drive("a_graph_cut_at_first", record))
    assert not row.broken, (row.detail, row.over)
    assert row.differences


def test_seeds_have_all_families_ways_and_kinds() -> None:
    specs = [varying.draw(seed) for seed in range(varying.NUMBER)]
    assert specs[:40] == [varying.draw(seed) for seed in range(40)]
    cells = {(spec.family, spec.way) for spec in specs}
    assert len(cells) == len(FAMILIES) * len(varying.WAYS)
    assert {what for spec in specs for what in spec.varies} == set(varying.VARIES)
    assert len(TABLE) >= 60
    assert all(case.run.__doc__ for case in TABLE.values())


def test_a_budget_that_is_exceeded_is_silent_until_a_warning_names_a_cause() -> None:
    def step(like: str, *told: str, peak: int = 2000, made: int = 0, since: int = 0) -> Step:
        return Step({}, like, peak, 1000, made, since, list(told))

    fits = step("a", peak=1000)
    assert over([fits, step("b"), step("b", "some words")]) == {"silent": [1, 2]}
    assert over([fits, step("b", f"{NAMED}why"), step("b")]) == {"first": [1, 2]}
    assert over([step("a", f"{NAMED}why"), step("a")]) == {"first": [0], "again": [1]}
    assert over([fits, step("b", f"{NAMED}why"), step("b", made=2, since=2)]) == {"first": [1], "silent": [2]}
    text = f"{NAMED}budget too small; the former plan stays applied"
    assert over([fits, step("b", text)]) == {"no plan": [1]}


@pytest.mark.parametrize("what", ["equal", "DIFFERENT", "ended", "refused"])
def test_what_becomes_of_a_training(what: str) -> None:
    def training(record: Record) -> None:
        model, x = nn.Linear(4, 4), torch.randn(8, 4)
        if what == "refused" and record.planned:
            raise PlanMismatchError("no")
        record.watch(model)
        for k in range(3):
            if what == "ended" and record.planned and k == 1:
                raise ValueError("no")
            loss = model(x).square().mean() + (what == "DIFFERENT" and record.planned and k == 2) * 1e-3
            record.step(loss.backward)
            record.also(loss)

    row = compared(training)
    assert row.kind == what
    assert (row.broken == "") == (what == "equal")
    if what == "DIFFERENT":
        assert "step 2" in row.detail


def test_planning_is_no_part_of_a_peak() -> None:
    """A step records what it takes; a plan that is made in it takes memory of its own, and records, too."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))

    def training(record: Record) -> None:
        handle: Any = None
        if record.planned:
            handle = ckptplan.apply(model, budget="100%", time_limit_s=0.2, on_progress=lambda text: None)
        record.watch(model, handle=lambda: handle)
        for _ in range(2):
            x = torch.randn(64, 32)
            record.step(lambda x=x: model(x).sum().backward(), x)  # type: ignore[misc]
            model.zero_grad()
        if handle is not None:
            handle.remove()

    plain, planned = Record(planned=False), Record(planned=True)
    for record in (plain, planned):
        trainings.run(training, record, 1)
    peaks = [[step.peak_bytes for step in record.steps] for record in (plain, planned)]
    assert peaks[0] == peaks[1]
    assert [step.budget_bytes is None for step in planned.steps] == [False, False]
