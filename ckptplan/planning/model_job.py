"""The job of planning a model: its step is built and profiled, and each plan is replayed on it."""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import FunctionType

import psutil
import torch
from torch import nn

from ckptplan.core.arguments import DeviceLike, OptimizerLike
from ckptplan.core.ddp import DDP
from ckptplan.core.errors import InfeasibleBudgetError, PlanMismatchError, RankError, UnsupportedModelError
from ckptplan.core.fsdp import FSDP
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Fingerprint, Profile
from ckptplan.core.request import Limits, Training
from ckptplan.core.stage import InputTensor
from ckptplan.core.units import format_bytes
from ckptplan.distributed import unwrapped
from ckptplan.distributed.absent import sharded as sharded
from ckptplan.distributed.group import GroupCall, group_call
from ckptplan.memory.estimate import TrainingBytes, library_blocks
from ckptplan.planning.job import Job, staged
from ckptplan.planning.plan_file import name_of, optimizer_text, settings_of
from ckptplan.profiling.profiler import compilable_stages, profile_step, replayed_bytes, stage_inputs, training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.workload.enlarge import Call, tiled_to
from ckptplan.profiling.workload.inputs import padded
from ckptplan.profiling.workload.optimizers import make_optimizer
from ckptplan.runtime.handle import without_plan
from ckptplan.solving.room import Room
from ckptplan.tensors import accelerator
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.compiled import stages_compiled
from ckptplan.training.inputs import input_tensors, read_inputs
from ckptplan.training.measure import held_tensors, optimizer_tensors
from ckptplan.training.step import TrainingStep, check_supported, fingerprint


@contextlib.contextmanager
def job_of_model(model: nn.Module, training: Training, swap_dir: str | Path | None, limits: Limits) -> Iterator[Job]:
    """Profile a model's step and yield the job of planning it; with `compile`, layers are compiled within the block.

    Raises
    ------
    UnsupportedModelError
        If layers are to be compiled for a device that isn't in this machine.
    """
    target = find_target(model, training.device)
    if limits.compile and target.spec is not None:
        raise UnsupportedModelError(
            f"compile=True needs {target.description} in this machine: bytes and times of compiled code are known only "
            "from running it; plan on that device, or leave compile out"
        )
    check_supported(model)
    # Built once, so that profile and replay have the same inputs, whether given or found.
    step, notes = training_step(model, training, target)
    within = staged(limits) if target.is_cuda else limits
    names, more = compilable_stages(step, target, limits.on_progress) if limits.compile else ((), ())
    with stages_compiled(step.model, names):
        yield job_of_step(step, (*more, *notes), target, training.optimizer, swap_dir, within)


def step_text(model: nn.Module, training: Training) -> str:
    """Return the model and the step, as text, that a plan file's plan must have been made for."""
    target = find_target(model, training.device)
    check_supported(model)
    made = None if training.optimizer is None else make_optimizer(training.optimizer, model)
    of = fingerprint(training_step(model, training, target)[0], target.name)
    return f"{of}; {settings_of(model)}; {optimizer_text(made)}; {name_of(training.loss_fn)}"


def job_of_step(
    training: TrainingStep,
    notes: Sequence[str],
    target: Target,
    optimizer: OptimizerLike | None,
    swap_dir: str | Path | None,
    limits: Limits,
) -> Job:
    """Profile a step and return the job of planning it."""
    measured = profile_step(
        training,
        target,
        optimizer=optimizer,
        swap_dir=swap_dir,
        menus=limits.menus,
        notes=notes,
        on_progress=limits.on_progress,
    )
    Room.of(measured, limits)  # raises without a disk to use
    for other in padded(training):
        measured = holding_for(measured, stage_inputs(other, measured, target))
    return replaying(
        Job.of(measured, limits),
        training,
        TrainingBytes(training.model, target, Training(optimizer=optimizer)),
    )


def replaying(job: Job, step: TrainingStep, sizes: TrainingBytes) -> Job:
    """Return `job` with a replay of each plan on `step`, from which its profile was made.

    Many models skip a mask that has no zero, and take another path when there is padding. So a step with such a mask is
    replayed once more with one zero in it, and the larger bytes count. In that replay a stage with other operations
    than the plan saves is recomputed as a whole, as in training.
    """
    target, others = sizes.target, padded(step)
    reduces_last = step.accumulates and step.parallel.keeps_whole

    def needs(step: TrainingStep, plan: Plan) -> DeviceBytes:
        if target.is_cuda:
            return sizes.peaks(step, plan)
        away = sum(r.nbytes for r in plan.residents if r.returns is not None)
        nbytes = job.profile.resident_bytes - away + replayed_bytes(step, plan, target)
        return DeviceBytes(nbytes, nbytes, nbytes)

    def replayed(plan: Plan) -> DeviceBytes:
        found = [needs(step, plan)]
        if reduces_last and not target.is_cuda:  # the profile is of micro-batches that don't reduce their gradients
            found.append(sizes.peaks(step, plan))
        for other in others:
            try:
                found.append(needs(other, plan))
            except PlanMismatchError:
                whole = (replace(c, ops=(), option=c.action) if c.ops else c for c in plan.choices)
                found.append(needs(other, replace(plan, choices=tuple(whole))))
        return DeviceBytes(*map(max, zip(*map(astuple, found), strict=True)))

    library_bytes = sum(block.nbytes for block in library_blocks(target)) if target.is_cuda else 0
    return replace(job, replayed=replayed, on_cuda=target.is_cuda, library_bytes=library_bytes)


def holding_for(profile: Profile, inputs: Mapping[str, tuple[InputTensor, ...]]) -> Profile:
    """Return `profile` with stages whose plans hold for these inputs as well as for their own."""
    stages = []
    for stage in profile.stages:
        found = {t.path: t for t in stage.inputs or ()}
        for tensor in inputs.get(stage.name, ()) if stage.inputs is not None else ():
            own = found.get(tensor.path, tensor)
            found[tensor.path] = replace(own, shape=_larger(own.shape, tensor.shape))
        stages.append(stage if stage.inputs is None else replace(stage, inputs=tuple(found.values())))
    return replace(profile, stages=tuple(stages))


def solved_together(
    model: nn.Module, ddp: DDP | bool | None, fsdp: FSDP | int | None, alone: Callable[[Together | None], Plan]
) -> Plan:
    """Return `alone(together)`: for a replicated or sharded model, the one plan of all ranks (NOTE [One plan])."""
    with sharded(model, fsdp), group_call("solve", model, ddp or fsdp) as call, without_plan(model):
        return alone(None if call is None else Together(call))


class NoLargestStepError(RankError):
    """No rank's inputs are at least as large as all others' in every dimension."""


class Together:
    """The ranks of a group that plan together.

    NOTE [One plan]
    Each rank profiles its own step, of its own batch. If no rank's inputs are the largest in every dimension, all are
    repeated up to the largest of all ranks; those of a step that is a function, or whose loss encloses targets, can't
    be. The rank whose step takes the most bytes with everything kept, and whose inputs are the largest, plans, within
    the smallest of the budgets; the others get its plan.
    """

    def __init__(self, call: GroupCall) -> None:
        self._call = call
        self.local_count = call.local_count()
        """Number of the ranks on this machine."""

    def shared(self, limits: Limits) -> Limits:
        """Return the limits of one rank, from those of its machine."""
        return shared_by(limits, self.local_count)

    def widened_inputs(self, model: nn.Module, training: Training) -> Training:
        """Return `training` with its inputs repeated to the largest sizes of all ranks, if no rank has all of these.

        Raises
        ------
        RankError
            If ranks have other models, whose inputs can't be compared.
        """
        self._require_one(self._call.exchange(fingerprint(TrainingStep(unwrapped(model)))))
        inputs = dict(training.inputs) if isinstance(training.inputs, Mapping) else training.inputs
        call: Call = ((inputs,), {})
        given = self._call.exchange(input_tensors(*call))
        if _largest([({t.path: t.shape for t in each}, 0) for each in given]) is not None or encloses(training):
            return training
        return replace(training, inputs=_widened(call, given)[0][0])

    def widened(self, call: Call) -> Call:
        """Return the call of a model with its tensors repeated up to the largest of all ranks, by path."""
        return _widened(call, self._call.exchange(input_tensors(*call)))

    def planned(self, job: Job, budget_bytes: int | None, solve: Callable[[int | None], Plan]) -> Plan:
        """Return the plan of all ranks: `solve(smallest budget)` of the rank whose step is the largest.

        Raises
        ------
        RankError
            If ranks have other models, or none has the largest inputs.
        """
        call, own = self._call, job.profile.fingerprint
        # The inputs of a step that is a function are known only from its stages.
        stages = {f"{s.name} {t.path}": t.shape for s in job.profile.stages for t in s.inputs or ()}
        given = {t.path: t.shape for t in (read_inputs(own.inputs) if own.inputs != "step()" else ())}
        found: list[tuple[Fingerprint, int, int | None, dict[str, tuple[int, ...]]]] = call.exchange(
            (own, job.kept_peak_bytes(job.limits.time_limit_s), budget_bytes, {**stages, **given})
        )
        self._require_one([other for other, *_ in found])
        chosen = _largest([(shapes, peak) for _, peak, _, shapes in found])
        if chosen is None:
            raise NoLargestStepError(
                "no rank's inputs are the largest in every dimension, and one plan has to hold for all: "
                + "; ".join(f"rank {name} has {f.inputs}" for name, (f, *_) in zip(call.ranks, found, strict=True))
                + "; give each rank the largest inputs that any will have",
                rank=call.ranks[0],
            )
        budgets = {name: n for name, (_, _, n, _) in zip(call.ranks, found, strict=True) if n is not None}
        plan = None
        if call.rank == chosen:
            try:
                plan = solve(min(budgets.values(), default=None))
            except InfeasibleBudgetError as error:
                if len(set(budgets.values())) > 1:
                    error.args = (f"{error}; it is the budget of rank {min(budgets, key=lambda k: budgets[k])}",)
                raise
        return Plan.from_json(call.exchange(None if plan is None else plan.to_json())[chosen])

    def _require_one(self, found: Sequence[Fingerprint]) -> None:
        first, *others = self._call.ranks
        for name, other in zip(others, found[1:], strict=True):
            try:
                found[0].require(other, ignore=("inputs",))
            except PlanMismatchError as error:
                raise RankError(f"rank {name} has another step than rank {first}: {error}", rank=name) from None


def _widened(call: Call, given: Sequence[Sequence[InputTensor]]) -> Call:
    """Return a call with its tensors repeated up to the largest sizes among all ranks' tensors."""
    largest: dict[str, tuple[int, ...]] = {}
    for t in itertools.chain(*given):
        largest[t.path] = _larger(largest.get(t.path, t.shape), t.shape)
    return tiled_to(call, largest)


def _larger(own: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the larger size in each dimension; `own` where the other shape has another number of them."""
    return tuple(map(max, own, other)) if len(own) == len(other) else own


def encloses(training: Training) -> bool:
    """Whether a request's loss may use targets of its own, which can't be repeated with the inputs."""
    loss_fn = training.loss_fn
    return loss_fn is not None and (not isinstance(loss_fn, FunctionType) or loss_fn.__closure__ is not None)


def _largest(steps: Sequence[tuple[Mapping[str, tuple[int, ...]], int]]) -> int | None:
    """Return the number of the step whose tensors are nowhere smaller than another's; ties go to the most bytes."""
    able = [k for k, (ours, _) in enumerate(steps) if all(covers(ours, theirs) for theirs, _ in steps)]
    return max(able, key=lambda k: steps[k][1], default=None)


def covers(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether our tensors, by name, are in no dimension smaller than theirs."""
    return all(
        len(shape) == len(ours.get(name, ())) and all(map(operator.le, shape, ours.get(name, ())))
        for name, shape in theirs.items()
    )


def shared_by(limits: Limits, ranks: int) -> Limits:
    """Return the limits of one of the `ranks` of a machine: they share its memory and its disk."""
    host, disk = (None if n is None else n // ranks for n in (limits.host_bytes, limits.disk_bytes))
    return replace(limits, host_bytes=host, disk_bytes=disk)


def default_budget(model: nn.Module, device: DeviceLike, ranks: int = 1, optimizer: OptimizerLike | None = None) -> int:
    """Return the default budget of a step: the free memory of `device`, by default the model's.

    Parameters
    ----------
    ranks : int
        Number of ranks on this machine, which share its main memory.
    optimizer : optional
        The step's optimizer, whose existing state is part of what the step may hold.
    """
    target = find_target(model, device)
    state = optimizer_tensors(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else ()
    free = free_bytes(model, target, state)
    return free // ranks if target.spec is None and not target.is_cuda else free


def warn_of_more_than_there_is(budget_bytes: int, model: nn.Module, device: DeviceLike) -> None:
    """Warn of a budget beyond all memory of `device`, by default the model's: the unit may have been mistaken."""
    target = find_target(model, device)
    has = target.capacity_bytes or psutil.virtual_memory().total
    if budget_bytes > has:
        warnings.warn(
            f"the budget, {format_bytes(budget_bytes)}, is more than all memory of {target.description}, "
            f"{format_bytes(has)}: a plan within it may run out of memory; budget_gb= counts units of 2**30 bytes",
            RuntimeWarning,
            stacklevel=2,
        )


def free_bytes(model: nn.Module, target: Target, state: Sequence[torch.Tensor] = ()) -> int:
    """Return the free bytes and those of the model and `state`; all usable bytes of a device not in this machine."""
    if target.spec is not None:
        return target.spec.usable_bytes
    device, held = target.device, unique_bytes([*held_tensors(model), *state], target.device)
    if accelerator.is_accelerator(device):
        now = accelerator.device_bytes(device)
        held += now.reserved_bytes - now.allocated_bytes
    return accelerator.free_bytes(device) + held
