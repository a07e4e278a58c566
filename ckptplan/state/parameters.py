"""Restore parameters that a model's own forward writes to (to bound a norm or clamp a temperature, for example)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ckptplan.tensors.storages import is_away, local_part, plain_tensors
from ckptplan.tensors.views import Memory


class ParameterState:
    """The memory of parameters, and copies of their values on the host, as they are at construction."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        own = [plain for p in parameters for plain in plain_tensors(local_part(p))]
        self._found = [(p, Memory.of(p), p.detach().to("cpu", copy=True)) for p in own if not p.is_meta]

    @contextlib.contextmanager
    def restored(self) -> Iterator[ParameterState]:
        """Restore the parameters at the end of the context, whatever was written to them inside."""
        try:
            yield self
        finally:
            self.put()

    def settle(self) -> None:
        """Drop the parameters that the forward, which has just run, didn't write to."""
        self._found = [
            (p, memory, values)
            for p, memory, values in self._found
            if not is_away(p) and (not memory.is_of(p) or not torch.equal(p.detach().cpu(), values))
        ]

    def put(self) -> None:
        """Write the stored values into the parameters' former data tensors, and give the parameters these tensors."""
        for p, memory, values in self._found:
            if is_away(p):  # nothing has written to it
                continue
            data = memory.tensor()
            data.copy_(values)
            p.data = data
