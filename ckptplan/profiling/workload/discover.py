"""Find the stages of a model: the repeated blocks, and what is worth a decision around them.

One forward without memory records which module calls which and what autograd saves inside each call. Candidates are the
ways to cut that tree at the members of its containers (`ModuleList`, `Sequential`, `ModuleDict`, `_no_split_modules`),
one per depth of nesting. The cut with the least memory under full recompute wins: the largest saved set of a stage,
plus every stage's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.patching import PatchedForward, installed, is_patchable
from ckptplan.runtime.step import TrainingStep
from ckptplan.runtime.swap.session import unowned

_WORTH = 0.01  # a call outside of the blocks becomes a stage from this share of all saved bytes on
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class Call:
    """One call of one module in the tree of calls."""

    name: str
    member: bool
    children: list[Call] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        """Bytes autograd saves inside, each storage counted once."""
        return sum(self.saved.values())

    def depth(self) -> int:
        """Most container members on a path from here down."""
        return int(self.member) + max((child.depth() for child in self.children), default=0)


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
    UnsupportedModelError
        If no submodule saves anything for backward.
    """
    root = _record(step, world)
    depth = max((child.depth() for child in root.children), default=0)
    cuts = [_cut(root, level) for level in range(1, depth + 1)] or [_by_depth(root, level) for level in (1, 2, 3)]
    total = root.saved_bytes
    best: list[Call] = []
    for cut in cuts:
        stages = [call for call in cut if call.saved and (call.member or call.saved_bytes >= _WORTH * total)]
        if stages and (not best or _cost(stages) < _cost(best)):
            best = stages
    if not best:
        raise UnsupportedModelError("no submodule of the model saves anything for backward; there is nothing to plan")
    modules = {call.name.partition("#")[0] for call in best}
    called = dict.fromkeys(_called(root))
    outside = (name for name in called if not any(name == m or name.startswith(f"{m}.") for m in modules))
    return Found(tuple(call.name for call in best), tuple(outside))


def _called(call: Call) -> Iterator[str]:
    """Names of the modules called below `call`."""
    for child in call.children:
        yield child.name.partition("#")[0]
        yield from _called(child)


def _cost(stages: list[Call]) -> int:
    held: dict[int, int] = {}
    for call in stages:
        held.update(call.inputs)
    return max(call.saved_bytes for call in stages) + sum(held.values())


def _cut(call: Call, level: int) -> list[Call]:
    """Descend to the `level`-th member on each path, or the last there is; what has no members comes whole."""
    out: list[Call] = []
    for child in call.children:
        left = level - int(child.member)
        below = max((grandchild.depth() for grandchild in child.children), default=0)
        out.extend(_cut(child, left) if below and left > 0 else [child])
    return out


def _by_depth(call: Call, level: int) -> list[Call]:
    out: list[Call] = []
    for child in call.children:
        out.extend(_by_depth(child, level - 1) if level > 1 and child.children else [child])
    return out


def _record(step: TrainingStep, world: Callable[[], contextlib.AbstractContextManager[Any]]) -> Call:
    model = step.model
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    # With the storages themselves, since forward may give a parameter other data.
    own = {s._cdata: s for s in (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))}
    root = Call("", member=False)
    stack = [root]
    counts: dict[str, int] = {}
    keep_alive: list[torch.Tensor] = []  # so that storages met stay distinct

    def sizes(tensors: list[Any]) -> dict[int, int]:
        out = {}
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in own:
                keep_alive.append(t.detach())
                out[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
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
            call = Call(name if count == 1 else f"{name}#{count}", member)
            call.inputs = sizes(pytree.tree_leaves((args, kwargs)))
            stack[-1].children.append(call)
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
    try:
        with installed(patches), world(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step.forward()
    finally:
        keep_alive.clear()  # the graph holds `pack`, and so these, which hold the graph: out of the collector's sight
    return root
