"""estimate() of optimizers as they are written: state of all kinds and places, against the CPU allocator's events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from measured_phases import assert_measured, measure_phases
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

import ckptplan
from ckptplan import estimate
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.request import Training
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling.target import find_target
from ckptplan.profiling.workload.optimizer_names import NAMED
from ckptplan.profiling.workload.optimizers import make_optimizer
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.step import make_step

Make = Callable[[Any], Optimizer]


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(32, 64)


def assert_as_measured(model: nn.Module, x: Any, optimizer: Optimizer, **how: Any) -> ckptplan.Estimate:
    """Every phase of two real steps has exactly the bytes that were estimated."""
    found = estimate(model, x, optimizer=optimizer, **how)
    assert_measured(found, model, x, optimizer, **how)
    return found


def after_update(found: ckptplan.Estimate) -> dict[str, int]:
    return dict(found.phase("forward 2").categories)


# --- PyTorch's ---

OF_PYTORCH: dict[str, Make] = {
    "adafactor": torch.optim.Adafactor,
    "adam with a tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "amsgrad by lists": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "asgd": torch.optim.ASGD,
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
    "radam by lists": lambda p: torch.optim.RAdam(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "sgd by lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("how", OF_PYTORCH)
def test_pytorchs_optimizers(how: str) -> None:
    model, x = mlp()
    assert_as_measured(model, x, OF_PYTORCH[how](model.parameters()))


@pytest.mark.parametrize(("kind", "says"), [(torch.optim.LBFGS, "closure"), (torch.optim.SparseAdam, "dense")])
def test_updates_that_cannot_be_traced(kind: Make, says: str) -> None:
    model, x = mlp()
    with pytest.raises(ckptplan.UnsupportedModelError, match=f"{says}.*leave optimizer= out"):
        estimate(model, x, optimizer=kind)


# --- with attributes and state of their own ---


WORLD: dict[int, torch.Tensor] = {}


def everywhere(params: Any) -> Optimizer:
    """State in attributes of itself, of an object, of its class, of parameters; in its group, a closure, a global."""
    speeds: dict[torch.Tensor, torch.Tensor] = {}
    total = None

    class Buckets:
        __slots__ = ("flat",)

    class Everywhere(Optimizer):
        table: ClassVar[torch.Tensor | None] = None

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.ready = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
            self.by_identity: dict[int, torch.Tensor] = {}
            self.buckets = Buckets()
            for p in self.param_groups[0]["params"]:
                p.average = p.detach().clone()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            nonlocal total
            group = self.param_groups[0]
            Everywhere.table = torch.linspace(-1, 1, 256) if Everywhere.table is None else Everywhere.table
            if not hasattr(self.buckets, "flat"):
                self.buckets.flat = torch.cat([p.grad.view(-1) for p in group["params"]])
            for p, sums in zip(group["params"], self.ready, strict=True):
                sums.add_(p.grad)
                self.by_identity[id(p)] = self.by_identity.get(id(p), 0) + p.grad
                if not hasattr(p, "speed"):
                    p.speed = torch.zeros_like(p, dtype=torch.bfloat16)
                    speeds[p] = torch.zeros_like(p)
                p.speed.mul_(0.9).add_(p.grad)
                WORLD.setdefault(id(p), torch.zeros_like(p)).add_(p.grad)
                mean = group.setdefault("means", {}).setdefault(id(p), torch.zeros_like(p))
                p.sub_(mean.add_(speeds[p].add_(WORLD[id(p)])), alpha=0.1)
                p.average.lerp_(p, 0.01)
            norms = torch.stack([p.grad.norm() for p in group["params"]])
            total = norms if total is None else total + norms

    return Everywhere(params)


class ByParameter(Optimizer):
    """Updates one parameter after the other by a function of itself and the parameter."""

    def __init__(self, params: Any, update: Callable[[Any, Any], None]) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.update(self, p)


def keeps_gradients(optimizer: Any, p: Any) -> None:
    """Goes along the difference of two gradients, the earlier of which it only refers to."""
    state = optimizer.state[p]
    p.sub_(p.grad - state["last"] if "last" in state else p.grad, alpha=0.1)
    state["last"] = p.grad


def drops_gradients(optimizer: Any, p: Any) -> None:
    """Frees each gradient after it was used."""
    p.sub_((p.grad * p.grad).sqrt(), alpha=0.1)
    p.grad = None


def with_a_hook(params: Any) -> Optimizer:
    """An average that a hook updates after each step."""
    averages: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def average(opt: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = opt.param_groups[0]["params"]
        if not averages:
            averages.extend(p.detach().clone() for p in parameters)
        torch._foreach_lerp_(averages, parameters, 0.01)

    optimizer.register_step_post_hook(average)
    return optimizer


def scheduled(params: Any) -> Optimizer:
    """A scheduler has wrapped its step."""
    optimizer = torch.optim.AdamW(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


OWN: dict[str, Make] = {
    "everywhere": everywhere,
    "gradients kept": lambda p: ByParameter(p, keeps_gradients),
    "gradients dropped": lambda p: ByParameter(p, drops_gradients),
    "in a hook": with_a_hook,
    "scheduled": scheduled,
}


@pytest.mark.parametrize("how", OWN)
def test_state_of_all_kinds_and_places(how: str) -> None:
    WORLD.clear()
    model, x = mlp()
    optimizer = OWN[how](model.parameters())
    beside = [p.average for p in model.parameters() if hasattr(p, "average")]
    found = estimated_without_a_trace(model, x, optimizer)
    assert_measured(found, model, x, optimizer, held=beside)
    # What is there at the beginning of the second step, beside the model and its input, is state.
    own = unique_bytes([*model.parameters(), x])
    at_start = found.phase("forward 2").start_bytes
    kept = {"optimizer state", "gradients"} if how == "gradients kept" else {"optimizer state"}
    categories = found.phase("forward 2").categories
    assert sum(categories.get(name, 0) for name in kept) == at_start - own
    assert (at_start == own) == (how == "gradients dropped")
    # A later run has the state from the start, and no batch of a step before.
    optimizer.zero_grad()
    resumed = estimated_without_a_trace(model, x, optimizer).phase("forward")
    if how != "gradients kept":
        assert resumed.start_bytes == at_start - x.nbytes
    ckptplan.profile(model, x, optimizer=optimizer, menus=False)


def estimated_without_a_trace(model: nn.Module, x: torch.Tensor, optimizer: Optimizer) -> ckptplan.Estimate:
    """What the optimizer has is as before."""
    before = contents(optimizer)
    found = estimate(model, x, optimizer=optimizer)
    assert contents(optimizer) == before
    gc.collect()
    assert not any(isinstance(t, FakeTensor) for t in [*WORLD.values(), *all_tensors(vars(optimizer))])
    return found


def all_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for pair in value.items() for each in pair for t in all_tensors(each)]
    return [t for each in value for t in all_tensors(each)] if isinstance(value, (list, tuple)) else []


def contents(optimizer: Optimizer) -> tuple[Any, ...]:
    """Identities and values of what an optimizer has."""
    tensors = all_tensors(vars(optimizer))
    return [id(t) for t in tensors], [t.sum().item() for t in tensors], repr(sorted(vars(optimizer))), list(WORLD)


# --- state that is there from the start ---


def train(model: nn.Module, x: torch.Tensor, optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        make_step(model, Training(x)).forward()[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def test_loaded_state() -> None:
    model, x = mlp()
    trained = torch.optim.AdamW(model.parameters())
    train(model, x, trained)
    resumed = torch.optim.AdamW(model.parameters())
    resumed.load_state_dict(trained.state_dict())
    del trained
    assert_as_measured(model, x, resumed)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_part_of_the_state(steps: int) -> None:
    """The second layer is trained from the beginning, the first later; RAdam takes another path after five steps."""
    model, x = mlp()
    optimizer = torch.optim.RAdam(model.parameters())
    for p in model[0].parameters():
        p.requires_grad_(False)
    train(model, x, optimizer, steps)
    for p in model[0].parameters():
        p.requires_grad_(True)
    missing = TrainingBytes(model, find_target(model), Training(optimizer=optimizer)).missing_state_bytes()
    assert missing == 2 * unique_bytes(model[0].parameters()) + 4 * 2
    assert_as_measured(model, x, optimizer)


# --- tensors of classes of their own, and parameters that are rebound ---


class Coded(torch.Tensor):
    """Codes and a scale that stand for a tensor."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], []

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Coded:
        return cls(**inner)

    def decoded(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_((args[1] / args[0].scale).to(torch.int8))
            return args[0]
        plain = torch.utils._pytree.tree_map_only(Coded, Coded.decoded, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def with_codes(optimizer: Any, p: Any) -> None:
    state = optimizer.state[p]
    if not state:
        table = torch.tensor([0.1] * p.shape[-1])
        state["speed"] = Coded(torch.zeros_like(p, dtype=torch.int8), table)
    speed = state["speed"] * 0.9 + p.grad
    state["speed"].copy_(speed)
    p.sub_(speed, alpha=0.1)


@pytest.mark.parametrize("trained", [False, True])
def test_state_in_tensors_of_another_class(trained: bool) -> None:
    model, x = mlp()
    optimizer = ByParameter(model.parameters(), with_codes)
    if trained:
        train(model, x, optimizer)
        assert isinstance(optimizer.state[model[0].weight]["speed"], Coded)
    found = estimate(model, x, optimizer=optimizer)
    state = sum(p.numel() + 4 * p.shape[-1] for p in model.parameters())
    assert after_update(found)["optimizer state"] == state
    assert found.phase("loaded").categories.get("optimizer state", 0) == state * trained
    measured = measure_phases(make_step(model, Training(x)), optimizer)
    add = 0 if not trained else state - unique_bytes(t["speed"] for t in optimizer.state.values())
    for real in measured.phases:
        predicted = found.phase(real.name)
        assert (predicted.peak_bytes, predicted.end_bytes) == (real.peak_bytes + add, real.end_bytes + add), real.name


class Rebinding(Optimizer):
    """Puts new memory in place of each parameter's, as sharded and offloading optimizers do."""

    def __init__(self, params: Any, *, keeps: bool) -> None:
        super().__init__(params, {})
        self.keeps, self.old = keeps, []

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.old = [p.data for group in self.param_groups for p in group["params"]] if self.keeps else []
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - 0.1 * p.grad


@pytest.mark.parametrize("keeps", [False, True])
def test_an_optimizer_that_rebinds_its_parameters(keeps: bool) -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    before = model.weight.data_ptr()
    found = estimate(model, x, optimizer=Rebinding(model.parameters(), keeps=keeps))
    assert model.weight.data_ptr() == before
    weight, batch = 4 * 64 * 64, 4 * 8 * 64
    assert after_update(found)["weights"] == weight * (1 + keeps)
    update = found.phase("optimizer 2")
    assert update.start_bytes == (2 + keeps) * weight + batch
    assert update.peak_bytes == 4 * weight + batch  # the step's product, and the new weight before it is bound
    assert update.end_bytes == weight * (1 + keeps) + batch


def test_parameters_in_one_flat_block() -> None:
    model, x = mlp()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().view(-1) for p in parameters])
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = piece.view_as(p)
    del flat, piece
    found = assert_as_measured(model, x, torch.optim.AdamW(parameters))
    assert found.phase("loaded").end_bytes == unique_bytes(parameters)


# --- by name ---

EMBEDDED, WIDE, SMALL, BIASES = 64 * 4096, 4096 * 64, 64 * 10, 64 + 10
"""Values of an embedding, of a matrix, of one that is too small to be quantized, and of both biases."""


def embedding_model() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(64, 4096), nn.Linear(4096, 64), nn.Linear(64, 10)).bfloat16()
    return model, torch.zeros(2, dtype=torch.long, device="meta")


FLOATS = 4 * (SMALL + BIASES)
SCALES = 4 * WIDE // 256
LAYOUTS = {
    # Trainer keeps the states of embeddings in float32 with bitsandbytes' optimizers of 8 bits.
    "adamw_8bit": 2 * (4 * EMBEDDED + WIDE + SCALES + FLOATS) + 2 * 4 * 256,
    "paged_adamw_8bit": 2 * (SCALES + FLOATS) + 2 * 4 * 256,
    "ademamix": 3 * 4 * (EMBEDDED + WIDE + SMALL + BIASES),
    "adamw_torch_4bit": 2 * ((EMBEDDED + WIDE) // 2 + 2 * SCALES + 2 * 4 * 16 + FLOATS // 2),
    "ao_adamw_fp8": 2 * (EMBEDDED + WIDE + 2 * SCALES + FLOATS // 2),
    "muon": 2 * WIDE + 2 * SMALL + 2 * 2 * (EMBEDDED + BIASES),
    "sgd": 0,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_of_named_optimizers(name: str) -> None:
    model, x = embedding_model()
    found = estimate(model, x, loss_fn=lambda y: y.float().sum(), optimizer=name, device="a100-40gb")
    assert after_update(found).get("optimizer state", 0) == LAYOUTS[name]
    paged = [note for note in found.notes if "paged" in note]
    counted = 2 * (4 * EMBEDDED + WIDE)
    assert [note.startswith(f"{counted / 2**20:.2f} MiB") for note in paged] == [True] * name.startswith("paged")


AXOLOTL = (
    "optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw", "came_pytorch", "muon", "dion",
    "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion", "lion_pytorch",
)  # fmt: skip


def test_every_name_of_a_trainer_is_counted_or_refused() -> None:
    arguments = pytest.importorskip("transformers.training_args")
    model, _ = embedding_model()
    for name in (*(each.value for each in arguments.OptimizerNames), *AXOLOTL):
        if name in NAMED:
            assert isinstance(made := make_optimizer(name, model), Optimizer)
            assert bool(made.defaults.get("fused")) is name.endswith("fused")
        else:
            with pytest.raises(
                InvalidInputError, match=f"{name}' is not known by name; counted by name are sgd.*pass an"
            ):
                make_optimizer(name, model)
    with pytest.raises(InvalidInputError, match="'adamv' is not known by name"):
        make_optimizer("adamv", model)


def test_plans_count_a_named_optimizer() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(256, 512), nn.Linear(512, 256)]), torch.randn(64, 256)
    plain, paged = (ckptplan.profile(model, x, optimizer=name, menus=False) for name in ("sgd", "paged_adamw_8bit"))
    scales = 2 * 2 * 4 * 256 * 512 // 256
    floats = 2 * 4 * (256 + 512)
    assert paged.resident_bytes - plain.resident_bytes == scales + floats + 2 * 4 * 256
    assert any("512.00 KiB of the optimizer's state are paged" in note for note in paged.notes)
