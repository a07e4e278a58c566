"""What an estimate takes from a step as the loop has it: its checkpoints, caches, profiler's ranges, and no loss."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equal_layers import Layers
from measured_phases import measure_phases
from torch import nn

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.request import Training
from ckptplan.state.generators import reseed
from ckptplan.training.step import make_step

transformers = pytest.importorskip("transformers")


def layers(run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda layer, x: layer(x)) -> Layers:
    """Three layers, which `run` calls."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda x, layer: run(layer, x), model.layers, x)

    torch.manual_seed(0)
    return Layers(forward, depth=3, width=64)


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    ids = torch.zeros(2, 16, dtype=torch.long)
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def assert_measured(model: nn.Module, inputs: Any) -> ckptplan.Estimate:
    found = ckptplan.estimate(model, inputs)
    for real in measure_phases(make_step(model, Training(inputs)), steps=1).phases[1:3]:
        # Numbers become tensors of 8 bytes that no replay sees.
        assert abs(found.phase(real.name).peak_bytes - real.peak_bytes) <= 8 * 64
    return found


@pytest.mark.parametrize("how", [None, {"use_reentrant": True}])
def test_a_model_that_checkpoints_by_itself(how: dict[str, bool] | None) -> None:
    model, inputs = gpt2()
    current = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing" if current else "gradient_checkpointing"
    getattr(model, f"{name}_enable")(*[how] * (how is not None))
    assert_measured(model, inputs)
    with pytest.raises(UnsupportedModelError, match=rf"call model.{name}_disable\(\)"):
        ckptplan.solve(model, budget_gb=1, inputs=inputs)


def test_the_remedy_is_one_that_the_model_has() -> None:
    model = layers()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="set its gradient_checkpointing to False"):
        ckptplan.solve(model, budget_gb=1, inputs=torch.randn(32, 64))


@pytest.mark.long
def test_the_cache_is_as_the_loop_has_it() -> None:
    model, inputs = gpt2()
    cached = assert_measured(model, inputs)
    assert any(note.startswith("use_cache is as in the model's configuration") for note in cached.notes)
    plan = ckptplan.solve(model, budget_gb=1, inputs=inputs)
    found = ckptplan.estimate(model, inputs, plan=plan)
    assert any(note.startswith("use_cache is off, as the plan turns it off") for note in found.notes)
    assert model.config.use_cache  # type: ignore[union-attr]
    model.config.use_cache = False  # type: ignore[union-attr]
    assert not any("use_cache" in note for note in assert_measured(model, inputs).notes)


def test_ranges_for_the_profiler_do_nothing() -> None:
    def marked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.nvtx.range_push("layer")
        torch.cuda.nvtx.mark("begun")
        with torch.cuda.nvtx.range("inner"):
            x = layer(x)
        torch.cuda.nvtx.range_pop()
        return x

    before = torch.cuda.nvtx._nvtx
    x = torch.randn(32, 64)
    plain = ckptplan.estimate(layers(), x, device="h100")
    assert ckptplan.estimate(layers(marked), x, device="h100").phases == plain.phases
    ckptplan.solve(layers(marked), budget_gb=1, inputs=x, device="h100")
    assert torch.cuda.nvtx._nvtx is before


def test_inference_has_no_loss() -> None:
    model, x = layers(), torch.randn(32, 64)
    calls: list[bool] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return (output.exp() * output.exp()).sum()

    found = ckptplan.estimate(model, x, loss_fn=loss)
    assert found.phase("inference").peak_bytes == ckptplan.estimate(model, x).phase("inference").peak_bytes
    output = x.nbytes
    assert found.phase("inference").end_bytes == found.phase("loaded").end_bytes + x.nbytes
    assert found.phase("inference").peak_bytes == found.phase("loaded").end_bytes + x.nbytes + 3 * output


DRAWS: dict[str, Any] = {"torch": lambda: torch.rand(()).item() < 0.5, "python": lambda: random.random() < 0.5}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_branch_on_a_drawn_number_is_an_estimate_of_both(draw: str) -> None:
    def branches(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        return x.exp() * x.sin() + x.cos() if DRAWS[draw]() else x

    x = torch.randn(32, 64)
    reseed((), 0)
    found = ckptplan.estimate(layers(branches), x)
    states = torch.get_rng_state(), random.getstate()
    (note,) = (note for note in found.notes if "draws may decide what runs" in note)
    low, high = (float(part) * 2**20 for part in re.findall(r"[\d.]+(?= to| MiB)", note))
    never = ckptplan.estimate(layers(), x).peak_bytes
    always = ckptplan.estimate(layers(lambda layer, x: (y := layer(x)).exp() * y.sin() + y.cos()), x).peak_bytes
    shown = 2**13  # the note's figures have two digits of MiB
    assert never - shown <= low < high <= always + shown
    assert high == pytest.approx(found.peak_bytes, abs=shown)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_drawn_tensors_decide_nothing() -> None:
    found = ckptplan.estimate(layers(lambda layer, x: nn.functional.dropout(layer(x))), torch.randn(32, 64))
    assert not found.notes
