"""Simpler schedules that are as fast as the best one, or slower by no more than the error of its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.schedule import EQUAL_S
from ckptplan.solving.cost import KEEP, Codes, Evaluator, Schedule, changed
from ckptplan.solving.descent import complexity
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import Parameters


@dataclass(slots=True)
class Simpler:
    """Changes of one schedule by which a stage keeps, moves less, or recomputes in place of moving.

    Attributes
    ----------
    best : Schedule
        The schedule so far.
    """

    evaluator: Evaluator
    space: PlanSpace
    budget_bytes: int
    best: Schedule

    def without_useless(self, deadline: float) -> Schedule:
        """Keep, or move less of, what makes the step no longer.

        Swaps are checked even after the deadline: one that can't lower the peak or can't overlap is in no plan.
        """
        limit_s = self.best.step_s * (1 + EQUAL_S)
        while changes := self._changes(swaps_alone=time.monotonic() > deadline):
            segments = self.best.segments
            trials, costs = self._tried(changes)
            good = np.flatnonzero(costs <= limit_s)
            if len(good) == 0:
                break
            together = np.array(self.best.codes, np.int8)
            for row in reversed(good.tolist()):  # of one stage's changes the first, which is the greatest
                together[changes[row][0]] = changes[row][1]
            for trial in (together, trials[int(costs.argmin())]):
                found = self.evaluator.schedule(trial.tolist(), self.budget_bytes, segments)
                if found is not None and found.step_s <= limit_s:
                    self.best = found
                    break
            else:
                break
        return self.best

    def within_error(
        self, still: Schedule | None, beaten: Callable[[Schedule], bool], most_s: float, parameters: Parameters
    ) -> Schedule:
        """The simplest schedule that is slower than the best by no more than the error of what the best changes.

        What is faster by less may not be faster at all. No more than `near` of the step is given up (where times are
        hardly known, a plan that is slower by all that is known is no better), and none of it beyond `most_s`, up to
        which a step is within the gap that was asked for. Fewer bytes moved are simpler, then fewer
        decisions. Candidates are `still`, which moves nothing, and the best with one change after the other that keeps
        a stage, moves less of it, or recomputes it in place of moving. At last, transfers of one stage are joined as
        long as the step stays within that error. Nothing is taken that is `beaten` by another plan at hand.
        """
        best = self.best
        error_s = self.evaluator.profile.error_s(best.step_s, best.host_bytes, best.disk_bytes)
        limit_s = min(best.step_s + min(error_s, parameters.near * best.step_s), most_s)
        if limit_s <= best.step_s:
            return best
        if still is not None and still.step_s <= limit_s and not beaten(still):
            self.best = still
        while changes := self._changes(swaps_alone=False, instead=True):
            trials, costs = self._tried(changes)
            moved = [self._moved_bytes(i, code) - self._moved_bytes(i, self.best.codes[i]) for i, code in changes]
            good = np.flatnonzero(costs <= limit_s).tolist()
            for row in sorted(good, key=lambda row: (moved[row], changes[row][1] != KEEP, costs[row])):
                found = self.evaluator.schedule(trials[row].tolist(), self.budget_bytes, self.best.segments)
                if found is None or found.step_s > limit_s or _order(found) >= _order(self.best):
                    continue
                if not beaten(found):
                    self.best = found
                    break
            else:
                break
        deadline = time.monotonic() + parameters.least_s
        joined = self.evaluator.joined(self.best, self.budget_bytes, limit_s, deadline)
        self.best = self.best if beaten(joined) else joined
        return self.best

    def _tried(self, changes: list[tuple[int, int]]) -> tuple[Codes, NDArray[np.float64]]:
        """The best schedule's codes with one of `changes` each, and the makespans, infinite where one doesn't fit."""
        trials = changed(self.best.codes, [(change,) for change in changes])
        return trials, self.evaluator.makespans(trials, self.budget_bytes, self.best.segments)

    def _moved_bytes(self, stage: int, code: int) -> int:
        """Bytes of the storages that one of a stage's options moves."""
        profile = self.evaluator.profile
        return sum(profile.storages[s].nbytes for s in profile.stages[stage].options[code].moved)

    def _changes(self, *, swaps_alone: bool, instead: bool = False) -> list[tuple[int, int]]:
        """Return the options by which one stage would keep, or do the same and move less.

        With `instead`, also each by which it would recompute in place of moving.
        """
        menu = self.space.menu_in(self.best.segments)
        inside = {i for segment in self.best.segments for i in range(segment.first, segment.last + 1)}
        changes = []
        for i in reversed(range(len(menu))):
            options, code = self.evaluator.profile.stages[i].options, self.best.codes[i]
            now = options[code]
            if code == KEEP or (swaps_alone and not now.moves):
                continue
            if i not in inside:
                changes.append((i, KEEP))
            less = [
                c
                for c in menu[i]
                if c != KEEP
                and (instead or (options[c].recomputes, options[c].way) == (now.recomputes, now.way))
                and self._moved_bytes(i, c) < self._moved_bytes(i, code)
            ]
            changes += [(i, c) for c in sorted(less, key=lambda c: self._moved_bytes(i, c))]
        return changes


def _order(schedule: Schedule) -> tuple[tuple[int, int], float]:
    """Least for simple schedules, the fastest of equally simple ones first."""
    return complexity(schedule), schedule.step_s
