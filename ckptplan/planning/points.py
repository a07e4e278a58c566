"""Transfers of a plan as short as they can be away from where they must be: what leaves early leaves no fragments late.

A search lets storages stay until their room is needed and fetches them as soon as there is room: that costs no time in
its model. In the caching allocator it does: forward then fills the budget with the blocks of all that hasn't left yet,
and the large tensors behind it, such as a loss's, don't fit into what these leave (NOTE [Fragments] in job.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S
from ckptplan.referee.simulate import simulate

Place = tuple[int, int]
"""A stage, and the number of one of its transfers."""


def away_longest(profile: Profile, plan: Plan) -> Plan:
    """Return the plan with each release point as early, and each prefetch point as late, as its step time allows.

    Its peak is within the same budget. A copy that takes longer than predicted is waited for sooner.
    """
    most_s = simulate(profile, plan).makespan_s * (1 + EQUAL_S)

    def allowed(choices: Sequence[Decision]) -> bool:
        try:
            found = simulate(profile, choices, plan.segments)
        except InvalidInputError:  # an order that the queues of the links can't have
            return False
        return found.makespan_s <= most_s and found.peak_bytes <= plan.budget_bytes

    choices = list(plan.choices)
    for point in ("release", "prefetch"):
        for place in _in_order(choices, point):
            choices = _moved(choices, place, point, allowed)
    return replace(plan, choices=tuple(choices))


def _in_order(choices: Sequence[Decision], point: Literal["release", "prefetch"]) -> Iterator[Place]:
    """The transfers as the lane has them: out from the first stage on, back to the last one first."""
    places = [(i, k) for i, choice in enumerate(choices) for k in range(len(choice.transfers))]
    if point == "release":
        return iter(sorted(places, key=lambda place: choices[place[0]].transfers[place[1]].release))
    return iter(sorted(places, key=lambda place: -choices[place[0]].transfers[place[1]].prefetch))


def _moved(
    choices: list[Decision],
    place: Place,
    point: Literal["release", "prefetch"],
    allowed: Callable[[Sequence[Decision]], bool],
) -> list[Decision]:
    """The decisions with one point as near to its stage as is allowed: found by bisection, as nearer ones cost more."""
    stage, number = place

    def at(step: int) -> list[Decision]:
        transfers = list(choices[stage].transfers)
        moved: dict[str, Any] = {point: step}
        transfers[number] = replace(transfers[number], **moved)
        return [*choices[:stage], replace(choices[stage], transfers=tuple(transfers)), *choices[stage + 1 :]]

    least, most = stage, getattr(choices[stage].transfers[number], point)
    best = choices
    while least < most:
        middle = (least + most) // 2
        moved = at(middle)
        if allowed(moved):
            best, most = moved, middle
        else:
            least = middle + 1
    return best
