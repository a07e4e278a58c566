"""Snapshots of the Python state that a model's code can reach and change; restored in place, in the same objects.

NOTE [Cells]
A *cell* is an object whose contents can change while it stays the same object: a module with its attributes, a list, a
dictionary, a set, a deque, the data attributes of a class, an array, an object with attributes of its own.

1. A `Snapshot` stores the contents of cells: arrays as copies, everything else by reference. `put` writes the contents
   back into the cells themselves, so that two modules with one list still share that list afterwards. A container that
   holds tensors with autograd graphs is stored as a copy whose tensors are detached: the snapshot may live as long as a
   graph, and the original container would keep other graphs alive.
2. A *shallow* snapshot has the attributes of the given modules, the attributes of plain objects among these, and the
   contents of containers of any depth in both. That is what a recompute puts back.
3. A *deep* one follows all references: modules and other objects in containers, functions with their closure
   variables, data attributes of classes. If a module that is found this way is a parent of the stage,
   only the parent's attributes are examined, not its submodules. Profiling puts everything back with deep snapshots,
   and finds the stages that change, or are left with, more than a shallow one restores: these are never recomputed.
4. Tensors aren't cells: writes to them are found by versions and copies (`_State` in recompute/call.py). A snapshot
   lists the tensors that it met, detached, since their graphs may hold the cells in turn.
5. Generators have states of their own (generators.py); a snapshot lists those that it met.

Example: a stage counts its calls in a list::

    class Stage(nn.Module):
        def forward(self, x):
            self.calls.append(1)
            return x * len(self.calls)

The first run begins with `calls == []` and ends with `calls == [1]`. Before the stage runs again in backward, `put`
writes `[]` into that same list object, so the run computes `x * 1` as before. The function that `put` returned then
writes `[1]` back: the list has one entry for the step. If `calls` belonged to an object in a list, the stage would be
kept.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import itertools
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptplan.state.generators import KINDS as GENERATORS
from ckptplan.state.put_back import Steps, put_back
from ckptplan.tensors.modules import below
from ckptplan.tensors.private import FakeTensor, is_traceable_wrapper_subclass

SEARCH_LIMIT = 4096  # objects that one search examines; a trainer may refer to millions
ARRAY_LIMIT = 1 << 20  # bytes; larger arrays aren't copied, since copies are made at every call

_MODULES_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"forward", "_compiled_call_impl"}
"""Attributes that every module has: they are restored by other code or don't change from call to call."""

ATOMS = frozenset(
    {
        bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice,
        torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
        type, types.ModuleType,
    }
)  # fmt: skip
"""Types of most attributes: immutable, and without references to further objects."""

_SEARCHED_NOT = ("torch", "builtins", "threading", "_thread", "weakref", "logging", "_io", "ckptplan", "enum", "re")
"""Packages whose objects don't belong to a model's state and aren't examined."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the contents of one kind of cell are read, written and iterated over."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    values: Callable[[Any], Iterable[Any]] = tuple


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType)
_NO_DATA = (
    types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property, type,
    types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property,
)  # fmt: skip


def _data_of(kind: type) -> dict[str, Any]:
    """Return the data attributes of a class: no methods, properties or dunder names."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") and name.endswith("__")) and not isinstance(value, _NO_DATA)
    }


def write_items(cell: Any, contents: Any) -> None:
    """Replace all that a list, deque, set or dictionary has by `contents`."""
    cell.clear()
    (cell.extend if isinstance(cell, collections.deque) else cell.update)(contents)


def _write_names(table: dict[str, Any], names: Iterable[str], contents: Mapping[str, Any]) -> None:
    """Replace the entries `names` by `contents`, one at a time: other threads must never see an empty table."""
    for name in set(names) - contents.keys():
        del table[name]
    for name, value in contents.items():
        if table.get(name, contents) is not value:
            table[name] = value


def _write_class(cell: type, contents: Mapping[str, Any]) -> None:
    for name in _data_of(cell).keys() - contents.keys():
        delattr(cell, name)
    for name, value in contents.items():
        if vars(cell).get(name, cell) is not value:
            setattr(cell, name, value)


@functools.lru_cache(maxsize=1 << 10)
def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class stores in `__slots__`."""
    return tuple(
        name
        for c in kind.__mro__
        for name, value in vars(c).items()
        if isinstance(value, types.MemberDescriptorType)
        and inspect.getattr_static(kind, name) is value
        and not name.startswith("__")
    )


def _object_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in slots and in `__dict__`."""
    found = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}  # type: ignore[arg-type]
    return found | getattr(value, "__dict__", {})


def _write_object(value: Any, contents: Mapping[str, Any]) -> None:
    slots = _slots_of(type(value))  # type: ignore[arg-type]
    for name in slots:
        if name in contents:
            now = getattr(value, name, contents)
            # C's slots may be read-only, and make a new number at each reading (those of a timedelta).
            equal = type(now) in ATOMS and type(now) is type(contents[name]) and now == contents[name]
            if now is not contents[name] and not equal:
                object.__setattr__(value, name, contents[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
    table = getattr(value, "__dict__", {})
    _write_names(table, table.keys(), {name: item for name, item in contents.items() if name not in slots})


def _attributes_of_parameter(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter with a class of its own (the scales of a quantized one), without PyTorch's.

    Fake ones have further attributes of their own.
    """
    internal = _OF_FAKE if isinstance(parameter, FakeTensor) else ()
    table = vars(parameter).items()
    return {name: value for name, value in table if not name.startswith("_") and name not in internal}


_OF_FAKE = ("fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor")


def _write_parameter(parameter: torch.Tensor, contents: Mapping[str, Any]) -> None:
    table = vars(parameter)
    for name in _attributes_of_parameter(parameter).keys() - contents.keys():
        del table[name]
    table.update(contents)


def _closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function by name."""
    return dict(inspect.getclosurevars(function).nonlocals)


def _write_closure(function: types.FunctionType, contents: Mapping[str, Any]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in contents:
            cell.cell_contents = contents[name]


_values_of: Callable[[Any], Iterable[Any]] = operator.methodcaller("values")
_LIST = Kind(list, lambda cell, contents: operator.setitem(cell, slice(None), contents))
_DICTIONARY = Kind(dict, write_items, _values_of)
_SET = Kind(set, write_items)
_DEQUE = Kind(list, write_items)
_ARRAY = Kind(np.copy, lambda cell, contents: operator.setitem(cell, Ellipsis, contents), lambda contents: ())
OBJECT = Kind(_object_of, _write_object, _values_of)
CLASS = Kind(_data_of, _write_class, _values_of)
CLOSURE = Kind(_closure_of, _write_closure, _values_of)
_PARAMETER = Kind(_attributes_of_parameter, _write_parameter, _values_of)
_PLAIN_PARAMETERS = (type(None), nn.Parameter, torch.Tensor, FakeTensor)
_TUPLE, _MODULE, _TENSOR, _GENERATOR, _OTHER = "tuple", "module", "tensor", "generator", "other"
_ITERATOR = "iterator"
_ITERATORS = tuple(map(type, (itertools.count(), iter([]), iter(()), iter(range(0)), iter(""))))
"""Iterator types whose copies continue from the same position.

An iterator can't be set back to an earlier position, so a copy that was made there takes its place.
"""
_REPLACED = (torch.Tensor, *_ITERATORS)

_CONTAINERS = (
    (list, _LIST), (dict, _DICTIONARY), ((set,), _SET), (collections.deque, _DEQUE), (np.ndarray, _ARRAY),
    ((tuple, frozenset), _TUPLE), (nn.Module, _MODULE), (torch.Tensor, _TENSOR), (GENERATORS, _GENERATOR),
    (_ITERATORS, _ITERATOR),
)  # fmt: skip


@functools.lru_cache(maxsize=1 << 10)
def kind_of(kind: type) -> Kind | str | None:
    """Return how objects of a type are treated; None if they are immutable and refer to nothing that is examined."""
    if kind in ATOMS or issubclass(kind, (type, BaseException)):
        return None
    return next((found for types_, found in _CONTAINERS if issubclass(kind, types_)), _OTHER)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 10)
def has_attributes(kind: type) -> bool:
    """Whether objects of a type are plain objects with attributes in `__dict__` or slots."""
    if kind in ATOMS or kind in _FUNCTIONS or kind_of(kind) is not _OTHER:  # type: ignore[arg-type]
        return False
    if str(kind.__module__).partition(".")[0] in (*_SEARCHED_NOT, "functools", "types"):
        return kind is types.SimpleNamespace
    return bool(kind.__dictoffset__ or _slots_of(kind))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 10)
def classes_of(kind: type) -> tuple[type, ...]:
    """Return the base classes of a module's type, PyTorch's left out, which may have data attributes."""
    return tuple(c for c in kind.__mro__ if c is not object and c.__module__.partition(".")[0] != "torch")


@functools.lru_cache(maxsize=1 << 12)
def _plain(names: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Return the names among a module's attributes that not every module has, and a getter for their values."""
    plain = tuple(name for name in names if name not in _MODULES_OWN)
    if len(plain) > 1:
        return plain, operator.itemgetter(*plain)
    return plain, lambda table: tuple(table[name] for name in plain)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without those that every module has."""
    names, values_in = _plain(tuple(module.__dict__))
    return dict(zip(names, values_in(module.__dict__), strict=True))


def alone(value: Any) -> Any:
    """Return `value`; a tensor with an autograd graph is detached first."""
    graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if graph else value


def _copied(iterator: Any) -> Any:
    """Return a new iterator that continues from the position of `iterator`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # itertools' copies, removed in Python 3.14
        return copy.copy(iterator)


def _same(a: Any, b: Any) -> bool:
    """Whether contents consist of the same objects; sets are compared by value, arrays by their bytes."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(map(operator.is_, a.values(), b.values())) and list(a) == list(b)
    if isinstance(a, set):
        return bool(a == b)
    return all(map(operator.is_, a, b))


@dataclass(slots=True)
class _Cell:
    """One cell and the contents that it had when the snapshot was taken."""

    cell: Any
    kind: Kind
    contents: Any
    is_replaced: bool = False  # whether the contents have values of the types `_REPLACED`


_Attributes = tuple[
    nn.Module, tuple[str, ...], tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]], Sequence[Any], bool
]
"""A module, the names of all its attributes, the names of the plain ones, the getter of their values, the values when
the snapshot was taken, and whether any of them are of the types `_REPLACED`."""


_Present = tuple[
    nn.Module, tuple[str, ...], tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]], Sequence[Any]
]
"""The first five of these, with the values that the module has now."""


@dataclass
class Snapshot:
    """Contents of the cells that modules lead to, at the time of construction (NOTE [Cells]).

    Parameters
    ----------
    modules : iterable of nn.Module
        Modules to begin at, together with all their submodules, as `below` returns them.
    others : iterable
        Further values to begin at, such as arguments; of these a shallow snapshot takes only generators and tensors.
    deep : bool
        Follow all references, to at most `SEARCH_LIMIT` objects.
    graphs : bool
        Hold tensors with their graphs, and the containers themselves: for a snapshot that ends before the graphs do.
    puts : bool
        False: `put` won't be called, so nothing is copied.

    Attributes
    ----------
    modules : list of nn.Module
        The given modules, and further ones that they lead to.
    given : int
        How many were given.
    tensors : list of (str, torch.Tensor)
        Tensors that were met, with the name of the attribute that led to them.
    generators : list
        Random generators that were met.
    differs : bool
        Whether it has other objects than those that were met: detached tensors, or copies of containers or iterators.
    """

    modules: list[nn.Module]
    others: Iterable[Any] = ()
    deep: bool = False
    graphs: bool = False
    puts: bool = True
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list, init=False)
    generators: list[Any] = field(default_factory=list, init=False)
    differs: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._attributes: list[_Attributes] = []
        self._known: set[int] = set()
        self._iterators: list[Any] = []
        self._looks = SEARCH_LIMIT
        self.modules = list(self.modules)
        self.given = len(self.modules)
        if self.deep:
            self._known.update(map(id, self.modules))
        for module in self.modules[: self.given]:
            self._look_at(module)
        for other in self.others:
            if self.deep or not isinstance(kind_of(type(other)), Kind):  # type: ignore[arg-type]
                self._keep("argument", other)
        if self.deep:
            for c in dict.fromkeys(c for module in self.modules for c in classes_of(type(module))):  # type: ignore[arg-type]
                if data := _data_of(c):
                    self._add(c.__name__, c, CLASS, data)

    def _look_at(self, module: nn.Module) -> None:
        # Runs at every call of every stage, so function calls are avoided here.
        table = module.__dict__
        all_names = tuple(table)
        names, values_in = _plain(all_names)
        values: Sequence[Any] = values_in(table)
        is_replaced = False
        if not ATOMS.issuperset(map(type, values)):
            is_replaced = any(isinstance(value, _REPLACED) for value in values)
            values = [self._keep(name, value) for name, value in zip(names, values, strict=True)]
        self._attributes.append((module, all_names, names, values_in, values, is_replaced))
        for parameter in table.get("_parameters", {}).values():
            if type(parameter) not in _PLAIN_PARAMETERS and id(parameter) not in self._cells:
                self._add("parameter", parameter, _PARAMETER)

    def _keep(self, name: str, value: Any) -> Any:
        """Examine a value and return what the snapshot stores for it.

        That is the value itself, except for tensors with graphs, which are detached, containers of such tensors, and
        iterators, which are copied.
        """
        kind = kind_of(type(value))  # type: ignore[arg-type]
        if kind is None:
            return value
        if kind is _TENSOR:
            given, value = value, value if self.graphs else alone(value)
            self.differs |= value is not given
            self.tensors.append((name, value))
        elif kind is _GENERATOR:
            self.generators.append(value)
        elif kind is _TUPLE:
            if not ATOMS.issuperset(map(type, value)):
                return replaced(value, functools.partial(self._keep, name))
        elif isinstance(kind, Kind):
            if id(value) in self._cells:
                return self._cells[id(value)].cell
            if kind is not _ARRAY or self._copies(value):
                return self._add(name, value, kind)
        elif kind is _ITERATOR:
            if self.puts:
                value = _copied(value)
                self._iterators.append(value)
                self.differs = True
        elif not self.deep:
            if has_attributes(type(value)) and id(value) not in self._cells:  # type: ignore[arg-type]
                self._add(name, value, OBJECT)
        elif kind is _MODULE:
            self._found(value)
        elif isinstance(value, types.MethodType):
            self._keep(name, value.__self__)
        elif isinstance(value, types.BuiltinMethodType) and isinstance(kind_of(type(value.__self__)), Kind):  # type: ignore[arg-type]
            owner = self._keep(name, value.__self__)  # a copy if it holds tensors with graphs
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        elif self._is_searched(value):
            return self._add(name, value, CLOSURE if isinstance(value, types.FunctionType) else OBJECT)
        return value

    def _keep_inside(self, name: str, value: Any) -> Any:
        """Examine a value in a cell: a shallow snapshot doesn't follow objects there."""
        follows = self.deep or kind_of(type(value)) is not _OTHER  # type: ignore[arg-type]
        return self._keep(name, value) if follows else value

    def _add(self, name: str, value: Any, kind: Kind, contents: Any = None) -> Any:
        contents = kind.read(value) if contents is None else contents
        found = self._cells[id(value)] = _Cell(value, kind, contents)
        inside = kind.values(contents)
        if not ATOMS.issuperset(map(type, inside)):
            found.contents = replaced(contents, functools.partial(self._keep_inside, name))
            found.is_replaced = any(isinstance(x, _REPLACED) for x in inside)
            if kind not in (OBJECT, CLASS, CLOSURE, _PARAMETER) and not _same(found.contents, contents):
                found.cell = copy.copy(value)  # the original would keep graphs alive
                kind.write(found.cell, found.contents)
                self.differs = True
        return found.cell

    def _copies(self, array: np.ndarray[Any, Any]) -> bool:
        return array.nbytes <= ARRAY_LIMIT and array.flags.writeable and not array.dtype.hasobject

    def _is_searched(self, value: Any) -> bool:
        """Whether an object is examined; counts it against `SEARCH_LIMIT`."""
        if self._looks <= 0 or id(value) in self._cells:
            return False
        if not hasattr(value, "__dict__") and not _slots_of(type(value)):  # type: ignore[arg-type]
            return False
        owner = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
        if str(owner).partition(".")[0] in _SEARCHED_NOT:
            return False
        self._looks -= 1
        return True

    def _found(self, module: nn.Module) -> None:
        """Add a module that was met in an attribute or a container, with its submodules unless it is a parent."""
        inside = below(module)
        parent = bool(self.modules) and any(m is self.modules[0] for m in inside)
        for m in (module,) if parent else inside:
            if id(m) not in self._known:
                self._known.add(id(m))
                self.modules.append(m)
                self._look_at(m)

    @property
    def cells(self) -> set[int]:
        """Identities of the containers and objects that were met."""
        return set(self._cells)

    def put(self, instead: Mapping[int, Any] = MappingProxyType({})) -> Callable[[], None]:
        """Write the snapshot's contents into the cells; return a function that writes the present contents back.

        Parameters
        ----------
        instead : mapping, optional
            Identity of a tensor -> the tensor to put in its place. Iterators are replaced by fresh copies at each call.
        """
        present: list[_Present] = []
        undo: Steps = [functools.partial(_put_again, present)]
        if self._iterators:
            instead = {**instead, **{id(iterator): _copied(iterator) for iterator in self._iterators}}
        try:
            for module, all_names, names, values_in, values, is_replaced in self._attributes:
                if instead and is_replaced:
                    values = [instead.get(id(value), value) for value in values]
                table = module.__dict__
                # All are undone: the loop may have reset what forward changes, or forward itself, at its end, before
                # which the next run may stop.
                if tuple(table) == all_names:
                    found = values_in(table)
                    present.append((module, all_names, names, values_in, found))
                    if all(map(operator.is_, found, values)):
                        continue
                else:
                    undo.append(functools.partial(_put, module, plain_attributes(module)))
                _put(module, dict(zip(names, values, strict=True)))
            for cell in self._cells.values():
                contents = cell.contents
                if instead and cell.is_replaced:
                    contents = replaced(contents, lambda value: instead.get(id(value), value))
                before = cell.kind.read(cell.cell)
                undo.append(functools.partial(_write_again, cell, before))
                if not _same(before, contents):
                    cell.kind.write(cell.cell, contents)
        except BaseException:
            put_back(undo)
            raise
        return functools.partial(put_back, undo)

    def restore(self) -> None:
        """Write the contents back for good, of a snapshot that has what it met; each, even where another can't be."""
        steps: Steps = [functools.partial(_write_again, cell, cell.contents) for cell in self._cells.values()]
        steps += [functools.partial(_put_again, [attributes[:5]]) for attributes in self._attributes]
        put_back(steps)


class Contents:
    """All that modules and other values lead to, in a form that can be compared and holds nothing of it alive.

    Objects are compared by identity, numbers and strings by value, arrays by their bytes, tensors by storage and
    version.

    Parameters
    ----------
    found : Snapshot
        A deep one with graphs, which isn't put.
    left_out : set of int
        Identities of modules and cells that aren't compared: what a recompute puts back.
    """

    def __init__(self, found: Snapshot, left_out: Set[int] = frozenset()) -> None:
        self._marks: dict[int, tuple[str, dict[Any, Any]]] = {}
        for module, _, names, _, values, _ in found._attributes:
            if id(module) not in left_out:
                marks = dict(zip(names, map(_mark, values), strict=True))
                self._marks[id(module)] = f"{type(module).__name__}.", marks
        for module in found.modules[found.given :]:
            self._marks[id(module)][1].update((name, _mark(buffer)) for name, buffer in module._buffers.items())
        for key, each in found._cells.items():
            if key not in left_out:
                self._marks[key] = f"a {type(each.cell).__name__}", _marks_in(each.contents)

    @classmethod
    def of(cls, modules: list[nn.Module], others: Iterable[Any] = ()) -> Contents:
        """Return the contents of all that a stage's modules, and further values, lead to."""
        return cls(Snapshot(modules, others, deep=True, graphs=True, puts=False))

    def differences(self, now: Contents) -> list[str]:
        """Return the names of modules' attributes, and the types of other objects, that have changed until `now`.

        An object that is no longer reached is left out: what led to it has changed.
        """
        found: list[str] = []
        for key, (kind, before) in self._marks.items():
            after = now._marks.get(key, (kind, before))[1]
            names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
            found += [f"{kind}{name}" for name in names] if kind.endswith(".") else [kind] * bool(names)
        return found


def _marks_in(contents: Any) -> dict[Any, Any]:
    """Return the marks of a cell's contents by name, or by position; `None` is the key of what counts as a whole."""
    if isinstance(contents, np.ndarray):
        return {None: (str(contents.dtype), contents.shape, hash(contents.tobytes()))}
    if isinstance(contents, set):
        return {None: frozenset(map(hash, contents))}
    if isinstance(contents, dict):
        marks = {_mark(key): _mark(value) for key, value in contents.items()}
        return marks | {None: tuple(marks)}  # their order
    return dict(enumerate(map(_mark, contents)))


def _mark(value: Any) -> Any:
    """Return what is compared of a value."""
    if type(value) in ATOMS:
        return type(value), repr(value) if isinstance(value, (float, complex, slice)) else value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_traceable_wrapper_subclass(value):
        return value.untyped_storage()._cdata, value.shape, None if value.is_inference() else value._version
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, _ITERATORS):
        return tuple(map(_mark, value.__reduce__()))
    if isinstance(value, types.BuiltinMethodType):
        return value.__name__, id(value.__self__)
    return id(value)


class Tables:
    """The modules' tables of buffers and submodules by name, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, table.copy())
            for m in modules
            for table in (m._buffers, m._modules)
            if isinstance(table, dict)  # the tables of a scripted module can't change
        ]

    @classmethod
    def of(cls, tables: Iterable[Any]) -> Tables:
        """Return an object that restores the given dictionaries and sets."""
        found = cls(())
        found._found = [(table, table.copy()) for table in tables]
        return found

    def put(self, instead: Mapping[int, Any] = MappingProxyType({})) -> Callable[[], None]:
        """Restore the tables; parameter and result as for `Snapshot.put`."""
        undo: Steps = []
        for table, contents in self._found:
            if not table and not contents:
                continue
            if instead:
                contents = {name: instead.get(id(value), value) for name, value in contents.items()}
            if not _same(table, contents):
                undo.append(functools.partial(write_items, table, table.copy()))
                write_items(table, contents)
        return functools.partial(put_back, undo)


def replaced(contents: Any, by: Callable[[Any], Any]) -> Any:
    """Return contents, or a tuple, with each value replaced by `by(value)`; an unchanged tuple is returned itself."""
    if isinstance(contents, dict):
        found: Any = {key: by(value) for key, value in contents.items()}
    elif isinstance(contents, tuple) and hasattr(contents, "_make"):
        found = contents._make(map(by, contents))
    else:
        found = type(contents)(map(by, contents))
    return contents if isinstance(contents, tuple) and _same(found, contents) else found


def _write_again(cell: _Cell, contents: Any) -> None:
    """Write earlier contents into a cell, unless it has them already."""
    if not _same(cell.kind.read(cell.cell), contents):
        cell.kind.write(cell.cell, contents)


def _put_again(present: list[_Present]) -> None:
    """Restore modules' plain attributes where they differ."""
    for module, all_names, names, values_in, values in present:
        table = module.__dict__
        try:
            same = len(table) == len(all_names) and all(map(operator.is_, values_in(table), values))
        except KeyError:
            same = False
        if not same:
            _put(module, dict(zip(names, values, strict=True)))


def _put(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Replace a module's plain attributes, bypassing its `__setattr__` and `__delattr__`."""
    _write_names(module.__dict__, plain_attributes(module), attributes)
