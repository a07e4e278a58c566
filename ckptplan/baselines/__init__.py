"""Published planners, one a file, all with the signature `plan(profile, budget_bytes) -> Plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ckptplan.baselines import chen_sqrt, keep_all, pooch, recompute_all, rotor, swap_all
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile

BASELINES: Mapping[str, Callable[[Profile, int], Plan]] = MappingProxyType(
    {
        "keep_all": keep_all.plan,
        "recompute_all": recompute_all.plan,
        "swap_all": swap_all.plan,
        "chen_sqrt": chen_sqrt.plan,
        "pooch": pooch.plan,
        "rotor": rotor.plan,
    }
)
"""Name -> planner. Each raises `InfeasibleBudgetError` when its rule finds nothing that fits."""

__all__ = ["BASELINES"]
