"""The peak of one training step, from the allocator's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ckptplan.runtime.observe.measure import optimizer_tensors, peak_above_start, tensors_in, unique_bytes


def measured(
    step: Callable[[], Any], model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], inputs: Any
) -> tuple[Any, int]:
    """Run `step`; return what it returns, and the most bytes of model, gradients, state, inputs and the step itself.

    Gradients are copied when the recording begins, since memory that was taken before isn't seen to go.
    """
    states = [tensor for optimizer in optimizers for tensor in optimizer_tensors(optimizer)]
    held = unique_bytes([*model.parameters(), *model.buffers(), *states, *tensors_in(inputs)])
    del states
    found: list[Any] = []

    def run() -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad.clone()
        found.append(step())

    above = peak_above_start(run)
    return found[0], held + above
