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

from odd.harness import BATCH, WIDTH, Extras, Odd, between, case, in_steps, loss_of, one_forward_around, plain_step
from odd.layers import Around, Factored, Layer, batch, chain, layers_of


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

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            exact = torch.get_float32_matmul_precision() == "highest"
            return x + torch.tanh(self.linear(x) if exact else self.linear(x).bfloat16().float())

    medium = functools.partial(setting, torch.set_float32_matmul_precision, "medium", "highest")
    return chain(Stage, one_forward_around(medium))


@case("3")
def default_dtype() -> Odd:
    """Numbers are made in float64 in forward alone."""

    class Stage(Factored):
        def factor(self) -> torch.Tensor:
            return torch.full((WIDTH,), 0.1).sin().float()

    double = functools.partial(setting, torch.set_default_dtype, torch.float64, torch.float32)
    return chain(Stage, one_forward_around(double))


class _Attention(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).view(1, BATCH, 4, WIDTH // 4).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(BATCH, WIDTH)


@case("3")
def attention_kernel() -> Odd:
    """`sdpa_kernel` around forward alone, of a model that is profiled without."""
    return chain(_Attention, one_forward_around(lambda: sdpa_kernel([SDPBackend.MATH])))


@case("3")
def numpy_bit_generator() -> Odd:
    """numpy's own generator draws other bits in backward than in forward."""

    class Stage(Factored):
        def factor(self) -> float:
            return np.random.randn()  # noqa: NPY002

    @contextlib.contextmanager
    def other_bits() -> Iterator[None]:
        with setting(np.random.set_bit_generator, np.random.PCG64(3), np.random.get_bit_generator()):
            yield

    return chain(Stage, one_forward_around(other_bits))


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


@case("3")
def function_mode() -> Odd:
    """A mode on PyTorch's functions around forward alone."""
    return chain(Layer, one_forward_around(SineForTanh))


@case("3")
def dispatch_mode() -> Odd:
    """A mode on operations around forward alone."""
    return chain(Layer, one_forward_around(SmallerTanh))


@case("3")
def dispatch_mode_in_backward() -> Odd:
    """A mode on operations around backward alone, which has none of those that it changes."""
    return chain(Layer, one_forward_around(contextlib.nullcontext, SmallerTanh))


@case("3")
def context_variable() -> Odd:
    """A context variable of forward, whose backward runs in another thread."""
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

    class Stage(Factored):
        def factor(self) -> float:
            return scale.get()

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        token = scale.set(3.0)
        loss = loss_of(model(x))
        scale.reset(token)
        with ThreadPoolExecutor(1) as other:
            other.submit(loss.backward).result()
        return [loss.detach()]

    return chain(Stage, loop)


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
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        for layer in model:  # type: ignore[attr-defined]

            def once(module: nn.Module, given: Any, output: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                layer.hook.remove()
                return output * 1.5

            layer.hook = layer.linear.register_forward_hook(once)
        loss = plain_step(model, x)
        for layer in model:  # type: ignore[attr-defined]
            del layer.hook
        return [loss]

    return chain(Layer, loop)


@case("3")
def hooks_that_come_and_go() -> Odd:
    """A forward hook of a layer's module that is there in forward alone."""

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        hooks = [layer.linear.register_forward_hook(_larger) for layer in model]  # type: ignore[attr-defined]
        loss = loss_of(model(x))
        for hook in hooks:
            hook.remove()
        loss.backward()
        return [loss.detach()]

    return chain(Layer, loop)


@case("3")
def forward_patched_for_a_while() -> Odd:
    """Another forward of a layer's module in the model's forward alone."""

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> Extras:
        for layer in model:  # type: ignore[attr-defined]
            layer.linear.forward = lambda x, former=layer.linear.forward: former(x) * 1.5
        loss = loss_of(model(x))
        for layer in model:  # type: ignore[attr-defined]
            del layer.linear.forward
        loss.backward()
        return [loss.detach()]

    return chain(Layer, loop)


@case("3")
def hooks_registered_in_forward() -> Odd:
    """A layer that registers a hook on its own module each time it runs, which the loop takes off before backward."""

    class Stage(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.register_forward_hook(_larger)
            return super().forward(x)

    return chain(Stage, between(lambda model: [layer.linear._forward_hooks.clear() for layer in model]))


@contextlib.contextmanager
def larger_products() -> Iterator[None]:
    """Inside, a hook on all modules enlarges what linear ones give."""
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: output * 1.5 if isinstance(module, nn.Linear) else None
    )
    with hook:
        yield


@case("3")
def hook_on_all_modules() -> Odd:
    """A hook on all modules in forward alone."""
    return chain(Layer, one_forward_around(larger_products))


@case("3")
def class_patched_for_a_while() -> Odd:
    """Another forward of the class of layers' modules in forward alone."""

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Stage(Layer):
        def set_up(self) -> None:
            self.linear = Inner(WIDTH, WIDTH)

    def larger(inner: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, inner.weight, inner.bias) * 1.5

    return chain(Stage, one_forward_around(lambda: mock.patch.object(Inner, "forward", larger)))


# ---------------------------------------------------------------- 8: no tensor among the arguments


@case("8")
def stages_without_tensor_arguments() -> Odd:
    """Layers that are given a number, under autocast and with dropout."""

    class Stage(Layer):
        def set_up(self) -> None:
            self.drop = nn.Dropout(0.3)

        def forward(self, number: int) -> torch.Tensor:  # type: ignore[override]
            x = torch.full((BATCH, WIDTH), float(number)) + torch.rand(BATCH, WIDTH)
            return self.drop(torch.tanh(self.linear(x)))

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(i).float() for i, layer in enumerate(layers)]).sum(0) * x

    model = Around(layers_of(Stage), forward)
    return Odd(model, batch(), one_forward_around(lambda: torch.autocast("cpu", torch.bfloat16)))
