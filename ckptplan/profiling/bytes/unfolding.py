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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ckptplan.core.plan import Decision
from ckptplan.profiling.bytes.folding import Periods, Run, UnlikeLayersError, find_runs, quiet, shortened
from ckptplan.profiling.bytes.origins import Locating
from ckptplan.profiling.bytes.trace import Replay, replay
from ckptplan.profiling.bytes.tracker import DETACHED, Change, OpTrace, SegmentTrace, Sid, Tracker
from ckptplan.profiling.target import Target
from ckptplan.runtime.state.compiled import compiled_modules
from ckptplan.runtime.step import TrainingStep

_LEAST_SHARE = 0.2
"""Least share of the stages that is left out: for fewer, the comparisons take longer than they save."""

T = TypeVar("T")


class Folding:
    """Replays of a step that run only a few of the layers that repeat.

    Parameters
    ----------
    step : TrainingStep
    stages : tuple of str
        Names of the full model's stages.
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

    def __init__(self, step: TrainingStep, stages: tuple[str, ...], target: Target) -> None:
        self._step, self._stages, self._target = step, stages, target
        self._runs: list[Run] = []
        self._made: dict[Any, Replay] = {}
        self.stages = stages
        for run in [] if _reads_values(step, target) else find_runs(step.model):
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
        if len(self.stages) > (1 - _LEAST_SHARE) * len(stages):
            self.give_up()

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
        few = self.replay_few(self._chosen(choices), saves=saves)
        if saves:
            return self._written_out(few)
        full = self._replayed(self._stages, choices, _Reading(self._target, self._step.model))
        if not _are_equal(self._written_out(few), full):
            raise UnlikeLayersError
        return full

    def replay_few(self, choices: tuple[Decision, ...], *, saves: bool) -> Replay:
        """Return the shortened model's replay with `choices` for its stages; made once.

        Raises
        ------
        UnlikeLayersError
            If it fails.
        """
        key = choices, saves
        if key not in self._made:
            self._made[key] = self._few(choices, None if saves else _Reading(self._target, self._step.model))
        return self._made[key]

    def _few(self, choices: tuple[Decision, ...], reading: Tracker | None) -> Replay:
        """The replay of the shortened model; with `reading`, it saves nothing."""
        try:
            with quiet(), self.shortened():
                return self._replayed(self.stages, choices, reading)
        except Exception as error:  # a forward may need all its layers; an error of the full model is raised by its own
            raise UnlikeLayersError from error

    def _replayed(self, stages: tuple[str, ...], choices: tuple[Decision, ...], reading: Tracker | None) -> Replay:
        accumulating = self._step.accumulates
        return replay(
            self._step, stages, choices, self._target, saves=reading is None, accumulating=accumulating, tracker=reading
        )

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
            if _Unfolded(seen, periods, kept).write() != _Unfolded(seen, periods, (0, 2, 1, *kept[3:])).write():
                raise UnlikeLayersError
            seen, short = _Unfolded(seen, periods, periods.order).write(), periods.stages(short)
        return seen


def _periods(run: Run, short: Sequence[str]) -> Periods:
    periods = Periods.of(run, short)
    assert periods is not None
    return periods


def _reads_values(step: TrainingStep, target: Target) -> bool:
    """Whether the layers may depend on values, which are those of the full model's layers, or are code of another kind.

    A step's own callable may reach the layers otherwise than by their container.
    """
    answers = target.answers
    return step.fn is not None or bool(answers is not None and answers.phases) or bool(compiled_modules(step.model))


def _are_equal(a: Replay, b: Replay) -> bool:
    """Whether two replays are equal, the order of the storages included."""
    return a == b and all(
        [list(sids.items()) for sids in ours.values()] == [list(sids.items()) for sids in theirs.values()]
        for ours, theirs in ((a.saved, b.saved), (a.inputs, b.inputs), (a.returned, b.returned))
    )


class _Reading(Locating):
    """Tracker that also notes each operation's operands: storage, or name in the model, gradient required, hooks.

    Parameters
    ----------
    target : Target
    model : nn.Module
    """

    def __init__(self, target: Target, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        self._named: dict[int, str] = {}
        self._held: list[torch.Tensor] = []
        super().__init__(target, model)

    def operands(self, given: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
        """Storage or name of each operand, and whether it requires a gradient and has hooks on that."""
        if self._model is not None:  # the first operation: fake tensors are in place of the model's now
            for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
                self._named.setdefault(id(tensor.untyped_storage()), name)
                self._held.append(tensor)
            self._model = None
        return tuple(
            (self.sid(t) or self._named.get(id(t.untyped_storage()), ""), t.requires_grad, bool(t._backward_hooks))
            for t in given
        )


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
        self.known: defaultdict[int | None, dict[Sid | str, Sid | str]] = defaultdict(dict)

    def write(self) -> Replay:
        """Return the replay."""
        seen = self.seen
        forward = {g: self._trace(seen.forward[s], q) for g, (s, q) in enumerate(self.sources)}
        steps = reversed(list(enumerate(self.sources)))
        backward = {g: self._trace(seen.backward[s], q) for g, (s, q) in steps if s in seen.backward}
        end_bytes = self.live_bytes
        changes = self._play(seen.changes, None)
        gradients = self._set(seen.gradients)
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
            sizes=self._table(seen.sizes),
            ends={g: self._ends(sids, q) for g, q, sids in self._by_segment(seen.ends)},
            unread=self._as_is(seen.unread),
            output=self._set(seen.output),
            held=self._set(seen.held),
            has_loss=seen.has_loss,
            rerun=self._as_is(seen.rerun),
            copied_bytes=self._as_is(seen.copied_bytes),
            end_bytes=end_bytes,
            left_bytes=sum(nbytes for sid, nbytes in self.alive.items() if sid not in gradients),
            gradients=gradients,
            changes=changes,
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

    def _trace(self, old: SegmentTrace, q: int | None) -> SegmentTrace:
        start_bytes, present = self.live_bytes, set(self.alive)
        changes: list[Change] = []
        places = {0: (0, start_bytes)}  # number of changes of the old trace -> here, and the live bytes
        for first, last in itertools.pairwise(sorted({0, len(old.changes), *(n for op in old.ops for n in op.at)})):
            changes += self._play(old.changes[first:last], q)
            places[last] = len(changes), self.live_bytes
        ops = []
        for op in old.ops:
            if op is DETACHED:
                ops.append(op)
                continue
            (first, before), (last, after) = (places[n] for n in op.at)
            made, reads = self._table(op.made, q), tuple(self._spread(op.reads, q))
            written = tuple(sid for (sid,) in self._spread([(sid,) for sid in op.written], q))
            again = op.fresh, op.numbered, op.from_real_run, op.repeatable
            ops.append(OpTrace(before, after, op.key, made, written, *again, (first, last), reads))
        return SegmentTrace(
            start_bytes, self.live_bytes, ops, present, changes=changes, wrapped_bytes=old.wrapped_bytes
        )
