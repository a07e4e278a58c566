"""Put a model, and every random generator, back as they were."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from ckptplan.runtime.attributes import Attributes


def random_state() -> Callable[[], None]:
    """Remember the state of torch's (CPU and CUDA), Python's and numpy's generators; calling the result restores it."""
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the user's steps may draw from it

    def restore() -> None:
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002

    return restore


def buffer_state(model: nn.Module) -> Callable[[], None]:
    """Remember the buffers (on the host); calling the result restores their values and objects."""
    saved = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            value = None if buffer is None or buffer.is_meta else buffer.detach().to("cpu", copy=True)
            saved.append((module, name, buffer, value))

    def restore() -> None:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                module._buffers[name] = buffer
                if buffer is not None and value is not None and not torch.equal(buffer.cpu(), value):
                    buffer.copy_(value)

    return restore


_ONE_AT_A_TIME = threading.RLock()
"""Hooks on all modules, kernels, PyTorch's profiler and the random generators are the process's, not a thread's."""


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the model back, whatever happens inside: gradients, buffers, training flags, attributes, random states.

    Inside, autograd is on, and no other thread is: a second one waits until the first has left.

    Yields
    ------
    callable
        Rewinds buffers, attributes and random states to the start and drops gradients, so that every run inside can
        start alike.
    """
    with _ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
        yield from _restored(model)


def _restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    gradients = [(p, p.grad) for p in model.parameters()]
    flags = [(module, module.training) for module in model.modules()]
    buffers, generators, attributes = buffer_state(model), random_state(), Attributes(model.modules())

    def rewind() -> None:
        for p, _ in gradients:
            p.grad = None
        attributes.put_back()
        buffers()
        generators()

    try:
        yield rewind
    finally:
        rewind()
        for p, gradient in gradients:
            p.grad = gradient
        for module, training in flags:
            module.training = training
