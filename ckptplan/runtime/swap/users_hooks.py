"""Hooks of the user's own on what autograd saves, around stages that are swapped or run again.

NOTE [Hooks around a stage]
As for what autograd saves, the innermost hooks decide, which inside of such a stage are the runtime's.

1. Hooks around it are to give backward what they give without a plan: `unpack(pack(tensor))`. They are called for a
   tensor when backward asks for it, one after the other, since until then it may be away, or not made yet. So the
   stage holds what the plan reckons with, and `pack` gets the same values, as a leaf or not, with or without
   `requires_grad`, as in forward.
2. A `pack` that goes by more than its tensor, such as random numbers, would give another result then. Where hooks draw
   from a random generator, that is an error. In a pass that is checked, so is a tensor that was written to since, past
   its version: through `.data`, say.
3. PyTorch's own hooks (`save_on_cpu`, `torch.utils.checkpoint`) give back what they were given, so these aren't called
   for what a stage saves, but for what it runs again from, in forward, where that doesn't move: else it would stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.accelerator import generator_states
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.runtime.state.generators import Generators

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Compare = Callable[[torch.Tensor], None]

innermost: Callable[[bool], tuple[Pack, Unpack] | None] = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks that decide now; called with False."""


class Kept(Protocol):
    """What stands for a saved tensor."""

    def tensor(self) -> torch.Tensor:
        """The tensor."""


class _Inner(torch.autograd.Function):
    """The same tensor, as the result of an operation."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def keep_values(hooks: tuple[Pack, Unpack]) -> bool:
    """Whether hooks are PyTorch's or the runtime's own, which give back what they were given."""
    module = getattr(hooks[0], "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "ckptplan")


class UsersHooks:
    """Hooks around a stage that may give back something else (NOTE [Hooks around a stage])."""

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self.pack, self.unpack = pack, unpack

    @staticmethod
    def around() -> UsersHooks | None:
        """Those that decide now, if they may change values."""
        hooks = innermost(False)
        return None if hooks is None or keep_values(hooks) else UsersHooks(*hooks)

    def through(
        self, keep: Callable[[torch.Tensor], Kept], compared: Callable[[torch.Tensor], Compare] | None = None
    ) -> Callable[[torch.Tensor], Through]:
        """A pack hook that keeps a tensor by `keep` and gives it back through these.

        `compared` gives what is called with the tensor that backward gets, to compare the two.
        """
        return lambda tensor: Through(self, keep(tensor), tensor, None if compared is None else compared(tensor))

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        """What they make of `tensor`.

        Raises
        ------
        UnsupportedModelError
            If they fail, or draw random numbers.
        """
        generators = Generators()
        torchs = generator_states(tensor.device)
        try:
            with torch.no_grad():
                packed = self.pack(tensor)
            found = self.unpack(packed)
        except Exception as error:
            raise UnsupportedModelError(f"{self} failed, {_WHEN}: {error}; {_REMEDY}") from error
        generators.settle()
        if generators.drew or torchs != generator_states(tensor.device):
            raise UnsupportedModelError(f"{self} draw random numbers, which are others {_WHEN}; {_REMEDY}")
        return found

    def __str__(self) -> str:
        names = [getattr(hook, "__qualname__", repr(hook)) for hook in (self.pack, self.unpack)]
        return f"the saved_tensors_hooks {names[0]} and {names[1]} around a stage that is swapped or run again"


_WHEN = "called in backward, when what the stage saved is there again"
_REMEDY = "take them off, or keep the stages that run inside of them"


class Through:
    """A saved tensor as the user's hooks give it back.

    Parameters
    ----------
    like : torch.Tensor
        As `pack` would have been given it in forward.
    compare : callable, optional
        Notices that what `pack` is given isn't what was saved.
    """

    __slots__ = ("_compare", "_hooks", "_is_leaf", "_kept", "_requires_grad", "_steps")

    def __init__(self, hooks: UsersHooks, kept: Kept, like: torch.Tensor, compare: Compare | None = None) -> None:
        self._hooks, self._kept, self._compare = hooks, kept, compare
        self._is_leaf, self._requires_grad = like.is_leaf, like.requires_grad
        self._steps = STEPS.count

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        kept = self._kept.tensor()
        STEPS.check([kept], self._steps, f"gives it to {self._hooks} as it is now")
        if self._compare is not None:
            self._compare(kept)
        return self._hooks.applied(self._as_in_forward(kept))

    def _as_in_forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_leaf:
            with torch.enable_grad():
                found: torch.Tensor = _Inner.apply(tensor.detach().requires_grad_())
                return found
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad == self._requires_grad:
            return tensor
        return tensor.detach().requires_grad_(self._requires_grad)
