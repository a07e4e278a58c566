"""Reports on an applied plan's steps: statistics, and the trace of one step.

Predictions beside the measurements are those of an adviser, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.page import Page
from ckptplan.core.trace import Trace
from ckptplan.distributed import ddp_under, parallel_of
from ckptplan.runtime.applied import Applied
from ckptplan.runtime.observe.stats import Stats, stage_stats
from ckptplan.runtime.observe.traced import record_step
from ckptplan.tensors.storages import storages_of, tensors_in, unique_bytes
from ckptplan.training.measure import held_tensors, optimizer_tensors


def stats(applied: Applied) -> Stats:
    """See `Handle.stats`."""
    steps = applied.controller.counters.meter.steps()
    predicted = None if applied.adviser is None else applied.adviser.stage_times(applied.plan)
    return stage_stats(applied.counted(), applied.plan, steps, predicted, applied.stores, applied.peaks)


def trace(
    applied: Applied,
    run: Callable[[], Any],
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
) -> Trace:
    """See `Handle.trace`."""
    if not applied.is_on:
        raise InvalidInputError("the plan isn't applied now, so no step of it can be traced")
    model, device, plan = applied.model, applied.device, applied.plan
    # Not kept in a variable, so that the step can free the gradients that it drops.
    held = unique_bytes([*held_tensors(model), *optimizer_tensors(optimizer), *tensors_in(inputs)], device)
    held += parallel_of(model, ddp_under(model, plan)).unseen_bytes()
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    before = [StorageWeakRef(s) for gradient in gradients for s in storages_of(gradient)]
    step, notes = record_step(applied.controller.counters.meter, run, device, held, plan.decided.stages)
    if device.type == "cpu":
        if any(gradient.expired() for gradient in before):
            notes += (
                "gradients from before the step were freed in it, which isn't recorded, so memory is too high "
                "from then on; call zero_grad() before the traced step",
            )
        elif inputs is not None:
            applied.peaks.traced = step.peak_bytes
    return Trace(step, None if applied.adviser is None else applied.adviser.drawn(plan), notes)


def page(applied: Applied, options: dict[str, Any]) -> Page:
    """See `Handle.report`."""
    if applied.adviser is None:
        raise InvalidInputError(
            "report draws the profile that the plan was made from, which isn't known: pass it to apply, "
            "ckptplan.apply(model, plan, profile=profile)"
        )
    return applied.adviser.report(applied.plan, stats(applied), **options)
