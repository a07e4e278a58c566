"""Stages find the plan's device when they run again as they found it at first, whatever their arguments are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from by_hand import run_again
from fake_cuda import FakeCuda
from odd.harness import WIDTH
from odd.layers import DEPTH, Around, layer_of, layers_of
from small_models import assert_same, gradients
from torch import nn

from ckptplan.state import flags as flags_
from ckptplan.state.put_back import Steps, put_back
from ckptplan.state.surroundings import Surroundings
from ckptplan.tensors import accelerator

STAGES = [f"layers.{i}" for i in range(DEPTH)]


class Generators:
    """The random generators of CUDA devices, and how often each one's state was read."""

    __module__ = "torch.cuda"  # as of what it stands for, which is no state of a model's

    def __init__(self) -> None:
        self.states = {0: 1000, 1: 2000}
        self.reads = {0: 0, 1: 0}

    def draw(self, device: int) -> float:
        self.states[device] += 1
        return 1 + (self.states[device] * 7919 % 101) / 101

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        self.reads[device.index] += 1
        return torch.tensor([self.states[device.index]])

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = int(state)

    @contextlib.contextmanager
    def installed(self, *, running: bool = True) -> Iterator[None]:
        gpu: Any = FakeCuda(0)
        gpu.is_initialized = lambda: running
        gpu.get_rng_state, gpu.set_rng_state = self.get_rng_state, self.set_rng_state
        with gpu.installed():
            yield


@dataclass
class Boxed:
    """A tensor where PyTorch's trees don't find it."""

    value: torch.Tensor


def chain(given: str, draw: Callable[[], float]) -> nn.Module:
    """Stages whose arguments are tensors of the CPU, boxes, or numbers."""

    def run(m: Any, x: Any) -> Any:
        value = x.value if isinstance(x, Boxed) else x
        if isinstance(value, int):
            value = torch.full((2, WIDTH), float(value))
        y = torch.tanh(m.linear(value) * m.draw())
        return Boxed(y) if isinstance(x, Boxed) else y

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        if given == "numbers":
            return torch.stack([layer(i) for i, layer in enumerate(layers)])
        held: Any = Boxed(x) if given == "boxes" else x
        for layer in layers:
            held = layer(held)
        return held.value if isinstance(held, Boxed) else held

    return Around(layers_of(layer_of(run, draw=lambda: draw)), forward)


def train(model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext) -> list[Any]:
    """The gradients of two steps, the forward alone `around`."""
    found: list[Any] = []
    for _ in range(2):
        model.zero_grad()
        with around():
            loss = model(torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)).square().sum()
        loss.backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize(
    ("plan", "given"), [("recompute", "numbers"), ("selective", "tensors of the host"), ("segment", "boxes")]
)
def test_the_generator_of_the_plans_device(plan: str, given: str) -> None:
    generators = Generators()
    torch.manual_seed(0)
    model = chain(given, lambda: generators.draw(1))
    with generators.installed():
        want = train(model)
        ended, generators.states[1] = generators.states[1], 2000
        with run_again(model, plan, STAGES, device=torch.device("cuda", 1)) as controller:
            assert_same(train(model), want)
        assert controller.counters.recomputed_stages >= DEPTH
    assert generators.states[1] == ended
    assert generators.reads[0] == 0  # of no other device


@pytest.mark.parametrize(("device", "running"), [("cpu", True), ("cpu", False), ("cuda:0", False)])
def test_cuda_is_left_alone(device: str, running: bool) -> None:
    """By a plan on the host, and for fake tensors of a device that isn't there."""
    generators = Generators()
    model = chain("boxes", lambda: 1.0)
    with generators.installed(running=running), run_again(model, "segment", STAGES, device=torch.device(device)):
        train(model)
    assert generators.reads == {0: 0, 1: 0}


def test_autocast_of_the_plans_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def look() -> float:
        seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
        return 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # or autocast would switch itself off
    model = chain("boxes", look)
    with Generators().installed(), run_again(model, "segment", STAGES, device=torch.device("cuda", 0)):
        train(model, lambda: torch.autocast("cuda", torch.float16))
    assert set(seen) == {(True, torch.float16)}


def test_flags_that_are_put_back_leave_pytorchs_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first attention on CUDA PyTorch sets the order of its kernels, which is no change of the user's."""
    order = torch._C._get_sdp_priority_order()
    chosen, made = [order[-1], *order[:-1]], [False]

    def first_attention(*tensors: torch.Tensor) -> int:
        if not made[0]:
            made[0] = True
            torch._C._set_sdp_priority_order(chosen)
        return 0

    empty = torch.empty
    started = [False]
    monkeypatch.setattr(flags_, "_chosen", False)
    monkeypatch.setattr(accelerator, "IS_BUILT", True)
    monkeypatch.setattr(accelerator.module, "is_initialized", lambda: started[0])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    monkeypatch.setattr(torch, "_fused_sdp_choice", first_attention)
    try:
        before_cuda = flags_.flags()
        started[0] = True
        before = flags_.flags()
        first_attention()
        for earlier in (before, before_cuda):
            flags_.set_flags(earlier)
            assert torch._C._get_sdp_priority_order() == chosen
        torch._C._set_sdp_priority_order(order)  # as a user's `sdpa_kernel(..., set_priority=True)` does
        flags_.set_flags(before)
        assert torch._C._get_sdp_priority_order() == chosen
    finally:
        torch._C._set_sdp_priority_order(order)


def test_generators_of_devices_among_the_arguments() -> None:
    """A second device, of which a plan for the first one knows by a tensor alone."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)  # type: ignore[assignment]

    generators = Generators()
    with generators.installed():
        surroundings = Surroundings(torch.device("cuda", 0), [torch.ones(2).as_subclass(Elsewhere)])
        at_first = [generators.draw(0), generators.draw(1)]
        before = dict(generators.states)
        for _ in range(2):
            undo: Steps = []
            surroundings.put(undo)
            assert [generators.draw(0), generators.draw(1)] == at_first
            put_back(undo)
            assert generators.states == before
