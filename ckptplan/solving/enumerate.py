"""Evaluation of every plan: exact for any menu and any segments, and short enough to be read as its own proof.

Plans are looked at forest by forest (a forest: the segments of one plan), in the order of the time that the forest
costs at least. A forest, or a decision vector in it, whose compute time alone is no shorter than the best step found
can't win: transfers only add to it. For the rest the lazy schedule is a plan, and links as fluids are a bound. Where
the best step lies between the two, all that may move and all orders are tried (`points.py`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from ckptplan.core import rules
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S
from ckptplan.core.segment import Segment
from ckptplan.solving.chain import Chain
from ckptplan.solving.cost import Codes, Evaluator, Menu, Schedule, Segments
from ckptplan.solving.parameters import DEFAULT, Parameters


class PlanSpace:
    """The decision vectors and segments that a search may use.

    Parameters
    ----------
    menu : sequence of sequence of int
        Codes per stage.
    segments : bool
        Whether stages may be recomputed together.
    parameters : Parameters, optional
        Numbers that searches of this space go by.
    """

    def __init__(
        self, profile: Profile, menu: Menu, *, segments: bool = True, parameters: Parameters = DEFAULT
    ) -> None:
        self.profile = profile
        self.parameters = parameters
        self.menu = menu
        self.segments = segments
        n = len(menu)
        self.inside: list[tuple[int, ...]] = [inside_codes(profile, menu, i) for i in range(n)]
        """Per stage, the codes it may have in a segment; none where it can't be in one."""
        self._inside_from: dict[tuple[int, int], tuple[int, ...]] = {}
        # Per stage, the first one from there on that can't be in a segment with it.
        self._until = [n] * (n + 1)
        for i in reversed(range(n)):
            self._until[i] = self._until[i + 1] if self.inside[i] else i
        # Per stage, whether a segment, or an inner one, may begin or end with it.
        self._begins = [
            segments and bool(self.inside[i]) and not stage.is_glue for i, stage in enumerate(profile.stages)
        ]

    @cached_property
    def chain(self) -> Chain:
        """The profile's bytes and their possible holders."""
        return Chain(self.profile)

    @property
    def moves(self) -> bool:
        """Whether any option moves something."""
        return any(
            stage.options[code].moves
            for stage, codes in zip(self.profile.stages, self.menu, strict=True)
            for code in codes
        )

    def recompute(self, i: int) -> int:
        """The code of "recompute" for stage `i`, which may be in a segment; of "keep" for glue."""
        stage = self.profile.stages[i]
        return 0 if stage.is_glue else next(c for c in self.inside[i] if stage.options[c].name == "recompute")

    def ends(self, first: int, least: int, limit: int) -> list[int]:
        """Return the stages within `[least, limit)` at which a segment from `first` on may end."""
        if not self._begins[first]:
            return []
        return [last for last in range(max(first, least), min(limit, self._until[first])) if self._begins[last]]

    def count(self, most: int, most_forests: int) -> int:
        """Return the number of plans, or some number above `most` for more plans or too many ways to choose segments.

        Parameters
        ----------
        most_forests : int
            Each way to choose segments costs about a millisecond, however few plans it has.
        """
        n = len(self.menu)
        single = math.prod(len(codes) for codes in self.menu)
        if single > most:
            return single

        @cache
        def sweeps(first: int, limit: int) -> int:
            """Ways to fill `[first, limit)` of a sweep."""
            if first == limit:
                return 1
            return sweeps(first + 1, limit) + sum(
                sweeps(first, last) * sweeps(last + 1, limit) for last in self.ends(first, first, limit)
            )

        plans, forests = [1] * (n + 1), [1] * (n + 1)
        for first in reversed(range(n)):
            plans[first] = len(self.menu[first]) * plans[first + 1]
            forests[first] = forests[first + 1]
            for last in self.ends(first, first + 1, n):
                codes = math.prod(len(self.inside_from(i, first)) for i in range(first, last + 1))
                plans[first] += codes * sweeps(first, last) * plans[last + 1]
                forests[first] += sweeps(first, last) * forests[last + 1]
            if plans[first] > most or forests[first] > most_forests:
                return max(plans[first], most + 1)
        return plans[0]

    def forests(self) -> list[Segments]:
        """Return every way to choose segments, those that cost least time first."""

        @cache
        def fill(first: int, limit: int, shortest: int) -> tuple[Segments, ...]:
            if first >= limit:
                return ((),)
            found = list(fill(first + 1, limit, shortest))
            for last in self.ends(first, first + shortest, limit):
                for inner in fill(first, last, 0):
                    segment = Segment(first, last, inner)
                    found.extend((segment, *rest) for rest in fill(last + 1, limit, shortest))
            return tuple(found)

        return sorted(fill(0, len(self.menu), 1), key=self.least_extra_s)

    def least_extra_s(self, forest: Segments) -> float:
        """Seconds of the sweeps of `forest`, and of recomputing the stages they end with."""
        stages = self.profile.stages
        total = 0.0
        for segment in forest:
            total += sum(stage.rerun_s for stage in stages[segment.first : segment.last])
            again = stages[segment.last].recompute
            assert again is not None
            total += again.added_s + self.least_extra_s(segment.inner)
        return total

    def menu_in(self, forest: Segments) -> list[Sequence[int]]:
        """Codes per stage beside and in the segments of `forest`."""
        menu = list(self.menu)
        for segment in forest:
            for i in range(segment.first, segment.last + 1):
                menu[i] = self.inside_from(i, segment.first)
        return menu

    def inside_from(self, i: int, first: int) -> tuple[int, ...]:
        """The codes of stage `i` in a segment that begins with stage `first`, but for those that move nothing there."""
        found = self._inside_from.get((i, first))
        if found is None:
            stage, storages = self.profile.stages[i], self.profile.storages
            again = stage.recompute
            made = {s for s in stage.linked if first <= rules.latest_first(storages[s])}
            found = self._inside_from[i, first] = tuple(
                code
                for code in self.inside[i]
                if again is None
                or not (option := stage.options[code]).moves
                or not made.issuperset(option.moved)
                or option.forward_bytes < again.forward_bytes
            )
        return found


def inside_codes(profile: Profile, menu: Menu, i: int) -> tuple[int, ...]:
    """The codes of `menu` that stage `i` may have in a segment; none where it can't be in one."""
    stage = profile.stages[i]
    if stage.is_glue:
        return (0,)
    found = tuple(c for c in menu[i] if stage.options[c].name in ("recompute", "recompute+swap"))
    return found if any(stage.options[c].name == "recompute" for c in found) else ()


def vectors(menu: Menu, cells: int) -> Iterator[Codes]:
    """Yield all decision vectors in chunks of at most `cells` codes, the last stage changing fastest."""
    total, rows = math.prod(len(codes) for codes in menu), max(1, cells // len(menu))
    for start in range(0, total, rows):
        index = np.arange(start, min(start + rows, total), dtype=np.int64)
        block = np.empty((len(index), len(menu)), np.int8)
        for i in reversed(range(len(menu))):
            index, digit = np.divmod(index, len(menu[i]))
            block[:, i] = np.array(menu[i], np.int8)[digit]
        yield block


def fastest_of_all(
    evaluator: Evaluator,
    space: PlanSpace,
    budget_bytes: int,
    deadline: float,
    *,
    below_s: float = math.inf,
    on_found: Callable[[Schedule], None],
) -> bool:
    """Hand every plan that fits and is faster than `below_s` and all before to `on_found`.

    Returns
    -------
    bool
        Whether all plans were seen before `deadline` (by `time.monotonic`): the last one found is the fastest.
    """
    best_s = below_s
    fastest_s = space.profile.fastest_compute_s
    complete = True
    refined, most_refined = 0, space.parameters.least_width

    def take(found: Schedule | None) -> None:
        nonlocal best_s
        if found is not None and found.step_s < best_s * (1 - EQUAL_S):
            best_s = found.step_s
            on_found(found)

    if time.monotonic() > deadline:  # to list the forests takes seconds where there are many
        return False
    for forest in space.forests():
        if fastest_s + space.least_extra_s(forest) >= best_s * (1 - EQUAL_S):
            break
        for block in vectors(space.menu_in(forest), space.parameters.cells):
            if time.monotonic() > deadline:
                return False
            block = block[evaluator.compute_s(block, forest) < best_s * (1 - EQUAL_S)]
            if len(block) == 0:
                continue
            cost = evaluator.makespans(block, budget_bytes, forest)
            row = int(cost.argmin())
            if cost[row] < best_s * (1 - EQUAL_S):
                take(evaluator.schedule(block[row].tolist(), budget_bytes, forest))
            # Once some choice has too many parts for all to be tried, there is no proof here.
            least = np.full(len(block), np.inf)
            if complete or refined < most_refined:
                least = evaluator.least_s(block, budget_bytes, forest)
            for row in np.argsort(least, kind="stable").tolist():
                if least[row] >= best_s * (1 - EQUAL_S):
                    break
                if time.monotonic() > deadline:
                    return False
                if cost[row] <= least[row] * (1 + EQUAL_S):
                    continue
                codes = block[row].tolist()
                search = evaluator.search(codes, budget_bytes, forest)
                moves = search.fastest(best_s, deadline)
                complete = complete and search.complete
                if moves is None and not search.complete:
                    refined += 1
                    if refined > most_refined:
                        break
                    lazy = evaluator.schedule(codes, budget_bytes, forest)
                    take(None if lazy is None else evaluator.improved(lazy, budget_bytes, deadline))
                elif moves is not None:
                    take(evaluator.with_moves(codes, forest, moves))
    return complete


def smallest_of_all(
    evaluator: Evaluator, space: PlanSpace, deadline: float
) -> tuple[NDArray[np.int8], Segments, int, bool]:
    """The plan with the smallest peak, that peak in bytes, and whether all plans were seen before `deadline`."""
    best, best_bytes = np.zeros(len(space.menu), np.int8), sys.maxsize
    best_forest: Segments = ()
    complete = True
    for forest in space.forests():
        if best_bytes < sys.maxsize and time.monotonic() > deadline:
            return best, best_forest, best_bytes, False
        for block in vectors(space.menu_in(forest), space.parameters.cells):
            peaks = evaluator.smallest_peaks(block, forest)
            row = int(peaks.argmin())
            if peaks[row] < best_bytes:
                best, best_forest, best_bytes = block[row].copy(), forest, int(peaks[row])
            if evaluator.room.host_bytes is None:
                continue
            # Beside the prefix of what moves that the limit has room for, other parts of it.
            least = evaluator.least_bytes(block, forest)
            for row in np.argsort(least, kind="stable").tolist():
                if least[row] >= best_bytes:
                    break
                if time.monotonic() > deadline:
                    return best, best_forest, best_bytes, False
                search = evaluator.search(block[row].tolist(), best_bytes, forest)
                found = search.least_bytes(best_bytes)
                complete = complete and search.complete
                if found < best_bytes:
                    best, best_forest, best_bytes = block[row].copy(), forest, found
    return best, best_forest, best_bytes, complete
