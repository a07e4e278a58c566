"""A bound by a dynamic program over (boundary, bytes tracked), in place of linear prices.

At given multipliers of the links' rows, a step k in which the plan has N[k] bytes (nothing moved) and has put P[k]
costs at least c[k] * (N[k] - budget) where that is positive, with c[k] the price of what must be away, and it is
impossible if N[k] - P[k] > budget. The linear bound charges a price even where a step has room to spare, that is, it
pays a discount for it. Two programs do better:

- tracked: what is held. A step costs c[k] * max(0, N[k] - budget).
- `apart`, tracked: what is held and doesn't move, N - P. No step may exceed the budget. What is held is charged at
  c[k], at most the linear price, without discount for room: where the links give no price, the rows "A <= P" did, and
  these are now heeded. What a stage moves is any part of what it may: groups of near sums of bytes stand for those in
  between, moved at the price of the least of a group and off the device as far as the largest.

Charged rounding. Slots of width w would lose w/2 per stage. Instead, W[k](slot) is the least of V + mu[k] * (z - low)
over all partial plans with z tracked bytes in the slot, V their cost, mu[k] a guess of what a byte costs from here on
(the linear prices). An edge that adds d bytes takes the slot's range to two slots; both get the value, plus mu times
what the slot's lower end was rounded by, up or down. A step's cost may fall by its price times (z - low) within the
slot, so its least value over the slot is taken. In sum at most mu[0] * w is lost, the price of one slot, whatever the
length.

Segments: the recursion of `trees.py` for every slot of what is held before, coarser. Segments too long for
the tables cost what they do at linear prices, which is never more. Segments that aren't in any plan below `limit`, by
the linear bound, are left out: the result is the smaller of the program's and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.segment import Segment
from ckptplan.solving.bound.relaxation import Floats
from ckptplan.solving.bound.trees import Costs, LinearTrees

_Open = tuple[tuple[int, int], ...]
"""Storages that a segment has dropped, each with the stage that holds it again."""
MOST_OPEN = 32
"""Most sets of dropped storages that are told apart at a boundary; further ones lose some, which only relaxes."""
GROUPS = 3
"""Groups of sums of moved bytes between none and all that are told apart."""
MOST_SUMMED = 8
"""Storages of a stage up to which all sums of their bytes are formed: 256."""
COARSE = 8
"""Slots per slot of the segments' tables, whose time grows with the square of their length."""
SLACK = 1e-9
"""Units of the budget by which a step may exceed it for nothing but rounding."""
LEAST_TOP = 1e-6
"""Units of the budget that the slots span at least."""
SHIFT_ROUNDING = 1 + 1e-15
"""A whole number of slots may come out the last bit smaller."""
S_PER_ARC, S_PER_TREE_CELL, S_PER_CELL, WAYS = 4e-4, 2e-8, 2e-8, 30
"""Seconds on one core of 2020 per segment, per slot of the segments' tables, per slot and way of a stage, and ways."""


class _States:
    """Values of one boundary by slot of the bytes tracked, and where each comes from."""

    def __init__(self, slots: int) -> None:
        self.value = np.full(slots, np.inf)
        self.source = np.full(slots, -1, np.int32)
        self.choice = np.full(slots, -1, np.int32)
        self.opened = np.full(slots, -1, np.int32)


def groups_of(sizes: Sequence[float]) -> list[tuple[float, float]]:
    """The sums of all parts of `sizes`, as intervals: none, all, and at most `GROUPS` in between."""
    if not sizes:
        return [(0.0, 0.0)]
    if len(sizes) > MOST_SUMMED:
        whole, least = sum(sizes), min(sizes)
        return [(0.0, 0.0), *pairwise(np.linspace(least, whole - least, GROUPS + 1).tolist()), (whole, whole)]
    sums = [0.0]
    for size in sizes:
        sums = sorted({*sums, *(total + size for total in sums)})
    inside, whole = sums[1:-1], sums[-1]
    each = -(-len(inside) // GROUPS) or 1
    between = [(inside[at], inside[min(at + each, len(inside)) - 1]) for at in range(0, len(inside), each)]
    return [(0.0, 0.0), *between, (whole, whole)]


class HeldDp:
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
        slots: int,
        longest: int,
    ) -> None:
        self.linear, self.chain, self.limit = linear, linear.chain, limit
        self.apart = apart is not None
        self.costs = k = linear.costs if apart is None else apart
        c, n = self.chain, self.chain.n
        self.room = np.stack([c.budget - c.base_forward, c.budget - c.base_backward])
        self.price = np.zeros((2, n)) if apart is None else k.linear
        links = np.isfinite(k.away) if apart is None else np.zeros((2, n), bool)
        self.weight = np.where(links, k.away, 0.0)
        self.hard = np.where(links, c.most_put[:n], 0.0) + SLACK
        self.guide = linear.costs.linear - self.price
        self.price_tail = self._tail(self.price[0] + self.price[1])
        self.mu = self._tail(self.guide[0] + self.guide[1])
        self.back = np.concatenate([[0.0], np.cumsum(self.guide[1])])
        self.price_back = np.concatenate([[0.0], np.cumsum(self.price[1])])
        # The most bytes tracked at a boundary: what options add up to, and what the next step lets in.
        most = np.cumsum([m.kept.max() for m in c.menus])
        let_in = (self.room + self.hard).min(axis=0)
        top = max(float(np.minimum(most[:-1], let_in[1:]).max()) if n > 1 else 0.0, LEAST_TOP)
        self.slots = -(-slots // COARSE) * COARSE
        self.width = top / (self.slots - 1)
        self.low = np.arange(self.slots) * self.width
        self.keys: dict[_Open, int] = {}
        self.ahead, self.behind = linear.path()
        self.fixed = 1.0 + k.constant - float(self.price[0] @ self.room[0] + self.price[1] @ self.room[1])
        # The linear bound of completing a plan, as what is added to the value of a state.
        room = self.guide * self.room
        self.rest = self.behind - self._tail(room[0] + room[1])
        self._arcs(longest)

    @staticmethod
    def _tail(values: Floats) -> Floats:
        return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])

    def _row(self, lane: int, k: int | NDArray[np.int64], over: Floats, width: float) -> Floats:
        """Least of weight * (over + t)+ - price * t over 0 <= t <= width; infinite where even t = 0 is too much.

        Parameters
        ----------
        lane : int
            0: forward; 1: backward.
        k : int or array
            The step, or one per row of `over`.
        """
        cost = self.weight[lane, k] * np.maximum(over, 0.0) + self.guide[lane, k] * np.clip(over, -width, 0.0)
        return np.where(over > self.hard[lane, k], np.inf, cost)

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
        """About how long `run` takes, in seconds."""
        cells = self.slots // COARSE * self.chain.n
        return (
            S_PER_ARC * self.count
            + S_PER_TREE_CELL * self.wide**2 * cells
            + S_PER_CELL * self.slots * self.chain.n * WAYS
        )

    def _trees(self) -> None:
        """The recursion of `LinearTrees` for every slot of what is held before the segment."""
        c, n, iv, w = self.chain, self.chain.n, self.linear.intervals, self.wide
        q = self.slots // COARSE
        width = self.width * COARSE
        low = np.arange(q) * width
        price, own_price = self.price_back, self.price[1]
        sweep = np.full((w, n, q + 2), np.inf)
        self.tree = np.full((w, n, q), np.inf)
        columns = np.arange(q)

        def moved(values: Floats, rows: NDArray[np.int64], add: Floats, charge: Floats) -> Floats:
            """values[rows] at low + add, rounded both ways, the rounding charged."""
            shift = np.floor(add / width * SHIFT_ROUNDING).astype(np.int64)
            part = add - shift * width
            index = np.minimum(columns + shift[:, None], q)
            at = rows[:, None]
            down = values[at, index] + (charge * part)[:, None]
            up = values[at, index + 1] + (charge * (part - width))[:, None]
            least: Floats = np.minimum(down, up)
            return least

        for i in range(w):
            b = np.arange(i, n)
            s = b - i
            if i == 0:
                own = c.full + c.last_own
                value = self._row(1, b[:, None], low + (own - self.room[1])[:, None], width)
                value += (own_price * own)[:, None]
            else:
                own = c.keep_kept[s] + c.keep_own[s]
                value = self._row(1, s[:, None], low + (own - self.room[1, s])[:, None], width)
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
            seconds = self.costs.sweep(iv, s, b)
            self.tree[i, s] = np.where(iv.possible[i, s][:, None], value + seconds[:, None], np.inf)
        self.fore = np.zeros((w, n, q))
        running = np.zeros((n, q))
        for i in range(w):
            s = np.arange(n - i)
            at = s + i
            held = iv.still - iv.gone if self.apart else iv.held
            before = held[i - 1, s] if i else np.zeros(n)
            own = before + c.segment_forward[at] - self.room[0, at]
            running = running[: n - i] + self._row(0, at[:, None], low + own[:, None], width)
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
            self.price[0][rows] @ self.chain.segment_forward[rows]
            + iv.held_at[at - a, a] @ (self.price[0].sum() - np.cumsum(self.price[0])[rows])
            + held * (self.price_back[n] - self.price_back[b + 1])
        )
        for s, again in iv.returns(a, b):
            price = self.price[0][b + 1 :].sum() + self.price_back[n] - self.price_back[again]
            priced += float(self.chain.size[s] * price)
        if i < self.wide:
            offset = slope * (self.low - np.repeat(self.low[::COARSE], COARSE))
            found: Floats = np.repeat(self.tree[i, a] + self.fore[i, a], COARSE) + offset + priced
            return found
        # Too long for the tables: tracked bytes at the linear bound's prices too.
        constant = -float(self.guide[0, rows] @ self.room[0, rows] + self.guide[1, rows] @ self.room[1, rows])
        guide = self.guide[0]
        inside = float(
            guide[rows] @ self.chain.segment_forward[rows]
            + iv.held_at[at - a, a] @ (guide[: b + 1].sum() - np.cumsum(guide)[rows])
        )
        if self.apart:
            inside -= float((iv.held[i, a] - iv.still[i, a] + iv.gone[i, a]) * guide[rows].sum())
        cost: Floats = lin.tree[i, a] + inside + constant + slope * self.low + priced
        return cost

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
        lf, lb = self.price[0], self.price[1]
        priced = k.options[i] + lf[i] * m.forward + lb[i] * m.backward + m.kept * self.price_tail[i + 1]
        if not self.apart:
            priced = priced + k.moving(c, i)
            return [
                (o, float(priced[o]), float(m.forward[o]), float(m.backward[o]), float(m.kept[o]))
                for o in range(len(m.codes))
            ]
        out = []
        price = k.move(i)
        for o in range(len(m.codes)):
            unsure = [self._item(s, k.move(i, s)) for s in m.unsure[o]]
            unsure.sort(reverse=True)
            ways = [
                (cost + min(least * price, most * price), kept - most)
                for least, most in groups_of(m.sure[o])
                for cost, kept in self._subsets(unsure, float(m.still[o]))
            ]
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
                        over_f = low + (forward + besides - self.room[0, i])
                        over_b = low + (backward - self.room[1, i])
                        done[o] = here + self._row(0, i, over_f, width) + self._row(1, i, over_b, width)
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
        shift = math.floor(add / self.width * SHIFT_ROUNDING)
        part = add - shift * self.width
        for up, charge in ((0, part), (1, part - self.width)):
            if up and part <= 0:
                continue
            begin, skip = source[2] + shift + up, 0
            if begin < 0:
                # Less than nothing can only come of moves counted twice; nothing is held then.
                begin, skip = 0, min(-begin, len(new))
                lowest = int(new[:skip].argmin())
                least = new[lowest] + self.mu[to] * (charge - self.width)
                if least < state.value[0]:
                    state.value[0], state.source[0], state.choice[0] = least, source[2] + lowest, choice
                    state.opened[0] = key
            size = min(len(new) - skip, self.slots - begin)
            if size <= 0:
                continue
            moved = new[skip : skip + size] + self.mu[to] * charge
            target = state.value[begin : begin + size]
            better = np.flatnonzero(moved < target)
            target[better] = moved[better]
            state.source[begin + better] = source[2] + skip + better
            state.choice[begin + better] = choice
            state.opened[begin + better] = key

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
