"""Which storages are the model's own: never moved, and given back as they are where a stage runs again.

Sharded units (FSDP2, `torch.distributed.fsdp.fully_shard`) have other parameters while they run: whole tensors take the
shards' places in the unit's pre-forward hook, and go in its post-forward hook. So what belongs to a stage is looked at
when it runs, and units inside of it, which gather once it runs, when something is saved.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptplan.runtime.state.cells import below


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages that hold a tensor's values: for a wrapper such as DTensor, those of the tensors it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in names]
    return [storage for t in inside if isinstance(t, torch.Tensor) for storage in storages_of(t)]


def is_sharded_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on `module`."""
    return bool(_sharded_units([module]))


def _sharded_units(modules: list[nn.Module]) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody can have sharded any where it wasn't imported
    return [] if fsdp is None else [m for m in modules if isinstance(m, fsdp.FSDPModule)]


class OwnNames:
    """The parameters and buffers that a model has now, by their places.

    What a forward registers later isn't among them: in the step that was traced it was made on the way, and counts in
    the order of what is saved, as it then does in all steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = below(model)
        self._places = [
            (table, name)
            for m in self._modules
            for table in (m._parameters, m._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lies there now."""
        for table, name in self._places:
            tensor = table[name] if name in table else None  # noqa: SIM401 - a scripted module's has no `get`
            if tensor is not None:
                yield tensor

    def sharded_units(self) -> list[Any]:
        """The modules on which `fully_shard` was called."""
        return _sharded_units(self._modules)


class OwnStorages:
    """The storages of a model's parameters and buffers during one pass.

    By storage, since a linear layer saves a tensor that is no parameter but a view of one, and anew each pass, since
    parameters may have been moved or replaced.

    Parameters
    ----------
    names : OwnNames or None
        None: nobody will ask.
    """

    def __init__(self, names: OwnNames | None) -> None:
        # Weak references, since the address of a buffer that the forward replaces may be another's later.
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._units: list[Any] = []
        self._stage: nn.Module | None = None
        if names is not None:
            self._units += names.sharded_units()
            self._add(names.tensors())

    def __call__(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is the model's own."""
        if self._knows(storage):
            return True
        if self._stage is None:
            return False
        self._add(self._stage.parameters())
        return self._knows(storage)

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        known = self._known.get(storage._cdata)
        return known is not None and known() is not None

    def enter(self, stage: nn.Module) -> None:
        """The forward of `stage` begins, its unit's parameters being whole."""
        if self._units:
            self._stage = stage
            self._add(stage.parameters())

    def whole(self, stage: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]] | None:
        """A context in which the parameters of `stage` are whole; None where they always are.

        To run it again before its unit's own backward gathers them.
        """
        return functools.partial(self._whole, stage) if self._units else None

    def _whole(self, stage: nn.Module) -> contextlib.AbstractContextManager[None]:
        inside = set(stage.modules())
        units = [unit for unit in self._units if unit in inside]
        if stage not in units:  # its own parameters are those of the nearest unit around it
            units += [unit for unit in self._units if any(m is stage for m in unit.modules())][-1:]
        return _gathered(units)

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for storage in (tensor.untyped_storage(),) if type(tensor) is nn.Parameter else storages_of(tensor):
                if not self._knows(storage):
                    self._known[storage._cdata] = weakref.ref(storage)


@contextlib.contextmanager
def _gathered(units: list[Any]) -> Iterator[None]:
    sharded = [unit for unit in units if any(map(is_traceable_wrapper_subclass, _managed(unit)))]
    for unit in sharded:
        unit.unshard()
    try:
        yield
    finally:
        for unit in sharded:
            unit.reshard()


def _managed(unit: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters below `unit` but for those of units inside of it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not is_sharded_unit(child):
            yield from _managed(child)
