"""Independent of the solver and of core's rules on purpose: the best plan of a small chain by trying them all.

The plan space, written out once more: a sequence of single stages, each with an option of its menu, and of segments
whose stages recompute; in the sweep of a segment each stage is kept or in an inner segment. Segments begin and end with
module stages. What may move is worked out here from NOTE
[Residency]; bytes and seconds are the referee's. For given options and segments every part of what may move is
tried, in every division into transfers, with every release and every prefetch point: the two apart, since a lane has no
part in the other's half of the step. `fastest_of_all_points` has no idea of that: there the referee prices all of them
together, up to three stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from ckptplan.core.option import ACTIONS, Option
from ckptplan.core.plan import Decision, Transfer
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.referee import simulate
from ckptplan.referee.simulate import Timeline


@dataclass(eq=False)
class Combination:
    """An option for every stage, the segments, and the compute time of a step with them."""

    compute_s: float
    options: tuple[Option, ...]
    segments: tuple[Segment, ...]
    steps: tuple[Profile, _Steps] | None = None
    """Of the profile for which they were asked last."""


Placing = Callable[[Sequence[Decision], Sequence[int], int | None, int], Iterator[tuple[Decision, ...]]]
"""Decisions, what each stage moves, and the limits of host and disk -> decisions with their tiers."""


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

    def _moving_s(self, first: int, chosen: Sequence[Option]) -> float:
        """What the moves of the stages of a segment take of compute."""
        total_s = 0.0
        for stage, option in zip(self.stages[first:], chosen, strict=False):
            if option.name == "recompute+swap":
                total_s += max(0.0, option.overhead_s - stage.option("recompute").overhead_s)
        return total_s

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
                inside = itertools.product(*[self._recomputes(k, i) for k in range(i, last + 1)])
                choices = [(chosen, self._moving_s(i, chosen)) for chosen in inside]
                whole_s = sum(stage.forward_s + stage.backward_s for stage in self.stages[i : last + 1])
                for tree in self._trees(i, last):
                    for c in done[last + 1]:
                        compute_s = whole_s + tree.extra_s + c.compute_s
                        done[i] += [
                            Combination(compute_s + moving_s, (*chosen, *c.options), tree.segments + c.segments)
                            for chosen, moving_s in choices
                        ]
        return done[0]


def combinations(profile: Profile, *, actions: Sequence[str] = ACTIONS, segments: bool = True) -> list[Combination]:
    """The whole plan space but for the schedules, the shortest compute time first."""
    return sorted(_Space(profile, actions, segments=segments).suffixes(), key=attrgetter("compute_s"))


def decision(option: Option, moves: tuple[int, ...] = (), release: int = 0, prefetch: int = 0) -> Decision:
    """A decision for `option`; without moves it has no points."""
    return Decision.moving(option.action, moves, release, prefetch, option.name, ops=option.ops)


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
                and storage.graph_until is None
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


def by_rule(
    choices: Sequence[Decision], sizes: Sequence[int], host_bytes: int | None, disk_bytes: int
) -> Iterator[tuple[Decision, ...]]:
    """Of the `divisions` the one of plans, if there is any.

    The host takes each stage's bytes in turn that still fit. Where that is too much for the disk, the host is as full
    as can be, of early stages where several are.
    """
    every = list(divisions(choices, sizes, host_bytes, disk_bytes))
    in_turn: list[Decision] = []
    held = 0
    for choice, size in zip(choices, sizes, strict=True):
        fits = host_bytes is None or held + size <= host_bytes
        held += size if fits else 0
        in_turn.append(choice if fits else replace(choice, tier="disk"))
    if tuple(in_turn) in every:
        yield tuple(in_turn)
    elif every:
        yield max(
            every,
            key=lambda divided: (
                sum(size for choice, size in zip(divided, sizes, strict=True) if choice.tier == "host"),
                -sum(1 << i for i, choice in enumerate(divided) if choice.moves and choice.tier == "host"),
            ),
        )


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
        for parts in parts_of(profile, found, moves, together=False):
            choices = [
                decision(option, tuple(p for group in groups for p in group.positions), i, moves.back_by[i])
                for i, (option, groups) in enumerate(zip(found.options, parts, strict=True))
            ]
            sizes = [sum(group.nbytes for group in groups) for groups in parts]
            if any(True for _ in divisions(choices, sizes, host_bytes, disk_bytes)):
                best = min(best, simulate(profile, choices, found.segments).peak_bytes)
                if host_bytes is None:
                    break  # with all of it away
    return int(best)


class _Steps(NamedTuple):
    """Bytes and seconds of the steps of a combination with all away that may move, by stage; seconds of launching."""

    forward: list[int]
    backward: list[int]
    backward_s: list[float]
    launch_s: float


def _steps_of(profile: Profile, found: Combination, moves: Moves) -> _Steps:
    """Bytes at the worst moment of each step; a sweep is a part of the backward step that follows."""
    n = len(found.options)
    away = simulate(profile, tightest(found, moves, range(n)), found.segments)
    numbers = {stage.name: k for k, stage in enumerate(profile.stages)}
    forward, backward, sweep = [0] * n, [0] * n, 0
    for step in away.steps:
        k = numbers[step.stage]
        if step.phase == "forward":
            forward[k] = step.peak_bytes
        elif step.sweep:
            sweep = max(sweep, step.peak_bytes)
        elif step.phase == "backward":
            backward[k], sweep = max(sweep, step.peak_bytes), 0
    still = simulate(profile, [decision(option) for option in found.options], found.segments)
    begins: list[float] = []  # of the backward steps, sweeps included
    fresh = True
    for step in still.steps:
        if step.phase == "backward":
            if fresh:
                begins.append(step.start_s)
            fresh = not step.sweep
    ends = [*begins[1:], still.events[-1].end_s]
    backward_s = [end - begin for begin, end in zip(begins, ends, strict=True)][::-1]
    return _Steps(forward, backward, backward_s, still.launch_s)


def work(profile: Profile, within: Iterable[Combination]) -> int:
    """How many choices of transfers and points of a lane `fastest` tries at most, for all combinations together."""
    n = len(profile.stages)
    return sum(
        math.prod((n + 1 - i) ** len(positions) for i, positions in enumerate(moves_of(profile, found).positions))
        for found in within
    )


class Group(NamedTuple):
    """What a stage moves in one transfer."""

    stage: int
    positions: tuple[int, ...]
    nbytes: int
    copied_bytes: int
    there: dict[int, int]
    """The last forward step in which the program holds some of the bytes -> how many."""


def there_until(profile: Profile, i: int, option: Option, positions: Iterable[int]) -> dict[int, int]:
    """The last forward step in which some bytes are there if they are copied at once -> how many."""
    found: dict[int, int] = {}
    for p in positions:
        storage = profile.storages[option.saved[p]]
        until = min(max(i, storage.program_until), len(profile.stages) - 1)
        found[until] = found.get(until, 0) + storage.nbytes
    return found


def parts_of(
    profile: Profile, found: Combination, moves: Moves, *, together: bool
) -> Iterator[tuple[tuple[Group, ...], ...]]:
    """Every choice of transfers, by stage; of those with equal sizes at each stage one. The first moves all of it.

    Parameters
    ----------
    together : bool
        Whether several storages may be one transfer, which takes less time where copies have a latency.
    """

    def groupings(positions: Sequence[int]) -> Iterator[list[list[int]]]:
        """Every way to leave some out and to divide the rest."""
        if not positions:
            yield []
            return
        for rest in groupings(positions[1:]):
            yield [[positions[0]], *rest]
            if together:
                for at in range(len(rest)):
                    yield [*rest[:at], [positions[0], *rest[at]], *rest[at + 1 :]]
            yield rest

    stages = []
    for i, (option, positions) in enumerate(zip(found.options, moves.positions, strict=True)):
        size = {p: profile.storages[option.saved[p]].nbytes for p in positions}
        new = {p: not profile.storages[option.saved[p]].on_host for p in positions}
        alike: dict[Any, tuple[Group, ...]] = {}
        for way in groupings(positions):
            there = [there_until(profile, i, option, group) for group in way]
            each = [sorted((size[p], new[p], *there_until(profile, i, option, [p])) for p in group) for group in way]
            groups = [
                Group(i, tuple(sorted(group)), sum(size[p] for p in group), sum(size[p] * new[p] for p in group), until)
                for group, until in zip(way, there, strict=True)
            ]
            alike.setdefault(str(sorted(each)), tuple(groups))
        stages.append(sorted(alike.values(), key=lambda groups: -sum(group.nbytes for group in groups)))
    yield from itertools.product(*stages)


def _out_s(queue: Sequence[tuple[int, int, float]], compute_s: Sequence[float]) -> float:
    """End of a forward whose copies (stage, release point, seconds), in the queue's order, compute waits for."""
    now = free = 0.0
    done: list[float] = []
    for k, seconds in enumerate(compute_s):
        now += seconds
        for i, _, copy_s in queue:
            if i == k:
                free = max(free, now) + copy_s
                done.append(free)
        for (_, release, _), end in zip(queue, done, strict=False):
            if release == k:
                now = max(now, end)
    return now


def _back_s(queue: Sequence[tuple[int, int, int, float]], compute_s: Sequence[float]) -> float:
    """Duration of a backward whose copies (stage, prefetch point, back by, seconds) are in the order of stages."""
    now = free = 0.0
    done: dict[int, float] = {}
    for k in reversed(range(len(compute_s))):
        for number, (_, prefetch, _, copy_s) in reversed(list(enumerate(queue))):
            if prefetch == k:
                free = max(free, now) + copy_s
                done[number] = free
        for number, (_, _, back_by, _) in enumerate(queue):
            if back_by == k:
                now = max(now, done[number])
        now += compute_s[k]
    return now


def _points(
    groups: Sequence[Group], spans: Sequence[Sequence[int]], begins: Sequence[dict[int, int]], needs: Sequence[int],
    budget_bytes: int,
) -> Iterator[tuple[int, ...]]:  # fmt: skip
    """Every choice of one point per transfer that fits: its bytes are there from behind `begins` up to its point."""
    free = [budget_bytes - need for need in needs]

    def rest(at: int, free: list[int]) -> Iterator[tuple[int, ...]]:
        if at == len(groups):
            yield ()
            return
        for point in spans[groups[at].stage]:
            left = [
                f - sum(nbytes for begin, nbytes in begins[at].items() if begin < k <= point)
                for k, f in enumerate(free)
            ]
            if min(left) >= 0:
                for others in rest(at + 1, left):
                    yield (point, *others)

    if min(free) >= 0:
        yield from rest(0, free)


def fastest_of(
    profile: Profile,
    found: Combination,
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    disk_bytes: int = 0,
    below_s: float = math.inf,
    placed: Placing = divisions,
) -> list[Decision] | None:
    """The fastest decisions for one combination: all transfers, points, tiers of `placed`; None if none is below."""
    n = len(found.options)
    moves = moves_of(profile, found)
    if found.steps is None or found.steps[0] is not profile:
        found.steps = profile, _steps_of(profile, found, moves)
    steps = found.steps[1]
    modules = [k for k in range(n) if not profile.stages[k].is_glue] or list(range(n))
    backwards = [k for k in modules if not profile.stages[k].find("discard")] or modules
    releases = [range(i, modules[-1] + 1) for i in range(n)]
    prefetches = [[k for k in backwards if k >= moves.back_by[i]] for i in range(n)]
    forward_s = [stage.forward_s for stage in profile.stages]
    if max(*steps.forward, *steps.backward) > budget_bytes or steps.launch_s >= below_s:
        return None
    together = any(link is not None and link.latency_s > 0 for link in (profile.link, profile.disk))
    best: list[Decision] | None = None
    for parts in parts_of(profile, found, moves, together=together):
        groups = [group for stage in parts for group in stage]
        sizes = [sum(group.nbytes for group in stage) for stage in parts]
        stays = [whole - size for whole, size in zip(moves.sizes, sizes, strict=True)]
        staying = [
            there_until(profile, i, option, set(all_of).difference(*(group.positions for group in stage)))
            for i, (option, all_of, stage) in enumerate(zip(found.options, moves.positions, parts, strict=True))
        ]
        forward = [
            need + sum(nbytes for stage in staying for until, nbytes in stage.items() if until < k)
            for k, need in enumerate(steps.forward)
        ]
        backward = [
            need + sum(stay for stay, back_by in zip(stays, moves.back_by, strict=True) if back_by < k)
            for k, need in enumerate(steps.backward)
        ]
        choices = [
            decision(o, tuple(p for group in stage for p in group.positions))
            for o, stage in zip(found.options, parts, strict=True)
        ]
        for divided in placed(choices, sizes, host_bytes, disk_bytes):
            ways = [profile.disk if c.tier == "disk" and profile.disk is not None else profile.link for c in divided]
            out, back = (math.inf, ()), (math.inf, ())
            for at in _points(groups, releases, [g.there for g in groups], forward, budget_bytes):
                # Of a stage's transfers the one that must be gone first leaves first.
                queue = sorted(
                    (g.stage, point, ways[g.stage].out_s(g.copied_bytes))
                    for g, point in zip(groups, at, strict=True)
                    if g.copied_bytes
                )
                out = min(out, (_out_s(queue, forward_s), at))
            if out[0] + sum(steps.backward_s) >= below_s:
                continue
            back_by = [{moves.back_by[g.stage]: g.nbytes} for g in groups]
            for at in _points(groups, prefetches, back_by, backward, budget_bytes):
                copies = [
                    (g.stage, point, moves.back_by[g.stage], ways[g.stage].in_s(g.nbytes))
                    for g, point in zip(groups, at, strict=True)
                ]
                back = min(back, (_back_s(copies, steps.backward_s), at))
            if max(out[0] + back[0], steps.launch_s) < below_s:
                below_s = max(out[0] + back[0], steps.launch_s)
                best = list(divided)
                sent = sorted(zip(groups, out[1], back[1], strict=True), key=itemgetter(1))
                for i in range(n):
                    own = tuple(Transfer(g.positions, *points) for g, *points in sent if g.stage == i)
                    best[i] = replace(best[i], transfers=own)
    return best


def fastest_plan(
    profile: Profile,
    budget_bytes: int,
    *,
    actions: Sequence[str] = ACTIONS,
    host_bytes: int | None = None,
    disk_bytes: int = 0,
    segments: bool = True,
    within: Iterable[Combination] | None = None,
    below_s: float = math.inf,
    placed: Placing = divisions,
) -> tuple[Timeline, list[Decision], Combination] | None:
    """The fastest plan within the budgets that takes less than `below_s`, by the referee; None where there is none.

    Parameters
    ----------
    within : iterable of Combination, optional
        Try these, in order of their compute time, instead of all.
    placed : callable, optional
        Yields the tiers that are tried for the moves of a plan: all, or those `by_rule`.
    """
    best = None
    if profile.update_peak_bytes > budget_bytes:
        return None
    for found in combinations(profile, actions=actions, segments=segments) if within is None else within:
        if found.compute_s >= below_s:
            break
        # Sums of the same seconds in another order may differ by a rounding.
        chosen = fastest_of(
            profile,
            found,
            budget_bytes,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            below_s=below_s * (1 - 1e-12),
            placed=placed,
        )
        if chosen is not None:
            timeline = simulate(profile, chosen, found.segments)
            assert timeline.peak_bytes <= budget_bytes, (timeline.peak_bytes, budget_bytes, found)
            assert timeline.disk_bytes <= disk_bytes
            assert host_bytes is None or timeline.host_bytes <= host_bytes
            assert timeline.makespan_s < below_s
            best, below_s = (timeline, chosen, found), timeline.makespan_s
    return best


def fastest(profile: Profile, budget_bytes: int, **options: Any) -> float | None:
    """Smallest makespan in seconds of any plan within the budgets, `fastest_plan`; None where none fits."""
    found = fastest_plan(profile, budget_bytes, **options)
    return None if found is None else found[0].makespan_s


def fastest_of_all_points(
    profile: Profile, budget_bytes: int, *, host_bytes: int | None = None, within: Iterable[Combination] | None = None
) -> float | None:
    """As `fastest`, by the referee alone."""
    n = len(profile.stages)
    modules = [k for k in range(n) if not profile.stages[k].is_glue] or list(range(n))
    backwards = [k for k in modules if not profile.stages[k].find("discard")] or modules
    best = math.inf
    for found in combinations(profile) if within is None else within:
        if found.compute_s >= best:
            break
        moves = moves_of(profile, found)
        for parts in parts_of(profile, found, moves, together=profile.link.latency_s > 0):
            spans = [
                [
                    replace(decision(option), transfers=tuple(transfers))
                    for order in itertools.permutations(groups)
                    for transfers in itertools.product(
                        *(
                            [
                                Transfer(group.positions, release, prefetch)
                                for release in range(i, modules[-1] + 1)
                                for prefetch in backwards
                                if prefetch >= moves.back_by[i]
                            ]
                            for group in order
                        )
                    )
                ]
                for i, (option, groups) in enumerate(zip(found.options, parts, strict=True))
            ]
            for choices in itertools.product(*spans):
                timeline = simulate(profile, choices, found.segments)
                if timeline.peak_bytes <= budget_bytes and (host_bytes is None or timeline.host_bytes <= host_bytes):
                    best = min(best, timeline.makespan_s)
    return None if best == math.inf else best
