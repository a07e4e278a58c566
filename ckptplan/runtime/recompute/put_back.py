"""Steps that take back what was changed around a stage's next run.

A stage may be run again some hundred times a step, each time by an exception out of its midst, and a generator behind
`contextlib.contextmanager` takes longer for that than most of these steps: so what is put in place appends a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

Steps = list[Callable[[], Any]]


def put_back(steps: Steps) -> None:
    """Take the steps, the last first, each of them even where one before it fails."""
    try:
        while steps:
            steps.pop()()
    finally:
        if steps:
            put_back(steps)


def enter(context: contextlib.AbstractContextManager[Any], steps: Steps) -> None:
    """Enter a context, and leave it by a step."""
    context.__enter__()
    steps.append(lambda: context.__exit__(None, None, None))
