"""Plans for `torch.utils.checkpoint`: the gradients of a plain step, and no more bytes than the plan's."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from measured_step import measured
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile

RECOMPUTE: dict[str, Any] = {"actions": ("keep", "recompute"), "segments": False}


class Block(nn.Module):
    """Attention with dropout, a gated product, a view and a cast between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x).double().float())


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(4, 24, 32)


def loss_of(model: nn.Module, x: torch.Tensor, amp: torch.dtype | None) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp is not None):
        loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss


def step(model: nn.Module, x: torch.Tensor, amp: torch.dtype | None) -> list[torch.Tensor]:
    loss = loss_of(model, x, amp)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def checkpointed(model: nn.Module, plan: ckptplan.Plan) -> nn.Module:
    for name, context_fn in plan.to_context_fn().items():
        module: Any = model.get_submodule(name)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, context_fn=context_fn)
    return model


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.long(but=["-1-None"])
def test_the_gradients_and_the_bytes_are_those_of_the_plan(which: int, amp: torch.dtype | None) -> None:
    model, x = made()
    profile = ckptplan.profile(model, x, amp=amp)
    plan = recomputing(profile, which)
    plain, again = copy.deepcopy(model), checkpointed(copy.deepcopy(model), plan)
    expected = step(plain, x, amp)
    for _ in range(2):
        again.zero_grad()
        assert all(map(torch.equal, expected, step(again, x, amp)))
    again.zero_grad()
    _, peak = measured(lambda: loss_of(again, x, amp), again, [], x)
    assert any(choice.ops for choice in plan.choices) == (which != 0)
    assert peak <= 1.01 * ckptplan.simulate(profile, plan.choices).peak_bytes


def recomputing(profile: ckptplan.Profile, which: int) -> ckptplan.Plan:
    """Every block but the third has an option that saves no, the fewest, or the most operations' outputs."""
    choices = []
    for i, stage in enumerate(profile.stages):
        found = sorted((o for o in stage.options if o.recomputes and not o.moves), key=lambda o: len(o.ops))
        skipped = stage.is_glue or i == 2
        choices.append(
            Decision("keep") if skipped else Decision("recompute", option=found[which].name, ops=found[which].ops)
        )
    return replace(ckptplan.solve(profile, budget="100%", time_limit_s=0.1), choices=tuple(choices))


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_regions_have_the_gradients_and_the_bytes_of_the_plan(amp: torch.dtype | None) -> None:
    pytest.importorskip("torch_remat")
    model, x = made()
    profile = ckptplan.profile(model, x, amp=amp)
    plan = ckptplan.solve(profile, budget="40%", menus=False, time_limit_s=1.0, **RECOMPUTE)
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    found = plan.save_regions()
    assert 0 < len(found) < len(model)
    for name, wrapped in found.items():
        module: Any = again.get_submodule(name)
        module.forward = wrapped(module.forward)
    expected = step(plain, x, amp)
    for _ in range(2):
        again.zero_grad()
        assert all(map(torch.equal, expected, step(again, x, amp)))
        assert torch.equal(torch.get_rng_state(), drawn(plain, x, amp))
    again.zero_grad()
    _, peak = measured(lambda: loss_of(again, x, amp), again, [], x)
    assert peak <= 1.01 * plan.peak_bytes, (peak, plan.peak_bytes)


def drawn(model: nn.Module, x: torch.Tensor, amp: torch.dtype | None) -> torch.Tensor:
    """The state of PyTorch's generator behind a step."""
    loss_of(model, x, amp)
    return torch.get_rng_state()


@pytest.mark.long
def test_what_checkpointing_cannot_do_is_refused_by_name() -> None:
    model, x = made()
    swapping = ckptplan.solve(model, inputs=x, budget="30%", time_limit_s=0.5, actions=("keep", "swap"))
    with pytest.raises(InvalidInputError, match=r"stage '\d' moves storages, which torch.utils.checkpoint can't do"):
        swapping.to_context_fn()
    small = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
    together = ckptplan.solve(small, inputs=torch.randn(512, 16), budget="0%", actions=("keep", "recompute"))
    assert together.segments
    with pytest.raises(InvalidInputError, match=r"are recomputed together, .* solve with segments=False"):
        together.to_context_fn()
    compiled = replace(together, segments=(), fingerprint=replace(together.fingerprint, compiled=("0",)))
    with pytest.raises(InvalidInputError, match=r"layers are compiled for the plan, .* solve with compile=False"):
        compiled.to_context_fn()


def test_what_torch_remat_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_remat", None)
        with pytest.raises(InvalidInputError, match=r"needs torch_remat: pip install torch_remat"):
            ckptplan.solve(Profile.from_chain([1.0], [2.0], [8], [8], input_bytes=8), budget="100%").save_regions()
    pytest.importorskip("torch_remat")
    model, x = made()
    with pytest.raises(InvalidInputError, match=r"outputs without their inputs, .* solve with menus=False"):
        recomputing(ckptplan.profile(model, x), which=1).save_regions()


@pytest.mark.long
def test_a_module_whose_calls_differ_is_refused() -> None:
    layer = Block()
    model, x = nn.Sequential(layer, Block(), layer, Block(), layer), torch.randn(4, 24, 32)
    plans = [
        ckptplan.solve(model, inputs=x, budget=f"{share}%", time_limit_s=0.5, **RECOMPUTE) for share in (5, 30, 60)
    ]
    refused = 0
    for plan in plans:
        try:
            found = plan.to_context_fn()
        except InvalidInputError as error:
            assert "the calls of module '0' have different decisions" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert all(model.get_submodule(name) is not None for name in found)
    assert refused
