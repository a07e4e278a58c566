"""New plans while training: for larger inputs than the applied plan is valid for, and for steps that differ from it."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.arguments import OptimizerLike
from ckptplan.core.budget import Budget
from ckptplan.core.errors import (
    CkptPlanError,
    InfeasibleBudgetError,
    InvalidInputError,
    PlanMismatchError,
    RankError,
)
from ckptplan.core.plan import Plan
from ckptplan.core.request import Limits, Training, ignore_progress, reporting
from ckptplan.core.stage import InputTensor
from ckptplan.distributed import parallel_of
from ckptplan.distributed.group import Vote, group_call
from ckptplan.planning.adviser import SolverAdviser
from ckptplan.planning.job import Job
from ckptplan.planning.log import planning
from ckptplan.planning.model_job import Together, covers, encloses, job_of_step
from ckptplan.profiling.profiler import as_ours, training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.values.real_run import answered
from ckptplan.profiling.workload.enlarge import enlarged_calls, in_range, require_in_range
from ckptplan.runtime.guard.shapes import ByName, InputLimits, Larger
from ckptplan.state.process import in_own_context
from ckptplan.state.restore import restored
from ckptplan.training.compiled import compiled_modules
from ckptplan.training.inputs import input_tensors

_REMEMBERED = 16
"""Largest number of plans, and of shapes for which there is no plan, that are stored."""

_TRIES = {"returned": 1, "thawed": 16} | dict.fromkeys(
    ("attached", "autocast", "calls", "compiled", "gradients", "mode", "module", "new", "saved", "stage", "state"), 3
)
"""Kind of difference that a plan for the present inputs may include -> most plans made because of it. A training that
thaws other layers by turns needs a plan for each; another kind that stays after three plans can't be planned for."""

_OF_STATE = frozenset(("gradients", "mode", "thawed"))


@dataclass(slots=True)
class _Known:
    """A plan, the inputs that it is valid for, and the profile that it was made from (None: not given).

    `training`, `trained` and `stateful` describe the model when it was made: its mode, and the names of the parameters
    that required gradients and of those for which the optimizer had state.
    """

    inputs: tuple[InputTensor, ...]
    plan: Plan
    job: Job | None
    training: bool
    trained: frozenset[str]
    stateful: frozenset[str]

    @property
    def limits(self) -> InputLimits:
        return InputLimits(self.inputs)

    def holds(
        self,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        model: nn.Module,
        now: Plan,
        differences: Set[str],
        stateful: Set[str],
    ) -> bool:
        """Return whether this plan is valid for a call of a model whose steps showed `differences` from plan `now`.

        If the present plan counts gradients from before a step, this one has to as well. Optimizer state of parameters
        that were frozen later still takes memory, so the plan has to count it.
        """
        accumulates = now.fingerprint.accumulates or "gradients" in differences
        return (
            (self.plan.fingerprint.accumulates or not accumulates)
            and self.limits.first_beyond(*call) is None
            and self.training == model.training
            and _trained(model) <= self.trained
            and stateful <= self.trained | self.stateful
        )


def _trained(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad)


def _stateful(model: nn.Module, optimizer: OptimizerLike | None) -> frozenset[str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return frozenset()
    return frozenset(name for name, p in model.named_parameters() if optimizer.state.get(p))


@contextlib.contextmanager
def inside_forward(model: nn.Module, amp: torch.dtype | str | None) -> Iterator[torch.dtype | str | None]:
    """Turn autocast off for planning inside a forward of `model`; yield `amp`, by default the type of that autocast.

    Left on, it would extend to the loss and backward, and cache casts made in the block. In a sharded model the
    parameters outside of its units are gathered already.
    """
    kind = find_target(model).device.type
    if amp is None and torch.is_autocast_enabled(kind):
        amp = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False), parallel_of(model).undisturbed():
        yield amp


class Enlarger:
    """Plans for forwards with larger inputs, and after steps that differed (`runtime.guard.shapes.OnLarger`).

    Plans are stored: if an earlier plan is valid for the inputs, it is applied again without profiling. Shapes for
    which there is no plan are stored too. A plan after a difference is made for the model as it is at the next forward:
    its mode, frozen parameters and path. No more are made for a kind than `_TRIES`.

    The ranks of a sharded model vote at each forward, and have one plan at any time: if the inputs of one are larger,
    all plan together for the largest sizes of all. Ranks of a replicated model each plan by themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        limits: Limits,
        adviser: SolverAdviser | None,
        training: Training,
        swap_dir: str | Path | None,
    ) -> None:
        if plan.fingerprint.inputs == "step()":
            raise InvalidInputError(
                "on_larger='replan' plans for a forward's inputs, and this plan was made for a step=, whose inputs "
                "can't be seen; make it with inputs=, or pass on_larger='follow'"
            )
        self._model, self._limits, self._adviser = model, limits, adviser
        self._training, self._swap_dir = training, swap_dir
        self._by_name = ByName(model.forward)
        self._share = plan.budget_share
        self._budget_bytes = None if self._share is not None else max(plan.budget_bytes, plan.reserved_bytes or 0)
        self._now = _Known(
            self._by_name.planned(plan.fingerprint.inputs),
            plan,
            None if adviser is None else adviser.job,
            plan.fingerprint.training,
            _trained(model),
            _stateful(model, training.optimizer),
        )
        self._counts_state = training.optimizer is not None
        self._tries: Counter[str] = Counter()
        self._within = self._now.limits
        self._known = [self._now]
        self._refused: list[tuple[dict[str, tuple[int, ...]], Callable[[], CkptPlanError]]] = []
        self._vote = Vote(model)

    def beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any], differences: Set[str]) -> bool:
        """Return whether a tensor is larger than planned, or a difference may be planned for, on any rank."""
        larger = self._within.first_beyond(*self._by_name(args, kwargs)) is not None
        return self._vote.any(larger or bool(differences and self._plannable(differences)))

    def _plannable(self, differences: Set[str]) -> tuple[str, ...]:
        # Larger inputs without a plan of their own make stages differ, which a plan for other inputs can't change.
        without = {"calls", "module", "saved", "stage"} if "no plan" in differences else set()
        return tuple(sorted(k for k in differences - without if self._tries[k] < _TRIES.get(k, 0)))

    def enlarged(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        differences: Set[str],
        updates: weakref.ref[torch.optim.Optimizer] | None = None,
    ) -> tuple[Plan, Larger | None]:
        """Return a plan that is valid for these inputs, of a model whose steps showed these differences.

        `updates` is the optimizer that has updated the model. Plans that were made with none count it from the
        difference "state" on.

        Raises
        ------
        InfeasibleBudgetError
            If none fits the budget.
        PlanMismatchError
            If the step can't be profiled.
        """
        with group_call("a forward with larger inputs", self._model) as group:
            if group is not None and not encloses(self._training):
                args, kwargs = Together(group).widened((args, kwargs))
            named = self._by_name(args, kwargs)
            beyond = self._within.first_beyond(*named)
            kinds = self._plannable(differences)
            # Only for differences in the model's state is it known whether an earlier plan includes them.
            known = self._known if not kinds or _OF_STATE.issuperset(kinds) else ()
            optimizer = self._counted(kinds, updates)
            stateful = _stateful(self._model, optimizer)
            holds = [each.holds(named, self._model, plan, differences, stateful) for each in known]
            shapes = {t.path: t.shape for t in input_tensors(*named)}
            # What doesn't fit doesn't fit with larger inputs either.
            refused = [not kinds and covers(shapes, smaller) for smaller, _ in self._refused]
            if group is not None:  # all ranks have to come to the same decision
                found = group.exchange((beyond, holds, refused, kinds))
                beyond = next((each for each, *_ in found if each is not None), None)
                kinds = tuple(sorted({kind for *_, each in found for kind in each}))
                known = known if all(len(each) == len(known) for _, each, *_ in found) else ()
                holds = [all(each) for each in zip(*(each[: len(known)] for _, each, *_ in found), strict=True)]
                refused = [any(each) for each in zip(*(each for _, _, each, _ in found), strict=True)]
        self._tries.update(kinds)
        earlier = next((k for k, fits in zip(known[::-1], holds[::-1], strict=True) if fits), None)
        if earlier is not None:
            return self._turn_to(earlier), None
        begin = time.perf_counter()
        try:
            for (_, failed), again in zip(self._refused, refused, strict=True):
                if again:
                    raise failed()
            new = self._plan_for((args, kwargs), named, kinds, optimizer)
        except RankError:
            raise
        except CkptPlanError:  # fall back on an earlier plan without gradients from before the step
            without = [k for k in known if k.holds(named, self._model, k.plan, differences, stateful)]
            if group is not None or not without:
                raise
            return self._turn_to(without[-1]), None
        tensor, planned = beyond or (None, None)
        larger = Larger(tensor, planned, new.inputs, time.perf_counter() - begin, kinds)
        if "state" in kinds:  # earlier plans don't count it
            self._counts_state, self._known, self._refused = True, [], []
        self._known = [*self._known[-_REMEMBERED + 1 :], new]
        return self._turn_to(new), larger

    def _turn_to(self, known: _Known) -> Plan:
        self._now, self._within = known, known.limits
        if self._adviser is not None and known.job is not None:
            self._adviser.job = known.job
        return known.plan

    def _counted(
        self, kinds: Sequence[str], updates: weakref.ref[torch.optim.Optimizer] | None
    ) -> OptimizerLike | None:
        """Return the optimizer that a plan counts: the real one, where it has updated the model already."""
        given = self._training.optimizer
        real = None if updates is None or isinstance(given, torch.optim.Optimizer) else updates()
        return real if real is not None and (self._counts_state or "state" in kinds) else given

    @in_own_context
    def _plan_for(
        self,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        named: Any,
        kinds: Sequence[str],
        optimizer: OptimizerLike | None,
    ) -> _Known:
        target = find_target(self._model)
        # If gradients exist at the start of this step, they do in later ones.
        accumulate = self._now.plan.fingerprint.accumulates or "gradients" in kinds or None
        limits = self._limits
        asked = replace(self._training, step=None, accumulate=accumulate, optimizer=optimizer)
        calls = enlarged_calls(call, named, self._now.inputs, [known.inputs for known in self._known])
        given = None if limits.on_progress is ignore_progress else limits.on_progress
        shown = planning(Budget(self._budget_bytes, self._share), limits.time_limit_s, given)
        with inside_forward(self._model, self._training.amp) as amp, shown as on_progress:
            telling = replace(limits, on_progress=reporting(on_progress))
            for args, kwargs in calls:
                try:
                    request = replace(asked, inputs=args, amp=amp)
                    job, plan = self._solved(request, kwargs, target, telling, repeated=args is not call[0])
                except RankError:  # it ends the other ranks, too
                    raise
                except CkptPlanError as error:
                    failed = _again(error)
                    continue
                # The replay refers to this forward's inputs and would keep them alive.
                job = replace(job, replayed=None, on_cuda=False, limits=limits)
                inputs = input_tensors(*self._by_name(args, kwargs))
                stateful = _stateful(self._model, optimizer)
                return _Known(inputs, plan, job, self._model.training, _trained(self._model), stateful)
        if "state" not in kinds:
            self._refused = [
                *self._refused[-_REMEMBERED + 1 :],
                ({t.path: t.shape for t in input_tensors(*named)}, failed),
            ]
        for kind in kinds:
            self._tries[kind] = _TRIES[kind]
        raise failed()

    def _solved(
        self, request: Training, kwargs: dict[str, Any], target: Target, limits: Limits, *, repeated: bool
    ) -> tuple[Job, Plan]:
        """Profile a step and solve, all ranks of a sharded model together."""
        with group_call("solve", self._model) as group:
            training, _ = training_step(self._model, request, target)
            training = replace(training, kwargs=kwargs)
            training.on_device(target.device)
            if repeated:
                reached = training.reached()
                with in_range(), restored(self._model, reached) as rewind, as_ours(training, "tracing"):
                    # Under a dispatch mode, the compiler would give up the code of modules that run for real.
                    if compiled_modules(self._model):
                        require_in_range(training, target)
                    else:
                        answered(lambda: require_in_range(training, target), training, target, rewind)
            job = job_of_step(training, (), target, request.optimizer, self._swap_dir, limits)

            def within(budget_bytes: int | None) -> Plan:
                if self._share is not None:
                    return job.solved_share(self._share, budget_bytes)
                return job.solved(budget_bytes or 0)

            if group is None:
                return job, within(self._budget_bytes)
            return job, Together(group).planned(job, self._budget_bytes, within)


def _again(error: CkptPlanError) -> Callable[[], CkptPlanError]:
    """Return a function that makes errors like `error`: its own traceback would keep the step's frames alive."""
    if not isinstance(error, InfeasibleBudgetError):
        text = f"no plan can be made for this step: {error}; the former plan stays applied"
        return functools.partial(PlanMismatchError, text)
    return functools.partial(
        InfeasibleBudgetError,
        f"{error}; the former plan stays applied",
        budget_bytes=error.budget_bytes,
        min_peak_bytes=error.min_peak_bytes,
        min_peak_bound_bytes=error.min_peak_bound_bytes,
        stage=error.stage,
        phase=error.phase,
    )
