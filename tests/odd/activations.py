"""Activations that are edited between stages (item 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from odd.harness import Extras, Loop, Odd, case, plain_loop
from odd.layers import Layer, around, chain


def _behind_each(edit: Callable[[torch.Tensor], object]) -> Callable[..., torch.Tensor]:
    """Layers, with something done in place to what goes from one to the next."""

    def forward(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
            edit(x)
        return x

    return forward


def _halve_by_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[...] *= 0.5


def _halve_data(x: torch.Tensor) -> None:
    x.data.mul_(0.5)


@case("5")
def activation_edited_through_numpy() -> Odd:
    """What goes from layer to layer is scaled through a numpy array of the same memory."""
    return around(_behind_each(_halve_by_numpy))


class _Tanh(Layer):
    """Saves what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.sin(x)))


@case("5")
def output_edited_that_its_layer_saved() -> Odd:
    """What a layer returns is scaled through `.data`, and is what its own backward goes by."""
    return around(_behind_each(_halve_data), _Tanh)


def _hooked(edit: Callable[[torch.Tensor], object]) -> Loop:
    """A loop with forward hooks on the layers, which edit their outputs in place."""

    def hook(module: nn.Module, given: object, output: torch.Tensor) -> None:
        edit(output)

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for layer in model:  # type: ignore[attr-defined]
            layer.register_forward_hook(hook)
        return plain_loop(model, x)

    return loop


@case("5")
def output_edited_that_the_users_hooks_saved() -> Odd:
    """The same inside of hooks that save copies, which plain training makes before the output is scaled."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), lambda packed: packed.float()):
            yield from _hooked(_halve_data)(model, x)

    return chain(_Tanh, loop)


@case("5")
def activation_edited_by_a_hook() -> Odd:
    """A forward hook, registered behind planning, that scales its layer's output through `.data`."""
    return chain(Layer, _hooked(_halve_data))
