"""Every block of memory that a step makes and frees, in order, read off its log on fake tensors.

A *recording* is a list of blocks and, per section of the step, their events. A section is one of the log's segments (a
stage, or the glue before it) in one direction; sections are in the order they ran.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ckptplan.core.plan import Decision
from ckptplan.profiling.bytes.origins import Origin
from ckptplan.profiling.bytes.replays import UNLISTED, Replay, segment_name
from ckptplan.profiling.bytes.tracker import (
    OFFLOADED,
    SAVED,
    Change,
    OpTrace,
    SegmentTrace,
    Sid,
    Tracker,
    workspaces_of,
)
from ckptplan.profiling.target import Target
from ckptplan.profiling.workload.optimizers import traced_updates
from ckptplan.profiling.workload.stand_ins import StandIns
from ckptplan.runtime.controller import is_glue
from ckptplan.tensors.storages import local_part, plain_tensors, tensors_in
from ckptplan.training.measure import held_tensors

Direction = str
"""\"forward\" or \"backward\"."""

ALLOCATE, FREE, WORK = 1, -1, 0
Event = tuple[int, int]
"""(ALLOCATE or FREE, index of a block), or (WORK, index of an operation)."""


@dataclass(slots=True)
class Block:
    """One block of device memory.

    Attributes
    ----------
    nbytes : int
        Size before rounding.
    category : str
        One of `ckptplan.core.estimate.CATEGORIES`.
    name : str
        Name of the parameter, buffer or state; empty for other tensors.
    module, line, op : str
        The module whose forward, or whose forward's backward, made the block; the line of code outside PyTorch that
        called the operation; the operation.
    shape : tuple of int
    dtype : str
    stage : str
        For saved activations, the first stage that saves it.
    returned : tuple of str
        "output" and "loss", if it belongs to them.
    parameters : tuple of str
        Names of the parameters whose gradients it has; those of a sharded unit are all in one block.
    stream : int
        The stream that it is allocated on; 0 is the step's own. FSDP2 has others.
    """

    nbytes: int
    category: str
    name: str = ""
    module: str = ""
    line: str = ""
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stage: str = ""
    returned: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    stream: int = 0


@dataclass(slots=True)
class Section:
    """The events of one segment in one direction ("forward", "backward").

    Further directions are "loss", from the return of the model's forward on, and "end", after the step.
    """

    direction: Direction
    segment: int
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    """A step's blocks and events.

    Attributes
    ----------
    stages : tuple of str
        Names of the module stages: segment 2j + 1 is stage j.
    blocks : list of Block
    sections : list of Section
    """

    stages: tuple[str, ...]
    blocks: list[Block]
    sections: list[Section]

    def __post_init__(self) -> None:
        assert all(s.segment <= 2 * len(self.stages) for s in self.sections)

    @property
    def gradients(self) -> frozenset[str]:
        """Names of the parameters that backward gives a gradient."""
        return frozenset(name for block in self.blocks if block.category == "gradients" for name in block.parameters)


class _Writer:
    """Writes a log's changes of storages as events of blocks.

    Parameters
    ----------
    origins : mapping
        The log's origins of storages.

    Attributes
    ----------
    blocks : list of Block
    operations : list of OpTrace
    made : dict
        Storage -> the block that was made for it.
    alive : dict
        Storage -> its block. A sum of gradients that is computed in place has the block of its first term.
    """

    def __init__(self, origins: Mapping[Sid, Origin]) -> None:
        self._origins = origins
        self.blocks: list[Block] = []
        self.operations: list[OpTrace] = []
        self.made: dict[Sid, int] = {}
        self.alive: dict[Sid, int] = {}
        self._sums: dict[Sid, Sid] = {}
        self._weights: dict[Sid, int] = {}  # weights that leave and return

    def sections(
        self, direction: Direction, segment: int, trace: SegmentTrace, returns: Iterable[tuple[int, int]] = ()
    ) -> Iterator[Section]:
        """Yield the section of a segment; a further one, "loss", begins at each of `returns` (`Replay.returns`)."""
        first = done = 0
        for last, ops in (*returns, (len(trace.changes), len(trace.ops))):
            events: list[Event] = []
            for op in trace.ops[done:ops]:
                self._sums.update(zip(op.made, op.written, strict=False) if op.key is None else ())
                if op.key is not None:
                    events += [*self.events(trace.changes[first : op.at[1]]), (WORK, len(self.operations))]
                    self.operations.append(op)
                    first = op.at[1]
            events += self.events(trace.changes[first:last])
            yield Section(direction, segment, events)
            first, done, direction, segment = last, ops, "loss", 0

    def events(self, changes: Iterable[Change]) -> Iterator[Event]:
        """Yield the events of changes."""
        for sid, nbytes, exists in changes:
            if sid[0].startswith(OFFLOADED):
                if sid not in self._weights:
                    self._weights[sid] = len(self.blocks)
                    self.blocks.append(Block(nbytes, OFFLOADED, sid[0].removeprefix(OFFLOADED)))
                yield ALLOCATE if exists else FREE, self._weights[sid]
            elif not exists and sid in self.alive:
                yield FREE, self.alive.pop(sid)
            elif exists and self._sums.get(sid) in self.alive:
                self.alive[sid] = self.alive.pop(self._sums.pop(sid))
            elif exists and sid not in self.alive and sid not in self.made:
                self.made[sid] = self.alive[sid] = len(self.blocks)
                yield ALLOCATE, len(self.blocks)
                made = self._origins[sid]
                self.blocks.append(
                    Block(
                        made.nbytes,
                        made.category,
                        module=made.place.module,
                        line=made.place.line,
                        op=made.op,
                        shape=made.shape,
                        dtype=made.dtype,
                        stream=made.stream,
                    )
                )

    def finish(self, sections: Iterable[Section], peaks: Mapping[Hashable, int]) -> None:
        """Replace each operation by a block for the memory that it takes beside its results and frees again."""
        for section in sections:
            section.events = list(self._with_workspaces(section.events, peaks))

    def _with_workspaces(self, events: Iterable[Event], peaks: Mapping[Hashable, int]) -> Iterator[Event]:
        for code, index in events:
            if code != WORK:
                yield code, index
                continue
            op = self.operations[index]
            beside = peaks.get(op.key, 0) - op.asked_bytes
            if beside > 0:
                where = op.place
                yield ALLOCATE, len(self.blocks)
                yield FREE, len(self.blocks)
                self.blocks.append(
                    Block(beside, "workspaces and temporaries", module=where.module, line=where.line, op=op.name)
                )


def record_step(
    logged: Callable[[], tuple[Replay, tuple[str, ...]]],
    target: Target,
    choices: Sequence[Decision] = (),
    *,
    inference: bool = False,
) -> tuple[Recording, list[str]]:
    """Return the recording of one forward and backward.

    Parameters
    ----------
    logged : callable
        Replays the step, with its whole log; returns the replay and the names of its stages.
    choices : sequence of Decision
        A plan's decisions, one per stage; default: everything is kept.
    inference : bool
        Whether to record one forward that saves nothing instead.

    Returns
    -------
    Recording
        Without parameters, buffers and inputs, and without gradients from before the step.
    list of str
        Operations whose temporaries couldn't be determined.
    """
    while True:
        seen, stages = logged()
        if target.answers is not None:
            target.answers.draws |= seen.draws
        peaks, failed, learned = workspaces_of(target, (*seen.forward.values(), *seen.backward.values()))
        if not learned:
            break  # otherwise again, with the storages that were learned
    modules = tuple(name for name in stages if not is_glue(name))
    writer = _Writer(seen.origins)
    sections: list[Section] = []
    for g, trace in seen.forward.items():
        sections += writer.sections("forward", g, trace, [(n, ops) for at, n, ops in seen.returns if at == g])
    for g, trace in seen.backward.items():
        sections += writer.sections("backward", g, trace)
    # Gradients stay allocated after the recording.
    ended = (change for change in seen.changes if change[0] not in seen.named_gradients)
    sections.append(Section("end", 0, list(writer.events(ended))))
    _categorize(writer, seen, modules, inference)
    if not target.is_cuda:
        _keep_random_states(
            writer, sections, modules, [c for n, c in zip(stages, choices, strict=False) if not is_glue(n)]
        )
    writer.finish(sections, peaks)
    return Recording(modules, writer.blocks, sections), failed


def _keep_random_states(
    writer: _Writer, sections: Iterable[Section], modules: tuple[str, ...], choices: list[Decision]
) -> None:
    """Add the random state that each recomputed stage keeps from its forward to its backward.

    On the CPU it is a tensor, which a dispatch mode doesn't see. A second one holds the current state during the
    recompute.
    """
    nbytes = torch.get_rng_state().numel()
    for j, choice in enumerate(choices):
        if choice.action != "recompute" or choice.ratio:
            continue
        mine = {s.direction: s for s in sections if s.segment == 2 * j + 1}
        if set(mine) != {"forward", "backward"}:
            continue
        kept, set_aside = (Block(nbytes, "saved activations", "random state", stage=modules[j]) for _ in range(2))
        first = len(writer.blocks)
        writer.blocks += [kept, set_aside]
        mine["forward"].events.insert(0, (ALLOCATE, first))
        backward = mine["backward"].events
        again = [n for n, (code, index) in enumerate(backward) if code == WORK and writer.operations[index].runs_again]
        backward.insert(again[-1] + 1 if again else 0, (FREE, first + 1))
        backward.insert(0, (ALLOCATE, first + 1))
        backward.append((FREE, first))


def _categorize(writer: _Writer, seen: Replay, stages: tuple[str, ...], inference: bool) -> None:
    """Set the category of each block."""
    holder: dict[int, int] = {}
    for segment, sids in () if inference else sorted(seen.saved.items()):
        for sid in sids:
            if sid in writer.made:
                holder.setdefault(writer.made[sid], segment)
    for sid, index in writer.made.items():
        block, origin = writer.blocks[index], seen.origins[sid]
        if origin.category == SAVED:  # numbers
            block.stage = segment_name(stages, sid[1])
        elif block.category:  # gathered
            pass
        elif sid[0] == "backward":
            block.category = SAVED if origin.runs_again else "output gradients"
        elif index in holder:
            block.category, block.stage = SAVED, segment_name(stages, holder[index])
        else:
            block.category = "forward outputs"
    for sid, names in seen.named_gradients.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        block = writer.blocks[writer.alive[sid]]
        block.category, block.name, block.parameters = "gradients", f"{names[0]}{more}", names
    for name, results in seen.results.items():
        for sid in results:
            if sid in writer.made:
                writer.blocks[writer.made[sid]].returned += (name,)


def record_updates(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    target: Target,
    steps: Sequence[Collection[str]] = (),
    *,
    inputs: Iterable[torch.Tensor] = (),
    keeps_gradients: bool = False,
) -> Recording:
    """Record updates of `optimizer`, the first of which makes the state that isn't there: "update 1", "update 2".

    Further sections are "held", the state that is there before; "dropped 1" and "dropped 2", `zero_grad`; and those
    that a player adopts (`Player.adopt`): "weights", and "gradients 1" and "gradients 2", what backward has left. All
    that an update leaves is "optimizer state", wherever the optimizer keeps it.

    Parameters
    ----------
    steps : sequence of collections of str
        For each update, the names of the parameters that backward gives a gradient; default: two updates of all that
        require one.
    inputs : iterable of tensors
        The steps' tensors from outside of the model.
    keeps_gradients : bool
        Whether gradients keep their memory from one step to the next.

    Raises
    ------
    UnsupportedModelError
        If the update can't run on fake tensors.
    """
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    updates = _UpdateLog(Tracker(target.without_answers, model), model)

    def has_gradient(p: torch.Tensor, given: Collection[str] | None = None) -> bool:
        return p.requires_grad and (given is None or names.get(p, UNLISTED) in given)

    with traced_updates(
        optimizer,
        updates.tracker,
        target,
        own=[*held_tensors(model), *inputs],
        begin=updates.begin,
        gradients=[functools.partial(has_gradient, given=given) for given in steps or (None, None)],
        keeps_gradients=keeps_gradients,
    ) as stand_ins:
        updates.begin("over", stand_ins)
        updates.name_state(optimizer, stand_ins)
        return updates.recording(target, type(optimizer).__name__)


class _UpdateLog:
    """The log of an optimizer's updates, each part a segment, and what lasts of their storages."""

    def __init__(self, tracker: Tracker, model: nn.Module) -> None:
        self.tracker = tracker
        self._parts = [""]
        self._labels: dict[Sid, tuple[str, str]] = {}  # category and name
        self._given: dict[str, list[Sid]] = {}  # part -> gradients that are there at its end
        self._storages: dict[int, str] = {}  # of the model -> the name of the first parameter in it
        self._listed: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            self._storages.setdefault(local_part(p).untyped_storage()._cdata, name)

    def begin(self, part: str, stand_ins: StandIns) -> None:
        """End a part of the updates, and begin another."""
        if part.startswith("update"):
            named = [(self._listed.get(p, UNLISTED), t.grad) for p, t in stand_ins.parameters if t.grad is not None]
            self._given[self._parts[-1]] = [sid for name, t in named for sid in self._label(t, "gradients", name)]
        later = part == "over" or (part.startswith("gradients") and part != "gradients 1")
        if later or part in ("weights", "gradients 1"):
            for p, twin in stand_ins.parameters:
                self._label(twin, "weights", self._storages.get(local_part(p).untyped_storage()._cdata, UNLISTED))
                if later and twin.grad is not None:
                    self._label(twin.grad, "gradients", self._listed.get(p, UNLISTED))
        if later or part == "weights":
            for sid in self.tracker.alive():
                self._labels.setdefault(sid, ("optimizer state", ""))
        self.tracker.enter_segment(len(self._parts))
        self._parts.append(part)

    def name_state(self, optimizer: torch.optim.Optimizer, stand_ins: StandIns) -> None:
        """Name the storages of state by the parameter and the key, or by the optimizer's attribute."""
        for p, twin in stand_ins.parameters:
            state = optimizer.state.get(twin, {})
            for what, value in state.items() if isinstance(state, Mapping) else ():
                for tensor in tensors_in(value):
                    self._label(tensor, "optimizer state", f"{self._listed.get(p, '?')}: {what}")
        for what, value in vars(optimizer).items():
            for tensor in tensors_in(value):
                self._label(tensor, "optimizer state", what)

    def _label(self, tensor: torch.Tensor, category: str, name: str) -> list[Sid]:
        """Give a tensor's storages a category and a name, unless they have others, and return them."""
        found = [sid for plain in plain_tensors(tensor) if (sid := self.tracker.sid(plain)) is not None]
        for sid in found:
            had = self._labels.get(sid, (category, ""))
            if had[0] == category:
                self._labels[sid] = category, had[1] or name
        return found

    def recording(self, target: Target, optimizer: str) -> Recording:
        """Return the recording, with the optimizer's name in place of the line of code that made a block."""
        writer, sections = _Writer(self.tracker.origins), list[Section]()
        for part, trace in list(zip(self._parts, self.tracker.forward.values(), strict=True))[1:-1]:
            sections += writer.sections(part, 0, trace)
            if part in self._given:
                sections[-1].events = [(ALLOCATE, writer.made[sid]) for sid in self._given[part]]
        for sid, index in writer.made.items():
            block = writer.blocks[index]
            block.category, block.name = self._labels.get(sid, ("workspaces and temporaries", ""))
            block.line = optimizer
        traces = self.tracker.forward.values()
        peaks, *_ = target.workspaces(op.key for trace in traces for op in trace.ops)
        writer.finish(sections, peaks)
        return Recording((), writer.blocks, sections)
