"""Small random-weight models whose training step is mostly activations: 0.2-2 s a step on two cores.

Vocabularies are small and sequences long, so that what is kept for backward (150-600 MB) outweighs the parameters and a
budget has something to decide. Dropout is on where the model has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 2000
LABELS = 10


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """8 blocks of width 256, dropout 0.1."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=256,
        n_embd=256,
        n_layer=8,
        n_head=8,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _text(GPT2LMHeadModel, config, batch=4, length=256)


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """8 layers of width 256, dropout 0.1."""
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=256, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1024
    )
    return _text(BertForMaskedLM, config, batch=5, length=256)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """8 blocks of width 256, two query heads to a key-value head; dropout in the attention."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_dropout=0.1,
        use_cache=False,
    )
    return _text(LlamaForCausalLM, config, batch=4, length=256)


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """8 layers of width 256, 64 pixels in patches of 4, dropout 0.1."""
    config = ViTConfig(
        image_size=64,
        patch_size=4,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=LABELS,
    )
    return _images(ViTForImageClassification, config, batch=5, size=64)


def resnet50() -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-50 (depths 3, 4, 6, 3) on images of 64 pixels."""
    return _images(ResNetForImageClassification, ResNetConfig(num_labels=LABELS), batch=32, size=64)


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """An encoder and a decoder of 4 blocks each, width 256, dropout 0.1."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_heads=8,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _text(T5ForConditionalGeneration, config, batch=4, length=256)


def swin() -> tuple[nn.Module, dict[str, Tensor]]:
    """Swin with depths 2, 2, 6, 2: the maps shrink, the channels grow."""
    config = SwinConfig(
        image_size=224, patch_size=4, embed_dim=48, depths=[2, 2, 6, 2], num_heads=[2, 4, 8, 16], num_labels=LABELS
    )
    return _images(SwinForImageClassification, config, batch=2, size=224)


def convnext() -> tuple[nn.Module, dict[str, Tensor]]:
    """ConvNeXt with depths 3, 3, 9, 3."""
    config = ConvNextConfig(depths=[3, 3, 9, 3], hidden_sizes=[48, 96, 192, 384], num_labels=LABELS)
    return _images(ConvNextForImageClassification, config, batch=8, size=112)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet50": resnet50,
    "llama": llama,
    "t5": t5,
    "swin": swin,
    "convnext": convnext,
}
"""Name -> function that makes the model, in training mode, and keyword inputs with labels; the same each time."""


def _text(
    kind: Callable[..., nn.Module], config: object, *, batch: int, length: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (batch, length))
    return kind(config).train(), {"input_ids": tokens, "labels": tokens.clone()}


def _images(
    kind: Callable[..., nn.Module], config: object, *, batch: int, size: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    return kind(config).train(), {"pixel_values": images, "labels": torch.randint(LABELS, (batch,))}
