"""Lower bounds on the makespan over the whole plan space: options, nested segments, swapping on links with backlog.

The space: a sequence of single stages, each with an option of its menu, and segments with any inner trees; a stage
moves any part of what it may, with any points; links are first in, first out; compute runs in program order (NOTE
[Residency] in core/rules.py).

1. `linear_program.py` relaxes choices to shares and whole transfers to flows. Segments enter as columns: at the
   multipliers of each program, `trees.py` finds the cheapest tree of *every* segment, so that a path over the stage
   boundaries 0..L with single stages and segments as edges gives the Lagrangian bound over the whole space, whatever
   columns there are. Columns that are missing are added until the bound meets the program.
2. `held_dp.py` bounds again at the best multipliers, with bytes in place of their prices: a program over (boundary,
   bytes held) that doesn't let a plan be half a segment, nor exceed the budget in one step for a discount in another.

Every value that is computed on the way is a bound by itself; the best one counts. None depends on the solver's
tolerance: multipliers are made exactly feasible first (`Costs.of`), and what remains, rounding in sums of some
thousand numbers, is less than the 1e-9 that is taken off at the end. Latency is counted as a lower rate, that of the
largest transfer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.solving.bound.held_dp import HeldDp
from ckptplan.solving.bound.linear_program import TOLERANCE, Duals, Master
from ckptplan.solving.bound.relaxation import Chain, Floats, Intervals
from ckptplan.solving.bound.trees import Costs, LinearTrees, MissingColumns, column_of

BUDGET_SHARES = (1.0, 0.98, 0.95, 0.9)
"""Shares of the budget for which the linear program chooses options: what it rounds must fit in the rest."""
HELD_SLOTS = ((60, 4000, 200), (150, 2000, 100), (400, 1000, 48), (math.inf, 800, 24))
"""Stages up to which a row is for; slots of held bytes; longest segment in the tables. Time grows with all three."""
LIMITS = (1.002, 1.005, 1.02, 1.1, 1.5, math.inf)
"""Factors of the best bound that the held-bytes program looks up to, each if the one before was reached."""
ROUNDING = 1e-9
"""Relative error, at most, of a bound: rounding in sums of some thousand numbers."""
CONVERGED = 1e-4
"""Part of the baseline by which the best bound may be below the linear program when no more segments are sought."""

OnCandidate = Callable[[tuple[int, ...], tuple[Segment, ...]], None]
"""Called with option codes and segments."""

OnBound = Callable[[float], None]
"""Called with each better bound, in seconds."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The multipliers of the bound in seconds and bytes.

    Attributes
    ----------
    forward_s_per_byte, backward_s_per_byte : array (stages,)
        What a byte less would save, by the step in which it is held; 0 where the budget doesn't bind.
    budget_s_per_byte : float
        Seconds that a byte more of budget saves, to first order: the sum of the above.
    out_s, in_s : float
        Seconds saved per relative gain of a link's rate, to first order; by its rate: seconds per byte per second.
    drain : tuple of two arrays
        Per lane and step, what a second of the link is worth in seconds of the step.
    launch : float
        What a second of launching is worth, 0 to 1; one of the lanes is worth the rest.
    """

    forward_s_per_byte: Floats
    backward_s_per_byte: Floats
    budget_s_per_byte: float
    out_s: float
    in_s: float
    drain: tuple[Floats, Floats]
    launch: float


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound.

    Attributes
    ----------
    bound_s : float
        No plan of the space is faster; infinite where there is no plan.
    prices : Prices or None
        None where no linear program was solved in time.
    complete : bool
        Whether the linear relaxation over all segments was solved to its end.
    """

    bound_s: float
    prices: Prices | None
    complete: bool


def lower_bound(
    profile: Profile,
    menu: Sequence[Sequence[int]],
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    segments: bool = True,
    deadline: float,
    upper_s: float = math.inf,
    enough_s: float = math.inf,
    on_candidate: OnCandidate | None = None,
    on_bound: OnBound | None = None,
) -> Bound:
    """Prove that no plan is faster than the result.

    Parameters
    ----------
    profile : Profile
    menu : sequence of sequence of int
        Per stage, the options allowed, as indices into `stage.options`.
    budget_bytes : int
    host_bytes : int, optional
        Most bytes moved in all.
    segments : bool
        Whether plans may have segments.
    deadline : float
        Of `time.monotonic()`.
    upper_s : float
        Makespan of a plan that is known: nothing above it needs proof, which saves time.
    enough_s : float
        A bound from which on none better is looked for.
    on_candidate : callable, optional
        Gets option codes and segments of plans that may be good; they may not fit.
    on_bound : callable, optional
        Gets each bound that is better than those before, as soon as it is proven.

    Returns
    -------
    Bound
    """
    return _Bounder(
        profile, menu, budget_bytes, host_bytes, segments, deadline, upper_s, enough_s, on_candidate, on_bound
    ).run()


@dataclass(slots=True)
class _Bounder:
    """One run of `lower_bound`; times are in units of the baseline."""

    profile: Profile
    menu: Sequence[Sequence[int]]
    budget_bytes: int
    host_bytes: int | None
    segments: bool
    deadline: float
    upper_s: float
    enough_s: float
    on_candidate: OnCandidate | None
    on_bound: OnBound | None
    chain: Chain = field(init=False)
    master: Master = field(init=False)
    intervals: Intervals = field(init=False)
    suited: set[tuple[Segment, ...]] = field(default_factory=set)
    best: float = 1.0
    complete: bool = False
    duals: Duals | None = None
    trees: LinearTrees | None = None
    offered: set[tuple[tuple[int, ...], tuple[Segment, ...]]] = field(default_factory=set)

    def run(self) -> Bound:
        """Columns until no segment is missing, then the held-bytes program at the best multipliers."""
        if self.profile.update_peak_bytes > self.budget_bytes:
            return Bound(math.inf, None, True)
        self.chain = Chain(self.profile, self.menu, self.budget_bytes, self.host_bytes, segments=self.segments)
        self.generate()
        if self.trees is not None:
            if not self.complete:
                self.offer(*self.trees.best_path())
            if not self.is_enough:
                self.sharpen()
        return Bound(self.seconds(self.best), self.prices(), self.complete)

    @property
    def is_enough(self) -> bool:
        """Whether no better bound is needed."""
        return self.seconds(self.best) >= self.enough_s

    def seconds(self, value: float) -> float:
        """Seconds, less what sums of floats may be off by."""
        return float(max(self.profile.baseline_step_s, value * self.chain.second * (1 - ROUNDING)))

    def raise_to(self, value: float) -> None:
        """Take a bound if it is better."""
        if value > self.best:
            self.best = value
            if self.on_bound is not None:
                self.on_bound(self.seconds(value))

    def offer(self, codes: Sequence[int], segments: Sequence[Segment]) -> None:
        """Hand out a candidate once; stages in segments get the option that segments ask for."""
        if self.on_candidate is None:
            return
        fixed = list(codes)
        for segment in segments:
            for i in range(segment.first, segment.last + 1):
                fixed[i] = self.chain.inside(i)
        key = (tuple(fixed), tuple(segments))
        if key not in self.offered:
            self.offered.add(key)
            self.on_candidate(*key)

    def generate(self) -> None:
        """Solve, price every segment, add those that are missing, and again."""
        chain = self.chain
        self.master = master = Master(chain)
        self.intervals = intervals = Intervals(chain)
        columns = MissingColumns(intervals)
        while (left := self.deadline - time.monotonic()) > 0:
            duals = master.solve(left)
            if duals is None:
                return
            trees = LinearTrees(intervals, Costs.of(chain, duals))
            ahead, _ = trees.path()
            value = 1.0 + trees.constant + float(ahead[-1])
            if value > self.best or self.trees is None:
                self.duals, self.trees = duals, trees
                self.raise_to(value)
            converged = 1.0 + duals.objective - self.best <= CONVERGED
            if converged or not columns.add_to(master, trees, duals):
                self.complete = True
                return
            if self.is_enough:
                return

    def suit(self, segments: Sequence[Segment]) -> None:
        """Candidates with these segments: the linear program chooses the other stages' options."""
        if self.on_candidate is None or tuple(segments) in self.suited:
            return
        self.suited.add(tuple(segments))
        for tree in segments:
            if all(column.tree != tree for column, _ in self.master.y):
                self.master.add(column_of(self.chain, self.intervals, tree))
        for share in BUDGET_SHARES:
            left = self.deadline - time.monotonic()
            if left <= 0:
                return
            codes = self.master.with_segments(segments, share, left)
            if codes is None:
                return
            self.offer(codes, segments)

    def sharpen(self) -> None:
        """The held-bytes programs at the best multipliers.

        What they need not look above is raised until it isn't reached any more.
        """
        assert self.trees is not None
        assert self.duals is not None
        n = self.chain.n
        slots, longest = next((slots, longest) for most, slots, longest in HELD_SLOTS if n <= most)
        upper = self.upper_s / self.chain.second
        kinds: list[Costs | None] = [None]
        if self.chain.most_put[-1] > 0:
            kinds.insert(0, Costs.of(self.chain, self.duals, apart=True))
        factors = (math.inf,) if self.duals.excess > TOLERANCE else LIMITS
        for apart in kinds:
            for limit in [factor * self.best for factor in factors]:
                program = HeldDp(self.trees, apart, min(limit, upper), slots=slots, longest=longest)
                if time.monotonic() + program.estimate_s() > self.deadline:
                    break
                value = program.run()
                self.raise_to(value)
                plan = program.plan()
                if plan is not None:
                    self.offer(*plan)
                    self.suit(plan[1])
                if value < limit or value >= upper or self.is_enough:
                    break

    def prices(self) -> Prices | None:
        """The multipliers in seconds and bytes."""
        if self.duals is None or self.trees is None:
            return None
        costs, second = self.trees.costs, self.chain.second
        per_byte = second / self.chain.unit
        forward, backward = costs.linear * per_byte
        total, flow = float(forward.sum() + backward.sum()), self.duals.flow
        return Prices(forward, backward, total, flow[0] * second, flow[1] * second, self.duals.drain, costs.launch)
