"""The user's own saved-tensor hooks around stages that are swapped or recomputed.

NOTE [Hooks around a stage]
Autograd calls only the innermost saved-tensor hooks. Inside a swapped or recomputed stage these are the runtime's, so
the runtime calls the user's hooks around the stage itself:

1. Backward gets the same as without a plan: `unpack(pack(tensor))`. Both are called, one after the other, at the moment
   when backward needs the tensor, since before that it may be away or not yet recomputed. So the stage holds the bytes
   that the plan expects, and `pack` gets a tensor with the same values, `is_leaf` and `requires_grad` as in forward.
2. A `pack` whose result depends on more than its tensor, such as random numbers, would return another result in
   backward. Hooks that draw from a random generator are therefore an error. In a checked pass, it is also an error if
   the saved tensor was changed without a new version, for instance through `.data`.
3. PyTorch's own hooks (`save_on_cpu`, `torch.utils.checkpoint`) return the values they got, so they aren't called for
   the tensors that a stage saves. They are called, in forward, for the inputs that a stage is recomputed from, if the
   plan doesn't move these: otherwise the inputs would stay on the device.

Example: with `saved_tensors_hooks(pack=lambda t: t.half(), unpack=lambda t: t.float())` around a swapped stage, the
stage's tensors leave the device in float32. In backward each one is copied back, and the hooks round it to half
precision and back: the gradients are those of a plain step under the same hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.state.generators import Generators
from ckptplan.tensors.accelerator import generator_states
from ckptplan.tensors.private import saved_tensors_hooks

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Compare = Callable[[torch.Tensor], None]


class OwnHooks(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks of this package, past which PyTorch looks for the user's.

    From PyTorch 2.14 on, selective checkpointing can pass what it saves through the hooks around it
    (`respect_saved_tensors_hooks`), and warns of hooks that it doesn't know unless it was told which. It looks past
    hooks that have the mark of its own (`torch.utils.checkpoint`, `_checkpoint_internal_hook`).
    """

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        super().__init__(lambda tensor: pack(tensor), unpack)  # a function of its own, which can have attributes
        self._mark: dict[str, Any] = vars(self.pack_hook)
        self._mark["_checkpoint_internal"] = True

    def __enter__(self) -> None:
        hooks = saved_tensors_hooks(False)
        while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
            hooks = hooks[0]._user_hooks  # type: ignore[attr-defined]
        self._mark["_user_hooks"] = hooks
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._mark.pop("_user_hooks", None)  # which a graph would hold with the hook

    def __del__(self) -> None:
        """Leave a context that a Ctrl-C has left without its end: autograd would go on calling the hooks."""
        hooks = saved_tensors_hooks(False) if "_user_hooks" in self._mark else None
        if hooks is not None and hooks[0] is self.pack_hook:
            super().__exit__()


class Kept(Protocol):
    """An object that stands for a saved tensor."""

    def tensor(self) -> torch.Tensor:
        """Return the saved tensor."""


class _Inner(torch.autograd.Function):
    """Returns its input as the result of an operation, so that it isn't a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def keep_values(hooks: tuple[Pack, Unpack]) -> bool:
    """Whether `hooks` are PyTorch's or the runtime's own, whose `unpack` returns the values that `pack` got."""
    module = getattr(hooks[0], "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "ckptplan")


class UsersHooks:
    """User hooks around a stage, which may change values (NOTE [Hooks around a stage])."""

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self.pack, self.unpack = pack, unpack

    @staticmethod
    def around() -> UsersHooks | None:
        """Return the hooks that autograd would call now if they may change values; otherwise None."""
        hooks = saved_tensors_hooks(False)
        return None if hooks is None or keep_values(hooks) else UsersHooks(*hooks)

    def through(
        self, keep: Callable[[torch.Tensor], Kept], compared: Callable[[torch.Tensor], Compare] | None = None
    ) -> Callable[[torch.Tensor], Through]:
        """Return a pack hook that keeps each tensor with `keep` and passes it through the user's hooks on unpacking.

        `compared`, if given, is called with the saved tensor in forward. It returns a function that is called in
        backward with the tensor that comes back, and compares the two.
        """
        return lambda tensor: Through(self, keep(tensor), tensor, None if compared is None else compared(tensor))

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `unpack(pack(tensor))`.

        Raises
        ------
        UnsupportedModelError
            If the hooks fail or draw random numbers.
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
            raise UnsupportedModelError(f"{self} draw random numbers, which differ from forward's {_WHEN}; {_REMEDY}")
        return found

    def __str__(self) -> str:
        names = [getattr(hook, "__qualname__", repr(hook)) for hook in (self.pack, self.unpack)]
        return f"the saved_tensors_hooks {names[0]} and {names[1]} around a stage that is swapped or run again"


_WHEN = "called in backward, when the stage's saved tensors are there again"
_REMEDY = "take them off, or keep the stages that run inside of them"


class Through:
    """A saved tensor that passes through the user's hooks when it is unpacked.

    Parameters
    ----------
    like : torch.Tensor
        The tensor as `pack` would have got it in forward: sets `is_leaf` and `requires_grad`.
    compare : callable, optional
        Called with the tensor before `pack`; raises if it isn't the one that was saved.
    """

    __slots__ = ("_compare", "_hooks", "_is_leaf", "_kept", "_requires_grad", "_steps")

    def __init__(self, hooks: UsersHooks, kept: Kept, like: torch.Tensor, compare: Compare | None = None) -> None:
        self._hooks, self._kept, self._compare = hooks, kept, compare
        self._is_leaf, self._requires_grad = like.is_leaf, like.requires_grad
        self._steps = STEPS.count

    def tensor(self) -> torch.Tensor:
        """Return the saved tensor as the user's hooks make it."""
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
