"""A device as data: what planning for one that isn't in the machine must know of it.

The devices that are known by name lie in `devices.json` beside this file, every number with its source. A description
of one's own is a file of the same form (docs/formats.md), written by hand or by `ckptplan calibrate`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ckptplan.core.checks import check_bytes, check_seconds, check_type
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.files import read_json, write_json

SCHEMA = "ckptplan.device/1"
OP_CLASSES = ("matmul", "convolution", "attention", "elementwise", "reduction", "other")
"""What the roofline tells apart: each reaches its own share of the device's rates."""


@dataclass(frozen=True, slots=True)
class Device:
    """Rates, sizes and fixed amounts of one device.

    Parameters
    ----------
    name : str
        What the user calls it, such as "a100-40gb".
    description : str
        The product's full name.
    memory_bytes : int
        Device memory as the driver reports it.
    context_bytes : int
        What the driver takes of it before the first tensor.
    bytes_per_s : float
        Bandwidth of the device's memory, peak.
    flops_per_s : mapping
        Data type ("float32", "tf32", "float16", "bfloat16", "float64") -> peak operations a second of dense products
        of matrices.
    out_bytes_per_s, in_bytes_per_s : float
        Bandwidth to and from pinned host memory.
    efficiency : mapping
        Class of operation (`OP_CLASSES`) -> the share of the peak that it reaches, above 0, at most 1: of `flops_per_s`
        for the first three, of `bytes_per_s` for the others. "class.type", such as "matmul.float32", goes before the
        class alone.
    launch_s : float
        Least seconds between the starts of two operations.
    compute_capability : tuple of int, optional
        CUDA's (major, minor); None for what isn't CUDA.
    sources : mapping
        Field, or "field.key", -> where its number is from.
    """

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

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        check_type("device", str, name=self.name, description=self.description)
        check_bytes(owner, memory_bytes=self.memory_bytes, context_bytes=self.context_bytes)
        check_seconds(owner, launch_s=self.launch_s)
        check_type(owner, Mapping, flops_per_s=self.flops_per_s, efficiency=self.efficiency, sources=self.sources)
        if self.context_bytes >= self.memory_bytes:
            raise InvalidInputError(f"{owner}: context_bytes={self.context_bytes} leave nothing of {self.memory_bytes}")
        rates = {name: getattr(self, name) for name in ("bytes_per_s", "out_bytes_per_s", "in_bytes_per_s")}
        rates |= {f"flops_per_s[{kind!r}]": rate for kind, rate in self.flops_per_s.items()}
        for name, rate in rates.items():
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1e20:
                raise InvalidInputError(f"{owner}: {name}={rate!r} must be a rate above 0 and below 1e20 a second")
        if "float32" not in self.flops_per_s:
            raise InvalidInputError(f"{owner}: flops_per_s has no 'float32'; every other type's rate may be left out")
        for kind, share in self.efficiency.items():
            found, _, dtype = kind.partition(".")
            if found not in OP_CLASSES or (dtype and (found not in OP_CLASSES[:3] or dtype not in self.flops_per_s)):
                raise InvalidInputError(
                    f"{owner}: efficiency names {kind!r}; classes are {', '.join(OP_CLASSES)}, the first three "
                    'also with a type of flops_per_s, such as "matmul.float32"'
                )
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise InvalidInputError(f"{owner}: efficiency[{kind!r}]={share!r} must be above 0 and at most 1")
        capability = self.compute_capability
        if capability is not None and not (len(capability) == 2 and all(isinstance(n, int) for n in capability)):
            raise InvalidInputError(f"{owner}: compute_capability={capability!r} must be two numbers, such as [8, 0]")

    @property
    def usable_bytes(self) -> int:
        """What tensors and the allocator can have."""
        return self.memory_bytes - self.context_bytes

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA's caching allocator and libraries run on it."""
        return self.compute_capability is not None

    def save(self, path: str | Path) -> None:
        """Write the description as JSON."""
        write_json(path, SCHEMA, self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """The device that the fields of a JSON object describe.

        Raises
        ------
        InvalidInputError
            If a field is missing, unknown or impossible.
        """
        fields = {name: value for name, value in data.items() if name != "schema"}
        if isinstance(fields.get("compute_capability"), list):
            fields["compute_capability"] = tuple(fields["compute_capability"])
        known = {f.name for f in dataclasses.fields(cls)}
        wrong = sorted(set(fields) - known)
        if wrong:
            raise InvalidInputError(f"a device has no {', '.join(map(repr, wrong))}; docs/formats.md lists the fields")
        try:
            return cls(**fields)
        except TypeError as error:
            raise InvalidInputError(f"not a complete device: {error}; docs/formats.md lists the fields") from error


def library_workspaces(compute_capability: tuple[int, int], torch_version: str) -> tuple[int, int]:
    """Bytes of the workspaces that PyTorch allocates for a cuBLAS handle and a stream, and for cuBLASLt beside it.

    cuBLAS gets 8,519,680 bytes, but 32 MiB on 9.0, and from 2.12 on on every 9.x, 10.x and 12.x
    (pytorch/pytorch#175344; a B200 with 2.11 had the smaller one). cuBLASLt has a MiB of its own up to 2.11 and uses
    cuBLAS's workspace from 2.12 on (pytorch/pytorch#168175). Read out of the machine code of the published builds of
    2.11 and 2.13; that it changed with 2.12 follows from the dates of the two requests.

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
    """Every device known by name, by name."""
    text = resources.files("ckptplan.core").joinpath("devices.json").read_text(encoding="utf-8")
    return {item["name"]: Device.from_dict(item) for item in json.loads(text)["devices"]}


def find_device(name: str | Path | Device) -> Device:
    """A device by its name, or from a file that describes it.

    Raises
    ------
    InvalidInputError
        If it is neither; names those that are nearest.
    """
    if isinstance(name, Device):
        return name
    if str(name).endswith(".json"):
        return Device.from_dict(read_json(name, SCHEMA))
    asked = str(name).lower()
    plain = {_plain(known): device for known, device in known_devices().items()}
    found = plain.get(_plain(asked))
    if found is None:
        # "a100" is both its sizes, not something like "a10".
        near = [known for known in known_devices() if _plain(asked) and _plain(known).startswith(_plain(asked))]
        near = near or difflib.get_close_matches(asked, known_devices(), n=4, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        raise InvalidInputError(
            f"device {str(name)!r} is not known{hint} Known are {', '.join(sorted(known_devices()))}, and any .json "
            "file that describes one (`ckptplan calibrate` writes it for this machine)"
        )
    return found


def _plain(name: str) -> str:
    """A name without what people write in different ways: "RTX 4090", "rtx-4090"."""
    return "".join(c for c in name.lower() if c.isalnum())
