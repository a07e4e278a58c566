"""Ctrl-C on the command line: the plans found so far are printed and written, and the exit code is 130."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import Run
from random_chains import homogeneous_chain, textbook_chain

from ckptplan import api
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB
from ckptplan.referee import validate
from ckptplan.solving import planner
from ckptplan.solving.frontier import everything_kept_bytes

pytestmark = pytest.mark.planning

COMMAND = (sys.executable, "-m", "ckptplan.cli", "solve")
LONG_S = 60
"""What interrupted searches were given."""


def assert_interrupted(result: Result, *texts: str) -> None:
    """Exit code 130 and one line on stderr, without a traceback."""
    assert result.exit_code == 130, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("interrupted")
    for text in texts:
        assert text in line
    assert "Traceback" not in result.output


def test_the_best_plan_so_far_is_printed_and_written(tmp_path: Path) -> None:
    """A program of its own, which gets the signal once it has shown a plan."""
    profile, path, output = textbook_chain(random.Random(1), 100), tmp_path / "profile.json", tmp_path / "plan.json"
    profile.save(path)
    budget = everything_kept_bytes(profile) // 2
    with subprocess.Popen(
        [*COMMAND, path, "--budget-gb", repr(budget / GIB), "--gap=0", f"--time-limit={LONG_S}", "-o", output],
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As in a shell's foreground; one run in the background inherits a SIGINT that is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as ran:
        assert ran.stderr is not None
        first = ran.stderr.readline()
        ran.send_signal(signal.SIGINT)
        out, rest = ran.communicate(timeout=LONG_S / 2)  # less than the search was given
    assert first.startswith("found: step")
    assert ran.returncode == 130, rest
    assert rest.splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in rest
    plan = Plan.load(output)
    assert validate(profile, plan, budget) == ()
    assert str(plan) in out
    assert "interrupted" in plan.notes[-1]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when a bound is being proven; all that is found before is handed out."""
    monkeypatch.setattr(planner, "lower_bound", raise_interrupt)


def raise_interrupt(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def chain() -> Profile:
    return homogeneous_chain(12, link_ratio=0.3)


@pytest.fixture
def profile_file(chain: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    chain.save(path)
    return path


def test_an_interrupt_while_modules_are_loaded_is_one_line() -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "ckptplan.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from ckptplan.cli.__main__ import main

main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


@pytest.mark.usefixtures("interrupted", "python_handles_interrupts")
def test_a_second_interrupt_leaves_the_plan_written(
    run: Run, chain: Profile, profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Plan.save

    def slow(plan: Plan, path: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        save(plan, path)

    monkeypatch.setattr(Plan, "save", slow)
    result = run("solve", profile_file, "--max-overhead", 3, "-o", tmp_path / "plan.json")
    assert_interrupted(result)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.overhead <= 3
    assert validate(chain, plan, plan.budget_bytes) == ()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupted")
def test_plans_of_a_frontier_are_kept(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    result = run("frontier", profile_file, "-o", tmp_path / "plans")
    assert_interrupted(result, "plans so far")
    plans = [Plan.load(path) for path in (tmp_path / "plans").glob("plan_*")]
    assert plans
    for plan in plans:
        assert validate(chain, plan, plan.budget_bytes) == ()


def test_without_a_plan_there_is_one_line(
    run: Run, profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, budget in (("solve", ["--budget-gb", 1]), ("frontier", [])):
        monkeypatch.setattr(api, command, raise_interrupt)
        result = run(command, profile_file, *budget, "-o", tmp_path / "plans")
        assert_interrupted(result, "no plan was found")
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
        assert not (tmp_path / "plans").exists()
    monkeypatch.setattr(planner, "smallest_peak", raise_interrupt)
    result = run("show", profile_file)
    assert_interrupted(result)
    assert result.stderr == "interrupted\n"
