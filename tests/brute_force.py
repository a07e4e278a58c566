"""Independent of the solver and of core's rules on purpose: the best plan of a small chain by trying them all.

The plan space, written out once more: a sequence of single stages, each with an option of its menu, and of segments
whose stages recompute; in the sweep of a segment each stage is kept or in an inner segment. Segments begin and end at
module stages, since one with glue at its ends is the same as one without. What may move is worked out here from NOTE
[Residency]; bytes and seconds are the referee's. For given options and segments the points are as late as fits, from
the last stage that moves to the first, none behind that of a later stage; `fastest_of_all_points` has no idea of that
and tries every release and prefetch point instead, for up to three stages or so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ckptplan.core.option import ACTIONS, Option
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.referee import simulate
from ckptplan.referee.simulate import Timeline


class Combination(NamedTuple):
    """An option for every stage, the segments, and the compute time of a step with them."""

    compute_s: float
    options: tuple[Option, ...]
    segments: tuple[Segment, ...]


class _Forest(NamedTuple):
    """Segments within a stretch of stages, and the compute time they add."""

    extra_s: float
    segments: tuple[Segment, ...]


class _Space:
    """All combinations of a chain, built from those of its suffixes."""

    def __init__(self, profile: Profile, actions: Sequence[str], *, segments: bool) -> None:
        self.stages = profile.stages
        self.menus = [[option for option in stage.options if option.allowed(actions)] for stage in profile.stages]
        self.born = [storage.born for storage in profile.storages]
        self.segments = segments and "recompute" in actions
        self._inner: dict[tuple[int, int], list[_Forest]] = {}

    def _ends(self, first: int, limit: int) -> Iterator[int]:
        """Last stages of the segments that begin at `first` and end before `limit`."""
        if self.stages[first].is_glue:
            return
        for last in range(first, limit):
            if not self.stages[last].is_glue:
                if self.stages[last].recompute is None:
                    return
                yield last

    def _trees(self, first: int, last: int) -> Iterator[_Forest]:
        """Segment `first..last` with every choice of what its sweep does; the time is all that it adds."""
        again = self.stages[last].recompute
        assert again is not None
        sweep_s = sum(s.forward_s + s.rerun_overhead_s for s in self.stages[first:last] if not s.is_glue)
        for inner in self._forests(first, last):
            yield _Forest(sweep_s + again.added_s + inner.extra_s, (Segment(first, last, inner.segments),))

    def _forests(self, first: int, limit: int) -> list[_Forest]:
        """Every choice for the stages `first..limit-1` of a sweep: kept, or in inner segments."""
        if first == limit:
            return [_Forest(0.0, ())]
        if (first, limit) not in self._inner:
            found = list(self._forests(first + 1, limit))
            for last in self._ends(first, limit):
                for tree in self._trees(first, last):
                    for rest in self._forests(last + 1, limit):
                        found.append(_Forest(tree.extra_s + rest.extra_s, tree.segments + rest.segments))
            self._inner[first, limit] = found
        return self._inner[first, limit]

    def _recomputes(self, i: int, first: int) -> list[Option]:
        """The options of stage `i` in a segment from `first`; without the swap where it could move nothing."""
        stage = self.stages[i]
        if stage.is_glue:
            return [stage.keep]
        found = []
        for option in self.menus[i]:
            if option.name == "recompute":
                found.append(option)
            elif option.name == "recompute+swap":
                plain = stage.option("recompute")
                dropped = {s for s in stage.linked if self.born[s] >= first}
                if not set(option.moved) <= dropped or option.forward_bytes < plain.forward_bytes:
                    found.append(option)
        return found

    def suffixes(self) -> list[Combination]:
        """All combinations; those of the stages from `i` on are made of those of later stages."""
        n = len(self.stages)
        done: list[list[Combination]] = [[] for _ in range(n + 1)]
        done[n] = [Combination(0.0, (), ())]
        for i in reversed(range(n)):
            stage = self.stages[i]
            plain_s = stage.forward_s + stage.backward_s
            for option in self.menus[i]:
                own_s = plain_s + option.added_s
                done[i] += [Combination(own_s + c.compute_s, (option, *c.options), c.segments) for c in done[i + 1]]
            for last in self._ends(i, n) if self.segments else ():
                if last == i:
                    continue
                choices = list(itertools.product(*[self._recomputes(k, i) for k in range(i, last + 1)]))
                whole_s = sum(stage.forward_s + stage.backward_s for stage in self.stages[i : last + 1])
                for tree in self._trees(i, last):
                    for c in done[last + 1]:
                        compute_s = whole_s + tree.extra_s + c.compute_s
                        done[i] += [
                            Combination(compute_s, (*chosen, *c.options), tree.segments + c.segments)
                            for chosen in choices
                        ]
        return done[0]


def combinations(profile: Profile, *, actions: Sequence[str] = ACTIONS, segments: bool = True) -> list[Combination]:
    """The whole plan space but for the schedules, the shortest compute time first."""
    return sorted(_Space(profile, actions, segments=segments).suffixes(), key=itemgetter(0))


def decision(
    option: Option, moves: tuple[int, ...] = (), release: int | None = None, prefetch: int | None = None
) -> Decision:
    """A decision for `option`; without moves it has no points."""
    if not moves:
        return Decision(option.action, option=option.name, ops=option.ops)
    return Decision(option.action, moves, release, prefetch, option.name, option.ops)


class Moves(NamedTuple):
    """What a combination moves, by stage, if everything that may move does.

    `positions` are those in the option's `saved`, `back_by` the backward step by whose start they must be back.
    """

    positions: list[tuple[int, ...]]
    sizes: list[int]
    back_by: list[int]


def moves_of(profile: Profile, found: Combination) -> Moves:
    """Rule 4 of NOTE [Residency]; what the last stage would move is never away."""
    n = len(found.options)
    back_by = list(range(n))
    holds = [set(option.held) for option in found.options]
    for segment in found.segments:
        for i in range(segment.first, segment.last + 1):
            back_by[i] = segment.last
            holds[i] -= {s for s in profile.stages[i].linked if profile.storages[s].born >= segment.first}
    moving = [set(option.moved) & holds[i] for i, option in enumerate(found.options)]
    positions = []
    for i, option in enumerate(found.options):
        others = [j for j in range(n) if j != i]
        chosen = []
        for p in option.moves:
            s, storage = option.saved[p], profile.storages[option.saved[p]]
            if (
                i < n - 1
                and s in moving[i]
                and storage.nbytes
                and not storage.stays
                and not storage.to_end
                and storage.program_until <= i
                and all(s not in holds[j] or (j < i and s in moving[j]) for j in others)
            ):
                chosen.append(p)
        positions.append(tuple(chosen))
    sizes = [
        sum(profile.storages[option.saved[p]].nbytes for p in chosen)
        for option, chosen in zip(found.options, positions, strict=True)
    ]
    return Moves(positions, sizes, back_by)


def tightest(found: Combination, moves: Moves, movers: Sequence[int]) -> list[Decision]:
    """Decisions by which what `movers` move is away wherever it can be, and nothing else moves."""
    return [
        decision(option, moves.positions[i] if i in movers else (), i, moves.back_by[i])
        for i, option in enumerate(found.options)
    ]


def lazy(profile: Profile, found: Combination, budget_bytes: int) -> tuple[list[Decision], list[int]] | None:
    """Decisions whose points are as late as fits, and what each stage moves; None where nothing fits."""
    moves, n = moves_of(profile, found), len(found.options)
    timeline = simulate(profile, tightest(found, moves, range(n)), found.segments)
    if timeline.peak_bytes > budget_bytes:
        return None
    # Bytes per step at the worst moment; a sweep is a part of the backward step that follows.
    forward, backward, sweep = [0] * n, [0] * n, 0
    numbers = {stage.name: k for k, stage in enumerate(profile.stages)}
    for step in timeline.steps:
        k = numbers[step.stage]
        if step.phase == "forward":
            forward[k] = step.peak_bytes
        elif step.sweep:
            sweep = max(sweep, step.peak_bytes)
        elif step.phase == "backward":
            backward[k], sweep = max(sweep, step.peak_bytes), 0
    modules = [k for k in range(n) if not profile.stages[k].is_glue] or list(range(n))
    decisions = []
    limits = (n - 1, n - 1)  # copies run in the order of stages: none waits for the point of a later stage
    for i in reversed(range(n)):
        points = []
        for needs, point, limit in zip((forward, backward), (i, moves.back_by[i]), limits, strict=True):
            while point < limit and needs[point + 1] + moves.sizes[i] <= budget_bytes:
                point += 1
                needs[point] += moves.sizes[i]
            points.append(point)
        if moves.sizes[i]:
            limits = (points[0], points[1])
        release, prefetch = min(points[0], modules[-1]), max([k for k in modules if k <= points[1]] or modules[:1])
        stays = points == [n - 1, n - 1]
        decisions.append(decision(found.options[i], () if stays else moves.positions[i], release, prefetch))
    return decisions[::-1], moves.sizes


def divisions(
    choices: Sequence[Decision], sizes: Sequence[int], host_bytes: int | None, disk_bytes: int
) -> Iterator[tuple[Decision, ...]]:
    """Every choice of tiers that keeps both limits; `sizes` are what stages move."""
    movers = [i for i, choice in enumerate(choices) if choice.moves]
    for on_disk in itertools.product((False, True) if disk_bytes else (False,), repeat=len(movers)):
        disk = [i for i, away in zip(movers, on_disk, strict=True) if away]
        disk_size = sum(sizes[i] for i in disk)
        if disk_size > disk_bytes or (
            host_bytes is not None and sum(sizes[i] for i in movers) - disk_size > host_bytes
        ):
            continue
        yield tuple(replace(choice, tier="disk") if i in disk else choice for i, choice in enumerate(choices))


def smallest_peak(
    profile: Profile,
    *,
    actions: Sequence[str] = ACTIONS,
    host_bytes: int | None = None,
    disk_bytes: int = 0,
    segments: bool = True,
    within: Iterable[Combination] | None = None,
) -> int:
    """Smallest peak of any plan that sends at most so many bytes to each tier.

    Parameters
    ----------
    within : iterable of Combination, optional
        Try these instead of all; to enumerate them once for several questions.
    """
    best = math.inf
    for found in combinations(profile, actions=actions, segments=segments) if within is None else within:
        moves = moves_of(profile, found)
        movers = [i for i, positions in enumerate(moves.positions) if positions]
        # The first of them that the tiers have room for: queues are first in, first out.
        choices = tightest(found, moves, movers)
        while not any(True for _ in divisions(choices, moves.sizes, host_bytes, disk_bytes)):
            movers.pop()
            choices = tightest(found, moves, movers)
        best = min(best, simulate(profile, choices, found.segments).peak_bytes)
    return int(best)


def fastest(
    profile: Profile,
    budget_bytes: int,
    *,
    actions: Sequence[str] = ACTIONS,
    host_bytes: int | None = None,
    disk_bytes: int = 0,
    segments: bool = True,
    within: Iterable[Combination] | None = None,
) -> float | None:
    """Smallest makespan in seconds of any plan within the budgets; None where none fits.

    Parameters
    ----------
    within : iterable of Combination, optional
        Try these, in order of their compute time, instead of all.
    """
    if profile.update_peak_bytes > budget_bytes:
        return None
    best = math.inf
    for found in combinations(profile, actions=actions, segments=segments) if within is None else within:
        if found.compute_s >= best:
            break
        scheduled = lazy(profile, found, budget_bytes)
        if scheduled is None:
            continue
        for divided in divisions(*scheduled, host_bytes, disk_bytes):
            timeline = simulate(profile, divided, found.segments)
            assert timeline.peak_bytes <= budget_bytes, (timeline.peak_bytes, budget_bytes, found)
            assert timeline.disk_bytes <= disk_bytes
            if host_bytes is None or timeline.host_bytes <= host_bytes:
                best = min(best, timeline.makespan_s)
    return None if best == math.inf else best


def fastest_of_all_points(
    profile: Profile,
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    within: Iterable[Combination] | None = None,
    needs: Callable[[Timeline], int] = attrgetter("peak_bytes"),
) -> float | None:
    """As `fastest`, with every release and prefetch point tried, and for every number of first movers.

    What later stages would move stays: their bytes never need to be away. `needs` are the bytes that have to fit.
    """
    n = len(profile.stages)
    modules = [k for k in range(n) if not profile.stages[k].is_glue] or list(range(n))
    best = math.inf
    for found in combinations(profile) if within is None else within:
        if found.compute_s >= best:
            break
        moves = moves_of(profile, found)
        movers = [i for i in range(n) if moves.positions[i]]
        for count in range(len(movers) + 1):
            spans = [
                [
                    decision(found.options[i], moves.positions[i], release, prefetch)
                    for release in range(i, modules[-1] + 1)
                    for prefetch in modules
                    if prefetch >= moves.back_by[i]
                ]
                for i in movers[:count]
            ]
            choices = [decision(option) for option in found.options]
            for chosen in itertools.product(*spans):
                for i, choice in zip(movers, chosen, strict=False):
                    choices[i] = choice
                timeline = simulate(profile, choices, found.segments)
                if needs(timeline) <= budget_bytes and (host_bytes is None or timeline.host_bytes <= host_bytes):
                    best = min(best, timeline.makespan_s)
    return None if best == math.inf else best
