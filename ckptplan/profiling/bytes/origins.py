"""Where storages are made: the operation, the module whose forward runs, and the line of the model's code."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptplan.core.version import PACKAGE_FOLDER
from ckptplan.profiling.bytes.fake import FakeWorld
from ckptplan.profiling.bytes.tracker import Sid, Tracker
from ckptplan.profiling.target import Target
from ckptplan.runtime.step import TrainingStep

_STEP = TrainingStep.forward.__code__.co_filename
_CALL = nn.Module.__call__.__code__
"""The only code whose local variables are read: it holds its arguments to its end in any case (runtime/patching.py)."""
_NO_MODEL_CODE = (
    *(os.path.join(folder, "") for folder in (os.path.dirname(os.path.abspath(torch.__file__)), PACKAGE_FOLDER)),
    "<",
)
"""Beginnings of the paths of code that is PyTorch's, this package's or in no file."""


class Where(NamedTuple):
    """A place in the model's code.

    Attributes
    ----------
    module : str
        The innermost module of the model whose call runs; empty for the model itself, and outside of it.
    line : str
        The innermost line of code that is neither PyTorch's nor this package's, as "file:number" with the file's path
        relative to its entry of `sys.path`; empty if there is none.
    """

    module: str
    line: str


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the qualified name of each module."""
    return {module: name for name, module in model.named_modules()}


def where(frame: types.FrameType | None, names: Mapping[nn.Module, str]) -> Where:
    """Return the place in the model's code from which `frame` is called, and that is in the step.

    It is read off the stack. Hooks would say the same of modules, but code may look for hooks and then do otherwise.

    Parameters
    ----------
    frame : frame, optional
    names : mapping
        The modules of the model, with their names.
    """
    module, line = None, ""
    while frame is not None and (module is None or not line):
        path = frame.f_code.co_filename
        if path == _STEP:
            break  # the step began here: frames further out aren't the model's
        if frame.f_code is _CALL:
            module = names.get(frame.f_locals["self"]) if module is None else module
        elif not line and not path.startswith(_NO_MODEL_CODE) and "/contextlib.py" not in path:
            line = f"{_short(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return Where(module or "", line)


def _short(path: str) -> str:
    """Return a file's path relative to its entry of `sys.path`."""
    for root in sys.path:
        if root and path.startswith(root + os.sep):
            return path[len(root) + 1 :]
    return os.path.basename(path)


def operation_name(func: Any, world: FakeWorld) -> str:
    """Return the name of an operation that `world` runs, without that of its overload."""
    return "compiled code" if world.plays_compiled else f"{func.namespace}.{func._opname}"


class Locating(Tracker):  # type: ignore[no-untyped-call]
    """A tracker that also notes where forward makes each storage.

    Parameters
    ----------
    target : Target
    model : nn.Module

    Attributes
    ----------
    origins : dict
        Storage -> what `ckptplan.core.storage.Storage.origin` says of it.
    """

    def __init__(self, target: Target, model: nn.Module) -> None:
        self.origins: dict[Sid, str] = {}
        self._names = names_of(model)
        self._operation = ""
        super().__init__(target)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note the storages that it makes."""
        self._operation = operation_name(func, self)
        result = super().operation(func, args, kwargs)
        self._operation = ""
        return result

    def _add(self, tensor: torch.Tensor) -> Sid | None:
        sid = super()._add(tensor)
        if sid is not None and self._operation and not self._in_backward:
            self.origins[sid] = _described(self._operation, where(sys._getframe(1), self._names))
        return sid


def _described(operation: str, place: Where) -> str:
    """Return an origin as text. Example: "aten.gelu in h.0.mlp.act, modeling_gpt2.py:312".

    It has no folders, since profiles are passed on.
    """
    inside = f"{operation} in {place.module}" if place.module else operation
    return f"{inside}, {os.path.basename(place.line)}" if place.line else inside
