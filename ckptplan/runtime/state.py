"""Put a model, and every random generator, back as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ckptplan.runtime.cells import Changing, Snapshot, Tables, below
from ckptplan.runtime.generators import Generators


def random_state(generators: Iterable[Any] = ()) -> Callable[[], None]:
    """Remember the state of random generators; calling the result restores it.

    Torch's (CPU and CUDA), Python's and numpy's, and the given ones.
    """
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    others = Generators(generators)

    def restore() -> None:
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        others.put()

    return restore


def tensor_state(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Remember values (on the host); calling the result restores them."""
    saved = [
        (tensor, tensor.detach().to("cpu", copy=True))
        for tensor in {id(t): t for t in tensors}.values()
        if not tensor.is_meta and not isinstance(tensor, FakeTensor)
    ]

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in saved:
                if not _equal(tensor.cpu(), value):
                    tensor.copy_(value)

    return restore


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return a.shape == b.shape and torch.equal(a, b)


@contextlib.contextmanager
def kept(model: nn.Module, others: Iterable[Any] = ()) -> Iterator[tuple[Snapshot, Tables]]:
    """Inside, Python state may change that `model` and `others` lead to: attributes, containers, names.

    It is as before afterwards.

    Yields
    ------
    Snapshot, Tables
        What was there.
    """
    found = Snapshot(below(model), others, changing=Changing(), searches=True)
    tables = Tables(found.modules, parameters=True)
    back = found.put()
    try:
        yield found, tables
    finally:
        tables.put()
        found.put()
        back()


_ONE_AT_A_TIME = threading.RLock()
"""Hooks on all modules, kernels, PyTorch's profiler and the random generators are the process's, not a thread's."""


@contextlib.contextmanager
def restored(model: nn.Module, others: Iterable[Any] = ()) -> Iterator[Callable[[], None]]:
    """Give the model back, whatever happens inside: gradients, buffers, attributes, training flags, random states.

    Inside, autograd is on, and no other thread is: a second one waits until the first has left.

    Yields
    ------
    callable
        Rewinds buffers, attributes and random states to the start and drops gradients, so that every run starts alike.
    """
    with _ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
        yield from _restored(model, others)


def _restored(model: nn.Module, others: Iterable[Any]) -> Iterator[Callable[[], None]]:
    gradients = [(p, p.grad) for p in model.parameters()]
    with kept(model, others) as (found, tables):
        buffers = [buffer for m in found.modules for buffer in m._buffers.values() if buffer is not None]
        values = tensor_state(
            [*buffers, *(t for _, t in (*found.tensors, *found.distant) if not isinstance(t, nn.Parameter))]
        )
        generators = random_state(found.generators)

        def rewind() -> None:
            for p, _ in gradients:
                p.grad = None
            tables.put()
            values()
            generators()
            found.put()

        try:
            yield rewind
        finally:
            values()
            generators()
            for p, gradient in gradients:
                p.grad = gradient
