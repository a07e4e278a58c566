"""CP-SAT over all stages at once, links as fluids: `bound/linear_program.py` with whole options, without segments.

Rounding only relaxes. Bytes are counted in units of `budget / 2**20`: what a choice holds or adds is rounded down, what
may move, what the link carries during a step, and the room in a step are rounded up, each stall may carry one unit for
free, and costs are rounded down. All amounts are cumulative along the chain, so the model is linear in the stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckptplan.core.profile import Profile
from ckptplan.solving.bound.relaxation import Chain
from ckptplan.solving.interruptible import Interruptible

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
OnSolution = Callable[[tuple[int, ...], float], bool]
"""Called with option codes and the lower bound in seconds; True stops the search."""


def _down(value: float) -> int:
    return math.floor(value * UNITS - ROUNDING_UNITS) if value else 0


def _up(value: float) -> int:
    return math.ceil(value * UNITS + ROUNDING_UNITS) if value else 0


class FluidModel:
    """Minimise recompute and stalls over plans without segments."""

    def __init__(
        self,
        profile: Profile,
        menu: Sequence[Sequence[int]],
        budget_bytes: int,
        *,
        host_bytes: int | None = None,
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model
        self.model: Any = cp_model.CpModel()
        self.profile = profile
        self.chain = Chain(profile, menu, budget_bytes, host_bytes, segments=False)
        self.add_choices()
        self.total = _up(float(self.chain.most_put[-1])) + self.chain.n
        self.stalls: list[tuple[Any, float]] = []  # variable, cost of the time in which the link carries everything
        lanes = self.add_lanes() if self.chain.most_put[-1] > 0 else None
        self.add_memory(lanes)
        self.add_objective()

    def add_choices(self) -> None:
        """Each stage has one option."""
        menus = enumerate(self.chain.menus)
        self.x = [[self.model.new_bool_var(f"x[{k},{code}]") for code in m.codes] for k, m in menus]
        for row in self.x:
            self.model.add_exactly_one(row)

    def add_lanes(self) -> tuple[list[Any], list[Any]]:
        """Cumulative bytes away per lane, and the stalls; what moves joins both queues."""
        c, model = self.chain, self.model
        joins: list[list[Any]] = [[] for _ in range(c.n)]
        moved = []
        for k, m in enumerate(c.menus):
            parts = [_up(float(free)) * var for free, var in zip(m.free, self.x[k], strict=True) if free]
            if parts:
                moved.append((k, sum(parts), ()))
            for s in sorted({s for items in m.shared for s in items}):
                size = _up(float(c.size[s]))
                movers = [var for var, items in zip(self.x[k], m.shared, strict=True) if s in items]
                against = [
                    [var for var, items in zip(self.x[j], c.menus[j].fixes, strict=True) if s in items]
                    for j in c.movable[k][s]
                ]
                moved.append((k, size * sum(movers), tuple(size * (1 - sum(fixing)) for fixing in against if fixing)))
        amounts = []
        for k, limit, others in moved:
            amount = model.new_int_var(0, self.total, "")
            for most in (limit, *others):
                model.add(amount <= most)
            joins[k].append(amount)
            amounts.append(amount)
        if c.host is not None:
            model.add(sum(amounts) <= _up(c.host))
        lanes = []
        for rate, seconds in ((c.out, c.forward_s), (c.back, c.backward_s)):
            away: list[Any] = [0]
            put: Any = 0
            for k in range(c.n):
                after = model.new_int_var(0, self.total, "")
                model.add(after == put + sum(joins[k]))
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
        return sum(
            min(self.total, _up(float(s) * rate)) * var
            for s, var in zip(self.chain.menus[k].seconds, self.x[k], strict=True)
            if s
        )

    def add_memory(self, lanes: tuple[list[Any], list[Any]] | None) -> None:
        """Every step fits the budget."""
        c, model = self.chain, self.model
        most = _up(sum(float(max(m.kept.max(), 0.0)) for m in c.menus) + sum(float(abs(s)) for s in c.size)) + c.n
        held: Any = 0
        for k, m in enumerate(c.menus):
            forward, backward, kept = (
                sum(_down(float(v)) * var for v, var in zip(values, self.x[k], strict=True))
                for values in (m.forward, m.backward, m.kept)
            )
            away = (lanes[0][k], lanes[1][k]) if lanes is not None else (0, 0)
            model.add(held + forward - away[0] <= _up(float(c.budget - c.base_forward[k])))
            model.add(held + backward - away[1] <= _up(float(c.budget - c.base_backward[k])))
            after = model.new_int_var(-c.n, most, "")
            model.add(after >= held + kept)
            held = after

    def add_objective(self) -> None:
        """Recompute times and stalls, in integers that are never more than the times they stand for."""
        costs: list[tuple[Any, float, int]] = [
            (var, float(seconds), 1)
            for row, m in zip(self.x, self.chain.menus, strict=True)
            for var, seconds in zip(row, m.seconds, strict=True)
        ]
        costs += [(stall, price / UNITS, self.total) for stall, price in self.stalls]
        largest = max(price for _, price, _ in costs)
        reach = sum(price * most for _, price, most in costs)
        self.per_unit = min(
            LARGEST_COEFFICIENT / max(largest, SMALLEST_PRICE), LARGEST_OBJECTIVE / max(reach, SMALLEST_PRICE)
        )
        self.model.minimize(sum(math.floor(price * self.per_unit) * var for var, price, _ in costs))

    def hint(self, codes: Sequence[int]) -> None:
        """Start the search from this plan."""
        for row, m, chosen in zip(self.x, self.chain.menus, codes, strict=True):
            for code, var in zip(m.codes, row, strict=True):
                self.model.add_hint(var, int(code == chosen))

    def read(self, value: Callable[[Any], int]) -> tuple[int, ...]:
        """Option codes of a solution."""
        return tuple(
            next(code for code, var in zip(m.codes, row, strict=True) if value(var))
            for row, m in zip(self.x, self.chain.menus, strict=True)
        )

    def bound_s(self, objective: float) -> float:
        """The makespan in seconds that an objective bound stands for."""
        extra = max(0.0, objective - HALF) / self.per_unit * self.chain.second
        return (self.profile.baseline_compute_s + extra) * BOUND_ROUNDING

    def solve(self, on_solution: OnSolution, *, deadline: float, seed: int = 0, workers: int | None = None) -> float:
        """Solve until proven, stopped by `on_solution`, or `deadline` (`time.monotonic`).

        Returns
        -------
        float
            The proven bound in seconds; infinite where nothing fits.
        """
        outer = self
        solver = self.cp.CpSolver()
        call = Interruptible(solver.stop_search)

        class Watch(self.cp.CpSolverSolutionCallback):  # type: ignore[misc,name-defined]
            def on_solution_callback(self) -> None:
                codes, bound_s = outer.read(self.value), outer.bound_s(self.best_objective_bound)
                if call.here(lambda: on_solution(codes, bound_s)) is not False:
                    self.stop_search()

        solver.parameters.max_time_in_seconds = max(LEAST_TIME_S, deadline - time.monotonic())
        solver.parameters.random_seed = seed % MOST_SEEDS
        # One worker is deterministic as it is, several only where they take turns.
        solver.parameters.num_workers = workers or 1
        solver.parameters.interleave_search = (workers or 1) > 1
        solver.parameters.relative_gap_limit = PROVEN_GAP
        # Catching it, CP-SAT would leave the process without Python's handler: the next Ctrl-C would kill it.
        solver.parameters.catch_sigint_signal = False
        status = call.run(lambda: solver.solve(self.model, Watch()))
        if status == self.cp.INFEASIBLE:
            return math.inf
        bound_s = self.profile.baseline_step_s
        if status != self.cp.UNKNOWN or solver.best_objective_bound > 0:
            bound_s = max(bound_s, self.bound_s(solver.best_objective_bound))
        return bound_s
