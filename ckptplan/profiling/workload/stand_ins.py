"""Fake tensors in place of the real ones in all that an optimizer's code reaches, and back.

NOTE [Stand-ins]
An update is traced with the optimizer itself, not with one that is rebuilt: its class, methods, hooks and helpers may
refer to it, and to each other, in ways that no copy has. So the *contents* of objects are replaced and put back:

1. Beginning with the optimizer, everything is visited that its attributes, containers, methods, closures and global
   variables lead to, with the cells of NOTE [Cells] in state/cells.py. Its parameters' attributes belong to it.
2. A real tensor there is replaced by a fake one, always the same. Single numbers and small integers are replaced by
   real copies, since code reads them (a count of steps).
3. Dictionaries may have parameters, or their identities, as keys. They get those of the stand-ins.
4. At the end each cell gets the contents that it had, so that state made in between is gone.

Example: an optimizer with `self.sums = {id(p): zeros}` runs with `self.sums == {id(fake p): fake zeros}`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from ckptplan.profiling.values.answers import readable
from ckptplan.state.cells import (
    ATOMS,
    CLASS,
    CLOSURE,
    OBJECT,
    SEARCH_LIMIT,
    Kind,
    classes_of,
    has_attributes,
    kind_of,
    replaced,
    write_items,
)
from ckptplan.state.code import NOT_READ, names_in
from ckptplan.tensors.private import is_fake, is_traceable_wrapper_subclass

READ_LIMIT = 16  # elements of an integer tensor that code may read, such as a count per group; larger ones are state

_MAPPING = Kind(lambda mapping: dict(mapping.items()), write_items, lambda contents: contents.values())
"""Dictionaries of other kinds, such as those with weak references to their keys."""


class StandIns:
    """The stand-ins of an optimizer's tensors.

    Parameters
    ----------
    optimizer : Optimizer
    fake : callable
        Makes the fake twin of a tensor.

    Attributes
    ----------
    parameters : list of (torch.Tensor, torch.Tensor)
        Each parameter of the optimizer, and its stand-in.
    held : list of (torch.Tensor, torch.Tensor)
        The other tensors that were met, with their stand-ins; those of modules are left out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.parameters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fake = fake
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        self._ids: dict[int, int] = {}
        self._cells: dict[int, tuple[Any, Kind, Any]] = {}
        self._waiting: deque[tuple[Any, Kind, bool]] = deque()
        self._caches: dict[int, tuple[Any, int]] = {}
        self._left = SEARCH_LIMIT
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._twins:
                    twin = self._pair(p, fake(p))
                    self._ids[id(p)] = id(twin)
                    self.parameters.append((p, twin))
        self._optimizer = optimizer

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the optimizer and all that it reaches, within the block."""
        try:
            self._enter(self._optimizer, OBJECT, False)
            for kind in classes_of(type(self._optimizer)):  # type: ignore[arg-type]
                self._enter(kind, CLASS, False)
                for method in vars(kind).values():
                    self._of(getattr(method, "__func__", method), False)
            for p, twin in self.parameters:
                own = vars(twin)
                for name, value in vars(p).items():
                    if name not in own:
                        setattr(twin, name, self._of(value, False))
            while self._waiting:
                self._replace(*self._waiting.popleft())
            yield
        finally:
            # Backwards, since a global variable or a closure may have been read again with its stand-in.
            for cell, how, contents in reversed(self._cells.values()):
                how.write(cell, contents)
            for cache, misses in self._caches.values():
                if cache.cache_info().misses != misses:
                    cache.cache_clear()

    def _enter(self, cell: Any, kind: Kind, in_module: bool) -> None:
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell, kind, kind.read(cell)
            self._waiting.append((cell, kind, in_module))

    def _replace(self, cell: Any, kind: Kind, in_module: bool) -> None:
        contents = self._cells[id(cell)][2]
        one = functools.partial(self._of, in_module=in_module)
        values = tuple(kind.values(contents))  # none of an array, which has no tensors
        if isinstance(contents, dict):
            found: Any = {one(key): one(value) for key, value in contents.items()}
            same = all(map(operator.is_, (*found, *found.values()), (*contents, *contents.values())))
        elif not ATOMS.issuperset(map(type, values)) or any(type(v) is int and v in self._ids for v in values):
            found, same = type(contents)(map(one, values)), False
        else:
            return
        if not same:
            kind.write(cell, found)

    def _of(self, value: Any, in_module: bool) -> Any:
        """Return what stands for a value, and go on to what it holds."""
        if type(value) is int:
            return self._ids.get(value, value)
        kind = kind_of(type(value))  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value, in_module)
        if isinstance(value, (tuple, frozenset)):
            return replaced(value, functools.partial(self._of, in_module=in_module))
        if isinstance(value, nn.Module):
            self._search(value, OBJECT, True)
        elif isinstance(value, torch.optim.Optimizer):
            self._enter(value, OBJECT, in_module)
        elif isinstance(kind, Kind):
            self._enter(value, kind, in_module)
        elif isinstance(value, types.FunctionType):
            self._follow(value, in_module)
        elif isinstance(value, types.MethodType):
            self._of(value.__self__, in_module)
            self._of(value.__func__, in_module)
        elif type(value) is functools.partial:
            self._of(value.func, in_module)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches[id(value)] = value, value.cache_info().misses
            self._of(value.__wrapped__, in_module)
        elif isinstance(value, MutableMapping):
            self._enter(value, _MAPPING, in_module)
        elif has_attributes(type(value)):  # type: ignore[arg-type]
            self._search(value, OBJECT, in_module)
        return value

    def _of_tensor(self, tensor: torch.Tensor, in_module: bool) -> torch.Tensor:
        if id(tensor) in self._made or is_fake(tensor):
            return tensor
        if id(tensor) not in self._twins:
            small = readable(tensor) and tensor.numel() <= READ_LIMIT and tensor.device.type == "cpu"
            real = small and not is_traceable_wrapper_subclass(tensor)
            alone = tensor if tensor.is_leaf else tensor.detach()  # the graph of an earlier step isn't traced
            twin = self._pair(tensor, tensor.detach().clone() if real else self._fake(alone))
            if not in_module:
                self.held.append((tensor, twin))
        return self._twins[id(tensor)][1]

    def _pair(self, tensor: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
        self._twins[id(tensor)] = tensor, twin
        self._made.add(id(twin))
        return twin

    def _search(self, cell: Any, kind: Kind, in_module: bool) -> None:
        if self._left > 0 and id(cell) not in self._cells:
            self._left -= 1
            self._enter(cell, kind, in_module)
            for each in classes_of(type(cell)) if kind is OBJECT else ():  # type: ignore[arg-type]
                self._enter(each, CLASS, in_module)

    def _follow(self, function: types.FunctionType, in_module: bool) -> None:
        """Visit what a function's closure and the global variables that it names hold."""
        if self._left <= 0 or id(function) in self._cells or _package(function.__module__) in NOT_READ:
            return
        self._search(function, CLOSURE, in_module)
        names = frozenset(names_in(function.__code__))
        modules = [v for name in names if type(v := function.__globals__.get(name)) is types.ModuleType]
        for namespace in (function.__globals__, *map(vars, modules)):
            if _package(namespace.get("__name__")) not in NOT_READ:
                self._enter(_Globals(namespace, names), _GLOBALS, in_module)


class _Globals:
    """The global variables of a module that some code names."""

    def __init__(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        self.namespace, self.names = namespace, names

    def read(self) -> dict[str, Any]:
        return {name: self.namespace[name] for name in self.names if name in self.namespace}

    def write(self, contents: dict[str, Any]) -> None:
        self.namespace.update(contents)
        for name in self.names - contents.keys():
            self.namespace.pop(name, None)


_GLOBALS = Kind(_Globals.read, _Globals.write, lambda contents: contents.values())


def _package(module: Any) -> str:
    return str(module).partition(".")[0]
