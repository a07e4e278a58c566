"""Storages say where they are made: the operation, the module, and the line of the model's code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.request import Training
from ckptplan.core.storage import Storage
from ckptplan.profiling.bytes.unfolding import Folding
from ckptplan.profiling.profiler import traced_bytes
from ckptplan.profiling.target import find_target
from ckptplan.training.step import make_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.down = nn.LayerNorm(32), Inner(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x)).sin()
        return x + self.down(y)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Linear(32, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.act(x)
        return y.exp() * torch.tensor(2.0)


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(16, 32), nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = block(x)
        return x.square()


def line(kind: type[nn.Module], number: int) -> str:
    """The text for a line of a forward, the `number`-th below its first."""
    return f"{Path(__file__).name}:{kind.forward.__code__.co_firstlineno + number}"


def traced(model: nn.Module, x: Any, **options: Any) -> ckptplan.Profile:
    return traced_bytes(make_step(model, Training(x, **options)), None, find_target(model))


def origins(profile: ckptplan.Profile, stage: str) -> list[str]:
    return [s.origin for s in profile.storages if s.name.startswith(f"{stage}/") and s.origin]


@pytest.mark.parametrize("depth", [3, 9])
def test_operation_module_and_line(depth: int, tmp_path: Path) -> None:
    model, x = Net(depth), torch.randn(50, 20, 16)
    step, target = make_step(model, Training(x)), find_target(model)
    found = traced_bytes(step, None, target)
    stages = tuple(stage.name for stage in found.stages if not stage.is_glue)
    assert Folding(step, stages, target).folds == (depth == 9)
    for k in range(depth):  # of a linear layer in front of tanh, nothing is held but tanh's result
        assert sorted(set(origins(found, f"blocks.{k}"))) == [
            f"aten.add in blocks.{k}, {line(Block, 2)}",
            f"aten.exp in blocks.{k}.inner, {line(Inner, 2)}",
            f"aten.lift_fresh in blocks.{k}.inner, {line(Inner, 2)}",
            f"aten.mul in blocks.{k}.inner, {line(Inner, 2)}",
            f"aten.native_layer_norm in blocks.{k}.norm, {line(Block, 1)}",
            f"aten.sin in blocks.{k}, {line(Block, 1)}",
            f"aten.tanh in blocks.{k}.inner.act.1, {line(Inner, 1)}",
        ]
    assert f"aten.tanh, {line(Net, 1)}" in origins(found, "(before blocks.0)")
    for storage in found.storages:
        made_by_no_operation = storage.born == -1 or storage.name.endswith("random state")
        assert (storage.origin == "") == made_by_no_operation, storage
    found.save(tmp_path / "profile.json")
    loaded = ckptplan.Profile.load(tmp_path / "profile.json")
    assert [s.origin for s in loaded.storages] == [s.origin for s in found.storages]


@pytest.mark.filterwarnings("ignore::UserWarning")  # from the compiler, as in `test_compile.py`
def test_compiled_code_has_no_operations() -> None:
    model = nn.Sequential(Inner(), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64))
    model[1].compile(backend="aot_eager")
    found = ckptplan.profile(model, torch.randn(100, 32), menus=False)
    assert set(origins(found, "1")) == {"compiled code in 1"}


def test_code_in_folders(tmp_path: Path) -> None:
    """Folders' names aren't given away, and don't make an origin longer; PyTorch's neighbours aren't PyTorch."""
    beside = os.path.dirname(torch.__file__) + "vision"
    for folder in (beside, str(tmp_path), f"/{'long' * 1000}"):
        names: dict[str, Any] = {"nn": nn, "torch": torch, "__name__": "net"}
        source = "class Net(nn.Sequential):\n def forward(self, x):\n  return super().forward(x).tanh()"
        exec(compile(source, f"{folder}/models/net.py", "exec"), names)
        found = traced(nn.Sequential(*(names["Net"](nn.Linear(16, 16)) for _ in range(3))), torch.randn(100, 16))
        assert set(origins(found, "1")) <= {"aten.tanh in 1, net.py:3", "aten.addmm in 1.0, net.py:3"}
        assert "aten.tanh in 1, net.py:3" in origins(found, "1")


def test_an_origin_is_compared_with_nothing() -> None:
    storage, other = (Storage("a/0", 8, 0, 0, origin=origin) for origin in ("", "aten.gelu in a, net.py:3"))
    assert storage == other
    assert hash(storage) == hash(other)
