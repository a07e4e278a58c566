"""Train cells of the table of odd models, each in a process of its own, for mutations.py.

    python experiments/odd_cells.py FOLDER plan CASE/DECISION ...
    python experiments/odd_cells.py FOLDER off,sampled CASE/DECISION ...

`plan` writes each cell's plan into the folder. Else the cells are trained under these plans, or where there is none
under one that is made now, with each kind of check; the last line is a list of outcomes, as JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import odd  # noqa: F401 - registers the cases
from odd.harness import BadCase, outcome, plan_for

from ckptplan.core.plan import Plan
from ckptplan.runtime.guard.check import When


def save_plans(task: tuple[Path, list[str]]) -> None:
    """Write the plans of one case's cells, for which it is profiled once."""
    folder, cells = task
    for cell in cells:
        case, _, decision = cell.partition("/")
        plan = plan_for(case, decision)
        if plan is not None:
            plan.save(path_of(folder, cell))


def path_of(folder: Path, cell: str) -> Path:
    """Where a cell's plan is."""
    return folder / f"{cell.replace('/', '.')}.json"


def train(task: tuple[Path, str, When]) -> dict[str, Any]:
    """One cell's outcome."""
    folder, cell, check = task
    path = path_of(folder, cell)
    plan = Plan.load(path) if path.exists() else None
    case, _, decision = cell.partition("/")
    try:
        return dataclasses.asdict(outcome(case, decision, plan=plan, check=check))
    except BadCase as error:
        return {"kind": "bad case", "detail": str(error), "step": 0}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, what, cells = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # What is left behind where something is taken out, such as a flag, mustn't reach the next.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        if what == "plan":
            cases = itertools.groupby(sorted(cells), lambda cell: cell.partition("/")[0])
            pool.map(save_plans, [(folder, list(of_case)) for _, of_case in cases], chunksize=1)
        else:
            tasks = [(folder, cell, check) for cell in cells for check in what.split(",")]
            print(json.dumps(pool.map(train, tasks, chunksize=1)))
