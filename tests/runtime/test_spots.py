"""Spots: elements of saved tensors that are compared in every pass, also where writes without a version begin late."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import stream_programs
import torch
from fake_cuda import DEVICE
from fake_kernels import Device
from kinds_of_tensors import TENSORS
from odd.harness import WIDTH
from odd.layers import buffer, layer_of, layers_of
from small_models import build, plan_for, step
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan import CheckError
from ckptplan.runtime.guard import check, spots
from ckptplan.runtime.guard.check import FIRST, Checks, StageSpots
from ckptplan.runtime.handle import apply
from ckptplan.runtime.recompute import call as recompute
from ckptplan.state.variables import Variables

LATE, STEPS = 4, 6


pytestmark = pytest.mark.usefixtures("no_leak")


# Spots of tensors


def taken(tensor: torch.Tensor) -> spots.Spot:
    found = spots.spot_of(tensor)
    assert found is not None
    return spots.read(*found)


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "one": lambda: torch.randn(1),
    "complex": lambda: torch.randn(5, 6, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(5, 6, dtype=torch.complex64).conj(),
    "less than a byte": lambda: torch.randint(255, (9, 9), dtype=torch.uint8).view(torch.uint4),
    "expanded": lambda: torch.randn(4, 1, 5).expand(4, 7, 5),
}


@pytest.mark.parametrize("name", [*OTHERS, *(name for name in TENSORS if not name.startswith("bytes"))])
def test_a_change_to_all_elements_is_seen(name: str) -> None:
    tensor = {**OTHERS, **TENSORS}[name]()
    first = taken(tensor)
    assert first.is_like(taken(tensor))
    untyped = tensor.untyped_storage()
    torch.tensor([], dtype=torch.uint8).set_(untyped).bitwise_xor_(1 if tensor.dtype is torch.bool else 0x55)  # type: ignore[call-overload]
    assert not first.is_like(taken(tensor))


def test_a_spot_is_spread_over_the_tensor() -> None:
    """Over all samples of a batch and over different columns, also of parts of tensors."""
    whole = torch.arange(16 * 64 * 64).view(16, 64, 64)
    for tensor in (whole, whole[:, :, :48], whole.transpose(0, 2)):
        places = torch.tensor(taken(tensor).values).flatten()
        assert places.numel() == len(set(places.tolist())) == 16
        assert len(set((places // 64**2).tolist())) >= 4
        assert len(set((places % 64).tolist())) >= 4
    assert torch.tensor(taken(whole).values).tolist()[::15] == [0, 65535 // 15 * 15]


def test_numbers_that_are_none_are_equal_to_themselves() -> None:
    tensor = torch.full((4, 4), float("nan"))
    assert taken(tensor).is_like(taken(tensor))
    assert not taken(tensor).is_like(taken(torch.zeros(4, 4)))


def test_of_what_has_no_digest_no_spot_is_taken() -> None:
    tensors = [torch.tensor(1.0), torch.empty(0, 3), torch.zeros(9, dtype=torch.uint8), torch.eye(3).to_sparse()]
    assert [spots.spot_of(t) for t in (*tensors, nn.Parameter(torch.ones(3)))] == [None] * 5
    assert Checks(torch.device("cpu"), always=False)._spots.take(torch.empty(3, device="meta")) is None


# Which tensors


def test_paths_of_a_stage_are_learned() -> None:
    """Each is compared from its second time on; until then what it shares with the others is."""
    torch.manual_seed(0)
    path = [lambda m, x: m.linear(torch.relu(m.linear(torch.tanh(m.linear(x)))))]
    odd = layer_of(lambda m, x: path[-1](m, x))
    model, x = nn.Sequential(odd(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    with apply(model, plan_for(model, x, "recompute"), check="always") as handle:
        sinks = handle._applied.controller._planned[0].sinks
        model(x).sum().backward()
        known = set(sinks.numbers)
        path.append(lambda m, x: torch.sin(m.linear(x)))
        for _ in range(2):
            model(x).sum().backward()
        assert known < sinks.numbers
        assert not sinks._learns


class Perturbing(TorchDispatchMode):
    """Changes all elements of the result of one operation, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return result
        self.left -= 1
        if self.left == -1:
            for t in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(t, torch.Tensor) and t.is_floating_point():
                    t.mul_(1.37).add_(0.11)
        return result


@pytest.mark.parametrize(("name", "what"), [("conv_norm", "recompute"), ("mlp", "segment"), ("nested", "selective")])
def test_spots_find_what_digests_find(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a stage its recompute begins to differ, in whatever way the results depend on it."""
    model, inputs = build(name)
    plan = plan_for(model, inputs, what, op=2)
    run, number = Variables.run, -1
    ran: list[Perturbing] = []

    def perturbed(variables: Variables, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def perturbing(*args: Any, **kwargs: Any) -> Any:
            ran.append(Perturbing(number))
            with ran[-1]:
                return forward(*args, **kwargs)

        return run(variables, perturbing, *args, **kwargs)

    monkeypatch.setattr(Variables, "run", perturbed)

    def finds(handle: Any) -> bool:
        ran.clear()
        try:
            step(model, inputs)
        except CheckError:
            return True
        return False

    found = 0
    with apply(model, plan) as handle:
        checks = handle._applied.controller.checks
        while number == -1 or any(mode.left < 0 for mode in ran):
            checks._seen = 0  # digests
            by_digests = finds(handle)
            checks._seen = FIRST
            assert finds(handle) == by_digests or not by_digests
            found += by_digests
            number = number + 1 if number >= 0 else 0
    assert found > 1


# Writes that begin late


LATE_NOW = [0]
"""The step of the training; from step `LATE` on stages do something odd."""


def late(odd: Callable[[Any, torch.Tensor], torch.Tensor], **kept: Any) -> type[nn.Module]:
    """A stage whose scale is found in an odd way from some step on."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(m.linear(x))
        return x + torch.tanh(m.out(y * (odd(m, y.detach()) if LATE_NOW[0] >= LATE else m.scale.clone())))

    scale = buffer(lambda: torch.ones(WIDTH))
    return layer_of(forward, out=lambda: nn.Linear(WIDTH, WIDTH), scale=scale, **kept)


def through_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.scale.data.lerp_(x.mean(0), 0.3)
    return m.scale.clone()  # type: ignore[no-any-return]


def through_numpy(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.scale.numpy()[:] += x.mean(0).numpy()
    return m.scale.clone()  # type: ignore[no-any-return]


def at_the_end(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Nothing that is saved depends on what it writes."""
    m.scale.data.add_(x.mean(0))
    return torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("odd", "what"), [(through_data, "recompute"), (through_numpy, "selective"), (at_the_end, "segment")]
)
def test_buffers_that_are_written_late_are_followed(odd: Any, what: str) -> None:
    """On the host every call sees them, so that the training goes on as without a plan."""
    wanted, found = trained(late(odd), None), trained(late(odd), what)
    assert len(found) == len(wanted) == STEPS
    assert all(all(map(torch.equal, *each)) for each in zip(found, wanted, strict=True))


FACTORS = {"x": 1.0}


def counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes what no stage was seen to change before."""
    FACTORS["x"] *= 0.9
    return m.scale * FACTORS["x"]  # type: ignore[no-any-return]


def attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.held[0].data.add_(x.mean(0))
    return m.held[0].clone()  # type: ignore[no-any-return]


def kernel(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes to memory by its address, as kernels of other libraries do."""
    memory = (ctypes.c_float * WIDTH).from_address(m.held[0].data_ptr())
    memory[:] = [value * 1.5 for value in memory]
    return m.held[0].clone()  # type: ignore[no-any-return]


def holding(odd: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[nn.Module]:
    return late(odd, held=lambda: [torch.ones(WIDTH)])


@pytest.mark.parametrize(("odd", "what"), [(counting, "recompute"), (attribute, "segment"), (kernel, "selective")])
def test_other_state_that_changes_late_is_an_error_in_that_step(odd: Any, what: str) -> None:
    with pytest.raises(CheckError, match=r"stage '.': tensor number .* the gradients of this step .*through \.data"):
        trained(holding(odd), what)
    assert LATE_NOW[0] == LATE
    assert len(trained(holding(odd), what, check="off")) == STEPS


def test_a_buffer_that_is_written_late_is_compared_where_the_host_would_have_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There a stage's buffers are compared around its recompute, also if nothing that it saves depends on them."""
    monkeypatch.setattr(recompute._State, "_was_seen_written", lambda *_: False)
    monkeypatch.setattr(StageSpots, "unchanged", lambda self: self._buffers_unchanged(self._module.modules()))
    with pytest.raises(CheckError, match="its buffer 'scale' isn't what it was"):
        trained(late(at_the_end), "segment")


def trained(kind: type[nn.Module], what: str | None, check: Any = "sampled") -> list[list[torch.Tensor]]:
    """Gradients and buffers of each step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(), kind(), kind()), torch.randn(64, WIDTH)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    FACTORS["x"], LATE_NOW[0] = 1.0, 0
    with contextlib.nullcontext() if what is None else apply(model, plan_for(model, x, what), check=check):
        for LATE_NOW[0] in range(STEPS):
            step(model, x)
            optimizer.step()
            found.append([t.clone() for t in (*(p.grad for p in model.parameters()), *model.buffers())])  # type: ignore[union-attr]
    return found


# Nothing differs


def mixed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Dropout, batch statistics, activations in place, noise that a kernel fills later, a not-a-number."""
    y = F.rrelu(m.drop(F.relu(m.norm(m.linear(x)), inplace=True)), training=True)
    return x + torch.nan_to_num(y * m.nothing) + F.silu(y, inplace=False)


MIXED = layer_of(
    mixed,
    norm=lambda: nn.BatchNorm1d(WIDTH, momentum=0.3),
    drop=lambda: nn.Dropout(0.3),
    nothing=buffer(lambda: torch.full((WIDTH,), float("nan"))),
)


@pytest.mark.parametrize(
    ("what", "dtype"), [("recompute", None), ("selective", None), ("segment", torch.bfloat16), ("swap", torch.bfloat16)]
)
@pytest.mark.long("selective-None")
def test_ordinary_trainings_raise_no_alarm(what: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers_of(MIXED)), torch.randn(64, WIDTH)
    twin = copy.deepcopy(model)
    found = []
    for each in (twin, model):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(each.parameters(), 1e-3)
        autocast = torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()
        with autocast:
            plan = plan_for(each, x, what)
        with apply(each, plan) if each is model else contextlib.nullcontext():
            torch.manual_seed(2)
            for _ in range(10):
                each.zero_grad()
                with autocast:
                    loss = each(x).square().mean()
                loss.backward()
                optimizer.step()
        found.append([*each.parameters(), *each.buffers()])
    assert all(taken_equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_kernel_fills_later_raises_no_alarm() -> None:
    """The noise of a randomized ReLU at a stage's end is saved before the kernel runs, and no other tensor shows it."""
    torch.manual_seed(0)
    ends = layers_of(layer_of(lambda m, x: F.rrelu(m.linear(x), 0.1, 0.9, training=True)))
    model, x = nn.Sequential(*ends, nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH)
    with apply(model, plan_for(model, x, "recompute")):
        for _ in range(STEPS):
            step(model, x)


def taken_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def test_graphs_that_are_used_again_are_compared_again() -> None:
    torch.manual_seed(0)
    LATE_NOW[0] = 0
    model, x = nn.Sequential(*layers_of(holding(attribute))), torch.randn(8, WIDTH)
    with apply(model, plan_for(model, x, "recompute")):
        for _ in range(FIRST):
            step(model, x)
        loss = model(x).mean()
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
        model[1].scale.data.mul_(2)
        with pytest.raises(CheckError):
            loss.backward()


# On the emulated device


def test_on_a_device_values_are_read_without_waiting() -> None:
    gpu = Device(0)
    with gpu.installed():
        sheet, tensor = spots.Sheet(DEVICE), gpu.put(torch.arange(4096.0).view(64, 64))
        found = spots.spot_of(tensor)
        assert found is not None
        with check.undisturbed():
            first, again = sheet.take(*found), sheet.take(*found)
            tensor.add_(1)
            other, small = sheet.take(*found), sheet.take((1,), tensor[0, :3])
            sheet.send()
            sheet.send()  # nothing more
            gpu._eager = 0.0
            sheet.arrived()
            gpu.synchronize()
            sheet.arrived()
            assert first.is_like(again)
            assert not first.is_like(other)
            assert len(small.values or ()) == 3
            last = [sheet.take(*found) for _ in range(spots._ROWS + 1)]
            assert last[0].values is not None
            sheet.read_all()
            assert all(spot.is_like(other) for spot in last)


@pytest.fixture
def spots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FIRST", 0)


@pytest.mark.parametrize("seed", range(3))
def test_on_a_device_ordinary_trainings_raise_no_alarm(seed: int, spots_alone: None) -> None:
    plan = stream_programs.random_plan(seed, random.Random(seed))
    wanted = stream_programs.train(Device.prompt(seed), seed, None, steps=4)
    assert stream_programs.differing(stream_programs.train(Device(seed), seed, plan, steps=4), wanted) == 0
