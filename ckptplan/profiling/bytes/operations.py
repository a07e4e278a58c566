"""Operations as hashable keys, with everything that their memory and time depend on."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.runtime.observe.measure import tensors_in


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Layout, data type and device of a tensor: enough to make another one like it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type)

    @property
    def span(self) -> int:
        """Elements of storage from the tensor's first element to its last."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))


class OpKey(tuple[Any, tuple[Any, ...], pytree.TreeSpec]):
    """An operation, its operands, and their tree; the hash, which takes long, is computed once."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


def op_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The key of a call: operation, operands with tensors as `TensorSpec`, and their tree; enough to run it again.

    Random generators are left out. If an operand can't be hashed, those that aren't plain values become their `repr`.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    frozen = tuple(
        TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves if not isinstance(x, torch.Generator)
    )
    try:
        hash(frozen)
    except TypeError:
        frozen = tuple(
            x if isinstance(x, (TensorSpec, int, float, bool, str, torch.dtype, type(None))) else repr(x)
            for x in frozen
        )
    return OpKey((func, frozen, spec))


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's operands by the names that the operation's schema gives them; defaults left out."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class SeenOperations(TorchDispatchMode):
    """Dispatch mode that collects the keys of the operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keys.append(op_key(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a call's operands that the operation's schema says it writes to."""
    given = [args[position] if position < len(args) else kwargs.get(name) for position, name in _writes(func)]
    return tensors_in(given)
