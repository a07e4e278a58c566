"""A warning for a plan under which no forward has run when the model is trained."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptplan.runtime.applied import Applied


@contextlib.contextmanager
def noticing_idle(applied: Applied) -> Iterator[None]:
    """Inside, warn once if an optimizer updates the model before any forward has followed the plan."""
    told, watched = False, weakref.ref(applied)  # the hook must not keep the model alive
    del applied

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal told
        applied = watched()
        if told or applied is None or not applied.is_on:
            return
        of_model = set(map(id, applied.model.parameters()))
        if not any(id(p) in of_model for group in optimizer.param_groups for p in group["params"]):
            return
        told = True  # by the first step
        if applied.controller.counters.forwards == 0:
            mode = "training" if applied.plan.fingerprint.training else "evaluation"
            warnings.warn(
                "an optimizer has updated the model, and no forward has followed the plan: steps take as much memory "
                f"as without it. Train the model that the plan was applied to, not a copy of it, in {mode} mode and "
                "with gradients on",
                RuntimeWarning,
                stacklevel=3,
            )

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()
