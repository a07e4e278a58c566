"""The threads that copy: one per direction, each with its own queue."""

from __future__ import annotations

import errno
import queue
import threading
import traceback
from collections.abc import Callable

from ckptplan.core.errors import SwapError

_POLL_S = 0.2
"""Interval at which a waiting thread checks that the worker is still alive."""


class CopyJob:
    """Work for a worker's thread; then its completion, with its error, if any."""

    def __init__(self, thread: threading.Thread, work: Callable[[], None]) -> None:
        self._thread = thread
        self._work: Callable[[], None] | None = work
        self.event = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, in the worker's thread."""
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # otherwise the error keeps the copied tensors
            self.error = error
        # Drop the work before signalling its end, so that the waiting thread frees the memory and not this one.
        self._work = None
        self.event.set()

    def settle(self) -> None:
        """Wait until the job has ended; if its thread has died, note that as the job's error."""
        while not self.event.wait(_POLL_S):
            if not self._thread.is_alive() and not self.event.is_set():
                self.error = RuntimeError(f"the thread {self._thread.name} has died")
                self._work = None
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
        self._start()

    def _start(self) -> None:
        self.jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_run, args=(self.jobs,), name=self._name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[[], None]) -> CopyJob:
        """Queue `work`."""
        if not self.thread.is_alive():
            self._start()
        job = CopyJob(self.thread, work)
        self.jobs.put(job)
        return job

    def stop(self) -> None:
        """End the thread once its queue is empty, and wait for it."""
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()


def _run(jobs: queue.SimpleQueue[CopyJob | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
