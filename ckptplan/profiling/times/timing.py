"""Time every distinct stage on the device, with at most one stage's saved set on it at a time.

The model's forward runs once per round on real inputs, with the graph cut behind every stage. A stage runs without
autograd, but the first one of each kind is also timed on the spot: forward, backward and recompute on the same inputs.
Between the cuts the glue keeps its graph, so that its backward (most of all the loss) can be timed too.

Stages that forward itself differentiates aren't cut: their backward counts once, as the stages', and what the loss's
takes more, the differentiation of forward's own backward included, as the last glue's.

Each round times every way of each kind once, so a machine that gets slower or faster meanwhile changes all alike, and
their ratios stay. Rounds go on until the step's standard error is small, or have taken long enough.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ckptplan.core import option
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import Decision
from ckptplan.core.progress import counted
from ckptplan.core.request import Report, ignore_progress
from ckptplan.distributed import parallel_of
from ckptplan.profiling.bytes.real_storages import RealStorages
from ckptplan.profiling.times.stopwatch import Measurement, Stopwatch, Took
from ckptplan.profiling.values.cut import fresh, joined
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.runtime.recompute.call import Call, PlannedStage, caching
from ckptplan.runtime.recompute.frames import Enough, run_recomputed
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.state.cells import Contents, Snapshot
from ckptplan.state.code import read_by
from ckptplan.state.flags import FLAGS, flags, set_flags
from ckptplan.state.restore import beside
from ckptplan.tensors.accelerator import is_accelerator
from ckptplan.tensors.modules import below
from ckptplan.tensors.objects import attributes_of
from ckptplan.tensors.private import next_sequence_number
from ckptplan.tensors.storages import same_bits, tensors_in
from ckptplan.training.compiled import out_of_sight
from ckptplan.training.step import TrainingStep, without_graph
from ckptplan.training.variants import at_ratio

Way = option.Way | None
"""How a stage runs: None for plain, otherwise the way of an option (`Option.way`)."""

Again = dict[option.Way, tuple[int, ...]]
"""The way of a recomputing option -> the bytes of each storage that it saves."""

COMPUTE, LAUNCH = range(2)
"""The lanes: fields of a `Took`."""

_LEAST_SHARES = 0.02, 0.1
"""Least time of a recompute with saved outputs and without, as shares of forward; noise may make the measured one 0."""
_LEAST_OF_OPS = 0.8
"""Least time of a recompute as a share of the sum of its operations' own times, scaled to the measured forward.

A recompute nearly always takes more than that sum, since it runs Python too. A search takes what looks cheapest, so
without this it would take the option that noise has made too cheap.
"""
_LEAST_RUNS = 3  # timings of each way; the errors of a kind's medians are estimated from those of all its ways
_GPU_WARM_UPS = 2  # further ones of each way, which aren't counted
_CPU_WARM_WAYS = 2  # ways that run once more, which isn't counted: plain and recompute take the most memory
_SHORT_S = 2e-3  # a shorter stage runs a first time in each round: cold caches would be much of its time
_MOST_RUNS = 30
_MORE_S = 0.25  # most time for rounds beyond the least number; none that would take longer is begun
_ERROR = 0.01  # of the step, below which it is timed no more
_COMPARE_S = 10.0  # most time for comparing variants of compiled stages, whose compilation takes longer
_COMPARED = 0.004  # of a stage's time: an error of the differences between its variants at which these are known


def why_not_again(
    module: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> str | None:
    """Return why a stage can't run again as a recompute does; None if it can.

    It runs again on the same inputs from what the runtime has kept of the first run. The outputs are compared bit for
    bit, and so are the contents of all objects that the stage's code can reach, also after a run that ends where a
    recompute does, as soon as it has saved all tensors.
    """
    call = Call(PlannedStage(module, Decision("recompute"), device, Counters()), original)
    try:
        with caching(parametrize._cache_enabled):
            tensors = call.split(args, kwargs)
            first, count = _saving(call, tensors)
            modules = below(module)
            read = read_by(modules)
            others = (args, kwargs, *read.containers)
            after = Contents.of(modules, others)
            second, _ = _saving(call, tensors)
            left = after.differences(Contents.of(modules, others)) + read.changed()
            before = flags()
            with contextlib.suppress(Enough):
                _saving(call, tensors, most=count)
            left_early = after.differences(Contents.of(modules, others)) + read.changed()
            left_early += [name for name, a, b in zip(FLAGS, before, flags(), strict=True) if a != b]
            set_flags(before)
            read.put_back()
    except UnsupportedModelError as error:
        return str(error)
    if len(first) != len(second) or not all(map(same_bits, first, second)):
        return (
            "its outputs differ when it runs again on the same inputs: it reads or draws from something that can't be "
            "restored (a global variable, a file, a clock), or one of its kernels gives other bits each time"
        )
    if left:
        return f"another run changes {', '.join(left)}"
    if left_early:
        return f"it changes {', '.join(left_early)} and takes that back when a recompute has ended already"
    return None


def _saving(call: Call, tensors: list[torch.Tensor], *, most: int | None = None) -> tuple[list[torch.Tensor], int]:
    """Run a call and return its outputs and how many tensors autograd saves; `Enough` ends it at number `most`."""
    count = 0

    def save(tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count == most:
            raise Enough

    with OwnHooks(out_of_sight(save), lambda nothing: nothing):
        return [t.detach() for t in _tensors(call(*tensors))], count


@dataclass
class Times:
    """Seconds of one lane by kind of stage, for recompute also by the operations saved, and by position of glue.

    Glue is keyed by the number of the stage that follows it. A recompute that ran other operations than were traced
    isn't in `recompute_s`. `error_s` is the standard error of forward and backward together.
    """

    forward_s: dict[str, float] = field(default_factory=dict)
    backward_s: dict[str, float] = field(default_factory=dict)
    recompute_s: dict[tuple[str, option.Way], float] = field(default_factory=dict)
    glue_forward_s: dict[int, float] = field(default_factory=dict)
    glue_backward_s: dict[int, float] = field(default_factory=dict)
    error_s: dict[str, float] = field(default_factory=dict)

    def unfolded(self, positions: Sequence[int]) -> Times:
        """The times of a model for some of whose glue that of others was timed: per position, the one timed for it."""
        forward_s, backward_s = (
            {k: table[s] for k, s in enumerate(positions) if s in table}
            for table in (self.glue_forward_s, self.glue_backward_s)
        )
        return dataclasses.replace(self, glue_forward_s=forward_s, glue_backward_s=backward_s)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The stages of a step to be timed, and the ways in which they run.

    Parameters
    ----------
    kinds : dict
        Stage name -> kind, in call order; each kind is timed on the first stage that has it.
    counts : mapping
        Kind -> its number of stages in the full model, of which the step may run only a few.
    again : dict
        Kind -> its recomputing options' saved operations, by rising bytes and so, noise aside, falling time; saving
        none comes first, unless some must not run again. Empty for a kind that can't be recomputed.
    rerun_shares : mapping
        As in `Traced`.
    differentiated : set of str
        Stages through which forward itself runs a backward.
    """

    kinds: dict[str, str]
    counts: Mapping[str, int]
    again: dict[str, Again]
    rerun_shares: Mapping[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)
    differentiated: Set[str] = frozenset()


class _StageCall(NamedTuple):
    """A call of a stage: its module, the module's own forward, and its positional and keyword arguments."""

    module: nn.Module
    original: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def run(self) -> Any:
        """Make the call."""
        args, kwargs = self.arguments
        return self.original(*args, **kwargs)

    def apart(self) -> contextlib.AbstractContextManager[Snapshot]:
        """Run the stage in addition to the step within the block; then restore generators and all it can reach.

        Otherwise features collected from it by a hook would be there too often, with graphs that have run backward, and
        the step would draw other numbers next.
        """
        args, kwargs = self.arguments
        return beside(self.module, (*args, *kwargs.values(), *contextvars.copy_context().values()), graphs=True)


class _Timing:
    """Rounds of the cut forward, and the times measured in them; parameters as in `time_stages`."""

    def __init__(
        self, step: TrainingStep, work: StageWork, device: torch.device, rewind: Callable[[], None], report: Report
    ) -> None:
        self.step, self.device, self.report, self.number = step, device, report, 0
        self.kinds, self.counts, self.again = work.kinds, work.counts, work.again
        self.rerun_shares, self.differentiated = work.rerun_shares, work.differentiated
        self.watch = Stopwatch(device)
        parallel = parallel_of(step.model)
        self.undisturbed = parallel.undisturbed if parallel.in_step else contextlib.nullcontext
        self.rewind = rewind
        self.names = tuple(self.kinds)
        self.samples: dict[tuple[str, Way, str], list[Took]] = {}
        self.otherwise: set[tuple[str, Way]] = set()  # kinds and ways that ran other operations than were traced
        self.unlike: dict[str, str] = {}  # kinds that can't run again -> why
        self.needs_graph: dict[str, bool] = {}  # kinds that ran without a graph -> whether that failed
        self.glue: dict[tuple[str, int], list[Took]] = {}
        self.anchors: list[torch.Tensor] = []
        self.wanted: set[str] = set()  # kinds to be timed in this round
        self.runs: Counter[str] = Counter()  # of each way of a kind that was timed
        self.plain_s: dict[str, float] = {}  # of a kind's last plain run
        self.tries = False
        self.compare_s = 0.0  # of this round
        self.left: Measurement | None = None

    def excess_s(self, kind: str, way: Way, lane: int) -> float:
        """Time of `way` beyond that of the plain stage: the median over pairs of runs, one right after the other."""
        plain, other = (
            [
                f[lane] + b[lane]
                for f, b in zip(self.samples[kind, w, "forward"], self.samples[kind, w, "backward"], strict=True)
            ]
            for w in (None, way)
        )
        plain = plain[: len(other)]  # variants are timed more often than other ways, and plain with each
        return statistics.median(b - a for a, b in zip(plain, other, strict=True))

    def least_s(self, kind: str, way: option.Way, forward_s: float) -> float:
        """Least time of a recompute that can be believed, whatever was measured."""
        if isinstance(way, float):  # fewer bytes to write may make compiled code faster
            return -math.inf
        return max(_LEAST_SHARES[not way], _LEAST_OF_OPS * self.rerun_shares.get((kind, way), 0.0)) * forward_s

    def ways_of(self, kind: str) -> list[option.Way]:
        """The ways in which a kind runs besides plain."""
        ways = [way for way in self.again.get(kind, {}) if (kind, way) not in self.otherwise]
        return [way for way in ways if isinstance(way, float)] if kind in self.unlike else ways

    def _took_s(self, kind: str, way: Way) -> list[float]:
        """Time of each run of a way, forward and backward together, in the lane that takes longer."""
        pairs = zip(self.samples[kind, way, "forward"], self.samples[kind, way, "backward"], strict=True)
        return [sum(map(max, pair)) for pair in pairs]

    def error_s(self, kind: str) -> float:
        """Estimated standard error of the median of a kind's time; normal noise, alike in all its ways, is assumed."""
        ways = [self._took_s(kind, way) for of, way, direction in self.samples if of == kind and direction == "forward"]
        medians_s = [statistics.median(took_s) for took_s in ways]
        shares = [abs(s / m - 1) for m, took_s in zip(medians_s, ways, strict=True) for s in took_s if m]
        if not shares:
            return 0.0
        # From each way its median is taken, so that one of its runs deviates by nothing.
        free = len(shares) / max(len(shares) - len(ways), 1)
        deviation = 1.4826 * math.sqrt(free) * statistics.median(shares)
        return 1.2533 * deviation / math.sqrt(len(ways[0])) * medians_s[0]

    def _unsettled(self) -> set[str]:
        """The kinds with more than their share of the step's error, if that is too large."""
        step_s = sum(self.counts[kind] * statistics.median(self._took_s(kind, None)) for kind in self.runs)
        errors_s = {kind: self.counts[kind] * self.error_s(kind) for kind in self.runs}
        if math.hypot(*errors_s.values()) <= _ERROR * step_s:
            return set()
        return {kind for kind, error_s in errors_s.items() if error_s > _ERROR * step_s / math.sqrt(len(errors_s))}

    def _compared(self, kind: str) -> Iterator[tuple[Way, bool]]:
        """The plain stage and its variants in turn, until their differences are known or the time for it is over.

        These are a few per cent of the stage's time, and decide between plans alone.
        """
        ways = [None, *self._variants_of(kind)]
        until = time.perf_counter() + self.compare_s
        for number in range(_MOST_RUNS):
            yield from ((way, True) for way in (ways if number % 2 else reversed(ways)))
            plain_s, *others_s = (self._took_s(kind, way) for way in ways)
            errors_s = (_error([b - a for a, b in zip(plain_s, took_s, strict=True)]) for took_s in others_s)
            if max(errors_s) <= _COMPARED * statistics.median(plain_s) or time.perf_counter() > until:
                return

    def _variants_of(self, kind: str) -> list[float]:
        return [way for way in self.ways_of(kind) if isinstance(way, float)]

    def _runs_of(self, kind: str, ways: Sequence[Way]) -> Iterator[tuple[Way, bool]]:
        """The ways in which a kind runs in this round, one after the other, each with whether its times count."""
        if self.compare_s:
            yield from self._compared(kind)
            return
        warms: Sequence[Way] = ways
        if not self.runs[kind] and is_accelerator(self.device):
            # These find how long the device's queue has to be held up.
            yield from ((way, False) for way in [*ways] * _GPU_WARM_UPS)
            warms = ()
        elif not self.runs[kind]:
            # For memory and code that are used the first time, plain last, so that its time is a warm one; a second run
            # at once is also what shows a graph that the first has left where nothing looks for it, and run backward.
            yield from ((way, False) for way in reversed(ways[:_CPU_WARM_WAYS]))
            warms = ways[_CPU_WARM_WAYS:]
        if self.plain_s[kind] < _SHORT_S:
            yield from ((way, False) for way in warms)
        # Each is as often the one that finds cold caches.
        yield from ((way, True) for way in (ways if self.runs[kind] % 2 else reversed(ways)))

    def rounds(self) -> None:
        """Run timed rounds until the step's error is small, or the time for them is over."""
        wanted: Collection[str] = self.counts
        left_s = _MORE_S
        for number in range(_MOST_RUNS):
            begun = time.perf_counter()
            self.round(times=wanted)
            took_s = time.perf_counter() - begun
            if number + 1 >= _LEAST_RUNS:
                wanted = self._unsettled()
                if not wanted or took_s > left_s:
                    break
                left_s -= took_s  # what the next one will take
        if compiled := {kind for kind in self.counts if self._variants_of(kind)}:
            self.round(times=compiled, compare_s=_COMPARE_S / len(compiled))

    def round(
        self,
        *,
        tries: bool = False,
        times: Collection[str] = (),
        compare_s: float = 0.0,
        watched: RealStorages | None = None,
    ) -> None:
        """Run one forward of the step.

        Parameters
        ----------
        tries : bool
            Check of each stage that it can run again.
        times : collection of str
            The kinds of stage to time.
        compare_s : float
            Most time in which the variants of each of these kinds are compared; 0: each way runs once.
        watched : RealStorages, optional
            Watches the round, in which nothing is tried or timed then.
        """
        self.tries, self.wanted, self.compare_s, self.anchors = tries, set(times), compare_s, []
        self.number += 1
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
            what = f"stages with their options, round {self.number}"
            self.report(counted("timing", index + 1, len(self.names), what))
            with self.undisturbed():
                self._glue_backward(index, args, kwargs)
            with self.undisturbed():
                output = self._stage(index, _StageCall(module, original, (args, kwargs)))
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
        if fresh and self.differentiated.isdisjoint(self.names[:index]):
            span = self.watch.begin(("backward", index))
            self._backward(fresh)
            took = self.watch.end(span)
        self.glue.setdefault(("backward", index), []).append(took)

    def _backward(self, tensors: list[torch.Tensor]) -> None:
        leaves: list[Any] = [*self.anchors, *(p for p in self.step.model.parameters() if p.requires_grad)]
        leaves = leaves or _leaves_made(tensors, 0)  # those of a frozen model's inputs
        gradients = [torch.ones_like(t) for t in tensors]
        torch.autograd.grad(tensors, leaves, gradients, retain_graph=True, allow_unused=True)

    def _stage(self, index: int, call: _StageCall) -> Any:
        kind = self.kinds[self.names[index]]
        # Every stage is tried, since those of a kind run the same operations but may read other objects.
        if self.tries or kind in self.wanted:
            with call.apart():
                if self.tries:
                    self._try_again(kind, call)
                if kind in self.wanted:
                    self.wanted.remove(kind)
                    self._time(kind, call)
        if self.watched is None and self.names[index] in self.differentiated:
            output = call.run()
        elif self.watched is None:
            output = self._without_graph(kind, call)
        else:
            self.watched.begin(2 * index + 1, call.arguments)
            output = call.run()
            self.watched.end(output)
        if self.names[index] in self.differentiated:
            return output
        given = {t.untyped_storage()._cdata for t in tensors_in(call.arguments)}

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.untyped_storage()._cdata in given:
                return tensor
            if self.watched is not None and not tensor.requires_grad:
                return tensor  # so that the stages behind save the same tensors as in training
            return joined(tensor, self.anchors)

        for leaf in pytree.tree_leaves(output):
            for name, value in (attributes_of(leaf) or {}).items():
                if isinstance(value, torch.Tensor):
                    object.__setattr__(leaf, name, cut(value))
        return pytree.tree_map_only(torch.Tensor, cut, output)

    def _without_graph(self, kind: str, call: _StageCall) -> Any:
        """A stage's output, without a graph unless that fails (as with a backward inside) or returns no tensor."""
        if kind not in self.needs_graph:
            with call.apart():
                self.needs_graph[kind] = True
                # If it fails, it runs again with a graph, as in training, and an error there is the model's.
                with contextlib.suppress(Exception), without_graph():
                    self.needs_graph[kind] = not _tensors(call.run())
        with contextlib.nullcontext() if self.needs_graph[kind] else without_graph():
            return call.run()

    def _try_again(self, kind: str, call: _StageCall) -> None:
        """Check that a stage can run again; if it can't, none of its kind is recomputed."""
        if kind in self.unlike or () not in self.again.get(kind, {}):
            return
        args, kwargs = pytree.tree_map_only(torch.Tensor, fresh([], {}), call.arguments)
        found = why_not_again(call.module, call.original, args, kwargs, self.device)
        if found is not None:
            self.unlike[kind] = found

    def _time(self, kind: str, call: _StageCall) -> None:
        module, original = call.module, call.original
        leaves: list[torch.Tensor] = []
        made: dict[int, torch.Tensor] = {}
        cut = fresh(leaves, made)
        again = self.again.get(kind, {})
        ways: list[Way] = [None, *self.ways_of(kind)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        # A weight that a hook has made has a graph outside of the stage, which can't run backward more than once.
        for m in module.modules():
            for name, value in m.__dict__.items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    m.__dict__[name] = value.detach().requires_grad_()
                    parameters.append(m.__dict__[name])
        # An object among the arguments, such as a cache of keys and values, is as before the stage in each run.
        start = None
        if any(attributes_of(leaf) is not None for leaf in pytree.tree_leaves(call.arguments)):
            start = Snapshot(below(module), call.arguments, deep=True, graphs=True)
        for way, counts in self._runs_of(kind, ways):
            leaves.clear()
            made.clear()
            # State that the run before has left on the module would lead into its graph, which is gone.
            (start or Snapshot(below(module))).put()
            new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, cut, call.arguments)
            stage = None
            if way is not None and not isinstance(way, float):
                choice = Decision("recompute", ops=way)
                stage = PlannedStage(module, choice, self.device, Counters(), planned_bytes=again[way])
            since = next_sequence_number()
            span = self.watch.begin((kind, way, "forward"))
            with caching(parametrize._cache_enabled):
                if stage is None:
                    with at_ratio(way if isinstance(way, float) else 0.0):
                        output = original(*new_args, **new_kwargs)
                else:
                    output = run_recomputed(stage, original, new_args, new_kwargs)
                    if stage.counters.other_paths:
                        self.otherwise.add((kind, way))
            forward = self.watch.end(span)
            outputs = [t for t in _tensors(output) if t.grad_fn is not None]
            gradients = [torch.ones_like(t) for t in outputs]
            del output, new_args, new_kwargs
            made.clear()
            trained = [p for p in parameters if p.requires_grad]  # forward may have frozen some
            wanted: list[Any] = [*leaves, *trained, *_leaves_made(outputs, since)]
            span = self.watch.begin((kind, way, "backward"))
            with self.undisturbed():
                if wanted:
                    torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
                backward = self.watch.end(span)
            del outputs, gradients, wanted
            if way is None:
                self.plain_s[kind] = max(forward) + max(backward)
            if counts:
                self.samples.setdefault((kind, way, "forward"), []).append(forward)
                self.samples.setdefault((kind, way, "backward"), []).append(backward)
        self.runs[kind] += 1


def _error(values: Sequence[float]) -> float:
    """Estimated standard error of the median of normal values."""
    middle = statistics.median(values)
    return 1.2533 * 1.4826 * statistics.median(abs(value - middle) for value in values) / math.sqrt(len(values))


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in a stage's output, those in attributes of objects included."""
    leaves = pytree.tree_leaves(output)
    inside = (value for leaf in leaves for value in (attributes_of(leaf) or {}).values())
    return [t for t in (*leaves, *inside) if isinstance(t, torch.Tensor)]


def _leaves_made(outputs: Iterable[torch.Tensor], since: int) -> list[GradientEdge]:
    """Leaves behind the nodes numbered from `since` on: an activation that forward called `requires_grad_` on, say."""
    nodes = dict.fromkeys(t.grad_fn for t in outputs if t.grad_fn is not None)
    waiting = list(nodes)
    while waiting:
        following = (node for node, _ in waiting.pop().next_functions if node is not None)
        new = [node for node in following if node not in nodes and node._sequence_nr() >= since]
        nodes.update(dict.fromkeys(new))
        waiting.extend(new)
    return [GradientEdge(node, 0) for node in nodes if hasattr(node, "variable")]


def _falling(values: Iterable[float]) -> list[float]:
    """The nearest non-increasing sequence by least squares (pool adjacent violators): (3, 1, 2) gives (3, 1.5, 1.5)."""
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
    work: StageWork,
    device: torch.device,
    rewind: Callable[[], None],
    real: RealStorages | None = None,
    report: Report = ignore_progress,
) -> tuple[Times, Times, dict[str, str]]:
    """Measure `step` stage by stage, and check of each stage that it can run again.

    Parameters
    ----------
    rewind : callable
        Restores buffers and random states between rounds.
    real : RealStorages, optional
        Watches one round's forward.
    report : callable
        Called with the number of each stage, between what is measured.

    Returns
    -------
    Times, Times
        Medians of the device, and of the host that launches its work (0 on the CPU).
    dict
        Kinds that can't be recomputed -> why: a second run from the same state differs from the first.

    Raises
    ------
    UnsupportedModelError
        If a stage didn't run.
    """
    timing = _Timing(step, work, device, rewind, report)
    timing.round(tries=True)  # a warm-up as well
    timing.round(watched=real)
    timing.rounds()
    for name, kind in work.kinds.items():
        if (kind, None, "forward") not in timing.samples:
            raise UnsupportedModelError(
                f"stage {name!r} ran while the step was traced, and not when it was timed: forward takes another path "
                "each time it runs on the same inputs, or another one on fake tensors; remove what changes its path"
            )
    return _medians(timing, COMPUTE), _medians(timing, LAUNCH), timing.unlike


def _medians(timing: _Timing, lane: int) -> Times:
    """The times of one lane."""
    out = Times()
    for kind in dict.fromkeys(timing.kinds.values()):
        forward_s = out.forward_s[kind] = statistics.median(t[lane] for t in timing.samples[kind, None, "forward"])
        out.backward_s[kind] = statistics.median(t[lane] for t in timing.samples[kind, None, "backward"])
        out.error_s[kind] = timing.error_s(kind)
        ways = timing.ways_of(kind)
        if lane == LAUNCH:  # Python's share of a recompute is the same whatever the device saves of its work
            out.recompute_s.update(((kind, way), max(timing.excess_s(kind, way, lane), 0.0)) for way in ways)
            continue
        if not ways:
            continue
        found_s = {way: max(timing.excess_s(kind, way, lane), timing.least_s(kind, way, forward_s)) for way in ways}
        out.recompute_s.update(((kind, way), s) for way, s in found_s.items())
        inside = [way for way in ways if way and isinstance(way, tuple)]  # by rising bytes
        falling = _falling(found_s[way] for way in inside)
        out.recompute_s.update(((kind, way), s) for way, s in zip(inside, falling, strict=True))
    for (direction, index), values in timing.glue.items():
        table = out.glue_forward_s if direction == "forward" else out.glue_backward_s
        table[index] = statistics.median(t[lane] for t in values[1:] or values)
    twice_s = sum(out.backward_s[timing.kinds[name]] for name in timing.differentiated)
    last = len(timing.names)
    out.glue_backward_s[last] = max(out.glue_backward_s[last] - twice_s, 0.0)
    return out
