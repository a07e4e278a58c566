"""CP-SAT over all stages at once, links as fluids: `bound/linear_program.py` with whole options and segments.

Its bound speaks of the space it models alone: every option of the menu, and of the segments only those it is given.
Without segments to give (a menu without recompute, say) that is the whole space.

Rounding only relaxes. Bytes are counted in units of `budget / 2**20`: what a choice holds or adds is rounded down, what
may move, what the link carries during a step, and the room in a step are rounded up, each stall may carry one unit for
free, and costs are rounded down. All amounts are cumulative along the chain, so the model is linear in the stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.solving.bound.linear_program import Column
from ckptplan.solving.bound.relaxation import Chain, Intervals
from ckptplan.solving.bound.trees import column_of

UNITS = 1 << 20
"""Units of the budget that bytes are counted in: sums over hundreds of stages stay far below 2**60."""
ROUNDING_UNITS = 1e-6
"""Units by which a sum of floats may be off a whole number."""
SMALLEST_PRICE = 1e-9
LARGEST_COEFFICIENT, LARGEST_OBJECTIVE = 2.0**40, 2.0**60
"""The solver wants integers below 2**63, and sums of products are to stay below it."""
BOUND_ROUNDING = 1 - 1e-12
"""Factor on a bound, so that rounding makes none too large."""
LEAST_TIME_S = 0.01
MOST_SEEDS = 1 << 31
"""The solver takes 32 bits with a sign."""
PROVEN_GAP = 1e-7
"""Relative gap at which the solver stops: the last units of an amount that flows take long to prove for nothing."""
HALF = 0.5
"""The objective is a whole number; the solver's bound on it is a float."""
OnSolution = Callable[[tuple[int, ...], tuple[Segment, ...], float], bool]
"""Called with option codes, segments, and the lower bound in seconds; True stops the search."""


@dataclass(frozen=True, slots=True)
class ModelResult:
    """The outcome of a solve: the proven `bound_s` over the model's space; `proven` where it is the optimum.

    `codes` is None where no solution was found (with `proven`: nothing fits).
    """

    codes: tuple[int, ...] | None
    segments: tuple[Segment, ...]
    bound_s: float
    proven: bool


def _down(value: float) -> int:
    return math.floor(value * UNITS - ROUNDING_UNITS) if value else 0


def _up(value: float) -> int:
    return math.ceil(value * UNITS + ROUNDING_UNITS) if value else 0


class FluidModel:
    """Minimise recompute and stalls over options and the given segments."""

    def __init__(
        self,
        profile: Profile,
        menu: Sequence[Sequence[int]],
        budget_bytes: int,
        *,
        host_bytes: int | None = None,
        segments: Sequence[Segment] = (),
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model
        self.model: Any = cp_model.CpModel()
        self.profile = profile
        self.fits = profile.update_peak_bytes <= budget_bytes
        self.chain = Chain(profile, menu, budget_bytes, host_bytes, segments=bool(segments))
        self.columns = self._columns(segments)
        self.add_choices()
        self.total = _up(float(self.chain.most_put[-1])) + self.chain.n
        self.stalls: list[tuple[Any, float]] = []  # variable, cost of the time in which the link carries everything
        lanes = self.add_lanes() if self.chain.most_put[-1] > 0 else None
        self.add_memory(lanes)
        self.add_objective()

    def _columns(self, segments: Sequence[Segment]) -> list[Column]:
        intervals = Intervals(self.chain) if segments else None
        return [column_of(self.chain, intervals, tree) for tree in segments] if intervals is not None else []

    def add_choices(self) -> None:
        """Each stage has one option, or is in one segment."""
        c = self.chain
        self.x = [[self.model.new_bool_var(f"x[{k},{code}]") for code in m.codes] for k, m in enumerate(c.menus)]
        self.y = [self.model.new_bool_var(f"y[{column.tree.first},{column.tree.last}]") for column in self.columns]
        self.inside: list[list[tuple[int, int]]] = [[] for _ in range(c.n)]  # (column, position)
        for at, column in enumerate(self.columns):
            for k in range(column.tree.first, column.tree.last + 1):
                self.inside[k].append((at, k - column.tree.first))
        for k in range(c.n):
            self.model.add_exactly_one([*self.x[k], *(self.y[at] for at, _ in self.inside[k])])

    def add_lanes(self) -> tuple[list[Any], list[Any]]:
        """Cumulative bytes away per lane, and the stalls; what moves joins both queues."""
        c, model = self.chain, self.model
        joins: tuple[list[list[Any]], list[list[Any]]] = ([[] for _ in range(c.n)], [[] for _ in range(c.n)])
        moved = []
        for k, m in enumerate(c.menus):
            parts = [_up(float(free)) * var for free, var in zip(m.free, self.x[k], strict=True) if free]
            if parts:
                moved.append((k, k, sum(parts), ()))
            for s in sorted({s for items in m.shared for s in items}):
                size = _up(float(c.size[s]))
                movers = [var for var, items in zip(self.x[k], m.shared, strict=True) if s in items]
                against = [
                    [var for var, items in zip(self.x[j], c.menus[j].fixes, strict=True) if s in items]
                    for j in c.movable[k][s]
                ]
                moved.append(
                    (k, k, size * sum(movers), tuple(size * (1 - sum(fixing)) for fixing in against if fixing))
                )
        for at, column in enumerate(self.columns):
            if column.moves:
                moved.append((column.tree.first, column.tree.last, _up(column.moves) * self.y[at], ()))
        amounts = []
        for out_at, back_at, limit, others in moved:
            amount = model.new_int_var(0, self.total, "")
            for most in (limit, *others):
                model.add(amount <= most)
            joins[0][out_at].append(amount)
            joins[1][back_at].append(amount)
            amounts.append(amount)
        if c.host is not None:
            model.add(sum(amounts) <= _up(c.host))
        lanes = []
        for rate, seconds, joining in zip((c.out, c.back), (c.forward_s, c.backward_s), joins, strict=True):
            away: list[Any] = [0]
            put: Any = 0
            for k in range(c.n):
                after = model.new_int_var(0, self.total, "")
                model.add(after == put + sum(joining[k]))
                carried = min(self.total, _up(float(seconds[k]) * rate))
                during = away[-1] + carried + (self._recompute(k, rate) if rate is c.back else 0)
                stall = model.new_int_var(0, self.total, "")
                end = model.new_int_var(0, self.total, "")
                # One unit more: the stall in units is the true one rounded down.
                model.add(end <= during + stall + 1)
                model.add(end <= put + stall + 1)
                model.add(end <= after)
                self.stalls.append((stall, 1 / rate))
                away.append(end)
                put = after
            model.add(away[-1] >= put)
            lanes.append(away)
        return lanes[0], lanes[1]

    def _recompute(self, k: int, rate: float) -> Any:
        terms = [
            min(self.total, _up(float(s) * rate)) * var
            for s, var in zip(self.chain.menus[k].seconds, self.x[k], strict=True)
            if s
        ]
        terms += [
            min(self.total, _up(float(self.columns[at].seconds[p]) * rate)) * self.y[at]
            for at, p in self.inside[k]
            if self.columns[at].seconds[p]
        ]
        return sum(terms)

    def add_memory(self, lanes: tuple[list[Any], list[Any]] | None) -> None:
        """Every step fits the budget."""
        c, model = self.chain, self.model
        most = _up(sum(float(max(m.kept.max(), 0.0)) for m in c.menus) + sum(float(abs(s)) for s in c.size)) + c.n
        back: list[list[Any]] = [[] for _ in range(c.n)]
        held: Any = 0
        for k, m in enumerate(c.menus):
            forward = [_down(float(v)) * var for v, var in zip(m.forward, self.x[k], strict=True)]
            backward = [_down(float(v)) * var for v, var in zip(m.backward, self.x[k], strict=True)] + back[k]
            kept = [_down(float(v)) * var for v, var in zip(m.kept, self.x[k], strict=True)]
            for at, p in self.inside[k]:
                column, y = self.columns[at], self.y[at]
                forward.append(_down(float(column.forward[p])) * y)
                backward.append(_down(float(column.backward[p])) * y)
                kept.append(_down(float(column.kept[p])) * y)
                if k == column.tree.last:
                    for again, nbytes in column.returns:
                        kept.append(_down(nbytes) * y)
                        for later in range(k + 1, again):
                            back[later].append(-_up(nbytes) * y)
            away = (lanes[0][k], lanes[1][k]) if lanes is not None else (0, 0)
            model.add(held + sum(forward) - away[0] <= _up(float(c.budget - c.base_forward[k])))
            model.add(held + sum(backward) - away[1] <= _up(float(c.budget - c.base_backward[k])))
            after = model.new_int_var(-c.n, most, "")
            model.add(after >= held + sum(kept))
            held = after

    def add_objective(self) -> None:
        """Recompute times and stalls, in integers that are never more than the times they stand for."""
        costs: list[tuple[Any, float, int]] = [
            (var, float(seconds), 1)
            for row, m in zip(self.x, self.chain.menus, strict=True)
            for var, seconds in zip(row, m.seconds, strict=True)
        ]
        costs += [(y, float(column.seconds.sum()), 1) for y, column in zip(self.y, self.columns, strict=True)]
        costs += [(stall, price / UNITS, self.total) for stall, price in self.stalls]
        largest = max(price for _, price, _ in costs)
        reach = sum(price * most for _, price, most in costs)
        self.per_unit = min(
            LARGEST_COEFFICIENT / max(largest, SMALLEST_PRICE), LARGEST_OBJECTIVE / max(reach, SMALLEST_PRICE)
        )
        self.model.minimize(sum(math.floor(price * self.per_unit) * var for var, price, _ in costs))

    def hint(self, codes: Sequence[int], segments: Sequence[Segment]) -> None:
        """Start the search from this plan; segments that the model doesn't have are left to it."""
        chosen = set(segments)
        taken = {
            k
            for column in self.columns
            if column.tree in chosen
            for k in range(column.tree.first, column.tree.last + 1)
        }
        for column, y in zip(self.columns, self.y, strict=True):
            self.model.add_hint(y, int(column.tree in chosen))
        for k, (row, m) in enumerate(zip(self.x, self.chain.menus, strict=True)):
            for code, var in zip(m.codes, row, strict=True):
                self.model.add_hint(var, int(k not in taken and code == codes[k]))

    def read(self, value: Callable[[Any], int]) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
        """Option codes and segments of a solution."""
        c = self.chain
        segments = tuple(column.tree for column, y in zip(self.columns, self.y, strict=True) if value(y))
        inside = {k for tree in segments for k in range(tree.first, tree.last + 1)}
        codes = tuple(
            c.inside(k)
            if k in inside
            else next(code for code, var in zip(m.codes, self.x[k], strict=True) if value(var))
            for k, m in enumerate(c.menus)
        )
        return codes, tuple(sorted(segments, key=lambda tree: tree.first))

    def bound_s(self, objective: float) -> float:
        """The makespan in seconds that an objective bound stands for."""
        extra = max(0.0, objective - HALF) / self.per_unit * self.chain.second
        return (self.profile.baseline_step_s + extra) * BOUND_ROUNDING

    def solve(
        self, on_solution: OnSolution, *, deadline: float, seed: int = 0, workers: int | None = None
    ) -> ModelResult:
        """Solve until proven, stopped by `on_solution`, or `deadline` (`time.monotonic`)."""
        if not self.fits:
            return ModelResult(None, (), math.inf, True)
        outer = self

        class Watch(self.cp.CpSolverSolutionCallback):  # type: ignore[misc,name-defined]
            def on_solution_callback(self) -> None:
                if on_solution(*outer.read(self.value), outer.bound_s(self.best_objective_bound)):
                    self.stop_search()

        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(LEAST_TIME_S, deadline - time.monotonic())
        solver.parameters.random_seed = seed % MOST_SEEDS
        # One worker is deterministic as it is, several only where they take turns.
        solver.parameters.num_workers = workers or 1
        solver.parameters.interleave_search = (workers or 1) > 1
        solver.parameters.relative_gap_limit = PROVEN_GAP
        # Catching it, CP-SAT would leave the process without Python's handler: the next Ctrl-C would kill it.
        solver.parameters.catch_sigint_signal = False
        status = solver.solve(self.model, Watch())
        if status == self.cp.INFEASIBLE:
            return ModelResult(None, (), math.inf, True)
        bound = self.profile.baseline_step_s
        if status != self.cp.UNKNOWN or solver.best_objective_bound > 0:
            bound = max(bound, self.bound_s(solver.best_objective_bound))
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return ModelResult(None, (), bound, False)
        codes, segments = self.read(solver.value)
        return ModelResult(codes, segments, bound, status == self.cp.OPTIMAL)
