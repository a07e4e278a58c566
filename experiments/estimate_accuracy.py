"""How far are the estimated bytes of a step from what the CPU allocator really hands out?

    python experiments/estimate_accuracy.py --out experiments/results
    python experiments/estimate_accuracy.py --out /tmp/quick --models gpt2,lstm --sizes 1 --plans without

Prints PASS or FAIL for each promise, and exits with 1 on a FAIL.

A *run* is one architecture at one batch size or length, with one optimizer, plain or under a plan. Two whole steps are
measured from the allocator's events (`tests/measured_phases.py`), on an instance of the model that nothing else
touches, and estimated on another. Each step of a run is a case: its peak, and the live bytes at both ends of each of
its phases.

Plans are made for a budget half-way between the smallest peak and everything kept. At an architecture's first size
stages have options inside them, as `ckptplan.solve` gives them; at the others whole stages alone, which is quicker.
Under a plan the optimizers take turns from size to size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import transformers
from measured_phases import PhaseBytes, measure_phases
from models import MODELS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.request import Training
from ckptplan.core.schedule import residency
from ckptplan.core.units import GIB, format_bytes
from ckptplan.runtime.step import make_step
from ckptplan.solving import smallest_peak

SCHEMA = "ckptplan.estimate_accuracy/1"

MEDIAN, WORST, UNDER, BOUNDARY = 0.0, 0.01, 0.001, 0.01
"""The promise: median and worst error of the peak, furthest below it, worst error at a phase boundary."""
LEAST_CASES = 40

SIZES: Mapping[str, Sequence[Mapping[str, int]]] = {
    "gpt2": [{"layers": 4, "batch": 2, "length": n} for n in (96, 128, 192, 256)],
    "bert": [{"layers": 4, "batch": n, "length": 128} for n in (1, 3, 4, 6)],
    "t5": [{"layers": 2, "batch": 2, "length": n} for n in (96, 128, 192, 256)],
    "vit": [{"layers": 4, "batch": n} for n in (1, 2, 3, 4)],
    "swin": [{"layers": 2, "batch": n} for n in (1, 2, 3, 4)],
    "convnext": [{"batch": n} for n in (2, 3, 5, 8)],
    "resnet50": [{"batch": n} for n in (4, 8, 12, 20)],
    "llama": [{"layers": 4, "batch": 2, "length": n} for n in (96, 128, 192, 256)],
    "mixtral": [{"batch": n, "length": 128} for n in (1, 2, 3, 5)],
    "lstm": [{"batch": 8, "length": n} for n in (32, 64, 96, 160)],
    "unet": [{"batch": n} for n in (1, 2, 3, 4)],
}
"""Architecture -> what `experiments/models.py` makes it with: four batch sizes or lengths."""
OPTIMIZERS = ("sgd", "adamw")
PLANS = ("without", "with")


@dataclass(frozen=True)
class Phase:
    """One phase, measured and estimated."""

    name: str
    measured: PhaseBytes
    estimated: PhaseBytes

    @property
    def peak_error(self) -> float:
        return error(self.estimated.peak_bytes, self.measured.peak_bytes)

    @property
    def boundary_errors(self) -> tuple[float, float]:
        return (
            error(self.estimated.start_bytes, self.measured.start_bytes),
            error(self.estimated.end_bytes, self.measured.end_bytes),
        )


@dataclass(frozen=True)
class Case:
    """One step of one run."""

    model: str
    size: Mapping[str, int]
    optimizer: str
    plan: str
    step: int
    phases: tuple[Phase, ...]

    @property
    def name(self) -> str:
        return f"{label(self.model, self.size)}, {self.optimizer}, {self.plan} plan, step {self.step}"

    @property
    def measured_bytes(self) -> int:
        return max(p.measured.peak_bytes for p in self.phases)

    @property
    def estimated_bytes(self) -> int:
        return max(p.estimated.peak_bytes for p in self.phases)

    @property
    def peak_error(self) -> float:
        return error(self.estimated_bytes, self.measured_bytes)

    @property
    def boundary(self) -> tuple[float, str]:
        """The worst error at a boundary, and where."""
        every = [
            (e, f"{side} of {p.name}")
            for p in self.phases
            for e, side in zip(p.boundary_errors, ("start", "end"), strict=True)
        ]
        return max(every, key=lambda pair: abs(pair[0]))


@dataclass(frozen=True)
class Group:
    """What one process does: one architecture at one size.

    Attributes
    ----------
    index : int
        Of the size among the architecture's.
    """

    model: str
    index: int
    optimizers: tuple[str, ...]
    plans: tuple[str, ...]
    time_limit_s: float

    @property
    def size(self) -> Mapping[str, int]:
        return SIZES[self.model][self.index]


@dataclass(frozen=True)
class Outcome:
    """What a group gave; `failed` has what could not be planned, measured or estimated, and why."""

    cases: tuple[Case, ...]
    failed: tuple[str, ...]
    unexplained_bytes: int
    measuring_s: float
    planning_s: float
    estimating_s: float


def label(model: str, size: Mapping[str, int]) -> str:
    """What tells an architecture's sizes apart."""
    return f"{model} " + " x ".join(str(value) for key, value in size.items() if key != "layers")


def error(estimated: int, measured: int) -> float:
    if estimated == measured:
        return 0.0  # also where nothing is there yet
    return estimated / measured - 1 if measured else math.inf


def build(group: Group) -> tuple[nn.Module, dict[str, Tensor]]:
    return MODELS[group.model](**group.size)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def plan_half_way(group: Group) -> Plan:
    """The plan for a budget half-way between the smallest peak and everything kept."""
    model, inputs = build(group)
    profile = ckptplan.profile(model, inputs, menus=group.index == 0)
    least = smallest_peak(profile).peak_bytes
    r = residency(profile, [stage.keep for stage in profile.stages])
    most = max(*r.forward_bytes, *r.backward_bytes)
    return ckptplan.solve(profile, (least + most) // 2 / GIB, time_limit_s=group.time_limit_s, gap=0.0)


def measured_phases(group: Group, optimizer: str, plan: Plan | None) -> tuple[tuple[PhaseBytes, ...], int]:
    """Measure two steps: their phases, and the bytes left over that nothing explains."""
    model, inputs = build(group)
    handle = None if plan is None else ckptplan.apply(model, plan)
    measured = measure_phases(make_step(model, Training(inputs)), optimizer_of(optimizer, model))
    if handle is not None:
        handle.remove()
    return measured.phases, measured.unexplained_bytes


def estimated_phases(group: Group, optimizer: str, plan: Plan | None) -> tuple[PhaseBytes, ...]:
    model, inputs = build(group)
    estimate = ckptplan.estimate(model, inputs, optimizer=optimizer_of(optimizer, model), plan=plan)
    return tuple(PhaseBytes(p.name, p.start_bytes, p.end_bytes, p.peak_bytes) for p in estimate.phases)


def laid_beside(measured: Sequence[PhaseBytes], estimated: Sequence[PhaseBytes]) -> Iterator[tuple[int, list[Phase]]]:
    """The steps' numbers and phases; the loaded model belongs to the first step."""
    by_name = {p.name: p for p in estimated}
    phases = [Phase(m.name, m, by_name[m.name]) for m in measured]
    for step in (1, 2):
        yield step, [p for p in phases if p.name.endswith(" 2") == (step == 2)]


def run(group: Group, threads: int) -> Outcome:
    """All cases of one architecture at one size; what fails doesn't stop the others."""
    torch.set_num_threads(threads)
    cases: list[Case] = []
    failed: list[str] = []
    unexplained = 0
    seconds = dict.fromkeys(("measuring", "planning", "estimating"), 0.0)

    def timed(what: str, call: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            seconds[what] += time.perf_counter() - begin

    def trouble(problem: Exception, *where: str) -> None:
        """A case that can't be had is a result, and makes the whole fail."""
        line = traceback.extract_tb(problem.__traceback__)[-1]
        at = f"{Path(line.filename).name}:{line.lineno}"
        failed.append(
            f"{', '.join((label(group.model, group.size), *where))}: {type(problem).__name__}: {problem} ({at})"
        )

    for kind in group.plans:
        plan = None
        if kind == "with":
            try:
                plan = timed("planning", plan_half_way, group)
            except Exception as problem:
                trouble(problem, "planning")
                continue
        turn = group.index % len(group.optimizers)
        for optimizer in group.optimizers if plan is None else group.optimizers[turn : turn + 1]:
            try:
                measured, left = timed("measuring", measured_phases, group, optimizer, plan)
                unexplained = max(unexplained, left, key=abs)
                estimated = timed("estimating", estimated_phases, group, optimizer, plan)
                for step, phases in laid_beside(measured, estimated):
                    cases.append(Case(group.model, group.size, optimizer, kind, step, tuple(phases)))
            except Exception as problem:
                trouble(problem, optimizer, f"{kind} plan")
    return Outcome(tuple(cases), tuple(failed), unexplained, *seconds.values())


def outcomes(groups: Sequence[Group], jobs: int, threads: int, console: Console) -> list[Outcome]:
    """All of them, in order."""
    found: dict[tuple[str, int], Outcome] = {}
    keyed = {(g.model, g.index): g for g in groups}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[Outcome], tuple[str, int]] = {pool.submit(run, g, threads): k for k, g in keyed.items()}
        for done in as_completed(waiting):
            model, index = waiting[done]
            o = found[model, index] = done.result()
            worst = max((abs(c.peak_error) for c in o.cases), default=math.nan)
            console.print(
                f"[{len(found)}/{len(groups)}] {model} {index + 1}: worst peak error {worst:.3%}; measured in "
                f"{o.measuring_s:.0f} s, planned in {o.planning_s:.0f} s, estimated in {o.estimating_s:.0f} s",
                highlight=False,
            )
    return [found[key] for key in keyed]


def case_table(cases: Sequence[Case]) -> Table:
    table = Table("case", "measured", "estimated", "error", "worst boundary", "", title="Peaks of steps")
    for c in cases:
        boundary, where = c.boundary
        off = abs(c.peak_error) > WORST or c.peak_error < -UNDER or abs(boundary) > BOUNDARY
        table.add_row(
            c.name,
            format_bytes(c.measured_bytes),
            format_bytes(c.estimated_bytes),
            f"{c.peak_error:+.3%}",
            f"{boundary:+.3%}",
            where if abs(boundary) > BOUNDARY else "",
            style="red" if off else None,
        )
    return table


def summaries(cases: Sequence[Case]) -> dict[str, dict[str, float | int]]:
    """Per architecture and for all: errors of peaks, of phases' peaks and of boundaries."""
    out: dict[str, dict[str, float | int]] = {}
    for name in [*dict.fromkeys(c.model for c in cases), "all"]:
        some = [c for c in cases if name in (c.model, "all")]
        peaks = [c.peak_error for c in some]
        out[name] = {
            "cases": len(some),
            "median": statistics.median(map(abs, peaks)),
            "worst": max(map(abs, peaks)),
            "furthest_under": min(0.0, *peaks),
            "worst_phase_peak": max((p.peak_error for c in some for p in c.phases), key=abs),
            "worst_boundary": max((c.boundary[0] for c in some), key=abs),
        }
    return out


def summary_table(found: Mapping[str, Mapping[str, float | int]]) -> Table:
    columns = ("architecture", "cases", "median", "worst", "furthest under", "worst phase's peak", "worst boundary")
    table = Table(*columns, title="Errors of the estimate")
    for name, row in found.items():
        count, *errors = row.values()
        table.add_row(name, str(count), *(f"{e:.3%}" if k < 2 else f"{e:+.3%}" for k, e in enumerate(errors)))
    return table


def checks(cases: Sequence[Case], failed: Sequence[str]) -> list[tuple[bool, str]]:
    """The promises, and whether each is kept."""
    errors = [c.peak_error for c in cases]
    median = statistics.median(map(abs, errors)) if errors else math.nan
    far = [c for c in cases if abs(c.peak_error) > WORST]
    under = [c for c in cases if c.peak_error < -UNDER]
    boundaries = [e for c in cases for p in c.phases for e in p.boundary_errors]
    off = sum(abs(e) > BOUNDARY for e in boundaries)
    n = len(cases)
    return [
        (
            n >= LEAST_CASES and not failed,
            f"at least {LEAST_CASES} cases, nothing failed: {n} cases, {len(failed)} failures",
        ),
        (median <= MEDIAN, f"median error of the peak at most {MEDIAN:.0%}: {median:.3%}"),
        (n > 0 and not far, f"no peak off by more than {WORST:.0%}: {len(far)} of {n} are"),
        (n > 0 and not under, f"no peak under by more than {UNDER:.1%}: {len(under)} of {n} are"),
        (n > 0 and not off, f"boundaries within {BOUNDARY:.0%}: {off} of {len(boundaries)} aren't"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON")
    parser.add_argument("--models", default="all", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--sizes", type=int, default=4, help="how many of an architecture's sizes, 1 to 4")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="comma-separated")
    parser.add_argument("--plans", default=",".join(PLANS), help="comma-separated: without, with")
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for each plan's solving")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--threads", type=int, default=1, help="of an operation; workers' allocations aren't seen")
    args = parser.parse_args()
    names = list(SIZES) if args.models == "all" else args.models.split(",")
    optimizers, plans = tuple(args.optimizers.split(",")), tuple(args.plans.split(","))
    for given, known in ((names, SIZES), (optimizers, OPTIMIZERS), (plans, PLANS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {unknown[0]!r}; there are {', '.join(known)}")
    if not 1 <= args.sizes <= 4 or args.jobs < 1 or args.threads < 1:
        parser.error("--sizes is 1 to 4, --jobs and --threads are 1 or more")
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    begin = time.perf_counter()
    groups = [Group(name, k, optimizers, plans, args.time_limit) for name in names for k in range(args.sizes)]
    found = outcomes(groups, args.jobs, args.threads, console)
    cases = [case for outcome in found for case in outcome.cases]
    failed = [text for outcome in found for text in outcome.failed]
    unexplained = max((o.unexplained_bytes for o in found), key=abs)
    summary = summaries(cases) if cases else {}
    results = checks(cases, failed)
    document = {
        "schema": SCHEMA,
        "command": " ".join(["python", *sys.argv]),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "threads": args.threads,
        },
        "seconds": time.perf_counter() - begin,
        "checks": [{"passed": passed, "what": text} for passed, text in results],
        "unexplained_bytes": unexplained,
        "summary": summary,
        "failed": failed,
        "cases": [asdict(case) for case in cases],
    }
    path = args.out / "estimate_accuracy.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if cases:
        console.print(case_table(cases), summary_table(summary))
    console.print(f"Measured bytes that nothing explains after two steps: at most {unexplained}", highlight=False)
    for text in failed:
        console.print(f"FAILED {text}", soft_wrap=True, highlight=False, markup=False)
    for passed, text in results:
        console.print(f"{'PASS' if passed else 'FAIL'}  {text}", soft_wrap=True, highlight=False)
    sys.exit(0 if all(passed for passed, _ in results) else 1)


if __name__ == "__main__":
    main()
