"""A training of several ranks, of which the last one fails in a given way in its second step; run by torchrun."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptplan
from ckptplan.core.units import GIB


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def failing(way: str) -> Any:
    """A hook on a layer that fails in the second step."""
    calls = [0]

    def hook(module: nn.Module, args: Any) -> None:
        calls[0] += 1
        # The first step calls it in forward and in the recompute.
        if calls[0] == {"forward": 3, "recompute": 4, "killed": 4}.get(way):
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no good values")

    return hook


def main(way: str, engine: str = "ddp", swap_dir: str | None = None) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    last = dist.get_rank() == dist.get_world_size() - 1
    model: nn.Module = Net(128 if way == "model" and last else 256).train()
    if engine == "fsdp":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)  # type: ignore[arg-type]
        fully_shard(model)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model) if way != "model" else model
    x = torch.randn(64, 64)
    actions: tuple[Any, ...] = ("keep", "swap") if way == "copy" else ("keep", "recompute")
    how: dict[str, Any] = {"inputs": x, "actions": actions, "segments": False, "swap_dir": swap_dir}
    if way == "model" and engine == "ddp":
        how["ddp"] = True
    if way == "memory":
        plan = ckptplan.solve(wrapped, 1e-6 if last else 1, **how)
    else:
        plan = ckptplan.solve(wrapped, budget="10%", **how)
    if way == "memory":
        raise AssertionError(f"a plan for {plan.budget_bytes / GIB} GiB")
    acts = next(name for name, choice in plan.decisions.items() if choice.action == actions[1])
    ckptplan.apply(model, plan, check="off", swap_dir=swap_dir)
    if last and way != "copy":
        model.get_submodule(acts).get_submodule("1").register_forward_pre_hook(failing(way))
    sys.stdout.write(f"acts in {acts}\n")  # in one piece: lines of two ranks may run into each other
    sys.stdout.flush()
    for number in range(3):
        if last and way == "copy" and number == 1:  # the swap file can't be written any more
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        wrapped.zero_grad()
        wrapped(x).square().mean().backward()


if __name__ == "__main__":
    main(*sys.argv[1:])
