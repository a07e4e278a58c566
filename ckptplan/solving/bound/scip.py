"""SCIP in a process of its own, which can be ended at any time.

HiGHS is several times as fast, but of some hundred small problems it called a plan optimal that wasn't, by 1 %, and
others infeasible that have solutions.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

TOLERANCE = 1e-9
"""Of its reduced costs. That of rows and whole numbers stays as it is, 1e-6: it only adds solutions, and with one as
small as 1e-9, the difference at which the solver takes numbers for equal, it has called a plan optimal that wasn't."""
LEAST_VALUE = 1e-6
"""Of a variable that counts as above 0."""
LEFT_OUT = {"propagating/probing/maxprerounds": 0, "presolving/sparsify/maxrounds": 0}
"""Parts of its presolve that take half of the time on these problems, and gain nothing."""
LATE_S = 1.0
"""Seconds behind its time limit after which the process is ended: it looks at the clock now and then alone."""


class Found(NamedTuple):
    """What the solver knows in the end: a bound, -inf at worst, and the variables above 0 in its best solution."""

    bound: float
    values: dict[int, float]


def solve(model: Any, deadline: float, gap: float) -> Found | None:
    """Minimise a model of `mathopt` until `deadline` (of `time.monotonic()`) or to a relative gap.

    None if there was no time for it, or the process failed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0 or not sys.executable or getattr(sys, "frozen", False):  # in a program that embeds Python
        return None
    # The child imports what this process does, from the same places, and nothing from the working directory.
    start = f"import sys; sys.path[:] = {sys.path!r}; from ckptplan.solving.bound.scip import main; main()"
    command = [sys.executable, "-c", start, repr(seconds), repr(gap)]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            try:
                told, _ = child.communicate(model.export_model().SerializeToString(), timeout=seconds + LATE_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                child.kill()
                child.wait()
    except OSError:  # no such program, or no process to be had
        return None
    if child.returncode != 0:
        return None
    found = json.loads(told)
    return Found(found["bound"], dict(found["values"]))


def main() -> None:
    """Solve the model on stdin within the seconds and to the gap that the arguments say, and print what is found."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers.gscip import gscip_pb2

    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the solver prints now and then
    began_s, seconds = time.monotonic(), float(sys.argv[1])
    model = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(sys.stdin.buffer.read()))
    left_s = max(seconds - (time.monotonic() - began_s), 0.0)
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=left_s),
        relative_gap_tolerance=float(sys.argv[2]),
        threads=1,
        gscip=gscip_pb2.GScipParameters(real_params={"numerics/dualfeastol": TOLERANCE}, int_params=LEFT_OUT),
    )
    result = mathopt.solve(model, mathopt.SolverType.GSCIP, params=params)
    values = []
    if result.has_primal_feasible_solution():
        values = [(var.id, value) for var, value in result.variable_values().items() if value > LEAST_VALUE]
    bound = result.termination.objective_bounds.dual_bound
    with os.fdopen(answer, "w") as out:
        json.dump({"bound": bound, "values": values}, out)


if __name__ == "__main__":
    main()
