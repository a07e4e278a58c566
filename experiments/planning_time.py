"""Seconds that `profile` and `solve` take on real models, by part, and how they grow with depth.

    python experiments/planning_time.py --out experiments/results
    python experiments/planning_time.py --models bi-lstm,t5 --depths 6,12
    python experiments/planning_time.py --models bi-lstm --before FOLDER

With `--before`, each model is also planned by the package
in another checkout, right before. Each model runs in a process of its own, so that none finds PyTorch's caches filled
by another. Its budget is a third of the way from the smallest peak to everything kept. U-Net and Flux need `diffusers`
(0.42 or later), which no extra of the package installs; without it they are left out, and the output says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import torch
from models import DEPTHS, PLANNED, blocks

import ckptplan
from ckptplan.core.units import GIB
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.planner import smallest_peak

SCHEMA = "ckptplan.planning_time/1"
PARTS = ("finding stages", "tracing bytes", "timing stages", "measuring bandwidth")
"""What profiling reports when it begins with it; further reports begin with the same word."""
OTHER = "other"
MOST_S = 100
"""For all that is measured of one model by another checkout's package."""


@contextlib.contextmanager
def measured(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def seconds_of(name: str) -> dict[str, Any]:
    """The seconds of one model's parts."""
    model, inputs, loss_fn = blocks(int(name.partition("-")[2])) if name.startswith("blocks-") else PLANNED[name]()
    seconds: dict[str, float] = {}
    marks: list[tuple[str, float]] = []

    def note(text: str) -> None:
        marks.append((text, time.perf_counter()))

    with measured(seconds, "profile"):
        note(OTHER)
        profile = ckptplan.profile(model, inputs, loss_fn=loss_fn, on_progress=note)
        note(OTHER)
    for (part, begin), (_, end) in itertools.pairwise(marks):
        key = next((each for each in PARTS if each.split()[0] == part.split()[0]), OTHER)
        seconds[key] = seconds.get(key, 0.0) + end - begin
    with measured(seconds, "smallest peak"):
        least = smallest_peak(profile).peak_bytes
    most = everything_kept_bytes(profile)
    found: list[float] = []
    options = {"on_plan": lambda plan: found.append(time.perf_counter())}
    if "on_plan" not in ckptplan.core.request.SolveKeywords.__optional_keys__:  # type: ignore[attr-defined]
        options = {}  # an earlier commit
    begin = time.perf_counter()
    with measured(seconds, "solve"):
        plan = ckptplan.solve(profile, (least + (most - least) // 3) / GIB, **options)  # type: ignore[arg-type]
    if found:
        seconds["first plan"] = found[0] - begin
    kinds = len({stage.kind for stage in profile.stages})
    return {"seconds": seconds, "stages": len(profile.stages), "kinds": kinds, "gap": plan.gap}


def in_process_of_its_own(name: str, threads: int, folder: Path | None = None) -> dict[str, Any]:
    """The seconds of one model, by the package in `folder`, which has `MOST_S` for it, or by this one."""
    run = [sys.executable, __file__, "--only", name, "--threads", str(threads)]
    path = os.environ.get("PYTHONPATH", "")
    env = os.environ | {"PYTHONPATH": path if folder is None else f"{folder.resolve()}{os.pathsep}{path}"}
    limit = None if folder is None else MOST_S
    try:
        done = subprocess.run(run, capture_output=True, text=True, check=False, env=env, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {MOST_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name:12} {found['error'][:100]}"
    s = found["seconds"]
    parts = " ".join(f"{part} {s.get(part, 0.0):5.2f}," for part in PARTS)
    first = f", first plan {s['first plan']:.2f}" if "first plan" in s else ""
    return (
        f"{name:12} {found['stages']:3} stages of {found['kinds']:2} kinds: profile {s['profile']:6.2f} s ({parts} "
        f"rest {s.get(OTHER, 0.0):.2f}); smallest peak {s['smallest peak']:.2f}, solve "
        f"{s['solve']:.2f}{first}, gap {found['gap']:.2%}"
    )


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--models", type=documents.among(PLANNED), default=list(PLANNED), help="of models.py")
    parser.add_argument("--depths", type=documents.numbers, default=DEPTHS, help="numbers of equal GPT-2 blocks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", type=Path, help="another checkout, whose package plans each model as well")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only:
        print(json.dumps(seconds_of(args.only)))
        return
    names = [*args.models, *(f"blocks-{depth}" for depth in args.depths)]
    begin = time.perf_counter()
    results: dict[str, Any] = {}
    for name in names:
        if name in ("unet", "flux") and importlib.util.find_spec("diffusers") is None:
            print(f"{name:12} left out: it needs diffusers")
            continue
        before = None if args.before is None else in_process_of_its_own(name, args.threads, args.before)
        results[name] = in_process_of_its_own(name, args.threads)
        if before is not None:
            results[name]["before"] = before
            print(row(f"({name}", before) + ")", flush=True)
        print(row(name, results[name]), flush=True)
    document = {"schema": SCHEMA, "took_s": time.perf_counter() - begin, "models": results}
    documents.save(args.out, "planning_time.json", document, threads=args.threads)


if __name__ == "__main__":
    main()
