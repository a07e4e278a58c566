"""Trainings of 8 and 12 billion parameters on devices that aren't here, with each kind of `offload=`.

    python experiments/absent_devices.py --out experiments/results
    python experiments/absent_devices.py --only "lora 2k,flux lora" --time-limit 5

Jobs: a model of Llama 3's 8 billion parameters in bfloat16, with LoRA (rank 16 on all linear layers, float32, under
autocast) at 1 x 2048, 8192 and 32768 tokens, and in full, all in bfloat16, with AdamW and with Adafactor, at 2048; and
a diffusion transformer of FLUX.1's 12 billion, with LoRA (rank 16 on the attention), for one image of 1024 x 1024. All
are built on `meta`, and the optimizer's state counts (AdamW's for LoRA). Devices: an RTX 4090, an A100 40 GB and an
H100, each with its own memory, less CUDA's context, as the budget.

Each plan is what `ckptplan.solve` finds for a profile from fake tensors, with times from a roofline. Its slowdown is
that over everything kept on the same device. Bytes are those of tensors: what the caching allocator adds isn't in
them. The smallest peak is one of a step; "loaded" are the bytes of the weights, which have to be on the device once
before the first step, whatever may leave it later. A budget below either gives "needs".

Beside them is the arithmetic of uniform block swapping, as trainers offer it, for frozen weights. L layers are
recomputed as wholes, all but the last are moved, and each comes back while the one before it runs. With W_i the bytes
of the frozen weights of layer i, t_i the seconds of its copy, f_i, b_i and r_i those of its forward, backward and
recompute, and P and T the peak and the step of the plan that recomputes every layer (`ckptplan.simulate`):

    peak = P - sum(W_i for i < L - 2)
    step = T + sum(max(0, t_(i+1) - f_i) for i < L - 2) + sum(max(0, t_(i-1) - r_i - b_i) for 0 < i < L)

So the weights of two layers count at the peak. Adapters stay, and nothing but copies takes time beside compute. In full
fine-tuning the update has all weights, so it has no such line. The line below it is the plan with `offload="all"` whose
budget is that peak, so the two slowdowns are at equal bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import documents

from ckptplan.core.units import GIB, format_bytes

SCHEMA = "ckptplan.absent_devices/1"
DEVICES = ("rtx4090", "a100-40gb", "h100")
LORA, FULL = ("activations", "weights", "all"), ("activations", "weights", "optimizer", "all")
BLOCKS, AS_SMALL = "block swapping", "all, within its peak"
TIME_LIMIT_S = 10.0


@dataclass(frozen=True)
class Case:
    """A training on `meta`."""

    model: Any
    inputs: dict[str, Any]
    offloads: Sequence[str]
    amp: str | None = None
    loss_fn: Callable[[Any], Any] | None = None
    optimizer: str = "adamw"


def llama(tokens: int, *, lora: bool, optimizer: str = "adamw") -> Case:
    """Meta, "The Llama 3 Herd of Models" (2024), table 3."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=500000.0, max_position_embeddings=32768, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train()
        if lora:
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    ids = torch.zeros(1, tokens, dtype=torch.long)
    amp = "bfloat16" if lora else None
    return Case(model, {"input_ids": ids, "labels": ids}, LORA if lora else FULL, amp, optimizer=optimizer)


def flux() -> Case:
    """The config of black-forest-labs/FLUX.1-dev: 19 double and 38 single blocks of width 3072."""
    import torch
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16).train()
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    half = {"dtype": torch.bfloat16}
    inputs = {
        "hidden_states": torch.zeros(1, 4096, 64, **half), "encoder_hidden_states": torch.zeros(1, 512, 4096, **half),
        "pooled_projections": torch.zeros(1, 768, **half), "timestep": torch.full((1,), 0.5, **half),
        "guidance": torch.ones(1), "img_ids": torch.zeros(4096, 3), "txt_ids": torch.zeros(512, 3),
    }  # fmt: skip
    return Case(model, inputs, LORA, "bfloat16", lambda output: output.sample.float().square().mean())


CASES: dict[str, Callable[[], Case]] = {
    "lora 2k": lambda: llama(2048, lora=True),
    "lora 8k": lambda: llama(8192, lora=True),
    "lora 32k": lambda: llama(32768, lora=True),
    "full 2k": lambda: llama(2048, lora=False),
    "full 2k adafactor": lambda: llama(2048, lora=False, optimizer="adafactor"),
    "flux lora": flux,
}


def profiles(case: Case) -> tuple[dict[str, Any], int]:
    """The profile for each device, one trace for those that need the same bytes; and the bytes of the weights."""
    from ckptplan.core.device import find_device
    from ckptplan.core.request import Training
    from ckptplan.memory.estimate import TrainingBytes
    from ckptplan.profiling.profiler import planned_profiles, training_step
    from ckptplan.profiling.target import find_target

    groups: dict[Any, list[Any]] = {}
    for name in DEVICES:
        groups.setdefault(find_target(case.model, name).byte_class, []).append(find_device(name))
    found: dict[str, Any] = {}
    loaded = 0
    for devices in groups.values():
        target = find_target(case.model, devices[0])
        training = Training(inputs=case.inputs, loss_fn=case.loss_fn, optimizer=case.optimizer, amp=case.amp)
        step, _ = training_step(case.model, training, target)
        made = planned_profiles(step, case.optimizer, target, devices, menus=True)
        found |= {device.name: profile for device, profile in zip(devices, made, strict=True)}
        loaded = max(loaded, TrainingBytes(case.model, target, training).loaded_bytes(step))
    return found, loaded


def block_swapping(profile: Any) -> tuple[int, float]:
    """The peak, and the slowdown over everything kept, of the arithmetic above."""
    import ckptplan

    layers = [i for i, s in enumerate(profile.stages) if re.search(r"\.\d+$", s.name) and s.find("recompute")]
    decisions = tuple(ckptplan.Decision("recompute" if i in layers else "keep") for i in range(len(profile.stages)))
    every = ckptplan.simulate(profile, decisions)
    weights = dict.fromkeys(layers, 0)
    for resident in profile.residents:
        if resident.kind == "weights" and not resident.trained and resident.users and resident.users[0] in weights:
            weights[resident.users[0]] += resident.nbytes
    stages = [profile.stages[i] for i in layers]
    nbytes, copy_s = list(weights.values()), [profile.link.in_s(n) for n in weights.values()]
    again_s = [stage.backward_s + stage.find("recompute").recompute_s for stage in stages]
    last = len(stages) - 1
    waits_s = sum(max(0.0, copy_s[i + 1] - stages[i].forward_s) for i in range(last - 1))
    waits_s += sum(max(0.0, copy_s[i - 1] - again_s[i]) for i in range(1, last + 1))
    return every.peak_bytes - sum(nbytes[: last - 1]), (every.makespan_s + waits_s) / profile.baseline_step_s - 1


def planned(profile: Any, offload: str, budget_bytes: int, time_limit_s: float) -> dict[str, Any]:
    """The plan for a device, or what it needs."""
    import ckptplan
    from ckptplan.core.errors import InfeasibleBudgetError

    begin = time.perf_counter()
    options: dict[str, Any] = {"offload": offload, "time_limit_s": time_limit_s}
    found: dict[str, Any]
    try:
        plan = ckptplan.solve(profile, budget_bytes / GIB, **options)
    except InfeasibleBudgetError as error:
        found = {"needs_bytes": error.min_peak_bytes}
    else:
        found = {"slowdown": plan.overhead, "gap": plan.gap, "peak_bytes": plan.peak_bytes, "between": plan.between}
    return {**found, "budget_bytes": budget_bytes, "seconds": round(time.perf_counter() - begin, 1)}


def smallest(profile: Any, offload: str, time_limit_s: float) -> int:
    """The smallest peak found."""
    from ckptplan.core.request import Limits
    from ckptplan.planning.job import Job
    from ckptplan.solving.peak import smallest_peak

    limits = Limits.of({"offload": offload, "time_limit_s": time_limit_s})
    return smallest_peak(Job.of(profile, limits).leanest.profile, limits).peak_bytes


def row(item: tuple[str, float]) -> dict[str, Any]:
    """All that is found of a job."""
    from ckptplan.core.device import find_device
    from ckptplan.solving.frontier import everything_kept_bytes

    name, time_limit_s = item
    case = CASES[name]()
    begin = time.perf_counter()
    found, loaded = profiles(case)
    first = found[DEVICES[0]]
    out: dict[str, Any] = {
        "job": name, "parameters": sum(p.numel() for p in case.model.parameters()), "stages": len(first.stages),
        "loaded_bytes": loaded, "everything_kept_bytes": everything_kept_bytes(first),
        "profile_s": round(time.perf_counter() - begin, 1), "offloads": {},
    }  # fmt: skip
    for offload in case.offloads:
        cells = {d: planned(found[d], offload, find_device(d).usable_bytes, time_limit_s) for d in DEVICES}
        peaks = [cell.get("peak_bytes", cell.get("needs_bytes")) for cell in cells.values()]
        least = min(smallest(first, offload, time_limit_s), *peaks)
        out["offloads"][offload] = {"smallest_bytes": least, "devices": cells}
    if "optimizer" not in case.offloads:
        cells = {}
        for device in DEVICES:
            peak, slowdown = block_swapping(found[device])
            fits = peak <= find_device(device).usable_bytes
            cells[device] = {"slowdown": slowdown, "peak_bytes": peak} if fits else {"needs_bytes": peak}
        least = block_swapping(first)[0]
        out["offloads"][BLOCKS] = {"smallest_bytes": least, "devices": cells}
        cells = {d: planned(found[d], "all", block_swapping(found[d])[0], time_limit_s) for d in DEVICES}
        out["offloads"][AS_SMALL] = {"smallest_bytes": least, "devices": cells}
    return out


def in_words(cell: dict[str, Any], loaded: int, budget_bytes: int) -> str:
    """Slowdown and gap, or what is needed."""
    if loaded > budget_bytes:
        return f"needs {format_bytes(loaded)} loaded"
    if "needs_bytes" in cell:
        return f"needs {format_bytes(cell['needs_bytes'])}"
    gap = f", {cell['gap']:.1%}" if "gap" in cell else ""
    return f"{max(cell['slowdown'], 0):+.1%}{gap}"


def lines(found: dict[str, Any]) -> list[tuple[str, ...]]:
    from ckptplan.core.device import find_device

    budgets = {name: find_device(name).usable_bytes for name in DEVICES}
    return [
        (
            found["job"], format_bytes(found["everything_kept_bytes"]), format_bytes(found["loaded_bytes"]), offload,
            format_bytes(cell["smallest_bytes"]),
            *(in_words(cell["devices"][name], found["loaded_bytes"], budgets[name]) for name in DEVICES),
        )
        for offload, cell in found["offloads"].items()
    ]  # fmt: skip


def checks(rows: list[dict[str, Any]]) -> list[documents.Check]:
    """What more may move makes no peak larger, and no plan exceeds its budget."""
    broken = [
        f"{r['job']}, {offload}, {name}"
        for r in rows
        for offload, found in r["offloads"].items()
        for name, cell in found["devices"].items()
        if "budget_bytes" in cell and cell.get("peak_bytes", 0) > cell["budget_bytes"]
    ]
    larger = [
        r["job"]
        for r in rows
        if r["offloads"]["all"]["smallest_bytes"] > 1.001 * r["offloads"]["activations"]["smallest_bytes"]
    ]
    return [
        (not broken, f"every plan is within its budget; not: {'; '.join(broken) or 'none'}"),
        (not larger, f'"all" has the smaller peak, up to 0.1 % of search; not: {", ".join(larger) or "none"}'),
    ]


COLUMNS = ("job", "everything kept", "loaded", "offload", "smallest peak", *DEVICES)


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--only", type=documents.among(CASES), default=list(CASES))
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each search")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = []
    for (name, _), found in documents.in_processes(row, [(n, args.time_limit) for n in args.only], jobs=args.jobs):
        if not isinstance(found, dict):
            failed.append((False, f"{name}: {found}"))
            continue
        rows.append(found)
        for line in lines(found):
            print(" | ".join(line), flush=True)
    rows.sort(key=lambda r: list(CASES).index(r["job"]))
    table = documents.table(COLUMNS, [line for found in rows for line in lines(found)])
    documents.finish(rows, [*failed, *checks(rows)], table, args.out, "absent_devices.json", schema=SCHEMA)


if __name__ == "__main__":
    main()
