"""Trainings of several ranks with the callbacks and without, held against each other; run by torchrun."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_lightning
import test_transformers
import torch.distributed as dist
import torch_setup  # noqa: F401
from accelerate.state import AcceleratorState, DistributedType, PartialState
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckptplan.core.errors import UnsupportedModelError
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


def in_a_trainer(folder: Path, **how: Any) -> Any:
    plain = test_transformers.trained(folder, **how)
    bucket_bytes = 0 if plain.accelerator.is_fsdp2 else sum(p.nbytes for p in plain.model.parameters())
    callback = test_transformers.planner_for(plain, bucket_bytes, check="always")
    planned = test_transformers.trained(folder, callback, **how)
    test_transformers.assert_same(planned, plain)
    held(callback, planned.peaks, plain.peaks, bucket_bytes)
    return planned


@contextmanager
def sharded_by_accelerate(**settings: str) -> Iterator[None]:
    """Inside, accelerate shards models as `accelerate launch` with these settings has it, though on a CPU."""
    original = AcceleratorState.__init__

    def as_on_devices(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        PartialState(cpu=True)
        if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:  # which it doesn't shard on
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    launched = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block", **settings,
    }  # fmt: skip
    with mock.patch.object(AcceleratorState, "__init__", as_on_devices), mock.patch.dict(os.environ, launched):
        yield


def in_a_trainer_that_shards(folder: Path) -> None:
    with sharded_by_accelerate(FSDP_RESHARD_AFTER_FORWARD="true"):
        trainer = in_a_trainer(folder, lengths=[24] * 8 + [36] * 8 + [24] * 16)
        units = [name for name, module in trainer.model.named_modules() if isinstance(module, FSDPModule)]
        assert units == ["", "transformer.wte", *(f"transformer.h.{k}" for k in range(2)), "lm_head"]
    refused = pytest.raises(UnsupportedModelError, match="set its activation_checkpointing to false")
    with sharded_by_accelerate(FSDP_ACTIVATION_CHECKPOINTING="true"), refused:
        test_transformers.trained(folder, ActivationPlanCallback(1))


def outputs_are_copied_once(folder: Path) -> None:
    callback = ActivationPlanCallback(1, time_limit_s=0.2)
    planned = test_transformers.trained(folder, callback, options={"label_smoothing_factor": 0.1})
    bucket_bytes = sum(p.nbytes for p in planned.model.parameters())
    assert callback.plan.peak_bytes == pytest.approx(planned.peaks[-1] + bucket_bytes, rel=0.005)


class Returning(test_lightning.Module):
    """Returns an output that the last operation saves."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(10, 1024), nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.wide(self.layers(batch[0]))
        return {"loss": nn.functional.cross_entropy(output, batch[1]), "output": output}


def in_lightning(folder: Path, kind: type[test_lightning.Module], strategy: Callable[[], Any]) -> None:
    def fit(*callbacks: Any) -> test_lightning.Module:
        return test_lightning.fit(folder, *callbacks, kind=kind, strategy=strategy(), devices=ranks)[0]

    ranks = dist.get_world_size()
    plain = fit()
    bucket_bytes = 0 if kind is test_lightning.Sharded else sum(p.nbytes for p in plain.parameters())
    callback = test_lightning.planner_for(plain, bucket_bytes, check="always")
    planned = fit(callback)
    test_lightning.assert_same(planned, plain)
    held(callback, planned.peaks, plain.peaks, bucket_bytes)


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_a_trainer(folder, kind=test_transformers.Again)
        outputs_are_copied_once(folder)
        in_a_trainer_that_shards(folder)
        in_lightning(folder, Returning, lambda: "ddp_find_unused_parameters_true")
        in_lightning(folder, test_lightning.Sharded, lambda: ModelParallelStrategy(dist.get_world_size(), 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
