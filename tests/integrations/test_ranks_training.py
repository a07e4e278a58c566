"""The callbacks under torchrun, with two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_trainings_of_two_ranks() -> None:
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command.append(str(Path(__file__).with_name("ranks_training.py")))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    # By rank 0, before and after it plans for each training, and before it plans for a larger batch in one.
    assert done.stderr.count("ckptplan: ") == 2 * 5 + 1
