"""What large models that aren't here need on devices that aren't here, and what it takes to know.

    python experiments/large_models.py --out experiments/results

Estimates: Llama-3-8B and -70B, and the former with other numbers of layers, built on `meta` and estimated for training
with AdamW in bfloat16 on an H100; counted are the seconds of `ckptplan.estimate` alone and the largest resident memory
of the process. Sharded: does a full fine-tuning of Llama 3 70B fit on 8, 16 or 32 H100s, at what batch, with what plan
and slowdown? Each answer is the command line's own: `ckptplan fit` with the model's config, sharded by FSDP2 for ranks
that aren't here, AdamW, 4096 tokens; units are the layers, the embedding and the head. Weights, gradients and optimizer
state are in float32 and gathered in bfloat16, or all in bfloat16. Prints PASS or FAIL.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import documents

from ckptplan.core.units import GIB, format_bytes

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}
"""Meta, "The Llama 3 Herd of Models" (2024), table 3; 8 key-value heads, a vocabulary of 128,256."""
COMMON = {"vocab_size": 128256, "num_key_value_heads": 8}
ESTIMATED = [("8b", 32), ("70b", 80), ("8b", 8), ("8b", 16), ("8b", 64), ("8b", 128)]
ESTIMATE_S = {("8b", 32): 20.0, ("70b", 80): 60.0}
SHARDED = [(weights, ranks) for weights in ("float32", "bfloat16") for ranks in (8, 16, 32)]
UNITS = "LlamaDecoderLayer+model.embed_tokens+lm_head"
SHARDED_S = 60.0
ESTIMATE_BYTES, SHARDED_BYTES = 2 * GIB, 4 * GIB


def resident_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def estimated(shape: str, layers: int) -> dict[str, Any]:
    """One estimate, in this process alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ckptplan

    config = LlamaConfig(rope_theta=500000.0, **COMMON, **{**SHAPES[shape], "num_hidden_layers": layers})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    begin = time.perf_counter()
    found = ckptplan.estimate(model, {"input_ids": tokens, "labels": tokens}, optimizer="adamw", device="h100")
    return {
        "shape": shape, "layers": layers, "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - begin, "process_bytes": resident_bytes(), "needs_bytes": found.total_bytes,
        "peak_phase": found.peak_phase,
    }  # fmt: skip


def sharded(weights: str, ranks: int) -> dict[str, Any]:
    """One answer of `ckptplan fit`, in this process alone."""
    begin = time.perf_counter()
    from ckptplan.cli.app import app

    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192,
        "use_cache": False, "dtype": weights, **COMMON, **SHAPES["70b"],
    }  # fmt: skip
    words = [
        "ckptplan", "fit", "--config", "config.json", "--seq", "4096", "--batch", "1", "--optimizer", "adamw",
        "--fsdp", f"{ranks},units={UNITS},param_dtype=bfloat16,reduce_dtype=float32", "--device", "h100",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        Path(folder, "config.json").write_text(json.dumps(config))
        os.chdir(folder)
        app(words[1:], standalone_mode=False)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    return {
        "weights": weights, "ranks": ranks,
        "needs": next(line for line in lines if "needs" in line and "everything kept" in line),
        "answer": next(line for line in lines if line.startswith("h100")), "command": " ".join(words),
        "seconds": round(time.perf_counter() - begin, 1), "resident_bytes": resident_bytes(),
    }  # fmt: skip


def checks_of_estimates(rows: list[dict[str, Any]]) -> list[documents.Check]:
    return [
        (
            row["seconds"] <= limit_s and row["process_bytes"] <= ESTIMATE_BYTES,
            f"{shape}: {row['seconds']:.1f} s of {limit_s:.0f}, {format_bytes(row['process_bytes'])} of 2 GiB",
        )
        for (shape, layers), limit_s in ESTIMATE_S.items()
        for row in rows
        if (row["shape"], row["layers"]) == (shape, layers)
    ]


def checks_of_sharded(rows: list[dict[str, Any]]) -> list[documents.Check]:
    slowest, largest = max(row["seconds"] for row in rows), max(row["resident_bytes"] for row in rows)
    fits = {(row["weights"], row["ranks"]): " plan +" in row["answer"] or " fits " in row["answer"] for row in rows}
    return [
        (not any(fits[weights, 8] for weights in ("float32", "bfloat16")), "8 ranks can't hold it, and it is said"),
        (all(fits[weights, 32] for weights in ("float32", "bfloat16")), "32 ranks hold what 8 don't"),
        (all(row["answer"].startswith("h100 78.79 GiB") for row in rows), "each answer has the device's memory"),
        (slowest <= SHARDED_S, f"the slowest answer took {slowest:.1f} s, of {SHARDED_S:.0f}"),
        (largest <= SHARDED_BYTES, f"the largest process had {format_bytes(largest)}, of 4 GiB"),
    ]


PARTS = {
    "estimate": (estimated, ESTIMATED, checks_of_estimates, "estimate_large.json"),
    "sharded": (sharded, SHARDED, checks_of_sharded, "sharded_large.json"),
}


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--parts", type=documents.among(PARTS), default=list(PARTS))
    given = parser.parse_args()
    kept = True
    for part in given.parts:
        call, cases, checks, name = PARTS[part]
        rows = []
        for case in cases:
            rows.append(documents.in_a_process(call, *case))
            print(rows[-1], flush=True)
        results = checks(rows)
        kept &= documents.told(results)
        document = {"checks": [{"passed": ok, "what": text} for ok, text in results], "rows": rows}
        documents.save(given.out, name, document)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
