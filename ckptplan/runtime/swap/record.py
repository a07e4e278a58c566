"""Records: the storages that leave the device between their forward and their backward.

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
6. The storages of one transfer leave as one *group*: one wait for compute, one batch of copies, one event. All of
   the group's device bytes count until its last copy is done, and are freed together. The group returns as one batch
   too, without the records that were needed (and copied back) earlier and those that were freed. Its host bytes are
   freed with its last record.

Example: a stage saves `x` of 4 MiB, the view `x[0]`, and `y` of 8 MiB, and moves both storages. At its end there are
two records in one group of 12 MiB, both LEAVING; `x` and `x[0]` share a record. The release point waits once for both
copies and frees 12 MiB of device memory: AWAY. The prefetch point allocates 12 MiB and issues both copies in:
RETURNING. The first unpack waits for them: ON_DEVICE. If backward had unpacked `x[0]` before the prefetch point, `x`
would have come back by itself, and the prefetch would move only the 8 MiB of `y`.

NOTE [Models on several streams]

Stages may run on different CUDA streams, chosen by the model or its caller. Autograd runs the backward of each
operation on the stream of its forward. So the stream that is current at a release or prefetch point need not be one
that uses the storage.

1. A record has a *home*: the stream that first saved the storage, and after a return the stream that allocated the new
   memory. The copy out waits for the home, because the home made the last write or runs after it. At the release point
   the home waits for the copy out. So the storages of a transfer form one group per home.
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

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckptplan.core.errors import CkptPlanError
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.stores import Store, Ticket
from ckptplan.tensors.accelerator import current_stream, is_accelerator, on_stream
from ckptplan.tensors.private import is_fake
from ckptplan.tensors.views import Geometry, covers, modified_error, version_of, whole_storage

_UNKNOWN = object()
_NO_USERS: list[Any] = []
"""The users of records on devices without streams: shared by all of them, and always empty."""


class Whereabouts(enum.Enum):
    """Where a record's bytes are."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    RETURNING = enum.auto()


def home_of(tensor: torch.Tensor) -> Any:
    """Return the current stream of the tensor's device; None for fake tensors and on devices without streams."""
    device = tensor.device
    return current_stream(device) if is_accelerator(device) and not is_fake(tensor) else None


class _LeavingGroup:
    """The storages that left together (NOTE [States of a swapped storage], rule 6)."""

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
        if hasattr(self, "ticket"):  # no interrupt ended `__init__`
            self.store.free(self.ticket)


class _ReturnBatch:
    """Copies in that were issued together (NOTE [States of a swapped storage], rule 6)."""

    def __init__(self, group: _LeavingGroup, done: Any, home: Any) -> None:
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

    def __init__(
        self, tensor: torch.Tensor, counters: Counters, home: Any = _UNKNOWN, version: int | None = None
    ) -> None:
        self.state = Whereabouts.ON_DEVICE
        self._counters = counters
        # Shares the version counter of the saved tensor; the object that autograd passes to hooks is another one.
        self._watch: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self._whole: torch.Tensor | None = None
        self._geometry: Geometry | None = None
        self.version = tensor._version if version is None else version
        self.device = tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self.group: _LeavingGroup | None = None
        self.on_return: Callable[[torch.Tensor], None] | None = None
        # NOTE [Models on several streams]; `_users` are the streams that use the memory that the record holds now.
        self.home = home_of(tensor) if home is _UNKNOWN else home
        self._users: list[Any] = _NO_USERS if self.home is None else [self.home]

    def __del__(self) -> None:
        # Without a state if an interrupt ended `__init__`. In any thread, so it isn't counted as a stall of compute.
        if getattr(self, "state", None) is Whereabouts.RETURNING:
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
        if self.state is Whereabouts.RETURNING:
            self._wait_for_copy_in()
            assert self._whole is not None
            self._returned = version_of(self._whole)
            self.state = Whereabouts.ON_DEVICE
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

    @property
    def saved(self) -> torch.Tensor:
        """The tensor that was saved first; only valid before the device bytes are dropped."""
        assert self._watch is not None
        return self._watch

    def source(self) -> torch.Tensor:
        """Return the whole saved storage as one contiguous tensor; only valid before the device bytes are dropped."""
        watch = self.saved
        if self._whole is None:
            if covers(watch, self.nbytes):
                self._whole = watch
            else:
                self._whole = whole_storage(watch)
                self._geometry = Geometry.of(watch)
        return self._whole

    def sent(self, group: _LeavingGroup, part: int) -> None:
        """Note that the copy out was issued, as block `part` of `group`."""
        self.group, self.part = group, part
        self.state = Whereabouts.LEAVING
        self._counters.swapped_out_bytes += self.nbytes

    def drop(self) -> None:
        """Drop the device bytes, after the copy out is done."""
        whole, watch = self._whole, self.saved
        assert whole is not None
        self._modified = None if watch._version == self.version else watch._version
        self._tell_allocator(self._users)
        self._storage = weakref.ref(whole.untyped_storage())
        self._like = whole.size(), whole.dtype
        self._fake = whole.new_empty(0) if is_fake(whole) else None
        self._whole = self._watch = None
        self.state = Whereabouts.AWAY

    def target(self) -> torch.Tensor:
        """Allocate device memory for the bytes, on the current stream."""
        size, dtype = self._like
        if self._fake is not None:  # `torch.empty` would make real integers here (profiling/bytes/fake.py)
            return self._fake.new_empty(size)
        return torch.empty(size, dtype=dtype, device=self.device)

    def returns(self, batch: _ReturnBatch, target: torch.Tensor, home: Any) -> None:
        """Note that the copy in to `target` was issued as part of `batch`; `home` is the stream that allocated it."""
        self._whole, self._batch, self.state = target, batch, Whereabouts.RETURNING
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
        if self.state is Whereabouts.ON_DEVICE:
            self._used_now()
        else:
            if self.state is Whereabouts.AWAY:
                start_returning([self])
            self.finish_returning()
        if self._modified is not None:
            raise modified_error([self.nbytes], self.version, self._modified)
        assert self._whole is not None
        if version_of(self._whole) != self._returned:  # a backward wrote to the returned memory
            raise modified_error([self.nbytes], self._returned, version_of(self._whole))
        return self._whole


def start_leaving(records: Iterable[Record], store: Store) -> None:
    """Issue the copies out of `records` to `store`, as one group per home stream.

    Records that belong to a group already are left out: their bytes stay in the store that got them first.
    """
    homes: dict[Any, list[Record]] = {}
    for record in records:
        if record.group is None:
            homes.setdefault(record.home, []).append(record)
    for home, leaving in homes.items():
        with on_stream(home):
            ticket = store.start_out(*(record.source() for record in leaving))
        group = _LeavingGroup(store, ticket, home)
        for part, record in enumerate(leaving):
            record.sent(group, part)


def finish_leaving(records: Iterable[Record]) -> None:
    """Wait for the copies out, then drop the device bytes. Called at the release point."""
    for record in records:
        if record.state is Whereabouts.LEAVING:
            assert record.group is not None
            record.group.finish(record._counters)
            record.drop()


def start_returning(records: Sequence[Record]) -> None:
    """Allocate device memory and issue the copies in, one batch per group. Called at the prefetch point."""
    finish_leaving(records)
    away: dict[_LeavingGroup, list[tuple[int, Record]]] = {}
    for record in records:
        if record.state is Whereabouts.AWAY:
            assert record.group is not None
            away.setdefault(record.group, []).append((record.part, record))
    for group, members in away.items():
        first = members[0][1]
        home = None if first.home is None else current_stream(first.device)
        targets = [record.target() for _, record in members]
        batch = _ReturnBatch(
            group, group.store.start_in(group.ticket, *targets, parts=[part for part, _ in members]), home
        )
        for (_, record), target in zip(members, targets, strict=True):
            record.returns(batch, target, home)
