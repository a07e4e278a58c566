"""The bytes on the device over one planned step, by category, and what holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.referee import Stay, Timeline
from ckptplan.referee.rules import holds, outermost

Ints = NDArray[np.int64]

CATEGORIES = (
    "weights, state, inputs",
    "gradients, gathered weights",
    "other forwards in flight",
    "kept for backward",
    "being swapped out",
    "swapped in",
    "made again",
    "held by the program",
    "temporary",
)
"""From below to above.

The first is there in every step. "being swapped out" is held until its release point, "swapped in" from its prefetch
point on; "made again" are the storages of a segment's sweep; "held by the program" is what no stage keeps
for its backward; "temporary" is what a stage adds at its worst moment, what it recomputes alone included.
"""
COLOURS = ("#9aa5b1", "#5d6975", "#c9bfb0", "#0072b2", "#009e73", "#7fd1ae", "#e69f00", "#cc79a7", "#f0e442")
"""Of the categories, which readers who see few colours can tell apart (Okabe and Ito, 2008)."""
_FIXED, _BASE, _OTHERS, _KEPT, _LEAVING, _BACK, _AGAIN, _PROGRAM, _TEMPORARY = range(len(CATEGORIES))


@dataclass(frozen=True, slots=True)
class Waterline:
    """One step as stacked bytes.

    Attributes
    ----------
    stacked : array (categories, steps)
        Bytes by category at the worst moment of each of the timeline's steps; they add up to the step's peak.
    stays : tuple of Stay
        The storages on the device by steps, of the timeline.
    of : tuple of int
        The category of each.
    """

    stacked: Ints
    stays: tuple[Stay, ...]
    of: tuple[int, ...]


def waterline(profile: Profile, plan: Plan, timeline: Timeline) -> Waterline:
    """Return the bytes of each of `timeline`'s steps by category.

    Parameters
    ----------
    profile : Profile
    plan : Plan
    timeline : Timeline
        The plan's, as `simulate` returns it.
    """
    steps = timeline.steps
    kinds = tuple(_kinds(profile, plan, timeline))
    sizes = np.array([storage.nbytes for storage in profile.storages], dtype=np.int64)
    changes = np.zeros((len(CATEGORIES), len(steps) + 1), dtype=np.int64)
    for stay, kind in zip(timeline.stays, kinds, strict=True):
        changes[kind, stay.first] += sizes[stay.storage]
        changes[kind, stay.last + 1] -= sizes[stay.storage]
    stacked = np.cumsum(changes, axis=1)[:, :-1]
    start, peak = (np.array([getattr(step, name) for step in steps]) for name in ("start_bytes", "peak_bytes"))
    base = start - stacked.sum(axis=0)
    stacked[_FIXED] = np.minimum(base, profile.resident_bytes or base.min())
    stacked[_BASE] = base - stacked[_FIXED]
    stacked[_TEMPORARY] = peak - start
    stacked[_OTHERS, :-1] = plan.others_bytes  # none is in flight in the update
    return Waterline(stacked, timeline.stays, kinds)


def _kinds(profile: Profile, plan: Plan, timeline: Timeline) -> list[int]:
    """The category of each of the timeline's stays."""
    around = outermost(plan.segments)
    kept: set[int] = set()
    moved: set[int] = set()
    for i, (stage, choice) in enumerate(zip(profile.stages, plan.choices, strict=True)):
        kept.update(holds(profile, i, choice, around.get(i)))
        saved = stage.option(choice.option).saved
        moved.update(saved[p] for p in choice.moves)
    turn = next(k for k, step in enumerate(timeline.steps) if step.phase == "backward")
    out = []
    for stay in timeline.stays:
        if stay.again:
            out.append(_AGAIN)
        elif stay.storage in moved:
            out.append(_LEAVING if stay.first < turn else _BACK)
        else:
            out.append(_KEPT if stay.storage in kept else _PROGRAM)
    return out


def drawn_end_s(timeline: Timeline) -> float:
    """When the last step ends in a picture: the update, which takes no time in a plan, gets a fiftieth of it."""
    return timeline.makespan_s * 1.02 or 1.0
