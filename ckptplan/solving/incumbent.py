"""The best plan and the best bound so far, and the reports on them to the caller of a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.plan import OPTIMAL_GAP, Plan, plan_of
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.resident import ACTIVATIONS, Kind
from ckptplan.solving.cost import KEEP, Evaluator, Schedule, Segments
from ckptplan.solving.parameters import DEFAULT, ROUNDING, Parameters
from ckptplan.solving.peak import MinPeak

OnProgress = Callable[[str, float, float, int | None], None]
"""Called with the part at work, the best makespan and the lower bound so far, in seconds, and the best plan's peak."""

Start = tuple[Plan | MinPeak, float]
"""A plan of the profile, which may fit, and a lower bound in seconds on those that do."""

AT_THE_HOSTS_RATE = (
    "the bound counts every copy at the rate of the host's link, also those to and from the disk, which take longer: a "
    "part of the gap is theirs"
)
"""Note of plans that use the disk."""


def plan_space(
    actions: Sequence[Action],
    *,
    segments: bool = True,
    disk: bool = False,
    offload: Sequence[Kind] = ACTIVATIONS,
) -> str:
    """Return the description of the plan space that a certificate refers to."""
    menu = "/".join(a for a in ACTIONS if a in actions)
    together = "nested segments" if segments and "recompute" in actions else "no segments"
    what = "what may move" if tuple(offload) == ACTIVATIONS else " and ".join(offload)
    moves = f", any parts of {what} in any transfers" if "swap" in actions else ""
    tiers = ", each stage's to host or disk as a whole" if disk and moves else ""
    return f"per-stage menus of {menu}, {together}{moves}{tiers}, first-in-first-out links, compute in program order"


def key(schedule: Schedule) -> tuple[float, int]:
    """Least for the best schedule: its seconds, then how many stages it doesn't keep."""
    return schedule.step_s, -schedule.codes.count(KEEP)


@dataclass(slots=True)
class Incumbent:
    """The best schedule and the best bound so far.

    Attributes
    ----------
    best : Schedule or None
        The fastest so far.
    lazy : Schedule or None
        The fastest lazy one so far, from which changes of options and segments start.
    still : Schedule or None
        The fastest so far that moves nothing.
    bound_s : float
        No plan is faster.
    known : list of tuple
        Codes and segments of plans by other rules, which must not beat the plan that is returned.
    seen : tuple or None
        Codes and segments of the last plan from which a local search at work went on.
    part : str
        The part at work.
    """

    profile: Profile
    budget_bytes: int
    limits: Limits
    evaluator: Evaluator
    on_progress: OnProgress | None = None
    parameters: Parameters = DEFAULT
    best: Schedule | None = None
    lazy: Schedule | None = None
    still: Schedule | None = None
    bound_s: float = 0.0
    known: list[tuple[Sequence[int], Segments]] = field(default_factory=list)
    seen: tuple[Sequence[int], Segments] | None = None
    part: str = ""
    _handed_out_s: float = math.inf
    _handed_bound_s: float = 0.0
    _quiet_until_s: float = field(init=False)
    _told: tuple[str, float, float, int | None] | None = None

    def __post_init__(self) -> None:
        self._quiet_until_s = time.monotonic() + self.parameters.least_s

    @property
    def gap(self) -> float:
        """The gap at which the search ends."""
        return max(OPTIMAL_GAP, self.limits.gap)

    @property
    def closed(self) -> bool:
        """Whether the best schedule is proven to be within the gap."""
        return self.best is not None and self.best.step_s <= self.bound_s * (1 + self.gap)

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no schedule is faster."""
        return self.best is not None and self.best.step_s <= self.bound_s * (1 + OPTIMAL_GAP)

    def offer(self, codes: Sequence[int], segments: Segments = ()) -> None:
        """Take this plan if it fits and is faster, or as fast with more stages kept."""
        moves = any(self.profile.stages[i].options[code].moves for i, code in enumerate(codes))
        than = self.lazy if moves else self.still
        if than is not None and self.evaluator.step_s(codes, self.budget_bytes, segments) > than.step_s:
            return
        found = self.evaluator.schedule(codes, self.budget_bytes, segments)
        if found is not None:
            if self.lazy is None or key(found) < key(self.lazy):
                self.lazy = found
            self.take(found)

    def take(self, found: Schedule) -> None:
        """Take this schedule, which fits, if it is faster, or as fast with more stages kept."""
        moves = any(choice.moves for choice in found.choices)
        if not moves and (self.still is None or found.step_s < self.still.step_s):
            self.still = found
        if self.best is None or key(found) < key(self.best):
            self.best = found
            self.report_now_and_then(found)

    def prove(self, bound_s: float) -> None:
        """Take this bound if it is better."""
        if bound_s > self.bound_s:
            self.bound_s = bound_s
            self.report_now_and_then(self.best)

    def begin_with(
        self, plan: Plan | MinPeak, bound_s: float, deadline: float, *, by_other_rules: bool = False
    ) -> None:
        """Take a plan if it fits, and a bound that holds."""
        if isinstance(plan, MinPeak):
            self.offer_moves(plan.codes, plan.segments, deadline)
        else:
            names = ({option.name: code for code, option in enumerate(s.options)} for s in self.profile.stages)
            codes = [codes.get(choice.option) for codes, choice in zip(names, plan.choices, strict=True)]
            if None not in codes:
                if by_other_rules:
                    self.known.append((codes, plan.segments))  # type: ignore[arg-type]
                self.offer(codes, plan.segments)  # type: ignore[arg-type]
                if self._fits(plan):
                    fields = (plan.step_s, plan.peak_bytes, plan.host_bytes, plan.segments, plan.disk_bytes)
                    self.take(Schedule(tuple(codes), plan.choices, *fields))  # type: ignore[arg-type]
        self.bound_s = max(self.bound_s, bound_s)

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan is within the limits."""
        room = self.evaluator.room
        if room.host_bytes is not None and plan.host_bytes > room.host_bytes:
            return False
        return plan.peak_bytes <= self.budget_bytes and plan.disk_bytes <= room.disk_bytes

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
        plan = plan_of(
            self.profile,
            best.choices,
            best.segments,
            budget_bytes=self.budget_bytes,
            peak_bytes=best.peak_bytes,
            host_bytes=best.host_bytes,
            disk_bytes=best.disk_bytes,
            step_s=best.step_s,
            lower_bound_s=self.rounded(bound_s, best),
            space=plan_space(
                limits.actions,
                segments=limits.segments,
                disk=self.evaluator.room.disk_bytes > 0,
                offload=self.evaluator.profile.offload,
            ),
            planner="ckptplan",
        )
        return replace(plan, notes=(*plan.notes, AT_THE_HOSTS_RATE)) if plan.disk_bytes else plan

    @staticmethod
    def rounded(bound_s: float, best: Schedule) -> float:
        """Return a bound, lowered to the plan's seconds if rounding took it above; the referee reports any more."""
        return min(bound_s, best.step_s) if bound_s <= best.step_s * (1 + ROUNDING) else bound_s

    def begin(self, part: str) -> None:
        """Tell the caller which part begins."""
        self.part = part
        self._tell(self.best)

    def report(self, part: str = "") -> None:
        """Tell the caller where the search stands, and hand out the best plan if it is a better one."""
        self.part = part or self.part
        self._tell(self.best)
        self.hand_out(self.best)

    def report_now_and_then(self, found: Schedule | None) -> None:
        """Report as `report` does within a part, with the best schedule that it has found, but not too often.

        A plan of 1000 stages takes 0.3 s to report: reports take a small share of the time.
        """
        begun_s = time.monotonic()
        if begun_s >= self._quiet_until_s:
            self._tell(found)
            self.hand_out(found)
            took_s = time.monotonic() - begun_s
            self._quiet_until_s = begun_s + max(self.parameters.least_s, took_s / self.parameters.small_share)

    def glance(self, codes: Sequence[int], segments: Segments) -> None:
        """Report a plan from which a local search goes on; the plan that it returns is offered later, and no worse."""
        self.seen = codes, segments
        if time.monotonic() < self._quiet_until_s:
            return
        found = self.evaluator.schedule(codes, self.budget_bytes, segments)
        if found is not None and (self.best is None or found.step_s < self.best.step_s):
            self.report_now_and_then(found)

    def interrupted(self) -> None:
        """Hand out what has been found and proven, before an interrupt ends the search."""
        if self.seen is not None:
            self.offer(*self.seen)
        self.hand_out(self.best, bounds=True)

    def _tell(self, found: Schedule | None) -> None:
        """Call `on_progress`, if there is anything new."""
        if self.on_progress is not None:
            step_s, peak_bytes = (math.inf, None) if found is None else (found.step_s, found.peak_bytes)
            state = self.part, step_s, self.bound_s, peak_bytes
            if state != self._told:
                self._told = state
                self.on_progress(*state)

    def hand_out(self, found: Schedule | None, *, bounds: bool = False) -> None:
        """Call `on_plan` with a schedule that is faster than those before, or with a better bound if `bounds` count."""
        if found is None or self.limits.on_plan is None:
            return
        bound_s = self.rounded(self.bound_s, found)
        as_fast = found.step_s == self._handed_out_s
        if found.step_s < self._handed_out_s or (bounds and as_fast and bound_s > self._handed_bound_s):
            self.limits.on_plan(self.as_plan(found, bound_s))
            self._handed_out_s, self._handed_bound_s = found.step_s, bound_s
