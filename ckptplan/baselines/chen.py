"""Chen et al. (2016): the chain cut into segments, all but the last recomputed.

`sqrt`, section 4: the L stages that can be recomputed are cut into ceil(sqrt(L)) segments as equal as can be.
`greedy`, algorithm 3: for a limit b the stages are walked in forward order, adding up what each saves; when the sum
exceeds b, a segment ends and the next begins. The scan takes every b at which the cuts can change: the sum of any run
of stages, or 200 of these sums at most, evenly by rank (the paper takes a handful between two estimates). The fastest
of the plans that fit is returned, ties to the smallest b.

The last segment is kept, since its backward follows at once. Of every other one only the inputs are held; its forward
runs again as one sweep, whose stages are kept until their backward (no nesting). Stages that can't run again are kept,
and a segment never spans one: where a cut would, the segment is split there; the bytes of such a stage still count
towards b. The paper cuts a graph of operations; here a cut can lie between stages only.

Reference
---------
T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ckptplan.baselines._build import Selection, build, build_fastest, named, own_bytes, runs
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment

MOST_LIMITS = 200
"""Limits scanned: their number grows with the square of the stages."""


def sqrt(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute all but the last of about sqrt(L) segments.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    decidable = [i for run in runs(profile) for i in run]
    length = len(decidable)
    count = math.isqrt(length - 1) + 1 if length else 1  # ceil(sqrt(length)), exactly
    parts = [decidable[number * length // count : (number + 1) * length // count] for number in range(count)]
    return build(profile, _all_but_the_last(profile, parts), budget_bytes, "chen_sqrt")


def greedy(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute all but the last of the segments by the best limit.

    Raises
    ------
    InfeasibleBudgetError
        If no limit's segments fit.
    """
    return build_fastest(profile, _by_limits(profile), budget_bytes, "chen_greedy")


def _by_limits(profile: Profile) -> Iterator[Selection]:
    sizes = own_bytes(profile)
    n = len(sizes)
    upto = [0, *accumulate(sizes)]
    limits = sorted({upto[b] - upto[a] for a in range(n) for b in range(a + 1, n + 1)})
    if len(limits) > MOST_LIMITS:
        limits = [limits[k * (len(limits) - 1) // (MOST_LIMITS - 1)] for k in range(MOST_LIMITS)]
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
        selection = _all_but_the_last(profile, parts)
        if selection not in seen:
            seen.add(selection)
            yield selection


def _all_but_the_last(profile: Profile, parts: Sequence[Sequence[int]]) -> Selection:
    """All parts but the last recomputed, each as one segment, or split where it spans what can't run again."""
    together = {i: number for number, run in enumerate(runs(profile)) for i in run}
    segments = []
    for part in parts[:-1]:
        for number in sorted({together[i] for i in part if i in together}):
            within = [i for i in part if together.get(i) == number]
            segments.append(Segment(within[0], within[-1]))
    return named(profile, ["keep"] * len(profile.stages), segments)
