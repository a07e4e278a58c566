"""Small models made from a class's config alone, by rules on names (experiments/drawn_models.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlavaConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from drawn_models import Shrinking, UnbuildableError, build, loss_of, small_config  # noqa: E402

MODELING = "transformers.models.{0}.modeling_{0}."


def test_a_recipe_makes_equal_models_that_train() -> None:
    recipe = build(MODELING.format("t5") + "T5ForConditionalGeneration", layers=2)
    (model, given), (other, same) = recipe.make(), recipe.make()
    assert list(given) == ["input_ids", "decoder_input_ids"]
    assert all(torch.equal(given[key], same[key]) for key in given)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert model.training
    loss_of(model(**given)).backward()
    assert any(p.grad is not None for p in model.parameters())


def test_a_config_is_shrunk_with_its_parts() -> None:
    full = LlavaConfig()
    small = small_config(full, Shrinking(divisor=8, layers=2))
    for ours, theirs in ((small.text_config, full.text_config), (small.vision_config, full.vision_config)):
        assert ours.hidden_size == theirs.hidden_size // 8
        assert ours.num_attention_heads == theirs.num_attention_heads
        assert ours.num_hidden_layers == 2
    assert small.image_token_index < small.text_config.vocab_size == 1000


class Unknown(nn.Module):
    """A model with an input that no rule is about."""

    def forward(self, nonsense: torch.Tensor) -> torch.Tensor:
        return nonsense


def test_what_has_no_rule_is_a_named_error() -> None:
    with pytest.raises(UnbuildableError, match="no rule for the inputs nonsense"):
        build(f"{__name__}.Unknown")
