"""Is a plan sound? Depends on profile and plan alone, and names what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.referee.simulate import simulate

Kind = Literal["stages", "action", "moves", "points", "held", "budget", "host budget", "prediction", "bound"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule."""

    kind: Kind
    stage: str
    detail: str


def validate(
    profile: Profile, plan: Plan, budget_bytes: int, *, host_bytes: int | None = None
) -> tuple[Violation, ...]:
    """The rules `plan` breaks on `profile`, empty when it is sound.

    Parameters
    ----------
    budget_bytes : int
        Limit on the device.
    host_bytes : int, optional
        Limit on the host tier.

    Returns
    -------
    tuple of Violation
        Structure first; bytes and predictions are checked only where the structure holds.
    """
    names = tuple(stage.name for stage in profile.stages)
    if plan.stages != names:
        return (Violation("stages", "", "the plan's stages are not the profile's"),)
    broken = _structure(profile, plan)
    if broken:
        return tuple(broken)
    timeline = simulate(profile, plan.choices)
    for step in timeline.steps:
        if step.peak_bytes > budget_bytes:
            broken.append(
                Violation("budget", step.stage, f"{step.phase} needs {step.peak_bytes} of {budget_bytes} bytes")
            )
    if host_bytes is not None and timeline.host_bytes > host_bytes:
        broken.append(Violation("host budget", "", f"{timeline.host_bytes} of {host_bytes} bytes"))
    if timeline.peak_bytes != plan.peak_bytes:
        broken.append(Violation("prediction", "", f"peak {plan.peak_bytes}, replayed {timeline.peak_bytes} bytes"))
    # 1e-9: the planner may add the same seconds in another order.
    if abs(timeline.makespan_s - plan.step_s) > 1e-9 * max(1.0, plan.step_s):
        broken.append(Violation("prediction", "", f"step {plan.step_s}, replayed {timeline.makespan_s} s"))
    if plan.lower_bound_s > plan.step_s * (1 + 1e-9):
        broken.append(Violation("bound", "", f"lower bound {plan.lower_bound_s} s is above the step, {plan.step_s} s"))
    return tuple(broken)


def _structure(profile: Profile, plan: Plan) -> list[Violation]:
    broken: list[Violation] = []
    n = len(profile.stages)
    mover: dict[int, int] = {}
    for i, (stage, choice) in enumerate(zip(profile.stages, plan.choices, strict=True)):
        if stage.transient(choice.action) is None:
            broken.append(Violation("action", stage.name, f"the stage can't {choice.action}"))
        for p in choice.moves:
            if not 0 <= p < len(stage.saved):
                broken.append(Violation("moves", stage.name, f"position {p} of {len(stage.saved)} saved storages"))
            elif mover.setdefault(stage.saved[p], i) != i:
                other = profile.stages[mover[stage.saved[p]]].name
                broken.append(Violation("moves", stage.name, f"storage {stage.saved[p]} is moved by {other!r} too"))
        if len(set(choice.moves)) != len(choice.moves):
            broken.append(Violation("moves", stage.name, "a position is moved twice"))
        for name, point in (("release", choice.release), ("prefetch", choice.prefetch)):
            if point is not None and not i <= point < n:
                broken.append(Violation("points", stage.name, f"{name} point {point} is not in [{i}, {n})"))
    modules = [i for i, name in enumerate(plan.stages) if not name.startswith("(")]
    for stage, choice in zip(profile.stages, plan.choices, strict=True):
        if modules and choice.release is not None and choice.release > modules[-1]:
            broken.append(
                Violation("points", stage.name, "release point after the last module's end, where nothing runs")
            )
        if modules and choice.prefetch is not None and choice.prefetch not in modules:
            broken.append(Violation("points", stage.name, "prefetch point outside of any module's backward"))
    for j, (stage, choice) in enumerate(zip(profile.stages, plan.choices, strict=True)):
        for s in stage.held(choice.action):
            o = mover.get(s)
            if o is None or o == j:
                continue
            if j > o or choice.action != "swap" or s in stage.pinned:
                broken.append(
                    Violation("held", stage.name, f"holds storage {s}, which {profile.stages[o].name!r} moves")
                )
    for s, o in mover.items():
        storage = profile.storages[s]
        if storage.stays:
            broken.append(Violation("moves", profile.stages[o].name, f"moves storage {s}, which is to stay"))
        if storage.to_end or storage.program_until > o:
            broken.append(
                Violation("held", profile.stages[o].name, f"moves storage {s}, which the program still holds")
            )
    return broken
