"""Models of published memory figures, rebuilt from their architectures so that they need no other package.

Each is what the source ran as far as memory goes: same layers, shapes, in-place operations and order. None has weights:
they are meant to be built on `meta`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaModel


class _Bottleneck(nn.Module):
    """He et al. (2016), with the stride in the 3x3 convolution, as torchvision has it."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_conv(inputs, width, 1), *_conv(width, width, 3, stride), *_conv(width, outputs, 1)[:2]
        )
        self.shortcut = nn.Sequential(*_conv(inputs, outputs, 1, stride)[:2]) if inputs != outputs else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return self.relu(y)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def resnet50() -> nn.Module:
    """ResNet-50."""
    layers = [*_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(_Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def vgg16() -> nn.Module:
    """VGG-16 without batch normalisation (Simonyan and Zisserman, 2015)."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for size, width in ((25088, 4096), (4096, 4096)):
        layers += [nn.Linear(size, width), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers = [*_conv(inputs, hidden, 1)] if expansion > 1 else []
        layers += [*_conv(hidden, hidden, 3, stride, hidden), *_conv(hidden, outputs, 1)[:2]]
        self.body = nn.Sequential(*layers)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet_v2() -> nn.Module:
    """MobileNet-V2 (Sandler et al., 2018), as PyTorch before 1.10 ran it.

    Its ReLU6 in place saved its result alone then, as ReLU does, which is here in its stead: the same bytes. Since 1.10
    it saves a copy of its input too (PyTorch issue 95432), which makes 20.0 GiB of this model's 13.9.
    """
    layers = _conv(3, 32, 3, 2)
    inputs = 32
    settings = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    )  # fmt: skip
    for expansion, outputs, count, stride in settings:
        for i in range(count):
            layers.append(_InvertedResidual(inputs, outputs, stride if i == 0 else 1, expansion))
            inputs = outputs
    layers += [*_conv(inputs, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(1280, 1000))


class _Inception(nn.Module):
    """Four branches, the third with a 3x3 kernel where the paper has 5x5, as torchvision has it."""

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                nn.Sequential(*_conv(inputs, one, 1)),
                nn.Sequential(*_conv(inputs, three[0], 1), *_conv(three[0], three[1], 3)),
                nn.Sequential(*_conv(inputs, five[0], 1), *_conv(five[0], five[1], 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), *_conv(inputs, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class GoogLeNet(nn.Module):
    """Szegedy et al. (2015) with batch normalisation and both auxiliary classifiers; the sum of the three outputs."""

    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.first = nn.Sequential(
            *_conv(3, 64, 7, 2), pool, *_conv(64, 64, 1), *_conv(64, 192, 3), pool,
            _Inception(192, 64, (96, 128), (16, 32), 32), _Inception(256, 128, (128, 192), (32, 96), 64), pool,
            _Inception(480, 192, (96, 208), (16, 48), 64),
        )  # fmt: skip
        self.second = nn.Sequential(
            _Inception(512, 160, (112, 224), (24, 64), 64),
            _Inception(512, 128, (128, 256), (24, 64), 64),
            _Inception(512, 112, (144, 288), (32, 64), 64),
        )
        self.third = nn.Sequential(
            _Inception(528, 256, (160, 320), (32, 128), 128), nn.MaxPool2d(2, 2, ceil_mode=True),
            _Inception(832, 256, (160, 320), (32, 128), 128), _Inception(832, 384, (192, 384), (48, 128), 128),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 1000),
        )  # fmt: skip
        self.auxiliary = nn.ModuleList(self._classifier(inputs) for inputs in (512, 528))

    @staticmethod
    def _classifier(inputs: int) -> nn.Module:
        layers = [nn.AdaptiveAvgPool2d(4), *_conv(inputs, 128, 1), nn.Flatten(), nn.Linear(2048, 1024)]
        return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Dropout(0.7), nn.Linear(1024, 1000))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        one = self.auxiliary[0](x)
        x = self.second(x)
        two = self.auxiliary[1](x)
        return self.third(x) + two + one


class UNet(nn.Module):
    """U-Net with MONeT's change: pooling to a given size instead of upsampling (its examples/models/unet)."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.begin = _twice(3, 64, 64)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _twice(a, b, b)) for a, b in ((64, 128), (128, 256), (256, 512), (512, 512))
        )
        self.resize = nn.ModuleList(nn.AdaptiveAvgPool2d((height // k, width // k)) for k in (8, 4, 2, 1))
        self.up = nn.ModuleList(_twice(a, a // 2, b) for a, b in ((1024, 256), (512, 128), (256, 64), (128, 64)))
        self.end = nn.Conv2d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.begin(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for resize, up in zip(self.resize, self.up, strict=True):
            x = up(torch.cat([skips.pop(), resize(x)], 1))
        return self.end(x)


def _twice(inputs: int, middle: int, outputs: int) -> nn.Module:
    def layers() -> Iterator[nn.Module]:
        for a, b in ((inputs, middle), (middle, outputs)):
            yield from (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    return nn.Sequential(*layers())


class PlainLayerNorm(nn.Module):
    """Normalisation spelled out in elementary operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class PlainGELU(nn.Module):
    """GELU's tanh form spelled out in elementary operations."""

    def forward(self, x: Tensor) -> Tensor:
        # The factor is a tensor on the host, made anew each time.
        inner = torch.sqrt(torch.tensor(2.0 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class PlainAttention(nn.Module):
    """Three projections, then matmul, mask, softmax, dropout and matmul."""

    def __init__(self, width: int, heads: int, dropout: float, mask: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(mask, mask), 1) if mask else None)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        k, q, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.k, self.q, self.v))
        scores = q @ k.transpose(2, 3)
        mask = torch.triu(torch.ones(t, t, device=x.device), 1) if self.mask is None else self.mask
        scores.masked_fill_(mask.bool(), -torch.inf)
        weights = self.drop(torch.softmax(scores / k.shape[-1] ** 0.5, -1))
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, width))


class FusedAttention(nn.Module):
    """One projection and PyTorch's own attention."""

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, *, bias: bool = True, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(
        self, width: int, attention: nn.Module, norm: type[nn.Module], gelu: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.drop = attention, nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.attention(self.norm1(x))) + x
        return self.drop(self.mlp(self.norm2(x))) + x


class GPT(nn.Module):
    """GPT-2 of 124M parameters beside an output layer of its own (163M), and its loss.

    Parameters
    ----------
    plain_parts, plain_attention : bool
        Normalisation and GELU, and attention, from elementary operations.
    mask_buffers : bool
        Each layer keeps a causal mask in float32; else it is made when needed.
    """

    def __init__(self, *, plain_parts: bool, plain_attention: bool, mask_buffers: bool) -> None:
        super().__init__()
        width, heads, length, vocabulary, dropout = 768, 12, 1024, 50257, 0.1
        norm = PlainLayerNorm if plain_parts else nn.LayerNorm
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)

        def attention() -> nn.Module:
            if plain_attention:
                return PlainAttention(width, heads, dropout, length if mask_buffers else 0)
            return FusedAttention(width, heads, dropout, bias=False, causal=True)

        def gelu() -> nn.Module:
            return PlainGELU() if plain_parts else nn.GELU(approximate="tanh")

        self.layers = nn.Sequential(*(Block(width, attention(), norm, gelu(), dropout) for _ in range(12)))
        self.norm, self.head = norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.layers(self.drop(x))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """A vision transformer as timm builds it, without any dropout, and its loss."""

    def __init__(self, image: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(
            *(Block(width, FusedAttention(width, heads), nn.LayerNorm, nn.GELU(), 0.0) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return F.cross_entropy(self.head(self.norm(self.layers(x))[:, 0]), labels)


# --- Llama with selective checkpointing ---


class Checkpointed(nn.Module):
    """A layer that saves its attention and every second matrix product, and computes the rest again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, use_reentrant=False, context_fn=_every_second, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.layer(*args, **kwargs)


def _every_second() -> Any:
    def policy() -> Callable[..., CheckpointPolicy]:
        products = {False: itertools.cycle((True, False)), True: itertools.cycle((True, False))}

        def saves(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            saved = operation is torch.ops.aten._scaled_dot_product_flash_attention.default
            if operation is torch.ops.aten.mm.default:
                saved = next(products[ctx.is_recompute])
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return saves

    return create_selective_checkpoint_contexts(policy())


class Llama8B(nn.Module):
    """Llama 3.1 8B (Meta, 2024) with the loss inside, which drops the logits before backward."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
        )  # fmt: skip
        self.model = LlamaModel(config)
        self.model.layers = nn.ModuleList(map(Checkpointed, self.model.layers))
        self.head = nn.Linear(4096, 128256, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.model(tokens).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
