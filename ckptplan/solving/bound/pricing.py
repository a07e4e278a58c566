"""Lower bounds on the makespan over the whole plan space: options, nested segments, swapping on links with backlog.

The space: a sequence of single stages, each with an option of its menu, and segments with any inner trees; a stage
moves any part of what it may, with any points; links are first in, first out; compute runs in program order (NOTE
[Residency] in core/rules.py).

`linear_program.py` relaxes choices to shares and whole transfers to flows. Segments enter as columns: at the
multipliers of each program, `trees.py` finds the cheapest tree of *every* segment, so that a path over the stage
boundaries 0..L with single stages and segments as edges gives the Lagrangian bound over the whole space, whatever
columns there are. Columns that are missing are added until the bound meets the program.

Every value that is computed on the way is a bound by itself; the best one counts. None depends on the solver's
tolerance: multipliers are made exactly feasible first (`Costs.of`), and what remains, rounding in sums of some
thousand numbers, is less than what is taken off at the end (`ROUNDING`). Latency is counted as a lower rate, that of
the largest transfer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptplan.core.segment import Segment
from ckptplan.solving.bound.linear_program import Duals, Master
from ckptplan.solving.bound.relaxation import BoundData, Floats, Intervals
from ckptplan.solving.bound.trees import Costs, LinearTrees, MissingColumns
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import CLOSE, ROUNDING

OnBound = Callable[[float], None]
"""Called with each better bound, in seconds."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The multipliers of the bound in seconds and bytes.

    Attributes
    ----------
    forward_s_per_byte, backward_s_per_byte : array (stages,)
        Seconds that a byte less would save, by the step in which it is held; 0 where the budget doesn't bind.
    budget_s_per_byte : float
        Seconds that a byte more of budget saves, to first order: the sum of the above.
    out_s, in_s : float
        Seconds saved per relative gain of a link's rate, to first order; by its rate: seconds per byte per second.
    drain : tuple of two arrays
        Per lane and step, what a second of the link is worth in seconds of the step.
    launch : float
        What a second of launching is worth, 0 to 1; one of the lanes is worth the rest.
    """

    forward_s_per_byte: Floats
    backward_s_per_byte: Floats
    budget_s_per_byte: float
    out_s: float
    in_s: float
    drain: tuple[Floats, Floats]
    launch: float


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound.

    Attributes
    ----------
    bound_s : float
        No plan of the space is faster; infinite where the optimizer's update alone doesn't fit.
    prices : Prices or None
        None where no linear program was solved in time.
    complete : bool
        Whether the linear relaxation over all segments was solved to its end.
    segments : tuple of Segment
        Those that have a share in its last solution.
    """

    bound_s: float
    prices: Prices | None
    complete: bool
    segments: tuple[Segment, ...] = ()


def lower_bound(
    space: PlanSpace,
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    deadline: float,
    enough_s: float = math.inf,
    on_bound: OnBound | None = None,
) -> Bound:
    """Prove that no plan of the space is faster than the result.

    Parameters
    ----------
    space : PlanSpace
    budget_bytes : int
    host_bytes : int, optional
        Limit on all bytes moved.
    deadline : float
        Of `time.monotonic()`.
    enough_s : float
        A bound that is high enough: no better one is looked for.
    on_bound : callable, optional
        Gets each bound that is better than those before, as soon as it is proven.

    Returns
    -------
    Bound
    """
    if space.profile.update_peak_bytes > budget_bytes:
        return Bound(math.inf, None, True)
    bounder = _Bounder(BoundData(space, budget_bytes, host_bytes), deadline, enough_s, on_bound)
    bounder.generate()
    return Bound(bounder.seconds(bounder.best), bounder.prices(), bounder.complete, bounder.used)


@dataclass(slots=True)
class _Bounder:
    """One run of `lower_bound`; times are in units of the baseline, of a second for chains that take no time."""

    data: BoundData
    deadline: float
    enough_s: float
    on_bound: OnBound | None
    best: float = 1.0
    complete: bool = False
    duals: Duals | None = None
    trees: LinearTrees | None = None
    used: tuple[Segment, ...] = ()

    @property
    def is_enough(self) -> bool:
        """Whether no better bound is needed."""
        return self.seconds(self.best) >= self.enough_s

    def seconds(self, value: float) -> float:
        """Seconds, less what sums of floats may be off by; a value of 1 is the baseline, however long that is."""
        profile = self.data.profile
        found = profile.fastest_compute_s + (value - 1.0) * self.data.second
        return float(max(profile.fastest_step_s, found * (1 - ROUNDING)))

    def raise_to(self, value: float) -> None:
        """Take a bound if it is better."""
        if value > self.best:
            self.best = value
            if self.on_bound is not None:
                self.on_bound(self.seconds(value))

    def generate(self) -> None:
        """Solve, price every segment, add those that are missing, and again."""
        master, intervals = Master(self.data), Intervals(self.data)
        columns = MissingColumns(intervals)
        while (left := self.deadline - time.monotonic()) > 0:
            duals = master.solve(left)
            if duals is None:
                return
            self.used = master.used()
            trees = LinearTrees(intervals, Costs.of(self.data, duals))
            value = 1.0 + trees.constant + trees.path()
            if value > self.best or self.trees is None:
                self.duals, self.trees = duals, trees
                self.raise_to(value)
            converged = 1.0 + duals.objective - self.best <= CLOSE
            if converged or not columns.add_to(master, trees, duals):
                self.complete = True
                return
            if self.is_enough:
                return

    def prices(self) -> Prices | None:
        """The multipliers in seconds and bytes."""
        if self.duals is None or self.trees is None:
            return None
        costs, second = self.trees.costs, self.data.second
        per_byte = second / self.data.unit
        forward, backward = costs.linear * per_byte
        total, flow = float(forward.sum() + backward.sum()), self.duals.flow
        return Prices(forward, backward, total, flow[0] * second, flow[1] * second, self.duals.drain, costs.launch)
