"""vDNN (Rhu et al. 2016), policy "conv": only the inputs of convolutions are swapped.

The reason given is that a convolution takes long enough to hide the copy of its input. Profiles have stages instead
of layers, so the stages taken here are those whose forward takes at least as much time per byte saved as the median
stage's (`_build.costly`); what such a stage saves, its input included, is swapped.

The paper prefetches the nearest earlier swapped layer while its successor's backward runs, and waits for each
copy-out at the end of its layer. Here release and prefetch points are the best there are, which is never slower; what
never needs to be away stays.

Reference
---------
M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler, "vDNN: Virtualized Deep Neural Networks for Scalable,
Memory-Efficient Neural Network Design", MICRO 2016, section 3.
"""

from __future__ import annotations

from ckptplan.baselines._build import Selection, build, costly, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Swap the costly stages.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    return build(profile, choice(profile), budget_bytes, "vdnn_conv")


def choice(profile: Profile) -> Selection:
    """The options of policy "conv"."""
    return named(profile, ["swap" if dear else "keep" for dear in costly(profile)])
