"""Models sharded by `fully_shard`, on two processes: the same bits, and a rank's bytes are those planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measured_step import measured
from ranks import Ranks, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ckptplan

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "whole until backward": {"reshard_after_forward": False},
    "in bfloat16": {"mp_policy": HALF},
    "blocks alone": {},
    "prefetching": {},
    "accumulating": {},
}


class Net(nn.Module):
    """Blocks of odd sizes, which shards don't divide, with dropout; the loss is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 65)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(65, 257), nn.GELU(), nn.Dropout(0.1), nn.Linear(257, 65)) for _ in range(4)
        )
        self.norm = nn.LayerNorm(65)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().train()
    options = WAYS[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if name != "blocks alone":
        fully_shard(model, mesh=mesh, **options)
    if name == "prefetching":
        layers = list(model.layers)
        for k, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[k + 1 : k + 3])
            layer.set_modules_to_backward_prefetch(layers[max(k - 2, 0) : k][::-1])
    torch.manual_seed(1 + dist.get_rank())
    return model, torch.randn(512, 64)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def train(model: nn.Module, x: torch.Tensor, *, twice: bool) -> tuple[list[Any], int]:
    """Train: losses and this rank's state at the end, and the steps' peak; `twice`: two micro-batches a step."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, peaks = [], []

    def step() -> torch.Tensor:
        output = model(x)
        loss = loss_fn(output)
        loss.backward()
        return loss.detach()

    for _ in range(4):
        optimizer.zero_grad()
        if twice:
            step()
        loss, peak = measured(step, model, [optimizer], x)
        losses.append(loss)
        peaks.append(peak)
        optimizer.step()
    return [*losses, *(p.to_local().clone() for p in model.parameters() if hasattr(p, "to_local"))], max(peaks)


def compared(name: str) -> dict[str, Any]:
    twice = name == "accumulating"
    plain, plain_peak = train(*made(name), twice=twice)
    model, x = made(name)
    before = {k: v.to_local().clone() for k, v in model.state_dict().items() if hasattr(v, "to_local")}
    plan = ckptplan.solve(
        model, budget="20%", inputs=x, loss_fn=loss_fn, time_limit_s=1, cache=False, accumulate=twice, optimizer="adam"
    )
    unchanged = all(torch.equal(v.to_local(), before[k]) for k, v in model.state_dict().items() if k in before)
    verified = ckptplan.verify(model, plan, x, loss_fn, repeats=1)
    estimated = ckptplan.estimate(model, x, loss_fn=loss_fn, optimizer="adam", plan=plan)
    with ckptplan.apply(model, plan, check="always") as handle:
        found, peak = train(model, x, twice=twice)
        stats = handle.stats()
    return {
        "equal": all(map(torch.equal, found, plain)), "unchanged": unchanged,
        "peak": peak, "plain": plain_peak, "predicted": plan.peak_bytes, "budget": plan.budget_bytes,
        "acts": stats.recomputed_stages + stats.swapped_out_bytes, "verified": verified.measured.requested_bytes,
        "gradients_equal": verified.gradients_equal, "estimated": estimated.peak_bytes,
        "decisions": [c.option for c in plan.choices],
    }  # fmt: skip


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as found:
        yield found


@pytest.mark.parametrize("name", WAYS)
def test_the_same_bits_within_the_budget(two: Ranks, name: str) -> None:
    for found in two.good(compared, name):
        assert found["equal"]
        assert found["unchanged"]
        assert found["acts"]
        assert found["peak"] <= found["budget"] < found["plain"]
        assert found["peak"] == pytest.approx(found["predicted"], rel=0.03)
        assert found["gradients_equal"]
