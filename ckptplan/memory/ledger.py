"""A training run as one list of events: the loaded tensors, then recorded steps and updates of the optimizer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptplan.core.estimate import CATEGORIES, Phase, Tensors
from ckptplan.memory.allocator import EMPTY_CACHE, AllocatorSettings, replay
from ckptplan.memory.allocator import FREE as FREED
from ckptplan.memory.recording import ALLOCATE, FREE, Block, Event, Recording
from ckptplan.profiling.bytes.tracker import OFFLOADED

Sizes = npt.NDArray[np.int64]

EMPTIED: Event = (0, 0)
"""The event of an emptied cache, which changes no block."""


@dataclass
class Ledger:
    """Blocks, their events in order, and the beginnings of phases and stages.

    Attributes
    ----------
    blocks : list of Block
        One entry per allocation; entries may be the same object.
    events : list of Event
    phases : list of (str, int, int or None)
        Name, index of the first event, and number of the batch that runs.
    stages : list of (int, str)
        Index of the first event, and the name of the stage that runs from there on.
    movable : dict of str to int
        The blocks that may leave the device within a step, by their names in NOTE [Offloaded weights].
    """

    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    phases: list[tuple[str, int, int | None]] = field(default_factory=list)
    stages: list[tuple[int, str]] = field(default_factory=list)
    movable: dict[str, int] = field(default_factory=dict)

    def phase(self, name: str, batch: int | None = None) -> None:
        """Begin a phase."""
        self.phases.append((name, len(self.events), batch))
        self.stages.append((len(self.events), ""))

    def allocate(self, block: Block) -> int:
        """Allocate a block and return its index."""
        self.blocks.append(block)
        self.events.append((ALLOCATE, len(self.blocks) - 1))
        return len(self.blocks) - 1

    def free(self, index: int) -> None:
        """Free a block."""
        self.events.append((FREE, index))

    def empty_cache(self) -> None:
        """Release what the allocator has reserved and no block uses."""
        self.events.append(EMPTIED)


class Player:
    """Writes a recording's sections into a ledger, with blocks of its own.

    Parameters
    ----------
    ledger : Ledger
    recording : Recording
    in_buckets : bool
        Gradients are views of buckets, which are allocated already: backward copies each gradient there and frees it.
    unreduced : dict of str to int
        The ledger's blocks of gradients from before, by the parameter: each is freed, and taken out, when backward
        makes the parameter's gradient, into which it is reduced.
    """

    def __init__(
        self,
        ledger: Ledger,
        recording: Recording,
        *,
        in_buckets: bool = False,
        unreduced: dict[str, int] | None = None,
    ) -> None:
        self._ledger, self.recording = ledger, recording
        self._in_buckets, self._unreduced = in_buckets, {} if unreduced is None else unreduced
        self._index: dict[int, int] = {}

    def run(self, *directions: str, before: Callable[[str], None] = lambda direction: None) -> None:
        """Write the sections of these directions, in the order they ran; `before` is called before each."""
        for section in self.recording.sections:
            if section.direction in directions:
                before(section.direction)
                stages = self.recording.stages
                name = stages[section.segment // 2] if section.segment % 2 else ""
                self._ledger.stages.append((len(self._ledger.events), name))
                for code, block in section.events:
                    made = self.recording.blocks[block]
                    if made.category == OFFLOADED:
                        index = self._ledger.movable.get(made.name)
                        if index is not None:  # state of an optimizer is made by its first update
                            self._ledger.events.append((code, index))
                    elif code == ALLOCATE:
                        for name in made.parameters if self._unreduced else ():
                            if name in self._unreduced:
                                self._ledger.free(self._unreduced.pop(name))
                        index = self._ledger.allocate(made)
                        if made.category in ("weights", "optimizer state") and made.name:
                            self._ledger.movable[made.name] = index
                        if self._in_buckets and made.category == "gradients":
                            self._ledger.free(index)
                        else:
                            self._index[block] = index
                    elif block in self._index:
                        self._ledger.free(self._index.pop(block))

    def adopt(self, direction: str, indices: list[int]) -> list[int]:
        """Let the ledger's blocks `indices` stand for those that sections of a direction allocate, by name.

        Returns
        -------
        list of int
            The blocks that no section allocates; the caller still has to free them.
        """
        named = {self._ledger.blocks[index].name: index for index in indices}
        for section in self.recording.sections:
            if section.direction == direction:
                for _, block in section.events:
                    index = named.pop(self.recording.blocks[block].name, None)
                    if index is not None:
                        self._index[block] = index
        taken = set(self._index.values())
        return [index for index in indices if index not in taken]

    def renew(self, *directions: str) -> None:
        """Make sections of these directions, which have run, ready to run once more.

        A block that they freed and made anew (an update may rebind its state) is from now on the new one. Of several
        equal ones the first that was made takes the place of the first that was freed.
        """
        events = [event for s in self.recording.sections if s.direction in directions for event in s.events]
        made = dict.fromkeys(block for code, block in events if code == ALLOCATE)
        left: dict[tuple[str, int], list[int]] = {}
        for block in made:
            if block in self._index:
                left.setdefault(self._kind(block), []).append(block)
        for code, block in events:
            if code == FREE and block not in made and left.get(self._kind(block)):
                self._index[block] = self._index.pop(left[self._kind(block)].pop(0))

    def _kind(self, block: int) -> tuple[str, int]:
        found = self.recording.blocks[block]
        return found.category, found.nbytes

    def held_by(self, names: Collection[str]) -> list[tuple[str, int]]:
        """Return what the program holds after the step if `names`, "output" or "loss", are still referenced.

        The caller frees these blocks. Those that belong to neither are held by the graph, which the loss leads to.

        Returns
        -------
        list of (str, int)
            The name that is the last to hold the block, and the block.
        """
        ended = [b for s in self.recording.sections if s.direction == "end" for code, b in s.events if code == FREE]
        last = [name for name in ("loss", "output") if name in names]
        held = []
        for block in ended if last else ():
            returned = self.recording.blocks[block].returned
            by = [name for name in last if name in returned or not returned]
            if by and block in self._index:
                held.append((by[0], self._index.pop(block)))
        return held

    def left(self, category: str) -> list[int]:
        """Return the live blocks of a category; from now on the caller frees them."""
        found = [b for b in self._index if self.recording.blocks[b].category == category]
        return [self._index.pop(b) for b in found]

    def rest(self) -> list[int]:
        """Return the live blocks; from now on the caller frees them."""
        rest = list(self._index.values())
        self._index.clear()
        return rest

    def drop(self) -> None:
        """Free all blocks that are left."""
        for index in self.rest():
            self._ledger.free(index)


@dataclass(frozen=True)
class Account:
    """Bytes after each event of a ledger.

    Parameters
    ----------
    ledger : Ledger
    requested, allocated, reserved : array of int64, shape (events,)
        Bytes of the tensors, of their blocks as the device rounds them, and of the allocator's segments.
    """

    ledger: Ledger
    requested: Sizes
    allocated: Sizes
    reserved: Sizes

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        settings: AllocatorSettings | None,
        capacity_bytes: int | None = None,
        *,
        descending: bool = True,
    ) -> Account:
        """Compute the bytes after each event.

        Parameters
        ----------
        ledger : Ledger
        settings : AllocatorSettings or None
            Settings of CUDA's caching allocator; None on the CPU, whose allocator caches nothing.
        capacity_bytes : int, optional
            As for `CachingAllocator`.
        descending : bool
            As for `Addresses`.

        Raises
        ------
        SimulatedOutOfMemoryError
            If the allocator needs more than `capacity_bytes` after the release of all unused memory.
        """
        sizes = np.array([block.nbytes for block in ledger.blocks], dtype=np.int64)
        sign, index = np.array(ledger.events, dtype=np.int64).reshape(-1, 2).T
        requested = np.cumsum(sizes[index] * sign)
        if settings is None:
            return cls(ledger, requested, requested, requested)
        codes = {FREE: FREED, EMPTIED[0]: EMPTY_CACHE}
        events = ((b, codes.get(code, ledger.blocks[b].nbytes)) for code, b in ledger.events)
        streams = {b: block.stream for b, block in enumerate(ledger.blocks) if block.stream}
        timeline = replay(events, settings, capacity_bytes, streams=streams, descending=descending)
        return cls(ledger, requested, timeline.allocated_bytes, timeline.reserved_bytes)

    def spans(self) -> Iterator[tuple[str, int, int, int | None]]:
        """Yield each phase's name, first event, first event after it, and number of the batch."""
        ends = ("", len(self.ledger.events), None)
        for (name, begin, batch), (_, end, _) in pairwise([*self.ledger.phases, ends]):
            yield name, begin, end, batch

    def phases(self) -> tuple[Phase, ...]:
        """Return every phase with its peak."""
        peaks = []
        for _, begin, end, _ in self.spans():
            at = begin + int(np.argmax(self.allocated[begin:end])) if end > begin else begin - 1
            peaks.append(begin - 1 if begin and self.allocated[at] < self.allocated[begin - 1] else at)
        out = []
        for (name, begin, end, batch), at, categories in zip(
            self.spans(), peaks, self.all_categories(peaks), strict=True
        ):
            start, last, peak = (int(self.allocated[i]) if i >= 0 else 0 for i in (begin - 1, end - 1, at))
            held = self.reserved[max(begin - 1, 0) : end]
            out.append(Phase(name, start, last, peak, int(held.max(initial=0)), categories, batch))
        return tuple(out)

    def alive(self, at: int) -> list[int]:
        """Return the blocks that are allocated after event `at`."""
        held: dict[int, None] = {}
        for code, block in self.ledger.events[: at + 1]:
            if code == ALLOCATE:
                held[block] = None
            elif code == FREE:
                del held[block]
        return list(held)

    def categories(self, at: int) -> dict[str, int]:
        """Return category -> bytes after event `at`, including "rounding"; they add up to `allocated[at]`."""
        return self.all_categories([at])[0]

    def all_categories(self, events: Sequence[int]) -> list[dict[str, int]]:
        """Return the categories after each of `events`, in one pass; none before the first one."""
        found: dict[int, dict[str, int]] = {-1: {}}
        total: Counter[str] = Counter()
        position = 0
        for at in sorted({*events} - {-1}):
            for code, block in self.ledger.events[position : at + 1]:
                total[self.ledger.blocks[block].category] += code * self.ledger.blocks[block].nbytes
            position = at + 1
            now = {**total, "rounding": int(self.allocated[at] - self.requested[at])}
            found[at] = {name: now[name] for name in CATEGORIES if now.get(name)}
        return [found[at] for at in events]

    def tensors(self, at: int) -> tuple[Tensors, ...]:
        """Return the blocks allocated after event `at`, largest first; equal ones of repeated layers are one entry."""
        kinds: dict[tuple[object, ...], list[Block]] = {}
        for index in self.alive(at):
            block = self.ledger.blocks[index]
            names = (_numberless(name) for name in (block.stage, block.name, block.module))
            key = (block.category, *names, block.line, block.op, block.shape, block.dtype)
            kinds.setdefault(key, []).append(block)
        out = [
            Tensors(
                sum(b.nbytes for b in same),
                len(same),
                f.category,
                _common([b.stage for b in same]),
                _common([b.name for b in same]),
                _common([b.module for b in same]),
                f.line,
                f.op,
                f.shape,
                f.dtype,
            )
            for same in kinds.values()
            if (f := same[0])
        ]
        return tuple(sorted(out, key=lambda tensors: -tensors.nbytes))

    def stage(self, at: int) -> str:
        """Return the stage that runs when event `at` happens."""
        last = bisect_right(self.ledger.stages, at, key=lambda stage: stage[0]) - 1
        return self.ledger.stages[last][1] if last >= 0 else ""


def _numberless(name: str) -> str:
    """Return a name with a star for each number, which is equal for layers that repeat."""
    return _NUMBER.sub("*", name)


_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+")
"""A part of a name that is a number: "3" in "layers.3.fc1", not the "1" of "fc1"."""


def _common(names: list[str]) -> str:
    """Return one name for all: a star stands for each number in which they differ."""
    if len(set(names)) == 1:
        return names[0]
    found = [_NUMBER.findall(name) for name in names]
    constant = [len(set(numbers)) == 1 for numbers in zip(*found, strict=True)]
    position = iter(range(len(constant)))
    return _NUMBER.sub(lambda number: number[0] if constant[next(position)] else "*", names[0])


def saved_bytes(blocks: Iterable[Block]) -> dict[str, int]:
    """Return stage -> bytes that it saves for backward."""
    out: Counter[str] = Counter()
    for block in blocks:
        if block.category == "saved activations" and block.stage:
            out[block.stage] += block.nbytes
    return dict(out)
