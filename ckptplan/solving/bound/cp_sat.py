"""CP-SAT on the mixed-integer program, in whole numbers: its proofs don't depend on tolerances.

Rounding only relaxes. An amount v of the program becomes a whole number of units, V = floor(U v); what a plan gives 0
or 1, or a multiple of 1/n, is whole as it is. A row sum(a x) + sum(b v) <= c, times K U, then holds with its
coefficients rounded down and its right side rounded up, where K |b| is added for each b < 0, whose v may be a unit
larger than V says. Costs are rounded down, too. Example, U = 4 and K = 1: v - 0.6 x <= 0.3 with v = 0.8 and x = 1
becomes V - 3 x <= 2, and V = 3 fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from ckptplan.solving.bound.mixed_integer import MixedModel, PeakModel, Suggestion
from ckptplan.solving.bound.process import BoundResult, Problem
from ckptplan.solving.interruptible import interruptible
from ckptplan.solving.parameters import ROUNDING

UNITS = 1 << 20
"""Units of an amount: U. A millionth is as exact as a solver in floating-point numbers."""
LARGEST = UNITS * UNITS
"""Largest sum: a millionth of a unit counts. The solver requires sums below 2**63; with larger ones it has called plans
optimal that weren't."""
PARAMETERS = {
    "linearization_level": 2,
    "optimize_with_lb_tree_search": True,
    "symmetry_level": 0,
    "cp_model_probing_level": 0,
    "presolve_inclusion_work_limit": 0,
}
"""A search that raises the bound by branching on the linear relaxation. The presolve omits steps that take long, and
the comparison of rows with each other, which was wrong with large coefficients."""


class WholeModel:
    """A mixed-integer program in whole numbers.

    Attributes
    ----------
    model : cp_model.CpModel

    Raises
    ------
    TimeoutError
        If it isn't built by `deadline` (of `time.monotonic()`).
    """

    def __init__(self, mixed: MixedModel, deadline: float = math.inf) -> None:
        from ortools.sat.python import cp_model

        self.mixed = mixed
        self.model: Any = cp_model.CpModel()
        self.most = {var.id: var.upper_bound for var in mixed.program.variables}
        self.units = {number: mixed.parts_of.get(number, 1) or UNITS for number in self.most}
        self.amounts = {number for number, parts in mixed.parts_of.items() if not parts}
        self.vars: dict[int, Any] = {
            number: self.model.new_int_var(0, math.ceil(most * self.units[number]), "")
            for number, most in self.most.items()
        }
        for row in mixed.program.rows:
            if time.monotonic() > deadline:
                raise TimeoutError
            terms = list(row.terms.items())
            if row.upper < math.inf:
                self.add_row(terms, row.upper)
            if row.lower > -math.inf:
                self.add_row([(number, -a) for number, a in terms], -row.lower)
        self.offset = mixed.program.cost.constant
        terms = list(mixed.program.cost.terms.items())
        self.per_cost = 1.0 if self.is_whole(terms) else LARGEST / max(1.0, self.reach(terms))
        self.cost = sum(math.floor(a * self.per_cost / self.units[number]) * self.vars[number] for number, a in terms)
        self.model.minimize(self.cost)

    def is_whole(self, terms: Iterable[tuple[int, float]]) -> bool:
        """Whether no coefficient has to be rounded."""
        return all(number not in self.amounts and (a / self.units[number]).is_integer() for number, a in terms)

    def reach(self, terms: Iterable[tuple[int, float]]) -> float:
        """The sum of terms at their largest."""
        return float(sum(abs(a) * self.most[number] for number, a in terms))

    def add_row(self, terms: Iterable[tuple[int, float]], most: float) -> None:
        """Add the row sum of terms <= most, relaxed."""
        terms = list(terms)
        reach = abs(most) + self.reach(terms)
        if self.is_whole(terms):
            times, room = 1.0, round(most)  # `most` is whole, or rounding doesn't make it smaller
        else:
            most += ROUNDING * reach
            of_amounts = [a for number, a in terms if number in self.amounts]
            finest = UNITS if all(a.is_integer() for a in of_amounts) else LARGEST
            times = min(float(finest), LARGEST / max(1.0, reach))
            room = math.ceil((most - sum(a for a in of_amounts if a < 0) / UNITS) * times)
        row = [(number, math.floor(a * times / self.units[number])) for number, a in terms]
        self.model.add(sum(a * self.vars[number] for number, a in row if a) <= room)

    def read(self, solver: Any) -> Suggestion:
        """Return a solution as a plan."""
        values = {number: solver.value(var) / self.units[number] for number, var in self.vars.items()}
        return self.mixed.read({number: value for number, value in values.items() if value})

    def bound_s(self, cost: float) -> float:
        """The makespan in seconds that a bound on the cost, a whole number, stands for."""
        value: float = self.offset + max(0, math.floor(cost)) / self.per_cost
        found: float = max(self.mixed.profile.fastest_step_s, value * (1 - ROUNDING) * self.mixed.second)
        return found


def solve(problem: Problem, deadline: float, gap: float) -> BoundResult:
    """Minimise until `deadline` (of `time.monotonic()`) or to a relative gap."""
    from ortools.sat.python import cp_model

    whole = WholeModel(problem.model())
    solver = _solver(deadline, problem.seed, problem.workers)
    limit = problem.limit_s / whole.mixed.second - whole.offset
    if limit < math.inf:
        whole.model.add(whole.cost <= math.ceil(limit * whole.per_cost))
    solver.parameters.relative_gap_limit = gap
    enough_s = problem.below_s / (1 + gap)

    def on_bound(cost: float) -> None:
        if whole.bound_s(cost) >= enough_s:
            solver.stop_search()

    solver.best_bound_callback = on_bound
    status = solver.solve(whole.model)
    if status == cp_model.INFEASIBLE:  # nothing fits; if a plan is known, this is a defect
        return BoundResult(problem.space.profile.fastest_step_s, None, False)
    bound_s = whole.bound_s(solver.best_objective_bound)
    solution = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solution = whole.read(solver)
    return BoundResult(bound_s, solution, status == cp_model.OPTIMAL or bound_s >= enough_s)


def smallest_peak(model: PeakModel, deadline: float) -> tuple[int, Suggestion | None]:
    """Minimise until `deadline`, in this process.

    Returns
    -------
    int, Suggestion or None
        Bytes below which nothing fits, and a plan that may have the smallest peak.

    Raises
    ------
    TimeoutError
        If there is no time to build the model.
    """
    from ortools.sat.python import cp_model

    whole = WholeModel(model, deadline)
    solver = _solver(deadline)
    solver.best_bound_callback = lambda cost: solver.stop_search() if cost > model.most - 1 else None
    status = interruptible(lambda: solver.solve(whole.model), stop=solver.stop_search)
    if status == cp_model.INFEASIBLE:  # a defect, since a plan is known
        return 0, None
    solution = whole.read(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return round(max(0.0, solver.best_objective_bound)), solution


def _solver(deadline: float, seed: int = 0, workers: int = 1) -> Any:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    for name, value in PARAMETERS.items():
        setattr(solver.parameters, name, value)
    solver.parameters.max_time_in_seconds = max(0.0, deadline - time.monotonic())
    solver.parameters.random_seed = seed % np.iinfo(np.int32).max
    # One worker is always deterministic, several only if they take turns.
    solver.parameters.num_workers = workers
    solver.parameters.interleave_search = workers > 1
    # Catching it, CP-SAT would leave the process without Python's handler: the next Ctrl-C would kill it.
    solver.parameters.catch_sigint_signal = False
    return solver
