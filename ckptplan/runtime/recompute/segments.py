"""Segments: consecutive stages recomputed together, whatever loop runs them and whatever lies between them.

NOTE [Frames and links]
1. A stage of a segment runs forward inside a *frame*. What autograd saves there becomes a *slot*, an empty place that
   owns its frame; so the graph owns the frames, and a freed graph frees what they hold.
2. A frame holds the stage's inputs, but for those that are outputs of an earlier stage of the segment, unmodified: in
   their place it has a *link*, which owns the maker's frame. Everything points to what ran earlier, so nothing is
   ever held in a circle. What an object among its arguments holds stays anyway, and has no link.
3. A backward (a graph task of autograd's) that asks for a slot starts, for each segment around its stage that this
   task hasn't swept yet, from the outermost in, a *sweep* (rule 6 of NOTE [Residency] in core/rules.py). After it,
   the stage's own slots are filled, or it is the segment's last and is run again now, as far as slots need it.
4. A slot is emptied when it is read, or where a backward in Python reads it, when that is over. What is left of a task
   is dropped when it ends; another backward through the same graph is another task and sweeps again.
5. What a stage saves of the model's own (parameters, buffers) its slots give back as it is, not a run's copy of it.
6. What a run makes goes straight to the stages that are linked to it and still to run, and to nobody else: a stage of
   an inner segment keeps what comes from outside of that segment, the segment's last stage all of it until its own
   recompute, the others nothing beyond their run.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.link import Tier
from ckptplan.core.segment import Segment
from ckptplan.runtime.guard.check import StageCheck
from ckptplan.runtime.recompute.call import Call
from ckptplan.runtime.recompute.frames import Frame, Handed, Slot, at_end_of_task, hold, taken
from ckptplan.runtime.state.objects import tensors_in_objects
from ckptplan.runtime.swap.session import (
    Geometry,
    Held,
    Packing,
    SwapSession,
    plain,
    version_of,
    whole_storage,
)

Made = tuple[int, int]
"""An output: the stage that makes it, and its place among the leaves of what the stage returns."""


@dataclass(slots=True)
class Link:
    """An input that an earlier stage of the segment makes (NOTE [Frames and links], rule 2)."""

    maker: SegmentFrame
    leaf: int
    nbytes: int
    geometry: Geometry

    @property
    def made(self) -> Made:
        """Which output it is a view of."""
        return self.maker.index, self.leaf


class SegmentFrame(Frame):
    """One stage's call within a segment's run."""

    def __init__(
        self, run: SegmentRun, index: int, name: str, call: Call, belongs: Callable[[torch.Tensor], bool]
    ) -> None:
        super().__init__(name, call)
        self.run = run
        self.index = index
        self._belongs = belongs

    @property
    def links(self) -> list[Link]:
        """The inputs that aren't held."""
        return [x for x in self._inputs if isinstance(x, Link)]

    def forward(self, tensors: list[torch.Tensor], inputs: Sequence[Link | Held | Handed]) -> Any:
        """Run the stage for the first time.

        Raises
        ------
        UnsupportedModelError
            If it writes to its inputs: it couldn't be run again.
        """
        versions = [version_of(t) for t in tensors]
        output = super().forward(tensors, inputs)
        if [version_of(t) for t in tensors] != versions:
            raise UnsupportedModelError(
                f"stage {self.name!r} writes to its inputs, so it can't run again in a segment; give it another option"
            )
        return output

    def saved(self, number: int) -> torch.Tensor:
        """What slot `number` stands for, in the backward that runs now."""
        return self.run.saved(self, number)

    def forget(self, number: int) -> None:
        """Slot `number` is gone: what it stands for is needed no more."""
        self.run.forget(self.index, number)

    def _save(self, tensor: torch.Tensor) -> Slot:
        slot = super()._save(tensor)
        if plain(tensor) and self._belongs(tensor):
            # As the plain model holds it: running statistics, say, of which another run would save a copy.
            self._models_own[slot.number] = Held(tensor.detach() if tensor.requires_grad else tensor)
        return slot

    def pass_through(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Run the stage again and save nothing."""
        return self._again(inputs, lambda tensor: None)

    def inputs(self, given: dict[Made, torch.Tensor]) -> list[torch.Tensor]:
        """The stage's inputs; `given` has the whole storages of the linked ones."""
        return [self._linked(x, given[x.made]) if isinstance(x, Link) else x.tensor() for x in self._inputs]

    @staticmethod
    def _linked(link: Link, whole: torch.Tensor) -> torch.Tensor:
        if whole.untyped_storage().nbytes() != link.nbytes:
            raise link.maker._another_path(f"returns {whole.untyped_storage().nbytes()} bytes")
        return link.geometry.on(whole)


@dataclass(slots=True)
class _Task:
    """What one backward has made again: whole storages for the stages still to run, and what slots ask for."""

    given: dict[int, dict[Made, torch.Tensor]] = field(default_factory=dict)
    saved: dict[int, dict[int, Held]] = field(default_factory=dict)
    swept: dict[int, int] = field(default_factory=dict)  # segments by identity: up to which stage


class SegmentRun:
    """One pass through one segment: runs its stages again as its backward asks for it.

    Parameters
    ----------
    segment : Segment
    modules : tuple of int
        Its stages that are modules, in order.
    """

    def __init__(self, segment: Segment, modules: tuple[int, ...]) -> None:
        self._segment = segment
        self._modules = modules
        self._frames: dict[int, weakref.ref[SegmentFrame]] = {}
        self._consumers: dict[Made, list[int]] = {}
        self._tasks: dict[int, _Task] = {}

    def add(self, frame: SegmentFrame) -> None:
        """A stage has run forward."""
        self._frames[frame.index] = weakref.ref(frame)
        for link in frame.links:
            self._consumers.setdefault(link.made, []).append(frame.index)

    def saved(self, frame: SegmentFrame, number: int) -> torch.Tensor:
        """What slot `number` of `frame` stands for, in the backward that runs now."""
        key, task = self._task()
        if frame.index not in task.saved:
            try:
                self._bring(task, frame)
            except BaseException:
                self._tasks.pop(key, None)
                raise
        return taken(task.saved[frame.index], number, frame.name)

    def forget(self, index: int, number: int) -> None:
        """Nobody will ask for that slot any more."""
        for task in list(self._tasks.values()):
            task.saved.get(index, {}).pop(number, None)

    def _task(self) -> tuple[int, _Task]:
        key = torch._C._current_graph_task_id()
        if key == -1:  # somebody looks at a node outside of any backward
            return key, _Task()
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = _Task()
            at_end_of_task(self.end, key)
        return key, task

    def end(self, key: int) -> None:
        """Drop what a backward has left."""
        self._tasks.pop(key, None)

    def _bring(self, task: _Task, frame: SegmentFrame) -> None:
        """Fill the slots of `frame` (NOTE [Frames and links], rule 3)."""
        k = frame.index
        path = _path(self._segment, k)
        for segment, inner in zip(path, [*path[1:], None], strict=True):
            if task.swept.get(id(segment), -1) >= k:
                continue
            # A backward that begins inside: no later stage is needed, and the inner segment sweeps by itself.
            self._sweep(task, segment, k if inner is None else inner.first, k)
            task.swept[id(segment)] = k
        if k not in task.saved:
            table = task.saved[k] = {}
            frame.fill(frame.inputs(task.given.get(k, {})), table)
            task.given.pop(k, None)

    def _sweep(self, task: _Task, segment: Segment, stop: int, limit: int) -> None:
        """Run the stages of `segment` below `stop` again, on behalf of stages up to `limit`."""
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
            del leaves, given  # they would live on through the next run

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
    """The segment inside `segment` that contains stage `k`."""
    return next((inner for inner in segment.inner if inner.first <= k <= inner.last), None)


def _path(segment: Segment, k: int) -> list[Segment]:
    """The segments around stage `k`, from the outermost in."""
    path = [segment]
    while (inner := _inner(path[-1], k)) is not None:
        path.append(inner)
    return path


class OpenSegment:
    """A segment whose forward is under way: tells which inputs are outputs of its stages.

    An input counts as one while its version says that nothing has written to it. Writes through `.data` don't show in
    versions, here as little as in autograd's own check.

    Parameters
    ----------
    segment, modules
        As for `SegmentRun`.
    session : SwapSession
        Knows the model's own storages, and what moves.
    moves : bool
        Whether the plan moves anything: what is held is held by records then.
    """

    def __init__(self, segment: Segment, modules: tuple[int, ...], session: SwapSession, *, moves: bool) -> None:
        self.segment = segment
        self._modules = modules
        self._session = session
        self._moves = moves
        self._run = SegmentRun(segment, modules)
        self._stream = session.stream()
        self._frames: dict[int, SegmentFrame] = {}  # a frame without slots lives by this until a link may own it
        # By Python's weak references: see `Record.is_gone`.
        self._made: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, Made]] = weakref.WeakKeyDictionary()

    @property
    def ended(self) -> bool:
        """Whether its last stage has run."""
        return self._modules[-1] in self._frames

    def stage(
        self,
        index: int,
        name: str,
        call: Call,
        tensors: list[torch.Tensor],
        moves: tuple[int, ...],
        tier: Tier = "host",
        check: StageCheck | None = None,
    ) -> Any:
        """Run stage `index` forward on `tensors`, which `call` was split from; `check` compares its runs."""
        if self._session.stream() != self._stream:
            raise UnsupportedModelError(
                f"stage {name!r} runs on another stream than the first stage of its segment, whose stages are run "
                "again together, on one; give it another option"
            )
        frame = SegmentFrame(self._run, index, name, call, self._session.belongs)
        frame.check = check
        packing = self._session.packing() if self._moves else None
        held = {t.untyped_storage()._cdata for t in tensors_in_objects(call.others) if plain(t)}
        inputs = [self._pack(index, tensor, packing, held) for tensor in tensors]
        output = frame.forward(tensors, inputs)
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
            self._session.leave(index, packing.saved, moves, tier)
        return output

    def _pack(
        self, index: int, tensor: torch.Tensor, packing: Packing | None, held: Container[int]
    ) -> Link | Held | Handed:
        if plain(tensor) and tensor.untyped_storage()._cdata not in held:  # by an object, whatever becomes of it here
            storage = tensor.untyped_storage()
            version, (maker, place) = self._made.get(storage, (-1, (index, 0)))
            if version == version_of(tensor) and maker < index:
                if packing is not None:
                    packing.skip(tensor)
                return Link(self._frames[maker], place, storage.nbytes(), Geometry.of(tensor))
        return hold(tensor, packing)
