"""Chen et al. (2016): about sqrt(L) segments of equal length, all but the last recomputed.

The plan space of this version has segments of one stage only, so what stays of the paper's rule is which stages are
recomputed: the L stages that can be recomputed are cut into ceil(sqrt(L)) segments as equal as can be, those of the
last segment are kept, since its backward follows at once, and every other one is recomputed by itself. The inputs of
inner stages are held, which the paper's segments would drop: more bytes between forward and backward, fewer while a
segment runs again.

Reference
---------
T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, section 4.
"""

from __future__ import annotations

import math

from ckptplan.baselines._build import build
from ckptplan.core.chain import Action
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute all segments but the last.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    decidable = [i for i, stage in enumerate(profile.stages) if stage.recompute is not None]
    length = len(decidable)
    segments = math.isqrt(length - 1) + 1 if length else 1  # ceil(sqrt(length)), exactly
    actions: list[Action] = ["keep"] * len(profile.stages)
    for i in decidable[: (segments - 1) * length // segments]:
        actions[i] = "recompute"
    return build(profile, actions, budget_bytes, "chen_sqrt")
