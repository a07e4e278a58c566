"""Solvers of the mixed-integer program, each in a process beside the other searches, which can be ended at any time.

A solver is a module of this package with a function `solve(problem, deadline, gap)` that returns a `BoundResult`. A
process may solve a program with few segments first, for a plan: it hands that out, and goes on with the whole program
without another start, for a solution no worse than that.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckptplan.core.segment import Segment
from ckptplan.solving.bound.mixed_integer import MixedModel, Suggestion
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.interruptible import POLL_S
from ckptplan.solving.parameters import CLOSE

Solver = Literal["scip", "cp_sat"]


@dataclass(frozen=True, slots=True)
class Problem:
    """The arguments of a program (see `MixedModel`), and the time of a known plan.

    `seed` and `workers` are CP-SAT's. With `among` (see there) its bound doesn't hold for other plans.
    """

    space: PlanSpace
    budget_bytes: int
    host_bytes: int | None = None
    below_s: float = math.inf
    seed: int = 0
    workers: int = 1
    among: Sequence[Segment] | None = None

    @property
    def limit_s(self) -> float:
        """Limit on a solution's seconds, above those of the known plan: unless the solver is wrong, there is one."""
        return self.below_s * (1 + CLOSE)

    def model(self) -> MixedModel:
        """The program."""
        return MixedModel(
            self.space, self.budget_bytes, host_bytes=self.host_bytes, among=self.among, most_s=self.limit_s
        )


class BoundResult(NamedTuple):
    """The result of a solver.

    Attributes
    ----------
    bound_s : float
    solution : Suggestion, optional
    complete : bool
        Whether the solver came to its end before the time did: more time, or another solver, would give no more.
    solution_s : float
        Seconds of the solution in the program; the plan may take longer.
    """

    bound_s: float
    solution: Suggestion | None
    complete: bool
    solution_s: float = math.inf


class Few(NamedTuple):
    """The only outermost segments of a program that is solved first, and its deadline and gap."""

    segments: Sequence[Segment]
    deadline: float
    gap: float


class Running:
    """The process at work on a problem.

    Attributes
    ----------
    left : int
        Number of answers still to come.
    """

    def __init__(self, process: subprocess.Popen[bytes], left: int = 1) -> None:
        self.process, self.left = process, left
        self._answers: queue.SimpleQueue[BoundResult | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Queue answers as they come, and None at the end."""
        errors = EOFError, OSError, ValueError, pickle.UnpicklingError
        with contextlib.suppress(*errors), self.process.stdout or contextlib.nullcontext() as answers:
            while answers is not None:
                self._answers.put(pickle.load(answers))
        self.process.wait()
        self._answers.put(None)

    @property
    def done(self) -> bool:
        """Whether there is an answer, or no more will come."""
        return not self._answers.empty()

    def found(self, until: float) -> BoundResult | None:
        """Return an answer that comes until this time (of `time.monotonic()`); otherwise None, and end the process."""
        answer = None
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        self.left = 0 if answer is None else self.left - 1
        if not self.left:
            self.end()
        return answer

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def wait_for(runnings: Sequence[Running], until: float) -> None:
    """Return when any process has an answer or has ended, or at `until`."""
    while time.monotonic() < until and not any(running.done for running in runnings):
        time.sleep(POLL_S)


def begin(solver: Solver, problem: Problem, deadline: float, gap: float, first: Few | None = None) -> Running | None:
    """Minimise until `deadline` (of `time.monotonic()`) or to a relative gap; None if no process can be started."""
    now = time.monotonic()
    if deadline <= now or not sys.executable or getattr(sys, "frozen", False):  # in a program that embeds Python
        return None
    if first is not None:
        first = first._replace(deadline=time.time() + first.deadline - now)
    # The child imports what this process does, from the same places, and nothing from the working directory.
    start = f"import sys; sys.path[:] = {sys.path!r}; from ckptplan.solving.bound.process import main; main()"
    command = [sys.executable, "-c", start, solver, repr(time.time() + deadline - now), repr(gap)]
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as question:  # no such program, or no process or file
        pickle.dump((problem, first), question)
        question.seek(0)
        process = subprocess.Popen(command, stdin=question, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return Running(process, 1 if first is None else 2)
    return None


def main() -> None:
    """Solve the problem on stdin to the time and gap that the arguments say, and write the answers."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the solver prints now and then
    solver = importlib.import_module(f"{__package__}.{sys.argv[1]}")
    late_s = time.monotonic() - time.time()
    problem: Problem
    first: Few | None
    problem, first = pickle.load(sys.stdin.buffer)
    with os.fdopen(answer, "wb") as out:
        if first is not None:
            few = replace(problem, among=first.segments)
            found: BoundResult = solver.solve(few, first.deadline + late_s, first.gap)
            pickle.dump(found._replace(bound_s=0.0, complete=False), out)  # there are other plans
            out.flush()
            # The whole program has that solution, too.
            problem = replace(problem, below_s=min(problem.below_s, found.solution_s))
        pickle.dump(solver.solve(problem, float(sys.argv[2]) + late_s, float(sys.argv[3])), out)
