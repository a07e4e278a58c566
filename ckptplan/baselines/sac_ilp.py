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

from ckptplan.baselines._build import Selection, build_fastest, named
from ckptplan.baselines._fractions import Offer, Share, cheapest, mine, nearest, targets
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Discard the cheapest fractions.

    Raises
    ------
    InfeasibleBudgetError
        If no rounding fits.
    """
    return build_fastest(profile, _choices(profile, budget_bytes), budget_bytes, "sac_ilp")


def _choices(profile: Profile, budget_bytes: int) -> Iterator[Selection]:
    n = len(profile.stages)
    everything = named(profile, ["keep"] * n)
    r = residency(profile, everything.options)
    storages = mine(profile)
    sizes = [sum(profile.storages[s].nbytes for s in found) for found in storages]
    offers = [
        Offer(i, size, again.recompute_s / size)
        for i, (stage, size) in enumerate(zip(profile.stages, sizes, strict=True))
        if size and (again := stage.recompute) is not None
    ]
    yield everything
    seen = {everything}
    for target in targets(budget_bytes):
        needs = [max(*steps) - target for steps in zip(r.forward_bytes, r.backward_bytes, strict=True)]
        options = list(everything.options)
        for offer, taken in zip(offers, cheapest(offers, needs), strict=True):
            share = Share(taken / offer.nbytes, 0.0)
            options[offer.stage] = nearest(profile, offer.stage, storages[offer.stage], share)
        choice = Selection(tuple(options))
        if choice not in seen:
            seen.add(choice)
            yield choice
    yield named(profile, ["recompute"] * n)
