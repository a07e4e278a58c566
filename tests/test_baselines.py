"""Baselines against answers worked out by hand, brute force, and the referee."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ckptplan.baselines import BASELINES
from ckptplan.baselines._build import build, times
from ckptplan.core.chain import Action
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


def random_profile(rng: random.Random) -> Profile:
    """Return a chain of 1-10 stages, some of which lack swap or recompute."""
    n = rng.randint(1, 10)
    output = [rng.randint(1, 30) for _ in range(n)]
    profile = Profile.from_chain(
        [rng.uniform(0.1, 3) for _ in range(n)],
        [rng.uniform(0.1, 6) for _ in range(n)],
        output,
        [o + rng.choice((0, rng.randint(0, 60))) for o in output],
        input_bytes=rng.randint(0, 20),
        forward_temp_bytes=[rng.randint(0, 20) for _ in range(n)],
        backward_temp_bytes=[rng.randint(0, 20) for _ in range(n)],
        out_bytes_per_s=rng.uniform(2, 60),
        in_bytes_per_s=rng.uniform(2, 60),
    )
    stages = [
        replace(
            stage,
            swap=stage.swap if rng.random() < 0.8 else None,
            recompute=stage.recompute if rng.random() < 0.8 else None,
        )
        for stage in profile.stages
    ]
    return replace(profile, stages=tuple(stages))


def peak_of(profile: Profile, actions: list[Action]) -> int:
    r = residency(profile, actions)
    return max(*r.forward_bytes, *r.backward_bytes, profile.update_peak_bytes)


def actions_of(plan: Plan) -> list[Action]:
    return [choice.action for choice in plan.choices]


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


@pytest.mark.parametrize(("n", "recomputed"), [(1, 0), (2, 1), (3, 1), (4, 2), (9, 6), (10, 7), (100, 90)])
def test_chen_sqrt_keeps_the_last_of_sqrt_segments(n: int, recomputed: int) -> None:
    plan = BASELINES["chen_sqrt"](chain(n), 10**6)
    assert actions_of(plan) == ["recompute"] * recomputed + ["keep"] * (n - recomputed)
    assert plan.step_s == 3.0 * n + recomputed


def test_chen_sqrt_counts_only_stages_that_can_be_recomputed() -> None:
    profile = chain(5)
    stages = tuple(replace(stage, recompute=None) if i == 0 else stage for i, stage in enumerate(profile.stages))
    plan = BASELINES["chen_sqrt"](replace(profile, stages=stages), 10**6)
    assert actions_of(plan) == ["keep", "recompute", "recompute", "keep", "keep"]


def test_pooch_keeps_everything_where_it_fits() -> None:
    assert actions_of(BASELINES["pooch"](chain(), 120)) == ["keep"] * 3


def test_pooch_swaps_what_hides() -> None:
    # 20 bytes of s0 take 2 s: out during s1's forward (4 s), back during s1's backward (4 s).
    profile = chain(forward_s=(5.0, 4.0, 4.0), backward_s=(5.0, 4.0, 4.0))
    plan = BASELINES["pooch"](profile, 100)
    assert actions_of(plan) == ["swap", "keep", "keep"]
    assert (plan.step_s, plan.status) == (26.0, "optimal")


def test_pooch_recomputes_where_the_link_is_slow() -> None:
    # At 100 bytes s0's 20 must go: 2 * 20 / 0.01 s by the link, 1 s by recompute.
    plan = BASELINES["pooch"](chain(link=0.01), 100)
    assert actions_of(plan) == ["recompute", "keep", "keep"]
    assert (plan.step_s, plan.peak_bytes) == (10.0, 100)


def test_pooch_recomputes_where_swap_is_not_enough() -> None:
    profile = chain()
    stages = tuple(replace(stage, swap=None) for stage in profile.stages)
    # Without swap only recompute gets from 120 to 80 bytes; s2's own saved set is back when the peak is reached.
    plan = BASELINES["pooch"](replace(profile, stages=stages), 80)
    assert actions_of(plan)[:2] == ["recompute", "recompute"]
    assert plan.peak_bytes <= 80


def test_every_plan_passes_the_referee() -> None:
    rng = random.Random(0)
    found = dict.fromkeys(BASELINES, 0)
    too_small: list[tuple[int, int]] = []
    for _ in range(250):
        profile = random_profile(rng)
        n = len(profile.stages)
        everything = peak_of(profile, ["keep"] * n)
        budget = rng.randint(everything // 2, everything)
        for name, planner in BASELINES.items():
            try:
                plan = planner(profile, budget)
            except InfeasibleBudgetError as error:
                too_small.append((error.min_peak_bytes, budget))
                continue
            found[name] += 1
            assert validate(profile, plan, budget) == ()
            assert plan.planner == name
    assert all(smallest > budget for smallest, budget in too_small)
    assert found["pooch"] >= 100
    assert min(found[name] for name in BASELINES if name != "keep_all") >= 20


@pytest.mark.parametrize("name", ["recompute_all", "swap_all", "chen_sqrt"])
def test_smallest_peak_named_is_feasible_and_one_byte_less_is_not(name: str) -> None:
    rng = random.Random(1)
    for _ in range(30):
        profile = random_profile(rng)
        with pytest.raises(InfeasibleBudgetError) as caught:
            BASELINES[name](profile, 0)
        smallest = caught.value.min_peak_bytes
        assert BASELINES[name](profile, smallest).peak_bytes == smallest
        with pytest.raises(InfeasibleBudgetError):
            BASELINES[name](profile, smallest - 1)


def test_times_equal_the_referee_and_waits_add_up() -> None:
    rng = random.Random(2)
    for _ in range(100):
        profile = random_profile(rng)
        wanted: list[Action] = [rng.choice(stage.actions) for stage in profile.stages]
        plan = build(profile, wanted, peak_of(profile, wanted) + rng.randint(0, 60), "test")
        timeline = simulate(profile, plan)
        found = times(profile, plan.choices, residency(profile, actions_of(plan)).moved_bytes)
        # 1e-9: the same seconds are added in another order.
        assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-9)
        assert sum(found.out_wait_s) + sum(found.in_wait_s) == pytest.approx(timeline.stall_s, rel=1e-9, abs=1e-9)
        assert plan.peak_bytes == timeline.peak_bytes


def test_pooch_lies_between_brute_force_and_swap_all() -> None:
    rng = random.Random(3)
    equal = compared = 0
    for _ in range(100):
        profile = random_profile(rng)
        if len(profile.stages) > 5:
            continue
        everything = peak_of(profile, ["keep"] * len(profile.stages))
        budget = rng.randint(everything // 2, everything)
        steps = {}
        for actions in product(*(stage.actions for stage in profile.stages)):
            try:
                steps[actions] = build(profile, actions, budget, "brute").step_s
            except InfeasibleBudgetError:
                continue
        try:
            pooch = BASELINES["pooch"](profile, budget).step_s
        except InfeasibleBudgetError:
            continue
        compared += 1
        # 1e-9: the same seconds are added in another order.
        assert pooch >= min(steps.values()) * (1 - 1e-9)
        equal += pooch <= min(steps.values()) * (1 + 1e-9)
        swapped = tuple("keep" if stage.swap is None else "swap" for stage in profile.stages)
        assert pooch <= steps.get(swapped, pooch) * (1 + 1e-9)
    assert compared >= 8
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
