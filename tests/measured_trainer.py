"""A Trainer that measures its training steps from the allocator's events."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ckptplan.runtime.observe.measure import optimizer_tensors, peak_above_start, tensors_in, unique_bytes


class MeasuredTrainer(Trainer):
    """Runs each training step twice, from the same gradients, and measures the second one: the first may plan.

    Attributes
    ----------
    peaks : list of int
        Of each step, the most bytes of the model, its gradients, the optimizer's state, the batch and the step itself.
    """

    peaks: list[int]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> torch.Tensor:
        before = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        super().training_step(model, copy.copy(inputs), *args)
        for p, gradient in before:
            p.grad = gradient
        given = [*model.parameters(), *model.buffers(), *optimizer_tensors(self.optimizer.optimizer)]
        given += [gradient for _, gradient in before if gradient is not None]
        del before
        held = unique_bytes([*given, *tensors_in(inputs)])
        del given
        found: list[torch.Tensor] = []
        step = super().training_step
        above = peak_above_start(lambda: found.append(step(model, inputs, *args)))
        self.__dict__.setdefault("peaks", []).append(held + above)
        return found[0]
