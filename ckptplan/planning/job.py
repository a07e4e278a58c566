"""A profile with its limits, solved for a budget; plans are checked by the referee and by a replay. No torch.

NOTE [Fragments]
A plan with a smaller peak in tensors may reserve more memory: the blocks that a swap frees in forward, or a segment
after its sweep, are too small for the larger tensors at the peak. So if fragments take the best plan beyond the budget,
its storages leave as early and return as late as its step time allows (points.py). Plans that swap nothing and
recompute stage by stage are searched as well, and the faster one is returned. If neither fits, those that recompute
whole stages are tried. Which of several equal stages saves more makes a difference, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptplan.core.checks import MOST_BYTES
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.link import STAGING_BYTES
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.option import DISCARD, Option
from ckptplan.core.plan import Plan, saved_bytes
from ckptplan.core.profile import Profile
from ckptplan.core.progress import Message, limited, search_state
from ckptplan.core.request import Limits
from ckptplan.core.resident import ACTIVATIONS, KINDS, PARTS
from ckptplan.core.schedule import EQUAL_S
from ckptplan.core.stays import what_stays
from ckptplan.core.units import GIB, format_bytes
from ckptplan.planning.by_rules import SHARE, examined, plans_by_rules
from ckptplan.planning.points import away_longest
from ckptplan.referee.simulate import simulate
from ckptplan.solving.frontier import smallest_within
from ckptplan.solving.peak import nothing_fits, plan_space_of
from ckptplan.solving.planner import OnProgress, smallest_peak, solve_profile
from ckptplan.solving.room import Room

_REORDERED_EXCESS = 0.05  # share of the budget above which another order of decisions isn't tried: it gains less
_REST = 0.01  # share of the budget that may stay unused before another limit is tried
_TIGHTENINGS = 6  # attempts with a smaller limit before the plan with the smallest peak is tried
_CLOSE = 0.01  # rules whose steps are longer by up to this share plan once more, within the peak of the solver's plan
_HINT_S = 2.0  # time limit of a search for a hint in an error's text
_RAISES = 3  # times that a budget near the smallest peak is raised to the smallest one that a failed search names
PLAIN = ("keep", "swap", "recompute", "recompute+swap", DISCARD)
"""Options on whole stages, beside those that move residents; others choose among the stage's operations."""


@dataclass(frozen=True, slots=True)
class Job:
    """A profile to plan, and the limits of its plans.

    Attributes
    ----------
    profile : Profile
    limits : Limits
    replayed : callable, optional
        Function from a plan to its bytes in a replay of the model: on CUDA by the allocator's model, on other devices
        the bytes in tensors for each field. None: there is no model to replay.
    on_cuda : bool
        Whether `replayed` uses the allocator's model.
    library_bytes : int
        Bytes of the cuBLAS workspaces that each computing thread has under every plan. 0: not known.
    more : tuple of Profile
        Variants of the profile with more and more of its frozen weights away between steps as well.
    start : (Plan, float), optional
        A plan to begin with, and a lower bound for the budget that is asked for, and so for smaller ones.
    """

    profile: Profile
    limits: Limits
    replayed: Callable[[Plan], DeviceBytes] | None = None
    on_cuda: bool = False
    library_bytes: int = 0
    more: tuple[Profile, ...] = ()
    start: tuple[Plan, float] | None = None

    @staticmethod
    def of(measured: Profile, limits: Limits) -> Job:
        """Return the job of planning a measured profile whose storages may move as the limits say."""
        found = measured.offloading(limits.offload)
        more = [measured.offloading(limits.offload, parts) for parts in range(1, PARTS + 1) if found is not measured]
        # With few weights that may be away, or none, some variants equal the ones before.
        more = [p for p, before in zip(more, (found, *more), strict=False) if p.resident_bytes < before.resident_bytes]
        profiles = [found, *more] if limits.menus else list(map(_plain, (found, *more)))
        return Job(profiles[0], limits, more=tuple(profiles[1:]))

    @property
    def leanest(self) -> Job:
        """The job in which most weights are away between steps, which has the smallest peak."""
        return replace(self, profile=self.more[-1], more=()) if self.more else self

    def each(self, limits: Limits) -> Iterator[Job]:
        """Yield the job, and those in which more and more weights are away, which share the time limit.

        The plans that they hand out have the bound of all of them: the step with everything kept.
        """
        limits = replace(limits, time_limit_s=limits.time_limit_s / (1 + len(self.more)))
        on_plan, fastest_s = limits.on_plan, self.profile.fastest_step_s
        if self.more and on_plan is not None:
            limits = replace(limits, on_plan=lambda plan: on_plan(_bounded_by(plan, fastest_s)))
        for profile in (self.profile, *self.more):
            yield replace(self, profile=profile, limits=limits, more=())

    def solved(self, budget_bytes: int) -> Plan:
        """Return the plan for a budget; for a model, one whose replay stays within it.

        Which share of the weights is away between steps is found without replays; the bound is one for all shares.

        Raises
        ------
        InfeasibleBudgetError
            If there is none, or none is found.
        CkptPlanError
            If the referee rejects a plan, or the replays of all plans exceed the budget: a defect of this package.
        """
        if not self.more:
            return self._solved(budget_bytes)
        surveyed, bounds = self._surveyed(budget_bytes)
        fastest = min(surveyed, key=lambda number: surveyed[number][0].step_s, default=None)
        limits, best = self._told_of_shares(bounds), None
        # The fastest first, then those whose bounds are below its step.
        for number in sorted(surveyed, key=lambda number: (number != fastest, bounds[number])):
            plan, job = surveyed[number]
            if best is not None and best.step_s <= bounds[number] * (1 + limits.gap):
                continue
            if number != fastest:
                limits = replace(limits, time_limit_s=self.limits.time_limit_s / (len(surveyed) - 1))
            with contextlib.suppress(InfeasibleBudgetError):  # the allocator's fragments may exceed the budget
                plan = replace(job, limits=limits, start=(plan, bounds[number]))._solved(budget_bytes)
                if not self._fits_the_host(plan):
                    continue
                if plan.budget_bytes == budget_bytes:
                    bounds[number] = max(bounds[number], plan.lower_bound_s)
                best = plan if best is None or plan.step_s < best.step_s else best
        if best is not None:
            return best.within(best.budget_bytes, min(bounds))
        plan = self.leanest._solved(budget_bytes)
        return plan if self._fits_the_host(plan) else replace(self, more=())._solved(budget_bytes)

    def _told_of_shares(self, bounds: Sequence[float]) -> Limits:
        """Return the limits with an `on_plan` that gets a share's plans with the bound of all shares, if they fit."""
        on_plan = self.limits.on_plan

        def hand_out(plan: Plan) -> None:
            if on_plan is not None and self._fits_the_host(plan):
                on_plan(plan.within(plan.budget_bytes, min(bounds)))

        return self.limits if on_plan is None else _each_better(replace(self.limits, on_plan=hand_out))

    def _surveyed(self, budget_bytes: int) -> tuple[dict[int, tuple[Plan, Job]], list[float]]:
        """Return a plan, if one is found, and a bound for each share of the weights, without replays.

        Where a plan is as fast as keeping everything, further shares have no plan: none of theirs is faster.
        """
        fastest_s, until = self.profile.fastest_step_s, time.monotonic() + self.limits.time_limit_s
        jobs = list(self.each(replace(self.limits, on_plan=None)))
        found, bounds = dict[int, tuple[Plan, Job]](), [fastest_s] * len(jobs)
        for number, job in enumerate(jobs):
            # Shares that are soon known to be infeasible leave the others more time.
            left_s = max((until - time.monotonic()) / (len(jobs) - number), job.limits.time_limit_s * SHARE)
            job = replace(job, limits=replace(job.limits, time_limit_s=left_s))
            # Times count as exact, so that no faster plan is given up for a simpler one before the last search.
            exact = replace(job.profile, step_error=0.0)
            search = functools.partial(solve_profile, exact, limits=job.limits, on_progress=job._progress())
            try:
                plan = search(budget_bytes)
            except InfeasibleBudgetError as error:
                if job._is_infeasible(budget_bytes, error):
                    bounds[number] = math.inf
                else:
                    with contextlib.suppress(InfeasibleBudgetError):  # a bound for more bytes holds for fewer
                        bounds[number] = _from(error.min_peak_bytes, search).lower_bound_s
                continue
            found[number], bounds[number] = (plan, job), plan.lower_bound_s
            if plan.step_s <= fastest_s * (1 + self.limits.gap):
                break
        return found, bounds

    def _is_infeasible(self, budget_bytes: int, error: InfeasibleBudgetError) -> bool:
        """Whether it is proven that no plan fits a budget for which none was found."""
        if (error.min_peak_bound_bytes or 0) > budget_bytes:
            return True
        limits = self.limits
        room = Room.of(self.profile, limits)
        space = plan_space_of(room.movable(self.profile), limits.actions, limits.segments)
        return nothing_fits(space, budget_bytes, room.total_bytes, time.monotonic() + limits.time_limit_s)

    def _fits_the_host(self, plan: Plan) -> bool:
        """Whether the host has room for what a plan moves, and for weights that are away between steps alone."""
        most = self.limits.host_bytes
        return most is None or plan.host_bytes + sum(plan.waiting_bytes) <= most

    def _solved(self, budget_bytes: int) -> Plan:
        """Return the plan for a budget with the weights of `profile`; raise what `solved` does.

        Where fragments take the best plan beyond the budget, others are tried (see NOTE [Fragments]).
        """
        attempts: list[Plan] = []
        failures: list[InfeasibleBudgetError] = []
        plan: Plan | None = None
        try:
            plan = self._replayed_within(budget_bytes, attempts)
        except InfeasibleBudgetError as error:
            failures.append(error)
        # A bound for as many bytes of tensors holds for all plans within as many reserved bytes.
        bound_s, space = self.profile.fastest_step_s, None
        if attempts:
            bound_s, space = attempts[0].lower_bound_s, attempts[0].space
        fragmented = self.on_cuda and plan is not None and plan.budget_bytes < budget_bytes
        if plan is not None and fragmented:
            plan = plan.within(budget_bytes, bound_s, space)
            if self.limits.on_plan is not None:  # should the next search be interrupted
                self.limits.on_plan(plan)
        handed_out = plan
        if plan is None or (fragmented and plan.step_s > bound_s * (1 + self.limits.gap)):
            for simpler in self._leaving_fewer_fragments():
                if plan is not None and simpler.profile is not self.profile:
                    break
                try:
                    found = simpler._replayed_within(budget_bytes, attempts).within(budget_bytes, bound_s, space)
                except InfeasibleBudgetError as error:
                    failures.append(error)
                else:
                    plan = found if plan is None or found.step_s < plan.step_s else plan
        if plan is None:
            try:
                raise self._infeasible(budget_bytes, attempts, failures)
            finally:
                failures.clear()  # their frames refer to this one
        if plan is not handed_out and self.limits.on_plan is not None:
            self.limits.on_plan(plan)
        return plan

    def with_weights(self, least_bytes: int) -> str:
        """Return a hint for an error: the smallest peak if weights might move as well; empty if that isn't smaller."""
        profile = self.profile
        if profile.offload != ACTIVATIONS or not profile.residents or "swap" not in self.limits.actions:
            return ""
        limits = replace(self.limits, time_limit_s=min(self.limits.time_limit_s, _HINT_S), on_plan=None)
        found = smallest_peak(profile.offloading(KINDS, PARTS), limits).peak_bytes
        return f"; with offload='all' it is {format_bytes(found)} in tensors" if found < least_bytes else ""

    def what_stays(self, error: InfeasibleBudgetError) -> str:
        """Return a hint for an error: the tensors of the binding step that no plan can move; empty if they are few."""
        stays = what_stays(self.leanest.profile, error.stage, error.phase, error.min_peak_bytes)
        return f". Of it, no plan can move: {stays}" if stays else ""

    def solved_share(self, share: float, most_bytes: int | None = None) -> Plan:
        """Return the plan for a share of the way from the smallest peak to everything kept, and at most `most_bytes`.

        Raises
        ------
        InfeasibleBudgetError
            If `most_bytes` is below the smallest peak.
        """
        range_bytes = self.range_bytes(self.limits.time_limit_s)
        least, most = self.needed_range_bytes(range_bytes)
        budget_bytes = least + int(share * (most - least))
        if most_bytes is not None and budget_bytes > most_bytes:
            return self.solved(most_bytes)
        plan = _from(budget_bytes, self.solved, most_bytes)
        least = min(range_bytes[0], plan.peak_bytes)
        return replace(plan, budget_share=share, least_peak_bytes=least, most_peak_bytes=range_bytes[1])

    def smallest_within(self, max_overhead: float) -> Plan:
        """Return the plan with the smallest peak within a slowdown, for any share of weights away between steps."""
        found: list[Plan] = []
        for each in self.each(self.limits):
            try:
                found.append(each.sound(smallest_within(each.profile, max_overhead, each.handing_out)))
            except InfeasibleBudgetError:  # fetching the weights alone exceeds the slowdown
                if not found:
                    raise
        plan = min(found, key=lambda plan: plan.peak_bytes)
        bounds = [plan.peak_bound_bytes for plan in found if plan.peak_bound_bytes is not None]
        # A bound for more bytes holds for fewer, and the shares without a plan are slower.
        return _bounded_by(plan, min(plan.lower_bound_s for plan in found), min(bounds, default=None))

    def _infeasible(
        self, budget_bytes: int, attempts: Sequence[Plan], failures: Sequence[InfeasibleBudgetError]
    ) -> InfeasibleBudgetError:
        """Return the failure that names the smallest budget which works, counting the plans that were replayed."""
        error = min(failures, key=lambda failure: failure.min_peak_bytes)
        # The bounds of the later failures hold only for fewer kinds of plans.
        error.min_peak_bound_bytes = failures[0].min_peak_bound_bytes
        least = min(attempts, key=self.needs, default=None)
        if least is None or not self.on_cuda or (needs := self.needs(least)) >= error.min_peak_bytes:
            return error
        return self._too_small(budget_bytes, needs, least.peak_bytes, error)

    def _leaving_fewer_fragments(self) -> Iterator[Job]:
        """Yield, on CUDA, the job without swaps and segments, and that of whole stages (see NOTE [Fragments])."""
        actions = tuple(action for action in self.limits.actions if action != "swap")
        if not self.on_cuda or self.replayed is None or "recompute" not in actions:
            return
        # Without `on_plan`: each of these searches begins with plans slower than those already handed out.
        limits = replace(self.limits, actions=actions, segments=False, on_plan=None)
        still = replace(self, limits=limits, start=None)
        if actions != self.limits.actions or self.limits.segments:
            yield still
        yield replace(still, profile=_plain(self.profile))

    def _replayed_within(self, budget_bytes: int, attempts: list[Plan]) -> Plan:
        """Return a plan for a budget whose replay stays within it; raise what `solved` does.

        The plans that are replayed are added to `attempts`: the first is for as large a budget in tensors.
        """
        limit, limits = budget_bytes, self.handing_out
        former: tuple[int, int] | None = None
        for attempt in range(_TIGHTENINGS + 1):
            if attempt == _TIGHTENINGS:
                limit = 1  # below every peak, so that the plan with the smallest peak is tried
            try:
                plan = self._within(limit, limits)
            except InfeasibleBudgetError as error:
                if limit == budget_bytes and not self.on_cuda:
                    raise
                return self._leanest(budget_bytes, error, limits)
            attempts.append(plan)
            fitting, over = self._fitting(plan, budget_bytes)
            if fitting is not None:
                return fitting if former is None else self._using_the_rest(fitting, limit, former, budget_bytes)
            former = limit, over
            # Whole workspaces exist under every plan and leave less of the budget for tensors. Other overhead, such as
            # rounding, differs between plans, so no bound may count it.
            beside = self._workspace_bytes(plan)
            if limit == budget_bytes and beside and plan.peak_bytes > budget_bytes - beside:
                attempts.clear()  # its bound is for the larger limit
                limit = max(budget_bytes - beside, 1)
                continue
            # The excess is fragments of the allocator, or an error of the chain model: reduce the limit by it. The plan
            # then has the smaller budget, to which its status and bound refer. Bytes of the limit that the plan didn't
            # use are dropped first, since a limit between peak and budget has the same plan.
            limit = max(min(limit, plan.peak_bytes) - over, 1)
        raise CkptPlanError(
            f"a plan with a peak of {format_bytes(plan.peak_bytes)} needs {format_bytes(budget_bytes + over)} in a "
            f"replay of the model, more than the budget of {format_bytes(budget_bytes)}; please report it"
        )

    def _workspace_bytes(self, plan: Plan) -> int:
        """Return the bytes of the workspaces that a plan has beside its tensors: one for forward, one for backward."""
        if not self.library_bytes or plan.allocated_bytes is None:
            return 0
        return min(max(plan.allocated_bytes - plan.peak_bytes, 0) // self.library_bytes, 2) * self.library_bytes

    def _fitting(self, plan: Plan, budget_bytes: int) -> tuple[Plan | None, int]:
        """Return `plan`, or an equally fast one with other fragments, whose replay stays within a budget, or None.

        Second is the least number of bytes by which the replays exceed the budget; 0 or less for a plan that fits.
        """
        if self.replayed is not None:
            self.limits.on_progress("replaying the plan on the model")
        over = self.needs(plan) - budget_bytes
        if over <= 0:
            return plan, over
        for other in self._with_other_fragments(plan, over, budget_bytes):
            over = min(over, self.needs(other) - budget_bytes)
            if over <= 0:
                return other, over
        return None, over

    def _using_the_rest(self, plan: Plan, limit: int, former: tuple[int, int], budget_bytes: int) -> Plan:
        """Return `plan`, found for a smaller limit, or a faster one for a limit between that and the `former` one.

        `former` also has the bytes by which its plan exceeded the budget. One more plan is tried at the limit where a
        straight line through the two excesses is 0.
        """
        if not self.on_cuda or (rest := budget_bytes - self.needs(plan)) <= budget_bytes * _REST:
            return plan
        between = limit + (former[0] - limit) * rest // (former[1] + rest)
        try:
            larger, _ = self._fitting(self._within(between, self.handing_out), budget_bytes)
        except InfeasibleBudgetError:  # another search doesn't always find the smallest peak again in its time
            return plan
        return plan if larger is None or larger.step_s >= plan.step_s else larger

    def _with_other_fragments(self, plan: Plan, over_bytes: int, budget_bytes: int) -> Iterator[Plan]:
        """Yield, on CUDA, plans as fast and as small as `plan`, with other fragments (see NOTE [Fragments]).

        If `plan` moves storages, they leave and return at other points. Otherwise the decisions of stages of one kind
        are reordered by the bytes that they save, in both directions.
        """
        if not self.on_cuda:
            return
        if any(choice.transfers for choice in plan.choices):
            moved = away_longest(self.profile, plan, time.monotonic() + self.limits.time_limit_s)
            if moved.choices != plan.choices:
                yield self.reserving(self.sound(self._examined(moved)))
        elif not plan.segments and over_bytes <= budget_bytes * _REORDERED_EXCESS:
            yield from self._in_other_orders(plan)

    def _in_other_orders(self, plan: Plan) -> Iterator[Plan]:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for index, stage in enumerate(self.profile.stages):
            kinds.setdefault((stage.kind, *(option.name for option in stage.options)), []).append(index)
        for leanest_last in (True, False):
            choices = list(plan.choices)
            for places in kinds.values():
                held = {i: sum(plan.saved_bytes[i]) for i in places}
                order = sorted(places, key=held.__getitem__, reverse=leanest_last)
                for place, chosen in zip(places, order, strict=True):
                    choices[place] = plan.choices[chosen]
            other = replace(plan, choices=tuple(choices), saved_bytes=saved_bytes(self.profile, choices))
            other = self._examined(other)
            if other.peak_bytes <= plan.budget_bytes and other.step_s <= plan.step_s * (1 + EQUAL_S):
                yield self.reserving(self.sound(other))

    def _examined(self, plan: Plan) -> Plan:
        """Return a plan whose decisions were changed, with its new peak and step time."""
        found = simulate(self.profile, plan)
        return replace(plan, peak_bytes=found.peak_bytes, step_s=max(found.makespan_s, plan.lower_bound_s))

    def _within(self, limit: int, limits: Limits) -> Plan:
        return self.reserving(self.sound(self._unbeaten(limit, _each_better(limits))))

    def _unbeaten(self, limit: int, limits: Limits) -> Plan:
        """Return the plan of a search, or of a second one from plans of published rules that are faster."""
        plan = solve_profile(self.profile, limit, limits, start=self.start, on_progress=self._progress())
        if plan.status == "optimal":
            return plan
        self.limits.on_progress("comparing the plan with published rules")
        quick = plans_by_rules(self.profile, limit, limits)
        close = [other.planner for other in quick if other.step_s < plan.step_s * (1 + _CLOSE)]
        within_peak = plans_by_rules(self.profile, plan.peak_bytes, limits, close)
        faster = [other for other in (*quick, *within_peak) if other.step_s < plan.step_s * (1 - EQUAL_S)]
        if not faster:
            return plan
        # With this gap the search ends at once, so that only these plans are improved.
        limits = replace(limits, gap=max(limits.gap, plan.gap), time_limit_s=SHARE * limits.time_limit_s)
        start = plan, plan.lower_bound_s
        return solve_profile(self.profile, limit, limits, start=start, known=faster)

    @property
    def handing_out(self) -> Limits:
        """The limits, with an `on_plan` that gets plans which the referee has accepted."""
        on_plan = self.limits.on_plan
        return self.limits if on_plan is None else replace(self.limits, on_plan=lambda plan: on_plan(self.sound(plan)))

    def _leanest(self, budget_bytes: int, error: InfeasibleBudgetError, limits: Limits) -> Plan:
        """Return the plan with the smallest peak, if it fits the budget with the allocator's fragments."""
        plan = self._within(error.min_peak_bytes, limits)
        over = self.needs(plan) - budget_bytes
        if over > 0:
            plan = min((plan, *self._with_other_fragments(plan, over, budget_bytes)), key=self.needs)
        needs = self.needs(plan)
        if needs <= budget_bytes:
            return plan
        raise self._too_small(budget_bytes, needs, plan.peak_bytes, error) from error

    def _too_small(
        self, budget_bytes: int, needs: int, tensor_bytes: int, error: InfeasibleBudgetError
    ) -> InfeasibleBudgetError:
        """Return the error for a budget below the bytes of the plan that needs the least, as far as is known."""
        return InfeasibleBudgetError(
            f"budget {format_bytes(budget_bytes)} is below the {format_bytes(needs)} that the leanest plan needs, of "
            f"which {format_bytes(tensor_bytes)} are in tensors at its peak (stage {error.stage!r}, "
            f"{error.phase}); raise the budget, or allow more actions"
            + ("; PYTORCH_ALLOC_CONF=expandable_segments:True lessens fragments" if self.on_cuda else ""),
            budget_bytes=budget_bytes,
            min_peak_bytes=needs,
            min_peak_bound_bytes=error.min_peak_bound_bytes,
            stage=error.stage,
            phase=error.phase,
        )

    def kept_peak_bytes(self, time_limit_s: float) -> int:
        """Return the peak with everything kept."""
        limits = replace(self.limits, time_limit_s=time_limit_s, on_plan=None)
        return solve_profile(self.profile, MOST_BYTES - 1, limits).peak_bytes

    def range_bytes(self, time_limit_s: float) -> tuple[int, int]:
        """Return the smallest peak found within a time, and the peak with everything kept."""
        limits = replace(self.limits, time_limit_s=time_limit_s, on_plan=None)
        self.limits.on_progress(limited("looking for the smallest peak", time_limit_s))
        return smallest_peak(self.leanest.profile, limits).peak_bytes, self.kept_peak_bytes(time_limit_s)

    def needed_range_bytes(self, range_bytes: tuple[int, int]) -> tuple[int, int]:
        """Return the bytes that the plans with these two peaks need on the device."""
        if self.replayed is None:
            return range_bytes
        limits = replace(self.limits, on_plan=None)
        least = _from(range_bytes[0], lambda nbytes: self.leanest._within(nbytes, limits))
        most = self._within(range_bytes[1], limits)
        return max(least.peak_bytes, self.needs(least)), max(most.peak_bytes, self.needs(most))

    def reserving(self, plan: Plan) -> Plan:
        """Return `plan` with the allocator's predicted bytes, on CUDA and if there is a model to replay."""
        if self.replayed is None or not self.on_cuda:
            return plan
        needs = self.replayed(plan)
        return replace(plan, allocated_bytes=needs.allocated_bytes, reserved_bytes=needs.reserved_bytes)

    def needs(self, plan: Plan) -> int:
        """Return the bytes of `plan` in its replay; 0 if there is no model to replay."""
        if plan.reserved_bytes is not None:
            return plan.reserved_bytes
        return 0 if self.replayed is None else self.replayed(plan).reserved_bytes

    def sound(self, plan: Plan) -> Plan:
        """Return `plan`, if the referee accepts it, with the peak of its forward and the bytes between the passes."""
        broken, found = examined(self.profile, plan, self.limits)
        if broken or found is None:
            raise CkptPlanError(
                "the referee rejects the solver's plan, please report it: "
                + "; ".join(f"{v.kind} {v.stage}: {v.detail}" for v in broken)
            )
        return replace(plan, forward_peak_bytes=found.forward_peak_bytes, between_bytes=found.between_bytes)

    def _progress(self) -> OnProgress:
        """Return a function that reports the state of a search which begins now."""
        began_s, limits = time.monotonic(), self.limits

        def report(part: str, best_s: float, bound_s: float, peak_bytes: int | None) -> None:
            what = f"solving ({part}): {search_state(best_s, bound_s, peak_bytes)}"
            limits.on_progress(Message(what, began_s=began_s, limit_s=limits.time_limit_s))

        return report


def _bounded_by(plan: Plan, bound_s: float, peak_bound_bytes: int | None = None) -> Plan:
    """Return `plan` with bounds that hold for all shares of the weights, in place of its own share's."""
    return replace(plan.within(plan.budget_bytes, bound_s), peak_bound_bytes=peak_bound_bytes)


def _each_better(limits: Limits) -> Limits:
    """Return `limits` for several searches, whose `on_plan` gets what is faster, or proven better, than all before."""
    on_plan, best = limits.on_plan, (math.inf, 0.0)
    if on_plan is None:
        return limits

    def hand_out(plan: Plan) -> None:
        nonlocal best
        if (plan.step_s, -plan.lower_bound_s) < best:
            best = plan.step_s, -plan.lower_bound_s
            on_plan(plan)

    return replace(limits, on_plan=hand_out)


def _from(budget_bytes: int, solve: Callable[[int], Plan], most_bytes: int | None = None) -> Plan:
    """Return the plan for a budget near the smallest peak, or for the least budget above it for which one is found.

    Another search doesn't always find the smallest peak again in its time.

    Raises
    ------
    InfeasibleBudgetError
        If that is beyond `most_bytes`.
    """
    for _ in range(_RAISES):
        try:
            return solve(budget_bytes)
        except InfeasibleBudgetError as error:
            budget_bytes = max(error.min_peak_bytes, budget_bytes + 1)
            if most_bytes is not None and budget_bytes > most_bytes:
                raise
    return solve(budget_bytes)


def job_of_profile(profile: Profile, limits: Limits) -> Job:
    """Return the job of planning a measured profile within `limits`.

    Raises
    ------
    InvalidInputError
        If `limits` has a disk and the profile doesn't, or the host's limit is below the disk's staging buffers.
    """
    Room.of(profile, limits)  # raises without a disk to use
    # A hand-written profile has no device, and on the CPU the host tier is a disk without staging buffers.
    if profile.fingerprint.device not in ("", "cpu"):
        limits = staged(limits)
    return Job.of(profile, limits)


def staged(limits: Limits) -> Limits:
    """Return `limits` with the disk's staging buffers subtracted from the host's limit.

    Raises
    ------
    InvalidInputError
        If the limit is smaller than the buffers.
    """
    host = limits.host_bytes
    if host is None or not limits.disk_bytes:
        return limits
    if host < STAGING_BYTES:
        raise InvalidInputError(
            f"host_gb={host / GIB:g} is {format_bytes(host)}; the pinned buffers for copies to the disk need "
            f"{format_bytes(STAGING_BYTES)}; raise host_gb, or leave disk_gb out"
        )
    return replace(limits, host_bytes=host - STAGING_BYTES)


def _is_plain(option: Option) -> bool:
    return option.name in PLAIN or set(option.name.split("+")) <= {*KINDS}


def _plain(profile: Profile) -> Profile:
    """Return `profile` without the options that choose among a stage's operations."""
    stages = (replace(s, options=tuple(filter(_is_plain, s.options))) for s in profile.stages)
    return replace(profile, stages=tuple(stages))
