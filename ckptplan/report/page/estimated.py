"""The report of an estimate: memory by phase, the tensors at the peak, and the devices with enough memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptplan.core.device import known_devices
from ckptplan.core.estimate import CATEGORIES, Estimate
from ckptplan.core.units import format_bytes
from ckptplan.report.page.render import Attached, Part, Report, View

COLOURS = {
    "weights": "#9aa5b1",
    "gathered weights": "#c9bfb0",
    "buffers": "#bcc5ce",
    "gradients": "#5d6975",
    "optimizer state": "#7a8794",
    "inputs": "#e0d8c8",
    "forward outputs": "#cc79a7",
    "output gradients": "#56b4e9",
    "saved activations": "#0072b2",
    "workspaces and temporaries": "#f0e442",
    "rounding": "#d55e00",
    "fragmentation": "#e69f00",
    "context": "#7a5fd0",
}
_MOST_SHOWN = 30  # rows of a table


def estimate_report(estimate: Estimate, commands: Sequence[str] = ()) -> Report:
    """Return the report of an estimate.

    Parameters
    ----------
    estimate : Estimate
    commands : sequence of str
        How to make it again.
    """
    parts = [part for part in _parts(estimate) if part.lines or len(part.table) > 1]
    view = View(
        title=f"Training on {estimate.device}",
        fits=estimate.fits is not False,
        answer=f"Needs {estimate.answer}.",
        verdict=_verdict(estimate),
        facts=[
            ("device", estimate.device),
            ("peak of tensors", format_bytes(estimate.peak_bytes)),
            ("reserved by the allocator", format_bytes(estimate.reserved_bytes)),
            ("the driver's own", format_bytes(estimate.context_bytes)),
            *((f"batch {k}", batch) for k, batch in enumerate(estimate.batches[:_MOST_SHOWN], 1)),
        ],
        commands=list(commands),
        parts=parts,
        notes=estimate.notes,
    )
    attached = [Attached("estimate.json", "Save the estimate", estimate)]
    return Report("estimate.html", view, _data(estimate), attached)


def _verdict(estimate: Estimate) -> str:
    where = f" of {estimate.peak_stage}" if estimate.peak_stage else ""
    text = f"Most tensors are there in {estimate.peak_phase}{where}: {format_bytes(estimate.peak_bytes)}."
    saved = sum(estimate.saved_bytes.values())
    if saved:
        text += f" {format_bytes(saved)} are saved for backward: what a plan can swap or recompute."
    return text


def _data(estimate: Estimate) -> dict[str, Any]:
    phases = estimate.phases
    rows = [[phase.categories.get(category, 0) for phase in phases] for category in CATEGORIES]
    rows[CATEGORIES.index("fragmentation")] = [max(p.reserved_bytes - p.peak_bytes, 0) for p in phases]
    rows[CATEGORIES.index("context")] = [estimate.context_bytes] * len(phases)
    return {
        "phases": [phase.name for phase in phases],
        "categories": CATEGORIES,
        "bytes": rows,
        "colours": [COLOURS[category] for category in CATEGORIES],
        "capacity": estimate.capacity_bytes,
    }


def _parts(estimate: Estimate) -> list[Part]:
    stages = sorted(estimate.saved_bytes.items(), key=lambda item: -item[1])
    saved = [("stage", "saves for backward")]
    saved += [(name or "(outside of stages)", format_bytes(n)) for name, n in stages[:_MOST_SHOWN] if n]
    devices = [("device", "has", "free with this training")]
    for device in sorted(known_devices().values(), key=lambda device: device.usable_bytes):
        left = device.usable_bytes - estimate.reserved_bytes
        devices.append((
            device.description, format_bytes(device.memory_bytes),
            f"fits, {format_bytes(left)}" if left >= 0 else f"{format_bytes(-left)} too few",
        ))  # fmt: skip
    return [
        Part("In numbers", lines=str(estimate)),
        Part("Saved for backward", table=saved),
        Part("Devices that have enough, if kernels take the same workspaces there", table=devices),
    ]
