"""Twelve jobs of `ckptplan fit` and `ckptplan estimate` beside bytes worked out by hand from published layouts.

    python experiments/fit_jobs.py --out experiments/results

Shapes of 8 and 14 billion parameters, trained in full, with LoRA and with QLoRA, by a config, a TrainingArguments file
or an axolotl file, for devices of 24 to 80 GB, alone and sharded over 8. By hand are the weights, gradients, optimizer
state, what each block saves for backward, and what the loss has at its worst moment (see `Shape`): the tensors at the
peak. They are compared with the estimate's peak in tensors; what the allocator adds can't be worked out by hand. The
right verdict is that of these bytes and the context; of `fit`, "plan" if blocks that save their inputs alone fit.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import documents
import yaml
from typer.testing import CliRunner

from ckptplan.cli.app import app
from ckptplan.core.device import find_device
from ckptplan.core.estimate import Estimate, fits_in_words
from ckptplan.core.units import GIB


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's kind: untied embeddings, no biases, RMSNorm, SwiGLU, flash attention.

    Values that a block saves, per token, in bytes (bfloat16 unless said): both norms their input in float32; attention
    q, k, v, its output and a float32 sum per head; the MLP the gate, its SiLU and the other factor. If the weights are
    trained, also each norm's scaled value and the inputs of all products. With norms of q and k, these likewise.
    """

    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    head: int = 128
    qk_norms: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each product in a block."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, q), "k_proj": (self.hidden, kv), "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden), "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner), "down_proj": (self.inner, self.hidden),
        }  # fmt: skip

    @property
    def in_matrices(self) -> int:
        """Parameters in the products of all blocks."""
        return self.layers * sum(a * b for a, b in self.matrices.values())

    @property
    def norms(self) -> int:
        """Parameters of all norms."""
        return self.layers * (2 * self.hidden + 2 * self.head * self.qk_norms) + self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return 2 * self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.in_matrices + self.norms + self.embeddings

    def saved(self, *, trained: bool) -> int:
        """Bytes that a block saves per token, without adapters."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        of_norms = 2 * self.hidden + (q + kv) * self.qk_norms
        attention = 2 * (2 * q + 2 * kv) + 4 * self.heads
        if not trained:
            return 4 * of_norms + attention + 2 * 3 * self.inner
        return 6 * of_norms + 2 * 2 * self.hidden + attention + 2 * 4 * self.inner

    def adapters(self, targets: tuple[str, ...], rank: int) -> int:
        """Parameters of adapters."""
        return self.layers * sum(rank * sum(self.matrices[name]) for name in targets)

    def of_loss(self, tokens: int) -> int:
        """Bytes when backward begins: logits in bfloat16; softmax, its gradient, and that of its input in float32."""
        return (2 + 3 * 4) * self.vocabulary * tokens

    def config(self) -> dict[str, Any]:
        """As Hugging Face writes it."""
        name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.kind]
        return {
            "model_type": self.kind, "architectures": [name], "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions, "tie_word_embeddings": False, "dtype": "bfloat16",
        }  # fmt: skip


SHAPES = {
    "llama": Shape("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "qwen": Shape("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, qk_norms=True),
}
"""Meta, "The Llama 3 Herd of Models" (2024), table 3, and the config of Qwen/Qwen3-14B."""

Q_AND_V = ("q_proj", "v_proj")
ALL = tuple(SHAPES["llama"].matrices)


# --- by hand ---


def full(shape: Shape, tokens: int, *, state: Callable[[Shape], int], lists: bool = False) -> int:
    """All weights trained in bfloat16: the most at any moment of a step whose optimizer has its state.

    Backward goes from the loss to the first block; each block's saved bytes go and its gradients come.
    """
    weights = 2 * shape.parameters
    held = weights + state(shape)
    block = tokens * shape.saved(trained=True)
    at_loss = shape.layers * block + shape.of_loss(tokens)
    gradients = 2 * (shape.in_matrices + shape.norms) // shape.layers
    logits = 2 * shape.vocabulary * tokens
    behind = [
        logits + shape.embeddings + done * gradients + (shape.layers - done) * block for done in range(shape.layers + 1)
    ]
    update = weights * (2 if lists else 1)
    return held + max(at_loss, *behind, update)


def adamw_16(shape: Shape) -> int:
    """Two states in the weights' type."""
    return 2 * 2 * shape.parameters


def adamw_8_bits(shape: Shape) -> int:
    """A byte and a 256th of a float32 for each state; those of the embedding in float32."""
    quantized = shape.parameters - shape.embeddings // 2
    return 2 * (quantized + 4 * quantized // 256) + 2 * 4 * shape.embeddings // 2


def lora(shape: Shape, tokens: int, targets: tuple[str, ...], rank: int) -> int:
    """Adapters in float32 on frozen weights: each layer saves its input and its middle in autocast's type."""
    adapters = shape.adapters(targets, rank)
    saved = shape.saved(trained=False) + sum(2 * (shape.matrices[name][0] + rank) for name in targets)
    return 2 * shape.parameters + 12 * adapters + shape.layers * tokens * saved + shape.of_loss(tokens)


def qlora(
    shape: Shape, tokens: int, rank: int, dropout: bool, adapter_bytes: int, *, checkpointed: bool = False
) -> int:
    """4-bit weights: half a byte, and for 64 values a byte and a 256th of a float32. The rest stays in bfloat16.

    Adapters of all layers save the norms' outputs once each and the MLP's product; with dropout each saves its own
    input and a mask of a byte. `adapter_bytes` are those of a weight, its gradient and its state. Checkpointed blocks
    save their inputs, and one of them is run again.
    """
    packed = shape.in_matrices // 2 + shape.in_matrices // 64 + 4 * shape.in_matrices // (64 * 256)
    weights = packed + 2 * (shape.embeddings + shape.norms)
    inputs = [shape.matrices[name][0] for name in ALL]
    saved = shape.saved(trained=False) + 2 * rank * len(ALL)
    saved += 3 * sum(inputs) if dropout else 2 * (2 * shape.hidden + shape.inner)
    adapters = shape.adapters(ALL, rank)
    of_blocks = shape.layers * 2 * shape.hidden + saved if checkpointed else shape.layers * saved
    return weights + adapter_bytes * adapters + tokens * of_blocks + shape.of_loss(tokens)


def sharded(shape: Shape, tokens: int, ranks: int) -> int:
    """FSDP2 under accelerate: float32 weights and two states over the ranks; gathered in bfloat16 are the outermost

    unit (embedding, head, last norm), which stays, and the unit that runs with the next.
    """
    block = 2 * (shape.in_matrices + shape.norms) // shape.layers
    gathered = 2 * shape.embeddings + 2 * block
    saved = shape.layers * tokens * shape.saved(trained=True) + shape.of_loss(tokens)
    return 12 * shape.parameters // ranks + gathered + saved


# --- jobs ---


@dataclass(frozen=True)
class Job:
    """A command, its file, and the bytes by hand: with everything kept, and of `fit` with checkpointed blocks."""

    name: str
    shape: str
    command: str
    device: str
    kept_bytes: int
    options: tuple[str, ...] = ()
    trainer: dict[str, Any] | None = None
    axolotl: dict[str, Any] | None = None
    checkpointed_bytes: int = 0

    @property
    def expected(self) -> str:
        """The verdict of the bytes by hand."""
        device = find_device(self.device)
        if self.command == "estimate":
            return fits_in_words(self.kept_bytes + device.context_bytes, device.memory_bytes) or "does NOT fit"
        fits = fits_in_words(self.kept_bytes, device.usable_bytes)
        return fits or ("plan" if self.checkpointed_bytes <= device.usable_bytes else "needs")


TRAINER = {"per_device_train_batch_size": 1, "bf16": True}
AXOLOTL = {
    "load_in_4bit": True, "adapter": "qlora", "lora_r": 16, "lora_target_linear": True, "bf16": "auto",
    "optimizer": "paged_adamw_8bit", "micro_batch_size": 1, "gradient_accumulation_steps": 4, "flash_attention": True,
    "gradient_checkpointing": True,
}  # fmt: skip
LLAMA, QWEN = SHAPES["llama"], SHAPES["qwen"]
LORA = ("--lora", "r=16,targets=q_proj,v_proj", "--amp", "bfloat16")
JOBS = [
    Job("8B, full, Trainer's defaults", "llama", "estimate", "a100-80gb", full(LLAMA, 2048, state=adamw_16),
        ("--seq", "2048"), trainer=TRAINER),
    Job("8B, full, Trainer's defaults", "llama", "fit", "a100-40gb", full(LLAMA, 2048, state=adamw_16),
        ("--seq", "2048"), trainer=TRAINER, checkpointed_bytes=2 * 2 * LLAMA.parameters + adamw_16(LLAMA)),
    Job("8B, full, adamw_torch", "llama", "estimate", "a100-80gb", full(LLAMA, 2048, state=adamw_16, lists=True),
        ("--seq", "2048"), trainer=TRAINER | {"optim": "adamw_torch"}),
    Job("8B, full, adamw_8bit", "llama", "estimate", "a100-80gb", full(LLAMA, 1024, state=adamw_8_bits),
        ("--seq", "1024"), trainer=TRAINER | {"optim": "adamw_8bit"}),
    Job("14B, full, adamw_8bit", "qwen", "estimate", "a100-80gb", full(QWEN, 1024, state=adamw_8_bits),
        ("--seq", "1024"), trainer=TRAINER | {"optim": "adamw_8bit"}),
    Job("8B, LoRA", "llama", "estimate", "a100-40gb", lora(LLAMA, 2048, Q_AND_V, 16),
        (*LORA, "--seq", "2048")),
    Job("14B, LoRA", "qwen", "estimate", "a100-80gb", lora(QWEN, 2048, Q_AND_V, 16),
        (*LORA, "--seq", "2048")),
    Job("8B, QLoRA, axolotl", "llama", "estimate", "rtx4090", qlora(LLAMA, 1024, 16, False, 8),
        axolotl=AXOLOTL | {"sequence_len": 1024}),
    Job("8B, QLoRA with dropout, axolotl", "llama", "fit", "rtx4090", qlora(LLAMA, 2048, 16, True, 8),
        axolotl=AXOLOTL | {"sequence_len": 2048, "lora_dropout": 0.05},
        checkpointed_bytes=qlora(LLAMA, 2048, 16, True, 8, checkpointed=True)),
    Job("14B, QLoRA as with TRL", "qwen", "estimate", "rtx4090", qlora(QWEN, 512, 16, False, 12),
        ("--lora", "r=16,targets=all-linear,bits=4,upcast=no", "--amp", "bfloat16", "--seq", "512")),
    Job("8B over 8, Trainer's defaults", "llama", "estimate", "a100-40gb", sharded(LLAMA, 2048, 8),
        ("--fsdp", "8", "--seq", "2048"), trainer=TRAINER),
    Job("14B over 8, Trainer's defaults", "qwen", "fit", "a100-80gb", sharded(QWEN, 2048, 8),
        ("--fsdp", "8", "--seq", "2048"), trainer=TRAINER),
]  # fmt: skip


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Run a job's command; return what it says beside what is worked out by hand."""
    config = folder / "config.json"
    config.write_text(json.dumps(SHAPES[job.shape].config()))
    command = [job.command, "--device", job.device, *job.options]
    if job.axolotl is None:
        command += ["--config", str(config)]
    else:
        (folder / "axolotl.yaml").write_text(yaml.safe_dump(job.axolotl | {"base_model": str(config)}))
        command += ["--axolotl", str(folder / "axolotl.yaml")]
    if job.trainer is not None:
        (folder / "arguments.json").write_text(json.dumps(job.trainer))
        command += ["--training-arguments", str(folder / "arguments.json")]
    written = folder / "estimate.json"
    command += ["--json", str(written)] if job.command == "estimate" else []
    found = CliRunner().invoke(app, command, catch_exceptions=False)
    if found.exit_code:
        raise RuntimeError(f"{' '.join(command)}: {found.output}")
    row: dict[str, Any] = {
        "job": job.name, "command": job.command, "device": job.device, "by_hand_bytes": job.kept_bytes,
        "expected": job.expected,
    }  # fmt: skip
    if job.command == "fit":
        lines = [re.split(r"\s{2,}", line.strip()) for line in found.stdout.splitlines()]
        verdict = next(cells[2] for cells in lines if cells[0] == job.device)
        says = verdict if verdict.startswith("fits") else verdict.partition(" ")[0]
        return row | {"verdict": verdict, "right": says == job.expected}
    estimated = Estimate.load(written)
    return row | {
        "peak_bytes": estimated.peak_bytes, "needs_bytes": estimated.total_bytes,
        "error": estimated.peak_bytes / job.kept_bytes - 1, "verdict": estimated.verdict,
        "right": estimated.verdict == job.expected,
    }  # fmt: skip


def main() -> int:
    """Run the jobs, print the table, say whether the limits hold."""
    parser = documents.parser(__doc__)
    parser.add_argument("--only", type=documents.numbers, default=list(range(len(JOBS))), help="jobs, from 0 on")
    args = parser.parse_args()
    known = args.out and args.out / "fit_jobs.json"
    rows: dict[str, Any] = json.loads(known.read_text()) if known and known.exists() else {}
    for number in args.only:
        with tempfile.TemporaryDirectory() as folder:
            rows[str(number)] = run(JOBS[number], Path(folder))
    cells = [
        (row["job"], row["command"], row["device"], f"{row['by_hand_bytes'] / GIB:.2f}",
         *(f"{row[name] / GIB:.2f}" if name in row else None for name in ("peak_bytes", "needs_bytes")),
         f"{row['error']:+.1%}" if "error" in row else None,
         row["verdict"] if row["right"] else f"{row['verdict']}, not {row['expected']}")
        for row in rows.values()
    ]  # fmt: skip
    columns = ("job", "command", "device", "by hand", "estimate", "needs", "error", "verdict")
    documents.show(documents.table(columns, cells))
    within = all(abs(row.get("error", 0)) <= 0.03 for row in rows.values())
    kept = documents.told([
        (within, "each estimate within 3 % of the bytes by hand"),
        (all(row["right"] for row in rows.values()), "each verdict is that of the bytes by hand"),
    ])  # fmt: skip
    if known:
        known.write_text(json.dumps({n: rows[n] for n in sorted(rows, key=int)}, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
