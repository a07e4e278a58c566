"""A second training finds its profiles in the cache, in another process as in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_second_training_finds_its_profiles(tmp_path: Path) -> None:
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CKPTPLAN_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    for arguments in ([], ["found"]):
        command = [sys.executable, str(Path(__file__).with_name("second_training.py")), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
