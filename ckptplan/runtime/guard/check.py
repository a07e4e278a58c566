"""Digests and spots of saved tensors, compared with those of what comes back (`apply(..., check=)`).

A digest is one of a whole tensor (`digests.py`), a spot has a few of its elements (`spots.py`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ckptplan.core.errors import CheckError, InvalidInputError
from ckptplan.runtime.guard.digests import PLAIN, Bench, Digest, can_be_digested, undisturbed
from ckptplan.runtime.guard.spots import Sheet, Spot, is_written_whole, read, spot_of
from ckptplan.state.cells import Contents, Snapshot
from ckptplan.state.flags import FLAGS, flags
from ckptplan.state.generators import Generators
from ckptplan.tensors import accelerator
from ckptplan.tensors.accelerator import generator_states
from ckptplan.tensors.modules import below
from ckptplan.tensors.private import (
    NormBase,
    current_graph_task,
    dispatch_modes,
    function_modes,
    is_traceable_wrapper_subclass,
)

if TYPE_CHECKING:
    from ckptplan.runtime.recompute.call import PlannedStage

When = Literal["sampled", "always", "off"]
WHEN: tuple[When, ...] = ("sampled", "always", "off")


def require_when(check: object) -> None:
    """Raise `InvalidInputError` unless `check` is one of `WHEN`."""
    if check not in WHEN:
        raise InvalidInputError(f"check={check!r}; it is {', '.join(map(repr, WHEN[:-1]))} or {WHEN[-1]!r}")


FIRST = 3
EVERY = 100
"""For "sampled": the first `FIRST` passes are checked, then one in `EVERY` on average, chosen at random. With a fixed
interval, some of the passes that make up one step might never be checked."""
ALL = range(1 << 62)  # all numbers of saved tensors


What = str | Callable[[], str]
"""A text, or a function that returns it; it is called only for an error."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two digests or spots that should be equal, and the texts for the error if they aren't.

    Attributes
    ----------
    first, again : Digest or Spot
        Those from forward and from now.
    stage, what, cause : str
        The stage, the compared value (or a function that names it), and the likely cause of a difference.
    """

    first: Any
    again: Any
    stage: str
    what: What
    cause: str

    @property
    def is_known(self) -> bool:
        """Whether the values have been read."""
        return self.first.values is not None and self.again.values is not None

    @property
    def is_equal(self) -> bool:
        """Whether the values have been read and are equal."""
        return self.is_known and self.first.is_like(self.again)


class _Comparison:
    """Records digests or spots of tensors in forward, and compares them with the tensors that come back.

    Attributes
    ----------
    stages : sequence of str
        Names of the plan's stages.
    device : torch.device
        Where the plan runs.
    """

    stages: Sequence[str] = ()
    device: torch.device

    def take(self, tensor: torch.Tensor) -> Any:
        """Return the digest or spot of `tensor` as it is now; None if it isn't compared."""
        raise NotImplementedError

    def compare(self, first: Any, tensor: torch.Tensor, stage: str, what: What, cause: str) -> None:
        """Record that `tensor` should be as it was.

        Parameters
        ----------
        first : Digest or Spot, optional
            The one taken in forward; None: nothing is compared.
        stage, what, cause
            As of a `_Pair`.
        """
        raise NotImplementedError

    def stage_ended(self) -> None:
        """Look again at what the last stage saved, since another stage begins or forward has ended."""

    def saves(self, index: int, tensor: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Take the digest or spot of a tensor that stage `index` saves; return a function that compares another tensor.

        The function is called with the tensor that the user's saved-tensor hooks get.
        """
        first, stage = self.take(tensor), self.stages[index]
        return lambda now: self.compare(first, now, stage, "a tensor that autograd saves in it", _PACKED_LATE)

    def leaves(self, record: Any, index: int) -> None:
        """Check that a record's storage, which is swapped out for stage `index`, comes back as it is now."""
        if record.on_return is not None:
            return
        with accelerator.on_stream(record.home):
            first = self.take(record.source().view(-1))
        if first is not None:
            what = f"a storage of {record.nbytes} bytes that it had swapped out"
            stage = self.stages[index]
            record.on_return = lambda whole: self.compare(first, whole.view(-1), stage, what, _COPY)


class Checks(_Comparison):
    """The checks of one applied plan, which compare digests themselves.

    Parameters
    ----------
    device : torch.device
        Where the plan runs.
    always : bool
        Whether digests are compared in every pass, or in some (`FIRST`, `EVERY`) and spots in the others.

    Attributes
    ----------
    device : torch.device
        As given.
    lock : threading.RLock
        Held while digests and spots are taken and read.
    passes, tensors : int
        Numbers of passes with digests and of tensors that were compared in them.
    """

    def __init__(self, device: torch.device, *, always: bool) -> None:
        self.passes = self.tensors = 0
        self.device = device
        self._always = always
        self._seen = 0
        self._random = random.Random(0)
        self._next = FIRST + EVERY
        self._benches = {device.type: Bench(device)}
        self._spots = Spots(self, on_host=always or not accelerator.is_accelerator(device))
        self._pairs: list[_Pair] = []
        self._places: list[_Place] = []
        self._looked = 0  # number of these that `stage_ended` has seen
        self._late: list[_Pair] = []  # of backwards that have ended, whose spots haven't been read
        self._task = -1
        self.lock = threading.RLock()

    def begin(self, stages: Sequence[str]) -> Checks | Spots | None:
        """Begin a pass of `stages`; return the object that checks it, or None if the pass isn't checked."""
        if current_graph_task() == -1:
            self.forget()
        self.settle()
        self.stages = self._spots.stages = stages
        if self._places:
            self._places = [place for place in self._places if place.is_there]
        self._looked = len(self._places)
        self._seen += 1
        digests = self._always or self._seen <= FIRST
        if not digests and self._seen >= self._next:
            digests = True
            self._next += self._random.randint(EVERY // 2, EVERY + EVERY // 2)
        if accelerator.is_capturing(self.device):
            return None
        self.passes += digests
        return self if digests else self._spots

    def take(self, tensor: torch.Tensor) -> Digest | None:
        """Return the digest of `tensor` as it is now; None if no digest can be taken of it."""
        if not can_be_digested(tensor):
            return None
        with self.lock, undisturbed():
            bench = self._benches.get(tensor.device.type)
            if bench is None:
                bench = self._benches[tensor.device.type] = Bench(tensor.device)
            return bench.take(tensor) if bench.device == tensor.device else None

    def compare(self, first: Digest | None, tensor: torch.Tensor, stage: str, what: What, cause: str) -> None:
        """Record that `tensor` should have the digest `first`."""
        if first is None or first.strides != tensor.stride():
            return
        again = self.take(tensor)
        if again is None:
            return
        with self.lock:
            self.tensors += 1
            self.add(_Pair(first, again, stage, what, cause))

    def leaves(self, record: Any, index: int) -> None:
        """Check as well that nothing writes to the tensor that was saved, if other code holds it."""
        if record.on_return is None:
            with accelerator.on_stream(record.home):
                digest = self.take(record.saved)
                if digest is not None:
                    what = f"a tensor that it swaps out, {_described(record.saved.dtype, record.saved.shape)}"
                    self.watch(_Place(record.saved, digest, self.stages[index], what))
        super().leaves(record, index)

    def stage(self, stage: PlannedStage) -> StageCheck:
        """Return the comparison of one call of a stage with its recompute."""
        return StageCheck(self, stage)

    def watch(self, place: _Place) -> None:
        """Record that the tensor at `place` should be unchanged when backward begins."""
        self._places.append(place)

    def stage_ended(self) -> None:
        """Take digests of what the stage before saved and is alive elsewhere, which may be freed before backward."""
        for place in self._places[self._looked :]:
            with accelerator.on_stream(place.stream):
                there = place.tensor()
                place.later = None if there is None else self.take(there)
        self._looked = len(self._places)

    def backward_begins(self) -> None:
        """Compare the tensors that stages saved and that are still alive elsewhere, or were behind their stage.

        Plain training would use them in backward: a write to them would change its gradients but not the recompute's.
        """
        places, self._places, self._looked = self._places, [], 0
        for place in places:
            with accelerator.on_stream(place.stream):
                there = place.tensor()
                if there is not None:
                    self.compare(place.digest, there, place.stage, place.what, _EDITED)
            if there is None and place.later is not None and not place.is_there:
                self.tensors += 1
                self.add(_Pair(place.digest, place.later, place.stage, place.what, _EDITED))

    def found(self, stage: str, what: str, cause: str) -> None:
        """Record that `what`, which is no tensor, differs from forward."""
        self.add(_Pair(Digest((), []), Digest((), [0]), stage, what, cause))

    def add(self, pair: _Pair) -> None:
        """Record a pair, which is compared when the present backward has ended."""
        with self.lock:
            self._pairs.append(pair)
            task = current_graph_task()
            if task == -1:  # a saved tensor is read outside of any backward
                self.finish()
            elif task != self._task:
                self._task = task
                Variable._execution_engine.queue_callback(self._task_ends)

    def _task_ends(self) -> None:
        # An error in a callback skips the callbacks behind it, which free memory, so `finish` is queued last.
        Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Compare the pairs that were recorded since the last call; spots of accelerators are sent to the host.

        Raises
        ------
        CheckError
            If any pair differs.
        """
        if not self._pairs:
            return
        with self.lock, undisturbed():
            pairs, self._pairs = self._pairs, []
            for bench in self._benches.values():
                bench.read()
            if self._spots.sheet is not None:
                self._spots.sheet.send()
        self._judge(pairs, "this")

    def settle(self, *, wait: bool = False) -> None:
        """Compare the spots of earlier backwards that are on the host by now; `wait`: all of them.

        Raises
        ------
        CheckError
            If any of them differs.
        """
        if self._late:
            assert self._spots.sheet is not None
            with self.lock, undisturbed():
                if wait:
                    self._spots.sheet.read_all()
                else:
                    self._spots.sheet.arrived()
                    self._spots.sheet.send()
                pairs, self._late = self._late, []
            self._judge(pairs, "an earlier")

    def _judge(self, pairs: list[_Pair], step: str) -> None:
        differing = [pair for pair in pairs if pair.is_known and not pair.is_equal]
        if differing:
            self._late.clear()
            raise _error(differing, step)
        self._late += [pair for pair in pairs if not pair.is_known]

    def forget(self) -> None:
        """Drop the pairs that haven't been compared, which belong to a backward that failed."""
        self._pairs.clear()

    def close(self) -> None:
        """Free the memory of digests and spots; it is allocated again if graphs that are still alive need it."""
        self.forget()
        with self.lock, undisturbed():
            for bench in self._benches.values():
                bench.read()
            self._benches.clear()
            if self._spots.sheet is not None:
                self._spots.sheet.free()


class Spots(_Comparison):
    """Compares spots, in the passes of one applied plan in which `checks` compares no digests (NOTE [Spots])."""

    def __init__(self, checks: Checks, *, on_host: bool) -> None:
        self.checks, self.device = checks, checks.device
        self.sheet = None if on_host else Sheet(checks.device)

    def take(self, tensor: torch.Tensor) -> Spot | None:
        """Return the spot of `tensor`, which needs no gradient, as it is now; None if none is taken of it."""
        if dispatch_modes() or function_modes():
            with undisturbed():
                return self._take(tensor)
        return self._take(tensor)

    def _take(self, tensor: torch.Tensor) -> Spot | None:
        found = spot_of(tensor)
        if found is None:
            return None
        if self.sheet is not None and accelerator.is_accelerator(tensor.device):
            with self.checks.lock:
                return self.sheet.take(*found) if tensor.device == self.checks.device else None
        return read(*found) if tensor.is_cpu else None

    def compare(self, first: Spot | None, tensor: torch.Tensor, stage: str, what: What, cause: str) -> None:
        """Record that `tensor` should have the spot `first`, unless it is known by now that it has."""
        again = None if first is None else self.take(tensor.detach() if tensor.requires_grad else tensor)
        if first is None or again is None or again.strides != first.strides:
            return
        pair = _Pair(first, again, stage, what, cause)
        if not pair.is_equal:
            self.checks.add(pair)

    def backward_begins(self) -> None:
        """Compare the spots of earlier backwards that are on the host by now."""
        self.checks.settle()

    def stage(self, stage: PlannedStage) -> StageSpots:
        """Return the comparison of one call of a stage with its recompute."""
        return StageSpots(self, stage)


class StageSpots:
    """Comparison of what one call of a stage saves with what its recompute saves, by spots.

    Parameters
    ----------
    by : Spots or Checks
        The object that compares tensors.

    Attributes
    ----------
    name : str
        The stage's name.
    numbers : container of int
        Numbers of the saved tensors that are compared.
    """

    def __init__(self, by: _Comparison, stage: PlannedStage) -> None:
        self.by, self.name, self._module, self._sinks = by, stage.name, stage.module, stage.sinks
        self._recorder = stage.sinks.recorder()  # learns of which saved tensors spots are taken
        self.numbers: Container[int] = stage.sinks.numbers if self._recorder is None else ALL
        self._saved: dict[int, Any] = {}
        self._cause = _SPOT

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` unchanged: inputs and state are compared by digests alone."""
        return forward

    def unchanged(self) -> contextlib.AbstractContextManager[None]:
        """Check that the code inside leaves buffers on accelerators unchanged; `Call` checks those on the host."""
        if not accelerator.is_accelerator(self.by.device):
            return contextlib.nullcontext()
        # Running statistics are copies in a recompute.
        return self._buffers_unchanged(m for m in self._module.modules() if not isinstance(m, NormBase))

    @contextlib.contextmanager
    def _buffers_unchanged(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        buffers = {id(b): (name, b) for m in modules for name, b in m._buffers.items() if b is not None}
        before = [(name, buffer, self.by.take(buffer)) for name, buffer in buffers.values()]
        try:
            yield
        finally:
            for name, buffer, first in before:
                self.by.compare(first, buffer, self.name, f"its buffer {name!r}", _LEFT)

    def save(self, number: int, tensor: torch.Tensor) -> None:
        """Take the digest or spot of the tensor that the first run saves as number `number`."""
        if self._recorder is not None:
            self._recorder.save(tensor)
        self._saved[number] = self.by.take(tensor) if is_written_whole(tensor.dtype, tensor.dim()) else None

    def skip(self, number: int) -> None:
        """Don't compare tensor `number`, which had no values yet when it was saved."""
        self._saved.pop(number, None)

    def compare_saved(self, number: int, tensor: torch.Tensor) -> None:
        """Compare the tensor that a later run saves as number `number`."""
        what = functools.partial(_saved_as, number, tensor.dtype, tensor.shape)
        self.by.compare(self._saved.get(number), tensor, self.name, what, self._cause)

    def returned(self) -> None:
        """Note that a recompute returns the result of the operation that runs."""
        if self._recorder is not None:
            self._recorder.returned()

    def ended(self, count: int) -> None:
        """Note that the first run has ended, in which `count` tensors were saved."""
        self._sinks.ended(count, self._recorder)
        self._recorder = None


class StageCheck(StageSpots):
    """Comparison of one call of a stage with its recompute: parameters, buffers, inputs and saved tensors."""

    by: Checks

    def __init__(self, checks: Checks, stage: PlannedStage) -> None:
        super().__init__(checks, stage)
        self.numbers, self._cause = ALL, _SAVED
        self._given: list[Any] = []
        self._inputs: list[Digest | None] | None = None
        self._state: dict[tuple[str, str], Digest | None] = {}

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` wrapped: the first run takes digests of its inputs and state, later runs compare theirs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
            if self._inputs is None:
                self._given = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
                self._inputs = [self.by.take(t) for t in tensors]
                self._state = {key: self.by.take(t) for key, t in self._tensors()}
            else:
                self._compare(tensors)
            del leaves, tensors
            return forward(*args, **kwargs)

        return run

    def _tensors(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        for name, p in self._module.named_parameters():
            yield ("parameter", name), p
        for name, buffer in self._module.named_buffers():
            yield ("buffer", name), buffer

    def _compare(self, tensors: list[torch.Tensor]) -> None:
        compare = self.by.compare
        for (kind, name), t in self._tensors():
            cause = _PARAMETER if kind == "parameter" else _BUFFER
            compare(self._state.get((kind, name)), t, self.name, f"its {kind} {name!r}", cause)
        assert self._inputs is not None
        for number, (first, t) in enumerate(zip(self._inputs, tensors, strict=False)):
            compare(first, t, self.name, f"its input number {number}, {_described(t.dtype, t.shape)}", _INPUT)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check that the code inside leaves the stage, and all state that it reads, unchanged."""
        device = self.by.device
        modules = below(self._module)
        reached = Snapshot(modules, self._given, deep=True, graphs=True, puts=False)
        contents = Contents(reached)
        tables = [(m, name, m.__dict__[name].copy()) for m in reached.modules for name in _TABLES]
        generators, random_states, flags_before = Generators(reached.generators), generator_states(device), flags()
        try:
            with self._buffers_unchanged(reached.modules):
                yield
        finally:
            names = contents.differences(Contents.of(modules, self._given))
            names += [f"{type(m).__name__}.{name}" for m, name, t in tables if not _is_same(t, m.__dict__[name])]
            generators.settle()
            drew = generators.drew or generator_states(device) != random_states
            found = [f"what it keeps in {name}" for name in names] + ["the state of a random generator"] * drew
            found += [
                f"PyTorch's flag {name!r}" for name, a, b in zip(FLAGS, flags_before, flags(), strict=True) if a != b
            ]
            for what in found:
                self.by.found(self.name, what, _LEFT)

    def save(self, number: int, tensor: torch.Tensor) -> None:
        """Take the digest of the tensor that the first run saves as number `number`."""
        super().save(number, tensor)
        digest = self._saved[number]
        # Only tensors with a graph are watched: running statistics have none, and a norm updates them rightly.
        if digest is not None and tensor.grad_fn is not None and not self._is_a_parameters(tensor):
            self.by.watch(_Place(tensor, digest, self.name, _saved_as(number, tensor.dtype, tensor.shape)))

    def _is_a_parameters(self, tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return any(p.untyped_storage()._cdata == key for p in self._module.parameters() if type(p) in PLAIN)

    def compare_outputs(self, number: int, first: list[Digest | None], tensors: list[torch.Tensor]) -> None:
        """Compare the outputs of operation `number` in the first run with those that are returned for it now."""
        for digest, tensor in zip(first, tensors, strict=True):
            what = f"the saved output of its operation number {number}, {_described(tensor.dtype, tensor.shape)}"
            self.by.compare(digest, tensor, self.name, what, _INPUT)


class _Place:
    """The location of a stage's saved tensor, without keeping it alive; other code may hold it and write to it.

    Attributes
    ----------
    stream : stream or None
        The one that saved it, on which it is read again.
    """

    def __init__(self, tensor: torch.Tensor, digest: Digest, stage: str, what: str) -> None:
        storage = tensor.untyped_storage()
        self.digest, self.stage, self.what = digest, stage, what
        self.later: Digest | None = None
        self.stream = accelerator.current_stream(tensor.device)
        self._storage, self._nbytes = StorageWeakRef(storage), storage.nbytes()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._lies = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        self._lazy = tensor.is_conj() or tensor.is_neg()
        with undisturbed(), torch.no_grad():
            self._counter = tensor.detach()  # shares its version counter, but not its memory
            self._counter.data = torch.empty(0, dtype=self._dtype, device=self._device)
        self._version = self._counter._version

    @property
    def is_there(self) -> bool:
        """Whether the tensor's storage is still alive."""
        return not self._storage.expired()

    def tensor(self) -> torch.Tensor | None:
        """Return what lies there now, to be read on `stream`; None if it was freed or a write raised its version."""
        if self._counter._version != self._version:
            return None
        storage = None if self._lazy else torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() != self._nbytes:
            return None
        with undisturbed(), torch.no_grad():
            there = torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._lies)  # type: ignore[call-overload]
            if self.stream is not None:  # which need not be the one that allocated the memory
                there.record_stream(self.stream)
            return there  # type: ignore[no-any-return]


def _saved_as(number: int, dtype: torch.dtype, shape: torch.Size) -> str:
    return f"tensor number {number} that autograd saves in it, {_described(dtype, shape)}"


def _is_same(table: dict[Any, Any], now: dict[Any, Any]) -> bool:
    """Whether a table has the same entries; of sharded parameters only names count, since their unit replaces them."""
    if list(table) != list(now):
        return False
    same = all(map(operator.is_, table.values(), now.values()))
    return same or any(map(is_traceable_wrapper_subclass, (*table.values(), *now.values())))


_TABLES = ("_buffers", "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


_PARAMETER = (
    "it was written to between forward and backward in a way that PyTorch's versions don't show: through .data, numpy, "
    "or a fused optimizer; change parameters between steps"
)
_BUFFER = (
    "forward writes to it in a way that PyTorch's versions don't show (through .data, or by a custom kernel), so that "
    "the stage's next run starts with another value than the first; let it write with ordinary operations under "
    "torch.no_grad()"
)
_INPUT = (
    "it was written to since it was made, through .data, numpy or in a hook, which the stage's next run doesn't see or "
    "sees too early; write with ordinary operations"
)
_LEFT = "running the stage again has changed it once more, although each step must change it only once"
_SAVED = (
    "all that was compared of the stage's inputs is as in forward, so it depends on other state that changed (a random "
    "generator, Python state, flags, modes or hooks), or one of its kernels gives other bits each time, as additions "
    "in no fixed order do (index_add and scatter_add on CUDA; torch.use_deterministic_algorithms(True) finds these); "
    "run ckptplan.verify, and apply with check='off' only if it finds that the gradients are equal"
)
_SPOT = (
    "the stage's next run finds other state than the first: a buffer or another tensor that was written to in a way "
    "that PyTorch's versions don't show (through .data, numpy, or by a custom kernel), or Python state that began to "
    "change; or one of its kernels gives other bits each time; apply with check='always' to see which, and write with "
    "ordinary operations under torch.no_grad()"
)
_EDITED = (
    "it was written to after the stage, through .data, numpy or in a hook: plain training would use the new values for "
    "its gradients, the stage's next run or the copy that comes back doesn't; write with ordinary operations"
)
_PACKED_LATE = (
    "it was written to since, through .data or numpy, and the saved_tensors_hooks around the stage get the new values, "
    "not those of forward; write with ordinary operations, or remove the hooks"
)
_COPY = (
    "a copy was overtaken by a later write, or memory or the disk is damaged; train under a plan that swaps nothing, "
    "solve(..., actions=('keep', 'recompute')): if it raises no such error, the copies are at fault"
)


def _error(differing: list[_Pair], step: str) -> CheckError:
    worst = differing[0]
    what = worst.what if isinstance(worst.what, str) else worst.what()
    stages = len({pair.stage for pair in differing})
    return CheckError(
        f"stage {worst.stage!r}: {what} isn't what it was in forward. {len(differing)} of the compared tensors "
        f"differ, in {stages} of the plan's stages; the gradients of {step} step are wrong: drop them. "
        f"Likely cause: {worst.cause}",
        stage=worst.stage,
        tensor=what,
    )
