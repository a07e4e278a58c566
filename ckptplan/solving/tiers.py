"""Two tiers behind the device: what goes to the host, and what to the disk because the host can't hold it.

Both tiers are reached through the same two queues, and a copy to the disk takes longer. Which stages' bytes go there
changes neither the device's bytes nor the schedule's points (`core/schedule.py`): only how long copies take. So a plan
with three tiers is a plan with one limit, host and disk together, whose copies are then divided.

Dividing: a copy that gets faster never makes a step longer, so the host takes as much as it can hold, and the sets that
matter are those to which no further stage's bytes could be added. For few stages that move all of them are tried;
for more, the host is filled in a few orders, and the best one is improved by exchanges (`TieredEvaluator`).

Bounds. With every copy at the link's rate and one limit for both tiers, no plan gets slower: that bound holds. It is
weak where much goes to the disk, so another is added: with every copy at the disk's rate v, lower than the link's, a
plan's copies to the host take longer by at most host_bytes * (1 / v - 1 / link) in all, and its copies to the disk no
longer than before. A makespan is a longest path and grows by no more than what its copies do. So

    makespan >= (bound with every copy at rate v) - host_bytes * (1 / v_out - 1 / link_out + 1 / v_in - 1 / link_in),

with the link's latency for each copy: nothing is known of their number (`slower_link`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.link import Link
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S
from ckptplan.solving.cost import Codes, Evaluator, Queued, Schedule, Segments, copies_s
from ckptplan.solving.parameters import DEFAULT, ROUNDING, Parameters
from ckptplan.solving.points import Room

Bools = NDArray[np.bool_]


def check_disk(profile: Profile, host_bytes: int | None, disk_bytes: int | None) -> int:
    """Most bytes that may go to the disk: 0 where there is no such tier, or no need of one since the host has no limit.

    Raises
    ------
    InvalidInputError
        If the disk may be used, and the profile doesn't know how fast it is.
    """
    if not disk_bytes:
        return 0
    if profile.disk is None:
        raise InvalidInputError(
            f"disk_bytes={disk_bytes}, but the profile knows no disk tier: on CUDA pass swap_dir= when profiling, so "
            "that the disk is measured; on the CPU the host tier is the disk already, so limit it with host_gb=; to a "
            "profile made by hand add one: dataclasses.replace(profile, disk=Link(...))"
        )
    return 0 if host_bytes is None else disk_bytes


def all_bytes(host_bytes: int | None, disk_bytes: int) -> int | None:
    """Most that may move in all; None: no limit."""
    return None if host_bytes is None else host_bytes + disk_bytes


def within_tiers(profile: Profile, moved_bytes: int | None) -> Profile:
    """`profile`; where `moved_bytes`, the most that may move in all, is 0, one whose storages all stay."""
    if moved_bytes != 0:
        return profile
    return replace(profile, storages=tuple(replace(storage, stays=True) for storage in profile.storages))


def evaluator_of(
    profile: Profile, host_bytes: int | None, disk_bytes: int, parameters: Parameters = DEFAULT
) -> Evaluator:
    """The evaluator of plans that use these tiers."""
    if host_bytes is None or not disk_bytes:
        return Evaluator(profile, host_bytes, parameters=parameters)
    return TieredEvaluator(profile, host_bytes, disk_bytes, parameters=parameters)


def slower_link(profile: Profile, host_bytes: int) -> tuple[Profile, float]:
    """`profile` with a link as slow as its disk, and by how many seconds that may make a plan's step longer."""
    link, disk = profile.link, profile.disk
    assert disk is not None
    out_s, in_s = (
        1 / slow - 1 / fast
        for slow, fast in (
            (disk.out_bytes_per_s, link.out_bytes_per_s),
            (disk.in_bytes_per_s, link.in_bytes_per_s),
        )
    )
    slower = Link(1 / (1 / link.out_bytes_per_s + out_s), 1 / (1 / link.in_bytes_per_s + in_s), link.latency_s)
    more_s = host_bytes * (out_s + in_s)
    # Rounding makes no bound too large.
    return replace(profile, link=slower, disk=disk.behind(slower)), more_s * (1 + ROUNDING)


class TieredEvaluator(Evaluator):
    """Bytes and time of plans whose copies go to the host as far as it can hold them, and to the disk beyond.

    Parameters
    ----------
    profile : Profile
        With a disk tier.
    host_bytes, disk_bytes : int
        Limits of the two.
    parameters : Parameters, optional
        Numbers that bound time and memory.

    Attributes
    ----------
    host_bytes : int
        Both limits together: what may move in all.
    """

    def __init__(self, profile: Profile, host_bytes: int, disk_bytes: int, *, parameters: Parameters = DEFAULT) -> None:
        super().__init__(profile, host_bytes + disk_bytes, parameters=parameters)
        self.nearer_bytes, self.disk_bytes = host_bytes, disk_bytes
        self._divided: dict[tuple[int, ...], Bools] = {}

    def too_much(self, moved: NDArray[np.int64]) -> Bools:
        """Each stage's bytes go to one tier as a whole, so both together may hold less than the sum of their limits."""
        out = np.asarray(super().too_much(moved))
        most = max(self.nearer_bytes, self.disk_bytes)
        for row in np.flatnonzero(moved.sum(axis=1) > most):
            sums: dict[int, int] = {0: 0}
            total = 0
            for i in np.flatnonzero(moved[row]).tolist():
                total += int(moved[row, i])
                sums = self._grown(sums, int(moved[row, i]), 0)
                if max(sums) < total - self.disk_bytes:
                    out[row, i:] = True
                    break
        return out

    def room(self, budget_bytes: int) -> Room:
        """The limits of all tiers."""
        return Room(budget_bytes, self.nearer_bytes, self.disk_bytes)

    def queued_s(self, queued: Queued) -> NDArray[np.float64]:
        """Makespans with the best division found of what each plan moves; infinite where none fits."""
        seconds = super().queued_s(queued)
        beyond = np.flatnonzero(queued.moved.sum(axis=1) > self.nearer_bytes)
        if len(beyond) == 0:
            return seconds
        seconds[beyond] = math.inf
        most = max(1, self.parameters.cells // queued.moved.shape[1])
        which: list[NDArray[np.int64]] = []
        divided: list[Bools] = []
        count = 0
        for row in [*beyond.tolist(), -1]:
            found = self.divisions(queued.moved[row]) if row >= 0 else None
            if count and (found is None or count + len(found) > most):
                rows, on_disk = np.concatenate(which), np.concatenate(divided)
                np.minimum.at(seconds, rows, self._divided_s(queued.take(rows), on_disk))
                which, divided, count = [], [], 0
            if found is not None:
                which.append(np.full(len(found), row))
                divided.append(found)
                count += len(found)
        return seconds

    def _divided_s(self, queued: Queued, on_disk: Bools) -> NDArray[np.float64]:
        """Makespans with these stages' copies going to the disk."""
        link, disk = self.profile.link, self.profile.disk
        assert disk is not None
        ways = zip(copies_s(queued.moved, disk), copies_s(queued.moved, link), strict=True)
        out_s, in_s = (np.where(on_disk, slow, fast) for slow, fast in ways)
        return queued.seconds(out_s, in_s)

    def divisions(self, moved: NDArray[np.int64]) -> Bools:
        """Per division, whether each stage's moves go to the disk; shape (divisions, stages), empty where none fits.

        Every division that matters where no more than `Parameters.tried` are to be looked at, else some.
        """
        movers = np.flatnonzero(moved)
        sizes = tuple(moved[movers].tolist())
        found = self._divided.get(sizes)
        if found is None:
            if len(self._divided) > self.parameters.tried:  # bounds memory
                self._divided.clear()
            found = self._all(sizes) if self._few(len(sizes)) else self._some(sizes)
            self._divided[sizes] = found
        out = np.zeros((len(found), len(moved)), bool)
        out[:, movers] = found
        return out

    def _few(self, movers: int) -> bool:
        """Whether all divisions of what so many stages move are tried."""
        return 1 << movers <= self.parameters.tried

    def _all(self, sizes: Sequence[int]) -> Bools:
        masks = np.arange(1 << len(sizes))[:, None]
        on_disk = (masks >> np.arange(len(sizes))) & 1 == 1
        nbytes = np.array(sizes, np.int64)
        host = (~on_disk * nbytes).sum(axis=1)
        fits = (host <= self.nearer_bytes) & ((on_disk * nbytes).sum(axis=1) <= self.disk_bytes)
        # Where another one's bytes have room on the host, it is better there.
        full = (~on_disk | (host[:, None] + nbytes > self.nearer_bytes)).all(axis=1)
        return np.asarray(on_disk[fits & full])

    def _some(self, sizes: Sequence[int]) -> Bools:
        """The host filled from each of several stages on, from the last one back, and by size."""
        n, parts = len(sizes), max(1, self.parameters.window)
        every = range(n)
        orders = [
            *([*every[n * part // parts :], *every[: n * part // parts]] for part in range(parts)),
            list(reversed(every)),
            sorted(every, key=lambda i: -sizes[i]),
            sorted(every, key=lambda i: sizes[i]),
        ]
        found = {mask for order in orders if (mask := self._filled(sizes, order)) is not None}
        if not found:
            packed = self._packed(sizes)
            found = set() if packed is None else {packed}
        return np.array(sorted(found), bool).reshape(len(found), n)

    def _filled(self, sizes: Sequence[int], order: Sequence[int]) -> tuple[bool, ...] | None:
        """The host filled in this order; None where the rest is too much for the disk."""
        on_disk = [True] * len(sizes)
        left = self.nearer_bytes
        for i in order:
            if sizes[i] <= left:
                on_disk[i] = False
                left -= sizes[i]
        fits = sum(itertools.compress(sizes, on_disk)) <= self.disk_bytes
        return tuple(on_disk) if fits else None

    def _packed(self, sizes: Sequence[int]) -> tuple[bool, ...] | None:
        """The fullest host; None where even then the rest is too much for the disk, or none was found."""
        sums: dict[int, int] = {0: 0}
        for i, nbytes in enumerate(sizes):
            sums = self._grown(sums, nbytes, 1 << i)
        fullest = max(sums)
        if sum(sizes) - fullest > self.disk_bytes:
            return None
        return tuple(not sums[fullest] >> i & 1 for i in range(len(sizes)))

    def _grown(self, sums: dict[int, int], nbytes: int, bit: int) -> dict[int, int]:
        """Bytes that may be on the host -> stages that are there, with one more stage there or not."""
        room = self.nearer_bytes - nbytes
        grown = {**{total + nbytes: mask | bit for total, mask in sums.items() if total <= room}, **sums}
        most = self.parameters.tried
        if len(grown) > most:
            keys = sorted(grown)
            grown = {key: grown[key] for key in (*keys[:: len(keys) // max(1, most // 2) + 1], keys[-1])}
        return grown

    def step_s(self, codes: Sequence[int], budget_bytes: int, segments: Segments = ()) -> float:
        """Makespan of one plan, infinite where it doesn't fit."""
        if super().step_s(codes, budget_bytes, segments) == math.inf:
            return math.inf
        return float(self.makespans(np.array([codes], np.int8), budget_bytes, segments)[0])

    def schedule(self, codes: Sequence[int], budget_bytes: int, segments: Segments = ()) -> Schedule | None:
        """The lazy schedule of one plan, its copies divided as well as is known how; None where it doesn't fit."""
        found = super().schedule(codes, budget_bytes, segments)
        if found is None or found.host_bytes <= self.nearer_bytes:
            return found
        row: Codes = np.array([found.codes], np.int8)
        _, queued = self._lazy(row, budget_bytes, segments)
        if len(self.divisions(queued.moved[0])) == 0:
            return None
        on_disk, step_s = self._improved(queued)
        disk = int(queued.moved[0][on_disk].sum())
        choices = tuple(
            replace(choice, tier="disk") if away else choice
            for choice, away in zip(found.choices, on_disk.tolist(), strict=True)
        )
        step_s = max(float(self.launched(np.array([step_s]), row, segments)[0]), self.profile.baseline_step_s)
        return replace(found, choices=choices, step_s=step_s, host_bytes=found.host_bytes - disk, disk_bytes=disk)

    def _improved(self, queued: Queued) -> tuple[Bools, float]:
        """The best division of what one plan moves, and its makespan; where not all were tried, after exchanges."""
        moved = queued.moved[0]

        def best_of(divisions: Bools) -> tuple[Bools, float]:
            seconds = self._divided_s(queued.take(np.zeros(len(divisions), np.int64)), divisions)
            return divisions[seconds.argmin()], float(seconds.min())

        best, best_s = best_of(self.divisions(moved))
        while not self._few(int((moved > 0).sum())):
            neighbours = self._exchanged(moved, best)
            if len(neighbours) == 0:
                break
            other, other_s = best_of(neighbours)
            if other_s >= best_s * (1 - EQUAL_S):
                break
            best, best_s = other, other_s
        for i in sorted(np.flatnonzero(best).tolist(), key=lambda i: -int(moved[i])):
            # The disk gets only what the host can't hold; no copy gets slower by this.
            if int(moved[~best].sum() + moved[i]) <= self.nearer_bytes:
                best = best.copy()
                best[i] = False
        return best_of(best[None])

    def _exchanged(self, moved: NDArray[np.int64], on_disk: Bools) -> Bools:
        """Divisions with one stage's bytes taken back to the host, and another's sent to the disk for them or none's.

        Parameters
        ----------
        on_disk : array (stages,)
        """
        back = np.flatnonzero(on_disk)
        away = np.flatnonzero(~on_disk & (moved > 0))
        host, disk = int(moved[away].sum()), int(moved[back].sum())
        pairs = [(b, a) for b in back.tolist() for a in (-1, *away.tolist())]
        out = []
        for b, a in pairs[:: len(pairs) // max(1, self.parameters.tried) + 1]:
            more = int(moved[b]) - (int(moved[a]) if a >= 0 else 0)
            if host + more <= self.nearer_bytes and disk - more <= self.disk_bytes:
                other = on_disk.copy()
                other[b] = False
                if a >= 0:
                    other[a] = True
                out.append(other)
        return np.array(out, bool).reshape(len(out), len(moved))
