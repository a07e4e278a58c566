"""How near is a plan's predicted step time to the measured one, over models and budgets?

    python experiments/predicted_steps.py --out experiments/results
    python experiments/predicted_steps.py --quick

Budgets are percentages of the way from the smallest feasible peak to the peak with everything kept. Blocks of plain
and of planned steps run in turn; the first step of a block isn't counted, since it finds the other's memory. Two errors
are given for each plan:

- as predicted: predicted / measured - 1. A profile is timed at another moment than the steps, so on a machine whose
  load or clock changes this is mostly the machine's error, not the plan's.
- by the plain step: predicted planned step / plain step, divided by the measured one, of blocks beside each other,
  minus 1, so that what is left is the error of what the plan changes: recompute, copies, waits. Copies are scaled with
  it, though a link needn't slow down as compute does.

The heap keeps its pages, as in small_steps.py. Where the second error is above 5 %, the parts of the step
(`handle.stats()`, of steps before the blocks) that differ most are named.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import documents
import torch
from models import MODELS

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.cli.demo import keep_pages
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.request import Limits
from ckptplan.runtime.observe.stats import Stats
from ckptplan.solving.planner import smallest_peak, solve_profile

SCHEMA = "ckptplan.predicted_steps/1"
PROMISE = 0.05
STEPS = 4  # in a block, after one that doesn't count
ACCOUNTS = ("forward", "recompute", "backward", "stall")


@dataclass(frozen=True)
class Case:
    """One model under one budget; errors are predicted / measured - 1, `parts` measured - predicted as shares.

    `profile_error` is the standard error that the profile says its step has, as a share.
    """

    model: str
    percent: float
    actions: dict[str, int]
    segments: int
    predicted_s: float
    measured_s: float
    predicted_plain_s: float
    measured_plain_s: float
    profile_error: float
    error: float
    error_by_plain: float
    parts: dict[str, float]
    worst_stages: list[tuple[str, str, float]]


def measure(name: str, percents: list[float], rounds: int, limit_s: float) -> list[Case]:
    model, inputs = MODELS[name]()
    profile = ckptplan.profile(model, inputs)
    least = smallest_peak(profile).peak_bytes
    most = BASELINES["keep_all"](profile, 1 << 59).peak_bytes
    cases = []
    for percent in percents:
        try:
            plan = solve_profile(
                profile, least + int((most - least) * percent / 100), Limits(time_limit_s=limit_s, gap=0.0)
            )
        except InfeasibleBudgetError:
            continue  # the smallest peak that was found is above the least one's bound
        plain_s: list[list[float]] = []
        planned_s: list[list[float]] = []
        # The first three steps would be checked, and take longer (check_overhead.py).
        with ckptplan.apply(model, plan, profile=profile, check="off") as handle:

            def step() -> float:
                model.zero_grad()
                begin = time.perf_counter()
                output = model(**inputs)
                output["loss"].backward()
                return time.perf_counter() - begin

            def plain(handle: Any = handle, step: Any = step) -> float:
                with handle.paused():
                    return step()

            for _ in range(1 + STEPS):
                step()  # for the parts alone, which are measured in a handle's first steps
            stats = handle.stats()
            with handle.unmetered():
                for k in range(rounds):
                    for way in (plain, step) if k % 2 == 0 else (step, plain):
                        way()
                        (plain_s if way is plain else planned_s).append([way() for _ in range(STEPS)])
        cases.append(_case(name, percent, plan, profile.step_error, planned_s, plain_s, stats))
        print(_line(cases[-1]), flush=True)
    return cases


def _case(
    name: str,
    percent: float,
    plan: ckptplan.Plan,
    profile_error: float,
    planned_blocks_s: list[list[float]],
    plain_blocks_s: list[list[float]],
    stats: Stats,
) -> Case:
    measured_s, plain_s = (statistics.median(itertools.chain(*blocks)) for blocks in (planned_blocks_s, plain_blocks_s))
    blocks = zip(planned_blocks_s, plain_blocks_s, strict=True)
    ratio = statistics.median(statistics.median(planned) / statistics.median(plain) for planned, plain in blocks)
    scale = plain_s / plan.baseline_step_s
    parts = {a: ((stats.measured_s(a) or 0.0) - scale * (stats.predicted_s(a) or 0.0)) / measured_s for a in ACCOUNTS}
    stages = [
        (s.name, a, (getattr(s.measured, f"{a}_s") - scale * getattr(s.predicted, f"{a}_s")) / measured_s)
        for s in stats.stages
        if s.measured is not None and s.predicted is not None
        for a in ACCOUNTS
    ]
    actions = [
        choice.action + ("+swap" if choice.action == "recompute" and choice.moves else "") for choice in plan.choices
    ]
    return Case(
        model=name,
        percent=percent,
        actions={action: actions.count(action) for action in dict.fromkeys(actions)},
        segments=len(plan.segments),
        predicted_s=plan.step_s,
        measured_s=measured_s,
        predicted_plain_s=plan.baseline_step_s,
        measured_plain_s=plain_s,
        profile_error=profile_error,
        error=plan.step_s / measured_s - 1,
        error_by_plain=plan.step_s / plan.baseline_step_s / ratio - 1,
        parts=parts,
        worst_stages=sorted(stages, key=lambda item: -abs(item[2]))[:3],
    )


def _line(case: Case) -> str:
    text = (
        f"{case.model:<10}{case.percent:4.0f} %  predicted {case.predicted_s * 1e3:7.1f} ms, measured "
        f"{case.measured_s * 1e3:7.1f} ms: {case.error:+6.1%}, by the plain step {case.error_by_plain:+6.1%} "
        f"(plan {case.measured_s / case.measured_plain_s - 1:+.1%} over plain, profile ± {case.profile_error:.1%})"
    )
    if abs(case.error_by_plain) > PROMISE:
        parts = sorted(case.parts.items(), key=lambda item: -abs(item[1]))[:2]
        stages = ", ".join(f"{what} of {name} {share:+.1%}" for name, what, share in case.worst_stages[:2])
        text += "\n" + " " * 18 + "; ".join(f"{what} took {share:+.1%} of the step" for what, share in parts)
        text += f" beyond its prediction; most of all {stages}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--models", default="gpt2,bert,vit,resnet50,llama,t5,swin,convnext", help="names in models.py")
    parser.add_argument("--budgets", default="0,40,60,80", help="comma-separated percentages")
    parser.add_argument("--rounds", type=int, default=3, help=f"blocks of {STEPS} timed steps of each kind")
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds for each plan")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two models, two budgets, one round")
    args = parser.parse_args()
    keep_pages(True)
    torch.set_num_threads(args.threads)
    names = ["gpt2", "resnet50"] if args.quick else args.models.split(",")
    percents = [0.0, 60.0] if args.quick else [float(x) for x in args.budgets.split(",")]
    rounds = 1 if args.quick else args.rounds
    began = time.perf_counter()
    cases = [case for name in names for case in measure(name, percents, rounds, args.time_limit)]
    summary = {}
    for field in ("error", "error_by_plain"):
        errors = sorted(abs(getattr(case, field)) for case in cases)
        summary[field] = {
            "median": statistics.median(errors),
            "worst": errors[-1],
            "within_promise": sum(error <= PROMISE for error in errors) / len(errors),
        }
        print(
            f"{field}: median {summary[field]['median']:.1%}, worst {errors[-1]:.1%}, within {PROMISE:.0%} in "
            f"{summary[field]['within_promise']:.0%} of {len(errors)} cases"
        )
    if args.out is not None:
        document = {
            "schema": SCHEMA,
            "command": documents.command(),
            "environment": documents.environment(args.threads),
            "took_s": time.perf_counter() - began,
            "summary": summary,
            "cases": [asdict(case) for case in cases],
        }
        documents.write(document, args.out / "predicted_steps.json")


if __name__ == "__main__":
    main()
