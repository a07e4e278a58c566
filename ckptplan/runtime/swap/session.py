"""Swap sessions: which of the tensors saved in one forward leave the device, and when they leave and return."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptplan.core.errors import SwapFullError
from ckptplan.core.link import Tier
from ckptplan.core.plan import Transfer
from ckptplan.core.units import format_bytes
from ckptplan.runtime.guard.check import Checks, Spots
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import Held, Packing, Passing
from ckptplan.runtime.swap.record import Record, finish_leaving, start_leaving, start_returning
from ckptplan.runtime.swap.stores import Store
from ckptplan.runtime.swap.weights import Weights
from ckptplan.tensors.accelerator import current_stream
from ckptplan.tensors.positions import positioned
from ckptplan.tensors.storages import tensors_in

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
    checks : Checks or Spots, optional
        Compares the returned bytes with those that left.
    weights : Weights, optional
        Of the model's own storages, those that move.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        device: torch.device,
        never: Callable[[torch.UntypedStorage], bool],
        counters: Counters,
        planned: Sequence[Sequence[int]] = (),
        checks: Checks | Spots | None = None,
        weights: Weights | None = None,
    ) -> None:
        self._weights = weights
        self._planned = planned
        self._checks = checks
        self._given: dict[int, tuple[int, int]] = {}
        self._stores = stores
        self._device = device
        self._never = never
        self._counters = counters
        # Weak references: autograd owns the `Held`, and these own their record. Entries of freed storages are stale.
        self._holders: collections.defaultdict[_Key, list[weakref.ref[Held]]] = collections.defaultdict(list)
        self._records: dict[_Key, weakref.ref[Record]] = {}
        # By (stage, number of the transfer), what leaves by its release point and returns at its prefetch point.
        self._leaving: dict[tuple[int, int], list[weakref.ref[Record]]] = {}
        self._returning: dict[tuple[int, int], list[weakref.ref[Record]]] = {}

    @contextlib.contextmanager
    def stage(self, index: int, transfers: Sequence[Transfer], tier: Tier = "host") -> Iterator[None]:
        """Collect what autograd saves inside; at an exit without error, start the copies out of `transfers`.

        Parameters
        ----------
        transfers : sequence of Transfer
            With the positions of the storages that leave, counted in the order of first saving (NOTE [Positions]).
        tier : "host" or "disk"
            The tier that they are copied to.
        """
        packing = self.packing() if transfers else Passing(self._device)
        with packing.hooks(None if self._checks is None else functools.partial(self._checks.saves, index)):
            yield
        self.leave(index, packing.collected(), transfers, tier)

    def takes(self, inputs: Any) -> None:
        """Note the inputs of the pass. One that is a view of a larger batch counts with the bytes that it spans.

        Its storage is the batch's, which the caller holds. Example: a pipeline runs chunks of a batch, 64 of 256 rows.
        """
        for tensor in tensors_in(inputs):
            found = positioned(tensor)
            if found is not None and 0 < tensor.nbytes < found[1]:
                reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                begin = int(tensor.storage_offset()) * tensor.itemsize
                end = begin + reach * tensor.itemsize
                known = self._given.get(found[0]._cdata, (begin, end))
                self._given[found[0]._cdata] = min(known[0], begin), max(known[1], end)

    def packing(self) -> Packing:
        """Return a new `Packing` for one run of a stage."""
        return Packing(self._device)

    def stream(self) -> Any:
        """Return the current stream; None on devices without streams."""
        return current_stream(self._device)

    def belongs(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is the model's own."""
        return self._never(tensor.untyped_storage())

    def own(self, tensor: torch.Tensor) -> Held | None:
        """Return what holds a saved tensor that lies in the model's own memory; None if it doesn't."""
        storage = tensor.untyped_storage()
        if not self._never(storage):
            return None
        held = Held(tensor.detach() if tensor.requires_grad else tensor)
        part = None if self._weights is None else self._weights.part(tensor, storage)
        if part is not None:
            held.give(part)
        return held

    def leave(self, index: int, saved: list[Held], transfers: Sequence[Transfer], tier: Tier = "host") -> None:
        """Start the copies out to `tier` of the storages in `saved` at the positions in `transfers`, for stage `index`.

        Empties `saved`, since autograd keeps the pack hook, and with it the list, as long as one of the saved tensors.
        Positions that don't exist, or whose storage the stage doesn't hold on the device, are left out as a difference
        (NOTE [Differences]).
        """
        sizes = self._counted(saved)
        groups = {number: transfer.moves for number, transfer in enumerate(transfers)}
        moves = planned = tuple(p for group in groups.values() for p in group)
        if moves and self._planned:
            moves = self._as_planned(sizes, moves, self._planned[index])
        elif (
            self._planned
            and not transfers  # kept, but for its weights
            and self._weights is not None
            and self._weights.uses(index)
            and sum(sizes.values()) > sum(self._planned[index])
        ):
            self._note_more(list(sizes.values()), self._planned[index])
        if moves and max(moves) >= len(sizes):
            self._counters.differences.note(
                "saved",
                f"the stage saved {len(sizes)} storages, the plan moves number {max(moves) + 1}: its forward took "
                "another path than the one profiled; solve again with such inputs",
            )
            moves = tuple(p for p in moves if p < len(sizes))
        for key in self._records.keys() & sizes.keys():
            if self._found(key) is not None:  # from another stage
                self._record(key)
        back = groups
        if moves != planned:  # in one transfer, which is away for as long as any was to be
            groups = {min(groups, key=lambda number: transfers[number].release): moves}
            back = {min(back, key=lambda number: transfers[number].prefetch): moves}
        keys = tuple(sizes)
        records: dict[int, Record] = {}
        for position in moves:
            key = keys[position]
            if sizes[key] == 0:
                self._counters.differences.note(
                    "saved",
                    f"the plan moves storage number {position + 1} of the stage, which its segment makes again instead "
                    f"of holding it, or which is not on {self._device}; solve again with this step",
                )
                continue
            record = self._record(key)
            if record is not None:
                records[position] = record
        if self._checks is not None:
            for record in records.values():
                self._checks.leaves(record, index)
        for group in groups.values():
            leaving = [records[p] for p in group if p in records]
            try:
                start_leaving(leaving, self._stores[tier])
            except SwapFullError as error:
                stay = sum(record.nbytes for record in leaving if record.group is None)
                text = f"{format_bytes(stay)} of a stage stay on the device, since the swap space is full: {error}"
                self._counters.differences.note("full", text, error)
        for events, parts in ((self._leaving, groups), (self._returning, back)):
            for number, group in parts.items():
                refs = [weakref.ref(records[p]) for p in group if p in records]
                events.setdefault((index, number), []).extend(refs)  # a stage may be called more often than planned

    def _counted(self, saved: list[Held]) -> dict[_Key, int]:
        """Return the bytes of each storage in `saved`, in order, 0 if no tensor of it is held; empties `saved`."""
        device, never, holders = self._device, self._never, self._holders
        sizes: dict[_Key, int] = {}
        for each in saved:
            value = each.value
            found = None if value is None else positioned(value)
            if value is None or found is None:
                continue
            if never(found[0]):
                part = None if self._weights is None else self._weights.part(value, found[0])
                if part is not None and type(each) is Held:
                    each.give(part)
                continue
            key = found[0]._cdata, each.version
            if type(each) is Held and each.version is not None and value.device == device:
                begin, end = self._given.get(key[0], (0, found[1]))
                sizes[key] = end - begin
                holders[key].append(weakref.ref(each))
            else:
                sizes.setdefault(key, 0)
        saved.clear()
        return sizes

    def _record(self, key: _Key) -> Record | None:
        """Return the record of a storage and hand the bytes of all its holders over to it; None without a holder."""
        holders = [held for ref in self._holders.pop(key, ()) if (held := ref()) is not None]
        record = self._found(key)
        if record is None:
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

    def _found(self, key: _Key) -> Record | None:
        """Return the record of a storage; None if it has none, though a freed one at its address had."""
        ref = self._records.get(key)
        record = None if ref is None else ref()
        return None if record is None or record.is_gone else record

    def _as_planned(
        self, counted: Mapping[_Key, int], moves: tuple[int, ...], planned: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the positions to move so that no more bytes stay than planned, whatever path the forward took.

        Smaller inputs may save other storages, in another order: one sample needs no copy where several do, a mask
        without padding is dropped. Then positions have no meaning, and sizes decide: the smallest storages stay, as
        many as fit in the bytes that were planned to stay, and the others leave. For example, planned are 8, 6 and 2
        MiB, of which the first moves, so 8 MiB may stay. If a forward saves 7, 4 and 3 MiB, then 3 and 4 stay, and 7
        leaves. If they have more bytes in all than planned, all of them leave, as a difference: which of the planned
        ones would stay, and which another stage moves, isn't known then.
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
        room = sum(planned) - sum(planned[i] for i in moves)
        if sum(sizes) > sum(planned):
            room = 0
            self._note_more(sizes, planned)
        leaving = []
        for i in sorted(range(len(sizes)), key=sizes.__getitem__):
            room -= sizes[i]
            if room < 0 and sizes[i] > 0:
                leaving.append(i)
        return tuple(sorted(leaving))

    def _note_more(self, sizes: Sequence[int], planned: Sequence[int]) -> None:
        self._counters.differences.note(
            "saved",
            f"a stage saved {len(sizes)} storages of {sum(sizes)} bytes, the plan expects {len(planned)} of "
            f"{sum(planned)}: its forward took another path than the one profiled; solve again with such inputs",
        )

    def release(self, index: int, transfer: int = 0) -> None:
        """Wait for the copies out of a transfer of stage `index` and free its device bytes: its release point."""
        finish_leaving(_alive(self._leaving.get((index, transfer), ())))

    def prefetch(self, index: int, transfer: int = 0) -> None:
        """Start the copies in of a transfer of stage `index`: its prefetch point."""
        start_returning(_alive(self._returning.get((index, transfer), ())))


def _alive(refs: Iterable[weakref.ref[Record]]) -> list[Record]:
    return [record for ref in refs if (record := ref()) is not None]
