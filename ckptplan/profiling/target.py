"""Where a step is to run: the device in this machine, or one that isn't here and is known by its description."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.device import Device, find_device, known_devices, library_workspaces
from ckptplan.core.errors import InvalidInputError
from ckptplan.profiling.bytes.kernels import real_choices
from ckptplan.profiling.bytes.workspace import cuda_workspaces, measure_times, measure_workspaces
from ckptplan.profiling.times.roofline import op_seconds
from ckptplan.profiling.values.answers import Answers, seen_in, without_seen
from ckptplan.runtime.step import model_device
from ckptplan.runtime.swap.session import MIN_SWAP_BYTES

_THRESHOLDS = ((5, 0), (8, 0), (9, 0), (11, 0))
"""Compute capabilities from which on other kernels are chosen (kernels.py)."""

PLANNED = "planned for "
"""Begins the device of a fingerprint made without the device."""

CUDA_BLOCK = 512
"""The caching allocator rounds every request up to a multiple of this many bytes."""


def with_index(device: torch.device) -> torch.device:
    """`device` with the index that PyTorch gives to its tensors, as devices are compared: "cuda" isn't "cuda:0"."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


@dataclass(frozen=True, slots=True)
class Target:
    """How amounts are found for the device that the step is to run on.

    Parameters
    ----------
    device : torch.device
        Where tensors lie while the step is traced: the device itself, with its index, or the CPU for one that isn't
        here.
    spec : Device, optional
        The one that isn't here. Its bytes come from fake tensors, its times from a roofline.
    answers : Answers, optional
        Where the one step that is looked at keeps what its operations answered for real; without, nothing is asked.
    least_moved_bytes : int
        Storages of fewer bytes stay.
    """

    device: torch.device
    spec: Device | None = None
    answers: Answers | None = field(default=None, compare=False, repr=False)
    least_moved_bytes: int = MIN_SWAP_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", with_index(self.device))

    @property
    def without_answers(self) -> Target:
        """The same, for something else than the step."""
        return dataclasses.replace(self, answers=None)

    @property
    def name(self) -> str | None:
        """What plans for a device that isn't here are bound to."""
        return None if self.spec is None else f"{PLANNED}{self.spec.name}"

    @property
    def is_cuda(self) -> bool:
        """Whether the step runs on CUDA there."""
        return self.device.type == "cuda" if self.spec is None else self.spec.is_cuda

    @property
    def description(self) -> str:
        """For people: the device's name."""
        if self.spec is not None:
            return self.spec.description
        return torch.cuda.get_device_name(self.device) if self.is_cuda else str(self.device)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's (major, minor)."""
        if self.spec is not None:
            return self.spec.compute_capability
        return torch.cuda.get_device_capability(self.device) if self.is_cuda else None

    @property
    def byte_class(self) -> tuple[object, ...] | None:
        """Equal for two CUDA devices that aren't here: a step takes the same bytes on both. None for any other."""
        if self.spec is None or self.spec.compute_capability is None:
            return None
        capability = self.spec.compute_capability
        kernels = (capability >= least for least in _THRESHOLDS)
        return *kernels, library_workspaces(capability, torch.__version__)

    @property
    def capacity_bytes(self) -> int | None:
        """What the device has in all; None for the machine's main memory."""
        if self.spec is not None:
            return self.spec.memory_bytes
        return torch.cuda.get_device_properties(self.device).total_memory if self.is_cuda else None

    @property
    def context_bytes(self) -> int:
        """What the driver takes beside what the allocator reserves.

        Measured for the device that is here: what isn't free and isn't reserved. Other programs' memory is in it.
        """
        if self.spec is not None:
            return self.spec.context_bytes
        if not self.is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return max(total - free - torch.cuda.memory_reserved(self.device), 0)

    @property
    def round_to(self) -> int:
        """Blocks are multiples of this many bytes."""
        return CUDA_BLOCK if self.is_cuda else 1

    def rounded(self, nbytes: int) -> int:
        """Bytes of a block for `nbytes`."""
        return -(-nbytes // self.round_to) * self.round_to

    def choices(self, *, numbered: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Inside, operations on fake tensors are chosen as on that device for real ones.

        Parameters
        ----------
        numbered : bool
            As for real ones whose operations are numbered (NOTE [Numbering] in runtime/recompute/selective.py).
        """
        capability = None if self.spec is None else self.spec.compute_capability
        return real_choices(self.device.type, capability, numbered=numbered)

    def workspaces(
        self, keys: Iterable[Hashable]
    ) -> tuple[dict[Hashable, int], list[str], dict[Hashable, tuple[int, ...]]]:
        """Most bytes each operation allocates at once, its results included, and operations that could not be run.

        The third result has the bytes of the storages that each operation's results begin, in order, where it ran.
        Measured on the device itself; by rule for one that isn't here.
        """
        keys = list(keys)
        if self.spec is not None and self.spec.is_cuda:
            found = cuda_workspaces(without_seen(key) for key in keys)
            return {key: found[plain] for key in keys if (plain := without_seen(key)) in found}, [], {}
        # What depended on values is known from the real run, and can't be found with values made up.
        seen = {key: told.peak_bytes for key in keys if (told := seen_in(key)) is not None}
        peaks, failed, storages = measure_workspaces((key for key in keys if key not in seen), self.device)
        return {**peaks, **seen}, failed, storages

    def times(self, keys: Iterable[Hashable]) -> dict[Hashable, float]:
        """Seconds of each distinct operation alone."""
        if self.spec is None:
            return measure_times(keys, self.device)
        return {key: op_seconds(without_seen(key), self.spec) for key in dict.fromkeys(keys) if key is not None}


DeviceLike = str | Path | torch.device | Device | Target | None
"""A torch device, or a device that isn't here: its name, the file that describes it, or its description."""


def find_target(model: nn.Module, device: DeviceLike = None) -> Target:
    """Where the user wants the step to run.

    Raises
    ------
    InvalidInputError
        If the device is unknown, isn't where the model is, or none is named for a model on `meta`.
    """
    if isinstance(device, Target):
        return device
    where = model_device(model)
    if isinstance(device, (str, Path, Device)):
        try:
            device = torch.device(device)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):
            return Target(torch.device("cpu"), find_device(device), Answers())  # type: ignore[arg-type]
    if where.type == "meta":
        raise InvalidInputError(
            "the model lies on 'meta', which is no device to run on; pass device= with the one it is meant for, "
            f"such as 'a100-40gb' (known: {', '.join(sorted(known_devices()))})"
        )
    if device is not None and (device.type != where.type or device.index not in (None, where.index or 0)):
        raise InvalidInputError(
            f"device={str(device)!r}, but the model is on {str(where)!r}; move the model there first"
        )
    return Target(where, answers=Answers())


ON_CPU = Target(torch.device("cpu"))
