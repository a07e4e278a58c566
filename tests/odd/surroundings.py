"""What surrounds a forward and is gone in backward (item 3): flags, modes, hooks; and stages without tensors (8)."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from odd.harness import BATCH, WIDTH, Odd, between, case, in_steps, one_forward_around, one_forward_of, plain_step
from odd.layers import Around, Layer, batch, chain, factored, layer_of, layers_of


@contextlib.contextmanager
def setting(put: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    """Inside, what `put` sets is `value`."""
    put(value)
    try:
        yield
    finally:
        put(before)


# ---------------------------------------------------------------- flags


@case("3")
def matmul_precision() -> Odd:
    """Another precision of float32 products in forward alone, as a layer that goes by it sees it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        exact = torch.get_float32_matmul_precision() == "highest"
        return x + torch.tanh(m.linear(x) if exact else m.linear(x).bfloat16().float())

    medium = functools.partial(setting, torch.set_float32_matmul_precision, "medium", "highest")
    return chain(layer_of(forward), one_forward_around(medium))


@case("3")
def default_dtype() -> Odd:
    """Numbers are made in float64 in forward alone."""
    double = functools.partial(setting, torch.set_default_dtype, torch.float64, torch.float32)
    return chain(factored(lambda m: torch.full((WIDTH,), 0.1).sin().float()), one_forward_around(double))


@case("3")
def attention_kernel() -> Odd:
    """`sdpa_kernel` around forward alone, of a model that is profiled without."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.linear(x).view(1, BATCH, 4, WIDTH // 4).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(BATCH, WIDTH)

    return chain(layer_of(forward), one_forward_around(lambda: sdpa_kernel([SDPBackend.MATH])))


@case("3")
def numpy_bit_generator() -> Odd:
    """numpy's own generator draws other bits in backward than in forward."""

    @contextlib.contextmanager
    def other_bits() -> Iterator[None]:
        with setting(np.random.set_bit_generator, np.random.PCG64(3), np.random.get_bit_generator()):
            yield

    return chain(factored(lambda m: np.random.randn()), one_forward_around(other_bits))  # noqa: NPY002


# ---------------------------------------------------------------- modes


class SineForTanh(TorchFunctionMode):
    """A mode on PyTorch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


class SmallerTanh(TorchDispatchMode):
    """A mode on operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.tanh.default else result


def _around(name: str, about: str, *surroundings: Callable[[], Any]) -> None:
    """Register plain layers whose forward, or whose backward, something surrounds."""

    def build() -> Odd:
        return chain(Layer, one_forward_around(*surroundings))

    build.__name__, build.__doc__ = name, about
    case("3")(build)


_around("function_mode", "A mode on PyTorch's functions around forward alone.", SineForTanh)
_around("dispatch_mode", "A mode on operations around forward alone.", SmallerTanh)
_around("dispatch_mode_in_backward", "A mode on operations around backward.", contextlib.nullcontext, SmallerTanh)


@case("3")
def context_variable() -> Odd:
    """A context variable of forward, whose backward runs in another thread."""
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> list[Any]:
        token = scale.set(3.0)
        loss = model(x).square().mean()
        scale.reset(token)
        with ThreadPoolExecutor(1) as other:
            other.submit(loss.backward).result()
        return [loss.detach()]

    return chain(factored(lambda m: scale.get()), loop)


# ---------------------------------------------------------------- hooks


@case("3")
def saved_tensors_hooks_of_the_user() -> Odd:
    """Hooks that save what backward needs in half the bytes."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.bfloat16() if tensor.is_floating_point() and not tensor.is_leaf else tensor

    hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda packed: packed.float())
    return chain(Layer, one_forward_around(hooks))


@case("3")
def saved_tensors_hooks_that_draw() -> Odd:
    """Hooks that save what backward needs with noise."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_leaf else tensor * random.random()

    hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda packed: packed)
    return chain(Layer, one_forward_around(hooks))


def _larger(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


@case("3")
def hooks_that_remove_themselves() -> Odd:
    """A forward hook of a layer's module that runs once in a step."""

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> list[Any]:
        for each in model:  # type: ignore[attr-defined]

            def once(module: nn.Module, given: Any, output: torch.Tensor, each: Any = each) -> torch.Tensor:
                each.hook.remove()
                return output * 1.5

            each.hook = each.linear.register_forward_hook(once)
        loss = plain_step(model, x)
        for each in model:  # type: ignore[attr-defined]
            del each.hook
        return [loss]

    return chain(Layer, loop)


@case("3")
def hooks_that_come_and_go() -> Odd:
    """A forward hook of a layer's module that is there in forward alone."""

    @contextlib.contextmanager
    def hooked(model: Any) -> Iterator[None]:
        hooks = [each.linear.register_forward_hook(_larger) for each in model]
        yield
        for hook in hooks:
            hook.remove()

    return chain(Layer, one_forward_of(hooked))


@case("3")
def forward_patched_for_a_while() -> Odd:
    """Another forward of a layer's module in the model's forward alone."""

    @contextlib.contextmanager
    def patched(model: Any) -> Iterator[None]:
        for each in model:
            each.linear.forward = lambda x, former=each.linear.forward: former(x) * 1.5
        yield
        for each in model:
            del each.linear.forward

    return chain(Layer, one_forward_of(patched))


@case("3")
def hooks_registered_in_forward() -> Odd:
    """A layer that registers a hook on its own module each time it runs, which the loop takes off before backward."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.linear.register_forward_hook(_larger)
        return x + torch.tanh(m.linear(x))

    return chain(layer_of(forward), between(lambda model: [each.linear._forward_hooks.clear() for each in model]))


@contextlib.contextmanager
def larger_products() -> Iterator[None]:
    """Inside, a hook on all modules enlarges what linear ones give."""
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: output * 1.5 if isinstance(module, nn.Linear) else None
    )
    with hook:
        yield


_around("hook_on_all_modules", "A hook on all modules in forward alone.", larger_products)


@case("3")
def class_patched_for_a_while() -> Odd:
    """Another forward of the class of layers' modules in forward alone."""

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def larger(inner: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, inner.weight, inner.bias) * 1.5

    stage = layer_of(lambda m, x: x + torch.tanh(m.linear(x)), linear=lambda: Inner(WIDTH, WIDTH))
    return chain(stage, one_forward_around(lambda: mock.patch.object(Inner, "forward", larger)))


# ---------------------------------------------------------------- 8: no tensor among the arguments


@case("8")
def stages_without_tensor_arguments() -> Odd:
    """Layers that are given a number, under autocast and with dropout."""

    def of_number(m: Any, number: int) -> torch.Tensor:
        x = torch.full((BATCH, WIDTH), float(number)) + torch.rand(BATCH, WIDTH)
        return m.drop(torch.tanh(m.linear(x)))  # type: ignore[no-any-return]

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each(i).float() for i, each in enumerate(layers)]).sum(0) * x

    model = Around(layers_of(layer_of(of_number, drop=lambda: nn.Dropout(0.3))), forward)
    return Odd(model, batch(), one_forward_around(lambda: torch.autocast("cpu", torch.bfloat16)))
