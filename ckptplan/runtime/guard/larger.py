"""Forwards with larger inputs than planned: the plan is replaced before they run."""

from __future__ import annotations

import warnings
from typing import Any

from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.shapes import OnLarger


def replace_for_larger(applied: Applied, planner: OnLarger) -> None:
    """Check the inputs of every forward of an applied plan, and replace the plan if they are larger than planned."""

    def before_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Controller:
        """Return the controller that runs this forward; that of a new plan if the inputs are larger than planned.

        Raises
        ------
        InfeasibleBudgetError
            If no plan for these inputs fits the budget. The former plan stays applied.
        PlanMismatchError
            If no plan can be made for these inputs. The former plan stays applied.
        """
        before, former = applied.plan, applied.controller
        if not planner.beyond(before, args, kwargs):
            return former
        former.remove()
        try:
            plan, larger = planner.enlarged(before, args, kwargs)
        except BaseException:
            former.install()
            raise
        applied.put(plan)
        if plan.stages != before.stages:
            applied.controller.counters.runs.clear()  # counted by the stage's position in the plan
        if former.on_backward is not None:
            applied.controller.at_step_begin(former.on_backward)
        if larger is None:
            applied.returns += 1
            return applied.controller
        applied.replans += (Replan(None, before, plan, larger),)
        warnings.warn(f"{larger} (handle.replans has the plans)", RuntimeWarning, stacklevel=2)
        return applied.controller

    applied.before_forward = applied.controller.before_forward = before_forward
