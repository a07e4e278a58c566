"""The commands of the first run on a GPU, in the smallest size on the CPU, and the rivals that they measure."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.gpu import __main__ as command  # noqa: E402
from experiments.gpu import measure, show  # noqa: E402
from experiments.gpu.results import OutOfTime, Results, Skipped  # noqa: E402
from experiments.rivals import NotHere, rivals  # noqa: E402


def call(out: Path, *words: str) -> int:
    return command.main([*words, "--out", str(out), "--device", "cpu", "--small", "--cases", "toy", "--one-process"])


@contextlib.contextmanager
def without_ortools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
            without.delitem(sys.modules, name)
        without.setitem(sys.modules, "ortools", None)
        yield


@pytest.mark.long
def test_the_commands_exchange_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_ortools(monkeypatch):
        assert call(tmp_path, "profile") == 0
        assert call(tmp_path, "measure", "--rivals") == 0
    assert call(tmp_path, "solve", "--time-limit", "0.3") == 0
    with without_ortools(monkeypatch):
        assert call(tmp_path, "measure", "--plans") == 0
    results = Results(tmp_path)
    assert list(show.complaints(results, ["toy"])) == []
    rival = results.ok("measure/toy/rival.hf")
    group = results.ok("measure/toy/plans.hf")
    assert rival is not None
    assert group is not None
    assert set(group["contenders"]) == {"keep", "hf", "ckptplan.hf", "ckptplan.hf-tighter"}
    assert group["contenders"]["ckptplan.hf"]["target_bytes"] == rival["contenders"]["hf"]["peaks"]["judged_bytes"]
    for name in ("ckptplan.hf", "ckptplan.hf-tighter"):
        found = group["contenders"][name]
        assert found["peaks"]["judged_bytes"] <= found["target_bytes"]
        assert len(found["times"]["step_s"]) == 3
        assert found["stats"]["recomputed_stages"] + found["stats"]["swapped_out_bytes"] > 0
    bits = results.ok("measure/toy/bitwise")
    assert bits is not None
    assert all(found["equal"] for found in bits["plain_again"])
    assert all(found["equal"] for plan in bits["plans"].values() for found in plan["steps"])
    cell = {cell["plan"]: cell for cell in show.cells(results, ["toy"])}["ckptplan.uniform"]
    assert cell["rival_peak_bytes"] >= cell["peak_bytes"]
    assert cell["interval"][0] <= cell["ratio"] <= cell["interval"][1]

    # What is there isn't measured again; what is asked for again is.
    before = {path: path.read_text() for path in tmp_path.rglob("*.json")}
    assert call(tmp_path, "measure", "--plans") == 0
    assert {path: path.read_text() for path in tmp_path.rglob("*.json")} == before
    assert call(tmp_path, "table", "--json", str(tmp_path / "copy.json")) == 0
    assert json.loads((tmp_path / "copy.json").read_text())["cases"]["toy"]["measure"]["plans.hf"]["status"] == "ok"
    assert "ckptplan.hf-tighter" in (tmp_path / "table.txt").read_text()


@pytest.fixture
def _kernels_as_before() -> Iterator[None]:
    """A case with deterministic kernels turns them on for its process."""
    fill, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.deterministic = cudnn


@pytest.mark.usefixtures("_kernels_as_before")
@pytest.mark.long
def test_bits_of_plans_made_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which the case sets; put back behind the test
    words = ("--out", str(tmp_path), "--device", "cpu", "--small", "--cases", "bits-llama", "--one-process")
    assert command.main(["profile", *words]) == 0
    assert command.main(["measure", "--rivals", *words]) == 0
    results = Results(tmp_path)
    bits = results.ok("measure/bits-llama/bitwise")
    assert bits is not None
    assert set(bits["plans"]) == set(measure.MIXES)
    for plan in bits["plans"].values():
        assert plan["stats"]["swapped_out_bytes"] > 0
        assert plan["stats"]["recomputed_stages"] > 0
        assert all(found["equal"] for found in plan["steps"])
    assert list(show.complaints(results, ["bits-llama"])) == []

    # With kernels that differ from run to run, ours may be as far from plain as plain is from itself, and no further.
    def step(distance: float) -> dict[str, Any]:
        return {"equal": not distance, "distance": distance}

    plain = [step(d) for d in (0.0, 1e-3, 2e-3)]
    assert not show.further([step(d) for d in (1e-3, 2e-3, 3e-3)], plain)
    assert show.further([step(d) for d in (1e-3, 3e-3, 3e-3)], plain)
    assert show.further([step(1e-9)], [step(0.0)])


def test_the_probe_says_what_it_can_here(tmp_path: Path) -> None:
    from experiments.gpu.probe import Probe

    probe = Probe(torch.device("cpu"), small=True)
    results = Results(tmp_path)
    for name in ("versions", "gradient_sums", "launch", "workspaces", "batch_norm"):
        results.run(name, getattr(probe, name))
    assert results.ok("versions") is not None
    assert results.read("workspaces") is not None
    assert results.read("workspaces")["status"] == "skipped"  # type: ignore[index]
    sums = results.ok("gradient_sums")
    assert sums is not None
    assert any(operation.startswith("aten.add") for operation, _ in sums["operations"])


def test_a_failure_is_a_result_and_nothing_is_begun_after_the_deadline(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("on purpose")

    def left_out() -> dict[str, Any]:
        raise Skipped("not here")

    results = Results(tmp_path)
    assert results.run("a", fails) is None
    assert results.run("b", left_out) is None
    assert results.run("c", lambda: {"value": 1}) is not None
    found = dict(results.under(""))
    assert [data["status"] for data in found.values()] == ["failed", "skipped", "ok"]
    assert "on purpose" in found["a"]["error"]
    assert results.run("a", lambda: {}) is None
    assert Results(tmp_path, again=True).run("a", lambda: {}) is not None
    with pytest.raises(OutOfTime):
        Results(tmp_path, deadline=0).run("d", lambda: {})
    results.write("e", {"status": "running"})
    results.close_running("the process ended with exit code -11")
    assert results.read("e") == {"status": "failed", "error": "the process ended with exit code -11"}


# --- rivals ---


class Tied(nn.Module):
    """Views of one storage, an input saved twice, dropout, a parameter that saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            a, b = layer(x).chunk(2, -1)
            y = torch.cat([torch.sin(a) * b, torch.cos(b.t()).t()], -1)
            x = x + nn.functional.dropout(y, 0.1) * y
        return x.square().mean()


def gradients(model: nn.Module, forward: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    forward().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["keep", "offload"])
def test_a_rival_leaves_the_plain_gradients(name: str) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(32, 64)
    wanted = gradients(model, lambda: model(x))
    enter = rivals()[name].enter
    with enter(model, lambda: model(x), **({"least_bytes": 1024} if name == "offload" else {})) as forward:
        for _ in range(3):
            assert all(map(torch.equal, gradients(model, forward), wanted))


@pytest.mark.parametrize("name", ["hf", "hf/offload", "selective", "remat", "remat/attention"])
def test_a_rival_by_block_leaves_the_plain_gradients(name: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, use_cache=False
    )
    model, tokens = LlamaForCausalLM(config).train(), torch.randint(64, (2, 16))

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    wanted = gradients(model, forward)
    modules = [(type(module), "forward" in vars(module)) for module in model.modules()]
    try:
        with rivals(path="model.layers")[name].enter(model, forward) as changed:
            for _ in range(2):
                assert all(map(torch.equal, gradients(model, changed), wanted))
    except NotHere as error:
        pytest.skip(str(error))
    assert [(type(module), "forward" in vars(module)) for module in model.modules()] == modules
