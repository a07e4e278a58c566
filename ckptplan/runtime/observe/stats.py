"""Statistics of an applied plan, beside the planned values."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ckptplan.core.link import Tier
from ckptplan.core.measured import Copied, DeviceBytes, StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes, format_seconds, format_table
from ckptplan.runtime.observe.meter import StepTimes, median_copied, median_step
from ckptplan.runtime.swap.stores import Store
from ckptplan.tensors.accelerator import device_bytes, empty_cache, is_accelerator, reset_peaks


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage's times in a step, as far as a running step can measure them (`core.measured.backward_groups`).

    Attributes
    ----------
    name, option : str
    runs, planned_runs : int
        Number of forwards in all, and planned per step; 0 for glue.
    measured : StageTimes or None
        Medians of the steps since the plan was applied; None before the first measured step.
    predicted : StageTimes or None
        Times by the plan; None if the profile isn't known (pass `profile=` to `apply`).
    """

    name: str
    option: str
    runs: int
    planned_runs: int
    measured: StageTimes | None
    predicted: StageTimes | None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes of one tier's swap space.

    Attributes
    ----------
    tier : "host" or "disk"
    planned_bytes : int
        Bytes that the plan moves there.
    reserved_bytes, peak_bytes : int
        Bytes held by the store, and most in use at once.
    """

    tier: str
    planned_bytes: int
    reserved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and measurements of an applied plan so far, beside its values for one step.

    Attributes
    ----------
    forwards : int
        Number of training forwards.
    recomputed_stages, planned_recomputed_stages : int
        Number of recomputed stages in all, and planned per step.
    swapped_out_bytes, swapped_in_bytes, planned_swapped_bytes : int
        Bytes copied out and in in all, and planned per step (either way).
    runs, planned_runs : tuple of int
        Per stage, number of forwards in all, including first runs, and planned per step; 0 for glue.
    host_wait_s : float
        Seconds that the calling thread waited for copies. On CUDA the device waits, and this stays near 0.
    other_paths : int
        Runs of a stage that saved other storages than profiled. In these runs positions have no meaning, and sizes
        decide which storages leave. Smaller inputs may cause them; with the inputs that the plan was made for, they are
        a fault of the profile.
    differences : mapping of str to int
        Number of differences from the planned step, by kind (docs/runtime.md lists the kinds).
    checked_forwards, compared_tensors : int
        Forwards that were checked with their backwards (`apply(..., check=)`), and tensors compared in them.
    timed_steps : int
        Number of steps that the times below are medians of: the last ones of the present plan, without its first.
    step_s : float or None
        Measured seconds from the beginning of forward to the end of backward; None without a timed step.
    planned_step_s : float
    stages : tuple of StageStats
        Statistics per stage; empty in results that have counts only.
    host_copies, disk_copies : Copied
        Copies of a timed step.
    pools : tuple of PoolStats
    peak_bytes, reserved_bytes : int or None
        On CUDA, most bytes that this process had requested, and most that its allocator had reserved, since this plan
        was applied or since a later `torch.cuda.reset_peak_memory_stats`. None if not known, as on the CPU, where
        `verify` and `handle.trace` measure the peak.
    planned_peak_bytes, planned_reserved_bytes : int or None
    earlier : DeviceBytes or None
        On CUDA, the peaks of PyTorch's counters before applying the plan reset them.
    """

    forwards: int
    recomputed_stages: int
    planned_recomputed_stages: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    planned_swapped_bytes: int
    runs: tuple[int, ...]
    planned_runs: tuple[int, ...]
    host_wait_s: float
    other_paths: int = 0
    differences: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checked_forwards: int = 0
    compared_tensors: int = 0
    timed_steps: int = 0
    step_s: float | None = None
    planned_step_s: float = 0.0
    stages: tuple[StageStats, ...] = ()
    host_copies: Copied = dataclasses.field(default_factory=Copied)
    disk_copies: Copied = dataclasses.field(default_factory=Copied)
    pools: tuple[PoolStats, ...] = ()
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    planned_peak_bytes: int = 0
    planned_reserved_bytes: int | None = None
    earlier: DeviceBytes | None = None

    def since(self, earlier: Stats) -> Stats:
        """Return the counts since `earlier`; times and peaks are the present ones."""
        counted = (
            "forwards", "recomputed_stages", "swapped_out_bytes", "swapped_in_bytes", "host_wait_s", "other_paths",
            "checked_forwards", "compared_tensors",
        )  # fmt: skip
        added = {name: getattr(self, name) - getattr(earlier, name) for name in counted}
        same = len(self.runs) == len(earlier.runs)  # otherwise another plan was applied since, with new counts
        runs = tuple(a - b for a, b in zip(self.runs, earlier.runs, strict=True)) if same else self.runs
        new = {kind: n - earlier.differences.get(kind, 0) for kind, n in self.differences.items()}
        return dataclasses.replace(self, runs=runs, differences={k: n for k, n in new.items() if n}, **added)

    def measured_s(self, account: str) -> float | None:
        """Return the seconds of "forward", "recompute", "backward" or "stall" over all stages; None if not timed."""
        found = [getattr(s.measured, f"{account}_s") for s in self.stages if s.measured is not None]
        return sum(found) if found else None

    def predicted_s(self, account: str) -> float | None:
        """Return the predicted sum over the stages, as `measured_s`; None if the profile isn't known."""
        found = [getattr(s.predicted, f"{account}_s") for s in self.stages if s.predicted is not None]
        return sum(found) if found else None

    def __str__(self) -> str:
        if not self.stages:
            return "\n".join(self._counts())
        lines = [*self._counts(), *self._bytes()]
        if self.step_s is None:
            lines.append(
                f"step: planned {format_seconds(self.planned_step_s)}; no step is timed yet (the first is left out)"
            )
            return "\n".join(lines)
        return "\n".join([*lines, *self._times()])

    def _counts(self) -> list[str]:
        n = max(self.forwards, 1)
        lines = [
            f"{self.forwards} training forwards",
            f"recomputed stages per forward: {self.recomputed_stages / n:g} (planned {self.planned_recomputed_stages})",
            f"swapped out per forward: {format_bytes(self.swapped_out_bytes / n)} "
            f"(planned {format_bytes(self.planned_swapped_bytes)}), in {format_bytes(self.swapped_in_bytes / n)}",
            f"waited for copies per forward: {format_seconds(self.host_wait_s / n)}",
        ]
        if self.other_paths:
            lines.append(f"runs of stages that saved something else than profiled: {self.other_paths}")
        if self.differences:
            found = ", ".join(f"{kind} {count}" for kind, count in sorted(self.differences.items()))
            lines.append(f"differences from the planned step: {found}")
        if self.checked_forwards:
            lines.append(
                f"checked forwards: {self.checked_forwards}; {self.compared_tensors} tensors were as in forward"
            )
        return lines

    def _bytes(self) -> list[str]:
        lines = [
            f"{pool.tier} swap space: {format_bytes(pool.peak_bytes)} used at most of "
            f"{format_bytes(pool.reserved_bytes)} (planned {format_bytes(pool.planned_bytes)})"
            for pool in self.pools
        ]
        if self.peak_bytes is None:
            return [
                *lines,
                f"peak: planned {format_bytes(self.planned_peak_bytes)}; a running step can't measure it here, "
                "use ckptplan.verify or handle.trace",
            ]
        planned, reserved = self.planned_reserved_bytes, self.reserved_bytes
        return [
            *lines,
            f"peak: {format_bytes(self.peak_bytes)} (planned {format_bytes(self.planned_peak_bytes)}); reserved "
            + ("unknown" if reserved is None else format_bytes(reserved))
            + ("" if planned is None else f" of {format_bytes(planned)}"),
        ]

    def _times(self) -> list[str]:
        assert self.step_s is not None
        error = f" ({self.step_s / self.planned_step_s - 1:+.1%})" if self.planned_step_s else ""
        lines = [
            f"step: {format_seconds(self.step_s)}, planned {format_seconds(self.planned_step_s)}{error}; median of "
            f"{self.timed_steps}"
        ]
        for tier, copied in (("host", self.host_copies), ("disk", self.disk_copies)):
            if copied.out_bytes or copied.in_bytes:
                lines.append(
                    f"to {tier}: {_rate(copied.out_bytes, copied.out_s)}, back {_rate(copied.in_bytes, copied.in_s)}"
                )
        accounts = ("forward", "recompute", "backward", "stall")
        rows: list[tuple[str, ...]] = [("stage", "option", *accounts)]
        rows += [
            (stage.name, stage.option, *(_beside(stage, account) for account in accounts)) for stage in self.stages
        ]
        rows.append(("all", "", *(_pair(self.measured_s(a), self.predicted_s(a)) for a in accounts)))
        beside = "" if self.predicted_s("forward") is None else " (planned)"
        return [*lines, "", f"per step, measured{beside}:", *format_table(rows)]


def _rate(nbytes: int, taken_s: float) -> str:
    return f"{format_bytes(nbytes)}" + (f" at {format_bytes(nbytes / taken_s)}/s" if taken_s else "")


def _beside(stage: StageStats, account: str) -> str:
    measured = None if stage.measured is None else getattr(stage.measured, f"{account}_s")
    return _pair(measured, None if stage.predicted is None else getattr(stage.predicted, f"{account}_s"))


def _pair(measured: float | None, predicted: float | None) -> str:
    if not measured and not predicted:
        return "–"
    text = "?" if measured is None else format_seconds(measured)
    return text if predicted is None else f"{text} ({format_seconds(predicted)})"


def stage_stats(
    counted: Stats,
    plan: Plan,
    steps: Sequence[StepTimes],
    predicted: tuple[StageTimes, ...] | None,
    stores: Mapping[Tier, Store],
    peaks: Peaks,
) -> Stats:
    """Return `counted` with the times of `steps`, the use of `stores` and the `peaks`, and the values of `plan`."""
    followed = plan.decided
    measured = median_step(steps, len(followed.stages)) if steps else None
    planned = {"host": plan.host_bytes, "disk": plan.disk_bytes}
    return dataclasses.replace(
        counted,
        timed_steps=len(steps),
        step_s=statistics.median(step.step_s for step in steps) if steps else None,
        planned_step_s=plan.step_s,
        stages=tuple(
            StageStats(
                name,
                choice.option,
                counted.runs[i],
                counted.planned_runs[i],
                None if measured is None else measured[i],
                None if predicted is None else predicted[i],
            )
            for i, (name, choice) in enumerate(zip(followed.stages, followed.choices, strict=True))
        ),
        host_copies=median_copied([step.host for step in steps]) if steps else Copied(),
        disk_copies=median_copied([step.disk for step in steps]) if steps else Copied(),
        pools=tuple(
            PoolStats(tier, planned[tier], store.reserved_bytes, store.peak_bytes)
            for tier, store in stores.items()
            if planned[tier]
        ),
        peak_bytes=peaks.bytes,
        reserved_bytes=peaks.reserved_bytes,
        planned_peak_bytes=plan.peak_bytes,
        planned_reserved_bytes=plan.reserved_bytes,
        earlier=peaks.earlier,
    )


class Peaks:
    """Most bytes on the device since this object was made.

    PyTorch has one set of peak counters per process, and a peak from before would hide a lower one that follows. So on
    CUDA the allocator's unused blocks are returned to the device, and the counters are reset; their former values are
    kept. On the CPU the peak is known only after a traced step.

    Parameters
    ----------
    former : Peaks, optional
        The peaks of the plan that was replaced.

    Attributes
    ----------
    traced : int or None
        The peak of a recorded step.
    earlier : DeviceBytes or None
        On CUDA, the peaks before.
    """

    def __init__(self, device: torch.device, former: Peaks | None = None) -> None:
        self._device = device
        self.traced: int | None = None
        self.earlier: DeviceBytes | None = None
        if is_accelerator(device):
            empty_cache(device)
            found = device_bytes(device, "peak")
            before = found if former is None or former.earlier is None else former.earlier
            self.earlier = DeviceBytes(*map(max, dataclasses.astuple(found), dataclasses.astuple(before)))
            reset_peaks(device)

    @property
    def bytes(self) -> int | None:
        """Most bytes requested; None if not known."""
        return device_bytes(self._device, "peak").requested_bytes if is_accelerator(self._device) else self.traced

    @property
    def reserved_bytes(self) -> int | None:
        """Most bytes reserved on CUDA."""
        return device_bytes(self._device, "peak").reserved_bytes if is_accelerator(self._device) else None
