"""Which parameters and buffers may leave within a step, and who uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x[:WIDTH].detach(), 0.1)
        return torch.tanh(self.linear(x) @ self.table)


class Model(nn.Module):
    """Layers of which one is frozen, the last two are tied, and the first is read by the model's own code as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.layers[3].linear.weight = self.layers[2].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.layers[0].linear.weight


@pytest.fixture(scope="module")
def measured() -> Profile:
    return ckptplan.profile(Model(), torch.randn(16 * WIDTH, WIDTH), menus=False)


def test_what_may_leave(measured: Profile) -> None:
    """Not what forward writes to (`mean`), what glue reads (the first layer's weight), and what is small (biases)."""
    stages = [stage.name for stage in measured.stages]
    found = {r.names: ([stages[i] for i in r.users], r.trained) for r in measured.residents}
    assert found == {
        ("layers.1.linear.weight",): (["layers.1"], False),
        ("layers.2.linear.weight", "layers.3.linear.weight"): (["layers.2", "layers.3"], True),
        **{(f"layers.{i}.table",): ([f"layers.{i}"], False) for i in range(4)},
    }


def test_bytes_with_everything_kept_are_the_same(measured: Profile) -> None:
    keep = [ckptplan.Decision("keep")] * len(measured.stages)
    both = measured.offloading(("activations", "weights"))
    plain, found = (ckptplan.simulate(profile, keep) for profile in (measured, both))
    assert [step.peak_bytes for step in plain.steps] == [step.peak_bytes for step in found.steps]


def test_only_what_is_asked_for_moves(measured: Profile) -> None:
    for offload, moves in ((("activations",), "a"), (("weights",), "w"), (("activations", "weights"), "aw")):
        profile = measured.offloading(offload)  # type: ignore[arg-type]
        end = profile.first_moving
        kinds = {"a" if s < end else "w" for stage in profile.stages for o in stage.options for s in o.moved}
        assert kinds == set(moves)
        assert Profile.from_json(profile.to_json()) == profile
    with pytest.raises(InvalidInputError, match="take the one that"):
        measured.offloading(("weights",)).offloading(("activations", "weights"))


def test_a_profile_without_any_says_so() -> None:
    chain = Profile.from_chain([1, 1], [1, 1], [1, 1], [2, 2], input_bytes=1)
    assert "no weights to move" in chain.offloading(("weights",)).notes[0]
    assert not chain.offloading(("activations",)).notes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "weight"}, "unknown kind 'weight'"),
        ({"offload": ()}, "nothing may move"),
        ({"offload": 3}, "unknown kind 3"),
        ({"offload": "weights", "actions": ("keep", "recompute")}, "without 'swap'"),
    ],
)
def test_bad_offload(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Limits.of(options)


@pytest.mark.long
def test_a_plan_knows_what_it_moves(measured: Profile) -> None:
    least = {}
    for offload in ("activations", "all"):
        with pytest.raises(ckptplan.InfeasibleBudgetError) as error:
            ckptplan.solve(measured, 1e-9, offload=offload, time_limit_s=2)
        least[offload] = error.value.min_peak_bytes
        assert ("with offload='all' it is" in str(error.value)) == (offload == "activations")
    assert least["all"] < least["activations"]
    plan = ckptplan.solve(measured, least["all"] / 2**30, offload="all", time_limit_s=2)
    assert ckptplan.Plan.from_json(plan.to_json()) == plan
    assert plan.decided.weights
    assert "activations and weights" in plan.space
    assert ckptplan.simulate(measured, plan).peak_bytes == plan.peak_bytes
    assert ckptplan.validate(measured, plan, plan.budget_bytes) == ()
    assert str(ckptplan.explain(measured, plan, offload="all", time_limit_s=1))
