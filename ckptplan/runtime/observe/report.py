"""Reports on an applied plan's steps: statistics, the trace of one step, and a plan refined by measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.trace import Trace
from ckptplan.runtime.adviser import Adviser
from ckptplan.runtime.applied import Applied
from ckptplan.runtime.observe.measure import held_tensors, optimizer_tensors, tensors_in, unique_bytes
from ckptplan.runtime.observe.refine import Refinement, checked_threshold, measured_steps
from ckptplan.runtime.observe.stats import Stats, stage_stats
from ckptplan.runtime.observe.traced import record_step


class Report:
    """Reports on the steps of an applied plan, beside the predictions of an adviser, if there is one."""

    def __init__(self, applied: Applied, adviser: Adviser | None) -> None:
        self._applied, self._adviser = applied, adviser

    def stats(self) -> Stats:
        """See `Handle.stats`."""
        applied, steps = self._applied, self._applied.controller.counters.meter.steps()
        predicted = None if self._adviser is None else self._adviser.stage_times(applied.plan)
        return stage_stats(applied.counted(), applied.plan, steps, predicted, applied.stores, applied.peaks)

    def trace(
        self, run: Callable[[], Any], *, inputs: Any = None, optimizer: torch.optim.Optimizer | None = None
    ) -> Trace:
        """See `Handle.trace`."""
        if not self._applied.is_on:
            raise InvalidInputError("the plan isn't applied now, so no step of it can be traced")
        # Not kept in a variable, so that the step can free the gradients that it drops.
        held = unique_bytes(
            [*held_tensors(self._applied.model), *optimizer_tensors(optimizer), *tensors_in(inputs)],
            self._applied.device,
        )
        before = [
            StorageWeakRef(p.grad.untyped_storage()) for p in self._applied.model.parameters() if p.grad is not None
        ]
        step, notes = record_step(
            self._applied.controller.counters.meter, run, self._applied.device, held, self._applied.plan.stages
        )
        if self._applied.device.type == "cpu":
            if any(gradient.expired() for gradient in before):
                notes += (
                    "gradients from before the step were freed in it, which isn't recorded, so memory is too high "
                    "from then on; call zero_grad() before the traced step",
                )
            elif inputs is not None:
                self._applied.peaks.traced = step.peak_bytes
        return Trace(step, None if self._adviser is None else self._adviser.drawn(self._applied.plan), notes)

    def refine(self, threshold: float = 0.1) -> Refinement:
        """See `Handle.refine`."""
        limit = checked_threshold(threshold)
        if not self._applied.is_on:
            raise InvalidInputError("the plan isn't applied now, so there is nothing to refine")
        if self._adviser is None:
            raise InvalidInputError(
                "refine corrects the profile that the plan was made from, which isn't known: pass it to apply, "
                "ckptplan.apply(model, plan, profile=profile)"
            )
        before = self._applied.plan
        measured = measured_steps(self._applied.controller.counters.meter.steps(), before, self._applied.peaks.bytes)
        over = measured.peak_bytes is not None and measured.peak_bytes > before.budget_bytes
        if not over and abs(measured.step_s - before.step_s) <= limit * before.step_s:
            return Refinement(limit, measured, before, before, before)
        after, told = self._adviser.refined(before, measured)
        if (after.choices, after.segments) == (before.choices, before.segments):
            self._applied.plan = after
        else:
            self._applied.take(after)
        return Refinement(limit, measured, before, told, after)
