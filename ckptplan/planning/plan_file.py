"""A file that keeps a plan, which later runs with the same request take instead of planning again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptplan.core.budget import Budget
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.request import Limits

if TYPE_CHECKING:  # these import torch
    import torch
    from torch import nn


def request_text(budget: Budget, limits: Limits, max_overhead: float | None = None) -> str:
    """Return a request's budget and limits, as text, that a plan file's plan must have been made for."""
    names = ("actions", "offload", "segments", "menus", "compile", "host_bytes", "disk_bytes")
    may = ", ".join(f"{name}={getattr(limits, name)!r}" for name in names)
    return f"{budget!r}, max_overhead={max_overhead!r}, {may}"


def name_of(code: Any) -> str:
    """Return the name of a function or class; empty for None."""
    found = code if hasattr(code, "__qualname__") else type(code)
    return "" if code is None else f"{getattr(found, '__module__', '')}.{found.__qualname__}"


def optimizer_text(optimizer: torch.optim.Optimizer | str | None) -> str:
    """Return an optimizer's class and settings without its learning rates, which change no bytes; a name unchanged."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer or ""
    without = ("params", "lr", "initial_lr")
    groups = [
        [len(group["params"]), {k: _plain(v) for k, v in group.items() if k not in without}]
        for group in optimizer.param_groups
    ]
    return f"{name_of(type(optimizer))} {groups}"


def settings_of(model: nn.Module) -> str:
    """Return a digest of the plain attributes of a model's modules and of their configs."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {name_of(type(module))}\n".encode())
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        digest.update(plain_text(public).encode())
    return digest.hexdigest()[:16]


def plain_text(values: Mapping[str, Any]) -> str:
    """Return a line for each value that is plain data or an object with plain attributes; others are left out."""
    lines = []
    for key, value in values.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            lines.append(f"{key} {json.dumps(value, sort_keys=True, default=_plain)}\n")
    return "".join(lines)


def _plain(value: Any) -> Any:
    """Return a number or text unchanged, the attributes of an object such as a config, and the class of others."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    inside = getattr(value, "__dict__", None)
    if inside is None or callable(value) or type(value).__module__.partition(".")[0] == "torch":
        return name_of(type(value))
    return dict(inside)


def plan_in(path: str | Path, asked: str) -> Plan | None:
    """Return the plan in a file; None if there is no file, or its plan was made for another request.

    Raises
    ------
    InvalidInputError
        If the file can't be written, or has something else, or a plan that `keep` didn't write: it would be lost.
    """
    path = Path(path)
    if not path.exists():
        if not os.access(path.parent, os.W_OK):
            raise InvalidInputError(
                f"plan_file={str(path)!r} can't be written: there is no such folder, or no permission; give another"
            )
        return None
    plan = Plan.load(path)
    if not plan.asked:
        raise InvalidInputError(
            f"plan_file={str(path)!r} has a plan that wasn't made with plan_file=, and would be replaced; give another "
            "name, or apply that plan: ckptplan.Plan.load(...)"
        )
    return plan if plan.asked == asked else None


def keep(plan: Plan, path: str | Path, asked: str) -> Plan:
    """Write a plan for later runs, and return it with its request; warn if it can't be written."""
    plan = replace(plan, asked=asked)
    written = Path(f"{path}.new")  # if the run ends while writing, the former file stays
    try:
        plan.save(written)
        written.replace(path)
    except OSError as error:
        warnings.warn(f"the plan isn't kept in {path}: {error}; the next run plans again", RuntimeWarning, stacklevel=3)
    return plan
