"""The mixed-integer program: never above the truth, mostly equal to it, and ended by Ctrl-C."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import brute_force
import pytest
from random_chains import homogeneous_chain, odd_chain, random_chain

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.referee import simulate, validate
from ckptplan.solving.bound import scip
from ckptplan.solving.bound.mixed_integer import MixedModel, _tree
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import menus
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import smallest_peak, solve_profile

pytestmark = pytest.mark.planning

ROUNDING = 1 + 1e-9  # sums of the same seconds in another order
PROFILES = Path(__file__).parent.parent / "profiles"


def in_this_process(model: MixedModel) -> float:
    """The bound in seconds; the start of a process would take most of the time."""
    from ortools.math_opt.python import mathopt

    found = mathopt.solve(model.model, mathopt.SolverType.GSCIP)
    return model.bound_s(found.termination.objective_bounds.dual_bound, scip.TOLERANCE)


@pytest.mark.parametrize("part", range(4))
def test_never_above_the_optimum_and_mostly_equal(part: int) -> None:
    seen = equal = 0
    for seed in range(part, 64, 4):
        rng = random.Random(seed)
        size = rng.randint(2, 4)
        profile = odd_chain(rng, size) if seed % 3 == 0 else random_chain(seed, size, most_options=4)
        host = None if rng.random() < 0.6 else rng.randint(0, 60)
        segments = rng.random() < 0.7
        space = brute_force.combinations(profile, segments=segments)
        least = brute_force.smallest_peak(profile, host_bytes=host, within=space)
        most = max(least, everything_kept_bytes(profile))
        for budget in {least, least + (most - least) // 4, least + (most - least) // 2}:
            best_s = brute_force.fastest(profile, budget, host_bytes=host, within=space)
            assert best_s is not None
            model = MixedModel(
                profile, menus(profile, ACTIONS, host_bytes=host), budget, host_bytes=host, segments=segments
            )
            bound_s = in_this_process(model)
            assert bound_s <= best_s * ROUNDING, (seed, budget)
            seen += 1
            equal += bound_s >= best_s * (1 - 1e-6)
    assert equal >= 0.7 * seen > 20  # the rest: links are fluids, and inner sweeps are left out


def test_bounds_and_plans_of_a_process_of_its_own() -> None:
    """At the smallest peak of a real model the linear bound is far below, and the plan is the fastest."""
    profile = Profile.load(PROFILES / "hidden_model.json")
    budget = 16273809
    model = MixedModel(profile, menus(profile, ACTIONS), budget)
    found = scip.solve(model.model, time.monotonic() + 60, 1e-6)
    assert found is not None
    codes, segments, _ = model.read(found.values)
    plan = solve_profile(profile, budget, Limits(gap=0.0))
    bound_s = model.bound_s(found.bound, scip.TOLERANCE)
    assert plan.step_s * (1 - 1e-3) <= bound_s <= plan.step_s * ROUNDING
    assert len(codes) == len(profile.stages)
    assert all(segment.last < len(codes) for segment in segments)


def test_nothing_is_imported_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('mine')\n")
    monkeypatch.chdir(tmp_path)
    profile = homogeneous_chain(3, link_ratio=0.5)
    model = MixedModel(profile, menus(profile, ACTIONS), everything_kept_bytes(profile)).model
    assert scip.solve(model, time.monotonic() + 30, 1e-4) is not None


def test_it_is_used_where_the_linear_bound_leaves_a_gap() -> None:
    profile = random_chain(40, 12)
    least = smallest_peak(profile).peak_bytes
    budget = least + (everything_kept_bytes(profile) - least) // 20
    parts: list[str] = []
    plan = solve_profile(
        profile, budget, Limits(gap=0.0, time_limit_s=20), on_progress=lambda part, *_: parts.append(part)
    )
    assert validate(profile, plan, budget) == ()
    assert "mixed-integer program" in parts
    linear = lower_bound(profile, menus(profile, ACTIONS), budget, deadline=time.monotonic() + 60)
    assert linear.bound_s <= plan.lower_bound_s <= simulate(profile, plan).makespan_s * ROUNDING


def test_a_solution_with_crossing_segments_gives_a_tree() -> None:
    tree = _tree((0, 9), sorted([(1, 4), (2, 3), (3, 6), (5, 8), (2, 2)], key=lambda c: (c[0] - c[1], c)))
    assert [(s.first, s.last) for s in tree.inner] == [(1, 4), (5, 8)]
    assert [(s.first, s.last) for s in tree.inner[0].inner] == [(2, 3)]


def test_no_time_and_a_failing_process_are_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = homogeneous_chain(6, link_ratio=0.5)
    model = MixedModel(profile, menus(profile, ACTIONS), everything_kept_bytes(profile) // 2).model
    assert scip.solve(model, time.monotonic() - 1, 1e-4) is None
    for program in ("/bin/false", "/no/such/program", ""):
        monkeypatch.setattr(sys, "executable", program)
        assert scip.solve(model, time.monotonic() + 5, 1e-4) is None


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembered(*args: object, **options: object) -> subprocess.Popen[bytes]:
        begun.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=-1, stdout=-1))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", remembered)
    profile = homogeneous_chain(6, link_ratio=0.5)
    model = MixedModel(profile, menus(profile, ACTIONS), everything_kept_bytes(profile) // 2).model
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        scip.solve(model, time.monotonic() + 50, 1e-4)
    assert begun[0].wait(timeout=10) != 0


def test_rows_are_not_held_more_exactly_than_the_solver_counts() -> None:
    """With 1e-9 for rows, which is its epsilon, SCIP called 8.07 s the optimum of a step that takes 8 s."""
    rng = random.Random(6085)
    profile = odd_chain(rng, rng.randint(2, 4))
    model = MixedModel(profile, menus(profile, ACTIONS), 575, segments=False)
    found = scip.solve(model.model, time.monotonic() + 60, 1e-6)
    best_s = brute_force.fastest(profile, 575, segments=False)
    assert best_s == pytest.approx(8.0)
    assert found is not None
    assert best_s * (1 - 1e-6) <= model.bound_s(found.bound, scip.TOLERANCE) <= best_s * ROUNDING
