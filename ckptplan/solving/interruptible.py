"""Calls of OR-Tools' C++ that Ctrl-C can interrupt.

Python's main thread alone runs the handlers of signals, between two steps of Python code, and so not while it is in
C++. There a solver runs in a thread of its own, and the main thread waits for it in Python:

    status = interruptible(linear_program.Solve, stop=linear_program.InterruptSolve)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.05
"""Seconds between two checks: for a signal where none wakes the waiting thread, between two calls of `stop`, and for a
process that has ended. Short enough not to be noticed."""


def interruptible(solve: Callable[[], T], *, stop: Callable[[], object]) -> T:
    """Return `solve()`, or raise what it raises; an exception in the main thread ends it first.

    Parameters
    ----------
    solve : callable
    stop : callable
        Makes `solve` return soon; called from the main thread, again and again until it has returned, since a call
        before the solver has begun may do nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal comes there
        return solve()
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(solve())
        except BaseException as error:  # the main thread raises it
            result.set_exception(error)

    thread = threading.Thread(target=work, name="ckptplan-solver", daemon=True)
    try:
        thread.start()
        while not result.done():  # a join that is interrupted would take the thread for ended
            wait((result,), POLL_S)
    except BaseException:
        while not result.done():
            stop()
            wait((result,), POLL_S)
        raise
    finally:
        thread.join()
    return result.result()
