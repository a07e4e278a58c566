"""Link: the way to a tier of memory behind the device and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ckptplan.core.checks import check_seconds, short_repr
from ckptplan.core.errors import InvalidInputError

STAGING_BYTES = 64 << 20
"""Page-locked host memory of a disk tier beside a device: two chunks in each direction."""

Tier = Literal["host", "disk"]
"""Where swapped bytes go: the host tier, or the disk behind it."""
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True)
class Link:
    """The way to a tier and back, at what speed a transfer passes the two first-in-first-out queues.

    A transfer is all that a stage moves in one direction.

    Parameters
    ----------
    latency_s : float
        What a transfer takes beyond its bytes.
    copy_s : float
        What each storage of a transfer takes to be issued. No time in a plan has it; storages for which it matters stay
        (`least_bytes`).
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("out_bytes_per_s", self.out_bytes_per_s), ("in_bytes_per_s", self.in_bytes_per_s)):
            # Beyond these, a transfer takes longer than the age of the universe or no time at all.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-3 <= value <= 1e18:
                raise InvalidInputError(
                    f"link: {name}={short_repr(value)} must be a finite number of bytes per second, from 1e-3 to 1e18"
                )
        check_seconds("link", latency_s=self.latency_s, copy_s=self.copy_s)

    @property
    def least_bytes(self) -> int:
        """A storage of fewer bytes takes longer to be issued than to be copied: half of the link's rate is lost."""
        return math.ceil(self.copy_s * max(self.out_bytes_per_s, self.in_bytes_per_s))

    def out_s(self, nbytes: int) -> float:
        """Time one transfer of `nbytes` takes to the tier, alone."""
        return self.latency_s + nbytes / self.out_bytes_per_s

    def in_s(self, nbytes: int) -> float:
        """Time one transfer of `nbytes` takes from the tier, alone."""
        return self.latency_s + nbytes / self.in_bytes_per_s

    def behind(self, nearer: Link) -> Link:
        """The same link, in nothing faster than `nearer`, through which its transfers pass; for what was measured."""
        return Link(
            min(self.out_bytes_per_s, nearer.out_bytes_per_s),
            min(self.in_bytes_per_s, nearer.in_bytes_per_s),
            max(self.latency_s, nearer.latency_s),
            max(self.copy_s, nearer.copy_s),
        )
