"""What a rank says last when a step fails: its rank and the stage, by which its output is found among all."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ckptplan.runtime.applied import Applied
from ckptplan.runtime.guard.oom import located

_LOG = logging.getLogger("ckptplan")


def tell(applied: Applied, error: BaseException | None) -> None:
    """Log this process's rank, and where the planned step was, if `error` ends a rank's step."""
    if not isinstance(error, Exception) or not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_world_size() == 1:
        return
    phase, index, doing = located(error, applied.controller.place, updating=False)
    stages = applied.plan.stages
    where = f"stage {stages[index]!r}" if index is not None else "the code behind the last stage"
    when = "" if phase == "update" or phase == doing else f" in {phase}"
    _LOG.error(
        "ckptplan: rank %d has failed: %s of %s%s: %s: %s", dist.get_rank(), doing, where, when, type(error).__name__,
        str(error).partition("\n")[0],
    )  # fmt: skip


@contextlib.contextmanager
def last_words(applied: Applied) -> Iterator[None]:
    """Inside, an error that nothing catches is told, after its traceback, where there are several processes."""
    if "RANK" not in os.environ and not (dist.is_available() and dist.is_initialized()):
        yield
        return
    previous, watched = sys.excepthook, weakref.ref(applied)  # the hook must not keep the model alive
    del applied

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        previous(kind, error, traceback)
        applied = watched()
        if applied is not None:
            tell(applied, error)

    sys.excepthook = hook
    try:
        yield
    finally:
        if sys.excepthook is hook:
            sys.excepthook = previous
