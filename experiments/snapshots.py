"""`ckptplan snapshot` on histories of real devices: recorded peaks, and what other settings would have reserved.

    CKPTPLAN_HISTORIES=FOLDER python experiments/snapshots.py --out experiments/results

The folder has histories in the form that `tests/histories.py` describes. Each is written as the pickle that
`torch.cuda.memory._dump_snapshot` would have written, and given to the command. Fails unless the command's peaks are
the recorded ones and every device replays exactly. The result has names of files, numbers of devices, and figures.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from documents import command, environment, write
from rich.console import Console
from rich.table import Table

from ckptplan.core.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from histories import load_history, snapshot_from  # noqa: E402

SETTINGS = ("expandable_segments", "max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")


def explained(snapshot: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """The command's figures for each device, and its seconds, the interpreter's start included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        path.write_bytes(pickle.dumps(snapshot))
        begin = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-m", "ckptplan.cli", "snapshot", str(path), "--json", "-"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(ran.stdout)["devices"], time.perf_counter() - begin


def row(name: str, recorded: dict[str, Any], found: dict[str, Any], seconds: float) -> dict[str, Any]:
    alternatives = found["alternatives"]
    best = {}
    for setting in SETTINGS:
        tried = [a for a in alternatives if a["change"].startswith(setting) and a["reserved_peak_bytes"] is not None]
        if tried:
            least = min(tried, key=lambda a: a["reserved_peak_bytes"])
            best[setting] = {k: least[k] for k in ("change", "reserved_peak_bytes", "checked")}
    return {
        "file": name,
        "device": found["device"],
        "entries": found["entries"],
        "seconds": seconds,
        "exact": found["exact"],
        "recorded_peak_bytes": recorded["recorded_peak_reserved"],
        "reserved_peak_bytes": found["reserved_peak_bytes"],
        "allocated_peak_bytes": found["allocated_peak_bytes"],
        "peaks_equal": [found[f"{name}_peak_bytes"] for name in ("reserved", "allocated", "requested")]
        == [recorded[name] for name in ("recorded_peak_reserved", "peak_allocated", "peak_requested")],
        "fragment_bytes": found["at_peak"]["fragment_bytes"],
        "unused_bytes": found["at_peak"]["unused_bytes"],
        "settings": found["settings"],
        "same_settings_afresh_bytes": alternatives[0]["reserved_peak_bytes"],
        "best": best,
        "advice": None if found["advice"] is None else found["advice"]["conf"],
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("history", "device", box=None)
    for column in (
        "recorded",
        "snapshot",
        "fragments",
        "unused",
        "afresh",
        "expandable",
        "max split",
        "divisions",
        "gc",
    ):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in rows:
        cells = [one[k] for k in ("recorded_peak_bytes", "reserved_peak_bytes", "fragment_bytes", "unused_bytes")]
        cells.append(one["same_settings_afresh_bytes"])
        for setting in SETTINGS:
            best = one["best"].get(setting)
            # Where it was recorded with expandable segments, the column has that without.
            cells.append(None if best is None else best["reserved_peak_bytes"])
        shown.add_row(one["file"], str(one["device"]), *("–" if cell is None else format_bytes(cell) for cell in cells))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for snapshots.json")
    options = parser.parse_args()
    folder = os.environ.get("CKPTPLAN_HISTORIES")
    if not folder:
        parser.error("CKPTPLAN_HISTORIES names no folder with histories")
    rows = []
    for path in sorted(Path(folder).glob("*.json.gz")):
        history = load_history(path)
        devices, seconds = explained(snapshot_from(history))
        for recorded, found in zip(history["devices"], devices, strict=True):
            rows.append(row(path.name.removesuffix(".json.gz"), recorded, found, seconds))
    right = sum(one["peaks_equal"] and one["exact"] for one in rows)
    Console(width=180, highlight=False).print(table(rows))
    print(f"{right} of {len(rows)} devices: reserved, allocated and requested peaks as recorded, replayed exactly")
    print("expandable, max split, divisions, gc: the best value of each; max split, divisions and gc are modelled, not")
    print("checked against a device; recorded with expandable segments, the column expandable has it without")
    write({"command": command(), "environment": environment(1), "devices": rows}, options.out / "snapshots.json")
    return 0 if rows and right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
