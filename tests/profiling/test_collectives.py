"""The time of a sharded model's collectives on devices that aren't here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from device_examples import SIMPLE
from torch import nn
from toy_modules import Lambda, times

import ckptplan
from ckptplan.core.device import Device
from ckptplan.core.errors import InvalidInputError
from ckptplan.distributed.rates import Links, ring_s

RATE = 1e12
FAST = dataclasses.replace(SIMPLE, peer_bytes_per_s=RATE, machine_devices=4)
SLOW = dataclasses.replace(FAST, peer_bytes_per_s=1e3, network_bytes_per_s=1e2)


def net() -> nn.Module:
    """Four equal blocks of 257 * 64 + 64 * 257 + 257 + 64 numbers, and a head outside of them."""
    layers = times(4, lambda: nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.Linear(257, 64)))
    return Lambda(lambda self, x: self.head(added(self, x)), layers=layers, head=nn.Linear(64, 8))


def added(model: Any, x: torch.Tensor, *more: nn.Module) -> torch.Tensor:
    for layer in (*model.layers, *more):
        x = x + layer(x)
    return x


NUMBERS = 2 * 257 * 64 + 257 + 64


def profile(device: Device, fsdp: Any, **options: Any) -> ckptplan.Profile:
    torch.manual_seed(0)
    return ckptplan.profile(net().train(), torch.randn(512, 64), device=device, fsdp=fsdp, **options)


def stage_of(found: ckptplan.Profile, name: str) -> Any:
    return next(stage for stage in found.stages if stage.name == name)


def note(found: ckptplan.Profile) -> str:
    return next(note for note in found.notes if note.startswith("collectives"))


def test_a_ring_sends_all_but_its_own_part() -> None:
    assert ring_s(8e9, 4, FAST) == pytest.approx(8e9 * 3 / 4 / RATE)
    assert ring_s(8e9, 1, FAST) == 0
    assert ring_s(8e9, 1, Links(0.0)) == 0, "of a mesh with one device a side no rate is measured"
    assert ring_s(8e9, 8, SLOW) == pytest.approx(8e9 * 7 / 8 / 1e2), "over the network, which is slower"
    assert ring_s(8e9, 8, FAST) == pytest.approx(8e9 * 7 / 8 / RATE), "nothing is known of a network"


@pytest.mark.long
def test_compute_hides_collectives_that_are_shorter() -> None:
    plain, sharded = profile(SIMPLE, 2, menus=False), profile(FAST, 2, menus=False)
    assert "take no time here" in note(plain)
    assert "peer_bytes_per_s" in note(plain)
    assert note(sharded).endswith("all but 0 s")
    assert [dataclasses.replace(s) for s in sharded.stages] == [dataclasses.replace(s) for s in plain.stages]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.long
def test_longer_ones_are_what_the_step_waits_for(ranks: int) -> None:
    """By hand: per block a gather in forward, and a gather and a reduction of float32 in backward."""
    found = profile(SLOW, ckptplan.FSDP(ranks, param_dtype="bfloat16", reduce_dtype="float32"), menus=False)
    rate = 1e3 if ranks == 2 else 1e2
    padded = sum(-(-rows // ranks) * ranks * others for rows, others in ((257, 64), (257, 1), (64, 257), (64, 1)))
    gather_s, reduce_s = (padded * size * (ranks - 1) / ranks / rate for size in (2, 4))
    for k in range(4):
        stage = stage_of(found, f"layers.{k}")
        assert stage.forward_s == pytest.approx(gather_s)
        assert stage.backward_s == pytest.approx(gather_s + reduce_s)
        assert stage.find("recompute").recompute_s == 0, "backward waits longer than that anyway"
    # What is free is chosen before what isn't: the budget costs no time.
    plan = ckptplan.solve(found, budget="30%", time_limit_s=0.5, actions=("keep", "recompute"))
    assert any(choice.option == "recompute" for choice in plan.choices)
    assert plan.step_s == pytest.approx(plan.baseline_step_s)


@pytest.mark.long
def test_replicas_and_what_stays_whole() -> None:
    def backward_s(**settings: Any) -> float:
        found = profile(SLOW, ckptplan.FSDP(2, **settings), menus=False)
        return stage_of(found, "layers.0").backward_s

    one_s = NUMBERS * 4 / 2 / 1e3  # a gather or a reduction over two ranks
    assert backward_s() == pytest.approx(2 * one_s, rel=0.01)
    assert backward_s(reshard_after_forward=False) == pytest.approx(one_s, rel=0.01)
    # Each rank's half is all-reduced with its twin in the same machine,
    assert backward_s(replicas=2) == pytest.approx(2 * one_s + NUMBERS * 4 / 2 / 1e3, rel=0.01)
    # or with those of three others: the two ranks that are in a machine share its network.
    apart_s = 2 * 3 / 4 * NUMBERS * 4 / 2 * 2 / 1e2
    assert backward_s(replicas=4) == pytest.approx(2 * one_s + apart_s, rel=0.01)


def thrice() -> nn.Module:
    """Calls its first block three times, and has a matrix of its own that no stage reads."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return added(self, x, self.layers[0], self.layers[0]) @ self.own

    return Lambda(forward, **dict(net().named_children()), own=nn.Parameter(torch.ones(64, 64)))


@pytest.mark.long
def test_units_inside_a_stage_add_up_and_each_call_gathers() -> None:
    def seconds(model: nn.Module, units: tuple[str, ...]) -> tuple[dict[str, float], str]:
        fsdp = ckptplan.FSDP(2, units=units)
        found = ckptplan.profile(model.train(), torch.randn(512, 64), device=SLOW, fsdp=fsdp, menus=False)
        return {s.name.partition("#")[0]: s.forward_s for s in found.stages}, note(found)

    whole, _ = seconds(net(), ("Sequential",))
    parts, _ = seconds(net(), ("Linear",))
    once = NUMBERS * 4 / 2 / 1e3
    assert whole["layers.1"] == pytest.approx(once, rel=0.01)
    assert parts["layers.1"] == pytest.approx(once, rel=0.01)
    again, said = seconds(thrice(), ("Sequential",))
    assert again["layers.0"] == pytest.approx(once, rel=0.01), "each of its three calls gathers"
    own = 64 * 64 + 8 * 65  # gathered once, and reduced
    assert said.endswith(f"not counted are at most {2 * own * 4 / 2 / 1e3:.3g} s of units without a stage")


@pytest.mark.parametrize(
    "wrong", [{"peer_bytes_per_s": 0}, {"network_bytes_per_s": -1.0}, {"machine_devices": 0}, {"machine_devices": 2.5}]
)
def test_bad_rates_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        dataclasses.replace(SIMPLE, **wrong)
