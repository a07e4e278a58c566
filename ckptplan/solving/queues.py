"""One lane of a plan whose copies are given, and what order of them is the fastest.

Copies leave in the order of a queue, and a step whose bytes don't fit waits for the shortest sufficient prefix of it;
waiting earlier never lets a later step start sooner (`core/schedule.py`). So an order is all that there is to decide:
`follow` takes one, as far as copies have joined, and `quickest` finds the best. It branches only where a step doesn't
fit, over the copy that leaves next, since what no step has waited for yet could still leave in any order; a copy begins
when it has joined and the one in front of it is done, however late that is decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ckptplan.core.schedule import EQUAL_S


class Leaving(NamedTuple):
    """A copy in its lane (NOTE [Lanes]).

    Attributes
    ----------
    rank : int
        Where copies keep an order, one of a higher rank doesn't leave before one of a lower.
    joins : int
        The step before whose start it joins the queue.
    frees : tuple of (int, int)
        The first step in which some of its bytes may be gone, `joins` or a later one, and how many.
    seconds : float
    """

    rank: int
    joins: int
    frees: tuple[tuple[int, int], ...]
    seconds: float


class Queue(NamedTuple):
    """The result of an order of the copies.

    Attributes
    ----------
    seconds : float
        Time of the lane.
    order : tuple of int
        Copies, as numbers, in the order in which they leave.
    points : dict
        Copy -> the last step in which its bytes are there.
    """

    seconds: float
    order: tuple[int, ...]
    points: dict[int, int]


@dataclass(slots=True)
class Lane:
    """A lane and its copies.

    Parameters
    ----------
    copies : sequence of Leaving
    needs : sequence of int
        Bytes of each step, at most `room_bytes`, with the copies' bytes gone wherever they may be.
    room_bytes : int
    compute_s : sequence of float
        Of each step.
    enforced : sequence of int
        Per step, the last point at or before it that the runtime can meet.
    most_orders : int
        Orders begun in one search, after which it gives up.
    ranked : bool
        Whether copies leave in the order of their ranks.

    Attributes
    ----------
    complete : bool
        Whether `quickest` has looked at every order so far.
    """

    copies: Sequence[Leaving]
    needs: Sequence[int]
    room_bytes: int
    compute_s: Sequence[float]
    enforced: Sequence[int]
    most_orders: int
    ranked: bool
    complete: bool = True
    checks: list[list[int]] = field(init=False)
    free: list[int] = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.needs)
        self.checks = [[] for _ in range(n + 1)]  # step -> those for which there must be room by its start
        for k in range(1, n):
            self.checks[self.enforced[k - 1] + 1].append(k)
        self.end = self.enforced[-1] + 1  # the step that waits for all that is left
        staying = [0] * (n + 1)
        for copy in self.copies:
            for gone, nbytes in copy.frees:
                staying[gone] += nbytes
        stays = accumulate(staying)
        self.free = [self.room_bytes - need - more for need, more in zip(self.needs, stays, strict=False)]

    def short(self, step: int, gone: Sequence[int]) -> bool:
        """Whether more copies must be done when `step` starts.

        `gone` are bytes of those that are, by the step from which on they may not count.
        """
        return any(self.free[k] < 0 and self.free[k] + sum(gone[: k + 1]) < 0 for k in self.checks[step])

    def follow(self, order: Sequence[int]) -> Queue | None:
        """Return the result of this order, the first of the copies that have joined leaving; None if it doesn't fit."""
        copies, n = self.copies, len(self.needs)
        left = list(order)
        taken: list[int] = []
        joined_s = [0.0] * (n + 1)
        points: dict[int, int] = {}
        now = free_s = 0.0
        gone = [0] * (n + 1)
        for step in range(n + 1):
            joined_s[step] = now
            while left and (step == self.end or self.short(step, gone)):
                at = next((at for at, i in enumerate(left) if copies[i].joins <= step), None)
                if at is None:
                    return None
                i = left.pop(at)
                free_s = max(joined_s[copies[i].joins], free_s) + copies[i].seconds
                now = max(now, free_s)
                points[i] = step - 1
                taken.append(i)
                for first, nbytes in copies[i].frees:
                    gone[first] += nbytes
            if step < n:
                now += self.compute_s[step]
        return Queue(now, tuple(taken), points)

    def quickest(self, below_s: float = math.inf) -> Queue | None:
        """The fastest order that takes less than `below_s`."""
        n, copies = len(self.needs), self.copies
        rest_s = [0.0] * (n + 1)
        for k in reversed(range(n)):
            rest_s[k] = rest_s[k + 1] + self.compute_s[k]
        joined_s = [0.0] * (n + 1)
        queued: list[int] = []
        gone = [0] * (n + 1)
        points: dict[int, int] = {}
        left = set(range(len(copies)))
        best: Queue | None = None
        nodes = 0

        def go(step: int, now: float, free_s: float) -> None:
            """Decide on from the start of `step`, whose waits so far end at `now`."""
            nonlocal best, below_s, nodes
            nodes += 1
            limit_s = below_s * (1 - EQUAL_S)
            while True:
                if now + rest_s[step] >= limit_s:
                    return
                if step == self.end:
                    now, done = self._rest(left, joined_s, now, free_s)
                    if not done or now + rest_s[step] >= limit_s:
                        return
                    below_s = now + rest_s[step]
                    order = (*queued, *sorted(left, key=lambda i: (copies[i].joins, copies[i].rank)))
                    best = Queue(below_s, order, points | dict.fromkeys(left, step - 1))
                    return
                if self.short(step, gone):
                    break
                now += self.compute_s[step]
                step += 1
                joined_s[step] = now
            if nodes > self.most_orders:
                self.complete = False
                return
            for i in self._next(step, left):
                copy = copies[i]
                done_s = max(joined_s[copy.joins], free_s) + copy.seconds
                left.remove(i)
                queued.append(i)
                points[i] = step - 1
                for first, nbytes in copy.frees:
                    gone[first] += nbytes
                go(step, max(now, done_s), done_s)
                for first, nbytes in copy.frees:
                    gone[first] -= nbytes
                del points[i]
                queued.pop()
                left.add(i)

        go(0, 0.0, 0.0)
        return best

    def _next(self, step: int, left: set[int]) -> Iterator[int]:
        """The copies that may leave next, those that do the same to the lane once."""
        seen: set[Leaving] = set()
        first = min((self.copies[i].rank for i in left), default=0)
        for i in sorted(left):
            copy = self.copies[i]
            if copy.joins > step or (self.ranked and copy.rank > first):
                continue
            same = copy if self.ranked else copy._replace(rank=0)
            if same not in seen:
                seen.add(same)
                yield i

    def _rest(self, left: set[int], joined_s: Sequence[float], now: float, free_s: float) -> tuple[float, bool]:
        """Return when the copies left are done, and whether all have joined by the step that waits for them."""
        for i in sorted(left, key=lambda i: (self.copies[i].joins, self.copies[i].rank)):
            if self.copies[i].joins > self.end:
                return now, False
            free_s = max(joined_s[self.copies[i].joins], free_s) + self.copies[i].seconds
            now = max(now, free_s)
        return now, True
