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


def counter() -> Callable[[], int]:
    """A function that counts its calls in a variable that it encloses."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Factored(Layer):
    """Its product is multiplied by a number or a tensor that subclasses find in odd ways, anew in every forward."""

    def factor(self) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.factor())


class Normed(Layer):
    """With a norm behind the product, whose weights are read in every recompute, be the product saved or not."""

    def set_up(self) -> None:
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Bounded(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(weight)


class Around(nn.Module):
    """Layers, run by `forward`, which is given them and the inputs."""

    def __init__(self, layers: Iterable[nn.Module], forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._forward = forward

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self._forward(self.layers, *inputs)


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def layers_of(kind: Callable[[], nn.Module]) -> list[nn.Module]:
    return [kind() for _ in range(DEPTH)]


def chain(kind: Callable[[], nn.Module], loop: Loop = plain_loop) -> Odd:
    """A sequence of layers of one kind."""
    return Odd(nn.Sequential(*layers_of(kind)), batch(), loop)


def around(forward: Callable[..., torch.Tensor], kind: Callable[[], nn.Module] = Layer) -> Odd:
    """Layers of one kind, run by a function of them and the input."""
    return Odd(Around(layers_of(kind), forward), batch())


def passing(kind: type[nn.Module], extra: Callable[[], tuple[Any, ...]], loop: Loop = plain_loop) -> Odd:
    """Layers of one kind that are all given the same further arguments, which are made in every forward."""

    def forward(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        more = extra()
        for layer in layers:
            x = layer(x, *more)
        return x

    return Odd(Around(layers_of(kind), forward), batch(), loop)


class Folded(nn.Module):
    """`F.fold`, whose result lies in a storage for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * 9, 4 * 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(x, 3, padding=1).transpose(1, 2)
        return torch.tanh(F.fold(self.linear(patches).transpose(1, 2), (12, 12), 3, padding=1))
