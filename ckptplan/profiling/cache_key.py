"""A key of everything that a profile depends on.

NOTE [What a profile depends on]

1. Code: the forwards and hooks of the modules, the loss, the step, the optimizer, and what these name: functions,
   attributes of classes, variables that are global or enclosed. A function counts with its instructions, constants and
   defaults. Installed packages count with their versions, but for functions of code that isn't installed in their
   classes, in the files of the model's classes, and in the containers of global objects there.
2. Values that this code can reach: attributes of modules and objects, configurations, containers. Of floating tensors
   the layout counts, of others the values as well, since traces run on them.
3. Inputs, by the same rule; autocast; flags of precision, attention and determinism; threads; environment variables;
   the machine and its device.

Anything that isn't described so (an iterator, a file, a random generator, an object of an extension module) makes the
step one without a key. Example: the keys of a model are different after `model.rate = 0.2`, after an edit of a function
that `forward` calls, and for a mask with other values.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import logging
import os
import pathlib
import platform
import re
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_code
from torch.nn.utils import parametrize

import ckptplan
from ckptplan.profiling.target import Target
from ckptplan.profiling.workload.optimizers import OptimizerLike
from ckptplan.runtime.accelerator import is_accelerator, properties
from ckptplan.runtime.step import TrainingStep

_SITE = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib", "stdlib", "platstdlib")})
"""Folders of installed packages."""
_CALLED = ("forward", "backward", "setup_context", "step")
"""Names of methods that are called without being named; those between double underscores are, too."""
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_TEXT: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, slice, range, enum.Enum, pathlib.PurePath, re.Pattern, np.dtype, np.generic,
    datetime.date, datetime.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID, torch.finfo, torch.iinfo,
)  # fmt: skip
"""Types whose values are described by their `repr`."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local)
_NO_STATE: tuple[type, ...] = (
    *_LOCKS, logging.Filterer, types.BuiltinFunctionType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType,
    types.MemberDescriptorType, np.ufunc, torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.GenericAlias,
)  # fmt: skip
"""Types of which the name of a value is enough."""
_WALKED = ("types", "argparse", "collections")
"""Packages of the standard library whose objects are described by their attributes."""
_MOST_VALUES = 1 << 19
_MOST_TENSOR_BYTES = 1 << 28
"""Limits of what is described; beyond them, measuring anew takes less."""
_OF_THE_SHELL = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM.*|COLUMNS|LINES|SSH_.*|XDG_.*|DBUS_.*|TMPDIR|PYTEST_.*|CKPTPLAN_.*"
)
"""Environment variables that differ from shell to shell and that no step depends on."""


class NoKeyError(Exception):
    """A step can't be described; the message says why."""


def key_of(
    step: TrainingStep,
    optimizer: OptimizerLike | None,
    target: Target,
    swap_dir: str | Path | None,
    menus: bool,
    notes: Sequence[str],
) -> str:
    """Return the key of a step's profile (NOTE [What a profile depends on]).

    Raises
    ------
    NoKeyError
        If the step can't be described.
    """
    text = _Description()
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    if any(modes) or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
        raise NoKeyError("a mode of PyTorch's, or a hook on saved tensors, is on")
    try:
        text.add(
            _settings(target.device), repr(target.spec), menus, tuple(notes), swap_dir and Path(swap_dir).resolve()
        )
        text.add(step.autocast, step.accumulates, step.model, step.args, step.kwargs, step.loss_fn, step.fn, optimizer)
        text.add({name: value for name, value in vars(module_code).items() if name.startswith("_global_")})
        text.add_others(torch, torch.nn.functional, torch.Tensor)
        text.finish()
    except RecursionError as error:
        raise NoKeyError("its objects are nested too deeply") from error
    return text.digest


def _settings(device: torch.device) -> dict[str, Any]:
    """Flags, versions and the machine."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    kind = device.type
    found: dict[str, Any] = {
        "versions": (torch.__version__, torch.version.cuda, torch.version.git_version, np.__version__, sys.version),
        "ckptplan": _own_files(),
        "machine": (platform.node(), platform.platform(), platform.processor(), os.cpu_count()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "cpu": (torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.enabled),  # type: ignore[attr-defined]
        "precision": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32),
        "reductions": (
            cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "autocast": (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "parametrizations": parametrize._cache_enabled,
        "dtype": torch.get_default_dtype(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if not _OF_THE_SHELL.fullmatch(name)},
    }  # fmt: skip
    if is_accelerator(device):
        found["device"] = repr(properties(device))
    return found


@functools.cache
def _own_files() -> str:
    """Digest of this package's files."""
    root = Path(ckptplan.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


class _Description:
    """A digest of values and of the code that they lead to."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._known: dict[int, int] = {}
        self._held: list[Any] = []  # so that no identity is used twice
        self._names: set[str] = set(_CALLED)
        self._classes: dict[type, set[str]] = {}
        """Class that isn't installed -> names of its attributes that are described."""
        self._installed: set[str] = set()
        """Names of packages."""
        self._files: set[str] = set()
        """Names of the modules of installed packages that were searched for others' functions."""
        self._globals: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        """Identity of a module's variables -> these, and the names of those that are described."""

    @property
    def digest(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Describe the attributes of classes that any code names, until there are no more, and versions."""
        while True:
            todo = [
                (kind, name)
                for kind, done in self._classes.items()
                for name in sorted(vars(kind).keys() - done)
                if name in self._names or (_is_special(name) and isinstance(vars(kind)[name], _METHODS))
            ]
            if not todo:
                self._say(*(f"{package} {_version(package)}" for package in sorted(self._installed)))
                return
            for kind, name in todo:
                self._classes[kind].add(name)
                self._say("attribute", kind.__module__, kind.__qualname__, name)
                self._member(vars(kind)[name])

    def add(self, *values: Any) -> None:
        """Describe values."""
        for value in values:
            self._value(value)

    def add_others(self, *owners: Any) -> None:
        """Describe functions and classes in installed modules or classes that aren't installed."""
        for owner in owners:
            self._others_in(vars(owner))

    def _say(self, *words: str) -> None:
        for word in words:
            data = word.encode(errors="surrogatepass")
            self._hash.update(b"%d:" % len(data) + data)

    def _value(self, value: Any) -> None:
        if isinstance(value, _TEXT):
            self._say(type(value).__qualname__, repr(value))
            return
        if id(value) in self._known:
            self._say("known", str(self._known[id(value)]))
            return
        self._known[id(value)] = len(self._held)
        self._held.append(value)
        if len(self._held) > _MOST_VALUES:
            raise NoKeyError(f"it leads to more than {_MOST_VALUES} values")
        for kind, describe in _KINDS:
            if isinstance(value, kind):
                describe(self, value)
                return
        self._object(value)

    # --- values ---

    def _tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise NoKeyError(f"it has a {type(tensor).__name__} of layout {tensor.layout}")
        storage = tensor.untyped_storage()
        number = self._known.setdefault(storage._cdata, len(self._held))
        self._held.append(storage)
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes(), tensor.dtype, tensor.device)
        graph = tensor.requires_grad, tensor.is_leaf, tensor.is_leaf and tensor.grad is not None, tensor.is_inference()
        self._say("tensor", type(tensor).__name__, str(number), repr(layout), repr(graph))
        self.add(tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None), vars(tensor))
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
            return
        if tensor.nbytes > _MOST_TENSOR_BYTES:
            raise NoKeyError(f"it has a tensor of {tensor.nbytes} bytes of {tensor.dtype}, whose values count")
        self._hash.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject or array.nbytes > _MOST_TENSOR_BYTES:
            raise NoKeyError(f"it has an array of {array.dtype}, {array.nbytes} bytes")
        self._say("array", repr((array.dtype, array.shape)))
        self._hash.update(array.tobytes())

    def _items(self, table: Mapping[Any, Any]) -> None:
        self._say(type(table).__qualname__, str(len(table)))
        for key, value in table.items():
            self.add(key, value)

    def _sequence(self, values: Iterable[Any]) -> None:
        self._say(type(values).__qualname__, str(len(values)))  # type: ignore[arg-type]
        self.add(*values)

    def _set(self, values: set[Any] | frozenset[Any]) -> None:
        if not all(isinstance(value, _TEXT) for value in values):
            raise NoKeyError("it has a set of objects, which have no order")
        self._say(type(values).__qualname__, *sorted(map(repr, values)))

    def _object(self, value: Any) -> None:
        kind = type(value)
        package = _package_of(kind)
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        outside = package in sys.stdlib_module_names and package not in _WALKED
        if outside or not (hasattr(value, "__dict__") or slots):
            raise NoKeyError(f"it has a {kind.__module__}.{kind.__qualname__}")
        self._class(kind)
        self._items(getattr(value, "__dict__", {}))
        self.add(*(getattr(value, name, None) for name in slots))

    # --- code ---

    def _is_installed(self, owner: Any) -> bool:
        """Whether a function or class is of an installed package, which is noted then."""
        package = _package_of(owner)
        if _is_installed(package):
            self._installed.add(package)
            return True
        return False

    def _class(self, kind: type) -> None:
        self._say("class", kind.__module__, kind.__qualname__)
        for base in kind.__mro__:
            if base in self._classes or base is object:
                continue
            if not self._is_installed(base):
                self._classes[base] = set()
                continue
            if base.__module__ not in self._files:
                self._files.add(base.__module__)
                self._others_in(vars(sys.modules.get(base.__module__, types.ModuleType(""))))
            self._others_in(vars(base))

    def _others_in(self, variables: Mapping[str, Any]) -> None:
        """Describe what others may have put among variables of an installed module or class.

        These are values that are described by their text, and functions and classes that aren't installed.
        """
        for name, value in list(variables.items()):
            if isinstance(value, types.ModuleType) or _is_special(name):
                continue
            if isinstance(value, _TEXT):
                self._say(name, repr(value))
                continue
            inside = [value, *(getattr(value, key, None) for key in ("__func__", "fget", "func"))]
            tables = [value, *(() if isinstance(value, type) else vars(type(value)).values())]
            tables += vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
            for table in tables:
                inside += table.values() if type(table) is dict else ()
            for found in inside:
                if isinstance(found, (types.FunctionType, type)) and not _is_installed(_package_of(found)):
                    self._say("in place of", name)
                    self._value(found)

    def _member(self, member: Any) -> None:
        """Describe an attribute of a class; of functions counted by version only the name."""
        inside = next((getattr(member, name) for name in ("__func__", "fget", "func") if hasattr(member, name)), member)
        if isinstance(inside, types.FunctionType):
            self._function(inside)
        elif not isinstance(member, (types.ModuleType, property)):
            try:
                self._value(member)
            except NoKeyError:  # a descriptor of a library; what it does is in functions that are described
                self._say(type(member).__qualname__)

    def _function(self, function: types.FunctionType) -> None:
        self._say("function", str(function.__module__), function.__qualname__)
        if function.__code__.co_filename.startswith(_SITE):
            self._is_installed(function)
            for cell in function.__closure__ or ():  # a wrapper may be PyTorch's, and what it wraps may not
                inside = _contents(cell)
                if isinstance(inside, types.FunctionType):
                    self._value(inside)
            return
        self._code(function.__code__)
        self.add(function.__defaults__, function.__kwdefaults__, *map(_contents, function.__closure__ or ()))
        names = _names(function.__code__)
        if "ops" in names and any(value is torch for value in function.__globals__.values()):
            raise NoKeyError("it names torch.ops, whose operators may have any code")
        self._names |= names
        self._variables(function.__globals__, names)

    def _code(self, code: types.CodeType) -> None:
        self._hash.update(code.co_code)
        self._say(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:  # the order of a set's texts differs from process to process
                self._say(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant))

    def _variables(self, variables: Mapping[str, Any], names: set[str]) -> None:
        """Describe the variables of a module that code names, each once."""
        _, done = self._globals.setdefault(id(variables), (variables, set()))
        for name in sorted(names & variables.keys() - done):
            done.add(name)
            self._say("variable", name)
            value = variables[name]
            if isinstance(value, types.ModuleType):
                self._say("module", value.__name__)
                self._inside(value, names)
            else:
                self._value(value)
        for name in sorted(names & done):
            if isinstance(variables[name], types.ModuleType):
                self._inside(variables[name], names)

    def _inside(self, module: types.ModuleType, names: set[str]) -> None:
        """Describe what code may name of a module; of an installed one, functions that aren't its own."""
        if not _is_installed(module.__name__.partition(".")[0]):
            self._variables(vars(module), names)
            return
        self._others_in({name: vars(module)[name] for name in sorted(names & vars(module).keys())})


def _package_of(owner: Any) -> str:
    return str(getattr(owner, "__module__", "")).partition(".")[0]


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package is of the standard library, or lies in a folder of installed ones."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in sys.stdlib_module_names - {"__main__"} or package in ("ckptplan",) or str(file).startswith(_SITE)


def _version(package: str) -> str:
    """The version that a package names; of the standard library, Python's."""
    if package in sys.stdlib_module_names:
        return sys.version
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package, [])
        return " ".join(f"{name} {metadata.version(name)}" for name in names)


def _names(code: types.CodeType) -> set[str]:
    """The names that a code object uses, those in texts (`getattr`) and in functions inside included."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    texts = (constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier())
    return set(code.co_names).union(texts, *inside)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _slots(kind: type) -> Sequence[str]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set
        return None


def _partial(text: _Description, value: functools.partial[Any]) -> None:
    text.add("partial", value.func, value.args, value.keywords)


def _method(text: _Description, value: types.MethodType) -> None:
    text.add("method", value.__func__, value.__self__)


def _named(text: _Description, value: Any) -> None:
    name = "" if isinstance(value, _LOCKS) else getattr(value, "__qualname__", str(value))
    text.add(type(value).__qualname__, name, getattr(value, "__module__", None))


def _cached(text: _Description, value: Any) -> None:
    text.add("cached", value.__wrapped__)


_KINDS: tuple[tuple[Any, Callable[[_Description, Any], None]], ...] = (
    (torch.Tensor, _Description._tensor),
    (np.ndarray, _Description._array),
    ((dict, types.MappingProxyType), _Description._items),
    ((list, tuple, collections.deque), _Description._sequence),
    ((set, frozenset), _Description._set),
    (types.FunctionType, _Description._function),
    (types.MethodType, _method),
    (functools.partial, _partial),
    (functools._lru_cache_wrapper, _cached),
    (_NO_STATE, _named),
    (type, _Description._class),
    (types.ModuleType, lambda text, value: text.add("module", value.__name__)),
    (weakref.ref, lambda text, value: text.add("reference", value())),
    (ContextVar, lambda text, value: text.add("context variable", value.name, value.get(None))),
    (torch.Generator, lambda text, value: _refuse("a random generator")),
)


def _refuse(what: str) -> None:
    raise NoKeyError(f"it has {what}")
