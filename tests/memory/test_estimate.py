"""estimate() against the CPU allocator's own events, and against what can be counted by hand."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from equal_layers import Layers
from measured_phases import assert_measured, measure_phases
from small_models import Transformer, build, plan_of
from torch import nn
from toy_modules import Lambda, Residual, times

import ckptplan
from ckptplan import DDP, InvalidInputError, estimate
from ckptplan.core.estimate import CATEGORIES
from ckptplan.core.request import Limits, Training
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling.bytes import unfolding
from ckptplan.profiling.target import find_target
from ckptplan.solving import smallest_peak
from ckptplan.training.step import make_step

TRAINING = ["loaded", "forward", "backward", "optimizer", "forward 2", "backward 2", "optimizer 2"]

MODELS = ["conv_norm", "tied", "nested", "recurrent", "views", "custom_function", "complex_valued"]
"""One for each way of saving tensors; `tied` is a Transformer."""


def transformer(depth: int, *, tied: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer(depth, tied=tied).train(), torch.randint(0, 50, (4, 32))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long("tied")
def test_every_phase_is_what_the_allocator_counts(name: str) -> None:
    model, inputs = build(name)
    found = estimate(model, inputs, optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    assert_measured(found, model, inputs, torch.optim.AdamW(model.parameters(), foreach=False))


@pytest.mark.parametrize(
    ("name", "action"),
    [("transformer", "keep"), ("conv_norm", "recompute"), ("transformer", "recompute"), ("unet", "swap")],
)
@pytest.mark.long(but=["transformer-recompute"])
def test_plans(name: str, action: Any) -> None:
    model, inputs = transformer(2) if name == "transformer" else build(name)
    measured = ckptplan.profile(model, inputs, menus=False)
    plan = plan_of(measured, [action] * len(measured.stages))
    found = estimate(model, inputs, plan=plan, optimizer="momentum")
    with ckptplan.apply(model, plan):
        assert_measured(found, model, inputs, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if action == "keep":
        assert plan.peak_bytes == estimate(model, inputs, plan=plan).peak_bytes == estimate(model, inputs).peak_bytes


def numbers(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Operations with numbers, of which autograd saves some as tensors of 8 bytes that no hook sees."""
    for layer in model.layers:
        x = layer(x * 3.0).div_(2) + 1
        x = torch.maximum(x / 7, torch.remainder(1 - x, 2.5)).mul_(1.5)
        x = torch.div(x * 2, 3.0, rounding_mode="floor") + x.detach() * 5.0
    return x


def test_numbers_that_autograd_saves() -> None:
    model, inputs = Lambda(numbers, layers=times(3, lambda: nn.Linear(4, 4))), torch.randn(2, 4)
    found = estimate(model, inputs)
    assert_measured(found, model, inputs, None)
    measured = ckptplan.profile(model, inputs, menus=False)
    kept, again = (plan_of(measured, [action] * len(measured.stages)) for action in ("keep", "recompute"))
    assert kept.peak_bytes >= found.peak_bytes
    found = estimate(model, inputs, plan=again)
    with ckptplan.apply(model, again):
        real = measure_phases(make_step(model, Training(inputs))).phases
    # When a stage has run again, its number is freed with the graph, before the next operation.
    assert all(0 <= found.phase(p.name).peak_bytes - p.peak_bytes <= 8 for p in real)


def test_gradients_that_stay() -> None:
    model, inputs = transformer(1, tied=True)
    found = estimate(model, inputs, optimizer="momentum", set_to_none=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert_measured(found, model, inputs, optimizer, set_to_none=False)


def test_autocast_and_its_cache_of_cast_weights() -> None:
    model, inputs = transformer(2, tied=True)
    found = estimate(model, inputs, optimizer="sgd", amp="bfloat16")
    assert_measured(found, model, inputs, torch.optim.SGD(model.parameters(), lr=0.1), amp=torch.bfloat16)


def test_categories_add_up_in_every_phase() -> None:
    model, inputs = build("unet")
    for device in (None, "a100-40gb"):
        found = estimate(model, inputs, optimizer="adamw", device=device)
        for phase in found.phases:
            assert set(phase.categories) <= set(CATEGORIES)
            assert sum(phase.categories.values()) == phase.peak_bytes
        assert sum(found.categories.values()) == found.total_bytes
        of_tensors = Counter[str]()
        for tensors in found.alive:
            of_tensors[tensors.category] += tensors.nbytes
        others = ("rounding", "fragmentation", "context")
        assert {name: n for name, n in found.categories.items() if name not in others} == of_tensors
        assert found.categories.get("fragmentation", 0) == found.reserved_bytes - found.peak_bytes
        rounding = found.categories.get("rounding", 0)
        at_peak = next(p for p in found.phases if p.name == found.peak_phase)
        assert sum(t.nbytes for t in found.alive) == found.peak_bytes - at_peak.categories.get("rounding", 0)
        assert (rounding > 0) == (device is not None)
        assert [p.name for p in found.phases] == [*TRAINING, "inference"]


def test_what_is_alive_says_where_it_is_from() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(64, 512), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).exp().sin().sum()

    found = estimate(Model(), torch.randn(4096, 64), optimizer="sgd")
    largest = found.alive[0]
    assert (largest.category, largest.shape, largest.dtype) == ("saved activations", (4096, 512), "float32")
    assert largest.nbytes == 4096 * 512 * 4
    assert any(t.module == "layer.1" and t.category == "saved activations" for t in found.alive)
    assert any(t.name == "layer.0.weight" and t.category == "weights" for t in found.alive)
    line = Model.forward.__code__.co_firstlineno + 1
    assert any(t.op == "aten.exp" and t.line.endswith(f"test_estimate.py:{line}") for t in found.alive)


def test_ddp_fills_its_buckets_in_reverse() -> None:
    sizes = [torch.empty(n, dtype=torch.float32) for n in (1000, 200_000, 300_000, 100)]
    for p in sizes:
        p.requires_grad_()
    # From the last: 100 and 300,000 numbers reach the first bucket's 2**20 bytes; the rest fits the next.
    assert DDP().buckets(sizes) == [4 * 300_100, 4 * 201_000]


def test_a_device_that_is_not_here_and_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(2)))
    x = torch.empty(8, 128, 256, device="meta")
    found = estimate(model, x, optimizer="adamw", device="h100")
    parameters = sum(p.numel() for p in model.parameters())
    assert found.categories["optimizer state"] == 8 * parameters  # the counts of steps stay on the host
    assert found.reserved_bytes >= found.peak_bytes
    assert found.context_bytes > 0
    assert found.fits
    # cuBLAS has one workspace in the forward's thread and one in the backward's, of 32 MiB on this device.
    workspaces = [t for t in found.alive if t.name == "cuBLAS workspace"]
    assert sum(t.nbytes for t in workspaces) == 2 * (32 << 20)
    assert all(p.is_meta for p in model.parameters())


def residual(eps: float = 1e-5) -> Residual:
    return Residual(nn.LayerNorm(32, eps), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_sharded_gradients_and_gathers_lie_apart() -> None:
    """FSDP2 allocates on streams of its own what no activation's free block can hold."""
    model = nn.Sequential(*times(4, residual))
    plain, found = (
        estimate(model, torch.randn(4, 10, 32), device="a100-40gb", fsdp=fsdp)
        for fsdp in (None, ckptplan.FSDP(4, units=("Residual",)))
    )
    # Blocks of another stream have a segment of their own, here of 2 MiB each.
    assert found.reserved_bytes == plain.reserved_bytes + 2 * (2 << 20)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("fsdp", [None, ckptplan.FSDP(4, units=("Residual",), reduce_dtype="float32")])
@pytest.mark.long
def test_repeated_layers_are_written_out_exactly(monkeypatch: pytest.MonkeyPatch, fsdp: ckptplan.FSDP | None) -> None:
    def layers(n: int) -> nn.Module:
        torch.manual_seed(0)
        made = [residual(1e-5 if k % 2 else 1e-6) for k in range(n)]  # two kinds in turn
        return nn.Sequential(nn.Linear(16, 32), *made, nn.Linear(32, 8))

    model, x = layers(10), torch.randn(4, 10, 16)
    assert unfolding.find_runs(model) == [unfolding.Run("", 1, 10, 2, kept=4)]
    folded = estimate(model, x, optimizer="adamw", fsdp=fsdp)
    monkeypatch.setattr(unfolding, "find_runs", lambda model: [])
    full = estimate(model, x, optimizer="adamw", fsdp=fsdp)
    assert folded.phases == full.phases
    assert folded.saved_bytes == full.saved_bytes
    plain = [sorted(repr(dataclasses.replace(t, line="")) for t in found.alive) for found in (folded, full)]
    assert plain[0] == plain[1]


def test_parameters_without_a_gradient_get_no_state() -> None:
    def detached(model: Any, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(model.layers):
            x = layer(x).detach() if i == 1 else layer(x)
        return x

    model, x = Layers(detached, depth=4), torch.randn(50, 16)
    model.unused = nn.Linear(64, 64)
    found = estimate(model, x, optimizer="momentum")
    assert_measured(found, model, x, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.long
def test_two_threads_at_once_and_autograd_off_outside() -> None:
    expected = {device: estimate(*build("mlp"), optimizer="adamw", device=device).phases for device in (None, "t4")}
    found = {}

    def work(device: Any) -> None:
        found[device] = estimate(*build("mlp"), optimizer="adamw", device=device).phases

    threads = [threading.Thread(target=work, args=(device,)) for device in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    model, x = build("mlp")
    with torch.inference_mode():
        assert estimate(model, x, optimizer="adamw").phases == expected[None]


def test_parameters_that_the_model_does_not_list_keep_their_gradients() -> None:
    def through_hidden(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.hidden[0](model.layers[0](x))

    model = Layers(through_hidden, depth=1)
    hidden = nn.Linear(16, 16)
    model.hidden = [hidden]
    hidden.bias.grad = before = torch.ones(16)
    estimate(model, torch.randn(50, 16))
    ckptplan.profile(model, torch.randn(50, 16))
    assert hidden.weight.grad is None
    assert hidden.bias.grad is before


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(100, 16, sparse=True), nn.Linear(16, 16))
    with pytest.raises(ckptplan.UnsupportedModelError, match="sparse=False"):
        estimate(model, torch.randint(100, (4, 8)))


def on_meta() -> tuple[nn.Module, torch.Tensor]:
    """Most of its bytes are activations, beside which the workspaces of a device count for little."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)]
        return nn.Sequential(*blocks), torch.empty(8192, 256)


def test_the_reserved_peak_is_what_solve_compares_with_the_budget() -> None:
    model, x = on_meta()
    kept = estimate(model, x, device="rtx4090")
    plan = ckptplan.solve(model, 0.8 * kept.reserved_bytes / 2**30, inputs=x, device="rtx4090", time_limit_s=0.2)
    assert plan.reserved_bytes is not None
    assert plan.peak_bytes <= plan.reserved_bytes <= 0.8 * kept.reserved_bytes
    found = estimate(model, x, device="rtx4090", plan=plan)
    target = find_target(model, "rtx4090")
    assert (
        found.reserved_bytes
        == plan.reserved_bytes
        == TrainingBytes(model, target).reserved(make_step(model, Training(x)), plan)
    )
    assert "reserved" in str(plan)


@pytest.mark.long
def test_the_smallest_budget_of_a_device_that_is_not_here_is_in_reserved_bytes() -> None:
    model, x = on_meta()
    how: dict[str, Any] = {"inputs": x, "optimizer": "adamw", "device": "h100", "time_limit_s": 0.2, "menus": False}
    with pytest.raises(ckptplan.InfeasibleBudgetError) as caught:
        ckptplan.solve(model, 0.1, **how)
    assert caught.value.min_peak_bytes > caught.value.budget_bytes
    # Both workspaces of cuBLAS, 32 MiB each on this device, are part of what is reserved and not of the chain.
    works = ckptplan.solve(model, caught.value.min_peak_bytes / 2**30, **how)
    assert works.reserved_bytes is not None
    assert works.reserved_bytes <= caught.value.min_peak_bytes


@pytest.mark.long
def test_a_plan_for_another_device_is_checked_on_arrival(tmp_path: Any) -> None:
    model, inputs = transformer(2)
    here = ckptplan.Device(
        "other", "another computer", 1 << 34, 0, 1e10, {"float32": 1e11}, out_bytes_per_s=1e9, in_bytes_per_s=1e9
    )
    here.save(tmp_path / "other.json")
    measured = ckptplan.profile(model, inputs, device=tmp_path / "other.json", menus=False)
    assert any("another computer" in note for note in measured.notes)
    smallest = smallest_peak(measured, Limits(actions=("keep", "swap", "recompute"), time_limit_s=0.2))
    how: dict[str, Any] = {"inputs": inputs, "menus": False, "time_limit_s": 0.2}
    plan = ckptplan.solve(model, 1.1 * smallest.peak_bytes / 2**30, device=here, **how)
    with pytest.raises(InvalidInputError, match="pass inputs="):
        ckptplan.apply(model, plan)
    with ckptplan.apply(model, plan, inputs=inputs) as handle:
        make_step(model, Training(inputs)).forward()[1].backward()
        assert handle.plan.fingerprint.device == "cpu"
        assert handle.stats().runs == handle.stats().planned_runs
        assert "recompute" in {choice.action for choice in plan.choices}  # so that the runs tell plans apart
    doubled = torch.utils._pytree.tree_map(lambda t: torch.cat([t, t]), inputs)
    with pytest.raises(ckptplan.PlanMismatchError):
        ckptplan.apply(model, plan, inputs=doubled)
    tight = dataclasses.replace(plan, budget_bytes=plan.peak_bytes // 2)
    with pytest.raises(ckptplan.PlanMismatchError, match="solve again here"):
        ckptplan.apply(model, tight, inputs=inputs)
    elsewhere = ckptplan.solve(model, device="a100-40gb", **how)
    with pytest.raises(ckptplan.PlanMismatchError, match="other operations run"):
        ckptplan.apply(model, elsewhere, inputs=inputs)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"device": "a100-41gb"}, "a100-40gb"),
        ({"device": "no-such.json"}, "no-such.json"),
        ({"device": "cuda"}, "model is on"),
        ({"amp": "float8"}, "float16"),
        ({"optimizer": "adamx"}, "adamw"),
        ({"optimizer": nn.Linear}, "nn.Linear|Linear"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"allocator": "expandable_segments:True"}, "CPU"),
        ({"allocator": "expandable_segment:True", "device": "t4"}, "expandable_segment"),
        ({"ddp": True, "device": "t4", "allocator": "max_split_size_mb:1"}, "max_split"),
    ],
)
def test_bad_input(arguments: dict[str, Any], says: str) -> None:
    model, inputs = build("mlp")
    with pytest.raises(InvalidInputError, match=says):
        estimate(model, inputs, **arguments)
    with pytest.raises(InvalidInputError, match="meta"):
        estimate(nn.Linear(4, 4, device="meta"), torch.zeros(2, 4))
