"""One step under a plan on fake tensors, which allocate nothing, through the controller and hooks of real plans.

The forward runs the same operations in each replay, so a storage has the same name in all of them: the segment that
made it and a running number. Example: ("forward", 3, 0) is the first storage made in the forward of stage 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import Decisions
from ckptplan.core.stage import InputTensor
from ckptplan.distributed import parallel_of
from ckptplan.profiling.bytes.fake import FakeWorld, fake_parameters
from ckptplan.profiling.bytes.origins import Origin
from ckptplan.profiling.bytes.tracker import (
    Change,
    SegmentTrace,
    Sid,
    Tracker,
    owners_of_a_lone_gradient,
    stage_segment,
)
from ckptplan.profiling.target import Target
from ckptplan.profiling.values.watched import WatchedState, WatchedTensors
from ckptplan.profiling.workload.discover import FoundStages, discover_stages
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.observer import Observer
from ckptplan.runtime.recompute.call import cached_weights, shares_containers
from ckptplan.runtime.swap.packing import unowned
from ckptplan.runtime.swap.stores import NULL_STORES
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.state.cells import Snapshot
from ckptplan.state.generators import Generators, SystemDraws
from ckptplan.tensors.modules import below
from ckptplan.tensors.objects import tensors_in_objects
from ckptplan.tensors.positions import has_position
from ckptplan.tensors.private import current_graph_task
from ckptplan.tensors.quantized import named_inside
from ckptplan.tensors.storages import storages_of, tensors_in
from ckptplan.training.inputs import stage_inputs
from ckptplan.training.measure import collection_off
from ckptplan.training.step import TrainingStep

UNLISTED = "(of a parameter that the model doesn't list)"


@dataclass
class Replay:
    """Result of one replay.

    Attributes
    ----------
    forward, backward : dict
        Segment -> its trace.
    saved, inputs, returned : dict
        Segment -> storages that autograd saved, that were passed in, and that it returned, in order, each with whether
        it has a position (NOTE [Positions] in tensors/positions.py).
    linked : dict
        Segment -> those of its inputs that are, unmodified, an output of the stage that made them.
    in_objects : set
        Inputs held by plain objects among a stage's arguments. They can't move: running the stage again needs them.
    generator_bytes : dict
        Segment -> bytes of the states of the stage's own random generators, which are kept for another run.
    arguments : dict
        Segment -> the tensors passed in.
    modifies : dict
        Segments that can't run a second time -> why: they write to what they read, or what they read is written to
        before backward, or forward itself runs a backward through them.
    differentiated : dict
        Segments through which forward runs a backward after it has left them -> the graph tasks that begin in it, each
        with whether it makes a graph.
    written, written_buffers : list of str
        Qualified names of the parameters, and of the buffers, that forward writes to.
    sizes : dict
        Storage -> bytes.
    ends : dict
        Segment -> storages that it saved in graphs that the program drops before forward ends -> ("forward", the
        segment in which it does, 0), as the names of storages are, so that unfolding moves it with them.
    unread : dict
        Segments that save tensors and have no backward -> whether forward drops the graphs of all that they save.
    output : set
        Storages of the model's output.
    held : set
        Storages that the program still holds when forward ends, the output left out; of a replay that saves nothing
        alone: tensors in attributes and in hooks, and leaves that `requires_grad_` made in forward, which their
        gradients' nodes hold. They count until the end of the step, though backward may free some.
    results : dict
        The same of "output" and "loss", each alone.
    returns : list of (int, int, int)
        Where the model's forward returned, if a tracker with a model saw a whole step: the segment, and how many of its
        changes and operations came before.
    has_loss : bool
        Whether the loss is part of the output.
    rerun : dict
        Segment -> number of its forward's operations before the last tensor that autograd saves.
    copied_bytes : dict
        Segment -> bytes of the buffers that it updates and, run again, copies first.
    peak_bytes : int
        Most live bytes, without temporaries inside operations; of a replay that isn't unfolded alone.
    end_bytes : int
        Live bytes after backward, gradients included.
    draws : bool
        Forward draws from a random generator of Python's or numpy's, whose numbers may decide which operations run.
    left_bytes : int
        The part of `end_bytes` that the next step starts with, gradients left out.
    gradients : set
        Storages of the gradients that the step made and left on the model.
    named_gradients : dict
        The same, and those of parameters that the model doesn't list -> the parameters' names.
    replaced_bytes : int
        Bytes of the parameters and buffers that forward replaced by others.
    changes : list of Change
        Those after backward.
    left_at : int
        Number of these up to the point that `left_bytes` is of; behind it the model gets its own tensors back.
    origins : dict
        As the tracker's.
    """

    forward: dict[int, SegmentTrace] = field(default_factory=dict)
    backward: dict[int, SegmentTrace] = field(default_factory=dict)
    saved: dict[int, dict[Sid, bool]] = field(default_factory=dict)
    inputs: dict[int, dict[Sid, bool]] = field(default_factory=dict)
    returned: dict[int, dict[Sid, bool]] = field(default_factory=dict)
    linked: dict[int, set[Sid]] = field(default_factory=dict)
    in_objects: set[Sid] = field(default_factory=set)
    generator_bytes: dict[int, int] = field(default_factory=dict)
    arguments: dict[int, tuple[InputTensor, ...]] = field(default_factory=dict)
    modifies: dict[int, str] = field(default_factory=dict)
    differentiated: dict[int, set[tuple[int, bool]]] = field(default_factory=dict, compare=False)
    written: list[str] = field(default_factory=list)
    written_buffers: list[str] = field(default_factory=list, compare=False)
    sizes: dict[Sid, int] = field(default_factory=dict)
    ends: dict[int, dict[Sid, Sid]] = field(default_factory=dict)
    unread: dict[int, bool] = field(default_factory=dict)
    output: set[Sid] = field(default_factory=set)
    held: set[Sid] = field(default_factory=set)
    results: dict[str, set[Sid]] = field(default_factory=dict, compare=False)
    returns: list[tuple[int, int, int]] = field(default_factory=list, compare=False)
    rerun: dict[int, int] = field(default_factory=dict)
    copied_bytes: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = field(default=0, compare=False)
    end_bytes: int = 0
    left_bytes: int = 0
    has_loss: bool = True
    draws: bool = False
    gradients: set[Sid] = field(default_factory=set)
    named_gradients: dict[Sid, tuple[str, ...]] = field(default_factory=dict, compare=False)
    replaced_bytes: int = 0
    changes: list[Change] = field(default_factory=list, compare=False)
    left_at: int = field(default=0, compare=False)
    origins: dict[Sid, Origin] = field(default_factory=dict, compare=False)


class _Names:
    """Names of tensors' storages, those from before the step included.

    Parameters
    ----------
    own : set of int
        Addresses of the storages of parameters and buffers, which have no names.
    """

    def __init__(self, tracker: Tracker, own: set[int]) -> None:
        self._tracker, self._own = tracker, own
        self._outside: dict[int, tuple[int, torch.Tensor]] = {}

    def find(self, tensor: torch.Tensor) -> tuple[Sid | None, bool]:
        """The name of a tensor's storage, None for the model's own and for numbers; whether it has a position."""
        sid = self._tracker.sid(tensor)
        can = has_position(tensor, lambda storage: storage._cdata in self._own)
        if sid is None and can:
            # From before the step, or on the host: it never moves, but it counts in the order of saving.
            key = tensor.untyped_storage()._cdata
            sid = ("outside", 0, self._outside.setdefault(key, (len(self._outside), tensor.detach()))[0])
        return sid, can

    def outside(self, addresses: Iterable[int]) -> set[Sid]:
        """The names of storages from before the step."""
        return {("outside", 0, self._outside[key][0]) for key in addresses if key in self._outside}


def _state_bytes(generator: Any) -> int:
    """Bytes of the tensor that `get_state` of a PyTorch generator returns; 0 for other generators."""
    return generator.get_state().nbytes if isinstance(generator, torch.Generator) else 0


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Saved:
    """A tensor that autograd saved, which lives as long as its graph, or until backward has read it.

    Attributes
    ----------
    segment : int
        The segment of forward that saved it.
    tensor : callable
        Returns the tensor, or one with the same layout.
    """

    segment: int
    tensor: Callable[[], torch.Tensor]


class _Graphs:
    """When the graphs end in which each segment of forward saves.

    Parameters
    ----------
    position : callable
        Returns the present segment of forward.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._alive: Counter[tuple[int, Sid | None]] = Counter()
        self._ended: dict[tuple[int, Sid | None], int] = {}
        self._refs: dict[int, weakref.ref[_Saved]] = {}

    def add(self, saved: _Saved, sid: Sid | None) -> None:
        """Follow a tensor of storage `sid`; None: a parameter, or a number."""
        key, number = (saved.segment, sid), len(self._refs)

        def ended(ref: weakref.ref[_Saved]) -> None:
            self._alive[key] -= 1
            self._ended[key] = self._position()

        self._alive[key] += 1
        self._refs[number] = weakref.ref(saved, ended)

    def left(self) -> Counter[int]:
        """Segment -> how many of the tensors that it saved are still there."""
        found: Counter[int] = Counter()
        for (segment, _), count in self._alive.items():
            found[segment] += count
        return found

    def ends(self) -> dict[int, dict[Sid, Sid]]:
        """`Replay.ends`, at the end of forward."""
        found: dict[int, dict[Sid, Sid]] = {}
        for (segment, sid), end in self._ended.items():
            if sid is not None and not self._alive[segment, sid]:
                found.setdefault(segment, {})[sid] = "forward", end, 0
        return found


class _Watcher(Observer):
    """Observer of a replay: reports the current segment to the tracker, and notes the stages' inputs and outputs.

    Parameters
    ----------
    model : nn.Module
    stages : sequence of str
        Names of its stages.
    saves : bool
        False: saved tensors are dropped; a backward inside of forward gets uncounted ones of the same layout.
    """

    def __init__(
        self,
        tracker: Tracker,
        names: _Names,
        replay: Replay,
        model: nn.Module,
        stages: Sequence[str],
        *,
        saves: bool,
    ) -> None:
        self._stages = stages
        modules = dict(model.named_modules())
        self._modules = [modules.get(name.partition("#")[0]) for name in stages]
        self._tracker = tracker
        self._names = names
        self._replay = replay
        self._saves = saves
        self._forward = True
        self._whole = WatchedTensors((name, t) for name, t, _ in named_inside(model, buffers=False))
        self._buffers = WatchedTensors(model.named_buffers())
        self._model = model
        self._starts_with = self._gradients()
        self._read: dict[int, tuple[WatchedTensors, WatchedState]] = {}
        self.draws = SystemDraws()
        self.graphs = _Graphs(lambda: self._position)
        self._position = 0
        self._segments: dict[int, int] = {}
        self._given: list[tuple[torch.Tensor, int]] = []
        self._returned: dict[Sid, int] = {}

    def enter(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._move_on()
        self._segments[stage] = self._position
        leaves = pytree.tree_leaves((args, kwargs))
        used_up = next((leaf for leaf in leaves if isinstance(leaf, Iterator)), None)
        if used_up is not None:
            self._once(f"uses up an argument, a {type(used_up).__name__}")
        module = self._modules[stage]
        if module is not None and shares_containers(module, args, kwargs):
            self._once("is given a container that is also one of its attributes")
        if module is not None and cached_weights(module):
            self._once("takes parametrized weights that parametrize.cached() kept from an earlier call")
        if module is not None and any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
            self._once("has a scripted module (torch.jit), whose state can't be put back for another run")
        if module is not None:
            self._read[self._position] = WatchedTensors(module.named_parameters()), WatchedState(module, leaves)
        held = Snapshot([] if module is None else below(module), leaves).generators
        self._replay.generator_bytes[self._position] = sum(
            map(_state_bytes, {id(each): each for each in held}.values())
        )
        self.draws.restart()
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        attributes = [] if module is None else [tensor for _, tensor in Snapshot(below(module)).tensors]
        self._given = [(t, t._version) for t in [*tensors, *attributes]]
        inputs = self._replay.inputs.setdefault(self._position, {})
        linked = self._replay.linked.setdefault(self._position, set())
        for tensor in tensors:
            sid, can = self._names.find(tensor)
            if sid is None:
                continue
            inputs.setdefault(sid, can)
            self._replay.sizes[sid] = self._tracker.bytes_here(tensor)
            if self._returned.get(sid) == tensor._version:
                linked.add(sid)
        for tensor in tensors_in_objects(leaves):
            sid, _ = self._names.find(tensor)
            if sid is not None:  # running the stage again needs the object, which holds the tensor
                inputs.setdefault(sid, False)
                self._replay.sizes[sid] = self._tracker.bytes_here(tensor)
                self._replay.in_objects.add(sid)
                linked.discard(sid)
        self._replay.arguments[self._position] = stage_inputs(args, kwargs)

    def exit(self, stage: int, output: Any) -> None:
        if any(t._version != version for t, version in self._given):
            self._once("writes to its inputs, or to tensors that are plain attributes")
        if self.draws.any:
            self._once("draws from the system's entropy (random.SystemRandom, secrets), which can't be drawn again")
        self._given = []
        returned = self._replay.returned.setdefault(self._position, {})
        leaves = pytree.tree_leaves(output)
        for tensor in leaves:
            sid, can = self._names.find(tensor) if isinstance(tensor, torch.Tensor) else (None, False)
            if sid is None:
                continue
            returned.setdefault(sid, can)
            if sid[0] != "outside" and sid[1] == self._position:
                self._returned[sid] = tensor._version
        for tensor in tensors_in_objects(leaves):
            sid, _ = self._names.find(tensor)
            if sid is not None:
                returned.setdefault(sid, False)
        self._move_on()

    def backward(self, stage: int) -> None:
        self._tracker.enter_backward(self._segments[stage])

    def is_inner(self, stage: int) -> bool:
        """Whether the backward that begins in `stage` is one of forward's own, and note it."""
        if self._forward:
            task = current_graph_task(), torch.is_grad_enabled()
            self._differentiates(self._segments[stage]).add(task)
        return self._forward

    def save(self, tensor: torch.Tensor) -> _Saved:
        """Note a tensor that autograd saves, and hold it, or keep its layout alone (`saves`)."""
        sid, can = self._names.find(tensor)
        segment, out = self._position, self._replay
        out.rerun[segment] = len(self._tracker.forward[segment].ops)
        if sid is not None:
            out.sizes[sid] = self._tracker.bytes_here(tensor)
            out.saved.setdefault(segment, {}).setdefault(sid, can)
        saved = _Saved(segment, self._kept(tensor))
        self.graphs.add(saved, sid)
        return saved

    def _kept(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self._saves:
            held = unowned(tensor)
            return lambda: held
        shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return lambda: self._tracker.uncounted(shape, stride, dtype, device)

    def give_back(self, saved: _Saved) -> torch.Tensor:
        """Return a saved tensor to the backward that runs now."""
        if self._forward:
            self._differentiates(saved.segment)
        return saved.tensor()

    def _differentiates(self, segment: int) -> set[tuple[int, bool]]:
        """Note that forward runs a backward through a segment, and return its entry in `Replay.differentiated`."""
        self._once("runs backward inside its own forward")
        if segment == self._position:
            return set()
        self._once("forward itself runs backward through it", segment)
        return self._replay.differentiated.setdefault(segment, set())

    def _gradients(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._model.parameters()]

    def forward_ended(self) -> None:
        """Note which stages can't run again, since something wrote to what they read; backward follows.

        Raises
        ------
        UnsupportedModelError
            If a backward in forward has left gradients: it was the step's own.
        """
        if self._replay.differentiated and self._gradients() != self._starts_with:
            raise UnsupportedModelError(
                "step= has run backward already, which has left gradients on the model; a plan covers one forward and "
                "the backward behind it. Let step= return the loss without its backward, for a loop that accumulates "
                "gradients the loss of one micro-batch, with accumulate=True; a gradient that the loss needs (penalty, "
                "forces) comes from torch.autograd.grad"
            )
        self._forward = False
        written: set[int] = set()  # by this segment and all behind it
        later: set[Sid] = set()  # written to by those behind it
        for g, trace in reversed(self._tracker.forward.items()):
            written |= trace.written_outside
            if later.intersection(self._replay.inputs.get(g, ())):
                self._once("what it is given is written to before its backward", g)
            later.update(sid for op in trace.ops for sid in op.written)
            later.update(self._names.outside(trace.written_outside))
            if g in self._read:
                parameters, state = self._read[g]
                changed = [f"its parameter {name!r}" for name in parameters.changed(written)] + state.changed()
                if changed:
                    self._once(f"forward changes {', '.join(changed)}, which isn't put back for another run", g)
        self._replay.written = self._whole.changed(written)
        self._replay.written_buffers = self._buffers.changed(written)
        self._read.clear()

    def _once(self, why: str, segment: int | None = None) -> None:
        """Note that a stage, by default the present one, can't run a second time."""
        segment = self._position if segment is None else segment
        if segment % 2:
            self._replay.modifies.setdefault(segment, why)

    def _move_on(self) -> None:
        self._position += 1
        self._tracker.enter_segment(self._position)


@dataclass(frozen=True, slots=True)
class _Before:
    """The model's storages at the beginning of a step.

    Forward may give a parameter other data. Held here, the old storage keeps its address to itself.

    Attributes
    ----------
    own : list of torch.UntypedStorage
        Those of parameters and buffers.
    gathered : list of torch.Tensor
        The tensors in which sharded parameters are gathered.
    """

    own: list[torch.UntypedStorage]
    gathered: list[torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, tracker: Tracker) -> _Before:
        """Find the storages, and tell `tracker` which of them it doesn't count."""
        own = [*model.parameters(), *model.buffers()]
        parallel = parallel_of(model)  # of the layers that run
        inside = [t for _, t, whole in named_inside(model) if t is not whole]
        for tensor in (*own, *inside, *(p.grad for p in own if p.grad is not None), *parallel.whole_gradients()):
            tracker.outside(tensor)
        gathered = parallel.gathered()
        for tensor in gathered:
            tracker.gathers(tensor)
        return cls([s for t in (*own, *inside) for s in storages_of(t)], gathered)

    @property
    def addresses(self) -> set[int]:
        """Addresses of all of them."""
        return {s._cdata for s in (*self.own, *(t.untyped_storage() for t in self.gathered))}


def replay(
    step: TrainingStep,
    decisions: Decisions,
    target: Target,
    *,
    saves: bool = True,
    accumulating: bool = False,
    holds_output: bool = True,
    logs: bool = False,
) -> Replay:
    """Run one step on fake tensors under a plan, and count its storages.

    Parameters
    ----------
    decisions : Decisions
        The trace's segments are counted by their stages, so for a chain these are module stages alone; those of a plan
        include glue.
    saves : bool
        False: let autograd save nothing, run no backward, and note the operations' operands.
    accumulating : bool
        Every parameter has a gradient already.
    holds_output : bool
        The output is referenced during backward, beside the loss.
    logs : bool
        The replay is for its log: note origins, saved numbers, and where the model's forward returns (`Tracker`); if
        `saves` is false, it notes them but for the last in any case. Other replays are for a chain, whose menus name
        operations by their numbers (`Target.choices`).

    Raises
    ------
    UnsupportedModelError
        If forward runs the step's own backward.
    """
    out = Replay()
    owners_of_a_lone_gradient()  # cached now: it can't be measured inside a replay
    tracker = Tracker(target, step.model if logs or not saves else None, saves=saves)
    modules = dict(step.model.named_modules())
    stages = decisions.stages
    staged = [modules[name] for name in dict.fromkeys(n.partition("#")[0] for n in stages if not is_glue(n))]
    with (
        fake_parameters(step.model, tracker, step.reached(), accumulating=accumulating) as held,
        tracker.watching(staged),
        tracker.watching_model() if logs else contextlib.nullcontext(),
    ):
        before = _Before.of(step.model, tracker)
        names = _Names(tracker, before.addresses)
        watcher = _Watcher(tracker, names, out, step.model, stages, saves=saves)
        one_forward = step.fn is None
        controller = Controller(
            step.model,
            decisions,
            NULL_STORES,
            target.device,
            observers=(watcher,),
            one_forward=one_forward,
            on_move=tracker.moved,
        )
        controller.counters.runs = _Runs(tracker.stage_next)
        controller.is_inner = watcher.is_inner
        controller.install()
        try:
            # Before the tracker is entered, which would count the base that the twin of a view is made from.
            given = fake_inputs(step, tracker.fake, tracker.outside)
            numbered = not logs or any(choice.ops for choice in decisions.choices)
            # Collecting cyclic garbage would lower the counts at times that depend on chance.
            with target.choices(numbered=numbered), collection_off(), _random_states_counted(tracker, target), tracker:
                generators = Generators([g for g in held if not isinstance(g, torch.Generator)])
                with OwnHooks(watcher.save, watcher.give_back), watcher.draws:
                    output, loss = given.forward()
                generators.settle()
                out.draws = generators.drew
                watcher.forward_ended()
                _note_results(out, tracker, output, loss)
                if not holds_output:
                    output = None
                _run_backward(loss if saves else None, out, tracker, watcher.graphs)
                out.named_gradients = _named_gradients(step.model, tracker)
                del output, loss
                _note_left(out, step.model, tracker, before.own)
        finally:
            controller.remove()
            for parameter, gradient in tracker.foreign.values():
                parameter.grad = gradient
    for j, sizes in controller.counters.copied_bytes.items():
        out.copied_bytes[stage_segment(j)] = sum(map(target.rounded, sizes))
    out.forward, out.backward, out.changes = tracker.forward, tracker.backward, list(tracker.changes)
    out.origins, out.returns, out.peak_bytes = tracker.origins, tracker.returns, tracker.peak_bytes
    return out


def _note_results(out: Replay, tracker: Tracker, output: Any, loss: Any) -> None:
    """Note the storages of what forward returns."""
    for name, result in (("output", output), ("loss", loss)):
        found = {sid: t for t in tensors_in(result) if (sid := tracker.sid(t))}
        out.results[name] = set(found)
        out.sizes.update((sid, tracker.size_of(t.untyped_storage())) for sid, t in found.items())
    out.output = out.results["output"] | out.results["loss"]
    out.has_loss = bool(out.results["loss"] & out.results["output"])


def _run_backward(loss: torch.Tensor | None, out: Replay, tracker: Tracker, graphs: _Graphs) -> None:
    """Run backward, unless the replay saves nothing, and note which of forward's graphs are left before and after."""
    out.ends, left = graphs.ends(), graphs.left()
    out.unread = {g: True for g, count in left.items() if not count}
    if loss is None:
        out.held = tracker.alive() - out.output
    else:
        tracker.enter_backward()
        loss.backward()
        still = graphs.left()
        out.unread |= {g: False for g, count in left.items() if 0 < count == still[g]}
    tracker.finish()
    for g, trace in tracker.backward.items():
        if trace.ops:  # of what no hook sees, as within a checkpoint
            out.unread.pop(g, None)
    out.end_bytes = tracker.live_bytes


class _Runs(Counter[int]):
    """Counts of stages' runs; calls `begun` with the number of each stage that begins to run."""

    def __init__(self, begun: Callable[[int], None]) -> None:
        super().__init__()
        self._begun = begun

    def __setitem__(self, stage: int, count: int) -> None:
        super().__setitem__(stage, count)
        self._begun(stage)


@contextlib.contextmanager
def _random_states_counted(tracker: Tracker, target: Target) -> Iterator[None]:
    """Count the random states that the program takes, as each `torch.utils.checkpoint` does.

    On CUDA they lie on the host and take no device memory. Those of recomputed stages are added by rule.
    """
    original = torch.get_rng_state

    def counted() -> torch.Tensor:
        state = original()
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_PACKAGE):
            tracker.count(state)
        return state

    if target.is_cuda:
        yield
        return
    with mock.patch.object(torch, "get_rng_state", counted):
        yield


_PACKAGE = __name__.partition(".")[0] + "."


def _named_gradients(model: nn.Module, tracker: Tracker) -> dict[Sid, tuple[str, ...]]:
    """`Replay.named_gradients`, at the end of backward."""
    found: dict[Sid, tuple[str, ...]] = {}
    unlisted = ((UNLISTED, other) for other, _ in tracker.foreign.values())
    for name, parameter in (*model.named_parameters(), *unlisted):
        sid = None if parameter.grad is None else tracker.sid(parameter.grad)
        if sid is not None and (name != UNLISTED or sid not in found):
            found[sid] = (*found.get(sid, ()), name)
    return found


def _note_left(out: Replay, model: nn.Module, tracker: Tracker, before: Sequence[torch.UntypedStorage]) -> None:
    """Note the bytes that a step leaves on the model besides gradients, so that the next one starts with them.

    Replaced buffers, whose old storages in `before` are gone, count as nothing. Tensors left in attributes count in
    full: the next step makes them again while the old ones are still there.
    """
    now = [*model.parameters(), *model.buffers(), *parallel_of(model).shards()]
    grads = (s for t in now if t.grad is not None for s in storages_of(t.grad))
    made = {s._cdata: s for s in grads if tracker.sid_of(s)}
    present = {s._cdata for t in now for s in storages_of(t)}
    gone = {s._cdata: s for s in before if s._cdata not in present}
    out.left_at = len(tracker.changes)
    out.gradients = {sid for sid in map(tracker.sid_of, made.values()) if sid is not None}
    out.replaced_bytes = sum(map(tracker.size_of, gone.values()))
    out.left_bytes = max(tracker.live_bytes - sum(map(tracker.size_of, made.values())) - out.replaced_bytes, 0)


def fake_inputs(
    step: TrainingStep,
    fake: Callable[[torch.Tensor], torch.Tensor],
    outside: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> TrainingStep:
    """The step on fake twins of its floating inputs; `outside` is called with each tensor from before the step."""

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        outside(tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        replaced = fake(tensor)
        outside(replaced)
        return replaced

    return dataclasses.replace(
        step,
        args=pytree.tree_map_only(torch.Tensor, twin, step.args),
        kwargs=pytree.tree_map_only(torch.Tensor, twin, step.kwargs),
    )


def segment_name(stages: Sequence[str], segment: int) -> str:
    """Name of a segment of a trace: its stage's, or which stage glue lies before or after; empty without stages."""
    if segment % 2:
        return stages[segment // 2]
    if not stages:
        return ""
    after = segment // 2
    return f"(before {stages[after]})" if after < len(stages) else f"(after {stages[-1]})"


def find_stages(step: TrainingStep, target: Target) -> FoundStages:
    """The stages of `step`, found by a forward without memory.

    Raises
    ------
    UnsupportedModelError
        If no submodule saves anything for backward.
    """
    world = FakeWorld(target)
    with fake_parameters(step.model, world, step.reached()), target.choices():
        return discover_stages(fake_inputs(step, world.fake), lambda: world)
