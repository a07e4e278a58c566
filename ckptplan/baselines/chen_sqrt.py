"""Chen et al. (2016): about sqrt(L) segments of equal length, all but the last recomputed.

The L stages that can be recomputed are cut into ceil(sqrt(L)) segments as equal as can be. The last one is kept,
since its backward follows at once. Of every other one only the inputs are held; its forward runs again as one sweep,
whose stages are kept until their backward (no nesting).

Stages that can't run again are kept, and a segment never spans one: where a cut of equal length would, the segment is
split there. The paper cuts a graph of operations; here a cut can lie between stages only.

Reference
---------
T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, section 4.
"""

from __future__ import annotations

import math

from ckptplan.baselines._build import build, named, runs
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute all segments but the last.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    together = {i: number for number, run in enumerate(runs(profile)) for i in run}
    decidable = sorted(together)
    length = len(decidable)
    count = math.isqrt(length - 1) + 1 if length else 1  # ceil(sqrt(length)), exactly
    names = ["keep"] * len(profile.stages)
    segments = []
    for number in range(count - 1):
        part = decidable[number * length // count : (number + 1) * length // count]
        for run in sorted({together[i] for i in part}):
            within = [i for i in part if together[i] == run]
            segments.append(Segment(within[0], within[-1]))
            for i in within:
                names[i] = "recompute"
    return build(profile, named(profile, names, segments), budget_bytes, "chen_sqrt")
