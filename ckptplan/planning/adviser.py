"""Corrects the profile of an applied plan by what was measured, and solves again. No torch."""

from __future__ import annotations

from dataclasses import replace

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.measured import Measured, StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep
from ckptplan.planning.job import Job
from ckptplan.referee import simulate
from ckptplan.report.refine import corrected, drawn, stage_times
from ckptplan.report.shortage import corrections, planned_bytes, told


class Adviser:
    """Knows the profile of what is applied, as corrected so far (`runtime.handle.Adviser`)."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def job(self) -> Job:
        """The profile as corrected so far, and the limits."""
        return self._job

    def turn_to(self, job: Job) -> None:
        """A plan of another profile is applied from now on."""
        self._job = job

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
        """Bytes at the start and at the worst moment of a stage."""
        return planned_bytes(self._job.profile, plan, phase, stage)

    def replan(self, plan: Plan, shortage: Shortage) -> Plan:
        """The fastest plan of the corrected profile.

        Raises
        ------
        InfeasibleBudgetError
            If none fits.
        """
        refused: list[InfeasibleBudgetError] = []
        for correction in corrections(self._job.profile, plan, shortage):
            job = replace(self._job, profile=correction.profile)
            try:
                leaner = job.solved(correction.limit_bytes)
            except InfeasibleBudgetError as error:
                refused.append(error)
                if correction.leaner_than_bytes is None or error.min_peak_bytes >= correction.leaner_than_bytes:
                    continue
                leaner = job.solved(error.min_peak_bytes)
            self._job = replace(job, profile=correction.means or correction.profile)
            return told(leaner, correction, plan)
        raise refused[0]

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """What each stage is to take, told as a running step tells it."""
        return stage_times(self._job.profile, plan)

    def drawn(self, plan: Plan) -> DrawnStep:
        """The step as it is to run."""
        return drawn(self._job.profile, plan)

    def refined(self, plan: Plan, measured: Measured) -> tuple[Plan, Plan]:
        """The fastest plan found by what was measured, and `plan` with the predictions that this gives.

        Raises
        ------
        InfeasibleBudgetError
            If none fits.
        """
        job = replace(self._job, profile=corrected(self._job.profile, plan, measured))
        # What the allocator needs beyond tensors isn't known of another plan; taken to be as much as of this.
        slack = 0 if plan.reserved_bytes is None else max(plan.reserved_bytes - plan.peak_bytes, 0)
        limit = max(plan.budget_bytes - slack, 1)
        found = job.solved(limit)
        timeline = simulate(job.profile, plan)
        told = replace(
            plan,
            peak_bytes=timeline.peak_bytes,
            step_s=timeline.makespan_s,
            baseline_step_s=job.profile.baseline_step_s,
            lower_bound_s=min(found.lower_bound_s, timeline.makespan_s),
            status="feasible",
            space=found.space,
            forward_peak_bytes=timeline.forward_peak_bytes,
            between_bytes=timeline.between_bytes,
        )
        self._job = job
        if timeline.peak_bytes <= limit and timeline.makespan_s <= found.step_s:
            return replace(told, status=found.status if timeline.makespan_s == found.step_s else "feasible"), told
        return found, told
