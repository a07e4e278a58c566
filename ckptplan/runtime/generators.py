"""Random generators that a stage may draw from besides PyTorch's own: Python's, numpy's, those of modules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read and how to set a state."""


def _access(generator: Any) -> Access | None:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


class Generators:
    """The states of Python's and numpy's generators, and of those that `modules` hold, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found: list[Access] = [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]
        held = {id(value): value for m in modules for value in m.__dict__.values()}
        found += [access for value in held.values() if (access := _access(value)) is not None]
        self._states = [(access, access[0]()) for access in found]

    def settle(self) -> None:
        """A forward has ended: keep those alone that it drew from."""
        self._states = [(access, state) for access, state in self._states if not _equal(access[0](), state)]

    def put(self) -> Callable[[], None]:
        """Set them to these states; calling the result sets them back to where they were."""
        now = [(access, access[0]()) for access, _ in self._states]
        for (_, put), state in self._states:
            put(state)

        def back() -> None:
            for (_, put), state in now:
                put(state)

        return back
