"""What a random model gives to its stages besides what goes through them, and how the stages use it."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from odd.generated.parts import WIDTH, Record

Make = Callable[[Any, torch.Tensor, int], Any]
"""Of the model, what goes into the stage, and the stage's number in the order of calls."""
Use = Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]


@dataclasses.dataclass
class Batch:
    """Tensors and what isn't a tensor in an object."""

    x: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None


class Pair(NamedTuple):
    """Two tensors."""

    left: torch.Tensor
    right: torch.Tensor


class Way(enum.Enum):
    """A choice that is no number."""

    SINE, COSINE = range(2)


def _mask(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[:2]).tril().unsqueeze(-1)


def _appended(m: nn.Module, y: torch.Tensor, seen: list[Any]) -> torch.Tensor:
    seen.append(0.1)
    return torch.sin(y * sum(seen))


def _tensors_appended(m: nn.Module, y: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    seen.append(y.mean(-1, keepdim=True))
    return torch.sin(y * sum(seen))


def _of_dictionary(m: nn.Module, y: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    given["calls"] = given.get("calls", 0) + 1
    return torch.sin(y * given["calls"]) * given["mask"]


def _of_set(m: nn.Module, y: torch.Tensor, seen: set[int]) -> torch.Tensor:
    seen.add(len(seen))
    return torch.sin(y * len(seen))


def _of_record(m: nn.Module, y: torch.Tensor, record: Record) -> torch.Tensor:
    record.number += 1
    record.values.append(0.1)
    return torch.sin(y * (record.number + sum(record.values)))


def _of_array(m: nn.Module, y: torch.Tensor, array: Any) -> torch.Tensor:
    array += 0.1
    return torch.sin(y * float(array.sum()))


def _of_views(m: nn.Module, y: torch.Tensor, views: tuple[torch.Tensor, ...]) -> torch.Tensor:
    first, rest = views
    return y * torch.cat([first, rest], 1)[:, : y.shape[1]].sigmoid()


def _of_twice(m: nn.Module, y: torch.Tensor, pair: Any) -> torch.Tensor:
    return y * pair[0].tanh() if pair[0] is pair[1] else y + pair[1].tanh()


def _edited(m: nn.Module, y: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    scratch.add_(0.5)
    return y * scratch.clone()


def _own(name: str, make: Callable[[], Any]) -> Make:
    """An argument that the model keeps from one forward to the next."""

    def found(model: Any, x: torch.Tensor, number: int) -> Any:
        if name not in model.kept:
            model.kept[name] = make()
        return model.kept[name]

    return found


def _of_forward(name: str, make: Callable[[torch.Tensor], Any]) -> Make:
    """An argument that the model makes once in each forward, for all stages."""

    def found(model: Any, x: torch.Tensor, number: int) -> Any:
        if name not in model.of_forward:
            model.of_forward[name] = make(x)
        return model.of_forward[name]

    return found


ARGUMENTS: dict[str, tuple[Make, Use]] = {
    "number": (lambda model, x, number: 0.5 + 0.1 * number, lambda m, y, v: torch.sin(y * v)),
    "number that rises": (lambda model, x, number: 1 + 0.1 * model.forwards, lambda m, y, v: torch.sin(y * v)),
    "none": (lambda model, x, number: None, lambda m, y, v: y if v is None else y * v),
    "text and enumeration": (lambda model, x, number: ("sine", Way(number % 2), torch.float32, slice(0, 4)),
                             lambda m, y, v: (torch.sin(y) if v[1] is Way.SINE else torch.cos(y)).to(v[2])),
    "mask": (lambda model, x, number: _mask(x), lambda m, y, v: torch.tanh(y * v)),
    "nested": (lambda model, x, number: {"a": [_mask(x), (x.mean(1, keepdim=True), 3)], "b": None, "c": {"d": 0.5}},
               lambda m, y, v: y * v["a"][0] * v["c"]["d"] + v["a"][1][0].tanh()),
    "dataclass": (lambda model, x, number: Batch(x, 0.5, _mask(x)),
                  lambda m, y, v: torch.tanh(y * v.scale) + v.x * v.mask),
    "named tuple": (lambda model, x, number: Pair(x, _mask(x)), lambda m, y, v: y * v.right + v.left.sin()),
    "list": (_of_forward("list", lambda x: [1.0]), _appended),
    "list of tensors": (_of_forward("tensors", lambda x: [_mask(x)]), _tensors_appended),
    "dictionary": (_of_forward("dictionary", lambda x: {"mask": _mask(x)}), _of_dictionary),
    "set": (_of_forward("set", lambda x: {0}), _of_set),
    "mutated dataclass": (_of_forward("record", lambda x: Record()), _of_record),
    "mutated dataclass that lasts": (_own("record", Record), _of_record),
    "list that lasts": (_own("list", lambda: [1.0]), _appended),
    "numpy array": (_own("array", lambda: np.ones(2)), _of_array),
    "torch generator": (_own("torch", lambda: torch.Generator().manual_seed(3)),
                        lambda m, y, v: torch.sin(y * torch.rand(WIDTH, generator=v))),
    "numpy generator": (_own("numpy", lambda: np.random.default_rng(3)), lambda m, y, v: torch.sin(y * v.random())),
    "python generator": (_own("python", lambda: random.Random(3)), lambda m, y, v: torch.sin(y * v.random())),
    "module": (lambda model, x, number: model.common, lambda m, y, v: v(y.transpose(1, 2)).transpose(1, 2)),
    "function": (lambda model, x, number: torch.sin if number % 2 else (lambda y: torch.cos(y) * 0.5),
                 lambda m, y, v: v(y)),
    "parameter": (lambda model, x, number: model.scale, lambda m, y, v: torch.tanh(y * v)),
    "the same tensor twice": (lambda model, x, number: (x, x), _of_twice),
    "views of one tensor": (lambda model, x, number: (x[:, :3], x[:, 2:]), _of_views),
    "expanded": (lambda model, x, number: x[:, :1].expand_as(x), lambda m, y, v: y + v.sin()),
    "not contiguous": (lambda model, x, number: x.transpose(0, 1), lambda m, y, v: y * v.transpose(0, 1).sigmoid()),
    "earlier output": (lambda model, x, number: model.first, lambda m, y, v: y + v.sin()),
    "scratch that is edited": (_of_forward("scratch", lambda x: torch.ones(WIDTH)), _edited),
    "integers": (lambda model, x, number: torch.arange(x.shape[1]).flip(0), lambda m, y, v: y.index_select(1, v).sin()),
    "device scalar": (lambda model, x, number: x.detach().abs().max(), lambda m, y, v: torch.sin(y / (1 + v))),
}  # fmt: skip
