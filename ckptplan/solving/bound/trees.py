"""Multipliers, and the cheapest tree of every segment at them.

With a price lb[k] per byte in backward step k (lf[k] in forward), tau[k] per second of its compute (less than 1 where
the link uses that second) and e per second of launching, the best tree of the segment a..b is found over intervals:

    R(a, b) = (tau[b] compute + e launching) of (recompute of b + forward of a..b-1) + G(a, b)
    G(b, b) = lb[b] * (what b holds and adds when it is recomputed)
    G(s, b) = min( keep s:        (what keep holds) * lb[s..b] + lb[s] * (what its backward adds) + G(s+1, b),
                   segment s..e:  R(s, e) + (what it holds) * lb[e+1..b] + G(e+1, b)  for s <= e < b )

where lb[s..b] is the sum of the prices. In the sweep, what stage s holds is what rule 2 gives it for the segment that
starts there, originals and copies together, so G doesn't depend on a. The memory of a sweep's own runs (rule 7) is
left out. O(stages * longest**2) in numpy.

A segment at the top level costs R, and its forward: the transients of its recompute options and what they hold from
each stage's run to the end of the step. The bound is the cheapest path over the boundaries, plus what no choice
changes. It holds for any multipliers for which the flows of the links have no negative reduced cost; `Costs.of` sees
to that: p + q <= 1 - e, and A[k] costs (p[k-1] + q[k-1] - p[k]) / v + r[k], which must be at least the price of a byte
in step k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckptplan.core import rules
from ckptplan.core.segment import Segment
from ckptplan.solving.bound.linear_program import Column, Duals, Master
from ckptplan.solving.bound.relaxation import BoundData, Floats, Indices, Intervals
from ckptplan.solving.parameters import SOLVER_ERROR


@dataclass(slots=True)
class Costs:
    """Feasible multipliers and what follows from them; times in units of the baseline, bytes in units of the budget.

    Attributes
    ----------
    linear : array (2, stages)
        Price of a byte in each forward and backward step, in the linear bound.
    tau : array (stages,)
        Price of a second of compute in a backward step; below 1 where the link uses it, or launching matters.
    launch : float
        Price of a second of launching.
    options : list of array
        Per stage and option, what does not depend on memory: recompute and moves.
    move_out, move_back : array (stages,)
        Per byte that joins the queues after a stage.
    leave : array (stages,)
        Per byte that leaves behind a stage without a copy out: what it spares in each later forward step.
    constant : float
        Cost of every plan, memory left out.
    """

    linear: Floats
    tau: Floats
    launch: float
    options: list[Floats]
    move_out: Floats
    move_back: Floats
    leave: Floats
    asked: dict[tuple[int, int], float]
    host: float
    constant: float

    @classmethod
    def of(cls, data: BoundData, duals: Duals, *, scale: float = 1.0) -> Costs:
        """Make feasible multipliers from the solver's, which are right only up to its tolerance."""
        c, n = data, data.n
        lanes_price = 1.0 - duals.launch
        constant = duals.launch * (c.launch - 1.0)
        moves, taus, linear = [], [], []
        lanes = ((c.out, c.forward_s, duals.forward), (c.back, c.backward_s, duals.backward))
        for lane, (rate, seconds, memory) in enumerate(lanes):
            p, q = duals.drain[lane], duals.queue[lane]
            over = np.maximum(1.0, (p + q) / lanes_price) if lanes_price else np.inf
            p, q = p / over, q / over
            before = np.concatenate([[0.0], (p + q) / rate])
            price = before[:n] - p / rate
            price[0 if c.most_put[-1] > 0 else slice(None)] = np.inf
            wanted = memory * scale
            # Where the link alone doesn't pay for what must be away, what was put does.
            r = np.maximum(0.0, wanted - price)
            linear.append(wanted)
            # P[k] for k < n costs -(q / rate + r); at the turn everything is away.
            late = np.concatenate([(q / rate + r), [0.0]])
            tail = np.cumsum(late[::-1])[::-1]
            moves.append(before[n] - tail[1:])
            constant -= float(p @ seconds)
            taus.append(lanes_price - p)
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
            cost = m.seconds * taus[1][i] + m.launch * duals.launch
            if fixed[i]:
                cost = cost + np.array([sum(fixed[i].get(s, 0.0) for s in items) for items in m.fixes])
            options.append(cost)
        return cls(
            linear=np.stack(linear),
            tau=taus[1],
            launch=duals.launch,
            options=options,
            move_out=moves[0],
            move_back=moves[1],
            leave=np.cumsum(linear[0]) - linear[0].sum(),
            asked=asked,
            host=host,
            constant=constant,
        )

    def sweep(self, intervals: Intervals, first: Indices, last: Indices) -> Floats:
        """Cost of the time of segments' sweeps and of the recomputes of their last stages."""
        seconds, launch = intervals.sweep_s(first, last)
        return np.asarray(self.tau[last] * np.where(np.isfinite(seconds), seconds, 0.0) + self.launch * launch)

    def move(self, i: int | slice, last: int | slice, on_host: bool) -> Floats:
        """Price of a byte that stage i, or a segment of which it is the first, moves; `last`: its last stage."""
        return np.asarray((self.leave if on_host else self.move_out)[i] + self.move_back[last] + self.host)

    def moving(self, data: BoundData, i: int) -> Floats:
        """Per option of stage i, the least that its moves can cost: any part of them moves."""
        m = data.menus[i]
        prices = [float(self.move(i, i, on_host)) for on_host in (False, True)]
        cost = np.zeros(len(m.codes))
        for on_host, nbytes in m.free.items():
            cost += nbytes * min(0.0, prices[on_host])
        for o, shared in enumerate(m.shared):
            for s in shared:
                cost[o] += data.size[s] * min(0.0, prices[data.on_host[s]] + self.asked.get((i, s), 0.0))
        return cost


class LinearTrees:
    """The cheapest tree of every segment at linear prices; see the module's docstring for the recursion."""

    def __init__(self, intervals: Intervals, costs: Costs) -> None:
        self.intervals, self.costs, self.data = intervals, costs, intervals.data
        c, n, w = self.data, self.data.n, intervals.longest
        lf, lb = costs.linear
        self.back = np.concatenate([[0.0], np.cumsum(lb)])
        self.fore = np.concatenate([[0.0], np.cumsum(lf)])
        self.sweep = np.zeros((w, n))  # G, column: last stage
        self.tree = np.full((w, n), np.inf)  # R, column: first stage
        self.less = np.full((w, n), np.inf)  # R less what is held until later
        # How G goes on: the length - 1 of the segment that the first stage begins, -1 where that is kept.
        self.chosen = np.full((w, n), -1)
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
                self.chosen[i, b] = np.where(inner.min(axis=0) < best, inner.argmin(axis=0), -1)
            last = np.arange(i, n)
            value = costs.sweep(intervals, last - i, last) + self.sweep[i, last]
            self.tree[i, : n - i] = np.where(intervals.possible[i, : n - i], value, np.inf)
            self.less[i, : n - i] = self.tree[i, : n - i] - intervals.held[i, : n - i] * self.back[last + 1]
        self._segments()

    def _segments(self) -> None:
        """The cost of each segment at the top level: tree, forward, what it holds for later steps, moves."""
        c, n, costs, iv = self.data, self.data.n, self.costs, self.intervals
        w = iv.longest
        own = costs.linear[0] * c.segment_forward
        self.segment = np.full((w, n), np.inf)
        running = np.zeros(n)
        for i in range(w):
            k = n - i
            running[:k] += own[i:] + iv.held_at[i, :k] * (self.fore[n] - self.fore[i + 1 :])
            after = iv.held[i, :k] * (self.back[n] - self.back[i + 1 :])
            self.segment[i, :k] = self.tree[i, :k] + running[:k] + after
            for on_host, nbytes in iv.moves.items():
                price = costs.move(slice(k), slice(i, None), on_host)
                self.segment[i, :k] += nbytes[i, :k] * np.minimum(0.0, price)
        self.segment[:1] = np.inf
        for s, later in c.returns.items():
            first = np.arange(rules.latest_first(c.profile.storages[s]) + 1)
            for b in range(c.counted[s], later[-1]):
                a = first[max(0, b - w + 1) :]
                again = next(i for i in later if i > b)
                price = self.fore[n] - self.fore[b + 1] + self.back[n] - self.back[again]
                self.segment[b - a, a] += c.size[s] * price
        tail = self.fore[n] - self.fore[1:] + self.back[n] - self.back[1:]
        lf, lb = costs.linear
        options = [
            costs.options[i] + costs.moving(c, i) + lf[i] * m.forward + lb[i] * m.backward + m.kept * tail[i]
            for i, m in enumerate(c.menus)
        ]
        for cost, m in zip(options, c.menus, strict=True):
            for o, some in enumerate(m.passing):
                cost[o] += sum(nbytes * (self.fore[steps.stop] - self.fore[steps.start]) for steps, nbytes in some)
        self.single = np.array([cost.min() for cost in options])
        self.constant = costs.constant - float(lf @ (c.budget - c.base_forward) + lb @ (c.budget - c.base_backward))

    def path(self) -> float:
        """The cheapest way from the first boundary to the last, constants left out."""
        n, w = self.data.n, self.intervals.longest
        ahead = np.zeros(n + 1)
        for b in range(n):
            best = ahead[b] + self.single[b]
            if w:
                i = np.arange(min(w, b + 1))
                best = min(best, float((ahead[b - i] + self.segment[i, b - i]).min()))
            ahead[b + 1] = best
        return float(ahead[n])

    def missing(self, stage_prices: Floats, longest: int) -> list[tuple[int, int]]:
        """Segments cheaper than the stages they replace: the best from each first and to each last stage."""
        n, w = self.data.n, min(longest, self.intervals.longest)
        if not w:
            return []
        total = np.concatenate([[0.0], np.cumsum(stage_prices)])
        reduced = np.full((w, n), np.inf)
        for i in range(w):
            reduced[i, : n - i] = self.segment[i, : n - i] - (total[i + 1 :] - total[: n - i])
        found = []
        for a, i in enumerate(reduced.argmin(axis=0).tolist()):
            if reduced[i, a] < -SOLVER_ERROR:
                found.append((a, a + i))
        for b in range(n):
            lengths = np.arange(min(w, b + 1))
            values = reduced[lengths, b - lengths]
            at = int(values.argmin())
            if values[at] < -SOLVER_ERROR:
                found.append((b - at, b))
        return sorted(set(found))

    def structure(self, first: int, last: int) -> Segment:
        """The cheapest tree of the segment `first..last`."""
        inner, s = [], first
        while s < last:
            e = int(self.chosen[last - s, last])
            if e >= 0:
                inner.append(self.structure(s, s + e))
            s += max(e, 0) + 1
        return Segment(first, last, tuple(inner))


class MissingColumns:
    """The segments that a master program lacks at its multipliers.

    Early multipliers are far off and ask for long segments, which make the program dense; so short ones come first.
    """

    def __init__(self, intervals: Intervals) -> None:
        self.intervals = intervals
        self.longest = 1 + math.isqrt(intervals.data.n)
        self.seen: set[Segment] = set()

    def add_to(self, master: Master, trees: LinearTrees, duals: Duals) -> bool:
        """Add them to `master`; False where it lacks none."""
        new: list[Segment] = []
        while not new:
            found = [trees.structure(a, b) for a, b in trees.missing(duals.stage, self.longest)]
            new = [tree for tree in found if tree not in self.seen]
            if self.longest >= self.intervals.longest:
                break
            self.longest *= 1 if new else 2
        self.seen.update(new)
        for tree in new:
            master.add(column_of(self.intervals.data, self.intervals, tree))
        return bool(new)


def column_of(data: BoundData, intervals: Intervals, tree: Segment) -> Column:
    """The coefficients of a segment in the master program."""
    c, a, b = data, tree.first, tree.last
    size = b - a + 1
    kept = np.array([intervals.held_at[j - a, a] for j in range(a, b + 1)])
    rows, seconds = np.zeros(size), np.zeros(size)
    launch = 0.0

    def sweep(segment: Segment) -> None:
        nonlocal launch
        s, last = segment.first, segment.last
        takes_s, launches_s = intervals.sweep_s(s, last)
        seconds[last - a] += takes_s
        launch += float(launches_s)
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
    moves = {on_host: float(nbytes[b - a, a]) for on_host, nbytes in intervals.moves.items()}
    returns = [(again, float(c.size[s])) for s, again in intervals.returns(a, b)]
    return Column(tree, kept, c.segment_forward[a : b + 1], rows - before, seconds, launch, moves, returns)
