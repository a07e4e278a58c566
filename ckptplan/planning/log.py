"""What a training's log says of its plans."""

from __future__ import annotations

import logging
import sys
from collections import Counter

from ckptplan.core.option import Action
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes, format_seconds

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


def say(text: str) -> None:
    """Log a sentence, on stderr where no logging is set up."""
    if _LOG.hasHandlers():
        _LOG.info(text)
    else:
        print(text, file=sys.stderr)
