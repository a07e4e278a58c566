"""What `apply(..., check=)` costs: a checked step, and a run of a thousand steps, on three real models.

    python experiments/check_overhead.py --out experiments/results

Every stage is recomputed, so that all that a stage reads and saves is compared: the dearest plan for the check. Steps
without a check ("off"), steps of "sampled" that aren't checked, and checked ones ("always") are interleaved, each
behind one that isn't timed; figures are medians over rounds, in seconds of the calling thread's CPU, which does all the
work. A sampled run of 1,000 steps has 3 checked ones and 9.97 on average after them (`FIRST`, `EVERY` in
ckptplan/runtime/guard/check.py). The promise is that they add at most 1 % to it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
import models
import torch
from made_plans import plan_of
from overhead import interleaved

from ckptplan.profiling.profiler import profile
from ckptplan.runtime.guard.check import EVERY, FIRST, WHEN
from ckptplan.runtime.handle import apply
from ckptplan.runtime.step import default_loss

RUN = 1000
PROMISE = 0.01
MODELS: dict[str, Callable[[], models.Made]] = {
    "gpt2": models.gpt2,
    "resnet50": lambda: models.resnet50(8),
    "unet": models.unet,
}


def measured(make: Callable[[], models.Made], rounds: int) -> dict[str, Any]:
    """Seconds of each kind of step, and the shares that the checks add."""
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    chain = profile(model, inputs, menus=False)
    plan = plan_of(chain, ["recompute"] * len(chain.stages))
    compared = 0

    def step() -> None:
        model.zero_grad()
        default_loss(model(**inputs)).backward()

    def around(check: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def applied() -> Iterator[None]:
            nonlocal compared
            with apply(model, plan, check=check) as handle, handle.unmetered():
                if check == "sampled":
                    handle._applied.controller.checks._seen = FIRST  # the steps that come aren't checked
                step()
                before = handle.stats().compared_tensors
                yield
                found = handle.stats().compared_tensors - before
                assert (found > 0) == (check == "always")
                compared = max(compared, found)

        return applied

    ways = {check: around(check) for check in WHEN}
    seconds = dict(zip(ways, interleaved([(step, way) for way in ways.values()], rounds)["cpu"], strict=True))
    off = seconds["off"]

    def added(check: str) -> float:
        return statistics.median(a / b - 1 for a, b in zip(seconds[check], off, strict=True))

    checked = FIRST + (RUN - FIRST) / EVERY
    return {
        "stages": len(chain.stages),
        "compared_tensors": compared,
        "off_s": statistics.median(off),
        "checked_s": statistics.median(seconds["always"]),
        "always": added("always"),
        "unchecked_step_of_sampled": added("sampled"),
        "checked_steps_in_run": checked,
        "sampled": checked / RUN * added("always"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for check_overhead.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = {}
    print(f"{'':<10}{'stages':>7}{'tensors':>9}{'step':>9}{'checked':>10}{'always':>9}{'sampled':>9}{'unchecked':>11}")
    for name, make in MODELS.items():
        row = rows[name] = measured(make, given.rounds)
        print(
            f"{name:<10}{row['stages']:>7}{row['compared_tensors']:>9}{row['off_s']:>7.3f} s{row['checked_s']:>8.3f} s"
            f"{row['always']:>+9.1%}{row['sampled']:>+9.2%}{row['unchecked_step_of_sampled']:>+11.2%}",
            flush=True,
        )
    kept = all(row["sampled"] <= PROMISE for row in rows.values())
    print(f"sampled adds at most {PROMISE:.0%} to a run of {RUN} steps: {'kept' if kept else 'BROKEN'}")
    if given.out is not None:
        document = {
            "command": documents.command(),
            "environment": documents.environment(given.threads),
            "rounds": given.rounds,
            "run_steps": RUN,
            "results": rows,
            "promise_kept": kept,
        }
        documents.write(document, given.out / "check_overhead.json")


if __name__ == "__main__":
    main()
