"""Calls that all ranks make: one plan for all, and an error on one is an error on all, soon and by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy_modules import Residual, times

import ckptplan
from ckptplan.core.errors import RankError
from ckptplan.distributed import group

SOON_S = 30.0


class Net(nn.Module):
    """Blocks; `fails` on this rank, in a way of tests."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        made = times(3, lambda: Residual(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)))
        self.layers = nn.Sequential(*made)
        self.fails = ""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.fails == "raises":
            raise ValueError("no good batch")
        if self.fails == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        x = self.layers(x)
        return x if y is None else x.sum() + y.sum()


def wrapped(rows: int = 64, fails: str = "", width: int = 64) -> tuple[DistributedDataParallel, torch.Tensor]:
    torch.manual_seed(0)
    found = DistributedDataParallel(Net(width).train())
    found.module.fails = fails
    return found, torch.randn(rows, width)


HOW: dict[str, Any] = {"time_limit_s": 0.2}


def one_plan(rows: int, budget_gb: float | None, host_gb: float | None, *actions: Any) -> ckptplan.Plan:
    model, x = wrapped(rows)
    more = {"actions": actions} if actions else {}
    plan = ckptplan.solve(model, budget_gb, inputs=x, host_gb=host_gb, **HOW, **more)
    with ckptplan.apply(model, plan, host_gb=host_gb):
        model(x).sum().backward()
    return plan


@pytest.mark.long
def test_one_plan_of_the_largest_step_and_the_smallest_budget(two: Ranks) -> None:
    first, second = two.run(one_plan, each=[(64, 1.0, None), (96, 0.5, None)])
    assert first == second
    assert "96" in first.fingerprint.inputs
    assert first.budget_bytes == 2**29


def of_other_sizes() -> str:
    """The inputs of one plan for ranks of which each has the largest in another dimension."""
    second = dist.get_rank() == 1
    model, x = wrapped(32 if second else 64)
    inputs = {"x": x, "y": torch.randn(64 if second else 32, 4)}
    plan = ckptplan.solve(model, 1, inputs=inputs, **HOW)
    with ckptplan.apply(model, plan):
        model(**inputs).backward()
    target = torch.zeros(len(x), 64)  # can't be repeated: the rank with the largest inputs plans
    with_target = ckptplan.solve(model, 1, inputs=x, loss_fn=lambda output: (output - target).square().sum(), **HOW)
    assert "[64, 64]" in with_target.fingerprint.inputs
    return plan.fingerprint.inputs


@pytest.mark.long
def test_one_plan_where_no_rank_has_the_largest_inputs(two: Ranks) -> None:
    for inputs in two.good(of_other_sizes):
        assert inputs == "[1]['x'] float32[64, 64], [1]['y'] float32[64, 4]"


@pytest.mark.long
def test_machines_share_their_memory(two: Ranks) -> None:
    first, second = two.good(one_plan, 64, None, None)
    assert first.budget_bytes == second.budget_bytes < 0.6 * psutil.virtual_memory().available

    def limited(host_gb: float | None, *actions: str) -> ckptplan.Plan:
        plan: ckptplan.Plan = two.good(one_plan, 2048, 0.012, host_gb, *actions)[0]
        return plan

    free = limited(None, "keep", "swap")  # whatever is faster now
    assert free.host_bytes
    assert limited(2 * free.host_bytes / 2**30).host_bytes <= free.host_bytes
    assert limited(free.host_bytes / 2**30).host_bytes <= free.host_bytes // 2


def failing(call: str, fails: str, silent_s: float = 25.0) -> tuple[str, float]:
    """What a call raises on this rank, where rank 1 fails; nothing of the plan is left, and no thread."""
    group.SILENT_S = silent_s
    mine = fails if dist.get_rank() == 1 else ""
    model, x = wrapped()
    plan = ckptplan.solve(model, 1, inputs=x, **HOW) if call in ("apply", "verify") else None
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    model.module.fails = mine
    begin = time.monotonic()
    calls: dict[str, Any] = {
        "solve": lambda: ckptplan.solve(model, 1e-6 if mine == "infeasible" else 1, inputs=x, **HOW),
        "verify": lambda: ckptplan.verify(model, plan, x, repeats=1),
        "arguments": lambda: ckptplan.solve(model, 1, inputs=x, **HOW, **({"max_overhead": 0.1} if mine else {})),
        "apply": lambda: ckptplan.apply(model, plan, check="never" if mine else "off"),  # type: ignore[arg-type]
    }
    with pytest.raises((ckptplan.CkptPlanError, ValueError)) as caught:
        calls[call]()
    took_s = time.monotonic() - begin
    assert {name: vars(module).keys() for name, module in model.named_modules()} == before
    assert not any(thread.name.startswith("ckptplan") for thread in threading.enumerate())
    return f"{type(caught.value).__name__}: {caught.value}", took_s


@pytest.mark.parametrize("call", ["solve", "arguments", "apply", "verify"])
def test_an_error_on_one_is_an_error_on_all(two: Ranks, call: str) -> None:
    (told, told_s), (own, own_s) = two.good(failing, call, "raises")
    kind, _, text = own.partition(": ")
    # The step's own error stays as it is on its rank.
    assert told == (f"RankError: rank 1: {own}" if kind == "ValueError" else f"{kind}: rank 1: {text}")
    assert max(told_s, own_s) < SOON_S


def test_a_budget_that_is_too_small_for_one(two: Ranks) -> None:
    for told, _ in two.good(failing, "solve", "infeasible"):
        assert told.startswith("InfeasibleBudgetError: ")
        assert told.endswith("it is the budget of rank 1")


def other(what: str) -> str:
    """What is raised where rank 1 does something else than rank 0."""
    second = dist.get_rank() == 1
    torch.manual_seed(0)
    width = 32 if what == "model" and second else 64
    model, x = Net(width).train(), torch.randn(64, width)
    how: dict[str, Any] = {"inputs": x, "loss_fn": lambda y: y.sum(), **HOW}
    plan = ckptplan.solve(model, 1, **how)
    plan = replace(plan, fingerprint=replace(plan.fingerprint, parallel="ddp"), notes=(str(second),))
    wrapped: Any = None if what == "model" else DistributedDataParallel(model)

    def call() -> None:
        if what == "call" and second:
            ckptplan.profile(wrapped, x)
        elif what == "call":
            ckptplan.solve(wrapped, 1, **how)
        elif what == "plan":
            ckptplan.apply(wrapped, plan)
        elif what == "step":
            many, few = (x, x[:32]) if second else (x[:32], x)
            ckptplan.solve(wrapped, 1, step=lambda: wrapped(many).sum() + wrapped(few).sum(), **HOW)
        else:
            ckptplan.solve(model, 1, ddp=True, **how)

    with pytest.raises(RankError) as caught:
        call()
    return str(caught.value)


OTHERS = {
    "model": ("rank 1 has another step than rank 0: the plan was made for",),
    "step": ("no rank's inputs are the largest in every dimension",),
    # Either rank may be the first to see it, and then the other one tells what that one saw.
    "call": ("rank 1 calls profile where rank 0 calls solve", "rank 1: rank 0 calls solve where rank 1 calls profile"),
    "plan": ("rank 1 applies another plan than rank 0",),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.long("step")
def test_ranks_that_do_something_else(two: Ranks, what: str) -> None:
    told = two.good(other, what)
    assert any(text in told[0] for text in OTHERS[what])
    assert all(str(each) for each in told)


@pytest.mark.long
def test_a_rank_that_ends_in_a_call() -> None:
    with ranks(2) as started:
        started.send(failing, [("solve", "stopped", 3.0)] * 2)
        told, took_s = started.receive(0, SOON_S)
    assert took_s < SOON_S
    assert told.startswith("RankError: solve: rank 1 has given no sign for 3 s")
