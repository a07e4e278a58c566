"""What commands print and write."""

from __future__ import annotations

import sys
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
    """Standard output; wide where it is a pipe or a file, which has no width."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def write_text(path: Path, text: str, what: str) -> None:
    """Write a file, called `what` where it can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{what} can't be written to {path}: {error}") from error


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, and say where."""
    try:
        plan.save(path)
    except OSError as error:
        raise InvalidInputError(f"the plan can't be written to {path}: {error}") from error
    typer.echo(f"written to {path}")
