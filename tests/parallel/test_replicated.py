"""Models in DistributedDataParallel, on two processes: the same bits, and the buckets count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from measured_step import measured
from ranks import Ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from toy_modules import InTurn, Lambda, Residual, times
from trained_ranks import check, outcome

import ckptplan
from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.distributed.replicated import copied

OPTIONS: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "accumulating": {},
}


def net(*, unused: bool) -> nn.Module:
    """Blocks with dropout and a batch norm; with a parameter in no forward, the output is wide, and saved."""
    layers = times(4, lambda: Residual(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)))
    parts: dict[str, nn.Module] = {"layers": layers, "norm": nn.BatchNorm1d(64)}
    if unused:
        parts |= {"head": nn.Sequential(nn.Linear(64, 1024), nn.Tanh())}
    model = InTurn(**parts)
    return Lambda(lambda self, x: self.used(x), used=model, unused=nn.Linear(64, 64)) if unused else model


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = net(unused=name == "unused").train()
    torch.manual_seed(1 + dist.get_rank())
    return model, torch.randn(128, 64)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(wrapped: DistributedDataParallel, x: torch.Tensor, *, twice: bool) -> tuple[list[Any], int]:
    """Train: losses and the state at the end, and the steps' peak; `twice`: two micro-batches a step."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses, peaks = [], []

    def step() -> torch.Tensor:
        loss = loss_fn(wrapped(x))
        loss.backward()
        return loss.detach()

    for number in range(5):
        optimizer.zero_grad()
        if twice:
            with wrapped.no_sync():
                step()
        loss, peak = measured(step, wrapped, [optimizer], x)
        losses.append(loss)
        # Then the buckets are made anew, once: the first ones are freed before, which this recording doesn't see.
        if number != (2 if wrapped.static_graph else 1):
            peaks.append(peak)
        optimizer.step()
    # One bucket element for each parameter's.
    bucket_bytes = sum(p.nbytes for p in wrapped.parameters())
    return [*losses, *(v.clone() for v in wrapped.state_dict().values())], max(peaks) + bucket_bytes


def compared(name: str) -> dict[str, Any]:
    options, twice = OPTIONS[name], name == "accumulating"
    model, x = made(name)
    plain = train(DistributedDataParallel(model, **options), x, twice=twice)
    model, x = made(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wrapped = DistributedDataParallel(model, **options)
    plan = ckptplan.solve(
        wrapped, 0.85 * plain[1] / 2**30, inputs=x, loss_fn=loss_fn, time_limit_s=0.2, accumulate=twice
    )
    estimated = ckptplan.estimate(wrapped, x, loss_fn=loss_fn, accumulate=twice).peak_bytes
    assert estimated == pytest.approx(plain[1], rel=0.03)
    unchanged = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    verified = ckptplan.verify(wrapped, plan, x, loss_fn, repeats=1)
    ckptplan.trace(wrapped, plan, x, loss_fn)
    with ckptplan.apply(wrapped, plan, check="always") as handle:
        found = train(wrapped, x, twice=twice)
        stats = handle.stats()
    return outcome(plan, found, plain, stats=stats, verified=verified, unchanged=unchanged)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.long(but=["unused"])
def test_the_same_bits_within_the_budget(two: Ranks, name: str) -> None:
    for found in two.good(compared, name):
        check(found)
        assert found["verified"] == pytest.approx(found["predicted"], rel=0.03)


def updated() -> tuple[int, int, bool, bool]:
    """Peaks predicted and measured of steps that end with an update, which is the largest moment of the step."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    x = torch.randn(2, 64)
    optimizer = torch.optim.Adam(wrapped.parameters(), foreach=True)
    wrapped(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    state = optimizer.state_dict()["state"]
    moments = {i: {name: value.clone() for name, value in of.items()} for i, of in state.items()}
    plan = ckptplan.solve(wrapped, budget="0%", inputs=x, loss_fn=loss_fn, optimizer=optimizer, offload="all")
    verified = ckptplan.verify(wrapped, plan, x, loss_fn, optimizer=optimizer, repeats=1)
    ckptplan.trace(wrapped, plan, x, loss_fn, optimizer=optimizer)
    state = optimizer.state_dict()["state"]
    same = all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items()) and all(
        torch.equal(value, state[i][name]) for i, of in moments.items() for name, value in of.items()
    )
    own = set(map(id, wrapped.parameters()))
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        plan.peak_bytes, verified.measured_peak_bytes, same,
        own == set(map(id, theirs)) == set(map(id, optimizer.state)),
    )  # fmt: skip


def test_the_peak_of_an_update_is_measured(two: Ranks) -> None:
    for predicted, measured_bytes, same, own in two.good(updated):
        assert measured_bytes == pytest.approx(predicted, rel=0.01)
        assert same
        assert own


def either_side() -> tuple[int, int, int]:
    """Peaks of plans: without a wrapper, for one to come, and with it; a plan for one to come goes on either."""
    how: dict[str, Any] = {"budget_gb": 1, "loss_fn": loss_fn, "time_limit_s": 0.2}
    model, x = made("plain")
    alone = ckptplan.solve(model, inputs=x, **how)
    coming = ckptplan.solve(model, inputs=x, ddp=True, **how)
    ckptplan.apply(model, coming).remove()
    wrapped = DistributedDataParallel(model)
    there = ckptplan.solve(wrapped, inputs=x, **how)
    communicating = [any(n.startswith("collectives of 2 ranks take") for n in p.notes) for p in (alone, there)]
    assert communicating == [False, True]
    for plan in (coming, there):
        for each in (wrapped, model):
            ckptplan.apply(each, plan).remove()
            assert ckptplan.verify(each, plan, x, loss_fn, repeats=1).gradients_equal
    own = [alone]
    dist.broadcast_object_list(own)
    with pytest.raises(PlanMismatchError, match="for one device alone, this one is in 'ddp', and a rank holds"):
        ckptplan.apply(wrapped, own[0])
    with pytest.raises(PlanMismatchError, match="in 'ddp', this one is in 'ddp, gradients in buckets'"):
        ckptplan.apply(DistributedDataParallel(model, gradient_as_bucket_view=True), there)
    estimated = [
        ckptplan.estimate(each, x, loss_fn=loss_fn, **more).peak_bytes
        for each, more in ((model, {}), (model, {"ddp": True}), (wrapped, {}))
    ]
    assert estimated[0] < estimated[1] == estimated[2]
    return alone.peak_bytes, coming.peak_bytes, there.peak_bytes


@pytest.mark.long
def test_plans_go_on_either_side_of_the_wrapper(two: Ranks) -> None:
    for alone, coming, there in two.good(either_side):
        assert alone < coming == there


def by_a_step() -> list[int]:
    """Everything kept: by inputs, by a step that calls the wrapper, for a wrapper to come, without copies."""
    model, x = made("unused")
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    steps: list[tuple[nn.Module, dict[str, Any]]] = [
        (wrapped, {"inputs": x, "loss_fn": loss_fn}),
        (wrapped, {"step": lambda: loss_fn(wrapped(x))}),
        (model, {"inputs": x, "loss_fn": loss_fn, "ddp": ckptplan.DDP(find_unused_parameters=True)}),
        (model, {"inputs": x, "loss_fn": loss_fn, "ddp": True}),
    ]
    return [ckptplan.solve(m, 1, time_limit_s=0.2, **how).peak_bytes for m, how in steps]


@pytest.mark.long
def test_copies_of_outputs_count_by_a_step(two: Ranks) -> None:
    for found in two.good(by_a_step):
        assert found[0] == found[1] == found[2] == found[3] + 128 * 1024 * 4


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_outputs_of_any_kind_are_copied() -> None:
    given = torch.ones(2, requires_grad=True) * 2
    output = {"loss": given, "twice": (given, None), "plain": torch.ones(1), "number": 3, "own": Attributes(a=given)}
    found = copied(output)
    assert found["loss"] is not given
    assert torch.equal(found["twice"][0], given)
    assert all(found[name] is output[name] for name in ("plain", "number", "own"))  # as DDP leaves them
    (gradient,) = torch.autograd.grad((found["loss"] * 3).sum(), given)
    assert torch.equal(gradient, torch.full((2,), 3.0))


def refused() -> None:
    model, x = made("plain")
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(UnsupportedModelError, match="communication hook 'fp16_compress_hook' makes tensors of its own"):
        ckptplan.solve(wrapped, 1, inputs=x, loss_fn=loss_fn)


def test_what_makes_tensors_of_its_own_is_refused(two: Ranks) -> None:
    two.good(refused)


def adapted_by(offload: str | None) -> tuple[list[torch.Tensor], int]:
    """Losses, parameters and state of a rank whose first layers are frozen, and the bytes that were brought back."""
    torch.manual_seed(0)
    layers = [
        InTurn(trained=nn.Linear(96, 96), frozen=nn.Linear(96, 96).requires_grad_(False), out=nn.Tanh())
        for _ in range(4)
    ]
    wrapped = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(1 + dist.get_rank())
    x, handle, found = torch.randn(64, 96), None, []
    if offload is not None:
        plan = ckptplan.solve(
            wrapped, budget="0%", inputs=x, loss_fn=loss_fn, optimizer=optimizer, offload=offload, time_limit_s=2
        )
        handle = ckptplan.apply(wrapped, plan, check="always")
    for _ in range(4):
        loss = loss_fn(wrapped(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    back = 0 if handle is None else handle.stats().swapped_in_bytes
    if handle is not None:
        handle.remove()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [*found, *(p.detach() for p in wrapped.parameters()), *states], back


@pytest.mark.long
def test_weights_and_state_leave_on_each_rank(two: Ranks) -> None:
    plain = two.good(adapted_by, None)
    for (found, back), (wanted, _) in zip(two.good(adapted_by, "all"), plain, strict=True):
        assert back > 0
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))
