"""State: written without a version counter (item 1), or where it isn't looked for (item 2)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from odd.harness import STEPS, WIDTH, Extras, Odd, case, in_steps, loss_of, plain_loop, plain_step, update
from odd.layers import Factored, Layer, batch, chain, counter, layers_of, passing

# ---------------------------------------------------------------- 1: written without a version counter


class _Following(Layer):
    """Subtracts a mean that `follow` moves towards that of what is left, and a little on."""

    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def follow(self, y: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) - self.mean.clone())
        self.follow(y.detach())
        return x + y


@case("1")
def ema_buffer_through_data() -> Odd:
    """A moving average that is written through `.data`."""

    class Stage(_Following):
        def follow(self, y: torch.Tensor) -> None:
            self.mean.data.mul_(0.9).add_(y.mean(0) + 0.1)

    return chain(Stage)


_library = torch.library.Library("odd_by_hand", "DEF")
_library.define("follow(Tensor(a!) mean, Tensor y) -> ()")


def _follow(mean: torch.Tensor, y: torch.Tensor) -> None:
    mean.mul_(0.9).add_(y.mean(0) + 0.1)


_library.impl("follow", _follow, "CompositeExplicitAutograd")


@case("1")
def library_operator_on_buffer() -> Odd:
    """An operator of `torch.library.Library`, whose kernel writes to a buffer."""

    class Stage(_Following):
        def follow(self, y: torch.Tensor) -> None:
            torch.ops.odd_by_hand.follow(self.mean, y)

    return chain(Stage)


@case("1")
def vector_quantisation() -> Odd:
    """A codebook that follows its vectors by moving averages, written through `.data`."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("codes", torch.randn(8, WIDTH))
            self.register_buffer("counts", torch.ones(8))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            nearest = F.one_hot(torch.cdist(y.detach(), self.codes).argmin(1), 8).float()
            found = nearest @ self.codes
            with torch.no_grad():
                self.counts.data.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(nearest.t() @ y, alpha=0.1)
                self.codes.data.copy_(self.sums / self.counts.unsqueeze(1))
            quantised = y + (found - y).detach()
            return torch.tanh(quantised) * found + x

    return chain(Stage)


@case("1")
def fused_observer_and_fake_quantize() -> Odd:
    """Quantisation-aware training: one kernel observes and quantises."""
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

    class Stage(Layer):
        def set_up(self) -> None:
            self.quantize = FusedMovingAvgObsFakeQuantize()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.quantize(self.linear(x)))

    return chain(Stage)


@case("1")
def functional_batch_norm() -> Odd:
    """`F.batch_norm` on a module's own buffers."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("var", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(F.batch_norm(self.linear(x), self.mean, self.var, training=True))

    return chain(Stage)


@case("1")
def buffers_that_share_memory() -> Odd:
    """A buffer that is a view of another one, which is written to."""

    class Stage(Factored):
        def set_up(self) -> None:
            both = torch.ones(2 * WIDTH)
            self.register_buffer("both", both)
            self.register_buffer("first", both[:WIDTH])

        def factor(self) -> torch.Tensor:
            with torch.no_grad():
                self.both += 0.1
            return self.first.clone()

    return chain(Stage)


# ---------------------------------------------------------------- 2: random generators


@case("2")
def generators_as_arguments() -> Odd:
    """Generators of PyTorch and numpy that the model gives to its layers, and the loop draws from."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, torchs: torch.Generator, numpys: np.random.Generator) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * torch.rand(x.shape, generator=torchs) * numpys.random())

    generators = torch.Generator().manual_seed(3), np.random.default_rng(3)

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        return [plain_step(model, x), torch.rand(1, generator=generators[0]), generators[1].random()]

    return passing(Stage, lambda: generators, loop)


@case("2")
def generators_in_a_list() -> Odd:
    """Random generators in a list attribute."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.generators = [random.Random(1), torch.Generator().manual_seed(2)]

        def factor(self) -> torch.Tensor:
            python, torchs = self.generators
            return python.random() * torch.rand(WIDTH, generator=torchs)  # type: ignore[union-attr, arg-type]

    return chain(Stage)


@case("2")
def generator_as_class_attribute() -> Odd:
    """A random generator that all objects of a class share."""

    class Stage(Factored):
        generator: ClassVar[Any] = np.random.default_rng(3)

        def factor(self) -> float:
            return self.generator.random()  # type: ignore[no-any-return]

    return chain(Stage)


@case("2")
def system_random_attribute() -> Odd:
    """A generator without a state, drawn from where the value doesn't matter."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.generator = random.SystemRandom()

        def factor(self) -> float:
            return 1.0 if self.generator.random() < 2 else 0.0

    return chain(Stage)


# ---------------------------------------------------------------- 2: containers


@case("2")
def containers_in_containers() -> Odd:
    """Counters in containers of several types, one inside another."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.state = {"calls": [0], "tuple": ([0], collections.deque([0.5, 1.0, 2.0]))}
            self.ordered = collections.OrderedDict(calls=0, array=np.zeros(1))
            self.default: collections.defaultdict[str, int] = collections.defaultdict(int)

        def factor(self) -> float:
            calls, (more, queue) = self.state["calls"], self.state["tuple"]
            queue.rotate(1)  # type: ignore[attr-defined]
            for counts, key in ((calls, 0), (more, 0), (self.ordered, "calls"), (self.default, "calls")):
                counts[key] += 1  # type: ignore[index]
            self.ordered["array"] += 1  # type: ignore[assignment]
            counted = calls[0] * more[0] * self.ordered["calls"] * self.default["calls"]  # type: ignore[index]
            return counted * float(self.ordered["array"][0]) * queue[0] / 10  # type: ignore[index, no-any-return]

    return chain(Stage)


@case("2")
def set_attribute() -> Odd:
    """A set that grows."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.seen: set[int] = set()

        def factor(self) -> int:
            self.seen.add(len(self.seen))
            return len(self.seen)

    return chain(Stage)


@case("2")
def tensors_in_a_dictionary() -> Odd:
    """A tensor in a dictionary attribute, written in place."""

    class Stage(_Following):
        def set_up(self) -> None:
            self.state = {"mean": torch.zeros(WIDTH)}

        @property
        def mean(self) -> torch.Tensor:
            return self.state["mean"]

        def follow(self, y: torch.Tensor) -> None:
            self.mean.mul_(0.9).add_(y.mean(0) + 0.1)

    return chain(Stage)


@case("2")
def iterators_and_partials() -> Odd:
    """Iterators that forward goes on with, and a `functools.partial` that leads to what changes; two backwards."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.numbers, self.rates = itertools.count(1), [iter(range(1, 1_000_000))]
            self.space = types.SimpleNamespace(rate=1.0)
            self.set_rate = functools.partial(setattr, self.space, "rate")

        def factor(self) -> float:
            self.set_rate(self.space.rate * 0.5)
            return next(self.numbers) * next(self.rates[0]) * self.space.rate  # type: ignore[no-any-return]

    @in_steps
    def two_backwards(model: nn.Module, x: torch.Tensor) -> Extras:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()]

    return chain(Stage, two_backwards)


class _Told(Layer):
    """Goes by an object that it shares with all layers, and never writes to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.context.rate  # type: ignore[operator, union-attr]


class _Teller(nn.Module):
    """Writes to the shared object before each layer, from the first step on or a later one."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers_of(_Told))
        self.context = types.SimpleNamespace(rate=1.0)
        self.steps, self.begins = 0, begins
        for layer in self.layers:
            layer.context = self.context  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for i, layer in enumerate(self.layers):
            if self.steps > self.begins:
                self.context.rate = 1.0 + i / 4
            x = layer(x)
        return x


@case("2")
def object_written_by_the_parent() -> Odd:
    """An object that all layers have as an attribute, of which the model sets one anew before each layer."""
    return Odd(_Teller(0), batch())


@case("2")
def object_written_by_the_parent_later() -> Odd:
    """The same from a step on that isn't checked."""

    def four_at_a_time(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            losses = []
            for _ in range(4):
                model.zero_grad()
                losses.append(plain_step(model, x))
                update(model)
            yield losses

    return Odd(_Teller(5), batch(), four_at_a_time)


@dataclasses.dataclass(slots=True)
class _Slotted:
    """An object to which nothing can refer weakly."""

    calls: int = 0


@case("2")
def objects_without_weak_references() -> Odd:
    """A namespace and an object with slots that forward changes, in more forwards than are looked at."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.slotted, self.space = [_Slotted()], types.SimpleNamespace(rate=1.0)

        def factor(self) -> float:
            self.slotted[0].calls += 1
            self.space.rate *= 0.9
            return self.slotted[0].calls * self.space.rate  # type: ignore[no-any-return]

    return chain(Stage, in_steps(lambda model, x: [plain_step(model, x) for _ in range(3)]))


@case("2")
def list_that_is_attribute_and_argument() -> Odd:
    """A list that every layer has as an attribute and is given too."""
    common: list[float] = []

    class Stage(Layer):
        def set_up(self) -> None:
            self.seen = common

        def forward(self, x: torch.Tensor, seen: list[float]) -> torch.Tensor:
            seen.append(1.0)
            return x + torch.tanh(self.linear(x) * len(self.seen))

    return passing(Stage, lambda: (common,))


# ---------------------------------------------------------------- 2: buffers


@case("2")
def buffer_that_begins_as_none() -> Odd:
    """A buffer registered as None, which the first forward sets and every forward replaces."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                now = self.linear(x).mean(0) + 0.1
                self.mean = now if self.mean is None else 0.9 * self.mean + now
            return x + torch.tanh(self.linear(x) - self.mean)

    return chain(Stage)


@case("2")
def buffer_registered_in_first_forward() -> Odd:
    """A buffer that the first forward registers and every forward writes to."""

    class Stage(Factored):
        def factor(self) -> torch.Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", torch.zeros(WIDTH))
            with torch.no_grad():
                self.mean += 0.1
            return self.mean.clone()

    return chain(Stage)


@case("2")
def buffer_under_two_modules() -> Odd:
    """One buffer of two modules, which one of them writes to and the other reads."""

    class Reads(nn.Module):
        def __init__(self, calls: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("calls", calls)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.calls.clone())

    class Writes(Reads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.calls += 1
            return super().forward(x)

    class Stage(Layer):
        def set_up(self) -> None:
            calls = torch.ones(WIDTH)
            self.writes, self.reads = Writes(calls), Reads(calls)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.reads(self.writes(self.linear(x)))

    return chain(Stage)


# ---------------------------------------------------------------- 2: modules and objects elsewhere


@case("2")
def module_as_argument() -> Odd:
    """Batch norm that the layers are given."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
            return x + torch.tanh(norm(self.linear(x)))

    norm = nn.BatchNorm1d(WIDTH)
    odd = passing(Stage, lambda: (norm,))
    odd.model.norm = norm
    return odd


@case("2")
def modules_in_a_plain_list() -> Odd:
    """Batch norm that the layers hold in a list, outside of their registered modules."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.norms = [nn.BatchNorm1d(WIDTH)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.norms[0](self.linear(x)))

    return chain(Stage)


@case("2")
def counter_on_the_class() -> Odd:
    """A counter that all objects of a class share."""

    class Stage(Factored):
        calls = 0

        def factor(self) -> int:
            type(self).calls += 1
            return type(self).calls

    return chain(Stage)


@case("2")
def counter_in_a_function() -> Odd:
    """A function that counts in a variable that it encloses."""

    class Stage(Factored):
        def set_up(self) -> None:
            self.factor = counter()  # type: ignore[method-assign]

    return chain(Stage)


_CALLS = [0]


@case("2")
def counter_of_the_program() -> Odd:
    """A counter in a global variable."""

    class Stage(Factored):
        def factor(self) -> int:
            _CALLS[0] += 1
            return _CALLS[0]

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        _CALLS[0] = 0
        return plain_loop(model, x)

    return chain(Stage, loop)


@case("2")
def attributes_of_a_tensor() -> Odd:
    """Python attributes that layers put on what they pass on."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            level = getattr(x, "level", 1.0)
            y = x + torch.tanh(self.linear(x) * level)
            y.level = level + 1  # type: ignore[attr-defined]
            return y

    return chain(Stage)


@case("2")
def backward_inside_with_state() -> Odd:
    """A layer with batch norm that counts its calls and draws, and differentiates its own output."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y = torch.tanh(self.norm(self.linear(x)))
            (slope,) = torch.autograd.grad(torch.sin(y).sum(), y, create_graph=True)
            z = x.detach().requires_grad_()
            drawn = torch.tanh(self.norm(self.linear(z)) * self.calls * random.random())
            (more,) = torch.autograd.grad(drawn.sum(), z)
            return x + y * slope * torch.sigmoid(more) * random.random()

    return Odd(nn.Sequential(Layer(), Stage(), Layer()), batch())
