"""Predictions and new plans from the profile of an applied plan. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.late import late
from ckptplan.core.measured import StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep
from ckptplan.planning.job import Job
from ckptplan.report.page.render import Report
from ckptplan.report.predicted import drawn, stage_times
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
