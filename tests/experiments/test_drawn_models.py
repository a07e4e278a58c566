"""Small models made from a class's config alone, by rules on names (experiments/drawn_models.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlavaConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from drawn_models import DRAWS, Shrinking, UnbuildableError, build, drawn, loss_of, small_config  # noqa: E402

MODELING = "transformers.models.{0}.modeling_{0}."


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("t5", {"T5ForConditionalGeneration": ["input_ids", "decoder_input_ids"]}),
        ("wav2vec2", {"Wav2Vec2ForCTC": ["input_values"]}),
    ],
)
def test_a_recipe_makes_equal_models_that_train(name: str, inputs: dict[str, list[str]]) -> None:
    ((kind, names),) = inputs.items()
    recipe = build(MODELING.format(name) + kind, layers=2)
    (model, given), (other, same) = recipe.make(), recipe.make()
    assert list(given) == names
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


def test_the_loss_is_of_what_requires_a_gradient() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    assert loss_of({"a": x, "b": [2 * x, torch.ones(2)], "c": None}) == 5 + 20


def test_draws_have_their_counts() -> None:
    for experiment, found in json.loads(DRAWS.read_text()).items():
        assert len(found["names"]) in (12, 20, 30, 96)
        assert len(set(drawn(experiment))) == len(drawn(experiment))
        assert found["seed"] in (17, 19, 20)
