"""Times of two lanes on an emulated device: work is launched by the host's clock and runs by the device's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptplan.core.request import Training
from ckptplan.profiling.times import stopwatch, timing
from ckptplan.profiling.times.stopwatch import Stopwatch, Took
from ckptplan.runtime.recompute.call import PlannedStage
from ckptplan.tensors import accelerator
from ckptplan.training.step import make_step

DEVICE = torch.device("cuda", 0)
HZ = 1e9


class Lanes:
    """A host and a device with a clock each; what is launched runs in order, after its launch."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.device_s = 0.0
        self.slept: list[float] = []

    def launch(self, kernel_s: float, host_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + kernel_s

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / HZ)
        self.launch(cycles / HZ, 0.0)

    def synchronize(self, device: Any = None) -> None:
        self.host_s = max(self.host_s, self.device_s)


class Event:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes

    def record(self, stream: Any = None) -> None:
        self.at_s = max(self.lanes.device_s, self.lanes.host_s)

    def query(self) -> bool:
        return self.lanes.host_s >= self.at_s

    def synchronize(self) -> None:
        self.lanes.host_s = max(self.lanes.host_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lanes]:
    made = Lanes()
    device = SimpleNamespace(
        _sleep=made.sleep,
        synchronize=made.synchronize,
        device=lambda device: contextlib.nullcontext(),
        current_stream=lambda device: None,
        is_initialized=lambda: False,
        Event=lambda enable_timing: Event(made),
    )
    monkeypatch.setattr(accelerator, "module", device)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: made.host_s))
    stopwatch._cycles_per_s.cache_clear()
    yield made
    stopwatch._cycles_per_s.cache_clear()


def run(lanes: Lanes, watch: Stopwatch, kernel_s: float, host_s: float, count: int = 10, kind: str = "a") -> Took:
    span = watch.begin(kind)
    for _ in range(count):
        lanes.launch(kernel_s, host_s)
    return watch.end(span)


@pytest.mark.parametrize(("kernel_s", "host_s"), [(1e-3, 1e-5), (1e-6, 1e-4)])
def test_the_device_is_timed_alone_and_the_host_apart(lanes: Lanes, kernel_s: float, host_s: float) -> None:
    """Between two synchronisations the second would take 1 ms, of which the device computes a hundredth."""
    took = run(lanes, Stopwatch(DEVICE), kernel_s, host_s)
    assert took == pytest.approx((10 * kernel_s, 10 * host_s))


def test_a_delay_that_was_too_short_grows_for_the_next_span_of_its_kind(lanes: Lanes) -> None:
    watch = Stopwatch(DEVICE)
    first = run(lanes, watch, 1e-6, 1e-3)  # 10 ms of launches behind 2 ms of delay: the device has waited
    assert first.compute_s > 5e-3
    assert run(lanes, watch, 1e-6, 1e-3) == pytest.approx((1e-5, 1e-2))
    assert lanes.slept[-1] == pytest.approx(2e-2)
    run(lanes, watch, 1e-6, 1e-5, kind="b")
    assert lanes.slept[-1] == pytest.approx(2e-3)


def test_what_waits_for_the_device_takes_as_long_as_the_device(lanes: Lanes) -> None:
    watch = Stopwatch(DEVICE)
    for _ in range(5):
        span = watch.begin("reads")
        lanes.launch(1e-3, 1e-5)
        lanes.synchronize()  # a value is read
        lanes.launch(1e-3, 1e-5)
        took = watch.end(span)
    assert took.compute_s == pytest.approx(2e-3, rel=0.02)
    assert took.launch_s == took.compute_s
    first, second, third, *others = lanes.slept[2:]  # behind those of the calibration
    assert first < second < third <= stopwatch._MOST_DELAY_S
    assert others == [first, first]  # no delay helps


class Launching(nn.Module):
    """A layer whose forward and backward launch kernels."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.lanes = weakref.ref(lanes)  # a clock is no state of the stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lanes().launch(1e-6, 1e-4)
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self._backward)
        return y

    def _backward(self, gradient: torch.Tensor) -> None:
        self.lanes().launch(3e-6, 2e-4)


def test_stages_are_timed_in_both_lanes(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    run_recomputed = timing.run_recomputed

    def on_cpu(stage: PlannedStage, *args: Any) -> Any:
        return run_recomputed(replace(stage, device=torch.device("cpu")), *args)

    monkeypatch.setattr(timing, "run_recomputed", on_cpu)
    monkeypatch.setattr(timing, "why_not_again", lambda *_: None)  # runs the stage, and has a clock of its own
    model, x = nn.Sequential(Launching(lanes), Launching(lanes)), torch.ones(2, 4)
    step = make_step(model, Training(x, loss_fn=torch.mean))
    work = timing.StageWork({"0": "kind", "1": "kind"}, {"kind": 2}, {"kind": {(): ()}})
    times, launches, _ = timing.time_stages(step, work, DEVICE, lambda: None)
    assert times.forward_s["kind"] == pytest.approx(1e-6, rel=1e-3)
    assert times.backward_s["kind"] == pytest.approx(3e-6, rel=1e-3)
    assert times.recompute_s["kind", ()] == pytest.approx(1e-6, rel=1e-3)
    assert launches.forward_s["kind"] == pytest.approx(1e-4)
    assert launches.backward_s["kind"] == pytest.approx(2e-4)
    assert launches.recompute_s["kind", ()] == pytest.approx(1e-4)
