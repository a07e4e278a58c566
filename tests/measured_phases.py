"""Bytes that whole training steps hold, by phase, from the events of the CPU's allocator."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from ckptplan.core.estimate import Estimate
from ckptplan.core.request import Training
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, optimizer_tensors, recorded_allocations
from ckptplan.training.step import TrainingStep, make_step


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Live bytes in one phase of a step; the end of a phase is the start of the next.

    Attributes
    ----------
    name : str
        "loaded", "forward", "backward", "optimizer" ("zero_grad" without one); in later steps with the step's number:
        "forward 2".
    start_bytes, end_bytes, peak_bytes : int
        Live bytes at the phase's beginning, at its end, and at most.
    """

    name: str
    start_bytes: int
    end_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The phases of some steps.

    Attributes
    ----------
    phases : tuple of PhaseBytes
        In order. "loaded" begins with 0 bytes and ends with parameters, buffers, and existing gradients and optimizer
        state. The inputs are added at the beginning of the first "forward".
    """

    phases: tuple[PhaseBytes, ...]


def measure_phases(
    step: TrainingStep | Sequence[TrainingStep],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 2,
    accumulation_steps: int = 1,
    set_to_none: bool = True,
    held: Iterable[torch.Tensor] = (),
    holds_output: bool = True,
    keeps: Collection[str] = (),
) -> MeasuredSteps:
    """Run whole training steps on the CPU and compute each phase's bytes from the allocator's events.

    A step is forward with loss, backward, and the update followed by `zero_grad`. What the loop holds of a step is said
    by `holds_output` and `keeps`; by default output and loss are dropped at the end of the backward phase. The model is
    trained: its parameters, buffers and optimizer state change.

    The live bytes are those held at the start, each storage counted once, plus the events since. The events are those
    of PyTorch's CPU allocator in the calling thread, which also runs backward on the CPU. Not counted are:

    - memory that kernels take without the allocator (oneDNN's scratchpads and packed weights, OpenMP's buffers, BLAS);
    - memory that worker threads of a kernel allocate, with more than one intra-op thread;
    - the release of a block that is older than the recording, whose size isn't known there: a buffer that a module
      replaces by another tensor counts twice from then on;
    - Python objects.

    Parameters
    ----------
    step : TrainingStep, or a sequence of them
        A step with inputs; those of a step with a callable (`fn`) aren't known. Of a sequence each has a batch, which
        is copied in the forward phase, after the one before has been freed.
    optimizer : Optimizer, optional
        Optimizer of the update; without it, the third phase only drops the gradients.
    steps : int
        Number of steps, at least 1, if there is one batch. The first makes the optimizer's state, so its peak differs
        from the others.
    accumulation_steps : int
        How many batches of a sequence make an update.
    set_to_none : bool
        Passed to `zero_grad`.
    held : iterable of tensors
        Further tensors that are there before the first step, and stay.
    holds_output : bool
        The output is referenced during backward.
    keeps : collection of str
        What is referenced until the next step's has taken its place: any of "output", "loss", "batch". With "batch"
        each step has a copy of the inputs.

    """
    loaded = not isinstance(step, TrainingStep) or "batch" in keeps
    batches = [step] * steps if isinstance(step, TrainingStep) else list(step)
    step = batches[-1]
    model = step.model
    names: list[str] = []
    for k in range(len(batches)):
        number, micro = k // accumulation_steps + 1, k % accumulation_steps + 1
        suffix = f" {number}" if number > 1 else ""
        more = f", accumulating{f' {micro}' if micro > 2 else ''}" if micro > 1 else ""
        names += [f"forward{suffix}{more}", f"backward{suffix}{more}"]
        if micro == accumulation_steps:
            names.append(f"{'zero_grad' if optimizer is None else 'optimizer'}{suffix}")

    left: list[Any] = []

    def run() -> None:
        # No other frame holds output and loss, so that names bound to None free them.
        args, kwargs = step.args, step.kwargs
        name = iter(names)
        for k, batch in enumerate(batches, 1):
            with record_function(next(name)):
                if loaded:
                    if "batch" not in keeps:
                        args = kwargs = None
                    args, kwargs = _copied((batch.args, batch.kwargs))
                with batch.autocasting():
                    output = model(*args, **kwargs)
                    loss = batch.loss_fn(output)
                if not holds_output:
                    output = None
            with record_function(next(name)):
                loss.backward()
                output = output if "output" in keeps else None
                loss = loss if "loss" in keeps else None
            if k % accumulation_steps:
                continue
            with record_function(next(name)):
                if optimizer is not None:
                    optimizer.step()
                model.zero_grad(set_to_none=set_to_none)
        left.extend((output, loss, args, kwargs))  # freed after the recording

    held = list(held)
    start = unique_bytes([*held_tensors(model), *optimizer_tensors(optimizer), *held])
    level = start if loaded else _held_bytes(step, optimizer, held)
    events, spans = recorded_allocations(run)
    begins = [spans[name][0] for name in names]
    phases = [PhaseBytes("loaded", 0, start, start)]
    position = 0
    for name, end in zip(names, [*begins[1:], None], strict=True):
        peak = level
        while position < len(events) and (end is None or events[position][0] < end):
            level += events[position][1]
            peak = max(peak, level)
            position += 1
        phases.append(PhaseBytes(name, start, level, peak))
        start = level
    return MeasuredSteps(tuple(phases))


def assert_measured(
    found: Estimate,
    model: torch.nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss_fn: Any = None,
    amp: torch.dtype | None = None,
    **how: Any,
) -> None:
    """Each phase of real steps, one for each batch of a list, has exactly the bytes that were estimated."""
    batches = inputs if isinstance(inputs, list) else [inputs]
    steps = [make_step(model, Training(batch, loss_fn=loss_fn)) for batch in batches]
    if amp is not None:
        steps = [replace(step, autocast=("cpu", amp)) for step in steps]
    measured = measure_phases(steps if isinstance(inputs, list) else steps[0], optimizer, **how)
    real = {p.name: (p.start_bytes, p.peak_bytes, p.end_bytes) for p in measured.phases}
    phases = [found.phase(name) for name in real]
    assert {p.name: (p.start_bytes, p.peak_bytes, p.end_bytes) for p in phases} == real


def _copied(tree: Any) -> Any:
    """Return a tree with copies of its tensors, one for each."""
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copied, tree)


def _held_bytes(step: TrainingStep, optimizer: torch.optim.Optimizer | None, held: list[torch.Tensor]) -> int:
    return unique_bytes([*held_tensors(step.model), *optimizer_tensors(optimizer), *step.tensors(), *held])
