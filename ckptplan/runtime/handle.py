"""Apply a plan to a model, and take it off again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.link import Tier
from ckptplan.core.plan import Plan
from ckptplan.core.trace import Trace
from ckptplan.core.units import budget_to_bytes
from ckptplan.runtime.adviser import Adviser
from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.check import WHEN, Checks, When
from ckptplan.runtime.guard.engine import OldGraph
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.runtime.guard.gradients import GradientGuard
from ckptplan.runtime.guard.held_over import HeldOver
from ckptplan.runtime.guard.larger import LargerInputs
from ckptplan.runtime.guard.retry import OnOom, Retry
from ckptplan.runtime.guard.shapes import OnLarger
from ckptplan.runtime.guard.unplanned import Unplanned
from ckptplan.runtime.observe.meter import Meter
from ckptplan.runtime.observe.refine import Refinement
from ckptplan.runtime.observe.report import Report
from ckptplan.runtime.observe.stats import Stats
from ckptplan.runtime.step import TrainingStep, check_supported, fingerprint, model_device, training_config
from ckptplan.runtime.swap.session import Counters
from ckptplan.runtime.swap.stores import Store, close_all, make_stores

Result = TypeVar("Result")


class Handle:
    """An applied plan; `remove()` it, or use it as a context manager."""

    def __init__(self, applied: Applied, report: Report, retry: Retry | None) -> None:
        self._applied, self._report, self._retry = applied, report, retry
        self._config = contextlib.ExitStack()
        self._config.enter_context(training_config(applied.model))
        self._config.enter_context(STEPS.watched())

    @property
    def plan(self) -> Plan:
        """The plan that is applied now."""
        return self._applied.plan

    @property
    def replans(self) -> tuple[Replan, ...]:
        """Plans that took another's place after a step ran out of memory, or for larger inputs, in order."""
        return self._applied.replans

    @property
    def returns(self) -> int:
        """How often a plan that was made before took another's place again, its inputs going beyond that one."""
        return self._applied.returns

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
        return run() if self._retry is None or not self._applied.is_on else self._retry.step(run)

    def remove(self) -> None:
        """Restore the model exactly; calling it again does nothing.

        Graphs that are still alive keep what they need: their swap space goes when they go.
        """
        if self._applied.remove():
            self._config.close()
            close_all(self._applied.stores)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """The plain model inside; the plan goes on afterwards."""
        return self._applied.paused()

    def unmetered(self) -> contextlib.AbstractContextManager[None]:
        """No step inside is measured for `stats`, so that each takes what most steps of a training take.

        Use it around steps that something else times: a measured step has a mark, on CUDA an event, wherever a stage,
        a recompute or a wait begins, and a hook on every stage's output.
        """
        return self._applied.controller.counters.meter.off()

    def stats(self) -> Stats:
        """What happened since the plan was applied, and what a step takes, beside the plan.

        On CUDA this waits for the device.
        """
        return self._report.stats()

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
        return self._report.trace(run, inputs=inputs, optimizer=optimizer)

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
        return self._report.refine(threshold)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


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
                plan.decided,
                stores,
                torch.device(device),
                one_forward=plan.fingerprint.inputs != "step()",
                counters=Counters(meter=Meter(device)) if former is None else former.counters,
                old_graph=old_graph,
                observers=(HeldOver(plan), GradientGuard(model, plan), Unplanned(model, plan, device)),
                checks=checks,
            )
            controller.install()
        except BaseException:
            close_all(stores)
            raise
        return controller, stores

    applied = Applied(model, device, plan, place)
    if on_larger is not None:
        LargerInputs(applied, on_larger)
    retry = None if on_oom is None else Retry(applied, on_oom)
    return Handle(applied, Report(applied, adviser), retry)
