"""Every stage recomputed: what "gradient checkpointing on" does."""

from __future__ import annotations

from ckptplan.baselines._build import build, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute every stage that can be.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    return build(profile, named(profile, ["recompute"] * len(profile.stages)), budget_bytes, "recompute_all")
