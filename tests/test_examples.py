"""Every example runs as it stands, and prints what it says that it prints."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

ROOT = Path(__file__).parent.parent

PRINTED = {
    "plain_loop.py": ("plan by ckptplan", "gradients bitwise equal", "5 training forwards"),
    "frontier.py": ("proven gap", "memory    binds", "written to"),
    "trainer.py": ("ckptplan: ", " stages: peak", "5 forwards under it"),
    "lightning_loop.py": ("ckptplan: ", " stages: peak", "5 forwards under it"),
    "accelerate_loop.py": ("plan by ckptplan", "8 training forwards"),
    "absent_device.py": ("on NVIDIA GeForce RTX 4090", "fits with everything kept", "plan by ckptplan"),
}
"""By example: text of its output, from its first print to its last."""


def test_every_example_is_tried() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(PRINTED)


@pytest.mark.usefixtures("short_search")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.long(but=["plain_loop.py", "trainer.py"])
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "frontier.html"
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)  # which is the process's
    monkeypatch.setattr(sys, "argv", [name, *([str(page)] if name == "frontier.py" else [])])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out = capsys.readouterr().out
    places = [out.find(text) for text in PRINTED[name]]
    assert -1 not in places, out
    assert places == sorted(places), out
    assert page.exists() == (name == "frontier.py")
