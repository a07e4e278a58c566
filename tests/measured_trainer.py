"""A Trainer that measures its training steps from the allocator's events."""

from __future__ import annotations

import copy
from typing import Any

import torch
from measured_step import measured
from torch import nn
from transformers import Trainer


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
        before.clear()
        step = super().training_step
        given = self._prepare_inputs(inputs)  # of several ranks on the CPU a copy, which the step makes and holds
        held = [tensor for name, tensor in inputs.items() if given[name] is tensor]
        del given
        loss, peak = measured(lambda: step(model, inputs, *args), model, [self.optimizer.optimizer], held)
        self.__dict__.setdefault("peaks", []).append(peak)
        return loss
