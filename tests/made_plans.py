"""Plans made without a solver, for tests of what carries a plan out or replays it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ckptplan.core.option import Action, Option
from ckptplan.core.plan import Decision, Plan, Transfer, kept_bytes, saved_bytes
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import StepNeed, evaluate, residency, tightest_peak
from ckptplan.core.segment import Segment
from ckptplan.referee import simulate


def plan_of(measured: Profile, actions: Sequence[Action]) -> Plan:
    """A plan from actions alone; no solver is involved.

    Every transfer's bytes are away in all steps but its own stage's, whether that lowers the peak or not.

    Parameters
    ----------
    actions : sequence
        One per stage; "keep" takes the place of what a stage can't do.
    """
    able = [stage.find(a) or stage.keep for a, stage in zip(actions, measured.stages, strict=True)]
    choices = tuple(
        Decision.moving(o.action, m, i, i, o.name, ops=o.ops) if m else Decision(o.action, option=o.name)
        for i, (o, m) in enumerate(zip(able, residency(measured, able).moves, strict=True))
    )
    return plan_with(measured, choices)


def scheduled(
    measured: Profile, options: Sequence[Option], segments: tuple[Segment, ...] = (), share: float = 0.0
) -> Plan:
    """A plan of these options and segments, with the laziest schedule for its budget.

    Parameters
    ----------
    share : float
        0: the least budget that fits them; 1: so much that nothing needs to move.
    """
    r = residency(measured, options, segments)
    least = tightest_peak(measured, r).bytes
    budget_bytes = least + int(share * sum(r.moved_bytes))
    found = evaluate(measured, options, budget_bytes, segments)
    assert not isinstance(found, StepNeed), found
    return plan_with(measured, found.decisions(), segments=segments)


def plan_with(
    measured: Profile,
    choices: tuple[Decision, ...],
    budget_bytes: int | None = None,
    segments: tuple[Segment, ...] = (),
) -> Plan:
    """A plan of these decisions, whatever they are worth.

    By default its budget has room to spare, as for steps that start with gradients.
    """
    timeline = simulate(measured, choices, segments)
    budget_bytes = budget_bytes or 2 * timeline.peak_bytes
    return Plan(
        stages=tuple(stage.name for stage in measured.stages),
        choices=choices,
        status="feasible",
        budget_bytes=budget_bytes,
        peak_bytes=timeline.peak_bytes,
        host_bytes=timeline.host_bytes,
        disk_bytes=timeline.disk_bytes,
        step_s=timeline.makespan_s,
        baseline_step_s=measured.baseline_step_s,
        lower_bound_s=0.0,
        space="one choice",
        planner="tests",
        fingerprint=measured.fingerprint,
        inputs=tuple(stage.inputs for stage in measured.stages),
        segments=segments,
        saved_bytes=saved_bytes(measured, choices),
        offload=measured.offload,
        between=measured.between,
        residents=measured.moving,
        kept_bytes=kept_bytes(measured),
    )


def one_transfer(moves: tuple[int, ...]) -> tuple[Transfer, ...]:
    """All of `moves` together, with any points."""
    return (Transfer(moves, 0, 0),) if moves else ()


def random_transfers(
    rng: random.Random, moved: tuple[int, ...], stage: int, back_by: int, points: tuple[Sequence[int], Sequence[int]]
) -> tuple[Transfer, ...]:
    """Most of what may move, in one transfer or in up to three, with points of their own near the stage.

    Parameters
    ----------
    back_by : int
        The backward step by whose start they must be back.
    points : (sequence of int, sequence of int)
        What `rules.enforceable_points` returns.
    """
    if moved and rng.random() < 0.3:
        moved = tuple(p for p in moved if rng.random() < 0.5) or moved
    parts = rng.choice((1, 3))
    found = []
    for part in rng.sample(range(parts), parts):
        group = tuple(p for p in moved if p % parts == part)
        releases, prefetches = points
        n = len(releases)
        release = max(stage, releases[min(stage + rng.randint(0, 2), n - 1)])
        prefetch = max(back_by, prefetches[min(back_by + rng.randint(0, 2), n - 1)])
        if group:
            found.append(Transfer(group, release, prefetch))
    return tuple(found)
