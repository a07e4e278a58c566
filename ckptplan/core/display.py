"""What long work shows while it runs: one line that changes, on a terminal or in a notebook, by rich."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ckptplan.core.progress import Message, clock_of, in_notebook
from ckptplan.core.request import Report

REFRESHES_PER_S = 5
"""Few, since the thread that draws takes time from what is measured."""
BAR_WIDTH = 20


@contextmanager
def progress(first: str = "beginning", *, console: Console | None = None) -> Iterator[Report]:
    """Show what long work does: ``with ckptplan.progress() as shown: ckptplan.solve(..., on_progress=shown)``.

    The line has a spinner, the present work, a bar where parts are counted, and a clock. In a terminal it is on stderr
    and disappears at the end; in a notebook, where `profile`, `solve` and the others show it by themselves, it stays.
    Nothing is shown where stderr is no terminal.

    Parameters
    ----------
    first : str
        The line until the first message.
    console : rich.console.Console, optional
        Where to show it; default: stderr.

    Yields
    ------
    callable
        For `on_progress`.
    """
    if console is None and in_notebook():
        yield NotebookLine()
        return
    line = Line(first)
    with Live(
        console=console or Console(stderr=True),
        get_renderable=line.drawn,
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    ):
        yield line


class Line:
    """The line on a terminal, drawn anew several times a second: its clock runs on between messages."""

    def __init__(self, first: str) -> None:
        self._message: str = first
        self._spinner = Spinner("dots")
        self._began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show a message: `on_progress`."""
        self._message = text

    def drawn(self) -> RenderableType:
        """Return the line as it is now."""
        message, took_s = self._message, time.monotonic() - self._began_s
        return drawn(message, self._spinner, clock=f"{took_s:.0f} s")


class NotebookLine:
    """The line in a notebook's output, below the cell that ran when its first message came."""

    def __init__(self) -> None:
        self._shown: Any = None

    def __call__(self, text: str) -> None:
        """Show a message: `on_progress`."""
        line = drawn(text)
        if self._shown is None:
            display = importlib.import_module("IPython.display").display
            self._shown = display(line, display_id=True)
        else:
            self._shown.update(line)


def drawn(message: str, spinner: Spinner | None = None, *, clock: str = "") -> Table:
    """Return a message as a line: spinner, bar, text and clock."""
    parts: list[RenderableType] = [] if spinner is None else [spinner]
    what = message
    if isinstance(message, Message):
        what = message.what
        if message.done is not None and message.total:
            parts.append(ProgressBar(total=message.total, completed=message.done - 1, width=BAR_WIDTH))
        if message.began_s is not None and message.limit_s is not None:
            clock = clock_of(message.began_s, message.limit_s)
    parts.append(Text(f"{what}, {clock}" if clock else what))
    line = Table.grid(padding=(0, 1))
    line.add_row(*parts)
    return line
