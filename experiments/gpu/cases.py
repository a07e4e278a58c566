"""What is trained in the first run on a GPU, in order of value. Imports no torch until a model is built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

GIB = 1 << 30

Made = tuple[Callable[[], Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A training step, and what is measured of it.

    Attributes
    ----------
    name : str
    what : str
        In words.
    make : callable
        (small) -> a function that builds the model, weights at random, and keyword inputs with labels, each on the
        default device of the moment.
    dtype, amp : str or None
        Of the weights, float32 by default; of autocast, none by default.
    optimizer : str or None
        "adamw" or "sgd"; its update belongs to a step.
    deterministic : bool
        With PyTorch's deterministic kernels.
    rivals : tuple of str
        Names in `experiments.rivals`; everything kept is always there.
    baselines : tuple of str
        Names in `ckptplan.baselines`. Each is planned for a budget in the middle of the range, and ours for what it
        reserves; where there is a cap, for the cap.
    fractions : tuple of float
        Budgets where no rival's peak is known yet: the way from the smallest peak to everything kept.
    tighter : bool
        Beside each budget one tighter.
    extra : tuple of str
        "bitwise" (solved plans), "mixes" (bitwise, plans by hand that mix all actions), "profiler" and "memory"; see
        `measure.py`.
    profiled_as : str or None
        The case whose profile is this one's as well.
    allocator : str or None
        Settings of CUDA's caching allocator, as in PYTORCH_ALLOC_CONF.
    cap_bytes : int or None
        The process may have no more of the device than this; it is the budget.
    compiled_layers : str or None
        The list of layers that are compiled one by one.
    rehearsed : bool
        Whether it is among those that are run where all is small; others are like it.
    """

    name: str
    what: str
    make: Callable[[bool], Made]
    dtype: str | None = None
    amp: str | None = None
    optimizer: str | None = "adamw"
    deterministic: bool = False
    rivals: tuple[str, ...] = ("hf", "offload", "save_on_cpu")
    baselines: tuple[str, ...] = ()
    fractions: tuple[float, ...] = (0.75, 0.5, 0.25)
    tighter: bool = False
    extra: tuple[str, ...] = ()
    profiled_as: str | None = None
    allocator: str | None = None
    cap_bytes: int | None = None
    compiled_layers: str | None = None
    rehearsed: bool = True


def _tokens(config: Any, batch: int, length: int) -> dict[str, Any]:
    import torch

    tokens = torch.randint(config.vocab_size, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def llama(batch: int, length: int, layers: int = 16) -> Callable[[bool], Made]:
    """The shape of Llama 3.2 1B: 16 layers of width 2048, four query heads to a key-value head, tied embedding."""

    def make(small: bool) -> Made:
        import transformers as hf

        config = hf.LlamaConfig(
            vocab_size=512 if small else 128256, hidden_size=64 if small else 2048,
            intermediate_size=256 if small else 8192, num_hidden_layers=2 if small else layers,
            num_attention_heads=4 if small else 32, num_key_value_heads=1 if small else 8,
            max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        return functools.partial(hf.LlamaForCausalLM, config), _tokens(
            config, min(batch, 2) if small else batch, 64 if small else length
        )

    return make


def gpt2(layers: int, width: int, batch: int, length: int) -> Callable[[bool], Made]:
    """Dropout 0.1, sequences of different lengths padded and masked."""

    def make(small: bool) -> Made:
        import torch
        import transformers as hf

        count, positions = (2, 64) if small else (batch, length)
        config = hf.GPT2Config(
            vocab_size=512 if small else 50257, n_positions=positions, n_embd=64 if small else width,
            n_layer=2 if small else layers, n_head=2 if small else width // 64, bos_token_id=0, eos_token_id=0,
            use_cache=False,
        )  # fmt: skip
        inputs = _tokens(config, count, positions)
        lengths = torch.linspace(positions // 2, positions, count).long()
        mask = torch.arange(positions)[None] < lengths[:, None]
        inputs["attention_mask"] = mask.long()
        inputs["labels"] = inputs["labels"].where(mask, torch.tensor(-100))
        return functools.partial(hf.GPT2LMHeadModel, config), inputs

    return make


gpt2_medium = gpt2(24, 1024, 16, 1024)


def t5_small(small: bool) -> Made:
    """Encoder and decoder of 6 layers of width 512, dropout 0.1; all layers share their position bias."""
    import torch
    import transformers as hf

    config = hf.T5Config(
        vocab_size=512 if small else 32128, d_model=64 if small else 512, d_kv=32 if small else 64,
        d_ff=128 if small else 2048, num_layers=2 if small else 6, num_heads=2 if small else 8,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    count, length = (2, 32) if small else (8, 256)
    tokens = torch.randint(config.vocab_size, (2, count, length))
    return functools.partial(hf.T5ForConditionalGeneration, config), {"input_ids": tokens[0], "labels": tokens[1]}


def vit_large(small: bool) -> Made:
    """24 layers of width 1024, patches of 16, dropout 0.1."""
    import torch
    import transformers as hf

    side, batch = (32, 2) if small else (224, 128)
    config = hf.ViTConfig(
        image_size=side, patch_size=8 if small else 16, hidden_size=64 if small else 1024,
        num_hidden_layers=2 if small else 24, num_attention_heads=2 if small else 16,
        intermediate_size=256 if small else 4096, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        num_labels=1000,
    )  # fmt: skip
    pixels = torch.randn(batch, 3, side, side)
    return functools.partial(hf.ViTForImageClassification, config), {
        "pixel_values": pixels,
        "labels": torch.randint(1000, (batch,)),
    }


def resnet(depths: tuple[int, ...], batch: int) -> Callable[[bool], Made]:
    """Bottlenecks of He et al. (2016) on images of 224 pixels."""

    def make(small: bool) -> Made:
        import torch
        import transformers as hf

        sizes: dict[str, Any] = {"depths": list(depths)}
        if small:
            sizes = {"depths": [1, 2], "hidden_sizes": [16, 32], "embedding_size": 8}
        config = hf.ResNetConfig(num_labels=1000, **sizes)
        count, side = (4, 32) if small else (batch, 224)
        pixels = torch.randn(count, 3, side, side)
        return functools.partial(hf.ResNetForImageClassification, config), {
            "pixel_values": pixels,
            "labels": torch.randint(1000, (count,)),
        }

    return make


DEPTHS = {152: (3, 8, 36, 3), 1001: (3, 110, 217, 3), 2000: (3, 220, 440, 3), 50: (3, 4, 6, 3)}

HEADLINE = Case(
    "llama-4x4096", "Llama-1B shape, bf16, 4 x 4096 tokens, AdamW, the kernels people use", llama(4, 4096),
    dtype="bfloat16", rivals=("hf", "offload", "trl", "save_on_cpu"), baselines=("pooch", "uniform"),
    extra=("profiler",),
)  # fmt: skip

SMALL = {
    "llama": Case("", "Llama, 4 layers of width 2048, bf16", llama(2, 1024, 4), dtype="bfloat16"),
    "gpt2": Case("", "GPT-2, 6 layers of width 768, AMP, dropout and masks", gpt2(6, 768, 8, 512), amp="bfloat16"),
    "t5": Case("", "T5 small, float32, dropout", t5_small),
    "resnet50": Case("", "ResNet-50, AMP, batch 32", resnet(DEPTHS[50], 32), amp="bfloat16", optimizer="sgd"),
}
"""Models whose bits are compared."""

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        *(
            replace(
                case,
                name=f"bits-{name}{'' if deterministic else '-production'}",
                what=f"bits of {case.what}; {'deterministic kernels' if deterministic else 'the kernels people use'}",
                deterministic=deterministic,
                rivals=(),
                extra=("mixes",),
                rehearsed=deterministic,
            )
            for deterministic in (True, False)
            for name, case in SMALL.items()
        ),
        replace(
            HEADLINE,
            name="llama-4x4096-expandable",
            what=f"{HEADLINE.what}; expandable segments",
            allocator="expandable_segments:True",
            profiled_as=HEADLINE.name,
        ),
        HEADLINE,
        Case(
            "llama-1x1024",
            "the same at 1 x 1024, deterministic kernels: bit for bit",
            llama(1, 1024),
            dtype="bfloat16",
            optimizer=None,  # whose update needs more than the activations
            deterministic=True,
            rivals=(),
            extra=("bitwise",),
        ),
        Case(
            "llama-production",
            "the same with the kernels people use: our distance from plain beside plain's own",
            llama(1, 1024),
            dtype="bfloat16",
            optimizer=None,
            rivals=(),
            extra=("bitwise",),
            rehearsed=False,
        ),
        *(
            Case(
                name,
                f"histories of the headline's step, recorded and replayed{'; expandable segments' if setting else ''}",
                llama(4, 4096),
                dtype="bfloat16",
                rivals=(),
                extra=("memory",),
                profiled_as=HEADLINE.name,
                allocator=setting,
                fractions=(0.3,),
                rehearsed=setting is None,
            )
            for name, setting in (("memory", None), ("memory-expandable", "expandable_segments:True"))
        ),
        Case(
            "resnet152-256",
            "ResNet-152, AMP to bf16, batch 256, SGD",
            resnet(DEPTHS[152], 256),
            amp="bfloat16",
            optimizer="sgd",
            rivals=("offload",),
        ),
        Case(
            "gpt2-medium-16x1024",
            "GPT-2 medium with dropout and padding masks, AMP to bf16, 16 x 1024 tokens, AdamW",
            gpt2_medium,
            amp="bfloat16",
        ),
        Case("vit-l-128", "ViT-L/16, bf16, batch 128, AdamW", vit_large, dtype="bfloat16", rivals=("hf", "offload")),
        Case(
            "llama-compiled",
            "the headline's model compiled: as a whole with activation_memory_budget, by layers with our plan",
            llama(4, 4096),
            dtype="bfloat16",
            rivals=("compiled/1", "compiled/0.5", "compiled/0.25"),
            compiled_layers="model.layers",
        ),
        *(
            Case(
                f"resnet{depth}-{batch}-cap{cap}",
                f"ResNet-{depth}, float32, batch {batch}, SGD, on a cap of {cap} GiB",
                resnet(DEPTHS[depth], batch),
                optimizer="sgd",
                rivals=(),
                baselines=("pooch",),
                cap_bytes=cap * GIB,
                rehearsed=batch == 640,
            )
            for depth, batch, cap in ((1001, 16, 12), (2000, 16, 16), (50, 640, 16), (50, 128, 12), (50, 512, 12))
        ),
        Case(
            "gpt2-medium-cap16",
            "GPT-2 medium, AMP to bf16, 16 x 1024 tokens, AdamW, on a cap of 16 GiB",
            gpt2_medium,
            amp="bfloat16",
            rivals=(),
            cap_bytes=16 * GIB,
            rehearsed=False,
        ),
    )
}
"""In the order in which they are measured."""


def toy(small: bool) -> Made:
    """Two blocks, for trying the commands."""
    import torch
    import transformers as hf

    config = hf.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    tokens = torch.randint(64, (2, 32))
    return functools.partial(hf.GPT2LMHeadModel, config), {"input_ids": tokens, "labels": tokens.clone()}


TOY = Case(
    "toy", "two small blocks, to try the commands", toy, rivals=("hf",), baselines=("uniform",), tighter=True,
    fractions=(0.5,), extra=("bitwise",),
)  # fmt: skip


def find(name: str) -> Case:
    """The case of that name; "toy" is in no list."""
    known = {**CASES, TOY.name: TOY}
    if name not in known:
        raise SystemExit(f"no case is called {name!r}; there are {', '.join(known)}")
    return known[name]
