"""torchtitan's `auto_perf_maxing` (2026): a linear program gives each layer fractions to keep, recompute and swap.

Least recompute time, with the peak limited at every backward position, and each layer's transfers inside its own
window: what a stage moves must leave during the next stage's forward and come back during the next stage's backward,
so no copy ever waits for another. Swapping then costs nothing, and the program is one with nested constraints, solved
exactly (`_fractions.py`): free swaps first, then the cheapest recomputes.

Fractions are rounded stage by stage to the option whose shares of recomputed and moved bytes are nearest (keep, swap,
recompute, or one of the stage's selective options). The published planner averages layer times; here every stage has
its own, and its windows too. Its peak also holds in forward here. The rounded plan gets the best release and prefetch
points. The program is solved for budgets from 105 % down, and the fastest plan that truly fits is returned.

Reference
---------
torchtitan, `auto_perf_maxing` (2026), as described in its documentation: per-layer fractions of keep, recompute and
offload by a linear program.
"""

from __future__ import annotations

from ckptplan.baselines._build import build_fastest, movable_bytes
from ckptplan.baselines._fractions import Offer, offered_bytes, rounded
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Swap what windows hide and recompute the cheapest fractions of the rest.

    Raises
    ------
    InfeasibleBudgetError
        If no rounding fits.
    """
    return build_fastest(profile, rounded(profile, _offers(profile), budget_bytes), budget_bytes, "auto_perf_maxing")


def window_bytes(profile: Profile, i: int) -> float:
    """Bytes that stage `i` can move within its window, both ways."""
    if i + 1 >= len(profile.stages):
        return 0.0
    link, after = profile.link, profile.stages[i + 1]
    out = max(0.0, after.forward_s - link.latency_s) * link.out_bytes_per_s
    return min(out, max(0.0, after.backward_s - link.latency_s) * link.in_bytes_per_s)


def _offers(profile: Profile) -> list[Offer]:
    moved = movable_bytes(profile)
    swaps, redos = [], []
    for i, (stage, size) in enumerate(zip(profile.stages, offered_bytes(profile), strict=True)):
        hidden = min(window_bytes(profile, i), moved[i], size)
        if hidden:
            swaps.append(Offer(i, hidden, 0.0, moves=True))
        if stage.recompute is not None and size > hidden:
            # A swap costs nothing, so it is used up before any recompute of the same stage.
            redos.append(Offer(i, size - hidden, stage.recompute.recompute_s / size))
    return [*swaps, *redos]
