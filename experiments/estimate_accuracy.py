"""How far are the estimated bytes of a step from what the CPU allocator really hands out?

    python experiments/estimate_accuracy.py --out experiments/results
    python experiments/estimate_accuracy.py --drawn --jobs 2 --out experiments/results
    python experiments/estimate_accuracy.py --models gpt2,lstm --sizes 1 --plans without

A *run* is one model with one optimizer, plain or under a plan. Two whole steps are measured from the allocator's events
(`tests/measured_phases.py`), on an instance of the model that nothing else touches, and estimated on another. Each step
of a run is a case: its peak, and the live bytes at both ends of each of its phases.

Eleven architectures have four batch sizes or lengths, and plans for a budget half-way between the smallest peak and
everything kept, at the first size with options inside stages. Under a plan the optimizers take turns from size to size.
With `--drawn` the models are twenty classes drawn by a seed from all of `transformers` and `diffusers`
(drawn_models.py), trained with AdamW, and the plan keeps everything; what can't be built, profiled or estimated is a
row of the table. Prints PASS or FAIL for each promise, and exits with 1 on a FAIL.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import documents
import torch
from drawn_models import BASES, build, draw, drawn, loss_of
from measured_phases import PhaseBytes, measure_phases
from models import MODELS

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.request import Training
from ckptplan.core.units import GIB, format_bytes
from ckptplan.solving import smallest_peak
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.training.step import make_step

MEDIAN, WORST, UNDER, BOUNDARY = 0.0, 0.01, 0.001, 0.01
"""The promise: median and worst error of the peak, furthest below it, worst error at a phase boundary."""
TIME_LIMIT_S = 900.0
SIZES: Mapping[str, Sequence[Mapping[str, int]]] = {
    "gpt2": [{"layers": 4, "batch": 2, "length": n} for n in (96, 128, 192, 256)],
    "bert": [{"layers": 4, "batch": n, "length": 128} for n in (1, 3, 4, 6)],
    "t5": [{"layers": 2, "batch": 2, "length": n} for n in (96, 128, 192, 256)],
    "vit": [{"layers": 4, "batch": n} for n in (1, 2, 3, 4)],
    "swin": [{"layers": 2, "batch": n} for n in (1, 2, 3, 4)], "convnext": [{"batch": n} for n in (2, 3, 5, 8)],
    "resnet50": [{"batch": n} for n in (4, 8, 12, 20)],
    "llama": [{"layers": 4, "batch": 2, "length": n} for n in (96, 128, 192, 256)],
    "mixtral": [{"batch": n, "length": 128} for n in (1, 2, 3, 5)],
    "lstm": [{"batch": 8, "length": n} for n in (32, 64, 96, 160)], "unet": [{"batch": n} for n in (1, 2, 3, 4)],
}  # fmt: skip
"""Architecture -> what `experiments/models.py` makes it with: four batch sizes or lengths."""
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
}
PLANS = ("without", "with")


@dataclass(frozen=True)
class Phase:
    """One phase, measured and estimated."""

    name: str
    measured: PhaseBytes
    estimated: PhaseBytes

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
        size = " x ".join(str(value) for key, value in self.size.items() if key != "layers")
        return f"{self.model.rpartition('.')[2]} {size}, {self.optimizer}, {self.plan} plan, step {self.step}"

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
    def worst_boundary(self) -> float:
        return max((e for p in self.phases for e in p.boundary_errors), key=abs)


def error(estimated: int, measured: int) -> float:
    if estimated == measured:
        return 0.0  # also where nothing is there yet
    return estimated / measured - 1 if measured else math.inf


@dataclass(frozen=True)
class Group:
    """What one process does: one architecture at one size, or a drawn class (`index` None)."""

    model: str
    index: int | None
    optimizers: tuple[str, ...]
    plans: tuple[str, ...]
    time_limit_s: float

    @property
    def size(self) -> Mapping[str, int]:
        return {} if self.index is None else SIZES[self.model][self.index]


@dataclass(frozen=True)
class Outcome:
    """What a group gave; `failed` has what could not be built, planned, measured or estimated, and why."""

    cases: tuple[Case, ...]
    failed: tuple[str, ...]
    unexplained_bytes: int = 0


def run(group: Group) -> Outcome:
    """All cases of one group; what fails doesn't stop the others."""
    torch.set_num_threads(1)
    cases: list[Case] = []
    failed: list[str] = []
    left = [0]
    try:
        loss_fn = None if group.index is not None else loss_of
        make = build(group.model).make if group.index is None else lambda: MODELS[group.model](**group.size)
    except Exception as problem:
        return Outcome((), (f"{group.model}, build: {documents.brief(problem)}",))

    def planned() -> Plan:
        model, inputs = make()
        profile = ckptplan.profile(model, inputs, loss_fn=loss_fn, menus=group.index == 0)
        if group.index is None:
            return ckptplan.solve(profile, 1024.0)
        half = (smallest_peak(profile).peak_bytes + everything_kept_bytes(profile)) // 2
        return ckptplan.solve(profile, half / GIB, time_limit_s=group.time_limit_s, gap=0.0)

    def compared(optimizer: str, plan: Plan | None) -> list[Phase]:
        model, inputs = make()
        handle = None if plan is None else ckptplan.apply(model, plan)
        measured = measure_phases(make_step(model, Training(inputs, loss_fn=loss_fn)), OPTIMIZERS[optimizer](model))
        if handle is not None:
            handle.remove()
        left.append(measured.unexplained_bytes)
        model, inputs = make()
        found = ckptplan.estimate(model, inputs, loss_fn=loss_fn, optimizer=OPTIMIZERS[optimizer](model), plan=plan)
        by_name = {p.name: PhaseBytes(p.name, p.start_bytes, p.end_bytes, p.peak_bytes) for p in found.phases}
        return [Phase(m.name, m, by_name[m.name]) for m in measured.phases]

    def tried(what: str, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as problem:  # a case that can't be had is a result, and makes the whole fail
            line = traceback.extract_tb(problem.__traceback__)[-1]
            at = f"{Path(line.filename).name}:{line.lineno}"
            failed.append(f"{group.model} {dict(group.size)}, {what}: {documents.brief(problem)} ({at})")
            return None

    for kind in group.plans:
        plan = tried("planning", planned) if kind == "with" else None
        if kind == "with" and plan is None:
            continue
        turn = (group.index or 0) % len(group.optimizers)
        for optimizer in group.optimizers if plan is None else group.optimizers[turn : turn + 1]:
            phases = tried(f"{optimizer}, {kind} plan", compared, optimizer, plan) or []
            for step in (1, 2) if phases else ():  # the loaded model belongs to the first step
                own = tuple(p for p in phases if p.name.endswith(" 2") == (step == 2))
                cases.append(Case(group.model, group.size, optimizer, kind, step, own))
    return Outcome(tuple(cases), tuple(failed), max(left, key=abs))


def summaries(cases: Sequence[Case]) -> dict[str, dict[str, float | int]]:
    """Per model and for all: errors of peaks and of boundaries."""
    out: dict[str, dict[str, float | int]] = {}
    for name in [*dict.fromkeys(c.model for c in cases), "all"]:
        some = [c for c in cases if name in (c.model, "all")]
        peaks = [c.peak_error for c in some]
        out[name] = {
            "cases": len(some), "median": statistics.median(map(abs, peaks)), "worst": max(map(abs, peaks)),
            "furthest_under": min(0.0, *peaks), "worst_boundary": max((c.worst_boundary for c in some), key=abs),
        }  # fmt: skip
    return out


def checks(cases: Sequence[Case], failed: Sequence[str], drawn: bool) -> list[documents.Check]:
    """The promises, and whether each is kept; of drawn classes some can't be built, and boundaries aren't promised."""
    errors = [c.peak_error for c in cases] or [math.nan]
    median, under = statistics.median(map(abs, errors)), [c.name for c in cases if c.peak_error < -UNDER]
    far = [c.name for c in cases if abs(c.peak_error) > WORST]
    off = [c.name for c in cases if abs(c.worst_boundary) > BOUNDARY]
    bad = [text for text in failed if not (drawn and ", build: " in text)]
    n = len(cases)
    found = [
        (n > 0 and not bad, f"{n} cases, {len(bad)} failures: {'; '.join(bad) or 'none'}"),
        (median <= MEDIAN, f"median error of the peak at most {MEDIAN:.0%}: {median:.3%}"),
        (not far, f"no peak off by more than {WORST:.0%}: {', '.join(far) or 'none'}"),
        (not under, f"no peak under by more than {UNDER:.1%}: {', '.join(under) or 'none'}"),
    ]
    boundaries = 2 * sum(len(c.phases) for c in cases)
    return found if drawn else [*found, (not off, f"{boundaries} boundaries within {BOUNDARY:.0%}: not {off or 'one'}")]


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--drawn", action="store_true", help="classes drawn by a seed in place of the architectures")
    parser.add_argument("--seed", type=int, help="draw other classes, twenty; without it, the committed draw")
    parser.add_argument("--models", help="comma-separated architectures, or qualified names of classes with --drawn")
    parser.add_argument("--sizes", type=int, default=4, choices=range(1, 5), help="how many of an architecture's sizes")
    parser.add_argument("--optimizers", type=documents.among(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--plans", type=documents.among(PLANS), default=list(PLANS))
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for each plan's solving")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    args = parser.parse_args()
    if args.drawn:
        names = drawn("estimate_drawn") if args.seed is None else draw(args.seed, 20, tuple(BASES))
    else:
        names = list(SIZES)
    names = args.models.split(",") if args.models else names
    optimizers = ("adamw",) if args.drawn else tuple(args.optimizers)
    indices = [None] if args.drawn else range(args.sizes)
    groups = [Group(n, k, optimizers, tuple(args.plans), args.time_limit) for n in names for k in indices]
    begin = time.perf_counter()
    cases: list[Case] = []
    failed: list[str] = []
    unexplained = [0]
    for group, found in documents.in_processes(run, groups, jobs=args.jobs, time_limit_s=TIME_LIMIT_S):
        outcome = found if isinstance(found, Outcome) else Outcome((), (f"{group.model}: {found}",))
        cases += outcome.cases
        failed += outcome.failed
        unexplained.append(outcome.unexplained_bytes)
        worst = max((abs(c.peak_error) for c in outcome.cases), default=math.nan)
        print(f"{group.model} {dict(group.size)}: worst peak error {worst:.3%} {outcome.failed or ''}", flush=True)
    summary = summaries(cases) if cases else {}
    rows = [
        (c.name, format_bytes(c.measured_bytes), format_bytes(c.estimated_bytes), f"{c.peak_error:+.3%}",
         f"{c.worst_boundary:+.3%}")
        for c in cases
    ]  # fmt: skip
    documents.show(documents.table(("case", "measured", "estimated", "error", "worst boundary"), rows))
    cells = [(name, *(f"{value:.3%}" if isinstance(value, float) else value for value in of.values()))
             for name, of in summary.items()]  # fmt: skip
    documents.show(documents.table(("model", "cases", "median", "worst", "furthest under", "worst boundary"), cells))
    results = checks(cases, failed, args.drawn)
    kept = documents.told(results)
    document = {
        "seconds": time.perf_counter() - begin, "checks": [{"passed": ok, "what": text} for ok, text in results],
        "unexplained_bytes": max(unexplained, key=abs), "summary": summary, "failed": failed,
        "cases": [asdict(case) for case in cases],
    }  # fmt: skip
    documents.save(args.out, "estimate_drawn.json" if args.drawn else "estimate_accuracy.json", document)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
