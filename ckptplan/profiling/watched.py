"""What a stage reads besides its tensors, to tell whether something writes to it before its backward."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.runtime.swap import version_of

_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_CODE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, torch.Generator)
"""Objects whose attributes are no data of a call's; modules have rules of their own."""


class Watched:
    """A stage's parameters, and the plain objects among its arguments, as they are now.

    Parameters
    ----------
    module : nn.Module or None
        None: glue, which has no parameters.
    leaves : iterable
        Its arguments; tensors and the lists and dictionaries around them are watched elsewhere.
    """

    def __init__(self, module: nn.Module | None, leaves: Iterable[Any]) -> None:
        parameters = () if module is None else module.named_parameters()
        self._parameters = [(name, p, p.untyped_storage()._cdata) for name, p in parameters]
        objects = {id(leaf): leaf for leaf in leaves if attributes_of(leaf) is not None}
        self._objects = [(each, list(_content(each, set()))) for each in objects.values()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those in the objects, which live as long as these are held for another run."""
        return [x for _, content in self._objects for x in content if isinstance(x, torch.Tensor)]

    def parameters_changed(self, written: Container[int]) -> list[str]:
        """Names of the parameters whose storage is among those `written` to, or is another one than before."""
        return [name for name, p, key in self._parameters if key in written or p.untyped_storage()._cdata != key]

    def objects_changed(self) -> list[str]:
        """Types of the objects that hold something else than before."""
        return [type(each).__name__ for each, before in self._objects if not _same(before, list(_content(each, set())))]


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object of data keeps; None for all else."""
    if isinstance(value, (torch.Tensor, *_CODE)):
        return None
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", None)


def _content(value: Any, seen: set[int]) -> Iterator[Any]:
    """All that lies in `value`, in order: what containers and objects hold, and how often tensors were written to."""
    if isinstance(value, torch.Tensor):
        yield value
        yield version_of(value)
        return
    inside = value if isinstance(value, dict) else attributes_of(value)
    if inside is None and not isinstance(value, _CONTAINERS):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        yield type(value)
        for item in value if inside is None else itertools.chain.from_iterable(inside.items()):
            yield from _content(item, seen)


_ATOMS = (bool, int, float, complex, str, bytes)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, _ATOMS) and x == y) for x, y in zip(a, b, strict=True)
    )
