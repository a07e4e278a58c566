"""Swapping: saved tensors that leave the device between their forward and their backward.

NOTE [States of a swapped storage]

    ON_DEVICE --start_leaving--> LEAVING --finish_leaving--> AWAY
    AWAY --start_returning--> RETURNING --finish_returning--> ON_DEVICE

1. One record per (storage, version), shared by every alias that any stage of the same forward saves.
2. The device bytes are dropped in `finish_leaving` alone, after the copy out; they are allocated in `start_returning`
   alone, by the thread that computes.
3. A record lives as long as a saved alias of it (the autograd graph owns those), and nothing else keeps it: freeing the
   graph frees device and host bytes in whatever state they are.
4. Every unpack goes through `tensor()`, which brings the bytes back if no prefetch has; it may be called any number of
   times.
5. A storage modified after it was saved is an error, as in PyTorch, unless its copy had left before: then the copy is
   the value that was saved, and right.
6. What a stage moves leaves as one *group*: one wait for compute, one batch of copies, one event. All of its device
   bytes count until the last copy is done, and are dropped together. It comes back in the same way, but for records
   that were needed earlier, each by itself, and those that have ended: these are no part of the batch. A group's host
   bytes are given back with its last record.

NOTE [Positions]

A plan names what moves by its position among the storages that a stage saves. The profile's fake run and the real step
must count alike, whatever the batch, the kernel and the place of a tensor:

1. Sizes don't enter. They change with the batch.
2. Devices don't enter. A fake kernel may give a tensor on the device that the real kernel gives on the host. What
   lies elsewhere has a position and stays where it is.
3. Numbers (storages of one element, saved as tensors without dimensions) and unsigned 64-bit integers have none. They
   are attention's seeds and offsets and Python's numbers, which differ between kernels that may replace one another:
   flash attention saves a random state of two elements and an unused number, the memory-efficient kernel two numbers on
   the host, cuDNN's two on the device.
4. The model's own storages have none.

NOTE [Models on several streams]

Stages may run on different CUDA streams, as the model or its caller orders them; autograd runs each operation's
backward on its forward's stream. So the stream that is current at a release or a prefetch needn't be one that uses the
storage.

1. A record has a *home*: the stream that first saved the storage, and after a return the one that allocated its memory.
   Its copy out waits for the home, which has or follows the last write. At the release the home waits for the copy out.
   So what a stage moves are as many groups as it has homes.
2. Every stream that uses a returned storage waits for its copy in, once for all that came back together. The home waits
   at the latest when the record ends, since its memory goes back there.
3. The allocator gives memory back to the stream that allocated it, which may be none of ours, and orders nothing
   else. It is told the home and all other users (`record_stream`). For the stream that allocated this does nothing, so
   where there is one stream memory is free at once, as planned. It is never told a copy stream.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import operator
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckptplan.core.chain import Tier
from ckptplan.core.errors import CkptPlanError, PlanMismatchError
from ckptplan.runtime.compiled import compiler_callback, out_of_sight
from ckptplan.runtime.meter import Meter
from ckptplan.runtime.stores import Store, Ticket
from ckptplan.runtime.streams import current_stream, on_stream

MIN_SWAP_BYTES = 1 << 12
"""Smaller storages stay, whatever the link: a page, and a block of the swap file. On CUDA the link says from how many
bytes moving pays (`Link.least_bytes`), where it was measured."""


_CPU = torch.device("cpu")
_UNKNOWN = object()
_NO_USERS: list[Any] = []
"""Of records where there are no streams; stays empty."""


class State(enum.Enum):
    """Where a record's bytes are."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    RETURNING = enum.auto()


def _lazy(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """A view with the flags of a lazy conjugation and negation flipped: the same bytes, read another way."""
    if neg:
        tensor = torch._neg_view(tensor)
    return torch._conj(tensor) if conj else tensor


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as one dimension of its dtype, without autograd and without lazy flags."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    plain = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_conj() or tensor.is_neg():
        plain = _lazy(plain, conj=tensor.is_conj(), neg=tensor.is_neg())
    return plain.as_strided((count,), (1,), 0)


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether `tensor` is all of its storage of `nbytes`, in order, as it is stored."""
    return tensor.is_contiguous() and tensor.nbytes == nbytes and not tensor.is_conj() and not tensor.is_neg()


def modified_error(shape: Iterable[int], saved: int, found: int) -> RuntimeError:
    """PyTorch's kind of error for a saved tensor that was written to."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} is at version {found}; expected version {saved} instead"
    )


@dataclass(slots=True)
class Counters:
    """What happened since the plan was applied; `meter` keeps the times.

    By a stage's index, `runs` counts every run of its forward, and `copied_bytes` are the sizes of the buffers that its
    forward updates: it keeps copies of those to run again, and every run again makes further ones. `other_paths` are
    runs of a stage that saved something else than profiled, within the planned bytes.
    """

    forwards: int = 0
    recomputed_stages: int = 0
    other_paths: int = 0
    runs: collections.Counter[int] = field(default_factory=collections.Counter)
    copied_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    host_wait_s: float = 0.0
    meter: Meter = field(default_factory=Meter)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Compute waits for a copy inside."""
        begin, before = time.perf_counter(), self.meter.stall()
        try:
            yield
        finally:
            self.meter.mark(before)
            self.host_wait_s += time.perf_counter() - begin


def _home_of(tensor: torch.Tensor) -> Any:
    device = tensor.device
    return None if device == _CPU or isinstance(tensor, FakeTensor) else current_stream(device)


class _Group:
    """Storages that left together (NOTE [States of a swapped storage], rule 6)."""

    __slots__ = ("_finished", "_home", "store", "ticket")

    def __init__(self, store: Store, ticket: Ticket, home: Any) -> None:
        self.store = store
        self.ticket = ticket
        self._home = home
        self._finished = False

    def finish(self, counters: Counters) -> None:
        """Have the home wait for the copies out, once."""
        if not self._finished:
            with counters.waiting(), on_stream(self._home):
                self.store.finish_out(self.ticket)
            self._finished = True

    def __del__(self) -> None:
        self.store.free(self.ticket)


class _Batch:
    """Copies in that were issued together (NOTE [States of a swapped storage], rule 6)."""

    __slots__ = ("_done", "_group", "_home", "_waited")

    def __init__(self, group: _Group, done: Any, home: Any) -> None:
        self._group = group
        self._done = done
        self._home = home
        self._waited: list[Any] = []  # streams; None where there are none

    def wait(self, stream: Any, counters: Counters) -> None:
        """Have `stream`, which computes now, wait, once."""
        if stream not in self._waited:
            with counters.waiting():
                self._group.store.finish_in(self._group.ticket, self._done)
            self._waited.append(stream)

    def end(self) -> None:
        """A target is about to be freed under its copy: its home waits, whichever stream or thread this is."""
        if self._home not in self._waited:
            with on_stream(self._home):
                # A worker's thread may not wait here, so this counts for nothing else.
                self._group.store.finish_in(self._group.ticket, self._done)


class _Trip:
    """What a record that is sent away needs beyond others."""

    __slots__ = (
        "batch", "device", "fake", "geometry", "group", "like", "modified", "nbytes", "part", "returned", "state",
        "storage",
    )  # fmt: skip

    def __init__(self, group: _Group, part: int, geometry: Geometry | None, whole: torch.Tensor) -> None:
        self.group = group
        self.part = part
        self.geometry = geometry
        self.device = whole.device
        self.nbytes = whole.nbytes
        self.state = State.LEAVING
        self.like: tuple[torch.Size, torch.dtype]
        self.fake: torch.Tensor | None = None
        self.storage: weakref.ref[torch.UntypedStorage] | None = None
        self.batch: _Batch | None = None
        self.returned = 0
        self.modified: int | None = None

    def __del__(self) -> None:
        if self.state is State.RETURNING and self.batch is not None:  # in any thread, so that this is nobody's stall
            with contextlib.suppress(CkptPlanError):
                self.batch.end()


class Record:
    """One storage under swap (NOTE [States of a swapped storage]).

    Parameters
    ----------
    home : stream or None, optional
        The stream that computes now, where that is known.
    """

    # Most of all records stay: what only those need that leave is in their trips, or asked for when it is wanted.
    __slots__ = ("__weakref__", "_counters", "_home", "_trip", "_users", "_watch", "_whole", "version")

    def __init__(self, tensor: torch.Tensor, counters: Counters, home: Any = _UNKNOWN) -> None:
        self._counters = counters
        # Shares the version counter of what was saved; autograd hands hooks a tensor of their own.
        self._watch: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self._whole: torch.Tensor | None = None
        self.version = tensor._version
        self._trip: _Trip | None = None
        # NOTE [Models on several streams]; the users are those of the memory that the record holds now.
        self._home = _home_of(tensor) if home is _UNKNOWN else home
        self._users: list[Any] = _NO_USERS if self._home is None else [self._home]

    @property
    def nbytes(self) -> int:
        """Of the whole storage."""
        if self._watch is not None:
            return self._watch.untyped_storage().nbytes()
        assert self._trip is not None
        return self._trip.nbytes

    @property
    def state(self) -> State:
        """Where the bytes are."""
        return State.ON_DEVICE if self._trip is None else self._trip.state

    @property
    def device(self) -> torch.device:
        """Where the storage is or comes back to."""
        if self._watch is not None:
            return self._watch.device
        assert self._trip is not None
        return self._trip.device

    @property
    def is_gone(self) -> bool:
        """Whether the storage that was saved is freed; until then it can be saved again.

        By Python's weak reference: in PyTorch 2.9 the C++ one of `StorageWeakRef` keeps the Python object of a
        freed storage alive, whose end tells the tracker that the bytes are free.
        """
        if self._watch is not None:
            return False
        return self._trip is not None and self._trip.storage is not None and self._trip.storage() is None

    def start_leaving(self, store: Store) -> None:
        """`start_leaving` for this one alone."""
        start_leaving([self], store)

    def finish_leaving(self) -> None:
        """`finish_leaving` for this one alone."""
        finish_leaving([self])

    def start_returning(self) -> None:
        """`start_returning` for this one alone."""
        start_returning([self])

    def finish_returning(self) -> None:
        """Wait for the copy in, on the stream that computes now."""
        if self._trip is not None and self._trip.state is State.RETURNING:
            self._wait_for_copy_in()
            assert self._whole is not None
            self._trip.returned = version_of(self._whole)
            self._trip.state = State.ON_DEVICE

    def _wait_for_copy_in(self) -> None:
        assert self._trip is not None
        assert self._trip.batch is not None
        stream = None if self._home is None else current_stream(self._trip.device)
        self._trip.batch.wait(stream, self._counters)
        if stream is not None:
            self._users.append(stream)
            self._tell_allocator(self._users[-1:])

    def _tell_allocator(self, users: Sequence[Any]) -> None:
        assert self._whole is not None
        for stream in users:
            self._whole.record_stream(stream)

    def used_now(self) -> None:
        """The stream that computes now uses the memory that the record holds, if it holds any."""
        if self._home is None or (stream := current_stream(self.device)) in self._users:
            return
        if self._watch is not None:
            self._users.append(stream)
        elif self.state is State.ON_DEVICE:
            self._wait_for_copy_in()

    def source(self) -> torch.Tensor:
        """The whole storage in one contiguous tensor, as long as it is the one that was saved."""
        watch = self._watch
        assert watch is not None
        if self._whole is None:
            self._whole = watch if _covers(watch, self.nbytes) else whole_storage(watch)
        return self._whole

    def sent(self, group: _Group, part: int) -> None:
        """The copy out is under way."""
        assert self._watch is not None
        assert self._whole is not None
        geometry = None if self._whole is self._watch else Geometry.of(self._watch)
        self._trip = _Trip(group, part, geometry, self._whole)
        self._counters.swapped_out_bytes += self._trip.nbytes

    def drop(self) -> None:
        """The copy out is done: the device bytes go."""
        trip, whole = self._trip, self._whole
        assert trip is not None
        assert whole is not None
        assert self._watch is not None
        if self._watch._version != self.version:
            trip.modified = self._watch._version
        self._tell_allocator(self._users)
        trip.storage = weakref.ref(whole.untyped_storage())
        trip.like = whole.size(), whole.dtype
        trip.fake = whole.new_empty(0) if isinstance(whole, FakeTensor) else None
        self._whole = self._watch = None
        trip.state = State.AWAY

    def target(self) -> torch.Tensor:
        """Device memory for the bytes, on the stream that computes now."""
        assert self._trip is not None
        size, dtype = self._trip.like
        if self._trip.fake is not None:  # where whole numbers made from nothing would be real (profiling/fake.py)
            return self._trip.fake.new_empty(size)
        return torch.empty(size, dtype=dtype, device=self._trip.device)

    def returns(self, batch: _Batch, target: torch.Tensor, home: Any) -> None:
        """The copy in is under way."""
        assert self._trip is not None
        self._whole, self._trip.batch, self._trip.state = target, batch, State.RETURNING
        if home is not None:
            self._home, self._users = home, []
        self._counters.swapped_in_bytes += self._trip.nbytes

    def whole(self) -> torch.Tensor:
        """The whole storage on the device, as one dimension of the dtype in which it was saved first.

        Raises
        ------
        RuntimeError
            If the storage was modified after it was saved and before its copy had left.
        SwapError
            If a copy failed.
        """
        if self._watch is None:
            return self._returned().view(-1)
        self._check(self._watch)
        return self.source().view(-1)

    def tensor(self) -> torch.Tensor:
        """The tensor that the record was made from; raises as `whole`."""
        watch = self._watch
        if watch is None:
            assert self._trip is not None
            whole = self._returned()
            return whole if self._trip.geometry is None else self._trip.geometry.on(whole)
        if self._trip is not None or watch._version != self.version:
            self._check(watch)
        return watch

    def _check(self, watch: torch.Tensor) -> None:
        if self._trip is not None:
            self.used_now()
        if watch._version != self.version:
            raise modified_error([self.nbytes], self.version, watch._version)

    def _returned(self) -> torch.Tensor:
        trip = self._trip
        assert trip is not None
        if trip.state is State.ON_DEVICE:
            self.used_now()
        else:
            if trip.state is State.AWAY:
                self.start_returning()
            self.finish_returning()
        if trip.modified is not None:
            raise modified_error([self.nbytes], self.version, trip.modified)
        assert self._whole is not None
        if version_of(self._whole) != trip.returned:  # a backward wrote to it
            raise modified_error([self.nbytes], trip.returned, version_of(self._whole))
        return self._whole


def start_leaving(records: Iterable[Record], store: Store, place: Hashable = None) -> None:
    """Issue the copies out to `store`, where the bytes stay whatever sends them away later, as one group.

    Parameters
    ----------
    place : hashable, optional
        Which group of the step this is: it lies where it lay in the step before.
    """
    homes: dict[Any, list[Record]] = {}
    for record in records:
        if record._trip is None:
            homes.setdefault(record._home, []).append(record)
    for number, (home, leaving) in enumerate(homes.items()):
        with on_stream(home):
            ticket = store.start_out(
                *(record.source() for record in leaving), place=None if place is None else (place, number)
            )
        group = _Group(store, ticket, home)
        for part, record in enumerate(leaving):
            record.sent(group, part)


def finish_leaving(records: Iterable[Record]) -> None:
    """Wait for the copies out, then drop the device bytes: the release point."""
    for record in records:
        trip = record._trip
        if trip is not None and trip.state is State.LEAVING:
            trip.group.finish(record._counters)
            record.drop()


def start_returning(records: Sequence[Record]) -> None:
    """Allocate on the device and issue the copies in, of each group as one batch: the prefetch point."""
    finish_leaving(records)
    away: dict[_Group, list[tuple[int, Record]]] = {}
    for record in records:
        trip = record._trip
        if trip is not None and trip.state is State.AWAY:
            away.setdefault(trip.group, []).append((trip.part, record))
    for group, members in away.items():
        first = members[0][1]
        home = None if first._home is None else current_stream(first.device)
        targets = [record.target() for _, record in members]
        batch = _Batch(group, group.store.start_in(group.ticket, *targets, parts=[part for part, _ in members]), home)
        for (_, record), target in zip(members, targets, strict=True):
            record.returns(batch, target, home)


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of `tensor`."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor of this geometry on `whole`, a whole storage as one dimension, without autograd."""
        typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        plain = typed.as_strided(self.size, self.stride, self.offset)
        return _lazy(plain, conj=self.conj, neg=self.neg) if self.conj or self.neg else plain


@dataclass(slots=True)
class Alias:
    """A saved tensor as a view of a record that was made from another one."""

    record: Record
    geometry: Geometry

    def tensor(self) -> torch.Tensor:
        """The tensor, brought back where it was away."""
        return self.geometry.on(self.record.whole())


@dataclass(slots=True)
class Held:
    """A saved tensor that stays, with PyTorch's check that hooks switch off."""

    value: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises
        ------
        RuntimeError
            If it was written to since.
        """
        if version_of(self.value) != self.version:
            raise modified_error(self.value.shape, self.version, self.value._version)
        return self.value


Packed = Record | Alias | Held


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written to; tensors made in inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of whole elements that `tensor` is nothing but a view of; None where it is something else."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    return storage if nbytes > 0 and nbytes % tensor.element_size() == 0 else None


def plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is nothing but a view of a storage of whole elements."""
    return _storage_of(tensor) is not None


def _positioned(tensor: torch.Tensor, never: Callable[[torch.UntypedStorage], bool]) -> torch.UntypedStorage | None:
    """The storage of a saved tensor, if it has a position in the order of saving (NOTE [Positions])."""
    storage = _storage_of(tensor)
    if storage is None or tensor.dtype is torch.uint64:
        return None
    if tensor.dim() == 0 and storage.nbytes() == tensor.element_size():
        return None
    return None if never(storage) else storage


def has_position(tensor: torch.Tensor, never: Callable[[torch.UntypedStorage], bool] = lambda storage: False) -> bool:
    """Whether the storage of a saved tensor has a position in the order of saving (NOTE [Positions])."""
    return _positioned(tensor, never) is not None


Order = dict[tuple[int, int], "Record | None"]
"""Storages in the order of their packing; None: counted, but not held."""


def storage_key(tensor: torch.Tensor) -> tuple[int, int]:
    """A storage in one version, as long as it is alive."""
    return tensor.untyped_storage()._cdata, version_of(tensor)


class Packing:
    """Packs what one stage holds, and remembers in which order."""

    def __init__(self, session: SwapSession) -> None:
        self._session = session
        self._device, self._never, self._counters = session._device, session._never, session._counters
        self._home = _UNKNOWN if self._device.type == "cuda" else None
        self._records = session._records
        self.order: Order = {}

    def pack(self, tensor: torch.Tensor) -> Packed:
        """`tensor` as its storage's record, which all stages of this forward share, or as a view of it.

        Itself where it can't be moved.
        """
        # Called for every saved tensor: few calls, and nothing that only those need that leave.
        if compiler_callback() is not None:
            return out_of_sight(self.pack)(tensor)
        storage = _positioned(tensor, self._never)
        if storage is None:
            return _held(tensor)
        try:
            key = storage._cdata, tensor._version
        except RuntimeError:  # made in inference mode, which counts no versions; it comes from outside the step
            key = None
        if key is None or tensor.device != self._device:
            self.order.setdefault(storage_key(tensor), None)
            return _held(tensor)
        known = self._records.get(key)
        record = None if known is None else known()
        if record is not None and not record.is_gone:
            record.used_now()
            self.order.setdefault(key, record)
            return Alias(record, Geometry.of(tensor))
        self.order[key] = record = Record(tensor, self._counters, self._home)
        self._records[key] = weakref.ref(record)
        return record

    def skip(self, tensor: torch.Tensor) -> None:
        """Count `tensor` in the order without holding it."""
        if self._session.has_position(tensor):
            self.order.setdefault(storage_key(tensor), None)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Pack what autograd saves inside."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)


def _held(tensor: torch.Tensor) -> Held:
    """`tensor` itself, without the graph: a node that holds its own result would never be freed."""
    return Held(tensor if tensor.grad_fn is None else tensor.detach(), version_of(tensor))


unpack: Callable[[Packed], torch.Tensor] = operator.methodcaller("tensor")
"""The tensor that was packed."""


class SwapSession:
    """The records of one forward pass and the backward that follows it.

    Parameters
    ----------
    stores : mapping of tier to Store
        Those that anything moves to.
    device : torch.device
        Only tensors there are moved.
    never : callable
        Whether a storage belongs to the model (parameters and buffers, recognised by storage).
    planned : sequence of sequences of int
        Per stage, the bytes of each storage in the order of saving; empty: not known.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        device: torch.device,
        never: Callable[[torch.UntypedStorage], bool],
        counters: Counters,
        planned: Sequence[Sequence[int]] = (),
    ) -> None:
        self._planned = planned
        self._stores = stores
        self._device = device
        self._never = never
        self._counters = counters
        self._records: dict[tuple[int, int], weakref.ref[Record]] = {}
        self._moved: dict[int, list[weakref.ref[Record]]] = {}

    @contextlib.contextmanager
    def stage(self, index: int, moves: tuple[int, ...], tier: Tier = "host") -> Iterator[None]:
        """Pack what autograd saves inside; at a clean exit, what `moves` names starts to leave.

        Parameters
        ----------
        moves : tuple of int
            Positions, in the order of first saving, of the movable storages that leave.
        tier : "host" or "disk"
            Where to.
        """
        packing = self.packing()
        with packing.hooks():
            yield
        self.leave(index, packing.order, moves, tier)

    def packing(self) -> Packing:
        """A new order in which one stage packs."""
        return Packing(self)

    def has_position(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` counts in the order of saving."""
        return has_position(tensor, self._never)

    def stream(self) -> Any:
        """The stream that computes now; None where there are no streams."""
        return current_stream(self._device)

    def belongs(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is the model's own."""
        return self._never(tensor.untyped_storage())

    def leave(self, index: int, order: Order, moves: tuple[int, ...], tier: Tier = "host") -> None:
        """What `moves` names of `order`, which is emptied, starts to leave for `tier`, on behalf of stage `index`.

        Raises
        ------
        PlanMismatchError
            If there is no such position, or it stands for what the stage doesn't hold.
        """
        # Of a stage that moves nothing, nothing needs to be known.
        held = [record is not None for record in order.values()] if moves else []
        alive = [None if record is None else weakref.ref(record) for record in order.values()] if moves else []
        # Autograd keeps the pack hook, and so the order, as long as any of the stage's saved tensors (rule 3). Records
        # of graphs that the stage has dropped itself end here: nothing of them is held.
        order.clear()
        records = [None if record is None else record() for record in alive]
        if moves and self._planned:
            moves = self._as_planned(records, moves, self._planned[index])
        if moves and max(moves) >= len(records):
            raise PlanMismatchError(
                f"the stage saved {len(records)} storages, the plan moves number {max(moves) + 1}: its forward took "
                "another path than the one profiled; solve again with such inputs"
            )
        leaving = []
        for position in moves:
            record = records[position]
            if not held[position]:
                raise PlanMismatchError(
                    f"the plan moves storage number {position + 1} of the stage, which its segment makes again instead "
                    f"of holding it, or which lies elsewhere than on {self._device}; solve again with this step"
                )
            if record is not None:
                leaving.append(record)
        if leaving:
            start_leaving(leaving, self._stores[tier], index)
        self._moved[index] = [weakref.ref(record) for record in leaving]

    def _as_planned(
        self, records: Sequence[Record | None], moves: tuple[int, ...], planned: Sequence[int]
    ) -> tuple[int, ...]:
        """Positions to move so that no more is held than planned, whatever path the forward took.

        Smaller inputs may save other storages, in another order: one sample needs no copy where several do, a mask
        without padding is dropped. Then positions mean nothing, and bytes decide: the smallest stay, as many as are no
        more than was to stay, and the others leave.

        Raises
        ------
        PlanMismatchError
            If there is more in all than planned.
        """
        sizes = [0 if record is None else record.nbytes for record in records]
        if len(sizes) == len(planned):
            stays = sorted(set(range(len(sizes))).difference(moves))
            if sum(sizes) <= sum(planned) and all(sizes[i] <= planned[i] for i in stays):
                return moves
        self._counters.other_paths += 1
        if sum(sizes) <= sum(planned):
            room = sum(planned) - sum(planned[i] for i in moves)
            leaving = []
            for i in sorted(range(len(sizes)), key=sizes.__getitem__):
                room -= sizes[i]
                if room < 0 and records[i] is not None:
                    leaving.append(i)
            return tuple(sorted(leaving))
        raise PlanMismatchError(
            f"the stage saved {len(sizes)} storages of {sum(sizes)} bytes, the plan reckons with {len(planned)} of "
            f"{sum(planned)}: its forward took another path than the one profiled; solve again with such inputs"
        )

    def release(self, index: int) -> None:
        """The release point of stage `index`."""
        finish_leaving(self._alive(index))

    def prefetch(self, index: int) -> None:
        """The prefetch point of stage `index`."""
        start_returning(self._alive(index))

    def states(self) -> dict[State, list[int]]:
        """Bytes of every record that was sent away by a stage and is alive, by state."""
        found: dict[int, Record] = {id(r): r for index in self._moved for r in self._alive(index)}
        out: dict[State, list[int]] = {}
        for record in found.values():
            out.setdefault(record.state, []).append(record.nbytes)
        return out

    def _alive(self, index: int) -> list[Record]:
        return [record for ref in self._moved.get(index, ()) if (record := ref()) is not None]
