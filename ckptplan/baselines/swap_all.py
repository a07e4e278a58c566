"""Every saved set swapped: TFLMS, `save_on_cpu`, vDNN's "all".

Those swap at once; here copies are released as late and fetched as early as the budget allows, which never is slower,
and a stage whose bytes never need to be away is kept.
"""

from __future__ import annotations

from ckptplan.baselines._build import build, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Swap every stage that can be.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    return build(profile, named(profile, ["swap"] * len(profile.stages)), budget_bytes, "swap_all")
