"""Wrappers and placements of models that plans don't support."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.distributed import unwrapped


def check_engine(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a wrapper or a placement that plans can't cover."""
    places = getattr(model, "hf_device_map", None)
    spread = sorted(set(map(str, places.values()))) if isinstance(places, Mapping) else ()
    modules = dict(unwrapped(model).named_modules())
    inside = next((name for name, module in modules.items() if isinstance(module, DistributedDataParallel)), None)
    whys = {
        "the model is in DataParallel, which copies it to several devices at each forward; run one process for each "
        "device (torchrun), or show one device alone (CUDA_VISIBLE_DEVICES=0), and plan the model inside":
        isinstance(model, nn.DataParallel),
        "the model is in DeepSpeed's engine, which moves parameters, gradients and state by itself; plans don't know "
        "these bytes; train it without DeepSpeed":
        type(model).__module__.partition(".")[0] == "deepspeed",
        f"module {inside!r} is a DistributedDataParallel inside the model, whose buckets wouldn't count; wrap the "
        "whole model, or plan for the part that is wrapped":
        inside is not None,
        "the model is in FullyShardedDataParallel (FSDP1), which keeps its parameters in flat tensors; shard it with "
        "torch.distributed.fsdp.fully_shard, under which plans work":
        any(type(module).__name__ == "FullyShardedDataParallel" for module in modules.values()),
        f"device_map has spread the model over {', '.join(spread)}; planning covers one device at a time, so load it "
        "with device_map=None and move it to one":
        len(spread) > 1,
    }  # fmt: skip
    for why in (why for why, holds in whys.items() if holds):
        raise UnsupportedModelError(why)
