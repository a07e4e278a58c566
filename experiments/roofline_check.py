"""Roofline times against real ones on this machine: python experiments/roofline_check.py [device.json] [--effort 0.6]

Calibrates the machine (or takes a file that `ckptplan calibrate -o` wrote), sums `op_seconds` over the operations of a
model's forward and backward, and times both for real. Prints predicted over measured per model, and their median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ckptplan.core.device import find_device
from ckptplan.profiling.bytes.operations import SeenOperations
from ckptplan.profiling.times.calibrate import calibrate
from ckptplan.profiling.times.roofline import op_cost, op_seconds
from ckptplan.runtime.observe.measure import timed


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, width: int = 384, heads: int = 6, blocks: int = 4, words: int = 8192) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*[GPTBlock(width, heads) for _ in range(blocks)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens)))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels // 4, 1, bias=False), nn.BatchNorm2d(channels // 4), nn.ReLU(inplace=True),
            nn.Conv2d(channels // 4, channels // 4, 3, padding=1, bias=False), nn.BatchNorm2d(channels // 4),
            nn.ReLU(inplace=True), nn.Conv2d(channels // 4, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


def residual_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Conv2d(64, 256, 1), Residual(256), Residual(256),
        nn.Conv2d(256, 512, 1, stride=2), Residual(512), Residual(512),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    )  # fmt: skip


def plain_network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 36, 1024), nn.ReLU(), nn.Linear(1024, 100))


def cases(device: torch.device) -> dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    large = device.type == "cuda"
    out: dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]] = {}
    for batch, length in ((2, 128), (4, 256)):
        batch = batch * (8 if large else 1)
        tokens = torch.randint(0, 8192, (batch, length), device=device)
        out[f"GPT-2 like, batch {batch}, length {length}"] = GPT().to(device), tokens, tokens
    for name, make, side, classes in (
        ("ResNet like", residual_network, 128, 1000),
        ("VGG like", plain_network, 96, 100),
    ):
        batch = 8 * (8 if large else 1)
        target = torch.randint(0, classes, (batch,), device=device)
        out[f"{name}, batch {batch}, side {side}"] = (
            make().to(device),
            torch.randn(batch, 3, side, side, device=device),
            target,
        )
    return out


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def measured(model: nn.Module, given: torch.Tensor, target: torch.Tensor, device: torch.device) -> tuple[float, float]:
    forward, backward = [], []
    loss: list[torch.Tensor] = []
    for run in range(6):
        model.zero_grad(set_to_none=True)
        forward_s = timed(lambda: loss.append(loss_of(model(given), target)), device)
        backward_s = timed(lambda: loss.pop().backward(), device)
        if run:
            forward.append(forward_s)
            backward.append(backward_s)
    return statistics.median(forward), statistics.median(backward)


def recorded(run: Callable[[], Any]) -> tuple[list[Any], Any]:
    with SeenOperations() as found:
        result = run()
    return found.keys, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", type=Path, help="a device file; default: calibrate now")
    parser.add_argument("--on", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--effort", type=float, default=0.6)
    options = parser.parse_args()
    torch.manual_seed(0)
    here = torch.device(options.on)
    device = find_device(options.device) if options.device else calibrate(here, effort_s=options.effort)
    ratios = []
    print(f"{device.description}, torch {torch.__version__}")
    print(f"{'model':38} {'pass':9} {'predicted':>11} {'measured':>11} {'ratio':>6}   predicted by class")
    for name, (model, given, target) in cases(here).items():
        real = measured(model, given, target, here)
        model.zero_grad(set_to_none=True)
        forward, loss = recorded(lambda m=model, g=given, t=target: loss_of(m(g), t))  # type: ignore[misc]
        backward, _ = recorded(loss.backward)
        for what, keys, real_s in zip(("forward", "backward"), (forward, backward), real, strict=True):
            by_kind: dict[str, float] = {}
            for key in keys:
                kind = op_cost(key).kind
                by_kind[kind] = by_kind.get(kind, 0.0) + op_seconds(key, device)
            predicted_s = sum(by_kind.values())
            ratios.append(predicted_s / real_s)
            parts = ", ".join(f"{k} {s / predicted_s:.0%}" for k, s in sorted(by_kind.items(), key=lambda x: -x[1])[:4])
            print(f"{name:38} {what:9} {predicted_s * 1e3:8.1f} ms {real_s * 1e3:8.1f} ms {ratios[-1]:6.2f}   {parts}")
            sys.stdout.flush()
    print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
