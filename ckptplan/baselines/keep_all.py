"""Nothing is done: the reference for overhead."""

from __future__ import annotations

from ckptplan.baselines._build import build, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Keep every stage.

    Raises
    ------
    InfeasibleBudgetError
        If the step doesn't fit as it is.
    """
    return build(profile, named(profile, ["keep"] * len(profile.stages)), budget_bytes, "keep_all")
