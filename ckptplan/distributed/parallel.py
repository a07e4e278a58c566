"""How a model is trained: on one device, in `DistributedDataParallel`, or sharded by FSDP2 (`fully_shard`).

NOTE [Sharded models]
PyTorch's own code runs in profiles, traces and replays as in training: its hooks gather a unit's parameters before the
unit's forward and backward, free them, and reduce gradients. So gathered units, prefetched ones, copies in another data
type, padding and the buffers of reductions are in the bytes by themselves. Four things differ:

1. Code that runs the model and undoes its effects (`restored`) runs it without the group: a rank's shard stands for the
   shards of all others, and its part of a gradient for the sum (`quiet`). So ranks needn't run in step. Sizes are the
   real ones; the weights are others, of the same distribution.
2. For traces, shards are fake (`faked`). The storages of gathered parameters are made before the step, empty, as a
   training has them from its second step on, and are the model's own: they grow and shrink, but no plan moves them.
3. A model may be sharded for a group that isn't there (distributed/absent.py), by PyTorch's fake process group.
4. Between micro-batches whose gradients aren't reduced (`set_requires_gradient_sync(False)`), the engine keeps whole
   gradients, which no parameter of the model shows. A model is planned so if it is so at that moment, or has such
   gradients. Runs that are undone leave them alone.

Each object of the engine that these change is put back attribute by attribute at the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from ckptplan.core.ddp import DDP
from ckptplan.core.device import Device
from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.core.fsdp import WITH_WHOLE_GRADIENTS, is_sharding
from ckptplan.core.profile import Profile
from ckptplan.distributed.rates import Links, Unit, bytes_per_s, ring_s
from ckptplan.tensors.private import SUPPORTED, is_fake

T = TypeVar("T")
_NUMBERS = (bool, int, float)
_OF_STATES = """_auto_reshard_after_forward _comm_ctx _fsdp_param_groups _lazy_init _modules _state_ctx _training_state
    _states_to_backward_prefetch _states_to_forward_prefetch"""
_OF_GROUPS = """_all_gather_comm _all_gather_process_group _all_reduce_hook _post_forward_indices _reduce_scatter_comm
    _to_sharded _training_state all_reduce_grads comm_ctx device fsdp_params is_unsharded mesh_info modules
    offload_policy post_forward_mesh_info reduce_grads reshard_after_backward unshard wait_for_unshard"""
_OF_PARAMETERS = """_module_info _orig_size _setattr_on_modules _sharded_local_tensor _sharded_param_data
    _unsharded_inner_tensors all_gather_outputs free_unsharded_param fsdp_placement init_all_gather_outputs
    init_unsharded_param is_dtensor mp_policy padded_sharded_param_size sharded_param sharded_size
    to_sharded_dtensor"""
"""Attributes of the engine's states, groups and parameters that are used here (seen in PyTorch 2.9 to 2.15)."""
_OF_FORWARD = ("_training_state", "iter_forward_root", "_post_forward_indices", "post_forward_order")
"""Attributes that hold how far a forward has got."""
_UNPLANNED = "the model is sharded by fully_shard, and plans don't support it"
_WHOLE = "ckptplan_keeps_whole_gradients"
"""Attribute that marks the engine's groups which reduce in a run although the micro-batches before it don't."""


def sharded_units(modules: Iterable[nn.Module]) -> list[Any]:
    """Return those of `modules` on which `fully_shard` was called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no module is sharded
    return [] if fsdp is None else [m for m in modules if isinstance(m, fsdp.FSDPModule)]


def unit_settings(module: nn.Module) -> tuple[Any, ...]:
    """Return how a module is sharded, for comparisons within a process; empty if it isn't a unit."""
    if not sharded_units([module]):
        return ()
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = state._fsdp_param_groups
    after = [g.post_forward_mesh_info and g.post_forward_mesh_info.shard_mesh_size for g in groups]
    plain = [
        [(name, value) for name, value in sorted(vars(each).items()) if value is None or type(value) in _NUMBERS]
        for each in (state, *groups)
    ]
    return (after, plain, *map(_policies, groups))


def _policies(group: Any) -> str:
    """Return the mixed precision of a group's parameters, which may differ from PyTorch 2.15 on."""
    return ", ".join(dict.fromkeys(repr(p.mp_policy) for p in group.fsdp_params))


@contextlib.contextmanager
def gathering(units: list[Any], stage: nn.Module) -> Iterator[None]:
    """Gather the parameters of `stage` within the block, whichever of a model's `units` they belong to."""
    inside = set(stage.modules())
    found = [unit for unit in units if unit in inside]
    if stage not in found:  # its own parameters belong to the nearest unit around it
        found += [unit for unit in units if any(m is stage for m in unit.modules())][-1:]
    found = [u for u in found if any(not g.is_unsharded for g in u._get_fsdp_state()._fsdp_param_groups)]
    for unit in found:
        unit.unshard()
    try:
        yield
    finally:
        for unit in found:
            unit.reshard()


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return a model's class, without the subclass that `fully_shard` makes of it."""
    return next(c for c in type(model).__mro__ if not c.__module__.startswith("torch.distributed.fsdp"))


def _alike(kind: str, other: str) -> bool:
    return kind.removesuffix(WITH_WHOLE_GRADIENTS) == other.removesuffix(WITH_WHOLE_GRADIENTS)


# --- the engine's parameters ---


def reduced_dtype(p: Any) -> torch.dtype:
    """Return the data type in which gradients of a parameter are reduced, and kept whole until then.

    Without a `reduce_dtype` that is the one which PyTorch gives its sharded gradient from 2.15 on, and the one in which
    it is gathered before.
    """
    policy = p.mp_policy
    return policy.reduce_dtype or getattr(p, "sharded_grad_dtype", None) or policy.param_dtype or p.sharded_param.dtype


def _keeps_apart(p: Any) -> bool:
    """Whether whole gradients of another data type than the parameter's are kept beside it, as before PyTorch 2.15."""
    return not isinstance(getattr(type(p), "unsharded_accumulated_grad", None), property)


def unreduced(p: Any) -> Iterator[tuple[Any, str]]:
    """Yield where the engine has a gradient of a parameter that it hasn't reduced: an object and its attribute."""
    places = [(getattr(p, "_unsharded_param", None), "grad")]
    if _keeps_apart(p):
        places.append((p, "unsharded_accumulated_grad"))
    for owner, name in places:
        if getattr(owner, name, None) is not None:
            yield owner, name


def _give_fake(p: Any, fake: Callable[[torch.Tensor], torch.Tensor], *, accumulating: bool) -> None:
    """Give a parameter of the engine a fake shard, and a fake gradient where it has one."""
    real, data = p.sharded_param, fake(p._sharded_param_data)

    def part_of(padded: torch.Tensor) -> torch.Tensor:
        dim = p.fsdp_placement.dim
        length = p.sharded_size[dim]
        shaped = padded.view(p.padded_sharded_param_size)
        return p.to_sharded_dtensor(shaped if shaped.shape[dim] == length else shaped.narrow(dim, 0, length))

    twin = nn.Parameter(part_of(data), requires_grad=real.requires_grad)
    if getattr(p, "_has_sharded_grad_dtype_override", False):
        twin.grad_dtype = p.sharded_grad_dtype
    if real.grad is not None:
        twin.grad = p.to_sharded_dtensor(fake(real.grad._local_tensor.detach()))
    elif accumulating and real.requires_grad:
        twin.grad = part_of(torch.empty_like(data))
    p._sharded_param_data, p.sharded_param, p.all_gather_outputs = data, twin, []
    p._unsharded_inner_tensors = []
    if _keeps_apart(p):
        p.unsharded_accumulated_grad = None
    vars(p).pop("_unsharded_param", None)
    p._setattr_on_modules(twin)


# --- without the group ---


class _Alone:
    """Stand-in for all-gathers and reduce-scatters: a rank's part stands for the parts of all others."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **__: Any) -> None:
        if is_fake(output_tensor):
            return
        if output_tensor.numel() < input_tensor.numel():
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
            return
        for rank, part in enumerate(output_tensor.view(group.size(), -1)):
            if rank != group.rank():
                part.copy_(input_tensor)


class _Silent:
    """Stand-in for the group of an all-reduce, which leaves the tensors unchanged."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self

    def wait(self, *args: Any) -> bool:
        return True


@contextlib.contextmanager
def put_back(objects: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of `objects` at the end of the context, and the contents of containers among them."""
    found = [(vars(each), dict(vars(each))) for each in {id(o): o for o in objects}.values()]
    inside: list[tuple[Any, Any]] = [
        (v, v.copy()) for _, contents in found for v in contents.values() if isinstance(v, (list, dict, set))
    ]
    try:
        yield
    finally:
        for attributes, contents in found:
            attributes.clear()
            attributes.update(contents)
        for container, contents in inside:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


# --- the model ---


class Parallel:
    """How a model is trained: sharded by `fully_shard`, or, if it has no units, on one device; see also `Replicated`.

    Each method is for both; for a model without units it returns nothing and does nothing.

    Attributes
    ----------
    model : nn.Module
        Without the wrapper around it.
    ddp : DDP or None
        The settings of the wrapper that replicates it.
    gradients_in_buckets : bool
        Whether gradients lie in blocks that are there from the start, so that steps take the memory of those that start
        with gradients.
    states, outer : list
        FSDP2's states of the units, outer ones first, and those of the units that lie in no other.
    """

    ddp: DDP | None = None
    gradients_in_buckets = False

    def __init__(self, model: nn.Module) -> None:
        self.model, units = model, sharded_units(model.modules())
        self.states = list({id(state): state for state in (unit._get_fsdp_state() for unit in units)}.values())
        inside = {id(m) for unit in units for m in unit.modules() if m is not unit}
        self.outer = [state for state in self.states if not any(id(m) in inside for m in state._modules)]

    @functools.cached_property
    def groups(self) -> list[Any]:
        """FSDP2's groups of parameters that are gathered together."""
        return [group for state in self.states for group in state._fsdp_param_groups]

    @functools.cached_property
    def parameters(self) -> list[Any]:
        """FSDP2's object for each parameter that it shards."""
        return [p for group in self.groups for p in group.fsdp_params]

    def check(self) -> None:
        """Raise `UnsupportedModelError` for settings whose bytes aren't planned, and for engines that aren't known."""
        for names, objects in ((_OF_STATES, "states"), (_OF_GROUPS, "groups"), (_OF_PARAMETERS, "parameters")):
            for found in getattr(self, objects)[:1]:
                if missing := [name for name in names.split() if not hasattr(found, name)]:
                    raise UnsupportedModelError(
                        f"{_UNPLANNED}: in PyTorch {torch.__version__} a {type(found).__name__} has no "
                        f"{', '.join(missing)}; supported are PyTorch {SUPPORTED}"
                    )
        for group in self.groups:
            gather, reduce = type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__
            whys = {
                "its CPUOffloadPolicy keeps shards, gradients and optimizer state on the host; leave offload_policy= "
                "out, and solve with offload='optimizer', by which state is away until the update":
                type(group.offload_policy).__name__ == "CPUOffloadPolicy",
                f"it gathers by {gather}, whose memory plans don't know": gather != "DefaultAllGather",
                f"it reduces by {reduce}, whose memory plans don't know": reduce != "DefaultReduceScatter",
                "its all-reduce hook makes tensors of its own; leave it out": group._all_reduce_hook is not None,
                "its parameters gather by code of their own (fsdp_pre_all_gather)":
                any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params),
                "its parameters are parallelized by tensors as well": any(p.is_dtensor for p in group.fsdp_params),
                "its gathered parameters stay between steps; leave out set_keep_unsharded_storage(True)":
                any(getattr(p, "keep_unsharded_storage", False) for p in group.fsdp_params),
                "its parameters stay gathered between steps; call set_reshard_after_backward(True) first":
                not group.reshard_after_backward,
                "its gradients are reduced after backward; leave out finalize_backward and its setting":
                any(getattr(state._state_ctx, "manual_backward_finalization", False) for state in self.states),
            }  # fmt: skip
            for why in (why for why, holds in whys.items() if holds):
                raise UnsupportedModelError(f"{_UNPLANNED}: {why}")
        own = set(map(id, self.shards()))
        tensors = sys.modules.get("torch.distributed.tensor")  # not imported: there is none
        for name, tensor in () if tensors is None else self.model.named_parameters():
            if isinstance(tensor, tensors.DTensor) and id(tensor) not in own:  # type: ignore[union-attr]
                raise UnsupportedModelError(
                    f"the parameter {name!r} is a DTensor that fully_shard didn't make: the model is parallelized by "
                    "tensors, and bytes of one rank aren't planned or estimated; solve before that, with a budget for "
                    "the whole model, and apply the plan before or after"
                )

    @property
    def in_step(self) -> bool:
        """Whether all ranks make each forward together."""
        return bool(self.groups)

    @property
    def ranks(self) -> list[int]:
        """The ranks over which the model is replicated or sharded; empty if there are none that are known."""
        return next((sorted(group.mesh_info.mesh.mesh.flatten().tolist()) for group in self.groups), [])

    @property
    def kind(self) -> str:
        """Text that plans are bound to: the group and units of a sharded model; empty on one device."""
        if not self.groups:
            return ""
        names = {module: name for name, module in self.model.named_modules()}
        digest = hashlib.sha256()
        for state in self.states:
            for group in state._fsdp_param_groups:
                units = [names.get(m, "") for m in group.modules]
                digest.update(f"{units} {self._resharded_over(state, group)} {_policies(group)}\n".encode())
        size, replicas = _sizes_of(self.groups[-1])
        over = f"{size} x {replicas}" if replicas > 1 else f"{size}"
        whole = WITH_WHOLE_GRADIENTS if self.keeps_whole else ""
        return f"fsdp, {over} ranks, units {digest.hexdigest()[:8]}{whole}"

    def _resharded_over(self, state: Any, group: Any) -> int | None:
        """Return over how many ranks parameters are sharded between forward and backward; None if they stay whole.

        An outermost unit's setting is dropped when it first runs, where it was left to PyTorch.
        """
        after = group.post_forward_mesh_info
        dropped = after is None or (state in self.outer and state._auto_reshard_after_forward)
        return None if dropped else after.shard_mesh_size

    def free_fields(self, planned: str) -> tuple[str, ...]:
        """Return the field in which a plan's fingerprint may differ, since the model may be sharded later.

        Whether micro-batches leave whole gradients changes from one to the next; `GradientGuard` checks that.
        """
        return ("parallel",) if is_sharding(planned) != self.in_step or _alike(planned, self.kind) else ()

    def require(self, planned: str) -> None:
        """Raise `PlanMismatchError` if a plan of this kind is for a sharded model, and this one isn't sharded so."""
        if is_sharding(planned) and not _alike(found := self.kind, planned):
            raise PlanMismatchError(
                f"the plan was made for a model in {planned!r}, and this one is "
                + (f"in {found!r}" if found else "not sharded")
                + ": a rank holds other bytes; shard it as planned, or solve again"
            )

    # --- bytes ---

    def returned(self, output: T) -> T:
        """Return the output that the program gets for the model's."""
        return output

    def blocks(self) -> list[tuple[int, str, str]]:
        """Return the bytes, category and name of each block that is there from the start beside the model."""
        return []

    def added_bytes(self, round_to: int = 1) -> int:
        """Return the bytes of those blocks in which no gradients lie, each rounded up to `round_to` bytes."""
        in_buckets = self.gradients_in_buckets
        beside = (n for n, category, _ in self.blocks() if not (in_buckets and category == "gradients"))
        return sum(-(-nbytes // round_to) * round_to for nbytes in beside)

    def unseen_bytes(self) -> int:
        """Return the bytes of blocks for gradients in which no gradient of the model lies now."""
        return 0

    # --- sharded parameters ---

    def shards(self) -> list[nn.Parameter]:
        """Return the parameters of which this rank has a part."""
        return [p.sharded_param for p in self.parameters]

    @functools.cached_property
    def _named(self) -> list[tuple[str, Any]]:
        """Return each qualified name of a parameter, with FSDP2's object for it."""
        paths: dict[nn.Module, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(path and f"{path}.")
        places = [
            (p, module, name)
            for p in self.parameters
            for info in (p._module_info,)
            for module, name in zip(
                (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
            )
        ]
        return [(f"{path}{name}", p) for p, module, name in places for path in paths.get(module, ())]

    def named_shards(self) -> dict[str, nn.Parameter]:
        """Return the parameters of which this rank has a part, by each of their names, gathered now or not."""
        return {name: p.sharded_param for name, p in self._named} if self.groups else {}

    def gathered(self) -> list[torch.Tensor]:
        """Return the tensors in whose storages parameters are gathered, empty or not."""
        return [t for p in self.parameters for t in p.all_gather_outputs]

    def gathers_inside(self, stage: nn.Module) -> bool:
        """Whether modules inside of `stage` gather their parameters by themselves."""
        return any(unit is not stage for unit in sharded_units(stage.modules()))

    @property
    def gathers_ahead(self) -> bool:
        """Whether a unit gathers units ahead that were named for it, which may be any."""
        return any(s._states_to_forward_prefetch or s._states_to_backward_prefetch for s in self.states)

    @property
    def keeps_whole(self) -> bool:
        """Whether micro-batches leave whole gradients (NOTE, item 4)."""
        reduce = all(g.reduce_grads and g.all_reduce_grads and not hasattr(g, _WHOLE) for g in self.groups)
        return not reduce or bool(self.whole_gradients())

    def whole_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that earlier micro-batches have left and that aren't reduced."""
        return [getattr(owner, name) for p in self.parameters for owner, name in unreduced(p)]

    def whole_gradient_bytes(self) -> dict[int, int]:
        """Return the bytes of the whole gradient of each of the `shards`, by identity."""
        return {id(p.sharded_param): p._orig_size.numel() * reduced_dtype(p).itemsize for p in self.parameters}

    def give_whole_gradients(self) -> None:
        """Give each of the `shards` a whole gradient of zeros."""
        for p in self.parameters:
            if p.sharded_param.requires_grad:
                made = torch.zeros_like(p._unsharded_param, dtype=reduced_dtype(p), requires_grad=False)
                if made.dtype != p._unsharded_param.dtype and _keeps_apart(p):
                    p.unsharded_accumulated_grad = made
                else:
                    p._unsharded_param.grad = made

    # --- runs ---

    def _engine(self) -> list[Any]:
        """Return the engine's objects that a step changes."""
        contexts = [each for state in self.states for each in (state, state._state_ctx, state._comm_ctx)]
        meshes = [mesh for g in self.groups for mesh in (g.mesh_info, g.post_forward_mesh_info) if mesh is not None]
        return [*contexts, *(each for g in self.groups for each in (g, g.comm_ctx)), *self.parameters, *meshes]

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Run the model without communication within the block (NOTE, item 1); put its engine back at the end."""
        for group in self.groups:
            group._to_sharded()
        with put_back(self._engine()), self._set_aside():
            for group in self.groups:
                group._all_gather_comm = group._reduce_scatter_comm = _Alone()
                mesh = group.mesh_info
                if hasattr(mesh, "replicate_process_group") and not isinstance(mesh.replicate_process_group, _Silent):
                    mesh.replicate_process_group = _Silent(mesh.replicate_process_group)
            try:
                yield
            finally:
                for group in self.groups:
                    group._to_sharded()

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Take whole gradients away within the block. The model still counts as one that keeps them."""
        whole = [(owner, name, getattr(owner, name)) for p in self.parameters for owner, name in unreduced(p)]
        if self.keeps_whole:
            for group in self.groups:
                group.reduce_grads = hasattr(group, _WHOLE)
            self._make_gathered()  # a backward then looks at all, even of units that it doesn't reach
        for owner, name, _ in whole:
            setattr(owner, name, None)
        try:
            yield
        finally:
            for owner, name, gradient in whole:
                setattr(owner, name, gradient)

    def _make_gathered(self) -> None:
        """Make the tensors in which parameters are gathered, where they haven't been yet; they are empty."""
        for state in self.outer:
            state._lazy_init()
        for group in self.groups:
            for p in group.fsdp_params:
                if not hasattr(p, "_unsharded_param"):
                    size, dtype = group._all_gather_process_group.size(), p.param_dtype or p.orig_dtype
                    p.init_all_gather_outputs([p._sharded_param_data.numel()], [dtype], size, group.device)
                    p.init_unsharded_param()
                    p.free_unsharded_param()

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Allow backwards within the block: at its end the engine is where it was in its forward, and has gathered."""
        whole = [group for group in self.groups if group.is_unsharded]
        objects = [*self.groups, *(each for s in self.states for each in (s, s._state_ctx, s._comm_ctx))]
        before = [
            (vars(each), name, [*value] if isinstance(value, list) else value)
            for each in objects
            for name, value in vars(each).items()
            if name in _OF_FORWARD
        ]
        try:
            yield
        finally:
            for group in self.groups:
                if group in whole:
                    group.unshard()
                    group.wait_for_unshard()
                else:
                    group._to_sharded()
            for attributes, name, value in before:
                attributes[name] = value

    @contextlib.contextmanager
    def reducing(self, wanted: bool = True) -> Iterator[None]:
        """Set whether micro-batches reduce their gradients within the block."""
        with put_back(self.groups):
            for group in self.groups:
                group.reduce_grads = group.all_reduce_grads = wanted
            yield

    @contextlib.contextmanager
    def reducing_last(self) -> Iterator[None]:
        """Reduce gradients within the block as the last micro-batch does, after others that left whole gradients."""
        marked = self.groups if self.keeps_whole else ()
        with self.reducing():
            for group in marked:
                setattr(group, _WHOLE, True)
            yield

    @contextlib.contextmanager
    def reduced(self) -> Iterator[bool]:
        """Have micro-batches reduce their gradients within the block, without whole ones; yield `keeps_whole`."""
        keeps_whole = self.keeps_whole
        with put_back(self._engine()), self._set_aside(), self.reducing():
            yield keeps_whole

    @contextlib.contextmanager
    def faked(
        self, fake: Callable[[torch.Tensor], torch.Tensor], making: AbstractContextManager[None], *, accumulating: bool
    ) -> Iterator[None]:
        """Make shards fake within the block (NOTE, item 2); the tables of parameters aren't put back.

        Parameters
        ----------
        fake : callable
            Returns the fake twin of a tensor, always the same.
        making : context manager
            Context in which tensors are made as the twins are.
        accumulating : bool
            Whether every parameter has a gradient, even if it has none in the model.
        """
        with self.quiet():
            with torch.no_grad(), making:
                whole = self.keeps_whole
                for p in self.parameters:
                    _give_fake(p, fake, accumulating=accumulating and not whole)
                self._make_gathered()
                if accumulating and whole:
                    self.give_whole_gradients()
            yield

    # --- the time of collectives ---

    def counted_ranks(self, profile: Profile, *, here: bool) -> int:
        """Return over how many ranks a step's collectives go, whether or not they are `here`; 0: they don't count."""
        return max((math.prod(_sizes_of(group)) for group in self.groups), default=0)

    def largest_gather(self) -> tuple[Any, int]:
        """Return the processes of the largest collective, and how many numbers of four bytes each gives to it."""
        sizes = [sum(p._sharded_param_data.numel() for p in group.fsdp_params) for group in self.groups]
        return self.groups[sizes.index(max(sizes))]._all_gather_process_group, max(sizes)

    def units(self, profile: Profile, links: Links | Device) -> list[Unit]:
        """Return the times of the collectives of a step."""
        names = {module: name for name, module in self.model.named_modules()}
        return [self._unit(state, names, links) for state in self.states]

    def _unit(self, state: Any, names: dict[nn.Module, str], links: Links | Device) -> Unit:
        gather_s = again_s = reduce_s = 0.0
        for group in state._fsdp_param_groups:
            ranks, replicas = _sizes_of(group)
            gathered = reduced = 0
            for p in group.fsdp_params:
                count = p._sharded_param_data.numel() * ranks
                gathered += count * (p.mp_policy.param_dtype or p.sharded_param.dtype).itemsize
                reduced += count * reduced_dtype(p).itemsize * p.sharded_param.requires_grad
            again = self._resharded_over(state, group)
            gather_s += ring_s(gathered, ranks, links)
            again_s += 0.0 if again is None else ring_s(gathered, again, links)
            reduce_s += ring_s(reduced, ranks, links)
            if replicas > 1:  # each rank's shard is all-reduced, and those of a machine share its network
                shares = min(ranks, links.machine_devices) if ranks * replicas > links.machine_devices else 1
                sent = 2 * (replicas - 1) / replicas * reduced / ranks
                reduce_s += sent * shares / bytes_per_s(ranks * replicas, links)
        return Unit(tuple(names.get(m, "") for m in state._modules), gather_s, again_s, reduce_s)


def _sizes_of(group: Any) -> tuple[int, int]:
    """Return over how many ranks a group of parameters is sharded, and how many replicas of these there are."""
    return group.mesh_info.shard_mesh_size, getattr(group.mesh_info, "replicate_mesh_size", 1)
