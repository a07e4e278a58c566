"""A model of PyTorch's CUDA caching allocator: what a trace of requests makes it reserve.

Source of the rules: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch, read at a development revision after 2.9 that has
the setting `large_segment_size_mb` (GitHub, DustyL/pytorch at 023bca6; what that fork adds for managed memory is left
out), and the headers `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h` of 2.13; nothing of it is
copied. The words are PyTorch's: a *segment* is what the driver handed out, a *block* a part of it, *allocated* counts
the blocks of live tensors, *requested* what was asked for, *reserved* the segments.

On a request, in this order:

1. Blocks whose streams have passed their events become free.
2. The size rounds up, to 512 or to a division of its power of two. Up to 1 MiB it belongs to the small pool, else to
   the large one.
3. The smallest free block of that pool and stream that holds it is taken; of equal ones that with the lowest address.
   With `max_split_size_bytes`, a smaller request takes no block of that size or more, and another no block that is
   larger by `max_non_split_rounding_bytes`.
4. With a threshold and a memory fraction, segments unused for long are released (large pool only).
5. A new segment: 2 MiB in the small pool; `large_segment_bytes` for less than 10 MiB; else the size rounded up to
   2 MiB.
6. If that fails: with `max_split_size_bytes`, unused blocks of at least that size are released, the smallest that is
   large enough or as many as it takes, and 5 again; then every unused whole segment of both pools and all streams is,
   after waiting for all events, and 5 again; then out of memory.
7. What is left of the block is split off: in the small pool from 512 bytes, in the large pool above 1 MiB and only for
   sizes below `max_split_size_bytes`. The request keeps the low address.

On a free the block merges with its free neighbours. A block that other streams have used waits for their events.

With expandable segments, step 5 maps pages (2 MiB in the small pool, `large_segment_bytes` in the large one) at the
lowest address of the stream's segment where free and unmapped room together suffice, so a free block at the end of what
is mapped counts; in step 3 a block counts with the unmapped room behind it; rests split off from 512 bytes; releasing
unmaps every page that holds no part of a live block.

Where the source differs from the short list of rules in this project's notes, the source was followed:

- "requested" falls when a block is free for reuse, not when it is freed: with events outstanding it can exceed
  "allocated". `active_bytes` counts the blocks that are allocated or wait.
- The bound of 20 MiB on larger blocks (rule 3) is the setting `max_non_split_rounding_mb`; its default is the size of
  large segments.
- Power-of-two divisions leave sizes up to 512 * divisions alone, and their intervals reach from 1 MiB to 64 GiB.
- Requests of 0 bytes take nothing.
- Inactive split bytes leave expandable segments out.
- The memory fraction is checked with the size of rule 5, also where expandable segments would map less.
- `max_split_size_bytes` acts with expandable segments too (rule 3).

Where the driver puts a segment decides between equal free blocks of different segments (rule 3), so it can decide what
is reserved. It is the one thing here that isn't a rule of PyTorch: `Addresses` says where new segments go. By default
those above 2 MiB get falling addresses, as Linux drivers mostly do, and the others growing ones.

Checked against histories recorded on real GPUs (`ckptplan.memory.history.reader`, `tests/memory/test_histories.py`):
with the recorded segments' addresses every block's address and every reserved byte is the same, expandable segments
and an out-of-memory among them. No record has shown `max_split_size`, garbage collection, divisions, other streams'
events or private pools yet.

Limits: physical memory never fragments below a segment or page. Private pools (CUDA graphs, `torch.cuda.MemPool`),
callbacks that free memory of other processes, and `cudaMallocAsync` aren't modelled. Events are done when `synchronize`
says so, or when memory runs short, not by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptplan.core.allocator_settings import (
    INTERVALS,
    MIB,
    MIN_BLOCK_BYTES,
    MIN_LARGE_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from ckptplan.core.errors import CkptPlanError, InvalidInputError
from ckptplan.core.units import format_bytes

__all__ = [
    "Addresses",
    "AllocatorSettings",
    "AllocatorTimeline",
    "BlockInfo",
    "CachingAllocator",
    "SegmentInfo",
    "SimulatedOutOfMemoryError",
    "replay",
]

FREE = -1  # in place of a size: the block is freed
_FIRST_ADDRESS = 1 << 60  # above every address a device has, so that recorded ones are free for a replay
_FIRST_SPACE = 1 << 62  # of expandable segments
_ENDLESS = 1 << 61  # address space of an expandable segment where no capacity is known
_LIMIT = 1 << 60  # PyTorch refuses larger requests outright


class SimulatedOutOfMemoryError(CkptPlanError):
    """The real allocator would raise `torch.OutOfMemoryError` here, after all its retries.

    Attributes
    ----------
    requested_bytes, allocated_bytes, reserved_bytes : int
        The request, and the state after everything that could be released was.
    free_bytes : int
        Bytes inside the remaining segments that no tensor uses.
    largest_free_bytes : int
        The largest single free block among them, of any pool and stream.
    limit_bytes : int or None
        Capacity, or the part of it that the memory fraction allows; None where the request alone is out of all bounds.
    event_index : int or None
        Position of the request in the replayed trace.
    """

    def __init__(
        self,
        message: str,
        *,
        requested_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        free_bytes: int,
        largest_free_bytes: int,
        limit_bytes: int | None,
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = free_bytes
        self.largest_free_bytes = largest_free_bytes
        self.limit_bytes = limit_bytes
        self.event_index: int | None = None


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of a segment; half-open in addresses: [address, address + size_bytes).

    `block` is the number of the allocation that holds it, None where it is free. `requested_bytes` is 0 then.
    `state` is "allocated", "waiting" (freed, but other streams' events are outstanding) or "free".
    """

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    block: int | None


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment, or one mapped range of an expandable one. Its blocks tile it, lowest address first."""

    address: int
    size_bytes: int
    stream: int
    pool: str
    expandable: bool
    blocks: tuple[BlockInfo, ...]


class _Block:
    """A block; `before` and `after` are its neighbours in the segment, mapped or not."""

    __slots__ = (
        "address",
        "after",
        "age_base",
        "allocated",
        "before",
        "events",
        "mapped",
        "number",
        "pool",
        "requested",
        "segment",
        "size",
        "stream",
        "used_on",
    )

    def __init__(self, pool: _Pool, stream: int, address: int, size: int, segment: _Expandable | None = None) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.segment = segment
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.number: int | None = None
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.events = 0  # outstanding
        self.used_on: set[int] | None = None  # other streams, until freed
        self.age_base = 0  # searches of the pool when it became free

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None

    @property
    def is_usable(self) -> bool:
        """Free (or unmapped), with nothing to wait for."""
        return not self.allocated and not self.events

    def link(self, before: _Block | None, after: _Block | None) -> None:
        """Stand between two neighbours."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


_Entry = tuple[int, int, _Block]  # size, address, block; no two have the same address


class _Pool:
    """Free blocks of the small or the large pool: per stream, by size and then address."""

    __slots__ = ("free", "page_bytes", "searches", "small", "unmapped")

    def __init__(self, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.free: dict[int, list[_Entry]] = {}
        self.unmapped: dict[int, list[tuple[int, _Block]]] = {}  # by address
        self.searches = 0

    def insert(self, block: _Block) -> None:
        block.age_base = self.searches
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def insert_unmapped(self, block: _Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: _Block) -> None:
        entries = self.unmapped[block.stream]
        del entries[bisect_left(entries, (block.address,))]

    def blocks(self) -> list[_Block]:
        """All free blocks, by stream, size and address; a copy, so that they may be released meanwhile."""
        return [entry[2] for stream in sorted(self.free) for entry in self.free[stream]]


class _Expandable:
    """Address space of one expandable segment: [address, address + size)."""

    __slots__ = ("address", "page_bytes", "size")

    def __init__(self, address: int, size: int, page_bytes: int) -> None:
        self.address = address
        self.size = size
        self.page_bytes = page_bytes


class Addresses:
    """Where the driver puts new segments: never where one was before.

    Parameters
    ----------
    descending : bool
        Whether segments above 2 MiB get falling addresses, as with Linux drivers mostly; False: all addresses grow, as
        under WSL.
    """

    def __init__(self, descending: bool = True) -> None:
        self._low = self._high = _FIRST_ADDRESS
        self._descending = descending
        self._space = _FIRST_SPACE

    def segment(self, nbytes: int) -> int:
        """Address of a new segment."""
        nbytes = -(-nbytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES  # the driver aligns to 2 MiB
        if self._descending and nbytes > SMALL_SEGMENT_BYTES:
            self._high -= nbytes
            return self._high
        self._low += nbytes
        return self._low - nbytes

    def space(self, nbytes: int) -> int:
        """Address of an expandable segment's address space."""
        self._space += nbytes
        return self._space - nbytes


class CachingAllocator:
    """The allocator of one device.

    Parameters
    ----------
    settings : AllocatorSettings, optional
        PyTorch's defaults if left out.
    capacity_bytes : int, optional
        What the driver can hand out to this allocator: the device's memory less the context and whatever else lives
        there. None: it never fails. The memory fraction is taken of this number, PyTorch takes it of the whole device.
    addresses : Addresses, optional
        Where new segments go; falling addresses for those above 2 MiB if left out.

    Notes
    -----
    A request or free takes time logarithmic in the free blocks of its pool and stream, plus a list insertion.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self.settings = settings = AllocatorSettings() if settings is None else settings
        if not isinstance(settings, AllocatorSettings):
            raise InvalidInputError(
                f"settings={settings!r} must be AllocatorSettings; from_string() makes them of text"
            )
        if capacity_bytes is not None and (not isinstance(capacity_bytes, int) or capacity_bytes < 0):
            raise InvalidInputError(f"capacity_bytes={capacity_bytes!r} must be an integer of at least 0, or None")
        if capacity_bytes is None and settings.memory_fraction < 1:
            raise InvalidInputError(
                f"memory_fraction={settings.memory_fraction} is a part of capacity_bytes, which is None; pass it"
            )
        self.capacity_bytes = capacity_bytes
        self._allowed: int | None = None
        if capacity_bytes is not None and settings.memory_fraction < 1:
            self._allowed = int(settings.memory_fraction * capacity_bytes)
        self._collect_above: int | None = None
        if self._allowed is not None and settings.garbage_collection_threshold is not None:
            self._collect_above = int(settings.garbage_collection_threshold * self._allowed)
        self._max_split = settings.max_split_size_bytes
        rounding = settings.max_non_split_rounding_bytes
        self._max_rounding = settings.large_segment_bytes if rounding is None else rounding
        self._divisions = settings.divisions if max(settings.divisions) > 1 else None
        self._expandable = settings.expandable_segments
        self._small = _Pool(True, SMALL_SEGMENT_BYTES)
        self._large = _Pool(False, settings.large_segment_bytes)
        self._live: dict[int, _Block | None] = {}  # None: a request of 0 bytes
        self._waiting: dict[int, list[_Block]] = {}  # stream -> blocks with an event on it
        self._passed: list[_Block] = []  # one entry per event that is done
        self._addresses = Addresses() if addresses is None else addresses
        self._allocated = self._requested = self._active = self._reserved = self._inactive = 0
        self._peaks = [0] * 5

    # --- figures ---

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that live tensors hold."""
        return self._allocated

    @property
    def requested_bytes(self) -> int:
        """Bytes asked for, before rounding, by what holds a block or waits for events."""
        return self._requested

    @property
    def active_bytes(self) -> int:
        """Bytes of the blocks that are allocated or wait for events."""
        return self._active

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments (of an expandable one: of its mapped pages)."""
        return self._reserved

    @property
    def inactive_split_bytes(self) -> int:
        """Bytes of free blocks in segments that are partly in use; expandable segments don't count."""
        return self._inactive

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest `allocated_bytes` since the start or `reset_peaks`."""
        return self._peaks[0]

    @property
    def peak_requested_bytes(self) -> int:
        """Highest `requested_bytes` since the start or `reset_peaks`."""
        return self._peaks[1]

    @property
    def peak_active_bytes(self) -> int:
        """Highest `active_bytes` since the start or `reset_peaks`."""
        return self._peaks[2]

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest `reserved_bytes` since the start or `reset_peaks`."""
        return self._peaks[3]

    @property
    def peak_inactive_split_bytes(self) -> int:
        """Highest `inactive_split_bytes` since the start or `reset_peaks`."""
        return self._peaks[4]

    def reset_peaks(self) -> None:
        """Let every peak start again from its present value."""
        self._peaks = [self._allocated, self._requested, self._active, self._reserved, self._inactive]

    # --- what programs do ---

    def allocate(self, block: int, nbytes: int, stream: int = 0, *, grow: bool = False) -> None:
        """Give allocation number `block` `nbytes` bytes on `stream`.

        With `grow` from new memory: a record shows that everything unused was released for this request, after which
        PyTorch doesn't look at the free blocks again, though waiting for events may have made one that fits.

        Raises
        ------
        SimulatedOutOfMemoryError
            Where PyTorch would raise its own, with what could be released released.
        InvalidInputError
            For a number that is alive, or a size below 0.
        """
        if block in self._live:
            raise InvalidInputError(f"block {block} is allocated already; free it first, or use another number")
        if nbytes <= 0:
            if nbytes < 0:
                raise InvalidInputError(f"block {block}: {nbytes} bytes requested; must be 0 or more")
            self._live[block] = None
            return
        if self._passed:
            self._free_passed()
        size = self.rounded_bytes(nbytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        found = None if grow else self._take_free(pool, stream, size)
        if found is None:
            found = self._grow_with_retries(pool, stream, size, nbytes)
        self._hand_out(found, size, nbytes, block)

    def free(self, block: int) -> None:
        """Free allocation number `block`; it waits where other streams have used it.

        Raises
        ------
        InvalidInputError
            For a number that isn't alive.
        """
        found = self._find(block)
        del self._live[block]
        if found is None:
            return
        found.allocated = False
        self._allocated -= found.size
        if found.used_on:
            for stream in found.used_on:
                found.events += 1
                self._waiting.setdefault(stream, []).append(found)
            found.used_on = None
        else:
            self._make_free(found)

    def record_stream(self, block: int, stream: int) -> None:
        """Note that `stream` uses the block, so that after its free it waits for what that stream has queued by then.

        Raises
        ------
        InvalidInputError
            For a number that isn't alive.
        """
        found = self._find(block)
        if found is not None and stream != found.stream:
            if found.used_on is None:
                found.used_on = set()
            found.used_on.add(stream)

    def synchronize(self, stream: int) -> None:
        """Let the events recorded on `stream` so far be done; the next request finds their blocks free."""
        self._passed.extend(self._waiting.pop(stream, ()))

    def empty_cache(self) -> None:
        """Wait for all events and release every segment (expandable: every page) that nothing uses."""
        for stream in list(self._waiting):
            self.synchronize(stream)
        self._free_passed()
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if block.segment is not None:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def release(self, address: int) -> bool:
        """Give back the segment at `address` alone, as a record says that PyTorch did; False where it is in use."""
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if block.address == address and block.segment is None and not block.is_split:
                    self._release(block)
                    return True
        return False

    def address_of(self, block: int) -> int | None:
        """Address of allocation number `block`; None for one of 0 bytes.

        Raises
        ------
        InvalidInputError
            For a number that isn't alive.
        """
        found = self._find(block)
        return None if found is None else found.address

    def restore(self, segments: Iterable[SegmentInfo], spaces: Mapping[tuple[int, str], int] | None = None) -> None:
        """Take over a state, as `snapshot` gives it, in place of the empty one that an allocator starts with.

        Blocks keep their numbers. One that waits does so for a made-up stream, -1 less its number. The age of free
        blocks isn't in a state; all begin at 0.

        Parameters
        ----------
        segments : iterable of SegmentInfo
        spaces : mapping, optional
            (stream, pool) -> where its expandable segment begins, which a state doesn't say if the first pages are
            unmapped; left out, with the first page that is mapped.

        Raises
        ------
        InvalidInputError
            For an allocator in use, or segments that their blocks don't tile.
        """
        if self._reserved or self._live:
            raise InvalidInputError("a state can only be restored into a new allocator; this one is in use")
        ranges: dict[tuple[int, str], list[SegmentInfo]] = {}
        for segment in sorted(segments, key=lambda segment: segment.address):
            if segment.expandable:
                ranges.setdefault((segment.stream, segment.pool), []).append(segment)
            else:
                self._restore_blocks(segment, None, None)
        for key, mapped in ranges.items():
            self._restore_space(mapped, (spaces or {}).get(key, mapped[0].address))
        self._inactive = sum(
            block.size
            for pool in (self._small, self._large)
            for block in pool.blocks()
            if block.segment is None and block.is_split
        )
        self.reset_peaks()

    def snapshot(self) -> tuple[SegmentInfo, ...]:
        """All segments by address, with their blocks."""
        return tuple(
            SegmentInfo(
                head.address,
                sum(block.size for block in blocks),
                head.stream,
                "small" if head.pool.small else "large",
                head.segment is not None,
                tuple(_info(block) for block in blocks),
            )
            for head in sorted(self._heads(), key=lambda block: block.address)
            for blocks in [_mapped_from(head)]
        )

    def _restore_space(self, ranges: list[SegmentInfo], address: int) -> None:
        """One expandable segment from `address` on, with its mapped ranges."""
        pool = self._small if ranges[0].pool == "small" else self._large
        stop = ranges[-1].address + ranges[-1].size_bytes
        room = max(self._space_bytes(pool), stop - address)
        space = _Expandable(address, room, pool.page_bytes)
        end: _Block | None = None
        at = address
        for mapped in ranges:
            if mapped.address > at:
                end = self._restore_unmapped(pool, mapped.stream, at, mapped.address, space, end)
            end = self._restore_blocks(mapped, space, end)
            at = mapped.address + mapped.size_bytes
        if at < address + room:
            self._restore_unmapped(pool, ranges[0].stream, at, address + room, space, end)

    def _restore_unmapped(
        self, pool: _Pool, stream: int, start: int, stop: int, space: _Expandable, before: _Block | None
    ) -> _Block:
        block = _Block(pool, stream, start, stop - start, space)
        block.mapped = False
        block.link(before, None)
        pool.insert_unmapped(block)
        return block

    def _restore_blocks(self, segment: SegmentInfo, space: _Expandable | None, before: _Block | None) -> _Block | None:
        """The blocks of a segment or mapped range, linked behind `before`; the last of them."""
        pool = self._small if segment.pool == "small" else self._large
        at = segment.address
        for info in segment.blocks:
            if info.address != at or info.size_bytes <= 0:
                raise InvalidInputError(
                    f"the blocks of the segment at {segment.address} must tile it; one at {info.address} has"
                    f" {info.size_bytes} bytes where {at} is next"
                )
            at += info.size_bytes
            block = _Block(pool, segment.stream, info.address, info.size_bytes, space)
            block.link(before, None)
            before = block
            if info.state == "free":
                pool.insert(block)
                continue
            if info.block is None or info.block in self._live:
                raise InvalidInputError(f"the block at {info.address} needs a number of its own, not {info.block}")
            block.number, block.requested = info.block, info.requested_bytes
            self._active += block.size
            self._requested += block.requested
            if info.state == "waiting":
                block.events = 1
                self._waiting[-1 - info.block] = [block]
            else:
                block.allocated = True
                self._live[info.block] = block
                self._allocated += block.size
        if at != segment.address + segment.size_bytes:
            raise InvalidInputError(
                f"the blocks of the segment at {segment.address} end at {at}, not after its {segment.size_bytes} bytes"
            )
        self._reserved += segment.size_bytes
        return before

    # --- sizes ---

    def rounded_bytes(self, nbytes: int) -> int:
        """Bytes of the block for a request, before what may be left unsplit behind it."""
        if self._divisions is not None and nbytes >= MIN_BLOCK_BYTES:
            interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
            divisions = self._divisions[interval]
            if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
                # At least 512, since the size is above 512 * divisions: the result is a multiple of 512 too.
                step = (1 << (nbytes.bit_length() - 1)) // divisions
                return -(-nbytes // step) * step
        return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def _segment_size(self, size: int) -> int:
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.settings.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    # --- taking and splitting ---

    def _take_free(self, pool: _Pool, stream: int, size: int) -> _Block | None:
        """Best fit among the free blocks of the pool and stream, taken out of them."""
        if self._collect_above is not None:
            pool.searches += 1
        entries = pool.free.get(stream)
        if not entries:
            return None
        at = bisect_left(entries, (size,))
        if at == len(entries):
            return None
        if self._expandable:
            # The unmapped room behind a block counts as its own, so that the tail of the segment is used last.
            while at + 1 < len(entries) and _reach(entries[at + 1][2]) < _reach(entries[at][2]):
                at += 1
        found = entries[at][2]
        if self._max_split is not None:
            if size < self._max_split:
                if found.size >= self._max_split:
                    return None
            elif found.size >= size + self._max_rounding:
                return None
        del entries[at]
        return found

    def _hand_out(self, found: _Block, size: int, nbytes: int, number: int) -> None:
        """Split off what isn't needed and mark the block as allocated."""
        rest = found.size - size
        counts = found.segment is None  # as inactive split bytes
        was_split = found.before is not None or found.after is not None
        if self._is_split_off(found.pool, size, rest):
            remainder = _Block(found.pool, found.stream, found.address + size, rest, found.segment)
            remainder.link(found, found.after)
            found.size = size
            found.pool.insert(remainder)
            if counts:
                self._inactive += -size if was_split else rest
        elif was_split and counts:
            self._inactive -= found.size
        found.allocated = True
        found.requested = nbytes
        found.number = number
        self._live[number] = found
        self._allocated += found.size
        self._requested += nbytes
        self._active += found.size
        peaks = self._peaks
        if self._allocated > peaks[0]:
            peaks[0] = self._allocated
        if self._requested > peaks[1]:
            peaks[1] = self._requested
        if self._active > peaks[2]:
            peaks[2] = self._active
        if self._inactive > peaks[4]:
            peaks[4] = self._inactive

    def _is_split_off(self, pool: _Pool, size: int, rest: int) -> bool:
        if pool.small or self._expandable:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_BYTES and (self._max_split is None or size < self._max_split)

    # --- freeing and merging ---

    def _find(self, block: int) -> _Block | None:
        if block not in self._live:
            raise InvalidInputError(f"block {block} isn't allocated: never was, or freed before")
        return self._live[block]

    def _make_free(self, block: _Block) -> None:
        """Merge a block that nothing uses any more with its neighbours, and keep it for reuse."""
        self._active -= block.size
        self._requested -= block.requested
        block.requested = 0
        block.number = None
        merged = self._merge(block, block.before) + self._merge(block, block.after)
        block.pool.insert(block)
        if block.segment is None:
            self._inactive += (block.size if block.is_split else 0) - merged
            if self._inactive > self._peaks[4]:
                self._peaks[4] = self._inactive

    def _merge(self, block: _Block, other: _Block | None) -> int:
        """Take a neighbour in, if it is as free (and as mapped) as the block; its size, or 0."""
        if other is None or not other.is_usable or other.mapped != block.mapped:
            return 0
        if other.mapped:
            other.pool.remove(other)
        else:
            other.pool.remove_unmapped(other)
        if other is block.before:
            block.address = other.address
            block.link(other.before, block.after)
        else:
            block.link(block.before, other.after)
        block.size += other.size
        return other.size

    def _free_passed(self) -> None:
        for block in self._passed:
            block.events -= 1
            if not block.events:
                self._make_free(block)
        self._passed.clear()

    # --- growing ---

    def _grow_with_retries(self, pool: _Pool, stream: int, size: int, nbytes: int) -> _Block:
        if size >= _LIMIT:
            raise self._out_of_memory(nbytes, size)
        if self._collect_above is not None and self._reserved > self._collect_above:
            self._collect_garbage(self._reserved - self._collect_above)
        found = self._grow(pool, stream, size)
        if found is None and self._max_split is not None and self._release_oversize(pool, stream, size):
            found = self._grow(pool, stream, size)
        if found is None:
            self.empty_cache()
            found = self._grow(pool, stream, size)
        if found is None:
            raise self._out_of_memory(nbytes, self._segment_size(size))
        return found

    def _grow(self, pool: _Pool, stream: int, size: int) -> _Block | None:
        """A block from new memory: a new segment, or new pages of an expandable one."""
        segment_size = self._segment_size(size)
        if self._allowed is not None and self._reserved + segment_size > self._allowed:
            return None
        if self._expandable:
            return self._grow_expandable(pool, stream, size)
        if not self._reserve(segment_size):
            return None
        return _Block(pool, stream, self._addresses.segment(segment_size), segment_size)

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self._reserved + nbytes > self.capacity_bytes:
            return False
        self._reserved += nbytes
        self._peaks[3] = max(self._peaks[3], self._reserved)
        return True

    def _grow_expandable(self, pool: _Pool, stream: int, size: int) -> _Block | None:
        found = self._expandable_room(pool, stream, size)
        if not found.mapped and not self._map(found, min(found.size, size)):
            return None
        while found.size < size:
            # What follows is unmapped: together they have room enough. Mapping merges the two.
            behind = found.after
            assert behind is not None
            if not self._map(behind, min(size - found.size, behind.size)):
                return None
            found = behind
        pool.remove(found)
        return found

    def _expandable_room(self, pool: _Pool, stream: int, size: int) -> _Block:
        """The first of the free and unmapped blocks in a row that hold `size`, at the lowest address."""
        for _, unmapped in pool.unmapped.get(stream, ()):
            before = unmapped.before
            first = before if before is not None and before.is_usable else unmapped
            room = 0
            at: _Block | None = first
            while room < size and at is not None and at.is_usable:
                room += at.size
                at = at.after
            if room >= size:
                return first
        room = self._space_bytes(pool)
        segment = _Expandable(self._addresses.space(room), room, pool.page_bytes)
        block = _Block(pool, stream, segment.address, room, segment)
        block.mapped = False
        pool.insert_unmapped(block)
        return block

    def _space_bytes(self, pool: _Pool) -> int:
        """Address space of an expandable segment, in whole pages."""
        # An eighth more than the device has, so that pages freed at low addresses can come back at the end.
        room = _ENDLESS if self.capacity_bytes is None else self.capacity_bytes + self.capacity_bytes // 8
        return -(-room // pool.page_bytes) * pool.page_bytes

    def _map(self, block: _Block, nbytes: int) -> bool:
        """Back the start of an unmapped block with pages; all of them or none."""
        assert block.segment is not None
        page = block.segment.page_bytes
        mapped = -(-nbytes // page) * page
        if mapped == 0 or not self._reserve(mapped):
            return False
        block.pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = _Block(block.pool, block.stream, block.address + mapped, block.size - mapped, block.segment)
            rest.mapped = False
            rest.link(block, block.after)
            block.pool.insert_unmapped(rest)
            block.size = mapped
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.insert(block)
        return True

    # --- releasing ---

    def _release(self, block: _Block) -> None:
        """Give a whole segment back."""
        block.pool.remove(block)
        self._reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        """Give back the pages that lie wholly inside a free block of an expandable segment."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        page = segment.page_bytes
        start = segment.address + -(-(block.address - segment.address) // page) * page
        stop = segment.address + (block.address + block.size - segment.address) // page * page
        if start >= stop:
            return
        pool.remove(block)
        if start > block.address:
            head = _Block(pool, block.stream, block.address, start - block.address, segment)
            head.link(block.before, block)
            pool.insert(head)
        end = block.address + block.size
        if end > stop:
            tail = _Block(pool, block.stream, stop, end - stop, segment)
            tail.link(block, block.after)
            pool.insert(tail)
        block.address, block.size, block.mapped = start, stop - start, False
        self._merge(block, block.before)
        self._merge(block, block.after)
        self._reserved -= stop - start
        if block.is_split:
            pool.insert_unmapped(block)
        # else the segment is empty and goes, address space and all

    def _release_oversize(self, pool: _Pool, stream: int, size: int) -> bool:
        """Release unused blocks of at least `max_split_size_bytes` of the pool and stream.

        The smallest one that alone holds the request; else from the largest down until their sum does. False: it
        doesn't.
        """
        assert self._max_split is not None
        wanted = max(size, self._max_split)
        entries = pool.free.get(stream, [])
        at = bisect_left(entries, (wanted,))
        if at < len(entries) and entries[at][2].segment is None:
            self._release(entries[at][2])
            return True
        released = 0
        for entry_size, _, block in reversed(entries[:at]):
            if released >= wanted or entry_size < self._max_split:
                break
            if block.segment is None:
                released += entry_size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self, target: int) -> None:
        """Release unused whole segments of the large pool, those of at least mean age first, until `target` is met.

        A block's age is the number of searches of the pool since it became free. Every block of a round goes, even
        past the target.
        """
        pool = self._large
        blocks = [block for block in pool.blocks() if not block.is_split]
        age = sum(pool.searches - block.age_base for block in blocks)
        reclaimed, count = 0, len(blocks)
        freed = True
        while reclaimed < target and freed and count:
            threshold = age / count
            freed = False
            left = []
            for block in blocks:
                own_age = pool.searches - block.age_base
                if block.segment is None and own_age >= threshold:
                    freed = True
                    reclaimed += block.size
                    age -= own_age
                    count -= 1
                    self._release(block)
                else:
                    left.append(block)
            blocks = left

    def _out_of_memory(self, nbytes: int, segment_size: int) -> SimulatedOutOfMemoryError:
        free = [block.size for pool in (self._small, self._large) for block in pool.blocks()]
        limit = self.capacity_bytes if self._allowed is None else self._allowed
        room = "no device has that much" if limit is None else f"the limit is {format_bytes(limit)}"
        if self._allowed is not None and self.capacity_bytes is not None:
            room += f" ({self.settings.memory_fraction:g} of {format_bytes(self.capacity_bytes)})"
        message = (
            f"simulated out of memory: {format_bytes(nbytes)} requested, as {format_bytes(segment_size)} of new memory;"
            f" {room}, {format_bytes(self._reserved)} are reserved after every retry,"
            f" {format_bytes(self._allocated)} of them allocated and {format_bytes(sum(free))} free in {len(free)}"
            f" fragments, the largest {format_bytes(max(free, default=0))}; {self._remedy(nbytes, sum(free), limit)}"
        )
        return SimulatedOutOfMemoryError(
            message,
            requested_bytes=nbytes,
            allocated_bytes=self._allocated,
            reserved_bytes=self._reserved,
            free_bytes=sum(free),
            largest_free_bytes=max(free, default=0),
            limit_bytes=limit,
        )

    def _remedy(self, nbytes: int, free_bytes: int, limit: int | None) -> str:
        if limit is None or self._allocated + nbytes > limit:
            return "tensors alone don't fit: use a smaller batch, or a plan with a smaller budget"
        if self._expandable:
            return "fragments are smaller than a page or of another pool or stream: leave some room below the limit"
        if free_bytes >= nbytes:
            return "the fragments would hold it: set expandable_segments:True, or max_split_size_mb"
        return "set expandable_segments:True, which reserves in smaller steps, or leave some room below the limit"

    # --- snapshot ---

    def _heads(self) -> Iterator[_Block]:
        """First block of each segment, or of each mapped range."""
        waiting = {id(block): block for blocks in self._waiting.values() for block in blocks}
        waiting |= {id(block): block for block in self._passed}
        live = [block for block in self._live.values() if block is not None]
        for block in (*live, *waiting.values(), *self._small.blocks(), *self._large.blocks()):
            if block.before is None or not block.before.mapped:
                yield block


def _reach(block: _Block) -> int:
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


def _mapped_from(head: _Block) -> list[_Block]:
    blocks = []
    at: _Block | None = head
    while at is not None and at.mapped:
        blocks.append(at)
        at = at.after
    return blocks


def _info(block: _Block) -> BlockInfo:
    state = "allocated" if block.allocated else "waiting" if block.events else "free"
    return BlockInfo(block.address, block.size, block.requested, state, block.number)


@dataclass(frozen=True, slots=True, eq=False)
class AllocatorTimeline:
    """Figures after each event of a replayed trace, all in bytes.

    Parameters
    ----------
    allocated_bytes, requested_bytes, reserved_bytes : numpy.ndarray of int64, shape (events,)
        After each event.
    peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes : int
        The highest value ever, also within an event.
    """

    allocated_bytes: npt.NDArray[np.int64]
    requested_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int

    @property
    def fragmentation(self) -> float:
        """1 - allocated / reserved at the first event with the highest reserved bytes; 0 where nothing is reserved."""
        if not self.reserved_bytes.size or not self.reserved_bytes.any():
            return 0.0
        at = int(self.reserved_bytes.argmax())
        return 1.0 - int(self.allocated_bytes[at]) / int(self.reserved_bytes[at])


def replay(
    events: Iterable[tuple[int, int]], settings: AllocatorSettings | None = None, capacity_bytes: int | None = None
) -> AllocatorTimeline:
    """Figures of a trace on one stream.

    Parameters
    ----------
    events : iterable of (block, nbytes)
        An allocation for `nbytes` of 0 or more, a free for -1. A number may come again after its free.
    settings, capacity_bytes
        See `CachingAllocator`.

    Raises
    ------
    SimulatedOutOfMemoryError
        Where the allocator would fail; its `event_index` says at which event.
    InvalidInputError
        For events that no program can make.
    """
    allocator = CachingAllocator(settings, capacity_bytes)
    figures: list[tuple[int, int, int]] = []
    index = 0
    try:
        for index, (block, nbytes) in enumerate(events):  # noqa: B007
            if nbytes == FREE:
                allocator.free(block)
            else:
                allocator.allocate(block, nbytes)
            figures.append((allocator._allocated, allocator._requested, allocator._reserved))
    except SimulatedOutOfMemoryError as error:
        error.event_index = index
        raise
    return _timeline(allocator, figures)


def _timeline(allocator: CachingAllocator, figures: list[tuple[int, int, int]]) -> AllocatorTimeline:
    columns = np.array(figures, dtype=np.int64).reshape(-1, 3).T.copy()
    return AllocatorTimeline(
        columns[0],
        columns[1],
        columns[2],
        allocator.peak_allocated_bytes,
        allocator.peak_requested_bytes,
        allocator.peak_reserved_bytes,
    )
