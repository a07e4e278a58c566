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

from ckptplan.baselines._build import build, movable_bytes, named
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
    n = len(profile.stages)
    sizes = movable_bytes(profile)
    names = ["keep"] * n
    while True:
        r = residency(profile, named(profile, names).options)
        steps = [(k, need) for needs in (r.forward_bytes, r.backward_bytes[::-1]) for k, need in enumerate(needs)]
        failed = next((at for at, (_, need) in enumerate(steps) if need > budget_bytes), None)
        if failed is None:
            break
        stage = failed if failed < n else 2 * n - 1 - failed
        missing = steps[failed][1] - budget_bytes
        idle = [i for i in range(stage) if names[i] == "keep" and sizes[i]]
        if not idle:
            break
        enough = [i for i in idle if sizes[i] >= missing]
        victim = min(enough, key=lambda i: sizes[i]) if enough else idle[0]
        names[victim] = "swap"
    return build(profile, named(profile, names), budget_bytes, "lms")
