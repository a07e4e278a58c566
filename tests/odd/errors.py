"""Models and loops for which a clear error will do, where none is needed in plain training."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from odd.harness import BATCH, STEPS, WIDTH, Extras, Odd, case, loss_of, plain_step, update
from odd.layers import DEPTH, Layer, Passing, batch, chain, passing


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


@case("errors")
def scripted_module() -> Odd:
    """A scripted module in a layer."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.linear = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    return chain(Stage)


# ---------------------------------------------------------------- of the same kind


@case("errors")
def backward_inside_forward() -> Odd:
    """A layer that runs `backward` for a loss of its own."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.tanh(self.linear(x.detach())).square().mean().backward()
            return x + torch.tanh(self.linear(x))

    return chain(Stage)


class _Forces(nn.Module):
    """Layers whose sum is differentiated by their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = x.detach().requires_grad_()
        for layer in self.layers:
            y = layer(y)
        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


@case("errors", says=("autograd.grad",))
def gradient_through_all_layers() -> Odd:
    """A model whose output is the gradient of its layers."""
    return Odd(_Forces(), batch())


@case("errors")
def gradient_between_layers() -> Odd:
    """A gradient of what lies between two layers."""

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                (slope,) = torch.autograd.grad(torch.sin(x).sum(), x, create_graph=True)
                x = x * slope
            return x

    return Odd(Model((Layer() for _ in range(DEPTH)), lambda model: ()), batch())


@case("errors")
def scale_clamped_in_forward() -> Odd:
    """A scale that forward keeps within bounds."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale.data.clamp_(0, 1)
            return x + torch.tanh(self.linear(x)) * self.scale.exp()

    return chain(Stage)


@case("4")
def weights_written_behind_each_layer() -> Odd:
    """The model shrinks a layer's weights through `.data` as soon as the layer has run."""

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                layer.linear.weight.data.mul_(0.9)  # type: ignore[union-attr, operator]
            return x

    return Odd(Model((Layer() for _ in range(DEPTH)), lambda model: ()), batch())


@case("errors")
def saved_tensors_read_one_by_one() -> Odd:
    """A custom function that reads `ctx.saved_tensors` by index."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + Product.apply(torch.tanh(self.linear(x)), torch.sin(x))  # type: ignore[operator]

    return chain(Stage)


@dataclasses.dataclass(slots=True)
class _Place:
    x: torch.Tensor
    number: int = 0


@case("errors")
def object_replaced_between_layers() -> Odd:
    """An object that the layers read, and the model writes to between them."""

    class Stage(Layer):
        def forward(self, place: Any) -> torch.Tensor:
            return super().forward(place.x)

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            place = _Place(x)
            for layer in self.layers:
                place.x = layer(place)
            return place.x

    return Odd(Model((Stage() for _ in range(DEPTH)), lambda model: ()), batch())


@case("errors")
def object_returned() -> Odd:
    """Layers from object to object."""

    class Stage(Layer):
        def forward(self, place: Any) -> Any:
            return _Place(super().forward(place.x), place.number + 1)

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            place = _Place(x)
            for layer in self.layers:
                place = layer(place)
            return place.x

    return Odd(Model((Stage() for _ in range(DEPTH)), lambda model: ()), batch())


@case("errors")
def nothing_returned() -> Odd:
    """Layers that put their output in a list."""

    class Stage(Layer):
        def forward(self, box: list[torch.Tensor]) -> None:  # type: ignore[override]
            box[0] = super().forward(box[0])

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            box = [x]
            for layer in self.layers:
                layer(box)
            return box[0]

    return Odd(Model((Stage() for _ in range(DEPTH)), lambda model: ()), batch())


@case("errors")
def forward_that_is_a_property() -> Odd:
    """A function whose class computes its forward."""

    class Sine(nn.Module):
        @property
        def forward(self) -> Any:
            return torch.sin

    class Stage(Layer):
        def set_up(self) -> None:
            self.function = Sine()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.function(self.linear(x))

    return chain(Stage)


@case("errors")
def layers_that_call_each_other() -> Odd:
    """A layer that calls itself by way of another module, twice in a step."""

    class Way(nn.Module):
        def forward(self, layer: nn.Module, x: torch.Tensor, depth: int) -> torch.Tensor:
            return layer(x, depth)  # type: ignore[no-any-return]

    class Stage(Layer):
        def set_up(self) -> None:
            self.way = Way()

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = x + torch.tanh(self.linear(x))
            return self.way(self, y, depth - 1) if depth else y

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return x

    return Odd(Model((Stage() for _ in range(2)), lambda model: ()), batch())


@case("errors")
def cached_parametrization_in_one_forward() -> Odd:
    """`parametrize.cached()` around a forward, and once around the backward, of layers that use a weight twice."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(torch.sin(self.linear(x))))

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for step in range(STEPS):
            model.zero_grad()
            with parametrize.cached():
                loss = loss_of(model(x))
                if step == 1:
                    loss.backward()
            if step != 1:
                loss.backward()
            update(model)
            yield [loss.detach()]

    odd = chain(Stage, loop)
    for layer in odd.model:  # type: ignore[union-attr]
        parametrize.register_parametrization(layer.linear, "weight", _Bounded())
    return odd


@case("errors", says=("torch.func",))
def vmap_inside() -> Odd:
    """`torch.vmap` in a layer."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.vmap(lambda row: torch.tanh(self.linear(row)))(x)

    return chain(Stage)


@case("errors", says=("torch.func",))
def functional_gradient_inside() -> Odd:
    """`torch.func.grad` in a layer."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda y: torch.tanh(self.linear(y)).sum())(x)
            return x + torch.tanh(self.linear(x) * slope)

    return chain(Stage)


@case("errors", says=("sparse",))
def sparse_input() -> Odd:
    """A sparse matrix among the inputs."""

    class Model(Passing):
        def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            for layer in self.layers:
                x = layer(graph @ x)
            return x

    def loop(model: nn.Module, given: Any) -> Iterator[Extras]:
        for _ in range(STEPS):
            model.zero_grad()
            loss = loss_of(model(*given))
            loss.backward()
            update(model)
            yield [loss.detach()]

    graph = torch.eye(BATCH).to_sparse_csr()
    return Odd(Model((Layer() for _ in range(DEPTH)), lambda model: ()), (batch(), graph), loop)


@case("errors", says=("nested",))
def nested_tensors_inside() -> Odd:
    """Layers on a nested tensor."""

    class Model(Passing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = torch.nested.as_nested_tensor([x[:10], x[10:]], layout=torch.jagged)
            for layer in self.layers:
                parts = layer(parts)
            return parts.values()

    return Odd(Model((Layer() for _ in range(DEPTH)), lambda model: ()), batch())


@case("2")
def drawn_from_secrets() -> Odd:
    """A draw from the system's entropy, where the value doesn't matter."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * (1.0 if secrets.randbelow(10) < 10 else 0.0))

    return chain(Stage)
