"""Measured times and bytes of a step by stage, and predicted times in the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage in a step: of compute, and of waiting for copies."""

    forward_s: float = 0.0
    recompute_s: float = 0.0
    backward_s: float = 0.0
    stall_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all four."""
        return self.forward_s + self.recompute_s + self.backward_s + self.stall_s


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes copied to and from a tier in one step, and the time of the copies.

    The time that copies wait in their queue doesn't count.
    """

    out_bytes: int = 0
    out_s: float = 0.0
    in_bytes: int = 0
    in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes at one moment, or their maximum over a span of time, as CUDA's caching allocator counts them.

    Attributes
    ----------
    requested_bytes : int
        Sizes of the tensors.
    allocated_bytes : int
        Sizes of their blocks: rounded up to 512 bytes, with rests of up to 1 MiB that aren't split off.
    reserved_bytes : int
        Sizes of the segments, fragments included.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


def backward_groups(glue: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Return, per stage, the stages whose backward is measured together with its own.

    No hook marks the beginning of glue's backward, so a module stage's backward is measured together with that of the
    glue in front of it. The backward of the glue behind the last module, usually the loss, is added to its own forward.
    For example, of the stages (glue, module, glue, module, glue), the groups are (), (0, 1), (), (2, 3), (4,).
    """
    out: list[tuple[int, ...]] = [() for _ in glue]
    begin = 0
    for i, is_glue in enumerate(glue):
        if not is_glue:
            out[i] = tuple(range(begin, i + 1))
            begin = i + 1
    for i in range(begin, len(glue)):
        out[i] = (i,)
    return tuple(out)


def as_measured(glue: Sequence[bool], times: Sequence[StageTimes]) -> tuple[StageTimes, ...]:
    """Return predicted times, summed in the way a running step measures them (`backward_groups`)."""
    out = []
    for i, members in enumerate(backward_groups(glue)):
        backward_s = sum(times[m].backward_s for m in members)
        if glue[i]:
            out.append(replace(times[i], forward_s=times[i].forward_s + backward_s, backward_s=0.0))
        else:
            out.append(replace(times[i], backward_s=backward_s))
    return tuple(out)
