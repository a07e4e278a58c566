"""Bytes of a step: replay it without memory under a few uniform plans and read off storages, holders and transients.

The replays go through the same controller and hooks that run a real plan:

- *program*: nothing is saved at all, so what lives on is what the program's own variables hold;
- *keep*: what every stage and the glue between them saves, and the bytes no decision changes;
- one per further option of the menus: every stage that has it that way, for what it holds unseen and its transients.

A storage has the same name in all replays (where it was made, and as which of how many), since the forward runs the
same operations in each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.device import Device
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import KEEP, Decision, Decisions
from ckptplan.core.profile import Fingerprint, Profile
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment
from ckptplan.core.stage import InputTensor, Stage
from ckptplan.core.storage import Storage
from ckptplan.profiling.bytes.fake import FakeWorld, fake_parameters
from ckptplan.profiling.bytes.menus import Choice, choose, front, list_ops, numbered
from ckptplan.profiling.bytes.real_storages import Places
from ckptplan.profiling.bytes.tracker import SegmentTrace, Sid, Tracker, learn_storages, owners_of_a_lone_gradient
from ckptplan.profiling.target import Target
from ckptplan.profiling.times.timing import Times
from ckptplan.profiling.values.watched import Watched
from ckptplan.profiling.workload.discover import Found, discover_stages
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.guard.shapes import input_tensors
from ckptplan.runtime.observer import Observer
from ckptplan.runtime.recompute.call import cached_weights, shares_containers
from ckptplan.runtime.state.cells import Snapshot, below
from ckptplan.runtime.state.generators import Generators, SystemDraws
from ckptplan.runtime.state.objects import tensors_in_objects
from ckptplan.runtime.step import TrainingStep
from ckptplan.runtime.swap.own import storages_of
from ckptplan.runtime.swap.session import has_position, unowned
from ckptplan.runtime.swap.stores import NULL_STORES

_MENU_BYTES = 1 << 16
"""A stage that holds less of its own gets no options inside it: they couldn't pay for their bookkeeping."""
_MENU_SHARE = 0.01
"""Nor do stages of a kind that together hold less than this share of what all stages do."""


@dataclass
class Replay:
    """What one replay saw.

    Attributes
    ----------
    forward, backward : dict
        Segment -> its trace.
    saved : dict
        Segment -> storages autograd saved, in order, with whether they have a position (NOTE [Positions] in
        runtime/swap/session.py).
    inputs : dict
        Segment -> storages passed in, in order, with whether they have one.
    returned : dict
        Segment -> storages in what it returns, in order, with whether they have one.
    linked : dict
        Segment -> those of its inputs that are, unmodified, an output of the stage that made them.
    in_objects : set
        Inputs that plain objects among a stage's arguments hold, so that they stay where the stage is to run again.
    generator_bytes : dict
        Segment -> bytes of the states of the stage's own random generators, which are kept for another run.
    arguments : dict
        Segment -> the tensors passed in.
    modifies : dict
        Segments that can't run a second time -> why: they write to what they read, or what they read is written to
        before backward, or they run backward inside their own forward.
    written : list of str
        The parameters that forward writes to.
    sizes : dict
        Storage -> bytes.
    dropped : dict
        Storages whose graphs the program has dropped when forward ends -> the bytes that they had; in `sizes` they have
        none.
    output : set
        Storages of the model's output.
    rerun : dict
        Segment -> how many of its forward's operations come before the last tensor that autograd saves.
    copied_bytes : dict
        Segment -> bytes of the buffers that it updates and, run again, copies first.
    end_bytes : int
        Live bytes after backward, gradients included.
    draws : bool
        Forward draws from a random generator of Python's or numpy's, whose numbers may decide what runs.
    left_bytes : int
        Those of them that the next step starts with, gradients not included.
    wrapped_bytes : int
        Numbers that became tensors, which no replay sees.
    peak_bytes : int
        Most bytes of the step's own making alive at once, temporaries inside operations not counted.
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
    written: list[str] = field(default_factory=list)
    sizes: dict[Sid, int] = field(default_factory=dict)
    dropped: dict[Sid, int] = field(default_factory=dict)
    output: set[Sid] = field(default_factory=set)
    rerun: dict[int, int] = field(default_factory=dict)
    copied_bytes: dict[int, int] = field(default_factory=dict)
    end_bytes: int = 0
    left_bytes: int = 0
    draws: bool = False
    wrapped_bytes: int = 0
    peak_bytes: int = 0


class _Names:
    """Names the storages of tensors, those from outside of the step included."""

    def __init__(self, tracker: Tracker, own: set[int]) -> None:
        self._tracker, self._own = tracker, own
        self._outside: dict[int, tuple[int, torch.Tensor]] = {}

    def find(self, tensor: torch.Tensor) -> tuple[Sid | None, bool]:
        """A tensor's storage, None for the model's own and for numbers, and whether it has a position."""
        sid = self._tracker.sid(tensor)
        can = has_position(tensor, lambda storage: storage._cdata in self._own)
        if sid is None and can:
            # From outside the step, or on the host: it never moves, but it counts in the order of saving.
            key = tensor.untyped_storage()._cdata
            sid = ("outside", 0, self._outside.setdefault(key, (len(self._outside), tensor.detach()))[0])
        return sid, can


def _tensor_attributes(module: nn.Module | None) -> list[torch.Tensor]:
    """Tensors that attributes of `module`, and of those inside, are or hold."""
    return [] if module is None else [tensor for _, tensor in Snapshot(below(module)).tensors]


def _state_bytes(generator: Any) -> int:
    """Bytes of the tensor that PyTorch gives for the state of one of its generators."""
    return generator.get_state().nbytes if isinstance(generator, torch.Generator) else 0


class _Saved(NamedTuple):
    """What autograd saved.

    Attributes
    ----------
    segment : int
        Of forward.
    tensor : callable
        Gives it, or one that lies in memory as it did.
    """

    segment: int
    tensor: Callable[[], torch.Tensor]


class _Watcher(Observer):
    """Tells the tracker where the program is, and notes what goes into stages and comes out.

    Parameters
    ----------
    model : nn.Module
    stages : sequence of str
        Its stages' names.
    saves : bool
        False: what autograd saves isn't held; a backward inside of forward gets others like it, which don't count.
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
        self._whole = Watched(model, ())
        self._read: list[tuple[int, Watched]] = []
        self.draws = SystemDraws()
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
        self._read.append((self._position, Watched(module, leaves)))
        held = Snapshot([] if module is None else below(module), leaves).generators
        self._replay.generator_bytes[self._position] = sum(
            map(_state_bytes, {id(each): each for each in held}.values())
        )
        self.draws.restart()
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        self._given = [(t, t._version) for t in [*tensors, *_tensor_attributes(self._modules[stage])]]
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
            if sid is not None:  # the call that is to be made again has the object, and that holds it
                inputs.setdefault(sid, False)
                self._replay.sizes[sid] = self._tracker.bytes_here(tensor)
                self._replay.in_objects.add(sid)
                linked.discard(sid)
        self._replay.arguments[self._position] = input_tensors(args, kwargs)

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
        self._check_begun(self._segments[stage])
        self._tracker.enter_backward(self._segments[stage])

    @property
    def segment(self) -> int:
        return self._position

    def save(self, tensor: torch.Tensor) -> _Saved:
        """Hold what autograd saves now, if anything is to be held."""
        if self._saves:
            held = unowned(tensor)
            return _Saved(self._position, lambda: held)
        shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return _Saved(self._position, lambda: self._tracker.uncounted(shape, stride, dtype, device))

    def give_back(self, saved: _Saved) -> torch.Tensor:
        """What autograd saved, for the backward that runs now.

        Raises
        ------
        UnsupportedModelError
            If forward still runs, and has left the segment that saved it.
        """
        self._check_begun(saved.segment)
        if self._forward:
            self._once("runs backward inside its own forward")
        return saved.tensor()

    def _check_begun(self, segment: int) -> None:
        if self._forward and segment != self._position:
            raise UnsupportedModelError(
                f"forward isn't over and backward runs already, in {segment_name(self._stages, segment)!r}; a plan "
                "covers one forward and the backward behind it. Let step= return the loss without its backward, for a "
                "loop that accumulates gradients that of one micro-batch, with accumulate=True; a gradient that "
                "forward needs itself (autograd.grad for a penalty or forces) has to be one of a single stage's "
                "operations: take it inside that stage, or out of the planned model"
            )

    def forward_ended(self) -> None:
        """What follows is backward."""
        self._forward = False
        written: set[int] = set()  # by this segment and all behind it
        watched = dict(self._read)
        for g, trace in reversed(self._tracker.forward.items()):
            written |= trace.written_outside
            if g in watched:
                changed = [f"its parameter {name!r}" for name in watched[g].parameters_changed(written)]
                changed += [f"its argument, a {kind}" for kind in watched[g].objects_changed()]
                if changed:
                    self._once(f"forward writes to {', '.join(changed)}", g)
        self._replay.written = self._whole.parameters_changed(written)
        self._read.clear()

    def _once(self, why: str, segment: int | None = None) -> None:
        """A stage can't run a second time."""
        segment = self._position if segment is None else segment
        if segment % 2:
            self._replay.modifies.setdefault(segment, why)

    def _move_on(self) -> None:
        self._position += 1
        self._tracker.enter_segment(self._position)


def replay(
    step: TrainingStep,
    stages: tuple[str, ...],
    choices: tuple[Decision, ...],
    target: Target,
    *,
    segments: tuple[Segment, ...] = (),
    saves: bool = True,
    accumulating: bool = False,
    tracker: Tracker | None = None,
) -> Replay:
    """Run one step without memory under `choices` and count.

    Parameters
    ----------
    stages, choices
        For a trace, of module stages only: segments of the trace are counted by them.
    segments : tuple of Segment
        Stages recomputed together, by their indices in `stages`.
    saves : bool
        False: let autograd save nothing, and run no backward.
    accumulating : bool
        Every parameter has a gradient already.
    tracker : Tracker, optional
        What counts, where more than a plain one is wanted.
    """
    out = Replay()
    owners_of_a_lone_gradient()  # measured now: inside the replay it would be in its own way
    plain = tracker is None  # for a chain, whose menus name operations by their numbers
    tracker = tracker or Tracker(target)
    device, round_to = target.device, target.round_to
    one_forward = step.fn is None
    with fake_parameters(step.model, tracker, step.reached(), accumulating=accumulating) as held:
        own = [*step.model.parameters(), *step.model.buffers()]
        for tensor in (*own, *(p.grad for p in own if p.grad is not None)):
            tracker.outside(tensor)
        # Held, since forward may give a parameter other data: an address stays nobody else's meanwhile.
        own_storages = [t.untyped_storage() for t in own]
        names = _Names(tracker, {storage._cdata for storage in own_storages})
        watcher = _Watcher(tracker, names, out, step.model, stages, saves=saves)
        controller = Controller(
            step.model,
            Decisions(stages, choices, segments),
            NULL_STORES,
            device,
            observers=(watcher,),
            one_forward=one_forward,
        )

        def pack(tensor: torch.Tensor) -> _Saved:
            sid, can = names.find(tensor)
            out.rerun[watcher.segment] = len(tracker.forward[watcher.segment].ops)
            if sid is not None:
                out.sizes[sid] = tracker.bytes_here(tensor)
                out.saved.setdefault(watcher.segment, {}).setdefault(sid, can)
            return watcher.save(tensor)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, watcher.give_back)
        controller.counters.runs = _Runs(tracker.stage_next)
        modules = dict(step.model.named_modules())
        watching = contextlib.ExitStack()
        watching.enter_context(
            tracker.watching(
                [modules[name] for name in dict.fromkeys(n.partition("#")[0] for n in stages if not is_glue(n))]
            )
        )
        controller.install()
        try:
            # Out of the tracker's sight, which would count what the twin of a view is made from.
            given = fake_inputs(step, tracker.fake, tracker.outside)
            numbered = plain or any(choice.ops for choice in choices)
            with target.choices(numbered=numbered), _no_collection(), _random_states_counted(tracker, target), tracker:
                generators = Generators([g for g in held if not isinstance(g, torch.Generator)])
                with hooks, watcher.draws:
                    output, loss = given.forward()
                generators.settle()
                out.draws = generators.drew
                watcher.forward_ended()
                out.output = {
                    sid
                    for t in pytree.tree_leaves((output, loss))
                    if isinstance(t, torch.Tensor) and (sid := tracker.sid(t))
                }
                out.sizes.update(
                    (sid, tracker.size_of(t.untyped_storage()))
                    for t in pytree.tree_leaves((output, loss))
                    if isinstance(t, torch.Tensor) and (sid := tracker.sid(t))
                )
                if saves:
                    # A graph that the program has dropped holds nothing any more; its storages keep their places in the
                    # order of saving, which counts at run time too.
                    gone = {sid for sids in out.saved.values() for sid in sids if sid[0] == "forward"} - tracker.alive()
                    out.dropped = {sid: out.sizes[sid] for sid in gone}
                    out.sizes.update((sid, 0) for sid in gone)
                    tracker.enter_backward()
                    loss.backward()
                tracker.finish()
                out.end_bytes = tracker.live_bytes
                del output, loss
                out.left_bytes = _left_bytes(step.model, tracker, own_storages)
        finally:
            controller.remove()
            watching.close()
            for parameter, gradient in tracker.foreign.values():
                parameter.grad = gradient
    for j, sizes in controller.counters.copied_bytes.items():
        out.copied_bytes[2 * j + 1] = sum(-(-nbytes // round_to) * round_to for nbytes in sizes)
    out.peak_bytes = tracker.peak_bytes
    out.forward, out.backward, out.wrapped_bytes = tracker.forward, tracker.backward, tracker.wrapped_bytes
    return out


class _Runs(Counter[int]):
    """Counts runs of stages, and tells of each that begins."""

    def __init__(self, told: Callable[[int], None]) -> None:
        super().__init__()
        self._told = told

    def __setitem__(self, stage: int, count: int) -> None:
        super().__setitem__(stage, count)
        self._told(stage)


@contextlib.contextmanager
def _random_states_counted(tracker: Tracker, target: Target) -> Iterator[None]:
    """Count the random states that the program takes, as each `torch.utils.checkpoint` does, where they lie.

    On CUDA they lie on the host. Those of recomputed stages are added by rule.
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
    torch.get_rng_state = counted
    try:
        yield
    finally:
        torch.get_rng_state = original


_PACKAGE = __name__.partition(".")[0] + "."


def _left_bytes(model: nn.Module, tracker: Tracker, before: Sequence[torch.UntypedStorage]) -> int:
    """Bytes that a step has left on the model besides gradients, so that the next one starts with them.

    Buffers that were replaced have gone; what was kept in attributes counts once more while it is made again.
    """
    now = [*model.parameters(), *model.buffers()]
    made = {s._cdata: s for t in now if t.grad is not None and tracker.sid(t.grad) for s in storages_of(t.grad)}
    present = {s._cdata for t in now for s in storages_of(t)}
    gone = {s._cdata: s for s in before if s._cdata not in present}
    return max(tracker.live_bytes - sum(map(tracker.size_of, (*made.values(), *gone.values()))), 0)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collections of cyclic garbage lower the bytes by chance; what an earlier replay left is not counted anyway."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fake_inputs(
    step: TrainingStep,
    fake: Callable[[torch.Tensor], torch.Tensor],
    outside: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> TrainingStep:
    """The step on fake twins of its floating inputs; `outside` is told of what was there before."""

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
    """What a segment of a trace is called: a stage's name, or between which stages glue lies; empty without stages."""
    if segment % 2:
        return stages[segment // 2]
    if not stages:
        return ""
    after = segment // 2
    return f"(before {stages[after]})" if after < len(stages) else f"(after {stages[-1]})"


def find_stages(step: TrainingStep, target: Target) -> Found:
    """The stages of `step`, found by a forward without memory.

    Raises
    ------
    UnsupportedModelError
        If no submodule saves anything for backward.
    """
    world = FakeWorld(target)
    with fake_parameters(step.model, world, step.reached()), target.choices():
        return discover_stages(fake_inputs(step, world.fake), lambda: world)


class Traced(NamedTuple):
    """What is known of a step without running it on its device.

    Attributes
    ----------
    chain : Profile
        With exact bytes and without times.
    times : list of Times
        For each device that isn't here.
    written : tuple of str
        The parameters that forward writes to.
    places : dict
        Segment -> where its storages are in the chain.
    """

    chain: Profile
    times: list[Times]
    written: tuple[str, ...]
    places: dict[int, Places]


def trace_chain(
    step: TrainingStep,
    names: tuple[str, ...],
    target: Target,
    *,
    resident_bytes: int,
    update_bytes: int,
    fingerprint: Fingerprint,
    menus: bool = False,
    devices: Sequence[Device] | None = None,
) -> Traced:
    """Trace `step`.

    Parameters
    ----------
    names : tuple of str
        The module stages, in call order.
    resident_bytes : int
        What is on the device before the step: parameters, buffers, gradients, optimizer state, inputs.
    update_bytes : int
        What the optimizer's update adds to what is live after backward.
    menus : bool
        With options inside the stages; their operations are run alone on the device.
    devices : sequence of Device, optional
        Those that aren't here; by default the target's own.
    """
    if devices is None:
        devices = () if target.spec is None else (target.spec,)
    while True:
        tracing = _Tracing(step, names, target, resident_bytes, update_bytes, menus)
        found = tracing.profile(fingerprint, devices)
        if not tracing.learned:
            return Traced(*found, tuple(tracing.kept.written), tracing.places())


class _Tracing:
    """The replays of one step, and the chain read off them."""

    def __init__(
        self,
        step: TrainingStep,
        names: tuple[str, ...],
        target: Target,
        resident_bytes: int,
        update_bytes: int,
        menus: bool,
    ) -> None:
        self.step, self.names, self.target = step, names, target
        self.least_bytes = target.least_moved_bytes
        self.resident_bytes, self.update_bytes = resident_bytes, update_bytes
        self.notes: list[str] = []
        self.learned = False  # sizes of storages that the replays didn't have
        self.kinds: dict[int, str] = {}
        # A frame keeps the generator's state on the CPU, where it counts; fake replays don't see it.
        self.state_bytes = 0 if target.is_cuda else torch.get_rng_state().numel()
        n = len(names)
        self.program = self._run((KEEP,) * n, saves=False)
        self.kept = self._run((KEEP,) * n)
        # These can't run a second time, and those not as a whole: what must not run again has to be saved.
        self.once = self._not_repeatable()
        self._note_modifying()
        if self.kept.draws:
            self.notes.append(
                "forward draws random numbers from Python's or numpy's generators: where they decide what runs, as "
                "where layers are left out, what is said of memory holds for steps that take the same path"
            )
        self.recomputed = self._run(
            tuple(
                KEEP if {2 * j + 1} & (self.kept.modifies.keys() | self.once.keys()) else Decision("recompute")
                for j in range(n)
            )
        )
        self.resident_bytes += self.kept.wrapped_bytes + self.kept.left_bytes
        self.segments = self._nonempty()
        self.choices = self._choose() if menus else {}
        self.storages, self.index = self._storages()

    def _run(self, choices: tuple[Decision, ...], *, saves: bool = True) -> Replay:
        found = replay(self.step, self.names, choices, self.target, saves=saves, accumulating=self.step.accumulates)
        if len(found.forward) != 2 * len(self.names) + 1:
            raise UnsupportedModelError(
                f"forward ran {len(found.forward) // 2} of the stages {', '.join(self.names)}: it takes another path "
                "each time it runs on the same inputs; have it decide by PyTorch's, Python's or numpy's random "
                "generators, which are put back between runs, or take what changes it (a counter, the time, other "
                "sources of randomness) out of it"
            )
        return found

    def _not_repeatable(self) -> dict[int, tuple[str, ...]]:
        """Stages with operations that may give other bits when run again (repeatable.py), and which; a note, too."""
        found: dict[int, tuple[str, ...]] = {}
        for g in range(1, 2 * len(self.names), 2):
            keys = [op.key for op in self.kept.forward[g].ops if not op.repeatable]
            if keys:
                found[g] = tuple(dict.fromkeys(str(key[0]) for key in keys if isinstance(key, tuple)))
        for funcs in dict.fromkeys(found.values()):
            stages = ", ".join(segment_name(self.names, g) for g, those in found.items() if those == funcs)
            self.notes.append(
                f"not recomputed as wholes: {stages}: {', '.join(funcs)} may give other bits when run again; "
                "torch.use_deterministic_algorithms(True) makes PyTorch's own operations repeatable"
            )
        return found

    def _note_modifying(self) -> None:
        """A note for each reason for which stages can't run a second time."""
        for why in dict.fromkeys(self.kept.modifies.values()):
            stages = ", ".join(
                segment_name(self.names, g) for g, its in sorted(self.kept.modifies.items()) if its == why
            )
            self.notes.append(f"kept or swapped alone: {stages}: {why}")

    def _nonempty(self) -> list[int]:
        """Segments that are stages or do something."""
        return [
            g
            for g in range(2 * len(self.names) + 1)
            if g % 2 or self.kept.forward[g].ops or (g in self.kept.backward and self.kept.backward[g].ops)
        ]

    def _choose(self) -> dict[str, list[Choice]]:
        """Kind of stage -> the choices of operations to save that its menu offers."""
        kinds: dict[str, list[int]] = {}
        for g in self.segments:
            if g % 2 and self.kept.saved.get(g) and g not in self.kept.modifies:
                kinds.setdefault(self._kind(g), []).append(g)
        own = {g: sum(self.kept.sizes[s] for s in self._own(g)) for segments in kinds.values() for g in segments}
        worth = {
            kind: segments
            for kind, segments in kinds.items()
            if max(own[g] for g in segments) >= _MENU_BYTES
            # What depends on values may run other operations in another step, or in another number.
            and not any(op.asks for g in segments for op in self.kept.forward[g].ops)
            and sum(own[g] for g in segments) >= _MENU_SHARE * sum(own.values())
        }
        runs = {kind: [numbered(self.kept.forward[g].ops) for g in segments] for kind, segments in worth.items()}
        seconds = self.target.times(op.key for run in runs.values() for op in run[0])
        written = {s for trace in self.kept.forward.values() for op in trace.ops for s in op.written}
        held = {s for inputs in self.kept.inputs.values() for s in inputs}
        held.update(s for g, saved in self.kept.saved.items() if g % 2 == 0 for s in saved)
        out = {}
        for kind, segments in worth.items():
            rerun = max(len(numbered(self.kept.forward[g].ops[: self.kept.rerun[g]])) for g in segments)
            ops = list_ops(runs[kind], rerun, written, held.__contains__, seconds)
            total_s = sum(op.seconds for op in ops)
            out[kind] = choose(front(ops), total_s, min(own[g] for g in segments))
        return out

    def _own(self, g: int) -> list[Sid]:
        """What a kept stage holds of its own making, and nobody holds when it is recomputed."""
        others = {s for h, inputs in self.kept.inputs.items() if h != g for s in inputs}
        return [s for s in self.kept.saved.get(g, {}) if s[1] == g and s[0] == "forward" and s not in others]

    def _outputs(self, g: int, choice: Choice) -> dict[Sid, tuple[int, bool]]:
        """Storages that stage makes in the operations of `choice`, in order: bytes, and whether they have positions."""
        ops = numbered(self.kept.forward[g].ops)
        return {s: made for number in choice.ops for s, made in ops[number].made.items()}

    def _storages(self) -> tuple[list[Storage], dict[Sid, int]]:
        position = {g: k for k, g in enumerate(self.segments)}

        def at(segment: int) -> int:
            while segment not in position:
                segment -= 1
                if segment < 0:
                    return -1
            return position[segment]

        last_seen: dict[Sid, int] = {}
        for k, g in enumerate(self.segments):
            for sid in self.program.forward[g].present:
                last_seen[sid] = k
        wanted: dict[Sid, int] = {}
        for sids in (*self.kept.saved.values(), *self.kept.inputs.values(), sorted(self.kept.output)):
            for sid in sids:
                if sid[0] != "backward":
                    wanted.setdefault(sid, self.kept.sizes[sid])
        for g in self.segments:
            for choice in self.choices.get(self._kind(g), ()) if g % 2 else ():
                wanted |= {s: nbytes for s, (nbytes, _) in self._outputs(g, choice).items() if nbytes}
        storages: list[Storage] = []
        index: dict[Sid, int] = {}
        for sid, nbytes in wanted.items():
            if sid[0] == "outside":
                index[sid] = len(storages)
                storages.append(Storage(f"input {sid[2]}", nbytes, -1, -1, to_end=True))
                continue
            born = at(sid[1])
            until = max(last_seen.get(sid, born), born)
            index[sid] = len(storages)
            name = f"{segment_name(self.names, sid[1])}/{sid[2]}"
            stays = nbytes < self.least_bytes or sid in self.kept.in_objects
            dropped = self.kept.dropped.get(sid, 0)
            storages.append(Storage(name, nbytes, born, until, sid in self.kept.output, stays, dropped))
        return storages, index

    def _extra(self, nbytes: int, name: str, k: int) -> int:
        self.storages.append(Storage(name, nbytes, k, k))
        return len(self.storages) - 1

    def profile(self, fingerprint: Fingerprint, devices: Sequence[Device]) -> tuple[Profile, list[Times]]:
        draft = self._draft(fingerprint)
        base_forward, base_backward, stages = self._bases(draft)
        draft = dataclasses.replace(
            draft,
            stages=stages,
            storages=tuple(self.storages),
            base_forward_bytes=base_forward,
            base_backward_bytes=base_backward,
        )
        replays = {"keep": self.kept, "recompute": self.recomputed}
        for name in dict.fromkeys(option.name for stage in draft.stages for option in stage.options):
            if name not in replays:
                replays[name] = self._run(self._decisions(draft, name))
                draft = self._with_unseen(draft, name, replays[name])
        peaks = self._peaks(replays)
        times = [self._times(draft, replays, dataclasses.replace(self.target, spec=device)) for device in devices]
        stages = draft.stages
        for name in peaks:
            stages = self._with_transients(draft, stages, name, peaks[name])
        end = self.resident_bytes + self.kept.end_bytes
        measured = dataclasses.replace(
            draft,
            stages=stages,
            resident_bytes=self.resident_bytes,
            update_peak_bytes=end + self.update_bytes,
            notes=tuple(self.notes),
        )
        return measured, times

    def places(self) -> dict[int, Places]:
        """Where the storages of each segment are in the chain."""

        def positioned(table: dict[int, dict[Sid, bool]], g: int) -> tuple[int, ...]:
            return tuple(self.index.get(sid, -1) for sid, can in table.get(g, {}).items() if can)

        kept = self.kept
        return {
            g: Places(positioned(kept.inputs, g), positioned(kept.returned, g), positioned(kept.saved, g), stage=k)
            for k, g in enumerate(self.segments)
        }

    def _times(self, draft: Profile, replays: dict[str, Replay], target: Target) -> Times:
        """Sums over the operations that each stage ran, and ran again, in the replays."""
        seconds = target.times(
            op.key
            for r in replays.values()
            for table in (r.forward, r.backward)
            for trace in table.values()
            for op in trace.ops
        )

        def total(table: dict[int, SegmentTrace], g: int) -> float:
            return sum(seconds.get(op.key, 0.0) for op in table[g].ops) if g in table else 0.0

        out = Times()
        for stage, g in zip(draft.stages, self.segments, strict=True):
            forward_s, backward_s = total(self.kept.forward, g), total(self.kept.backward, g)
            if stage.is_glue:
                out.glue_forward_s[g // 2], out.glue_backward_s[g // 2] = forward_s, backward_s
                continue
            out.forward_s[stage.kind], out.backward_s[stage.kind] = forward_s, backward_s
            for option in stage.options:
                if option.recomputes:
                    again_s = total(replays[option.name].backward, g) - backward_s
                    out.recompute_s[stage.kind, option.ops] = max(again_s, 0.0)
        return out

    def _draft(self, fingerprint: Fingerprint) -> Profile:
        """The chain with every option and what it holds, as far as hooks show it."""
        stages = []
        for g in self.segments:
            saved = {s: can for s, can in self.kept.saved.get(g, {}).items() if s in self.index}
            is_stage = g % 2 == 1
            keep = Option(
                "keep",
                saved=tuple(self.index[s] for s, can in saved.items() if can and is_stage),
                pinned=tuple(self.index[s] for s, can in saved.items() if not (can and is_stage)),
                forward_bytes=0,
                backward_bytes=0,
            )
            menu = [keep]
            if is_stage and saved:
                menu += self._all_moved(keep, "swap")
                if self._kind(g) in self.choices:
                    menu += self._half_moved(keep, "swap-1")
                if g not in self.kept.modifies:
                    again = self._recompute(g)
                    if g not in self.once:
                        menu += [again, *self._all_moved(again, "recompute+swap")]
                    menu += self._selective(g, again)
            again_held = {s for option in menu if option.name == "recompute" for s in option.held}
            linked = (self.index[s] for s in self.kept.linked.get(g, ()) if s in self.index)
            stages.append(
                Stage(
                    name=segment_name(self.names, g),
                    kind=self._kind(g),
                    options=tuple(menu),
                    forward_s=0.0,
                    backward_s=0.0,
                    linked=tuple(sorted(again_held.intersection(linked))),
                    inputs=self.kept.arguments.get(g),
                )
            )
        n = len(stages)
        return Profile(
            tuple(stages), tuple(self.storages), (0,) * n, (0,) * n, 0, Link(1.0, 1.0), fingerprint=fingerprint
        )

    def _recompute(self, g: int) -> Option:
        inputs = {self.index[s]: can for s, can in self.kept.inputs[g].items() if s in self.index}
        return Option(
            "recompute",
            saved=tuple(s for s, can in inputs.items() if can),
            pinned=tuple(s for s, can in inputs.items() if not can),
            forward_bytes=0,
            backward_bytes=0,
            recomputes=True,
        )

    def _selective(self, g: int, again: Option) -> list[Option]:
        """Options that save some operations' outputs on the device; for the most of them also all away, and half."""
        out: list[Option] = []
        choices = self.choices.get(self._kind(g), [])
        for n, choice in enumerate(choices, 1):
            made = {self.index[s]: can for s, (_, can) in self._outputs(g, choice).items() if s in self.index}
            plain = dataclasses.replace(
                again,
                name=f"selective-{n}",
                saved=(*(s for s, can in made.items() if can), *(s for s in again.saved if s not in made)),
                pinned=(*(s for s, can in made.items() if not can), *again.pinned),
                ops=choice.ops,
            )
            out.append(plain)
        if choices:
            out += self._all_moved(plain, f"selective-{len(choices)}+swap")
            out += self._half_moved(plain, f"selective-{len(choices) + 1}+swap")
        return out

    def _half_moved(self, option: Option, name: str) -> list[Option]:
        """`option` with the largest of what is its stage's own moved, up to half of the bytes, if that divides it."""
        own = {s for inputs in self.kept.inputs.values() for s in inputs}
        shared = {self.index[s] for s in own if s in self.index}
        sizes = {
            p: self.storages[s].nbytes
            for p, s in enumerate(option.saved)
            if s not in shared and not self.storages[s].to_end and not self.storages[s].stays
        }
        moves: list[int] = []
        left = sum(sizes.values()) // 2
        for p in sorted(sizes, key=lambda p: (-sizes[p], p)):
            if sizes[p] <= left or not moves:
                moves.append(p)
                left -= sizes[p]
        if len(moves) in (0, len(sizes)):
            return []
        return [dataclasses.replace(option, name=name, moves=tuple(sorted(moves)))]

    def _all_moved(self, option: Option, name: str) -> list[Option]:
        """`option` with everything moved, where there is anything that may be."""
        if all(self.storages[s].to_end or self.storages[s].stays for s in option.saved):
            return []
        return [dataclasses.replace(option, name=name, moves=tuple(range(len(option.saved))))]

    def _kind(self, g: int) -> str:
        if g not in self.kinds:
            digest = hashlib.sha256()
            for op in self.kept.forward[g].ops:
                digest.update(repr(op.key).encode())
            digest.update(self.kept.modifies.get(g, "").encode())  # what can't run again is another kind
            self.kinds[g] = f"{'stage' if g % 2 else 'glue'} {digest.hexdigest()[:12]}"
        return self.kinds[g]

    def _bases(self, draft: Profile) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Stage, ...]]:
        """Bytes that no decision changes, and what stages hold beyond what hooks show.

        Autograd nodes may hold tensors that no hook sees (attributes of a custom Function, for one): such bytes show as
        a base that is larger under keep than under recompute, and are pinned to the stage where the difference begins.
        """
        keep, again = _uniform(draft.stages, "keep"), _uniform(draft.stages, "recompute")
        held_keep, held_again = residency(draft, keep), residency(draft, again)
        kept_f = [self.kept.forward[g].start_bytes - held_keep.forward_bytes[k] for k, g in enumerate(self.segments)]
        again_f = [
            self.recomputed.forward[g].start_bytes - held_again.forward_bytes[k] for k, g in enumerate(self.segments)
        ]
        stages = list(draft.stages)
        hidden_keep = hidden_again = 0
        base_forward = []
        for k in range(len(stages)):
            base = self.resident_bytes + min(kept_f[k] - hidden_keep, again_f[k] - hidden_again)
            base_forward.append(max(base, 0))  # less than 0 where more is saved from outside than is known of
            if k + 1 == len(stages):
                break
            difference = (kept_f[k + 1] - hidden_keep) - (again_f[k + 1] - hidden_again)
            stage = stages[k]
            if difference > 0:
                s = self._extra(difference, f"{stage.name}/unseen", k)
                stages[k] = _pin(stage, s, lambda option: not option.recomputes)
                hidden_keep += difference
            elif difference < 0 and stage.recompute is not None:
                s = self._extra(-difference, f"{stage.name}/unseen", k)
                stages[k] = _pin(stage, s, lambda option: option.recomputes)
                hidden_again -= difference
        for k, stage in enumerate(stages):
            if self._state(k) and any(option.recomputes for option in stage.options):
                s = self._extra(self._state(k), f"{stage.name}/random state", k)
                stages[k] = _pin(stage, s, lambda option: option.recomputes)
        complete = dataclasses.replace(draft, stages=tuple(stages), storages=tuple(self.storages))
        keep, again = _uniform(stages, "keep"), _uniform(stages, "recompute")
        held_keep, held_again = residency(complete, keep), residency(complete, again)
        base_backward = []
        for k, g in enumerate(self.segments):
            kept_b = self.kept.backward[g].start_bytes - held_keep.backward_bytes[k]
            again_b = self.recomputed.backward[g].start_bytes - held_again.backward_bytes[k]
            base_backward.append(max(self.resident_bytes + max(kept_b, again_b + self._states(again[: k + 1])), 0))
        return tuple(base_forward), tuple(base_backward), tuple(stages)

    def _state(self, k: int) -> int:
        """Bytes of the random states that stage `k` keeps for another run, its own generators' included."""
        return self.state_bytes and self.state_bytes + self.kept.generator_bytes.get(self.segments[k], 0)

    def _states(self, options: Sequence[Option], first: int = 0) -> int:
        """Bytes of the random states that options of the stages from `first` on hold and no replay sees."""
        return sum(self._state(k) for k, option in enumerate(options, first) if option.recomputes)

    def _again_bytes(self, g: int) -> int:
        """What a stage adds when it runs again, beyond what it does in forward."""
        return self._state(self.segments.index(g)) + self.recomputed.copied_bytes.get(g, 0)

    def _collected_bytes(self, g: int) -> int:
        """What a stage makes and others keep besides its output (features, by a hook): it's there anew in each run."""
        trace, after = self.program.forward[g], self.program.forward[g + 1].present
        returned = self.program.returned.get(g, {})
        return sum(nbytes for op in trace.ops for s, (nbytes, _) in op.made.items() if s in after and s not in returned)

    def _decisions(self, draft: Profile, name: str) -> tuple[Decision, ...]:
        """Every stage under the option of that name, what moves away in every step but its stage's own."""
        options = _uniform(draft.stages, name)
        moves = residency(draft, options).moves
        # The controller counts module stages alone.
        modules = [k for k, g in enumerate(self.segments) if g % 2]
        return tuple(
            Decision(
                options[k].action,
                moves[k],
                j if moves[k] else None,
                j if moves[k] else None,
                options[k].name,
                options[k].ops,
            )
            for j, k in enumerate(modules)
        )

    def _with_unseen(self, draft: Profile, name: str, seen: Replay) -> Profile:
        """Pin to the option of that name what its replay held beyond what the draft says."""
        options = _uniform(draft.stages, name)
        held = residency(draft, options)
        stages = list(draft.stages)
        hidden = 0
        for k in range(len(stages) - 1):
            explained = held.forward_bytes[k + 1] - self._states(options[: k + 1]) + hidden
            difference = self.resident_bytes + seen.forward[self.segments[k + 1]].start_bytes - explained
            if difference > 0 and stages[k].find(name) is not None:
                s = self._extra(difference, f"{stages[k].name}/unseen under {name}", k)
                stages[k] = _pin(stages[k], s, lambda option: option.name == name)
                hidden += difference
        return dataclasses.replace(draft, stages=tuple(stages), storages=tuple(self.storages))

    def _peaks(self, replays: dict[str, Replay]) -> dict[str, list[tuple[int, int]]]:
        """Per option name and step, live bytes at the worst moment of forward and backward, temporaries included."""
        keys = [
            op.key
            for r in replays.values()
            for table in (r.forward, r.backward)
            for trace in table.values()
            for op in trace.ops
        ]
        extra, failed, storages = self.target.workspaces(keys)
        traces = (t for r in replays.values() for table in (r.forward, r.backward) for t in table.values())
        self.learned = learn_storages(self.target, traces, storages)
        if failed:
            self.notes.append(f"temporaries not measured for: {', '.join(sorted(set(failed)))}")
        return {
            name: [
                (_peak(r.forward[g], extra), _peak(r.backward[g], extra) if g in r.backward else 0)
                for g in self.segments
            ]
            for name, r in replays.items()
        }

    def _with_transients(
        self, draft: Profile, stages: tuple[Stage, ...], name: str, peaks: list[tuple[int, int]]
    ) -> tuple[Stage, ...]:
        """`stages` with what the option of that name adds in each, beyond what `draft` says is there."""
        options = _uniform(draft.stages, name)
        held = residency(draft, options)
        out = []
        for k, stage in enumerate(stages):
            option = stage.find(name)
            if option is None:
                out.append(stage)
                continue
            forward = self.resident_bytes + peaks[k][0] - held.forward_bytes[k] + self._states(options[:k])
            backward = self.resident_bytes + peaks[k][1] - held.backward_bytes[k] + self._states(options[: k + 1])
            state = self._states([option], k)
            # Kept by a segment's sweep it runs again, with copies of buffers and of the random state.
            again = 0 if option.recomputes or stage.recompute is None else self._again_bytes(self.segments[k])
            if stage.recompute is not None:  # in a segment's sweep, whether it saves there or not
                again += self._collected_bytes(self.segments[k])
            measured = dataclasses.replace(
                option, forward_bytes=max(forward, 0) + state + again, backward_bytes=max(backward, 0) + 2 * state
            )
            out.append(_replaced(stage, measured))
        return tuple(out)


def _uniform(stages: Sequence[Stage], name: str) -> list[Option]:
    """Per stage, the option of that name, or keep where it has none."""
    return [stage.find(name) or stage.keep for stage in stages]


def _replaced(stage: Stage, option: Option) -> Stage:
    """`stage` with `option` in place of the one of the same name."""
    return dataclasses.replace(
        stage, options=tuple(option if option.name == other.name else other for other in stage.options)
    )


def _pin(stage: Stage, storage: int, where: Callable[[Option], bool]) -> Stage:
    """`stage` with one more pinned storage in some of its options."""
    return dataclasses.replace(
        stage,
        options=tuple(
            dataclasses.replace(option, pinned=(*option.pinned, storage)) if where(option) else option
            for option in stage.options
        ),
    )


def _peak(trace: SegmentTrace, extra: dict[Hashable, int]) -> int:
    peak = max(trace.start_bytes, 0)
    for op in trace.ops:
        peak = max(peak, op.after, op.before + extra.get(op.key, 0))
    return peak
