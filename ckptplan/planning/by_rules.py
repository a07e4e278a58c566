"""Plans by published rules within the limits of a job, which the solver's plan has to match or beat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.referee.simulate import Timeline
from ckptplan.referee.validate import Violation, examine

QUICK = (
    "recompute_all", "swap_all", "vdnn_conv", "vdnn_dyn", "chen_sqrt", "meng_swap", "uniform", "superneurons",
    "capuchin", "lms", "auto_perf_maxing", "sac_ilp", "chen_greedy",
)  # fmt: skip
"""Rules that plan within one or two seconds at 80 stages, the quickest and the best ones first."""
SHARE, LEAST_S = 0.1, 1.0
"""Share of the time limit, and seconds at least, after which no further rule is begun: some are slow on long chains."""


def plans_by_rules(
    profile: Profile, budget_bytes: int, limits: Limits, rules: Sequence[str] | None = None
) -> list[Plan]:
    """Return the plans of `rules` that keep a budget and `limits`, of those rules that find one in time.

    Default: `QUICK`; without "uniform" where the profile's times are exact: there every search starts from its plans.
    """
    if rules is None:
        rules = [rule for rule in QUICK if rule != "uniform" or profile.step_error]
    deadline = time.monotonic() + max(SHARE * limits.time_limit_s, LEAST_S)
    found: list[Plan] = []
    for rule in rules:
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(InfeasibleBudgetError):
            plan = BASELINES[rule](profile, budget_bytes)
            broken, _ = examined(profile, plan, limits)
            if not broken:
                found.append(plan)
    return found


def examined(profile: Profile, plan: Plan, limits: Limits) -> tuple[tuple[Violation, ...], Timeline | None]:
    """Return the rules that a plan breaks within its budget and `limits`, and its replay (`validate.examine`)."""
    return examine(
        profile,
        plan,
        plan.budget_bytes,
        host_bytes=limits.host_bytes,
        disk_bytes=limits.disk_bytes,
        actions=limits.actions,
        segments=limits.segments,
    )
