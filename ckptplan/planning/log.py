"""Log lines about the plans of a training."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator

import torch.distributed as dist

from ckptplan.core.budget import Budget
from ckptplan.core.display import progress
from ckptplan.core.option import Action
from ckptplan.core.plan import Plan
from ckptplan.core.request import Report
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.distributed import is_distributed

_LOG = logging.getLogger("ckptplan")


def in_words(plan: Plan, took_s: float) -> str:
    """Return a plan in one sentence: what stages do, peak of the budget, slowdown, gap, seconds of planning."""
    within = f"peak {format_bytes(plan.counted_bytes)} of {format_bytes(plan.budget_bytes)}"
    planned = f"planned in {format_seconds(took_s)}"
    counts = Counter(choice.action for choice in plan.choices)
    if counts["keep"] == len(plan.choices):
        return f"ckptplan: keeps everything, which fits: {within}, nothing to gain, {planned}"
    done: dict[Action, str] = {
        "recompute": f"recomputes {counts['recompute']}",
        "swap": f"swaps {counts['swap']} ({format_bytes(plan.host_bytes + plan.disk_bytes)})",
    }
    what = " and ".join(text for action, text in done.items() if counts[action])
    return (
        f"ckptplan: {what} of {len(plan.choices)} stages: {within}, step {plan.overhead:+.1%} over keeping everything, "
        f"within {plan.gap:.1%} of the best possible, {planned}"
    )


def is_first_rank() -> bool:
    """Return whether this process is the one of its group that logs for all."""
    return not is_distributed() or dist.get_rank() == 0


def say(text: str) -> None:
    """Log a sentence, on stderr where no logging is set up."""
    if _LOG.hasHandlers():
        _LOG.info(text)
    elif _is_heard():
        print(text, file=sys.stderr)


def _is_heard() -> bool:
    """Return whether the user's logging lets sentences through."""
    if _LOG.hasHandlers():
        return _LOG.isEnabledFor(logging.INFO)
    # The root has the level WARNING by default.
    return _LOG.level <= logging.INFO > logging.root.manager.disable


@contextlib.contextmanager
def planning(budget: Budget, time_limit_s: float, on_progress: Report | None) -> Iterator[Report | None]:
    """Log that planning begins, and show its progress on a terminal within the block.

    Only the first rank logs and shows anything, and only if the user's logging lets this package's messages through.

    Parameters
    ----------
    budget : Budget
    time_limit_s : float
        Time limit of the search.
    on_progress : callable, optional
        The user's callback, which is called instead of drawing the terminal's line.

    Yields
    ------
    callable or None
        `on_progress` for `solve`.
    """
    if not is_first_rank():
        yield on_progress
        return
    say(
        f"ckptplan: planning for {budget} before this step runs: profiling it, then solving for up to "
        f"{time_limit_s:g} s"
    )
    is_drawn_over = hasattr(sys.stderr, "rich_proxied_file")  # by a display of rich, such as Lightning's bar
    if on_progress is not None or is_drawn_over or not _is_heard():
        yield on_progress
        return
    with progress("profiling") as shown:
        yield shown
