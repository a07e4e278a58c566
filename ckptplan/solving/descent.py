"""Changes of one stage or one segment, each under its own lazy schedule, until none makes a plan better.

The local search compares many plans at once by their options as they are chosen. `evaluate` also puts a keep in place
of a swap that moves nothing, and with it a change may be worth more. So the plan that is handed out is compared with
its neighbours once more, by the schedules that `ckptplan.explain` shows of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ckptplan.core.schedule import EQUAL_S
from ckptplan.solving.cost import KEEP, Codes, Evaluator, Schedule, Segments, changed
from ckptplan.solving.enumerate import PlanSpace

_Neighbour = tuple[float, tuple[int, ...], Segments]
"""Seconds of a plan as its options are chosen, option codes and segments."""


def complexity(schedule: Schedule) -> tuple[int, int]:
    """Bytes moved, then stages not kept: of two plans that are as good, the one with less is simpler."""
    return schedule.host_bytes + schedule.disk_bytes, len(schedule.codes) - schedule.codes.count(KEEP)


@dataclass(frozen=True, slots=True)
class Descent:
    """Steps from a schedule to better ones that differ from it in one stage or one segment.

    Better is faster. Of plans that are as fast the simpler one is better, and of those the one with the smaller peak:
    a swap that the budget doesn't need is no gain.

    Attributes
    ----------
    refused : callable, optional
        Whether a schedule isn't to be taken in place of another.
    """

    evaluator: Evaluator
    space: PlanSpace
    budget_bytes: int
    refused: Callable[[Schedule, Schedule], bool] | None = None

    def run(self, best: Schedule, deadline: float) -> Schedule:
        """Return the schedule reached when no neighbour is better, or at `deadline`."""
        improved = True
        while improved and time.monotonic() < deadline:
            improved = False
            for _, codes, segments in self._promising(best):
                found = self.evaluator.schedule(codes, self.budget_bytes, segments)
                if found is not None and self._better(found, best):
                    best, improved = found, True
                    break
                if time.monotonic() > deadline:
                    break
        return best

    def _better(self, found: Schedule, best: Schedule) -> bool:
        if found.step_s > best.step_s:
            return False
        as_fast = found.step_s >= best.step_s * (1 - EQUAL_S)
        if as_fast and (complexity(found), found.peak_bytes) >= (complexity(best), best.peak_bytes):
            return False
        return self.refused is None or not self.refused(found, best)

    def _promising(self, best: Schedule) -> list[_Neighbour]:
        """Return the neighbours that may be as fast, those first that are fastest as their options are chosen."""
        limit_s = best.step_s * (1 + EQUAL_S)
        found: list[_Neighbour] = []
        for rows, segments in self._neighbours(best):
            costs = self.evaluator.makespans(rows, self.budget_bytes, segments)
            settled_s = self.evaluator.settled_s(rows, self.budget_bytes, segments)
            close = np.flatnonzero(np.minimum(costs, settled_s) <= limit_s)
            found += [(float(costs[k]), tuple(rows[k].tolist()), segments) for k in close]
        return sorted(found, key=lambda neighbour: neighbour[0])

    def _neighbours(self, best: Schedule) -> Iterator[tuple[Codes, Segments]]:
        """Yield plans with another option of one stage, then those with the stages of one segment by themselves."""
        menu = self.space.menu_in(best.segments)
        changes = [((i, code),) for i, codes in enumerate(menu) for code in codes if code != best.codes[i]]
        yield changed(best.codes, changes), best.segments
        for segment in best.segments:
            yield np.array([best.codes], np.int8), tuple(s for s in best.segments if s is not segment)
