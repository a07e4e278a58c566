"""Segments: consecutive stages that are recomputed together, whatever code runs them and runs between them.

NOTE [Frames and links]
1. Each stage of a segment runs forward inside a *frame*. In place of each tensor that autograd saves there, the graph
   gets a *slot*, an empty placeholder that owns its frame. So the graph owns the frames, and freeing the graph frees
   everything that they hold.
2. A frame holds the stage's inputs, except for unmodified outputs of earlier stages of the segment. In place of such
   an output it has a *link*, which owns the frame of the stage that made it. All references lead to frames that ran
   earlier, so there are no reference cycles. A tensor that is also held by an object among the arguments stays in
   memory anyway and gets no link.
3. When a backward (one graph task of autograd) reads a slot, it starts a *sweep* (rule 6 of NOTE [Residency] in
   core/rules.py) of each segment around the stage that this task hasn't swept yet, the outermost first. After that the
   stage's own slots are filled, or the stage is the last one of its segment and is run again now, until its slots are
   filled.
4. A slot is emptied when it is read; if a backward written in Python reads it, when that backward has ended. The rest
   is dropped at the end of the graph task. A second backward through the same graph is another task and sweeps again.
5. For a tensor of the model itself (a parameter, a buffer) that a stage saves, the slot returns that very tensor, not
   the copy that a recompute may have saved.
6. An output of a recompute is handed only to stages that have a link to it and haven't been recomputed yet. The last
   stage of a segment keeps its linked inputs until its own recompute. A stage of an inner segment keeps only those that
   come from outside the inner segment. All other stages keep none after their run.

Example: stages 0, 1 and 2 form one segment without inner segments, and each saves its input for backward::

    forward   frame 0 holds x; frame 1 links to output 0 of frame 0; frame 2 links to output 0 of frame 1
    backward  reads a slot of stage 2: the sweep runs stage 0 (fills its slots, hands its output to stage 1), then
              stage 1 (fills its slots, hands its output to stage 2); then stage 2 runs until its slots are filled
              reads the slots of stages 1 and 0: filled already, nothing runs again

Each stage is recomputed once, and between forward and backward only `x` is held.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.segment import Segment
from ckptplan.runtime.guard.check import StageCheck, StageSpots
from ckptplan.runtime.recompute.call import Call, NotRepeatableError, PlannedStage
from ckptplan.runtime.recompute.frames import Frame, Handed, Slot, at_end_of_task, hold, taken
from ckptplan.runtime.swap.packing import Held, Packing
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.tensors.objects import tensors_in_objects
from ckptplan.tensors.private import current_graph_task
from ckptplan.tensors.views import Geometry, plain, version_of, whole_storage

Made = tuple[int, int]
"""An output: the index of the stage that makes it, and its position among the leaves of the stage's result."""


@dataclass(slots=True)
class SegmentInput:
    """An input that an earlier stage of the segment makes (NOTE [Frames and links], rule 2).

    Attributes
    ----------
    maker : SegmentFrame
        The frame of the stage that makes it.
    leaf : int
        Its position among the leaves of that stage's result.
    nbytes : int
        Bytes of the whole storage.
    geometry : Geometry
        Where the input lies in that storage.
    """

    maker: SegmentFrame
    leaf: int
    nbytes: int
    geometry: Geometry

    @property
    def made(self) -> Made:
        """The output that this input is a view of."""
        return self.maker.index, self.leaf


class SegmentFrame(Frame):
    """One call of a stage within one pass through a segment."""

    def __init__(
        self, run: SegmentRun, index: int, name: str, call: Call, own: Callable[[torch.Tensor], Held | None]
    ) -> None:
        super().__init__(name, call)
        self.run = run
        self.index = index
        self._own = own

    @property
    def links(self) -> list[SegmentInput]:
        """The inputs that aren't held but made again by earlier stages."""
        return [x for x in self._inputs if isinstance(x, SegmentInput)]

    def saved(self, number: int) -> torch.Tensor:
        """Return the tensor of slot `number` for the backward that runs now, recomputed if necessary."""
        return self.run.saved(self, number)

    def forget(self, number: int) -> None:
        """Drop the recomputed tensor of slot `number`, which the graph has freed."""
        self.run.forget(self.index, number)

    def _save(self, tensor: torch.Tensor) -> Slot:
        slot = super()._save(tensor)
        own = self._own(tensor) if plain(tensor) else None
        if own is not None:
            # Held itself, as without a plan: a recompute would save a copy of running statistics, for example.
            self._models_own[slot.number] = own
        return slot

    def pass_through(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Run the stage again without saving tensors, and return the leaves of its output."""
        return self._again(inputs, lambda tensor: None)

    def inputs(self, given: dict[Made, torch.Tensor]) -> list[torch.Tensor]:
        """Return the stage's inputs; `given` has the whole storages of the linked ones."""
        return [self._linked(x, given[x.made]) if isinstance(x, SegmentInput) else x.tensor() for x in self._inputs]

    @staticmethod
    def _linked(link: SegmentInput, whole: torch.Tensor) -> torch.Tensor:
        if whole.untyped_storage().nbytes() != link.nbytes:
            raise link.maker._another_path(f"returns {whole.untyped_storage().nbytes()} bytes")
        return link.geometry.on(whole)


@dataclass(slots=True)
class _Task:
    """Recomputed tensors of one backward.

    Attributes
    ----------
    given : dict
        Stage -> the whole storages of its linked inputs, until it has run.
    saved : dict
        Stage -> the tensors in its slots, by number.
    swept : dict
        Identity of a segment -> the last stage on whose behalf it was swept.
    """

    given: dict[int, dict[Made, torch.Tensor]] = field(default_factory=dict)
    saved: dict[int, dict[int, Held]] = field(default_factory=dict)
    swept: dict[int, int] = field(default_factory=dict)


class SegmentRun:
    """One pass through one segment: recomputes its stages when backward reads their slots.

    Parameters
    ----------
    segment : Segment
    modules : tuple of int
        Indices of its stages that are modules, in order.
    """

    def __init__(self, segment: Segment, modules: tuple[int, ...]) -> None:
        self._segment = segment
        self._modules = modules
        self._frames: dict[int, weakref.ref[SegmentFrame]] = {}
        self._consumers: dict[Made, list[int]] = {}
        self._tasks: dict[int, _Task] = {}

    def add(self, frame: SegmentFrame) -> None:
        """Register the frame of a stage that has run forward."""
        self._frames[frame.index] = weakref.ref(frame)
        for link in frame.links:
            self._consumers.setdefault(link.made, []).append(frame.index)

    def saved(self, frame: SegmentFrame, number: int) -> torch.Tensor:
        """Return the tensor of slot `number` of `frame` for the backward that runs now, recomputed if necessary."""
        key, task = self._task()
        if frame.index not in task.saved:
            try:
                self._bring(task, frame)
            except BaseException:
                self._tasks.pop(key, None)
                raise
        return taken(task.saved[frame.index], number, frame.name)

    def forget(self, index: int, number: int) -> None:
        """Drop the recomputed tensor of slot `number` of stage `index`, which the graph has freed."""
        for task in list(self._tasks.values()):
            task.saved.get(index, {}).pop(number, None)

    def _task(self) -> tuple[int, _Task]:
        key = current_graph_task()
        if key == -1:  # a saved tensor is read outside of any backward
            return key, _Task()
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = _Task()
            at_end_of_task(self.end, key)
        return key, task

    def end(self, key: int) -> None:
        """Drop the recomputed tensors that a backward didn't read."""
        self._tasks.pop(key, None)

    def _bring(self, task: _Task, frame: SegmentFrame) -> None:
        """Fill the slots of `frame` (NOTE [Frames and links], rule 3)."""
        k = frame.index
        path = _path(self._segment, k)
        for segment, inner in zip(path, [*path[1:], None], strict=True):
            if task.swept.get(id(segment), -1) >= k:
                continue
            # Stages behind `k` aren't needed, and an inner segment around `k` is swept by the next iteration.
            self._sweep(task, segment, k if inner is None else inner.first, k)
            task.swept[id(segment)] = k
        if k not in task.saved:
            table = task.saved[k] = {}
            frame.fill(frame.inputs(task.given.get(k, {})), table)
            task.given.pop(k, None)

    def _sweep(self, task: _Task, segment: Segment, stop: int, limit: int) -> None:
        """Run the stages of `segment` before `stop` again, and hand their outputs to stages up to `limit`."""
        modules = self._modules
        for k in modules[bisect.bisect_left(modules, segment.first) : bisect.bisect_left(modules, stop)]:
            frame = self._frames[k]() if k in self._frames else None
            if frame is None:
                continue  # neither the graph nor a later stage needs it
            inner = _inner(segment, k)
            given = task.given.get(k, {})
            if inner is None:
                table = task.saved[k] = {}
                leaves = frame.fill(frame.inputs(given), table, to_the_end=True)
                task.given.pop(k, None)
            else:
                leaves = frame.pass_through(frame.inputs(given))
                for made in [made for made in given if made[0] >= inner.first]:
                    del given[made]
            self._hand_over(task, frame, leaves, limit)
            del leaves, given  # otherwise they would stay alive during the next run

    def _hand_over(self, task: _Task, frame: SegmentFrame, leaves: list[Any], limit: int) -> None:
        for place, leaf in enumerate(leaves):
            made = (frame.index, place)
            wanted = [k for k in self._consumers.get(made, ()) if k <= limit and self._frames[k]() is not None]
            if not wanted:
                continue
            if not isinstance(leaf, torch.Tensor):
                raise frame._another_path(f"returns {type(leaf).__name__} as output number {place}")
            whole = whole_storage(leaf)
            for k in wanted:
                task.given.setdefault(k, {})[made] = whole


def _inner(segment: Segment, k: int) -> Segment | None:
    """Return the segment directly inside `segment` that contains stage `k`, if any."""
    return next((inner for inner in segment.inner if inner.first <= k <= inner.last), None)


def _path(segment: Segment, k: int) -> list[Segment]:
    """Return the segments around stage `k`, the outermost first."""
    path = [segment]
    while (inner := _inner(path[-1], k)) is not None:
        path.append(inner)
    return path


class OpenSegment:
    """A segment whose forward is under way; finds out which inputs are outputs of its earlier stages.

    An input counts as such an output as long as its version shows that nothing has written to it. Writes through
    `.data` don't raise versions, so they are missed here, as in autograd's own check.

    Parameters
    ----------
    segment, modules
        As for `SegmentRun`.
    session : SwapSession
        Knows the storages of the model itself, and swaps.
    moves : bool
        Whether the plan swaps anything; held tensors are packed into records then.
    """

    def __init__(self, segment: Segment, modules: tuple[int, ...], session: SwapSession, *, moves: bool) -> None:
        self.segment = segment
        self._modules = modules
        self._session = session
        self._moves = moves
        self._run = SegmentRun(segment, modules)
        self._stream = session.stream()
        self._frames: dict[int, SegmentFrame] = {}  # keeps frames without slots alive until a link owns them
        # Python's weak references are needed here: see `Record.is_gone`.
        self._made: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, Made]] = weakref.WeakKeyDictionary()

    @property
    def ended(self) -> bool:
        """Whether its last stage has run."""
        return self._modules[-1] in self._frames

    def run(
        self,
        stage: PlannedStage,
        call: Call,
        tensors: list[torch.Tensor],
        check: StageCheck | StageSpots | None = None,
    ) -> Any:
        """Run a stage forward.

        Parameters
        ----------
        stage : PlannedStage
            Its `moves` are positions among the held inputs.
        tensors : list of torch.Tensor
            The tensors among its arguments, as `call.split` returned them.
        check : StageCheck or StageSpots, optional
            Compares the recompute with this run.

        Raises
        ------
        NotRepeatableError
            If the stage runs on another stream than the segment's first one.
        UnsupportedModelError
            If it has written to its inputs.
        """
        if self._session.stream() != self._stream:
            raise NotRepeatableError(
                f"stage {stage.name!r} runs on another stream than the first stage of its segment, but a segment is "
                "recomputed on one stream; give it another option"
            )
        index = stage.index
        frame = SegmentFrame(self._run, index, stage.name, call, self._session.own)
        frame.check = check
        packing = self._session.packing() if self._moves else None
        held = {t.untyped_storage()._cdata for t in tensors_in_objects(call.others) if plain(t)}
        inputs = [self._pack(index, tensor, packing, held) for tensor in tensors]
        versions = [version_of(t) for t in tensors]
        output = frame.forward(tensors, inputs)
        if [version_of(t) for t in tensors] != versions:
            raise UnsupportedModelError(
                f"stage {stage.name!r} writes to its inputs, so it can't run again in a segment; give it another option"
            )
        self._run.add(frame)
        self._frames[index] = frame
        given = {t.untyped_storage()._cdata for t in tensors if plain(t)}
        for place, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, torch.Tensor) and plain(leaf) and not self._session.belongs(leaf):
                storage = leaf.untyped_storage()
                known = self._made.get(storage)
                if storage._cdata not in given and (known is None or known[0] != version_of(leaf)):
                    self._made[storage] = (version_of(leaf), (index, place))
        if packing is not None:
            self._session.leave(index, packing.saved, stage.choice.transfers, stage.choice.tier)
        return output

    def _pack(
        self, index: int, tensor: torch.Tensor, packing: Packing | None, held: Container[int]
    ) -> SegmentInput | Held | Handed:
        if plain(tensor) and tensor.untyped_storage()._cdata not in held:  # objects among the arguments hold the others
            storage = tensor.untyped_storage()
            version, (maker, place) = self._made.get(storage, (-1, (index, 0)))
            if version == version_of(tensor) and maker < index:
                if packing is not None:
                    packing.skip(tensor)
                return SegmentInput(self._frames[maker], place, storage.nbytes(), Geometry.of(tensor))
        return hold(tensor, packing)
