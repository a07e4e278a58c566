"""Times of the device and of the host that launches its work, apart.

A CUDA step runs in two lanes: the host launches and the device computes. A span between two synchronisations takes the
longer of both, and the sum of such spans is more than a step takes, which is the longer of two sums. So work that is to
be timed is queued behind a delay kernel: the device begins when all of it is launched and never waits for the host.
Events tell what the device takes, the host's clock what the launching takes.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptplan.runtime.accelerator import delay, is_accelerator, synchronize, timing_event

_FIRST_DELAY_S = 2e-3  # a stage of a hundred operations launches in about a millisecond
_MOST_DELAY_S = 0.2  # more than the host takes for a thousand launches, which is what the device's queue holds
_SPARE = 2.0  # launching varies from run to run
_TRIES = 2  # longer delays for a kind, before it is taken to wait for the device itself
_CALIBRATION_CYCLES = 10_000_000  # some milliseconds at 1-2 GHz


class Took(NamedTuple):
    """Seconds of the device, and of the host where its work is another lane; on the CPU all is the device's."""

    compute_s: float
    launch_s: float


@dataclass(slots=True)
class Span:
    """Something that is being timed.

    Attributes
    ----------
    kind : hashable
        Spans of one kind take about the same.
    begin_s : float
        On the host's clock.
    begin : torch.cuda.Event or None
        Recorded behind the delay; None on the CPU.
    """

    kind: Hashable
    begin_s: float
    begin: Any = None


class Stopwatch:
    """Times spans on one device; a span that begins drops nothing of those before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._delays_s: dict[Hashable, float] = {}
        self._too_short: Counter[Hashable] = Counter()

    def begin(self, kind: Hashable = None) -> Span:
        """Wait for what runs, then time what is launched from here on."""
        if not is_accelerator(self._device):
            return Span(kind, time.perf_counter())
        synchronize(self._device)
        delay(self._device, int(self._delays_s.get(kind, _FIRST_DELAY_S) * _cycles_per_s(self._device)))
        begin = timing_event(self._device)
        return Span(kind, time.perf_counter(), begin)

    def end(self, span: Span) -> Took:
        """What was launched since, timed when the device has done it.

        Where the delay was over before the last launch, the device may have waited for the host; the next span of this
        kind gets a longer delay. Code that waits for the device itself, or launches more than its queue holds, outlasts
        every delay; then the delay is no part of what the host takes, which is at most what the device does.
        """
        launch_s = time.perf_counter() - span.begin_s
        if span.begin is None:
            return Took(launch_s, 0.0)
        too_short = span.begin.query()
        end = timing_event(self._device)
        end.synchronize()
        compute_s = span.begin.elapsed_time(end) / 1e3
        if too_short:
            self._too_short[span.kind] += 1
            longer_s = max(_SPARE * launch_s, _FIRST_DELAY_S) if self._too_short[span.kind] <= _TRIES else 0.0
            self._delays_s[span.kind] = min(longer_s, _MOST_DELAY_S) or _FIRST_DELAY_S
            launch_s = min(launch_s, compute_s)
        return Took(compute_s, launch_s)


@functools.cache
def _cycles_per_s(device: torch.device) -> float:
    """Cycles of the delay kernel in a second."""
    delay(device, _CALIBRATION_CYCLES)  # the first launch of a kernel loads it
    begin = timing_event(device)
    delay(device, _CALIBRATION_CYCLES)
    end = timing_event(device)
    end.synchronize()
    return _CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3)
