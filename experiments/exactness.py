"""Is the planner exact where everything can be tried, and never behind the recompute-only optimum?

    python experiments/exactness.py --chains 100 --odd 7500 --rotor 200 --workers 2 --out experiments/results

Random chains of 1 to 7 stages with menus, segments, swapping, shared storages and skips: ours against every plan there
is, by the referee's cost (tests/brute_force.py): options, segments, parts of what may move, and points. Random chains
of 1 to 4 stages with ties, zero times and bytes, extreme links and host limits: no plan is faster than one called
optimal or than its bound, and none has a smaller peak than one called proven; every third has weights, gradients or
optimizer state that move, and those with too many plans are left out. Of both, two in seven are launched by a host that
takes about as long as the device. Random textbook chains of up to 48 stages: ours, recompute only, against the dynamic
program of Beaumont et al. (2019) at exact byte resolution. With `--workers` so many chains are in work at once.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import documents  # isort: split

import brute_force
from random_chains import launched, odd_chain, random_chain, textbook_chain, with_residents

from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.referee import validate
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import smallest_peak, solve_profile

MOST_SUBSETS = 2000
"""Odd chains with more than so many plans up to the points of their transfers are left out: some take ten minutes."""

SAME = 1e-9
"""Sums of the same seconds in another order differ by less, relatively."""


def sound(profile: Profile, plan: Plan, host_bytes: int | None = None) -> Plan:
    """`plan`, or an end with the rules it breaks."""
    broken = validate(profile, plan, plan.budget_bytes, host_bytes=host_bytes)
    if broken:
        raise SystemExit(f"the referee rejects a plan: {broken}")
    return plan


def sound_if_any(profile: Profile, planned: Callable[[], Plan]) -> Plan | None:
    """The plan of `planned`, which must be sound; None where it says that there is none."""
    try:
        return sound(profile, planned())
    except InfeasibleBudgetError:
        return None


def small(seed: int) -> Profile:
    """A random chain of 1 to 7 stages."""
    return random_chain(seed, random.Random(seed).randint(1, 7))


def odd(seed: int) -> tuple[Profile, int | None]:
    """An odd chain of 1 to 4 stages, and a limit on the host's bytes or none."""
    rng = random.Random(seed)
    profile = odd_chain(rng, rng.randint(1, 4))
    if seed % 7 < 2:
        profile = launched(random.Random(seed), profile)
    most_moved = sum(storage.nbytes for storage in profile.storages)
    return profile, None if rng.random() < 0.5 else int(rng.random() ** 2 * most_moved)


def moving_residents(seed: int) -> tuple[Profile, int | None]:
    """An odd chain, every third with weights, gradients or optimizer state that move."""
    profile, host_bytes = odd(seed)
    return with_residents(random.Random(seed), profile) if seed % 3 == 0 else profile, host_bytes


def subsets(profile: Profile, combinations: Sequence[brute_force.Combination]) -> int:
    """Plans up to the points of their transfers: what each stage may move moves or stays."""
    moves = (brute_force.moves_of(profile, found).positions for found in combinations)
    return sum(2 ** sum(map(len, positions)) for positions in moves)


def textbook(seed: int) -> Profile:
    """A random textbook chain of 2 to 48 stages."""
    rng = random.Random(seed)
    return textbook_chain(rng, rng.randint(2, 48))


def against_brute_force(seed: int, percents: tuple[int, ...]) -> list[dict[str, Any]]:
    """One random chain at a few budgets."""
    profile = small(seed)
    least, most = smallest_peak(profile).peak_bytes, everything_kept_bytes(profile)
    rows = []
    for percent in percents:
        budget = least + max(0, most - least) * percent // 100
        begin = time.perf_counter()
        plan = sound(profile, solve_profile(profile, budget, Limits(gap=0.0)))
        took_s = time.perf_counter() - begin
        best_s = brute_force.fastest(profile, budget)
        assert best_s is not None, "a plan was found, so brute force finds one"
        rows.append({
            "seed": seed, "stages": len(profile.stages), "percent": percent,
            "equal": abs(plan.step_s - best_s) <= SAME * max(best_s, 1.0),
            "bound_holds": plan.lower_bound_s <= best_s * (1 + SAME), "optimal": plan.status == "optimal",
            "excess": plan.step_s / best_s - 1 if best_s else 0.0, "seconds": took_s,
        })  # fmt: skip
    return rows


def without_false_proofs(seed: int, percents: tuple[int, ...]) -> list[dict[str, Any]]:
    """One odd chain, with or without a limit on the host, at a few budgets; nothing of one with too many plans."""
    profile, host = moving_residents(seed)
    limits = Limits(gap=0.0, host_bytes=host)
    combinations = brute_force.combinations(profile)
    if subsets(profile, combinations) > MOST_SUBSETS:
        return []
    found, most = smallest_peak(profile, limits), everything_kept_bytes(profile)
    least = brute_force.smallest_peak(profile, host_bytes=host, within=combinations)
    row = {"seed": seed, "stages": len(profile.stages), "host_bytes": host, "residents": len(profile.residents)}
    wrong = not found.bound_bytes <= least <= found.peak_bytes or (found.proven and found.peak_bytes > least)
    rows: list[dict[str, Any]] = [
        {**row, "peak": found.peak_bytes, "peak_proven": found.proven, "false": wrong}
    ]  # fmt: skip
    for percent in percents:
        budget = found.peak_bytes + max(0, most - found.peak_bytes) * percent // 100
        plan = sound(profile, solve_profile(profile, budget, limits), host)
        # Only plans below its step matter.
        better = brute_force.fastest_plan(
            profile, budget, host_bytes=host, within=combinations, below_s=plan.step_s * (1 - SAME)
        )
        best_s = plan.step_s if better is None else better[0].makespan_s
        rows.append({
            **row, "percent": percent, "optimal": plan.status == "optimal",
            "excess": plan.step_s / best_s - 1 if best_s else 0.0,
            "false": plan.lower_bound_s > best_s * (1 + SAME) or (plan.status == "optimal" and better is not None),
        })  # fmt: skip
    return rows


def against_rotor(seed: int, seconds: float) -> list[dict[str, Any]]:
    """One random textbook chain at three budgets, recompute only."""
    profile = textbook(seed)
    only = ("keep", "recompute")
    least, most = smallest_peak(profile, Limits(actions=only)).peak_bytes, everything_kept_bytes(profile)
    rows = []
    for percent in (0, 20, 60):
        budget = least + max(0, most - least) * percent // 100
        row: dict[str, Any] = {"seed": seed, "stages": len(profile.stages), "percent": percent, "excess": None}
        begin = time.perf_counter()
        limits = Limits(actions=only, gap=0.0, time_limit_s=seconds)
        ours = sound_if_any(profile, lambda limits=limits, budget=budget: solve_profile(profile, budget, limits))
        row |= {
            "optimal": ours is not None and ours.status == "optimal",
            "gap": math.inf if ours is None else ours.gap,
            "seconds": time.perf_counter() - begin,
        }
        rotor = sound_if_any(profile, lambda budget=budget: BASELINES["rotor"](profile, budget))
        if rotor is not None:
            row["excess"] = math.inf if ours is None else ours.step_s / rotor.step_s - 1
        rows.append(row)
    return rows


def _of_odd(rows: Sequence[dict[str, Any]]) -> str:
    plans, peaks = [row for row in rows if "percent" in row], [row for row in rows if "peak" in row]
    return (
        f"{len(peaks)} odd chains, {sum(row['residents'] > 0 for row in peaks)} of them with weights, gradients or "
        f"optimizer state that move, {len(plans)} plans: said to be optimal in {sum(row['optimal'] for row in plans)}, "
        f"falsely or with a bound that is too high in {sum(row['false'] for row in plans)}; worst excess of the others "
        f"{max((row['excess'] for row in plans), default=0.0):.3%}; smallest peaks said to be proven in "
        f"{sum(row['peak_proven'] for row in peaks)} of {len(peaks)}, wrong in {sum(row['false'] for row in peaks)}"
    )


def _of_brute(chains: int, rows: Sequence[dict[str, Any]]) -> str:
    return (
        f"{chains} chains, {len(rows)} plans: equal to brute force in {sum(row['equal'] for row in rows)}, said to be "
        f"optimal in {sum(row['optimal'] for row in rows)}; bound above the optimum in "
        f"{sum(not row['bound_holds'] for row in rows)}; worst excess "
        f"{max((row['excess'] for row in rows), default=0.0):.3%}"
    )


def _of_rotor(chains: int, rows: Sequence[dict[str, Any]]) -> str:
    excess = [row["excess"] for row in rows if row["excess"] is not None]
    return (
        f"{chains} chains, {len(rows)} plans, recompute only: behind rotor in {sum(x > SAME for x in excess)}; rotor "
        f"fits in {len(excess)}; least excess {min(excess, default=0.0):.3%}; proven to be optimal "
        f"{sum(row['optimal'] for row in rows)}, largest gap {max((row['gap'] for row in rows), default=0.0):.3%}, "
        f"seconds {max((row['seconds'] for row in rows), default=0.0):.2f} at most"
    )


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--chains", type=int, default=100, help="random chains against brute force")
    parser.add_argument(
        "--odd", type=int, default=7500, help="odd chains whose proofs are examined, less those with too many plans"
    )
    parser.add_argument("--rotor", type=int, default=200, help="random chains against rotor")
    parser.add_argument("--budgets", type=documents.numbers, default=[0, 30, 70], help="per cent of the way")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of a solve against rotor")
    parser.add_argument("--workers", type=int, default=1, help="chains in work at once, each in a process")
    args = parser.parse_args()
    percents = tuple(args.budgets)
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:

        def rows(of: Callable[[int], list[dict[str, Any]]], first: int, chains: int) -> list[dict[str, Any]]:
            return list(itertools.chain.from_iterable(pool.map(of, range(first, first + chains))))

        brute = rows(partial(against_brute_force, percents=percents), 0, args.chains)
        odd = rows(partial(without_false_proofs, percents=percents), 20_000, args.odd)
        rotor = rows(partial(against_rotor, seconds=args.seconds), 10_000, args.rotor)
    summary = [_of_odd(odd), _of_brute(args.chains, brute), _of_rotor(args.rotor, rotor)]
    print(*summary, sep="\n")
    wrong = [row for row in brute if not (row["equal"] and row["bound_holds"])] + [row for row in odd if row["false"]]
    wrong += [row for row in rotor if row["excess"] is not None and row["excess"] > SAME]
    for row in wrong:
        print("WRONG", row)
    documents.save(args.out, "exactness.json", {"summary": summary, "brute_force": brute, "odd": odd, "rotor": rotor})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
