"""Compiled modules: which there are, and whether the compiler is looking."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from ckptplan.core.errors import UnsupportedModelError

T = TypeVar("T")

compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What the compiler does with the code that runs now, None where it leaves it alone; asked at every saved tensor."""

_REMEDY = "compile its stages one by one (`for layer in model.layers: layer.compile()`), then plan and apply"


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, or it is what `torch.compile(module)` returned."""
    # By name: its class lies in torch._dynamo, which takes long to import and which nobody else may need.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The compiled modules of `model` that lie in no other one, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if is_compiled(module) and not inside:
            found[name] = module
    return found


def keep_compiler_out() -> None:
    """Have the compiler leave our own functions alone where it meets them. A no-op until the compiler is loaded."""
    if "torch._dynamo" in sys.modules:
        _skip_own_code()


@functools.cache
def _skip_own_code() -> None:
    from torch._dynamo import trace_rules

    for package in ("ckptplan.runtime", "ckptplan.profiling", "ckptplan.memory"):
        trace_rules.add(package)


def out_of_sight(hook: Callable[[torch.Tensor], T]) -> Callable[[torch.Tensor], T]:
    """A hook whose callees the compiler doesn't follow either.

    Hooks run between the graphs of a compiled stage, where the compiler looks at every call; what they call would be
    compiled, again and again as it changes.
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
    """Refuse a model that is compiled as a whole: its stages can't be met one by one.

    Raises
    ------
    UnsupportedModelError
    """
    if is_compiled(model):
        raise UnsupportedModelError(f"the model is compiled as a whole, so a plan can't reach its stages; {_REMEDY}")


def refuse_compiled(model: nn.Module, since: str) -> None:
    """Refuse a model with compiled modules, for what compiled code takes is known only from running it.

    Raises
    ------
    UnsupportedModelError
    """
    found = compiled_modules(model)
    if found:
        raise UnsupportedModelError(
            f"module {next(iter(found))!r} is compiled, and {since}; do this with the uncompiled model, or plan the "
            "compiled one on the device where it is to run"
        )


def check_not_compiling(module: nn.Module) -> None:
    """Refuse to run inside of a compiled region.

    The compiler either follows the call here (the first question), or has given up on this frame and runs it as it is,
    while it goes on compiling what the frame calls (the second).

    Raises
    ------
    UnsupportedModelError
    """
    if torch.compiler.is_compiling() or compiler_callback() is not None:
        raise UnsupportedModelError(
            f"a {type(module).__name__} that is a stage of a plan is called inside a region that was compiled as one "
            f"(the whole model, the training step, or the stage itself after the plan was applied); {_REMEDY}"
        )
