"""Hosts that switch the planning on by a file or a flag: the same bits, within the budget, with something planned.

axolotl, ms-swift and torchtitan aren't installed with the tests. Here are the parts of them that call what is written
for them, with the names and arguments that their sources had in autumn 2026: axolotl/integrations/base.py,
swift/callbacks/base.py, swift/callbacks/mapping.py and torchtitan/distributed/activation_checkpoint.py (0.3). Where a
host is installed, its own are compared with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import yaml
from pydantic import ValidationError
from test_lightning import assert_same as assert_same_modules
from test_lightning import fit
from test_transformers import assert_as_before, assert_same, trained
from torch import nn
from transformers import TrainerCallback

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.integrations.lightning import ActivationPlanner
from ckptplan.integrations.transformers import ActivationPlanCallback
from ckptplan.runtime.handle import Handle, handle_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # Lightning's own


PLUGINS = "axolotl", "swift", "torchtitan"


class BasePlugin:
    """axolotl's."""

    def register(self, cfg: dict[str, Any]) -> None: ...
    def get_input_args(self) -> str | None: ...
    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


class SwiftCallback(TrainerCallback):
    """ms-swift's."""

    def __init__(self, args: Any, trainer: Any) -> None:
        self.args = args
        self.trainer = trainer


class ActivationCheckpointing:
    """torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Its options, which make it."""

        owner: ClassVar[Any] = None
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False

        def build(self, **given: Any) -> Any:
            return self.owner(config=self, **given)

    def __init_subclass__(cls) -> None:
        cls.Config.owner = cls

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config
        self.dump_folder = dump_folder

    def apply(self, model: nn.Module) -> None: ...


class Missing(dict[str, Any]):
    """axolotl's `DictDefault`: what isn't there is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The hosts' modules, in place of theirs, and ms-swift's table of callbacks."""
    table: dict[str, Any] = {}
    modules = {
        "axolotl": {}, "axolotl.integrations": {}, "axolotl.integrations.base": {"BasePlugin": BasePlugin},
        "swift": {}, "swift.callbacks": {"TrainerCallback": SwiftCallback, "callbacks_map": table},
        "torchtitan": {}, "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": {"ActivationCheckpointing": ActivationCheckpointing},
    }  # fmt: skip
    if importlib.util.find_spec("torchtitan"):
        modules = {name: contents for name, contents in modules.items() if not name.startswith("torchtitan")}
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for name in PLUGINS:
        monkeypatch.delitem(sys.modules, f"ckptplan.integrations.{name}", raising=False)
    yield table
    for name in PLUGINS:
        sys.modules.pop(f"ckptplan.integrations.{name}", None)


def by_axolotl(file: Path) -> list[TrainerCallback]:
    """The callbacks that axolotl gives its trainer for a configuration."""
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    plugins = []
    for name in given["plugins"]:
        module, _, found = name.rpartition(".")
        plugins.append(getattr(importlib.import_module(module), found)())
    for plugin in plugins:
        plugin.register(given)
        module, _, found = plugin.get_input_args().rpartition(".")
        keys = getattr(importlib.import_module(module), found)
        given |= keys(**given).model_dump(exclude_none=True)
    cfg = Missing({k: Missing(v) if isinstance(v, dict) else v for k, v in given.items()})
    return [callback for plugin in plugins for callback in plugin.add_callbacks_post_trainer(cfg, None)]


def by_swift(table: dict[str, Any], name: str) -> list[TrainerCallback]:
    """The callbacks of ms-swift's `--external_plugins` and `--callbacks`."""
    found = importlib.util.find_spec("ckptplan.integrations.swift")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location("swift_plugin", found.origin)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return [table[name](None, None)]


def budget_of(plain: Any, share: float) -> str:
    """A share of the bytes of a training without a plan."""
    return f"{int(share * max(plain.peaks))}B"


AXOLOTL = """
base_model: some/llama
sequence_len: 24
micro_batch_size: 4
gradient_checkpointing: true
plugins:
  - ckptplan.integrations.axolotl.CkptPlanPlugin
ckptplan:
  budget: {budget}
  time_limit_s: 0.2
"""


@pytest.mark.parametrize("host", ["axolotl", "ms-swift", "LLaMA-Factory"])
@pytest.mark.long(but=["axolotl"])
def test_trainers_are_planned(
    tmp_path: Path, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    plain = trained(tmp_path / "plain")
    budget = budget_of(plain, 0.85)
    if host == "axolotl":
        file = tmp_path / "config.yaml"
        file.write_text(AXOLOTL.format(budget=budget), encoding="utf-8")
        callbacks = by_axolotl(file)
    elif host == "ms-swift":
        monkeypatch.setenv("CKPTPLAN_BUDGET", budget)
        monkeypatch.setenv("CKPTPLAN_OPTIONS", '{"time_limit_s": 0.2}')
        callbacks = by_swift(hosts, "ckptplan")
    else:
        callbacks = [ActivationPlanCallback(budget=budget, time_limit_s=0.2)]  # run_exp(callbacks=[...])
    found = trained(tmp_path / host, *callbacks, options={"activation_checkpointing": True})
    assert_same(plain, found)
    assert_as_before(found)
    assert max(found.peaks[1:]) <= 0.85 * max(plain.peaks)  # type: ignore[attr-defined]
    (callback,) = callbacks
    assert isinstance(callback, ActivationPlanCallback)
    assert callback.handle is not None
    stats = callback.handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("ckptplan: {budget: 20 parsecs}", "can't be read"),
        ("ckptplan: {budgets: 20GiB}", "did you mean 'budget'"),
        ("ckptplan: 20GiB", "valid dictionary"),
    ],
)
def test_axolotl_refuses_a_file_when_it_is_read(tmp_path: Path, hosts: dict[str, Any], keys: str, says: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"plugins: [ckptplan.integrations.axolotl.CkptPlanPlugin]\n{keys}\n", encoding="utf-8")
    with pytest.raises(ValidationError, match=says):
        by_axolotl(file)


def test_axolotl_without_the_key_has_what_the_device_has_free(tmp_path: Path, hosts: dict[str, Any]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("plugins: [ckptplan.integrations.axolotl.CkptPlanPlugin]\n", encoding="utf-8")
    (callback,) = by_axolotl(file)
    assert isinstance(callback, ActivationPlanCallback)
    assert str(callback._wanted) == "the device's free memory"


@pytest.mark.parametrize("options", ["{offload: all}", '["all"]'])
def test_options_of_the_environment_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    monkeypatch.setenv("CKPTPLAN_BUDGET", "50%")
    monkeypatch.setenv("CKPTPLAN_OPTIONS", options)
    with pytest.raises(InvalidInputError, match=r"\$CKPTPLAN_OPTIONS=.* JSON"):
        L.Trainer(accelerator="cpu", logger=False)


def planners(trainer: L.Trainer) -> list[ActivationPlanner]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ActivationPlanner)]  # type: ignore[attr-defined]


def test_lightning_is_planned_where_the_environment_names_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, trainer = fit(tmp_path)
    assert planners(trainer) == []
    monkeypatch.setenv("CKPTPLAN_BUDGET", budget_of(plain, 0.93))
    monkeypatch.setenv("CKPTPLAN_OPTIONS", '{"time_limit_s": 0.2}')
    module, trainer = fit(tmp_path)
    assert_same_modules(plain, module)
    assert max(module.peaks[1:]) <= 0.93 * max(plain.peaks)
    (planner,) = planners(trainer)
    assert planner.handle is not None
    stats = planner.handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0


@pytest.mark.long
def test_a_planner_of_ones_own_goes_before_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPLAN_BUDGET", "1B")  # in which nothing fits
    own = ActivationPlanner(1.0, time_limit_s=0.2)
    _, trainer = fit(tmp_path, own)
    assert own.handle is not None
    assert [planner.handle for planner in planners(trainer) if planner is not own] == [None]


class Decoder(nn.Module):
    """Shaped as torchtitan's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
                for i in range(4)
            }
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + layer(x)
        found: torch.Tensor = self.output(x)
        return found


def by_torchtitan(config: Any = None) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model made as torchtitan's trainer makes it, and the losses and parameters of three steps."""
    with torch.device("meta"):
        model = Decoder()
    if config is not None:
        config.build(dump_folder="").apply(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for _ in range(3):
        tokens = torch.randint(64, (8, 32))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return model, [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.usefixtures("hosts")
def test_torchtitan_takes_a_plan_file(tmp_path: Path) -> None:
    policy = importlib.import_module("ckptplan.integrations.torchtitan").CkptPlanAC
    _, plain = by_torchtitan()
    file = tmp_path / "plan.json"

    def trained_by(**given: Any) -> Handle:
        asked = {"budget": "50%", "optimizer": "adamw", "plan_file": str(file)}
        options = {"time_limit_s": 0.2, "actions": ("keep", "recompute")}
        model, found = by_torchtitan(policy.Config(**asked, options=options, **given))
        assert all(map(torch.equal, found, plain))
        handle = handle_of(model)
        assert handle is not None
        assert handle.stats().recomputed_stages > 0
        return handle

    made = trained_by()
    assert made.stats().differences == {}
    written = file.read_text(encoding="utf-8")
    assert replace(trained_by().plan, asked="") == made.plan
    assert file.read_text(encoding="utf-8") == written
    assert trained_by(accumulate=True).plan.fingerprint.accumulates
    assert file.read_text(encoding="utf-8") != written
    fresh = Decoder()
    optimizer = torch.optim.AdamW(fresh.parameters())
    found = ckptplan.verify(fresh, made.plan, inputs={"tokens": torch.randint(64, (8, 32))}, optimizer=optimizer)
    assert 0.95 * made.plan.peak_bytes < found.measured_peak_bytes <= made.plan.budget_bytes


@pytest.mark.usefixtures("hosts")
def test_torchtitan_refuses_what_it_cannot_go_by(tmp_path: Path) -> None:
    policy = importlib.import_module("ckptplan.integrations.torchtitan").CkptPlanAC
    for given, says in (
        ({"debug": True}, "debug=True is for torchtitan's own"),
        ({"budget": "20 parsecs"}, "can't be read"),
        ({"options": {"budgets": 1}}, "did you mean 'budget'"),
        ({"plan_file": str(tmp_path)}, "can't be read"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            by_torchtitan(policy.Config(**given))


INTERFACES: dict[str, Callable[..., Any]] = {
    "axolotl.integrations.base:BasePlugin.get_input_args": BasePlugin.get_input_args,
    "axolotl.integrations.base:BasePlugin.add_callbacks_post_trainer": BasePlugin.add_callbacks_post_trainer,
    "swift.callbacks:TrainerCallback.__init__": SwiftCallback.__init__,
    "torchtitan.distributed.activation_checkpoint:ActivationCheckpointing.__init__": ActivationCheckpointing.__init__,
    "torchtitan.distributed.activation_checkpoint:ActivationCheckpointing.apply": ActivationCheckpointing.apply,
}


@pytest.mark.parametrize("name", INTERFACES)
def test_an_installed_host_calls_what_is_written_here(name: str) -> None:
    module, _, path = name.partition(":")
    found: Any = pytest.importorskip(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == list(inspect.signature(INTERFACES[name]).parameters)
