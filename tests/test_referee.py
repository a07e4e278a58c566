"""The referee, by hand-checked cases and by broken plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptplan.core.chain import Link, Stage, Storage, Transient
from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.plan import KEEP, Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.referee import simulate, validate
from ckptplan.solving import solve_profile

RECOMPUTE = Decision("recompute")


def four_stages(out: float = 10, back: float = 10, latency_s: float = 0.0) -> Profile:
    """Stage i saves 10 bytes of its own; forward 1 s, backward 2 s; base 100, forward adds 12, backward 5 bytes."""
    stages = tuple(
        Stage(
            f"s{i}", "s", (i,), (), (), Transient(12, 5), Transient(12, 5), Transient(3, 14), forward_s=1, backward_s=2,
            recompute_s=1,
        )
        for i in range(4)
    )  # fmt: skip
    storages = tuple(Storage(f"s{i}.inner", 10, i, i) for i in range(4))
    return Profile(stages, storages, (100,) * 4, (100, 103, 106, 109), 90, Link(out, back, latency_s))


def test_keep_all() -> None:
    timeline = simulate(four_stages(), (KEEP,) * 4)
    # Forward k starts with 100 + 10 k; backward k has the k + 1 saved sets up to its own.
    assert [step.start_bytes for step in timeline.steps] == [100, 110, 120, 130, 149, 136, 123, 110, 90]
    assert [step.peak_bytes for step in timeline.steps] == [112, 122, 132, 142, 154, 141, 128, 115, 90]
    assert (timeline.peak_bytes, timeline.peak_stage, timeline.peak_phase) == (154, "s3", "backward")
    assert (timeline.makespan_s, timeline.stall_s, timeline.host_bytes) == (12, 0, 0)


def test_recompute_all() -> None:
    timeline = simulate(four_stages(), (RECOMPUTE,) * 4)
    assert [step.peak_bytes for step in timeline.steps] == [103, 103, 103, 103, 123, 120, 117, 114, 90]
    assert timeline.makespan_s == 16
    assert [e.what for e in timeline.events if e.lane == "compute"] == ["forward"] * 4 + ["recompute", "backward"] * 4


def test_swap_hides_behind_compute() -> None:
    # 10 bytes at 10 bytes/s: out during forward 1; issued at the start of backward 1 (8 s), back at 9 s.
    timeline = simulate(four_stages(), (Decision("swap", (0,), 1, 1), KEEP, KEEP, KEEP))
    assert timeline.makespan_s == 12
    assert [(e.start_s, e.end_s) for e in timeline.events if e.lane == "out"] == [(1, 2)]
    assert [(e.start_s, e.end_s) for e in timeline.events if e.lane == "in"] == [(8, 9)]
    assert timeline.host_bytes == 10
    # Away in forward 2 and 3 and in backward 3 and 2.
    assert [step.start_bytes for step in timeline.steps] == [100, 110, 110, 120, 139, 126, 123, 110, 90]


def test_stalls() -> None:
    # Out at 4 bytes/s takes 2.5 s, [1, 3.5): forward 1 waits from 1 s on, since stage 0 must have left by its own end.
    # In at 5 bytes/s takes 2 s: issued when backward 0 starts, all of it is a wait.
    timeline = simulate(four_stages(4, 5), (Decision("swap", (0,), 0, 0), KEEP, KEEP, KEEP))
    assert [(e.start_s, e.end_s) for e in timeline.events if e.what == "wait"] == [(1, 3.5), (12.5, 14.5)]
    assert (timeline.makespan_s, timeline.stall_s) == (16.5, 4.5)


def test_latency_counts_per_transfer() -> None:
    timeline = simulate(four_stages(10, 10, 0.25), (Decision("swap", (0,), 0, 0), KEEP, KEEP, KEEP))
    assert timeline.makespan_s == 12 + 2 * 1.25


def test_queues_are_first_in_first_out() -> None:
    # Each copy takes 2.5 s: s0 in [1, 3.5), s1 in [3.5, 6), s2 in [6, 8.5); compute waits at the turn.
    # Returns issued together at the start of backward 3 (8.5 s): s2, s1, s0, 2.5 s each.
    swap = tuple(Decision("swap", (0,), 3, 3) for _ in range(3))
    timeline = simulate(four_stages(4, 4), (*swap, KEEP))
    lanes = {lane: [(e.stage, e.start_s, e.end_s) for e in timeline.events if e.lane == lane] for lane in ("out", "in")}
    assert lanes["out"] == [("s0", 1, 3.5), ("s1", 3.5, 6), ("s2", 6, 8.5)]
    assert lanes["in"] == [("s2", 8.5, 11), ("s1", 11, 13.5), ("s0", 13.5, 16)]
    # Backward: 3 in [8.5, 10.5), 2 from 11, 1 from 13.5, 0 from 16.
    assert timeline.makespan_s == 18


def test_recompute_comes_after_the_return_of_the_stage_before() -> None:
    # Issued at the start of backward 1 (7 s with its recompute in front): back at 8, hidden.
    timeline = simulate(four_stages(), (Decision("swap", (0,), 1, 1), RECOMPUTE, KEEP, KEEP))
    assert timeline.makespan_s == 13
    assert timeline.stall_s == 0


def test_a_shared_storage_is_counted_once_and_stays_for_its_last_holder() -> None:
    profile = four_stages()
    shared = Storage("shared", 1000, 0, 2)
    stages = tuple(replace(s, saved=(*s.saved, 4)) if i in (0, 2) else s for i, s in enumerate(profile.stages))
    profile = replace(profile, stages=stages, storages=(*profile.storages, shared))
    kept = [step.start_bytes for step in simulate(profile, (KEEP,) * 4).steps]
    assert kept == [100, 1110, 1120, 1130, 1149, 1136, 1123, 1110, 90]
    # Recomputed, stage 2 doesn't hold it; the program does until forward 2 has started, and stage 0 to the end.
    dropped = [step.start_bytes for step in simulate(profile, (RECOMPUTE, KEEP, RECOMPUTE, KEEP)).steps]
    assert dropped == [100, 1100, 1110, 110, 129, 116, 113, 100, 90]


def test_what_the_caller_keeps_stays() -> None:
    profile = four_stages()
    profile = replace(profile, storages=(*profile.storages, Storage("output", 7, 3, 3, to_end=True)))
    steps = simulate(profile, (RECOMPUTE,) * 4).steps
    assert [step.start_bytes for step in steps] == [100, 100, 100, 100, 116, 113, 110, 107, 90]


def sound() -> tuple[Profile, Plan]:
    """Stages 0 to 2 share nothing; two of them swap."""
    profile = four_stages()
    shared = Storage("shared", 4, 0, 1)
    stages = tuple(replace(s, saved=(*s.saved, 4)) if i < 2 else s for i, s in enumerate(profile.stages))
    profile = replace(profile, stages=stages, storages=(*profile.storages, shared))
    choices = (Decision("swap", (0,), 1, 1), Decision("swap", (0, 1), 2, 2), KEEP, KEEP)
    timeline = simulate(profile, choices)
    plan = replace(
        solve_profile(profile, 1000),
        choices=choices,
        budget_bytes=timeline.peak_bytes,
        peak_bytes=timeline.peak_bytes,
        step_s=timeline.makespan_s,
        host_bytes=timeline.host_bytes,
    )
    assert validate(profile, plan, plan.budget_bytes) == ()
    return profile, plan


def with_choice(plan: Plan, i: int, choice: Decision) -> Plan:
    return replace(plan, choices=(*plan.choices[:i], choice, *plan.choices[i + 1 :]))


BROKEN: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "other stages": ("stages", lambda p: replace(p, stages=("x", *p.stages[1:]))),
    "no such position": ("moves", lambda p: with_choice(p, 0, Decision("swap", (5,), 1, 1))),
    "twice": ("moves", lambda p: with_choice(p, 0, Decision("swap", (0, 0), 1, 1))),
    "moved by two": ("moves", lambda p: with_choice(p, 0, Decision("swap", (0, 1), 1, 1))),
    "release too early": ("points", lambda p: with_choice(p, 1, Decision("swap", (0, 1), 0, 2))),
    "prefetch too late": ("points", lambda p: with_choice(p, 1, Decision("swap", (0, 1), 2, 0))),
    "held by a kept stage": ("held", lambda p: with_choice(p, 0, KEEP)),
    "peak": ("prediction", lambda p: replace(p, peak_bytes=p.peak_bytes - 1)),
    "time": ("prediction", lambda p: replace(p, step_s=p.step_s * 1.001)),
    "bound": ("bound", lambda p: replace(p, lower_bound_s=p.step_s * 1.001)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plans_are_named(case: str) -> None:
    kind, damage = BROKEN[case]
    profile, plan = sound()
    assert kind in {violation.kind for violation in validate(profile, damage(plan), plan.budget_bytes)}


def test_a_point_that_is_no_stage_is_refused_when_the_plan_is_made() -> None:
    _, plan = sound()
    with pytest.raises(InvalidInputError, match="no stage has index 4"):
        with_choice(plan, 1, Decision("swap", (0, 1), 4, 2))


def test_a_storage_that_is_to_stay() -> None:
    profile, plan = sound()
    storages = (replace(profile.storages[0], stays=True), *profile.storages[1:])
    found = validate(replace(profile, storages=storages), plan, 10_000)
    assert [(v.kind, v.stage) for v in found] == [("moves", "s0")]


def test_budgets_are_exact() -> None:
    profile, plan = sound()
    assert validate(profile, plan, plan.budget_bytes, host_bytes=24) == ()
    over = validate(profile, plan, plan.budget_bytes - 1)
    assert {(v.kind, v.stage) for v in over} == {("budget", simulate(profile, plan).peak_stage)}
    assert [v.kind for v in validate(profile, plan, plan.budget_bytes, host_bytes=23)] == ["host budget"]


def test_an_action_the_stage_lacks() -> None:
    profile, plan = sound()
    profile = replace(profile, stages=(replace(profile.stages[0], swap=None), *profile.stages[1:]))
    assert "action" in {v.kind for v in validate(profile, plan, plan.budget_bytes)}


def test_a_storage_the_program_still_holds() -> None:
    profile, plan = sound()
    storages = (replace(profile.storages[0], program_until=1), *profile.storages[1:])
    found = validate(replace(profile, storages=storages), plan, 10_000)
    assert [(v.kind, v.stage) for v in found] == [("held", "s0")]


def test_a_plan_of_another_chain_is_refused() -> None:
    profile, plan = sound()
    with pytest.raises(PlanMismatchError, match="stage 0"):
        simulate(profile, replace(plan, stages=("x", *plan.stages[1:])))
