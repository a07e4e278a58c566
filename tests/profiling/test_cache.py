"""Profiles from the cache: found for an equal step alone."""

from __future__ import annotations

import copy
import itertools
import os
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert import modeling_bert

import ckptplan
from ckptplan.core.request import Training
from ckptplan.profiling import cache, cache_key, profiler
from ckptplan.profiling.cache_key import NoKeyError, key_of
from ckptplan.profiling.target import find_target
from ckptplan.runtime.step import make_step

SCALE = 2.0
TABLE = {"add": 1.0}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def scaled_otherwise(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE * 1


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __add__(self, more: float) -> float:
        return self.rate + more


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.settings = Settings(0.5)
        self.rate = 0.5

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x)) + TABLE["add"]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inner = getattr(self, "inner")  # noqa: B009
        return x + Doubled.apply(inner(x)) * mask * (self.settings + 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x.tanh()


class Case:
    """A step that a test changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Net().train()
        self.inputs: dict[str, Any] = {"x": torch.randn(4, 16), "mask": torch.ones(4, 16, dtype=torch.long)}
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        self.options: dict[str, Any] = {}
        self.menus = True

    def key(self) -> str:
        training = Training.of(self.options, self.inputs)
        target = find_target(self.model)
        step = make_step(self.model, training).under(training.amp, "cpu")
        return key_of(step, self.optimizer, target, None, self.menus, ())


def of_factor(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.sum() * factor


def with_group(case: Case, **settings: Any) -> None:
    case.optimizer.param_groups[0].update(settings)


def in_forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x + self.linear(x) * mask


CHANGES: dict[str, Callable[[Case, pytest.MonkeyPatch], Any]] = {
    "attribute of a module": lambda case, patch: setattr(case.model.blocks[1], "rate", 0.25),
    "attribute of an object": lambda case, patch: setattr(case.model.blocks[1].settings, "rate", 0.25),
    "method of a class": lambda case, patch: patch.setattr(Block, "inner", in_forward),
    "operator of an object": lambda case, patch: patch.setattr(Settings, "__add__", lambda self, more: self.rate),
    "backward of a function": lambda case, patch: patch.setattr(
        Doubled, "backward", staticmethod(lambda ctx, gradient: gradient + gradient)
    ),
    "attribute of a class": lambda case, patch: patch.setattr(nn.Linear, "scale", 2, raising=False),
    "forward of one module": lambda case, patch: setattr(
        case.model.blocks[1], "forward", types.MethodType(in_forward, case.model.blocks[1])
    ),
    "function that forward calls": lambda case, patch: patch.setitem(globals(), "scaled", scaled_otherwise),
    "global number": lambda case, patch: patch.setitem(globals(), "SCALE", 3.0),
    "global table": lambda case, patch: patch.setitem(TABLE, "add", 2.0),
    "enclosed number": lambda case, patch: case.options.update(loss_fn=of_factor(3.0)),
    "setting of the optimizer": lambda case, patch: with_group(case, amsgrad=True),
    "kind of optimizer": lambda case, patch: setattr(case, "optimizer", torch.optim.SGD(case.model.parameters())),
    "autocast": lambda case, patch: case.options.update(amp="bfloat16"),
    "shape of an input": lambda case, patch: case.inputs.update(x=torch.randn(8, 16), mask=torch.ones(8, 16).long()),
    "type of an input": lambda case, patch: case.inputs.update(mask=torch.ones(4, 16, dtype=torch.int)),
    "values of a mask": lambda case, patch: case.inputs["mask"].__setitem__((0, 0), 0),
    "frozen parameter": lambda case, patch: case.model.blocks[0].linear.weight.requires_grad_(False),
    "gradients from before": lambda case, patch: case.options.update(accumulate=True),
    "training flag": lambda case, patch: case.model.eval(),
    "tied weights": lambda case, patch: setattr(
        case.model.blocks[0].linear, "weight", case.model.blocks[1].linear.weight
    ),
    "hook": lambda case, patch: case.model.blocks[0].register_forward_hook(lambda module, args, y: y * 2),
    "hook on a weight": lambda case, patch: case.model.blocks[0].linear.weight.register_hook(lambda g: g * 2),
    "menus": lambda case, patch: setattr(case, "menus", False),
    "threads": lambda case, patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "precision of products": lambda case, patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    "attention kernels": lambda case, patch: patch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: "other"),
    "determinism": lambda case, patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "other"),
    "version of PyTorch": lambda case, patch: patch.setattr(torch, "__version__", "99.0"),
    "this package": lambda case, patch: patch.setattr(cache_key, "_own_files", lambda: "other"),
    "environment": lambda case, patch: patch.setenv("SOME_SWITCH", "1"),
    "method in PyTorch": lambda case, patch: patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
    "function in PyTorch": lambda case, patch: patch.setattr(nn.functional, "gelu", lambda x: x * 2),
}


def case() -> Case:
    made = Case()
    made.options["loss_fn"] = of_factor(2.0)
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_thing_gives_another_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, changed = case().key(), case()
    assert changed.key() == before
    CHANGES[change](changed, monkeypatch)
    assert changed.key() != before


def test_values_of_weights_and_inputs_leave_the_key() -> None:
    before, changed = case().key(), case()
    with torch.no_grad():
        for p in changed.model.parameters():
            p.mul_(2)
    changed.inputs["x"] = torch.randn(4, 16)
    assert changed.key() == before
    changed.model = copy.deepcopy(changed.model)
    changed.optimizer = torch.optim.AdamW(changed.model.parameters())
    assert changed.key() == before


def bert() -> Case:
    made = Case()
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    made.model = BertModel(config).train()
    made.inputs, made.optimizer = {"input_ids": torch.randint(50, (2, 8), generator=torch.Generator())}, None
    return made


def of_the_user(*args: Any, **kwargs: Any) -> Any:
    return args


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: setattr(model.config, "hidden_dropout_prob", 0.2),
        lambda model, patch: patch.setattr(modeling_bert.BertLayer, "forward", of_the_user),
        lambda model, patch: patch.setattr(modeling_bert, "eager_attention_forward", of_the_user),
        lambda model, patch: modeling_bert.ALL_ATTENTION_FUNCTIONS.register("sdpa", of_the_user),
        lambda model, patch: patch.setattr(sys.modules["transformers"], "__version__", "0.0"),
    ],
    ids=["configuration", "method", "function", "registry", "version"],
)
def test_changes_of_a_librarys_model(
    change: Callable[[Any, pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, changed = bert().key(), bert()
    assert changed.key() == before
    registered = dict(modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping)
    try:
        change(changed.model, monkeypatch)
        assert changed.key() != before
    finally:
        modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping.clear()
        modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping.update(registered)


@pytest.mark.parametrize(
    "held",
    [
        iter([1]), itertools.count(), random.Random(1), torch.Generator(), {object()}, (i for i in range(3)),
        torch.ones(2).to_sparse(),
    ],
    ids=lambda held: type(held).__name__,
)  # fmt: skip
def test_steps_without_a_key(held: Any) -> None:
    changed = case()
    changed.model.held = held
    with pytest.raises(NoKeyError, match="it has"):
        changed.key()


def test_no_key_for_operators_of_any_code_and_under_modes() -> None:
    changed = case()
    changed.options["loss_fn"] = lambda y: torch.ops.aten.sum(y)
    with pytest.raises(NoKeyError, match=r"torch\.ops"):
        changed.key()
    plain = case()
    for mode in (torch.autograd.graph.save_on_cpu(), torch.device("meta")):
        with mode, pytest.raises(NoKeyError, match="a mode of PyTorch's, or a hook on saved tensors"):
            plain.key()


# --- files ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each profile that is measured."""
    found: list[int] = []
    original = profiler._profile
    monkeypatch.setattr(profiler, "_profile", lambda *args: found.append(1) or original(*args))
    return found


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).train(), torch.randn(32, 64)


def test_an_equal_step_is_measured_once(folder: Path, measured: list[int]) -> None:
    first = ckptplan.profile(*small())
    again = ckptplan.profile(*small())
    assert len(measured) == 1
    assert again.notes[0].startswith("from the cache, measured on 20")
    assert (again.stages, again.storages, again.link) == (first.stages, first.storages, first.link)
    model, x = small()
    plan = ckptplan.solve(model, 1.0, inputs=x)
    assert len(measured) == 1
    assert ckptplan.verify(model, plan, x, repeats=1).gradients_equal
    ckptplan.profile(*small(), cache=False)
    assert len(measured) == 2
    ckptplan.solve(model, 1.0, inputs=x, cache=False)
    assert len(measured) == 3
    model[0].bias.requires_grad_(False)
    ckptplan.profile(model, x)
    assert len(measured) == 4


def test_what_depends_on_values_or_chance_is_not_stored(folder: Path, measured: list[int]) -> None:
    class Reading(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if y.sum().item() > 1e9 else y

    class Skipping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x) if random.random() < 2 else x
            return x

    for kind in (Reading, Skipping):
        for _ in range(2):
            ckptplan.profile(kind(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64))
    assert len(measured) == 4
    assert not list(folder.glob("*.json"))


def test_a_damaged_file_is_replaced(folder: Path, measured: list[int]) -> None:
    ckptplan.profile(*small())
    (path,) = folder.glob("*.json")
    path.write_text(path.read_text()[:100])
    ckptplan.profile(*small())
    assert len(measured) == 2
    assert ckptplan.profile(*small()).notes[0].startswith("from the cache")


def test_a_folder_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: list[int]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPTPLAN_CACHE", str(tmp_path / "file" / "inside"))
    for _ in range(2):
        ckptplan.profile(*small())
    assert len(measured) == 2


def test_the_profiles_unused_for_longest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ckptplan.profile(*small(), cache=False)
    cache.put("a", profile)
    size = (folder / "a.json").stat().st_size
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * size + size // 2)
    cache.put("b", profile)
    for age, name in enumerate("ba"):
        os.utime(folder / f"{name}.json", (1000 + age, 2000))
    assert cache.find("b") is not None  # used now
    cache.put("c", profile)
    assert sorted(path.name for path in folder.iterdir()) == ["b.json", "c.json"]


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTPLAN_CACHE", "Off")
    assert cache.folder() is None
    assert cache.find("a") is None
    monkeypatch.delenv("CKPTPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "ckptplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "ckptplan"
