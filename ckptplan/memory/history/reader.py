"""PyTorch's recorded memory history as events for the allocator model, which is checked against the record.

The input is a dict as `torch.cuda.memory._snapshot()` returns it after `_record_memory_history()` (PyTorch 2.1 to
2.15), or the file that `_dump_snapshot` writes. It needn't begin with the first allocation: the state before the first
entry is derived from the state at the snapshot by undoing the entries one by one. For example, the entries "alloc A"
and "free_requested B" before a snapshot in which A is allocated and B waits for events mean that at the start A was
free and B allocated.

Three things are taken from the record, because the model can't derive them: the addresses of new segments, when a block
that other streams had used became free, and which unused segments were released. A snapshot has no memory fraction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptplan.core.allocator_settings import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.ranges import Ranges
from ckptplan.memory.allocator import (
    Addresses,
    AllocatorTimeline,
    BlockInfo,
    CachingAllocator,
    SegmentInfo,
    timeline_of,
)
from ckptplan.memory.history.plain_pickle import load_plain

Action = Literal["allocate", "free", "record_stream", "synchronize", "empty_cache", "make_room", "out_of_memory"]
Frames = Sequence[Mapping[str, Any]]

_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")
_ACTIONS = (*_GROWS, *_SHRINKS, "alloc", "free_requested", "free_completed", "oom", "snapshot")
_WAITING = ("active_pending_free", "active_awaiting_free")  # the name in PyTorch's code, and that in its documentation
_MOST_NUMBER = 1 << 62  # largest address, size or stream
_MOST_DEVICES = 1024
_MOST_ENTRIES = 20_000_000  # entries and blocks of all devices; lists may share items, so the file's size is no bound


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One call of a `CachingAllocator` method.

    Parameters
    ----------
    action : str
        The method, or one of two actions that aren't calls. "make_room": some unused segments were released, which a
        model with a capacity does by itself. "out_of_memory": a request for `nbytes` failed.
    index : int
        The record's entry that the event comes from.
    block : int or None
        None for "synchronize", "empty_cache", "make_room" and "out_of_memory".
    nbytes : int
        Size of the request; 0 unless the action is "allocate" or "out_of_memory".
    stream : int
        The stream of the request, or the argument of "record_stream" and "synchronize"; virtual streams are below 0.
    """

    action: Action
    index: int
    block: int | None = None
    nbytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the record.

    `address` is 0 if the entry has none; for "oom" it is the number of bytes that the device had free.
    """

    action: str
    address: int
    size_bytes: int
    stream: int
    pool_id: tuple[int, ...]
    frames: Frames


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The history of one device, from the first recorded entry to the snapshot.

    Allocations are numbered: first those that exist before the first entry, by address, then those of the entries.

    Parameters
    ----------
    device : int
    settings : AllocatorSettings
        Those of the snapshot unless others were given.
    entries : tuple of Entry
    start : tuple of SegmentInfo
        The state before the first entry.
    spaces : mapping
        (stream, pool) -> lowest known address of its expandable segment.
    frames : mapping
        Number of an allocation -> its stack, if one was recorded.
    reserved_bytes : numpy.ndarray of int64, shape (entries,)
        After each entry.
    private : bool
        Whether there are private pools (CUDA graphs, `torch.cuda.MemPool`).
    """

    device: int
    settings: AllocatorSettings
    entries: tuple[Entry, ...]
    start: tuple[SegmentInfo, ...]
    spaces: Mapping[tuple[int, str], int]
    frames: Mapping[int, Frames]
    reserved_bytes: npt.NDArray[np.int64]
    private: bool

    @property
    def reserved_at_start_bytes(self) -> int:
        """Bytes reserved before the first entry; 0 if the record begins with the first allocation."""
        return sum(segment.size_bytes for segment in self.start)

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest reserved bytes from the first entry to the snapshot."""
        return max(int(self.reserved_bytes.max(initial=0)), self.reserved_at_start_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotReplay:
    """A recorded history and its replay by the model.

    Parameters
    ----------
    timeline : AllocatorTimeline
        The model's figures, one for each event of `events_of`.
    recorded_peak_reserved_bytes : int
        Highest reserved bytes of the record, its start included.
    allocations : int
        Number of addresses compared.
    first_difference : int or None
        The first entry for which the model's block has another address, or after which the model has another number of
        bytes reserved; None if there is none.
    """

    timeline: AllocatorTimeline
    recorded_peak_reserved_bytes: int
    allocations: int
    first_difference: int | None


# --- reading ---


def load_snapshot(path: str | Path) -> dict[str, Any]:
    """Read a file written by `torch.cuda.memory._dump_snapshot`.

    A pickle can run code when it is read; this reader builds dicts, lists, texts and numbers only.

    Raises
    ------
    InvalidInputError
        If the file holds anything else, or no snapshot.
    """
    found = load_plain(path)
    if isinstance(found, list) and found and isinstance(found[0], Mapping) and "total_size" in found[0]:
        raise InvalidInputError(
            f"{path} holds the list of torch.cuda.memory_snapshot(), without history; write it with"
            " torch.cuda.memory._dump_snapshot(path)"
        )
    try:
        for device in devices(found):
            entries_of(found, device)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} is no memory snapshot: {error}") from error
    return found  # type: ignore[no-any-return]


def devices(snapshot: object) -> range:
    """Return the numbers of the snapshot's devices.

    Raises
    ------
    InvalidInputError
        If it isn't a snapshot, or larger than the limits.
    """
    if not isinstance(snapshot, Mapping) or not {"segments", "device_traces"} <= set(snapshot):
        raise InvalidInputError("no memory snapshot: it must be a dict with 'segments' and 'device_traces'")
    segments, traces = (_list(snapshot[name], name) for name in ("segments", "device_traces"))
    named = [_whole(_dict(segment, "a segment"), "device", 0) for segment in segments]
    number = max(len(traces), 1 + max(named, default=-1))
    if number > _MOST_DEVICES:
        raise InvalidInputError(f"it names {number} devices; the limit is {_MOST_DEVICES}")
    blocks = sum(len(_list(segment.get("blocks", ()), "blocks")) for segment in segments)
    entries = sum(len(_list(trace, "a device's trace")) for trace in traces)
    if entries + blocks > _MOST_ENTRIES:
        raise InvalidInputError(
            f"it holds {entries} entries and {blocks} blocks, the limit is {_MOST_ENTRIES} together; record with"
            " max_entries=1000000"
        )
    return range(number)


def settings_from_snapshot(snapshot: Mapping[str, Any]) -> AllocatorSettings:
    """Return the snapshot's allocator settings.

    A memory fraction set by `torch.cuda.set_per_process_memory_fraction` isn't in a snapshot.

    Raises
    ------
    InvalidInputError
        If the settings aren't modelled, or were changed after the text in the snapshot was read.
    """
    held = _dict(snapshot.get("allocator_settings") or {}, "allocator_settings")
    text = held.get("PYTORCH_CUDA_ALLOC_CONF") or held.get("PYTORCH_ALLOC_CONF") or ""
    settings = AllocatorSettings.from_string(text)
    expandable = held.get("expandable_segments", settings.expandable_segments)
    if expandable != settings.expandable_segments:
        raise InvalidInputError(
            f"the snapshot has expandable_segments={expandable}, but its settings text is {text!r}; pass settings="
        )
    return settings


def _require_device(snapshot: Mapping[str, Any], device: int) -> None:
    known = devices(snapshot)
    if device not in known:
        raise InvalidInputError(f"the snapshot has {len(known)} devices, so no device {device}")


def _final_segments(snapshot: Mapping[str, Any], device: int) -> list[Mapping[str, Any]]:
    """Return the segments of one device in the snapshot's form."""
    _require_device(snapshot, device)
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]


def _entry(index: int, found: Any) -> Entry:
    what = f"entry {index}"
    action = _dict(found, what).get("action")
    if action not in _ACTIONS:
        raise InvalidInputError(f"{what} has action {_shown(action)}; known: {', '.join(_ACTIONS)}")
    address = "device_free" if action == "oom" and "device_free" in found else "addr"
    pool = found.get("pool_id")
    return Entry(
        action,
        _whole(found, address, 0, what),
        _whole(found, "size", None, what),
        _whole(found, "stream", 0, what),
        () if pool is None else _pool_id(pool),
        _frames(found),
    )


def _frames(found: Mapping[str, Any]) -> Frames:
    """Return the stack of an entry or block; empty if none was recorded."""
    frames = found.get("frames")
    known = isinstance(frames, list) and (not frames or isinstance(frames[0], Mapping))
    return frames if known else ()  # type: ignore[return-value]


def _pool_id(found: Any) -> tuple[int, ...]:
    """Return the number of a private pool; empty for the common pool."""
    pool = tuple(number for number in found if isinstance(number, int)) if isinstance(found, (tuple, list)) else ()
    return pool if any(pool) else ()


def _whole(found: Mapping[str, Any], name: str, default: int | None, what: str = "a segment") -> int:
    value = found.get(name, default)
    if not isinstance(value, int) or not 0 <= value <= _MOST_NUMBER:
        raise InvalidInputError(f"{what} has {name}={_shown(value)}; it must be a whole number from 0 to 2**62")
    return value


def _dict(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"{what} is {_shown(found)}; it must be a dict")
    return found


def _list(found: Any, what: str) -> Sequence[Any]:
    if not isinstance(found, (list, tuple)):
        raise InvalidInputError(f"{what} is {_shown(found)}; it must be a list")
    return found


def _shown(value: object) -> str:
    """Return a value from a file for a message: a text or number itself, otherwise its type."""
    if value is None or isinstance(value, (str, float, bool)):
        return repr(value)[:60]
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 200 else "a number of more than 200 bits"
    return f"a {type(value).__name__}"


# --- the state before the first entry ---


def read_history(snapshot: Mapping[str, Any], device: int = 0, settings: AllocatorSettings | None = None) -> History:
    """Return one device's history, with the state before its first entry.

    Undoing an entry needs no allocator rules: the block of an allocation is removed, a freed one is added, and segments
    likewise. Only the sizes of blocks that existed before the record and are freed in it follow from a rule, see
    `_block_bytes`.

    Parameters
    ----------
    snapshot : mapping
        From `torch.cuda.memory._snapshot()` or `load_snapshot`.
    device : int
    settings : AllocatorSettings, optional
        Those of the snapshot if left out.

    Raises
    ------
    InvalidInputError
        If entries are missing, or the settings aren't modelled.
    """
    settings = settings_from_snapshot(snapshot) if settings is None else settings
    entries = entries_of(snapshot, device)
    end = segments_of(snapshot, device)
    kept = stacks_of(snapshot, device)
    pools = _Pools(entries, end)
    undone = _Undone(entries, end, pools)
    limits = _limits(entries, undone)
    allocator = CachingAllocator(_without_fraction(settings))
    start, frames = [], {}
    number = 0
    blocks = sorted(undone.blocks)
    for address, size, stream, pool, expandable in undone.segments():
        found: list[BlockInfo] = []
        at, stop = address, address + size
        for where in blocks[bisect_left(blocks, address) : bisect_left(blocks, stop)]:
            block = undone.blocks[where]
            nbytes = block.size_bytes
            if nbytes is None:
                nbytes = _block_bytes(allocator, block.requested_bytes, limits[where] - where, pool, expandable)
            if where < at or where + nbytes > stop:
                raise InvalidInputError(f"blocks overlap at address {where}; entries are missing")
            if where > at:
                found.append(BlockInfo(at, where - at, 0, "free", None))
            found.append(BlockInfo(where, nbytes, block.requested_bytes, block.state, number))
            if block.size_bytes is not None and where in kept:
                frames[number] = kept[where]
            number += 1
            at = where + nbytes
        if at < stop:
            found.append(BlockInfo(at, stop - at, 0, "free", None))
        start.append(SegmentInfo(address, size, stream, pool, expandable, tuple(found)))
    if number != len(blocks):
        raise InvalidInputError("a block lies in no segment; entries are missing (skip_actions must be empty)")
    made = enumerate((entry for entry in entries if entry.action == "alloc"), start=number)
    frames |= {number: entry.frames for number, entry in made if entry.frames}
    changes = [entry.size_bytes * ((entry.action in _GROWS) - (entry.action in _SHRINKS)) for entry in entries]
    reserved = np.cumsum(changes, dtype=np.int64) + sum(segment.size_bytes for segment in start)
    return History(
        device=device,
        settings=settings,
        entries=entries,
        start=tuple(start),
        spaces=pools.spaces(start),
        frames=frames,
        reserved_bytes=reserved,
        private=any(entry.pool_id for entry in entries)
        or any(_pool_id(segment.get("segment_pool_id", ())) for segment in _final_segments(snapshot, device)),
    )


def _segment(found: Mapping[str, Any]) -> SegmentInfo:
    """Return a segment of the snapshot as a `SegmentInfo`."""
    address = at = _whole(found, "address", None)
    blocks = []
    for block in _list(found.get("blocks", ()), "blocks"):
        block = _dict(block, "a block")
        size = _whole(block, "size", None, "a block")
        state = block.get("state")
        free = state == "inactive"
        requested = 0 if free else _whole(block, "requested_size", size, "a block")
        known = "free" if free else "waiting" if state in _WAITING else "allocated"
        # The first PyTorch versions that recorded histories list all blocks in order, without addresses.
        at = _whole(block, "address", at, "a block")
        blocks.append(BlockInfo(at, size, requested, known, None))
        at += size
    return SegmentInfo(
        address,
        _whole(found, "total_size", None),
        _whole(found, "stream", 0),
        "small" if found.get("segment_type") == "small" else "large",
        bool(found.get("is_expandable", False)),
        tuple(blocks),
    )


def entries_of(snapshot: Mapping[str, Any], device: int) -> tuple[Entry, ...]:
    """Return the entries of a device's record, oldest first; empty if nothing was recorded.

    Entries that only name an allocation ("annotate", from PyTorch 2.15 on) are left out.
    """
    _require_device(snapshot, device)
    traces = snapshot["device_traces"]
    found = enumerate(traces[device] if device < len(traces) else ())
    return tuple(_entry(index, entry) for index, entry in found if not _is_annotation(entry))


def _is_annotation(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("action") == "annotate"


def segments_of(snapshot: Mapping[str, Any], device: int) -> tuple[SegmentInfo, ...]:
    """Return the segments of a device at the snapshot, by address; blocks have no numbers."""
    return tuple(sorted(map(_segment, _final_segments(snapshot, device)), key=lambda segment: segment.address))


def stacks_of(snapshot: Mapping[str, Any], device: int) -> dict[int, Frames]:
    """Return address -> stack of the blocks in use at the snapshot whose stack was recorded."""
    found: dict[int, Frames] = {}
    for segment in _final_segments(snapshot, device):
        at = segment["address"]
        for block in segment.get("blocks", ()):
            at = block.get("address", at)
            if frames := _frames(block):
                found[at] = frames
            at += block["size"]
    return found


def segment_stacks_of(snapshot: Mapping[str, Any], device: int) -> dict[int, Frames]:
    """Return address of a segment -> stack of the request for which it was allocated; empty if not recorded."""
    return {segment["address"]: _frames(segment) for segment in _final_segments(snapshot, device)}


@dataclass(frozen=True, slots=True)
class _UndoneBlock:
    """A block in use while entries are undone; its size is None after the undoing of its free."""

    requested_bytes: int
    state: str
    size_bytes: int | None = None


class _Undone:
    """The state before the first entry: live blocks by address, segments, mapped ranges."""

    def __init__(self, entries: Sequence[Entry], end: Iterable[SegmentInfo], pools: _Pools) -> None:
        self._pools = pools
        self.blocks: dict[int, _UndoneBlock] = {}
        self._fixed: dict[int, tuple[int, int, str]] = {}  # address -> size, stream, pool
        self._mapped: dict[int, Ranges] = {}  # by stream
        for segment in end:
            if segment.expandable:
                self._ranges(segment.stream).add(segment.address, segment.address + segment.size_bytes)
            else:
                self._fixed[segment.address] = segment.size_bytes, segment.stream, segment.pool
            for block in segment.blocks:
                if block.state != "free":
                    self.blocks[block.address] = _UndoneBlock(block.requested_bytes, block.state, block.size_bytes)
        for index in range(len(entries) - 1, -1, -1):
            if not self._undo(entries[index]):
                raise InvalidInputError(
                    f"entry {index} ({entries[index].action} at address {entries[index].address}) contradicts the"
                    " entries after it; entries are missing (skip_actions must be empty, and the snapshot taken while"
                    " recording)"
                )

    def segments(self) -> list[tuple[int, int, int, str, bool]]:
        """Return (address, size, stream, pool, whether expandable) of each segment, by address."""
        found = [(address, *fixed, False) for address, fixed in self._fixed.items()]
        for stream, ranges in self._mapped.items():
            found += [
                (start, stop - start, stream, self._pools.of(start, stream), True) for start, stop in ranges.pairs
            ]
        return sorted(found)

    def _ranges(self, stream: int) -> Ranges:
        return self._mapped.setdefault(stream, Ranges())

    def _undo(self, entry: Entry) -> bool:
        """Undo an entry; return False if the state after it contradicts it."""
        action, address, size, stream = entry.action, entry.address, entry.size_bytes, entry.stream
        held = self.blocks.get(address)
        if action == "alloc":
            if held is None or held.state != "allocated":
                return False
            del self.blocks[address]
        elif action == "free_completed":
            if held is not None:
                return False
            self.blocks[address] = _UndoneBlock(size, "waiting")
        elif action == "free_requested":
            if held is None or held.state != "waiting":
                return False
            self.blocks[address] = replace(held, state="allocated")
        elif action == "segment_alloc":
            return self._fixed.pop(address, None) is not None
        elif action == "segment_free":
            if address in self._fixed:
                return False
            self._fixed[address] = size, stream, "small" if size == SMALL_SEGMENT_BYTES else "large"
        elif action == "segment_map":
            return self._ranges(stream).remove(address, address + size)
        elif action == "segment_unmap":
            return self._ranges(stream).add(address, address + size)
        return True


class _Pools:
    """The pool of the pages at an address.

    It is known for pages mapped at the snapshot, and for pages mapped for a request, which belong to the request's
    pool. Other pages belong to the pool of the nearest known pages of the stream, since the expandable segments of two
    pools are further apart than the size of the device's memory.
    """

    def __init__(self, entries: Sequence[Entry], end: Iterable[SegmentInfo]) -> None:
        self._known: dict[int, list[tuple[int, str]]] = {}
        for segment in end:
            if segment.expandable:
                self._known.setdefault(segment.stream, []).append((segment.address, segment.pool))
        following: dict[int, str] = {}  # stream -> pool of its next request
        for entry in reversed(entries):
            if entry.action in ("alloc", "oom"):
                following[entry.stream] = "small" if entry.size_bytes <= SMALL_BYTES else "large"
            elif entry.action == "segment_map" and entry.stream in following:
                self._known.setdefault(entry.stream, []).append((entry.address, following[entry.stream]))
        for known in self._known.values():
            known.sort()

    def of(self, address: int, stream: int) -> str:
        known = self._known.get(stream, [])
        at = bisect_left(known, (address, ""))
        near = min(known[max(at - 1, 0) : at + 1], key=lambda point: abs(point[0] - address), default=(0, "large"))
        return near[1]

    def spaces(self, start: Iterable[SegmentInfo]) -> dict[tuple[int, str], int]:
        """Return (stream, pool) -> the lowest known address of its expandable segment."""
        points = [((stream, pool), address) for stream, known in self._known.items() for address, pool in known]
        points += [((segment.stream, segment.pool), segment.address) for segment in start if segment.expandable]
        return dict(sorted(points, key=lambda point: -point[1]))  # of several, the last one counts: the lowest


def _limits(entries: Sequence[Entry], undone: _Undone) -> dict[int, int]:
    """Return the address of each block in use before the first entry -> the largest possible end of it.

    That is the address of the next block during its lifetime, or the end of its segment.
    """
    alive = sorted(undone.blocks)
    limits: dict[int, int] = {}
    for address, size, *_ in undone.segments():
        stop = address + size
        inside = alive[bisect_left(alive, address) : bisect_left(alive, stop)]
        limits |= dict(zip(inside, [*inside[1:], stop], strict=False))
    open_limits = set(limits)
    for entry in entries:
        if not open_limits:
            break
        if entry.action == "alloc":
            at = bisect_left(alive, entry.address)
            alive.insert(at, entry.address)
            if at and alive[at - 1] in open_limits:
                limits[alive[at - 1]] = min(limits[alive[at - 1]], entry.address)
        elif entry.action == "free_completed":
            at = bisect_left(alive, entry.address)
            if at < len(alive) and alive[at] == entry.address:
                del alive[at]
            open_limits.discard(entry.address)
    return limits


def _block_bytes(allocator: CachingAllocator, requested: int, limit: int, pool: str, expandable: bool) -> int:
    """Return the size of a block with `limit` bytes up to the next block or the segment's end.

    In the large pool a rest of up to 1 MiB isn't split off, so a gap of at most 1 MiB belongs to the block. Of a larger
    gap a part of up to 1 MiB may belong to it; the whole gap is taken as free. In the small pool and in expandable
    segments rests are always split off. Example: a block of 3 MiB with 3.5 MiB up to the next one has 3.5 MiB; with
    5 MiB up to the next one it is taken to have 3 MiB.
    """
    size = allocator.rounded_bytes(requested)
    oversize = allocator.settings.max_split_size_bytes
    if pool == "small" or expandable:
        return size
    if limit - size <= SMALL_BYTES or (oversize is not None and size >= oversize):
        return limit
    return size


def _without_fraction(settings: AllocatorSettings) -> AllocatorSettings:
    """Return the settings for an allocator without a capacity, which has no fraction."""
    return replace(settings, memory_fraction=1.0)


# --- as events ---


def events_of(history: History) -> list[TraceEvent]:
    """Return the calls of a `CachingAllocator` that the history corresponds to, from its start on.

    A block whose free is completed at once was used on its own stream only. A block whose free is completed later
    waited for other streams: it gets a virtual stream of its own, which is synchronized at the entry that completes the
    free. Consecutive releases of segments are one "empty_cache" if no unused segment is left after them, otherwise one
    "make_room". Whether the program called `empty_cache` or memory ran short makes no difference to the state.

    Raises
    ------
    InvalidInputError
        If there are private pools (CUDA graphs, `torch.cuda.MemPool`).
    """
    if history.private:
        raise InvalidInputError(
            "the history has private pools (CUDA graphs, MemPool), which aren't modelled; record without them"
        )
    events: list[TraceEvent] = []
    segments = _Segments(history.start)
    live, deferred = _live_at(history.start)
    blocks = len(live) + len(deferred)
    entries = history.entries
    for index, entry in enumerate(entries):
        action, address = entry.action, entry.address
        following = entries[index + 1] if index + 1 < len(entries) else None
        if action == "segment_alloc":
            segments.add(address)
        elif action == "alloc":
            live[address] = blocks
            segments.count(address, 1)
            events.append(TraceEvent("allocate", index, blocks, entry.size_bytes, entry.stream))
            blocks += 1
        elif action == "free_requested":
            block = live.pop(address)
            if following is None or (following.action, following.address) != ("free_completed", address):
                deferred[address] = -1 - block
                events.append(TraceEvent("record_stream", index, block, stream=-1 - block))
            events.append(TraceEvent("free", index, block))
        elif action == "free_completed":
            segments.count(address, -1)
            if address in deferred:
                events.append(TraceEvent("synchronize", index, stream=deferred.pop(address)))
        elif action in _SHRINKS:
            if action == "segment_free":
                segments.remove(address)
            if following is None or following.action not in _SHRINKS:  # the run ends
                events.append(TraceEvent("make_room" if segments.any_unused() else "empty_cache", index))
        elif action == "oom":
            events.append(TraceEvent("out_of_memory", index, nbytes=entry.size_bytes, stream=entry.stream))
    return events


def _live_at(start: Iterable[SegmentInfo]) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by address, the numbers of the allocated blocks, and the virtual streams of those that wait."""
    blocks = [(b.state, b.address, b.block) for segment in start for b in segment.blocks if b.block is not None]
    live = {address: number for state, address, number in blocks if state == "allocated"}
    return live, {address: -1 - number for state, address, number in blocks if state == "waiting"}


class _Segments:
    """Number of blocks in use per segment of the record, expandable segments left out."""

    def __init__(self, start: Iterable[SegmentInfo]) -> None:
        fixed = [segment for segment in start if not segment.expandable]
        self._starts = sorted(segment.address for segment in fixed)
        self._used = {segment.address: sum(block.state != "free" for block in segment.blocks) for segment in fixed}

    def add(self, address: int) -> None:
        insort(self._starts, address)
        self._used[address] = 0

    def remove(self, address: int) -> None:
        del self._used[address]
        self._starts.remove(address)

    def count(self, address: int, change: int) -> None:
        at = bisect_right(self._starts, address)
        if at:
            self._used[self._starts[at - 1]] += change

    def any_unused(self) -> bool:
        return not all(self._used.values())


def laid_out_afresh(history: History) -> list[TraceEvent]:
    """Return requests for the blocks in use before the first entry, by address, with index -1.

    They are for an empty allocator with other settings, in which the blocks would have other addresses, and the cache
    other segments.
    """
    events = []
    for segment in history.start:
        for block in segment.blocks:
            if block.block is None:
                continue
            events.append(TraceEvent("allocate", -1, block.block, block.requested_bytes, segment.stream))
            if block.state == "waiting":
                events.append(TraceEvent("record_stream", -1, block.block, stream=-1 - block.block))
                events.append(TraceEvent("free", -1, block.block))
    return events


# --- replaying ---


class RecordedAddresses(Addresses):
    """The recorded addresses of new segments; those of `Addresses` for segments that the record doesn't have."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._entries = entries
        self._next = 0
        self._fixed: deque[int] = deque()
        self._mapped: deque[int] = deque()

    def advance(self, index: int) -> None:
        """Move to the entry of a request; segments recorded since the previous request were allocated for it."""
        self._fixed.clear()
        self._mapped.clear()
        while self._next <= index:
            entry = self._entries[self._next]
            if entry.action == "segment_alloc":
                self._fixed.append(entry.address)
            elif entry.action == "segment_map":
                self._mapped.append(entry.address)
            self._next += 1

    @property
    def any_new(self) -> bool:
        """Whether the record has a new segment, or new pages, for the present entry."""
        return bool(self._fixed or self._mapped)

    def segment(self, nbytes: int) -> int:
        """Return the address of a new segment."""
        return self._fixed.popleft() if self._fixed else super().segment(nbytes)

    def space(self, nbytes: int) -> int:
        """Return the address of an expandable segment: that of its first page."""
        return self._mapped.popleft() if self._mapped else super().space(nbytes)


class Replayer:
    """Applies events to an allocator, one by one, and keeps its figures after each."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._figures: list[tuple[int, int, int]] = []

    def apply(self, event: TraceEvent) -> None:
        """Call the allocator; "make_room" and "out_of_memory" call nothing."""
        allocator = self.allocator
        if event.action == "synchronize":
            allocator.synchronize(event.stream)
        elif event.action == "empty_cache":
            allocator.empty_cache()
        elif event.action not in ("make_room", "out_of_memory"):
            assert event.block is not None
            if event.action == "allocate":
                allocator.allocate(event.block, event.nbytes, event.stream, grow=self._grows())
            elif event.action == "free":
                allocator.free(event.block)
            else:
                allocator.record_stream(event.block, event.stream)
        self._figures.append((allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes))

    def _grows(self) -> bool:
        """Return whether the next request is known to take new memory."""
        return False

    def timeline(self) -> AllocatorTimeline:
        """Return the figures, and the allocator's peaks."""
        return timeline_of(self.allocator, self._figures)


class RecordedReplayer(Replayer):
    """Replays a history from its start, with the recorded addresses and releases of segments.

    With a capacity, the allocator itself chooses which unused segments to release.
    """

    def __init__(self, history: History, capacity_bytes: int | None = None) -> None:
        settings = history.settings
        if capacity_bytes is None:
            settings = _without_fraction(settings)
        self._history = history
        self._follows_releases = capacity_bytes is None
        self._released = self._was_released = False  # by this event, by the one before it
        self._addresses = RecordedAddresses(history.entries)
        super().__init__(CachingAllocator(settings, capacity_bytes, self._addresses))
        self.allocator.restore(history.start, history.spaces)

    def apply(self, event: TraceEvent) -> None:
        """Call the allocator, and release the segments of a "make_room" unless there is a capacity."""
        self._addresses.advance(event.index)
        self._released, self._was_released = event.action in ("empty_cache", "make_room"), self._released
        if event.action == "make_room" and self._follows_releases:
            at = event.index
            while at >= 0 and self._history.entries[at].action in _SHRINKS:
                self.allocator.release(self._history.entries[at].address)
                at -= 1
        super().apply(event)

    def _grows(self) -> bool:
        return self._was_released and self._addresses.any_new


def replay_history(history: History, *, capacity_bytes: int | None = None) -> SnapshotReplay:
    """Replay a recorded history through the model, from the recorded start and with the recorded addresses.

    Parameters
    ----------
    history : History
        From `read_history`.
    capacity_bytes : int, optional
        As for `CachingAllocator`. With it the model itself chooses which unused segments to release if the record
        releases only some, as with `max_split_size_mb` and `garbage_collection_threshold`; without it the model
        releases the recorded ones.

    Raises
    ------
    InvalidInputError
        If the record can't be replayed; see `events_of`.
    SimulatedOutOfMemoryError
        If the model runs out of memory though the recorded run didn't.
    """
    replayer = RecordedReplayer(history, capacity_bytes)
    allocations, difference = 0, None
    for event in events_of(history):
        replayer.apply(event)
        same = replayer.allocator.reserved_bytes == history.reserved_bytes[event.index]
        if event.action == "allocate":
            assert event.block is not None
            allocations += 1
            same &= replayer.allocator.address_of(event.block) == history.entries[event.index].address
        if difference is None and not same:
            difference = event.index
    return SnapshotReplay(replayer.timeline(), history.peak_reserved_bytes, allocations, difference)
