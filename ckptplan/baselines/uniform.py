"""The same fractions of keep, swap and recompute everywhere: what a planner blind to differences between stages can do.

Fractions are those on a grid of twentieths that add up to one. Each is spread evenly: stage i takes the action whose
share so far is furthest behind. Only stages that can swap and recompute are counted; others keep. For every triple it
is tried, too, to swap the inputs of the recomputed stages. The fastest of all that fits is the plan, which is the
most that this rule can do; it has no paper, and is the ablation that readers of newer systems ask for.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptplan.baselines._build import Selection, build_fastest, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile

GRID = 20


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
    variants = ["recompute"]
    if any(stage.find("recompute+swap") for stage in profile.stages):
        variants.append("recompute+swap")
    for keep in range(GRID, -1, -1):
        for swap in range(GRID - keep, -1, -1):
            for again in variants:
                names = spread(profile, {"keep": keep, "swap": swap, again: GRID - keep - swap})
                if names not in seen:
                    seen.add(names)
                    yield named(profile, names)


def spread(profile: Profile, shares: dict[str, int]) -> tuple[str, ...]:
    """Option names in the proportion of `shares`, as even as can be along the chain; keep where a stage has no menu."""
    total = sum(shares.values())
    given = dict.fromkeys(shares, 0)
    names = []
    count = 0
    for stage in profile.stages:
        if len(stage.options) == 1:
            names.append("keep")
            continue
        count += 1
        name = max(shares, key=lambda name: shares[name] * count - given[name] * total)
        given[name] += 1
        names.append(name)
    return tuple(names)
