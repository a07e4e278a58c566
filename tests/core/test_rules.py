"""The rules: the worked example, and what holds for graphs that forward drops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exactly import Limits, solve_profile

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.referee import simulate, validate

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


def test_what_a_dropped_graph_saved_never_moves_and_its_stage_has_no_backward() -> None:
    kept = example()
    dropped = replace(kept, storages=(kept.storages[0], replace(kept.storages[1], graph_until=1), *kept.storages[2:]))
    swap = dropped.stages[0].option("swap")
    assert residency(dropped, (swap, dropped.stages[1].keep)).moves == ((0,), ())
    moving = [Decision.moving("swap", (1,), 0, 1, "swap"), Decision("keep")]
    plan = solve_profile(dropped, 1000, Limits(time_limit_s=1))
    moved = replace(plan, choices=tuple(moving), host_bytes=40)
    assert ("moves", "first") in {(broken.kind, broken.stage) for broken in validate(dropped, moved, 1000)}
    with pytest.raises(InvalidInputError, match="may have one holder"):
        replace(kept, storages=(*kept.storages[:2], replace(kept.storages[2], graph_until=1), kept.storages[3]))


def test_options_of_dropped_graphs_are_checked() -> None:
    first = example().stages[0]
    less = Option("discard", (), (), 5, 0, recomputes=True)
    for menu in (first.options, (first.keep, replace(less, recompute_s=1.0)), (first.keep, replace(less, ops=(1,)))):
        with pytest.raises(InvalidInputError, match="'discard' must have"):
            replace(first, options=(*menu, less) if menu is first.options else menu)


def _steps(profile: Profile, options: tuple[Option, ...], segments: tuple[Segment, ...]) -> tuple:  # type: ignore[type-arg]
    return simulate(profile, [Decision(o.action, option=o.name) for o in options], segments).steps
