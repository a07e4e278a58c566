"""Profile and menu as the numbers that the bounds are made of.

Who holds what. Bytes held are an OR over holders; here they are a sum that is never more. Each storage is *counted*
by one stage, the first that holds it under all of its options, and from that stage on; where there is none, by the
first that may hold it. In the backward step of another stage that holds it before that one, it is there besides. In
sweeps the same sums count copies: a storage's copy and its original are two in truth and one here.

A segment doesn't hold what its stages make for each other. If a stage behind it is sure to hold such a storage, it is
there in forward all the while (the program passes it on) and in backward from that stage on: it *returns*.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ckptplan.core import rules
from ckptplan.core.option import Option
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import ROUNDING

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def unit_of_time(fastest_s: float) -> float:
    """Seconds that a relaxation counts in: the step with everything kept, or one for chains that take no time."""
    return fastest_s if fastest_s > ROUNDING else 1.0


class _Menu:
    """One stage's options as arrays; bytes in units of the budget, times in units of the baseline."""

    def __init__(self, data: BoundData, i: int) -> None:
        self.codes = tuple(data.menu[i])
        options = [data.profile.stages[i].options[code] for code in self.codes]
        kept, extra = np.array([data.own(i, option.held) for option in options], float).T
        self.kept = kept
        self.forward = np.array([option.forward_bytes for option in options]) / data.unit
        self.backward = np.array([option.backward_bytes for option in options]) / data.unit + kept + extra
        self.seconds = np.array([option.added_s for option in options]) / data.second
        self.launch = np.array([option.launch_s for option in options]) / data.second
        # Storages that move by the stage's decision alone, and those that other stages can forbid to move.
        asked = data.movable[i]
        free = [[s for s in option.moved if s in asked and not asked[s]] for option in options]
        self.free = {  # by whether they leave without a copy
            on_host: np.array([sum(data.size[s] for s in moved if data.on_host[s] == on_host) for moved in free], float)
            for on_host in (False, True)
        }
        self.shared = [[s for s in option.moved if asked.get(s)] for option in options]
        self.fixes = [[s for s in option.held if s not in option.moved] for option in options]
        self.passing = [
            [(steps, nbytes / data.unit) for steps, nbytes in data.chain.passing[i][code]] for code in self.codes
        ]


class BoundData:
    """Profile and menu as the numbers that the bounds are made of.

    Attributes
    ----------
    counted : list of int
        Per storage, the stage by which it is counted once it is held: the first that holds it under all its options,
        otherwise the first that may hold it.
    launch : float
        Time in which the host launches the step with everything kept.
    """

    def __init__(self, space: PlanSpace, budget_bytes: int, host_bytes: int | None) -> None:
        self.profile = profile = space.profile
        self.chain, self.menu = space.chain, space.menu
        self.n = n = len(profile.stages)
        self.unit = float(max(1, budget_bytes))
        self.second = unit_of_time(profile.fastest_compute_s)
        self.launch = profile.baseline_launch_s / self.second
        self.budget = budget_bytes / self.unit
        self.host = None if host_bytes is None else host_bytes / self.unit
        self.size = np.array([s.nbytes for s in profile.storages], float) / self.unit
        self.on_host = [storage.on_host for storage in profile.storages]
        self.again: list[Option | None] = [
            stage.recompute if space.segments and not stage.is_glue and self._rerun_ways(i) else None
            for i, stage in enumerate(profile.stages)
        ]
        self.glue = np.array([stage.is_glue for stage in profile.stages])
        self.forward_s = np.array([s.forward_s for s in profile.stages]) / self.second
        self.backward_s = np.array([s.backward_s for s in profile.stages]) / self.second
        self._count_holders()
        self._constants()
        self._movers()
        # A segment may drop such a storage although a stage behind the segment is sure to hold it again.
        self.returns: dict[int, list[int]] = {}
        for s, storage in enumerate(profile.storages):
            j = self.counted[s]
            if j < 0 or not rules.counts(storage) or self.again[j] is None or s not in profile.stages[j].linked:
                continue
            later = [i for i in self.certain[s] if j < i < self.chain.program[s].stop]
            if later:
                self.returns[s] = later
        self.menus = [_Menu(self, i) for i in range(n)]
        self._segment_numbers()
        link = profile.link
        moving = [
            {*single, *(s for s, _ in many)} for single, many in zip(self.movable, self.segment_moves, strict=True)
        ]
        largest = max((sum(profile.storages[s].nbytes for s in items) for items in moving), default=0)
        # A transfer of b bytes takes latency + b / rate; no stage's transfer is faster per byte than the largest one's.
        self.out = self._rate(largest, link.out_s(largest) if largest else 1.0)
        self.back = self._rate(largest, link.in_s(largest) if largest else 1.0)
        most = [float(sum(self.size[s] for s in items)) for items in moving]
        self.most_put = np.concatenate([[0.0], np.cumsum(most)])
        if self.host is not None:
            self.most_put = np.minimum(self.most_put, self.host)

    def _rate(self, nbytes: int, seconds: float) -> float:
        """Bytes per second, in the units of this class."""
        if nbytes == 0:
            return 1.0
        # Raised slightly, so that rounding makes no bound too large.
        return nbytes / self.unit / (seconds / self.second) * (1 + ROUNDING)

    def _rerun_ways(self, i: int) -> list[Option]:
        """The options of the menu that run stage `i` again as a whole."""
        options = [self.profile.stages[i].options[c] for c in self.menu[i]]
        return [option for option in options if option.name in ("recompute", "recompute+swap")]

    def _count_holders(self) -> None:
        """Find the stages that may hold each storage until their backward, and those that do whatever is decided."""
        codes = [set(menu) for menu in self.menu]
        for i, (stage, again) in enumerate(zip(self.profile.stages, self.again, strict=True)):
            if again is not None:
                codes[i].add(stage.options.index(again))
        self.certain: list[list[int]] = []
        self.holders: list[list[int]] = []
        for storage, holders in zip(self.profile.storages, self.chain.holders, strict=True):
            waiting = holders if rules.awaits_backward(storage) else ()
            self.certain.append([h.stage for h in waiting if codes[h.stage] <= h.holding])
            self.holders.append([h.stage for h in waiting if codes[h.stage] & h.holding])
        self.counted = [
            (certain or holders or [-1])[0] for certain, holders in zip(self.certain, self.holders, strict=True)
        ]

    def own(self, i: int, held: Sequence[int] | set[int]) -> tuple[float, float]:
        """Bytes of `held` counted from stage i on, and those that are there in its own backward besides."""
        storages = self.profile.storages
        kept = sum(self.size[s] for s in held if self.counted[s] == i and not storages[s].to_end)
        extra = sum(self.size[s] for s in held if self.counted[s] > i and not storages[s].to_end)
        return float(kept), float(extra)

    def _constants(self) -> None:
        n = self.n
        forward, backward = np.zeros(n + 1), 0.0
        for s, (storage, program) in enumerate(zip(self.profile.storages, self.chain.program, strict=True)):
            if storage.to_end:
                forward[program.start] += self.size[s]
                backward += self.size[s]
                continue
            # As far as no stage's account has it.
            stop = program.stop if self.counted[s] < 0 else min(program.stop, self.counted[s] + 1)
            if program.start < stop:
                forward[program.start] += self.size[s]
                forward[stop] -= self.size[s]
        self.base_forward = np.array(self.profile.base_forward_bytes) / self.unit + np.cumsum(forward)[:n]
        self.base_backward = np.array(self.profile.base_backward_bytes) / self.unit + backward

    def _movers(self) -> None:
        """Which storages each stage may move, and which earlier stages could forbid it."""
        stages, n = self.profile.stages, self.n
        self.movable: list[dict[int, tuple[int, ...]]] = [{} for _ in range(n)]  # storage -> earlier stages to ask
        self.movable_any: list[set[int]] = [set() for _ in range(n)]
        for s, holders in enumerate(self.chain.holders):
            # Stages that hold it under every option, and never move it.
            fixed = {h.stage for h in holders if h.holding - h.moving >= set(self.menu[h.stage])}
            for i in (h.stage for h in holders if not h.moving.isdisjoint(self.menu[h.stage])):
                later = [j for j in self.certain[s] if j > i]
                earlier = [j for j in self.holders[s] if j < i]
                if (
                    i not in self.chain.movers[s]
                    or any(s not in stages[j].linked or self.again[j] is None for j in later)
                    or any(j in fixed and self.again[j] is None for j in earlier)
                ):
                    continue
                self.movable_any[i].add(s)
                if not later:
                    self.movable[i][s] = tuple(earlier[-2:])

    def _segment_numbers(self) -> None:
        """Bytes and seconds of stages inside segments, for `LinearTrees`."""
        n, stages = self.n, self.profile.stages
        self.full = np.zeros(n)  # counted at the stage when it is the segment's last
        self.last_own = np.zeros(n)
        self.keep_kept = np.zeros(n)
        self.keep_own = np.zeros(n)
        self.segment_forward = np.zeros(n)
        self.run_s = np.zeros(n)
        self.again_s = np.full(n, np.inf)
        self.run_launch, self.again_launch = np.zeros((2, n))
        self.drops: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        self.segment_moves: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for i, stage in enumerate(stages):
            again = self.again[i]
            keep_kept, _ = self.own(
                i, set(stage.keep.held) | (set(again.held) - set(stage.linked) if again is not None else set())
            )
            self.keep_kept[i] = keep_kept
            self.keep_own[i] = stage.keep.backward_bytes / self.unit + self.own(i, stage.keep.held)[1]
            if again is None:
                self.full[i] = self.own(i, stage.keep.held)[0]
                self.segment_forward[i] = stage.keep.forward_bytes / self.unit
                continue
            self.full[i], extra = self.own(i, again.held)
            self.last_own[i] = again.backward_bytes / self.unit + extra
            ways = self._rerun_ways(i)
            self.segment_forward[i] = min(o.forward_bytes for o in ways) / self.unit
            self.run_s[i] = stage.rerun_s / self.second
            self.again_s[i] = again.added_s / self.second
            self.run_launch[i] = stage.rerun_launch_s / self.second
            self.again_launch[i] = again.launch_s / self.second
            for s in stage.linked:
                if self.counted[s] == i and not self.profile.storages[s].to_end:
                    self.drops[i].append((rules.latest_first(self.profile.storages[s]), float(self.size[s])))
            for s in {s for o in ways for s in o.moved} & self.movable_any[i]:
                made = rules.latest_first(self.profile.storages[s]) if s in stage.linked else n
                self.segment_moves[i].append((s, made))


class Intervals:
    """Numbers of every run of stages that no multiplier enters; row i: i + 1 stages, column s: first stage s."""

    def __init__(self, data: BoundData) -> None:
        self.data = c = data
        n = c.n
        start = np.arange(n)
        can = np.array([again is not None for again in c.again])
        blocked = np.concatenate([[0], np.cumsum(~(can | c.glue))])
        self.longest = 0  # stages in the longest possible segment
        at = 0
        for i in range(n):
            at = i + 1 if not (can[i] or c.glue[i]) else at
            self.longest = max(self.longest, i + 1 - at)
        self.longest = self.longest if can.any() else 0
        w = self.longest
        held = np.zeros((w, n))
        moves = {on_host: np.zeros((w, n)) for on_host in (False, True)}
        self.possible = np.zeros((w, n), bool)
        for i in range(w):
            held[i, : n - i] = c.full[i:]
            last = start[: n - i] + i
            self.possible[i, : n - i] = (blocked[last + 1] == blocked[start[: n - i]]) & can[last] & can[start[: n - i]]
        for j in range(n):
            low = max(0, j - w + 1)
            for made, nbytes in c.drops[j]:
                first = np.arange(low, made + 1)
                held[j - first, first] -= nbytes
            for s, made in c.segment_moves[j]:
                first = np.arange(low if made == n else max(low, made + 1), j + 1)
                moves[c.on_host[s]][j - first, first] += c.size[s]
        self.held_at = np.maximum(held, 0.0)
        self.held = np.cumsum(self.held_at, axis=0)
        self.moves = {on_host: np.cumsum(of, axis=0) for on_host, of in moves.items()}
        """Bytes that they move, by whether these leave without a copy."""
        self.run = np.concatenate([[0.0], np.cumsum(c.run_s)])
        self.run_launch = np.concatenate([[0.0], np.cumsum(c.run_launch)])

    def sweep_s(self, first: Indices | int, last: Indices | int) -> tuple[Floats, Floats]:
        """Compute and launching time of segments' sweeps and of the recomputes of their last stages."""
        c = self.data
        return (
            np.asarray(c.again_s[last] + self.run[last] - self.run[first]),
            np.asarray(c.again_launch[last] + self.run_launch[last] - self.run_launch[first]),
        )

    def returns(self, a: int, b: int) -> list[tuple[int, int]]:
        """Storages that the segment a..b drops and the stage behind it that is sure to hold each again."""
        c = self.data
        return [
            (s, next(i for i in later if i > b))
            for s, later in c.returns.items()
            if a <= rules.latest_first(c.profile.storages[s]) and c.counted[s] <= b < later[-1]
        ]
