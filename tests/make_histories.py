"""Writes the recorded histories of `tests/histories/`: `python tests/make_histories.py`.

They come from a second, independent telling of the allocator's rules: plain lists searched from end to end, and a
driver that puts segments anywhere. It shares no code with the package and has none of its data structures, so that the
model is held against something other than itself.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

MIB = 1 << 20


class Device:
    """Segments as lists of blocks [size, owner or None, requested, waits]; everything that happens is written down."""

    def __init__(self, seed: int, capacity: int, expandable: bool = False) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.expandable = expandable
        self.segments: list[dict[str, Any]] = []  # expandable: one a stream and pool, blocks may be unmapped
        self.waiting: list[int] = []  # freed, but in use on another stream
        self.events: list[tuple[str, int, int, int]] = []
        self.peaks = [0, 0, 0]

    # --- figures ---

    def blocks(self) -> list[list[Any]]:
        return [block for segment in self.segments for block in segment["blocks"] if block[1] != "unmapped"]

    def reserved(self) -> int:
        return sum(block[0] for block in self.blocks())

    def note(self, action: str, address: int, size: int, stream: int) -> None:
        self.events.append((action, address, size, stream))
        used = [block for block in self.blocks() if isinstance(block[1], int)]
        now = (self.reserved(), sum(block[0] for block in used if not block[3]), sum(block[2] for block in used))
        self.peaks = [max(pair) for pair in zip(self.peaks, now, strict=True)]

    # --- what a program does ---

    def allocate(self, owner: int, nbytes: int, stream: int) -> bool:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        found = self.find(size, small, stream) or self.grow(size, small, stream)
        if found is None:
            self.empty_cache()
            found = self.grow(size, small, stream)
        if found is None:
            self.note("o", self.capacity - self.reserved(), size, stream)
            return False
        segment, at = found
        block = segment["blocks"][at]
        rest = block[0] - size
        block[1], block[2] = owner, nbytes
        if rest >= 512 if small or self.expandable else rest > MIB:
            block[0] = size
            segment["blocks"].insert(at + 1, [rest, None, 0, False])
        self.note("a", self.address(segment, at), nbytes, stream)
        return True

    def free(self, owner: int, waits: bool = False) -> None:
        segment, at = self.of(owner)
        block = segment["blocks"][at]
        block[3] = True
        self.note("f", self.address(segment, at), block[2], segment["stream"])
        if waits:
            self.waiting.append(owner)
        else:
            self.complete(owner)

    def complete(self, owner: int) -> None:
        segment, at = self.of(owner)
        address, requested = self.address(segment, at), segment["blocks"][at][2]
        segment["blocks"][at][1:] = [None, 0, False]
        self.merge(segment)
        self.note("c", address, requested, segment["stream"])

    def empty_cache(self) -> None:
        while self.waiting:
            self.complete(self.waiting.pop(0))
        for segment in list(self.segments):
            blocks = segment["blocks"]
            if not self.expandable:
                if len(blocks) == 1 and blocks[0][1] is None:
                    self.segments.remove(segment)
                    self.note("F", segment["address"], blocks[0][0], segment["stream"])
                continue
            page, at = segment["page"], 0
            while at < len(blocks):
                start = self.address(segment, at) - segment["address"]
                first = -(-start // page) * page
                last = (start + blocks[at][0]) // page * page
                if blocks[at][1] is None and first < last:
                    parts = [(first - start, None), (last - first, "unmapped"), (start + blocks[at][0] - last, None)]
                    blocks[at : at + 1] = [[size, owner, 0, False] for size, owner in parts if size]
                    self.note("U", segment["address"] + first, last - first, segment["stream"])
                    at += 2
                at += 1
            self.merge(segment)
            if all(block[1] == "unmapped" for block in blocks):
                self.segments.remove(segment)

    # --- rules ---

    def address(self, segment: dict[str, Any], at: int) -> int:
        return segment["address"] + sum(block[0] for block in segment["blocks"][:at])

    def of(self, owner: int) -> tuple[dict[str, Any], int]:
        return next(
            (segment, at)
            for segment in self.segments
            for at, block in enumerate(segment["blocks"])
            if block[1] == owner and isinstance(block[1], int)
        )

    def find(self, size: int, small: bool, stream: int) -> tuple[dict[str, Any], int] | None:
        fitting = []
        for segment in self.segments:
            if (segment["small"], segment["stream"]) != (small, stream):
                continue
            blocks = segment["blocks"]
            for at, block in enumerate(blocks):
                if block[1] is None and block[0] >= size:
                    behind = at + 1 < len(blocks) and blocks[at + 1][1] == "unmapped"
                    reach = block[0] + (blocks[at + 1][0] if behind else 0)
                    fitting.append((block[0], self.address(segment, at), reach, segment, at))
        fitting.sort(key=lambda one: one[:2])
        if not fitting:
            return None
        chosen = fitting[0]
        if self.expandable:
            for one in fitting[1:]:
                if one[2] >= chosen[2]:
                    break
                chosen = one
        return chosen[3], chosen[4]

    def grow(self, size: int, small: bool, stream: int) -> tuple[dict[str, Any], int] | None:
        if self.expandable:
            return self.map(size, small, stream)
        nbytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved() + nbytes > self.capacity:
            return None
        where = self.place(nbytes)
        segment = {"address": where, "stream": stream, "small": small, "blocks": [[nbytes, None, 0, False]]}
        self.segments.append(segment)
        self.note("A", where, nbytes, stream)
        return segment, 0

    def place(self, nbytes: int) -> int:
        """Anywhere that is free, at a multiple of 2 MiB."""
        while True:
            where = self.random.randrange(1 << 17) * 2 * MIB + (1 << 45)
            taken = [(s["address"], sum(block[0] for block in s["blocks"])) for s in self.segments]
            if all(where + nbytes <= start or start + size <= where for start, size in taken):
                return where

    def map(self, size: int, small: bool, stream: int) -> tuple[dict[str, Any], int] | None:
        """Pages at the lowest address where free and unmapped room in a row suffices."""
        page = 2 * MIB if small else 20 * MIB
        known = [s for s in self.segments if (s["small"], s["stream"]) == (small, stream)]
        if not known:
            room = -(-self.capacity * 9 // 8 // page) * page
            where = (1 << 45) + (2 * stream + small) * (1 << 40)
            known = [{"address": where, "stream": stream, "small": small, "page": page}]
            known[0]["blocks"] = [[room, "unmapped", 0, False]]
            self.segments += known
        segment = known[0]
        blocks = segment["blocks"]
        for at in range(len(blocks)):
            if blocks[at][1] != "unmapped":
                continue
            first = at - 1 if at and blocks[at - 1][1] is None else at
            stop, room = first, 0
            while stop < len(blocks) and blocks[stop][1] in (None, "unmapped") and room < size:
                room += blocks[stop][0]
                stop += 1
            if room >= size:
                return self.map_from(segment, first, size)
        raise AssertionError("the address space is larger than the device")

    def map_from(self, segment: dict[str, Any], first: int, size: int) -> tuple[dict[str, Any], int] | None:
        blocks, page, have, at = segment["blocks"], segment["page"], 0, first
        while have < size:
            if blocks[at][1] == "unmapped":
                pages = -(-min(size - have, blocks[at][0]) // page) * page
                if self.reserved() + pages > self.capacity:
                    self.merge(segment)
                    return None
                where = self.address(segment, at)
                rest = blocks[at][0] - pages
                blocks[at : at + 1] = [[pages, None, 0, False]] + ([[rest, "unmapped", 0, False]] if rest else [])
                self.note("M", where, pages, segment["stream"])
            have += blocks[at][0]
            at += 1
        self.merge(segment)
        return segment, first

    def merge(self, segment: dict[str, Any]) -> None:
        blocks = segment["blocks"]
        for at in range(len(blocks) - 1, 0, -1):
            if blocks[at][1] == blocks[at - 1][1] and blocks[at][1] in (None, "unmapped"):
                blocks[at - 1][0] += blocks.pop(at)[0]

    # --- as a file ---

    def state(self) -> list[dict[str, Any]]:
        found = []
        for segment in self.segments:
            run: dict[str, Any] | None = None
            for at, (size, owner, requested, waits) in enumerate(segment["blocks"]):
                if owner == "unmapped":
                    run = None
                    continue
                if run is None:
                    where = self.address(segment, at)
                    run = {"address": where, "size": 0, "stream": segment["stream"], "small": segment["small"]}
                    run |= {"expandable": self.expandable, "blocks": []}
                    found.append(run)
                state = 0 if owner is None else 2 if waits else 1
                run["blocks"].append([run["address"] + run["size"], size, requested, state])
                run["size"] += size
        return sorted(found, key=lambda segment: segment["address"])


def record(device: Device, steps: int, start_at: int = 0) -> dict[str, Any]:
    """A program of random requests and frees, recorded from its step number `start_at` on."""
    rng = random.Random(1)
    live: list[int] = []
    initial: list[dict[str, Any]] = []
    for step in range(steps):
        if step == start_at:
            initial = device.state()
            device.events.clear()
            device.peaks = [0, 0, 0]
            device.peaks[1:] = [
                sum(block[1] for segment in initial for block in segment["blocks"] if block[3] == 1),
                sum(block[2] for segment in initial for block in segment["blocks"] if block[3]),
            ]
            device.peaks[0] = device.reserved()
        draw = rng.random()
        if draw < 0.5 or not live:
            size = rng.choice((rng.randint(1, 4096), rng.randint(1, 2 * MIB), rng.randint(MIB, 30 * MIB), 12 * MIB))
            if device.allocate(step, size, rng.choice((0, 0, 0, 7))):
                live.append(step)
        elif draw < 0.9:
            device.free(live.pop(rng.randrange(len(live))), waits=rng.random() < 0.1)
        elif draw < 0.97 and device.waiting:
            device.complete(device.waiting.pop(0))
        elif draw > 0.985:
            device.empty_cache()
    segments = [[s[k] for k in ("address", "size", "stream", "small", "expandable")] for s in initial]
    blocks = [[b[0], b[2], b[1]] for s in initial for b in s["blocks"] if b[3]]
    columns = list(zip(*device.events, strict=True))
    return {
        "device": 0,
        "entries": len(device.events),
        "starts_empty": not initial,
        "recorded_peak_reserved": device.peaks[0],
        "peak_allocated": device.peaks[1],
        "peak_requested": device.peaks[2],
        "initial": {"segments": segments, "blocks": sorted(blocks)},
        "events": {"action": "".join(columns[0]), "address": columns[1], "size": columns[2], "stream": columns[3]},
        "final_segments": device.state(),
    }


def histories() -> dict[str, dict[str, Any]]:
    """By name: one that starts full, expandable segments (full, too), and an out-of-memory of either kind."""
    expandable = "expandable_segments:True"
    made = {
        "starts_full": ("", record(Device(1, 10_000 * MIB), 600, start_at=250)),
        "expandable": (expandable, record(Device(2, 10_000 * MIB, True), 400)),
        "expandable_starts_full": (expandable, record(Device(3, 10_000 * MIB, True), 600, start_at=250)),
        "out_of_memory": ("", record(Device(4, 300 * MIB), 500)),
        "expandable_out_of_memory": (expandable, record(Device(5, 300 * MIB, True), 500)),
    }
    return {name: {"allocator_conf": conf, "devices": [device]} for name, (conf, device) in made.items()}


if __name__ == "__main__":
    folder = Path(__file__).parent / "histories"
    folder.mkdir(exist_ok=True)
    for name, history in histories().items():
        text = json.dumps(history, separators=(",", ":")) + "\n"
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
