"""Replace `forward` on module instances, and put it back exactly."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def _class_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def _same(forward: Any) -> Any:
    return forward


class PatchedForward:
    """An instance-level `forward` that calls `run(original, args, kwargs)`.

    A copy or a pickle of the module gets the forward it had before: a plan belongs to the instance it was applied to.
    """

    def __init__(
        self, module: nn.Module, run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self.module = module
        self.run = run
        self.had_own = "forward" in module.__dict__
        self.original: Callable[..., Any] = module.forward
        self._active = False
        self._placed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.run(self.original, args, kwargs) if self._active else self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo) if self.had_own else _class_forward(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return (_same, (self.original,)) if self.had_own else (_class_forward, (self.module,))

    def install(self) -> None:
        """Put this in place of the module's forward."""
        self._active = True
        if self._placed:
            return  # still there, below what somebody else put on top
        self.had_own = "forward" in self.module.__dict__
        self.original = self.module.forward
        self.module.forward = self  # type: ignore[method-assign, assignment]
        self._placed = True

    def remove(self) -> None:
        """Put the former forward back; nothing is left in the instance where nothing was."""
        self._active = False
        if self.module.__dict__.get("forward") is not self:
            return  # somebody patched on top of us: from here on this only passes calls through
        self._placed = False
        if self.had_own:
            self.module.forward = self.original  # type: ignore[method-assign]
        else:
            del self.module.forward
