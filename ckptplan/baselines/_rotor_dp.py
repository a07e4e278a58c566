"""Independent of core/rules.py and the solver's segment program on purpose: the dynamic program of rotor and POFO.

Tests hold `solving/segment_dp.py` against it.

Symbols. `m`: bytes of the budget not yet held by earlier decisions, in units, the boundary in front of `s` counted as
held. E(s, t, m): least recompute seconds with which stages s..t can be run forward, t at once backward, and then the
others backward, within m; infinite where they can't. It is taken over two ways to go on from s:

    keep s:           E(s+1, t, m - p_s)
    segment s..e:     r(s, e) + E(e+1, t, m - x_{e+1}) + E(s, e, m)      for s <= e < t

where p_s is what keeping s holds, x_k the boundary in front of stage k (the previous one's output), and r(s, e) the
time to run s..e again once, e's own recompute included. E(s, e, m) is then the sweep of the segment: run s..e once
more, and choose again for each. Stage t itself is always kept: its backward follows at once. Each way is open from
that m on at which all its steps fit: forward ones against the bytes at the last step before which they run (a sweep
runs just before backward t), backward ones against their own.

One step's bytes = base + boundaries and kept sets held + what the stage's option adds, as NOTE [Residency] has it, so
on `Profile.from_chain` the table is exact and its plan is the optimum over keep, recompute and nested segments.
Richer chains are mapped:

- A storage that some stage holds whether it is kept or recomputed (masks, skip connections, what glue made) is
  resident from there on, whatever is decided.
- The boundary is what a module stage is linked to of the module stage right before it. Other links count as held.
- Glue is kept and isn't run again; a stage that can't be recomputed is kept and in no segment.
- A kept stage is charged with the boundary behind it even where no stage saves it.

This counts too much here and too little there (what only recompute holds, for one), so on richer chains the table's
plans are replayed, and those which truly fit are what counts (`rotor.plan`).

Reference
---------
O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", INRIA RR-9302, arXiv 1911.13214 (2019). O(stages**3 x units) time,
O(stages**2 x units) memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ckptplan.baselines._build import Selection, named
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment

MAX_UNITS = 4000
"""Largest number of memory units in a table; beyond it every size is rounded up to a coarser unit."""
MAX_CELLS = 48_000_000
"""Largest number of table entries, two of 8 bytes each: beyond it units get coarser, down to `MIN_UNITS`."""
MIN_UNITS = 100
UNITS_TRIED = 500
"""Number of coarse units to choose among."""


class RotorChain:
    """A profile as the dynamic program sees it; bytes, one entry per stage unless said otherwise.

    Attributes
    ----------
    links : list of set of int
        Storages of the module stage in front of it that the stage is linked to.
    dropped : set of int
        Storages of graphs that are dropped in forward, which are left out.
    always : dict
        Storage -> the first stage that holds it whatever is decided.
    nexts : list of set of int
        The boundary behind a module stage.
    forward_base, backward_base : list of int
        Resident at the start of the step whatever is decided.
    boundary : list of int
        x: bytes of the previous module stage's output held in front of the stage; glue passes on those behind it.
    kept : list of int
        p: bytes that keeping the stage holds, the boundary behind it included.
    keep_forward, keep_backward, again_forward, again_backward : list of int
        Bytes that the stage's step adds under keep and under recompute.
    rerun_s, again_s : list of float
        Time of its run in a sweep, and of its recompute in front of its backward.
    can : list of bool
        Whether it may be recomputed. Glue may lie in a segment, but neither begins nor ends one.
    glue : list of bool
    textbook : bool
        Nothing was approximated, as for `Profile.from_chain`.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        stages, storages = profile.stages, profile.storages
        self.links: list[set[int]] = []
        last: int | None = None
        for i, stage in enumerate(stages):
            self.links.append({s for s in stage.linked if storages[s].born == last and not storages[s].to_end})
            last = last if stage.is_glue else i
        self.linked_next = {s: i for i, linked in enumerate(self.links) for s in linked}
        self.dropped = {s for s, storage in enumerate(storages) if storage.graph_until is not None}
        self.always: dict[int, int] = {}
        for i, stage in enumerate(stages):
            held = set(stage.keep.held) - self.dropped
            if stage.recompute is not None:
                held &= set(stage.recompute.held)
            for s in held - self.links[i]:
                self.always.setdefault(s, i)
        self.nexts: list[set[int]] = [set() for _ in stages]
        self.boundary = [0] * len(stages)
        upcoming: set[int] = set()
        for i in reversed(range(len(stages))):
            if not stages[i].is_glue:
                self.nexts[i], upcoming = upcoming, self.links[i] - self.always.keys()
            self.boundary[i] = self.size(upcoming)
        self.kept = self._kept()
        self.forward_base, self.backward_base = self._resident()
        self.keep_forward = [stage.keep.forward_bytes for stage in stages]
        self.keep_backward = [stage.keep.backward_bytes for stage in stages]
        again = [stage.recompute or stage.keep for stage in stages]
        self.again_forward = [option.forward_bytes for option in again]
        self.again_backward = [option.backward_bytes for option in again]
        self.rerun_s = [stage.rerun_s for stage in stages]
        self.again_s = [option.added_s for option in again]
        self.can = [not stage.is_glue and stage.recompute is not None for stage in stages]
        self.glue = [stage.is_glue for stage in stages]
        self.textbook = self._is_textbook()

    def size(self, found: set[int]) -> int:
        """Bytes of these storages together."""
        return sum(self.profile.storages[s].nbytes for s in found)

    def _resident(self) -> tuple[list[int], list[int]]:
        """Base bytes, and those there whatever is decided, at the start of each forward and each backward step."""
        n = len(self.links)
        forward, backward = [0] * (n + 1), [0] * (n + 1)
        for s, storage in enumerate(self.profile.storages):
            # A boundary is counted as one up to the module that is linked to it.
            is_boundary = s in self.linked_next and s not in self.always
            begin = self.linked_next[s] + 1 if is_boundary else storage.born + 1
            end = n if storage.to_end or s in self.always else min(storage.program_until + 1, n)
            if begin < end:
                forward[begin] += storage.nbytes
                forward[end] -= storage.nbytes
            if storage.to_end or s in self.always:
                backward[0 if storage.to_end else self.always[s]] += storage.nbytes
        bases = self.profile.base_forward_bytes, self.profile.base_backward_bytes
        forward_base, backward_base = (
            [base + resident for base, resident in zip(of, accumulate(changes), strict=False)]
            for of, changes in zip(bases, (forward, backward), strict=True)
        )
        return forward_base, backward_base

    def _kept(self) -> list[int]:
        """Per stage, bytes that keeping it holds, each storage counted once."""
        storages = self.profile.storages
        sizes, counted = [], {*self.always, *self.dropped, *(s for s, x in enumerate(storages) if x.to_end)}
        for i, stage in enumerate(self.profile.stages):
            mine = (set(stage.keep.held) | self.nexts[i]) - counted - (self.links[i] - self.always.keys())
            counted |= mine
            sizes.append(0 if stage.is_glue else self.size(mine))
        return sizes

    def _is_textbook(self) -> bool:
        """Whether nothing is approximated."""
        storages = self.profile.storages
        return (
            not self.always
            and not self.dropped
            and not any(
                storage.to_end or storage.program_until > self.linked_next.get(s, max(storage.born, 0))
                for s, storage in enumerate(storages)
            )
            and all(
                not stage.is_glue
                and stage.recompute is not None
                and set(stage.recompute.held) == self.links[i] <= set(stage.keep.held)
                and all(storages[s].born == i for s in set(stage.keep.held) - self.links[i])
                and self.nexts[i] <= set(stage.keep.held)
                for i, stage in enumerate(self.profile.stages)
            )
        )


def _coarse_unit(least: int, sizes: Iterable[int]) -> int:
    """The unit from `least` to twice that which rounds `sizes` up by the fewest bytes in all."""
    found = [size for size in sizes if size]
    # Those that divide some size without rest, or nearly.
    units = {least, *(-(-size // count) for size in set(found) for count in range(1, 1 + size // least))}
    tried = sorted(unit for unit in units if least <= unit <= 2 * least)
    tried = tried[:: -(-len(tried) // UNITS_TRIED)]
    return min(tried, key=lambda unit: sum(-(-size // unit) for size in found) * unit)


class Table:
    """E(s, t, m) for every s <= t and every m up to a limit.

    Parameters
    ----------
    profile : Profile
    limit_bytes : int
        Largest budget asked for; the table answers every smaller one too.
    max_units : int
        Most memory units.
    """

    def __init__(self, profile: Profile, limit_bytes: int, *, max_units: int = MAX_UNITS) -> None:
        self.profile = profile
        self.chain = chain = RotorChain(profile)
        n = self.n = len(chain.kept)
        # Bytes that are there under every plan are subtracted first: they are most of a real model's bytes.
        self.floor = floor = min(*chain.forward_base, *chain.backward_base)
        limit = max(limit_bytes - floor, 0)
        self.unit = math.gcd(
            *(b - floor for b in (*chain.forward_base, *chain.backward_base)), *chain.boundary, *chain.kept,
            *chain.keep_forward, *chain.keep_backward, *chain.again_forward, *chain.again_backward,
        ) or 1  # fmt: skip
        most = max(min(max_units, MAX_CELLS // (n * n)), MIN_UNITS)
        self.exact = limit // self.unit <= most
        if not self.exact:
            self.unit = _coarse_unit(-(-limit // most), [*chain.kept, *chain.boundary])
        self.units = limit // self.unit
        base_f, base_b = ([base - floor for base in bases] for bases in (chain.forward_base, chain.backward_base))
        self.x, self.p = self._up(chain.boundary), self._up(chain.kept)
        self._base_b = self._up(base_b)
        self._keep_f, self._again_f = self._up(chain.keep_forward), self._up(chain.again_forward)
        # Whole steps: the first pass over the chain, and the backward of a stage that is kept or the last of a sweep.
        self._keep_up = self._up(map(sum, zip(base_f, chain.keep_forward, strict=True)))
        self._again_up = self._up(map(sum, zip(base_f, chain.again_forward, strict=True)))
        self._down = self._up(map(sum, zip(base_b, chain.keep_backward, strict=True)))
        self._last_down = self._up(map(sum, zip(base_b, chain.again_backward, strict=True)))
        self._sums = np.concatenate([[0.0], np.cumsum(chain.rerun_s)])
        blocked = np.cumsum([0, *(not can and not glue for can, glue in zip(chain.can, chain.glue, strict=True))])
        # Per first stage, one past the last that a segment from there can reach.
        self._reach = [
            int(np.searchsorted(blocked, blocked[s], side="right")) - 1 if chain.can[s] else s for s in range(n)
        ]
        self._again_s = np.array([s if can else math.inf for s, can in zip(chain.again_s, chain.can, strict=True)])
        self._fill()

    def _up(self, sizes: Iterable[int]) -> list[int]:
        return [-(-size // self.unit) for size in sizes]

    def _fill(self) -> None:
        n, width = self.n, self.units + 1
        # E[s][t - s] = E(s, t, .), and moved[t][s] = E(s, t, . - x_s), so that both sums run over whole rows.
        self._rows = [np.full((n - s, width), math.inf) for s in range(n)]
        self._moved = [np.full((t + 1, width), math.inf) for t in range(n)]
        for s in reversed(range(n)):
            for t in range(s, n):
                row = self._rows[s][t - s]
                if s == t:
                    row[self._need_last(t) :] = 0.0
                else:
                    need = self._need_keep(s, t)
                    if need < width:
                        row[need:] = self._rows[s + 1][t - s - 1][need - self.p[s] : width - self.p[s]]
                    ends = self._ends(s, t)
                    if len(ends):
                        self._segments(s, t, ends, row)
                shift = self.x[s]
                if shift < width:
                    self._moved[t][s, shift:] = row[: width - shift]

    def _segments(self, s: int, t: int, ends: range, row: NDArray[np.float64]) -> None:
        stop = ends.stop
        total = self._moved[t][s + 1 : stop + 1] + self._rows[s][: stop - s]
        total += self._runs_s(s, stop)[:, None]
        for e, need in zip(ends, self._needs_segment(s, t, stop), strict=True):
            total[e - s, :need] = math.inf
        np.minimum(row, total.min(axis=0), out=row)

    def reach(self, s: int) -> int:
        """One past the last stage that a segment from `s` may have; `s` itself where none may begin."""
        return self._reach[s]

    def _ends(self, s: int, t: int) -> range:
        """Last stages that a segment from `s` may have within s..t-1."""
        return range(s, min(self._reach[s], t))

    def _runs_s(self, s: int, stop: int) -> NDArray[np.float64]:
        """r(s, e) for e in s..stop-1; infinite where e can't end a segment."""
        return np.asarray(self._sums[s:stop] - self._sums[s] + self._again_s[s:stop])

    def _need_last(self, t: int) -> int:
        """Units that stage t takes, kept, with its backward at once."""
        if t == self.n - 1:
            return max(self._keep_up[t], self._down[t] + self.p[t])
        return self._last_down[t]

    def _need_keep(self, s: int, t: int) -> int:
        """Units for keeping s in front of s+1..t."""
        down = self._down[s] + self.p[s]
        if t == self.n - 1:
            return max(self._keep_up[s], down, self.p[s])
        up = 0 if self.chain.glue[s] else self._base_b[t] + self._keep_f[s]
        return max(up, down, self.p[s])

    def _needs_segment(self, s: int, t: int, stop: int) -> list[int]:
        """Units for the first runs of segments s..e, e in s..stop-1, in front of e+1..t."""
        needs, worst = [], 0
        for k in range(s, stop):
            transit = self.x[k] if k > s else 0
            if t == self.n - 1:
                worst = max(worst, transit + self._again_up[k])
            elif not self.chain.glue[k]:
                worst = max(worst, transit + self._base_b[t] + self._again_f[k])
            needs.append(worst)
        return needs

    def row(self, s: int, t: int) -> NDArray[np.float64]:
        """E(s, t, .), one entry per m."""
        found: NDArray[np.float64] = self._rows[s][t - s]
        return found

    def fits_from(self, m: int) -> list[int]:
        """Each smallest m' <= m at which the whole chain gets slower than with one unit more, largest first."""
        row = self.row(0, self.n - 1)[: m + 1]
        finite = np.flatnonzero(np.isfinite(row))
        if not len(finite):
            return []
        steps = np.flatnonzero(row[finite[0] + 1 :] < row[finite[0] : -1]) + finite[0] + 1
        return [int(v) for v in (*steps[::-1], finite[0])]

    def parts(self, s: int, t: int, m: int) -> list[tuple[int, int, int]]:
        """Segments of the best way through s..t within m: first, last, and the m of its sweep."""
        found = []
        while s < t:
            best, end = math.inf, None
            if m >= self._need_keep(s, t):
                best = float(self._rows[s + 1][t - s - 1][m - self.p[s]])
            ends = self._ends(s, t)
            if len(ends):
                total = self._moved[t][s + 1 : ends.stop + 1, m] + self._rows[s][: ends.stop - s, m]
                total = total + self._runs_s(s, ends.stop)
                total[np.array(self._needs_segment(s, t, ends.stop)) > m] = math.inf
                e = int(total.argmin())
                if total[e] < best:
                    end = s + e
            if end is None:
                m -= self.p[s]
                s += 1
            else:
                found.append((s, end, m))
                m -= self.x[end + 1]
                s = end + 1
        return found

    def segment(self, first: int, last: int, m: int) -> Segment:
        """The best segment over `first..last` whose sweep has m; without recursion, since chains can nest deeply."""
        # Parents come before their inner segments, so building from the end finds the inner ones ready.
        todo: list[tuple[int, int, int, int]] = [(first, last, m, -1)]
        for at, (a, b, within, _) in enumerate(todo):
            todo.extend((x, y, more, at) for x, y, more in self.parts(a, b, within))
        inner: list[list[Segment]] = [[] for _ in todo]
        for at in reversed(range(1, len(todo))):
            a, b, _, parent = todo[at]
            inner[parent].append(Segment(a, b, tuple(sorted(inner[at], key=lambda item: item.first))))
        return Segment(first, last, tuple(sorted(inner[0], key=lambda item: item.first)))

    def selection(self, m: int) -> Selection:
        """Options and segments of the whole chain's best plan within m, which must be feasible."""
        names = ["keep"] * self.n
        segments = [self.segment(*part) for part in self.parts(0, self.n - 1, m)]
        return named(self.profile, names, segments)
