"""The threads that copy: one per direction, each with its own queue."""

from __future__ import annotations

import errno
import queue
import threading
import traceback
from typing import Any

from ckptplan.core.errors import SwapError

_POLL_S = 0.2
"""Interval at which a waiting thread checks that the worker is still alive."""


class Done:
    """Completion of one job of a worker thread, with the job's error, if any."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.event = threading.Event()
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Wait until the job has ended; if its thread has died, note that as the job's error."""
        while not self.event.wait(_POLL_S):
            if not self._thread.is_alive() and not self.event.is_set():
                self.error = RuntimeError(f"the thread {self._thread.name} has died")
                self.event.set()

    def wait(self, what: str) -> None:
        """Wait until the job has ended, and raise if it failed.

        Raises
        ------
        SwapError
            If the job failed; `what` names it in the message.
        """
        self.settle()
        if self.error is not None:
            full = isinstance(self.error, OSError) and self.error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space there, or pass another swap_dir=; " if full else ""
            raise SwapError(f"{what} failed: {self.error}; {remedy}discard this step's gradients") from self.error


class Worker:
    """A thread with a first-in-first-out queue; if the thread has died, the next job starts a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = False
        self._start()

    def _start(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, args=(self.jobs,), name=self._name, daemon=True)
        self.thread.start()

    @staticmethod
    def _loop(jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            work, arguments, done = job
            try:
                work(*arguments)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # otherwise the error keeps the copied tensors
                done.error = error
            # Drop the job before signalling its end, so that the waiting thread frees the memory and not this one.
            del job, work, arguments
            done.event.set()
            del done

    def submit(self, work: Any, *arguments: Any) -> Done:
        """Queue `work(*arguments)`.

        Raises
        ------
        SwapError
            If `stop` was called before.
        """
        if self._stopped:
            raise SwapError("the swap space is closed: remove() was called on its handle; apply the plan again")
        if not self.thread.is_alive():
            self._start()
        done = Done(self.thread)
        self.jobs.put((work, arguments, done))
        return done

    def stop(self) -> None:
        """End the thread once its queue is empty, and wait for it."""
        self._stopped = True
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()
