"""What decision vectors cost: bytes, lazy schedule and makespan, for many vectors at once.

Both halves of a step are the same *lane*: steps 0..n-1 run in order; what stage `i` moves joins a first-in-first-out
queue when step `i` ends; a step may only start once enough of the queue has gone for its bytes to fit; at the end
everything that moves has gone. Forward is this lane as it stands. Backward is it in reversed time: a return that is
issued at the start of backward step `prefetch` is, read backwards, a copy that must be done before step
`prefetch + 1` starts. A makespan is a longest path, and reversing every arrow leaves it as it is, so

    makespan = lane(forward times, link out) + lane(recompute + backward times, link in).

Copies leave oldest first, hence the stages whose bytes never need to be away form a suffix `i >= cutoff`, where
`cutoff` is the larger of the two lanes' queue fronts at the turn. These stages move nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptplan.core.chain import ACTIONS, Action, Phase, Storage
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile

Codes = NDArray[np.int8]
"""Decision vectors: one row each, one column per stage, values are positions in `ACTIONS`."""

KEEP, SWAP, RECOMPUTE = 0, 1, 2
_CELLS_PER_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Holder:
    """How one stage may hold one storage."""

    stage: int
    saved: bool
    pinned: bool
    inputs: bool

    def holds(self, code: int) -> bool:
        """Whether the stage holds the storage under the action `code`."""
        return self.inputs if code == RECOMPUTE else self.saved or self.pinned

    def fixes(self, code: int) -> bool:
        """Whether it holds it in a way that forbids moving it."""
        return self.pinned if code == SWAP else self.holds(code)


def holders_of(profile: Profile) -> tuple[tuple[Holder, ...], ...]:
    """Per storage, the stages that hold it under some action, in order."""
    found: list[list[Holder]] = [[] for _ in profile.storages]
    for i, stage in enumerate(profile.stages):
        for s in sorted({*stage.saved, *stage.pinned, *stage.inputs}):
            pinned = s in stage.pinned or (s in stage.saved and profile.storages[s].stays)
            found[s].append(Holder(i, s in stage.saved, pinned, s in stage.inputs))
    return tuple(tuple(holders) for holders in found)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of decision vectors before any transfer is scheduled; shapes (vectors, stages).

    `forward` and `backward` are the bytes of each step if everything that moves were away in every step but its own
    stage's; `moved` is what each stage moves.
    """

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    moved: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One decision vector with its lazy schedule and what it costs."""

    codes: tuple[int, ...]
    choices: tuple[Decision, ...]
    step_s: float
    peak_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class _Lazy:
    """Lazy schedules; `front[:, k]` is the first stage whose bytes may still be there in step `k`."""

    needs: Needs
    put: NDArray[np.int64]
    front_forward: NDArray[np.int64]
    front_backward: NDArray[np.int64]
    cutoff: NDArray[np.int64]
    fits: NDArray[np.bool_]
    host: NDArray[np.int64]


class Evaluator:
    """Bytes and time of decision vectors of one profile.

    Parameters
    ----------
    profile : Profile
    host_bytes : int, optional
        Limit on what is moved in all.
    """

    def __init__(self, profile: Profile, host_bytes: int | None = None) -> None:
        self.profile = profile
        self.host_bytes = host_bytes
        self.holders = holders_of(profile)
        n = len(profile.stages)
        self._forward_s = np.array([stage.forward_s for stage in profile.stages])
        backward = [(s.backward_s, s.backward_s, s.backward_s + s.recompute_s) for s in profile.stages]
        self._backward_s = np.array(backward)
        # Per stage and action, the bytes that depend on nothing else: bases, transients, storages of one holder.
        self._forward = np.zeros((n, 3, n + 1), np.int64)
        self._backward = np.zeros((n, 3, n + 1), np.int64)
        self._moved = np.zeros((n, 3), np.int64)
        self._shared: list[tuple[Storage, tuple[Holder, ...]]] = []
        self._constant_forward = np.zeros(n + 1, np.int64)
        self._constant_backward = np.zeros(n + 1, np.int64)
        self._transient_forward = np.zeros((n, 3), np.int64)
        self._transient_backward = np.zeros((n, 3), np.int64)
        for i, stage in enumerate(profile.stages):
            for code, action in enumerate(ACTIONS):
                transient = stage.transient(action)
                if transient is not None:
                    self._transient_forward[i, code] = transient.forward_bytes
                    self._transient_backward[i, code] = transient.backward_bytes
        for storage, holders in zip(profile.storages, self.holders, strict=True):
            if storage.nbytes == 0:
                continue
            if storage.to_end:
                self._constant_forward[storage.born + 1] += storage.nbytes
                self._constant_backward[0] += storage.nbytes
            elif len(holders) > 1:
                self._shared.append((storage, holders))
            else:
                self._add_private(storage, holders[0] if holders else None)

    def _add_private(self, storage: Storage, holder: Holder | None) -> None:
        n, nbytes = len(self.profile.stages), storage.nbytes
        gone = min(storage.program_until + 1, n)
        self._constant_forward[storage.born + 1] += nbytes
        if holder is None:
            self._constant_forward[gone] -= nbytes
            return
        i = holder.stage
        for code in range(3):
            if not holder.holds(code):
                self._forward[i, code, gone] -= nbytes
                continue
            moves = code == SWAP and not holder.fixes(code) and i < n - 1 and storage.program_until <= i
            end = i + 1 if moves else n
            self._forward[i, code, end] -= nbytes
            self._backward[i, code, i] += nbytes
            self._backward[i, code, end] -= nbytes
            self._moved[i, code] += nbytes if moves else 0

    def needs(self, codes: Codes) -> Needs:
        """Bytes per step (NOTE [Residency]) of each row of `codes`."""
        rows, n = codes.shape
        index = np.arange(rows)
        forward = np.tile(self._constant_forward, (rows, 1))
        backward = np.tile(self._constant_backward, (rows, 1))
        moved = self._moved[np.arange(n), codes]
        for i in range(n):
            forward += self._forward[i][codes[:, i]]
            backward += self._backward[i][codes[:, i]]
        for storage, holders in self._shared:
            first = np.full(rows, n)
            last = np.full(rows, -1)
            fixed = np.zeros(rows, bool)
            for holder in holders:
                holds = np.array([holder.holds(code) for code in range(3)])[codes[:, holder.stage]]
                fixed |= np.array([holder.fixes(code) for code in range(3)])[codes[:, holder.stage]]
                np.minimum(first, np.where(holds, holder.stage, n), out=first)
                last[holds] = holder.stage
            moves = ~fixed & (last >= max(storage.program_until, 0)) & (last < n - 1)
            end = np.where(moves, last + 1, n)
            forward[:, storage.born + 1] += storage.nbytes
            forward[index, np.where(first < n, end, min(storage.program_until + 1, n))] -= storage.nbytes
            backward[index, first] += storage.nbytes
            backward[index, end] -= storage.nbytes
            moved[index[moves], last[moves]] += storage.nbytes
        every = np.arange(n)
        own_forward = self._transient_forward[every, codes] + np.array(self.profile.base_forward_bytes)
        own_backward = self._transient_backward[every, codes] + np.array(self.profile.base_backward_bytes)
        return Needs(
            np.cumsum(forward, axis=1)[:, :n] + own_forward, np.cumsum(backward, axis=1)[:, :n] + own_backward, moved
        )

    def makespans(self, codes: Codes, budget_bytes: int) -> NDArray[np.float64]:
        """Makespan of each row's lazy schedule, infinite where the row doesn't fit."""
        step = max(1, _CELLS_PER_CHUNK // codes.shape[1])
        parts = [self._makespans(codes[a : a + step], budget_bytes) for a in range(0, len(codes), step)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _makespans(self, codes: Codes, budget_bytes: int) -> NDArray[np.float64]:
        out = np.full(len(codes), np.inf)
        lazy = self._lazy(codes, budget_bytes)
        kept = np.flatnonzero(lazy.fits)
        if len(kept) == 0:
            return out
        link, n = self.profile.link, codes.shape[1]
        forward_s = np.broadcast_to(self._forward_s, (len(kept), n))
        backward_s = self._backward_s[np.arange(n), codes[kept]]
        moved = np.where(np.arange(n) < lazy.cutoff[kept, None], lazy.needs.moved[kept], 0)
        out[kept] = _lane(lazy.front_forward[kept], moved, forward_s, link.latency_s, link.out_bytes_per_s)
        out[kept] += _lane(lazy.front_backward[kept], moved, backward_s, link.latency_s, link.in_bytes_per_s)
        # The same seconds added in another order may come out a rounding below the baseline.
        np.maximum(out, self.profile.baseline_step_s, out=out)
        return out

    def _lazy(self, codes: Codes, budget_bytes: int) -> _Lazy:
        needs = self.needs(codes)
        put = np.zeros((len(codes), codes.shape[1] + 1), np.int64)
        np.cumsum(needs.moved, axis=1, out=put[:, 1:])
        front_forward = _fronts(needs.forward, put, budget_bytes)
        front_backward = _fronts(needs.backward, put, budget_bytes)
        cutoff = np.maximum(front_forward[:, -1], front_backward[:, -1])
        self._enforce(front_forward, front_backward, cutoff)
        host = put[np.arange(len(codes)), cutoff]
        fits = (needs.forward.max(axis=1) <= budget_bytes) & (needs.backward.max(axis=1) <= budget_bytes)
        fits &= self.profile.update_peak_bytes <= budget_bytes
        if self.host_bytes is not None:
            fits &= host <= self.host_bytes
        return _Lazy(needs, put, front_forward, front_backward, cutoff, fits, host)

    def _enforce(
        self, front_forward: NDArray[np.int64], front_backward: NDArray[np.int64], cutoff: NDArray[np.int64]
    ) -> None:
        """Points inside glue move to where the runtime can meet them (NOTE [Residency], rule 4)."""
        glue = [stage.is_glue for stage in self.profile.stages]
        if all(glue) or not any(glue):
            return
        last = max(k for k, inside in enumerate(glue) if not inside)
        front_forward[:, last + 1 :] = cutoff[:, None]
        front_backward[:, last + 1 :] = cutoff[:, None]
        for k in range(last, -1, -1):
            if glue[k]:
                front_backward[:, k] = np.minimum(front_backward[:, k + 1], k)

    def smallest_peaks(self, codes: Codes) -> NDArray[np.int64]:
        """The smallest budget each row fits in.

        Everything that moves is away, up to the last stage that the host limit lets move.
        """
        step = max(1, _CELLS_PER_CHUNK // codes.shape[1])
        parts = [self._smallest_peaks(codes[a : a + step]) for a in range(0, len(codes), step)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _smallest_peaks(self, codes: Codes) -> NDArray[np.int64]:
        forward, backward = self.tightest(codes)
        peaks = np.full(len(codes), self.profile.update_peak_bytes, np.int64)
        np.maximum(peaks, forward.max(axis=1), out=peaks)
        np.maximum(peaks, backward.max(axis=1), out=peaks)
        return peaks

    def tightest(self, codes: Codes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes per forward and backward step in the schedule of the smallest peak."""
        needs = self.needs(codes)
        if self.host_bytes is None:
            return needs.forward, needs.backward
        stays = np.where(np.cumsum(needs.moved, axis=1) > self.host_bytes, needs.moved, 0)
        before = np.cumsum(stays, axis=1) - stays
        return needs.forward + before, needs.backward + before

    def schedule(self, codes: Sequence[int], budget_bytes: int) -> Schedule | None:
        """The lazy schedule of one vector, None where it doesn't fit."""
        row = np.array([codes], np.int8)
        lazy = self._lazy(row, budget_bytes)
        if not lazy.fits[0]:
            return None
        n, cutoff = row.shape[1], int(lazy.cutoff[0])
        moves = self._moves(codes)
        choices = []
        peak = self.profile.update_peak_bytes
        for need, front in ((lazy.needs.forward, lazy.front_forward), (lazy.needs.backward, lazy.front_backward)):
            staying = lazy.put[0, :n] - lazy.put[0, front[0]]
            peak = max(peak, int((need[0] + staying).max()))
        for i, code in enumerate(codes):
            if not moves[i] or i >= cutoff:
                choices.append(Decision(ACTIONS[code]))
                continue
            # The front is past a stage from the first step on in which its bytes must be away.
            release = int(np.searchsorted(lazy.front_forward[0], i, side="right")) - 1
            prefetch = int(np.searchsorted(lazy.front_backward[0], i, side="right")) - 1
            choices.append(Decision("swap", moves[i], release, prefetch))
        step_s = float(self._makespans(row, budget_bytes)[0])
        return Schedule(tuple(codes), tuple(choices), step_s, peak, int(lazy.host[0]))

    def _moves(self, codes: Sequence[int]) -> list[tuple[int, ...]]:
        n = len(codes)
        mover: dict[int, int] = {}
        for s, (storage, holders) in enumerate(zip(self.profile.storages, self.holders, strict=True)):
            actual = [h for h in holders if h.holds(codes[h.stage])]
            if not actual or storage.to_end or not storage.nbytes or any(h.fixes(codes[h.stage]) for h in actual):
                continue
            last = actual[-1].stage
            if last < n - 1 and storage.program_until <= last:
                mover[s] = last
        return [
            tuple(p for p, s in enumerate(stage.saved) if mover.get(s) == i)
            for i, stage in enumerate(self.profile.stages)
        ]

    def binding(self, codes: Sequence[int]) -> tuple[str, Phase]:
        """Stage and phase of the peak in the tightest schedule of one vector."""
        forward, backward = self.tightest(np.array([codes], np.int8))
        peak = max(int(forward.max()), int(backward.max()))
        if self.profile.update_peak_bytes > peak:
            return self.profile.stages[0].name, "update"
        if int(forward.max()) == peak:
            return self.profile.stages[int(forward[0].argmax())].name, "forward"
        # Backward runs from the last stage to the first: the first moment of the peak is at the highest stage.
        return self.profile.stages[int(np.flatnonzero(backward[0] == peak)[-1])].name, "backward"


def _fronts(needs: NDArray[np.int64], put: NDArray[np.int64], budget_bytes: int) -> NDArray[np.int64]:
    """Per step, the shortest prefix of the queue that must have left for the step to fit."""
    rows, n = needs.shape
    front = np.zeros((rows, n), np.int64)
    for k in range(n):
        surplus = needs[:, k] + put[:, k] - budget_bytes
        front[:, k] = np.minimum((put[:, : k + 1] < surplus[:, None]).sum(axis=1), k)
    np.maximum.accumulate(front, axis=1, out=front)
    return front


def _lane(
    front: NDArray[np.int64],
    moved: NDArray[np.int64],
    compute_s: NDArray[np.float64],
    latency_s: float,
    bytes_per_s: float,
) -> NDArray[np.float64]:
    """Duration of a lane, the wait for everything that moves included; shapes (vectors, stages)."""
    rows, n = moved.shape
    index = np.arange(rows)
    done = np.zeros((rows, n + 1))
    now = np.zeros(rows)
    for k in range(n):
        now = np.maximum(now, done[index, front[:, k]]) + compute_s[:, k]
        copy_s = latency_s + moved[:, k] / bytes_per_s
        done[:, k + 1] = np.where(moved[:, k] > 0, np.maximum(now, done[:, k]) + copy_s, done[:, k])
    return np.maximum(now, done[:, n])


def menus(profile: Profile, actions: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the codes of the actions it can take out of `actions`; keep is always one."""
    allowed = {*actions, "keep"}
    return tuple(tuple(ACTIONS.index(a) for a in stage.actions if a in allowed) for stage in profile.stages)
