"""The best moves and points of given options and segments: what moves, and in which order it comes back.

`core/schedule.py` moves all that options move, as far as it has to be away, and brings it back in the stages' order.
That isn't always the fastest: a stage may move a part of it or nothing, while a later one makes the room, and a copy
that is fetched earlier is first in the queue. What moves is chosen here, and then

- out, copies queue in the order of the stages, so the lazy release points are the best (see core/schedule.py);
- back, the same holds for a given order of the copies, in reversed time: they are best sorted by when they are needed
  among those with one prefetch point.

So for a few copies all parts and orders are tried, and the best schedule is found (`fastest`); for more, parts are
added or taken off and neighbours in the queue exchanged for as long as that makes the step shorter (`improved`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptplan.core import rules
from ckptplan.core.lanes import Copy, lane
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S, Points, last_resident, residency
from ckptplan.core.segment import Segment

MOST_PARTS = 4096
"""Choices of what moves up to which all are tried."""
MOST_IN_ORDER = 5
"""Copies up to which all orders of coming back are tried: 120."""


class Moves(NamedTuple):
    """What moves, when, and what that takes.

    Attributes
    ----------
    seconds : float
        Of the step.
    positions : tuple of tuple of int
        Per stage, what moves, as positions in its option's `saved`.
    points : Points
    on_disk : frozenset of int
        Stages whose moves go to the disk tier.
    """

    seconds: float
    positions: tuple[tuple[int, ...], ...]
    points: Points
    on_disk: frozenset[int]

    @classmethod
    def of(cls, seconds: float, choices: Sequence[Decision]) -> Moves:
        """Those of a plan's decisions."""
        return cls(
            seconds,
            tuple(choice.moves for choice in choices),
            tuple(
                None if choice.release is None or choice.prefetch is None else (choice.release, choice.prefetch)
                for choice in choices
            ),
            frozenset(i for i, choice in enumerate(choices) if choice.tier == "disk"),
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Most bytes on the device, on the host (None: no limit) and on the disk."""

    device_bytes: int
    host_bytes: int | None
    disk_bytes: int = 0


class MovesSearch:
    """Search over what moves, and over the order in which it comes back, for given options and segments.

    Attributes
    ----------
    complete : bool
        Whether all choices were looked at so far.
    """

    def __init__(self, profile: Profile, options: Sequence[Option], segments: Sequence[Segment], room: Room) -> None:
        self.profile, self.room = profile, room
        self.residency = r = residency(profile, options, segments)
        self.n = len(options)
        self.complete = True
        self.sizes_of = [
            {p: profile.storages[option.saved[p]].nbytes for p in positions}
            for option, positions in zip(options, r.moves, strict=True)
        ]
        self.forward_s = [stage.forward_s for stage in profile.stages]
        self.last_release, self.last_prefetch = rules.enforceable_points([stage.is_glue for stage in profile.stages])

    @property
    def fits(self) -> bool:
        """Whether the device has room if all that may move is away."""
        r, most = self.residency, self.room.device_bytes
        return max(*r.forward_bytes, *r.backward_bytes, self.profile.update_peak_bytes) <= most

    def parts(self) -> list[dict[int, tuple[int, ...]]] | None:
        """Per stage, bytes -> positions, all of them first: which of equal parts moves makes no difference.

        None if there are more than `MOST_PARTS` choices.
        """
        found = []
        count = 1
        for sizes in self.sizes_of:
            sums: dict[int, tuple[int, ...]] = {0: ()}
            for p, nbytes in sizes.items():
                sums |= {total + nbytes: (*chosen, p) for total, chosen in sums.items() if total + nbytes not in sums}
                if count * len(sums) > MOST_PARTS:
                    self.complete = False
                    return None
            count *= len(sums)
            found.append(dict(sorted(sums.items(), reverse=True)))
        return found

    def divided(self, sizes: Sequence[int]) -> Iterator[frozenset[int]]:
        """Every set of stages whose moves may go to the disk, and the others' to the host."""
        room = self.room
        if room.host_bytes is None or sum(sizes) <= room.host_bytes:
            yield frozenset()
            return
        movers = [i for i, nbytes in enumerate(sizes) if nbytes] if room.disk_bytes else []
        for count in range(1, len(movers) + 1):
            for on_disk in itertools.combinations(movers, count):
                disk = sum(sizes[i] for i in on_disk)
                if disk <= room.disk_bytes and sum(sizes) - disk <= room.host_bytes:
                    yield frozenset(on_disk)

    def ways(self, on_disk: frozenset[int]) -> list[Link]:
        """Each stage's link."""
        link, disk = self.profile.link, self.profile.disk
        return [disk if i in on_disk and disk is not None else link for i in range(self.n)]

    def needs(self, sizes: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Bytes of each forward and backward step if this moves and is away; None where that doesn't fit."""
        r, most = self.residency, self.room.device_bytes
        forward, backward = [], []
        before = waiting = staying = 0
        for k in range(self.n):
            while waiting < self.n and r.needed[waiting] < k:
                staying += r.moved_bytes[waiting] - sizes[waiting]
                waiting += 1
            forward.append(r.forward_bytes[k] + before)
            backward.append(r.backward_bytes[k] + staying)
            if forward[k] > most or backward[k] > most:
                return None
            before += r.moved_bytes[k] - sizes[k]
        return forward, backward

    def out(self, sizes: Sequence[int], needs: Sequence[int], ways: Sequence[Link]) -> tuple[float, list[int]]:
        """Duration of forward and release points."""
        last = last_resident(needs, sizes, range(self.n), self.room.device_bytes)
        points = [self.last_release[point] for point in last]
        copies = [Copy(i + 1, points[i] + 1, ways[i].out_s(sizes[i])) for i in range(self.n) if sizes[i]]
        return lane(copies, self.forward_s)[0], points

    def back(
        self, sizes: Sequence[int], needs: Sequence[int], ways: Sequence[Link], order: Sequence[int]
    ) -> tuple[float, list[int]] | None:
        """Duration of backward and prefetch points for copies in this order, of reversed time; None: impossible."""
        needed, most = self.residency.needed, self.room.device_bytes
        points = [self.n - 1] * self.n
        front = waiting = staying = 0
        for k in range(self.n):
            while needs[k] + staying > most:
                if front == len(order) or needed[order[front]] >= k:
                    return None
                points[order[front]] = k - 1
                staying -= sizes[order[front]]
                front += 1
            while waiting < self.n and needed[waiting] <= k:
                staying += sizes[waiting]
                waiting += 1
        points = [self.last_prefetch[point] for point in points]
        if any(points[i] < needed[i] for i in order):
            return None
        queue = sorted(order, key=lambda i: (points[i], i))
        copies = [Copy(needed[i] + 1, points[i] + 1, ways[i].in_s(sizes[i])) for i in queue]
        return lane(copies, self.residency.backward_s)[0], points

    def fastest(self, below_s: float = math.inf, deadline: float = math.inf) -> Moves | None:
        """The fastest of all moves that fit and take less than `below_s`, or of those tried until `deadline`."""
        parts = self.parts()
        if parts is None:
            return None
        compute_s = sum(self.residency.backward_s)
        best: Moves | None = None
        for sizes in itertools.product(*parts):
            needs = self.needs(sizes)
            if needs is None:
                continue
            if time.monotonic() > deadline:
                self.complete = False
                break
            movers = [i for i in range(self.n) if sizes[i]]
            for on_disk in self.divided(sizes):
                ways = self.ways(on_disk)
                out_s, release = self.out(sizes, needs[0], ways)
                for order in self.orders(movers):
                    if out_s + compute_s >= below_s * (1 - EQUAL_S):
                        break
                    back = self.back(sizes, needs[1], ways, order)
                    if back is None or out_s + back[0] >= below_s * (1 - EQUAL_S):
                        continue
                    below_s = out_s + back[0]
                    positions = [at[size] for at, size in zip(parts, sizes, strict=True)]
                    best = self.moves(below_s, positions, release, back[1], on_disk)
                    if back[0] <= compute_s:
                        break
        return best

    def orders(self, movers: Sequence[int]) -> Iterator[Sequence[int]]:
        """The stages' order, then all others, if they aren't too many."""
        if len(movers) <= MOST_IN_ORDER:
            yield from itertools.permutations(movers)
        else:
            self.complete = False
            yield movers

    def moves(
        self, seconds: float, positions: Sequence[tuple[int, ...]], release: Sequence[int], prefetch: Sequence[int],
        on_disk: frozenset[int],
    ) -> Moves:  # fmt: skip
        """The result; never less than with everything kept."""
        baseline_s = self.profile.baseline_step_s
        points = tuple(
            (out, back) if moved else None for out, back, moved in zip(release, prefetch, positions, strict=True)
        )
        seconds = baseline_s if seconds <= baseline_s * (1 + EQUAL_S) else seconds
        return Moves(seconds, tuple(positions), points, on_disk)

    def improved(self, start: Moves, deadline: float) -> Moves:
        """`start` with parts added or taken off and neighbours in the queue exchanged, as long as that is faster.

        Its copies go where they went: to the disk those of the stages whose copies did, and only they.
        """
        room, ways = self.room, self.ways(start.on_disk)
        chosen = [of.keys() & set(positions) for of, positions in zip(self.sizes_of, start.positions, strict=True)]
        points = [(0, 0) if there is None else there for there in start.points]
        # Whatever moves later joins the queue where it would in the stages' order.
        order = sorted(range(self.n), key=lambda i: (points[i][1] if chosen[i] else self.residency.needed[i], i))
        best = start

        def tried() -> bool:
            """Take what is chosen now if that is faster."""
            nonlocal best
            sizes = [sum(of[p] for p in at) for of, at in zip(self.sizes_of, chosen, strict=True)]
            disk = sum(sizes[i] for i in start.on_disk)
            if disk > room.disk_bytes or (room.host_bytes is not None and sum(sizes) - disk > room.host_bytes):
                return False
            needs = self.needs(sizes)
            if needs is None:
                return False
            out_s, release = self.out(sizes, needs[0], ways)
            if out_s + compute_s >= best.seconds * (1 - EQUAL_S):
                return False
            back = self.back(sizes, needs[1], ways, [i for i in order if sizes[i]])
            if back is None or out_s + back[0] >= best.seconds * (1 - EQUAL_S):
                return False
            best = self.moves(out_s + back[0], [tuple(sorted(at)) for at in chosen], release, back[1], start.on_disk)
            return True

        compute_s = sum(self.residency.backward_s)
        least_s = max(sum(self.forward_s) + compute_s, self.profile.baseline_step_s) * (1 + EQUAL_S)
        better = True
        while better:
            better = False
            for i, p in [(i, p) for i, sizes in enumerate(self.sizes_of) for p in (None, *sizes)]:
                if best.seconds <= least_s or time.monotonic() > deadline:
                    return best
                before = chosen[i]
                chosen[i] = (set() if before else set(self.sizes_of[i])) if p is None else before ^ {p}
                if tried():
                    better = True
                else:
                    chosen[i] = before
            for a, b in itertools.pairwise([k for k, i in enumerate(order) if chosen[i]]):
                if best.seconds <= least_s or time.monotonic() > deadline:
                    return best
                order[a], order[b] = order[b], order[a]
                if tried():
                    better = True
                else:
                    order[a], order[b] = order[b], order[a]
        return best

    def least_bytes(self, below_bytes: int) -> int:
        """The smallest budget in which any part fits that the tiers have room for, if it is below `below_bytes`."""
        parts = self.parts()
        if parts is None:
            return below_bytes
        r, n = self.residency, self.n
        for sizes in itertools.product(*parts):
            stays = [whole - size for whole, size in zip(r.moved_bytes, sizes, strict=True)]
            before = list(itertools.accumulate(stays, initial=0))
            most = max(
                self.profile.update_peak_bytes,
                *(r.forward_bytes[k] + before[k] for k in range(n)),
                *(r.backward_bytes[k] + before[sum(last < k for last in r.needed)] for k in range(n)),
            )
            if most < below_bytes and next(self.divided(sizes), None) is not None:
                below_bytes = most
        return below_bytes
