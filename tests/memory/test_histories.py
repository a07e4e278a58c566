"""Recorded histories through the allocator model: every address and every reserved byte as recorded.

Those in `tests/histories/` come from an independent telling of the rules (`make_histories.py`). `$CKPTPLAN_HISTORIES`
may name a folder with histories of real devices, in the same form.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from histories import GENERATED, load_history, snapshot_from
from make_histories import histories

from ckptplan.memory.allocator import Addresses, CachingAllocator
from ckptplan.memory.history.reader import (
    History,
    Replayer,
    events_of,
    laid_out_afresh,
    read_history,
    replay_history,
)

pytestmark = pytest.mark.planning

GIVEN = os.environ.get("CKPTPLAN_HISTORIES")


def of_real_devices() -> list[Any]:
    """(file, number of the device) of each device of each file of the folder."""
    if not GIVEN:
        return [pytest.param(None, 0, marks=pytest.mark.skip(reason="CKPTPLAN_HISTORIES names no folder"))]
    found = [
        pytest.param(path, number, id=f"{path.name.partition('.')[0]}-{number}")
        for path in sorted(Path(GIVEN).glob("*.json.gz"))
        for number in range(len(load_history(path)["devices"]))
    ]
    assert found, f"CKPTPLAN_HISTORIES={GIVEN} has no histories"
    return found


def check_as_recorded(recorded: dict[str, Any], history: History) -> None:
    found = replay_history(history)
    assert found.first_difference is None
    assert found.allocations == recorded["events"]["action"].count("a") > 0
    peaks = recorded["recorded_peak_reserved"], recorded["peak_allocated"], recorded["peak_requested"]
    timeline = found.timeline
    assert (timeline.peak_reserved_bytes, timeline.peak_allocated_bytes, timeline.peak_requested_bytes) == peaks
    assert found.recorded_peak_reserved_bytes == peaks[0]
    assert found.timeline.peak_reserved_bytes == found.recorded_peak_reserved_bytes


def check_start(recorded: dict[str, Any], history: History) -> None:
    """The state before the first entry, which follows from undoing the record, is the one that was."""
    segments = [[s.address, s.size_bytes, s.stream, s.pool == "small", s.expandable] for s in history.start]
    blocks = [
        [b.address, b.requested_bytes, b.size_bytes] for s in history.start for b in s.blocks if b.state != "free"
    ]
    assert segments == sorted(recorded["initial"]["segments"])
    assert blocks == sorted(recorded["initial"]["blocks"])
    assert bool(history.reserved_at_start_bytes) is not recorded["starts_empty"]


@pytest.mark.parametrize(("path", "number"), of_real_devices())
def test_a_history_of_a_real_device_replays_exactly(path: Path, number: int) -> None:
    recorded = load_history(path)
    history = read_history(snapshot_from(recorded), number)
    check_start(recorded["devices"][number], history)
    check_as_recorded(recorded["devices"][number], history)


@pytest.mark.skipif(not GIVEN, reason="CKPTPLAN_HISTORIES names no folder")
def test_falling_addresses_predict_the_recorded_peak_of_a_real_device() -> None:
    """Where the peak depends on the order of segments' addresses, and the record needn't say it."""
    path = Path(GIVEN or "") / "sqattn_partial_releases.json.gz"
    history = read_history(snapshot_from(load_history(path)))
    peaks = {}
    for descending in (True, False):
        replayer = Replayer(CachingAllocator(history.settings, addresses=Addresses(descending)))
        for event in (*laid_out_afresh(history), *events_of(history)):
            replayer.apply(event)
        peaks[descending] = replayer.allocator.peak_reserved_bytes
    assert peaks[True] == history.peak_reserved_bytes
    assert peaks[False] > 1.07 * history.peak_reserved_bytes


@pytest.mark.parametrize("name", sorted(histories()))
def test_a_generated_history_replays_exactly(name: str) -> None:
    recorded = load_history(GENERATED / f"{name}.json.gz")["devices"][0]
    history = read_history(snapshot_from(load_history(GENERATED / f"{name}.json.gz")))
    check_start(recorded, history)
    check_as_recorded(recorded, history)
    actions = set(recorded["events"]["action"])
    assert actions >= {"a", "f", "c"} | ({"M", "U"} if "expandable" in name else {"A", "F"})
    assert ("o" in actions) is ("out_of_memory" in name)
    assert recorded["starts_empty"] is ("full" not in name)
    if "full" in name:  # blocks that wait for other streams at the start, and some that are freed in the record
        assert any(block.state == "waiting" for segment in history.start for block in segment.blocks)
        freed = {address for address, action in zip(*columns(recorded), strict=True) if action == "f"}
        assert freed & {block[0] for block in recorded["initial"]["blocks"]}


def columns(recorded: dict[str, Any]) -> tuple[list[int], str]:
    return recorded["events"]["address"], recorded["events"]["action"]


def test_the_generated_histories_are_those_of_their_script() -> None:
    made = histories()
    assert {path.name for path in GENERATED.iterdir()} == {f"{name}.json.gz" for name in made}
    for name, history in made.items():
        with gzip.open(GENERATED / f"{name}.json.gz") as file:
            assert json.load(file) == json.loads(json.dumps(history))


def test_a_difference_is_found_where_it_is() -> None:
    """A record of a device that put one block elsewhere than the rules say."""
    recorded = load_history(GENERATED / "starts_full.json.gz")
    snapshot = snapshot_from(recorded)
    entries = snapshot["device_traces"][0]
    made = [i for i, entry in enumerate(entries) if entry["action"] == "alloc"]
    # The last allocation that is alive at the end moves up by 512 bytes, where free memory follows it.
    index = made[-1]
    block = next(b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == entries[index]["addr"])
    assert block["state"] == "active_allocated"
    segment = next(s for s in snapshot["segments"] if block in s["blocks"])
    at = segment["blocks"].index(block)
    assert segment["blocks"][at + 1]["state"] == "inactive"
    block["address"] += 512
    segment["blocks"].insert(at, {"address": entries[index]["addr"], "size": 512, "state": "inactive"})
    segment["blocks"][at + 2]["address"] += 512
    segment["blocks"][at + 2]["size"] -= 512
    entries[index]["addr"] += 512
    found = replay_history(read_history(snapshot))
    assert found.first_difference == index
    assert found.timeline.peak_reserved_bytes == found.recorded_peak_reserved_bytes
