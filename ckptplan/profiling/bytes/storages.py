"""Results that lie in larger storages than those of their fake twins.

Some operations make their result in a storage for something larger and then give it its size: `F.fold` in one for its
input, losses that are reduced in one for all of their elements. The storage keeps its size for as long as the result
lives. Example: `F.mse_loss` of two float32 tensors of 1,000 elements returns 4 bytes in a storage of 4,000. Fake
kernels don't show this. The operations below are known by rule, for all devices; any other one is found when it runs
alone on the device (workspace.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.profiling.bytes.operations import by_name
from ckptplan.tensors.storages import tensors_in


def _before_reduction(given: dict[str, Any]) -> int:
    if given.get("reduction", 1) == 0:
        return 0
    return math.prod(torch.broadcast_shapes(given["self"].shape, given["target"].shape))


_RULES: dict[Any, Callable[[dict[str, Any]], int]] = {
    torch.ops.aten.col2im.default: lambda given: given["self"].numel(),
    torch.ops.aten.mse_loss.default: _before_reduction,
    torch.ops.aten.smooth_l1_loss.default: _before_reduction,
    torch.ops.aten.soft_margin_loss.default: _before_reduction,
    torch.ops.aten.binary_cross_entropy.default: _before_reduction,
}
"""Operation -> from its operands by name, the elements in the storage of its result."""


def ruled_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, ...]:
    """Bytes of the storage of an operation's result, if a rule gives them; otherwise empty."""
    rule = _RULES.get(func)
    return () if rule is None else (rule(by_name(func, args, kwargs)) * result.element_size(),)


def new_storages(operands: Any, result: Any) -> list[torch.Tensor]:
    """The first result on each storage that no operand has, in order."""
    given = {t.untyped_storage()._cdata for t in tensors_in(operands)}
    first: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(result):
        first.setdefault(tensor.untyped_storage()._cdata, tensor)
    return [tensor for address, tensor in first.items() if address not in given]


def enlarged(operands: Any, result: Any, sizes: Sequence[int]) -> Any:
    """`result` with new storages of at least the bytes in `sizes`, given in order; as it is if their number differs.

    A result that shares its storage with the first one on it stays in the smaller storage.
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
