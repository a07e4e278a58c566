"""Run the plain step and the planned one, and lay what was measured beside what was predicted."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.chain import is_int
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan, require_plan
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.runtime.apply import apply
from ckptplan.runtime.measure import (
    Outside,
    held_tensors,
    optimizer_tensors,
    peak_above_start,
    run_step,
    timed,
    unique_bytes,
)
from ckptplan.runtime.state import restored
from ckptplan.runtime.stats import Stats
from ckptplan.runtime.step import LossFn, TrainingStep, fingerprint, make_step, model_device, training_config


@dataclass(frozen=True, slots=True)
class Verification:
    """Measured beside predicted, for one plan.

    Attributes
    ----------
    budget_bytes, predicted_peak_bytes, measured_peak_bytes : int
        Peak of a planned step, forward to the end of backward.
    plain_peak_bytes : int or None
        Peak of the plain step; None where it doesn't fit the device, or wasn't asked for.
    predicted_step_s, measured_step_s, plain_step_s : float
        Medians over the repeats, plain and planned steps in turn, which nothing else is measured in.
    predicted_plain_step_s : float
    gradients_equal : bool or None
        Every gradient, every buffer and the loss bit for bit as in the plain step; None where that one doesn't fit
        or wasn't asked for.
    differing : tuple of str
        Parameters whose gradient differs, and buffers that do.
    stats : Stats
        What the runtime did in one planned step, the first.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_peak_bytes: int | None
    predicted_step_s: float
    measured_step_s: float
    plain_step_s: float | None
    predicted_plain_step_s: float
    gradients_equal: bool | None
    differing: tuple[str, ...]
    stats: Stats

    @property
    def other_paths(self) -> int:
        """Runs of a stage, in one planned step, that saved something else than was profiled; any is a fault."""
        return self.stats.other_paths

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        def row(name: str, predicted: str, measured: str, remark: str = "") -> str:
            return f"{name:<16}{predicted:>14}{measured:>14}  {remark}".rstrip()

        error = self.predicted_peak_bytes / self.measured_peak_bytes - 1 if self.measured_peak_bytes else 0.0
        fits = "within" if self.within_budget else "OVER"
        equal = {
            True: "bitwise equal",
            False: f"DIFFER in {', '.join(self.differing)}",
            None: "not compared: the plain step does not fit or was left out",
        }
        plain_peak = "not run" if self.plain_peak_bytes is None else format_bytes(self.plain_peak_bytes)
        plain_s = "" if self.plain_step_s is None else format_seconds(self.plain_step_s)
        return "\n".join(
            [
                row("", "predicted", "measured"),
                row("peak", format_bytes(self.predicted_peak_bytes), format_bytes(self.measured_peak_bytes),
                    f"{fits} the budget of {format_bytes(self.budget_bytes)}, predicted {error:+.2%}"),
                row("plain peak", "", plain_peak),
                row("step", format_seconds(self.predicted_step_s), format_seconds(self.measured_step_s)),
                row("plain step", format_seconds(self.predicted_plain_step_s), plain_s),
                f"gradients {equal[self.gradients_equal]}",
                *([f"{self.other_paths} runs of stages saved something else than profiled: what leaves the device, and "
                   "the peak, don't follow from the plan; please report it"] if self.other_paths else []),
            ]
        )  # fmt: skip


def verify(
    model: nn.Module,
    plan: Plan,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    *,
    step: Callable[[], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    repeats: int = 3,
    swap_dir: str | Path | None = None,
    plain: bool = True,
) -> Verification:
    """Measure `plan` on `model`: peak, step time, and gradients against the plain step, bit for bit.

    Parameters, buffers, gradients and random states are as before afterwards. No plan may be applied to the model.

    Parameters
    ----------
    inputs, loss_fn, step
        As the plan was made for (see `profile`).
    optimizer : Optimizer, optional
        Its state counts towards the peak; no update is run.
    repeats : int
        Timed steps of each kind, after a warm-up.
    plain : bool
        False: the plain step isn't run, lest a device that can't hold it be filled up; nothing is compared with it.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, shapes, device or library version.
    InvalidInputError
        If the inputs don't fit.
    """
    require_plan(plan)
    if not is_int(repeats) or repeats < 1:
        raise InvalidInputError(f"repeats={repeats!r}; at least 1 step has to be timed")
    if inputs is None and step is None:
        raise InvalidInputError("verify needs the inputs the plan was made for: pass inputs= (or step=)")
    training = make_step(model, inputs, loss_fn=loss_fn, step=step)
    device = model_device(model)
    training.on_device(device)
    plan.fingerprint.require(fingerprint(training))
    with restored(model) as rewind, training_config(model), apply(model, plan, swap_dir=swap_dir) as handle:
        rewind()
        outside = training.tensors() if step is None else _read_from_outside(training, rewind)
        held_bytes = unique_bytes([*held_tensors(model), *optimizer_tensors(optimizer), *outside], device)
        del outside

        def once() -> torch.Tensor:
            return run_step(training)

        def measured(run: Callable[[], Any], how: Callable[[Callable[[], Any], torch.device], Any]) -> Any:
            rewind()
            return how(run, device)

        plain_peak: int | None = None
        plain_loss: torch.Tensor | None = None
        reference: dict[str, torch.Tensor] = {}
        if plain:
            try:
                with handle.paused():
                    rewind()
                    plain_loss = run_step(training)
                    reference = _results(model)
                    plain_peak = held_bytes + measured(once, peak_above_start)
            except torch.OutOfMemoryError:
                plain_loss, reference = None, {}
        if plain_loss is None and device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        before = handle.stats()
        loss = measured(once, lambda run, _: run())
        stats = handle.stats().since(before)
        found = _results(model)
        peak = held_bytes + measured(once, peak_above_start)
        planned_s, plain_s = [], []
        with handle.unmetered():
            for _ in range(repeats):
                if plain_loss is not None:
                    with handle.paused():
                        plain_s.append(measured(once, timed))
                planned_s.append(measured(once, timed))
    differing = tuple(name for name in {**reference, **found} if not _same(reference.get(name), found.get(name)))
    equal = None if plain_loss is None else not differing and _same(loss, plain_loss)
    return Verification(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=peak,
        plain_peak_bytes=plain_peak,
        predicted_step_s=plan.step_s,
        measured_step_s=statistics.median(planned_s),
        plain_step_s=statistics.median(plain_s) if plain_s else None,
        predicted_plain_step_s=plan.baseline_step_s,
        gradients_equal=equal,
        differing=differing if plain_loss is not None else (),
        stats=stats,
    )


def _results(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a step leaves: gradients by parameter, and buffers, such as running statistics."""
    left = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    left.update({f"buffer {name}": buffer for name, buffer in model.named_buffers()})
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in left.items()}


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bit for bit, NaNs included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _read_from_outside(training: TrainingStep, rewind: Callable[[], None]) -> list[torch.Tensor]:
    """Tensors a step's callable reads that no operation of it made: its inputs."""
    with Outside() as mode:
        run_step(training)
    rewind()
    return mode.tensors
