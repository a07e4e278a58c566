"""Reports of errors that end a planned step: a note if memory ran out; in a group, the rank and the stage."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ckptplan.distributed import is_distributed
from ckptplan.runtime.applied import Applied
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.oom import add_note, in_update, located

_LOG = logging.getLogger("ckptplan")


def leaves(applied: Applied, error: BaseException | None) -> None:
    """Note and log an error that ends a plan, if it is an error of a planned step."""
    if _is_of_step(applied, error):
        add_note(applied, error)
        _tell(applied, error)


def _tell(applied: Applied, error: BaseException | None) -> None:
    """Log this process's rank, and where the planned step was, if `error` ends a step of a rank."""
    if not isinstance(error, Exception) or not is_distributed() or dist.get_world_size() == 1:
        return
    phase, index, doing = located(error, applied.controller.place)
    stages = applied.plan.decided.stages
    where = f"stage {stages[index]!r}" if index is not None else "the code behind the last stage"
    when = "" if phase == "update" or phase == doing else f" in {phase}"
    _LOG.error(
        "ckptplan: rank %d has failed: %s of %s%s: %s: %s", dist.get_rank(), doing, where, when, type(error).__name__,
        str(error).partition("\n")[0],
    )  # fmt: skip


def _is_of_step(applied: Applied, error: BaseException | None) -> bool:
    """Return whether an error left a planned forward, a backward while a plan waits for one, or an optimizer's step."""
    if error is None:
        return False
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if codes & {Controller._run_model.__code__, Controller._run_stage.__code__} or in_update(error):
        return True
    waits = applied.controller.place.phase != "update"
    return waits and torch.autograd.backward.__code__ in codes  # type: ignore[attr-defined]


@contextlib.contextmanager
def last_words(applied: Applied) -> Iterator[None]:
    """Note each uncaught error of a planned step within the block, and log it where there are several processes."""
    _HOOK.watched.add(applied)
    watched = weakref.ref(applied)
    del applied
    _HOOK.put()
    try:
        yield
    finally:
        if (found := watched()) is not None:
            _HOOK.watched.discard(found)
        _HOOK.take_away()


class _Hook:
    """One hook on uncaught errors for all plans; it refers to them weakly, so as not to keep their models alive."""

    def __init__(self) -> None:
        self.watched: weakref.WeakSet[Applied] = weakref.WeakSet()
        self._previous: Any = None

    def put(self) -> None:
        if self._previous is None:
            self._previous, sys.excepthook = sys.excepthook, self

    def take_away(self) -> None:
        if not self.watched and sys.excepthook is self:
            sys.excepthook, self._previous = self._previous, None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        # Of several plans first the one whose backward is under way: an error has one note.
        for applied in sorted(self.watched, key=lambda applied: applied.controller.place.phase != "backward"):
            if _is_of_step(applied, error):
                add_note(applied, error)
        (self._previous or sys.__excepthook__)(kind, error, trace)
        for applied in list(self.watched):
            _tell(applied, error)


_HOOK = _Hook()
