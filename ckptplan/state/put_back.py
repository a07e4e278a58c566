"""Undo steps: functions that take back the state that was set for a stage's recompute.

A step may recompute some hundred stages, and most recomputes end early, by an exception. Leaving a generator-based
context manager that way takes longer than most of these changes. So code that changes state appends a function that
undoes the change to a list, and `put_back` calls them, the last one first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

Steps = list[Callable[[], Any]]


def put_back(steps: Steps) -> None:
    """Call the steps, the last one first; each is called even if another one raises."""
    try:
        while steps:
            steps.pop()()
    finally:
        if steps:
            put_back(steps)


def enter(context: contextlib.AbstractContextManager[Any], steps: Steps) -> None:
    """Enter a context, and append the step that leaves it."""
    context.__enter__()
    steps.append(lambda: context.__exit__(None, None, None))
