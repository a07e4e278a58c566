"""A training run as one list of events: what is loaded, then steps as recorded, with the optimizer's updates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptplan.core.estimate import CATEGORIES, Phase, Tensors
from ckptplan.memory.allocator import AllocatorSettings, replay
from ckptplan.memory.recorder import ALLOCATE, FREE, Block, Event, Recording

Sizes = npt.NDArray[np.int64]


@dataclass
class Ledger:
    """Blocks, events on them in order, and where phases and stages begin.

    Attributes
    ----------
    blocks : list of Block
        One entry per allocation; entries may be the same object.
    events : list of Event
    phases : list of (str, int)
        Name, and the index of the first event.
    stages : list of (int, str)
        Index of the first event, and the stage that runs from there on.
    """

    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    stages: list[tuple[int, str]] = field(default_factory=list)

    def phase(self, name: str) -> None:
        """A phase begins."""
        self.phases.append((name, len(self.events)))
        self.stages.append((len(self.events), ""))

    def allocate(self, block: Block) -> int:
        """A new block, by its index."""
        self.blocks.append(block)
        self.events.append((ALLOCATE, len(self.blocks) - 1))
        return len(self.blocks) - 1

    def free(self, index: int) -> None:
        """A block is freed."""
        self.events.append((FREE, index))


class Player:
    """Writes a recording's sections into a ledger, with blocks of its own.

    Parameters
    ----------
    ledger : Ledger
    recording : Recording
    in_buckets : bool
        Gradients are views of buckets, which are there already: what backward makes is copied there and freed at once.
    """

    def __init__(self, ledger: Ledger, recording: Recording, *, in_buckets: bool = False) -> None:
        self._ledger, self.recording = ledger, recording
        self._in_buckets = in_buckets
        self._index: dict[int, int] = {}

    def run(self, *directions: str) -> None:
        """The sections of these directions, in the order they ran."""
        for section in self.recording.sections:
            if section.direction in directions:
                stages = self.recording.stages
                name = stages[section.segment // 2] if section.segment % 2 else ""
                self._ledger.stages.append((len(self._ledger.events), name))
                for code, block in section.events:
                    if code == ALLOCATE:
                        made = self.recording.blocks[block]
                        index = self._ledger.allocate(made)
                        if self._in_buckets and made.category == "gradients":
                            self._ledger.free(index)
                        else:
                            self._index[block] = index
                    elif block in self._index:
                        self._ledger.free(self._index.pop(block))

    def hold(self, category: str) -> None:
        """All blocks of a category are there already."""
        for block, made in enumerate(self.recording.blocks):
            if made.category == category:
                self._index[block] = self._ledger.allocate(made)

    def left(self, category: str) -> list[int]:
        """What is alive of a category, taken out of the player's hands."""
        found = [b for b in self._index if self.recording.blocks[b].category == category]
        return [self._index.pop(b) for b in found]

    def drop(self) -> None:
        """Free what is left."""
        for index in self._index.values():
            self._ledger.free(index)
        self._index.clear()


@dataclass(frozen=True)
class Account:
    """Bytes after each event of a ledger.

    Parameters
    ----------
    ledger : Ledger
    requested, allocated, reserved : array of int64
        Bytes asked for, in blocks as the device rounds them, and held by its allocator.
    """

    ledger: Ledger
    requested: Sizes
    allocated: Sizes
    reserved: Sizes

    @classmethod
    def of(cls, ledger: Ledger, settings: AllocatorSettings | None, capacity_bytes: int | None = None) -> Account:
        """Add the events up; `settings` of CUDA's caching allocator, None on the CPU, which keeps nothing.

        Raises
        ------
        SimulatedOutOfMemoryError
            If the allocator can't do with `capacity_bytes`, given all back that it keeps.
        """
        sizes = np.fromiter((block.nbytes for block in ledger.blocks), np.int64, len(ledger.blocks))
        index = np.fromiter((block for _, block in ledger.events), np.int64, len(ledger.events))
        sign = np.fromiter((code for code, _ in ledger.events), np.int64, len(ledger.events))
        requested = np.cumsum(sizes[index] * sign)
        if settings is None:
            return cls(ledger, requested, requested, requested)
        events = ((b, ledger.blocks[b].nbytes if code == ALLOCATE else -1) for code, b in ledger.events)
        timeline = replay(events, settings, capacity_bytes)
        return cls(ledger, requested, timeline.allocated_bytes, timeline.reserved_bytes)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Each phase's name, first event, and first event after it."""
        ends = [begin for _, begin in self.ledger.phases[1:]] + [len(self.ledger.events)]
        for (name, begin), end in zip(self.ledger.phases, ends, strict=True):
            yield name, begin, end

    def phases(self) -> tuple[Phase, ...]:
        """Every phase with its peak."""
        out = []
        for name, begin, end in self.spans():
            start = int(self.allocated[begin - 1]) if begin else 0
            if end == begin:
                held = int(self.reserved[begin - 1]) if begin else 0
                out.append(Phase(name, start, start, start, held, self.categories(begin - 1)))
                continue
            at = begin + int(np.argmax(self.allocated[begin:end]))
            if self.allocated[at] < start:
                at = begin - 1
            peak, last = int(self.allocated[at]), int(self.allocated[end - 1])
            out.append(Phase(name, start, last, peak, int(self.reserved[begin:end].max()), self.categories(at)))
        return tuple(out)

    def alive(self, at: int) -> list[int]:
        """Blocks alive after event `at`."""
        held: dict[int, None] = {}
        for code, block in self.ledger.events[: at + 1]:
            if code == ALLOCATE:
                held[block] = None
            else:
                del held[block]
        return list(held)

    def categories(self, at: int) -> dict[str, int]:
        """Category -> bytes after event `at`, rounding among them; together they are `allocated[at]`."""
        if at < 0:
            return {}
        total: Counter[str] = Counter()
        for block in self.alive(at):
            total[self.ledger.blocks[block].category] += self.ledger.blocks[block].nbytes
        total["rounding"] = int(self.allocated[at] - self.requested[at])
        return {name: total[name] for name in CATEGORIES if total[name]}

    def tensors(self, at: int) -> tuple[Tensors, ...]:
        """Blocks alive after event `at`, largest first; equal ones together, also those of layers that repeat."""
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
        """The stage that runs when event `at` happens."""
        found = ""
        for begin, name in self.ledger.stages:
            if begin > at:
                break
            found = name
        return found


def _numberless(name: str) -> str:
    """A name with its numbers left out, which tell apart layers that repeat."""
    return _NUMBER.sub("*", name)


_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+")
"""A number that is a name of its own: "3" in "layers.3.fc1", not what "fc1" ends in."""


def _common(names: list[str]) -> str:
    """One name for all: numbers in which they differ become a star."""
    if len(set(names)) == 1:
        return names[0]
    found = [_NUMBER.findall(name) for name in names]
    constant = [len(set(numbers)) == 1 for numbers in zip(*found, strict=True)]
    position = iter(range(len(constant)))
    return _NUMBER.sub(lambda number: number[0] if constant[next(position)] else "*", names[0])


def saved_bytes(blocks: Iterable[Block]) -> dict[str, int]:
    """Stage -> bytes of what it saves for backward."""
    out: Counter[str] = Counter()
    for block in blocks:
        if block.category == "saved activations" and block.stage:
            out[block.stage] += block.nbytes
    return dict(out)
