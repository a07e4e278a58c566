"""Does a full fine-tuning of Llama 3 70B fit on 8, 16 or 32 H100s, at what batch, with what plan and slowdown?

    python experiments/sharded_large.py --out experiments/results

Every answer is the command line's own: `ckptplan fit` with the model's config, sharded by FSDP2 for ranks that aren't
here, AdamW, 4096 tokens; units are the layers, the embedding and the head. Weights, gradients and optimizer state are
in float32 and gathered in bfloat16, or all in bfloat16. Counted are the seconds and the largest resident memory of the
whole command.

Prints PASS or FAIL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import documents
from estimate_large import SHAPES
from rich.console import Console
from rich.table import Table

from ckptplan.core.units import GIB, format_bytes

LENGTH = 4096
CASES = [(weights, ranks) for weights in ("float32", "bfloat16") for ranks in (8, 16, 32)]
MOST_S = 60.0
MOST_BYTES = 4 * GIB
UNITS = "LlamaDecoderLayer+model.embed_tokens+lm_head"


@dataclass(frozen=True)
class Row:
    """One answer: the printed lines, and what the command took."""

    weights: str
    ranks: int
    needs: str
    answer: str
    command: str
    seconds: float
    resident_bytes: int


def ask(weights: str, ranks: int) -> Row:
    """Run the command in a process of its own."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "use_cache": False, "dtype": weights, **SHAPES["70b"],
    }  # fmt: skip
    words = [
        "ckptplan", "fit", "--config", "config.json", "--seq", str(LENGTH), "--batch", "1", "--optimizer", "adamw",
        "--fsdp", f"{ranks},units={UNITS},param_dtype=bfloat16,reduce_dtype=float32", "--device", "h100",
    ]  # fmt: skip
    inside = f"import sys; sys.argv = {words}; from ckptplan.cli.app import app; app()"
    measured = (
        f"import resource, subprocess, sys; done = subprocess.run([sys.executable, '-c', {inside!r}]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); sys.exit(done.returncode)"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", measured], cwd=folder, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - begin
    *lines, resident = done.stdout.splitlines()
    needs = next(line for line in lines if "needs" in line and "everything kept" in line)
    answer = next(line for line in lines if line.strip().startswith("h100"))
    shown = (" ".join(line.split()) for line in (needs, answer))
    return Row(weights, ranks, *shown, " ".join(words), round(seconds, 1), int(resident))


def table(rows: Sequence[Row]) -> Table:
    found = Table("weights", "ranks", "needs", "on an h100", "seconds", "resident")
    for row in rows:
        found.add_row(
            row.weights, str(row.ranks), row.needs, row.answer, f"{row.seconds:.1f}", format_bytes(row.resident_bytes)
        )
    return found


def checks(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """The limits, and whether each is kept."""
    slowest, largest = max(row.seconds for row in rows), max(row.resident_bytes for row in rows)
    fits = {(row.weights, row.ranks): " plan +" in row.answer or " fits " in row.answer for row in rows}
    return [
        (not fits["float32", 8], "8 ranks can't hold 16 bytes of each of 70.6e9 parameters, and it is said"),
        (not fits["bfloat16", 8] and fits["bfloat16", 32] and fits["float32", 32], "32 ranks hold what 8 don't"),
        (all(row.answer.startswith("h100 78.79 GiB") for row in rows), "each answer has the device's memory"),
        (slowest <= MOST_S, f"the slowest answer took {slowest:.1f} s, of {MOST_S:.0f}"),
        (largest <= MOST_BYTES, f"the largest process had {format_bytes(largest)}, of {format_bytes(MOST_BYTES)}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    rows = []
    for weights, ranks in CASES:
        rows.append(ask(weights, ranks))
        print(rows[-1], flush=True)
    documents.finish(rows, checks(rows), table(rows), Console(width=220), given.out, "sharded_large.json")


if __name__ == "__main__":
    main()
