"""Graphs that forward drops: detached stages, teachers, unused outputs. Peaks are measured, gradients are bitwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import assert_kept, scheduled
from torch import nn
from toy_modules import Residual, times

import ckptplan
from ckptplan.baselines.everywhere import recompute_all
from ckptplan.core.option import DISCARD, Action
from ckptplan.core.request import Limits
from ckptplan.solving.planner import smallest_peak

WIDTH, ROWS = 32, 96


def block() -> Residual:
    return Residual(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Linear(4 * WIDTH, WIDTH))


class Parts(nn.Module):
    """Two stacks of blocks and a layer in front of both; the subclasses say which graphs forward drops, and when."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.side, self.main = (nn.Sequential(*times(self.depth, block)) for _ in range(2))


class Detached(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main(self.side(x).detach())


class Held(Parts):
    """A variable has the graph until forward ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.side(x)
        return self.main(features.detach())


class Midway(Parts):
    """A variable has the graph until the second block after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: Any = self.side(x)
        x = features.detach()
        for i, block in enumerate(self.main):
            x = block(x)
            features = features if i < 1 else None
        return x


class TeacherFirst(Parts):
    """Both read the same input, and the teacher's graph is there until the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        wanted = self.side(x)
        return F.mse_loss(self.main(x), wanted.detach())


class TeacherLast(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return F.mse_loss(self.main(x), self.side(x).detach())


class Siamese(Parts):
    """Two views through the same blocks, each of which is the other's constant target."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.side(x), self.side(x.flip(0))
        return F.mse_loss(self.main(a), b.detach()) + F.mse_loss(self.main(b), a.detach())


class TwoOutputs(Residual):
    """Its second output saves 4 times the bytes of the first."""

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x, self[0](x).exp().exp()


class Unused(Parts):
    """The second outputs are dropped when the next ones come."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(*(TwoOutputs(*block()) for _ in range(self.depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.main:
            x, _more = block(x)
        return x


KINDS = (Detached, Held, Midway, TeacherFirst, Siamese, Unused)
OF_A_STEP = (Held, TeacherLast)
ACTIONS: tuple[tuple[Action, ...], ...] = (("keep", "swap", "recompute"), ("keep", "recompute"))


def loss_of(output: Any) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return first.pow(2).mean()


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randn(ROWS, WIDTH)


def profiled(kind: Callable[[], nn.Module], *, menus: bool = False) -> tuple[nn.Module, torch.Tensor, ckptplan.Profile]:
    model, x = made(kind)
    return model, x, ckptplan.profile(model, x, loss_fn=loss_of, menus=menus)


def least(profile: ckptplan.Profile, actions: tuple[Action, ...] = ACTIONS[0]) -> ckptplan.Plan:
    peak = smallest_peak(profile, Limits(actions=actions, time_limit_s=0.1))
    return ckptplan.solve(profile, peak.peak_bytes / 2**30, actions=actions, time_limit_s=0.1)


@pytest.mark.parametrize(
    ("kind", "of_a_step"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in OF_A_STEP)]
)
@pytest.mark.long("Siamese-False")
def test_plans_keep_their_budgets(kind: Callable[[], nn.Module], of_a_step: bool) -> None:
    model, x = made(kind)
    run: dict[str, Any] = {"step": lambda: loss_of(model(x))} if of_a_step else {"inputs": x, "loss_fn": loss_of}
    profile = ckptplan.profile(model, **run)
    plans = [least(profile, actions) for actions in ACTIONS]
    plans.append(ckptplan.solve(profile, budget="100%", time_limit_s=0.1))
    last = next((s.name for s in reversed(profile.stages) if s.find(DISCARD)), "")
    plans.append(scheduled(profile, [s.option(DISCARD) if s.name == last else s.keep for s in profile.stages]))
    for plan in plans:
        report = assert_kept(model, plan, **run)
        assert not report.stats.differences
    if kind is Detached:  # all that is held is known
        assert not any("unseen" in storage.name for storage in profile.storages)
    if kind in (Detached, Held):  # at most the random state that a sweep of the stage would keep is beyond that
        assert 0 <= plans[-2].peak_bytes - report.plain_peak_bytes <= torch.get_rng_state().nbytes


def test_a_dropped_graph_costs_no_backward_and_can_be_discarded() -> None:
    model, x, profile = profiled(Detached)
    side = [stage for stage in profile.stages if stage.name.startswith("side")]
    assert all([option.name for option in stage.options] == ["keep", DISCARD] for stage in side)
    assert all(stage.backward_s == 0 == stage.option(DISCARD).recompute_s for stage in side)
    assert all(stage.option("recompute").recompute_s > 0 < stage.backward_s for stage in profile.stages[-3:-1])
    steps = {name: scheduled(profile, [s.find(name) or s.keep for s in profile.stages]) for name in ("keep", DISCARD)}
    for name, plan in steps.items():
        timeline = ckptplan.simulate(profile, plan)
        assert timeline.runs == (1,) * len(profile.stages)
        report = ckptplan.verify(model, plan, x, loss_fn=loss_of, repeats=1)
        assert (report.measured_peak_bytes, report.gradients_equal) == (plan.peak_bytes, True), name
    # Nothing of it is there in backward.
    last = len(profile.stages)
    backward = [[step.start_bytes for step in ckptplan.simulate(profile, p).steps[last:]] for p in steps.values()]
    assert backward[0] == backward[1]
    smallest = least(profile)
    assert DISCARD in {choice.option for choice in smallest.choices}
    assert smallest.peak_bytes <= recompute_all(profile, profile.resident_bytes * 100).peak_bytes


class Changing(Parts):
    """Detached or not, as it is told."""

    detaches = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.side(self.first(x))
        return self.main(x.detach() if self.detaches else x)


@pytest.mark.parametrize("planned", [True, False])
def test_what_is_detached_may_change_while_training(planned: bool) -> None:
    """A discarded stage runs again if its graph is read after all; what a plan holds for backward ends with a graph."""

    model, x = made(Changing)
    assert isinstance(model, Changing)

    def gradients(plan: ckptplan.Plan | None = None) -> list[torch.Tensor | None]:
        """Those of the second of three steps, the one that differs from the planned step."""
        found = []
        with ckptplan.apply(model, plan, check="always", on_larger="follow") if plan else nullcontext() as handle:
            for step in range(3):
                torch.manual_seed(step)
                model.detaches = (step == 1) != planned
                model.zero_grad()
                loss_of(model(x)).backward()
                found.append([p.grad for p in model.parameters()])
            if handle is not None:
                discarded = sum(choice.option == DISCARD for choice in plan.choices) if plan else 0
                assert handle.stats().differences.keys() <= {"attached"}
                assert handle.stats().differences.get("attached", 0) >= discarded
        return found[1]

    model.detaches = planned
    profile = ckptplan.profile(model, x, loss_fn=loss_of, menus=False)
    every = [[s.find(name) or s.find(DISCARD) or s.keep for s in profile.stages] for name in ("recompute", "swap")]
    expected = gradients()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert bool(without) == planned  # in the last step
    for plan in (least(profile), least(profile, ("keep", "recompute")), *(scheduled(profile, each) for each in every)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = gradients(plan)
        texts = " ".join(str(each.message) for each in told)
        assert (
            not any(c.option == DISCARD for c in plan.choices)
            or "dropped in forward when" in texts
            or "wasn't" in texts
        )
        for mine, wanted in zip(found, expected, strict=True):
            assert mine is wanted is None or torch.equal(mine, wanted)  # type: ignore[arg-type]
