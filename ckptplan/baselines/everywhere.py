"""One option for every stage that has it: everything kept, recomputed, or swapped.

Keeping everything is the reference for overhead. Recomputing every stage is what "gradient checkpointing on" does.
Swapping every saved set is TFLMS, `save_on_cpu` and vDNN's "all": those swap at once; here copies are released as late
and fetched as early as the budget allows, which never is slower, and a stage whose bytes never need to be away is kept.
"""

from __future__ import annotations

from ckptplan.baselines._build import build, everywhere
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def keep_all(profile: Profile, budget_bytes: int) -> Plan:
    """Keep every stage.

    Raises
    ------
    InfeasibleBudgetError
        If the step doesn't fit with everything kept.
    """
    return build(profile, everywhere(profile, "keep"), budget_bytes, "keep_all")


def recompute_all(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute every stage that can be.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    return build(profile, everywhere(profile, "recompute"), budget_bytes, "recompute_all")


def swap_all(profile: Profile, budget_bytes: int) -> Plan:
    """Swap every stage that can be.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    return build(profile, everywhere(profile, "swap"), budget_bytes, "swap_all")
