"""Storages of tensors, tensors in containers, and comparisons by bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.tensors import accelerator
from ckptplan.tensors.private import is_traceable_wrapper_subclass


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor of a wrapping class (quantized, DTensor) consists of; or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inside = (getattr(tensor, name) for name in names)
    return [plain for t in inside if isinstance(t, torch.Tensor) for plain in plain_tensors(t)]


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages that hold a tensor's values: for a wrapper such as DTensor, those of the tensors it wraps.

    One that is away has none.
    """
    plains = [] if is_away(tensor) else plain_tensors(tensor)
    return [plain.untyped_storage() for plain in plains if not is_away(plain)]


def is_away(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a weight, gradient or state whose values a plan has on the host now (`Memory.of`)."""
    return hasattr(type(tensor), "home")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor (DTensor), or `tensor` itself."""
    return getattr(tensor, "_local_tensor", tensor)


def unique_bytes(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of the distinct storages of `tensors`, without those in host memory if `device` is CUDA."""
    beside = device is not None and accelerator.is_accelerator(device)
    here = (t for t in tensors if not (beside and t.device.type == "cpu"))
    return sum({s._cdata: s.nbytes() for t in here for s in storages_of(t)}.values())


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors anywhere in nested tuples, lists and dictionaries."""
    found: list[torch.Tensor] = []
    _collect(arguments, found)
    return found


def _collect(arguments: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors in `arguments` to `found`, with the help of pytree where they hold other containers."""
    kind = type(arguments)
    if kind is tuple or kind is list:
        for each in arguments:
            _collect(each, found)
    elif kind is dict:
        for each in arguments.values():
            _collect(each, found)
    elif isinstance(arguments, torch.Tensor):
        found.append(arguments)
    elif kind not in _LEAVES:
        found.extend(t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor))


_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are bitwise equal, including NaNs and the signs of zeros."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    dense = (t if t.layout is torch.strided else t.to_dense() for t in (a, b))
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in dense))
