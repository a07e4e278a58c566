"""Predictions from the profile of an applied plan. Imports no torch."""

from __future__ import annotations

from typing import Any

from ckptplan.core.late import late
from ckptplan.core.measured import StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep
from ckptplan.planning.job import Job
from ckptplan.report.page.render import Report
from ckptplan.report.predicted import drawn, planned_bytes, stage_times


class SolverAdviser:
    """Makes predictions for an applied plan (`runtime.adviser.Adviser`).

    Attributes
    ----------
    job : Job
        The profile of the applied plan, and the limits.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
        """Return the predicted bytes at the start and at the peak of a stage."""
        return planned_bytes(self.job.profile, plan, phase, stage)

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
