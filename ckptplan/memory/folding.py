"""Record a model of many equal layers by running a few of them.

Layers of a container that repeat (with any period: a model may alternate two kinds) are shortened to four periods,
the short model is recorded, and the second period is written out as often as the full model has it. That is done only
where both of two comparisons find nothing:

- In the recording, the second and third period do the same, event by event, in forward and backward, and reach no
  further than their neighbours.
- In one forward of the full model, which saves nothing, every period runs the operations of the one that stands for it,
  on tensors of the same place, shape, type and need of gradients, saves the same for backward, and lets go of the same;
  what runs around the layers is what ran around them in the short model. So a forward may treat a layer specially by
  its place, by the number of layers or by anything else: it is seen, and the full model is recorded.

What a backward does follows from that, unless its code asks for its place: hooks on tensors and backward formulas
written in Python that allocate more in some layers than in others would go unseen.

Recording a step costs several times as much as that forward, so an estimate's time grows mostly with the distinct
layers, and little with their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import KEEP
from ckptplan.memory.recorder import ALLOCATE, Block, Event, Recording, Section, record_step
from ckptplan.profiling.bytes.trace import find_stages, replay
from ckptplan.profiling.bytes.tracker import Sid, Tracker
from ckptplan.profiling.target import Target
from ckptplan.runtime.step import TrainingStep

_KEPT = 4
"""Periods that are run: the first and the last see other neighbours, the two between are compared."""
_LONGEST_PERIOD = 8
_POSITIONS = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index", "idx", "index"}
"""Attributes by which layers know their place; what follows from it shows in other attributes, or in the comparison."""
_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.Size, torch.device)


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of a container that repeat.

    Parameters
    ----------
    path : str
        The container's qualified name.
    first, count : int
        Its members first to first + count - 1, where count is a multiple of the period.
    period : int
    """

    path: str
    first: int
    count: int
    period: int

    @property
    def periods(self) -> int:
        """How often the pattern comes."""
        return self.count // self.period


class Folding:
    """Records steps with everything kept, running repeated layers only as often as it takes to know them all.

    Parameters
    ----------
    step : TrainingStep
    target : Target
    rewind : callable
        Puts the model and the random generators back; called before every run, so that all start alike.
    """

    def __init__(self, step: TrainingStep, target: Target, rewind: Callable[[], None]) -> None:
        self._step, self._target, self._rewind = step, target, rewind
        self._runs = find_runs(step.model) if step.fn is None else []
        self._checked = False
        self._stages: dict[bool, tuple[str, ...]] = {}

    def record(self, *, accumulating: bool = False, inference: bool = False) -> tuple[Recording, list[str]]:
        """As `record_step` with everything kept."""
        # Layers that look alike take other paths on other values: what was answered for all can't be had from a few.
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
        return record_step(self._step, stages, self._target, accumulating=accumulating, inference=inference)

    def _found(self) -> tuple[str, ...]:
        """Stages of the model, shortened or full, as it is now: the same in every recording."""
        self._rewind()
        try:
            return find_stages(self._step, self._target).stages
        except UnsupportedModelError:  # no module saves anything, as where the model checkpoints by itself
            return ("",)  # the model itself

    def _folded(self, accumulating: bool, inference: bool) -> tuple[Recording, list[str]] | None:
        try:
            with _quiet(), shortened(self._step.model, self._runs):
                short, unknown = self._record(accumulating, inference, short=True)
        except Exception:  # a forward may well need all of its layers; where it fails with them, that is told
            return None
        full = short
        places = [_Place(segment) for segment in range(2 * len(short.stages) + 1)]
        for run in self._runs:
            written = unfolded(full, run)
            if written is None:
                return None
            full, origins = written
            places = [
                place._replace(segment=places[place.segment].segment) if place.run else places[place.segment]
                for place in origins
            ]
        if not self._checked and not self._does_the_same(short.stages, full.stages, places):
            return None
        self._checked = True
        return full, unknown

    def _does_the_same(self, short: tuple[str, ...], full: tuple[str, ...], places: list[_Place]) -> bool:
        """Whether the full model's forward is what the short one's is written out to."""
        model = self._step.model
        try:
            with shortened(model, self._runs):
                self._rewind()
                expected = _Witness.of(self._step, short, self._target)
            self._rewind()
            seen = _Witness.of(self._step, full, self._target)
        except Exception:  # as above
            return False
        return _Comparison(self._runs, places, expected, seen).holds()


# --- finding what repeats ---


def find_runs(model: nn.Module) -> list[Run]:
    """What can be shortened: outermost containers first, none inside of another."""
    owners = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    out: list[Run] = []
    for path, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{r.path}.") for r in out):
            continue
        members = list(container._modules.values())
        if any(m is None or owners[id(x)] > 1 for m in members for x in (() if m is None else m.modules())):
            continue
        listed = _per_layer_settings(model, len(members))
        signatures = [(_signature(m), tuple(values[i] for values in listed)) for i, m in enumerate(members)]
        run = _longest(path, signatures)
        if run is not None:
            out.append(run)
    return out


def _longest(path: str, signatures: list[Any]) -> Run | None:
    """The run that saves most layers, if any saves one."""
    best: tuple[int, Run] | None = None
    for period in range(1, _LONGEST_PERIOD + 1):
        first = 0
        while first < len(signatures):
            last = first + period
            while last < len(signatures) and signatures[last] == signatures[last - period]:
                last += 1
            count = (last - first) // period * period
            saved = count - _KEPT * period
            if saved > 0 and (best is None or saved > best[0]):
                best = saved, Run(path, first, count, period)
            first = max(last - period + 1, first + 1)
    return None if best is None else best[1]


def _per_layer_settings(model: nn.Module, layers: int) -> list[tuple[str, ...]]:
    """Lists in configurations with an entry per layer, which a forward may read by the layer's place."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = []
    for config in configs.values():
        for value in vars(config).values() if hasattr(config, "__dict__") else ():
            if isinstance(value, (list, tuple)) and len(value) == layers:
                found.append(tuple(map(repr, value)))
    return found


def _signature(module: nn.Module) -> Any:
    """What two modules that do the same have in common."""
    plain = {}
    for name, value in vars(module).items():
        if name in _POSITIONS or name in ("_parameters", "_buffers", "_modules"):
            continue
        plain[name] = _settings(value)
    tensors = [
        (name, None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad, t.device.type))
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    ]
    inner = [(name, None if m is None else _signature(m)) for name, m in module._modules.items()]
    return type(module), sorted(plain.items(), key=lambda item: item[0]), tensors, inner


def _settings(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value if value == value else "nan"
    if isinstance(value, (list, tuple)):
        return [_settings(v) for v in value]
    if isinstance(value, dict):
        return [(repr(k), _settings(v)) for k, v in value.items()]
    return (type(value), id(value)) if _is_shared(value) else type(value)


def _is_shared(value: Any) -> bool:
    """Objects that say by their identity what they do: functions and classes; others by their type."""
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__name__")


@contextlib.contextmanager
def shortened(model: nn.Module, runs: list[Run]) -> Iterator[None]:
    """Inside, each run has as few periods as are run; members behind it move up."""
    modules = dict(model.named_modules())
    saved = [(modules[run.path], modules[run.path]._modules) for run in runs]
    try:
        for run, (container, members) in zip(runs, saved, strict=True):
            kept = [
                m
                for i, m in enumerate(members.values())
                if i < run.first + _KEPT * run.period or i >= run.first + run.count
            ]
            container._modules = {str(i): m for i, m in enumerate(kept)}
        yield
    finally:
        for container, members in saved:
            container._modules = members


# --- one forward of the full model ---


class _Witness(Tracker):  # type: ignore[no-untyped-call]
    """Notes what a forward does, segment by segment: operations, and what is let go of between them."""

    def __init__(self, target: Target, model: nn.Module) -> None:
        self.items: dict[int, list[_Item]] = {}
        self.saved: dict[int, list[Sid]] = {}
        self._model: nn.Module | None = model
        self._named: dict[int, str] = {}
        self._held: list[torch.Tensor] = []
        super().__init__(target)

    @classmethod
    def of(cls, step: TrainingStep, stages: tuple[str, ...], target: Target) -> _Witness:
        """What the forward of `step` does."""
        witness = cls(target, step.model)
        seen = replay(step, stages, (KEEP,) * len(stages), target, tracker=witness, saves=False)
        for segment, sids in seen.saved.items():
            witness.saved[segment] = [sid for sid in sids if sid[0] == "forward"]
        return witness

    def _name_tensors(self, model: nn.Module) -> None:
        tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in tensors:
            self._named.setdefault(id(tensor.untyped_storage()), name)
            self._held.append(tensor)

    def _of(self, tensor: torch.Tensor) -> _Operand:
        sid = self.sid(tensor)
        where = self._named.get(id(tensor.untyped_storage()), "") if sid is None else sid
        return where, tensor.requires_grad

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        if self._model is not None:  # by now the twins are in place
            self._name_tensors(self._model)
            self._model = None
        given = [self._of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [
            (tuple(t.shape), t.stride(), t.dtype, self.sid(t))
            for t in pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor)
        ]
        key = self.forward[self._segment].ops[-1].key
        self.items.setdefault(self._segment, []).append(_Operation(key, given, made))
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        sid = self._alive.get(key)
        super()._freed(key, nbytes)
        if sid is not None:
            self.items.setdefault(self._segment, []).append(sid)


class _Operation(NamedTuple):
    key: Any
    given: list[_Operand]
    made: list[tuple[Any, ...]]


_Operand = tuple[Sid | str, bool]
"""A tensor by its storage, or by its name in the model, and whether it needs gradients."""
_Item = _Operation | Sid
"""An operation, or a storage that goes."""


class _Comparison:
    """A full model's forward against a short one's, both in terms of the short one."""

    def __init__(self, runs: list[Run], places: list[_Place], expected: _Witness, seen: _Witness) -> None:
        self._runs, self._places = runs, places
        self._expected, self._seen = expected, seen
        self._named = [
            (run, re.compile((re.escape(run.path) + r"\." if run.path else "") + r"(\d+)(?=\.|$)")) for run in runs
        ]

    def holds(self) -> bool:
        """Whether they do the same."""
        segments = {*self._seen.items, *self._seen.saved}
        if any(segment >= len(self._places) for segment in segments):
            return False
        return all(self._same(segment, place) for segment, place in enumerate(self._places))

    def _same(self, segment: int, place: _Place) -> bool:
        expected, late = self._written(place.segment, None)
        seen, later = self._written(segment, place)
        if expected != seen or set(late) != set(later):
            return False
        # What lies around the layers lets go of something of each: of both between in the short model.
        if any(n != _KEPT - 2 for n in late.values()) or any(n != run.periods - 2 for (run, *_), n in later.items()):
            return False
        saved = [self._sid(sid, place) for sid in self._seen.saved.get(segment, ())]
        return saved == self._expected.saved.get(place.segment, [])

    def _written(self, segment: int, place: _Place | None) -> tuple[list[Any], Counter[Any]]:
        """A segment's operations and what goes between them, and what goes of the periods between first and last."""
        witness = self._expected if place is None else self._seen
        out: list[Any] = []
        going: list[Any] = []
        late: Counter[Any] = Counter()
        for item in witness.items.get(segment, ()):
            if not isinstance(item, _Operation):
                key = self._between(item, place)
                if key is not None and self._is_outside(segment, place):
                    late[key] += 1
                else:
                    going.append(self._sid(item, place))
                continue
            out.append(sorted(going))
            going = []
            given = [(self._operand(where, place), grad) for where, grad in item.given]
            made = [(*made[:-1], self._sid(made[-1], place)) for made in item.made]
            out.append((_without_numbers(item.key), given, made))
        return [*out, sorted(going)], late

    def _is_outside(self, segment: int, place: _Place | None) -> bool:
        if place is not None:
            return place.run is None
        return all(p.run is None for p in self._places if p.segment == segment)

    def _between(self, sid: Sid, place: _Place | None) -> Any:
        """A storage made in a period between the first and the last, without that period's number; else None."""
        if place is not None:
            home = self._places[sid[1]]
            if home.run is None or not 0 < home.period < home.run.periods - 1:
                return None
            return home.run, home.segment, sid[2]
        for home in self._places:
            if home.run is not None and home.period == 1:
                length = sum(p.run == home.run and p.period == 1 for p in self._places)
                if sid[1] in (home.segment, home.segment + length):
                    return home.run, home.segment, sid[2]
        return None

    def _sid(self, sid: Sid | None, place: _Place | None) -> Any:
        """A storage of the full model by that of the short one, as seen from `place`; one that matches none if none."""
        if sid is None or place is None:
            return sid
        home = self._places[sid[1]]
        if home.run is None:
            return (sid[0], home.segment, sid[2])
        last = home.run.periods - 1
        away = home.period - place.period
        if home.run == place.run and abs(away) <= 1:
            return (sid[0], self._neighbour(home, place, away), sid[2])
        if home.period not in (0, last) or (home.run == place.run and abs(away) != last):
            return ("far", sid[1], sid[2])
        return (sid[0], home.segment, sid[2])

    def _neighbour(self, home: _Place, place: _Place, away: int) -> int:
        """The segment that stands for `home` beside what stands for `place`."""
        assert home.run is not None
        last = home.run.periods - 1
        kept = {0: 0, last: _KEPT - 1}
        wanted = kept.get(place.period, 1) + away
        length = sum(p.run == home.run and p.period == 0 for p in self._places)
        return home.segment + (wanted - kept.get(home.period, 1)) * length

    def _operand(self, where: Sid | str, place: _Place | None) -> Any:
        if not isinstance(where, str) or place is None:
            return self._sid(where, place) if not isinstance(where, str) else where
        for run, pattern in self._named:
            found = pattern.match(where)
            if found:
                i, fewer = int(found[1]), run.count - _KEPT * run.period
                q = (i - run.first) // run.period
                if i >= run.first + run.count or q == run.periods - 1:
                    i -= fewer
                elif i >= run.first and place.run == run and place.period == q:
                    i -= (q - min(q, 1)) * run.period
                elif i >= run.first and q > 0:
                    return f"far {where}"
                return where[: found.start(1)] + str(i) + where[found.end(1) :]
        return where


def _without_numbers(key: Any) -> Any:
    """An operation's key without numbers that may differ and change no bytes, such as a slope or a rate."""
    if key is None:
        return None
    func, leaves, spec = key
    return func, tuple(float if isinstance(x, float) and x not in (0.0, 1.0, 2.0) else x for x in leaves), spec


# --- writing it out ---

_Reference = tuple[Any, ...]
"""A block by where it is made: ("unit", periods away, direction, segment in the period, number) or ("outside", ...)."""


class _Folded:
    """A recording of a shortened model, with where each of its blocks and sections belongs."""

    def __init__(self, recording: Recording, run: Run) -> None:
        self.recording, self.run = recording, run
        self.begins = self._begins()
        self.births: dict[int, tuple[str, int, int]] = {}
        made: Counter[tuple[str, int]] = Counter()
        for section in recording.sections:
            for code, block in section.events:
                if code == ALLOCATE:
                    at = (section.direction, section.segment)
                    self.births[block] = (*at, made[at])
                    made[at] += 1

    def _begins(self) -> list[int] | None:
        """First segment of each period, and the first after the last one; None unless they lie in order, one by one."""
        members: list[int] = []
        segments: list[int] = []
        pattern = re.compile(re.escape(self.run.path) + r"\.(\d+)(?=[.#]|$)")
        for j, name in enumerate(self.recording.stages):
            found = pattern.match(name) if self.run.path else re.match(r"(\d+)(?=[.#]|$)", name)
            if found and self.run.first <= int(found[1]) < self.run.first + _KEPT * self.run.period:
                members.append((int(found[1]) - self.run.first) // self.run.period)
                segments.append(2 * j + 1)
        if members != sorted(members) or set(members) != set(range(_KEPT)):
            return None
        if segments != list(range(segments[0], segments[-1] + 1, 2)):
            return None
        begins = [segments[members.index(r)] for r in range(_KEPT)]
        begins.append(segments[-1] + 2)  # with the glue behind the last layer
        return begins if len({b - a for a, b in itertools.pairwise(begins)}) == 1 else None

    def period(self, segment: int) -> int | None:
        """The period that a segment is in."""
        assert self.begins is not None
        for r in range(_KEPT):
            if self.begins[r] <= segment < self.begins[r + 1]:
                return r
        return None

    def reference(self, block: int, r: int | None) -> _Reference:
        """A block as seen from period `r`, or from outside."""
        direction, segment, number = self.births[block]
        home = self.period(segment) if direction != "end" else None
        if home is None:
            return ("outside", direction, segment, number)
        assert self.begins is not None
        return ("unit", home - (r or 0), direction, segment - self.begins[home], number)

    def written(self, section: Section, r: int) -> list[Any]:
        """A section's events in terms of its period."""
        return [
            (code, self.reference(block, r), self.recording.blocks[block].nbytes, self.recording.blocks[block].category)
            for code, block in section.events
        ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs what fails on fake tensors, which may fail here for want of layers."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Place(NamedTuple):
    """A segment by the one that stands for it, and the period of a run that it is in."""

    segment: int
    run: Run | None = None
    period: int = 0


def unfolded(recording: Recording, run: Run) -> tuple[Recording, list[_Place]] | None:
    """The recording of the full model from that of the shortened one; None where the periods aren't alike.

    Beside it, for each segment of the full one, its place.
    """
    folded = _Folded(recording, run)
    if folded.begins is None or not _alike(folded):
        return None
    writer = _Writer(folded)
    return writer.write(), writer.places()


def _alike(folded: _Folded) -> bool:
    """Whether the second and third period do the same, and only with their neighbours or with what lies outside."""
    assert folded.begins is not None
    sides: list[dict[tuple[str, int], list[Any]]] = [{}, {}]
    outside: list[Counter[Any]] = [Counter(), Counter()]
    for position, section in enumerate(folded.recording.sections):
        r = folded.period(section.segment) if section.direction != "end" else None
        if r is not None and any(_far(folded.reference(block, r)) for _, block in section.events):
            return False
        if r in (1, 2):
            sides[r - 1][section.direction, section.segment - folded.begins[r]] = folded.written(section, r)
        elif r is None:
            for code, block in section.events:
                reference = folded.reference(block, None)
                if reference[0] == "unit" and reference[1] in (1, 2):
                    outside[reference[1] - 1][position, code, reference[2:]] += 1
    # Periods of which nothing was recorded show nothing.
    return bool(sides[0]) and sides[0] == sides[1] and outside[0] == outside[1]


def _far(reference: _Reference) -> bool:
    """Whether a block belongs to a period that is no neighbour; between the first and the last it is clear which."""
    return bool(reference[0] == "unit" and 1 < abs(reference[1]) < _KEPT - 1)


class _Writer:
    """Writes a folded recording out."""

    def __init__(self, folded: _Folded) -> None:
        self.folded, self.run = folded, folded.run
        self.blocks: list[Block] = []
        self.index: dict[tuple[Any, ...], int] = {}
        assert folded.begins is not None
        self.begins = folded.begins
        self.length = self.begins[1] - self.begins[0]
        self.more = (self.run.periods - _KEPT) * self.length

    def source(self, q: int) -> int:
        """The recorded period that stands for period `q` of the full model."""
        n = self.run.periods
        return 0 if q == 0 else _KEPT - 1 if q == n - 1 else 1

    def write(self) -> Recording:
        sections = self.folded.recording.sections
        outside_or_last = self._segments_by_direction(sections)
        out: list[Section] = []
        for group in outside_or_last:
            r = group[0][0]
            if r is None:
                out += [self._section(section, None, None) for _, section in group]
                continue
            # A whole direction's periods, in order: write every period of the full model from its source.
            forward = group[0][1].direction == "forward"
            by_period: dict[int, list[Section]] = {}
            for period, section in group:
                assert period is not None
                by_period.setdefault(period, []).append(section)
            order = range(self.run.periods) if forward else range(self.run.periods - 1, -1, -1)
            for q in order:
                out += [self._section(section, self.source(q), q) for section in by_period.get(self.source(q), ())]
        return Recording(self._stages(), self.blocks, out)

    def places(self) -> list[_Place]:
        """Where each segment of the full model comes from."""
        first, behind = self.begins[0], self.begins[0] + self.run.periods * self.length
        out = []
        for segment in range(2 * len(self.folded.recording.stages) + 1 + self.more):
            if segment < first or segment >= behind:
                out.append(_Place(segment - (self.more if segment >= behind else 0)))
                continue
            q, offset = divmod(segment - first, self.length)
            out.append(_Place(self.begins[self.source(q)] + offset, self.run, q))
        return out

    def _segments_by_direction(self, sections: list[Section]) -> list[list[tuple[int | None, Section]]]:
        """Sections in groups: one outside of the periods each, or all of one direction's periods together."""
        groups: list[list[tuple[int | None, Section]]] = []
        for section in sections:
            r = self.folded.period(section.segment) if section.direction != "end" else None
            last = groups[-1][0] if groups else (None, section)
            if r is not None and last[0] is not None and last[1].direction == section.direction:
                groups[-1].append((r, section))
            else:
                groups.append([(r, section)])
        return groups

    def _section(self, section: Section, r: int | None, q: int | None) -> Section:
        assert (r is None) == (q is None)
        if q is None or r is None:
            late = section.direction != "end" and section.segment >= self.begins[-1]
            segment = section.segment + (self.more if late else 0)
        else:
            segment = self.begins[0] + q * self.length + section.segment - self.begins[r]
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
            far = abs(reference[1]) == _KEPT - 1
            p = (0 if home == 0 else self.run.periods - 1) if far else q + reference[1]
            yield code, self._block(("unit", p, *reference[2:]), made, home, p)
        else:
            n = self.run.periods
            home = reference[1]
            for p in (0,) if home == 0 else range(1, n - 2) if home == 1 else (n - _KEPT + home,):
                yield code, self._block(("unit", p, *reference[2:]), made, home, p)

    def _block(self, key: tuple[Any, ...], made: Block, r: int | None, q: int | None) -> int:
        if key not in self.index:
            self.index[key] = len(self.blocks)
            rename = self._renamer(r, q)
            self.blocks.append(
                dataclasses.replace(made, name=rename(made.name), module=rename(made.module), stage=rename(made.stage))
            )
        return self.index[key]

    def _renamer(self, r: int | None, q: int | None) -> Callable[[str], str]:
        """Names of the shortened model in those of the full one, as seen in period `q`, recorded as `r`."""
        run = self.run
        pattern = re.compile((re.escape(run.path) + r"\." if run.path else "") + r"(\d+)(?=[.:#)]|$)")
        head = f"{run.path}." if run.path else ""

        def renamed(found: re.Match[str]) -> str:
            i = int(found[1])
            if i >= run.first + _KEPT * run.period:
                i += run.count - _KEPT * run.period
            elif i >= run.first:
                recorded = (i - run.first) // run.period
                if r is not None and q is not None:
                    i += (q - r) * run.period
                elif recorded >= 2:
                    i += (run.periods - _KEPT) * run.period
            return f"{head}{i}"

        return lambda name: pattern.sub(renamed, name, count=1) if head in name else name

    def _stages(self) -> tuple[str, ...]:
        out: list[str] = []
        stages = self.folded.recording.stages
        first, last = self.begins[0] // 2, self.begins[-1] // 2
        per = self.length // 2
        rename = self._renamer(None, None)
        out += [rename(name) for name in stages[:first]]
        for q in range(self.run.periods):
            r = self.source(q)
            out += [self._renamer(r, q)(name) for name in stages[first + r * per : first + (r + 1) * per]]
        return (*out, *(rename(name) for name in stages[last:]))
