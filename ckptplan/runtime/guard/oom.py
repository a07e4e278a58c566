"""When a planned step runs out of memory: tell it from other errors, measure, and undo the step.

NOTE [Undoing a step]
1. What the step's frames hold is dropped with the frames (the traceback keeps its lines). The graph goes with them, and
   with the graph every swapped record and recomputed frame, in whatever state (NOTE [States of a swapped storage]).
2. A gradient that was None before the step is None again. One that the step dropped itself (`zero_grad`) stays None.
   One that the step zeroed in place is zeroed. One that the step left alone is left alone. One to which the step had
   begun to add can't be had back without a copy: all become None, and the step isn't repeatable.
3. Buffers get back the objects and values they had. Copies are kept of those that a step updates, in the first step
   of all.
4. State that an optimizer made in the step is dropped. If parameters or older state were written to, in an update or
   in place, they stay as they are, and the step isn't repeatable. Writes through `.data` don't show.
5. Random generators are set back only for a step that is to run again.

NOTE [What was asked for]
CUDA's messages tell the new segment that the allocator wanted from the device, not the request it was for: 2 MiB for up
to 1 MiB, 20 MiB (a setting) for more than that and less than 10 MiB, above it the request rounded up to 2 MiB. They
round to two decimals of their unit, 10 MiB where that is a GiB. So a request is known as a range. That there is more
than was planned is said by its lower end; what to give up so that it would fit, by its upper end. That
`roundup_power2_divisions` rounds requests is not seen.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import psutil
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckptplan.core.allocator_settings import (
    LARGE_SEGMENT_BYTES,
    MIB,
    MIN_BLOCK_BYTES,
    MIN_LARGE_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    allocator_conf,
)
from ckptplan.core.errors import SwapError
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.shortage import Doing
from ckptplan.core.stage import Phase
from ckptplan.runtime.accelerator import device_bytes, empty_cache, is_accelerator
from ckptplan.runtime.controller import Place
from ckptplan.runtime.observe.measure import held_tensors, unique_bytes
from ckptplan.runtime.recompute.call import Call
from ckptplan.runtime.state.restore import random_state
from ckptplan.runtime.swap.session import Record, finish_leaving, start_leaving, start_returning, version_of

_HOST_TEXTS = ("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory")
_DEVICE_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
_SEGMENT = re.compile(rf"(?:CUDA|HIP) out of memory\..*?(?:Tried to allocate|Requested size:) {_SIZE}", re.DOTALL)
_REQUESTED = re.compile(rf"(?:[Tt]ried to allocate|Requested +:) {_SIZE}")  # the CPU's allocator, and cudaMallocAsync
_ALLOCATED = re.compile(rf"(?:{_SIZE} is allocated by PyTorch|Currently allocated +: {_SIZE})")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_OWN_SEGMENT_LEAST = MIN_LARGE_BYTES - MIN_BLOCK_BYTES + 1  # smaller ones round up to less than that


def exhaustion(error: BaseException) -> BaseException | None:
    """The out-of-memory error that `error` is, or that made a copy of a swapped storage fail; None: it is another."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return error
    if isinstance(error, SwapError) and error.__cause__ is not None:
        return exhaustion(error.__cause__)
    if isinstance(error, RuntimeError) and any(text in str(error) for text in (*_HOST_TEXTS, *_DEVICE_TEXTS)):
        return error
    return None


def is_host_memory(error: BaseException) -> bool:
    """Whether an out-of-memory error speaks of host memory, by its type and text."""
    return not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in _DEVICE_TEXTS)


def requested_bytes(error: BaseException) -> tuple[int, int] | None:
    """Least and most that was asked for in vain, where the message says it (NOTE [What was asked for])."""
    segment = _bytes_in(_SEGMENT, error)
    if segment is None:
        return _bytes_in(_REQUESTED, error)
    step = ROUND_LARGE_BYTES
    low, high = -(-segment[0] // step) * step, segment[1] // step * step
    if low > high:
        return segment  # no segment has that size: the request itself
    if high == SMALL_SEGMENT_BYTES:
        return 1, SMALL_BYTES
    shared = re.search(r"large_segment_size_mb:(\d+)", allocator_conf())
    in_common = MIB * int(shared[1]) if shared else LARGE_SEGMENT_BYTES
    least = SMALL_BYTES + 1 if low <= in_common <= high else max(low - step + 1, _OWN_SEGMENT_LEAST)
    return least, high


def live_bytes(error: BaseException, device: torch.device) -> DeviceBytes | None:
    """What a CUDA device held when `error` arose; None on the CPU.

    Blocks that went with the frames since then are in the message's figures alone.
    """
    if not is_accelerator(device):
        return None
    now = device_bytes(device)
    told, unused = ((_bytes_in(pattern, error) or (0, 0))[0] for pattern in (_ALLOCATED, _UNUSED))
    allocated = max(now.allocated_bytes, told)
    gone = allocated - now.allocated_bytes
    return DeviceBytes(now.requested_bytes + gone, allocated, max(now.reserved_bytes, told + unused))


def process_bytes() -> int:
    """The process's resident set."""
    return int(psutil.Process().memory_info().rss)


def model_bytes(model: nn.Module, device: torch.device) -> int:
    """Parameters, buffers and gradients on the device."""
    return unique_bytes(held_tensors(model), device)


def _bytes_in(pattern: re.Pattern[str], error: BaseException) -> tuple[int, int] | None:
    """Least and most bytes that a message's figure stands for: it has two decimals."""
    found = pattern.search(str(error))
    if found is None:
        return None
    figure, unit = [group for group in found.groups() if group is not None]
    nbytes = float(figure) * _UNITS[unit]
    half = 0.0 if unit == "bytes" else 0.005 * _UNITS[unit]
    return math.ceil(nbytes - half), math.floor(nbytes + half)


def located(error: BaseException, place: Place, updating: bool) -> tuple[Phase, int | None, Doing]:
    """Phase, stage (None: the glue behind the last one) and what ran when `error` arose.

    Stage and phase are the controller's. It can't see the loss's own backward, which runs before any stage's, nor
    what is done for a stage; the traceback can.
    """
    frames = list(_frames(error))
    codes = {frame.f_code for frame in frames}
    doing: Doing | None = None
    if _codes_of(start_leaving, finish_leaving) & codes:
        doing = "copy out"
    if _codes_of(start_returning, Record.finish_returning) & codes:
        doing = "copy back"
    if updating:
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


def _codes_of(*functions: Callable[..., Any]) -> set[CodeType]:
    return {function.__code__ for function in functions}  # type: ignore[attr-defined]


def _frames(error: BaseException) -> Iterator[FrameType]:
    for link in _chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            yield frame


def _chain(error: BaseException | None, outer: BaseException | None = None) -> Iterator[BaseException]:
    """`error`, and what it came from, up to `outer`."""
    seen = {id(outer)}
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            waiting.extend((link.__cause__, link.__context__))
            yield link


def drop_frames(error: BaseException, device: torch.device, outer: BaseException | None) -> None:
    """Free what the frames of a failed step hold, and give unused blocks back to the device.

    `outer` is the exception that was being handled when the step began, if there was one: its frames aren't the step's.
    """
    for link in _chain(error, outer):
        traceback.clear_frames(link.__traceback__)
    gc.collect()
    empty_cache(device)


class Undo:
    """Brings the model back to where a step began (NOTE [Undoing a step]); one per handle.

    Parameters
    ----------
    rewinds : bool
        Whether random generators are set back as well.
    """

    def __init__(self, model: nn.Module, *, rewinds: bool) -> None:
        self._model = model
        self._rewinds = rewinds
        self._read_only: set[tuple[nn.Module, str]] = set()

    @contextlib.contextmanager
    def step(self) -> Iterator[StepStart]:
        """A step runs inside."""
        start = StepStart(self._model, self._read_only, rewinds=self._rewinds)
        with start.watching_optimizers():
            yield start
        self._read_only = start.unwritten_buffers()


Version = tuple[StorageWeakRef, int, int]
"""A storage's address, kept from being anybody else's by a weak reference, and the version of the tensor on it."""


def _version(tensor: torch.Tensor) -> Version:
    storage = (tensor if tensor.layout is torch.strided else tensor._values()).untyped_storage()
    return StorageWeakRef(storage), storage._cdata, version_of(tensor)


def _untouched(tensor: torch.Tensor | None, version: Version) -> bool:
    return tensor is not None and _version(tensor)[1:] == version[1:]


class StepStart:
    """What a step found, as far as it can be kept for little, and how to bring it back."""

    def __init__(self, model: nn.Module, read_only: set[tuple[nn.Module, str]], *, rewinds: bool) -> None:
        self._parameters = [(p, version_of(p)) for p in model.parameters()]
        self._gradients = [(p, _version(p.grad)) for p, _ in self._parameters if p.grad is not None]
        self._buffers = [
            (m, name, buffer, version_of(buffer), None if (m, name) in read_only else buffer.detach().clone())
            for m in model.modules()
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        self._random = random_state() if rewinds else None
        self._at_backward: list[Version | None] | None = None
        self._states: dict[torch.optim.Optimizer, list[tuple[torch.Tensor, list[Version] | None]]] = {}
        self._updates = 0

    @property
    def updating(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._updates > 0

    def backward_begins(self) -> None:
        """Look at the former gradients once more: whoever zeroes them has done so before the first backward."""
        if self._at_backward is None:
            self._at_backward = [None if p.grad is None else _version(p.grad) for p, _ in self._gradients]

    @contextlib.contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Know of every update of the model's parameters, and what state it began with."""
        own = {id(p) for p, _ in self._parameters}

        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
            if not held:
                return
            self._updates += 1
            if optimizer not in self._states:
                self._states[optimizer] = [
                    (p, [_version(t) for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)])
                    if optimizer.state.get(p)
                    else (p, None)
                    for p in held
                ]

        def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer in self._states:
                self._updates -= 1

        hooks = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def unwritten_buffers(self) -> set[tuple[nn.Module, str]]:
        """Buffers that the step has left as they were."""
        return {
            (m, name)
            for m, name, buffer, version, _ in self._buffers
            # Batch norm's kernels update running statistics without a new version.
            if m._buffers.get(name) is buffer and version_of(buffer) == version and not isinstance(m, _NormBase)
        }

    def undo(self) -> tuple[bool, bool]:
        """Bring it back.

        Returns
        -------
        bool, bool
            Whether gradients from before the step are lost, and whether parameters or optimizer state are half updated.
        """
        half = self._undo_optimizers() or any(version_of(p) != version for p, version in self._parameters)
        lost = self._undo_gradients()
        with torch.no_grad():
            for m, name, buffer, version, copy in self._buffers:
                m._buffers[name] = buffer
                written = version_of(buffer) != version or isinstance(m, _NormBase)
                if written and copy is not None:
                    buffer.copy_(copy)
                half |= written and copy is None  # no step before has written to it
        if self._random is not None:
            self._random()
        return lost, half

    def _undo_optimizers(self) -> bool:
        written = False
        for optimizer, before in self._states.items():
            for p, versions in before:
                if versions is None:
                    optimizer.state.pop(p, None)
                    continue
                tensors = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
                written |= len(tensors) != len(versions) or not all(map(_untouched, tensors, versions))
        return written

    def _undo_gradients(self) -> bool:
        former = {id(p) for p, _ in self._gradients}
        now = self._at_backward
        # A backward that adds to gradients of glue before the first stage's looks like zeroing, for those alone.
        zeroed = now is not None and all(
            v is not None and v[1] == begun[1] and v[2] != begun[2]
            for v, (_, begun) in zip(now, self._gradients, strict=True)
        )
        lost = False
        for i, (p, begun) in enumerate(self._gradients):
            dropped = now is not None and (now[i] is None or now[i][1] != begun[1])  # type: ignore[index]
            if _untouched(p.grad, begun):
                continue
            if p.grad is not None and _version(p.grad)[1] == begun[1] and (now is None or zeroed):
                with torch.no_grad():
                    p.grad.zero_()
                continue
            lost |= now is not None and not dropped and not zeroed
            p.grad = None
        for p, _ in self._parameters:
            if lost or id(p) not in former:
                p.grad = None  # all of them, where some are lost: a part of a sum is of no use
        return lost
