"""What a step took, stage by stage, as far as a running step can tell; and predictions told in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of compute that one stage takes in a step, and those it waits for copies."""

    forward_s: float = 0.0
    recompute_s: float = 0.0
    backward_s: float = 0.0
    stall_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All four."""
        return self.forward_s + self.recompute_s + self.backward_s + self.stall_s


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes over one way in one step, and how long its copies took, both directions apart.

    The seconds are those of the copies alone: what they waited in their queue doesn't count.
    """

    out_bytes: int = 0
    out_s: float = 0.0
    in_bytes: int = 0
    in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes of one moment, or most of a span of time, as CUDA's caching allocator counts them.

    Attributes
    ----------
    requested_bytes : int
        As asked for: tensors by their own sizes.
    allocated_bytes : int
        In blocks: rounded up to 512 bytes, and with rests that aren't split off, each up to 1 MiB.
    reserved_bytes : int
        In segments taken from the device, fragments included.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of a running training with a plan.

    Attributes
    ----------
    stages : tuple of StageTimes
        Medians over the steps, as a running step can tell them (`as_measured`).
    step_s : float
        Median, from the beginning of forward to the end of backward.
    steps : int
        How many were measured.
    host, disk : Copied
        The median step's copies to memory on the host and to disk.
    peak_bytes : int or None
        Most bytes in tensors on the device; None: not known.
    """

    stages: tuple[StageTimes, ...]
    step_s: float
    steps: int
    host: Copied = field(default_factory=Copied)
    disk: Copied = field(default_factory=Copied)
    peak_bytes: int | None = None


def told_together(glue: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the stages whose backward is measured with its own.

    Where glue's backward begins, no code of ours runs. Backward reaches it from the next module stage, to which its
    time is added; so a module stage's backward includes that of the glue in front of it. The glue behind the last
    module, which most often is the loss, has its backward added to its forward.
    """
    out: list[tuple[int, ...]] = [() for _ in glue]
    k = 0
    while k < len(glue):
        module = next((i for i in range(k, len(glue)) if not glue[i]), None)
        if module is None:
            for i in range(k, len(glue)):
                out[i] = (i,)
            break
        out[module] = tuple(range(k, module + 1))
        k = module + 1
    return tuple(out)


def as_measured(glue: Sequence[bool], times: Sequence[StageTimes]) -> tuple[StageTimes, ...]:
    """Predicted times, added up as a running step tells them."""
    out = []
    for i, members in enumerate(told_together(glue)):
        backward_s = sum(times[m].backward_s for m in members)
        if glue[i]:
            out.append(replace(times[i], forward_s=times[i].forward_s + backward_s, backward_s=0.0))
        else:
            out.append(replace(times[i], backward_s=backward_s))
    return tuple(out)
