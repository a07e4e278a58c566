"""Models of equal layers, whose forwards treat some of them otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DEPTH = 7
"""Folding runs four layers of these, so that a forward has three more to treat otherwise."""


class Layers(nn.Module):
    """Equal layers, and a forward that may treat them as it likes."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], depth: int = DEPTH, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def every_fifth(model: Any, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x).sin() if i % 5 == 4 else layer(x)
    return x


def room_for_every_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    room = x.new_zeros(len(model.layers), 1000)
    for layer in model.layers:
        x = layer(x)
    return room.sum() + x.sum()


def one_is_held(model: Any, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x)
        if i == 4:
            held = x.detach() * 2
    return x + held


def some_are_left_out(model: Any, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = x if i in (4, 5) else layer(x)
    return x


def later_ones_share(model: Any, x: torch.Tensor) -> torch.Tensor:
    shared = x
    for i, layer in enumerate(model.layers):
        shared = x if i < 5 else shared
        x = layer(x) + shared
    return x


def by_number(model: Any, x: torch.Tensor) -> torch.Tensor:
    for i in range(DEPTH):
        x = model.layers[i](x)
    return x


def grows_in_the_middle(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers[:5]:
        x = layer(x)
    x = torch.cat([x, x])
    for layer in model.layers[5:]:
        x = layer(x)
    return x


def counts_calls(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls = 0
    for layer in model.layers:
        x = layer(x)
        model.calls += 1
        x = x.sin() if model.calls > 5 else x
    return x


FORWARDS = [
    every_fifth, room_for_every_layer, one_is_held, some_are_left_out, later_ones_share, by_number, grows_in_the_middle,
    counts_calls,
]  # fmt: skip
