"""Recorded memory histories: their files, their replay through the allocator model, and how they are made.

A file is gzipped JSON. Per device it has `events` in columns (`action`, `address`, `size`, `stream`; an action is one
letter; for "oom" the address is what the device had free), `final_segments` (blocks as [address, size, requested,
state]), `initial` (the state before the first event: segments as [address, size, stream, small, expandable], blocks
that aren't free as [address, requested, size]) and the peaks `recorded_peak_reserved`, `peak_allocated` and
`peak_requested`. `allocator_conf` has the settings. `make_histories.py` writes the files beside this module;
`history_from` makes one of what a GPU's allocator recorded; `$CKPTPLAN_HISTORIES` may name a folder with others.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptplan.core.allocator_settings import SMALL_BYTES, AllocatorSettings
from ckptplan.memory.allocator import Addresses, BlockInfo, CachingAllocator, SegmentInfo

LETTERS = {
    "alloc": "a",
    "free_requested": "f",
    "free_completed": "c",
    "segment_alloc": "A",
    "segment_free": "F",
    "segment_map": "M",
    "segment_unmap": "U",
    "oom": "o",
    "snapshot": "s",
}
STATES = ("inactive", "active_allocated", "active_pending_free")
GENERATED = Path(__file__).parent / "histories"

Row = tuple[str, int, int, int]  # an event: letter, address, size, stream


def load_history(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)  # type: ignore[no-any-return]


def save_history(history: Mapping[str, Any], path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(history, file, separators=(",", ":"))


def settings_of(history: Mapping[str, Any]) -> AllocatorSettings:
    return AllocatorSettings.from_string(history["allocator_conf"] or "")


def rows_of(device: Mapping[str, Any]) -> list[Row]:
    return list(zip(*(device["events"][name] for name in ("action", "address", "size", "stream")), strict=True))


# --- the start ---


def start_of(device: Mapping[str, Any]) -> tuple[SegmentInfo, ...]:
    """Return the state before the first event; blocks are numbered by address.

    A block waits for another stream if the first event at its address completes its free, or if there is none and it
    waits at the end.
    """
    first: dict[int, str] = {}
    for action, address, _, _ in rows_of(device):
        if action in "afc":
            first.setdefault(address, action)
    last = {address for segment in device["final_segments"] for address, _, _, state in segment["blocks"] if state == 2}
    numbers = {block[0]: number for number, block in enumerate(sorted(device["initial"]["blocks"]))}
    found = []
    for address, size, stream, small, expandable in sorted(device["initial"]["segments"]):
        at, stop = address, address + size
        blocks = []
        inside = sorted(block for block in device["initial"]["blocks"] if address <= block[0] < stop)
        for where, requested, nbytes in (*inside, (stop, 0, 0)):
            if where > at:
                blocks.append(BlockInfo(at, where - at, 0, "free", None))
            if nbytes:
                waits = first.get(where) == "c" or (where not in first and where in last)
                state = "waiting" if waits else "allocated"
                blocks.append(BlockInfo(where, nbytes, requested, state, numbers[where]))
            at = where + nbytes
        found.append(SegmentInfo(address, size, stream, "small" if small else "large", expandable, tuple(blocks)))
    return tuple(found)


def spaces_of(start: Sequence[SegmentInfo], rows: Sequence[Row]) -> dict[tuple[int, str], int]:
    """Return (stream, pool) -> the lowest address that its expandable segment has at the start or is given later.

    Pages belong to the pool of the request that they are mapped for, which is the next one.
    """
    points = [((segment.stream, segment.pool), segment.address) for segment in start if segment.expandable]
    pool = "large"
    for action, address, size, stream in reversed(rows):
        if action in "ao":
            pool = "small" if size <= SMALL_BYTES else "large"
        elif action == "M":
            points.append(((stream, pool), address))
    return dict(sorted(points, key=lambda point: -point[1]))  # of several, the last one counts: the lowest


# --- the replay ---


class RecordedAddresses(Addresses):
    """The recorded addresses of new segments; those of `Addresses` for segments that the record doesn't have."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed: deque[int] = deque()
        self.mapped: deque[int] = deque()

    def segment(self, nbytes: int) -> int:
        return self.fixed.popleft() if self.fixed else super().segment(nbytes)

    def space(self, nbytes: int) -> int:
        return self.mapped.popleft() if self.mapped else super().space(nbytes)


class Replay:
    """A device's history through the allocator model, from the recorded start and with the recorded addresses.

    Beside the addresses of new segments two things are taken from the record, since the model can't know them: when a
    block that other streams used became free, and which unused segments were released. A block whose free is completed
    at once was used on its own stream only; one whose free is completed later waits for a virtual stream of its own,
    -1 less its number.

    Attributes
    ----------
    allocator : CachingAllocator
        The model, after the last event.
    calls : list of tuple
        (method, arguments...) of the model's calls.
    allocations : int
        Number of addresses compared.
    first_difference : int or None
        The first event at which a block's address or the number of reserved bytes isn't the recorded one.
    """

    def __init__(self, history: Mapping[str, Any], number: int = 0) -> None:
        device = history["devices"][number]
        self._rows = rows_of(device)
        self._addresses = RecordedAddresses()
        self.allocator = CachingAllocator(settings_of(history), addresses=self._addresses)
        start = start_of(device)
        self.allocator.restore(start, spaces_of(start, self._rows))
        blocks = [block for segment in start for block in segment.blocks if block.block is not None]
        assert len(blocks) == len(device["initial"]["blocks"]), "a block lies in no segment"
        self._live = {block.address: block.block for block in blocks if block.state == "allocated"}
        self._waiting = {block.address: block.block for block in blocks if block.state == "waiting"}
        self._numbers = len(blocks)
        self._released: list[int] = []  # addresses of the segments or pages released since the last other event
        self.calls: list[tuple[Any, ...]] = []
        self.allocations = 0
        self.first_difference: int | None = None
        reserved = self.allocator.reserved_bytes
        for index, row in enumerate(self._rows):
            reserved += row[2] * ((row[0] in "AM") - (row[0] in "FU"))
            if not self._agrees(index, reserved) and self.first_difference is None:
                self.first_difference = index

    def _call(self, name: str, *arguments: int, **options: bool) -> None:
        self.calls.append((name, *arguments))
        getattr(self.allocator, name)(*arguments, **options)

    def _agrees(self, index: int, reserved: int) -> bool:
        """Apply an event; return whether the model then has its address, and `reserved` bytes reserved."""
        action, address, size, stream = self._rows[index]
        following = self._rows[index + 1][:2] if index + 1 < len(self._rows) else ("", 0)
        new = self._addresses
        if action in "AM":  # for the request that follows
            (new.fixed if action == "A" else new.mapped).append(address)
            return True
        same = True
        if action == "a":
            block, self._numbers = self._numbers, self._numbers + 1
            # After a release the allocator doesn't search its free blocks again.
            grow = bool(self._released and (new.fixed or new.mapped))
            self._call("allocate", block, size, stream, grow=grow)
            self._live[address] = block
            self.allocations += 1
            same = self.allocator.address_of(block) == address
        elif action == "f":
            block = self._live.pop(address)
            if following != ("c", address):
                self._waiting[address] = block
                self._call("record_stream", block, -1 - block)
            self._call("free", block)
        elif action == "c" and address in self._waiting:
            self._call("synchronize", -1 - self._waiting.pop(address))
        elif action in "FU":
            self._released.append(address)
            if following[0] in ("F", "U"):
                return True
            self._release()
        new.fixed.clear()
        new.mapped.clear()
        if action not in "FU":
            self._released.clear()
        return same and self.allocator.reserved_bytes == reserved

    def _release(self) -> None:
        """Release all that is unused, or, if the record keeps some of it, the segments that it names."""
        segments = [segment for segment in self.allocator.snapshot() if not segment.expandable]
        unused = {segment.address for segment in segments if [block.state for block in segment.blocks] == ["free"]}
        if unused <= set(self._released):
            self._call("empty_cache")
        else:
            for address in self._released:
                self._call("release", address)


# --- from a recording ---


def history_from(
    before: Mapping[str, Any], after: Mapping[str, Any], device: int = 0, *, peak_allocated: int
) -> dict[str, Any]:
    """Return one device's history, from what `torch.cuda.memory._snapshot()` gave before recording and after it.

    The peak of allocated bytes isn't in them. Entries that name an allocation ("annotate", from PyTorch 2.15 on) are
    left out.
    """
    rows: list[Row] = []
    for entry in after["device_traces"][device]:
        if any(entry.get("pool_id", ())):
            raise ValueError("the history has private pools (CUDA graphs, MemPool), which aren't modelled")
        if entry["action"] != "annotate":
            address = entry["device_free" if entry["action"] == "oom" else "addr"]
            rows.append((LETTERS[entry["action"]], address, entry["size"], entry["stream"]))
    start, end = _segments(before, device), _segments(after, device)
    blocks = [[at, asked, size] for segment in start for at, size, asked, state in segment["blocks"] if state]
    reserved, requested = [sum(segment["size"] for segment in start)], [sum(asked for _, asked, _ in blocks)]
    for action, _, size, _ in rows:
        reserved.append(reserved[-1] + size * ((action in "AM") - (action in "FU")))
        requested.append(requested[-1] + size * ((action == "a") - (action == "c")))
    settings = after["allocator_settings"]
    found = {
        "recorded_peak_reserved": max(reserved),
        "peak_allocated": peak_allocated,
        "peak_requested": max(requested),
        "initial": {"segments": [list(segment.values())[:5] for segment in start], "blocks": blocks},
        "events": {
            "action": "".join(row[0] for row in rows),
            "address": [row[1] for row in rows],
            "size": [row[2] for row in rows],
            "stream": [row[3] for row in rows],
        },
        "final_segments": end,
    }
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
    return {"allocator_conf": conf, "devices": [found]}


def _segments(snapshot: Mapping[str, Any], device: int) -> list[dict[str, Any]]:
    """Return the device's segments at a snapshot, by address, in the form of `final_segments`."""
    found = [
        {
            "address": segment["address"],
            "size": segment["total_size"],
            "stream": segment["stream"],
            "small": segment["segment_type"] == "small",
            "expandable": segment["is_expandable"],
            "blocks": [
                [block["address"], block["size"], block["requested_size"], STATES.index(block["state"])]
                for block in segment["blocks"]
            ],
        }
        for segment in snapshot["segments"]
        if segment["device"] == device
    ]
    return sorted(found, key=lambda segment: segment["address"])
