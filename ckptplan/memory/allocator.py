"""A model of PyTorch's CUDA caching allocator: the memory that a trace of requests makes it reserve.

Source of the rules: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch, read at a development revision after 2.9 that has
the setting `large_segment_size_mb` (GitHub, DustyL/pytorch at 023bca6; what that fork adds for managed memory is left
out), and the headers `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h` of 2.13; nothing of it is
copied. The terms are PyTorch's: a *segment* is memory obtained from the driver, a *block* is a part of a segment,
*allocated* counts the blocks of live tensors, *requested* their sizes before rounding, *reserved* the segments.

On a request, in this order:

1. Blocks whose streams have passed their events become free.
2. The size rounds up, to 512 or to a division of its power of two. Up to 1 MiB it belongs to the small pool,
   otherwise to the large one.
3. The smallest free block of that pool and stream that holds it is taken; of equal ones that with the lowest address.
   With `max_split_size_bytes`, a smaller request takes no block of that size or more, and another no block that is
   larger by `max_non_split_rounding_bytes`.
4. A new segment: 2 MiB in the small pool; `large_segment_bytes` for less than 10 MiB; above that the size rounded up
   to 2 MiB.
5. If that fails: with `max_split_size_bytes`, unused blocks of at least that size are released, the smallest that is
   large enough or as many as it takes, and 4 again; then every unused whole segment of both pools and all streams is,
   after waiting for all events, and 4 again; then out of memory.
6. The rest of the block is split off: in the small pool from 512 bytes, in the large pool above 1 MiB and only for
   sizes below `max_split_size_bytes`. The request keeps the low address.

On a free the block merges with its free neighbours. A block that other streams have used waits for their events.

With expandable segments, step 4 maps pages (2 MiB in the small pool, `large_segment_bytes` in the large one) at the
lowest address of the stream's segment where free and unmapped room together suffice, so a free block at the end of what
is mapped counts; in step 3 a block counts with the unmapped room behind it; rests split off from 512 bytes; releasing
unmaps every page that holds no part of a live block.

Details of the source that are easily missed:

- "requested" falls when a block is free for reuse, not when it is freed: with events outstanding it can exceed
  "allocated".
- The bound of 20 MiB on larger blocks (rule 3) is the setting `max_non_split_rounding_mb`; its default is the size of
  large segments.
- Power-of-two divisions leave sizes up to 512 * divisions alone, and their intervals reach from 1 MiB to 64 GiB.
- Requests of 0 bytes take nothing.
- `max_split_size_bytes` acts with expandable segments too (rule 3).

The address of a segment breaks the tie between equal free blocks of different segments (rule 3), so it can change how
much is reserved. Addresses are the driver's choice, not a rule of PyTorch: `Addresses` models it. By default segments
above 2 MiB get falling addresses, as from most Linux drivers, and the others growing ones.

Worked example: after `allocate(0, 3 << 20)`, a segment of 20 MiB is reserved and 3 MiB of it are allocated; a request
for 20 MiB needs a second segment, because only 17 MiB of the first are free; `free(0)` makes the first whole again, and
`empty_cache()` returns its 20 MiB.

Checked against histories recorded on real GPUs (`tests/histories.py`, `tests/memory/test_histories.py`):
with the recorded segments' addresses every block's address and every reserved byte is the same, also with expandable
segments and in an out-of-memory error. `max_split_size`, divisions, other streams' events and
private pools occur in no recorded history yet.

Limits: physical memory never fragments below a segment or page. Garbage collection (`garbage_collection_threshold`),
private pools (CUDA graphs, `torch.cuda.MemPool`), callbacks that free memory of other processes, and `cudaMallocAsync`
aren't modelled. Events complete at `synchronize` or when memory runs short, not by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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

FREE = -1  # in place of a size: the event frees the block
EMPTY_CACHE = -2  # in place of a size: the event releases all unused memory
_FIRST_ADDRESS = 1 << 60  # above every address of a device, so that a replay can use the recorded ones
_FIRST_SPACE = 1 << 62  # lowest address of expandable segments
_UNLIMITED_SPACE = 1 << 61  # address space of an expandable segment if the capacity isn't known
_MOST_REQUEST_BYTES = 1 << 60  # PyTorch refuses larger requests at once


class SimulatedOutOfMemoryError(CkptPlanError):
    """A request for which PyTorch would raise `torch.OutOfMemoryError`, after all its retries.

    The message has the request, the limit, the bytes reserved, allocated and free, and the number of fragments.
    """


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


@dataclass(slots=True, eq=False)
class _Block:
    """A block; `before` and `after` are its neighbours in the segment, mapped or not."""

    pool: _Pool
    stream: int
    address: int
    size: int
    segment: _Expandable | None = None
    mapped: bool = True
    allocated: bool = False
    requested: int = 0
    number: int | None = None
    before: _Block | None = None
    after: _Block | None = None
    events: int = 0
    """Events of other streams that aren't complete."""
    used_on: set[int] = field(default_factory=set)
    """Other streams that use the block, until it is freed."""

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None

    @property
    def is_usable(self) -> bool:
        """Free (or unmapped), with nothing to wait for."""
        return not self.allocated and not self.events

    def link(self, before: _Block | None, after: _Block | None) -> None:
        """Insert the block between two neighbours."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


_Entry = tuple[int, int, _Block]  # size, address, block; no two have the same address


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of the small or the large pool: per stream, by size and then address."""

    small: bool
    page_bytes: int
    free: dict[int, list[_Entry]] = field(default_factory=dict)
    unmapped: dict[int, list[tuple[int, _Block]]] = field(default_factory=dict)
    """Unmapped blocks per stream, by address."""

    def insert(self, block: _Block) -> None:
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
        """Return a copy of the free blocks, by stream, size and address; the caller may release them meanwhile."""
        return [entry[2] for stream in sorted(self.free) for entry in self.free[stream]]


class _Expandable(NamedTuple):
    """Address space of an expandable segment, from `address` on."""

    address: int
    page_bytes: int


class Addresses:
    """Addresses of new segments; none is used twice.

    Parameters
    ----------
    descending : bool
        Whether segments above 2 MiB get falling addresses, as from most Linux drivers; False: all addresses grow, as
        under WSL.
    """

    def __init__(self, descending: bool = True) -> None:
        self._low = self._high = _FIRST_ADDRESS
        self._descending = descending
        self._space = _FIRST_SPACE

    def segment(self, nbytes: int) -> int:
        """Return the address of a new segment."""
        nbytes = -(-nbytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES  # the driver aligns to 2 MiB
        if self._descending and nbytes > SMALL_SEGMENT_BYTES:
            self._high -= nbytes
            return self._high
        self._low += nbytes
        return self._low - nbytes

    def space(self, nbytes: int) -> int:
        """Return the address of an expandable segment's address space."""
        self._space += nbytes
        return self._space - nbytes


class CachingAllocator:
    """The caching allocator of one device.

    Parameters
    ----------
    settings : AllocatorSettings, optional
        PyTorch's defaults if left out.
    capacity_bytes : int, optional
        Memory that the driver can give to this allocator: the device's memory less the context and other programs.
        None: no limit.
    addresses : Addresses, optional
        Addresses of new segments; falling ones above 2 MiB if left out.

    Attributes
    ----------
    allocated_bytes : int
        Bytes of the blocks that live tensors hold.
    requested_bytes : int
        Sizes before rounding of the blocks that are allocated or wait for events.
    reserved_bytes : int
        Bytes of all segments (of an expandable one: of its mapped pages).
    peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes : int
        Highest value of each since the start or `reset_peaks`.

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
                f"settings={settings!r} must be AllocatorSettings; AllocatorSettings.from_string reads them from text"
            )
        if capacity_bytes is not None and (not isinstance(capacity_bytes, int) or capacity_bytes < 0):
            raise InvalidInputError(f"capacity_bytes={capacity_bytes!r} must be an integer of at least 0, or None")
        self.capacity_bytes = capacity_bytes
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
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Set every peak to its present value."""
        self.peak_allocated_bytes, self.peak_requested_bytes = self.allocated_bytes, self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _raise_peaks(self) -> None:
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    # --- calls of a program ---

    def allocate(self, block: int, nbytes: int, stream: int = 0, *, grow: bool = False) -> None:
        """Allocate `nbytes` bytes on `stream` as allocation number `block`.

        Parameters
        ----------
        grow : bool
            Take new memory, as a record shows for a request for which PyTorch released all unused memory: it doesn't
            search the free blocks again then, though a completed event may have freed one that fits.

        Raises
        ------
        SimulatedOutOfMemoryError
            If PyTorch would raise `torch.OutOfMemoryError`; unused memory has been released by then.
        InvalidInputError
            If the number is in use, or the size is below 0.
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
        """Free allocation number `block`; if other streams have used it, it waits for their events.

        Raises
        ------
        InvalidInputError
            If the number isn't in use.
        """
        found = self._find(block)
        del self._live[block]
        if found is None:
            return
        found.allocated = False
        self.allocated_bytes -= found.size
        for stream in found.used_on:
            found.events += 1
            self._waiting.setdefault(stream, []).append(found)
        found.used_on.clear()
        if not found.events:
            self._make_free(found)

    def record_stream(self, block: int, stream: int) -> None:
        """Note that `stream` uses the block, which once freed waits for the work queued on that stream by then.

        Raises
        ------
        InvalidInputError
            If the number isn't in use.
        """
        found = self._find(block)
        if found is not None and stream != found.stream:
            found.used_on.add(stream)

    def synchronize(self, stream: int) -> None:
        """Complete the events recorded on `stream` so far; the next request finds their blocks free."""
        self._passed.extend(self._waiting.pop(stream, ()))

    def empty_cache(self) -> None:
        """Complete all events and release every unused segment (expandable: every unused page)."""
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
        """Release only the segment at `address`, as a record shows; return False if it is in use."""
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if block.address == address and block.segment is None and not block.is_split:
                    self._release(block)
                    return True
        return False

    def address_of(self, block: int) -> int | None:
        """Return the address of allocation number `block`; None for one of 0 bytes.

        Raises
        ------
        InvalidInputError
            If the number isn't in use.
        """
        found = self._find(block)
        return None if found is None else found.address

    def restore(self, segments: Iterable[SegmentInfo], spaces: Mapping[tuple[int, str], int] | None = None) -> None:
        """Start from a state returned by `snapshot` instead of an empty one.

        Blocks keep their numbers. A block that waits for events waits for the virtual stream `-1 - number`.

        Parameters
        ----------
        segments : iterable of SegmentInfo
        spaces : mapping, optional
            (stream, pool) -> first address of its expandable segment, which a state doesn't contain if the first pages
            are unmapped; default: the first mapped page.

        Raises
        ------
        InvalidInputError
            If the allocator is in use, or blocks don't tile their segment.
        """
        if self.reserved_bytes or self._live:
            raise InvalidInputError("the allocator is in use; restore a state into a new one")
        ranges: dict[tuple[int, str], list[SegmentInfo]] = {}
        for segment in sorted(segments, key=lambda segment: segment.address):
            if segment.expandable:
                ranges.setdefault((segment.stream, segment.pool), []).append(segment)
            else:
                self._restore_blocks(segment, None, None)
        for key, mapped in ranges.items():
            self._restore_space(mapped, (spaces or {}).get(key, mapped[0].address))
        self.reset_peaks()

    def snapshot(self) -> tuple[SegmentInfo, ...]:
        """Return all segments by address, with their blocks."""
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
        """Restore one expandable segment from `address` on, with its mapped ranges."""
        pool = self._small if ranges[0].pool == "small" else self._large
        stop = ranges[-1].address + ranges[-1].size_bytes
        room = max(self._space_bytes(pool), stop - address)
        space = _Expandable(address, pool.page_bytes)
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
        block = _Block(pool, stream, start, stop - start, space, mapped=False)
        block.link(before, None)
        pool.insert_unmapped(block)
        return block

    def _restore_blocks(self, segment: SegmentInfo, space: _Expandable | None, before: _Block | None) -> _Block | None:
        """Link the blocks of a segment or mapped range behind `before`, and return the last one."""
        pool = self._small if segment.pool == "small" else self._large
        at = segment.address
        for info in segment.blocks:
            if info.address != at or info.size_bytes <= 0:
                raise InvalidInputError(
                    f"the blocks of the segment at {segment.address} must tile it: the next one has to start at {at},"
                    f" but starts at {info.address}, with {info.size_bytes} bytes"
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
            self.requested_bytes += block.requested
            if info.state == "waiting":
                block.events = 1
                self._waiting[-1 - info.block] = [block]
            else:
                block.allocated = True
                self._live[info.block] = block
                self.allocated_bytes += block.size
        if at != segment.address + segment.size_bytes:
            raise InvalidInputError(
                f"the blocks of the segment at {segment.address} end at {at}, not after its {segment.size_bytes} bytes"
            )
        self.reserved_bytes += segment.size_bytes
        return before

    # --- sizes ---

    def rounded_bytes(self, nbytes: int) -> int:
        """Return the rounded size of a request; a block may keep a rest behind it that isn't split off."""
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
        """Remove and return the best fit among the free blocks of the pool and stream."""
        entries = pool.free.get(stream)
        if not entries:
            return None
        at = bisect_left(entries, (size,))
        if at == len(entries):
            return None
        if self._expandable:
            # The unmapped room behind a block counts as part of it, so that the tail of the segment is used last.
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
        """Split off the rest and mark the block as allocated."""
        rest = found.size - size
        if self._is_split_off(found.pool, size, rest):
            remainder = _Block(found.pool, found.stream, found.address + size, rest, found.segment)
            remainder.link(found, found.after)
            found.size = size
            found.pool.insert(remainder)
        found.allocated = True
        found.requested = nbytes
        found.number = number
        self._live[number] = found
        self.allocated_bytes += found.size
        self.requested_bytes += nbytes
        self._raise_peaks()

    def _is_split_off(self, pool: _Pool, size: int, rest: int) -> bool:
        if pool.small or self._expandable:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_BYTES and (self._max_split is None or size < self._max_split)

    # --- freeing and merging ---

    def _find(self, block: int) -> _Block | None:
        if block not in self._live:
            raise InvalidInputError(f"block {block} isn't allocated: it was freed before, or never allocated")
        return self._live[block]

    def _make_free(self, block: _Block) -> None:
        """Merge an unused block with its free neighbours, and keep it for reuse."""
        self.requested_bytes -= block.requested
        block.requested = 0
        block.number = None
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.insert(block)

    def _merge(self, block: _Block, other: _Block | None) -> None:
        """Merge a usable neighbour into the block if both are mapped or both aren't."""
        if other is None or not other.is_usable or other.mapped != block.mapped:
            return
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

    def _free_passed(self) -> None:
        for block in self._passed:
            block.events -= 1
            if not block.events:
                self._make_free(block)
        self._passed.clear()

    # --- growing ---

    def _grow_with_retries(self, pool: _Pool, stream: int, size: int, nbytes: int) -> _Block:
        if size >= _MOST_REQUEST_BYTES:
            raise self._out_of_memory(nbytes, size)
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
        """Return a block of new memory: a new segment, or new pages of an expandable one."""
        if self._expandable:
            return self._grow_expandable(pool, stream, size)
        segment_size = self._segment_size(size)
        if not self._reserve(segment_size):
            return None
        return _Block(pool, stream, self._addresses.segment(segment_size), segment_size)

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self._raise_peaks()
        return True

    def _grow_expandable(self, pool: _Pool, stream: int, size: int) -> _Block | None:
        found = self._expandable_room(pool, stream, size)
        if not found.mapped and not self._map(found, min(found.size, size)):
            return None
        while found.size < size:
            # The block behind is unmapped, and both together have enough room. Mapping merges them.
            behind = found.after
            assert behind is not None
            if not self._map(behind, min(size - found.size, behind.size)):
                return None
            found = behind
        pool.remove(found)
        return found

    def _expandable_room(self, pool: _Pool, stream: int, size: int) -> _Block:
        """Return the first of consecutive free and unmapped blocks that together hold `size`, lowest address first."""
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
        segment = _Expandable(self._addresses.space(room), pool.page_bytes)
        block = _Block(pool, stream, segment.address, room, segment, mapped=False)
        pool.insert_unmapped(block)
        return block

    def _space_bytes(self, pool: _Pool) -> int:
        """Return the address space of an expandable segment, in whole pages."""
        # An eighth more than the device has, so that pages freed at low addresses can be mapped again at the end.
        room = _UNLIMITED_SPACE if self.capacity_bytes is None else self.capacity_bytes + self.capacity_bytes // 8
        return -(-room // pool.page_bytes) * pool.page_bytes

    def _map(self, block: _Block, nbytes: int) -> bool:
        """Map pages at the start of an unmapped block: all that `nbytes` need, or none."""
        assert block.segment is not None
        page = block.segment.page_bytes
        mapped = -(-nbytes // page) * page
        if mapped == 0 or not self._reserve(mapped):
            return False
        block.pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = _Block(
                block.pool, block.stream, block.address + mapped, block.size - mapped, block.segment, mapped=False
            )
            rest.link(block, block.after)
            block.pool.insert_unmapped(rest)
            block.size = mapped
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.insert(block)
        return True

    # --- releasing ---

    def _release(self, block: _Block) -> None:
        """Release a whole segment."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _unmap(self, block: _Block) -> None:
        """Unmap the pages that lie wholly inside a free block of an expandable segment."""
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
        self.reserved_bytes -= stop - start
        if block.is_split:
            pool.insert_unmapped(block)
        # Otherwise the segment is empty: its address space isn't used again.

    def _release_oversize(self, pool: _Pool, stream: int, size: int) -> bool:
        """Release unused blocks of at least `max_split_size_bytes` of the pool and stream.

        The smallest one that holds the request by itself, or otherwise from the largest down until their sum does.
        Return whether enough was released.
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

    def _out_of_memory(self, nbytes: int, segment_size: int) -> SimulatedOutOfMemoryError:
        free = [block.size for pool in (self._small, self._large) for block in pool.blocks()]
        limit = self.capacity_bytes
        room = "PyTorch accepts less than 2**60 bytes" if limit is None else f"the limit is {format_bytes(limit)}"
        return SimulatedOutOfMemoryError(
            f"simulated out of memory: {format_bytes(nbytes)} requested, as {format_bytes(segment_size)} of new memory;"
            f" {room}, {format_bytes(self.reserved_bytes)} are reserved after all retries,"
            f" {format_bytes(self.allocated_bytes)} of them allocated and {format_bytes(sum(free))} free in {len(free)}"
            f" fragments, the largest {format_bytes(max(free, default=0))}; {self._remedy(nbytes, sum(free), limit)}"
        )

    def _remedy(self, nbytes: int, free_bytes: int, limit: int | None) -> str:
        if limit is None or self.allocated_bytes + nbytes > limit:
            return "tensors alone don't fit: use a smaller batch, or a plan with a smaller budget"
        if self._expandable:
            return "fragments are smaller than a page or of another pool or stream: leave some room below the limit"
        if free_bytes >= nbytes:
            return "the fragments together would hold it: set expandable_segments:True, or max_split_size_mb"
        return "set expandable_segments:True, which reserves in smaller steps, or leave some room below the limit"

    # --- snapshot ---

    def _heads(self) -> Iterator[_Block]:
        """Yield the first block of each segment, or of each mapped range."""
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


class AllocatorTimeline(NamedTuple):
    """Bytes after each event of a replayed trace, as arrays of int64 of shape (events,)."""

    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]


def replay(
    events: Iterable[tuple[int, int]],
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    *,
    streams: Mapping[int, int] | None = None,
    descending: bool = True,
) -> AllocatorTimeline:
    """Return the figures of a trace.

    Parameters
    ----------
    events : iterable of (block, nbytes)
        An allocation for `nbytes` of 0 or more, a free for -1, a call of `empty_cache` for -2 (of no block). A block's
        number may be used again after its free.
    settings, capacity_bytes
        See `CachingAllocator`.
    streams : mapping, optional
        Block -> the stream that it is allocated on, where that isn't 0.
    descending : bool
        See `Addresses`.

    Raises
    ------
    SimulatedOutOfMemoryError
        If the allocator would fail.
    InvalidInputError
        If a number is allocated twice, or freed without being allocated.
    """
    allocator = CachingAllocator(settings, capacity_bytes, Addresses(descending))
    figures: list[tuple[int, int]] = []
    for block, nbytes in events:
        if nbytes == FREE:
            allocator.free(block)
        elif nbytes == EMPTY_CACHE:
            allocator.empty_cache()
        else:
            allocator.allocate(block, nbytes, streams.get(block, 0) if streams else 0)
        figures.append((allocator.allocated_bytes, allocator.reserved_bytes))
    return AllocatorTimeline(*np.array(figures, dtype=np.int64).reshape(-1, 2).T.copy())
