"""What the machinery itself costs: per packed tensor, stage call and recomputed block, and where everything is kept.

    python experiments/overhead.py --out experiments/results
    python experiments/overhead.py --quick
    python experiments/overhead.py --blocks --out experiments/results

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
import functools
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import documents
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ckptplan.cli.demo import keep_pages
from ckptplan.core.plan import Decision, Decisions, Plan
from ckptplan.core.segment import Segment
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.handle import apply
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.observe.meter import EVERY, Meter
from ckptplan.runtime.recompute.selective import NumberedOps
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import NULL_STORES

SCHEMA = "ckptplan.overhead/5"
PROMISE = 0.01
STAGE_S = 5e-3
"""What the promise speaks of."""
BLOCK_PROMISE = 1.2
"""Times `torch.utils.checkpoint`, for a recomputed block."""


Way = tuple[Callable[[], Any], Callable[[], contextlib.AbstractContextManager[Any]]]
"""What to time, and in what surroundings, which aren't timed."""
Found = dict[str, tuple[list[float], ...]]


def interleaved(ways: Sequence[Way], rounds: int) -> Found:
    """Seconds of each, by CPU and by the wall clock, in turn, after a warm-up; every other round in reverse order."""
    found: Found = {clock: tuple([] for _ in ways) for clock in ("cpu", "wall")}
    for k in range(-2, rounds):
        gc.collect()  # whose turn it would be is chance
        gc.disable()
        for i in range(len(ways)) if k % 2 == 0 else reversed(range(len(ways))):
            run, around = ways[i]
            with around():
                begin, wall = time.thread_time(), time.perf_counter()
                run()
                cpu_s, wall_s = time.thread_time() - begin, time.perf_counter() - wall
            if k >= 0:
                found["cpu"][i].append(cpu_s)
                found["wall"][i].append(wall_s)
        gc.enable()
    return found


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

    return added_us(interleaved([(step, contextlib.nullcontext), (packed, contextlib.nullcontext)], rounds), count)


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

        found = interleaved([(steps, plain), (steps, kept)], rounds)
    return found, EVERY * sum(not is_glue(name) for name in plan.stages)


def added_share(found: tuple[list[float], ...]) -> dict[str, float]:
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


class _Blocks(nn.Module):
    """A chain of equal blocks, each called through `around`."""

    def __init__(self, blocks: Sequence[nn.Module], extra: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.extra = extra
        self.around: Callable[..., Any] = lambda block, x, **extra: block(x, **extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.around(block, x, **self.extra)
        return x


DEPTH = 4
"""Blocks in a chain."""
STEPS = 2
"""Timed together."""


def gpt2() -> tuple[_Blocks, torch.Tensor]:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=16, n_head=2, n_layer=DEPTH, n_positions=8, attn_implementation="sdpa")
    return _Blocks([GPT2Block(config, layer_idx=i) for i in range(DEPTH)], {}), torch.randn(2, 8, 16)


def llama() -> tuple[_Blocks, torch.Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=DEPTH,
        max_position_embeddings=8,
        attn_implementation="sdpa",
    )
    x = torch.randn(2, 8, 16)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(8)[None])
    layers = [LlamaDecoderLayer(config, layer_idx=i) for i in range(DEPTH)]
    return _Blocks(layers, {"position_embeddings": positions}), x


def conv_norm() -> tuple[_Blocks, torch.Tensor]:
    def block() -> nn.Module:
        once = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        return nn.Sequential(*once, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    return _Blocks([block() for _ in range(DEPTH)], {}), torch.randn(2, 4, 4, 4)


def mlp() -> tuple[_Blocks, torch.Tensor]:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    return _Blocks([block() for _ in range(DEPTH)], {}), torch.randn(4, 16)


def many_modules() -> tuple[_Blocks, torch.Tensor]:
    """61 modules a block."""

    def block() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)))

    return _Blocks([block() for _ in range(DEPTH)], {}), torch.randn(2, 8)


BLOCKS = (gpt2, llama, conv_norm, mlp, many_modules)

_PRODUCTS = (
    torch.ops.aten.addmm.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.convolution.default,
)


def _products(model: _Blocks, x: torch.Tensor) -> tuple[int, ...]:
    """The numbers of the matrix products of one block."""
    found: list[int] = []

    def note(number: int, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _PRODUCTS:
            found.append(number)
        return func(*args, **kwargs)

    with NumberedOps(note):
        model.blocks[0](x, **model.extra)
    return tuple(found)


def _saved_by_pytorch(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def per_recomputed_block(make: Callable[[], tuple[_Blocks, torch.Tensor]], rounds: int) -> dict[str, Any]:
    """Seconds of a block's forward and backward each way, and their ratios, round by round."""
    torch.manual_seed(0)
    model, x = make()
    model.train()
    x.requires_grad_()
    device = torch.device("cpu")
    ways: dict[str, Way] = {}

    def steps() -> None:
        for _ in range(STEPS):
            model.zero_grad()
            model(x).mean().backward()

    def called(around: Callable[..., Any]) -> Callable[[], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            before, model.around = model.around, around
            yield
            model.around = before

        return entered

    def planned(decision: Decision, segments: tuple[Segment, ...] = ()) -> Callable[[], Any]:
        names = tuple(f"blocks.{i}" for i in range(DEPTH))
        counters = Counters(meter=Meter(device))
        decisions = Decisions(names, (decision,) * DEPTH, segments)
        controller = Controller(model, decisions, NULL_STORES, device, counters=counters)

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            controller.install()
            before = counters.recomputed_stages
            yield
            assert counters.recomputed_stages == before + STEPS * DEPTH
            controller.remove()

        return entered

    ways["plain"] = steps, contextlib.nullcontext
    ways["torch"] = steps, called(functools.partial(checkpoint, use_reentrant=False))
    ways["torch selective"] = (
        steps,
        called(
            functools.partial(
                checkpoint,
                use_reentrant=False,
                context_fn=functools.partial(create_selective_checkpoint_contexts, _saved_by_pytorch),
            )
        ),
    )
    ways["recompute"] = steps, planned(Decision("recompute"))
    ways["segment"] = steps, planned(Decision("recompute"), (Segment(0, DEPTH - 1),))
    ways["selective"] = steps, planned(Decision("recompute", ops=_products(model, x)))
    seconds = dict(zip(ways, interleaved(list(ways.values()), rounds)["cpu"], strict=True))

    def ratio(ours: str, theirs: str) -> dict[str, float]:
        return spread([a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)])

    return {
        "modules": len(list(model.blocks[0].modules())),
        "block_us": {way: statistics.median(s) / (STEPS * DEPTH) * 1e6 for way, s in seconds.items()},
        "recompute_over_torch": ratio("recompute", "torch"),
        "segment_over_torch": ratio("segment", "torch"),
        "selective_over_torch_selective": ratio("selective", "torch selective"),
        "torch_over_plain": ratio("torch", "plain"),
        "recompute_over_plain": ratio("recompute", "plain"),
    }


def print_blocks(found: dict[str, dict[str, Any]]) -> None:
    """One row for each kind."""
    print(
        f"\nforward and backward of a recomputed block, medians; at most {BLOCK_PROMISE} times torch.utils.checkpoint\n"
        f"{'':<13}{'modules':>8}{'plain':>9}{'torch':>9}{'ours':>9}{'ours/torch':>20}{'segment/torch':>15}"
        f"{'selective/selective':>21}{'torch/plain':>13}{'ours/plain':>12}"
    )
    for name, row in found.items():
        us, ours = row["block_us"], row["recompute_over_torch"]
        print(
            f"{name:<13}{row['modules']:>8}{us['plain']:>6.0f} µs{us['torch']:>6.0f} µs{us['recompute']:>6.0f} µs"
            f"{ours['median']:>13.2f} ± {ours['error']:.2f}{row['segment_over_torch']['median']:>15.2f}"
            f"{row['selective_over_torch_selective']['median']:>21.2f}{row['torch_over_plain']['median']:>13.2f}"
            f"{row['recompute_over_plain']['median']:>12.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of eight steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--blocks", action="store_true", help="recomputed blocks alone; the file keeps the rest")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = max(args.rounds // 4, 4) if args.quick else args.rounds
    found = {make.__name__: per_recomputed_block(make, rounds) for make in BLOCKS}
    blocks = {
        "command": documents.command(),
        "environment": documents.environment(args.threads),
        "rounds": rounds,
        "results": found,
        "promise_kept": all(row["recompute_over_torch"]["median"] <= BLOCK_PROMISE for row in found.values()),
    }
    if args.blocks:
        print_blocks(found)
        if args.out is not None:
            path = args.out / "overhead.json"
            if not path.exists():
                raise SystemExit(f"{path} isn't there, and --blocks replaces a part of it: leave --blocks out first")
            documents.write({**json.loads(path.read_text(encoding="utf-8")), "schema": SCHEMA, "blocks": blocks}, path)
        return
    tensor = per_packed_tensor(rounds)
    tiny, calls = plain_and_kept(_Stages(100, 4), torch.randn(2, 4), rounds)
    call = added_us(tiny, calls)
    model, inputs = _Stages(12, 384), torch.randn(256, 384)
    as_it_is, real_calls = plain_and_kept(model, inputs, rounds)
    keep_pages(True)
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
    print_blocks(found)
    if args.out is not None:
        document = {
            "schema": SCHEMA,
            "command": documents.command(),
            "environment": documents.environment(args.threads),
            "rounds": rounds,
            "results": results,
            "blocks": blocks,
        }
        documents.write(document, args.out / "overhead.json")


if __name__ == "__main__":
    main()
