"""Random models on several streams, random plans for them, their training on the emulated device, and its waits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fake_cuda import FakeStream
from fake_kernels import Device
from made_plans import plan_with, random_transfers
from torch import nn

import ckptplan
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.rules import enforceable_points
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment
from ckptplan.runtime.swap import record
from ckptplan.runtime.swap.stores import PinnedStore
from ckptplan.state import surroundings
from ckptplan.tensors.accelerator import current_stream, on_stream

WIDTH = 64


class Streams:
    """The streams of one run by number; on the host there are none. Copies of a model share them."""

    def __init__(self) -> None:
        self.all: list[FakeStream] = []

    def __deepcopy__(self, memo: Any) -> Streams:
        return self

    def enter(self, number: int, *tensors: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Compute on a stream, behind the one that computes now; `tensors` are used there."""
        if not self.all:
            return contextlib.nullcontext()
        stream = self.all[number]
        stream.wait_stream(current_stream(stream.device))
        for tensor in tensors:
            tensor.record_stream(stream)  # type: ignore[arg-type]
        return on_stream(stream)

    def join(self, number: int, *tensors: torch.Tensor) -> None:
        """Go on behind what the stream has been given; `tensors` are used here."""
        if self.all:
            here = current_stream(self.all[number].device)
            here.wait_stream(self.all[number])
            for tensor in tensors:
                tensor.record_stream(here)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Dropping(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(super().forward(x)), 0.2)


class Branching(nn.Module):
    """A stage that computes one of its branches on a stream of its own."""

    def __init__(self, streams: Streams, side: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._streams, self._side = streams, side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._streams.enter(self._side, x):
            right = torch.sigmoid(self.right(x))
        left = torch.tanh(self.left(x))
        self._streams.join(self._side, right)
        return left * right + x


class Ending(Branching):
    """A stage whose last operations run on a stream of its own: backward, and a recompute, begin there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.tanh(self.left(x))
        with self._streams.enter(self._side, x, left):
            right = torch.sigmoid(self.right(left)) * left + x
        self._streams.join(self._side, right)
        return right


class Streamed(nn.Module):
    """Blocks, each on its stream; some take an earlier output as well, made on whichever stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.streams = Streams()
        count = rng.randint(4, 7)
        route = [rng.randrange(3) for _ in range(count)]
        for i in range(1, count):
            if rng.random() < 0.5:
                route[i] = route[i - 1]
        self.route = tuple(route)
        self.back = tuple(rng.choice([0, 0, 2, 3]) for _ in range(count))
        kinds = [Plain, Dropping, *(functools.partial(kind, self.streams, 3) for kind in (Branching, Ending))]
        self.blocks = nn.ModuleList([rng.choice(kinds)() for _ in range(count)])

    def ends_aside(self, index: int, stages: Sequence[str]) -> bool:
        """Whether the last operations of stage `index` run on a stream of its own."""
        return isinstance(self.get_submodule(stages[index]), Ending)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        at = None
        for block, number, back in zip(self.blocks, self.route, self.back, strict=True):
            inputs = [made[-1], *([made[-back]] if 1 < back <= len(made) else [])]
            if at is not None:
                self.streams.join(at)
            with self.streams.enter(number, *inputs):
                x = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
                made.append(block(x))
            at = number
        self.streams.join(at, made[-1])  # type: ignore[arg-type]
        return made[-1]


@functools.cache
def built(seed: int) -> tuple[Streamed, torch.Tensor, Profile]:
    """A model, its input and its profile, on the host."""
    torch.manual_seed(seed)
    model, x = Streamed(seed), torch.randn(24, WIDTH)
    return model, x, ckptplan.profile(model, x)


def random_plan(seed: int, rng: random.Random) -> Plan:
    """Any option of each stage's menu, segments of stages on one stream, any release and prefetch near the stage.

    A stage moves all that it may, or a part of it.
    """
    model, _, profile = built(seed)
    stages = profile.stages
    options: list[Option] = [rng.choice([o for o in s.options for _ in range(3 if o.moves else 1)]) for s in stages]
    number = {f"blocks.{i}": stream for i, stream in enumerate(model.route)}
    on = [number.get(stage.name) for stage in stages]
    segments: list[Segment] = []
    real = [i for i, stage in enumerate(stages) if on[i] is not None and stage.recompute is not None]
    while len(real) > 1 and rng.random() < 0.7:
        first = real.pop(0)
        last = first
        while real and on[real[0]] == on[first] and real[0] - last <= 2 and rng.random() < 0.8:
            last = real.pop(0)
        if last > first:
            segments.append(Segment(first, last))
            for i in range(first, last + 1):
                stage = stages[i]
                options[i] = stage.keep if on[i] is None else stage.find("recompute+swap") or stage.recompute  # type: ignore[assignment]
    n = len(stages)
    ends = list(range(n))
    for segment in segments:
        ends[segment.first : segment.last + 1] = [segment.last] * (segment.last + 1 - segment.first)
    points = enforceable_points(stages)
    choices = []
    moves = residency(profile, options, tuple(segments)).moves
    for i, (option, moved) in enumerate(zip(options, moves, strict=True)):
        transfers = random_transfers(rng, moved, i, ends[i], points)
        choices.append(Decision(option.action, transfers, option.name, option.ops))
    plan = plan_with(profile, tuple(choices), segments=tuple(segments))
    return dataclasses.replace(plan, fingerprint=dataclasses.replace(plan.fingerprint, device="emulated"))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Losses and gradients of some steps, and what was done."""

    values: tuple[torch.Tensor, ...]
    left_bytes: int
    swapped_bytes: int = 0
    recomputed_stages: int = 0
    segments: int = 0


def train(gpu: Device, seed: int, plan: Plan | None, steps: int = 2) -> Run:
    """Train a copy of the model on `gpu`, following `plan`."""
    model, x, _ = built(seed)
    model = copy.deepcopy(model)
    stats = None
    with gpu.installed():
        gpu.generator.manual_seed(seed)
        for p in model.parameters():
            p.data = gpu.put(p)
        inputs = gpu.put(x)
        streams = model.streams
        streams.all = [gpu.default, gpu.Stream(), gpu.Stream(), gpu.Stream()]
        values: list[torch.Tensor] = []
        try:
            with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan) as handle:
                for _ in range(steps):
                    model.zero_grad()
                    for stream in streams.all[1:]:
                        stream.wait_stream(gpu.default)
                    loss = model(inputs).square().mean()
                    loss.backward()
                    values.append(loss.detach().clone())
                    values += [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
                    with torch.no_grad():
                        for p in model.parameters():
                            p.sub_(p.grad, alpha=0.05)  # type: ignore[arg-type]
                    del loss
                if handle is not None:
                    stats = handle.stats()
            found = tuple(gpu.get(value) for value in values)
        finally:
            streams.all = []
        values.clear()
        model.zero_grad()
        del inputs
        for p in model.parameters():
            p.data = torch.empty(0)
        gpu.synchronize()
        left = gpu.in_use
    if stats is None or plan is None:
        return Run(found, left)
    return Run(found, left, stats.swapped_out_bytes, stats.recomputed_stages, len(plan.segments))


def differing(found: Run, wanted: Run) -> int:
    """How many of the values have other bits."""
    return sum(
        not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(found.values, wanted.values, strict=True)
    )


# ---------------------------------------------------------------- waits, and how to take each out


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """A function that orders streams, or memory by them; `instead` in place of `owner`'s attribute `name` doesn't."""

    what: str
    owner: Any
    name: str
    instead: Any


def _nothing(*args: Any) -> None:
    return None


def _deaf(stream: str, wait: str) -> Callable[..., None]:
    """Return `PinnedStore.__init__`, but that one of the store's streams never waits in one of two ways."""
    original = PinnedStore.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        setattr(getattr(self, stream), wait, _nothing)

    return make


def _stale(self: Any, *args: Any, original: Callable[..., None] = PinnedStore.__init__, **kwargs: Any) -> None:
    """Like `PinnedStore.__init__`, but that the stream which computes now is the one that did then."""
    original(self, *args, **kwargs)
    own, first = self._own, self._own.current_stream(self._device)
    self._own = types.SimpleNamespace(stream=own.stream, current_stream=lambda device: first)


def _forgetful(self: Any, *args: Any, original: Callable[..., None] = PinnedStore.__init__, **kwargs: Any) -> None:
    """Like `PinnedStore.__init__`, but that the streams which use the memory aren't known."""
    original(self, *args, **kwargs)
    self._arena.streams = set()


WAITS = (
    Wait("a copy out waits for compute", PinnedStore, "__init__", _deaf("_out", "wait_stream")),
    Wait("a copy in waits for compute, which had the memory", PinnedStore, "__init__", _deaf("_in", "wait_stream")),
    Wait("a copy in waits for its own copy out", PinnedStore, "__init__", _deaf("_in", "wait_event")),
    Wait("a copy out waits for copies that used its host memory", PinnedStore, "__init__", _forgetful),
    Wait("the stream that computes now is asked at every copy", PinnedStore, "__init__", _stale),
    Wait("memory is free only behind its copy out", PinnedStore, "finish_out", _nothing),
    Wait("compute waits for a copy in", PinnedStore, "finish_in", _nothing),
    Wait("a target is freed only behind its copy in", record._ReturnBatch, "end", _nothing),
    Wait(
        "copies wait for the stream that saved the storage, and it for them",
        record, "on_stream", lambda stream: contextlib.nullcontext(),
    ),
    Wait("the allocator knows of all streams that use a storage", record.Record, "_tell_allocator", _nothing),
    Wait("each stream that uses what came back waits for it", record.Record, "_used_now", _nothing),
    Wait(
        "a recompute runs on the stream of its forward",
        surroundings, "run_on", lambda stream, tensors: contextlib.nullcontext(),
    ),
)  # fmt: skip
