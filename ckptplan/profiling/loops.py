"""What a step can see of the framework's loop that runs it.

NOTE [Loops of frameworks]
A `Trainer` holds loaders, tokenizers, loggers and clocks, which can't be described (description.py), and of which its
loss sees nothing. So of a loop those attributes and methods count whose names the code of the step has: all code that
isn't installed, the methods that the step calls, and those that they name in turn. A loop that a framework keeps in the
model, as Lightning does in `trainer`, counts once code that isn't installed names it.

Example: `Trainer.compute_loss` names `label_smoother` and `unwrap_model`, but neither `train_dataset` nor a method that
does. So the smoothing is described, and the dataset isn't.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptplan.profiling.installed import NoKeyError

ANY_NAME = frozenset(("getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller"))
"""Names that code has which may name any attribute of what it holds."""
_PARTS = frozenset(("accelerate.accelerator.Accelerator", "transformers.training_args.TrainingArguments"))
"""Classes of a loop's parts, of which as much counts as of the loop."""
_HOLDERS = {"lightning.pytorch.core.module.LightningModule": {"_trainer": frozenset(("trainer", "_trainer"))}}
"""Class -> its attributes that hold the loop -> names by which code reaches that."""


@dataclass(frozen=True)
class Loop:
    """A loop, or a part of one, in the variables of a step (NOTE [Loops of frameworks]).

    Attributes
    ----------
    value : object
    entry : frozenset of str
        Its methods that the step calls.
    holders : frozenset of str or None
        Names by which code reaches the loop; None: by any variable.
    """

    value: Any
    entry: frozenset[str] = frozenset()
    holders: frozenset[str] | None = None

    def names(self, others: set[str]) -> set[str]:
        """Return the names of attributes that a step may read, if its own code has the names `others`.

        Raises
        ------
        NoKeyError
            If these may be any.
        """
        found = set(self.entry)
        if self.holders is None or self.holders & others:
            if any_names := others & ANY_NAME:
                raise NoKeyError(f"it has code that may read any attribute of a loop ({', '.join(sorted(any_names))})")
            found |= others
        todo = list(found)
        while todo:
            codes = (code for _, part in self.members(todo.pop()) for code in _codes_of(part))
            more = {name for code in codes for name in code.co_names} - found
            found |= more
            todo.extend(more)
        return found

    def members(self, name: str) -> list[tuple[type, Any]]:
        """Return what the loop's class and its bases have under a name, each with the class."""
        return [(base, vars(base)[name]) for base in type(self.value).__mro__ if name in vars(base)]

    def read(self, name: str, others: set[str]) -> Any:
        """Return an attribute, or a `Loop` if it is a part of this one of which only installed code reads.

        The methods that the step calls may be replaced on the instance; what they were is in the step.
        """
        found = None if name in self.entry else vars(self.value).get(name)
        return Loop(found) if name not in others and _named(type(found)) & _PARTS else found


def held_loops(value: Any) -> dict[str, frozenset[str]]:
    """Return the attributes in which a framework keeps its loop, and the names by which code reaches it."""
    return {k: v for kind in _named(type(value)) & _HOLDERS.keys() for k, v in _HOLDERS[kind].items()}


def properties_of_loops(value: Any, names: set[str]) -> dict[str, Any]:
    """Return by name what an object tells of the loop that a framework keeps in it, by properties of the framework's.

    Raises
    ------
    NoKeyError
        If one fails.
    """
    holders = set().union(*held_loops(value).values())
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        if f"{kind.__module__}.{kind.__qualname__}" not in _HOLDERS:
            continue
        for name in sorted(names & vars(kind).keys() - holders):
            member = vars(kind)[name]
            if isinstance(member, property) and any(set(code.co_names) & holders for code in _codes_of(member)):
                try:
                    found[name] = member.__get__(value)
                except Exception as error:
                    raise NoKeyError(f"its {name} can't be read: {error}") from error
    return found


def _named(kind: type) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}


def _codes_of(member: Any) -> Iterator[types.CodeType]:
    """The code of a method or property."""
    parts = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
    for part in parts:
        function = getattr(part, "__func__", part)
        if callable(function) and isinstance(function := inspect.unwrap(function), types.FunctionType):
            yield from _nested(function.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
