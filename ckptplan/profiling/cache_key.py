"""A key of everything that a profile depends on.

NOTE [What a profile depends on]

1. Code: the forwards and hooks of the modules, the loss, the step, the optimizer, and what these name: functions,
   imports, all attributes of their classes, variables that are global or enclosed. A function counts with its
   instructions, constants, defaults and attributes. Installed packages count with their versions, and what others put
   into their modules and classes as any code; near the model's classes also which function has which name.
2. Values that this code can reach: attributes of modules and objects, configurations, containers, with their classes.
   Of floating tensors the layout counts, of others and of masks the values as well, since traces run on them.
3. Inputs, by the same rule; autocast; flags of precision, attention and determinism; threads; environment variables;
   the machine and its device.

A step that reads floating values, or whose path is drawn at random, is not determined by these. Its profile is stored
for the path that it took, a digest of the operations of its forward with their sizes (`path_of` in real_run.py), and is
taken for an equal step if a real forward takes the same path.

Anything that isn't described so (an iterator, a file, a random generator, a filled cache of a function, an object or
operator of an extension module, code that is found by `eval` or `globals`) makes the step one without a key. Files that
code reads, clocks, and hooks on nodes of autograd's graph aren't seen.

Example: the keys of a model are different after `model.rate = 0.2`, after an edit of a function that `forward` calls,
and for a mask with other values.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_code
from torch.nn.utils import parametrize
from torch.optim import optimizer as optimizer_code

import ckptplan
from ckptplan.profiling.description import Description, foreign_kernels
from ckptplan.profiling.installed import NoKeyError
from ckptplan.profiling.target import Target
from ckptplan.profiling.workload.optimizers import OptimizerLike
from ckptplan.runtime.accelerator import is_accelerator, properties
from ckptplan.runtime.private import dispatch_modes, function_modes
from ckptplan.runtime.state.process import Switches
from ckptplan.runtime.step import TrainingStep
from ckptplan.runtime.swap.users_hooks import innermost

_OF_THE_SHELL = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM.*|COLUMNS|LINES|SSH_.*|XDG_.*|DBUS_.*|TMPDIR|PYTEST_.*|CKPTPLAN_.*"
)
"""Environment variables that differ from shell to shell and that no step depends on."""


@contextlib.contextmanager
def _own_hooks_off() -> Iterator[None]:
    """Inside, optimizers have no hooks of this package's: those of plans that are applied to other models."""
    tables: Any = optimizer_code._global_optimizer_pre_hooks, optimizer_code._global_optimizer_post_hooks
    own = [
        {n: hook for n, hook in table.items() if str(getattr(hook, "__module__", "")).startswith("ckptplan.")}
        for table in tables
    ]
    for table, hooks in zip(tables, own, strict=True):
        for number in hooks:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in zip(tables, own, strict=True):
            table.update(hooks)


@_own_hooks_off()
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
    text = Description()
    modes = dispatch_modes(), function_modes()
    if any(modes) or innermost(True) is not None:
        raise NoKeyError("a mode of PyTorch's, or a hook on saved tensors, is on")
    if foreign := foreign_kernels():
        raise NoKeyError(f"the operator {foreign[0]} has an implementation of its own")
    try:
        text.add(
            _settings(target.device), repr(target.spec), menus, tuple(notes), swap_dir and Path(swap_dir).resolve()
        )
        text.add(
            step.autocast,
            step.accumulates,
            step.ddp,
            step.model,
            step.args,
            step.kwargs,
            step.loss_fn,
            step.fn,
            optimizer,
        )
        for code in (module_code, optimizer_code):
            text.add({name: value for name, value in vars(code).items() if name.startswith("_global_")})
        text.add_installed(torch, torch.nn.functional, torch.Tensor)
        text.finish()
    except RecursionError as error:
        raise NoKeyError("its objects are nested too deeply") from error
    return text.digest


def _settings(device: torch.device) -> dict[str, Any]:
    """Flags, versions and the machine."""
    found: dict[str, Any] = {
        "versions": (torch.__version__, torch.version.cuda, torch.version.git_version, np.__version__, sys.version),
        "ckptplan": _own_files(),
        "machine": (platform.node(), platform.platform(), platform.processor(), os.cpu_count()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),  # type: ignore[attr-defined]
        "switches": repr(Switches().values),
        "reads": (torch.is_inference_mode_enabled(), parametrize._cache_enabled),
        "folder": tempfile.gettempdir(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if not _OF_THE_SHELL.fullmatch(name)},
    }  # fmt: skip
    if is_accelerator(device):
        found["device"] = repr(properties(device)), torch.backends.cudnn.version()
    return found


@functools.cache
def _own_files() -> str:
    """Digest of this package's files."""
    root = Path(ckptplan.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
