"""First plans, and small changes to a plan under its real schedule: options of stages, and where segments lie."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ckptplan.core.chain import Segment
from ckptplan.solving.evaluate import Codes, Evaluator, Segments
from ckptplan.solving.exact_search import PlanSpace

# Sums of the same seconds in another order are the same time.
SAME = 1e-12
_CELLS_PER_BATCH = 1 << 16


def patterns(space: PlanSpace, *, cells: int = 300_000) -> Codes:
    """Starting points: each option alone, one before a stage and another after it, one at every second to fourth stage.

    Parameters
    ----------
    cells : int
        Most rows times stages, about; for longer chains fewer options are combined.
    """
    n = len(space.menu)
    stages = space.profile.stages
    seen = [stages[i].options[code].name for i, codes in enumerate(space.menu) for code in codes]
    usual = ("keep", "recompute", "swap", "recompute+swap")
    names = sorted(set(seen), key=lambda name: (usual.index(name) if name in usual else len(usual), name))
    columns = {name: [_code(space, i, name) for i in range(n)] for name in names}
    rows = [columns[name] for name in names]
    fractions = [n * part // 8 for part in range(1, 8)]
    most = max(2, int((cells / n / 10) ** 0.5))
    for a, b in itertools.permutations(names[:most], 2):
        rows.extend(columns[a][:cut] + columns[b][cut:] for cut in fractions)
        rows.extend([columns[a if i % every == 0 else b][i] for i in range(n)] for every in (2, 3, 4))
    return np.unique(np.array(rows, np.int8), axis=0)


def _code(space: PlanSpace, i: int, name: str) -> int:
    """The code of stage `i` for the option `name`, or of what comes closest."""
    options = space.profile.stages[i].options
    for wanted in (name, name.removesuffix("+swap"), name.partition("-")[0]):
        for code in space.menu[i]:
            if options[code].name == wanted:
                return code
    return 0


def even_segments(space: PlanSpace, length: int) -> tuple[list[int], Segments]:
    """Segments of `length` stages, one after the other, and "recompute" in between."""
    n = len(space.menu)
    codes = [_code(space, i, "recompute") for i in range(n)]
    found: list[Segment] = []
    at = 0
    while at < n:
        ends = space.ends(at, at + 1, min(at + length, n))
        if ends:
            found.append(Segment(at, ends[-1]))
            at = ends[-1]
        at += 1
    return inside(space, codes, tuple(found))


def inside(space: PlanSpace, codes: Sequence[int], segments: Segments) -> tuple[list[int], Segments]:
    """`codes` with what `segments` ask of their stages."""
    fixed = list(codes)
    for segment in segments:
        for i in range(segment.first, segment.last + 1):
            if fixed[i] not in space.inside[i]:
                fixed[i] = 0 if space.profile.stages[i].is_glue else _code(space, i, "recompute")
    return fixed, segments


class LocalSearch:
    """Steps to better plans for one budget; the same steps for the same seed unless the clock cuts them.

    Parameters
    ----------
    evaluator : Evaluator
    space : PlanSpace
    budget_bytes : int
    seed : int
        Of the choice among pairs of changes, where there are too many to try all.
    """

    def __init__(self, evaluator: Evaluator, space: PlanSpace, budget_bytes: int, seed: int = 0) -> None:
        self.evaluator = evaluator
        self.space = space
        self.budget_bytes = budget_bytes
        self.random = random.Random(seed)

    def improve(
        self, codes: Sequence[int], segments: Segments, deadline: float, *, pairs: int = 2000
    ) -> tuple[tuple[int, ...], Segments, float]:
        """The plan reached when no change helps any more, or at `deadline`, and its makespan in seconds.

        Parameters
        ----------
        pairs : int
            Most pairs of changes to try from each plan.
        """
        best, best_s = list(codes), self.evaluator.step_s(codes, self.budget_bytes, segments)
        while time.monotonic() < deadline:
            best, value = self._options(best, segments, best_s, deadline, pairs)
            found = self._segments(best, segments, value, deadline)
            if found is None:
                return tuple(best), segments, value
            best, segments, best_s = found
        return tuple(best), segments, best_s

    def _options(
        self, codes: list[int], segments: Segments, value: float, deadline: float, pairs: int
    ) -> tuple[list[int], float]:
        """Change options with the segments as they are."""
        menu = self.space.menu_in(segments)
        singles = [((i, code),) for i, allowed in enumerate(menu) for code in allowed if len(allowed) > 1]
        batch = max(16, _CELLS_PER_BATCH // len(codes))
        improved = True
        while improved and time.monotonic() < deadline:
            improved = False
            for changes in (singles, self._pairs(codes, menu, pairs)):
                for at in range(0, len(changes), batch):
                    part = changes[at : at + batch]
                    rows = np.tile(np.array(codes, np.int8), (len(part), 1))
                    for position in range(len(part[0])):
                        stages = [change[position][0] for change in part]
                        rows[np.arange(len(part)), stages] = [change[position][1] for change in part]
                    costs = self.evaluator.makespans(rows, self.budget_bytes, segments)
                    row = int(costs.argmin())
                    if costs[row] < value * (1 - SAME):
                        codes, value, improved = rows[row].tolist(), float(costs[row]), True
                    if time.monotonic() > deadline:
                        return codes, value
                if improved:
                    break
        return codes, value

    def _pairs(
        self, codes: Sequence[int], menu: Sequence[Sequence[int]], most: int
    ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Exchanges between stages that differ, then changes of two stages close to each other, as many as allowed."""
        n = len(codes)
        names = [stage.options[code].name for stage, code in zip(self.space.profile.stages, codes, strict=True)]
        found = [
            ((i, b), (j, a))
            for i, j in itertools.combinations(range(n), 2)
            if names[i] != names[j]
            and (b := _code(self.space, i, names[j])) in menu[i]
            and (a := _code(self.space, j, names[i])) in menu[j]
        ] if n <= 400 else []  # fmt: skip
        for apart in range(1, n if n <= 12 else 4):
            for i in range(n - apart):
                found += [
                    ((i, a), (i + apart, b))
                    for a in menu[i]
                    for b in menu[i + apart]
                    if a != codes[i] and b != codes[i + apart]
                ]
        return found if len(found) <= most else self.random.sample(found, most)

    def _segments(
        self, codes: list[int], segments: Segments, value: float, deadline: float
    ) -> tuple[list[int], Segments, float] | None:
        """The first change of a segment that helps."""
        if not self.space.segments:
            return None
        for changed in self._moved(codes, segments):
            if time.monotonic() > deadline:
                return None
            fixed, forest = inside(self.space, codes, changed)
            seconds = self.evaluator.step_s(fixed, self.budget_bytes, forest)
            if seconds < value * (1 - SAME):
                return fixed, forest, seconds
        return None

    def _moved(self, codes: Sequence[int], segments: Segments) -> Iterator[Segments]:
        """Forests one step away: without a segment, longer, shorter, merged, split, nested, or with a new one."""
        n = len(codes)
        for at, segment in enumerate(segments):
            before, after = segments[:at], segments[at + 1 :]
            yield before + after
            low = before[-1].last + 1 if before else 0
            high = after[0].first if after else n
            for first in (segment.first - 1, segment.first + 1):
                yield from self._kept(before, [(first, segment.last, segment.inner)], after, low, high)
            for last in (segment.last - 1, segment.last + 1):
                yield from self._kept(before, [(segment.first, last, segment.inner)], after, low, high)
            if after and after[0].first == segment.last + 1:
                whole = [(segment.first, after[0].last, segment.inner)]
                yield from self._kept(before, whole, after[1:], low, after[1].first if len(after) > 1 else n)
            for cut in range(segment.first + 1, segment.last):
                halves = [(segment.first, cut, segment.inner), (cut + 1, segment.last, segment.inner)]
                yield from self._kept(before, halves, after, low, high)
            if segment.inner:
                yield from self._kept(before, [(segment.first, segment.last, ())], after, low, high)
            for cut in self.space.ends(segment.first, segment.first, segment.last):
                inner = [(segment.first, segment.last, (Segment(segment.first, cut),))]
                yield from self._kept(before, inner, after, low, high)
        taken = {i for segment in segments for i in range(segment.first, segment.last + 1)}
        for first in range(n):
            for last in self.space.ends(first, first + 1, min(n, first + 4)):
                if taken.isdisjoint(range(first, last + 1)):
                    yield tuple(sorted((*segments, Segment(first, last)), key=lambda s: s.first))

    def _kept(
        self,
        before: Segments,
        wanted: Sequence[tuple[int, int, Segments]],
        after: Segments,
        low: int,
        high: int,
    ) -> Iterator[Segments]:
        """The forest with `wanted` in the middle, where such segments may be."""
        middle = []
        for first, last, inner in wanted:
            if first < low or last >= high or last not in self.space.ends(first, first + 1, high):
                return
            middle.append(Segment(first, last, tuple(s for s in inner if first <= s.first and s.last < last)))
        yield (*before, *middle, *after)
