"""Run the plain step and the planned one, and compare the measured values with the predictions."""

from __future__ import annotations

import contextlib
import gc
import html
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.arguments import LossFn
from ckptplan.core.checks import is_int
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan, require_plan
from ckptplan.core.profile import COLLECTIVES
from ckptplan.core.progress import counted
from ckptplan.core.request import Report, Training, reporting
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.distributed import apart, ddp_under
from ckptplan.distributed.group import on_all_ranks
from ckptplan.runtime.handle import Handle, apply
from ckptplan.runtime.observe.stats import Stats
from ckptplan.state.parameters import ParameterState
from ckptplan.state.process import in_own_context
from ckptplan.state.restore import optimizer_tables, restored
from ckptplan.tensors.accelerator import empty_cache, is_accelerator
from ckptplan.tensors.storages import local_part, same_bits, unique_bytes
from ckptplan.training import measure
from ckptplan.training.compiled import stages_compiled
from ckptplan.training.gradients import rewinding
from ckptplan.training.measure import StepPeaks, run_step, step_peaks, timed
from ckptplan.training.step import TrainingStep, fingerprint, make_step, model_device, training_config


@dataclass(frozen=True, slots=True)
class Verification:
    """Measured and predicted values of one plan.

    Attributes
    ----------
    budget_bytes, predicted_peak_bytes : int
        The plan's budget and its predicted peak of tensors.
    predicted_allocated_bytes, predicted_reserved_bytes : int or None
        The plan's predictions on CUDA. They are those of a training with the optimizer's update, if an optimizer was
        given to `solve`. None if the plan has none: it was solved from a profile without a model, for instance.
    measured : StepPeaks
        Peaks of a planned step, from forward to the end of backward, or of the update if `verify` was given an
        optimizer, by each counter of the allocator.
    plain : StepPeaks or None
        Peaks of the plain step; None if it doesn't fit the device, or with `plain=False`.
    predicted_step_s, measured_step_s, plain_step_s : float
        Medians over `timed_steps`, in seconds. Plain and planned steps alternate, and only their time is measured;
        where a step is so long that only one of each kind is timed, it is the one whose gradients are compared.
    predicted_plain_step_s : float
    gradients_equal : bool or None
        Whether every gradient, every buffer and the loss are bitwise those of the plain step; None if that doesn't fit
        the device, or with `plain=False`.
    differing : tuple of str
        Parameters whose gradients differ, and buffers that differ.
    plain_differing : tuple of str
        Parameters and buffers that differ between two plain steps, because a kernel isn't deterministic. Looked for
        only if a planned step differs.
    stats : Stats
        Counts of the first planned step.
    timed_steps : int
        Steps of each kind whose times are in the medians.
    not_counted : str
        The optimizer's class, if the plan counts its state and `verify` was given no optimizer; empty otherwise.
    communicates : bool
        Whether collectives of a sharded model are in the predicted times; measured steps don't communicate.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_allocated_bytes: int | None
    predicted_reserved_bytes: int | None
    measured: StepPeaks
    plain: StepPeaks | None
    predicted_step_s: float
    measured_step_s: float
    plain_step_s: float | None
    predicted_plain_step_s: float
    gradients_equal: bool | None
    differing: tuple[str, ...]
    plain_differing: tuple[str, ...]
    stats: Stats
    timed_steps: int
    not_counted: str = ""
    communicates: bool = False

    @property
    def other_paths(self) -> int:
        """Runs of a stage, in one planned step, that saved other storages than profiled; more than 0 is a fault."""
        return self.stats.other_paths

    @property
    def measured_peak_bytes(self) -> int:
        """Peak bytes of tensors in a planned step."""
        return self.measured.requested_bytes

    @property
    def plain_peak_bytes(self) -> int | None:
        """Peak bytes of tensors in a plain step; None if `plain` is None."""
        return None if self.plain is None else self.plain.requested_bytes

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak fits the budget: on CUDA the reserved bytes, otherwise the tensors."""
        return self.measured.needed_bytes <= self.budget_bytes

    def _peaks(self) -> list[str]:
        """Return the rows of the peaks: one on the CPU, three on CUDA; the last one is compared with the budget."""
        measured, plain = self.measured, self.plain
        budget = f"{'within' if self.within_budget else 'OVER'} the budget of {format_bytes(self.budget_bytes)}"
        accounts: list[tuple[str, int | None, int, str]] = [
            ("peak", self.predicted_peak_bytes, measured.requested_bytes, "")
        ]
        if measured.allocated_bytes is not None and measured.reserved_bytes is not None:
            accounts = [
                ("requested", self.predicted_peak_bytes, measured.requested_bytes, "tensors"),
                ("allocated", self.predicted_allocated_bytes, measured.allocated_bytes, "in blocks"),
                ("reserved", self.predicted_reserved_bytes, measured.reserved_bytes, ""),
            ]
        rows = []
        for name, predicted, found, what in accounts:
            error = f"predicted {predicted / found - 1:+.2%}" if predicted is not None and found else ""
            judged = budget if name == accounts[-1][0] else ""
            remark = ", ".join(part for part in (what, judged, error) if part)
            text = "not predicted" if predicted is None else format_bytes(predicted)
            rows.append(_row(name, text, format_bytes(found), remark))
        if measured.workspace_bytes is not None:
            text = "of them cuBLAS's workspaces, which aren't tensors of the step"
            rows.append(_row("", "", format_bytes(measured.workspace_bytes), text))
        if measured.other_bytes >= _WORTH_TELLING:
            text = "besides, held by the process and not the model's: not counted"
            rows.append(_row("", "", format_bytes(measured.other_bytes), text))
        rows.append(_row("plain peak", "", "not run" if plain is None else format_bytes(plain.requested_bytes)))
        if plain is not None and plain.reserved_bytes is not None:
            rows.append(_row("plain reserved", "", format_bytes(plain.reserved_bytes)))
        return rows

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        equal = {
            True: "bitwise equal",
            False: f"DIFFER in {', '.join(self.differing)}",
            None: "not compared: the plain step does not fit or was left out",
        }
        plain_s = "" if self.plain_step_s is None else format_seconds(self.plain_step_s)
        timed = "one step" if self.timed_steps == 1 else f"median of {self.timed_steps} steps"
        return "\n".join(
            [
                _row("", "predicted", "measured"),
                *self._peaks(),
                _row("step", format_seconds(self.predicted_step_s), format_seconds(self.measured_step_s), timed),
                _row("plain step", format_seconds(self.predicted_plain_step_s), plain_s),
                f"gradients {equal[self.gradients_equal]}",
                *(["predicted steps have collectives that compute doesn't hide; the measured ones don't communicate"]
                  if self.communicates else []),
                *([f"the plan counts the state of {self.not_counted}, and the measured bytes don't: pass optimizer="]
                  if self.not_counted else []),
                *([f"two plain steps differ in {', '.join(self.plain_differing)}: a kernel gives other bits each time; "
                   "compare under torch.use_deterministic_algorithms(True)"] if self.plain_differing else []),
                *([f"{self.other_paths} runs of stages saved something else than profiled: the storages that leave the "
                   "device, and the peak, don't follow from the plan; please report it"] if self.other_paths else []),
            ]
        )  # fmt: skip


TIMED_S = 10.0
"""For all timed steps together, where `verify` isn't given their number: as long as a search."""
_REPEATS = 3
_WORTH_TELLING = 1 << 20
"""Least other bytes that are shown: fewer are an applied plan's own, or too few to matter."""


def _row(name: str, predicted: str, measured: str, remark: str = "") -> str:
    return f"{name:<16}{predicted:>14}{measured:>14}  {remark}".rstrip()


@on_all_ranks
@in_own_context
def verify(
    model: nn.Module,
    plan: Plan,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    *,
    step: Callable[[], torch.Tensor] | None = None,
    amp: torch.dtype | str | None = None,
    accumulate: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    repeats: int | None = None,
    swap_dir: str | Path | None = None,
    plain: bool = True,
    on_progress: Report | None = None,
) -> Verification:
    """Measure `plan` on `model`: peaks, step time, and whether gradients are bitwise those of the plain step.

    Bytes and times are measured in separate steps. On CUDA the bytes that the allocator reserves are compared with the
    budget, without those that the process holds besides the model. The allocator's cache is emptied, and its peak
    statistics are reset.

    Afterwards parameters, buffers, gradients, random states and the optimizer are as before. No plan may be applied to
    the model.

    Parameters
    ----------
    inputs, loss_fn, step, amp
        The inputs, loss and autocast type that the plan was made for (see `profile`).
    accumulate : bool, optional
        Whether the measured steps start with gradients; by default, whether the plan is for such steps. The model's
        own gradients stay unchanged, and count only as copies with which such a step starts.
    optimizer : Optimizer, optional
        The step whose bytes are measured has its state from the start, and ends with its update. Without it, existing
        optimizer state counts as other tensors.
    repeats : int, optional
        Timed steps of each kind, after a warm-up. Default: 3, or fewer where these would take more than 10 s; where one
        of each would, the two steps whose gradients are compared are the ones that are timed.
    plain : bool
        False: don't run the plain step, because it would fill up a device that can't hold it. Then nothing is compared.
    on_progress : callable, optional
        Called with a description of each step that begins, as in `solve`.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, shapes, device or library version, or if it was made for steps that
        start without gradients and doesn't fit its budget with them.
    InvalidInputError
        If an argument can't be used, the inputs don't fit the model, or the optimizer's update needs arguments.
    """
    require_plan(plan)
    if repeats is not None and (not is_int(repeats) or repeats < 1):
        raise InvalidInputError(f"repeats={repeats!r}; at least 1 step has to be timed")
    if inputs is None and step is None:
        raise InvalidInputError("verify needs the inputs the plan was made for: pass inputs= (or step=)")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(f"optimizer={optimizer!r}: verify runs its update; pass the optimizer itself")
    if accumulate is None:
        accumulate = plan.fingerprint.accumulates
    options = Training(inputs, loss_fn, step=step, amp=amp, accumulate=accumulate, ddp=ddp_under(model, plan))
    training = make_step(model, options).under(options.amp, model_device(model).type)
    training.on_device(model_device(model))
    is_wrapped, model = training.model is not model, training.model
    ignored = () if plan.fingerprint.parallel else training.parallel.free_fields("")  # measured as it is now
    made_for = plan.fingerprint
    made_for.require(fingerprint(training, compiles=made_for.compiled), ignore=("accumulates", *ignored))
    with (
        stages_compiled(model, made_for.compiled),  # in the plain steps, too
        apart(model, optimizer),
        ParameterState(model.parameters()).restored() as parameters,
        training_config(model),
        training.parallel.reducing_last(),
        restored(model, training.reached()) as rewind,
        apply(model, plan, swap_dir=swap_dir, check="off") as handle,
    ):
        rewind = rewinding(model, rewind, accumulates=training.accumulates)
        tell = reporting(on_progress)
        tell("running a step to see what it reads")
        steps = _VerifiedSteps(training, optimizer, rewind, parameters)
        # No variable refers to the buckets on the device. Before the model is wrapped, these stand in for them.
        stand_in_bytes = 0 if is_wrapped else training.parallel.unseen_bytes()
        _buckets = torch.empty(stand_in_bytes, dtype=torch.uint8, device=steps.device) if stand_in_bytes else None
        return _verified(plan, steps, handle, tell, plain=plain, repeats=repeats)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Seconds, loss, and gradients and buffers of a step, on the CPU."""

    took_s: float
    loss: torch.Tensor
    results: dict[str, torch.Tensor]

    def differing(self, other: _Compared) -> tuple[str, ...]:
        """Return the names of what differs, or is in one of them only."""
        names = {**self.results, **other.results}
        return tuple(name for name in names if not same_bits(self.results.get(name), other.results.get(name)))


class _VerifiedSteps:
    """Runs steps of a training, each from the state that the model has when this object is made."""

    def __init__(
        self,
        training: TrainingStep,
        optimizer: torch.optim.Optimizer | None,
        rewind: Callable[[], None],
        parameters: ParameterState,
    ) -> None:
        self.training, self.model, self.parameters = training, training.model, parameters
        self.device = model_device(self.model)
        self.optimizer, self._rewind_state = optimizer, rewind
        self._rewind()
        self._outside = measure.read_from_outside(training)
        self._rewind()
        self._put_state = _with_state(optimizer, self._run)

    def _run(self) -> torch.Tensor:
        return run_step(self.training)

    def _rewind(self) -> None:
        self._rewind_state()
        self.parameters.put()

    def _rewind_all(self) -> None:
        self._rewind()
        self._put_state()

    def _run_whole(self) -> None:
        run_step(self.training, None if self.optimizer is None else self.optimizer.step)

    def seconds(self, run: Callable[[], Any] | None = None) -> float:
        """Return the time of one step."""
        self._rewind()
        return timed(run or self._run, self.device)

    def compared(self, resident: Callable[[], contextlib.AbstractContextManager[None]]) -> _Compared:
        """Run a step and return what is compared of it, which is read inside of `resident`."""
        losses: list[torch.Tensor] = []
        took_s = self.seconds(lambda: losses.append(self._run()))
        left = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        left.update({f"buffer {name}": buffer for name, buffer in self.model.named_buffers()})
        with resident():
            results = {name: local_part(tensor).detach().to("cpu", copy=True) for name, tensor in left.items()}
        return _Compared(took_s, losses[0].cpu(), results)

    def peaks(self) -> StepPeaks:
        """Return the peaks of a step, with the optimizer's update."""
        self._rewind_all()
        for each in list(measure.RENEWED):  # what is away between steps, and was read since the last one, leaves again
            each.renew()
        held = [*measure.held_tensors(self.model), *measure.optimizer_tensors(self.optimizer), *self._outside]
        held_bytes = unique_bytes(held, self.device) + self.training.parallel.unseen_bytes()
        del held
        return step_peaks(self._run_whole, self.device, held_bytes, self._rewind_all)


def _verified(
    plan: Plan, steps: _VerifiedSteps, handle: Handle, tell: Callable[[str], None], *, plain: bool, repeats: int | None
) -> Verification:
    """Run plain and planned steps, and return what was measured beside the predictions."""
    reference: _Compared | None = None
    plain_peaks: StepPeaks | None = None
    if plain:
        with contextlib.suppress(torch.OutOfMemoryError), handle.paused():
            tell("running a plain step, whose gradients are compared")
            reference = steps.compared(handle.resident)
            tell("measuring the peak of a plain step")
            plain_peaks = steps.peaks()
    if plain_peaks is None:
        reference = None
        gc.collect()
        empty_cache(steps.device)
    before = handle.stats()
    tell("running a planned step, whose gradients are compared")
    found = steps.compared(handle.resident)
    stats = handle.stats().since(before)
    steps.parameters.settle()
    tell("measuring the peak of a planned step")
    planned_peaks = steps.peaks()
    plain_s, planned_s = _times(steps, handle, tell, (reference, found), repeats)
    differing = () if reference is None else reference.differing(found)
    equal = None if reference is None else not differing and same_bits(found.loss, reference.loss)
    plain_differing: tuple[str, ...] = ()
    if reference is not None and not equal:
        with handle.paused():
            plain_differing = reference.differing(steps.compared(handle.resident))
    return Verification(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        predicted_allocated_bytes=plan.allocated_bytes,
        predicted_reserved_bytes=plan.reserved_bytes,
        measured=planned_peaks,
        plain=plain_peaks,
        predicted_step_s=plan.step_s,
        measured_step_s=statistics.median(planned_s),
        plain_step_s=statistics.median(plain_s) if plain_s else None,
        predicted_plain_step_s=plan.baseline_step_s,
        gradients_equal=equal,
        differing=differing,
        plain_differing=plain_differing,
        stats=stats,
        timed_steps=len(planned_s),
        not_counted=plan.fingerprint.optimizer if steps.optimizer is None else "",
        communicates=any(note.startswith(COLLECTIVES) for note in plan.notes),
    )


def _times(
    steps: _VerifiedSteps,
    handle: Handle,
    tell: Callable[[str], None],
    compared: tuple[_Compared | None, _Compared],
    repeats: int | None,
) -> tuple[list[float], list[float]]:
    """Return the seconds of plain and of planned steps, which alternate; if none are timed, those of `compared`."""
    plain, planned = compared
    plain_s, planned_s = [] if plain is None else [plain.took_s], [planned.took_s]
    if repeats is None:
        repeats = min(_REPEATS, int(TIMED_S / sum(plain_s + planned_s)))
    # Beside the compared steps, one on an accelerator refills the emptied cache.
    warm_up = 1 + int(is_accelerator(steps.device)) if repeats else 0
    with handle.unmetered():
        for k in range(warm_up - 1 + repeats):
            tell(counted("timing", k + 1, warm_up - 1 + repeats, "steps of each kind"))
            if plain is not None:
                with handle.paused():
                    plain_s.append(steps.seconds())
            planned_s.append(steps.seconds())
    return plain_s[warm_up:], planned_s[warm_up:]


def _with_state(optimizer: torch.optim.Optimizer | None, run: Callable[[], Any]) -> Callable[[], None]:
    """Run a step with the optimizer's update; return a function that gives it the state which it has then, again."""
    if optimizer is None:
        return lambda: None
    run()
    try:
        optimizer.step()
    except TypeError as error:
        raise InvalidInputError(
            f"{type(optimizer).__name__}.step() can't be called alone ({error}); leave optimizer= out, and the "
            "measured steps end with backward"
        ) from error
    return optimizer_tables(optimizer)
