"""A plan that only recomputes, in the form of `torch.utils.checkpoint`, for runs without this package's runtime.

Selective checkpointing (`create_selective_checkpoint_contexts`) calls a policy for every operation of a forward and of
its recompute. The policy counts them as the plan does (NOTE [Numbering] in selective.py), and saves what it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import DISCARD
from ckptplan.core.plan import Plan
from ckptplan.runtime.recompute.selective import is_numbered

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a module's forward and of its recompute."""


def context_fns(plan: Plan) -> dict[str, Callable[[], Contexts]]:
    """Return the functions for `context_fn=` by module name; see `Plan.to_context_fn`."""
    found: dict[str, Callable[[], Contexts]] = {}
    calls: dict[str, set[Any]] = {}
    if plan.segments:
        names = " .. ".join((plan.stages[plan.segments[0].first], plan.stages[plan.segments[0].last]))
        raise _refused(f"stages {names} are recomputed together", "segments=False")
    if plan.between:
        raise _refused("weights are away between steps", 'offload="activations"')
    for name, choice in zip(plan.stages, plan.choices, strict=True):
        if choice.transfers:
            raise _refused(f"stage {name!r} moves storages", 'actions=("keep", "recompute") and offload="activations"')
        if choice.option == DISCARD:
            raise _refused(f"stage {name!r} discards a graph that forward itself drops", 'actions=("keep",)')
        if choice.ratio:
            raise _refused(f"stage {name!r} runs code that the plan compiles to save less", "menus=False")
        module = name.partition("#")[0]
        calls.setdefault(module, set()).add((choice.action, choice.ops))
        if len(calls[module]) > 1:
            raise _refused(f"the calls of module {module!r} have different decisions", "another budget")
        if choice.action == "recompute":
            found[module] = _saving(frozenset(choice.ops)) if choice.ops else noop_context_fn
    return found


def _refused(why: str, instead: str) -> InvalidInputError:
    return InvalidInputError(f"{why}, which torch.utils.checkpoint can't do; solve with {instead}")


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
