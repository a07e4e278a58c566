"""Models sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): runs without their group, and on fake shards.

NOTE [Sharded models]
PyTorch's own code runs in profiles, traces and replays as in training: its hooks gather a unit's parameters before the
unit's forward and backward, free them, and reduce gradients. So gathered units, prefetched ones, copies in another data
type, padding and the buffers of reductions are in the bytes by themselves. Three things differ:

1. Whatever runs the model and undoes what it did (`restored`) runs it without the group: a rank's shard stands for the
   shards of all others, and its part of a gradient for the sum (`without_group`). So ranks needn't run in step. Sizes
   are the real ones; the weights are others, of the same distribution.
2. For traces, shards are fake (`fake_shards`). The storages of gathered parameters are made before the step, empty, as
   a training has them from its second step on, and are the model's own: they grow and shrink, but no plan moves them.
3. A model may be sharded for a group that isn't there (`sharded`), by PyTorch's fake process group.
4. Between micro-batches whose gradients aren't reduced (`set_requires_gradient_sync(False)`), the engine keeps whole
   gradients, which no parameter of the model shows. A model is planned so if it is so at that moment, or has such
   gradients. Runs that are undone leave them alone.

Each object of the engine that these change is put back attribute by attribute at the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ckptplan.core.errors import InvalidInputError, PlanMismatchError, UnsupportedModelError
from ckptplan.core.fsdp import FSDP
from ckptplan.core.plan import Plan
from ckptplan.runtime.observer import Observer
from ckptplan.runtime.private import SUPPORTED, is_fake
from ckptplan.runtime.state.cells import below
from ckptplan.runtime.swap.own import is_sharded_unit, local_part, sharded_units

_CONTAINERS = (list, dict, set)
_NUMBERS = (bool, int, float)
_OF_STATES = """_auto_reshard_after_forward _comm_ctx _fsdp_param_groups _lazy_init _modules _state_ctx _training_state
    _states_to_backward_prefetch _states_to_forward_prefetch"""
_OF_GROUPS = """_all_gather_comm _all_gather_process_group _all_reduce_hook _post_forward_indices _reduce_scatter_comm
    _to_sharded _training_state all_reduce_grads comm_ctx device fsdp_params is_unsharded mesh_info modules
    offload_policy post_forward_mesh_info reduce_grads unshard wait_for_unshard"""
_OF_PARAMETERS = """_orig_size _setattr_on_modules _sharded_local_tensor _sharded_param_data _unsharded_inner_tensors
    all_gather_outputs free_unsharded_param fsdp_placement init_all_gather_outputs init_unsharded_param is_dtensor
    mp_policy padded_sharded_param_size sharded_param sharded_size to_sharded_dtensor"""
"""Attributes of the engine's states, groups and parameters that are used here (seen in PyTorch 2.9 to 2.15)."""


def states(model: nn.Module) -> list[Any]:
    """Return the engine's states of the units in a model, outer ones first; empty if it isn't sharded."""
    found = [unit._get_fsdp_state() for unit in sharded_units(below(model))]
    return list({id(state): state for state in found}.values())


def outermost(model: nn.Module) -> list[Any]:
    """Return the states of the units that lie in no other."""
    inside = {id(m) for unit in sharded_units(below(model)) for m in unit.modules() if m is not unit}
    return [state for state in states(model) if not any(id(m) in inside for m in state._modules)]


def parameter_groups(model: nn.Module) -> list[Any]:
    """Return the groups of parameters that are gathered together."""
    return [group for state in states(model) for group in state._fsdp_param_groups]


def engine_parameters(model: nn.Module) -> list[Any]:
    """Return what the engine keeps of each parameter that it shards."""
    return [p for group in parameter_groups(model) for p in group.fsdp_params]


def check_planned(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for settings of `fully_shard` whose bytes aren't planned, and for other engines."""
    _check_engine(states(model), _OF_STATES)
    _check_engine(parameter_groups(model), _OF_GROUPS)
    _check_engine(engine_parameters(model), _OF_PARAMETERS)
    for group in parameter_groups(model):
        why = None
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            why = "its CPUOffloadPolicy keeps shards, gradients and optimizer state on the host"
        elif type(group._all_gather_comm).__name__ != "DefaultAllGather":
            why = f"it gathers by {type(group._all_gather_comm).__name__}, whose memory plans don't know"
        elif type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            why = f"it reduces by {type(group._reduce_scatter_comm).__name__}, whose memory plans don't know"
        elif group._all_reduce_hook is not None:
            why = "its all-reduce hook makes tensors of its own"
        elif any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params):
            why = "its parameters gather by code of their own (fsdp_pre_all_gather)"
        elif any(p.is_dtensor for p in group.fsdp_params):
            why = "its parameters are parallelized by tensors as well"
        elif any(getattr(p, "keep_unsharded_storage", False) for p in group.fsdp_params):
            why = "its gathered parameters stay between steps (set_keep_unsharded_storage)"
        if why is not None:
            raise UnsupportedModelError(f"{_UNPLANNED}: {why}")
    if any(getattr(state._state_ctx, "manual_backward_finalization", False) for state in states(model)):
        raise UnsupportedModelError(f"{_UNPLANNED}: its gradients are reduced after backward, by finalize_backward")


_UNPLANNED = "the model is sharded by fully_shard, and plans can't go with it"


def _check_engine(objects: Sequence[Any], names: str) -> None:
    for found in objects[:1]:
        if missing := [name for name in names.split() if not hasattr(found, name)]:
            raise UnsupportedModelError(
                f"{_UNPLANNED}: in PyTorch {torch.__version__} a {type(found).__name__} has no {', '.join(missing)}; "
                f"supported are PyTorch {SUPPORTED}"
            )


def unit_settings(module: nn.Module) -> tuple[Any, ...]:
    """Return how a module is sharded, for comparisons within a process; empty if it is no unit."""
    if not is_sharded_unit(module):
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


def whole_gradients(groups: Sequence[Any]) -> list[torch.Tensor]:
    """Return the gradients of groups of parameters that the engine has and hasn't reduced."""
    return [getattr(owner, name) for group in groups for p in group.fsdp_params for owner, name in unreduced(p)]


def reduce_gradients(groups: Sequence[Any]) -> bool:
    """Whether each micro-batch reduces the gradients of groups of parameters."""
    return all(g.reduce_grads and g.all_reduce_grads and not hasattr(g, _WHOLE) for g in groups)


def keep_whole_gradients(groups: Sequence[Any]) -> bool:
    """Whether micro-batches leave whole gradients of groups of parameters (NOTE, item 4)."""
    return not reduce_gradients(groups) or bool(whole_gradients(groups))


_WHOLE = "ckptplan_keeps_whole_gradients"
"""Attribute of the engine's groups that reduce in a run, though the micro-batches before it don't."""


def whole_gradient_bytes(groups: Sequence[Any]) -> dict[int, int]:
    """Return the bytes of each whole gradient of groups of parameters, by the identity of the sharded parameter."""
    return {
        id(p.sharded_param): p._orig_size.numel() * reduced_dtype(p).itemsize
        for group in groups
        for p in group.fsdp_params
    }


@contextlib.contextmanager
def reducing(model: nn.Module) -> Iterator[None]:
    """Inside, backwards reduce gradients as the last micro-batch does that others with whole gradients precede."""
    groups = parameter_groups(model)
    with _put_back(groups):
        for group in groups if keep_whole_gradients(groups) else ():
            group.reduce_grads = group.all_reduce_grads = True
            setattr(group, _WHOLE, True)
        yield


@contextlib.contextmanager
def reduced(model: nn.Module) -> Iterator[bool]:
    """Inside, micro-batches reduce their gradients, and there are no whole ones; yields whether there were, or will."""
    groups = parameter_groups(model)
    if not keep_whole_gradients(groups):
        yield False
        return
    with _put_back(_engine(model)), _set_aside(model):
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = True
        yield True


@contextlib.contextmanager
def keeping_whole(model: nn.Module) -> Iterator[None]:
    """Inside, micro-batches don't reduce their gradients."""
    groups = parameter_groups(model)
    with _put_back(groups):
        for group in groups:
            group.reduce_grads = False
        yield


def has_prefetch_lists(model: nn.Module) -> bool:
    """Whether a unit gathers units ahead that were named for it, which may be any."""
    return any(state._states_to_forward_prefetch or state._states_to_backward_prefetch for state in states(model))


def sizes_of(group: Any) -> tuple[int, int]:
    """Return over how many ranks a group of parameters is sharded, and how many replicas of these there are."""
    mesh = group.mesh_info
    return mesh.shard_mesh_size, getattr(mesh, "replicate_mesh_size", 1)


def resharded_over(state: Any, group: Any, outer: Collection[Any]) -> int | None:
    """Return over how many ranks a unit's parameters are sharded between forward and backward; None if they stay whole.

    An outermost unit's setting is dropped when it first runs, where it was left to PyTorch.
    """
    after = group.post_forward_mesh_info
    dropped = after is None or (state in outer and state._auto_reshard_after_forward)
    return None if dropped else after.shard_mesh_size


def kind_of(model: nn.Module) -> str:
    """Return what plans for a sharded model are bound to: its group and units; empty if it isn't sharded."""
    groups = parameter_groups(model)
    if not groups:
        return ""
    names = {module: name for name, module in model.named_modules()}
    outer = outermost(model)
    digest = hashlib.sha256()
    for state in states(model):
        for group in state._fsdp_param_groups:
            units = [names.get(m, "") for m in group.modules]
            digest.update(f"{units} {resharded_over(state, group, outer)} {_policies(group)}\n".encode())
    size, replicas = sizes_of(groups[-1])
    over = f"{size} x {replicas}" if replicas > 1 else f"{size}"
    whole = WITH_WHOLE_GRADIENTS if keep_whole_gradients(groups) else ""
    return f"fsdp, {over} ranks, units {digest.hexdigest()[:8]}{whole}"


WITH_WHOLE_GRADIENTS = ", whole gradients"
"""Ends what plans are bound to whose micro-batches begin with whole gradients."""


def _alike(kind: str, other: str) -> bool:
    return kind.removesuffix(WITH_WHOLE_GRADIENTS) == other.removesuffix(WITH_WHOLE_GRADIENTS)


def ranks_of(model: nn.Module) -> list[int]:
    """Return the ranks of the group over which a model is sharded; empty if it isn't."""
    return next((sorted(group.mesh_info.mesh.mesh.flatten().tolist()) for group in parameter_groups(model)), [])


class PlannedSharding(Observer):
    """Raises an error if a plan for a sharded model meets one that is sharded otherwise, or not at all."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._planned = model, plan.fingerprint.parallel
        self._seen = not is_sharding(self._planned)

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Raise if the model isn't sharded as planned.

        Raises
        ------
        PlanMismatchError
        """
        if not self._seen and not _alike(found := kind_of(self._model), self._planned):
            raise PlanMismatchError(
                f"the plan was made for a model in {self._planned!r}, and this one is "
                + (f"in {found!r}" if found else "not sharded")
                + ": a rank holds other bytes; shard it as planned, or solve again"
            )
        self._seen = True


def is_sharding(kind: str) -> bool:
    """Whether a fingerprint's `parallel` is that of a sharded model."""
    return kind.startswith("fsdp")


def unlike(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Return the field of fingerprints in which a plan may differ from `model`, which may be sharded later or since.

    Whether micro-batches leave whole gradients changes from one to the next; `GradientGuard` looks at that.
    """
    planned, found = plan.fingerprint.parallel, kind_of(model)
    free = is_sharding(planned) != bool(found) or (bool(found) and _alike(planned, found))
    return ("parallel",) if free else ()


# --- without the group ---


class _Gather:
    """In place of an all-gather: this rank's shard is copied for each other rank."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: Any) -> None:
        if not is_fake(output_tensor):
            for rank, part in enumerate(output_tensor.view(group.size(), -1)):
                if rank != group.rank():
                    part.copy_(input_tensor)


class _Scatter(_Gather):
    """In place of a reduce-scatter: this rank's part of its own gradients."""

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: Any = False
    ) -> None:
        if not is_fake(output_tensor):
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class _Silent:
    """In place of the group of an all-reduce, which leaves the sum as it is."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return _DONE


class _Work:
    def wait(self, *args: Any) -> bool:
        return True


_DONE = _Work()


@contextlib.contextmanager
def _put_back(objects: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of `objects` at the end of the context, and the contents of containers among them."""
    found = [(vars(each), dict(vars(each))) for each in {id(o): o for o in objects}.values()]
    inside = [(v, v.copy()) for _, contents in found for v in contents.values() if type(v) in _CONTAINERS]
    try:
        yield
    finally:
        for attributes, contents in found:
            attributes.clear()
            attributes.update(contents)
        for container, contents in inside:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


def _engine(model: nn.Module) -> list[Any]:
    """Return the engine's objects that a step changes."""
    groups = parameter_groups(model)
    contexts = [each for state in states(model) for each in (state, state._state_ctx, state._comm_ctx)]
    meshes = [mesh for group in groups for mesh in (group.mesh_info, group.post_forward_mesh_info) if mesh is not None]
    parts = [each for group in groups for each in (group, group.comm_ctx, *group.fsdp_params)]
    return [*contexts, *parts, *meshes]


@contextlib.contextmanager
def without_group(model: nn.Module) -> Iterator[None]:
    """Inside, a sharded model runs without communicating (NOTE, item 1), and its engine is put back at the end."""
    groups = parameter_groups(model)
    for group in groups:
        group._to_sharded()
    with _put_back(_engine(model)), _set_aside(model):
        for group in groups:
            group._all_gather_comm, group._reduce_scatter_comm = _Gather(), _Scatter()
            mesh = group.mesh_info
            if hasattr(mesh, "replicate_process_group") and not isinstance(mesh.replicate_process_group, _Silent):
                mesh.replicate_process_group = _Silent(mesh.replicate_process_group)
        try:
            yield
        finally:
            for group in groups:
                group._to_sharded()


@contextlib.contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Inside, there are no whole gradients: the user's come back at the end. The model stays one that keeps them."""
    groups = parameter_groups(model)
    whole = [(owner, name, getattr(owner, name)) for p in engine_parameters(model) for owner, name in unreduced(p)]
    if keep_whole_gradients(groups):
        for state in outermost(model):
            state._lazy_init()
        for group in groups:
            group.reduce_grads = hasattr(group, _WHOLE)
            for p in group.fsdp_params:  # a backward then looks at all, even of units that it doesn't reach
                _make_unsharded(p, group)
    for owner, name, _ in whole:
        setattr(owner, name, None)
    try:
        yield
    finally:
        for owner, name, gradient in whole:
            setattr(owner, name, gradient)


def _make_unsharded(p: Any, group: Any) -> None:
    """Make the tensors in which a parameter is gathered, where it hasn't been yet; they are empty."""
    if not hasattr(p, "_unsharded_param"):
        dtype = p.param_dtype or p.orig_dtype
        size = group._all_gather_process_group.size()
        p.init_all_gather_outputs([p._sharded_param_data.numel()], [dtype], size, group.device)
        p.init_unsharded_param()
        p.free_unsharded_param()


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, backwards may run in the middle of a forward: at the end the engine is where it was, and has gathered."""
    groups, found = parameter_groups(model), states(model)
    whole = [group for group in groups if group.is_unsharded]
    training = [(each, each._training_state) for each in (*found, *groups)]
    roots = [(state._state_ctx, state._state_ctx.iter_forward_root) for state in found]
    orders = [group._post_forward_indices for group in groups]
    orders += [getattr(state._comm_ctx, "post_forward_order", []) for state in found]  # none before it first ran
    before = [list(order) for order in orders]
    try:
        yield
    finally:
        for group in groups:
            if group in whole:
                group.unshard()
                group.wait_for_unshard()
            else:
                group._to_sharded()
        for each, state in training:
            each._training_state = state
        for context, root in roots:
            context.iter_forward_root = root
        for order, contents in zip(orders, before, strict=True):
            order[:] = contents


# --- fake shards ---


@contextlib.contextmanager
def fake_shards(
    model: nn.Module,
    fake: Callable[[torch.Tensor], torch.Tensor],
    making: contextlib.AbstractContextManager[None],
    *,
    accumulating: bool = False,
) -> Iterator[None]:
    """Inside, a sharded model has fake shards (NOTE, item 2); its tables of parameters aren't put back.

    Parameters
    ----------
    fake : callable
        Returns the fake twin of a tensor, always the same.
    making : context manager
        Inside, tensors are made as the twins are.
    accumulating : bool
        Every parameter has a gradient, whether or not it has one in the model.
    """
    groups = parameter_groups(model)
    if not groups:
        yield
        return
    with without_group(model):
        with torch.no_grad(), making:
            whole = keep_whole_gradients(groups)
            for group in groups:
                for p in group.fsdp_params:
                    _give_fake(p, fake, accumulating=accumulating and not whole)
            for state in outermost(model):
                state._lazy_init()
            for group in groups:
                for p in group.fsdp_params:
                    _make_unsharded(p, group)
                    if accumulating and whole and p.sharded_param.requires_grad:
                        _give_whole_gradient(p)
        yield


def _give_fake(p: Any, fake: Callable[[torch.Tensor], torch.Tensor], *, accumulating: bool) -> None:
    """Give a parameter of the engine a fake shard, and a fake gradient where it has one."""
    real = p.sharded_param
    data = fake(p._sharded_param_data)

    def part_of(padded: torch.Tensor) -> torch.Tensor:
        dim = p.fsdp_placement.dim
        length = p.sharded_size[dim]
        return padded if padded.shape[dim] == length else padded.narrow(dim, 0, length)

    part = part_of(data.view(p.padded_sharded_param_size))
    twin = nn.Parameter(p.to_sharded_dtensor(part), requires_grad=real.requires_grad)
    if getattr(p, "_has_sharded_grad_dtype_override", False):
        twin.grad_dtype = p.sharded_grad_dtype
    if real.grad is not None:
        twin.grad = p.to_sharded_dtensor(fake(local_part(real.grad).detach()))
    elif accumulating and real.requires_grad:
        twin.grad = p.to_sharded_dtensor(part_of(torch.empty_like(data).view(p.padded_sharded_param_size)))
    p._sharded_param_data, p.sharded_param, p.all_gather_outputs = data, twin, []
    p._unsharded_inner_tensors = []
    if _keeps_apart(p):
        p.unsharded_accumulated_grad = None
    vars(p).pop("_unsharded_param", None)
    p._setattr_on_modules(twin)


def _give_whole_gradient(p: Any) -> torch.Tensor:
    """Give a parameter of the engine a gradient that isn't reduced, where the engine would keep it."""
    made = torch.empty_like(p._unsharded_param, dtype=reduced_dtype(p), requires_grad=False)
    if made.dtype != p._unsharded_param.dtype and _keeps_apart(p):
        p.unsharded_accumulated_grad = made
    else:
        p._unsharded_param.grad = made
    return made


def give_whole_gradients(model: nn.Module) -> None:
    """Give each parameter of a sharded model a whole gradient of zeros."""
    for p in engine_parameters(model):
        if p.sharded_param.requires_grad:
            _give_whole_gradient(p).zero_()


def gathered(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors in whose storages a sharded model's parameters are gathered, empty or not."""
    return [t for p in engine_parameters(model) for t in p.all_gather_outputs]


# --- groups that aren't here ---


@contextlib.contextmanager
def sharded(model: nn.Module, settings: FSDP | int | None) -> Iterator[None]:
    """Inside, a model is sharded for a group that isn't here, as its first rank (NOTE, item 3).

    Raises
    ------
    InvalidInputError
        If the model is sharded already, has none of the units, or this process is one of a group of another size.
    """
    wanted = FSDP.of(settings)
    if wanted is None:
        yield
        return
    if sharded_units(below(model)):
        raise InvalidInputError("fsdp= is for a model that isn't sharded yet, and this one is; leave it out")
    with _sharding_undone(model), _group(wanted.ranks * wanted.replicas):
        shard(model, wanted)
        yield


def shard(model: nn.Module, settings: FSDP) -> None:
    """Shard a model over the present group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = next(model.parameters()).device.type
    shape = (settings.ranks,) if settings.replicas == 1 else (settings.replicas, settings.ranks)
    names = ("shard",) if settings.replicas == 1 else ("replicate", "shard")
    units = units_of(model, settings.units)
    mesh = init_device_mesh("cpu" if kind == "meta" else kind, shape, mesh_dim_names=names)
    param, reduced = (
        None if name is None else getattr(torch, name) for name in (settings.param_dtype, settings.reduce_dtype)
    )
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduced)
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")


def as_asked(function: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """Return a function of a model, and of an option `fsdp` by which the model is sharded meanwhile."""

    @functools.wraps(function)
    def run(model: M, *args: P.args, **kwargs: P.kwargs) -> T:
        settings = kwargs.get("fsdp") if isinstance(model, nn.Module) else None
        with contextlib.nullcontext() if settings is None else sharded(model, settings):  # type: ignore[arg-type]
            return function(model, *args, **kwargs)

    return run  # type: ignore[return-value]


def units_of(model: nn.Module, names: tuple[str, ...] | None) -> list[nn.Module]:
    """Return the modules that `FSDP.units` stands for, inner ones first, without the model itself."""
    listed = names
    if names is None:
        names = tuple(getattr(model, "_no_split_modules", None) or ())
    called = [(m, {type(m).__name__, name}) for name, m in model.named_modules()]
    found = [m for m, names_of_it in called if names_of_it & set(names)]
    if not found and listed is None:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        found = [m for each in lists if len({type(m) for m in each}) == 1 and len(each) > 1 for m in each]
    missing = set(listed or ()) - {name for _, names_of_it in called for name in names_of_it}
    if missing:
        raise InvalidInputError(f"fsdp: the model has no module of class or name {', '.join(sorted(missing))}")
    with_own = [m for m in dict.fromkeys(found) if m is not model and any(True for _ in m.parameters())]
    tied = [m for m in with_own if _is_tied(model, m)]
    if tied and listed is not None:
        raise InvalidInputError(
            f"fsdp: a {type(tied[0]).__name__} can't be a unit, since modules outside of it have one of its "
            "parameters; leave it out of units"
        )
    return [m for m in with_own if m not in tied][::-1]


def _is_tied(model: nn.Module, unit: nn.Module) -> bool:
    """Whether a module has a parameter that others outside of it have, too."""
    inside, own = set(unit.modules()), {id(p) for p in unit.parameters()}
    return any(id(p) in own for m in model.modules() if m not in inside for p in m._parameters.values())


@contextlib.contextmanager
def _group(count: int) -> Iterator[None]:
    """Inside there is a group of `count` ranks: the one that is here if it has as many, or else a fake one."""
    if dist.is_initialized():
        if dist.get_world_size() != count:
            raise InvalidInputError(
                f"fsdp: {count} ranks, and this process is one of a group of {dist.get_world_size()}; plan for other "
                "groups in a process of its own"
            )
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # which a group replaces by one that names the rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextlib.contextmanager
def _sharding_undone(model: nn.Module) -> Iterator[None]:
    """Restore at the end what `fully_shard` changes: classes, tables, hooks and attributes of all modules."""
    found = [(m, type(m), dict(vars(m)), _copies(m)) for m in model.modules()]
    from torch.distributed._composable_state import _module_state_mapping

    try:
        yield
    finally:
        for module, kind, attributes, tables in found:
            _module_state_mapping.pop(module, None)
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for table, contents in tables:
                table.clear()
                table.update(contents)


def _copies(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(v, v.copy()) for v in vars(module).values() if isinstance(v, (dict, set))]
