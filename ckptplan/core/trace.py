"""Trace: the busy intervals of each lane and the bytes on the device in one step, measured and predicted.

Written in the JSON object form of the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open: one
process each for the measured and the predicted step, one thread per lane, complete events ("X") for spans, counter
events ("C") for memory, metadata events ("M") for names; times in microseconds.

Reference: Trace Event Format, Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.link import Tier
from ckptplan.core.units import format_bytes, format_seconds

Lane = Literal["compute", "out", "in", "disk out", "disk in"]
Drawn = Literal["forward", "recompute", "backward", "stall", "out", "in"]
_LANES: dict[Lane, str] = {
    "compute": "compute",
    "out": "device to host",
    "in": "host to device",
    "disk out": "device to disk",
    "disk in": "disk to device",
}
_ALWAYS: tuple[Lane, ...] = ("compute", "out", "in")
_COLORS = {"stall": "terrible", "recompute": "bad"}
"""Colors by names that the viewers define."""


def lane_of(way: Literal["out", "in"], tier: Tier) -> Lane:
    """Return the lane of copies to or from a tier."""
    if tier == "disk":
        return "disk out" if way == "out" else "disk in"
    return way


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of a lane. Spans of a lane are disjoint, or one is inside the other.

    Attributes
    ----------
    lane : "compute", "out", "in", "disk out" or "disk in"
        Compute, or copies in one direction to or from one tier.
    what : "forward", "recompute", "backward", "stall", "out" or "in"
        The work in it; "stall" is waiting.
    stage : str
        Name of the stage; empty for a measured copy, since several stages may hold the storage.
    start_s, end_s : float
        Seconds at which it begins and ends.
    nbytes : int
        Bytes copied; 0 if nothing is.
    """

    lane: Lane
    what: Drawn
    stage: str
    start_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The spans of one step, and its bytes on the device.

    Attributes
    ----------
    spans : tuple of Span
        What ran and what was copied.
    memory : tuple of (float, int)
        Seconds, and bytes on the device from then on; empty: not recorded.
    step_s : float
        Time of the step.
    """

    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]
    step_s: float

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the bytes on the device; None if they weren't recorded."""
        return max((nbytes for _, nbytes in self.memory), default=None)

    def bytes_over(self, lane: Lane) -> int:
        """Return the bytes copied on a lane."""
        return sum(span.nbytes for span in self.spans if span.lane == lane)


@dataclass(frozen=True, slots=True)
class Trace:
    """A measured step and its prediction.

    Attributes
    ----------
    measured : DrawnStep
    predicted : DrawnStep or None
        None if the profile isn't known.
    notes : tuple of str
        Conditions of the measurement.
    """

    measured: DrawnStep
    predicted: DrawnStep | None
    notes: tuple[str, ...] = ()

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the JSON form, by process and time."""
        return [event for pid, (name, step) in enumerate(self._steps, start=1) for event in _events(pid, name, step)]

    @property
    def _steps(self) -> list[tuple[str, DrawnStep]]:
        steps = (("measured", self.measured), ("predicted", self.predicted))
        return [(name, step) for name, step in steps if step is not None]

    def save(self, path: str | Path) -> None:
        """Write the JSON.

        Raises
        ------
        InvalidInputError
            If the file can't be written.
        """
        data = {"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": {"notes": "; ".join(self.notes)}}
        try:
            Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"the trace can't be written to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that `save` wrote.

        Raises
        ------
        InvalidInputError
            If it is another file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            steps = [_step_of(data["traceEvents"], pid) for pid in (1, 2)]
            notes = tuple(note for note in data["otherData"]["notes"].split("; ") if note)
        except OSError as error:
            raise InvalidInputError(f"{path} can't be read: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidInputError(f"{path} is not a trace that `ckptplan trace` wrote: {error!r}") from error
        if steps[0] is None:
            raise InvalidInputError(f"{path} is not a trace that `ckptplan trace` wrote: it has no measured step")
        return cls(steps[0], steps[1], notes)

    def __str__(self) -> str:
        lines = []
        for name, step in self._steps:
            peak = "not recorded" if step.peak_bytes is None else format_bytes(step.peak_bytes)
            stall_s = sum(span.end_s - span.start_s for span in step.spans if span.what == "stall")
            moved = sum(step.bytes_over(lane) for lane in ("out", "disk out"))
            lines.append(
                f"{name:<10} step {format_seconds(step.step_s)}, of which waiting {format_seconds(stall_s)}; peak "
                f"{peak}; moved out {format_bytes(moved)}"
            )
        return "\n".join([*lines, *self.notes])


def _step_of(events: list[dict[str, Any]], pid: int) -> DrawnStep | None:
    """Return a step by the events of its process; None if there are none."""
    own = [event for event in events if event["pid"] == pid]
    if not own:
        return None
    shown = {text: lane for lane, text in _LANES.items()}
    lanes = {e["tid"]: shown[e["args"]["name"]] for e in own if e["name"] == "thread_name"}
    spans = tuple(
        Span(
            lanes[event["tid"]], event["cat"], str(event["args"]["stage"]), event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6, int(event["args"].get("bytes", 0)),
        )
        for event in own
        if event["ph"] == "X"
    )  # fmt: skip
    memory = tuple((event["ts"] / 1e6, int(event["args"]["bytes"])) for event in own if event["ph"] == "C")
    if not all(
        map(math.isfinite, [*(s for span in spans for s in (span.start_s, span.end_s)), *(s for s, _ in memory)])
    ):
        raise ValueError("a time is not a finite number")
    return DrawnStep(spans, memory, max((span.end_s for span in spans), default=0.0))


def _events(pid: int, name: str, step: DrawnStep) -> list[dict[str, Any]]:
    used = {span.lane for span in step.spans}
    lanes = [lane for lane in _LANES if lane in _ALWAYS or lane in used]
    out: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"{name} step"}},
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]
    for tid, lane in enumerate(lanes, start=1):
        out.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": _LANES[lane]}})
        out.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    timed: list[dict[str, Any]] = []
    for span in step.spans:
        start = span.start_s * 1e6
        event: dict[str, Any] = {
            "ph": "X", "pid": pid, "tid": lanes.index(span.lane) + 1, "ts": start, "dur": span.end_s * 1e6 - start,
            "name": f"{span.what} {span.stage}".rstrip(), "cat": span.what, "args": {"stage": span.stage},
        }  # fmt: skip
        if span.nbytes:
            event["args"]["bytes"] = span.nbytes
        if span.what in _COLORS:
            event["cname"] = _COLORS[span.what]
        timed.append(event)
    timed += [
        {"ph": "C", "pid": pid, "tid": 0, "ts": at_s * 1e6, "name": "device memory", "args": {"bytes": nbytes}}
        for at_s, nbytes in step.memory
    ]
    # A span comes before those inside it.
    return out + sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
