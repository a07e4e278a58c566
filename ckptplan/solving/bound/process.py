"""Solvers of the mixed-integer program, each in a process beside the other searches, which can be ended at any time.

A solver is a module of this package with a function `solve(problem, deadline, gap)` that returns a `BoundResult`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal, NamedTuple

from ckptplan.core.segment import Segment
from ckptplan.solving.bound.mixed_integer import MixedModel, Suggestion
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.interruptible import POLL_S
from ckptplan.solving.parameters import CLOSE

Solver = Literal["scip", "cp_sat"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What the program is made from (see `MixedModel`), and the time of a plan that is known.

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
        """No solution need be slower: above the known plan's time, so that there is one, or the solver is wrong."""
        return self.below_s * (1 + CLOSE)

    def model(self) -> MixedModel:
        """The program."""
        return MixedModel(
            self.space, self.budget_bytes, host_bytes=self.host_bytes, among=self.among, most_s=self.limit_s
        )


class BoundResult(NamedTuple):
    """What is known in the end.

    Attributes
    ----------
    bound_s : float
    solution : Suggestion, optional
    complete : bool
        Whether the solver came to its end before the time did: more time, or another solver, would give no more.
    """

    bound_s: float
    solution: Suggestion | None
    complete: bool


class Running:
    """The process at work on a problem."""

    def __init__(self, problem: Problem, process: subprocess.Popen[bytes], answer: IO[bytes]) -> None:
        self.problem, self.process, self.answer = problem, process, answer

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def found(self, until: float) -> BoundResult | None:
        """Wait for it until this time (of `time.monotonic()`), and end it; None if it failed or hasn't ended by itself.

        It looks at the clock now and then alone, so it may be later than it should by a second or two.
        """
        try:
            if self.process.wait(max(0.0, until - time.monotonic())) != 0:
                return None
            self.answer.seek(0)
            answer: BoundResult = pickle.load(self.answer)
            return answer
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """End it, whatever it is at."""
        self.process.kill()
        self.process.wait()
        self.answer.close()


def wait_for(runnings: Sequence[Running], until: float) -> None:
    """Return when any has ended, or at `until`."""
    while time.monotonic() < until and not any(running.done for running in runnings):
        time.sleep(POLL_S)


def begin(solver: Solver, problem: Problem, deadline: float, gap: float) -> Running | None:
    """Minimise until `deadline` (of `time.monotonic()`) or to a relative gap; None if no process is to be had."""
    seconds = deadline - time.monotonic()
    if seconds <= 0 or not sys.executable or getattr(sys, "frozen", False):  # in a program that embeds Python
        return None
    # The child imports what this process does, from the same places, and nothing from the working directory.
    start = f"import sys; sys.path[:] = {sys.path!r}; from ckptplan.solving.bound.process import main; main()"
    command = [sys.executable, "-c", start, solver, repr(time.time() + seconds), repr(gap)]
    with contextlib.ExitStack() as files, contextlib.suppress(OSError):  # no such program, or no process or file
        question, answer = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        pickle.dump(problem, question)
        question.seek(0)
        process = subprocess.Popen(command, stdin=question, stdout=answer, stderr=subprocess.DEVNULL)
        files.pop_all()
        question.close()
        return Running(problem, process, answer)
    return None


def main() -> None:
    """Solve the problem on stdin to the time and gap that the arguments say, and write the answer."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the solver prints now and then
    solver = importlib.import_module(f"{__package__}.{sys.argv[1]}")
    deadline = time.monotonic() + float(sys.argv[2]) - time.time()
    problem: Problem = pickle.load(sys.stdin.buffer)
    found = solver.solve(problem, deadline, float(sys.argv[3]))
    with os.fdopen(answer, "wb") as out:
        pickle.dump(found, out)
