"""Do plans give the plain gradients where a model computes on several streams, however late the device is?

    python experiments/streams.py --seeds 1000 --out experiments/results

A device is emulated on the CPU (`tests/fake_kernels.py`): operations and copies run late, in any order that their waits
allow, and memory is used again at once. Each seed trains a model whose stages run on four streams, by a random plan of
swaps, recompute and segments, for two steps; losses and gradients are compared bit for bit with those of the plain
model on a prompt device. Every eighth seed trains the plain model late as well: whatever differed there would be the
emulation's. Then each wait is taken out (`WAITS` in tests/stream_programs.py), and the seeds that notice are counted.
"""

# ruff: noqa: E402 - it imports the emulated device of the tests

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import documents
import stream_programs
import torch
from fake_kernels import Device
from stream_programs import WAITS, Run, Wait

MODELS = 24


@functools.cache
def plain(model: int) -> Run:
    """The plain model's training on a device that does at once what it is given."""
    return stream_programs.train(Device.prompt(0), model, None)


def trained(seed: int, models: int, *, control: bool) -> dict[str, Any]:
    """One seed: what was done, and how many values differ."""
    model = seed % models
    plan = stream_programs.random_plan(model, random.Random(seed))
    wanted = plain(model)
    row: dict[str, Any] = {"seed": seed, "differing": -1, "error": ""}
    try:
        run = stream_programs.train(Device(seed), model, plan)
    except Exception as error:  # a wait taken out may end in any
        return row | {"error": f"{type(error).__name__}: {error}"}
    row |= {
        "differing": stream_programs.differing(run, wanted),
        "left_bytes": run.left_bytes,
        "compared": len(wanted.values),
        "swapped_bytes": run.swapped_bytes,
        "recomputed_stages": run.recomputed_stages,
        "segments": run.segments,
    }
    if control:
        late = stream_programs.train(Device(seed), model, None)
        row["control"] = stream_programs.differing(late, wanted)
    return row


def without(wait: Wait, seeds: int) -> dict[str, Any]:
    """How many seeds of one model notice that `wait` is missing."""
    plain(0)
    with mock.patch.object(wait.owner, wait.name, wait.instead):
        rows = [trained(seed, 1, control=False) for seed in range(seeds)]
    noticed = sum(bool(row["differing"]) for row in rows)
    checked = sum(row["error"].startswith("CheckError") for row in rows)
    return {"what": wait.what, "seeds": seeds, "noticed": noticed, "by_check": checked}


def main() -> None:
    """Run all seeds, then those without each wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", type=int, default=MODELS, help="different models among them")
    parser.add_argument("--without", type=int, default=0, help="seeds for each wait that is taken out; 0: none is")
    parser.add_argument("--out", type=Path, help="directory for streams.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    rows = []
    for seed in range(given.first, given.first + given.seeds):
        rows.append(trained(seed, given.models, control=seed % 8 == 0))
        if rows[-1]["differing"]:
            print(f"seed {seed}: {rows[-1]}", flush=True)
    found: dict[str, Any] = {
        "command": documents.command(),
        **documents.environment(1),
        "seeds": len(rows),
        "seconds": round(time.perf_counter() - begin, 1),
        "values_compared": sum(row.get("compared", 0) for row in rows),
        "swapped_bytes": sum(row.get("swapped_bytes", 0) for row in rows),
        "recomputed_stages": sum(row.get("recomputed_stages", 0) for row in rows),
        "segments": sum(row.get("segments", 0) for row in rows),
        "seeds_that_swap": sum(bool(row.get("swapped_bytes")) for row in rows),
        "seeds_that_recompute": sum(bool(row.get("recomputed_stages")) for row in rows),
        "seeds_with_segments": sum(bool(row.get("segments")) for row in rows),
        "controls": sum("control" in row for row in rows),
        "controls_differing": sum(bool(row.get("control")) for row in rows),
        "seeds_differing": [row["seed"] for row in rows if row["differing"]],
        "seeds_that_leave_memory": [row["seed"] for row in rows if row.get("left_bytes")],
    }
    print(
        f"{len(rows)} seeds on several streams, {found['values_compared']} values compared: "
        f"{found['seeds_that_swap']} swap, {found['seeds_that_recompute']} recompute, "
        f"{found['seeds_with_segments']} have segments; {len(found['seeds_differing'])} differ in any byte, "
        f"{len(found['seeds_that_leave_memory'])} leave memory; of {found['controls']} plain ones "
        f"{found['controls_differing']} differ"
    )
    if given.without:
        found["without"] = [without(wait, given.without) for wait in WAITS]
        for row in found["without"]:
            print(f"{row['noticed']:>4} of {row['seeds']} notice that this is missing: {row['what']}", flush=True)
    if given.out is not None:
        documents.write(found, given.out / "streams.json")
    if found["seeds_differing"] or found["controls_differing"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
