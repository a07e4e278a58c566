"""Parameters that change before the recompute (item 4), and copies of layers (6)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from odd.harness import BATCH, STEPS, WIDTH, Odd, between, case, loss_of, one_forward_of, plain_loop, plain_step, update
from odd.layers import Layer, chain, layer_of, normed

# ---------------------------------------------------------------- 4: changed before the recompute


def _two_backwards(
    make: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[nn.Module, torch.Tensor], Iterator[list[Any]]]:
    """A loop in which an optimizer steps between two backwards through one forward, as in adversarial training."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[list[Any]]:
        optimizer = make(model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            y = model(x)
            first, second = loss_of(y[: BATCH // 2]), loss_of(y[BATCH // 2 :])
            first.backward(retain_graph=True)
            optimizer.step()
            second.backward()
            yield [first.detach(), second.detach()]

    return loop


@case("4")
def fused_sgd_between_two_backwards() -> Odd:
    """Fused SGD steps between two backwards through one forward."""
    return chain(normed, _two_backwards(lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True)))


@case("4")
def fused_sgd_between_two_backwards_of_halves() -> Odd:
    """The same where hooks save what backward needs in half the bytes, and so as it was."""

    def two_backwards(model: nn.Module, x: torch.Tensor) -> Iterator[list[Any]]:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda packed: packed.float())
        with hooks:
            yield from _two_backwards(lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True))(model, x)

    return chain(normed, two_backwards)


class _Outside(torch.optim.Optimizer):
    """Writes as a kernel of its own would, of which autograd knows nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.5)


@case("4")
def other_optimizer_between_two_backwards() -> Odd:
    """An optimizer with a kernel of its own steps between two backwards through one forward."""
    return chain(normed, _two_backwards(_Outside))


@case("4")
def parameter_data_between_forward_and_backward() -> Odd:
    """`p.data.mul_()` between forward and backward."""
    return chain(normed, between(lambda model: [p.data.mul_(0.5) for p in model.parameters()]))


@case("4")
def parameter_data_replaced_before_backward() -> Odd:
    """`p.data = ...` between forward and backward."""

    def replace(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5

    return chain(normed, between(replace))


@case("4")
def parameters_replaced_before_backward() -> Odd:
    """Modules have other parameters in backward than in forward."""
    former: list[nn.Parameter] = []

    def replace(model: Any) -> None:
        former[:] = [each.norm.weight for each in model]
        for each in model:
            each.norm.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def back(model: Any) -> None:
        for each, weight in zip(model, former, strict=True):
            each.norm.weight = weight

    return chain(normed, between(replace, back))


_scaled = layer_of(
    lambda m, x: torch.tanh(m.linear(x) * m.scale), scale=lambda: nn.Parameter(torch.randn(BATCH, WIDTH))
)
"""With a parameter as large as an activation: what is saved for either looks alike."""


def _frozen(model: Any, frozen: bool) -> None:
    model[1].scale.requires_grad_(not frozen)


@case("4")
def frozen_in_forward_and_thawed_of_equal_shapes() -> Odd:
    """A parameter that doesn't require gradients in forward and does in backward."""

    @contextlib.contextmanager
    def frozen(model: nn.Module) -> Iterator[None]:
        _frozen(model, True)
        yield
        _frozen(model, False)

    return chain(_scaled, one_forward_of(frozen))


@case("4")
def trained_in_forward_and_frozen_of_equal_shapes() -> Odd:
    """A parameter that requires gradients in forward and doesn't in backward."""
    return chain(_scaled, between(lambda model: _frozen(model, True), lambda model: _frozen(model, False)))


# ---------------------------------------------------------------- 6: copies


@case("6")
def copied_layer_that_is_trained() -> Odd:
    """`copy.copy` of a layer, with weights of its own, trained beside the original."""

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[list[Any]]:
        twin = copy.copy(model[1])  # type: ignore[index]
        twin._modules = dict(twin._modules)
        twin.linear = nn.Linear(WIDTH, WIDTH)
        for [loss] in plain_loop(model, x):
            twin.zero_grad()
            other = plain_step(twin, x)
            update(twin)
            yield [loss, other, twin.linear.weight.grad, twin.linear.weight.detach()]

    return chain(Layer, loop)
