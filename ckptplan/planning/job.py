"""What there is to plan: a profile with its limits, solved and checked by the referee and by a replay. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.link import STAGING_BYTES
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.units import GIB, format_bytes, format_seconds
from ckptplan.referee.validate import examine
from ckptplan.solving.planner import solve_profile
from ckptplan.solving.tiers import check_disk

_TIGHTENINGS = 6
PLAIN = ("keep", "swap", "recompute", "recompute+swap")
"""The options that every stage has where it can; the others of its menu are its operations' business."""


@dataclass(frozen=True, slots=True)
class Job:
    """What there is to plan, and within which limits.

    Attributes
    ----------
    profile : Profile
    limits : Limits
    replayed : callable, optional
        What a plan needs when the model is replayed with it: on CUDA by the allocator's model, elsewhere the bytes in
        tensors, three times the same. None: there is no model to replay.
    on_cuda : bool
        Whether `replayed` goes by the allocator's model.
    """

    profile: Profile
    limits: Limits
    replayed: Callable[[Plan], DeviceBytes] | None = None
    on_cuda: bool = False

    def solved(self, budget_bytes: int) -> Plan:
        """The plan for a budget; for a model, one whose replay keeps it.

        Raises
        ------
        InfeasibleBudgetError
            If none can, or none is found that does.
        CkptPlanError
            If the referee rejects a plan, or the replay of one that needs nothing exceeds the budget: defects.
        """
        limit = budget_bytes
        for attempt in range(_TIGHTENINGS + 1):
            if attempt == _TIGHTENINGS:
                limit = 1  # below every plan: what is left to try is the leanest
            try:
                plan = self._within(limit)
            except InfeasibleBudgetError as error:
                if limit == budget_bytes and not self.on_cuda:
                    raise
                return self._leanest(budget_bytes, error)
            over = self.needs(plan) - budget_bytes
            if over <= 0:
                return plan
            # The allocator's fragments, or what the chain model left out: ask for that much less. The plan then names
            # the smaller budget, which is the one its status and bound speak of.
            # What the plan left of the limit was no use to it, and giving that up changes nothing.
            limit = max(min(limit, plan.peak_bytes) - over, 1)
        raise CkptPlanError(
            f"a plan with a peak of {format_bytes(plan.peak_bytes)} needs {format_bytes(budget_bytes + over)} when the "
            f"model is replayed with it, more than the budget of {format_bytes(budget_bytes)}; please report it"
        )

    def _within(self, limit: int) -> Plan:
        return self.reserving(self.sound(solve_profile(self.profile, limit, self.limits, on_progress=self.progress)))

    def _leanest(self, budget_bytes: int, error: InfeasibleBudgetError) -> Plan:
        """The plan with the smallest peak, if the budget holds what it needs with the allocator's fragments."""
        plan = self._within(error.min_peak_bytes)
        needs = self.needs(plan)
        if needs <= budget_bytes:
            return plan
        raise InfeasibleBudgetError(
            f"budget {format_bytes(budget_bytes)} is below the {format_bytes(needs)} that the leanest plan needs, of "
            f"which {format_bytes(plan.peak_bytes)} are in tensors at its peak (stage {error.stage!r}, {error.phase}); "
            "raise the budget, or allow more actions"
            + ("; PYTORCH_ALLOC_CONF=expandable_segments:True lessens fragments" if self.on_cuda else ""),
            budget_bytes=budget_bytes,
            min_peak_bytes=needs,
            stage=error.stage,
            phase=error.phase,
        ) from error

    def reserving(self, plan: Plan) -> Plan:
        """`plan` with what the allocator will hold for it, on CUDA and where there is a model to replay."""
        if self.replayed is None or not self.on_cuda:
            return plan
        needs = self.replayed(plan)
        return replace(plan, allocated_bytes=needs.allocated_bytes, reserved_bytes=needs.reserved_bytes)

    def needs(self, plan: Plan) -> int:
        """Bytes that the budget must hold for `plan`, by its replay; 0 where there is no model to replay."""
        if plan.reserved_bytes is not None:
            return plan.reserved_bytes
        return 0 if self.replayed is None else self.replayed(plan).reserved_bytes

    def sound(self, plan: Plan) -> Plan:
        """`plan`, which the referee accepts, with what it has found besides."""
        limits = self.limits
        broken, found = examine(
            self.profile, plan, plan.budget_bytes, host_bytes=limits.host_bytes, disk_bytes=limits.disk_bytes
        )
        if broken or found is None:
            raise CkptPlanError(
                "the solver gave a plan that the referee rejects, please report it: "
                + "; ".join(f"{v.kind} {v.stage}: {v.detail}" for v in broken)
            )
        return replace(plan, forward_peak_bytes=found.forward_peak_bytes, between_bytes=found.between_bytes)

    def progress(self, part: str, best_s: float, bound_s: float) -> None:
        """Put the solver's state into words."""
        found = "no plan yet" if best_s == math.inf else f"step {format_seconds(best_s)}"
        gap = f", gap {best_s / bound_s - 1:.2%}" if bound_s and best_s != math.inf else ""
        self.limits.on_progress(f"solving ({part}): {found}{gap}")


def beside_staging(host_bytes: int, staging_bytes: int) -> int:
    """What is left of the host's limit for plans, when the disk's staging buffers have theirs.

    Raises
    ------
    InvalidInputError
        If there is less than these need.
    """
    if host_bytes < staging_bytes:
        raise InvalidInputError(
            f"host_gb={host_bytes / GIB:g} holds {format_bytes(host_bytes)}; the pinned buffers through which bytes go "
            f"to the disk need {format_bytes(staging_bytes)}; raise host_gb, or leave disk_gb out"
        )
    return host_bytes - staging_bytes


def job_of_profile(profile: Profile, limits: Limits) -> Job:
    """The job of planning a measured profile within `limits`.

    Raises
    ------
    InvalidInputError
        If the profile has no disk tier and one is wanted, or the host can't hold the disk's staging buffers.
    """
    check_disk(profile, limits.host_bytes, limits.disk_bytes)
    # A hand-written profile is of no device, and on the CPU the host tier is a disk that needs no such buffers.
    if profile.fingerprint.device not in ("", "cpu"):
        limits = staged(limits)
    return Job(profile if limits.menus else _plain(profile), limits)


def staged(limits: Limits) -> Limits:
    """`limits` of plans, where the disk's staging buffers are taken from the host's."""
    if limits.host_bytes is None or not limits.disk_bytes:
        return limits
    return replace(limits, host_bytes=beside_staging(limits.host_bytes, STAGING_BYTES))


def _plain(profile: Profile) -> Profile:
    """`profile` without the options that choose among a stage's operations."""
    stages = (replace(s, options=tuple(o for o in s.options if o.name in PLAIN)) for s in profile.stages)
    return replace(profile, stages=tuple(stages))
