"""Do plans, bounds, bytes and estimates stay what they were, while the package is rebuilt?

    python experiments/golden.py
    python experiments/golden.py --only chains,estimates
    python experiments/golden.py --write

Compares what the package gives now with `experiments/results/golden.json`, and exits with 1 if anything differs;
`--write` makes that file anew. There are four kinds of cases:

profiles
    Plans of the real models in `experiments/profiles`, with all actions and with recompute alone.
chains
    Plans of random chains from `exactness.py`.
estimates
    Of the small models in `models.py`, for a CPU and for a GPU that isn't here.
traces
    Drawn models (drawn_models.py), profiled for a CPU that is described by figures and for a GPU that isn't here, so
    that no time is measured: bytes, plans with recompute alone and with all actions, and the replay and the estimate of
    a plan that is made by a rule.

Bytes must be equal, and seconds but for rounding. Of a search that ends with a proof the optimum and the bound are
compared, since several plans may be as fast. One that ends at its time limit has found a plan and a bound that depend
on the machine; then no bound may be above what the other search has found.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import documents  # isort: split

import torch
from device_examples import SIMPLE
from drawn_models import build, drawn, loss_of
from exactness import odd, small, textbook
from instances import REAL, instance
from made_plans import plan_with
from models import MODELS

import ckptplan
from ckptplan.baselines._build import named, runs
from ckptplan.core.device import Device
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import Option
from ckptplan.core.plan import KEEP, OPTIMAL_GAP, Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Training
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment
from ckptplan.core.units import GIB
from ckptplan.profiling.profiler import replayed_bytes
from ckptplan.profiling.target import find_target
from ckptplan.training.step import make_step

Case = dict[str, Any]

RESULT = Path(__file__).with_name("results") / "golden.json"
CPU = replace(SIMPLE, name="cpu", compute_capability=None)
GPU = "a100-40gb"
RECOMPUTE: Case = {"actions": ("keep", "recompute")}
NEW_S, PROVEN_S, UNPROVEN_S = 20.0, 60.0, 3.0
"""Time limits of a search that is new, of one that has ended with a proof before, and of one that hasn't."""
TURNS = ("swap", "recompute", "selective-1", "recompute+swap")
SHOWN = 3  # fields of a part that differ
VERDICTS = ("equal", "as good", "different")
SAME = 2 * OPTIMAL_GAP
"""Relative difference of two optima or bounds that are both proven."""


# --- the cases ---


def searched(profile: Profile, budget_bytes: int, before: Case | None, limits: Case) -> Case:
    """The fastest plan within a budget, or the smallest peak where there is none."""
    limit_s = NEW_S if before is None else PROVEN_S if before["proven"] else UNPROVEN_S
    try:
        plan = ckptplan.solve(profile, budget_bytes / GIB, gap=0.0, time_limit_s=limit_s, **limits)
    except InfeasibleBudgetError as error:
        bound_bytes = error.min_peak_bound_bytes
        return {"peak_bytes": error.min_peak_bytes, "bound_bytes": bound_bytes, "proven": error.min_peak_proven}
    return {
        "step_s": plan.step_s,
        "bound_s": plan.lower_bound_s,
        "proven": plan.status == "optimal",
        "budget_bytes": budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "plan": plan_text(plan),
    }


def plan_text(plan: Plan) -> str:
    """The options in stage order, and the segments."""

    def stages(segment: Segment) -> str:
        return f"[{segment.first}-{segment.last}{''.join(map(stages, segment.inner))}]"

    groups = [(name, len([*group])) for name, group in itertools.groupby(choice.option for choice in plan.choices)]
    return " ".join([*(f"{n}x{name}" if n > 1 else name for name, n in groups), *map(stages, plan.segments)])


def plans(profile: Profile, before: Case, percents: Sequence[int], of: str = "", **limits: Any) -> Case:
    """The smallest peak, and plans for budgets in per cent of the way from there to everything kept."""
    least = searched(profile, 1, before.get(f"{of}smallest peak"), limits)
    found = {f"{of}smallest peak": least}
    most = ckptplan.simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes
    for percent in percents:
        was = before.get(part := f"{of}{percent} %")
        budget_bytes = (
            was["budget_bytes"] if was else least["peak_bytes"] + max(0, most - least["peak_bytes"]) * percent // 100
        )
        found[part] = searched(profile, budget_bytes, was, limits)
    return found


def of_profile(name: str, before: Case) -> Case:
    profile = instance(name)
    return plans(profile, before, (10, 45)) | plans(profile, before, (10, 45), "recompute alone, ", **RECOMPUTE)


def of_small(seed: int, before: Case) -> Case:
    return plans(small(seed), before, (0, 30, 70))


def of_odd(seed: int, before: Case) -> Case:
    profile, host_bytes = odd(seed)
    return plans(profile, before, (0, 30), host_gb=None if host_bytes is None else host_bytes / GIB)


def of_textbook(seed: int, before: Case) -> Case:
    return plans(textbook(seed), before, (20, 60), **RECOMPUTE)


def estimated(*args: Any, **options: Any) -> Case:
    """The bytes of an estimate."""
    found = ckptplan.estimate(*args, **options)
    phases = {p.name: [p.start_bytes, p.peak_bytes, p.end_bytes, p.reserved_bytes] for p in found.phases}
    alive = [(t.nbytes, t.count, t.category, t.stage) for t in found.alive]
    return {
        "peak": [found.peak_phase, found.peak_stage],
        "phases": phases,
        "categories": {name: nbytes for name, nbytes in found.categories.items() if nbytes},
        "saved": list(found.saved_bytes.values()),
        "alive": digest(sorted(alive)),
    }


def of_estimate(name: str, before: Case) -> Case:
    model, inputs = MODELS[name]()
    options = {"cpu": {"device": CPU}, GPU: {"device": GPU, "amp": "bfloat16"}}
    return {device: estimated(model, inputs, optimizer="adamw", **given) for device, given in options.items()}


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:8]


def traced(profile: Profile) -> Case:
    """The bytes of a profile: some for each stage, a digest of all its options, and totals."""
    n = len(profile.stages)
    numbers: dict[int, int] = {}
    facts = [[s.nbytes, s.born, s.program_until, s.to_end, s.stays, s.graph_until] for s in profile.storages]

    def held(option: Option | None) -> int | None:
        return option and sum(profile.storages[s].nbytes for s in option.held)

    def numbered(held: Sequence[int]) -> list[Any]:  # in the order in which they are met: no index is a fact
        return [[numbers.setdefault(s, len(numbers)), *facts[s]] for s in held]

    def of_option(o: Option) -> list[Any]:
        return [o.name, numbered(o.saved), numbered(o.pinned), o.forward_bytes, o.backward_bytes, o.moves, o.ops]

    kept = ckptplan.simulate(profile, (KEEP,) * n)
    return {
        "stages": digest([stage.name for stage in profile.stages]),
        "saved": [held(stage.keep) for stage in profile.stages],
        "made": [sum(s.nbytes for s in profile.storages if s.born == i) for i in range(n)],
        "forward": [stage.keep.forward_bytes for stage in profile.stages],
        "backward": [stage.keep.backward_bytes for stage in profile.stages],
        "recompute": [held(stage.recompute) for stage in profile.stages],
        "base_forward": profile.base_forward_bytes,
        "base_backward": profile.base_backward_bytes,
        "options": [digest([*map(of_option, stage.options), numbered(stage.linked)]) for stage in profile.stages],
        "storages": digest(sorted(facts, key=repr)),
        "totals": {
            "resident": profile.resident_bytes,
            "update": profile.update_peak_bytes,
            "kept": kept.peak_bytes,
        },
        "step_s": kept.makespan_s,
    }


def by_rule(profile: Profile) -> Plan:
    """A plan that takes options of several kinds in turn, with a segment of the first stages that can be in one."""
    names = [*itertools.islice(itertools.cycle(TURNS), len(profile.stages))]
    segments = tuple(Segment(run[0], run[len(run) // 3]) for run in runs(profile)[:1])
    for segment in segments:
        names[segment.first : segment.last + 1] = ["recompute"] * (segment.last + 1 - segment.first)
    chosen = named(profile, names, segments)
    moves = residency(profile, chosen.options, chosen.segments).moves
    away = [
        Decision.moving(option.action, moved, i, i, option.name, ops=option.ops)
        for i, (option, moved) in enumerate(zip(chosen.options, moves, strict=True))
    ]
    return plan_with(profile, tuple(away), segments=chosen.segments)


def of_trace(name: str, before: Case) -> Case:
    recipe, found = build(name), Case()
    model, inputs = recipe.make()
    step = make_step(model, Training(inputs, loss_fn=loss_of))
    described: tuple[tuple[str, Device | str, Any, int, Case], ...] = (
        ("cpu", CPU, torch.optim.AdamW(model.parameters(), lr=1e-4), 15, RECOMPUTE),
        (GPU, GPU, None, 50, {}),  # without an optimizer, whose update would be the peak of all plans
    )
    for where, device, optimizer, percent, limits in described:
        options: Case = {"loss_fn": loss_of, "device": device, "optimizer": optimizer}
        profile = ckptplan.profile(model, inputs, **options)
        plan = by_rule(profile)
        found[f"{where}, bytes"] = traced(profile)
        found |= plans(profile, before, (percent,), f"{where}, ", **limits)
        found[f"{where}, by a rule"] = {
            "plan": plan_text(plan),
            "predicted_bytes": plan.peak_bytes,
            "step_s": plan.step_s,
            "replayed_bytes": replayed_bytes(step, plan, find_target(model, device)),
        }
        found[f"{where}, estimate of that"] = estimated(model, inputs, plan=plan, **options)
    return found


KINDS: Mapping[str, Mapping[str, Callable[[Case], Case]]] = {
    "profiles": {
        p.name.partition(".")[0]: partial(of_profile, p.name.partition(".")[0]) for p in sorted(REAL.iterdir())
    },
    "chains": {
        f"{of.__name__[3:]} {seed}": partial(of, seed)
        for of, seeds in ((of_small, range(40)), (of_odd, range(40)), (of_textbook, range(10)))
        for seed in seeds
    },
    "estimates": {name: partial(of_estimate, name) for name in MODELS},
    "traces": {name: partial(of_trace, name) for name in drawn("golden")},
}
"""Kind -> name of the case -> function that gives its parts; the argument has the parts as they were before."""


# --- the comparison ---


def differences(was: Any, now: Any, at: str = "") -> Iterator[str]:
    """The fields that aren't equal, the first ones first; seconds may differ by rounding."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differences(was.get(key), now.get(key), f"{at} {key}".strip())
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was, now, strict=True)):
            yield from differences(a, b, f"{at}[{i}]")
    elif not (math.isclose(was, now, rel_tol=SAME) if type(was) is type(now) is float else was == now):
        yield f"{at}: {str(was)[: documents.LONGEST]}, now {str(now)[: documents.LONGEST]}"


def against_bounds(was: Case, now: Case) -> Iterator[str]:
    """The optimum and bound of a search that aren't as before, or that contradict those before."""
    value, bound = ("step_s", "bound_s") if "step_s" in was else ("peak_bytes", "bound_bytes")
    if was["proven"]:
        yield from differences(*({key: found.get(key) for key in (value, bound, "proven")} for found in (was, now)))
        return
    for proof, search in ((was, now), (now, was)):
        if proof[bound] > search[value] * (1 + SAME):
            yield f"{value}: {search[value]} was found, and {proof[bound]} is a bound"


def judged(was: Case | None, now: Case | None) -> tuple[str, list[str]]:
    """Whether a part is "equal", "as good" (a search has found another plan) or "different", and in what."""
    is_search = was and now and "proven" in was and was.keys() == now.keys()
    found = [*(against_bounds if is_search else differences)(was, now)]
    return ("different" if found else "as good" if any(differences(was, now)) else "equal"), found


def compared(kind: str, before: Mapping[str, Case], counts: Counter[str]) -> Iterator[str]:
    """Count the parts of all cases of a kind by verdict, and yield what differs."""
    for name, case in KINDS[kind].items():
        was = before.get(name, {})
        try:
            now = json.loads(json.dumps(case(was)))  # tuples are lists in the file
        except Exception as error:
            now = {"failed": documents.brief(error)}
        for part in {**was, **now}:
            verdict, what = judged(was.get(part), now.get(part))
            counts[verdict] += 1
            yield from (f"{kind}, {name}, {part}: {line}" for line in what[:SHOWN])


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--only", type=documents.among(KINDS), default=list(KINDS), help="kinds of cases, with commas")
    parser.add_argument("--write", action="store_true", help="make the file anew, or these kinds in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    document = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"kinds": {}}
    if args.write:
        document |= {"command": documents.command(), "environment": documents.environment()}
        for kind in args.only:
            document["kinds"][kind] = {name: case({}) for name, case in KINDS[kind].items()}
        text = json.dumps(document, indent=1)
        RESULT.write_text(
            re.sub(r"\[[^][{}]*\]", lambda row: re.sub(r"\s*\n\s*", "", row[0]), text) + "\n", encoding="utf-8"
        )
        return
    rows, different = [], 0
    for kind in args.only:
        begun, counts = time.perf_counter(), Counter[str]()
        for line in compared(kind, document["kinds"][kind], counts):
            print(line, flush=True)
        took_s = time.perf_counter() - begun
        rows.append([kind, len(KINDS[kind]), counts.total(), *map(counts.__getitem__, VERDICTS), f"{took_s:.0f}"])
        different += counts["different"]
    table = documents.table(["kind", "cases", "parts", *VERDICTS, "seconds"], rows)
    documents.finish(
        rows, [(not different, f"nothing differs: {different} parts do")], table, args.out, "golden_compared.json"
    )


if __name__ == "__main__":
    main()
