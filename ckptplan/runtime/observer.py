"""Observers of a step, which a controller calls while it runs a model's stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckptplan.runtime.patching import PatchedForward


class Observer:
    """Base class of observers. Each method is called at one moment of a step, only if a subclass overrides it.

    An error that a method raises ends the step. The order of calls in a step: `pass_begins`, `inputs`, `enter` and
    `exit` for each stage, `output`, `backward_begins`, `backward` for each stage from the last to the first.
    """

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Called before a forward begins; `waiting` is the pass before it, if the backward of that hasn't begun."""

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the arguments of the model's forward."""

    def stages_begin(self) -> None:
        """Called when the forward of the first stage begins."""

    def enter(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when the forward of `stage` begins."""

    def exit(self, stage: int, output: Any) -> None:
        """Called when the forward of `stage` has ended."""

    def output(self, output: Any, inputs: Any) -> None:
        """Called when the forward has ended; `inputs` is () if only the calls of stages, not of the model, are seen."""

    def backward_begins(self) -> None:
        """Called when a backward is about to begin its first stage."""

    def backward(self, stage: int) -> None:
        """Called when the backward of `stage` is about to begin."""

    def removed(self) -> None:
        """Called when the plan is taken off the model."""

    def patches(self, active: Callable[[], bool]) -> Iterable[PatchedForward]:
        """Return further forwards to replace along with those of the stages; they act only while `active()` is true."""
        return ()


def listeners(observers: Sequence[Observer], event: str) -> tuple[Callable[..., Any], ...]:
    """Return the methods named `event` of the `observers` that override it, in their order."""
    plain = getattr(Observer, event)
    return tuple(getattr(o, event) for o in observers if getattr(type(o), event) is not plain)
