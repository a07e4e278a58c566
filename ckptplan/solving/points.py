"""The best transfers of given options and segments: what moves, together with what, and in which order.

`core/schedule.py` moves all that options move, each stage's in one transfer, as far as it has to be away, and brings it
back in the stages' order. That isn't always the fastest: a stage may move a part of it or nothing, while a later one
makes the room; a part of what it moves may be needed away sooner than the rest; and a copy that is fetched earlier is
first in the queue. What moves, and in which transfers, is chosen here, and then

- out, copies queue in the order of the stages, and of a stage in any order;
- back, in any order, in reversed time: sorted by when they are needed among those with one prefetch point.

For few transfers all choices and orders are tried, and the best schedule is found (`fastest`); for more, parts are
added, taken off and divided, and neighbours in the queue exchanged, for as long as that makes the step shorter, and
what gains nothing by itself is joined again (`improved`). The two lanes of a choice don't depend on each other
(`queues.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ckptplan.core import rules
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Transfer
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S, Sending, Sendings, residency
from ckptplan.core.segment import Segment
from ckptplan.solving.parameters import DEFAULT, Parameters
from ckptplan.solving.queues import Lane, Leaving, Queue
from ckptplan.solving.room import Room


class Moves(NamedTuple):
    """The transfers of a plan, and the time of its step.

    Attributes
    ----------
    seconds : float
        Time of the step.
    sendings : Sendings
    """

    seconds: float
    sendings: Sendings

    @classmethod
    def of(cls, seconds: float, choices: Sequence[Decision], options: Sequence[Option], profile: Profile) -> Moves:
        """Return the moves of a plan's decisions for these options."""

        def sending(option: Option, t: Transfer) -> Sending:
            moving = [profile.storages[option.saved[p]] for p in t.moves]
            nbytes = sum(storage.nbytes for storage in moving)
            return Sending(t.moves, t.release, t.prefetch, nbytes, sum(storage.copied_bytes for storage in moving))

        return cls(
            seconds,
            tuple(
                tuple(sending(option, t) for t in choice.transfers)
                for option, choice in zip(options, choices, strict=True)
            ),
        )


class Item(NamedTuple):
    """Storages of a stage that move together, as positions in its option's `saved`, and what of them is copied out."""

    stage: int
    positions: tuple[int, ...]
    nbytes: int
    copied_bytes: int


class MovesSearch:
    """Search over what moves, in which transfers, and over their order, for given options and segments.

    Attributes
    ----------
    complete : bool
        Whether all choices were looked at so far.
    """

    def __init__(
        self,
        profile: Profile,
        options: Sequence[Option],
        segments: Sequence[Segment],
        budget_bytes: int,
        room: Room,
        parameters: Parameters = DEFAULT,
    ) -> None:
        self.profile, self.options, self.parameters = profile, options, parameters
        self.budget_bytes, self.room = budget_bytes, room
        self.residency = r = residency(profile, options, segments)
        self.n = len(options)
        self.complete = True
        self.sizes_of = [
            {p: profile.storages[option.saved[p]].nbytes for p in positions}
            for option, positions in zip(options, r.moves, strict=True)
        ]
        self.until_of = [
            {p: rules.there_until(profile.storages[option.saved[p]], i, self.n) for p in positions}
            for i, (option, positions) in enumerate(zip(options, r.moves, strict=True))
        ]
        """Per stage and position, the last forward step in which the storage is there, however early it leaves."""
        self.forward_s = [stage.forward_s for stage in profile.stages]
        self.compute_s = sum(r.backward_s)
        """Compute time of backward, recompute and sweeps included."""
        self.last_release, self.last_prefetch = rules.enforceable_points(profile.stages)
        links = [link for link in (profile.link, profile.disk) if link is not None]
        self.together = any(link.latency_s > 0 for link in links)
        """Whether a transfer of two storages may be faster than two transfers."""

    def item(self, stage: int, positions: Sequence[int]) -> Item:
        """These positions of a stage."""
        saved, sizes = self.options[stage].saved, self.sizes_of[stage]
        copied = sum(self.profile.storages[saved[p]].copied_bytes for p in positions)
        return Item(stage, tuple(positions), sum(sizes[p] for p in positions), copied)

    def parts(self) -> list[list[tuple[Item, ...]]] | None:
        """Per stage, every choice of its transfers, those of all that it may move first.

        Of choices that differ by nothing but which of equal storages moves there is one. None if there are more than
        `Parameters.tried` in all.
        """
        found = []
        count = 1
        for stage, sizes in enumerate(self.sizes_of):
            until, saved = self.until_of[stage], self.options[stage].saved
            free = {p: self.profile.storages[saved[p]].on_host for p in sizes}
            choices: dict[tuple[tuple[tuple[int, int, bool], ...], ...], list[list[int]]] = {(): []}
            for p in sizes:
                for groups in list(choices.values()):
                    ways = [[*groups, [p]]]
                    if self.together:
                        ways += [[*groups[:at], [*groups[at], p], *groups[at + 1 :]] for at in range(len(groups))]
                    for way in ways:
                        key = tuple(
                            sorted(tuple(sorted((sizes[q], until[q], free[q]) for q in group)) for group in way)
                        )
                        choices.setdefault(key, way)
                if count * len(choices) > self.parameters.tried:
                    self.complete = False
                    return None
            count *= len(choices)
            items = [tuple(self.item(stage, group) for group in groups) for groups in choices.values()]
            found.append(sorted(items, key=lambda choice: -sum(item.nbytes for item in choice)))
        return found

    def links(self, items: Sequence[Item]) -> list[Link] | None:
        """Each stage's link; None where host and disk have no room for these items."""
        link, disk = self.profile.link, self.profile.disk
        moved = [0] * self.n
        for item in items:
            moved[item.stage] += item.nbytes
        on_disk = self.room.on_disk(moved)
        if on_disk is None:
            return None
        return [disk if i in on_disk and disk is not None else link for i in range(self.n)]

    def needs(self, items: Sequence[Item]) -> tuple[list[int], list[int]]:
        """Bytes of each forward and backward step if these move and are away wherever they may be."""
        r, n = self.residency, self.n
        there = {(item.stage, p) for item in items for p in item.positions}
        forward, backward = [0] * (n + 1), [0] * (n + 1)
        for i, sizes in enumerate(self.sizes_of):
            for p, nbytes in sizes.items():
                if (i, p) not in there:
                    forward[self.until_of[i][p] + 1] += nbytes
                    backward[r.needed[i] + 1] += nbytes
        return (
            [need + stays for need, stays in zip(r.forward_bytes, itertools.accumulate(forward), strict=False)],
            [need + stays for need, stays in zip(r.backward_bytes, itertools.accumulate(backward), strict=False)],
        )

    def lanes(self, items: Sequence[Item]) -> tuple[Lane, Lane] | None:
        """Forward, and backward in reversed time; None where there is no room for what moves, or for what doesn't."""
        needs, needed, most = self.needs(items), self.residency.needed, self.budget_bytes
        links, orders = self.links(items), self.parameters.orders
        if links is None or max(*needs[0], *needs[1], self.profile.update_peak_bytes) > most:
            return None
        out = [
            Leaving(item.stage, item.stage + 1, self.frees(item), links[item.stage].out_s(item.copied_bytes))
            for item in self.copied(items)
        ]
        back = [
            Leaving(i, needed[i] + 1, ((needed[i] + 1, nbytes),), links[i].in_s(nbytes)) for i, _, nbytes, _ in items
        ]
        return (
            Lane(out, needs[0], most, self.forward_s, self.last_release, orders, ranked=True),
            Lane(back, needs[1], most, self.residency.backward_s, self.last_prefetch, orders, ranked=False),
        )

    @staticmethod
    def copied(items: Iterable[Item]) -> list[Item]:
        """Return the items that are copied out, in the forward lane; the others leave as early as they may."""
        return [item for item in items if item.copied_bytes]

    def frees(self, item: Item) -> tuple[tuple[int, int], ...]:
        """The forward steps from which on an item's bytes may be gone, and how many."""
        found: dict[int, int] = {}
        for p in item.positions:
            gone = self.until_of[item.stage][p] + 1
            found[gone] = found.get(gone, 0) + self.sizes_of[item.stage][p]
        return tuple(sorted(found.items()))

    def fastest(self, below_s: float = math.inf, deadline: float = math.inf) -> Moves | None:
        """The fastest of all moves that fit and take less than `below_s`, or of those tried until `deadline`."""
        parts = self.parts()
        if parts is None:
            return None
        compute_s, launch_s = self.compute_s, self.residency.launch_s
        least_s = max(sum(self.forward_s) + compute_s, launch_s)
        best: Moves | None = None
        for chosen in itertools.product(*parts):
            if time.monotonic() > deadline:
                self.complete = False
                break
            items = [item for part in chosen for item in part]
            lanes = self.lanes(items)
            if lanes is None or least_s >= below_s * (1 - EQUAL_S):
                continue
            out = lanes[0].quickest(below_s - compute_s)
            back = None if out is None else lanes[1].quickest(below_s - out.seconds)
            self.complete = self.complete and lanes[0].complete and lanes[1].complete
            if out is None or back is None or out.seconds + back.seconds >= below_s * (1 - EQUAL_S):
                continue
            best = self.moves(items, out, back)
            below_s = max(out.seconds + back.seconds, launch_s)
        return best

    def moves(self, items: Sequence[Item], out: Queue, back: Queue) -> Moves:
        """Return the items as transfers, those with the same points as one; no faster than with everything kept."""
        fastest_s, seconds = self.profile.fastest_step_s, max(out.seconds + back.seconds, self.residency.launch_s)
        found: list[dict[tuple[int, int], Item]] = [{} for _ in range(self.n)]
        copied = self.copied(items)
        released = {copied[number]: out.points[number] for number in out.order}
        released |= {item: item.stage for item in items if item not in released}
        prefetched = {item: back.points[number] for number, item in enumerate(items)}
        for item, release in released.items():
            points = self.last_release[release], self.last_prefetch[prefetched[item]]
            before = found[item.stage].get(points, Item(item.stage, (), 0, 0))
            found[item.stage][points] = self.item(item.stage, sorted(before.positions + item.positions))
        return Moves(
            fastest_s if seconds <= fastest_s * (1 + EQUAL_S) else seconds,
            tuple(
                tuple(Sending(item.positions, *points, item.nbytes, item.copied_bytes) for points, item in sent.items())
                for sent in found
            ),
        )

    def in_order(self, transfers: Sequence[tuple[int, Sequence[int]]]) -> Moves | None:
        """These transfers, as stages and storages in the order in which they come back; None if they don't fit."""
        items = []
        for stage, storages in transfers:
            saved = self.options[stage].saved
            positions = [p for p in self.sizes_of[stage] if saved[p] in storages]
            items += [self.item(stage, positions)] if positions else []
        return self.followed(items)

    def followed(self, items: Sequence[Item], below_s: float = math.inf) -> Moves | None:
        """These items in the order in which they come back; None if they don't fit or take no less than `below_s`."""
        lanes = self.lanes(items)
        if lanes is None:
            return None
        copied = self.copied(items)
        out = lanes[0].follow(sorted(range(len(copied)), key=lambda at: copied[at].stage))
        if out is None or out.seconds + self.compute_s >= below_s * (1 - EQUAL_S):
            return None
        back = lanes[1].follow(range(len(items)))
        if back is None or out.seconds + back.seconds >= below_s * (1 - EQUAL_S):
            return None
        return self.moves(items, out, back)

    def apart(self, stage: int) -> list[Item]:
        """All that a stage may move, the largest storages by themselves, as many as a window has, the rest together."""
        largest = sorted(self.sizes_of[stage], key=lambda p: -self.sizes_of[stage][p])
        apart, rest = largest[: self.parameters.window], sorted(largest[self.parameters.window :])
        return [self.item(stage, group) for group in (*([p] for p in apart), rest) if group]

    def improved(self, start: Moves, deadline: float) -> Moves:
        """`start` with parts added, taken off and divided, and neighbours in the queue exchanged, while that is faster.

        Dividing all that moves is tried however late it is. Transfers of a stage are joined again where that takes no
        longer.
        """
        best, order = self._faster(start, deadline)
        return self.joined(best, order, best.seconds, deadline)

    def fewest(self) -> Moves | None:
        """Move as few storages as fit, letting the largest ones stay first; None if nothing fits."""
        r, n = self.residency, self.n
        forward, backward = np.array(r.forward_bytes[:n]), np.array(r.backward_bytes[:n])
        free = self.budget_bytes - forward, self.budget_bytes - backward
        moving: list[dict[int, None]] = [dict.fromkeys(sizes) for sizes in self.sizes_of]
        every = [(nbytes, i, p) for i, sizes in enumerate(self.sizes_of) for p, nbytes in sizes.items()]
        for nbytes, i, p in sorted(every, reverse=True):
            there = free[0][self.until_of[i][p] + 1 :], free[1][r.needed[i] + 1 :]
            if all(part.min(initial=nbytes) >= nbytes for part in there):
                for part in there:
                    part -= nbytes
                del moving[i][p]
        items = [self.item(i, list(positions)) for i, positions in enumerate(moving) if positions]
        return self.followed(sorted(items, key=lambda item: (r.needed[item.stage], item.stage)))

    def joined(self, start: Moves, order: Sequence[Item], most_s: float, deadline: float) -> Moves:
        """Join transfers of the same stage while the step takes no longer than `most_s`.

        `order` is what `start` moves, as it comes back. What is joined comes back where the first of it did.
        """
        best, order = start, list(order)
        for stage in range(self.n):
            items = [item for item in order if item.stage == stage]
            while len(items) > 1:
                ends = dict.fromkeys([(0, len(items)), *((at, at + 2) for at in range(len(items) - 1))])
                for a, b in ends:
                    if time.monotonic() > deadline:
                        return best
                    one = self.item(stage, sorted(p for item in items[a:b] for p in item.positions))
                    changed = [one if item == items[a] else item for item in order if item not in items[a + 1 : b]]
                    found = self.followed(changed, most_s * (1 + 2 * EQUAL_S))
                    if found is not None:
                        best, order, items = found, changed, [*items[:a], one, *items[b:]]
                        break
                else:
                    break
        return best

    def order_of(self, moves: Moves) -> list[Item]:
        """Return the items that move, in the order in which they come back."""
        sent = [(i, sending) for i, sendings in enumerate(moves.sendings) for sending in sendings]
        sent.sort(key=lambda pair: (pair[1].prefetch, pair[0]))
        return [self.item(i, [p for p in sending.moves if p in self.sizes_of[i]]) for i, sending in sent]

    def _faster(self, start: Moves, deadline: float) -> tuple[Moves, list[Item]]:
        """Return the moves that `improved` finds before it joins transfers, and the order in which they come back."""
        needed = self.residency.needed
        least_s = max(sum(self.forward_s) + self.compute_s, self.profile.fastest_step_s, self.residency.launch_s)
        least_s *= 1 + EQUAL_S
        best, order = start, self.order_of(start)
        if start.seconds <= least_s:
            return best, order

        def tried(items: list[Item]) -> bool:
            """Take these items, in the order in which they come back, if that is faster."""
            nonlocal best, order
            found = self.followed(items, best.seconds)
            if found is None:
                return False
            best, order = found, items
            return True

        def with_stage(stage: int, items: Sequence[Item]) -> list[Item]:
            """The items of now with others of one stage, where it is its turn."""
            others = [item for item in order if item.stage != stage]
            at = next((k for k, item in enumerate(order) if item.stage == stage), None)
            if at is None:  # where it would join in the stages' order
                at = sum((needed[item.stage], item.stage) < (needed[stage], stage) for item in others)
            at = min(at, len(others))
            return [*others[:at], *items, *others[at:]]

        tried([part for item in order for part in self._divided(item)])
        # Leaving the largest storage on the device spares most; small ones that stay first could use up the room.
        largest_first = sorted(range(self.n), key=lambda stage: -max(self.sizes_of[stage].values(), default=0))
        better = True
        while better:
            better = False
            for stage in largest_first:
                for change in self._changes(stage, [item for item in order if item.stage == stage]):
                    if best.seconds <= least_s or time.monotonic() > deadline:
                        return best, order
                    if tried(with_stage(stage, change)):
                        better = True
                        break
            for at in range(len(order) - 1):
                if best.seconds <= least_s or time.monotonic() > deadline:
                    return best, order
                better |= tried([*order[:at], order[at + 1], order[at], *order[at + 2 :]])
        return best, order

    def _divided(self, item: Item) -> list[Item]:
        """An item as several, the largest storages by themselves."""
        return [
            part
            for whole in self.apart(item.stage)
            if (part := self.item(item.stage, [p for p in whole.positions if p in item.positions])).positions
        ]

    def _changes(self, stage: int, items: list[Item]) -> Iterator[list[Item]]:
        """Other choices of what a stage moves: nothing or all of it, one storage more or less, one transfer divided."""
        yield [] if items else self.apart(stage)
        there = {p for item in items for p in item.positions}
        for p in self.sizes_of[stage]:
            if p in there:
                less = [self.item(stage, [q for q in item.positions if q != p]) for item in items]
                yield [item for item in less if item.positions]
            else:
                yield [*items, self.item(stage, [p])]
        for at, item in enumerate(items):
            parts = self._divided(item)
            if len(parts) > 1:
                yield [*items[:at], *parts, *items[at + 1 :]]

    def least_bytes(self, below_bytes: int) -> int:
        """The smallest budget in which any part fits that host and disk have room for, if it is below `below_bytes`."""
        parts = self.parts()
        if parts is None:
            return below_bytes
        for chosen in itertools.product(*parts):
            items = [item for part in chosen for item in part]
            forward, backward = self.needs(items)
            most = max(*forward, *backward, self.profile.update_peak_bytes)
            if most < below_bytes and self.links(items) is not None:
                below_bytes = most
        return below_bytes
