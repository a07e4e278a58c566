"""Separate times of the device, and of the host that launches its work.

A CUDA step runs in two lanes: the host launches and the device computes. A span between two synchronisations takes the
longer of the two times, so the sum over spans is more than the time of a step, which is the longer of two sums.
Example: two spans with 3 ms and 1 ms of the device and 1 ms and 3 ms of the host take 3 ms each, but 4 ms together. So
timed work is queued behind a delay kernel: the device begins when all of it is launched and never waits for the host.
Events give the device's time, the host's clock that of launching.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptplan.tensors.accelerator import delay, is_accelerator, synchronize, timing_event

_FIRST_DELAY_S = 2e-3  # a stage of a hundred operations launches in about a millisecond
_MOST_DELAY_S = 0.2  # more than the host takes for a thousand launches, the capacity of the device's queue
_SPARE = 2.0  # delay over launch time: launching varies from run to run
_TRIES = 2  # longer delays for a kind; if none is enough, its code waits for the device itself
_CALIBRATION_CYCLES = 10_000_000  # some milliseconds at 1-2 GHz


class Took(NamedTuple):
    """Seconds of the device, and of the host that launches its work; on the CPU the latter are 0."""

    compute_s: float
    launch_s: float


@dataclass(slots=True)
class Measurement:
    """A running measurement.

    Attributes
    ----------
    kind : hashable
        Spans of one kind take about the same time.
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

    def begin(self, kind: Hashable = None) -> Measurement:
        """Wait until the device is idle, then time the work that is launched from here on."""
        if not is_accelerator(self._device):
            return Measurement(kind, time.perf_counter())
        synchronize(self._device)
        delay(self._device, int(self._delays_s.get(kind, _FIRST_DELAY_S) * _cycles_per_s(self._device)))
        begin = timing_event(self._device)
        return Measurement(kind, time.perf_counter(), begin)

    def end(self, span: Measurement) -> Took:
        """Wait for the work that was launched since `begin`, and return its times.

        If the delay was over before the last launch, the device may have waited for the host; the next span of this
        kind gets a longer delay. For code that waits for the device itself, or launches more than its queue holds, no
        delay is long enough; then the host's time would include the delay, and is cut to the device's.
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
