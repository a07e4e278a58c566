"""vDNN (Rhu et al. 2016), dynamic policy: the fastest of "none", "conv" and "all" that fits.

The paper also switches convolutions to slower algorithms that need no workspace; a profile has one measured way to
run a stage, so that part doesn't apply. "conv" is as in `vdnn_conv`, "all" as in `swap_all`.

Reference
---------
M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler, "vDNN: Virtualized Deep Neural Networks for Scalable,
Memory-Efficient Neural Network Design", MICRO 2016, section 3.3.
"""

from __future__ import annotations

from ckptplan.baselines import vdnn_conv
from ckptplan.baselines._build import build_fastest, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """The fastest of the three static policies.

    Raises
    ------
    InfeasibleBudgetError
        If none fits.
    """
    n = len(profile.stages)
    choices = (named(profile, ["keep"] * n), vdnn_conv.choice(profile), named(profile, ["swap"] * n))
    return build_fastest(profile, choices, budget_bytes, "vdnn_dyn")
