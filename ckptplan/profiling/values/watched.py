"""State that a stage reads besides its tensors, watched for changes between its forward and its backward."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from ckptplan.state.cells import Contents, Snapshot
from ckptplan.state.code import read_by
from ckptplan.tensors.modules import below
from ckptplan.tensors.objects import attributes_of


class WatchedTensors:
    """The storages of a module's parameters or buffers, as at construction."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._found = [(name, t, t.untyped_storage()._cdata) for name, t in named]

    def changed(self, written: Container[int]) -> list[str]:
        """Return the names of the tensors whose storage is in `written` (by address), or has been replaced."""
        return [name for name, t, key in self._found if key in written or t.untyped_storage()._cdata != key]


class WatchedState:
    """Python state that a stage reaches and that a recompute doesn't put back, as at construction.

    Parameters
    ----------
    module : nn.Module
    leaves : iterable
        Its arguments, flattened; the plain objects among them are watched, too.
    """

    def __init__(self, module: nn.Module, leaves: Iterable[Any]) -> None:
        self._modules = below(module)
        self._read = read_by(self._modules)
        self._others = [leaf for leaf in leaves if attributes_of(leaf) is not None] + self._read.containers
        self._before = self._contents()

    def _contents(self) -> Contents:
        found = Snapshot(self._modules, self._others, deep=True, graphs=True, puts=False)
        put_back = Snapshot(self._modules).cells | set(map(id, self._modules))
        # Where a container has graphs, a recompute gets a copy by the attribute, but not by a global name.
        return Contents(found, put_back - set(map(id, self._read.containers)))

    def changed(self) -> list[str]:
        """Return the names of attributes and global variables, and the types of other objects, that have changed."""
        return self._before.differences(self._contents()) + self._read.changed()
