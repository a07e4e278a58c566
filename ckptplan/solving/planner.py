"""The planner: profile and budget in, plan with schedule and certificate out.

One loop over parts under one clock (`_PlanSearch.run`). A part gets a share of the time that is left, may offer plans
and prove bounds, and the loop ends as soon as the gap is closed. `_PlanSearch.order` says which part is next: cheap
answers first. The solvers of the mixed-integer program run beside the others, each in a process of its own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ckptplan.core.checks import check_bytes
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import NO_LIMITS, Limits
from ckptplan.core.schedule import EQUAL_S
from ckptplan.core.units import format_bytes
from ckptplan.solving.bound import process
from ckptplan.solving.bound.fitting import fitting
from ckptplan.solving.bound.linear_program import Master
from ckptplan.solving.bound.mixed_integer import Suggestion
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.bound.relaxation import BoundData, Floats
from ckptplan.solving.cost import KEEP, Evaluator, Schedule, Segments
from ckptplan.solving.descent import Descent, complexity
from ckptplan.solving.enumerate import PlanSpace, fastest_of_all
from ckptplan.solving.incumbent import Incumbent, OnProgress, Start, key, plan_space
from ckptplan.solving.label_dp import LabelDp, Steering
from ckptplan.solving.launching import mixed
from ckptplan.solving.local_search import FluidSearch, LocalSearch, PartSearch, even_segments, patterns
from ckptplan.solving.parameters import CLOSE, DEFAULT, ROUNDING, Parameters
from ckptplan.solving.peak import MinPeak, least_peak, plan_space_of, smallest_peak, step_bound
from ckptplan.solving.room import Room
from ckptplan.solving.segment_dp import REACH, SegmentDp
from ckptplan.solving.simpler import Simpler

__all__ = ["MinPeak", "OnProgress", "Start", "plan_space", "smallest_peak", "solve_profile"]


def solve_profile(
    profile: Profile,
    budget_bytes: int,
    limits: Limits = NO_LIMITS,
    *,
    start: Start | None = None,
    known: Sequence[Plan] = (),
    on_progress: OnProgress | None = None,
    parameters: Parameters | None = None,
) -> Plan:
    """Return the fastest plan found that fits, with a proven bound on all plans that fit.

    Parameters
    ----------
    profile : Profile
    budget_bytes : int
        Most bytes on the device at any moment of the step.
    limits : Limits
        Its `menus` and `on_progress` aren't used: the menu is the profile's.
    start : (Plan, float), optional
        A plan to begin with, which is evaluated like any other, and a known lower bound.
    known : sequence of Plan
        Plans within `limits` by other rules, which are evaluated as well. No simpler plan is taken that one of them
        beats (see `Simpler.within_error`).
    on_progress : callable, optional
    parameters : Parameters, optional
        Numbers that the search goes by; `parameters.DEFAULT` where there are none.

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
    parameters = parameters or DEFAULT
    room = Room.of(profile, limits)
    profile = room.movable(profile)
    deadline = time.monotonic() + limits.time_limit_s
    evaluator = Evaluator(profile, room, parameters=parameters)
    incumbent = Incumbent(profile, budget_bytes, limits, evaluator, on_progress, parameters)
    try:
        if start is not None:
            incumbent.begin_with(*start, deadline)
        for plan in known:
            incumbent.begin_with(plan, 0.0, deadline, by_other_rules=True)
        search = _PlanSearch(incumbent, deadline)
        best = search.run()
        simplest = search.simplest(best)
    except KeyboardInterrupt:
        incumbent.interrupted()
        raise
    plan = incumbent.as_plan(simplest, incumbent.bound_s)
    if simplest.step_s <= best.step_s:
        return plan
    slower = simplest.step_s / best.step_s - 1
    note = (
        f"a plan that is {slower:.2%} faster by the profile was found and not taken: that is within the error of its "
        "measured times, and this one moves less, decides less or has fewer transfers"
    )
    return replace(plan, notes=(*plan.notes, note))


def _after(share: float, deadline: float) -> float:
    """Return the time at which this share of the time to `deadline` will have passed."""
    return deadline - (1 - share) * max(0.0, deadline - time.monotonic())


def _cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _SearchPart(NamedTuple):
    """A part of the search.

    Attributes
    ----------
    name : str
        For progress reports.
    run : callable
        Gets the time by which it is to end, of `time.monotonic()`.
    share : float
        Its share of the time that is left when it begins.
    """

    name: str
    run: Callable[[float], None]
    share: float = 1.0


class _PlanSearch:
    """One run of the parts.

    Candidates and bounds have one limit on all that moves, and one link; the incumbent's evaluator judges plans with
    their copies placed on host and disk (`room.py`).
    """

    def __init__(self, incumbent: Incumbent, deadline: float) -> None:
        self.incumbent, self.deadline = incumbent, deadline
        self.profile, self.budget_bytes = incumbent.profile, incumbent.budget_bytes
        self.limits, self.parameters = incumbent.limits, incumbent.parameters
        self.moved_bytes = incumbent.evaluator.room.total_bytes
        self.unmixed = plan_space_of(self.profile, self.limits.actions, self.limits.segments, self.parameters)
        self.space = self.unmixed  # the same, or for dynamic programs with other times (`mix`)
        self.refined: Schedule | None = None
        self.steer: Steering | None = None
        self.width = self.depth = 0
        self.complete = True
        self.finalists: dict[Segments, tuple[float, tuple[int, ...]]] = {}
        self.polished: set[tuple[tuple[int, ...], Segments]] = set()
        self.segments_of_bound: Segments | None = None
        self.tried_patterns = False
        self.beside: list[process.Running] = []
        self.parted: Schedule | None = None
        self.exhausted = False

    def run(self) -> Schedule:
        """Run part after part until the gap is closed; return the best schedule without swaps that gain nothing."""
        incumbent = self.incumbent
        try:
            incumbent.bound_s = max(incumbent.bound_s, self.profile.fastest_step_s)
            incumbent.offer([KEEP] * len(self.space.menu))
            for part in self.order():
                if incumbent.closed:
                    break
                incumbent.begin(part.name)
                part.run(_after(part.share, self.deadline))
                incumbent.report(part.name)
            return self.result()
        finally:
            self.end_mixed()

    def order(self) -> Iterator[_SearchPart]:
        """The parts, each chosen when the one before it has ended; the exact search where there are few plans."""
        p = self.parameters
        if self.incumbent.closed:
            return
        if self.fewer_than(p.few_plans, p.tried):
            yield _SearchPart("exact search", self.enumerate, p.large_share)
            if self.exhausted:
                return
            # There are too many storages, or the time is too short, to try all parts of what may move.
            self.leave_out()
            self.begin_mixed("scip")
            yield _SearchPart("bound", self.bound, p.large_share)
            yield _SearchPart("mixed-integer program", self.await_mixed)
            return
        yield _SearchPart("patterns", self.patterns)
        yield self.segments_part()
        if self.incumbent.best is None:
            self.width, self.depth = p.width_factor * p.least_width, p.nesting
            yield _SearchPart("label DP", self.labels)
        if self.incumbent.best is None:
            yield _SearchPart("smallest peak", self.refuse)
        self.leave_out()
        yield from self.improvements()
        if self.fewer_than(p.many_plans, p.cells):
            yield _SearchPart("exact search", self.enumerate)

    def improvements(self) -> Iterator[_SearchPart]:
        """Label DP, local search and bounds by turns, each time with more labels, beside the mixed-integer program."""
        p, n = self.parameters, len(self.space.menu)
        long = n > p.long_chain
        # The first linear program takes most of the time on long chains: there the bound's prices steer.
        yield (
            _SearchPart("bound", self.bound, p.large_share)
            if long
            else _SearchPart("prices", self.prices, p.large_share)
        )
        if self.space.profile is not self.profile:
            yield self.segments_part()
        # With segments each step takes several times as long: on long chains the first round has none.
        self.width, self.depth = p.least_width, 0 if long else p.nesting
        begin = time.monotonic()
        yield _SearchPart("label DP", self.labels, p.small_share)
        taken_s = time.monotonic() - begin
        yield _SearchPart("local search", self.polish, p.large_share if long else p.small_share)
        if not long:
            yield _SearchPart("bound", self.bound, p.large_share)
            self.begin_mixed("scip", self.segments_of_bound if n > p.cp_sat_stages else None)
            yield _SearchPart("transfers", self.transfers, p.small_share)
        self.complete = True  # the first round has a share of the time alone
        while self.complete and self.left_s() > taken_s:
            if self.depth < p.nesting:
                self.depth = p.nesting
            elif p.width_factor * self.width <= p.most_width:
                self.width *= p.width_factor
            else:
                break
            self.take_mixed()
            begin = time.monotonic()
            yield _SearchPart("label DP", self.labels)
            taken_s = time.monotonic() - begin
            yield _SearchPart("local search", self.polish, p.small_share)
            yield _SearchPart("transfers", self.transfers, p.small_share)
        if not self.exhausted and n <= p.cp_sat_stages and len(self.beside) + 1 < _cores():
            self.begin_mixed("cp_sat")
        yield _SearchPart("local search", self.search, 1 - p.last_share if self.beside else 1.0)
        yield _SearchPart("mixed-integer program", self.await_mixed)

    def segments_part(self) -> _SearchPart:
        """The segment program, which may be the proof where nothing moves."""
        p = self.parameters
        return _SearchPart("segment DP", self.segments, p.small_share if self.space.moves else p.large_share)

    def fewer_than(self, plans: int, forests: int) -> bool:
        """Whether there are no more plans than this, nor more ways to choose segments."""
        return self.space.count(plans, forests) <= plans

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def leave_out(self) -> None:
        """Remove options that don't fit; a first plan, or the error that there is none, doesn't wait for this."""
        self.space = self.unmixed = fitting(self.unmixed, self.budget_bytes)

    def enumerate(self, until: float) -> None:
        """Exact search over every vector; where copies may go to the disk, another one for the bound."""
        incumbent = self.incumbent
        self.exhausted = self.see_all(incumbent.evaluator, until, incumbent.take)
        if incumbent.best is None:
            self.refuse(until)
        if self.exhausted and incumbent.best is not None:
            bound_s = incumbent.best.step_s
            if incumbent.evaluator.room.disk_bytes:
                at_the_link = Evaluator(self.profile, Room(self.moved_bytes), parameters=self.parameters)
                found: list[Schedule] = []
                self.exhausted = self.see_all(at_the_link, until, found.append)
                bound_s = found[-1].step_s if found else bound_s
            if self.exhausted:
                incumbent.prove(bound_s)

    def see_all(self, evaluator: Evaluator, until: float, on_found: Callable[[Schedule], None]) -> bool:
        """Hand out plans that are faster than the best by this evaluator; return whether all plans were seen."""
        best = self.incumbent.best
        below_s = math.inf if best is None else best.step_s
        return fastest_of_all(evaluator, self.space, self.budget_bytes, until, below_s=below_s, on_found=on_found)

    def patterns(self, until: float) -> None:
        """Offer first vectors; raise if a single step needs more than the budget."""
        incumbent = self.incumbent
        if self.budget_bytes < step_bound(self.space):
            self.refuse(until)
        self.tried_patterns = True
        starts = patterns(self.space)
        costs = incumbent.evaluator.makespans(starts, self.budget_bytes)
        for row in costs.argsort()[: self.parameters.window]:  # of equal ones some move nothing after all
            incumbent.offer(starts[row].tolist())
        if incumbent.best is None and self.space.segments:
            for plan in even_segments(self.space):
                incumbent.offer(*plan)

    def segments(self, until: float) -> None:
        """Nothing moves: the optimum on textbook chains, good candidates on others."""
        if not self.space.segments:
            return
        incumbent, still = self.incumbent, not self.space.moves
        work = self.parameters.still_additions if still else self.parameters.additions
        dp = SegmentDp(self.space, self.budget_bytes, max_work=work)
        if not dp.run(until):
            return
        self.fit_segments(dp, until)
        if dp.exact and still and incumbent.best is not None:
            least_s = self.space.profile.fastest_compute_s + dp.added_s(self.budget_bytes)
            # Equal, unless the host takes long to launch: the sum then isn't the step.
            incumbent.prove(incumbent.best.step_s if least_s >= incumbent.best.step_s * (1 - ROUNDING) else least_s)

    def fit_segments(self, dp: SegmentDp, until: float) -> None:
        """Bisect for the largest budget of the program whose plan truly fits, where its bytes are an estimate."""
        least, asked, most = 0.0, float(self.budget_bytes), self.budget_bytes * REACH
        enough = CLOSE  # where memory is tightest one of some thousand budgets has a plan
        while True:
            found = dp.plan(int(asked))
            fits = False
            if found is not None:
                fits = self.incumbent.evaluator.step_s(found[0], self.budget_bytes, found[1]) < math.inf
                if fits:
                    enough = self.parameters.near
                    self.incumbent.offer(*found)
            least, most = (asked, most) if fits or found is None else (least, asked)
            if dp.exact or most - least <= enough * self.budget_bytes or time.monotonic() > until:
                break
            asked = (least + most) / 2

    def prices(self, until: float) -> None:
        """Steer the label DP by the linear program without segments."""
        data = BoundData(self.unmixed, self.budget_bytes, self.moved_bytes)
        duals = Master(data).solve(until - time.monotonic())
        if duals is not None:
            per_byte = data.second / data.unit
            self.mix(duals.launch)
            self.steer = self.steered_by(duals.forward * per_byte, duals.backward * per_byte, duals.drain)

    def mix(self, share: float) -> None:
        """Let dynamic programs go by a time in which launching has this share (`launching.py`)."""
        if share:
            profile, menu = mixed(self.profile, share), self.space.menu
            self.space = PlanSpace(profile, menu, segments=self.space.segments, parameters=self.parameters)

    def steered_by(self, forward: Floats, backward: Floats, drain: Sequence[Floats]) -> Steering:
        """The worth of a byte at each boundary, from prices of a byte in each step and of a second of each link."""
        link = self.profile.link
        out = forward + drain[0] / link.out_bytes_per_s
        back = backward + drain[1] / link.in_bytes_per_s
        held = np.cumsum((forward + backward)[::-1])[::-1]
        return Steering(*(np.append(worth, 0.0) for worth in (held, out, back, backward)))

    def labels(self, until: float) -> None:
        """Offer the plans that the label DP finds."""
        incumbent, p = self.incumbent, self.parameters
        dp = LabelDp(self.space, self.budget_bytes, host_bytes=self.moved_bytes, depth=self.depth)
        best_s = math.inf if incumbent.best is None else incumbent.best.step_s
        # It drops what its fluid links, which are inexact, make slower than the best plan by more.
        found = dp.run(
            self.width,
            until,
            prices=self.steer,
            below_s=best_s * (1 + p.near),
            count=p.least_width,
            between=self.take_mixed,
        )
        self.complete = dp.complete
        until = max(until, _after(p.large_share, self.deadline))
        self.finalists = {}
        for plan in found:
            seconds = incumbent.evaluator.step_s(plan.codes, self.budget_bytes, plan.segments)
            if seconds < self.finalists.get(plan.segments, (math.inf, ()))[0]:
                self.finalists[plan.segments] = (seconds, plan.codes)
            if seconds < best_s:
                best_s = seconds
                incumbent.offer(plan.codes, plan.segments)
            if time.monotonic() > until:
                break

    def bound(self, until: float) -> None:
        """Prove a bound, and steer the label DP by its prices if no others do."""
        assert self.incumbent.best is not None
        bound = lower_bound(
            self.unmixed,
            self.budget_bytes,
            host_bytes=self.moved_bytes,
            deadline=until,
            enough_s=self.incumbent.best.step_s / (1 + self.incumbent.gap),
            on_bound=self.incumbent.prove,
        )
        self.incumbent.prove(float(bound.bound_s))
        if self.space.segments and (bound.complete or bound.segments):  # otherwise it hasn't reached any
            self.segments_of_bound = bound.segments
        if (prices := bound.prices) is not None:
            self.mix(prices.launch)
            if self.steer is None:
                self.steer = self.steered_by(prices.forward_s_per_byte, prices.backward_s_per_byte, prices.drain)

    def local_search(self, seed: int) -> LocalSearch:
        """Return a local search whose plans are reported on the way; `seed` is added to the caller's."""
        incumbent = self.incumbent
        return LocalSearch(
            incumbent.evaluator, self.space, self.budget_bytes, self.limits.seed + seed, incumbent.glance
        )

    def closes(self) -> bool:
        """Whether the gap is closed, counting the results of the solvers in other processes."""
        self.take_mixed()
        return self.incumbent.closed

    def polish(self, until: float) -> None:
        """Small changes of the best lazy plan, and of the label DP's with other segments, which may lead further."""
        lazy, search = self.incumbent.lazy, self.local_search(0)
        starts = [] if lazy is None else [(lazy.codes, lazy.segments)]
        starts += [(codes, segments) for segments, (_, codes) in sorted(self.finalists.items(), key=lambda f: f[1])]
        for start in starts:
            if start in self.polished:
                continue
            self.polished.add(start)
            codes, segments, _ = search.improve(*start, until)
            self.incumbent.offer(codes, segments)
            self.polished.add((codes, segments))
            self.take_mixed()
            if self.incumbent.closed or time.monotonic() > until:
                break

    def search(self, until: float) -> None:
        """Local search from the best lazy plan until many rounds gave nothing."""
        if (lazy := self.incumbent.lazy) is None:
            return
        search = self.local_search(1)
        search.stop = self.closes
        for codes, segments, _ in search.search(lazy.codes, lazy.segments, until):
            self.incumbent.offer(codes, segments)

    def transfers(self, until: float) -> None:
        """Other transfers for the lazy schedule (see `points.py`)."""
        lazy, before, self.refined = self.incumbent.lazy, self.refined, self.incumbent.lazy
        if lazy is not before and lazy is not None:
            self.retimed(lazy, until)
        self.parts(until)

    def parts(self, until: float) -> None:
        """Plans that are fast if they move a part of what their options may, from the best one on."""
        best = self.incumbent.best
        if best is None or best is self.parted or self.incumbent.closed or not self.space.moves:
            return
        if time.monotonic() >= until:
            return
        self.parted = best
        fluid = FluidSearch(self.incumbent.evaluator, self.space, self.budget_bytes, self.limits.seed)
        found = fluid.improve(best.codes, best.segments, _after(self.parameters.large_share, until))
        self.in_parts([found[:2], (best.codes, best.segments)], until)

    def in_parts(self, starts: Sequence[tuple[Sequence[int], Segments]], until: float) -> None:
        """Small changes of the best of these plans while they make it faster, with no more bytes moved than must be."""
        search = PartSearch(self.incumbent.evaluator, self.space, self.budget_bytes, self.limits.seed)
        codes, segments = min(starts, key=lambda plan: search.cost(*plan))
        codes, segments, _ = search.improve(codes, segments, _after(self.parameters.large_share, until))
        self.incumbent.offer(codes, segments)
        found = self.incumbent.evaluator.with_fewest(codes, self.budget_bytes, segments, until)
        if found is not None:
            self.incumbent.take(found)

    def retimed(self, lazy: Schedule, until: float) -> None:
        """Take a lazy schedule with better transfers."""
        found = self.incumbent.evaluator.improved(lazy, self.budget_bytes, until)
        if found is not None:
            self.incumbent.take(found)

    def begin_mixed(self, solver: process.Solver, among: Segments | None = None) -> None:
        """Let a solver of the mixed-integer program run beside what follows.

        With `among`, it first solves the program with these outermost segments alone: several times as fast, but only
        for a plan, without a bound.
        """
        p, best, gap = self.parameters, self.incumbent.best, self.incumbent.gap
        begin = time.monotonic()
        until, first = _after(1 - p.last_share, self.deadline), None
        if self.incumbent.closed or len(self.space.menu) > p.mixed_stages or until - begin < p.least_s or best is None:
            return
        if among is not None and p.large_share * self.left_s() >= p.least_s:
            until_plan = _after(p.large_share, self.deadline)
            # This solution only has to be a plan, so it may be farther from the best one.
            first = process.Few(among, until_plan, max(gap, p.near) * p.small_share)
            until = self.deadline - p.last_share * (self.deadline - until_plan)
        workers = self.limits.workers or 1
        problem = process.Problem(
            self.unmixed, self.budget_bytes, self.moved_bytes, best.step_s, self.limits.seed, workers
        )
        # The program gets a part of the gap; the rest is for what it leaves out.
        running = process.begin(solver, problem, until, gap * p.small_share, first)
        if running is not None:
            self.beside.append(running)

    def await_mixed(self, until: float) -> None:
        """Wait for the solvers, and take what they find."""
        while self.beside and not self.incumbent.closed and time.monotonic() < until:
            process.wait_for(self.beside, until)
            self.take_mixed()

    def take_mixed(self) -> None:
        """Take the bounds, and the suggested plans, of the solvers that have an answer."""
        for running in [running for running in self.beside if running.done]:
            if running in self.beside and not self.incumbent.closed:
                self.take_from(running)

    def end_mixed(self) -> None:
        """End the solvers that are still running."""
        for running in self.beside:
            running.end()
        self.beside.clear()

    def take_from(self, running: process.Running) -> None:
        """Take a solver's bound, and the plan that it suggests."""
        incumbent, within = self.incumbent, self.incumbent.part
        incumbent.begin("mixed-integer program")
        found = running.found(self.deadline)
        if not running.left:
            self.beside.remove(running)
        if found is not None:
            incumbent.prove(found.bound_s)
            if found.complete:  # another solver would find no more
                self.exhausted = True
                self.end_mixed()
            if found.solution is not None:
                self.suggested(found.solution)
        incumbent.report()
        incumbent.part = within

    def suggested(self, solution: Suggestion) -> None:
        """Take the plan that a solver suggests, with its own transfers and better ones, and small changes of it."""
        incumbent, evaluator = self.incumbent, self.incumbent.evaluator
        codes, segments, transfers = solution
        incumbent.offer(codes, segments)
        until = _after(self.parameters.small_share, self.deadline)
        found = evaluator.transferred(codes, segments, transfers, self.budget_bytes, until)
        if found is not None:
            incumbent.take(found)
        for start in (found, evaluator.schedule(codes, self.budget_bytes, segments)):
            if start is not None and not incumbent.closed:
                self.retimed(start, until)
        if not incumbent.closed:
            self.in_parts([(codes, segments)], until)

    def refuse(self, until: float) -> None:
        """Raise if the budget is below the smallest peak; otherwise start from the vector that has it."""
        incumbent = self.incumbent
        incumbent.begin("smallest peak")
        deadline = max(self.deadline, time.monotonic() + self.parameters.least_s)
        least = least_peak(incumbent.evaluator, self.space, deadline, self.budget_bytes)
        if least.peak_bytes <= self.budget_bytes:
            incumbent.offer_moves(least.codes, least.segments, max(until, deadline))
        if incumbent.best is not None:
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

    def changed(self, schedule: Schedule) -> Simpler:
        """Changes that make a schedule simpler."""
        return Simpler(self.incumbent.evaluator, self.space, self.budget_bytes, schedule)

    def simplest(self, best: Schedule) -> Schedule:
        """The simplest schedule that is slower than the best by no more than the error of its times."""
        evaluator, known = self.incumbent.evaluator, self.incumbent.known

        def beaten(found: Schedule) -> bool:
            """Whether a plan that is known is faster within the same peak."""
            others = (evaluator.schedule(codes, found.peak_bytes, segments) for codes, segments in known)
            return any(other is not None and other.step_s < found.step_s * (1 - EQUAL_S) for other in others)

        def refused(found: Schedule, instead_of: Schedule) -> bool:
            return complexity(found) > complexity(instead_of) or beaten(found)

        most_s = self.incumbent.bound_s * (1 + self.incumbent.gap)
        found = self.changed(best).within_error(self.incumbent.still, beaten, most_s, self.parameters)
        return self.descent(refused).run(found, self.soon(_after(self.parameters.small_share, self.deadline)))

    def descent(self, refused: Callable[[Schedule, Schedule], bool] | None = None) -> Descent:
        """Changes of one stage or segment that make a schedule better."""
        return Descent(self.incumbent.evaluator, self.space, self.budget_bytes, refused)

    def soon(self, until: float) -> float:
        """A time, or a moment from now if that is later."""
        return max(until, time.monotonic() + self.parameters.least_s)

    def result(self) -> Schedule:
        """Return the best schedule, without swaps that gain nothing, which no small change makes faster.

        A search that ends because its gap is small enough is polished in a share of the time that it leaves.
        """
        incumbent = self.incumbent
        assert incumbent.best is not None
        until = _after(self.parameters.small_share, self.deadline) if incumbent.closed else self.deadline
        if not incumbent.optimal:
            if not self.tried_patterns:
                self.patterns(until)
            self.polish(until)
        if incumbent.lazy is not None:
            incumbent.lazy = self.changed(incumbent.lazy).without_useless(self.deadline)
            incumbent.best = min(incumbent.lazy, incumbent.best, key=key)
        if not incumbent.optimal:
            self.transfers(until)
            incumbent.take(self.descent().run(incumbent.best, self.soon(until)))
        incumbent.bound_s = incumbent.rounded(incumbent.bound_s, incumbent.best)
        incumbent.report("done")
        return incumbent.best


def _exactly(nbytes: int, other: int) -> str:
    """`nbytes` as text, with every digit where rounding would hide the difference to `other`."""
    text = format_bytes(nbytes)
    return f"{text} ({nbytes} bytes)" if text == format_bytes(other) and not text.endswith(" B") else text
