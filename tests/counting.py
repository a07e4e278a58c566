from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_in(run: Callable[[], object]) -> int:
    """Calls and returns while `run` runs, those of built-in functions and steps of generators included.

    What a busy machine can't add to, in place of seconds.
    """
    count = 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def bytecodes_in(run: Callable[[], object]) -> int:
    """Python's own instructions while `run` runs in this thread: loops count, which `calls_in` doesn't see."""
    count = 0

    def counting(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return counting

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it when tracing begins, and never again
    sys.settrace(counting)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


class Log(list[Any]):
    """Notes of hooks, also from recomputes, which leave plain lists as long as they were."""
