"""Variants of a compiled module: the same code compiled to save less, and to compute a part again in backward.

NOTE [Variants]
PyTorch's compiler chooses what a compiled forward saves for its backward by a minimum cut, and under an
`activation_memory_budget` (a ratio between 0 and 1 of what it would save) by a knapsack over what the cut leaves. It
has one ratio for all that is compiled. Here each call of a compiled stage may have a ratio of its own:

1. A variant is the module's call compiled with the user's own backend and options, and a partitioner for the ratio
   (partitioner.py), which also saves whatever draws random numbers.
2. Each ratio and structure of module has a code object of its own, so that the compiler's limit on recompilations
   counts them apart. Equal layers share a variant, since the module is an argument of the code.
3. Which variant a call runs is a context (`at_ratio`), read by the patch around the module's call. Runs by a sweep or
   of other threads find none, and run the user's own code.

Example: of a model with twelve equal compiled blocks, a plan runs six as the user compiled them, four under 0.5 and two
under 0.25. The compiler has compiled the block three times.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.training.compiled import (
    CompiledForPlan,
    backend_behind,
    hooks_in,
    owner_of,
    structure_of,
    uncompiled_call,
)

RATIO: ContextVar[float] = ContextVar("RATIO", default=0.0)
"""The ratio of the variants that calls of compiled modules run; 0: the user's own code."""


@contextlib.contextmanager
def at_ratio(ratio: float) -> Iterator[None]:
    """Let calls of compiled modules run their variants of this ratio within the block; of 0, the user's own code."""
    token = RATIO.set(ratio)
    try:
        yield
    finally:
        RATIO.reset(token)


@dataclass(slots=True)
class _Variant:
    """Code compiled under a ratio for modules of a structure, with what it was compiled from."""

    backend: Any
    structure: Hashable
    ratio: float
    call: Callable[..., Any]


_variants: list[_Variant] = []
_variant_of: weakref.WeakKeyDictionary[nn.Module, dict[float, _Variant]] = weakref.WeakKeyDictionary()


def variant(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the code that a call of `module` runs under the present ratio, given its own code, `original`.

    Raises
    ------
    UnsupportedModelError
        If there are no variants of it.
    """
    ratio = RATIO.get()
    if isinstance(original, CompiledForPlan) and not original.is_on:
        return original
    found = _variant_of.get(module, {}).get(ratio) if ratio else None
    if ratio and found is None:
        found = _variant_of.setdefault(module, {})[ratio] = _made(module, original, ratio)
    if found is None:
        return original
    return functools.partial(found.call, owner_of(module))


def _made(module: nn.Module, original: Callable[..., Any], ratio: float) -> _Variant:
    backend, structure = backend_of(module, original), structure_of(module)
    for known in _variants:
        if (known.ratio, known.structure) == (ratio, structure) and known.backend == backend:
            return known
    from ckptplan.training.partitioner import SavingDraws

    options = {**backend.config, "custom_partitioner_fn": SavingDraws(ratio)}
    # Without `fullgraph`: an error of the compiler's would leave its hook in Python's evaluation of frames.
    call = torch.compile(uncompiled_call(module), options=options, dynamic=backend.dynamic)
    _variants.append(_Variant(backend, structure, ratio, call))
    return _variants[-1]


def check_variants(module: nn.Module, original: Callable[..., Any]) -> None:
    """Refuse a module that has no variants, for a plan that runs one.

    Raises
    ------
    PlanMismatchError
    """
    try:
        backend_of(module, original)
    except UnsupportedModelError as error:
        raise PlanMismatchError(
            f"the plan runs compiled code that saves less, and {error}; solve again for this model"
        ) from None


def backend_of(module: nn.Module, original: Callable[..., Any]) -> Any:
    """The compiler's backend for a module, whose own code is `original`, with the options that it was given.

    Raises
    ------
    UnsupportedModelError
        If a module that is compiled so has no variants.
    """
    backend, name = backend_behind(original), type(module).__name__
    if type(backend).__name__ != "_TorchCompileInductorWrapper":
        raise UnsupportedModelError(
            f"a {name} is compiled by another backend than inductor, or wrapped since; only what inductor compiles has "
            "variants that save less"
        )
    if backend.dynamic:
        raise UnsupportedModelError(f"a {name} is compiled with dynamic=True, and what it saves is known for one shape")
    if why := hooks_in(module):
        raise UnsupportedModelError(f"a {name} is compiled, and {why}: the compiler would run its code for others, too")
    if backend.config.get("custom_partitioner_fn") is not None:
        raise UnsupportedModelError(f"a {name} is compiled with a custom_partitioner_fn, in whose place variants come")
    return backend
