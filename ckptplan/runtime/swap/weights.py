"""Weights, gradients and optimizer state that leave the device in forward and return in backward.

NOTE [Weights that are away]
A weight is away between its release point in forward and its prefetch point in backward (NOTE [Offloaded weights] in
core/resident.py). Its storage is empty then, and its tensors lie on a placeholder, one element that is repeated, a NaN
where the type has one; their versions don't move. A `_Stay` has the storage, and lets them lie on it again.

1. What autograd saves of a weight is held as a part of its stay (`SavedPart`), which brings it back when backward reads
   it: the stages that use a weight run with saved-tensor hooks. A parameter that is saved itself is given back itself,
   so that backward sees what it is then, as without a plan.
2. Whatever else reads it finds it: while it is away its tensors have a class of their own (`_away_class`), by which
   PyTorch's functions and methods turn to it first (`__torch_function__`) and bring it back, in any thread. It stays
   until the next forward, which is a difference. What reads no values (shapes, gradients, hooks) doesn't count. Code
   below these functions (transforms of torch.func, scripted functions, DLPack) reads the placeholder.
3. A tensor on the same memory that isn't known here (a view that the program keeps, an array of numpy) keeps the
   memory, and a graph that saved the parameter elsewhere would read the placeholder. So the owners of both are counted
   before it leaves, and where there are others it stays, which is a difference.
4. The copy on the host of a frozen weight is made once. It holds as long as a digest of the weight, which is taken
   where each forward begins, is that of the copied values: a moving average writes through `.data`, which no version
   shows. A trained weight is copied in each forward. Where one leaves again, its versions must be those of the copy;
   on the CPU the digest is compared there, too.
5. At the end of a backward, and where the next forward begins, all are back. After an error in backward, the first
   read of a weight brings it back.

6. A weight that is away between steps leaves again when its first user's backward is over, and its return begins with
   the forward of a stage in front of that user. Its copy holds meanwhile: no code writes to what is away. A forward
   that isn't trained brings back what each stage needs, for that stage.
7. Gradients from before the step and the optimizer's state are held in the same way, under what is said of trained
   weights; autograd saves neither. Before autograd adds to a gradient, a hook of its parameter brings it back. State is
   looked for where each forward begins, in the optimizers that are known: the one given to `apply`, and each that has
   updated the model. It leaves when the forward begins, and is back when a backward has ended.
8. State of a sharded parameter is a distributed tensor (DTensor), whose local part has the memory: that lies on the
   placeholder, and both have classes of their own. Ranks may have parts of other sizes than the one that was planned
   for; each moves its own. Sharded parameters themselves, and their gradients, are left to FSDP2.
9. A quantized weight has several storages: those of the tensors that a wrapping class consists of, and those of scales
   in attributes. They move together. While any is away the wrapping tensor has a class of its own as well, since its
   own code reads the inner ones below PyTorch's functions. A custom Function that keeps a view of a weight as an
   attribute of its node (bitsandbytes), not through `save_for_backward`, reads it in its own backward alone: such views
   lie on the same storage again by then, and don't count as other owners.

Example: layer 0 of a chain has a frozen weight of 8 MiB. At the end of its first forward the weight is copied out;
before layer 1 its memory is freed. The loss is computed, and a logger reads `layer.weight.norm()`: the weight comes
back, and stays for this step. In the next step no code reads it: it leaves with no copy, and returns when layer 1's
backward begins, while that runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import CkptPlanError, SwapFullError
from ckptplan.core.link import Tier
from ckptplan.core.plan import WeightMove
from ckptplan.core.resident import GRADIENT_OF, Resident
from ckptplan.distributed import runs_replicated
from ckptplan.distributed.parallel import Parallel
from ckptplan.runtime.guard.check import Checks, Spots
from ckptplan.runtime.guard.digests import Bench, undisturbed
from ckptplan.runtime.guard.paths import nodes_behind
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.stores import Store, Ticket
from ckptplan.runtime.swap.stores.base import memory_of
from ckptplan.tensors.accelerator import current_stream, is_accelerator, is_capturing
from ckptplan.tensors.private import (
    DisableTorchFunctionSubclass,
    is_traceable_wrapper_subclass,
    storage_use_count,
    transform,
)
from ckptplan.tensors.quantized import attributes_beside, lie_together, tensor_at
from ckptplan.tensors.storages import local_part, tensors_in
from ckptplan.tensors.views import Memory, modified_error, on_storage, version_of
from ckptplan.training.measure import RENEWED

OnMove = Callable[[str, int, bool], None]

_COPY = (
    "a copy was overtaken by a later write, or memory or the disk is damaged; train with offload='activations': if it "
    "raises no such error, the copies of weights are at fault"
)


class Weights:
    """The weights that a plan moves.

    Parameters
    ----------
    model : nn.Module
    moves : sequence of WeightMove
    stores : mapping of tier to Store
    device : torch.device
    counters : Counters
    on_move : callable, optional
        Called with a weight's name, its bytes, and whether it comes back, in place of moving anything: for replays on
        fake tensors.

    Attributes
    ----------
    groups : list of Group
        Weights with the same points, which move together.
    in_ddp : bool
        Whether the model is in `DistributedDataParallel`, whose reducer owns parameters, and which sends buffers where
        each of its forwards begins.
    shards : dict of str to nn.Parameter
        The parameters that FSDP2 gathers, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        moves: Sequence[WeightMove],
        stores: Mapping[Tier, Store],
        device: torch.device,
        counters: Counters,
        on_move: OnMove | None = None,
    ) -> None:
        self.device, self.counters, self.on_move = device, counters, on_move
        self.lock = threading.RLock()
        self.checks: Checks | Spots | None = None
        self.stays = False  # inside `Handle.resident`
        self._bench: Bench | None = None
        self.in_ddp = False
        self.model, self.shards = model, dict[str, nn.Parameter]()
        self._parallel: Parallel | None = None
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._moves_state = any(move.resident.kind == "optimizer" for move in moves)
        for p in model.parameters() if moves and on_move is None else ():
            placeholder(p.dtype, p.device)  # which lasts, and isn't the first step's
        alike: dict[tuple[Any, ...], list[_Weight]] = {}
        first_of: dict[tuple[Any, ...], WeightMove] = {}
        used: dict[int, list[tuple[Any, ...]]] = {}
        for move in moves:
            resident = move.resident
            first = resident.users[0] if resident.returns is not None else None
            points = move.stage, move.release, move.prefetch, move.tier, resident.returns, first
            key = *points, resident.trained, resident.kind
            first_of.setdefault(key, move)
            alike.setdefault(key, []).extend(self._held(resident))
            for i in resident.users:
                used.setdefault(i, []).append(key)
        made = {key: Group(self, held, stores[first_of[key].tier], first_of[key]) for key, held in alike.items()}
        self.groups = list(made.values())
        self._of_stage: dict[int, list[Group]] = {}
        for group in self.groups:
            self._of_stage.setdefault(group.stage, []).append(group)
        self._used = {i: [made[key] for key in dict.fromkeys(keys)] for i, keys in used.items()}
        self._by_storage: dict[int, _Stay] = {}
        self._between = [group for group in self.groups if group.returns is not None]
        self.returning: dict[int, list[Group]] = {}  # stage -> those that its forward begins to bring back
        for group in self._between:
            self.returning.setdefault(group.returns, []).append(group)  # type: ignore[arg-type]

    def _held(self, resident: Resident) -> list[_Weight]:
        """Return the weights, gradients or state tensors that a resident stands for."""
        if resident.kind == "optimizer":
            return [_State(self, name, nbytes) for (name,), nbytes in resident.storages]
        if resident.kind == "gradients":
            return [_Gradient(self, resident.names[0], resident.nbytes)]
        return [_Weight(self, names, nbytes, trained=resident.trained) for names, nbytes in resident.storages]

    def knows(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer of the model's parameters, whose state may move."""
        if all(known() is not optimizer for known in self.optimizers):
            self.optimizers[:] = [known for known in self.optimizers if known() is not None]
            self.optimizers.append(weakref.ref(optimizer))

    def misses(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the plan moves optimizer state and this optimizer, which has some, isn't registered."""
        unknown = all(known() is not optimizer for known in self.optimizers)
        return unknown and self._moves_state and bool(optimizer.state)

    def open(self) -> None:
        """Begin to follow the plan, for the first time or again."""
        if self.groups and self.on_move is None:
            RENEWED.add(self)

    def uses(self, index: int) -> bool:
        """Whether a stage saves a weight that moves."""
        return index in self._used

    def begin(self, checks: Checks | Spots | None) -> None:
        """Begin a forward: bring back what isn't away between steps, and free outdated copies on the host."""
        if not self.groups or self.on_move is not None:
            return
        self.bring_back_within()
        self.checks = checks
        self.in_ddp = self.in_ddp or runs_replicated()
        if self._parallel is None or not self._parallel.in_step:  # it may have been sharded since
            self._parallel = Parallel(self.model)
        self.shards = self._parallel.named_shards()
        if is_capturing(self.device):  # a graph would go on reading the memory of this forward
            self.bring_back()
            for group in self.groups:
                group.stays = []
            self._by_storage = {}
            return
        with self.lock, self.plainly():
            for group in self.groups:
                group.begin()
            stays = [stay for group in self.groups for stay in group.stays]
            self._by_storage = {stay.storage._cdata: stay for stay in stays}
            frozen = [stay for stay in stays if not stay.weight.trained and not stay.is_away]
            for stay, digest in zip(frozen, self.digests(frozen), strict=True):
                stay.digest = digest
            for group in self.groups:
                group.forget_old()
        self._start_leaving(-1)
        for group in self._between:
            if group.returns:
                group.leave_between()

    def digests(self, stays: Sequence[_Stay]) -> list[Any]:
        """Return digests of weights that are on the device."""
        wholes = [stay.whole for stay in stays]
        if not is_accelerator(self.device):
            return [zlib.crc32(memory_of(whole)) for whole in wholes]
        if self._bench is None:
            self._bench = Bench(self.device)
        found = [self._bench.take(whole) for whole in wholes]
        self._bench.read()
        return [digest.values for digest in found]

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Switch off modes, transforms and tensor subclasses within the block."""
        transforms: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if transform() is not None:
            transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
        with transforms, undisturbed(), DisableTorchFunctionSubclass(), inference, torch.no_grad():
            yield

    def away(self) -> list[torch.Tensor]:
        """Return, as tensors, the storages that are away now of the weights that leave between steps."""
        return [stay.whole for group in self._between for stay in group.stays if stay.is_away]

    def part(self, saved: torch.Tensor, storage: torch.UntypedStorage) -> SavedPart | None:
        """Return an object for a saved tensor on `storage` that brings it back; None if `storage` doesn't move."""
        stay = self._by_storage.get(storage._cdata)
        return None if stay is None else SavedPart(stay, saved)

    def stage_ends(self, index: int, output: Any, first: int) -> None:
        """Start the copies out after a stage whose nodes in the graph have numbers from `first` on."""
        if self.on_move is None and index in self._used:
            owned = {s.storage._cdata: s for group in self._used[index] for s in group.stays if s.has_others}
            for node in nodes_behind(output, first) if owned else ():
                for tensor in tensors_in(getattr(node, "__dict__", {})):
                    storage = Memory.of(tensor).storage
                    stay = None if storage is None else owned.get(storage._cdata)
                    if stay is not None:
                        stay.is_kept_by(node, tensor)
        self._start_leaving(index)

    def _start_leaving(self, index: int) -> None:
        for group in self._of_stage.get(index, ()):
            group.start_leaving()

    def ensure(self, index: int) -> None:
        """Bring back the weights that a stage uses, which runs now."""
        for group in self._used.get(index, ()):
            group.need()

    def ensure_all(self, indices: Sequence[int]) -> None:
        """Bring back the weights that any of these stages uses."""
        for index in indices:
            self.ensure(index)

    def bring_back(self) -> None:
        """Bring all weights back."""
        for group in self.groups:
            group.need()

    def bring_back_within(self) -> None:
        """Bring back the weights that are on the device between steps."""
        for group in self.groups:
            if group.returns is None:
                group.need()

    @contextlib.contextmanager
    def running_alone(self, indices: Sequence[int]) -> Iterator[None]:
        """Keep what these stages use on the device within the block, in which one of them runs outside of any step."""
        groups = {group for index in indices for group in self._used.get(index, ())}
        with self.lock:
            for group in groups:
                group.runs += 1
        try:
            for group in groups:
                group.need()
            yield
        finally:
            with self.lock:
                for group in groups:
                    group.runs -= 1
                    if group.returns is not None and not group.runs:
                        group.leave_between()

    def backward_begins(self, index: int) -> None:
        """Send away the weights whose users' backward is over, since backward has come to stage `index`."""
        for group in self._between:
            if group.first > index:
                group.leave_between()

    def backward_ended(self, stages: Sequence[str]) -> None:
        """Bring back what isn't away between steps; what is still away is of stages that backward didn't reach."""
        left = [group for group in self.groups if group.is_away and group.stage >= 0 and group.returns is None]
        self.bring_back_within()
        self.backward_begins(-1)
        if left and self.on_move is None:
            self.counters.differences.note(
                "weights unused",
                f"a backward ended without reaching stage {stages[left[0].stage]!r}, whose weights are back now, in "
                "addition to what its graph holds: another backward follows, or its output enters no loss; solve with "
                "step= for a step that does so",
            )

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Keep all weights on the device within the block."""
        before, self.stays = self.stays, True
        self.bring_back()
        try:
            yield
        finally:
            self.stays = before

    def renew(self) -> None:
        """Take other memory for all weights (`training.measure.RENEWED`)."""
        self.bring_back()
        with self.lock, self.plainly():
            for group in self.groups:
                group.begin()
                for stay in group.stays:
                    values = stay.whole.clone()
                    stay.storage.resize_(0)
                    stay.storage.resize_(stay.nbytes)
                    stay.whole.copy_(values)
        for group in self._between:
            group.leave_between()

    def close(self) -> None:
        """Bring all weights back, and free their copies."""
        RENEWED.discard(self)
        if self.on_move is None:
            self.bring_back()
        self._by_storage = {}
        for group in self.groups:
            group.close()


class _Weight:
    """The places of the parameters and buffers, and of tensors that quantized ones hold, that share a storage."""

    _places: Sequence[tuple[nn.Module, str]] = ()

    def __init__(self, owner: Weights, names: Sequence[str], nbytes: int, *, trained: bool) -> None:
        self.name, self.nbytes, self.trained = names[0], nbytes, trained
        self._owner, self._names = owner, names
        self._places = [_place(owner.model, name) for name in names]

    def found(self) -> list[Any]:
        """Return what is in these places now, and beside a quantized parameter on its storage."""
        found = [tensor_at(module, path) for module, path in self._places]
        for module, path in self._places:
            if "." not in path:
                whole: Any = getattr(module, path, None)
                found += [each.tensor for each in attributes_beside(module, path) if lie_together(each.tensor, whole)]
        return found

    def wholes(self) -> list[torch.Tensor]:
        """Return the tensors of wrapping classes that have these inside."""
        found = []
        for module, path in self._places:
            parts = path.split(".")
            owners = (tensor_at(module, ".".join(parts[:n])) for n in range(1, len(parts)))
            found += [t for t in owners if isinstance(t, torch.Tensor) and is_traceable_wrapper_subclass(t)]
        return found

    def owners(self, tensor: torch.Tensor, *, in_ddp: bool) -> int:
        """Return a tensor's owner count if only its places, autograd and `DistributedDataParallel` hold it."""
        return 1 + (3 if in_ddp else 1) * tensor.requires_grad

    def left(self, group: Group) -> None:
        """Note that the weight is away now."""

    def returned(self) -> None:
        """Note that the weight is back."""

    def is_sharded(self, found: Sequence[Any]) -> bool:
        """Whether it is a parameter that FSDP2 gathers, or a distributed tensor by now."""
        wrapped = any(isinstance(t, torch.Tensor) and is_traceable_wrapper_subclass(t) for t in found)
        return wrapped or not self._owner.shards.keys().isdisjoint(self._names)

    def tensors(self, there: Sequence[Any]) -> list[torch.Tensor] | None:
        """Return the tensors of what is there, if all lie on one storage as large as planned; otherwise None.

        The local parts of distributed ones do, and may be of another size than those of the rank that was planned for.
        """
        found = {id(t): t for t in there if isinstance(t, torch.Tensor) and t.layout is torch.strided}
        tensors, parts = list(found.values()), list(map(local_part, found.values()))
        wrapped = any(map(is_traceable_wrapper_subclass, parts))
        storages = {} if wrapped else {p.untyped_storage()._cdata: p.untyped_storage() for p in parts}
        if len(storages) != 1:
            return None
        (storage,) = storages.values()
        planned = storage.nbytes() == self.nbytes or (storage.nbytes() > 0 and parts[0] is not tensors[0])
        shared = parts[0].device.type == "cpu" and storage.is_shared()  # says that it can be resized, and crashes then
        able = storage.resizable() and not shared and not any(t.is_inference() for t in parts)
        return tensors if able and planned and storage.nbytes() % parts[0].itemsize == 0 else None


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that a name leads to, and the path of attributes from there."""
    module, path = model, name.split(".")
    while isinstance(inner := getattr(module, path[0], None), nn.Module):
        module = inner
        del path[0]
    return module, ".".join(path)


class _Gradient(_Weight):
    """The place of a gradient from before the step."""

    def __init__(self, owner: Weights, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self.trained = name, nbytes, True
        self._owner, self._names = owner, (name.removeprefix(GRADIENT_OF),)
        self._parameter = _place(owner.model, self._names[0])
        self._hook: Any = None

    def found(self) -> list[Any]:
        return [getattr(getattr(*self._parameter, None), "grad", None)]

    def owners(self, tensor: torch.Tensor, *, in_ddp: bool) -> int:
        return 2 + tensor.requires_grad  # the other one is the parameter

    def left(self, group: Group) -> None:
        parameter = getattr(*self._parameter)

        def needed(gradient: torch.Tensor) -> None:
            group.need()

        self._hook = parameter.register_hook(needed) if parameter.requires_grad else None

    def returned(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _State(_Weight):
    """The place of a tensor of an optimizer's state."""

    def __init__(self, owner: Weights, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self.trained, self._owner = name, nbytes, True, owner
        self._of, _, self._key = name.rpartition(": ")
        self._parameter = _place(owner.model, self._of)

    def is_sharded(self, found: Sequence[Any]) -> bool:
        return False  # state of a sharded parameter moves

    def found(self) -> list[Any]:
        parameter, found = self._owner.shards.get(self._of, getattr(*self._parameter, None)), []
        for known in self._owner.optimizers:
            optimizer = known()
            state = None if optimizer is None or parameter is None else optimizer.state.get(parameter)
            found.append(state.get(self._key) if isinstance(state, Mapping) else None)
        return found


class _Stay:
    """A weight in one forward and the backward that follows.

    Attributes
    ----------
    found, tensors : list of torch.Tensor
        The tensors in the weight's places, and those that lie on the storage: the same, or their local parts.
    nbytes : int
    whole : torch.Tensor
        Its storage as one dimension, with a version counter of its own; empty while it is away.
    digest
        Digest of a frozen weight where the forward began.
    fixed : bool
        Whether the weight stays on the device for the rest of this forward.
    """

    def __init__(self, group: Group, weight: _Weight, tensors: list[torch.Tensor]) -> None:
        self.group, self.weight, self.found = group, weight, tensors
        self.tensors = list(map(local_part, tensors))
        self.kinds = [type(t) for t in self.tensors]
        distributed = [t for t, part in zip(tensors, self.tensors, strict=True) if t is not part]
        self._all = [*self.tensors, *distributed]
        self._wholes = {id(t): (t, type(t)) for t in (*weight.wholes(), *distributed)}
        self.memory = [Memory.of(t) for t in self.tensors]
        self.versions: list[int] = []
        self.digest: Any = None
        self.fixed = False
        self._kept: list[weakref.ref[torch.Tensor]] = []
        self.whole = on_storage(self.tensors[0].untyped_storage(), self.tensors[0].dtype)
        self.nbytes = self.storage.nbytes()

    @property
    def all_kinds(self) -> list[type]:
        """The classes of its tensors, and of those that have them inside."""
        return [*self.kinds, *(kind for _, kind in self._wholes.values())]

    @property
    def storage(self) -> torch.UntypedStorage:
        """Its storage, which is emptied and filled in place: others compare whether a parameter has the same one."""
        return self.whole.untyped_storage()

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether it is of these tensors as they lie now."""
        same = list(map(id, tensors)) == list(map(id, self.found))
        parts = map(local_part, tensors)
        return same and all(memory.is_of(part) for memory, part in zip(self.memory, parts, strict=True))

    def versions_now(self) -> list[int]:
        """Return the versions of its tensors; those of a distributed one count its writes, not those of its part."""
        return list(map(version_of, self._all))

    def home(self, tensor: torch.Tensor) -> Memory | None:
        """Return where one of its tensors, or its part, lies when it is back; None if it is another's."""
        places = zip(self.found, self.tensors, self.memory, strict=True)
        return next((memory for t, part, memory in places if tensor is t or tensor is part), None)

    @property
    def is_away(self) -> bool:
        """Whether its values are on the host alone."""
        return self in self.group._away

    @property
    def is_in_place(self) -> bool:
        """Whether its tensors are still the parameters and buffers that it is of."""
        now = {id(t) for t in self.weight.found() if isinstance(t, torch.Tensor)}
        return now == set(map(id, self.found))

    @property
    def has_others(self) -> bool:
        """Whether others own its storage or its tensors.

        Owners of the storage are its tensors, `whole` and the storage's object in Python. Those of a tensor are its
        object and, if it is trained, the node that takes its gradient and, twice, `DistributedDataParallel`'s reducer.
        Views in the graph's nodes (rule 9) own both.
        """
        if any(_held_elsewhere(ref) for ref in self._kept):
            return True
        kept = {
            id(t): t for ref in self._kept if (t := ref()) is not None and all(t is not own for own in self.tensors)
        }
        if storage_use_count(self.storage._cdata) > len(self.tensors) + 2 + len(kept):
            return True
        owners, in_ddp = self.weight.owners, self.group.owner.in_ddp
        based = [view._base for view in kept.values()]
        return any(
            t._use_count() > owners(t, in_ddp=in_ddp) + sum(base is t for base in based)  # type: ignore[attr-defined]
            for t in self._all
        )

    def is_kept_by(self, node: Any, tensor: torch.Tensor) -> None:
        """Note that a node of the graph has an attribute on the storage, which its backward reads."""
        if all(ref() is not tensor for ref in self._kept):
            self._kept = [ref for ref in self._kept if ref() is not None]
            self._kept.append(weakref.ref(tensor))
        group = self.group

        def needed(gradients: Any) -> None:
            group.need()

        node.register_prehook(needed)

    def leave(self, away_class: Callable[[type], type]) -> None:
        """Give the tensors the placeholder and the classes for weights that are away, and free the memory."""
        for whole, kind in self._wholes.values():
            whole.__class__ = away_class(kind)
        for tensor, kind in zip(self.tensors, self.kinds, strict=True):
            tensor.__class__ = away_class(kind)
            tensor.data = placeholder(tensor.dtype, tensor.device).expand(tensor.shape)
        self.storage.resize_(0)
        self.weight.left(self.group)

    def come_back(self) -> None:
        """Put the tensors on their storage, which is filled, with their own classes."""
        for tensor, memory, kind in zip(self.tensors, self.memory, self.kinds, strict=True):
            tensor.data = memory.tensor()
            tensor.__class__ = kind
        self.weight.returned()

    def ends(self) -> None:
        """Give wrapping tensors their own classes back, since all that left with this weight is back."""
        for whole, kind in self._wholes.values():
            whole.__class__ = kind


class _Alone:
    """An object that one name refers to."""


_ALONE = _Alone()
_ONE_REFERENCE = sys.getrefcount(weakref.ref(_ALONE)())


def _held_elsewhere(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether more than the node that keeps a view refers to the view: a module, a list, another graph."""
    if sys.getrefcount(ref()) > _ONE_REFERENCE:
        return ref() is not None
    return ref()._use_count() > 1  # type: ignore[union-attr]


@functools.cache
def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the one element that stands for all of a weight that is away."""
    kind = dtype.is_floating_point or dtype.is_complex
    with torch.inference_mode(False):
        return torch.full((), float("nan") if kind else 1, device=device).to(dtype)


class SavedPart:
    """Stands for the record of a saved tensor that is a part of a weight (`Held.give`)."""

    def __init__(self, stay: _Stay, saved: torch.Tensor) -> None:
        self._stay = stay
        owner = saved if any(saved is t for t in stay.tensors) else saved._base
        self._tensor = next((t for t in stay.tensors if t is owner), None)
        self._counted = stay.tensors[0] if self._tensor is None else self._tensor  # which the version is of
        if self._tensor is None:
            at = int(saved.storage_offset())
            parts = zip(stay.tensors, stay.memory, strict=True)
            self._counted = next((t for t, m in parts if m.lies is not None and m.lies.has(at)), self._counted)
        self._version = version_of(saved)

    def is_made_from(self, tensor: torch.Tensor) -> bool:
        """Whether the saved tensor is the parameter itself."""
        return tensor is self._tensor

    def tensor(self) -> torch.Tensor:
        """Return the parameter, with its values; raises what `whole` does."""
        self.whole()
        assert self._tensor is not None
        return self._tensor

    def whole(self) -> torch.Tensor:
        """Return the whole storage, with its values.

        Raises
        ------
        RuntimeError
            If it was written to since it was saved.
        """
        self._stay.group.need()
        if (now := version_of(self._counted)) != self._version:
            raise modified_error(self._counted.shape, self._version, now)
        return self._stay.whole


class Group:
    """Weights with the same points, which leave and return together.

    Parameters
    ----------
    move : WeightMove
        The move of one of them.

    Attributes
    ----------
    stays : list of _Stay
        The stays of the present forward.
    """

    def __init__(self, owner: Weights, weights: list[_Weight], store: Store, move: WeightMove) -> None:
        self.owner, self._weights, self._store = owner, weights, store
        self.stage, self.release, self.prefetch = move.stage, move.release, move.prefetch
        self.returns, self._users = move.resident.returns, move.resident.users
        self.stays: list[_Stay] = []
        self.runs = 0  # of stages that use it, outside of steps
        self._replayed_away = self.returns is not None
        self._ticket: Ticket | None = None
        self._copied: list[tuple[_Weight, Any]] = []  # what the ticket has, in its order, with its digest
        self._away: list[_Stay] = []
        self._targets: list[torch.Tensor] = []  # of the copy in that was issued last, until the next forward
        self._done: Any = None
        self._waited: list[Any] = []  # streams that have waited for it
        self._first: dict[_Weight, Any] = {}
        self._away_class = functools.cache(functools.partial(_away_class, self))

    @property
    def first(self) -> int:
        """The first stage that uses the group, if it is away between steps."""
        return self._users[0]

    @property
    def is_away(self) -> bool:
        """Whether any of the group is away, and not on its way back."""
        return bool(self._away) and not self._targets

    def begin(self) -> None:
        """Begin a forward: find the weights in their places."""
        if self._away:  # between steps; no code has read it
            if all(stay.is_in_place for stay in self._away):
                return
            self.need()
        self._targets = []
        former = {stay.weight: stay for stay in self.stays}
        self.stays = []
        for weight in self._weights:
            there = weight.found()
            if weight.is_sharded(there):
                self._note("sharded", f"{weight.name} stays on the device: FSDP2 or a tensor subclass owns its memory")
                continue
            tensors, stay = weight.tensors(there), former.get(weight)
            if tensors is None and type(weight) is _Weight and any(t is not None for t in there):
                why = "its memory can't be resized (a file's, an array's, a shared one), or isn't the profiled one"
                self._note("memory", f"{weight.name} stays on the device: {why}")
            buffer = type(weight) is _Weight and not any(isinstance(t, nn.Parameter) for t in tensors or ())
            sent = self.owner.in_ddp and buffer
            if tensors is not None and not sent:  # an earlier graph and this one share the stay of an unchanged weight
                self.stays.append(stay if stay is not None and stay.is_of(tensors) else _Stay(self, weight, tensors))
                self.stays[-1].fixed = False
                self.stays[-1].versions = self.stays[-1].versions_now()

    def forget_old(self) -> None:
        """Free the copy on the host, unless the weights are frozen and equal to it, or it is the only one."""
        if self._away:
            return
        now = [(stay.weight, stay.digest) for stay in self.stays]
        if self._ticket is not None and (now != self._copied or any(w.trained for w in self._weights)):
            self._forget()

    def _forget_if_written(self) -> None:
        """Free the copy on the host if a weight was written to since the copy was made, or since the forward began.

        On the CPU writes through `.data`, which no version shows, are seen as well; elsewhere that would wait for the
        device each time.
        """
        if self._ticket is None:
            return
        written = any(stay.versions_now() != stay.versions for stay in self.stays)
        frozen = [stay for stay in self.stays if not stay.weight.trained]
        if not written and not is_accelerator(self.owner.device):
            digests = self.owner.digests(frozen)
            written = any(stay.digest != digest for stay, digest in zip(frozen, digests, strict=True))
        if written:
            self._forget()
            for stay in frozen:
                stay.digest = None  # so that the next forward copies anew

    def _forget(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._store.free(ticket)

    def close(self) -> None:
        """Free the copy on the host; what graphs still hold of the weights is theirs."""
        self._forget()
        self.stays, self._targets = [], []

    def leave_between(self) -> None:
        """Leave the device until the next forward, if not away already."""
        if self._away and self._targets:  # on its way back, unused
            self.need()
        self.start_leaving()
        self.leave(within_step=False)

    def start_leaving(self) -> None:
        """Start the copy out, if there is none."""
        owner = self.owner
        if owner.stays or owner.on_move is not None:
            return
        with owner.lock, owner.plainly():
            if self._away or all(stay.fixed for stay in self.stays):
                return
            self._forget_if_written()
            for stay in self.stays:
                stay.versions = stay.versions_now()
                stream = current_stream(owner.device)
                if stream is not None:
                    stay.whole.record_stream(stream)
            if self._ticket is not None:
                return
            self._copied = [(stay.weight, stay.digest) for stay in self.stays]
            try:
                self._ticket = self._store.start_out(*(stay.whole for stay in self.stays))
            except SwapFullError as error:
                self._note("full", f"weights stay on the device, since the swap space is full: {error}", error)
                return
            owner.counters.swapped_out_bytes += self._ticket.nbytes

    def leave(self, *, within_step: bool = True) -> None:
        """Free the memory: the release point. What returns in the same step is compared, where that is checked."""
        owner = self.owner
        if owner.on_move is not None:
            for weight in () if self._replayed_away else self._weights:
                owner.on_move(weight.name, weight.nbytes, False)
            self._replayed_away = True
            return
        if owner.stays:
            return
        with owner.lock, owner.plainly():
            if self._ticket is None or self._away or not self.stays or self.runs:
                return
            try:
                with owner.counters.waiting():
                    self._store.finish_out(self._ticket)
            except BaseException:
                self._forget()  # the next forward copies anew
                raise
            self._targets = []
            for stay in self.stays:
                self._leave(stay, within_step=within_step)

    def _leave(self, stay: _Stay, *, within_step: bool) -> None:
        name, owner = stay.weight.name, self.owner
        if stay.fixed:
            return
        if stay.has_others:
            return self._note("alias", f"{name} stays on the device: another tensor, array or graph shares its memory")
        if stay.versions != stay.versions_now():
            return self._note("written", f"{name} stays on the device: it was written to after its stage had run")
        try:
            for kind in stay.all_kinds:
                self._away_class(kind)
        except TypeError:
            return self._note("class", f"{name} stays on the device: {type(stay.tensors[0]).__name__} is a final class")
        if owner.checks is not None and within_step:
            self._first[stay.weight] = owner.checks.take(stay.whole)
        stream = current_stream(owner.device)
        if stream is not None:
            stay.whole.record_stream(stream)
        self._away.append(stay)  # first: an interrupt behind it leaves what `need` puts right
        stay.leave(self._away_class)

    def start_returning(self) -> None:
        """Allocate the memory and start the copies in: the prefetch point."""
        owner = self.owner
        if self._replayed_away and owner.on_move is not None:
            self._replayed_away = False
            for weight in self._weights:
                owner.on_move(weight.name, weight.nbytes, True)
        if not self._away:
            return
        with owner.lock, owner.plainly():
            if not self._away or self._targets:
                return
            assert self._ticket is not None
            places = {weight: part for part, (weight, _) in enumerate(self._copied)}
            for stay in self._away:
                stay.storage.resize_(stay.nbytes)
            targets = [stay.whole for stay in self._away]
            parts = [places[stay.weight] for stay in self._away]
            self._waited = []
            self._done = self._store.start_in(self._ticket, *targets, parts=parts)
            self._targets = targets
            owner.counters.swapped_in_bytes += sum(stay.nbytes for stay in self._away)

    def need(self) -> None:
        """Bring the values back for the work that the current stream does next."""
        self.start_returning()
        if not self._targets:
            return
        owner = self.owner
        with owner.lock, owner.plainly():
            stream = current_stream(owner.device)
            if not self._targets or stream in self._waited:
                return
            try:
                with owner.counters.waiting():
                    assert self._ticket is not None
                    self._store.finish_in(self._ticket, self._done)
            except BaseException:
                if self._away:
                    self._targets = []  # the next use copies it once more
                raise
            if stream is not None:
                for target in self._targets:
                    target.record_stream(stream)
            for stay in self._away:
                stay.come_back()
                first = self._first.pop(stay.weight, None)
                if first is not None and owner.checks is not None:
                    owner.checks.compare(first, stay.whole, stay.weight.name, "the weight that was away", _COPY)
            for stay in self._away:
                stay.ends()
            self._away = []
            self._waited.append(stream)

    def read(self, what: str) -> None:
        """Bring the group back for code that reads it, and keep it on the device for the rest of the step."""
        with self.owner.lock:
            for stay in self._away:
                stay.fixed = True
            name = self._weights[0].name
            when = "between its forward and its backward" if self.returns is None else "while it is away"
            self.need()
            self._note("read", f"{name} is read by {what} {when}")

    def home(self, tensor: torch.Tensor) -> Memory:
        """Return where a tensor that is away lies when it is back."""
        return next(memory for stay in self._away if (memory := stay.home(tensor)) is not None)

    def _note(self, kind: str, text: str, error: CkptPlanError | None = None) -> None:
        self.owner.counters.differences.note(f"weights {kind}", text, error)


def _away_class(group: Group, kind: type) -> type:
    """Return a class for tensors of `kind` while the weights of `group` are away (rule 2)."""

    def __torch_function__(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _without_values():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        group.read(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self: torch.Tensor, memo: Any) -> Any:
        group.read("copy.deepcopy")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self: torch.Tensor, protocol: Any) -> Any:
        group.read("pickle")
        return self.__reduce_ex__(protocol)

    def __getattribute__(self: torch.Tensor, name: str) -> Any:
        if name == "_local_tensor":
            group.read("a use of its local part")
        return object.__getattribute__(self, name)

    names: dict[str, Any] = {
        "__torch_function__": classmethod(__torch_function__),
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": kind.__module__,
    }
    if hasattr(kind, "_local_tensor"):
        names["__getattribute__"] = __getattribute__
    if hasattr(kind, "_local_tensor") or not hasattr(kind, "__tensor_flatten__"):  # others have no memory of their own
        names["home"] = staticmethod(group.home)
    return type(kind)(kind.__name__, (kind,), names)


@functools.cache
def _without_values() -> frozenset[Any]:
    """The attributes and methods of a tensor that don't read its values."""
    tensor = torch.Tensor
    attributes = (
        "shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "_version", "is_leaf", "grad_fn",
        "requires_grad", "retains_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
        "is_mkldnn", "is_mps", "is_xpu", "is_sparse_csr", "_backward_hooks", "_post_accumulate_grad_hooks", "_base",
        "output_nr", "grad", "_grad",
    )  # fmt: skip
    methods = (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_floating_point",
        "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "requires_grad_", "register_hook",
        "register_post_accumulate_grad_hook", "retain_grad", "_is_view", "__len__", "__hash__",
    )  # fmt: skip
    found: list[Any] = [getattr(tensor, name) for name in methods]
    for name in attributes:
        found.append(getattr(tensor, name).__get__)
        if name in ("grad", "_grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
            found.append(getattr(tensor, name).__set__)
    return frozenset([*found, torch.is_floating_point, torch.is_complex, torch.numel])
