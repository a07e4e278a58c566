"""Trainings of several ranks with the callbacks and without, held against each other; run by torchrun."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import test_lightning
import test_transformers
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy

from ckptplan.integrations.lightning import ActivationPlanner
from ckptplan.integrations.transformers import ActivationPlanCallback


def held(callback: Any, peaks: list[int], plain_peaks: list[int], bucket_bytes: int) -> None:
    """Check what a training did: one plan, within its budget, of which something ran."""
    plan, stats = callback.plan, callback.handle.stats()
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    assert plans == [plan] * len(plans)
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    # The second step makes the buckets anew; what it frees first was there before it was recorded.
    peaks, plain_peaks = ([peak for step, peak in enumerate(found) if step != 1] for found in (peaks, plain_peaks))
    assert max(peaks) + bucket_bytes <= plan.budget_bytes < max(plain_peaks) + bucket_bytes, (
        max(peaks), bucket_bytes, plan, max(plain_peaks)
    )  # fmt: skip


def in_a_trainer(folder: Path, way: str) -> None:
    how = test_transformers.WAYS[way]
    callback = ActivationPlanCallback(budget="30%", time_limit_s=1, check="always", cache=False)
    plain = test_transformers.trained(folder, **how)
    planned = test_transformers.trained(folder, callback, **how)
    test_transformers.assert_same(planned, plain)
    held(callback, planned.peaks, plain.peaks, sum(p.nbytes for p in planned.model.parameters()))


def in_lightning(folder: Path, *, sharded: bool) -> None:
    callback = ActivationPlanner(budget="20%", time_limit_s=1, check="always", cache=False)

    def fit(*callbacks: Any) -> test_lightning.Module:
        strategy = ModelParallelStrategy(ranks, 1) if sharded else "ddp"
        kind = test_lightning.Sharded if sharded else test_lightning.Module
        return test_lightning.fit(folder, *callbacks, kind=kind, strategy=strategy, devices=ranks)[0]

    ranks = dist.get_world_size()
    plain, planned = fit(), fit(callback)
    test_lightning.assert_same(planned, plain)
    held(callback, planned.peaks, plain.peaks, 0 if sharded else sum(p.nbytes for p in planned.parameters()))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    test_transformers.STEPS = test_lightning.STEPS = 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_a_trainer(folder, "another with a graph")
        in_lightning(folder, sharded=False)
        in_lightning(folder, sharded=True)


if __name__ == "__main__":
    sys.exit(main())
