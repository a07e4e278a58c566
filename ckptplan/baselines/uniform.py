"""The same fractions of keep, swap and recompute everywhere: the best plan that ignores differences between stages.

Fractions are those on a grid of twentieths that add up to one. Each is spread evenly: stage i takes the action whose
share so far is furthest behind. Only stages that can swap and recompute are counted; others keep. Every triple is also
tried with the inputs of the recomputed stages swapped. The fastest of all that fits is the plan, the best that this
rule can do. It has no paper; it is the usual ablation of newer systems.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptplan.baselines._build import Selection, build_fastest, named, ways_to_recompute
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.spread import evenly, fractions


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Spread the best fractions evenly.

    Raises
    ------
    InfeasibleBudgetError
        If no fractions fit.
    """
    return build_fastest(profile, _selections(profile), budget_bytes, "uniform")


def _selections(profile: Profile) -> Iterator[Selection]:
    seen = set()
    variants = dict.fromkeys(name for name, _ in ways_to_recompute(profile))
    for keep, swap, rest in fractions():
        for again in variants:
            names = spread(profile, {"keep": keep, "swap": swap, again: rest})
            if names not in seen:
                seen.add(names)
                yield named(profile, names)


def spread(profile: Profile, shares: dict[str, int]) -> tuple[str, ...]:
    """Option names in the proportion of `shares`, as even as can be along the chain; keep where a stage has no menu."""
    counted = [i for i, stage in enumerate(profile.stages) if len(stage.options) > 1]
    actions, names = tuple(shares), ["keep"] * len(profile.stages)
    (row,) = evenly([tuple(shares.values())], len(counted)).tolist()
    for i, position in zip(counted, row, strict=True):
        names[i] = actions[position]
    return tuple(names)
