"""Published planners, one a file, all with the signature `plan(profile, budget_bytes) -> Plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ckptplan.baselines import (
    auto_perf_maxing,
    capuchin,
    chen_greedy,
    chen_sqrt,
    dtr,
    keep_all,
    lms,
    meng_swap,
    pofo,
    pooch,
    recompute_all,
    rotor,
    sac_ilp,
    superneurons,
    swap_all,
    uniform,
    vdnn_conv,
    vdnn_dyn,
)
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile

BASELINES: Mapping[str, Callable[[Profile, int], Plan]] = MappingProxyType(
    {
        "keep_all": keep_all.plan,
        "recompute_all": recompute_all.plan,
        "swap_all": swap_all.plan,
        "uniform": uniform.plan,
        "chen_sqrt": chen_sqrt.plan,
        "chen_greedy": chen_greedy.plan,
        "meng_swap": meng_swap.plan,
        "lms": lms.plan,
        "vdnn_conv": vdnn_conv.plan,
        "vdnn_dyn": vdnn_dyn.plan,
        "superneurons": superneurons.plan,
        "capuchin": capuchin.plan,
        "pooch": pooch.plan,
        "dtr": dtr.plan,
        "sac_ilp": sac_ilp.plan,
        "auto_perf_maxing": auto_perf_maxing.plan,
        "rotor": rotor.plan,
        "pofo": pofo.plan,
    }
)
"""Name -> planner. Each raises `InfeasibleBudgetError` when its rule finds nothing that fits."""

__all__ = ["BASELINES"]
