"""Replace the function that a module's call runs, on the instance, and restore it exactly."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ckptplan.training.compiled import check_not_compiling, keep_compiler_out
from ckptplan.training.variants import RATIO, variant


def entry_point(module: nn.Module) -> str:
    """Return the attribute that a call of `module` runs: `forward`, or the compiled call after `module.compile()`."""
    return "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def is_patchable(module: nn.Module) -> bool:
    """Whether an instance can have a forward of its own; False if its class defines forward as a property."""
    of_class = inspect.getattr_static(type(module), entry_point(module), None)
    return not hasattr(of_class, "__set__")


_MODULES_CODE = nn.Module.__call__.__code__.co_filename


def _instance_called(caller: types.FrameType) -> nn.Module | None:
    """Return the module whose call the frame `caller` runs; None if that isn't `nn.Module`'s own code.

    The local variables of other frames aren't read: before Python 3.13 reading them keeps them alive until the frame
    ends.
    """
    return caller.f_locals.get("self") if caller.f_code.co_filename == _MODULES_CODE else None


def _same(forward: Any) -> Any:
    return forward


class OfClass:
    """Stands for the class's forward on a copy of a planned module; removes itself from the copy when called.

    The original has a `forward` attribute while a plan is applied, so a copy gets one too, and should have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The class's forward, for `inspect.signature`."""
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward on the module that was called, which may be a shallow copy of `module`."""
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


COPIES: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
"""Deep copies of patched modules, in which no patch acts, with what they are copies of, by the copy's identity."""


def _note_copy(twin: nn.Module, module: nn.Module) -> None:
    key = id(twin)
    COPIES[key] = weakref.ref(twin, lambda _: COPIES.pop(key, None)), weakref.ref(module)


class PatchedForward:
    """An instance-level `forward` that calls `run(original, args, kwargs)`.

    In a compiled module it replaces the compiled call (`entry_point`). This is `original` then, and the compiler never
    sees `run`. Called inside a compiled region, it raises UnsupportedModelError.

    If a module calls itself, directly or through other modules, the inner calls run its original forward: they are part
    of the outer call, the first time and when that is recomputed.

    A copy or a pickle of the module gets the forward that the module had before: a plan belongs to the instance it was
    applied to. A shallow copy (`copy.copy`, or a copy of the module's `__dict__`) has this very object, which can't see
    through which module it was called. So it looks at the calling frame, if that is `nn.Module`'s own code; in calls
    from other code, such as `twin.forward(x)`, it runs the original module's forward.
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
        self._running: set[int] = set()  # identifiers of the threads that run the original now

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original, for `inspect.signature`, by which training frameworks choose the arguments to pass."""
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run` with the module's forward; for a shallow copy or an inner call, run the plain forward."""
        owner = _instance_called(sys._getframe(1))
        if owner is None or owner.__dict__.get(self.attribute) is not self:
            owner = self.module
        original, of_class = self.original, getattr(type(owner), "forward", None)
        if not self.had_own and type(of_class) is types.FunctionType:
            original = types.MethodType(of_class, owner)  # the class's forward may have changed since
        if not self._active or owner is not self.module or threading.get_ident() in self._running:
            return original(*args, **kwargs)
        check_not_compiling(self.module)
        grad = torch.is_grad_enabled()
        try:
            return self.run(functools.partial(self._inside, original), args, kwargs)
        except BaseException:
            torch.set_grad_enabled(grad)  # an interrupt in the end of a `with torch.no_grad()` leaves it off
            raise

    def _inside(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if thread in self._running:
            return original(*args, **kwargs)
        self._running.add(thread)
        try:
            if RATIO.get() and not isinstance(original, PatchedForward):
                original = variant(self.module, original)
            return original(*args, **kwargs)
        finally:
            self._running.discard(thread)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if (twin := memo.get(id(self.module))) is not None:
            _note_copy(twin, self.module)
        return copy.deepcopy(self.original, memo) if self.had_own else OfClass(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return (_same, (self.original,)) if self.had_own else (OfClass, (self.module,))

    def install(self) -> None:
        """Replace the module's forward by this."""
        keep_compiler_out()
        self._active = True
        if self._placed:
            return  # still in place, below a patch of other code
        self.had_own = self.attribute in self.module.__dict__
        self.original = getattr(self.module, self.attribute)
        setattr(self.module, self.attribute, self)
        self._placed = True

    @property
    def is_installed(self) -> bool:
        """Whether calls of the module run this."""
        return self._active

    @property
    def is_compiled(self) -> bool:
        """Whether the module was compiled when this object was made."""
        return self.attribute == "_compiled_call_impl"

    @property
    def bypassed(self) -> bool:
        """Whether the module's call was replaced since, by compiling it again, say: calls no longer run this."""
        return self._active and self.module.__dict__.get(self.attribute) is not self

    def remove(self) -> None:
        """Restore the former forward; an instance that had no attribute for it has none afterwards."""
        self._active = False
        if self.module.__dict__.get(self.attribute) is not self:
            return  # other code patched on top of this, which now only passes calls through
        self._placed = False
        if self.had_own:
            setattr(self.module, self.attribute, self.original)
        else:
            delattr(self.module, self.attribute)


@contextlib.contextmanager
def installed(patches: Sequence[PatchedForward]) -> Iterator[None]:
    """Install all `patches` inside."""
    try:
        for patch in patches:
            patch.install()
        yield
    finally:
        for patch in reversed(patches):
            patch.remove()
