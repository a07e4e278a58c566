"""Context variables of a stage's call, for its recompute; tensors that outputs are collected in aren't held.

NOTE [Collectors]
Code may collect what stages make in a container in a context variable: transformers does so for the attentions and
hidden states that a model returns. `contextvars.copy_context()` alone would hold that container until the stage is
recomputed, with all that other stages add to it, and the recompute would add to it once more. Therefore:

1. Of a context variable that has a container, the call records a copy of the container and of those inside of it, as
   they were at the call. Each recompute gets new ones, so that what it adds is dropped.
2. A list, set or deque that is longer after a stage than before, or at a stage's call than at the last one, is a place
   where the model collects; so is a tuple in place of a shorter one. Tensors there are recorded by weak references, at
   all calls. A recompute that uses one of them that was freed raises an error.
3. All other tensors are given to the stages, and held. So are those that stages add to a dictionary, which may be a
   cache that later stages read.

Example: layers append to the list in a variable `seen`. The third layer's record has a list of two weak references.
When the layer runs again in backward, the outputs that the model returned are gone: it finds a list of two objects of
the class `Freed`, and appends a third one, and the list is dropped.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.weak import TensorWeakRef

from ckptplan.core.errors import UnsupportedModelError

T = TypeVar("T")

_CONTAINERS = frozenset({list, tuple, dict, set, collections.deque, collections.defaultdict, collections.OrderedDict})
_MOST_ENTRIES = 1 << 10
"""Entries of a container that is copied; a larger one is more likely data than a collector."""
Path = tuple[Any, ...]
"""Where a value lies: the variable, the type of its container, then keys, positions and names of fields."""
_collected: set[Path] = set()
"""Places where the model collects (NOTE [Collectors], rule 2)."""
_MOST_PLACES = 1 << 12
_last: dict[contextvars.ContextVar[Any], tuple[weakref.ref[Variables], tuple[int, ...]]] = {}
"""Variable -> the record of the last call, and the identity of its container then, a tuple's those of its items."""


class Freed:
    """Stands for a tensor that is no longer there; any use of it is an error."""

    def __getattr__(self, name: str) -> Any:
        raise _freed_error()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _freed_error()


def _freed_error() -> UnsupportedModelError:
    return UnsupportedModelError(
        "a stage that runs again uses a tensor that stages had collected in a context variable, and that was freed "
        "since; pass the tensor to the stage as an argument, or keep or swap this stage"
    )


class Variables:
    """The context variables at construction, in which a function can run; what it sets is dropped afterwards."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._copies: dict[contextvars.ContextVar[Any], Any] = {}
        for variable, value in list(self._context.items()):
            if _is_container(value):
                self._grew_since_last(variable, value)
                self._copies[variable] = _copied((variable, type(value)), value, record=True)
                self._context.run(variable.set, None)
        if self._copies:
            _alive.add(self)

    def _grew_since_last(self, variable: contextvars.ContextVar[Any], value: Any) -> None:
        """Find where the model has collected since the last call, between stages.

        The record of that call is alive in the same forward, and with it what is in a tuple: identities stay theirs.
        """
        present = tuple(map(id, value)) if isinstance(value, tuple) else (id(value),)  # a longer tuple is another one
        ref, known = _last.get(variable, (None, ()))
        _last[variable] = weakref.ref(self), present
        last = None if ref is None else ref()
        if last is not None and known and present[: len(known)] == known:
            _add(_longer(_lengths(variable, last._copies[variable]), _lengths(variable, value)))

    def forward_done(self) -> None:
        """Find where the stage has collected (NOTE [Collectors], rule 2)."""
        for variable, before in self._copies.items():
            _add(_longer(_lengths(variable, before), _lengths(variable, variable.get(None))))

    def drop(self) -> None:
        """Hold tensors in the places that are known now by weak references."""
        for variable, value in self._copies.items():
            self._copies[variable] = _copied((variable, type(value)), value, record=True)

    def run(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call `function` with the recorded context variables."""
        context = self._context.copy()
        for variable, value in self._copies.items():
            context.run(variable.set, _copied((variable, type(value)), value))
        return context.run(function, *args, **kwargs)


_alive: weakref.WeakSet[Variables] = weakref.WeakSet()
"""Records of calls whose stages may run again."""


def _add(places: set[Path]) -> None:
    """Note places where the model collects, and drop the tensors in them that calls before have recorded."""
    new = places - _collected
    if new:
        if len(_collected) > _MOST_PLACES:
            _collected.clear()
        _collected.update(new)
        for recorded in list(_alive):
            recorded.drop()


def _lengths(variable: contextvars.ContextVar[Any], value: Any) -> dict[Path, int]:
    """Return the lengths of the lists, tuples, sets and deques in a variable's value, by their places."""
    return dict(_lengths_at((variable, type(value)), value, set()))


def _lengths_at(path: Path, value: Any, seen: set[int]) -> Iterator[tuple[Path, int]]:
    if not _is_container(value) or id(value) in seen:
        return
    seen.add(id(value))
    if not isinstance(value, dict) and not dataclasses.is_dataclass(value):
        yield path, len(value)
    for key, item in _inside(value).items():
        yield from _lengths_at((*path, key), item, seen)


def _longer(before: dict[Path, int], now: dict[Path, int]) -> set[Path]:
    """Return the places that are longer than before; new ones are none."""
    return {path for path, length in now.items() if length > before.get(path, length)}


def _is_container(value: Any) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return True
    return type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES


def _inside(value: Any) -> dict[Any, Any]:
    """Return the entries of a container by their keys, positions or fields."""
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return dict(enumerate(value))


def _copied(path: Path, value: Any, known: dict[int, Any] | None = None, *, record: bool = False) -> Any:
    """Return a copy of the containers in `value`; one that occurs twice is one object in the copy, too.

    With `record`, tensors are replaced by weak references where stages collect; otherwise these by their tensors.
    """
    if isinstance(value, torch.Tensor):
        weak = record and any(path[: i + 1] in _collected for i in range(1, len(path)))
        return TensorWeakRef(value) if weak else value
    if type(value) is TensorWeakRef:
        tensor = None if record else value()
        return value if record else Freed() if tensor is None else tensor
    if not _is_container(value):
        return value
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if type(value) in (tuple, set):
        items = [_copied((*path, i), item, known, record=record) for i, item in enumerate(value)]
        return type(value)(items)
    made = known[id(value)] = copy.copy(value)
    for key, item in _inside(value).items():
        new = _copied((*path, key), item, known, record=record)
        if dataclasses.is_dataclass(made):
            object.__setattr__(made, key, new)
        else:
            made[key] = new
    return made
