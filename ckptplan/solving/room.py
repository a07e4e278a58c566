"""Memory for what plans move: the host's, filled in the order of the stages, and the disk's for the rest.

Which of the two takes a stage's bytes changes how long its copies take, and nothing else. Searches and bounds have one
limit, host and disk together, and plan every copy at the rate of the host's link. No disk is faster than that
(`Profile.disk`), so their bounds hold. A plan is judged with its copies placed as `Room.on_disk` says.

Example: stages move 4, 5, 3 and 2 bytes, and the host has room for 8. It takes 4, then 3 of the third stage, since the
second one's 5 no longer fit; 5 and 2 go to the disk. If the disk has room for 6 alone, the host takes 5 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.solving.parameters import DEFAULT


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on the bytes moved to the host (None: no limit), and to the disk, which takes what the host can't hold."""

    host_bytes: int | None = None
    disk_bytes: int = 0

    @classmethod
    def of(cls, profile: Profile, limits: Limits) -> Room:
        """Return the room within `limits`; no disk where it isn't needed, since the host has no limit.

        Raises
        ------
        InvalidInputError
            If the disk may be used, and the profile doesn't know how fast it is.
        """
        host_bytes, disk_bytes = limits.host_bytes, limits.disk_bytes or 0
        if disk_bytes and profile.disk is None:
            raise InvalidInputError(
                f"disk_bytes={disk_bytes}, but the profile knows no disk tier: on CUDA pass swap_dir= when profiling, "
                "so that the disk is measured; on the CPU the host tier is the disk already, so limit it with "
                "host_gb=; to a profile made by hand add one: dataclasses.replace(profile, disk=Link(...))"
            )
        return cls(host_bytes, 0 if host_bytes is None else disk_bytes)

    @property
    def total_bytes(self) -> int | None:
        """Limit on all bytes moved; None: no limit."""
        return None if self.host_bytes is None else self.host_bytes + self.disk_bytes

    def movable(self, profile: Profile) -> Profile:
        """`profile`; where there is no room at all, one whose storages all stay."""
        if self.total_bytes != 0:
            return profile
        return replace(profile, storages=tuple(replace(storage, stays=True) for storage in profile.storages))

    def on_disk(self, moved: Sequence[int]) -> frozenset[int] | None:
        """The stages whose bytes go to the disk; None where host and disk have no room for all.

        The host takes each stage's bytes in turn that it still has room for. Where that leaves more than the disk can
        hold, the host is filled as far as it can be.

        Parameters
        ----------
        moved : sequence of int
            Bytes that each stage moves.
        """
        total = sum(moved)
        if self.host_bytes is None or total <= self.host_bytes:
            return frozenset()
        left, beyond = self.host_bytes, []
        for i, nbytes in enumerate(moved):
            if nbytes <= left:
                left -= nbytes
            else:
                beyond.append(i)
        if total - (self.host_bytes - left) <= self.disk_bytes:
            return frozenset(beyond)
        return self._packed(moved) if total <= self.host_bytes + self.disk_bytes else None

    def _packed(self, moved: Sequence[int]) -> frozenset[int] | None:
        """Return the stages on the disk with the fullest host found; of many sums, those that fill it most are kept."""
        assert self.host_bytes is not None
        movers = {i: nbytes for i, nbytes in enumerate(moved) if nbytes}
        sums = {0: frozenset(movers)}  # bytes on the host -> stages on the disk
        for i, nbytes in movers.items():
            grown = {held + nbytes: rest - {i} for held, rest in sums.items() if held + nbytes <= self.host_bytes}
            sums = dict(sorted((grown | sums).items())[-DEFAULT.least_width :])
        fullest = max(sums)
        return sums[fullest] if sum(moved) - fullest <= self.disk_bytes else None
