"""Sharded models (FSDP2) under a plan, in one process on the CPU, where units gather and free all the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from odd.layers import Around
from small_models import Transformer, assert_same, build, measured, plan_of, scheduled
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.core.segment import Segment
from ckptplan.distributed import parallel_of
from ckptplan.runtime.handle import apply
from ckptplan.runtime.swap.record import Record

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("needs fully_shard", allow_module_level=True)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    # Nothing leaves this process.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def planned(what: str) -> Plan:
    """Made for the model as it was before anybody sharded it."""
    chain = measured("transformer")
    stages = chain.stages
    if "segment" not in what:
        return plan_of(chain, [what] * len(stages))  # type: ignore[list-item]
    blocks = [i for i, stage in enumerate(stages) if stage.name.startswith("layers.")]
    options = [stage.find("recompute") if i in blocks else stage.keep for i, stage in enumerate(stages)]
    inner = (Segment(blocks[1], blocks[2]),) if what.startswith("nested") else ()
    return scheduled(chain, options, (Segment(blocks[0], blocks[-1], inner),))  # type: ignore[arg-type]


def sharded(mesh: Any, where: str, policy: Any = None) -> nn.Module:
    """Units inside the stages, as stages, or around two of them."""
    model, _ = build("transformer")
    assert isinstance(model, Transformer)
    more = {} if policy is None else {"mp_policy": policy}
    for k, layer in enumerate(model.layers):
        if where == "inside":
            for module in (layer.qkv, layer.up):
                fsdp.fully_shard(module, mesh=mesh, **more)
        elif where == "blocks":
            fsdp.fully_shard(layer, mesh=mesh, **more)
        elif k % 2 == 0:  # one group of parameters for two blocks
            fsdp.fully_shard([layer, model.layers[k + 1]], mesh=mesh, **more)
    fsdp.fully_shard(model, mesh=mesh, **more)
    return model


def train(model: nn.Module, x: torch.Tensor) -> list[Any]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [model(part).float().mean() for part in (x, x[:, :20])]
        losses[0].backward()
        losses[1].backward()
        out += [losses[0].detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]
        optimizer.step()
    return out


POLICIES = {
    "plain": None,
    "bfloat16": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@functools.cache
def wanted(mesh: Any, where: str, policy: str) -> list[Any]:
    return train(sharded(mesh, where, POLICIES[policy]), build("transformer")[1])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("where", "policy", "what"),
    [
        ("blocks", "bfloat16", "swap"), ("inside", "plain", "nested segment"), ("inside", "bfloat16", "recompute"),
        ("pairs", "bfloat16", "segment"),
    ],
)  # fmt: skip
def test_a_sharded_model(mesh: Any, where: str, policy: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise as without a plan; parameters gathered for a stage never move, whatever their precision."""
    moved: list[torch.Tensor] = []
    made = Record.__init__

    def watched(self: Record, tensor: torch.Tensor, *rest: Any) -> None:
        moved.append(tensor)
        made(self, tensor, *rest)

    monkeypatch.setattr(Record, "__init__", watched)
    expected = wanted(mesh, where, policy)
    model, inputs = sharded(mesh, where, POLICIES[policy]), build("transformer")[1]
    plan = planned(what)
    shapes = {p.shape for p in model.layers.parameters()}
    with apply(model, plan) as handle:
        assert_same(train(model, inputs), expected)
        stats = handle.stats()
    assert stats.forwards == 6
    assert stats.recomputed_stages == 6 * stats.planned_recomputed_stages
    if what == "swap":
        assert moved
        assert stats.swapped_out_bytes > 0
        # No activation is of a weight's shape, as it is or transposed.
        assert [t.shape for t in moved if t.dim() == 2 and {t.shape, t.t().shape} & shapes] == []


def _gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often a unit's parameters become whole."""
    groups = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    count = [0]
    whole = groups.FSDPParamGroup._to_unsharded

    def counted(self: Any) -> None:
        count[0] += 1
        whole(self)

    monkeypatch.setattr(groups.FSDPParamGroup, "_to_unsharded", counted)
    return count


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("blocks", "recompute"), ("blocks", "segment"), ("blocks", "nested segment"), ("inside", "recompute"),
        ("inside", "segment"), ("inside", "swap"),
    ],
)  # fmt: skip
def test_gathers(mesh: Any, where: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recompute runs inside its unit, which has gathered already; a segment's sweep runs before its units do."""
    count = _gathers(monkeypatch)
    model, inputs = sharded(mesh, where), build("transformer")[1]
    model(inputs).mean().backward()
    plain, count[0] = count[0], 0
    with monkeypatch.context() as patched:
        for layer in model.layers:
            patched.setattr(layer, "forward", functools.partial(checkpoint, layer.forward, use_reentrant=False))
        model(inputs).mean().backward()
    checkpointed, count[0] = count[0], 0
    with apply(model, planned(what)):
        model(inputs).mean().backward()
    # Of four blocks, a sweep runs three again; with an inner segment of two, that one's first is swept once more.
    again = {"segment": 3, "nested segment": 4}.get(what, 0)
    if where == "inside":  # two units in each block, and a segment's last block runs again before their backward, too
        again = 2 * {"segment": 4, "nested segment": 6}.get(what, 0)
        if what == "recompute":  # in PyTorch 2.9 a unit frees after its forward in a recompute, too
            again = checkpointed - plain
    assert count[0] == plain + again


def reading(layers: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs as many of its layers as a value says."""
    for layer in layers[: 2 + int((x > 9).any().item())]:
        x = x + layer(x)
    return x * 1


def test_a_sharded_model_that_reads_values(mesh: Any) -> None:
    """A real run gathers and frees parameters whose memory is from before it."""
    blocks = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
    model, inputs = Around(blocks, reading), torch.randn(64, 64)
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    model(inputs).mean().backward()  # makes the memory
    plan = ckptplan.solve(model, budget="30%", inputs=inputs, time_limit_s=0.2)
    found = ckptplan.verify(model, plan, inputs, repeats=1)
    assert found.gradients_equal
    assert found.within_budget


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning", "ignore:FSDP will no longer:FutureWarning")
def test_what_is_not_planned(mesh: Any) -> None:
    model, inputs = build("transformer")
    fsdp.fully_shard(model, mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    for call in (ckptplan.solve, ckptplan.profile, ckptplan.estimate):
        with pytest.raises(
            UnsupportedModelError, match=r"its CPUOffloadPolicy keeps shards.*; leave offload_policy= out"
        ):
            call(model, inputs=inputs)
    model, inputs = build("mlp")
    staying = fsdp.fully_shard(model, mesh=mesh)
    staying.set_reshard_after_backward(False)
    model(inputs).mean().backward()
    with pytest.raises(UnsupportedModelError, match=r"stay gathered between steps; call set_reshard_after_backward"):
        ckptplan.solve(model, 1, inputs=inputs)
    staying.set_reshard_after_backward(True)
    assert ckptplan.solve(model, 1, inputs=inputs, time_limit_s=0.1).choices
    model, inputs = build("mlp")
    parallelize_module(model, mesh, {"0.0": ColwiseParallel()})
    with pytest.raises(UnsupportedModelError, match=r"'0.0.weight' is a DTensor that fully_shard didn't make"):
        ckptplan.solve(model, 1, inputs=inputs)
    with pytest.raises(UnsupportedModelError, match=r"FullyShardedDataParallel \(FSDP1\)"):
        ckptplan.solve(fsdp.FullyShardedDataParallel(build("mlp")[0], device_id=torch.device("cpu")), 1, inputs=inputs)


def test_settings_of_newer_versions_are_refused(mesh: Any) -> None:
    model, inputs = build("mlp")
    sharded_model = fsdp.fully_shard(model, mesh=mesh)
    if not hasattr(sharded_model, "set_manual_backward_finalization"):
        pytest.skip("this version of PyTorch has no such settings")
    sharded_model.set_manual_backward_finalization(True)
    with pytest.raises(UnsupportedModelError, match="finalize_backward"):
        ckptplan.solve(model, 1, inputs=inputs)
    sharded_model.set_manual_backward_finalization(False)
    sharded_model.set_keep_unsharded_storage(True)
    with pytest.raises(UnsupportedModelError, match="set_keep_unsharded_storage"):
        ckptplan.solve(model, 1, inputs=inputs)


def test_an_engine_of_an_unknown_version_is_refused(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mlp")
    fsdp.fully_shard(model, mesh=mesh)
    parallel: Any = parallel_of(model)
    monkeypatch.delattr(parallel.groups[0], "reduce_grads")
    with pytest.raises(UnsupportedModelError, match=r"a FSDPParamGroup has no reduce_grads; supported are PyTorch 2.9"):
        ckptplan.solve(model, 1, inputs=inputs)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_distributed_checkpoints(mesh: Any, tmp_path: Path) -> None:
    """Saved under a plan and loaded without one, and the other way round."""
    model, inputs = sharded(mesh, "inside"), build("transformer")[1]
    names = list(model.state_dict())
    with apply(model, planned("segment")):
        train(model, inputs)
        state = get_model_state_dict(model)
        assert list(model.state_dict()) == list(state) == names
        dcp.save(state, checkpoint_id=tmp_path / "planned")
    trained = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    for planned_now in (False, True):
        other = sharded(mesh, "inside")
        with apply(other, planned("swap")) if planned_now else contextlib.nullcontext():
            loaded = get_model_state_dict(other)
            dcp.load(loaded, checkpoint_id=tmp_path / "planned")
            set_model_state_dict(other, loaded)
        assert all(torch.equal(p.full_tensor(), trained[name]) for name, p in other.named_parameters())


@pytest.mark.parametrize("gathered", [False, True])
def test_residents_of_a_plan_from_before_the_model_was_sharded(mesh: Any, gathered: bool) -> None:
    """Optimizer state leaves; weights stay, with a warning, since FSDP2 gathers and frees them."""

    def trained(*, planned: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3))
        model, x, handle = nn.Sequential(*layers), torch.randn(64, 64), None
        for layer in model:
            layer[2].requires_grad_(False)  # type: ignore[index]
        chain = ckptplan.profile(model, x, optimizer="adamw", menus=False).offloading(("weights", "optimizer"))
        names = [next(n for n in ("optimizer", "weights", "keep") if stage.find(n)) for stage in chain.stages]
        plan = plan_of(chain, names)  # type: ignore[arg-type]
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        model.set_reshard_after_backward(not gathered)  # type: ignore[operator]
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        if planned:
            handle = apply(model, plan)
        found = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        states = [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "to_local")]
        stats = None if handle is None else handle.stats()
        if handle is not None:
            handle.remove()
        state = [t.to_local() for t in states]
        assert stats is None or stats.swapped_in_bytes >= 2 * sum(t.nbytes for t in state if t.dim() == 2)
        return [*found, *state], stats

    plain, _ = trained(planned=False)
    with pytest.warns(RuntimeWarning, match=r"\d.\d.weight stays on the device: FSDP2"):
        found, stats = trained(planned=True)
    assert_same(found, plain)
    assert set(stats.differences) == {"weights sharded"}


def test_shards_have_all_names_of_their_parameters_gathered_or_not(mesh: Any) -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    fsdp.fully_shard(model[1], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for _ in range(2):
        found = parallel_of(model).named_shards()
        assert set(found) == set(wanted)
        assert all(found[name] is p for name, p in wanted.items())
        model.unshard()  # type: ignore[operator]
    assert parallel_of(nn.Linear(2, 2)).named_shards() == {}
