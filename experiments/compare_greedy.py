"""How much faster is the planner than the greedy and the other published rules, under the same budgets?

    python experiments/compare_greedy.py --models all --link-ratio 4 --budgets 10,30,50 --out experiments/results
    python experiments/compare_greedy.py --instances resnet-50,unet-14 --planners pooch --out experiments/results

Models are profiled here; with --link-ratio R they are planned for a link on which moving all that is kept takes R times
the forward, as between a GPU and its host. With --instances chains of `instances.py` are planned instead, up to the
longest: how far each rule is from the proven bound, and how its time grows, are questions that PoocH's authors left
open. Budgets are percentages of the way from the smallest feasible peak to the peak with everything kept. Every plan is
replayed and validated by the referee; `compare_real.py` applies and measures them.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import documents
from instances import INSTANCES, instance
from rich.table import Table

from ckptplan.baselines import BASELINES
from ckptplan.cli.tables import Row, right
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.link import Link
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.units import format_bytes
from ckptplan.referee import simulate, validate
from ckptplan.solving.planner import smallest_peak, solve_profile

SCHEMA = "ckptplan.compare_greedy/2"
OURS = "ckptplan"
ALL_MODELS = ["gpt2", "bert", "vit", "resnet50", "llama", "t5", "swin", "convnext"]
LOSES = 1.1
"""A rule loses where its step is at least so many times ours."""


@dataclass(frozen=True)
class Result:
    """One planner under one budget; None where nothing fits."""

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


def profiles(names: Sequence[str], ratio: float | None) -> Iterator[tuple[str, Profile]]:
    """Profile each model, for the link of this machine or one of a ratio."""
    from models import MODELS

    import ckptplan

    for name in names:
        profile = ckptplan.profile(*MODELS[name]())
        yield name, profile if ratio is None else with_link(profile, ratio)


def with_link(profile: Profile, ratio: float) -> Profile:
    """`profile` with a link on which moving all that its stages keep takes `ratio` times the forward, either way."""
    kept = {s for stage in profile.stages for s in stage.keep.saved}
    nbytes = sum(profile.storages[s].nbytes for s in kept if not profile.storages[s].to_end)
    rate = nbytes / (ratio * sum(stage.forward_s for stage in profile.stages))
    return replace(profile, link=Link(rate, rate, profile.link.latency_s))


def run(planner: str, profile: Profile, percent: float, budget: int, limit_s: float) -> Result:
    """Plan, replay and validate."""
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
        *known, took_s, timeline.makespan_s, timeline.peak_bytes, timeline.host_bytes,
        timeline.makespan_s / profile.baseline_step_s - 1, plan.status, plan.lower_bound_s, plan.gap,
        violations=tuple(f"{v.kind}: {v.stage}: {v.detail}" for v in validate(profile, plan, budget)),
    )  # fmt: skip


def compare(profile: Profile, planners: list[str], percents: list[float], limit_s: float) -> list[Result]:
    """Run every planner under every budget."""
    least = smallest_peak(profile).peak_bytes
    most = BASELINES["keep_all"](profile, 1 << 59).peak_bytes
    return [
        run(planner, profile, percent, least + int((most - least) * percent / 100), limit_s)
        for percent in percents
        for planner in (*planners, OURS)
    ]


def complaints(name: str, results: list[Result]) -> list[str]:
    """Collect what must not happen: unsound plans, and a rule that beats the planner."""
    found = [f"{name}, {r.planner} at {r.percent:g} %: unsound plan: {text}" for r in results for text in r.violations]
    ours = {r.percent: r.step_s for r in results if r.planner == OURS}
    for r in results:
        mine = ours[r.percent]
        # 1e-9: the same seconds are added in another order.
        if r.step_s is not None and (mine is None or r.step_s < mine * (1 - 1e-9)):
            found.append(f"{name} at {r.percent:g} %: {r.planner} ({r.step_s} s) beats {OURS} ({mine} s)")
    return found


def losing(everything: dict[str, list[Result]], rivals: Sequence[str]) -> str:
    """In how many cases the best of rules fits, how much longer its step is than ours and our bound, what it took."""
    ours = {(name, r.percent): r for name, results in everything.items() for r in results if r.planner == OURS}
    found: dict[tuple[str, float], Result] = {}
    for name, results in everything.items():
        for r in sorted((r for r in results if r.planner in rivals), key=lambda r: -(r.step_s or math.inf)):
            found[name, r.percent] = r
    fit = {
        case: (r.step_s / ours[case].step_s, r.step_s / (ours[case].lower_bound_s or math.inf))  # type: ignore[operator]
        for case, r in found.items()
        if r.step_s is not None and ours[case].step_s is not None
    }
    slowest_s = max(r.planning_s for r in found.values())
    who = rivals[0] if len(rivals) == 1 else "the best rule of each case"
    line = f"{who}: fits in {len(fit)} of {len(found)} cases, planned in {slowest_s:.2f} s at most"
    if not fit:
        return line
    (over_ours, over_bound) = zip(*fit.values(), strict=True)
    return (
        f"{line}; at least 10 % longer than ours in {sum(x >= LOSES for x in over_ours)}, by "
        f"{statistics.median(over_ours) - 1:+.1%} in the median and {max(over_ours) - 1:+.1%} at worst; over the bound "
        f"by {statistics.median(over_bound) - 1:+.1%} and {max(over_bound) - 1:+.1%}"
    )


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
        table.add_row(planner, *(_cell(overhead.get((planner, budget)), best[budget]) for budget in budgets))
    return table


def _cell(value: float | None, best: float | None) -> str:
    if value is None or best is None:
        return "–"
    text = f"{max(value, 0.0):.1%}"
    return f"[bold]{text}[/bold]" if text == f"{max(best, 0.0):.1%}" else text


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--models", default="gpt2,bert,vit,resnet50,llama", help="names in models.py, or all")
    parser.add_argument("--instances", type=documents.among(INSTANCES), help="chains of instances.py instead")
    parser.add_argument("--planners", type=documents.among(BASELINES), default=list(BASELINES), help="published ones")
    parser.add_argument("--link-ratio", type=float, help="plan for a link this many times slower than the forward")
    parser.add_argument("--budgets", type=documents.reals, default=[0, 20, 40, 60, 80, 100], help="percentages")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each of our plans")
    args = parser.parse_args()
    names = ALL_MODELS if args.models == "all" else args.models.split(",")
    cases = ((name, instance(name)) for name in args.instances) if args.instances else profiles(names, args.link_ratio)
    everything: dict[str, list[Result]] = {}
    stages: dict[str, int] = {}
    wrong: list[str] = []
    for name, profile in cases:
        results = everything[name] = compare(profile, args.planners, args.budgets, args.time_limit)
        stages[name] = len(profile.stages)
        rows = [Row(r.planner, r.budget_bytes, r.baseline_step_s, r.step_s) for r in results]
        documents.show(comparison_table(rows, title=f"{name}, {stages[name]} stages"))
        wrong += complaints(name, results)
    summary = [losing(everything, [name]) for name in args.planners]
    summary += [losing(everything, args.planners)] * (len(args.planners) > 1)
    which = "_instances" if args.instances else "" if args.link_ratio is None else f"_link_{args.link_ratio:g}"
    document = {
        "schema": SCHEMA, "time_limit_s": args.time_limit, "summary": summary, "wrong": wrong,
        "cases": {k: {"stages": stages[k], "results": [asdict(r) for r in v]} for k, v in everything.items()},
    }  # fmt: skip
    documents.save(args.out, f"compare_greedy{which}.json", document)
    print(*summary, *(f"VIOLATION {text}" for text in wrong), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
