"""PyTorch's recorded memory history as events for the allocator model, to check the one against the other.

The history is what `torch.cuda.memory._record_memory_history()` and `_snapshot()` give (PyTorch 2.1 to 2.13): a plain
dict, or the file that `_dump_snapshot` writes. It needn't reach back to the first allocation: the state before the
first entry follows from the state at the snapshot by undoing entry after entry.

Taken over from the record, because the model can't know them: where new segments lie, when a block that other streams
had used became free, and which unused segments were released. A memory fraction isn't in a snapshot.
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
_MOST = 1 << 62  # of addresses, sizes and streams
_MOST_DEVICES = 1024
_MOST_ENTRIES = 20_000_000  # entries and blocks of all devices; lists may share them, so a file's size is no limit


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One call of a `CachingAllocator` method; `index` is the record's entry that it comes from.

    Two are no calls. "make_room": some unused segments were released, which the model does by itself if it knows the
    capacity. "out_of_memory": a request for `nbytes` failed. `block` is None for these two, "synchronize" and
    "empty_cache". `nbytes` counts for "allocate" and "out_of_memory" only. `stream` is that of the request, or the one
    that a "record_stream" or "synchronize" names; made-up streams are below 0.
    """

    action: Action
    index: int
    block: int | None = None
    nbytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the record; `address` is 0 where it has none, for "oom" what the device had free."""

    action: str
    address: int
    size_bytes: int
    stream: int
    pool_id: tuple[int, ...]
    frames: Frames


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What a snapshot says of one device, from the first recorded entry to the snapshot.

    Allocations are numbered: first those alive before the first entry, by address, then those of the entries.

    Parameters
    ----------
    device : int
    settings : AllocatorSettings
        As the snapshot has them, or as given.
    entries : tuple of Entry
    start, end : tuple of SegmentInfo
        The state before the first entry and that at the snapshot. In `end` blocks have no numbers.
    spaces : mapping
        (stream, pool) -> lowest known address of its expandable segment.
    frames : mapping
        Number of an allocation -> where it was made; only those with a recorded stack.
    reserved_bytes : numpy.ndarray of int64, shape (entries,)
        After each entry.
    private : bool
        Whether there are private pools (CUDA graphs, `torch.cuda.MemPool`).
    """

    device: int
    settings: AllocatorSettings
    entries: tuple[Entry, ...]
    start: tuple[SegmentInfo, ...]
    end: tuple[SegmentInfo, ...]
    spaces: Mapping[tuple[int, str], int]
    frames: Mapping[int, Frames]
    reserved_bytes: npt.NDArray[np.int64]
    private: bool

    @property
    def reserved_at_start_bytes(self) -> int:
        """Reserved before the first entry; 0 where the record reaches back to the first allocation."""
        return sum(segment.size_bytes for segment in self.start)

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest reserved bytes from the first entry to the snapshot."""
        return max(int(self.reserved_bytes.max(initial=0)), self.reserved_at_start_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotReplay:
    """A recorded history beside the model's.

    Parameters
    ----------
    timeline : AllocatorTimeline
        The model's figures, one for each event of `events_from_snapshot`.
    recorded_reserved_bytes : numpy.ndarray of int64, shape (entries,)
        Reserved bytes after each entry of the record.
    recorded_peak_reserved_bytes : int
        Highest reserved bytes of the record, its start included.
    allocations : int
        How many addresses were compared.
    first_difference : int or None
        The first entry whose block lies elsewhere in the model, or behind which the model has reserved another amount;
        None where all is the same.
    """

    timeline: AllocatorTimeline
    recorded_reserved_bytes: npt.NDArray[np.int64]
    recorded_peak_reserved_bytes: int
    allocations: int
    first_difference: int | None

    @property
    def relative_error(self) -> float:
        """(model - record) / record of the reserved peaks; 0 for an empty record."""
        recorded = self.recorded_peak_reserved_bytes
        return (self.timeline.peak_reserved_bytes - recorded) / recorded if recorded else 0.0


# --- reading ---


def load_snapshot(path: str | Path) -> dict[str, Any]:
    """Snapshot from a file of `torch.cuda.memory._dump_snapshot`.

    A pickle can run code when it is read; this reader builds dicts, lists, texts and numbers only.

    Raises
    ------
    InvalidInputError
        For a file that holds anything else, or no snapshot.
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
    """Numbers of the snapshot's devices.

    Raises
    ------
    InvalidInputError
        For what isn't a snapshot, or larger than any.
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
    """The settings that the snapshot names.

    A memory fraction set by `torch.cuda.set_per_process_memory_fraction` isn't in a snapshot.

    Raises
    ------
    InvalidInputError
        For settings that aren't modelled, or that were changed by other means than the text the snapshot holds.
    """
    held = _dict(snapshot.get("allocator_settings") or {}, "allocator_settings")
    text = held.get("PYTORCH_CUDA_ALLOC_CONF") or held.get("PYTORCH_ALLOC_CONF") or ""
    settings = AllocatorSettings.from_string(text)
    expandable = held.get("expandable_segments", settings.expandable_segments)
    if expandable != settings.expandable_segments:
        raise InvalidInputError(
            f"the snapshot says expandable_segments is {expandable}, but its settings read {text!r}; pass settings="
        )
    return settings


def _require_device(snapshot: Mapping[str, Any], device: int) -> None:
    known = devices(snapshot)
    if device not in known:
        raise InvalidInputError(f"the snapshot has {len(known)} devices, so no device {device}")


def _final_segments(snapshot: Mapping[str, Any], device: int) -> list[Mapping[str, Any]]:
    """Segments of one device, as the snapshot has them."""
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
    """The stack of an entry or block; empty where none was recorded."""
    frames = found.get("frames")
    known = isinstance(frames, list) and (not frames or isinstance(frames[0], Mapping))
    return frames if known else ()  # type: ignore[return-value]


def _pool_id(found: Any) -> tuple[int, ...]:
    """Empty for the common pool."""
    pool = tuple(number for number in found if isinstance(number, int)) if isinstance(found, (tuple, list)) else ()
    return pool if any(pool) else ()


def _whole(found: Mapping[str, Any], name: str, default: int | None, what: str = "a segment") -> int:
    value = found.get(name, default)
    if not isinstance(value, int) or not 0 <= value <= _MOST:
        raise InvalidInputError(f"{what} has {name}={_shown(value)}; must be a whole number from 0 to 2**62")
    return value


def _dict(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"{what} is {_shown(found)}; must be a dict")
    return found


def _list(found: Any, what: str) -> Sequence[Any]:
    if not isinstance(found, (list, tuple)):
        raise InvalidInputError(f"{what} is {_shown(found)}; must be a list")
    return found


def _shown(value: object) -> str:
    """A value from a file for a message; of all but texts and numbers the type, since it may be endless."""
    if value is None or isinstance(value, (str, float, bool)):
        return repr(value)[:60]
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 200 else "a number of more than 200 bits"
    return f"a {type(value).__name__}"


# --- the state before the first entry ---


def read_history(snapshot: Mapping[str, Any], device: int = 0, settings: AllocatorSettings | None = None) -> History:
    """One device's history, with the state in which it starts.

    Undoing an entry needs no rules: an allocation's block goes, a freed one comes back, and so do segments. The record
    doesn't have the sizes of blocks that were there before it and are freed in it; `_block_bytes` has the rule.

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
        For records that miss entries, and settings that aren't modelled.
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
    for entry in entries:
        if entry.action == "alloc":
            if entry.frames:
                frames[number] = entry.frames
            number += 1
    changes = np.array([_change(entry) for entry in entries], dtype=np.int64)
    reserved = np.cumsum(changes, dtype=np.int64) + sum(segment.size_bytes for segment in start)
    return History(
        device=device,
        settings=settings,
        entries=entries,
        start=tuple(start),
        end=end,
        spaces=pools.spaces(start),
        frames=frames,
        reserved_bytes=reserved,
        private=any(entry.pool_id for entry in entries)
        or any(_pool_id(segment.get("segment_pool_id", ())) for segment in _final_segments(snapshot, device)),
    )


def _segment(found: Mapping[str, Any]) -> SegmentInfo:
    """A segment of the snapshot."""
    address = at = _whole(found, "address", None)
    blocks = []
    for block in _list(found.get("blocks", ()), "blocks"):
        block = _dict(block, "a block")
        size = _whole(block, "size", None, "a block")
        state = block.get("state")
        free = state == "inactive"
        requested = 0 if free else _whole(block, "requested_size", size, "a block")
        known = "free" if free else "waiting" if state in _WAITING else "allocated"
        # The first versions that recorded histories gave no addresses of blocks, but all blocks in order.
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
    """Entries of a device's record, oldest first; none where nothing was recorded."""
    _require_device(snapshot, device)
    traces = snapshot["device_traces"]
    return tuple(_entry(index, entry) for index, entry in enumerate(traces[device] if device < len(traces) else ()))


def segments_of(snapshot: Mapping[str, Any], device: int) -> tuple[SegmentInfo, ...]:
    """State of a device at the snapshot, by address; blocks have no numbers."""
    return tuple(sorted(map(_segment, _final_segments(snapshot, device)), key=lambda segment: segment.address))


def stacks_of(snapshot: Mapping[str, Any], device: int) -> dict[int, Frames]:
    """Address of a block that is alive at the snapshot -> where it was made, if recorded."""
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
    """Address of a segment -> the stack of the request that it was made for, if recorded."""
    return {segment["address"]: _frames(segment) for segment in _final_segments(snapshot, device)}


@dataclass(frozen=True, slots=True)
class _Held:
    """A live block while entries are undone; its size is None once a free has been undone."""

    requested_bytes: int
    state: str
    size_bytes: int | None = None


class _Undone:
    """The state before the first entry: live blocks by address, segments, mapped ranges."""

    def __init__(self, entries: Sequence[Entry], end: Iterable[SegmentInfo], pools: _Pools) -> None:
        self._pools = pools
        self.blocks: dict[int, _Held] = {}
        self._fixed: dict[int, tuple[int, int, str]] = {}  # address -> size, stream, pool
        self._mapped: dict[int, Ranges] = {}  # by stream
        for segment in end:
            if segment.expandable:
                self._ranges(segment.stream).add(segment.address, segment.address + segment.size_bytes)
            else:
                self._fixed[segment.address] = segment.size_bytes, segment.stream, segment.pool
            for block in segment.blocks:
                if block.state != "free":
                    self.blocks[block.address] = _Held(block.requested_bytes, block.state, block.size_bytes)
        for index in range(len(entries) - 1, -1, -1):
            if not self._undo(entries[index]):
                raise InvalidInputError(
                    f"entry {index} ({entries[index].action} at address {entries[index].address}) doesn't fit what"
                    " follows it; entries are missing (skip_actions must be empty, and the snapshot taken while"
                    " recording)"
                )

    def segments(self) -> list[tuple[int, int, int, str, bool]]:
        """Address, size, stream, pool, whether expandable; by address."""
        found = [(address, *fixed, False) for address, fixed in self._fixed.items()]
        for stream, ranges in self._mapped.items():
            found += [
                (start, stop - start, stream, self._pools.of(start, stream), True) for start, stop in ranges.pairs
            ]
        return sorted(found)

    def _ranges(self, stream: int) -> Ranges:
        return self._mapped.setdefault(stream, Ranges())

    def _undo(self, entry: Entry) -> bool:
        """False where the entry can't have led to what follows it."""
        action, address, size, stream = entry.action, entry.address, entry.size_bytes, entry.stream
        held = self.blocks.get(address)
        if action == "alloc":
            if held is None or held.state != "allocated":
                return False
            del self.blocks[address]
        elif action == "free_completed":
            if held is not None:
                return False
            self.blocks[address] = _Held(size, "waiting")
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
    """Which pool the pages at an address belong to.

    The snapshot says it of what is mapped at its end; pages that were mapped for a request belong to the request's
    pool. Of others it is that of the nearest known pages of the stream: the expandable segments of two pools lie apart
    by more than the device's memory.
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
        """(stream, pool) -> lowest address of its expandable segment that is known."""
        points = [(stream, pool, address) for stream, known in self._known.items() for address, pool in known]
        points += [(segment.stream, segment.pool, segment.address) for segment in start if segment.expandable]
        found: dict[tuple[int, str], int] = {}
        for stream, pool, address in points:
            found[stream, pool] = min(address, found.get((stream, pool), address))
        return found


def _limits(entries: Sequence[Entry], undone: _Undone) -> dict[int, int]:
    """Address of each block alive before the first entry -> where it ends at the latest.

    That is where a block lies behind it while it lives, or the end of its segment.
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
    """Size of a block that has `limit` bytes up to whatever is behind it.

    In the large pool a rest of up to 1 MiB isn't split off, so what is free behind a block is larger than that: a
    smaller gap belongs to the block. In a larger gap a part of up to 1 MiB might; it is taken as free. Elsewhere rests
    are always split off.
    """
    size = allocator.rounded_bytes(requested)
    oversize = allocator.settings.max_split_size_bytes
    if pool == "small" or expandable:
        return size
    if limit - size <= SMALL_BYTES or (oversize is not None and size >= oversize):
        return limit
    return size


def _change(entry: Entry) -> int:
    """By how much the entry changes what is reserved."""
    return entry.size_bytes * ((entry.action in _GROWS) - (entry.action in _SHRINKS))


def _without_fraction(settings: AllocatorSettings) -> AllocatorSettings:
    """The same settings for an allocator without a limit, of which a fraction means nothing."""
    return replace(settings, memory_fraction=1.0)


# --- as events ---


def events_from_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> list[TraceEvent]:
    """Calls of a `CachingAllocator` that the record of a device amounts to; see `events_of`."""
    return events_of(read_history(snapshot, device))


def events_of(history: History) -> list[TraceEvent]:
    """Calls of a `CachingAllocator` that the history amounts to, from its start on.

    A block whose free is completed at once was used on its own stream alone. One that is completed later waited for
    other streams; it is noted for a made-up stream of its own, which is synchronized where the record completes it.
    A run of released segments is an `empty_cache` if no unused segment is left after it, whether the program asked for
    it or memory ran short: before the next request both leave the same state. Else it is a "make_room".

    Raises
    ------
    InvalidInputError
        For private pools (CUDA graphs, `torch.cuda.MemPool`).
    """
    if history.private:
        raise InvalidInputError(
            "parts of it belong to private pools; CUDA graphs and MemPool aren't modelled, record without them"
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
    """By address: the numbers of the allocated blocks, and the made-up streams of those that wait."""
    blocks = [block for segment in start for block in segment.blocks]
    live = {b.address: b.block for b in blocks if b.state == "allocated" and b.block is not None}
    waiting = {
        block.address: -1 - block.block for block in blocks if block.state == "waiting" and block.block is not None
    }
    return live, waiting


class _Segments:
    """How many blocks each segment of the record has in use; expandable ones (`segment_map`) don't count."""

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
    """Requests for what is alive before the first entry, by address, for an allocator that starts empty; index -1.

    In an allocator with other settings the blocks would lie elsewhere, and what was cached wouldn't be the same.
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
    """New segments get the addresses that the record has for them, others those of `Addresses`."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._entries = entries
        self._next = 0
        self._fixed: deque[int] = deque()
        self._mapped: deque[int] = deque()

    def advance(self, index: int) -> None:
        """Go on to an entry: what was made after the one before it is for the request that this one records."""
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
        """Whether something was made for the present entry."""
        return bool(self._fixed or self._mapped)

    def segment(self, nbytes: int) -> int:
        """Address of a new segment."""
        return self._fixed.popleft() if self._fixed else super().segment(nbytes)

    def space(self, nbytes: int) -> int:
        """Address of an expandable segment's address space: that of its first page."""
        return self._mapped.popleft() if self._mapped else super().space(nbytes)


class Replayer:
    """Feeds events to an allocator, one by one, and keeps its figures after each."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._figures: list[tuple[int, int, int]] = []

    def apply(self, event: TraceEvent) -> None:
        """Do what the event says; a "make_room" is left to the allocator."""
        allocator = self.allocator
        if event.action == "synchronize":
            allocator.synchronize(event.stream)
        elif event.action == "empty_cache":
            allocator.empty_cache()
        elif event.action not in ("make_room", "out_of_memory"):
            if event.block is None:
                raise InvalidInputError(f"event {event} needs a block")
            if event.action == "allocate":
                allocator.allocate(event.block, event.nbytes, event.stream, grow=self._grows())
            elif event.action == "free":
                allocator.free(event.block)
            else:
                allocator.record_stream(event.block, event.stream)
        self._figures.append((allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes))

    def _grows(self) -> bool:
        """Whether the next request is known to take new memory."""
        return False

    def timeline(self) -> AllocatorTimeline:
        """The figures, and the allocator's peaks."""
        return timeline_of(self.allocator, self._figures)


class RecordedReplayer(Replayer):
    """Replays a history from its start, with its segments' addresses, and releases those that it releases.

    With a capacity, which unused segments go is left to the allocator.
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
        """Do what the event says."""
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


def replay_events(
    events: Iterable[TraceEvent], settings: AllocatorSettings | None = None, capacity_bytes: int | None = None
) -> AllocatorTimeline:
    """Figures after each event; as `ckptplan.memory.allocator.replay`, with streams and releases.

    Without a capacity there is no shortage, and a "make_room" does nothing.

    Raises
    ------
    SimulatedOutOfMemoryError
        Where the model fails.
    """
    replayer = Replayer(CachingAllocator(settings, capacity_bytes))
    for event in events:
        replayer.apply(event)
    return replayer.timeline()


def replay_snapshot(
    snapshot: Mapping[str, Any],
    device: int = 0,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> SnapshotReplay:
    """Replay a recorded history through the model, from the recorded start and with the recorded addresses.

    Parameters
    ----------
    snapshot : mapping
        From `torch.cuda.memory._snapshot()` or `load_snapshot`.
    device : int
        Which of its devices.
    settings : AllocatorSettings, optional
        Those of the snapshot if left out.
    capacity_bytes : int, optional
        As for `CachingAllocator`. With it the model itself releases unused segments where only some of them were
        released, as happens with `max_split_size_mb` and `garbage_collection_threshold`; without, those that the record
        says.

    Raises
    ------
    InvalidInputError
        For a record that can't be replayed; see `read_history` and `events_of`.
    SimulatedOutOfMemoryError
        Where the model fails though the recorded run didn't.
    """
    return replay_history(read_history(snapshot, device, settings), capacity_bytes=capacity_bytes)


def replay_history(history: History, *, capacity_bytes: int | None = None) -> SnapshotReplay:
    """Replay a history through the model; see `replay_snapshot`."""
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
    return SnapshotReplay(
        replayer.timeline(), history.reserved_bytes, history.peak_reserved_bytes, allocations, difference
    )
