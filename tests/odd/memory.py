"""Peaks that may be above the plan's: gradients from before (item 9), fake sizes (10), checkpoints inside (11)."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from small_models import Transformer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from odd.harness import STEPS, Extras, Loop, Odd, case, plain_step
from odd.layers import DEPTH, Folded, Layer, batch

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _wide() -> tuple[nn.Module, torch.Tensor]:
    """Gradients as large as activations."""
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(DEPTH))
    return nn.Sequential(*blocks), torch.randn(128, 64)


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(depth=2), torch.randint(0, 50, (4, 32))


MODELS = {"wide": _wide, "transformer": _transformer}


def _trained(optimizer: torch.optim.Optimizer, micro_batches: int = 1, *, set_to_none: bool = True) -> Loop:
    """A loop of steps of as many forwards and backwards, with an update at the end."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses = [plain_step(model, x) for _ in range(micro_batches)]
            optimizer.step()
            yield losses

    return loop


def _register(model: str, how: str, kind: str) -> None:
    def build() -> Odd:
        made, x = MODELS[model]()
        optimizer = OPTIMIZERS[kind](made.parameters())
        if how == "gradients_kept":
            return Odd(made, x, _trained(optimizer, set_to_none=False), optimizer)
        return Odd(made, x, _trained(optimizer, 2 if how == "two_micro_batches" else 1), optimizer)

    build.__name__ = f"{how}_{model}_{kind}"
    build.__doc__ = {
        "gradients_kept": "`zero_grad(set_to_none=False)`: gradients are there when a step starts.",
        "two_micro_batches": "Two micro-batches: gradients are there when the second one starts.",
        "one_batch": "As it was profiled, for comparison.",
    }[how]
    case("9", measured=True)(build)


for _model, _how, _kind in itertools.product(MODELS, ("gradients_kept", "two_micro_batches"), OPTIMIZERS):
    _register(_model, _how, _kind)
_register("wide", "one_batch", "adamw")
_register("transformer", "one_batch", "momentum")


@case("10", measured=True)
def fold() -> Odd:
    """`F.fold`, whose result lies in a larger storage than its fake twin's."""

    model = nn.Sequential(*(Folded() for _ in range(DEPTH)))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return Odd(model, torch.randn(4, 4, 12, 12), _trained(optimizer), optimizer)


@case("9", measured=True)
def output_kept_for_the_next_step() -> Odd:
    """Layers that keep what they gave, detached, for their next forward."""

    class Remembering(Layer):
        def set_up(self) -> None:
            self.memory: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) if self.memory is None else self.linear(x) + 0.1 * self.memory)
            self.memory = y.detach().clone()
            return x + torch.sin(y)

    model = nn.Sequential(*(Remembering() for _ in range(DEPTH)))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return Odd(model, batch(), _trained(optimizer), optimizer)


class _SavesMore(torch.autograd.Function):
    """Saves its input, and where its tensors are real what it may need besides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*((x,) if isinstance(x, FakeTensor) else (x, x.exp(), x.sin())))
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def _part(x: torch.Tensor) -> torch.Tensor:
    """A part of a large storage; of a fake tensor all of a small one."""
    whole = x.new_empty(1 if isinstance(x, FakeTensor) else 5, *x.shape)
    whole[-1] = 2 * torch.sigmoid(x.detach())
    return x * whole[-1]


def _from_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.full((6, *x.shape), 0.5, np.float32))[2]


def _resized(x: torch.Tensor) -> torch.Tensor:
    scale = torch.empty(0)
    scale.resize_(x.shape).fill_(2.0)
    return x * scale


def _with(odd: Callable[[torch.Tensor], torch.Tensor]) -> Odd:
    """Layers that do something odd in between, and plain ones."""

    class Between(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return odd(torch.tanh(self.linear(x)))

    model = nn.Sequential(Layer(), Between(), Between(), Layer())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return Odd(model, batch(), _trained(optimizer), optimizer)


@case("10", measured=True)
def saves_less_when_fake() -> Odd:
    """An autograd Function that saves more than the trace without memory shows."""
    return _with(_SavesMore.apply)


@case("10", measured=True)
def part_of_a_large_storage() -> Odd:
    """A layer that saves a view of a storage which is five times as large as traced."""
    return _with(_part)


@case("10", measured=True)
def memory_of_numpy() -> Odd:
    """A layer that saves a view of an array of numpy's."""
    return _with(_from_numpy)


@case("10", measured=True)
def resized_in_place() -> Odd:
    """A layer that saves a tensor which `resize_` has made larger."""
    return _with(_resized)


@case("10", measured=True)
def activations_in_objects() -> Odd:
    """Layers that are given an activation, and objects which hold that one and others."""

    class Holding(Layer):
        def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * given.mask) + given.x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Holding() for _ in range(2 * DEPTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, types.SimpleNamespace(x=x, mask=torch.ones(1)))
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Odd(model, batch(), _trained(optimizer), optimizer)


@case("7", measured=True)
def norm_made_in_first_forward() -> Odd:
    """Layers called twice, with a norm that the first forward makes, between what is saved and may leave."""

    class Late(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if not hasattr(self, "norm"):
                self.norm = nn.LayerNorm(x.shape[-1])
            return F.relu_(x + self.norm(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList((Layer(), Late()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.layers[1](x)
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Odd(model, batch(), _trained(optimizer), optimizer)


@case("10", measured=True)
def tensor_in_an_argument_object() -> Odd:
    """Each layer is given an object with a tensor, which its next run needs."""

    @dataclass
    class Shift:
        amount: torch.Tensor

    class Shifted(Layer):
        def forward(self, x: torch.Tensor, shift: Shift) -> torch.Tensor:
            return super().forward(x * shift.amount)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Shifted() for _ in range(DEPTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, Shift(x.detach() / 2))
            return x

    return Odd(Model(), batch())


@case("11", measured=True)
def checkpoint_inside() -> Odd:
    """Non-reentrant checkpoints inside the layers."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
            self.drop = nn.Dropout(0.2)

        def _block(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(torch.tanh(self.down(F.gelu(self.up(x)))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self._block, x, use_reentrant=False)
            return x + torch.sin(y)

    model = nn.Sequential(*(Stage() for _ in range(DEPTH)))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return Odd(model, torch.randn(128, 64), _trained(optimizer), optimizer)


@case("11")
def checkpoint_around_stages() -> Odd:
    """Non-reentrant checkpoints around the layers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    return Odd(Model(), batch())
