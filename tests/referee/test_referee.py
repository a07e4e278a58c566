"""The referee, by hand-checked cases, by broken plans, and against core's own reading of the rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from brute_force import Combination, combinations, decision, fastest, fastest_of_all_points, smallest_peak
from made_plans import plan_with
from random_chains import random_chain, random_options, random_segments, rich_chain

from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import KEEP, Decision, Plan, Transfer
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import Residency, StepNeed, evaluate, residency, tightest_peak
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.referee import Timeline, simulate, validate
from ckptplan.referee.rules import broken_rules

pytestmark = pytest.mark.planning

RECOMPUTE = Decision("recompute")


def four_stages(out: float = 10, back: float = 10, latency_s: float = 0.0) -> Profile:
    """Stage i saves 10 bytes of its own; forward 1 s, backward 2 s; base 100, forward adds 12, backward 5 bytes."""
    stages = []
    for i in range(4):
        keep = Option("keep", (i,), (), 12, 5)
        again = Option("recompute", (), (), 3, 14, recompute_s=1, recomputes=True)
        stages.append(Stage(f"s{i}", "s", (keep, replace(keep, name="swap", moves=(0,)), again), 1, 2))
    storages = tuple(Storage(f"s{i}.inner", 10, i, i) for i in range(4))
    return Profile(tuple(stages), storages, (100,) * 4, (100, 103, 106, 109), 90, Link(out, back, latency_s))


def saving_also(stage: Stage, s: int) -> Stage:
    """`stage` with storage `s` saved, and moved where it swaps, by keep and swap."""
    keep = replace(stage.keep, saved=(*stage.keep.saved, s))
    swap = replace(keep, name="swap", moves=tuple(range(len(keep.saved))))
    return replace(stage, options=(keep, swap, *stage.options[2:]))


def starts(timeline: Timeline) -> list[int]:
    return [step.start_bytes for step in timeline.steps]


def peaks(timeline: Timeline) -> list[int]:
    return [step.peak_bytes for step in timeline.steps]


def test_keep_all() -> None:
    timeline = simulate(four_stages(), (KEEP,) * 4)
    # Forward k starts with 100 + 10 k; backward k has the k + 1 saved sets up to its own.
    assert starts(timeline) == [100, 110, 120, 130, 149, 136, 123, 110, 90]
    assert peaks(timeline) == [112, 122, 132, 142, 154, 141, 128, 115, 90]
    assert (timeline.peak_bytes, timeline.peak_stage, timeline.peak_phase) == (154, "s3", "backward")
    assert [step.start_s for step in timeline.steps] == [0, 1, 2, 3, 4, 6, 8, 10, 12]
    assert sorted((stay.storage, stay.first, stay.last, stay.again) for stay in timeline.stays) == [
        (0, 1, 7, False), (1, 2, 6, False), (2, 3, 5, False), (3, 4, 4, False),
    ]  # fmt: skip
    assert (timeline.makespan_s, timeline.stall_s, timeline.host_bytes) == (12, 0, 0)
    assert timeline.runs == (1, 1, 1, 1)


def test_recompute_all() -> None:
    profile = four_stages()
    timeline = simulate(profile, (RECOMPUTE,) * 4)
    assert peaks(timeline) == [103, 103, 103, 103, 123, 120, 117, 114, 90]
    assert timeline.makespan_s == 16
    assert [e.what for e in timeline.events if e.lane == "compute"] == ["forward"] * 4 + ["recompute", "backward"] * 4
    assert timeline.runs == (2, 2, 2, 2)
    # What the caller keeps stays.
    kept = replace(profile, storages=(*profile.storages, Storage("output", 7, 3, 3, to_end=True)))
    assert starts(simulate(kept, (RECOMPUTE,) * 4)) == [100, 100, 100, 100, 116, 113, 110, 107, 90]


def test_swap_hides_behind_compute() -> None:
    # 10 bytes at 10 bytes/s: out during forward 1; issued at the start of backward 1 (8 s), back at 9 s.
    timeline = simulate(four_stages(), (Decision.moving("swap", (0,), 1, 1), KEEP, KEEP, KEEP))
    assert timeline.makespan_s == 12
    assert [(e.start_s, e.end_s) for e in timeline.events if e.lane == "out"] == [(1, 2)]
    assert [(e.start_s, e.end_s) for e in timeline.events if e.lane == "in"] == [(8, 9)]
    assert timeline.host_bytes == 10
    # Away in forward 2 and 3 and in backward 3 and 2.
    assert [step.start_bytes for step in timeline.steps] == [100, 110, 110, 120, 139, 126, 123, 110, 90]


def test_stalls() -> None:
    # Out at 4 bytes/s takes 2.5 s, [1, 3.5): forward 1 waits from 1 s on, since stage 0 must have left by its own end.
    # In at 5 bytes/s takes 2 s: issued when backward 0 starts, all of it is a wait.
    timeline = simulate(four_stages(4, 5), (Decision.moving("swap", (0,), 0, 0), KEEP, KEEP, KEEP))
    assert [(e.start_s, e.end_s) for e in timeline.events if e.what == "wait"] == [(1, 3.5), (12.5, 14.5)]
    assert (timeline.makespan_s, timeline.stall_s) == (16.5, 4.5)
    # Latency counts per transfer.
    timeline = simulate(four_stages(10, 10, 0.25), (Decision.moving("swap", (0,), 0, 0), KEEP, KEEP, KEEP))
    assert timeline.makespan_s == 12 + 2 * 1.25


def test_queues_are_first_in_first_out() -> None:
    # Each copy takes 2.5 s: s0 in [1, 3.5), s1 in [3.5, 6), s2 in [6, 8.5); compute waits at the turn.
    # Returns issued together at the start of backward 3 (8.5 s): s2, s1, s0, 2.5 s each.
    swap = tuple(Decision.moving("swap", (0,), 3, 3) for _ in range(3))
    timeline = simulate(four_stages(4, 4), (*swap, KEEP))
    lanes = {lane: [(e.stage, e.start_s, e.end_s) for e in timeline.events if e.lane == lane] for lane in ("out", "in")}
    assert lanes["out"] == [("s0", 1, 3.5), ("s1", 3.5, 6), ("s2", 6, 8.5)]
    assert lanes["in"] == [("s2", 8.5, 11), ("s1", 11, 13.5), ("s0", 13.5, 16)]
    # Backward: 3 in [8.5, 10.5), 2 from 11, 1 from 13.5, 0 from 16.
    assert timeline.makespan_s == 18


def test_what_the_host_has_already_leaves_without_a_copy() -> None:
    """Stage 0's 10 bytes, as of frozen weights, pass those of stage 1 that are being copied for 5 s."""
    profile = four_stages(out=2, back=10)
    weights = replace(profile.storages[0], on_host=True)
    profile = replace(profile, storages=(weights, *profile.storages[1:]))
    moves = Decision.moving("swap", (0,), 1, 1, "swap"), Decision.moving("swap", (0,), 2, 2, "swap")
    timeline = simulate(profile, (*moves, KEEP, KEEP))
    assert starts(timeline)[:4] == [100, 110, 110, 110]  # forward 2 begins without stage 0's, forward 3 without both
    assert [(event.stage, event.start_s, event.end_s) for event in timeline.events if event.lane == "out"] == [
        ("s1", 2, 7)
    ]
    assert [event.stage for event in timeline.events if event.lane == "in"] == ["s1", "s0"]
    assert timeline.host_bytes == 20
    alone = simulate(profile, (moves[0], KEEP, KEEP, KEEP))
    assert (alone.makespan_s, alone.stall_s) == (12, 0)


def five_linked(*, glue: int | None = None) -> Profile:
    """Stage i makes inner_i of 10 and out_i of 4 bytes (storages 2 i and 2 i + 1), and saves out_(i-1) and inner_i.

    Keep adds 16 bytes in forward and 5 in backward, recompute 6 and 15. Forward 1 s, backward 2 s, recompute 1.5 s.
    Base 100, and one more for every backward step. Links carry 2 bytes/s.

    Stage `glue` is glue.
    """
    storages = []
    stages = []
    for i in range(5):
        storages += [Storage(f"inner{i}", 10, i, i), Storage(f"out{i}", 4, i, min(i + 1, 4))]
        inputs = (2 * i - 1,) if i else ()
        keep = Option("keep", (*inputs, 2 * i), (), 16, 5)
        again = Option("recompute", inputs, (), 6, 15, recompute_s=1.5, recomputes=True)
        menu = [keep, again]
        if inputs:
            menu.append(replace(again, name="recompute+swap", moves=(0,)))
        linked = tuple(s for s in inputs if s // 2 != glue)
        if i == glue:
            stages.append(Stage(f"(glue {i})", "g", (keep,), 1, 2))
        else:
            stages.append(Stage(f"s{i}", "s", tuple(menu), 1, 2, linked))
    return Profile(tuple(stages), tuple(storages), (100,) * 5, (104, 103, 102, 101, 100), 90, Link(2, 2))


MIDDLE = (KEEP, RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP)


def test_segment_of_three() -> None:
    timeline = simulate(five_linked(), MIDDLE, (Segment(1, 3),))
    forward = [
        (100, 116),
        (114, 120),  # inner0, held, and out0
        (118, 124),  # inner0, out0, which stage 1 holds, out1
        (118, 124),  # inner0, out0, out2: stage 2 doesn't hold out1, which the sweep makes again
        (118, 134),  # inner0, out0, out3
    ]
    backward = [
        (128, 133),  # 4: inner0, out0, out3, inner4
        (115, 131),  # 3, base 101: stage 1 runs with inner0 and out0 there
        (129, 145),  # stage 2 with inner1' and out1' on top
        (143, 158),  # stage 3's own backward with inner2' and out2' on top, and recompute's 15
        (140, 145),  # 2, base 102: without out2'; kept by the sweep, 5
        (127, 132),  # 1, base 103: inner0, out0, inner1'
        (114, 119),  # 0, base 104: inner0
    ]
    assert [(s.start_bytes, s.peak_bytes) for s in timeline.steps] == [*forward, *backward, (90, 90)]
    assert [s.stage for s in timeline.steps if s.sweep] == ["s1", "s2"]
    assert {s.phase for s in timeline.steps if s.sweep} == {"backward"}
    # Forward 5, backward 10, the sweep's runs 1 each, stage 3's recompute 1.5.
    assert timeline.makespan_s == 18.5
    assert timeline.runs == (1, 2, 2, 2, 1)
    compute = [(e.what, e.stage, e.start_s) for e in timeline.events if e.what != "forward"]
    assert compute == [
        ("backward", "s4", 5),
        ("recompute", "s1", 7),
        ("recompute", "s2", 8),
        ("recompute", "s3", 9),
        ("backward", "s3", 10.5),
        ("backward", "s2", 12.5),
        ("backward", "s1", 14.5),
        ("backward", "s0", 16.5),
    ]


NESTED = (Segment(1, 3, (Segment(1, 2),)),)


def test_a_segment_s_input_is_swapped() -> None:
    moving = Decision.moving("recompute", (0,), 1, 3, "recompute+swap")
    timeline = simulate(five_linked(), (KEEP, moving, *MIDDLE[2:]), (Segment(1, 3),))
    # out0 is away in forward 2 to 4 and backward 4, and back for the sweep in front of backward 3.
    plain = peaks(simulate(five_linked(), MIDDLE, (Segment(1, 3),)))
    assert [a - b for a, b in zip(plain, peaks(timeline), strict=True)] == [0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0]
    # 4 bytes at 2 bytes/s: out in [2, 4), which forward 1 waits for; in from backward 3 on, which the sweep waits for.
    assert [(e.start_s, e.end_s) for e in timeline.events if e.what == "wait"] == [(2, 4), (9, 11)]
    assert [(e.what, e.start_s) for e in timeline.events if e.stage == "s1" and e.lane == "in"] == [("in", 9)]
    again = [(e.stage, e.start_s) for e in timeline.events if e.what == "recompute"]
    assert again == [("s1", 11), ("s2", 12), ("s3", 13)]
    assert (timeline.makespan_s, timeline.host_bytes) == (22.5, 4)
    # Issued with backward 4, the return is hidden by it.
    early = simulate(
        five_linked(), (KEEP, Decision.moving("recompute", (0,), 1, 4, "recompute+swap"), *MIDDLE[2:]), (Segment(1, 3),)
    )
    assert early.makespan_s == 20.5


def sound() -> tuple[Profile, Plan]:
    """Stages 0 and 1 share a storage and swap."""
    profile = four_stages()
    shared = Storage("shared", 4, 0, 1)
    stages = tuple(saving_also(s, 4) if i < 2 else s for i, s in enumerate(profile.stages))
    profile = replace(profile, stages=stages, storages=(*profile.storages, shared))
    return profile, plan_with(
        profile, (Decision.moving("swap", (0,), 1, 1), Decision.moving("swap", (0, 1), 2, 2), KEEP, KEEP)
    )


def sound_segment() -> tuple[Profile, Plan]:
    """Five linked stages, the middle three together, their input swapped, the last two of them in an inner segment."""
    profile = five_linked()
    moving = Decision.moving("recompute", (0,), 1, 3, "recompute+swap")
    return profile, plan_with(profile, (KEEP, moving, *MIDDLE[2:]), segments=NESTED)


def with_choice(plan: Plan, i: int, choice: Decision) -> Plan:
    return replace(plan, choices=(*plan.choices[:i], choice, *plan.choices[i + 1 :]))


BROKEN: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "other stages": ("stages", lambda p: replace(p, stages=("x", *p.stages[1:]))),
    "unknown option": ("option", lambda p: with_choice(p, 3, Decision("keep", option="selective-1"))),
    "another action": ("option", lambda p: with_choice(p, 3, Decision("swap", option="keep"))),
    "other operations": ("option", lambda p: with_choice(p, 3, Decision("recompute", ops=(1,)))),
    "no such position": ("moves", lambda p: with_choice(p, 0, Decision.moving("swap", (5,), 1, 1))),
    "not moved by the option": ("moves", lambda p: with_choice(p, 0, Decision.moving("recompute", (0,), 1, 1))),
    "moved by two": ("moves", lambda p: with_choice(p, 0, Decision.moving("swap", (0, 1), 1, 1))),
    "release too early": ("points", lambda p: with_choice(p, 1, Decision.moving("swap", (0, 1), 0, 2))),
    "prefetch too late": ("points", lambda p: with_choice(p, 1, Decision.moving("swap", (0, 1), 2, 0))),
    "held by a kept stage": ("held", lambda p: with_choice(p, 0, KEEP)),
    "peak": ("prediction", lambda p: replace(p, peak_bytes=p.peak_bytes - 1)),
    "host": ("prediction", lambda p: replace(p, host_bytes=p.host_bytes - 1)),
    "time": ("prediction", lambda p: replace(p, step_s=p.step_s * 1.001)),
    "bound": ("bound", lambda p: replace(p, lower_bound_s=p.step_s * 1.001)),
}
BROKEN_SEGMENTS: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "moves what the sweep makes": (
        "moves",
        lambda p: with_choice(p, 2, Decision.moving("recompute", (0,), 2, 3, "recompute+swap")),
    ),
    "back only for its own backward": (
        "points",
        lambda p: with_choice(p, 1, Decision.moving("recompute", (0,), 1, 2, "recompute+swap")),
    ),
    "other runs": ("prediction", lambda p: replace(p, segments=(Segment(1, 3),))),
}


@pytest.mark.parametrize("case", [*BROKEN, *BROKEN_SEGMENTS])
def test_broken_plans_are_named(case: str) -> None:
    kind, damage = (BROKEN | BROKEN_SEGMENTS)[case]
    profile, plan = sound() if case in BROKEN else sound_segment()
    assert validate(profile, plan, plan.budget_bytes) == ()
    damaged = damage(plan)
    assert kind in {violation.kind for violation in validate(profile, damaged, plan.budget_bytes)}
    # What can't be replayed is refused by the replay itself.
    if kind in ("option", "segment", "moves", "points", "held"):
        with pytest.raises(InvalidInputError, match="can't be replayed"):
            simulate(profile, damaged)


def test_a_segment_needs_stages_that_recompute() -> None:
    segments = (Segment(1, 3),)
    with pytest.raises(
        InvalidInputError, match=r"stage 's2': segment 1\.\.3: the stage must be decided 'recompute', not 'keep'"
    ):
        simulate(five_linked(), (KEEP, RECOMPUTE, KEEP, RECOMPUTE, KEEP), segments)
    profile = five_linked()
    fixed = replace(profile.stages[2], options=profile.stages[2].options[:1], linked=())
    profile = replace(profile, stages=(*profile.stages[:2], fixed, *profile.stages[3:]))
    with pytest.raises(InvalidInputError, match=r"stage 's2': segment 1\.\.3: the stage can't be recomputed"):
        simulate(profile, (KEEP, RECOMPUTE, KEEP, RECOMPUTE, KEEP), segments)
    with pytest.raises(InvalidInputError, match="out of order"):
        simulate(five_linked(), (RECOMPUTE,) * 5, (Segment(1, 3), Segment(3, 4)))
    with pytest.raises(InvalidInputError, match="or a single stage"):
        simulate(five_linked(), (RECOMPUTE,) * 5, (Segment(1, 1),))
    with pytest.raises(InvalidInputError, match="2 decisions for 5 stages"):
        simulate(five_linked(), (KEEP, KEEP))


def test_a_segment_neither_begins_nor_ends_in_glue() -> None:
    profile = five_linked(glue=3)
    choices = (KEEP, RECOMPUTE, RECOMPUTE, KEEP, KEEP)
    with pytest.raises(InvalidInputError, match="ends in glue"):
        simulate(profile, choices, (Segment(1, 3),))
    choices = (KEEP, RECOMPUTE, RECOMPUTE, KEEP, RECOMPUTE)
    with pytest.raises(InvalidInputError, match="ends in glue"):
        simulate(profile, choices, (Segment(1, 4, (Segment(2, 3),)),))
    with pytest.raises(InvalidInputError, match="begins in glue"):
        simulate(profile, choices, (Segment(3, 4),))
    with pytest.raises(InvalidInputError, match="begins in glue"):
        simulate(five_linked(glue=2), (KEEP, RECOMPUTE, KEEP, RECOMPUTE, RECOMPUTE), (Segment(1, 4, (Segment(2, 3),)),))


def test_points_lie_where_modules_begin_and_end() -> None:
    profile = five_linked(glue=4)
    moving = Decision.moving("recompute", (0,), 1, 3, "recompute+swap")
    choices = (KEEP, moving, *MIDDLE[2:])
    assert simulate(profile, choices, (Segment(1, 3),)).host_bytes == 4
    for points, message in (((4, 3), "release point after the last module"), ((1, 4), "prefetch point outside")):
        late = Decision.moving("recompute", (0,), *points, "recompute+swap")
        with pytest.raises(InvalidInputError, match=message):
            simulate(profile, (KEEP, late, *MIDDLE[2:]), (Segment(1, 3),))


def test_a_narrower_plan_space_is_a_rule() -> None:
    profile, plan = sound()
    assert validate(profile, plan, plan.budget_bytes, segments=False) == ()
    with pytest.raises(InvalidInputError, match="unknown action 's'"):
        validate(profile, plan, plan.budget_bytes, actions="swap")  # type: ignore[arg-type]
    found = validate(profile, plan, plan.budget_bytes, actions=("keep", "recompute"))
    assert {v.stage for v in found} == {
        name for name, choice in zip(plan.stages, plan.choices, strict=True) if choice.moves
    }
    assert {v.kind for v in found} == {"option"}
    profile, plan = sound_segment()
    assert [v.kind for v in validate(profile, plan, plan.budget_bytes, segments=False)] == ["segment"]


def test_budgets_are_exact() -> None:
    profile, plan = sound()
    assert validate(profile, plan, plan.peak_bytes, host_bytes=24) == ()
    over = validate(profile, plan, plan.peak_bytes - 1)
    assert {(v.kind, v.stage) for v in over} == {("budget", simulate(profile, plan).peak_stage)}
    assert [v.kind for v in validate(profile, plan, plan.peak_bytes, host_bytes=23)] == ["host budget"]
    storages = (replace(profile.storages[0], stays=True), *profile.storages[1:])
    found = validate(replace(profile, storages=storages), plan, 10_000)
    assert [(v.kind, v.stage) for v in found] == [("moves", "s0")]
    with pytest.raises(PlanMismatchError, match="stage 0"):
        simulate(profile, replace(plan, stages=("x", *plan.stages[1:])))


def tightest(options: Sequence[Option], r: Residency) -> tuple[Decision, ...]:
    """Everything that core says may move, away wherever it can be."""
    return tuple(
        decision(option, moves, i, last)
        for i, (option, moves, last) in enumerate(zip(options, r.moves, r.needed, strict=True))
    )


def worst_bytes(timeline: Timeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Peak of each forward and of each backward step, sweeps counted in the latter."""
    forward = [step.peak_bytes for step in timeline.steps if step.phase == "forward"]
    backward: list[int] = []
    in_sweep = 0
    for step in timeline.steps:
        if step.phase == "backward":
            in_sweep = max(in_sweep, step.peak_bytes)
            if not step.sweep:
                backward.append(in_sweep)
                in_sweep = 0
    return tuple(forward), tuple(reversed(backward))


def makespan(profile: Profile, choices: Sequence[Decision], r: Residency) -> float:
    """The step as a longest path, from the seconds of each step and the transfers alone."""
    n, link, stages = len(choices), profile.link, profile.stages
    sent = [
        (i, t, sum(profile.storages[stages[i].option(choice.option).saved[p]].nbytes for p in t.moves))
        for i, choice in enumerate(choices)
        for t in choice.transfers
    ]
    now = free = 0.0
    done: dict[tuple[int, Transfer], float] = {}
    for k in range(n):
        now += stages[k].forward_s
        for i, t, nbytes in sent:
            if i == k:
                free = done[i, t] = max(now, free) + link.out_s(nbytes)
        now = max([now, *(done[i, t] for i, t, _ in sent if t.release == k)])
    free = 0.0
    for k in reversed(range(n)):
        for i, t, nbytes in reversed(sent):
            if t.prefetch == k:
                free = done[i, t] = max(now, free) + link.in_s(nbytes)
        now = max([now, *(done[i, t] for i, t, _ in sent if r.needed[i] == k)]) + r.backward_s[k]
    return max(now, r.launch_s)


def pinning_more(rng: random.Random, profile: Profile) -> Profile:
    """`profile` with some "recompute+swap" that hold more than "recompute", a thing of their own or one of keep's."""
    storages = list(profile.storages)
    stages = []
    for i, stage in enumerate(profile.stages):
        menu = []
        for option in stage.options:
            if option.name == "recompute+swap" and rng.random() < 0.5:
                more = [s for s in stage.keep.held if s not in option.held]
                if more and rng.random() < 0.5:
                    s = rng.choice(more)
                else:
                    s = len(storages)
                    storages.append(Storage(f"{stage.name}.unseen", rng.randint(1, 9), i, i))
                option = replace(option, pinned=(*option.pinned, s))
            menu.append(option)
        stages.append(replace(stage, options=tuple(menu)))
    return replace(profile, stages=tuple(stages), storages=tuple(storages))


def steps_add_up(profile: Profile, timeline: Timeline) -> bool:
    """Whether each step starts with its base bytes and the storages that are said to stay."""
    stages = {stage.name: i for i, stage in enumerate(profile.stages)}
    stays = [0] * len(timeline.steps)
    for stay in timeline.stays:
        for k in range(stay.first, stay.last + 1):
            stays[k] += profile.storages[stay.storage].nbytes
    base = 0
    for k in reversed(range(len(timeline.steps) - 1)):
        step = timeline.steps[k]
        if step.phase == "forward":
            base = profile.base_forward_bytes[stages[step.stage]]
        elif not step.sweep:  # a sweep has the base bytes of the stage behind it
            base = profile.base_backward_bytes[stages[step.stage]]
        if step.start_bytes != base + stays[k]:
            return False
    begins = [step.start_s for step in timeline.steps]
    return stays[-1] == 0 and begins == sorted(begins) and (begins[0], begins[-1]) == (0.0, timeline.makespan_s)


def test_agrees_with_core_on_random_plans() -> None:
    moving = nested = launching = 0
    for seed in range(250):
        rng = random.Random(seed)
        profile = pinning_more(rng, random_chain(seed, rng.randint(1, 12)))
        segments = random_segments(rng, profile, share=rng.random())
        options = random_options(rng, profile, segments)
        r = residency(profile, options, segments)
        timeline = simulate(profile, tightest(options, r), segments)
        assert timeline.launch_s == r.launch_s
        assert worst_bytes(timeline) == (r.forward_bytes, r.backward_bytes), seed
        assert steps_add_up(profile, timeline), seed
        assert timeline.host_bytes == sum(r.moved_bytes)
        for i in range(len(options)):
            depth = sum(segment.depth(i) for segment in segments)
            inside = depth and not profile.stages[i].is_glue
            again = options[i].runs_again and profile.stages[i].has_backward
            assert timeline.runs[i] == 1 + (depth if inside else again), (seed, i)

        still = simulate(profile, [decision(option) for option in options], segments)
        least = tightest_peak(profile, r).bytes
        budget = rng.randint(least, max(least, still.peak_bytes))
        found = evaluate(profile, options, budget, segments)
        assert not isinstance(found, StepNeed), seed
        choices = found.decisions()
        timeline = simulate(profile, choices, segments)
        assert timeline.peak_bytes <= budget, seed
        assert steps_add_up(profile, timeline), seed
        # 1e-9: the same seconds added in another order.
        assert timeline.makespan_s == pytest.approx(makespan(profile, choices, found.residency), rel=1e-9), seed
        assert isinstance(evaluate(profile, options, least - 1, segments), StepNeed)
        moving += timeline.host_bytes > 0
        nested += any(segment.inner for segment in segments)
        launching += timeline.makespan_s == timeline.launch_s
    assert moving > 40
    assert nested > 60
    assert launching > 20


def test_no_release_and_prefetch_points_beat_the_lazy_ones() -> None:
    # 11 has so many points that it would take most of the time.
    for seed in sorted(set(range(24)) - {11}):
        rng = random.Random(seed)
        profile = random_chain(seed, 1 + seed % 3, most_options=4)
        found = combinations(profile)
        least = smallest_peak(profile, within=found)
        most = simulate(profile, [decision(stage.keep) for stage in profile.stages]).peak_bytes
        for budget in {least - 1, least, rng.randint(least, max(least, most))}:
            host = rng.choice((None, rng.randint(0, 40)))
            best = fastest(profile, budget, host_bytes=host, within=found)
            every = fastest_of_all_points(profile, budget, host_bytes=host, within=found)
            assert best == (every if every is None else pytest.approx(every, rel=1e-9)), (seed, budget, host)


@pytest.mark.long
def test_brute_force_leaves_nothing_out_that_the_referee_accepts() -> None:
    """Options and segments are put together without any idea of the rules; whatever breaks none is priced."""
    tried, begin_in_glue = 0, 0
    for seed in range(24):
        rng = random.Random(seed)
        profile = rich_chain(rng, 2 + seed % 2, most_options=5, glue_share=0.5)
        accepted, n = [], len(profile.stages)
        for segments in forests(0, n):
            for options in itertools.product(*(stage.options for stage in profile.stages)):
                choices = [decision(option) for option in options]
                begin_in_glue += any(profile.stages[segment.first].is_glue for segment in segments)
                if not broken_rules(profile, choices, segments):
                    compute_s = simulate(profile, choices, segments).events[-1].end_s
                    accepted.append(Combination(compute_s, options, segments))
        accepted.sort(key=lambda found: found.compute_s)
        tried += len(accepted)
        least = smallest_peak(profile, within=accepted)
        assert smallest_peak(profile) == least, seed
        for budget in (least, least + rng.randint(1, 20)):
            best = fastest(profile, budget)
            assert best == pytest.approx(fastest(profile, budget, within=accepted), rel=1e-9), (seed, budget)
    assert tried > 200
    assert begin_in_glue > 200


def forests(first: int, limit: int) -> Iterator[tuple[Segment, ...]]:
    """Every way to put segments, with inner ones, into the stages `first..limit-1`, allowed or not."""
    if first >= limit:
        yield ()
        return
    yield from forests(first + 1, limit)
    for last in range(first, limit):
        for inner in forests(first, last):
            for rest in forests(last + 1, limit):
                yield (Segment(first, last, inner), *rest)
