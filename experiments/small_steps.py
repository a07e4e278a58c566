"""Predicted against measured steps of small models (3-50 ms a step), of a GPT-2 with and without LoRA, and of a loop.

    python experiments/small_steps.py --out experiments/results
    python experiments/small_steps.py --models mlp,conv --ways all,swap

Here copies' latency, the bandwidth that they take from compute, and our own Python per option are a large part of the
step. Each model is planned for two budgets, percentages of the way from the smallest feasible peak to the peak with
everything kept, in three ways: with all actions, with swaps alone (what is predicted of them), and with recompute alone
(what all actions must not be slower than). Blocks of steps of each way, and with everything kept, are run in turn.

Errors are of the prediction scaled by measured / predicted step with everything kept, as `error_by_plain` in
predicted_steps.py: a shared machine runs at another speed when it measures than when it profiled. Everything is kept by
a plan, as in the prediction, where each kept stage has the runtime's code too. The heap keeps its pages (`keep_pages`):
by default glibc gives them back and gets them anew, in steps and in profiles, more or fewer of them by chance.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import documents
import torch
from models import _text
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.cli.demo import keep_pages
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.request import Limits
from ckptplan.solving.planner import smallest_peak, solve_profile

SCHEMA = "ckptplan.small_steps/1"
PROMISE = 0.10
WAYS = {"all": ("keep", "swap", "recompute"), "swap": ("keep", "swap"), "recompute": ("keep", "recompute")}
STEPS = 4  # in a block, after one that doesn't count

Made = tuple[nn.Module, Any]


class _Residual(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Loop(nn.Module):
    """An LSTM's cell over the tokens of a sequence: as many calls of one module."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.cell, self.head, self.tokens = nn.LSTMCell(width, width), nn.Linear(width, 100), tokens

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], x.shape[2])
        out = []
        for t in range(self.tokens):
            h, c = self.cell(x[t], (h, c))
            out.append(h)
        return self.head(torch.stack(out))


class _Lora(nn.Module):
    """A frozen linear layer with a trained addition of rank 8."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base.requires_grad_(False), nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(nn.functional.dropout(x, 0.05)))


def _residual(width: int, inner: int, rows: int, depth: int) -> Made:
    return nn.Sequential(*(_Residual(width, inner) for _ in range(depth))), torch.randn(rows, width)


def _mlp(width: int, rows: int, depth: int) -> Made:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(*blocks), torch.randn(rows, width)


def _conv(channels: int, side: int, batch: int, depth: int) -> Made:
    def block(i: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels if i else 3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
        )

    return nn.Sequential(*(block(i) for i in range(depth))), torch.randn(batch, 3, side, side)


def _encoder(width: int, length: int, batch: int, depth: int) -> Made:
    layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(depth)]
    return nn.Sequential(*layers), torch.randn(batch, length, width)


def _gpt2(layers: int = 4, batch: int = 2, length: int = 128) -> Made:
    config = GPT2Config(
        vocab_size=2000, n_positions=length, n_embd=128, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return _text(GPT2LMHeadModel, config, batch, length)


def _lora() -> Made:
    model, inputs = _gpt2()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = _Lora(block.attn.c_attn, 128, 384)
        block.mlp.c_fc = _Lora(block.mlp.c_fc, 128, 512)
    return model, inputs


def _loop() -> Made:
    return _Loop(256, 50), torch.randn(50, 32, 256)


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: _mlp(256, 512, 8),
    "mlp_wide": lambda: _mlp(512, 1024, 8),
    "mlp_deep": lambda: _mlp(128, 512, 24),
    "residual": lambda: _residual(128, 512, 512, 8),
    "residual_deep": lambda: _residual(64, 256, 1024, 16),
    "conv": lambda: _conv(16, 32, 4, 8),
    "conv_wide": lambda: _conv(32, 32, 8, 6),
    "encoder": lambda: _encoder(64, 64, 8, 6),
    "encoder_long": lambda: _encoder(64, 256, 2, 4),
    "gpt2_tiny": lambda: _gpt2(2, 1, 64),
    "gpt2": _gpt2,
    "lora": _lora,
    "lstm_loop": _loop,
}


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
    everything_kept = BASELINES["keep_all"](profile, 1 << 59)
    most = everything_kept.peak_bytes
    plans: dict[Any, ckptplan.Plan] = {}
    for percent in percents:
        for way in ways:
            limits = Limits(actions=WAYS[way], time_limit_s=limit_s, gap=0.0)
            with contextlib.suppress(InfeasibleBudgetError):
                plans[percent, way] = solve_profile(profile, least + math.ceil((most - least) * percent / 100), limits)
    found: dict[Any, list[float]] = {key: [] for key in (None, *plans)}  # None: everything kept
    for number in range(rounds):
        gc.collect()
        for key in list(found)[:: 1 if number % 2 else -1]:
            plan = plans[key] if key else everything_kept
            with ckptplan.apply(model, plan, profile=profile, check="off") as handle, handle.unmetered():
                _step(model, inputs)
                found[key].append(statistics.median(_step(model, inputs) for _ in range(STEPS)))
    cases = []
    for (percent, way), plan in plans.items():
        measured_s, plain_s = found[percent, way], found[None]
        ratio = statistics.median(a / b for a, b in zip(measured_s, plain_s, strict=True))
        other = found.get((percent, "recompute")) if way == "all" else None
        actions = [choice.option or choice.action for choice in plan.choices]
        case = Case(
            model=name,
            percent=percent,
            way=way,
            actions={action: actions.count(action) for action in dict.fromkeys(actions)},
            moved_bytes=plan.host_bytes,
            predicted_s=plan.step_s,
            predicted_plain_s=plan.baseline_step_s,
            measured_s=statistics.median(measured_s),
            measured_plain_s=statistics.median(plain_s),
            error=plan.step_s / plan.baseline_step_s / ratio - 1,
            over_recompute=other and statistics.median(a / b for a, b in zip(measured_s, other, strict=True)) - 1,
        )
        cases.append(case)
        over = "" if case.over_recompute is None else f", {case.over_recompute:+.1%} over recompute alone"
        print(
            f"{name:<14}{percent:3.0f} % {way:<10} predicted {plan.step_s / plan.baseline_step_s:6.3f} x, measured "
            f"{ratio:6.3f} x kept ({case.predicted_plain_s * 1e3:.1f}, {case.measured_plain_s * 1e3:.1f} ms): "
            f"{case.error:+6.1%}{over}; {_text_of(case.actions)}",
            flush=True,
        )
    return cases


def _text_of(actions: dict[str, int]) -> str:
    return ", ".join(f"{count} {action}" for action, count in actions.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default="25,60", help="comma-separated percentages")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=15, help=f"blocks of {STEPS} steps of each way")
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for each plan")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    keep_pages(True)
    torch.set_num_threads(args.threads)
    percents, ways = [float(x) for x in args.budgets.split(",")], args.ways.split(",")
    began = time.perf_counter()
    cases = [c for name in args.models.split(",") for c in measure(name, percents, ways, args.rounds, args.time_limit)]
    summary = {}
    for way in ways:
        errors = [abs(case.error) for case in cases if case.way == way]
        summary[way] = {
            "median": statistics.median(errors),
            "worst": max(errors),
            "within_promise": sum(error <= PROMISE for error in errors) / len(errors),
        }
        print(f"{way}: " + ", ".join(f"{what} {value:.1%}" for what, value in summary[way].items()))
    if args.out is not None:
        document = {
            "schema": SCHEMA,
            "command": documents.command(),
            "environment": documents.environment(args.threads),
            "took_s": time.perf_counter() - began,
            "summary": summary,
            "cases": [asdict(case) for case in cases],
        }
        documents.write(document, args.out / "small_steps.json")


if __name__ == "__main__":
    main()
