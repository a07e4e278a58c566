"""Compiled layers: a ratio for each beside PyTorch's one ratio for all, and whether the gradients stay right.

    python experiments/compiled_layers.py --out experiments/results
    python experiments/compiled_layers.py --out experiments/results --part gradients --jobs 2
    python experiments/compiled_layers.py --out experiments/results --part seconds

"speed": every layer of a model is compiled under one `activation_memory_budget`, without this package; its peak is
measured (allocator events), and a plan without swaps is made for that peak. Then all take steps in turn, each on two
copies of the model, since copies that run the same code differ by some percent by where their tensors lie ("copies":
the second of the knob's beside the first). A cell's ratio is between both copies' steps of the same round: the median,
and its bootstrap interval. Dropout is off, so that the knob's gradients are right. "gradients": plans that mix ratios,
swaps, recompute and keep, beside the same compiled model without a plan, in fp32 and under bf16, with dropout as the
models have it; and the knob alone, for which the numbers of dropout are drawn again. Gradients that are zero but for
rounding ("zeros") are left out of deviations. "seconds": what compiling takes in
a first process and in a second one, and how many graphs each compiles.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any, NamedTuple

import documents
import numpy as np
import torch
from compare_real import GIB, MIB, SLACK, Contender, enter, median_within, quiet, race, without_dropout
from made_plans import scheduled
from models import MODELS, Made
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import ckptplan
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.profiling.values.variants import ROUNDING
from ckptplan.training.compiled import stages_compiled, structure_of, uncompiled_call
from ckptplan.training.partitioner import SavingDraws

Regime = Callable[[nn.Module], AbstractContextManager[None]]
RATIOS = (0.8, 0.6, 0.4, 0.2)
MIDDLE = (0.6, 0.4)
"""The middle of the range, in which mixing has most to give."""


class Knob(SavingDraws):
    """PyTorch's own partitioner under an `activation_memory_budget`: the knob, for one model among several."""

    def uuid(self) -> Any:
        return "knob", self.ratio

    def __call__(self, gm: Any, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=self.ratio):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


class Layer(nn.Module):
    """A layer of a transformer without attention, `times` as wide inside."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width * times)
        self.down, self.drop = nn.Linear(width * times, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Uneven(nn.Module):
    """Eight layers, each of another width inside than its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 256)
        self.layers = nn.ModuleList(Layer(256, times) for times in (1, 4, 2, 8, 1, 8, 2, 4))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def uneven() -> Made:
    torch.manual_seed(0)
    return Uneven().train(), {"x": torch.randn(2048, 64), "labels": torch.randint(10, (2048,))}


KNOWN = {**MODELS, "uneven": uneven}
SPEED = ["gpt2", "llama", "uneven", "unet"]
GRADIENTS = ["convnext", "unet", "t5", "gpt2", "llama", "vit", "bert", "uneven"]


def model_of(name: str, *, dropout: bool) -> Made:
    model, inputs = KNOWN[name]()
    quiet(model)
    if not dropout:
        without_dropout(model)
    return model, inputs


@contextlib.contextmanager
def knob(model: nn.Module, names: Sequence[str], ratio: float) -> Iterator[None]:
    """Inside, the modules of these names are compiled under one ratio; 1: as they are."""
    how: Any = {"options": {"custom_partitioner_fn": Knob(ratio)}, "dynamic": False, "fullgraph": True}
    calls: dict[Any, Any] = {}
    for name in names:  # as a plan's layers are compiled, PyTorch's own classes included
        module = model.get_submodule(name)
        call = calls.setdefault(structure_of(module), torch.compile(uncompiled_call(module), **how))
        module._compiled_call_impl = functools.partial(call, module)  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in names:
            del model.get_submodule(name)._compiled_call_impl


def layers_of(model: nn.Module, inputs: Any) -> tuple[str, ...]:
    """What `compile=True` compiles."""
    plan = ckptplan.solve(model, inputs=inputs, budget="100%", compile=True, menus=False, gap=1.0)
    return plan.fingerprint.compiled


# --- speed ---


def speed(name: str, rounds: int) -> list[dict[str, Any]]:
    """One row per ratio: the knob, and a plan for its peak."""
    torch.set_num_threads(1)
    model, inputs = model_of(name, dropout=False)
    names = layers_of(model, inputs)
    profiled = copy.deepcopy(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stages_compiled(profiled, names))
        began = time.perf_counter()
        profile = ckptplan.profile(profiled, inputs)
        profile_s = time.perf_counter() - began

        def entered(regime: Regime) -> Contender:
            """Another copy of the model, under this regime until the race is over."""
            mine = copy.deepcopy(model)
            stack.enter_context(regime(mine))
            return enter("compiled", mine, functools.partial(mine, **inputs), inputs)

        plain = entered(lambda mine: stages_compiled(mine, names))
        cells: list[Cell] = []
        for ratio in RATIOS:
            rivals = [entered(functools.partial(knob, names=names, ratio=ratio)) for _ in range(2)]
            cells.append(Cell(ratio, rivals, *_ours(profile, names, rivals[0].peak_bytes, entered)))
        race([plain, *(c for cell in cells for pair in zip_longest(cell.rivals, cell.ours) for c in pair if c)], rounds)
    rows = []
    for cell in cells:
        knobs_s = sum(np.array(c.times_s) for c in cell.rivals)
        row = {
            "model": name, "ratio": cell.ratio, "layers": len(names), "profile_s": profile_s,
            "plain_peak_bytes": plain.peak_bytes, "peak_bytes": cell.rivals[0].peak_bytes,
            "over_plain": np.median(knobs_s / 2).item() / plain.step_s,
            "copies": median_within(np.array(cell.rivals[1].times_s) / np.array(cell.rivals[0].times_s)),
            "gradients_equal": all(_equal(c, plain) for c in cell.rivals),
        }  # fmt: skip
        if cell.plan is not None:
            ours_s = sum(np.array(c.times_s) for c in cell.ours)
            row |= {
                "our_peak_bytes": max(c.peak_bytes for c in cell.ours), "predicted_peak_bytes": cell.plan.peak_bytes,
                "our_over_plain": np.median(ours_s / 2).item() / plain.step_s,
                "over_rival": median_within(ours_s / knobs_s), "gap": cell.plan.gap,
                "our_gradients_equal": all(_equal(c, plain) for c in cell.ours),
                "options": dict(Counter(c.option for c in cell.plan.choices)),
            }  # fmt: skip
        rows.append(row)
    return rows


class Cell(NamedTuple):
    """The knob under one ratio, and a plan for its peak, on two copies each; without a plan where none fits."""

    ratio: float
    rivals: list[Contender]
    ours: list[Contender]
    plan: ckptplan.Plan | None


def _ours(
    profile: ckptplan.Profile, names: tuple[str, ...], peak_bytes: int, entered: Callable[[Regime], Contender]
) -> tuple[list[Contender], ckptplan.Plan | None]:
    """A plan without swaps for the rival's measured peak; a budget larger by `SLACK` is tried first, as elsewhere."""

    @contextlib.contextmanager
    def planned(mine: nn.Module) -> Iterator[None]:
        with stages_compiled(mine, names), ckptplan.apply(mine, plan) as handle, handle.unmetered():
            yield

    for slack in (SLACK, 0.0):
        try:
            plan = ckptplan.solve(profile, peak_bytes * (1 + slack) / GIB, actions=("keep", "recompute"), gap=0.0)
        except InfeasibleBudgetError:
            return [], None
        own = entered(planned)
        if own.peak_bytes <= peak_bytes:
            break
    return [own, entered(planned)], plan


def _equal(a: Contender, b: Contender) -> bool:
    return all(map(torch.equal, a.gradients, b.gradients))


def told_speed(rows: Sequence[dict[str, Any]]) -> tuple[list[documents.Check], Any]:
    compared = [r for r in rows if "over_rival" in r]
    middle = [r["over_rival"][0] for r in compared if r["ratio"] in MIDDLE]
    checks = [
        (all(r["over_rival"][1] <= 1 for r in compared), "never slower: no interval lies above 1"),
        (bool(middle) and statistics.median(middle) <= 0.98, "at least 2 % faster in the middle of the range (median)"),
        (all(r["our_peak_bytes"] <= r["peak_bytes"] for r in compared), "each plan keeps its budget"),
        (
            all(abs(r["predicted_peak_bytes"] / r["our_peak_bytes"] - 1) <= 0.01 for r in compared),
            "predicted peaks are within 1 % of the measured ones",
        ),
        (all(r["our_gradients_equal"] for r in compared), "gradients are the compiled model's, bit for bit"),
    ]
    lines = [
        (
            r["model"], r["ratio"], f"{r['peak_bytes'] / MIB:.1f}", f"{r['over_plain']:.3f}",
            "{:.3f} ({:.3f} to {:.3f})".format(*r["copies"]),
            *(
                ("no plan fits", None, None, None)
                if "over_rival" not in r
                else (
                    f"{r['our_over_plain']:.3f}", "{:.3f} ({:.3f} to {:.3f})".format(*r["over_rival"]),
                    f"{r['our_peak_bytes'] / MIB:.1f}", ", ".join(f"{n} {o}" for o, n in r["options"].items()),
                )
            ),
        )
        for r in rows
    ]  # fmt: skip
    columns = ("model", "knob", "peak MiB", "/plain", "copies", "ours /plain", "ours / knob", "ours MiB", "options")
    return checks, documents.table(columns, lines)


# --- gradients ---


def gradients(name: str) -> list[dict[str, Any]]:
    """A mixed plan in fp32 and under bf16 beside the compiled model without a plan, and the knob alone."""
    torch.set_num_threads(1)
    rows = []
    names = layers_of(*model_of(name, dropout=True))
    for amp in (None, "bfloat16"):
        model, inputs = model_of(name, dropout=True)
        with stages_compiled(model, names):
            profile = ckptplan.profile(model, inputs, amp=amp)
            plan = ckptplan.solve(profile, budget="30%")
            # Whatever is cheapest at this budget, some stages of each kind.
            wanted, options = ("compiled-1", "swap", "compiled-2", "recompute", "keep", "compiled-3+swap"), []
            layers = [i for i, s in enumerate(profile.stages) if s.name in names]
            for i, stage in enumerate(profile.stages):
                turn = wanted[layers.index(i) % len(wanted)] if i in layers else plan.choices[i].option
                options.append(stage.find(turn) or stage.option(plan.choices[i].option))
            mixed = scheduled(profile, options, ())
            v = ckptplan.verify(model, mixed, inputs, amp=amp, repeats=1)
            plain = _ran(model, inputs, amp)
            exact = plain if amp is None else _ran(model, inputs, None)
            with ckptplan.apply(model, mixed) as handle:
                ours = _ran(model, inputs, amp)
                differences = dict(handle.stats().differences)
        with knob(model, names, 0.5):
            alone = _ran(model, inputs, amp)
        rows.append({
            "model": name, "amp": amp, "options": dict(Counter(c.option for c in mixed.choices)),
            "loss_equal": torch.equal(ours[0], plain[0]), "bitwise": all(map(torch.equal, ours[1], plain[1])),
            "deviation": _deviation(ours[1], plain[1], exact[1]),
            "knob_deviation": _deviation(alone[1], plain[1], exact[1]),
            "zeros": sum(_is_zero(a, b) for a, b in zip(plain[1], exact[1], strict=True)),
            "differences": differences, "measured_peak_bytes": v.measured_peak_bytes,
            "predicted_peak_bytes": mixed.peak_bytes, "notes": [n for n in profile.notes if "compiled" in n],
        })  # fmt: skip
    return rows


def _ran(model: nn.Module, inputs: Any, amp: str | None) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp is not None):
        loss = model(**inputs)["loss"]
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def _deviation(found: Sequence[Tensor], wanted: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference of a gradient, as a share of its largest element; of those that aren't zero."""
    each = (trio for trio in zip(found, wanted, exact, strict=True) if not _is_zero(*trio[1:]))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b, _ in each)


def _is_zero(gradient: Tensor, exact: Tensor) -> bool:
    """Whether a gradient is rounding alone, as that of an attention's key bias: in fp32 it is far smaller, or zero."""
    return bool(exact.abs().max() <= 1e-2 * gradient.abs().max())


def told_gradients(rows: Sequence[dict[str, Any]]) -> tuple[list[documents.Check], Any]:
    fp32, bf16 = ([r for r in rows if r["amp"] == amp] for amp in (None, "bfloat16"))
    checks = [
        (all(r["bitwise"] and r["loss_equal"] for r in fp32), "fp32: loss and gradients bit for bit"),
        (all(r["loss_equal"] for r in bf16), "bf16: the same loss"),
        (all(r["deviation"] <= ROUNDING for r in bf16), f"bf16: gradients within {ROUNDING:.0%} of their largest"),
        (
            all(abs(r["predicted_peak_bytes"] / r["measured_peak_bytes"] - 1) <= 0.01 for r in rows),
            "predicted peaks are within 1 % of the measured ones",
        ),
        (not any(r["differences"] for r in rows), "no difference is counted"),
    ]
    lines = [
        (
            r["model"], r["amp"] or "float32", r["bitwise"], f"{r['deviation']:.1e}", r["zeros"],
            f"{r['knob_deviation']:.1e}",
            f"{r['predicted_peak_bytes'] / r['measured_peak_bytes'] - 1:+.2%}",
            ", ".join(f"{n} {o}" for o, n in r["options"].items()),
        )
        for r in rows
    ]  # fmt: skip
    columns = ("model", "type", "bitwise", "deviation", "zeros", "the knob alone", "peak", "options")
    return checks, documents.table(columns, lines)


# --- seconds ---


def seconds(name: str) -> list[dict[str, Any]]:
    """Profiling in a process, without and with what an earlier one has left in the compiler's caches."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows = []
        for process in ("first", "second"):
            found = documents.in_a_process(_profiled, name)
            rows.append({"model": name, "process": process} | found)
    return rows


def _profiled(name: str) -> dict[str, Any]:
    model, inputs = model_of(name, dropout=False)
    begin = time.perf_counter()
    names = layers_of(model, inputs)
    found_s = time.perf_counter() - begin
    begin, last, parts = time.perf_counter(), "", Counter[str]()

    def on_progress(text: str) -> None:
        nonlocal begin, last
        now = time.perf_counter()
        parts[last] += now - begin
        begin, last = now, " ".join(text.split()[:1])

    with stages_compiled(model, names):
        profile = ckptplan.profile(model, inputs, on_progress=on_progress)
    on_progress("")
    kinds = {stage.kind: sum(o.ratio > 0 and not o.moves for o in stage.options) for stage in profile.stages}
    return {
        "layers": len(names), "kinds": sum(n > 0 for n in kinds.values()), "variants": sum(kinds.values()),
        "layers_s": found_s, "own_code_s": parts["running"], "listing_s": parts["listing"],
        "variants_s": parts["compiling"], "profile_s": sum(parts.values()),
        "compiled": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
    }  # fmt: skip


def told_seconds(rows: Sequence[dict[str, Any]]) -> tuple[list[documents.Check], Any]:
    pairs = [(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    checks = [
        (
            all(a["compiled"] for a, _ in pairs) and not any(b["compiled"] for _, b in pairs),
            "the second compiles nothing",
        ),
        (all(b["variants_s"] < a["variants_s"] for a, b in pairs), "the second process takes less"),
    ]
    fields = ("layers_s", "own_code_s", "listing_s", "variants_s", "profile_s")
    lines = [
        (r["model"], r["process"], r["kinds"], r["variants"], r["compiled"], *(f"{r[field]:.1f}" for field in fields))
        for r in rows
    ]
    return checks, documents.table(("model", "process", "kinds", "variants", "graphs compiled", *fields), lines)


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--part", choices=("speed", "gradients", "seconds"), default="speed")
    parser.add_argument("--models", type=documents.among(KNOWN), help="default: those of the part")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each copy")
    parser.add_argument("--jobs", type=int, default=1, help="models at once, for gradients alone")
    args = parser.parse_args()
    if args.jobs > 1 and args.part != "gradients":
        parser.error(f"--jobs {args.jobs} with --part {args.part}: its times need the machine alone; leave --jobs out")
    part = {
        "speed": (functools.partial(speed, rounds=args.rounds), told_speed, SPEED),
        "gradients": (gradients, told_gradients, GRADIENTS),
        "seconds": (seconds, told_seconds, SPEED),
    }  # fmt: skip
    measure, told, models = part[args.part]
    rows: list[dict[str, Any]] = []
    names = args.models or models
    each = (
        ((n, measure(n)) for n in names)
        if args.part == "seconds"
        else documents.in_processes(measure, names, jobs=args.jobs)
    )
    failed: list[documents.Check] = []
    for name, found in each:
        if isinstance(found, str):
            failed.append((False, f"{name}: {found}"))
            continue
        rows += found
        documents.show(told(rows)[1])
    checks, table = told(rows)
    checks += failed
    file = "_".join(("compiled", args.part, *(args.models or ()))) + ".json"
    documents.finish(rows, checks, table, args.out, file, rounds=args.rounds)


if __name__ == "__main__":
    main()
