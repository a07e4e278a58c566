"""Out-of-memory errors in planned steps: recognize them, measure the memory at that time, and undo the step.

NOTE [Undoing a step]
1. Objects that the step's Python frames hold are freed by clearing the frames (the traceback keeps its lines). This
   frees the graph, and with it every swapped record and recomputed frame, in any state (NOTE [States of a swapped
   storage]).
2. Gradients: one that was None before the step is None again; one that the step dropped itself (`zero_grad`) stays
   None; one that the step zeroed in place is zeroed; one that the step didn't touch stays unchanged. A gradient to
   which the step had begun to add can't be restored without a copy: then all gradients become None, and the step isn't
   repeatable.
3. Buffers get back the objects and values that they had before the step. The first step copies all buffers; later steps
   copy only those that a step has updated.
4. State that an optimizer created in the step is dropped. If parameters or older optimizer state were written to, by an
   update or in place, they stay as they are, and the step isn't repeatable. Writes through `.data` aren't noticed.
5. Random generators and the modules' Python state (attributes, lists, dictionaries and sets among them, hooks of
   modules and parameters) are set back only if the step is to run again. A tensor among the attributes that was written
   to isn't, and the step isn't repeatable. Large ones that were replaced are as before if they are still there.

Example: memory runs out in the third of four micro-batches. In `opt.zero_grad()` followed by four backwards, the step
itself dropped the old gradients, so the partial sums become None and the step can run again. If each micro-batch is a
step of its own, the third one began with a sum of two gradients and has added to some of them: that sum is lost, all
gradients become None, and the step isn't repeatable.

NOTE [What was asked for]
CUDA's messages give the size of the segment that the allocator wanted from the device, not the size of the request:

- 2 MiB for a request of at most 1 MiB,
- 20 MiB (a setting) for a request of more than 1 MiB and less than 10 MiB,
- for larger requests, the request rounded up to a multiple of 2 MiB.

The message rounds this size to two decimals of its unit, which is 10 MiB where the unit is a GiB. So the request is
known only as a range. Its lower end decides whether a request was larger than planned; its upper end decides how much
memory to free so that it fits. The rounding of requests by `roundup_power2_divisions` is not taken into account.

Example: "Tried to allocate 20.00 MiB" stands for a request of more than 1 MiB and less than 10 MiB, or for one of more
than 18 MiB and at most 20 MiB; the range is from 1 MiB + 1 byte to 20 MiB. "Tried to allocate 24.00 MiB" stands for a
request of more than 22 MiB and at most 24 MiB.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckptplan.core import allocator_settings as allocator
from ckptplan.core.errors import SwapError
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.shortage import Doing
from ckptplan.core.stage import Phase
from ckptplan.runtime.accelerator import device_bytes, empty_cache, is_accelerator
from ckptplan.runtime.controller import Place
from ckptplan.runtime.guard.optimizer_steps import around_steps
from ckptplan.runtime.private import NormBase
from ckptplan.runtime.recompute.call import Call
from ckptplan.runtime.state.cells import Tables, below, plain_attributes, write_items
from ckptplan.runtime.state.generators import KINDS as GENERATORS
from ckptplan.runtime.state.module_tables import HOOKS
from ckptplan.runtime.state.process import Leaves
from ckptplan.runtime.state.restore import random_state
from ckptplan.runtime.swap.record import Record, finish_leaving, start_leaving, start_returning
from ckptplan.runtime.swap.views import version_of

_HOST_TEXTS = ("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory")
_DEVICE_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
_SEGMENT = re.compile(rf"(?:CUDA|HIP) out of memory\..*?(?:Tried to allocate|Requested size:) {_SIZE}", re.DOTALL)
_REQUESTED = re.compile(rf"(?:[Tt]ried to allocate|Requested +:) {_SIZE}")  # the CPU's allocator and cudaMallocAsync
_ALLOCATED = re.compile(rf"(?:{_SIZE} is allocated by PyTorch|Currently allocated +: {_SIZE})")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_OWN_SEGMENT_LEAST = allocator.MIN_LARGE_BYTES - allocator.MIN_BLOCK_BYTES + 1  # smaller requests share a segment


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


def requested_bytes(error: BaseException) -> tuple[int, int] | None:
    """Return the least and most bytes of the failed request, None if not in the message (NOTE [What was asked for])."""
    segment = _bytes_in(_SEGMENT, error)
    if segment is None:
        return _bytes_in(_REQUESTED, error)
    step = allocator.ROUND_LARGE_BYTES
    low, high = -(-segment[0] // step) * step, segment[1] // step * step
    if low > high:
        return segment  # no segment has that size, so it is the size of the request itself
    if high == allocator.SMALL_SEGMENT_BYTES:
        return 1, allocator.SMALL_BYTES
    shared = re.search(r"large_segment_size_mb:(\d+)", allocator.allocator_conf())
    in_common = allocator.MIB * int(shared[1]) if shared else allocator.LARGE_SEGMENT_BYTES
    least = allocator.SMALL_BYTES + 1 if low <= in_common <= high else max(low - step + 1, _OWN_SEGMENT_LEAST)
    return least, high


def live_bytes(error: BaseException, device: torch.device) -> DeviceBytes | None:
    """Return the memory in use on a CUDA device when `error` was raised; None on the CPU.

    Blocks that were freed since then, with the frames, are counted only in the message's figures.
    """
    if not is_accelerator(device):
        return None
    now = device_bytes(device)
    told, unused = ((_bytes_in(pattern, error) or (0, 0))[0] for pattern in (_ALLOCATED, _UNUSED))
    allocated = max(now.allocated_bytes, told)
    gone = allocated - now.allocated_bytes
    return DeviceBytes(now.requested_bytes + gone, allocated, max(now.reserved_bytes, told + unused))


def _bytes_in(pattern: re.Pattern[str], error: BaseException) -> tuple[int, int] | None:
    """Return the least and most bytes that a figure in a message stands for, which is rounded to two decimals."""
    found = pattern.search(str(error))
    if found is None:
        return None
    figure, unit = [group for group in found.groups() if group is not None]
    nbytes = float(figure) * _UNITS[unit]
    half = 0.0 if unit == "bytes" else 0.005 * _UNITS[unit]
    return math.ceil(nbytes - half), math.floor(nbytes + half)


def located(error: BaseException, place: Place, updating: bool) -> tuple[Phase, int | None, Doing]:
    """Return the phase, the stage and the activity in which `error` was raised.

    Stage and phase come from the controller. It doesn't see the backward of the loss, which runs before that of any
    stage, nor copies and recomputes for a stage: these are found in the traceback. The stage is None in the code behind
    the last stage.
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
    """Yield `error`, its causes and its contexts, without `outer` and anything reached only through it."""
    seen = {id(outer)}
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            waiting.extend((link.__cause__, link.__context__))
            yield link


def drop_frames(error: BaseException, device: torch.device, outer: BaseException | None) -> None:
    """Free the objects that the frames of a failed step hold, and return unused blocks to the device.

    `outer` is the exception that was being handled when the step began, if any: its frames don't belong to the step.
    """
    for link in _chain(error, outer):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
                # Before Python 3.13 a frame keeps what its variables were when `f_locals` was last read.
                _ = frame.f_locals
    gc.collect()
    empty_cache(device)


Version = tuple[StorageWeakRef, int, int]
"""A weak reference to a storage, its address, which no other storage gets while the reference lives, and a version."""


def _version(tensor: torch.Tensor) -> Version:
    storage = (tensor if tensor.layout is torch.strided else tensor._values()).untyped_storage()
    return StorageWeakRef(storage), storage._cdata, version_of(tensor)


def _untouched(tensor: torch.Tensor | None, version: Version) -> bool:
    return tensor is not None and _version(tensor)[1:] == version[1:]


_MOST_ENTRIES, _MOST_BYTES = 1 << 12, 1 << 16
"""Entries of containers, and bytes of tensors, that are kept to be restored; what is larger is taken to be data."""


class _PythonState:
    """Attributes of a model's modules, lists, dictionaries and sets among them, hooks, and random generators.

    Large tensors among the attributes aren't kept alive, and containers of tensors aren't restored.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = below(model)
        found = [(m, name, value) for m in modules for name, value in plain_attributes(m).items()]
        self._large = [(m, name, weakref.ref(value)) for m, name, value in found if _is_large(value)]
        self._attributes = [each for each in found if not _is_large(each[2])]
        self._versions = [
            (value, version_of(value)) for _, _, value in self._attributes if isinstance(value, torch.Tensor)
        ]
        containers = {id(value): value for _, _, value in found if type(value) in (list, dict, set)}.values()
        self._contents = [(c, c.copy()) for c in containers if len(c) <= _MOST_ENTRIES and not _has_tensors(c)]
        self._hooks = Tables.of(vars(m)[name] for m in modules for name in HOOKS)
        self._leaves = Leaves(modules)
        self._random = random_state([value for _, _, value in found if isinstance(value, GENERATORS)])
        self._names = [(m, set(plain_attributes(m))) for m in modules]

    def put(self) -> bool:
        """Restore them; return whether one of the tensors was written to, which isn't restored."""
        self._hooks.put()
        self._leaves.put()
        for container, contents in self._contents:
            if isinstance(container, list):
                container[:] = contents
            else:
                write_items(container, contents)
        for module, names in self._names:
            for name in plain_attributes(module).keys() - names:
                del module.__dict__[name]
        for module, name, value in self._attributes:
            module.__dict__[name] = value
        for module, name, ref in self._large:
            if (tensor := ref()) is not None:
                module.__dict__[name] = tensor
        self._random()
        return any(version_of(tensor) != version for tensor, version in self._versions)


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() > _MOST_BYTES


def _has_tensors(container: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in (container.values() if isinstance(container, dict) else container))


class StepStart:
    """The state of a model at the start of a step: versions, copies of updated buffers, random states.

    Parameters
    ----------
    read_only : set of (nn.Module, str)
        Buffers that earlier steps didn't write to, as `unwritten_buffers` returned them: these aren't copied.
    rewinds : bool
        Whether `undo` restores random generators and Python state as well.
    """

    def __init__(self, model: nn.Module, read_only: set[tuple[nn.Module, str]], *, rewinds: bool) -> None:
        self._parameters = [(p, version_of(p)) for p in model.parameters()]
        self._gradients = [(p, _version(p.grad)) for p, _ in self._parameters if p.grad is not None]
        self._buffers = [
            (m, name, buffer, version_of(buffer), None if (m, name) in read_only else buffer.detach().clone())
            for m in model.modules()
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        self._python = _PythonState(model) if rewinds else None
        self._at_backward: list[Version | None] | None = None
        self._states: dict[torch.optim.Optimizer, list[tuple[torch.Tensor, list[Version] | None]]] = {}
        self._updates = 0

    @property
    def updating(self) -> bool:
        """Whether an optimizer's step has begun and not ended."""
        return self._updates > 0

    def backward_begins(self) -> None:
        """Record the former gradients' versions: by the first backward, a step that zeroes them has done so."""
        if self._at_backward is None:
            self._at_backward = [None if p.grad is None else _version(p.grad) for p, _ in self._gradients]

    @contextlib.contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Record, inside the context, every update of the model's parameters and the optimizer state before it."""
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

        with around_steps(begins, ends):
            yield

    def unwritten_buffers(self) -> set[tuple[nn.Module, str]]:
        """Return the buffers that the step didn't write to."""
        return {
            (m, name)
            for m, name, buffer, version, _ in self._buffers
            # Batch norm's kernels update running statistics without raising the version.
            if m._buffers.get(name) is buffer and version_of(buffer) == version and not isinstance(m, NormBase)
        }

    def undo(self) -> tuple[bool, bool]:
        """Restore the state at the start of the step, as far as possible.

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
                written = version_of(buffer) != version or isinstance(m, NormBase)
                if written and copy is not None:
                    buffer.copy_(copy)
                half |= written and copy is None  # not copied: no earlier step wrote to it
        if self._python is not None:
            half |= self._python.put()
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
        # Versions are compared for all gradients: a backward may have added to those of code behind the last stage
        # before they were recorded, which looks like zeroing, but for these gradients only.
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
                p.grad = None  # if any is lost, all are dropped: a partial sum is of no use
        return lost
