"""A tier in a file, read and written by worker threads."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.stores.base import Counted, Extents, Ticket
from ckptplan.runtime.stores.workers import Done, Worker

DISK_BLOCK_BYTES = 4096


class DiskStore(Counted):
    """Swaps CPU tensors to one unnamed file: nothing is left behind, whatever happens to the process.

    Parameters
    ----------
    directory : str or Path, optional
        Where the file lives; the system's temporary directory by default.
    capacity_bytes : int
        Reserved on disk at once, so that a full disk is an error before the first step.

    Raises
    ------
    InvalidInputError
        If the directory can't be written or has no room.
    """

    def __init__(self, directory: str | Path | None = None, *, capacity_bytes: int = 0) -> None:
        super().__init__()
        where = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise InvalidInputError(
                f"swap directory {where} can't be written: {error}; pass swap_dir= a directory that can"
            ) from error
        self._where = where
        self._reserved = 0
        self._extents = Extents(DISK_BLOCK_BYTES)
        try:
            self._reserve(capacity_bytes)
        except SwapError as error:
            self._file.close()
            raise InvalidInputError(str(error)) from error
        self._out = Worker("ckptplan-swap-out")
        self._in = Worker("ckptplan-swap-in")
        self._close = weakref.finalize(self, _close_disk, self._out, self._in, self._file)

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._reserved:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise SwapError(
                f"swap directory {self._where} has no room for {format_bytes(nbytes)}: {error}; "
                "free some, pass another swap_dir=, or solve with a smaller host_gb="
            ) from error
        self._reserved = nbytes

    def start_out(self, source: torch.Tensor) -> Ticket:
        ticket = Ticket(source.nbytes, self._extents.take(source.nbytes))
        try:
            self._reserve(ticket.offset + self._extents.size(ticket.nbytes))
        except SwapError:
            self._extents.give(ticket.offset, ticket.nbytes)
            raise
        view = memoryview(source.view(torch.uint8).numpy())  # type: ignore[arg-type]
        ticket.out_done = self._out.submit(_write, self._file.fileno(), view, ticket.offset)
        return self._issued(ticket)

    def finish_out(self, ticket: Ticket) -> None:
        ticket.out_done.wait(f"writing {format_bytes(ticket.nbytes)} to {self._where}")

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
        ticket.in_done = self._in.submit(_read, ticket.out_done, self._file.fileno(), view, ticket.offset)

    def finish_in(self, ticket: Ticket) -> None:
        # A worker gets here when it happens to collect garbage; its own queue must not wait for itself.
        if threading.current_thread() not in (self._out.thread, self._in.thread):
            ticket.in_done.wait(f"reading {format_bytes(ticket.nbytes)} from {self._where}")

    def free(self, ticket: Ticket) -> None:
        for done, worker in ((ticket.in_done, self._in), (ticket.out_done, self._out)):
            if done is None or done.event.is_set():
                continue
            if threading.current_thread() in (self._out.thread, self._in.thread):
                worker.submit(self._give, ticket)  # in its turn, after the copy
                return
            done.event.wait()
        self._give(ticket)

    def _give(self, ticket: Ticket) -> None:
        self._extents.give(ticket.offset, ticket.nbytes)
        self._freed(ticket)

    def _shut(self) -> None:
        self._close()


def _close_disk(out: Worker, back: Worker, file: Any) -> None:
    out.stop()
    back.stop()
    with contextlib.suppress(OSError):
        file.close()


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _read(after: Done, fd: int, view: memoryview, offset: int) -> None:
    after.wait("the copy out")
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"the swap file ends {len(view) - done} bytes early")
        done += count
