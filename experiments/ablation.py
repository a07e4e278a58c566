"""What each part of the solver adds: plan, bound and time to a gap of 1 % with the part switched off.

    python experiments/ablation.py --out experiments/results
    python experiments/ablation.py --only segformer,unet-14 --parts columns,last-search --budgets 0,10 --seconds 10
    python experiments/ablation.py --no-segments --parts cp-sat,scip --budgets 10,25
    python experiments/ablation.py --recompute-alone --parts segment-dp,label-dp --budgets 45,65

Cells are instances and budgets as in `certificate.py`: 0, 2 and 10 % of the way from the smallest peak to everything
kept, and 25 % of chains made from formulas. An instance with `+disk` behind its name has a disk tier, and a host that
holds a fiftieth of what there is. Each solve is a process of its own, one at a time, since the
mixed-integer program takes the second core. In each cell the whole solver (`full`) runs first and in the middle of the
others, so that noise is seen: its row compares the worse of the two with the better one. The other rows compare a solve
without the part with the worse of the two, so that less of the noise counts as the part's.

A part is switched off by replacing functions of the solver. Their calls are counted: a part that `full` doesn't call in
a cell isn't switched off there, and one that is called nowhere is "never at work here".
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from certificate import BUDGETS, NEAR, measure
from instances import DISK, INSTANCES, instance

from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.request import Limits
from ckptplan.solving import planner
from ckptplan.solving.bound import process
from ckptplan.solving.bound.pricing import Bound
from ckptplan.solving.bound.trees import MissingColumns
from ckptplan.solving.cost import Evaluator
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.incumbent import Incumbent
from ckptplan.solving.planner import _PlanSearch

SCHEMA = "ckptplan.ablation/1"
FULL = "full"
Row = dict[str, Any]
WORSE = (0.001, 0.01)
"""Shares by which a plan or a bound counts as worse: the second is the default `gap=`."""
TIGHTEST = (0, 2, 10)
TIGHTEST_OF_CHAINS = (*TIGHTEST, 25)


def nothing(original: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Return at once."""


@dataclass(frozen=True)
class Switch:
    """A function of the solver, and its replacement where a part is off.

    Attributes
    ----------
    owner, name : object, str
        The class or module, and the function's name in it.
    instead : callable
        Gets the function and its arguments.
    applies : callable
        Whether a call with these arguments is the part's.
    """

    owner: Any
    name: str
    instead: Callable[..., Any] = nothing
    applies: Callable[..., bool] = lambda *args, **options: True


count = PlanSpace.count  # a switch replaces it


def few(space: PlanSpace, most: int, forests: int) -> bool:
    """Whether the planner would enumerate."""
    return count(space, most, forests) <= most


def searching(search: _PlanSearch, until: float) -> bool:
    """Whether a local search begins."""
    return search.incumbent.lazy is not None


def refining(search: _PlanSearch, until: float) -> bool:
    """Whether a search for transfers begins."""
    return search.incumbent.lazy is not search.refined


def of_mixed(incumbent: Incumbent, *args: Any) -> bool:
    """Whether the mixed-integer program is at work."""
    return incumbent.part == "mixed-integer program"


def begun_with(solver: process.Solver) -> Callable[..., bool]:
    """Whether a process of this solver begins."""
    return lambda asked, *args: asked == solver


def later(search: _PlanSearch, until: float) -> bool:
    """Whether this is a round of the label DP after the first, which alone has a share of the time."""
    return search.incumbent.best is not None and until == search.deadline


PARTS: dict[str, tuple[Switch, ...]] = {
    "exact-search": (Switch(PlanSpace, "count", lambda original, space, most, forests: most + 1, few),),
    "segment-dp": (Switch(_PlanSearch, "segments", applies=lambda search, until: search.space.segments),),
    "label-dp": (Switch(_PlanSearch, "labels"),),
    "later-rounds": (Switch(_PlanSearch, "labels", applies=later),),
    "prices": (Switch(_PlanSearch, "prices"), Switch(_PlanSearch, "steered_by")),
    "local-search": (
        Switch(_PlanSearch, "polish", applies=searching),
        Switch(_PlanSearch, "search", applies=searching),
    ),
    "polish": (Switch(_PlanSearch, "polish", applies=searching),),
    "last-search": (Switch(_PlanSearch, "search", applies=searching),),
    "transfers": (
        Switch(_PlanSearch, "transfers", applies=refining),
        Switch(_PlanSearch, "retimed"),
        Switch(Evaluator, "transferred"),
    ),
    "linear-bound": (Switch(planner, "lower_bound", lambda original, *args, **options: Bound(0.0, None, False)),),
    "columns": (
        Switch(
            MissingColumns,
            "add_to",
            lambda *args: False,
            lambda columns, master, trees, duals: bool(trees.missing(duals.stage, columns.longest)),
        ),
    ),
    "mixed": (Switch(process, "begin"),),
    "scip": (Switch(process, "begin", applies=begun_with("scip")),),
    "cp-sat": (Switch(process, "begin", applies=begun_with("cp_sat")),),
    "mixed-bound": (
        Switch(
            Incumbent,
            "prove",
            applies=lambda incumbent, bound_s: of_mixed(incumbent) and bound_s > incumbent.bound_s,
        ),
    ),
    "mixed-plan": (
        Switch(Incumbent, "offer", applies=of_mixed),
        Switch(Evaluator, "transferred"),
        Switch(_PlanSearch, "retimed", applies=lambda search, *args: of_mixed(search.incumbent)),
    ),
}
"""Name -> what switches the part off."""


def switch_off(off: str) -> Counter[str]:
    """Switch a part off, or none for `full`; return the calls of all parts, which are counted from now on."""
    calls: Counter[str] = Counter()
    for part, switches in PARTS.items():
        for switch in switches:
            setattr(switch.owner, switch.name, watched(switch, part, off, calls))
    return calls


def watched(switch: Switch, part: str, off: str, calls: Counter[str]) -> Callable[..., Any]:
    """The function of a switch, which counts its calls and is replaced if its part is off."""
    original = getattr(switch.owner, switch.name)

    def call(*args: Any, **options: Any) -> Any:
        if not switch.applies(*args, **options):
            return original(*args, **options)
        calls[part] += 1
        return switch.instead(original, *args, **options) if part == off else original(*args, **options)

    return call


def solve(name: str, percent: int, off: str, limits: Limits) -> Row:
    """A row of `certificate.py` and the calls of each part; without step, bound and gap if no plan is found."""
    calls = switch_off(off)
    if name.endswith(DISK):
        most_moved = sum(storage.nbytes for storage in instance(name).storages)
        limits = replace(limits, host_bytes=most_moved // 50, disk_bytes=most_moved)
    row: Row = {"instance": name, "budget_percent": percent, "off": off, "step": None, "calls": calls}
    try:
        (found,) = measure(name, (percent,), limits)
    except InfeasibleBudgetError:
        return row
    step = 1 + found["overhead"]
    return {**row, "stages": found["stages"], "step": step, "bound": step / (1 + found["gap"]), "gap": found["gap"]} | {
        key: found[key] for key in ("first_plan_s", "to_1_percent_s", "seconds")
    }


def cell(row: Row) -> str:
    """Its name in the tables."""
    return f"{row['instance']} {row['budget_percent']} %"


@dataclass(frozen=True)
class Compared:
    """A solve without a part beside solves with it.

    Attributes
    ----------
    plan, bound : float
        Ratios without / with, of the step's seconds and of the bound.
    gap : float
        Without less with.
    to_near : float or None
        Ratio of the times to a gap of 1 %, None where a solve doesn't reach it.
    lost : bool
        Whether only the solve without the part has a gap of more than 1 %.
    """

    cell: str
    plan: float
    bound: float
    gap: float
    to_near: float | None
    lost: bool

    @classmethod
    def of(cls, off: Row, on: Sequence[Row]) -> Compared:
        """Compare a solve with the worse of others, figure by figure."""
        gap = max(row["gap"] for row in on)
        if off["step"] is None:
            return cls(cell(off), math.inf, 0.0, math.inf, None, gap <= NEAR)
        plan = off["step"] / max(row["step"] for row in on)
        bound = off["bound"] / min(row["bound"] for row in on)
        near = [row["to_1_percent_s"] for row in (off, *on)]
        to_near = None if None in near else near[0] / max(near[1:])
        return cls(cell(off), plan, bound, off["gap"] - gap, to_near, gap <= NEAR < off["gap"])

    @classmethod
    def of_two(cls, first: Row, second: Row) -> Compared:
        """Compare the worse of two equal solves with the better one, figure by figure."""
        a, b = cls.of(first, [second]), cls.of(second, [first])
        near = None if a.to_near is None or b.to_near is None else max(a.to_near, b.to_near)
        return cls(a.cell, max(a.plan, b.plan), min(a.bound, b.bound), max(a.gap, b.gap), near, a.lost or b.lost)


def compare(rows: Iterable[Row], parts: Sequence[str]) -> dict[str, list[Compared]]:
    """Per part the cells in which it was at work, first `full`; without cells in which `full` finds no plan."""
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(cell(row), {}).setdefault(row["off"], []).append(row)
    compared: dict[str, list[Compared]] = {name: [] for name in (FULL, *parts)}
    for solves in cells.values():
        full = solves.pop(FULL)
        if len(full) == 2 and all(row["step"] is not None for row in full):
            compared[FULL].append(Compared.of_two(*full))
            for part, (row,) in solves.items():
                if row["calls"].get(part):
                    compared[part].append(Compared.of(row, full))
    return compared


def table(compared: dict[str, list[Compared]]) -> str:
    """A line per part, and the cells that are worse without it."""
    titles = ("median", "worst", "> 0.1 %", "> 1 %")
    titles = (*(f"plan {t}" for t in titles), *(f"bound {t}" for t in titles), "gap worst", "to 1 %", "lost 1 %")
    lines = [f"{'off':13} {'cells':>5} " + " ".join(f"{title:>13}" for title in titles)]
    names = []
    for part, cells in compared.items():
        if not cells:
            lines.append(f"{part:13} never at work here")
            continue
        figures = []
        for what, sign in (("plan", 1), ("bound", -1)):
            ratios = [getattr(c, what) for c in cells]
            worse = {c.cell: sign * (ratio - 1) for c, ratio in zip(cells, ratios, strict=True)}
            figures += [f"{statistics.median(ratios):.4f}", f"{sign * max(sign * ratio for ratio in ratios):.4f}"]
            figures += [str(sum(share > limit for share in worse.values())) for limit in WORSE]
            found = [f"{name} ({share:.2%})" for name, share in worse.items() if share > WORSE[0]]
            names += [f"{part}, {what} worse: {', '.join(found)}"] if found else []
        near = [c.to_near for c in cells if c.to_near is not None]
        lost = [c.cell for c in cells if c.lost]
        figures += [f"{max(c.gap for c in cells):+.2%}", f"x {statistics.median(near):.2f}" if near else "-"]
        figures += [str(len(lost))]
        lines.append(f"{part:13} {len(cells):5} " + " ".join(f"{figure:>13}" for figure in figures))
        names += [f"{part}, no longer proven to 1 %: {', '.join(lost)}"] if lost else []
    return "\n".join((*lines, "", *names))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--only", help="comma-separated instances")
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--budgets", help="per cent from smallest peak to keep-all, of budgets.json")
    parser.add_argument("--seconds", type=float, default=15.0, help="time limit of a solve")
    parser.add_argument("--no-segments", action="store_true", help="plans without segments")
    parser.add_argument("--recompute-alone", action="store_true", help="plans that swap nothing")
    parser.add_argument("--swap-alone", action="store_true", help="plans that recompute nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    limits = Limits(time_limit_s=args.seconds, gap=0.0, segments=not args.no_segments)
    if args.recompute_alone:
        limits = replace(limits, actions=("keep", "recompute"))
    if args.swap_alone:
        limits = replace(limits, actions=("keep", "swap"))
    options = ("no-segments", "recompute-alone", "swap-alone")
    narrower = [f"--{name}" for name in options if getattr(args, name.replace("-", "_"))]
    if args.one:
        name, percent, off = args.one.split(",")
        json.dump(solve(name, int(percent), off, limits), sys.stdout)
        return
    import documents  # torch, which solves do without

    names = args.only.split(",") if args.only else list(BUDGETS)
    parts = args.parts.split(",") if args.parts else list(PARTS)
    for unknown in [*({name.removesuffix(DISK) for name in names} - set(BUDGETS)), *(set(parts) - set(PARTS))]:
        parser.error(f"no instance or part {unknown!r}; there are {', '.join((*BUDGETS, *PARTS))}")
    rows: list[Row] = []

    def run(name: str, percent: int, off: str) -> Row:
        command = [sys.executable, __file__, "--one", f"{name},{percent},{off}", "--seconds", str(args.seconds)]
        done = subprocess.run([*command, *narrower], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        row: Row = json.loads(done.stdout)
        figures = "no plan" if row["step"] is None else f"step {row['step']:.5f}, bound {row['bound']:.5f}"
        print(f"{cell(row)}, {off}: {figures}", flush=True)
        rows.append(row)
        return row

    for name in names:
        chain = name.removesuffix(DISK)
        tightest = TIGHTEST_OF_CHAINS if chain in INSTANCES else TIGHTEST
        percents = [int(p) for p in args.budgets.split(",")] if args.budgets else tightest
        for percent in [percent for percent in percents if percent in BUDGETS[chain]]:
            full = run(name, percent, FULL)
            if full["step"] is None:
                continue
            at_work = [part for part in parts if full["calls"].get(part)]
            half = len(at_work) // 2
            for off in (*at_work[:half], FULL, *at_work[half:]):
                run(name, percent, off)
        if args.out:
            environment = {**documents.environment(1), "ortools": version("ortools")}
            document = {"schema": SCHEMA, "command": documents.command(), "environment": environment, "rows": rows}
            file = "_".join(("ablation", *(option.strip("-").replace("-", "_") for option in narrower)))
            documents.write(document, args.out / f"{file}.json")
    print("\n" + table(compare(rows, parts)))


if __name__ == "__main__":
    main()
