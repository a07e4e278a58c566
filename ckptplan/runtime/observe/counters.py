"""Counters: what has happened since a plan was applied."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.observe.meter import Meter


@dataclass(slots=True)
class Counters:
    """Counts of what happened since the plan was applied; `meter` keeps the times.

    `runs` counts, by stage index, every run of the stage's forward. `copied_bytes` has, by stage index, the sizes of
    the buffers that the forward updates: a stage that is recomputed keeps copies of them, and each rerun makes more.
    `other_paths` counts the runs of a stage that saved other storages than profiled; `differences`, by kind, what else
    steps did otherwise than planned.
    """

    forwards: int = 0
    recomputed_stages: int = 0
    other_paths: int = 0
    runs: collections.Counter[int] = field(default_factory=collections.Counter)
    copied_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    host_wait_s: float = 0.0
    meter: Meter = field(default_factory=Meter)
    differences: Differences = field(default_factory=Differences)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time of the block to `host_wait_s` and to the meter's stall account: compute waits for a copy."""
        begin, before = time.perf_counter(), self.meter.stall()
        try:
            yield
        finally:
            self.meter.mark(before)
            self.host_wait_s += time.perf_counter() - begin
