"""A device as data, for planning on a machine that doesn't have it.

`devices.json` beside this file describes the devices known by name, with a source for every number. Other devices are
described by files of the same form (docs/formats.md), written by hand or by `ckptplan calibrate`.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ckptplan.core.checks import check_fields, check_rates, check_whole, is_number
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.files import Saved, decoded
from ckptplan.core.overheads import NO_OVERHEADS, Overheads

MOST_DEVICES = 1 << 16
"""In one machine."""
OP_CLASSES = ("matmul", "convolution", "attention", "elementwise", "reduction", "other")
"""Classes of operations in the roofline; each has its own share of the device's rates."""


@dataclass(frozen=True, slots=True)
class Device(Saved):
    """Rates, sizes and fixed amounts of one device, which need not be here.

    An operation takes the longest of three times: of its floating-point operations at their rate, of its bytes at
    theirs, and `launch_s` (`profiling/times/roofline.py`).

    Parameters
    ----------
    name : str
        Short name, such as "a100-40gb".
    description : str
        The product's full name.
    memory_bytes : int
        Device memory as the driver reports it, less than the nominal size.
    context_bytes : int
        Device memory that the driver takes before the first tensor; below `memory_bytes`.
    bytes_per_s : float
        Peak bandwidth of the device's memory, reads and writes together.
    flops_per_s : mapping
        Data type -> peak operations a second of dense products of matrices, where a multiplication and an addition are
        two operations. Types have PyTorch's names. "float32" is required. "tf32" is the rate of float32 products where
        PyTorch's settings allow TF32. A type left out runs at the rate of "float32"; 8-bit floating types at the rate
        of "float8" or "float16", if there is one.
    out_bytes_per_s, in_bytes_per_s : float
        Bandwidth to and from pinned host memory; on the CPU, of the swap file.
    efficiency : mapping
        Class of operation -> share of the peak that it reaches, above 0 and at most 1; 1 for classes left out.
        "matmul" (with recurrent layers), "convolution" and "attention" have shares of `flops_per_s`, and
        "matmul.float32", with a type, goes before "matmul". Where memory limits these three, they reach the share of
        "elementwise". "elementwise", "reduction" (normalisations, softmax, losses, pooling) and "other" have shares of
        `bytes_per_s`.
    launch_s : float
        Least number of seconds between the starts of two operations.
    compute_capability : tuple of int, optional
        CUDA's (major, minor), such as (8, 0); None for other devices.
    sources : mapping
        Field, or "field.key", -> source of its number, or that it is an assumption.
    overheads : Overheads
        Compute time of a running plan besides the stages' work; not measured if it is all 0.
    peer_bytes_per_s : float, optional
        Rate at which each device sends and receives in collectives within a machine: NCCL's bus bandwidth. None:
        collectives take no time.
    machine_devices : int
        Number of devices in a machine.
    network_bytes_per_s : float, optional
        The same rate between machines, of all network cards of one machine together.
    latency_s : float
        Time of a transfer to or from host memory in addition to the time of its bytes.
    """

    SCHEMA = "ckptplan.device/1"

    name: str
    description: str
    memory_bytes: int
    context_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    out_bytes_per_s: float
    in_bytes_per_s: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    compute_capability: tuple[int, int] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    overheads: Overheads = NO_OVERHEADS
    peer_bytes_per_s: float | None = None
    machine_devices: int = 8
    network_bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        check_fields(owner, self)
        if self.context_bytes >= self.memory_bytes:
            raise InvalidInputError(
                f"{owner}: context_bytes={self.context_bytes} must be below memory_bytes={self.memory_bytes}"
            )
        check_rates(owner, **{f"flops_per_s[{kind!r}]": rate for kind, rate in self.flops_per_s.items()})
        check_whole(owner, 1, MOST_DEVICES, machine_devices=self.machine_devices)
        if "float32" not in self.flops_per_s:
            raise InvalidInputError(
                f"{owner}: flops_per_s has no 'float32', the one rate that can't be left out; add it"
            )
        for kind, share in self.efficiency.items():
            found, _, dtype = kind.partition(".")
            if found not in OP_CLASSES or (dtype and (found not in OP_CLASSES[:3] or dtype not in self.flops_per_s)):
                raise InvalidInputError(
                    f"{owner}: efficiency names {kind!r}; classes are {', '.join(OP_CLASSES)}, the first three "
                    'also with a type of flops_per_s, such as "matmul.float32"'
                )
            if not is_number(share) or not 0 < share <= 1:
                raise InvalidInputError(f"{owner}: efficiency[{kind!r}]={share!r} must be above 0 and at most 1")
        capability = self.compute_capability
        if capability is not None and not (len(capability) == 2 and all(isinstance(n, int) for n in capability)):
            raise InvalidInputError(f"{owner}: compute_capability={capability!r} must be two numbers, such as [8, 0]")

    @property
    def usable_bytes(self) -> int:
        """Memory for tensors and the allocator."""
        return self.memory_bytes - self.context_bytes

    @property
    def is_cuda(self) -> bool:
        """Whether the device has CUDA's caching allocator and libraries."""
        return self.compute_capability is not None


def library_workspaces(compute_capability: tuple[int, int], torch_version: str) -> tuple[int, int]:
    """Return the bytes of the workspaces that PyTorch allocates per handle and stream for cuBLAS, and for cuBLASLt.

    The cuBLAS workspace has 8,519,680 bytes; it has 32 MiB on compute capability 9.0 and, from PyTorch 2.12 on, on
    every 9.x, 10.x and 12.x (pytorch/pytorch#175344; a B200 with 2.11 had the smaller one). cuBLASLt has a workspace of
    1 MiB up to 2.11 and uses that of cuBLAS from 2.12 on (pytorch/pytorch#168175). The sizes are those in the machine
    code of the published builds of 2.11 and 2.13; the dates of the two requests show that the change came with 2.12.

    Parameters
    ----------
    compute_capability : tuple of int
    torch_version : str
        As `torch.__version__` has it.
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    newer = (major, minor) >= (2, 12)
    large = compute_capability[0] in (9, 10, 12) if newer else compute_capability == (9, 0)
    return 32 << 20 if large else 8_519_680, 0 if newer else 1 << 20


@functools.cache
def known_devices() -> Mapping[str, Device]:
    """Return name -> device for every device known by name."""
    text = resources.files("ckptplan.core").joinpath("devices.json").read_text(encoding="utf-8")
    return {item["name"]: decoded(Device, item) for item in json.loads(text)["devices"]}


def find_device(name: str | Path | Device) -> Device:
    """Return a device by its name, or from a file that describes it.

    Raises
    ------
    InvalidInputError
        If there is no such name or file; the message has the nearest names.
    """
    if isinstance(name, Device):
        return name
    if str(name).endswith(".json"):
        return Device.load(name)
    wanted = _letters_and_digits(str(name))
    found = next((device for known, device in known_devices().items() if _letters_and_digits(known) == wanted), None)
    if found is None:
        # Names that begin with "a100" are nearer to it than "a10" is.
        near = [known for known in known_devices() if wanted and _letters_and_digits(known).startswith(wanted)]
        near = near or difflib.get_close_matches(str(name).lower(), known_devices(), n=4, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        raise InvalidInputError(
            f"device {str(name)!r} is not known{hint} Give one of {', '.join(sorted(known_devices()))}, or a .json file"
            " that describes the device (`ckptplan calibrate` writes it for this machine)"
        )
    return found


def _letters_and_digits(name: str) -> str:
    """Return "rtx4090" for "RTX 4090" and "rtx-4090"."""
    return "".join(c for c in name.lower() if c.isalnum())
