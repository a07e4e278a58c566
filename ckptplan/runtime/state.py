"""Put a model, and every random generator, back as they were."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.runtime.generators import KINDS as GENERATORS
from ckptplan.runtime.generators import Generators


def random_state(modules: Iterable[nn.Module] = ()) -> Callable[[], None]:
    """Remember the state of random generators; calling the result restores it.

    Torch's (CPU and CUDA), Python's and numpy's, and those that `modules` hold in attributes.
    """
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    others = Generators(Attributes(modules).generators)

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


_ATOMS = frozenset({bool, int, float, complex, str, bytes, tuple, type(None), torch.Size, torch.dtype, torch.device})
"""Types of most attributes: those of which no copy is taken, and that are neither tensors nor generators."""

_CONTAINERS = (list, dict, set)


@functools.lru_cache(maxsize=1 << 10)
def _takes_care(kind: type) -> bool:
    return kind in _CONTAINERS or issubclass(kind, (torch.Tensor, *GENERATORS))


class Attributes:
    """What modules keep in plain attributes now: training flags, counters, tensors; lists and the like as copies.

    Tensors are held without their graphs, which may hold these attributes in turn.

    Attributes
    ----------
    tensors : list of (str, torch.Tensor)
        Those among them, by name.
    generators : list
        Random generators among them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.generators: list[Any] = []
        self._found: list[tuple[nn.Module, dict[str, Any], bool]] = []  # with whether there are containers
        copies = _Copies()
        for module in modules:
            attributes = _plain_attributes(module)
            contains = False
            if not _ATOMS.issuperset(map(type, attributes.values())):
                for name, value in attributes.items():
                    kind = type(value)
                    if not _takes_care(kind):  # type: ignore[arg-type]
                        continue
                    if kind in _CONTAINERS:
                        contains = True
                        attributes[name] = copies.of(value)
                    elif isinstance(value, torch.Tensor):
                        attributes[name] = _alone(value)
                        self.tensors.append((name, attributes[name]))
                    else:
                        self.generators.append(value)
            self._found.append((module, attributes, contains))

    def put(self) -> None:
        """Give the modules copies of these, and no others: what is written to them goes nowhere."""
        self._put([_plain_attributes(module) for module, _, _ in self._found])

    def _put(self, now: list[dict[str, Any]]) -> None:
        copies = _Copies()
        for (module, attributes, contains), present in zip(self._found, now, strict=True):
            if contains:
                attributes = {
                    name: copies.of(value) if type(value) in _CONTAINERS else value
                    for name, value in attributes.items()
                }
            _put(module, attributes, present)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the modules have copies of these; afterwards what they had before, the very objects."""
        now = [_plain_attributes(module) for module, _, _ in self._found]
        self._put(now)
        try:
            yield
        finally:
            for (module, _, _), attributes in zip(self._found, now, strict=True):
                _put(module, attributes, _plain_attributes(module))


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _MODULES_OWN}


def _alone(value: Any) -> Any:
    """`value`, a tensor without its graph."""
    graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if graph else value


class _Copies:
    """Copies of containers: what several modules share they go on sharing."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The copy of a list, dictionary or set."""
        if id(value) not in self._made:
            self._made[id(value)] = (
                {key: _alone(item) for key, item in value.items()}
                if isinstance(value, dict)
                else type(value)(map(_alone, value))
            )
        return self._made[id(value)]


def _put(module: nn.Module, attributes: dict[str, Any], present: dict[str, Any]) -> None:
    """Give a module these attributes in place of those that it has, past any code of its own."""
    if (
        len(attributes) == len(present)
        and all(map(operator.is_, attributes.values(), present.values()))
        and all(map(operator.eq, attributes, present))
    ):
        return
    table = module.__dict__
    for name in present.keys() - attributes.keys():
        del table[name]
    for name, value in attributes.items():
        if present.get(name, module) is not value:
            table[name] = value


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
