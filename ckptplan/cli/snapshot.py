"""Tables of a recorded memory history."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ckptplan.cli.tables import right
from ckptplan.core.units import format_bytes

if TYPE_CHECKING:  # this imports torch
    from ckptplan.memory.history.summary import CodeLine, DeviceSummary, SettingsTried, State

UNCHECKED = "modelled, not checked against a device"
MOST_HOLDERS = 8  # lines by each of two orders; the JSON has all


def snapshot_tables(summary: DeviceSummary) -> RenderableType:
    """Return the tables of one device: figures, parts of the peak, code that causes them, and other settings."""
    return Group(*_parts(summary))


def _parts(summary: DeviceSummary) -> Iterator[RenderableType]:
    yield _figures(summary)
    yield Text()
    yield _state(summary.at_peak)
    yield Text()
    if summary.at_peak.holders:
        yield _holders(summary.at_peak)
        yield Text()
    if summary.alternatives:
        yield _alternatives(summary)
        yield Text()
        yield Text(_advice(summary), no_wrap=True, overflow="ignore")  # one line, for copying
    for shortage in summary.shortages:
        yield Text(
            f"out of memory at entry {shortage.entry}: {format_bytes(shortage.requested_bytes)} requested,"
            f" {format_bytes(shortage.device_free_bytes)} free on the device, {format_bytes(shortage.reserved_bytes)}"
            " reserved"
        )
    for note in summary.notes:
        yield Text(f"note: {note}")
    yield Text()


def _figures(summary: DeviceSummary) -> Table:
    table = Table(title=f"device {summary.device}", show_header=False, box=None, title_justify="left")
    table.add_row("settings", escape(summary.settings) or "PyTorch's defaults")
    table.add_row("reserved peak", _exact(summary.reserved_peak_bytes))
    table.add_row("allocated peak", _exact(summary.allocated_peak_bytes))
    table.add_row("requested peak", _exact(summary.requested_peak_bytes))
    start = summary.reserved_at_start_bytes
    if start is not None:
        before = f"{format_bytes(start)} reserved before" if start else "from the first allocation on"
        table.add_row("record", f"{summary.entries} entries, {before}")
    if summary.exact is not None:
        same = "every address and every reserved byte" if summary.exact else "not all of them"
        table.add_row("replayed", f"{summary.allocations} allocations; as recorded: {same}")
    return table


def _exact(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _state(state: State) -> Table:
    when = "at the snapshot" if state.entry is None else f"at the peak (entry {state.entry})"
    table = Table("reserved " + when, *right("bytes", "part", no_wrap=False), title_justify="left", box=None)
    for name, nbytes in (
        ("requested by tensors", state.requested_bytes),
        ("rounding of their blocks", state.rounding_bytes),
        ("freed, used by other streams", state.waiting_bytes),
        ("fragments: free in segments in use", state.fragment_bytes),
        ("unused segments, cached", state.unused_bytes),
    ):
        part = nbytes / state.reserved_bytes if state.reserved_bytes else 0.0
        table.add_row(name, format_bytes(nbytes), f"{part:.1%}")
    return table


def _holders(state: State) -> Table:
    columns = right("fragments beside", "unused segments", "alive", "blocks")
    table = Table("made by", *columns, title_justify="left", box=None)
    first = [holder for holder in state.holders if holder.fragment_bytes + holder.unused_bytes][:MOST_HOLDERS]
    most = sorted(state.holders, key=lambda holder: -holder.allocated_bytes)[:MOST_HOLDERS]
    shown = list(dict.fromkeys((*first, *most)))
    for holder in shown:
        table.add_row(escape(_short(holder)), *_held((holder,)))
    rest = [holder for holder in state.holders if holder not in shown]
    if rest:
        table.add_row(f"{len(rest)} other places", *_held(rest))
    return table


def _held(holders: Sequence[CodeLine]) -> tuple[str, ...]:
    return (
        format_bytes(sum(holder.fragment_bytes for holder in holders)),
        format_bytes(sum(holder.unused_bytes for holder in holders)),
        format_bytes(sum(holder.allocated_bytes for holder in holders)),
        str(sum(holder.blocks for holder in holders)),
    )


def _short(holder: CodeLine) -> str:
    """Return the place with at most the last two folders of the file's path."""
    found = re.fullmatch(r"(.*):(\d+ .*)", holder.where)
    if found is None:
        return holder.where
    return "/".join(re.split(r"[/\\]", found[1])[-3:]) + ":" + found[2]


def _alternatives(summary: DeviceSummary) -> Table:
    """Return a table of the recorded settings and the best value of each setting; the JSON has all values."""
    columns = right("reserved peak", "against recorded settings")
    table = Table("settings, same requests", *columns, title_justify="left", box=None)
    failed = any(found.fits_failed_requests is not None for found in summary.alternatives)
    if failed:
        table.add_column("failed requests", no_wrap=True)
    table.add_column("", no_wrap=True)
    recorded = summary.alternatives[0].reserved_peak_bytes
    best: dict[str, SettingsTried] = {}
    for found in sorted(summary.alternatives, key=_peak):
        best.setdefault(found.change.partition(":")[0], found)
    for found in summary.alternatives:
        if found not in best.values():
            continue
        peak = found.reserved_peak_bytes
        more = "" if peak is None or recorded is None or not found.change else _difference(peak - recorded)
        cells = [found.change or "as recorded", "out of memory" if peak is None else format_bytes(peak), more]
        if failed:
            cells.append("would fit" if found.fits_failed_requests else "fail")
        table.add_row(*cells, "" if found.checked else UNCHECKED)
    return table


def _peak(found: SettingsTried) -> float:
    return math.inf if found.reserved_peak_bytes is None else found.reserved_peak_bytes


def _difference(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"


def _advice(summary: DeviceSummary) -> str:
    best = summary.advice
    if best is None or best.reserved_peak_bytes is None:
        return "no setting reserves at least 1 % less for these requests"
    base = summary.alternatives[0].reserved_peak_bytes
    assert base is not None
    return (
        f'use PYTORCH_CUDA_ALLOC_CONF="{best.conf}"{_how(best, summary.device)}: '
        f"{format_bytes(base - best.reserved_peak_bytes)} less" + ("" if best.checked else f" ({UNCHECKED})")
    )


def _how(found: SettingsTried, device: int) -> str:
    """Return the call that a garbage collection threshold needs, if it is one."""
    if not found.change.startswith("garbage_collection_threshold") or found.limit_bytes is None:
        return ""
    return (
        f" and call torch.cuda.set_per_process_memory_fraction({found.limit_bytes} /"
        f" torch.cuda.get_device_properties({device}).total_memory, {device})"
    )
