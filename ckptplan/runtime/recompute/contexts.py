"""A plan that only recomputes, for `torch.utils.checkpoint` or `torch_remat`, for runs without this package's runtime.

Selective checkpointing (`create_selective_checkpoint_contexts`) calls a policy for every operation of a forward and of
its recompute. The policy counts them as the plan does (NOTE [Numbering] in selective.py), and saves what it saves.
`torch_remat` saves all that backward needs of a region, its inputs included. So it can't save an operation's output
alone.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    get_device_states,
    noop_context_fn,
    set_device_states,
)

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import DISCARD
from ckptplan.core.plan import Plan
from ckptplan.runtime.recompute.selective import is_numbered

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a module's forward and of its recompute."""
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function from a module's forward to the one to call in its place."""


def context_fns(plan: Plan) -> dict[str, Callable[[], Contexts]]:
    """Return the functions for `context_fn=` by module name; see `Plan.to_context_fn`."""
    modules = _recomputed(plan, "torch.utils.checkpoint")
    return {name: _saving(ops) if ops else noop_context_fn for name, ops in modules.items()}


def save_regions(plan: Plan) -> dict[str, Wrapper]:
    """Return what wraps a module's forward for `torch_remat`, by module name; see `Plan.save_regions`."""
    by = "torch_remat"
    if importlib.util.find_spec(by) is None:
        raise InvalidInputError("save_regions() needs torch_remat: pip install torch_remat")
    modules = _recomputed(plan, by)
    for name, ops in modules.items():
        if ops:
            raise _refused(f"module {name!r} saves some operations' outputs without their inputs", by, "menus=False")
    return {name: functools.partial(_region, name) for name in modules}


def _recomputed(plan: Plan, by: str) -> dict[str, frozenset[int]]:
    """Return the recomputed modules by name, with the operations whose outputs are saved; raise unless that is all."""
    found: dict[str, frozenset[int]] = {}
    calls: dict[str, set[Any]] = {}
    if plan.segments:
        names = " .. ".join((plan.stages[plan.segments[0].first], plan.stages[plan.segments[0].last]))
        raise _refused(f"stages {names} are recomputed together", by, "segments=False")
    if plan.fingerprint.compiled:
        raise _refused("layers are compiled for the plan", by, "compile=False")
    if plan.between:
        raise _refused("weights are away between steps", by, 'offload="activations"')
    for name, choice in zip(plan.stages, plan.choices, strict=True):
        if choice.transfers:
            moved = 'actions=("keep", "recompute") and offload="activations"'
            raise _refused(f"stage {name!r} moves storages", by, moved)
        if choice.option == DISCARD:
            raise _refused(f"stage {name!r} discards a graph that forward itself drops", by, 'actions=("keep",)')
        if choice.ratio:
            raise _refused(f"stage {name!r} runs code that the plan compiles to save less", by, "menus=False")
        module = name.partition("#")[0]
        calls.setdefault(module, set()).add((choice.action, choice.ops))
        if len(calls[module]) > 1:
            raise _refused(f"the calls of module {module!r} have different decisions", by, "another budget")
        if choice.action == "recompute":
            found[module] = frozenset(choice.ops)
    return found


def _refused(why: str, by: str, instead: str) -> InvalidInputError:
    return InvalidInputError(f"{why}, which {by} can't do; solve with {instead}")


def _region(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` as a checkpoint of `torch_remat`, which leaves random numbers to its users."""
    import torch_remat

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        state, (devices, states) = torch.get_rng_state(), get_device_states(args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch_remat.is_recomputing():
                return forward(*args, **kwargs)
            with torch.random.fork_rng(devices):
                torch.set_rng_state(state)
                set_device_states(devices, states)
                return forward(*args, **kwargs)

        return torch_remat.checkpoint(region_name=name)(run)(*args, **kwargs)

    return checkpointed


class _Counting(AbstractContextManager[None]):
    """A context in which operations are counted from 0."""

    def __init__(self, context: AbstractContextManager[Any], count: list[int]) -> None:
        self._context, self._count = context, count

    def __enter__(self) -> None:
        self._count[0] = 0
        self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def _saving(ops: frozenset[int]) -> Callable[[], Contexts]:
    """Return a function that makes the contexts of one call, in which these operations' outputs are saved."""

    def context_fn() -> Contexts:
        counts = [0], [0]

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if not is_numbered(func, args):
                return CheckpointPolicy.PREFER_RECOMPUTE
            count = counts[ctx.is_recompute]
            number, count[0] = count[0], count[0] + 1
            return CheckpointPolicy.MUST_SAVE if number in ops else CheckpointPolicy.PREFER_RECOMPUTE

        forward, recompute = create_selective_checkpoint_contexts(policy)
        return _Counting(forward, counts[0]), _Counting(recompute, counts[1])

    return context_fn
