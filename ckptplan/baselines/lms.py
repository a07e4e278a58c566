"""IBM Large Model Support: nothing moves until an allocation fails, then idle blocks are evicted.

The step is walked in program order. Where a step doesn't fit, bytes are missing; of the idle saved sets (stages that
have run forward and whose backward hasn't come) the smallest that frees enough is swapped, or else the oldest, until
the step fits. In backward nothing is evicted that the step itself uses. The system pages in on demand, when an
operation asks for the block; here the return is issued as early as memory lets it, which is never slower.

The unit is a stage's movable set, where the system's is one tensor; the profile's rule is that a swapped stage moves
all that it may. A block evicted once stays swapped for the whole step, since a plan is made before it.

Reference
---------
IBM, "PyTorch Large Model Support" (documentation of PowerAI / Watson ML CE, 2019-2020): inactive tensors are swapped
out only when an allocation would fail, best fit first.
"""

from __future__ import annotations

from ckptplan.baselines._build import build, first_over, movable_bytes, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Swap what eviction on failed allocations would.

    Raises
    ------
    InfeasibleBudgetError
        If evicting everything idle isn't enough.
    """
    sizes = movable_bytes(profile)
    names = ["keep"] * len(sizes)
    while True:
        r = residency(profile, named(profile, names).options)
        over = first_over(r, budget_bytes)
        idle = [i for i in range(over[0]) if names[i] == "keep" and sizes[i]] if over is not None else []
        if over is None or not idle:
            return build(profile, named(profile, names), budget_bytes, "lms")
        enough = [i for i in idle if sizes[i] >= over[2] - budget_bytes]
        victim = min(enough, key=lambda i: sizes[i]) if enough else idle[0]
        names[victim] = "swap"
