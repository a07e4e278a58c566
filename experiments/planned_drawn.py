"""Do plans of models that nobody chose hold where they recompute, not only where they swap?

    python experiments/planned_drawn.py --jobs 2 --out experiments/results

Forty classes of `transformers` and eight of `diffusers`, drawn by a seed (drawn_models.py), each in a process of its
own, on one thread. On a CPU a copy in memory takes less time than to compute again, so nearly all plans swap. So each
model is planned in two other ways: with recompute alone, and with the times of a GPU that isn't here, for which
the times of stages and copies in the measured profile are replaced by those predicted for it. Each way has the
budgets of 0, 15 and 50 % of the way from the smallest peak to everything kept. Each plan is applied and held against
plain steps by `ckptplan.verify`: gradients and buffers bit for bit, the measured peak against the budget.

Classes that can't be made from their configs, or don't train without a plan, are rows of the table; the first forty and
eight of the draw that train count. Prints PASS or FAIL. `--seed` draws others, `--models` names some.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import documents
import torch
from drawn_models import TIMES, Recipe, build, draw, drawn, loss_of, repeated

import ckptplan
from ckptplan.core.units import format_bytes

COUNTS = {"transformers": 40, "diffusers": 8}
SPARE = 2
"""Factor of the classes drawn, since some can't be made or don't train."""
BUDGETS = ("0%", "15%", "50%")
GPU = "a100-40gb"
WAYS = ("recompute alone", GPU)
TIME_LIMIT_S = 900.0


@dataclass(frozen=True)
class Tried:
    """One plan, as verified; `failed` says at what it ended."""

    way: str
    budget: str
    gradients_equal: bool = False
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    plain_bytes: int = 0
    recomputed: int = 0
    swapped_bytes: int = 0
    gap: float = 0.0
    failed: str = ""

    @property
    def good(self) -> bool:
        """Whether the promises are kept."""
        return not self.failed and self.gradients_equal and self.measured_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Row:
    """One model; `failed` says why there was none to plan."""

    name: str
    parameters: int = 0
    tried: tuple[Tried, ...] = ()
    failed: str = ""


def with_times_of(profile: ckptplan.Profile, other: ckptplan.Profile) -> ckptplan.Profile:
    """The profile with the times of another device; what an option recomputes takes the same share of its stage."""
    times = ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")
    of_name = {stage.name: stage for stage in other.stages}
    stages = []
    for stage in profile.stages:
        like = of_name[stage.name]
        factor = like.forward_s / stage.forward_s if stage.forward_s else 0.0
        options = tuple(dataclasses.replace(o, recompute_s=o.recompute_s * factor) for o in stage.options)
        taken = {name: getattr(like, name) for name in times}
        stages.append(dataclasses.replace(stage, options=options, **taken))
    return dataclasses.replace(profile, stages=tuple(stages), link=other.link, disk=None)


def verified(recipe: Recipe, times: int, profile: ckptplan.Profile, way: str, budget: str) -> Tried:
    """Solve, apply and measure."""
    model, inputs = recipe.make()
    inputs = repeated(dict(inputs), times)
    limits: dict[str, Any] = {"actions": ("keep", "recompute")} if way == WAYS[0] else {}
    try:
        plan = ckptplan.solve(profile, budget=budget, time_limit_s=3, **limits)
        found = ckptplan.verify(model, plan, inputs, loss_fn=loss_of, repeats=1)
    except Exception as error:
        return Tried(way, budget, failed=documents.brief(error))
    # What differs between two plain steps, too, is none of the plan's.
    equal = found.gradients_equal is True or not set(found.differing) - set(found.plain_differing)
    return Tried(
        way, budget, equal, plan.budget_bytes, found.predicted_peak_bytes, found.measured_peak_bytes,
        found.plain_peak_bytes or 0, found.stats.recomputed_stages, found.stats.swapped_out_bytes, plan.gap or 0.0,
    )  # fmt: skip


def run(name: str) -> Row:
    """Plan one model in all ways."""
    torch.set_num_threads(1)
    times = TIMES
    try:
        recipe = build(name)
        try:
            _train(recipe, times)
        except Exception:  # an input whose first dimension isn't the batch
            times = 1
            _train(recipe, times)
    except Exception as error:
        return Row(name, failed=f"without a plan: {documents.brief(error)}")
    model, inputs = recipe.make()
    inputs = repeated(dict(inputs), times)
    parameters = sum(p.numel() for p in model.parameters())
    found: list[Tried] = []
    profiles: dict[str, ckptplan.Profile] = {}
    for way in WAYS:
        try:
            if way == GPU:
                there = ckptplan.profile(model, inputs, loss_fn=loss_of, device=GPU, menus=False)
                profiles[way] = with_times_of(profiles[WAYS[0]], there)
            else:
                profiles[way] = ckptplan.profile(model, inputs, loss_fn=loss_of)
        except Exception as error:
            found.append(Tried(way, "profile", failed=documents.brief(error)))
            break
    del model, inputs
    found += [verified(recipe, times, profile, way, b) for way, profile in profiles.items() for b in BUDGETS]
    return Row(name, parameters, tuple(found))


def _train(recipe: Recipe, times: int) -> None:
    model, inputs = recipe.make()
    loss_of(model(**repeated(dict(inputs), times))).backward()


def counted(rows: Sequence[Row]) -> list[Row]:
    """The first models of each package that train."""
    left = Counter(COUNTS)
    found = []
    for row in rows:
        package = row.name.partition(".")[0]
        if not row.failed and left[package] > 0:
            left[package] -= 1
            found.append(row)
    return found


COLUMNS = ("model", "way", "budget", "bits", "peak", "of", "plain", "recomputed", "swapped", "gap", "what failed")


def cells(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """The table's rows."""
    found: list[tuple[Any, ...]] = []
    for row in rows:
        short = row.name.rpartition(".")[2]
        if row.failed:
            found.append((short, *[None] * 9, row.failed))
        for t in row.tried:
            sizes = [format_bytes(n) for n in (t.measured_bytes, t.budget_bytes, t.plain_bytes)]
            bits, swapped = "equal" if t.gradients_equal else None, format_bytes(t.swapped_bytes)
            found.append((short, t.way, t.budget, bits, *sizes, t.recomputed, swapped, f"{t.gap:.1%}", t.failed))
    return found


def checks(rows: Sequence[Row]) -> list[documents.Check]:
    """The promises, and whether each is kept."""
    held = counted(rows)
    packages = Counter(row.name.partition(".")[0] for row in held)
    tried = [(row.name.rpartition(".")[2], each) for row in held for each in row.tried]
    ran = [(name, each) for name, each in tried if not each.failed]
    failed = sorted({name for name, each in tried if each.failed})
    over = [f"{name} ({t.way}, {t.budget})" for name, t in ran if t.measured_bytes > t.budget_bytes]
    wrong = [f"{name} ({t.way}, {t.budget})" for name, t in ran if not t.gradients_equal]
    recomputes = sum(t.recomputed > 0 for _, t in ran)
    return [
        (
            packages == Counter(COUNTS),
            f"models that train: {', '.join(f'{n} of {package}' for package, n in sorted(packages.items()))}",
        ),
        (not failed, f"all are planned: {', '.join(failed) or 'none'} isn't"),
        (not wrong, f"of {len(ran)} plans none differs from plain training: {', '.join(wrong) or 'none'} does"),
        (not over, f"none is over its budget: {', '.join(over) or 'none'} is"),
        (2 * recomputes > len(ran), f"more than half of the plans recompute: {recomputes} of {len(ran)}"),
    ]


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--seed", type=int, help="draw other models; without it, the committed draw")
    parser.add_argument("--models", help="comma-separated qualified names, in place of a draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    if given.models:
        names = given.models.split(",")
    elif given.seed is None:
        names = drawn("planned_drawn")
    else:
        names = [name for package, n in COUNTS.items() for name in draw(given.seed, SPARE * n, (package,))]
    rows: list[Row] = []
    ready: Counter[str] = Counter()
    wanted = (n for n in names if given.models or ready[n.partition(".")[0]] < COUNTS[n.partition(".")[0]])
    for name, found in documents.in_processes(run, wanted, jobs=given.jobs, time_limit_s=TIME_LIMIT_S):
        row = found if isinstance(found, Row) else Row(name, failed=str(found))
        rows.append(row)
        ready[name.partition(".")[0]] += not row.failed
        failed = row.failed or next((t.failed for t in row.tried if t.failed), "")
        print(f"{name}: {sum(t.good for t in row.tried)} of {len(row.tried)} {failed}", flush=True)
    rows.sort(key=lambda row: names.index(row.name))
    table = documents.table(COLUMNS, cells(rows))
    documents.finish(rows, checks(rows), table, given.out, "planned_drawn.json")


if __name__ == "__main__":
    main()
