"""CP-SAT models over all stages at once: a lower bound on the makespan with links as fluids, and the smallest peak.

| symbol    | meaning                                                                                            |
|-----------|----------------------------------------------------------------------------------------------------|
| x[i, a]   | stage i takes action a                                                                             |
| h[s, j]   | storage s is held by a stage up to its j-th possible holder                                        |
| m[s, i]   | storage s is moved by stage i: i swaps, no later stage holds s, every earlier holder swaps too     |
| put[k]    | what the stages before k move                                                                      |
| away[k]   | part of put[k] that the link has carried off when step k starts                                    |
| stall[k]  | time compute waits for the link after step k, in units of what the link carries meanwhile          |

Links as fluids. A transfer frees its bytes when it is done; a fluid link frees them as they flow, never later. So any
schedule of whole transfers gives a solution of this model with the same stalls, and the model's optimum is a true lower
bound on the makespan. Backward is the same lane in reversed time (see evaluate.py). Latency per transfer is left out,
which lowers the bound too.

Whole transfers. With one boolean per stage and step ("its copy is gone"), freed bytes come a whole stage at a time.
This closes the gap that large transfers leave, at the price of a model that grows with the square of the stages.

Rounding only relaxes. Bytes are counted in units of `budget / 2**20`: sizes and budget are
rounded down, what the link carries during a step is rounded up, each stall may carry one unit for free, and costs are
rounded down. The loss is at most 2 units of stall per step and lane, 2e-6 of the time in which the link carries the
budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ckptplan.core.chain import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.solving.evaluate import RECOMPUTE, SWAP, Holder, holders_of

RESOLUTION_BITS = 20
OnSolution = Callable[[tuple[int, ...], float], bool]
"""Called with a decision vector and the lower bound in seconds; True stops the search."""


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a model proved: `bound` in seconds or bytes; `proven` where it is the model's optimum.

    `codes` is the best decision vector, None where there is none (with `proven`: nothing fits).
    """

    codes: tuple[int, ...] | None
    bound: float
    proven: bool


class _Model:
    """The variables both models share, and who holds and moves what."""

    gap = 0.0

    def __init__(
        self,
        profile: Profile,
        menu: Sequence[Sequence[int]],
        unit: Fraction,
        host_bytes: int | None,
        *,
        whole_stages: bool,
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model
        self.model: Any = cp_model.CpModel()
        self.profile = profile
        self.menu = menu
        self.n = len(profile.stages)
        self.unit = unit
        self.host_bytes = host_bytes
        self.holders = holders_of(profile)
        self.sizes = [self.units(storage.nbytes) for storage in profile.storages]
        self.add_actions()
        self.add_holds()
        self.add_moves(whole_stages)

    def units(self, nbytes: int) -> int:
        """Whole units in `nbytes`."""
        return nbytes * self.unit.denominator // self.unit.numerator

    def add_actions(self) -> None:
        """One action per stage."""
        self.x: list[dict[int, Any]] = []
        for i, codes in enumerate(self.menu):
            if len(codes) == 1:
                self.x.append({codes[0]: 1})
                continue
            self.x.append({code: self.model.new_bool_var(f"x[{i},{ACTIONS[code]}]") for code in codes})
            self.model.add_exactly_one(self.x[i].values())

    def _sum(self, holder: Holder, test: Callable[[int], bool]) -> Any:
        return sum(var for code, var in self.x[holder.stage].items() if test(code))

    def add_holds(self) -> None:
        """h[s, j] >= stage j holds s, and h never falls along the chain."""
        self.h: dict[int, list[tuple[int, Any]]] = {}
        for s, holders in enumerate(self.holders):
            if not self.sizes[s] or self.profile.storages[s].to_end:
                continue
            steps: list[tuple[int, Any]] = []
            for holder in holders:
                holds = self._sum(holder, holder.holds)
                certain = all(holder.holds(code) for code in self.menu[holder.stage])
                if not steps or certain:
                    steps.append((holder.stage, 1 if certain else holds))
                    if certain:
                        break
                    continue
                var = self.model.new_bool_var(f"h[{s},{holder.stage}]")
                self.model.add(var >= holds)
                self.model.add(var >= steps[-1][1])
                steps.append((holder.stage, var))
            self.h[s] = steps

    def held(self, s: int, before: int) -> Any:
        """Whether a stage before `before` holds s."""
        value: Any = 0
        for stage, var in self.h.get(s, ()):
            if stage < before:
                value = var
        return value

    def add_moves(self, whole_stages: bool) -> None:
        """m[s, i] only where stage i may move s (NOTE [Residency], rule 4).

        With `whole_stages`, a stage before the cutoff (see evaluate.py) moves all it may and no other stage moves
        anything; without, any part of it may move, which only lowers the bound.
        """
        self.m: list[list[tuple[int, Any]]] = [[] for _ in range(self.n)]
        self.prefix: list[Any] = []
        if whole_stages:
            self.prefix = [self.model.new_bool_var(f"prefix[{i}]") for i in range(self.n)]
            for a, b in zip(self.prefix, self.prefix[1:], strict=False):
                self.model.add_implication(b, a)
        for s, holders in enumerate(self.holders):
            storage = self.profile.storages[s]
            if not self.sizes[s] or storage.to_end:
                continue
            for mover in holders:
                i = mover.stage
                if not mover.saved or mover.pinned or SWAP not in self.menu[i]:
                    continue
                if i >= self.n - 1 or storage.program_until > i:
                    continue
                against = [1 - self.x[i][SWAP]]
                against += [self._sum(h, h.holds) for h in holders if h.stage > i]
                against += [self._sum(h, h.fixes) for h in holders if h.stage < i]
                against += [1 - self.prefix[i]] if self.prefix else []
                if len(against) == 1:
                    self.m[i].append((self.sizes[s], self.x[i][SWAP]))
                    continue
                var = self.model.new_bool_var(f"m[{s},{i}]")
                for term in against:
                    self.model.add(var + term <= 1)
                if self.prefix:
                    self.model.add(var + sum(against) >= 1)
                self.m[i].append((self.sizes[s], var))
        if self.host_bytes is not None:
            self.model.add(self.put(self.n) <= self.units(self.host_bytes))

    def put(self, before: int) -> Any:
        """What the stages before `before` move."""
        return sum(size * var for i in range(before) for size, var in self.m[i])

    def forward_bytes(self, k: int) -> Any:
        """Bytes of forward step k as if nothing had moved."""
        total = self._own(k, self.profile.base_forward_bytes[k], forward=True)
        for s, storage in enumerate(self.profile.storages):
            if storage.born < k:
                total += self.sizes[s] * (1 if storage.to_end or k <= storage.program_until else self.held(s, k))
        return total

    def backward_bytes(self, k: int) -> Any:
        """Bytes of backward step k as if nothing had moved."""
        total = self._own(k, self.profile.base_backward_bytes[k], forward=False)
        for s, storage in enumerate(self.profile.storages):
            total += self.sizes[s] * (1 if storage.to_end else self.held(s, k + 1))
        return total

    def _own(self, k: int, base: int, *, forward: bool) -> Any:
        total: Any = 0
        for code, var in self.x[k].items():
            transient = self.profile.stages[k].transient(ACTIONS[code])
            assert transient is not None
            own = transient.forward_bytes if forward else transient.backward_bytes
            total += self.units(base + own) * var
        return total

    def hint(self, codes: Sequence[int]) -> None:
        """Start the search from `codes`."""
        for i, options in enumerate(self.x):
            if len(options) > 1:
                for code, var in options.items():
                    self.model.add_hint(var, int(code == codes[i]))

    def read(self, value: Callable[[Any], int]) -> tuple[int, ...]:
        """The decision vector of a solution."""
        return tuple(
            next(code for code, var in options.items() if len(options) == 1 or value(var)) for options in self.x
        )

    def solver(self, deadline: float, seed: int, workers: int | None) -> Any:
        """A CP-SAT solver that answers the same for the same seed and workers."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, deadline - time.monotonic())
        solver.parameters.random_seed = seed % (1 << 31)
        # One worker is deterministic as it is, several only where they take turns; here one is faster.
        solver.parameters.num_workers = workers or 1
        solver.parameters.interleave_search = (workers or 1) > 1
        solver.parameters.relative_gap_limit = self.gap
        return solver


class FluidModel(_Model):
    """Minimise recompute and stalls over all decisions, with links as fluids."""

    # The last units of an amount that flows take long to prove and mean nothing.
    gap = 1e-7

    def __init__(
        self,
        profile: Profile,
        menu: Sequence[Sequence[int]],
        budget_bytes: int,
        *,
        host_bytes: int | None = None,
        whole_transfers: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        super().__init__(
            profile,
            menu,
            Fraction(max(1, budget_bytes), 1 << RESOLUTION_BITS),
            host_bytes,
            whole_stages=whole_transfers,
        )
        self.total_units = sum(size for moves in self.m for size, _ in moves)
        out, back = profile.link.out_bytes_per_s, profile.link.in_bytes_per_s
        recompute_s = [
            s.recompute_s if RECOMPUTE in codes else 0.0 for s, codes in zip(profile.stages, menu, strict=True)
        ]
        self.away_forward, self.stall_out = self.add_lane("out", out, [s.forward_s for s in profile.stages], None)
        self.away_backward, self.stall_in = self.add_lane(
            "in", back, [s.backward_s for s in profile.stages], recompute_s
        )
        self.add_memory()
        if whole_transfers:
            self.add_whole_transfers()
        self.add_objective(recompute_s, out, back)

    def add_lane(
        self, name: str, bytes_per_s: float, compute_s: list[float], recompute_s: list[float] | None
    ) -> tuple[list[Any], list[Any]]:
        """away[k+1] <= away[k] + what the link carries in step k and the stall after it; all is away at the turn."""
        away: list[Any] = [0]
        stalls: list[Any] = []
        put: Any = 0
        for k in range(self.n):
            carried: Any = self._carried(compute_s[k], bytes_per_s)
            if recompute_s is not None and recompute_s[k] > 0:
                extra = self._carried(compute_s[k] + recompute_s[k], bytes_per_s) - carried
                carried = carried + extra * self.x[k][RECOMPUTE]
            after = put + sum(size * var for size, var in self.m[k])
            during = self.model.new_int_var(0, self.total_units, f"during[{name},{k}]")
            self.model.add(during <= put)
            self.model.add(during <= away[-1] + carried)
            stall = self.model.new_int_var(0, self.total_units, f"stall[{name},{k}]")
            end = self.model.new_int_var(0, self.total_units, f"away[{name},{k + 1}]")
            self.model.add(end <= after)
            # One unit more: the stall in units is the true one rounded down.
            self.model.add(end <= during + stall + 1)
            away.append(end)
            stalls.append(stall)
            put = after
        self.model.add(away[-1] >= put)
        return away, stalls

    def _carried(self, seconds: float, bytes_per_s: float) -> int:
        return min(self.total_units, math.ceil(seconds * bytes_per_s / float(self.unit) * (1 + 1e-12)))

    def add_memory(self) -> None:
        """Every step fits the budget."""
        limit = self.units(self.budget_bytes)
        for k in range(self.n):
            self.model.add(self.forward_bytes(k) - self.away_forward[k] <= limit)
            self.model.add(self.backward_bytes(k) - self.away_backward[k] <= limit)

    def add_whole_transfers(self) -> None:
        """Bytes are freed a whole stage at a time, oldest first: freed[k] = sum over i < k of gone[i, k] * put by i."""
        limit = self.units(self.budget_bytes)
        for name, away in (("out", self.away_forward), ("in", self.away_backward)):
            previous: dict[int, Any] = {}
            for k in range(1, self.n):
                gone: dict[int, Any] = {}
                freed: list[Any] = []
                for i in (i for i in range(k) if self.m[i]):
                    most = sum(size for size, _ in self.m[i])
                    var = self.model.new_bool_var(f"gone[{name},{i},{k}]")
                    share = self.model.new_int_var(0, most, f"freed[{name},{i},{k}]")
                    self.model.add(share <= sum(size * moved for size, moved in self.m[i]))
                    self.model.add(share <= most * var)
                    self.model.add(away[k] >= self.put(i + 1)).only_enforce_if(var)
                    if gone:
                        self.model.add_implication(var, next(reversed(gone.values())))
                    if i in previous:
                        self.model.add_implication(previous[i], var)
                    gone[i] = var
                    freed.append(share)
                bytes_ = self.forward_bytes(k) if name == "out" else self.backward_bytes(k)
                self.model.add(bytes_ - sum(freed) <= limit)
                previous = gone

    def add_objective(self, recompute_s: list[float], out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        """Recompute times and stalls, in integers that are never more than the seconds they stand for."""
        out_s, in_s = float(self.unit) / out_bytes_per_s, float(self.unit) / in_bytes_per_s
        most_s = max(sum(recompute_s), self.profile.baseline_step_s, 1e-9)
        self.per_s = min(1e4 / min(out_s, in_s), 2.0**37 / max(out_s, in_s), 1e13 / most_s)
        terms = [
            math.floor(seconds * self.per_s) * self.x[i][RECOMPUTE]
            for i, seconds in enumerate(recompute_s)
            if RECOMPUTE in self.menu[i]
        ]
        terms += [math.floor(out_s * self.per_s) * stall for stall in self.stall_out]
        terms += [math.floor(in_s * self.per_s) * stall for stall in self.stall_in]
        self.model.minimize(sum(terms))

    def bound_s(self, objective: float) -> float:
        """The makespan in seconds that an objective bound stands for."""
        return self.profile.baseline_step_s + max(0.0, objective - 0.5) / self.per_s * (1 - 1e-12)

    def solve(
        self, on_solution: OnSolution, *, deadline: float, seed: int = 0, workers: int | None = None
    ) -> ModelResult:
        """Solve until proven, stopped by `on_solution`, or `deadline` (`time.monotonic`)."""
        if self.profile.update_peak_bytes > self.budget_bytes:
            return ModelResult(None, math.inf, True)
        outer = self

        class Watch(self.cp.CpSolverSolutionCallback):  # type: ignore[misc,name-defined]
            def on_solution_callback(self) -> None:
                if on_solution(outer.read(self.value), outer.bound_s(self.best_objective_bound)):
                    self.stop_search()

        solver = self.solver(deadline, seed, workers)
        status = solver.solve(self.model, Watch())
        if status == self.cp.INFEASIBLE:
            return ModelResult(None, math.inf, True)
        found = self.read(solver.value) if status in (self.cp.OPTIMAL, self.cp.FEASIBLE) else None
        bound = (
            self.bound_s(solver.best_objective_bound)
            if status != self.cp.UNKNOWN or solver.best_objective_bound > 0
            else 0.0
        )
        return ModelResult(found, max(bound, self.profile.baseline_step_s), status == self.cp.OPTIMAL)


class PeakModel(_Model):
    """Minimise the peak with everything that moves away at once; exact in bytes.

    Moving more never raises the peak, so only a host limit makes it matter that stages move all or nothing.
    """

    def __init__(self, profile: Profile, menu: Sequence[Sequence[int]], host_bytes: int | None = None) -> None:
        super().__init__(profile, menu, Fraction(1), host_bytes, whole_stages=host_bytes is not None)
        self.add_peak()

    def add_peak(self) -> None:
        """The peak is at least every step's bytes, and the update's."""
        most = sum(self.sizes) + max(*self.profile.base_forward_bytes, *self.profile.base_backward_bytes)
        most += sum(
            max(t.forward_bytes, t.backward_bytes)
            for s in self.profile.stages
            for t in (s.keep, s.swap, s.recompute)
            if t
        )
        self.peak = self.model.new_int_var(
            self.profile.update_peak_bytes, max(most, self.profile.update_peak_bytes), "peak"
        )
        for k in range(self.n):
            self.model.add(self.forward_bytes(k) - self.put(k) <= self.peak)
            self.model.add(self.backward_bytes(k) - self.put(k) <= self.peak)
        self.model.minimize(self.peak)

    def solve(self, *, deadline: float, seed: int = 0, workers: int | None = None) -> ModelResult:
        """Solve until proven or `deadline` (`time.monotonic`)."""
        solver = self.solver(deadline, seed, workers)
        status = solver.solve(self.model)
        found = self.read(solver.value) if status in (self.cp.OPTIMAL, self.cp.FEASIBLE) else None
        # Bytes above 2**53 aren't exact as floats; the margin keeps the bound below them.
        bound = max(float(self.profile.update_peak_bytes), math.floor(solver.best_objective_bound * (1 - 1e-15)))
        return ModelResult(found, bound, status == self.cp.OPTIMAL)
