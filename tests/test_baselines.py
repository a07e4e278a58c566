"""Baselines against answers worked out by hand, brute force, and the referee."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from random_chains import random_chain, random_options, random_segments

from ckptplan.baselines import BASELINES
from ckptplan.baselines._build import Choice, build, joined, named, smallest_peak, times
from ckptplan.core.chain import Segment
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import residency
from ckptplan.referee import simulate, validate
from ckptplan.report.plots import plot_step_time
from ckptplan.report.tables import Row, comparison_table


def chain(
    n: int = 3, link: float = 10.0, forward_s: tuple[float, ...] = (), backward_s: tuple[float, ...] = ()
) -> Profile:
    """Return a chain whose stages save 30 bytes, 10 of them the output, and take 1 s forward and 2 s backward."""
    return Profile.from_chain(
        forward_s or (1.0,) * n,
        backward_s or (2.0,) * n,
        (10,) * n,
        (30,) * n,
        input_bytes=10,
        out_bytes_per_s=link,
        in_bytes_per_s=link,
    )


def without(profile: Profile, *names: str) -> Profile:
    """`profile` with the options `names` gone from every menu."""
    stages = tuple(
        replace(
            stage,
            options=tuple(option for option in stage.options if option.name not in names),
            linked=() if "recompute" in names else stage.linked,
        )
        for stage in profile.stages
    )
    return replace(profile, stages=stages)


def peak_of(profile: Profile, choice: Choice) -> int:
    return smallest_peak(profile, choice).bytes


def keep_all_peak(profile: Profile) -> int:
    return peak_of(profile, named(profile, ["keep"] * len(profile.stages)))


def names_of(plan: Plan) -> list[str]:
    return [choice.option for choice in plan.choices]


def test_keep_all_peaks_at_the_start_of_backward() -> None:
    # Last backward: input 10, gradient of the output 10, three saved sets of 30, gradient of its input 10.
    plan = BASELINES["keep_all"](chain(), 120)
    assert (plan.peak_bytes, plan.step_s, plan.status, plan.gap) == (120, 9.0, "optimal", 0.0)
    with pytest.raises(InfeasibleBudgetError) as caught:
        BASELINES["keep_all"](chain(), 119)
    assert (caught.value.min_peak_bytes, caught.value.stage, caught.value.phase) == (120, "s2", "backward")
    assert caught.value.budget_bytes == 119


def test_recompute_all_adds_one_forward() -> None:
    # Last backward: input 10, gradient 10, the outputs of s0 and s1, its own saved set of 30 and a gradient of 10.
    plan = BASELINES["recompute_all"](chain(), 80)
    assert (plan.peak_bytes, plan.step_s, plan.status) == (80, 12.0, "feasible")
    with pytest.raises(InfeasibleBudgetError) as caught:
        BASELINES["recompute_all"](chain(), 79)
    assert caught.value.min_peak_bytes == 80


def test_swap_all_waits_for_both_queues() -> None:
    # s0 moves 20 bytes (s1 holds its output), s1 30; s2's backward follows at once, so it moves nothing. At 70 bytes
    # both must be out before s2 runs: 1 -> 3 -> 6. Then forward 7, backward 9; 30 bytes back 12, backward 14; 20 bytes
    # back 16, backward 18.
    plan = BASELINES["swap_all"](chain(), 70)
    assert (plan.peak_bytes, plan.step_s, plan.host_bytes) == (70, 18.0, 50)
    assert [(c.release, c.prefetch) for c in plan.choices[:2]] == [(1, 0), (1, 1)]
    with pytest.raises(InfeasibleBudgetError):
        BASELINES["swap_all"](chain(), 69)
    assert BASELINES["swap_all"](chain(), 120).step_s == 9.0


@pytest.mark.parametrize(
    ("n", "segments"),
    [(1, []), (2, []), (3, []), (4, [(0, 1)]), (9, [(0, 2), (3, 5)]), (10, [(0, 1), (2, 4)])],
)
def test_chen_sqrt_keeps_the_last_of_sqrt_segments(n: int, segments: list[tuple[int, int]]) -> None:
    # 2 and 3 stages: two segments, the first of one stage, which is that stage's option. 10 stages: four segments,
    # cut at 2, 5 and 7.
    plan = BASELINES["chen_sqrt"](chain(n), 10**6)
    if n == 10:
        segments = [*segments, (5, 6)]
    assert [(s.first, s.last) for s in plan.segments] == segments
    recomputed = segments[-1][1] + 1 if segments else min(n - 1, 1)
    assert names_of(plan) == ["recompute"] * recomputed + ["keep"] * (n - recomputed)
    assert plan.step_s == 3.0 * n + recomputed


def test_chen_sqrt_holds_the_inputs_of_segments_alone() -> None:
    # Four stages: 0..1 together, 2 and 3 kept. Backward of s3: input 10, gradient 10, the output of s1, which s2 holds
    # (10), two saved sets of 30, a gradient of 10: 100. Backward of s1: input, gradient, both saved sets of the sweep
    # and a gradient: 90.
    plan = BASELINES["chen_sqrt"](chain(4), 100)
    assert (plan.peak_bytes, plan.step_s) == (100, 14.0)
    with pytest.raises(InfeasibleBudgetError):
        BASELINES["chen_sqrt"](chain(4), 99)


def test_chen_sqrt_counts_only_stages_that_can_be_recomputed() -> None:
    profile = chain(5)
    bare = without(profile, "recompute", "recompute+swap").stages
    plan = BASELINES["chen_sqrt"](replace(profile, stages=(bare[0], *profile.stages[1:])), 10**6)
    assert names_of(plan) == ["keep", "recompute", "recompute", "keep", "keep"]
    assert plan.segments == (Segment(1, 2),)
    middle = replace(profile, stages=(*profile.stages[:1], bare[1], *profile.stages[2:]))
    plan = BASELINES["chen_sqrt"](middle, 10**6)  # the first segment, s0 and s2, is split by s1
    assert names_of(plan) == ["recompute", "keep", "recompute", "keep", "keep"]
    assert plan.segments == ()


def test_pooch_keeps_everything_where_it_fits() -> None:
    assert names_of(BASELINES["pooch"](chain(), 120)) == ["keep"] * 3


def test_pooch_swaps_what_hides() -> None:
    # 20 bytes of s0 take 2 s: out during s1's forward (4 s), back during s1's backward (4 s).
    profile = chain(forward_s=(5.0, 4.0, 4.0), backward_s=(5.0, 4.0, 4.0))
    plan = BASELINES["pooch"](profile, 100)
    assert names_of(plan) == ["swap", "keep", "keep"]
    assert (plan.step_s, plan.status) == (26.0, "optimal")


def test_pooch_recomputes_where_the_link_is_slow() -> None:
    # At 100 bytes s0's 20 must go: 2 * 20 / 0.01 s by the link, 1 s by recompute.
    plan = BASELINES["pooch"](chain(link=0.01), 100)
    assert names_of(plan) == ["recompute", "keep", "keep"]
    assert (plan.step_s, plan.peak_bytes) == (10.0, 100)


def test_pooch_chains_recompute_where_neighbours_need_it() -> None:
    # Without swap only recompute gets from 120 to 80 bytes. s0 and s1 together hold nothing until s2's backward:
    # input 10, gradient 10, the output of s1 (10), 30 saved, gradient 10 is 70. The sweep then has input 10, gradient
    # 10, 60 saved, and for s1 a gradient of 10: 90. One by one it is 80, so that is what fits.
    plan = BASELINES["pooch"](without(chain(), "swap", "recompute+swap"), 80)
    assert names_of(plan)[:2] == ["recompute", "recompute"]
    assert plan.segments == ()
    assert plan.peak_bytes <= 80


def some_budgets(rng: random.Random, profile: Profile) -> list[int]:
    most = keep_all_peak(profile)
    return [rng.randint(most // 2, most), rng.randint(most // 2, most), most]


@pytest.mark.parametrize("name", BASELINES)
def test_every_plan_passes_the_referee(name: str) -> None:
    rng = random.Random(0)
    found = 0
    too_small: list[tuple[int, int]] = []
    for seed in range(60):
        profile = random_chain(seed, rng.randint(1, 10))
        for budget in some_budgets(rng, profile):
            try:
                plan = BASELINES[name](profile, budget)
            except InfeasibleBudgetError as error:
                too_small.append((error.min_peak_bytes, budget))
                continue
            found += 1
            assert validate(profile, plan, budget) == ()
            assert plan.planner == name
            assert plan.budget_bytes == budget
    assert all(smallest > budget for smallest, budget in too_small)
    assert found >= 60


@pytest.mark.parametrize("name", ["recompute_all", "swap_all", "chen_sqrt"])
def test_smallest_peak_named_is_feasible_and_one_byte_less_is_not(name: str) -> None:
    rng = random.Random(1)
    for seed in range(30):
        profile = random_chain(seed, rng.randint(1, 10))
        with pytest.raises(InfeasibleBudgetError) as caught:
            BASELINES[name](profile, 0)
        smallest = caught.value.min_peak_bytes
        # Less where a swap that needs not move becomes a keep, which needs fewer bytes of its own.
        found = BASELINES[name](profile, smallest).peak_bytes
        assert found <= smallest if name == "swap_all" else found == smallest
        with pytest.raises(InfeasibleBudgetError):
            BASELINES[name](profile, smallest - 1)


def test_times_and_peak_equal_the_referee_and_waits_add_up() -> None:
    rng = random.Random(2)
    for seed in range(150):
        profile = random_chain(seed, rng.randint(1, 12))
        segments = random_segments(rng, profile)
        choice = Choice(random_options(rng, profile, segments), segments)
        plan = build(profile, choice, peak_of(profile, choice) + rng.randint(0, 60), "test")
        timeline = simulate(profile, plan)
        settled = [stage.option(name) for stage, name in zip(profile.stages, names_of(plan), strict=True)]
        found = times(profile, plan.choices, residency(profile, settled, segments))
        # 1e-9: the same seconds are added in another order.
        assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-9)
        assert sum(found.out_wait_s) + sum(found.in_wait_s) == pytest.approx(timeline.stall_s, rel=1e-9, abs=1e-9)
        assert plan.peak_bytes == timeline.peak_bytes
        assert plan.host_bytes == timeline.host_bytes


def test_pooch_lies_between_brute_force_and_swap_all() -> None:
    rng = random.Random(3)
    equal = compared = 0
    for seed in range(100):
        profile = random_chain(seed, rng.randint(1, 5))
        n = len(profile.stages)
        everything = keep_all_peak(profile)
        budget = rng.randint(everything // 2, everything)
        menu = ("keep", "swap", "recompute", "recompute+swap")
        steps = []
        for names in product(*([name for name in menu if stage.find(name)] for stage in profile.stages)):
            single = named(profile, names)
            for segments in ((), joined(profile, single.options)):
                with suppress(InfeasibleBudgetError):
                    steps.append(build(profile, Choice(single.options, segments), budget, "brute").step_s)
        try:
            pooch = BASELINES["pooch"](profile, budget).step_s
        except InfeasibleBudgetError:
            continue
        compared += 1
        # 1e-9: the same seconds are added in another order.
        assert pooch >= min(steps) * (1 - 1e-9)
        equal += pooch <= min(steps) * (1 + 1e-9)
        with suppress(InfeasibleBudgetError):
            swapped = build(profile, named(profile, ["swap"] * n), budget, "swap").step_s
            assert pooch <= swapped * (1 + 1e-9)
    assert compared >= 40
    assert equal >= compared // 2


def rows() -> list[Row]:
    steps = {"keep_all": (None, 1.0), "pooch": (1.25, 1.0)}
    return [
        Row(name, budget << 20, 1.0, step)
        for name, found in steps.items()
        for budget, step in zip((1, 2), found, strict=True)
    ]


def test_comparison_table_has_a_line_per_planner_and_a_dash_where_nothing_fits() -> None:
    table = comparison_table(rows())
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["keep_all", "pooch"], ["–", "[bold]25.0%[/bold]"], ["[bold]0.0%[/bold]", "[bold]0.0%[/bold]"]]
    assert [str(column.header) for column in table.columns] == ["planner", "1.00 MiB", "2.00 MiB"]


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    plot_step_time(rows(), path, title="two planners")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CkptPlanError, match=r"pip install 'ckptplan\[report\]'"):
        plot_step_time(rows(), tmp_path / "plot.png")
