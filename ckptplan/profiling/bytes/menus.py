"""Options inside a stage: sets of operations whose outputs a recomputed stage saves.

Every operation whose output isn't saved runs again, up to the last tensor that autograd saves. So the recompute time is
the sum over all operations less that over the saved ones, and the best sets for each number of bytes solve a knapsack
problem. Example: for operations of (1 MiB, 4 ms), (1 MiB, 1 ms) and (2 MiB, 4 ms), saving the first leaves 5 ms of 9,
and saving the first and third 1 ms; no set of 1 MiB or 3 MiB leaves less.

- Outputs of views and of writes in place are never saved; these operations run again on outputs that are.
- Random operations may be saved only as the last ones of their stage, since one that is skipped doesn't advance the
  generator for those behind it.
- Outputs that any operation writes to later can't be saved.
- Outputs of collectives are always saved, so that no rank communicates twice, and so are those of operations that may
  give other bits when they run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ckptplan.profiling.bytes.tracker import OpTrace, Sid
from ckptplan.runtime.recompute.selective import can_be_saved, is_random

POINTS = 3
"""Most choices of operations offered per stage, between recomputing all and keeping all."""
_MOST_SUMS = 20_000
"""Most undominated sums that `front` keeps, so that its time is linear in the number of operations."""
_MOST_VERTICES = 32
"""Most vertices of the hull in `choose`, which tries every triple of them: 4,960."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a stage's forward; its number is its index in the list of them.

    Parameters
    ----------
    nbytes : int
        Bytes that saving its output adds to those held in any case.
    seconds : float
        Time it takes; 0 if a recompute doesn't run it.
    savable : bool
        Its output can be saved.
    random : bool
        It draws from a random generator.
    once : bool
        It must not run again: a collective, or one that may give other bits.
    """

    nbytes: int
    seconds: float
    savable: bool
    random: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class SavedOps:
    """A set of operations whose outputs are saved.

    Parameters
    ----------
    ops : tuple of int
        Their numbers, ascending.
    nbytes : int
        Bytes of their outputs.
    saved_s : float
        Recompute time that saving them avoids.
    """

    ops: tuple[int, ...]
    nbytes: int
    saved_s: float


def numbered(trace: Iterable[OpTrace]) -> list[OpTrace]:
    """The operations that have a number at run time (NOTE [Numbering] in recompute/selective.py), in its order."""
    return [op for op in trace if op.numbered]


def list_ops(
    runs: Sequence[Sequence[OpTrace]],
    rerun: int,
    written: set[Sid],
    held_anyway: Callable[[Sid], bool],
    seconds: dict[Hashable, float],
) -> list[Op]:
    """The operations of a kind of stage; where its stages differ, the worst of them counts.

    Parameters
    ----------
    runs : sequence of sequence of OpTrace
        The numbered operations of each stage of the kind.
    rerun : int
        Number of them that a recompute runs.
    written : set of Sid
        Storages that some operation of the step writes to after they were made.
    held_anyway : callable
        Whether something holds a storage even when its maker is recomputed.
    seconds : dict
        Operation key -> time; an operation without one isn't saved, unless it must not run again.
    """
    ops = []
    for number, calls in enumerate(zip(*runs, strict=True)):
        key = calls[0].key
        func = key[0] if isinstance(key, tuple) else None
        timed = key in seconds
        whole = can_be_saved(func) and all(
            call.fresh and written.isdisjoint(call.made) and any(n for n, _ in call.made.values()) for call in calls
        )
        once = _is_collective(func) or not all(call.repeatable for call in calls)
        nbytes = max(sum(n for sid, (n, _) in call.made.items() if not held_anyway(sid)) for call in calls)
        again = number < rerun
        ops.append(
            Op(
                nbytes=nbytes,
                seconds=seconds.get(key, 0.0) if again else 0.0,
                savable=whole and (once or (timed and again)),
                random=is_random(func),
                once=once,
            )
        )
    return ops


def _is_collective(func: object) -> bool:
    return getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def front(ops: Sequence[Op]) -> list[SavedOps]:
    """The undominated choices, by ascending bytes: no other choice avoids as much time with as few bytes.

    Computed once per number of random operations saved. Exact up to 20,000 undominated sums; beyond that, bytes are
    divided into as many equal ranges, and the best sum of each is kept.

    Returns
    -------
    list of SavedOps
        Empty if an output that has to be saved can't be.

    References
    ----------
    G. L. Nemhauser, Z. Ullmann: Discrete dynamic programming and capital allocation. Management Science 15 (9), 1969.
    """
    if any(op.once and not op.savable for op in ops):
        return []
    always = [i for i, op in enumerate(ops) if op.once]
    free = [i for i, op in enumerate(ops) if op.savable and not op.random and not op.once and op.seconds > 0]
    sums: list[tuple[int, float, int]] = [(0, 0.0, 0)]
    for i in free:
        sums = _undominated([*sums, *((b + ops[i].nbytes, s + ops[i].seconds, m | 1 << i) for b, s, m in sums)])
    last_random = _suffixes([i for i, op in enumerate(ops) if op.random], ops)
    every = []
    for suffix in last_random:
        fixed = [*always, *(i for i in suffix if i not in always)]
        nbytes, seconds = sum(ops[i].nbytes for i in fixed), sum(ops[i].seconds for i in fixed)
        mask = sum(1 << i for i in fixed)
        every += [(b + nbytes, s + seconds, m | mask) for b, s, m in sums]
    return [SavedOps(tuple(i for i in range(len(ops)) if m >> i & 1), b, s) for b, s, m in _undominated(every)]


def _suffixes(random: list[int], ops: Sequence[Op]) -> list[list[int]]:
    """The sets of random operations that may be saved: none, the last one, the last two, ..."""
    out: list[list[int]] = [[]]
    for at in range(len(random) - 1, -1, -1):
        if not ops[random[at]].savable:
            break
        out.append(random[at:])
    # A random operation that must not run again has to be in the set.
    return [way for way in out if all(i in way for i in random if ops[i].once)]


def _undominated(sums: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    out: list[tuple[int, float, int]] = []
    for item in sorted(sums, key=lambda item: (item[0], -item[1])):
        if not out or item[1] > out[-1][1]:
            out.append(item)
    if len(out) <= _MOST_SUMS:
        return out
    width = out[-1][0] // _MOST_SUMS + 1
    return list({item[0] // width: item for item in out}.values())


def choose(choices: Sequence[SavedOps], total_s: float, keep_bytes: int, points: int = POINTS) -> list[SavedOps]:
    """At most `points` choices, by ascending bytes: the vertices of the lower convex hull that follow it best.

    The hull is that of bytes held and recompute time left; it runs from recomputing all to keeping all.

    Parameters
    ----------
    total_s : float
        Recompute time with nothing saved.
    keep_bytes : int
        Bytes that keep holds, counted as those of the choices: choices that hold as much are left out.
    """
    start, end = (0.0, total_s), (float(keep_bytes), 0.0)
    place = {c: (float(c.nbytes), total_s - c.saved_s) for c in choices if c.ops and c.nbytes < keep_bytes}
    hull: list[SavedOps] = []

    def drop_above(p: _Point) -> None:
        while hull and _above(place[hull[-1]], place[hull[-2]] if len(hull) > 1 else start, p):
            hull.pop()

    for choice, point in place.items():
        if not _above(point, start, end):
            drop_above(point)
            hull.append(choice)
    drop_above(end)
    if len(hull) <= points:
        return hull
    if len(hull) > _MOST_VERTICES:
        hull = [hull[round(i * (len(hull) - 1) / (_MOST_VERTICES - 1))] for i in range(_MOST_VERTICES)]

    def area(chosen: Iterable[SavedOps]) -> float:
        corners = [start, *(place[c] for c in chosen), end]
        return sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in itertools.pairwise(corners))

    return list(min(itertools.combinations(hull, points), key=area))


_Point = tuple[float, float]


def _above(p: _Point, a: _Point, b: _Point) -> bool:
    """Whether `p` lies on or above the line from `a` to `b`."""
    return (b[0] - a[0]) * (p[1] - a[1]) >= (b[1] - a[1]) * (p[0] - a[0])
