"""Recorded memory histories as files, and turned into the dict that `torch.cuda.memory._snapshot()` gives.

A file is gzipped JSON. Per device it has `events` in columns (`action`, `address`, `size`, `stream`; an action is one
letter), `final_segments` (as in a snapshot; blocks as [address, size, requested, state]), `initial` (the state before
the first event: segments as [address, size, stream, small, expandable], live blocks as [address, requested, size]) and
the peaks `recorded_peak_reserved`, `peak_allocated`, `peak_requested`. `allocator_conf` has the settings.
`make_histories.py` writes the files beside this module; `$CKPTPLAN_HISTORIES` may name a folder with others.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

ACTIONS = {
    "a": "alloc",
    "f": "free_requested",
    "c": "free_completed",
    "A": "segment_alloc",
    "F": "segment_free",
    "M": "segment_map",
    "U": "segment_unmap",
    "o": "oom",
    "s": "snapshot",
}
STATES = ("inactive", "active_allocated", "active_pending_free")
GENERATED = Path(__file__).parent / "histories"


def load_history(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)  # type: ignore[no-any-return]


def snapshot_from(history: dict[str, Any]) -> dict[str, Any]:
    """The snapshot; for "oom" the column of addresses has what the device had free."""
    traces, segments = [], []
    for number, device in enumerate(history["devices"]):
        columns = device["events"]
        rows = zip(columns["action"], columns["address"], columns["size"], columns["stream"], strict=True)
        traces.append([_entry(*row) for row in rows])
        segments += [_segment(number, segment) for segment in device["final_segments"]]
    conf = history["allocator_conf"] or ""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "expandable_segments": "expandable_segments:True" in conf}
    return {"segments": segments, "device_traces": traces, "allocator_settings": settings}


def _entry(action: str, address: int, size: int, stream: int) -> dict[str, Any]:
    where = "device_free" if action == "o" else "addr"
    return {"action": ACTIONS[action], where: address, "size": size, "stream": stream, "frames": []}


def _segment(device: int, found: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {"address": address, "size": size, "requested_size": requested, "state": STATES[state], "frames": []}
        for address, size, requested, state in found["blocks"]
    ]
    return {
        "device": device,
        "address": found["address"],
        "total_size": found["size"],
        "stream": found["stream"],
        "segment_type": "small" if found["small"] else "large",
        "is_expandable": found["expandable"],
        "blocks": blocks,
    }
