"""Tensors that quantized parameters hold: those that a wrapping class consists of, and scales in attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptplan.tensors.objects import attributes_of
from ckptplan.tensors.private import is_traceable_wrapper_subclass
from ckptplan.tensors.storages import local_part
from ckptplan.tensors.views import Memory

_DEPTH = 3
"""A weight's state, the state of its scales, and the tensors there."""


class Attribute(NamedTuple):
    """A tensor in an attribute of a quantized parameter, or of an object there.

    Parameters
    ----------
    table : dict
        The attributes of the object that has it.
    name : str
    path : str or None
        The names that lead to it from the parameter; None if it is found in an object of the parameter's module.
    tensor : torch.Tensor
    """

    table: dict[str, Any]
    name: str
    path: str | None
    tensor: torch.Tensor


def attributes_beside(module: nn.Module, name: str) -> list[Attribute]:
    """Return the tensors in attributes of a parameter with a class of its own, and the module's on its storage.

    Example: of a 4-bit weight of bitsandbytes, `quant_state.absmax` and `quant_state.state2.absmax`; of one with 8
    bits, the tensor in the module's `state.CB`, which lies on the weight's storage.
    """
    parameter = getattr(module, name, None)
    if not isinstance(parameter, nn.Parameter) or type(parameter) is nn.Parameter or parameter.requires_grad:
        return []
    if is_traceable_wrapper_subclass(parameter) or parameter.layout is not torch.strided:
        return []
    found = [Attribute(*each) for each in _inside(vars(parameter), "", _DEPTH)]
    for table, attribute, _, tensor in _inside(vars(module), "", 2):
        if lie_together(tensor, parameter):
            found.append(Attribute(table, attribute, None, tensor))
    return found


def lie_together(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie on one storage, be they away or not."""
    there, here = Memory.of(a).storage, Memory.of(b).storage
    return there is not None and here is not None and there._cdata == here._cdata


def _inside(table: dict[str, Any], path: str, depth: int) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    for name, value in list(table.items()):
        if isinstance(value, torch.Tensor):
            if not is_traceable_wrapper_subclass(value):
                yield table, name, path + name, value
        elif depth > 1 and not isinstance(value, (nn.Module, dict)):
            inner = attributes_of(value)
            if inner is not None:
                yield from _inside(inner, f"{path}{name}.", depth - 1)


def named_inside(model: nn.Module, *, buffers: bool = True) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors with memory of a model's parameters, and then buffers, by the attributes that lead to them.

    Yields
    ------
    name : str
    tensor : torch.Tensor
        A parameter or buffer, a tensor that one of a wrapping class consists of, or one in a frozen one's attributes.
    whole : torch.Tensor
        The parameter or buffer.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    for kind in ("_parameters", "_buffers") if buffers else ("_parameters",):
        for prefix, module in modules:
            for name, whole in getattr(module, kind).items():
                if whole is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                for path, tensor in _consists_of(whole):
                    yield full + path, tensor, whole
                for each in attributes_beside(module, name):
                    if each.path is not None and not lie_together(each.tensor, whole):
                        yield f"{full}.{each.path}", each.tensor, whole


def tensor_at(model: nn.Module, name: str) -> Any:
    """Return what is at the end of a path of attributes; None if there is none."""
    found: Any = model
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    return found


def _consists_of(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with memory that one consists of, with the path to each: itself, if it is plain."""
    if not is_traceable_wrapper_subclass(tensor):
        yield "", tensor
    elif local_part(tensor) is tensor:  # not a shard of FSDP2
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                for path, plain in _consists_of(inner):
                    yield f".{name}{path}", plain
