"""Find the stages of a model: the repeated blocks, and what is worth a decision around them.

One forward without memory records the tree of calls, and what autograd saves inside each call. Candidates are the ways
to cut that tree at the members of its containers (`ModuleList`, `Sequential`, `ModuleDict`, `_no_split_modules`), one
per depth of nesting. The cut with the least memory under full recompute wins: the largest saved set of a stage, plus
every stage's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.patching import PatchedForward, installed, is_patchable
from ckptplan.runtime.sharded import gathered
from ckptplan.runtime.step import TrainingStep
from ckptplan.runtime.swap.own import storages_of
from ckptplan.runtime.swap.packing import unowned

_WORTH = 0.01  # a call outside of the blocks becomes a stage from this share of all saved bytes on
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class Call:
    """One call of one module in the tree of calls; the model's own has no caller."""

    name: str
    member: bool
    caller: Call | None = None
    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The qualified name of the module."""
        return self.name.partition("#")[0]

    @property
    def saved_bytes(self) -> int:
        """Bytes autograd saves inside, each storage counted once."""
        return sum(self.saved.values())


class NothingSavedError(UnsupportedModelError):
    """No submodule of a model saves anything for backward: the loss doesn't depend on it."""


class Found(NamedTuple):
    """What a forward calls.

    Attributes
    ----------
    stages : tuple of str
        Names of the stages in call order.
    outside : tuple of str
        Modules that are called and lie in no stage's, the model itself left out; a stage may call them, too.
    """

    stages: tuple[str, ...]
    outside: tuple[str, ...]


def discover_stages(step: TrainingStep, world: Callable[[], contextlib.AbstractContextManager[Any]]) -> Found:
    """The stages, and what is called beside them.

    Parameters
    ----------
    step : TrainingStep
    world : callable
        Makes the context in which the forward runs (a fake one).

    Raises
    ------
    NothingSavedError
        If no submodule saves anything for backward.
    """
    calls = _record(step, world)
    cuts = _cuts(calls, lambda call: call.member) or _cuts(calls, lambda call: True)[:3]
    total = calls[0].saved_bytes
    best: list[Call] = []
    for cut in cuts:
        worthy = {call.module for call in cut if call.saved and (call.member or call.saved_bytes >= _WORTH * total)}
        stages = [call for call in cut if call.module in worthy]  # all calls of a module: plans number them
        if stages and (not best or _cost(stages) < _cost(best)):
            best = stages
    if not best:
        raise NothingSavedError("no submodule of the model saves anything for backward; there is nothing to plan")
    modules = {call.module for call in best}
    called = dict.fromkeys(call.module for call in calls[1:])
    outside = (name for name in called if not any(name == m or name.startswith(f"{m}.") for m in modules))
    return Found(tuple(call.name for call in best), tuple(outside))


def _cost(stages: list[Call]) -> int:
    held: dict[int, int] = {}
    for call in stages:
        held.update(call.inputs)
    return max(call.saved_bytes for call in stages) + sum(held.values())


def _cuts(calls: Sequence[Call], counts: Callable[[Call], bool]) -> list[list[Call]]:
    """Cuts of the tree below the model's own call, per level from 1 on.

    Of each path, the first call with that many counted ones down to it, itself included, or with none below.
    """
    above, below = {calls[0]: 0}, dict.fromkeys(calls, 0)
    tree = [(call.caller, call) for call in calls if call.caller is not None]
    for caller, call in tree:
        above[call] = above[caller] + counts(call)
    for caller, call in reversed(tree):
        below[caller] = max(below[caller], below[call] + counts(call))
    cuts = []
    for level in range(1, below[calls[0]] + 1):
        reached = {call for call in calls if above[call] >= level or not below[call]}
        cuts.append([call for caller, call in tree if call in reached and caller not in reached])
    return cuts


def _record(step: TrainingStep, world: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Call]:
    """The tree of calls in their order: each after its caller, the model's own first."""
    model = step.model
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    # With the storages themselves, since forward may give a parameter other data.
    held = (*model.parameters(), *model.buffers(), *gathered(model))
    own = {s._cdata: s for t in held for s in storages_of(t)}
    calls = [Call("", member=False)]
    stack = calls[:]
    counts: dict[str, int] = {}
    met: dict[int, torch.UntypedStorage] = {}  # held, so that they stay distinct

    def sizes(tensors: list[Any]) -> dict[int, int]:
        out = {}
        for t in tensors:
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage())._cdata not in own:
                met[storage._cdata] = storage
                out[storage._cdata] = storage.nbytes()
        return out

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found = sizes([tensor])
        for call in stack:
            call.saved.update(found)
        return unowned(tensor)

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        parent = modules.get(name.rpartition(".")[0])
        member = (isinstance(parent, _CONTAINERS) and len(parent) > 1) or type(module).__name__ in no_split

        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            counts[name] = count = counts.get(name, 0) + 1
            call = Call(name if count == 1 else f"{name}#{count}", member, stack[-1])
            call.inputs = sizes(pytree.tree_leaves((args, kwargs)))
            calls.append(call)
            stack.append(call)
            try:
                return original(*args, **kwargs)
            finally:
                stack.pop()

        return run

    patches = [
        PatchedForward(module, runner(name, module))
        for name, module in modules.items()
        if name and is_patchable(module)
    ]
    with installed(patches), world(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.forward()
    return calls
