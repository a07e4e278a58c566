"""Calls of OR-Tools' C++ that Ctrl-C can interrupt.

Python's main thread alone runs the handlers of signals, between two steps of Python code, and so not while it is in
C++. There a solver runs in a thread of its own, and the main thread waits for it in Python; what the solver calls back
runs in the main thread all the same:

    call = Interruptible(stop=solver.stop_search)
    status = call.run(lambda: solver.solve(model, Watch(call)))

    class Watch(CpSolverSolutionCallback):
        def on_solution_callback(self):
            self.call.here(lambda: ...)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two looks for a signal where none wakes the waiting thread, and between two calls of `stop`."""


class Interruptible:
    """One call of a solver.

    Parameters
    ----------
    stop : callable
        Makes the solver return soon; called from the main thread, again and again until the solver has returned, since
        a call before the solver has begun may do nothing.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        self._stop = stop
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._aside = threading.current_thread() is threading.main_thread()  # no signal reaches any other thread

    def run(self, solve: Callable[[], T]) -> T:
        """Return `solve()`, or raise what it raises; an exception in the main thread ends it first."""
        if not self._aside:
            return solve()
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(solve())
            except BaseException as error:  # the main thread raises it
                result.set_exception(error)
            self._asked.put(None)

        thread = threading.Thread(target=work, name="ckptplan-solver", daemon=True)
        try:
            thread.start()
            while self._answered():
                pass
        except BaseException:
            while thread.is_alive():
                self._stop()
                self._refuse()
            raise
        thread.join()
        return result.result()

    def here(self, function: Callable[[], T]) -> T | None:
        """Return `function()`, run in the thread that called `run`; None once that is at an end by an exception.

        For the solver's own callbacks. An exception of `function` is raised by `run`.
        """
        if not self._aside:
            return function()
        answer: Future[T | None] = Future()
        self._asked.put((function, answer))
        return answer.result()

    def _answered(self) -> bool:
        """Wait a while for a question and answer it; return whether the solver may have more."""
        try:
            asked = self._asked.get(timeout=POLL_S)
        except queue.Empty:
            return True
        if asked is None:
            return False
        function, answer = asked
        try:
            answer.set_result(function())
        except BaseException:
            answer.set_result(None)
            raise
        return True

    def _refuse(self) -> None:
        """Wait a while for a question, and answer it with None."""
        try:
            asked = self._asked.get(timeout=POLL_S)
        except queue.Empty:
            return
        if asked is not None:
            asked[1].set_result(None)
