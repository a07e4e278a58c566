"""From options and segments to a plan's schedule and cost: bytes per step, the best points, peak and makespan.

The solver and the baselines share this, so that a baseline never loses for want of a good schedule. The referee has its
own reading of the rules. `solving/cost.py` has the same in numpy, for many plans at once.

The lazy schedule moves all that the options move, each stage's in one transfer, out and back in the order of the
stages. For these transfers and that order it is the best: copies finish in the order of the queue, so at each forward
step the cheapest way to make room is to wait for its shortest sufficient prefix, and waiting earlier never lets a later
step start sooner. Backward is the same in reversed time. `solving/points.py` looks for transfers and orders that are
faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from ckptplan.core import rules
from ckptplan.core.lanes import Copy, lane
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Transfer
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Phase, Stage
from ckptplan.core.storage import Storage

EQUAL_S = 1e-12
"""Relative difference of two sums of the same seconds in another order, at most: they are the same time."""


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Bytes that one step needs at its worst moment."""

    stage: int
    phase: Phase
    bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes and compute time per step, before any transfer is scheduled (NOTE [Residency] in rules.py).

    Attributes
    ----------
    moves : tuple of tuple of int
        Per stage, the positions in its option's `saved` that leave the device.
    moved_bytes, copied_bytes : tuple of int
        Their bytes per stage, and those of them that are copied out.
    lingering : tuple of (int, int, int)
        Stage, last forward step and bytes of each move that the program holds beyond its stage.
    needed : tuple of int
        Per stage, the backward step by whose start what it moved must be back.
    forward_bytes, backward_bytes : tuple of int
        Bytes of each step, sweeps included, at its worst moment if everything that moves were away wherever it can be.
    backward_s : tuple of float
        Compute time of each backward step, recompute and sweeps included.
    launch_s : float
        Time in which the host launches the step.
    """

    moves: tuple[tuple[int, ...], ...]
    moved_bytes: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    lingering: tuple[tuple[int, int, int], ...]
    needed: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    backward_s: tuple[float, ...]
    launch_s: float


def resident_changes(
    storages: Sequence[Storage], holds: Sequence[Sequence[int]], moved: Mapping[int, int], needed: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Changes of the resident storages' bytes at the start of each forward and each backward step, moved ones away.

    Parameters
    ----------
    holds : sequence of sequence of int
        Per stage, the storages that it holds.
    moved : mapping
        Storage -> the stage that moves it.
    needed : sequence of int
        Per stage, the backward step by whose start what it moved must be back.

    Returns
    -------
    list of int, list of int
        Their running sums are bytes; after the last step, one more entry takes off what is left.
    """
    n = len(holds)
    first: dict[int, int] = {}
    for i, held in enumerate(holds):
        for s in held:
            first.setdefault(s, i)
    # An interval [a, b) of residency adds its bytes at a and takes them off at b.
    forward = [0] * (n + 1)
    backward = [0] * (n + 1)
    for s, storage in enumerate(storages):
        mover, holder = moved.get(s), first.get(s)
        program = rules.program_steps(storage, n)
        stop = rules.forward_stop(program.stop, None if holder is None else rules.held_stop(storage, n), mover)
        if program.start < stop:
            forward[program.start] += storage.nbytes
            forward[stop] -= storage.nbytes
        if storage.to_end:
            backward[0] += storage.nbytes
            backward[n] -= storage.nbytes
        elif holder is not None and rules.awaits_backward(storage):
            backward[holder] += storage.nbytes
            backward[rules.backward_stop(n, None if mover is None else needed[mover])] -= storage.nbytes
    return forward, backward


def residency(
    profile: Profile,
    options: Sequence[Option],
    segments: Sequence[Segment] = (),
    only: Sequence[Sequence[int]] | None = None,
) -> Residency:
    """Bytes per step with everything movable away; O(stages + holds), for each time that a stage runs.

    Parameters
    ----------
    only : sequence of sequence of int, optional
        Per stage, positions of what moves at most; default: all that its option moves.
    """
    n = len(profile.stages)
    outer = rules.around(segments, n)
    needed = tuple(i if outer[i] is None else outer[i].last for i in range(n))  # type: ignore[union-attr]
    holds = [rules.held(profile, i, options[i], outer[i]) for i in range(n)]
    moved = rules.moved_by(profile.storages, [option.moved for option in options], holds)
    if only is not None:
        moves_at_most = [{option.saved[p] for p in at} for option, at in zip(options, only, strict=True)]
        moved = {s: i for s, i in moved.items() if s in moves_at_most[i]}
    forward, backward = resident_changes(profile.storages, holds, moved, needed)
    sweeps = rules.sweeps_of(profile, segments, options)
    last_run = rules.last_runs(options, sweeps)
    moving_s = rules.moving_s(profile, options, last_run)
    sweep_s = {sweep.last: sweep.seconds for sweep in sweeps}
    moves = tuple(tuple(p for p in option.moves if moved.get(option.saved[p]) == i) for i, option in enumerate(options))
    moving = [
        [profile.storages[option.saved[p]] for p in positions] for option, positions in zip(options, moves, strict=True)
    ]
    return Residency(
        moves,
        moved_bytes=tuple(sum(storage.nbytes for storage in storages) for storages in moving),
        copied_bytes=tuple(sum(storage.copied_bytes for storage in storages) for storages in moving),
        lingering=tuple(
            (i, until, storage.nbytes)
            for i, storages in enumerate(moving)
            for storage in storages
            if (until := rules.there_until(storage, i, n)) > i
        ),
        needed=needed,
        forward_bytes=tuple(
            base + resident + option.forward_bytes
            for base, resident, option in zip(profile.base_forward_bytes, accumulate(forward), options, strict=False)
        ),
        backward_bytes=_backward_bytes(profile, backward, sweeps, last_run),
        backward_s=tuple(
            stage.backward_s + option.added_s + sweep_s.get(k, 0.0) + moving_s[k][0]
            for k, (stage, option) in enumerate(zip(profile.stages, last_run, strict=True))
        ),
        launch_s=rules.launch_s(profile, last_run, sweeps, moving_s),
    )


def _backward_bytes(
    profile: Profile, changes: list[int], sweeps: Sequence[rules.Sweep], last_run: Sequence[Option]
) -> tuple[int, ...]:
    """Bytes of each backward step, from the changes of what is resident without the copies that sweeps make."""
    for sweep in sweeps:
        for k, nbytes in sweep.held_from:
            changes[k] += nbytes
            changes[sweep.last + 1] -= nbytes
    starts = list(accumulate(changes))
    needs = [
        base + resident + option.backward_bytes
        for base, resident, option in zip(profile.base_backward_bytes, starts, last_run, strict=False)
    ]
    for sweep in sweeps:
        if sweep.runs:
            # While it runs, its copies come one by one; afterwards all of them are there.
            before = starts[sweep.last] - sum(nbytes for _, nbytes in sweep.held_from)
            most = profile.base_backward_bytes[sweep.last] + before + sweep.most_bytes
            needs[sweep.last] = max(needs[sweep.last], most)
    return tuple(needs)


def tightest_peak(profile: Profile, r: Residency) -> StepNeed:
    """The worst step with everything away that moves: no schedule of these options has a smaller peak."""
    return _worst(profile, r.forward_bytes, r.backward_bytes)


class Sending(NamedTuple):
    """A transfer with its bytes, and those copied out; a `Transfer` whose values are right by construction."""

    moves: tuple[int, ...]
    release: int
    prefetch: int
    nbytes: int
    copied_bytes: int


Sendings = tuple[tuple[Sending, ...], ...]
"""Per stage its transfers, as in a decision."""


def lazy_sendings(profile: Profile, r: Residency, budget_bytes: int) -> Sendings:
    """The latest release and the earliest prefetch points within a budget of at least the tightest peak.

    What never needs to be away doesn't move: queues are first in, first out, so nothing else waits longer for it.
    """
    n = len(r.needed)
    release = last_resident(r.forward_bytes, r.moved_bytes, range(n), budget_bytes, r.lingering)
    prefetch = last_resident(r.backward_bytes, r.moved_bytes, r.needed, budget_bytes)
    last_release, last_prefetch = rules.enforceable_points(profile.stages)
    return tuple(
        (
            Sending(
                r.moves[i], last_release[release[i]], last_prefetch[prefetch[i]], r.moved_bytes[i], r.copied_bytes[i]
            ),
        )
        if r.moves[i] and (release[i] < n - 1 or prefetch[i] < n - 1)
        else ()
        for i in range(n)
    )


def decided(options: Sequence[Option], sendings: Sendings, on_disk: Collection[int] = ()) -> tuple[Decision, ...]:
    """The decisions, with the moves of the stages `on_disk` going to the disk tier, all others' to the host."""
    return tuple(
        Decision(
            option.action,
            tuple(Transfer(sent.moves, sent.release, sent.prefetch) for sent in found),
            option.name,
            option.ops,
            "disk" if found and i in on_disk else "host",
            option.ratio,
        )
        for i, (option, found) in enumerate(zip(options, sendings, strict=True))
    )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Options and segments under their best schedule within a budget, and what that costs.

    Attributes
    ----------
    options : tuple of Option
        As they are scheduled: a swap that moves nothing is a keep where that costs no byte and pins nothing that moves.
    segments : tuple of Segment
    residency : Residency
        Of these options.
    sendings : Sendings
        With the laziest release and the earliest prefetch points that fit the budget.
    peak : StepNeed
    makespan_s : float
        With all copies on the host tier's link.
    moved_bytes : int
    """

    options: tuple[Option, ...]
    segments: tuple[Segment, ...]
    residency: Residency
    sendings: Sendings
    peak: StepNeed
    makespan_s: float
    moved_bytes: int

    def decisions(self, on_disk: Collection[int] = ()) -> tuple[Decision, ...]:
        """The decisions, with the moves of the stages `on_disk` going to the disk tier, all others' to the host."""
        return decided(self.options, self.sendings, on_disk)


def evaluate(
    profile: Profile, options: Sequence[Option], budget_bytes: int, segments: Sequence[Segment] = ()
) -> Evaluation | StepNeed:
    """`options` and `segments` under their best schedule within the budget.

    How long a copy takes has no part in the schedule, so the points are the best for every choice of tiers.

    Returns
    -------
    Evaluation, or StepNeed
        StepNeed: no schedule fits; the worst step with everything away.
    """
    options = tuple(options)
    while True:
        r = residency(profile, options, segments)
        tightest = tightest_peak(profile, r)
        if tightest.bytes > budget_bytes:
            return tightest
        sendings = lazy_sendings(profile, r, budget_bytes)
        moved = {options[i].saved[p] for i, found in enumerate(sendings) for sent in found for p in sent.moves}
        settled = tuple(
            in_place(stage, option, moved) if option.moves and not found else option
            for stage, option, found in zip(profile.stages, options, sendings, strict=True)
        )
        if settled == options:
            return Evaluation(
                options,
                tuple(segments),
                r,
                sendings,
                peak(profile, options, r, sendings),
                makespan_s(profile, r, sendings),
                sum(sent.nbytes for found in sendings for sent in found),
            )
        options = settled  # this may spare bytes, and with them other moves


def peak(profile: Profile, options: Sequence[Option], r: Residency, sendings: Sendings) -> StepNeed:
    """The worst step with these transfers."""
    n = len(sendings)
    staying_forward, staying_backward = [0] * (n + 1), [0] * (n + 1)

    def stays(i: int, positions: Collection[int], release: int, prefetch: int) -> None:
        """From where the residency has them away up to these points."""
        for p in positions:
            storage = profile.storages[options[i].saved[p]]
            for staying, begin, until in (
                (staying_forward, rules.there_until(storage, i, n), release),
                (staying_backward, r.needed[i], prefetch),
            ):
                if begin < until:
                    staying[begin + 1] += storage.nbytes
                    staying[until + 1] -= storage.nbytes

    for i, found in enumerate(sendings):
        for sent in found:
            stays(i, sent.moves, sent.release, sent.prefetch)
        stays(i, set(r.moves[i]).difference(*(sent.moves for sent in found)), n - 1, n - 1)
    forward, backward = (
        [need + more for need, more in zip(needs, accumulate(staying), strict=False)]
        for needs, staying in ((r.forward_bytes, staying_forward), (r.backward_bytes, staying_backward))
    )
    return _worst(profile, forward, backward)


def makespan_s(profile: Profile, r: Residency, sendings: Sendings, on_disk: Collection[int] = ()) -> float:
    """Seconds of the step with these transfers (NOTE [Lanes] in lanes.py); never less than with everything kept.

    Copies of the stages `on_disk` go to the disk tier, all others to the host.
    """
    out: list[Copy] = []
    back: list[Copy] = []
    for i, found in enumerate(sendings):
        link = profile.disk if i in on_disk and profile.disk is not None else profile.link
        for sent in found:
            if sent.copied_bytes:
                out.append(Copy(i + 1, sent.release + 1, link.out_s(sent.copied_bytes)))
            back.append(Copy(r.needed[i] + 1, sent.prefetch + 1, link.in_s(sent.nbytes)))
    back.sort(key=attrgetter("due"))  # stable: of those with one point, in the stages' order
    lanes_s = lane(out, [stage.forward_s for stage in profile.stages])[0] + lane(back, r.backward_s)[0]
    seconds, fastest_s = max(lanes_s, r.launch_s), profile.fastest_step_s
    return fastest_s if seconds <= fastest_s * (1 + EQUAL_S) else seconds


def _worst(profile: Profile, forward: Sequence[int], backward: Sequence[int]) -> StepNeed:
    """The step that needs most: of equal ones one in forward, else one in backward, the first in the stages' order."""
    most = max(*forward, *backward, profile.update_peak_bytes)
    if most in forward:
        return StepNeed(forward.index(most), "forward", most)
    if most in backward:
        return StepNeed(backward.index(most), "backward", most)
    return StepNeed(0, "update", most)


def in_place(stage: Stage, option: Option, moved: set[int]) -> Option:
    """The option that does as `option` and moves nothing, where it costs nothing and pins nothing in `moved`."""
    for other in stage.options:
        if (
            not other.moves
            and (other.recomputes, other.way) == (option.recomputes, option.way)
            and set(other.held) == set(option.held)
            and other.forward_bytes <= option.forward_bytes
            and other.backward_bytes <= option.backward_bytes
            and other.added_s <= option.added_s
            and other.launch_s <= option.launch_s
            and moved.isdisjoint(other.held)
        ):
            return other
    return option


Lingering = Sequence[tuple[int, int, int]]
"""Stage, last step and bytes of what the program holds until then, though it might be away."""


def last_resident(
    needs: Sequence[int],
    moved_bytes: Sequence[int],
    needed: Sequence[int],
    budget_bytes: int,
    lingering: Lingering = (),
) -> list[int]:
    """Per stage, the last step up to which its moved bytes can stay, oldest out first.

    Forward: the release point. Backward, whose steps run from the last to the first: the prefetch point.

    Parameters
    ----------
    needs : sequence of int
        Bytes per step with everything away wherever it can be.
    needed : sequence of int
        Per stage, non-decreasing, the step up to which `needs` has its moved bytes as resident; for those in
        `lingering`, the step given there.
    """
    n = len(needs)
    last = [n - 1] * n
    waiting = 0  # stages up to here have joined the queue
    front = 0
    staying = 0
    sizes = list(moved_bytes)  # those of them that a stage that stays adds to what is needed
    ending: dict[int, list[tuple[int, int]]] = {}
    for i, until, nbytes in lingering:
        sizes[i] -= nbytes
        ending.setdefault(until, []).append((i, nbytes))
    for k in range(n):
        while front < waiting and needs[k] + staying > budget_bytes:
            last[front] = k - 1
            staying -= sizes[front]
            front += 1
        while waiting < n and needed[waiting] <= k:
            staying += sizes[waiting]
            waiting += 1
        for i, nbytes in ending.get(k, ()):
            sizes[i] += nbytes
            staying += nbytes if front <= i else 0
    return last
