"""Baselines against answers worked out by hand, brute force, and the referee."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import brute_force
import pytest
from random_chains import random_chain, textbook_chain

from ckptplan.baselines import (
    BASELINES,
    _rotor_dp,
    auto_perf_maxing,
    capuchin,
)
from ckptplan.baselines._build import Selection, named, smallest_peak
from ckptplan.cli.tables import Row, planners_table
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.referee import validate

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from compare_greedy import comparison_table

pytestmark = pytest.mark.planning


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


def peak_of(profile: Profile, choice: Selection) -> int:
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
    assert [(t.release, t.prefetch) for c in plan.choices[:2] for t in c.transfers] == [(1, 0), (1, 1)]
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


def test_chen_sqrt_counts_only_stages_that_can_be_recomputed() -> None:
    profile = chain(5)
    for bare, names, segments in (
        (0, ["keep", "recompute", "recompute", "keep", "keep"], (Segment(1, 2),)),
        (1, ["recompute", "keep", "recompute", "keep", "keep"], ()),  # the first segment, s0 and s2, is split by s1
    ):
        stages = list(profile.stages)
        menu = tuple(option for option in stages[bare].options if not option.recomputes)
        stages[bare] = replace(stages[bare], options=menu, linked=())
        plan = BASELINES["chen_sqrt"](replace(profile, stages=tuple(stages)), 10**6)
        assert (names_of(plan), plan.segments) == (names, segments)


def test_pooch_keeps_what_fits_swaps_what_hides_and_recomputes_where_the_link_is_slow() -> None:
    assert names_of(BASELINES["pooch"](chain(), 120)) == ["keep"] * 3
    # 20 bytes of s0 take 2 s: out during s1's forward (4 s), back during s1's backward (4 s).
    plan = BASELINES["pooch"](chain(forward_s=(5.0, 4.0, 4.0), backward_s=(5.0, 4.0, 4.0)), 100)
    assert (names_of(plan), plan.step_s, plan.status) == (["swap", "keep", "keep"], 26.0, "optimal")
    # At 100 bytes s0's 20 must go: 2 * 20 / 0.01 s by the link, 1 s by recompute.
    plan = BASELINES["pooch"](chain(link=0.01), 100)
    assert (names_of(plan), plan.step_s, plan.peak_bytes) == (["recompute", "keep", "keep"], 10.0, 100)


def test_chen_greedy_scans_the_limit() -> None:
    # Each stage saves 30. Limit 30: three stages, each by itself, hold their inputs: 90 bytes, 3 s more. 60: 0..1
    # together, 100 bytes, 2 s more (see chen_sqrt). 90: 0..2 together sweep up to 120 bytes.
    assert BASELINES["chen_greedy"](chain(4), 150).step_s == 12.0
    plan = BASELINES["chen_greedy"](chain(4), 100)
    assert (plan.segments, plan.step_s) == ((Segment(0, 1),), 14.0)
    plan = BASELINES["chen_greedy"](chain(4), 99)
    assert (names_of(plan), plan.segments) == (["recompute"] * 3 + ["keep"], ())
    assert (plan.peak_bytes, plan.step_s) == (90, 15.0)
    with pytest.raises(InfeasibleBudgetError) as caught:
        BASELINES["chen_greedy"](chain(4), 89)
    assert caught.value.min_peak_bytes == 90


def test_meng_swaps_leading_stages() -> None:
    # s0 alone moves 20: out from 1 to 3, before s2's backward begins at 3; back from 5 to 7, while s1 runs backward.
    plan = BASELINES["meng_swap"](chain(), 100)
    assert (names_of(plan), plan.step_s, plan.host_bytes) == (["swap", "keep", "keep"], 9.0, 20)
    # Any less needs s1 as well.
    assert names_of(BASELINES["meng_swap"](chain(), 99)) == ["swap", "swap", "keep"]


def test_lms_evicts_the_smallest_block_that_is_enough() -> None:
    profile = Profile.from_chain([1.0] * 3, [2.0] * 3, [10] * 3, [50, 30, 30], input_bytes=10, out_bytes_per_s=10.0)
    # Everything kept takes 140, at s2's backward. 20 are missing: s0 would move 40, s1 30.
    assert names_of(BASELINES["lms"](profile, 120)) == ["keep", "swap", "keep"]
    # 35 are missing: only s0 is enough.
    assert names_of(BASELINES["lms"](profile, 105))[0] == "swap"
    # 60 are missing: neither is, so the oldest goes first, and then s1.
    assert names_of(BASELINES["lms"](profile, 80)) == ["swap", "swap", "keep"]


def test_vdnn_conv_swaps_costly_stages_and_dyn_the_best_policy() -> None:
    # Per byte saved s1 takes 3/30 and s2 2/30, at least the median; s0 1/30. s1 moves its 20; s0 keeps its output.
    profile = chain(forward_s=(1.0, 3.0, 2.0), backward_s=(2.0, 2.0, 2.0))
    # Out from 4 to 6; back only from s1's own backward on, 8 to 10, as s2's needs every byte.
    plan = BASELINES["vdnn_conv"](profile, 100)
    assert (names_of(plan), plan.step_s, plan.peak_bytes) == (["keep", "swap", "keep"], 14.0, 100)
    with pytest.raises(InfeasibleBudgetError) as caught:
        BASELINES["vdnn_conv"](profile, 99)
    assert caught.value.min_peak_bytes == 100
    # "none" needs 120. At 100 "all" needs to move s0's 20 alone, and hides it.
    assert BASELINES["vdnn_dyn"](profile, 120).host_bytes == 0
    plan = BASELINES["vdnn_dyn"](profile, 100)
    assert (names_of(plan), plan.step_s) == (["swap", "keep", "keep"], 12.0)


def test_superneurons_recomputes_cheap_stages() -> None:
    # Over 0.01 bytes a second nothing pays. s1 is cheap: its recompute frees 20 and takes 1 s.
    profile = chain(link=0.01, forward_s=(3.0, 1.0, 3.0), backward_s=(2.0, 2.0, 2.0))
    plan = BASELINES["superneurons"](profile, 100)
    assert (names_of(plan), plan.step_s) == (["keep", "recompute", "keep"], 14.0)


def test_capuchin_swaps_by_free_time_then_recomputes() -> None:
    # s0: away at 1, back at 7, 2 s each way. s1: away at 2, back at 5, 3 s each way. s2 moves nothing.
    assert capuchin.free_times(chain(), (20, 30, 0)) == [2.0, -3.0, 0.0]
    plan = BASELINES["capuchin"](chain(), 100)
    assert (names_of(plan), plan.step_s) == (["swap", "keep", "keep"], 9.0)
    # 10 more are missing: s1 swaps 30 bytes for 3 s, or recomputes 30 for 1 s.
    plan = BASELINES["capuchin"](chain(), 90)
    assert (names_of(plan), plan.step_s) == (["swap", "recompute", "keep"], 10.0)


def test_dtr_evicts_the_stalest() -> None:
    # At 3 s bytes are missing. h of s0 is 1 / (30 * 2), of s1 1 / (30 * 1).
    plan = BASELINES["dtr"](chain(), 100)
    assert (names_of(plan), plan.step_s) == (["recompute", "keep", "keep"], 10.0)
    # Where s0 takes 8 s and s1 0.5, h is 8 / (30 * 1.5) and 0.5 / (30 * 1).
    plan = BASELINES["dtr"](chain(forward_s=(8.0, 0.5, 1.0), backward_s=(2.0, 2.0, 2.0)), 100)
    assert (names_of(plan), plan.step_s) == (["keep", "recompute", "keep"], 16.0)
    # One by one 80 bytes are needed; the sweep of 0..1 takes 90, but 70 when it drops s0 again (see rotor).
    plan = BASELINES["dtr"](chain(), 70)
    assert (plan.segments, plan.step_s) == ((Segment(0, 1, (Segment(0, 0),)),), 12.0)


def test_sac_ilp_rounds_fractions_to_the_nearest_option() -> None:
    # 20 of 30 bytes are missing before s2: two thirds of s0, nearer to recompute than to keep.
    plan = BASELINES["sac_ilp"](chain(), 100)
    assert (names_of(plan), plan.step_s) == (["recompute", "keep", "keep"], 10.0)
    # With an option that discards just the inner 20 bytes in half the time, that is the nearest.
    profile = chain()
    first = profile.stages[0]
    partly = replace(first.option("recompute"), name="selective-1", saved=(1,), recompute_s=0.5, ops=(1,))
    menu = replace(profile, stages=(replace(first, options=(*first.options, partly)), *profile.stages[1:]))
    plan = BASELINES["sac_ilp"](menu, 100)
    assert (names_of(plan), plan.step_s) == (["selective-1", "keep", "keep"], 9.5)


def test_auto_perf_maxing_swaps_what_its_windows_hide() -> None:
    # At 30 bytes a second s0's 20 leave within s1's forward and come back within its backward: two thirds swapped.
    fast = chain(link=30.0)
    assert auto_perf_maxing.window_bytes(fast, 0) == 30.0
    plan = BASELINES["auto_perf_maxing"](fast, 100)
    assert (names_of(plan), plan.step_s) == (["swap", "keep", "keep"], 9.0)
    # At 0.01 nothing fits a window.
    plan = BASELINES["auto_perf_maxing"](chain(link=0.01), 100)
    assert (names_of(plan), plan.step_s) == (["recompute", "keep", "keep"], 10.0)


def test_rotor_nests_where_nothing_else_fits() -> None:
    # 80 bytes: s0 and s1 by themselves. 70: both together, so s2's backward has input 10, gradient 10, the output of
    # s1, 30 saved and a gradient; the sweep drops s0 again, or it would take 90: input, gradient, the output of s0, 30
    # saved, a gradient. s0 runs three times, s1 twice.
    plan = BASELINES["rotor"](chain(), 80)
    assert (names_of(plan), plan.segments, plan.step_s) == (["recompute", "recompute", "keep"], (), 11.0)
    plan = BASELINES["rotor"](chain(), 70)
    assert plan.segments == (Segment(0, 1, (Segment(0, 0),)),)
    assert (plan.step_s, plan.peak_bytes) == (12.0, 70)
    with pytest.raises(InfeasibleBudgetError) as caught:
        BASELINES["rotor"](chain(), 69)
    assert caught.value.min_peak_bytes == 70


def test_rotor_equals_brute_force() -> None:
    rng = random.Random(5)
    fitting = 0
    for _ in range(20):
        n = rng.randint(1, 5)
        profile = textbook_chain(rng, n)
        every = brute_force.combinations(profile, actions=("keep", "recompute"))
        known = [(peak_of(profile, Selection(c.options, c.segments)), c.compute_s) for c in every]
        least = min(nbytes for nbytes, _ in known)
        for budget in (least - 1, least, rng.randint(least, max(least, keep_all_peak(profile)))):
            fits = [seconds for nbytes, seconds in known if nbytes <= budget]
            if not fits:
                with pytest.raises(InfeasibleBudgetError) as caught:
                    BASELINES["rotor"](profile, budget)
                assert caught.value.min_peak_bytes == least
                continue
            fitting += 1
            # 1e-9: the same seconds are added in another order.
            assert BASELINES["rotor"](profile, budget).step_s == pytest.approx(min(fits), rel=1e-9)
            extra_s = _rotor_dp.Table(profile, budget).row(0, n - 1)[-1]
            assert profile.baseline_step_s + extra_s == pytest.approx(min(fits), rel=1e-9)
    assert fitting >= 30


def test_pofo_swaps_what_hides() -> None:
    plan = BASELINES["pofo"](chain(), 100)
    assert (names_of(plan), plan.step_s) == (["swap", "keep", "keep"], 9.0)


def some_budgets(rng: random.Random, profile: Profile) -> list[int]:
    most = keep_all_peak(profile)
    return [rng.randint(most // 2, most), rng.randint(most // 2, most), most]


@pytest.mark.parametrize("name", BASELINES)
def test_every_plan_passes_the_referee(name: str) -> None:
    rng = random.Random(0)
    found = 0
    too_small: list[tuple[int, int]] = []
    for seed in range(12):  # with three budgets each, for each of the planners
        profile = random_chain(seed, rng.randint(1, 9))
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
        if name in ("recompute_all", "swap_all", "chen_sqrt"):  # which have one plan: what they name is feasible
            with pytest.raises(InfeasibleBudgetError) as caught:
                BASELINES[name](profile, 0)
            smallest = caught.value.min_peak_bytes
            # Less where a swap that needs not move becomes a keep, which needs fewer bytes of its own.
            peak_bytes = BASELINES[name](profile, smallest).peak_bytes
            assert peak_bytes <= smallest if name == "swap_all" else peak_bytes == smallest
            too_small.append((smallest, smallest - 1))
            with pytest.raises(InfeasibleBudgetError):
                BASELINES[name](profile, smallest - 1)
    assert all(smallest > budget for smallest, budget in too_small)
    assert found >= 12


def test_tables_have_all_figures_and_a_dash_where_nothing_fits() -> None:
    steps = {"keep_all": (None, 1.0), "pooch": (1.25, 1.0)}
    rows = [Row(name, budget << 20, 1.0, s) for name in steps for budget, s in zip((1, 2), steps[name], strict=True)]
    table = comparison_table(rows)
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["keep_all", "pooch"], ["–", "[bold]25.0%[/bold]"], ["[bold]0.0%[/bold]", "[bold]0.0%[/bold]"]]
    assert [str(column.header) for column in table.columns] == ["planner", "1.00 MiB", "2.00 MiB"]
    found = Row("rotor", 3 << 20, 1.0, 1.5, peak_bytes=2 << 20, host_bytes=0, bound_s=1.25, planning_s=0.002)
    faster = replace(found, planner="ckptplan", step_s=1.25)
    lacking = Row("keep_all", 3 << 20, 1.0, None, needs_bytes=5 << 20, planning_s=1e-5)
    table = planners_table([faster, found, lacking])
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["[italic]within 3.00 MiB[/italic]", "ckptplan", "rotor", "keep_all"]
    best, other, none = ([column[i] for column in cells[1:]] for i in (1, 2, 3))
    assert best == [f"[bold]{x}[/bold]" for x in ("1.25 s", "25.0%", "2.00 MiB", "0 B", "0.00%", "2.0 ms")]
    assert other == ["1.50 s", "50.0%", "2.00 MiB", "0 B", "20.00%", "2.0 ms"]
    assert none == ["–", "–", "needs 5.00 MiB", "–", "–", "10 µs"]
