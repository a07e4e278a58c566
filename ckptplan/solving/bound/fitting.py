"""Options that no plan within the budget has: one look at each step, before any search.

In a step, a plan has at least what cannot go away of the stages before, and what the step's stage adds. The relaxation
(`relaxation.py`) has these as sums, of which every stage's part is least by itself. So an option doesn't fit if, with
all other stages at their least, it makes a step too large: its own, or a later one in which what it doesn't move is
still there. That matters where the budget is tight: there a linear program mixes options of which none fits.

A stage in a segment has its backward in some sweep, as its last stage or kept in it. What is kept is there until then
from the sweep's end on, which is at the earliest the next stage that may be the last of a sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptplan.solving.bound.relaxation import BoundData, Floats, Intervals
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import ROUNDING


def fitting(space: PlanSpace, budget_bytes: int) -> PlanSpace:
    """Return the space without options that don't fit; unchanged if nothing fits, which the search reports later."""
    while True:
        menu = _Least(space, budget_bytes).menu()
        if not all(menu) or menu == [tuple(codes) for codes in space.menu]:
            return space
        space = PlanSpace(space.profile, menu, segments=space.segments, parameters=space.parameters)


@dataclass(frozen=True, slots=True)
class _Ways:
    """The ways of one stage, a number for each: its options, and behind them one for all segments.

    `held` is what stays of it, `forward` and `backward` what it takes in its own steps.
    """

    held: Floats
    forward: Floats
    backward: Floats


class _Least:
    """Lower bounds on the bytes of every step, in units of the budget."""

    def __init__(self, space: PlanSpace, budget_bytes: int) -> None:
        self.space = space
        self.data = data = BoundData(space, budget_bytes, None)
        self.intervals = Intervals(data)
        self.most = data.budget * (1 + ROUNDING)
        n = data.n
        self.ways = [self._ways(i) for i in range(n)]
        self.held = np.array([ways.held.min() for ways in self.ways])
        before = np.cumsum(self.held) - self.held
        self.before = np.array([data.base_forward, data.base_backward]) + before
        needs = [[ways.forward.min() for ways in self.ways], [ways.backward.min() for ways in self.ways]]
        self.steps = self.before + np.array(needs)
        # Per stage, the largest of the steps behind it.
        self.later = np.append(np.maximum.accumulate(self.steps.max(axis=0)[::-1])[::-1], 0.0)[1:]

    def _ways(self, i: int) -> _Ways:
        c, m = self.data, self.data.menus[i]
        moved = m.free[False] + m.free[True] + np.array([c.size[list(shared)].sum() for shared in m.shared])
        held, forward, backward = m.kept - moved, m.forward, m.backward
        if self.intervals.longest and self.space.inside[i]:
            held = np.append(held, self._left_in_segment(i))
            forward = np.append(forward, c.segment_forward[i])
            backward = np.append(backward, min(self._kept(i), self._last(i)))
        return _Ways(held, forward, backward)

    def _left_in_segment(self, i: int) -> float:
        """The fewest bytes that stay of a stage in a segment, wherever that begins, or in a sweep that keeps it."""
        c = self.data
        first = np.arange(max(0, i - self.intervals.longest + 1), i + 1)
        left = self.intervals.held_at[i - first, first]
        for s, made in c.segment_moves[i]:
            left[(first > made) | (made == c.n)] -= c.size[s]
        return min(float(left.min()), float(c.keep_kept[i]))

    def _kept(self, i: int) -> float:
        """Bytes of a stage in its backward step if a sweep has kept it."""
        return float(self.data.keep_kept[i] + self.data.keep_own[i])

    def _last(self, i: int) -> float:
        """Bytes of a stage in its backward step as the last of a sweep."""
        return float("inf") if self.data.again[i] is None else float(self.data.full[i] + self.data.last_own[i])

    def menu(self) -> list[tuple[int, ...]]:
        """Per stage, the options that fit; those it has in segments if it fits in one."""
        found = []
        for i, codes in enumerate(self.space.menu):
            ways = self.ways[i]
            own = np.maximum(self.before[0, i] + ways.forward, self.before[1, i] + ways.backward)
            fits = np.maximum(own, self.later[i] - self.held[i] + ways.held) <= self.most
            inside = self.space.inside[i] if len(fits) > len(codes) and fits[-1] and self._in_sweep(i) else ()
            found.append(tuple(c for c, fit in zip(codes, fits, strict=False) if fit or c in inside))
        return found

    def _in_sweep(self, i: int) -> bool:
        """Whether the backward of a stage fits in a sweep, which has it as its last one or keeps it."""
        if self.before[1, i] + self._last(i) <= self.most:
            return True
        if self.before[1, i] + self._kept(i) > self.most:
            return False
        beside = self.data.keep_kept[i] - self.held[i]
        for k in range(i + 1, self.data.n):
            if not self.space.inside[k] or self.steps[1, k] + beside > self.most:
                return False
            if self.before[1, k] + beside + self._last(k) <= self.most:
                return True
        return False
