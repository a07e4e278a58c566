"""Find the stages of a model: the repeated blocks, and what is worth a decision around them.

One forward without memory records the tree of calls, and what autograd saves inside each call. Candidates are the ways
to cut that tree at the members of its containers (`ModuleList`, `Sequential`, `ModuleDict`, `_no_split_modules`), one
per depth of nesting. The cut with the least memory under full recompute wins: the largest saved set of a stage, plus
every stage's inputs. A `ModuleDict` of models is cut model by model.

No cut goes through a module that routes rows to experts by values: how many each expert gets is another number in each
step, and their sum is the same.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.distributed import parallel_of
from ckptplan.runtime.guard.unplanned import is_foreign
from ckptplan.runtime.patching import PatchedForward, installed, is_patchable
from ckptplan.runtime.swap.packing import unowned
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.tensors.modules import below
from ckptplan.tensors.storages import storages_of
from ckptplan.training.compiled import compiled_modules
from ckptplan.training.step import TrainingStep

_WORTH = 0.01  # a call outside of the blocks becomes a stage from this share of all saved bytes on
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class ModuleCall:
    """One call of one module in the tree of calls; the model's own has no caller.

    Attributes
    ----------
    member : bool
        The module is one of a container's.
    saved, inputs : dict
        Storages that autograd saves inside, and that are passed in -> their bytes.
    kind : type
        The module's class.
    sizes : tuple of torch.Size
        Those of the tensors passed in.
    reads : int
        Number of the operations whose results depend on values that run in the call itself, not in one of its calls.
    """

    name: str
    member: bool
    caller: ModuleCall | None = None
    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    kind: type | None = None
    sizes: tuple[torch.Size, ...] = ()
    reads: int = 0

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


class FoundStages(NamedTuple):
    """The stages and other modules that a forward calls.

    Attributes
    ----------
    stages : tuple of str
        Names of the stages in call order.
    outside : tuple of str
        Modules that are called and lie in no stage's, the model itself left out; a stage may call them, too.
    uncalled : tuple of str
        Modules in a stage's that no stage calls, without those below them, and without experts.
    foreign : tuple of str
        Classes of the modules with parameters that are called and aren't the model's.
    """

    stages: tuple[str, ...]
    outside: tuple[str, ...]
    uncalled: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def discover_stages(step: TrainingStep, world: Callable[[], contextlib.AbstractContextManager[Any]]) -> FoundStages:
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
    foreign: dict[str, None] = {}
    compiled = compiled_modules(step.model)
    in_compiled = {part for module in compiled.values() for part in below(module)[1:]}
    hidden = {name for name, module in step.model.named_modules() if module in in_compiled}
    every = [call for call in _record(step, world, foreign) if call.module not in hidden]
    calls = _without_experts(every)
    root = calls[0]
    if _holds_models(step.model):
        models = dict.fromkeys(call.module for call in calls if call.caller is root)
        parts = [[root, *(call for call in calls if _is_in(call, model))] for model in models]
        chosen = {call for part in parts for call in _best_cut(part, root.saved_bytes, first=1)}
        best = [call for call in calls if call in chosen]
    else:
        best = _best_cut(calls, root.saved_bytes)
    if not best:
        raise NothingSavedError("no submodule of the model saves anything for backward; there is nothing to plan")
    modules = {call.module for call in best}
    called = dict.fromkeys(call.module for call in calls[1:])
    outside = (name for name in called if not any(name == m or name.startswith(f"{m}.") for m in modules))
    blocks = {call.caller.module for call in set(every) - set(calls) if call.caller is not None}
    blocks |= compiled.keys()
    uncalled = _uncalled(step.model, modules, blocks.union(called), blocks)
    return FoundStages(tuple(call.name for call in best), tuple(outside), tuple(uncalled), tuple(foreign))


def _uncalled(model: nn.Module, stages: set[str], called: set[str], but: set[str]) -> Iterator[str]:
    """Modules inside of `stages` that aren't among those called, the topmost of each path, none inside of `but`."""
    found: set[str] = set()
    for name, module in model.named_modules():
        above = list(itertools.accumulate(name.split("."), "{}.{}".format))[:-1]
        if name in called or not stages.intersection(above) or but.intersection(above) or found.intersection(above):
            continue
        # A container has none; a scripted module's can't be read from its class.
        if inspect.getattr_static(type(module), "forward") is not nn.Module.forward:
            found.add(name)
            yield name


def _holds_models(model: nn.Module) -> bool:
    """Whether a container without a forward holds models of a step, and not the layers of one."""
    kinds = [type(module) for module in model.children()]
    return isinstance(model, nn.ModuleDict) or (isinstance(model, nn.ModuleList) and len(set(kinds)) == len(kinds))


def _is_in(call: ModuleCall, name: str) -> bool:
    return call.module == name or call.module.startswith(f"{name}.")


def _best_cut(calls: Sequence[ModuleCall], total: int, first: int = 0) -> list[ModuleCall]:
    """The cut of the least cost, without what isn't worth a stage; levels without members begin at `first`."""
    levels = _cuts(calls, lambda call: True)
    cuts = _cuts(calls, lambda call: call.member) or levels[first : first + 3] or levels
    best: list[ModuleCall] = []
    for cut in cuts:
        worthy = {call.module for call in cut if call.saved and (call.member or call.saved_bytes >= _WORTH * total)}
        worthy -= _called_below(cut, calls)  # a plan counts each call of a stage's module
        stages = [call for call in cut if call.module in worthy]  # all calls of a module: plans number them
        if stages and (not best or _cost(stages) < _cost(best)):
            best = stages
    return best


def _called_below(cut: list[ModuleCall], calls: Sequence[ModuleCall]) -> set[str]:
    """The modules that a call of a cut calls, or one of its calls."""
    inside, found = set(cut), set[str]()
    for call in calls:
        if call.caller in inside:
            inside.add(call)
            found.add(call.module)
    return found


def _without_experts(calls: list[ModuleCall]) -> list[ModuleCall]:
    """The calls but for those in modules that read values and call members of one class with other sizes each."""
    sizes: dict[tuple[ModuleCall, type | None], set[tuple[torch.Size, ...]]] = {}
    for call in calls:
        if call.member and call.caller is not None and call.caller.caller is not None and call.caller.reads:
            sizes.setdefault((call.caller, call.kind), set()).add(call.sizes)
    inside = {caller for (caller, _), found in sizes.items() if len(found) > 1}
    left = []
    for call in calls:
        if call.caller in inside:
            inside.add(call)
        if call.caller is None or call.caller not in inside:
            left.append(call)
    return left


def _cost(stages: list[ModuleCall]) -> int:
    held: dict[int, int] = {}
    for call in stages:
        held.update(call.inputs)
    return max(call.saved_bytes for call in stages) + sum(held.values())


def _cuts(calls: Sequence[ModuleCall], counts: Callable[[ModuleCall], bool]) -> list[list[ModuleCall]]:
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


def _record(
    step: TrainingStep, world: Callable[[], contextlib.AbstractContextManager[Any]], foreign: dict[str, None]
) -> list[ModuleCall]:
    """The tree of calls in their order: each after its caller, the model's own first; adds to `foreign`."""
    tree = _Tree(step.model)
    modules = dict(step.model.named_modules())
    patches = [
        PatchedForward(module, tree.runner(name, module))
        for name, module in modules.items()
        if name and is_patchable(module)
    ]
    own_modules = set(modules.values())

    def note(module: nn.Module, args: Any) -> None:
        if is_foreign(module, own_modules):
            foreign[type(module).__qualname__] = None

    saving = OwnHooks(tree.pack, lambda tensor: tensor)
    with register_module_forward_pre_hook(note), installed(patches), world() as tree.world, saving:
        step.forward()
    return tree.calls


class _Tree:
    """The calls of a model's modules in one forward, and what autograd saves inside each.

    Attributes
    ----------
    calls : list of ModuleCall
        In order, the model's own first.
    world : context manager
        The one in which the forward runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, dict(model.named_modules())
        self._holds_models = _holds_models(model)
        # With the storages themselves, since forward may give a parameter other data.
        held = (*model.parameters(), *model.buffers(), *parallel_of(model).gathered())
        self._own = {s._cdata: s for t in held for s in storages_of(t)}
        self._met: dict[int, torch.UntypedStorage] = {}  # held, so that they stay distinct
        self.calls = [ModuleCall("", member=False)]
        self._stack = self.calls[:]
        self._counts: Counter[str] = Counter()
        self.world: Any = None
        self._read = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves in all calls that run."""
        found = self._sizes([tensor])
        for call in self._stack:
            call.saved.update(found)
        return unowned(tensor)

    def runner(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Return what runs in place of a module's forward."""
        parent = self._modules.get(name.rpartition(".")[0])
        listed = isinstance(parent, _CONTAINERS) and len(parent) > 1
        member = listed and not (self._holds_models and parent is self._model)
        member = member or type(module).__name__ in (getattr(self._model, "_no_split_modules", None) or ())

        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            self._counts[name] += 1
            count = self._counts[name]
            call = ModuleCall(name if count == 1 else f"{name}#{count}", member, self._stack[-1], kind=type(module))
            leaves = pytree.tree_leaves((args, kwargs))
            call.inputs = self._sizes(leaves)
            call.sizes = tuple(t.shape for t in leaves if isinstance(t, torch.Tensor))
            self._count_reads()
            self.calls.append(call)
            self._stack.append(call)
            try:
                return original(*args, **kwargs)
            finally:
                self._count_reads()
                self._stack.pop()

        return run

    def _sizes(self, leaves: list[Any]) -> dict[int, int]:
        """Bytes of the tensors' storages that aren't the model's own, by address."""
        out = {}
        for t in leaves:
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage())._cdata not in self._own:
                self._met[storage._cdata] = storage
                out[storage._cdata] = storage.nbytes()
        return out

    def _count_reads(self) -> None:
        """Count the reads since the last call began or ended as those of the call that runs."""
        read, before = getattr(self.world, "reads", 0), self._read
        self._read = read
        self._stack[-1].reads += read - before
