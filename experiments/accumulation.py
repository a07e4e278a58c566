"""Do plans for steps that start with gradients keep their budgets in loops that have such steps?

    python experiments/accumulation.py --out experiments/results

Three models are trained with two optimizers in three loops: one batch a step whose gradients are set to zero and kept,
and two and four micro-batches with dropped gradients. Each is planned with `accumulate=True` for budgets that lie a
tenth and half of the way from the smallest peak to that of keeping everything. The peak of two steps, update included,
is measured by the allocator's own account and held against the budget. Beside it: what the same loop meets under a plan
for steps that start without gradients and the same budget, and whether losses and gradients are those of plain
training, bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
from small_models import Transformer

import ckptplan
from ckptplan.core.errors import CkptPlanError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.runtime.observe.measure import held_tensors, peak_above_start, unique_bytes

STEPS = 2
SHARES = (0.1, 0.5)


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Gradients as large as activations."""
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(6))
    return nn.Sequential(*blocks), torch.randn(128, 64)


class Recurrent(nn.Module):
    """A residual LSTM layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(48, 48, batch_first=True), nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.lstm(x)[0])


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "wide": wide,
    "lstm": lambda: (nn.Sequential(*(Recurrent() for _ in range(4))), torch.randn(16, 12, 48)),
    "transformer": lambda: (Transformer(depth=4), torch.randint(0, 50, (4, 32))),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
LOOPS = {"gradients kept": (1, False), "2 micro-batches": (2, True), "4 micro-batches": (4, True)}
"""Micro-batches, and `set_to_none`."""


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The loss of all loops and profiles."""
    return output.square().mean()


def steps(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, loop: str
) -> Iterator[list[torch.Tensor]]:
    """Train; yields losses and gradients of each step."""
    micro_batches, set_to_none = LOOPS[loop]
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        losses = []
        for _ in range(micro_batches):
            loss = loss_of(model(x))
            loss.backward()
            losses.append(loss.detach())
        yield [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()


def trained(made: nn.Module, x: torch.Tensor, optimizer: str, loop: str, plan: Plan | None) -> list[torch.Tensor]:
    """Losses and gradients of all steps."""
    model = copy.deepcopy(made)
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    handle = None if plan is None else ckptplan.apply(model, plan)
    for left in steps(model, x, OPTIMIZERS[optimizer](model.parameters()), loop):
        found += [t.clone() for t in left]
    if handle is not None:
        handle.remove()
    return found


def measured_bytes(made: nn.Module, x: torch.Tensor, optimizer: str, loop: str, plan: Plan) -> int:
    """Most bytes held at once in all steps."""
    model = copy.deepcopy(made)
    held = unique_bytes([*held_tensors(model), x])
    training = steps(model, x, OPTIMIZERS[optimizer](model.parameters()), loop)
    with ckptplan.apply(model, plan):
        return held + peak_above_start(lambda: collections.deque(training, maxlen=0))


def profiled(made: nn.Module, x: torch.Tensor, optimizer: str, *, accumulate: bool) -> Profile:
    """The profile of a step that starts with gradients, or without."""
    return ckptplan.profile(made, x, loss_fn=loss_of, optimizer=OPTIMIZERS[optimizer], accumulate=accumulate)


def without_reckoning(made: nn.Module, x: torch.Tensor, optimizer: str, loop: str, budget_gb: float) -> str:
    """The end of the same loop under a plan for steps that start without gradients."""
    try:
        plan = ckptplan.solve(profiled(made, x, optimizer, accumulate=False), budget_gb)
        peak_bytes = measured_bytes(made, x, optimizer, loop, plan)
    except CkptPlanError as error:
        return type(error).__name__
    return "fits" if peak_bytes <= plan.budget_bytes else "OVER"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for accumulation.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for name, optimizer in itertools.product(MODELS, OPTIMIZERS):
        torch.manual_seed(0)
        made, x = MODELS[name]()
        profile = profiled(made, x, optimizer, accumulate=True)
        least = ckptplan.solve(profile, max_overhead=10.0).peak_bytes
        most = ckptplan.solve(profile, 1.0).peak_bytes
        for share, loop in itertools.product(SHARES, LOOPS):
            budget_gb = (least + share * (most - least)) / 2**30
            plan = ckptplan.solve(profile, budget_gb)
            peak_bytes = measured_bytes(made, x, optimizer, loop, plan)
            plain = trained(made, x, optimizer, loop, None)
            equal = all(map(torch.equal, plain, trained(made, x, optimizer, loop, plan)))
            row = {
                "model": name,
                "optimizer": optimizer,
                "loop": loop,
                "share": share,
                "budget_bytes": plan.budget_bytes,
                "planned_bytes": plan.peak_bytes,
                "measured_bytes": peak_bytes,
                "equal": equal,
                "without_reckoning": without_reckoning(made, x, optimizer, loop, budget_gb),
            }
            rows.append(row)
            print(
                f"{name:<12} {optimizer:<9} {loop:<16} {share:<4} measured {peak_bytes:>8} of {plan.budget_bytes:>8} "
                f"({peak_bytes / plan.budget_bytes - 1:+.2%}) {'equal' if equal else 'DIFFERENT':<10}"
                f"without reckoning: {row['without_reckoning']}",
                flush=True,
            )
    over = sum(row["measured_bytes"] > row["budget_bytes"] for row in rows)
    different = sum(not row["equal"] for row in rows)
    print(f"{len(rows)} cells: {over} over the budget, {different} different from plain training")
    if given.out is not None:
        document = {
            "command": documents.command(),
            "environment": documents.environment(given.threads),
            "over": over,
            "different": different,
            "rows": rows,
        }
        documents.write(document, given.out / "accumulation.json")


if __name__ == "__main__":
    main()
