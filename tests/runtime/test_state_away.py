"""Optimizer state and gradients that are away between their uses: bits, bytes, and whoever reads them meanwhile."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import assert_kept
from test_weights import same
from torch import nn
from weight_models import WIDTH, Make, built, moving_all

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.resident import UPDATE, Kind
from ckptplan.runtime.handle import Handle

CLASSES = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]
MAKES: dict[str, Make] = {kind.__name__: kind for kind in CLASSES}
MAKES |= {
    "SGD": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, foreach=True, amsgrad=True),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]),
}


def trained(
    model: nn.Module,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    count: int = 4,
    micro: int = 1,
    between: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda model, optimizer: None,
) -> list[torch.Tensor]:
    """Losses, parameters and state of some steps."""
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        for _ in range(micro):
            loss = model(x).square().mean()
            between(model, optimizer)
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=micro == 1)
        found += [p.detach().clone() for p in model.parameters()]
    return [*found, *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))]


@pytest.fixture
def loud() -> Iterator[None]:
    """Any difference from the planned step is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def optimized(name: str, make: Make) -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    model, x = built(name)
    return model, x, make([p for p in model.parameters() if p.requires_grad])


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize("kind", MAKES)
def test_any_optimizer_of_pytorch(kind: str) -> None:
    wanted = trained(*optimized("trained", MAKES[kind]))
    model, x, optimizer = optimized("trained", MAKES[kind])
    if kind == "Adafactor":  # its factored moments are a row and a column
        measured = ckptplan.profile(model, x, menus=False, optimizer=optimizer)
        assert sum(r.nbytes for r in measured.residents if r.kind == "optimizer") <= 8 * 2 * WIDTH * 4
        return
    plan = moving_all("trained", ("optimizer",), make=MAKES[kind])
    with ckptplan.apply(model, plan, check="always", optimizer=optimizer) as handle:
        assert same(trained(model, x, optimizer), wanted)
        each = sum(m.resident.nbytes for m in plan.decided.weights)
        made_before = bool(MAKES[kind](list(built("trained")[0].parameters())).state)  # Adagrad's
        assert handle.stats().swapped_in_bytes == each * (4 if made_before else 3)


OFFLOADS: tuple[tuple[Kind, ...], ...] = (("optimizer",), ("weights", "optimizer"), ("activations", "optimizer"))


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", ["trained", "tied", "frozen"])
def test_the_peak_is_that_of_the_plan(name: str, offload: tuple[Kind, ...]) -> None:
    plan = moving_all(name, offload, make=torch.optim.Adam)
    model, x, optimizer = optimized(name, torch.optim.Adam)
    found = assert_kept(model, plan, x, optimizer=optimizer)
    assert found.measured_peak_bytes > 0.95 * plan.peak_bytes


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize("name", ["trained", "tied", "flat", "frozen"])
def test_micro_batches_add_to_gradients_that_were_away(name: str) -> None:
    wanted = trained(*optimized(name, torch.optim.AdamW), micro=3)
    plan = moving_all(name, ("weights", "optimizer", "gradients"), make=torch.optim.AdamW, accumulate=True)
    assert {m.resident.kind for m in plan.decided.weights} == {"weights", "optimizer", "gradients"}
    model, x, optimizer = optimized(name, torch.optim.AdamW)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    with ckptplan.apply(model, plan, check="always", optimizer=optimizer):
        assert same(trained(model, x, optimizer, micro=3), wanted)


def test_the_peak_with_gradients_is_that_of_the_plan() -> None:
    for name in ("adapted", "trained", "tied"):
        plan = moving_all(name, ("gradients", "weights"), accumulate=True)
        found = assert_kept(*built(name)[:1], plan, built(name)[1])
        assert found.measured_peak_bytes > 0.95 * plan.peak_bytes


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


READS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "state_dict": lambda m, o: [v.clone() for s in o.state_dict()["state"].values() for v in s.values()],
    "save": lambda m, o: torch.save(o.state_dict(), io.BytesIO()),
    "copy": lambda m, o: copy.deepcopy(o),
    "load": lambda m, o: _loaded(o),
    "norms": lambda m, o: [v.norm() for s in o.state.values() for v in s.values()],
    "gradients": lambda m, o: [p.grad.norm() for p in m.parameters() if p.grad is not None],
    "clipped": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "scaled": lambda m, o: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None],
    "zeroed": lambda m, o: o.zero_grad(set_to_none=False),
    "dropped": lambda m, o: o.zero_grad(),
    "replaced": lambda m, o: [setattr(p, "grad", p.grad.clone()) for p in m.parameters() if p.grad is not None],
}


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("read", READS)
def test_who_reads_what_is_away_finds_it(read: str) -> None:
    make = torch.optim.AdamW
    wanted = trained(*optimized("trained", make), micro=2, between=READS[read])
    plan = moving_all("trained", ("optimizer", "gradients"), make=make, accumulate=True)
    model, x, optimizer = optimized("trained", make)
    with ckptplan.apply(model, plan, check="always", optimizer=optimizer):
        assert same(trained(model, x, optimizer, micro=2, between=READS[read]), wanted)


def test_an_update_between_forward_and_backward() -> None:
    """Of a part of the parameters whose values no backward needs: biases."""

    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built("trained")
        biases = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1])
        with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan, optimizer=biases):
            return trained(model, x, biases, between=lambda m, o: o.step())

    plan = moving_all("trained", ("optimizer",), make=torch.optim.AdamW)
    assert same(run(plan), run(None))


@pytest.mark.usefixtures("loud")
def test_a_scaler_and_two_optimizers() -> None:
    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built("trained")
        halves = [list(model[:2].parameters()), list(model[2:].parameters())]  # type: ignore[index]
        optimizers = [torch.optim.AdamW(half) for half in halves]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        found = []
        with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan, check="always") as handle:
            for _ in range(4):
                scaler.scale(model(x).square().mean()).backward()
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
                found += [p.detach().clone() for p in model.parameters()]
            if isinstance(handle, Handle) and plan is not None:
                assert handle.stats().swapped_in_bytes > 0
        return found

    assert same(run(moving_all("trained", ("optimizer",), make=torch.optim.AdamW)), run(None))


def test_state_from_before_moves_if_the_optimizer_is_given_and_is_warned_of_otherwise() -> None:
    plan = moving_all("trained", ("optimizer",), make=torch.optim.AdamW)
    model, x, optimizer = optimized("trained", torch.optim.AdamW)
    trained(model, x, optimizer, count=1)
    with ckptplan.apply(model, plan, optimizer=optimizer) as handle:
        trained(model, x, optimizer, count=1)
        assert handle.stats().swapped_in_bytes == sum(m.resident.nbytes for m in plan.decided.weights)
    with ckptplan.apply(model, plan) as handle, pytest.warns(RuntimeWarning, match="pass optimizer= to apply"):
        trained(model, x, optimizer, count=1)
    assert handle.stats().swapped_in_bytes == 0


def _stopping(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    def stop(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    output.register_hook(stop)


def test_an_error_in_backward_leaves_state_and_gradients_right() -> None:
    plan = moving_all("trained", ("weights", "optimizer", "gradients"), make=torch.optim.AdamW, accumulate=True)
    model, x, optimizer = optimized("trained", torch.optim.AdamW)
    trained(model, x, optimizer, micro=2, count=1)
    before = [v.clone() for state in optimizer.state.values() for v in state.values()]
    handle = ckptplan.apply(model, plan, check="off", optimizer=optimizer)
    for number in range(4):
        hook = model[number].register_forward_hook(_stopping)  # type: ignore[index]
        with pytest.raises(ZeroDivisionError):
            model(x).square().mean().backward()
        hook.remove()
    handle.remove()
    now = [v for s in optimizer.state.values() for v in s.values()]
    assert all(type(t) is torch.Tensor for t in [*now, *(p.grad for p in model.parameters())])
    assert same(now, before)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_update_is_a_decision_of_the_plan() -> None:
    model, x, optimizer = optimized("trained", torch.optim.Adam)
    x = x.repeat(16, 1)
    job: dict[str, Any] = {"inputs": x, "optimizer": optimizer, "time_limit_s": 2}
    plan = ckptplan.solve(model, budget="0%", offload="all", **job)
    assert plan.decisions[UPDATE].action == "swap"
    assert UPDATE in str(plan)
    assert plan.peak_bytes < ckptplan.solve(model, budget="0%", **job).peak_bytes
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.filterwarnings("ignore:the peak may exceed", "ignore:steps differ")
def test_a_stage_that_runs_again_within_forward_and_has_a_loss_of_its_own() -> None:
    """Its gradient leaves twice: the second time with what the first backward has added."""

    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built("trained")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        once = []

        def auxiliary(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            output.square().mean().backward(retain_graph=True)
            if once:
                return None
            once.append(True)
            return module(args[0])

        model[1].register_forward_hook(auxiliary)  # type: ignore[index]
        with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan, check="off"):
            model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plan = moving_all("trained", ("gradients",), make=torch.optim.AdamW, accumulate=True)
    assert same(run(plan), run(None))


@pytest.mark.parametrize("slowdown", [0.0, 0.02])
def test_a_slowdown_that_weights_on_their_way_back_exceed(slowdown: float) -> None:
    measured = ckptplan.profile(*built("adapted"), menus=False)
    plan = ckptplan.solve(measured, max_overhead=slowdown, offload="all", time_limit_s=1)
    assert plan.overhead <= slowdown + 1e-9


def test_what_is_away_between_steps_takes_the_hosts_memory_once() -> None:
    measured = ckptplan.profile(*built("adapted"), menus=False)
    least = ckptplan.solve(measured, budget="0%", offload="all", time_limit_s=2).peak_bytes
    assert least < measured.resident_bytes  # so that some have to be away between steps
    budget = f"{least + 4000} B"
    plan = ckptplan.solve(measured, budget=budget, offload="all", time_limit_s=2)
    host_gb = (plan.host_bytes + sum(plan.waiting_bytes)) / 2**30
    again = ckptplan.solve(measured, budget=budget, offload="all", host_gb=host_gb, time_limit_s=2)
    assert again.host_bytes + sum(again.waiting_bytes) <= host_gb * 2**30
    with pytest.raises(ckptplan.InfeasibleBudgetError):
        ckptplan.solve(measured, budget=budget, offload="all", host_gb=0.0, time_limit_s=2)
