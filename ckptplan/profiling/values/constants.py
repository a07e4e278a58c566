"""Values of small fake tensors that follow from the inputs and from constants, such as masks.

Programs read masks, also floating ones that they make themselves (`torch.ones(batch, length)`), to see whether all of
it is ones. Beside each small floating storage whose values are known there is a real one; an operation whose operands
are all known runs on the real ones as well. Results are fake as before, but for integers and booleans.

Example: `mask = torch.ones(8, 512)` is fake, of known values; `(mask == 1)` is a real tensor of booleans. `mask * x`,
where `x` isn't known, isn't either; nor is `mask` from `mask[0] = x[0]` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ckptplan.profiling.bytes.operations import written_to
from ckptplan.profiling.target import is_here
from ckptplan.profiling.values.answers import readable
from ckptplan.runtime.recompute.selective import is_random
from ckptplan.tensors.private import OpOverload, disable_current_modes, is_fake
from ckptplan.tensors.storages import tensors_in

_MOST_ELEMENTS = 1 << 18
"""Elements of the largest floating storage with values: a mask of 64 sequences of 4096."""

_aten = torch.ops.aten
_LIKE = {
    _aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default,
    _aten.new_ones.default, _aten.new_zeros.default, _aten.new_full.default,
}  # fmt: skip
"""Operations whose results don't depend on their operand's values."""
_UNSET = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_permuted.default,
    _aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip
"""Operations whose results have no values."""


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a small floating one of ones, zeros and lowest values alone.

    Its values are part of what a step is, as those of integers are: programs read them.
    """
    if (
        type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_meta or is_fake(tensor)
        or tensor.layout is not torch.strided or not tensor.is_floating_point() or tensor.dtype.itemsize < 2
        or tensor.untyped_storage().nbytes() > _MOST_ELEMENTS * tensor.dtype.itemsize
    ):  # fmt: skip
        return False
    with disable_current_modes(), torch.no_grad():
        lowest = torch.finfo(tensor.dtype).min
        return bool(((tensor == 0) | (tensor == 1) | (tensor <= lowest)).all())


class Constants:
    """The floating storages of known values."""

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()  # storage -> its elements in order; None once they aren't known

    def know(self, twin: torch.Tensor, tensor: torch.Tensor) -> None:
        """Note that a fake tensor stands for a real one, if that is a mask."""
        if tensor.device == twin.device and is_mask(tensor):
            self._put(twin, tensor)

    def operands(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An operation's arguments with real tensors; None if one isn't known, or they don't determine the result."""
        if not isinstance(func, OpOverload) or func.namespace != "aten" or func in _UNSET or is_random(func):
            return None
        if kwargs.get("device") is not None and not is_here(torch.device(kwargs["device"])):
            return None
        values: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            value = self._any_like(tensor) if func in _LIKE else self._value(tensor)
            if value is None:
                return None
            values[id(tensor)] = value
        return pytree.tree_map_only(torch.Tensor, lambda t: values[id(t)], (args, kwargs))  # type: ignore[no-any-return]

    def forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note that an operation with unknown operands writes to what it writes to."""
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for tensor in written_to(func, args, kwargs):
                self._values[tensor.untyped_storage()] = None

    def note(self, result: Any, values: Any) -> None:
        """Note the values of a result."""
        for tensor, value in zip(tensors_in(result), tensors_in(values), strict=True):
            self._put(tensor, value)

    @staticmethod
    def take(result: Any) -> bool:
        """Whether the values of a fake result are kept."""
        made = tensors_in(result)
        return all(is_fake(t) and t.is_floating_point() and _elements(t) <= _MOST_ELEMENTS for t in made)

    @staticmethod
    def _any_like(tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor of the same layout, if it is small."""
        if tensor.numel() > _MOST_ELEMENTS or tensor.is_meta:
            return None
        with disable_current_modes():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._values and self.take(tensor) and tensor.dtype is value.dtype:
            with disable_current_modes(), torch.no_grad():
                flat = torch.zeros(_elements(tensor), dtype=value.dtype, device=value.device)
                there = flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
                overlaps = torch._debug_has_internal_overlap(there) == 1  # which can't be written to
                self._values[storage] = None if overlaps else (there.copy_(value), flat)[1]

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_fake(tensor):
            return tensor if readable(tensor) and not tensor.is_meta else None
        flat = self._values.get(tensor.untyped_storage()) if self._values else None
        if flat is None or flat.dtype is not tensor.dtype:
            return None
        with disable_current_modes():
            return flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _elements(tensor: torch.Tensor) -> int:
    """Elements of a tensor's whole storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
