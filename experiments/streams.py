"""Do plans give the plain gradients where a model computes on several streams, however late the device is?

    python experiments/streams.py --seeds 1000 --out experiments/results

A device is emulated on the CPU (`tests/fake_kernels.py`): operations and copies run late, in any order that their waits
allow, and memory is used again at once. Each seed trains a model whose stages run on four streams, by a random plan of
swaps, recompute and segments, for two steps; losses and gradients are compared bit for bit with those of the plain
model on a prompt device. Every eighth seed trains the plain model late as well: whatever differed there would be the
emulation's. That a missing wait is noticed is for `tests/runtime/test_streams.py`.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from typing import Any

import documents
import stream_programs
import torch
from fake_kernels import Device
from stream_programs import Run

MODELS = 24


@functools.cache
def plain(model: int) -> Run:
    """The plain model's training on a device that does at once what it is given."""
    return stream_programs.train(Device.prompt(0), model, None)


def trained(seed: int, models: int) -> dict[str, Any]:
    """One seed: what was done, and how many values differ."""
    model = seed % models
    run = stream_programs.train(Device(seed), model, stream_programs.random_plan(model, random.Random(seed)))
    row: dict[str, Any] = {
        "seed": seed, "differing": stream_programs.differing(run, plain(model)), "left_bytes": run.left_bytes,
        "compared": len(plain(model).values), "swapped_bytes": run.swapped_bytes,
        "recomputed_stages": run.recomputed_stages, "segments": run.segments,
    }  # fmt: skip
    if seed % 8 == 0:
        late = stream_programs.train(Device(seed), model, None)
        row["control"] = stream_programs.differing(late, plain(model))
    return row


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", type=int, default=MODELS, help="different models among them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    rows = []
    for seed in range(given.first, given.first + given.seeds):
        rows.append(trained(seed, given.models))
        if rows[-1]["differing"]:
            print(f"seed {seed}: {rows[-1]}", flush=True)
    acts = {"that_swap": "swapped_bytes", "that_recompute": "recomputed_stages", "with_segments": "segments"}
    found: dict[str, Any] = {
        "seeds": len(rows),
        "seconds": round(time.perf_counter() - begin, 1),
        "values_compared": sum(row["compared"] for row in rows),
        **{field: sum(row[field] for row in rows) for field in acts.values()},
        **{f"seeds_{what}": sum(bool(row[field]) for row in rows) for what, field in acts.items()},
        "controls": sum("control" in row for row in rows),
        "controls_differing": sum(bool(row.get("control")) for row in rows),
        "seeds_differing": [row["seed"] for row in rows if row["differing"]],
        "seeds_that_leave_memory": [row["seed"] for row in rows if row["left_bytes"]],
    }
    print(*(f"{what.replace('_', ' ')}: {value}" for what, value in found.items()), sep="\n")
    documents.save(given.out, "streams.json", found)
    sys.exit(bool(found["seeds_differing"] or found["controls_differing"]))


if __name__ == "__main__":
    main()
