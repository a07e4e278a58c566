"""What does the machinery itself cost: per packed tensor, per stage call, and for a plan that keeps everything?

    python experiments/overhead.py --out experiments/results
    python experiments/overhead.py --quick

Runs with and without are interleaved, so that the machine's load meets both alike; figures are medians, in seconds of
the calling thread's CPU, which does all the work here, so that other programs' turns don't count. The wall clock's
figure for the last is given too. The promise is that a plan which keeps everything takes at most 1 % more than the
plain step on stages of 5 ms and more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.plan import Decision, Plan
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.apply import apply
from ckptplan.runtime.meter import Meter
from ckptplan.runtime.stores import NullStore
from ckptplan.runtime.swap import Counters, SwapSession

SCHEMA = "ckptplan.overhead/1"
PROMISE = 0.01


Way = tuple[Callable[[], Any], Callable[[], contextlib.AbstractContextManager[Any]]]
"""What to time, and in what surroundings, which aren't timed."""
Found = dict[str, tuple[list[float], list[float]]]


def interleaved(first: Way, second: Way, rounds: int) -> Found:
    """Seconds of both, by CPU and by the wall clock, in turn, after a warm-up; every other round in reverse order."""
    found: Found = {"cpu": ([], []), "wall": ([], [])}
    for k in range(-2, rounds):
        for i in (0, 1) if k % 2 == 0 else (1, 0):
            run, around = (first, second)[i]
            with around():
                begin, wall = time.thread_time(), time.perf_counter()
                run()
                cpu_s, wall_s = time.thread_time() - begin, time.perf_counter() - wall
            if k >= 0:
                found["cpu"][i].append(cpu_s)
                found["wall"][i].append(wall_s)
    return found


def difference_us(found: Found, count: int) -> float:
    """Median over the rounds of what the second takes more CPU than the first, in µs for each of `count`."""
    return statistics.median(b - a for a, b in zip(*found["cpu"], strict=True)) / count * 1e6


def per_packed_tensor(rounds: int, count: int = 200) -> float:
    """Pack and unpack of one tensor of its own storage, which doesn't move, above autograd's own saving of it."""
    factors = [torch.ones(2048) for _ in range(count)]
    x = torch.ones(2048, requires_grad=True)
    counters = Counters(meter=Meter(torch.device("cpu")))

    def step() -> None:
        y = x
        for factor in factors:
            y = y * factor
        y.sum().backward()

    def packed() -> None:
        session = SwapSession(NullStore(), torch.device("cpu"), lambda storage: False, counters)
        with session.packing().hooks():
            step()

    return difference_us(interleaved((step, contextlib.nullcontext), (packed, contextlib.nullcontext), rounds), count)


def keep_all(model: nn.Module, inputs: Any) -> Plan:
    """Everything kept, without a solver."""
    chain = profile(model, inputs, menus=False)
    n = len(chain.stages)
    return Plan(
        stages=tuple(stage.name for stage in chain.stages),
        choices=(Decision("keep"),) * n,
        status="feasible",
        budget_bytes=1 << 59,
        peak_bytes=0,
        host_bytes=0,
        step_s=chain.baseline_step_s,
        baseline_step_s=chain.baseline_step_s,
        lower_bound_s=0.0,
        space="keep",
        planner="keep",
        fingerprint=chain.fingerprint,
        inputs=tuple(stage.inputs for stage in chain.stages),
    )


def plain_and_kept(model: nn.Module, inputs: torch.Tensor, rounds: int) -> tuple[Found, int, float]:
    """Steps without and with a plan that keeps everything; its modules' stages; the median stage's seconds."""
    plan = keep_all(model, inputs)
    with apply(model, plan) as handle:

        def step() -> None:
            model.zero_grad()
            model(inputs).mean().backward()

        found = interleaved((step, handle.paused), (step, contextlib.nullcontext), rounds)
        times = [s.measured for s in handle.stats().stages if not s.name.startswith("(") and s.measured is not None]
    return found, len(times), statistics.median(t.total_s for t in times)


def quartiles(found: tuple[list[float], list[float]]) -> dict[str, float]:
    """Of what the second takes more than the first, as a fraction, pair by pair."""
    first, median, third = statistics.quantiles([b / a - 1 for a, b in zip(*found, strict=True)], n=4)
    return {"first": first, "median": median, "third": third}


class _Stages(nn.Module):
    """A loop over equal stages."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--rounds", type=int, default=120, help="pairs of steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = max(args.rounds // 4, 4) if args.quick else args.rounds
    tensor_us = per_packed_tensor(rounds)
    tiny, calls, _ = plain_and_kept(_Stages(100, 4), torch.randn(2, 4), rounds)
    call_us = difference_us(tiny, calls)
    # About 4 ms forward and backward: below what the promise speaks of.
    real, stages, stage_s = plain_and_kept(_Stages(12, 384), torch.randn(256, 384), rounds)
    beside = {clock: quartiles(found) for clock, found in real.items()}
    by_calls = call_us / (stage_s * 1e6)
    results = {
        "per_packed_tensor_us": tensor_us,
        "per_stage_call_us": call_us,
        "stages": stages,
        "stage_ms": stage_s * 1e3,
        "plain_step_s": statistics.median(real["cpu"][0]),
        "kept_step_s": statistics.median(real["cpu"][1]),
        "overhead": beside,
        "overhead_by_calls": by_calls,
        "promise_kept": beside["cpu"]["median"] <= PROMISE,
    }
    print(f"per packed tensor  {tensor_us:7.2f} µs (pack and unpack, one storage each)")
    print(f"per stage call     {call_us:7.2f} µs (forward, backward's hook, times)")
    print(f"keeping everything on {stages} stages of {stage_s * 1e3:.1f} ms, by the cost of calls {by_calls:+.2%}")
    for clock, q in beside.items():
        print(
            f"  {clock:<5} {q['median']:+.2%} (median of {rounds} pairs; quartiles {q['first']:+.2%} {q['third']:+.2%})"
        )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": SCHEMA,
            "command": " ".join(["python", *sys.argv]),
            "environment": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "cpus": os.cpu_count(),
                "threads": args.threads,
                "load": os.getloadavg()[0],
            },
            "rounds": rounds,
            "results": results,
        }
        (args.out / "overhead.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
