"""State: written without a version counter (item 1), or where it isn't looked for (item 2)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from odd.generated.parts import GLOBAL, PARTS, Shared
from odd.harness import STEPS, WIDTH, Extras, Odd, case, in_steps, loss_of, plain_loop, plain_step, update
from odd.layers import Layer, batch, buffer, chain, factored, layer_of, layers_of, passing

# ---------------------------------------------------------------- a part of the random models alone


def _of_part(item: str, name: str, part: str, about: str) -> None:
    """Register layers that have a part of the random models behind their product."""
    odd = PARTS[part]

    def build() -> Odd:
        shared = Shared(random.Random(0))

        class Stage(Layer):
            def set_up(self) -> None:
                odd.set_up(self, shared)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + odd.change(self, self.linear(x))

        for attribute, value in odd.of_class().items() if odd.of_class is not None else ():
            setattr(Stage, attribute, value)

        def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
            GLOBAL["calls"] = 0
            return plain_loop(model, x)

        return Odd(nn.Sequential(*layers_of(Stage)), torch.randn(8, 8, WIDTH), loop)

    build.__name__, build.__doc__ = name, about
    case(item)(build)


for _item, _name, _part, _about in (
    ("1", "ema_buffer_through_data", "buffer through .data", "A moving average that is written through `.data`."),
    ("1", "fused_observer_and_fake_quantize", "fake quantize", "One kernel observes and quantises, as for int8."),
    ("1", "buffers_that_share_memory", "buffer that is a view", "A buffer that is a view of one which is written to."),
    ("2", "generators_in_a_list", "generators in attributes", "Random generators in a list and a dictionary."),
    ("2", "set_attribute", "set", "A set that grows."),
    ("2", "buffer_that_begins_as_none", "buffer that begins as None", "A buffer that the first forward sets."),
    ("2", "buffer_registered_in_first_forward", "buffer registered late", "A buffer that the first forward registers."),
    ("2", "modules_in_a_plain_list", "module in a list", "Batch norm in a list, outside of the registered modules."),
    ("2", "counter_on_the_class", "class attribute", "A counter that all objects of a class share."),
    ("2", "counter_in_a_function", "closure", "A function that counts in a variable that it encloses."),
    ("2", "counter_of_the_program", "global counter", "A counter in a global variable."),
    ("2", "attributes_of_a_tensor", "attribute of a tensor", "Attributes that layers put on what they pass on."),
    ("7", "layer_made_in_first_forward", "module made late", "A module that the first forward makes, and is trained."),
    ("7", "attribute_made_in_first_forward", "attribute made late", "A table that the first forward computes."),
):
    _of_part(_item, _name, _part, _about)


# ---------------------------------------------------------------- 1: written without a version counter


_library = torch.library.Library("odd_by_hand", "DEF")
_library.define("follow(Tensor(a!) mean, Tensor y) -> ()")


def _follow(mean: torch.Tensor, y: torch.Tensor) -> None:
    mean.mul_(0.9).add_(y.mean(0) + 0.1)


_library.impl("follow", _follow, "CompositeExplicitAutograd")


@case("1")
def library_operator_on_buffer() -> Odd:
    """An operator of `torch.library.Library`, whose kernel writes to a buffer."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.linear(x) - m.mean.clone())
        torch.ops.odd_by_hand.follow(m.mean, y.detach())
        return x + y

    return chain(layer_of(forward, mean=buffer()))


@case("1")
def vector_quantisation() -> Odd:
    """A codebook that follows its vectors by moving averages, written through `.data`."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        nearest = F.one_hot(torch.cdist(y.detach(), m.codes).argmin(1), 8).float()
        found = nearest @ m.codes
        with torch.no_grad():
            m.counts.data.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
            m.sums.data.mul_(0.9).add_(nearest.t() @ y, alpha=0.1)
            m.codes.data.copy_(m.sums / m.counts.unsqueeze(1))
        quantised = y + (found - y).detach()
        return torch.tanh(quantised) * found + x

    codes = buffer(lambda: torch.randn(8, WIDTH))
    return chain(layer_of(forward, codes=codes, counts=buffer(lambda: torch.ones(8)), sums=codes))


@case("1")
def functional_batch_norm() -> Odd:
    """`F.batch_norm` on a module's own buffers."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(F.batch_norm(m.linear(x), m.mean, m.var, training=True))

    return chain(layer_of(forward, mean=buffer(), var=buffer(lambda: torch.ones(WIDTH))))


# ---------------------------------------------------------------- 2: random generators


@case("2")
def generators_as_arguments() -> Odd:
    """Generators of PyTorch and numpy that the model gives to its layers, and the loop draws from."""
    generators = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def forward(m: Any, x: torch.Tensor, torchs: torch.Generator, numpys: np.random.Generator) -> torch.Tensor:
        return x + torch.tanh(m.linear(x) * torch.rand(x.shape, generator=torchs) * numpys.random())

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        return [plain_step(model, x), torch.rand(1, generator=generators[0]), generators[1].random()]

    return passing(layer_of(forward), lambda: generators, loop)


@case("2")
def generator_as_class_attribute() -> Odd:
    """A random generator that all objects of a class share."""
    stage = factored(lambda m: m.generator.random())
    stage.generator = np.random.default_rng(3)  # type: ignore[attr-defined]
    return chain(stage)


@case("2")
def system_random_attribute() -> Odd:
    """A generator without a state, drawn from where the value doesn't matter."""
    return chain(factored(lambda m: 1.0 if m.generator.random() < 2 else 0.0, generator=random.SystemRandom))


# ---------------------------------------------------------------- 2: containers


@case("2")
def containers_in_containers() -> Odd:
    """Counters in containers of several types, one inside another."""

    def factor(m: Any) -> float:
        calls, (more, queue) = m.state["calls"], m.state["tuple"]
        queue.rotate(1)
        for counts, key in ((calls, 0), (more, 0), (m.ordered, "calls"), (m.default, "calls")):
            counts[key] += 1
        m.ordered["array"] += 1
        counted = calls[0] * more[0] * m.ordered["calls"] * m.default["calls"]
        return counted * float(m.ordered["array"][0]) * queue[0] / 10  # type: ignore[no-any-return]

    return chain(
        factored(
            factor,
            state=lambda: {"calls": [0], "tuple": ([0], collections.deque([0.5, 1.0, 2.0]))},
            ordered=lambda: collections.OrderedDict(calls=0, array=np.zeros(1)),
            default=lambda: collections.defaultdict(int),
        )
    )


@case("2")
def tensors_in_a_dictionary() -> Odd:
    """A tensor in a dictionary attribute, written in place."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(m.linear(x) - m.state["mean"].clone())
        _follow(m.state["mean"], y.detach())
        return x + y

    return chain(layer_of(forward, state=lambda: {"mean": torch.zeros(WIDTH)}))


@case("2")
def iterators_and_partials() -> Odd:
    """Iterators that forward goes on with, and a `functools.partial` that leads to what changes; two backwards."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.numbers, self.rates = itertools.count(1), [iter(range(1, 1_000_000))]
            self.space = types.SimpleNamespace(rate=1.0)
            self.set_rate = functools.partial(setattr, self.space, "rate")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.set_rate(self.space.rate * 0.5)
            factor = next(self.numbers) * next(self.rates[0]) * self.space.rate
            return x + torch.tanh(self.linear(x) * factor)

    @in_steps
    def two_backwards(model: nn.Module, x: torch.Tensor) -> Extras:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()]

    return chain(Stage, two_backwards)


class _Teller(nn.Module):
    """Writes to an object before each layer, which goes by it, from the first step on or a later one."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.context = types.SimpleNamespace(rate=1.0)
        told = layer_of(lambda m, x: (x + torch.tanh(m.linear(x))) * m.context.rate, context=lambda: self.context)
        self.layers = nn.ModuleList(layers_of(told))
        self.steps, self.begins = 0, begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for i, each in enumerate(self.layers):
            if self.steps > self.begins:
                self.context.rate = 1.0 + i / 4
            x = each(x)
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

    def factor(m: Any) -> float:
        m.slotted[0].calls += 1
        m.space.rate *= 0.9
        return m.slotted[0].calls * m.space.rate  # type: ignore[no-any-return]

    stage = factored(factor, slotted=lambda: [_Slotted()], space=lambda: types.SimpleNamespace(rate=1.0))
    return chain(stage, in_steps(lambda model, x: [plain_step(model, x) for _ in range(3)]))


@case("2")
def list_that_is_attribute_and_argument() -> Odd:
    """A list that every layer has as an attribute and is given too."""
    common: list[float] = []

    def forward(m: Any, x: torch.Tensor, seen: list[float]) -> torch.Tensor:
        seen.append(1.0)
        return x + torch.tanh(m.linear(x) * len(m.seen))

    return passing(layer_of(forward, seen=lambda: common), lambda: (common,))


# ---------------------------------------------------------------- 2: modules and objects elsewhere


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

    def both() -> nn.Module:
        calls = torch.ones(WIDTH)
        return nn.Sequential(Writes(calls), Reads(calls))

    return chain(layer_of(lambda m, x: x + m.both(m.linear(x)), both=both))


@case("2")
def module_as_argument() -> Odd:
    """Batch norm that the layers are given."""
    norm = nn.BatchNorm1d(WIDTH)
    odd = passing(layer_of(lambda m, x, norm: x + torch.tanh(norm(m.linear(x)))), lambda: (norm,))
    odd.model.norm = norm
    return odd


@case("2")
def backward_inside_with_state() -> Odd:
    """A layer with batch norm that counts its calls and draws, and differentiates its own output."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        y = torch.tanh(m.norm(m.linear(x)))
        (slope,) = torch.autograd.grad(torch.sin(y).sum(), y, create_graph=True)
        z = x.detach().requires_grad_()
        drawn = torch.tanh(m.norm(m.linear(z)) * m.calls * random.random())
        (more,) = torch.autograd.grad(drawn.sum(), z)
        return x + y * slope * torch.sigmoid(more) * random.random()

    stage = layer_of(forward, norm=lambda: nn.BatchNorm1d(WIDTH), calls=lambda: 0)
    return Odd(nn.Sequential(Layer(), stage(), Layer()), batch())
