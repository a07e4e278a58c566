"""Models and loops for which a clear error will do, where none is needed in plain training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from odd.harness import BATCH, STEPS, WIDTH, Extras, Odd, case, in_steps, loss_of, plain_step
from odd.layers import Around, Bounded, Layer, around, batch, chain, in_turn, layer_of, layers_of, passing

# ---------------------------------------------------------------- weights


@case("errors")
def weight_data_in_forward() -> Odd:
    """`weight.data = ...` in a layer's forward."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.linear.weight.data = m.linear.weight.data.clamp(-0.1, 0.1) * 0.9
        return x + torch.tanh(m.linear(x))

    return chain(layer_of(forward))


@case("4")
def weight_data_written_in_forward() -> Odd:
    """`weight.data.mul_()` in a layer's forward."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.linear.weight.data.mul_(0.9)
        return x + torch.tanh(m.linear(x))

    return chain(layer_of(forward))


@case("4")
def weights_written_behind_each_layer() -> Odd:
    """The model shrinks a layer's weights through `.data` as soon as the layer has run."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
            layer.linear.weight.data.mul_(0.9)
        return x

    return around(forward)


@case("errors")
def optimizer_in_backward() -> Odd:
    """Every parameter is updated as soon as it has its gradient, the bias at a layer's end first."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[Extras]:
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.5)

            def apply(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(apply)
        for _ in range(STEPS):
            yield [plain_step(model, x)]

    stage = layer_of(lambda m, x: x + torch.tanh(m.linear(x)) + m.bias, bias=lambda: nn.Parameter(torch.zeros(WIDTH)))
    return chain(stage, loop)


@case("errors")
def cached_parametrization() -> Odd:
    """`parametrize.cached()` around two forwards of layers that use a weight twice, and around one of two backwards."""

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        with parametrize.cached():
            losses = [loss_of(model(x)), loss_of(model(0.5 * x))]
            losses[0].backward(retain_graph=True)  # of the weights, which both have in common
        losses[1].backward()
        return [loss.detach() for loss in losses]

    odd = chain(layer_of(lambda m, x: x + torch.tanh(m.linear(torch.sin(m.linear(x))))), loop)
    for each in odd.model:  # type: ignore[union-attr]
        parametrize.register_parametrization(each.linear, "weight", Bounded())
    return odd


# ---------------------------------------------------------------- gradients


@case("errors")
def backward_inside_forward() -> Odd:
    """A layer that runs `backward` for a loss of its own."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch.tanh(m.linear(x.detach())).square().mean().backward()
        return x + torch.tanh(m.linear(x))

    return chain(layer_of(forward))


@case("errors", says=("autograd.grad",))
def gradient_through_all_layers() -> Odd:
    """A model whose output is the gradient of its layers."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        x = y = x.detach().requires_grad_()
        for layer in layers:
            y = layer(y)
        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

    return around(forward)


@case("errors")
def gradient_between_layers() -> Odd:
    """A gradient of what lies between two layers."""

    def sloped(layer: Any, x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        return x * torch.autograd.grad(torch.sin(x).sum(), x, create_graph=True)[0]

    return around(in_turn(sloped))


@case("errors")
def retained_gradient() -> Odd:
    """`retain_grad` on what a layer makes, and its gradient read behind backward."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.made = torch.tanh(m.linear(x))
        m.made.retain_grad()
        return x + torch.sin(m.made)

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        loss = plain_step(model, x)
        return [loss, *(each.made.grad for each in model)]  # type: ignore[attr-defined]

    return chain(layer_of(forward), loop)


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.cos())
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x, _) = ctx.saved_tensors
        return gradient * ctx.saved_tensors[1] * (ctx.saved_tensors[0] == x)


@case("errors")
def saved_tensors_read_twice() -> Odd:
    """A custom function that reads `ctx.saved_tensors` more than once."""
    return chain(layer_of(lambda m, x: x + _ReadsTwice.apply(m.linear(x))))


# ---------------------------------------------------------------- arguments and outputs


@dataclasses.dataclass(slots=True)
class _Place:
    x: Any = None
    number: int = 0


@case("errors")
def mutated_dataclass_argument() -> Odd:
    """An object that the layers are given and count in."""

    def forward(m: Any, x: torch.Tensor, calls: _Place) -> torch.Tensor:
        calls.number += 1
        return x + torch.tanh(m.linear(x) * calls.number)

    return passing(layer_of(forward), lambda: (_Place(),))


@case("errors")
def object_replaced_between_layers() -> Odd:
    """An object that the layers read, and the model writes to between them."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        place = _Place(x)
        for each in layers:
            place.x = each(place)
        return place.x

    return around(forward, layer_of(lambda m, place: place.x + torch.tanh(m.linear(place.x))))


@case("errors")
def object_returned() -> Odd:
    """Layers from object to object."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        place = _Place(x)
        for each in layers:
            place = each(place)
        return place.x

    return around(forward, layer_of(lambda m, place: _Place(place.x + torch.tanh(m.linear(place.x)), place.number + 1)))


@case("errors")
def nothing_returned() -> Odd:
    """Layers that put their output in a list."""

    def in_box(m: Any, box: list[torch.Tensor]) -> None:
        box[0] = box[0] + torch.tanh(m.linear(box[0]))

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        box = [x]
        for each in layers:
            each(box)
        return box[0]

    return around(forward, layer_of(in_box))


@case("errors", says=("sparse",))
def sparse_input() -> Odd:
    """A sparse matrix among the inputs."""

    def forward(layers: Any, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(graph @ x)
        return x

    return Odd(Around(layers_of(Layer), forward), (batch(), torch.eye(BATCH).to_sparse_csr()))


@case("errors", says=("nested",))
def nested_tensors_inside() -> Odd:
    """Layers on a nested tensor."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        parts = torch.nested.as_nested_tensor([x[:10], x[10:]], layout=torch.jagged)
        for layer in layers:
            parts = layer(parts)
        return parts.values()

    return around(forward)


# ---------------------------------------------------------------- modules and forwards


@case("errors", says=("one forward", "Lazy"))
def lazy_linear() -> Odd:
    """`LazyLinear`, which has no weights before the first forward."""
    return chain(layer_of(lambda m, x: x + torch.tanh(m.linear(x)), linear=lambda: nn.LazyLinear(WIDTH)))


@case("errors")
def scripted_module() -> Odd:
    """A scripted module in a layer."""
    return chain(
        layer_of(lambda m, x: x + torch.tanh(m.linear(x)), linear=lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)))
    )


@case("errors")
def forward_that_is_a_property() -> Odd:
    """A function whose class computes its forward."""

    class Sine(nn.Module):
        @property
        def forward(self) -> Any:
            return torch.sin

    return chain(layer_of(lambda m, x: x + m.function(m.linear(x)), function=Sine))


@case("errors", says=("itself", "recursi"))
def layers_that_call_each_other() -> Odd:
    """A layer that calls itself by way of another module, twice in a step."""

    class Way(nn.Module):
        def forward(self, layer: nn.Module, x: torch.Tensor, depth: int) -> torch.Tensor:
            return layer(x, depth)  # type: ignore[no-any-return]

    def again(m: Any, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y = x + torch.tanh(m.linear(x))
        return m.way(m, y, depth - 1) if depth else y

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for each in (*layers, *layers):
            x = each(x)
        return x

    stage = layer_of(again, way=Way)
    return Odd(Around((stage() for _ in range(2)), forward), batch())


@case("errors", says=("torch.func",))
def functional_gradient_inside() -> Odd:
    """`torch.func.grad` in a layer."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(m.linear(y)).sum())(x)
        return x + torch.tanh(m.linear(x) * slope)

    return chain(layer_of(forward))
