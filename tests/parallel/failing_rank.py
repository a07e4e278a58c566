"""A training of several ranks, of which the last one fails in a given way in its second step; run by torchrun."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptplan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

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


def main(way: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().train())
    x = torch.randn(64, 64)
    plan = ckptplan.solve(model, budget="10%", inputs=x, actions=("keep", "recompute"), segments=False, cache=False)
    recomputed = next(name for name, choice in plan.decisions.items() if choice.action == "recompute")
    ckptplan.apply(model, plan, check="off")
    if dist.get_rank() == dist.get_world_size() - 1:
        model.module.get_submodule(recomputed).get_submodule("1").register_forward_pre_hook(failing(way))
    print(f"recomputes {recomputed}", flush=True)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()


if __name__ == "__main__":
    main(sys.argv[1])
