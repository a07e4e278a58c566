"""Are profiles that leave out layers those of all layers, on models that nobody chose?

    python experiments/folding_drawn.py --out experiments/results

Classes drawn by a seed from all of `transformers` (drawn_models.py) are gone through in order, each in a process of its
own, on one thread, until ten models are compared; those that can't be built stay in the table. In the last three, the
second layer of the longest list of equal layers is changed: it gets another dropout, a hook on its result's
gradient, or its parameters frozen. The bytes of a profile with AdamW (`profiler.traced_bytes`: whole stages, nothing
timed) are taken twice: as they are, and with all layers run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import documents
import torch
from drawn_models import Recipe, build, draw, drawn, loss_of
from estimate_drawn import LONGEST, TIME_LIMIT_S, adamw, in_a_process
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ckptplan.core.profile import Profile
from ckptplan.core.request import Training
from ckptplan.profiling.bytes import unfolding
from ckptplan.profiling.profiler import traced_bytes
from ckptplan.profiling.target import find_target
from ckptplan.runtime.step import make_step

LAYERS = 20
COMPARED = 10
SEPARATOR = "+"  # before the name of a change


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes
    ----------
    change : str
        How one layer differs from the others; empty where none was changed.
    stages, run : int
        Stages of the model, and those that were run in place of them.
    differences : tuple of str
        Fields of the profile that aren't equal.
    """

    name: str
    change: str = ""
    stages: int = 0
    run: int = 0
    differences: tuple[str, ...] = ()
    failed: str = ""

    @property
    def folded(self) -> bool:
        return self.run < self.stages


def other_dropout(layer: nn.Module) -> None:
    """Give the layer's dropouts another rate; where it has none, its result is dropped out."""
    dropouts = [module for module in layer.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.p = 0.25 if module.p != 0.25 else 0.5
    if not dropouts:
        layer.register_forward_hook(
            lambda module, args, out: _first_changed(out, lambda t: nn.functional.dropout(t, 0.25))
        )


def hooked(layer: nn.Module) -> None:
    """Backward of the layer's result makes another tensor of the gradient."""

    def hook(result: Tensor) -> Tensor:
        if result.requires_grad:
            result.register_hook(lambda gradient: torch.cat([gradient, gradient]).sin()[: len(gradient)])
        return result

    layer.register_forward_hook(lambda module, args, out: _first_changed(out, hook))


def frozen(layer: nn.Module) -> None:
    """The layer's parameters aren't trained."""
    layer.requires_grad_(False)


CHANGES: dict[str, Callable[[nn.Module], None]] = {"dropout": other_dropout, "hook": hooked, "frozen": frozen}


def _first_changed(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out) if isinstance(out, Tensor) else out


def longest_list(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The list with the most modules of one class."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    if not lists:
        raise LookupError("the model has no list of layers")
    return max(lists, key=lambda found: len(found) / len({type(module) for module in found} or {None}))


def profiled(recipe: Recipe, change: str) -> tuple[Profile, list[tuple[int, int]]]:
    """The bytes of a profile, and per attempt how many stages there are and how many were run."""
    model, inputs = recipe.make()
    if change:
        layers = longest_list(model)
        CHANGES[change](layers[1])
    made: list[tuple[Any, int]] = []
    original = unfolding.Folding.__init__

    def noted(self: Any, step: Any, stages: tuple[str, ...], target: Any) -> None:
        original(self, step, stages, target)
        made.append((self, len(stages)))

    unfolding.Folding.__init__ = noted  # type: ignore[method-assign]
    try:
        found = traced_bytes(make_step(model, Training(inputs, loss_fn=loss_of)), adamw(model), find_target(model))
    finally:
        unfolding.Folding.__init__ = original  # type: ignore[method-assign]
    return found, [(stages, len(folding.stages)) for folding, stages in made]


def run(text: str) -> Row:
    """Profile a model twice; `text` is its name, and that of a change."""
    name, _, change = text.partition(SEPARATOR)
    torch.set_num_threads(1)
    try:
        recipe = build(name, layers=LAYERS)
        few, made = profiled(recipe, change)
        unfolding.find_runs = lambda model: []
        full, _ = profiled(recipe, change)
    except Exception as error:
        return Row(name, change, failed=f"{type(error).__name__}: {error}"[:LONGEST])
    ours, theirs = dataclasses.asdict(few), dataclasses.asdict(full)
    stages, ran = made[-1]
    return Row(name, change, stages, ran, tuple(field for field in theirs if ours[field] != theirs[field]))


def table(rows: Sequence[Row]) -> Table:
    found = Table("model", "changed layer", "stages", "run", "differing fields", "what failed", title="Profiles")
    for row in rows:
        counts = ("-", "-") if row.failed else (str(row.stages), str(row.run))
        found.add_row(row.name.rpartition(".")[2], row.change, *counts, ", ".join(row.differences), row.failed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--seed", type=int, help="draw other models; without it, the committed draw")
    parser.add_argument("--count", type=int, default=40, help="how many are drawn by --seed")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each model")
    given = parser.parse_args()
    names = drawn("folding_drawn") if given.seed is None else draw(given.seed, given.count, ("transformers",))
    changes = [""] * (COMPARED - len(CHANGES)) + list(CHANGES)
    console = Console(width=170)

    def one(name: str, change: str) -> Row:
        begun = time.perf_counter()
        found = in_a_process(run, SEPARATOR.join((name, change)) if change else name, given.time_limit)
        row = found if isinstance(found, Row) else Row(name, change, failed=found)
        console.print(f"{row} {time.perf_counter() - begun:.0f} s", highlight=False)
        return row

    rows: list[Row] = []
    compared: list[Row] = []
    for name in names:
        rows.append(one(name, changes[len(compared)]))
        compared += [row for row in rows[-1:] if not row.failed]
        if len(compared) == COMPARED:
            break
    differing = sum(bool(row.differences) for row in compared)
    folded = [row for row in compared if row.folded]
    results = [
        (
            len(compared) == COMPARED and not differing,
            f"{len(compared)} profiles equal those of all layers: {differing} differ",
        ),
        (
            any(row.change for row in folded),
            f"layers are left out: in {len(folded)}, with one changed in {sum(bool(row.change) for row in folded)}",
        ),
    ]
    documents.finish(rows, results, table(rows), console, given.out, "folding_drawn.json")


if __name__ == "__main__":
    main()
