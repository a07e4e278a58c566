"""Published planners, one paper a file, all with the signature `(profile, budget_bytes) -> Plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ckptplan.baselines import (
    auto_perf_maxing,
    capuchin,
    chen,
    dtr,
    everywhere,
    lms,
    meng_swap,
    pofo,
    pooch,
    rotor,
    sac_ilp,
    superneurons,
    uniform,
    vdnn,
)
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile

BASELINES: Mapping[str, Callable[[Profile, int], Plan]] = MappingProxyType(
    {
        "keep_all": everywhere.keep_all,
        "recompute_all": everywhere.recompute_all,
        "swap_all": everywhere.swap_all,
        "uniform": uniform.plan,
        "chen_sqrt": chen.sqrt,
        "chen_greedy": chen.greedy,
        "meng_swap": meng_swap.plan,
        "lms": lms.plan,
        "vdnn_conv": vdnn.conv,
        "vdnn_dyn": vdnn.dynamic,
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
