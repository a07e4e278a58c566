"""Measure a real step: peak bytes by the allocator's own counters, and wall time."""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import os
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile, record_function

from ckptplan.distributed import parallel_of
from ckptplan.tensors import accelerator
from ckptplan.tensors.private import TorchDispatchMode
from ckptplan.tensors.quantized import named_inside
from ckptplan.tensors.storages import storages_of, tensors_in
from ckptplan.training.step import TrainingStep

T = TypeVar("T")


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the tensors in the optimizer's state, in further attributes of it, and in its groups beside parameters."""
    if optimizer is None:
        return []
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    attributes = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
    held = [dict(enumerate(optimizer.state.values())), *optimizer.param_groups, *attributes]
    return [t for t in tensors_in(held) if id(t) not in own]


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the model's parameters, buffers and gradients, also those that a sharded model hasn't reduced.

    With them come the tensors that quantized parameters have in attributes.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None] + parallel_of(model).whole_gradients()
    beside = [t for _, t, whole in named_inside(model, buffers=False) if t is not whole]
    return [*parameters, *model.buffers(), *gradients, *beside]


@contextlib.contextmanager
def no_cycles_collected() -> Iterator[None]:
    """Collect cyclic garbage, and turn collection off inside, where it would free bytes at random moments."""
    gc.collect()
    with collection_off():
        yield


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """Suspend the collection of cyclic garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _without_kineto_lines() -> Iterator[None]:
    """Drop the lines "USDT:..." that PyTorch's profiler writes to file descriptor 2 when it starts and stops."""
    try:
        stderr = os.dup(2)
    except OSError:  # a process without one
        yield
        return
    with tempfile.TemporaryFile() as lines:
        os.dup2(lines.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            lines.seek(0)
            os.write(2, b"".join(line for line in lines if not line.startswith(b"USDT:")))


def recorded_allocations(run: Callable[[], Any]) -> tuple[list[tuple[int, int]], dict[str, tuple[int, int]]]:
    """Return what `recorded_blocks` does, without the addresses."""
    events, spans = recorded_blocks(run)
    return [(at, nbytes) for at, nbytes, _ in events], spans


def recorded_blocks(run: Callable[[], Any]) -> tuple[list[tuple[int, int, int]], dict[str, tuple[int, int]]]:
    """Record the CPU allocations (+) and their releases (-) of the calling thread while `run` runs.

    Returns
    -------
    list of (int, int, int)
        Time in ns, bytes and address, in order. Releases of what was allocated before are none of them.
    dict
        Begin and end, in ns, of every `torch.profiler.record_function` inside, by name.
    """
    with recording() as recorded:
        run()
    return blocks_of(recorded)


class Renewed(Protocol):
    """An object with memory that is released and taken again while steps run."""

    def renew(self) -> None:
        """Take other memory for the same values."""


RENEWED: weakref.WeakSet[Renewed] = weakref.WeakSet()
"""The live ones. They take new memory when a recording begins, since releases of earlier memory aren't seen."""
_RENEWING = "ckptplan.renewing"


@contextlib.contextmanager
def recording() -> Iterator[Any]:
    """Record the CPU allocations of the calling thread inside, for `blocks_of`. Recordings don't nest."""
    # Not `torch.profiler.profile`, which makes more objects of each event: that takes longer than most steps here.
    recorded: Any = profile(profile_memory=True)
    with collection_off(), warnings.catch_warnings():
        # Blocks from before, which don't count.
        warnings.filterwarnings("ignore", ".*Memory block of unknown size")
        with _without_kineto_lines():
            recorded.__enter__()
        try:
            if renewed := list(RENEWED):
                with record_function(_RENEWING):
                    for each in renewed:
                        each.renew()
            yield recorded
        finally:
            with _without_kineto_lines():
                recorded.__exit__(*sys.exc_info())


def blocks_of(*recordings: Any) -> tuple[list[tuple[int, int, int]], dict[str, tuple[int, int]]]:
    """Return what `recorded_blocks` does, of recordings in turn: later ones have releases of earlier ones' blocks."""
    found: list[tuple[int, int, int]] = []
    spans: dict[str, tuple[int, int]] = {}
    later: list[Any] = []
    renewing: list[tuple[int, int]] = []
    for recorded in recordings:
        assert recorded.kineto_results is not None
        later += reversed(recorded.kineto_results.experimental_event_tree())
    while later:
        e = later.pop()
        if e.tag == _EventType.Allocation:
            if e.extra_fields.device.type == "cpu":
                found.append((e.start_time_ns, e.extra_fields.alloc_size, e.extra_fields.ptr))
        elif e.tag == _EventType.TorchOp and e.extra_fields.scope == RecordScope.USER_SCOPE:
            if e.name == _RENEWING:
                renewing.append((e.start_time_ns, e.end_time_ns))
            else:
                spans[e.name] = (e.start_time_ns, e.end_time_ns)
        later += reversed(e.children)
    found.sort(key=lambda event: event[0])  # stable: simultaneous events stay in order of occurrence
    events: list[tuple[int, int, int]] = []
    alive: dict[int, int] = {}
    for at, nbytes, address in found:
        # The profiler knows blocks by addresses, and goes on knowing those of earlier recordings: another block that
        # has such an address now is released with the bytes that the earlier one had.
        if nbytes > 0:
            if address in alive:  # released between two recordings
                events.append((at, -alive[address], address))
            alive[address] = nbytes
        elif alive.pop(address, None) is None:
            continue
        if not any(begin <= at <= end for begin, end in renewing):
            events.append((at, nbytes, address))
    return events, spans


def peaks_within(events: list[tuple[int, int]], spans: Mapping[T, tuple[int, int]]) -> dict[T, int]:
    """Return, per span, the most bytes allocated at once above the level at its beginning.

    Parameters
    ----------
    events : list of (int, int)
        Time in ns and bytes, in the order of time, as from `recorded_allocations`.
    spans : mapping
        Begin and end in ns, both included.
    """
    times = [at for at, _ in events]
    peaks = {}
    for name, (begin, end) in spans.items():
        inside = events[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        peaks[name] = max(itertools.accumulate((nbytes for _, nbytes in inside), initial=0))
    return peaks


def peak_above_start(run: Callable[[], Any]) -> int:
    """Return the most bytes on the CPU above the level at the start while `run` runs, by the allocator's events."""
    return max(itertools.accumulate((nbytes for _, nbytes in recorded_allocations(run)[0]), initial=0))


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Most bytes that steps of one model held at once, by each counter of the device's allocator.

    Attributes
    ----------
    requested_bytes : int
        Tensors by their own sizes; on CUDA also workspaces that can't be separated (see `workspace_bytes`).
    allocated_bytes, reserved_bytes : int or None
        On CUDA, bytes in the allocator's blocks, and in its segments. None on the CPU, whose allocator has neither.
    other_bytes : int
        On CUDA, bytes requested before the step that aren't the model's: other tensors, gradients from before. They
        count in none of the above. Their rounding and the fragments around them do, so the above are never too small.
    workspace_bytes : int or None
        On CUDA, bytes of the workspaces that cuBLAS took in these steps and keeps: a part of the allocated and reserved
        bytes, not of the requested ones. None if they can't be separated, for instance because captured CUDA graphs go
        on using them.
    """

    requested_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    other_bytes: int = 0
    workspace_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Bytes that must fit the budget: on CUDA the reserved ones, otherwise the tensors."""
        return self.requested_bytes if self.reserved_bytes is None else self.reserved_bytes


def step_peaks(
    run: Callable[[], Any],
    device: torch.device,
    held_bytes: int,
    between: Callable[[], Any] = lambda: None,
    *,
    steps: int = 2,
) -> StepPeaks:
    """Return the peaks of steps on the device while `run` runs; `held_bytes` are there at the start.

    On the CPU these are the allocator's events of one step. On CUDA they are the allocator's peaks over this many
    `steps`, with calls of `between` between them, because the second step of a training finds the segments that the
    first left; where `run` updates, the third finds those of a step with the optimizer's state. The steps begin with an
    empty cache and without cuBLAS's workspaces.
    """
    if not accelerator.is_accelerator(device):
        return StepPeaks(held_bytes + peak_above_start(run))
    with no_cycles_collected():
        accelerator.synchronize(device)
        accelerator.clear_library_workspaces(device)
        accelerator.empty_cache(device)
        other = max(accelerator.device_bytes(device).requested_bytes - held_bytes, 0)
        accelerator.reset_peaks(device)
        run()
        for _ in range(steps - 1):
            between()
            run()
        accelerator.synchronize(device)
        peak = accelerator.device_bytes(device, "peak")
        workspace = accelerator.clear_library_workspaces(device)
    # The second step had all workspaces from its start, so they were held at the peak.
    requested = peak.requested_bytes - other - (workspace or 0)
    return StepPeaks(requested, peak.allocated_bytes - other, peak.reserved_bytes - other, other, workspace)


def run_step(step: TrainingStep, update: Callable[[], object] | None = None) -> torch.Tensor:
    """Run forward, loss, backward and `update`, holding the output until the end like a caller's; return the loss."""
    output, loss = step.forward()
    loss.backward()
    if update is not None:
        update()
    del output
    return loss.detach()


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that one call takes, including the device's work."""
    accelerator.synchronize(device)
    begin = time.perf_counter()
    run()
    accelerator.synchronize(device)
    return time.perf_counter() - begin


class Outside(TorchDispatchMode):
    """Collects the tensors that operations read and that none of them made, one per storage.

    Parameters
    ----------
    lists : bool
        Also collect those that `torch.tensor` has just made of lists.
    """

    def __init__(self, *, lists: bool = True) -> None:
        super().__init__()
        self._lists = lists
        self._made: set[int] = set()
        self._read: dict[int, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that were read but not made inside."""
        return list(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)) if self._lists or func is not _LIFTED else ():
            for storage in storages_of(tensor):
                if storage._cdata not in self._made:
                    self._read.setdefault(storage._cdata, tensor)
        result = func(*args, **kwargs)
        self._made.update(s._cdata for t in tensors_in(result) for s in storages_of(t) if s._cdata not in self._read)
        return result


_LIFTED = torch.ops.aten.lift_fresh.default


def read_from_outside(step: TrainingStep) -> list[torch.Tensor]:
    """Return the inputs of a step and what its loss reads besides, or all that a step's callable reads; runs it."""
    mode, made = Outside(lists=False), set[int]()

    def watched(output: Any) -> torch.Tensor:
        made.update(s._cdata for t in tensors_in(output) for s in storages_of(t))
        with mode:
            return step.loss_fn(output)

    # Watching a compiled forward would change its path.
    if step.fn is None:
        run_step(replace(step, loss_fn=watched))
    else:
        with mode:
            run_step(step)
    beside = (t for t in mode.tensors if t.grad_fn is None and made.isdisjoint(s._cdata for s in storages_of(t)))
    return [*step.tensors(), *beside]
