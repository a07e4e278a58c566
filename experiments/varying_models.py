"""Small models of many families, with batches of any size, length and mask: `experiments/varying.py` trains them.

A model takes a batch's tensors by name and returns a dictionary (or one of transformers' outputs) with the loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LABELS, WIDTH = 120, 10, 32
Batch = dict[str, Tensor]
MASKS = ("none", "full", "padded")


@dataclass(frozen=True)
class Family:
    """A model and what it is trained on.

    Attributes
    ----------
    model : nn.Module
    batch : callable
        Makes a batch of (samples, length, mask); `mask` is one of `MASKS`.
    layers : sequence of nn.Module
        Layers in the order in which they run, which may be frozen, and behind which the graph may be cut.
    masks, lengths : bool
        Whether batches have masks, and lengths.
    generates : callable, optional
        Makes tokens from a batch.
    routed : bool
        Whether the path through the model depends on the values of a batch, or is drawn at random.
    """

    model: nn.Module
    batch: Callable[[int, int, str], Batch]
    layers: Sequence[nn.Module]
    masks: bool = False
    lengths: bool = True
    generates: Callable[[Batch], Tensor] | None = None
    routed: bool = False


def _mask(samples: int, length: int, mask: str) -> Tensor:
    found = torch.ones(samples, length, dtype=torch.long)
    if mask == "padded":
        for i in range(samples):
            found[i, length - int(torch.randint(length // 2 + 1, ())) :] = 0
        found[0] = 1
    return found


def text(samples: int, length: int, mask: str) -> Batch:
    tokens = torch.randint(1, VOCABULARY, (samples, length))
    if mask == "none":
        return {"input_ids": tokens, "labels": tokens.clone()}
    found = _mask(samples, length, mask)
    return {
        "input_ids": tokens.where(found == 1, 0), "attention_mask": found, "labels": tokens.where(found == 1, -100)
    }  # fmt: skip


def classes(samples: int) -> Tensor:
    return torch.randint(LABELS, (samples,))


def _tokens(model: Any) -> Callable[[Batch], Tensor]:
    def generate(batch: Batch) -> Tensor:
        few = {name: t[:2, :6] for name, t in batch.items() if name != "labels"}
        return model.generate(**few, max_new_tokens=4, do_sample=True, pad_token_id=0)  # type: ignore[no-any-return]

    return generate


def _of(model: Any, layers: Sequence[nn.Module], *, generates: bool = False, routed: bool = False) -> Family:
    return Family(model, text, list(layers), True, generates=_tokens(model) if generates else None, routed=routed)


_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LAYERS: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def gpt2() -> Family:
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_positions=128, n_embd=WIDTH, n_layer=2, n_head=2, use_cache=False, **_SMALL)
    )
    return _of(model, model.transformer.h, generates=True)


def llama() -> Family:
    config = hf.LlamaConfig(num_key_value_heads=2, attention_dropout=0.1, use_cache=False, **_LAYERS, **_SMALL)
    model = hf.LlamaForCausalLM(config)
    return _of(model, model.model.layers, generates=True)


def bert() -> Family:
    model = hf.BertForMaskedLM(hf.BertConfig(**_LAYERS, vocab_size=VOCABULARY, max_position_embeddings=128))
    return _of(model, model.bert.encoder.layer)


def t5() -> Family:
    config = hf.T5Config(
        d_model=WIDTH, d_kv=8, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0, use_cache=False,
        vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    return _of(model, [*model.encoder.block, *model.decoder.block], generates=True)


def bart() -> Family:
    config = hf.BartConfig(
        d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128, use_cache=False, forced_eos_token_id=None,
        decoder_start_token_id=0, encoder_layerdrop=0.3, **_SMALL,
    )  # fmt: skip
    model = hf.BartForConditionalGeneration(config)
    return _of(model, [*model.model.encoder.layers, *model.model.decoder.layers], generates=True, routed=True)


def mixtral() -> Family:
    config = hf.MixtralConfig(
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False, output_router_logits=True,
        **_LAYERS, **_SMALL,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    return _of(model, model.model.layers, generates=True, routed=True)


def qwen2_moe() -> Family:
    config = hf.Qwen2MoeConfig(
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, use_cache=False,
        shared_expert_intermediate_size=64, decoder_sparse_step=2, **_LAYERS, **_SMALL,
    )  # fmt: skip
    model = hf.Qwen2MoeForCausalLM(config)
    return _of(model, model.model.layers, generates=True, routed=True)


def mamba() -> Family:
    config = hf.MambaConfig(hidden_size=WIDTH, state_size=8, num_hidden_layers=2, use_cache=False, **_SMALL)
    model = hf.MambaForCausalLM(config)

    def batch(samples: int, length: int, mask: str) -> Batch:  # it runs token by token on the CPU
        return text(samples, length // 3, mask)

    return Family(model, batch, list(model.backbone.layers), masks=True)


def vit() -> Family:
    config = hf.ViTConfig(
        image_size=32, patch_size=8, num_labels=LABELS, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        **_LAYERS,
    )  # fmt: skip
    model = hf.ViTForImageClassification(config)

    def batch(samples: int, length: int, mask: str) -> Batch:
        return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": classes(samples)}

    return Family(model, batch, list(model.vit.layers), lengths=False)


def resnet() -> Family:
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], num_labels=LABELS)
    model = hf.ResNetForImageClassification(config)

    def batch(samples: int, length: int, mask: str) -> Batch:
        side = 32 + 32 * (length > 32)
        return {"pixel_values": torch.randn(samples, 3, side, side), "labels": classes(samples)}

    return Family(model, batch, list(model.resnet.encoder.stages))


def whisper() -> Family:
    config = hf.WhisperConfig(
        d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=32, max_target_positions=64,
        use_cache=False, decoder_start_token_id=0, begin_suppress_tokens=None, dropout=0.1, decoder_layerdrop=0.3,
        **_SMALL,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)

    def batch(samples: int, length: int, mask: str) -> Batch:
        features = torch.randn(samples, 16, 64)
        return {"input_features": features, "labels": torch.randint(1, VOCABULARY, (samples, length))}

    return Family(model, batch, [*model.model.encoder.layers, *model.model.decoder.layers], routed=True)


def wav2vec2() -> Family:
    config = hf.Wav2Vec2Config(
        **_LAYERS, vocab_size=VOCABULARY, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), layerdrop=0.3,
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, mask_time_length=2,
        ctc_loss_reduction="mean", ctc_zero_infinity=True, classifier_proj_size=16, num_labels=LABELS,
        mask_time_prob=0.2,
    )  # fmt: skip
    model = hf.Wav2Vec2ForSequenceClassification(config)

    def batch(samples: int, length: int, mask: str) -> Batch:
        found = {"input_values": torch.randn(samples, 20 * length), "labels": classes(samples)}
        if mask != "none":
            found["attention_mask"] = _mask(samples, 20 * length, mask)
        return found

    return Family(model, batch, list(model.wav2vec2.encoder.layers), masks=True, routed=True)


class Encoder(nn.Module):
    """PyTorch's own encoder layers; some are left out at random when `drop` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 96, 0.1, batch_first=True) for _ in range(4))
        self.drop = 0.0

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        hidden = None if attention_mask is None else attention_mask == 0
        for layer in self.layers:
            if not self.training or not self.drop or torch.rand(()) >= self.drop:
                x = layer(x, src_key_padding_mask=hidden)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def encoder() -> Family:
    model = Encoder()
    model.drop = float(torch.randint(2, ())) * 0.3
    return Family(model, text, list(model.layers), masks=True, routed=model.drop > 0)


class Block(nn.Module):
    """Convolutions with batch norm around a shortcut."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.SiLU(), nn.Conv2d(outs, outs, 3, padding=1)
        )
        self.short = nn.Conv2d(ins, outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.body(x) + self.short(x))


class UNet(nn.Module):
    """Down, up, and skip connections; predicts noise at a random time, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(3, 16), Block(16, 32)])
        self.middle, self.time = Block(32, 32), nn.Embedding(10, 32)
        self.up = nn.ModuleList([Block(64, 16), Block(32, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        t = torch.randint(10, (len(x),))
        noise = torch.randn_like(x)
        level = (t / 10).view(-1, 1, 1, 1)
        y, skips = x * (1 - level) + noise * level, []
        for block in self.down:
            skips.append(y := block(y))
            y = F.avg_pool2d(y, 2)
        y = self.middle(y) + self.time(t)[:, :, None, None]
        for block in self.up:
            y = block(torch.cat([F.interpolate(y, scale_factor=2), skips.pop()], 1))
        return {"loss": F.mse_loss(self.out(y), noise)}


def unet() -> Family:
    model = UNet()

    def batch(samples: int, length: int, mask: str) -> Batch:
        side = 16 + 8 * (length > 32)
        return {"x": torch.randn(samples, 3, side, side)}

    return Family(model, batch, [*model.down, model.middle, *model.up])


class Experts(nn.Module):
    """A layer whose tokens go to one of several experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            at = (chosen == i).nonzero().squeeze(1)
            if len(at):
                out = out.index_add(0, at, (expert(tokens[at]) * weight[at, None]).to(out.dtype))
        return x + out.view_as(x)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def experts() -> Family:
    model = Routed()
    return Family(model, text, list(model.layers), masks=True, routed=True)


class Recurrent(nn.Module):
    """An LSTM between blocks; padded rows are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.front = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.back = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.front(self.embed(input_ids))
        if attention_mask is None:
            y, _ = self.lstm(x)
        else:
            packed = nn.utils.rnn.pack_padded_sequence(x, attention_mask.sum(1), batch_first=True, enforce_sorted=False)
            y, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        logits = self.head(self.back(y) + x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def lstm() -> Family:
    model = Recurrent()
    return Family(model, text, [model.front, model.lstm, model.back], masks=True)


class Contrastive(nn.Module):
    """An encoder of two views, of which the loss detaches one, and of a queue of former views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64)) for _ in range(4))
        )
        self.register_buffer("queue", torch.randn(32, 64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = self.layers(x), self.layers(x + 0.1 * torch.randn_like(x))
        a, b = F.normalize(a, dim=1), F.normalize(b.detach(), dim=1)
        logits = torch.cat([(a * b).sum(1, keepdim=True), a @ self.queue.clone().t()], 1)
        self.queue = torch.cat([b, self.queue])[:32]
        return {"loss": F.cross_entropy(logits / 0.1, torch.zeros(len(x), dtype=torch.long))}


def contrastive() -> Family:
    model = Contrastive()

    def batch(samples: int, length: int, mask: str) -> Batch:
        return {"x": torch.randn(8 * samples, 64)}

    return Family(model, batch, list(model.layers), lengths=False)


FAMILIES: dict[str, Callable[[], Family]] = {
    made.__name__: made
    for made in (
        gpt2, llama, bert, t5, bart, mixtral, qwen2_moe, mamba, vit, resnet, whisper, wav2vec2, encoder, unet, experts,
        lstm, contrastive,
    )
}  # fmt: skip
