"""POFO (Beaumont et al. 2021): rotor joined with swapping, by a dynamic program over stage, kept bytes and backlog.

A plan is a path over the stage boundaries. Each edge keeps a stage, swaps what it saves, or recomputes a segment with
rotor's best inner schedule (`_rotor_dp.py`) in the memory that is left there, its input held or swapped. A label at
boundary s holds: bytes kept by the stages before it, bytes still on their way out, bytes still to come back, and the
seconds lost so far. Backward is forward in reversed time: what is swapped leaves after its backward, seen from the
end. Links are fluids here: bytes drain while stages run, and compute waits where a step would exceed the budget.

Resolution, coarse as in the published program: rotor's table has 500 memory units; of the labels at a boundary only
the cheapest of each bucket stays, 100 buckets of kept bytes by 10 of each backlog. Values in labels aren't rounded.
Segments with swapping around them span at most 100 stages.

The published program offloads inputs of segments and layers; here a swapped stage moves all that it may, as the plan
space has it. Since labels are an estimate (whole transfers, shared storages), the best 24 at the end are replayed
under their true best schedule, then those found with 97 % of the budget (up to 100 stages, or where none fits), and,
while none fits, with 93 and 88 %. The fastest that fits is returned, or rotor's own plan at its exact resolution if
that is faster: all in the baseline's favour.

Reference
---------
O. Beaumont, L. Eyraud-Dubois, A. Shilova, "Efficient Combination of Rematerialization and Offloading for Training
DNNs", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ckptplan.baselines import rotor
from ckptplan.baselines._build import Selection, everywhere, finish, named, raise_infeasible, scheduled, smallest_peak
from ckptplan.baselines._rotor_dp import Table
from ckptplan.core import rules
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import Evaluation
from ckptplan.core.segment import Segment

UNITS = 500
KEPT_BUCKETS = 100
BACKLOG_BUCKETS = 10
LONGEST = 100
REPLAYS = 24
BUDGETS = (1.0, 0.97, 0.93, 0.88)
TWICE = 100
"""Stages up to which the second of these budgets is tried even where the first has given a plan."""
STALLS = (1.0, 0.5, 0.0)
"""Parts of the returning backlog that may be left when a segment's backward begins; the rest is waited for."""

_KEEP, _SWAP, _SEGMENT, _SEGMENT_SWAP = range(4)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _BoundaryLabels:
    """Labels at one boundary, one entry each.

    Attributes
    ----------
    kept, out, back : float arrays
        Bytes.
    cost : float array
        Seconds lost.
    movable : bool array
        Whether the boundary in front may move: the stage before doesn't keep it.
    origin, parent : int arrays
        Boundary and entry that it comes from.
    kind : int array
        Kind of decision about the stages in between.
    within : int array
        Units of memory that a segment's sweep has.
    """

    kept: Floats
    out: Floats
    back: Floats
    cost: Floats
    movable: NDArray[np.bool_]
    origin: Ints
    parent: Ints
    kind: Ints
    within: Ints

    def take(self, rows: Ints) -> _BoundaryLabels:
        return _BoundaryLabels(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def join(parts: list[_BoundaryLabels]) -> _BoundaryLabels:
        return _BoundaryLabels(
            *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(_BoundaryLabels))
        )


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Keep, swap or recompute in segments as the joint program says.

    Raises
    ------
    InfeasibleBudgetError
        If no plan it finds fits; `min_peak_bytes` is the smallest peak of rotor's plan and of swapping all.
    """
    n = len(profile.stages)
    best: Evaluation | None = None
    lacking: InfeasibleBudgetError | None = None
    try:
        alone = rotor.plan(profile, budget_bytes)
        names = [decision.option for decision in alone.choices]
        best = scheduled(profile, named(profile, names, alone.segments), budget_bytes)
    except InfeasibleBudgetError as error:
        lacking = error
    if best is None or best.makespan_s > profile.baseline_step_s:
        for share in BUDGETS:
            program = _LabelProgram(profile, int(budget_bytes * share))
            found = [scheduled(profile, selection, budget_bytes) for selection in program.selections()]
            fits = [best, *found] if best is not None else found
            best = min((r for r in fits if r is not None), key=lambda r: r.makespan_s, default=None)
            if any(r is not None for r in found) and (share < 1 or n > TWICE):
                break
    swap_all = everywhere(profile, "swap")
    best = best or scheduled(profile, swap_all, budget_bytes)
    if best is not None:
        return finish(profile, best, budget_bytes, "pofo")
    assert lacking is not None
    swapped = smallest_peak(profile, swap_all)
    if swapped.bytes < lacking.min_peak_bytes:
        raise_infeasible(profile, swapped, budget_bytes, "pofo")
    raise InfeasibleBudgetError(
        str(lacking).replace("rotor:", "pofo:", 1),
        budget_bytes=budget_bytes,
        min_peak_bytes=lacking.min_peak_bytes,
        stage=lacking.stage,
        phase=lacking.phase,
    )


class _LabelProgram:
    """The label program for one profile and budget."""

    def __init__(self, profile: Profile, budget_bytes: int) -> None:
        self.profile = profile
        self.table = table = Table(profile, budget_bytes, max_units=UNITS)
        self.chain = chain = table.chain
        self.n = len(chain.kept)
        self.budget = float(budget_bytes)
        link = profile.link
        self.out_rate, self.in_rate = link.out_bytes_per_s, link.in_bytes_per_s
        self.room = max(budget_bytes - table.floor, 1)
        movable = moves_alone(profile)
        # What keeping holds and swapping moves, the boundary behind left out: the next stage decides on that.
        behind = [*chain.boundary[1:], 0]
        self.moved = [max(0, min(m, kept - x)) for m, kept, x in zip(movable, chain.kept, behind, strict=True)]
        self.runs_s = [stage.forward_s for stage in profile.stages]
        self.back_s = [stage.backward_s for stage in profile.stages]
        self.levels: dict[int, _BoundaryLabels] = {}

    def selections(self) -> Iterator[Selection]:
        """The selections of the cheapest labels at the end, the cheapest first."""
        zero, none = np.zeros(1), np.zeros(1, np.int64)
        waiting: list[list[_BoundaryLabels]] = [[] for _ in range(self.n + 1)]
        waiting[0].append(_BoundaryLabels(zero, zero, zero, zero, np.zeros(1, bool), none - 1, none, none, none))
        for s in range(self.n):
            if not waiting[s]:
                continue
            labels = self.levels[s] = self._prune(_BoundaryLabels.join(waiting[s]))
            waiting[s] = []
            for to, grown in self._grow(s, labels):
                if len(grown.cost):
                    waiting[to].append(grown)
        if not waiting[self.n]:
            return
        ends = _BoundaryLabels.join(waiting[self.n])
        for row in np.argsort(ends.cost, kind="stable")[:REPLAYS]:
            yield self._selection(ends, int(row))

    def _prune(self, labels: _BoundaryLabels) -> _BoundaryLabels:
        step = max(self.room / KEPT_BUCKETS, 1)
        backlog = max(self.room / BACKLOG_BUCKETS, 1)
        key = np.stack(
            [labels.kept // step, np.ceil(labels.out / backlog), np.ceil(labels.back / backlog), labels.movable]
        ).astype(np.int64)
        order = np.lexsort((labels.kept, labels.cost, *key))
        first = np.r_[True, (np.diff(key[:, order], axis=1) != 0).any(axis=0)]
        return labels.take(order[first])

    def _grow(self, s: int, labels: _BoundaryLabels) -> Iterator[tuple[int, _BoundaryLabels]]:
        stage, chain = self.profile.stages[s], self.chain
        yield s + 1, self._single(s, labels, _KEEP)
        if self.moved[s] and stage.find("swap") is not None:
            yield s + 1, self._single(s, labels, _SWAP)
        ends = range(s, min(self.table.reach(s), self.n - 1, s + LONGEST))
        if not len(ends):
            return
        can_move = chain.boundary[s] > 0 and stage.find("recompute+swap") is not None
        for kind in (_SEGMENT, _SEGMENT_SWAP):
            chosen = labels.take(np.flatnonzero(labels.movable)) if kind == _SEGMENT_SWAP else labels
            if (kind == _SEGMENT_SWAP and not can_move) or not len(chosen.cost):
                continue
            rows = np.flatnonzero(labels.movable) if kind == _SEGMENT_SWAP else np.arange(len(labels.cost))
            yield from self._segments(s, ends, chosen, rows, kind)

    def _single(self, s: int, labels: _BoundaryLabels, kind: int) -> _BoundaryLabels:
        """Stage `s` kept or swapped."""
        chain = self.chain
        moved = float(self.moved[s]) if kind == _SWAP else 0.0
        # A swapped stage moves the boundary in front of it too, where no stage keeps that.
        front = np.where(labels.movable, float(chain.boundary[s]), 0.0) if kind == _SWAP else np.zeros(len(labels.cost))
        forward, out, lost_up = self._step(
            labels.kept + chain.forward_base[s] + chain.keep_forward[s], labels.out, self.out_rate
        )
        backward, back, lost_down = self._step(
            labels.kept + chain.kept[s] + chain.backward_base[s] + chain.keep_backward[s], labels.back, self.in_rate
        )
        out = np.maximum(0.0, out - self.runs_s[s] * self.out_rate) + moved + front
        back = np.maximum(0.0, back - self.back_s[s] * self.in_rate) + moved + front
        kept = labels.kept + chain.kept[s] - moved - front
        movable = labels.movable if chain.glue[s] else np.full(len(kept), kind == _SWAP)
        every = np.arange(len(kept))
        made = _BoundaryLabels(
            kept,
            out,
            back,
            labels.cost + lost_up + lost_down,
            movable,
            origin=np.full_like(every, s),
            parent=every,
            kind=np.full_like(every, kind),
            within=np.zeros_like(every),
        )
        return made.take(np.flatnonzero(forward & backward))

    def _segments(
        self, s: int, ends: range, labels: _BoundaryLabels, rows: Ints, kind: int
    ) -> Iterator[tuple[int, _BoundaryLabels]]:
        chain, table = self.chain, self.table
        moved = float(chain.boundary[s]) if kind == _SEGMENT_SWAP else 0.0
        kept = labels.kept - moved
        fine = np.full(len(kept), True)
        out, lost = labels.out, np.zeros(len(kept))
        back_s = again_s = 0.0
        for e in ends:
            # The boundary that moves is there while the first stage runs.
            here = labels.kept if e == s else kept + chain.boundary[e]
            fits, out, more = self._step(here + chain.forward_base[e] + chain.again_forward[e], out, self.out_rate)
            fine &= fits
            lost = lost + more
            out = np.maximum(0.0, out - self.runs_s[e] * self.out_rate) + (moved if e == s else 0.0)
            back_s += self.back_s[e]
            if chain.can[e]:
                best, left, within = self._swept(labels, table.row(s, e))
                again = again_s + chain.again_s[e]
                good = np.flatnonzero(fine & np.isfinite(best))
                busy_s = back_s + again + best[good]
                yield (
                    e + 1,
                    _BoundaryLabels(
                        kept[good] + chain.boundary[e + 1],
                        out[good],
                        np.maximum(0.0, left[good] - busy_s * self.in_rate) + moved,
                        (labels.cost + lost)[good] + again + best[good],
                        movable=np.full(len(good), True),
                        origin=np.full_like(good, s),
                        parent=rows[good],
                        kind=np.full_like(good, kind),
                        within=within[good],
                    ),
                )
            again_s += chain.rerun_s[e]

    def _step(self, need: Floats, backlog: Floats, rate: float) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """Whether a step fits, the backlog at its start, and the wait for that."""
        over = np.maximum(0.0, need + backlog - self.budget)
        return over <= backlog, np.maximum(0.0, backlog - over), over / rate

    def _swept(self, labels: _BoundaryLabels, row: Floats) -> tuple[Floats, Floats, Ints]:
        """Seconds, the returning backlog that is left, and the units, of the best sweep of a segment.

        In its backward the boundary in front of it is back.
        """
        best, left, within = np.full(len(labels.cost), np.inf), labels.back, np.zeros(len(labels.cost), np.int64)
        for part in STALLS:
            staying = labels.back * part
            units = np.floor((self.budget - self.table.floor - labels.kept - staying) / self.table.unit).astype(
                np.int64
            )
            at = np.clip(units, 0, len(row) - 1)
            total = np.where(units >= 0, row[at], np.inf) + (labels.back - staying) / self.in_rate
            better = total < best
            best = np.where(better, total, best)
            left = np.where(better, staying, left)
            within = np.where(better, at, within)
        return best, left, within

    def _selection(self, ends: _BoundaryLabels, row: int) -> Selection:
        names = ["keep"] * self.n
        segments: list[Segment] = []
        labels, at = ends, self.n
        while at > 0:
            s, kind, within = int(labels.origin[row]), int(labels.kind[row]), int(labels.within[row])
            row = int(labels.parent[row])
            if kind == _SWAP:
                names[s] = "swap"
            elif kind in (_SEGMENT, _SEGMENT_SWAP):
                segments.append(self.table.segment(s, at - 1, within))
                names[s] = "recompute+swap" if kind == _SEGMENT_SWAP else "recompute"
            labels, at = self.levels[s], s
        return named(self.profile, names, reversed(segments))


def moves_alone(profile: Profile) -> tuple[int, ...]:
    """Per stage, the bytes of its own making that it moves if no other stage swaps."""
    n, sizes = len(profile.stages), []
    later: set[int] = set()
    for i, stage in reversed(list(enumerate(profile.stages))):
        option = stage.find("swap")
        moved = () if option is None or i == n - 1 else set(option.moved) - later
        later.update(stage.keep.held)
        storages = [profile.storages[s] for s in moved]
        sizes.append(sum(storage.nbytes for storage in storages if storage.born == i in rules.movers(storage, n)))
    return tuple(reversed(sizes))
