"""The seam to planning: what a running plan needs from code that knows profiles and can solve."""

from __future__ import annotations

from typing import Protocol

from ckptplan.core.measured import Measured, StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep


class Adviser(Protocol):
    """Knows the profile of the plan that is applied, and can solve again (`ckptplan.planning.adviser`)."""

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int] | None:
        """Bytes at the start and at the worst moment of a stage, None for the glue behind the last; None: not known."""

    def replan(self, plan: Plan, shortage: Shortage) -> Plan:
        """A plan that is leaner where `plan` ran short."""

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """The predicted times of each stage, in the form in which a running step reports them."""

    def drawn(self, plan: Plan) -> DrawnStep:
        """The step as it is to run."""

    def refined(self, plan: Plan, measured: Measured) -> tuple[Plan, Plan]:
        """The best plan by what was measured, and `plan` with the predictions that this gives."""
