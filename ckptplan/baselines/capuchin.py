"""Capuchin (Peng et al. 2020): swap while it hides, then swap or recompute, whichever frees more bytes per second.

From a step with everything kept, the free time of a saved set is FT = access back - access away - time out - time in:
how much of both copies compute would hide. While bytes are missing:

1. Take the set with the largest FT, if that isn't negative, and swap it.
2. Else compare that set's swap, which costs -FT, with the recompute of the set that frees most bytes per recompute
   second, and take what frees more bytes per second.
3. Update: the recompute of a set whose source is recomputed too costs the source's time as well.

Access away is the end of a stage's forward, access back the start of its backward. The paper moves prefetches earlier
by feedback at run time; here release and prefetch points are the best there are. Update 3 speaks of recomputed
neighbours as one chain, so they can form a segment. What the rule leaves open is tried in all ways, and the fastest
that fits is returned: neighbours recomputed together (segments) or each by itself, and then with or without their
inputs swapped; FT of a set by itself, or less the copies already picked, since these use the same link.

Reference
---------
X. Peng, X. Shi, H. Dai, H. Jin, W. Ma, Q. Xiong, F. Yang, X. Qian, "Capuchin: Tensor-based GPU Memory Management for
Deep Learning", ASPLOS 2020, sections 4.3 to 4.5.
"""

from __future__ import annotations

import math
from itertools import accumulate

from ckptplan.baselines._build import (
    Selection,
    build_fastest,
    movable_bytes,
    named,
    own_bytes,
    smallest_peak,
    ways_to_recompute,
)
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Pick swaps and recomputes until nothing is missing.

    Raises
    ------
    InfeasibleBudgetError
        If all picks together don't fit.
    """
    selections = [
        _pick(profile, budget_bytes, again, chained, shared)
        for again, chained in sorted(ways_to_recompute(profile))
        for shared in (False, True)
    ]
    return build_fastest(profile, selections, budget_bytes, "capuchin")


def free_times(profile: Profile, sizes: tuple[int, ...]) -> list[float]:
    """FT of every stage in a step with everything kept; seconds."""
    away = list(accumulate(stage.forward_s for stage in profile.stages))
    behind = list(accumulate(stage.backward_s for stage in reversed(profile.stages)))
    n, link = len(sizes), profile.link
    return [
        # Backward of stage i starts when those of i+1.. are done.
        away[-1] + (behind[n - 2 - i] if i < n - 1 else 0.0) - away[i] - link.out_s(sizes[i]) - link.in_s(sizes[i])
        for i in range(n)
    ]


def _pick(profile: Profile, budget_bytes: int, again: str, chained: bool, shared: bool) -> Selection:
    n = len(profile.stages)
    moved, freed = movable_bytes(profile), own_bytes(profile)
    free_s = free_times(profile, moved)
    again_s = [math.inf if stage.recompute is None else stage.recompute.recompute_s for stage in profile.stages]
    names = ["keep"] * n

    def selection() -> Selection:
        return named(profile, names, chained=chained)

    while smallest_peak(profile, selection()).bytes > budget_bytes:
        left = [i for i in range(n) if names[i] == "keep"]
        swap = max((i for i in left if moved[i]), key=lambda i: free_s[i], default=None)
        redo = max(
            (i for i in left if freed[i] and again_s[i] < math.inf),
            key=lambda i: _rate(freed[i], again_s[i]),
            default=None,
        )
        if swap is not None and (
            free_s[swap] >= 0 or redo is None or _rate(moved[swap], -free_s[swap]) >= _rate(freed[redo], again_s[redo])
        ):
            names[swap] = "swap"
            if shared:
                copies_s = profile.link.out_s(moved[swap]) + profile.link.in_s(moved[swap])
                free_s = [seconds - copies_s for seconds in free_s]
        elif redo is not None:
            names[redo] = again
            if chained and redo + 1 < n:
                again_s[redo + 1] += again_s[redo]
        else:
            break
    return selection()


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else math.inf
