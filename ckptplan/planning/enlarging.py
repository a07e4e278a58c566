"""New plans for forwards whose inputs are larger than the applied plan is valid for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import (
    CkptPlanError,
    InfeasibleBudgetError,
    InvalidInputError,
    PlanMismatchError,
    RankError,
)
from ckptplan.core.plan import Plan
from ckptplan.core.request import Limits, Training
from ckptplan.core.stage import InputTensor
from ckptplan.planning.adviser import Adviser
from ckptplan.planning.job import Job
from ckptplan.planning.model_job import Together, encloses, job_of_step
from ckptplan.profiling.profiler import as_ours, training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.workload.enlarge import enlarged_calls, require_in_range
from ckptplan.runtime.group import Vote, group_call
from ckptplan.runtime.guard.shapes import ByName, Larger, input_tensors
from ckptplan.runtime.guard.shapes import Limits as InputLimits
from ckptplan.runtime.sharded import undisturbed
from ckptplan.runtime.state.process import in_own_context
from ckptplan.runtime.state.restore import restored

_REMEMBERED = 16
"""Plans, and shapes without a plan, that are stored."""


@dataclass(slots=True)
class _Known:
    """A plan, the inputs that it is valid for, and the profile that it was made from (None: not given)."""

    inputs: tuple[InputTensor, ...]
    plan: Plan
    job: Job | None

    @property
    def limits(self) -> InputLimits:
        return InputLimits(self.inputs)


class Enlarger:
    """Plans for forwards with larger inputs (`runtime.guard.shapes.OnLarger`).

    Plans are stored: if an earlier plan is valid for the inputs, it is applied again without profiling. Shapes for
    which there is no plan are stored too.

    The ranks of a sharded model vote at each forward, and have one plan at any time: if the inputs of one are larger,
    all plan together for the largest sizes of all. Ranks of a replicated model each plan by themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        limits: Limits,
        adviser: Adviser | None,
        training: Training,
        swap_dir: str | Path | None,
    ) -> None:
        if plan.fingerprint.inputs == "step()":
            raise InvalidInputError(
                "on_larger='replan' plans for a forward's inputs, and this plan was made for a step=, whose inputs "
                "can't be seen; make it with inputs=, or pass on_larger='raise'"
            )
        self._model, self._limits, self._adviser = model, limits, adviser
        self._training, self._swap_dir = training, swap_dir
        self._by_name = ByName(model.forward)
        self._budget_bytes = max(plan.budget_bytes, plan.reserved_bytes or 0)
        self._now = _Known(
            self._by_name.planned(plan.fingerprint.inputs), plan, None if adviser is None else adviser.job
        )
        self._within = self._now.limits
        self._known = [self._now]
        self._refused: list[tuple[tuple[InputTensor, ...], InfeasibleBudgetError]] = []
        self._vote = Vote(model)

    def beyond(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a tensor is larger than planned, on this rank or another."""
        return self._vote.any(self._within.first_beyond(*self._by_name(args, kwargs)) is not None)

    def enlarged(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Larger | None]:
        """Return a plan that is valid for these inputs.

        Raises
        ------
        InfeasibleBudgetError
            If none fits the budget.
        PlanMismatchError
            If the step can't be profiled with them.
        """
        with group_call("a forward with larger inputs", self._model) as group:
            if group is not None and not encloses(self._training):
                args, kwargs = Together(group).widened((args, kwargs))
            named = self._by_name(args, kwargs)
            given = input_tensors(*named)
            beyond = self._within.first_beyond(*named)
            holds = [known.limits.first_beyond(*named) is None for known in self._known]
            refused = [_holds(given, shapes) for shapes, _ in self._refused]
            if group is not None:  # what is so on one rank is so on all
                found = group.exchange((beyond, holds, refused))
                beyond = next(each for each, _, _ in found if each is not None)
                holds = [all(each) for each in zip(*(each for _, each, _ in found), strict=True)]
                refused = [any(each) for each in zip(*(each for _, _, each in found), strict=True)]
        assert beyond is not None
        if plan is not self._now.plan:  # replanned after a shortage of memory
            self._now.plan = plan
            self._now.job = None if self._adviser is None else self._adviser.job
            self._budget_bytes = min(self._budget_bytes, max(plan.budget_bytes, plan.reserved_bytes or 0))
        earlier = next((k for k, fits in zip(self._known[::-1], holds[::-1], strict=True) if fits), None)
        if earlier is not None:
            return self._turn_to(earlier), None
        for (_, error), again in zip(self._refused, refused, strict=True):
            if again:
                raise _again(error)
        begin = time.perf_counter()
        new = self._plan_for((args, kwargs), named)
        larger = Larger(*beyond, new.inputs, time.perf_counter() - begin)
        self._known = [*self._known[-_REMEMBERED + 1 :], new]
        return self._turn_to(new), larger

    def _turn_to(self, known: _Known) -> Plan:
        self._now, self._within = known, known.limits
        if self._adviser is not None and known.job is not None:
            self._adviser.job = known.job
        return known.plan

    @in_own_context
    def _plan_for(self, call: tuple[tuple[Any, ...], dict[str, Any]], named: Any) -> _Known:
        target = find_target(self._model)
        kind = target.device.type
        amp = self._training.amp
        if amp is None and torch.is_autocast_enabled(kind):
            amp = torch.get_autocast_dtype(kind)
        accumulate = self._now.plan.fingerprint.accumulates or None  # where gradients exist now, they do in later steps
        calls = enlarged_calls(call, named, self._now.inputs, [known.inputs for known in self._known])
        # Autocast around the user's forward would extend to the loss and backward, and cache casts made in here. Of a
        # sharded model the parameters outside of its units are gathered already.
        with torch.autocast(kind, enabled=False), undisturbed(self._model):
            for args, kwargs in calls:
                try:
                    request = replace(self._training, inputs=args, step=None, amp=amp, accumulate=accumulate)
                    job, plan = self._solved(request, kwargs, target, repeated=args is not call[0])
                except RankError:  # which ends the others, too
                    raise
                except CkptPlanError as error:
                    failed = error
                    continue
                # The replay refers to this forward's inputs and would keep them alive.
                job = replace(job, replayed=None, on_cuda=False)
                return _Known(input_tensors(*self._by_name(args, kwargs)), plan, job)
        given = input_tensors(*named)
        if isinstance(failed, InfeasibleBudgetError):
            self._refused = [*self._refused[-_REMEMBERED + 1 :], (given, failed)]
            raise _again(failed)
        raise PlanMismatchError(
            f"inputs {', '.join(map(str, given))} are larger than planned, and no new plan can be made: {failed}"
        ) from failed

    def _solved(self, request: Training, kwargs: dict[str, Any], target: Target, *, repeated: bool) -> tuple[Job, Plan]:
        """Profile a step and solve, all ranks of a sharded model together."""
        with group_call("solve", self._model) as group:
            training, _ = training_step(self._model, request, target)
            training = replace(training, kwargs=kwargs)
            training.on_device(target.device)
            if repeated:
                with restored(self._model, training.reached()), as_ours(training, "tracing"):
                    require_in_range(training, target)
            job = job_of_step(training, (), target, request.optimizer, self._swap_dir, self._limits)
            if group is None:
                return job, job.solved(self._budget_bytes)
            return job, Together(group).planned(job, self._budget_bytes, lambda nbytes: job.solved(nbytes or 0))


def _holds(given: Sequence[InputTensor], shapes: Sequence[InputTensor]) -> bool:
    """Return whether no dimension in `given` is smaller than in `shapes`; infeasible shapes stay infeasible then."""
    sizes = {t.path: t.shape for t in given}
    return all(
        len(sizes.get(t.path, ())) == len(t.shape) and all(a >= b for a, b in zip(sizes[t.path], t.shape, strict=True))
        for t in shapes
        if t.path in sizes or t.shape
    )


def _again(error: InfeasibleBudgetError) -> InfeasibleBudgetError:
    """Return a copy of `error` without a traceback, which would keep frames alive."""
    return InfeasibleBudgetError(
        f"{error}; the former plan stays applied",
        budget_bytes=error.budget_bytes,
        min_peak_bytes=error.min_peak_bytes,
        min_peak_bound_bytes=error.min_peak_bound_bytes,
        stage=error.stage,
        phase=error.phase,
    )
