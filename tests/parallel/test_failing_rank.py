"""A rank that fails while it trains: every process ends soon, and the last line says which rank, in which stage."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SOON_S = 90.0


@pytest.mark.long
def test_every_process_ends() -> None:
    """Experiments/rank_faults.py has all ways, engines and sizes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("failing_rank.py")), "recompute"]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * SOON_S)
    assert time.monotonic() - begin < SOON_S  # with the start of three interpreters
    assert done.returncode != 0
    stage = done.stdout.split()[2]
    lines = [line.partition("ckptplan: ")[2] for line in done.stderr.splitlines() if "ckptplan: rank" in line]
    told = [f"rank 1 has failed: recompute of stage '{stage}' in backward: ValueError: no good values"]
    assert lines[:1] == told
    assert all(line.startswith("rank 0 has failed: ") for line in lines[1:])
