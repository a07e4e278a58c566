"""The rules: the worked example, and that every planner takes them from `core/rules.py`, `core/lanes.py` and `Link`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from exactly import Limits, solve_profile
from random_chains import random_chain, random_options, random_segments

from ckptplan.baselines import BASELINES
from ckptplan.core import lanes, rules
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency, tightest_peak
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.referee import simulate, validate
from ckptplan.solving.bound.relaxation import BoundData
from ckptplan.solving.cost import Evaluator, menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.label_dp import LabelDp
from ckptplan.solving.peak import smallest_peak

pytestmark = pytest.mark.planning


def example() -> Profile:
    """The worked example of NOTE [Residency]."""
    x, a, y = range(3)
    storages = (Storage("x", 10, -1, 0), Storage("a", 40, 0, 0), Storage("y", 20, 0, 1), Storage("z", 5, 1, 1, True))
    stages = (
        Stage(
            "first",
            "first",
            (
                Option("keep", (x, a, y), (), 60, 0),
                Option("swap", (x, a, y), (), 60, 0, moves=(0, 1, 2)),
                Option("recompute", (x,), (), 60, 60, 1.0, recomputes=True),
            ),
            1.0,
            2.0,
        ),
        Stage(
            "second",
            "second",
            (Option("keep", (y,), (), 5, 0), Option("recompute", (y,), (), 5, 5, 1.0, recomputes=True)),
            1.0,
            2.0,
            linked=(y,),
        ),
    )
    return Profile(
        stages=stages,
        storages=storages,
        base_forward_bytes=(0, 0),
        base_backward_bytes=(0, 0),
        update_peak_bytes=0,
        link=Link(1e3, 1e3),
    )


def test_the_worked_example() -> None:
    profile = example()
    first, second = profile.stages
    kept = residency(profile, (first.keep, second.keep))
    assert kept.backward_bytes == (75, 75)
    assert kept.forward_bytes == (10 + 60, 10 + 40 + 20 + 5)
    moving = residency(profile, (first.option("swap"), second.keep))
    assert moving.moves == ((0, 1), ())
    segment = (Segment(0, 1),)
    again = (first.option("recompute"), second.option("recompute"))
    starts = {(step.phase, step.sweep, step.stage): step.start_bytes for step in _steps(profile, again, segment)}
    assert starts["backward", True, "first"] == 15
    assert starts["backward", False, "second"] == 75
    assert max(residency(profile, again, segment).backward_bytes) == max(
        step.peak_bytes for step in _steps(profile, again, segment) if step.phase == "backward"
    )


def test_the_worked_example_of_a_dropped_graph() -> None:
    kept = example()
    first, second = kept.stages
    alone = Option("keep", (0, 1), (), 60, 0)
    less = Option("discard", (0,), (), 20, 0, recomputes=True)
    profile = replace(
        kept,
        stages=(
            replace(first, options=(alone, less), backward_s=0.0),
            replace(second, options=(second.keep,), linked=()),
        ),
        storages=(*(replace(storage, graph_until=1) for storage in kept.storages[:2]), *kept.storages[2:]),
    )
    starts = {}
    for option in (alone, less):
        timeline = simulate(profile, [Decision(option.action, option=option.name), Decision("keep")])
        starts[option.name] = [(step.phase, step.start_bytes) for step in timeline.steps[:4]]
        assert timeline.runs == (1, 1)
        r = residency(profile, (option, second.keep))
        added = [option.forward_bytes, second.keep.forward_bytes, second.keep.backward_bytes, 0]
        wanted = [start + more for (_, start), more in zip(starts[option.name], added, strict=True)]
        assert [*r.forward_bytes, *r.backward_bytes[::-1]] == wanted
    backward = [("backward", 25), ("backward", 5)]
    assert starts["keep"] == [("forward", 10), ("forward", 70), *backward]
    assert starts["discard"] == [("forward", 10), ("forward", 30), *backward]


def test_what_a_dropped_graph_saved_never_moves_and_its_stage_has_no_backward() -> None:
    kept = example()
    dropped = replace(kept, storages=(kept.storages[0], replace(kept.storages[1], graph_until=1), *kept.storages[2:]))
    swap = dropped.stages[0].option("swap")
    assert residency(dropped, (swap, dropped.stages[1].keep)).moves == ((0,), ())
    moving = [Decision.moving("swap", (1,), 0, 1, "swap"), Decision("keep")]
    plan = solve_profile(dropped, 1000, Limits(time_limit_s=1))
    moved = replace(plan, choices=tuple(moving), host_bytes=40)
    assert ("moves", "first") in {(broken.kind, broken.stage) for broken in validate(dropped, moved, 1000)}
    with pytest.raises(InvalidInputError, match="has one holder"):
        replace(kept, storages=(*kept.storages[:2], replace(kept.storages[2], graph_until=1), kept.storages[3]))
    # A prefetch point lies in no stage that may be discarded: here, in the first stage alone.
    menu = (Option("keep", (), (), 5, 0), Option("discard", (), (), 5, 0, recomputes=True))
    profile = replace(kept, stages=(kept.stages[0], replace(kept.stages[1], options=menu, linked=())))
    assert rules.enforceable_points(profile.stages) == ((0, 1), (0, 0))
    plan = solve_profile(profile, 1000, Limits(time_limit_s=1))
    for prefetch, kinds in ((0, set()), (1, {"points"})):
        moving = [Decision.moving("swap", (0, 1), 0, prefetch, "swap"), Decision("keep")]
        moved = replace(plan, choices=tuple(moving))
        assert {broken.kind for broken in validate(profile, moved, 1000)} - {"prediction"} == kinds


def test_options_of_dropped_graphs_are_checked() -> None:
    first = example().stages[0]
    less = Option("discard", (), (), 5, 0, recomputes=True)
    for menu in (first.options, (first.keep, replace(less, recompute_s=1.0)), (first.keep, replace(less, ops=(1,)))):
        with pytest.raises(InvalidInputError, match="'discard' must have"):
            replace(first, options=(*menu, less) if menu is first.options else menu)


def _steps(profile: Profile, options: tuple[Option, ...], segments: tuple[Segment, ...]) -> tuple:  # type: ignore[type-arg]
    return simulate(profile, [Decision(o.action, option=o.name) for o in options], segments).steps


# ---------------------------------------------------------------- one place

CHAINS = range(20)


@pytest.fixture(scope="module")
def cases() -> list[tuple[Profile, int]]:
    """Random chains, each with a budget in the middle by the rules as they are, and the chain below."""
    chains = [random_chain(seed, 5) for seed in (2, 18, 26)]  # in one of which each change shows for each planner
    return [*((profile, _middle(profile)) for profile in chains), (passed_on(), 105), (passed_on(), 115)]


def passed_on() -> Profile:
    """The first stage saves 30 bytes and its output of 60, which the second stage, of 50, reads and doesn't save.

    So 110 bytes are there in forward step 1, however soon both are copied, and 100 in step 2 if they are away.
    """
    storages = (Storage("a", 30, 0, 0), Storage("y", 60, 0, 1))
    keep = Option("keep", (0, 1), (), 90, 0)
    options = ((keep, replace(keep, name="swap", moves=(0, 1))), *((Option("keep", (), (), n, n),) for n in (50, 100)))
    return Profile(
        stages=tuple(Stage(f"s{i}", f"{i}", menu, 1.0, 1.0) for i, menu in enumerate(options)),
        storages=storages,
        base_forward_bytes=(0, 0, 0),
        base_backward_bytes=(0, 0, 0),
        update_peak_bytes=0,
        link=Link(1e3, 1e3),
    )


def test_what_the_program_holds_is_there_until_it_lets_go() -> None:
    profile = passed_on()
    options = (profile.stages[0].option("swap"), *(stage.keep for stage in profile.stages[1:]))
    r = residency(profile, options)
    assert (r.moves, r.lingering) == (((0, 1), (), ()), ((0, 1, 60),))
    assert (r.forward_bytes, r.backward_bytes) == ((90, 110, 100), (90, 50, 100))
    plan = solve_profile(profile, 110, Limits(time_limit_s=5))
    assert (plan.peak_bytes, plan.status) == (110, "optimal")
    assert validate(profile, plan, 110) == ()
    assert plan.step_s == pytest.approx(6.06)  # a, 0.03 s each way in front of the second stage
    y = next(t for t in plan.choices[0].transfers if 1 in t.moves)
    assert (y.release, y.prefetch) == (1, 1)


def the_program_lets_go_of_what_moves(patch: pytest.MonkeyPatch) -> None:
    """Rule 4 without its words on the program."""

    def forward_stop(program_stop: int, held_stop: int | None, mover: int | None) -> int:
        return (program_stop if held_stop is None else held_stop) if mover is None else mover + 1

    patch.setattr(rules, "forward_stop", forward_stop)
    patch.setattr(rules, "there_until", lambda storage, mover, n: mover)


def the_program_lets_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """Rule 1 without the program's variables."""

    def program_steps(storage: Storage, n: int) -> range:
        return range(storage.born + 1, n if storage.to_end else storage.born + 1)

    patch.setattr(rules, "program_steps", program_steps)


def segments_hold_nothing_linked(patch: pytest.MonkeyPatch) -> None:
    """Rule 2 for storages from before the segment, too."""
    patch.setattr(rules, "latest_first", lambda storage: 1 << 30)


def points_lie_in_glue(patch: pytest.MonkeyPatch) -> None:
    """Rule 4 without its last sentence but one: points anywhere."""
    patch.setattr(rules, "enforceable_points", lambda stages: (tuple(range(len(stages))),) * 2)


def graphs_are_dropped_at_once(patch: pytest.MonkeyPatch) -> None:
    """Rule 2 for graphs that forward drops, but with no step in which they are there."""
    patch.setattr(rules, "held_stop", lambda storage, n: n if storage.graph_until is None else storage.born + 1)


def copies_out_take_a_tenth_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Link, "out_s", lambda link, nbytes: 1.1 * (link.latency_s + nbytes / link.out_bytes_per_s))


def copies_in_take_a_tenth_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Link, "in_s", lambda link, nbytes: 1.1 * (link.latency_s + nbytes / link.in_bytes_per_s))


def copies_run_at_once(patch: pytest.MonkeyPatch) -> None:
    """NOTE [Lanes], rule 1, with no copy waiting for the one in front of it."""
    patch.setattr(lanes, "copied", lambda joined, free, seconds, later: later(joined + seconds, free))


RESIDENCY = [the_program_lets_go_of_what_moves, the_program_lets_go_at_once, segments_hold_nothing_linked]
LINKS = [copies_out_take_a_tenth_longer, copies_in_take_a_tenth_longer, copies_run_at_once]
CHANGES = [*RESIDENCY, points_lie_in_glue, graphs_are_dropped_at_once, *LINKS]

Cost = tuple[int, float]
"""Peak in bytes and makespan in seconds."""


def _middle(profile: Profile) -> int:
    low = smallest_peak(profile, Limits(time_limit_s=5)).peak_bytes
    r = residency(profile, [stage.keep for stage in profile.stages])
    return (low + tightest_peak(profile, r).bytes) // 2


def by_labels(profile: Profile, budget_bytes: int) -> list[tuple[Cost, Cost]]:
    """The evaluator's cost of the label program's plans, and the referee's."""
    space = PlanSpace(profile, menus(profile, ("keep", "swap", "recompute")), segments=True)
    evaluator = Evaluator(profile)
    found = []
    for plan in LabelDp(space, budget_bytes).run(300, float("inf"), count=4):
        made = evaluator.schedule(plan.codes, budget_bytes, plan.segments)
        if made is not None:
            found.append(((made.peak_bytes, made.step_s), _refereed(profile, made.choices, plan.segments)))
    return found


def by_the_planner(profile: Profile, budget_bytes: int) -> list[tuple[Cost, Cost]]:
    """The same of the planner's."""
    plan = solve_profile(profile, budget_bytes, Limits(time_limit_s=5))
    return [((plan.peak_bytes, plan.step_s), _refereed(profile, plan.choices, plan.segments))]


def by_the_baselines(profile: Profile, budget_bytes: int) -> list[tuple[Cost, Cost]]:
    """The same of all published planners' but those that check the rules."""
    found = []
    for name, planner in BASELINES.items():
        if name not in ("rotor", "pofo", "pooch", "sac_ilp"):
            try:
                plan = planner(profile, budget_bytes)
            except InfeasibleBudgetError:
                continue
            found.append(((plan.peak_bytes, plan.step_s), _refereed(profile, plan.choices, plan.segments)))
    return found


def _refereed(profile: Profile, choices, segments) -> Cost:  # type: ignore[no-untyped-def]
    """The referee's cost; negative where it refuses the decisions."""
    try:
        timeline = simulate(profile, choices, segments)
    except InvalidInputError:
        return -1, -1.0
    # 1e-9: the same seconds added in another order.
    return timeline.peak_bytes, pytest.approx(timeline.makespan_s, rel=1e-9)


PLANNERS = [by_labels, by_the_planner, by_the_baselines]


@pytest.mark.parametrize("change", CHANGES)
def test_a_rule_that_changes_is_followed_by_all_planners_and_the_referee_objects(
    change: Callable[[pytest.MonkeyPatch], None], cases: list[tuple[Profile, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    for planner in PLANNERS:
        costs = (cost for profile, budget in cases for cost in planner(profile, budget))
        assert any(ours != referee for ours, referee in costs), planner


@pytest.mark.parametrize("change", CHANGES)
def test_the_rules_in_numpy_are_those_in_python(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    rng = random.Random(0)
    for seed in CHAINS:
        profile = random_chain(seed, 7)
        segments = random_segments(rng, profile)
        options = random_options(rng, profile, segments)
        codes = [stage.options.index(option) for stage, option in zip(profile.stages, options, strict=True)]
        r = residency(profile, options, segments)
        needs = Evaluator(profile).needs(np.array([codes], np.int8), segments)
        assert needs.forward[0].tolist() == list(r.forward_bytes)
        assert needs.backward[0].tolist() == list(r.backward_bytes)
        assert needs.moved[0].tolist() == list(r.moved_bytes)
        least = tightest_peak(profile, r).bytes
        for budget in (least, least + rng.randint(1, 40)):
            evaluator = Evaluator(profile)
            assert evaluator.makespans(np.array([codes], np.int8), budget, segments)[0] == evaluator.step_s(
                codes, budget, segments
            )


@pytest.mark.parametrize("change", [*RESIDENCY[1:], *LINKS[:2]])  # the first one, bounds leave out
def test_bounds_follow_the_rules(change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(profile: Profile) -> list[object]:
        data = BoundData(PlanSpace(profile, menus(profile, ("keep", "swap", "recompute"))), 100, None)
        return [data.base_forward.tolist(), data.movable, data.drops, data.segment_moves, data.out, data.back]

    chains = [random_chain(seed, 6) for seed in CHAINS]
    before = [numbers(profile) for profile in chains]
    change(monkeypatch)
    assert [numbers(profile) for profile in chains] != before
