"""First plans, and small changes to a plan under its real schedule: options of stages, and where segments lie."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.option import DISCARD
from ckptplan.core.schedule import EQUAL_S
from ckptplan.core.segment import Segment
from ckptplan.core.spread import evenly, fractions
from ckptplan.solving.cost import KEEP, Change, Codes, Evaluator, Segments, changed
from ckptplan.solving.enumerate import PlanSpace

_Plan = tuple[list[int], Segments, float]
OnBetter = Callable[[Sequence[int], Segments], None]
"""Called with option codes and segments."""


def patterns(space: PlanSpace) -> Codes:
    """Starting points: each option alone, one before a stage and another after it, one at every second, third, ...

    In longer chains fewer options are combined. Then fractions of keep, swap and recompute spread evenly, as the rule
    "uniform" has them (`core/spread.py`), so that no search ends with less than that rule.
    """
    n, parts = len(space.menu), max(1, space.parameters.window)
    stages = space.profile.stages
    seen = [stages[i].options[code].name for i, codes in enumerate(space.menu) for code in codes]
    usual = ("keep", "recompute", "swap", "recompute+swap")
    names = sorted(set(seen), key=lambda name: (usual.index(name) if name in usual else len(usual), name))
    columns = {name: [_code(space, i, name) for i in range(n)] for name in names}
    rows = [columns[name] for name in names]
    cuts, steps = [n * part // parts for part in range(1, parts)], range(2, parts + 1)
    most = math.isqrt(space.parameters.cells // max(1, n * (len(cuts) + len(steps))))
    for a, b in itertools.permutations(names[: max(2, most)], 2):
        rows.extend(columns[a][:cut] + columns[b][cut:] for cut in cuts)
        rows.extend([columns[a if i % every == 0 else b][i] for i in range(n)] for every in steps)
    return np.unique(np.concatenate([np.array(rows, np.int8), _even_fractions(space)]), axis=0)


def _even_fractions(space: PlanSpace) -> Codes:
    """Fractions of keep, swap and recompute, and of keep, swap and recompute with swapped inputs."""
    stages = space.profile.stages
    counted = [i for i, stage in enumerate(stages) if len(stage.options) > 1]
    actions = evenly(fractions(), len(counted))
    parts = []
    for again in ("recompute", "recompute+swap"):
        found = np.full((len(actions), len(stages)), KEEP, np.int8)
        for column, i in enumerate(counted):
            codes = np.array([KEEP, _code(space, i, "swap"), _code(space, i, again)], np.int8)
            found[:, i] = codes[actions[:, column]]
        parts.append(found)
    return np.concatenate(parts)


def _code(space: PlanSpace, i: int, name: str) -> int:
    """Return the code of stage `i` for the option `name`, or for the closest one that it has."""
    options = space.profile.stages[i].options
    instead = DISCARD if name.startswith("recompute") else name
    for wanted in (name, name.partition("+")[0], name.partition("-")[0], instead):
        for code in space.menu[i]:
            if options[code].name == wanted:
                return code
    return 0


def even_segments(space: PlanSpace) -> Iterator[tuple[list[int], Segments]]:
    """Segments of 2, 4, 8, ... stages, one after the other, and "recompute" in between."""
    n = len(space.menu)
    for power in range(1, n.bit_length()):
        codes = [_code(space, i, "recompute") for i in range(n)]
        found: list[Segment] = []
        at = 0
        while at < n:
            ends = space.ends(at, at + 1, min(at + (1 << power), n))
            if ends:
                found.append(Segment(at, ends[-1]))
                at = ends[-1]
            at += 1
        yield suited(space, codes, tuple(found))


def suited(space: PlanSpace, codes: Sequence[int], segments: Segments) -> tuple[list[int], Segments]:
    """`codes` with options that stages in `segments` may have, and `segments`."""
    fixed = list(codes)
    for segment in segments:
        for i in range(segment.first, segment.last + 1):
            if fixed[i] not in space.inside[i]:
                fixed[i] = space.recompute(i)
    return fixed, segments


class LocalSearch:
    """Steps to better plans for one budget; the same steps for the same seed unless the clock cuts them.

    Parameters
    ----------
    evaluator : Evaluator
    space : PlanSpace
    budget_bytes : int
    seed : int
        Seed of the choice among changes, where there are too many to try all.
    on_better : callable, optional
        Gets each plan that is better than all before it, on the way to those that `improve` and `search` return.

    Attributes
    ----------
    stop : callable
        Called now and then; if it returns True, the search ends as at its deadline.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        space: PlanSpace,
        budget_bytes: int,
        seed: int = 0,
        on_better: OnBetter | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.space = space
        self.parameters = space.parameters
        self.budget_bytes = budget_bytes
        self.random = random.Random(seed)
        self._on_better = on_better
        self.stop: Callable[[], bool] = lambda: False
        self._least = math.inf

    def over(self, deadline: float) -> bool:
        """Whether the search is to end."""
        return time.monotonic() >= deadline or self.stop()

    def cost(self, codes: Sequence[int], segments: Segments) -> float:
        """The objective: the makespan in seconds, infinite where the plan doesn't fit."""
        return self.evaluator.step_s(codes, self.budget_bytes, segments)

    def costs(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """`cost` of many."""
        return self.evaluator.makespans(rows, self.budget_bytes, segments)

    def least(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """A lower bound of `costs` that takes less time to compute."""
        return self.evaluator.compute_s(rows, segments)

    def improve(
        self, codes: Sequence[int], segments: Segments, deadline: float
    ) -> tuple[tuple[int, ...], Segments, float]:
        """The plan reached when no change helps any more, or at `deadline`, and its makespan in seconds."""
        best, best_s = list(codes), self.cost(codes, segments)
        while not self.over(deadline):
            best, value = self._options(best, segments, best_s, deadline, self.parameters.tried)
            found = self._segments(best, segments, value, deadline)
            if found is None:
                return tuple(best), segments, value
            best, segments, best_s = found
        return tuple(best), segments, best_s

    def search(
        self, codes: Sequence[int], segments: Segments, deadline: float
    ) -> Iterator[tuple[tuple[int, ...], Segments, float]]:
        """Improve a plan until nothing has helped for `Parameters.rounds` rounds, or until `deadline`.

        Windows of stages are solved exactly, and other segments are tried with options to suit; then the same from
        plans changed at random, which may be somewhat worse.
        """
        near, rounds = self.parameters.near, self.parameters.rounds
        cycle = max(1, rounds // 2)
        best = self._settle((list(codes), segments, self.cost(codes, segments)), deadline)
        best_s = best[2]
        yield tuple(best[0]), best[1], best_s
        at, idle = best, 0
        while idle < rounds and not self.over(deadline):
            idle += 1
            found = self._kicked(at, deadline)
            if found is None:
                continue
            if found[2] < at[2] * (1 - EQUAL_S):
                found = self._settle(found, deadline) if found[2] < best_s * (1 + near) else found
            if found[2] < best_s * (1 - EQUAL_S):
                best, best_s, idle = found, found[2], 0
                yield tuple(best[0]), best[1], best_s
            # With time, worse plans are continued from less and less often.
            allowed = near * (1 - (idle % cycle) / cycle)
            if found[2] <= best_s * (1 + allowed):
                at = found
            if idle % cycle == 0:
                at = best

    def _settle(self, plan: _Plan, deadline: float) -> _Plan:
        """Change windows of stages and segments until neither makes the plan better."""
        codes, segments, value = plan
        while not self.over(deadline):
            codes, value = self._options(codes, segments, value, deadline, 0)
            codes, value = self._windows(codes, segments, value, deadline)
            found = self._forests(codes, segments, value, deadline)
            if found is not None:
                codes, segments, value = found
                continue
            before = value
            codes, value = self._options(codes, segments, value, deadline, self.parameters.tried)
            if value >= before * (1 - EQUAL_S):
                break
        return codes, segments, value

    def _kicked(self, plan: _Plan, deadline: float) -> _Plan | None:
        """Change options or segments at random and solve the stages around them anew; None where nothing fits."""
        codes, segments, value = plan
        codes = list(codes)
        if self.space.segments and self.random.choice((True, False)):
            changes = list(self._moved(codes, segments))
            if changes:
                codes, segments = suited(self.space, codes, self.random.choice(changes))
        menu = self.space.menu_in(segments)
        free = [i for i, allowed in enumerate(menu) if len(allowed) > 1]
        if not free:
            return None
        at = self.random.choice(free)
        codes[at] = self.random.choice(menu[at])
        value = self.cost(codes, segments)
        codes, value = self._all_of(codes, segments, value, menu, self._draw(free, menu), deadline)
        if value == math.inf:
            return None
        codes, value = self._options(codes, segments, value, deadline, 0)
        return codes, segments, value

    def _draw(self, free: Sequence[int], menu: Sequence[Sequence[int]]) -> list[int]:
        """Stages to solve together: some close to each other, the others anywhere."""
        at, reach = self.random.randrange(len(free)), self.parameters.window
        near = free[max(0, at - reach) : at + reach + 1]
        rest = [self.random.sample(stages, len(stages)) for stages in (near, free)]
        chosen: list[int] = []
        size = 1
        while any(rest):
            i = self.random.choice([stages for stages in rest if stages]).pop()
            if i in chosen:
                continue
            size *= len(menu[i])
            if size > self.parameters.tried:
                break
            chosen.append(i)
        return chosen

    def _windows(self, codes: list[int], segments: Segments, value: float, deadline: float) -> tuple[list[int], float]:
        """All options of as many neighbouring stages as there is room for, window by window."""
        menu = self.space.menu_in(segments)
        free = [i for i, allowed in enumerate(menu) if len(allowed) > 1]
        at = 0
        while at < len(free) and not self.over(deadline):
            end, size = at, 1
            while end < len(free) and (end == at or size * len(menu[free[end]]) <= self.parameters.tried):
                size *= len(menu[free[end]])
                end += 1
            codes, value = self._all_of(codes, segments, value, menu, free[at:end], deadline)
            at += max(1, (end - at) // 2)
        return codes, value

    def _all_of(
        self,
        codes: list[int],
        segments: Segments,
        value: float,
        menu: Sequence[Sequence[int]],
        chosen: Sequence[int],
        deadline: float,
    ) -> tuple[list[int], float]:
        """The best of all combinations of the options of these stages, or `codes` where none is better."""
        combined = np.array(list(itertools.product(*(menu[i] for i in chosen))), np.int8)
        for part in self.evaluator.batches(combined):
            rows = np.tile(np.array(codes, np.int8), (len(part), 1))
            rows[:, list(chosen)] = part
            rows = rows[self.least(rows, segments) < value * (1 - EQUAL_S)]
            if len(rows):
                costs = self.costs(rows, segments)
                row = int(costs.argmin())
                if costs[row] < value * (1 - EQUAL_S):
                    codes, value = rows[row].tolist(), float(costs[row])
            if self.over(deadline):
                break
        return codes, value

    def _forests(
        self, codes: list[int], segments: Segments, value: float, deadline: float
    ) -> tuple[list[int], Segments, float] | None:
        """Other segments, with options changed one by one to suit them: a better plan, None where there is none.

        A new segment takes time and gives room; only the options changed with it make it pay.
        """
        if not self.space.segments:
            return None
        near_s = value * (1 + self.parameters.near)
        promising: list[tuple[float, int, list[int], Segments]] = []
        for number, moved in enumerate(self._moved(codes, segments)):
            if self.over(deadline):
                return None
            fixed, forest = suited(self.space, codes, moved)
            menu = self.space.menu_in(forest)
            singles = [((i, code),) for i, allowed in enumerate(menu) for code in allowed if code != fixed[i]]
            rows = changed(fixed, [(), *singles])
            rows = rows[self.least(rows, forest) < near_s]
            if len(rows) == 0:
                continue
            costs = self.costs(rows, forest)
            row = int(costs.argmin())
            if costs[row] < value * (1 - EQUAL_S):
                return rows[row].tolist(), forest, float(costs[row])
            if costs[row] < near_s:
                promising.append((float(costs[row]), number, rows[row].tolist(), forest))
        for cost, _, row_codes, forest in sorted(promising)[: self.parameters.window]:
            found, cost = self._options(row_codes, forest, cost, deadline, 0)
            if cost < value * (1 - EQUAL_S):
                return found, forest, cost
        return None

    def _options(
        self, codes: list[int], segments: Segments, value: float, deadline: float, pairs: int
    ) -> tuple[list[int], float]:
        """Change options, keeping the segments."""
        menu = self.space.menu_in(segments)
        singles = [((i, code),) for i, allowed in enumerate(menu) for code in allowed if len(allowed) > 1]
        improved = True
        while improved and not self.over(deadline):
            improved = False
            for changes in (singles, self._pairs(codes, menu, pairs) if pairs else []):
                found = self._best_of(codes, segments, value, changes, deadline)
                if found is not None:
                    codes, value = found
                    improved = True
                    if self._on_better is not None and value < self._least:
                        self._least = value
                        self._on_better(codes, segments)
                    break
        return codes, value

    def _best_of(
        self, codes: list[int], segments: Segments, value: float, changes: Sequence[Change], deadline: float
    ) -> tuple[list[int], float] | None:
        """The best of these changes, or as many of the best together as help; None where none does."""
        helping: list[tuple[float, Change]] = []
        for part in self.evaluator.batches(changes):
            rows = changed(codes, part)
            worth = np.flatnonzero(self.least(rows, segments) < value * (1 - EQUAL_S))
            if len(worth):
                costs = self.costs(rows[worth], segments)
                better = np.flatnonzero(costs < value * (1 - EQUAL_S))
                helping += [(float(costs[i]), part[int(worth[i])]) for i in better]
            if self.over(deadline):
                break
        if not helping:
            return None
        helping.sort()
        together = list(codes)
        touched: set[int] = set()
        trials, count = [], 0
        for _, change in helping:
            if touched.isdisjoint(i for i, _ in change):
                touched.update(i for i, _ in change)
                for i, code in change:
                    together[i] = code
                count += 1
                if count & (count - 1) == 0:
                    trials.append(list(together))
        costs = self.costs(np.array(trials, np.int8), segments)
        best = int(costs.argmin())
        return trials[best], float(costs[best])

    def _pairs(self, codes: Sequence[int], menu: Sequence[Sequence[int]], most: int) -> list[Change]:
        """Exchanges between stages that differ, then changes of two stages close to each other, as many as allowed."""
        n = len(codes)
        names = [stage.options[code].name for stage, code in zip(self.space.profile.stages, codes, strict=True)]
        found: list[Change] = [
            ((i, b), (j, a))
            for i, j in itertools.combinations(range(n), 2)
            if names[i] != names[j]
            and (b := _code(self.space, i, names[j])) in menu[i]
            and (a := _code(self.space, j, names[i])) in menu[j]
        ] if n <= self.parameters.long_chain else []  # fmt: skip
        for apart in range(1, min(n, self.parameters.window + 1)):
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
        for moved in self._moved(codes, segments):
            if self.over(deadline):
                return None
            fixed, forest = suited(self.space, codes, moved)
            seconds = self.cost(fixed, forest)
            if seconds < value * (1 - EQUAL_S):
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
        longest = max(2, self.parameters.window // 2)  # longer ones come of these, step by step
        for first in range(n):
            for last in self.space.ends(first, first + 1, min(n, first + longest)):
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


class PeakSearch(LocalSearch):
    """The same steps towards a smaller peak; among equal peaks, towards fewer steps that reach it."""

    def __init__(self, evaluator: Evaluator, space: PlanSpace, seed: int = 0) -> None:
        super().__init__(evaluator, space, 0, seed)

    def cost(self, codes: Sequence[int], segments: Segments) -> float:
        """Peak in bytes, and as a fraction of one how many steps reach it."""
        return float(self.costs(np.array([codes], np.int8), segments)[0])

    def costs(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """`cost` of many."""
        return self.evaluator.by_batch(lambda part: self._peaks(part, segments), rows)

    def _peaks(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        tightest = self.evaluator.tightest(rows, segments)
        needs = np.concatenate([tightest.forward, tightest.backward], axis=1)
        peaks = np.maximum(needs.max(axis=1), self.evaluator.profile.update_peak_bytes)
        return np.asarray(peaks + (needs >= peaks[:, None]).sum(axis=1) / (2 * needs.shape[1]))

    def least(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """Return the peaks themselves: no bound on them takes less time."""
        return np.zeros(len(rows))


class FluidSearch(LocalSearch):
    """The same steps with links as fluids (`Evaluator.least_s`), for plans that move a part of what their options may.

    The lazy schedule moves all of what a stage may move: where that is a large boundary beside small weights, a plan
    that moves the weights alone looks as slow as one that moves both.
    """

    def cost(self, codes: Sequence[int], segments: Segments) -> float:
        """Seconds that no transfers of this plan go below."""
        return float(self.costs(np.array([codes], np.int8), segments)[0])

    def costs(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """`cost` of many."""
        return self.evaluator.least_s(rows, self.budget_bytes, segments)


class PartSearch(LocalSearch):
    """The same steps, one by one, for plans that move as little as they can (`MovesSearch.fewest`)."""

    deadline = math.inf

    def improve(
        self, codes: Sequence[int], segments: Segments, deadline: float
    ) -> tuple[tuple[int, ...], Segments, float]:
        """As of a `LocalSearch`."""
        self.deadline = deadline
        return super().improve(codes, segments, deadline)

    def cost(self, codes: Sequence[int], segments: Segments) -> float:
        """Seconds with as few bytes moved as fit, infinite where the plan doesn't."""
        found = self.evaluator.search(codes, self.budget_bytes, segments).fewest()
        return math.inf if found is None else found.seconds

    def costs(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """`cost` of many."""
        return np.array([math.inf if self.over(self.deadline) else self.cost(row.tolist(), segments) for row in rows])

    def least(self, rows: Codes, segments: Segments) -> NDArray[np.float64]:
        """Return lower bounds on the seconds of any transfers of each plan."""
        return self.evaluator.least_s(rows, self.budget_bytes, segments)

    def _pairs(self, codes: Sequence[int], menu: Sequence[Sequence[int]], most: int) -> list[Change]:
        """Return no pairs: there are too many."""
        return []
