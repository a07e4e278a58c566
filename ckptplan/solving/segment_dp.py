"""Nothing moves: the dynamic program over kept stages and nested segments, exact on textbook chains.

Symbols, after Beaumont et al. (2019). `m`: bytes of the budget that nothing decided so far holds, in units; the
boundary in front of the stage at hand (x, the previous stage's output) counts as held.

I(s, t, m): least recompute seconds of the stages s..t of a sweep, which runs just before backward t:

    t alone:          0                                                its recompute is counted where the segment is
    keep s:           I(s+1, t, m - p_s)                               p: what keeping it holds, the next x included
    segment s..e:     r(s, e) + I(e+1, t, m - x_{e+1}) + I(s, e, m)    r: run s..e-1 again, and e's recompute

T(s, m): the same for the stages s..L-1 of a whole step, where an option of the menu may stand for each stage by itself,
and forward runs in forward. A way is open from that m on with which every step it decides about fits.

Each storage is counted once where the chain is a textbook one: what recompute holds is what it is linked to of the
stage before, and nothing else is shared. Then at exact units this is the optimum over keep, recompute, options of the
menu that move nothing, and nested segments. Richer chains are mapped to one: what a stage holds whatever is decided is
resident from there on, glue is kept, and the rest counts once per stage. There bytes are an estimate, so plans for
budgets around the one asked for are evaluated, and the evaluator has the last word.

Repetition. I(s, t, m) depends on the kinds and sizes of the stages s..t, and on the bases of their backward steps. Of
two runs of stages that differ in nothing but a constant added to the bases, one is the other shifted by it. So equal
runs share a row, kept once, and with n equal stages the time is O(span**2 x units + n x span x units).

Reference
---------
O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how
to train deep neural networks with limited memory", INRIA RR-9302, arXiv 1911.13214 (2019). O(stages x span**2 x units)
time and O(stages x span x units) memory at most, where no segment is longer than `span`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ckptplan.core import rules
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.solving.chain import Chain
from ckptplan.solving.cost import Menu, Segments
from ckptplan.solving.enumerate import PlanSpace

CALL_ADDITIONS = 3000
"""A call of numpy takes as long as this many additions."""
REACH = 1.25
"""Tables whose bytes are an estimate go up to this many times the budget."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Textbook:
    """A profile as the program sees it; bytes per stage, options by code."""

    base_forward: tuple[int, ...]
    base_backward: tuple[int, ...]
    boundary: tuple[int, ...]
    kept: tuple[int, ...]
    held: tuple[dict[int, int], ...]
    textbook: bool


def _textbook_of(chain: Chain, menu: Menu) -> _Textbook:
    profile, n = chain.profile, chain.n
    stages, storages = profile.stages, profile.storages
    before: list[int] = []
    module = -1
    for k, stage in enumerate(stages):
        before.append(module)
        module = module if stage.is_glue else k
    near = [
        {s for s in stage.linked if storages[s].born == before[k] and not storages[s].to_end}
        for k, stage in enumerate(stages)
    ]
    passing = {s for s, storage in enumerate(storages) if not rules.awaits_backward(storage)}  # left out
    always: dict[int, int] = {}
    for k, stage in enumerate(stages):
        held = set(stage.keep.held) - passing
        if stage.recompute is not None:
            held &= set(stage.recompute.held)
        for s in held - near[k]:
            always.setdefault(s, k)
    # The boundary behind each stage: what the next module is linked to of it.
    behind: list[set[int]] = [set() for _ in range(n)]
    upcoming: set[int] = set()
    boundary = [0] * n
    for k in reversed(range(n)):
        behind[k] = upcoming
        if not stages[k].is_glue:
            upcoming = near[k] - always.keys()
        boundary[k] = sum(storages[s].nbytes for s in upcoming)
    forward, backward = [0] * (n + 1), [0] * (n + 1)
    reader = {s: k for k in range(n) for s in near[k] if s not in always}
    for s, (storage, program) in enumerate(zip(storages, chain.program, strict=True)):
        begin = reader[s] + 1 if s in reader else program.start
        end = rules.forward_stop(program.stop, n if s in always else None, None)
        if begin < end:
            forward[begin] += storage.nbytes
            forward[end] -= storage.nbytes
        if storage.to_end or s in always:
            backward[0 if storage.to_end else always[s]] += storage.nbytes
    by_code = tuple(
        {
            code: sum(
                storages[s].nbytes
                for s in (set(stage.options[code].held) - near[k] - always.keys() - passing)
                | (set() if stage.is_glue else behind[k])
                if not storages[s].to_end
            )
            for code in {0, *menu[k]}
        }
        for k, stage in enumerate(stages)
    )
    return _Textbook(
        tuple(int(b + r) for b, r in zip(profile.base_forward_bytes, np.cumsum(forward), strict=False)),
        tuple(int(b + r) for b, r in zip(profile.base_backward_bytes, np.cumsum(backward), strict=False)),
        tuple(boundary),
        tuple(codes[0] for codes in by_code),
        by_code,
        _is_textbook(profile, near, behind, menu) and not always and not passing,
    )


def _is_textbook(profile: Profile, near: list[set[int]], behind: list[set[int]], menu: Menu) -> bool:
    """Whether every byte is counted exactly once, where it is."""
    storages, stages = profile.storages, profile.stages
    reader = {s: k for k in range(len(stages)) for s in near[k]}
    if any(s.to_end or s.program_until > reader.get(i, max(s.born, 0)) for i, s in enumerate(storages)):
        return False
    for k, stage in enumerate(stages):
        if stage.is_glue or stage.recompute is None or set(stage.recompute.held) != near[k]:
            return False
        for code in menu[k]:
            held = set(stage.options[code].held)
            own = held - near[k]
            if not near[k] <= held or any(storages[s].born != k for s in own):
                return False
        if not behind[k] <= set(stage.keep.held):
            return False
    return True


_Row = tuple[Floats, int]
"""A row of a table and the units by which it is shifted."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A stage by itself under option `code`, or a segment up to `last`; -1 for the other.

    `held` units are taken from what is left, at least `first` must be left, and `tables` add up to what follows, each
    a row and by how many units it is shifted.
    """

    code: int
    last: int
    held: int
    first: int
    seconds: float
    tables: tuple[_Row, ...]

    def at(self, m: int) -> float:
        """Seconds with `m` units left."""
        if m < self.begin:
            return math.inf
        return float(sum(row[m - self.held - shift] for row, shift in self.tables)) + self.seconds

    @property
    def begin(self) -> int:
        """The fewest units with which this is possible, as far as rows know no less."""
        return max(self.first, self.held + max(0, *(shift for _, shift in self.tables)))


class SegmentDp:
    """Tables for every budget up to a limit.

    Parameters
    ----------
    space : PlanSpace
    limit_bytes : int
        The largest budget asked for.
    max_work : int, optional
        Most additions, `still_additions` of the space's parameters where left out: fewer make segments shorter.

    Attributes
    ----------
    exact : bool
        Whether its plans are the optimum where nothing moves.
    """

    def __init__(self, space: PlanSpace, limit_bytes: int, *, max_work: int | None = None) -> None:
        self.space, self.profile = space, space.profile
        self.menu = [
            tuple(c for c in codes if not stage.options[c].moves)
            for codes, stage in zip(space.menu, self.profile.stages, strict=True)
        ]
        self.mapped = _textbook_of(space.chain, self.menu)
        n = self.n = len(self.menu)
        self.floor = min(*self.mapped.base_forward, *self.mapped.base_backward)
        limit = max((limit_bytes if self.mapped.textbook else int(limit_bytes * REACH)) - self.floor, 0)
        unit = math.gcd(*self._sizes()) or 1
        most = max(1, space.parameters.units)
        exact = limit // unit <= most
        self.unit = unit if exact else -(-limit // most)
        self.units = limit // self.unit + 1
        self.span = n if space.segments else 0
        self._tell_apart(space.parameters.still_additions if max_work is None else max_work)
        self.exact = exact and self.mapped.textbook and self.span in (0, n)
        self._known: dict[int, list[_Way]] = {}

    def _sizes(self) -> list[int]:
        c = self.mapped
        sizes = [b - self.floor for b in (*c.base_forward, *c.base_backward)] + [*c.boundary]
        for k, stage in enumerate(self.profile.stages):
            sizes += c.held[k].values()
            for option in stage.options:
                sizes += [option.forward_bytes, option.backward_bytes]
        return sizes

    def _up(self, nbytes: int) -> int:
        """Units that hold `nbytes`."""
        return -(-nbytes // self.unit)

    def _again(self, k: int) -> tuple[int, int, float]:
        """Forward and backward bytes and seconds of recomputing stage `k`."""
        again = self.profile.stages[k].recompute
        assert again is not None
        return again.forward_bytes, again.backward_bytes, again.added_s

    def run(self, deadline: float) -> bool:
        """Fill the tables; False where `deadline` (by `time.monotonic()`) comes first."""
        n, units = self.n, self.units
        self._prepare()
        self.rows: list[Floats] = []
        for length, firsts in enumerate(self.new):
            for s in firsts:
                if time.monotonic() > deadline:
                    return False
                self.rows.append(self._inner_row(s, s + length))
        self.top = np.full((n + 1, units), np.inf)
        self.top[n] = 0.0
        self.top_after = np.full((n + 1, units), np.inf)
        self.top_after[n] = 0.0
        for s in reversed(range(n)):
            if time.monotonic() > deadline:
                return False
            best = np.full(units, np.inf)
            for way in self._ways(s):
                begin = way.begin
                if begin < units:
                    part = np.full(units - begin, way.seconds)
                    for row, by in way.tables:
                        part += row[begin - way.held - by : units - way.held - by]
                    np.minimum(best[begin:], part, out=best[begin:])
            self.top[s] = best
            self.top_after[s] = self._shift(best, self.x[s])
        return True

    def _tell_apart(self, max_work: int) -> None:
        """Find the runs of stages that share a row, and the longest runs for which the rows stay few.

        `which[t - s][s]` is the row of the run s..t, `by[t - s][s]` the units it is shifted by, and `new[length]` has
        the first stages of the runs that rows are made for. The last one of equal runs has its own, since there the
        bases are smallest and the row reaches furthest; where they are not, more than one has.
        """
        chain, stages, n = self.mapped, self.profile.stages, self.n
        base = chain.base_backward
        steps = [0, *(b - a for a, b in pairwise(base))]
        ids: dict[tuple[object, ...], int] = {}

        def number(key: tuple[object, ...]) -> int:
            return ids.setdefault(key, len(ids))

        def alike(k: int) -> tuple[object, ...]:
            stage, again = stages[k], stages[k].recompute
            return (
                stage.kind,
                stage.is_glue,
                bool(self.space.inside[k]),
                chain.boundary[k],
                chain.kept[k],
                stage.rerun_s,
                stage.keep.forward_bytes,
                stage.keep.backward_bytes,
                (again.forward_bytes, again.backward_bytes, again.added_s) if again is not None else None,
            )

        of_stage = [number(("stage", *alike(k))) for k in range(n)]
        now = list(of_stage)
        self.which: list[NDArray[np.int64]] = []  # by length and first stage: its row
        self.by: list[NDArray[np.int64]] = []  # and the row's shift
        self.new: list[list[int]] = []
        count, work = 0, 0
        for length in range(self.span):
            firsts: list[int] = []
            made: dict[int, tuple[int, int]] = {}
            which, by = np.zeros((2, n - length), np.int64)
            for s in reversed(range(n - length)):
                t = s + length
                if length:
                    now[s] = number((now[s], steps[t], of_stage[t]))
                at = self._up(base[t] - self.floor)
                row = made.get(now[s])
                if row is None or row[1] > at:
                    row = made[now[s]] = (count + len(firsts), at)
                    firsts.append(s)
                which[s], by[s] = row[0], at - row[1]
            count += len(firsts)
            work += (len(firsts) * length + n - length) * (self.units + CALL_ADDITIONS)
            nbytes = count * self.units * np.dtype(float).itemsize
            if length and (nbytes > self.space.parameters.additions or work > max_work):
                self.span = length
                break
            self.new.append(firsts)
            self.which.append(which)
            self.by.append(by)

    def _row(self, s: int, t: int, less: int = 0) -> _Row:
        """I(s, t, m - less) for each m, as a row and its shift."""
        return self.rows[self.which[t - s][s]], int(self.by[t - s][s]) + less

    def _value(self, s: int, t: int, m: int) -> float:
        row, by = self._row(s, t)
        return float(row[m - by]) if m >= by else math.inf

    def _prepare(self) -> None:
        chain, stages = self.mapped, self.profile.stages
        self.x = [self._up(b) for b in chain.boundary] + [0]
        self.p = [self._up(b) for b in chain.kept]
        can = [bool(self.space.inside[k]) and not stages[k].is_glue for k in range(self.n)]
        self.can = can
        # Per stage: what a run in a sweep needs on top of the base, apart from the boundary in front of it.
        self.run_bytes = [self._again(k)[0] if can[k] else 0 for k in range(self.n)]
        self.glue_bytes = [chain.kept[k] if stages[k].is_glue else 0 for k in range(self.n)]
        # Most bytes of any run of s..e, at base 0, and with its own base in forward.
        self.most_run = np.zeros((self.n, max(self.span, 1)), np.int64)
        self.most_forward = np.zeros((self.n, max(self.span, 1)), np.int64)
        self.again_total = np.zeros((self.n, max(self.span, 1)))
        self.glue_held = np.zeros((self.n, max(self.span, 1)), np.int64)
        self.valid = np.zeros((self.n, max(self.span, 1)), bool)
        for s in range(self.n):
            if not can[s]:
                continue
            most = forward = glue = 0
            seconds = 0.0
            for e in range(s, min(self.n, s + self.span)):
                if not can[e] and not stages[e].is_glue:
                    break
                own = (chain.boundary[e] if e > s else 0) + self.run_bytes[e]
                if stages[e].is_glue:
                    own = stages[e].keep.forward_bytes
                    glue += self.glue_bytes[e]
                else:
                    most = max(most, own)
                forward = max(forward, chain.base_forward[e] + own + glue)
                self.most_run[s, e - s], self.most_forward[s, e - s] = most, forward
                self.glue_held[s, e - s] = glue
                if can[e]:
                    self.valid[s, e - s] = True
                    self.again_total[s, e - s] = seconds + self._again(e)[2]
                seconds += stages[e].rerun_s

    def _shift(self, value: Floats, by: int) -> Floats:
        """`value` with `by` fewer units."""
        out = np.full(self.units, np.inf)
        if by < self.units:
            out[by:] = value[: self.units - by]
        return out

    def _from(self, value: Floats, nbytes: int) -> Floats:
        """`value` where no fewer than `nbytes`, the floor included, are left."""
        out = value.copy()
        out[: self._first(nbytes)] = np.inf
        return out

    def _inner_row(self, s: int, t: int) -> Floats:
        chain, stages = self.mapped, self.profile.stages
        if stages[s].is_glue:
            if s == t:
                return np.full(self.units, np.inf)
            need = chain.base_backward[s] + stages[s].keep.backward_bytes
            return self._from(self._shift(*self._row(s + 1, t)), need)
        if not self.can[s]:
            return np.full(self.units, np.inf)
        if s == t:
            return self._from(np.zeros(self.units), chain.base_backward[t] + self._again(t)[1])
        keep = stages[s].keep
        need = max(
            chain.base_backward[t] + keep.forward_bytes, chain.base_backward[s] + chain.kept[s] + keep.backward_bytes
        )
        best = self._from(self._shift(*self._row(s + 1, t, self.p[s])), need)
        for e in range(s, t):
            if not self.valid[s, e - s]:
                continue
            (inner, a), (after, b) = self._row(s, e), self._row(e + 1, t, self.x[e + 1])
            begin = max(self._first(chain.base_backward[t] + int(self.most_run[s, e - s])), a, b)
            if begin < self.units:
                total = inner[begin - a : self.units - a] + after[begin - b : self.units - b]
                total += self.again_total[s, e - s]
                np.minimum(best[begin:], total, out=best[begin:])
        return best

    def _ways(self, s: int) -> list[_Way]:
        """Return the ways in which the step can go on from stage `s`."""
        found = self._known.get(s)
        if found is not None:
            return found
        chain, stage = self.mapped, self.profile.stages[s]
        ways = self._known[s] = []
        for code in self.menu[s]:
            option = stage.options[code]
            held = chain.held[s][code]
            need = max(
                chain.base_forward[s] + option.forward_bytes,
                chain.base_backward[s] + held - self._next(s, code) + option.backward_bytes,
            )
            ways.append(_Way(code, -1, self._up(held), self._first(need), option.added_s, ((self.top[s + 1], 0),)))
        for last in self.space.ends(s, s + 1, min(self.n, s + self.span)):
            length = last - s
            ways.append(
                _Way(
                    -1,
                    last,
                    self._up(int(self.glue_held[s, length])),
                    self._first(int(self.most_forward[s, length])),
                    float(self.again_total[s, length]),
                    ((self.top_after[last + 1], 0), self._row(s, last)),
                )
            )
        return ways

    def _first(self, nbytes: int) -> int:
        """The fewest units with which `nbytes`, the floor included, fit."""
        return max(0, self._up(nbytes - self.floor))

    def _next(self, s: int, code: int) -> int:
        """Bytes of the boundary behind stage `s` that the option itself doesn't hold: not there in its backward."""
        if s + 1 >= self.n or self.profile.stages[s].is_glue:
            return 0
        held = set(self.profile.stages[s].options[code].held)
        k = next((k for k in range(s + 1, self.n) if not self.profile.stages[k].is_glue), None)
        if k is None:
            return 0
        storages = self.profile.storages
        return sum(storages[x].nbytes for x in self.profile.stages[k].linked if storages[x].born == s and x not in held)

    def plan(self, budget_bytes: int) -> tuple[tuple[int, ...], Segments] | None:
        """The plan for a budget up to the limit; None where nothing fits."""
        m = (budget_bytes - self.floor) // self.unit
        if m < 0 or not np.isfinite(self.top[0, min(m, self.units - 1)]):
            return None
        m = min(m, self.units - 1)
        codes = [0] * self.n
        segments: list[Segment] = []
        s = 0
        while s < self.n:
            way = min(self._ways(s), key=lambda way: way.at(m))
            last, m = way.last, m - way.held
            if last < 0:
                codes[s] = way.code
                s += 1
                continue
            segments.append(Segment(s, last, self._sweep(s, last, m)))
            for k in range(s, last + 1):
                codes[k] = self.space.recompute(k)
            m -= self.x[last + 1]
            s = last + 1
        return tuple(codes), tuple(segments)

    def added_s(self, budget_bytes: int) -> float:
        """Seconds of recompute of the plan for a budget; infinite where nothing fits."""
        m = (budget_bytes - self.floor) // self.unit
        return float(self.top[0, min(m, self.units - 1)]) if m >= 0 else math.inf

    def least_bytes(self) -> int | None:
        """The smallest budget that the tables have a plan for; None where there is none up to the limit."""
        fits = np.isfinite(self.top[0])
        return self.floor + int(fits.argmax()) * self.unit if fits.any() else None

    def _sweep(self, s: int, t: int, m: int) -> Segments:
        """The inner segments that I(s, t, m) stands for."""
        found: list[Segment] = []
        while s < t:
            if self.profile.stages[s].is_glue:
                s += 1
                continue
            value = self._value(s, t, m)
            for e in range(s, t):
                first = self._first(self.mapped.base_backward[t] + int(self.most_run[s, e - s]))
                if not self.valid[s, e - s] or m < first or m < self.x[e + 1]:
                    continue
                way = self._value(s, e, m) + self._value(e + 1, t, m - self.x[e + 1]) + self.again_total[s, e - s]
                if way <= value:
                    found.append(Segment(s, e, self._sweep(s, e, m)))
                    m -= self.x[e + 1]
                    s = e + 1
                    break
            else:
                m -= self.p[s]
                s += 1
        return tuple(found)
