"""Real steps where memory is tightest: this planner's beside greedy's (PoocH) and an earlier version's.

    git worktree add --detach ../earlier 82e88e9
    python experiments/tight_steps.py --earlier ../earlier --out experiments/results
    python experiments/tight_steps.py --earlier ../earlier --link-ratio 4 --out experiments/results
    python experiments/tight_steps.py --quick

Budgets are percentages of the way from the smallest feasible peak to the peak with everything kept; a planner that
finds no plan for one has the smallest budget that it names. All plan from one profile, the earlier version in a process
of its own. In each cell a rival's plan is applied and its peak measured (allocator events); ours is planned for that
peak, and its measured peak must not be above it. Then the rival, ours and the plain model take steps in turn, a tenth
of the rounds in each of ten fresh copies, which every other time are made in reverse order.

A cell is won where the bootstrap interval of the median ratio, our step / the rival's in the same round, lies below 1,
lost where it lies above. Predicted steps are those of a replay by the referee. The heap keeps its pages, as in
small_steps.py. Dropout is off, as in compare_real.py; all first steps draw from one seed, and gradients are compared.

On the CPU copies within memory are nearly free. With --link-ratio R plans are made for a link on which moving all that
is kept takes R times the forward, as between a GPU and its host, and real copies sleep until they have taken as long.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import documents
import numpy as np
import torch
from compare_greedy import with_link
from compare_real import GIB, INTERVAL, MIB, RESAMPLES, SLACK, Contender, enter, make, race, verdict

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.cli.demo import keep_pages
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.link import Link
from ckptplan.referee import simulate
from ckptplan.runtime.swap.stores import disk
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import smallest_peak

SCHEMA = "ckptplan.tight_steps/2"
GREEDY = "pooch"
CLEAR = 0.9
"""Ratio up to which our step counts as clearly shorter: by a tenth."""
QUIET, PROFILES = 0.02, 4
"""Error of a profile's step above which it is made again, and how many are made at most: the best one counts. A planner
takes a simpler plan where a faster one gains less than the error."""
EARLIER = """
import sys, ckptplan
profile, out, budget_gb, time_limit_s = *sys.argv[1:3], *map(float, sys.argv[3:])
profile = ckptplan.Profile.load(profile)
try:
    plan = ckptplan.solve(profile, budget_gb, gap=0.0, time_limit_s=time_limit_s)
except ckptplan.InfeasibleBudgetError as error:
    plan = ckptplan.solve(profile, error.min_peak_bytes / 2**30, gap=0.0, time_limit_s=time_limit_s)
plan.save(out)
"""


@dataclass(frozen=True)
class Side:
    """One planner's plan in a cell; predictions are the referee's, and `times_s` has the steps of each copy."""

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_s: float
    measured_s: float
    times_s: list[list[float]]
    actions: dict[str, int]
    transfers: int
    moved_bytes: int
    segments: int


@dataclass(frozen=True)
class Cell:
    """A rival's plan and ours at one measured peak; `over` is our step / the rival's, and its interval's ends.

    `percents` are the budgets that led the rival to this plan. `ours` is None where no plan of ours fits.
    `profile_error` is the standard error that the profile says its step has, as a share.
    """

    model: str
    rival: str
    percents: list[float]
    plain_s: float
    predicted_plain_s: float
    profile_error: float
    theirs: Side
    ours: Side | None
    over: tuple[float, float, float] | None
    predicted_over: float | None
    gradients: str

    @property
    def outcome(self) -> str:
        """One of "won", "lost", "even", and "none" where nothing was compared."""
        if self.over is None:
            return "none"
        return "won" if self.over[2] < 1 else "lost" if self.over[1] > 1 else "even"


class Planners:
    """Plans of the three planners for one profile."""

    def __init__(self, profile: ckptplan.Profile, limit_s: float, earlier: Path | None) -> None:
        self.profile, self.limit_s, self.earlier = profile, limit_s, earlier

    def ours(self, budget_bytes: int) -> ckptplan.Plan:
        return ckptplan.solve(self.profile, budget_bytes / GIB, gap=0.0, time_limit_s=self.limit_s)

    def rival(self, name: str, budget_bytes: int) -> ckptplan.Plan:
        """The plan for a budget, or for the smallest one that the planner names."""
        if name == "earlier":
            return self._earlier(budget_bytes)
        try:
            return BASELINES[name](self.profile, budget_bytes)
        except InfeasibleBudgetError as error:
            return BASELINES[name](self.profile, error.min_peak_bytes)

    def _earlier(self, budget_bytes: int) -> ckptplan.Plan:
        assert self.earlier is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("profile.json", "plan.json")]
            self.profile.save(files[0])
            run = [sys.executable, "-c", EARLIER, *files, repr(budget_bytes / GIB), repr(self.limit_s)]
            subprocess.run(run, check=True, cwd=self.earlier)  # where Python finds the package first
            return ckptplan.Plan.load(files[1])


@contextlib.contextmanager
def slowed(link: Link) -> Iterator[None]:
    """Copies to and from the swap file take at least as long as by the rates of `link`."""

    def slow(copy: Callable[..., None], rate: float) -> Callable[..., None]:
        def run(fd: int, view: memoryview, offset: int) -> None:
            end = time.perf_counter() + len(view) / rate
            copy(fd, view, offset)
            time.sleep(max(0.0, end - time.perf_counter()))

        return run

    before = disk._write, disk._read
    disk._write, disk._read = slow(before[0], link.out_bytes_per_s), slow(before[1], link.in_bytes_per_s)
    try:
        yield
    finally:
        disk._write, disk._read = before


class Bench:
    """A model, its inputs and its profile."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.rounds, self.copies, self.ratio = name, args.rounds, args.copies, args.link_ratio
        self.model, self.inputs = make(name, args.quick)
        profiles = [ckptplan.profile(copy.deepcopy(self.model), self.inputs)]
        while profiles[-1].step_error > QUIET and len(profiles) < PROFILES:
            profiles.append(ckptplan.profile(copy.deepcopy(self.model), self.inputs))
        self.profile = min(profiles, key=lambda profile: profile.step_error)
        if self.ratio:
            self.profile = with_link(self.profile, self.ratio)
        self.planners = Planners(self.profile, args.time_limit, args.earlier)

    def budgets(self, percents: list[float]) -> dict[float, int]:
        least, most = smallest_peak(self.profile).peak_bytes, everything_kept_bytes(self.profile)
        return {percent: least + int((most - least) * percent / 100) for percent in percents}

    def entered(self, name: str, plan: ckptplan.Plan | None, stack: contextlib.ExitStack) -> Contender:
        """A copy of the model that trains with the plan, after its first steps."""
        mine = copy.deepcopy(self.model)
        if plan is not None:
            handle = stack.enter_context(ckptplan.apply(mine, plan, check="off"))
            stack.enter_context(handle.unmetered())
        torch.manual_seed(0)
        return enter(name, mine, functools.partial(mine, **self.inputs), self.inputs)

    def cell(self, rival: str, percents: list[float], plan: ckptplan.Plan) -> Cell:
        """Measure the rival's peak, plan ours for it, and time both, in several copies of the model."""
        plans: dict[str, ckptplan.Plan | None] = {"plain": None, rival: plan}
        times = {name: _Times() for name in (*plans, "ours")}
        for number in range(self.copies):
            with contextlib.ExitStack() as stack:
                if self.ratio:
                    stack.enter_context(slowed(self.profile.link))
                names = list(plans) if number % 2 == 0 else list(reversed(plans))
                entered = {name: self.entered(name, plans[name], stack) for name in names}
                if (
                    number == 0
                    and (found := self.within(entered[rival].peak_bytes, plan.peak_bytes, stack)) is not None
                ):
                    plans["ours"], entered["ours"] = found
                race(list(entered.values()), self.rounds // self.copies)
                for name, contender in entered.items():
                    times[name].add(contender, entered["plain"])
        own, plain, theirs, ours = plans.get("ours"), times["plain"], times[rival], times["ours"]
        their_side, our_side = self.side(plan, theirs), None if own is None else self.side(own, ours)
        return Cell(
            model=self.name,
            rival=rival,
            percents=percents,
            plain_s=plain.step_s,
            predicted_plain_s=self.profile.baseline_step_s,
            profile_error=self.profile.step_error,
            theirs=their_side,
            ours=our_side,
            over=None if own is None else median_of_copies(np.array(ours.of_copies) / np.array(theirs.of_copies)),
            predicted_over=None if our_side is None else our_side.predicted_s / their_side.predicted_s,
            gradients="equal" if theirs.equal and ours.equal else "differ",
        )

    def within(
        self, measured_bytes: int, predicted_bytes: int, stack: contextlib.ExitStack
    ) -> tuple[ckptplan.Plan, Contender] | None:
        """Our plan whose measured peak is within the rival's; None where there is none.

        Predicted peaks are upper bounds, so a budget above the rival's measured peak is tried first, then the predicted
        peak of the rival's own plan, and the measured one last.
        """
        largest = max(int(measured_bytes * (1 + SLACK)), predicted_bytes)
        for budget_bytes in dict.fromkeys((largest, max(predicted_bytes, measured_bytes), measured_bytes)):
            with contextlib.suppress(InfeasibleBudgetError):
                plan = self.planners.ours(budget_bytes)
                found = self.entered("ours", plan, stack)
                if found.peak_bytes <= measured_bytes:
                    return plan, found
        return None

    def side(self, plan: ckptplan.Plan, times: _Times) -> Side:
        timeline = simulate(self.profile, plan)
        options = [choice.option for choice in plan.choices]
        return Side(
            budget_bytes=plan.budget_bytes,
            predicted_peak_bytes=timeline.peak_bytes,
            measured_peak_bytes=times.peak_bytes,
            predicted_s=timeline.makespan_s,
            measured_s=times.step_s,
            times_s=times.of_copies,
            actions={option: options.count(option) for option in dict.fromkeys(options)},
            transfers=sum(len(choice.transfers) for choice in plan.choices),
            moved_bytes=plan.host_bytes,
            segments=len(plan.segments),
        )


@dataclass
class _Times:
    """The steps of each copy of a model, its largest peak, and whether its gradients are the plain model's."""

    of_copies: list[list[float]] = field(default_factory=list)
    peak_bytes: int = 0
    equal: bool = True

    def add(self, contender: Contender, plain: Contender) -> None:
        self.of_copies.append(contender.times_s)
        self.peak_bytes = max(self.peak_bytes, contender.peak_bytes)
        self.equal = self.equal and verdict(contender.gradients, plain.gradients, 0.0) == "equal"

    @property
    def step_s(self) -> float:
        return float(np.median(self.of_copies))


def median_of_copies(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """The median of ratios, shape (copies, rounds), and its percentile bootstrap interval of 95 %.

    Where a copy's tensors lie makes all its steps faster or slower, so copies are drawn first, and rounds within them
    (Davison and Hinkley, 1997, Bootstrap Methods and their Application, 3.8).
    """
    draw = np.random.default_rng(0)
    copies, rounds = ratios.shape
    drawn = draw.integers(copies, size=(RESAMPLES, copies, 1)), draw.integers(rounds, size=(RESAMPLES, copies, rounds))
    low, high = np.percentile(np.median(ratios[drawn], axis=(1, 2)), INTERVAL)
    return float(np.median(ratios)), float(low), float(high)


def measure(bench: Bench, percents: list[float], rivals: list[str]) -> list[Cell]:
    """All cells of a model; budgets for which a rival has the same plan share one."""
    cells = []
    budgets = bench.budgets(percents)
    print(f"{bench.name}: {len(bench.profile.stages)} stages, profile ± {bench.profile.step_error:.1%}", flush=True)
    for rival in rivals:
        plans: dict[Any, tuple[ckptplan.Plan, list[float]]] = {}
        for percent, budget_bytes in budgets.items():
            plan = bench.planners.rival(rival, budget_bytes)
            plans.setdefault((plan.choices, plan.segments), (plan, []))[1].append(percent)
        for plan, shared in plans.values():
            cells.append(bench.cell(rival, shared, plan))
            print(line(cells[-1]), flush=True)
    return cells


HEAD = (
    f"{'model':<9}{'rival':<9}{'budgets':<9}{'peak MiB':>9}{'ours':>8}{'transfers':>10}{'ours':>5}{'moved MiB':>10}"
    f"{'ours':>7}{'step/plain':>11}{'ours':>6}{'ours/rival':>11}{'interval':>14}{'predicted':>10}"
)


def line(cell: Cell) -> str:
    theirs, ours = cell.theirs, cell.ours
    where = ",".join(f"{percent:g}" for percent in cell.percents) + " %"
    text = f"{cell.model:<9}{cell.rival:<9}{where:<9}{theirs.measured_peak_bytes / MIB:>9.2f}"
    if ours is None or cell.over is None:
        return f"{text}  no plan of ours fits"
    ratio, low, high = cell.over
    return (
        f"{text}{ours.measured_peak_bytes / MIB:>8.2f}{theirs.transfers:>10}{ours.transfers:>5}"
        f"{theirs.moved_bytes / MIB:>10.1f}{ours.moved_bytes / MIB:>7.1f}{theirs.measured_s / cell.plain_s:>11.3f}"
        f"{ours.measured_s / cell.plain_s:>6.3f}{ratio:>11.3f}{f'{low:.3f}-{high:.3f}':>14}{cell.predicted_over:>10.3f}"
        f"  {cell.outcome}"
    )


def summary(cells: list[Cell], rivals: list[str]) -> list[str]:
    lines = []
    for rival in rivals:
        mine = [cell for cell in cells if cell.rival == rival]
        counts = ", ".join(f"{sum(c.outcome == o for c in mine)} {o}" for o in ("won", "even", "lost", "none"))
        clear = [f"{c.model} at {c.percents[0]:g} % ({c.over[0]:.3f})" for c in mine if c.over and c.over[0] <= CLEAR]
        lines.append(f"{rival}: {counts}; steps at least 10 % shorter in {len(clear)}: {', '.join(clear) or 'none'}")
    return lines


def complaints(cells: list[Cell]) -> list[str]:
    """What must not happen."""
    found = []
    for c in cells:
        where = f"{c.model} at {c.percents[0]:g} %"
        if c.ours is None:
            found.append(f"{where}: no plan of ours at the measured peak of {c.rival}")
        elif c.ours.measured_peak_bytes > c.theirs.measured_peak_bytes:
            found.append(f"{where}: our measured peak is above that of {c.rival}")
        if c.outcome == "lost" and c.rival == GREEDY:
            found.append(f"{where}: greedy is faster")
        if c.gradients != "equal":
            found.append(f"{where}: gradients differ from the plain model's")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for tight_steps.json")
    parser.add_argument("--models", default="gpt2,t5,unet,swin,mixtral", help="names in models.py")
    parser.add_argument("--budgets", default="0,2,5", help="comma-separated percentages")
    parser.add_argument("--earlier", type=Path, help="checkout of an earlier commit, whose planner is a rival, too")
    parser.add_argument("--link-ratio", type=float, help="make copies this many times slower than the forward")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each")
    parser.add_argument("--copies", type=int, default=10, help="copies of each model that share the rounds")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each plan of ours")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two small models, 4 rounds, 2 s for each plan")
    args = parser.parse_args()
    if args.quick:
        args.models, args.rounds, args.copies, args.time_limit = "gpt2,unet", 4, 2, 2.0
    if args.copies < 1 or args.rounds < args.copies or args.rounds % args.copies:
        parser.error(f"--rounds {args.rounds} must be a multiple of --copies {args.copies}, 1 or more")
    keep_pages(True)
    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    rivals = (["earlier"] if args.earlier else []) + [GREEDY]
    print(HEAD)
    cells = []
    for name in args.models.split(","):
        cells += measure(Bench(name, args), [float(x) for x in args.budgets.split(",")], rivals)
    lines, wrong = summary(cells, rivals), complaints(cells)
    print(*lines, *(f"VIOLATION {text}" for text in wrong), sep="\n")
    if args.out is not None:
        head = ["git", "-C", str(args.earlier), "rev-parse", "--short", "HEAD"]
        document = {
            "schema": SCHEMA,
            "command": documents.command(),
            "environment": documents.environment(args.threads),
            "earlier": args.earlier and subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip(),
            "rounds": args.rounds,
            "copies": args.copies,
            "time_limit_s": args.time_limit,
            "quick": args.quick,
            "took_s": time.perf_counter() - began,
            "summary": lines,
            "wrong": wrong,
            "cells": [asdict(cell) | {"outcome": cell.outcome} for cell in cells],
        }
        which = f"_link_{args.link_ratio:g}" if args.link_ratio else ""
        documents.write(document, args.out / f"tight_steps{which}.json")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
