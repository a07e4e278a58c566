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


Run = Callable[..., Any]


def layer_of(run: Run, **kept: Callable[[], Any]) -> type[Layer]:
    """A class of layers that have what is made by `kept`; `run` is their forward, of the layer and its arguments."""

    class Stage(Layer):
        def set_up(self) -> None:
            for name, make in kept.items():
                setattr(self, name, make())

        def forward(self, *args: Any) -> Any:
            return run(self, *args)

    return Stage


def factored(factor: Callable[[Any], Any], **kept: Callable[[], Any]) -> type[Layer]:
    """Layers whose product is multiplied by what `factor` finds in odd ways, anew in every forward."""
    return layer_of(lambda m, x: x + torch.tanh(m.linear(x) * factor(m)), **kept)


def buffer(make: Callable[[], torch.Tensor] = lambda: torch.zeros(WIDTH)) -> Callable[[], torch.Tensor]:
    return lambda: nn.Buffer(make())


normed = layer_of(lambda m, x: x + torch.tanh(m.norm(m.linear(x))), norm=lambda: nn.LayerNorm(WIDTH))
"""With a norm behind the product, whose weights are read in every recompute, be the product saved or not."""


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


def in_turn(run: Run) -> Callable[[Any, Any], Any]:
    """A forward of layers through which a tensor goes, by `run`, which is given a layer and the tensor."""

    def forward(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = run(layer, x)
        return x

    return forward


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
