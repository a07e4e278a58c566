"""From a baseline's actions to a finished plan: schedule, peak, makespan, and the error when nothing fits.

All baselines share this, so they differ in their rule alone: release and prefetch points are the best there are for the
actions chosen (core/schedule.py), and an action that a stage can't take becomes keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from ckptplan.core.chain import Action, Phase
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import Overflow, Residency, residency, schedule
from ckptplan.core.units import format_bytes

SPACE = "none: a rule, bound is the compute time alone"


@dataclass(frozen=True, slots=True)
class Times:
    """Makespan of scheduled decisions and, per stage, how long compute waits for its copies.

    Attributes
    ----------
    makespan_s : float
    out_wait_s, in_wait_s : tuple of float
        Unhidden swap-out and swap-in per stage.
    """

    makespan_s: float
    out_wait_s: tuple[float, ...]
    in_wait_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst step of a plan."""

    bytes: int
    stage: int
    phase: Phase


def available(profile: Profile, wanted: Sequence[Action]) -> tuple[Action, ...]:
    """`wanted` with keep wherever a stage can't take its action."""
    return tuple(
        action if stage.transient(action) is not None else "keep"
        for stage, action in zip(profile.stages, wanted, strict=True)
    )


def times(profile: Profile, choices: Sequence[Decision], moved_bytes: Sequence[int]) -> Times:
    """Three first-in-first-out lanes, as the design's time model has them; O(stages).

    Parameters
    ----------
    moved_bytes : sequence of int
        Bytes each stage moves.
    """
    n = len(choices)
    out_wait, in_wait, done = [0.0] * n, [0.0] * n, [0.0] * n
    now = out_free = in_free = 0.0
    released: list[list[int]] = [[] for _ in range(n)]
    returned: list[list[int]] = [[] for _ in range(n)]
    for i, choice in enumerate(choices):
        if choice.release is not None and choice.prefetch is not None:
            released[choice.release].append(i)
            returned[choice.prefetch].append(i)
    for k, stage in enumerate(profile.stages):
        now += stage.forward_s
        if choices[k].moves:
            out_free = done[k] = max(now, out_free) + profile.link.out_s(moved_bytes[k])
        for i in released[k]:
            out_wait[i] = max(0.0, done[i] - now)
            now = max(now, done[i])
    for k in reversed(range(n)):
        stage, choice = profile.stages[k], choices[k]
        for i in reversed(returned[k]):
            in_free = done[i] = max(now, in_free) + profile.link.in_s(moved_bytes[i])
        if choice.moves:
            in_wait[k] = max(0.0, done[k] - now)
            now = max(now, done[k])
        now += stage.backward_s + (stage.recompute_s if choice.action == "recompute" else 0.0)
    return Times(now, tuple(out_wait), tuple(in_wait))


def tightest_peak(profile: Profile, r: Residency) -> Peak:
    """Find the worst step with everything that moves away: no schedule of these actions has a smaller peak."""
    return _worst(profile, r.forward_bytes, r.backward_bytes)


def peak(profile: Profile, choices: Sequence[Decision], r: Residency) -> Peak:
    """Find the worst step of scheduled decisions, where `r` is the residency of their actions."""
    n = len(choices)
    staying_forward, staying_backward = [0] * (n + 1), [0] * (n + 1)
    for i, choice in enumerate(choices):
        if choice.release is not None and choice.prefetch is not None:
            for staying, point in ((staying_forward, choice.release), (staying_backward, choice.prefetch)):
                staying[i + 1] += r.moved_bytes[i]
                staying[point + 1] -= r.moved_bytes[i]
    forward, backward = (
        [need + more for need, more in zip(needs, accumulate(staying), strict=False)]
        for needs, staying in ((r.forward_bytes, staying_forward), (r.backward_bytes, staying_backward))
    )
    return _worst(profile, forward, backward)


def build(profile: Profile, wanted: Sequence[Action], budget_bytes: int, planner: str) -> Plan:
    """Make the plan of `wanted` under its best schedule.

    Raises
    ------
    InfeasibleBudgetError
        If no schedule of these actions fits; `min_peak_bytes` is that of the tightest.
    """
    actions = available(profile, wanted)
    choices = schedule(profile, actions, budget_bytes)
    if isinstance(choices, Overflow):
        raise_infeasible(profile, tightest_peak(profile, residency(profile, actions)), budget_bytes, planner)
    r = residency(profile, [choice.action for choice in choices])
    step_s = times(profile, choices, r.moved_bytes).makespan_s
    bound_s = profile.baseline_step_s
    return Plan(
        stages=tuple(stage.name for stage in profile.stages),
        choices=choices,
        # No plan computes less than the step with everything kept, so meeting that is proof enough.
        status="optimal" if step_s <= bound_s * (1 + 1e-6) else "feasible",
        budget_bytes=budget_bytes,
        peak_bytes=peak(profile, choices, r).bytes,
        host_bytes=sum(r.moved_bytes),
        step_s=step_s,
        baseline_step_s=bound_s,
        lower_bound_s=min(bound_s, step_s),  # the same seconds added in another order may differ in the last bit
        space=SPACE,
        planner=planner,
        fingerprint=profile.fingerprint,
        input_bytes=tuple(stage.input_bytes for stage in profile.stages),
    )


def raise_infeasible(profile: Profile, smallest: Peak, budget_bytes: int, planner: str) -> NoReturn:
    """Raise the error that names the smallest budget `planner` can do with."""
    stage = profile.stages[smallest.stage].name
    raise InfeasibleBudgetError(
        f"{planner}: budget {format_bytes(budget_bytes)} is below the smallest peak of its plan, "
        f"{format_bytes(smallest.bytes)} (stage {stage!r}, {smallest.phase}); raise the budget, or use ckptplan.solve",
        budget_bytes=budget_bytes,
        min_peak_bytes=smallest.bytes,
        stage=stage,
        phase=smallest.phase,
    )


def _worst(profile: Profile, forward: Sequence[int], backward: Sequence[int]) -> Peak:
    phases: tuple[tuple[Phase, Sequence[int]], ...] = (("forward", forward), ("backward", backward))
    steps = [Peak(nbytes, k, phase) for phase, needs in phases for k, nbytes in enumerate(needs)]
    return max((*steps, Peak(profile.update_peak_bytes, 0, "update")), key=lambda step: step.bytes)
