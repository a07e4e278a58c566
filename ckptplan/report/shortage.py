"""What ran short, beside what was planned for that moment; and a profile corrected by the difference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ckptplan.core.plan import Plan, status_of
from ckptplan.core.profile import Profile
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.referee import simulate

_LESS = 20
"""Where nothing says how much was missing, a twentieth of what was planned is taken for it."""


def planned_bytes(profile: Profile, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
    """Bytes at the start and at the worst moment of `stage` in `phase`, as the plan has them.

    With its stage goes the glue that runs after it in the same phase, since nothing tells where that begins; and with a
    stage's backward the sweep in front of it. `stage` None: the glue behind the last stage.
    """
    steps = [step for step in simulate(profile, plan).steps if step.phase == phase]
    if phase == "update":
        return steps[0].start_bytes, steps[0].peak_bytes
    names = [s.name for s in profile.stages]
    glue = {s.name for s in profile.stages if s.is_glue}
    own = [i for i, step in enumerate(steps) if not step.sweep]
    name = names[-1] if stage is None else names[stage]
    first = at = next(i for i in own if steps[i].stage == name)
    while first > 0 and steps[first - 1].sweep:
        first -= 1
    last = at
    while last + 1 < len(steps) and steps[last + 1].stage in glue and not steps[last + 1].sweep:
        last += 1
    return steps[first].start_bytes, max(step.peak_bytes for step in steps[first : last + 1])


@dataclass(frozen=True, slots=True)
class Correction:
    """A model of memory that a shortage agrees with.

    Parameters
    ----------
    profile : Profile
        With the bytes that were missing added.
    limit_bytes : int
        What a plan may use of it.
    leaner_than_bytes : int or None
        The correction rests on what was asked for, which may be far more than what was missing: where no plan keeps the
        limit, any plan with a smaller peak than this is worth a try. None: the correction was measured.
    means : Profile or None
        What to tell a plan's predictions by, where `profile` has bytes that only steer the solver.
    """

    profile: Profile
    limit_bytes: int
    leaner_than_bytes: int | None = None
    means: Profile | None = None


def corrections(profile: Profile, plan: Plan, shortage: Shortage) -> tuple[Correction, ...]:
    """What to plan with after `plan` ran short; where no plan fits the first, the next.

    1. Bytes measured beyond the prediction (CUDA) are added: those that were there before the step to every moment, the
       rest to the stages of the kind that ran, in that phase, since equal kinds do the same. The limit is the plan's
       budget, or what the device can give where that is less.
    2. If `plan` would still seem to fit, which it didn't, and always on the CPU, where nothing is measured: at that
       moment at most what was asked for was missing. So the limit is that much less than what was planned for it.
    3. Where other moments, which no plan changes, rule that out: the limit is as in 1, and the stages of that kind, in
       that phase, get so many bytes more that they must do with a twentieth less than planned, or with so much less as
       was asked for. These bytes steer the solver and are forgotten; the next retry goes on from there.
    4. Where that fails too: a plan whose peak, wherever it is, is so much smaller, or smaller at all.
    """
    limit = min(plan.budget_bytes, shortage.capacity_bytes or plan.budget_bytes)
    over = max(shortage.over_bytes or 0, 0)
    outside = min(over, max((shortage.live_before_bytes or 0) - profile.resident_bytes, 0))
    measured = _charged(profile, shortage, outside, over - outside)
    planned = shortage.planned_bytes + over
    if planned > limit:
        return (Correction(measured, limit),)
    asked = max(shortage.requested_bytes or planned // _LESS, 1)
    less = min(asked, planned // _LESS + 1)
    peak = simulate(measured, plan).peak_bytes
    return (
        Correction(measured, max(planned - asked, 1), planned),
        Correction(_charged(measured, shortage, 0, limit - planned + less), limit, means=measured),
        Correction(measured, max(min(peak, limit) - less, 1), peak),
    )


def told(plan: Plan, correction: Correction, before: Plan) -> Plan:
    """`plan`, solved for a correction, with the predictions and the bound that hold without what steered the solver.

    The bound is that of the plan before, which speaks of no larger budget and the same or fewer bytes.
    """
    if correction.means is None:
        return plan
    timeline = simulate(correction.means, plan)
    bound_s = min(before.lower_bound_s, timeline.makespan_s)
    return dataclasses.replace(
        plan,
        peak_bytes=timeline.peak_bytes,
        budget_bytes=correction.limit_bytes,
        lower_bound_s=bound_s,
        space=before.space,
        status=status_of(timeline.makespan_s, bound_s),
    )


def _charged(profile: Profile, shortage: Shortage, everywhere: int, here: int) -> Profile:
    kind = next(stage.kind for stage in profile.stages if stage.name == shortage.stage)
    of_kind = [stage.kind == kind for stage in profile.stages]

    def added(base: tuple[int, ...], phase: Phase) -> tuple[int, ...]:
        extra = here if shortage.phase == phase else 0
        return tuple(b + everywhere + (extra if same else 0) for b, same in zip(base, of_kind, strict=True))

    return dataclasses.replace(
        profile,
        base_forward_bytes=added(profile.base_forward_bytes, "forward"),
        base_backward_bytes=added(profile.base_backward_bytes, "backward"),
        update_peak_bytes=profile.update_peak_bytes + everywhere,
        resident_bytes=profile.resident_bytes + everywhere,
    )
