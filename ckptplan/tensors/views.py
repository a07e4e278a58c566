"""Tensors as views of whole storages: which part of its storage a tensor is, and whether it was written to."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from ckptplan.tensors.private import FakeTensor, is_traceable_wrapper_subclass, neg_view
from ckptplan.tensors.storages import is_away

_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_STRIDED = torch.strided
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
ITEMSIZES = {d: d.itemsize for d in vars(torch).values() if isinstance(d, torch.dtype) and d not in _QUANTIZED}
"""The dtypes of plain tensors and their bytes per element."""


def plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is an ordinary strided view of a non-empty storage of whole elements."""
    return plain_storage(tensor, ITEMSIZES) is not None


def plain_storage(tensor: torch.Tensor, sizes: Mapping[torch.dtype, int]) -> tuple[torch.UntypedStorage, int] | None:
    """Return the storage of a `plain` tensor and its bytes; None if `tensor` isn't plain."""
    # Speed matters: this runs for every tensor that a swapped stage saves.
    itemsize = sizes.get(tensor.dtype)
    if itemsize is None or type(tensor) not in _PLAIN or tensor.layout is not _STRIDED:
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    return (storage, nbytes) if nbytes > 0 and nbytes % itemsize == 0 else None


def _lazy(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """Return a view of the same bytes, with the lazy conjugation (`conj`) or negation (`neg`) flag flipped."""
    if neg:
        tensor = neg_view(tensor)
    return torch._conj(tensor) if conj else tensor


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor` as one dimension of its dtype, without autograd and without lazy flags."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    plain = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_conj() or tensor.is_neg():
        plain = _lazy(plain, conj=tensor.is_conj(), neg=tensor.is_neg())
    return plain.as_strided((count,), (1,), 0)


def covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether `tensor` covers its whole storage of `nbytes` bytes, in storage order and without lazy flags.

    Of a dimension of size 1 the stride counts, too: kernels choose a memory format by it.
    """
    size = tensor.shape
    in_order = tensor.is_contiguous() and (
        1 not in size or tensor.stride() == tuple(accumulate(size[:0:-1], operator.mul, initial=1))[::-1]
    )
    return in_order and tensor.nbytes == nbytes and not tensor.is_conj() and not tensor.is_neg()


class Geometry(NamedTuple):
    """Describes a tensor as a view of its storage: dtype, size, strides, offset (in elements) and lazy flags."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of `tensor`."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def has(self, offset: int) -> bool:
        """Whether the element at this offset of the storage is between its first and its last one."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset <= offset <= self.offset + last

    def on(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view with this geometry of `whole`, a whole storage as one dimension, without autograd."""
        typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        plain = typed.as_strided(self.size, self.stride, self.offset)
        return _lazy(plain, conj=self.conj, neg=self.neg) if self.conj or self.neg else plain


def on_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Return a whole storage as one dimension, with a version counter of its own."""
    with torch.no_grad():
        whole = torch.empty(0, dtype=dtype, device=storage.device)
        return whole.set_(storage, 0, (storage.nbytes() // whole.itemsize,), (1,))  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a tensor lies. Of a strided one it is, unlike a view, no owner of the storage besides the tensors on it.

    A weight that is away (its class has a `home`) lies where it did, and will again.

    `data` is what subclasses that wrap tensors, and sparse tensors, lie on, which have no storage of their own.
    """

    storage: torch.UntypedStorage | None
    lies: Geometry | None
    data: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """Return the memory of `tensor`."""
        if is_away(tensor):
            return type(tensor).home(tensor)  # type: ignore[attr-defined, no-any-return]
        if tensor.layout is not _STRIDED or is_traceable_wrapper_subclass(tensor):
            return cls(None, None, tensor.data)
        return cls(tensor.untyped_storage(), Geometry.of(tensor))

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies there; of one without a storage, whether it has the same layout."""
        if is_away(tensor):
            there = Memory.of(tensor).storage
            return self.storage is not None and there is not None and self.storage._cdata == there._cdata
        if self.storage is None or tensor.layout is not _STRIDED:
            return self.data is not None and tensor.layout is self.data.layout
        return Geometry.of(tensor) == self.lies and tensor.untyped_storage()._cdata == self.storage._cdata

    def tensor(self) -> torch.Tensor:
        """Return a tensor that lies there, without autograd."""
        if self.storage is None or self.lies is None:
            assert self.data is not None
            return self.data
        return self.lies.on(on_storage(self.storage, self.lies.dtype))


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of `tensor`, its number of writes; 0 for inference tensors, which have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def modified_error(shape: Iterable[int], saved: int, found: int, remark: str = "") -> RuntimeError:
    """Return PyTorch's error for a saved tensor that was modified; `remark` is appended to its message."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} is at version {found}; expected version {saved} instead{remark}"
    )
