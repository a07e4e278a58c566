"""How near is a plan's predicted step time to the measured one, over models and budgets?

    python experiments/predicted_steps.py --out experiments/results
    python experiments/predicted_steps.py --small --out experiments/results
    python experiments/predicted_steps.py --models gpt2 --budgets 60 --ways all --rounds 1

With `--small` the models' steps take milliseconds (a GPT-2 with and without LoRA, and a loop of a module's calls among
them), so that copies' latency, the bandwidth that they take from compute and the runtime's own Python show. Each model
is planned for budgets that are percentages of the way from the smallest feasible peak to the peak with everything kept:
with all actions, with swaps alone, or with recompute alone, which plans of all actions must not be slower than. Blocks
of steps of each plan, and of one that keeps everything, run in turn; the first step of a block isn't counted.

- error: predicted / measured - 1. A profile is timed at another moment than the steps, so on a machine whose load or
  clock changes this is mostly the machine's error.
- error by plain: predicted planned step / step with everything kept, divided by the measured one, minus 1: the error of
  what the plan changes, recompute, copies and waits.

The heap keeps its pages (`keep_pages`): by default glibc gives them back and gets them anew, more or fewer by chance.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import documents
import models
import torch
from torch import Tensor, nn

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.cli.demo import keep_pages
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.request import Limits
from ckptplan.solving.planner import smallest_peak, solve_profile

WAYS = {"all": ("keep", "swap", "recompute"), "swap": ("keep", "swap"), "recompute": ("keep", "recompute")}
STEPS = 4  # in a block, after one that doesn't count
LARGE = ("gpt2", "bert", "vit", "resnet50", "llama", "t5", "swin", "convnext")
PROMISE = {False: 0.05, True: 0.10}
"""Of small steps or not: an error by plain that is within what is promised."""

Made = tuple[nn.Module, Any]


class _Residual(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Loop(nn.Module):
    """An LSTM's cell over the tokens of a sequence: as many calls of one module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], x.shape[2])
        out = []
        for token in x:
            h, c = self.cell(token, (h, c))
            out.append(h)
        return self.head(torch.stack(out))


class _Lora(nn.Module):
    """A frozen linear layer with a trained addition of rank 8."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base.requires_grad_(False), nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(nn.functional.dropout(x, 0.05)))


def _chain(depth: int, block: Callable[[int], nn.Module], *shape: int) -> Made:
    return nn.Sequential(*map(block, range(depth))), torch.randn(*shape)


def _mlp(width: int, rows: int, depth: int) -> Made:
    return _chain(
        depth, lambda i: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)), rows, width
    )  # fmt: skip


def _residual(width: int, rows: int, depth: int) -> Made:
    return _chain(depth, lambda i: _Residual(width, 4 * width), rows, width)


def _conv(channels: int, batch: int, depth: int) -> Made:
    def block(i: int) -> nn.Module:
        conv = nn.Conv2d(channels if i else 3, channels, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())

    return _chain(depth, block, batch, 3, 32, 32)


def _encoder(length: int, batch: int, depth: int) -> Made:
    return _chain(depth, lambda i: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), batch, length, 64)


def _gpt2(layers: int = 4, batch: int = 2, length: int = 128) -> Made:
    return models.gpt2(batch, length, layers, width=128)


def _lora() -> Made:
    model, inputs = _gpt2()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = _Lora(block.attn.c_attn, 128, 384)
        block.mlp.c_fc = _Lora(block.mlp.c_fc, 128, 512)
    return model, inputs


SMALL: dict[str, Callable[[], Made]] = {
    "mlp": lambda: _mlp(256, 512, 8), "mlp_wide": lambda: _mlp(512, 1024, 8), "mlp_deep": lambda: _mlp(128, 512, 24),
    "residual": lambda: _residual(128, 512, 8), "residual_deep": lambda: _residual(64, 1024, 16),
    "conv": lambda: _conv(16, 4, 8), "conv_wide": lambda: _conv(32, 8, 6), "encoder": lambda: _encoder(64, 8, 6),
    "encoder_long": lambda: _encoder(256, 2, 4), "gpt2_tiny": lambda: _gpt2(2, 1, 64), "gpt2_small": _gpt2,
    "lora": _lora, "lstm_loop": lambda: (_Loop(256), torch.randn(50, 32, 256)),
}  # fmt: skip
MODELS: dict[str, Callable[[], Made]] = {**{name: models.MODELS[name] for name in LARGE}, **SMALL}


@dataclass(frozen=True)
class Case:
    """One model under one budget, planned in one way; `over_recompute` is beside the plan that moves nothing."""

    model: str
    percent: float
    way: str
    actions: dict[str, int]
    moved_bytes: int
    predicted_s: float
    predicted_plain_s: float
    measured_s: float
    measured_plain_s: float
    error: float
    error_by_plain: float
    over_recompute: float | None


def _step(model: nn.Module, inputs: Any) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    (output["loss"] if isinstance(inputs, dict) else output.mean()).backward()
    return time.perf_counter() - begin


def measure(name: str, percents: list[float], ways: list[str], rounds: int, limit_s: float) -> list[Case]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    profile = ckptplan.profile(model, inputs)
    least = smallest_peak(profile).peak_bytes
    plans: dict[Any, ckptplan.Plan] = {None: BASELINES["keep_all"](profile, 1 << 59)}
    most = plans[None].peak_bytes
    for percent in percents:
        for way in ways:
            limits = Limits(actions=WAYS[way], time_limit_s=limit_s, gap=0.0)
            with contextlib.suppress(InfeasibleBudgetError):  # the smallest peak of some ways is above the least one
                plans[percent, way] = solve_profile(profile, least + math.ceil((most - least) * percent / 100), limits)
    found: dict[Any, list[float]] = {key: [] for key in plans}
    for number in range(rounds):
        gc.collect()
        for key in list(plans)[:: 1 if number % 2 else -1]:
            with ckptplan.apply(model, plans[key], profile=profile, check="off") as handle, handle.unmetered():
                _step(model, inputs)
                found[key].append(statistics.median(_step(model, inputs) for _ in range(STEPS)))
    kept_s = found.pop(None)

    def ratio(ours: list[float], theirs: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

    cases = []
    for (percent, way), measured_s in found.items():
        plan, other = plans[percent, way], found.get((percent, "recompute")) if way == "all" else None
        actions = [choice.option or choice.action for choice in plan.choices]
        case = Case(
            name, percent, way, {action: actions.count(action) for action in dict.fromkeys(actions)}, plan.host_bytes,
            plan.step_s, plan.baseline_step_s, statistics.median(measured_s), statistics.median(kept_s),
            plan.step_s / statistics.median(measured_s) - 1,
            plan.step_s / plan.baseline_step_s / ratio(measured_s, kept_s) - 1,
            other and ratio(measured_s, other) - 1,
        )  # fmt: skip
        cases.append(case)
        over = "" if case.over_recompute is None else f", {case.over_recompute:+.1%} over recompute alone"
        print(
            f"{name:<14}{percent:3.0f} % {way:<10} predicted {case.predicted_s * 1e3:.1f} ms, measured "
            f"{case.measured_s * 1e3:.1f}: {case.error:+.1%}, by plain {case.error_by_plain:+.1%}{over}",
            flush=True,
        )
    return cases


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--small", action="store_true", help="models whose steps take milliseconds, in all ways")
    parser.add_argument("--models", type=documents.among(MODELS), help="some of them")
    parser.add_argument("--budgets", type=documents.reals, help="percentages")
    parser.add_argument("--ways", type=documents.among(WAYS))
    parser.add_argument("--rounds", type=int, help=f"blocks of {STEPS} steps of each plan")
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds for each plan")
    args = parser.parse_args()
    keep_pages(True)
    torch.set_num_threads(1)
    names = args.models or (SMALL if args.small else LARGE)
    percents = args.budgets or ([25.0, 60.0] if args.small else [0.0, 40.0, 60.0, 80.0])
    ways, rounds = args.ways or (list(WAYS) if args.small else ["all"]), args.rounds or (15 if args.small else 3)
    began = time.perf_counter()
    cases = [case for name in names for case in measure(name, percents, ways, rounds, args.time_limit)]
    summary: dict[str, Any] = {}
    for way in ways:
        for field in ("error", "error_by_plain"):
            errors = [abs(getattr(case, field)) for case in cases if case.way == way]
            within = sum(error <= PROMISE[args.small] for error in errors) / len(errors)
            summary[f"{way}: {field}"] = {
                "median": statistics.median(errors), "worst": max(errors), "within_promise": within
            }  # fmt: skip
    for what, of in summary.items():
        print(f"{what}: " + ", ".join(f"{key} {value:.1%}" for key, value in of.items()))
    document = {"took_s": time.perf_counter() - began, "summary": summary, "cases": [asdict(case) for case in cases]}
    documents.save(args.out, "small_steps.json" if args.small else "predicted_steps.json", document)


if __name__ == "__main__":
    main()
