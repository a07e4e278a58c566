"""Overheads: what a running plan takes of compute besides the stages' own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptplan.core.checks import check_fields
from ckptplan.core.option import Option
from ckptplan.core.storage import Storage


@dataclass(frozen=True, slots=True)
class Overheads:
    """Compute time of a running plan besides the stages' own work: of the runtime's code, and lost to copies.

    The runtime's code runs on the host: beside a device that was timed, its seconds are launch time.

    Parameters
    ----------
    call_s : float
        Seconds per call of a stage.
    swap_s : float
        Seconds per stage that moves anything.
    storage_s : float
        Seconds per storage that such a stage saves: all of them are packed and unpacked.
    byte_s : float
        Seconds per byte moved out and back, by which the copies slow compute down.
    rerun_s : float
        Seconds per run of a stage in a segment's sweep, besides its forward.
    """

    call_s: float = 0.0
    swap_s: float = 0.0
    storage_s: float = 0.0
    byte_s: float = 0.0
    rerun_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields("overheads", self)

    def swapping_s(self, option: Option) -> float:
        """Return the time of the runtime's code for what `option` saves and moves."""
        return self.swap_s + self.storage_s * len(option.saved) if option.moves else 0.0

    def copies_s(self, option: Option, storages: Sequence[Storage]) -> float:
        """Return the time that the copies of `option` take from compute."""
        return sum(storages[s].nbytes for s in option.moved) * self.byte_s


NO_OVERHEADS = Overheads()
