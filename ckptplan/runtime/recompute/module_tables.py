"""Hooks, replaced forwards and `requires_grad` flags of a stage's modules and parameters, restored for a recompute."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _of_all
from torch.utils.hooks import RemovableHandle

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.state.code import kept_lists
from ckptplan.state.put_back import Steps

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""Hook tables of a module; the last three are empty if the others are."""
_RUN = 2
"""How many of them, the first ones, have hooks that run in forward."""
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(_of_all, f"_global{name}") for name in HOOKS if hasattr(_of_all, f"_global{name}")
)
"""PyTorch's tables of global hooks, which run for every module."""
_FORWARDS = ("forward", "_compiled_call_impl")
"""Attributes that a call of a module runs instead of its class's forward, if the instance has them."""

_Own = tuple[nn.Module, tuple[Any, ...], tuple[dict[int, Any], ...]]
"""A module, its own `_FORWARDS`, and copies of its `HOOKS`."""


def _owns(modules: Iterable[nn.Module]) -> list[_Own]:
    """Return an entry for each module with hooks or forwards of its own; most modules have neither."""
    found: list[_Own] = []
    for module in modules:
        table = module.__dict__
        if (
            table["_forward_hooks"]
            or table["_forward_pre_hooks"]
            or table["_backward_hooks"]
            or table["_backward_pre_hooks"]
            or "forward" in table
            or "_compiled_call_impl" in table
        ):
            hooks = tuple([table[name].copy() for name in HOOKS])
            found.append((module, tuple([table.get(name) for name in _FORWARDS]), hooks))
    return found


def _put_owns(former: list[_Own], owns: list[_Own]) -> None:
    """Replace the modules' hooks and forwards, which are now `former`, by `owns`."""
    none: tuple[tuple[Any, ...], tuple[dict[int, Any], ...]] = (None,) * len(_FORWARDS), ({},) * len(HOOKS)
    wanted = {id(module): (module, *none) for module, *_ in former} | {id(own[0]): own for own in owns}
    for module, forwards, hooks in wanted.values():
        for name, forward in zip(_FORWARDS, forwards, strict=True):
            if forward is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = forward
        for name, entries in zip(HOOKS, hooks, strict=True):
            _put(module.__dict__[name], entries)


def _put(table: dict[int, Any], entries: dict[int, Any]) -> None:
    if table != entries:
        table.clear()
        table.update(entries)


def _of_all_modules() -> list[dict[int, Any]]:
    """Return copies of the tables of global hooks; an empty list if all tables are empty."""
    return [table.copy() for table in _GLOBAL_HOOKS] if any(_GLOBAL_HOOKS) else []


def _flags(tables: Iterable[dict[str, nn.Parameter | None]]) -> list[bool]:
    return [p.requires_grad for table in tables for p in table.values() if p is not None]


class ModuleTables:
    """Hooks, forwards and `requires_grad` flags of a stage's modules, as they are at construction.

    Parameters
    ----------
    modules : sequence of nn.Module
        The stage and all modules in it. Hooks and forward of the stage itself aren't recorded: a recompute doesn't run
        them. Those that it registers are removed, also on parameters.
    arguments : iterable of torch.Tensor
        Arguments of the stage; parameters among them are treated like the stage's own.
    """

    def __init__(self, modules: Sequence[nn.Module], arguments: Iterable[torch.Tensor] = ()) -> None:
        # Runs at every call of every stage, so function calls are avoided here.
        self._stage, self._inside = modules[0], modules[1:]
        self._owns = _owns(self._inside)
        self._of_all = _of_all_modules()
        self._tables = [table for module in modules if (table := module._parameters)]
        try:
            self._forwards: list[tuple[Any, Any]] = [
                (kind, kind.forward)  # type: ignore[attr-defined]
                for kind in set(map(type, self._inside))
            ]
            self._parameters = [table.copy() for table in self._tables]
        except AttributeError as error:
            raise UnsupportedModelError(
                "a stage that is to run again has a scripted module (torch.jit), whose state can't be put back for "
                "that; script nothing in this stage, or keep or swap it"
            ) from error
        self._flags = _flags(self._parameters)
        # Of tensors of other types than parameters, the bytes may be away meanwhile, and nothing here holds them.
        self._arguments = [
            (weakref.ref(p), p.requires_grad) for p in arguments if type(p) is not torch.Tensor and p.is_leaf
        ]
        self._steps = STEPS.count

    def put(self, undo: Steps) -> None:
        """Restore the recorded hooks, forwards and flags, and append steps to `undo` that restore the present ones.

        Raises
        ------
        RuntimeError
            If an optimizer has updated a parameter in between with a kernel that doesn't raise its version.
        PlanMismatchError
            If the `forward` of a module's class was replaced in between.
        """
        if STEPS.count != self._steps:
            own = [p for parameters in self._parameters for p in parameters.values() if p is not None]
            STEPS.check([*own, *(p for p, _ in self._given())], self._steps, "runs its stage again with it")
        for kind, forward in self._forwards:
            if kind.forward is not forward and kind.forward is kind.forward:  # a property may differ at each read
                raise PlanMismatchError(
                    f"{kind.__name__}.forward was replaced between forward and backward, which runs a stage with such "
                    "a module again; let the replacement last until backward has ended, or keep the stage"
                )
        owns, of_all = _owns(self._inside), _of_all_modules()
        undo.append(functools.partial(self._replace, owns, of_all))
        if owns != self._owns or of_all != self._of_all:
            self._replace(self._owns, self._of_all)
        lengths = {id(table): len(table) for table in self._of_gradients()}
        undo.append(functools.partial(self._drop_hooks, RemovableHandle.next_id, lengths))
        if self._owns or self._of_all:
            tables = [*(table for own in self._owns for table in own[2][:_RUN]), *self._of_all[:_RUN]]
            undo.append(kept_lists(hook for table in tables for hook in table.values()))
        if self._arguments or self._flags != _flags(self._tables):
            for p, flag in self._thawed():
                undo.append(functools.partial(p.requires_grad_, not flag))
                p.requires_grad_(flag)

    def _given(self) -> list[tuple[torch.Tensor, bool]]:
        """The arguments that are still there, and whether they required gradients."""
        return [(p, flag) for ref, flag in self._arguments if (p := ref()) is not None]

    def _replace(self, owns: list[_Own], of_all: list[dict[int, Any]]) -> None:
        present = _owns(self._inside)
        if present != owns:
            _put_owns(present, owns)
        if of_all != _of_all_modules():
            for table, entries in zip(_GLOBAL_HOOKS, of_all or [{}] * len(_GLOBAL_HOOKS), strict=True):
                _put(table, entries)

    def _of_gradients(self) -> list[dict[int, Any]]:
        """Return the tables of hooks of the stage itself and of parameters, which have none before their first hook."""
        stage = self._stage.__dict__
        found = [stage[name] for name in HOOKS]
        for parameters in self._tables:
            for p in parameters.values():
                if p is not None:
                    if (hooks := p._backward_hooks) is not None:
                        found.append(hooks)
                    if (hooks := p._post_accumulate_grad_hooks) is not None:
                        found.append(hooks)
        return found

    def _drop_hooks(self, first: int, lengths: dict[int, int]) -> None:
        """Remove the hooks that were registered since `first` was the next one, beyond the earlier lengths of tables.

        PyTorch numbers hooks in the order in which they are registered. One that took the place of another stays: where
        the recompute removed that by a handle which isn't put back, it has left the new one's in its place.
        """
        if RemovableHandle.next_id == first:
            return
        for table in self._of_gradients():
            new = [number for number in table if number >= first]
            surplus = len(table) - lengths.get(id(table), 0)
            for number in new[::-1][: max(surplus, 0)]:
                del table[number]

    def _thawed(self) -> list[tuple[torch.Tensor, bool]]:
        """Return the parameters whose `requires_grad` has changed, with the recorded flag.

        Parameters are looked up by name, since a sharded unit may have replaced the objects.
        """
        flags = iter(self._flags)
        known = [
            (table.get(name), next(flags))
            for table, parameters in zip(self._tables, self._parameters, strict=True)
            for name, p in parameters.items()
            if p is not None
        ]
        return [(p, flag) for p, flag in (*known, *self._given()) if p is not None and p.requires_grad != flag]
