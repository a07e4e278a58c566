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
from small_models import Made
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from odd.layers import Bounded, counter

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


SetUp = Callable[[Any, Shared], Any]
Change = Callable[[Any, torch.Tensor], torch.Tensor]


# ---------------------------------------------------------------- cores


def _transposed(inner: nn.Module) -> nn.Module:
    """A module of channels first, between two views."""
    return Made(lambda m, x: m.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner)


def _as_images(inner: nn.Module) -> nn.Module:
    """A module on images, of which the sequence is made by a view."""
    return Made(lambda m, x: m.inner(x.reshape(len(x), 4, LENGTH, WIDTH // 4)).reshape(x.shape), inner=inner)


def _recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Made(lambda m, x: m.cell(x)[0], cell=kind(WIDTH, WIDTH, batch_first=True))


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if m.training else 0.0)
    return m.out(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def _experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Two experts, whose shares a router gives, which counts."""
    shares = m.router(x).softmax(-1)
    with torch.no_grad():
        m.load += F.one_hot(shares.argmax(-1), 2).sum((0, 1))
    y: torch.Tensor = sum(e(x) * shares[..., i : i + 1] for i, e in enumerate(m.experts))  # type: ignore[assignment]
    return y * (1 + 0.01 * (m.load / m.load.sum()).clone().amax())


def _sorted(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Indices among what is saved."""
    values, places = x.sort(-1)
    return values.softmax(-1) + torch.gather(x, -1, places.flip(-1)).sin()


def _spectral(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Complex numbers."""
    return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.filter), n=WIDTH)


def _pooled(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.max_pool1d(x.transpose(1, 2), 2)
    return F.interpolate(y, scale_factor=2.0).transpose(1, 2) - x.cumsum(1).tanh()


def _linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


CORES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
    "convolution": lambda: _transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "convolution 2d": lambda: _as_images(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))),
    "depthwise": lambda: _transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
    "attention": lambda: Made(_attention, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH)),
    "multihead attention": lambda: Made(
        lambda m, x: m.heads(x, x, x, need_weights=False)[0],
        heads=nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
    ),
    "transformer layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True),
    "lstm": lambda: _recurrent(nn.LSTM),
    "gru": lambda: _recurrent(nn.GRU),
    "embedding": lambda: Made(lambda m, x: m.words(x.argmax(-1)) + x.sigmoid(), words=nn.Embedding(WIDTH, WIDTH)),
    "experts": lambda: Made(
        _experts, router=nn.Linear(WIDTH, 2), experts=nn.ModuleList(_linears(2)), load=nn.Buffer(torch.zeros(2))
    ),
    "raw parameters": lambda: Made(
        lambda m, x: torch.einsum("btw,wv->btv", x, m.matrix) * m.more[0] + m.more[1],
        matrix=nn.Parameter(torch.randn(WIDTH, WIDTH) / 6),
        more=nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2)),
    ),
    "sort": lambda: Made(_sorted),
    "fft": lambda: Made(_spectral, filter=nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))),
    "pool": lambda: Made(_pooled),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU()),
    "batch norm": lambda: _transposed(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Hardswish())),
    "group norm": lambda: _transposed(nn.Sequential(nn.GroupNorm(4, WIDTH), nn.Softplus())),
    "instance norm": lambda: _transposed(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "in-place activations": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1, True), nn.ReLU(True)),
}

# ---------------------------------------------------------------- parts


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of a stage.

    Attributes
    ----------
    change : callable
        Of the module that has what the part keeps and what goes through; returns what follows, of the same shape.
    set_up : callable
        Gives the module what the part needs.
    of_class : callable or None
        Makes attributes of the stage's class.
    """

    change: Change
    set_up: SetUp
    of_class: Callable[[], dict[str, Any]] | None = None


PARTS: dict[str, Part] = {}


def keeping(**makers: Callable[[], Any]) -> SetUp:
    """Attributes of the module, made for each one."""

    def set_up(m: nn.Module, shared: Shared) -> None:
        for name, make in makers.items():
            setattr(m, name, make())

    return set_up


def sharing(**names: str) -> SetUp:
    """Attributes that several stages have in common."""

    def set_up(m: nn.Module, shared: Shared) -> None:
        for name, common in names.items():
            setattr(m, name, getattr(shared, common))

    return set_up


def _zeros() -> nn.Buffer:
    return nn.Buffer(torch.zeros(WIDTH))


def part(
    name: str, set_up: SetUp = lambda m, shared: None, of_class: Callable[[], dict[str, Any]] | None = None
) -> Callable[[Change], Change]:
    """Register what changes what goes through as a part."""

    def register(change: Change) -> Change:
        PARTS[name] = Part(change, set_up, of_class)
        return change

    return register


def _towards(y: torch.Tensor) -> torch.Tensor:
    return y.detach().mean((0, 1)) + 0.1


# -- tensors


@part("buffer through .data", keeping(ema=_zeros))
def _ema(m: Any, y: torch.Tensor) -> torch.Tensor:
    z = torch.tanh(y - m.ema.clone())
    m.ema.data.mul_(0.9).add_(_towards(y))
    return z


@part("buffer in place", keeping(steps=lambda: nn.Buffer(torch.zeros(()))))
def _in_place(m: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.steps += 1
    return torch.sin(y * (1 + 0.1 * m.steps.clone()))


@part("buffer replaced", keeping(mean=lambda: nn.Buffer(torch.zeros(WIDTH), persistent=False)))
def _replaced(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean + _towards(y)
    return y - m.mean


@part("buffers by foreach", keeping(low=_zeros, high=_zeros))
def _foreach(m: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch._foreach_mul_([m.low, m.high], 0.9)
        torch._foreach_add_([m.low, m.high], [y.amin((0, 1)), y.amax((0, 1))])
    return y * torch.sigmoid(m.high - m.low)


@part("buffer registered late")
def _late(m: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "late"):
        m.register_buffer("late", torch.zeros(WIDTH))
    with torch.no_grad():
        m.late += 0.1
    return y * m.late.clone().cos()


@part("buffer that begins as None", lambda m, shared: m.register_buffer("none", None))
def _none(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.none = _towards(y) if m.none is None else 0.9 * m.none + _towards(y)
    return y - m.none


@part("buffer of several modules", lambda m, shared: m.register_buffer("shared", shared.buffer))
def _shared_buffer(m: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.shared *= 1.01
    return y * m.shared.clone()


def _two_buffers(m: nn.Module, shared: Shared) -> None:
    both = torch.ones(2 * WIDTH)
    m.register_buffer("both", both)
    m.register_buffer("first_half", both[:WIDTH])


@part("buffer that is a view", _two_buffers)
def _view_buffer(m: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.both += 0.1
    return y * m.first_half.clone().sin()


@part("attribute made late")
def _table(m: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "table"):
        m.table = torch.linspace(0.5, 1, y.shape[-1])
    return y * m.table


@part("module made late")
def _late_layer(m: Any, y: torch.Tensor) -> Any:
    if not hasattr(m, "scale"):
        m.scale = nn.LayerNorm(y.shape[-1])
    return m.scale(y)


@part("detached output kept", keeping(memory=lambda: None))
def _memory(m: Any, y: torch.Tensor) -> torch.Tensor:
    z = y if m.memory is None or m.memory.shape != y.shape else y + 0.1 * m.memory
    m.memory = torch.tanh(y).detach()
    return torch.sin(z)


@part("loss kept in an attribute")
def _loss(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.loss = y.square().mean().detach()
    return y


@part("tensors in a dictionary", keeping(tensors=lambda: {"mean": torch.zeros(WIDTH)}))
def _tensors_in_dict(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.tensors["mean"] = 0.9 * m.tensors["mean"] + _towards(y)
    return torch.tanh(y - m.tensors["mean"])


@part("tensors in a list, in place", keeping(listed=lambda: [torch.zeros(WIDTH)]))
def _tensors_in_place(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.listed[0].mul_(0.9).add_(_towards(y))
    return torch.tanh(y - m.listed[0].clone())


# -- Python


@part("counter", keeping(calls=lambda: 0))
def _counter(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return torch.sin(y * (1 + 0.1 * m.calls))


@part("list", keeping(items=lambda: {"inner": [[0.5], (1, [2.0])]}))
def _list(m: Any, y: torch.Tensor) -> torch.Tensor:
    values, (_, last) = m.items["inner"]
    values.append(len(values) * 0.5)
    last[0] += 0.25
    return torch.sin(y * sum(values) / last[0])


@part("set", keeping(seen=set))
def _set(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.seen.add(len(m.seen))
    return torch.sin(y * (1 + 0.1 * len(m.seen)))


@part("deque", keeping(queue=lambda: collections.deque([0.5, 1.0, 0.75], maxlen=3)))
def _deque(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.queue.append(m.queue[0] * 0.9)
    return torch.sin(y * m.queue[0])


@part("numpy array", keeping(array=lambda: np.ones((2, 3))))
def _array(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.array[1] += 0.1
    return torch.sin(y * float(m.array.mean()))


@part(
    "default dictionary and counter",
    keeping(default=lambda: collections.defaultdict(list), counted=collections.Counter),
)
def _defaults(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.default[len(y)].append(1)
    m.counted.update("ab")
    return torch.sin(y * (len(m.default[len(y)]) + 0.1 * m.counted["a"]))


@dataclasses.dataclass
class Record:
    """A plain object of data."""

    number: int = 0
    values: list[float] = dataclasses.field(default_factory=list)


@part("dataclass", keeping(record=Record))
def _dataclass(m: Any, y: torch.Tensor) -> torch.Tensor:
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


part("plain object", keeping(plain=Plain))(lambda m, y: torch.sin(y * m.plain.next()))


part("closure", keeping(count=counter))(lambda m, y: torch.sin(y * (1 + 0.1 * m.count())))


part("iterator", keeping(numbers=lambda: itertools.count(1)))(lambda m, y: torch.sin(y * (1 + 0.1 * next(m.numbers))))


def _halving(m: Any, shared: Shared) -> None:
    m.space = types.SimpleNamespace(scale=1.0)
    m.halve = functools.partial(setattr, m.space, "scale")


@part("namespace and partial", _halving)
def _namespace(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.halve(m.space.scale * 0.75)
    return torch.sin(y * m.space.scale)


@part("class attribute", of_class=lambda: {"class_calls": [0], "class_number": 0})
def _of_class(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.class_calls[0] += 1
    type(m).class_number += 1
    return torch.sin(y * (1 + 0.1 * m.class_calls[0] + 0.01 * type(m).class_number))


@part("counter on the model", sharing(owner="model"))
def _of_parent(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.owner[0].total += 1
    return torch.sin(y * (1 + 0.05 * m.owner[0].total))


GLOBAL = {"calls": 0}


@part("global counter")
def _global(m: Any, y: torch.Tensor) -> torch.Tensor:
    GLOBAL["calls"] += 1
    return torch.sin(y * (1 + 0.1 * GLOBAL["calls"]))


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


part("context variable read")(lambda m, y: torch.sin(y * VARIABLE.get()))


# -- random numbers


part("dropout", keeping(drop=lambda: nn.Dropout(0.2)))(lambda m, y: m.drop(y))


part("global draws")(lambda m, y: torch.sin(y * (random.random() + float(np.random.rand()) + torch.rand(()))))  # noqa: NPY002


@part(
    "generators in attributes",
    keeping(
        generators=lambda: {"torch": torch.Generator().manual_seed(1), "others": [random.Random(2)]},
        bits=lambda: np.random.default_rng(3),
    ),
)
def _generators(m: Any, y: torch.Tensor) -> torch.Tensor:
    drawn = m.generators["others"][0].random() + m.bits.random()
    return torch.sin(y * drawn * torch.rand(WIDTH, generator=m.generators["torch"]))


part("generator of several stages", sharing(common="generator"))(
    lambda m, y: torch.sin(y * torch.rand(WIDTH, generator=m.common))
)


@part("forked random state")
def _fork(m: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        noise = torch.rand(WIDTH)
    return torch.sin(y * noise) * torch.rand(WIDTH)


part("layer left out at random")(lambda m, y: y if random.random() < 0.3 else torch.sin(y * 1.5))


# -- modules and parameters


part("tied weight", sharing(tied="weight"))(lambda m, y: torch.tanh(y @ m.tied))


part("module in a list", keeping(hidden=lambda: [nn.BatchNorm1d(WIDTH)]))(
    lambda m, y: m.hidden[0](y.transpose(1, 2)).transpose(1, 2)
)


part("module of several stages", sharing(norm="norm"))(lambda m, y: m.norm(y.transpose(1, 2)).transpose(1, 2))


def _with_linear(name: str, change: Callable[[nn.Linear], Any]) -> None:
    """Register a part with a product whose weight is made in some way."""
    attribute = name.replace(" ", "_")

    def set_up(m: nn.Module, shared: Shared) -> None:
        linear = nn.Linear(WIDTH, WIDTH)
        change(linear)
        setattr(m, attribute, linear)

    part(name, set_up)(lambda m, y: getattr(m, attribute)(y))


_with_linear("parametrization", lambda linear: parametrize.register_parametrization(linear, "weight", Bounded()))
_with_linear("weight norm", parametrizations.weight_norm)
_with_linear("spectral norm", parametrizations.spectral_norm)
_with_linear("weight norm by hooks", nn.utils.weight_norm)
_with_linear("pruning", lambda linear: prune.random_unstructured(linear, "weight", 0.3))
_with_linear("frozen layer", lambda linear: linear.requires_grad_(False))


part("fake quantize", keeping(quantize=FusedMovingAvgObsFakeQuantize))(lambda m, y: torch.tanh(m.quantize(y)))


# -- how forward runs


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))


part("checkpoint inside", keeping(again=_mlp))(lambda m, y: checkpoint(m.again, y, use_reentrant=False))


@part("autocast inside", keeping(low_precision=lambda: nn.Linear(WIDTH, WIDTH)))
def _autocast(m: Any, y: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        z = m.low_precision(y)
    return z.float()


part("double precision inside")(lambda m, y: torch.special.erf(y.double()).float())


@part("part without gradients", keeping(features=lambda: nn.Linear(WIDTH, WIDTH)))
def _no_grad(m: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fixed = torch.tanh(m.features(y))
    with torch.enable_grad():
        return y * fixed


part("straight-through estimate")(lambda m, y: y + ((y * 8).round() / 8 - y).detach())


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


part("custom function")(lambda m, y: _Scaled.apply(y, 1.25))


def _hooked_sine(y: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    z = torch.sin(y)
    if z.requires_grad:
        z.register_hook(hook)
    return z


part("tensor hook inside")(lambda m, y: _hooked_sine(y, lambda gradient: gradient * 0.5))


part("tensor hook that records", keeping(gradients=list))(
    lambda m, y: _hooked_sine(y, lambda gradient: m.gradients.append(float(gradient.abs().sum())))
)


@part("edits in place")
def _edits_in_place(m: Any, y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[:, ::2] *= 0.5
    z.add_(0.1).clamp_(-2, 2)
    z[..., :4].zero_()
    return z


@part("views")
def _views(m: Any, y: torch.Tensor) -> torch.Tensor:
    left, right = y.chunk(2, -1)
    parts = torch.stack([left.sin(), right.cos()]).unbind(0)
    return torch.cat([parts[1], parts[0]], -1).expand_as(y).unflatten(-1, (2, -1)).flatten(-2)


part("value read")(lambda m, y: torch.sin(y / (1 + y.detach().abs().mean().item())))


@part("mode read and set", keeping(sometimes=lambda: nn.Dropout(0.1)))
def _training(m: Any, y: torch.Tensor) -> Any:
    z = m.sometimes(y) * (1.1 if m.training else 0.9)
    m.sometimes.train(not m.sometimes.training)
    return z


def _scripting() -> Any:
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))  # whose bits no fusing changes


part("scripted module", keeping(scripted=_scripting))(lambda m, y: m.scripted(y))


@part("attribute of a tensor")
def _metadata(m: Any, y: Any) -> torch.Tensor:
    y.factor = getattr(y, "factor", 1.0) * 0.9
    return torch.sin(y * y.factor)


@part("exception caught inside", keeping(failures=lambda: 0))
def _suppressed(m: Any, y: torch.Tensor) -> torch.Tensor:
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
