"""Meng et al. (2017): swap the tensors with the longest lives first, as many as it takes.

A tensor's life is the time between its last use in forward and its first in backward, so in a chain the first stage's
saved set lives longest. Stages are swapped from the first on, as few as fit. The paper copies out after the last
forward use and back one backward operation ahead; here the copies have the best release and prefetch points there are
(core/schedule.py), which is never slower.

Reference
---------
C. Meng, M. Sun, J. Yang, M. Qiu, Y. Gu, "Training Deeper Models by GPU Memory Optimization on TensorFlow", ML Systems
Workshop at NIPS 2017, section 3 (swapping).
"""

from __future__ import annotations

import itertools

from ckptplan.baselines._build import build_fastest, named, smallest_peak
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Swap the fewest leading stages that make it fit.

    Raises
    ------
    InfeasibleBudgetError
        If no number of leading stages fits.
    """
    n = len(profile.stages)
    selections = [named(profile, ["swap"] * count + ["keep"] * (n - count)) for count in range(n + 1)]
    fits = (selection for selection in selections if smallest_peak(profile, selection).bytes <= budget_bytes)
    return build_fastest(profile, list(itertools.islice(fits, 1)) or selections, budget_bytes, "meng_swap")
