"""Every example runs as it stands, and prints what it says that it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PRINTED = {
    "plain_loop.py": ("plan by ckptplan", "5 training forwards"),
    "hugging_face.py": ("plan by ckptplan", "gradients bitwise equal"),
    "frontier.py": ("proven gap", "memory    binds", "drawn in"),
    "absent_device.py": ("on NVIDIA GeForce RTX 4090", "fits with everything kept", "plan by ckptplan"),
}
"""By example: text of its output, from its first print to its last."""


def test_every_example_is_tried() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example(name: str, tmp_path: Path) -> None:
    plot = tmp_path / "frontier.png"
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *([plot] if name == "frontier.py" else [])],
        cwd=tmp_path,
        # One thread each: on a busy machine several wait for each other many times as long as these models take.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    places = [ran.stdout.find(text) for text in PRINTED[name]]
    assert -1 not in places, ran.stdout
    assert places == sorted(places), ran.stdout
    assert plot.exists() == (name == "frontier.py")
