"""Checks of whether a plan is sound, and if not why, independent of core's rules and of every planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptplan.core.checks import check_bytes, check_kind
from ckptplan.core.option import ACTIONS, Action, checked_actions
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.referee.rules import Kind, Violation, broken_rules
from ckptplan.referee.simulate import Timeline, replay

__all__ = ["Kind", "Violation", "examine", "validate"]


def validate(
    profile: Profile,
    plan: Plan,
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    actions: Sequence[Action] = ACTIONS,
    segments: bool = True,
) -> tuple[Violation, ...]:
    """Return the rules that `plan` breaks on `profile`; empty if it is sound.

    Parameters
    ----------
    budget_bytes : int
        Limit on the device.
    host_bytes : int, optional
        Limit on the host tier; None: no limit.
    disk_bytes : int, optional
        Limit on the disk tier; None: there is no such tier.
    actions, segments
        As in `solve`: the limits by which the plan's space is narrower than the profile's options.

    Returns
    -------
    tuple of Violation
        Violations of structure; if there are none, those of limits and predictions.

    Raises
    ------
    InvalidInputError
        On unknown actions, or arguments of another type.
    """
    check_kind(Profile, profile=profile)
    check_kind(Plan, plan=plan)
    check_bytes("validate", budget_bytes=budget_bytes)
    return examine(
        profile.offloading(plan.offload, plan.between),
        plan,
        budget_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        actions=actions,
        segments=segments,
    )[0]


def examine(
    profile: Profile,
    plan: Plan,
    budget_bytes: int,
    *,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    actions: Sequence[Action] = ACTIONS,
    segments: bool = True,
) -> tuple[tuple[Violation, ...], Timeline | None]:
    """Return the result of `validate`, and the replay on which it is based; None if the structure is broken."""
    names = tuple(stage.name for stage in profile.stages)
    if plan.stages != names:
        return (Violation("stages", "", "the plan's stages are not the profile's"),), None
    structure = broken_rules(profile, plan.choices, plan.segments) or tuple(_outside(profile, plan, actions, segments))
    if structure:
        return structure, None
    broken: list[Violation] = []
    timeline = replay(profile, plan.choices, plan.segments)
    for step in timeline.steps:
        if step.peak_bytes > budget_bytes:
            what = f"{step.phase} needs" if not step.sweep else "its run in a segment's sweep needs"
            broken.append(Violation("budget", step.stage, f"{what} {step.peak_bytes} of {budget_bytes} bytes"))
    if host_bytes is not None and timeline.host_bytes > host_bytes:
        broken.append(Violation("host budget", "", f"{timeline.host_bytes} of {host_bytes} bytes"))
    if timeline.disk_bytes > (disk_bytes or 0):
        broken.append(Violation("disk budget", "", f"{timeline.disk_bytes} of {disk_bytes or 0} bytes"))
    if timeline.peak_bytes != plan.peak_bytes:
        broken.append(Violation("prediction", "", f"peak {plan.peak_bytes}, replayed {timeline.peak_bytes} bytes"))
    if timeline.host_bytes != plan.host_bytes:
        broken.append(Violation("prediction", "", f"host {plan.host_bytes}, replayed {timeline.host_bytes} bytes"))
    if timeline.disk_bytes != plan.disk_bytes:
        broken.append(Violation("prediction", "", f"disk {plan.disk_bytes}, replayed {timeline.disk_bytes} bytes"))
    # 1e-9: the planner may add the same seconds in another order.
    if abs(timeline.makespan_s - plan.step_s) > 1e-9 * max(1.0, plan.step_s):
        broken.append(Violation("prediction", "", f"step {plan.step_s}, replayed {timeline.makespan_s} s"))
    if plan.lower_bound_s > plan.step_s * (1 + 1e-9):
        broken.append(Violation("bound", "", f"lower bound {plan.lower_bound_s} s is above the step, {plan.step_s} s"))
    return tuple(broken), timeline


def _outside(profile: Profile, plan: Plan, actions: Sequence[Action], segments: bool) -> Iterator[Violation]:
    """Yield the decisions that lie outside of a narrower plan space."""
    actions = checked_actions(actions)
    for stage, choice in zip(profile.stages, plan.choices, strict=True):
        if not stage.option(choice.option).allowed(actions):
            yield Violation("option", stage.name, f"{choice.option!r} is more than {'/'.join(actions)}")
    for segment in plan.segments if not segments else ():
        yield Violation("segment", "", f"segment {segment.first}..{segment.last}, and segments aren't allowed")
