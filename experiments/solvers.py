"""Where CP-SAT closes, and where SCIP does: seconds until a solver of the mixed-integer program has its proof.

    python experiments/solvers.py --out experiments/results
    python experiments/solvers.py --stages 4,8 --seconds 5

Random chains as in the tests, and the first stages of two of the certificate's chains, at the smallest peak and at 10 %
of the way to everything kept. Three questions:

- proof: CP-SAT, and SCIP, told the time of the best plan that the planner finds, each alone in a process of its own, in
  one thread. How long does it take to its end, and by what share is its bound then below that plan? A process takes
  about half a second to begin. The program's links are fluids, so a bound may stay below the plan in the end.
- smallest peak: CP-SAT, told nothing but what keeping everything takes. Is its plan the one that the planner finds, and
  proven?
- plans: how many there are, options times segments; up to 20,000 the planner looks at each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
from instances import INSTANCES
from random_chains import rich_chain

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.solving import smallest_peak
from ckptplan.solving.bound import cp_sat, process
from ckptplan.solving.bound.mixed_integer import PeakModel
from ckptplan.solving.cost import Evaluator, menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import solve_profile

SCHEMA = "ckptplan.solvers/1"
SOLVERS: tuple[process.Solver, ...] = ("cp_sat", "scip")
STAGES = (4, 6, 8, 10, 12, 16, 20)
PERCENTS = (0, 10)
PROVEN = 0.001
COUNTED = 10**15


def shortened(profile: Profile, n: int) -> Profile:
    """The first `n` stages of a chain."""
    kept = [s for s, storage in enumerate(profile.storages) if storage.born < n]
    assert kept == list(range(len(kept))), "storages are in the order of their birth"
    last = n - 1
    storages = [replace(s, program_until=min(s.program_until, last)) for s in profile.storages[: len(kept)]]
    return replace(
        profile,
        stages=profile.stages[:n],
        storages=tuple(storages),
        base_forward_bytes=profile.base_forward_bytes[:n],
        base_backward_bytes=profile.base_backward_bytes[:n],
    )


CHAINS: dict[str, Callable[[int], Profile]] = {
    "random": lambda n: rich_chain(random.Random(n), n),
    "transformers": lambda n: shortened(INSTANCES["heterogeneous-48"](), n),
    "ResNet": lambda n: shortened(INSTANCES["resnet-152"](), n),
}


def proof(solver: process.Solver, profile: Profile, budget: int, best_s: float, seconds: float) -> dict[str, Any]:
    """Seconds to the solver's end, None where it hasn't come to it, and how far below the best plan its bound is."""
    problem = process.Problem(profile, menus(profile, ACTIONS), budget, below_s=best_s)
    begin = time.monotonic()
    running = process.begin(solver, problem, begin + seconds, 0.0)
    found = None if running is None else running.found(begin + 2 * seconds)
    took_s = time.monotonic() - begin
    if found is None:
        return {"solver": solver, "seconds": None, "gap": None}
    gap = best_s / found.bound_s - 1
    return {"solver": solver, "seconds": took_s if found.complete else None, "gap": gap}


def peak(profile: Profile, seconds: float) -> dict[str, Any]:
    """CP-SAT's smallest peak from nothing."""
    begin = time.monotonic()
    try:
        model = PeakModel(profile, menus(profile, ACTIONS), everything_kept_bytes(profile), deadline=begin + seconds)
        bound, found = cp_sat.smallest_peak(model, begin + seconds)
    except TimeoutError:  # not built by then
        bound, found = 0, None
    took_s = time.monotonic() - begin
    plan = None if found is None else Evaluator(profile).peak(found.codes, found.segments)
    return {"seconds": took_s, "bound_bytes": bound, "plan_bytes": plan}


def measure(chain: str, n: int, seconds: float) -> dict[str, Any]:
    """All three questions for one chain."""
    profile = CHAINS[chain](n)
    space = PlanSpace(profile, menus(profile, ACTIONS))
    least = smallest_peak(profile, Limits(time_limit_s=seconds))
    most = everything_kept_bytes(profile)
    row = {
        "chain": chain,
        "stages": n,
        "plans": min(space.count(COUNTED, COUNTED), COUNTED),
        "smallest_peak": {"planner_bytes": least.peak_bytes, **peak(profile, seconds)},
        "proofs": [],
    }
    for percent in PERCENTS:
        budget = least.peak_bytes + (most - least.peak_bytes) * percent // 100
        best = solve_profile(profile, budget, Limits(time_limit_s=seconds, gap=0.0))
        for solver in SOLVERS:
            row["proofs"].append({"percent": percent, **proof(solver, profile, budget, best.step_s, seconds)})
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    least = row["smallest_peak"]
    found = "-" if least["plan_bytes"] is None else f"{least['plan_bytes'] / least['planner_bytes'] - 1:+.1%}"
    proven = "proven" if least["bound_bytes"] == least["planner_bytes"] else "open"
    cells = []
    for p in row["proofs"]:
        took = "cut off" if p["seconds"] is None else f"{p['seconds']:.1f} s"
        cells.append("failed" if p["gap"] is None else f"{took}, {p['gap']:.2%}")
    plans = f"{'>' if row['plans'] == COUNTED else ''}{row['plans']:.0e}"
    return f"{row['chain']:13} {row['stages']:3} {plans:>7} {least['seconds']:6.2f} s {found:>6} {proven:7}" + " ".join(
        f"{cell:>16}" for cell in cells
    )


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Per solver and length: how many come to their end, how many prove the plan, and in what time."""
    lines = []
    for solver in SOLVERS:
        for n in sorted({row["stages"] for row in rows}):
            found = [p for row in rows if row["stages"] == n for p in row["proofs"] if p["solver"] == solver]
            ended = [p["seconds"] for p in found if p["seconds"] is not None]
            proven = sum(p["gap"] is not None and p["gap"] <= PROVEN for p in found)
            median = f" ({statistics.median(ended):.1f} s in the median)" if ended else ""
            lines.append(
                f"{solver}, {n} stages: {len(ended)} of {len(found)} come to their end{median}, "
                f"{proven} prove the plan to {PROVEN:.1%}"
            )
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(map(str, STAGES)), help="lengths of the chains")
    parser.add_argument("--seconds", type=float, default=8.0, help="time limit of each search")
    parser.add_argument("--out", type=Path, help="folder for solvers.json")
    args = parser.parse_args()
    titles = " ".join(f"{f'{s} {p} %':>16}" for p in PERCENTS for s in SOLVERS)
    print(f"{'chain':13} {'n':>3} {'plans':>7} {'peak':>8} {'plan':>6} {'bound':7}{titles}")
    rows = []
    for n in map(int, args.stages.split(",")):
        for chain in CHAINS:
            rows.append(measure(chain, n, args.seconds))
            print(line(rows[-1]), flush=True)
            if args.out:
                document = {"schema": SCHEMA, "command": documents.command(), "environment": documents.environment(1)}
                documents.write({**document, "summary": summary(rows), "rows": rows}, args.out / "solvers.json")
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
