"""Do replicated models train on several ranks as without a plan, and within the budget on each?

    python experiments/many_ranks.py --out experiments/results

Groups of two and four processes over gloo, one thread each. Three models, and the first six of a draw by a seed from
all of `transformers` that train (drawn_models.py), in `DistributedDataParallel`: with buckets beside the gradients,
with gradients in the buckets, and with a static graph. Each with a plan for another budget, from tight to wide, for ten
steps of SGD with dropout on. Held against the same training without a plan: every loss, and the state at the end, bit
for bit; on each rank the measured peak of a step, with the buckets, against the plan's prediction and the budget;
recomputed stages and swapped bytes. Not counted is what gloo itself holds, memory of its sockets outside PyTorch's
allocator. Plans of models that read values hold for steps that take the same path, and training leads to others: their
peaks are told apart.

Prints PASS or FAIL. `--models` names some, `--ranks` the sizes of groups.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
import torch
import torch.distributed as dist
from drawn_models import build, drawn, loss_of
from measured_step import measured
from ranks import Ranks, ranks
from rich.console import Console
from rich.table import Table
from small_models import Transformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer_drawn import TIMES, repeated
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan
from ckptplan.core.units import format_bytes

STEPS = 10
DRAWN = 6
MOST_OFF = 0.03
"""Largest share by which a measured peak may differ from the predicted one."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "beside": ("10%", {}),
    "in buckets": ("40%", {"gradient_as_bucket_view": True}),
    "static graph": ("70%", {"static_graph": True}),
}
"""Way of wrapping -> budget of its plan, and arguments of `DistributedDataParallel`."""


WITHOUT = "without a plan"
"""Begins what a row failed with that doesn't train without a plan either."""


@dataclass(frozen=True)
class Row:
    """One training of one group; bytes are those of the rank with the largest share of its budget."""

    name: str
    ranks: int
    way: str
    bitwise: bool = False
    one_plan: bool = False
    peak_bytes: int = 0
    predicted_bytes: int = 0
    budget_bytes: int = 0
    plain_peak_bytes: int = 0
    recomputed: int = 0
    swapped_bytes: int = 0
    reads_values: bool = False
    failed: str = ""

    @property
    def off(self) -> float:
        """The measured peak against the predicted one, as a share."""
        return self.peak_bytes / self.predicted_bytes - 1 if self.predicted_bytes else 0.0


def _transformer() -> tuple[nn.Module, dict[str, Any]]:
    return Transformer(6, 64).train(), {"tokens": torch.randint(0, 50, (8, 64))}


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 16, 16, 16, 16]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.Dropout(0.1))
            for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def _images() -> tuple[nn.Module, dict[str, Any]]:
    return _Images().train(), {"images": torch.randn(8, 3, 32, 32)}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=6, n_head=4)
    tokens = torch.randint(0, 200, (8, 64))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


NAMED: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "transformer": _transformer, "images": _images, "gpt2": _gpt2,
}  # fmt: skip


def _made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with the same weights on each rank, and inputs of the rank's own values."""
    if name not in NAMED:
        model, inputs = build(name).make()
        return model, repeated(dict(inputs), TIMES)
    torch.manual_seed(0)
    model, _ = NAMED[name]()
    torch.manual_seed(1 + dist.get_rank())
    return model, NAMED[name]()[1]


def _loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else loss_of(output)


def _train(model: nn.Module, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[list[Any], int]:
    """Losses and the state at the end, and the largest peak of a step."""
    torch.manual_seed(5)
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    losses, peaks = [], []

    def step() -> torch.Tensor:
        output = wrapped(**inputs)  # held until backward has ended, as in most loops
        loss = _loss(output)
        loss.backward()
        return loss.detach()

    for number in range(STEPS):
        optimizer.zero_grad()
        loss, peak = measured(step, wrapped, [optimizer], inputs)
        losses.append(loss)
        # The buckets are made anew once; the first ones are freed before, which this recording doesn't see.
        if number != (2 if "static_graph" in options else 1):
            peaks.append(peak)
        optimizer.step()
    bucket_bytes = sum(p.nbytes for p in wrapped.parameters() if p.requires_grad)
    return [*losses, *(v.clone() for v in model.state_dict().values())], max(peaks) + bucket_bytes


def _unused(name: str) -> bool:
    """Whether a step leaves a parameter without a gradient, which `DistributedDataParallel` has to know."""
    model, inputs = _made(name)
    _loss(model(**inputs)).backward()
    return any(p.grad is None for p in model.parameters() if p.requires_grad)


def cell(name: str, way: str) -> Row:
    """Train on this rank without a plan and with one."""
    budget, options = WAYS[way]
    if "static_graph" not in options and _unused(name):
        options = {**options, "find_unused_parameters": True}
    try:
        plain, plain_peak = _train(*_made(name), options)
    except RuntimeError as error:
        return Row(name, dist.get_world_size(), way, failed=f"{WITHOUT}: {error}"[:200])
    model, inputs = _made(name)
    plan = ckptplan.solve(
        DistributedDataParallel(model, **options), budget=budget, inputs=inputs, loss_fn=_loss, optimizer="sgd",
        time_limit_s=5, cache=False,
    )  # fmt: skip
    with ckptplan.apply(model, plan, check="always") as handle:
        found, peak = _train(model, inputs, options)
        stats = handle.stats()
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    return Row(
        name, len(plans), way, all(map(torch.equal, found, plain)), plans == [plan] * len(plans), peak, plan.peak_bytes,
        plan.budget_bytes, plain_peak, stats.recomputed_stages, stats.swapped_out_bytes,
        any(note.startswith("values are needed") for note in plan.notes),
    )  # fmt: skip


def trains(name: str) -> str:
    """What fails where the model is made and trained without a plan, on one rank alone; empty if nothing does."""
    try:
        _unused(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _of_group(group: Ranks, name: str, way: str, count: int) -> Row:
    found = group.run(cell, name, way)
    if any(isinstance(each, Row) and each.failed for each in found):
        return next(each for each in found if isinstance(each, Row) and each.failed)
    failed = [each for each in found if not isinstance(each, Row)]
    if failed:
        return Row(name, count, way, failed=f"{type(failed[0]).__name__}: {failed[0]}"[:300])
    worst = max(found, key=lambda row: row.peak_bytes / row.budget_bytes)
    alike = all(row.bitwise for row in found), all(row.one_plan for row in found)
    acts = min(row.recomputed for row in found), min(row.swapped_bytes for row in found)
    return Row(
        name, count, way, *alike, worst.peak_bytes, worst.predicted_bytes, worst.budget_bytes, worst.plain_peak_bytes,
        *acts, worst.reads_values,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    found = Table(
        "model", "ranks", "gradients", "bits", "peak", "predicted", "off", "budget", "without", "acts", "failed"
    )
    for row in rows:
        found.add_row(
            row.name.rpartition(".")[2], str(row.ranks), row.way, "equal" if row.bitwise else "-",
            format_bytes(row.peak_bytes), format_bytes(row.predicted_bytes), f"{row.off:+.1%}",
            format_bytes(row.budget_bytes), format_bytes(row.plain_peak_bytes),
            f"{row.recomputed}, {format_bytes(row.swapped_bytes)}", row.failed,
        )  # fmt: skip
    return found


def checks(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """The promises, and whether each is kept."""
    planned = [row for row in rows if not row.failed.startswith(WITHOUT)]

    def names(wrong: Callable[[Row], bool]) -> str:
        return (
            ", ".join(f"{row.name} ({row.ranks}, {row.way})" for row in planned if not row.failed and wrong(row))
            or "none"
        )

    kept = {
        "differ from training without a plan": names(lambda row: not row.bitwise),
        "have several plans": names(lambda row: not row.one_plan),
        "are over the budget": names(lambda row: row.peak_bytes > row.budget_bytes and not row.reads_values),
        f"are more than {MOST_OFF:.0%} off the prediction": names(lambda row: abs(row.off) > MOST_OFF),
        "neither recompute nor swap": names(lambda row: not row.recomputed and not row.swapped_bytes),
        "fail": ", ".join(f"{row.name} ({row.ranks}, {row.way})" for row in planned if row.failed) or "none",
    }
    return [(found == "none", f"of {len(planned)} trainings, these {what}: {found}") for what, found in kept.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--models", help="comma-separated names, in place of the three and the draw")
    parser.add_argument("--ranks", default="2,4", help="sizes of the groups")
    given = parser.parse_args()
    console = Console(width=220)
    names = given.models.split(",") if given.models else [*NAMED, *drawn("ranks")]
    rows: list[Row] = []
    for count in map(int, given.ranks.split(",")):
        count_drawn = 0
        with ranks(count) as group:
            for name in names:
                if name not in NAMED and not given.models:
                    if count_drawn == DRAWN:
                        continue
                    if failed := group.run(trains, name)[0]:
                        console.print(f"{name} doesn't train without a plan: {failed}", highlight=False)
                        continue
                    count_drawn += 1
                for way in WAYS:
                    rows.append(_of_group(group, name, way, count))
                    print(rows[-1], flush=True)
    documents.finish(rows, checks(rows), table(rows), console, given.out, "many_ranks.json")


if __name__ == "__main__":
    main()
