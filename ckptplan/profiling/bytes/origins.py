"""Where storages are made: the operation, the module whose forward runs, and the line of the model's code."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptplan.core.version import PACKAGE_FOLDER
from ckptplan.profiling.bytes.fake import FakeWorld
from ckptplan.training.step import TrainingStep

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


NOWHERE = Where("", "")


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the qualified name of each module."""
    return {module: name for name, module in model.named_modules()}


def where(frame: types.FrameType | None, names: Mapping[nn.Module, str]) -> Where:
    """Return the place in the model's code, within the step, from which `frame` is called.

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


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and as what a storage was made.

    Attributes
    ----------
    nbytes : int
        Size before rounding.
    shape, dtype
        Those of the first tensor in it.
    place : Where
        Of one that backward makes, the place of the operation of forward whose node ran.
    op : str
        The operation.
    stream : int
        The stream that it is allocated on, counted by first use; 0 is the step's own. FSDP2 has others.
    runs_again : bool
        Backward made it by running forward again.
    category : str
        One of `ckptplan.core.estimate.CATEGORIES`, if it is known when the storage is made.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    place: Where
    op: str
    stream: int = 0
    runs_again: bool = False
    category: str = ""

    @property
    def text(self) -> str:
        """`ckptplan.core.storage.Storage.origin`. Example: "aten.gelu in h.0.mlp.act, modeling_gpt2.py:312".

        It has no folders, since profiles are passed on.
        """
        inside = f"{self.op} in {self.place.module}" if self.place.module else self.op
        return f"{inside}, {os.path.basename(self.place.line)}" if self.place.line else inside
