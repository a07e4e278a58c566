"""The function modes and dispatch modes of PyTorch that are active in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import overrides
from torch.utils import _device, _python_dispatch

from ckptplan.tensors.private import dispatch_modes, function_modes

# Getter of a stack of modes, the innermost last, and its push and pop. A mode's own `__enter__` may do more than to
# push it, such as resetting its counters.
_STACKS: tuple[Any, ...] = (
    (
        overrides._get_current_function_mode_stack,
        torch._C._push_on_torch_function_stack,
        lambda mode: torch._C._pop_torch_function_stack(),
    ),
    (
        _python_dispatch._get_current_dispatch_mode_stack,
        torch._C._push_on_torch_dispatch_stack,
        lambda mode: torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None)),
    ),
)
_Lists = Sequence[list[Any]]
"""Function modes and dispatch modes, the innermost last."""
_NONE: _Lists = ([], [])


def _now() -> _Lists:
    """Return the active modes; that of the default device is at the bottom of the function modes."""
    if not function_modes() and not dispatch_modes():
        return _NONE
    return [list(stack()) for stack, _, _ in _STACKS]


def _same(some: _Lists, others: _Lists) -> bool:
    return some is others or all(list(map(id, a)) == list(map(id, b)) for a, b in zip(some, others, strict=True))


def _replace(former: _Lists, modes: _Lists) -> None:
    for (_, push, pop), old, new in zip(_STACKS, former, modes, strict=True):
        for mode in reversed(old):
            pop(mode)
        for mode in new:
            push(mode)


class Modes:
    """The modes that were active at construction, with that of the default device."""

    __slots__ = ("_active",)

    def __init__(self) -> None:
        self._active = _now()

    def differ(self) -> bool:
        """Whether the modes that are active now are different ones."""
        return not _same(_now(), self._active)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make these modes, and no others, active inside the context.

        A mode that was entered for forward only is active again. A mode that was entered for backward only, such as a
        counter of operations, doesn't see the operations inside, since it might change their results.
        """
        now = _now()
        _replace(now, self._active)
        try:
            yield
        finally:
            _replace(self._active, now)


class Stacks(Modes):
    """These modes, and what PyTorch has noted as the default device."""

    __slots__ = ("_default", "_device")

    def __init__(self) -> None:
        super().__init__()
        self._device = _device.CURRENT_DEVICE
        self._default = dict(vars(torch._GLOBAL_DEVICE_CONTEXT))  # of this thread

    def put(self) -> None:
        """Make these modes, and no others, active again, and restore the default device."""
        if self.differ():
            _replace(_now(), self._active)
        _device.CURRENT_DEVICE = self._device
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()
        vars(torch._GLOBAL_DEVICE_CONTEXT).update(self._default)
