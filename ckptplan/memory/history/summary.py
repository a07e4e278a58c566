"""Summary of a recorded history: its peaks, the code that causes its fragments, and the effect of other settings.

Peaks are those of the record. Fragments are attributed by the state of the allocator model at the peak, which is
reached by a replay with the recorded segment addresses; `first_difference` tells whether the replay agrees with the
record to the end. For other settings the same requests are replayed from an empty allocator that first allocates all
blocks in use before the first entry. The recorded settings are replayed that way too, for a fair comparison: segments
that the device had cached before the record don't exist in that replay.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ckptplan.core.allocator_settings import MIB, SMALL_SEGMENT_BYTES, AllocatorSettings
from ckptplan.core.errors import InvalidInputError
from ckptplan.memory.allocator import (
    AllocatorTimeline,
    BlockInfo,
    CachingAllocator,
    SegmentInfo,
    SimulatedOutOfMemoryError,
)
from ckptplan.memory.history.reader import (
    Frames,
    History,
    RecordedReplayer,
    Replayer,
    TraceEvent,
    devices,
    entries_of,
    events_of,
    laid_out_afresh,
    read_history,
    replay_history,
    segment_stacks_of,
    segments_of,
    settings_from_snapshot,
    stacks_of,
)

MAX_SPLIT_MIB = (32, 64, 128, 256, 512)
DIVISIONS = (1, 2, 4, 8, 16)
THRESHOLDS = (0.6, 0.8, 0.9)
NEAR = 0.01  # settings within this part of the best one count as equally good; a smaller gain isn't worth a setting
MOST_SHORTAGES = 16  # the last ones are listed; a program that catches the error may have one in every step


@dataclass(frozen=True, slots=True)
class CodeLine:
    """Blocks allocated by one line of the program, at the peak.

    Parameters
    ----------
    where : str
        File, line and function of the innermost Python frame that isn't PyTorch's; in backward, which has none, the
        node of the graph; without either, the reason in parentheses.
    blocks, allocated_bytes : int
        Number and bytes of the blocks in use.
    fragment_bytes : int
        Free bytes next to the blocks, which prevent the release of the segments. A fragment between two blocks counts
        half for each.
    unused_bytes : int
        Bytes of unused segments that were allocated for requests of this line.
    """

    where: str
    blocks: int
    allocated_bytes: int
    fragment_bytes: int
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class State:
    """The parts of reserved memory at one moment; they add up to `reserved_bytes`.

    Parameters
    ----------
    entry : int or None
        The state is that after this entry of the record; None: that of the snapshot.
    reserved_bytes : int
    requested_bytes : int
        Sizes of live tensors.
    rounding_bytes : int
        Bytes of their blocks beyond that.
    waiting_bytes : int
        Freed blocks that other streams may still use.
    fragment_bytes : int
        Free bytes in segments (of expandable ones: in pages) that are partly in use.
    unused_bytes : int
        Bytes of unused segments or pages, which `torch.cuda.empty_cache()` would release.
    holders : tuple of CodeLine
        By fragments and unused segments, largest first.
    """

    entry: int | None
    reserved_bytes: int
    requested_bytes: int
    rounding_bytes: int
    waiting_bytes: int
    fragment_bytes: int
    unused_bytes: int
    holders: tuple[CodeLine, ...]


@dataclass(frozen=True, slots=True)
class SettingsTried:
    """The same requests with other settings.

    Parameters
    ----------
    change : str
        The setting that differs, such as "max_split_size_mb:128"; "" for the recorded ones.
    conf : str
        All settings, as PYTORCH_CUDA_ALLOC_CONF takes them.
    reserved_peak_bytes : int or None
        None: out of memory within the limit.
    limit_bytes : int or None
        Limit on reserved bytes; None: no limit.
    fits_failed_requests : bool or None
        Whether each recorded request that ran out of memory would have found room; None: there is no such request.
    checked : bool
        Whether the model was checked against recorded histories of devices with such settings.
    """

    change: str
    conf: str
    reserved_peak_bytes: int | None
    limit_bytes: int | None
    fits_failed_requests: bool | None
    checked: bool


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that ran out of memory.

    Parameters
    ----------
    entry : int
    requested_bytes : int
        Rounded as the allocator does.
    device_free_bytes : int
        Free memory of the device, as recorded.
    reserved_bytes : int
        Reserved bytes after the release of all unused memory.
    """

    entry: int
    requested_bytes: int
    device_free_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device of a snapshot.

    Parameters
    ----------
    device : int
    settings : str
        The recorded settings, as PYTORCH_CUDA_ALLOC_CONF takes them.
    entries : int
        Number of entries of the record; 0: nothing was recorded.
    reserved_peak_bytes, requested_peak_bytes : int
        Highest values of the history; without a history, those at the snapshot.
    at_peak : State
        The state with most reserved bytes; of several, the one with most allocated bytes.
    allocated_peak_bytes : int or None
        Highest bytes of blocks; None if the history couldn't be replayed.
    reserved_at_start_bytes : int or None
        Bytes reserved before the first entry; None without a history, or if it couldn't be undone.
    allocations : int
        Number of addresses compared with the model's.
    exact : bool or None
        Whether all addresses, and the reserved bytes after each entry, agree with the model's; None: not replayed.
    first_difference : int or None
        The first entry at which they don't.
    shortages : tuple of Shortage
    alternatives : tuple of SettingsTried
        The recorded settings first.
    advice : SettingsTried or None
        The recommended settings; None if no setting reserves less.
    notes : tuple of str
    """

    device: int
    settings: str
    entries: int
    reserved_peak_bytes: int
    requested_peak_bytes: int
    at_peak: State
    allocated_peak_bytes: int | None = None
    reserved_at_start_bytes: int | None = None
    allocations: int = 0
    exact: bool | None = None
    first_difference: int | None = None
    shortages: tuple[Shortage, ...] = ()
    alternatives: tuple[SettingsTried, ...] = ()
    advice: SettingsTried | None = None
    notes: tuple[str, ...] = ()


def summarize(
    snapshot: Mapping[str, Any],
    *,
    limit_bytes: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[DeviceSummary, ...]:
    """Return a summary of each device with reserved memory or recorded entries.

    Parameters
    ----------
    snapshot : mapping
        From `load_snapshot`.
    limit_bytes : int, optional
        Limit on the bytes that other settings may reserve. Default: no limit, except for garbage collection, which
        needs one and gets the recorded peak.
    on_progress : callable, optional
        Called with a description of the present work.

    Raises
    ------
    InvalidInputError
        If `snapshot` isn't a memory snapshot.
    """
    found = (_Summary(snapshot, device, limit_bytes, on_progress).summary() for device in devices(snapshot))
    return tuple(summary for summary in found if summary.entries or summary.reserved_peak_bytes)


def to_json(summaries: Iterable[DeviceSummary]) -> str:
    """Return the summaries as JSON (docs/formats.md)."""
    return json.dumps({"devices": [asdict(summary) for summary in summaries]}, indent=1)


class _Summary:
    """Computes one device's figures; a note gives the reason for each part that is missing."""

    def __init__(
        self,
        snapshot: Mapping[str, Any],
        device: int,
        limit_bytes: int | None,
        on_progress: Callable[[str], None],
    ) -> None:
        self.snapshot, self.device, self.limit_bytes, self.on_progress = snapshot, device, limit_bytes, on_progress
        self.notes: list[str] = []
        self.settings = AllocatorSettings()
        self.modelled = True
        try:
            self.settings = settings_from_snapshot(snapshot)
        except InvalidInputError as error:
            self._without_model(str(error))

    def _without_model(self, reason: str) -> None:
        self.modelled = False
        self.notes.append(f"not replayed, and no other settings tried: {reason}")

    def summary(self) -> DeviceSummary:
        entries = entries_of(self.snapshot, self.device)
        history = self._history() if entries else None
        if not entries:
            self.notes.append(
                "no history was recorded, so the figures are those of the moment of the snapshot; call"
                " torch.cuda.memory._record_memory_history() before the model is built"
            )
        segment_stacks = segment_stacks_of(self.snapshot, self.device)
        stacks = stacks_of(self.snapshot, self.device)
        at_end = _state(
            None,
            segments_of(self.snapshot, self.device),
            lambda block: stacks.get(block.address, ()),
            lambda segment: segment_stacks.get(segment.address, ()),
            self.settings,
        )
        found = DeviceSummary(
            device=self.device,
            settings=self.settings.to_string(),
            entries=len(entries),
            reserved_peak_bytes=at_end.reserved_bytes,
            requested_peak_bytes=at_end.requested_bytes,
            at_peak=at_end,
        )
        if history is None:
            self.notes += ["the figures are those of the moment of the snapshot"] * bool(entries)
            allocated = at_end.requested_bytes + at_end.rounding_bytes
            return replace(found, allocated_peak_bytes=allocated, notes=tuple(self.notes))
        found = replace(
            found,
            reserved_peak_bytes=history.peak_reserved_bytes,
            requested_peak_bytes=_requested_peak(history),
            reserved_at_start_bytes=history.reserved_at_start_bytes,
            shortages=tuple(_shortages(history)),
        )
        if self.modelled:
            self.on_progress(f"device {self.device}: replaying {len(entries)} entries")
            found = self._replayed(found, history)
        if history.reserved_at_start_bytes:
            self.notes.append(
                "memory was in use before the record began; other settings start with those blocks, allocated afresh"
            )
        return replace(found, notes=tuple(self.notes))

    def _replayed(self, found: DeviceSummary, history: History) -> DeviceSummary:
        """Return the summary with what replaying the history by its own settings and by others shows."""
        replay = replay_history(history)
        if replay.first_difference is not None:
            self.notes.append(
                f"the model differs from the record from entry {replay.first_difference} on, so fragments and other"
                " settings are approximate"
            )
        alternatives = tuple(self._alternatives(history, found.shortages))
        return replace(
            found,
            at_peak=self._at_peak(history, replay.timeline),
            allocated_peak_bytes=replay.timeline.peak_allocated_bytes,
            allocations=replay.allocations,
            exact=replay.first_difference is None,
            first_difference=replay.first_difference,
            alternatives=alternatives,
            advice=_advice(alternatives),
        )

    def _history(self) -> History | None:
        try:
            history = read_history(self.snapshot, self.device, self.settings)
        except InvalidInputError as error:
            self._without_model(str(error))
            return None
        if history.private and self.modelled:
            self._without_model("the history has private pools (CUDA graphs, MemPool), which aren't modelled")
        return history

    def _at_peak(self, history: History, timeline: AllocatorTimeline) -> State:
        """Return the state with most reserved bytes; of several, the one with most allocated bytes."""
        events = events_of(history)
        most = timeline.reserved_bytes.max(initial=0)
        at = -1
        if events and most >= history.reserved_at_start_bytes:
            at = int(np.where(timeline.reserved_bytes == most, timeline.allocated_bytes, -1).argmax())
        replayer = RecordedReplayer(history)
        for event in events[: at + 1]:
            replayer.apply(event)
        started = sum(block.block is not None for segment in history.start for block in segment.blocks)

        def frames(block: BlockInfo) -> Frames | None:
            assert block.block is not None
            found = history.frames.get(block.block)
            return () if found is None and block.block >= started else found

        entry = events[at].index if at >= 0 else 0
        made = {
            other.address: other.frames for other in history.entries[: entry + 1] if other.action == "segment_alloc"
        }
        return _state(
            entry,
            replayer.allocator.snapshot(),
            frames,
            lambda segment: made.get(segment.address),
            self.settings,
        )

    def _alternatives(self, history: History, shortages: Sequence[Shortage]) -> Iterable[SettingsTried]:
        events = laid_out_afresh(history) + events_of(history)
        limits = {shortage.entry: shortage.reserved_bytes + shortage.device_free_bytes for shortage in shortages}
        for name, value, settings in _candidates(self.settings):
            self.on_progress(f"device {self.device}: {settings.to_string() or 'default settings'}")
            limit = self.limit_bytes
            if name == "garbage_collection_threshold" and limit is None:
                limit = history.peak_reserved_bytes
            peak, fits = _replay(events, settings, limit, limits)
            yield SettingsTried(
                f"{name}:{value}" if name else "",
                settings.to_string(),
                peak,
                limit,
                fits if limits else None,
                _is_checked(settings),
            )


def _is_checked(settings: AllocatorSettings) -> bool:
    """Return whether the model was checked against recorded histories of devices with these settings."""
    return replace(settings, expandable_segments=False) == AllocatorSettings()


def _candidates(recorded: AllocatorSettings) -> Iterable[tuple[str, object, AllocatorSettings]]:
    """Yield (name, value, settings) with one setting changed; first the recorded settings, without a name."""
    recorded = replace(recorded, memory_fraction=1.0)
    yield "", "", recorded
    expandable = not recorded.expandable_segments
    yield "expandable_segments", expandable, replace(recorded, expandable_segments=expandable)
    for mib in MAX_SPLIT_MIB:
        if recorded.large_segment_bytes <= mib * MIB != recorded.max_split_size_bytes:
            yield "max_split_size_mb", mib, replace(recorded, max_split_size_bytes=mib * MIB)
    for divisions in DIVISIONS:
        if {max(number, 1) for number in recorded.divisions} != {divisions}:
            yield "roundup_power2_divisions", divisions, replace(recorded, roundup_power2_divisions=divisions)
    if expandable:  # pages aren't collected
        for threshold in THRESHOLDS:
            changed = replace(recorded, garbage_collection_threshold=threshold)
            yield "garbage_collection_threshold", threshold, changed


def _replay(
    events: Sequence[TraceEvent],
    settings: AllocatorSettings,
    limit_bytes: int | None,
    limits: Mapping[int, int],
) -> tuple[int | None, bool]:
    """Return the reserved peak (None: out of memory), and whether the failed requests would fit in their limits."""
    if settings.garbage_collection_threshold is not None and limit_bytes is not None:
        # Collection needs a memory fraction below 1: half of twice the limit.
        settings, limit_bytes = replace(settings, memory_fraction=0.5), 2 * limit_bytes
    replayer = Replayer(CachingAllocator(settings, limit_bytes))
    fits = True
    try:
        for event in events:
            replayer.apply(event)
            if event.action == "out_of_memory" and event.index in limits:
                fits &= _would_fit(replayer.allocator, event, limits[event.index])
    except SimulatedOutOfMemoryError:
        return None, False
    return replayer.allocator.peak_reserved_bytes, fits


def _would_fit(allocator: CachingAllocator, event: TraceEvent, limit_bytes: int) -> bool:
    """Return whether a request fits in a copy of the allocator that may reserve `limit_bytes`."""
    settings = replace(allocator.settings, memory_fraction=1.0, garbage_collection_threshold=None)
    probe = CachingAllocator(settings, max(limit_bytes, allocator.reserved_bytes))
    probe.restore(allocator.snapshot())
    probe.empty_cache()
    try:
        probe.allocate(-1, event.nbytes, event.stream)
    except SimulatedOutOfMemoryError:
        return False
    return probe.reserved_bytes <= limit_bytes


def _advice(alternatives: Sequence[SettingsTried]) -> SettingsTried | None:
    """Return the setting that reserves least; of equally good ones a checked one, then the first."""
    if not alternatives or alternatives[0].reserved_peak_bytes is None:
        return None
    possible = [(a.reserved_peak_bytes, a) for a in alternatives if a.reserved_peak_bytes is not None]
    least = min(nbytes for nbytes, _ in possible)
    if least > (1 - NEAR) * alternatives[0].reserved_peak_bytes:
        return None
    return min((a for nbytes, a in possible if nbytes <= (1 + NEAR) * least), key=lambda a: not a.checked)


def _shortages(history: History) -> Iterable[Shortage]:
    found = [index for index, entry in enumerate(history.entries) if entry.action == "oom"]
    for index in found[-MOST_SHORTAGES:]:
        entry = history.entries[index]
        yield Shortage(index, entry.size_bytes, entry.address, int(history.reserved_bytes[index]))


def _requested_peak(history: History) -> int:
    now = peak = sum(block.requested_bytes for segment in history.start for block in segment.blocks)
    for entry in history.entries:
        if entry.action == "alloc":
            now += entry.size_bytes
            peak = max(peak, now)
        elif entry.action == "free_completed":
            now -= entry.size_bytes
    return peak


# --- the parts of reserved memory ---


def _state(
    entry: int | None,
    segments: Iterable[SegmentInfo],
    block_frames: Callable[[BlockInfo], Frames | None],
    segment_frames: Callable[[SegmentInfo], Frames | None],
    settings: AllocatorSettings,
) -> State:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # place -> the figures of its `CodeLine`
    places: dict[int, str] = {}  # many blocks share one stack

    def holder_of(frames: Frames | None) -> list[int]:
        if id(frames) not in places:
            places[id(frames)] = where(frames)
        return found[places[id(frames)]]

    reserved = requested = rounding = waiting = fragments = unused = 0
    for segment in segments:
        reserved += segment.size_bytes
        page = SMALL_SEGMENT_BYTES if segment.pool == "small" else settings.large_segment_bytes
        held: list[list[int] | None] = []
        for block in segment.blocks:
            if block.state == "free":
                held.append(None)
                continue
            holder = holder_of(block_frames(block))
            holder[0] += 1
            holder[1] += block.size_bytes
            held.append(holder)
            if block.state == "waiting":
                waiting += block.size_bytes
            else:
                requested += block.requested_bytes
                rounding += block.size_bytes - block.requested_bytes
        for at, block in enumerate(segment.blocks):
            if block.state != "free":
                continue
            beside = [held[n] for n in (at - 1, at + 1) if 0 <= n < len(held)]
            whole = _whole_pages(segment, block, page) if beside else block.size_bytes
            unused += whole
            if whole and segment.expandable:
                found["(pages of expandable segments)"][3] += whole
            elif whole:
                holder_of(segment_frames(segment))[3] += whole
            rest = block.size_bytes - whole
            fragments += rest
            for n, neighbour in enumerate(beside):
                assert neighbour is not None  # adjacent free blocks are merged
                neighbour[2] += rest if len(beside) == 1 else rest // 2 + (rest % 2 if n == 0 else 0)
    holders = [CodeLine(name, *figures) for name, figures in found.items()]
    holders.sort(key=lambda h: (-h.fragment_bytes - h.unused_bytes, -h.allocated_bytes, h.where))
    return State(entry, reserved, requested, rounding, waiting, fragments, unused, tuple(holders))


def _whole_pages(segment: SegmentInfo, block: BlockInfo, page: int) -> int:
    """Return the bytes of the pages wholly inside a free block of an expandable segment; 0 for other segments."""
    if not segment.expandable:
        return 0
    start = -(-(block.address - segment.address) // page) * page
    stop = (block.address + block.size_bytes - segment.address) // page * page
    return max(stop - start, 0)


_PYTORCH = re.compile(
    r"[/\\](site|dist)-packages[/\\](torch|triton)[/\\]|[/\\]pytorch[/\\]torch[/\\]"
    r"|[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|\.(c|cc|cpp|cu|cuh|h|hpp|S)$|\.so(\.|$)|^\?\?$|^<|^$"
)
_NODE = re.compile(r"(\w+Backward\d*)::apply")


def where(frames: Frames | None) -> str:
    """Return the innermost Python frame that isn't PyTorch's or the standard library's, as text.

    Frames come innermost first. Backward runs in a thread without Python frames; if C++ frames were recorded
    (`stacks="all"`), the text names the node of the graph, such as "AddmmBackward0".
    """
    if frames is None:
        return "(made before the record)"
    if not frames:
        return "(no stack recorded)"
    node = None
    for frame in frames:
        file, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if not _PYTORCH.search(file):
            return f"{file}:{frame.get('line', 0)} {name}"
        node = node or _NODE.search(name)
    return f"(backward: {node[1]})" if node else "(no Python frame outside PyTorch)"
