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

from ckptplan.baselines._build import Selection, everywhere, own_storages
from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency


@dataclass(frozen=True, slots=True)
class Offer:
    """Bytes that a stage can free, and what one costs.

    Parameters
    ----------
    stage : int
    nbytes : float
        Largest number of bytes freed.
    s_per_byte : float
    moves : bool
        Whether they are moved; otherwise they are recomputed.
    """

    stage: int
    nbytes: float
    s_per_byte: float
    moves: bool = False


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


MOST_PERCENT, LEAST_PERCENT = 105, 40
"""Shares of the budget between which the program is solved in steps of 1 %.

Rounding fractions to whole options changes the bytes, either way, so all of these are tried, and what fits after
rounding counts.
"""


def rounded(profile: Profile, offers: Sequence[Offer], budget_bytes: int) -> Iterator[Selection]:
    """Everything kept, then the selections nearest to the fractions that the program takes of `offers`."""
    everything = everywhere(profile, "keep")
    r = residency(profile, everything.options)
    storages, sizes = own_storages(profile), offered_bytes(profile)
    seen = {everything}
    yield everything
    for percent in range(MOST_PERCENT, LEAST_PERCENT - 1, -1):
        target = budget_bytes * percent // 100
        needs = [max(*steps) - target for steps in zip(r.forward_bytes, r.backward_bytes, strict=True)]
        shares = [[0.0, 0.0] for _ in sizes]
        for offer, nbytes in zip(offers, cheapest(offers, needs), strict=True):
            shares[offer.stage][offer.moves] = nbytes / sizes[offer.stage]
        selection = Selection(tuple(nearest(profile, i, storages[i], share) for i, share in enumerate(shares)))
        if selection not in seen:
            seen.add(selection)
            yield selection


def offered_bytes(profile: Profile) -> list[int]:
    """Per stage, the bytes of its own storages, the most that it can free."""
    return [sum(profile.storages[s].nbytes for s in found) for found in own_storages(profile)]


def nearest(profile: Profile, i: int, storages: frozenset[int], wanted: Sequence[float]) -> Option:
    """The option of stage `i` that recomputes and moves closest to the wanted shares of what the stage could free.

    Among equals it is the first in the menu.
    """
    total = sum(profile.storages[s].nbytes for s in storages)

    def distance(option: Option) -> float:
        held = sum(profile.storages[s].nbytes for s in storages & set(option.held))
        moved = sum(profile.storages[s].nbytes for s in storages & set(option.moved))
        return abs(1 - held / total - wanted[0]) + abs(moved / total - wanted[1])

    stage = profile.stages[i]
    return min(stage.options, key=distance) if total else stage.keep
