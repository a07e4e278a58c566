"""An error for a model that began to checkpoint by itself after a plan was applied to it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ckptplan.runtime.observer import Observer
from ckptplan.training.step import check_not_checkpointing


class Checkpointing(Observer):
    """Refuses a forward of a model whose own checkpointing is on: stages would run again for both.

    Libraries have an attribute `gradient_checkpointing` on the modules that can checkpoint, and switch it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [(name, m) for name, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Raise `UnsupportedModelError` if a module checkpoints by itself now."""
        check_not_checkpointing(self._model, self._modules)
