"""From actions to a schedule: what moves, and the latest release and earliest prefetch points that fit the budget.

Shared by the solver and the baselines, so that a baseline never loses for want of a good schedule; the referee has its
own reading of the rules.

Why the lazy schedule is the best for given actions: copies finish in the order of the stages, so at each forward step
the cheapest way to make room is to wait for the shortest sufficient prefix of the queue, and waiting earlier never
lets a later step start sooner. Backward is the same in reversed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptplan.core.chain import Action, Phase, enforceable_points
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Overflow:
    """The first step at which even the tightest schedule of the given actions exceeds the budget."""

    stage: int
    phase: Phase
    bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes per step for given actions, before any transfer is scheduled (NOTE [Residency] in chain.py).

    Attributes
    ----------
    moves : tuple of tuple of int
        Per stage, the positions in its `saved` that leave the device.
    moved_bytes : tuple of int
        Their bytes per stage.
    forward_bytes, backward_bytes : tuple of int
        Bytes of each step at its worst moment if everything that moves were away in every step but its own stage's.
    """

    moves: tuple[tuple[int, ...], ...]
    moved_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]


def residency(profile: Profile, actions: Sequence[Action]) -> Residency:
    """Bytes per step with everything movable away; O(stages + holds)."""
    n = len(profile.stages)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    fixed: set[int] = set()
    for i, (stage, action) in enumerate(zip(profile.stages, actions, strict=True)):
        for s in stage.held(action):
            first.setdefault(s, i)
            last[s] = i
        fixed.update(stage.held(action) if action != "swap" else stage.pinned)
    moves: list[tuple[int, ...]] = []
    moved: dict[int, int] = {}
    for i, (stage, action) in enumerate(zip(profile.stages, actions, strict=True)):
        positions = []
        if action == "swap" and i < n - 1:
            for position, s in enumerate(stage.saved):
                storage = profile.storages[s]
                if (
                    last[s] == i
                    and s not in fixed
                    and not storage.to_end
                    and not storage.stays
                    and storage.program_until <= i
                    and storage.nbytes
                ):
                    positions.append(position)
                    moved[s] = i
        moves.append(tuple(positions))
    # Differences per step: an interval [a, b) of residency adds its bytes at a and takes them off at b.
    forward = [0] * (n + 1)
    backward = [0] * (n + 1)
    for s, storage in enumerate(profile.storages):
        begin = storage.born + 1
        if s in moved:
            end = moved[s] + 1
        elif s in first or storage.to_end:
            end = n
        else:
            end = min(storage.program_until + 1, n)
        # Between the program's last use and the first hold nothing keeps it, but a stage that holds it uses it.
        if begin < end:
            forward[begin] += storage.nbytes
            forward[end] -= storage.nbytes
        if storage.to_end:
            backward[0] += storage.nbytes
            backward[n] -= storage.nbytes
        elif s in first:
            backward[first[s]] += storage.nbytes
            backward[moved[s] + 1 if s in moved else n] -= storage.nbytes
    totals: list[list[int]] = []
    for diff, base in ((forward, profile.base_forward_bytes), (backward, profile.base_backward_bytes)):
        running, out = 0, []
        for k in range(n):
            running += diff[k]
            out.append(base[k] + running)
        totals.append(out)
    for k, (stage, action) in enumerate(zip(profile.stages, actions, strict=True)):
        transient = stage.transient(action)
        assert transient is not None, f"{stage.name} can't {action}"
        totals[0][k] += transient.forward_bytes
        totals[1][k] += transient.backward_bytes
    sizes = tuple(
        sum(profile.storages[stage.saved[p]].nbytes for p in positions)
        for stage, positions in zip(profile.stages, moves, strict=True)
    )
    return Residency(tuple(moves), sizes, tuple(totals[0]), tuple(totals[1]))


def schedule(profile: Profile, actions: Sequence[Action], budget_bytes: int) -> tuple[Decision, ...] | Overflow:
    """Decisions for `actions` with the laziest release and the earliest prefetch points that fit the budget.

    What never needs to be away doesn't move: queues are first in, first out, so nothing else waits longer for it. A
    swap that moves nothing becomes a keep where that costs no byte and pins nothing that another stage moves.

    Returns
    -------
    tuple of Decision, or Overflow
        Overflow: no schedule of these actions fits.
    """
    if profile.update_peak_bytes > budget_bytes:
        return Overflow(0, "update", profile.update_peak_bytes)
    n = len(actions)
    r = residency(profile, actions)
    phases: tuple[tuple[Phase, tuple[int, ...]], ...] = (("forward", r.forward_bytes), ("backward", r.backward_bytes))
    for phase, needs in phases:
        for k, need in enumerate(needs):
            if need > budget_bytes:
                return Overflow(k, phase, need)
    release = _last_resident(r.forward_bytes, r.moved_bytes, budget_bytes)
    prefetch = _last_resident(r.backward_bytes, r.moved_bytes, budget_bytes)
    away = [bool(r.moves[i]) and (release[i] < n - 1 or prefetch[i] < n - 1) for i in range(n)]
    moved = {profile.stages[i].saved[p] for i in range(n) if away[i] for p in r.moves[i]}
    last_release, last_prefetch = enforceable_points([stage.is_glue for stage in profile.stages])
    choices = []
    for i, (stage, action) in enumerate(zip(profile.stages, actions, strict=True)):
        if away[i]:
            choices.append(Decision("swap", r.moves[i], last_release[release[i]], last_prefetch[prefetch[i]]))
            continue
        if action == "swap" and stage.swap is not None and moved.isdisjoint(stage.saved):
            forward_fits = stage.keep.forward_bytes <= stage.swap.forward_bytes
            if forward_fits and stage.keep.backward_bytes <= stage.swap.backward_bytes:
                action = "keep"
        choices.append(Decision(action))
    return tuple(choices)


def _last_resident(needs: Sequence[int], moved_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    """Per stage, the last step up to which its moved bytes can stay, oldest out first.

    Forward: the release point. Backward, whose steps run from the last to the first: the prefetch point.
    """
    n = len(needs)
    last = [n - 1] * n
    queue: list[int] = []
    staying = 0
    for k in range(n):
        while queue and needs[k] + staying > budget_bytes:
            oldest = queue.pop(0)
            last[oldest] = k - 1
            staying -= moved_bytes[oldest]
        if moved_bytes[k]:
            queue.append(k)
            staying += moved_bytes[k]
    return last
