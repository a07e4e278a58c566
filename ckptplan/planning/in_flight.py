"""Plans for a stage of a pipeline: several forwards are in flight, each of which waits for its backward.

NOTE [Forwards in flight]
A pipeline's stage runs the forwards of all micro-batches before the first backward (GPipe, Huang et al., 2019), or of
as many as there are stages from it to the last (1F1B; PipeDream, Narayanan et al., 2019). While one of `count` forwards
in flight, or its backward, runs, the others hold what each leaves for its backward, and their inputs:

    peak + (count - 1) * held <= budget

The peak is that of one step, and both depend on the plan. For a given limit on `held`, the sum is a limit on each: the
plans that keep both are those of a chain with one more stage of glue at its end, which takes so much that it is above
the step's limit if more is held when it runs. So intervals of `held` are searched, that with the smallest bound first:

1. A plan whose `held` is in `least..most` keeps a step's limit for `least` and the limit `most`. The bound on those is
   one on it.
2. A plan that keeps a step's limit for `most` and the limit `most` fits.

Example: budget 10, three forwards, and intervals 0..2 and 2..4. The bound for 0..2 is on plans with a peak of at most
10 that hold at most 2; a plan with a peak of at most 6 that holds at most 2 fits.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, replace

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import Option
from ckptplan.core.plan import Plan, status_of
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.core.units import format_bytes
from ckptplan.referee.simulate import Timeline, simulate
from ckptplan.solving.planner import OnProgress, smallest_peak, solve_profile

SHARE = 8
"""Each search takes at most this part of the time."""
FINEST = 512
"""Smallest interval, as a part of the first."""
_END = "(in flight)"


def solve_in_flight(
    profile: Profile, budget_bytes: int, limits: Limits, *, on_progress: OnProgress | None = None
) -> Plan:
    """The fastest plan found with which `limits.in_flight` forwards fit, and a proven bound on all of them.

    Parameters and errors as in `solve_profile`. The smallest peak that an `InfeasibleBudgetError` names includes the
    other forwards.
    """
    search = _Search(profile, budget_bytes, limits, on_progress)
    search.run()
    return search.plan()


def with_others(profile: Profile, plan: Plan, timeline: Timeline) -> Plan:
    """Return `plan` with what its replay says of the memory of forwards: their peak, and what they leave."""
    between = timeline.between_bytes
    return replace(
        plan,
        forward_peak_bytes=timeline.forward_peak_bytes,
        between_bytes=between,
        others_bytes=(plan.in_flight - 1) * (between + profile.input_bytes),
    )


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """Plans whose `held` is in an interval, and a bound on them."""

    bound_s: float
    least: int
    most: int


class _Search:
    def __init__(self, profile: Profile, budget_bytes: int, limits: Limits, on_progress: OnProgress | None) -> None:
        self._profile, self._budget_bytes, self._on_progress = profile, budget_bytes, on_progress
        self._others, self._hand_out = limits.in_flight - 1, limits.on_plan
        self._whole_limits = replace(limits, on_plan=None, in_flight=1)
        self._deadline = time.monotonic() + limits.time_limit_s
        self._gap = limits.gap
        # Nothing is larger when forward begins, whatever the plan.
        self._start_bytes = profile.base_forward_bytes[0] + sum(s.nbytes for s in profile.storages if s.born < 0)
        self._best: Plan | None = None
        self._now_s = profile.baseline_step_s
        """The bound of the part that is looked at."""
        self._bounds_s: list[float] = []
        """Those of parts that aren't looked at further."""
        self._parts: list[_Part] = []

    @property
    def _limits(self) -> Limits:
        """Those of one search, which has a share of the time, and no more than is left."""
        limits = self._whole_limits
        left_s = max(self._deadline - time.monotonic(), limits.time_limit_s / SHARE**2)
        return replace(limits, time_limit_s=min(limits.time_limit_s / SHARE, left_s))

    def run(self) -> None:
        """Search until the gap is closed or the time is over."""
        profile, inputs = self._profile, self._profile.input_bytes
        # The last backward begins with what a step holds, so the sum is at least `count` times that.
        room = self._budget_bytes - profile.base_forward_bytes[0] - self._others * inputs
        first = _Part(profile.baseline_step_s, inputs, inputs + max(room, 0) // (self._others + 1))
        self._look(first)
        self._now_s = math.inf
        while self._parts and time.monotonic() < self._deadline and not self._closed(self._parts[0].bound_s):
            part = heapq.heappop(self._parts)
            middle = (part.least + part.most) // 2
            if part.most - part.least <= (first.most - first.least) // FINEST + 1:
                self._bounds_s.append(part.bound_s)
                continue
            self._now_s = part.bound_s
            self._solve(self._budget_bytes - self._others * middle, middle)
            self._look(_Part(part.bound_s, part.least, middle))
            self._look(_Part(part.bound_s, middle, part.most))
            self._now_s = math.inf

    def _closed(self, bound_s: float) -> bool:
        return self._best is not None and self._best.step_s <= bound_s * (1 + self._gap)

    def _look(self, part: _Part) -> None:
        """Bound the plans of a part, and keep it if one may be faster than the best."""
        limit = self._budget_bytes - self._others * part.least
        bound_s = self._solve(limit, part.most)
        if bound_s is None:
            self._bounds_s.append(part.bound_s)
        elif bound_s < math.inf:
            heapq.heappush(self._parts, replace(part, bound_s=max(bound_s, part.bound_s)))

    def _solve(self, limit: int, most: int) -> float | None:
        """Look at the fastest plan of one step within `limit` that holds at most `most`.

        Returns
        -------
        float or None
            The bound on such plans; infinity if there are none, None if none was found and there may be some.
        """
        if limit < 1:
            return math.inf
        view = self._view(limit, most)
        handed: list[Plan] = []
        limits = replace(self._limits, on_plan=handed.append)
        try:
            found = solve_profile(view, limit, limits, on_progress=self._on_progress)
        except InfeasibleBudgetError:
            return math.inf if smallest_peak(view, self._limits).bound_bytes > limit else None
        except KeyboardInterrupt:
            for plan in handed[-1:]:
                self._offer(plan)
            raise
        self._offer(found)
        return found.lower_bound_s

    def _view(self, limit: int, most: int) -> Profile:
        """The chain with one more stage, which is above `limit` where more is held."""
        profile = self._profile
        more = limit - (most - profile.input_bytes) - self._start_bytes
        if more <= 0:
            return profile
        last = len(profile.stages) - 1
        end = Stage(_END, _END, (Option("keep", (), (), more, 0),), 0.0, 0.0)
        return replace(
            profile,
            stages=(*profile.stages, end),
            storages=tuple(_until_the_last(s, last) for s in profile.storages),
            base_forward_bytes=(*profile.base_forward_bytes, profile.base_backward_bytes[-1]),
            base_backward_bytes=(*profile.base_backward_bytes, profile.base_backward_bytes[-1]),
        )

    def _offer(self, found: Plan) -> None:
        """Take a plan of the chain, or of the longer one, if it fits and is faster."""
        n = len(self._profile.stages)
        plan = replace(
            found,
            stages=found.stages[:n],
            choices=found.choices[:n],
            inputs=found.inputs[:n],
            saved_bytes=found.saved_bytes[:n],
            kept_bytes=found.kept_bytes[:n],
        )
        timeline = simulate(self._profile, plan)
        plan = replace(plan, peak_bytes=timeline.peak_bytes, in_flight=self._others + 1)
        plan = with_others(self._profile, plan, timeline)
        if plan.needed_bytes > self._budget_bytes or (self._best is not None and self._best.step_s <= plan.step_s):
            return
        self._best = replace(plan, budget_bytes=self._budget_bytes)
        if self._hand_out is not None:
            self._hand_out(self._proven(self._best))

    def _proven(self, plan: Plan) -> Plan:
        bound_s = min([*self._bounds_s, *(part.bound_s for part in self._parts[:1]), self._now_s, plan.step_s])
        bound_s = max(bound_s, min(self._profile.baseline_step_s, plan.step_s))
        space = f"{plan.space}, {plan.in_flight} forwards in flight"
        return replace(plan, lower_bound_s=bound_s, status=status_of(plan.step_s, bound_s), space=space)

    def plan(self) -> Plan:
        """Return the best plan with its bound.

        Raises
        ------
        InfeasibleBudgetError
        """
        if self._best is None:
            least = smallest_peak(self._profile, self._limits)
            self._offer(leanest := solve_profile(self._profile, least.peak_bytes, self._limits))
        if self._best is None:
            timeline = simulate(self._profile, leanest)
            leanest = replace(leanest, in_flight=self._others + 1)
            needs = with_others(self._profile, leanest, timeline).needed_bytes
            raise InfeasibleBudgetError(
                f"budget {format_bytes(self._budget_bytes)} is below the smallest need found with {self._others + 1} "
                f"forwards in flight, {format_bytes(needs)} (stage {least.stage!r}, {least.phase}); raise the budget, "
                "or let fewer micro-batches be in flight",
                budget_bytes=self._budget_bytes,
                min_peak_bytes=needs,
                min_peak_bound_bytes=least.bound_bytes,
                stage=least.stage,
                phase=least.phase,
            )
        return self._proven(self._best)


def _until_the_last(storage: Storage, last: int) -> Storage:
    """A storage that program and graph hold up to the last stage at most: they let go of all when forward ends."""
    graph_until = None if storage.graph_until is None else min(storage.graph_until, last)
    return replace(storage, program_until=min(storage.program_until, last), graph_until=graph_until)
