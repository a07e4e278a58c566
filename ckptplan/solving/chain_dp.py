"""Exact dynamic program over the chain for plans that move nothing: keep and recompute.

A label stands for the decisions of the stages before `k`: (held bytes, time, which shared storages are held). With no
transfers, the bytes of forward step `k` and of backward step `k` both depend on these stages alone (NOTE [Residency],
rules 1 to 3), so each step is checked once, when stage `k` is decided. Of two labels that hold the same shared
storages, the one with more bytes and more time can't lead to anything better and is dropped.

Bytes are exact integers. Labels grow with the number of distinct sums of bytes; `width` caps them, and the result says
whether the cap was ever reached.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.profile import Profile
from ckptplan.solving.evaluate import Menu, holders_of

MAX_TRACKED = 62


@dataclass(frozen=True, slots=True)
class DpResult:
    """`codes` is None where nothing fits; `exact` is False where labels were cut or the clock ran out."""

    codes: tuple[int, ...] | None
    step_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class _Labels:
    held: NDArray[np.int64]
    cost: NDArray[np.float64]
    mask: NDArray[np.int64]
    parent: NDArray[np.int64]
    code: NDArray[np.int8]


def nothing_moves(profile: Profile, menu: Menu, budget_bytes: int, *, deadline: float, width: int = 20_000) -> DpResult:
    """The fastest vector that fits with every byte staying on the device; O(stages x labels log labels).

    Parameters
    ----------
    menu : sequence of sequence of int
        Option codes per stage; those that move something are passed over.
    budget_bytes : int
    deadline : float
        By `time.monotonic()`.
    width : int
        Most labels per stage boundary.
    """
    tracker = _Tracker(profile)
    if profile.update_peak_bytes > budget_bytes:
        return DpResult(None, float("inf"), True)
    if not tracker.usable:
        return DpResult(None, float("inf"), False)
    levels = [_Labels(*(np.zeros(1, t) for t in (np.int64, np.float64, np.int64, np.int64, np.int8)))]  # type: ignore[arg-type]
    exact = True
    for k, stage in enumerate(profile.stages):
        grown = []
        for code in menu[k]:
            option = stage.options[code]
            if option.moves:
                continue
            before = levels[-1]
            start = (
                profile.base_forward_bytes[k] + tracker.program_bytes[k] + before.held - tracker.overlap(k, before.mask)
            )
            held, mask = tracker.hold(k, code, before.held, before.mask)
            back = profile.base_backward_bytes[k] + tracker.caller_bytes + held
            fits = (start + option.forward_bytes <= budget_bytes) & (back + option.backward_bytes <= budget_bytes)
            kept = np.flatnonzero(fits)
            seconds = stage.forward_s + stage.backward_s + option.recompute_s
            mask = tracker.forget(k, mask)
            grown.append(
                _Labels(held[kept], before.cost[kept] + seconds, mask[kept], kept, np.full(len(kept), code, np.int8))
            )
        merged = _Labels(*(np.concatenate([getattr(g, f) for g in grown]) for f in _Labels.__slots__))
        if len(merged.held) == 0:
            return DpResult(None, float("inf"), exact)
        pruned = _undominated(merged)
        if len(pruned.held) > width:
            exact = False
            spread = np.linspace(0, len(pruned.held) - 1, width).astype(np.int64)
            pruned = _take(pruned, np.argsort(pruned.held, kind="stable")[spread])
        levels.append(pruned)
        if time.monotonic() > deadline:
            return DpResult(None, float("inf"), False)
    row = int(levels[-1].cost.argmin())
    step_s = float(levels[-1].cost[row])
    codes = []
    for level in reversed(levels[1:]):
        codes.append(int(level.code[row]))
        row = int(level.parent[row])
    return DpResult(tuple(reversed(codes)), step_s, exact)


def _take(labels: _Labels, rows: NDArray[np.int64]) -> _Labels:
    return _Labels(labels.held[rows], labels.cost[rows], labels.mask[rows], labels.parent[rows], labels.code[rows])


def _undominated(labels: _Labels) -> _Labels:
    order = np.lexsort((labels.cost, labels.held, labels.mask))
    labels = _take(labels, order)
    keep = np.zeros(len(order), bool)
    starts = np.flatnonzero(np.r_[True, labels.mask[1:] != labels.mask[:-1]])
    for a, b in zip(starts, [*starts[1:], len(order)], strict=True):
        cost = labels.cost[a:b]
        least = np.minimum.accumulate(cost)
        keep[a] = True
        keep[a + 1 : b] = cost[1:] < least[:-1]
    return _take(labels, np.flatnonzero(keep))


class _Tracker:
    """Which storages a label must remember by name, and in which bit.

    A storage is tracked from its first possible holder until neither a later stage may hold it too nor the program
    still holds it: past that point its bytes are in `held` and nothing can change them.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        n = len(profile.stages)
        self.program_bytes = [0] * n
        self.caller_bytes = 0
        self._until: dict[int, int] = {}
        bits: dict[int, int] = {}
        free = list(range(MAX_TRACKED))
        first: list[list[int]] = [[] for _ in range(n)]
        self._expiring: list[list[int]] = [[] for _ in range(n + 1)]
        self.usable = True
        for s, (storage, holders) in enumerate(zip(profile.storages, holders_of(profile), strict=True)):
            last_seen = n - 1 if storage.to_end else min(storage.program_until, n - 1)
            for k in range(storage.born + 1, last_seen + 1):
                self.program_bytes[k] += storage.nbytes
            self.caller_bytes += storage.nbytes if storage.to_end else 0
            if storage.to_end or not holders or not storage.nbytes:
                continue
            until = max(holders[-1].stage, last_seen)
            if until > holders[0].stage:
                self._until[s] = until
                first[holders[0].stage].append(s)
        for k in range(n):
            # A bit may be used again from the stage after the one in which its storage is last looked at.
            for s in (s for s in list(bits) if self._until[s] == k - 1):
                free.append(bits[s])
            for s in first[k]:
                if not free:
                    self.usable = False
                    return
                bits[s] = free.pop()
                self._expiring[self._until[s]].append(s)
        self._bit = {s: np.int64(1 << bit) for s, bit in bits.items()}
        self._overlapping: list[list[int]] = [[] for _ in range(n)]
        for s in self._bit:
            for k in range(min(profile.storages[s].program_until, n - 1) + 1):
                self._overlapping[k].append(s)
        self._first = {s: k for k in range(n) for s in first[k]}

    def overlap(self, k: int, mask: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes held by earlier stages that the program holds too in forward step `k`."""
        both = np.zeros(len(mask), np.int64)
        for s in self._overlapping[k]:
            if self._first[s] < k:
                both += np.where(mask & self._bit[s], self.profile.storages[s].nbytes, 0)
        return both

    def hold(
        self, k: int, code: int, held: NDArray[np.int64], mask: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Held bytes and mask once stage `k` holds what `code` makes it hold."""
        held, mask = held.copy(), mask.copy()
        for s in self.profile.stages[k].options[code].held:
            storage = self.profile.storages[s]
            if storage.to_end or not storage.nbytes:
                continue
            bit = self._bit.get(s)
            if bit is None:
                held += storage.nbytes
            else:
                held += np.where(mask & bit, 0, storage.nbytes)
                mask |= bit
        return held, mask

    def forget(self, k: int, mask: NDArray[np.int64]) -> NDArray[np.int64]:
        """The mask without the storages that no step after `k` looks at."""
        for s in self._expiring[k]:
            mask = mask & ~self._bit[s]
        return mask
