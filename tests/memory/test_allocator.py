"""The caching-allocator model: one hand-worked trace per rule, properties on random traces."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptplan import CkptPlanError, InvalidInputError
from ckptplan.core.units import format_bytes
from ckptplan.memory.allocator import (
    Addresses,
    AllocatorSettings,
    BlockInfo,
    CachingAllocator,
    SegmentInfo,
    SimulatedOutOfMemoryError,
    replay,
)

pytestmark = pytest.mark.planning

M = 1 << 20
G = 1 << 30


def layout(allocator: CachingAllocator) -> list[list[tuple[int | str, int]]]:
    """Per segment, lowest address first: (block number or state, bytes) of each block, lowest address first."""
    return [
        [(b.state if b.block is None or b.state == "waiting" else b.block, b.size_bytes) for b in segment.blocks]
        for segment in allocator.snapshot()
    ]


def figures(allocator: CachingAllocator) -> tuple[int, int, int]:
    return allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes


def size_of(nbytes: int, conf: str = "") -> int:
    allocator = CachingAllocator(AllocatorSettings.from_string(conf))
    allocator.allocate(0, nbytes)
    return next(b.size_bytes for s in allocator.snapshot() for b in s.blocks if b.block == 0)


def make(conf: str = "", capacity: int | None = None) -> CachingAllocator:
    """An allocator whose segments lie in the order in which they were made."""
    return CachingAllocator(AllocatorSettings.from_string(conf), capacity, Addresses(descending=False))


# --- sizes ---


SOME = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"


@pytest.mark.parametrize(
    ("divisions", "nbytes", "rounded"),
    [
        ("roundup_power2_divisions:4", 1200, 1536),  # up to 512 * 4 = 2048 bytes: to 512 as ever
        ("roundup_power2_divisions:4", 2049, 2560),  # 2048 / 4 = 512 apart: 2048, 2560, ...
        ("roundup_power2_divisions:4", 5 * M + 1, 6 * M),  # 4 MiB / 4 = 1 MiB apart
        (SOME, 300 * M + 1, 300 * M + 512),  # from 256 MiB: 1, so no divisions
        (SOME, 600 * M + 1, 768 * M),  # from 512 MiB: 2, 256 MiB apart
        (SOME, 100 * G, 104 * G),  # above 1 GiB: 8; 64 GiB / 8 = 8 GiB apart
        ("roundup_power2_divisions:[16384:2,32768:8]", 100 * G, 104 * G),  # the last one takes all larger sizes
    ],
)
def test_sizes_are_rounded_by_divisions(divisions: str, nbytes: int, rounded: int) -> None:
    assert size_of(nbytes, divisions) == rounded


def test_nothing_is_taken_for_0_bytes() -> None:
    a = make()
    a.allocate(7, 0)
    a.record_stream(7, 3)
    assert figures(a) == (0, 0, 0)
    assert a.snapshot() == ()
    a.free(7)
    with pytest.raises(InvalidInputError, match="block 7 isn't allocated"):
        a.free(7)


# --- pools and segments ---


@pytest.mark.parametrize(
    ("conf", "nbytes", "segment"),
    [
        ("large_segment_size_mb:40", M + 1, 40 * M),
        ("large_segment_size_mb:40", 10 * M, 10 * M),
        ("large_segment_size_mb:11", 9 * M, 11 * M),
        ("expandable_segments:True,large_segment_size_mb:12", 13 * M, 24 * M),
    ],
)
def test_the_size_of_large_segments(conf: str, nbytes: int, segment: int) -> None:
    a = make(conf)
    a.allocate(0, nbytes)
    assert a.reserved_bytes == segment


# --- max_split_size ---


def test_max_split_size() -> None:
    a = make("max_split_size_mb:20")
    a.allocate(0, 50 * M)
    a.free(0)
    a.allocate(1, 12 * M)  # below 20: doesn't take the 50, a new segment of 12
    assert layout(a) == [[("free", 50 * M)], [(1, 12 * M)]]
    a.allocate(2, 30 * M)  # 50 >= 30 + 20: too much larger; a new segment of 30
    assert a.reserved_bytes == 92 * M
    a.allocate(3, 30 * M + 512)  # 50 < 30 MiB + 512 + 20 MiB: taken, and not split
    assert layout(a) == [[(3, 50 * M)], [(1, 12 * M)], [(2, 30 * M)]]
    assert figures(a) == (92 * M, 72 * M + 512, 92 * M)


@pytest.mark.parametrize("bound", ["max_non_split_rounding_mb:30", "large_segment_size_mb:30"])
def test_the_bound_on_rounding(bound: str) -> None:
    a = make(f"max_split_size_mb:30,{bound}")
    a.allocate(0, 70 * M)
    a.free(0)
    a.allocate(1, 40 * M)  # 70 >= 40 + 30
    assert a.reserved_bytes == 110 * M
    a.allocate(2, 40 * M + 512)
    assert figures(a) == (110 * M, 80 * M + 512, 110 * M)


def test_several_oversize_blocks_are_released_largest_first() -> None:
    a = make("max_split_size_mb:20", capacity=120 * M)
    for number, size in enumerate((22, 30, 40, 16)):
        a.allocate(number, size * M)
    for number in range(4):
        a.free(number)  # 108 reserved
    a.allocate(9, 60 * M)  # none holds 60; 40 + 30 >= 60 go, 22 and the 16 below max_split_size stay
    assert layout(a) == [[("free", 22 * M)], [("free", 16 * M)], [(9, 60 * M)]]


# --- running out ---


def test_out_of_memory_says_what_and_how_to_help() -> None:
    a = make(capacity=64 * M)
    for number in range(3):
        a.allocate(number, 20 * M)  # 60
    a.free(1)
    a.allocate(3, 8 * M)  # from the 20: 12 left over
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        a.allocate(4, 13 * M)  # 12 free in one piece, 4 never reserved
    error = caught.value
    assert isinstance(error, CkptPlanError)
    text = str(error)
    for part in ("13.00 MiB requested", "14.00 MiB of new", "limit is 64.00 MiB", "60.00 MiB are reserved"):
        assert part in text
    assert "48.00 MiB of them allocated and 12.00 MiB free in 1 fragments, the largest 12.00 MiB" in text
    assert "expandable_segments:True" in text  # 48 + 13 <= 64
    a.free(0)
    a.allocate(4, 13 * M)  # it goes on
    with pytest.raises(SimulatedOutOfMemoryError, match="tensors alone don't fit"):
        a.allocate(5, 60 * M)
    with pytest.raises(SimulatedOutOfMemoryError, match="PyTorch accepts less than"):
        make().allocate(0, 1 << 60)


@pytest.mark.parametrize(
    ("conf", "remedy"),
    [("", "the fragments together would hold it: set exp"), ("expandable_segments:True", "smaller than a page")],
)
def test_the_remedy_is_one_that_would_help(conf: str, remedy: str) -> None:
    a = make(conf, capacity=60 * M)
    for number in range(12):
        a.allocate(number, 5 * M)
    for number in range(0, 12, 2):
        a.free(number)  # 30 MiB free in pieces of 5
    with pytest.raises(SimulatedOutOfMemoryError, match=f"30.00 MiB free in 6 fragments.*{remedy}"):
        a.allocate(20, 6 * M)


# --- expandable segments ---


def test_the_address_space_is_an_eighth_larger_than_the_device() -> None:
    a = make("expandable_segments:True", capacity=160 * M)  # 180 MiB of addresses, 9 pages
    for number in range(8):
        a.allocate(number, 20 * M)
    a.free(0)
    a.free(7)
    a.allocate(8, 40 * M)  # page 0 is unmapped and comes back as page 8: with page 7 room enough, at the end
    assert layout(a) == [[*((number, 20 * M) for number in range(1, 7)), (8, 40 * M)]]


# --- empty_cache, wrong calls ---


def test_wrong_calls() -> None:
    a = make()
    a.allocate(0, 1)
    calls: dict[str, Callable[[], object]] = {
        "block 0 is allocated already": lambda: a.allocate(0, 1),
        "-5 bytes": lambda: a.allocate(1, -5),
        "block 3 isn't allocated": lambda: a.record_stream(3, 1),
        "capacity_bytes": lambda: CachingAllocator(capacity_bytes=-1),
        "from_string": lambda: CachingAllocator("expandable_segments:True"),  # type: ignore[arg-type]
    }
    for message, call in calls.items():
        with pytest.raises(InvalidInputError, match=message):
            call()


# --- addresses, states ---


@pytest.mark.parametrize(("descending", "order", "taken"), [(True, [3, 1, 0, 2], 1), (False, [0, 1, 2, 3], 0)])
def test_large_segments_get_falling_addresses_and_small_ones_growing_ones(
    descending: bool, order: list[int], taken: int
) -> None:
    """As Linux drivers mostly do; under WSL all grow. It decides which of two equal blocks is taken."""
    a = CachingAllocator() if descending else CachingAllocator(addresses=Addresses(descending=False))
    for number, nbytes in enumerate((12 * M, 12 * M, 512, 2 * M)):
        a.allocate(number, nbytes)
    at = [a.address_of(number) or 0 for number in range(4)]
    assert sorted(range(4), key=lambda number: at[number]) == order
    a.free(0)
    a.free(1)
    a.allocate(6, 12 * M)
    assert a.address_of(6) == at[taken]
    with pytest.raises(InvalidInputError, match="block 0 isn't allocated"):
        a.address_of(0)


def test_states_that_cannot_be_restored() -> None:
    used = make()
    used.allocate(0, 512)
    with pytest.raises(InvalidInputError, match="the allocator is in use"):
        used.restore(())
    block = BlockInfo(0, M, M, "allocated", 0)
    for blocks, message in (
        ((block,), "end at 1048576, not after its 2097152 bytes"),
        ((dataclasses.replace(block, address=512),), "start at 0, but starts at 512, with 1048576 bytes"),
        ((dataclasses.replace(block, size_bytes=0),), "with 0 bytes"),
        ((dataclasses.replace(block, block=None),), "needs a number of its own, not None"),
        ((block, dataclasses.replace(block, address=M)), "needs a number of its own, not 0"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            make().restore([SegmentInfo(0, 2 * M, 0, "small", False, blocks)])


# --- settings ---


def test_settings_from_string() -> None:
    assert AllocatorSettings.from_string("") == AllocatorSettings()
    found = AllocatorSettings.from_string(
        " expandable_segments : True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1, 512:2,1024:4,>:8],large_segment_size_mb:40,max_non_split_rounding_mb:50,"
        "per_process_memory_fraction:0.9,backend:native,pinned_num_register_threads:8,expandable_segments_reserve:40G,"
    )
    assert found == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=128 * M,
        roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5,
        large_segment_bytes=40 * M,
        max_non_split_rounding_bytes=50 * M,
    )
    assert AllocatorSettings.from_string("max_split_size_mb:128,max_split_size_mb:64").max_split_size_bytes == 64 * M
    # The order doesn't matter.
    text = "max_split_size_mb:30,large_segment_size_mb:12"
    assert AllocatorSettings.from_string(text).large_segment_bytes == 12 * M


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("max_split_size_mb:128,expandable_segments:True",
         {"expandable_segments": True, "max_split_size_bytes": 128 * M}),
        ("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9", {}),
        ("large_segment_size_mb:40,max_non_split_rounding_mb:50,max_split_size_mb:60",
         {"large_segment_bytes": 40 * M, "max_non_split_rounding_bytes": 50 * M, "max_split_size_bytes": 60 * M}),
        ("expandable_segments:False,roundup_power2_divisions:1", {"roundup_power2_divisions": 1}),
    ],
)  # fmt: skip
def test_settings_as_text(text: str, wanted: dict[str, Any]) -> None:
    assert AllocatorSettings.from_string(text) == AllocatorSettings(**wanted)


# What torch 2.13's own parser makes of them (AcceleratorAllocatorConfig::roundup_power2_divisions of 1 MiB ... 32 GiB).
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8", (8,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:8,256:4,>:1]", (8,) * 7 + (0, 4) + (1,) * 7),
        ("[262144:2,>:4]", (2,) * 16),
        ("[>:2,256:4]", (4,) * 9 + (2,) * 7),
    ],
)
def test_divisions_as_torch_reads_them(text: str, wanted: tuple[int, ...]) -> None:
    assert AllocatorSettings.from_string(f"roundup_power2_divisions:{text}").divisions == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_bytes=19922944 must be an integer of at least large_segment_bytes"),
        ("large_segment_size_mb:10", "above 10485760"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:0", "refused by PyTorch"),
        ("roundup_power2_divisions:[100:2]", "size 100 must be a power of two"),
        ("roundup_power2_divisions:[256:2]x", "in brackets"),
        ("roundup_power2_divisions:[256]", "size:divisions"),
        ("expandable_segments:true", "must be True or False"),
        ("expandable_segments=True", "name:value"),
        ("max_split_size_mb:128 expandable_segments:True", "whole number"),
        ("nonsense:3", "unknown allocator setting 'nonsense'.*max_split_size_mb"),
        ("backend:cudaMallocAsync", "isn't modelled"),
    ],
)
def test_settings_errors(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        AllocatorSettings.from_string(text)


@pytest.mark.parametrize(
    "values",
    [
        {"expandable_segments": 1},
        {"max_split_size_bytes": 30.5 * M},
        {"roundup_power2_divisions": (1, 2)},
        {"roundup_power2_divisions": -2},
    ],
)
def test_settings_refuse_other_values(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        AllocatorSettings(**values)


# --- replay ---


def test_replay_gives_figures_after_each_event() -> None:
    found = replay([(0, 15 * M), (1, 1000), (0, -1), (2, 9 * M), (0, 4 * M), (1, -1)])
    # 15 MiB: segment of 16, not split (rest 1 MiB). 1000 B: a small segment. 9 MiB from the 16: 7 left, 4 from these.
    assert found.reserved_bytes.tolist() == [16 * M, 18 * M, 18 * M, 18 * M, 18 * M, 18 * M]
    assert found.allocated_bytes.tolist() == [16 * M, 16 * M + 1024, 1024, 9 * M + 1024, 13 * M + 1024, 13 * M]
    assert found.allocated_bytes.dtype == np.int64


def test_replays_of_nothing_of_two_streams_and_of_too_much() -> None:
    assert replay([]).reserved_bytes.shape == (0,)
    assert replay([(0, 0), (0, -1)]).reserved_bytes.max() == 0
    events = [(0, 20 * M), (0, -1), (1, 20 * M), (1, -1), (2, 20 * M)]
    assert replay(events).reserved_bytes.max() == 20 * M
    assert replay(events, streams={1: 3}).reserved_bytes.max() == 40 * M
    with pytest.raises(SimulatedOutOfMemoryError, match=r"100\.00 MiB requested"):
        replay([(0, M), (1, 100 * M)], capacity_bytes=50 * M)
    with pytest.raises(InvalidInputError, match="-3 bytes"):
        replay([(0, -3)])
    with pytest.raises(InvalidInputError, match="block 0 isn't allocated"):
        replay([(0, -1)])


# --- properties ---

CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:20,expandable_segments:True",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:12",
)
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * M),
    st.integers(M, 24 * M),
    st.integers(10 * M, 90 * M),
    st.sampled_from([512, M, M + 1, 10 * M, 20 * M]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 100), st.integers(0, 2)),
        st.tuples(st.just("synchronize"), st.just(0), st.integers(0, 2)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def check(a: CachingAllocator) -> None:
    """What always holds."""
    segments = a.snapshot()
    blocks = [block for segment in segments for block in segment.blocks]
    assert a.reserved_bytes >= max(a.allocated_bytes, a.requested_bytes)
    assert a.reserved_bytes == sum(segment.size_bytes for segment in segments)
    assert a.allocated_bytes == sum(block.size_bytes for block in blocks if block.state == "allocated")
    assert a.requested_bytes == sum(block.requested_bytes for block in blocks)
    for segment in segments:
        at = segment.address
        for block in segment.blocks:  # they tile it
            assert block.address == at
            assert block.size_bytes > 0
            assert block.size_bytes % 512 == 0
            at += block.size_bytes
        assert at == segment.address + segment.size_bytes
        for one, other in itertools.pairwise(segment.blocks):  # free neighbours are merged
            assert (one.state, other.state) != ("free", "free")
    for one, other in itertools.pairwise(segments):
        assert one.address + one.size_bytes <= other.address
    if a.settings.expandable_segments:
        page = {"small": 2 * M, "large": a.settings.large_segment_bytes}
        assert all(segment.size_bytes % page[segment.pool] == 0 for segment in segments)
    if a.capacity_bytes is not None:
        assert a.reserved_bytes <= a.capacity_bytes


@settings(max_examples=40)
@given(STEPS, st.sampled_from(CONFS), st.sampled_from([60 * M, 200 * M, 10 * G]))
def test_state_is_sound_after_every_call(steps: list[tuple[str, int, int]], conf: str, capacity: int) -> None:
    a = make(conf, capacity)
    live: list[int] = []
    for number, (call, value, stream) in enumerate(steps):
        if call == "allocate":
            error = attempt(a, number, value, stream)
            if error is not None:
                # What it says is so, and nothing that could have gone is left.
                left = a.reserved_bytes
                assert f"{format_bytes(left)} are reserved after all retries" in str(error)
                check(a)
                a.empty_cache()
                assert a.reserved_bytes == left
                continue
            live.append(number)
            block = next(b for seg in a.snapshot() for b in seg.blocks if b.block == number)
            assert value <= block.size_bytes
        else:
            run([(call, value, stream)], a, live, number)
        check(a)
    for block in live:
        a.free(block)
    a.empty_cache()
    assert figures(a) == (0, 0, 0)
    assert a.snapshot() == ()
    assert a.peak_reserved_bytes >= a.peak_allocated_bytes


def attempt(a: CachingAllocator, number: int, nbytes: int, stream: int) -> SimulatedOutOfMemoryError | None:
    try:
        a.allocate(number, nbytes, stream)
    except SimulatedOutOfMemoryError as error:
        return error
    return None


@settings(max_examples=20)
@given(STEPS, STEPS, st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20"]))
def test_a_restored_state_goes_on_as_the_first_would_have(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]], conf: str
) -> None:
    a = make(conf, 10 * G)
    live: list[int] = []
    run([step for step in before if step[0] != "record_stream"], a, live, 0)
    # What begins an address space isn't in a state.
    blocks = [b for b in a._live.values() if b is not None] + a._small.blocks() + a._large.blocks()
    spaces = {(b.stream, "small" if b.pool.small else "large"): b.segment.address for b in blocks if b.segment}
    b = CachingAllocator(a.settings, a.capacity_bytes, copy.copy(a._addresses))
    b.restore(a.snapshot(), spaces)
    check(b)
    assert (b.snapshot(), figures(b)) == (a.snapshot(), figures(a))
    for steps in (after, [("empty_cache", 0, 0)]):
        again = list(live)
        run(steps, a, live, 1000)
        run(steps, b, again, 1000)
        check(b)
        assert (b.snapshot(), figures(b)) == (a.snapshot(), figures(a))


def run(steps: list[tuple[str, int, int]], a: CachingAllocator, live: list[int], first: int) -> None:
    for number, (call, value, stream) in enumerate(steps, first):
        if call == "allocate":
            if attempt(a, number, value, stream) is None:
                live.append(number)
        elif call == "free" and live:
            a.free(live.pop(value % len(live)))
        elif call == "record_stream" and live:
            a.record_stream(live[value % len(live)], stream)
        elif call == "synchronize":
            a.synchronize(stream)
        elif call == "empty_cache":
            a.empty_cache()
