"""Target of a profile: the device on which the step is to run, in this machine or known by its description alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.arguments import DeviceLike
from ckptplan.core.device import Device, find_device, known_devices, library_workspaces
from ckptplan.core.errors import InvalidInputError, UnsupportedModelError
from ckptplan.profiling.bytes.kernels import real_choices
from ckptplan.profiling.bytes.layouts import Layouts
from ckptplan.profiling.bytes.operations import OpKeys
from ckptplan.profiling.bytes.workspace import cuda_workspaces, measure_times, measure_workspaces
from ckptplan.profiling.times.roofline import op_seconds
from ckptplan.profiling.values.answers import Answers, seen_in, without_seen
from ckptplan.tensors import accelerator
from ckptplan.training.step import model_device

_THRESHOLDS = ((5, 0), (8, 0), (9, 0), (11, 0))
"""Compute capabilities from which on PyTorch chooses other kernels (bytes/kernels.py)."""

PLANNED = "planned for "
"""Begins the device name in a fingerprint that was made without the device."""

MIN_SWAP_BYTES = 1 << 12
"""Smaller storages never move: this is a page, and a block of the swap file. On CUDA a measured link may set a higher
limit, the size from which moving pays (`Link.least_bytes`)."""

CUDA_BLOCK = 512
"""The caching allocator rounds every request up to a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """The device that the step is to run on, and how bytes and times are found for it.

    Parameters
    ----------
    device : torch.device
        Device of the tensors while the step is traced: the device itself, with its index, or the CPU for a device that
        isn't in this machine.
    spec : Device, optional
        Description of a device that isn't in this machine. Its bytes come from fake tensors, its times from a roofline.
    answers : Answers, optional
        Keeps the answers of real runs of one step; without it, operations that need values are an error.
    least_moved_bytes : int
        Smaller storages never move.
    layouts : Layouts
        Those of the results of operations that were traced for it.
    op_keys : OpKeys
        Keys of the operations that were traced for it.
    """

    device: torch.device
    spec: Device | None = None
    answers: Answers | None = field(default=None, compare=False, repr=False)
    least_moved_bytes: int = MIN_SWAP_BYTES
    layouts: Layouts = field(default_factory=Layouts, compare=False, repr=False)
    op_keys: OpKeys = field(default_factory=OpKeys, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", accelerator.with_index(self.device))

    @property
    def without_answers(self) -> Target:
        """The same target without answers, to trace something other than the step."""
        return dataclasses.replace(self, answers=None)

    @property
    def name(self) -> str | None:
        """Device name in fingerprints for a device that isn't in this machine; None for one that is."""
        return None if self.spec is None else f"{PLANNED}{self.spec.name}"

    @property
    def is_cuda(self) -> bool:
        """Whether the step runs on CUDA."""
        return accelerator.is_accelerator(self.device) if self.spec is None else self.spec.is_cuda

    @property
    def description(self) -> str:
        """The device's name, for reports."""
        if self.spec is not None:
            return self.spec.description
        return accelerator.properties(self.device).name if self.is_cuda else str(self.device)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability (major, minor) of a CUDA device; None for others."""
        return accelerator.compute_capability(self.device) if self.spec is None else self.spec.compute_capability

    @property
    def byte_class(self) -> tuple[object, ...] | None:
        """Key of a CUDA device that isn't in this machine; a step takes equal bytes on devices with equal keys."""
        if self.spec is None or self.spec.compute_capability is None:
            return None
        capability = self.spec.compute_capability
        kernels = (capability >= least for least in _THRESHOLDS)
        return *kernels, library_workspaces(capability, torch.__version__)

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of the device's memory; None for the machine's main memory."""
        if self.spec is not None:
            return self.spec.memory_bytes
        return accelerator.properties(self.device).total_memory if self.is_cuda else None

    @property
    def context_bytes(self) -> int:
        """Bytes of the device in use besides those that the allocator reserves.

        On a device in this machine they are measured, and include other programs' memory.
        """
        return accelerator.foreign_bytes(self.device) if self.spec is None else self.spec.context_bytes

    @property
    def round_to(self) -> int:
        """Blocks are multiples of this many bytes."""
        return CUDA_BLOCK if self.is_cuda else 1

    def rounded(self, nbytes: int) -> int:
        """Bytes of a block for `nbytes`."""
        return -(-nbytes // self.round_to) * self.round_to

    def choices(self, *, numbered: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Let PyTorch run on fake tensors the operations that it would run on the device on real ones.

        Parameters
        ----------
        numbered : bool
            The real operations are numbered (NOTE [Numbering] in runtime/recompute/selective.py).
        """
        capability = None if self.spec is None else self.spec.compute_capability
        return real_choices(self.device.type, capability, numbered=numbered)

    def workspaces(
        self, keys: Iterable[Hashable]
    ) -> tuple[dict[Hashable, int], list[str], dict[Hashable, tuple[int, ...]]]:
        """Bytes that operations allocate, measured on the device, or by rule for one that isn't in this machine.

        Returns
        -------
        dict
            Operation key -> most bytes that it allocates at once, its results included.
        list of str
            Operations that could not be run alone.
        dict
            Operation key -> bytes of the storages that it made for its results, in order, if it ran.
        """
        keys = list(keys)
        if self.spec is not None and self.spec.is_cuda:
            found = cuda_workspaces(without_seen(key) for key in keys)
            return {key: found[plain] for key in keys if (plain := without_seen(key)) in found}, [], {}
        # Bytes that depend on values are known from the real run; made-up values wouldn't give them.
        seen = {key: part.peak_bytes for key in keys if (part := seen_in(key)) is not None}
        peaks, failed, storages = measure_workspaces((key for key in keys if key not in seen), self.device)
        return {**peaks, **seen}, failed, storages

    def times(self, keys: Iterable[Hashable]) -> dict[Hashable, float]:
        """Seconds of each distinct operation alone."""
        if self.spec is None:
            return measure_times(keys, self.device)
        return {key: op_seconds(without_seen(key), self.spec) for key in dict.fromkeys(keys) if key is not None}


def find_target(model: nn.Module, device: DeviceLike | Target = None) -> Target:
    """The target that the argument `device` and the model's own device stand for.

    Raises
    ------
    InvalidInputError
        If the device is unknown or isn't the model's, or the model is on `meta` and no device is named.
    UnsupportedModelError
        If the model is on a device of another kind than CUDA and the CPU.
    """
    if isinstance(device, Target):
        return device
    where = model_device(model)
    if isinstance(device, (str, Path, Device)):
        try:
            device = torch.device(device)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):
            return Target(torch.device("cpu"), find_device(device), Answers())  # type: ignore[arg-type]
    if where.type == "meta" and device is not None and is_here(device):
        return Target(device, answers=Answers())
    if where.type == "meta":
        raise InvalidInputError(
            "the model lies on 'meta', which is no device to run on; pass device= with the one it is meant for, "
            f"such as 'a100-40gb' (known: {', '.join(sorted(known_devices()))})"
        )
    if where.type != "cpu" and not accelerator.is_accelerator(where):
        raise UnsupportedModelError(
            f"the model is on {str(where)!r}; plans run on CUDA devices and on the CPU, so move it to one of them"
        )
    if device is not None and (device.type != where.type or device.index not in (None, where.index or 0)):
        raise InvalidInputError(
            f"device={str(device)!r}, but the model is on {str(where)!r}; move the model there first"
        )
    return Target(where, answers=Answers())


def is_here(device: torch.device) -> bool:
    """Whether a device is one of this machine's that steps run on."""
    if device.type == "cpu":
        return True
    return accelerator.is_accelerator(device) and (device.index or 0) < accelerator.device_count()


ON_CPU = Target(torch.device("cpu"))
