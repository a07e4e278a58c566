"""Steps that run out of memory: undone, reported, and run again with a leaner plan."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

import psutil
from torch import nn

from ckptplan.core.allocator_settings import allocator_conf
from ckptplan.core.errors import CkptPlanError, OutOfMemoryError
from ckptplan.core.shortage import Shortage
from ckptplan.core.units import format_bytes
from ckptplan.runtime.accelerator import capacity_bytes, device_bytes, is_accelerator
from ckptplan.runtime.adviser import Adviser
from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.guard import oom
from ckptplan.runtime.observe.measure import held_tensors, unique_bytes
from ckptplan.runtime.observe.stats import Stats

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class OnOom:
    """The rule for steps that run out of memory.

    Parameters
    ----------
    adviser : Adviser, optional
        Adds predictions to reports, and makes the plans for retries.
    retries : int
        Largest number of plans that are tried for one step before the error is raised; 0: it is only reported. More
        need an adviser.
    """

    adviser: Adviser | None = None
    retries: int = 0


class Retry:
    """Runner for steps of an applied plan that handles out-of-memory errors by a rule."""

    def __init__(self, applied: Applied, rule: OnOom) -> None:
        self._applied, self._rule = applied, rule
        self._read_only: set[tuple[nn.Module, str]] = set()

    def step(self, run: Callable[[], Result]) -> Result:
        """Run one step; if memory runs out, undo it, report the error, or run it again with a leaner plan.

        Raises
        ------
        OutOfMemoryError, InfeasibleBudgetError
            As documented for `Handle.step`.
        """
        outer = sys.exc_info()[1]
        tried = 0
        while True:
            start = oom.StepStart(self._applied.model, self._read_only, rewinds=self._rule.retries > 0)
            with start.watching_optimizers():
                done, failed = self._attempt(run, start, tried)
            self._read_only = start.unwritten_buffers()
            if failed is None:
                return done[0]
            assert failed.__cause__ is not None
            oom.drop_frames(failed.__cause__, self._applied.device, outer)
            if tried >= self._rule.retries or failed.shortage.tier == "host" or failed.shortage.phase == "update":
                raise failed
            self._replan(failed)
            tried += 1
            if not failed.shortage.repeatable:
                raise OutOfMemoryError(
                    failed.shortage, replans=tried, note="\n  next      a leaner plan is applied from the next step on"
                ) from failed.__cause__

    def _attempt(
        self, run: Callable[[], Result], start: oom.StepStart, tried: int
    ) -> tuple[tuple[Result, ...], OutOfMemoryError | None]:
        """Return the result of the step, or undo it and return the out-of-memory error."""
        before, controller = self._applied.counted(), self._applied.controller
        live_before = (
            device_bytes(self._applied.device).requested_bytes if is_accelerator(self._applied.device) else None
        )
        controller.at_step_begin(start.backward_begins)
        try:
            return (run(),), None
        except (RuntimeError, MemoryError, CkptPlanError) as error:
            cause = oom.exhaustion(error)
            if cause is None or isinstance(error, OutOfMemoryError):
                raise
            shortage = self._shortage(error, cause, start.updating, before, live_before)
            self._applied.controller.forget()
            lost, half = start.undo()
            failed = OutOfMemoryError(
                dataclasses.replace(shortage, gradients_lost=lost, half_updated=half), replans=tried
            )
            failed.__cause__ = error
            return (), failed
        finally:
            controller.on_backward = self._applied.controller.on_backward = None

    def _shortage(
        self, error: BaseException, cause: BaseException, updating: bool, before: Stats, live_before: int | None
    ) -> Shortage:
        applied = self._applied
        model, device, plan, controller = applied.model, applied.device, applied.plan, applied.controller
        phase, index, doing = oom.located(error, controller.place, updating)
        last = len(plan.stages) - 1
        adviser = self._rule.adviser
        planned = None if adviser is None else adviser.planned(plan, phase, index)
        done = self._applied.counted().since(before)
        live, asked = oom.live_bytes(cause, device), oom.requested_bytes(cause)
        return Shortage(
            phase=phase,
            stage=plan.stages[last if index is None else index],
            doing=doing,
            tier="host" if live is not None and oom.is_host_memory(cause) else "device",
            requested_bytes=None if asked is None else asked[1],
            requested_least_bytes=None if asked is None else asked[0],
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.needed_bytes if planned is None else planned[1],
            planned_start_bytes=None if planned is None else planned[0],
            live_bytes=None if live is None else live.requested_bytes,
            allocated_bytes=None if live is None else live.allocated_bytes,
            reserved_bytes=None if live is None else live.reserved_bytes,
            expandable_segments="expandable_segments:True" in allocator_conf(),
            capacity_bytes=capacity_bytes(device),
            live_before_bytes=live_before,
            model_bytes=unique_bytes(held_tensors(model), device),
            process_bytes=int(psutil.Process().memory_info().rss),
            swapped=tuple(
                (state.name.lower().replace("_", " "), len(sizes), sum(sizes))
                for state, sizes in sorted(controller.swapped().items(), key=lambda item: item[0].value)
            ),
            recomputed_stages=done.recomputed_stages,
            planned_recomputed_stages=done.planned_recomputed_stages,
            swapped_out_bytes=done.swapped_out_bytes,
            swapped_in_bytes=done.swapped_in_bytes,
            planned_swapped_bytes=done.planned_swapped_bytes,
            gradients_lost=False,
            half_updated=False,
        )

    def _replan(self, failed: OutOfMemoryError) -> None:
        """Replace the present plan by a leaner one.

        Raises
        ------
        CkptPlanError
            If there is none; the present plan stays applied then.
        """
        assert self._rule.adviser is not None
        before = self._applied.plan
        try:
            plan = self._rule.adviser.replan(before, failed.shortage)
        except CkptPlanError as error:
            raise error from failed
        self._applied.take(plan)
        self._applied.replans += (Replan(failed.shortage, before, plan),)
        longer = f"{plan.step_s / before.step_s:.2f} times as long" if before.step_s else "as long as it does"
        warnings.warn(
            f"out of memory in {failed.shortage.phase} of {failed.shortage.stage!r}; went on with a plan of "
            f"{format_bytes(plan.peak_bytes)} in place of {format_bytes(before.peak_bytes)} whose step takes {longer} "
            "(handle.replans has the reports)",
            RuntimeWarning,
            stacklevel=3,
        )
