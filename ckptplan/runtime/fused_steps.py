"""Optimizer steps that write to parameters without raising their versions, as fused kernels do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class FusedSteps:
    """Counts those steps, by parameter.

    Versions aren't raised instead: autograd would then refuse a backward that goes on with the updated parameter, as
    it does without a plan, and through stages that aren't run again.

    Attributes
    ----------
    count : int
        Steps so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[int, int] = {}  # by the identity of a parameter, which those who ask for it hold
        self._watchers = 0
        self._hook: Any = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, steps are counted."""
        if self._watchers == 0:
            self._hook = register_optimizer_step_post_hook(self._stepped)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            if self._watchers == 0:
                self._hook.remove()
                self._last.clear()

    def written(self, parameters: Iterable[torch.Tensor], since: int) -> torch.Tensor | None:
        """One of `parameters` that a step has written to after `count` was `since`."""
        if self.count == since:
            return None
        return next((p for p in parameters if self._last.get(id(p), 0) > since), None)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # PyTorch's own optimizers raise versions unless they are fused; of others it isn't known.
        own = type(optimizer).__module__.startswith("torch.optim")
        groups = [group for group in optimizer.param_groups if group.get("fused") or not own]
        written = [id(p) for group in groups for p in group["params"] if p.grad is not None]
        if written:
            self.count += 1
            self._last.update(dict.fromkeys(written, self.count))


STEPS = FusedSteps()
"""Of this process."""
