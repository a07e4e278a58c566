"""The plugin for pytest, in runs of pytest of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
import torch
from torch import nn

def model(width=64):
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width))

DEVICE = {"device": "a100-40gb", "optimizer": "adamw"}

@pytest.fixture
def width():
    return 64

@pytest.mark.max_training_memory("10 GiB", **DEVICE)
def test_fits(width):
    return model(width), torch.zeros(8, width)

@pytest.mark.max_training_memory(0.0001, **DEVICE)
def test_is_too_large():
    return model(), torch.zeros(8, 64)

@pytest.mark.max_training_memory("10 GiB", **DEVICE)
def test_gives_nothing():
    pass

@pytest.mark.max_training_memory("50%", **DEVICE)
def test_limit():
    return model(), torch.zeros(8, 64)

@pytest.mark.max_training_memory(**DEVICE)
def test_no_limit():
    return model(), torch.zeros(8, 64)

@pytest.mark.max_training_memory("1 GiB")
async def test_waits():
    return None

def test_fixture(training_memory):
    found = training_memory(model(), torch.zeros(8, 64), **DEVICE)
    assert found.categories["weights"] > 0
"""

BASELINES = """
import pytest
import torch
from torch import nn

def made():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.zeros(64, 64)

baseline = pytest.mark.max_training_memory(baseline="memory.json", device="a100-40gb")

@baseline
def test_same():
    return made()

@baseline
def test_grown():
    return made()

@baseline
def test_new():
    return made()
"""


def run(folder: Path, *args: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *(args or ("-p", "no:xdist"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    if "ckptplan" not in _entry_points():
        command[3:3] = ["-p", "ckptplan.integrations.pytest_plugin"]  # a source tree that isn't installed
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    return done.stdout + done.stderr


def _entry_points() -> set[str]:
    from importlib.metadata import entry_points

    return {point.name for point in entry_points(group="pytest11")}


@pytest.mark.long
def test_limits_and_recorded_baselines(tmp_path: Path) -> None:
    (tmp_path / "test_baselines.py").write_text(BASELINES)
    assert "3 passed" in run(tmp_path, "--record-training-memory")
    path = tmp_path / "memory.json"
    recorded = json.loads(path.read_text())
    assert recorded.keys() == {f"test_baselines.py::{name}" for name in ("test_same", "test_grown", "test_new")}
    del recorded["test_baselines.py::test_new"]
    recorded["test_baselines.py::test_grown"] //= 2
    path.write_text(json.dumps(recorded))
    (tmp_path / "test_memory.py").write_text(TESTS)
    texts = {"first": "{", "second": "[]", "third": '{"test_same": "12"}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
        tests = BASELINES.partition("@baseline\ndef test_grown")[0].replace("memory.json", f"{name}.json")
        (tmp_path / f"test_{name}.py").write_text(tests)
    out = run(tmp_path)
    for test in ("test_memory.py::test_fits", "test_memory.py::test_fixture", "test_baselines.py::test_same"):
        assert f"PASSED {test}" in out, out
    for name in ("test_is_too_large", "test_gives_nothing", "test_limit", "test_no_limit", "test_waits"):
        assert f"FAILED test_memory.py::{name}" in out, out
    assert "more than the limit of 104.86 KiB" in out
    assert "weight" in out  # the tensors at the peak
    assert "a pair of a model and its inputs, this one gave NoneType" in out
    assert "a pair of a model and its inputs, this one gave coroutine" in out
    assert "the limit '50%' isn't a number of bytes" in out
    assert "needs a limit ('10 GiB') or a baseline" in out
    for name in texts:
        assert f"{name}.json can't be read" in out
    assert "100.0% more than the recorded" in out
    assert "if that is meant, record it" in out
    assert "memory.json has no bytes of test_baselines.py::test_new; record them" in out
    assert "Traceback" not in out


def test_baselines_are_recorded_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_memory.py").write_text(BASELINES)
    assert "run it in one process (-n 0)" in run(tmp_path, "--record-training-memory", "-n", "2")


def test_unused_it_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_nothing():\n    assert not {'torch', 'numpy', 'ortools'} & set(sys.modules)\n"
    )
    out = run(tmp_path)
    if "unrecognized" in out:
        pytest.fail(out)
    assert "1 passed" in out, out
