"""Replace what a module's call runs, on the instance, and put it back exactly."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ckptplan.runtime.state.compiled import check_not_compiling, keep_compiler_out


def entry_point(module: nn.Module) -> str:
    """The attribute that a call of `module` runs: after `module.compile()` not its forward, which lies inside."""
    return "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def is_patchable(module: nn.Module) -> bool:
    """Whether an instance can have a forward of its own: not where its class computes it (a property)."""
    of_class = inspect.getattr_static(type(module), entry_point(module), None)
    return not hasattr(of_class, "__set__")


_MODULES_CODE = nn.Module.__call__.__code__.co_filename


def _instance_called(caller: types.FrameType) -> nn.Module | None:
    """The module whose call `caller` runs, None where that isn't `nn.Module`'s own code.

    Other code isn't looked into: before Python 3.13 its local variables would live until it ends.
    """
    return caller.f_locals.get("self") if caller.f_code.co_filename == _MODULES_CODE else None


def _same(forward: Any) -> Any:
    return forward


class OfClass:
    """The forward of a copied module, that of its class: goes from the instance when it is called.

    A copy of a planned module has an attribute for it, since the original has, and should have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`."""
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the class of the module that was called, which may be a shallow copy of this one's."""
        owner = _instance_called(sys._getframe(1))
        if owner is None or owner.__dict__.get("forward") is not self:
            owner = self.module
        if owner.__dict__.get("forward") is self:
            del owner.__dict__["forward"]
        return type(owner).forward(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OfClass:
        return OfClass(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return OfClass, (self.module,)


class PatchedForward:
    """An instance-level `forward` that calls `run(original, args, kwargs)`.

    Of a compiled module it replaces the compiled code (`entry_point`), so that `original` is that, and the compiler
    never sees `run`. Called inside a compiled region, it raises UnsupportedModelError.

    A module that calls itself, in its forward or by way of others, runs its own forward in these calls: they are part
    of the call around them, the first time and when that is made again.

    A copy or a pickle of the module gets the forward it had before: a plan belongs to the instance it was applied to.
    A shallow copy (`copy.copy`, or one of the module's `__dict__`) has this very object, which doesn't know by itself
    through which of them it was called. So it looks into the caller, where that is `nn.Module`'s own code; called by
    other code, as `twin.forward(x)`, it takes itself for the original's.
    """

    def __init__(
        self, module: nn.Module, run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self.module = module
        self.run = run
        self.attribute = entry_point(module)
        self.had_own = self.attribute in module.__dict__
        self.original: Callable[..., Any] = getattr(module, self.attribute)
        self._active = False
        self._placed = False
        self._running: set[int] = set()  # threads that run the original now

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`, by which training frameworks choose what to pass."""
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, or that of a shallow copy."""
        owner = _instance_called(sys._getframe(1))
        if owner is None or owner.__dict__.get(self.attribute) is not self:
            owner = self.module
        original, of_class = self.original, getattr(type(owner), "forward", None)
        if not self.had_own and type(of_class) is types.FunctionType:
            original = types.MethodType(of_class, owner)  # which may have changed since
        if not self._active or owner is not self.module or threading.get_ident() in self._running:
            return original(*args, **kwargs)
        check_not_compiling(self.module)
        return self.run(functools.partial(self._inside, original), args, kwargs)

    def _inside(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if thread in self._running:
            return original(*args, **kwargs)
        self._running.add(thread)
        try:
            return original(*args, **kwargs)
        finally:
            self._running.discard(thread)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo) if self.had_own else OfClass(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return (_same, (self.original,)) if self.had_own else (OfClass, (self.module,))

    def install(self) -> None:
        """Put this in place of the module's forward."""
        keep_compiler_out()
        self._active = True
        if self._placed:
            return  # still there, below what somebody else put on top
        self.had_own = self.attribute in self.module.__dict__
        self.original = getattr(self.module, self.attribute)
        setattr(self.module, self.attribute, self)
        self._placed = True

    @property
    def is_compiled(self) -> bool:
        """Whether the module was compiled when this was made."""
        return self.attribute == "_compiled_call_impl"

    @property
    def bypassed(self) -> bool:
        """Whether a compiled module was compiled anew since, so that calls no longer come by here."""
        return self._active and self.module.__dict__.get(self.attribute) is not self

    def remove(self) -> None:
        """Put the former forward back; nothing is left in the instance where nothing was."""
        self._active = False
        if self.module.__dict__.get(self.attribute) is not self:
            return  # somebody patched on top of us: from here on this only passes calls through
        self._placed = False
        if self.had_own:
            setattr(self.module, self.attribute, self.original)
        else:
            delattr(self.module, self.attribute)


@contextlib.contextmanager
def installed(patches: Sequence[PatchedForward]) -> Iterator[None]:
    """Inside, all of `patches` are in place."""
    try:
        for patch in patches:
            patch.install()
        yield
    finally:
        for patch in reversed(patches):
            patch.remove()
