"""What the odd models are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from odd.harness import BATCH, WIDTH, Loop, Odd, plain_loop

DEPTH = 3


class Layer(nn.Module):
    """A product and what `set_up` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        """Add more, for subclasses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Normed(Layer):
    """With a norm behind the product, whose weights are read in every recompute, be the product saved or not."""

    def set_up(self) -> None:
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Passing(nn.Module):
    """Layers that are all given the same further arguments.

    Parameters
    ----------
    layers : iterable of nn.Module
    extra : callable
        Makes the arguments, at every forward, of the model.
    """

    def __init__(self, layers: Iterable[nn.Module], extra: Callable[[Any], tuple[Any, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self._extra(self)
        for layer in self.layers:
            x = layer(x, *extra)
        return x


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def chain(kind: type[nn.Module], loop: Loop = plain_loop) -> Odd:
    """A sequence of layers of one kind."""
    return Odd(nn.Sequential(*(kind() for _ in range(DEPTH))), batch(), loop)


def passing(kind: type[nn.Module], extra: Callable[[Any], tuple[Any, ...]], loop: Loop = plain_loop) -> Odd:
    """Layers of one kind with further arguments."""
    return Odd(Passing((kind() for _ in range(DEPTH)), extra), batch(), loop)


class Folded(nn.Module):
    """`F.fold`, whose result lies in a storage for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * 9, 4 * 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(x, 3, padding=1).transpose(1, 2)
        return torch.tanh(F.fold(self.linear(patches).transpose(1, 2), (12, 12), 3, padding=1))
