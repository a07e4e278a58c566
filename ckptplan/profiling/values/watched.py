"""Parameters and plain objects that a stage reads, watched for writes between its forward and its backward."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from ckptplan.runtime.state.objects import attributes_of, content_of


class Watched:
    """Snapshot of a stage's parameters, and of the plain objects among its arguments.

    Parameters
    ----------
    module : nn.Module or None
        None for glue, which has no parameters.
    leaves : iterable
        Its arguments, flattened; tensors among them are left out.
    """

    def __init__(self, module: nn.Module | None, leaves: Iterable[Any]) -> None:
        parameters = () if module is None else module.named_parameters()
        self._parameters = [(name, p, p.untyped_storage()._cdata) for name, p in parameters]
        objects = {id(leaf): leaf for leaf in leaves if attributes_of(leaf) is not None}
        self._objects = [(each, list(content_of(each, set()))) for each in objects.values()]

    def parameters_changed(self, written: Container[int]) -> list[str]:
        """Names of the parameters whose storage is in `written` (by address), or has been replaced."""
        return [name for name, p, key in self._parameters if key in written or p.untyped_storage()._cdata != key]

    def objects_changed(self) -> list[str]:
        """Names of the types of the objects whose contents have changed."""
        return [
            type(each).__name__ for each, before in self._objects if not _same(before, list(content_of(each, set())))
        ]


_ATOMS = (bool, int, float, complex, str, bytes)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, _ATOMS) and x == y) for x, y in zip(a, b, strict=True)
    )
