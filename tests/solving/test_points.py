"""What moves, and in which order it comes back: the fastest of all for small chains, never worse for others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from exactly import ROUNDING, Limits, solve_profile

from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Transfer
from ckptplan.core.profile import Profile
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.referee import simulate, validate
from ckptplan.solving.cost import Evaluator
from ckptplan.solving.local_search import LocalSearch, PartSearch
from ckptplan.solving.peak import plan_space_of
from ckptplan.solving.room import Room

pytestmark = pytest.mark.planning

PROFILES = Path(__file__).parent.parent / "profiles"


@pytest.mark.parametrize(
    ("name", "budget", "step_s"),
    [("hidden_1307", 70, 12.75), ("hidden_5575", 111, 24.55833333333333), ("hidden_6083", 160, 2.175e-8)],
)
def test_parts_and_orders_are_found(name: str, budget: int, step_s: float) -> None:
    """The fastest plan leaves an earlier stage's bytes where they are, or brings them back first."""
    profile = Profile.load(PROFILES / f"{name}.json")
    plan = solve_profile(profile, budget)
    assert plan.step_s == pytest.approx(step_s, rel=1e-9)
    assert plan.status == "optimal"
    assert validate(profile, plan, budget) == ()


def of_parts(sizes: list[int], needs: int, link: Link) -> Profile:
    """A stage that may move any part of `sizes`, and one that needs some bytes beside what stays."""
    every = tuple(range(len(sizes)))
    storages = tuple(Storage(f"a{i}", nbytes, 0, 0) for i, nbytes in enumerate(sizes))
    options = Option("keep", every, (), 0, 0), Option("swap", every, (), 0, 0, moves=every)
    stages = (
        Stage(name="s0", kind="0", options=options, forward_s=1.0, backward_s=1.0),
        Stage(name="s1", kind="1", options=(Option("keep", (), (), needs, needs),), forward_s=1.0, backward_s=1.0),
    )
    return Profile(
        stages=stages, storages=storages, base_forward_bytes=(0, 0), base_backward_bytes=(0, 0), update_peak_bytes=0,
        link=link,
    )  # fmt: skip


def test_a_part_of_many_small_storages() -> None:
    """Their parts are too many to be tried, and small enough to be one to a bound: it knows that any may move."""
    sizes = [30_000 + (1 << i) for i in range(13)]
    budget = 10_000_000
    profile = of_parts(sizes, budget - sum(sizes) + sizes[0], Link(1e5, 1e5))
    plan = solve_profile(profile, budget)
    assert validate(profile, plan, budget) == ()
    moved = Decision.moving("swap", (0,), 0, 0, "swap"), Decision("keep", option="keep")
    timeline = simulate(profile, moved)
    assert timeline.peak_bytes == budget
    assert plan.lower_bound_s <= timeline.makespan_s * ROUNDING
    assert plan.step_s <= 1.05 * timeline.makespan_s


def test_a_part_that_the_host_has_room_for_is_found_without_time() -> None:
    profile = of_parts([10, 12], 20, Link(1.0, 1.0))
    for time_limit_s in (10.0, 1e-6):
        plan = solve_profile(profile, 32, Limits(host_bytes=13, time_limit_s=time_limit_s))
        assert validate(profile, plan, 32, host_bytes=13) == ()
        assert (plan.step_s, plan.host_bytes) == (24.0, 10)


def test_what_is_large_stays_where_the_rest_makes_room() -> None:
    """Of 1,000 and 2 x 10 bytes, 15 must go: the two small ones, though one by one neither is enough."""
    profile = of_parts([10, 1_000, 10], 15, Link(10.0, 10.0))
    moves = Evaluator(profile).search((1, 0), 1_020).fewest()
    assert moves is not None
    assert [sending.moves for sending in moves.sendings[0]] == [(0, 2)]


def test_a_plan_is_changed_for_what_its_parts_take() -> None:
    """To move the small storage is best; the lazy schedule moves the large one too, which takes longer than a rerun."""
    storages = Storage("large", 1_000, 0, 0), Storage("small", 20, 0, 0)
    options = (
        Option("keep", (0, 1), (), 0, 0),
        Option("selective-1", (0,), (), 0, 0, recompute_s=20.0, recomputes=True, ops=(0,)),
        Option("swap", (0, 1), (), 0, 0, moves=(0, 1)),
    )
    after = Stage(name="s1", kind="1", options=(Option("keep", (), (), 20, 20),), forward_s=1.0, backward_s=1.0)
    first = Stage(name="s0", kind="0", options=options, forward_s=1.0, backward_s=1.0)
    profile = Profile(
        stages=(first, after), storages=storages, base_forward_bytes=(0, 0), base_backward_bytes=(0, 0),
        update_peak_bytes=0, link=Link(10.0, 10.0),
    )  # fmt: skip
    evaluator, space = Evaluator(profile), plan_space_of(profile, ("keep", "swap", "recompute"), segments=True)
    assert LocalSearch(evaluator, space, 1_020).improve((1, 0), (), math.inf)[0] == (1, 0)
    codes, _, step_s = PartSearch(evaluator, space, 1_020).improve((1, 0), (), math.inf)
    assert (codes, step_s) == ((2, 0), 8.0)
    limited = Evaluator(profile, Room(500))  # for a part of what the option may move
    assert limited.schedule((2, 0), 1_020) is None
    found = limited.with_fewest((2, 0), 1_020, (), math.inf)
    assert found is not None
    assert (found.step_s, found.host_bytes) == (8.0, 20)


def test_a_part_that_must_go_first_goes_by_itself() -> None:
    """40 bytes must be gone when s1 runs, 60 more when s2 does, at 20 bytes/s.

    In one transfer all are gone 6 s after the start, which s1 waits for: 8 s of forward. In two, s1 runs from 3 to 4 s
    beside the second one, which s2 waits for until 6 s: 7 s. Backward is its mirror image.
    """
    storages = Storage("a", 40, 0, 0), Storage("b", 60, 0, 0)
    keep, swap = Option("keep", (0, 1), (), 0, 0), Option("swap", (0, 1), (), 0, 0, moves=(0, 1))
    stages = (
        Stage(name="s0", kind="0", options=(keep, swap), forward_s=1.0, backward_s=1.0),
        Stage(name="s1", kind="1", options=(Option("keep", (), (), 40, 40),), forward_s=1.0, backward_s=1.0),
        Stage(name="s2", kind="2", options=(Option("keep", (), (), 100, 100),), forward_s=1.0, backward_s=1.0),
    )
    profile = Profile(
        stages=stages, storages=storages, base_forward_bytes=(0, 0, 0), base_backward_bytes=(0, 0, 0),
        update_peak_bytes=0, link=Link(20.0, 20.0),
    )  # fmt: skip
    together = Decision.moving("swap", (0, 1), 0, 0), *[Decision("keep")] * 2
    assert simulate(profile, together).makespan_s == 16.0
    plan = solve_profile(profile, 100)
    assert (plan.step_s, plan.peak_bytes, plan.status) == (14.0, 100, "optimal")
    assert plan.choices[0].transfers == (Transfer((0,), 0, 0), Transfer((1,), 1, 1))
    assert validate(profile, plan, 100) == ()
    timeline = simulate(profile, plan)
    lanes = [(e.lane, e.start_s, e.end_s, e.nbytes) for e in timeline.events if e.lane != "compute"]
    assert lanes == [("out", 1, 3, 40), ("out", 3, 6, 60), ("in", 8, 11, 60), ("in", 11, 13, 40)]
    assert [(e.stage, e.start_s, e.end_s) for e in timeline.events if e.what == "wait"] == [
        ("s0", 1, 3), ("s1", 4, 6), ("s0", 9, 13)
    ]  # fmt: skip
