"""The promises, on real architectures: peak within the budget, prediction, bitwise gradients, makespan over budget."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.request import Limits
from ckptplan.core.schedule import residency
from ckptplan.solving import smallest_peak

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def ids(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def images(batch: int, side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.zeros(batch, dtype=torch.long)}


def gpt2(layers: int = 2) -> Made:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=128, n_head=4, vocab_size=500, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), ids(4, 128, 500)


def resnet() -> Made:
    config = transformers.ResNetConfig(embedding_size=32, hidden_sizes=[128, 256, 512, 1024], depths=[1, 1, 1, 1])
    return transformers.ResNetForImageClassification(config), images(4, 64)


def llama(layers: int = 2) -> Made:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=344,
        vocab_size=500, attention_dropout=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ids(4, 128, 500)


@pytest.mark.parametrize("make", [resnet, llama])
@pytest.mark.long("resnet")
def test_the_promises_hold(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    # As if times were exact: otherwise a plan may be given up for one that is slower by less than their error.
    profile = replace(ckptplan.profile(model, inputs), step_error=0.0)
    least = smallest_peak(profile, Limits(actions=("keep", "swap", "recompute")))
    assert 0 < least.bound_bytes <= least.peak_bytes
    r = residency(profile, [stage.keep for stage in profile.stages])
    most = max(*r.forward_bytes, *r.backward_bytes, profile.update_peak_bytes)
    assert least.peak_bytes < most
    steps_s = []
    for share in (0.0, 0.5):
        budget_bytes = least.peak_bytes + int(share * (most - least.peak_bytes))
        # It ends by its gap, in some seconds, and later on a busy machine.
        plan = ckptplan.solve(profile, budget_bytes / 2**30, time_limit_s=60)
        assert ckptplan.validate(profile, plan, budget_bytes) == ()
        # Where memory is tightest, stages have too many storages for all transfers to be tried, and a gap is left: it
        # was 3.2 % on a machine with slow copies. 5 % is promised there (experiments/certificate.py). On a busy machine
        # the search ended at 2.1 % for half of the way.
        assert plan.gap <= (0.03 if share else 0.05)
        assert any(choice.action != "keep" for choice in plan.choices)
        report = ckptplan.verify(model, plan, inputs, repeats=1)
        assert report.gradients_equal, report.differing
        assert report.other_paths == 0
        assert report.measured_peak_bytes <= budget_bytes
        # 2 % is promised; never under.
        assert report.measured_peak_bytes <= report.predicted_peak_bytes <= 1.02 * report.measured_peak_bytes
        assert report.stats.recomputed_stages == report.stats.planned_recomputed_stages
        assert report.stats.swapped_in_bytes == report.stats.swapped_out_bytes == plan.host_bytes
        for name, baseline in BASELINES.items():
            rule = _or_none(baseline, profile, budget_bytes)
            assert rule is None or plan.step_s <= rule.step_s * (1 + 1e-9), name
        steps_s.append(plan.step_s)
    assert steps_s == sorted(steps_s, reverse=True), "the makespan never rises with the budget"


def features() -> tuple[Made, Callable[[Any], torch.Tensor]]:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=256, vocab_size=500,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {**ids(4, 48, 500), "output_hidden_states": True, "output_attentions": True}
    del inputs["labels"]

    def loss(out: Any) -> torch.Tensor:
        return sum(t.square().mean() for t in (*out.hidden_states, *out.attentions))  # type: ignore[return-value]

    return (transformers.BertModel(config), inputs), loss


def routers() -> tuple[Made, None]:
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=200, num_local_experts=4, output_router_logits=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return (transformers.MixtralForCausalLM(config), ids(4, 48, 200)), None


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("make", [features, routers])
@pytest.mark.long
def test_what_hooks_collect_inside_of_stages(make: Callable[[], tuple[Made, Any]]) -> None:
    torch.manual_seed(0)
    (model, inputs), loss_fn = make()
    model.train()
    profile = ckptplan.profile(model, inputs, loss_fn=loss_fn)
    for actions in (("keep", "swap"), ("keep", "recompute")):
        budget_bytes = smallest_peak(profile, Limits(actions=actions)).peak_bytes
        plan = ckptplan.solve(profile, budget_bytes / 2**30, actions=actions)
        report = ckptplan.verify(model, plan, inputs, loss_fn=loss_fn, repeats=1)
        assert report.gradients_equal, report.differing
        assert report.other_paths == 0
        assert report.measured_peak_bytes <= budget_bytes


def bart(encoders: int, decoders: int, **options: Any) -> Made:
    config = transformers.BartConfig(
        vocab_size=500, d_model=64, encoder_layers=encoders, decoder_layers=decoders, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=64, **options,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).train(), ids(4, 32, 500)


@pytest.mark.usefixtures("short_search")
@pytest.mark.long
def test_layers_that_are_left_out_at_random_are_planned_as_if_they_ran() -> None:
    torch.manual_seed(0)
    model, inputs = bart(1, 3, decoder_layerdrop=0.4)
    left_out, layers = 0, [f"model.decoder.layers.{k}" for k in range(3)]
    for seed in range(2):
        torch.manual_seed(seed)
        profile = ckptplan.profile(model, inputs, menus=False)
        assert {*layers} <= {stage.name for stage in profile.stages}
        plan = ckptplan.solve(profile, smallest_peak(profile, Limits(actions=("keep", "recompute"))).peak_bytes / 2**30)
        report = ckptplan.verify(model, plan, inputs, repeats=1)
        assert report.gradients_equal, report.differing
        assert report.measured_peak_bytes <= plan.budget_bytes
        with ckptplan.apply(model, plan, strict=True) as handle:
            model(**inputs).loss.backward()
            assert not handle.stats().differences
            left_out += sum(model.get_submodule(name).fc1.weight.grad is None for name in layers)
        model.zero_grad()
    assert left_out > 0
    assert model.model.decoder.layerdrop == 0.4


@pytest.mark.long
def test_a_floating_mask_that_a_model_makes_itself_is_that_of_training() -> None:
    torch.manual_seed(0)
    model, inputs = bart(1, 1)
    profile = ckptplan.profile(model, inputs, device="a100-40gb")
    layers = [stage for stage in profile.stages if ".layers." in stage.name and not stage.is_glue]
    assert len(layers) == 2
    assert all(any(option.ops for option in stage.options) for stage in layers)
    profile = ckptplan.profile(model, inputs, menus=False)
    assert not any("saves other tensors" in note for note in profile.notes)
    plan = ckptplan.solve(profile, budget="0%", actions=("keep", "recompute"), time_limit_s=1)
    report = ckptplan.verify(model, plan, inputs, repeats=1)
    assert report.gradients_equal, report.differing
    assert report.measured_peak_bytes <= plan.budget_bytes


def _or_none(planner: Callable[..., Any], *args: Any) -> ckptplan.Plan | None:
    try:
        return planner(*args)
    except ckptplan.InfeasibleBudgetError:
        return None


@pytest.mark.long
def test_both_halves_of_an_encoder_decoder_leave_their_caches() -> None:
    config = transformers.T5Config(
        num_layers=1, d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=100, decoder_start_token_id=0
    )
    model, inputs = transformers.T5ForConditionalGeneration(config).train(), ids(2, 16, 100)
    assert model.config.use_cache is model.decoder.config.use_cache is True
    profile = ckptplan.profile(model, inputs, menus=False)
    least = smallest_peak(profile, Limits(actions=("keep", "recompute")))
    plan = ckptplan.solve(profile, least.peak_bytes / 2**30, actions=("keep", "recompute"))
    report = ckptplan.verify(model, plan, inputs, repeats=1)
    assert report.gradients_equal, report.differing
    assert report.other_paths == 0
    assert report.measured_peak_bytes <= plan.peak_bytes
    assert model.config.use_cache is model.decoder.config.use_cache is True


def test_a_model_that_checkpoints_already_is_refused() -> None:
    model, inputs = gpt2(1)
    model.train()
    # Renamed in transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    enable()
    with pytest.raises(ckptplan.UnsupportedModelError, match=r"call model\.\w+_checkpointing_disable\(\)"):
        ckptplan.solve(model, budget_gb=1.0, inputs=inputs)
    disable()
    ckptplan.solve(model, budget_gb=1.0, inputs=inputs, menus=False)


def test_inputs_come_from_the_config() -> None:
    model, _ = gpt2(1)
    model.train()
    profile = ckptplan.profile(model, menus=False)
    assert profile.notes[0].startswith("inputs guessed from the model's Hugging Face config: int64[1, ")
    assert "input_ids" in profile.fingerprint.inputs
