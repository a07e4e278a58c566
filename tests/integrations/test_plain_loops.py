"""Adapters of PEFT, diffusion models, and loops of accelerate, with `solve` and `apply`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import UNet2DConditionModel
from measured_step import measured
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckptplan
from ckptplan.runtime.handle import Handle

# PEFT's use of a deprecated name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS = torch.arange(4 * 48).reshape(4, 48) % 96


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


ADAPTERS: dict[str, Callable[[], Any]] = {
    "dora": lambda: LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
}


def assert_sound(model: nn.Module, inputs: Any, loss_fn: Any = None, budget: str = "30%") -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plan = ckptplan.solve(model, budget=budget, inputs=inputs, loss_fn=loss_fn, optimizer=optimizer, time_limit_s=0.2)
    found = ckptplan.verify(model, plan, inputs, loss_fn, optimizer=optimizer, repeats=1)
    assert found.gradients_equal, found
    assert found.within_budget, found
    assert not found.other_paths
    assert found.stats.recomputed_stages + found.stats.swapped_out_bytes > 0


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.long("dora")
def test_adapters(name: str) -> None:
    model = get_peft_model(llama(), ADAPTERS[name]())
    assert_sound(model, {"input_ids": TOKENS, "labels": TOKENS})


def squared(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.sample.square().mean()
    return loss


@pytest.mark.long
def test_a_diffusion_unet() -> None:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32,), layers_per_block=1, cross_attention_dim=32, norm_num_groups=8,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
    ).train()  # fmt: skip
    inputs = {"sample": torch.randn(2, 4, 16, 16), "timestep": 7, "encoder_hidden_states": torch.randn(2, 8, 32)}
    assert_sound(model, inputs, squared)


def accelerated(**options: Any) -> tuple[list[float], nn.Module, list[int], Handle | None]:
    """Losses, model and peaks of a loop of six batches, two for each update; with options of a plan its handle."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(6, 1)]
    made = llama()
    model, optimizer, loader = accelerator.prepare(
        made, torch.optim.AdamW(made.parameters()), torch.utils.data.DataLoader(rows, batch_size=4)
    )
    handle = None
    if options:
        inputs = next(iter(loader))
        plan = ckptplan.solve(model, inputs=inputs, optimizer=optimizer.optimizer, accumulate=True, **options)
        handle = ckptplan.apply(model, plan)

    def step(batch: Any) -> float:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    found = [measured(functools.partial(step, batch), model, [optimizer.optimizer], batch) for batch in loader]
    if handle is not None:
        handle.remove()
    return [loss for loss, _ in found], accelerator.unwrap_model(model), [peak for _, peak in found], handle


@pytest.mark.long
def test_a_loop_of_accelerate() -> None:
    theirs, plain, plain_peaks, _ = accelerated()
    ours, model, peaks, handle = accelerated(budget="30%", time_limit_s=0.2)
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert handle is not None
    assert max(peaks) <= handle.plan.budget_bytes < max(plain_peaks)
    stats = handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
