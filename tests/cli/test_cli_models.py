"""Commands that take a model."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from command_line import Run, assert_clean_error, output
from rich.console import Console

import ckptplan
from ckptplan.cli.demo import DemoRow, Size, plans_of, verdict
from ckptplan.cli.demo import run as demonstrate
from ckptplan.core.estimate import Estimate
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.runtime.verify import Verification, verify


def test_compare_takes_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_model.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), (torch.ones(256, 64),)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = output(run("compare", "tiny_model:make", "--budgets", "50", "--planners", "ckptplan,recompute_all"))
    assert "recompute_all" in result
    assert_clean_error(
        run("compare", "tiny_model:absent", "--budgets", "50"), "tiny_model:absent", "package.module:name"
    )
    assert_clean_error(run("compare", "tiny_model:number", "--budgets", "50"), "int", "torch.nn.Module")


SMALL = Size(narrow=16, hidden=64, outer=2, wide=64, heads=2, inner=2, context=256, batch=4)


def test_demo_measures_equal_gradients_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert demonstrate("cpu", steps=3, size=SMALL, time_limit_s=2.0, console=Console(width=160))
    out = capsys.readouterr().out
    assert "Losses and gradients equal plain training's bit for bit, every peak is in budget." in out
    for row in ("plain", "uniform", "greedy", "ckptplan"):
        assert re.search(rf"^ *{row} .*MiB", out, re.MULTILINE)
    assert torch.get_num_threads() == threads


def test_demo_has_a_plan_without_swaps_where_its_own_may_swap() -> None:
    chain = ckptplan.Profile.from_chain([1.0] * 4, [2.0] * 4, [100] * 4, [300] * 4, input_bytes=100)
    plans, notes = plans_of(chain, 1.0, swaps=True, greedy="pooch")
    assert list(plans) == ["ckptplan", "uniform", "greedy", "recompute"]
    assert not any(choice.transfers for choice in plans["recompute"].choices)
    assert len(notes) == 1


def made_row(peak_bytes: int = 90, *, equal: bool = True, other_paths: int = 0, predicted_s: float = 1.0) -> DemoRow:
    found = SimpleNamespace(
        measured_peak_bytes=peak_bytes, plain_peak_bytes=180, measured_step_s=1.1, plain_step_s=1.0,
        predicted_plain_step_s=predicted_s, gradients_equal=equal, other_paths=other_paths,
    )  # fmt: skip
    return DemoRow("ckptplan", cast(ckptplan.Plan, SimpleNamespace(budget_bytes=100)), cast(Verification, found))


def test_demo_says_what_its_plan_saves_and_fails_on_broken_promises() -> None:
    lines, sound = verdict([made_row()])
    assert sound
    assert lines[1] == "Measured with ckptplan: 50% less memory than plain, +10.0% time."
    for fields, text in (
        ({"peak_bytes": 101}, "ckptplan: the measured peak is above the budget"),
        ({"equal": False}, "ckptplan: loss or gradients differ from those of the plain step"),
        ({"other_paths": 2}, "ckptplan: a stage saved something else than profiled"),
    ):
        lines, sound = verdict([made_row(), made_row(**fields)])  # type: ignore[arg-type]
        assert not sound
        assert text in "\n".join(lines)
        assert not any("Every loss" in line for line in lines)
    for predicted_s, busy in ((1.4, False), (0.6, True), (1.6, True)):
        lines, sound = verdict([made_row(predicted_s=predicted_s)])
        assert sound
        assert any("Try again when it is idle" in line for line in lines) == busy


def test_estimate_takes_several_batches(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turns_model.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())\n"
        "def build(batch=4):\n"
        "    return model, torch.ones(batch, 64)\n"
        "def epoch():\n"
        "    return model, [torch.ones(n, 64) for n in (32, 16, 8)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sizes = run("estimate", "turns_model:build", "--batches", "32, 16,8", "--json", tmp_path / "sizes.json")
    listed = run("estimate", "turns_model:epoch", "--json", tmp_path / "listed.json")
    assert sizes.exit_code == listed.exit_code == 0, sizes.output + listed.output
    assert "3 in turn; batch 1 is [0][0] float32[32, 64]" in sizes.stdout
    assert Estimate.load(tmp_path / "sizes.json") == Estimate.load(tmp_path / "listed.json")
    emptied = run("estimate", "turns_model:epoch", "--device", "l4", "--empty-cache")
    assert "empties the allocator's cache after each step" in emptied.stdout
    assert_clean_error(run("estimate", "turns_model:build", "--empty-cache"), "empty_cache=True", "CPU")
    assert_clean_error(run("estimate", "turns_model:build", "--batches", "4,x"), "--batches", "'x'")
    assert_clean_error(run("estimate", "turns_model:epoch", "--batches", "4"), "a list of 3 batches")
    assert_clean_error(run("solve", "turns_model:epoch", "--budget-gb", "1"), "a list of 3", "the largest batch")


def test_profile_writes_what_solve_takes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiled_model.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), (torch.ones(256, 64),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "profile.json"
    options = ("--optimizer", "adamw", "--amp", "bfloat16", "--accumulate", "--ddp", "--swap-dir", tmp_path)
    result = output(run("profile", "profiled_model:build", *options, "-o", path))
    found = Profile.load(path)
    assert str(found) in result
    assert "written to" in result
    made = found.fingerprint
    assert made.optimizer == "AdamW"
    assert made.accumulates
    assert made.parallel.startswith("ddp")
    assert made.autocast == "bfloat16"
    assert run("solve", path, "--budget", "50%").exit_code == 0
    output(run("profile", "profiled_model:build", "--device", "a100-40gb", "--fsdp", "4", "-o", path))
    made = Profile.load(path).fingerprint
    assert made.device == "planned for a100-40gb"
    assert made.parallel.startswith("fsdp, 4 ranks")
    assert_clean_error(run("profile", path), "is not a model")
    assert_clean_error(run("profile", "profiled_model:build", "-o", tmp_path), "it is a folder")


@pytest.mark.usefixtures("few_variants")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.long
def test_layers_are_compiled_where_it_is_asked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocks_model.py").write_text(
        "import torch\n"
        "from torch.nn import GELU, Linear, Sequential\n"
        "def build():\n"
        "    layers = [Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(3)]\n"
        "    return Sequential(*layers), (torch.ones(256, 64),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = tmp_path / "plan.json"
    assert "3 layers of 1 kind are compiled" in output(
        run("solve", "blocks_model:build", "--compile", "--budget", "60%", "-o", plan)
    )
    output(run("frontier", "blocks_model:build", "--compile", "--points", "2", "-o", tmp_path / "plans"))
    for made in (Plan.load(plan), *Frontier.load(tmp_path / "plans" / "frontier.json")):
        assert made.fingerprint.compiled == ("0", "1", "2")
        model, inputs = importlib.import_module("blocks_model").build()
        assert verify(model, made, inputs, repeats=1).gradients_equal
    output(run("profile", "blocks_model:build", "-o", tmp_path / "profile.json"))
    assert_clean_error(run("solve", tmp_path / "profile.json", "--compile", "--budget", "60%"), "compile", "a profile")


def test_names_that_are_no_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text("{}")
    assert_clean_error(
        run("solve", "profle.json", "--budget-gb", "1"), "No such file: profle.json; did you mean profile.json?"
    )
    assert_clean_error(run("solve", "absent.json", "--budget-gb", "1"), "No such file", "give a profile's file, or")
    assert_clean_error(run("solve", "mymodel.build", "--budget-gb", "1"), "No such file", "maybe mymodel:build")


def test_a_file_that_can_not_be_written_is_an_error_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptplan.cli.plan.subject_of", lambda source: pytest.fail("it has begun"))
    there = str(tmp_path / "absent" / "plan.json")
    assert_clean_error(run("solve", "a:b", "--budget-gb", "1", "-o", there), "there is no folder", "make it first")
    assert_clean_error(run("solve", "a:b", "--budget-gb", "1", "-o", str(tmp_path)), "it is a folder")


def test_an_error_in_the_users_code_is_shown_from_there_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_model.py").write_text(
        "import torch\n\ndef build():\n    return inner()\n\ndef inner():\n    return torch.zeros(2) @ torch.zeros(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = run("solve", "users_model:build", "--budget-gb", "1")
    assert result.exit_code == 1
    assert "your code raised an error" in result.stderr
    assert "return inner()" in result.stderr
    assert "inconsistent tensor size" in result.stderr
    assert str(Path(ckptplan.__file__).parent) not in result.stderr
    assert len(result.stderr.splitlines()) < 12
