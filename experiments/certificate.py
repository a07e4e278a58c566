"""How good the certificate is: gap, time to a first plan and to 1 %, memory, over a fixed set of instances.

    python experiments/certificate.py --out experiments/results
    python experiments/certificate.py --budgets 0,10 --only unet-45,swin-base

Each chain of `instances.py` and each real model of `real_profiles.py` is planned at several budgets with 30 s up to 100
stages and 60 s above, in a process of its own, so that its memory can be told, and alone on both cores. The budgets,
from the smallest peak found (0 %) to everything kept, are the bytes in `budgets.json`: a better search faces the same
ones. What is promised: a gap of at most 5 % at 0 %, and of at most 1 % from 10 % on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from instances import DISK, instance

from ckptplan.core.request import Limits
from ckptplan.referee import validate
from ckptplan.solving.planner import solve_profile

FOLDER = Path(__file__).parent
BUDGETS: dict[str, dict[int, int]] = {
    name: {int(percent): nbytes for percent, nbytes in budgets.items()}
    for name, budgets in json.loads((FOLDER / "budgets.json").read_text(encoding="utf-8")).items()
}
"""Per instance and per cent of the way from the smallest peak to everything kept, bytes."""
SCHEMA = "ckptplan.certificate/2"
NEAR = 0.01
PROMISED = {0: 0.05, 2: math.inf}
"""Per cent of the way -> largest gap; `NEAR` at all others."""
SIZES = ((1, 30), (31, 60), (61, 100), (101, 400), (401, 1000))


def time_limit_s(stages: int) -> float:
    """The time the solver is given."""
    return 30.0 if stages <= 100 else 60.0


def measure(name: str, percents: tuple[int, ...], limits: Limits | None = None) -> list[dict[str, Any]]:
    """One row per budget for the chain `name`."""
    profile = instance(name)
    n = len(profile.stages)
    limits = limits or Limits(time_limit_s=time_limit_s(n), gap=0.0)
    rows, budgets = [], BUDGETS[name.removesuffix(DISK)]
    for percent in [percent for percent in percents if percent in budgets]:
        budget = budgets[percent]
        times: dict[str, float] = {}
        begin = time.perf_counter()

        def on_progress(part: str, best_s: float, bound_s: float, peak_bytes: int | None) -> None:
            now = time.perf_counter() - begin  # noqa: B023 - called within this round alone
            if best_s < float("inf"):
                times.setdefault("first", now)  # noqa: B023
                if best_s <= bound_s * (1 + NEAR):
                    times.setdefault("near", now)  # noqa: B023

        plan = solve_profile(profile, budget, limits, on_progress=on_progress)
        seconds = time.perf_counter() - begin
        broken = validate(profile, plan, budget, host_bytes=limits.host_bytes, disk_bytes=limits.disk_bytes)
        if broken:
            raise SystemExit(f"{name} at {percent} %: the referee rejects the plan: {broken}")
        times.setdefault("first", seconds)
        if plan.gap <= NEAR:
            times.setdefault("near", seconds)
        rows.append(
            {
                "instance": name,
                "stages": n,
                "budget_percent": percent,
                "budget_bytes": budget,
                "overhead": plan.overhead,
                "gap": plan.gap,
                "first_plan_s": times["first"],
                "to_1_percent_s": times.get("near"),
                "seconds": seconds,
                "segments": len(plan.segments),
                "swapped_bytes": plan.host_bytes,
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as plain text, and the summary that the promises speak of."""
    titles = ("overhead", "gap", "first", "to 1 %", "in all", "MiB")
    lines = [f"{'instance':20} {'n':>5} {'budget':>6} {'{:>8} {:>8} {:>7} {:>7} {:>7} {:>6}'.format(*titles)}"]
    for r in rows:
        near = "-" if r["to_1_percent_s"] is None else f"{r['to_1_percent_s']:.2f} s"
        lines.append(
            f"{r['instance']:20} {r['stages']:5} {r['budget_percent']:4} % {r['overhead']:8.2%} {r['gap']:8.3%} "
            f"{r['first_plan_s']:5.2f} s {near:>7} {r['seconds']:5.1f} s {r['peak_rss_mib']:6}"
        )
    return "\n".join(lines)


def grid(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown: per instance and budget the gap, and the seconds until it was at most 1 %."""
    percents = sorted({r["budget_percent"] for r in rows})
    lines = [f"| instance | stages | {' | '.join(f'{p} %' for p in percents)} |", "|---" * (2 + len(percents)) + "|"]
    instances: dict[str, dict[int, dict[str, Any]]] = {}
    for r in rows:
        instances.setdefault(r["instance"], {})[r["budget_percent"]] = r
    for name, found in instances.items():
        cells = []
        for r in (found.get(p) for p in percents):
            near = "" if r is None or r["to_1_percent_s"] is None else f" ({r['to_1_percent_s']:.1f} s)"
            cells.append("" if r is None else f"{100 * r['gap']:.2f} %{near}")
        lines.append(f"| `{name}` | {next(iter(found.values()))['stages']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The cells with a larger gap than is promised."""
    return [
        f"{r['instance']} at {r['budget_percent']} %: {r['gap']:.3%}"
        for r in rows
        if r["gap"] > PROMISED.get(r["budget_percent"], NEAR)
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    """What the promises speak of, and how time and memory grow with the number of stages."""
    gaps = [r["gap"] for r in rows]
    lines = [
        f"{len(rows) - len(missed(rows))} of {len(rows)} cells are within the promised gap",
        *missed(rows),
        f"{len(rows)} instances: gap at most 1 % on {sum(g <= 0.01 for g in gaps) / len(gaps):.0%}, "
        f"at most 5 % on {sum(g <= 0.05 for g in gaps) / len(gaps):.0%}; median {statistics.median(gaps):.3%}, "
        f"worst {max(gaps):.2%}; first plan after {max(r['first_plan_s'] for r in rows):.2f} s at most",
    ]
    for low, high in SIZES:
        some = [r for r in rows if low <= r["stages"] <= high]
        if some:
            near = [r["to_1_percent_s"] for r in some if r["to_1_percent_s"] is not None]
            lines.append(
                f"{low:4} to {high:4} stages ({len(some)}): first plan {_median(some, 'first_plan_s'):.2f} s, "
                f"to 1 % {statistics.median(near) if near else float('nan'):.2f} s ({len(near)}), "
                f"in all {_median(some, 'seconds'):.1f} s, {_median(some, 'peak_rss_mib'):.0f} MiB (medians), "
                f"worst gap {max(r['gap'] for r in some):.2%}"
            )
    return "\n".join(lines)


def _median(rows: list[dict[str, Any]], field: str) -> float:
    return statistics.median(r[field] for r in rows)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """The result; without `documents`, whose torch would count in the memory of every process begun from here."""
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "schema": SCHEMA,
        "command": " ".join(["python", *sys.argv]),
        "environment": {
            "python": platform.python_version(),
            "ortools": version("ortools"),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
        },
        "summary": summary(rows).splitlines(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--name", default="certificate", help="name of the result")
    parser.add_argument("--only", help="comma-separated instances")
    parser.add_argument(
        "--budgets", default="0,10,25,45,65,85", help="per cent from smallest peak to keep-all, of budgets.json"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    percents = tuple(int(x) for x in args.budgets.split(","))
    if args.one:
        json.dump(measure(args.one, percents), sys.stdout)
        return
    names = args.only.split(",") if args.only else list(BUDGETS)
    unknown = [name for name in names if name not in BUDGETS]
    if unknown:
        parser.error(f"no instance {unknown[0]!r}; there are {', '.join(BUDGETS)}")
    rows: list[dict[str, Any]] = []
    for name in names:
        asked = [sys.executable, __file__, "--one", name, "--budgets", args.budgets]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout)
        rows += found
        print(table(found), flush=True)
        if args.out:
            write(rows, args.out / f"{args.name}.json")
    print("\n" + grid(rows) + "\n\n" + summary(rows))


if __name__ == "__main__":
    main()
