"""Results that lie in larger storages than their fake twins.

Some operations make their result in a storage for something larger and then give it its size: `F.fold` in one for its
input, losses that are reduced in one for all of their elements. The storage stays as large as it was made, for as long
as the result lives. Fake kernels know nothing of it. Those below are known by rule, which holds for devices that aren't
here too; any other is found when its operation runs alone on the device (workspace.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Operation, arguments and keywords -> elements in the storage of its first result."""


def _of_input(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int((args[0] if args else kwargs["self"]).numel())


def _before_reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("reduction", 1) == 0:
        return 0
    return math.prod(torch.broadcast_shapes(given["self"].shape, given["target"].shape))


_RULES: dict[Any, Rule] = {
    torch.ops.aten.col2im.default: _of_input,
    torch.ops.aten.mse_loss.default: _before_reduction,
    torch.ops.aten.smooth_l1_loss.default: _before_reduction,
    torch.ops.aten.soft_margin_loss.default: _before_reduction,
    torch.ops.aten.binary_cross_entropy.default: _before_reduction,
}


def ruled_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, ...]:
    """Bytes of the storage of an operation's result, where a rule knows it."""
    rule = _RULES.get(func)
    return () if rule is None else (rule(func, args, kwargs) * result.element_size(),)


def new_storages(operands: Any, result: Any) -> list[torch.Tensor]:
    """The results that begin a storage, once for each, in order."""
    seen = {t.untyped_storage()._cdata for t in pytree.tree_leaves(operands) if isinstance(t, torch.Tensor)}
    out: list[torch.Tensor] = []
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            out.append(tensor)
    return out


def enlarged(operands: Any, result: Any, sizes: Sequence[int]) -> Any:
    """`result` with each new storage at least as large as `sizes` says, in order; as it is where they don't match.

    A storage with several results in it stays as it is.
    """
    made = new_storages(operands, result)
    if len(made) != len(sizes):
        return result
    larger = {
        id(tensor): nbytes
        for tensor, nbytes in zip(made, sizes, strict=True)
        if nbytes > tensor.untyped_storage().nbytes()
    }

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        nbytes = larger.get(id(tensor))
        if nbytes is None:
            return tensor
        elements = -(-nbytes // tensor.element_size())
        flat = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return pytree.tree_map_only(torch.Tensor, replaced, result) if larger else result
