"""Menus inside a stage: of which operations' outputs a recomputed stage saves, the few choices worth offering.

What isn't saved is run again, all of it, up to the last tensor that autograd saves: so recompute time is what the
operations take together, less what the saved ones take, and the best choices for every number of bytes are a knapsack.

Views and writes in place are never saved themselves: they run again on what is. Random operations may be saved only as
the last ones of their stage, since one that is skipped doesn't move the generator for those after it. Outputs that
anything writes to later can't be saved, and those of collectives always are, so that no rank communicates twice, as are
those of operations that may give other bits when they run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ckptplan.profiling.bytes.tracker import OpTrace, Sid
from ckptplan.runtime.recompute.selective import can_be_saved, is_random

POINTS = 3
"""Choices of operations offered per stage, between recomputing all and keeping all."""
_FRONT_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a stage's forward, its number being its place in the list.

    Parameters
    ----------
    nbytes : int
        What saving its output would hold that isn't held anyway.
    seconds : float
        Time it takes; 0 where a recompute doesn't run it.
    savable, random : bool
    once : bool
        It must not run again: a collective, or one that may give other bits.
    """

    nbytes: int
    seconds: float
    savable: bool
    random: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Operations whose outputs are saved.

    Parameters
    ----------
    ops : tuple of int
        Their numbers, ascending.
    nbytes : int
        What they hold.
    saved_s : float
        Recompute time that they save.
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
    """The operations of a distinct stage; what holds for one of its calls only is taken at its worst.

    Parameters
    ----------
    runs : sequence of sequence of OpTrace
        The numbered operations of each stage of the kind.
    rerun : int
        How many of them a recompute runs.
    written : set of Sid
        Storages that some operation of the step writes to after they were made.
    held_anyway : callable
        Whether something holds a storage even when its maker is recomputed.
    seconds : dict
        Operation key -> time; an operation without one is never saved, but for those that must not run again.
    """
    ops = []
    for number, calls in enumerate(zip(*runs, strict=True)):
        func = _func(calls[0])
        timed = calls[0].key in seconds
        whole = can_be_saved(func) and all(
            call.fresh and written.isdisjoint(call.made) and any(n for n, _ in call.made.values()) for call in calls
        )
        once = _is_collective(func) or not all(call.repeatable for call in calls)
        nbytes = max(sum(n for sid, (n, _) in call.made.items() if not held_anyway(sid)) for call in calls)
        again = number < rerun
        ops.append(
            Op(
                nbytes=nbytes,
                seconds=seconds.get(calls[0].key, 0.0) if again else 0.0,
                savable=whole and (once or (timed and again)),
                random=is_random(func),
                once=once,
            )
        )
    return ops


def _func(op: OpTrace) -> object:
    return op.key[0] if isinstance(op.key, tuple) else None


def _is_collective(func: object) -> bool:
    return getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def front(ops: Sequence[Op]) -> list[Choice]:
    """The choices that no other beats, by ascending bytes: none saves as much time with as few bytes.

    Nemhauser and Ullmann's list of undominated sums (1969), once per number of random operations saved. Exact up to
    20,000 undominated sums; beyond, the best of each of so many equal ranges of bytes stays.

    Returns
    -------
    list of Choice
        Empty if an output that must be can't be saved.
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
    return [Choice(tuple(i for i in range(len(ops)) if m >> i & 1), b, s) for b, s, m in _undominated(every)]


def _suffixes(random: list[int], ops: Sequence[Op]) -> list[list[int]]:
    """The ways to save random operations: none, or the last few of them."""
    out: list[list[int]] = [[]]
    for at in range(len(random) - 1, -1, -1):
        if not ops[random[at]].savable:
            break
        out.append(random[at:])
    # Random collectives don't exist; were there one, only suffixes that contain it would do.
    return [way for way in out if all(i in way for i in random if ops[i].once)]


def _undominated(sums: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    out: list[tuple[int, float, int]] = []
    for item in sorted(sums, key=lambda item: (item[0], -item[1])):
        if not out or item[1] > out[-1][1]:
            out.append(item)
    if len(out) <= _FRONT_LIMIT:
        return out
    width = out[-1][0] // _FRONT_LIMIT + 1
    return list({item[0] // width: item for item in out}.values())


def choose(choices: Sequence[Choice], total_s: float, keep_bytes: int, points: int = POINTS) -> list[Choice]:
    """At most `points` of them, by ascending bytes: vertices of the convex hull that follow it best.

    Parameters
    ----------
    total_s : float
        Recompute time with nothing saved.
    keep_bytes : int
        What keep holds, in the same count: a choice that holds as much is worth nothing.
    """
    if not choices:
        return []
    start, end = (0.0, total_s), (float(keep_bytes), 0.0)
    useful = [c for c in choices if c.ops and c.nbytes < keep_bytes]
    hull: list[Choice] = []
    for c in useful:
        if _above((c.nbytes, total_s - c.saved_s), start, end):
            continue
        while hull and _above(
            _point(hull[-1], total_s), _point(hull[-2], total_s) if len(hull) > 1 else start, _point(c, total_s)
        ):
            hull.pop()
        hull.append(c)
    while hull and _above(_point(hull[-1], total_s), _point(hull[-2], total_s) if len(hull) > 1 else start, end):
        hull.pop()
    if len(hull) <= points:
        return hull

    def area(chosen: Iterable[Choice]) -> float:
        corners = [start, *(_point(c, total_s) for c in chosen), end]
        return sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in itertools.pairwise(corners))

    return list(min(itertools.combinations(_thinned(hull), points), key=area))


def _thinned(hull: list[Choice], most: int = 32) -> list[Choice]:
    """Evenly spaced ones where there are too many to try every combination."""
    if len(hull) <= most:
        return hull
    return [hull[round(i * (len(hull) - 1) / (most - 1))] for i in range(most)]


def _point(choice: Choice, total_s: float) -> tuple[float, float]:
    return float(choice.nbytes), total_s - choice.saved_s


def _above(p: tuple[float, float], a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether `p` lies on or above the line from `a` to `b`."""
    return (b[0] - a[0]) * (p[1] - a[1]) >= (b[1] - a[1]) * (p[0] - a[0])
