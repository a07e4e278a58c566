"""PyTorch's recorded memory history as events for the allocator model, to check the one against the other.

The history is what `torch.cuda.memory._record_memory_history()` and `_snapshot()` give (PyTorch 2.9 to 2.13): a plain
dict, or the file that `_dump_snapshot` writes. It must reach back to the first allocation of the process, since blocks
that are there already have a place in segments that no sequence of requests is known for.

Two things that happened are taken over from the record, because the model can't know them: when a block that other
streams had used became free, and when all unused segments were released. A release of some of them alone (garbage
collection, or of oversize blocks) is left to the model, which must know the capacity then. A memory fraction isn't in a
snapshot either.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptplan.core.errors import InvalidInputError
from ckptplan.memory.allocator import AllocatorTimeline, CachingAllocator, _timeline
from ckptplan.memory.allocator_settings import AllocatorSettings

Action = Literal["allocate", "free", "record_stream", "synchronize", "empty_cache", "make_room"]

_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")
_ACTIONS = (*_GROWS, *_SHRINKS, "alloc", "free_requested", "free_completed", "oom", "snapshot")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One call of a `CachingAllocator` method; `index` is the record's entry that it comes from.

    "make_room" is no call: some unused segments were released, which the model does by itself if it knows the capacity.
    `block` is None for "synchronize", "empty_cache" and "make_room". `nbytes` counts for "allocate" only. `stream` is
    that of an "allocate", or the one that a "record_stream" or "synchronize" names; made-up streams are below 0.
    """

    action: Action
    index: int
    block: int | None = None
    nbytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotReplay:
    """A recorded history beside the model's.

    Parameters
    ----------
    timeline : AllocatorTimeline
        The model's figures, one for each event of `events_from_snapshot`.
    recorded_reserved_bytes : numpy.ndarray of int64, shape (entries,)
        Reserved bytes after each entry of the record.
    """

    timeline: AllocatorTimeline
    recorded_reserved_bytes: npt.NDArray[np.int64]

    @property
    def recorded_peak_reserved_bytes(self) -> int:
        """Highest reserved bytes of the record."""
        return int(self.recorded_reserved_bytes.max(initial=0))

    @property
    def relative_error(self) -> float:
        """(model - record) / record of the reserved peaks; 0 for an empty record."""
        recorded = self.recorded_peak_reserved_bytes
        return (self.timeline.peak_reserved_bytes - recorded) / recorded if recorded else 0.0


def load_snapshot(path: str | Path) -> dict[str, Any]:
    """Snapshot from a file of `torch.cuda.memory._dump_snapshot`.

    A pickle can run code when it is read; this reader builds dicts, lists, texts and numbers only.

    Raises
    ------
    InvalidInputError
        For a file that holds anything else, or no snapshot.
    """
    try:
        with open(path, "rb") as file:
            found = _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise InvalidInputError(f"{path} is no memory snapshot: {error}") from error
    _parts(found, 0)
    return found  # type: ignore[no-any-return]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}; a snapshot holds plain data alone")


def settings_from_snapshot(snapshot: Mapping[str, Any]) -> AllocatorSettings:
    """The settings that the snapshot names.

    A memory fraction set by `torch.cuda.set_per_process_memory_fraction` isn't in a snapshot.

    Raises
    ------
    InvalidInputError
        For settings that aren't modelled, or that were changed by other means than the text the snapshot holds.
    """
    held = snapshot.get("allocator_settings", {})
    text = held.get("PYTORCH_CUDA_ALLOC_CONF") or held.get("PYTORCH_ALLOC_CONF") or ""
    settings = AllocatorSettings.from_string(text)
    expandable = held.get("expandable_segments", settings.expandable_segments)
    if expandable != settings.expandable_segments:
        raise InvalidInputError(
            f"the snapshot says expandable_segments is {expandable}, but its settings read {text!r}; pass settings="
        )
    return settings


def recorded_reserved(snapshot: Mapping[str, Any], device: int = 0) -> npt.NDArray[np.int64]:
    """Reserved bytes after each entry of the record, from its segments' comings and goings.

    Returns
    -------
    numpy.ndarray of int64, shape (entries,)

    Raises
    ------
    InvalidInputError
        Unless the record starts with nothing reserved.
    """
    entries, segments = _parts(snapshot, device)
    sizes = [_signed_size(entry) for entry in entries]
    start = sum(segment["total_size"] for segment in segments) - sum(sizes)
    if start:
        raise InvalidInputError(
            f"{start} bytes of device {device} were reserved before the first recorded entry; call"
            " torch.cuda.memory._record_memory_history() before anything is allocated, with max_entries left alone"
        )
    return np.cumsum(np.array(sizes, dtype=np.int64), dtype=np.int64)


def events_from_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> list[TraceEvent]:
    """Calls of a `CachingAllocator` that the record amounts to.

    A block whose free is completed at once was used on its own stream alone. One that is completed later waited for
    other streams; it is noted for a made-up stream of its own, which is synchronized where the record completes it.
    A run of released segments is an `empty_cache` if no unused segment is left after it, whether the program asked for
    it or memory ran short: before the next request both leave the same state. Else it is a "make_room".

    Raises
    ------
    InvalidInputError
        For records that miss entries, or hold private pools (CUDA graphs, `torch.cuda.MemPool`).
    """
    entries, _ = _parts(snapshot, device)
    events: list[TraceEvent] = []
    live: dict[int, int] = {}  # address -> block
    deferred: dict[int, int] = {}  # address -> made-up stream
    segments = _Segments()
    blocks = 0
    for index, entry in enumerate(entries):
        action, address = entry["action"], entry.get("addr", 0)
        following = entries[index + 1] if index + 1 < len(entries) else {}
        if tuple(entry.get("pool_id", (0, 0))) != (0, 0):
            raise InvalidInputError(
                f"entry {index} belongs to private pool {tuple(entry['pool_id'])}; CUDA graphs and MemPool aren't"
                " modelled, record without them"
            )
        if action == "segment_alloc":
            segments.add(address)
        elif action == "alloc":
            if address in live or address in deferred:
                raise InvalidInputError(
                    f"entry {index} allocates address {address}, which isn't free yet; entries are missing"
                    " (skip_actions must be empty)"
                )
            live[address] = blocks
            segments.count(address, 1)
            events.append(TraceEvent("allocate", index, blocks, entry["size"], entry.get("stream", 0)))
            blocks += 1
        elif action == "free_requested":
            if address not in live:
                raise InvalidInputError(
                    f"entry {index} frees address {address}, whose allocation isn't in the record; record from the"
                    " first allocation on, with max_entries left alone"
                )
            block = live.pop(address)
            if (following.get("action"), following.get("addr")) != ("free_completed", address):
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
            if following.get("action") not in _SHRINKS:  # the run ends
                events.append(TraceEvent("make_room" if segments.any_unused() else "empty_cache", index))
    return events


class _Segments:
    """How many blocks each segment of the record has in use; expandable ones (`segment_map`) don't count."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._used: dict[int, int] = {}

    def add(self, address: int) -> None:
        insort(self._starts, address)
        self._used[address] = 0

    def remove(self, address: int) -> None:
        # A segment that was never recorded shows in `recorded_reserved`.
        if self._used.pop(address, None) is not None:
            self._starts.remove(address)

    def count(self, address: int, change: int) -> None:
        at = bisect_right(self._starts, address)
        if at:
            self._used[self._starts[at - 1]] += change

    def any_unused(self) -> bool:
        return not all(self._used.values())


def replay_events(
    events: Iterable[TraceEvent], settings: AllocatorSettings | None = None, capacity_bytes: int | None = None
) -> AllocatorTimeline:
    """Figures after each event; as `ckptplan.memory.allocator.replay`, with streams and releases.

    Raises
    ------
    InvalidInputError
        For a "make_room" without a capacity.
    SimulatedOutOfMemoryError
        Where the model fails.
    """
    allocator = CachingAllocator(settings, capacity_bytes)
    figures = []
    for event in events:
        if event.action == "synchronize":
            allocator.synchronize(event.stream)
        elif event.action == "empty_cache":
            allocator.empty_cache()
        elif event.action == "make_room":
            if capacity_bytes is None:
                raise InvalidInputError(
                    f"entry {event.index} released some of the unused segments to make room (max_split_size, garbage"
                    " collection); to do the same the model must know the capacity, pass capacity_bytes="
                )
        elif event.block is None:
            raise InvalidInputError(f"event {event} needs a block")
        elif event.action == "allocate":
            allocator.allocate(event.block, event.nbytes, event.stream)
        elif event.action == "free":
            allocator.free(event.block)
        else:
            allocator.record_stream(event.block, event.stream)
        figures.append((allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes))
    return _timeline(allocator, figures)


def replay_snapshot(
    snapshot: Mapping[str, Any],
    device: int = 0,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> SnapshotReplay:
    """Replay a recorded history through the model.

    Parameters
    ----------
    snapshot : mapping
        From `torch.cuda.memory._snapshot()` or `load_snapshot`.
    device : int
        Which of its devices.
    settings : AllocatorSettings, optional
        Those of the snapshot if left out.
    capacity_bytes : int, optional
        As for `CachingAllocator`. Needed where only some unused segments were released, as happens with
        `max_split_size_mb` and `garbage_collection_threshold`: the record doesn't say which rule released them.

    Raises
    ------
    InvalidInputError
        For a record that can't be replayed; see `events_from_snapshot` and `recorded_reserved`.
    SimulatedOutOfMemoryError
        Where the model fails though the recorded run didn't.
    """
    settings = settings_from_snapshot(snapshot) if settings is None else settings
    reserved = recorded_reserved(snapshot, device)
    return SnapshotReplay(replay_events(events_from_snapshot(snapshot, device), settings, capacity_bytes), reserved)


def _parts(snapshot: object, device: int) -> tuple[Sequence[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Entries and final segments of one device."""
    if not isinstance(snapshot, Mapping) or not {"segments", "device_traces"} <= set(snapshot):
        raise InvalidInputError("no memory snapshot: it must be a dict with 'segments' and 'device_traces'")
    traces = snapshot["device_traces"]
    if not 0 <= device < len(traces):
        raise InvalidInputError(f"the snapshot has {len(traces)} devices, so no device {device}")
    for index, entry in enumerate(traces[device]):
        if entry["action"] not in _ACTIONS:
            raise InvalidInputError(f"entry {index} has action {entry['action']!r}; known: {', '.join(_ACTIONS)}")
    return traces[device], [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]


def _signed_size(entry: Mapping[str, Any]) -> int:
    size = int(entry["size"])
    return size if entry["action"] in _GROWS else -size if entry["action"] in _SHRINKS else 0
