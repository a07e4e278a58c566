"""Threads that copy: one per direction, each with its queue."""

from __future__ import annotations

import queue
import threading
from typing import Any

from ckptplan.core.errors import SwapError


class Done:
    """An event of a worker thread that carries the error, if there was one."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None

    def wait(self, what: str) -> None:
        self.event.wait()
        if self.error is not None:
            raise SwapError(f"{what} failed: {self.error}; discard this step's gradients") from self.error


class Worker:
    """One thread, one first-in-first-out queue."""

    def __init__(self, name: str) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, args=(self.jobs,), name=name, daemon=True)
        self.thread.start()

    @staticmethod
    def _loop(jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            work, arguments, done = job
            try:
                work(*arguments)
            except BaseException as error:
                done.error = error
            # Nothing of the job may outlive the signal: the waiting thread frees the memory, not this one.
            del job, work, arguments
            done.event.set()
            del done

    def submit(self, work: Any, *arguments: Any) -> Done:
        done = Done()
        if not self.thread.is_alive():
            done.error = RuntimeError(f"the worker thread {self.thread.name} has ended")
            done.event.set()
        else:
            self.jobs.put((work, arguments, done))
        return done

    def stop(self) -> None:
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()
