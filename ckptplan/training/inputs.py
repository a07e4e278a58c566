"""The tensors among the arguments of a call, by path, dtype and shape."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.stage import InputTensor
from ckptplan.tensors.objects import MOST_OBJECTS, attributes_of

_NO_TENSOR = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputTensor, ...]:
    """Return the tensors among the arguments of a call, described by path, dtype and shape."""
    return tuple(described(path, tensor) for path, tensor in tensors_at((args, kwargs)))


def stage_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputTensor, ...]:
    """Return the tensors among the arguments of a stage's call, those in plain objects included."""
    inside = ((path, t) for path, t in tensors_in_objects_at((args, kwargs)) if t.shape)
    return (*input_tensors(args, kwargs), *(described(path, tensor) for path, tensor in inside))


def described(path: str, tensor: torch.Tensor) -> InputTensor:
    """Return the description of `tensor`, which is at `path`, in the form that plans use."""
    return InputTensor(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensors_at(tree: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return every tensor of a tree with its path.

    Paths have the form of PyTorch's `keystr`; `tree_flatten_with_path` takes several times as long.
    """
    found: list[tuple[str, torch.Tensor]] = []
    _add_tensors(tree, path, found)
    return found


def _add_tensors(tree: Any, path: str, found: list[tuple[str, torch.Tensor]]) -> None:
    kind = type(tree)  # compared first, since `isinstance(tree, torch.Tensor)` is slow for other types
    if kind is torch.Tensor:
        found.append((path, tree))
    elif kind in _NO_TENSOR:
        return
    elif kind is tuple or kind is list:
        for i, item in enumerate(tree):
            _add_tensors(item, f"{path}[{i}]", found)
    elif kind is dict:
        for key, item in tree.items():
            _add_tensors(item, f"{path}[{key!r}]", found)
    elif isinstance(tree, torch.Tensor):
        found.append((path, _measurable(tree)))
    else:
        found += ((path + below, _measurable(x)) for below, x in _leaves_at(tree) if isinstance(x, torch.Tensor))


def _leaves_at(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths; with their numbers if it has nodes registered without keys."""
    try:
        return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:
        return [(f"[{number}]", leaf) for number, leaf in enumerate(pytree.tree_leaves(tree))]


IN_OBJECT = "->"
"""Stands in a path before the name of an object's attribute."""


def tensors_in_objects_at(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in plain objects among a tree's leaves with their paths, each object's once."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for path, leaf in _leaves_at(tree):
        if type(leaf) not in _NO_TENSOR and attributes_of(leaf) is not None:
            _add_tensors_in_object(leaf, path, found, seen)
    return found


def _add_tensors_in_object(value: Any, path: str, found: list[tuple[str, torch.Tensor]], seen: set[int]) -> None:
    # No function inside of `tensors_in_objects_at`: one that calls itself is a reference cycle, which holds `found`.
    if isinstance(value, torch.Tensor):
        found.append((path, _measurable(value)))
        return
    inside: Any = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    attributes = None if isinstance(inside, dict) else attributes_of(value)
    if (attributes is None and not isinstance(inside, dict)) or id(value) in seen or len(seen) >= MOST_OBJECTS:
        return
    seen.add(id(value))
    for name, item in (inside if attributes is None else attributes).items():
        below = f"{path}[{name!r}]" if attributes is None else f"{path}{IN_OBJECT}{name}"
        _add_tensors_in_object(item, below, found, seen)


def _measurable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose sizes are numbers: for a nested tensor its values, with all rows joined."""
    return tensor.values() if tensor.is_nested else tensor


def read_inputs(text: str) -> tuple[InputTensor, ...]:
    """Return the tensors of a text `", ".join(map(str, tensors))`, the form that fingerprints use."""
    found = re.findall(r"(?:^|, )(\S.*?) (\w+)\[([\d, ]*)\](?=, |$)", text)
    return tuple(InputTensor(p, dtype, tuple(map(int, filter(None, dims.split(", "))))) for p, dtype, dims in found)
