"""The function modes and dispatch modes of PyTorch that are active in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _device
from torch.utils._device import DeviceContext


class _Stack:
    """One of a thread's two stacks of modes, that of function modes or that of dispatch modes.

    `now` leaves out the mode of the default device, which lies at the bottom of the function modes.
    """

    def __init__(
        self,
        length: Callable[[], int],
        at: Callable[[int], Any],
        push: Callable[[Any], None],
        pop: Callable[[Any], Any],
    ) -> None:
        self._length, self._at, self._push, self._pop = length, at, push, pop

    def now(self) -> list[Any]:
        """Return the modes without the default device's, the innermost last."""
        if not self._length():
            return []
        return [mode for mode in self.whole() if type(mode) is not DeviceContext]

    def whole(self) -> list[Any]:
        """Return all modes, including the default device's, the innermost last."""
        return [self._at(i) for i in range(self._length())]

    def replace(self, former: list[Any], modes: list[Any]) -> None:
        """Replace the modes `former` by `modes`.

        Uses PyTorch's push and pop, since a mode's own `__enter__` may do more, such as resetting its counters.
        """
        for mode in reversed(former):
            self._pop(mode)
        for mode in modes:
            self._push(mode)


_STACKS = (
    _Stack(
        torch._C._len_torch_function_stack,
        torch._C._get_function_stack_at,
        torch._C._push_on_torch_function_stack,
        lambda mode: torch._C._pop_torch_function_stack(),
    ),
    _Stack(
        torch._C._len_torch_dispatch_stack,
        torch._C._get_dispatch_stack_at,
        torch._C._push_on_torch_dispatch_stack,
        lambda mode: torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None)),
    ),
)


_functions, _operations = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


class Modes:
    """The modes that were active at construction, the default device's left out."""

    __slots__ = ("_active",)

    def __init__(self) -> None:
        self._active = _now()

    def differ(self) -> bool:
        """Whether the modes that are active now are different ones."""
        now = _now()
        return now is not self._active and not all(map(_same, now, self._active))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make these modes, and no others, active inside the context.

        A mode that was entered for forward only is active again. A mode that was entered for backward only, such as a
        counter of operations, doesn't see the operations inside, since it might change their results.
        """
        now = _now()
        for stack, former, modes in zip(_STACKS, now, self._active, strict=True):
            stack.replace(former, modes)
        try:
            yield
        finally:
            for stack, former, modes in zip(_STACKS, now, self._active, strict=True):
                stack.replace(modes, former)


_NONE: tuple[list[Any], ...] = ([], [])


def _now() -> tuple[list[Any], ...]:
    return tuple([stack.now() for stack in _STACKS]) if _functions() or _operations() else _NONE


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class Stacks:
    """The modes that were active at construction, and the default device."""

    def __init__(self) -> None:
        self._active = [stack.whole() for stack in _STACKS]
        self._device = _device.CURRENT_DEVICE
        self._default = dict(vars(torch._GLOBAL_DEVICE_CONTEXT))  # of this thread

    def put(self) -> None:
        """Make these modes, and no others, active again, and restore the default device."""
        for stack, modes in zip(_STACKS, self._active, strict=True):
            if not _same(now := stack.whole(), modes):
                stack.replace(now, modes)
        _device.CURRENT_DEVICE = self._device
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()
        vars(torch._GLOBAL_DEVICE_CONTEXT).update(self._default)
