"""The settings of PyTorch's CUDA caching allocator that change how much device memory it takes.

Rules and limits are those of `c10/core/AllocatorConfig.{h,cpp}` and `c10/cuda/CUDAAllocatorConfig.h` of PyTorch 2.13,
whose own parser (it is in the CPU build as well) was given the strings of the tests. Two rules are stricter, to detect
mistakes: text after a number ("128MB", which PyTorch reads as 128) and numbers below zero are errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptplan.core.checks import is_int
from ckptplan.core.errors import InvalidInputError

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB  # the largest rounded size in the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_BYTES = 10 * MIB  # below it a large request shares a segment of `large_segment_bytes`
ROUND_LARGE_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # default of `large_segment_size_mb`
INTERVALS = 16  # interval i has the sizes from 2**(20+i) to 2**(21+i) - 1 bytes; the first and last have no bound

# Settings of pinned host memory, a lock, CUDA graph capture, or reserved addresses (PyTorch 2.15), which have no effect
# in this model. The memory fraction is in the free bytes (tensors/accelerator.py). Garbage collection, which works with
# such a fraction alone, releases unused segments before new ones are made: without it as much or more is reserved.
WITHOUT_EFFECT = (
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of the allocator; the defaults are PyTorch's.

    Parameters
    ----------
    expandable_segments : bool
        One growing segment per pool and stream instead of many of fixed size.
    max_split_size_bytes : int, optional
        Blocks of this size and more are never split, and requests below it never take one. None: no limit.
    roundup_power2_divisions : int or 16 integers
        Sizes round up to a multiple of (power of two below the size) / divisions instead of 512. A number applies to
        all sizes, a tuple has one for each interval of sizes (`INTERVALS`); `from_string` reads PyTorch's list. Stored
        as one number per interval; 0 and 1 mean rounding to 512. Example: with 4 divisions a request of 5 MiB rounds up
        to 5 MiB, one of 4.5 MiB too.
    large_segment_bytes : int
        Size of the segments that requests above 1 MiB and below 10 MiB share; also the page of expandable segments of
        the large pool. More than 10 MiB.
    max_non_split_rounding_bytes : int, optional
        A request of at least `max_split_size_bytes` takes no block larger by this or more. None: `large_segment_bytes`.

    Raises
    ------
    InvalidInputError
        If PyTorch would refuse a value.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int | tuple[int, ...] = 0
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_non_split_rounding_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise InvalidInputError(f"expandable_segments={self.expandable_segments!r} must be True or False")
        if not is_int(self.large_segment_bytes) or self.large_segment_bytes <= MIN_LARGE_BYTES:
            raise InvalidInputError(
                f"large_segment_bytes={self.large_segment_bytes!r} must be an integer above {MIN_LARGE_BYTES} (10 MiB),"
                " since requests up to that size share such a segment; PyTorch's default is 20 MiB"
            )
        if self.large_segment_bytes % MIN_BLOCK_BYTES:
            raise InvalidInputError(f"large_segment_bytes={self.large_segment_bytes} must be a multiple of 512")
        for name in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < self.large_segment_bytes):
                raise InvalidInputError(
                    f"{name}={value!r} must be an integer of at least large_segment_bytes ({self.large_segment_bytes});"
                    " raise it, or lower large_segment_bytes"
                )
        object.__setattr__(self, "roundup_power2_divisions", _intervals(self.roundup_power2_divisions))

    @property
    def divisions(self) -> tuple[int, ...]:
        """Divisions of each of the 16 size intervals, from 1 MiB upwards."""
        assert isinstance(self.roundup_power2_divisions, tuple)
        return self.roundup_power2_divisions

    @classmethod
    def from_string(cls, text: str) -> AllocatorSettings:
        """Return the settings in the text of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF.

        Known names without an effect in this model (`WITHOUT_EFFECT`) are accepted. Of a name given twice the last
        value counts, as in PyTorch.

        Raises
        ------
        InvalidInputError
            If a name is unknown, PyTorch would refuse a value, or a setting isn't modelled
            (`backend:cudaMallocAsync`, `throw_on_cudamalloc_oom:True`).
        """
        values: dict[str, object] = {}
        for name, value in _items(text):
            if name in _READERS:
                field, read = _READERS[name]
                values[field] = read(name, value)
            elif name == "backend":
                if value != "native":
                    raise InvalidInputError(f"backend:{value} isn't modelled; only the native allocator is")
            elif name == "throw_on_cudamalloc_oom":
                if _boolean(name, value):
                    raise InvalidInputError(f"{name}:True isn't modelled (which requests it refuses); leave it out")
            elif name not in WITHOUT_EFFECT:
                raise InvalidInputError(
                    f"unknown allocator setting {name!r} in {text!r}; known: {', '.join((*_READERS, *WITHOUT_EFFECT))}"
                )
        return cls(**values)  # type: ignore[arg-type]


def allocator_conf() -> str:
    """Return the allocator settings in the environment of this process, as text."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _check_divisions(value: object) -> int:
    # 1 means no division, as 0 does.
    if not is_int(value) or value < 0 or value & (value - 1):
        raise InvalidInputError(f"roundup_power2_divisions: {value!r} divisions; must be a power of two, or 0 for none")
    return value


def _intervals(given: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(given, (tuple, list)):
        if len(given) != INTERVALS:
            raise InvalidInputError(f"roundup_power2_divisions: {len(given)} numbers; there are {INTERVALS} intervals")
        return tuple(_check_divisions(value) for value in given)
    return (_check_divisions(given),) * INTERVALS


_ITEM = r"([^:,\[\]]+):([^,\[\]]+|\[[^\[\]]*\])"
"""Name and value of one setting; commas inside brackets don't separate settings."""


def _items(text: str) -> list[tuple[str, str]]:
    """Return name and value of each setting."""
    if not isinstance(text, str):
        raise InvalidInputError(f"allocator settings {text!r} must be text such as 'max_split_size_mb:128'")
    joined = "".join(text.split())  # PyTorch ignores blanks everywhere
    if not re.fullmatch(rf"({_ITEM}(,{_ITEM})*,?)?", joined):
        raise InvalidInputError(
            f"allocator settings {text!r} must read name:value, separated by commas; a list of values stands in"
            " brackets, such as roundup_power2_divisions:[256:2,>:4]"
        )
    return re.findall(_ITEM, joined)


def _boolean(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise InvalidInputError(f"{name}:{value} must be True or False, with a capital letter")
    return value == "True"


def _integer(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise InvalidInputError(f"{name}:{value} must be a whole number without sign or unit")
    return int(value)


def _mebibytes(name: str, value: str) -> int:
    return _integer(name, value) * MIB


def _division_list(name: str, value: str) -> tuple[int, ...]:
    """Return the divisions of each interval from text such as "8" or "[256:1,512:2,>:8]", with sizes in MiB."""
    if not value.startswith("["):
        divisions = _check_divisions(_integer(name, value))
        if divisions == 0:
            raise InvalidInputError(f"{name}:0 is refused by PyTorch; leave it out, or use 1, for no rounding")
        return (divisions,) * INTERVALS
    found = [0] * INTERVALS
    last: int | None = None
    first = True
    for entry in value[1:-1].split(","):
        size, colon, text = entry.partition(":")
        if not (size and colon and text):
            raise InvalidInputError(f"{name}: {entry!r} must read size:divisions, the size in MiB or '>'")
        divisions = _check_divisions(_integer(name, text))
        if size == ">":  # all intervals after the last one in the list
            start = 1 if last is None else last + 1
            found[start:] = [divisions] * (INTERVALS - start)
            continue
        size_mib = _integer(name, size)
        if size_mib < 1 or size_mib & (size_mib - 1):
            raise InvalidInputError(f"{name}: size {size} must be a power of two (MiB)")
        index = min(size_mib.bit_length() - 1, INTERVALS - 1)
        if first:
            found[:index] = [divisions] * index
            first = False
        found[index] = divisions
        last = index
    return tuple(found)


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_size_bytes", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _division_list),
}
"""Name in the text -> field, and the function that reads its value."""
