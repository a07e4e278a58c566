"""The links' time: how long a step takes whose compute runs beside two queues of copies.

NOTE [Lanes]
1. Compute runs forward steps 0..n-1, then backward steps n-1..0. Each direction of the links is a queue beside it,
   first in, first out: a copy begins when it has joined and the copy in front of it is done, and takes `Link.out_s`
   or `Link.in_s`. What needs no copy is no part of a queue.
2. A stage's transfers join the queue outwards when its forward step ends. Forward step `release + 1` waits for one.
3. One joins the queue inwards when backward step `prefetch` is about to start. Backward step `needed` waits for it.
4. A *lane* is one half of the step with its queue. Forward is one with `joins = i + 1` and `due = release + 1`.
   Backward, read from its end to its start, is one with `joins = needed + 1` and `due = prefetch + 1`: a duration is
   a longest path, and reversing every arrow on it leaves its length as it is. So

       lanes = lane(forward steps, copies out) + lane(backward steps in the stages' order, copies in).

5. On a GPU the host launches what the device runs, and is a lane that nothing but its own work fills: each stage's
   forward and backward, what its option adds, and each run again (`rules.launch_s`). The step takes the larger of the
   two, `makespan = max(lanes, launches)`.

Worked example. Three forward steps of 2 s. Stage 0 moves what takes 3 s to copy and has release point 1; stage 1 moves
what takes 2 s and has release point 2:

    compute  step 0: 0..2   step 1: 2..4   waits: 4..5   step 2: 5..7
    out                     copy 0: 2..5                 copy 1: 5..7

Copy 1 joins at 4, when step 1 ends, and begins at 5, when copy 0 is done. The lane takes 7 s: 6 s of compute, and 1 s
in which step 2 waits for copy 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, "NDArray[np.float64]")


class Copy(NamedTuple):
    """A copy's place in its lane (NOTE [Lanes], rule 4).

    Attributes
    ----------
    joins : int
        The step before whose start it joins the queue.
    due : int
        The step that waits for it, `joins` or a later one; one past the last step for the end of the lane.
    seconds : float
    """

    joins: int
    due: int
    seconds: float


def copied(joined: Seconds, free: Seconds, seconds: Seconds, later: Callable[[Seconds, Seconds], Seconds]) -> Seconds:
    """When a copy is done that joined at `joined` a queue whose last copy was done at `free` (rule 1)."""
    return later(joined, free) + seconds


def lane(copies: Sequence[Copy], compute_s: Sequence[float]) -> tuple[float, list[float]]:
    """Seconds that a lane takes, and for how many of them compute waits for each copy; O(steps + copies).

    Parameters
    ----------
    copies : sequence of Copy
        In the queue's order.
    compute_s : sequence of float
        Of each step.
    """
    end = len(compute_s)
    awaited: dict[int, list[int]] = {}
    for number, copy in enumerate(copies):
        awaited.setdefault(copy.due, []).append(number)
    done: list[float] = []
    waits_s = [0.0] * len(copies)
    now = free = 0.0
    for k in range(end + 1):
        while len(done) < len(copies) and copies[len(done)].joins <= k:
            free = copied(now, free, copies[len(done)].seconds, max)
            done.append(free)
        for number in awaited.get(k, ()):
            if done[number] > now:
                waits_s[number] = done[number] - now
                now = done[number]
        if k < end:
            now += compute_s[k]
    return now, waits_s
