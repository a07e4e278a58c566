"""A mixed-integer program over options, segments and whole transfers: a bound, and a plan to look at.

What `linear_program.py` relaxes is whole here: options, segments and the segments in their sweeps, which of the larger
storages move, and whether their transfers are done. Links stay fluids, and so does what is small. Everything left out
makes the optimum lower.

| symbol    | meaning                                                                                            |
|-----------|----------------------------------------------------------------------------------------------------|
| x[i,o]    | stage i has option o, in no segment                                                                |
| y[a,b]    | an outermost segment a..b                                                                          |
| m[i]      | stage i is in a segment and moves what it holds there                                              |
| Y[a,k]    | an outermost segment with all of a..k in it                                                        |
| w[a,b]    | a segment a..b within another one, at any depth; no two of them cross                              |
| e[j,k]    | in backward step k, stage j's storages have been dropped: an inner segment with it ends before k    |
| M[o]      | bytes that stage o moves                                                                           |
| z[s,k]    | the transfer of storage s, a large one, is done when step k starts; one for each lane              |
| f[o,k]    | so are those of all large storages that stage o moves; forward alone                               |
| put[o]    | work of a link for what the stages before o move: bytes, and for each of them one latency, of      |
|           | which small storages have a share                                                                  |
| L[k]      | work that it has done when step k starts; backward is a lane in reversed time (cost.py), which     |
|           | what a segment moves joins when its sweep has run                                                  |

Bytes are in units of the budget, seconds in units of the baseline. Its solvers, `scip.py` and `cp_sat.py`, run in
processes of their own (`process.py`). `PeakModel` asks for the smallest budget instead of the shortest step.

Never above the truth. In forward a storage is there from its birth on if any stage holds it, in backward from its
first holder on: an OR of holders, exact. In a sweep, what a stage keeps is a copy unless the stage held the storage all
the while; a copy is there while a stage that was kept has it. An inner segment's stages run again, its last one
recomputes, and both are charged in the backward step in which they do; what lies around an inner
sweep is left out while it runs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ckptplan.core import rules
from ckptplan.core.option import Option
from ckptplan.core.segment import Segment
from ckptplan.solving.bound.relaxation import unit_of_time
from ckptplan.solving.bound.rows import Program, total
from ckptplan.solving.chain import Holder
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.parameters import CLOSE, ROUNDING, SOLVER_ERROR

WHOLE = 0.05
"""Share of the budget from which on a storage moves whole or not at all, and its transfer is done or not."""


class Suggestion(NamedTuple):
    """A plan as a solver sees it, which may not fit.

    Attributes
    ----------
    codes : list of int
    segments : tuple of Segment
    transfers : list of (int, list of int)
        Stages and storages, in the order in which they come back.
    """

    codes: list[int]
    segments: tuple[Segment, ...]
    transfers: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class _Holder:
    """How a stage may hold a storage: the codes under which it does, and of these those that move it."""

    stage: int
    holding: frozenset[int]
    moving: frozenset[int]
    linked: bool
    in_segment: bool  # whether it holds it there, if the segment doesn't make it
    if_moving: bool  # whether it holds it there only under the option that moves
    moves_in_segment: bool


class _Part(NamedTuple):
    """A part that a stage may move: a large storage, or small ones with the same holders.

    `moves` is the variable that says how much of it moves, `gone` the first forward step in which it may be away, and
    `on_host` whether it leaves without a copy.
    """

    storages: tuple[int, ...]
    size: float
    one: bool
    moves: Any
    gone: int
    on_host: bool


@dataclass(slots=True)
class _Group:
    """Storages with the same life and holders, one if it is large, of which `storage` is the first.

    `holds` are the holders' variables, `held` the OR of those up to each.
    """

    storages: list[int]
    size: float
    stop: int
    holders: tuple[_Holder, ...]
    holds: list[Any]
    held: list[Any]

    @property
    def storage(self) -> int:
        """The first of them."""
        return self.storages[0]


@dataclass(slots=True)
class _Flow:
    """The work of a link in one direction, as the bytes that it would carry in that time.

    Attributes
    ----------
    per_byte, latency : float
        Work of a byte, and of a transfer in addition to its bytes.
    per_small : float
        Work of a byte together with its part of a latency, in stages without large storages.
    most, small : list of float
        Per stage, the most work, and the bytes of its small storages.
    work : dict
        Stage -> its work, of those that may move something.
    put : list
        Work that the stages before each one have put in the queue.
    carried : list
        Work that is done when each step starts.
    away : dict
        Step -> the work that must be done for what is away then, by stage.
    """

    per_byte: float = 1.0
    latency: float = 0.0
    per_small: float = 1.0
    most: list[float] = field(default_factory=list)
    small: list[float] = field(default_factory=list)
    work: dict[int, Any] = field(default_factory=dict)
    put: list[Any] = field(default_factory=lambda: [0.0])
    carried: list[Any] = field(default_factory=list)
    away: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))


class MixedModel:
    """The program for one plan space and budget.

    Parameters
    ----------
    space : PlanSpace
    budget_bytes : int
    host_bytes : int, optional
        Limit on all bytes moved.
    among : sequence of Segment, optional
        The only segments that may be outermost. Within them there may be segments that begin where one of these, or one
        inside it, begins, and end there or before it.
    most_s : float
        Seconds of a step: segments whose sweeps alone take it longer are left out.
    """

    among: Sequence[Segment] | None = None

    def __init__(
        self,
        space: PlanSpace,
        budget_bytes: int,
        *,
        host_bytes: int | None = None,
        among: Sequence[Segment] | None = None,
        most_s: float = math.inf,
    ) -> None:
        self.among = among
        profile = space.profile
        self.begin(space, max(1, budget_bytes), unit_of_time(profile.fastest_step_s))
        self.room: Any = 1.0
        self.most = 1.0
        self.slack_s = most_s - profile.fastest_compute_s
        self.forward_s = [stage.forward_s / self.second for stage in profile.stages]
        self.backward_s = [stage.backward_s / self.second for stage in profile.stages]
        self.add_plans(host_bytes)
        self.away: list[list[Any]] = []
        stalls = [self.add_lane(lane) for lane in range(2)]
        self.add_memory()
        added_s = [seconds * var for terms in self.added_s for seconds, var in terms]
        lanes = sum(self.forward_s) + sum(self.backward_s) + self.sum([*stalls, *added_s])
        self.program.cost = lanes + self.beyond(lanes)

    def begin(self, space: PlanSpace, unit: float, second: float) -> None:
        """Begin an empty program, with its units of bytes and seconds."""
        self.space, self.chain, self.profile, self.menu = space, space.chain, space.profile, space.menu
        self.n = self.chain.n
        self.unit, self.second = float(unit), second
        self.program = Program()
        self.span = 0.0  # of all variables together, by which dual tolerances count
        self.parts_of: dict[int, int] = {}  # variables that aren't 0 or 1 in a plan -> of how many parts, 0: any
        self.added_s: list[list[tuple[float, Any]]] = [[] for _ in range(self.n)]
        self.launch_s: list[tuple[float, Any]] = []
        self.done: list[dict[tuple[int, int], list[Any]]] = [{}, {}]

    def is_large(self, nbytes: int) -> bool:
        """Whether a storage of this size moves whole or not at all."""
        return nbytes / self.unit >= WHOLE

    def alike(self, s: int) -> int | None:
        """Return what distinguishes a storage from others with the same holders: its index, if it is large."""
        return s if self.is_large(self.profile.storages[s].nbytes) else None

    def add_plans(self, host_bytes: int | None) -> None:
        """Add a plan's choices, the holders of storages that follow from them, and the moves."""
        self.add_segments()
        self.add_choices()
        self.add_inner_segments()
        self.add_holders()
        self.add_moves(host_bytes)

    def beyond(self, lanes: Any) -> Any:
        """Return a variable for the time by which launching the step takes longer than its lanes."""
        most = (self.profile.baseline_launch_s + sum(seconds for seconds, _ in self.launch_s)) / self.second
        if not most:
            return 0.0
        var = self.amount(most)
        added = self.sum([seconds / self.second * choice for seconds, choice in self.launch_s if seconds])
        self.require(var >= self.profile.baseline_launch_s / self.second + added - lanes)
        return var

    def choice(self) -> Any:
        """A variable that is 0 or 1."""
        self.span += 1.0
        return self.program.add(1.0, whole=True)

    def implied(self) -> Any:
        """A variable from 0 to 1 that is 0 or 1 in every plan, although no row requires it."""
        self.span += 1.0
        return self.program.add(1.0)

    def amount(self, upper: float) -> Any:
        """A variable from 0 to `upper`."""
        self.span += upper
        var = self.program.add(upper)
        self.parts_of[var.id] = 0
        return var

    def share(self, parts: int) -> Any:
        """A variable from 0 to 1 that every plan gives a multiple of 1 / `parts`, or any number if that is 0."""
        var = self.implied()
        if parts != 1:
            self.parts_of[var.id] = parts
        return var

    def require(self, row: Any) -> None:
        """Add a constraint, unless it has no variable: then it is True or False, and holds."""
        if not isinstance(row, bool):
            self.program.rows.append(row)

    @staticmethod
    def sum(terms: Sequence[Any]) -> Any:
        """The sum of terms, 0 of none."""
        return total(terms) if terms else 0.0

    def add_segments(self) -> None:
        """Add y[a,b], and Y[a,k], the sum of y[a',b] over a' <= a and b >= k."""
        n = self.n
        every = [(a, b) for a in range(n) for b in self.space.ends(a, a, n)]
        outer = {c for c in every if c[0] < c[1]}
        if self.among is not None:
            named = {(a, k) for segment in self.among for a, b in _intervals(segment) for k in range(a, b + 1)}
            every = [c for c in every if c in named]
            outer &= {(segment.first, segment.last) for segment in self.among}
        self.sweeps = {c: rules.sweep_of(self.profile, Segment(*c)) for c in every}
        self.y = {c: self.choice() for c in every if c in outer and self.segment_s(c) <= self.slack_s}
        self.around = [[c for c in self.y if c[0] <= i <= c[1]] for i in range(n)]
        self.sums: dict[tuple[int, int], Any] = {}
        for a in range(n):
            beginning: Any = None  # those that begin with a
            for k in reversed(range(a, n)):
                before, one = self.sums.get((a - 1, k)), self.y.get((a, k))
                if one is not None:
                    terms = [one] if beginning is None else [one, beginning]
                    beginning = self.equal(terms)
                terms = [term for term in (before, beginning) if term is not None]
                if terms:
                    self.sums[a, k] = self.equal(terms)

    def equal(self, terms: Sequence[Any], upper: float | None = None) -> Any:
        """A variable for a sum of terms: an amount of at most `upper`, or 0 or 1; the term itself where it is one."""
        if len(terms) == 1:
            return terms[0]
        var = self.implied() if upper is None else self.amount(upper)
        self.require(var == self.sum(terms))
        return var

    def whole(self, a: int, k: int, after: int = -1) -> Any:
        """Whether an outermost segment that begins behind stage `after` has all of `a..k` in it."""
        terms = [self.sums[a, k]] if (a, k) in self.sums else []
        after = min(after, a)
        return self.sum([*terms, *([-self.sums[after, k]] if (after, k) in self.sums else [])])

    def add_choices(self) -> None:
        """Require one option, or one segment around it, for each stage; add the time of the segments' sweeps."""
        p, n = self.profile, self.n
        self.x = [{code: self.choice() for code in self.menu[i]} for i in range(n)]
        for i in range(n):
            self.require(self.sum(list(self.x[i].values())) + self.whole(i, i) == 1)
            for code, var in self.x[i].items():
                self.added_s[i].append((p.stages[i].options[code].added_s / self.second, var))
                self.launch_s.append((p.stages[i].options[code].launch_s, var))
        self.m = {i: self.choice() for i in range(n) if self.around[i] and self.moving[i] is not None}
        for i, var in self.m.items():
            self.require(var <= self.whole(i, i))
            option = self.moving[i]
            assert option is not None
            overhead_s, launch_s = p.stages[i].moving_s(option)
            self.added_s[i].append((overhead_s / self.second, var))
            self.launch_s.append((launch_s, var))
        for c, var in self.y.items():
            self.add_sweep_time(c, var)

    def segment_s(self, c: tuple[int, int]) -> float:
        """Seconds that a segment takes, outer or inner: those of its sweep and of the recompute of its last stage."""
        return self.sweeps[c].seconds + self.again(c[1]).added_s

    def add_sweep_time(self, c: tuple[int, int], var: Any) -> None:
        """Add the seconds of a segment in which `var` is 1."""
        b = c[1]
        launch_s = self.sweeps[c].launch_s + self.again(b).launch_s
        self.added_s[b].append((self.segment_s(c) / self.second, var))
        self.launch_s.append((launch_s, var))

    def again(self, i: int) -> Option:
        """The option by which stage `i`, which can be in a segment, is recomputed."""
        found = self.profile.stages[i].recompute
        assert found is not None
        return found

    @cached_property
    def recomputed(self) -> list[frozenset[int]]:
        """Per stage, the storages that it holds under "recompute"; none where it can't be recomputed."""
        return [frozenset(again.held if (again := stage.recompute) else ()) for stage in self.profile.stages]

    @cached_property
    def moving(self) -> list[Option | None]:
        """Per stage, the option that moves what it holds in a segment."""
        return [next((o for o in self.inside(i) if o.moves), None) for i in range(self.n)]

    @cached_property
    def more(self) -> list[frozenset[int]]:
        """Per stage, the storages that it holds in a segment only if it moves what it holds there."""
        return [
            frozenset() if option is None else frozenset(option.held) - again
            for option, again in zip(self.moving, self.recomputed, strict=True)
        ]

    def inside(self, i: int) -> list[Option]:
        """The options that stage `i` may have in a segment."""
        return [self.profile.stages[i].options[code] for code in self.space.inside[i]]

    def add_inner_segments(self) -> None:
        """Add segments in a sweep, which run their stages once more and recompute their last one."""
        n = self.n
        self.w: dict[tuple[int, int], Any] = {}
        for a, b in self.sweeps:
            outer_s = [self.segment_s(c) for c in self.around[a] if c[1] > b]
            if outer_s and min(outer_s) + self.segment_s((a, b)) <= self.slack_s:
                var = self.w[a, b] = self.choice()
                self.require(var <= self.whole(a, b + 1))
                self.add_sweep_time((a, b), var)
        self.ending = [[var for (_, b), var in self.w.items() if b == k] for k in range(n)]
        for ending in self.ending:
            self.require(self.sum(ending) <= 1)
        self.forbid_crossing()
        self.e: dict[tuple[int, int], Any] = {}
        for j in range(n):
            for k in range(j + 1, n):
                inner = [self.w[a, k - 1] for a in range(j + 1) if (a, k - 1) in self.w]
                inner += [self.e[j, k - 1]] if (j, k - 1) in self.e else []
                if inner and any(c[1] >= k for c in self.around[j]):
                    var = self.e[j, k] = self.implied()
                    self.require(var <= self.sum(inner))
                    self.require(var <= self.whole(j, k))

    def forbid_crossing(self) -> None:
        """Require that one of two inner segments is in the other, or they are apart: not a < c <= b < d."""
        for c in range(1, self.n):
            beyond: Any = None  # whether one begins with c and ends behind b
            for b in reversed(range(c, self.n)):
                before = [self.w[a, b] for a in range(c) if (a, b) in self.w]
                if before and beyond is not None:
                    self.require(self.sum([*before, beyond]) <= 1)
                if (c, b) in self.w:
                    longer, beyond = beyond, self.w[c, b]
                    if longer is not None:
                        beyond = self.implied()
                        self.require(beyond >= longer)
                        self.require(beyond >= self.w[c, b])

    def add_holders(self) -> None:
        """Add variables for each storage's holders from their forward on, by options and segments, and their OR."""
        steps = self.chain.forward_bytes, self.chain.backward_bytes
        self.base = [[nbytes / self.unit for nbytes in base] for base in steps]
        self.groups = self._groups()
        self.copied = self._copied()
        for group in self.groups:
            for holder in group.holders:
                holds = self.sum([self.x[holder.stage][c] for c in sorted(holder.holding)]) + self._in(group, holder)
                if holder.if_moving:
                    holds += self.m[holder.stage]
                held = holds
                if group.held:
                    held = self.implied()
                    self.require(held >= holds)
                    self.require(held >= group.held[-1])
                group.holds.append(holds)
                group.held.append(held)

    def _groups(self) -> list[_Group]:
        """Return the storages that depend on decisions, grouped if no decision distinguishes them."""
        found: dict[Any, _Group] = {}
        for s, holders in self._holders().items():
            storage = self.profile.storages[s]
            size = storage.nbytes / self.unit
            alike = self.alike(s)
            key = (storage.born, storage.program_until, storage.stays, storage.on_host, tuple(holders), alike)
            if key in found:
                found[key].size += size
                found[key].storages.append(s)
            else:
                stop = max(self.chain.program[s].stop, storage.born + 1)
                found[key] = _Group([s], size, stop, tuple(holders), [], [])
        return list(found.values())

    def _copied(self) -> list[tuple[float, _Group]]:
        """Bytes of the groups that `_has_copy` doesn't tell from each other, and the first of these groups."""
        alike: dict[Any, list[_Group]] = defaultdict(list)
        for group in self.groups:
            born = rules.latest_first(self.profile.storages[group.storage])
            holds = []
            for i, linked in ((holder.stage, holder.linked) for holder in group.holders):
                among = (self.profile.stages[i].keep.held, self.recomputed[i], self.more[i])
                holds.append((i, linked, *(group.storage in held for held in among)))
            alike[born, tuple(holds)].append(group)
        return [(sum(group.size for group in groups), groups[0]) for groups in alike.values()]

    def _holders(self) -> dict[int, list[_Holder]]:
        """Per storage whose bytes depend on a decision, its possible holders in order."""
        found: dict[int, list[_Holder]] = {}
        for s, holders in enumerate(self.chain.holders):
            if self.chain.decided[s]:
                possible = [self._holder(s, holder) for holder in holders]
                found[s] = [holder for holder in possible if holder is not None]
        # By their first holders, as a reader would walk the chain.
        first = sorted((holders[0].stage, s) for s, holders in found.items() if holders)
        return {s: found[s] for _, s in first}

    def _holder(self, s: int, holder: Holder) -> _Holder | None:
        """Return how a stage may hold storage `s` in this space; None if it can't."""
        i = holder.stage
        stage, holding = self.profile.stages[i], holder.holding.intersection(self.menu[i])
        inside = ([stage.keep] if stage.is_glue else self.inside(i)) if self.around[i] else []
        if not holding and not any(s in option.held for option in inside):
            return None
        return _Holder(
            i,
            holding,
            holding & holder.moving,
            linked=s in stage.linked and not stage.is_glue,
            in_segment=bool(inside) and all(s in option.held for option in inside),
            if_moving=bool(inside) and s in self.more[i],
            moves_in_segment=any(s in option.moved for option in inside),
        )

    def _in(self, group: _Group, holder: _Holder) -> Any:
        """Whether `holder` is in a segment in which it holds the storage from its forward on (rule 2)."""
        if not holder.in_segment:
            return 0.0
        born = rules.latest_first(self.profile.storages[group.storage])
        return self.whole(holder.stage, holder.stage, born if holder.linked else -1)

    def add_moves(self, host_bytes: int | None) -> None:
        """A storage moves with its last holder, if all that hold it would move it (rule 4)."""
        n = self.n
        self.parts: list[list[_Part]] = [[] for _ in range(n)]
        for group in self.groups:
            for at, holder in enumerate(group.holders):
                storage = self.profile.storages[group.storage]
                ways = self.sum([self.x[holder.stage][c] for c in sorted(holder.moving)])
                moving = self.m.get(holder.stage, 0.0) if holder.moves_in_segment else 0.0
                ways += moving
                if isinstance(ways, float) or holder.stage not in self.chain.movers[group.storage]:
                    continue
                # Of several small ones any number may move.
                one = self.is_large(storage.nbytes)
                of_one_size = len({self.profile.storages[s].nbytes for s in group.storages}) == 1
                var = self.choice() if one else self.share(len(group.storages) if of_one_size else 0)
                self.require(var <= ways)
                if holder.moves_in_segment and holder.linked and holder.in_segment:
                    self.require(var <= ways - moving + self._in(group, holder))
                for j, other in enumerate(group.holders):
                    against = group.holds[j]
                    if j < at:
                        fixing = [self.x[other.stage][c] for c in sorted(other.holding - other.moving)]
                        against = self.sum(fixing) + self._in(group, other)
                        against -= self.m.get(other.stage, 0.0) if other.moves_in_segment else 0.0
                    if j != at:
                        self.require(var + against <= 1)
                gone = rules.there_until(storage, holder.stage, n) + 1
                part = _Part(tuple(group.storages), group.size, one, var, gone, storage.on_host)
                self.parts[holder.stage].append(part)
        self.most_moved, self.moved = [0.0] * n, dict[int, Any]()
        for o, parts in enumerate(self.parts):
            if parts:
                self.most_moved[o] = sum(part.size for part in parts)
                self.moved[o] = self.amount(self.most_moved[o])
                self.require(self.moved[o] == self.sum([part.size * part.moves for part in parts]))
        self.left: list[list[Any]] = [[] for _ in range(n)]  # per forward step, what has left without a copy
        for part in [part for parts in self.parts for part in parts if part.on_host]:
            for k in range(part.gone, n):
                self.left[k].append(part.size * part.moves)
        if host_bytes is not None:
            self.require(self.sum(list(self.moved.values())) <= host_bytes / self.unit)

    def add_lane(self, lane: int) -> Any:
        """Add the bytes that a link has carried off by each step; return the time for which compute waits for it.

        The latency of a stage that has large storages is a time of its own. Of others each byte takes a part of one, as
        large as the largest of these stages makes it: were parts not alike, what one stage has put in the queue would
        count for more of another's.
        """
        link, latency_s = self.profile.link, self.profile.link.latency_s / self.second
        bandwidth = (link.out_bytes_per_s, link.in_bytes_per_s)[lane] * self.second / self.unit
        largest = max(self.most_moved)
        seconds = latency_s + largest / bandwidth
        rate = largest / seconds if seconds else math.inf
        queued = [[part for part in parts if lane or not part.on_host] for parts in self.parts]
        flow = _Flow(rate / bandwidth, rate * latency_s) if seconds else _Flow()
        if largest:
            of_small = [sum(p.size for p in parts) for parts in queued if not any(p.one for p in parts)]
            flow.per_small = flow.per_byte + flow.latency / max([CLOSE * largest, *of_small])
        self.put_work(flow, queued)
        self.away.append(self.away_back(flow) if lane else self.away_out(flow))
        return self.add_flow(lane, flow, rate * (1 + ROUNDING)) if largest and seconds else 0.0

    def put_work(self, flow: _Flow, queued: Sequence[Sequence[_Part]]) -> None:
        """Add the work that stages put in a link's queue, of which `queued` are the parts."""
        before: list[Any] = []
        for o, parts in enumerate(queued):
            most = sum(part.size for part in parts)
            flow.most.append(flow.per_byte * most + flow.latency if parts else 0.0)
            flow.small.append(sum(part.size for part in parts if not part.one))
            if parts:
                work = self.work(flow, o, [(part.size, part.moves, part.one) for part in parts])
                flow.work[o] = self.amount(flow.most[o])
                self.require(flow.work[o] == work)
                before = [self.equal([*before, flow.work[o]], sum(flow.most))]
            flow.put.append(self.sum(before))
        flow.carried = [self.amount(sum(flow.most)) for _ in range(self.n + 1)]

    def work(self, flow: _Flow, o: int, moved: Sequence[tuple[float, Any, bool]]) -> Any:
        """Return the link's work for some parts of stage `o`: their bytes, and one latency.

        `moved` has sizes and variables, and whether these are 0 or 1. Of a latency, small storages have a share.
        """
        nbytes = self.sum([size * var for size, var, _ in moved])
        large = [var for _, var, one in moved if one]
        if not large:
            return flow.per_small * nbytes
        begun = large[0] if len(moved) == 1 else self.implied()
        if len(moved) > 1:
            for var in large:
                self.require(begun >= var)
            if flow.small[o]:
                small = [size * var for size, var, one in moved if not one]
                self.require(flow.small[o] * begun >= self.sum(small))
        return flow.per_byte * nbytes + flow.latency * begun

    def away_out(self, flow: _Flow) -> list[Any]:
        """Return, per forward step, the bytes that copies have taken away: first in, first out, each done or not."""
        away: list[list[Any]] = [[] for _ in range(self.n)]
        most_put = [0.0, *accumulate(flow.most)]
        for k in range(self.n):
            ahead: Any = None  # whether all large ones of the stages before are done
            for o in [o for o in flow.work if o < k]:
                all_done: Any = None
                moved: list[tuple[float, Any, bool]] = []
                for number, part in enumerate(self.parts[o]):
                    if part.one and not part.on_host:
                        z = self.add_done(0, o, number)
                        all_done = self.implied() if all_done is None else all_done
                        self.require(all_done + part.moves - z <= 1)
                        if ahead is not None:
                            self.require(z <= ahead)
                        work = flow.per_byte * part.size + flow.latency
                        self.require(flow.carried[k] >= flow.put[o] + work * z - most_put[o] * (1 - z))
                        away[k] += [part.size * z] if k >= part.gone else []
                        moved.append((part.size, z, True))
                small = self.small(part for part in self.parts[o] if k >= part.gone and not part.on_host)
                away[k] += small
                moved += [(1.0, var, False) for var in small]
                flow.away[k].append(self.work(flow, o, moved))
                if all_done is not None:
                    if ahead is not None:
                        self.require(all_done <= ahead)
                    ahead = all_done
        return [self.sum(terms) for terms in away]

    def away_back(self, flow: _Flow) -> list[Any]:
        """Return, per backward step, the bytes that are away: in any order, without those that a sweep needs."""
        away: list[list[Any]] = [[] for _ in range(self.n)]
        for k in range(self.n):
            for o in [o for o in self.moved if o < k]:
                needed, moved = self.whole(o, k), list[tuple[float, Any, bool]]()
                for number, part in enumerate(self.parts[o]):
                    if part.one:
                        z = self.add_done(1, o, number)
                        self.require(z + needed <= 1)
                        moved.append((part.size, z, True))
                for var in self.small(self.parts[o]):
                    self.require(var <= var.upper_bound * (1 - needed))
                    moved.append((1.0, var, False))
                away[k] += [size * var for size, var, _ in moved]
                flow.away[k].append(self.work(flow, o, moved))
        return [self.sum(terms) for terms in away]

    def add_done(self, lane: int, o: int, number: int) -> Any:
        """Return whether the transfer of a large part of stage `o` is done in the next step; once done, it stays so."""
        z = self.choice()
        self.require(z <= self.parts[o][number].moves)
        before = self.done[lane].setdefault((o, number), [])
        if before:
            self.require(z >= before[-1])
        before.append(z)
        return z

    def small(self, parts: Iterable[_Part]) -> list[Any]:
        """Return one amount for the bytes of the small parts among these that are away; empty if there are none."""
        parts = [part for part in parts if not part.one]
        if not parts:
            return []
        var = self.amount(sum(part.size for part in parts))
        self.require(var <= self.sum([part.size * part.moves for part in parts]))
        return [var]

    def add_flow(self, lane: int, flow: _Flow, rate: float) -> Any:
        """Let the link do the work that has joined at its rate; return the time for which compute waits for it."""
        n, whole, carried = self.n, sum(flow.most), flow.carried
        enforced = rules.enforceable_points(self.profile.stages)[lane]
        compute_s, added_s = ((self.forward_s, [[]] * n), (self.backward_s, self.added_s))[lane]
        put = [self.sum([put, *self.late(flow, k)]) for k, put in enumerate(flow.put)] if lane else flow.put
        stalls = [self.amount(whole) for _ in range(n)]  # as work that the link does meanwhile
        self.require(carried[0] == 0)
        for k in range(n):
            # More than everything makes no difference.
            during = [min(rate * compute_s[k], whole)]
            during += [min(rate * seconds, whole) * var for seconds, var in added_s[k]]
            self.require(carried[k + 1] - carried[k] <= self.sum(during) + stalls[k])
            self.require(carried[k + 1] <= put[k] + stalls[k])
            self.require(carried[k + 1] <= put[k + 1])
            # What is away must be when the last point before that the runtime can meet comes.
            self.require(self.sum(flow.away[k]) <= carried[enforced[k - 1] + 1 if k else 0])
        self.require(carried[enforced[-1] + 1] >= flow.put[n])
        return self.sum([1 / rate * stall for stall in stalls])

    def late(self, flow: _Flow, k: int) -> list[Any]:
        """Minus the work of stages before `k` that are back before the backward step of `k` or a later stage.

        They are needed in its sweep: in reversed time they join when that step has run.
        """
        late = []
        for o, work in flow.work.items():
            if o < k and (o, k) in self.sums:
                var = self.amount(flow.most[o])
                self.require(var >= work - flow.most[o] * (1 - self.whole(o, k)))
                late.append(-var)
        return late

    def add_memory(self) -> None:
        """Require that every step, and every run of a sweep, fits the budget."""
        passing = self.passing()
        for k in range(self.n):
            there = self.sum(
                [
                    group.size * held[-1]
                    for group in self.groups
                    if (held := [h for h, holder in zip(group.held, group.holders, strict=True) if holder.stage <= k])
                ]
            )
            backward = self.sum([*self.adds_backward(k), *self._copies(k)])
            out, back = self.sum([self.away[0][k], *self.left[k]]), self.away[1][k]
            forward = self.sum([*passing[k], *self.adds_forward(k)])
            self.require(forward - out <= self.room - self.base[0][k])
            self.require(there + backward - back <= self.room - self.base[1][k])
            self.add_sweeps(k, there - back)

    def passing(self) -> list[list[Any]]:
        """Per forward step, bytes of graphs that are dropped in forward."""
        found: list[list[Any]] = [[] for _ in range(self.n)]
        for i, codes in enumerate(self.x):
            for code, var in codes.items():
                for steps, nbytes in self.chain.passing[i][code]:
                    for k in steps:
                        found[k].append(nbytes / self.unit * var)
        return found

    def adds_forward(self, k: int) -> Iterator[Any]:
        """Yield what stages hold in forward step `k` beside the program, and what the stage adds on top."""
        stage, moving = self.profile.stages[k], self.moving[k]
        yield from (group.size * group.held[-1] for group in self.groups if k >= group.stop)
        for code, var in self.x[k].items():
            yield stage.options[code].forward_bytes / self.unit * var
        for c in self.around[k]:
            yield (stage.keep if stage.is_glue else self.again(k)).forward_bytes / self.unit * self.y[c]
        if moving is not None and k in self.m:
            yield (moving.forward_bytes - self.again(k).forward_bytes) / self.unit * self.m[k]

    def adds_backward(self, k: int) -> Iterator[Any]:
        """Yield the bytes that stage `k` adds on top in its backward step."""
        stage = self.profile.stages[k]
        for code, var in self.x[k].items():
            yield stage.options[code].backward_bytes / self.unit * var
        for c in self.around[k]:
            yield (self.again(k) if k == c[1] else stage.keep).backward_bytes / self.unit * self.y[c]
        for var in self.ending[k]:
            yield (self.again(k).backward_bytes - stage.keep.backward_bytes) / self.unit * var

    def add_sweeps(self, k: int, resident: Any) -> None:
        """Require that the runs of a sweep up to stage `k` fit, outer or inner; copies around an inner one left out."""
        runs: dict[int, list[Any]] = defaultdict(list)
        for var, c in [(var, c) for found in (self.y, self.w) for c, var in found.items() if c[1] == k]:
            for j, nbytes in zip(self.sweeps[c].runs, self.sweeps[c].run_bytes, strict=True):
                runs[j].append(nbytes / self.unit * var)
        if not runs:
            return
        there = self.amount(self.most)
        self.require(there >= resident)
        for run, most in runs.items():
            less = [-self._dropped(j, run) * self.e[j, k] for j in range(run + 1) if (j, k) in self.e]
            less += [-self._held_instead(j) * self.m[j] for j in range(run + 1) if j in self.m and self.more[j]]
            self.require(there + self.sum(most + less) <= self.room - self.base[1][k])

    def _held_instead(self, j: int) -> float:
        """Bytes that stage `j` holds if it moves, of which the sweep makes copies otherwise."""
        keep = self.profile.stages[j].keep
        return sum(self.profile.storages[s].nbytes for s in self.more[j].intersection(keep.held)) / self.unit

    def _dropped(self, j: int, run: int) -> float:
        """No fewer bytes than an inner segment around stage `j` spares the run of a stage, `j` or a later one."""
        stage, storages = self.profile.stages[j], self.profile.storages
        if stage.is_glue:
            return 0.0
        again = self.again(j)
        if j == run:
            return max(0, stage.keep.forward_bytes - again.forward_bytes) / self.unit
        held_before = set(again.held).difference(stage.linked)
        return sum(storages[s].nbytes for s in set(stage.keep.held) - held_before) / self.unit

    def _copies(self, k: int) -> list[Any]:
        """Bytes of the copies that sweeps have made and that are there in backward step `k`."""
        found = []
        for size, group in self.copied:
            least = [low for holder in group.holders if holder.stage <= k for low in self._has_copy(group, holder, k)]
            if least:
                copy = self.implied()
                for low in least:
                    self.require(copy >= low)
                found.append(size * copy)
        return found

    def _has_copy(self, group: _Group, holder: _Holder, k: int) -> list[Any]:
        """Sums of variables that are 1 or more only if `holder` has a copy in backward step `k` (rules 2 and 6)."""
        j, s = holder.stage, group.storage
        stage = self.profile.stages[j]
        if stage.is_glue or (j, k) not in self.sums:
            return []
        born = rules.latest_first(self.profile.storages[s])
        kept, recomputed = s in stage.keep.held, s in self.recomputed[j]
        if recomputed and not holder.linked:
            return []  # it held the original all the while
        # What its recompute holds too is a copy where a stage of the segment made it.
        first = min(born, j) if recomputed else j
        made = (first, k) in self.sums
        if j == k:
            if not made:
                return []
            outer = [self.whole(first, k + 1)] if kept else []
            last = [self.whole(first, k) - self.whole(first, k + 1)] if recomputed else []
            less = [-var for var in self.ending[k]] if kept and not recomputed else []
            less += [-self.m[j]] if s in self.more[j] else []
            return [self.sum(outer + last + less)]
        lows = []
        dropped = self.e.get((j, k))
        if kept and made:
            # What it holds by moving is no copy.
            held = self.m[j] if s in self.more[j] else 0.0
            lows.append(self.whole(first, k) - (0.0 if dropped is None else dropped) - held)
        if recomputed and dropped is not None:
            # A dropped stage holds what was made before the inner segment, of which it may be the first stage.
            without = [var for (a, b), var in self.w.items() if a <= j <= b < k and a <= born]
            lows.append(dropped - self.whole(j, k, born) - self.sum(without))
        return lows

    def bound_s(self, value: float, tolerance: float) -> float:
        """The makespan in seconds that the solver's bound stands for, less what its tolerance may add to it.

        A reduced cost may be wrong by the tolerance, and adds as much of its variable's range. A value of which
        a baseline is less than `CLOSE`, or that nothing fits, is no bound: it comes of numbers too far apart.
        """
        if not value * CLOSE < 1:
            return self.profile.fastest_step_s
        return max(self.profile.fastest_step_s, (value * (1 - tolerance) - self.span * tolerance) * self.second)

    def read(self, values: Mapping[int, float]) -> Suggestion:
        """The plan of a solution.

        Parameters
        ----------
        values : mapping
            Number of each variable above 0 -> its value.
        """
        ones = {number for number, value in values.items() if round(value)}
        outer = sorted(c for c, var in self.y.items() if var.id in ones)
        inner = sorted((c for c, var in self.w.items() if var.id in ones), key=lambda c: (c[0] - c[1], c))
        codes = []
        for i in range(self.n):
            single = [code for code, var in self.x[i].items() if var.id in ones]
            moves = i in self.m and self.m[i].id in ones
            codes.append(single[0] if single else max(self.space.inside[i]) if moves else self.space.recompute(i))
        transfers = []
        for o, parts in enumerate(self.parts):
            for number, part in enumerate(parts):
                if values.get(part.moves.id, 0.0) > (0.5 if part.one else SOLVER_ERROR):
                    steps = self.done[1].get((o, number), ())
                    awaited = next((o + k for k, z in enumerate(steps, 1) if z.id in ones), self.n)
                    transfers.append((awaited, o, list(part.storages)))
        transfers.sort()
        forest = tuple(_tree(c, inner) for c in outer)
        return Suggestion(codes, forest, [(o, storages) for _, o, storages in transfers])


class PeakModel(MixedModel):
    """The smallest budget for which a plan exists: the same choices and rows without time, in whole bytes.

    Parameters
    ----------
    space, host_bytes
        As of a `MixedModel`.
    most_bytes : int
        The peak of a plan that is known.
    deadline : float
        Of `time.monotonic()`.

    Raises
    ------
    TimeoutError
        If it isn't built by then.
    """

    def __init__(
        self,
        space: PlanSpace,
        most_bytes: int,
        *,
        host_bytes: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.begin(space, 1.0, 1.0)
        self.most = float(most_bytes)
        self.slack_s = math.inf
        self.deadline = deadline
        self.room = self.amount(self.most)
        self.require(self.room >= self.profile.update_peak_bytes)
        self.add_plans(host_bytes)
        self.away = [self.most_out(), self.most_back()]
        self.add_memory()
        self.program.cost = self.room

    def amount(self, upper: float) -> Any:
        """A variable from 0 to `upper`, whole bytes."""
        var = super().amount(upper)
        self.parts_of[var.id] = 1
        return var

    def require(self, row: Any) -> None:
        """Add a constraint, in time."""
        if time.monotonic() > self.deadline:
            raise TimeoutError
        super().require(row)

    def is_large(self, nbytes: int) -> bool:
        """Return False: in whole bytes, the number of storages of one size that move is a variable."""
        return False

    def alike(self, s: int) -> int | None:
        """Return the storage's size."""
        return self.profile.storages[s].nbytes

    def most_out(self) -> list[Any]:
        """Per forward step, all that is copied out, from where it may be away."""
        copied = [(o, part) for o, parts in enumerate(self.parts) for part in parts if not part.on_host]
        return [
            self.sum([part.size * part.moves for o, part in copied if o < k and k >= part.gone]) for k in range(self.n)
        ]

    def most_back(self) -> list[Any]:
        """Per backward step, all that moves, unless it is needed in a sweep."""
        away: list[list[Any]] = [[] for _ in range(self.n)]
        for o, moved in self.moved.items():
            for k in range(o + 1, self.n):
                var = moved
                if (o, k) in self.sums:
                    var = self.amount(self.most_moved[o])
                    self.require(var <= moved)
                    self.require(var <= self.most_moved[o] * (1 - self.whole(o, k)))
                away[k].append(var)
        return [self.sum(terms) for terms in away]


def _intervals(segment: Segment) -> Iterator[tuple[int, int]]:
    """First and last stage of a segment, and of those in it."""
    yield segment.first, segment.last
    for inner in segment.inner:
        yield from _intervals(inner)


def _tree(segment: tuple[int, int], inner: Sequence[tuple[int, int]]) -> Segment:
    """A segment with those of `inner`, the longest first, that lie in it and don't cross."""
    a, b = segment
    within = [c for c in inner if a <= c[0] and c[1] < b]
    top: list[tuple[int, int]] = []
    for c in within:
        if all(c[1] < other[0] or other[1] < c[0] for other in top):
            top.append(c)
    return Segment(a, b, tuple(_tree(c, [d for d in within if d != c]) for c in sorted(top)))
