"""The joint dynamic program: menus, swapping on both links and nested segments, label by label along the chain.

A *label* at the boundary before stage `k` stands for decisions about the stages before `k`. Both lanes of a step (see
cost.py) run forward over `k`, so one pass decides about both:

| field       | meaning                                                                                              |
|-------------|------------------------------------------------------------------------------------------------------|
| held_bytes  | bytes these stages hold until their backward and that don't move, or whose moving isn't decided yet   |
| passing     | bytes in graphs that are dropped in forward, by the steps in which they are there                    |
| backlog     | bytes in the queue of each lane, `OUT` (forward) and `BACK` (backward, reversed)                     |
| moved_open  | bytes moved out by the stages of an open segment; they join the backward queue where it ends         |
| elapsed_s   | seconds of both lanes so far, waiting included                                                       |
| moved_total | bytes moved so far                                                                                    |
| copied_total | those of them that are copied out: what the tier has already joins the backward queue alone          |
| due         | how many of them must have gone by now in each lane, for all steps so far to fit                      |

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
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptplan.core import rules
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.solving.chain import Chain
from ckptplan.solving.cost import Segments
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import ROUNDING, Parameters

CELLS = 8
"""Cells along the held bytes, which decide what fits, per cell along each other axis; and cells per label that is kept
by its score. Fewer lose plans for small budgets, more take time."""
OUT, BACK = 0, 1
"""The lanes: forward, and backward in reversed time."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_Where = NDArray[np.bool_] | bool
"""Mask of labels; True: all of them."""
_Origin = tuple[NDArray[np.int32], NDArray[np.int16]]
"""The way back from labels to decisions: their parents and moves."""


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """A plan of the label DP."""

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
    """Columns of labels with the same number of open segments.

    The last axis of each array is that of the labels. In front of it `backlog` and `due` have one of the lanes, `ends`
    one of the lanes and one of the window, `passing` one of the steps, and those of segments one of the levels.
    `parent` and `move` say where a label comes from.
    """

    held_bytes: Ints
    passing: Ints
    elapsed_s: Floats
    backlog: Floats
    ends: Floats
    due: Floats
    moved_open: Ints
    moved_total: Ints
    copied_total: Ints
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

    @classmethod
    def empty(cls, count: int, depth: int, window: int, spans: int) -> _Labels:
        """Return labels before any decision."""
        axes = {"backlog": (2,), "due": (2,), "ends": (2, window), "passing": (spans,)}
        axes |= dict.fromkeys(("first", "sweep_copies", "sweep_peak", "sweep_s", "copied"), (depth,))
        types = dict.fromkeys(("elapsed_s", "backlog", "ends", "due", "sweep_s"), float) | {"move": np.int16}
        columns: dict[str, Any] = {
            field.name: np.zeros((*axes.get(field.name, ()), count), types.get(field.name, np.int64))
            for field in fields(cls)
        }
        return cls(**columns)

    @classmethod
    def join(cls, parts: Sequence[_Labels]) -> _Labels:
        """Return all labels of these."""
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate(column, axis=-1) for column in columns))

    def take(self, rows: Ints) -> _Labels:
        """Return copies of these rows."""
        return _Labels(*(getattr(self, field.name)[..., rows] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.elapsed_s)


@dataclass(frozen=True, slots=True)
class _Move:
    """The decision about one stage.

    `code`: its option; `opened`: how many segments begin here; `ends`: whether the innermost one ends here.
    """

    code: int
    opened: int = 0
    ends: bool = False


@dataclass(slots=True)
class _HeldByStage:
    """Bytes that a stage holds until its backward under one option.

    Attributes
    ----------
    keeps, moves, copied : int
        Bytes of what no other stage may hold: those that stay, those that move, and of these those that are copied out.
    tracked, linked : list of (int, bool)
        Storages that a label knows by name, and those that a segment which makes them doesn't hold; whether each goes.
    """

    keeps: int = 0
    moves: int = 0
    copied: int = 0
    tracked: list[tuple[int, bool]] = field(default_factory=list)
    linked: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(slots=True)
class _SweepCopies:
    """Storages of which a stage makes copies in a sweep.

    Attributes
    ----------
    private : int
        Bytes of what no other stage may hold, where it is kept.
    tracked, inputs : list of int
        Storages that a label knows by name, and linked ones that recompute holds as well, where it is kept.
    linked : list of int
        All linked storages.
    """

    linked: list[int]
    private: int = 0
    tracked: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)


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
        self.chain = space.chain
        self.tracker = _Tracker(self.chain)
        link = self.profile.link
        self.rates = link.out_bytes_per_s, link.in_bytes_per_s
        self._latest_first = [rules.latest_first(storage) for storage in self.profile.storages]
        self.complete = True
        """Whether the last run had time for all its labels."""
        n = len(self.profile.stages)
        seconds = [stage.forward_s + stage.backward_s for stage in self.profile.stages]
        self.rest_s = np.concatenate([np.cumsum(seconds[::-1])[::-1], [0.0]])
        self.goes_on = [bool(codes) for codes in space.inside]
        self._holds = [
            [self._split(k, code) for code in range(len(stage.options))] for k, stage in enumerate(self.profile.stages)
        ]
        self._sweep = [self._sweep_parts(k) for k in range(n)]
        self._spans = list({steps: None for of in self.chain.passing for some in of for steps, _ in some})

    def _split(self, k: int, code: int) -> _HeldByStage:
        stage, storages = self.profile.stages[k], self.profile.storages
        option = stage.options[code]
        found = _HeldByStage()
        for s in self.chain.held[k][code]:
            goes = s in option.moved and rules.can_move(storages[s])
            if s in stage.linked and option.runs_again and not option.ops:
                found.linked.append((s, goes))
            elif s in self.tracker.bit:
                found.tracked.append((s, goes))
            elif goes and self.tracker.moves(s, k):
                found.moves += storages[s].nbytes
                found.copied += storages[s].copied_bytes
            else:
                found.keeps += storages[s].nbytes
        return found

    def _sweep_parts(self, k: int) -> _SweepCopies:
        stage, storages = self.profile.stages[k], self.profile.storages
        again = stage.recompute
        found = _SweepCopies(linked=[s for s in stage.linked if storages[s].nbytes])
        if again is None or stage.is_glue:
            return found
        for s in stage.keep.held:
            if s in again.held:
                if s in stage.linked:
                    found.inputs.append(s)
            elif s in self.tracker.bit:
                found.tracked.append(s)
            elif rules.awaits_backward(storages[s]):
                found.private += storages[s].nbytes
        return found

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
        """Return the fastest plans found, by their fluid time; none after `deadline`.

        Parameters
        ----------
        width : int
            Labels per boundary, about: the size of the grid that they are pruned on, or with prices the most there are.
        deadline : float
            By `time.monotonic()`.
        prices : Steering, optional
            Worth of bytes, by which the most promising labels are kept.
        below_s : float
            Labels that can't beat this are dropped.
        count : int
            Largest number of plans returned.
        between : callable
            Called now and then.
        """
        n = len(self.profile.stages)
        self.complete = True
        if self.profile.update_peak_bytes > self.budget_bytes:
            return []
        begin = time.monotonic()
        least_width = self.parameters.least_width
        start, none = (
            _Labels.empty(count, self.depth, max(2, self.parameters.window), len(self._spans)) for count in (1, 0)
        )
        pools = [start, *[none] * self.depth]
        history: list[list[_Origin]] = []
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
            grown: list[list[_Labels]] = [[none] for _ in pools]
            taken: list[list[tuple[int, _Move]]] = [[] for _ in pools]
            for level, move in self._moves(k):
                after = self._step(pools[level], k, level, move)
                if after is None:
                    continue
                to = level + move.opened - move.ends
                after.move[:] = len(taken[to])
                taken[to].append((level, move))
                grown[to].append(after)
            pools = [
                self._prune(_Labels.join(labels), k + 1, to, width, prices, below_s) for to, labels in enumerate(grown)
            ]
            history.append([(pool.parent.astype(np.int32), pool.move) for pool in pools])
            self.moves.append(taken)
        last = pools[0]
        # What need never be away in either lane doesn't move; the rest must have gone by the end of both.
        total, uncopied = last.elapsed_s, last.moved_total - last.copied_total
        due = np.maximum(last.due[OUT], last.due[BACK] - uncopied), last.due.max(axis=0)
        for lane, put in enumerate((last.copied_total, last.moved_total)):
            total = total + np.maximum(due[lane] - put + last.backlog[lane], 0.0) / self.rates[lane]
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
        now = self._forward(before, k, level, move)
        if now is None:
            return None
        inner = level + move.opened  # segments around the stage
        moved, copied = self._hold(now, k, inner, move.code)
        fits = self._backward(now, k, inner, move, moved)
        for s in self.tracker.expiring[k]:
            leaving = self.tracker.leave(now, s)
            moved = moved + leaving
            copied = copied if self.profile.storages[s].on_host else copied + leaving
        now.moved_open = now.moved_open + moved
        now.moved_total = now.moved_total + moved
        now.copied_total = now.copied_total + copied
        self._put(now, OUT, copied)
        if inner - move.ends == 0:
            self._put(now, BACK, now.moved_open)
            now.moved_open = np.zeros_like(now.moved_open)
        if self.host_bytes is not None:
            fits &= self.host_bytes - now.moved_total >= 0
        self.tracker.forget(now, k)
        if not fits.any():
            return None
        return now if fits.all() else now.take(np.flatnonzero(fits))

    def _forward(self, before: _Labels, k: int, level: int, move: _Move) -> _Labels | None:
        """The labels that forward step `k` fits, when it has run."""
        room = self.budget_bytes - self.chain.forward_bytes[k] - before.held_bytes
        room = room - self.profile.stages[k].options[move.code].forward_bytes + self.tracker.overlap(k, before.held)
        there = [place for place, steps in enumerate(self._spans) if k in steps]
        room = room - before.passing[there].sum(axis=0)
        rows = np.flatnonzero(room >= 0)
        if len(rows) == 0:
            return None
        now = before.take(rows)
        now.parent = rows
        self._run(now, OUT, room[rows], now.copied_total, self.profile.stages[k].forward_s)
        now.first[level : level + move.opened] = k
        return now

    def _hold(self, now: _Labels, k: int, inner: int, code: int) -> tuple[Ints, Ints]:
        """Note what stage `k` holds until its backward; return what of it moves, and what of that is copied out."""
        held, t = self._holds[k][code], self.tracker
        now.held_bytes = now.held_bytes + held.keeps
        for steps, nbytes in self.chain.passing[k][code]:
            now.passing[self._spans.index(steps)] += nbytes
        moved: Ints = np.full(len(now), held.moves)
        copied: Ints = np.full(len(now), held.copied)
        for s, goes in held.tracked:
            t.hold(now, s, k, goes, True)
        for s, goes in held.linked:
            storage = self.profile.storages[s]
            mine = self._latest_first[s] < now.first[0] if inner else True
            if s in t.bit:
                t.hold(now, s, k, goes, mine)
            elif goes and t.moves(s, k):
                moved = moved + np.where(mine, storage.nbytes, 0)
                copied = copied + np.where(mine, storage.copied_bytes, 0)
            else:
                now.held_bytes = now.held_bytes + np.where(mine, storage.nbytes, 0)
        return moved, copied

    def _backward(self, now: _Labels, k: int, inner: int, move: _Move, moved: Ints) -> NDArray[np.bool_]:
        """Run backward step `k`, and before it the sweep that ends here; return which labels it fits."""
        stage = self.profile.stages[k]
        option = stage.options[move.code]
        own, seconds = option.backward_bytes, stage.backward_s + option.added_s
        need: Ints | int = own
        taken: Floats | float = seconds
        if inner:
            in_sweep = None if stage.is_glue else self._sweeps(now, k, inner, move)
            if in_sweep is not None and not move.ends:
                own, taken = stage.keep.backward_bytes, stage.backward_s + stage.moving_s(option)[0]
            need = now.sweep_copies[:inner].sum(axis=0) + own
            if move.ends:
                assert in_sweep is not None
                need = np.maximum(need, in_sweep)
                taken = seconds + now.sweep_s[inner - 1]
        put = now.moved_total - now.moved_open
        room = self.budget_bytes - self.chain.backward_bytes[k] - now.held_bytes - now.moved_open - moved - need
        self._run(now, BACK, room, put, taken)
        if move.ends:
            now.sweep_copies[inner - 1] = now.sweep_peak[inner - 1] = now.sweep_s[inner - 1] = now.copied[inner - 1] = 0
        return np.asarray(room >= 0)

    def _run(self, now: _Labels, lane: int, room: Ints, put: Ints, seconds: Floats | float) -> None:
        """Wait until what is left of the bytes `put` into a lane's queue leaves room, then run for `seconds`."""
        rate = self.rates[lane]
        most = _whole_items(now.ends[lane], room)
        wait = np.maximum(now.backlog[lane] - most, 0.0)
        now.due[lane] = np.maximum(now.due[lane], np.where(put > room, put - most, 0.0))
        now.backlog[lane] = np.maximum(now.backlog[lane] - wait - seconds * rate, 0.0)
        now.elapsed_s = now.elapsed_s + wait / rate + seconds

    def _put(self, now: _Labels, lane: int, moved: Ints) -> None:
        """Put one more item into a lane's queue where `moved` isn't 0."""
        some = moved > 0
        if not some.any():
            return
        # As many bytes as flow in a latency count as well.
        size = moved + np.where(some, self.profile.link.latency_s * self.rates[lane], 0.0)
        longer = np.concatenate([size[None], now.ends[lane, :-1] + size])
        now.backlog[lane] += size
        now.ends[lane] = np.where(some, longer, now.ends[lane])

    def _sweeps(self, now: _Labels, k: int, inner: int, move: _Move) -> Ints:
        """Run stage `k` in the sweeps around it; gives the most bytes of copies in the innermost and those around."""
        stage, t, copies = self.profile.stages[k], self.tracker, self._sweep[k]
        again = stage.recompute
        assert again is not None
        born = self._latest_first
        for level in range(inner):
            innermost = level == inner - 1
            first = now.first[level]
            ends = innermost and move.ends
            if not ends:
                run = (stage.keep if innermost else again).forward_bytes + now.sweep_copies[level]
                for s in copies.linked:
                    new = born[s] >= first
                    if s in t.bit:
                        new = new & ((now.copied[level] & t.bit[s]) == 0)
                    transit = np.where(new, t.nbytes[s], 0)
                    run = run + transit
                    if born[s] < k - 1:
                        now.sweep_peak[level] += transit
                now.sweep_peak[level] = np.maximum(now.sweep_peak[level], run)
                now.sweep_s[level] += stage.rerun_s
            if innermost and not ends:
                now.sweep_copies[level] += copies.private
                for s in copies.tracked:
                    t.copy(now, level, s, True)
                for s in copies.inputs:
                    t.copy(now, level, s, born[s] >= first)
                continue
            for s in copies.linked:
                mine = born[s] >= first
                t.copy(now, level, s, mine if innermost else mine & (born[s] < now.first[level + 1]))
        return np.asarray(now.sweep_peak[inner - 1] + now.sweep_copies[: inner - 1].sum(axis=0))

    def _prune(
        self, labels: _Labels, boundary: int, level: int, width: int, prices: Steering | None, below_s: float
    ) -> _Labels:
        """One label, the fastest, per cell; none that is slower than one in a cell with fewer bytes."""
        rows: Ints = np.arange(len(labels))
        if below_s < np.inf:
            rows = np.flatnonzero(labels.elapsed_s + self.rest_s[boundary] < below_s)
        if len(rows) < 2:
            return labels.take(rows)
        out, back = labels.backlog[:, rows]
        columns: list[Floats] = [labels.held_bytes[rows].astype(float), out, back + labels.moved_open[rows]]
        if level:
            columns.append(labels.sweep_copies[:level, rows].sum(axis=0).astype(float))
        if self.host_bytes is not None:
            columns.append(labels.moved_total[rows].astype(float))
        there = [place for place, steps in enumerate(self._spans) if boundary < steps.stop]
        if there:
            columns.append(labels.passing[there][:, rows].sum(axis=0).astype(float))
        seconds = labels.elapsed_s[rows] + labels.sweep_s[:level, rows].sum(axis=0) if level else labels.elapsed_s[rows]
        if prices is None:
            return labels.take(np.sort(rows[_sparse(columns, seconds, seconds, width)]))
        worth = [prices.held[boundary], prices.out[boundary], prices.back[boundary], prices.copies[boundary]]
        score = seconds + sum(price * values for price, values in zip(worth, columns, strict=False))
        # Half of the labels by what they promise at these prices, half spread over all there is: prices can mislead.
        chosen = _sparse(columns, score, seconds, CELLS * width)
        chosen = chosen[np.argsort(score[chosen], kind="stable")[: width // 2]]
        spread = _sparse(columns, score, seconds, width)
        if len(spread) > width // 2:
            spread = spread[np.argsort(score[spread], kind="stable")[:: -(-2 * len(spread) // width)]]
        return labels.take(rows[np.union1d(chosen, spread)])

    def _read(self, history: Sequence[Sequence[_Origin]], row: int) -> LabelPlan:
        """The plan of a label at the end."""
        n = len(history)
        codes = [0] * n
        level = 0
        opened: list[int] = [0] * n
        ends: list[bool] = [False] * n
        for k in reversed(range(n)):
            parents, moves = history[k][level]
            came_from, move = self.moves[k][level][int(moves[row])]
            codes[k], opened[k], ends[k] = move.code, move.opened, move.ends
            row, level = int(parents[row]), came_from
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
    """Return the number of cells of each column: the first (held bytes) gets `CELLS` times as many as the others."""
    varies = [float(values.max()) > float(values.min()) for values in columns]
    others = sum(varies[1:])
    if not varies[0]:
        each = cells ** (1 / others) if others else 1.0
        return [int(max(2, each)) if v else 1 for v in varies]
    each = (cells / CELLS) ** (1 / (others + 1))
    return [int(max(2, CELLS * each))] + [int(max(2, each)) if v else 1 for v in varies[1:]]


class _Tracker:
    """The storages that a label must remember by name, and their bits.

    A storage is tracked from its first possible holder until neither a later stage may hold it too nor the program
    still holds it: past that point its bytes are in `held_bytes` or in the queues and nothing can change them. Where
    more are open at once than there are bits, the rest count once per holder and don't move: never too little.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.nbytes = [storage.nbytes for storage in chain.profile.storages]
        n = chain.n
        self.bit: dict[int, np.int64] = {}
        self.left_out: set[int] = set()
        self.expiring: list[list[int]] = [[] for _ in range(n)]
        self._overlapping: list[list[int]] = [[] for _ in range(n)]
        begins: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for s, (holders, program) in enumerate(zip(chain.holders, chain.program, strict=True)):
            if not holders or not chain.decided[s]:
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
                    for j in chain.program[s]:
                        if j > k:
                            self._overlapping[j].append(s)
                else:
                    self.left_out.add(s)
            gone = [number for _, until, number in open_ if until == k]
            self._clear.append(~np.int64(sum(1 << number for number in gone)))
            free.extend(gone)
            open_ = [item for item in open_ if item[1] > k]

    def moves(self, s: int, k: int) -> bool:
        """Whether stage `k` may move `s`."""
        return k in self.chain.movers[s] and s not in self.left_out

    def overlap(self, k: int, held: Ints) -> Ints | int:
        """Bytes held by earlier stages that the program holds too in forward step `k`."""
        both: Ints | int = 0
        for s in self._overlapping[k]:
            both = both + np.where(held & self.bit[s], self.nbytes[s], 0)
        return both

    def hold(self, now: _Labels, s: int, k: int, goes: bool, mine: _Where) -> None:
        """Stage `k` holds `s`, where `mine`."""
        mark = np.where(mine, self.bit[s], 0)
        now.held_bytes = now.held_bytes + np.where(mark & ~now.held, self.nbytes[s], 0)
        now.held = now.held | mark
        if not goes:
            now.fixed = now.fixed | mark
        if k in self.chain.movers[s]:
            now.late = now.late | mark

    def leave(self, now: _Labels, s: int) -> Ints:
        """Bytes of `s` that leave `held_bytes` for the queues, since no later stage may hold it."""
        goes = np.where(((now.held & now.late) & ~now.fixed) & self.bit[s], self.nbytes[s], 0)
        now.held_bytes = now.held_bytes - goes
        return goes

    def copy(self, now: _Labels, level: int, s: int, mine: _Where) -> None:
        """The sweep of `level` holds a copy of `s` from here on, where `mine`."""
        if s not in self.bit:
            now.sweep_copies[level] += np.where(mine, self.nbytes[s], 0)
            return
        mark = np.where(mine, self.bit[s], 0)
        now.sweep_copies[level] += np.where(mark & ~now.copied[level], self.nbytes[s], 0)
        now.copied[level] |= mark

    def forget(self, now: _Labels, k: int) -> None:
        """No step after `k` looks at what expires here."""
        clear = self._clear[k]
        now.held, now.fixed, now.late = now.held & clear, now.fixed & clear, now.late & clear
        now.copied &= clear
