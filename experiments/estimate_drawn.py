"""How far are estimates, and plans that keep everything, from the allocator on models that nobody chose?

    python experiments/estimate_drawn.py --out experiments/results

Twenty classes drawn by a seed from all of `transformers` and `diffusers` (drawn_models.py; pip install transformers
diffusers), each in a process of its own, on one thread. Two whole steps with AdamW are measured from the allocator's
events (`tests/measured_phases.py`), and their phases' peaks held against `ckptplan.estimate`, without a plan and with
one that keeps everything. What can't be built, profiled or estimated is a row of the table. Prints PASS or FAIL.
`--seed` draws others, `--models` names some.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
import torch
from drawn_models import BASES, Recipe, build, draw, drawn, loss_of
from measured_phases import measure_phases
from rich.console import Console
from rich.table import Table
from torch import nn

import ckptplan
from ckptplan.core.request import Training
from ckptplan.core.units import format_bytes
from ckptplan.runtime.step import make_step

MEDIAN, WORST, UNDER = 0.0, 0.01, 0.001
PHASES = ("forward 2", "backward 2", "optimizer 2")
EVERYTHING_GB = 1024.0
TIME_LIMIT_S = 900.0
LONGEST = 300  # characters of a message

Peaks = dict[str, int]


@dataclass(frozen=True)
class Row:
    """One model: peaks of the second step's phases in bytes; `failed` says at what it ended."""

    name: str
    shrinking: Mapping[str, Any] | None = None
    parameters: int = 0
    inputs: Mapping[str, Any] | None = None
    measured: Peaks | None = None
    estimated: Peaks | None = None
    planned: Peaks | None = None
    unexplained_bytes: int = 0
    failed: tuple[str, ...] = ()

    def errors(self) -> list[float]:
        """Of the step's peak, by each prediction that is there."""
        if not self.measured:
            return []
        most = max(self.measured.values())
        return [max(p.values()) / most - 1 for p in (self.estimated, self.planned) if p]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def measured(recipe: Recipe) -> tuple[Peaks, int]:
    model, inputs = recipe.make()
    found = measure_phases(make_step(model, Training(inputs, loss_fn=loss_of)), adamw(model))
    return {p.name: p.peak_bytes for p in found.phases if p.name in PHASES}, found.unexplained_bytes


def estimated(recipe: Recipe, plan: ckptplan.Plan | None = None) -> Peaks:
    model, inputs = recipe.make()
    found = ckptplan.estimate(model, inputs, loss_fn=loss_of, optimizer=adamw(model), plan=plan)
    return {p.name: p.peak_bytes for p in found.phases if p.name in PHASES}


def keeping(recipe: Recipe) -> ckptplan.Plan:
    """The plan that keeps everything."""
    model, inputs = recipe.make()
    profile = ckptplan.profile(model, inputs, loss_fn=loss_of, optimizer=adamw(model), menus=False)
    return ckptplan.solve(profile, EVERYTHING_GB)


def run(name: str) -> Row:
    """Build, measure and predict; what fails doesn't stop the rest."""
    torch.set_num_threads(1)
    failed: list[str] = []

    def tried(what: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            failed.append(f"{what}: {type(error).__name__}: {error}"[:LONGEST])
            return None

    recipe = tried("build", build, name)
    if recipe is None:
        return Row(name, failed=tuple(failed))
    model, inputs = recipe.make()
    parameters = sum(p.numel() for p in model.parameters())
    shapes = {
        key: list(value.shape) if isinstance(value, torch.Tensor) else str(value) for key, value in inputs.items()
    }
    del model, inputs
    peaks, left = tried("measure", measured, recipe) or (None, 0)
    estimate = tried("estimate", estimated, recipe)
    plan = tried("plan", keeping, recipe)
    planned = None if plan is None else tried("estimate of the plan", estimated, recipe, plan)
    return Row(name, asdict(recipe.shrinking), parameters, shapes, peaks, estimate, planned, left, tuple(failed))


def in_a_process(call: Callable[[str], Any], name: str, time_limit_s: float) -> Any:
    """The result of `call(name)` in a process of its own, or a message of why there is none."""
    here, there = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=_send, args=(there, call, name))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(time_limit_s) else f"no result after {time_limit_s:.0f} s"
    except EOFError:
        return "the process died"
    finally:
        process.kill()
        process.join()


def _send(there: Connection, call: Callable[[str], Any], name: str) -> None:
    there.send(call(name))


def table(rows: Sequence[Row]) -> Table:
    found = Table("model", "measured", "estimate", "error", "with the plan", "error", "what failed", title="Peaks")
    for row in rows:
        most = max(row.measured.values()) if row.measured else None
        cells = ["-" if most is None else format_bytes(most)]
        for peaks in (row.estimated, row.planned):
            here = max(peaks.values()) if peaks else None
            cells += ["-" if here is None else format_bytes(here)]
            cells += ["-" if here is None or most is None else f"{here / most - 1:+.3%}"]
        found.add_row(row.name.rpartition(".")[2], *cells, "; ".join(row.failed))
    return found


def checks(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """The promises, and whether each is kept."""
    errors = [error for row in rows for error in row.errors()]
    if not errors:
        return [(False, "nothing was measured")]
    built = [row for row in rows if row.measured]
    median, worst, under = statistics.median(map(abs, errors)), max(map(abs, errors)), min(0.0, *errors)
    lacking = sum(len(row.errors()) < 2 for row in built)
    return [
        (not lacking, f"each of the {len(built)} measured models is estimated and planned: {lacking} are not"),
        (median <= MEDIAN, f"median error {MEDIAN:.0%}: {median:.4%}"),
        (worst <= WORST, f"no peak off by more than {WORST:.0%}: {worst:.3%} at worst"),
        (under >= -UNDER, f"no peak under by more than {UNDER:.1%}: {under:.3%}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--seed", type=int, help="draw other models; without it, the committed draw")
    parser.add_argument("--count", type=int, default=20, help="how many are drawn by --seed")
    parser.add_argument("--models", help="comma-separated qualified names, in place of a draw")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each model")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    names = drawn("estimate_drawn") if given.seed is None else draw(given.seed, given.count, tuple(BASES))
    if given.models:
        names = given.models.split(",")
    console = Console(width=170)

    def one(name: str) -> Row:
        begun = time.perf_counter()
        found = in_a_process(run, name, given.time_limit)
        row = found if isinstance(found, Row) else Row(name, failed=(found,))
        console.print(f"{name}: {row.errors()} {row.failed} {time.perf_counter() - begun:.0f} s", highlight=False)
        return row

    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(one, names))
    documents.finish(rows, checks(rows), table(rows), console, given.out, "estimate_drawn.json")


if __name__ == "__main__":
    main()
