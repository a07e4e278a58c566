"""The linear program over options and segments, links as fluids.

| symbol | meaning                                                                                              |
|--------|------------------------------------------------------------------------------------------------------|
| x[i,o] | share of option o of stage i                                                                         |
| y[c]   | share of segment c                                                                                   |
| H[k]   | bytes that the stages before k hold until their backward, moved ones included                        |
| P[k]   | bytes that the stages before k have put in a link's queue; one for each lane, forward and backward     |
| A[k]   | part of P[k] that the link has carried off when step k starts                                        |
| s[k]   | time compute waits for the link after step k                                                         |
| t[k]   | compute time of step k, recompute and sweeps included                                                |
| e      | by how much the host takes longer to launch all than the lanes take                                  |

A transfer frees its bytes when it is done; a fluid link frees them as they flow, never later. So any schedule of
whole transfers gives a solution with the same stalls. Backward is the same lane in reversed time (see cost.py).
Per lane with rate v, and per step k, with the multiplier of each row:

    p: A[k+1] - A[k] <= v (t[k] + s[k])      q: A[k+1] - P[k] <= v s[k]      r: A[k] <= P[k], equal at the turn
    memory: base[k] + H[k] + what the step's own option or segment adds - A[k] <= budget

The objective is the lanes' time plus e, and one row says that e >= launches - lanes. Its multiplier is the share of
launching in the price of time: 0 where lanes take longer, 1 where launching does, in between where both do.

What the tier has already is gone behind the stage that moves it, and joins the backward queue alone.
What a segment moves joins the forward queue behind its first stage, no later than in truth, and the backward queue at
its last stage, when it is needed back. A storage that several stages share may only move with the last of them and if
all move it; of the others the two nearest are asked. Everything left out makes the optimum lower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from ckptplan.core.segment import Segment
from ckptplan.solving.bound.relaxation import BoundData, Floats
from ckptplan.solving.interruptible import interruptible
from ckptplan.solving.parameters import LARGE, SOLVER_ERROR


@dataclass(slots=True)
class Column:
    """A segment as a column of the master program; `tree` is its inner structure."""

    tree: Segment
    kept: Floats
    forward: Floats
    backward: Floats
    seconds: Floats
    launch: float
    moves: dict[bool, float]  # by whether they leave without a copy
    returns: list[tuple[int, float]]  # stage that holds a dropped storage again, bytes


@dataclass(slots=True)
class Duals:
    """Multipliers of the rows of `Master`, all of them 0 or more; see the module's docstring."""

    objective: float
    excess: float
    forward: Floats  # memory, forward step k
    backward: Floats
    drain: tuple[Floats, Floats]  # p
    queue: tuple[Floats, Floats]  # q
    host: float
    ask: dict[tuple[int, int, int], float]
    stage: Floats
    launch: float  # e
    flow: tuple[float, float]  # seconds that a link would save by being twice as fast, to first order


@dataclass(slots=True)
class _LinkRows:
    """The program of one link, by step; see the module's docstring.

    Attributes
    ----------
    away, put : list
        The variables A and P.
    drain, queue : list
        The rows p and q.
    joins : list
        The rows that say what is put between two steps.
    """

    away: list[Any]
    put: list[Any]
    drain: list[Any] = field(default_factory=list)
    queue: list[Any] = field(default_factory=list)
    joins: list[Any] = field(default_factory=list)


class Master:
    """The linear program over options and the segments found so far, links as fluids."""

    def __init__(self, data: BoundData) -> None:
        from ortools.linear_solver import pywraplp

        self.data = c = data
        self.lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        self.big = big = self.lp.infinity()
        self.x: list[list[Any]] = []
        self.columns: list[tuple[Segment, Any]] = []
        n = c.n
        lp = self.lp
        self.excess = lp.NumVar(0, big, "z")
        self.objective = lp.Objective()
        self.objective.SetMinimization()
        # Exceeding the budget by all of it costs more baselines than any plan takes.
        self.objective.SetCoefficient(self.excess, LARGE)
        self.beyond: Any = None
        if c.launch or any(m.launch.any() for m in c.menus):
            self.beyond = lp.Constraint(c.launch - 1.0, big)
            beyond = lp.NumVar(0, big, "e")
            self.beyond.SetCoefficient(beyond, 1)
            self.objective.SetCoefficient(beyond, 1)
        self.cover = [lp.Constraint(1, 1) for _ in range(n)]
        held = [lp.NumVar(0, big if k else 0, "") for k in range(n + 1)]
        self.carry = [self._row(0, big, (held[k + 1], 1), (held[k], -1)) for k in range(n)]
        self.forward = [lp.Constraint(-big, c.budget - c.base_forward[k]) for k in range(n)]
        self.backward = [lp.Constraint(-big, c.budget - c.base_backward[k]) for k in range(n)]
        for k in range(n):
            for row in (self.forward[k], self.backward[k]):
                row.SetCoefficient(held[k], 1)
                row.SetCoefficient(self.excess, -1)
            m = c.menus[k]
            self.x.append([])
            for o in range(len(m.codes)):
                var = lp.NumVar(0, big, "")
                self.x[k].append(var)
                self.cover[k].SetCoefficient(var, 1)
                self._set(self.carry[k], var, -m.kept[o])
                self._set(self.forward[k], var, m.forward[o])
                self._set(self.backward[k], var, m.backward[o])
                for steps, nbytes in m.passing[o]:
                    for j in steps:
                        self._set(self.forward[j], var, nbytes + self.forward[j].GetCoefficient(var))
                self._takes(var, float(m.seconds[o]), float(m.launch[o]))
        self.lanes: list[_LinkRows] = []
        self.ask: dict[tuple[int, int, int], Any] = {}
        self.host: Any = None
        if c.most_put[-1] > 0:
            self._add_links()

    def _takes(self, var: Any, seconds: float, launch: float = 0.0) -> None:
        """Let a unit of `var` add these seconds to the lanes and to launching."""
        self.objective.SetCoefficient(var, seconds)
        if self.beyond is not None:
            self.beyond.SetCoefficient(var, seconds - launch)

    def _row(self, low: float, high: float, *terms: tuple[Any, float]) -> Any:
        """Return the row low <= sum of coefficient * variable <= high."""
        row = self.lp.Constraint(low, high)
        for var, coefficient in terms:
            row.SetCoefficient(var, coefficient)
        return row

    @staticmethod
    def _set(row: Any, var: Any, value: float) -> None:
        if value:
            row.SetCoefficient(var, float(value))

    def _add_links(self) -> None:
        c, lp, big, n = self.data, self.lp, self.big, self.data.n
        self.host = lp.Constraint(-big, big if c.host is None else c.host)
        times = (c.forward_s, c.backward_s)
        for rate, seconds, memory in zip((c.out, c.back), times, (self.forward, self.backward), strict=True):
            away, put = ([lp.NumVar(0, big if k else 0, "") for k in range(n + 1)] for _ in range(2))
            lane = _LinkRows(away, put)
            for k in range(n):
                stall = lp.NumVar(0, big, "")  # in bytes that the link carries meanwhile
                self._takes(stall, 1 / rate)
                most = float(seconds[k]) * rate
                lane.drain.append(self._row(-big, most, (away[k + 1], 1), (away[k], -1), (stall, -1)))
                lane.queue.append(self._row(-big, 0, (away[k + 1], 1), (put[k], -1), (stall, -1)))
                # At the turn all is away: with the row before an equation.
                self._row(0 if k == n - 1 else -big, 0, (away[k + 1], 1), (put[k + 1], -1))
                lane.joins.append(self._row(0, 0, (put[k + 1], 1), (put[k], -1)))
                memory[k].SetCoefficient(away[k], -1)
            self.lanes.append(lane)
        self.left = []  # per step k, the row of the bytes that leave without a copy behind stage k
        if any(c.on_host):
            gone = [lp.NumVar(0, big if k else 0, "") for k in range(n + 1)]
            self.left = [self._row(0, 0, (gone[k + 1], 1), (gone[k], -1)) for k in range(n)]
            for k in range(n):
                self.forward[k].SetCoefficient(gone[k], -1)
        for k in range(n):
            m = c.menus[k]
            for o, var in enumerate(self.x[k]):
                self._set(self.lanes[1].drain[k], var, -float(m.seconds[o]) * c.back)
            for on_host, free in m.free.items():
                if free.any():
                    _, limit = self._moved(k, k, on_host)
                    for o, var in enumerate(self.x[k]):
                        self._set(limit, var, -free[o])
            for s in sorted({s for items in m.shared for s in items}):
                moved, limit = self._moved(k, k, c.on_host[s])
                for o, var in enumerate(self.x[k]):
                    if s in m.shared[o]:
                        limit.SetCoefficient(var, -float(c.size[s]))
                for j in c.movable[k][s]:
                    fixing = [v for o, v in enumerate(self.x[j]) if s in c.menus[j].fixes[o]]
                    if fixing:
                        size = float(c.size[s])
                        row = self._row(-big, size, (moved, 1), *((v, size) for v in fixing))
                        self.ask[k, s, j] = row

    def _moved(self, out_at: int, back_at: int, on_host: bool) -> tuple[Any, Any]:
        """A variable for bytes that join both queues, or leave without a copy, and the row that limits it."""
        moved = self.lp.NumVar(0, self.big, "")
        (self.left if on_host else self.lanes[0].joins)[out_at].SetCoefficient(moved, -1)
        self.lanes[1].joins[back_at].SetCoefficient(moved, -1)
        self.host.SetCoefficient(moved, 1)
        return moved, self._row(-self.big, 0, (moved, 1))

    def add(self, column: Column) -> None:
        """Add a segment."""
        a, b = column.tree.first, column.tree.last
        var = self.lp.NumVar(0, self.big, "")
        self.columns.append((column.tree, var))
        self._takes(var, float(column.seconds.sum()), column.launch)
        for k in range(a, b + 1):
            self.cover[k].SetCoefficient(var, 1)
            self._set(self.carry[k], var, -column.kept[k - a])
            self._set(self.forward[k], var, column.forward[k - a])
            self._set(self.backward[k], var, column.backward[k - a])
            if self.lanes:
                self._set(self.lanes[1].drain[k], var, -column.seconds[k - a] * self.data.back)
        for again, nbytes in column.returns:
            # There in forward all the while, in backward from that stage on.
            self.carry[b].SetCoefficient(var, self.carry[b].GetCoefficient(var) - nbytes)
            for k in range(b + 1, again):
                self.backward[k].SetCoefficient(var, self.backward[k].GetCoefficient(var) - nbytes)
        for on_host, nbytes in column.moves.items():
            if self.lanes and nbytes:
                _, limit = self._moved(a, b, on_host)
                limit.SetCoefficient(var, -nbytes)

    def used(self) -> tuple[Segment, ...]:
        """The segments that have a share in the solution."""
        return tuple(tree for tree, var in self.columns if var.solution_value() > SOLVER_ERROR)

    def _solved(self, seconds: float) -> bool:
        """Solve within `seconds`."""
        until = time.monotonic() + seconds
        # Without preprocessing the chain's sparse rows are solved about five times as fast; numbers rarely need it.
        for preprocess in ("false", "true"):
            left = timedelta(seconds=until - time.monotonic())
            self.lp.SetTimeLimit(max(1, left // timedelta(milliseconds=1)))
            self.lp.SetSolverSpecificParametersAsString(f"use_preprocessing: {preprocess}")
            if interruptible(self.lp.Solve, stop=self.lp.InterruptSolve) == self.lp.OPTIMAL:
                return True
        return False

    def _flow(self, at: int) -> float:
        """Minus the derivative of the optimum by the logarithm of a link's rate."""
        lane = self.lanes[at]
        away = [var.solution_value() for var in lane.away]
        put = [var.solution_value() for var in lane.put]
        total = 0.0
        for k, (drain, queue) in enumerate(zip(lane.drain, lane.queue, strict=True)):
            total -= drain.dual_value() * (away[k + 1] - away[k]) + queue.dual_value() * (away[k + 1] - put[k])
        return max(0.0, total)

    def solve(self, seconds: float) -> Duals | None:
        """Solve and return the multipliers; None if the time ran out."""
        if not self._solved(seconds):
            return None
        c, empty = self.data, np.zeros(self.data.n)

        def less(rows: list[Any]) -> Floats:
            return np.array([max(0.0, -row.dual_value()) for row in rows])

        lanes = self.lanes
        return Duals(
            objective=self.objective.Value(),
            excess=self.excess.solution_value(),
            forward=less(self.forward),
            backward=less(self.backward),
            drain=(less(lanes[0].drain) * c.out, less(lanes[1].drain) * c.back) if lanes else (empty, empty),
            queue=(less(lanes[0].queue) * c.out, less(lanes[1].queue) * c.back) if lanes else (empty, empty),
            host=max(0.0, -self.host.dual_value()) if self.host is not None else 0.0,
            ask={key: max(0.0, -row.dual_value()) for key, row in self.ask.items()},
            stage=np.array([row.dual_value() for row in self.cover]),
            launch=min(max(0.0, self.beyond.dual_value()), 1.0) if self.beyond is not None else 0.0,
            flow=(self._flow(0), self._flow(1)) if lanes else (0.0, 0.0),
        )
