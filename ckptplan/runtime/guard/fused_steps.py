"""Optimizer steps that write to parameters without raising their versions, as fused kernels do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptplan.tensors.storages import storages_of


class FusedSteps:
    """Counter of the optimizer steps that raise no versions, with the last one for each storage that they wrote to.

    Raising the versions of the parameters instead would be wrong: autograd would then refuse backwards that it accepts
    without a plan, through stages that aren't recomputed and continue with the updated parameter.

    Attributes
    ----------
    count : int
        Steps so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[int, int] = {}  # by storage; callers of `check` keep theirs alive
        self._watchers = 0
        self._hook: Any = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count steps while the context is active."""
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

    def check(self, tensors: Iterable[torch.Tensor], since: int, use: str) -> None:
        """Raise an error, like PyTorch's own, if a step has written to any of `tensors` after `count` was `since`.

        Parameters
        ----------
        use : str
            The use of the tensors in backward, for the message: "runs its stage again with it", for example.

        Raises
        ------
        RuntimeError
        """
        if self.count == since:
            return
        for tensor in tensors:
            if any(self._last.get(storage._cdata, 0) > since for storage in storages_of(tensor)):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"parameter of shape {list(tensor.shape)} was updated by an optimizer's step between forward and "
                    f"backward, which {use}: the gradient would be wrong; step after the last backward"
                )

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # PyTorch's own optimizers raise versions unless they are fused; others are assumed not to.
        own = type(optimizer).__module__.startswith("torch.optim")
        groups = [group for group in optimizer.param_groups if group.get("fused") or not own]
        parameters = (p for group in groups for p in group["params"] if p.grad is not None)
        written = [storage._cdata for p in parameters for storage in storages_of(p)]
        if written:
            self.count += 1
            self._last.update(dict.fromkeys(written, self.count))


STEPS = FusedSteps()
"""The counter of this process."""
