"""The smallest budget for which a plan exists: a search, and a proof of how much less none can do with.

The bound is the largest of three. One step at a time: no plan needs less for a step than the leanest way to run its
stage, beside what is there whatever is decided. All at once, in whole bytes: CP-SAT on `PeakModel`
(`bound/mixed_integer.py`), on chains that aren't too long for it. All at once, in shares: where the linear program of
`bound/pricing.py` finds no shares of options and segments that fit a budget, its multipliers, scaled up until time no
longer counts, prove that no plan fits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptplan.core import rules
from ckptplan.core.option import Action
from ckptplan.core.profile import Profile
from ckptplan.core.request import NO_LIMITS, Limits
from ckptplan.core.stage import Phase
from ckptplan.solving.bound import cp_sat, mixed_integer
from ckptplan.solving.bound.linear_program import Master
from ckptplan.solving.bound.relaxation import Chain, Intervals
from ckptplan.solving.bound.trees import Costs, LinearTrees, MissingColumns
from ckptplan.solving.cost import Evaluator, Segments, menus
from ckptplan.solving.enumerate import PlanSpace, smallest_of_all
from ckptplan.solving.label_dp import LabelDp
from ckptplan.solving.local_search import PeakSearch, even_segments, patterns
from ckptplan.solving.segment_dp import SegmentDp
from ckptplan.solving.tiers import all_bytes, check_disk, evaluator_of

PLANS_LOOKED_AT = 400_000
"""Up to this many plans, looking at each is fastest."""
MOST_FORESTS = 5000
"""Most ways to choose segments among which plans are looked at one by one: all of seven stages."""
LABEL_WIDTH = 250
LABEL_PLANS = 8
"""Labels per boundary, and plans looked at, in each step of the bisection by the label DP."""
SEGMENT_WORK = 200_000_000
"""Additions of the segment program; about a second per billion."""
ESTIMATES = (0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
"""Where the segment program's bytes are an estimate: budgets tried, as shares of the smallest it has a plan for."""
SEARCH_SHIFT = 10
BOUND_SHIFT = 12
"""The bisections of the label DP and of the linear bound end when what is left is the peak shifted right by this."""
ROUNDS = 150
"""Rounds of local search that may give nothing."""
SEGMENTS_UNTIL, SEARCH_UNTIL, LABELS_UNTIL, LAST_SEARCH_UNTIL, PROOF_UNTIL = 0.2, 0.3, 0.4, 0.5, 0.7
"""Shares of the time by which each part ends; the last part, the bound, has the rest."""
MULTIPLIER_FACTOR = 1e6
"""Multipliers so much larger make any excess of bytes cost more than any plan's time."""
ROUNDING = 1e-6
"""Relative error, at most, of a value at such multipliers."""


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


def smallest_peak(profile: Profile, limits: Limits = NO_LIMITS) -> MinPeak:
    """The smallest budget for which a plan exists, in exact bytes.

    Raises
    ------
    InvalidInputError
        On a disk limit without a disk tier.
    """
    host_bytes = limits.host_bytes
    disk = check_disk(profile, host_bytes, limits.disk_bytes)
    space = plan_space_of(profile, limits.actions, limits.segments, all_bytes(host_bytes, disk))
    return least_peak(evaluator_of(profile, host_bytes, disk), space, time.monotonic() + limits.time_limit_s)


def plan_space_of(profile: Profile, actions: Sequence[Action], segments: bool, host_bytes: int | None) -> PlanSpace:
    """The plans that use these actions alone."""
    menu = menus(profile, actions, host_bytes=host_bytes)
    return PlanSpace(profile, menu, segments=segments and "recompute" in actions)


def least_peak(evaluator: Evaluator, space: PlanSpace, deadline: float, enough: int = 0) -> MinPeak:
    """`smallest_peak` by `deadline` (of `time.monotonic()`), or as soon as a plan fits in `enough` bytes."""
    if space.count(PLANS_LOOKED_AT, MOST_FORESTS) <= PLANS_LOOKED_AT:
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
        self.enough = enough
        starts = patterns(space)
        peaks = evaluator.smallest_peaks(starts)
        self.best: tuple[Sequence[int], Segments] = (starts[peaks.argmin()].tolist(), ())
        self.least = int(peaks.min())
        self.bound = step_bound(space)

    def run(self, deadline: float) -> None:
        """Cheap plans; local search, ever smaller budgets for the label DP, and the bound, until they meet."""
        begin = time.monotonic()

        def until(share: float) -> float:
            return begin + share * (deadline - begin)

        if self.space.segments:
            for plan in even_segments(self.space):
                self.offer(*plan)
            self.segment_program(until(SEGMENTS_UNTIL))
        if not self.done:
            self.local(until(SEARCH_UNTIL), 0)
        if not self.done:
            self.smaller_budgets(until(LABELS_UNTIL))
        if not self.done:
            self.local(until(LAST_SEARCH_UNTIL), 1)
        if not self.done and len(self.space.menu) <= cp_sat.MOST_STAGES:
            self.prove(until(PROOF_UNTIL))
        if not self.done:
            self.raise_bound(deadline)

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
        """Where nothing moves, the best nested segments."""
        dp = SegmentDp(self.space, self.least, max_work=SEGMENT_WORK)
        if not dp.run(deadline) or (budget := dp.least_bytes()) is None:
            return
        for share in (1.0,) if dp.exact else ESTIMATES:
            found = dp.plan(int(share * budget))
            if found is not None:
                self.offer(*found)
        if dp.exact and not self.space.moves:
            self.bound = self.least

    def local(self, deadline: float, seed: int) -> None:
        """Small changes."""
        search = PeakSearch(self.evaluator, self.space, seed)
        for codes, segments, _ in search.search(*self.best, deadline, rounds=ROUNDS):
            self.offer(codes, segments)
            if self.done:
                break

    def smaller_budgets(self, deadline: float) -> None:
        """The label DP by bisection."""
        low = self.bound  # no plan was found for `low - 1` bytes or fewer
        while not self.done and low < self.least - (self.least >> SEARCH_SHIFT) and time.monotonic() < deadline:
            middle = (low + self.least - 1) // 2
            found = LabelDp(self.space, middle, host_bytes=self.evaluator.host_bytes).run(
                LABEL_WIDTH, deadline, count=LABEL_PLANS
            )
            if True not in [self.offer(plan.codes, plan.segments) for plan in found]:
                low = middle + 1

    def prove(self, deadline: float) -> None:
        """CP-SAT's bound, and its plan, if there is time for its model."""
        try:
            model = mixed_integer.PeakModel(
                self.profile,
                self.space.menu,
                self.least,
                host_bytes=self.evaluator.host_bytes,
                segments=self.space.segments,
                deadline=deadline,
            )
            bound, found = cp_sat.smallest_peak(model, deadline)
        except TimeoutError:
            return
        self.bound = max(self.bound, bound)
        if found is not None:
            self.offer(found.codes, found.segments)

    def raise_bound(self, deadline: float) -> None:
        """Bisection: the largest budget for which the linear program proves that nothing fits."""
        high = self.least  # for `high` bytes there is no proof
        while high - self.bound > self.least >> BOUND_SHIFT and time.monotonic() < deadline:
            middle = (self.bound + high) // 2
            proven = nothing_fits(self.space, middle, self.evaluator.host_bytes, deadline)
            if proven:
                self.bound = middle + 1
            else:
                high = middle


def step_bound(space: PlanSpace) -> int:
    """No plan needs fewer bytes than this in one step, whatever it does elsewhere."""
    profile, n = space.profile, len(space.menu)
    stages, storages = profile.stages, profile.storages
    forward, backward = [0] * n, [0] * n
    for k, stage in enumerate(stages):
        ways = [stage.options[c] for c in {0, *space.menu[k]}]
        if stage.recompute is not None:
            ways.append(stage.recompute)
        forward[k] = profile.base_forward_bytes[k] + min(o.forward_bytes for o in ways)
        # In its backward step a stage has what it holds, as it was or as a copy that a sweep made.
        backward[k] = profile.base_backward_bytes[k] + min(
            o.backward_bytes + sum(storages[s].nbytes for s in set(o.held) if not storages[s].to_end) for o in ways
        )
    for storage in storages:
        for k in rules.program_steps(storage, n):
            forward[k] += storage.nbytes
        if storage.to_end:
            backward = [nbytes + storage.nbytes for nbytes in backward]
    return max(*forward, *backward, profile.update_peak_bytes)


def nothing_fits(space: PlanSpace, budget_bytes: int, host_bytes: int | None, deadline: float) -> bool:
    """Whether it is proven that no plan of the space fits; False too where the time ends first.

    The multipliers of a program that doesn't fit make every plan's excess cost more than nothing. Times are bounded:
    a stage runs at most once per stage behind it and once more, and each storage moves once.
    """
    profile = space.profile
    if profile.update_peak_bytes > budget_bytes:
        return True
    chain = Chain(profile, space.menu, budget_bytes, host_bytes, segments=space.segments)
    link, n = profile.link, chain.n
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
    master, intervals = Master(chain), Intervals(chain)
    columns = MissingColumns(intervals)
    while (left := deadline - time.monotonic()) > 0:
        duals = master.solve(left)
        if duals is None or duals.excess <= 0:
            return False
        large = replace(
            duals, host=duals.host * MULTIPLIER_FACTOR, ask={key: w * MULTIPLIER_FACTOR for key, w in duals.ask.items()}
        )
        scaled = LinearTrees(intervals, Costs.of(chain, large, scale=MULTIPLIER_FACTOR))
        value = 1.0 + scaled.constant + float(scaled.path()[0][-1])
        if value * chain.second * (1 - ROUNDING) > longest_s:
            return True
        trees = LinearTrees(intervals, Costs.of(chain, duals))
        if not columns.add_to(master, trees, duals):
            return False
    return False
