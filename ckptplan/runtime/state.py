"""Put a model, and every random generator, back as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.runtime.generators import Generators


def random_state(modules: Iterable[nn.Module] = ()) -> Callable[[], None]:
    """Remember the state of random generators; calling the result restores it.

    Torch's (CPU and CUDA), Python's and numpy's, and those that `modules` hold in attributes.
    """
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    others = Generators(modules)

    def restore() -> None:
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        others.put()

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


_MODULES_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"forward", "_compiled_call_impl"}
"""Attributes of every module, which have rules of their own or don't change from call to call."""


class Attributes:
    """What modules keep in plain attributes now: training flags, counters, tensors; lists and the like as copies.

    Tensors are held without their graphs, which may hold these attributes in turn.

    Attributes
    ----------
    found : list of (nn.Module, dict)
        By module.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.found = _copied([(m, _plain_attributes(m)) for m in modules])

    def put(self) -> None:
        """Give the modules copies of these, and no others: what is written to them goes nowhere."""
        for module, attributes in _copied(self.found):
            _put(module, attributes)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the modules have copies of these; afterwards what they had before, the very objects."""
        now = [(module, _plain_attributes(module)) for module, _ in self.found]
        self.put()
        try:
            yield
        finally:
            for module, attributes in now:
                _put(module, attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _MODULES_OWN}


def _copied(found: list[tuple[nn.Module, dict[str, Any]]]) -> list[tuple[nn.Module, dict[str, Any]]]:
    copies: dict[int, Any] = {}  # what several modules share they go on sharing

    def alone(value: Any) -> Any:
        graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
        return value.detach().requires_grad_() if graph else value

    def copied(value: Any) -> Any:
        if type(value) not in (list, dict, set):
            return alone(value)
        if id(value) not in copies:
            copies[id(value)] = (
                {key: alone(item) for key, item in value.items()}
                if isinstance(value, dict)
                else type(value)(map(alone, value))
            )
        return copies[id(value)]

    return [(module, {name: copied(value) for name, value in given.items()}) for module, given in found]


def _put(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module these attributes and no others, past any code of its own."""
    for name in [name for name in module.__dict__ if name not in attributes and name not in _MODULES_OWN]:
        del module.__dict__[name]
    for name, value in attributes.items():
        if module.__dict__.get(name, module) is not value:
            module.__dict__[name] = value


_ONE_AT_A_TIME = threading.RLock()
"""Hooks on all modules, kernels, PyTorch's profiler and the random generators are the process's, not a thread's."""


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the model back, whatever happens inside: gradients, buffers, attributes, training flags, random states.

    Inside, autograd is on, and no other thread is: a second one waits until the first has left.

    Yields
    ------
    callable
        Rewinds buffers, attributes and random states to the start and drops gradients, so that every run starts alike.
    """
    with _ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
        yield from _restored(model)


def _restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers, generators = buffer_state(model), random_state(model.modules())
    attributes = Attributes(model.modules())

    def rewind() -> None:
        for p, _ in gradients:
            p.grad = None
        buffers()
        generators()
        attributes.put()

    try:
        with attributes.restored():
            yield rewind
    finally:
        buffers()
        generators()
        for p, gradient in gradients:
            p.grad = gradient
