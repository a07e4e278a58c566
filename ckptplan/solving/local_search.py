"""Improve decision vectors by changing one or two stages at a time, under the real schedule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ckptplan.solving.evaluate import Codes, Menu

Cost = Callable[[Codes], NDArray[np.float64]]
CELLS_PER_BATCH = 1 << 22
"""Evaluation takes rows x stages^2; the clock is looked at between batches."""


def patterns(menu: Menu) -> Codes:
    """Starting points: each action alone, one action before a stage and another after it, every m-th stage apart."""
    n = len(menu)
    rows: list[list[int]] = []
    used = sorted({code for codes in menu for code in codes})
    for a, b in itertools.product(used, used):
        rows.extend([a] * cut + [b] * (n - cut) for cut in range(n + 1))
        rows.extend([a if i % every == 0 else b for i in range(n)] for every in range(2, n))
    # Swap, then recompute, then keep: the first copies have the longest to go and come back.
    step = max(1, n // 12)
    rows.extend(
        [1] * i + [2] * (j - i) + [0] * (n - j)
        for i in range(0, n + 1, step)
        for j in range(i, n + 1, step)
        if {1, 2} <= set(used)
    )
    wanted = np.array(rows, np.int8)
    for i, codes in enumerate(menu):
        wanted[:, i] = np.where(np.isin(wanted[:, i], codes), wanted[:, i], 0)
    return np.unique(wanted, axis=0)


def improve(start: NDArray[np.int8], menu: Menu, cost: Cost, deadline: float) -> NDArray[np.int8]:
    """The vector reached from `start` when no change of one or two stages helps, or at `deadline`."""
    current = start.copy()
    value = float(cost(current[None])[0])
    options = [[(i, code) for code in codes] for i, codes in enumerate(menu) if len(codes) > 1]
    singles = [((i, code),) for stage in options for i, code in stage]
    pairs = [(a, b) for p, q in itertools.combinations(options, 2) for a in p for b in q]
    rows_per_batch = max(32, min(2048, CELLS_PER_BATCH // len(menu) ** 2))
    improved = True
    while improved and time.monotonic() < deadline:
        improved = False
        for changes in (singles, pairs):
            for at in range(0, len(changes), rows_per_batch):
                batch = changes[at : at + rows_per_batch]
                rows = np.tile(current, (len(batch), 1))
                for position in range(len(batch[0])):
                    stages = [change[position][0] for change in batch]
                    rows[np.arange(len(batch)), stages] = [change[position][1] for change in batch]
                costs = cost(rows)
                best = int(costs.argmin())
                if costs[best] < value * (1 - 1e-12) or (value == float("inf") and costs[best] < value):
                    current, value, improved = rows[best].copy(), float(costs[best]), True
                    break
                if time.monotonic() > deadline:
                    return current
            if improved:
                break
    return current
