"""The storages that are the model's own: never moved, and passed on unchanged when a stage runs again.

Sharded units have other parameters while they run: whole tensors replace the shards in the unit's pre-forward hook, and
are freed in its post-forward hook. So the storages of a stage's own parameters are looked up when the stage runs. Those
of units inside the stage, which gather their parameters later, are looked up each time a tensor is saved.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.distributed.parallel import gathering, sharded_units
from ckptplan.tensors.modules import below
from ckptplan.tensors.private import DisableTorchFunctionSubclass
from ckptplan.tensors.storages import storages_of


class OwnNames:
    """The places (module table and name) of the parameters and buffers that a model has now.

    Tensors that a forward registers later aren't included. In the traced step they were made during the forward and
    have positions in the order of saving (NOTE [Positions]), so they must have them in all steps.
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
        """Yield the parameters and buffers that are in these places now."""
        for table, name in self._places:
            tensor = table[name] if name in table else None  # noqa: SIM401 - a scripted module's has no `get`
            if tensor is not None:
                yield tensor

    def units(self) -> list[Any]:
        """Return the modules that gather their parameters."""
        return sharded_units(self._modules)


class OwnStorages:
    """The storages of a model's parameters and buffers during one pass.

    They are compared by storage, because a linear layer saves not its parameter but a view of it. They are collected
    again for each pass, because parameters may have been moved or replaced.

    Parameters
    ----------
    names : OwnNames or None
        None if the plan doesn't need to know which storages are the model's own.
    away : iterable of torch.Tensor
        Tensors on the storages of parameters that lie elsewhere now and will come back.
    """

    def __init__(self, names: OwnNames | None, away: Iterable[torch.Tensor] = ()) -> None:
        # Weak references, since a buffer that the forward replaces is freed, and another storage may get its address.
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._units: list[Any] = []
        self._stage: nn.Module | None = None
        if names is not None:
            self._units += names.units()
            self._add(names.tensors())
            self._add(away)

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
        """Note that the forward of `stage` begins; the parameters of its sharded unit are whole now."""
        if self._units:
            self._stage = stage
            self._add(stage.parameters())

    def whole(self, stage: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]] | None:
        """Return a context factory for running `stage` with whole parameters; None if they always are whole.

        A stage that is recomputed needs it when it runs before its unit's own backward has gathered the parameters.
        """
        return functools.partial(gathering, self._units, stage) if self._units else None

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        with DisableTorchFunctionSubclass():  # a weight that is away stays away
            for tensor in tensors:
                for storage in (tensor.untyped_storage(),) if type(tensor) is nn.Parameter else storages_of(tensor):
                    if not self._knows(storage):
                        self._known[storage._cdata] = weakref.ref(storage)
