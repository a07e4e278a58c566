"""Compiled modules: find them, refuse them where needed, and keep the compiler away from this package's code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.tensors.storages import tensors_in

T = TypeVar("T")

compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Return the compiler's callback for the code that runs now, None if there is none; called at every saved tensor."""

_REMEDY = "compile its stages one by one (`for layer in model.layers: layer.compile()`), then plan and apply"


def compiles() -> bool:
    """Whether `torch.compile` was called in this process."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})  # seen in PyTorch 2.13
    return any(backend is not None for backend in backends.values())  # None stands for running as it is


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, or `module` was returned by `torch.compile`."""
    # Compared by class name, since importing the class from torch._dynamo takes long and may not be needed otherwise.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def backend_behind(call: Any) -> Any:
    """The compiler's backend of a compiled function, a module's compiled call or a patch around it; None if unknown."""
    if isinstance(call, functools.partial):
        return backend_behind(call.args[0])
    if hasattr(call, "original"):  # of a patch
        return backend_behind(call.original)
    call = getattr(call, "compiled", call)  # `CompiledForPlan`
    context = inspect.getclosurevars(call).nonlocals.get("self") if inspect.isfunction(call) else None
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def compiled_otherwise(module: nn.Module) -> str:
    """How a compiled module's code isn't inductor's by default, as " by aot_eager" or its options; empty if it is."""
    backend = backend_behind(module.__dict__.get("_compiled_call_impl") or getattr(module, "forward", None))
    name, options = getattr(backend, "compiler_name", "inductor"), getattr(backend, "config", None)
    return (f" by {name}" if name != "inductor" else "") + (f" with {options}" if options else "")


def compiled_modules(model: nn.Module, also: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the outermost modules of `model` that are compiled, or named in `also`, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if (name in also or is_compiled(module)) and not inside:
            found[name] = module
    return found


_uses: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Modules that `stages_compiled` has compiled -> the contexts that they are compiled for."""


def is_compiled_for_a_plan(module: nn.Module) -> bool:
    """Whether `stages_compiled` has compiled a module, and not the user."""
    return module in _uses


@contextlib.contextmanager
def stages_compiled(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Compile the modules of these names within the block; after the last such block they are as before."""
    modules = dict(model.named_modules())
    found = [modules[name] for name in names if name in modules]
    found = [module for module in found if module in _uses or not is_compiled(module)]
    begun = []
    try:
        for module in found:
            if module not in _uses:
                module._compiled_call_impl = CompiledForPlan(module)  # type: ignore[assignment]
            _uses[module] = _uses.get(module, 0) + 1
            begun.append(module)
        yield
    finally:
        for module in begun:
            _uses[module] -= 1
            if not _uses[module]:
                del _uses[module]
                if isinstance(module.__dict__.get("_compiled_call_impl"), CompiledForPlan):  # not the user's, since
                    del module._compiled_call_impl


class CompiledForPlan:
    """The compiled call of a module that a plan compiles.

    NOTE [Compiled for a plan]
    The module runs as it is, uncompiled, where its user would see a difference or compiled code can't be had:

    1. Without gradients, as without a plan: each size of an evaluation would be compiled, too.
    2. While a part of it, or all modules, have hooks, which compiled code leaves out: the compiler doesn't check them
       again (`skip_nnmodule_hook_guards`).
    3. From the first error of the compiler on.

    Modules of one structure share their code, and each structure has a code object of its own: the compiler's limit on
    recompilations counts them apart. Its file is none that the compiler skips: `module.compile()` leaves PyTorch's own
    classes (`nn.Sequential`) uncompiled.

    Example: in training a block runs compiled. A forward hook that records its activations is registered: the block
    runs uncompiled, the hook is called, and the difference "compiled" is warned of. Without the hook, it runs compiled.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        structure = structure_of(module)
        if structure not in _calls:
            _calls[structure] = torch.compile(uncompiled_call(module))
        self.compiled = _calls[structure]
        self._tables = [table for part in module.modules() for table in _hooks_of(part)]
        self._is_given_up = False

    @property
    def is_on(self) -> bool:
        """Whether a call runs compiled code."""
        has_hooks = _has_any_global_hook() or any(self._tables)
        return torch.is_grad_enabled() and not self._is_given_up and not has_hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not self.is_on:
            return self.module._call_impl(*args, **kwargs)
        try:
            return self.compiled(self.module, *args, **kwargs)
        except Exception as error:
            if not is_compilers(error):
                raise
        output = self.module._call_impl(*args, **kwargs)  # whose own error, of a wrong shape, is no reason to give up
        self._is_given_up = True
        return output


_calls: dict[Hashable, Callable[..., Any]] = {}


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """A function that calls a module uncompiled, and for the compiler is neither this package's nor an earlier one.

    The compiler goes by file and name: sizes that differ from one such function to the next become dynamic. So modules
    of another structure have another name.
    """
    name = f"call_{zlib.crc32(repr(structure_of(module)).encode()):08x}"
    code = _call.__code__.replace(co_filename="<uncompiled call>", co_name=name)
    return FunctionType(code, _call.__globals__, code.co_name)


def structure_of(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules that are compiled to the same code."""
    owner = owner_of(module)
    return type(owner), repr(owner), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in owner.named_parameters())


def owner_of(module: nn.Module) -> nn.Module:
    """The module that is compiled: `torch.compile` returns one around it."""
    return getattr(module, "_orig_mod", module)


def _hooks_of(part: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks


def hooks_in(module: nn.Module) -> str:
    """Return why the compiler can't tell a module from others: which part of it has hooks; empty if none has.

    It doesn't check hooks again (`skip_nnmodule_hook_guards`), and all modules share what is compiled.
    """
    for name, part in module.named_modules():
        if any(_hooks_of(owner_of(part))):
            return f"{name or 'it'!r} has hooks"
    return ""


def compilations() -> int:
    """Number of graphs that the compiler has made in this process so far."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters["stats"]["unique_graphs"] if counters else 0


def ran_compiled(output: Any) -> bool | None:
    """Whether compiled code made an output; None if it has no graph, which would tell."""
    nodes = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    return any(type(node).__name__.startswith("CompiledFunction") for node in nodes) if nodes else None


def is_compilers(error: BaseException) -> bool:
    """Whether an error is the compiler's own, about code that it can't compile and that hasn't run."""
    return type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc")


def keep_compiler_out() -> None:
    """Make the compiler skip this package's own functions. A no-op until the compiler is loaded."""
    if "torch._dynamo" in sys.modules:
        _skip_own_code()


@functools.cache
def _skip_own_code() -> None:
    from torch._dynamo import trace_rules

    trace_rules.add("ckptplan")


def out_of_sight(hook: Callable[[torch.Tensor], T]) -> Callable[[torch.Tensor], T]:
    """Return `hook` wrapped so that the compiler doesn't compile the functions that it calls.

    Hooks run between the graphs of a compiled stage, where the compiler intercepts every call. Without the wrapper it
    would compile the functions that a hook calls, and compile them again whenever their inputs change.
    """

    def quiet(tensor: torch.Tensor) -> T:
        if compiler_callback() is None:
            return hook(tensor)
        callback = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            return hook(tensor)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(callback)

    return quiet


def check_compiled(model: nn.Module) -> None:
    """Refuse a model that is compiled as a whole, since its stages can't be reached one by one.

    Raises
    ------
    UnsupportedModelError
    """
    if is_compiled(model):
        raise UnsupportedModelError(f"the model is compiled as a whole, so a plan can't reach its stages; {_REMEDY}")


def check_not_compiling(module: nn.Module) -> None:
    """Refuse to run inside of a compiled region.

    Either the compiler traces this call (the first condition), or it has given up on tracing this frame and runs it
    unchanged, but still compiles the functions that the frame calls (the second condition).

    Raises
    ------
    UnsupportedModelError
    """
    if torch.compiler.is_compiling() or compiler_callback() is not None:
        raise UnsupportedModelError(
            f"a {type(module).__name__} that is a stage of a plan is called inside a region that was compiled as one "
            f"(the whole model, the training step, or the stage itself after the plan was applied); {_REMEDY}"
        )
