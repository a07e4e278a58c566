"""Forwards with larger inputs than planned: the plan is replaced before they run."""

from __future__ import annotations

import warnings
from typing import Any

from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.shapes import OnLarger


class LargerInputs:
    """Checks the inputs of every forward of an applied plan, and replaces the plan if they are larger than planned."""

    def __init__(self, applied: Applied, planner: OnLarger) -> None:
        self._applied, self._planner = applied, planner
        applied.before_forward = applied.controller.before_forward = self._before_forward

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Controller:
        """Return the controller that runs this forward; that of a new plan if the inputs are larger than planned.

        Raises
        ------
        InfeasibleBudgetError
            If no plan for these inputs fits the budget. The former plan stays applied.
        PlanMismatchError
            If no plan can be made for these inputs. The former plan stays applied.
        """
        before, former = self._applied.plan, self._applied.controller
        if not self._planner.beyond(before, args, kwargs):
            return former
        former.remove()
        try:
            plan, larger = self._planner.enlarged(before, args, kwargs)
        except BaseException:
            former.install()
            raise
        self._applied.put(plan)
        if plan.stages != before.stages:
            self._applied.controller.counters.runs.clear()  # counted by the stage's position in the plan
        if former.on_backward is not None:
            self._applied.controller.at_step_begin(former.on_backward)
        if larger is None:
            self._applied.returns += 1
            return self._applied.controller
        self._applied.replans += (Replan(None, before, plan, larger),)
        warnings.warn(f"{larger} (handle.replans has the plans)", RuntimeWarning, stacklevel=2)
        return self._applied.controller
