"""The three questions that the authors of PoocH's greedy left open, with figures.

    python experiments/pooch_questions.py --out experiments/results

How far from the optimum is it? Its step against the proven bound. Up to what size is the search good? Both planners'
time and distance over the number of stages. What do repeated patterns buy? The same chain planned once as it is and
once with every stage's kind made its own, so that nothing can be shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from certificate import time_limit_s
from instances import INSTANCES, instance

from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import smallest_peak, solve_profile

GREEDY = "pooch"
LONGEST = 100
"""Above so many stages the greedy's search isn't run: its time grows faster than with the square of their number."""
REPEATED = ("homogeneous-100", "resnet-152", "resnet-1001", "transformer-1000")


def timed(plan: Callable[[], Plan]) -> tuple[Plan | None, float]:
    """The plan, None where nothing fits, and the seconds it took."""
    begin = time.perf_counter()
    try:
        found = plan()
    except InfeasibleBudgetError:
        found = None
    return found, time.perf_counter() - begin


def against_bound(name: str, percents: list[int]) -> list[dict[str, Any]]:
    """The greedy and ours against the proven bound, at each budget."""
    profile = instance(name)
    limit_s = time_limit_s(len(profile.stages))
    rows = []
    for percent, budget in budgets(profile, percents, limit_s).items():
        ours, ours_s = timed(lambda: solve_profile(profile, budget, Limits(time_limit_s=limit_s, gap=0.0)))  # noqa: B023
        greedy, greedy_s = None, None
        if len(profile.stages) <= LONGEST:
            greedy, greedy_s = timed(lambda: BASELINES[GREEDY](profile, budget))  # noqa: B023
        assert ours is not None
        rows.append(
            {
                "instance": name,
                "stages": len(profile.stages),
                "budget_percent": percent,
                "overhead": ours.overhead,
                "gap": ours.gap,
                "greedy_overhead": None if greedy is None else greedy.overhead,
                "greedy_over_bound": None if greedy is None else greedy.step_s / ours.lower_bound_s - 1,
                "greedy_over_ours": None if greedy is None else greedy.step_s / ours.step_s - 1,
                "seconds": ours_s,
                "greedy_seconds": greedy_s,
            }
        )
    return rows


def without_repetition(profile: Profile) -> Profile:
    """The same chain, each stage of a kind of its own."""
    return replace(profile, stages=tuple(replace(s, kind=f"{s.kind} {i}") for i, s in enumerate(profile.stages)))


def repetition(name: str, percent: int) -> dict[str, Any]:
    """Planning with and without shared kinds."""
    profile = instance(name)
    limit_s = time_limit_s(len(profile.stages))
    (budget,) = budgets(profile, [percent], limit_s).values()
    shared, shared_s = timed(lambda: solve_profile(profile, budget, Limits(time_limit_s=limit_s, gap=0.0)))
    apart, apart_s = timed(
        lambda: solve_profile(without_repetition(profile), budget, Limits(time_limit_s=limit_s, gap=0.0))
    )
    assert shared is not None
    assert apart is not None
    return {
        "instance": name,
        "kinds": len({stage.kind for stage in profile.stages}),
        "stages": len(profile.stages),
        "budget_percent": percent,
        "seconds_shared": shared_s,
        "seconds_apart": apart_s,
        "gap_shared": shared.gap,
        "gap_apart": apart.gap,
    }


def budgets(profile: Profile, percents: list[int], limit_s: float) -> dict[int, int]:
    """Budgets by per cent of the way from the smallest peak to everything kept."""
    least, most = (
        smallest_peak(profile, Limits(time_limit_s=limit_s)).peak_bytes,
        everything_kept_bytes(profile),
    )
    return {percent: least + (most - least) * percent // 100 for percent in percents}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for pooch_questions.json")
    parser.add_argument("--only", help="comma-separated instances")
    parser.add_argument("--budgets", default="25,65", help="per cent from the smallest peak to everything kept")
    args = parser.parse_args()
    percents = [int(x) for x in args.budgets.split(",")]
    names = args.only.split(",") if args.only else list(INSTANCES)
    rows = []
    titles = ("ours", "gap", "greedy", "over bound", "s", "greedy s")
    print(f"{'instance':20} {'n':>5} {'budget':>6} {'{:>8} {:>8} {:>8} {:>10} {:>6} {:>8}'.format(*titles)}")
    for name in names:
        for r in against_bound(name, percents):
            rows.append(r)
            greedy = "-" if r["greedy_overhead"] is None else f"{r['greedy_overhead']:.2%}"
            took = "-" if r["greedy_seconds"] is None else f"{r['greedy_seconds']:.1f}"
            over = "-" if r["greedy_over_bound"] is None else f"{r['greedy_over_bound']:.2%}"
            print(
                f"{name:20} {r['stages']:5} {r['budget_percent']:4} % {r['overhead']:8.2%} {r['gap']:8.3%} {greedy:>8} "
                f"{over:>10} {r['seconds']:6.1f} {took:>8}",
                flush=True,
            )
    fits = [r["greedy_over_bound"] for r in rows if r["greedy_over_bound"] is not None]
    lost = [r["greedy_over_ours"] for r in rows if r["greedy_over_ours"] is not None]
    tried = sum(r["greedy_seconds"] is not None for r in rows)
    summary = (
        f"the greedy fits in {len(fits)} of {tried}; above the bound by {statistics.median(fits):.2%} (median), "
        f"{max(fits):.2%} (most); above ours by {statistics.median(lost):.2%}, {max(lost):.2%}; "
        f"10 % or more in {sum(x >= 0.1 for x in lost)}"
        if fits
        else "the greedy fits in none"
    )
    print(summary)
    repeated = [repetition(name, percents[0]) for name in REPEATED if name in names]
    for r in repeated:
        print(
            f"{r['instance']:20} {r['stages']} stages of {r['kinds']} kinds: {r['seconds_shared']:.1f} s, gap "
            f"{r['gap_shared']:.3%}; nothing shared {r['seconds_apart']:.1f} s, gap {r['gap_apart']:.3%}"
        )
    if args.out:
        document = {"command": " ".join(sys.argv), "rows": rows, "repetition": repeated, "summary": summary}
        (args.out / "pooch_questions.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
