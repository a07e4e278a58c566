"""Returns what the allocator has cached to the device once an optimizer has made its state.

An optimizer makes its state in its first update, in the memory that the first forward and backward have left unused.
It splits that memory into pieces that the large tensors of later steps don't fit into, so the allocator reserves more
for them. When the cache is returned before the next forward, the allocator reserves for that forward what it needs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ckptplan.runtime.accelerator import empty_cache, is_accelerator, is_capturing
from ckptplan.runtime.observer import Observer


class FreshState(Observer):
    """Empties the allocator's cache before the first forward after an update that made state on the device.

    Parameters
    ----------
    model : nn.Module
        Other models' optimizers are left alone.
    device : torch.device
        Nothing is done on the CPU, whose allocator caches nothing.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self._made = False

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Called before a forward begins."""
        if self._made and not is_capturing(self._device):
            self._made = False
            empty_cache(self._device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, updates of the process's optimizers are noticed."""
        if not is_accelerator(self._device):
            yield
            return
        had: dict[int, int] = {}

        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            had[id(optimizer)] = len(optimizer.state)

        def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            before = had.pop(id(optimizer), 0)
            if len(optimizer.state) > before and not self._made:
                self._made = self._is_ours(optimizer)

        hooks = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has state on the device for parameters of the model."""
        model = self._model()
        parameters = () if model is None else model.parameters()
        states = [optimizer.state[p] for p in parameters if p in optimizer.state]
        return any(isinstance(t, torch.Tensor) and is_accelerator(t.device) for t in pytree.tree_leaves(states))
