"""Activations that are edited between stages (item 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from odd.harness import STEPS, Extras, Loop, Odd, case, plain_step, update
from odd.layers import DEPTH, Layer, batch, chain


class _Edited(nn.Module):
    """Layers, with something done in place to what goes from one to the next."""

    def __init__(self, edit: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self._edit = edit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self._edit(x)
        return x


def _halve_by_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[...] *= 0.5


@case("5")
def activation_edited_through_data() -> Odd:
    """What goes from layer to layer is scaled through `.data`."""
    return Odd(_Edited(lambda x: x.data.mul_(0.5)), batch())


@case("5")
def activation_edited_through_numpy() -> Odd:
    """What goes from layer to layer is scaled through a numpy array of the same memory."""
    return Odd(_Edited(_halve_by_numpy), batch())


@case("5")
def output_edited_that_its_layer_saved() -> Odd:
    """What a layer returns is scaled through `.data`, and is what its own backward goes by."""

    class Tanh(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(torch.sin(x)))

    model = _Edited(lambda x: x.data.mul_(0.5))
    model.layers = nn.ModuleList(Tanh() for _ in range(DEPTH))
    return Odd(model, batch())


@case("5")
def output_edited_that_the_users_hooks_saved() -> Odd:
    """The same inside of hooks that save copies, which plain training makes before the output is scaled."""

    class Tanh(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x))

    edited = _hooked(lambda output: output.data.mul_(0.5))

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), lambda packed: packed.float()):
            yield from edited(model, x)

    return chain(Tanh, loop)


def _hooked(edit: Callable[[torch.Tensor], object]) -> Loop:
    """A loop with forward hooks on the layers, which edit their outputs in place."""

    def hook(module: nn.Module, given: object, output: torch.Tensor) -> None:
        edit(output)

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for layer in model:  # type: ignore[attr-defined]
            layer.register_forward_hook(hook)
        for _ in range(STEPS):
            model.zero_grad()
            loss = plain_step(model, x)
            update(model)
            yield [loss]

    return loop


@case("5")
def activation_edited_by_a_hook() -> Odd:
    """A forward hook, registered behind planning, that scales its layer's output through `.data`."""
    return chain(Layer, _hooked(lambda output: output.data.mul_(0.5)))


@case("5")
def activation_edited_by_a_hook_through_numpy() -> Odd:
    """A forward hook, registered behind planning, that scales its layer's output through numpy."""
    return chain(Layer, _hooked(_halve_by_numpy))
