"""Observers of a step: what looks on while a controller runs a model's stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckptplan.runtime.patching import PatchedForward


class Observer:
    """Sees where a step is. A method is called at its moment only where a subclass overrides it; errors end the step.

    In the order of a step: `pass_begins`, `inputs`, (`enter`, `exit`) for each stage, `output`, `backward_begins`,
    `backward` for each stage from the last to the first.
    """

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """A forward begins; nothing of it has run. `waiting` is the pass before it, if that had no backward yet."""

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these."""

    def enter(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward of `stage` begins."""

    def exit(self, stage: int, output: Any) -> None:
        """The forward of `stage` has ended."""

    def output(self, output: Any, inputs: Any) -> None:
        """The forward has ended, with `output` from `inputs`; these are () where only the last stage's call is seen."""

    def backward_begins(self) -> None:
        """The first stage of a backward is about to begin."""

    def backward(self, stage: int) -> None:
        """The backward of `stage` is about to begin."""

    def patches(self, active: Callable[[], bool]) -> Iterable[PatchedForward]:
        """Further forwards to be replaced along with the stages', which act while `active`."""
        return ()


def listeners(observers: Sequence[Observer], event: str) -> tuple[Callable[..., Any], ...]:
    """The methods called `event` of those `observers` that override it, in their order."""
    plain = getattr(Observer, event)
    return tuple(getattr(o, event) for o in observers if getattr(type(o), event) is not plain)
