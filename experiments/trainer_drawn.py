"""Do models that nobody chose train with transformers' Trainer as without the callback, and within the budget?

    python experiments/trainer_drawn.py --out experiments/results

Thirty classes drawn by a seed from all of `transformers` (drawn_models.py), each in its own process, on one thread.
Each is trained for four steps by a `Trainer` with dropout and its own loss or that of its output's tensors, without and
with `ActivationPlanCallback(budget="30%")`. Held against each other: every loss and the state at the end, bit for bit;
the measured peak of each step against the budget; recomputed stages and swapped bytes, which must not be 0. The
optimizer is SGD: with AdamW the update of small models takes more memory than their steps, and nothing is to gain.

Classes that can't be made from their configs, or don't train without a plan, are rows of the table; the first thirty
of the draw that train count. Prints PASS or FAIL. `--seed` draws others, `--models` names some.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
import torch
from drawn_models import Recipe, build, draw, drawn, loss_of
from estimate_drawn import LONGEST, in_a_process
from measured_trainer import MeasuredTrainer
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, TrainingArguments

from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.integrations.transformers import ActivationPlanCallback

PACKAGES = ("transformers",)
COUNT, SEED = 30, 18
STEPS = 4
TIMES = 4
"""Factor of the samples, so that activations are more than the gradients of these small models."""
BUDGET = "30%"
LEAST = 26
"""Models of thirty that must train bitwise and within the budget, with something recomputed or swapped."""
TIME_LIMIT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One model; `failed` says at what it ended, `built` whether there was a model to train."""

    name: str
    built: bool = False
    parameters: int = 0
    bitwise: bool = False
    peak_bytes: int = 0
    budget_bytes: int = 0
    plain_peak_bytes: int = 0
    recomputed: int = 0
    swapped_bytes: int = 0
    planning_s: float = 0.0
    failed: str = ""

    @property
    def good(self) -> bool:
        """Whether it trained as promised."""
        within = self.peak_bytes <= self.budget_bytes
        return self.bitwise and within and bool(self.recomputed or self.swapped_bytes)


class _Trainer(MeasuredTrainer):
    """Its loss is the model's, or else that of all its outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        loss = loss_of(outputs) if loss is None else loss
        return (loss, outputs) if return_outputs else loss


def repeated(inputs: dict[str, Any], times: int) -> dict[str, Any]:
    """The inputs with as many times their samples."""
    return {k: v.repeat(times, *[1] * (v.dim() - 1)) if isinstance(v, torch.Tensor) and v.dim() else v
            for k, v in inputs.items()}  # fmt: skip


def trained(
    recipe: Recipe, times: int, *callbacks: TrainerCallback
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Losses, the state at the end, and the steps' peaks."""
    model, inputs = recipe.make()
    inputs = repeated(dict(inputs), times)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=1, use_cpu=True, report_to=[], disable_tqdm=True,
            logging_steps=1, optim="sgd", save_strategy="no", remove_unused_columns=False, log_level="error",
        )  # fmt: skip
        trainer = _Trainer(
            model, args, train_dataset=[inputs] * STEPS, data_collator=lambda rows: dict(rows[0]),
            callbacks=list(callbacks),
        )  # fmt: skip
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, trainer.peaks


def run(name: str) -> Row:
    """Train one model both ways."""
    torch.set_num_threads(1)
    try:
        recipe = build(name)
        try:
            times, plain = TIMES, trained(recipe, TIMES)
        except Exception:  # an input whose first dimension isn't the batch
            times, plain = 1, trained(recipe, 1)
    except Exception as error:
        return Row(name, failed=f"without a plan: {type(error).__name__}: {error}"[:LONGEST])
    model, _ = recipe.make()
    parameters = sum(p.numel() for p in model.parameters())
    callback = ActivationPlanCallback(budget=BUDGET, time_limit_s=5, check="always")
    try:
        planned = trained(recipe, times, callback)
    except Exception as error:
        return Row(name, True, parameters, failed=f"{type(error).__name__}: {error}"[:LONGEST])
    assert callback.handle is not None
    stats = callback.handle.stats()
    bitwise = planned[0] == plain[0] and all(torch.equal(planned[1][k], plain[1][k]) for k in plain[1])
    return Row(
        name, True, parameters, bitwise, max(planned[2]), callback.handle.plan.budget_bytes, max(plain[2]),
        stats.recomputed_stages, stats.swapped_out_bytes, callback.took_s,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    found = Table("model", "bits", "peak", "budget", "plain", "recomputed", "swapped", "planned in", "what failed")
    for row in rows:
        cells = [row.name.rpartition(".")[2], "equal" if row.bitwise else "-"]
        cells += [format_bytes(n) for n in (row.peak_bytes, row.budget_bytes, row.plain_peak_bytes)]
        cells += [str(row.recomputed), format_bytes(row.swapped_bytes), format_seconds(row.planning_s), row.failed]
        found.add_row(*cells)
    return found


def checks(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """The promises, and whether each is kept."""
    rows = [row for row in rows if row.built][:COUNT]
    good = sum(row.good for row in rows)
    ran = [row for row in rows if row.built and not row.failed]
    over = [row.name for row in ran if row.peak_bytes > row.budget_bytes]
    wrong = [row.name for row in ran if not row.bitwise]
    return [
        (
            good >= LEAST * len(rows) / COUNT > 0,
            f"at least {LEAST} of {COUNT} bitwise, within the budget and acting: {good} of {len(rows)}",
        ),
        (not wrong, f"none differs: {', '.join(wrong) or 'none'}"),
        (not over, f"none is over its budget: {', '.join(over) or 'none'}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--seed", type=int, help="draw other models; without it, the committed draw")
    parser.add_argument("--count", type=int, default=COUNT, help="how many are drawn by --seed")
    parser.add_argument("--models", help="comma-separated qualified names, in place of a draw")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each model")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    names = drawn("trainer_drawn") if given.seed is None else draw(given.seed, given.count, PACKAGES)
    if given.models:
        names = given.models.split(",")
    console = Console(width=200)

    def one(name: str) -> Row:
        begun = time.perf_counter()
        found = in_a_process(run, name, given.time_limit)
        row = found if isinstance(found, Row) else Row(name, failed=str(found))
        console.print(f"{name}: {row.good} {row.failed} {time.perf_counter() - begun:.0f} s", highlight=False)
        return row

    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(one, names))
    documents.finish(rows, checks(rows), table(rows), console, given.out, "trainer_drawn.json")


if __name__ == "__main__":
    main()
