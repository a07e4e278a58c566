"""Planned bytes at the moment of a shortage, and profiles corrected by the difference to the measured ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ckptplan.core.plan import Plan, status_of
from ckptplan.core.profile import Profile
from ckptplan.core.shortage import Shortage
from ckptplan.core.stage import Phase
from ckptplan.referee import simulate

_MISSING_PART = 20
"""If the missing bytes aren't known, they are assumed to be a twentieth of the planned ones."""


def planned_bytes(profile: Profile, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
    """Return the predicted bytes at the start and at the peak of `stage` in `phase`.

    A stage includes the glue that runs after it in the same phase, whose beginning isn't measured, and a backward
    includes the sweep in front of it. None as a stage is the glue behind the last stage.
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
    """A profile corrected by a shortage.

    Parameters
    ----------
    profile : Profile
        The profile with the missing bytes added.
    limit_bytes : int
        The limit of a plan for it.
    leaner_than_bytes : int or None
        The limit was derived from the size of the request, which may be far more than the missing bytes: if no plan
        fits the limit, any plan with a smaller peak than this is tried. None: the correction was measured.
    means : Profile or None
        The profile for a plan's predictions, if `profile` has additional bytes that only guide the solver.
    """

    profile: Profile
    limit_bytes: int
    leaner_than_bytes: int | None = None
    means: Profile | None = None


def corrections(profile: Profile, plan: Plan, shortage: Shortage) -> tuple[Correction, ...]:
    """Return the corrections to try after `plan` ran out of memory, in order, until one has a plan.

    1. Bytes measured beyond the prediction (CUDA) are added: those from before the step to every moment, the others to
       the stages of the kind that ran, in that phase, since stages of one kind do the same. The limit is the plan's
       budget, or the device's capacity if that is smaller.
    2. If `plan` still fits the corrected profile, and always on the CPU, where nothing is measured: at most the
       requested bytes were missing at that moment. The limit is the planned bytes of that moment less the request.
    3. If other moments, which no plan changes, need more than that: the limit is that of 1, and the stages of that
       kind, in that phase, get additional bytes, so that their plan has to use a twentieth less, or less by the
       request. These bytes guide the solver only; they aren't part of the profile for the next retry.
    4. If that fails too: a plan whose highest peak is smaller by that much, or smaller at all.

    Example for 2: 900 MiB were planned, a request of 100 MiB failed; the limit is 800 MiB.
    """
    limit = min(plan.tensor_budget_bytes, shortage.capacity_bytes or plan.tensor_budget_bytes)
    over = max(shortage.over_bytes or 0, 0)
    outside = min(over, max((shortage.live_before_bytes or 0) - profile.resident_bytes, 0))
    measured = _charged(profile, shortage, outside, over - outside)
    planned = shortage.planned_bytes + over
    if planned > limit:
        return (Correction(measured, limit),)
    requested = max(shortage.requested_bytes or planned // _MISSING_PART, 1)
    less = min(requested, planned // _MISSING_PART + 1)
    peak = simulate(measured, plan).peak_bytes
    return (
        Correction(measured, max(planned - requested, 1), planned),
        Correction(_charged(measured, shortage, 0, limit - planned + less), limit, means=measured),
        Correction(measured, max(min(peak, limit) - less, 1), peak),
    )


def with_predictions(plan: Plan, correction: Correction, before: Plan) -> Plan:
    """Return `plan`, solved for a correction, with predictions and a bound for `correction.means`.

    The bound is that of the plan before, which was proven for at least this budget and at most these bytes.
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
