"""Put parameters back that a model's own forward writes to (a norm that is bounded, a temperature that is clamped)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class ParameterState:
    """Where the values of parameters are, and copies of them on the host, as they are now."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._found = [(p, p.data, p.detach().to("cpu", copy=True)) for p in parameters if not p.is_meta]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, parameters may be written to; afterwards they have these values."""
        try:
            yield
        finally:
            self.put()

    def settle(self) -> None:
        """A forward has run: keep those alone that it wrote to."""
        self._found = [
            (p, data, values)
            for p, data, values in self._found
            if p.data_ptr() != data.data_ptr() or not torch.equal(p.detach().cpu(), values)
        ]

    def put(self) -> None:
        """Give the parameters these values again, where they were."""
        for p, data, values in self._found:
            data.copy_(values)
            p.data = data
