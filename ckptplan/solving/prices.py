"""Lower bounds on the makespan over the whole plan space: options, nested segments, swapping on links with backlog."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.chain import Option, Segment
from ckptplan.core.profile import Profile

Floats = NDArray[np.float64]
CONVERGED = 1e-4
"""Part of the baseline by which the best bound may be below the linear program when no more segments are sought."""
TOLERANCE = 1e-7
"""Of the linear programs; bounds are computed from multipliers that are exactly feasible, and don't depend on it."""

OnCandidate = Callable[[tuple[int, ...], tuple[Segment, ...]], None]


class _Menu:
    """One stage's options as arrays; bytes in units of the budget, times in units of the baseline."""

    def __init__(self, codes: Sequence[int], k: int) -> None:
        self.codes = tuple(codes)
        self.forward = np.zeros(k)
        self.backward = np.zeros(k)
        self.kept = np.zeros(k)
        self.still = np.zeros(k)
        self.seconds = np.zeros(k)
        self.free = np.zeros(k)
        self.sure = np.zeros(k)
        self.unsure: list[list[int]] = [[] for _ in range(k)]
        self.shared: list[list[int]] = [[] for _ in range(k)]
        self.fixes: list[list[int]] = [[] for _ in range(k)]


class Chain:
    """Profile and menu as the numbers that the bounds are made of.

    Attributes
    ----------
    counted : list of int
        Per storage, the stage by which it is counted once it is held: the first that holds it under all its options,
        else the first that may hold it.
    """

    def __init__(
        self,
        profile: Profile,
        menu: Sequence[Sequence[int]],
        budget_bytes: int,
        host_bytes: int | None,
        *,
        segments: bool,
    ) -> None:
        self.profile = profile
        self.n = n = len(profile.stages)
        self.unit = float(max(1, budget_bytes))
        self.second = max(profile.baseline_step_s, 1e-12)
        self.budget = budget_bytes / self.unit
        self.host = None if host_bytes is None else host_bytes / self.unit
        self.size = np.array([s.nbytes for s in profile.storages], float) / self.unit
        self.menu = menu
        self.again: list[Option | None] = [
            stage.recompute
            if segments
            and not stage.is_glue
            and any(stage.options[c].name in ("recompute", "recompute+swap") for c in menu[i])
            else None
            for i, stage in enumerate(profile.stages)
        ]
        self.glue = np.array([stage.is_glue for stage in profile.stages])
        self.forward_s = np.array([s.forward_s for s in profile.stages]) / self.second
        self.backward_s = np.array([s.backward_s for s in profile.stages]) / self.second
        self._count_holders()
        self._constants()
        self._movers()
        # Moved by a stage other than the one that counts them: programs that track what doesn't move leave them out.
        in_segments = [
            {s for c in menu[i] if (o := stage.options[c]).name in ("recompute", "recompute+swap") for s in o.moved}
            if self.again[i] is not None
            else set()
            for i, stage in enumerate(profile.stages)
        ]
        # A segment may drop such a storage although a stage behind the segment is sure to hold it again.
        self.returns: dict[int, list[int]] = {}
        for s, storage in enumerate(profile.storages):
            j = self.counted[s]
            if (
                j < 0
                or storage.to_end
                or not storage.nbytes
                or self.again[j] is None
                or s not in profile.stages[j].linked
            ):
                continue
            later = [i for i in self.certain[s] if j < i <= storage.program_until]
            if later:
                self.returns[s] = later
        self.elusive = {
            s
            for i in range(n)
            for s in {*self.movable[i], *(in_segments[i] & self.movable_any[i])}
            if self.counted[s] != i
            and not (
                self.counted[s] in self.certain[s]
                and i in self.certain[s]
                and (s not in profile.stages[self.counted[s]].linked or i in self.returns.get(s, ()))
            )
        }
        self.menus = [self._menu(i) for i in range(n)]
        self._segment_numbers()
        link = profile.link
        moving = [
            {*single, *(s for s, _, _ in many)} for single, many in zip(self.movable, self.segment_moves, strict=True)
        ]
        largest = max((sum(profile.storages[s].nbytes for s in items) for items in moving), default=0)
        # A transfer of b bytes takes latency + b / rate; no stage's transfer is faster per byte than the largest one's.
        self.out = self._rate(largest, link.out_s(largest) if largest else 1.0)
        self.back = self._rate(largest, link.in_s(largest) if largest else 1.0)
        most = [float(sum(self.size[s] for s in items)) for items in moving]
        self.most_put = np.concatenate([[0.0], np.cumsum(most)])
        if self.host is not None:
            self.most_put = np.minimum(self.most_put, self.host)

    def inside(self, i: int) -> int:
        """The option that stage i has in a segment; the one that moves where there is one."""
        options = self.profile.stages[i].options
        names = ("keep",) if self.glue[i] else ("recompute+swap", "recompute")
        return next(c for name in names for c in (*self.menu[i], 0) if options[c].name == name)

    def _rate(self, nbytes: int, seconds: float) -> float:
        """Bytes per second, in the units of this class."""
        if nbytes == 0:
            return 1.0
        return nbytes / self.unit / (seconds / self.second) * (1 + 1e-12)

    def _held_sets(self, i: int) -> list[set[int]]:
        stage = self.profile.stages[i]
        sets = [set(stage.options[c].held) for c in self.menu[i]]
        again = self.again[i]
        return [*sets, set(again.held)] if again is not None else sets

    def _count_holders(self) -> None:
        n_storages = len(self.profile.storages)
        first: list[int] = [-1] * n_storages
        self.certain: list[list[int]] = [[] for _ in range(n_storages)]
        self.holders: list[list[int]] = [[] for _ in range(n_storages)]
        for i in range(self.n):
            sets = self._held_sets(i)
            for s in set().union(*sets):
                self.holders[s].append(i)
                if first[s] < 0:
                    first[s] = i
                if all(s in held for held in sets):
                    self.certain[s].append(i)
        self.counted = [c[0] if c else f for c, f in zip(self.certain, first, strict=True)]

    def _own(self, i: int, held: Sequence[int] | set[int]) -> tuple[float, float]:
        """Bytes of `held` counted from stage i on, and those that are there in its own backward besides."""
        storages = self.profile.storages
        kept = sum(self.size[s] for s in held if self.counted[s] == i and not storages[s].to_end)
        extra = sum(self.size[s] for s in held if self.counted[s] > i and not storages[s].to_end)
        return float(kept), float(extra)

    def _constants(self) -> None:
        n = self.n
        forward, backward = np.zeros(n + 1), 0.0
        for s, storage in enumerate(self.profile.storages):
            if storage.to_end:
                forward[min(storage.born + 1, n)] += self.size[s]
                backward += self.size[s]
                continue
            # Held by the program up to program_until, as far as no stage's account has it.
            end = min(storage.program_until, n - 1)
            if self.counted[s] >= 0:
                end = min(end, self.counted[s])
            if end > storage.born:
                forward[storage.born + 1] += self.size[s]
                forward[end + 1] -= self.size[s]
        self.base_forward = np.array(self.profile.base_forward_bytes) / self.unit + np.cumsum(forward)[:n]
        self.base_backward = np.array(self.profile.base_backward_bytes) / self.unit + backward

    def _movers(self) -> None:
        """Which storages each stage may move, and which earlier stages could forbid it."""
        profile, n = self.profile, self.n
        self.movable: list[dict[int, tuple[int, ...]]] = [{} for _ in range(n)]  # storage -> earlier stages to ask
        self.movable_any: list[set[int]] = [set() for _ in range(n)]
        for i, stage in enumerate(profile.stages[: n - 1]):
            moved = {s for c in self.menu[i] for s in stage.options[c].moved}
            for s in sorted(moved):
                storage = profile.storages[s]
                if not storage.nbytes or storage.to_end or storage.stays or storage.program_until > i:
                    continue
                later = [j for j in self.certain[s] if j > i]
                if any(s not in profile.stages[j].linked or self.again[j] is None for j in later):
                    continue
                earlier = [j for j in self.holders[s] if j < i]
                if any(
                    all(s in stage_j.options[c].held and s not in stage_j.options[c].moved for c in self.menu[j])
                    and (self.again[j] is None)
                    for j in earlier
                    for stage_j in (profile.stages[j],)
                ):
                    continue
                self.movable_any[i].add(s)
                if not later:
                    self.movable[i][s] = tuple(earlier[-2:])

    def _menu(self, i: int) -> _Menu:
        stage = self.profile.stages[i]
        out = _Menu(self.menu[i], len(self.menu[i]))
        for at, code in enumerate(self.menu[i]):
            option = stage.options[code]
            kept, extra = self._own(i, option.held)
            out.kept[at] = kept
            out.still[at] = self._own(i, set(option.held) - self.elusive)[0]
            out.forward[at] = option.forward_bytes / self.unit
            out.backward[at] = option.backward_bytes / self.unit + kept + extra
            out.seconds[at] = option.recompute_s / self.second
            for s in option.moved:
                if s in self.movable[i]:
                    if self.movable[i][s]:
                        out.shared[at].append(s)
                    else:
                        out.free[at] += self.size[s]
                    if self.holders[s] == [i]:
                        out.sure[at] += self.size[s]
                    else:
                        out.unsure[at].append(s)
            out.fixes[at] = [s for s in option.held if s not in option.moved]
        return out

    def _segment_numbers(self) -> None:
        """What stages cost inside segments; see `Trees`."""
        n, stages = self.n, self.profile.stages
        self.full = np.zeros(n)  # counted at the stage when it is the segment's last
        self.full_still = np.zeros(n)
        self.last_own = np.zeros(n)
        self.keep_kept = np.zeros(n)
        self.keep_own = np.zeros(n)
        self.segment_forward = np.zeros(n)
        self.run_s = np.zeros(n)
        self.again_s = np.full(n, np.inf)
        self.drops: list[list[tuple[int, int, float]]] = [[] for _ in range(n)]
        self.segment_moves: list[list[tuple[int, int, float]]] = [[] for _ in range(n)]
        for i, stage in enumerate(stages):
            again = self.again[i]
            keep_kept, keep_extra = self._own(
                i, set(stage.keep.held) | (set(again.held) - set(stage.linked) if again is not None else set())
            )
            self.keep_kept[i] = keep_kept
            self.keep_own[i] = stage.keep.backward_bytes / self.unit + self._own(i, stage.keep.held)[1]
            if again is None:
                self.full[i] = self._own(i, stage.keep.held)[0]
                self.full_still[i] = self._own(i, set(stage.keep.held) - self.elusive)[0]
                self.segment_forward[i] = stage.keep.forward_bytes / self.unit
                continue
            self.full[i], extra = self._own(i, again.held)
            self.full_still[i] = self._own(i, set(again.held) - self.elusive)[0]
            self.last_own[i] = again.backward_bytes / self.unit + extra
            ways = [stage.options[c] for c in self.menu[i] if stage.options[c].name in ("recompute", "recompute+swap")]
            self.segment_forward[i] = min(o.forward_bytes for o in ways) / self.unit
            self.run_s[i] = stage.forward_s / self.second
            self.again_s[i] = again.recompute_s / self.second
            for s in stage.linked:
                if self.counted[s] == i and not self.profile.storages[s].to_end:
                    self.drops[i].append((s, self.profile.storages[s].born, float(self.size[s])))
            for s in {s for o in ways for s in o.moved} & self.movable_any[i]:
                born = self.profile.storages[s].born if s in stage.linked else n
                self.segment_moves[i].append((s, born, float(self.size[s])))


@dataclass(slots=True)
class Column:
    """A segment as a column of the master program; `tree` is its inner structure."""

    tree: Segment
    kept: Floats
    forward: Floats
    backward: Floats
    seconds: Floats
    moves: float
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
    put: tuple[Floats, Floats]  # r, entry k is step k's, k = 0..n
    host: float
    ask: dict[tuple[int, int, int], float]
    stage: Floats
    values: list[Floats]
    shares: Floats
    flow: tuple[float, float]  # seconds that a link would save by being twice as fast, to first order


class Master:
    """The linear program over options and the segments found so far, links as fluids."""

    def __init__(self, chain: Chain) -> None:
        from ortools.linear_solver import pywraplp

        self.chain = c = chain
        self.lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        # Without preprocessing the chain's sparse rows are solved about five times as fast.
        self.lp.SetSolverSpecificParametersAsString("use_preprocessing: false")
        self.big = big = self.lp.infinity()
        self.x: list[list[Any]] = []
        self.y: list[tuple[Column, Any]] = []
        n = c.n
        lp = self.lp
        self.excess = lp.NumVar(0, big, "z")
        self.objective = lp.Objective()
        self.objective.SetMinimization()
        self.objective.SetCoefficient(self.excess, 1e3)
        self.cover = [lp.Constraint(1, 1) for _ in range(n)]
        self.carry = [lp.Constraint(0, big) for _ in range(n)]
        held = [lp.NumVar(0, big, "") for _ in range(n + 1)]
        held[0].SetUb(0)
        self.forward = [lp.Constraint(-big, c.budget - c.base_forward[k]) for k in range(n)]
        self.backward = [lp.Constraint(-big, c.budget - c.base_backward[k]) for k in range(n)]
        for k in range(n):
            self.carry[k].SetCoefficient(held[k + 1], 1)
            self.carry[k].SetCoefficient(held[k], -1)
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
                self.objective.SetCoefficient(var, float(m.seconds[o]))
        self.lanes: list[dict[str, Any]] = []
        self.ask: dict[tuple[int, int, int], Any] = {}
        self.host: Any = None
        if c.most_put[-1] > 0:
            self._add_links()

    @staticmethod
    def _set(row: Any, var: Any, value: float) -> None:
        if value:
            row.SetCoefficient(var, float(value))

    def _add_links(self) -> None:
        c, lp, big, n = self.chain, self.lp, self.big, self.chain.n
        self.host = lp.Constraint(-big, big if c.host is None else c.host)
        times = (c.forward_s, c.backward_s)
        for rate, seconds, memory in zip((c.out, c.back), times, (self.forward, self.backward), strict=True):
            away = [lp.NumVar(0, big, "") for _ in range(n + 1)]
            away[0].SetUb(0)
            put = [lp.NumVar(0, big, "") for _ in range(n + 1)]
            put[0].SetUb(0)
            lane: dict[str, Any] = {"drain": [], "queue": [], "put": [], "sum": [], "away": away, "joined": put}
            for k in range(n):
                stall = lp.NumVar(0, big, "")
                self.objective.SetCoefficient(stall, 1)
                drain = lp.Constraint(-big, float(seconds[k]))
                drain.SetCoefficient(away[k + 1], 1 / rate)
                drain.SetCoefficient(away[k], -1 / rate)
                drain.SetCoefficient(stall, -1)
                queue = lp.Constraint(-big, 0)
                queue.SetCoefficient(away[k + 1], 1 / rate)
                queue.SetCoefficient(put[k], -1 / rate)
                queue.SetCoefficient(stall, -1)
                # At the turn all is away: with the row below an equation.
                below = lp.Constraint(0 if k == n - 1 else -big, 0)
                below.SetCoefficient(away[k + 1], 1)
                below.SetCoefficient(put[k + 1], -1)
                total = lp.Constraint(0, 0)
                total.SetCoefficient(put[k + 1], 1)
                total.SetCoefficient(put[k], -1)
                memory[k].SetCoefficient(away[k], -1)
                for name, row in (("drain", drain), ("queue", queue), ("put", below), ("sum", total)):
                    lane[name].append(row)
            self.lanes.append(lane)
        for k in range(n):
            m = c.menus[k]
            for o, var in enumerate(self.x[k]):
                self._set(self.lanes[1]["drain"][k], var, -float(m.seconds[o]))
            if m.free.any():
                moved, limit = self._moved(k, k)
                for o, var in enumerate(self.x[k]):
                    self._set(limit, var, -m.free[o])
            for s in sorted({s for items in m.shared for s in items}):
                moved, limit = self._moved(k, k)
                for o, var in enumerate(self.x[k]):
                    if s in m.shared[o]:
                        limit.SetCoefficient(var, -float(c.size[s]))
                for j in c.movable[k][s]:
                    fixing = [v for o, v in enumerate(self.x[j]) if s in c.menus[j].fixes[o]]
                    if fixing:
                        row = lp.Constraint(-big, float(c.size[s]))
                        row.SetCoefficient(moved, 1)
                        for v in fixing:
                            row.SetCoefficient(v, float(c.size[s]))
                        self.ask[k, s, j] = row

    def _moved(self, out_at: int, back_at: int) -> tuple[Any, Any]:
        """A variable for bytes that join both queues, and the row that limits it."""
        moved = self.lp.NumVar(0, self.big, "")
        self.lanes[0]["sum"][out_at].SetCoefficient(moved, -1)
        self.lanes[1]["sum"][back_at].SetCoefficient(moved, -1)
        self.host.SetCoefficient(moved, 1)
        limit = self.lp.Constraint(-self.big, 0)
        limit.SetCoefficient(moved, 1)
        return moved, limit

    def add(self, column: Column) -> None:
        """Add a segment."""
        a, b = column.tree.first, column.tree.last
        var = self.lp.NumVar(0, self.big, "")
        self.y.append((column, var))
        self.objective.SetCoefficient(var, float(column.seconds.sum()))
        for k in range(a, b + 1):
            self.cover[k].SetCoefficient(var, 1)
            self._set(self.carry[k], var, -column.kept[k - a])
            self._set(self.forward[k], var, column.forward[k - a])
            self._set(self.backward[k], var, column.backward[k - a])
            if self.lanes:
                self._set(self.lanes[1]["drain"][k], var, -column.seconds[k - a])
        for again, nbytes in column.returns:
            # There in forward all the while, in backward from that stage on.
            self.carry[b].SetCoefficient(var, self.carry[b].GetCoefficient(var) - nbytes)
            for k in range(b + 1, again):
                self.backward[k].SetCoefficient(var, self.backward[k].GetCoefficient(var) - nbytes)
        if self.lanes and column.moves:
            _, limit = self._moved(a, b)
            limit.SetCoefficient(var, -float(column.moves))

    def with_segments(self, trees: Sequence[Segment], share: float, seconds: float) -> tuple[int, ...] | None:
        """Options that suit these segments (columns by now) and this share of the budget; None where there is none."""
        c = self.chain
        for column, var in self.y:
            var.SetBounds(*((1, 1) if column.tree in trees else (0, 0)))
        for k in range(c.n):
            self.forward[k].SetUb(c.budget * share - c.base_forward[k])
            self.backward[k].SetUb(c.budget * share - c.base_backward[k])
        self.lp.SetTimeLimit(max(1, int(1000 * seconds)))
        solved = self.lp.Solve() == self.lp.OPTIMAL and self.excess.solution_value() < TOLERANCE
        codes = (
            [
                m.codes[max(range(len(row)), key=lambda o: row[o].solution_value())]  # noqa: B023 - called at once
                for m, row in zip(c.menus, self.x, strict=True)
            ]
            if solved
            else None
        )
        for _, var in self.y:
            var.SetBounds(0, self.big)
        for k in range(c.n):
            self.forward[k].SetUb(c.budget - c.base_forward[k])
            self.backward[k].SetUb(c.budget - c.base_backward[k])
        return None if codes is None else tuple(codes)

    def _flow(self, at: int) -> float:
        """Minus the derivative of the optimum by the logarithm of a link's rate."""
        lane, rate = self.lanes[at], (self.chain.out, self.chain.back)[at]
        away = [var.solution_value() for var in lane["away"]]
        put = [var.solution_value() for var in lane["joined"]]
        total = 0.0
        for k, (drain, queue) in enumerate(zip(lane["drain"], lane["queue"], strict=True)):
            total -= drain.dual_value() * (away[k + 1] - away[k]) + queue.dual_value() * (away[k + 1] - put[k])
        return max(0.0, total / rate)

    def solve(self, seconds: float) -> Duals | None:
        """Solve; None where the time ran out."""
        self.lp.SetTimeLimit(max(1, int(1000 * seconds)))
        if self.lp.Solve() != self.lp.OPTIMAL:
            return None
        n, empty = self.chain.n, np.zeros(self.chain.n)

        def less(rows: list[Any]) -> Floats:
            return np.array([max(0.0, -row.dual_value()) for row in rows])

        lanes = self.lanes
        return Duals(
            objective=self.objective.Value(),
            excess=self.excess.solution_value(),
            forward=less(self.forward),
            backward=less(self.backward),
            drain=tuple(less(lane["drain"]) for lane in lanes) if lanes else (empty, empty),  # type: ignore[arg-type]
            queue=tuple(less(lane["queue"]) for lane in lanes) if lanes else (empty, empty),  # type: ignore[arg-type]
            put=tuple(  # type: ignore[arg-type]
                np.concatenate([[0.0], [-row.dual_value() for row in lane["put"]]]) for lane in lanes
            )
            if lanes
            else (np.zeros(n + 1), np.zeros(n + 1)),
            host=max(0.0, -self.host.dual_value()) if self.host is not None else 0.0,
            ask={key: max(0.0, -row.dual_value()) for key, row in self.ask.items()},
            stage=np.array([row.dual_value() for row in self.cover]),
            values=[np.array([var.solution_value() for var in row]) for row in self.x],
            shares=np.array([var.solution_value() for _, var in self.y]),
            flow=(self._flow(0), self._flow(1)) if lanes else (0.0, 0.0),
        )


@dataclass(slots=True)
class Costs:
    """Feasible multipliers and what follows from them; times in units of the baseline, bytes in units of the budget.

    Attributes
    ----------
    linear_forward, linear_backward : array (stages,)
        Price of a byte in each step, in the linear bound.
    away_forward, away_backward : array (stages,)
        What a byte over the budget costs in each step; infinite where nothing can move.
    tau : array (stages,)
        What a second of compute in a backward step costs; below 1 where the link uses it.
    options : list of array
        Per stage and option, what does not depend on memory: recompute and moves.
    move_out, move_back : array (stages,)
        Per byte that joins the queues after a stage.
    constant : float
        What any plan pays, memory left out.
    """

    linear_forward: Floats
    linear_backward: Floats
    away_forward: Floats
    away_backward: Floats
    tau: Floats
    options: list[Floats]
    move_out: Floats
    move_back: Floats
    asked: dict[tuple[int, int], float]
    host: float
    constant: float

    @classmethod
    def of(cls, chain: Chain, duals: Duals, *, scale: float = 1.0, apart: bool = False) -> Costs:
        """Make multipliers of the solver's, which are right up to its tolerance alone.

        `apart`: leave out the rows "no more is away than was put" (r), for a program that heeds them itself.
        """
        c, n = chain, chain.n
        constant = 0.0
        away, moves, taus, linear = [], [], [], []
        lanes = ((c.out, c.forward_s, duals.forward), (c.back, c.backward_s, duals.backward))
        for lane, (rate, seconds, memory) in enumerate(lanes):
            p, q = duals.drain[lane], duals.queue[lane]
            over = np.maximum(1.0, p + q)
            p, q = p / over, q / over
            before = np.concatenate([[0.0], (p + q) / rate])
            price = before[:n] - p / rate
            price[0] = np.inf
            wanted = memory * scale
            if apart:
                wanted = np.minimum(wanted, np.where(np.isfinite(price), np.maximum(price, 0.0), 0.0))
            # Where the link alone doesn't pay for what must be away, what was put does.
            r = np.maximum(0.0, wanted - price)
            away.append(np.maximum(price, wanted))
            linear.append(wanted)
            # P[k] for k < n costs -(q / rate + r); at the turn everything is away.
            late = np.concatenate([(q / rate + r), [0.0]])
            tail = np.cumsum(late[::-1])[::-1]
            moves.append(before[n] - tail[1:])
            constant -= float(p @ seconds)
            taus.append(1.0 - p)
        if c.most_put[-1] <= 0:
            away = [np.full(n, np.inf), np.full(n, np.inf)]
            linear = [duals.forward * scale, duals.backward * scale]
            taus = [np.ones(n), np.ones(n)]
            moves = [np.zeros(n), np.zeros(n)]
            constant = 0.0
        host = duals.host if c.host is not None else 0.0
        constant -= host * (c.host or 0.0)
        fixed: list[dict[int, float]] = [{} for _ in range(n)]
        asked: dict[tuple[int, int], float] = {}
        for (k, s, j), w in duals.ask.items():
            if w > 0:
                fixed[j][s] = fixed[j].get(s, 0.0) + w * c.size[s]
                asked[k, s] = asked.get((k, s), 0.0) + w
                constant -= w * c.size[s]
        options = []
        for i, m in enumerate(c.menus):
            cost = m.seconds * taus[1][i]
            if fixed[i]:
                cost = cost + np.array([sum(fixed[i].get(s, 0.0) for s in items) for items in m.fixes])
            options.append(cost)
        return cls(
            linear_forward=linear[0],
            linear_backward=linear[1],
            away_forward=away[0],
            away_backward=away[1],
            tau=taus[1],
            options=options,
            move_out=moves[0],
            move_back=moves[1],
            asked=asked,
            host=host,
            constant=constant,
        )

    def move(self, i: int, s: int | None = None) -> float:
        """Price of a byte that stage i moves, of storage s where others have a say."""
        price = float(self.move_out[i] + self.move_back[i]) + self.host
        return price if s is None else price + self.asked.get((i, s), 0.0)

    def moving(self, chain: Chain, i: int) -> Floats:
        """Per option of stage i, the least that its moves can cost: any part of them moves."""
        m = chain.menus[i]
        cost = m.free * min(0.0, self.move(i))
        for o, shared in enumerate(m.shared):
            cost[o] += sum(chain.size[s] * min(0.0, self.move(i, s)) for s in shared)
        return cost


class Intervals:
    """Numbers of every run of stages that no multiplier enters; row i is for i + 1 stages, column s for first stage s."""

    def __init__(self, chain: Chain) -> None:
        self.chain = c = chain
        n = c.n
        start = np.arange(n)
        can = np.array([again is not None for again in c.again])
        blocked = np.concatenate([[0], np.cumsum(~(can | c.glue))])
        self.longest = 0  # stages in the longest possible segment
        at = 0
        for i in range(n):
            at = i + 1 if not (can[i] or c.glue[i]) else at
            self.longest = max(self.longest, i + 1 - at)
        self.longest = self.longest if can.any() else 0
        w = self.longest
        held, still, moves, gone = (np.zeros((w, n)) for _ in range(4))
        self.possible = np.zeros((w, n), bool)
        for i in range(w):
            held[i, : n - i] = c.full[i:]
            still[i, : n - i] = c.full_still[i:]
            last = start[: n - i] + i
            self.possible[i, : n - i] = (blocked[last + 1] == blocked[start[: n - i]]) & can[last] & can[start[: n - i]]
        for j in range(n):
            low = max(0, j - w + 1)
            for s, born, nbytes in c.drops[j]:
                first = np.arange(low, born + 1)
                held[j - first, first] -= nbytes
                if s not in c.elusive:
                    still[j - first, first] -= nbytes
            for s, born, nbytes in c.segment_moves[j]:
                first = np.arange(low if born == n else max(low, born + 1), j + 1)
                moves[j - first, first] += nbytes
                if s not in c.elusive:
                    gone[j - first, first] += nbytes
        self.held_at = np.maximum(held, 0.0)
        self.held = np.cumsum(self.held_at, axis=0)
        self.moves = np.cumsum(moves, axis=0)
        # Without what is elusive: held, and moved.
        self.still = np.cumsum(np.maximum(still, 0.0), axis=0)
        self.gone = np.cumsum(gone, axis=0)
        self.run = np.concatenate([[0.0], np.cumsum(c.run_s)])

    def returns(self, a: int, b: int) -> list[tuple[int, int]]:
        """Storages that the segment a..b drops and the stage behind it that is sure to hold each again."""
        c = self.chain
        return [
            (s, next(i for i in later if i > b))
            for s, later in c.returns.items()
            if a <= c.profile.storages[s].born and c.counted[s] <= b < later[-1]
        ]


class LinearTrees:
    """The cheapest tree of every segment at linear prices; see the module's docstring for the recursion."""

    def __init__(self, intervals: Intervals, costs: Costs) -> None:
        self.intervals, self.costs, self.chain = intervals, costs, intervals.chain
        c, n, w = self.chain, self.chain.n, intervals.longest
        lf, lb = costs.linear_forward, costs.linear_backward
        self.back = np.concatenate([[0.0], np.cumsum(lb)])
        self.fore = np.concatenate([[0.0], np.cumsum(lf)])
        again_s = np.where(np.isfinite(c.again_s), c.again_s, 0.0)
        self.sweep = np.zeros((w, n))  # G, column: last stage
        self.tree = np.full((w, n), np.inf)  # R, column: first stage
        self.less = np.full((w, n), np.inf)  # R less what is held until later
        for i in range(w):
            if i == 0:
                self.sweep[0] = lb * (c.full + c.last_own)
            else:
                s, b = slice(0, n - i), slice(i, n)
                best = (
                    c.keep_kept[s] * (self.back[i + 1 :] - self.back[s]) + lb[s] * c.keep_own[s] + self.sweep[i - 1, b]
                )
                inner = self.less[:i, s] + intervals.held[:i, s] * self.back[i + 1 :] + self.sweep[:i][::-1, b]
                self.sweep[i, b] = np.minimum(best, inner.min(axis=0))
            last = np.arange(i, n)
            value = (
                costs.tau[last] * (again_s[last] + intervals.run[last] - intervals.run[last - i]) + self.sweep[i, last]
            )
            self.tree[i, : n - i] = np.where(intervals.possible[i, : n - i], value, np.inf)
            self.less[i, : n - i] = self.tree[i, : n - i] - intervals.held[i, : n - i] * self.back[last + 1]
        self._segments()

    def _segments(self) -> None:
        """What a segment costs at the top level: its tree, its forward, what it holds for later steps, its moves."""
        c, n, costs, iv = self.chain, self.chain.n, self.costs, self.intervals
        w = iv.longest
        own = costs.linear_forward * c.segment_forward
        self.forward = np.zeros((w, n))
        self.move = np.zeros((w, n))
        self.segment = np.full((w, n), np.inf)
        total = self.fore[n] + self.back[n]
        running = np.zeros(n)
        for i in range(w):
            k = n - i
            running[:k] += own[i:] + iv.held_at[i, :k] * (self.fore[n] - self.fore[i + 1 :])
            self.forward[i, :k] = running[:k]
            price = np.minimum(0.0, costs.move_out[:k] + costs.move_back[i:] + costs.host)
            self.move[i, :k] = iv.moves[i, :k] * price
            after = iv.held[i, :k] * (self.back[n] - self.back[i + 1 :])
            self.segment[i, :k] = self.tree[i, :k] + running[:k] + after + self.move[i, :k]
        self.segment[:1] = np.inf
        for s, later in c.returns.items():
            first = np.arange(c.profile.storages[s].born + 1)
            for b in range(c.counted[s], later[-1]):
                a = first[max(0, b - w + 1) :]
                again = next(i for i in later if i > b)
                price = self.fore[n] - self.fore[b + 1] + self.back[n] - self.back[again]
                self.segment[b - a, a] += c.size[s] * price
        assert total >= 0
        tail = self.fore[n] - self.fore[1:] + self.back[n] - self.back[1:]
        lf, lb = costs.linear_forward, costs.linear_backward
        self.options = [
            costs.options[i] + costs.moving(c, i) + lf[i] * m.forward + lb[i] * m.backward + m.kept * tail[i]
            for i, m in enumerate(c.menus)
        ]
        self.single = np.array([cost.min() for cost in self.options])
        self.constant = costs.constant - float(lf @ (c.budget - c.base_forward) + lb @ (c.budget - c.base_backward))

    def path(self) -> tuple[Floats, Floats]:
        """Cheapest ways to each boundary from the first and to the last, constants left out."""
        n, w = self.chain.n, self.intervals.longest
        ahead, behind = np.zeros(n + 1), np.zeros(n + 1)
        for b in range(n):
            best = ahead[b] + self.single[b]
            if w:
                i = np.arange(min(w, b + 1))
                best = min(best, float((ahead[b - i] + self.segment[i, b - i]).min()))
            ahead[b + 1] = best
        for a in reversed(range(n)):
            best = behind[a + 1] + self.single[a]
            if w:
                i = np.arange(min(w, n - a))
                best = min(best, float((behind[a + 1 + i] + self.segment[i, a]).min()))
            behind[a] = best
        return ahead, behind

    def best_path(self) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
        """Option codes and segments of the cheapest path."""
        ahead, _ = self.path()
        n, w = self.chain.n, self.intervals.longest
        codes = [m.codes[int(cost.argmin())] for m, cost in zip(self.chain.menus, self.options, strict=True)]
        segments = []
        b = n
        while b > 0:
            i = np.arange(min(w, b))
            through = ahead[b - 1 - i] + self.segment[i, b - 1 - i]
            if w and through.min() < ahead[b - 1] + self.single[b - 1]:
                length = int(through.argmin())
                segments.append(self.structure(b - 1 - length, b - 1))
                b -= length
            b -= 1
        return tuple(codes), tuple(reversed(segments))

    def missing(self, stage_prices: Floats, longest: int) -> list[tuple[int, int]]:
        """Segments cheaper than the stages they replace: the best from each first and to each last stage."""
        n, w = self.chain.n, min(longest, self.intervals.longest)
        if not w:
            return []
        total = np.concatenate([[0.0], np.cumsum(stage_prices)])
        reduced = np.full((w, n), np.inf)
        for i in range(w):
            reduced[i, : n - i] = self.segment[i, : n - i] - (total[i + 1 :] - total[: n - i])
        found = []
        for a, i in enumerate(reduced.argmin(axis=0).tolist()):
            if reduced[i, a] < -TOLERANCE:
                found.append((a, a + i))
        for b in range(n):
            i = np.arange(min(w, b + 1))
            values = reduced[i, b - i]
            at = int(values.argmin())
            if values[at] < -TOLERANCE:
                found.append((b - at, b))
        return sorted(set(found))

    def structure(self, first: int, last: int) -> Segment:
        """The cheapest tree of the segment `first..last`."""
        inner, s = [], first
        while s < last:
            i = last - s
            best = (
                self.chain.keep_kept[s] * (self.back[last + 1] - self.back[s])
                + self.costs.linear_backward[s] * self.chain.keep_own[s]
                + self.sweep[i - 1, last]
            )
            options = self.less[:i, s] + self.intervals.held[:i, s] * self.back[last + 1] + self.sweep[:i, last][::-1]
            e = int(options.argmin())
            if options[e] < best:
                inner.append(self.structure(s, s + e))
                s += e
            s += 1
        return Segment(first, last, tuple(inner))


def column_of(chain: Chain, intervals: Intervals, tree: Segment) -> Column:
    """The coefficients of a segment in the master program."""
    c, a, b = chain, tree.first, tree.last
    size = b - a + 1
    kept = np.array([intervals.held_at[j - a, a] for j in range(a, b + 1)])
    rows, seconds = np.zeros(size), np.zeros(size)

    def sweep(segment: Segment) -> None:
        s, last = segment.first, segment.last
        seconds[last - a] += c.again_s[last] + intervals.run[last] - intervals.run[s]
        rows[last - a] += c.full[last] + c.last_own[last]
        inner = {item.first: item for item in segment.inner}
        while s < last:
            if s in inner:
                e = inner[s].last
                sweep(inner[s])
                rows[e + 1 - a : last + 1 - a] += intervals.held[e - s, s]
                s = e + 1
            else:
                rows[s - a : last + 1 - a] += c.keep_kept[s]
                rows[s - a] += c.keep_own[s]
                s += 1

    sweep(tree)
    before = np.concatenate([[0.0], np.cumsum(kept)[:-1]])
    moves = float(intervals.moves[b - a, a])
    returns = [(again, float(c.size[s])) for s, again in intervals.returns(a, b)]
    return Column(tree, kept, c.segment_forward[a : b + 1], rows - before, seconds, moves, returns)


_Open = tuple[tuple[int, int], ...]
"""Storages that a segment has dropped, each with the stage that holds it again."""
MOST_OPEN = 32


class _States:
    """Values of one boundary by slot of the bytes tracked, and where each comes from."""

    def __init__(self, slots: int) -> None:
        self.value = np.full(slots, np.inf)
        self.source = np.full(slots, -1, np.int32)
        self.choice = np.full(slots, -1, np.int32)
        self.opened = np.full(slots, -1, np.int32)


class HeldDP:
    """A bound by a dynamic program over (boundary, held bytes) at given multipliers of the links.

    Parameters
    ----------
    linear : LinearTrees
        At the multipliers of the linear program; prunes, guides the rounding, and stands in for long segments.
    apart : Costs or None
        None: what is held is tracked, and being over the budget costs what the links ask for it. Else: what is held and
        does not move is tracked and never exceeds the budget, what is held is charged at the prices of `apart`.
    limit : float
        Plans above it needn't be told apart.
    """

    def __init__(
        self,
        linear: LinearTrees,
        apart: Costs | None,
        limit: float,
        *,
        slots: int = 1000,
        coarse: int = 8,
        longest: int = 1 << 30,
    ) -> None:
        self.linear, self.chain, self.limit = linear, linear.chain, limit
        self.apart = apart is not None
        self.costs = k = linear.costs if apart is None else apart
        c, n = self.chain, self.chain.n
        zero = np.zeros(n)
        self.room_forward = c.budget - c.base_forward
        self.room_backward = c.budget - c.base_backward
        slack = 1e-9
        if apart is None:
            self.price_forward, self.price_backward = zero, zero
            self.weight_forward = np.where(np.isfinite(k.away_forward), k.away_forward, 0.0)
            self.weight_backward = np.where(np.isfinite(k.away_backward), k.away_backward, 0.0)
            put = c.most_put[:n]
            self.hard_forward = np.where(np.isfinite(k.away_forward), put, 0.0) + slack
            self.hard_backward = np.where(np.isfinite(k.away_backward), put, 0.0) + slack
        else:
            self.price_forward, self.price_backward = k.linear_forward, k.linear_backward
            self.weight_forward = self.weight_backward = zero
            self.hard_forward = self.hard_backward = zero + slack
        self.guide_forward = linear.costs.linear_forward - self.price_forward
        self.guide_backward = linear.costs.linear_backward - self.price_backward
        self.price_tail = self._tail(self.price_forward + self.price_backward)
        self.mu = self._tail(self.guide_forward + self.guide_backward)
        self.back = np.concatenate([[0.0], np.cumsum(self.guide_backward)])
        self.price_back = np.concatenate([[0.0], np.cumsum(self.price_backward)])
        # The most bytes tracked at a boundary: what options add up to, and what the next step lets in.
        most = np.cumsum([m.kept.max() for m in c.menus])
        let_in = np.minimum(self.room_forward + self.hard_forward, self.room_backward + self.hard_backward)
        top = max(float(np.minimum(most[:-1], let_in[1:]).max()) if n > 1 else 0.0, 1e-6)
        self.slots = -(-slots // coarse) * coarse
        self.width = top / (self.slots - 1)
        self.coarse = coarse
        self.low = np.arange(self.slots) * self.width
        self.keys: dict[_Open, int] = {}
        self.ahead, self.behind = linear.path()
        self.fixed = (
            1.0 + k.constant - float(self.price_forward @ self.room_forward + self.price_backward @ self.room_backward)
        )
        # The linear bound of completing a plan, as what is added to the value of a state.
        room = self.guide_forward * self.room_forward + self.guide_backward * self.room_backward
        self.rest = self.behind - self._tail(room)
        self._arcs(longest)

    @staticmethod
    def _tail(values: Floats) -> Floats:
        return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])

    @staticmethod
    def _row(over: Floats, weight: float | Floats, price: float | Floats, hard: float | Floats, width: float) -> Floats:
        """Least of weight * (over + t)+ - price * t over 0 <= t <= width; infinite where even t = 0 is too much."""
        cost = weight * np.maximum(over, 0.0) + price * np.clip(over, -width, 0.0)
        return np.where(over > hard, np.inf, cost)

    def _back_row(self, over: Floats, k: NDArray[np.int64], width: float) -> Floats:
        """`_row` of backward steps k, shape (steps, slots)."""
        return self._row(
            over,
            self.weight_backward[k][:, None],
            self.guide_backward[k][:, None],
            self.hard_backward[k][:, None],
            width,
        )

    def _arcs(self, longest: int) -> None:
        """Segments that could be in a plan below the limit, and their costs by what is held before them."""
        n, lin, iv = self.chain.n, self.linear, self.linear.intervals
        total = 1.0 + lin.constant
        self.arcs: list[list[int]] = [[] for _ in range(n)]
        w = 0
        for i in range(1, iv.longest):
            k = n - i
            value = total + self.ahead[:k] + lin.segment[i, :k] + self.behind[i + 1 :]
            for a in np.flatnonzero(value < self.limit):
                self.arcs[int(a)].append(i)
                w = max(w, i + 1)
        self.count = sum(map(len, self.arcs))
        self.wide = min(w, longest)

    def estimate_s(self) -> float:
        """About how long `run` takes, in seconds, from what it took on one core of 2020."""
        cells = self.slots // self.coarse * self.chain.n
        return 4e-4 * self.count + 2e-8 * self.wide**2 * cells + 2e-8 * self.slots * self.chain.n * 30

    def _trees(self) -> None:
        """The recursion of `LinearTrees` for every slot of what is held before the segment."""
        c, n, iv, w = self.chain, self.chain.n, self.linear.intervals, self.wide
        q = self.slots // self.coarse
        width = self.width * self.coarse
        low = np.arange(q) * width
        price, own_price = self.price_back, self.price_backward
        again_s = np.where(np.isfinite(c.again_s), c.again_s, 0.0)
        sweep = np.full((w, n, q + 2), np.inf)
        self.tree = np.full((w, n, q), np.inf)
        columns = np.arange(q)

        def moved(values: Floats, rows: NDArray[np.int64], add: Floats, charge: Floats) -> Floats:
            """values[rows] at low + add, rounded both ways, the rounding charged."""
            shift = np.floor(add / width * (1 + 1e-15)).astype(np.int64)
            part = add - shift * width
            index = np.minimum(columns + shift[:, None], q)
            rows = rows[:, None]
            down = values[rows, index] + (charge * part)[:, None]
            up = values[rows, index + 1] + (charge * (part - width))[:, None]
            return np.minimum(down, up)

        for i in range(w):
            b = np.arange(i, n)
            s = b - i
            if i == 0:
                own = c.full + c.last_own
                value = self._back_row(low + (own - self.room_backward)[:, None], b, width) + (own_price * own)[:, None]
            else:
                own = c.keep_kept[s] + c.keep_own[s]
                value = self._back_row(low + (own - self.room_backward[s])[:, None], s, width)
                value += moved(sweep[i - 1], b, c.keep_kept[s], self.back[b + 1] - self.back[s + 1])
                value += (c.keep_kept[s] * (price[b + 1] - price[s]) + own_price[s] * c.keep_own[s])[:, None]
                for j in range(i):
                    at = np.flatnonzero(iv.possible[j, s])
                    if len(at) == 0:
                        continue
                    sp, bp, e = s[at], b[at], s[at] + j + 1
                    later = moved(sweep[i - j - 1], bp, iv.held[j, sp], self.back[bp + 1] - self.back[e])
                    later += (iv.held[j, sp] * (price[bp + 1] - price[e]))[:, None]
                    value[at] = np.minimum(value[at], self.tree[j, sp] + later)
            sweep[i, b, :q] = value
            seconds = self.costs.tau[b] * (again_s[b] + iv.run[b] - iv.run[s])
            self.tree[i, s] = np.where(iv.possible[i, s][:, None], value + seconds[:, None], np.inf)
        self.fore = np.zeros((w, n, q))
        running = np.zeros((n, q))
        for i in range(w):
            s = np.arange(n - i)
            at = s + i
            held = iv.still - iv.gone if self.apart else iv.held
            before = held[i - 1, s] if i else np.zeros(n)
            own = before + c.segment_forward[at] - self.room_forward[at]
            running = running[: n - i] + self._row(
                low + own[:, None],
                self.weight_forward[at][:, None],
                self.guide_forward[at][:, None],
                self.hard_forward[at][:, None],
                width,
            )
            self.fore[i, s] = running

    def _arc(self, a: int, i: int) -> Floats:
        """The cost of the segment of i + 1 stages from `a`, by slot of what is held before it; without its moves."""
        lin, n, b = self.linear, self.chain.n, a + i
        iv = lin.intervals
        slope = self.mu[a] - self.mu[b + 1]
        rows = slice(a, b + 1)
        # What it holds, at the prices of what isn't tracked.
        held = iv.held[i, a]
        at = np.arange(a, b + 1)
        priced = float(
            self.price_forward[rows] @ self.chain.segment_forward[rows]
            + iv.held_at[at - a, a] @ (self.price_forward.sum() - np.cumsum(self.price_forward)[rows])
            + held * (self.price_back[n] - self.price_back[b + 1])
        )
        for s, again in iv.returns(a, b):
            price = self.price_forward[b + 1 :].sum() + self.price_back[n] - self.price_back[again]
            priced += float(self.chain.size[s] * price)
        if i < self.wide:
            offset = slope * (self.low - np.repeat(self.low[:: self.coarse], self.coarse))
            return np.repeat(self.tree[i, a] + self.fore[i, a], self.coarse) + offset + priced
        # Too long for the tables: tracked bytes at the linear bound's prices too.
        constant = -float(
            self.guide_forward[rows] @ self.room_forward[rows] + self.guide_backward[rows] @ self.room_backward[rows]
        )
        guide = self.guide_forward
        inside = float(
            guide[rows] @ self.chain.segment_forward[rows]
            + iv.held_at[at - a, a] @ (guide[: b + 1].sum() - np.cumsum(guide)[rows])
        )
        if self.apart:
            inside -= float((iv.held[i, a] - iv.still[i, a] + iv.gone[i, a]) * guide[rows].sum())
        return lin.tree[i, a] + inside + constant + slope * self.low + priced

    @staticmethod
    def _subsets(items: list[tuple[float, float, float]], held: float) -> list[tuple[float, float]]:
        """(cost, tracked bytes) for each choice among moves of (bytes, of them tracked, price); free beyond two."""
        cost = sum(nbytes * min(0.0, price) for nbytes, _, price in items[2:])
        held -= sum(tracked for _, tracked, _ in items[2:])
        found = [(cost, held)]
        for nbytes, tracked, price in items[:2]:
            found += [(cost + nbytes * price, held - tracked) for cost, held in found]
        return found

    def _item(self, s: int, price: float) -> tuple[float, float, float]:
        size = float(self.chain.size[s])
        return (size, 0.0 if s in self.chain.elusive else size, price)

    def _ways(self, i: int) -> list[tuple[int, float, float, float, float]]:
        """(option, cost, forward bytes, backward bytes, tracked bytes) of stage i."""
        c, k, m = self.chain, self.costs, self.chain.menus[i]
        lf, lb = self.price_forward, self.price_backward
        priced = k.options[i] + lf[i] * m.forward + lb[i] * m.backward + m.kept * self.price_tail[i + 1]
        if not self.apart:
            priced = priced + k.moving(c, i)
            return [
                (o, float(priced[o]), float(m.forward[o]), float(m.backward[o]), float(m.kept[o]))
                for o in range(len(m.codes))
            ]
        out = []
        for o in range(len(m.codes)):
            unsure = [self._item(s, k.move(i, s)) for s in m.unsure[o]]
            unsure.sort(reverse=True)
            ways = [(0.0, float(m.still[o]))]
            if m.sure[o] or unsure:
                some = self._subsets(unsure, float(m.still[o] - m.sure[o]))
                ways += [(cost + float(m.sure[o]) * k.move(i), kept) for cost, kept in some]
            out += [
                (o, float(priced[o]) + cost, float(m.forward[o]), float(m.backward[o]), kept) for cost, kept in ways
            ]
        return out

    def _arc_ways(self, a: int, i: int) -> list[tuple[float, float]]:
        """(cost, tracked bytes) of a segment's moves."""
        iv, k, b = self.linear.intervals, self.costs, a + i
        if not self.apart:
            held = float(iv.held[i, a])
            return [(float(iv.moves[i, a] * min(0.0, k.move_out[a] + k.move_back[b] + k.host)), held)]
        items = []
        if iv.moves[i, a]:
            price = float(k.move_out[a] + k.move_back[b]) + k.host
            items = [
                self._item(s, price)
                for j in range(a, b + 1)
                for s, born, _ in self.chain.segment_moves[j]
                if born < a or born == self.chain.n
            ]
        items.sort(reverse=True)
        return self._subsets(items, float(iv.still[i, a]))

    def run(self) -> float:
        """The bound, in units of the baseline; at most `limit`."""
        n, width = self.chain.n, self.width
        self._trees()
        self.states: list[dict[_Open, _States]] = [{} for _ in range(n + 1)]
        self.states[0][()] = _States(self.slots)
        self.states[0][()].value[0] = 0.0
        for i in range(n):
            bar = self.limit - self.fixed - self.rest[i]
            ways = self._ways(i)
            arcs: dict[int, Floats] = {}
            for opened, state in sorted(self.states[i].items()):
                state.value[state.value + self.mu[i] * self.low > bar] = np.inf
                live = np.flatnonzero(np.isfinite(state.value))
                if len(live) == 0:
                    continue
                first, last = int(live[0]), int(live[-1]) + 1
                low, here = self.low[first:last], state.value[first:last]
                besides = sum(float(self.chain.size[s]) for s, _ in opened)
                done: dict[int, Floats] = {}
                for o, cost, forward, backward, kept in ways:
                    if o not in done:
                        over_f = low + (forward + besides - self.room_forward[i])
                        over_b = low + (backward - self.room_backward[i])
                        done[o] = (
                            here
                            + self._row(
                                over_f, self.weight_forward[i], self.guide_forward[i], self.hard_forward[i], width
                            )
                            + self._row(
                                over_b, self.weight_backward[i], self.guide_backward[i], self.hard_backward[i], width
                            )
                        )
                    self._move((i, opened, first), i + 1, opened, done[o] + cost, kept, -2 - o)
                for length in self.arcs[i]:
                    if length not in arcs:
                        arcs[length] = self._arc(i, length)
                    arc = here + arcs[length][first:last]
                    dropped = self.linear.intervals.returns(i, i + length)
                    after = (*opened, *((s, j) for s, j in dropped if not (self.apart and s in self.chain.elusive)))
                    for cost, kept in self._arc_ways(i, length):
                        self._move((i, opened, first), i + length + 1, after, arc + cost, kept, i)
        end = self.states[n].get(())
        best = math.inf if end is None else float(end.value.min())
        return min(self.limit, self.fixed + best)

    def _move(
        self, source: tuple[int, _Open, int], to: int, opened: _Open, new: Floats, add: float, choice: int
    ) -> None:
        """Offer `new`, values by slot from the source's first on, to the boundary `to`."""
        # What a stage before `to`, or the next one, holds again is tracked from here on.
        add += sum(float(self.chain.size[s]) for s, j in opened if j <= to)
        opened = tuple((s, j) for s, j in opened if j > to)
        states = self.states[to]
        while opened and opened not in states and len(states) >= MOST_OPEN:
            opened = opened[:-1]  # forgets bytes: a relaxation
        state = states.get(opened)
        if state is None:
            state = states[opened] = _States(1 if to == self.chain.n else self.slots)
        if to == self.chain.n:
            # Nothing depends on what is held at the end.
            at = int(new.argmin())
            if new[at] < state.value[0]:
                state.value[0], state.source[0], state.choice[0] = new[at], source[2] + at, choice
                state.opened[0] = self._key(source[1])
            return
        key = self._key(source[1])
        shift = math.floor(add / self.width * (1 + 1e-15))
        part = add - shift * self.width
        for up, charge in ((0, part), (1, part - self.width)):
            if up and part <= 0:
                continue
            begin, skip = source[2] + shift + up, 0
            if begin < 0:
                # Less than nothing can only come of moves counted twice; nothing is held then.
                begin, skip = 0, min(-begin, len(new))
                at = int(new[:skip].argmin())
                least = new[at] + self.mu[to] * (charge - self.width)
                if least < state.value[0]:
                    state.value[0], state.source[0], state.choice[0] = least, source[2] + at, choice
                    state.opened[0] = key
            size = min(len(new) - skip, self.slots - begin)
            if size <= 0:
                continue
            moved = new[skip : skip + size] + self.mu[to] * charge
            target = state.value[begin : begin + size]
            at = np.flatnonzero(moved < target)
            target[at] = moved[at]
            state.source[begin + at] = source[2] + skip + at
            state.choice[begin + at] = choice
            state.opened[begin + at] = key

    def _key(self, opened: _Open) -> int:
        return self.keys.setdefault(opened, len(self.keys))

    def plan(self) -> tuple[tuple[int, ...], tuple[Segment, ...]] | None:
        """Option codes and segments of the best path."""
        n, c = self.chain.n, self.chain
        end = self.states[n].get(())
        if end is None or not np.isfinite(end.value[0]):
            return None
        codes, segments = [0] * n, []
        names = list(self.keys)
        b, q, opened = n, 0, ()
        while b > 0:
            state = self.states[b][opened]
            choice, at = int(state.choice[q]), q
            q, opened = int(state.source[at]), names[state.opened[at]]
            if choice <= -2:
                b -= 1
                codes[b] = c.menus[b].codes[-2 - choice]
            else:
                segments.append(self.linear.structure(choice, b - 1))
                b = choice
        return tuple(codes), tuple(reversed(segments))


@dataclass(frozen=True, slots=True)
class Prices:
    """What the multipliers of the bound say, for people; seconds and bytes.

    Attributes
    ----------
    forward_s_per_byte, backward_s_per_byte : tuple of float
        What a byte less would save, by the step in which it is held; 0 where the budget doesn't bind.
    budget_s_per_byte : float
        Seconds that a byte more of budget saves, to first order: the sum of the above.
    out_s, in_s : float
        Seconds that a link twice as fast would save, to first order; divide by its rate for seconds per byte per second.
    host_s_per_byte : float
        Seconds that a byte more on the host tier saves.
    options_s : tuple of tuple of float
        Per stage and allowed option (in the order of the menu given), what it costs: its time and moves, and its bytes
        at their prices. The cheapest is what the bound counts with; the others say what they would cost more.
    """

    forward_s_per_byte: tuple[float, ...]
    backward_s_per_byte: tuple[float, ...]
    budget_s_per_byte: float
    out_s: float
    in_s: float
    host_s_per_byte: float
    options_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound.

    Attributes
    ----------
    bound_s : float
        No plan of the space is faster; infinite where there is no plan.
    prices : Prices or None
        None where no linear program was solved in time.
    rounds : int
        Linear programs solved.
    complete : bool
        Whether the linear relaxation over all segments was solved to its end.
    """

    bound_s: float
    prices: Prices | None
    rounds: int
    complete: bool


def lower_bound(
    profile: Profile,
    menu: Sequence[Sequence[int]],
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    segments: bool = True,
    deadline: float,
    upper_s: float = math.inf,
    on_candidate: OnCandidate | None = None,
    seed: int = 0,
) -> Bound:
    """Prove that no plan is faster than the result.

    Parameters
    ----------
    profile : Profile
    menu : sequence of sequence of int
        Per stage, the options allowed, as indices into `stage.options`.
    budget_bytes : int
    host_bytes : int, optional
        Most bytes moved in all.
    segments : bool
        Whether plans may have segments.
    deadline : float
        Of `time.monotonic()`.
    upper_s : float
        Makespan of a plan that is known: nothing above it needs proof, which saves time.
    on_candidate : callable, optional
        Gets option codes and segments of plans that may be good; they may not fit.
    seed : int
        Has no effect: nothing here is random.

    Returns
    -------
    Bound
    """
    del seed
    return _Bounder(profile, menu, budget_bytes, host_bytes, segments, deadline, upper_s, on_candidate).run()


@dataclass(slots=True)
class _Bounder:
    """One run of `lower_bound`; times are in units of the baseline."""

    profile: Profile
    menu: Sequence[Sequence[int]]
    budget_bytes: int
    host_bytes: int | None
    segments: bool
    deadline: float
    upper_s: float
    on_candidate: OnCandidate | None
    chain: Chain = field(init=False)
    master: Master = field(init=False)
    suited: set[tuple[Segment, ...]] = field(default_factory=set)
    best: float = 1.0
    rounds: int = 0
    complete: bool = False
    duals: Duals | None = None
    trees: LinearTrees | None = None
    offered: set[tuple[tuple[int, ...], tuple[Segment, ...]]] = field(default_factory=set)

    def run(self) -> Bound:
        """Columns until no segment is missing, then the held-bytes program at the best multipliers."""
        if self.profile.update_peak_bytes > self.budget_bytes:
            return Bound(math.inf, None, 0, True)
        self.chain = Chain(self.profile, self.menu, self.budget_bytes, self.host_bytes, segments=self.segments)
        self.generate()
        if self.trees is not None:
            self.sharpen()
        return Bound(self.seconds(self.best), self.prices(), self.rounds, self.complete)

    def seconds(self, value: float) -> float:
        """Seconds, less what sums of floats may be off by."""
        return max(self.profile.baseline_step_s, value * self.chain.second * (1 - 1e-9))

    def offer(self, codes: Sequence[int], segments: Sequence[Segment]) -> None:
        """Hand out a candidate once; stages in segments get the option that segments ask for."""
        if self.on_candidate is None:
            return
        fixed = list(codes)
        for segment in segments:
            for i in range(segment.first, segment.last + 1):
                fixed[i] = self.chain.inside(i)
        key = (tuple(fixed), tuple(segments))
        if key not in self.offered:
            self.offered.add(key)
            self.on_candidate(*key)

    def generate(self) -> None:
        """Solve, price every segment, add those that are missing, and again.

        Early multipliers are wild and ask for long segments, which make the program dense; so short ones come first.
        """
        chain = self.chain
        self.master = master = Master(chain)
        master.intervals = intervals = Intervals(chain)
        longest = 8 + math.isqrt(chain.n)
        seen: set[Segment] = set()
        while (left := self.deadline - time.monotonic()) > 0:
            duals = master.solve(left)
            if duals is None:
                return
            self.rounds += 1
            trees = LinearTrees(intervals, Costs.of(chain, duals))
            ahead, _ = trees.path()
            value = 1.0 + trees.constant + float(ahead[-1])
            if value > self.best or self.trees is None:
                self.best, self.duals, self.trees = max(value, self.best), duals, trees
            new: list[Segment] = []
            while not new and 1.0 + duals.objective - self.best > CONVERGED:
                found = [trees.structure(a, b) for a, b in trees.missing(duals.stage, longest)]
                new = [tree for tree in found if tree not in seen]
                if longest >= intervals.longest:
                    break
                longest *= 1 if new else 2
            if not new:
                self.complete = True
                self.round_off(duals, master)
                return
            seen.update(new)
            for tree in new:
                master.add(column_of(chain, intervals, tree))

    def round_off(self, duals: Duals, master: Master) -> None:
        """Candidates from the linear program: the largest share of each stage."""
        if self.on_candidate is None:
            return
        assert self.trees is not None
        taken = [column.tree for (column, _), share in zip(master.y, duals.shares, strict=True) if share > 0.5]
        codes = [m.codes[int(values.argmax())] for m, values in zip(self.chain.menus, duals.values, strict=True)]
        self.offer(codes, sorted(taken, key=lambda tree: tree.first))
        for scale in (1.0, 1.1, 1.25, 1.5, 2.0):
            trees = LinearTrees(self.trees.intervals, Costs.of(self.chain, duals, scale=scale))
            codes, segments = trees.best_path()
            self.offer(codes, segments)
            self.suit(segments)

    def suit(self, segments: Sequence[Segment]) -> None:
        """Candidates with these segments: the linear program chooses the other stages' options."""
        if self.on_candidate is None or tuple(segments) in self.suited:
            return
        self.suited.add(tuple(segments))
        for tree in segments:
            if all(column.tree != tree for column, _ in self.master.y):
                self.master.add(column_of(self.chain, self.master.intervals, tree))
        for share in (1.0, 0.98, 0.95, 0.9):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return
            codes = self.master.with_segments(segments, share, left)
            if codes is None:
                return
            self.offer(codes, segments)

    def sharpen(self) -> None:
        """The held-bytes programs at the best multipliers.

        What they need not look above is raised until it isn't reached any more.
        """
        assert self.trees is not None and self.duals is not None
        n = self.chain.n
        slots, longest = (4000, 200) if n <= 60 else (2000, 100) if n <= 150 else (1000, 48) if n <= 400 else (800, 24)
        upper = self.upper_s / self.chain.second
        kinds: list[Costs | None] = [None]
        if self.chain.most_put[-1] > 0:
            kinds.insert(0, Costs.of(self.chain, self.duals, apart=True))
        factors = (math.inf,) if self.duals.excess > TOLERANCE else (1.002, 1.005, 1.02, 1.1, 1.5, math.inf)
        for apart in kinds:
            for limit in [factor * self.best for factor in factors]:
                program = HeldDP(self.trees, apart, min(limit, upper), slots=slots, longest=longest)
                if time.monotonic() + program.estimate_s() > self.deadline:
                    break
                value = program.run()
                self.best = max(self.best, value)
                plan = program.plan()
                if plan is not None:
                    self.offer(*plan)
                    self.suit(plan[1])
                if value < limit or value >= upper:
                    break

    def prices(self) -> Prices | None:
        """The multipliers in seconds and bytes."""
        if self.duals is None or self.trees is None:
            return None
        costs, second = self.trees.costs, self.chain.second
        per_byte = second / self.chain.unit
        forward, backward = costs.linear_forward * per_byte, costs.linear_backward * per_byte
        return Prices(
            forward_s_per_byte=tuple(forward.tolist()),
            backward_s_per_byte=tuple(backward.tolist()),
            budget_s_per_byte=float(forward.sum() + backward.sum()),
            out_s=self.duals.flow[0] * second,
            in_s=self.duals.flow[1] * second,
            host_s_per_byte=costs.host * per_byte,
            options_s=tuple(tuple((cost * second).tolist()) for cost in self.trees.options),
        )
