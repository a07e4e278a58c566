"""Calls before and after each step of the process's optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[[torch.optim.Optimizer, Any, Any], None]


@contextlib.contextmanager
def around_steps(begins: Hook, ends: Hook) -> Iterator[None]:
    """Inside, call `begins` before and `ends` after each step, with the optimizer and the step's arguments."""
    hooks = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
