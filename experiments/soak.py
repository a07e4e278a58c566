"""Do memory, threads and files stay flat over thousands of steps of random shapes?

    python experiments/soak.py --steps 2000 --out experiments/results

A small transformer trains under a plan of keep, swap, recompute and a segment, on batches of 1 to 8 samples of 1 to 48
tokens. The first tenth of the steps grows lengths under `on_larger="replan"`; what the rest holds at each sample is
compared between its first and its last quarter. Exit code 1 if something isn't flat.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import documents
import psutil
import torch
from small_models import Transformer, scheduled

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.training.step import default_loss

BATCH, LENGTH, VOCABULARY = 8, 48, 50
ALLOWED = {"rss_bytes": 8 << 20, "tensors": 0, "tensor_bytes": 0, "threads": 0, "files": 0, "file_bytes": 0}
"""Most that the median of the last quarter of samples may lie above that of the first. The resident set alone has
room: the allocator of the C library keeps what it had."""


def mixed(profile: Profile) -> Plan:
    """Swap, recompute, a segment of two, keep: in this order over the layers."""
    layers = [i for i, stage in enumerate(profile.stages) if stage.name.startswith("layers.")]
    options = [stage.keep for stage in profile.stages]
    for i, name in zip(layers, ("swap", "recompute", "recompute", "recompute", "recompute+swap", "keep"), strict=True):
        options[i] = profile.stages[i].find(name) or profile.stages[i].keep
    return scheduled(profile, options, (Segment(layers[2], layers[3]),))


def sample(step: int) -> dict[str, Any]:
    """What the process holds now."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    process = psutil.Process()
    sizes = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "deleted" in os.readlink(entry):  # swap files have no name
                sizes += entry.stat().st_size
        except OSError:
            continue  # the folder's own
    return {
        "step": step, "rss_bytes": process.memory_info().rss, "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()), "threads": threading.active_count(), "files": process.num_fds(),
        "file_bytes": sizes,
    }  # fmt: skip


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, int]) -> None:
    """One step, or now and then a forward whose graph is dropped."""
    tokens = torch.randint(0, VOCABULARY, shape)
    optimizer.zero_grad()
    loss = default_loss(model(tokens))
    if shape[1] % 7 == 0:
        return
    loss.backward()
    optimizer.step()


def verdicts(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per quantity, by how much the last quarter of samples lies above the first."""
    quarter = max(len(samples) // 4, 1)
    out = []
    for name, allowed in ALLOWED.items():
        first, last = (statistics.median(s[name] for s in some) for some in (samples[:quarter], samples[-quarter:]))
        out.append(
            {"what": name, "first": first, "last": last, "grown": last - first, "allowed": allowed,
             "flat": last - first <= allowed}
        )  # fmt: skip
    return out


def soak(steps: int, seed: int) -> dict[str, Any]:
    """Run it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Transformer(depth=6).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begin = time.perf_counter()

    # Growth: lengths creep up, and new plans take the place of old ones.
    first = ckptplan.solve(model, 1.0, inputs=torch.randint(0, VOCABULARY, (BATCH, 8)), menus=False)
    growing = steps // 10
    with warnings.catch_warnings(), ckptplan.apply(model, first, on_larger="replan", time_limit_s=2.0) as handle:
        warnings.simplefilter("ignore", RuntimeWarning)
        for step in range(growing):
            longest = 8 + (LENGTH - 8) * (step + 1) // growing
            train(model, optimizer, (rng.randint(1, BATCH), rng.randint(1, longest)))
        replans = [str(replan.larger) for replan in handle.replans]
    print(f"{growing} growing steps, {len(replans)} new plans, {time.perf_counter() - begin:.0f} s")

    plan = mixed(ckptplan.profile(model, torch.randint(0, VOCABULARY, (BATCH, LENGTH)), menus=False))
    samples = []
    every = max((steps - growing) // 40, 1)
    with ckptplan.apply(model, plan) as handle:
        for step in range(growing, steps):
            train(model, optimizer, (rng.randint(1, BATCH), rng.randint(1, LENGTH)))
            if (step - growing) % every == every - 1:
                optimizer.zero_grad()
                samples.append(sample(step + 1))
        stats = handle.stats()
    # The first samples belong to the warming up: caches of kernels, the optimizer's state.
    settled = samples[len(samples) // 10 :]
    return {
        "steps": steps, "seed": seed, "took_s": time.perf_counter() - begin, "replans": replans,
        "swapped_out_bytes": stats.swapped_out_bytes, "recomputed_stages": stats.recomputed_stages,
        "samples": samples, "verdicts": verdicts(settled),
    }  # fmt: skip


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 100:
        parser.error(f"--steps {args.steps}: fewer than 100 say nothing")
    found = soak(args.steps, args.seed)
    rows = [
        (row["what"], *(f"{row[key]:,.0f}" for key in ("first", "last", "grown", "allowed")),
         "flat" if row["flat"] else "GROWS")
        for row in found["verdicts"]
    ]  # fmt: skip
    documents.show(documents.table(("", "first quarter", "last quarter", "grown", "allowed", ""), rows))
    print(
        f"{found['swapped_out_bytes']:,} bytes swapped out, {found['recomputed_stages']:,} stages recomputed, "
        f"{len(found['replans'])} new plans, {found['took_s']:.0f} s"
    )
    documents.save(args.out, "soak.json", found)
    acted = found["swapped_out_bytes"] > 0 and found["recomputed_stages"] > 0
    sys.exit(0 if acted and all(row["flat"] for row in found["verdicts"]) else 1)


if __name__ == "__main__":
    main()
