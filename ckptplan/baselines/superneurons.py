"""SuperNeurons (Wang et al. 2018): costly layers in a swapped cache, cheap layers recomputed, per segment.

1. What costly layers (convolution, linear) make is cached on the device and swapped out, least recently used first,
   when memory is short. In a chain the least recently used is the earliest.
2. Cheap layers (normalisation, activation, pooling, dropout) are recomputed. Those between two costly ones form a
   segment. It is recomputed "speed-centric", all at once and kept until used, unless that needs more bytes than the
   largest layer alone; then "memory-centric": for every backward again from the segment's start.

Profiles have stages, so costly means: forward takes at least as much time per byte saved as the median stage's
(`_build.costly`). Speed-centric is a segment without inner ones; memory-centric is one whose every stage runs again
for each backward behind it, nested segments that all begin at its first stage. The largest layer's own peak is the
largest saved set with the forward bytes of its stage.

The paper's runtime does as much of this as memory forces it to. So the plans tried are, in order: nothing; the
earliest k costly stages swapped, the fewest that fit; the same with all cheap segments recomputed, by the paper's
choice of method. Recomputed segments hold their input, or swap it too; both are tried. The fastest that fits is
returned, the better for the baseline. Release and prefetch points are the best there are.

Reference
---------
L. Wang, J. Ye, Y. Zhao, W. Wu, A. Li, S. L. Song, Z. Xu, T. Kraska, "SuperNeurons: Dynamic GPU Memory Management for
Training Deep Neural Networks", PPoPP 2018, sections 3.3 (cache) and 3.4 (recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptplan.baselines._build import Selection, build_fastest, costly, everywhere, named, runs, smallest_peak
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Swap costly stages and recompute cheap ones, as much as it takes.

    Raises
    ------
    InfeasibleBudgetError
        If even all of both doesn't fit.
    """
    return build_fastest(profile, _selections(profile, budget_bytes), budget_bytes, "superneurons")


def _selections(profile: Profile, budget_bytes: int) -> Iterator[Selection]:
    takes_long = costly(profile)
    segments = cheap_segments(profile, takes_long)
    n = len(takes_long)
    cheap = {i for segment in segments for i in range(segment.first, segment.last + 1)}
    cached = [i for i in range(n) if takes_long[i] and profile.stages[i].find("swap") is not None]
    yield everywhere(profile, "keep")
    for again, found in (("keep", ()), ("recompute", segments), ("recompute+swap", segments)):
        for count in range(len(cached) + 1):
            out = set(cached[:count])
            names = ["swap" if i in out else again if i in cheap else "keep" for i in range(n)]
            selection = named(profile, names, found)
            if count == len(cached) or smallest_peak(profile, selection).bytes <= budget_bytes:
                yield selection
                break


def cheap_segments(profile: Profile, takes_long: list[bool]) -> tuple[Segment, ...]:
    """Runs of cheap stages that can be recomputed, nested where the paper would be memory-centric."""
    sizes = [sum(profile.storages[s].nbytes for s in stage.keep.held) for stage in profile.stages]
    largest = max(size + stage.keep.backward_bytes for size, stage in zip(sizes, profile.stages, strict=True))
    found = []
    for run in runs(profile):
        part: list[int] = []
        for i in [*run, None]:
            if i is not None and not takes_long[i]:
                part.append(i)
                continue
            if part:
                total = sum(sizes[k] for k in part) + profile.stages[part[-1]].keep.backward_bytes
                segment = Segment(part[0], part[0])
                for last in part[1:]:
                    segment = Segment(part[0], last, (segment,) if total > largest else ())
                found.append(segment)
            part = []
    return tuple(found)
