"""The joint dynamic program: menus, swapping on both links and nested segments, label by label along the chain.

A *label* at the boundary before stage `k` stands for decisions about the stages before `k`. Both lanes of a step (see
cost.py) run forward over `k`, so one pass decides about both:

| field       | meaning                                                                                              |
|-------------|------------------------------------------------------------------------------------------------------|
| held_bytes  | bytes these stages hold until their backward and that don't move, or whose moving isn't decided yet   |
| passing     | bytes in graphs that are dropped in forward, by the steps in which they are there                    |
| out, back   | backlog: bytes in the queue of the forward and of the (reversed) backward lane                       |
| moved_open  | bytes moved out by the stages of an open segment; they join the backward queue where it ends         |
| elapsed_s   | seconds of both lanes so far, waiting included                                                       |
| moved_total | bytes moved so far                                                                                    |
| .._due      | how many of them must have gone by now in each lane, for all steps so far to fit                      |

In an open segment, for each level of nesting: its `first` stage, the bytes of the copies that its sweep holds at the
backward of the stage reached (`sweep_copies`), the most bytes of copies and of a run's own that the sweep needs
(`sweep_peak`), and its seconds (`sweep_s`). They take effect where the segment ends; NOTE [Residency], rules 6 and 7.

Three bit masks say which storages that several stages may hold are held, fixed to the device, and held late enough to
move (rule 4). Bytes are exact integers. A transfer frees its bytes when it is done, so what the queues hold is kept
item by item for a window of the last ones (`ends`: how many bytes the newest 1, 2, ... items have together); a longer
backlog is taken as if its items were like the window's oldest one. The evaluator has the last word on each plan.

What makes it fast is pruning: labels fall into cells of a coarse grid over their bytes, and one that isn't faster than
all labels in cells with no more bytes of any kind is dropped. Values stay exact; only the comparison is coarse. So
every plan is truly feasible, and the loss is a matter of how many labels there are. O(stages x options x labels).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptplan.core import rules
from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.solving.cost import Segments, holders_of
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import ROUNDING, Parameters

CELLS = 8
"""Cells along the held bytes, which decide what fits, for one along each other axis; and cells per label that is kept
by its score. Fewer lose plans for small budgets, more take time."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """A plan."""

    codes: tuple[int, ...]
    segments: Segments


@dataclass(frozen=True, slots=True)
class Steering:
    """The worth of a byte at the boundary before each stage, in seconds; shape (stages + 1,).

    Any numbers are allowed: they steer which labels stay, not what a label says.

    Attributes
    ----------
    held : array
        Of a byte held until backward.
    out, back : array
        Of a byte in the backlog of each lane.
    copies : array
        Of a byte that a sweep's copies take, per backward step.
    """

    held: Floats
    out: Floats
    back: Floats
    copies: Floats


@dataclass(slots=True)
class _Labels:
    """Columns of labels with the same number of open segments; shapes (labels,) or (levels, labels)."""

    held_bytes: Ints
    passing: Ints
    elapsed_s: Floats
    out: Floats
    back: Floats
    out_ends: Floats
    back_ends: Floats
    moved_open: Ints
    moved_total: Ints
    out_due: Floats
    back_due: Floats
    held: Ints
    fixed: Ints
    late: Ints
    first: Ints
    sweep_copies: Ints
    sweep_peak: Ints
    sweep_s: Floats
    copied: Ints
    parent: Ints
    move: NDArray[np.int16]

    def take(self, rows: Ints) -> _Labels:
        """Copies of these rows, each its own parent."""
        plain = [getattr(self, f)[..., rows] for f in _FIELDS]
        return _Labels(*[*plain, rows, np.zeros(len(rows), np.int16)])


_FIELDS = tuple(field.name for field in fields(_Labels))[:-2]
"""The columns of a label that count; `parent` and `move` say where it comes from."""


@dataclass(frozen=True, slots=True)
class _Move:
    """The decision about one stage.

    `code`: its option; `opened`: how many segments begin here; `ends`: whether the innermost one ends here.
    """

    code: int
    opened: int = 0
    ends: bool = False


class LabelDp:
    """Labels of one profile, menu and budget.

    Parameters
    ----------
    space : PlanSpace
    budget_bytes : int
    host_bytes : int, optional
    depth : int, optional
        Deepest nesting of segments, that of the space's parameters where left out; 0 for none.
    """

    def __init__(
        self, space: PlanSpace, budget_bytes: int, *, host_bytes: int | None = None, depth: int | None = None
    ) -> None:
        self.profile: Profile = space.profile
        self.space = space
        self.budget_bytes = budget_bytes
        self.host_bytes = host_bytes
        self.parameters: Parameters = space.parameters
        nesting = self.parameters.nesting if depth is None else depth
        self.depth = nesting if any(space.inside) and space.segments else 0
        self.tracker = _Tracker(self.profile)
        self.complete = True
        """Whether the last run had time for all its labels."""
        n = len(self.profile.stages)
        seconds = [stage.forward_s + stage.backward_s for stage in self.profile.stages]
        self.rest_s = np.concatenate([np.cumsum(seconds[::-1])[::-1], [0.0]])
        self.goes_on = [bool(codes) for codes in space.inside]
        self._holds = [
            [self._split(k, option) for option in stage.options] for k, stage in enumerate(self.profile.stages)
        ]
        self._sweep = [self._sweep_parts(k) for k in range(n)]
        self._passing = [
            [rules.passing(self.profile, k, option) for option in stage.options]
            for k, stage in enumerate(self.profile.stages)
        ]
        self._spans = list({steps: None for of in self._passing for some in of for steps, _ in some})

    def _split(
        self, k: int, option: Option
    ) -> tuple[int, int, list[tuple[int, int, bool]], list[tuple[int, int, int, bool]]]:
        """Bytes that option alone holds until backward; that it alone moves; tracked storages; linked ones."""
        stage, storages, n = self.profile.stages[k], self.profile.storages, len(self.profile.stages)
        linked = set(stage.linked)
        movable = set(option.moved)
        keeps = moves = 0
        tracked: list[tuple[int, int, bool]] = []
        inside: list[tuple[int, int, int, bool]] = []
        for s in option.held:
            storage = storages[s]
            if not rules.counts(storage) or not rules.awaits_backward(storage):
                continue
            goes = s in movable and rules.can_move(storage)
            if s in linked and option.recomputes and not option.ops:
                inside.append((s, rules.latest_first(storage), storage.nbytes, goes))
            elif s in self.tracker.bit:
                tracked.append((s, storage.nbytes, goes))
            elif goes and k in rules.movers(storage, n) and s not in self.tracker.left_out:
                moves += storage.nbytes
            else:
                keeps += storage.nbytes
        return keeps, moves, tracked, inside

    def _sweep_parts(
        self, k: int
    ) -> tuple[int, list[tuple[int, int]], list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Of a kept stage's copies in a sweep: private bytes, tracked ones, those that are linked; and all linked."""
        stage, storages = self.profile.stages[k], self.profile.storages
        again = stage.recompute
        linked = [(s, rules.latest_first(storages[s]), storages[s].nbytes) for s in stage.linked if storages[s].nbytes]
        if again is None or stage.is_glue:
            return 0, [], [], linked
        private = 0
        tracked: list[tuple[int, int]] = []
        inputs: list[tuple[int, int, int]] = []
        for s in stage.keep.held:
            nbytes = storages[s].nbytes
            if s in again.held:
                if s in stage.linked:
                    inputs.append((s, rules.latest_first(storages[s]), nbytes))
            elif s in self.tracker.bit:
                tracked.append((s, nbytes))
            elif rules.awaits_backward(storages[s]):
                private += nbytes
        return private, tracked, inputs, linked

    def run(
        self,
        width: int,
        deadline: float,
        *,
        prices: Steering | None = None,
        below_s: float = np.inf,
        count: int,
        between: Callable[[], None] = lambda: None,
    ) -> list[LabelPlan]:
        """The fastest plans found, by their fluid time; none after `deadline`.

        Parameters
        ----------
        width : int
            Labels per boundary, about: the size of the grid that they are pruned on, or with prices the most there are.
        deadline : float
            By `time.monotonic()`.
        prices : Steering, optional
            What bytes are worth, to keep the most promising labels.
        below_s : float
            Labels that can't beat this are dropped.
        count : int
            Most plans to give back.
        between : callable
            Called now and then.
        """
        n = len(self.profile.stages)
        self.complete = True
        if self.profile.update_peak_bytes > self.budget_bytes:
            return []
        begin = time.monotonic()
        least_width, window = self.parameters.least_width, max(2, self.parameters.window)
        pools = [_empty(int(level == 0), self.depth, window, len(self._spans)) for level in range(self.depth + 1)]
        history: list[list[_Labels]] = []
        self.moves: list[list[list[tuple[int, _Move]]]] = []
        for k in range(n):
            between()
            now = time.monotonic()
            if now > deadline:
                self.complete = False
                return []
            if k and (now - begin) / k * (n - k) > deadline - now and width > least_width:
                # Too slow at this width: a plan from fewer labels is better than none.
                width = max(least_width, width // 2)
                self.complete = False
            grown: list[list[_Labels]] = [[] for _ in pools]
            taken: list[list[tuple[int, _Move]]] = [[] for _ in pools]
            for level, move in self._moves(k):
                before = pools[level]
                if len(before.elapsed_s) == 0:
                    continue
                after = self._step(before, k, level, move)
                if after is None:
                    continue
                to = level + move.opened - move.ends
                after.move[:] = len(taken[to])
                taken[to].append((level, move))
                grown[to].append(after)
            pools = [
                self._prune(_join(labels, self.depth, window, len(self._spans)), k + 1, to, width, prices, below_s)
                for to, labels in enumerate(grown)
            ]
            history.append([_trace(pool) for pool in pools])
            self.moves.append(taken)
        last = pools[0]
        link = self.profile.link
        # What need never be away in either lane doesn't move; the rest must have gone by the end of both.
        due = np.maximum(last.out_due, last.back_due)
        total = last.elapsed_s + np.maximum(due - last.moved_total + last.out, 0.0) / link.out_bytes_per_s
        total += np.maximum(due - last.moved_total + last.back, 0.0) / link.in_bytes_per_s
        order = np.argsort(total, kind="stable").tolist()
        return [self._read(history, row) for row in order[:count]]

    def _moves(self, k: int) -> list[tuple[int, _Move]]:
        """(open segments before, what is decided) for stage `k`."""
        found = [(0, _Move(code)) for code in self.space.menu[k]]
        if not self.depth:
            return found
        if self.profile.stages[k].is_glue:
            return found + [(level, _Move(0)) for level in range(1, self.depth + 1)]
        if not self.goes_on[k]:
            return found
        plain = self.space.recompute(k)
        found += [(0, _Move(code, 1)) for code in self.space.inside[k]]
        found += [(0, _Move(code, 2, True)) for code in self.space.inside[k] if self.depth > 1]
        for level in range(1, self.depth + 1):
            found += [(level, _Move(plain)), (level, _Move(plain, 0, True))]
            if level < self.depth:
                found += [(level, _Move(plain, 1)), (level, _Move(plain, 1, True))]
        return found

    def _step(self, before: _Labels, k: int, level: int, move: _Move) -> _Labels | None:
        """The labels after stage `k`, or None where none fits."""
        profile, stage = self.profile, self.profile.stages[k]
        option, link, budget = stage.options[move.code], profile.link, self.budget_bytes
        n, t = len(profile.stages), self.tracker
        inner = level + move.opened  # segments around the stage
        room = budget - profile.base_forward_bytes[k] - t.program_bytes[k] - option.forward_bytes - before.held_bytes
        room = room + t.overlap(k, before.held)
        there = [place for place, steps in enumerate(self._spans) if k in steps]
        if there:
            room = room - before.passing[there].sum(axis=0)
        rows = np.flatnonzero(room >= 0)
        if len(rows) == 0:
            return None
        now, room = before.take(rows), room[rows]
        # Forward: wait until the backlog leaves room, then run.
        most = _whole_items(now.out_ends, room)
        wait = np.maximum(now.out - most, 0.0)
        now.out_due = np.maximum(now.out_due, np.where(now.moved_total - room > 0, now.moved_total - most, 0.0))
        now.out = np.maximum(now.out - wait - stage.forward_s * link.out_bytes_per_s, 0.0)
        now.elapsed_s = now.elapsed_s + wait / link.out_bytes_per_s + stage.forward_s
        for opened in range(level, inner):
            now.first[opened] = k
        # What it holds until backward.
        keeps, moves, tracked, linked = self._holds[k][move.code]
        now.held_bytes = now.held_bytes + keeps
        for steps, nbytes in self._passing[k][move.code]:
            now.passing[self._spans.index(steps)] += nbytes
        moved: Ints = np.full(len(rows), moves)
        for s, nbytes, goes in tracked:
            t.hold(now, s, k, nbytes, goes, None)
        for s, born, nbytes, goes in linked:
            mine = born < now.first[0] if inner else None
            if s in t.bit:
                t.hold(now, s, k, nbytes, goes, mine)
            else:
                goes = goes and k in rules.movers(profile.storages[s], n) and s not in t.left_out
                size = np.where(mine, nbytes, 0) if mine is not None else np.full(len(rows), nbytes)
                if goes:
                    moved = moved + size
                else:
                    now.held_bytes = now.held_bytes + size
        # Backward, and before it the sweep that ends here.
        own_backward, seconds = option.backward_bytes, stage.backward_s + option.added_s
        in_sweep: Ints | None = None
        if inner and not stage.is_glue:
            in_sweep = self._sweeps(now, k, inner, move)
            if not move.ends:
                own_backward, seconds = stage.keep.backward_bytes, stage.backward_s + stage.moving_s(option)[0]
        need = now.sweep_copies[:inner].sum(axis=0) + own_backward if inner else own_backward
        if move.ends:
            assert in_sweep is not None
            need = np.maximum(need, in_sweep)
        room = budget - profile.base_backward_bytes[k] - t.caller_bytes - now.held_bytes - now.moved_open - moved - need
        most = _whole_items(now.back_ends, room)
        wait = np.maximum(now.back - most, 0.0)
        put = now.moved_total - now.moved_open
        now.back_due = np.maximum(now.back_due, np.where(put > room, put - most, 0.0))
        taken: Floats | float = seconds + now.sweep_s[inner - 1] if move.ends else seconds
        now.back = np.maximum(now.back - wait - taken * link.in_bytes_per_s, 0.0)
        now.elapsed_s = now.elapsed_s + wait / link.in_bytes_per_s + taken
        if move.ends:
            now.sweep_copies[inner - 1] = now.sweep_peak[inner - 1] = now.sweep_s[inner - 1] = now.copied[inner - 1] = 0
        # What moves joins the queues.
        for s in t.expiring[k]:
            moved = moved + t.leave(now, s)
        if moves or t.expiring[k] or linked:
            now.out, now.out_ends = _put(now.out, now.out_ends, moved, link.latency_s * link.out_bytes_per_s)
            now.moved_open = now.moved_open + moved
            now.moved_total = now.moved_total + moved
        if inner - move.ends == 0:
            now.back, now.back_ends = _put(
                now.back, now.back_ends, now.moved_open, link.latency_s * link.in_bytes_per_s
            )
            now.moved_open = np.zeros_like(now.moved_open)
        fits = room >= 0
        if self.host_bytes is not None:
            fits &= self.host_bytes - now.moved_total >= 0
        t.forget(now, k)
        kept = np.flatnonzero(fits)
        if len(kept) == 0:
            return None
        if len(kept) < len(rows):
            parent = now.parent
            now = now.take(kept)
            now.parent = parent[kept]
        return now

    def _sweeps(self, now: _Labels, k: int, inner: int, move: _Move) -> Ints:
        """Run stage `k` in the sweeps around it; gives the most bytes of copies in the innermost and those around."""
        stage, t = self.profile.stages[k], self.tracker
        again = stage.recompute
        assert again is not None
        private, tracked, inputs, linked = self._sweep[k]
        for level in range(inner):
            innermost = level == inner - 1
            first = now.first[level]
            ends = innermost and move.ends
            if not ends:
                run = (stage.keep if innermost else again).forward_bytes + now.sweep_copies[level]
                for s, born, nbytes in linked:
                    new = born >= first
                    if s in t.bit:
                        new = new & ((now.copied[level] & t.bit[s]) == 0)
                    transit = np.where(new, nbytes, 0)
                    run = run + transit
                    if born < k - 1:
                        now.sweep_peak[level] += transit
                now.sweep_peak[level] = np.maximum(now.sweep_peak[level], run)
                now.sweep_s[level] += stage.rerun_s
            if innermost and not ends:
                now.sweep_copies[level] += private
                for s, nbytes in tracked:
                    t.copy(now, level, s, nbytes, None)
                for s, born, nbytes in inputs:
                    t.copy(now, level, s, nbytes, born >= first)
                continue
            for s, born, nbytes in linked:
                mine = born >= first
                t.copy(now, level, s, nbytes, mine if innermost else mine & (born < now.first[level + 1]))
        return np.asarray(now.sweep_peak[inner - 1] + now.sweep_copies[: inner - 1].sum(axis=0))

    def _prune(
        self, labels: _Labels, boundary: int, level: int, width: int, prices: Steering | None, below_s: float
    ) -> _Labels:
        """One label, the fastest, per cell; none that is slower than one in a cell with fewer bytes."""
        rows: Ints = np.arange(len(labels.elapsed_s))
        if below_s < np.inf:
            rows = np.flatnonzero(labels.elapsed_s + self.rest_s[boundary] < below_s)
        if len(rows) < 2:
            return labels if len(rows) == len(labels.elapsed_s) else _keep(labels, rows)
        backlog = labels.back[rows] + labels.moved_open[rows]
        columns: list[NDArray[np.float64]] = [labels.held_bytes[rows].astype(float), labels.out[rows], backlog]
        if level:
            columns.append(labels.sweep_copies[:level, rows].sum(axis=0).astype(float))
        if self.host_bytes is not None:
            columns.append(labels.moved_total[rows].astype(float))
        there = [place for place, steps in enumerate(self._spans) if boundary < steps.stop]
        if there:
            columns.append(labels.passing[there][:, rows].sum(axis=0).astype(float))
        seconds = labels.elapsed_s[rows] + labels.sweep_s[:level, rows].sum(axis=0) if level else labels.elapsed_s[rows]
        if prices is None:
            return _keep(labels, np.sort(rows[_sparse(columns, seconds, seconds, width)]))
        worth = [prices.held[boundary], prices.out[boundary], prices.back[boundary], prices.copies[boundary]]
        score = seconds + sum(price * values for price, values in zip(worth, columns, strict=False))
        # Half of the labels by what they promise at these prices, half spread over all there is: prices can mislead.
        chosen = _sparse(columns, score, seconds, CELLS * width)
        chosen = chosen[np.argsort(score[chosen], kind="stable")[: width // 2]]
        spread = _sparse(columns, score, seconds, width)
        if len(spread) > width // 2:
            spread = spread[np.argsort(score[spread], kind="stable")[:: -(-2 * len(spread) // width)]]
        return _keep(labels, rows[np.union1d(chosen, spread)])

    def _read(self, history: Sequence[Sequence[_Labels]], row: int) -> LabelPlan:
        """The plan of a label at the end."""
        n = len(history)
        codes = [0] * n
        level = 0
        opened: list[int] = [0] * n
        ends: list[bool] = [False] * n
        for k in reversed(range(n)):
            labels = history[k][level]
            came_from, move = self.moves[k][level][int(labels.move[row])]
            codes[k], opened[k], ends[k] = move.code, move.opened, move.ends
            row, level = int(labels.parent[row]), came_from
        stack: list[tuple[int, list[Segment]]] = [(0, [])]
        for k in range(n):
            stack.extend((k, []) for _ in range(opened[k]))
            if ends[k]:
                first, inner = stack.pop()
                stack[-1][1].append(Segment(first, k, tuple(inner)))
        return LabelPlan(tuple(codes), tuple(stack[0][1]))


def _whole_items(ends: Floats, room: Ints) -> Floats:
    """The most bytes that the newest items of a queue have in no more than `room`."""
    most = np.where(ends <= room, ends, 0.0).max(axis=0)
    longer = ends[-1] <= room
    if longer.any():
        item = np.maximum(ends[-1] - ends[-2], 1.0)
        most = np.where(longer, ends[-1] + np.floor((room - ends[-1]) / item) * item, most)
    return np.asarray(most)


def _put(backlog: Floats, ends: Floats, moved: Ints, latency_bytes: float) -> tuple[Floats, Floats]:
    """Backlog and window with one more item where `moved` isn't 0; `latency_bytes` flow in a latency."""
    size = moved + np.where(moved > 0, latency_bytes, 0.0) if latency_bytes else moved.astype(float)
    some = moved > 0
    longer = np.empty_like(ends)
    longer[0] = size
    longer[1:] = ends[:-1] + size
    return backlog + size, np.where(some, longer, ends)


def _sparse(columns: Sequence[Floats], score: Floats, seconds: Floats, cells: int) -> Ints:
    """The row with the best score per cell, unless one in a cell with fewer bytes has fewer seconds."""
    shape = _shape(columns, cells)
    index: Ints = np.zeros(len(score), np.int64)
    for values, size in zip(columns, shape, strict=True):
        if size > 1:
            low, high = float(values.min()), float(values.max())
            # The largest value falls into the last cell.
            index = index * size + ((values - low) * (size / (high - low) * (1 - ROUNDING))).astype(np.int64)
    rows = np.lexsort((columns[0], score, index))
    index = index[rows]
    firsts = np.flatnonzero(np.r_[True, index[1:] != index[:-1]])
    index, rows = index[firsts], rows[firsts]
    grid = np.full(math.prod(shape), np.inf)
    grid[index] = seconds[rows]
    grid = grid.reshape(shape)
    for axis, size in enumerate(shape):
        if size > 1:
            np.minimum.accumulate(grid, axis=axis, out=grid)
    return np.asarray(rows[seconds[rows] <= grid.reshape(-1)[index]])


def _shape(columns: Sequence[Floats], cells: int) -> list[int]:
    """How many cells each column gets: the first (held bytes) `CELLS` times as many as the others."""
    varies = [float(values.max()) > float(values.min()) for values in columns]
    others = sum(varies[1:])
    if not varies[0]:
        each = cells ** (1 / others) if others else 1.0
        return [int(max(2, each)) if v else 1 for v in varies]
    each = (cells / CELLS) ** (1 / (others + 1))
    return [int(max(2, CELLS * each))] + [int(max(2, each)) if v else 1 for v in varies[1:]]


def _empty(count: int, depth: int, window: int, spans: int) -> _Labels:
    """Labels of nothing decided yet."""
    floats = {"elapsed_s", "out", "back", "out_due", "back_due"}
    found: dict[str, NDArray[Any]] = {name: np.zeros(count, float if name in floats else np.int64) for name in _FIELDS}
    found |= {name: np.zeros((depth, count), np.int64) for name in ("first", "sweep_copies", "sweep_peak", "copied")}
    found["passing"] = np.zeros((spans, count), np.int64)
    found |= {name: np.zeros((window, count)) for name in ("out_ends", "back_ends")}
    found["sweep_s"] = np.zeros((depth, count))
    return _Labels(**found, parent=np.zeros(count, np.int64), move=np.zeros(count, np.int16))


def _join(labels: list[_Labels], depth: int, window: int, spans: int) -> _Labels:
    if not labels:
        return _empty(0, depth, window, spans)
    return _Labels(*[np.concatenate([getattr(x, f) for x in labels], axis=-1) for f in (*_FIELDS, "parent", "move")])


def _keep(labels: _Labels, rows: Ints) -> _Labels:
    kept = labels.take(rows)
    kept.parent, kept.move = labels.parent[rows], labels.move[rows]
    return kept


def _trace(labels: _Labels) -> _Labels:
    """Only what leads back to the decisions."""
    none = _empty(0, 0, 0, 0)
    none.parent, none.move = labels.parent.astype(np.int32), labels.move
    return none


class _Tracker:
    """Which storages a label must remember by name, and in which bit.

    A storage is tracked from its first possible holder until neither a later stage may hold it too nor the program
    still holds it: past that point its bytes are in `held_bytes` or in the queues and nothing can change them. Where
    more are open at once than there are bits, the rest count once per holder and don't move: never too little.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        n = len(profile.stages)
        self.program_bytes = [0] * n
        self.caller_bytes = 0
        self.bit: dict[int, np.int64] = {}
        self.left_out: set[int] = set()
        self.expiring: list[list[int]] = [[] for _ in range(n)]
        self._overlapping: list[list[int]] = [[] for _ in range(n)]
        begins: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for s, (storage, holders) in enumerate(zip(profile.storages, holders_of(profile), strict=True)):
            program = rules.program_steps(storage, n)
            for k in program:
                self.program_bytes[k] += storage.nbytes
            self.caller_bytes += storage.nbytes if storage.to_end else 0
            if not holders or not rules.counts(storage) or not rules.awaits_backward(storage):
                continue
            until = max(holders[-1].stage, program.stop - 1)
            if until > holders[0].stage:
                begins[holders[0].stage].append((s, until))
        free = list(range(np.iinfo(np.int64).bits - 1))  # without the sign
        open_: list[tuple[int, int, int]] = []
        self._clear: list[np.int64] = []
        for k in range(n):
            for s, until in begins[k]:
                if free:
                    number = free.pop()
                    self.bit[s] = np.int64(1 << number)
                    self.expiring[until].append(s)
                    open_.append((s, until, number))
                    for j in rules.program_steps(profile.storages[s], n):
                        if j > k:
                            self._overlapping[j].append(s)
                else:
                    self.left_out.add(s)
            gone = [number for _, until, number in open_ if until == k]
            self._clear.append(~np.int64(sum(1 << number for number in gone)))
            free.extend(gone)
            open_ = [item for item in open_ if item[1] > k]

    def overlap(self, k: int, held: Ints) -> Ints | int:
        """Bytes held by earlier stages that the program holds too in forward step `k`."""
        both: Ints | int = 0
        for s in self._overlapping[k]:
            both = both + np.where(held & self.bit[s], self.profile.storages[s].nbytes, 0)
        return both

    def hold(self, now: _Labels, s: int, k: int, nbytes: int, goes: bool, mine: NDArray[np.bool_] | None) -> None:
        """Stage `k` holds `s`, where `mine`."""
        bit = self.bit[s]
        new = (now.held & bit) == 0
        mark = bit if mine is None else np.where(mine, bit, 0)
        now.held_bytes = now.held_bytes + np.where(new if mine is None else new & mine, nbytes, 0)
        now.held = now.held | mark
        if not goes:
            now.fixed = now.fixed | mark
        if k in rules.movers(self.profile.storages[s], len(self.profile.stages)):
            now.late = now.late | mark

    def leave(self, now: _Labels, s: int) -> Ints:
        """Bytes of `s` that leave `held_bytes` for the queues, since no later stage may hold it."""
        bit = self.bit[s]
        goes = np.where(((now.held & now.late) & ~now.fixed) & bit, self.profile.storages[s].nbytes, 0)
        now.held_bytes = now.held_bytes - goes
        return goes

    def copy(self, now: _Labels, level: int, s: int, nbytes: int, mine: NDArray[np.bool_] | None) -> None:
        """The sweep of `level` holds a copy of `s` from here on, where `mine`."""
        bit = self.bit.get(s)
        if bit is None:
            now.sweep_copies[level] += nbytes if mine is None else np.where(mine, nbytes, 0)
            return
        new = (now.copied[level] & bit) == 0
        if mine is not None:
            new = new & mine
        now.sweep_copies[level] += np.where(new, nbytes, 0)
        now.copied[level] |= np.where(new, bit, 0)

    def forget(self, now: _Labels, k: int) -> None:
        """No step after `k` looks at what expires here."""
        clear = self._clear[k]
        now.held, now.fixed, now.late = now.held & clear, now.fixed & clear, now.late & clear
        now.copied &= clear
