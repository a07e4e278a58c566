"""vDNN (Rhu et al. 2016): only the inputs of convolutions are swapped, or the fastest of nothing, these, and all.

The reason given for the policy "conv" is that a convolution takes long enough to hide the copy of its input. Profiles
have stages instead of layers, so the stages taken here are those whose forward takes at least as much time per byte
saved as the median stage's (`_build.costly`); what such a stage saves, its input included, is swapped. The dynamic
policy also switches convolutions to slower algorithms that need no workspace; a profile has one measured way to run a
stage, so that part doesn't apply.

The paper prefetches the nearest earlier swapped layer while its successor's backward runs, and waits for each
copy-out at the end of its layer. Here release and prefetch points are the best there are, which is never slower; what
never needs to be away stays.

Reference
---------
M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler, "vDNN: Virtualized Deep Neural Networks for Scalable,
Memory-Efficient Neural Network Design", MICRO 2016, section 3; the dynamic policy is in 3.3.
"""

from __future__ import annotations

from ckptplan.baselines._build import Selection, build, build_fastest, costly, everywhere, named
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile


def conv(profile: Profile, budget_bytes: int) -> Plan:
    """Swap the costly stages.

    Raises
    ------
    InfeasibleBudgetError
        If that doesn't fit.
    """
    return build(profile, _conv(profile), budget_bytes, "vdnn_conv")


def dynamic(profile: Profile, budget_bytes: int) -> Plan:
    """The fastest of the static policies "none", "conv" and "all".

    Raises
    ------
    InfeasibleBudgetError
        If none fits.
    """
    policies = (everywhere(profile, "keep"), _conv(profile), everywhere(profile, "swap"))
    return build_fastest(profile, policies, budget_bytes, "vdnn_dyn")


def _conv(profile: Profile) -> Selection:
    return named(profile, ["swap" if takes_long else "keep" for takes_long in costly(profile)])
