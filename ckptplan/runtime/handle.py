"""Apply a plan to a model, and remove it again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.link import Tier
from ckptplan.core.page import Page
from ckptplan.core.plan import Plan
from ckptplan.core.request import Training
from ckptplan.core.trace import Trace
from ckptplan.distributed import ddp_under, unwrapped
from ckptplan.runtime.adviser import Adviser
from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.check import Checks, When, require_when
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.guard.engine import OldGraph
from ckptplan.runtime.guard.fresh_state import FreshState
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.runtime.guard.gradients import GradientGuard
from ckptplan.runtime.guard.held_over import HeldOver
from ckptplan.runtime.guard.larger import replace_for_larger
from ckptplan.runtime.guard.last_words import last_words, leaves
from ckptplan.runtime.guard.oom import add_note
from ckptplan.runtime.guard.shapes import OnLarger
from ckptplan.runtime.guard.unplanned import Unplanned
from ckptplan.runtime.guard.updates import noticing_updates
from ckptplan.runtime.observe import report
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.observe.meter import Meter
from ckptplan.runtime.observe.stats import Stats
from ckptplan.runtime.swap.stores import Store, SwapOptions, close_all, make_stores
from ckptplan.training.compiled import hooks_in, is_compiled
from ckptplan.training.step import check_supported, fingerprint, make_step, model_device, training_config

_HANDLES: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
"""By a model's identity the handle of its plan, which lives as long as the model's patches do."""


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of the plan that is applied to `model`; None if none is."""
    return _HANDLES.get(id(unwrapped(model)))


def without_plan(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which `model` runs without the plan that is applied to it, if there is one."""
    handle = handle_of(model)
    return contextlib.nullcontext() if handle is None else handle.paused()


def remove(model: nn.Module) -> bool:
    """Restore a model to which a plan is applied, as `Handle.remove` does: for a handle that wasn't kept.

    Parameters
    ----------
    model : nn.Module
        The model that was given to `apply`, also if it is wrapped in `DistributedDataParallel` by now.

    Returns
    -------
    bool
        Whether a plan was applied.

    Raises
    ------
    CheckError
        As by `Handle.remove`.
    """
    handle = handle_of(model)
    if handle is not None:
        handle.remove()
    return handle is not None


class Handle:
    """An applied plan. Call `remove()` to restore the model, or use the handle as a context manager."""

    def __init__(self, applied: Applied) -> None:
        self._applied = applied
        applied.handle = self
        self._register(applied.model)
        try:
            for guard in (
                training_config(applied.model),
                STEPS.watched(),
                noticing_updates(applied),
                last_words(applied),
            ):
                applied.guards.enter_context(guard)
        except BaseException:
            self.remove()
            raise

    def _register(self, model: nn.Module) -> None:
        _HANDLES[id(model)] = self

    def _unregister(self, model: nn.Module) -> None:
        if _HANDLES.get(id(model)) is self:
            del _HANDLES[id(model)]

    @property
    def plan(self) -> Plan:
        """The plan that is applied now."""
        return self._applied.plan

    @property
    def replans(self) -> tuple[Replan, ...]:
        """Replacements of the plan for larger inputs, in order."""
        return self._applied.replans

    @property
    def returns(self) -> int:
        """Number of times that an earlier plan was put back, because the inputs were too large for the present one."""
        return self._applied.returns

    def remove(self) -> None:
        """Restore the model exactly; calling it again does nothing.

        Graphs that are still alive can run backward: their swap space is freed together with them.

        Raises
        ------
        CheckError
            If tensors that an accelerator brought back in the last step differ from those of forward
            (`apply(..., check=)`). Not while another error is handled.
        """
        if self._applied.remove():
            self._unregister(self._applied.model)
            error = sys.exc_info()[1]
            leaves(self._applied, error)  # which ends the plan before it ends the process
            self._applied.guards.close()
            close_all(self._applied.stores)
            checks = self._applied.controller.checks
            if checks is not None and error is None:
                checks.settle(wait=True)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model runs without the plan; afterwards the plan is applied again."""
        return self._applied.paused()

    def resident(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all weights that the plan moves are on the device, and stay there."""
        return self._applied.controller.weights.resident()

    def unmetered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no step is measured for `stats`, so that each runs at its usual speed.

        Use it around steps that you time yourself. A measured step takes longer: it has a mark, on CUDA an event,
        wherever a stage, a recompute or a wait begins, and a hook on every stage's output.
        """
        return self._applied.controller.counters.meter.off()

    def stats(self) -> Stats:
        """Return counts since the plan was applied and the time and bytes of a step, beside the planned ones.

        On CUDA this waits for the device.
        """
        return report.stats(self._applied)

    def trace(
        self, run: Callable[[], Any], *, inputs: Any = None, optimizer: torch.optim.Optimizer | None = None
    ) -> Trace:
        """Run one step and record its spans of compute and copies and the bytes on the device, beside the prediction.

        Parameters
        ----------
        run : callable
            One step of your training, forward and backward. It is run once and not undone.
        inputs, optimizer
            The bytes that the step holds on the device besides the model: tensors anywhere in `inputs`, and the
            optimizer's state. They are needed on the CPU, whose allocator doesn't count them. Nor does it show when
            gradients from before the step are freed: call `zero_grad` before, otherwise the trace has a note about it
            and no peak.

        Raises
        ------
        InvalidInputError
            If the plan isn't applied now, or `run` isn't one forward followed by its backward.
        """
        return report.trace(self._applied, run, inputs, optimizer)

    def report(self, **options: Any) -> Page:
        """A page on the applied plan, with the statistics of its steps; see `Plan.report`.

        Parameters
        ----------
        **options
            As of `Plan.report`, such as `trace=handle.trace(...)`, which draws a measured step over the predicted one.

        Raises
        ------
        InvalidInputError
            If the profile isn't known.
        """
        return report.page(self._applied, options)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    swap_dir: str | Path | None = None,
    swap_options: SwapOptions | None = None,
    check: When = "sampled",
    strict: bool = False,
    adviser: Adviser | None = None,
    on_larger: OnLarger | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Handle:
    """Make every training forward of `model` follow `plan`; see `ckptplan.apply`.

    Parameters
    ----------
    swap_dir, check, strict
        As of `ckptplan.apply`.
    swap_options : SwapOptions, optional
    adviser : Adviser, optional
        Supplies predictions for `Handle.stats`, `Handle.trace` and notes on out-of-memory errors.
    on_larger : OnLarger, optional
        Makes another plan for a forward whose inputs are larger than planned; None: it follows the present one.
    optimizer : Optimizer, optional
        One whose state may move from the first step on; any is known from its first update on.
    """
    swap_options = swap_options or SwapOptions()
    for name, value in (("synchronous", swap_options.synchronous), ("strict", strict)):
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name}={value!r}; it is True or False")
    require_when(check)
    if swap_dir is not None and not isinstance(swap_dir, (str, os.PathLike)):
        raise InvalidInputError(f"swap_dir={swap_dir!r}; pass a directory's path")
    device = model_device(model)
    model = _fitting(model, plan)
    old_graph, fresh_state = OldGraph(device), FreshState(device)
    checks = None if check == "off" else Checks(device, always=check == "always")

    def place(plan: Plan, former: Controller | None) -> tuple[Controller, Mapping[Tier, Store]]:
        """Install `plan`, whose controller goes on with the counters of the `former` one."""
        differences = Differences("raise" if strict else "warn")
        counters = Counters(meter=Meter(device), differences=differences) if former is None else former.counters
        stores = make_stores(device, plan, swap_dir, swap_options)
        try:
            controller = Controller(
                model,
                plan.decided,
                stores,
                torch.device(device),
                one_forward=plan.fingerprint.inputs != "step()",
                counters=counters,
                observers=(
                    fresh_state,
                    HeldOver(plan, counters.differences),
                    GradientGuard(model, plan, counters.differences),
                    Unplanned(model, plan, device, counters.differences),
                ),
                checks=checks,
            )
            controller.old_graph = old_graph
            if former is not None:
                controller.weights.optimizers.extend(former.weights.optimizers)
            elif optimizer is not None:
                controller.weights.knows(optimizer)
            controller.install()
        except BaseException:
            close_all(stores)
            raise
        return controller, stores

    applied = Applied(model, device, plan, place, adviser)
    applied.on_error = applied.controller.on_error = functools.partial(add_note, applied)
    if on_larger is not None:
        replace_for_larger(applied, on_larger)
    applied.guards.enter_context(fresh_state.watching())
    return Handle(applied)


def _fitting(model: nn.Module, plan: Plan) -> nn.Module:
    """Return the model without wrappers, after a check that the plan was made for it."""
    planned = plan.fingerprint
    if not planned.model:
        raise PlanMismatchError(
            "the plan comes from a profile written by hand, which belongs to no model; it can be simulated only"
        )
    step = make_step(model, Training((), ddp=ddp_under(model, plan)))
    here = fingerprint(step, compiles=planned.compiled)
    planned.require(here, ignore=("inputs", "accumulates", *step.parallel.free_fields(planned.parallel)))
    check_supported(step.model)
    for name, module in step.model.named_modules():
        if name in planned.compiled and not is_compiled(module) and (why := hooks_in(module)):
            raise PlanMismatchError(f"the plan has a {type(module).__name__} compiled, and {why}; solve again")
    return step.model
