"""Plans written by hand, without a profile: how every stage of a small model runs again, and what carries that out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ckptplan.core.plan import Decision, Decisions
from ckptplan.core.segment import Segment
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.runtime.swap.stores import NULL_STORES

AGAIN = Decision("recompute")
CPU = torch.device("cpu")
WAYS = ("recompute", "selective", "segment")
"""The ways to run again: alone, with the output of operation number 1 saved, and all as one segment."""


@contextlib.contextmanager
def carried_out(
    model: nn.Module,
    stages: Sequence[str],
    choices: Sequence[Decision] | None = None,
    segments: Sequence[Segment] = (),
    *,
    stores: Any = NULL_STORES,
    device: torch.device = CPU,
    checks: Any = None,
) -> Iterator[Controller]:
    """Every stage runs again where no `choices` are given."""
    decisions = Decisions(tuple(stages), tuple(choices or [AGAIN] * len(stages)), tuple(segments))
    controller = Controller(model, decisions, stores, device, checks=checks)
    controller.install()
    try:
        with STEPS.watched():
            yield controller
    finally:
        controller.remove()


@contextlib.contextmanager
def run_again(model: nn.Module, way: str, stages: Sequence[str], **options: Any) -> Iterator[Controller]:
    """Every stage runs again, in one of `WAYS`."""
    choice = Decision("recompute", ops=(1,)) if way == "selective" else AGAIN
    segments = (Segment(0, len(stages) - 1),) if way == "segment" else ()
    with carried_out(model, stages, [choice] * len(stages), segments, **options) as controller:
        yield controller
