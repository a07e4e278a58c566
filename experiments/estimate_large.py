"""How long estimates of large models take, and in how much memory: Llama-3-8B and -70B, and one by its depth.

    python experiments/estimate_large.py --out experiments/results

Every model is built on `meta` in a process of its own, and estimated for training with AdamW in bfloat16 on an H100.
Counted are the seconds of `ckptplan.estimate` alone and the largest resident memory of the whole process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ckptplan
from ckptplan.core.units import GIB, format_bytes

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}
"""Meta, "The Llama 3 Herd of Models" (2024), table 3; 8 key-value heads, a vocabulary of 128,256."""

CASES = [("8b", 32), ("70b", 80), ("8b", 8), ("8b", 16), ("8b", 64), ("8b", 128)]
LIMIT_S = {("8b", 32): 20.0, ("70b", 80): 60.0}
LIMIT_BYTES = 2 * GIB
LENGTH = 2048


def case(shape: str, layers: int) -> dict[str, Any]:
    """One estimate, in this process alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, **{**SHAPES[shape], "num_hidden_layers": layers}
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    begin = time.perf_counter()
    found = ckptplan.estimate(model, {"input_ids": tokens, "labels": tokens}, optimizer="adamw", device="h100")
    return {
        "shape": shape,
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - begin,
        "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "needs_bytes": found.total_bytes,
        "peak_phase": found.peak_phase,
    }


def main() -> int:
    """Run the cases, print the table, say whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for estimate_large.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        shape, layers = args.case.split("/")
        print(json.dumps(case(shape, int(layers))))
        return 0
    rows = []
    table = Table("model", "layers", "parameters", "estimated in", "process", "needs", "limit")
    kept = True
    for shape, layers in CASES:
        command = [sys.executable, __file__, "--out", str(args.out), "--case", f"{shape}/{layers}"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(ran.stdout.splitlines()[-1])
        rows.append(row)
        limit = LIMIT_S.get((shape, layers))
        within = row["process_bytes"] <= LIMIT_BYTES and (limit is None or row["seconds"] <= limit)
        kept = kept and within
        table.add_row(
            f"Llama-3-{shape.upper()}" if limit else f"its layers ({shape})",
            str(layers),
            f"{row['parameters'] / 1e9:.2f}e9",
            f"{row['seconds']:.1f} s",
            format_bytes(row["process_bytes"]),
            format_bytes(row["needs_bytes"]),
            f"{'within' if within else 'OVER'} {limit:.0f} s, 2 GiB" if limit else "",
        )
    Console(width=120).print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"torch": torch.__version__, "length": LENGTH, "rows": rows}, indent=1)
    (args.out / "estimate_large.json").write_text(text + "\n", encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
