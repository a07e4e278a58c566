"""Peaks that may be above the plan's: gradients from before (item 9), fake sizes (10), checkpoints inside (11)."""

from __future__ import annotations

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
from odd.layers import DEPTH, Around, Folded, Layer, around, batch, chain, in_turn, layer_of, layers_of


def _wide() -> tuple[nn.Module, torch.Tensor]:
    """Gradients as large as activations."""
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(DEPTH))
    return nn.Sequential(*blocks), torch.randn(128, 64)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _with_momentum(model: nn.Module, x: torch.Tensor) -> Odd:
    optimizer = _momentum(model)
    return Odd(model, x, _trained(optimizer), optimizer)


def _trained(optimizer: torch.optim.Optimizer, micro_batches: int = 1, *, set_to_none: bool = True) -> Loop:
    """A loop of steps of as many forwards and backwards, with an update at the end."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses = [plain_step(model, x) for _ in range(micro_batches)]
            optimizer.step()
            yield losses

    return loop


@case("9", measured=True)
def gradients_kept() -> Odd:
    """`zero_grad(set_to_none=False)`: gradients are there when a step starts."""
    model, x = _wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Odd(model, x, _trained(optimizer, set_to_none=False), optimizer)


@case("9", measured=True)
def two_micro_batches() -> Odd:
    """Two micro-batches: gradients are there when the second one starts."""
    model, x = Transformer(depth=2), torch.randint(0, 50, (4, 32))
    optimizer = _momentum(model)
    return Odd(model, x, _trained(optimizer, 2), optimizer)


@case("9", measured=True)
def one_batch() -> Odd:
    """As it was profiled, for comparison."""
    return _with_momentum(*_wide())


@case("10", measured=True)
def fold() -> Odd:
    """`F.fold`, whose result lies in a larger storage than its fake twin's."""
    return _with_momentum(nn.Sequential(*layers_of(Folded)), torch.randn(4, 4, 12, 12))


@case("9", measured=True)
def output_kept_for_the_next_step() -> Odd:
    """Layers that keep what they gave, detached, for their next forward."""

    def remembering(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.linear(x) if m.memory is None else m.linear(x) + 0.1 * m.memory)
        m.memory = y.detach().clone()
        return x + torch.sin(y)

    return _with_momentum(chain(layer_of(remembering, memory=lambda: None)).model, batch())


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

    between = layer_of(lambda m, x: odd(torch.tanh(m.linear(x))))
    model = nn.Sequential(Layer(), between(), between(), Layer())
    return _with_momentum(model, batch())


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

    holding = layer_of(lambda m, x, given: x + torch.tanh(m.linear(x) * given.mask) + given.x)

    forward = in_turn(lambda layer, x: layer(x, types.SimpleNamespace(x=x, mask=torch.ones(1))))
    return _with_momentum(Around((holding() for _ in range(2 * DEPTH)), forward), batch())


@case("7", measured=True)
def norm_made_in_first_forward() -> Odd:
    """A layer called four times, with a norm that its first forward makes, between what is saved and may leave."""

    def late(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        if not hasattr(m, "norm"):
            m.norm = nn.LayerNorm(x.shape[-1])
        return F.relu_(x + m.norm(y))

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = layers[1](x)
        return x

    return _with_momentum(Around((Layer(), layer_of(late)()), forward), batch())


@case("10", measured=True)
def tensor_in_an_argument_object() -> Odd:
    """Each layer is given an object with a tensor, which its next run needs."""

    @dataclass
    class Shift:
        amount: torch.Tensor

    def shifted(m: Any, x: torch.Tensor, shift: Shift) -> torch.Tensor:
        return Layer.forward(m, x * shift.amount)

    return around(in_turn(lambda layer, x: layer(x, Shift(x.detach() / 2))), layer_of(shifted))


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

    return _with_momentum(nn.Sequential(*layers_of(Stage)), torch.randn(128, 64))


@case("11")
def checkpoint_around_stages() -> Odd:
    """Non-reentrant checkpoints around the layers."""

    return around(in_turn(lambda layer, x: checkpoint(layer, x, use_reentrant=False)))
