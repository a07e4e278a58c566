"""Chen et al. (2016), algorithm 3: cut the chain when the bytes since the last cut exceed b, and scan b.

For a limit b the stages are walked in forward order, adding up what each saves; when the sum exceeds b, a segment
ends and the next begins. All segments but the last are recomputed as in `chen_sqrt`. The scan takes every b at which
the cuts can change: the sum of any run of stages, or 200 of these sums at most, evenly by rank (the paper takes a
handful between two estimates). The fastest of the plans that fit is returned, ties to the smallest b.

As in `chen_sqrt`, a stage that can't run again is kept and ends the segment in front of it. Its bytes still count
towards b.

Reference
---------
T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, algorithm 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ckptplan.baselines._build import Selection, build_fastest, named, own_bytes, runs
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment

LIMITS = 200


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Segments by the best limit.

    Raises
    ------
    InfeasibleBudgetError
        If no limit's segments fit.
    """
    return build_fastest(profile, _choices(profile), budget_bytes, "chen_greedy")


def _choices(profile: Profile) -> Iterator[Selection]:
    together = {i: number for number, run in enumerate(runs(profile)) for i in run}
    sizes = own_bytes(profile)
    n = len(sizes)
    upto = [0, *accumulate(sizes)]
    limits = sorted({upto[b] - upto[a] for a in range(n) for b in range(a + 1, n + 1)})
    if len(limits) > LIMITS:
        limits = [limits[k * (len(limits) - 1) // (LIMITS - 1)] for k in range(LIMITS)]
    seen = set()
    for limit in limits:
        parts: list[list[int]] = [[]]
        total = 0
        for i in range(n):
            if total + sizes[i] > limit and parts[-1]:
                parts.append([])
                total = 0
            total += sizes[i]
            parts[-1].append(i)
        segments = []
        for part in parts[:-1]:
            for number in sorted({together[i] for i in part if i in together}):
                within = [i for i in part if together.get(i) == number]
                segments.append(Segment(within[0], within[-1]))
        if tuple(segments) not in seen:
            seen.add(tuple(segments))
            yield named(profile, ["keep"] * n, segments)
