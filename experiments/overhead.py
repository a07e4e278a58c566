"""What does the machinery itself cost: per packed tensor, per stage call, and for a plan that keeps everything?

    python experiments/overhead.py --out experiments/results
    python experiments/overhead.py --quick

Runs with and without are interleaved, eight steps at a time after one that isn't timed, of which the runtime measures
one, so that the machine's load meets both alike. Figures are medians over pairs, in seconds of the calling thread's
CPU, which does all the work here, so that other programs' turns don't count. What they do to caches and memory does
count, so medians come with their standard error, and the least of all rounds, which was disturbed least, beside them.
The wall clock's figure for real steps is given too.

The promise is that a plan which keeps everything takes at most 1 % more than the plain step on stages of 5 ms and more.
Calls of tiny stages, of which hundreds make a step, tell the cost of a call to a microsecond, with everything in the
caches. Real stages fill the caches themselves, so their calls cost several times as much, and they are what counts. But
by default the C library gives the heap's end back to the system and takes it anew from step to step, depending on what
lies there: a percent or two for a step by chance, with a plan or without. So real stages are measured twice, as they
are and with a heap that is kept, and the latter tells what the machinery costs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import torch
from torch import nn

from ckptplan.core.plan import Decision, Plan
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.apply import apply
from ckptplan.runtime.controller import is_glue
from ckptplan.runtime.meter import EVERY, Meter
from ckptplan.runtime.swap import Counters, SwapSession

SCHEMA = "ckptplan.overhead/4"
PROMISE = 0.01
STAGE_S = 5e-3
"""What the promise speaks of."""


Way = tuple[Callable[[], Any], Callable[[], contextlib.AbstractContextManager[Any]]]
"""What to time, and in what surroundings, which aren't timed."""
Found = dict[str, tuple[list[float], list[float]]]


def interleaved(first: Way, second: Way, rounds: int) -> Found:
    """Seconds of both, by CPU and by the wall clock, in turn, after a warm-up; every other round in reverse order."""
    found: Found = {"cpu": ([], []), "wall": ([], [])}
    for k in range(-2, rounds):
        gc.collect()  # whose turn it would be is chance
        gc.disable()
        for i in (0, 1) if k % 2 == 0 else (1, 0):
            run, around = (first, second)[i]
            with around():
                begin, wall = time.thread_time(), time.perf_counter()
                run()
                cpu_s, wall_s = time.thread_time() - begin, time.perf_counter() - wall
            if k >= 0:
                found["cpu"][i].append(cpu_s)
                found["wall"][i].append(wall_s)
        gc.enable()
    return found


def keep_heap() -> None:
    """Have the C library (glibc) keep the memory that it has got, from here on."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX in malloc.h
    library = ctypes.CDLL(None)
    library.mallopt(trim_threshold, -1)
    library.mallopt(mmap_max, 0)


def spread(values: list[float]) -> dict[str, float]:
    """Quartiles, and the median's standard error where values are spread normally (Kendall and Stuart, 10.11)."""
    first, median, third = statistics.quantiles(values, n=4)
    return {
        "first": first,
        "median": median,
        "third": third,
        "error": 1.2533 * (third - first) / 1.349 / math.sqrt(len(values)),
    }


def added_us(found: Found, count: int) -> dict[str, float]:
    """What the second takes more CPU than the first, in µs for each of `count`; "least": by the least of all rounds."""
    plain, other = found["cpu"]
    pairs = spread([(b - a) / count * 1e6 for a, b in zip(plain, other, strict=True)])
    return {**pairs, "least": (min(other) - min(plain)) / count * 1e6}


def per_packed_tensor(rounds: int, count: int = 200) -> dict[str, float]:
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
        session = SwapSession({}, torch.device("cpu"), lambda storage: False, counters)
        with session.packing().hooks():
            step()

    return added_us(interleaved((step, contextlib.nullcontext), (packed, contextlib.nullcontext), rounds), count)


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


def plain_and_kept(model: nn.Module, inputs: torch.Tensor, rounds: int) -> tuple[Found, int]:
    """So many steps without and with a plan that keeps everything that one is measured, and their calls of stages."""
    plan = keep_all(model, inputs)
    with apply(model, plan) as handle:

        def steps(count: int = EVERY) -> None:
            for _ in range(count):
                model.zero_grad()
                model(inputs).mean().backward()

        @contextlib.contextmanager
        def kept() -> Iterator[None]:
            steps(1)
            yield

        @contextlib.contextmanager
        def plain() -> Iterator[None]:
            with handle.paused(), kept():
                yield

        found = interleaved((steps, plain), (steps, kept), rounds)
    return found, EVERY * sum(not is_glue(name) for name in plan.stages)


def added_share(found: tuple[list[float], list[float]]) -> dict[str, float]:
    """Of what the second takes more than the first, as a fraction, pair by pair."""
    plain, other = found
    return {
        **spread([b / a - 1 for a, b in zip(plain, other, strict=True)]),
        "least": min(other) / min(plain) - 1,
    }


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
    parser.add_argument("--rounds", type=int, default=120, help="pairs of eight steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = max(args.rounds // 4, 4) if args.quick else args.rounds
    tensor = per_packed_tensor(rounds)
    tiny, calls = plain_and_kept(_Stages(100, 4), torch.randn(2, 4), rounds)
    call = added_us(tiny, calls)
    model, inputs = _Stages(12, 384), torch.randn(256, 384)
    as_it_is, real_calls = plain_and_kept(model, inputs, rounds)
    keep_heap()
    real, _ = plain_and_kept(model, inputs, rounds)
    beside = {clock: added_share(found) for clock, found in real.items()}
    plain_s, kept_s = (statistics.median(steps) / EVERY for steps in real["cpu"])
    stages = real_calls // EVERY
    results = {
        "per_packed_tensor_us": tensor,
        "per_stage_call_us": call,
        "stages": stages,
        "stage_ms": plain_s / stages * 1e3,
        "plain_step_s": plain_s,
        "kept_step_s": kept_s,
        "per_real_stage_call_us": added_us(real, real_calls),
        "overhead": beside,
        "overhead_as_it_is": {clock: added_share(found) for clock, found in as_it_is.items()},
        "overhead_by_calls": call["median"] / (STAGE_S * 1e6),
        "promise_kept": all(share["median"] <= PROMISE for share in beside.values()),
    }
    for what, us in (
        ("per packed tensor (pack and unpack, one storage each)", tensor),
        ("per stage call (forward, backward's hook, times)", call),
        (f"per stage call among stages of {plain_s / stages * 1e3:.1f} ms", results["per_real_stage_call_us"]),
    ):
        print(
            f"{what:<56}{us['median']:7.2f} µs ± {us['error']:.2f} (quartiles {us['first']:.2f} {us['third']:.2f}, "
            f"least {us['least']:.2f})"
        )
    print(
        f"keeping everything on stages of {STAGE_S * 1e3:.0f} ms, by the calls of tiny ones "
        f"{results['overhead_by_calls']:+.2%}"
    )
    for heap in ("overhead", "overhead_as_it_is"):
        for clock, q in results[heap].items():
            print(
                f"  {stages} real ones, {'heap kept' if heap == 'overhead' else 'as it is':<9}, {clock:<5}"
                f"{q['median']:+.2%} ± {q['error']:.2%} (median of {rounds} pairs of {EVERY} steps; "
                f"quartiles {q['first']:+.2%} {q['third']:+.2%}; least {q['least']:+.2%})"
            )
    if args.out is not None:
        document = {
            "schema": SCHEMA,
            "command": documents.command(),
            "environment": documents.environment(args.threads),
            "rounds": rounds,
            "results": results,
        }
        documents.write(document, args.out / "overhead.json")


if __name__ == "__main__":
    main()
