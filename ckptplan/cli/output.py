"""Output of commands: errors, tables, files."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of SIGINT, as in shells."""
_OURS = str(Path(__file__).parent.parent)
_NOT_USERS = (_OURS, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
"""Folders of this package, of Python and of installed packages."""


def show_error(text: str) -> None:
    """Print an error in one line."""
    Console(stderr=True).print(f"[red]error:[/red] {escape(text)}", soft_wrap=True, highlight=False)


def show_interrupt(text: str = "") -> None:
    """Print that Ctrl-C ended the work, and what is left of it, in one line."""
    Console(stderr=True).print(f"[red]interrupted[/red]{escape(text and f': {text}')}", soft_wrap=True, highlight=False)


@contextmanager
def finishing(interrupted: bool) -> Iterator[None]:
    """Ignore further Ctrl-C within the block if `interrupted`, so that the plans found are written."""
    if not interrupted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show_users_error(error: Exception) -> bool:
    """Print an error raised in the user's code or below it, from there on; return False for any other."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [i for i, frame in enumerate(frames) if not frame.filename.startswith(_NOT_USERS)]
    if not theirs or any(frame.filename.startswith(_OURS) for frame in frames[theirs[-1] :]):
        return False
    show_error("your code raised an error:")
    lines = traceback.format_list(frames[theirs[0] :]) + traceback.format_exception_only(error)
    Console(stderr=True).print(escape("".join(lines).rstrip()), soft_wrap=True, highlight=False)
    return True


def terminal() -> Console:
    """Return the console of standard output; 140 columns for a pipe or a file, which has no width."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn a failure to write the file `path` into an `InvalidInputError` that names its content, `what`."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"{what} can't be written to {path}: {error}") from error


def check_writable(path: Path | None, what: str) -> None:
    """Raise `InvalidInputError` before any work if `what` can't be written to the file `path`."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise InvalidInputError(f"{what} can't be written to {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise InvalidInputError(f"{what} can't be written to {path}: it is a folder; give a file's name")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidInputError(f"{what} can't be written to {path}: no permission")


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, and print its path."""
    with writing("the plan", path):
        plan.save(path)
    typer.echo(f"written to {path}")
