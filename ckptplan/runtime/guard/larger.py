"""Steps that differ from the planned one: the plan is replaced before the next forward runs."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ckptplan.core.errors import CkptPlanError, RankError
from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.shapes import OnLarger


def replace_for_larger(applied: Applied, planner: OnLarger) -> None:
    """Replace an applied plan before a forward whose inputs are larger than planned, or after a step that differed."""

    def before_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Controller:
        """Return the controller that runs this forward: a new plan's if the forward needs one.

        No plan is made for a forward in evaluation mode under a plan for training: it need not have a backward.
        If no plan can be made, or none fits the budget, the former one stays applied, as a difference. Nor is one made
        while autocast holds casts of weights that an earlier forward uses in its backward, too: planning empties its
        cache, and gradients from two casts of a weight are rounded otherwise than those from one.
        """
        before, former = applied.plan, applied.controller
        differences = former.counters.differences
        if (before.fingerprint.training and not applied.model.training) or not planner.beyond(
            args, kwargs, differences.unplanned
        ):
            return former
        kind = applied.device.type
        if former.awaits_backward and torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            return former
        former.remove()
        try:
            plan, larger = planner.enlarged(before, args, kwargs, differences.unplanned, applied.optimizer)
        except BaseException as error:
            former.install()
            if not isinstance(error, CkptPlanError) or isinstance(error, RankError):  # the latter ends all ranks
                raise
            differences.note("no plan", str(error), error)
            return former
        applied.put(plan)
        if plan.stages != before.stages:
            applied.controller.counters.runs.clear()  # counted by the stage's position in the plan
        if larger is None:
            applied.returns += 1
            return applied.controller
        applied.replans += (Replan(before, plan, larger),)
        warnings.warn(f"{larger} (handle.replans has the plans)", RuntimeWarning, stacklevel=2)
        return applied.controller

    applied.before_forward = applied.controller.before_forward = before_forward
