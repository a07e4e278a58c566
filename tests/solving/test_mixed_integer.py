"""The mixed-integer program: never above the truth, mostly equal to it, and ended by Ctrl-C."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import brute_force
import pytest
from exactly import ROUNDING, between
from random_chains import homogeneous_chain, odd_chain, random_chain
from steered import steer

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.referee import simulate, validate
from ckptplan.solving.bound import cp_sat, process, scip
from ckptplan.solving.bound.mixed_integer import PeakModel
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import Evaluator, menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import smallest_peak, solve_profile

pytestmark = pytest.mark.planning

PROFILES = Path(__file__).parent.parent / "profiles"


def space_of(profile: Profile, *, segments: bool = True) -> PlanSpace:
    return PlanSpace(profile, menus(profile, ACTIONS), segments=segments)


def problem_of(profile: Profile, budget: int, *, segments: bool = True) -> process.Problem:
    return process.Problem(space_of(profile, segments=segments), budget)


@pytest.mark.parametrize("solver", get_args(process.Solver))
def test_bounds_and_plans_of_a_process_of_its_own(solver: process.Solver) -> None:
    """At the smallest peak of a real model the linear bound is far below, and the plan is the fastest."""
    profile = Profile.load(PROFILES / "hidden_model.json")
    budget = 16273809
    running = process.begin(solver, problem_of(profile, budget), time.monotonic() + 60, 1e-6)
    assert running is not None
    found = running.found(time.monotonic() + 60)
    assert found is not None
    assert not running.left
    assert found.solution is not None
    codes, segments, transfers = found.solution
    plan = solve_profile(profile, budget, Limits(gap=0.0))
    assert plan.step_s * (1 - 1e-3) <= found.bound_s <= plan.step_s * ROUNDING
    # Its own transfers are where better ones are looked for.
    schedule = Evaluator(profile).transferred(codes, segments, transfers, budget, time.monotonic() + 5)
    assert schedule is not None
    assert found.bound_s <= schedule.step_s * ROUNDING
    assert schedule.peak_bytes <= budget


def test_nothing_is_imported_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('mine')\n")
    monkeypatch.chdir(tmp_path)
    profile = homogeneous_chain(3, link_ratio=0.5)
    running = process.begin("scip", problem_of(profile, everything_kept_bytes(profile)), time.monotonic() + 30, 1e-4)
    assert running is not None
    assert running.found(time.monotonic() + 60) is not None


@functools.cache
def one_with_a_gap() -> tuple[Profile, int]:
    """A profile and a budget at which the linear bound leaves a gap."""
    profile = random_chain(40, 12)
    return profile, between(profile, 5)


def test_it_is_used_where_the_linear_bound_leaves_a_gap() -> None:
    profile, budget = one_with_a_gap()
    parts: list[str] = []
    plan = solve_profile(
        profile, budget, Limits(gap=0.0, time_limit_s=3), on_progress=lambda part, *_: parts.append(part)
    )
    assert validate(profile, plan, budget) == ()
    assert "mixed-integer program" in parts
    linear = lower_bound(space_of(profile), budget, deadline=time.monotonic() + 60)
    assert linear.bound_s <= plan.lower_bound_s <= simulate(profile, plan).makespan_s * ROUNDING


def test_a_program_with_a_few_segments_suggests_a_plan_and_proves_nothing() -> None:
    profile, budget = one_with_a_gap()
    best = solve_profile(profile, budget, Limits(gap=0.0))
    problem = problem_of(profile, budget)
    first = process.Few((), time.monotonic() + 30, 1e-4)
    running = process.begin("scip", problem, time.monotonic() + 60, 1e-6, first)
    assert running is not None
    few, whole = (running.found(time.monotonic() + 60) for _ in range(2))
    assert few is not None
    assert few.solution is not None
    assert not few.solution.segments
    assert (few.bound_s, few.complete) == (0.0, False)
    assert whole is not None
    assert whole.bound_s <= best.step_s * ROUNDING
    assert whole.solution_s <= few.solution_s * (1 + 2e-4)
    assert whole.complete
    assert running.left == 0


def test_long_chains_begin_with_a_few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, budget = one_with_a_gap()
    steer(monkeypatch, cp_sat_stages=0)
    asked: list[process.Few | None] = []

    def begin(*given: Any) -> None:
        asked.append(given[-1])

    monkeypatch.setattr(process, "begin", begin)
    solve_profile(profile, budget, Limits(gap=0.0, time_limit_s=5))
    assert len(asked) == 1
    assert asked[0] is not None


def test_no_time_and_a_process_that_fails_or_is_late_are_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = homogeneous_chain(6, link_ratio=0.5)
    problem = problem_of(profile, everything_kept_bytes(profile) // 2)
    assert process.begin("scip", problem, time.monotonic() - 1, 1e-4) is None
    for program in ("/no/such/program", ""):
        monkeypatch.setattr(sys, "executable", program)
        assert process.begin("scip", problem, time.monotonic() + 5, 1e-4) is None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    running = process.begin("scip", problem, time.monotonic() + 5, 1e-4)
    assert running is not None
    assert running.found(time.monotonic() + 60) is None
    # One that is late is ended.
    begun = sleepers(monkeypatch)
    running = process.begin("scip", problem, time.monotonic() + 0.1, 1e-4)
    assert running is not None
    assert not running.done
    assert running.found(time.monotonic() + 0.5) is None
    assert begun[0].returncode != 0


def sleepers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes that sleep in place of those that would be begun."""
    begun: list[subprocess.Popen[bytes]] = []
    popen, executable = subprocess.Popen, sys.orig_argv[0]

    def remembered(*args: object, **options: object) -> subprocess.Popen[bytes]:
        begun.append(popen([executable, "-c", "import time; time.sleep(60)"]))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", remembered)
    return begun


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, budget = one_with_a_gap()
    begun = sleepers(monkeypatch)

    def interrupt() -> None:
        while not begun:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        solve_profile(profile, budget, Limits(gap=0.0, time_limit_s=20))
    assert begun[0].wait(timeout=10) != 0


def test_a_plan_that_does_not_fit_in_the_time_of_a_known_one_is_no_bound() -> None:
    """Nothing is as fast as half of the optimum: that would be a defect, of which no bound is made."""
    profile = homogeneous_chain(6, link_ratio=0.5)
    budget = smallest_peak(profile).peak_bytes
    problem = replace(problem_of(profile, budget), below_s=profile.baseline_step_s * 1.001)
    for solver in (scip, cp_sat):
        found = solver.solve(problem, time.monotonic() + 60, 1e-6)
        assert found.solution is None
        assert found.bound_s == profile.baseline_step_s


def test_rows_are_not_held_more_exactly_than_the_solver_counts() -> None:
    """With 1e-9 for rows, which is its epsilon, SCIP called 8.07 s the optimum of a step that takes 8 s."""
    rng = random.Random(6085)
    profile = odd_chain(rng, rng.randint(2, 4))
    found = scip.solve(problem_of(profile, 575, segments=False), time.monotonic() + 60, 1e-6)
    best_s = brute_force.fastest(profile, 575, segments=False)
    assert best_s == pytest.approx(8.0)
    assert best_s * (1 - 1e-6) <= found.bound_s <= best_s * ROUNDING


def test_no_time_is_no_bound_on_the_smallest_peak() -> None:
    profile = homogeneous_chain(12, link_ratio=0.5)
    space, most = space_of(profile), everything_kept_bytes(profile)
    with pytest.raises(TimeoutError):
        cp_sat.smallest_peak(PeakModel(space, most), time.monotonic() - 1)
    with pytest.raises(TimeoutError):
        PeakModel(space, most, deadline=time.monotonic() - 1)
    found = smallest_peak(profile, Limits(time_limit_s=1e-3))
    assert found.bound_bytes <= smallest_peak(profile).peak_bytes <= found.peak_bytes
