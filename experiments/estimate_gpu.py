"""estimate() and the allocator's model against a real CUDA device: allocated, reserved, and recorded histories.

For every model of `gpu_suite.py`, without a plan and with one, two real training steps with AdamW run in a process of
their own. Compared are the peaks of allocated and reserved bytes with `ckptplan.estimate`, and the reserved peak with
what the allocator's model makes of the very history that the device recorded, which tests the model alone.

    python experiments/estimate_gpu.py --out experiments/results

On a machine without CUDA `--device cpu --small` tries the script; reserved bytes and histories are left out then.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_suite import MODELS, build
from rich.console import Console
from rich.table import Table

import ckptplan
from ckptplan.core.units import GIB, format_bytes
from ckptplan.memory.snapshot import replay_snapshot
from ckptplan.runtime.phases import measure_phases
from ckptplan.runtime.step import make_step

_WITHIN = 0.03
_ENTRIES = 2_000_000


def two_steps(model: torch.nn.Module, inputs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Training as `estimate` means it."""
    for _ in range(2):
        output = model(**inputs)
        loss = output.loss
        loss.backward()
        del output, loss
        optimizer.step()
        optimizer.zero_grad()


def case(name: str, planned: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One model, measured and estimated, in this process alone."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=_ENTRIES, stacks="python")
    model, inputs = build(name, args.small, device)
    plan = None
    if planned:
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        profile = ckptplan.profile(model, inputs)
        ends = ckptplan.frontier(profile, points=2, time_limit_s=args.time_limit)
        middle = (ends[0].peak_bytes + ends[-1].peak_bytes) // 2
        plan = ckptplan.solve(profile, middle / GIB, time_limit_s=args.time_limit)
    found = ckptplan.estimate(model, inputs, optimizer="adamw", plan=plan)
    optimizer = torch.optim.AdamW(model.parameters())
    out: dict[str, Any] = {
        "model": name,
        "planned": planned,
        "estimated_allocated_bytes": found.peak_bytes,
        "estimated_reserved_bytes": found.reserved_bytes,
    }
    handle = None if plan is None else ckptplan.apply(model, plan)
    if device.type == "cpu":
        measured = measure_phases(make_step(model, inputs), optimizer)
        out["allocated_bytes"] = max(phase.peak_bytes for phase in measured.phases)
        return out
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    two_steps(model, inputs, optimizer)
    torch.cuda.synchronize()
    out["allocated_bytes"] = torch.cuda.max_memory_allocated()
    out["reserved_bytes"] = torch.cuda.max_memory_reserved()
    out["device"] = torch.cuda.get_device_name()
    if not planned:  # recorded from the first allocation on
        replayed = replay_snapshot(torch.cuda.memory._snapshot())
        out["replayed_relative_error"] = replayed.relative_error
    if handle is not None:
        handle.remove()
    return out


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Signed relative errors of a row, by what is compared."""
    out = {}
    for what in ("allocated", "reserved"):
        if f"{what}_bytes" in row:
            out[what] = row[f"estimated_{what}_bytes"] / row[f"{what}_bytes"] - 1
    if "replayed_relative_error" in row:
        out["history"] = row["replayed_relative_error"]
    return out


def main() -> int:
    """Run every case in a process of its own, print the table, say whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for estimate_gpu.json")
    parser.add_argument("--models", default=MODELS, help="comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--time-limit", type=float, default=4.0, help="seconds for each plan")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("estimate_gpu: no CUDA device here; try the script with --device cpu --small", file=sys.stderr)
        return 2
    if args.case:
        name, planned = args.case.split("/")
        print(json.dumps(case(name, planned == "planned", args)))
        return 0
    rows = []
    table = Table("model", "plan", "allocated", "estimated", "error", "reserved", "estimated", "error", "history")
    for name in args.models.split(","):
        for planned in ("plain", "planned"):
            command = [sys.executable, __file__, *sys.argv[1:], "--case", f"{name}/{planned}"]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if ran.returncode:
                rows.append({"model": name, "planned": planned == "planned", "failed": ran.returncode})
                table.add_row(name, planned, f"failed ({ran.returncode})")
                continue
            row = json.loads(ran.stdout.splitlines()[-1])
            rows.append(row)
            error = errors(row)
            table.add_row(
                name,
                planned,
                format_bytes(row["allocated_bytes"]),
                format_bytes(row["estimated_allocated_bytes"]),
                f"{error['allocated']:+.2%}",
                format_bytes(row["reserved_bytes"]) if "reserved_bytes" in row else "",
                format_bytes(row["estimated_reserved_bytes"]) if "reserved_bytes" in row else "",
                f"{error['reserved']:+.2%}" if "reserved" in error else "",
                f"{error['history']:+.2%}" if "history" in error else "",
            )
    Console(width=120).print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"torch": torch.__version__, "device": args.device, "small": args.small, "rows": rows}, indent=1)
    (args.out / "estimate_gpu.json").write_text(text + "\n", encoding="utf-8")
    wrong = [row for row in rows if "failed" in row or any(abs(e) > _WITHIN for e in errors(row).values())]
    print(f"{'FAIL' if wrong else 'PASS'}  within {_WITHIN:.0%}: {len(rows) - len(wrong)} of {len(rows)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
