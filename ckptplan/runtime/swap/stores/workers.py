"""Threads that copy: one per direction, each with its queue."""

from __future__ import annotations

import errno
import queue
import threading
import traceback
from typing import Any

from ckptplan.core.errors import SwapError

_POLL_S = 0.2
"""How long a waiter takes to notice that its thread has died."""


class Done:
    """The end of one job of a thread, with the error if there was one."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.event = threading.Event()
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Return when the job has ended, or never will because its thread has."""
        while not self.event.wait(_POLL_S):
            if not self._thread.is_alive() and not self.event.is_set():
                self.error = RuntimeError(f"the thread {self._thread.name} has died")
                self.event.set()

    def wait(self, what: str) -> None:
        """Settle, and raise if the job failed.

        Raises
        ------
        SwapError
        """
        self.settle()
        if self.error is not None:
            full = isinstance(self.error, OSError) and self.error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space there, or pass another swap_dir=; " if full else ""
            raise SwapError(f"{what} failed: {self.error}; {remedy}discard this step's gradients") from self.error


class Worker:
    """One thread and its first-in-first-out queue; a thread that has died is replaced for the jobs that come then."""

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
                traceback.clear_frames(error.__traceback__)  # else the error keeps the tensors that were copied
                done.error = error
            # Nothing of the job may outlive the signal: the waiting thread frees the memory, not this one.
            del job, work, arguments
            done.event.set()
            del done

    def submit(self, work: Any, *arguments: Any) -> Done:
        """Queue `work(*arguments)`.

        Raises
        ------
        SwapError
            After `stop`.
        """
        if self._stopped:
            raise SwapError("the swap space is closed: remove() was called on its handle; apply the plan again")
        if not self.thread.is_alive():
            self._start()
        done = Done(self.thread)
        self.jobs.put((work, arguments, done))
        return done

    def stop(self) -> None:
        """End the thread when its queue is empty."""
        self._stopped = True
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()
