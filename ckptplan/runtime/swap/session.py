"""Swapping: saved tensors that leave the device between their forward and their backward.

NOTE [States of a swapped storage]

    ON_DEVICE --start_leaving--> LEAVING --finish_leaving--> AWAY
    AWAY --start_returning--> RETURNING --finish_returning--> ON_DEVICE

1. A storage, in one version, gets a record when the first stage sends it away. The record has the bytes of every alias
   that any stage of the same forward has saved before or saves later: rule 4 of NOTE [Residency] counts on it.
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
import functools
import operator
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckptplan.core.errors import CkptPlanError, PlanMismatchError
from ckptplan.core.link import Tier
from ckptplan.runtime.accelerator import current_stream, is_accelerator, on_stream
from ckptplan.runtime.guard.check import Checks
from ckptplan.runtime.observe.meter import Meter
from ckptplan.runtime.state.compiled import out_of_sight
from ckptplan.runtime.swap.stores import Store, Ticket
from ckptplan.runtime.swap.users_hooks import Compare, Kept, UsersHooks

MIN_SWAP_BYTES = 1 << 12
"""Smaller storages stay, whatever the link: a page, and a block of the swap file. On CUDA the link says from how many
bytes moving pays (`Link.least_bytes`), where it was measured."""


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


def modified_error(shape: Iterable[int], saved: int, found: int, remark: str = "") -> RuntimeError:
    """PyTorch's kind of error for a saved tensor that was written to; `remark` says which, and what to do."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} is at version {found}; expected version {saved} instead{remark}"
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
    return current_stream(device) if is_accelerator(device) and not isinstance(tensor, FakeTensor) else None


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


class Record:
    """One storage that leaves (NOTE [States of a swapped storage]).

    Parameters
    ----------
    home : stream or None, optional
        The stream that first saved it; without one, the stream that computes now.
    version : int, optional
        Of the storage when it was saved; without one, that of `tensor` now.
    """

    __slots__ = (
        "__weakref__",
        "_batch",
        "_counters",
        "_fake",
        "_geometry",
        "_like",
        "_modified",
        "_returned",
        "_storage",
        "_users",
        "_watch",
        "_whole",
        "device",
        "group",
        "home",
        "nbytes",
        "on_return",
        "part",
        "state",
        "version",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, counters: Counters, home: Any = _UNKNOWN, version: int | None = None
    ) -> None:
        self.state = State.ON_DEVICE
        self._counters = counters
        # Shares the version counter of what was saved; autograd hands hooks a tensor of their own.
        self._watch: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self._whole: torch.Tensor | None = None
        self._geometry: Geometry | None = None
        self.version = tensor._version if version is None else version
        self.device = tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self.group: _Group | None = None
        self.on_return: Callable[[torch.Tensor], None] | None = None
        # NOTE [Models on several streams]; the users are those of the memory that the record holds now.
        self.home = _home_of(tensor) if home is _UNKNOWN else home
        self._users: list[Any] = _NO_USERS if self.home is None else [self.home]

    def __del__(self) -> None:
        if self.state is State.RETURNING:  # in any thread, so that this is nobody's stall
            with contextlib.suppress(CkptPlanError):
                self._batch.end()

    @property
    def is_gone(self) -> bool:
        """Whether the storage that was saved is freed; until then it can be saved again.

        By Python's weak reference: in PyTorch 2.9 the C++ one of `StorageWeakRef` keeps the Python object of a
        freed storage alive, whose end tells the tracker that the bytes are free.
        """
        return self._watch is None and self._storage() is None

    def is_made_from(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor()` gives `tensor` back while nothing has left."""
        return self._watch is tensor

    def finish_returning(self) -> None:
        """Wait for the copy in, on the stream that computes now."""
        if self.state is State.RETURNING:
            self._wait_for_copy_in()
            assert self._whole is not None
            self._returned = version_of(self._whole)
            self.state = State.ON_DEVICE
            if self.on_return is not None:
                self.on_return(self._whole)

    def _wait_for_copy_in(self) -> None:
        stream = None if self.home is None else current_stream(self.device)
        self._batch.wait(stream, self._counters)
        if stream is not None:
            self._users.append(stream)
            self._tell_allocator(self._users[-1:])

    def _tell_allocator(self, users: Sequence[Any]) -> None:
        assert self._whole is not None
        for stream in users:
            self._whole.record_stream(stream)

    def used_on(self, stream: Any) -> None:
        """`stream` uses the memory that was saved, if the record still holds it."""
        if self._watch is not None and stream is not None and stream not in self._users:
            self._users.append(stream)

    def _used_now(self) -> None:
        """The stream that computes now uses the memory that the record holds."""
        if self.home is None or (stream := current_stream(self.device)) in self._users:
            return
        if self._watch is not None:
            self._users.append(stream)
        else:
            self._wait_for_copy_in()

    def source(self) -> torch.Tensor:
        """The whole storage in one contiguous tensor, as long as it is the one that was saved."""
        watch = self._watch
        assert watch is not None
        if self._whole is None:
            if _covers(watch, self.nbytes):
                self._whole = watch
            else:
                self._whole = whole_storage(watch)
                self._geometry = Geometry.of(watch)
        return self._whole

    def sent(self, group: _Group, part: int) -> None:
        """The copy out is under way."""
        self.group, self.part = group, part
        self.state = State.LEAVING
        self._counters.swapped_out_bytes += self.nbytes

    def drop(self) -> None:
        """The copy out is done: the device bytes go."""
        whole, watch = self._whole, self._watch
        assert whole is not None
        assert watch is not None
        self._modified = None if watch._version == self.version else watch._version
        self._tell_allocator(self._users)
        self._storage = weakref.ref(whole.untyped_storage())
        self._like = whole.size(), whole.dtype
        self._fake = whole.new_empty(0) if isinstance(whole, FakeTensor) else None
        self._whole = self._watch = None
        self.state = State.AWAY

    def target(self) -> torch.Tensor:
        """Device memory for the bytes, on the stream that computes now."""
        size, dtype = self._like
        if self._fake is not None:  # where whole numbers made from nothing would be real (profiling/bytes/fake.py)
            return self._fake.new_empty(size)
        return torch.empty(size, dtype=dtype, device=self.device)

    def returns(self, batch: _Batch, target: torch.Tensor, home: Any) -> None:
        """The copy in is under way."""
        self._whole, self._batch, self.state = target, batch, State.RETURNING
        if home is not None:
            self.home, self._users = home, []
        self._counters.swapped_in_bytes += self.nbytes

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
            return self._brought_back().view(-1)
        self._check(self._watch)
        return self.source().view(-1)

    def tensor(self) -> torch.Tensor:
        """The tensor that the record was made from; raises as `whole`."""
        if self._watch is None:
            whole = self._brought_back()
            return whole if self._geometry is None else self._geometry.on(whole)
        self._check(self._watch)
        return self._watch

    def _check(self, watch: torch.Tensor) -> None:
        self._used_now()
        if watch._version != self.version:
            raise modified_error([self.nbytes], self.version, watch._version)

    def _brought_back(self) -> torch.Tensor:
        if self.state is State.ON_DEVICE:
            self._used_now()
        else:
            if self.state is State.AWAY:
                start_returning([self])
            self.finish_returning()
        if self._modified is not None:
            raise modified_error([self.nbytes], self.version, self._modified)
        assert self._whole is not None
        if version_of(self._whole) != self._returned:  # a backward wrote to it
            raise modified_error([self.nbytes], self._returned, version_of(self._whole))
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
        if record.group is None:
            homes.setdefault(record.home, []).append(record)
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
        if record.state is State.LEAVING:
            assert record.group is not None
            record.group.finish(record._counters)
            record.drop()


def start_returning(records: Sequence[Record]) -> None:
    """Allocate on the device and issue the copies in, of each group as one batch: the prefetch point."""
    finish_leaving(records)
    away: dict[_Group, list[tuple[int, Record]]] = {}
    for record in records:
        if record.state is State.AWAY:
            assert record.group is not None
            away.setdefault(record.group, []).append((record.part, record))
    for group, members in away.items():
        first = members[0][1]
        home = None if first.home is None else current_stream(first.device)
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


class Held:
    """A saved tensor, held until its backward, with PyTorch's check that hooks switch off.

    Parameters
    ----------
    value : torch.Tensor
        Not part of the graph: a node that holds its own result would never be freed.

    Attributes
    ----------
    value : torch.Tensor or None
        None once a record has the bytes.
    version : int or None
        How often it was written to; None where that isn't counted, in inference mode.
    stream : optional
        The stream that saved it, where what is saved may leave.
    """

    __slots__ = ("__weakref__", "_geometry", "record", "stream", "value", "version")

    def __init__(self, value: torch.Tensor, stream: Any = None) -> None:
        # Most of what is saved stays, so what only those need that leave is asked for when it is known who does.
        self.value: torch.Tensor | None = value
        try:
            self.version: int | None = value._version
        except RuntimeError:
            self.version = None
        self.stream = stream
        self.record: Record | None = None

    def give(self, record: Record) -> None:
        """From now on `record` holds the bytes."""
        assert self.value is not None
        self._geometry = None if record.is_made_from(self.value) else Geometry.of(self.value)
        self.record, self.value = record, None

    def tensor(self) -> torch.Tensor:
        """The tensor, brought back where it was away.

        Raises
        ------
        RuntimeError
            If it was written to since.
        """
        value = self.value
        if value is None:
            assert self.record is not None
            return self.record.tensor() if self._geometry is None else self._geometry.on(self.record.whole())
        if self.version is not None and value._version != self.version:
            raise modified_error(value.shape, self.version, value._version)
        return value


class _Counted(Held):
    """A tensor that counts in the order of saving, and isn't held."""

    __slots__ = ()


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written to; tensors made in inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_STRIDED = torch.strided
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_ITEMSIZE = {d: d.itemsize for d in vars(torch).values() if isinstance(d, torch.dtype) and d not in _QUANTIZED}


def plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is nothing but a view of a storage of whole elements."""
    return _storage_of(tensor, _ITEMSIZE) is not None


def _storage_of(tensor: torch.Tensor, itemsizes: Mapping[torch.dtype, int]) -> tuple[torch.UntypedStorage, int] | None:
    """The storage of whole elements that `tensor` is nothing but a view of, and its bytes; None where it isn't."""
    # Called for every tensor that a swapped stage saves, so it makes few calls.
    itemsize = itemsizes.get(tensor.dtype)
    if itemsize is None or type(tensor) not in _PLAIN or tensor.layout is not _STRIDED:
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    return (storage, nbytes) if nbytes > 0 and nbytes % itemsize == 0 else None


_POSITIONED = {dtype: itemsize for dtype, itemsize in _ITEMSIZE.items() if dtype != torch.uint64}


def _positioned(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int] | None:
    """The storage and bytes of what may have a position (NOTE [Positions], but for rule 4)."""
    found = _storage_of(tensor, _POSITIONED)
    if found is None or (found[1] == tensor.itemsize and tensor.dim() == 0):
        return None
    return found


def has_position(tensor: torch.Tensor, never: Callable[[torch.UntypedStorage], bool] = lambda storage: False) -> bool:
    """Whether the storage of a saved tensor has a position in the order of saving (NOTE [Positions])."""
    found = _positioned(tensor)
    return found is not None and not never(found[0])


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, which autograd saves now, so that it can be held for backward, however long that takes to come.

    A result that is held as it is would hold the node that holds it, and both for ever where no backward runs.
    """
    node = tensor.grad_fn
    newest = torch._C._autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    return tensor.detach() if node is not None and node._sequence_nr() == newest else tensor


class Packing:
    """Packs what one stage saves, in order; whether it stays or leaves is decided when the stage has run."""

    def __init__(self, device: torch.device) -> None:
        self._streams = is_accelerator(device)
        self.saved: list[Held] = []

    def pack(self, tensor: torch.Tensor) -> Held:
        """Hold `tensor`."""
        # Called for every saved tensor, so it makes few calls.
        held = Held(tensor if tensor.grad_fn is None else tensor.detach(), _home_of(tensor) if self._streams else None)
        self.saved.append(held)
        return held

    def skip(self, tensor: torch.Tensor) -> None:
        """Count `tensor` in the order without holding it."""
        self.saved.append(_Counted(tensor))

    def hooks(
        self, compared: Callable[[torch.Tensor], Compare] | None = None
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """Pack what autograd saves inside; `compared` as for `UsersHooks.through`."""
        users = UsersHooks.around()
        return torch.autograd.graph.saved_tensors_hooks(
            self.pack if users is None else out_of_sight(users.through(self.pack, compared)), unpack
        )


unpack: Callable[[Kept], torch.Tensor] = operator.methodcaller("tensor")
"""The tensor that was packed."""


_Key = tuple[int, int | None]
"""A storage in one version, as long as it is alive."""


def _fit(sizes: Sequence[int], moves: tuple[int, ...], planned: Sequence[int]) -> bool:
    """Whether all that is saved, and each storage that stays, is no larger than planned."""
    if len(sizes) != len(planned) or sum(sizes) > sum(planned):
        return False
    stays = set(range(len(sizes))).difference(moves)
    return all(sizes[i] <= planned[i] for i in stays)


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
    checks : Checks, optional
        Compares what comes back with what left.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        device: torch.device,
        never: Callable[[torch.UntypedStorage], bool],
        counters: Counters,
        planned: Sequence[Sequence[int]] = (),
        checks: Checks | None = None,
    ) -> None:
        self._planned = planned
        self._checks = checks
        self._stores = stores
        self._device = device
        self._never = never
        self._counters = counters
        # Autograd owns what holds a storage, and that its record; of a storage that is freed these say nothing.
        self._holders: collections.defaultdict[_Key, list[weakref.ref[Held]]] = collections.defaultdict(list)
        self._records: dict[_Key, weakref.ref[Record]] = {}
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
        with packing.hooks(None if self._checks is None else functools.partial(self._checks.saves, index)):
            yield
        self.leave(index, packing.saved, moves, tier)

    def packing(self) -> Packing:
        """What packs for one run of a stage."""
        return Packing(self._device)

    def stream(self) -> Any:
        """The stream that computes now; None where there are no streams."""
        return current_stream(self._device)

    def belongs(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is the model's own."""
        return self._never(tensor.untyped_storage())

    def leave(self, index: int, saved: list[Held], moves: tuple[int, ...], tier: Tier = "host") -> None:
        """What `moves` names of the storages in `saved` starts to leave for `tier`, on behalf of stage `index`.

        Empties `saved`: autograd keeps the pack hook, and so the list, as long as any of the stage's saved tensors.

        Raises
        ------
        PlanMismatchError
            If there is no such position, or it stands for what the stage doesn't hold.
        """
        sizes = self._counted(saved)
        if moves and self._planned:
            moves = self._as_planned(sizes, moves, self._planned[index])
        if moves and max(moves) >= len(sizes):
            raise PlanMismatchError(
                f"the stage saved {len(sizes)} storages, the plan moves number {max(moves) + 1}: its forward took "
                "another path than the one profiled; solve again with such inputs"
            )
        for key in self._records.keys() & sizes.keys():  # have left for another stage
            self._record(key)
        leaving = []
        keys = tuple(sizes)
        for position in moves:
            key = keys[position]
            if sizes[key] == 0:
                raise PlanMismatchError(
                    f"the plan moves storage number {position + 1} of the stage, which its segment makes again instead "
                    f"of holding it, or which lies elsewhere than on {self._device}; solve again with this step"
                )
            record = self._record(key)
            if record is not None:
                leaving.append(record)
        if self._checks is not None:
            for record in leaving:
                self._checks.leaves(record, index)
        if leaving:
            start_leaving(leaving, self._stores[tier], index)
        self._moved[index] = [weakref.ref(record) for record in leaving]

    def _counted(self, saved: list[Held]) -> dict[_Key, int]:
        """Storages of `saved`, which is emptied, with their bytes, in order; 0 where nothing of one is held."""
        device, never, holders = self._device, self._never, self._holders
        sizes: dict[_Key, int] = {}
        for each in saved:
            value = each.value
            found = None if value is None else _positioned(value)
            if value is None or found is None or never(found[0]):
                continue
            key = found[0]._cdata, each.version
            if type(each) is Held and each.version is not None and value.device == device:
                sizes[key] = found[1]
                holders[key].append(weakref.ref(each))
            else:
                sizes.setdefault(key, 0)
        saved.clear()
        return sizes

    def _record(self, key: _Key) -> Record | None:
        """The record of a storage, which has the bytes of all that hold it, in every stage; None if none does."""
        holders = [held for ref in self._holders.pop(key, ()) if (held := ref()) is not None]
        ref = self._records.get(key)
        record = None if ref is None else ref()
        if record is None or record.is_gone:
            if not holders:
                return None
            first = holders[0]
            assert first.value is not None
            record = Record(first.value, self._counters, first.stream, first.version)
            self._records[key] = weakref.ref(record)
        for held in holders:
            record.used_on(held.stream)
            held.give(record)
        return record

    def _as_planned(
        self, counted: Mapping[_Key, int], moves: tuple[int, ...], planned: Sequence[int]
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
        sizes = list(counted.values())
        if _fit(sizes, moves, planned):
            return moves
        # Of graphs that the stage has dropped itself nothing is held any more.
        alive = [any(ref() is not None for ref in self._holders.get(key, ())) for key in counted]
        sizes = [nbytes if held else 0 for nbytes, held in zip(sizes, alive, strict=True)]
        if _fit(sizes, moves, planned):
            return moves
        self._counters.other_paths += 1
        if sum(sizes) <= sum(planned):
            room = sum(planned) - sum(planned[i] for i in moves)
            leaving = []
            for i in sorted(range(len(sizes)), key=sizes.__getitem__):
                room -= sizes[i]
                if room < 0 and sizes[i] > 0:
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
