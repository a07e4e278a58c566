"""Summary of a recorded history: its peaks, its fragments and whose they are, and what settings would change.

The recorded figures come from the record itself. Whose the fragments are is read off the allocator model at the peak,
which is replayed with the recorded segment addresses; `first_difference` says whether the model did the same as the
device up to the end. For other settings the same requests go through the model again, from an empty allocator into
which first goes what was alive before the first entry. The recorded settings are tried that way too, since only that
compares: what a device had cached before the record began isn't there then.
"""

from __future__ import annotations

import json
import re
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
NEAR = 0.01  # settings within this part of the least are equally good; gains below it aren't worth a setting
MOST_SHORTAGES = 16  # a program that catches the error may run into it at every step

Place = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True, slots=True)
class Holder:
    """Blocks made at one place of the program, at the peak.

    Parameters
    ----------
    where : str
        File, line and function of the innermost Python frame that isn't PyTorch's; in backward, which has none, the
        node of the graph; else why there is none.
    blocks, allocated_bytes : int
        Its live blocks.
    fragment_bytes : int
        Free bytes next to its blocks, in segments that these keep from being released: each fragment counts in halves
        for the blocks on its two sides.
    unused_bytes : int
        In unused segments that were made for its requests.
    """

    where: str
    blocks: int
    allocated_bytes: int
    fragment_bytes: int
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class State:
    """What reserved memory consists of at one moment; the five parts add up to `reserved_bytes`.

    Parameters
    ----------
    entry : int or None
        The record's entry behind which it is so; None for the moment of the snapshot.
    reserved_bytes : int
    requested_bytes : int
        Asked for by live tensors.
    rounding_bytes : int
        What their blocks have beyond that.
    waiting_bytes : int
        Freed, but other streams may still use it.
    fragment_bytes : int
        Free, in segments (expandable ones: pages) that are partly in use.
    unused_bytes : int
        In whole segments or pages that nothing uses: `torch.cuda.empty_cache()` gives them back.
    holders : tuple of Holder
        Those with most fragments and unused segments first.
    """

    entry: int | None
    reserved_bytes: int
    requested_bytes: int
    rounding_bytes: int
    waiting_bytes: int
    fragment_bytes: int
    unused_bytes: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
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
        Most that it could reserve; None for no limit.
    fits_failed_requests : bool or None
        Whether each request that ran out of memory would have found room; None where none did.
    checked : bool
        Whether histories of real devices have shown that the model does this as PyTorch does.
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
        What the device had left, as recorded.
    reserved_bytes : int
        After everything that could be released was.
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
        The recorded ones, as PYTORCH_CUDA_ALLOC_CONF takes them.
    entries : int
        How many the record has; 0: there was no recording.
    reserved_at_start_bytes : int or None
        Reserved before the first entry; None without a history, or one that couldn't be undone.
    reserved_peak_bytes, requested_peak_bytes : int
        Highest of the history; without one, at the snapshot.
    allocated_peak_bytes : int or None
        Likewise, of blocks; None where the history couldn't be replayed.
    allocations : int
        Whose addresses were compared with the model's.
    exact : bool or None
        Whether each of them and the reserved bytes after each entry were the model's; None: not replayed.
    first_difference : int or None
        The first entry at which one wasn't.
    at_peak : State
        Where most is reserved; of several such moments that with most allocated.
    shortages : tuple of Shortage
    alternatives : tuple of Alternative
        The recorded settings first.
    advice : Alternative or None
        The one to use; None where no setting gains anything.
    notes : tuple of str
    """

    device: int
    settings: str
    entries: int
    reserved_at_start_bytes: int | None
    reserved_peak_bytes: int
    requested_peak_bytes: int
    allocated_peak_bytes: int | None
    allocations: int
    exact: bool | None
    first_difference: int | None
    at_peak: State
    shortages: tuple[Shortage, ...]
    alternatives: tuple[Alternative, ...]
    advice: Alternative | None
    notes: tuple[str, ...]


def summarize(
    snapshot: Mapping[str, Any],
    *,
    limit_bytes: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[DeviceSummary, ...]:
    """Each device that has something reserved or recorded.

    Parameters
    ----------
    snapshot : mapping
        From `load_snapshot`.
    limit_bytes : int, optional
        Most that other settings may reserve. Without it there is no limit, but for garbage collection, which needs one:
        there it is the recorded peak.
    on_progress : callable, optional
        Called with what is being done.

    Raises
    ------
    InvalidInputError
        For a snapshot that is none.
    """
    found = (_Summary(snapshot, device, limit_bytes, on_progress).summary() for device in devices(snapshot))
    return tuple(summary for summary in found if summary.entries or summary.reserved_peak_bytes)


def to_json(summaries: Iterable[DeviceSummary]) -> str:
    """The JSON of docs/formats.md."""
    return json.dumps({"devices": [asdict(summary) for summary in summaries]}, indent=1)


class _Summary:
    """Collects one device's figures; where a part can't be had, a note says why."""

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
                "no history was recorded, so this is the moment of the snapshot; call"
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
        if history is None:
            self.notes += ["the figures are those of the moment of the snapshot"] * bool(entries)
            requested, rounding = at_end.requested_bytes, at_end.rounding_bytes
            return DeviceSummary(
                device=self.device,
                settings=self.settings.to_string(),
                entries=len(entries),
                reserved_at_start_bytes=None,
                reserved_peak_bytes=at_end.reserved_bytes,
                requested_peak_bytes=requested,
                allocated_peak_bytes=requested + rounding,
                allocations=0,
                exact=None,
                first_difference=None,
                at_peak=at_end,
                shortages=(),
                alternatives=(),
                advice=None,
                notes=tuple(self.notes),
            )
        replay = peak = None
        alternatives: tuple[Alternative, ...] = ()
        shortages = tuple(_shortages(history))
        if self.modelled:
            self.on_progress(f"device {self.device}: replaying {len(history.entries)} entries")
            replay = replay_history(history)
            peak = self._at_peak(history, replay.timeline)
            if replay.first_difference is not None:
                self.notes.append(
                    f"the model differs from the record from entry {replay.first_difference} on; what depends on it"
                    " (fragments, other settings) is approximate"
                )
            alternatives = tuple(self._alternatives(history, shortages))
        if history.reserved_at_start_bytes:
            self.notes.append(
                "the record begins with memory in use; other settings start with what was alive then, laid out afresh"
            )
        return DeviceSummary(
            device=self.device,
            settings=self.settings.to_string(),
            entries=len(history.entries),
            reserved_at_start_bytes=history.reserved_at_start_bytes,
            reserved_peak_bytes=history.peak_reserved_bytes,
            requested_peak_bytes=_requested_peak(history),
            allocated_peak_bytes=None if replay is None else replay.timeline.peak_allocated_bytes,
            allocations=0 if replay is None else replay.allocations,
            exact=None if replay is None else replay.first_difference is None,
            first_difference=None if replay is None else replay.first_difference,
            at_peak=peak or at_end,
            shortages=shortages,
            alternatives=alternatives,
            advice=_advice(alternatives),
            notes=tuple(self.notes),
        )

    def _history(self) -> History | None:
        try:
            history = read_history(self.snapshot, self.device, self.settings)
        except InvalidInputError as error:
            self._without_model(str(error))
            return None
        if history.private and self.modelled:
            self._without_model("parts of it belong to private pools (CUDA graphs, MemPool), which aren't modelled")
        return history

    def _at_peak(self, history: History, timeline: AllocatorTimeline) -> State:
        """The state where most is reserved; of several such moments that with most allocated."""
        events = events_of(history)
        most = timeline.reserved_bytes.max(initial=0)
        at = -1
        if len(events) and most >= history.reserved_at_start_bytes:
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

    def _alternatives(self, history: History, shortages: Sequence[Shortage]) -> Iterable[Alternative]:
        events = laid_out_afresh(history) + events_of(history)
        limits = {shortage.entry: shortage.reserved_bytes + shortage.device_free_bytes for shortage in shortages}
        for name, value, settings in _candidates(self.settings):
            self.on_progress(f"device {self.device}: {settings.to_string() or 'default settings'}")
            limit = self.limit_bytes
            if name == "garbage_collection_threshold" and limit is None:
                limit = history.peak_reserved_bytes
            peak, fits = _replay(events, settings, limit, limits)
            yield Alternative(
                f"{name}:{value}" if name else "",
                settings.to_string(),
                peak,
                limit,
                fits if limits else None,
                _is_checked(settings),
            )


def _is_checked(settings: AllocatorSettings) -> bool:
    """Whether recorded histories of real devices have shown the model right with these settings."""
    return replace(settings, expandable_segments=False) == AllocatorSettings()


def _candidates(recorded: AllocatorSettings) -> Iterable[tuple[str, object, AllocatorSettings]]:
    """The recorded settings, and each with one of them changed: its name, its value, and all together."""
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
    """Reserved peak (None: out of memory), and whether the requests that failed would have fit within their limits."""
    collects = settings.garbage_collection_threshold is not None and limit_bytes is not None
    if collects:
        # The threshold is a part of the memory fraction: of twice the limit, half may be used.
        assert limit_bytes is not None
        replayer = Replayer(CachingAllocator(replace(settings, memory_fraction=0.5), 2 * limit_bytes))
    else:
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
    """Whether a request finds room in a copy of the allocator that may reserve so much."""
    settings = replace(allocator.settings, memory_fraction=1.0, garbage_collection_threshold=None)
    probe = CachingAllocator(settings, max(limit_bytes, allocator.reserved_bytes))
    probe.restore(allocator.snapshot())
    probe.empty_cache()
    try:
        probe.allocate(-1, event.nbytes, event.stream)
    except SimulatedOutOfMemoryError:
        return False
    return probe.reserved_bytes <= limit_bytes


def _advice(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The setting that reserves least; among equally good ones a checked one, then the first."""
    if not alternatives or alternatives[0].reserved_peak_bytes is None:
        return None
    possible = [(a.reserved_peak_bytes, a) for a in alternatives if a.reserved_peak_bytes is not None]
    least = min(nbytes for nbytes, _ in possible)
    if least > (1 - NEAR) * alternatives[0].reserved_peak_bytes:
        return None
    near = [a for nbytes, a in possible if nbytes <= (1 + NEAR) * least]
    return min(near, key=lambda a: not a.checked)


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


# --- what memory consists of ---


def _state(
    entry: int | None,
    segments: Iterable[SegmentInfo],
    block_frames: Callable[[BlockInfo], Frames | None],
    segment_frames: Callable[[SegmentInfo], Frames | None],
    settings: AllocatorSettings,
) -> State:
    found: dict[str, list[int]] = {}  # place -> blocks, bytes, bytes of fragments, of unused segments
    places: dict[int, str] = {}  # stacks are shared by many blocks

    def holder_at(place: str) -> list[int]:
        return found.setdefault(place, [0, 0, 0, 0])

    def holder_of(frames: Frames | None) -> list[int]:
        if id(frames) not in places:
            places[id(frames)] = where(frames)
        return holder_at(places[id(frames)])

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
                holder_at("(pages of expandable segments)")[3] += whole
            elif whole:
                holder_of(segment_frames(segment))[3] += whole
            rest = block.size_bytes - whole
            fragments += rest
            for n, neighbour in enumerate(beside):
                assert neighbour is not None  # two free blocks would be one
                neighbour[2] += rest if len(beside) == 1 else rest // 2 + (rest % 2 if n == 0 else 0)
    holders = [Holder(name, *figures) for name, figures in found.items()]
    holders.sort(key=lambda h: (-h.fragment_bytes - h.unused_bytes, -h.allocated_bytes, h.where))
    return State(entry, reserved, requested, rounding, waiting, fragments, unused, tuple(holders))


def _whole_pages(segment: SegmentInfo, block: BlockInfo, page: int) -> int:
    """Bytes of the pages that lie wholly inside a free block of an expandable segment; 0 for any other."""
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
    """The innermost Python frame that isn't PyTorch's or the standard library's.

    Frames come innermost first. Backward runs in a thread without Python frames; where C++ ones were recorded
    (`stacks="all"`) the node says which operation's backward it is.
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
