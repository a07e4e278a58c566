"""What the machinery costs: a plan that keeps everything, recomputed blocks, the check, and a swapped storage.

    python experiments/overhead.py --rounds 60 --out experiments/results
    python experiments/overhead.py --parts swap,check --rounds 9

Runs with and without are interleaved, so that the machine's load meets both alike, every other round in reverse.
Figures are medians over rounds, in seconds of the calling thread's CPU, which does all the work here, with their
standard error, and the least of all rounds, which was disturbed least. Four parts, each of which replaces its own in
the file:

keep
    A plan that keeps everything takes at most 1 % more than the plain step on stages of 5 ms and more. Calls of tiny
    stages tell the cost of a call with everything in the caches; real stages fill the caches themselves, so their calls
    cost several times as much. They are measured with a heap that is kept: otherwise the C library gives its end back
    to the system and takes it anew, a percent or two of a step by chance.
blocks
    A recomputed block takes at most 1.2 times what it takes under `torch.utils.checkpoint`, for blocks that are so
    small that all their time is Python's.
check
    With every stage recomputed, digests add at most 1 % to a run of a thousand steps, in which 3 and 9.97 on average
    have them, and spots at most 1 % to a step. Spots take less than steps differ by, so the time within their functions
    is added up, which the clock's own calls make too long rather than too short.
swap
    What a stage adds per saved storage, beside a pair of `saved_tensors_hooks` that does nothing. Of a plan's storages
    all stay, or all move through a store that copies nothing. By the least of all rounds, what stays costs at most
    three such pairs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import documents  # isort: split

import models
import torch
from made_plans import plan_of
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ckptplan.cli.demo import keep_pages
from ckptplan.core.plan import Decision, Decisions, Transfer
from ckptplan.core.segment import Segment
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.guard import check
from ckptplan.runtime.handle import apply
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.observe.meter import EVERY, Meter
from ckptplan.runtime.recompute.selective import NumberedOps
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import NULL_STORES
from ckptplan.training.step import default_loss

SCHEMA = "ckptplan.overhead/6"
KEEP_PROMISE = CHECK_PROMISE = 0.01
BLOCK_PROMISE = 1.2
SWAP_PROMISE, SWAP_GROWTH = 3.0, 2.2
CPU = torch.device("cpu")

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
        "first": first, "median": median, "third": third,
        "error": 1.2533 * (third - first) / 1.349 / math.sqrt(len(values)),
    }  # fmt: skip


def added_us(found: Found, count: int) -> dict[str, float]:
    """What the second takes more CPU than the first, in µs for each of `count`; "least": by the least of all rounds."""
    plain, other = found["cpu"]
    pairs = spread([(b - a) / count * 1e6 for a, b in zip(plain, other, strict=True)])
    return {**pairs, "least": (min(other) - min(plain)) / count * 1e6}


# --- keep ---


def per_packed_tensor(rounds: int, count: int = 200) -> dict[str, float]:
    """Pack and unpack of one tensor of its own storage, which doesn't move, above autograd's own saving of it."""
    factors = [torch.ones(2048) for _ in range(count)]
    x = torch.ones(2048, requires_grad=True)
    counters = Counters(meter=Meter(CPU))

    def step() -> None:
        y = x
        for factor in factors:
            y = y * factor
        y.sum().backward()

    def packed() -> None:
        session = SwapSession({}, CPU, lambda storage: False, counters)
        with session.packing().hooks():
            step()

    return added_us(interleaved([(step, contextlib.nullcontext), (packed, contextlib.nullcontext)], rounds), count)


def plain_and_kept(model: nn.Module, inputs: torch.Tensor, rounds: int) -> tuple[Found, int]:
    """So many steps without and with a plan that keeps everything that one is measured, and their calls of stages."""
    chain = profile(model, inputs, menus=False)
    plan = plan_of(chain, ["keep"] * len(chain.stages))
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


def keep_part(rounds: int) -> dict[str, Any]:
    """A plan that keeps everything."""
    tensor = per_packed_tensor(rounds)
    call = added_us(*plain_and_kept(_Stages(100, 4), torch.randn(2, 4), rounds))
    keep_pages(True)
    real, calls = plain_and_kept(_Stages(12, 384), torch.randn(256, 384), rounds)
    shares = {clock: added_share(found) for clock, found in real.items()}
    stages = calls // EVERY
    stage_ms = statistics.median(real["cpu"][0]) / calls * 1e3
    found = {
        "per_packed_tensor_us": tensor, "per_stage_call_us": call, "stages": stages, "stage_ms": stage_ms,
        "per_real_stage_call_us": added_us(real, calls), "overhead": shares,
        "promise_kept": all(share["median"] <= KEEP_PROMISE for share in shares.values()),
    }  # fmt: skip
    lines = [
        ("per packed tensor, one storage each", tensor), ("per stage call", call),
        (f"per stage call among stages of {stage_ms:.1f} ms", found["per_real_stage_call_us"]),
    ]  # fmt: skip
    cells = [(what, f"{q['median']:.2f} µs", f"{q['error']:.2f}", f"{q['least']:.2f}") for what, q in lines]
    for clock, q in shares.items():
        cells.append((f"overhead, {clock}", f"{q['median']:+.2%}", f"{q['error']:.2%}", f"{q['least']:+.2%}"))
    documents.show(documents.table(("everything kept", "median", "±", "least"), cells))
    return found


# --- blocks ---


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


BLOCKS = (gpt2, conv_norm, mlp, many_modules)

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
        counters = Counters(meter=Meter(CPU))
        decisions = Decisions(names, (decision,) * DEPTH, segments)
        controller = Controller(model, decisions, NULL_STORES, CPU, counters=counters)

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
        "recompute_over_torch": ratio("recompute", "torch"), "segment_over_torch": ratio("segment", "torch"),
        "selective_over_torch_selective": ratio("selective", "torch selective"),
        "torch_over_plain": ratio("torch", "plain"), "recompute_over_plain": ratio("recompute", "plain"),
    }  # fmt: skip


def blocks_part(rounds: int) -> dict[str, Any]:
    """Recomputed blocks."""
    found = {make.__name__: per_recomputed_block(make, rounds) for make in BLOCKS}
    ratios = [key for key in next(iter(found.values())) if "_over_" in key]
    cells = [
        (name, row["modules"], *(f"{row['block_us'][way]:.0f} µs" for way in ("plain", "torch", "recompute")),
         *(f"{row[key]['median']:.2f} ± {row[key]['error']:.2f}" for key in ratios))
        for name, row in found.items()
    ]  # fmt: skip
    columns = ("block", "modules", "plain", "torch", "ours", *(key.replace("_", " ") for key in ratios))
    documents.show(documents.table(columns, cells))
    kept = all(row["recompute_over_torch"]["median"] <= BLOCK_PROMISE for row in found.values())
    return {"results": found, "promise_kept": kept}


# --- check ---

RUN = 1000
"""Steps of the run that sampled checks are reckoned for."""
CHECKED: dict[str, Callable[[], models.Made]] = {
    "gpt2": models.gpt2, "resnet50": lambda: models.resnet50(8), "unet": models.unet
}  # fmt: skip


def per_checked_step(make: Callable[[], models.Made], rounds: int) -> dict[str, Any]:
    """Seconds of each kind of step, and the shares that the checks add."""
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    chain = profile(model, inputs, menus=False)
    plan = plan_of(chain, ["recompute"] * len(chain.stages))
    compared = 0

    def step() -> None:
        model.zero_grad()
        default_loss(model(**inputs)).backward()

    def around(when: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def applied() -> Iterator[None]:
            nonlocal compared
            with apply(model, plan, check=when) as handle, handle.unmetered():
                if when == "sampled":
                    # The steps that come have spots; the first learns.
                    handle._applied.controller.checks._seen = check.FIRST
                step()
                before = handle.stats().compared_tensors
                yield
                found = handle.stats().compared_tensors - before
                assert (found > 0) == (when == "always")
                compared = max(compared, found)

        return applied

    ways = {when: around(when) for when in check.WHEN}
    seconds = dict(zip(ways, interleaved([(step, way) for way in ways.values()], rounds)["cpu"], strict=True))
    off = seconds["off"]

    def added(when: str) -> dict[str, float]:
        return spread([a / b - 1 for a, b in zip(seconds[when], off, strict=True)])

    own: list[float] = []
    for _ in range(rounds):
        with around("sampled")(), timed_spots() as found:
            step()
        own.append(sum(found))
    spots_s = statistics.median(own)
    checked = check.FIRST + (RUN - check.FIRST) / check.EVERY
    always, spots = added("always"), spots_s / statistics.median(off)
    recomputed = sum(choice.action == "recompute" for choice in plan.choices)
    return {
        "stages": len(chain.stages), "recomputed_stages": recomputed, "compared_tensors": compared,
        "off_s": statistics.median(off), "checked_s": statistics.median(seconds["always"]),
        "always": always["median"], "with_spots": added("sampled"), "spots": spots,
        "spots_us_per_recomputed_stage": spots_s / recomputed * 1e6, "checked_steps_in_run": checked,
        "sampled": checked / RUN * always["median"],
    }  # fmt: skip


@contextlib.contextmanager
def timed_spots() -> Iterator[list[float]]:
    """Seconds of each call that reads or compares a spot inside."""
    found: list[float] = []

    def timed(run: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            begin = time.thread_time()
            run(*args)
            found.append(time.thread_time() - begin)

        return call

    with mock.patch.multiple(
        check.StageSpots,
        save=timed(check.StageSpots.save),
        compare_saved=timed(check.StageSpots.compare_saved),
        ended=timed(check.StageSpots.ended),
    ):
        yield found


def check_part(rounds: int) -> dict[str, Any]:
    """The check while training."""
    found = {name: per_checked_step(make, rounds) for name, make in CHECKED.items()}
    cells = [
        (name, row["stages"], row["compared_tensors"], f"{row['off_s']:.3f} s", f"{row['checked_s']:.3f} s",
         f"{row['always']:+.1%}", f"{row['sampled']:+.2%}",
         f"{row['with_spots']['median']:+.2%} ± {row['with_spots']['error']:.2%}", f"{row['spots']:+.2%}",
         f"{row['spots_us_per_recomputed_stage']:.0f} µs")
        for name, row in found.items()
    ]  # fmt: skip
    columns = ("model", "stages", "tensors", "step", "checked", "always", "sampled", "with spots", "spots", "a stage")
    documents.show(documents.table(columns, cells))
    kept = all(max(row["sampled"], row["spots"]) <= CHECK_PROMISE for row in found.values())
    return {"run_steps": RUN, "results": found, "promise_kept": kept}


# --- swap ---

ELEMENTS = 64
COUNTS = (300, 1000, 2000)


def saving(count: int) -> dict[str, Callable[[], None]]:
    """Ways to run a stage that saves `count` storages, forward and backward."""
    x, factors = torch.ones(ELEMENTS, requires_grad=True), [torch.ones(ELEMENTS) for _ in range(count)]

    def forward() -> torch.Tensor:
        y = x
        for factor in factors:
            y = y * factor  # saves the factor
        return y

    def identity() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            y = forward()
        y.sum().backward()

    def planned(moves: tuple[int, ...]) -> None:
        session = SwapSession(
            {"host": NULL_STORES["host"]}, CPU, lambda storage: False, Counters(), [[ELEMENTS * 4] * count]
        )
        with session.stage(0, (Transfer(moves, 0, 0),) if moves else ()):
            y = forward()
        loss = y.sum()
        del y
        session.release(0)
        session.prefetch(0)
        loss.backward()

    return {
        "plain": lambda: forward().sum().backward(),
        "identity": identity,
        "stays": functools.partial(planned, ()),
        "moves": functools.partial(planned, tuple(range(count))),
    }


def swap_part(rounds: int) -> dict[str, Any]:
    """Bookkeeping per saved storage."""
    ways = {(count, name): run for count in COUNTS for name, run in saving(count).items()}
    # Each runs once before, since what ran before it has left its own memory in the caches.
    timed = interleaved([(run, functools.partial(_after, run)) for run in ways.values()], rounds)["cpu"]
    seconds = dict(zip(ways, timed, strict=True))
    found: dict[int, dict[str, dict[str, float]]] = {count: {} for count in COUNTS}
    for (count, name), own in seconds.items():
        plain, pair = seconds[count, "plain"], seconds[count, "identity"]
        added_s = min(own) - min(plain)
        found[count][name] = {"added_us": added_s / count * 1e6, "pairs": added_s / (min(pair) - min(plain))}
    cells = [
        (count, name, f"{q['added_us']:.2f} µs", f"{q['pairs']:.2f}")
        for count, of_count in found.items()
        for name, q in of_count.items()
    ]
    documents.show(documents.table(("storages", "way", "added", "pairs that do nothing"), cells))
    most = max(of_count["stays"]["pairs"] for of_count in found.values())
    growth = max(statistics.median(seconds[2000, way]) / statistics.median(seconds[1000, way]) for way in found[1000])
    return {"results": found, "growth": growth, "promise_kept": most <= SWAP_PROMISE and growth <= SWAP_GROWTH}


@contextlib.contextmanager
def _after(run: Callable[[], Any]) -> Iterator[None]:
    run()
    yield


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "keep": keep_part, "blocks": blocks_part, "check": check_part, "swap": swap_part
}  # fmt: skip


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--parts", type=documents.among(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=30, help="of each way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = args.out and args.out / "overhead.json"
    document: dict[str, Any] = json.loads(known.read_text()) if known and known.exists() else {}
    for name in args.parts:
        found = PARTS[name](args.rounds)
        print(f"{name}: {'kept' if found['promise_kept'] else 'BROKEN'}", flush=True)
        document[name] = {
            "command": documents.command(), "environment": documents.environment(), "rounds": args.rounds, **found
        }  # fmt: skip
    if known:
        documents.write({**document, "schema": SCHEMA}, known)


if __name__ == "__main__":
    main()
