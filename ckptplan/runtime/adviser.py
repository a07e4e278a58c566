"""The interface through which a running plan uses planning code, which has the profile and can solve."""

from __future__ import annotations

from typing import Any, Protocol

from ckptplan.core.measured import StageTimes
from ckptplan.core.page import Page
from ckptplan.core.plan import Plan
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep


class Adviser(Protocol):
    """Has the profile of the applied plan and can solve again (implemented by `ckptplan.planning.adviser`)."""

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int] | None:
        """Return planned bytes at a stage's start and at its peak (`stage=None`: the last glue); None if not known."""

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """Return the predicted times of each stage, in the form in which a running step reports them."""

    def drawn(self, plan: Plan) -> DrawnStep:
        """Return the predicted step, as spans and bytes over time."""

    def report(self, plan: Plan, stats: object, **options: Any) -> Page:
        """Return the page of `plan`, with what was measured in training; options as of `Plan.report`."""
