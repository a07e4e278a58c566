"""A note on out-of-memory errors that leave a planned step: where it was, what was planned, what there is, what helps.

PyTorch's own error passes through. The note is added where the error leaves a forward of the model, ends the plan, or
ends the process (last_words.py): a kernel's error in backward reaches no code of this package before.

CUDA's messages give the size of the segment that the allocator wanted from the device, not that of the request: 2 or
20 MiB for small ones, for others the request rounded up to a multiple of 2 MiB. So only a size above 20 MiB tells
whether the request was larger than planned.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from ckptplan.core import allocator_settings as allocator
from ckptplan.core.errors import SwapError
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.stage import Phase
from ckptplan.core.units import format_bytes
from ckptplan.runtime.applied import Applied
from ckptplan.runtime.controller import Controller, Place
from ckptplan.runtime.recompute.call import Call
from ckptplan.runtime.swap.record import Record, finish_leaving, start_leaving, start_returning
from ckptplan.tensors.accelerator import capacity_bytes, device_bytes, is_accelerator
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors

_OPTIMIZERS = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
"""The file whose code is around the `step` of each optimizer."""

Doing = Literal["forward", "recompute", "backward", "copy out", "copy back", "update", "after backward"]

_HOST_TEXTS = ("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory")
_DEVICE_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
_REQUESTED = re.compile(rf"(?:[Tt]ried to allocate|Requested size:|Requested +:) {_SIZE}")
_ALLOCATED = re.compile(rf"(?:{_SIZE} is allocated by PyTorch|Currently allocated +: {_SIZE})")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


def exhaustion(error: BaseException) -> BaseException | None:
    """Return `error` if it is an out-of-memory error, or the one that caused a failed swap; None for other errors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return error
    if isinstance(error, SwapError) and error.__cause__ is not None:
        return exhaustion(error.__cause__)
    if isinstance(error, RuntimeError) and any(text in str(error) for text in (*_HOST_TEXTS, *_DEVICE_TEXTS)):
        return error
    return None


def is_host_memory(error: BaseException) -> bool:
    """Whether an out-of-memory error is one of host memory, according to its type and text."""
    return not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in _DEVICE_TEXTS)


def requested_bytes(error: BaseException) -> int | None:
    """Return the size in the message of an out-of-memory error; None if it has none."""
    return _bytes_in(_REQUESTED, error)


def live_bytes(error: BaseException, device: torch.device) -> DeviceBytes | None:
    """Return the memory in use on a CUDA device when `error` was raised; None on the CPU.

    Blocks that were freed since then, with the frames, are counted only in the message's figures.
    """
    if not is_accelerator(device):
        return None
    now = device_bytes(device)
    told, unused = (_bytes_in(pattern, error) or 0 for pattern in (_ALLOCATED, _UNUSED))
    allocated = max(now.allocated_bytes, told)
    gone = allocated - now.allocated_bytes
    return DeviceBytes(now.requested_bytes + gone, allocated, max(now.reserved_bytes, told + unused))


def _bytes_in(pattern: re.Pattern[str], error: BaseException) -> int | None:
    """Return the bytes that a figure in a message stands for."""
    found = pattern.search(str(error))
    if found is None:
        return None
    figure, unit = [group for group in found.groups() if group is not None]
    return int(float(figure) * _UNITS[unit])


def located(error: BaseException, place: Place) -> tuple[Phase, int | None, Doing]:
    """Return the phase, the stage and the activity in which `error` was raised.

    Stage and phase come from the controller. It doesn't see the backward of the loss, which runs before that of any
    stage, nor copies and recomputes for a stage: these are found in the traceback. The stage is None in the code behind
    the last stage.
    """
    # Not by variables of the frames: one that still runs would keep what they were (before Python 3.13).
    codes = {frame.f_code for frame in _frames(error)}
    doing: Doing | None = None
    if _codes_of(start_leaving, finish_leaving) & codes:
        doing = "copy out"
    if _codes_of(start_returning, Record.finish_returning) & codes:
        doing = "copy back"
    if in_update(error):
        return "update", place.stage, "update"
    if (
        place.phase == "forward"
        and not place.inside
        and _codes_of(torch.autograd.backward, torch.autograd.grad) & codes
    ):
        return "backward", None, doing or "backward"
    if doing is None and place.phase == "backward" and _codes_of(Call.__call__) & codes:
        doing = "recompute"
    if place.phase == "update":
        return "update", place.stage, "after backward"
    return place.phase, place.stage, doing or place.phase


def in_update(error: BaseException) -> bool:
    """Whether an error was raised in an optimizer's step, other than in a forward or backward that its closure runs."""
    found, of_steps = False, _codes_of(Controller._run_model, torch.autograd.backward, torch.autograd.grad)
    for frame in _frames(error):
        found = frame.f_code not in of_steps and (found or frame.f_code.co_filename == _OPTIMIZERS)
    return found


def _codes_of(*functions: Callable[..., Any]) -> set[CodeType]:
    return {function.__code__ for function in functions}  # type: ignore[attr-defined]


def _frames(error: BaseException) -> Iterator[FrameType]:
    for link in _chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            yield frame


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, its causes and its contexts."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            waiting.extend((link.__cause__, link.__context__))
            yield link


def add_note(applied: Applied, error: BaseException | None) -> None:
    """Add a note to an out-of-memory error of a planned step, unless it has one; leave other errors unchanged."""
    cause = None if error is None else exhaustion(error)
    if error is None or cause is None or any(text.startswith(_BEGINS) for text in getattr(error, "__notes__", ())):
        return
    try:
        text = _note(applied, error, cause)
    except Exception as failed:  # a failed device raises here, too, which must not hide the first error
        text = f"memory; finding the place failed: {failed}"
    error.add_note(f"{_BEGINS} {text}")


_BEGINS = "ckptplan: out of"


def _note(applied: Applied, error: BaseException, cause: BaseException) -> str:
    plan, device = applied.plan, applied.device
    phase, index, doing = located(error, applied.controller.place)
    live, asked, capacity = live_bytes(cause, device), requested_bytes(cause), capacity_bytes(device)
    on_host = live is not None and is_host_memory(cause)
    where = "in the optimizer's update"
    if phase != "update":
        where = f"in {phase} of stage {plan.decided.stages[-1 if index is None else index]!r}"
    if doing != phase:
        where = "after backward" if doing == "after backward" else f"{where} ({doing})"
    size = f": {format_bytes(asked)} were requested" if asked else ""
    lines = [f"{'host' if on_host else 'device'} memory {where}{size}"]
    found = None if applied.adviser is None else applied.adviser.planned(plan, phase, index)
    planned = plan.peak_bytes if found is None else found[1]
    parts = [f"{format_bytes(planned)} at the peak of {'the step' if found is None else 'this moment'}"]
    parts += [] if found is None else [f"{format_bytes(found[0])} at its start"]
    lines.append(f"planned   {', '.join(parts)}, of a budget of {format_bytes(plan.budget_bytes)}")
    over = None
    if live is not None:
        against = ""
        if not on_host:
            known = asked if asked and asked > allocator.LARGE_SEGMENT_BYTES else 0
            over = live.requested_bytes + known - planned
            against = f", with the request {'+' if over >= 0 else '-'}{format_bytes(abs(over))} to the plan"
        rounding, unused = live.allocated_bytes - live.requested_bytes, live.reserved_bytes - live.allocated_bytes
        lines.append(f"tensors   {format_bytes(live.requested_bytes)}{against}")
        lines.append(
            f"reserved  {format_bytes(live.reserved_bytes)} of at most {format_bytes(capacity or 0)}, including "
            f"{format_bytes(max(rounding, 0))} rounding of blocks and {format_bytes(max(unused, 0))} fragments"
        )
    of_model = format_bytes(unique_bytes(held_tensors(applied.model), device))
    lines.append(f"model     {of_model} of parameters, buffers and gradients")
    lines.append(f"remedy    {_remedy(phase, on_host, over, live, asked, capacity, plan.budget_bytes)}")
    return "\n  ".join(lines)


def _remedy(
    phase: Phase,
    on_host: bool,
    over: int | None,
    live: DeviceBytes | None,
    asked: int | None,
    capacity: int | None,
    budget_bytes: int,
) -> str:
    if on_host:
        return "host memory for swapping ran out: solve with a smaller host_gb="
    if phase == "update":
        return "no plan changes the memory after backward: use an optimizer with less state, or foreach=False"
    if over is None or live is None or capacity is None:
        return "the device has less memory than the budget: solve with a smaller budget_gb="
    if over > 0:
        return f"solve with a budget {format_bytes(over)} smaller, or free other tensors on the device"
    if asked is None:
        return "a library or the driver needed memory outside PyTorch's allocator: solve with a smaller budget_gb="
    # Tensors are within the plan: if the device is large enough for it, or for this request, fragments are the cause.
    if live.requested_bytes + asked <= capacity or budget_bytes <= capacity:
        if "expandable_segments:True" in allocator.allocator_conf():
            return "free memory is in fragments, though expandable segments have few: solve with a smaller budget_gb="
        return "free memory is in fragments: set PYTORCH_ALLOC_CONF=expandable_segments:True"
    return "the device has less memory than the budget: solve with a smaller budget_gb="
