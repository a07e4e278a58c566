"""State that a model's code reads and that no module refers to: hooks, global containers, caches of functions."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ckptplan.state.cells import ATOMS, SEARCH_LIMIT, Snapshot, has_attributes
from ckptplan.tensors.modules import below

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


def kept_lists(hooks: Iterable[Any]) -> Callable[[], None]:
    """Return a function that cuts the lists to which hooks may append back to the lengths that they have now.

    These are lists that hooks enclose or read as global variables, lists that are attributes of objects and modules
    that they enclose or whose methods they are, and lists in lists and dictionaries among all these. What else hooks
    change stays: it may be another thread's as well.
    """
    found: dict[int, tuple[list[Any], int]] = {}

    for hook in hooks:
        for value in _enclosed(hook):
            for each in (value, *(getattr(value, "__dict__", {}).values() if _opens(value) else ())):
                found.update((id(x), (x, len(x))) for x in (each, *_entries(each)) if type(x) is list)

    def cut() -> None:
        for value, length in found.values():
            del value[length:]

    return cut


_MOST_LISTS = 1 << 8
"""Entries of a list or dictionary that is searched for lists."""


def _entries(value: Any) -> Iterable[Any]:
    if type(value) not in (list, dict) or len(value) > _MOST_LISTS:
        return ()
    return value.values() if type(value) is dict else value


def _opens(value: Any) -> bool:
    return isinstance(value, nn.Module) or has_attributes(type(value))  # type: ignore[arg-type]


def _enclosed(hook: Any) -> Iterator[Any]:
    """Yield a hook's object, the values that it encloses, and those of the global variables that it names."""
    while isinstance(hook, (types.MethodType, functools.partial)):
        if isinstance(hook, types.MethodType):
            yield hook.__self__
            hook = hook.__func__
        else:
            yield from (*hook.args, *hook.keywords.values())
            hook = hook.func
    if not isinstance(hook, types.FunctionType):
        yield hook
        return
    for cell in hook.__closure__ or ():
        with contextlib.suppress(ValueError):  # raised if the variable isn't set
            yield cell.cell_contents
    for name in hook.__code__.co_names:
        if type(value := hook.__globals__.get(name)) in (list, dict):
            yield value


def kept_read(functions: Iterable[Any], *, graphs: bool = False) -> Callable[[], None]:
    """Return a function that restores the global variables that functions read, and the caches that they call.

    It restores containers' present contents, immutable values, and clears the caches that have new entries.

    Parameters
    ----------
    functions : iterable
        Callables; a module stands for its forward and for functions among its attributes.
    graphs : bool
        As for `Snapshot`.
    """
    read = read_by(functions)
    misses = [cache.cache_info().misses for cache in read.caches]
    snapshot = Snapshot([], read.containers, deep=True, graphs=graphs)

    def put() -> None:
        for cache, before in zip(read.caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()
        snapshot.put()
        read.put_back()

    return put


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global variable: its namespace, the name of its module, and its own name."""

    namespace: dict[str, Any] = field(hash=False, compare=False)
    module: str
    name: str

    @property
    def value(self) -> Any:
        """The variable's current value; None if it no longer exists."""
        return self.namespace.get(self.name)


@dataclass
class Read:
    """What functions read: containers, caches that they call, and global variables.

    Attributes
    ----------
    numbers : dict
        Global variables of immutable types, with their present values.
    """

    containers: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    numbers: dict[GlobalName, Any] = field(default_factory=dict)

    def changed(self) -> list[str]:
        """Return the names of the global variables in `numbers` that have other values now."""
        return [f"{place.module}.{place.name}" for place in self._others()]

    def put_back(self) -> None:
        """Give the global variables in `numbers` their values again."""
        for place in self._others():
            place.namespace[place.name] = self.numbers[place]

    def _others(self) -> list[GlobalName]:
        found = [(place, place.value, before) for place, before in self.numbers.items()]
        differing = (each for each in found if each[1] is not each[2])
        return [place for place, now, before in differing if type(now) is not type(before) or now != before]


def read_by(functions: Iterable[Any]) -> Read:
    """Return what functions read.

    Parameters
    ----------
    functions : iterable
        Callables; a module stands for its forward and for functions among its attributes.
    """
    read = Read()
    waiting = [found for value in functions for found in _begun(value)]
    seen: set[tuple[int, type | None]] = set()
    while waiting and len(seen) < SEARCH_LIMIT:
        value, owner, place = waiting.pop()
        kind = type(value)
        if kind in ATOMS and place is not None:
            read.numbers.setdefault(place, value)
        if (kind not in _FOLLOWED and kind not in _CONTAINERS) or (id(value), owner) in seen:
            continue
        seen.add((id(value), owner))
        if kind is _CACHE:
            read.caches.append(value)
        if kind not in _CONTAINERS:
            waiting += _behind(value, owner)
        elif len(value) <= _LONGEST:
            read.containers.append(value)
    return read


_Found = tuple[Any, type | None, GlobalName | None]
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
        yield value, None, GlobalName(function.__globals__, str(function.__module__), name)
        if type(value) is types.ModuleType and value.__name__.partition(".")[0] not in NOT_READ:
            for inner in names & vars(value).keys():
                yield vars(value)[inner], None, GlobalName(vars(value), value.__name__, inner)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a code object uses, including those of nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
