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
2. Every stream that uses a returned storage waits for its copy in, once. The home waits at the latest when the record
   ends, since its memory goes back there.
3. The allocator gives memory back to the stream that allocated it, which may be none of ours, and orders nothing
   else. It is told the home and all other users (`record_stream`). For the stream that allocated this does nothing, so
   where there is one stream memory is free at once, as planned. It is never told a copy stream.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckptplan.core.chain import Tier
from ckptplan.core.errors import CkptPlanError, PlanMismatchError
from ckptplan.runtime.compiled import out_of_sight
from ckptplan.runtime.meter import Meter
from ckptplan.runtime.stores import Store, Ticket

MIN_SWAP_BYTES = 1 << 12
"""No plan moves smaller storages: a transfer's fixed cost exceeds what they free."""


class State(enum.Enum):
    """Where a record's bytes are."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    RETURNING = enum.auto()


def current_stream(device: torch.device) -> Any:
    """The stream that computes now on `device`; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, `stream` computes, if there is one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _lazy(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """A view with the flags of a lazy conjugation and negation flipped: the same bytes, read another way."""
    if neg:
        tensor = torch._neg_view(tensor)
    return torch._conj(tensor) if conj else tensor


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as one dimension of its dtype, without autograd and without lazy flags."""
    with torch.no_grad():
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        plain = _lazy(tensor.detach(), conj=tensor.is_conj(), neg=tensor.is_neg())
        return plain.as_strided((count,), (1,), 0)


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


class Record:
    """One storage under swap (NOTE [States of a swapped storage])."""

    def __init__(self, tensor: torch.Tensor, counters: Counters) -> None:
        self._store: Store | None = None
        self._counters = counters
        self.state = State.ON_DEVICE
        self.nbytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device
        # What is saved in vain, or stays, is most of all: what only records need that leave is made when they do.
        self._whole: torch.Tensor | None = None
        self._watch: torch.Tensor | None = tensor.detach()  # shares the version counter of what was saved
        self._geometry: Geometry | None = None
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self.version = tensor._version
        self._modified: int | None = None
        self._returned: int | None = None
        self._ticket: Ticket | None = None
        # NOTE [Models on several streams]; the users are those of the memory that the record holds now.
        self._fake = isinstance(tensor, FakeTensor)
        self._home = self._stream_now()
        self._users = [self._home]

    @property
    def is_gone(self) -> bool:
        """Whether the storage that was saved is freed; until then it can be saved again.

        By Python's weak reference: in PyTorch 2.9 the C++ one of `StorageWeakRef` keeps the Python object of a
        freed storage alive, whose end tells the tracker that the bytes are free.
        """
        return self._watch is None and self._storage is not None and self._storage() is None

    def start_leaving(self, store: Store) -> None:
        """Issue the copy out to `store`, where the bytes stay whoever else sends them away later."""
        if self.state is State.ON_DEVICE and self._ticket is None:
            assert self._watch is not None
            self._geometry = Geometry.of(self._watch)
            if self._whole is None:
                self._whole = whole_storage(self._watch)
            with on_stream(self._home):
                self._ticket, self._store = store.start_out(self._whole), store
            self.state = State.LEAVING
            self._counters.swapped_out_bytes += self.nbytes

    def finish_leaving(self) -> None:
        """Wait for the copy out, then drop the device bytes: the release point."""
        if self.state is not State.LEAVING:
            return
        assert self._ticket is not None
        assert self._store is not None
        with self._counters.waiting(), on_stream(self._home):
            self._store.finish_out(self._ticket)
        self._check_version()
        assert self._whole is not None
        self._tell_allocator(self._users)
        self._storage = weakref.ref(self._whole.untyped_storage())
        self._dtype, self._count = self._whole.dtype, self._whole.numel()
        self._empty = self._whole.new_empty(0) if self._fake else None
        self._whole = self._watch = None
        self.state = State.AWAY

    def start_returning(self) -> None:
        """Allocate on the device and issue the copy in: the prefetch point."""
        self.finish_leaving()
        if self.state is State.AWAY:
            assert self._ticket is not None
            assert self._store is not None
            self._home, self._users = self._stream_now(), []
            if self._empty is None:
                self._whole = torch.empty(self._count, dtype=self._dtype, device=self._device)
            else:  # where whole numbers that are made from nothing would be real (profiling/fake.py)
                self._whole = self._empty.new_empty(self._count)
            self._store.start_in(self._ticket, self._whole)
            self.state = State.RETURNING
            self._counters.swapped_in_bytes += self.nbytes

    def finish_returning(self) -> None:
        """Wait for the copy in, on the stream that computes now."""
        if self.state is State.RETURNING:
            self._wait_for_copy_in()
            assert self._whole is not None
            self._returned = version_of(self._whole)
            self.state = State.ON_DEVICE

    def _wait_for_copy_in(self) -> None:
        assert self._ticket is not None
        assert self._store is not None
        with self._counters.waiting():
            self._store.finish_in(self._ticket)
        self._users.append(self._stream_now())
        self._tell_allocator(self._users[-1:])

    def _stream_now(self) -> Any:
        return None if self._fake else current_stream(self._device)

    def _tell_allocator(self, users: Sequence[Any]) -> None:
        assert self._whole is not None
        for stream in users:
            if stream is not None:
                self._whole.record_stream(stream)

    def used_now(self) -> None:
        """The stream that computes now uses the memory that the record holds, if it holds any."""
        if self._home is None or (stream := self._stream_now()) in self._users:
            return
        if self._watch is not None:
            self._users.append(stream)
        elif self.state is State.ON_DEVICE:
            self._wait_for_copy_in()

    def whole(self) -> torch.Tensor:
        """The whole storage on the device, as one dimension of the dtype in which it was saved first.

        Raises
        ------
        RuntimeError
            If the storage was modified after it was saved and before its copy had left.
        SwapError
            If a copy failed.
        """
        self._bring()
        if self._whole is None:
            assert self._watch is not None
            self._whole = whole_storage(self._watch)
        return self._whole

    def as_saved(self) -> torch.Tensor:
        """The tensor that the record was made from; raises as `whole`."""
        self._bring()
        if self._watch is not None:
            return self._watch.detach()
        assert self._geometry is not None
        return self._geometry.on(self.whole())

    def _bring(self) -> None:
        if self.state in (State.AWAY, State.RETURNING):
            self.start_returning()
            self.finish_returning()
        elif self._ticket is not None:
            self.used_now()
        self._check_version()
        if self._modified is not None:
            raise modified_error([self.nbytes], self.version, self._modified)
        if self._returned is not None and self._whole is not None and version_of(self._whole) != self._returned:
            raise modified_error([self.nbytes], self._returned, version_of(self._whole))  # a backward wrote to it

    def _check_version(self) -> None:
        if self._watch is not None and self._watch._version != self.version:
            self._modified = self._watch._version

    def __del__(self) -> None:
        if getattr(self, "_ticket", None) is None:
            return
        # A target must not be freed under a copy that still writes to it: the stream it came from waits, whichever
        # is current where the record ends.
        with contextlib.suppress(CkptPlanError), on_stream(self._home):
            if self.state is State.RETURNING:  # in any thread, so that this wait is nobody's stall
                self._store.finish_in(self._ticket)  # type: ignore[union-attr, arg-type]
        self._store.free(self._ticket)  # type: ignore[union-attr, arg-type]


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
        """The tensor of this geometry on `whole`, a whole storage as one dimension."""
        with torch.no_grad():
            typed = whole if whole.dtype == self.dtype else whole.view(self.dtype)
            plain = typed.as_strided(self.size, self.stride, self.offset)
            return _lazy(plain, conj=self.conj, neg=self.neg)


@dataclass(slots=True)
class Alias:
    """A saved tensor as a view of a record; without a geometry, as the one that the record was made from."""

    record: Record
    geometry: Geometry | None = None

    def tensor(self) -> torch.Tensor:
        """The tensor, brought back where it was away."""
        if self.geometry is None:
            return self.record.as_saved()
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


Packed = Alias | Held


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written to; tensors made in inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is nothing but a view of a storage of whole elements."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and (nbytes := tensor.untyped_storage().nbytes()) > 0
        and nbytes % tensor.element_size() == 0
    )


def has_position(tensor: torch.Tensor, never: Callable[[torch.UntypedStorage], bool] = lambda storage: False) -> bool:
    """Whether the storage of a saved tensor has a position in the order of saving (NOTE [Positions])."""
    return (
        plain(tensor)
        and tensor.dtype is not torch.uint64
        and not (tensor.dim() == 0 and tensor.untyped_storage().nbytes() == tensor.element_size())
        and not never(tensor.untyped_storage())
    )


Order = dict[tuple[int, int], "Record | None"]
"""Storages in the order of their packing; None: counted, but not held."""


def storage_key(tensor: torch.Tensor) -> tuple[int, int]:
    """A storage in one version, as long as it is alive."""
    return tensor.untyped_storage()._cdata, version_of(tensor)


class Packing:
    """Packs what one stage holds, and remembers in which order."""

    def __init__(self, session: SwapSession) -> None:
        self._session = session
        self.order: Order = {}

    def pack(self, tensor: torch.Tensor) -> Packed:
        """`tensor` as a view of its record, or itself where it can't be moved."""
        if not self._session.has_position(tensor):
            return _held(tensor)
        key = storage_key(tensor)
        if not self._session.is_here(tensor):
            self.order.setdefault(key, None)
            return _held(tensor)
        record, is_new = self._session.record(tensor, key)
        self.order.setdefault(key, record)
        return Alias(record) if is_new else Alias(record, Geometry.of(tensor))

    def skip(self, tensor: torch.Tensor) -> None:
        """Count `tensor` in the order without holding it."""
        if self._session.has_position(tensor):
            self.order.setdefault(storage_key(tensor), None)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Pack what autograd saves inside."""
        return torch.autograd.graph.saved_tensors_hooks(out_of_sight(self.pack), unpack)


def _held(tensor: torch.Tensor) -> Held:
    """`tensor` itself, without the graph: a node that holds its own result would never be freed."""
    return Held(tensor if tensor.grad_fn is None else tensor.detach(), version_of(tensor))


def unpack(packed: Packed) -> torch.Tensor:
    """The tensor that was packed."""
    return packed.tensor()


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
        self._records: weakref.WeakValueDictionary[tuple[int, int], Record] = weakref.WeakValueDictionary()
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

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on the device that is planned for."""
        return tensor.device == self._device

    def stream(self) -> Any:
        """The stream that computes now; None where there are no streams."""
        return current_stream(self._device)

    def belongs(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is the model's own."""
        return self._never(tensor.untyped_storage())

    def record(self, tensor: torch.Tensor, key: tuple[int, int]) -> tuple[Record, bool]:
        """The record of a movable tensor's storage in its version, shared by all stages of this forward.

        Parameters
        ----------
        key : tuple
            Its `storage_key`.

        Returns
        -------
        tuple
            The record, and whether it was made now, from this tensor.
        """
        record = self._records.get(key)
        if record is not None and not record.is_gone:
            record.used_now()
            return record, False
        record = self._records[key] = Record(tensor, self._counters)
        return record, True

    def leave(self, index: int, order: Order, moves: tuple[int, ...], tier: Tier = "host") -> None:
        """What `moves` names of `order`, which is emptied, starts to leave for `tier`, on behalf of stage `index`.

        Raises
        ------
        PlanMismatchError
            If there is no such position, or it stands for what the stage doesn't hold.
        """
        held = [record is not None for record in order.values()]
        alive = [None if record is None else weakref.ref(record) for record in order.values()]
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
        for record in leaving:
            record.start_leaving(self._stores[tier])
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
            stays = [i for i in range(len(sizes)) if i not in moves]
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
        for record in self._alive(index):
            record.finish_leaving()

    def prefetch(self, index: int) -> None:
        """The prefetch point of stage `index`."""
        for record in self._alive(index):
            record.start_returning()

    def states(self) -> dict[State, list[int]]:
        """Bytes of every record that was sent away by a stage and is alive, by state."""
        found: dict[int, Record] = {id(r): r for index in self._moved for r in self._alive(index)}
        out: dict[State, list[int]] = {}
        for record in found.values():
            out.setdefault(record.state, []).append(record.nbytes)
        return out

    def _alive(self, index: int) -> list[Record]:
        return [record for ref in self._moved.get(index, ()) if (record := ref()) is not None]
