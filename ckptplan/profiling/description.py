"""A digest of objects and of the code that they lead to (NOTE [What a profile depends on] in cache_key.py)."""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import dis
import fractions
import functools
import gc
import hashlib
import importlib.util
import logging
import pathlib
import re
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptplan.profiling.installed import Installed, NoKeyError, found_as
from ckptplan.profiling.loops import ANY_NAME, Loop, held_loops, properties_of_loops
from ckptplan.profiling.values.constants import is_mask
from ckptplan.runtime.private import OpOverload, OpOverloadPacket

_TEXT: frozenset[type] = frozenset((
    bool, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented), range, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, torch.Size,
    decimal.Decimal,
    fractions.Fraction, uuid.UUID, datetime.date, datetime.timedelta, pathlib.PosixPath, pathlib.PurePosixPath,
    pathlib.WindowsPath, pathlib.PureWindowsPath,
))  # fmt: skip
"""Types whose values are described by their `repr`, unlike those of their subclasses."""
_TYPING = (types.GenericAlias, types.UnionType)
_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
"""Types of the members of classes that are written in C."""
_WALKED = frozenset(("types", "argparse", "collections", "dataclasses", "contextlib", "enum", "functools"))
"""Packages of the standard library whose objects are described by their attributes."""
_INERT = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__slots__", "__abstractmethods__", "__parameters__",
    "__type_params__", "__orig_bases__", "__firstlineno__", "__static_attributes__", "__slotnames__", "_abc_impl",
))  # fmt: skip
"""Attributes of classes that are described only if code names them."""
_OF_MODULES = frozenset((
    "__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__path__",
    "__spec__", "__warningregistry__",
))  # fmt: skip
_ANY_CODE = frozenset(("globals", "eval", "exec", "__import__"))
"""Built-in functions that lead to code or variables which no name shows."""
_OPERATORS = (type(torch.ops), type(torch.ops.aten), OpOverload, OpOverloadPacket)
_PYTORCHS = ("aten", "prims", "prim")
"""Namespaces of operators whose implementations are PyTorch's, unless `foreign_kernels` finds others."""
_HASHES = ("_original_object_hash",)
"""Keys of hashes of texts, which differ from process to process (transformers, in generation's configurations)."""
_UNORDERED = ("_use_default_values",)
"""Keys of lists that diffusers makes from sets, so that each process has another order."""
_OF_A_PROCESS = re.compile("[0-9a-f]{32}")
"""Texts in installed modules that are drawn as these are imported."""
_MOST_VALUES = 1 << 19
_MOST_TENSOR_BYTES = 1 << 28
"""Limits of what is described; beyond them, measuring anew takes less."""
_DEPTH = 3
"""Containers in containers of installed modules that are searched for what isn't theirs."""
_POINTER = object.__basicsize__ // 2


class Description:
    """A digest of values and of the code that they lead to."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._known: dict[int, int] = {}
        self._held: list[Any] = []  # so that no identity is used twice
        self._count = 0
        self._installed = Installed()
        self._installed.note("torch")
        self._names: set[str] = {"__getattr__"}
        """Names in all code that was described."""
        self._classes: dict[type, set[str]] = {}
        """Class that isn't installed -> names of its attributes that are described."""
        self._searched: set[int] = set()
        """Identities of what was searched for others' functions."""
        self._modules: dict[int, _Variables] = {}
        self._loops: list[tuple[Loop, set[str]]] = []
        """Loops, and the names of their attributes that are described."""
        self._keepers: list[tuple[Any, set[str]]] = []
        """Objects that keep a loop, and the names of their properties that are described."""
        self._reach(vars(builtins), "builtins")

    @property
    def digest(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()

    def add(self, *values: Any) -> None:
        """Describe values."""
        for value in values:
            self._value(value)

    def add_installed(self, *owners: Any) -> None:
        """Describe what installed modules or classes have under each of their names."""
        for owner in owners:
            self._search_all(vars(owner))

    def finish(self) -> None:
        """Describe classes, and the variables that any code names, until there are no more; then patches, versions."""
        while self._finish_classes() or self._finish_variables() or self._finish_replaced() or self._finish_loops():
            pass
        self._say(*self._installed.versions())

    def _finish_classes(self) -> bool:
        found = False
        for kind, done in list(self._classes.items()):
            for name in sorted(vars(kind).keys() - done - (_INERT - self._names)):
                found = True
                done.add(name)
                self._say("attribute", str(self._known[id(kind)]), name)
                self._value(vars(kind)[name])
        return found

    def _finish_variables(self) -> bool:
        found = False
        for module in list(self._modules.values()):
            for name in module.todo(self._names):
                found = True
                module.done.add(name)
                self._say("variable", module.name, name)
                value = module.variables[name]
                if module.installed and not isinstance(value, types.ModuleType):
                    self._search(value, 0)
                else:
                    self._value(value)
        return found

    def _finish_replaced(self) -> bool:
        found = [(name, value) for name, value in self._installed.replaced() if id(value) not in self._known]
        for name, value in found:
            self._say("in place of", name)
            self._value(value)
        return bool(found)

    def _finish_loops(self) -> bool:
        found = False
        for loop, done in list(self._loops):
            for name in sorted(loop.names(self._names) - done):
                found = True
                done.add(name)
                own = (
                    member
                    for kind, member in loop.members(name)
                    if not self._installed.has_class(kind) or self._installed.lacks(member)
                )
                self.add("of the loop", name, loop.read(name, self._names), *own)
        for keeper, done in list(self._keepers):
            for name, value in properties_of_loops(keeper, self._names - done).items():
                found = True
                done.add(name)
                self.add("of the loop", name, value)
        return found

    def _loop(self, loop: Loop) -> None:
        for kind in type(loop.value).__mro__[:-1]:
            if self._installed.has_class(kind):
                self._value(kind)
            else:
                self._say(str(kind.__module__), kind.__qualname__)
        self._loops.append((loop, set()))

    def _say(self, *words: str) -> None:
        for word in words:
            self._say_bytes(word.encode(errors="surrogatepass"))

    def _say_bytes(self, data: bytes) -> None:
        self._hash.update(b"%d:" % len(data) + data)

    def _value(self, value: Any) -> None:
        kind = type(value)
        self._count += 1
        if self._count > _MOST_VALUES:
            raise NoKeyError(f"it leads to more than {_MOST_VALUES} values")
        if kind in _TEXT or kind is int:
            self._say(kind.__name__, hex(value) if kind is int else repr(value))
            return
        if id(value) in self._known:
            self._say("known", str(self._known[id(value)]))
            return
        self._known[id(value)] = len(self._held)
        self._held.append(value)
        if kind.__module__ == "typing" or kind in _TYPING:
            self._typing(value)
            return
        base = next(base for base in kind.__mro__ if base in _DESCRIBED)
        self._say(base.__name__)
        _DESCRIBED[base](self, value)
        if kind is not base and base not in _BY_THEMSELVES:
            self._own(value, base)

    # --- values ---

    def _own(self, value: Any, base: type) -> None:
        """Describe the class and the attributes of a value, beyond what it has from a built-in base."""
        kind = type(value)
        package = str(kind.__module__).partition(".")[0]
        if package in sys.stdlib_module_names - _WALKED or _is_opaque(kind, base):
            raise NoKeyError(f"it has a {kind.__module__}.{kind.__qualname__}")
        self._value(kind)
        attributes, loops = _attributes(value), held_loops(value)
        self._items({name: value for name, value in attributes.items() if name not in loops} if loops else attributes)
        if loops:
            self._keepers.append((value, set()))
        for name, reached_by in loops.items():
            if attributes.get(name) is not None:
                self._loop(Loop(attributes[name], holders=reached_by))
        for cls, name, slot in _slots(kind, base):
            try:
                self.add(cls.__qualname__, name, slot.__get__(value))
            except AttributeError:  # not set
                self._say("not set")

    def _tensor(self, tensor: torch.Tensor) -> None:
        if (
            type(tensor) not in (torch.Tensor, nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_quantized
        ):
            raise NoKeyError(f"it has a {type(tensor).__name__} of layout {tensor.layout} and {tensor.dtype}")
        if tensor.grad_fn is not None:
            raise NoKeyError("it has a tensor with a graph from before")
        storage = tensor.untyped_storage()
        number = self._known.setdefault(storage._cdata, len(self._held))
        self._held.append(storage)
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes(), tensor.dtype, tensor.device)
        kind = tensor.is_conj(), tensor.is_neg(), tensor.device.type == "cpu" and tensor.is_pinned()
        graph = tensor.requires_grad, tensor.is_inference()
        self._say(type(tensor).__name__, str(number), repr(layout), repr(kind), repr(graph))
        self.add(tensor.grad, tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        self.add(vars(tensor))
        if (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta) and not is_mask(tensor):
            return
        if tensor.nbytes > _MOST_TENSOR_BYTES:
            raise NoKeyError(f"it has a tensor of {tensor.nbytes} bytes of {tensor.dtype}, whose values count")
        self._say_bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        if type(array) is not np.ndarray or array.dtype.hasobject or array.nbytes > _MOST_TENSOR_BYTES:
            raise NoKeyError(f"it has a {type(array).__name__} of {array.dtype}, {array.nbytes} bytes")
        self._say(repr((array.dtype, array.shape, array.strides, array.flags.writeable)))
        self.add(array.base)
        self._say_bytes(array.tobytes())

    def _items(self, table: Mapping[Any, Any]) -> None:
        of: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
        self._say(str(of.__len__(table)))
        for key, value in of.items(table):
            if key in _UNORDERED and type(value) is list:
                self.add(key, set(value))
            else:
                self.add(key, None if key in _HASHES and type(value) is int else value)

    def _default_items(self, table: collections.defaultdict[Any, Any]) -> None:
        self._items(table)
        self.add(table.default_factory)

    def _set(self, values: Iterable[Any]) -> None:
        named = [(_name_in_set(value), value) for value in values]
        order = sorted(name for name, _ in named)
        if len(set(order)) < len(order):
            raise NoKeyError("it has a set of objects, which have no order")
        self.add(len(order), *(value for _, value in sorted(named, key=lambda pair: pair[0])))

    def _typing(self, value: Any) -> None:
        self._say(repr(value))
        self.add(getattr(value, "__origin__", None), getattr(value, "__args__", None))

    # --- code ---

    def _class(self, kind: type) -> None:
        self._say(str(kind.__module__), kind.__qualname__)
        if type(kind) is not type:
            self._value(type(kind))
        self.add(*kind.__mro__[1:-1])
        if not self._installed.has_class(kind):
            self._classes[kind] = set()
            return
        self._installed.note(kind.__module__)
        self._search_all(vars(kind))
        module = sys.modules.get(kind.__module__)
        if kind.__module__.partition(".")[0] not in sys.stdlib_module_names and id(module) not in self._searched:
            self._searched.add(id(module))
            self._search_all(getattr(module, "__dict__", {}))

    def _function(self, function: types.FunctionType) -> None:
        self._say(str(function.__module__), function.__qualname__)
        if self._installed.has_function(function):
            self._installed.note(function.__globals__.get("__name__"), function.__code__.co_filename)
            if found_as(function.__module__, function.__qualname__) is function:
                self._search(function, 0)
                return
        else:
            self.code(function.__code__, function.__globals__)
        self.add(function.__defaults__, function.__kwdefaults__, vars(function))
        self.add(*map(_contents, function.__closure__ or ()))

    def code(self, code: types.CodeType, variables: Mapping[str, Any]) -> None:
        """Describe instructions, constants, and what they name among a module's variables and imports."""
        self._say_bytes(code.co_code)
        self._say_bytes(getattr(code, "co_exceptiontable", b""))
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        self._say(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, counts)))
        names = set(code.co_names)
        imports = any(op == dis.opmap["IMPORT_NAME"] for op in code.co_code[::2])
        asked = names & _ANY_CODE - variables.keys()
        if asked and any(
            i.opname in ("LOAD_GLOBAL", "LOAD_NAME") and i.argval in asked for i in dis.get_instructions(code)
        ):
            raise NoKeyError(f"it has code that calls {', '.join(sorted(asked))}")
        if "import_module" in names or "__globals__" in names or _names_all_modules(names, variables):
            raise NoKeyError("it has code that looks for modules or variables by name")
        self._names |= names
        self._reach(variables, str(variables.get("__name__")))
        if imports:
            self._imports(code, variables)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, variables)
            else:  # the order of a set's texts differs from process to process
                self._say(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant))
                self._names |= set(_texts(constant))

    def _imports(self, code: types.CodeType, variables: Mapping[str, Any]) -> None:
        """Describe the modules that a function imports."""
        before: list[Any] = [None, None]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                level, name = before[-2], str(instruction.argval)
                if level:
                    name = importlib.util.resolve_name("." * level + name, str(variables.get("__package__")))
                for end in (*(match.start() for match in re.finditer(r"\.", name)), len(name)):
                    self._import(name[:end])
            if instruction.opname != "EXTENDED_ARG":
                before.append(instruction.argval)

    def _import(self, name: str) -> None:
        if name in sys.modules:
            self._value(sys.modules[name])
        elif name.partition(".")[0] not in sys.stdlib_module_names:
            raise NoKeyError(f"it has code that imports {name}, which isn't loaded")

    def _module(self, module: types.ModuleType) -> None:
        if isinstance(module, _OPERATORS):
            raise NoKeyError("it names torch.ops, whose operators may have any code")
        self._say(module.__name__)
        if type(module) is not types.ModuleType:
            self._value(type(module))
        self._reach(vars(module), module.__name__, held=True)

    def add_name(self, function: Any, module: object) -> None:
        """Describe a function that is written in C by its name; it has to be of an installed package."""
        if not self._installed.has_module(module):
            raise NoKeyError(f"it has {function!r}, of an extension module that isn't an installed package")
        self._installed.note(module)
        self._say(str(module), function.__qualname__)

    def is_installed(self, function: types.FunctionType) -> bool:
        """Return whether a function's code is installed."""
        return self._installed.has_function(function)

    def _reach(self, variables: Mapping[str, Any], name: str, *, held: bool = False) -> None:
        """Note that code reads variables of a module: under their names, or if it holds the module in any way."""
        installed = self._installed.has_module(name) and vars(sys.modules.get(name, types)) is variables
        module = self._modules.setdefault(id(variables), _Variables(name, variables, installed))
        module.held = module.held or held

    def _search_all(self, variables: Mapping[str, Any]) -> None:
        for name, value in list(variables.items()):
            if name not in _OF_MODULES and not isinstance(value, types.ModuleType) and value is not variables:
                self._say(name)
                self._search(value, 0)

    def _search(self, value: Any, depth: int) -> None:
        """Describe a variable of installed code: its name or text, and what isn't installed completely."""
        kind = type(value)
        if kind in _TEXT or kind is int:
            self._say("" if _OF_A_PROCESS.fullmatch(str(value)) else repr(value))
        elif self._installed.lacks(value):
            self._value(value)
        elif issubclass(kind, type):
            self._say(value.__module__, value.__qualname__)
        elif kind is not types.ModuleType:
            self._say(str(getattr(value, "__module__", None)) if kind in _WITH_NAME else "", *_name_of(value))
            if depth < _DEPTH and id(value) not in self._searched:
                self._searched.add(id(value))
                self._held.append(value)
                for part in _parts(value):
                    self._search(part, depth + 1)


class _Variables:
    """The variables of a module that code reaches."""

    def __init__(self, name: str, variables: Mapping[str, Any], installed: bool) -> None:
        self.name, self.variables, self.installed = name, variables, installed
        self.held = False
        """Whether code holds the module itself."""
        self.done: set[str] = set()

    def todo(self, names: set[str]) -> list[str]:
        """Return the variables that code may read, by these names, and that aren't described."""
        found = self.variables.keys() - self.done
        if self.installed or not self.held or not names & ANY_NAME:
            return sorted(found & names)
        return sorted(found - _OF_MODULES)


def foreign_kernels() -> list[str]:
    """Return PyTorch's operators for which Python code that isn't installed has registered an implementation."""
    found = []
    for key in torch.library._impls:  # type: ignore[attr-defined]
        namespace, name, to = (*key.split("/"), "", "")[:3]
        if namespace in _PYTORCHS and to != "Meta":
            kernels: str = torch._C._dispatch_dump(f"{namespace}::{name}")  # type: ignore[attr-defined]
            files = re.findall(r"registered at (.*\.py|<.*>):", kernels)
            if not all(Installed().has_file(file) for file in files):
                found.append(f"{namespace}::{name}")
    return found


def _is_opaque(kind: type, base: type) -> bool:
    """Return whether values of a class have bytes of their own beyond those of `base`, attributes and slots."""
    own = (kind.__dictoffset__ > 0 or bool(kind.__itemsize__)) and not base.__dictoffset__
    weak = kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__
    known = base.__basicsize__ + _POINTER * (own + weak + len(list(_slots(kind, base))))
    return kind.__basicsize__ > known or (bool(kind.__dictoffset__) and _dict_slot(kind) is None)


def _slots(kind: type, base: type) -> Iterator[tuple[type, str, types.MemberDescriptorType]]:
    for cls in kind.__mro__:
        if cls not in base.__mro__ and "__slots__" in vars(cls):
            for name, member in vars(cls).items():
                if isinstance(member, types.MemberDescriptorType) and member.__objclass__ is cls:
                    yield cls, name, member


def _dict_slot(kind: type) -> types.GetSetDescriptorType | None:
    """The slot with the attributes of a class's values; None if they have none, or code of their own gives them."""
    found = next((vars(cls)["__dict__"] for cls in kind.__mro__ if "__dict__" in vars(cls)), None)
    return found if isinstance(found, types.GetSetDescriptorType) else None


def _attributes(value: Any) -> dict[str, Any]:
    slot = _dict_slot(type(value))
    return {} if slot is None else slot.__get__(value)


def _texts(constant: Any) -> Iterator[str]:
    """Yield the texts in a constant that may name a variable."""
    if isinstance(constant, str):
        yield from (part for part in constant.split(".") if part.isidentifier())
    elif isinstance(constant, (tuple, frozenset)):
        for part in constant:
            yield from _texts(part)


def _names_all_modules(names: set[str], variables: Mapping[str, Any]) -> bool:
    return "modules" in names and any(variables.get(name) is sys for name in names)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set
        return None


def _name_in_set(value: Any) -> tuple[str, str]:
    """A text by which values in a set are told apart, the same in each process."""
    if type(value) in _TEXT or type(value) is int:
        return type(value).__name__, repr(value)
    if isinstance(value, (type, types.FunctionType)):
        return str(value.__module__), value.__qualname__
    raise NoKeyError("it has a set of objects, which have no order")


_WITH_NAME = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _name_of(value: Any) -> list[str]:
    """The type of a value, and its name if it is a function."""
    return [type(value).__name__, value.__qualname__] if type(value) in _WITH_NAME else [type(value).__name__]


def _parts(value: Any) -> list[Any]:
    """What installed objects hold that may not be installed: contents, wrapped functions, tables of registries."""
    kind = type(value)
    if kind is types.FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        inside = (*map(_contents, value.__closure__ or ()), *vars(value).values())
        return [*defaults, *(part for part in inside if type(part) not in _TEXT and type(part) is not int)]
    if kind in (staticmethod, classmethod):
        return [value.__func__]
    if issubclass(kind, property):
        return [value.fget, value.fset, value.fdel]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if issubclass(kind, dict):
        return [part for pair in list(dict.items(value)) for part in pair]
    if issubclass(kind, (list, tuple, collections.deque)):
        return list(value)
    if issubclass(kind, logging.Filterer):
        return []
    tables = [*_attributes(value).values(), *vars(kind).values()]
    return [table for table in tables if type(table) in (dict, list, types.FunctionType, types.MethodType)]


# --- how values of built-in types are described ---


def _by(function: Callable[[Any], Iterable[Any]]) -> Callable[[Description, Any], None]:
    """Return a description by the values that a function finds."""
    return lambda text, value: text.add(*function(value))


def _sequence(kind: Any) -> Callable[[Description, Any], None]:
    return _by(lambda value: (kind.__len__(value), *kind.__iter__(value)))


def _set(kind: Any) -> Callable[[Description, Any], None]:
    return lambda text, value: text._set(kind.__iter__(value))


def _of_c(text: Description, value: Any) -> None:
    """Describe a function of a C extension, which has to be an installed one."""
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType) or type(owner).__name__ == "PyCapsule":
        text.add_name(value, value.__module__ or getattr(owner, "__name__", None))
    else:
        text.add(owner, value.__name__)


def _of_class(text: Description, value: Any) -> None:
    text.add(value.__objclass__, value.__name__)
    if not isinstance(value, types.MemberDescriptorType):
        text.add_name(value, value.__objclass__.__module__)


def _operator(text: Description, value: Any) -> None:
    name = str(value)
    if name.partition(".")[0] not in _PYTORCHS:
        raise NoKeyError(f"it has the operator {name}, which may have any code")
    text.add(name)


def _ufunc(text: Description, value: np.ufunc) -> None:
    if getattr(np, value.__name__, None) is not value:
        raise NoKeyError(f"it has {value!r}, which may call any code")
    text.add(value.__name__)


def _cached(text: Description, value: Any) -> None:
    """Describe a function with a cache, whose contents can't be seen."""
    text.add(value.__wrapped__, _attributes(value), value.cache_parameters())
    inside = value.__wrapped__
    if value.cache_info().currsize and not (isinstance(inside, types.FunctionType) and text.is_installed(inside)):
        raise NoKeyError(f"it has {value.__qualname__}, whose cache is filled")


def _nothing(text: Description, value: Any) -> None:
    """Describe a value that its type, class and attributes tell all of."""


def _repr_of(kind: Any) -> Callable[[Description, Any], None]:
    return _by(lambda value: (kind.__repr__(value),))


def _of_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:  # not set, and without a default
        return ...


_DESCRIBED: dict[type, Callable[[Description, Any], None]] = {
    object: _nothing,
    **{kind: _repr_of(kind) for kind in (str, int, float, complex, bytes, bytearray, np.dtype)},
    np.generic: _by(lambda value: (np.asarray(value),)),
    torch.Tensor: Description._tensor,
    np.ndarray: Description._array,
    dict: Description._items,
    collections.OrderedDict: Description._items,
    collections.defaultdict: Description._default_items,
    types.MappingProxyType: _by(gc.get_referents),
    list: _sequence(list),
    tuple: _sequence(tuple),
    collections.deque: _by(lambda value: (*collections.deque.__iter__(value), "at most", value.maxlen)),
    set: _set(set),
    frozenset: _set(frozenset),
    slice: _by(lambda value: (value.start, value.stop, value.step)),
    re.Pattern: _by(lambda value: (value.pattern, value.flags)),
    datetime.datetime: _by(lambda value: value.__reduce__()[1]),
    types.FunctionType: Description._function,
    types.CodeType: lambda text, value: text.code(value, {}),
    types.CellType: _by(lambda value: (_contents(value),)),
    types.MethodType: _by(lambda value: (value.__func__, value.__self__)),
    staticmethod: _by(lambda value: (value.__func__,)),
    classmethod: _by(lambda value: (value.__func__,)),
    property: _by(lambda value: (value.fget, value.fset, value.fdel)),
    functools.partial: _by(lambda value: functools.partial.__reduce__(value)[2]),  # type: ignore[index]
    functools._lru_cache_wrapper: _cached,
    collections._tuplegetter: _by(lambda value: value.__reduce__()[1]),  # type: ignore[attr-defined]
    types.BuiltinFunctionType: _of_c,
    types.MethodWrapperType: _by(lambda value: (value.__self__, value.__name__)),
    **dict.fromkeys(_DESCRIPTORS, _of_class),
    np.ufunc: _ufunc,
    OpOverload: _operator,
    OpOverloadPacket: _operator,
    logging.Logger: _by(lambda value: (value.name,)),
    type(threading.Lock()): _nothing,
    type(threading.RLock()): _nothing,
    threading.local: _by(lambda value: (value.__dict__,)),
    type: Description._class,
    types.ModuleType: Description._module,
    Loop: Description._loop,
    weakref.ref: _by(lambda value: (value(), value.__callback__)),
    ContextVar: _by(lambda value: (value.name, _of_context(value))),
}
"""How values are described by the first of these types that they are of; their classes and attributes are added."""
_BY_THEMSELVES = frozenset((
    type, types.ModuleType, torch.Tensor, np.ndarray, np.dtype, np.generic, OpOverload,
    OpOverloadPacket, Loop,
))  # fmt: skip
"""Types whose description is all, also for subclasses."""
