"""State that a model's code reads and that no module refers to: hooks, global containers, caches of functions."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ckptplan.runtime.state.cells import SEARCH_LIMIT, Changing, Place, Snapshot, below

NOT_READ = frozenset({"torch", "numpy", "ckptplan", *sys.stdlib_module_names})
"""Packages whose code stores no state of a model."""
_LONGEST = 1 << 16  # entries; longer global containers are taken to be data and aren't copied
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
"""Container types that are read and written as usual; subclasses may have a library's own behavior."""
_CACHE: type = functools._lru_cache_wrapper
_FOLLOWED = frozenset(
    {
        types.FunctionType, types.MethodType, staticmethod, classmethod, property,
        functools.partial, functools.cached_property, _CACHE,
    }
)  # fmt: skip


def hooks_of(model: nn.Module) -> list[Any]:
    """Return the hooks on a model's modules and parameters."""
    tables: list[Any] = [
        table for m in below(model) for name, table in vars(m).items() if name.endswith("_hooks") and table
    ]
    for p in model.parameters():
        tables += [table for table in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) if table]
    return [hook for table in tables if isinstance(table, dict) for hook in table.values()]


def kept_read(functions: Iterable[Any], *, graphs: bool = False) -> Callable[[], None]:
    """Return a function that restores the global containers that functions read, and the caches that they call.

    It restores the containers' present contents, and clears the caches that have new entries.

    Parameters
    ----------
    functions : iterable
        Callables; a module stands for its forward and for functions among its attributes.
    graphs : bool
        As for `Snapshot`.
    """
    containers, caches, _ = read_by(functions)
    misses = [cache.cache_info().misses for cache in caches]
    snapshot = Snapshot([], containers, changing=Changing(), graphs=graphs)

    def put() -> None:
        for cache, before in zip(caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()
        snapshot.put()

    return put


def read_by(functions: Iterable[Any]) -> tuple[list[Any], list[Any], list[Place]]:
    """Return the containers that functions read, the caches that they call, and the places of the global containers.

    Parameters
    ----------
    functions : iterable
        Callables; a module stands for its forward and for functions among its attributes.
    """
    containers: list[Any] = []
    caches: list[Any] = []
    places: list[Place] = []
    waiting = [found for value in functions for found in _begun(value)]
    seen: set[tuple[int, type | None]] = set()
    while waiting and len(seen) < SEARCH_LIMIT:
        value, owner, place = waiting.pop()
        kind = type(value)
        if (kind not in _FOLLOWED and kind not in _CONTAINERS) or (id(value), owner) in seen:
            continue
        seen.add((id(value), owner))
        if kind is _CACHE:
            caches.append(value)
        if kind not in _CONTAINERS:
            waiting += _behind(value, owner)
        elif len(value) <= _LONGEST:
            containers.append(value)
            places += [place] if place is not None else []
    return containers, caches, places


_Found = tuple[Any, type | None, Place | None]
"""A value, the class of the module whose method led to it, and the global variable that it is, if any."""


def _begun(value: Any) -> Iterator[_Found]:
    if not isinstance(value, nn.Module):
        yield value, None, None
        return
    yield getattr(type(value), "forward", None), type(value), None
    yield from ((found, type(value), None) for found in vars(value).values() if type(found) in _FOLLOWED)


def _behind(value: Any, owner: type | None) -> Iterator[_Found]:
    """Yield the values that a function, method, partial or cached function refers to."""
    if isinstance(value, types.FunctionType):
        if str(value.__module__).partition(".")[0] not in NOT_READ:
            yield from _read_by(value, owner)
        return
    inside = next(getattr(value, name) for name in ("__func__", "__wrapped__", "func", "fget") if hasattr(value, name))
    yield inside, owner, None


def _read_by(function: types.FunctionType, owner: type | None) -> Iterator[_Found]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # raised if the variable isn't set
            yield cell.cell_contents, owner, None
    names = set(names_in(function.__code__))
    for kind in () if owner is None else owner.__mro__:
        yield from ((vars(kind)[name], owner, None) for name in names & vars(kind).keys())
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value, None, Place(function.__globals__, str(function.__module__), name)
        if type(value) is types.ModuleType and value.__name__.partition(".")[0] not in NOT_READ:
            for inner in names & vars(value).keys():
                yield vars(value)[inner], None, Place(vars(value), value.__name__, inner)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a code object uses, including those of nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
