"""Record every block of memory that a step makes and frees, in order, by running it on fake tensors.

A *recording* is a list of blocks and, per section of the step, their events. A section is one of the tracker's segments
(a stage, or the glue before it) in one direction; sections are in the order they ran.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ckptplan.core.estimate import GATHERED
from ckptplan.core.plan import KEEP, Decision
from ckptplan.core.segment import Segment
from ckptplan.profiling.bytes.origins import Where, names_of, operation_name, where
from ckptplan.profiling.bytes.trace import Replay, replay, segment_name
from ckptplan.profiling.bytes.tracker import Tracker, learn_storages
from ckptplan.profiling.target import Target
from ckptplan.profiling.workload.optimizers import traced_updates
from ckptplan.profiling.workload.stand_ins import StandIns
from ckptplan.runtime.accelerator import own_module
from ckptplan.runtime.controller import is_glue
from ckptplan.runtime.observe.measure import held_tensors, tensors_in
from ckptplan.runtime.private import current_node, next_sequence_number
from ckptplan.runtime.step import TrainingStep
from ckptplan.runtime.swap.own import local_part, plain_tensors

Direction = str
"""\"forward\" or \"backward\"."""

UNLISTED = "(of a parameter that the model doesn't list)"

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
        Names of those whose gradients it has: of a sharded unit, all in one block.
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


class Recorder(Tracker):
    """A tracker that also records each block with its origin.

    Parameters
    ----------
    target : Target
    model : nn.Module
    saves : bool
        False: autograd saves nothing.
    """

    def __init__(self, target: Target, model: nn.Module, *, saves: bool = True) -> None:
        self._saves = saves
        self.blocks: list[Block] = []
        self.sections: list[Section] = []
        self.operations: list[tuple[Hashable, int, Where, str]] = []
        self._model = model
        self._names = names_of(model)
        self._block_of: dict[int, int] = {}
        self._sums: dict[int, int] = {}
        self._nodes_end: list[int] = []
        self._nodes: list[Where] = []
        self._where = Where("", "")
        self._op = ""
        self._streams: dict[Any, int] = {own_module(target.device).current_stream(): 0}
        self._numbers: list[tuple[int, int]] = []  # the nodes that saved some, and their blocks
        self.numbers: dict[int, int] = {}
        self.block_of_sid: dict[Any, int] = {}
        self.made_in_backward: set[int] = set()
        self.made_again: set[int] = set()
        self.run_again: set[int] = set()
        self.gradients: dict[int, list[str]] = {}
        super().__init__(target)

    # --- sections ---

    def enter_segment(self, segment: int) -> None:
        """Continue forward with `segment`."""
        super().enter_segment(segment)
        self.sections.append(Section("forward", segment))

    def enter_backward(self, segment: int | None = None) -> None:
        """Begin backward, or continue it with `segment`."""
        before = (self._in_backward, self._segment)
        super().enter_backward(segment)
        if (self._in_backward, self._segment) != before:
            first = before[1] if before[0] else self._segment + 1
            for passed in range(first - 1, self._segment - 1, -1):
                self.sections.append(Section("backward", passed))

    def finish(self) -> None:
        """End the step; its gradients stay allocated."""
        super().finish()
        self._free_numbers(all_of_them=True)
        unlisted = ((UNLISTED, other) for other, _ in self.foreign.values())
        for name, parameter in (*self._model.named_parameters(), *unlisted):
            block = None if parameter.grad is None else self.block_of(parameter.grad)
            if block is not None and (name != UNLISTED or block not in self.gradients):
                self.gradients.setdefault(block, []).append(name)
        self.sections.append(Section("end", 0))

    # --- blocks ---

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record the blocks that it makes."""
        forward = not self._in_backward or torch.is_grad_enabled()
        if forward:
            self._where = where(sys._getframe(1), self._names)
        else:
            self._where = self._of_node()
            self._free_numbers()
        self._op = operation_name(func, self)
        first = len(self.blocks)
        result = super().operation(func, args, kwargs)
        if forward:
            number = next_sequence_number()
            if not self._nodes_end or number > self._nodes_end[-1]:
                self._nodes_end.append(number)
                self._nodes.append(self._where)
        table = self.backward if self._in_backward else self.forward
        key = table[self._segment].ops[-1].key
        if key is not None:
            made = sum(block.nbytes for block in self.blocks[first:])
            if forward and self._in_backward:
                self.run_again.add(len(self.operations))
            self.sections[-1].events.append((WORK, len(self.operations)))
            self.operations.append((key, made, self._where, self._op))
        return result

    def _save_numbers(self, count: int) -> None:
        """Record a block for the numbers that the operation's node, the newest one, saves."""
        super()._save_numbers(count)
        if self._saves:
            self._numbers.append((next_sequence_number() - 1, len(self.blocks)))
            self.numbers[len(self.blocks)] = self._segment
            self._allocate(8 * count, (count,), "float64")

    def _free_numbers(self, *, all_of_them: bool = False) -> None:
        """Free the saved numbers of nodes whose backward has ended: those made later than the node that runs."""
        node = current_node()
        while self._numbers and (all_of_them or (node is not None and self._numbers[-1][0] > node._sequence_nr())):
            self.sections[-1].events.append((FREE, self._numbers.pop()[1]))

    def _of_node(self) -> Where:
        """Return the origin of the forward operation whose backward runs."""
        node = current_node()
        if node is None or not self._nodes:
            return self._where
        at = bisect.bisect_right(self._nodes_end, node._sequence_nr())
        return self._nodes[at] if at < len(self._nodes) else self._where

    def _summed_in_place(self, earlier: torch.Tensor, total: torch.Tensor) -> None:
        self._sums[id(total.untyped_storage())] = id(earlier.untyped_storage())

    def _add(self, tensor: torch.Tensor) -> Any:
        sid = super()._add(tensor)
        if sid is None:
            return None
        key = id(tensor.untyped_storage())
        earlier = self._sums.pop(key, None)
        if earlier is not None and earlier in self._block_of:
            # PyTorch adds into the earlier block, which stays allocated and gets the sum's key.
            self._block_of[key] = self._block_of.pop(earlier)
            return sid
        index = self._block_of[key] = self.block_of_sid[sid] = len(self.blocks)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._allocate(tensor.untyped_storage().nbytes(), tuple(tensor.shape), dtype)
        if self._in_backward:
            again = torch.is_grad_enabled() and current_node() is not None
            (self.made_again if again else self.made_in_backward).add(index)
        return sid

    def _recount(self, key: int, storage: torch.UntypedStorage) -> None:
        """Record a storage of gathered parameters as a block whenever it has memory."""
        before = self._counted.get(key, 0)
        super()._recount(key, storage)
        if key not in self._counted or self._alive[key] is not None or self._counted[key] == before:
            return
        if (block := self._block_of.pop(key, None)) is not None:
            self.sections[-1].events.append((FREE, block))
        if self._counted[key]:
            self._block_of[key] = len(self.blocks)
            self._op = "fsdp.all_gather"
            self._allocate(storage.nbytes(), (), "")
            self.blocks[-1].category = GATHERED

    def _allocate(self, nbytes: int, shape: tuple[int, ...], dtype: str) -> None:
        """Record a block that the present operation makes."""
        where = self._where
        self.sections[-1].events.append((ALLOCATE, len(self.blocks)))
        self.blocks.append(
            Block(
                nbytes,
                "",
                module=where.module,
                line=where.line,
                op=self._op,
                shape=shape,
                dtype=dtype,
                stream=self._stream(),
            )
        )

    def _stream(self) -> int:
        """Return the number of the present stream, counted by first use."""
        now = own_module(self._target.device).current_stream()
        return self._streams.setdefault(now, len(self._streams))

    def _freed(self, key: int) -> None:
        super()._freed(key)
        block = self._block_of.pop(key, None)
        if block is not None and block not in self.gradients:  # gradients stay allocated after the recording
            self.sections[-1].events.append((FREE, block))

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's block; None for a tensor from before the recording."""
        return self._block_of.get(id(local_part(tensor).untyped_storage()))

    @contextlib.contextmanager
    def watching_model(self) -> Iterator[None]:
        """Note when the model's forward returns, while the context is active."""

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            if module is self._model and not self._in_backward:
                self.sections.append(Section("loss", 0))

        handle = register_module_forward_hook(returned, always_call=True)
        try:
            yield
        finally:
            handle.remove()


def record_step(
    step: TrainingStep,
    stages: tuple[str, ...],
    target: Target,
    *,
    choices: tuple[Decision, ...] | None = None,
    segments: tuple[Segment, ...] = (),
    accumulating: bool = False,
    inference: bool = False,
    holds_output: bool = True,
) -> tuple[Recording, list[str]]:
    """Record one forward and backward of `step`.

    Parameters
    ----------
    stages : tuple of str
        The module stages.
    choices, segments
        Those of a plan; default: everything is kept.
    accumulating : bool
        Whether parameters have gradients at the start.
    inference : bool
        Record one forward that saves nothing instead.
    holds_output : bool
        The output is referenced during backward, beside the loss.

    Returns
    -------
    Recording
        Without parameters, buffers and inputs, and without gradients from before the step.
    list of str
        Operations whose temporaries couldn't be determined.
    """
    while True:
        recorder = Recorder(target, step.model, saves=not inference)
        with recorder.watching_model():
            seen = replay(
                step.without_loss() if inference else step,
                stages,
                choices or (KEEP,) * len(stages),
                target,
                segments=segments,
                tracker=recorder,
                saves=not inference,
                accumulating=accumulating,
                numbered=False,
                holds_output=holds_output,
            )
        if target.answers is not None:
            target.answers.draws |= seen.draws
        modules = tuple(name for name in stages if not is_glue(name))
        if not target.is_cuda:
            _keep_random_states(
                recorder, modules, [c for n, c in zip(stages, choices or (), strict=False) if not is_glue(n)]
            )
        _categorize(recorder, seen, modules, inference)
        peaks, failed, storages = target.workspaces(key for key, *_ in recorder.operations)
        if not learn_storages(target, (*seen.forward.values(), *seen.backward.values()), storages):
            break  # otherwise again, with the storages that were learned
    for section in recorder.sections:
        section.events = list(_with_workspaces(recorder, section.events, peaks))
    return Recording(modules, recorder.blocks, recorder.sections), failed


def _keep_random_states(recorder: Recorder, modules: tuple[str, ...], choices: list[Decision]) -> None:
    """Add the random state that each recomputed stage keeps from its forward to its backward.

    On the CPU it is a tensor, which a dispatch mode doesn't see. A second one holds the current state during the
    recompute.
    """
    nbytes = torch.get_rng_state().numel()
    for j, choice in enumerate(choices):
        if choice.action != "recompute":
            continue
        mine = {s.direction: s for s in recorder.sections if s.segment == 2 * j + 1}
        if set(mine) != {"forward", "backward"}:
            continue
        kept, set_aside = (Block(nbytes, "saved activations", "random state", stage=modules[j]) for _ in range(2))
        first = len(recorder.blocks)
        recorder.blocks += [kept, set_aside]
        mine["forward"].events.insert(0, (ALLOCATE, first))
        backward = mine["backward"].events
        again = [n for n, (code, index) in enumerate(backward) if code == WORK and index in recorder.run_again]
        backward.insert(again[-1] + 1 if again else 0, (FREE, first + 1))
        backward.insert(0, (ALLOCATE, first + 1))
        backward.append((FREE, first))


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
    recorder = _UpdateRecorder(target.without_answers, model)

    def has_gradient(p: torch.Tensor, given: Collection[str] | None = None) -> bool:
        return p.requires_grad and (given is None or names.get(p, UNLISTED) in given)

    with traced_updates(
        optimizer,
        recorder,
        target,
        own=[*held_tensors(model), *inputs],
        begin=recorder.begin,
        gradients=[functools.partial(has_gradient, given=given) for given in steps or (None, None)],
        keeps_gradients=keeps_gradients,
    ) as stand_ins:
        recorder.begin("over", stand_ins)
        recorder.name_state(optimizer, stand_ins)
    for block in recorder.blocks:
        block.category = block.category or "workspaces and temporaries"
        block.line = type(optimizer).__name__
    peaks, *_ = target.workspaces(key for key, *_ in recorder.operations)
    sections = [
        Section(s.direction, 0, list(_with_workspaces(recorder, s.events, peaks))) for s in recorder.sections[:-1]
    ]
    return Recording((), list(recorder.blocks), sections)


class _UpdateRecorder(Recorder):
    """A recorder of an optimizer's updates, which tells what lasts from what is temporary."""

    def __init__(self, target: Target, model: nn.Module) -> None:
        super().__init__(target, model)
        self.sections = []
        self._storages: dict[int, str] = {}  # of the model -> the name of the first parameter in it
        self._listed: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            self._storages.setdefault(local_part(p).untyped_storage()._cdata, name)

    def begin(self, part: str, stand_ins: StandIns) -> None:
        """End a part of the updates, and begin another."""
        if part.startswith("update"):
            named = [(self._listed.get(p, UNLISTED), t.grad) for p, t in stand_ins.parameters if t.grad is not None]
            self.sections[-1].events = [(ALLOCATE, b) for name, t in named for b in self._label(t, "gradients", name)]
        if part in ("weights", "gradients 1"):
            for p, twin in stand_ins.parameters:
                self._label(twin, "weights", self._named(p))
        later = part == "over" or (part.startswith("gradients") and part != "gradients 1")
        if later:
            for p, twin in stand_ins.parameters:
                self._label(twin, "weights", self._named(p))
                if twin.grad is not None:
                    self._label(twin.grad, "gradients", self._listed.get(p, UNLISTED))
        if later or part == "weights":
            for block in self._block_of.values():
                self.blocks[block].category = self.blocks[block].category or "optimizer state"
        self.sections.append(Section(part, 0))

    def _named(self, p: torch.Tensor) -> str:
        return self._storages.get(local_part(p).untyped_storage()._cdata, UNLISTED)

    def name_state(self, optimizer: torch.optim.Optimizer, stand_ins: StandIns) -> None:
        """Name the blocks of state by the parameter and the key, or by the optimizer's attribute."""
        for p, twin in stand_ins.parameters:
            state = optimizer.state.get(twin, {})
            for what, value in state.items() if isinstance(state, Mapping) else ():
                for tensor in tensors_in(value):
                    self._label(tensor, "optimizer state", f"{self._listed.get(p, '?')}: {what}")
        for what, value in vars(optimizer).items():
            for tensor in tensors_in(value):
                self._label(tensor, "optimizer state", what)

    def _label(self, tensor: torch.Tensor, category: str, name: str) -> list[int]:
        """Give a tensor's blocks a category and a name, unless they have others, and return their indices."""
        found = [b for plain in plain_tensors(tensor) if (b := self.block_of(plain)) is not None]
        for block in found:
            made = self.blocks[block]
            if made.category in ("", category):
                made.category, made.name = category, made.name or name
        return found


def _with_workspaces(recorder: Recorder, events: list[Event], peaks: dict[Hashable, int]) -> Iterator[Event]:
    """Yield `events`, with a block for the memory that each operation allocates beside its results and frees again."""
    for code, index in events:
        if code != WORK:
            yield code, index
            continue
        key, made, where, op = recorder.operations[index]
        beside = peaks.get(key, 0) - made
        if beside > 0:
            block = Block(beside, "workspaces and temporaries", module=where.module, line=where.line, op=op)
            recorder.blocks.append(block)
            yield ALLOCATE, len(recorder.blocks) - 1
            yield FREE, len(recorder.blocks) - 1


def _categorize(recorder: Recorder, seen: Replay, stages: tuple[str, ...], inference: bool) -> None:
    """Set the category of each block."""
    holder: dict[int, int] = {}
    for segment, sids in () if inference else sorted(seen.saved.items()):
        for sid in sids:
            made = recorder.block_of_sid.get(sid)
            if made is not None:
                holder.setdefault(made, segment)
    holder.update(recorder.numbers)
    for index, block in enumerate(recorder.blocks):
        if index in recorder.gradients:
            names = recorder.gradients[index]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            block.category, block.name, block.parameters = "gradients", f"{names[0]}{more}", tuple(names)
        elif block.category:  # gathered
            pass
        elif index in recorder.made_in_backward:
            block.category = "output gradients"
        elif index in recorder.made_again:
            block.category = "saved activations"
        elif index in holder:
            block.category, block.stage = "saved activations", segment_name(stages, holder[index])
        else:
            block.category = "forward outputs"
    for name, results in seen.results.items():
        for sid in results:
            if sid in recorder.block_of_sid:
                recorder.blocks[recorder.block_of_sid[sid]].returned += (name,)
