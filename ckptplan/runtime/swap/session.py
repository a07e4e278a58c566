"""Swapping: saved tensors that leave the device between their forward and their backward.

NOTE [States of a swapped storage]

    ON_DEVICE --start_leaving--> LEAVING --finish_leaving--> AWAY
    AWAY --start_returning--> RETURNING --finish_returning--> ON_DEVICE

1. The first stage that sends a storage away makes a `Record` of it. Each version of a storage has a record of its own.
   The record holds the bytes of every alias that any stage of the same forward has saved before or saves later: rule 4
   of NOTE [Residency] relies on this.
2. Device bytes are freed only in `finish_leaving`, after the copy out. They are allocated only in `start_returning`, by
   the thread that computes.
3. A record is owned by the saved aliases of its storage, and these are owned by the autograd graph. Nothing else keeps
   a record alive: freeing the graph frees its device and host bytes in whatever state they are.
4. Every unpack goes through `tensor()`, which copies the bytes back if no prefetch has done so. It may be called any
   number of times.
5. Modifying a storage after it was saved is an error, as in PyTorch, unless the copy out had finished before: then the
   copy holds the value that was saved, and that value is used.
6. The storages that a stage moves leave as one *group*: one wait for compute, one batch of copies, one event. All of
   the group's device bytes count until its last copy is done, and are freed together. The group returns as one batch
   too, without the records that were needed (and copied back) earlier and those that were freed. Its host bytes are
   freed with its last record.

Example: a stage saves `x` of 4 MiB, the view `x[0]`, and `y` of 8 MiB, and moves both storages. At its end there are
two records in one group of 12 MiB, both LEAVING; `x` and `x[0]` share a record. The release point waits once for both
copies and frees 12 MiB of device memory: AWAY. The prefetch point allocates 12 MiB and issues both copies in:
RETURNING. The first unpack waits for them: ON_DEVICE. If backward had unpacked `x[0]` before the prefetch point, `x`
would have come back by itself, and the prefetch would move only the 8 MiB of `y`.

NOTE [Positions]

A plan names the storages that move by their positions among the storages that a stage saves. The profile's fake run and
the real step must number them alike, whatever the batch size, the kernel and the device of a tensor:

1. Sizes play no part, since they change with the batch.
2. Devices play no part. A fake kernel may return a tensor on the device where the real kernel returns it on the host. A
   storage on another device has a position and stays where it is.
3. Two kinds have no position: numbers (storages of one element, saved as tensors without dimensions) and unsigned
   64-bit integers. They are attention's seeds and offsets and Python's numbers, which differ between kernels that may
   replace one another: flash attention saves a random state of two elements and an unused number, the memory-efficient
   kernel two numbers on the host, cuDNN's two on the device.
4. The model's own storages (parameters and buffers) have no position.

Example: an attention stage saves, in order, its weight, `q`, `k`, a view of `q`, a seed (a number) and its output. The
weight and the seed have no position, and the view shares the storage of `q`. So `q` is position 0, `k` is 1 and the
output is 2, and `moves=(0, 2)` sends `q` and the output away.

NOTE [Models on several streams]

Stages may run on different CUDA streams, chosen by the model or its caller. Autograd runs the backward of each
operation on the stream of its forward. So the stream that is current at a release or prefetch point need not be one
that uses the storage.

1. A record has a *home*: the stream that first saved the storage, and after a return the stream that allocated the new
   memory. The copy out waits for the home, because the home made the last write or runs after it. At the release point
   the home waits for the copy out. So the storages that a stage moves form one group per home.
2. Every stream that uses a returned storage waits for its copy in, once for all storages of the same batch. The home
   waits at the latest when the record is freed, since the memory goes back to the home then.
3. PyTorch's allocator returns memory to the stream that allocated it, which may be a stream unknown here, and orders no
   other stream. So the home and all other users are reported to it with `record_stream`. For the allocating stream this
   call does nothing, so a model on one stream frees memory at once, as planned. The copy streams are never reported.

Example: a storage is saved on stream A, used by the next stage on stream B, and its stage's backward runs on A. The
home is A: the copy out waits for A, and at the release point A waits for the copy. `record_stream(B)` keeps the
allocator from reusing the memory before B is done. The prefetch point is reached while B is current, so B allocates the
target and becomes the home; A, which unpacks the tensor, waits for the copy in before it reads.
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
"""Smaller storages never move: this is a page, and a block of the swap file. On CUDA a measured link may set a higher
limit, the size from which moving pays (`Link.least_bytes`)."""


_UNKNOWN = object()
_NO_USERS: list[Any] = []
"""The users of records on devices without streams: shared by all of them, and always empty."""


class State(enum.Enum):
    """Where a record's bytes are."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    RETURNING = enum.auto()


def _lazy(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """Return a view of the same bytes, with the lazy conjugation (`conj`) or negation (`neg`) flag flipped."""
    if neg:
        tensor = torch._neg_view(tensor)
    return torch._conj(tensor) if conj else tensor


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor` as one dimension of its dtype, without autograd and without lazy flags."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    plain = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_conj() or tensor.is_neg():
        plain = _lazy(plain, conj=tensor.is_conj(), neg=tensor.is_neg())
    return plain.as_strided((count,), (1,), 0)


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether `tensor` covers its whole storage of `nbytes` bytes, in storage order and without lazy flags."""
    return tensor.is_contiguous() and tensor.nbytes == nbytes and not tensor.is_conj() and not tensor.is_neg()


def modified_error(shape: Iterable[int], saved: int, found: int, remark: str = "") -> RuntimeError:
    """Return PyTorch's error for a saved tensor that was modified; `remark` is appended to its message."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} is at version {found}; expected version {saved} instead{remark}"
    )


@dataclass(slots=True)
class Counters:
    """Counts of what happened since the plan was applied; `meter` keeps the times.

    `runs` counts, by stage index, every run of the stage's forward. `copied_bytes` has, by stage index, the sizes of
    the buffers that the forward updates: a stage that is recomputed keeps copies of them, and each rerun makes more.
    `other_paths` counts the runs of a stage that saved other storages than profiled.
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
        """Inside, compute waits for a copy: the time is added to `host_wait_s` and to the meter's stall account."""
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
    """The storages that left together (NOTE [States of a swapped storage], rule 6)."""

    __slots__ = ("_finished", "_home", "store", "ticket")

    def __init__(self, store: Store, ticket: Ticket, home: Any) -> None:
        self.store = store
        self.ticket = ticket
        self._home = home
        self._finished = False

    def finish(self, counters: Counters) -> None:
        """Make the home stream wait for the copies out; later calls do nothing."""
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
        self._waited: list[Any] = []  # streams that have waited; None stands for a device without streams

    def wait(self, stream: Any, counters: Counters) -> None:
        """Make `stream`, the current one, wait for the copies; later calls for the same stream do nothing."""
        if stream not in self._waited:
            with counters.waiting():
                self._group.store.finish_in(self._group.ticket, self._done)
            self._waited.append(stream)

    def end(self) -> None:
        """Make the home wait, because a target is about to be freed during its copy; called on any stream or thread."""
        if self._home not in self._waited:
            with on_stream(self._home):
                # This may run in a worker thread, where the wait returns at once, so the home isn't noted as waited.
                self._group.store.finish_in(self._group.ticket, self._done)


class Record:
    """One storage, in one version, that leaves the device (NOTE [States of a swapped storage]).

    Parameters
    ----------
    home : stream or None, optional
        The stream that first saved the storage; by default the current stream.
    version : int, optional
        Version of the storage when it was saved; by default the present version of `tensor`.
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
        # Shares the version counter of the saved tensor; the object that autograd passes to hooks is another one.
        self._watch: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self._whole: torch.Tensor | None = None
        self._geometry: Geometry | None = None
        self.version = tensor._version if version is None else version
        self.device = tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self.group: _Group | None = None
        self.on_return: Callable[[torch.Tensor], None] | None = None
        # NOTE [Models on several streams]; `_users` are the streams that use the memory that the record holds now.
        self.home = _home_of(tensor) if home is _UNKNOWN else home
        self._users: list[Any] = _NO_USERS if self.home is None else [self.home]

    def __del__(self) -> None:
        if self.state is State.RETURNING:  # in any thread, so it isn't counted as a stall of compute
            with contextlib.suppress(CkptPlanError):
                self._batch.end()

    @property
    def is_gone(self) -> bool:
        """Whether the storage that was saved is freed; until then it can be saved again.

        A Python weak reference decides: in PyTorch 2.9 the C++ reference of `StorageWeakRef` keeps the Python object of
        a freed storage alive, and the tracker counts the bytes as free when that object is deleted.
        """
        return self._watch is None and self._storage() is None

    def is_made_from(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor()` returns this very object as long as the bytes haven't left."""
        return self._watch is tensor

    def finish_returning(self) -> None:
        """Make the current stream wait for the copy in, if one is under way."""
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
        """Note that `stream` uses the saved memory, if the record still holds it."""
        if self._watch is not None and stream is not None and stream not in self._users:
            self._users.append(stream)

    def _used_now(self) -> None:
        """Note that the current stream uses the memory that the record holds; returned memory is waited for."""
        if self.home is None or (stream := current_stream(self.device)) in self._users:
            return
        if self._watch is not None:
            self._users.append(stream)
        else:
            self._wait_for_copy_in()

    def source(self) -> torch.Tensor:
        """Return the whole saved storage as one contiguous tensor; only valid before the device bytes are dropped."""
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
        """Note that the copy out was issued, as block `part` of `group`."""
        self.group, self.part = group, part
        self.state = State.LEAVING
        self._counters.swapped_out_bytes += self.nbytes

    def drop(self) -> None:
        """Drop the device bytes, after the copy out is done."""
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
        """Allocate device memory for the bytes, on the current stream."""
        size, dtype = self._like
        if self._fake is not None:  # `torch.empty` would make real integers here (profiling/bytes/fake.py)
            return self._fake.new_empty(size)
        return torch.empty(size, dtype=dtype, device=self.device)

    def returns(self, batch: _Batch, target: torch.Tensor, home: Any) -> None:
        """Note that the copy in to `target` was issued as part of `batch`; `home` is the stream that allocated it."""
        self._whole, self._batch, self.state = target, batch, State.RETURNING
        if home is not None:
            self.home, self._users = home, []
        self._counters.swapped_in_bytes += self.nbytes

    def whole(self) -> torch.Tensor:
        """Return the whole storage on the device, as one dimension of the dtype in which it was saved first.

        Raises
        ------
        RuntimeError
            If the storage was modified after it was saved and before its copy out was done.
        SwapError
            If a copy failed.
        """
        if self._watch is None:
            return self._brought_back().view(-1)
        self._check(self._watch)
        return self.source().view(-1)

    def tensor(self) -> torch.Tensor:
        """Return the tensor that the record was made from; raises the same errors as `whole`."""
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
        if version_of(self._whole) != self._returned:  # a backward wrote to the returned memory
            raise modified_error([self.nbytes], self._returned, version_of(self._whole))
        return self._whole


def start_leaving(records: Iterable[Record], store: Store, place: Hashable = None) -> None:
    """Issue the copies out of `records` to `store`, as one group per home stream.

    Records that belong to a group already are left out: their bytes stay in the store that got them first.

    Parameters
    ----------
    place : hashable, optional
        Identifies the group within a step, so that it gets the same host memory as in the step before.
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
    """Wait for the copies out, then drop the device bytes. Called at the release point."""
    for record in records:
        if record.state is State.LEAVING:
            assert record.group is not None
            record.group.finish(record._counters)
            record.drop()


def start_returning(records: Sequence[Record]) -> None:
    """Allocate device memory and issue the copies in, one batch per group. Called at the prefetch point."""
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
    """Describes a tensor as a view of its storage: dtype, size, strides, offset (in elements) and lazy flags."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of `tensor`."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view with this geometry of `whole`, a whole storage as one dimension, without autograd."""
        typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        plain = typed.as_strided(self.size, self.stride, self.offset)
        return _lazy(plain, conj=self.conj, neg=self.neg) if self.conj or self.neg else plain


class Held:
    """A saved tensor, held until its backward, with PyTorch's version check, which saved-tensor hooks switch off.

    Parameters
    ----------
    value : torch.Tensor
        Must not be part of the graph: a node that holds its own result would never be freed.

    Attributes
    ----------
    value : torch.Tensor or None
        None once a record holds the bytes.
    version : int or None
        The number of writes to it so far; None in inference mode, where writes aren't counted.
    stream : optional
        The stream that saved it; None where saved tensors never leave.
    """

    __slots__ = ("__weakref__", "_geometry", "record", "stream", "value", "version")

    def __init__(self, value: torch.Tensor, stream: Any = None) -> None:
        # Most saved tensors stay, so `give` computes what only leaving tensors need.
        self.value: torch.Tensor | None = value
        try:
            self.version: int | None = value._version
        except RuntimeError:
            self.version = None
        self.stream = stream
        self.record: Record | None = None

    def give(self, record: Record) -> None:
        """Hand the bytes over to `record`, which holds them from now on."""
        assert self.value is not None
        self._geometry = None if record.is_made_from(self.value) else Geometry.of(self.value)
        self.record, self.value = record, None

    def tensor(self) -> torch.Tensor:
        """Return the tensor; its bytes are copied back first if they are away.

        Raises
        ------
        RuntimeError
            If it was modified after it was saved.
        """
        value = self.value
        if value is None:
            assert self.record is not None
            return self.record.tensor() if self._geometry is None else self._geometry.on(self.record.whole())
        if self.version is not None and value._version != self.version:
            raise modified_error(value.shape, self.version, value._version)
        return value


class _Counted(Held):
    """A tensor that counts in the order of saving but isn't held for backward."""

    __slots__ = ()


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of `tensor`, its number of writes; 0 for inference tensors, which have no counter."""
    return 0 if tensor.is_inference() else tensor._version


_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_STRIDED = torch.strided
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_ITEMSIZE = {d: d.itemsize for d in vars(torch).values() if isinstance(d, torch.dtype) and d not in _QUANTIZED}


def plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is an ordinary strided view of a non-empty storage of whole elements."""
    return _storage_of(tensor, _ITEMSIZE) is not None


def _storage_of(tensor: torch.Tensor, itemsizes: Mapping[torch.dtype, int]) -> tuple[torch.UntypedStorage, int] | None:
    """Return the storage of a `plain` tensor and its bytes; None if `tensor` isn't plain."""
    # Speed matters: this runs for every tensor that a swapped stage saves.
    itemsize = itemsizes.get(tensor.dtype)
    if itemsize is None or type(tensor) not in _PLAIN or tensor.layout is not _STRIDED:
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    return (storage, nbytes) if nbytes > 0 and nbytes % itemsize == 0 else None


_POSITIONED = {dtype: itemsize for dtype, itemsize in _ITEMSIZE.items() if dtype != torch.uint64}


def _positioned(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int] | None:
    """Return the storage and its bytes if it has a position by NOTE [Positions], rules 1 to 3; otherwise None."""
    found = _storage_of(tensor, _POSITIONED)
    if found is None or (found[1] == tensor.itemsize and tensor.dim() == 0):
        return None
    return found


def has_position(tensor: torch.Tensor, never: Callable[[torch.UntypedStorage], bool] = lambda storage: False) -> bool:
    """Whether the storage of a saved tensor has a position (NOTE [Positions]); `never` is True for the model's own."""
    found = _positioned(tensor)
    return found is not None and not never(found[0])


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which autograd is saving now, in a form that can be held until backward.

    If `tensor` is the result of the operation that saves it, this is a detached copy of the reference: held as it is,
    it would keep alive the node that keeps it alive, and both would leak if backward never runs.
    """
    node = tensor.grad_fn
    newest = torch._C._autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    return tensor.detach() if node is not None and node._sequence_nr() == newest else tensor


class Packing:
    """Collects the tensors that one stage saves, in order; which of them leave is decided after the stage has run."""

    def __init__(self, device: torch.device) -> None:
        self._streams = is_accelerator(device)
        self.saved: list[Held] = []

    def pack(self, tensor: torch.Tensor) -> Held:
        """Hold `tensor` for backward and append it to `saved`."""
        # Speed matters: this runs for every saved tensor.
        held = Held(tensor if tensor.grad_fn is None else tensor.detach(), _home_of(tensor) if self._streams else None)
        self.saved.append(held)
        return held

    def skip(self, tensor: torch.Tensor) -> None:
        """Count `tensor` in the order without holding it."""
        self.saved.append(_Counted(tensor))

    def hooks(
        self, compared: Callable[[torch.Tensor], Compare] | None = None
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """Return saved-tensor hooks that collect what autograd saves; for `compared` see `UsersHooks.through`."""
        users = UsersHooks.around()
        return torch.autograd.graph.saved_tensors_hooks(
            self.pack if users is None else out_of_sight(users.through(self.pack, compared)), unpack
        )


unpack: Callable[[Kept], torch.Tensor] = operator.methodcaller("tensor")
"""Return the tensor that was packed."""


_Key = tuple[int, int | None]
"""Identifies a storage in one version, as long as the storage is alive: its address and the version."""


def _fit(sizes: Sequence[int], moves: tuple[int, ...], planned: Sequence[int]) -> bool:
    """Whether the saved storages in all, and each one that stays, are no larger than planned."""
    if len(sizes) != len(planned) or sum(sizes) > sum(planned):
        return False
    stays = set(range(len(sizes))).difference(moves)
    return all(sizes[i] <= planned[i] for i in stays)


class SwapSession:
    """The records of one forward pass and the backward that follows it.

    Parameters
    ----------
    stores : mapping of tier to Store
        One per tier that the plan moves storages to.
    device : torch.device
        Only tensors on this device are moved.
    never : callable
        Whether a storage belongs to the model (parameters and buffers, recognised by storage).
    planned : sequence of sequences of int
        Per stage, the bytes of each storage in the order of saving; empty if not known.
    checks : Checks, optional
        Compares the returned bytes with those that left.
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
        # Weak references: autograd owns the `Held`, and these own their record. Entries of freed storages are stale.
        self._holders: collections.defaultdict[_Key, list[weakref.ref[Held]]] = collections.defaultdict(list)
        self._records: dict[_Key, weakref.ref[Record]] = {}
        self._moved: dict[int, list[weakref.ref[Record]]] = {}

    @contextlib.contextmanager
    def stage(self, index: int, moves: tuple[int, ...], tier: Tier = "host") -> Iterator[None]:
        """Collect what autograd saves inside; at an exit without error, start the copies out of `moves`.

        Parameters
        ----------
        moves : tuple of int
            Positions of the storages that leave, counted in the order of first saving (NOTE [Positions]).
        tier : "host" or "disk"
            The tier that they are copied to.
        """
        packing = self.packing()
        with packing.hooks(None if self._checks is None else functools.partial(self._checks.saves, index)):
            yield
        self.leave(index, packing.saved, moves, tier)

    def packing(self) -> Packing:
        """Return a new `Packing` for one run of a stage."""
        return Packing(self._device)

    def stream(self) -> Any:
        """Return the current stream; None on devices without streams."""
        return current_stream(self._device)

    def belongs(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is the model's own."""
        return self._never(tensor.untyped_storage())

    def leave(self, index: int, saved: list[Held], moves: tuple[int, ...], tier: Tier = "host") -> None:
        """Start the copies out to `tier` of the storages in `saved` at the positions `moves`, for stage `index`.

        Empties `saved`, since autograd keeps the pack hook, and with it the list, as long as one of the saved tensors.

        Raises
        ------
        PlanMismatchError
            If a position doesn't exist, or names a storage that the stage doesn't hold on the device.
        """
        sizes = self._counted(saved)
        if moves and self._planned:
            moves = self._as_planned(sizes, moves, self._planned[index])
        if moves and max(moves) >= len(sizes):
            raise PlanMismatchError(
                f"the stage saved {len(sizes)} storages, the plan moves number {max(moves) + 1}: its forward took "
                "another path than the one profiled; solve again with such inputs"
            )
        for key in self._records.keys() & sizes.keys():  # these have a record from another stage
            self._record(key)
        leaving = []
        keys = tuple(sizes)
        for position in moves:
            key = keys[position]
            if sizes[key] == 0:
                raise PlanMismatchError(
                    f"the plan moves storage number {position + 1} of the stage, which its segment makes again instead "
                    f"of holding it, or which is not on {self._device}; solve again with this step"
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
        """Return the bytes of each storage in `saved`, in order, 0 if no tensor of it is held; empties `saved`."""
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
        """Return the record of a storage and hand the bytes of all its holders over to it; None without a holder."""
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
        """Return the positions to move so that no more bytes stay than planned, whatever path the forward took.

        Smaller inputs may save other storages, in another order: one sample needs no copy where several do, a mask
        without padding is dropped. Then positions have no meaning, and sizes decide: the smallest storages stay, as
        many as fit in the bytes that were planned to stay, and the others leave. For example, planned are 8, 6 and 2
        MiB, of which the first moves, so 8 MiB may stay. If a forward saves 7, 4 and 3 MiB, then 3 and 4 stay, and 7
        leaves.

        Raises
        ------
        PlanMismatchError
            If the storages have more bytes in all than planned.
        """
        sizes = list(counted.values())
        if _fit(sizes, moves, planned):
            return moves
        # Storages whose graph the stage itself has dropped are no longer held: they count 0 bytes.
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
            f"the stage saved {len(sizes)} storages of {sum(sizes)} bytes, the plan expects {len(planned)} of "
            f"{sum(planned)}: its forward took another path than the one profiled; solve again with such inputs"
        )

    def release(self, index: int) -> None:
        """Wait for the copies out of stage `index` and free its device bytes: its release point."""
        finish_leaving(self._alive(index))

    def prefetch(self, index: int) -> None:
        """Start the copies in of stage `index`: its prefetch point."""
        start_returning(self._alive(index))

    def states(self) -> dict[State, list[int]]:
        """Return, by state, the bytes of each record that a stage has sent away and that is still alive."""
        found: dict[int, Record] = {id(r): r for index in self._moved for r in self._alive(index)}
        out: dict[State, list[int]] = {}
        for record in found.values():
            out.setdefault(record.state, []).append(record.nbytes)
        return out

    def _alive(self, index: int) -> list[Record]:
        return [record for ref in self._moved.get(index, ()) if (record := ref()) is not None]
