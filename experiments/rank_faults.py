"""Do all processes of a group end soon when one of them fails, and say which and where?

    python experiments/rank_faults.py --out experiments/results

Groups of two and four under torchrun, in `DistributedDataParallel` and sharded by `fully_shard`. The last rank fails in
the second step, in its forward, in a recompute, in a copy to the swap file, or by being killed; or it has less memory,
or another model, than the others when all plan. Held against that: every process ends within 30 seconds, the starts of
the interpreters included; the last rank's own line says the rank and the stage (a killed one says nothing), and for
what happens while planning, each rank says so; no process and no file is left.

Prints PASS or FAIL.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import documents
import psutil

SCRIPT = Path(__file__).parent.parent / "tests" / "parallel" / "failing_rank.py"
SOON_S = 30.0
STEP = "rank {last} has failed: {where} of stage '{stage}'"
WAYS = {
    "forward": STEP.replace("{where}", "forward"), "recompute": STEP.replace("{where}", "recompute"),
    "copy": "rank {last} has failed: copy out of stage ", "killed": "", "memory": "it is the budget of rank {last}",
    "model": "has another step than rank 0",
}  # fmt: skip
"""What fails -> what has to be said."""
PLANNING = ("memory", "model")


@dataclass(frozen=True)
class Row:
    """One group that failed."""

    engine: str
    ranks: int
    way: str
    took_s: float
    failed: bool
    said: str
    wanted: str
    said_by: int
    left: int

    @property
    def is_said(self) -> bool:
        """Whether what has to be said was, while planning by every rank."""
        return self.said_by >= (self.ranks if self.way in PLANNING else 1)


def _run(engine: str, ranks: int, way: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        begin = time.monotonic()
        done = subprocess.run(
            [*command, str(SCRIPT), way, engine, folder], capture_output=True, text=True, check=False, timeout=300
        )
        took_s = time.monotonic() - begin
        left = [p for p in psutil.process_iter(["cmdline"]) if str(SCRIPT) in (p.info["cmdline"] or [])]
        stage = next(iter(re.findall(r"acts in (\S+)", done.stdout)), "")
        wanted = WAYS[way].format(last=ranks - 1, stage=stage)
        lines = [
            line for line in done.stderr.splitlines()
            if ("Error: " in line if way in PLANNING else line.startswith("ckptplan: "))
        ]  # fmt: skip
        said = [line for line in lines if wanted in line]
        by = len({line.partition("]")[0] for line in said}) if way in PLANNING else len(said[:1])
        told = (said or lines or [""])[0].partition(": " if way in PLANNING else "ckptplan: ")[2]
        told = told.replace(folder, "FOLDER")
        return Row(
            engine, ranks, way, took_s, done.returncode != 0, told[:200], wanted, by if wanted else 1,
            len(left) + len(list(Path(folder).iterdir())),
        )  # fmt: skip


def main() -> None:
    parser = documents.parser(__doc__)
    given = parser.parse_args()
    rows = [_run(engine, ranks, way) for ranks in (2, 4) for engine in ("ddp", "fsdp") for way in WAYS]
    cells = [(row.engine, row.ranks, row.way, f"{row.took_s:.1f}", row.left, row.said) for row in rows]
    table = documents.table(("engine", "ranks", "what fails", "s", "left", "said"), cells)

    def names(wrong: list[Row]) -> str:
        return ", ".join(f"{row.engine} {row.ranks} {row.way}" for row in wrong) or "none"

    wrong = {
        "end without an error": [row for row in rows if not row.failed],
        f"take more than {SOON_S:.0f} s": [row for row in rows if row.took_s > SOON_S],
        "don't say who failed and where": [row for row in rows if not row.is_said],
        "leave a process or a file": [row for row in rows if row.left],
    }
    checks = [(not found, f"of {len(rows)} groups, these {what}: {names(found)}") for what, found in wrong.items()]
    documents.finish(rows, checks, table, given.out, "rank_faults.json")


if __name__ == "__main__":
    main()
