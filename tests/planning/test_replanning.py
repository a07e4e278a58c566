"""Plans made while training: after steps that differed from the planned one, and on the first forward."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_same, gradients
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.request import recalled, remember
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, optimizer_tensors, peak_above_start


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4))
    )


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


X = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
HOW: dict[str, Any] = {"inputs": X, "loss_fn": loss_of, "time_limit_s": 0.2}


def accumulating(model: nn.Module, number: int) -> None:
    for _ in range(2):
        loss_of(model(X)).backward()


def thawing(model: nn.Module, number: int) -> None:
    model.requires_grad_(number > 1)
    model[2:].requires_grad_(True)  # type: ignore[index]
    loss_of(model(X)).backward()


def training(model: nn.Module, number: int) -> None:
    loss_of(model.train()(X)).backward()


def growing(model: nn.Module, number: int) -> None:
    loss_of(model(torch.cat([X, X[: 8 * number]]))).backward()


Step = Callable[[nn.Module, int], None]
KINDS: dict[str, tuple[Step, str]] = {
    "gradients": (accumulating, "60%"),
    "thawed": (thawing, "60%"),
    "mode": (training, "30%"),
    "larger": (growing, "60%"),
}


def prepared(kind: str) -> nn.Sequential:
    model = blocks()
    if kind == "thawed":
        model[:2].requires_grad_(False)
    return model.eval() if kind == "mode" else model


def trained(model: nn.Module, step: Step, steps: int = 4) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    found = []
    for number in range(steps):
        model.zero_grad()
        step(model, number)
        found.append(gradients(model))
    return found


@functools.cache
def within(share: str, kind: str = "") -> Plan:
    """A plan for as many bytes as a share of the way is."""
    model = prepared(kind)
    least = ckptplan.solve(model, budget=share, **HOW)
    return ckptplan.solve(model, least.budget_bytes / 2**30, **HOW)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long(but=["thawed"])
def test_a_step_that_differs_is_planned_for(kind: str) -> None:
    """By default for a plan that was solved in this process; later steps don't differ, and keep the budget."""
    step, budget = KINDS[kind]
    wanted = trained(prepared(kind), step)
    model = prepared(kind)
    plan = within(budget, kind)
    with warnings.catch_warnings(record=True) as said, ckptplan.apply(model, plan) as handle:
        warnings.simplefilter("always")
        assert_same(trained(model, step), wanted)
        texts = [str(w.message) for w in said]
        assert sum("planned again for" in text for text in texts) == len(handle.replans) == 1
        assert handle.replans[0].after.budget_bytes <= plan.budget_bytes
        counted = dict(handle.stats().differences)
        counted.pop("saved", None)  # thawed layers, and those in training mode, may save more
        assert counted == ({} if kind == "larger" else {kind: 1})
        counted = dict(handle.stats().differences)
        torch.manual_seed(4)
        model.zero_grad()
        held = unique_bytes([*held_tensors(model), X])
        assert held + peak_above_start(lambda: step(model, 3)) <= plan.budget_bytes
        assert handle.stats().differences == counted


class Reading(nn.Module):
    """Its second half runs on as many rows as a value says; its positions end with a table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second, self.places = blocks(), blocks(), nn.Embedding(rows, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x[: len(x) - int((x.abs().max() < 0).item())]
        return self.second(x + self.places(torch.arange(len(x))))


@pytest.mark.parametrize(
    ("step", "rows", "planned"), [(accumulating, 150, [128]), (growing, 160, [160]), (growing, 150, [136, 144])]
)
@pytest.mark.long("growing-150-planned2")
def test_a_model_that_reads_values_is_planned_for_again(step: Step, rows: int, planned: list[int]) -> None:
    """The step runs for real: on the inputs themselves where larger ones would read beyond a table."""
    wanted = trained(Reading(rows), step, 3)
    model = Reading(rows)
    plan = ckptplan.solve(model, budget="60%", **HOW)
    with warnings.catch_warnings(record=True) as said, ckptplan.apply(model, plan) as handle:
        warnings.simplefilter("always")
        assert_same(trained(model, step, 3), wanted)
    assert sum("planned again for" in str(w.message) for w in said) == len(planned)
    assert [replan.larger.now[0].shape[0] for replan in handle.replans] == planned


@contextlib.contextmanager
def bitwise(
    plan: Plan, step: Step, steps: int = 4, made: Callable[[], nn.Module] = blocks
) -> Iterator[ckptplan.Handle]:
    """Trained with the plan as without; what follows is still under it."""
    wanted = trained(made(), step, steps)
    model = made()
    with ckptplan.apply(model, plan) as handle:
        assert_same(trained(model, step, steps), wanted)
        yield handle


def updating(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(model: nn.Module, number: int) -> None:
        loss_of(model(X)).backward()
        optimizer.step()

    return step


@pytest.mark.long
def test_the_state_of_an_optimizer_that_was_not_given_is_planned_for() -> None:
    kind = torch.optim.AdamW
    model = blocks()
    wanted = trained(model, updating(model, kind(model.parameters(), lr=0.1)))
    model = blocks()
    plan = within("60%")
    optimizer = kind(model.parameters(), lr=0.1)
    with ckptplan.apply(model, plan) as handle:
        with pytest.warns(RuntimeWarning, match=rf"state of {kind.__name__} takes .*solve with optimizer="):  # noqa: SIM117
            with pytest.warns(RuntimeWarning, match=r"differ from the planned one \(state\); planned again"):
                assert_same(trained(model, updating(model, optimizer)), wanted)
        assert handle.stats().differences == {"state": 1}
        assert handle.plan.fingerprint.optimizer == kind.__name__
        assert handle.plan.budget_bytes <= plan.budget_bytes
        model.zero_grad()
        held = unique_bytes([*held_tensors(model), *optimizer_tensors(optimizer), X])
        assert held + peak_above_start(lambda: loss_of(model(X)).backward()) <= plan.budget_bytes


def test_a_first_forward_that_trains_nothing_is_not_planned_for() -> None:
    model = blocks().requires_grad_(False)
    with ckptplan.apply(model, budget="60%", loss_fn=loss_of, time_limit_s=0.2) as handle:
        model(X)
        with pytest.raises(InvalidInputError, match="no plan yet"):
            handle.plan  # noqa: B018
        loss_of(model.requires_grad_(True)(X)).backward()
        assert handle.plan.peak_bytes <= handle.plan.budget_bytes


def test_the_state_of_a_second_optimizer_is_warned_of() -> None:
    model = blocks()
    first, second = (torch.optim.AdamW(model[i:j].parameters()) for i, j in ((0, 2), (2, 4)))
    plan = ckptplan.solve(model, budget="10%", optimizer=first, **HOW)
    with ckptplan.apply(model, plan) as handle:
        loss_of(model(X)).backward()
        first.step()
        assert not handle.stats().differences  # the first of its class is the one that was given
        with pytest.warns(RuntimeWarning, match=r"state of AdamW takes .* smaller by the others'"):
            second.step()
        assert handle.stats().differences == {"states": 1}


@pytest.mark.long
def test_state_without_a_plan_that_has_room_for_it_is_warned_of() -> None:
    model = blocks()
    plan = within("0%")
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as said, ckptplan.apply(model, plan) as handle:
        warnings.simplefilter("always")
        trained(model, updating(model, optimizer))
        assert handle.stats().differences == {"state": 1, "no plan": 1}
        assert "the peak may exceed the budget: state of AdamW takes" in str(said[0].message)
        assert handle.plan is plan


@pytest.mark.filterwarnings("ignore:the peak may exceed", "ignore:.*planned again")
@pytest.mark.long
def test_casts_that_two_forwards_share_stay_while_plans_are_made() -> None:
    """A second forward under the same autocast follows the plan, whatever its batch."""

    def step(model: nn.Module, number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(X)) + loss_of(model(torch.cat([X, X])))
        loss.backward()

    plan = ckptplan.solve(blocks(), budget_gb=1, inputs=X, loss_fn=loss_of, amp="bfloat16", time_limit_s=0.2)
    with bitwise(plan, step) as handle:
        assert "stage" in handle.stats().differences


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)))


@pytest.mark.filterwarnings("ignore:the peak may exceed", "ignore:.*goes beyond the plan")
@pytest.mark.long
def test_a_graph_from_before_a_new_plan_runs_backward_with_the_buffers_that_it_saved() -> None:
    """Those of batch norm, which planning restores."""

    def step(model: nn.Module, number: int) -> None:
        (loss_of(model(X)) + loss_of(model(torch.cat([X, X])))).backward()

    with bitwise(ckptplan.solve(normed(), budget_gb=1, **HOW), step, made=normed) as handle:
        assert handle.replans


@pytest.mark.filterwarnings("ignore:the peak may exceed", "ignore:.*planned again")
@pytest.mark.long
def test_a_plan_without_gradients_from_before_serves_steps_with_them_if_there_is_no_other() -> None:
    """It is for larger batches than the plan with them that took its place, and for these none with them fits."""

    def step(model: nn.Module, number: int) -> None:
        for part in (X[:32], 2 * X[:32]) if number in (1, 2) else (X, 2 * X) if number else (X,):
            loss_of(model(part)).backward()

    plan = within("0%")
    with bitwise(plan, step, 5) as handle:
        assert (handle.plan, handle.returns, len(handle.replans)) == (plan, 1, 1)
        assert handle.stats().differences == {"gradients": 3, "no plan": 1}


@pytest.mark.long
def test_a_batch_without_a_plan_follows_the_former_one() -> None:
    def step(model: nn.Module, number: int) -> None:
        loss_of(model(torch.cat([X] * 6) if number in (1, 3) else X)).backward()

    plan = within("10%")
    with warnings.catch_warnings(record=True, action="always") as said, bitwise(plan, step) as handle:
        assert handle.plan == plan
        assert handle.stats().differences["no plan"] == 2
    texts = [str(w.message) for w in said]
    assert sum("smallest" in text and "the former plan stays applied" in text for text in texts) == 1


def test_options_of_a_solve_are_recalled_and_hold_no_model() -> None:
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"loss_fn": loss_of, "optimizer": optimizer, "actions": ("keep", "recompute")}
    plan = ckptplan.solve(model, 1.0, inputs=X, **options, menus=False, on_progress=[].append)
    assert recalled(plan) == options
    assert recalled(ckptplan.Plan.from_json(plan.to_json())) == options  # of an equal plan

    def remembered() -> weakref.ref[torch.Tensor]:
        y = X.clone()
        remember(plan, {"loss_fn": lambda output: (output - y).square().mean()})
        return weakref.ref(y)

    there = remembered()
    gc.collect()
    assert there() is None
    assert recalled(plan) is None


@pytest.mark.long
def test_a_share_is_of_what_each_plan_s_own_inputs_span(tmp_path: Path) -> None:
    model = blocks()
    ckptplan.solve(model, budget="30%", **HOW).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    with ckptplan.apply(model, plan, on_larger="replan", loss_fn=loss_of) as handle:
        with pytest.warns(RuntimeWarning, match="planned again for"):
            loss_of(model(torch.cat([X, X]))).backward()
        found = handle.plan
    wanted = ckptplan.solve(blocks(), budget="30%", inputs=torch.cat([X, X]), loss_fn=loss_of, time_limit_s=0.2)
    assert found.budget_share == plan.budget_share == 0.3
    assert found.budget_bytes == pytest.approx(wanted.budget_bytes, rel=0.05)
    assert found.budget_bytes > 1.3 * plan.budget_bytes


# ---------------------------------------------------------------- the first forward


@pytest.mark.long
def test_a_plan_is_made_on_the_first_training_forward() -> None:
    wanted = trained(blocks(), lambda model, _: loss_of(model(X)).backward())
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    handle = ckptplan.apply(model, budget_gb=7.6e-4, loss_fn=loss_of, optimizer=optimizer, time_limit_s=0.2)
    with torch.no_grad():
        model(X[:3])
    for ask in (lambda: handle.plan, lambda: handle.stats()):
        with pytest.raises(InvalidInputError, match="no plan yet"):
            ask()
    with handle.paused():
        model(X)
    assert (handle.replans, handle.returns) == ((), 0)
    assert_same(trained(model, lambda model, _: loss_of(model(X)).backward()), wanted)
    assert handle.plan.fingerprint.inputs == "[1]['input'] float32[128, 32]"
    stats = handle.stats()
    assert stats.forwards == 4
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss_of(model(torch.cat([X, X[:8]]))).backward()
    assert "planned again" in str(said[0].message)  # with the loss that was given
    handle.remove()
    assert not any("forward" in vars(m) for m in model.modules())
    with ckptplan.apply(model, budget_gb=1.0) as handle:  # removed before it has a plan
        assert "forward" in vars(model)
        with handle.unmetered():
            pass
    assert not any("forward" in vars(m) for m in model.modules())


def test_an_error_of_the_first_forward_leaves_the_model_as_it_was() -> None:
    model = blocks()
    with (
        ckptplan.apply(model, budget_gb=1e-6, loss_fn=loss_of),
        pytest.raises(ckptplan.InfeasibleBudgetError, match="smallest feasible peak"),
    ):
        model(X)
    assert not any("forward" in vars(m) for m in model.modules())


def test_bad_options_are_refused_at_once() -> None:
    model = blocks()
    for options, message in (
        ({"budget_gb": -1}, "must be finite and above 0"),
        ({"budget_gb": 1, "budget": "1 GiB"}, "both given"),
        ({"budgets": 1}, "did you mean 'budget'"),
        ({"inputs": X}, "leave out inputs="),
        ({"plan": ckptplan.solve(model, 1.0, **HOW, menus=False), "budget_gb": 1.0}, "a plan has its budget"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            ckptplan.apply(model, **options)
        assert "forward" not in vars(model)


@pytest.mark.long
def test_state_of_parameters_that_are_frozen_again_is_counted() -> None:
    """Layers are trained by turns. The plan for the first turn lacks the state that the second has made."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())

    def turn(number: int) -> None:
        for index, layer in enumerate(model.children()):
            layer.requires_grad_(index in ((0, 3), (1, 3))[number])

    turn(0)
    plan = ckptplan.solve(model, budget="60%", optimizer=torch.optim.AdamW, **HOW)
    made = []
    with warnings.catch_warnings(), ckptplan.apply(model, plan) as handle:
        warnings.simplefilter("ignore")
        for number in (0, 1, 1, 0, 0, 1, 1, 0, 0):
            turn(number)
            loss_of(model(X)).backward()
            optimizer.step()
            optimizer.zero_grad()
            made.append((len(handle.replans), handle.returns))
    # The first step of each turn shows that layers are thawed, and the second begins with a plan.
    assert made == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0), (2, 1), (2, 1), (2, 2)]
