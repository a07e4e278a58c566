"""What does ckptplan cost beside the switches PyTorch users have today, at the peak each of them really reaches?

    python experiments/compare_real.py --out experiments/results
    python experiments/compare_real.py --out experiments/results --recompute-alone
    python experiments/compare_real.py --out /tmp/compiled --models gpt2,resnet50 --compiled 0.25,0.5,1
    python experiments/compare_real.py --out /tmp/tight --rules pooch --share 0
    python experiments/compare_real.py --out /tmp/quick --quick

The rivals "selective" and "remat" are torchtitan's and torch_remat's own code, where these are installed (`pip install
torch_remat`, and without CUDA `pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro typeguard
docstring_parser torchdata`).

Every rival trains its own copy of the same model on the same inputs. Its peak is measured (allocator events), and
`ckptplan.solve` plans for that peak (see `ours`). Then all of them take steps in turn, every rival right beside ours,
so that each ratio is between neighbours in time. A cell is one rival on one model: won where the bootstrap interval of
the median ratio lies below 1, lost where it lies above. Dropout is off: a compiled model draws other random numbers
than an eager one, and without dropout all rivals compute the very same step. On a CPU swaps go to a file in the same
memory; with `--recompute-alone` plans have none, and neither have the rivals. Greedy rules plan from the same profile
for a budget half-way from the smallest peak to everything kept, or another share of the way.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import documents
import numpy as np
import torch
from models import MODELS
from rivals import Enter, Forward, replace, rivals
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.option import ACTIONS
from ckptplan.solving import smallest_peak
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start

SCHEMA = "ckptplan.compare_real/1"
GIB, MIB = 1 << 30, 1 << 20
CPU = torch.device("cpu")
# "Close": as far from the plain step as twice-rounded results may be, in units of the plain step's own distance from
# the same step in double precision. Element by element says little: where a ReLU's input rounds across 0, one differs.
CLOSE = 4
# Predicted peaks lie up to a few hundredths of a percent above measured ones; see `ours`.
SLACK = 1e-3

WHAT = {
    "plain": "everything kept",
    "hf": "Hugging Face's gradient_checkpointing_enable with use_reentrant=False: every block recomputed, or every "
    "second one (hf/every2)",
    "hf/offload": "the same with offload=True: what is saved for the recompute in pinned host memory, copied on the "
    "compute stream",
    "selective": "torchtitan's SelectiveAC around each block: attention (on the CPU, too), products with a bias and "
    "every second other one are saved",
    "remat": "torch_remat.checkpoint around each block; remat/attention with the attention a region that is saved",
    "sequential": "torch.utils.checkpoint.checkpoint_sequential over the blocks in so many segments, the last kept. "
    "The model's list of blocks is replaced by one module that runs the same blocks; all else is the model's forward",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu(pin_memory=True). On the CPU it copies every saved tensor within "
    "the same memory: it shows the cost of copying and can't lower the peak. Copies lose their strides, so kernels may "
    "round otherwise. With pin_memory=False it does nothing on the CPU",
    "swap_all": "ckptplan's own baseline: every stage swapped to a file, at the smallest peak this allows",
    "greedy": "published greedy rules (ckptplan.baselines) on the same profile, for a budget between the smallest peak "
    "and everything kept",
    "compiled": "torch.compile(fullgraph=True) with this activation_memory_budget; 1 is plain compiled training. What "
    "its kernels hold outside of torch's allocator isn't seen",
}
"""Kind of rival -> what runs."""

RECOMPUTE_ALONE = (
    "plain", "hf", "hf/every2", "selective", "remat", "remat/attention", "sequential/2", "sequential/4", "chen_greedy",
)  # fmt: skip
"""The rivals that don't copy anything."""

GREEDY = ["chen_greedy", "superneurons", "capuchin"]
RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap medians."""

BLOCKS: Mapping[str, str] = {
    "gpt2": "transformer.h", "t5": "encoder.block", "bert": "bert.encoder.layer", "vit": "vit.layers",
    "resnet50": "resnet.encoder.stages", "llama": "model.layers", "mixtral": "model.layers",
}  # fmt: skip
"""Model -> its list of blocks, where it has one; for ResNet the list of stages, each with a list of blocks."""

Inputs = dict[str, Tensor]


@dataclass
class Contender:
    """A model under one regime, and what was measured of it."""

    name: str
    model: nn.Module
    forward: Forward
    peak_bytes: int = 0
    flops: int | None = None
    gradients: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Forward, loss and backward, the output held until the end as a caller's variable would be."""
        output = self.forward()
        output["loss"].backward()

    @property
    def step_s(self) -> float:
        return statistics.median(self.times_s)


@dataclass(frozen=True)
class Timing:
    """Seconds of the timed steps, in order of rounds."""

    median_s: float
    min_s: float
    max_s: float
    all_s: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One contender beside the plain model. None where something doesn't apply; `reason`: why nothing was measured.

    `gradients` and `buffers` are "equal" (every bit), "close" (see `CLOSE`) or "differ"; deviations are relative, in
    the 2-norm over all of them.
    """

    name: str
    reason: str | None = None
    peak_bytes: int | None = None
    step: Timing | None = None
    over_plain: float | None = None
    over_compiled: float | None = None
    gradients: str | None = None
    gradient_deviation: float | None = None
    buffers: str | None = None
    buffer_deviation: float | None = None
    extra_flops: float | None = None


@dataclass(frozen=True)
class Pair:
    """A rival, and ours with the rival's measured peak as budget.

    `over_rival` has our step divided by the rival's in the same round: the median, and the ends of its interval.
    """

    rival: Row
    ours: Row | None = None
    over_rival: tuple[float, float, float] | None = None
    within_budget: bool | None = None
    planning_s: float | None = None
    plan: dict[str, Any] | None = None


def make(name: str, quick: bool) -> tuple[nn.Module, Inputs]:
    """Build the model without dropout, and its inputs; with two blocks and little data when `quick`."""
    model, inputs = MODELS[name]()
    without_dropout(model)
    quiet(model)
    if quick:
        inputs = {key: value[:2] for key, value in inputs.items()}
        if name == "resnet50":
            for stage in model.get_submodule(BLOCKS[name]):
                stage.layers = stage.layers[:1]
        elif name in BLOCKS:
            replace(model, BLOCKS[name], model.get_submodule(BLOCKS[name])[:2])
    return model, inputs


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("attention_dropout", "dropout"):  # of attention
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)


def quiet(model: nn.Module) -> None:
    """Keep no cache of keys, and have the first step not warn, which breaks a compiled graph."""
    config = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if config is not None and model.loss_type is None:
        model.loss_type = "ForCausalLM"


@contextlib.contextmanager
def baseline(
    model: nn.Module, forward: Forward, *, name: str, profile: ckptplan.Profile, share: float
) -> Iterator[Forward]:
    """A published rule, for a budget at this share of the way or the next larger one that it keeps."""
    least = smallest_peak(profile).peak_bytes
    budget_bytes = 1 if name == "swap_all" else least + int((everything_kept_bytes(profile) - least) * share)
    try:
        plan = BASELINES[name](profile, budget_bytes)
    except InfeasibleBudgetError as error:
        plan = BASELINES[name](profile, error.min_peak_bytes)
    with ckptplan.apply(model, plan) as handle, handle.unmetered():
        yield forward


def entrants(name: str, profile: ckptplan.Profile, given: argparse.Namespace) -> dict[str, Enter]:
    """Names, and what puts a copy of the model under each regime."""
    segments = given.segments if name in BLOCKS else ()
    known = rivals(ratios=given.compiled, path=BLOCKS.get(name), segments=segments, every=(1, 2))
    found = {"plain": known["keep"].enter}
    by_block = ("selective", "remat", "remat/attention") if name in BLOCKS else ()
    names = ("hf", "hf/every2", "hf/offload", *by_block, *(f"sequential/{n}" for n in segments), "save_on_cpu")
    found |= {key: known[key].enter for key in names}
    rules = {name: functools.partial(baseline, name=name, profile=profile, share=given.share) for name in given.rules}
    found |= {"swap_all": functools.partial(baseline, name="swap_all", profile=profile, share=0.0), **rules}
    return found | {key: rival.enter for key, rival in known.items() if rival.compiles}


def enter(name: str, model: nn.Module, forward: Forward, inputs: Inputs) -> Contender:
    """Take the first steps: what they leave, their operations, their peak."""
    contender = Contender(name, model, forward)
    contender.step()  # the first of a fresh copy, so that running statistics can be compared too
    contender.gradients, contender.buffers = results(model)
    if not is_compiled(name):
        model.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False) as counter:
            contender.step()
        contender.flops = counter.get_total_flops()
    model.zero_grad(set_to_none=True)
    held_bytes = unique_bytes([*held_tensors(model), *inputs.values()])
    contender.peak_bytes = held_bytes + peak_above_start(contender.step)
    return contender


def results(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers, in order: `Segmented` changes their names."""
    gradients = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    return gradients, [buffer.detach().clone() for buffer in model.buffers()]


def rounding(model: nn.Module, inputs: Inputs, reference: Contender) -> tuple[float, float]:
    """How far the plain step's gradients and buffers are from those in double precision."""
    exact = copy.deepcopy(model).double()
    precise = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    exact(**precise)["loss"].backward()
    gradients, buffers = results(exact)
    return deviation(reference.gradients, gradients), deviation(reference.buffers, buffers)


def is_compiled(name: str) -> bool:
    return name.startswith("compiled")


def ignore_garbage() -> None:
    """What lives now is not searched for garbage any more, which makes collecting it before every step quick."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def race(contenders: Sequence[Contender], rounds: int) -> None:
    """Let everyone take one timed step a round, every other round in reverse; a first round isn't counted."""
    for contender in contenders:
        contender.model.zero_grad(set_to_none=True)
    ignore_garbage()
    gc.disable()
    for turn in range(rounds + 1):
        for contender in contenders if turn % 2 else reversed(contenders):
            gc.collect()
            begin = time.perf_counter()
            contender.model.zero_grad(set_to_none=True)
            contender.step()
            elapsed_s = time.perf_counter() - begin
            if turn:
                contender.times_s.append(elapsed_s)
    gc.enable()


def row(c: Contender, reference: Contender, compiled_s: float | None, allowed: tuple[float, float]) -> Row:
    """Lay a contender beside the plain model; `allowed` has the plain step's own `rounding`."""
    return Row(
        c.name, peak_bytes=c.peak_bytes, step=Timing(c.step_s, min(c.times_s), max(c.times_s), tuple(c.times_s)),
        over_plain=c.step_s / reference.step_s, over_compiled=c.step_s / compiled_s if compiled_s else None,
        gradients=verdict(c.gradients, reference.gradients, allowed[0]),
        gradient_deviation=deviation(c.gradients, reference.gradients),
        buffers=verdict(c.buffers, reference.buffers, allowed[1]),
        buffer_deviation=deviation(c.buffers, reference.buffers),
        extra_flops=None if c.flops is None or not reference.flops else c.flops / reference.flops - 1,
    )  # fmt: skip


def verdict(found: Sequence[Tensor], wanted: Sequence[Tensor], allowed: float) -> str:
    """One of "equal", "close" and "differ"."""
    if len(found) == len(wanted) and all(map(torch.equal, found, wanted)):
        return "equal"
    return "close" if deviation(found, wanted) <= CLOSE * allowed else "differ"


def deviation(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Norm of the difference, relative to the norm of what was wanted."""

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.hypot(*(float(t.double().norm()) for t in tensors))

    return norm(a.double() - b for a, b in zip(found, wanted, strict=True)) / (norm(wanted) or 1.0)


def compare(
    name: str, stack: contextlib.ExitStack, given: argparse.Namespace
) -> tuple[list[Pair], tuple[float, float]]:
    """Enter every rival, then ours at its peak; race them; lay them side by side. Also the plain step's rounding."""
    ignore_garbage()
    swaps, rounds = not given.recompute_alone, given.rounds
    model, inputs = make(name, given.quick)
    entered: list[tuple[Contender, Contender | None, dict[str, Any]]] = []
    missing: list[Pair] = []
    profile = ckptplan.profile(copy.deepcopy(model), inputs)
    for rival, way in entrants(name, profile, given).items():
        if not swaps and rival not in RECOMPUTE_ALONE:
            continue
        print(f"{name}: {rival}", file=sys.stderr, flush=True)
        mine = copy.deepcopy(model)
        try:
            forward = stack.enter_context(way(mine, functools.partial(mine, **inputs)))
            contender = enter(rival, mine, forward, inputs)
        except Exception as error:  # a rival that doesn't run is a result, whatever stops it
            missing.append(Pair(Row(rival, reason=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")))
            continue
        entered.append((contender, *ours(model, inputs, contender, stack, swaps)))
    race([c for pair in entered for c in pair[:2] if c], rounds)
    torch._dynamo.reset()
    reference = next(c for c, _, _ in entered if c.name == "plain")
    allowed = rounding(model, inputs, reference)
    compiled_s = next((c.step_s for c, _, _ in entered if c.name == "compiled/1"), None)
    pairs = []
    for rival, own, facts in entered:
        if own is None:
            pairs.append(Pair(row(rival, reference, compiled_s, allowed), **facts))
            continue
        pairs.append(
            Pair(
                row(rival, reference, compiled_s, allowed),
                row(own, reference, compiled_s, allowed),
                over_rival=median_within(np.array(own.times_s) / np.array(rival.times_s)),
                within_budget=own.peak_bytes <= rival.peak_bytes,
                **facts,
            )
        )
    return pairs + missing, allowed


def median_within(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """The median of some ratios, and its percentile bootstrap interval (Efron, 1979, Annals of Statistics 7(1))."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), INTERVAL)
    return float(np.median(ratios)), float(low), float(high)


def outcome(pair: Pair) -> str:
    """One of "won", "lost", "even", and "" where nothing was compared."""
    if pair.over_rival is None:
        return ""
    _, low, high = pair.over_rival
    return "won" if high < 1 else "lost" if low > 1 else "even"


def ours(
    model: nn.Module, inputs: Inputs, rival: Contender, stack: contextlib.ExitStack, swaps: bool
) -> tuple[Contender | None, dict[str, Any]]:
    """Plan for the rival's measured peak.

    Predicted peaks are upper bounds, so a plan whose measured peak is exactly the rival's may be predicted above it. A
    budget larger by `SLACK` is tried first and taken only if the *measured* peak is within the rival's; else the
    budget is that peak. Nothing enters where no plan fits; the facts then say what would.
    """
    for slack in (SLACK, 0.0):
        mine = copy.deepcopy(model)
        budget_gb = rival.peak_bytes * (1 + slack) / GIB
        began = time.perf_counter()
        try:
            plan = ckptplan.solve(
                mine, budget_gb, inputs=inputs, gap=0.0, actions=ACTIONS if swaps else ("keep", "recompute")
            )
        except InfeasibleBudgetError as error:
            facts = {"status": "infeasible", "min_peak_bytes": error.min_peak_bytes, "stage": error.stage}
            return None, {"planning_s": time.perf_counter() - began, "plan": facts}
        took_s = time.perf_counter() - began
        stack.enter_context(stack.enter_context(ckptplan.apply(mine, plan)).unmetered())
        contender = enter("ckptplan", mine, functools.partial(mine, **inputs), inputs)
        if contender.peak_bytes <= rival.peak_bytes:
            break
    facts = {
        "status": plan.status, "gap": plan.gap, "space": plan.space, "slack": slack, "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes, "step_s": plan.step_s, "overhead": plan.overhead,
        "actions": dict(Counter(decision.action for decision in plan.decisions.values())),
    }  # fmt: skip
    return contender, {"planning_s": took_s, "plan": facts}


def table(name: str, pairs: Sequence[Pair]) -> None:
    """Print one line per rival, ours on the right."""
    columns = (
        name, "peak MiB", "step ms", "/plain", "/compiled", "FLOPs", "gradients", "buffers", "ours MiB", "step ms",
        "/plain", "/rival", "gradients", "",
    )  # fmt: skip
    cells: list[tuple[Any, ...]] = []
    for pair in pairs:
        rival, own = pair.rival, pair.ours
        if rival.step is None or rival.peak_bytes is None:
            cells.append((rival.name, rival.reason))
            continue
        flops = None if rival.extra_flops is None else f"{rival.extra_flops:+.1%}"
        over_compiled = None if rival.over_compiled is None else f"{rival.over_compiled:.2f}"
        line = (
            rival.name, f"{rival.peak_bytes / MIB:.1f}", f"{rival.step.median_s * 1e3:.1f}", f"{rival.over_plain:.2f}",
            over_compiled, flops, rival.gradients, rival.buffers,
        )  # fmt: skip
        if own is None or own.step is None or pair.over_rival is None:
            cells.append((*line, f"no plan below {(pair.plan or {}).get('min_peak_bytes', 0) / MIB:.1f}"))
            continue
        ratio, low, high = pair.over_rival
        cells.append((
            *line, f"{(own.peak_bytes or 0) / MIB:.1f}", f"{own.step.median_s * 1e3:.1f}", f"{own.over_plain:.2f}",
            f"{ratio:.2f} ({low:.2f}-{high:.2f})", own.gradients, outcome(pair),
        ))  # fmt: skip
    documents.show(documents.table(columns, cells))


def complaints(name: str, pairs: Sequence[Pair]) -> list[str]:
    """Collect what must not happen: ours over budget or unequal, a rival that doesn't do what its name says."""
    found = []
    for pair in pairs:
        rival, own = pair.rival, pair.ours
        if own and not pair.within_budget:
            found.append(f"{name}: ours at {rival.name} peaks at {own.peak_bytes} of {rival.peak_bytes} bytes")
        if own and (own.gradients, own.buffers) != ("equal", "equal"):
            found.append(f"{name}: ours at {rival.name} leaves other gradients or buffers than the plain model")
        recomputes = rival.name.startswith(("hf", "sequential", "remat")) and rival.name != "sequential/1"
        if recomputes and rival.extra_flops is not None and rival.extra_flops <= 0:
            found.append(f"{name}: {rival.name} recomputed nothing")
    return found


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument(
        "--models", type=documents.among(MODELS), default=["gpt2", "llama", "vit", "unet", "t5", "mixtral"]
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each")
    parser.add_argument("--compiled", type=documents.reals, default=[], help="activation_memory_budgets; 1 is none")
    parser.add_argument("--segments", type=documents.numbers, default=[2, 4], help="of checkpoint_sequential")
    parser.add_argument("--rules", type=documents.among(BASELINES), default=GREEDY, help="published rules")
    parser.add_argument("--share", type=float, default=0.5, help="of the way to everything kept, for rules")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--recompute-alone", action="store_true", help="plans without swaps, beside rivals without")
    parser.add_argument("--quick", action="store_true", help="one model of two blocks, little data, 3 rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64  # every ratio compiles the same forward anew
    if args.quick:
        args.models, args.rounds, args.segments = ["gpt2"], 3, [2]
    document: dict[str, Any] = {
        "schema": SCHEMA, "rounds": args.rounds, "quick": args.quick, "recompute_alone": args.recompute_alone,
        "dropout": 0, "slack": SLACK, "what": WHAT,
        "close": f"2-norm distance from the plain step at most {CLOSE} times that step's own from double precision",
        "wrong": [], "cases": {},
    }  # fmt: skip
    for name in args.models:
        with contextlib.ExitStack() as stack:
            pairs, allowed = compare(name, stack, args)
        document["cases"][name] = {
            "rounding": {"gradients": allowed[0], "buffers": allowed[1]},
            "pairs": [asdict(pair) | {"outcome": outcome(pair)} for pair in pairs],
        }
        document["wrong"] += complaints(name, pairs)
        file = "compare_recompute.json" if args.recompute_alone else "compare_real.json"
        documents.save(args.out, file, document, threads=args.threads)
        table(name, pairs)
    for text in document["wrong"]:
        print(f"VIOLATION {text}")
    sys.exit(bool(document["wrong"]))


if __name__ == "__main__":
    main()
