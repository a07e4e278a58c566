"""The job of planning a model: its step put together, profiled, and each plan replayed on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.link import STAGING_BYTES
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import Plan
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.planning.job import Job, PlanLimits, beside_staging
from ckptplan.profiling.profiler import profile_step, replayed_bytes, training_step
from ckptplan.profiling.target import DeviceLike, Target, find_target
from ckptplan.profiling.workload.optimizers import OptimizerLike
from ckptplan.runtime import accelerator
from ckptplan.runtime.observe.measure import held_tensors, unique_bytes
from ckptplan.runtime.step import LossFn, TrainingStep, check_supported
from ckptplan.solving.tiers import check_disk


def job_of_model(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None,
    optimizer: OptimizerLike | None,
    device: DeviceLike,
    step: Callable[[], torch.Tensor] | None,
    amp: torch.dtype | str | None,
    accumulate: bool | None,
    swap_dir: str | Path | None,
    menus: bool,
    limits: PlanLimits,
) -> Job:
    """The job of planning a model's step, which is profiled first."""
    target = find_target(model, device)
    check_supported(model)
    if limits.host_bytes is not None and limits.disk_bytes and target.is_cuda:
        limits = limits._replace(host_bytes=beside_staging(limits.host_bytes, STAGING_BYTES))
    # Once, so that profile and replay see the very same inputs, whether given or found.
    training, notes = training_step(
        model, inputs, loss_fn=loss_fn, step=step, target=target, amp=amp, accumulate=accumulate
    )
    return job_of_step(training, notes, target, optimizer, swap_dir, menus, limits)


def job_of_step(
    training: TrainingStep,
    notes: Sequence[str],
    target: Target,
    optimizer: OptimizerLike | None,
    swap_dir: str | Path | None,
    menus: bool,
    limits: PlanLimits,
) -> Job:
    """The job of a step that is put together already."""
    measured = profile_step(
        training, target, optimizer=optimizer, swap_dir=swap_dir, menus=menus, notes=notes, on_progress=limits.report
    )
    job = Job(measured, None, False, *limits)
    check_disk(measured, job.host_bytes, job.disk_bytes)
    return replaying(job, training, TrainingBytes(training.model, target, optimizer=optimizer))


def replaying(job: Job, step: TrainingStep, sizes: TrainingBytes) -> Job:
    """The same job with each plan replayed on `step`, which the profile is of."""
    target = sizes.target

    def replayed(plan: Plan) -> DeviceBytes:
        if target.is_cuda:
            return sizes.peaks(step, plan)
        needs = job.profile.resident_bytes + replayed_bytes(step, plan, target)
        return DeviceBytes(needs, needs, needs)

    return replace(job, replayed=replayed, on_cuda=target.is_cuda)


def default_budget(model: nn.Module, device: DeviceLike) -> int:
    """The budget where none is given: what `device`, by default the model's own, has free for a step."""
    return free_bytes(model, find_target(model, device))


def free_bytes(model: nn.Module, target: Target) -> int:
    """What a step may use: what is free or the model's own now, or the whole of a device that isn't here."""
    if target.spec is not None:
        return target.spec.usable_bytes
    device, held = target.device, unique_bytes(held_tensors(model), target.device)
    if accelerator.is_accelerator(device):
        now = accelerator.device_bytes(device)
        held += now.reserved_bytes - now.allocated_bytes
    return accelerator.free_bytes(device) + held
