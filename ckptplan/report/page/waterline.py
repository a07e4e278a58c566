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

MEANINGS = {
    "weights, state, inputs": "the model, the optimizer's state and the batch: there in every step",
    "weights that may leave": "weights that the plan may have away between forward and backward, while they are there",
    "state that may leave": "optimizer state that the plan may have away until the update, while it is there",
    "gradients that may leave": "gradients from before the step, likewise, until the backward that adds to them",
    "gradients, gathered weights": "gradients so far, and of a sharded model the weights that are gathered",
    "kept for backward": "what stages' backwards need, and that stays on the device",
    "being swapped out": "what is on its way to the host or the disk, until the plan counts on its memory",
    "swapped in": "what has been fetched back for a backward, from the moment at which its copy begins",
    "made again": "what stages that are recomputed together make a second time",
    "held by the program": "outputs that variables hold and no stage needs for its backward",
    "temporary": "what a stage adds at its worst moment: workspaces, and what it recomputes alone",
}
"""Categories of bytes, from below to above, with what they are."""
CATEGORIES = tuple(MEANINGS)
COLOURS = (
    "#9aa5b1", "#56b4e9", "#a6cee3", "#2f4b7c", "#5d6975", "#0072b2", "#009e73", "#7fd1ae", "#e69f00", "#cc79a7",
    "#f0e442",
)  # fmt: skip
"""Colours of the categories, which colour-blind readers can tell apart (after Okabe and Ito, 2008)."""
_FIXED, _WEIGHTS, _STATE, _GRADIENTS, _BASE, _KEPT, _LEAVING, _BACK, _AGAIN, _PROGRAM, _TEMPORARY = range(
    len(CATEGORIES)
)

_MAY_LEAVE = {"weights": _WEIGHTS, "optimizer": _STATE, "gradients": _GRADIENTS}


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
    fixed = np.full(len(steps), profile.resident_bytes or base.min())
    begins = {step.stage: k for k, step in enumerate(steps) if step.phase == "backward" and not step.sweep}
    for resident in profile.moving:  # behind its first user's backward it is part of the base
        fixed[: begins[profile.stages[resident.users[0]].name] + 1] -= resident.nbytes
    stacked[_FIXED] = np.clip(fixed, 0, base)
    stacked[_BASE] = base - stacked[_FIXED]
    stacked[_TEMPORARY] = peak - start
    return Waterline(stacked, timeline.stays, kinds)


def _kinds(profile: Profile, plan: Plan, timeline: Timeline) -> list[int]:
    """Return the category of each of the timeline's stays."""
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
        elif stay.storage >= profile.first_moving:
            out.append(_MAY_LEAVE[profile.moving[stay.storage - profile.first_moving].kind])
        elif stay.storage in moved:
            out.append(_LEAVING if stay.first < turn else _BACK)
        else:
            out.append(_KEPT if stay.storage in kept else _PROGRAM)
    return out


def drawn_end_s(timeline: Timeline) -> float:
    """Return the drawn end of the last step: the update, which takes no time in a plan, gets a fiftieth of the step."""
    return timeline.makespan_s * 1.02 or 1.0
