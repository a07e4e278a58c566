"""Memory snapshots: read from files of strangers, undone, replayed, summed up and shown."""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, assert_clean_error
from counting import calls_in
from histories import GENERATED, load_history, snapshot_from
from rich.console import Console

from ckptplan import AllocatorSettings, InvalidInputError
from ckptplan.cli.snapshot import snapshot_tables
from ckptplan.memory.allocator import BlockInfo, SegmentInfo
from ckptplan.memory.history.plain_pickle import _PlainUnpickler, load_plain
from ckptplan.memory.history.reader import (
    TraceEvent,
    events_of,
    load_snapshot,
    read_history,
    replay_history,
    settings_from_snapshot,
)
from ckptplan.memory.history.summary import (
    CodeLine,
    DeviceSummary,
    SettingsTried,
    Shortage,
    State,
    _advice,
    summarize,
    where,
)

pytestmark = pytest.mark.planning

M = 1 << 20


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": [], "time_us": 0}


def snapshot_of(
    entries: list[dict[str, Any]], *final: tuple[int, int, list[tuple[int, int]]], conf: str = ""
) -> dict[str, Any]:
    """`final`: address and size of each segment at the snapshot, and its live blocks as (address, requested bytes)."""
    segments = []
    for address, size, live in final:
        blocks, at = [], address
        for where_, requested in live:
            if where_ > at:
                blocks.append({"address": at, "size": where_ - at, "requested_size": 0, "state": "inactive"})
            nbytes = -(-requested // 512) * 512
            nbytes = nbytes if address + size - where_ - nbytes > M else address + size - where_
            blocks.append({"address": where_, "size": nbytes, "requested_size": requested, "state": "active_allocated"})
            at = where_ + nbytes
        if at < address + size:
            blocks.append({"address": at, "size": address + size - at, "requested_size": 0, "state": "inactive"})
        kind = "small" if size == 2 * M else "large"
        segments.append(
            {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": kind, "blocks": blocks}
            | {"is_expandable": "expandable" in conf}
        )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "expandable_segments": "expandable_segments:True" in conf}
    return {"segments": segments, "device_traces": [entries], "allocator_settings": settings}


A, B, C = 0x7F0000000000, 0x7F0002000000, 0x7F0004000000

# 12 MiB, used by another stream too, and 30 MiB; the first is freed, waits, is done before the next request; the cache
# is emptied in between.
HISTORY = [
    entry("segment_alloc", A, 12 * M),
    entry("alloc", A, 12 * M - 100),
    entry("segment_alloc", B, 30 * M),
    entry("alloc", B, 30 * M, stream=0),
    entry("free_requested", A, 12 * M - 100),
    entry("snapshot", 0, 0),
    entry("segment_alloc", C, 12 * M),
    entry("alloc", C, 12 * M),
    entry("free_completed", A, 12 * M - 100),
    entry("alloc", A, 12 * M),
    entry("free_requested", B, 30 * M),
    entry("free_completed", B, 30 * M),
    entry("segment_free", B, 30 * M),
]


AFTER_HISTORY = ((A, 12 * M, [(A, 12 * M)]), (C, 12 * M, [(C, 12 * M)]))


def test_a_recorded_history_as_events() -> None:
    snapshot = snapshot_of(HISTORY, *AFTER_HISTORY)
    assert events_of(read_history(snapshot)) == [
        TraceEvent("allocate", 1, 0, 12 * M - 100),
        TraceEvent("allocate", 3, 1, 30 * M),
        TraceEvent("record_stream", 4, 0, stream=-1),
        TraceEvent("free", 4, 0),
        TraceEvent("allocate", 7, 2, 12 * M),
        TraceEvent("synchronize", 8, stream=-1),
        TraceEvent("allocate", 9, 3, 12 * M),
        TraceEvent("free", 10, 1),
        TraceEvent("empty_cache", 12),
    ]
    history = read_history(snapshot)
    found = replay_history(history)
    recorded = [12, 12, 42, 42, 42, 42, 54, 54, 54, 54, 54, 54, 24]
    assert history.reserved_bytes.tolist() == [size * M for size in recorded]
    assert found.timeline.reserved_bytes.tolist() == [size * M for size in (12, 42, 42, 42, 54, 54, 54, 54, 24)]
    assert found.recorded_peak_reserved_bytes == found.timeline.peak_reserved_bytes == 54 * M
    assert (found.allocations, found.first_difference) == (4, None)


def test_a_release_of_some_segments_is_the_record_s_or_the_model_s() -> None:
    # 26 MiB don't fit beside 50 + 24 in 80: the 50, oversize, go; the free 24 stay.
    entries = [
        entry("segment_alloc", A, 50 * M),
        entry("alloc", A, 50 * M),
        entry("segment_alloc", C, 24 * M),
        entry("alloc", C, 24 * M),
        *(entry(action, A, 50 * M) for action in ("free_requested", "free_completed")),
        *(entry(action, C, 24 * M) for action in ("free_requested", "free_completed")),
        entry("segment_free", A, 50 * M),
        entry("segment_alloc", A, 26 * M),
        entry("alloc", A, 26 * M),
    ]
    snapshot = snapshot_of(entries, (A, 26 * M, [(A, 26 * M)]), (C, 24 * M, []), conf="max_split_size_mb:20")
    actions = [event.action for event in events_of(read_history(snapshot))]
    assert actions == ["allocate", "allocate", "free", "free", "make_room", "allocate"]
    found = replay_history(read_history(snapshot))  # the one that the record names goes
    assert found.timeline.reserved_bytes.tolist() == [size * M for size in (50, 74, 74, 74, 24, 50)]
    assert found.first_difference is None
    found = replay_history(read_history(snapshot), capacity_bytes=80 * M)  # goes with the next request
    assert found.timeline.reserved_bytes.tolist() == [size * M for size in (50, 74, 74, 74, 74, 50)]
    assert found.timeline.peak_reserved_bytes == found.recorded_peak_reserved_bytes


def test_histories_that_cannot_be_replayed() -> None:
    alloc = [entry("segment_alloc", A, 12 * M), entry("alloc", A, 12 * M)]
    live = (A, 12 * M, [(A, 12 * M)])
    for entries, final, message in (
        (
            alloc,
            (A, 12 * M, []),
            r"entry 1 \(alloc at address \d+\) contradicts the entries after it; entries are missing",
        ),
        ([*alloc, entry("free_requested", A, 12 * M)], live, r"entry 2 \(free_requested"),
        ([*alloc, entry("segment_free", A, 12 * M)], live, r"entry 2 \(segment_free"),
        ([entry("segment_map", B, 20 * M)], live, r"entry 0 \(segment_map"),
        ([entry("free_requested", B, 5), entry("free_completed", B, 5)], live, "a block lies in no segment"),
        ([entry("free_requested", A + 512, 5), entry("free_completed", A + 512, 5)], live, "blocks overlap"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            read_history(snapshot_of(entries, final))
    private = snapshot_of(alloc, live)
    private["segments"][0]["segment_pool_id"] = (1, 0)
    with pytest.raises(InvalidInputError, match="private pools"):
        events_of(read_history(private))
    with pytest.raises(InvalidInputError, match="no device 3"):
        read_history(snapshot_of(alloc, live), device=3)


def test_settings_of_a_snapshot() -> None:
    assert settings_from_snapshot(snapshot_of([], conf="max_split_size_mb:64")).max_split_size_bytes == 64 * M
    assert settings_from_snapshot({"allocator_settings": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}) == (
        AllocatorSettings(expandable_segments=True)
    )
    changed = snapshot_of([])
    changed["allocator_settings"]["expandable_segments"] = True
    with pytest.raises(InvalidInputError, match="pass settings="):
        settings_from_snapshot(changed)


# --- the state before the first entry ---


def test_a_start_is_what_undoing_leaves() -> None:
    """By hand: three blocks from before the record in two segments; one lives on, two are freed, one segment goes."""
    entries = [
        entry("free_requested", A + 6 * M, 5 * M - 100),
        entry("alloc", A + 15 * M, 3 * M),  # in front of it 4 MiB stay free
        entry("free_completed", A + 6 * M, 5 * M - 100),
        entry("free_requested", B, 29 * M),
        entry("free_completed", B, 29 * M),
        entry("segment_free", B, 30 * M),
    ]
    history = read_history(snapshot_of(entries, (A, 20 * M, [(A, 6 * M), (A + 15 * M, 3 * M)])))
    assert history.start == (
        SegmentInfo(
            A, 20 * M, 0, "large", False,
            (
                BlockInfo(A, 6 * M, 6 * M, "allocated", 0),
                BlockInfo(A + 6 * M, 5 * M, 5 * M - 100, "allocated", 1),  # rounded to 512
                BlockInfo(A + 11 * M, 9 * M, 0, "free", None),
            ),
        ),
        # The MiB behind it is too small to be split off, so it was the block's.
        SegmentInfo(B, 30 * M, 0, "large", False, (BlockInfo(B, 30 * M, 29 * M, "allocated", 2),)),
    )  # fmt: skip
    assert history.reserved_bytes.tolist() == [50 * M] * 5 + [20 * M]
    assert (history.reserved_at_start_bytes, history.peak_reserved_bytes) == (50 * M, 50 * M)
    # The first event finds the place at A + 15 MiB taken by nothing, and 9 MiB free at A + 11 MiB: the model differs.
    assert replay_history(history).first_difference == 1


def test_what_shows_the_size_of_a_block_from_before_the_record() -> None:
    nbytes = 5 * M - 512
    freed = [entry("free_requested", A, nbytes), entry("free_completed", A, nbytes)]
    # 512 bytes were left unsplit, as the block behind them shows.
    snapshot = snapshot_of([entry("alloc", A + 5 * M, 3 * M), *freed], (A, 20 * M, [(A + 5 * M, 3 * M)]))
    assert [b.size_bytes for b in read_history(snapshot).start[0].blocks] == [5 * M, 15 * M]
    # With a limit on splits the whole segment is one block.
    freed = [entry("free_requested", A, 25 * M), entry("free_completed", A, 25 * M)]
    snapshot = snapshot_of(freed, (A, 40 * M, []), conf="max_split_size_mb:20")
    assert [b.size_bytes for b in read_history(snapshot).start[0].blocks] == [40 * M]


def test_a_record_that_begins_in_a_free() -> None:
    """A ring buffer may drop the first half of it: the block waits when the record starts, for a stream unknown."""
    entries = [entry("free_completed", A, 12 * M), entry("alloc", A, 12 * M)]
    snapshot = snapshot_of(entries, (A, 12 * M, [(A, 12 * M)]))
    history = read_history(snapshot)
    assert [block.state for block in history.start[0].blocks] == ["waiting"]
    assert replay_history(read_history(snapshot)).first_difference is None


def test_an_expandable_segment_begins_where_the_record_maps_its_lowest_page() -> None:
    """At the start its first page is unmapped; the lowest room is taken, so it comes back before the fourth does."""
    entries = [entry("segment_map", A, 20 * M), entry("alloc", A, 15 * M)]
    final = (A, 60 * M, [(A, 15 * M), (A + 20 * M, 40 * M)])
    snapshot = snapshot_of(entries, final, conf="expandable_segments:True")
    history = read_history(snapshot)
    assert [(segment.address, segment.size_bytes) for segment in history.start] == [(A + 20 * M, 40 * M)]
    assert history.spaces == {(0, "large"): A}
    assert replay_history(read_history(snapshot)).first_difference is None


def test_annotations_of_allocations_are_no_events() -> None:
    """PyTorch 2.15 records them as entries of their own."""
    snapshot = snapshot_of(HISTORY, *AFTER_HISTORY)
    plain = events_of(read_history(snapshot))
    snapshot["device_traces"][0].insert(4, entry("annotate", A, 0) | {"user_metadata": "weights"})
    assert events_of(read_history(snapshot)) == plain


def test_older_formats() -> None:
    """No devices, pools, addresses of blocks or settings; the other name of a block that waits."""
    entries = [entry("segment_alloc", A, 20 * M), entry("alloc", A, 5 * M), entry("alloc", A + 5 * M, 6 * M)]
    entries.append(entry("free_requested", A, 5 * M))
    snapshot = snapshot_of(entries, (A, 20 * M, [(A, 5 * M), (A + 5 * M, 6 * M)]))
    snapshot["segments"][0]["blocks"][0]["state"] = "active_awaiting_free"
    new = replay_history(read_history(snapshot))
    for block in snapshot["segments"][0]["blocks"]:
        del block["address"]
    for name in ("device", "is_expandable"):
        del snapshot["segments"][0][name]
    del snapshot["allocator_settings"]
    old = replay_history(read_history(snapshot))
    assert new.first_difference is old.first_difference is None
    assert old.timeline.reserved_bytes.tolist() == new.timeline.reserved_bytes.tolist() == [20 * M] * 4


# --- files ---


def test_snapshot_files_hold_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    plain = snapshot_of(HISTORY, *AFTER_HISTORY)
    for entry_ in plain["device_traces"][0]:
        entry_["pool_id"] = (0, 0)
    for protocol in (2, 5):
        path.write_bytes(pickle.dumps(plain, protocol))
        assert load_snapshot(path) == plain
    whole = pickle.dumps(plain)
    text = b"\x8d" + struct.pack("<Q", 1 << 60)
    deep = b"\x80\x04}" + b")" + b"\x85" * 1000 + b"K\x01s."
    for data, message in (
        (pickle.dumps({"segments": Path("x"), "device_traces": []}), "instruction STACK_GLOBAL"),
        (pickle.dumps({"segments": Path("x"), "device_traces": []}, 2), "instruction GLOBAL"),
        (b"not a pickle", "instruction INST|no pickle|read"),
        (b"", "is empty"),
        (pickle.dumps({"segments": []}), "must be a dict with 'segments'"),
        (pickle.dumps(plain["segments"]), "memory_snapshot\\(\\), without history"),
        (whole[:-50], "cut off"),
        (b"\x80\x04" + text + b".", "expected 1152921504606846976 bytes .* only 1 remain"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "place 4294967295 of the memo"),
        (deep, "the tuple at byte 4 holds other things"),
        (b"\x80\x02\x8b\x40\x00\x00\x00" + b"\x01" * 64 + b".", "has 505 bits, the limit is 128"),
        (b"\x80\x02}]K\x01s.", "unhashable"),
        (b"\xff", r"position 0, opcode .*xff.* unknown"),
    ):
        path.write_bytes(data)
        with pytest.raises(InvalidInputError, match=message):
            load_snapshot(path)
    with pytest.raises(InvalidInputError, match="can't be read"):
        load_snapshot(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib\.[\w.]*Path"):  # a second lock
        _PlainUnpickler(io.BytesIO(pickle.dumps(Path("x")))).load()


def test_no_more_is_read_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(list(range(1000))))
    assert load_plain(path) == list(range(1000))
    monkeypatch.setattr("ckptplan.memory.history.plain_pickle.MOST_OBJECTS", 500)
    with pytest.raises(InvalidInputError, match="more than 500 objects; record with max_entries"):
        load_plain(path)
    monkeypatch.setattr("ckptplan.memory.history.plain_pickle.MOST_FILE_BYTES", 1000)
    with pytest.raises(InvalidInputError, match=r"the limit is 1000 B; record with max_entries"):
        load_plain(path)
    # A thousand devices that share one list are a small file.
    monkeypatch.undo()
    monkeypatch.setattr("ckptplan.memory.history.reader._MOST_ENTRIES", 50_000)
    shared = [entry("snapshot", 0, 0)] * 100
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [shared] * 1000}))
    with pytest.raises(InvalidInputError, match="100000 entries and 0 blocks, the limit is 50000 together"):
        load_snapshot(path)
    path.write_bytes(pickle.dumps({"segments": [{"device": 10**9}], "device_traces": []}))
    with pytest.raises(InvalidInputError, match="names 1000000001 devices; the limit is 1024"):
        load_snapshot(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": "defragment"}, "entry 1 has action 'defragment'; known: segment_alloc"),
        ({"addr": -1}, "entry 1 has addr=-1; it must be a whole number"),
        ({"size": "much" * 100}, "size='muchmuch"),
        ({"stream": 1.5}, "stream=1.5"),
    ],
)
def test_entries_that_no_recording_makes(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    snapshot = snapshot_of([dict(one) for one in HISTORY], *AFTER_HISTORY)
    snapshot["device_traces"][0][1].update(change)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(InvalidInputError, match=f"snapshot.pickle is no memory snapshot: .*{message}") as caught:
        load_snapshot(path)
    assert len(str(caught.value)) < 400


# --- what it says ---


def frame(file: str, line: int, name: str = "step") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


TORCH = frame("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125, "forward")
WINDOWS = frame(r"C:\work\a\b\train.py", 3, "main")
LOADS, STEPS, PADS = (frame("/home/me/work/train.py", line, "main") for line in (10, 20, 30))


def entry_at(place: dict[str, Any], *args: Any) -> dict[str, Any]:
    return {**entry(*args), "frames": [TORCH, place, frame("/home/me/work/run.py", 1, "<module>")]}


# 5, 6 and 4 MiB in one segment, the middle one freed; 30 MiB made for PADS and freed; then 40 MiB.
WASTEFUL = [
    entry_at(LOADS, "segment_alloc", A, 20 * M),
    entry_at(LOADS, "alloc", A, 5 * M),
    entry_at(PADS, "alloc", A + 5 * M, 6 * M),
    entry_at(STEPS, "alloc", A + 11 * M, 4 * M),
    entry_at(PADS, "segment_alloc", B, 30 * M),
    entry_at(PADS, "alloc", B, 30 * M),
    entry("free_requested", B, 30 * M),
    entry("free_completed", B, 30 * M),
    entry("free_requested", A + 5 * M, 6 * M),
    entry("free_completed", A + 5 * M, 6 * M),
    entry_at(STEPS, "segment_alloc", C, 40 * M),
    entry_at(STEPS, "alloc", C, 40 * M - 200),
]
AFTER_WASTEFUL = (
    (A, 20 * M, [(A, 5 * M), (A + 11 * M, 4 * M)]),
    (B, 30 * M, []),
    (C, 40 * M, [(C, 40 * M - 200)]),
)


def test_whose_the_fragments_are() -> None:
    (found,) = summarize(snapshot_of(WASTEFUL, *AFTER_WASTEFUL))
    assert (found.device, found.settings, found.entries, found.reserved_at_start_bytes) == (0, "", 12, 0)
    # 5 + 6 + 4 + 30 and 5 + 4 + 40 MiB - 200.
    peaks = found.reserved_peak_bytes, found.allocated_peak_bytes, found.requested_peak_bytes
    assert peaks == (90 * M, 49 * M, 49 * M - 200)
    assert (found.allocations, found.exact, found.first_difference) == (5, True, None)
    state = found.at_peak
    assert (state.entry, state.reserved_bytes, state.requested_bytes) == (11, 90 * M, 49 * M - 200)
    # Between LOADS' 5 and STEPS' 4 are 6 MiB, behind these 5; PADS' 30 are unused.
    assert (state.rounding_bytes, state.waiting_bytes) == (200, 0)
    assert (state.fragment_bytes, state.unused_bytes) == (11 * M, 30 * M)
    figures = {h.where: (h.blocks, h.allocated_bytes, h.fragment_bytes, h.unused_bytes) for h in state.holders}
    assert figures == {
        "/home/me/work/train.py:30 main": (0, 0, 0, 30 * M),
        "/home/me/work/train.py:20 main": (2, 44 * M, 8 * M, 0),
        "/home/me/work/train.py:10 main": (1, 5 * M, 3 * M, 0),
    }
    assert [h.where[-7:] for h in state.holders] == ["30 main", "20 main", "10 main"]


def test_what_other_settings_would_have_reserved() -> None:
    """By hand: expandable, 15 MiB in a page of 20, 30 with two more, freed, and 40 in the 45 then free: 60 MiB."""
    (found,) = summarize(snapshot_of(WASTEFUL, *AFTER_WASTEFUL))
    peaks = {a.change: a.reserved_peak_bytes for a in found.alternatives}
    assert peaks[""] == 90 * M
    assert peaks["expandable_segments:True"] == 60 * M
    # 6, 6 and 4 in 20; 32; 48 doesn't fit these.
    assert peaks["roundup_power2_divisions:2"] == 100 * M
    # From 32 MiB on a block isn't split: nothing changes. At 64 neither.
    assert peaks["max_split_size_mb:32"] == peaks["max_split_size_mb:64"] == 90 * M
    # Collected above 0.6 of 90 = 54 MiB; there are 50 when the 40 are wanted.
    assert peaks["garbage_collection_threshold:0.6"] == 90 * M
    assert "roundup_power2_divisions:1" not in peaks  # as it is
    checked = {a.change for a in found.alternatives if a.checked}
    assert checked == {"", "expandable_segments:True"}
    assert {a.change: a.limit_bytes for a in found.alternatives if a.limit_bytes} == {
        f"garbage_collection_threshold:{threshold}": 90 * M for threshold in (0.6, 0.8, 0.9)
    }
    assert found.advice is not None
    assert (found.advice.conf, found.advice.reserved_peak_bytes) == ("expandable_segments:True", 60 * M)
    assert found.advice.fits_failed_requests is None

    # Within 80 MiB the 30 are given back for the 40; above 0.6 of 80 they are collected.
    (limited,) = summarize(snapshot_of(WASTEFUL, *AFTER_WASTEFUL), limit_bytes=80 * M)
    peaks = {a.change: a.reserved_peak_bytes for a in limited.alternatives}
    assert (peaks[""], peaks["garbage_collection_threshold:0.6"]) == (60 * M, 60 * M)
    assert limited.advice is None
    (limited,) = summarize(snapshot_of(WASTEFUL, *AFTER_WASTEFUL), limit_bytes=30 * M)
    assert {a.reserved_peak_bytes for a in limited.alternatives} == {None}
    assert limited.advice is None


# 5 MiB in 20; 22, freed, then 16 of them; 18 fit neither beside the 5 nor behind the 16.
FAILS = [
    entry("segment_alloc", A, 20 * M),
    entry("alloc", A, 5 * M),
    entry("segment_alloc", B, 22 * M),
    entry("alloc", B, 22 * M),
    entry("free_requested", B, 22 * M),
    entry("free_completed", B, 22 * M),
    entry("alloc", B, 16 * M),
    {"action": "oom", "size": 18 * M, "stream": 0, "device_free": 10 * M, "frames": []},
]


def test_a_request_that_failed_and_what_would_have_held_it() -> None:
    snapshot = snapshot_of(FAILS, (A, 20 * M, [(A, 5 * M)]), (B, 22 * M, [(B, 16 * M)]))
    (found,) = summarize(snapshot)
    (shortage,) = found.shortages
    assert (shortage.entry, shortage.requested_bytes, shortage.device_free_bytes) == (7, 18 * M, 10 * M)
    assert shortage.reserved_bytes == 42 * M
    # Expandable: 5 and 22 in 40 MiB; then 5, 16 and 19 free ones.
    fits = {a.change: a.fits_failed_requests for a in found.alternatives}
    assert fits["expandable_segments:True"] is True
    assert fits[""] is False
    assert fits["max_split_size_mb:512"] is False
    # Had the device had 18 MiB more, it would have fit as it was, which shows that the limit counts.
    snapshot["device_traces"][0][-1]["device_free"] = 18 * M
    (found,) = summarize(snapshot)
    assert found.alternatives[0].fits_failed_requests is True


def test_of_equally_good_settings_a_checked_one_is_advised() -> None:
    recorded = SettingsTried("", "", 1000 * M, None, None, True)
    modelled = SettingsTried("max_split_size_mb:32", "max_split_size_mb:32", 600 * M, None, None, False)
    checked = SettingsTried("expandable_segments:True", "expandable_segments:True", 606 * M, None, None, True)
    failing = SettingsTried("roundup_power2_divisions:2", "roundup_power2_divisions:2", None, None, None, False)
    assert _advice((recorded, modelled, checked, failing)) is checked
    assert _advice((recorded, modelled, replace(modelled, reserved_peak_bytes=601 * M))) is modelled
    assert _advice((recorded, modelled, replace(checked, reserved_peak_bytes=607 * M), failing)) is modelled
    assert _advice((recorded, replace(modelled, reserved_peak_bytes=991 * M))) is None
    assert _advice((recorded, failing)) is None
    assert _advice((replace(recorded, reserved_peak_bytes=None), modelled)) is None


def test_without_a_history_the_present_state_is_told() -> None:
    snapshot = snapshot_of([], *AFTER_WASTEFUL)
    snapshot["segments"][0]["blocks"][0]["frames"] = [LOADS]
    snapshot["segments"][1]["frames"] = [PADS]
    snapshot["segments"][2]["blocks"][0]["frames"] = [WINDOWS]
    (found,) = summarize(snapshot)
    assert (found.reserved_peak_bytes, found.allocated_peak_bytes, found.requested_peak_bytes) == (
        90 * M, 49 * M, 49 * M - 200,
    )  # fmt: skip
    assert (found.entries, found.exact, found.alternatives, found.at_peak.entry) == (0, None, (), None)
    assert "no history was recorded" in found.notes[0]
    assert "_record_memory_history() before the model is built" in found.notes[0]
    held = {h.where: (h.allocated_bytes, h.fragment_bytes, h.unused_bytes) for h in found.at_peak.holders}
    assert held["/home/me/work/train.py:10 main"] == (5 * M, 3 * M, 0)
    assert held["/home/me/work/train.py:30 main"] == (0, 0, 30 * M)
    assert held["(no stack recorded)"] == (4 * M, 8 * M, 0)
    shown = io.StringIO()
    Console(file=shown, width=140).print(snapshot_tables(found))
    for text in ("reserved at the snapshot", "a/b/train.py:3 main", "work/train.py:10 main", "note: no history"):
        assert text in shown.getvalue()


def test_what_cannot_be_replayed_still_has_its_recorded_figures() -> None:
    private = snapshot_of([{**one, "pool_id": (0, 1)} for one in WASTEFUL], *AFTER_WASTEFUL)
    (found,) = summarize(private)
    assert (found.reserved_peak_bytes, found.requested_peak_bytes) == (90 * M, 49 * M - 200)
    assert (found.allocated_peak_bytes, found.exact, found.alternatives) == (None, None, ())
    assert "private pools" in found.notes[0]
    other = snapshot_of(WASTEFUL, *AFTER_WASTEFUL, conf="backend:cudaMallocAsync")
    (found,) = summarize(other)
    assert found.reserved_peak_bytes == 90 * M
    assert "backend:cudaMallocAsync isn't modelled" in found.notes[0]
    missing = snapshot_of(list(WASTEFUL), *AFTER_WASTEFUL)
    del missing["device_traces"][0][4]  # B was made, but that isn't recorded: as if it had been there before
    (found,) = summarize(missing)
    assert found.reserved_at_start_bytes == 30 * M
    missing["device_traces"][0].append(entry("segment_map", A, 20 * M))
    (found,) = summarize(missing)
    assert (found.reserved_peak_bytes, found.allocated_peak_bytes, found.entries) == (90 * M, 49 * M, 12)
    assert found.reserved_at_start_bytes is None
    assert "entries are missing" in found.notes[0]
    assert "the figures are those of the moment of the snapshot" in found.notes[1]


def test_what_a_summary_takes_does_not_grow_with_the_number_of_entries() -> None:
    """By calls, also of built-in functions: eight times as many entries, and as many blocks alive."""

    def calls(n: int) -> int:
        entries, live, at = [], [], A
        for _ in range(n):
            entries += [entry("segment_alloc", at, 10 * M), entry("alloc", at, 10 * M)]
            live.append((at, 10 * M, [(at, 10 * M)]))
            at += 10 * M
        for where_, size, _ in live:
            entries += [entry("free_requested", where_, size), entry("free_completed", where_, size)]
        snapshot = snapshot_of(entries, *((where_, size, []) for where_, size, _ in live))
        return calls_in(lambda: summarize(snapshot))

    assert calls(120) < 10 * calls(15)


def test_the_place_that_a_stack_names() -> None:
    assert where(None) == "(made before the record)"
    assert where([]) == "(no stack recorded)"
    assert where([TORCH]) == "(no Python frame outside PyTorch)"
    assert where([TORCH, LOADS, STEPS]) == "/home/me/work/train.py:10 main"
    cpp = frame("/build/aten/src/ATen/native/Linear.cpp", 9, "at::native::linear")
    unknown, library = frame("??", 0, "malloc"), frame("", 0, "libtorch_cuda.so")
    threads = frame("/usr/lib/python3.11/threading.py", 9, "run")
    frozen = frame("<frozen runpy>", 88, "_run_code")
    triton = frame(r"C:\lib\site-packages\triton\jit.py", 9, "run")
    assert where([unknown, library, cpp, threads, frozen, triton, WINDOWS]) == r"C:\work\a\b\train.py:3 main"
    node = frame("/build/torch/csrc/autograd/engine.cpp", 9, "torch::autograd::generated::AddmmBackward0::apply(x&&)")
    assert where([cpp, node]) == "(backward: AddmmBackward0)"


# --- the command ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(WASTEFUL, *AFTER_WASTEFUL)))
    return path


def test_the_command_tells_everything(run: Run, file: Path, tmp_path: Path) -> None:
    result = run("snapshot", file, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    for text in (
        "90.00 MiB (94371840 bytes)",
        "as recorded: every address and every reserved byte",
        "unused segments, cached             30.00 MiB  33.3%",
        "me/work/train.py:20 main",
        "8.00 MiB",
        "expandable_segments:True",
        "-30.00 MiB",
        "roundup_power2_divisions:",
        "modelled, not checked against a device",
        'use PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True": 30.00 MiB less',
    ):
        assert text in result.stdout
    assert result.stdout.count("max_split_size_mb") == 1  # the best of each
    printed = run("snapshot", file, "--json", "-")
    assert printed.exit_code == 0
    assert printed.stdout == (tmp_path / "out.json").read_text()
    (device,) = json.loads(printed.stdout)["devices"]
    assert (device["device"], device["reserved_peak_bytes"], device["exact"]) == (0, 90 * M, True)
    assert device["advice"]["conf"] == "expandable_segments:True"
    holder = device["at_peak"]["holders"][0]
    assert (holder["where"], holder["unused_bytes"]) == ("/home/me/work/train.py:30 main", 30 * M)


def test_the_documented_fields_are_those_written() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    section = text.partition("## `ckptplan snapshot --json`")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    written = {
        field.name for kind in (DeviceSummary, State, CodeLine, SettingsTried, Shortage) for field in fields(kind)
    }
    assert written <= documented
    assert documented - written == {"PYTORCH_CUDA_ALLOC_CONF"}


def test_the_command_marks_what_is_only_modelled(run: Run, tmp_path: Path) -> None:
    recorded = snapshot_from(load_history(GENERATED / "out_of_memory.json.gz"))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorded))
    result = run("snapshot", path, "--limit-gb", "0.25")
    assert result.exit_code == 0, result.output
    assert "out of memory at entry" in result.stdout
    assert "failed requests" in result.stdout
    assert "device 0" in result.stdout


def test_the_command_s_errors_are_one_line(run: Run, file: Path, tmp_path: Path) -> None:
    assert_clean_error(run("snapshot", tmp_path / "none.pickle"), "none.pickle can't be read")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert_clean_error(run("snapshot", file), "holds no plain data")
    file.write_bytes(whole)
    assert_clean_error(run("snapshot", file, "--limit-gb", "80GB"), "--limit-gb")
    result = run("snapshot", file, "--json", tmp_path / "none" / "out.json")
    assert result.exit_code == 2
    assert "the figures can't be written to" in result.stderr


def test_a_snapshot_of_nothing(run: Run, file: Path) -> None:
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [[], []]}))
    result = run("snapshot", file)
    assert (result.exit_code, result.stdout) == (0, "nothing reserved or recorded on any device\n")
