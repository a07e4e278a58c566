from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from small_models import Transformer
from torch import nn
from typer.testing import CliRunner

import ckptplan
from ckptplan.cli.app import app
from ckptplan.cli.tables import fit_table
from ckptplan.core.device import find_device, known_devices
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.estimate import ERROR, Estimate
from ckptplan.core.request import Training
from ckptplan.core.units import GIB
from ckptplan.fitting.batch import Batches, largest
from ckptplan.fitting.survey import DeviceFit, between_batches, survey
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.planning import job as jobs
from ckptplan.profiling.profiler import planned_profiles
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.workload.inputs import resized
from ckptplan.referee.rules import Violation

MIB = 1 << 20


def rows(n: int) -> torch.Tensor:
    return torch.zeros(n, 32, 64)


def layers(depth: int = 2, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        parts = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(depth)]
        return nn.Sequential(*parts)


@pytest.fixture
def model() -> nn.Module:
    return layers()


BUDGET = 3 * MIB // 2
"""Takes a handful of samples, so that a search can be repeated by trying every batch."""


@functools.cache
def kept() -> ckptplan.BatchFit:
    """The search without plans."""
    return ckptplan.max_batch_size(layers(), rows, BUDGET / GIB, plan=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_model.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def layers():\n"
        "    parts = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]\n"
        "    return nn.Sequential(*parts)\n"
        "def fixed():\n"
        "    return layers(), (torch.zeros(4, 64),)\n"
        "def build(batch=2):\n"
        "    return layers(), (torch.zeros(batch, 64),)\n"
        "def odd():\n"
        "    return nn.Bilinear(4, 4, 4), (torch.zeros(2, 4), torch.zeros(3, 4))\n"
    )

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


# --- the search ---


@pytest.mark.parametrize("slope", [1, 7, 1000])
@pytest.mark.parametrize(("fixed", "budget"), [(0, 5), (5, 5), (5, 999), (100_000, 100_001), (100_000, 123_456)])
def test_the_search_ends_between_a_batch_that_fits_and_the_next(slope: int, fixed: int, budget: int) -> None:
    asked: list[int] = []

    def needs(n: int) -> int:
        asked.append(n)
        return fixed + slope * n

    low, high = largest(needs, budget, 4096)
    right = min(max((budget - fixed) // slope, 0), 4096)
    assert low == right
    assert high == (None if right == 4096 else right + 1)
    assert len(asked) == len(set(asked)) <= 14


def test_the_search_keeps_its_promise_where_bytes_jump_and_fall() -> None:
    def needs(n: int) -> float:
        return float("inf") if n > 300 else 10 * n + 997 * (n % 13) + 2000 * (n > 100)

    known: dict[int, float] = {}
    for budget in range(1000, 16000, 137):
        low, high = largest(needs, budget, 4096, known)
        assert high == low + 1
        assert low == 0 or needs(low) <= budget
        assert needs(high) > budget


# --- max_batch_size ---


@pytest.mark.long
def test_kept_is_the_largest_by_brute_force(model: nn.Module) -> None:
    found = kept()
    needed = [ckptplan.estimate(model, rows(n)).reserved_bytes for n in range(1, found.batch + 4)]
    fits = [n for n, nbytes in enumerate(needed, 1) if nbytes <= BUDGET]
    assert found.batch == max(fits) > 2
    assert found.peak_bytes == needed[found.batch - 1]
    assert (found.next_batch, found.next_bytes) == (found.batch + 1, needed[found.batch])
    assert found.measured_peak_bytes is not None
    # Measured without what a loop of two steps holds, on the CPU: the estimate is held to 1 % elsewhere.
    assert found.measured_peak_bytes <= BUDGET
    assert found.measured_peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)


def test_a_plan_lets_more_in_and_is_measured(model: nn.Module) -> None:
    planned = ckptplan.max_batch_size(model, rows, BUDGET / GIB, time_limit_s=2)
    assert planned.batch > kept().batch
    assert planned.plan is not None
    assert planned.plan.peak_bytes == planned.peak_bytes <= planned.budget_bytes == BUDGET
    assert planned.next_batch == planned.batch + 1
    assert planned.tried[planned.next_batch] > planned.budget_bytes
    assert planned.verification is not None
    assert planned.verification.within_budget
    assert planned.verification.plain_peak_bytes is None
    with pytest.raises(InfeasibleBudgetError):
        ckptplan.solve(model, BUDGET / GIB, inputs=rows(planned.batch + 1), menus=False, time_limit_s=2)
    assert f"batch     {planned.batch} fits" in str(planned)


@pytest.mark.long
def test_a_plan_s_reserved_bytes_count_on_cuda() -> None:
    model = layers(device="meta")
    found = ckptplan.max_batch_size(model, rows, 60 * MIB / GIB, device="a100-40gb", time_limit_s=1, limit=64)
    assert found.plan is not None
    step = ckptplan.estimate(model, rows(found.batch), device="a100-40gb", plan=found.plan)
    assert max(step.reserved_bytes, found.plan.peak_bytes) == found.peak_bytes <= 60 * MIB


def test_the_limit_is_said() -> None:
    found = ckptplan.max_batch_size(layers(1), rows, 1, plan=False, limit=5)
    assert (found.batch, found.next_batch) == (5, None)
    assert "limit=5" in str(found)


def test_one_sample_that_does_not_fit_names_the_smallest_budget(model: nn.Module) -> None:
    def samples(batch: int) -> torch.Tensor:
        return rows(256 * batch)

    with pytest.raises(InfeasibleBudgetError) as kept:
        ckptplan.max_batch_size(model, samples, 1e-5, plan=False)
    assert kept.value.min_peak_bytes == ckptplan.estimate(model, samples(1)).reserved_bytes
    with pytest.raises(InfeasibleBudgetError, match="batch of 1") as planned:
        ckptplan.max_batch_size(model, samples, 1e-4, time_limit_s=1)
    assert planned.value.min_peak_bytes < kept.value.min_peak_bytes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"make_inputs": rows(2)}, "function from a batch size"),
        ({"make_inputs": lambda n: rows(2)}, r"make_inputs\(1\) and make_inputs\(2\)"),
        ({"make_inputs": lambda n: rows(1) if n == 1 else 1 / 0}, "ZeroDivisionError"),
        ({"limit": 0}, "limit=0"),
        ({"max_overhead": 0.1, "plan": False}, "max_overhead"),
        ({"device": "a100"}, "a100-40gb"),
    ],
)
def test_bad_input_is_refused(model: nn.Module, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        ckptplan.max_batch_size(model, **{"make_inputs": rows, "budget_gb": 1, **arguments})  # type: ignore[arg-type]


def test_a_plan_that_the_referee_rejects_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Violation("budget", "blocks.0", "made up")
    monkeypatch.setattr(jobs, "examined", lambda *args, **kwargs: ((broken,), None))
    with pytest.raises(ckptplan.CkptPlanError, match="referee rejects"):
        ckptplan.max_batch_size(layers(1), rows, BUDGET / GIB, time_limit_s=0.2, limit=1)


# --- many devices ---


@pytest.mark.long
def test_devices_of_a_class_take_the_same_bytes() -> None:
    model, tokens = Transformer(depth=1), torch.zeros(8, 32, dtype=torch.long)
    classes: dict[object, list[Target]] = {}
    for device in known_devices().values():
        target = Target(torch.device("cpu"), device)
        classes.setdefault(target.byte_class, []).append(target)
    assert 4 <= len(classes) <= 5, "by PyTorch's version, Blackwell has Hopper's cuBLAS workspace or the older one"
    for targets in classes.values():
        sizes = [TrainingBytes(model, target, Training(amp="bfloat16")) for target in (targets[0], targets[-1])]
        assert len({each.reserved(each.step(tokens)) for each in sizes}) == 1


def test_chains_between_batches_are_those_traced(model: nn.Module) -> None:
    target = find_target(model, "a100-40gb")
    assert target.spec is not None
    batches = Batches(rows, TrainingBytes(model, target))

    @functools.cache
    def traced(n: int) -> ckptplan.Profile:
        return planned_profiles(batches.step(n), None, target, [target.spec])[0]

    made = between_batches(traced(4), 4, traced(16), 16, 10)
    real = traced(10)
    assert made is not None
    for a, b in zip(made.storages, real.storages, strict=True):
        assert abs(a.nbytes - b.nbytes) < 2 * 512  # blocks round up
    keep = (ckptplan.Decision("keep"),) * len(real.stages)
    peaks = [ckptplan.simulate(p, keep).peak_bytes for p in (made, real)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)  # of a sum of such blocks
    other = planned_profiles(Batches(rows, TrainingBytes(layers(1), target)).step(4), None, target, [target.spec])[0]
    assert between_batches(traced(4), 4, other, 16, 10) is None
    bare = tuple(dataclasses.replace(storage, origin="") for storage in traced(16).storages)
    assert between_batches(traced(4), 4, dataclasses.replace(traced(16), storages=bare), 16, 10) == made


@pytest.mark.parametrize("menus", [False, True])
def test_profiles_of_devices_from_one_trace_are_those_of_each(model: nn.Module, menus: bool) -> None:
    devices = [known_devices()["a100-40gb"], known_devices()["rtx4090"]]
    target = find_target(model, devices[0])
    assert target.byte_class == find_target(model, devices[1]).byte_class
    step = Batches(rows, TrainingBytes(model, target)).step(64)
    for device, found in zip(devices, planned_profiles(step, None, target, devices, menus=menus), strict=True):
        assert found == ckptplan.profile(model, rows(64), device=device, menus=menus)


@pytest.mark.long
def test_survey_agrees_with_estimates_and_plans(model: nn.Module) -> None:
    devices = [known_devices()["t4"], known_devices()["a100-40gb"]]

    def needs(n: int, device: ckptplan.Device) -> int:
        return ckptplan.estimate(model, rows(n), device=device).reserved_bytes

    for row in survey(model, rows, devices, 64, budget_bytes=80 * MIB, time_limit_s=0.1):
        assert row.kept_bytes == needs(64, row.device)
        assert needs(row.most_kept, row.device) <= 80 * MIB < needs(row.most_kept + 1, row.device)
        assert row.most_planned >= row.most_kept > 0
        assert row.planned_bytes <= row.kept_bytes
    found = ckptplan.max_batch_size(model, rows, 80 * MIB / GIB, device=devices[-1], plan=False)
    assert (found.batch, found.measured_peak_bytes) == (row.most_kept, None)


class Adapted(nn.Module):
    """A frozen layer of 4 MiB with an adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(1024, 8, bias=False), nn.Linear(8, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Adapted() for _ in range(4)))


@pytest.mark.long
def test_frozen_weights_that_do_not_fit_at_once_fit_in_parts() -> None:
    device = replace(find_device("t4"), compute_capability=None)  # its bytes are those of tensors
    model, budget = adapted(), 11 * MIB
    [row] = survey(model, lambda n: torch.zeros(n, 1024), [device], 16, budget_bytes=budget, offload=("weights",))
    plan = ckptplan.solve(
        model, budget_gb=budget / GIB, inputs=torch.zeros(16, 1024), device=device, offload="weights", menus=False
    )
    assert sum(p.nbytes for p in model.parameters() if not p.requires_grad) > budget
    assert row.planned_bytes <= budget < row.kept_bytes
    assert row.plan is not None
    assert row.plan.between == plan.between > 0
    assert row.plan.step_s == pytest.approx(plan.step_s, rel=0.01)  # the gap at which a search ends
    assert row.most_planned > 16
    assert row.most_plan is not None
    assert f"plan {row.plan.overhead:+.1%}" in list(fit_table([row], batch=16).columns[2].cells)


@pytest.mark.long
def test_weights_have_to_fit_when_they_are_loaded() -> None:
    model, target = adapted(), find_target(adapted(), "t4")
    batches = Batches(lambda n: torch.zeros(n, 1024), TrainingBytes(model, target))
    loaded = batches.sizes.loaded_bytes(batches.step(16))
    assert loaded >= sum(p.nbytes for p in model.parameters())
    [row] = survey(
        model,
        batches.make_inputs,
        [find_device("t4")],
        16,
        budget_bytes=11 * MIB,
        offload=("weights",),
        time_limit_s=0.2,
    )
    assert (row.planned_bytes, row.plan, row.most_planned) == (loaded, None, 0)


@pytest.mark.long
def test_a_slowdown_limits_plans_that_move_weights() -> None:
    device = replace(find_device("t4"), compute_capability=None)
    limits: dict[str, Any] = {"device": device, "max_overhead": 50.0, "limit": 8, "time_limit_s": 1.0}
    found = ckptplan.max_batch_size(
        adapted(), lambda n: torch.zeros(n, 1024), 11 * MIB / GIB, offload="weights", **limits
    )
    assert found.plan is not None
    assert found.plan.between > 0
    assert found.plan.overhead <= 50.0


# --- the commands ---


def test_estimate_prints_and_saves(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "estimate.json"
    result = run("estimate", "a_model:build", "--device", "a100-40gb", "--optimizer", "adamw", "--json", path)
    assert result.exit_code == 0, result.output
    found = Estimate.load(path)
    assert str(found) in result.stdout
    assert [p.name for p in found.phases][-1] == "inference"
    found.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())
    (tmp_path / "again.json").write_text('{"schema": "ckptplan.estimate/1", "device": "x"}')
    with pytest.raises(InvalidInputError, match="complete"):
        Estimate.load(tmp_path / "again.json")


def test_equal_tensors_of_repeated_layers_are_one_line(run: Callable[..., Result]) -> None:
    lines = run("estimate", "a_model:build", "--optimizer", "adamw").stdout.splitlines()
    assert any("2 x float32[256, 64] *.0.weight" in line for line in lines), lines


def test_fit_answers_on_one_screen(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[torch.Size]] = []
    answers: list[DeviceFit] = []

    def once(model: nn.Module, make_inputs: Callable[[int], Any], *args: Any, **kwargs: Any) -> list[DeviceFit]:
        """Answers for the second model what it found for the first, since the solver's time isn't the same twice."""
        batches.append([make_inputs(n)[0].shape for n in (1, 4, 33)])
        answers.extend([] if answers else survey(model, make_inputs, *args, **kwargs))
        return answers

    monkeypatch.setattr("ckptplan.fitting.survey.survey", once)
    arguments = ("--device", "a100-40gb", "--device", "t4", "--budget-gb", 0.05, "--time-limit", 0.2)
    fixed, built = (run("fit", f"a_model:{name}", "--batch", 4, *arguments) for name in ("fixed", "build"))
    assert batches[0] == batches[1] == [(1, 64), (4, 64), (33, 64)]
    assert fixed.exit_code == 0, fixed.output
    assert built.exit_code == 0, built.output
    assert fixed.stdout == built.stdout
    lines = fixed.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if "MiB" in line and "needs" not in line] == ["a100-40gb", "t4"]


@pytest.mark.parametrize(
    ("share", "said"), [(1 - ERROR, "fits"), (0.96, "fits, barely"), (1.0, "fits, barely"), (1.01, None)]
)
def test_what_is_within_the_error_of_estimates_fits_barely(share: float, said: str | None) -> None:
    needed, has = int(share * (1 << 34)), 1 << 34
    model = nn.Linear(4, 4)
    found = ckptplan.estimate(model, torch.randn(2, 4), device="t4")
    found = replace(found, reserved_bytes=needed - found.context_bytes, capacity_bytes=has)
    assert f"of 16.00 GiB: {said or 'does NOT fit'}\n" in str(found)
    assert found.fits == (said is not None)
    row = DeviceFit(find_device("t4"), 1, has, needed, needed, None, 1, 1, None)
    cell = next(iter(fit_table([row], batch=1).columns[2].cells))
    assert cell == (said or "needs 16.16 GiB")


@pytest.mark.parametrize(
    ("command", "arguments", "text"),
    [
        ("estimate", ("a_model:build", "--device", "a100"), "a100-40gb"),
        ("fit", ("a_model:absent",), "absent"),
        ("estimate", ("profile.json",), "package.module:name"),
        ("fit", ("a_model:build", "--device", "t4", "--optimizer", "adamm"), "adamw"),
    ],
)
def test_errors_are_one_line(run: Callable[..., Result], command: str, arguments: tuple[str, ...], text: str) -> None:
    result = run(command, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert text in result.stderr


def test_inputs_are_repeated_and_cut() -> None:
    x = torch.arange(6).reshape(3, 2)
    assert resized({"x": x, "scale": torch.tensor(1.0)}, 5)["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert resized((x, torch.zeros(3, 7)), 2)[1].shape == (2, 7)
    with pytest.raises(InvalidInputError, match="def build"):
        resized((x, torch.zeros(4)), 2)
