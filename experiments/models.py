"""Small random-weight models whose training step is mostly activations: 0.2-2 s a step on two cores.

Vocabularies are small and sequences long, so that what is kept for backward (150-600 MB) outweighs the parameters and a
budget has something to decide. Dropout is on where the model has it. Batch, length and depth can be given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 2000
LABELS = 10

Made = tuple[nn.Module, dict[str, Tensor]]


def gpt2(batch: int = 4, length: int = 256, layers: int = 8, width: int = 256) -> Made:
    """8 blocks of width 256, dropout 0.1."""
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=width, n_layer=layers, n_head=width // 32,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return _text(hf.GPT2LMHeadModel, config, batch, length)


def bert(batch: int = 5, length: int = 256, layers: int = 8) -> Made:
    """8 layers of width 256, dropout 0.1."""
    config = hf.BertConfig(
        vocab_size=VOCAB, hidden_size=256, num_hidden_layers=layers, num_attention_heads=8, intermediate_size=1024
    )
    return _text(hf.BertForMaskedLM, config, batch, length)


def llama(batch: int = 4, length: int = 256, layers: int = 8) -> Made:
    """8 blocks of width 256, two query heads to a key-value head; dropout in the attention."""
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return _text(hf.LlamaForCausalLM, config, batch, length)


def vit(batch: int = 5, layers: int = 8) -> Made:
    """8 layers of width 256, 64 pixels in patches of 4, dropout 0.1."""
    config = hf.ViTConfig(
        image_size=64, patch_size=4, hidden_size=256, num_hidden_layers=layers, num_attention_heads=8,
        intermediate_size=1024, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=LABELS,
    )  # fmt: skip
    return _images(hf.ViTForImageClassification, config, batch, size=64)


def resnet50(batch: int = 32) -> Made:
    """ResNet-50 (depths 3, 4, 6, 3) on images of 64 pixels."""
    return _images(hf.ResNetForImageClassification, hf.ResNetConfig(num_labels=LABELS), batch, size=64)


def t5(batch: int = 4, length: int = 256, layers: int = 4) -> Made:
    """An encoder and a decoder of 4 blocks each, width 256, dropout 0.1."""
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=256, d_kv=32, d_ff=1024, num_layers=layers, num_heads=8, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return _text(hf.T5ForConditionalGeneration, config, batch, length)


def swin(batch: int = 2, layers: int = 6) -> Made:
    """Swin with depths 2, 2, `layers`, 2: the maps shrink, the channels grow."""
    config = hf.SwinConfig(
        image_size=224, patch_size=4, embed_dim=48, depths=[2, 2, layers, 2], num_heads=[2, 4, 8, 16], num_labels=LABELS
    )
    return _images(hf.SwinForImageClassification, config, batch, size=224)


def convnext(batch: int = 8) -> Made:
    """ConvNeXt with depths 3, 3, 9, 3."""
    config = hf.ConvNextConfig(depths=[3, 3, 9, 3], hidden_sizes=[48, 96, 192, 384], num_labels=LABELS)
    return _images(hf.ConvNextForImageClassification, config, batch, size=112)


def mixtral(batch: int = 4, length: int = 256) -> Made:
    """4 blocks of width 192 with 4 experts each, two of them for every token."""
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return _text(hf.MixtralForCausalLM, config, batch, length)


class LSTMForCausalLM(nn.Module):
    """Embedding, two LSTM layers with dropout between them, a head tied to the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.lstm(self.dropout(self.embedding(input_ids)))
        logits = self.head(self.dropout(hidden))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def lstm(batch: int = 16, length: int = 128) -> Made:
    """A language model of two LSTM layers of width 256, dropout 0.1."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (batch, length))
    return LSTMForCausalLM(256).train(), {"input_ids": tokens, "labels": tokens.clone()}


class _Convolutions(nn.Sequential):
    """Two convolutions, each with a group norm and an activation."""

    def __init__(self, before: int, after: int) -> None:
        layers: list[nn.Module] = []
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Segmentation of images: three levels down and up again, skip connections between the arms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(map(_Convolutions, [3, *widths[:-2]], widths[:-1]))
        self.bottom = _Convolutions(widths[-2], widths[-1])
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(below, here, 2, stride=2)
            for below, here in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.up = nn.ModuleList(_Convolutions(2 * here, here) for here in widths[-2::-1])
        self.head = nn.Conv2d(width, LABELS, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, skips = pixel_values, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def unet(batch: int = 4) -> Made:
    """A U-Net of width 32 on images of 96 pixels."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 96, 96)
    return UNet(32).train(), {"pixel_values": images, "labels": torch.randint(LABELS, (batch, 96, 96))}


MODELS: Mapping[str, Callable[..., Made]] = {
    made.__name__: made
    for made in (gpt2, bert, vit, resnet50, llama, t5, swin, convnext, mixtral, lstm, unet)
}  # fmt: skip
"""Name -> function that makes the model, in training mode, and keyword inputs with labels; the same each time.

All take `batch`, those of text `length` too, and some `layers`.
"""


LossFn = Callable[[Any], Tensor] | None

Planned = tuple[nn.Module, Any, LossFn]


def blocks(layers: int) -> Planned:
    """GPT-2 of `layers` blocks of width 256, 4 sequences of 128 tokens."""
    return (*gpt2(4, 128, layers), None)


def experts() -> Planned:
    """Two blocks with 24 experts of width 128 each, two of them for every token."""
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=24, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return (*_text(hf.MixtralForCausalLM, config, 4, 128), None)


class BidirectionalLSTM(nn.Module):
    """Embedding, two LSTM layers in both directions, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def bidirectional_lstm() -> Planned:
    """Two LSTM layers of width 128 in both directions, 8 sequences of 128 tokens."""
    torch.manual_seed(0)
    return BidirectionalLSTM(128).train(), torch.randint(VOCAB, (8, 128)), None


def _of_sample(output: Any) -> Tensor:
    loss: Tensor = output.sample.pow(2).mean()
    return loss


def diffusion_unet() -> Planned:
    """`UNet2DConditionModel` of three levels (32, 64 and 128 channels) with attention, on two latents of 32 pixels."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64, 128),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1,
        cross_attention_dim=64, attention_head_dim=8,
    )  # fmt: skip
    sample, timestep = torch.randn(2, 4, 32, 32), torch.randint(0, 1000, (2,))
    inputs = {"sample": sample, "timestep": timestep, "encoder_hidden_states": torch.randn(2, 16, 64)}
    return model.train(), inputs, _of_sample


def flux() -> Planned:
    """`FluxTransformer2DModel` of 3 double and 6 single blocks of width 128, 256 image and 32 text tokens."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=3, num_single_layers=6, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 256, 16), "encoder_hidden_states": torch.randn(1, 32, 64),
        "pooled_projections": torch.randn(1, 64), "timestep": torch.rand(1), "img_ids": torch.randn(256, 3),
        "txt_ids": torch.randn(32, 3),
    }  # fmt: skip
    return model.train(), inputs, _of_sample


DEPTHS = (6, 12, 24, 48, 96)
"""Numbers of `blocks`."""

PLANNED: Mapping[str, Callable[[], Planned]] = {
    "unet": diffusion_unet,
    "experts": experts,
    "flux": flux,
    "bi-lstm": bidirectional_lstm,
    **{
        name: functools.partial(lambda name: (*MODELS[name](), None), name)
        for name in ("bert", "vit", "resnet50", "t5", "swin", "convnext")
    },
}
"""Name -> function that makes a model whose planning is timed, its inputs and its loss function."""


def _text(kind: Callable[..., nn.Module], config: object, batch: int, length: int) -> Made:
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (batch, length))
    return kind(config).train(), {"input_ids": tokens, "labels": tokens.clone()}


def _images(kind: Callable[..., nn.Module], config: object, batch: int, *, size: int) -> Made:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    return kind(config).train(), {"pixel_values": images, "labels": torch.randint(LABELS, (batch,))}
