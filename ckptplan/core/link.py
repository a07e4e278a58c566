"""Link: the connection to a tier of memory outside the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ckptplan.core.checks import check_fields

STAGING_BYTES = 64 << 20
"""Page-locked host memory of a disk tier beside a device: two chunks in each direction."""

Tier = Literal["host", "disk"]
"""Destination of swapped bytes: the host tier, or the disk behind it."""
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True)
class Link:
    """Rates and latencies of the connection to a tier, with one first-in-first-out queue in each direction.

    Transfers to the host tier and to the disk tier pass through the same two queues. Each takes the time of its own
    tier's link.

    Parameters
    ----------
    out_bytes_per_s, in_bytes_per_s : float
        Bandwidth to the tier and from it, above 0.
    latency_s : float
        Time of a transfer in addition to the time of its bytes.
    copy_s : float
        Time to issue the copy of one storage. Predicted times don't include it: storages so small that it matters
        (`least_bytes`) stay on the device.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields("link", self)

    @property
    def least_bytes(self) -> int:
        """Size of a storage whose copy takes as long to issue as to run; smaller ones lose over half the bandwidth."""
        return math.ceil(self.copy_s * max(self.out_bytes_per_s, self.in_bytes_per_s))

    def out_s(self, nbytes: int) -> float:
        """Return the time of a transfer of `nbytes` to the tier, without waiting."""
        return self.latency_s + nbytes / self.out_bytes_per_s

    def in_s(self, nbytes: int) -> float:
        """Return the time of a transfer of `nbytes` from the tier, without waiting."""
        return self.latency_s + nbytes / self.in_bytes_per_s

    def behind(self, nearer: Link) -> Link:
        """Return this measured link, limited by the rates and latencies of `nearer`, which its transfers use too."""
        return Link(
            min(self.out_bytes_per_s, nearer.out_bytes_per_s),
            min(self.in_bytes_per_s, nearer.in_bytes_per_s),
            max(self.latency_s, nearer.latency_s),
            max(self.copy_s, nearer.copy_s),
        )
