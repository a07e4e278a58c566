"""One profile whose times count both compute and copies, and the host's launching.

The evaluator and the linear and mixed-integer programs know the step as it is, the longer of the two sums (NOTE
[Lanes], rule 5). Dynamic programs add up one time per stage; they get that of a mixture. For a share s of 0 to 1,

    step = max(lanes, launches) >= (1 - s) * lanes + s * launches,

and the multiplier of the linear program is the share for which the right side is largest. Where nothing moves, lanes
are a sum too, and the fastest plan of the mixture bounds the step. Its copies are given (1 - s) of their time.
"""

from __future__ import annotations

from dataclasses import replace

from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.stage import Stage
from ckptplan.solving.parameters import CLOSE


def mixed(profile: Profile, share: float) -> Profile:
    """Return a profile whose compute times have this share of launching, and whose own launches take no time."""

    def both(compute_s: float, launch_s: float) -> float:
        return (1 - share) * compute_s + share * launch_s

    def option(o: Option) -> Option:
        overhead_s = both(o.overhead_s, o.launch_s)
        return replace(o, recompute_s=(1 - share) * o.recompute_s, overhead_s=overhead_s, launch_s=0.0)

    def stage(s: Stage) -> Stage:
        return replace(
            s,
            options=tuple(option(o) for o in s.options),
            forward_s=both(s.forward_s, s.forward_launch_s),
            backward_s=both(s.backward_s, s.backward_launch_s),
            rerun_overhead_s=both(s.rerun_overhead_s, s.rerun_overhead_launch_s),
            forward_launch_s=0.0,
            backward_launch_s=0.0,
            rerun_overhead_launch_s=0.0,
        )

    link, copying = profile.link, max(1 - share, CLOSE)  # no link carries everything in no time
    out, back = link.out_bytes_per_s / copying, link.in_bytes_per_s / copying
    link = replace(link, out_bytes_per_s=out, in_bytes_per_s=back, latency_s=link.latency_s * copying)
    return replace(profile, stages=tuple(stage(s) for s in profile.stages), link=link, disk=None)
