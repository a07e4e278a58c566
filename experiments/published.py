"""Estimates beside figures that others measured and published with all settings.

    python experiments/published.py --out experiments/results

Each row is a run that its source describes: model, batch, length, precision, optimizer, device, and what its number
counts. The estimate is of the same quantity; errors are shown as they are. Models are built on `meta`, nothing is
trained. Where today's PyTorch saves other tensors than the version of the source did, the model is written so that the
same are saved, and the note of the row says so. Nothing is fitted to the figures.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import documents
import torch
from published_models import GPT, GoogLeNet, Llama8B, UNet, ViT, mobilenet_v2, resnet50, vgg16
from torch import Tensor, nn
from transformers import AttentionInterface, BertConfig, BertForSequenceClassification
from transformers.optimization import Adafactor

import ckptplan
from ckptplan import Estimate
from ckptplan.baselines import BASELINES
from ckptplan.core.plan import KEEP

GIB, MIB, GB = 2**30, 2**20, 10**9

ALLOCATED, RESERVED, DRIVER = "allocated", "reserved", "nvidia-smi"
"""max_memory_allocated; memory_reserved; the device's used memory, which is what is reserved and the context."""


@dataclass(frozen=True)
class Row:
    """One published figure.

    Parameters
    ----------
    name, settings : str
        What ran.
    source : str
        Key of `SOURCES`.
    device : str
        The one that is estimated for.
    counts : str
        What the figure is of: `ALLOCATED`, `RESERVED` or `DRIVER`.
    published : float
        In units of `unit` bytes.
    model : callable
        Makes the model, on `meta` when called there.
    inputs : callable
        Makes its inputs.
    estimating : mapping
        Further arguments of `ckptplan.estimate`.
    recompute : str
        Every stage whose name begins so is recomputed.
    note : str
        What a reader must know about the difference.
    """

    name: str
    settings: str
    source: str
    device: str
    counts: str
    published: float
    unit: int
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    estimating: Mapping[str, Any] = field(default_factory=dict)
    recompute: str = ""
    note: str = ""

    def estimate(self) -> Estimate:
        """The whole step."""
        with torch.device("meta"):
            model = self.model().train()
        model, inputs, settings = model.to(self.estimating.get("dtype")), self.inputs(), dict(self.estimating)
        settings.pop("dtype", None)
        if self.recompute:
            measured = ckptplan.profile(model, inputs, device=self.device, menus=False)
            plan = BASELINES["recompute_all"](measured, 1 << 50)
            choices = (c if n.startswith(self.recompute) else KEEP for n, c in plan.decisions.items())
            settings["plan"] = dataclasses.replace(plan, choices=tuple(choices))
        return ckptplan.estimate(model, inputs, device=self.device, **settings)

    def of(self, found: Estimate) -> int:
        """The bytes that the source's figure counts."""
        if self.counts == ALLOCATED:
            return found.peak_bytes
        context = SOURCES[self.source]["context_bytes"] if self.counts == DRIVER else 0
        return found.reserved_bytes + context


TEXTS = json.loads(Path(__file__).with_name("published_sources.json").read_text(encoding="utf-8"))
SOURCES: dict[str, dict[str, Any]] = TEXTS["sources"]
"""Name -> where figures are from, what ran, and what the source itself measured for a process that holds next to
nothing. Others were looked at and left out; "rejected" says why."""

# --- MONeT ---


def _images(batch: int, height: int = 224, width: int = 224) -> Callable[[], Tensor]:
    return lambda: torch.empty(batch, 3, height, width, device="meta")


def _monet(name: str, batch: int, published: float, model: Callable[[], nn.Module], note: str) -> Row:
    # Without zero_grad, gradients stay and each backward adds to them.
    size = (416, 608) if name == "UNet" else (224, 224)
    return Row(
        f"{name}, batch {batch}", f"float32, {size[0]} x {size[1]}, no optimizer", "MONeT", "v100-16gb", ALLOCATED,
        published, GIB, model, _images(batch, *size), {"loss_fn": torch.sum, "set_to_none": False}, note=note,
    )  # fmt: skip


_CUDNN = "cuDNN's workspaces (benchmark on: whatever is fastest) are in the figure, not in the estimate"

# --- LLMs from scratch ---


def _pairs() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 1024, dtype=torch.long), torch.zeros(8, 1024, dtype=torch.long)


def _itself(loss: Tensor) -> Tensor:
    return loss


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _gpt(
    name: str,
    published: float,
    *,
    dtype: torch.dtype = torch.float32,
    parts: bool = True,
    attention: bool = True,
    buffers: bool = False,
    optimizer: Any = _fused,
) -> Row:
    def model() -> nn.Module:
        return GPT(plain_parts=parts, plain_attention=attention, mask_buffers=buffers)

    return Row(
        f"GPT-2 163M, {name}",
        f"{str(dtype).removeprefix('torch.')}, batch 8 x 1024, AdamW{'' if optimizer == 'adamw' else ' fused'}",
        "LLMs from scratch", "a100-40gb", RESERVED, published, GIB, model, _pairs,
        {"dtype": dtype, "loss_fn": _itself, "optimizer": optimizer},
    )  # fmt: skip


# --- Transformers ---


class _SoftmaxSavingInput(torch.autograd.Function):
    """Softmax as PyTorch before 1.11 differentiated it: saves its input beside its output (PyTorch issue 64000)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.softmax(x, -1)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, out, -1, x.dtype)


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """BERT's attention, operation by operation."""
    scores = torch.matmul(q, k.transpose(2, 3)) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask
    # Autocast runs softmax in float32; it doesn't look into functions.
    scores = scores.float()
    weights = nn.functional.dropout(_SoftmaxSavingInput.apply(scores), p=dropout, training=module.training)
    return torch.matmul(weights, v).transpose(1, 2).contiguous(), None


AttentionInterface.register("before_torch_1_11", _attention)


def _bert() -> nn.Module:
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=2,
        attn_implementation="before_torch_1_11",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _adamw_hf(parameters: Any) -> torch.optim.Optimizer:
    """A parameter at a time, as Transformers' own AdamW goes."""
    return torch.optim.AdamW(parameters, foreach=False)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    """With Trainer's settings."""
    return Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False)


def _bert_row(
    name: str, batch: int, published: int, *, optimizer: Any = _adamw_hf, recompute: bool = False, **settings: Any
) -> Row:
    words = [f"batch {batch} x 512", "Adafactor" if optimizer is _adafactor else "AdamW"]
    if "accumulation_steps" in settings:
        words.append(f"{settings['accumulation_steps']} micro-batches")
    return Row(
        f"BERT large, {name}", ", ".join([settings.get("amp", "float32"), *words]), "Transformers", "v100-16gb",
        DRIVER, published, MIB, _bert,
        lambda: {"input_ids": torch.zeros(batch, 512).long(), "labels": torch.zeros(batch).long()},
        # PyTorch before 2.0 filled gradients with zeros.
        {"optimizer": optimizer, "set_to_none": False, **settings},
        recompute="bert.encoder.layer" if recompute else "",
        note="softmax saves its input, as before PyTorch 1.11; as today's doesn't, the plain run would take 13369 MiB",
    )  # fmt: skip


# --- torchtitan ---


def _foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def _titan(ranks: int, published: float) -> Row:
    return Row(
        f"Llama 3.1 8B, {ranks} GPUs", "FSDP2, bfloat16, selective checkpointing, 2 x 8192, AdamW", "torchtitan",
        "h100", RESERVED, published, GIB, Llama8B,
        lambda: (torch.zeros(2, 8192, dtype=torch.long), torch.zeros(2, 8192, dtype=torch.long)),
        {
            "loss_fn": _itself,
            "optimizer": _foreach,
            "fsdp": ckptplan.FSDP(
                ranks, units=("Checkpointed",), reshard_after_forward=True, param_dtype="bfloat16",
                reduce_dtype="float32",
            ),
        },
        note="there the last layer stays gathered after forward (0.4 GiB)",
    )  # fmt: skip


_FOUR = {"accumulation_steps": 4}

ROWS = (
    _monet("ResNet-50", 184, 15.06, resnet50, ""),
    _monet("GoogLeNet", 320, 14.93, GoogLeNet, _CUDNN),
    _monet("UNet", 11, 14.32, lambda: UNet(416, 608), ""),
    _monet(
        "MobileNet-V2",
        272,
        14.46,
        mobilenet_v2,
        "in-place ReLU6 saves its result alone, as before PyTorch 1.10; today's also saves a copy of its input, "
        f"20.0 GiB in all. {_CUDNN}",
    ),
    _monet("VGG-16", 176, 14.12, vgg16, _CUDNN),
    _gpt("elementary operations", 26.2617, buffers=True, optimizer="adamw"),
    _gpt("+ mask made when needed", 26.2422, optimizer="adamw"),
    _gpt("+ fused AdamW", 26.2422),
    _gpt("+ bfloat16", 13.7871, dtype=torch.bfloat16),
    _gpt("+ LayerNorm and GELU of PyTorch", 11.5645, dtype=torch.bfloat16, parts=False),
    _gpt("+ flash attention", 5.9004, dtype=torch.bfloat16, parts=False, attention=False),
    _bert_row("plain", 4, 14949),
    _bert_row("accumulation", 1, 8681, **_FOUR),
    _bert_row("checkpointing", 1, 6775, recompute=True, **_FOUR),
    _bert_row("mixed precision", 4, 13939, amp="float16"),
    _bert_row("mixed, checkpointing", 1, 7275, recompute=True, amp="float16", **_FOUR),
    _bert_row("Adafactor", 4, 12295, optimizer=_adafactor),
    _bert_row("Adafactor, mixed, checkpointing", 1, 4847, optimizer=_adafactor, recompute=True, amp="float16", **_FOUR),
    Row(
        "ViT-H/14", "bfloat16 autocast, batch 8 x 224 x 224, AdamW fused", "torchao", "rtx4080", ALLOCATED, 12.94, GB,
        lambda: ViT(224, 14, 1280, 32, 16, 45),
        lambda: (torch.empty(8, 3, 224, 224, device="meta"), torch.zeros(8, dtype=torch.long)),
        {"loss_fn": _itself, "amp": "bfloat16", "optimizer": _fused},
        note="which of timm's ViT-H of 630M parameters ran isn't said; the plain one is estimated. The difference is "
        "21 MB a layer, as much as one more tensor of the MLP's inner size, which a variant with QuickGELU would save. "
        "Estimated for the RTX 4080: same architecture and compute capability",
    ),
    _titan(8, 82.4),
    _titan(128, 67.0),
)  # fmt: skip


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--only", help="rows whose source or name has this in it")
    args = parser.parse_args()
    chosen = [row for row in ROWS if not args.only or args.only.lower() in f"{row.source} {row.name}".lower()]
    if not chosen:
        parser.error(f"--only {args.only!r}: no row's source or name has that; sources are {', '.join(SOURCES)}")
    out: list[dict[str, Any]] = []
    for row in chosen:
        begin = time.perf_counter()
        found = row.estimate()
        nbytes = row.of(found)
        unit = {GIB: "GiB", MIB: "MiB", GB: "GB"}[row.unit]
        out.append({
            "source": row.source, "run": row.name, "settings": row.settings, "device": row.device,
            "counts": row.counts, "unit": unit, "published": row.published,
            "estimate": round(nbytes / row.unit, 4), "estimate_bytes": nbytes,
            "error": round(nbytes / (row.published * row.unit) - 1, 5), "peak_phase": found.peak_phase,
            "allocated_bytes": found.peak_bytes, "reserved_bytes": found.reserved_bytes, "note": row.note,
            "seconds": round(time.perf_counter() - begin, 1),
        })  # fmt: skip
        print(f"{row.source}, {row.name}: {out[-1]['error']:+.1%}", flush=True)
    columns = ("source", "run", "settings", "counts", "published", "estimate", "error")
    cells = [
        (r["source"], r["run"], r["settings"], r["counts"], f"{r['published']:.2f} {r['unit']}",
         f"{r['estimate']:.2f} {r['unit']}", f"{r['error']:+.1%}")
        for r in out
    ]  # fmt: skip
    documents.show(documents.table(columns, cells))
    errors = [r["error"] for r in out]
    sizes = sorted(map(abs, errors))
    summary = (
        f"{len(out)} figures: error {statistics.median(sizes):.1%} in the median, {sizes[-1]:.1%} at most; "
        f"lowest {min(errors):+.1%}, highest {max(errors):+.1%}"
    )
    print(summary)
    documents.save(args.out, "published.json", {"summary": summary, **TEXTS, "rows": out})


if __name__ == "__main__":
    main()
