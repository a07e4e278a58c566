"""What whole training steps hold, phase by phase, by the CPU allocator's own account."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import record_function

from ckptplan.core.errors import InvalidInputError
from ckptplan.runtime.observe.measure import held_tensors, optimizer_tensors, recorded_allocations, unique_bytes
from ckptplan.runtime.step import TrainingStep, model_device


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Live bytes in one phase of a step; the end of a phase is the start of the next.

    Attributes
    ----------
    name : str
        "loaded", "forward", "backward", "optimizer"; in later steps with the step's number: "forward 2".
    start_bytes, end_bytes, peak_bytes : int
        At its beginning, at its end, and at its worst moment.
    """

    name: str
    start_bytes: int
    end_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The phases of some steps, and how far the account can be trusted.

    Attributes
    ----------
    phases : tuple of PhaseBytes
        In order. "loaded" begins with nothing and ends with parameters and buffers (and what there is of gradients
        and optimizer state); the inputs come first thing in the first "forward".
    unexplained_bytes : int
        What is live after the last step beyond parameters, buffers, gradients, optimizer state and inputs, counted
        directly: tensors that a module or a library keeps from step to step without registering them. A loss in the
        events (see `measure_phases`) would show here too.
    """

    phases: tuple[PhaseBytes, ...]
    unexplained_bytes: int


def measure_phases(
    step: TrainingStep, optimizer: torch.optim.Optimizer | None = None, *, steps: int = 2, set_to_none: bool = True
) -> MeasuredSteps:
    """Take whole training steps on the CPU and read each phase's bytes off the allocator's events.

    A step is forward with loss, backward, and the update followed by `zero_grad`. Output and loss are held until
    backward has ended and dropped then, as the last of that phase. The model is trained: its parameters, buffers and
    optimizer state are other ones afterwards.

    The level is what is held at the start, one storage counted once, plus the events since. Counted is what PyTorch's
    CPU allocator hands to the calling thread, which is also the one that runs backward on the CPU. Not counted:

    - what kernels take past the allocator (oneDNN's scratchpads and packed weights, OpenMP's buffers, BLAS);
    - what worker threads of a kernel allocate, with more than one intra-op thread;
    - the release of a block that is older than the recording, which has no size there: a buffer that a module
      replaces by another tensor counts twice from then on;
    - Python objects.

    Parameters
    ----------
    step : TrainingStep
        With inputs; a step of a callable of its own hides them.
    optimizer : Optimizer, optional
        None: the third phase only drops the gradients.
    steps : int
        How many, at least 1. The first makes the optimizer's state, so its peak differs from that of the others.
    set_to_none : bool
        Passed to `zero_grad`.

    Raises
    ------
    InvalidInputError
        If the model isn't on the CPU, or `step` or `steps` can't be used.
    """
    device = model_device(step.model)
    if device.type != "cpu":
        raise InvalidInputError(f"the model is on {device}; the allocator's events can be read on the CPU only")
    if step.fn is not None:
        raise InvalidInputError("a step= callable hides its inputs, which count; pass the model's inputs instead")
    if steps < 1:
        raise InvalidInputError(f"steps={steps}; at least 1 has to be measured")
    names = [
        phase if k == 1 else f"{phase} {k}"
        for k in range(1, steps + 1)
        for phase in ("forward", "backward", "optimizer")
    ]

    def run() -> None:
        # Output and loss belong to no other frame, so that they go where they are deleted.
        for forward, backward, update in zip(names[::3], names[1::3], names[2::3], strict=True):
            with record_function(forward):
                output, loss = step.forward()
            with record_function(backward):
                loss.backward()
                del output, loss
            with record_function(update):
                if optimizer is not None:
                    optimizer.step()
                step.model.zero_grad(set_to_none=set_to_none)

    start = unique_bytes([*held_tensors(step.model), *optimizer_tensors(optimizer)])
    level = _held_bytes(step, optimizer)
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
    return MeasuredSteps(tuple(phases), level - _held_bytes(step, optimizer))


def _held_bytes(step: TrainingStep, optimizer: torch.optim.Optimizer | None) -> int:
    return unique_bytes([*held_tensors(step.model), *optimizer_tensors(optimizer), *step.tensors()])
