"""Operations as hashable keys, with everything that their memory and time depend on."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.tensors.private import FakeTensor, TorchDispatchMode
from ckptplan.tensors.storages import tensors_in


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


_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of operands that `Operands.told` contains unchanged."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))


class _Untold(Exception):
    """An operand is neither a dense tensor nor a plain value."""


class Operands:
    """The operands of a call.

    Attributes
    ----------
    tensors : list of tensor
        The tensors among them, as `tensors_in` finds them.
    told : hashable or None
        What tells one call from another, layouts of the tensors, values and types of the others: calls of an operation
        with equal ones have equal keys (`op_key`).
        None if there are others than dense tensors and plain values.
    """

    __slots__ = ("tensors", "told")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.told: Hashable = None
        try:
            given = _told(args, self.tensors)
            self.told = (given, *kwargs, *_told(kwargs.values(), self.tensors)) if kwargs else given
        except _Untold:
            self.tensors = tensors_in((args, kwargs))


def _told(given: Iterable[Any], tensors: list[torch.Tensor]) -> tuple[Hashable, ...]:
    """`Operands.told` of the values in `given`; appends the tensors to `tensors`."""
    out: list[Hashable] = []
    for each in given:
        kind = type(each)
        if kind in _TENSORS:
            if each.layout is not torch.strided:
                raise _Untold
            tensors.append(each)
            device = each.fake_device if kind is FakeTensor else each.device
            out.append((each.shape, each.stride(), each.dtype, device, each.storage_offset()))
        elif kind in _VALUES:
            # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but not what comes of them.
            out.append((kind, each) if each or kind is not float else (kind, str(each)))
        elif kind is list or kind is tuple or kind is torch.Size:
            out.append((kind, _told(each, tensors)))
        else:
            raise _Untold
    return tuple(out)


class OpKeys:
    """Keys of calls (`op_key`), each made once, which makes them fast to find and to compare."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Hashable] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Operands) -> Hashable:
        """The key of a call with these operands."""
        call = (func, operands.told)
        key = None if operands.told is None else self._known.get(call)
        if key is None:
            key = op_key(func, args, kwargs)
            if operands.told is not None:
                self._known[call] = key
        return key


def op_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The key of a call: operation, operands with tensors as `TensorSpec`, and their tree; enough to run it again.

    Random generators are left out. If an operand can't be hashed, those that aren't plain values become their `repr`.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    frozen = tuple(
        TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves if not isinstance(x, torch.Generator)
    )
    key = OpKey((func, frozen, spec))
    try:
        hash(key)
    except TypeError:
        plain = (TensorSpec, int, float, bool, str, torch.dtype, type(None))
        key = OpKey((func, tuple(x if isinstance(x, plain) else repr(x) for x in frozen), spec))
    return key


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


@functools.cache
def _takes_tensors(func: Any) -> tuple[bool, ...]:
    """Whether an operation's arguments, in order, are single tensors, for which PyTorch wraps numbers."""
    return tuple(isinstance(argument.type, torch.TensorType) for argument in func._schema.arguments)


def wrapped_numbers(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of the operands that are numbers where the operation takes tensors: PyTorch makes tensors of them."""
    if "Tensor" not in func._overloadname:
        return ()
    takes = _takes_tensors(func)
    return tuple(i for i, x in enumerate(args) if isinstance(x, (int, float)) and takes[i])


def saved_numbers(func: Any, args: tuple[Any, ...]) -> int:
    """Number of wrapped numbers among the operands that autograd saves, each a tensor of 8 bytes.

    PyTorch shows them to no hook for saved tensors.
    """
    numbers = wrapped_numbers(func, args)
    if not numbers or not torch.is_grad_enabled():
        return 0
    differentiable = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    return _saved_of(func, numbers, differentiable) if any(differentiable) else 0


@functools.cache
def _saved_of(func: Any, numbers: tuple[int, ...], differentiable: tuple[bool, ...]) -> int:
    """The result of `saved_numbers`, found by one run of the operation on tensors of one element.

    It runs in a thread of its own, which has none of the modes, hooks and dispatch keys of this one.
    """
    takes = _takes_tensors(func)

    def run() -> int:
        operands = [
            # Times 1, since an operation in place can't write to a leaf.
            1 * torch.ones(1, requires_grad=requires_grad) if takes[i] and i not in numbers else 1.0
            for i, requires_grad in enumerate(differentiable)
        ]
        node = func(*operands).grad_fn
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        return sum(isinstance(tensor, torch.Tensor) and tensor.dim() == 0 for tensor in saved)

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(run).result()
        except Exception:  # it takes other operands: all of its numbers count
            return len(numbers)
