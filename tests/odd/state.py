"""State: written without a version counter (item 1), or where it isn't looked for (item 2)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from odd.harness import STEPS, WIDTH, Extras, Odd, case, loss_of, plain_loop, plain_step, update
from odd.layers import DEPTH, Layer, batch, chain, passing

# ---------------------------------------------------------------- 1: written without a version counter


@case("1")
def ema_buffer_through_data() -> Odd:
    """A moving average that is written through `.data`."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) - self.mean.clone())
            self.mean.data.mul_(0.9).add_(y.detach().mean(0) + 0.1)
            return x + y

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
def foreach_on_buffers() -> Odd:
    """`torch._foreach_*` on buffers."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("largest", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) - self.mean.clone())
            with torch.no_grad():
                torch._foreach_mul_([self.mean, self.largest], 0.9)
                torch._foreach_add_([self.mean, self.largest], [y.mean(0) + 0.1, y.amax(0)])
            return x + torch.tanh(y * torch.exp(self.largest.clone()))

    return chain(Stage)


@torch.library.custom_op("odd::follow", mutates_args={"mean"})
def follow(mean: torch.Tensor, y: torch.Tensor) -> None:
    """Move `mean` towards the mean of `y`."""
    mean.mul_(0.9).add_(y.mean(0) + 0.1)


@follow.register_fake
def _(mean: torch.Tensor, y: torch.Tensor) -> None:
    return None


@case("1")
def custom_operator_on_buffer() -> Odd:
    """An operator of `torch.library` that writes to a buffer."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) - self.mean.clone())
            torch.ops.odd.follow(self.mean, y.detach())
            return x + y

    return chain(Stage)


_library = torch.library.Library("odd_by_hand", "DEF")
_library.define("follow(Tensor(a!) mean, Tensor y) -> ()")
_library.impl("follow", lambda mean, y: follow._init_fn(mean, y), "CompositeExplicitAutograd")


@case("1")
def library_operator_on_buffer() -> Odd:
    """An operator of `torch.library.Library`, whose kernel writes to a buffer."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) - self.mean.clone())
            torch.ops.odd_by_hand.follow(self.mean, y.detach())
            return x + y

    return chain(Stage)


@case("1")
def buffers_that_share_memory() -> Odd:
    """A buffer that is a view of another one, which is written to."""

    class Stage(Layer):
        def set_up(self) -> None:
            both = torch.ones(2 * WIDTH)
            self.register_buffer("both", both)
            self.register_buffer("first", both[:WIDTH])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.both += 0.1
            return x + torch.tanh(self.linear(x) * self.first.clone())

    return chain(Stage)


# ---------------------------------------------------------------- 2: random generators


@case("2")
def torch_generator_argument() -> Odd:
    """A `torch.Generator` that the model gives to its layers."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * torch.rand(x.shape, generator=generator))

    generator = torch.Generator().manual_seed(3)
    return passing(Stage, lambda model: (generator,), _with_draws(generator))


@case("2")
def numpy_generator_argument() -> Odd:
    """A numpy generator that the model gives to its layers."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * generator.random())

    generator = np.random.default_rng(3)
    return passing(Stage, lambda model: (generator,), _with_draws(generator))


def _with_draws(generator: Any) -> Any:
    """A loop that also yields what a generator gives next."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            model.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            drawn = torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
            yield [loss.detach(), drawn]

    return loop


@case("2")
def generators_in_a_list() -> Odd:
    """Random generators in a list attribute."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.generators = [random.Random(1), torch.Generator().manual_seed(2)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            python, torchs = self.generators
            return x + torch.tanh(self.linear(x) * python.random() * torch.rand(WIDTH, generator=torchs))  # type: ignore[union-attr, arg-type]

    return chain(Stage)


@case("2")
def generator_as_class_attribute() -> Odd:
    """A random generator that all objects of a class share."""

    class Stage(Layer):
        generator: ClassVar[Any] = np.random.default_rng(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * self.generator.random())

    return chain(Stage)


@case("2")
def system_random_attribute() -> Odd:
    """A generator without a state, drawn from where the value doesn't matter."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.generator = random.SystemRandom()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * (1.0 if self.generator.random() < 2 else 0.0))

    return chain(Stage)


# ---------------------------------------------------------------- 2: containers


@case("2")
def dictionary_of_lists() -> Odd:
    """A counter in a list in a dictionary."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.state = {"calls": [0]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state["calls"][0] += 1
            return x + torch.tanh(self.linear(x) * self.state["calls"][0])

    return chain(Stage)


@case("2")
def tuple_of_lists() -> Odd:
    """A counter in a list in a tuple."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.state = ([0], [1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state[0][0] += 1
            return x + torch.tanh(self.linear(x) * self.state[0][0])

    return chain(Stage)


@case("2")
def set_attribute() -> Odd:
    """A set that grows."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.seen: set[int] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add(len(self.seen))
            return x + torch.tanh(self.linear(x) * len(self.seen))

    return chain(Stage)


@case("2")
def set_argument() -> Odd:
    """A set that the layers are given and add to."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, seen: set[int]) -> torch.Tensor:
            seen.add(len(seen))
            return x + torch.tanh(self.linear(x) * len(seen))

    return passing(Stage, lambda model: (set(),))


@case("2")
def tensors_in_a_dictionary() -> Odd:
    """A tensor in a dictionary attribute, written in place."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.state = {"mean": torch.zeros(WIDTH)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x) - self.state["mean"].clone())
            with torch.no_grad():
                self.state["mean"].mul_(0.9).add_(y.mean(0) + 0.1)
            return x + y

    return chain(Stage)


@case("2")
def ordered_and_default_dictionaries() -> Odd:
    """Counters in dictionaries of other types than `dict`."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.ordered = collections.OrderedDict(calls=0)
            self.default: collections.defaultdict[str, int] = collections.defaultdict(int)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.ordered["calls"] += 1
            self.default["calls"] += 1
            return x + torch.tanh(self.linear(x) * self.ordered["calls"] * self.default["calls"])

    return chain(Stage)


@case("2")
def ordered_dictionary() -> Odd:
    """A counter in an `OrderedDict`."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.state = collections.OrderedDict(calls=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state["calls"] += 1
            return x + torch.tanh(self.linear(x) * self.state["calls"])

    return chain(Stage)


@case("2")
def deque_attribute() -> Odd:
    """A queue that turns."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.queue = collections.deque([0.5, 1.0, 2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.queue.rotate(1)
            return x + torch.tanh(self.linear(x) * self.queue[0])

    return chain(Stage)


@case("2")
def numpy_array_attribute() -> Odd:
    """A numpy array, written in place."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.calls = np.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + torch.tanh(self.linear(x) * float(self.calls[0]))

    return chain(Stage)


@case("2")
def iterator_attribute() -> Odd:
    """Iterators that forward goes on with, through two backwards."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.numbers, self.rates = itertools.count(1), [iter(range(1, 1_000_000))]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * next(self.numbers) * next(self.rates[0]))

    return chain(Stage, _two_backwards)


def _two_backwards(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
    for _ in range(STEPS):
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        yield [loss.detach()]


@case("2")
def partial_attribute() -> Odd:
    """A `functools.partial`, some of whose attributes can't be set, that leads to what changes."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.space = types.SimpleNamespace(rate=1.0)
            self.set_rate = functools.partial(setattr, self.space, "rate")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.set_rate(self.space.rate * 0.5)
            return x + torch.tanh(self.linear(x) * self.space.rate)

    return chain(Stage)


class _Told(Layer):
    """Goes by an object that it shares with all layers, and never writes to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.context.rate  # type: ignore[operator, union-attr]


class _Teller(nn.Module):
    """Writes to the shared object before each layer, from the first step on or a later one."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Told() for _ in range(DEPTH))
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
    return Odd(_Teller(5), batch(), loop=_four_at_a_time)


def _four_at_a_time(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
    for _ in range(STEPS):
        losses = []
        for _ in range(4):
            model.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            update(model)
            losses.append(loss.detach())
            del loss
        yield losses


@dataclasses.dataclass(slots=True)
class _Slotted:
    """An object to which nothing can refer weakly."""

    calls: int = 0


@case("2")
def objects_without_weak_references() -> Odd:
    """A namespace and an object with slots that forward changes, in more forwards than are looked at."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.slotted, self.space = [_Slotted()], types.SimpleNamespace(rate=1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.slotted[0].calls += 1
            self.space.rate *= 0.9
            return x + torch.tanh(self.linear(x) * self.slotted[0].calls * self.space.rate)

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            model.zero_grad()
            losses = [plain_step(model, x) for _ in range(3)]
            update(model)
            yield losses

    return chain(Stage, loop)


@case("2")
def list_that_is_attribute_and_argument() -> Odd:
    """A list that every layer has as an attribute and is given too."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.seen: list[float] = []

        def forward(self, x: torch.Tensor, seen: list[float]) -> torch.Tensor:
            seen.append(1.0)
            return x + torch.tanh(self.linear(x) * len(self.seen))

    odd = passing(Stage, lambda model: (model.seen,))
    odd.model.seen = []  # type: ignore[assignment]
    for layer in odd.model.layers:  # type: ignore[union-attr]
        layer.seen = odd.model.seen
    return odd


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
def buffer_that_begins_as_none_in_place() -> Odd:
    """A buffer registered as None, which the first forward sets and every forward writes to."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("mean", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                if self.mean is None:
                    self.mean = torch.zeros(WIDTH)
                self.mean += 0.1
            return x + torch.tanh(self.linear(x) - self.mean.clone())

    return chain(Stage)


@case("2")
def buffer_registered_in_first_forward() -> Odd:
    """A buffer that the first forward registers and every forward writes to."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", torch.zeros(WIDTH))
            with torch.no_grad():
                self.mean += 0.1
            return x + torch.tanh(self.linear(x) - self.mean.clone())

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

    odd = passing(Stage, lambda model: (model.norm,))
    odd.model.norm = nn.BatchNorm1d(WIDTH)
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

    class Stage(Layer):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return x + torch.tanh(self.linear(x) * type(self).calls)

    return chain(Stage)


@case("2")
def counter_on_the_parent() -> Odd:
    """A counter of the model, which the layers know by a plain list."""

    class Stage(Layer):
        parent: list[nn.Module]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.parent[0].calls += 1  # type: ignore[operator]
            return x + torch.tanh(self.linear(x) * self.parent[0].calls)  # type: ignore[operator]

    odd = chain(Stage)
    odd.model.calls = 0  # type: ignore[assignment]
    for layer in odd.model:  # type: ignore[union-attr]
        layer.parent = [odd.model]
    return odd


class _Counter:
    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> int:
        self.calls += 1
        return self.calls


@case("2")
def counter_in_an_object() -> Odd:
    """A plain object with a counter."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.counter = _Counter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * self.counter.next())

    return chain(Stage)


@case("2")
def counter_in_a_function() -> Odd:
    """A function that counts in a variable that it encloses."""

    def counter() -> Callable[[], int]:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        return count

    class Stage(Layer):
        def set_up(self) -> None:
            self.count = counter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * self.count())

    return chain(Stage)


_CALLS = [0]


@case("2")
def counter_of_the_program() -> Odd:
    """A counter in a global variable."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _CALLS[0] += 1
            return x + torch.tanh(self.linear(x) * _CALLS[0])

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        _CALLS[0] = 0
        return plain_loop(model, x)

    return chain(Stage, loop)


@case("2")
def counter_without_effect() -> Odd:
    """A layer that counts its calls in a list, for nothing that it computes."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.calls: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.append(len(self.calls))
            return super().forward(x)

    return chain(Stage)


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


# ---------------------------------------------------------------- 2: a backward inside of forward


@case("2")
def backward_inside_with_batch_norm() -> Odd:
    """A layer that differentiates its own output, which batch norm made."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.norm(self.linear(x)))
            (slope,) = torch.autograd.grad(torch.sin(y).sum(), y, create_graph=True)
            z = x.detach().requires_grad_()
            (more,) = torch.autograd.grad(torch.tanh(self.norm(self.linear(z))).sum(), z)
            return x + y * slope * torch.sigmoid(more)

    return _with_one(Stage)


@case("2")
def backward_inside_with_python_state() -> Odd:
    """A layer that counts its calls and draws from Python's generator, and differentiates its own output."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            z = x.detach().requires_grad_()
            y = torch.tanh(self.linear(z) * self.calls * random.random())
            (slope,) = torch.autograd.grad(y.sum(), z, create_graph=True)
            return x + torch.tanh(self.linear(x) * slope * random.random())

    return _with_one(Stage)


def _with_one(kind: type[nn.Module]) -> Odd:
    return Odd(nn.Sequential(Layer(), kind(), Layer()), batch())
