"""A plan that is made when training begins: on the first forward with gradients, for its inputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.distributed import unwrapped
from ckptplan.runtime.applied import Applied, Replan
from ckptplan.runtime.guard.shapes import ByName
from ckptplan.runtime.handle import Handle
from ckptplan.runtime.patching import PatchedForward
from ckptplan.tensors.storages import tensors_in


class FirstForward(Handle):
    """A handle whose plan is made and applied by the first forward with gradients; until then nothing is planned.

    Methods that need a plan raise `InvalidInputError` until then.

    Parameters
    ----------
    model : nn.Module
    planner : callable
        Returns the handle of a new plan for a forward's inputs.
    """

    def __init__(self, model: nn.Module, planner: Callable[[Any], Handle]) -> None:
        self._made: Handle | None = None
        self._planner: Callable[[Any], Handle] | None = planner
        self._model = unwrapped(model)
        self._patch = PatchedForward(self._model, self._first)
        self._patch.install()
        self._register(self._model)

    def _first(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planner = self._planner
        given = itertools.chain(self._model.parameters(), tensors_in((args, kwargs)))
        if planner is None or not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
            return original(*args, **kwargs)
        self._planner = None
        self._patch.remove()
        rest, named = ByName(getattr(self._model, self._patch.attribute))(args, kwargs)
        if rest and kwargs:
            raise InvalidInputError(
                f"{type(self._model).__name__} is called with unnamed positional arguments (*args) and with keywords, "
                "which can't both be inputs of a plan; solve with step= and apply that plan"
            )
        self._made = planner(args if rest else named)
        return getattr(self._model, self._patch.attribute)(*args, **kwargs)

    @property
    def is_made(self) -> bool:
        """Whether there is a plan."""
        return self._made is not None

    def _handle(self) -> Handle:
        if self._made is None:
            raise InvalidInputError("there is no plan yet: it is made by the first forward of the model with gradients")
        return self._made

    @property
    def _applied(self) -> Applied:  # type: ignore[override]
        return self._handle()._applied

    @property
    def replans(self) -> tuple[Replan, ...]:
        """Replacements of the plan, in order."""
        return () if self._made is None else self._made.replans

    @property
    def returns(self) -> int:
        """Number of times that an earlier plan was put back."""
        return 0 if self._made is None else self._made.returns

    def remove(self) -> None:
        """Restore the model exactly; calling it again does nothing."""
        self._planner = None
        if self._made is None:
            self._patch.remove()
            self._unregister(self._model)
        else:
            self._made.remove()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model runs without a plan, and none is made."""
        return self._unplanned() if self._made is None else self._made.paused()

    @contextlib.contextmanager
    def _unplanned(self) -> Iterator[None]:
        was_on = self._patch.is_installed
        self._patch.remove()
        try:
            yield
        finally:
            if was_on and self._planner is not None:
                self._patch.install()

    def unmetered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no step is measured for `stats`; see `Handle.unmetered`."""
        return contextlib.nullcontext() if self._made is None else self._made.unmetered()
