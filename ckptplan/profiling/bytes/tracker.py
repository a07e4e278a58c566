"""Count storages, operation by operation and segment by segment, while a step runs on fake tensors.

A step is cut into *segments* in forward order: the operations before the first stage, the first stage, the operations
between it and the second, and so on. Segment 2j+1 is stage j; even segments are glue. In backward, an operation belongs
to the segment whose forward made the autograd node that is running: each node carries the sequence number that it got
when it was made. Example: stage 0 made nodes 0 to 3 and stage 1 nodes 4 to 9; what node 5 runs belongs to segment 3.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ckptplan.core.estimate import GATHERED
from ckptplan.profiling.bytes.fake import FakeWorld
from ckptplan.profiling.bytes.kernels import REDUCED_TO_ONE, in_place
from ckptplan.profiling.bytes.operations import Operands, saved_numbers, written_to
from ckptplan.profiling.bytes.origins import NOWHERE, Origin, Where, names_of, operation_name, where
from ckptplan.profiling.bytes.storages import enlarged, ruled_bytes
from ckptplan.profiling.target import ON_CPU, Target
from ckptplan.profiling.values.answers import with_seen
from ckptplan.profiling.values.repeatable import is_repeatable
from ckptplan.runtime.recompute.selective import is_mark, is_numbered
from ckptplan.tensors.accelerator import own_module
from ckptplan.tensors.positions import has_position
from ckptplan.tensors.private import (
    current_node,
    disable_current_modes,
    is_fake,
    next_sequence_number,
    storage_use_count,
)
from ckptplan.tensors.quantized import named_inside
from ckptplan.tensors.storages import local_part, tensors_in

Sid = tuple[str, int, int]
"""A storage's name in all replays: the phase that made it ("outside": before the step), segment, a running number."""

Change = tuple[Sid, int, bool]
"""A storage, the bytes that it grows by, and whether it exists afterwards."""


def stage_segment(stage: int) -> int:
    """The segment of a stage's own operations."""
    return 2 * stage + 1


_COMPILED = "compiled"
"""In the key of compiled code, in place of an operation."""

_GATHERED, _NUMBERS = 1 << 20, 1 << 21
"""Added to the numbers of gathers and of saved numbers in names, which no operation's storages have."""
_APART = 1 << 13
"""Added to the numbers of what a variant of compiled code makes, as often as its ratio has hundredths."""

OFFLOADED = "offloaded "
"""In the place of a phase, in front of the name of a weight that was there before the step and leaves within."""
SAVED = "saved activations"
"""Category of the numbers that autograd saves."""

_DETACH = torch.ops.aten.detach.default
_LIFTED = torch.ops.aten.lift_fresh.default  # `torch.tensor` of a list: its operand is new

_ZEROS = {torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default, torch.ops.aten.zeros_like.default}

_MOST_SEQUENCE_NR = 1 << 62  # more than any forward makes; AccumulateGrad, which no segment makes, has the largest


@dataclass(frozen=True, slots=True)
class OpTrace:
    """One operation.

    Attributes
    ----------
    key : hashable
        Everything that its memory and time depend on (`op_key`); None for a sum of gradients that a real run does in
        place, and for `detach`. Such a sum makes a storage that stands for the one that it writes to.
    made : dict
        Storages that its results begin -> bytes, and whether they have a position (NOTE [Positions] in
        tensors/positions.py).
    written : tuple of Sid
        Storages it writes to that were there before.
    fresh : bool
        Every tensor it returns begins a storage.
    numbered : bool
        It has a number at run time (NOTE [Numbering] in runtime/recompute/selective.py).
    from_real_run : bool
        Its result is that of a real run (NOTE [Answers] in values/answers.py).
    repeatable : bool
        It gives the same bits when it runs again (values/repeatable.py).
    at : tuple of int
        Numbers of the segment's changes before and after it; equal for a sum in place, though its storage follows.
    reads : tuple
        Its operands, for trackers that compare steps: storage or name in the model, whether it requires a gradient, and
        has hooks on that.
    asked_bytes : int
        Bytes of all storages that it made, before rounding; like the next three, for trackers that note origins.
    runs_again : bool
        Backward runs it as a part of a forward that runs again.
    place : Where
    name : str
        Its name without that of its overload.
    """

    key: Hashable
    made: dict[Sid, tuple[int, bool]] = field(default_factory=dict)
    written: tuple[Sid, ...] = ()
    fresh: bool = False
    numbered: bool = False
    from_real_run: bool = False
    repeatable: bool = True
    at: tuple[int, int] = (0, 0)
    reads: tuple[tuple[Any, ...], ...] = ()
    asked_bytes: int = field(default=0, compare=False)
    runs_again: bool = field(default=False, compare=False)
    place: Where = field(default=NOWHERE, compare=False)
    name: str = field(default="", compare=False)


DETACHED = OpTrace(None)
"""Stands for each `detach`, which takes no memory and no time; most saved tensors have one."""


@dataclass(slots=True)
class SegmentTrace:
    """Operations and bytes of one segment in one direction.

    Attributes
    ----------
    start_bytes : int
        Live bytes when it began.
    ops : list of OpTrace
        Its operations, in order.
    present : set of Sid
        Storages alive when it began.
    written_outside : set of int
        Storages from before the step that it writes to, by address.
    changes : list of Change
        The bytes of storages, from its beginning to that of the next segment. Frees between two operations have no
        order.
    wrapped_bytes : int
        Bytes of the numbers among operands that PyTorch wraps into tensors, on the CPU, and autograd saves.
    """

    start_bytes: int = 0
    ops: list[OpTrace] = field(default_factory=list)
    present: set[Sid] = field(default_factory=set)
    written_outside: set[int] = field(default_factory=set, compare=False)
    changes: list[Change] = field(default_factory=list, compare=False)
    wrapped_bytes: int = 0

    def rise(self, extra: Mapping[Hashable, int], stays: Callable[[Sid], bool] = lambda sid: False) -> int:
        """Most bytes above those at its start.

        Parameters
        ----------
        extra : mapping
            Operation key -> most bytes that it allocates at once, its results included (`Target.workspaces`).
        stays : callable
            Whether a storage counts as there to the end though it is freed before.
        """
        changes = (0 if not exists and stays(sid) else nbytes for sid, nbytes, exists in self.changes)
        live = list(accumulate(changes, initial=self.start_bytes))
        peaks = (max(live[last], live[first] + extra.get(op.key, 0)) for op in self.ops for first, last in [op.at])
        return max([max(self.start_bytes, 0), *peaks]) - self.start_bytes

    @property
    def is_compiled(self) -> bool:
        """Whether it ran compiled code, whose operands aren't known."""
        return any(isinstance(op.key, tuple) and op.key[0] == _COMPILED for op in self.ops)


class Tracker(FakeWorld):
    """Dispatch mode that runs operations on fake tensors and counts the storages they make.

    Parameters
    ----------
    target : Target
        Where the step is to run; by default on the CPU.
    model : nn.Module, optional
        The step's; with it the tracker notes where storages and operations are made, and the numbers that autograd
        saves, which take no bytes in its counts, as storages.
    saves : bool
        False: autograd saves nothing, no numbers either, and the operations' operands are noted (`OpTrace.reads`).

    Attributes
    ----------
    live_bytes, peak_bytes : int
        Bytes of the storages alive now, and the most so far.
    numbers_on_host : bool
        Single real numbers lie on the host, as an optimizer's counts of steps do.
    forward, backward : dict
        Segment -> its trace.
    foreign : dict
        Identity of each real parameter that the model uses without listing it -> the parameter, its gradient before.
    changes : list of Change
        Those of the present segment; after `finish`, those since then.
    origins : dict
        Storage -> where and as what it was made, if the tracker has a model.
    returns : list of (int, int, int)
        As in `Replay`, inside `watching_model`.
    """

    def __init__(
        self,
        target: Target = ON_CPU,
        model: nn.Module | None = None,
        *,
        saves: bool = True,
    ) -> None:
        super().__init__(target)
        self._model, self._saves = model, saves
        self._modules = {} if model is None else names_of(model)
        self.origins: dict[Sid, Origin] = {}
        self.returns: list[tuple[int, int, int]] = []
        self._place, self._op, self._asked_bytes = NOWHERE, "", 0  # of the present operation, and of all so far
        self._nodes_end: list[int] = []  # after each forward operation, the next node's sequence number ...
        self._nodes: list[Where] = []  # ... and its place
        self._streams: dict[Any, int] = {}  # inside `watching_model`
        self._numbers: list[tuple[int, Sid]] = []  # the nodes that saved some
        self._numbers_made = 0
        self._named: dict[int, str] = {}  # storages of the model -> their names
        self._on_cuda = target.is_cuda
        self.live_bytes = 0
        self.peak_bytes = 0
        self.changes: list[Change] = []
        self.numbers_on_host = False
        self.forward: dict[int, SegmentTrace] = {}
        self.backward: dict[int, SegmentTrace] = {}
        self.foreign: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._twins: list[torch.Tensor] = []  # held, since the fake mode refers to them weakly
        # By the identity of a storage that is alive:
        self._alive: dict[int, Sid | None] = {}
        self._made_by: dict[int, int | None] = {}  # sequence number of the backward node that made it
        self._counted: dict[int, int] = {}  # its bytes in `live_bytes`
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # calls what forgets it
        self._gather_of: dict[int, Sid] = {}  # of one of gathered parameters, the name of its present memory
        self._gathers = 0  # begun in the present segment
        self._starts: list[int] = []  # per segment, the sequence number of the first node of its forward
        self._made = 0
        self._zeros: int | None = None  # identity of the storage that the operation before filled with zeros
        self._even: torch.Tensor | None = None  # the gradient of `_distributed`
        self._calibrating: list[tuple[int, int]] | None = None
        self._segment = -1
        self._in_backward = False
        self.enter_segment(0)

    def __enter__(self) -> Tracker:
        super().__enter__()
        assert self._outer is not None
        self._outer.enter_context(_resizes_seen(self.resized))
        return self

    @contextlib.contextmanager
    def watching_model(self) -> Iterator[None]:
        """Note when the model's forward returns, and the streams of storages, while the context is active."""
        self._streams[self._stream()] = 0

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            if module is self._model and not self._in_backward:
                self.returns.append((self._segment, len(self.changes), len(self._table[self._segment].ops)))

        handle = register_module_forward_hook(returned, always_call=True)
        try:
            yield
        finally:
            handle.remove()

    def _stream(self) -> Any:
        return own_module(self._target.device).current_stream()

    # --- where the program is ---

    def enter_segment(self, segment: int) -> None:
        """Note that forward moves on to `segment`."""
        self._segment = segment
        self._made = self._gathers = self._numbers_made = 0
        self._starts.append(next_sequence_number())
        self._begin(segment)

    def enter_backward(self, segment: int | None = None) -> None:
        """Note that backward begins, or moves down to `segment`; a segment that it has left isn't entered again."""
        if not self._in_backward:
            self._in_backward = True
            self._segment += 1
            segment = len(self._starts) - 1 if segment is None else segment
        while segment is not None and segment < self._segment:
            self._segment -= 1
            self._made = self._gathers = self._numbers_made = 0
            self._begin(self._segment)

    def moved(self, name: str, nbytes: int, back: bool) -> None:
        """Note that a weight leaves, or comes `back`."""
        self.live_bytes += nbytes if back else -nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.changes.append(((OFFLOADED + name, 0, 0), nbytes, back))

    def finish(self) -> None:
        """End the step: enter the backward segments that ran nothing."""
        if self._in_backward:
            self.enter_backward(0)
        self._free_numbers(all_of_them=True)
        self.changes = []

    @property
    def _table(self) -> dict[int, SegmentTrace]:
        """The traces of the present direction."""
        return self.backward if self._in_backward else self.forward

    def _begin(self, segment: int) -> None:
        trace = self._table[segment] = SegmentTrace(self.live_bytes, present=self.alive())
        self.changes = trace.changes

    def _locate(self) -> None:
        """Enter the segment whose forward made the backward node that runs."""
        node = current_node()
        if node is not None and node._sequence_nr() < _MOST_SEQUENCE_NR:
            self.enter_backward(max(bisect.bisect_right(self._starts, node._sequence_nr()) - 1, 0))

    @property
    def _phase_name(self) -> str:
        return "backward" if self._in_backward else "forward"

    def _place_of(self, func: Any) -> bool:
        """Set the place of the operation that begins; return whether it is one of a forward, maybe one that runs again.

        One of backward is where the operation of forward is whose node runs.
        """
        self._op = operation_name(func, self)
        if not self._in_backward or torch.is_grad_enabled():
            self._place = where(sys._getframe(1), self._modules)
            return True
        self._free_numbers()
        node = current_node()
        at = len(self._nodes) if node is None else bisect.bisect_right(self._nodes_end, node._sequence_nr())
        self._place = self._nodes[at] if at < len(self._nodes) else self._place
        return False

    # --- storages ---

    def alive(self) -> set[Sid]:
        """Names of the storages made by the step that are alive now."""
        numbers = (sid for _, sid in self._numbers)
        return {*filter(None, self._alive.values()), *self._gather_of.values(), *numbers}

    def sid(self, tensor: torch.Tensor) -> Sid | None:
        """The name of a tensor's storage, None if it was there before the step."""
        return self.sid_of(local_part(tensor).untyped_storage())

    def sid_of(self, storage: torch.UntypedStorage) -> Sid | None:
        """The name of a storage, None if it was there before the step."""
        return self._alive.get(id(storage))

    def outside(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` uncounted: it was there before the step."""
        storage = local_part(tensor).untyped_storage()
        if id(storage) not in self._alive:
            self._alive[id(storage)] = None
            self._watch(storage, self._alive.pop)

    def gathers(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor`, from before the step, as it grows and shrinks during it."""
        storage = tensor.untyped_storage()
        self._alive[id(storage)], self._counted[id(storage)] = None, self.size_of(storage)
        self._watch(storage, self._freed)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that the program has given another size."""
        if id(storage) in self._counted:
            if self._in_backward:
                self._locate()
            self._recount(id(storage), storage)

    def uncounted(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new fake tensor that counts as one from before the step."""
        with disable_current_modes(), self.fake_mode, torch.no_grad():
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.outside(made)
        return made

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes of a storage as the device's allocator counts them."""
        return self._target.rounded(storage.nbytes())

    def bytes_here(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's storage on the device that is planned for."""
        return 0 if self._on_host(tensor) else self.size_of(tensor.untyped_storage())

    def _add(self, tensor: torch.Tensor) -> Sid | None:
        """Count a tensor's storage; return its name if it is a new one."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            self._recount(key, storage)
            return None
        if self._on_host(tensor):
            self.outside(tensor)
            return None
        sid = (self._phase_name, self._segment, self._made)
        self._alive[key] = sid
        self._made += 1
        node = current_node() if self._in_backward else None
        self._made_by[key] = None if node is None else node._sequence_nr()
        if self._model is not None:
            again = node is not None and torch.is_grad_enabled()
            self._note(
                sid, storage.nbytes(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), again=again
            )
        self._counted[key] = 0
        self._recount(key, storage)
        self._watch(storage, self._freed)
        return sid

    def _watch(self, storage: torch.UntypedStorage, ended: Callable[[int], Any]) -> None:
        """Call `ended` with the identity of a storage when it is freed."""
        key = id(storage)

        def forget(gone: weakref.ref[torch.UntypedStorage]) -> None:
            del self._ends[key]
            ended(key)

        self._ends[key] = weakref.ref(storage, forget)

    def _recount(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count a storage with its present size, which `resize_` may have changed."""
        if key not in self._counted:
            return
        nbytes = self.size_of(storage)
        more = nbytes - self._counted[key]
        sid = self._alive[key]
        if sid is not None:
            self.changes.append((sid, more, True))
        elif more:
            self._gathered(key, storage, more)
        self.live_bytes += more
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._counted[key] = nbytes

    def _gathered(self, key: int, storage: torch.UntypedStorage, more: int) -> None:
        """Note that a storage of gathered parameters grows or shrinks; its memory has a name until it has none."""
        if key not in self._gather_of:
            self._gathers += 1
            self._gather_of[key] = self._phase_name, self._segment, _GATHERED + self._gathers
            self._op = "fsdp.all_gather"
            self._note(self._gather_of[key], storage.nbytes(), (), "", category=GATHERED)
        exists = storage.nbytes() > 0
        self.changes.append((self._gather_of[key], more, exists))
        if not exists:
            del self._gather_of[key]

    def _note(
        self, sid: Sid, nbytes: int, shape: tuple[int, ...], dtype: str, *, again: bool = False, category: str = ""
    ) -> None:
        """Note where and as what a storage is made."""
        if self._model is not None:
            stream = self._streams.setdefault(self._stream(), len(self._streams)) if self._streams else 0
            self._asked_bytes += nbytes
            self.origins[sid] = Origin(nbytes, shape, dtype, self._place, self._op, stream, again, category)

    def count(self, tensor: torch.Tensor) -> None:
        """Count a real tensor that was made by no operation of this mode."""
        self._add(tensor)

    def _on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies elsewhere than on the CUDA device that is planned for.

        For a device that isn't in this machine all tensors lie on the CPU; then, this is true for the single real
        numbers of an optimizer alone (`numbers_on_host`).
        """
        if not self._on_cuda:
            return False
        if self._target.spec is None:
            return tensor.device != self._target.device
        return self.numbers_on_host and tensor.dim() == 0 and not is_fake(tensor)

    def _freed(self, key: int) -> None:
        sid = self._alive.pop(key, None)
        self._made_by.pop(key, None)
        counted = self._counted.pop(key)
        self.live_bytes -= counted
        if sid is not None:
            self.changes.append((sid, -counted, False))

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation in the segment that it belongs to."""
        if is_mark(func):
            return func(*args, **kwargs)
        if self._in_backward:
            self._locate()
        if func is _DETACH and is_fake(args[0]) and id(args[0].untyped_storage()) in self._alive:
            self._table[self._segment].ops.append(DETACHED)
            return self._target.layouts.run(self.fake_mode, func, args, kwargs)
        return self.operation(func, args, kwargs)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, count the storages that it makes, and add it to the trace of the segment."""
        if self._in_backward and (distributed := self._distributed(func, args)) is not None:
            return distributed
        forward = self._model is not None and self._place_of(func)
        asked_bytes = self._asked_bytes
        operands = Operands(args, kwargs)
        given = operands.tensors
        for tensor in given if not (func is _LIFTED and given[0].dim()) else ():
            if not is_fake(tensor) and id(tensor.untyped_storage()) not in self._alive:
                if tensor.dim() == 0 and tensor.device.type == "cpu" and not self._on_cuda:
                    self._add(tensor)  # a number that PyTorch has just wrapped, and that autograd may save
                else:
                    self.outside(tensor)
                if tensor.requires_grad and tensor.is_leaf:
                    self.foreign[id(tensor)] = tensor, tensor.grad
                twin = self.fake(tensor)
                self._twins.append(twin)
                self.outside(twin)
        if not self._on_cuda and (numbers := saved_numbers(func, args)):
            self._save_numbers(numbers)
        first = len(self.changes)
        reads = () if self._saves else self._operands(given)
        func = self._as_on_real_tensors(func, args)
        key = self._target.op_keys.of(func, args, kwargs, operands)
        in_place = self._accumulates(func, args, kwargs)
        written = self._written(func, args, kwargs)
        result = self._as_large(func, key, args, kwargs, self.run(func, args, kwargs, operands))
        if self.answer is not None and not self.answer.is_number:
            key = with_seen(key, self.answer)
        returned = tensors_in(result)
        peak_bytes = self.peak_bytes
        made: dict[Sid, tuple[int, bool]] = {}
        self._zeros = id(result.untyped_storage()) if func in _ZEROS else None
        for tensor in returned:
            sid = self._add(tensor)
            if sid is not None:
                made[sid] = (self.size_of(tensor.untyped_storage()), has_position(tensor))
        trace = self._table[self._segment]
        if in_place:
            self.peak_bytes = peak_bytes  # a real run never has the two terms and their sum at once
            terms = tuple(filter(None, [self.sid(args[0])]))
            trace.ops.append(OpTrace(None, made, terms, at=(first, first), reads=reads))
        else:
            fresh = bool(made) and not written and all(self.sid(t) in made for t in returned)
            counts = is_numbered(func, args)
            again = is_repeatable(func, args, kwargs, on_cuda=self._on_cuda)
            noted = self.answer is not None
            at = first, len(self.changes)
            origin = self._asked_bytes - asked_bytes, forward and self._in_backward, self._place, self._op
            trace.ops.append(OpTrace(key, made, written, fresh, counts, noted, again, at, reads, *origin))
        if forward and (number := next_sequence_number()) > (self._nodes_end[-1] if self._nodes_end else -1):
            self._nodes_end.append(number)
            self._nodes.append(self._place)
        return result

    def _save_numbers(self, count: int) -> None:
        """Note that the newest node saves `count` numbers among the operands of the present operation."""
        self._table[self._segment].wrapped_bytes += 8 * count
        if self._model is not None and self._saves:
            self._numbers_made += 1
            sid = self._phase_name, self._segment, _NUMBERS + self._numbers_made
            self._numbers.append((next_sequence_number() - 1, sid))
            self._note(sid, 8 * count, (count,), "float64", category=SAVED)
            self.changes.append((sid, 0, True))

    def _free_numbers(self, *, all_of_them: bool = False) -> None:
        """Free the saved numbers of nodes whose backward has ended: those made later than the node that runs."""
        node = current_node()
        while self._numbers and (all_of_them or (node is not None and self._numbers[-1][0] > node._sequence_nr())):
            self.changes.append((self._numbers.pop()[1], 0, False))

    def _operands(self, given: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
        """`OpTrace.reads` of an operation."""
        if not self._named and self._model is not None:  # fake tensors are in place of the model's now
            for name, tensor, _ in named_inside(self._model):
                self._named.setdefault(id(tensor.untyped_storage()), name)
                self._twins.append(tensor)
        return tuple(
            (self.sid(t) or self._named.get(id(t.untyped_storage()), ""), t.requires_grad, bool(t._backward_hooks))
            for t in given
        )

    def _as_large(self, func: Any, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """`result` with storages as large as real tensors have."""
        sizes = ruled_bytes(func, args, kwargs, result)
        if self._target.answers is not None:
            sizes = self._target.answers.storages.get(key, sizes)
        return enlarged((args, kwargs), result, sizes) if sizes else result

    def runs_compiled(self, kind: str) -> None:
        """Add an operation that tells stages with different compiled code apart and has no options inside."""
        self._table[self._segment].ops.append(
            OpTrace((_COMPILED, (kind,), None), from_real_run=True, at=(len(self.changes),) * 2)
        )

    def name_apart(self, ratio: float) -> None:
        """Leave out names, so that no storage of a variant is taken for one of another, or of the user's own code."""
        self._made += round(ratio * 100) * _APART

    def _distributed(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Result of an operation that backward of a maximum (minimum, median) of all elements runs on the CPU.

        On real tensors it makes the gradient first, of zeros, and looks for NaNs in the result alone.
        """
        node = current_node()
        if node is None or self._on_cuda or node.name() not in REDUCED_TO_ONE or not _called_by_the_engine():
            return None
        if func is torch.ops.aten.isnan.default and self._even is None:
            self._even = self.operation(torch.ops.aten.zeros_like.default, (args[0],), {})
        if func in (torch.ops.aten.isnan.default, torch.ops.aten.logical_and.default):
            return self.uncounted(args[0].shape, args[0].stride(), torch.bool, args[0].device)
        if func is torch.ops.aten.mul.Tensor and self._even is not None:
            even, self._even = self._even, None
            return self.operation(torch.ops.aten.masked_fill_.Tensor, (even, *args), {})
        return None

    def _as_on_real_tensors(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operation in place that a node of backward runs on real tensors instead of `func`, or `func` itself."""
        node = current_node() if self._in_backward else None
        if node is None or not args or not is_fake(args[0]):
            return func
        changed = id(args[0].untyped_storage())
        runs = in_place(func, node.name(), fills=changed == self._zeros)
        mine = self._made_by.get(changed) == node._sequence_nr()
        return runs if runs is not None and mine and _called_by_the_engine() else func

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sid, ...]:
        """Storages made by the step that the operation writes to; those from before go into `written_outside`."""
        out: list[Sid] = []
        for tensor in written_to(func, args, kwargs):
            sid = self.sid(tensor)
            if sid is None and id(tensor.untyped_storage()) in self._counted:
                continue  # a parameter is gathered
            if sid is None:
                self._table[self._segment].written_outside.add(tensor.untyped_storage()._cdata)
            else:
                out.append(sid)
        return tuple(out)

    def _accumulates(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the autograd engine, summing two gradients of one tensor, would add in place on real tensors.

        The engine adds the later gradient to the earlier one if it alone holds that, but never for tensor subclasses,
        such as fake tensors. The two gradients come from different nodes, which tells the sum apart from an addition
        inside a node's formula.
        """
        if not self._in_backward or func is not torch.ops.aten.add.Tensor or kwargs or torch.is_grad_enabled():
            return False
        pair = [x for x in args if is_fake(x)]
        if (
            not _called_by_the_engine()
            or len(pair) != 2
            or pair[0].shape != pair[1].shape
            or pair[0].dtype != pair[1].dtype
        ):
            return False
        made_by = {self._made_by.get(id(t.untyped_storage())) for t in pair}
        if len(made_by) < 2:
            return False
        earlier = pair[0]
        tensors, storages = _owners(earlier)
        if self._calibrating is not None:
            self._calibrating.append((tensors, storages))
            return False
        alone = owners_of_a_lone_gradient()
        return tensors <= alone[0] and storages <= alone[1] and earlier.is_contiguous()


@contextlib.contextmanager
def _resizes_seen(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `seen` within the block with each storage that a program resizes, which is no operation."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        seen(storage)
        return resized

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def workspaces_of(target: Target, traces: Iterable[SegmentTrace]) -> tuple[dict[Hashable, int], list[str], bool]:
    """Return the bytes that operations allocate, and what couldn't run (`Target.workspaces`).

    Also notes operations whose results had larger storages on the device than traced; the last item is whether any is
    new, and the step has to be traced again with them.
    """
    ops = [op for trace in traces for op in trace.ops]
    peaks, failed, measured = target.workspaces(op.key for op in ops)
    if target.answers is None:
        return peaks, failed, False
    known = target.answers.storages
    larger = {
        op.key: measured[op.key]
        for op in ops
        if op.key in measured and _is_larger(measured[op.key], [nbytes for nbytes, _ in op.made.values()], target)
    }
    new = larger.keys() - known.keys()
    known.update(larger)
    return peaks, failed, bool(new)


def _is_larger(real: Sequence[int], traced: Sequence[int], target: Target) -> bool:
    return len(real) == len(traced) and any(map(operator.gt, map(target.rounded, real), traced))


def _called_by_the_engine() -> bool:
    """Whether the autograd engine itself runs the operation, rather than a backward that is written in Python."""
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(_BETWEEN)
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code is _ENGINE


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_BETWEEN = (__file__, "torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_stats.py")
"""Files whose functions lie between the engine and a dispatch mode once `torch._dynamo` is imported."""


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """Numbers of references to a tensor and to its storage, this call's own included."""
    return tensor._use_count(), storage_use_count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@functools.cache
def owners_of_a_lone_gradient() -> tuple[int, int]:
    """`_owners` of a gradient that only the autograd engine holds, in this version of PyTorch."""
    tracker = Tracker()
    found: list[tuple[int, int]] = []
    tracker._calibrating = found
    with tracker, torch.enable_grad():
        x = torch.ones(4, requires_grad=True)
        twice = x * 2
        loss = (twice.tanh() + twice.sin()).sum()
        tracker.enter_backward()
        loss.backward()
    return min((a for a, _ in found), default=0), min((b for _, b in found), default=0)
