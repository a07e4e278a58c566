"""PyTorch's `sac_ilp`: the fraction of activations to discard per module, least recompute time, by a linear program.

The program of `torch.distributed._tools.sac_ilp` chooses for each module whether to checkpoint it and the fraction r
of its activations to discard, so that memory stays within the budget at every module and recompute time is least; it
accepts 5 % of error. Here the time of a fraction is that fraction of the stage's recompute time (the published one
interpolates a measured trade-off), and the memory limit holds at each stage's forward and backward. That is a linear
program with nested constraints, solved exactly (`_fractions.py`).

A fraction becomes the option with the nearest share of bytes discarded: keep, recompute, or one of the stage's
selective options. The 5 % are taken as slack of the program's budget, not of the plan's: the program is solved for
105 % of the budget and for less, and the fastest plan that truly fits is returned. Nothing is swapped, and stages are
recomputed each by itself.

Reference
---------
PyTorch, `torch/distributed/_tools/sac_ilp.py` (documentation of `sac_milp`, 2.5 and later).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptplan.baselines._build import Selection, build_fastest, everywhere
from ckptplan.baselines._fractions import Offer, offered_bytes, rounded
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Discard the cheapest fractions.

    Raises
    ------
    InfeasibleBudgetError
        If no rounding fits.
    """
    return build_fastest(profile, _selections(profile, budget_bytes), budget_bytes, "sac_ilp")


def _selections(profile: Profile, budget_bytes: int) -> Iterator[Selection]:
    offers = [
        Offer(i, size, again.recompute_s / size)
        for i, (stage, size) in enumerate(zip(profile.stages, offered_bytes(profile), strict=True))
        if size and (again := stage.recompute) is not None
    ]
    yield from rounded(profile, offers, budget_bytes)
    yield everywhere(profile, "recompute")
