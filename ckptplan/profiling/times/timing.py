"""Time every distinct stage on the device, holding no more than one stage's saved set at a time.

The model's own forward runs once per round on real inputs, with the graph cut behind every stage: a stage runs without
autograd, except where its kind is to be timed. Then forward, backward and recompute run on the spot, on the inputs it
got. Between the cuts the glue keeps its graph, so that its backward (the loss, most of all) can be timed too.
"""

from __future__ import annotations

import contextlib
import contextvars
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.profiling.bytes.real_storages import RealStorages
from ckptplan.profiling.times.stopwatch import Span, Stopwatch, Took
from ckptplan.runtime.observe.measure import same_bits, tensors_in
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.runtime.recompute.call import Call, caching
from ckptplan.runtime.recompute.frames import run_recomputed
from ckptplan.runtime.state.cells import Changing, Snapshot, below
from ckptplan.runtime.state.objects import attributes_of
from ckptplan.runtime.state.restore import beside
from ckptplan.runtime.step import TrainingStep, without_graph
from ckptplan.runtime.swap.session import Counters

Way = tuple[int, ...] | None
"""How a stage is run: plain, or recomputed with these operations' outputs saved."""

Again = dict[tuple[int, ...], tuple[int, ...]]
"""The operations whose outputs a recomputing option saves -> the bytes of each storage that it saves."""

COMPUTE, LAUNCH = range(2)
"""The lanes: places in a `Took`."""

_ROUNDS = 3
_LEAST = 0.02
"""Least share of forward that a recompute with saved outputs is taken to cost, whatever the noise says."""
_STAGE_S = 0.5  # enough measured time per kind and quantity


def why_not_again(
    module: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> str | None:
    """Why a stage can't run again as a recompute does; None if it can.

    It runs twice on the same inputs, the second time from what the runtime has kept of the first. Outputs are compared
    bit for bit, and what the stage's code can reach by its contents.
    """
    call = Call(module, original, Counters(), device)
    try:
        saves_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
        with saves_nothing, caching(parametrize._cache_enabled):
            tensors = call.split(args, kwargs)
            first = [t.detach() for t in _tensors(call(*tensors))]
            after = Snapshot(below(module), (args, kwargs), changing=Changing(), searches=True)
            second = [t.detach() for t in _tensors(call(*tensors))]
    except UnsupportedModelError as error:
        return str(error)
    if len(first) != len(second) or not all(map(same_bits, first, second)):
        return (
            "its outputs are others when it runs again on the same inputs: it reads or draws from what can't be put "
            "back (a global variable, a file, a clock), or one of its kernels gives other bits each time"
        )
    left = after.differences()
    return f"another run leaves a trace in {', '.join(left)}" if left else None


@dataclass
class Times:
    """Seconds of one lane by kind of stage and by segment of glue, and of recompute also by the operations saved.

    What can't be saved on the device as it was traced has no time.
    """

    forward_s: dict[str, float] = field(default_factory=dict)
    backward_s: dict[str, float] = field(default_factory=dict)
    recompute_s: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)
    glue_forward_s: dict[int, float] = field(default_factory=dict)
    glue_backward_s: dict[int, float] = field(default_factory=dict)


class _Join(torch.autograd.Function):
    """Make a tensor without a graph depend on an anchor, sharing its memory, fit to be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient.new_zeros(())


class _Timing:
    """One or more rounds of the cut forward."""

    def __init__(
        self,
        step: TrainingStep,
        kinds: dict[str, str],
        again: dict[str, Again],
        device: torch.device,
        rewind: Callable[[], None],
    ) -> None:
        self.step, self.kinds, self.again, self.device = step, kinds, again, device
        self.watch = Stopwatch(device)
        self.rewind = rewind
        self.names = tuple(kinds)
        self.samples: dict[tuple[str, Way, str], list[Took]] = {}
        self.otherwise: set[tuple[str, Way]] = set()  # what ran other operations than were traced
        self.unlike: dict[str, str] = {}  # kinds that can't run again, and why
        self.needs_graph: dict[str, bool] = {}  # kinds, once they have been tried without one
        self.glue: dict[tuple[str, int], list[Took]] = {}
        self.anchors: list[torch.Tensor] = []
        self.done: set[str] = set()
        self.repeats = 1
        self.left: Span | None = None

    def excess_s(self, kind: str, way: Way, lane: int) -> float:
        """What `way` takes more than the plain stage: the median over pairs of runs, one right after the other."""
        plain, other = (
            [
                f[lane] + b[lane]
                for f, b in zip(self.samples[kind, w, "forward"], self.samples[kind, w, "backward"], strict=True)
            ]
            for w in (None, way)
        )
        return statistics.median(b - a for a, b in zip(plain, other, strict=True))

    def round(self, repeats: int, watched: RealStorages | None = None) -> None:
        """One forward of the step; `repeats` timings of each kind, none when 0. One that is watched has none."""
        self.repeats, self.done, self.anchors = repeats, set(), []
        self.watched = watched
        self.rewind()
        calls: dict[nn.Module, list[int]] = {}
        modules = dict(self.step.model.named_modules())
        for index, name in enumerate(self.names):
            calls.setdefault(modules[name.partition("#")[0]], []).append(index)
        patches = [PatchedForward(module, self._runner(module, indices)) for module, indices in calls.items()]
        try:
            with installed(patches):
                self.left = self.watch.begin(("forward", 0))
                with contextlib.nullcontext() if self.watched is None else self.watched.hooks():
                    self._glue_begins(0)
                    output, loss = self.step.forward()
                    self._glue_forward(len(self.names))
                span = self.watch.begin(("backward", len(self.names)))
                self._backward([loss])
                self.glue.setdefault(("backward", len(self.names)), []).append(self.watch.end(span))
                del output, loss
        finally:
            self.anchors = []

    def _runner(self, module: nn.Module, indices: list[int]) -> Callable[..., Any]:
        waiting = list(indices)

        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled() or not waiting:
                return original(*args, **kwargs)
            index = waiting.pop(0)
            self._glue_forward(index)
            self._glue_backward(index, args, kwargs)
            output = self._stage(index, module, original, args, kwargs)
            self.left = self.watch.begin(("forward", index + 1))
            self._glue_begins(index + 1)
            return output

        return run

    def _glue_begins(self, index: int) -> None:
        if self.watched is not None:
            self.watched.begin(2 * index)

    def _glue_forward(self, index: int) -> None:
        if self.watched is not None:
            self.watched.end()
        assert self.left is not None
        self.glue.setdefault(("forward", index), []).append(self.watch.end(self.left))

    def _glue_backward(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fresh = [
            t
            for t in tensors_in((args, kwargs))
            if t.grad_fn is not None and type(t.grad_fn).__name__ != "_JoinBackward"
        ]
        took = Took(0.0, 0.0)
        if fresh:
            span = self.watch.begin(("backward", index))
            self._backward(fresh)
            took = self.watch.end(span)
        self.glue.setdefault(("backward", index), []).append(took)

    def _backward(self, tensors: list[torch.Tensor]) -> None:
        leaves = [*self.anchors, *(p for p in self.step.model.parameters() if p.requires_grad)]
        gradients = [torch.ones_like(t) for t in tensors]
        torch.autograd.grad(tensors, leaves, gradients, retain_graph=True, allow_unused=True)

    def _stage(
        self, index: int, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind = self.kinds[self.names[index]]
        # Each stage: those of a kind run the same operations, but may read other things than tensors.
        tried, timed = self.repeats == 1, self.repeats > 0 and kind not in self.done
        if tried or timed:
            with _apart(module, args, kwargs):
                if tried:
                    self._try_again(kind, module, original, args, kwargs)
                if timed:
                    self.done.add(kind)
                    self._time(kind, module, original, args, kwargs)
        if self.watched is None:
            output = self._without_graph(kind, module, original, args, kwargs)
        else:
            self.watched.begin(2 * index + 1, (args, kwargs))
            output = original(*args, **kwargs)
            self.watched.end(output)
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.untyped_storage()._cdata in given:
                return tensor
            if self.watched is not None and not tensor.requires_grad:
                return tensor  # what follows saves as much as in training
            return self._joined(tensor, self.anchors)

        for leaf in pytree.tree_leaves(output):
            for name, value in (attributes_of(leaf) or {}).items():
                if isinstance(value, torch.Tensor):
                    object.__setattr__(leaf, name, cut(value))
        return pytree.tree_map_only(torch.Tensor, cut, output)

    def _without_graph(
        self, kind: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A stage's output, made without a graph unless that fails, as backward inside does, or gives no tensor."""
        if kind not in self.needs_graph:
            with _apart(module, args, kwargs):
                self.needs_graph[kind] = True
                # Where it fails, it shows with a graph, as in training, whether that is an error.
                with contextlib.suppress(Exception), without_graph():
                    self.needs_graph[kind] = not _tensors(original(*args, **kwargs))
        with contextlib.nullcontext() if self.needs_graph[kind] else without_graph():
            return original(*args, **kwargs)

    @staticmethod
    def _joined(tensor: torch.Tensor, anchors: list[torch.Tensor]) -> torch.Tensor:
        """`tensor` without its graph, with a new one that ends at an anchor, which is added to `anchors`."""
        anchors.append(torch.zeros((), device=tensor.device, requires_grad=True))
        # `data`, not `detach()`: marking it dirty must not count as a write to what the user's graph saved.
        return _Join.apply(tensor.data, anchors[-1])  # type: ignore[no-any-return]

    def _try_again(
        self, kind: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Look whether a stage can run again; where it can't, none of its kind is to."""
        if kind in self.unlike or () not in self.again.get(kind, {}):
            return
        new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, self._fresh([], {}), (args, kwargs))
        found = why_not_again(module, original, new_args, new_kwargs, self.device)
        if found is not None:
            self.unlike[kind] = found

    def _fresh(
        self, leaves: list[torch.Tensor], made: dict[int, torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes arguments for another run, whose graphs end at `leaves`; those that are one tensor stay one."""

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = self._joined(tensor, leaves) if tensor.requires_grad else tensor.detach()
            return made[id(tensor)]

        return fresh

    def _time(
        self, kind: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves: list[torch.Tensor] = []
        made: dict[int, torch.Tensor] = {}
        fresh = self._fresh(leaves, made)
        again = {} if kind in self.unlike else self.again.get(kind, {})
        ways: list[Way] = [None, *(way for way in again if (kind, way) not in self.otherwise)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        # A weight that a hook has made lies outside of the stage, and its graph can't run backward each time.
        for m in module.modules():
            for name, value in m.__dict__.items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    m.__dict__[name] = value.detach().requires_grad_()
                    parameters.append(m.__dict__[name])
        spent, count = 0.0, 0
        while count < self.repeats or (self.repeats > 1 and spent < _STAGE_S * len(ways) / 2 and count < 20):
            for way in ways:
                leaves.clear()
                made.clear()
                # A state that the run before has left on the module would lead into its graph, which is gone.
                Snapshot(below(module), changing=Changing()).put()
                new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, fresh, (args, kwargs))
                span = self.watch.begin((kind, way, "forward"))
                with caching(parametrize._cache_enabled):
                    if way is None:
                        output = original(*new_args, **new_kwargs)
                    else:
                        counters = Counters()
                        output = run_recomputed(
                            module, original, new_args, new_kwargs, counters, self.device, ops=way, planned=again[way]
                        )
                        if counters.other_paths:
                            self.otherwise.add((kind, way))
                forward = self.watch.end(span)
                outputs = [t for t in _tensors(output) if t.grad_fn is not None]
                gradients = [torch.ones_like(t) for t in outputs]
                del output, new_args, new_kwargs
                made.clear()
                span = self.watch.begin((kind, way, "backward"))
                if outputs:
                    trained = [p for p in parameters if p.requires_grad]  # forward may have frozen some
                    torch.autograd.grad(outputs, [*leaves, *trained], gradients, allow_unused=True)
                backward = self.watch.end(span)
                del outputs, gradients
                if self.repeats > 1:
                    self.samples.setdefault((kind, way, "forward"), []).append(forward)
                    self.samples.setdefault((kind, way, "backward"), []).append(backward)
                spent += sum(max(took) for took in (forward, backward))
            count += 1


def _apart(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[Snapshot]:
    """A stage runs inside besides the step: what it draws from, and what it can reach, is as before afterwards.

    Otherwise what others collect of it (features, by a hook) would be there too often, with graphs that have run
    backward, and the step would go another way by the numbers that it draws next.
    """
    return beside(module, (*args, *kwargs.values(), *contextvars.copy_context().values()), graphs=True)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of a stage's output, and of the objects in it."""
    leaves = pytree.tree_leaves(output)
    inside = (value for leaf in leaves for value in (attributes_of(leaf) or {}).values())
    return [t for t in (*leaves, *inside) if isinstance(t, torch.Tensor)]


def _falling(values: Iterable[float]) -> list[float]:
    """The nearest sequence that doesn't rise: neighbours that do are averaged (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pool = (value, 1)
        while pools and pools[-1][0] < pool[0]:
            mean, count = pools.pop()
            pool = ((mean * count + pool[0] * pool[1]) / (count + pool[1]), count + pool[1])
        pools.append(pool)
    return [mean for mean, count in pools for _ in range(count)]


def time_stages(
    step: TrainingStep,
    kinds: dict[str, str],
    again: dict[str, Again],
    device: torch.device,
    rewind: Callable[[], None],
    real: RealStorages | None = None,
) -> tuple[Times, Times, dict[str, str]]:
    """Measure `step` stage by stage, and run each once more to see that it can run again.

    Parameters
    ----------
    kinds : dict
        Stage name -> kind, in call order; each kind is timed once, on the first stage that has it.
    again : dict
        Kind -> what its recomputing options save, by rising bytes and so, noise aside, falling time; no operations'
        outputs first, unless some must not run again. Empty where it can't be recomputed.
    rewind : callable
        Puts buffers and random states back between rounds.
    real : RealStorages, optional
        Watches one round's forward.

    Returns
    -------
    Times, Times
        Medians, of the device and of the host that launches its work (0 on the CPU). Glue is keyed by the stage that
        follows it (their number: after the last one).
    dict
        Kinds that can't be recomputed -> why: another run, from what the first one found, isn't like it.
    """
    timing = _Timing(step, kinds, again, device, rewind)
    timing.round(1)  # warm-up
    timing.round(0, real)
    for _ in range(_ROUNDS - 2):
        timing.round(0)
    timing.round(3)
    for name, kind in kinds.items():
        if (kind, None, "forward") not in timing.samples:
            raise UnsupportedModelError(
                f"stage {name!r} ran while the step was traced, and not when it was timed: forward takes another path "
                "each time it runs on the same inputs, or another one on fake tensors; take what changes it out of it"
            )
    return _medians(timing, COMPUTE), _medians(timing, LAUNCH), timing.unlike


def _medians(timing: _Timing, lane: int) -> Times:
    """What was measured of one lane."""
    out = Times()
    for kind in dict.fromkeys(timing.kinds.values()):
        if (kind, None, "forward") not in timing.samples:
            continue
        forward_s = out.forward_s[kind] = statistics.median(t[lane] for t in timing.samples[kind, None, "forward"])
        out.backward_s[kind] = statistics.median(t[lane] for t in timing.samples[kind, None, "backward"])
        ways = [way for way in timing.again.get(kind, {}) if (kind, way) not in timing.otherwise]
        ways = [] if kind in timing.unlike else ways
        if lane == LAUNCH:  # Python's share of a recompute is the same whatever the device saves of its work
            out.recompute_s.update(((kind, way), max(timing.excess_s(kind, way, lane), 0.0)) for way in ways)
            continue
        if not ways:
            continue
        # The way that saves least runs most again: the whole stage, where all of it may run again.
        longest_s = timing.excess_s(kind, ways[0], lane)
        # Recompute stops at the last saved tensor, so it is forward at most; what the difference shows beyond that is
        # memory touched for the first time, which a step in a running training has behind it, whatever it saves.
        scale = min(1.0, forward_s / longest_s) if longest_s > 0 else 1.0
        if ways[0] == ():
            out.recompute_s[kind, ways.pop(0)] = max(scale * longest_s, 0.1 * forward_s)
        measured_s = (max(scale * timing.excess_s(kind, way, lane), _LEAST * forward_s) for way in ways)
        out.recompute_s.update(((kind, way), s) for way, s in zip(ways, _falling(measured_s), strict=True))
    for (direction, index), values in timing.glue.items():
        table = out.glue_forward_s if direction == "forward" else out.glue_backward_s
        table[index] = statistics.median(t[lane] for t in values[1:] or values)
    return out
