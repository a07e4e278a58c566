"""Record one real step: its marks, its copies, and the bytes on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.trace import DrawnStep, Span, lane_of
from ckptplan.runtime.observe.meter import BACKWARD, FORWARD, KINDS, NONE, RECOMPUTE, STALL, Meter, Step, seconds
from ckptplan.tensors.accelerator import is_accelerator, synchronize
from ckptplan.training.measure import recorded_allocations

_SPAN = "ckptplan.trace"
_SHORT_S = 1e-6
"""Shorter waits aren't drawn: the copy had ended before."""
_WHAT = {FORWARD: "forward", RECOMPUTE: "recompute", BACKWARD: "backward", STALL: "stall"}


def record_step(
    meter: Meter, run: Callable[[], Any], device: torch.device, held_bytes: int, names: Sequence[str]
) -> tuple[DrawnStep, tuple[str, ...]]:
    """Run one step, `run`, and return the recorded step and notes about how it was measured.

    On the CPU the bytes are `held_bytes` plus the allocator's events since. On CUDA they are the bytes allocated on the
    device at the moments when stages, recompute and waits begin and end.

    Raises
    ------
    InvalidInputError
        If `run` isn't one forward followed by its backward.
    """
    begin_s = 0.0
    events: list[tuple[int, int]] = []
    passes = meter.passes

    def once() -> None:
        nonlocal begin_s
        with record_function(_SPAN):
            begin_s = time.perf_counter()
            run()

    meter.every = True
    try:
        if is_accelerator(device):
            synchronize(device)
            once()
            synchronize(device)
            begin_ns = 0
        else:
            events, spans = recorded_allocations(once)
            begin_ns = spans[_SPAN][0]
    finally:
        meter.every = False
    step = meter.last
    if step is None or meter.passes != passes + 1:
        raise InvalidInputError(
            f"the traced function ran {meter.passes - passes} training forwards"
            + ("" if step is not None else ", and no backward ended after the last one")
            + "; pass a function that runs one forward and its backward"
        )
    zero = step.marks[0][1]
    memory: list[tuple[float, int]]
    if is_accelerator(device):
        memory = [(seconds(zero, at), nbytes) for (_, at), nbytes in zip(step.marks, step.memory or (), strict=True)]
        notes: tuple[str, ...] = (
            "measured memory is what was allocated where stages, recompute and waits begin and end",
        )
    else:
        shift_s, level, memory = begin_s - zero, held_bytes, []
        for at_ns, nbytes in events:
            level += nbytes
            memory.append(((at_ns - begin_ns) / 1e9 + shift_s, level))
        memory.insert(0, (memory[0][0] if memory else 0.0, held_bytes))
        notes = ("recording every allocation slows the measured step; handle.stats() has the time of a plain one",)
    copies = tuple(
        Span(lane_of(c.way, c.tier), c.way, "", seconds(zero, c.begin), seconds(zero, c.end), c.nbytes)
        for c in list(step.copies)
    )
    return DrawnStep((*_compute(step, names), *copies), tuple(memory), seconds(zero, step.marks[-1][1])), notes


def _compute(step: Step, names: Sequence[str]) -> list[Span]:
    """Return the marks as spans: recompute lies inside the backward that needs it, stalls inside any of them."""
    zero = step.marks[0][1]
    spans: list[Span] = []
    open_: list[tuple[int, float]] = []  # open accounts, outermost first, with their beginnings

    def close(down_to: int, at_s: float) -> None:
        while len(open_) > down_to:
            account, since_s = open_.pop()
            stage, kind = divmod(account, KINDS)
            if kind != STALL or at_s - since_s >= _SHORT_S:
                spans.append(Span("compute", _WHAT[kind], names[stage], since_s, at_s))  # type: ignore[arg-type]

    for account, at in step.marks:
        at_s = seconds(zero, at)
        found = next((depth for depth, (known, _) in enumerate(open_) if known == account), None)
        if found is not None:
            close(found + 1, at_s)
            continue
        if account == NONE:
            close(0, at_s)
            continue
        if account % KINDS in (FORWARD, BACKWARD):
            close(0, at_s)
        open_.append((account, at_s))
    return spans
