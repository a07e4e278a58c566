"""Apply a plan to a model, and take it off again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckptplan.core.allocator_settings import allocator_conf
from ckptplan.core.checks import is_int
from ckptplan.core.errors import CkptPlanError, InvalidInputError, OutOfMemoryError, PlanMismatchError
from ckptplan.core.link import Tier
from ckptplan.core.measured import Measured, StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.core.trace import DrawnStep, Trace
from ckptplan.core.units import budget_to_bytes, format_bytes
from ckptplan.runtime.accelerator import capacity_bytes, device_bytes, is_accelerator
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.guard import oom
from ckptplan.runtime.guard.check import WHEN, Checks, When
from ckptplan.runtime.guard.engine import OldGraph
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.runtime.guard.gradients import GradientGuard
from ckptplan.runtime.guard.held_over import HeldOver
from ckptplan.runtime.guard.shapes import Larger, OnLarger
from ckptplan.runtime.guard.unplanned import Unplanned
from ckptplan.runtime.observe.measure import held_tensors, optimizer_tensors, tensors_in, unique_bytes
from ckptplan.runtime.observe.meter import Meter
from ckptplan.runtime.observe.refine import Refinement, checked_threshold, measured_steps
from ckptplan.runtime.observe.stats import Peaks, Stats, stage_stats
from ckptplan.runtime.observe.traced import record_step
from ckptplan.runtime.step import TrainingStep, check_supported, fingerprint, model_device, training_config
from ckptplan.runtime.swap.session import Counters
from ckptplan.runtime.swap.stores import Store, close_all, handing_over, make_stores

Result = TypeVar("Result")


class Adviser(Protocol):
    """What the runtime asks of those who know profiles and can solve."""

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int] | None:
        """Bytes at the start and at the worst moment of a stage, None for the glue behind the last; None: not known."""

    def replan(self, plan: Plan, shortage: Shortage) -> Plan:
        """A plan that is leaner where `plan` ran short."""

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """What each stage is to take, told as a running step tells it."""

    def drawn(self, plan: Plan) -> DrawnStep:
        """The step as it is to run."""

    def refined(self, plan: Plan, measured: Measured) -> tuple[Plan, Plan]:
        """The best plan by what was measured, and `plan` with the predictions that this gives."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replan:
    """A plan that took another's place.

    Attributes
    ----------
    shortage : Shortage or None
        Why, where a step ran out of memory.
    before, after : Plan
    larger : Larger or None
        Why, where a forward's inputs were larger than planned.
    """

    shortage: Shortage | None
    before: Plan
    after: Plan
    larger: Larger | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OnOom:
    """What to do when a step runs out of memory.

    Parameters
    ----------
    adviser : Adviser, optional
        Puts predictions into reports.
    retries : int
        So many plans are tried for one step before the error is raised; 0: it is reported alone.
    """

    adviser: Adviser | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        if not is_int(self.retries) or self.retries < 0:
            raise InvalidInputError(f"retries={self.retries!r}; give the number of plans to try for a step, 0 or more")
        if self.retries and self.adviser is None:
            raise InvalidInputError(f"retries={self.retries} without an adviser that could plan again")


class Handle:
    """An applied plan; `remove()` it, or use it as a context manager.

    Attributes
    ----------
    plan : Plan
        The one that is applied now.
    replans : tuple of Replan
        Plans that took another's place after a step ran out of memory, or for larger inputs, in order.
    returns : int
        How often a plan that was made before took another's place again, its inputs going beyond that one.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        place: Callable[[Plan, Controller | None], tuple[Controller, Mapping[Tier, Store]]],
        on_oom: OnOom | None,
        adviser: Adviser | None,
        on_larger: OnLarger | None = None,
    ) -> None:
        self.plan = plan
        self.replans: tuple[Replan, ...] = ()
        self.returns = 0
        self._model = model
        self._device = model_device(model)
        self._place = place
        self._on_oom = on_oom
        self._adviser = adviser
        self._on_larger = on_larger
        self._undo = oom.Undo(model, rewinds=on_oom is not None and on_oom.retries > 0)
        self._controller, self._stores = place(plan, None)
        self._watch_forwards()
        self._peaks = Peaks(self._device)
        self._config = contextlib.ExitStack()
        self._config.enter_context(training_config(model))
        self._config.enter_context(STEPS.watched())
        self._removed = False
        self._applied = True

    def step(self, run: Callable[[], Result]) -> Result:
        """Run one step under the handle's rule for out-of-memory errors.

        Without such a rule (`on_oom="raise"`) this is `run()`. Else, where memory runs out, the step is undone: its
        graph is freed, gradients that it began are None again, buffers are as before. Then it is reported, or run again
        with a leaner plan, from the same random state, so that the gradients are those of a plain step.

        Parameters
        ----------
        run : callable
            One step: forward, backward and, if you like, `zero_grad` and the update. What it makes should be its own
            local variables, since those of others can't be freed. To be run again, it must not use up what it reads:
            fetch the batch outside.

        Returns
        -------
        What `run` returns.

        Raises
        ------
        OutOfMemoryError
            With the allocator's error as its cause. Any other error passes through as it is.
        InfeasibleBudgetError
            If no plan fits what there is, from an OutOfMemoryError. The former plan goes on.
        """
        if self._on_oom is None or not self._applied:
            return run()
        outer = sys.exc_info()[1]
        tried = 0
        while True:
            with self._undo.step() as start:
                done, failed = self._attempt(run, start, tried)
            if failed is None:
                return done[0]
            assert failed.__cause__ is not None
            oom.drop_frames(failed.__cause__, self._device, outer)
            if tried >= self._on_oom.retries or failed.shortage.tier == "host" or failed.shortage.phase == "update":
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
        """The result, or what went wrong for want of memory; the step is undone then."""
        before, controller = self._counted(), self._controller
        live_before = device_bytes(self._device).requested_bytes if is_accelerator(self._device) else None
        controller.at_step_begin(start.backward_begins)
        try:
            return (run(),), None
        except (RuntimeError, MemoryError, CkptPlanError) as error:
            cause = oom.exhaustion(error)
            if cause is None or isinstance(error, OutOfMemoryError):
                raise
            shortage = self._shortage(error, cause, start.updating, before, live_before)
            self._controller.forget()
            lost, half = start.undo()
            failed = OutOfMemoryError(
                dataclasses.replace(shortage, gradients_lost=lost, half_updated=half), replans=tried
            )
            failed.__cause__ = error
            return (), failed
        finally:
            controller.on_backward = self._controller.on_backward = None

    def _shortage(
        self, error: BaseException, cause: BaseException, updating: bool, before: Stats, live_before: int | None
    ) -> Shortage:
        assert self._on_oom is not None
        phase, index, doing = oom.located(error, self._controller.place, updating)
        last = len(self.plan.stages) - 1
        adviser = self._on_oom.adviser
        planned = None if adviser is None else adviser.planned(self.plan, phase, index)
        done = self._counted().since(before)
        live, asked = oom.live_bytes(cause, self._device), oom.requested_bytes(cause)
        return Shortage(
            phase=phase,
            stage=self.plan.stages[last if index is None else index],
            doing=doing,
            tier="host" if live is not None and oom.is_host_memory(cause) else "device",
            requested_bytes=None if asked is None else asked[1],
            requested_least_bytes=None if asked is None else asked[0],
            budget_bytes=self.plan.budget_bytes,
            planned_bytes=self.plan.peak_bytes if planned is None else planned[1],
            planned_start_bytes=None if planned is None else planned[0],
            live_bytes=None if live is None else live.requested_bytes,
            allocated_bytes=None if live is None else live.allocated_bytes,
            reserved_bytes=None if live is None else live.reserved_bytes,
            expandable_segments="expandable_segments:True" in allocator_conf(),
            capacity_bytes=capacity_bytes(self._device),
            live_before_bytes=live_before,
            model_bytes=oom.model_bytes(self._model, self._device),
            process_bytes=oom.process_bytes(),
            swapped=tuple(
                (state.name.lower().replace("_", " "), len(sizes), sum(sizes))
                for state, sizes in sorted(self._controller.swapped().items(), key=lambda item: item[0].value)
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
        """Put a leaner plan in the present one's place; if there is none, that one stays."""
        assert self._on_oom is not None
        assert self._on_oom.adviser is not None
        before = self.plan
        try:
            plan = self._on_oom.adviser.replan(before, failed.shortage)
        except CkptPlanError as error:
            raise error from failed
        self._take(plan)
        self.replans += (Replan(failed.shortage, before, plan),)
        longer = f"{plan.step_s / before.step_s:.2f} times as long" if before.step_s else "as long as it does"
        warnings.warn(
            f"out of memory in {failed.shortage.phase} of {failed.shortage.stage!r}; went on with a plan of "
            f"{format_bytes(plan.peak_bytes)} in place of {format_bytes(before.peak_bytes)} whose step takes {longer} "
            "(handle.replans has the reports)",
            RuntimeWarning,
            stacklevel=3,
        )

    def _take(self, plan: Plan) -> None:
        """Put `plan` in the present one's place, which stays where that fails."""
        self._controller.remove()
        self._put(plan)

    def _put(self, plan: Plan) -> None:
        """Apply `plan`; the present one, which is off the model, goes back on if that fails."""
        former, stores = self._controller, self._stores
        with handing_over(stores):
            try:
                self._controller, self._stores = self._place(plan, former)
            except BaseException:
                former.install()
                raise
            close_all(stores)
        self.plan = plan
        self._controller.counters.meter.restart()
        self._peaks = Peaks(self._device, self._peaks)
        self._watch_forwards()

    def _watch_forwards(self) -> None:
        if self._on_larger is not None:
            self._controller.before_forward = self._before_forward

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Controller:
        """The controller to run this forward under: another one if its inputs are larger than planned.

        Raises
        ------
        InfeasibleBudgetError
            If no plan for them fits the budget. The former plan goes on, here and below.
        PlanMismatchError
            If they can't be planned for.
        """
        assert self._on_larger is not None
        before, former = self.plan, self._controller
        if not self._on_larger.beyond(before, args, kwargs):
            return former
        former.remove()
        try:
            plan, larger = self._on_larger.enlarged(before, args, kwargs)
        except BaseException:
            former.install()
            raise
        self._put(plan)
        if plan.stages != before.stages:
            self._controller.counters.runs.clear()  # they count by a stage's place
        if former.on_backward is not None:
            self._controller.at_step_begin(former.on_backward)
        if larger is None:
            self.returns += 1
            return self._controller
        self.replans += (Replan(None, before, plan, larger),)
        warnings.warn(f"{larger} (handle.replans has the plans)", RuntimeWarning, stacklevel=2)
        return self._controller

    def remove(self) -> None:
        """Restore the model exactly; calling it again does nothing.

        Graphs that are still alive keep what they need: their swap space goes when they go.
        """
        if self._removed:
            return
        self._removed, self._applied = True, False
        self._controller.remove()
        if self._controller.checks is not None:
            self._controller.checks.close()
        self._config.close()
        close_all(self._stores)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The plain model inside; the plan goes on afterwards."""
        was_applied, self._applied = self._applied, False
        self._controller.remove()
        try:
            yield
        finally:
            if was_applied and not self._removed:
                self._controller.install()
                self._applied = True

    def unmetered(self) -> contextlib.AbstractContextManager[None]:
        """No step inside is measured for `stats`, so that each takes what most steps of a training take.

        Use it around steps that something else times: a measured step has a mark, on CUDA an event, wherever a stage,
        a recompute or a wait begins, and a hook on every stage's output.
        """
        return self._controller.counters.meter.off()

    def stats(self) -> Stats:
        """What happened since the plan was applied, and what a step takes, beside the plan.

        On CUDA this waits for the device.
        """
        meter, adviser = self._controller.counters.meter, self._adviser
        predicted = None if adviser is None else adviser.stage_times(self.plan)
        found = stage_stats(self._counted(), self.plan, meter.steps(), predicted, self._stores)
        return self._peaks.told(found, self.plan)

    def trace(
        self, run: Callable[[], Any], *, inputs: Any = None, optimizer: torch.optim.Optimizer | None = None
    ) -> Trace:
        """Run one step and draw it: what each lane did, and the bytes on the device, beside the prediction.

        Parameters
        ----------
        run : callable
            One step, forward and backward, as you train; it is run once, and changes what it changes.
        inputs, optimizer
            What the step holds on the device besides the model: tensors anywhere in `inputs`, and the optimizer's
            state. They count to the memory, which on the CPU nothing else tells. Nor can it tell when gradients from
            before the step go: call `zero_grad` before, or the trace says so and knows no peak.

        Raises
        ------
        InvalidInputError
            If the plan isn't applied now, or `run` isn't one forward followed by its backward.
        """
        if not self._applied:
            raise InvalidInputError("the plan isn't applied now, so no step of it can be traced")
        # In no variable: gradients that the step drops must go.
        held = unique_bytes(
            [*held_tensors(self._model), *optimizer_tensors(optimizer), *tensors_in(inputs)], self._device
        )
        before = [StorageWeakRef(p.grad.untyped_storage()) for p in self._model.parameters() if p.grad is not None]
        step, notes = record_step(self._controller.counters.meter, run, self._device, held, self.plan.stages)
        if not is_accelerator(self._device):
            if any(gradient.expired() for gradient in before):
                notes += (
                    "gradients from before the step went in it, unrecorded, so memory is drawn too high from then on; "
                    "call zero_grad() before the traced step",
                )
            elif inputs is not None:
                self._peaks.traced(step.peak_bytes)
        return Trace(step, None if self._adviser is None else self._adviser.drawn(self.plan), notes)

    def refine(self, threshold: float = 0.1) -> Refinement:
        """Plan again from what the last steps took, if that differs from the prediction.

        The profile is corrected by the measured times of stages, the rates of copies, and the peak where one was
        measured, and solved within the same budget; the new plan takes the present one's place. The corrected profile
        is kept: a later call goes on from it.

        Parameters
        ----------
        threshold : float
            Nothing is changed while the measured step is within this fraction of the predicted one, and its peak
            within the budget.

        Raises
        ------
        InvalidInputError
            Without the profile, or before enough steps were measured.
        InfeasibleBudgetError
            If by the measured bytes no plan keeps the budget. The former plan goes on.
        """
        limit = checked_threshold(threshold)
        if not self._applied:
            raise InvalidInputError("the plan isn't applied now, so there is nothing to refine")
        if self._adviser is None:
            raise InvalidInputError(
                "refine corrects the profile that the plan was made from, which isn't known: pass it to apply, "
                "ckptplan.apply(model, plan, profile=profile)"
            )
        before = self.plan
        measured = measured_steps(self._controller.counters.meter.steps(), before, self._peaks.bytes)
        over = measured.peak_bytes is not None and measured.peak_bytes > before.budget_bytes
        if not over and abs(measured.step_s - before.step_s) <= limit * before.step_s:
            return Refinement(limit, measured, before, before, before)
        after, told = self._adviser.refined(before, measured)
        if (after.choices, after.segments) == (before.choices, before.segments):
            self.plan = after
        else:
            self._take(after)
        return Refinement(limit, measured, before, told, after)

    def _counted(self) -> Stats:
        counters, checks = self._controller.counters, self._controller.checks
        planned = planned_runs(self.plan)
        return Stats(
            forwards=counters.forwards,
            recomputed_stages=counters.recomputed_stages,
            planned_recomputed_stages=sum(max(runs - 1, 0) for runs in planned),
            swapped_out_bytes=counters.swapped_out_bytes,
            swapped_in_bytes=counters.swapped_in_bytes,
            planned_swapped_bytes=self.plan.host_bytes,
            runs=tuple(counters.runs[i] for i in range(len(planned))),
            planned_runs=planned,
            host_wait_s=counters.host_wait_s,
            other_paths=counters.other_paths,
            checked_forwards=0 if checks is None else checks.passes,
            compared_tensors=0 if checks is None else checks.tensors,
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def planned_runs(plan: Plan) -> tuple[int, ...]:
    """Per stage, how often its forward runs in one step; 0 for glue."""
    runs = [
        0 if is_glue(name) else 1 + (c.action == "recompute") for name, c in zip(plan.stages, plan.choices, strict=True)
    ]
    for segment in plan.segments:
        for i in range(segment.first, segment.last + 1):
            runs[i] = 0 if is_glue(plan.stages[i]) else 1 + segment.depth(i)
    return tuple(runs)


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    swap_dir: str | Path | None = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
    checksums: bool = False,
    synchronous: bool = False,
    check: When = "sampled",
    on_oom: OnOom | None = None,
    adviser: Adviser | None = None,
    on_larger: OnLarger | None = None,
) -> Handle:
    """Make every training forward of `model` follow `plan`.

    The model's classes, parameter names, `state_dict` and hooks stay as they are; only `forward` of the stages is
    replaced on the instances. Forwards without gradients, or in evaluation mode, run as if no plan were there. The
    `use_cache` of a Hugging Face configuration is off while the plan is applied. On CUDA the allocator's cache is
    emptied and its peak statistics are reset, so that `Handle.stats` tells the plan's own (`Stats.earlier` has the
    former).

    Parameters
    ----------
    swap_dir : path, optional
        Where the swap file of a CPU plan, or of a CUDA plan's disk tier, lives (unnamed, at most the plan's swapped
        bytes per living graph).
    host_gb : float, optional
        Limit on pinned host memory for a CUDA plan, in units of 2**30 bytes. A disk tier's staging counts.
    disk_gb : float, optional
        Limit on the swap file, in units of 2**30 bytes.
    checksums : bool
        Take a checksum of everything that leaves and compare it with what comes back: finds damage on any tier, and
        costs the time of reading all of it twice.
    synchronous : bool
        Wait for every copy where it is issued: the same results without overlap, for finding faults.
    check : "sampled", "always" or "off"
        In which steps to compare what comes back with what was there in forward (NOTE [Digests] in check.py).
    on_oom : OnOom, optional
        What `Handle.step` does when memory runs out; None: nothing.
    adviser : Adviser, optional
        Puts predictions beside what is measured, and plans again for `Handle.refine`.
    on_larger : OnLarger, optional
        Plans anew for a forward whose inputs are larger than planned; None: such a forward is an error.

    Returns
    -------
    Handle

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, device or library version.
    UnsupportedModelError
        If a plan is applied already, or the model checkpoints by itself or is compiled.
    InvalidInputError
        If the swap directory can't be written or is too small, the plan needs more than a limit allows, or a tier that
        its device doesn't have. The model is unchanged after any of these.
    """
    for name, value in (("checksums", checksums), ("synchronous", synchronous)):
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name}={value!r}; it is True or False")
    if check not in WHEN:
        raise InvalidInputError(f"check={check!r}; it is {', '.join(map(repr, WHEN[:-1]))} or {WHEN[-1]!r}")
    if swap_dir is not None and not isinstance(swap_dir, (str, os.PathLike)):
        raise InvalidInputError(f"swap_dir={swap_dir!r}; pass a directory's path")
    device = model_device(model)
    if not plan.fingerprint.model:
        raise PlanMismatchError(
            "the plan comes from a profile written by hand, which belongs to no model; it can be simulated only"
        )
    plan.fingerprint.require(fingerprint(TrainingStep(model)), ignore=("inputs", "accumulates"))
    check_supported(model)
    host_limit = None if host_gb is None else budget_to_bytes(host_gb, name="host_gb")
    disk_limit = None if disk_gb is None else budget_to_bytes(disk_gb, name="disk_gb")

    old_graph = OldGraph(device)
    checks = None if check == "off" else Checks(device, always=check == "always")

    def place(plan: Plan, former: Controller | None) -> tuple[Controller, Mapping[Tier, Store]]:
        """Install `plan`, which goes on counting where the one before stopped."""
        stores = make_stores(
            device,
            plan,
            directory=swap_dir,
            host_limit_bytes=host_limit,
            disk_limit_bytes=disk_limit,
            checksums=checksums,
            synchronous=synchronous,
        )
        try:
            controller = Controller(
                model,
                plan.stages,
                plan.choices,
                stores,
                torch.device(device),
                segments=plan.segments,
                inputs=plan.inputs,
                saved=plan.saved_bytes,
                one_forward=plan.fingerprint.inputs != "step()",
                counters=Counters(meter=Meter(device)) if former is None else former.counters,
                old_graph=old_graph,
                gradients=GradientGuard(model, plan),
                held_over=HeldOver(plan),
                unplanned=Unplanned(model, plan),
                checks=checks,
            )
            controller.install()
        except BaseException:
            close_all(stores)
            raise
        return controller, stores

    return Handle(model, plan, place, on_oom, adviser, on_larger)
