"""What stages of random models are made of: cores, and parts that keep state or do something odd.

A part is set up once on a module, the stage itself or one inside it, and changes what goes through in each forward.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH = 8, 8, 32
"""Of what goes from stage to stage: 8 KiB."""
WORDS = 16


@dataclasses.dataclass
class Shared:
    """What parts of several stages have in common.

    Attributes
    ----------
    rng : random.Random
        Draws details while a model is built, the same in every process.
    """

    rng: random.Random
    buffer: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(WIDTH))
    weight: nn.Parameter = dataclasses.field(default_factory=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) / 6))
    norm: nn.Module = dataclasses.field(default_factory=lambda: nn.BatchNorm1d(WIDTH))
    generator: torch.Generator = dataclasses.field(default_factory=lambda: torch.Generator().manual_seed(5))
    model: list[nn.Module] = dataclasses.field(default_factory=list)


# ---------------------------------------------------------------- cores


class _Transposed(nn.Module):
    """A module of channels first, between two views."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x.transpose(1, 2))
        return y.transpose(1, 2)


class _AsImages(nn.Module):
    """A module on images, of which the sequence is made by a view."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x.reshape(len(x), 4, LENGTH, WIDTH // 4))
        return y.reshape(x.shape)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        z: torch.Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return z


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.heads(x, x, x, need_weights=False)[0]
        return y


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.cell(x)[0]
        return y


class _Looked(nn.Module):
    """An embedding of what is largest."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.words(x.argmax(-1))
        return y + x.sigmoid()


class _Experts(nn.Module):
    """Two experts, whose shares a router gives, which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("load", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        with torch.no_grad():
            self.load += F.one_hot(shares.argmax(-1), 2).sum((0, 1))
        y: torch.Tensor = sum(e(x) * shares[..., i : i + 1] for i, e in enumerate(self.experts))  # type: ignore[assignment]
        return y * (1 + 0.01 * (self.load / self.load.sum()).clone().amax())


class _Raw(nn.Module):
    """A product with a parameter of its own, by `einsum`."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.more = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("btw,wv->btv", x, self.matrix) * self.more[0] + self.more[1]


class _Sorted(nn.Module):
    """Indices among what is saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = x.sort(-1)
        return values.softmax(-1) + torch.gather(x, -1, places.flip(-1)).sin()


class _Spectral(nn.Module):
    """Complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=WIDTH)


class _Pooled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool1d(x.transpose(1, 2), 2)
        return F.interpolate(y, scale_factor=2.0).transpose(1, 2) - x.cumsum(1).tanh()


CORES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
    "convolution": lambda: _Transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "convolution 2d": lambda: _AsImages(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))),
    "depthwise": lambda: _Transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
    "attention": _Attention,
    "multihead attention": _Heads,
    "transformer layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True),
    "lstm": lambda: _Recurrent(nn.LSTM),
    "gru": lambda: _Recurrent(nn.GRU),
    "embedding": _Looked,
    "experts": _Experts,
    "raw parameters": _Raw,
    "sort": _Sorted,
    "fft": _Spectral,
    "pool": _Pooled,
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU()),
    "batch norm": lambda: _Transposed(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Hardswish())),
    "group norm": lambda: _Transposed(nn.Sequential(nn.GroupNorm(4, WIDTH), nn.Softplus())),
    "instance norm": lambda: _Transposed(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "in-place activations": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1, True), nn.ReLU(True)),
}

# ---------------------------------------------------------------- parts


class Part:
    """A part of a stage, without anything of its own."""

    @staticmethod
    def set_up(m: nn.Module, shared: Shared) -> None:
        """Give `m` what the part needs."""

    @staticmethod
    def change(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
        """Return what follows from `y`, of the same shape."""
        return y

    of_class: Callable[[], dict[str, Any]] | None = None
    """Makes attributes of the stage's class."""


PARTS: dict[str, type[Part]] = {}


def _part(kind: type[Part]) -> type[Part]:
    PARTS[(kind.__doc__ or "").rstrip(".")] = kind
    return kind


def _towards(y: torch.Tensor) -> torch.Tensor:
    return y.detach().mean((0, 1)) + 0.1


# -- tensors


@_part
class _Ema(Part):
    """buffer through .data."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.register_buffer("ema", torch.zeros(WIDTH))

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(y - m.ema.clone())
        m.ema.data.mul_(0.9).add_(_towards(y))
        return z


@_part
class _InPlace(Part):
    """buffer in place."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.register_buffer("steps", torch.zeros(()))

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.steps += 1
        return torch.sin(y * (1 + 0.1 * m.steps.clone()))


@_part
class _Replaced(Part):
    """buffer replaced."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.mean = 0.9 * m.mean + _towards(y)
        return y - m.mean


@_part
class _Foreach(Part):
    """buffers by foreach."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.register_buffer("low", torch.zeros(WIDTH))
        m.register_buffer("high", torch.zeros(WIDTH))

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_([m.low, m.high], 0.9)
            torch._foreach_add_([m.low, m.high], [y.amin((0, 1)), y.amax((0, 1))])
        return y * torch.sigmoid(m.high - m.low)


@_part
class _Late(Part):
    """buffer registered late."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "late"):
            m.register_buffer("late", torch.zeros(WIDTH))
        with torch.no_grad():
            m.late += 0.1
        return y * m.late.clone().cos()


@_part
class _None(Part):
    """buffer that begins as None."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.register_buffer("none", None)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.none = _towards(y) if m.none is None else 0.9 * m.none + _towards(y)
        return y - m.none


@_part
class _SharedBuffer(Part):
    """buffer of several modules."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.register_buffer("shared", shared.buffer)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.shared *= 1.01
        return y * m.shared.clone()


@_part
class _ViewBuffer(Part):
    """buffer that is a view."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        both = torch.ones(2 * WIDTH)
        m.register_buffer("both", both)
        m.register_buffer("first_half", both[:WIDTH])

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.both += 0.1
        return y * m.first_half.clone().sin()


@_part
class _Table(Part):
    """attribute made late."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "table"):
            m.table = torch.linspace(0.5, 1, y.shape[-1])
        return y * m.table


@_part
class _LateLayer(Part):
    """module made late."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "scale"):
            m.scale = nn.LayerNorm(y.shape[-1])
        z: torch.Tensor = m.scale(y)
        return z


@_part
class _Memory(Part):
    """detached output kept."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.memory = None

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = y if m.memory is None or m.memory.shape != y.shape else y + 0.1 * m.memory
        m.memory = torch.tanh(y).detach()
        return torch.sin(z)


@_part
class _Loss(Part):
    """loss kept in an attribute."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.loss = y.square().mean().detach()
        return y


@_part
class _TensorsInDict(Part):
    """tensors in a dictionary."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.tensors = {"mean": torch.zeros(WIDTH)}

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.tensors["mean"] = 0.9 * m.tensors["mean"] + _towards(y)
        return torch.tanh(y - m.tensors["mean"])


@_part
class _TensorsInPlace(Part):
    """tensors in a list, in place."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.listed = [torch.zeros(WIDTH)]

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.listed[0].mul_(0.9).add_(_towards(y))
        return torch.tanh(y - m.listed[0].clone())


# -- Python


@_part
class _Counter(Part):
    """counter."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.calls = 0

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        return torch.sin(y * (1 + 0.1 * m.calls))


@_part
class _List(Part):
    """list."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.items = {"inner": [[0.5], (1, [2.0])]}

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.items["inner"][0].append(len(m.items["inner"][0]) * 0.5)
        m.items["inner"][1][1][0] += 0.25
        return torch.sin(y * sum(m.items["inner"][0]) / m.items["inner"][1][1][0])


@_part
class _Set(Part):
    """set."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.seen = set()

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.seen.add(len(m.seen))
        return torch.sin(y * (1 + 0.1 * len(m.seen)))


@_part
class _Deque(Part):
    """deque."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.queue = collections.deque([0.5, 1.0, 0.75], maxlen=3)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.queue.append(m.queue[0] * 0.9)
        return torch.sin(y * m.queue[0])


@_part
class _Array(Part):
    """numpy array."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.array = np.ones((2, 3))

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.array[1] += 0.1
        return torch.sin(y * float(m.array.mean()))


@_part
class _Defaults(Part):
    """default dictionary and counter."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.default, m.counted = collections.defaultdict(list), collections.Counter()

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.default[len(y)].append(1)
        m.counted.update("ab")
        return torch.sin(y * (len(m.default[len(y)]) + 0.1 * m.counted["a"]))


@dataclasses.dataclass
class Record:
    """A plain object of data."""

    number: int = 0
    values: list[float] = dataclasses.field(default_factory=list)


@_part
class _Dataclass(Part):
    """dataclass."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.record = Record()

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.record.number += 1
        m.record.values.append(0.1)
        return torch.sin(y * (m.record.number + sum(m.record.values)))


class Plain:
    """An object with methods that change it."""

    def __init__(self) -> None:
        self.rate, self.past = 1.0, {"rates": [1.0]}

    def next(self) -> float:
        """Return the next number."""
        self.rate *= 0.9
        self.past["rates"].append(self.rate)
        return sum(self.past["rates"])


@_part
class _Object(Part):
    """plain object."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.plain = Plain()

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * m.plain.next())


@_part
class _Closure(Part):
    """closure."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        m.count = count

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * (1 + 0.1 * m.count()))


@_part
class _Iterator(Part):
    """iterator."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.numbers = itertools.count(1)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * (1 + 0.1 * next(m.numbers)))


@_part
class _Namespace(Part):
    """namespace and partial."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.space = types.SimpleNamespace(scale=1.0)
        m.halve = functools.partial(setattr, m.space, "scale")

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.halve(m.space.scale * 0.75)
        return torch.sin(y * m.space.scale)


@_part
class _OfClass(Part):
    """class attribute."""

    of_class = staticmethod(lambda: {"class_calls": [0], "class_number": 0})

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.class_calls[0] += 1
        type(m).class_number += 1
        return torch.sin(y * (1 + 0.1 * m.class_calls[0] + 0.01 * type(m).class_number))


@_part
class _OfParent(Part):
    """counter on the model."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.owner = shared.model

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.owner[0].total += 1
        return torch.sin(y * (1 + 0.05 * m.owner[0].total))


GLOBAL = {"calls": 0}


@_part
class _Global(Part):
    """global counter."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        GLOBAL["calls"] += 1
        return torch.sin(y * (1 + 0.1 * GLOBAL["calls"]))


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@_part
class _ContextVariable(Part):
    """context variable read."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * VARIABLE.get())


# -- random numbers


@_part
class _Dropout(Part):
    """dropout."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.drop = nn.Dropout(0.2)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = m.drop(y)
        return z


@_part
class _Draws(Part):
    """global draws."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * (random.random() + float(np.random.rand()) + torch.rand(())))  # noqa: NPY002


@_part
class _Generators(Part):
    """generators in attributes."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.generators = {"torch": torch.Generator().manual_seed(1), "others": [random.Random(2)]}
        m.bits = np.random.default_rng(3)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        drawn = m.generators["others"][0].random() + m.bits.random()
        return torch.sin(y * drawn * torch.rand(WIDTH, generator=m.generators["torch"]))


@_part
class _SharedGenerator(Part):
    """generator of several stages."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.common = shared.generator

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * torch.rand(WIDTH, generator=m.common))


@_part
class _Fork(Part):
    """forked random state."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            noise = torch.rand(WIDTH)
        return torch.sin(y * noise) * torch.rand(WIDTH)


@_part
class _LayerDrop(Part):
    """layer left out at random."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y if random.random() < 0.3 else torch.sin(y * 1.5)


# -- modules and parameters


@_part
class _Tied(Part):
    """tied weight."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.tied = shared.weight

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y @ m.tied)


@_part
class _HiddenNorm(Part):
    """module in a list."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.hidden = [nn.BatchNorm1d(WIDTH)]

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = m.hidden[0](y.transpose(1, 2)).transpose(1, 2)
        return z


@_part
class _SharedNorm(Part):
    """module of several stages."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.norm = shared.norm

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = m.norm(y.transpose(1, 2)).transpose(1, 2)
        return z


class _Bounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(weight)


def _with_linear(name: str, change: Callable[[nn.Linear], Any]) -> None:
    """Register a part with a product whose weight is made in some way."""
    attribute = name.replace(" ", "_")

    class Weighted(Part):
        @staticmethod
        def set_up(m: Any, shared: Shared) -> None:
            linear = nn.Linear(WIDTH, WIDTH)
            change(linear)
            setattr(m, attribute, linear)

        @staticmethod
        def change(m: Any, y: torch.Tensor) -> torch.Tensor:
            z: torch.Tensor = getattr(m, attribute)(y)
            return z

    PARTS[name] = Weighted


_with_linear("parametrization", lambda linear: parametrize.register_parametrization(linear, "weight", _Bounded()))
_with_linear("weight norm", parametrizations.weight_norm)
_with_linear("spectral norm", parametrizations.spectral_norm)
_with_linear("weight norm by hooks", nn.utils.weight_norm)
_with_linear("pruning", lambda linear: prune.random_unstructured(linear, "weight", 0.3))
_with_linear("frozen layer", lambda linear: linear.requires_grad_(False))


@_part
class _FakeQuantize(Part):
    """fake quantize."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.quantize = FusedMovingAvgObsFakeQuantize()

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = m.quantize(y)
        return torch.tanh(z)


# -- how forward runs


@_part
class _Checkpointed(Part):
    """checkpoint inside."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.again = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = checkpoint(m.again, y, use_reentrant=False)
        return z


@_part
class _Autocast(Part):
    """autocast inside."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.low_precision = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z: torch.Tensor = m.low_precision(y)
        return z.float()


@_part
class _Double(Part):
    """double precision inside."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.special.erf(y.double()).float()


@_part
class _NoGrad(Part):
    """part without gradients."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.features = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = torch.tanh(m.features(y))
        with torch.enable_grad():
            return y * fixed


@_part
class _StraightThrough(Part):
    """straight-through estimate."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y + ((y * 8).round() / 8 - y).detach()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = torch.tanh(x * scale)
        ctx.save_for_backward(x, y)
        ctx.scale, ctx.kept = scale, x.detach().mean()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _, y = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.scale * (1 + 0.01 * ctx.kept), None


@_part
class _CustomFunction(Part):
    """custom function."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(y, 1.25)  # type: ignore[no-any-return]


@_part
class _TensorHook(Part):
    """tensor hook inside."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.norms = []

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.sin(y)
        if z.requires_grad:
            z.register_hook(lambda gradient: gradient * 0.5)
        return z


@_part
class _RecordingHook(Part):
    """tensor hook that records."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.gradients = []

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.sin(y)
        if z.requires_grad:
            z.register_hook(lambda gradient: m.gradients.append(float(gradient.abs().sum())))
        return z


@_part
class _EditsInPlace(Part):
    """edits in place."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = y.clone()
        z[:, ::2] *= 0.5
        z.add_(0.1).clamp_(-2, 2)
        z[..., :4].zero_()
        return z


@_part
class _Views(Part):
    """views."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        left, right = y.chunk(2, -1)
        parts = torch.stack([left.sin(), right.cos()]).unbind(0)
        return torch.cat([parts[1], parts[0]], -1).expand_as(y).unflatten(-1, (2, -1)).flatten(-2)


@_part
class _Reads(Part):
    """value read."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        scale = y.detach().abs().mean().item()
        return torch.sin(y / (1 + scale))


@_part
class _Training(Part):
    """mode read and set."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.sometimes = nn.Dropout(0.1)

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = m.sometimes(y) * (1.1 if m.training else 0.9)
        m.sometimes.train(not m.sometimes.training)
        return z


@_part
class _Scripted(Part):
    """scripted module."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))  # whose bits no fusing changes

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = m.scripted(y)
        return z


@_part
class _Metadata(Part):
    """attribute of a tensor."""

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.factor = getattr(y, "factor", 1.0) * 0.9
        return torch.sin(y * y.factor)


@_part
class _Suppressed(Part):
    """exception caught inside."""

    @staticmethod
    def set_up(m: Any, shared: Shared) -> None:
        m.failures = 0

    @staticmethod
    def change(m: Any, y: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            m.failures += 1
            y.view(3, 3, 3)
        return torch.sin(y * (1 + 0.01 * m.failures))


# ---------------------------------------------------------------- what a stage returns

ENDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda x, y: x + torch.tanh(y),
    "activation": lambda x, y: torch.tanh(y),
    "in-place activation": lambda x, y: F.relu_(x + y),
    "view": lambda x, y: (x + torch.sin(y)).transpose(0, 1),
    "tuple": lambda x, y: (x + torch.tanh(y), y.square().mean()),
    "dictionary": lambda x, y: {"y": torch.tanh(y), "more": [y.abs().mean(), None, 3]},
    "gate": lambda x, y: x * torch.sigmoid(y) + y.tanh(),
}


def main_of(end: str, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What goes on to the next stage, and what counts in the loss besides."""
    if end == "tuple":
        return output
    if end == "dictionary":
        return output["y"], output["more"][0]
    return (output.transpose(0, 1) if end == "view" else output), None
