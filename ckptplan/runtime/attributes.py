"""What modules hold in plain Python: attributes, containers, random generators, and parameters by name.

A forward may read and change these as it does buffers: a counter, a flag, a hidden state, a list of losses. To run it
again as it ran, they must be as it found them; to leave no trace, as they were before it ran again.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptplan.runtime.swap import version_of

_OF_ALL_MODULES = frozenset(nn.Module().__dict__) | {"forward", "_compiled_call_impl"}
"""Training flags, buffers, submodules and hooks, which others look after, and what a plan itself puts there."""
_MISSING = object()
_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def _contents(value: Any) -> Any:
    """A copy of a plain container, one level deep."""
    kind = type(value)
    return kind(value) if kind is list or kind is dict or kind is set else None


def _without_graph(value: Any) -> Any:
    """The same value, of which a graph that holds it keeps no older one."""
    graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if graph else value


def _without_graphs(contents: Any) -> Any:
    if isinstance(contents, dict):
        return {key: _without_graph(value) for key, value in contents.items()}
    return type(contents)(map(_without_graph, contents))


def _same_contents(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(map(operator.is_, a, b)) and all(map(operator.is_, a.values(), b.values()))
    return set(map(id, a)) == set(map(id, b)) if isinstance(a, set) else all(map(operator.is_, a, b))


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(contents)


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to read and set a generator's state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _global_generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    # torch's own are checkpoint's business.
    return [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]


def tensor_attributes(module: nn.Module | None) -> list[torch.Tensor]:
    """Tensors that are plain attributes of `module` or of those inside."""
    inside = () if module is None else module.modules()
    return [value for m in inside for value in m.__dict__.values() if isinstance(value, torch.Tensor)]


@dataclass(slots=True)
class _Namespace:
    """One of a module's dictionaries and what it held.

    Attributes
    ----------
    now : dict
        As it is at any moment.
    held : dict
        What it held; after `Attributes.settle`, as far as that is needed.
    names : frozenset
        All that it held.
    contents : dict
        Of its plain containers, one level deep; after `Attributes.settle`, of those that changed.
    """

    now: dict[str, Any]
    held: dict[str, Any]
    names: frozenset[str] = field(init=False)
    contents: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = frozenset(self.held)

    def settle(self) -> None:
        for name, value in list(self.held.items()):
            replaced = self.now.get(name, _MISSING) is not value
            contents = self.contents.get(name)
            if contents is not None:
                if not replaced and _same_contents(value, contents):
                    del self.contents[name]
                else:
                    self.contents[name] = _without_graphs(contents)
                del self.held[name]
            elif isinstance(value, torch.Tensor):
                if replaced:
                    self.held[name] = _without_graph(value)
            elif not replaced and type(value) not in _SIMPLE and not isinstance(value, nn.Module):
                del self.held[name]

    def put_back(self) -> None:
        for name, value in self.held.items():
            if self.now.get(name, _MISSING) is not value:
                self.now[name] = value
        for name, contents in self.contents.items():
            if name not in self.held:
                self.now[name] = type(contents)(contents)
            elif not _same_contents(self.held[name], contents):
                _refill(self.held[name], contents)
        for name in [n for n in self.now if n not in self.names and n not in _OF_ALL_MODULES]:
            del self.now[name]


class Attributes:
    """What `modules` hold in plain Python, as it is now.

    Parameters
    ----------
    modules : iterable of nn.Module
    generators : bool
        Also the states of random generators: those among the attributes, Python's and numpy's.

    Attributes
    ----------
    tensors : list of (str, Tensor, int)
        Those among the attributes, with their versions.
    """

    def __init__(self, modules: Iterable[nn.Module], *, generators: bool = True) -> None:
        self._modules = list(modules)
        self._spaces: list[_Namespace] = []
        self.tensors: list[tuple[str, torch.Tensor, int]] = []
        states = _global_generators() if generators else []
        for m in self._modules:
            held = {name: value for name, value in m.__dict__.items() if name not in _OF_ALL_MODULES}
            space = _Namespace(m.__dict__, held)
            self._spaces += [space, _Namespace(m._parameters, dict(m._parameters))]
            self._spaces.append(_Namespace(m._modules, dict(m._modules)))
            for name, value in held.items():
                if type(value) in _SIMPLE:
                    continue
                if isinstance(value, torch.Tensor):
                    self.tensors.append((name, value, version_of(value)))
                elif (contents := _contents(value)) is not None:
                    space.contents[name] = contents
                elif generators and (state := _state_of(value)) is not None:
                    states.append(state)
        self._generators = [(get, put, get()) for get, put in states]

    def written(self) -> tuple[str, torch.Tensor, int] | None:
        """A tensor that was written to since, with its name and the version it had."""
        return next(((name, t, version) for name, t, version in self.tensors if version_of(t) != version), None)

    def settle(self) -> None:
        """A forward has ended: keep only what it takes to run it again, and hold no graph by what it replaced.

        Containers and other objects that the forward left alone are forgotten; should they change later, they stay so.
        """
        for space in self._spaces:
            space.settle()
        needed = {id(value) for space in self._spaces for value in space.held.values()}
        self.tensors = [(name, t, version) for name, t, version in self.tensors if id(t) in needed]
        self._generators = [(get, put, state) for get, put, state in self._generators if not _equal(get(), state)]

    def put_back(self) -> None:
        """Make everything as it was when this was made."""
        for space in self._spaces:
            space.put_back()
        for _, put, state in self._generators:
            put(state)

    def now(self) -> Attributes:
        """The same modules and generators as they are at this moment."""
        found = Attributes(self._modules, generators=False)
        found._generators = [(get, put, get()) for get, put, _ in self._generators]
        return found
