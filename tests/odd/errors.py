"""Models and loops for which a clear error will do, where none is needed in plain training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from odd.harness import STEPS, WIDTH, Extras, Odd, case, loss_of, plain_step, update
from odd.layers import Layer, chain, passing


@case("errors")
def gradient_inside_forward() -> Odd:
    """`torch.autograd.grad` in a layer's forward."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(torch.sin(y).sum(), y, create_graph=True)
            return x + y * slope

    return chain(Stage)


@case("errors")
def weight_copied_in_forward() -> Odd:
    """`weight.copy_` in a layer's forward."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.linear.weight.copy_(self.linear.weight.clamp(-0.1, 0.1) * 0.9)
            return x + torch.tanh(self.linear(x))

    return chain(Stage)


@case("errors")
def weight_data_in_forward() -> Odd:
    """`weight.data = ...` in a layer's forward."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1) * 0.9
            return x + torch.tanh(self.linear(x))

    return chain(Stage)


@case("4")
def weight_data_written_in_forward() -> Odd:
    """`weight.data.mul_()` in a layer's forward."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.data.mul_(0.9)
            return x + torch.tanh(self.linear(x))

    return chain(Stage)


@case("errors")
def retained_gradient() -> Odd:
    """`retain_grad` on what a layer makes, and its gradient read behind backward."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            y.retain_grad()
            self.made = y
            return x + torch.sin(y)

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            model.zero_grad()
            loss = plain_step(model, x)
            update(model)
            yield [loss, *(layer.made.grad for layer in model)]  # type: ignore[attr-defined]

    return chain(Stage, loop)


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x) * (ctx.saved_tensors[0] == x)


@case("errors")
def saved_tensors_read_twice() -> Odd:
    """A custom function that reads `ctx.saved_tensors` twice."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + _ReadsTwice.apply(self.linear(x))

    return chain(Stage)


@dataclasses.dataclass
class _Calls:
    number: int = 0


@case("errors")
def mutated_dataclass_argument() -> Odd:
    """An object that the layers are given and count in."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, calls: _Calls) -> torch.Tensor:
            calls.number += 1
            return x + torch.tanh(self.linear(x) * calls.number)

    return passing(Stage, lambda model: (_Calls(),))


@case("errors")
def sparse_buffer() -> Odd:
    """A sparse matrix in a buffer."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.register_buffer("graph", torch.eye(WIDTH).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(torch.sparse.mm(self.graph, self.linear(x).t()).t())

    return chain(Stage)


@case("errors", says=("one forward", "Lazy"))
def lazy_linear() -> Odd:
    """`LazyLinear`, which has no weights before the first forward."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.linear = nn.LazyLinear(WIDTH)

    return chain(Stage)


@case("errors", says=("itself", "recursi"))
def recursive_stage() -> Odd:
    """A layer that calls itself."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = x + torch.tanh(self.linear(x))
            return self(y, depth - 1) if depth else y

    return chain(Stage)


class _Bounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(weight)


@case("errors")
def cached_parametrization_over_two_forwards() -> Odd:
    """`parametrize.cached()` around two forwards."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for _ in range(STEPS):
            model.zero_grad()
            with parametrize.cached():
                loss = loss_of(model(x)) + loss_of(model(0.5 * x))
            loss.backward()
            update(model)
            yield [loss.detach()]

    odd = chain(Layer, loop)
    for layer in odd.model:  # type: ignore[union-attr]
        parametrize.register_parametrization(layer.linear, "weight", _Bounded())
    return odd


@case("errors")
def optimizer_in_backward() -> Odd:
    """Every parameter is updated as soon as it has its gradient, the bias at a layer's end first."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x)) + self.bias

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

        def apply(p: torch.Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(apply)
        for _ in range(STEPS):
            yield [plain_step(model, x)]

    return chain(Stage, loop)
