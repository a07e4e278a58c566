"""Does training in a framework with a plan give the same bits, within the budget, and what does the first step cost?

    python experiments/integrations.py --out experiments/results

Twenty steps on the CPU of small models in transformers' Trainer, TRL's SFTTrainer, Lightning and a loop of accelerate,
with what their users switch on (the cells of tests/integrations): without a plan, with one that is made anew, and with
that one from a file. Held against each other: every loss and the state at the end, bit for bit; the
measured peak of each step against the budget; recomputed stages and swapped bytes, which must not be 0; and the model,
which must be patched nowhere else afterwards. A budget is a quarter of the way from the smallest peak to everything
kept. A process's first training makes PyTorch change classes of optimizers, so one comes first.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integrations"))

import documents
import test_lightning
import test_plain_loops
import test_transformers
import test_trl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import ckptplan
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.integrations.lightning import ActivationPlanner
from ckptplan.integrations.transformers import ActivationPlanCallback
from ckptplan.runtime.handle import Handle

BUDGET = "25%"
STEPS = 20
LENGTHS = [40] * 4 + [16] * 20 + [28] * 20 + [24] * 36


class Trained(NamedTuple):
    """What a training left: its losses, its model, the peaks of its steps, and what planned it."""

    losses: list[float]
    model: nn.Module
    peaks: list[int]
    handle: Handle | None
    planning_s: float


@dataclass(frozen=True)
class Row:
    """One cell; `first_s` and `again_s` are seconds of planning, without and with a plan in the file."""

    framework: str
    way: str
    steps: int
    bitwise: bool
    as_before: bool
    peak_bytes: int
    budget_bytes: int
    plain_peak_bytes: int
    recomputed: int
    swapped_bytes: int
    first_s: float
    again_s: float


Run = Callable[[Path, Path | None], Trained]


def in_a_trainer(module: Any, how: dict[str, Any]) -> Run:
    def run(folder: Path, planned: Path | None) -> Trained:
        callbacks = [ActivationPlanCallback(budget=BUDGET, time_limit_s=5, plan_file=planned)] if planned else []
        # TRL's default is checkpointing; a plan stands beside everything kept.
        keeps = {} if planned is not None or module is not test_trl else {"gradient_checkpointing": False}
        trainer = module.trained(folder, *callbacks, **how, **keeps)
        handle, took_s = (callbacks[0].handle, callbacks[0].took_s) if planned else (None, 0.0)
        return Trained(test_transformers.losses(trainer), trainer.model, trainer.peaks, handle, took_s)

    return run


def resumed(folder: Path, planned: Path | None) -> Trained:
    """Stopped after two steps, and trained on from what was saved."""
    how = {"options": {"save_strategy": "steps", "save_steps": 2}}
    run = in_a_trainer(test_transformers, how)
    if not planned:
        return run(folder, None)
    callback = ActivationPlanCallback(budget=BUDGET, time_limit_s=5, plan_file=planned)
    test_transformers.trained(folder, callback, test_transformers.Stops(), **how)
    return in_a_trainer(test_transformers, how | {"resume": True})(folder, planned)


def in_lightning(how: dict[str, Any]) -> Run:
    def run(folder: Path, planned: Path | None) -> Trained:
        measured, planner = (
            test_lightning.Measured(),
            ActivationPlanner(budget=BUDGET, time_limit_s=5, plan_file=planned),
        )
        manual = issubclass(how.get("kind", test_lightning.Module), (test_lightning.Manual, test_lightning.Scheduled))
        module, _ = test_lightning.fit(folder, *[measured] * manual, *[planner] * (planned is not None), **how)
        # Planning is in one of the first two steps of a module that measures itself.
        return Trained(module.losses, module, module.peaks[2:] + measured.peaks, planner.handle, planner.took_s)

    return run


def with_accelerate(precision: str) -> Run:
    def run(folder: Path, planned: Path | None) -> Trained:
        how: dict[str, Any] = {"budget": BUDGET, "time_limit_s": 5, "plan_file": planned}
        options = {} if planned is None else how
        took_s: list[float] = []

        def solve(*args: Any, **kwargs: Any) -> ckptplan.Plan:
            begin = time.perf_counter()
            plan = original(*args, **kwargs)
            took_s.append(time.perf_counter() - begin)
            return plan

        original = ckptplan.solve
        with mock.patch("ckptplan.solve", solve):
            losses, model, peaks, handle = test_plain_loops.accelerated(precision, **options)
        return Trained(losses, model, peaks, handle, sum(took_s))

    return run


def cells() -> dict[tuple[str, str], Run]:
    found: dict[tuple[str, str], Run] = {}
    for way, how in test_transformers.WAYS.items():
        if way != "checkpointing":  # trained without it, its losses are others: its replay draws no numbers
            found["Trainer", way] = in_a_trainer(test_transformers, how)
    sequential = {"options": {"train_sampling_strategy": "sequential"}, "lengths": LENGTHS}
    found["Trainer", "lengths"] = in_a_trainer(test_transformers, sequential)
    found["Trainer", "resumed"] = resumed
    found |= {("SFTTrainer", way): in_a_trainer(test_trl, how) for way, how in test_trl.WAYS.items()}
    found |= {("Lightning", way): in_lightning(how) for way, how in test_lightning.WAYS.items()}
    found["Lightning", "lengths"] = in_lightning({"batches": [64, 16, 48, 32]})
    found |= {("accelerate", way): with_accelerate(way) for way in ("no", "bf16")}
    return found


def compare(framework: str, way: str, run: Run) -> Row:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "plan.json"
        plain, first, again = (run(Path(name) / str(i), file if i else None) for i in range(3))
    assert first.handle is not None
    assert again.handle is not None
    states = [trained.model.state_dict() for trained in (plain, first, again)]
    same = all(
        trained.losses == plain.losses[-len(trained.losses) :]
        and state.keys() == states[0].keys()
        and all(torch.equal(state[k], states[0][k]) for k in state)
        for trained, state in zip((first, again), states[1:], strict=True)
    )
    stats = first.handle.stats()
    patched = [
        [name for name, module in trained.model.named_modules() if "forward" in vars(module)]
        for trained in (plain, first, again)
    ]  # by accelerate, for its precision
    return Row(
        framework, way, len(first.losses), same, patched[0] == patched[1] == patched[2], max(first.peaks),
        first.handle.plan.budget_bytes, max(plain.peaks), stats.recomputed_stages, stats.swapped_out_bytes,
        first.planning_s, again.planning_s,
    )  # fmt: skip


def table(rows: list[Row]) -> Table:
    shown = Table(
        "framework", "way", "losses", "bitwise", "peak / budget", "without", "recomputed, swapped", "planning", "again",
        box=None,
    )  # fmt: skip
    for row in rows:
        peak = f"{format_bytes(row.peak_bytes)} / {format_bytes(row.budget_bytes)}"
        shown.add_row(
            row.framework, row.way, str(row.steps), "yes" if row.bitwise else "NO", peak,
            format_bytes(row.plain_peak_bytes), f"{row.recomputed}, {format_bytes(row.swapped_bytes)}",
            format_seconds(row.first_s), format_seconds(row.again_s),
        )  # fmt: skip
    return shown


def checks(rows: list[Row]) -> list[tuple[bool, str]]:
    """The promises, and whether each is kept."""
    broken = {
        "trains to the same bits": [row for row in rows if not row.bitwise],
        "stays within its budget, which training without a plan exceeds": [
            row for row in rows if not row.peak_bytes <= row.budget_bytes < row.plain_peak_bytes
        ],
        "recomputes or swaps": [row for row in rows if not row.recomputed and not row.swapped_bytes],
        "leaves the model as before": [row for row in rows if not row.as_before],
    }
    return [
        (not those, f"each {what}; not: {', '.join(f'{r.framework} {r.way}' for r in those) or 'none'}")
        for what, those in broken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--frameworks", help="only these, comma-separated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    test_lightning.STEPS = test_transformers.STEPS = test_trl.STEPS = STEPS
    test_lightning.WAYS["manual"]["max_steps"] = 2 * STEPS  # two updates each
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("ckptplan").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory() as name:
        test_lightning.fit(Path(name), max_steps=1)
    rows = []
    for (framework, way), run in cells().items():
        if args.frameworks is None or framework in args.frameworks.split(","):
            rows.append(compare(framework, way, run))
            print(f"{framework} {way}: planned in {rows[-1].first_s:.1f}, {rows[-1].again_s:.1f} s", flush=True)
    documents.finish(rows, checks(rows), table(rows), Console(width=160), args.out, "integrations.json")


if __name__ == "__main__":
    main()
