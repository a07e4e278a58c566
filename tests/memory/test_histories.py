"""Recorded histories through the allocator model: every address and every reserved byte as recorded.

Those in `tests/histories/` come from an independent telling of the rules (`make_histories.py`). `$CKPTPLAN_HISTORIES`
may name a folder with histories of real devices, in the same form.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from histories import GENERATED, LETTERS, STATES, Replay, history_from, load_history, rows_of, settings_of, start_of
from make_histories import histories

from ckptplan.memory.allocator import Addresses, CachingAllocator, SegmentInfo

pytestmark = pytest.mark.planning

M = 1 << 20
GIVEN = os.environ.get("CKPTPLAN_HISTORIES")
KINDS = {"free": 0, "allocated": 1, "waiting": 2}


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


def as_recorded(segments: Sequence[SegmentInfo]) -> list[dict[str, Any]]:
    """The state in the form of `final_segments`."""
    return [
        {"address": s.address, "size": s.size_bytes, "stream": s.stream, "small": s.pool == "small"}
        | {"expandable": s.expandable}
        | {"blocks": [[b.address, b.size_bytes, b.requested_bytes, KINDS[b.state]] for b in s.blocks]}
        for s in segments
    ]


def check_as_recorded(history: dict[str, Any], number: int) -> None:
    """Every address, the reserved bytes after every event, the peaks, and every block that is left."""
    recorded = history["devices"][number]
    found = Replay(history, number)
    assert found.first_difference is None
    assert found.allocations == recorded["events"]["action"].count("a") > 0
    model = found.allocator
    peaks = recorded["recorded_peak_reserved"], recorded["peak_allocated"], recorded["peak_requested"]
    assert (model.peak_reserved_bytes, model.peak_allocated_bytes, model.peak_requested_bytes) == peaks
    assert as_recorded(model.snapshot()) == sorted(recorded["final_segments"], key=lambda segment: segment["address"])


@pytest.mark.parametrize(("path", "number"), of_real_devices())
def test_a_history_of_a_real_device_replays_exactly(path: Path, number: int) -> None:
    check_as_recorded(load_history(path), number)


@pytest.mark.skipif(not GIVEN, reason="CKPTPLAN_HISTORIES names no folder")
def test_falling_addresses_predict_the_recorded_peak_of_a_real_device() -> None:
    """Where the peak depends on the order of segments' addresses, and the record needn't say it."""
    history = load_history(Path(GIVEN or "") / "sqattn_partial_releases.json.gz")
    peaks = {}
    for descending in (True, False):
        allocator = CachingAllocator(settings_of(history), addresses=Addresses(descending))
        for segment in start_of(history["devices"][0]):
            for block in segment.blocks:
                if block.block is not None:
                    assert block.state == "allocated"
                    allocator.allocate(block.block, block.requested_bytes, segment.stream)
        for method, *arguments in Replay(history).calls:
            getattr(allocator, method)(*arguments)
        peaks[descending] = allocator.peak_reserved_bytes
    recorded = history["devices"][0]["recorded_peak_reserved"]
    assert peaks[True] == recorded
    assert peaks[False] > 1.07 * recorded


@pytest.mark.parametrize("name", sorted(histories()))
def test_a_generated_history_replays_exactly(name: str) -> None:
    history = load_history(GENERATED / f"{name}.json.gz")
    recorded = history["devices"][0]
    check_as_recorded(history, 0)
    actions = set(recorded["events"]["action"])
    assert actions >= {"a", "f", "c"} | ({"M", "U"} if "expandable" in name else {"A", "F"})
    assert ("o" in actions) is ("out_of_memory" in name)
    assert bool(recorded["initial"]["segments"]) is ("full" in name)
    if "full" in name:  # blocks that wait for other streams at the start, and some that are freed in the record
        assert any(block.state == "waiting" for segment in start_of(recorded) for block in segment.blocks)
        freed = {address for action, address, _, _ in rows_of(recorded) if action == "f"}
        assert freed & {block[0] for block in recorded["initial"]["blocks"]}


def test_the_generated_histories_are_those_of_their_script() -> None:
    made = histories()
    assert {path.name for path in GENERATED.iterdir()} == {f"{name}.json.gz" for name in made}
    for name, history in made.items():
        with gzip.open(GENERATED / f"{name}.json.gz") as file:
            assert json.load(file) == json.loads(json.dumps(history))


def test_a_difference_is_found_where_it_is() -> None:
    """A record of a device that put one block elsewhere than the rules say."""
    history = load_history(GENERATED / "starts_full.json.gz")
    recorded = history["devices"][0]
    events = recorded["events"]
    # The last allocation moves up by 512 bytes; it is alive at the end.
    index = events["action"].rindex("a")
    assert events["address"][index] not in events["address"][index + 1 :]
    events["address"][index] += 512
    found = Replay(history)
    assert found.first_difference == index
    assert found.allocator.peak_reserved_bytes == recorded["recorded_peak_reserved"]
    # Once more: a segment of other size than the rules say.
    history = load_history(GENERATED / "starts_full.json.gz")
    events = history["devices"][0]["events"]
    events["size"][events["action"].index("A")] += 2 * M
    assert Replay(history).first_difference == events["action"].index("A") + 1


# --- by hand ---

A, C = 0x7F0000000000, 0x7F0008000000


def by_hand(conf: str, events: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    """A history from events (letter, address, size) of one stream."""
    action, address, size = zip(*events, strict=True)
    columns = {"action": "".join(action), "address": address, "size": size, "stream": (0,) * len(events)}
    initial: dict[str, Any] = {"segments": (), "blocks": ()}
    return {"allocator_conf": conf, "devices": [{"events": columns, "initial": initial, "final_segments": []}]}


def test_a_release_of_some_segments() -> None:
    """26 MiB don't fit beside 50 and 24 in 80: the 50, oversize, go; the free 24 stay."""
    events = [("A", A, 50 * M), ("a", A, 50 * M), ("A", C, 24 * M), ("a", C, 24 * M)]
    events += [("f", A, 50 * M), ("c", A, 50 * M), ("f", C, 24 * M), ("c", C, 24 * M)]
    events += [("F", A, 50 * M), ("A", A, 26 * M), ("a", A, 26 * M)]
    found = Replay(by_hand("max_split_size_mb:20", events))
    assert found.first_difference is None
    assert ("release", A) in found.calls
    assert (found.allocator.peak_reserved_bytes, found.allocator.reserved_bytes) == (74 * M, 50 * M)


# --- from a recording ---


def snapshot_of(conf: str, segments: Sequence[dict[str, Any]], trace: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As `torch.cuda.memory._snapshot()` gives it, of device 1."""
    made: list[dict[str, Any]] = [
        {"device": 0, "address": 0, "total_size": M, "stream": 0, "segment_type": "small", "is_expandable": False}
        | {"blocks": []}
    ]
    for segment in segments:
        blocks = [
            {"address": at, "size": size, "requested_size": asked, "state": STATES[state], "frames": []}
            for at, size, asked, state in segment["blocks"]
        ]
        kind = "small" if segment["small"] else "large"
        made.append(
            {"device": 1, "address": segment["address"], "total_size": segment["size"], "stream": segment["stream"]}
            | {"segment_type": kind, "is_expandable": segment["expandable"], "blocks": blocks}
        )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "expandable_segments": "expandable_segments:True" in conf}
    return {"segments": made, "device_traces": [[], list(trace)], "allocator_settings": settings}


@pytest.mark.parametrize("name", sorted(histories()))
def test_what_a_device_recorded_becomes_a_history(name: str) -> None:
    history = load_history(GENERATED / f"{name}.json.gz")
    recorded = history["devices"][0]
    actions = {letter: action for action, letter in LETTERS.items()}
    trace = [
        {"action": actions[letter], "device_free" if letter == "o" else "addr": address, "size": size}
        | {"stream": stream, "frames": [], "pool_id": (0, 0)}
        for letter, address, size, stream in rows_of(recorded)
    ]
    conf = history["allocator_conf"]
    before = snapshot_of(conf, as_recorded(start_of(recorded))[::-1], [])
    named = {"action": "annotate", "addr": 0, "size": 0, "stream": 0, "user_metadata": "weights"}
    after = snapshot_of(conf, recorded["final_segments"], [*trace, named])
    made = history_from(before, after, 1, peak_allocated=recorded["peak_allocated"])
    assert made["allocator_conf"] == conf
    (device,) = made["devices"]
    assert device == {key: recorded[key] for key in device}
    assert recorded.keys() - device.keys() == {"device", "entries", "starts_empty"}
    trace[-1]["pool_id"] = (0, 1)
    with pytest.raises(ValueError, match="private pools"):
        history_from(before, snapshot_of(conf, [], trace), 1, peak_allocated=0)
