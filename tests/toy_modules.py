"""What tests put models together from: residual blocks, parts called in turn, forwards given as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Residual(nn.Sequential):
    """Adds to its input what its layers make of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Parts(nn.Module):
    """Has the parts that it is given, by name: tensors become buffers."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            plain = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if plain else setattr(self, name, part)


class InTurn(Parts):
    """Calls its parts in turn, and those of lists one after the other."""

    def forward(self, x: Any) -> Any:
        for part in self.children():
            for layer in part if isinstance(part, nn.ModuleList) else (part,):
                x = layer(x)
        return x


class Lambda(Parts):
    """Its forward is a function of itself and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__(**parts)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def times(count: int, make: Callable[[], nn.Module]) -> nn.ModuleList:
    """As many modules as asked for."""
    return nn.ModuleList(make() for _ in range(count))
