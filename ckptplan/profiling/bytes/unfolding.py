"""Replays of a model of many equal layers from replays of a few of them.

The model is shortened to a few periods of each run of layers (folding.py). Its replays are written out: every segment
of the full model gets the trace of the one that stands for it, with the names of storages as seen from there. Bytes
follow from the changes of the storages, which are added up again. Example: of 24 equal blocks, blocks 0 to 3 are run;
the trace of block 1 stands for blocks 1 to 21, those of blocks 2 and 3 for 22 and 23.

This happens only if two comparisons find no difference:

- A replay in which the second and third period have changed places is equal to the replay: names, order and bytes of
  all operations and storages, in forward and backward.
- The forward of the full model, which saves nothing, is the written out one: its operations with all their operands,
  the tensors that each saves, is given and returns, and all bytes.

Otherwise the full model is replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import KEEP, Decision, Decisions
from ckptplan.profiling.bytes.fake import quiet
from ckptplan.profiling.bytes.folding import Periods, Run, UnlikeLayersError, find_runs, shortened
from ckptplan.profiling.bytes.origins import Where
from ckptplan.profiling.bytes.replays import Replay, find_stages, replay
from ckptplan.profiling.bytes.tracker import DETACHED, Change, SegmentTrace, Sid
from ckptplan.profiling.target import Target
from ckptplan.training.compiled import compiled_modules
from ckptplan.training.step import TrainingStep

_LEAST_SHARE = 0.2
"""Least share of the stages that is left out: for fewer, the comparisons take longer than they save."""

T = TypeVar("T")


class Folding:
    """Replays of a step that run only a few of the layers that repeat.

    Parameters
    ----------
    step : TrainingStep
    stages : tuple of str, optional
        Names of the full model's stages; by default found on the layers that are run, for `logged` alone.
    target : Target

    Attributes
    ----------
    stages : tuple of str
        Names of the shortened model's stages; all if too few layers repeat.
    positions : tuple of int
        Per stage of the full model, the shortened model's stage that stands for it, and their numbers of stages at the
        end. Glue has the position of the stage that follows it.
    twins : list of (int, int)
        Segments of the second period of each run of layers, and those of the third that are the same ones there.
    """

    def __init__(self, step: TrainingStep, stages: tuple[str, ...] | None, target: Target) -> None:
        self._step, self._target = step, target
        self._made: dict[Any, Replay] = {}
        self._is_checked = False
        self._runs = [] if _reads_values(step, target) else find_runs(step.model)
        self._are_found = stages is not None
        self._stages = self.stages = (self._inferred() if self._runs else ()) if stages is None else stages
        runs, self._runs = self._runs, []
        for run in runs:
            short = tuple(filter(None, map(run.shortened, self.stages)))
            periods = Periods.of(run, short)
            if periods is not None and periods.stages(short) == self.stages:
                self._runs.append(run)
                self.stages = short
        self.positions = tuple(range(len(self.stages) + 1))
        short = self.stages
        for run in reversed(self._runs):
            periods = _periods(run, short)
            self.positions, short = periods.repeated(self.positions), periods.stages(short)
        begins = [found.begins for run in self._runs if (found := Periods.of(run, self.stages)) is not None]
        self.twins = [(g, g + third - second) for _, second, third, *_ in begins for g in range(second, third)]
        if len(begins) < len(self._runs):
            self.give_up()
        if len(self.stages) > (1 - _LEAST_SHARE) * len(self._stages):
            self.give_up()

    def _inferred(self) -> tuple[str, ...]:
        """Names of the full model's stages, if they are those of the shortened one."""
        try:
            with quiet(), self.shortened():
                found = find_stages(self._step, self._target).stages
            for run in reversed(self._runs):
                found = _periods(run, found).stages(found)
        except Exception:  # a forward may need all its layers, or have no stages
            self._runs = []
            return ()
        return found

    def give_up(self) -> None:
        """From now on, run all layers."""
        self._runs, self.stages = [], self._stages
        self.positions = tuple(range(len(self.stages) + 1))

    @property
    def folds(self) -> bool:
        """Whether layers are left out."""
        return bool(self._runs)

    def shortened(self) -> contextlib.AbstractContextManager[None]:
        """Shorten the model while the context is active."""
        return shortened(self._step.model, self._runs)

    def replay(self, choices: tuple[Decision, ...], *, saves: bool) -> Replay:
        """Return the full model's replay with `choices` for its stages.

        The first one has to be one that saves nothing, which is compared with the full model's.

        Raises
        ------
        UnlikeLayersError
            If the shortened model doesn't stand for the full one.
        """
        if not saves:
            self._made.clear()  # of an earlier trace, before larger storages were known
        written_out = self._written_out(self.replay_few(self._chosen(choices), saves=saves))
        if saves:
            return written_out
        full = self._replayed(self._stages, choices, saves=False)
        if not _are_equal(written_out, full):
            raise UnlikeLayersError
        return full

    def replay_few(self, choices: tuple[Decision, ...], *, saves: bool) -> Replay:
        """Return the shortened model's replay with `choices` for its stages; made once.

        Raises
        ------
        UnlikeLayersError
            If it fails.
        """
        if (choices, saves) not in self._made:
            self._made[choices, saves] = self._few(choices, saves=saves)
        return self._made[choices, saves]

    def logged(self, *, inference: bool = False, **options: Any) -> tuple[Replay, tuple[str, ...]]:
        """Return the full model's replay with everything kept and its whole log, and the names of its stages.

        Parameters
        ----------
        inference : bool
            Of one forward that saves nothing instead.
        **options
            `accumulating` and `holds_output`, as in `replay` of replays.py.
        """
        step = self._step.without_loss() if inference else self._step
        options |= {"saves": not inference, "logs": True}
        if self.folds:
            try:
                if not self._is_checked:
                    self.replay((KEEP,) * len(self._stages), saves=False)
                self._is_checked = True
                few = self._few((KEEP,) * len(self.stages), step, **options)
                return self._written_out(few), self._stages
            except UnlikeLayersError:
                self.give_up()
        if not self._are_found:
            try:
                self._stages = self.stages = find_stages(self._step, self._target).stages
            except UnsupportedModelError:  # no module saves anything, as in a model that checkpoints by itself
                self._stages = self.stages = ("",)  # the model itself
            self._are_found = True
        return self._replayed(self._stages, (KEEP,) * len(self._stages), step, **options), self._stages

    def _few(self, choices: tuple[Decision, ...], step: TrainingStep | None = None, **options: Any) -> Replay:
        """The replay of the shortened model."""
        try:
            with quiet(), self.shortened():
                return self._replayed(self.stages, choices, step, **options)
        except Exception as error:  # a forward may need all its layers; an error of the full model is raised by its own
            raise UnlikeLayersError from error

    def _replayed(
        self, stages: tuple[str, ...], choices: tuple[Decision, ...], step: TrainingStep | None = None, **options: Any
    ) -> Replay:
        options.setdefault("accumulating", self._step.accumulates)
        return replay(step or self._step, Decisions(stages, choices), self._target, **options)

    def _chosen(self, choices: Sequence[Decision]) -> tuple[Decision, ...]:
        """The decisions for the shortened model's stages."""
        found: dict[int, Decision] = {}
        for stage, (source, choice) in enumerate(zip(self.positions, choices, strict=False)):
            if any((transfer.release, transfer.prefetch) != (stage, stage) for transfer in choice.transfers):
                raise UnlikeLayersError
            transfers = tuple(dataclasses.replace(t, release=source, prefetch=source) for t in choice.transfers)
            here = dataclasses.replace(choice, transfers=transfers)
            if found.setdefault(source, here) != here:
                raise UnlikeLayersError
        return tuple(found[source] for source in range(len(self.stages)))

    def _written_out(self, seen: Replay) -> Replay:
        if len(seen.forward) != 2 * len(self.stages) + 1 or seen.differentiated:
            raise UnlikeLayersError
        short = self.stages
        for run in reversed(self._runs):
            periods = _periods(run, short)
            kept = range(run.kept)
            orders = kept, (0, 2, 1, *kept[3:])
            if not _are_equal(*(_Unfolded(seen, periods, order).write() for order in orders)):
                raise UnlikeLayersError
            seen, short = _Unfolded(seen, periods, periods.order).write(), periods.stages(short)
        return seen


def _periods(run: Run, short: Sequence[str]) -> Periods:
    periods = Periods.of(run, short)
    if periods is None:
        raise UnlikeLayersError
    return periods


def _reads_values(step: TrainingStep, target: Target) -> bool:
    """Whether layers may depend on values, which are known for the full model alone, or are compiled.

    A step's own callable may reach the layers otherwise than by their container.
    """
    answers = target.answers
    return step.fn is not None or bool(answers is not None and answers.phases) or bool(compiled_modules(step.model))


def _are_equal(a: Replay, b: Replay) -> bool:
    """Whether two replays are equal, the order of the storages included."""
    return (
        a == b
        and all(
            [_changes(ours[g]) for g in ours] == [_changes(theirs[g]) for g in theirs]
            for ours, theirs in ((a.forward, b.forward), (a.backward, b.backward))
        )
        and all(
            [list(ours[g]) for g in ours] == [list(theirs[g]) for g in theirs]
            for ours, theirs in ((a.saved, b.saved), (a.inputs, b.inputs), (a.returned, b.returned))
        )
    )


def _changes(trace: SegmentTrace) -> list[Change]:
    """The changes of a segment, with consecutive frees, which have no order, by name."""
    runs = itertools.groupby(trace.changes, key=operator.itemgetter(2))
    return [change for exists, run in runs for change in (run if exists else sorted(run))]


class _Unfolded:
    """The replay of a model, written out of that of the shortened one.

    Parameters
    ----------
    seen : Replay
    periods : Periods
        Of the shortened model.
    order : sequence of int
        Per period of the model that is written, the period that stands for it.
    """

    def __init__(self, seen: Replay, periods: Periods, order: Sequence[int]) -> None:
        self.seen, self.periods, self.order = seen, periods, order
        self.begins, self.length = periods.begins, periods.length
        self.end = self.begins[-1] - 1  # forward's end may free there what all layers made, or only the last one
        self.copies = [[q for q, source in enumerate(sorted(order)) if source == r] for r in range(periods.run.kept)]
        inside = [(g, q) for q, r in enumerate(order) for g in range(self.begins[r], self.begins[r + 1])]
        before, behind = range(self.begins[0]), range(self.end, len(seen.forward))
        self.sources = [*((g, None) for g in before), *inside[:-1], *((g, None) for g in behind)]
        self.live_bytes = 0
        self.alive: dict[Sid, int] = {}
        self.homes = [None if g >= self.end else periods.home(g) for g in range(len(seen.forward))]
        """Per segment, its period."""
        self.labels = self._labels()
        self.returns: list[tuple[int, int, int]] = []
        self.known: defaultdict[int | None, dict[Sid | str, Sid | str]] = defaultdict(dict)

    def write(self) -> Replay:
        """Return the replay."""
        seen, run = self.seen, self.periods.run
        forward = {g: self._trace(seen.forward[s], g, s, q) for g, (s, q) in enumerate(self.sources)}
        steps = reversed(list(enumerate(self.sources)))
        backward = {g: self._trace(seen.backward[s], g, s, q) for g, (s, q) in steps if s in seen.backward}
        end_bytes = self.live_bytes
        gradients = self._set(seen.gradients)
        changes = self._play(seen.changes[: seen.left_at], None)
        left_at, left_bytes = len(changes), sum(n for sid, n in self.alive.items() if sid not in gradients)
        changes += self._play(seen.changes[seen.left_at :], None)
        return Replay(
            forward=forward,
            backward=backward,
            saved={g: self._table(sids, q) for g, q, sids in self._by_segment(seen.saved)},
            inputs={g: self._table(sids, q) for g, q, sids in self._by_segment(seen.inputs)},
            returned={g: self._table(sids, q) for g, q, sids in self._by_segment(seen.returned)},
            linked={g: self._set(sids, q) for g, q, sids in self._by_segment(seen.linked)},
            in_objects=self._set(seen.in_objects),
            generator_bytes=self._as_is(seen.generator_bytes),
            arguments=self._as_is(seen.arguments),
            modifies=self._as_is(seen.modifies),
            written=seen.written,
            written_buffers=seen.written_buffers,
            sizes=self._table(seen.sizes),
            ends={g: self._ends(sids, q) for g, q, sids in self._by_segment(seen.ends)},
            unread=self._as_is(seen.unread),
            output=self._set(seen.output),
            held=self._set(seen.held),
            has_loss=seen.has_loss,
            rerun=self._as_is(seen.rerun),
            copied_bytes=self._as_is(seen.copied_bytes),
            end_bytes=end_bytes,
            left_bytes=left_bytes,
            gradients=gradients,
            changes=changes,
            left_at=left_at,
            results={name: self._set(sids) for name, sids in seen.results.items()},
            returns=self.returns,
            named_gradients=self._everywhere(
                seen.named_gradients, lambda names, r, q: tuple(run.renamed(name, r, q) for name in names)
            ),
            origins=self._everywhere(
                seen.origins, lambda origin, r, q: dataclasses.replace(origin, place=self._placed(origin.place, r, q))
            ),
        )

    # --- names ---

    def _labels(self) -> dict[Sid, Sid]:
        """New names of the storages that backward makes in one period and frees in another, counted by themselves.

        The period that runs first in backward may make others besides, and then has other numbers for these.
        """
        crossing: set[Sid] = set()
        for s, trace in self.seen.backward.items():
            met = itertools.chain((change[0] for change in trace.changes), *(op.written for op in trace.ops))
            own = None, self.homes[s]
            crossing.update(sid for sid in met if sid[0] == "backward" and self.homes[sid[1]] not in own)
        numbers: Counter[int] = Counter()
        labels: dict[Sid, Sid] = {}
        for sid in sorted(crossing):
            numbers[sid[1]] -= 1
            labels[sid] = (*sid[:2], numbers[sid[1]])
        return labels

    def _home_of(self, name: Sid | str) -> int | None:
        """The period of a storage; None for one from outside of the periods, or from before the step."""
        return None if isinstance(name, str) or name[0] == "outside" else self.homes[name[1]]

    def _at(self, name: Sid | str, q: int | None) -> Sid | str:
        """A storage of period `q`, or of none."""
        if isinstance(name, str):
            return self.periods.run.renamed(name, None, None)
        phase, segment, number = self.labels.get(name, name)
        if q is not None:
            return phase, self.begins[0] + q * self.length + (segment - self.begins[0]) % self.length, number
        late = phase != "outside" and segment >= self.end
        return phase, segment + (len(self.order) - self.periods.run.kept) * self.length * late, number

    def _seen_from(self, name: Sid | str, q: int | None) -> Sid | str:
        """A storage that period `q` refers to: of a period beside it, of the one at the other end, or of none."""
        home, r = self._home_of(name), None if q is None else self.order[q]
        if isinstance(name, str):
            return self.periods.run.renamed(name, r, q)
        if home is None or r is None or q is None:
            return self._at(name, None)
        if abs(home - r) <= 1:
            return self._at(name, q + home - r)
        if abs(home - r) < self.periods.run.kept - 1:
            raise UnlikeLayersError
        return self._at(name, 0 if home == 0 else len(self.order) - 1)

    def _spread(self, items: Collection[tuple[Any, ...]], q: int | None) -> list[tuple[Any, ...]]:
        """Items that begin with the name of a storage, with its names as seen from period `q`, or from outside."""
        known, out = self.known[q], []
        for name, *rest in items:
            new = known.get(name)
            if new is None:
                if q is None and self._home_of(name) is not None:
                    return self._of_every_period(items)
                new = known[name] = self._seen_from(name, q)
            out.append((new, *rest))
        return out

    def _of_every_period(self, items: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Items outside of the periods: those of the second one once for each period that it stands for, in order.

        What refers to the second period has to refer to the third one, too.
        """
        owned = [(self._home_of(item[0]), item) for item in items]
        second, third = (
            Counter((self._at(item[0], 0), *item[1:]) for home, item in owned if home == r) for r in (1, 2)
        )
        if second - third:
            raise UnlikeLayersError
        out = []
        for home, group in itertools.groupby(owned, operator.itemgetter(0)):
            together = [item for _, item in group]
            for q in [None] if home is None else self.copies[home]:
                out += [(self._at(item[0], q), *item[1:]) for item in together]
        return out

    def _everywhere(self, table: Mapping[Sid, T], change: Callable[[T, int | None, int | None], T]) -> dict[Sid, T]:
        """A table by storage, with its entry for each period that the storage's own stands for."""
        out: dict[Sid, T] = {}
        for sid, entry in table.items():
            home = self._home_of(sid)
            for q in [None] if home is None else self.copies[home]:
                out[self._at(sid, q)] = change(entry, home, q)  # type: ignore[index]
        return out

    def _placed(self, place: Where, r: int | None, q: int | None) -> Where:
        """A place in the code as period `q` has it, which period `r` stands for."""
        return place._replace(module=self.periods.run.renamed(place.module, r, q))

    # --- tables ---

    def _by_segment(self, table: Mapping[int, T]) -> Iterator[tuple[int, int | None, T]]:
        """Segment, its period and its entry."""
        return ((g, q, table[s]) for g, (s, q) in enumerate(self.sources) if s in table)

    def _as_is(self, table: Mapping[int, T]) -> dict[int, T]:
        return {g: entry for g, _, entry in self._by_segment(table)}

    def _set(self, sids: Iterable[Sid], q: int | None = None) -> set[Sid]:
        return {sid for (sid,) in self._spread([(sid,) for sid in sids], q)}

    def _table(self, table: Mapping[Sid, T], q: int | None = None) -> dict[Sid, T]:
        return dict(self._spread(table.items(), q))

    def _ends(self, ends: Mapping[Sid, Sid], q: int | None) -> dict[Sid, Sid]:
        if q is None and any(self._home_of(end) is not None for end in ends.values()):
            raise UnlikeLayersError  # within the layers, which may be one for each of them
        return {sid: self._seen_from(end, q) for sid, end in self._spread(ends.items(), q)}  # type: ignore[misc]

    # --- traces ---

    def _play(self, changes: Collection[Change], q: int | None) -> list[Change]:
        """Make changes to the storages that are alive, and return them with their names here."""
        out = self._spread(changes, q)
        for sid, nbytes, stays in out:
            self.live_bytes += nbytes
            if stays:
                self.alive[sid] = self.alive.get(sid, 0) + nbytes
            elif self.alive.pop(sid, None) is None:
                raise UnlikeLayersError
        return out  # type: ignore[return-value]

    def _trace(self, old: SegmentTrace, g: int, s: int, q: int | None) -> SegmentTrace:
        """The trace of segment `g`, of period `q`, for which that of segment `s` of the shortened model stands."""
        start_bytes, present = self.live_bytes, set(self.alive)
        changes: list[Change] = []
        places = {0: 0}  # number of changes of the old trace -> here
        returns = [(n, ops) for at, n, ops in self.seen.returns if old is self.seen.forward.get(at)]
        met = {0, len(old.changes), *(n for op in old.ops for n in op.at), *(n for n, _ in returns)}
        for first, last in itertools.pairwise(sorted(met)):
            changes += self._play(old.changes[first:last], q)
            places[last] = len(changes)
        self.returns += [(g, places[n], ops) for n, ops in returns]
        r = self.homes[s]
        ops = []
        for op in old.ops:
            if op is DETACHED:
                ops.append(op)
                continue
            first, last = (places[n] for n in op.at)
            ops.append(
                dataclasses.replace(
                    op,
                    made=self._table(op.made, q),
                    written=tuple(sid for (sid,) in self._spread([(sid,) for sid in op.written], q)),
                    at=(first, last),
                    reads=tuple(self._spread(op.reads, q)),
                    place=self._placed(op.place, r, q),
                )
            )
        return SegmentTrace(start_bytes, ops, present, changes=changes, wrapped_bytes=old.wrapped_bytes)
