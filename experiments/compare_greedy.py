"""How much faster is the planner than the greedy and the other published rules, under the same budgets?

    python experiments/compare_greedy.py --out experiments/results
    python experiments/compare_greedy.py --out experiments/results --models gpt2,bert --budgets 0,50,100 --measure
    python experiments/compare_greedy.py --out experiments/results --synthetic
    python experiments/compare_greedy.py --out experiments/results --models all --link-ratio 4

With --link-ratio R the profiles are measured here but planned for a link on which moving all that is kept takes R times
the forward, as between a GPU and its host; such plans aren't measured.

Budgets are percentages of the way from the smallest feasible peak to the peak with everything kept. Every plan is
replayed and validated by the referee; with --measure each is also applied to the model and timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ckptplan.baselines import BASELINES
from ckptplan.cli.tables import Row, right
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.link import Link
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.units import format_bytes
from ckptplan.referee import simulate, validate
from ckptplan.solving.planner import smallest_peak, solve_profile

SCHEMA = "ckptplan.compare_greedy/1"
ALL_MODELS = ["gpt2", "bert", "vit", "resnet50", "llama", "t5", "swin", "convnext"]
OURS, GREEDY = "ckptplan", "pooch"
MIB = 1 << 20

Measure = Callable[[Plan], dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """One planner under one budget; None where its rule finds nothing that fits, or nothing was measured."""

    planner: str
    percent: float
    budget_bytes: int
    baseline_step_s: float
    planning_s: float
    step_s: float | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    overhead: float | None = None
    status: str = "infeasible"
    lower_bound_s: float | None = None
    gap: float | None = None
    min_peak_bytes: int | None = None
    violations: tuple[str, ...] = ()
    measured: dict[str, Any] | None = None


def synthetic() -> Iterator[tuple[str, Profile, None]]:
    """Yield chains whose copies take longer than their computation, so that no single rule is right everywhere."""
    rng = random.Random(0)

    def chain(forward_s: list[float], output_mib: list[float], saved_mib: list[float], rate: float) -> Profile:
        output = [int(x * MIB) for x in output_mib]
        saved = [int(x * MIB) for x in saved_mib]
        return Profile.from_chain(
            forward_s,
            [2 * x for x in forward_s],
            output,
            saved,
            input_bytes=output[0],
            out_bytes_per_s=rate,
            in_bytes_per_s=rate,
        )

    n = 24
    yield "homogeneous", chain([0.01] * n, [4] * n, [40] * n, 2e9), None
    sides = [2.0 ** -(i // 4) for i in range(16)]  # maps shrink fourfold in area while channels double
    yield "conv", chain([0.02] * 16, [16 * s for s in sides], [48 * s for s in sides], 1e9), None
    n = 30
    output = [rng.uniform(1, 8) for _ in range(n)]
    saved = [o + rng.choice((0.0, rng.uniform(0, 60))) for o in output]
    forward_s = [rng.uniform(0.002, 0.02) for _ in range(n)]
    yield "random", chain(forward_s, output, saved, 2e9), None
    yield "random_slow_link", chain(forward_s, output, saved, 5e8), None


def models(names: list[str], measure: bool) -> Iterator[tuple[str, Profile, Measure | None]]:
    """Yield the profile of each model and how to measure a plan on it."""
    from models import MODELS

    import ckptplan

    for name in names:
        model, inputs = MODELS[name]()
        known: dict[tuple[Decision, ...], dict[str, Any]] = {}

        def measured(
            plan: Plan, model: Any = model, inputs: Any = inputs, known: dict[Any, dict[str, Any]] = known
        ) -> dict[str, Any]:
            if plan.choices not in known:  # the same decisions are the same step, whatever the budget
                found = ckptplan.verify(model, plan, inputs=inputs)
                fields = ("measured_peak_bytes", "measured_step_s", "plain_step_s", "gradients_equal")
                known[plan.choices] = {field: getattr(found, field) for field in fields}
            peak_bytes = known[plan.choices]["measured_peak_bytes"]
            return {**known[plan.choices], "within_budget": peak_bytes <= plan.budget_bytes}

        yield name, ckptplan.profile(model, inputs), measured if measure else None


def with_link(profile: Profile, ratio: float) -> Profile:
    """`profile` with a link on which moving all that its stages keep takes `ratio` times the forward, either way."""
    kept = {s for stage in profile.stages for s in stage.keep.saved}
    nbytes = sum(profile.storages[s].nbytes for s in kept if not profile.storages[s].to_end)
    rate = nbytes / (ratio * sum(stage.forward_s for stage in profile.stages))
    return replace(profile, link=Link(rate, rate, profile.link.latency_s))


def run(planner: str, profile: Profile, percent: float, budget: int, limit_s: float, measure: Measure | None) -> Result:
    """Plan, replay, validate and perhaps measure."""
    known = (planner, percent, budget, profile.baseline_step_s)
    started = time.perf_counter()
    try:
        if planner == OURS:
            plan = solve_profile(profile, budget, Limits(time_limit_s=limit_s, gap=0.0))
        else:
            plan = BASELINES[planner](profile, budget)
    except InfeasibleBudgetError as error:
        return Result(*known, time.perf_counter() - started, min_peak_bytes=error.min_peak_bytes)
    took_s = time.perf_counter() - started
    timeline = simulate(profile, plan)
    return Result(
        *known,
        took_s,
        step_s=timeline.makespan_s,
        peak_bytes=timeline.peak_bytes,
        host_bytes=timeline.host_bytes,
        overhead=timeline.makespan_s / profile.baseline_step_s - 1,
        status=plan.status,
        lower_bound_s=plan.lower_bound_s,
        gap=plan.gap,
        violations=tuple(f"{v.kind}: {v.stage}: {v.detail}" for v in validate(profile, plan, budget)),
        measured=measure(plan) if measure else None,
    )


def compare(
    profile: Profile, planners: list[str], percents: list[float], limit_s: float, measure: Measure | None
) -> list[Result]:
    """Run every planner under every budget."""
    least = smallest_peak(profile).peak_bytes
    most = BASELINES["keep_all"](profile, 1 << 59).peak_bytes
    budgets = {percent: least + int((most - least) * percent / 100) for percent in percents}
    return [
        run(planner, profile, percent, budget, limit_s, measure)
        for percent, budget in budgets.items()
        for planner in (*planners, OURS)
    ]


def complaints(name: str, results: list[Result]) -> list[str]:
    """Collect what must not happen: unsound plans, a rule that beats the planner, a measured peak above the budget."""
    found = [f"{name}, {r.planner} at {r.percent:g} %: unsound plan: {text}" for r in results for text in r.violations]
    ours = {r.percent: r for r in results if r.planner == OURS}
    for r in results:
        mine = ours[r.percent]
        # 1e-9: the same seconds are added in another order.
        if r.step_s is not None and (mine.step_s is None or r.step_s < mine.step_s * (1 - 1e-9)):
            found.append(f"{name} at {r.percent:g} %: {r.planner} ({r.step_s} s) beats {OURS} ({mine.step_s} s)")
        if r.measured and not r.measured["within_budget"]:
            peak_bytes = r.measured["measured_peak_bytes"]
            found.append(f"{name}, {r.planner} at {r.percent:g} %: measured {peak_bytes} of {r.budget_bytes} bytes")
        if r.measured and r.measured["gradients_equal"] is False:
            found.append(f"{name}, {r.planner} at {r.percent:g} %: gradients differ from the plain model's")
    return found


def against(rival: str | None, everything: dict[str, list[Result]], *, measured: bool = False) -> str:
    """One line on how much less time a step takes than under `rival`'s plan; None: the best rule of each case."""

    def step_s(result: Result) -> float | None:
        if measured:
            return result.measured["measured_step_s"] if result.measured else None
        return result.step_s

    faster, costly, alone = [], [], 0
    for results in everything.values():
        for mine in (r for r in results if r.planner == OURS):
            others = [
                r for r in results if r.percent == mine.percent and r.planner != OURS and rival in (None, r.planner)
            ]
            found = [s for s in map(step_s, others) if s is not None]
            own = step_s(mine)
            if own is None:
                continue
            alone += not found
            if found:
                faster.append(1 - own / min(found))
                free_s = mine.measured["plain_step_s"] if measured and mine.measured else mine.baseline_step_s
                if min(found) > (free_s or mine.baseline_step_s) * (1 + 1e-9):
                    costly.append(faster[-1])
    what = f"{'measured' if measured else 'predicted'}: {OURS} against {rival or 'the best rule of each case'}"
    if not faster:
        return f"{what}: no case in which both fit"
    return (
        f"{what}: step shorter by {statistics.median(faster):.2%} (median), {max(faster):.2%} (largest), "
        f"{min(faster):.2%} (smallest) in {len(faster)} cases; {statistics.median(costly or [0.0]):.2%} (median) in "
        f"the {len(costly)} where the other has overhead; only ours fits in {alone} more"
    )


def losing(everything: dict[str, list[Result]], planners: list[str]) -> list[str]:
    """Per rule, in how many cases it fits and its step is longer than ours by a tenth or more."""
    lines = []
    for rival in (name for name in planners if name != "keep_all"):
        ratios = []
        for results in everything.values():
            ours = {r.percent: r.step_s for r in results if r.planner == OURS}
            for r in results:
                mine = ours[r.percent]
                if r.planner == rival and r.step_s is not None and mine is not None:
                    ratios.append(r.step_s / mine)
        cases = sum(len({r.percent for r in results}) for results in everything.values())
        often = sum(ratio >= 1.1 for ratio in ratios)
        worst = f", {max(ratios) - 1:+.1%} at worst" if ratios else ""
        lines.append(f"{rival}: fits in {len(ratios)} of {cases} cases, at least 10 % longer in {often}{worst}")
    return lines


def comparison_table(rows: Sequence[Row], *, title: str | None = None) -> Table:
    """Return a table of overheads over keeping everything, one line per planner, one column per budget.

    The smallest overhead of each budget is bold; a dash stands for a planner that finds no plan that fits.
    """
    budgets = sorted({row.budget_bytes for row in rows})
    overhead = {(row.planner, row.budget_bytes): row.overhead for row in rows}
    columns = right(*map(format_bytes, budgets), no_wrap=False)
    table = Table("planner", *columns, title=title, caption="overhead over keeping everything; – : nothing fits")
    best = {
        budget: min((value for (_, b), value in overhead.items() if b == budget and value is not None), default=None)
        for budget in budgets
    }
    for planner in dict.fromkeys(row.planner for row in rows):
        cells = [_cell(overhead.get((planner, budget)), best[budget]) for budget in budgets]
        table.add_row(planner, *cells)
    return table


def _cell(value: float | None, best: float | None) -> str:
    if value is None or best is None:
        return "–"
    text = f"{max(value, 0.0):.1%}"
    return f"[bold]{text}[/bold]" if text == f"{max(best, 0.0):.1%}" else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument(
        "--models", default="gpt2,bert,vit,resnet50,llama", help="comma-separated names in models.py, or all"
    )
    parser.add_argument("--planners", default="all", help="comma-separated published planners, or all")
    parser.add_argument("--link-ratio", type=float, help="plan for a link this many times slower than the forward")
    parser.add_argument("--budgets", default="0,20,40,60,80,100", help="comma-separated percentages")
    parser.add_argument("--synthetic", action="store_true", help="textbook chains instead of models")
    parser.add_argument("--measure", action="store_true", help="apply each plan and time it")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each of our plans")
    args = parser.parse_args()
    planners = list(BASELINES) if args.planners == "all" else args.planners.split(",")
    unknown = [name for name in planners if name not in BASELINES]
    if unknown:
        parser.error(f"no planner {unknown[0]!r}; there are {', '.join(BASELINES)}")
    percents = [float(x) for x in args.budgets.split(",")]
    if args.link_ratio is not None and (args.measure or args.synthetic or args.link_ratio <= 0):
        parser.error(
            "--link-ratio is a number above 0, for models, and changes what is planned for: it can't be measured"
        )
    names = ALL_MODELS if args.models == "all" else args.models.split(",")
    cases = synthetic() if args.synthetic else models(names, args.measure)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(100, 14 * len(percents) + 20))
    everything: dict[str, list[Result]] = {}
    stages: dict[str, int] = {}
    wrong: list[str] = []
    for name, profile, measure in cases:
        if args.link_ratio is not None:
            profile = with_link(profile, args.link_ratio)
        results = everything[name] = compare(profile, planners, percents, args.time_limit, measure)
        stages[name] = len(profile.stages)
        rows = [Row(r.planner, r.budget_bytes, r.baseline_step_s, r.step_s) for r in results]
        console.print(comparison_table(rows, title=f"{name}, {stages[name]} stages"))
        wrong += complaints(name, results)
    summary = [against(rival, everything) for rival in (GREEDY, None) if rival is None or rival in planners]
    if args.measure and not args.synthetic:
        summary += [
            against(rival, everything, measured=True) for rival in (GREEDY, None) if rival is None or rival in planners
        ]
    summary += losing(everything, planners)
    document = {
        "schema": SCHEMA,
        "command": " ".join(["python", *sys.argv]),
        "environment": {"python": platform.python_version(), "torch": _torch_version(), "cpus": os.cpu_count()},
        "time_limit_s": args.time_limit,
        "summary": summary,
        "wrong": wrong,
        "cases": {k: {"stages": stages[k], "results": [asdict(r) for r in v]} for k, v in everything.items()},
    }
    which = "_synthetic" if args.synthetic else "" if args.link_ratio is None else f"_link_{args.link_ratio:g}"
    path = args.out / f"compare_greedy{which}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(*summary, sep="\n", soft_wrap=True)
    for text in wrong:
        console.print(f"[bold red]VIOLATION[/bold red] {text}", soft_wrap=True)


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


if __name__ == "__main__":
    main()
