"""State of a process, a thread and a model's modules that forward can change, besides values and Python attributes.

Profiling and verifying restore it (`kept` in restore.py), also when an error is raised. The state of other threads,
files, and state inside of C++ code are not restored.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as _of_all
from torch.nn.utils import parametrize
from torch.optim import optimizer as _of_optimizers

from ckptplan.state.cells import Tables, plain_attributes
from ckptplan.state.flags import flags, set_flags
from ckptplan.state.modes import Stacks
from ckptplan.tensors.private import saved_tensors_hooks

P = ParamSpec("P")
T = TypeVar("T")

_c: Any = torch._C
_autograd: Any = torch._C._autograd

_GENERAL: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "gradients": (torch.is_grad_enabled, _c._set_grad_enabled),
    "forward gradients": (_c._is_fwd_grad_enabled, _c._set_fwd_grad_enabled),
    "multithreaded backward": (_c._is_multithreading_enabled, _c._set_multithreading_enabled),
    "view replay": (_c._is_view_replay_enabled, _c._set_view_replay_enabled),
    "warnings each time": (_c._get_warnAlways, _c._set_warnAlways),
    "anomalies": (
        lambda: (_c.is_anomaly_enabled(), _c.is_anomaly_check_nan_enabled()),
        lambda value: _c.set_anomaly_enabled(*value),
    ),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}
"""Switches that are not part of `FLAGS` (flags.py): a recompute ignores them or handles them separately."""

_AUTOCAST: tuple[str, ...] = tuple(_c._autocast_supported_devices())


def in_own_context(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` wrapped so that the caller's context variables keep their values, whatever it sets them to."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return contextvars.copy_context().run(function, *args, **kwargs)

    return run


class Switches:
    """Flags, modes, autocast, default device, hooks on saved tensors and cached weights, as at construction."""

    def __init__(self) -> None:
        self._flags = flags()
        self._general = [get() for get, _ in _GENERAL.values()]
        self._stacks = Stacks()
        self._autocast = _autocast_now()
        self._nesting = _nesting()
        self._saved_hooks = _saved_hooks()
        self._no_saved_hooks = _autograd._saved_tensors_hooks_get_disabled_error_message()
        self._weights = parametrize._cache_enabled, parametrize._cache, dict(parametrize._cache)

    @property
    def values(self) -> tuple[Any, ...]:
        """Flags, other switches and autocast, in an order of their own."""
        return self._flags, self._general, self._autocast, self._nesting

    def put(self) -> None:
        """Restore them."""
        self._stacks.put()
        set_flags(self._flags)
        for value, (get, put) in zip(self._general, _GENERAL.values(), strict=True):
            if get() != value:
                put(value)
        self._put_autocast()
        self._put_saved_hooks()
        parametrize._cache_enabled, parametrize._cache, weights = self._weights
        parametrize._cache.clear()
        parametrize._cache.update(weights)

    def _put_autocast(self) -> None:
        if _autocast_now() != self._autocast:
            for kind, (dtype, enabled) in self._autocast.items():
                torch.set_autocast_dtype(kind, dtype)
                torch.set_autocast_enabled(kind, enabled)
        while _nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        while _nesting() < self._nesting:
            torch.autocast_increment_nesting()
        torch.clear_autocast_cache()  # forward's casts; further ones are made again when needed

    def _put_saved_hooks(self) -> None:
        if _autograd._saved_tensors_hooks_get_disabled_error_message() != self._no_saved_hooks:
            _autograd._saved_tensors_hooks_enable()
        now = _saved_hooks()
        if len(now) != len(self._saved_hooks) or not all(map(_same_pair, now, self._saved_hooks)):
            _pop_saved_hooks()
            for pair in self._saved_hooks:
                _autograd._push_saved_tensors_default_hooks(*pair)
        if self._no_saved_hooks is not None and _autograd._saved_tensors_hooks_is_enabled():
            _autograd._saved_tensors_hooks_disable(self._no_saved_hooks, False)


def _autocast_now() -> dict[str, tuple[torch.dtype, bool]]:
    return {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _AUTOCAST}


def _nesting() -> int:
    """Return the number of autocast contexts that are entered."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _pop_saved_hooks() -> list[tuple[Any, Any]]:
    """Remove all hooks on saved tensors and return them, the innermost first."""
    found = []
    while (pair := saved_tensors_hooks(True)) is not None:
        found.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    return found


def _saved_hooks() -> list[tuple[Any, Any]]:
    """Return the hooks on saved tensors, the innermost last."""
    if saved_tensors_hooks(True) is None:
        return []
    found = _pop_saved_hooks()[::-1]
    for pair in found:
        _autograd._push_saved_tensors_default_hooks(*pair)
    return found


def _same_pair(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[0] is b[0] and a[1] is b[1]


class Hooks:
    """Tables and forwards of modules, and global hooks of modules and optimizers, as they are at construction.

    A module's tables are those that every module has: of hooks, parameters, buffers and submodules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._own = [_Entries(vars(m), functools.partial(_own_names, m)) for m in modules]
        self._of_all = [_Entries(vars(code), functools.partial(_global_names, code)) for code in _WITH_GLOBALS]
        self._forwards = [(kind, vars(kind).get("forward")) for kind in {c for m in modules for c in type(m).__mro__}]

    def put_tables(self) -> None:
        """Restore the contents of the modules' tables only.

        Forwards and optimizer hooks stay: a plan that was applied in between has set its own.
        """
        for part in self._own:
            part.tables.put()

    def put(self) -> None:
        """Restore tables, hooks and forwards."""
        for part in (*self._own, *self._of_all):
            part.put()
        for kind, forward in self._forwards:
            if vars(kind).get("forward") is not forward:
                delattr(kind, "forward") if forward is None else setattr(kind, "forward", forward)


_WITH_GLOBALS = (_of_all, _of_optimizers)
"""PyTorch's Python modules with the global hooks of modules and of optimizers."""


def _own_names(module: nn.Module) -> list[str]:
    """Return the names of the attributes that every module has: tables of hooks, parameters and submodules, forward."""
    return list(vars(module).keys() - plain_attributes(module).keys())


def _global_names(code: Any) -> list[str]:
    return [name for name in vars(code) if name.startswith("_global_")]


class _Entries:
    """The entries `names()` of a dictionary, and the contents of those entries that are dictionaries or sets."""

    def __init__(self, place: dict[str, Any], names: Callable[[], list[str]]) -> None:
        self._place, self._names = place, names
        self._entries = {name: place[name] for name in names()}
        self.tables = Tables.of(value for value in self._entries.values() if isinstance(value, (dict, set)))

    def put(self) -> None:
        for name in self._names():
            if name not in self._entries:
                del self._place[name]
        self._place.update(self._entries)
        self.tables.put()


class Leaves:
    """Hooks, attributes and `requires_grad` of modules' parameters and buffers, as they are at construction."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tensors = (t for m in modules for table in (m._parameters, m._buffers) for t in table.values())
        self.tensors = list({id(t): t for t in tensors if t is not None}.values())
        self._requires_grad = [t.requires_grad for t in self.tensors]
        self._hooks = [(t, name, getattr(t, name)) for t in self.tensors for name in _TENSORS_HOOKS]
        tables = [table for _, _, table in self._hooks if table is not None]
        self._tables = Tables.of([*tables, *map(vars, self.tensors)])

    def put(self) -> None:
        """Restore them."""
        for tensor, requires_grad in zip(self.tensors, self._requires_grad, strict=True):
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
        for tensor, name, table in self._hooks:
            if getattr(tensor, name) is not table:
                setattr(tensor, name, table)
        self._tables.put()


_TENSORS_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
