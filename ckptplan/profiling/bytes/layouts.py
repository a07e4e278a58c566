"""Layouts of the results of fake kernels, which are worked out once per kind of call.

PyTorch takes longer to run an operation on fake tensors than to make a fake tensor of a known layout, and a trace runs
the same kinds of call in each layer of each replay. A result is remembered if it follows from the layouts
of the operands and the other arguments alone: it is an operand, a view of one, or a tensor with a storage of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ckptplan.profiling.bytes.operations import Operands, TensorSpec
from ckptplan.tensors.private import FakeTensor, FakeTensorMode, make_subclass, no_dispatch

_UNTOLD_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operations whose results, or whose operands' layouts afterwards, don't follow from the key of the call."""


class _Layout(NamedTuple):
    """Layout of a tensor, in elements of its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


class _Result(NamedTuple):
    """A tensor that an operation returns, or None.

    Attributes
    ----------
    layout : _Layout or None
        None: it is the operand itself, or nothing is returned.
    operand : int
        Number of the operand whose storage it has; -1: it has a storage of its own, or nothing is returned.
    """

    layout: _Layout | None
    operand: int


_META = torch.device("meta")
_NOTHING = _Result(None, -1)
_NEW = object()
"""Stands for a call that wasn't run yet."""


class _NotInKey(Exception):
    """The result of a call doesn't follow from what its key holds."""


class Layouts:
    """Layouts of the results of the calls that were run so far, for one target."""

    def __init__(self) -> None:
        # Per call, its results: one, or a tuple or list of them; None: they don't follow from the key.
        self._known: dict[Hashable, Any] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(
        self,
        mode: FakeTensorMode,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Operands | None = None,
    ) -> Any:
        """Return what `func` does on fake tensors of `mode`, without running it where that is known.

        Parameters
        ----------
        operands : Operands, optional
            Those in `args` and `kwargs`, if they are known.
        """
        operands = operands or Operands(args, kwargs)
        key = _key(mode, func, operands)
        if key is None:
            return func(*args, **kwargs)
        given: list[Any] = operands.tensors
        known = self._known.get(key, _NEW)
        if known is _NEW:
            before = [_storage(operand) for operand in given]
            result = func(*args, **kwargs)
            try:
                unchanged = before == [_storage(x) for x in given] and key == _key(mode, func, Operands(args, kwargs))
                self._known[key] = _noted(mode, result, given) if unchanged else None
            except _NotInKey:
                self._known[key] = None
            return result
        if known is None:
            return func(*args, **kwargs)
        if isinstance(known, _Result):
            return self._made(mode, known, given)
        return type(known)(self._made(mode, each, given) for each in known)

    def _made(self, mode: FakeTensorMode, result: _Result, operands: list[FakeTensor]) -> FakeTensor | None:
        layout, number = result
        if layout is None:
            return operands[number] if number >= 0 else None
        with no_dispatch():
            if number < 0:
                meta = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=_META)
            else:
                meta = torch.empty(0, dtype=layout.dtype, device=_META)
                meta.set_(operands[number].untyped_storage(), layout.offset, layout.size, layout.stride)
        return self._faked(mode, meta, layout.device)

    def _faked(self, mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """The fake tensor of `mode` on `device` that `meta` stands for.

        The constructor takes most of the time of a known call; this does the same, with the attributes of one fake
        tensor that it made.
        """
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(mode, meta, device)
            self._attributes[device] = {name: each for name, each in vars(made).items() if each is not mode}
            return made
        made = make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        if mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        made.fake_mode = mode
        return made


def _key(mode: FakeTensorMode, func: Any, operands: Operands) -> Hashable:
    """The key of a call; None if its results don't follow from the layouts of the operands."""
    if (
        operands.told is None
        or torch.is_inference_mode_enabled()
        or not _is_told(func)
        or not all(_is_plain(mode, each) for each in operands.tensors)
    ):
        return None
    return func, operands.told, torch.is_grad_enabled(), torch.get_default_dtype()


def _is_plain(mode: FakeTensorMode, given: Any) -> bool:
    """Whether `given` is a fake tensor of `mode` of which only the layout is known."""
    return (
        type(given) is FakeTensor
        and given.fake_mode is mode
        and given.constant is None
        and given.layout is torch.strided
        and not given.is_conj()
        and not given.is_neg()
    )


def _layout(tensor: FakeTensor) -> _Layout:
    offset = int(tensor.storage_offset())
    return _Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, offset)


def _storage(tensor: FakeTensor) -> tuple[int, int]:
    """Address and bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


@functools.cache
def _is_told(func: Any) -> bool:
    """Whether the results of an operation may follow from its operands' layouts."""
    return func.namespace == "aten" and _UNTOLD_TAGS.isdisjoint(func.tags)


def _noted(mode: FakeTensorMode, results: Any, operands: list[FakeTensor]) -> Any:
    """Return what `Layouts` keeps of an operation's results.

    Raises
    ------
    _NotInKey
        If one of them isn't an operand, a view of one, or a tensor that fills a storage of its own, or if operands
        that share their storage leave open which.
    """
    if type(results) not in (tuple, list):
        return _result(mode, results, operands, set())
    begun: set[int] = set()
    return type(results)(_result(mode, each, operands, begun) for each in results)


def _result(mode: FakeTensorMode, tensor: Any, operands: list[FakeTensor], begun: set[int]) -> _Result:
    """A result whose storage isn't in `begun`; adds its own there."""
    if tensor is None:
        return _NOTHING
    if not _is_plain(mode, tensor):
        raise _NotInKey
    address, nbytes = _storage(tensor)
    sharing = [number for number, operand in enumerate(operands) if _storage(operand)[0] == address]
    if len(sharing) == 1:
        return _Result(None if operands[sharing[0]] is tensor else _layout(tensor), sharing[0])
    fills = nbytes == TensorSpec.of(tensor).span * tensor.itemsize and tensor.storage_offset() == 0
    if sharing or address in begun or not fills:
        raise _NotInKey
    begun.add(address)
    return _Result(_layout(tensor), -1)
