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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckptplan.runtime.observer import Observer
from ckptplan.tensors.accelerator import device_bytes, empty_cache, is_accelerator, is_capturing


class FreshState(Observer):
    """Empties the allocator's cache before the first forward after an update that left more memory in use.

    It doesn't matter where the optimizer keeps its state, nor whose parameters it updates (those of the model, or
    copies of them).

    Parameters
    ----------
    device : torch.device
        Nothing is done on the CPU, whose allocator caches nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made = False

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Called before a forward begins."""
        if self._made and not is_capturing(self._device):
            self._made = False
            empty_cache(self._device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notice updates of the process's optimizers within the block.

        The allocator's counters take long to read. So once an update has left no more in use, later ones of that
        optimizer count as making state if they add entries to it.
        """
        if not is_accelerator(self._device):
            yield
            return
        settled: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        running: list[tuple[torch.optim.Optimizer, int | None]] = []  # one that calls its base class's is there twice

        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            known = settled.get(optimizer) == len(optimizer.state)
            running.append((optimizer, None if known else device_bytes(self._device).allocated_bytes))

        def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            while running:  # what failed didn't end
                begun, held = running.pop()
                if begun is optimizer:
                    break
            else:
                return
            if held is None:
                grew = settled.get(optimizer) != len(optimizer.state)
            else:
                grew = device_bytes(self._device).allocated_bytes > held
            if grew:
                self._made = True
                settled.pop(optimizer, None)
            elif all(other is not optimizer for other, _ in running):
                settled[optimizer] = len(optimizer.state)

        hooks = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
