"""Record a model of many equal layers by running a few of them.

Layers of a container that repeat, with any period (a model may alternate two kinds), are shortened to a few periods.
The short model is recorded, and its second period is written out as often as the full model has it. For example, of 24
equal blocks, blocks 0 to 3 are run, and the recording of block 1 stands for blocks 1 to 21. This happens only if two
comparisons find no difference:

- In the recording, the second and third period do the same, event by event, in forward and backward, and use blocks of
  neighbouring periods only.
- In one forward of the full model without saving for backward, every period runs the operations of the period that
  stands for it, on tensors with the same origin, shape, type and `requires_grad`, saves the same for backward, and
  frees the same; and the operations around the layers are those of the short model. So a forward that depends on a
  layer's place, or on the number of layers, is detected, and the full model is recorded.

The backward follows from that, with two exceptions that would go undetected: hooks on tensors, and backward formulas
written in Python, that allocate more in some layers than in others.

Recording a step costs several times as much as that forward, so the time of an estimate grows mostly with the number of
distinct layers, and little with the number of layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import KEEP
from ckptplan.memory.recorder import ALLOCATE, FREE, Block, Event, Recording, Section, record_step
from ckptplan.profiling.bytes.folding import Periods, Run, find_runs, quiet, shortened
from ckptplan.profiling.bytes.trace import find_stages, replay
from ckptplan.profiling.bytes.tracker import Sid, Tracker
from ckptplan.profiling.target import Target
from ckptplan.runtime.step import TrainingStep


class Folding:
    """Records steps with everything kept, running only a few of the layers that repeat.

    Parameters
    ----------
    step : TrainingStep
    target : Target
    rewind : callable
        Restores the model and the random generators; called before every run, so that all start from one state.
    holds_output : bool
        The output is referenced during backward.
    """

    def __init__(
        self, step: TrainingStep, target: Target, rewind: Callable[[], None], *, holds_output: bool = True
    ) -> None:
        self._step, self._target, self._rewind, self._holds_output = step, target, rewind, holds_output
        self._runs = find_runs(step.model) if step.fn is None else []
        self._checked = False
        self._stages: dict[bool, tuple[str, ...]] = {}

    def record(self, *, accumulating: bool = False, inference: bool = False) -> tuple[Recording, list[str]]:
        """Return the result of `record_step` with everything kept."""
        # Equal layers may branch on values that were answered for each layer, so a few don't represent all.
        answers = self._target.answers
        if self._runs and not (answers is not None and answers.phases):
            found = self._folded(accumulating, inference)
            if found is not None:
                return found
            self._runs = []
        return self._record(accumulating, inference, short=False)

    def _record(self, accumulating: bool, inference: bool, *, short: bool) -> tuple[Recording, list[str]]:
        if short not in self._stages:
            self._stages[short] = self._found()
        self._rewind()
        stages = self._stages[short]
        return record_step(
            self._step,
            stages,
            self._target,
            accumulating=accumulating,
            inference=inference,
            holds_output=self._holds_output,
        )

    def _found(self) -> tuple[str, ...]:
        """Return the stages of the model in its present form, shortened or full."""
        self._rewind()
        try:
            return find_stages(self._step, self._target).stages
        except UnsupportedModelError:  # no module saves anything, as in a model that checkpoints by itself
            return ("",)  # the model itself

    def _folded(self, accumulating: bool, inference: bool) -> tuple[Recording, list[str]] | None:
        try:
            with quiet(), shortened(self._step.model, self._runs):
                short, unknown = self._record(accumulating, inference, short=True)
        except Exception:  # a forward may need all its layers; an error of the full model is raised by its recording
            return None
        full = unfolded(short, self._runs)
        if full is None or not (self._checked or self._does_the_same(short.stages, full.stages)):
            return None
        self._checked = True
        return full, unknown

    def _does_the_same(self, short: tuple[str, ...], full: tuple[str, ...]) -> bool:
        """Return whether the full model's forward is the short one's with the middle periods repeated."""
        kinds: dict[Any, int] = {}
        try:
            with shortened(self._step.model, self._runs):
                self._rewind()
                few = _Witness.of(self._step, short, self._target, kinds)
            self._rewind()
            seen = _Witness.of(self._step, full, self._target, kinds)
        except Exception:  # as above
            return False
        expected = unfolded(few, self._runs)
        if expected is None:
            return False
        for section in expected.sections:
            section.events = _in_order(section.events)
        return expected == seen


# --- one forward of the full model ---


OPERATION = "operation"
"""Category of a witness's blocks that are operations, or the tensors of the model that these read."""
READ, SAVE = 2, 3
"""Further codes of events, of a witness alone: an operation reads or returns a block, autograd saves it."""


class _Witness(Tracker):  # type: ignore[no-untyped-call]
    """Records a forward, without saving for backward, as blocks and events of each segment.

    An operation is a block, too, whose size is the number of its kind: operation, shapes, types, `requires_grad`. So is
    a tensor of the model that an operation reads, with its name. Frees between two operations have no order.
    """

    def __init__(self, target: Target, model: nn.Module, kinds: dict[Any, int]) -> None:
        self._blocks: list[Block] = []
        self._sections: dict[int, Section] = {}
        self._index: dict[Sid, int] = {}
        self._kinds = kinds
        self._model: nn.Module | None = model
        self._named: dict[int, str] = {}
        self._held: list[torch.Tensor] = []
        super().__init__(target)

    @classmethod
    def of(cls, step: TrainingStep, stages: tuple[str, ...], target: Target, kinds: dict[Any, int]) -> Recording:
        """Return the record of the forward of `step`; `kinds` has the number of each kind of operation met so far."""
        witness = cls(target, step.model, kinds)
        seen = replay(step, stages, (KEEP,) * len(stages), target, tracker=witness, saves=False, numbered=False)
        for segment, sids in seen.saved.items():
            for sid in sids:
                if sid[0] == "forward":
                    witness._note(SAVE, sid, segment)
        sections = [section for _, section in sorted(witness._sections.items())]
        for section in sections:
            section.events = _in_order(section.events)
        return Recording(stages, witness._blocks, sections)

    def _name_tensors(self, model: nn.Module) -> None:
        tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in tensors:
            self._named.setdefault(id(tensor.untyped_storage()), name)
            self._held.append(tensor)

    def _events(self, segment: int) -> list[Event]:
        return self._sections.setdefault(segment, Section("forward", segment)).events

    def _new_block(self, block: Block, segment: int) -> int:
        self._blocks.append(block)
        self._events(segment).append((ALLOCATE, len(self._blocks) - 1))
        return len(self._blocks) - 1

    def _note(self, code: int, sid: Sid, segment: int) -> None:
        if sid not in self._index:
            self._index[sid] = self._new_block(Block(0, ""), segment)
        self._events(segment).append((code, self._index[sid]))

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note what it is, reads and makes."""
        if self._model is not None:  # the first operation: fake tensors are in place of the model's now
            self._name_tensors(self._model)
            self._model = None
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        operands = [self.sid(t) or self._named.get(id(t.untyped_storage()), "") for t in given]
        grads = tuple(t.requires_grad for t in given)
        result = super().operation(func, args, kwargs)
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        segment = self._segment
        key = _without_numbers(self.forward[segment].ops[-1].key)
        kind = (key, grads, tuple((tuple(t.shape), t.stride(), t.dtype) for t in made))
        self._new_block(Block(self._kinds.setdefault(kind, len(self._kinds)), OPERATION), segment)
        for operand in (*operands, *filter(None, map(self.sid, made))):
            if isinstance(operand, str):
                self._new_block(Block(0, OPERATION, operand), segment)
            else:
                self._note(READ, operand, segment)
        return result

    def _freed(self, key: int) -> None:
        sid = self._alive.get(key)
        super()._freed(key)
        if sid is not None:
            self._note(FREE, sid, self._segment)


def _in_order(events: list[Event]) -> list[Event]:
    """Return a witness's events with consecutive frees by block."""
    runs = itertools.groupby(events, key=lambda event: event[0] == FREE)
    return [event for frees, run in runs for event in (sorted(run) if frees else run)]


def _without_numbers(key: Any) -> Any:
    """Return an operation's key without numbers that don't change its bytes, such as a slope or a rate."""
    if key is None:
        return None
    func, leaves, spec = key
    return func, tuple(float if isinstance(x, float) and x not in (0.0, 1.0, 2.0) else x for x in leaves), spec


# --- writing the full recording ---

_OUTSIDE = ("loss", "end")
"""Directions of sections that no layer runs in."""

_Reference = tuple[Any, ...]
"""The origin of a block: ("unit", periods away, direction, segment in the period, number) or ("outside", ...)."""


class _Folded:
    """A recording of a shortened model, with the period of each of its blocks and sections.

    Parameters
    ----------
    recording : Recording
    periods : Periods
    """

    def __init__(self, recording: Recording, periods: Periods) -> None:
        self.recording, self.periods = recording, periods
        self.births: dict[int, tuple[str, int, int]] = {}
        made: Counter[tuple[str, int, bool]] = Counter()
        for section in recording.sections:
            for code, block in section.events:
                if code == ALLOCATE:  # operations have numbers below 0: the first period may have others
                    at = (section.direction, section.segment, recording.blocks[block].category == OPERATION)
                    made[at] += 1
                    self.births[block] = (section.direction, section.segment, -made[at] if at[2] else made[at])

    def period(self, direction: str, segment: int) -> int | None:
        """Return the period that a segment is in."""
        return None if direction in _OUTSIDE else self.periods.home(segment)

    def reference(self, block: int, r: int | None) -> _Reference:
        """Return the origin of a block as seen from period `r`, or from outside."""
        direction, segment, number = self.births[block]
        home = self.period(direction, segment)
        if home is None:
            return ("outside", direction, segment, number)
        return ("unit", home - (r or 0), direction, segment - self.periods.begins[home], number)

    def is_far(self, block: int, r: int) -> bool:
        """Return whether a block belongs to a period that is neither a neighbour nor, of the first, the last one."""
        reference = self.reference(block, r)
        return bool(reference[0] == "unit" and 1 < abs(reference[1]) < self.periods.run.kept - 1)

    def written(self, section: Section, r: int) -> list[Any]:
        """Return a section's events with the blocks as seen from its period."""
        return [
            (code, self.reference(block, r), self.recording.blocks[block].nbytes, self.recording.blocks[block].category)
            for code, block in section.events
        ]


def unfolded(recording: Recording, runs: list[Run]) -> Recording | None:
    """Return the recording of the full model from that of the shortened one; None if the periods differ."""
    for run in runs:
        periods = Periods.of(run, recording.stages)
        if periods is None or not _alike(folded := _Folded(recording, periods)):
            return None
        recording = _Writer(folded).write()
    return recording


def _alike(folded: _Folded) -> bool:
    """Return whether the second and third period do the same, with blocks of their neighbours or from outside only."""
    sides: list[dict[tuple[str, int], list[Any]]] = [{}, {}]
    outside: list[Counter[Any]] = [Counter(), Counter()]
    for position, section in enumerate(folded.recording.sections):
        r = folded.period(section.direction, section.segment)
        if r is not None and any(folded.is_far(block, r) for _, block in section.events):
            return False
        if r in (1, 2):
            sides[r - 1][section.direction, section.segment - folded.periods.begins[r]] = folded.written(section, r)
        elif r is None:
            for code, block in section.events:
                reference = folded.reference(block, None)
                if reference[0] == "unit" and reference[1] in (1, 2):
                    outside[reference[1] - 1][position, code, reference[2:]] += 1
    # Periods without any recorded section can't be compared.
    return bool(sides[0]) and sides[0] == sides[1] and outside[0] == outside[1]


class _Writer:
    """Writes the recording of the full model."""

    def __init__(self, folded: _Folded) -> None:
        self.folded, self.periods, self.run = folded, folded.periods, folded.periods.run
        self.order = folded.periods.order
        self.blocks: list[Block] = []
        self.index: dict[tuple[Any, ...], int] = {}

    def write(self) -> Recording:
        """Return the recording of the full model."""
        out: list[Section] = []

        def kind(section: Section) -> tuple[bool, str]:
            return self.folded.period(section.direction, section.segment) is not None, section.direction

        for (inside, direction), group in itertools.groupby(self.folded.recording.sections, key=kind):
            if not inside:
                out += [self._section(section, None, None) for section in group]
                continue
            # All periods of one direction, in order: write every period of the full model from its source.
            by_period: dict[int | None, list[Section]] = {}
            for section in group:
                by_period.setdefault(self.folded.period(direction, section.segment), []).append(section)
            order = list(enumerate(self.order))
            for q, r in order if direction == "forward" else reversed(order):
                out += [self._section(section, r, q) for section in by_period.get(r, ())]
        return Recording(self.periods.stages(self.folded.recording.stages), self.blocks, out)

    def _section(self, section: Section, r: int | None, q: int | None) -> Section:
        begins = self.periods.begins
        if q is None or r is None:
            late = section.direction not in _OUTSIDE and section.segment >= begins[-1]
            segment = section.segment + (self.periods.more if late else 0)
        else:
            segment = begins[0] + q * self.periods.length + section.segment - begins[r]
        out = Section(section.direction, segment)
        for event in section.events:
            out.events += self._events(event, r, q)
        return out

    def _events(self, event: Event, r: int | None, q: int | None) -> Iterator[Event]:
        code, block = event
        reference = self.folded.reference(block, r)
        made = self.folded.recording.blocks[block]
        if reference[0] == "outside":
            yield code, self._block(reference, made, None, None)
        elif q is not None:
            assert r is not None
            home = r + reference[1]
            far = abs(reference[1]) == self.run.kept - 1
            p = (0 if home == 0 else self.run.periods - 1) if far else q + reference[1]
            yield code, self._block(("unit", p, *reference[2:]), made, home, p)
        else:
            home = reference[1]
            for p in (q for q, r in enumerate(self.order) if r == home):
                yield code, self._block(("unit", p, *reference[2:]), made, home, p)

    def _block(self, key: tuple[Any, ...], made: Block, r: int | None, q: int | None) -> int:
        if key not in self.index:
            self.index[key] = len(self.blocks)
            name, module, stage = (self.run.renamed(text, r, q) for text in (made.name, made.module, made.stage))
            given = tuple(self.run.renamed(text, r, q) for text in made.parameters)
            self.blocks.append(dataclasses.replace(made, name=name, module=module, stage=stage, parameters=given))
        return self.index[key]
