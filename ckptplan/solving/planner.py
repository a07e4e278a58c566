"""The planner: profile and budget in, plan with schedule and certificate out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptplan.core.checks import check_bytes
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.plan import OPTIMAL_GAP, Plan, plan_of
from ckptplan.core.profile import Profile
from ckptplan.core.request import NO_LIMITS, Limits
from ckptplan.core.schedule import EQUAL_S
from ckptplan.core.units import format_bytes
from ckptplan.solving.bound import cp_sat, mixed_integer, process
from ckptplan.solving.bound.linear_program import Master
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.bound.relaxation import Chain, Floats
from ckptplan.solving.cost import KEEP, Codes, Evaluator, Menu, Schedule, Segments
from ckptplan.solving.enumerate import PlanSpace, fastest_of_all
from ckptplan.solving.label_dp import LEAST_WIDTH, LabelDp, Steering
from ckptplan.solving.launching import mixed
from ckptplan.solving.local_search import MOST_PAIRS, LocalSearch, even_segments, patterns
from ckptplan.solving.peak import (
    MOST_FORESTS,
    SEGMENT_WORK,
    MinPeak,
    least_peak,
    plan_space_of,
    smallest_peak,
    step_bound,
)
from ckptplan.solving.segment_dp import REACH, SegmentDp
from ckptplan.solving.tiers import all_bytes, check_disk, evaluator_of, slower_link

__all__ = ["MinPeak", "OnProgress", "plan_space", "smallest_peak", "solve_profile"]

OnProgress = Callable[[str, float, float, int | None], None]
"""Called with the part at work, the best makespan and the lower bound so far, in seconds, and the best plan's peak."""

Start = tuple[Plan | MinPeak, float]
"""A plan of the profile, which may fit, and a lower bound in seconds on those that do."""

PLANS_LOOKED_AT_FIRST = 20_000
"""Up to this many plans, looking at each is faster than any other proof."""
PLANS_LOOKED_AT_LAST = 4_000_000
"""Up to this many, looking at each is the last resort where bounds leave a gap: it takes seconds at most."""
LONG_CHAIN = 300
"""Stages from which on the first linear program and the nesting of segments take most of the time."""
NESTING = 2
"""Deepest nesting of segments in the label DP; deeper ones come from the segment DP and the local search."""
FIRST_WIDTH = 250
"""Labels per boundary in the first round of the label DP, which is to give a plan soon."""
LABELS_AT_FIRST = 60_000
"""Labels times stages in that round, about: bounds its time on long chains."""
WIDTH_FACTOR = 4
"""Growth of its width from round to round: all rounds before the last take a third of its time."""
MOST_LABELS = 10_000
"""Width after which no further round begins: bounds memory and time."""
FINALISTS = 60
"""Plans of a round that are evaluated, each in about a millisecond."""
LOCAL_SEARCH_STARTS = 2
"""Finalists with distinct segments from which local search starts."""
SLOWER_FACTOR = 1.01
"""The label DP drops what its fluid links, which are inexact, make slower than the best plan by more."""
MIXED_LEAST_S = 1.0
"""Least seconds for it: its process takes half a second to start."""
MIXED_GAP_SHARE = 0.25
"""Its gap as a share of the one wanted: the rest is for what it leaves out."""
SEARCHED_STAGES = 150
"""Longer chains take a local search from several plans more than the time there is."""
ROUNDS = 400
"""Rounds of local search that may give nothing."""
MOST_PAIRS_LATER = 4000
"""Pairs of changes tried from each plan after a later round of the label DP."""
SEGMENT_WORK_FACTOR = 8
"""As many times the segment program's usual work where nothing moves: there it may be the proof."""
FITTING_TRIALS = 7
"""Budgets tried for the segment program where its bytes are an estimate: a bisection to 0.4 % of the true one."""
LEAST_FITTING = 0.75
"""Smallest of these budgets, as a share of the true one."""
REFUSAL_LEAST_S = 0.2
"""Seconds for the smallest peak in an error, however late it is."""
MOST_GIVEN_UP = 0.01
"""Share of the step that is given up for a simpler plan, at most."""
BOUND_ROUNDING = 1e-9
"""Relative difference by which a bound may be above the plan for nothing but rounding."""
REPORT_S = 0.5
"""Least seconds between reports within a part."""
REPORT_SHARE = 0.1
"""Largest share of the time for them: of a plan of 1000 stages, the referee's replay takes 0.3 s."""

# Shares of the time that is left when a part begins; the rest is for the parts behind it. On small chains each part
# ends long before.
ENUMERATION_SHARE = 0.4
FIRST_DP_SHARE = 0.3
FINALISTS_SHARE = 0.5
STARTS_SHARE = 0.08
BOUND_SHARE = 0.5
FIRST_LOCAL_SHARE = 0.2
LONG_CHAIN_LOCAL_SHARE = 0.6
LATER_LOCAL_SHARE = 0.3
REFINE_SHARE = 0.1
LAST_LOCAL_SHARE = 0.85
MIXED_SHARE = 0.9
SEGMENT_SHARE = 0.2
STILL_SEGMENT_SHARE = 0.6
"""Of the segment program where nothing moves."""
FIRST_TIER_SHARE = 0.4
SLOWER_LINKS = ((1.0, 0.4), (0.5, 0.6))
"""With a disk tier, the searches after the first: how much like the disk's the link is, and the share of each."""


def solve_profile(
    profile: Profile,
    budget_bytes: int,
    limits: Limits = NO_LIMITS,
    *,
    start: Start | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """The fastest plan found that fits, and a proven bound on all of them.

    Parameters
    ----------
    profile : Profile
    budget_bytes : int
        Most bytes on the device at any moment of the step.
    limits : Limits
        Its `menus` and `on_progress` are the caller's business: the menu is the profile's.
    start : (Plan, float), optional
        A plan to begin with, which is looked at like any other, and a lower bound that is known.
    on_progress : callable, optional

    Returns
    -------
    Plan
        `status` is "optimal" where the gap is at most 1e-6 over `plan.space`.

    Raises
    ------
    InfeasibleBudgetError
        No plan fits; names the smallest feasible peak, and the stage and phase that bind.
    InvalidInputError
        On a budget that can't be used, or a disk limit without a disk tier.
    KeyboardInterrupt
        On Ctrl-C, when `on_plan` has had the best plan found, with the bound proven so far.
    """
    check_bytes("solve_profile", budget_bytes=budget_bytes)
    host_bytes = limits.host_bytes
    disk = check_disk(profile, host_bytes, limits.disk_bytes)
    search = _PlanSearch(
        profile,
        budget_bytes,
        limits,
        all_bytes(host_bytes, disk),
        time.monotonic() + limits.time_limit_s,
        on_progress,
        evaluator_of(profile, host_bytes, disk),
    )
    if start is not None:
        search.begin_with(*start)
    best, bound_s = search.run() if not disk or host_bytes is None else _with_disk(search, host_bytes)
    simplest = search.given_up(best)
    plan = search.as_plan(simplest, bound_s)
    if simplest.step_s <= best.step_s:
        return plan
    slower = simplest.step_s / best.step_s - 1
    note = (
        f"a plan that is {slower:.2%} faster by the profile was found and not taken: that is within the error of its "
        "measured times, and this one moves less or decides less"
    )
    return replace(plan, notes=(*plan.notes, note))


def _with_disk(search: _PlanSearch, host_bytes: int) -> tuple[Schedule, float]:
    """The best plan of several searches, and the best bound; `search` is the one with all copies at the link's rate.

    The others' links are slower, which suits plans that move more to the disk and bounds them better; and one leaves
    the disk alone.
    """
    deadline, profile = search.deadline, search.profile
    search.deadline = _after(FIRST_TIER_SHARE, deadline)
    search.run()
    for slower, share in SLOWER_LINKS:
        if not search.closed():
            view, more_s = slower_link(profile, host_bytes, slower)
            part = replace(search, profile=view, deadline=_after(share, deadline), more_s=more_s)
            part.run()
            search.best, search.lazy, search.bound_s = part.best, part.lazy, part.bound_s
            search.handed_out_s, search.handed_bound_s = part.handed_out_s, part.handed_bound_s
            search.still = part.still
    if not search.closed():
        # Its bound doesn't hold for plans that use the disk, so it hands out nothing.
        limits, evaluator = replace(search.limits, on_plan=None), Evaluator(profile, host_bytes)
        alone = replace(search, host_bytes=host_bytes, deadline=deadline, evaluator=evaluator, limits=limits)
        alone.best = None if search.best is None or search.best.disk_bytes else search.best
        alone.lazy = alone.best
        try:
            found, _ = alone.run()
            search.take(found)
        except InfeasibleBudgetError:
            pass  # then the disk is needed
        except KeyboardInterrupt:
            search.seen = None if alone.best is None else (alone.best.codes, alone.best.segments)
            search.interrupted()
            raise
    search.deadline = deadline
    return search.result("done")


def _after(share: float, deadline: float) -> float:
    """When this share of the time to `deadline` will have passed."""
    return deadline - (1 - share) * max(0.0, deadline - time.monotonic())


def plan_space(actions: Sequence[Action], *, segments: bool = True, disk: bool = False) -> str:
    """The sentence every certificate refers to."""
    menu = "/".join(a for a in ACTIONS if a in actions)
    together = "nested segments" if segments and "recompute" in actions else "no segments"
    tiers = ", a stage's moves to host or disk as a whole" if disk and "swap" in actions else ""
    return f"per-stage menus of {menu}, {together}, first-in-first-out links{tiers}, compute in program order"


@dataclass(slots=True)
class _PlanSearch:
    """One run: the best schedule so far and the bound so far.

    Candidates and bounds are made with `profile` and `host_bytes`, and plans are judged by `evaluator`. These differ
    where there is a disk tier: `profile` then has one link for both tiers, `host_bytes` is the limit on all that moves,
    and `more_s` is by how much a plan's step may be longer with that link than it is. `lazy` is the fastest lazy
    schedule so far, from which changes of options and segments start, and `refined` the last one whose transfers have
    been refined. `still` is the fastest schedule so far that moves nothing. `seen` is the best plan that a local search
    at work has come to.
    """

    profile: Profile
    budget_bytes: int
    limits: Limits
    host_bytes: int | None
    deadline: float
    on_progress: OnProgress | None
    evaluator: Evaluator
    more_s: float = 0.0
    best: Schedule | None = None
    lazy: Schedule | None = None
    refined: Schedule | None = None
    bound_s: float = 0.0
    searches: int = 0
    still: Schedule | None = None
    handed_out_s: float = math.inf
    handed_bound_s: float = 0.0
    part: str = ""
    quiet_until_s: float = field(default_factory=lambda: time.monotonic() + REPORT_S)
    told: tuple[str, float, float, int | None] | None = None
    seen: tuple[Sequence[int], Segments] | None = None
    beside: list[process.Running] = field(default_factory=list, init=False)
    space: PlanSpace = field(init=False)
    menu: Menu = field(init=False)

    def run(self) -> tuple[Schedule, float]:
        """Cheap answers first; each further part runs only while a gap is left."""
        try:
            return self.parts()
        except KeyboardInterrupt:
            self.interrupted()
            raise
        finally:
            self.end_mixed()

    def parts(self) -> tuple[Schedule, float]:
        """The parts of the search, one after the other."""
        self.space = plan_space_of(self.profile, self.limits.actions, self.limits.segments, self.host_bytes)
        self.menu = self.space.menu
        self.bound_s = max(self.bound_s, self.profile.baseline_step_s)
        self.offer([KEEP] * len(self.menu))
        if self.closed():
            return self.result("keep all")
        if self.space.count(PLANS_LOOKED_AT_FIRST, MOST_FORESTS) <= PLANS_LOOKED_AT_FIRST:
            self.enumerate(ENUMERATION_SHARE)
            if not self.closed():  # storages too many, or the time too short, to try all parts of what may move
                self.begin_mixed("scip")
                self.run_bound()
                self.take_mixed(wait=True)
            return self.result("exact search")
        self.start()
        if not self.closed():
            self.improve()
        if not self.closed() and (self.space.count(PLANS_LOOKED_AT_LAST, MOST_FORESTS) <= PLANS_LOOKED_AT_LAST):
            self.enumerate(1.0)
        return self.result("done")

    def improve(self) -> None:
        """Label DP, local search and bounds by turns, each time with more labels, beside the mixed-integer program."""
        n = len(self.menu)
        long = n > LONG_CHAIN
        # The first linear program takes most of the time on long chains: there the bound's prices steer.
        steer = self.run_bound() if long else self.steering()
        if self.space.profile is not self.profile:
            self.run_segments()
        if self.closed():
            return
        width = max(LEAST_WIDTH, min(FIRST_WIDTH, LABELS_AT_FIRST // n))
        # With segments each step takes several times as long: on long chains the first round goes without.
        depth = 0 if long else NESTING
        begin = time.monotonic()
        self.run_dp(width, steer, depth, begin + FIRST_DP_SHARE * self.left_s())
        taken = time.monotonic() - begin
        if long:
            self.polish(MOST_PAIRS, LONG_CHAIN_LOCAL_SHARE)
        else:
            self.polish(MOST_PAIRS, FIRST_LOCAL_SHARE)
            self.begin_mixed("scip")
            self.refine(REFINE_SHARE)
            self.run_bound()
        while not self.closed() and width <= MOST_LABELS:
            self.take_mixed()
            if self.left_s() < (1.0 if depth < NESTING else 2.0) * taken:
                break
            begin, before = time.monotonic(), self.lazy
            width, depth = width if depth < NESTING else WIDTH_FACTOR * width, NESTING
            complete = self.run_dp(width, steer, depth, self.deadline)
            taken = time.monotonic() - begin
            if self.lazy is not before:
                self.polish(MOST_PAIRS_LATER, LATER_LOCAL_SHARE)
                self.refine(REFINE_SHARE)
            if not complete:
                break
        if self.beside and n <= cp_sat.MOST_STAGES:  # where SCIP has come to its end, CP-SAT would find no more
            self.begin_mixed("cp_sat")
        if not self.closed():
            self.search(LAST_LOCAL_SHARE if n <= SEARCHED_STAGES else 1.0)
        self.take_mixed(wait=True)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def steering(self) -> Steering | None:
        """The worth of bytes by the linear program without segments."""
        self.begin("prices")
        chain = Chain(self.profile, self.menu, self.budget_bytes, self.host_bytes, segments=self.limits.segments)
        duals = Master(chain).solve(BOUND_SHARE * self.left_s())
        if duals is None:
            return None
        per_byte = chain.second / chain.unit
        self.mix(duals.launch)
        return self.steered_by(duals.forward * per_byte, duals.backward * per_byte, duals.drain)

    def mix(self, share: float) -> None:
        """Let dynamic programs go by a time in which launching has this share (`launching.py`)."""
        if share:
            view = mixed(self.profile, share)
            self.space = plan_space_of(view, self.limits.actions, self.limits.segments, self.host_bytes)

    def steered_by(self, forward: Floats, backward: Floats, drain: Sequence[Floats]) -> Steering:
        """The worth of a byte at each boundary, from prices of a byte in each step and of a second of each link."""
        link = self.profile.link
        out = forward + drain[0] / link.out_bytes_per_s
        back = backward + drain[1] / link.in_bytes_per_s
        held = np.cumsum((forward + backward)[::-1])[::-1]
        return Steering(*(np.append(worth, 0.0) for worth in (held, out, back, backward)))

    def run_dp(self, width: int, steer: Steering | None, depth: int, deadline: float) -> bool:
        """Offer the plans that the label DP finds; return whether it had time for all its labels."""
        self.begin("label DP")
        begin = time.monotonic()
        dp = LabelDp(self.space, self.budget_bytes, host_bytes=self.host_bytes, depth=depth)
        below_s = math.inf if self.best is None else self.best.step_s
        found = dp.run(width, deadline, prices=steer, below_s=below_s * SLOWER_FACTOR, count=FINALISTS)
        best_s = below_s
        near: dict[Segments, tuple[float, tuple[int, ...]]] = {}
        for plan in found:
            seconds = self.evaluator.step_s(plan.codes, self.budget_bytes, plan.segments)
            if seconds < best_s:
                best_s = seconds
                self.offer(plan.codes, plan.segments)
            if seconds < near.get(plan.segments, (math.inf,))[0]:
                near[plan.segments] = (seconds, plan.codes)
            if time.monotonic() > self.deadline or time.monotonic() - begin > FINALISTS_SHARE * self.left_s():
                break
        if len(self.menu) <= SEARCHED_STAGES:
            # Plans with other segments than the best one's may lead further.
            until = time.monotonic() + STARTS_SHARE * self.left_s()
            search = self.local_search()
            for segments, (_, codes) in sorted(near.items(), key=lambda item: item[1])[:LOCAL_SEARCH_STARTS]:
                improved, forest, _ = search.improve(codes, segments, until)
                self.offer(improved, forest)
        self.report("label DP")
        return dp.complete

    def run_bound(self) -> Steering | None:
        """Prove a bound; return the worth of bytes by its prices."""
        assert self.best is not None
        self.begin("bound")
        bound = lower_bound(
            self.profile,
            self.menu,
            self.budget_bytes,
            host_bytes=self.host_bytes,
            segments=self.space.segments,
            deadline=time.monotonic() + BOUND_SHARE * self.left_s(),
            enough_s=self.best.step_s / (1 + self.gap) + self.more_s,
            on_bound=self.prove,
        )
        self.prove(float(bound.bound_s))
        self.report("bound")
        if bound.prices is None:
            return None
        self.mix(bound.prices.launch)
        return self.steered_by(bound.prices.forward_s_per_byte, bound.prices.backward_s_per_byte, bound.prices.drain)

    def begin_mixed(self, solver: process.Solver) -> None:
        """Let a solver of the mixed-integer program run beside what follows."""
        share_s = MIXED_SHARE * self.left_s()
        if self.closed() or len(self.menu) > mixed_integer.MOST_STAGES or share_s < MIXED_LEAST_S:
            return
        assert self.best is not None
        problem = process.Problem(
            self.profile,
            self.menu,
            self.budget_bytes,
            self.host_bytes,
            self.space.segments,
            self.best.step_s + self.more_s,
            self.limits.seed,
            self.limits.workers or 1,
        )
        running = process.begin(solver, problem, time.monotonic() + share_s, self.gap * MIXED_GAP_SHARE)
        if running is not None:
            self.beside.append(running)

    def take_mixed(self, *, wait: bool = False) -> None:
        """The bounds, and the plans that they suggest, of those that have ended, or of all if they are waited for."""
        while self.beside and not self.closed():
            ended = [running for running in self.beside if running.done]
            if ended:
                self.take_from(ended[0])
            elif wait and self.left_s():
                process.wait_for(self.beside, self.deadline)
            else:
                break

    def end_mixed(self) -> None:
        """End those that are still at work."""
        for running in self.beside:
            running.end()
        self.beside.clear()

    def take_from(self, running: process.Running) -> None:
        """The bound of a solver that has ended, and the plan that it suggests."""
        self.begin("mixed-integer program")
        found = running.found(self.deadline)
        self.beside.remove(running)
        if found is not None:
            self.prove(found.bound_s)
            if found.complete:
                self.end_mixed()
            if found.solution is not None:
                codes, segments, transfers = found.solution
                self.offer(codes, segments)
                until = _after(REFINE_SHARE, self.deadline)
                schedule = self.evaluator.transferred(codes, segments, transfers, self.budget_bytes, until)
                if schedule is not None:
                    self.take(schedule)
                schedule = self.evaluator.schedule(codes, self.budget_bytes, segments)
                if schedule is not None:
                    self.refine(REFINE_SHARE, schedule)
        self.report("mixed-integer program")

    @property
    def gap(self) -> float:
        """The gap at which the search ends."""
        return max(OPTIMAL_GAP, self.limits.gap)

    def closed(self) -> bool:
        """Whether the best schedule is proven as good as is wanted."""
        return self.best is not None and self.best.step_s <= self.bound_s * (1 + self.gap)

    def offer(self, codes: Sequence[int], segments: Segments = ()) -> None:
        """Take this plan if it fits and is faster, or as fast with more stages kept."""
        moves = any(self.profile.stages[i].options[code].moves for i, code in enumerate(codes))
        than = self.lazy if moves else self.still
        if than is not None and self.evaluator.step_s(codes, self.budget_bytes, segments) > than.step_s:
            return
        found = self.evaluator.schedule(codes, self.budget_bytes, segments)
        if found is not None:
            if self.lazy is None or _key(found) < _key(self.lazy):
                self.lazy = found
            self.take(found)

    def take(self, found: Schedule) -> None:
        """Take this schedule, which fits, if it is faster, or as fast with more stages kept."""
        moves = any(choice.moves for choice in found.choices)
        if not moves and (self.still is None or found.step_s < self.still.step_s):
            self.still = found
        if self.best is None or _key(found) < _key(self.best):
            self.best = found
            self.report_now_and_then(found)

    def prove(self, bound_s: float) -> None:
        """Take this bound on the candidates' makespan if it is better."""
        if bound_s - self.more_s > self.bound_s:
            self.bound_s = bound_s - self.more_s
            self.report_now_and_then(self.best)

    def begin_with(self, plan: Plan | MinPeak, bound_s: float) -> None:
        """Take a plan if it fits, and a bound that holds."""
        if isinstance(plan, MinPeak):
            self.offer_moves(plan.codes, plan.segments, self.deadline)
        else:
            names = ({option.name: code for code, option in enumerate(s.options)} for s in self.profile.stages)
            codes = [codes.get(choice.option) for codes, choice in zip(names, plan.choices, strict=True)]
            if None not in codes:
                self.offer(codes, plan.segments)  # type: ignore[arg-type]
                if self.fits(plan):
                    fields = (plan.step_s, plan.peak_bytes, plan.host_bytes, plan.segments, plan.disk_bytes)
                    self.take(Schedule(tuple(codes), plan.choices, *fields))  # type: ignore[arg-type]
        self.bound_s = max(self.bound_s, bound_s)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan is within the limits."""
        room = self.evaluator.room(self.budget_bytes)
        if room.host_bytes is not None and plan.host_bytes > room.host_bytes:
            return False
        return plan.peak_bytes <= room.device_bytes and plan.disk_bytes <= room.disk_bytes

    def offer_moves(self, codes: Sequence[int], segments: Segments, deadline: float) -> None:
        """Offer a plan that may have to move a part of what it may, for want of room on the host."""
        self.offer(codes, segments)
        if self.best is None and self.limits.host_bytes is not None:
            moves = self.evaluator.search(codes, self.budget_bytes, segments).fastest(deadline=deadline)
            if moves is not None:
                self.take(self.evaluator.with_moves(codes, segments, moves))

    def as_plan(self, best: Schedule, bound_s: float) -> Plan:
        """A schedule and a bound as a plan."""
        limits = self.limits
        disk = check_disk(self.profile, limits.host_bytes, limits.disk_bytes) > 0
        return plan_of(
            self.profile,
            best.choices,
            best.segments,
            budget_bytes=self.budget_bytes,
            peak_bytes=best.peak_bytes,
            host_bytes=best.host_bytes,
            disk_bytes=best.disk_bytes,
            step_s=best.step_s,
            lower_bound_s=bound_s,
            space=plan_space(limits.actions, segments=limits.segments, disk=disk),
            planner="ckptplan",
        )

    def begin(self, part: str) -> None:
        """Tell the caller which part begins."""
        self.part = part
        self.tell(self.best)

    def report(self, part: str) -> None:
        """Tell the caller where the search stands, and hand out the best plan if it is a better one."""
        self.part = part
        self.tell(self.best)
        self.hand_out(self.best)

    def report_now_and_then(self, found: Schedule | None) -> None:
        """The same in the midst of a part, with the best schedule that it has found, unless the last was just now."""
        begun_s = time.monotonic()
        if begun_s >= self.quiet_until_s:
            self.tell(found)
            self.hand_out(found)
            took_s = time.monotonic() - begun_s
            self.quiet_until_s = begun_s + max(REPORT_S, took_s / REPORT_SHARE)

    def tell(self, found: Schedule | None) -> None:
        """Call `on_progress`, if there is anything new."""
        if self.on_progress is not None:
            step_s, peak_bytes = (math.inf, None) if found is None else (found.step_s, found.peak_bytes)
            state = self.part, step_s, self.bound_s, peak_bytes
            if state != self.told:
                self.told = state
                self.on_progress(*state)

    def hand_out(self, found: Schedule | None, *, bounds: bool = False) -> None:
        """Call `on_plan` with a schedule that is faster than those before, or with a better bound if `bounds` count."""
        if found is None or self.limits.on_plan is None:
            return
        bound_s = self.bound_s
        if bound_s <= found.step_s * (1 + BOUND_ROUNDING):
            bound_s = min(bound_s, found.step_s)
        as_fast = found.step_s == self.handed_out_s
        if found.step_s < self.handed_out_s or (bounds and as_fast and bound_s > self.handed_bound_s):
            self.limits.on_plan(self.as_plan(found, bound_s))
            self.handed_out_s, self.handed_bound_s = found.step_s, bound_s

    def interrupted(self) -> None:
        """Hand out what has been found and proven, before an interrupt ends the search."""
        if self.seen is not None:
            self.offer(*self.seen)
        self.hand_out(self.best, bounds=True)

    def local_search(self, seed: int = 0) -> LocalSearch:
        """A local search, whose plans are looked at on the way."""
        return LocalSearch(self.evaluator, self.space, self.budget_bytes, self.limits.seed + seed, self.glance)

    def glance(self, codes: Sequence[int], segments: Segments) -> None:
        """Report a plan from which a local search goes on; what that returns is offered, and no worse."""
        self.seen = codes, segments
        if time.monotonic() < self.quiet_until_s:
            return
        found = self.evaluator.schedule(codes, self.budget_bytes, segments)
        if found is not None and (self.best is None or found.step_s < self.best.step_s):
            self.report_now_and_then(found)

    def enumerate(self, share: float) -> None:
        """Exact search over every vector, in at most this share of the time left."""
        self.begin("exact search")
        complete = fastest_of_all(
            self.evaluator,
            self.space,
            self.budget_bytes,
            _after(share, self.deadline),
            below_s=math.inf if self.best is None else self.best.step_s,
            on_found=self.take,
        )
        if complete and self.best is not None:
            self.bound_s = self.best.step_s
        if self.best is None:
            self.refuse()
        self.report("exact search")

    def start(self) -> None:
        """First vectors that fit; where none is found, the one with the smallest peak."""
        if self.budget_bytes < step_bound(self.space):
            self.refuse()
        self.begin("patterns")
        starts = patterns(self.space)
        costs = self.evaluator.makespans(starts, self.budget_bytes)
        self.offer(starts[costs.argmin()].tolist())
        if self.best is None and self.space.segments:
            for plan in even_segments(self.space):
                self.offer(*plan)
        if self.best is not None:
            self.report("patterns")
        self.run_segments()
        if self.best is None:
            self.run_dp(FIRST_WIDTH, None, NESTING, self.deadline)
        if self.best is None:
            self.refuse()
            self.report("smallest peak")

    def run_segments(self) -> None:
        """Nothing moves: the optimum on textbook chains, good candidates on others."""
        if not self.space.segments:
            return
        self.begin("segment DP")
        work, share = SEGMENT_WORK, SEGMENT_SHARE
        if not self.space.moves:
            work, share = SEGMENT_WORK_FACTOR * SEGMENT_WORK, STILL_SEGMENT_SHARE
        dp = SegmentDp(self.space, self.budget_bytes, max_work=work)
        if not dp.run(time.monotonic() + share * self.left_s()):
            return
        self.fit_segments(dp)
        if dp.exact and not self.space.moves and self.best is not None:
            least_s = self.space.profile.baseline_compute_s + dp.added_s(self.budget_bytes)
            # Equal, unless the host takes long to launch: the sum then isn't the step.
            self.prove(self.best.step_s if least_s >= self.best.step_s * (1 - BOUND_ROUNDING) else least_s)
        self.report("segment DP")

    def fit_segments(self, dp: SegmentDp) -> None:
        """Where the program's bytes are an estimate, the largest budget for it whose plan truly fits."""
        low, high = 0.0, 2.0 * self.budget_bytes
        asked = float(self.budget_bytes)
        for _ in range(1 if dp.exact else FITTING_TRIALS):
            found = dp.plan(int(asked))
            fits = False
            if found is not None:
                seconds = self.evaluator.step_s(found[0], self.budget_bytes, found[1])
                fits = seconds < math.inf
                if fits:
                    self.offer(*found)
            low, high = (asked, high) if fits or found is None else (low, asked)
            asked = (max(low, LEAST_FITTING * self.budget_bytes) + min(high, REACH * self.budget_bytes)) / 2

    def refuse(self) -> None:
        """Raise where the budget is below the smallest peak; else start from the vector that has it."""
        self.begin("smallest peak")
        deadline = max(self.deadline, time.monotonic() + REFUSAL_LEAST_S)
        least = least_peak(self.evaluator, self.space, deadline, self.budget_bytes)
        if least.peak_bytes <= self.budget_bytes:
            self.offer_moves(least.codes, least.segments, max(deadline, time.monotonic() + REFUSAL_LEAST_S))
        if self.best is not None:
            return
        missing = [a for a in ("swap", "recompute") if a not in self.limits.actions and least.phase != "update"]
        allow = f", or allow {' or '.join(repr(a) for a in missing)}" if missing else ""
        known = "the smallest feasible peak" if least.proven else "the smallest peak found in the time given"
        where = "the optimizer update" if least.phase == "update" else f"stage {least.stage!r}, {least.phase}"
        raise InfeasibleBudgetError(
            f"budget {_exactly(self.budget_bytes, least.peak_bytes)} is below {known} "
            f"{_exactly(least.peak_bytes, self.budget_bytes)} ({where}); raise the budget{allow}",
            budget_bytes=self.budget_bytes,
            min_peak_bytes=least.peak_bytes,
            min_peak_bound_bytes=least.bound_bytes,
            stage=least.stage,
            phase=least.phase,
        )

    def polish(self, pairs: int, share: float) -> None:
        """Small changes of the best plan, in at most this share of the time left."""
        if self.lazy is None or self.closed():
            return
        self.begin("local search")
        search = self.local_search()
        until = time.monotonic() + share * self.left_s()
        codes, segments, _ = search.improve(self.lazy.codes, self.lazy.segments, until, pairs=pairs)
        self.offer(codes, segments)
        self.report("local search")

    def search(self, share: float) -> None:
        """Local search from the best plan until many rounds gave nothing, in at most a share of the time left."""
        if self.lazy is None or self.closed():
            return
        self.begin("local search")
        self.searches += 1
        search = self.local_search(self.searches)
        until = time.monotonic() + share * self.left_s()
        for codes, segments, _ in search.search(self.lazy.codes, self.lazy.segments, until, rounds=ROUNDS):
            self.offer(codes, segments)
            self.take_mixed()
            if self.closed():
                break
        self.report("local search")

    def result(self, part: str) -> tuple[Schedule, float]:
        """The best schedule without swaps that gain nothing, and the bound."""
        assert self.best is not None
        if self.lazy is not None:
            best, self.best = self.best, self.lazy
            self.drop_what_gains_nothing()
            self.lazy, self.best = self.best, min(self.best, best, key=_key)
        self.refine(1.0)
        if self.bound_s <= self.best.step_s * (1 + BOUND_ROUNDING):
            # Above by a rounding only: they are equal. By more it would be a defect, for the referee to name.
            self.bound_s = min(self.bound_s, self.best.step_s)
        self.report(part)
        return self.best, self.bound_s

    def refine(self, share: float, lazy: Schedule | None = None) -> None:
        """Other transfers for the lazy schedule, in at most this share of the time left (see `points.py`)."""
        if lazy is None:
            lazy, self.refined, before = self.lazy, self.lazy, self.refined
            if lazy is before:
                return
        if lazy is None or self.closed():
            return
        self.begin("transfers")
        found = self.evaluator.improved(lazy, self.budget_bytes, _after(share, self.deadline))
        if found is not None:
            self.take(found)

    def drop_what_gains_nothing(self) -> None:
        """Keep, or move less of, what makes the step no longer.

        Swaps are looked at however late it is: one that can't lower the peak or can't overlap is in no plan.
        """
        assert self.best is not None
        limit_s = self.best.step_s * (1 + EQUAL_S)
        while changes := self.simpler(swaps_alone=time.monotonic() > self.deadline):
            segments = self.best.segments
            trials, costs = self.tried(changes)
            good = np.flatnonzero(costs <= limit_s)
            if len(good) == 0:
                return
            together = np.array(self.best.codes, np.int8)
            for row in reversed(good.tolist()):  # of one stage's changes the first, which is the greatest
                together[changes[row][0]] = changes[row][1]
            for trial in (together, trials[int(costs.argmin())]):
                found = self.evaluator.schedule(trial.tolist(), self.budget_bytes, segments)
                if found is not None and found.step_s <= limit_s:
                    self.best = found
                    break
            else:
                return

    def tried(self, changes: list[tuple[int, int]]) -> tuple[Codes, Floats]:
        """The best schedule's codes with one of `changes` each, and the makespans, infinite where one doesn't fit."""
        assert self.best is not None
        trials = np.tile(np.array(self.best.codes, np.int8), (len(changes), 1))
        trials[np.arange(len(changes)), [i for i, _ in changes]] = [code for _, code in changes]
        return trials, self.evaluator.makespans(trials, self.budget_bytes, self.best.segments)

    def given_up(self, best: Schedule) -> Schedule:
        """The simplest schedule that is slower than `best` by no more than the error of what `best` changes.

        What is faster by less may not be faster at all. No more than `MOST_GIVEN_UP` of the step is given up: where
        times are hardly known, a plan that is slower by all that is known is no better. Fewer bytes moved are simpler,
        then fewer decisions. Candidates are the fastest schedule seen that moves nothing, and `best` with one change
        after the other that keeps a stage, moves less of it, or recomputes it in place of moving.
        """
        error_s = min(self.profile.step_error * self.changed_s(best), MOST_GIVEN_UP * best.step_s)
        if not error_s:
            return best
        limit_s = best.step_s + error_s
        still = self.still
        self.best = still if still is not None and still.step_s <= limit_s else best
        while changes := self.simpler(swaps_alone=False, instead=True):
            trials, costs = self.tried(changes)
            moved = [self.moved_bytes(i, code) - self.moved_bytes(i, self.best.codes[i]) for i, code in changes]
            good = np.flatnonzero(costs <= limit_s).tolist()
            for row in sorted(good, key=lambda row: (moved[row], changes[row][1] != KEEP, costs[row])):
                found = self.evaluator.schedule(trials[row].tolist(), self.budget_bytes, self.best.segments)
                if found is not None and found.step_s <= limit_s and _complexity(found) < _complexity(self.best):
                    self.best = found
                    break
            else:
                break
        return self.best

    def changed_s(self, schedule: Schedule) -> float:
        """Seconds of what a schedule does besides keeping everything: what it adds, and its copies. At most its step.

        The rest of the step is the same under all schedules, so its error is no error of their difference. What is
        added is taken to have the relative error of the step; a recompute's, whose time is the difference of two
        measured ones, is larger. Example: a step of 100 ms becomes 110 ms by recompute and waits, and copies take 20 ms
        each way: 10 + 2 * 20 = 50 ms.
        """
        copies_s = 0.0
        for link, nbytes in ((self.profile.link, schedule.host_bytes), (self.profile.disk, schedule.disk_bytes)):
            if link is not None:
                copies_s += nbytes / link.out_bytes_per_s + nbytes / link.in_bytes_per_s
        return min(schedule.step_s - self.profile.baseline_step_s + copies_s, schedule.step_s)

    def moved_bytes(self, stage: int, code: int) -> int:
        """Bytes of the storages that one of a stage's options moves."""
        return sum(self.profile.storages[s].nbytes for s in self.profile.stages[stage].options[code].moved)

    def simpler(self, *, swaps_alone: bool, instead: bool = False) -> list[tuple[int, int]]:
        """(stage, code) of each option by which one stage would keep, or do the same and move less.

        With `instead`, also of each by which it would recompute in place of moving.
        """
        assert self.best is not None
        menu = self.space.menu_in(self.best.segments)
        inside = {i for segment in self.best.segments for i in range(segment.first, segment.last + 1)}
        changes = []
        for i in reversed(range(len(menu))):
            options, code = self.profile.stages[i].options, self.best.codes[i]
            now = options[code]
            if code == KEEP or (swaps_alone and not now.moves):
                continue
            if i not in inside:
                changes.append((i, KEEP))
            less = [
                c
                for c in menu[i]
                if c != KEEP
                and (instead or (options[c].recomputes, options[c].ops) == (now.recomputes, now.ops))
                and self.moved_bytes(i, c) < self.moved_bytes(i, code)
            ]
            changes += [(i, c) for c in sorted(less, key=lambda c: self.moved_bytes(i, c))]
        return changes


def _complexity(schedule: Schedule) -> tuple[int, int, float]:
    """Bytes moved, decisions and seconds: what is least of simple schedules."""
    return schedule.host_bytes + schedule.disk_bytes, len(schedule.codes) - _kept(schedule), schedule.step_s


def _key(schedule: Schedule) -> tuple[float, int]:
    """What is least of the best schedule: its seconds, then how many stages it doesn't keep."""
    return schedule.step_s, -_kept(schedule)


def _kept(schedule: Schedule) -> int:
    return schedule.codes.count(KEEP)


def _exactly(nbytes: int, other: int) -> str:
    """`nbytes` as text, with every digit where rounding would hide the difference to `other`."""
    text = format_bytes(nbytes)
    return f"{text} ({nbytes} bytes)" if text == format_bytes(other) and not text.endswith(" B") else text
