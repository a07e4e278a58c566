"""What a stage reads besides its tensors, to tell whether something writes to it before its backward."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from ckptplan.runtime.state.objects import attributes_of, content_of


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
        self._objects = [(each, list(content_of(each, set()))) for each in objects.values()]

    def parameters_changed(self, written: Container[int]) -> list[str]:
        """Names of the parameters whose storage is among those `written` to, or is another one than before."""
        return [name for name, p, key in self._parameters if key in written or p.untyped_storage()._cdata != key]

    def objects_changed(self) -> list[str]:
        """Types of the objects that hold something else than before."""
        return [
            type(each).__name__ for each, before in self._objects if not _same(before, list(content_of(each, set())))
        ]


_ATOMS = (bool, int, float, complex, str, bytes)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, _ATOMS) and x == y) for x, y in zip(a, b, strict=True)
    )
