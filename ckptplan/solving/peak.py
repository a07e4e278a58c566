"""The smallest budget for which a plan exists: a search for it, and a proven lower bound on it.

The bound is the largest of three. One step at a time: no plan needs less for a step than the leanest way to run its
stage, beside what is there whatever is decided. All at once, in whole bytes: CP-SAT on `PeakModel`
(`bound/mixed_integer.py`), on chains that aren't too long for it. All at once, in shares: where the linear program of
`bound/pricing.py` finds no shares of options and segments that fit a budget, its multipliers, scaled up until time no
longer counts, prove that no plan fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptplan.core.option import Action
from ckptplan.core.profile import Profile
from ckptplan.core.request import NO_LIMITS, Limits
from ckptplan.core.stage import Phase
from ckptplan.solving.bound import cp_sat, mixed_integer
from ckptplan.solving.bound.linear_program import Master
from ckptplan.solving.bound.relaxation import BoundData, Intervals
from ckptplan.solving.bound.trees import Costs, LinearTrees, MissingColumns
from ckptplan.solving.cost import Evaluator, Segments, menus
from ckptplan.solving.enumerate import PlanSpace, smallest_of_all
from ckptplan.solving.label_dp import LabelDp
from ckptplan.solving.local_search import PeakSearch, even_segments, patterns
from ckptplan.solving.parameters import CLOSE, DEFAULT, LARGE, Parameters
from ckptplan.solving.room import Room
from ckptplan.solving.segment_dp import REACH, SegmentDp


@dataclass(frozen=True, slots=True)
class MinPeak:
    """The smallest budget for which a plan exists.

    Attributes
    ----------
    peak_bytes : int
        Peak of this plan; the smallest possible one where `proven`.
    bound_bytes : int
        No plan has a smaller peak; equal to `peak_bytes` where `proven`.
    codes : tuple of int
        One per stage: the option's position in its menu.
    segments : tuple of Segment
        Stages recomputed together.
    stage, phase : str
        Where this plan has its peak.
    proven : bool
        False where the search was cut short.
    """

    peak_bytes: int
    bound_bytes: int
    codes: tuple[int, ...]
    segments: Segments
    stage: str
    phase: Phase
    proven: bool


def smallest_peak(profile: Profile, limits: Limits = NO_LIMITS, parameters: Parameters | None = None) -> MinPeak:
    """The smallest budget for which a plan exists, in exact bytes.

    Raises
    ------
    InvalidInputError
        On a disk limit without a disk tier.
    """
    parameters = parameters or DEFAULT
    room = Room.of(profile, limits)
    profile = room.movable(profile)
    space = plan_space_of(profile, limits.actions, limits.segments, parameters)
    evaluator = Evaluator(profile, room, parameters=parameters)
    return least_peak(evaluator, space, time.monotonic() + limits.time_limit_s)


def plan_space_of(
    profile: Profile, actions: Sequence[Action], segments: bool, parameters: Parameters = DEFAULT
) -> PlanSpace:
    """The plans that use these actions alone."""
    menu = menus(profile, actions)
    return PlanSpace(profile, menu, segments=segments and "recompute" in actions, parameters=parameters)


def least_peak(evaluator: Evaluator, space: PlanSpace, deadline: float, enough: int = 0) -> MinPeak:
    """`smallest_peak` by `deadline` (of `time.monotonic()`), or as soon as a plan fits in `enough` bytes."""
    few = space.parameters.few_plans
    if space.count(few, space.parameters.tried) <= few:
        row, segments, peak, complete = smallest_of_all(evaluator, space, deadline)
        codes = tuple(row.tolist())
        bound = peak if complete else step_bound(space)
    else:
        search = _PeakRun(evaluator, space, enough)
        search.run(deadline)
        codes, segments, peak, bound = tuple(search.best[0]), search.best[1], search.least, search.bound
    stage, phase = evaluator.binding(codes, segments)
    return MinPeak(peak, bound, codes, segments, stage, phase, bound == peak)


class _PeakRun:
    """The best plan so far and the bound so far."""

    def __init__(self, evaluator: Evaluator, space: PlanSpace, enough: int) -> None:
        self.evaluator, self.space, self.profile = evaluator, space, evaluator.profile
        self.parameters = space.parameters
        self.enough = enough
        starts = patterns(space)
        peaks = evaluator.smallest_peaks(starts)
        self.best: tuple[Sequence[int], Segments] = (starts[peaks.argmin()].tolist(), ())
        self.least = int(peaks.min())
        self.bound = step_bound(space)

    def run(self, deadline: float) -> None:
        """Cheap plans; local search, ever smaller budgets for the label DP, and the bound, until they meet."""
        p = self.parameters
        if self.space.segments:
            for plan in even_segments(self.space):
                self.offer(*plan)
        parts: list[tuple[Callable[[float], None], float]] = [
            (self.segment_program, p.small_share),
            (lambda until: self.local(until, 0), p.small_share),
            (self.smaller_budgets, p.small_share),
            (lambda until: self.local(until, 1), p.small_share),
            (self.prove, p.large_share),
            (self.raise_bound, 1.0),
        ]
        for part, share in parts:
            if not self.done:
                now = time.monotonic()
                part(now + share * max(0.0, deadline - now))

    @property
    def done(self) -> bool:
        """Whether there is nothing left to find or to prove."""
        return self.least <= max(self.bound, self.enough)

    def offer(self, codes: Sequence[int], segments: Segments) -> bool:
        """Take this plan if its peak is smaller."""
        peak = self.evaluator.peak(codes, segments)
        if peak < self.least:
            self.best, self.least = (codes, segments), peak
            return True
        return False

    def segment_program(self, deadline: float) -> None:
        """Offer the segment DP's plans, in which nothing moves; if it isn't exact, up to `REACH` times its budget."""
        if not self.space.segments:
            return
        dp = SegmentDp(self.space, self.least, max_work=self.parameters.additions)
        if not dp.run(deadline) or (budget := dp.least_bytes()) is None:
            return
        for asked in [budget] if dp.exact else np.linspace(budget, REACH * budget, self.parameters.window):
            found = dp.plan(int(asked))
            if found is not None:
                self.offer(*found)
        if dp.exact and not self.space.moves:
            self.bound = self.least

    def local(self, deadline: float, seed: int) -> None:
        """Small changes."""
        search = PeakSearch(self.evaluator, self.space, seed)
        for codes, segments, _ in search.search(*self.best, deadline):
            self.offer(codes, segments)
            if self.done:
                break

    def smaller_budgets(self, deadline: float) -> None:
        """The label DP by bisection."""
        low = self.bound  # no plan was found for `low - 1` bytes or fewer
        p = self.parameters
        while not self.done and low < self.least * (1 - CLOSE) and time.monotonic() < deadline:
            middle = (low + self.least - 1) // 2
            dp = LabelDp(self.space, middle, host_bytes=self.evaluator.room.total_bytes)
            found = dp.run(p.width_factor * p.least_width, deadline, count=p.least_width)
            if True not in [self.offer(plan.codes, plan.segments) for plan in found]:
                low = middle + 1

    def prove(self, deadline: float) -> None:
        """CP-SAT's bound, and its plan, if there is time for its model."""
        if len(self.space.menu) > self.parameters.cp_sat_stages:
            return
        try:
            host_bytes = self.evaluator.room.total_bytes
            model = mixed_integer.PeakModel(self.space, self.least, host_bytes=host_bytes, deadline=deadline)
            bound, found = cp_sat.smallest_peak(model, deadline)
        except TimeoutError:
            return
        self.bound = max(self.bound, bound)
        if found is not None:
            self.offer(found.codes, found.segments)

    def raise_bound(self, deadline: float) -> None:
        """Bisection: the largest budget for which the linear program proves that nothing fits."""
        high = self.least  # for `high` bytes there is no proof
        while high - self.bound > CLOSE * self.least and time.monotonic() < deadline:
            middle = (self.bound + high) // 2
            proven = nothing_fits(self.space, middle, self.evaluator.room.total_bytes, deadline)
            if proven:
                self.bound = middle + 1
            else:
                high = middle


def step_bound(space: PlanSpace) -> int:
    """No plan needs fewer bytes than this in one step, whatever it does elsewhere."""
    profile, chain = space.profile, space.chain
    needs = [profile.update_peak_bytes]
    for k, stage in enumerate(profile.stages):
        ways = {0, *space.menu[k]}
        if stage.recompute is not None:
            ways.add(stage.options.index(stage.recompute))
        options = [(stage.options[code], chain.bytes_of(chain.held[k][code])) for code in ways]
        needs.append(chain.forward_bytes[k] + min(option.forward_bytes for option, _ in options))
        # In its backward step a stage has what it holds, as it was or as a copy that a sweep made.
        needs.append(chain.backward_bytes[k] + min(option.backward_bytes + held for option, held in options))
    return max(needs)


def nothing_fits(space: PlanSpace, budget_bytes: int, host_bytes: int | None, deadline: float) -> bool:
    """Whether it is proven that no plan of the space fits; False too where the time ends first.

    The multipliers of a program that doesn't fit make every plan's excess cost more than nothing. Times are bounded:
    a stage runs at most once per stage behind it and once more, and each storage moves once.
    """
    profile = space.profile
    if profile.update_peak_bytes > budget_bytes:
        return True
    data = BoundData(space, budget_bytes, host_bytes)
    link, n = profile.link, data.n
    longest_s = (n + 2) * sum(
        max(s.forward_s, s.rerun_s)
        + s.backward_s
        + max(o.added_s for o in s.options)
        + s.rerun_launch_s
        + s.forward_launch_s
        + s.backward_launch_s
        + max(o.launch_s for o in s.options)
        for s in profile.stages
    ) + sum(link.out_s(s.nbytes) + link.in_s(s.nbytes) for s in profile.storages)
    master, intervals = Master(data), Intervals(data)
    columns = MissingColumns(intervals)
    while (left := deadline - time.monotonic()) > 0:
        duals = master.solve(left)
        if duals is None or duals.excess <= 0:
            return False
        large = replace(duals, host=duals.host * LARGE, ask={key: w * LARGE for key, w in duals.ask.items()})
        scaled = LinearTrees(intervals, Costs.of(data, large, scale=LARGE))
        value = scaled.constant + scaled.path()  # and the baseline, which is left to rounding
        if value * data.second * (1 - CLOSE) > longest_s:
            return True
        trees = LinearTrees(intervals, Costs.of(data, duals))
        if not columns.add_to(master, trees, duals):
            return False
    return False
