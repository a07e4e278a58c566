"""Linear programs over fractions per stage with peaks limited at every position, solved exactly without a solver.

Bytes freed by stages before k must reach need_k, for every k: the sets of stages are nested, each within the next.
Then greedy is exact. Take the positions in order; where bytes are missing, buy them from the cheapest stages so far
that have any left. (An exchange argument: whatever a later position buys, the bytes that an earlier one needs come
out of its own stages, and the cheapest of these serve every later position just as well.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptplan.core.option import Option
from ckptplan.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Offer:
    """Bytes that a stage can free, and what one costs.

    Parameters
    ----------
    stage : int
    nbytes : float
        At most so many.
    s_per_byte : float
    """

    stage: int
    nbytes: float
    s_per_byte: float


def cheapest(offers: Sequence[Offer], needs: Sequence[float]) -> list[float]:
    """Bytes to take of each offer, the cheapest in all; as much as there is where a need can't be met.

    Parameters
    ----------
    offers : sequence of Offer
    needs : sequence of float
        Per position k, the bytes that offers of stages before k must free; O((offers + stages) log offers).
    """
    taken = [0.0] * len(offers)
    waiting = sorted(range(len(offers)), key=lambda o: -offers[o].stage)
    at_hand: list[tuple[float, int]] = []
    total = 0.0
    for k, need in enumerate(needs):
        while waiting and offers[waiting[-1]].stage < k:
            o = waiting.pop()
            heapq.heappush(at_hand, (offers[o].s_per_byte, o))
        while total < need and at_hand:
            o = at_hand[0][1]
            part = min(need - total, offers[o].nbytes - taken[o])
            taken[o] += part
            total += part
            if taken[o] >= offers[o].nbytes:
                heapq.heappop(at_hand)
    return taken


def targets(budget_bytes: int) -> Iterator[int]:
    """Budgets to give such a program, 105 % of the true one down to 40 %, in steps of 1 %.

    Rounding fractions to whole options changes the bytes, either way, so the program is solved for all of them, and
    what fits after rounding counts.
    """
    for percent in range(105, 39, -1):
        yield budget_bytes * percent // 100


@dataclass(frozen=True, slots=True)
class Share:
    """What part of the bytes that a stage could free an option recomputes, and what part it moves."""

    recomputed: float
    moved: float


def mine(profile: Profile) -> list[frozenset[int]]:
    """Per stage, the storages that it is the first to hold under keep, and that recompute, where it can, would drop."""
    counted: set[int] = set()
    found = []
    for stage in profile.stages:
        held = set(stage.keep.held) - counted
        counted |= held
        again = stage.recompute
        found.append(frozenset(held if again is None else held - set(again.held)))
    return found


def nearest(profile: Profile, i: int, storages: frozenset[int], wanted: Share) -> Option:
    """The option of stage `i` whose shares are closest to those wanted, the first in the menu among equals."""
    total = sum(profile.storages[s].nbytes for s in storages)

    def distance(option: Option) -> float:
        held = sum(profile.storages[s].nbytes for s in storages & set(option.held))
        moved = sum(profile.storages[s].nbytes for s in storages & set(option.moved))
        found = Share(1 - held / total, moved / total)
        return abs(found.recomputed - wanted.recomputed) + abs(found.moved - wanted.moved)

    stage = profile.stages[i]
    return min(stage.options, key=distance) if total else stage.keep
