"""Plain objects among the arguments of stages, and the values in them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.tensors.views import version_of

_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_CODE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, torch.Generator)
"""Types whose attributes aren't data of a call; modules are handled elsewhere (state/cells.py)."""
MOST_OBJECTS = 1 << 10
"""Objects, and containers in objects, that are compared: one may lead to a trainer, or to the whole data set."""


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object; None for tensors, code and values without attributes."""
    if isinstance(value, (torch.Tensor, *_CODE)):
        return None
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", None)


def tensors_in_objects(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in plain objects among a stage's arguments."""
    seen: set[int] = set()
    objects = [leaf for leaf in leaves if attributes_of(leaf) is not None]
    return [found for each in objects for found in content_of(each, seen) if isinstance(found, torch.Tensor)]


def content_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield all values in `value`, in order: the contents of containers and objects, and tensors with their versions.

    `seen` has the identities of containers and objects that were met; each is visited once.
    """
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
            yield from content_of(item, seen)
