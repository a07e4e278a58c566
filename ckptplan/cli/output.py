"""Output of commands: errors, tables, files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan


def show_error(text: str) -> None:
    """Print an error in one line."""
    Console(stderr=True).print(f"[red]error:[/red] {escape(text)}", soft_wrap=True, highlight=False)


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


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, and print its path."""
    with writing("the plan", path):
        plan.save(path)
    typer.echo(f"written to {path}")
