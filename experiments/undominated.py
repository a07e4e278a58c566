"""Is a plan, a point of a frontier or an alternative that is shown beaten in memory and time by another that is known?

    python experiments/undominated.py --out experiments/results
    python experiments/undominated.py --out /tmp/undominated --models gpt2,t5-base

On the ten profiles in `experiments/profiles` and eight models with random weights that are profiled here: plans for
shares of the way from the smallest peak to everything kept, what `ckptplan.explain` shows of them, a frontier, and a
page with both. The rules are those of `ckptplan.baselines` that plan within seconds, each within the peak of a plan.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import documents
import torch
from instances import REAL, instance
from models import MODELS

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.planning.by_rules import QUICK
from ckptplan.report.explain import Explanation

HERE = ("gpt2", "bert", "llama", "t5", "vit", "resnet50", "swin", "convnext")
"""Models of `models.py`, profiled on this machine."""
BUDGETS = ("40%", "80%")
POINTS, FRONTIER_S, EXPLAIN_S, PAGE_S = 4, 10.0, 1.0, 3.0
CLOSE = 1e-9  # sums of the same seconds in another order


@dataclass(frozen=True)
class Row:
    """A model: seconds of its plans, points that are shown, and how many of each kind are beaten."""

    model: str
    stages: int
    step_error: float
    solve_s: list[float]
    steps_s: list[float]
    gaps: list[float]
    beaten_plans: int
    alternatives: int
    beating_alternatives: int
    points: int
    beaten_points: int
    beaten_on_page: int


Point = tuple[int, float]


def beaten(point: Point, others: Sequence[Point]) -> bool:
    """Whether one of `others` is faster with no more memory, or as fast with less."""
    nbytes, seconds = point
    return any((b <= nbytes and s < seconds * (1 - CLOSE)) or (b < nbytes and s <= seconds) for b, s in others)


def by_rules(profile: Profile, plan: Plan) -> list[Point]:
    """What published rules reach within a plan's peak."""
    found = []
    for rule in QUICK:
        with contextlib.suppress(InfeasibleBudgetError):
            other = BASELINES[rule](profile, plan.peak_bytes)
            found.append((other.peak_bytes, other.step_s))
    return found


def less_of_both(point: Point, others: Sequence[Point]) -> bool:
    """Whether one of `others` takes less of both."""
    return any(b <= point[0] and s < point[1] * (1 - CLOSE) for b, s in others)


def beating(found: Explanation) -> int:
    """How many alternatives fit and are as fast as the plan or faster."""
    shown = [a for choice in found.choices for a in (choice.leaner, choice.richer) if a is not None]
    return sum(not a.missing_bytes and a.extra_s <= 0 for a in shown)


def measured(name: str, profile: Profile) -> Row:
    """Plan for each budget and along a frontier, and compare all that is shown."""
    plans, seconds, alternatives, better = [], [], 0, 0
    for budget in BUDGETS:
        began = time.perf_counter()
        plans.append(ckptplan.solve(profile, budget=budget))
        seconds.append(time.perf_counter() - began)
        found = ckptplan.explain(profile, plans[-1], time_limit_s=EXPLAIN_S)
        alternatives += sum((c.leaner is not None) + (c.richer is not None) for c in found.choices)
        better += beating(found)
    rules = [by_rules(profile, plan) for plan in plans]
    frontier = ckptplan.frontier(profile, points=POINTS, time_limit_s=FRONTIER_S)
    shown = [(plan.counted_bytes, plan.step_s) for plan in frontier]
    known = [point for plan in frontier for point in by_rules(profile, plan)]
    middle = plans[0]
    data = middle.report(profile, frontier=frontier, time_limit_s=PAGE_S).data["frontier"]
    drawn = [(point["peak"], point["s"]) for point in data["plans"]]
    beside = [(point["peak"], point["s"]) for point in data["others"]]
    mine = (middle.counted_bytes, middle.step_s)
    return Row(
        name,
        len(profile.stages),
        profile.step_error,
        seconds,
        [plan.step_s for plan in plans],
        [plan.gap for plan in plans],
        sum(less_of_both((p.peak_bytes, p.step_s), found) for p, found in zip(plans, rules, strict=True)),
        alternatives,
        better,
        len(shown),
        sum(beaten(point, [*shown, *known]) for point in shown),
        sum(beaten(point, [*drawn, *beside, mine]) for point in drawn) + less_of_both(mine, [*drawn, *beside]),
    )


COLUMNS = ("model", "stages", "solve", "gap", "plans beaten", "alternatives better", "points beaten", "page")


def line(row: Row) -> tuple[str, ...]:
    """The cells of a model's line."""
    return (
        row.model,
        str(row.stages),
        " ".join(f"{s:.1f}" for s in row.solve_s) + " s",
        " ".join(f"{gap:.2%}" for gap in row.gaps),
        f"{row.beaten_plans} of {len(row.steps_s)}",
        f"{row.beating_alternatives} of {row.alternatives}",
        f"{row.beaten_points} of {row.points}",
        str(row.beaten_on_page),
    )


def checks(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """What has to hold."""
    plans = sum(row.beaten_plans for row in rows)
    better = sum(row.beating_alternatives for row in rows)
    points, page = sum(row.beaten_points for row in rows), sum(row.beaten_on_page for row in rows)
    return [
        (plans == 0, f"plans that a rule beats in memory and time: {plans}"),
        (better == 0, f"alternatives that fit and take no longer than their plan: {better}"),
        (points == 0, f"points of a frontier that a rule or another point beats: {points}"),
        (page == 0, f"points of a page that another one beats: {page}"),
    ]


def main() -> None:
    profiled = sorted(path.name.removesuffix(".json.gz") for path in REAL.glob("*.json.gz"))
    parser = documents.parser(__doc__)
    parser.add_argument("--models", type=documents.among([*profiled, *HERE]), default=[*profiled, *HERE])
    args = parser.parse_args()
    rows = []
    torch.manual_seed(0)
    for name in args.models:
        if name in HERE:
            model, inputs = MODELS[name]()
            profile = ckptplan.profile(model, inputs)
            del model, inputs
        else:
            profile = instance(name)
        rows.append(measured(name, profile))
        print(*line(rows[-1]), sep="  ", flush=True)
    documents.finish(rows, checks(rows), documents.table(COLUMNS, map(line, rows)), args.out, "undominated.json")


if __name__ == "__main__":
    main()
