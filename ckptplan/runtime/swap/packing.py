"""Packing: saved tensors as the autograd graph holds them, until a record holds their bytes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ckptplan.runtime.swap.record import Record, home_of
from ckptplan.runtime.swap.users_hooks import Compare, Kept, OwnHooks, UsersHooks
from ckptplan.runtime.swap.weights import SavedPart
from ckptplan.tensors.accelerator import is_accelerator
from ckptplan.tensors.private import next_sequence_number
from ckptplan.tensors.views import Geometry, modified_error
from ckptplan.training.compiled import out_of_sight


class Held:
    """A saved tensor, held until its backward, with PyTorch's version check, which saved-tensor hooks switch off.

    Parameters
    ----------
    value : torch.Tensor
        Must not be part of the graph: a node that holds its own result would never be freed.

    Attributes
    ----------
    value : torch.Tensor or None
        None once a record holds the bytes.
    version : int or None
        The number of writes to it so far; None in inference mode, where writes aren't counted.
    stream : optional
        The stream that saved it; None where saved tensors never leave.
    """

    __slots__ = ("__weakref__", "_geometry", "record", "stream", "value", "version")

    def __init__(self, value: torch.Tensor, stream: Any = None) -> None:
        # Most saved tensors stay, so `give` computes what only leaving tensors need.
        self.value: torch.Tensor | None = value
        try:
            self.version: int | None = value._version
        except RuntimeError:
            self.version = None
        self.stream = stream
        self.record: Record | SavedPart | None = None

    def give(self, record: Record | SavedPart) -> None:
        """Hand the bytes over to `record`, which holds them from now on."""
        assert self.value is not None
        self._geometry = None if record.is_made_from(self.value) else Geometry.of(self.value)
        self.record, self.value = record, None

    def tensor(self) -> torch.Tensor:
        """Return the tensor; its bytes are copied back first if they are away.

        Raises
        ------
        RuntimeError
            If it was modified after it was saved.
        """
        value = self.value
        if value is None:
            assert self.record is not None
            return self.record.tensor() if self._geometry is None else self._geometry.on(self.record.whole())
        if self.version is not None and value._version != self.version:
            raise modified_error(value.shape, self.version, value._version)
        return value


class _Counted(Held):
    """A tensor that counts in the order of saving but isn't held for backward."""

    __slots__ = ()


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which autograd is saving now, in a form that can be held until backward.

    If `tensor` is the result of the operation that saves it, this is a detached copy of the reference: held as it is,
    it would keep alive the node that keeps it alive, and both would leak if backward never runs.
    """
    node = tensor.grad_fn
    newest = next_sequence_number() - 1
    return tensor.detach() if node is not None and node._sequence_nr() == newest else tensor


class Packing:
    """Collects the tensors that one stage saves, in order; which of them leave is decided after the stage has run."""

    def __init__(self, device: torch.device) -> None:
        self._streams = is_accelerator(device)
        self.saved: list[Held] = []

    def pack(self, tensor: torch.Tensor) -> Held:
        """Hold `tensor` for backward and append it to `saved`."""
        # Speed matters: this runs for every saved tensor.
        held = Held(tensor if tensor.grad_fn is None else tensor.detach(), home_of(tensor) if self._streams else None)
        self.saved.append(held)
        return held

    def collected(self) -> list[Held]:
        """Return what was saved, in order; the caller empties the list."""
        return self.saved

    def skip(self, tensor: torch.Tensor) -> None:
        """Count `tensor` in the order without holding it."""
        self.saved.append(_Counted(tensor))

    def hooks(self, compared: Callable[[torch.Tensor], Compare] | None = None) -> OwnHooks:
        """Return saved-tensor hooks that collect what autograd saves; for `compared` see `UsersHooks.through`."""
        users = UsersHooks.around()
        return OwnHooks(self.pack if users is None else out_of_sight(users.through(self.pack, compared)), unpack)


class Passing(Packing):
    """Collects the tensors of a stage that moves none of them, and holds none: a graph that forward drops is freed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._refs: list[weakref.ref[Held]] = []

    def pack(self, tensor: torch.Tensor) -> Held:
        """Hold `tensor` for backward, for as long as its graph is there."""
        held = super().pack(tensor)
        self.saved.clear()
        self._refs.append(weakref.ref(held))
        return held

    def collected(self) -> list[Held]:
        """Return what is there still of what was saved."""
        refs, self._refs = self._refs, []
        return [held for ref in refs if (held := ref()) is not None]


unpack: Callable[[Kept], torch.Tensor] = operator.methodcaller("tensor")
"""Return the tensor that was packed."""
