"""Published formulas of training memory, from the estimator alone: nothing here is measured, and nothing is tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import plan_of
from torch import Tensor, nn
from toy_modules import InTurn, times

import ckptplan
from ckptplan import DDP, Estimate

DEVICE = "a100-80gb"
DEPTH = 2


class _Layer(nn.Module):
    """A layer of GPT as the formula's authors count it: dropout behind attention's softmax, projection and MLP."""

    def __init__(self, h: int, a: int, *, flash: bool) -> None:
        super().__init__()
        self.a, self.flash = a, flash
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.a, -1).permute(2, 0, 3, 1, 4)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        else:
            y = self.drop(torch.softmax(q @ k.transpose(-1, -2) * (h // self.a) ** -0.5, -1)) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def _gpt(h: int, a: int, *, flash: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        layers = times(DEPTH, lambda: _Layer(h, a, flash=flash))
        head = nn.Linear(h, 512, bias=False)
        made = InTurn(embedding=nn.Embedding(512, h), layers=layers, norm=nn.LayerNorm(h), head=head)
    return made.to(dtype).train()


def _tokens(s: int, b: int) -> tuple[Tensor]:
    return (torch.zeros(b, s, dtype=torch.long),)


def _layer_bytes(found: Estimate) -> int:
    """What a layer saves; all layers save the same."""
    (saved,) = {found.saved_bytes[f"layers.{i}"] for i in range(DEPTH)}
    return saved


SHAPES = [(1024, 4, 1024, 16), (512, 8, 768, 12)]
RANDOM_STATE_BYTES = 64
"""At most: what a kernel with dropout keeps of the generator's state, a few integers."""


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_transformer_layer_without_flash_attention_saves_s_b_h_34_plus_5_a_s_over_h(
    s: int, b: int, h: int, a: int
) -> None:
    # Korthikanti et al. (2022), equation 2. In 16 bit: 11 s b h for attention (its input 2, q k v 6, the projection's
    # input 2, a mask 1), 19 for the MLP (inputs 2 and 8, GELU's 8, a mask 1), 4 for the norms' inputs; 5 a s s b for
    # softmax's output 2, dropout's mask 1 (a byte an element on CUDA) and output 2.
    found = _layer_bytes(ckptplan.estimate(_gpt(h, a, flash=False), _tokens(s, b), device=DEVICE))
    formula = s * b * h * (34 + 5 * a * s / h)
    assert found == pytest.approx(formula, rel=0.05)
    # The formula leaves out the norms' mean and reciprocal deviation: two of each, in float32, for every token.
    assert found == formula + 2 * 2 * 4 * s * b


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_transformer_layer_with_flash_attention_saves_34_s_b_h(s: int, b: int, h: int, a: int) -> None:
    # Section 5 of the same: what grows with s * s is not saved. Flash attention's output is the projection's input.
    found = _layer_bytes(ckptplan.estimate(_gpt(h, a, flash=True), _tokens(s, b), device=DEVICE))
    assert found == pytest.approx(34 * s * b * h, rel=0.05)
    # Beside the norms' figures, flash attention saves the logarithm of softmax's sum: float32, per head and token.
    beyond = found - (34 * s * b * h + 2 * 2 * 4 * s * b + 4 * a * s * b)
    assert 0 <= beyond <= RANDOM_STATE_BYTES


@pytest.mark.parametrize(("s", "b", "h", "a"), SHAPES)
def test_under_autocast_a_layer_saves_more(s: int, b: int, h: int, a: int) -> None:
    # Float32 weights under autocast. The residual stream stays in float32, so the norms' inputs take 4 instead of 2,
    # which makes 38. Softmax runs in float32: its output 4, the mask 1, and what the next product reads 2. Weights are
    # saved as cast for the product, 2 bytes for each of the 12 h h elements of all four; cast biases aren't.
    found = ckptplan.estimate(
        _gpt(h, a, flash=False, dtype=torch.float32), _tokens(s, b), device=DEVICE, amp=torch.bfloat16
    )
    assert _layer_bytes(found) == s * b * h * 38 + 7 * a * s * s * b + 2 * 2 * 4 * s * b + 2 * 12 * h * h


@pytest.mark.parametrize(("s", "b", "h", "a", "flash"), [(*SHAPES[1], False), (256, 2, 512, 8, True)])
@pytest.mark.long
def test_full_recompute_holds_2_s_b_h(s: int, b: int, h: int, a: int, flash: bool) -> None:
    # Section 5: a layer's input in 16 bit is all that is left, exactly.
    model, inputs = _gpt(h, a, flash=flash), _tokens(s, b)
    measured = ckptplan.profile(model, inputs, device=DEVICE, menus=False)
    plan = plan_of(measured, ["recompute"] * len(measured.stages))
    assert sum(choice.action == "recompute" for choice in plan.choices) >= DEPTH
    assert _layer_bytes(ckptplan.estimate(model, inputs, device=DEVICE, plan=plan)) == 2 * s * b * h


# --- weights, gradients, states ---

WIDTH = 256  # so that no block is rounded up


def _linears(depth: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _estimate(model: nn.Module, **settings: Any) -> Estimate:
    return ckptplan.estimate(model, torch.zeros(8, WIDTH, device="meta"), device=DEVICE, **settings)


def _adamw(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **settings)


def test_a_multi_tensor_update_makes_temporaries_as_large_as_the_parameters() -> None:
    model = _linears()
    n, largest = _parameters(model), WIDTH * WIDTH

    def temporary(optimizer: Any) -> int:
        phase = _estimate(model, optimizer=optimizer, set_to_none=False).phase("optimizer 2")
        return phase.peak_bytes - phase.end_bytes

    assert temporary("momentum") == 0
    assert temporary("adam") == temporary(_adamw(foreach=True)) == 4 * n
    assert temporary(_adamw(fused=True)) == 0
    # One parameter at a time: the denominator's root and its quotient, and the one of the parameter before, which the
    # loop's variable still names.
    assert temporary(_adamw(foreach=False)) == 3 * 4 * largest


def test_a_fused_update_counts_its_steps_on_the_device() -> None:
    model = _linears()
    held = _estimate(model, optimizer=_adamw(fused=True)).phase("optimizer 2").categories
    assert held["optimizer state"] == 8 * _parameters(model) + 4 * len(list(model.parameters()))


# --- copies ---


def test_ddp_holds_one_more_copy_of_the_gradients_unless_they_are_views_of_its_buckets() -> None:
    model = _linears()
    copy = 4 * _parameters(model)
    plain, buckets, views = (
        _estimate(model, optimizer="adam", set_to_none=False, ddp=ddp)
        for ddp in (False, True, DDP(gradient_as_bucket_view=True))
    )
    for name in ("loaded", "forward", "backward", "optimizer", "forward 2", "backward 2", "optimizer 2"):
        assert buckets.phase(name).end_bytes == plain.phase(name).end_bytes + copy, name
    # As views, the gradients are there from the start, and there is no other copy of them once there are any.
    assert views.phase("loaded").end_bytes == plain.phase("loaded").end_bytes + copy
    for name in ("backward", "optimizer", "forward 2", "backward 2", "optimizer 2"):
        assert views.phase(name).end_bytes == plain.phase(name).end_bytes, name


def test_a_checkpoint_loaded_onto_the_device_and_still_referenced_counts_twice() -> None:
    model = _linears()
    plain, twice = (_estimate(model, optimizer="adam", checkpoint_on_device=value) for value in (False, True))
    assert twice.phase("loaded").categories["weights"] == 2 * 4 * _parameters(model)
    for before, after in zip(plain.phases, twice.phases, strict=True):
        assert after.peak_bytes == before.peak_bytes + 4 * _parameters(model), before.name
