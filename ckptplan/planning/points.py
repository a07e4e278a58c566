"""Transfers whose storages are away as long as the step time allows, which leaves fewer fragments.

A search lets storages stay until their room is needed and fetches them as soon as there is room, which costs nothing in
its model. In the caching allocator, forward then fills the budget with the blocks of storages that haven't left yet,
and the large tensors that follow, such as a loss's, don't fit into the gaps (NOTE [Fragments] in job.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptplan.core.plan import Decision, Plan, Transfer
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S
from ckptplan.referee.simulate import simulate


def away_longest(profile: Profile, plan: Plan, deadline: float = math.inf) -> Plan:
    """Return the plan with each release point as early, and each prefetch point as late, as its step time allows.

    One after the other, releases from the first to the last, then prefetches from the last to the first, until
    `deadline` (of `time.monotonic()`). A copy that takes longer than predicted is waited for sooner.
    """
    most_s = simulate(profile, plan).makespan_s * (1 + EQUAL_S)
    modules = [k for k, stage in enumerate(profile.stages) if not stage.is_glue and stage.has_backward]
    back_by = {i: segment.last for segment in plan.segments for i in range(segment.first, segment.last + 1)}

    def allowed(choices: Sequence[Decision]) -> bool:
        in_time = time.monotonic() <= deadline
        return in_time and simulate(profile, choices, plan.segments).makespan_s <= most_s

    choices = list(plan.choices)
    transfers = [(i, k, t) for i, choice in enumerate(choices) for k, t in enumerate(choice.transfers)]
    for i, k, t in sorted(transfers, key=lambda entry: entry[2].release):
        ways = [replace(t, release=step) for step in range(i, t.release + 1)]
        choices = _nearest(choices, i, k, ways, allowed)
    for i, k, _ in sorted(transfers, key=lambda entry: entry[2].prefetch, reverse=True):
        t = choices[i].transfers[k]
        ways = [replace(t, prefetch=step) for step in modules if back_by.get(i, i) <= step <= t.prefetch]
        choices = _nearest(choices, i, k, ways, allowed)
    return replace(plan, choices=tuple(choices))


def _nearest(
    choices: list[Decision],
    stage: int,
    number: int,
    ways: Sequence[Transfer],
    allowed: Callable[[Sequence[Decision]], bool],
) -> list[Decision]:
    """Return the decisions with the first of `ways` for a transfer that is allowed, found by bisection.

    Later ways cost no more time; the last is the present transfer.
    """

    def with_(way: Transfer) -> list[Decision]:
        transfers = list(choices[stage].transfers)
        transfers[number] = way
        return [*choices[:stage], replace(choices[stage], transfers=tuple(transfers)), *choices[stage + 1 :]]

    low, high = 0, len(ways) - 1
    best = choices
    while low < high:
        middle = (low + high) // 2
        if allowed(moved := with_(ways[middle])):
            best, high = moved, middle
        else:
            low = middle + 1
    return best
