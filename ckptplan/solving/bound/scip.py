"""SCIP on the mixed-integer program, in floating-point numbers.

HiGHS is several times as fast, but of some hundred small problems it called a plan optimal that wasn't, by 1 %, and
others infeasible that have solutions.
"""

from __future__ import annotations

import datetime
import math
import time
from typing import Any

from ckptplan.solving.bound.process import BoundResult, Problem
from ckptplan.solving.parameters import ROUNDING, SOLVER_ERROR

LEFT_OUT = {
    "propagating/probing/maxprerounds": 0,
    "presolving/sparsify/maxrounds": 0,
    "presolving/dualsparsify/maxrounds": 0,
    "separating/maxroundsroot": 0,
    "separating/maxrounds": 0,
}
"""Parts of its presolve, and its cuts, that take more than half of the time on these problems and gain little."""
BRANCHING = {
    "branching/relpscost/initcand": 10,
    "branching/relpscost/inititer": 10,
    "branching/relpscost/maxlookahead": 3,
}
"""Strong branching on fewer variables than by default, with fewer iterations each, which takes long at the root."""


def solve(problem: Problem, deadline: float, gap: float) -> BoundResult:
    """Minimise until `deadline` (of `time.monotonic()`) or to a relative gap."""
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers.gscip import gscip_pb2

    model = problem.model()
    limit = problem.limit_s / model.second
    # The tolerance of reduced costs, which may raise the bound. The one of rows and whole numbers stays 1e-6: it only
    # adds solutions, and with 1e-9, the difference at which the solver takes numbers for equal, it has called a plan
    # optimal that wasn't.
    gscip: Any = gscip_pb2.GScipParameters(
        real_params={"numerics/dualfeastol": ROUNDING},
        int_params=LEFT_OUT | BRANCHING,
    )
    if limit < math.inf:
        gscip.objective_limit = limit
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(0.0, deadline - time.monotonic())),
        relative_gap_tolerance=gap,
        threads=1,
        gscip=gscip,
    )
    result = mathopt.solve(model.program.model(), mathopt.SolverType.GSCIP, params=params)
    bound = result.termination.objective_bounds.dual_bound
    solution, solution_s = None, math.inf
    if result.has_primal_feasible_solution():
        values = {var.id: value for var, value in result.variable_values().items() if value > SOLVER_ERROR}
        solution, solution_s = model.read(values), result.objective_value() * model.second
    bound_s = model.bound_s(bound if bound < limit else math.inf, ROUNDING)
    complete = result.termination.reason == mathopt.TerminationReason.OPTIMAL
    return BoundResult(bound_s, solution, complete, solution_s)
