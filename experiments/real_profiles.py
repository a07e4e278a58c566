"""Profiles of ten real models for a device that isn't here, on which plans and proofs are measured.

    python experiments/real_profiles.py --out experiments/profiles

Text, speech and image models of transformers and diffusers at their published sizes, a mixture of experts among them,
in bfloat16 autocast with AdamW, whose weights, gradients and state are in the profile. Bytes come from traced steps and
times from the published rates of an RTX 4090, with a transfer's latency as measured on another GPU.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)  # fmt: skip

import ckptplan

FOLDER = Path(__file__).parent / "profiles"
Made = tuple[nn.Module, Any]


def _tokens(batch: int, length: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, length, dtype=torch.long) for name in ("input_ids", "labels")}


def _t5(width: int, inner: int, layers: int, heads: int, batch: int) -> Made:
    config = T5Config(
        vocab_size=32128, d_model=width, d_kv=64, d_ff=inner, num_layers=layers, num_heads=heads, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), _tokens(batch, 512)


def _bart() -> Made:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 6), ("ffn_dim", 3072))}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    config = BartConfig(vocab_size=50265, d_model=768, use_cache=False, **sizes, **heads)
    return BartForConditionalGeneration(config), _tokens(8, 512)


def _whisper() -> Made:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 12), ("ffn_dim", 3072))}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    config = WhisperConfig(d_model=768, use_cache=False, **sizes, **heads)
    inputs = {"input_features": torch.zeros(8, 80, 3000), "labels": torch.zeros(8, 256, dtype=torch.long)}
    return WhisperForConditionalGeneration(config), inputs


def _mixtral() -> Made:
    config = MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config), _tokens(4, 1024)


def _bert() -> Made:
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return BertForMaskedLM(config), _tokens(16, 512)


def _swin() -> Made:
    config = SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
    inputs = {"pixel_values": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.long)}
    return SwinForImageClassification(config), inputs


def _segformer() -> Made:
    inputs = {"pixel_values": torch.zeros(8, 3, 512, 512), "labels": torch.zeros(8, 512, 512, dtype=torch.long)}
    return SegformerForSemanticSegmentation(SegformerConfig()), inputs


def _unet_pixels() -> Made:
    model = UNet2DModel(sample_size=128, block_out_channels=(128, 256, 256, 512))
    return model, (torch.zeros(16, 3, 128, 128), torch.zeros(16, dtype=torch.long))


def _unet_conditional() -> Made:
    inputs = (torch.zeros(16, 4, 64, 64), torch.zeros(16, dtype=torch.long), torch.zeros(16, 77, 768))
    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768), inputs


MODELS: dict[str, Callable[[], Made]] = {
    "t5-small": lambda: _t5(512, 2048, 6, 8, 16), "t5-base": lambda: _t5(768, 3072, 12, 12, 8), "bart-base": _bart,
    "whisper-small": _whisper, "bert-large": _bert, "mixtral": _mixtral, "swin-base": _swin, "segformer": _segformer,
    "unet-pixels": _unet_pixels, "unet-conditional": _unet_conditional,
}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = documents.parser(__doc__)
    parser.add_argument("--only", help="names of models, with commas between them")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(",") if args.only else MODELS:
        with torch.device("meta"):
            model, inputs = MODELS[name]()
        profile = ckptplan.profile(model.train(), inputs, amp="bfloat16", optimizer="adamw", device="rtx4090")
        packed = gzip.compress((profile.to_json() + "\n").encode(), 9, mtime=0)
        (args.out / f"{name}.json.gz").write_bytes(packed)
        print(f"{name}: {len(profile.stages)} stages")


if __name__ == "__main__":
    main()
