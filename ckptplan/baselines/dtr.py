"""DTR (Kirisame et al. 2021): evict what is cheap to make again, large and stale; rematerialise on demand.

The step is walked in program order. Where a step doesn't fit, of the stages that have run forward and whose saved
sets are there, the one with the smallest h = cost / (bytes x staleness) is evicted, until it fits. Cost is its
recompute time and that of the evicted neighbourhood, the unbroken runs of evicted stages on both sides of it;
staleness is the time since its forward ended. An evicted stage comes back when its backward asks for it.

DTR decides at run time, operation by operation; a plan decides before it, stage by stage, so a stage evicted once is
recomputed whatever happens later. How evicted neighbours come back has three forms here, and the fastest that fits is
returned: each from its own input; all of a run from the input of its first, in one sweep; or that with the sweep
evicting its first half again, and so on (nested segments, which is what eviction during rematerialisation comes to on
a chain).

Reference
---------
M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor
Rematerialization", ICLR 2021, arXiv 2006.09616, section 4.1 (h_DTR).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from ckptplan.baselines._build import Selection, build_fastest, first_over, joined, named, own_bytes
from ckptplan.core.option import Option
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment

Together = Callable[[Profile, tuple[Option, ...]], tuple[Segment, ...]]


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute what DTR would evict.

    Raises
    ------
    InfeasibleBudgetError
        If evicting everything isn't enough.
    """
    forms: tuple[Together, ...] = (lambda profile, options: (), joined, _nested)
    return build_fastest(profile, [_evict(profile, budget_bytes, form) for form in forms], budget_bytes, "dtr")


def _nested(profile: Profile, options: tuple[Option, ...]) -> tuple[Segment, ...]:
    return tuple(_halved(profile, segment.first, segment.last) for segment in joined(profile, options))


def _halved(profile: Profile, first: int, last: int) -> Segment:
    """The segment whose sweep recomputes its first half again, and so on down."""
    modules = [i for i in range(first, last + 1) if not profile.stages[i].is_glue]
    inner = _halved(profile, first, modules[len(modules) // 2 - 1]) if len(modules) > 1 else None
    return Segment(first, last, () if inner is None else (inner,))


def _evict(profile: Profile, budget_bytes: int, together: Together) -> Selection:
    sizes = own_bytes(profile)
    names = ["keep"] * len(sizes)
    ended = list(accumulate(stage.forward_s for stage in profile.stages))
    while True:
        options = named(profile, names).options
        selection = Selection(options, together(profile, options))
        r = residency(profile, selection.options, selection.segments)
        over = first_over(r, budget_bytes)
        idle = [i for i in range(over[0]) if names[i] == "keep" and sizes[i]] if over is not None else []
        if over is None or not idle:
            return selection
        stage, in_backward, _ = over
        now = ended[-1] + sum(r.backward_s[stage + 1 :]) if in_backward else ended[stage]
        # A stage that takes no time ends now, and has only just been used: the largest h there is.
        victim = min(idle, key=lambda i: _cost(profile, names, i) / (sizes[i] * max(now - ended[i], 1e-12)))
        names[victim] = "recompute"


def _cost(profile: Profile, names: list[str], i: int) -> float:
    """Recompute time of stage `i` and its evicted neighbourhood."""
    first, last = i, i
    while first > 0 and names[first - 1] == "recompute":
        first -= 1
    while last + 1 < len(names) and names[last + 1] == "recompute":
        last += 1
    return sum(
        again.recompute_s for stage in profile.stages[first : last + 1] if (again := stage.recompute) is not None
    )
