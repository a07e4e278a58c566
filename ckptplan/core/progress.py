"""Messages of long work: texts, with their counts and times as numbers for displays."""

from __future__ import annotations

import math
import sys
import time

from ckptplan.core.units import format_bytes, format_seconds


class Message(str):
    """A description of the present work, which `on_progress` is called with: a text, with its counts as numbers.

    Attributes
    ----------
    what : str
        The text without the time: a display shows a clock that runs on.
    done, total : int or None
        The parts of the work that have begun, and all of them.
    began_s, limit_s : float or None
        When work with a time limit began (`time.monotonic`), and the limit.
    """

    what: str
    done: int | None
    total: int | None
    began_s: float | None
    limit_s: float | None

    def __new__(
        cls,
        what: str,
        *,
        done: int | None = None,
        total: int | None = None,
        began_s: float | None = None,
        limit_s: float | None = None,
    ) -> Message:
        """Make a message; its text ends with the time, if it has one."""
        clock = "" if began_s is None or limit_s is None else f", {clock_of(began_s, limit_s)}"
        made = super().__new__(cls, what + clock)
        made.what, made.done, made.total, made.began_s, made.limit_s = what, done, total, began_s, limit_s
        return made


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")  # loaded by every kernel
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def clock_of(began_s: float, limit_s: float) -> str:
    """Return the time of a work that began at `began_s`: "4 s of 10 s"."""
    return f"{time.monotonic() - began_s:.0f} s of {limit_s:g} s"


def counted(doing: str, done: int, total: int, what: str) -> Message:
    """Return the message that part `done` of `total` begins: "timing 17 of 40 kinds of options"."""
    return Message(f"{doing} {done} of {total} {what}", done=done, total=total)


def limited(what: str, limit_s: float) -> Message:
    """Return the message that work with a time limit begins."""
    return Message(what, began_s=time.monotonic(), limit_s=limit_s)


def search_state(best_s: float, bound_s: float, peak_bytes: int | None) -> str:
    """Return where a search stands: "step 12.0 ms, peak 1.50 GiB, gap 1.80%"."""
    if best_s == math.inf:
        return "no plan yet"
    peak = "" if peak_bytes is None else f", peak {format_bytes(peak_bytes)}"
    gap = f", gap {max(0.0, best_s / bound_s - 1):.2%}" if bound_s else ""
    return f"step {format_seconds(best_s)}{peak}{gap}"
