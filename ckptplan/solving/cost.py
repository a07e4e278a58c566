"""Bytes and time of many plans at once, decision vectors as rows, with the same segments: core/schedule.py in numpy.

core/schedule.py and core/lanes.py are the definition; tests hold the numbers here equal to theirs, to the bit. 4096
plans of 24 stages take 0.03 s here and 1 s in Python one by one, which is why there are two. A single plan takes
0.6 ms here, for lack of rows, and 0.2 ms in Python: that is what `Evaluator.step_s` is for.

Copies leave oldest first, hence the stages whose bytes never need to be away form a suffix `i >= cutoff`, where
`cutoff` is the larger of the two lanes' queue fronts at the turn. These stages move nothing at all. They are charged as
their options say: what does the same without moving is another vector, and `evaluate` takes that in the end.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ckptplan.core import lanes, rules
from ckptplan.core.link import Link
from ckptplan.core.option import Action, Option
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import (
    EQUAL_S,
    Residency,
    Sendings,
    StepNeed,
    decided,
    evaluate,
    in_place,
    lazy_sendings,
    makespan_s,
    peak,
    residency,
    tightest_peak,
)
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Phase, Stage
from ckptplan.solving.chain import Chain, Holder
from ckptplan.solving.parameters import DEFAULT, Parameters
from ckptplan.solving.points import Moves, MovesSearch
from ckptplan.solving.room import Room

Codes = NDArray[np.int8]
"""Decision vectors: one row each, one column per stage, values are positions in the stage's menu."""
Menu = Sequence[Sequence[int]]
"""Per stage, the codes it may take."""
Segments = tuple[Segment, ...]
Number = TypeVar("Number", np.int64, np.float64)
Change = tuple[tuple[int, int], ...]
"""(stage, code) of each stage whose option changes."""
Lingering = tuple[int, int, NDArray[np.int64], bool]
"""A stage, a later step until which the program holds what it moves, the bytes, and whether that needs no copy out."""
Batch = TypeVar("Batch", Codes, Sequence[Change])
"""Rows of codes, or changes of some stages' codes."""

UNLIMITED = Room()
KEEP = 0
"""The code of "keep", the first option of every menu."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of decision vectors before any transfer is scheduled; shapes (vectors, stages).

    `forward` and `backward` are the bytes of each step if everything that moves were away wherever it can be; `moved`
    is what each stage moves, and `copied` what of it is copied out. `lingering` is what of it the program holds beyond
    the stage.
    """

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    moved: NDArray[np.int64]
    copied: NDArray[np.int64]
    lingering: list[Lingering]

    def most(self) -> NDArray[np.int64]:
        """Bytes of each vector's largest step."""
        return np.asarray(np.maximum(self.forward.max(axis=1), self.backward.max(axis=1)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One plan with its lazy schedule and what it costs."""

    codes: tuple[int, ...]
    choices: tuple[Decision, ...]
    step_s: float
    peak_bytes: int
    host_bytes: int
    segments: Segments = ()
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """Plans as their two lanes; shapes (vectors, stages), of `joined` (stages + 1,).

    `front[:, k]` is the first stage whose bytes may still be there in step `k`; `moved` are the bytes that move in the
    end, `copied` those of them that are copied out, and `joined[k]` says how many stages' copies have joined the
    backward lane when step `k` starts.
    """

    front_forward: NDArray[np.int64]
    front_backward: NDArray[np.int64]
    moved: NDArray[np.int64]
    copied: NDArray[np.int64]
    joined: NDArray[np.int64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]

    def take(self, rows: NDArray[np.int64]) -> Queued:
        """These rows."""
        return replace(
            self,
            front_forward=self.front_forward[rows],
            front_backward=self.front_backward[rows],
            moved=self.moved[rows],
            copied=self.copied[rows],
            forward_s=self.forward_s[rows],
            backward_s=self.backward_s[rows],
        )


@dataclass(frozen=True, slots=True)
class _Shared:
    """Storages with the same number of possible holders, two or more; shapes (storages, holders[, codes]).

    `lingering` are (storage, stage, step, on_host): the stage may move it, and the program holds it until that later
    step.
    """

    nbytes: NDArray[np.int64]
    copied_bytes: NDArray[np.int64]
    program_stop: NDArray[np.int64]
    moved_stop: NDArray[np.int64]
    first_mover: NDArray[np.int64]
    movers_stop: NDArray[np.int64]
    stages: NDArray[np.int64]
    holds: NDArray[np.bool_]
    fixes: NDArray[np.bool_]
    lingering: tuple[tuple[int, int, int, bool], ...]


class Evaluator:
    """Bytes and time of plans of one profile.

    Parameters
    ----------
    profile : Profile
    room : Room, optional
        For what is moved; with a disk only if the profile has one.
    parameters : Parameters, optional
        Numbers that bound time and memory.
    """

    def __init__(self, profile: Profile, room: Room = UNLIMITED, *, parameters: Parameters = DEFAULT) -> None:
        self.profile = profile
        self.parameters = parameters
        self.room = room
        self.chain = Chain(profile)
        self.any_on_host = any(storage.on_host for storage in profile.storages)
        self._forward_s = np.array([stage.forward_s for stage in profile.stages])
        self._width = max(len(stage.options) for stage in profile.stages)
        n = len(profile.stages)
        self.moving_s = np.zeros((2, n, self._width))
        """Compute and launching time that each option takes more in a segment than its last run does."""
        for i, stage in enumerate(profile.stages):
            for code, option in enumerate(stage.options):
                self.moving_s[:, i, code] = stage.moving_s(option)
        self._forests: dict[Segments, _Tables] = {}
        self.private: list[list[int]] = [[] for _ in profile.stages]
        """Per stage, the storages that it alone may hold."""
        groups: dict[int, list[int]] = {}
        for s, (storage, holders) in enumerate(zip(profile.storages, self.chain.holders, strict=True)):
            if rules.counts(storage) and len(holders) == 1:
                self.private[holders[0].stage].append(s)
            elif rules.counts(storage) and holders:
                groups.setdefault(len(holders), []).append(s)
        self.shared = list(groups.values())
        """Storages that several stages may hold, grouped by the number of these."""
        self._plain: _Tables | None = None
        self._plain = self._tables(())

    def options(self, codes: Sequence[int]) -> list[Option]:
        """The options that `codes` stand for."""
        return [stage.options[code] for stage, code in zip(self.profile.stages, codes, strict=True)]

    def _tables(self, segments: Segments) -> _Tables:
        found = self._forests.get(segments)
        if found is None:
            # The local search goes back and forth between many.
            if len(self._forests) > self.parameters.cells // (len(self.profile.stages) * self._width):
                self._forests.pop(next(iter(self._forests)))
            plain = self._plain
            found = plain if plain is not None and not segments else _Tables(self, segments, plain)
            self._forests[segments] = found
        return found

    def needs(self, codes: Codes, segments: Segments = ()) -> Needs:
        """Bytes per step (NOTE [Residency]) of each row of `codes`, all with the same segments."""
        t = self._tables(segments)
        rows, n = codes.shape
        every = np.arange(n)
        forward = np.tile(t.forward, (rows, 1))
        backward = np.tile(t.backward, (rows, 1))
        forward[:, 1:] -= t.gone_next[every, codes]
        for (position, i), nbytes in t.gone_later.items():
            forward[:, position] -= nbytes[codes[:, i]]
        backward[:, :n] += t.private_held[every, codes]
        moved = t.private_moved[every, codes]
        copied = t.private_copied[every, codes] if self.any_on_host else moved
        lingering = [(i, until, nbytes[codes[:, i]], on_host) for i, until, nbytes, on_host in t.lingering]
        if t.back_in_order:
            backward[:, 1:] -= moved
        else:
            np.subtract.at(backward.reshape(-1), (np.arange(rows) * (n + 1))[:, None] + t.back_stop, moved)
        at = (np.arange(rows) * (n + 1))[:, None]
        for group in t.shared:
            storages = np.arange(len(group.nbytes))
            first = np.full((rows, len(storages)), n)
            last = np.full((rows, len(storages)), -1)
            fixed = np.zeros((rows, len(storages)), bool)
            for h in range(group.stages.shape[1]):
                stages = group.stages[:, h]
                chosen = codes[:, stages]
                holds = group.holds[storages, h, chosen]
                fixed |= group.fixes[storages, h, chosen]
                np.minimum(first, np.where(holds, stages, n), out=first)
                np.copyto(last, np.broadcast_to(stages, last.shape), where=holds)
            moves = ~fixed & (last >= group.first_mover) & (last < group.movers_stop)
            nbytes = np.broadcast_to(group.nbytes, first.shape)
            moved_stop = group.moved_stop[storages, last]
            end = np.where(moves, moved_stop, np.where(first < n, n, group.program_stop))
            np.subtract.at(forward.reshape(-1), (at + end).ravel(), nbytes.ravel())
            np.add.at(backward.reshape(-1), (at + first).ravel(), nbytes.ravel())
            row, which = np.nonzero(moves)
            mover = last[row, which]
            np.subtract.at(backward, (row, t.back_stop[mover]), nbytes[row, which])
            np.add.at(moved, (row, mover), nbytes[row, which])
            if copied is not moved:
                np.add.at(copied, (row, mover), group.copied_bytes[which])
            for s, i, until, on_host in group.lingering:
                lingering.append((i, until, np.where(moves[:, s] & (last[:, s] == i), group.nbytes[s], 0), on_host))
        starts = np.cumsum(backward, axis=1)[:, :n]
        backward = starts + t.own_backward[every, codes]
        for k, extra in t.in_sweep:
            np.maximum(backward[:, k], starts[:, k] + extra, out=backward[:, k])
        lingering = [found for found in lingering if found[2].any()]
        forward = np.cumsum(forward, axis=1)[:, :n] + t.own_forward[every, codes]
        return Needs(forward, backward, moved, copied, lingering)

    def makespans(self, codes: Codes, budget_bytes: int, segments: Segments = ()) -> NDArray[np.float64]:
        """Makespan of each row's lazy schedule, infinite where the row doesn't fit."""
        return self.by_batch(lambda part: self._makespans(part, budget_bytes, segments), codes)

    def batches(self, items: Batch) -> Iterator[Batch]:
        """As many of them at once as are evaluated together."""
        size = max(1, self.parameters.cells // len(self.profile.stages))
        return (items[at : at + size] for at in range(0, len(items), size))

    def by_batch(self, of: Callable[[Codes], NDArray[Number]], codes: Codes) -> NDArray[Number]:
        """One number for each row, a batch at a time."""
        return np.concatenate([of(part) for part in self.batches(codes)] or [of(codes)])

    def least_s(self, codes: Codes, budget_bytes: int, segments: Segments = ()) -> NDArray[np.float64]:
        """No schedule of a row is faster, whatever part of its moves it makes and in which order; infinite: none fits.

        Links as fluids: bytes leave as they flow, in any order, at the rate of the largest transfer (see
        `bound/linear_program.py`).
        """
        return self.by_batch(lambda part: self._least_s(part, budget_bytes, segments), codes)

    def _least_s(self, codes: Codes, budget_bytes: int, segments: Segments) -> NDArray[np.float64]:
        t, needs = self._tables(segments), self.needs(codes, segments)
        rows, n = codes.shape
        put = _before(needs.moved)
        put_out = put if needs.copied is needs.moved else _before(needs.copied)
        largest = needs.moved.max(axis=1)
        there = put_out[:, :n].copy()  # of it, what isn't needed in any case
        for i, until, nbytes, on_host in needs.lingering:
            if not on_host:
                there[:, i + 1 : until + 1] -= nbytes[:, None]
        total = np.zeros(rows)
        every = np.arange(n)
        lanes_of = (
            (needs.forward + there, put_out[:, :n], np.broadcast_to(self._forward_s, (rows, n)), 0),
            (needs.backward + put[:, t.joined[:n]], put[:, t.joined[:n]], t.backward_s[every, codes], 1),
        )
        for whole, queued, compute_s, way in lanes_of:
            copy_s = copies_s(largest[:, None], largest[:, None], self.profile.link)[way][:, 0]
            rate = np.where(largest > 0, largest / np.where(copy_s > 0, copy_s, 1.0), 1.0)
            rate[(largest > 0) & (copy_s == 0)] = np.inf
            gone = np.zeros(rows)
            for k in range(n):
                must = whole[:, k] - budget_bytes
                total += np.maximum(must - gone, 0.0) / rate
                gone = np.maximum(gone, must)
                gone = np.maximum(gone, np.minimum(queued[:, k], gone + rate * compute_s[:, k]))
                total += compute_s[:, k]
        fits = np.maximum(needs.most(), self.profile.update_peak_bytes) <= budget_bytes
        total = self.launched(np.maximum(total, self.profile.fastest_step_s), codes, segments)
        return np.where(fits, total, np.inf)

    def compute_s(self, codes: Codes, segments: Segments = ()) -> NDArray[np.float64]:
        """Compute time of each row, or that of launching it if that is longer: no transfer can make it less."""
        seconds = self._tables(segments).backward_s[np.arange(codes.shape[1]), codes].sum(axis=1)
        return self.launched(seconds + self._forward_s.sum(), codes, segments)

    def launched(self, lanes_s: NDArray[np.float64], codes: Codes, segments: Segments) -> NDArray[np.float64]:
        """The step of each row, from the time of its lanes: no shorter than the host launches it."""
        launch_s = self._tables(segments).launch_s
        if launch_s is None:
            return lanes_s
        # As a running sum, to be equal to `rules.launch_s` to the bit.
        return np.maximum(lanes_s, np.cumsum(launch_s[np.arange(codes.shape[1]), codes], axis=1)[:, -1])

    def _makespans(self, codes: Codes, budget_bytes: int, segments: Segments) -> NDArray[np.float64]:
        out = np.full(len(codes), np.inf)
        fits, lazy = self._lazy(codes, budget_bytes, segments)
        kept = np.flatnonzero(fits)
        if len(kept) == 0:
            return out
        out[kept] = self.launched(self.queued_s(lazy.take(kept)), codes[kept], segments)
        fastest_s = self.profile.fastest_step_s
        out[out <= fastest_s * (1 + EQUAL_S)] = fastest_s
        return out

    def settled_s(self, codes: Codes, budget_bytes: int, segments: Segments = ()) -> NDArray[np.float64]:
        """Makespan of each row's lazy schedule with the options in place that `evaluate` takes where nothing moves.

        Exact nearly always: it isn't checked whether such an option pins storages that other stages move.
        """
        in_place_of = [
            np.array([stage.options.index(in_place(stage, option, set())) for option in stage.options], np.int8)
            for stage in self.profile.stages
        ]
        before = None
        while before is None or not np.array_equal(codes, before):
            before = codes  # storages that stay may spare bytes, and with them other moves
            fits, lazy = self._lazy(codes, budget_bytes, segments)
            staying = fits[:, None] & (lazy.moved == 0)
            codes = np.column_stack(
                [np.where(staying[:, i], in_place_of[i][codes[:, i]], codes[:, i]) for i in range(codes.shape[1])]
            )
        return self.makespans(codes, budget_bytes, segments)

    def queued_s(self, queued: Queued) -> NDArray[np.float64]:
        """Makespans of plans that fit the device; infinite where host and disk have no room for what they move."""
        out_s, in_s = copies_s(queued.copied, queued.moved, self.profile.link)
        if self.profile.disk is not None and self.room.disk_bytes:
            for row in np.flatnonzero(queued.moved.sum(axis=1) > self.room.host_bytes):
                on_disk = self.room.on_disk(queued.moved[row].tolist())
                if on_disk is None:
                    out_s[row] = np.inf
                else:
                    away = sorted(on_disk)
                    there = queued.copied[row, away], queued.moved[row, away]
                    out_s[row, away], in_s[row, away] = copies_s(*there, self.profile.disk)
        in_order = np.arange(queued.moved.shape[1] + 1)
        return _lanes(queued.front_forward, out_s, in_order, queued.forward_s) + _lanes(
            queued.front_backward, in_s, queued.joined, queued.backward_s
        )

    def _lazy(self, codes: Codes, budget_bytes: int, segments: Segments) -> tuple[NDArray[np.bool_], Queued]:
        """Whether each row fits, and its lazy schedule."""
        t, needs = self._tables(segments), self.needs(codes, segments)
        rows, n = codes.shape
        put = _before(needs.moved)
        front_forward = _fronts(needs.forward, put, np.arange(n + 1), budget_bytes, needs.lingering)
        front_backward = _fronts(needs.backward, put, t.joined, budget_bytes)
        cutoff = np.maximum(front_forward[:, -1], front_backward[:, -1])
        self._enforce(front_forward, front_backward, t.joined, cutoff)
        fits = np.maximum(needs.most(), self.profile.update_peak_bytes) <= budget_bytes
        if self.room.total_bytes is not None:
            fits &= put[np.arange(rows), cutoff] <= self.room.total_bytes
        every = np.arange(n)
        moved = copied = np.where(every < cutoff[:, None], needs.moved, 0)
        if needs.copied is not needs.moved:
            copied = np.where(every < cutoff[:, None], needs.copied, 0)
        seconds = np.broadcast_to(self._forward_s, (rows, n)), t.backward_s[every, codes]
        return fits, Queued(front_forward, front_backward, moved, copied, t.joined, *seconds)

    def _enforce(
        self,
        front_forward: NDArray[np.int64],
        front_backward: NDArray[np.int64],
        joined: NDArray[np.int64],
        cutoff: NDArray[np.int64],
    ) -> None:
        """Move points to where the runtime can meet them (NOTE [Residency], rule 4).

        What is there in step `k` is then what was there in the first step whose point is met in `k` or later, as far as
        it has joined the queue; nothing that moves where there is no such step.
        """
        n = len(self.profile.stages)
        for front, points, queue in zip(
            (front_forward, front_backward),
            rules.enforceable_points(self.profile.stages),
            (np.arange(n), joined),
            strict=True,
        ):
            lazy = np.column_stack([front, cutoff])
            met = np.searchsorted(points, np.arange(n))
            for k in np.flatnonzero(met != np.arange(n)):
                np.minimum(lazy[:, met[k]], queue[k], out=front[:, k])

    def smallest_peaks(self, codes: Codes, segments: Segments = ()) -> NDArray[np.int64]:
        """The smallest budget each row fits in.

        Everything that moves is away, up to the last stage that the host limit lets move.
        """
        return self.by_batch(
            lambda part: np.maximum(self.tightest(part, segments).most(), self.profile.update_peak_bytes), codes
        )

    def least_bytes(self, codes: Codes, segments: Segments = ()) -> NDArray[np.int64]:
        """No schedule of a row fits in less: everything that moves is away, whatever room the host has."""
        return np.maximum(self.needs(codes, segments).most(), self.profile.update_peak_bytes)

    def tightest(self, codes: Codes, segments: Segments = ()) -> Needs:
        """Bytes per step in the schedule of the smallest peak."""
        needs = self.needs(codes, segments)
        if self.room.total_bytes is None:
            return needs
        stays = np.where(self.too_much(needs.moved), needs.moved, 0)
        before = _before(stays)
        n = codes.shape[1]
        forward = needs.forward + before[:, :n]
        for i, until, nbytes, _ in needs.lingering:
            forward[:, i + 1 : until + 1] -= np.where(stays[:, i] > 0, nbytes, 0)[:, None]
        return replace(needs, forward=forward, backward=needs.backward + before[:, self._tables(segments).joined[:n]])

    def too_much(self, moved: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Per plan and stage, whether there is no room any more for what it moves behind what those before it moved."""
        assert self.room.total_bytes is not None
        out = np.asarray(np.cumsum(moved, axis=1) > self.room.total_bytes)
        if self.room.disk_bytes:
            for row in np.flatnonzero(moved.sum(axis=1) > self.room.host_bytes):
                sizes = moved[row].tolist()
                fitting = bisect(range(len(sizes)), False, key=lambda i: self.room.on_disk(sizes[: i + 1]) is None)
                out[row, fitting:] = True
        return out

    def step_s(self, codes: Sequence[int], budget_bytes: int, segments: Segments = ()) -> float:
        """Makespan of one plan, infinite where it doesn't fit: `makespans` without the cost of its tables."""
        r = residency(self.profile, self.options(codes), segments)
        if tightest_peak(self.profile, r).bytes > budget_bytes:
            return math.inf
        sendings = lazy_sendings(self.profile, r, budget_bytes)
        on_disk = self.room.on_disk(moved_bytes(sendings))
        return math.inf if on_disk is None else makespan_s(self.profile, r, sendings, on_disk)

    def peak(self, codes: Sequence[int], segments: Segments = ()) -> int:
        """The smallest budget one plan fits in: `smallest_peaks` without the cost of its tables."""
        if self.room.total_bytes is None:
            return tightest_peak(self.profile, residency(self.profile, self.options(codes), segments)).bytes
        return int(self.smallest_peaks(np.array([codes], np.int8), segments)[0])

    def schedule(self, codes: Sequence[int], budget_bytes: int, segments: Segments = ()) -> Schedule | None:
        """The lazy schedule of one plan, None where it doesn't fit."""
        found = evaluate(self.profile, self.options(codes), budget_bytes, segments)
        if isinstance(found, StepNeed):
            return None
        return self._scheduled(found.options, found.segments, found.residency, found.sendings, found.peak.bytes)

    def _scheduled(
        self, options: Sequence[Option], segments: Segments, r: Residency, sendings: Sendings, peak_bytes: int
    ) -> Schedule | None:
        """One plan with these transfers; None where host and disk have no room for them."""
        moved = moved_bytes(sendings)
        on_disk = self.room.on_disk(moved)
        if on_disk is None:
            return None
        disk = sum(moved[i] for i in on_disk)
        return Schedule(
            tuple(stage.options.index(option) for stage, option in zip(self.profile.stages, options, strict=True)),
            decided(options, sendings, on_disk),
            makespan_s(self.profile, r, sendings, on_disk),
            peak_bytes,
            sum(moved) - disk,
            segments,
            disk,
        )

    def search(self, codes: Sequence[int], budget_bytes: int, segments: Segments = ()) -> MovesSearch:
        """A search over what one plan moves, and when."""
        options = self.options(codes)
        return MovesSearch(self.profile, options, segments, budget_bytes, self.room, self.parameters)

    def improved(self, lazy: Schedule, budget_bytes: int, deadline: float) -> Schedule | None:
        """A lazy schedule with transfers that make it faster; None if none are found."""
        search = self.search(lazy.codes, budget_bytes, lazy.segments)
        start = Moves.of(lazy.step_s, lazy.choices, self.options(lazy.codes), self.profile)
        found = search.improved(start, deadline)
        fewest = search.fewest() if time.monotonic() < deadline else None
        if fewest is not None:
            other = search.improved(fewest, deadline)
            found = other if other.seconds < found.seconds * (1 - EQUAL_S) else found
        return None if found is start else self.with_moves(lazy.codes, lazy.segments, found)

    def with_fewest(
        self, codes: Sequence[int], budget_bytes: int, segments: Segments, deadline: float
    ) -> Schedule | None:
        """One plan that moves no more than it has to (`MovesSearch.fewest`), or better transfers; None if none fit."""
        if time.monotonic() >= deadline:
            return None
        search = self.search(codes, budget_bytes, segments)
        start = search.fewest()
        return None if start is None else self.with_moves(codes, segments, search.improved(start, deadline))

    def joined(self, schedule: Schedule, budget_bytes: int, most_s: float, deadline: float) -> Schedule:
        """A plan with transfers of the same stage joined while its step takes no longer than `most_s`."""
        start = Moves.of(schedule.step_s, schedule.choices, self.options(schedule.codes), self.profile)
        search = self.search(schedule.codes, budget_bytes, schedule.segments)
        found = search.joined(start, search.order_of(start), most_s, deadline)
        return schedule if found is start else self.with_moves(schedule.codes, schedule.segments, found)

    def transferred(
        self,
        codes: Sequence[int],
        segments: Segments,
        transfers: Sequence[tuple[int, Sequence[int]]],
        budget_bytes: int,
        deadline: float,
    ) -> Schedule | None:
        """One plan with these transfers (see `MovesSearch.in_order`) or better ones; None if they don't fit."""
        search = self.search(codes, budget_bytes, segments)
        start = search.in_order(transfers)
        return None if start is None else self.with_moves(codes, segments, search.improved(start, deadline))

    def with_moves(self, codes: Sequence[int], segments: Segments, moves: Moves) -> Schedule:
        """One plan with these moves, which fit; a swap that moves nothing is a keep where that costs no byte."""
        before = self.options(codes)
        positions = [[p for sent in found for p in sent.moves] for found in moves.sendings]
        moved = {option.saved[p] for option, at in zip(before, positions, strict=True) for p in at}
        options = [
            option if at or not option.moves else in_place(stage, option, moved)
            for stage, option, at in zip(self.profile.stages, before, positions, strict=True)
        ]
        r = residency(self.profile, options, segments, positions)
        worst = peak(self.profile, options, r, moves.sendings)
        schedule = self._scheduled(options, segments, r, moves.sendings, worst.bytes)
        assert schedule is not None
        return schedule

    def binding(self, codes: Sequence[int], segments: Segments = ()) -> tuple[str, Phase]:
        """Stage and phase of the peak in the tightest schedule of one plan."""
        needs = self.tightest(np.array([codes], np.int8), segments)
        forward, backward, peak = needs.forward[0], needs.backward[0], int(needs.most()[0])
        if self.profile.update_peak_bytes > peak:
            return self.profile.stages[0].name, "update"
        if int(forward.max()) == peak:
            return self.profile.stages[int(forward.argmax())].name, "forward"
        # Backward runs from the last stage to the first: the first moment of the peak is at the highest stage.
        return self.profile.stages[int(np.flatnonzero(backward == peak)[-1])].name, "backward"


class _Tables:
    """Bytes and seconds of stages by code, given the segments around them.

    Parameters
    ----------
    evaluator : Evaluator
    segments : tuple of Segment
    plain : _Tables, optional
        Those without segments, from which only what stages in segments do otherwise is worked out anew.

    Attributes
    ----------
    forward, backward : array (stages + 1,)
        Changes of the bytes that are there whatever is decided, or as long as `gone_next` doesn't take them off.
    private_held, private_moved, private_copied : array (stages, codes)
        Bytes of storages that no other stage may hold; of those that move, those that are copied out.
    gone_next : array (stages, codes)
        Bytes that are gone from the forward step behind the stage on.
    gone_later : dict
        (step, stage) -> bytes by code that are gone from this later forward step on.
    lingering : list of (int, int, array, bool)
        Stage, last step and bytes by code of what the program holds until then, and whether it leaves without a copy.
    shared : list of _Shared
    own_forward, own_backward : array (stages, codes)
        Base bytes, and what the option adds on top.
    in_sweep : list of (int, int)
        Backward step, and what its sweep needs beside what is resident.
    backward_s, launch_s : array (stages, codes)
        `launch_s` is None if the host takes no time to launch.
    joined : array (stages + 1,)
        Per backward step, how many stages' copies have joined the lane when it starts.
    back_stop : array (stages,)
        The backward step from which on what the stage moves is away.
    """

    def __init__(self, evaluator: Evaluator, segments: Segments, plain: _Tables | None = None) -> None:
        self.evaluator = evaluator
        self.profile = evaluator.profile
        self.chain = evaluator.chain
        self.segments = segments
        n, width = len(self.profile.stages), evaluator._width
        self.n, self.width = n, width
        outer = rules.around(segments, n)
        needed = np.array([i if s is None else s.last for i, s in enumerate(outer)])
        self.joined = np.searchsorted(needed, np.arange(n + 1))
        self.back_stop = np.array([rules.backward_stop(n, int(last)) for last in needed])
        self.back_in_order = bool((self.back_stop == np.arange(n) + 1).all())
        self.in_sweep: list[tuple[int, int]] = []
        # Per stage in a segment and code, what it holds there.
        self.held = {
            i: [frozenset(rules.held(self.profile, i, option, segment)) for option in self.profile.stages[i].options]
            for i, segment in enumerate(outer)
            if segment is not None
        }
        if plain is None:
            self.build()
        else:
            self.change(plain)
        self.add_sweeps()

    def among(self, codes: frozenset[int]) -> NDArray[np.bool_]:
        """Per code, whether it is one of `codes`."""
        out = np.zeros(self.width, bool)
        out[list(codes)] = True
        return out

    def holds(self, s: int, holder: Holder) -> NDArray[np.bool_]:
        """Per code, whether the stage holds storage `s`."""
        inside = self.held.get(holder.stage)
        return self.among(frozenset(code for code in holder.holding if inside is None or s in inside[code]))

    def build(self) -> None:
        """Fill all tables."""
        n, stages = self.n, self.profile.stages
        self.forward = np.zeros(n + 1, np.int64)
        self.backward = np.zeros(n + 1, np.int64)
        self.private_held = np.zeros((n, self.width), np.int64)
        self.private_moved, self.private_copied, self.gone_next = np.zeros((3, n, self.width), np.int64)
        self.lingering: list[Lingering] = []
        self.gone_later: dict[tuple[int, int], NDArray[np.int64]] = {}
        for s, (storage, holders) in enumerate(zip(self.profile.storages, self.chain.holders, strict=True)):
            program = self.chain.program[s]
            if storage.nbytes == 0:
                continue
            self.forward[program.start] += storage.nbytes
            if storage.to_end:
                self.backward[0] += storage.nbytes
            elif len(holders) == 1:
                self.add_private(s, holders[0])
            elif not holders:
                self.forward[rules.forward_stop(program.stop, None, None)] -= storage.nbytes
        self.own_forward, self.own_backward = np.zeros((2, n, self.width), np.int64)
        self.backward_s, launch_s = np.zeros((2, n, self.width))
        for i, stage in enumerate(stages):
            for code, option in enumerate(stage.options):
                self.own_forward[i, code] = self.profile.base_forward_bytes[i] + option.forward_bytes
                self.own_backward[i, code] = self.profile.base_backward_bytes[i] + option.backward_bytes
                self.backward_s[i, code] = stage.backward_s + option.added_s
                launch_s[i, code] = stage.forward_launch_s + stage.backward_launch_s + option.launch_s
        self.launch_s = launch_s if launch_s.any() else None
        self.shared = [self.shared_by(group) for group in self.evaluator.shared]

    def change(self, plain: _Tables) -> None:
        """Take the tables without segments, and change what stages in segments do otherwise."""
        self.forward, self.backward = plain.forward, plain.backward.copy()
        self.private_held, self.private_moved = plain.private_held.copy(), plain.private_moved.copy()
        self.private_copied, self.gone_next = plain.private_copied.copy(), plain.gone_next.copy()
        self.lingering = [found for found in plain.lingering if found[0] not in self.held]
        self.gone_later = {(at, i): nbytes for (at, i), nbytes in plain.gone_later.items() if i not in self.held}
        for i in self.held:
            self.private_held[i] = self.private_moved[i] = self.private_copied[i] = self.gone_next[i] = 0
            for s in self.evaluator.private[i]:
                self.add_private(s, self.chain.holders[s][0])
        self.shared = []
        for group, indices in zip(plain.shared, self.evaluator.shared, strict=True):
            rows, columns = np.nonzero(np.isin(group.stages, list(self.held)))
            holds = group.holds.copy()
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
                s = indices[row]
                holds[row, column] = self.holds(s, self.chain.holders[s][column])
            self.shared.append(replace(group, holds=holds, fixes=group.fixes & holds))
        self.launch_s = None if plain.launch_s is None else plain.launch_s.copy()
        self.own_forward, self.own_backward = plain.own_forward, plain.own_backward.copy()
        self.backward_s = plain.backward_s.copy()

    def add_sweeps(self) -> None:
        """Add the time and bytes of sweeps, and the time that moving takes in segments."""
        for sweep in rules.sweeps_of(self.profile, self.segments):
            self.add_sweep(sweep)
        for segment in self.segments:
            inside = slice(segment.first, segment.last + 1)
            overhead_s, launching_s = self.evaluator.moving_s
            self.backward_s[inside] += overhead_s[inside]
            if self.launch_s is not None:
                self.launch_s[inside] += launching_s[inside]

    def add_private(self, s: int, holder: Holder) -> None:
        """A storage that one stage alone may hold."""
        storage, i = self.profile.storages[s], holder.stage
        holds = self.holds(s, holder)
        moves = holds & (i in self.chain.movers[s]) & self.among(holder.moving)
        gone = self.chain.program[s].stop
        held_stop = rules.held_stop(storage, self.n)
        moved_gone, held_gone = (rules.forward_stop(gone, held_stop, mover) for mover in (i, None))
        for stop, chosen in ((moved_gone, moves), (gone, ~holds), (held_gone, holds & ~moves)):
            if stop == self.n:
                continue
            if stop == i + 1:
                self.gone_next[i] += np.where(chosen, storage.nbytes, 0)
            else:
                at = self.gone_later.setdefault((stop, i), np.zeros(self.width, np.int64))
                at += np.where(chosen, storage.nbytes, 0)
        if (until := rules.there_until(storage, i, self.n)) > i:
            self.lingering.append((i, until, np.where(moves, storage.nbytes, 0), storage.on_host))
        self.private_held[i] += np.where(holds & rules.awaits_backward(storage), storage.nbytes, 0)
        self.private_moved[i] += np.where(moves, storage.nbytes, 0)
        self.private_copied[i] += np.where(moves, storage.copied_bytes, 0)

    def shared_by(self, group: Sequence[int]) -> _Shared:
        """Storages with equally many possible holders."""
        n, chain, storages = self.n, self.chain, self.profile.storages
        stops = [chain.program[s].stop for s in group]
        holds = np.array([[self.holds(s, holder) for holder in chain.holders[s]] for s in group])
        moves = np.array([[self.among(holder.moving) for holder in chain.holders[s]] for s in group])
        return _Shared(
            np.array([storages[s].nbytes for s in group]),
            np.array([storages[s].copied_bytes for s in group]),
            np.array(stops),
            np.array([[rules.forward_stop(stop, None, i) for i in range(n)] for stop in stops]),
            np.array([chain.movers[s].start for s in group]),
            np.array([chain.movers[s].stop for s in group]),
            np.array([[holder.stage for holder in chain.holders[s]] for s in group]),
            holds,
            holds & ~moves,
            tuple(
                (at, holder.stage, until, storages[s].on_host)
                for at, s in enumerate(group)
                for holder in chain.holders[s]
                if holder.stage in chain.movers[s]
                and (until := rules.there_until(storages[s], holder.stage, n)) > holder.stage
            ),
        )

    def add_sweep(self, sweep: rules.Sweep) -> None:
        """One sweep, after those around it (rules 6 and 7)."""
        stages, last = self.profile.stages, sweep.last
        for k, option in sweep.last_run:
            self.own_backward[k, :] = self.profile.base_backward_bytes[k] + option.backward_bytes
            self.backward_s[k, :] = stages[k].backward_s + option.added_s
            if self.launch_s is not None:
                self.launch_s[k, :] = stages[k].forward_launch_s + stages[k].backward_launch_s + option.launch_s
        for k, nbytes in sweep.held_from:
            self.backward[k] += nbytes
            self.backward[last + 1] -= nbytes
        if sweep.runs:
            # The bytes resident at `last` will have this sweep's copies in them; while it runs they come one by one.
            copies = sum(nbytes for _, nbytes in sweep.held_from)
            self.in_sweep.append((last, self.profile.base_backward_bytes[last] + sweep.most_bytes - copies))
        self.backward_s[last, :] += sweep.seconds
        if self.launch_s is not None:
            self.launch_s[last, :] += sweep.launch_s


def _fronts(
    needs: NDArray[np.int64],
    put: NDArray[np.int64],
    joined: NDArray[np.int64],
    budget_bytes: int,
    lingering: Sequence[Lingering] = (),
) -> NDArray[np.int64]:
    """Per step, the shortest prefix of the queue that must have left for the step to fit."""
    if lingering:  # what the program holds in a step doesn't leave by being copied
        put = put.copy()
        for i, _, nbytes, _ in lingering:
            put[:, i + 1 :] -= nbytes[:, None]
    rows, n = needs.shape
    index = np.arange(rows)
    front = np.zeros((rows, n), np.int64)
    now = np.zeros(rows, np.int64)
    for k in range(n):
        for i, until, nbytes, _ in lingering:
            if until == k - 1:
                put[:, i + 1 :] += nbytes[:, None]
        least = needs[:, k] + put[:, joined[k]] - budget_bytes
        while True:
            over = (put[index, now] < least) & (now < joined[k])
            if not over.any():
                break
            now += over
        front[:, k] = now
    return front


def _lanes(
    front: NDArray[np.int64],
    copy_s: NDArray[np.float64],
    joined: NDArray[np.int64],
    compute_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """`lane` of core/lanes.py for many plans: seconds, the wait for everything that moves included.

    Parameters
    ----------
    front : array (vectors, stages)
        Per step, how many stages' copies must be done before it starts.
    copy_s : array (vectors, stages)
        0 for what doesn't move.
    joined : array (stages + 1,)
        Per step, how many stages' copies have joined the queue when it starts.
    compute_s : array (vectors, stages)
    """
    rows, n = copy_s.shape
    index = np.arange(rows)
    done = np.zeros((rows, n + 1))
    now = np.zeros(rows)
    for k in range(n):
        now = np.maximum(now, done[index, front[:, k]]) + compute_s[:, k]
        for i in range(joined[k], joined[k + 1]):
            after = lanes.copied(now, done[:, i], copy_s[:, i], np.maximum)
            done[:, i + 1] = np.where(copy_s[:, i] > 0, after, done[:, i])
    return np.maximum(now, done[:, n])


def changed(codes: Sequence[int], changes: Sequence[Change]) -> Codes:
    """One row for each of `changes`: `codes` with it."""
    rows = np.tile(np.array(codes, np.int8), (len(changes), 1))
    for row, change in zip(rows, changes, strict=True):
        for i, code in change:
            row[i] = code
    return rows


def moved_bytes(sendings: Sendings) -> list[int]:
    """Return the bytes that each stage moves."""
    return [sum(sent.nbytes for sent in found) for found in sendings]


def copies_s(
    copied: NDArray[np.int64], moved: NDArray[np.int64], link: Link
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of each copy of `copied` bytes out and of `moved` bytes back; 0 where there are none."""
    out_s, in_s = link.out_s(copied), link.in_s(moved)  # type: ignore[arg-type] # of an array as of a number
    return np.where(copied > 0, out_s, 0.0), np.where(moved > 0, in_s, 0.0)


def _before(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums over the stages before each; shape (vectors, stages + 1)."""
    rows, n = sizes.shape
    out = np.zeros((rows, n + 1), np.int64)
    np.cumsum(sizes, axis=1, out=out[:, 1:])
    return out


def menus(profile: Profile, actions: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the codes of the options that use `actions` alone.

    Without those that could move something, and can't, if another does the same and costs no more.
    """

    def is_needed(stage: Stage, i: int, option: Option) -> bool:
        if not option.moves or rules.moves_any(profile, i, option):
            return True
        twin = in_place(stage, option, set())
        # In a segment "recompute" alone can take the place of what swaps its inputs.
        return twin is option or (option.name == "recompute+swap" and twin.name != "recompute")

    return tuple(
        tuple(
            code for code, option in enumerate(stage.options) if option.allowed(actions) and is_needed(stage, i, option)
        )
        for i, stage in enumerate(profile.stages)
    )
