"""New plans from the profile of an applied plan, corrected by measurements. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.late import late
from ckptplan.core.measured import Measured, StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep
from ckptplan.planning.in_flight import with_others
from ckptplan.planning.job import Job
from ckptplan.referee import simulate
from ckptplan.report.page.render import Report
from ckptplan.report.refine import corrected, drawn, stage_times
from ckptplan.report.shortage import corrections, planned_bytes, with_predictions


class Adviser:
    """Makes predictions and new plans for an applied plan (`runtime.adviser.Adviser`).

    Attributes
    ----------
    job : Job
        The profile of the applied plan with the corrections so far, and the limits.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
        """Return the predicted bytes at the start and at the peak of a stage."""
        start, peak = planned_bytes(self.job.profile, plan, phase, stage)
        return start + plan.others_bytes, peak + plan.others_bytes

    def replan(self, plan: Plan, shortage: Shortage) -> Plan:
        """Return the fastest plan of the profile corrected by a shortage.

        Raises
        ------
        InfeasibleBudgetError
            If none fits.
        """
        refused: list[InfeasibleBudgetError] = []
        for correction in corrections(self.job.profile, plan, shortage):
            job = replace(self.job, profile=correction.profile)
            try:
                leaner = job.solved(correction.limit_bytes)
            except InfeasibleBudgetError as error:
                refused.append(error)
                if correction.leaner_than_bytes is None or error.min_peak_bytes >= correction.leaner_than_bytes:
                    continue
                leaner = job.solved(error.min_peak_bytes)
            self.job = replace(job, profile=correction.means or correction.profile)
            return with_predictions(leaner, correction, plan)
        raise refused[0]

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """Return the predicted times of each stage, in the form in which a running step measures them."""
        return stage_times(self.job.profile, plan)

    def drawn(self, plan: Plan) -> DrawnStep:
        """Return the predicted step."""
        return drawn(self.job.profile, plan)

    def report(self, plan: Plan, stats: object, **options: Any) -> Report:
        """Return the page of `plan`, with what was measured in training; options as of `Plan.report`."""
        return late("reporting", "report_of_plan")(  # type: ignore[no-any-return]
            self.job.profile, plan, stats=stats, **options
        )

    def refined(self, plan: Plan, measured: Measured) -> tuple[Plan, Plan]:
        """Return the fastest plan of the profile corrected by measurements, and `plan` with corrected predictions.

        Raises
        ------
        InfeasibleBudgetError
            If none fits.
        """
        job = replace(self.job, profile=corrected(self.job.profile, plan, measured))
        # Another plan's rounding and fragments aren't known; they are assumed to be those of this plan.
        limit = plan.tensor_budget_bytes
        found = job.solved(limit)
        timeline = simulate(job.profile, plan)
        before = replace(
            plan,
            peak_bytes=timeline.peak_bytes,
            step_s=timeline.makespan_s,
            baseline_step_s=job.profile.baseline_step_s,
            lower_bound_s=min(found.lower_bound_s, timeline.makespan_s),
            status="feasible",
            space=found.space,
        )
        before = with_others(job.profile, before, timeline)
        if plan.reserved_bytes is not None:
            found, before = (
                replace(each, reserved_bytes=each.peak_bytes + plan.fragment_bytes).within(
                    plan.budget_bytes, job.profile.baseline_step_s
                )
                for each in (found, before)
            )
        self.job = job
        if before.needed_bytes <= limit and timeline.makespan_s <= found.step_s:
            return replace(before, status=found.status if timeline.makespan_s == found.step_s else "feasible"), before
        return found, before
