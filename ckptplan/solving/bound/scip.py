"""SCIP on the mixed-integer program, in a process beside the other searches, which can be ended at any time.

HiGHS is several times as fast, but of some hundred small problems it called a plan optimal that wasn't, by 1 %, and
others infeasible that have solutions.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.solving.bound.mixed_integer import MixedModel

TOLERANCE = 1e-9
"""Of its reduced costs. That of rows and whole numbers stays as it is, 1e-6: it only adds solutions, and with one as
small as 1e-9, the difference at which the solver takes numbers for equal, it has called a plan optimal that wasn't."""
LEAST_VALUE = 1e-6
"""Of a variable that counts as above 0."""
LEFT_OUT = {
    "propagating/probing/maxprerounds": 0,
    "presolving/sparsify/maxrounds": 0,
    "separating/maxroundsroot": 0,
    "separating/maxrounds": 0,
}
"""Parts of its presolve, and its cuts, that take more than half of the time on these problems and gain little."""
LIMIT_SLACK = 1e-4
"""Share of a known plan's time by which a solution may be slower: so there is one, or the solver is wrong."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What the program is made from (see `MixedModel`), and the time of a plan that is known."""

    profile: Profile
    menu: Sequence[Sequence[int]]
    budget_bytes: int
    host_bytes: int | None = None
    segments: bool = True
    below_s: float = math.inf


class Found(NamedTuple):
    """What is known in the end.

    Attributes
    ----------
    bound_s : float
    codes, segments, transfers
        As `MixedModel.read` returns them; None without a solution.
    """

    bound_s: float
    solution: tuple[list[int], tuple[Segment, ...], list[tuple[int, list[int]]]] | None


class Running:
    """The process at work on a problem."""

    def __init__(self, process: subprocess.Popen[bytes], answer: IO[bytes]) -> None:
        self.process, self.answer = process, answer

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def found(self, until: float) -> Found | None:
        """Wait for it until this time (of `time.monotonic()`), and end it; None if it failed or hasn't ended by itself.

        It looks at the clock now and then alone, so it may be later than it should by a second or two.
        """
        try:
            if self.process.wait(max(0.0, until - time.monotonic())) != 0:
                return None
            self.answer.seek(0)
            answer: Found = pickle.load(self.answer)
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


def begin(problem: Problem, deadline: float, gap: float) -> Running | None:
    """Minimise until `deadline` (of `time.monotonic()`) or to a relative gap; None if no process is to be had."""
    seconds = deadline - time.monotonic()
    if seconds <= 0 or not sys.executable or getattr(sys, "frozen", False):  # in a program that embeds Python
        return None
    # The child imports what this process does, from the same places, and nothing from the working directory.
    start = f"import sys; sys.path[:] = {sys.path!r}; from ckptplan.solving.bound.scip import main; main()"
    command = [sys.executable, "-c", start, repr(time.time() + seconds), repr(gap)]
    with contextlib.ExitStack() as files, contextlib.suppress(OSError):  # no such program, or no process or file
        question, answer = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        pickle.dump(problem, question)
        question.seek(0)
        process = subprocess.Popen(command, stdin=question, stdout=answer, stderr=subprocess.DEVNULL)
        files.pop_all()
        question.close()
        return Running(process, answer)
    return None


def main() -> None:
    """Solve the problem on stdin until the time and to the gap that the arguments say, and write what is found."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the solver prints now and then
    deadline = time.monotonic() + float(sys.argv[1]) - time.time()
    problem: Problem = pickle.load(sys.stdin.buffer)
    found = solve(problem, deadline, float(sys.argv[2]))
    with os.fdopen(answer, "wb") as out:
        pickle.dump(found, out)


def solve(problem: Problem, deadline: float, gap: float) -> Found:
    """The same in this process, without an end before `deadline`."""
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers.gscip import gscip_pb2

    model = MixedModel(
        problem.profile,
        problem.menu,
        problem.budget_bytes,
        host_bytes=problem.host_bytes,
        segments=problem.segments,
    )
    limit = problem.below_s / model.second * (1 + LIMIT_SLACK)
    gscip: Any = gscip_pb2.GScipParameters(
        real_params={"numerics/dualfeastol": TOLERANCE},
        int_params=LEFT_OUT,
    )
    if limit < math.inf:
        gscip.objective_limit = limit
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(0.0, deadline - time.monotonic())),
        relative_gap_tolerance=gap,
        threads=1,
        gscip=gscip,
    )
    result = mathopt.solve(model.model, mathopt.SolverType.GSCIP, params=params)
    bound = result.termination.objective_bounds.dual_bound
    solution = None
    if result.has_primal_feasible_solution():
        values = {var.id: value for var, value in result.variable_values().items() if value > LEAST_VALUE}
        solution = model.read(values)
    return Found(model.bound_s(bound if bound < limit else math.inf, TOLERANCE), solution)
