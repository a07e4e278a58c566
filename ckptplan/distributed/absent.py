"""Models that are sharded by FSDP2 for a group that isn't here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.fsdp import FSDP
from ckptplan.distributed.parallel import put_back, sharded_units


@contextlib.contextmanager
def sharded(model: Any, settings: FSDP | int | None) -> Iterator[None]:
    """Shard a model within the block for a group that isn't here, as its first rank (NOTE [Sharded models], item 3).

    Without settings, or if `model` isn't a module, nothing is done.

    Raises
    ------
    InvalidInputError
        If the model is sharded already, has none of the units, or this process is one of a group of another size.
    """
    wanted = FSDP.of(settings) if isinstance(model, nn.Module) else None
    if wanted is None:
        yield
        return
    if sharded_units(model.modules()):
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
    param, reduced = (getattr(torch, str(name), None) for name in (settings.param_dtype, settings.reduce_dtype))
    policy = MixedPrecisionPolicy(param, reduced)
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)


F = TypeVar("F", bound=Callable[..., Any])


def as_asked(function: F) -> F:
    """Return `function` with the model sharded as its option `fsdp` says while it runs."""

    @functools.wraps(function)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sharded(model, kwargs.get("fsdp")):
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
        raise InvalidInputError(f"fsdp: no module has the class or name {', '.join(sorted(missing))}; correct units=")
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
    """Provide a group of `count` ranks within the block: this process's if it has as many, otherwise a fake one."""
    if dist.is_initialized():
        if dist.get_world_size() != count:
            raise InvalidInputError(
                f"fsdp: {count} ranks, but this process is in a group of {dist.get_world_size()}; plan for groups of "
                "another size in a process without one"
            )
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # making a group replaces it by one that names the rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextlib.contextmanager
def _sharding_undone(model: nn.Module) -> Iterator[None]:
    """Restore at the end what `fully_shard` changes: classes, tables, hooks and attributes of all modules."""
    from torch.distributed._composable_state import _module_state_mapping

    kinds = {module: type(module) for module in model.modules()}
    with put_back(kinds):
        try:
            yield
        finally:
            for module, kind in kinds.items():
                _module_state_mapping.pop(module, None)
                module.__class__ = kind
