"""Ctrl-C in a search: it ends soon, also in a solver's C++, and all that was found has been handed out."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from exactly import LONG_S
from random_chains import rich_chain

from ckptplan.core.plan import Plan
from ckptplan.core.request import Limits
from ckptplan.referee import validate
from ckptplan.solving import planner
from ckptplan.solving.interruptible import interruptible
from ckptplan.solving.planner import solve_profile

pytestmark = [pytest.mark.planning, pytest.mark.usefixtures("python_handles_interrupts", "no_leak")]

SOON_S = LONG_S / 2
"""Far more than an interrupt takes, and less than the search was given."""
BUDGET = 342
"""Of the rich chain of 24 stages: a third of the way from its smallest peak, at which every part of the search runs."""


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_solver_that_blocks_is_stopped() -> None:
    stopped = threading.Event()
    threading.Timer(0.1, interrupt).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: stopped.wait(LONG_S), stop=stopped.set)
    assert stopped.is_set()
    assert time.monotonic() - begun < SOON_S


def test_results_and_errors_of_a_solver_are_passed_on() -> None:
    assert interruptible(lambda: 5, stop=lambda: None) == 5
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0, stop=lambda: None)
    # Beside the main thread, where no signal comes, it runs in the thread that calls it.
    seen: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: seen.append(interruptible(threading.current_thread, stop=lambda: None)))
    thread.start()
    thread.join()
    assert seen == [thread]


@pytest.mark.parametrize("part", ["segment DP", "bound"])
def test_the_last_plan_handed_out_is_the_best(part: str) -> None:
    profile, budget = rich_chain(random.Random(6), 24), BUDGET
    seen: list[Plan] = []
    told: list[tuple[float, float]] = []

    def on_progress(at: str, best_s: float, bound_s: float, peak_bytes: int | None) -> None:
        told.append((best_s, bound_s))
        if at == part:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        solve_profile(profile, budget, Limits(gap=0.0, on_plan=seen.append), on_progress=on_progress)
    best_s, bound_s = told[-1]
    assert seen[-1].step_s <= best_s
    assert seen[-1].step_s == min(plan.step_s for plan in seen)
    assert seen[-1].lower_bound_s >= bound_s
    for plan in seen:
        assert plan.status == "feasible"  # nothing has been proven of it but its bound
        assert validate(profile, plan, budget) == ()


def test_what_a_local_search_has_come_to_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans are offered at its end, which an interrupt doesn't wait for."""
    profile, budget = rich_chain(random.Random(6), 24), BUDGET
    come_to: list[float] = []
    plain = planner.LocalSearch.cost

    class Interrupted(planner.LocalSearch):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            glance = self._on_better
            assert glance is not None

            def on_better(codes: object, segments: object) -> None:
                glance(codes, segments)  # type: ignore[arg-type]
                come_to.append(plain(self, codes, segments))  # type: ignore[arg-type]
                interrupt()

            self._on_better = on_better

    monkeypatch.setattr(planner, "LocalSearch", Interrupted)
    seen: list[Plan] = []
    with pytest.raises(KeyboardInterrupt):
        solve_profile(profile, budget, Limits(gap=0.0, on_plan=seen.append))
    assert seen[-1].step_s <= come_to[-1] * (1 + 1e-9)  # but for rounding
