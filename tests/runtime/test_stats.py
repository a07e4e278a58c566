from __future__ import annotations

import dataclasses
import functools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_memory import DEVICE, FakeMemory
from odd.layers import Around
from small_models import assert_same, build, measured, plan_of, scheduled
from torch import nn

import ckptplan
from ckptplan.core.link import Link
from ckptplan.core.measured import Copied, StageTimes
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.observe import meter as meters
from ckptplan.runtime.observe.meter import BACKWARD, KINDS, RECOMPUTE, STALL, Meter
from ckptplan.runtime.observe.stats import Peaks, Stats, stage_stats
from ckptplan.runtime.swap import stores
from ckptplan.tensors import accelerator

CPU = torch.device("cpu")


class FakeClock:
    """Seconds that pass only where a test says so."""

    __module__ = "torch"  # it is no state of the model's

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    """A stage that takes a fixed time of the clock's, forward and backward."""

    def __init__(self, clock: FakeClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.times = clock, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What tanh saves comes last, so that a recompute runs all of it.
        return torch.tanh(_Takes.apply(self.linear(x), *self.times))  # type: ignore[no-any-return]


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: FakeClock, forward_s: float, backward_s: float) -> torch.Tensor:
        clock.now += forward_s
        ctx.clock, ctx.seconds = clock, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.now += ctx.seconds
        return gradient, None, None, None


TIMES = [(0.010, 0.020), (0.030, 0.040), (0.050, 0.060), (0.070, 0.080)]


def chain_on(clock: FakeClock) -> nn.Module:
    return nn.Sequential(*(Slow(clock, *times) for times in TIMES))


class Made:
    """The chain on a fake clock, its profile and inputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        monkeypatch.setattr(meters.Meter.__init__, "__defaults__", (None, self.clock))
        self.model = chain_on(self.clock)
        self.inputs = torch.randn(512, 64)
        found = traced_chain()
        stages = iter(TIMES)

        def timed(stage: Any) -> Any:
            forward_s, backward_s = (0.0, 0.0) if stage.is_glue else next(stages)
            options = tuple(
                dataclasses.replace(o, recompute_s=forward_s * o.recomputes, overhead_s=0.0) for o in stage.options
            )
            return dataclasses.replace(
                stage, forward_s=forward_s, backward_s=backward_s, options=options, rerun_overhead_s=0.0
            )

        self.profile = dataclasses.replace(found, stages=tuple(map(timed, found.stages)), link=Link(1e12, 1e12))
        self.modules = [i for i, stage in enumerate(self.profile.stages) if not stage.is_glue]

    def step(self) -> None:
        self.model.zero_grad()
        self.model(self.inputs).mean().backward()

    def stats_of(self, plan: Plan, steps: int, **options: Any) -> Stats:
        """Behind so many steps under a plan."""
        with ckptplan.apply(self.model, plan, **options) as handle:
            for _ in range(steps):
                self.step()
            return handle.stats()

    def plan(self, *actions: str) -> Plan:
        by_stage: list[Any] = ["keep"] * len(self.profile.stages)
        for i, action in zip(self.modules, actions, strict=True):
            by_stage[i] = action
        return plan_of(self.profile, by_stage)


@functools.cache
def traced_chain() -> Profile:
    return profile(chain_on(FakeClock()), torch.randn(512, 64), menus=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def accounts(times: StageTimes | None) -> tuple[float, float, float]:
    assert times is not None
    # 1e-12: differences of clock readings.
    return tuple(round(x, 12) for x in (times.forward_s, times.recompute_s, times.backward_s))  # type: ignore[return-value]


def test_each_stage_has_its_own_seconds(made: Made) -> None:
    plan = made.plan("keep", "recompute", "swap", "recompute")
    stats = made.stats_of(plan, 4, profile=made.profile)
    found = [accounts(stats.stages[i].measured) for i in made.modules]
    assert found == [(0.010, 0.0, 0.020), (0.030, 0.030, 0.040), (0.050, 0.0, 0.060), (0.070, 0.070, 0.080)]
    assert found == [accounts(stats.stages[i].predicted) for i in made.modules]
    assert stats.timed_steps == 3
    assert stats.step_s == pytest.approx(0.46, abs=1e-12)
    assert stats.step_s == pytest.approx(sum(s.measured.total_s for s in stats.stages if s.measured), abs=1e-12)
    assert stats.planned_step_s == plan.step_s
    assert stats.measured_s("recompute") == pytest.approx(0.1, abs=1e-12)
    text = str(stats)
    assert "30.0 ms (30.0 ms)" in text
    assert "recompute" in text


def test_recompute_in_a_segment_is_the_stage_s_that_runs_again(made: Made) -> None:
    options = [stage.recompute if i in made.modules else stage.keep for i, stage in enumerate(made.profile.stages)]
    plan = scheduled(made.profile, options, (Segment(made.modules[0], made.modules[3]),))  # type: ignore[arg-type]
    stats = made.stats_of(plan, 3, profile=made.profile)
    found = [accounts(stats.stages[i].measured) for i in made.modules]
    assert found == [(f, f, b) for f, b in TIMES]
    assert found == [accounts(stats.stages[i].predicted) for i in made.modules]


def test_without_a_profile_nothing_is_predicted_per_stage(made: Made) -> None:
    with ckptplan.apply(made.model, made.plan("keep", "recompute", "swap", "keep")) as handle:
        assert handle.stats().step_s is None
        assert "no step is timed yet" in str(handle.stats())
        made.step()
        assert handle.stats().timed_steps == 0, "the first step warms up"
        made.step()
        stats = handle.stats()
    assert stats.timed_steps == 1
    assert all(s.predicted is None and s.measured is not None for s in stats.stages)
    assert stats.predicted_s("forward") is None
    assert stats.peak_bytes is None
    assert "verify" in str(stats)
    assert "(planned)" not in str(stats)


def test_stalls_are_the_waiting_stage_s(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take 2 s of the clock that passes only while somebody waits for them."""
    real = stores.DiskStore.finish_in

    def waits(self: Any, *args: Any) -> None:
        made.clock.now += 2.0
        real(self, *args)

    monkeypatch.setattr(stores.DiskStore, "finish_in", waits)
    plan = made.plan("swap", "swap", "swap", "swap")
    moved = [len(plan.choices[i].moves) for i in made.modules]
    assert sum(map(bool, moved)) >= 2
    assert 0 in moved
    stats = made.stats_of(plan, 3)
    stalls = [stats.stages[i].measured.stall_s for i in made.modules]  # type: ignore[union-attr]
    assert stalls == pytest.approx([2.0 * (n > 0) for n in moved], abs=1e-9)  # one wait for all of a stage
    assert [accounts(stats.stages[i].measured) for i in made.modules] == [(f, 0.0, b) for f, b in TIMES]


def test_copies_are_counted_with_their_own_seconds(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stores.disk._write
    monkeypatch.setattr(stores.disk, "_write", lambda *a: (time.sleep(0.01), real(*a)))
    with ckptplan.apply(made.model, made.plan("swap", "swap", "keep", "keep")) as handle:
        for _ in range(2):
            made.step()
        stats = handle.stats()
        copies = sum(len(choice.moves) for choice in handle.plan.choices)
    assert stats.host_copies.out_bytes == stats.host_copies.in_bytes == stats.planned_swapped_bytes
    assert stats.host_copies.out_s >= 0.01 * copies
    assert stats.host_copies.in_s < stats.host_copies.out_s
    assert stats.disk_copies == Copied()


def test_what_is_no_step_is_not_timed(made: Made) -> None:
    """A forward without backward, two forwards before one backward, a failed step: none of them is a median's."""
    with ckptplan.apply(made.model, made.plan("keep", "recompute", "keep", "keep")) as handle:
        made.step()
        made.step()
        first, second = made.model(made.inputs), made.model(made.inputs)
        (first.mean() + second.mean()).backward()
        made.clock.now += 100
        with torch.no_grad():
            made.model(made.inputs)
        made.step()
        made.step()
        stats = handle.stats()
    assert stats.timed_steps == 3
    assert stats.step_s == pytest.approx(0.39, abs=1e-12)


def parts(layers: Any, x: torch.Tensor) -> Any:
    """Three outputs, each of stages of its own behind the first one."""
    first = layers[0](x)
    return [layer(first.detach()) for layer in layers[1:]] + [first]


@pytest.mark.filterwarnings("ignore:the peak may exceed the budget. the graph of stage")
@pytest.mark.parametrize(("which", "also", "action"), [(-1, None, "keep"), (2, 1, "recompute"), (1, None, "swap")])
def test_a_backward_by_few_stages_is_noticed_also_when_not_all_are_watched(
    which: int, also: int | None, action: str
) -> None:
    """Through the first stage alone, the last, or neither; with a stage called by itself behind the step."""

    def loss_of(output: list[torch.Tensor]) -> torch.Tensor:
        return output[which].square().mean()

    def steps(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for _ in range(30):
            model.zero_grad()
            loss_of(model(inputs)).backward()
            if also is not None:
                model.layers[also](inputs).square().mean().backward()  # type: ignore[operator, index]
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
    model, inputs = Around(layers, parts), torch.randn(256, 32)
    wanted = steps(model)
    profile = ckptplan.profile(model, inputs, loss_fn=loss_of, menus=False)
    with ckptplan.apply(model, plan_of(profile, [action] * len(profile.stages))) as handle:
        assert_same(steps(model), wanted)
        assert handle._applied.controller.place.phase == "update"
        assert len(handle._applied.controller.counters.meter.steps()) >= 10


def test_a_wait_inside_a_recompute_goes_to_the_stage_that_asked() -> None:
    times = iter(range(100))
    meter = Meter(CPU, clock=lambda: float(next(times)))
    for _ in range(2):
        meter.begin()
        meter.mark(5 * KINDS + BACKWARD)
        before = meter.mark(3 * KINDS + RECOMPUTE)
        inside = meter.stall()
        assert inside == 3 * KINDS + RECOMPUTE
        meter.mark(inside)
        meter.mark(before)
        meter.backward_ended()
    (step,) = meter.steps()
    assert step.accounts == {0: 1.0, 5 * KINDS + BACKWARD: 2.0, 3 * KINDS + RECOMPUTE: 2.0, 5 * KINDS + STALL: 1.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_some_steps_are_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks cost time. Without a CUDA device, with a clock in its events' place."""
    monkeypatch.setattr(meters, "timing_event", lambda device: 0.0)
    monkeypatch.setattr(accelerator, "module", SimpleNamespace(is_current_stream_capturing=lambda: False))
    meter = Meter(torch.device(device))
    measured = []
    for k in range(1, 1610):
        if meter.begin() is not None:
            measured.append(k)
        meter.mark(BACKWARD)
        meter.backward_ended()
    later = measured[9:]
    assert measured[:9] == [*range(1, 10)]
    assert 170 <= len(later) <= 230
    for passes in range(2, 17):  # that make one step: each has its turn
        assert {k % passes for k in later} == set(range(passes))


def test_pools_and_peaks_are_laid_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nbytes in (("reserved_bytes", 1 << 20), ("peak_bytes", 1 << 19)):
        fixed = property(lambda store, nbytes=nbytes: nbytes, lambda store, value: None)
        monkeypatch.setattr(stores.DiskStore, name, fixed)
    chain = measured("transformer")
    plan = plan_of(chain, ["swap"] * len(chain.stages))
    model, _ = build("transformer")
    with ckptplan.apply(model, plan, profile=chain) as handle:
        (pool,) = handle.stats().pools
        assert (pool.tier, pool.planned_bytes) == ("host", plan.host_bytes)
        assert (pool.reserved_bytes, pool.peak_bytes) == (1 << 20, 1 << 19)
        assert "512.00 KiB used at most of 1.00 MiB" in str(handle.stats())
        assert handle.stats().planned_peak_bytes == plan.peak_bytes


@pytest.mark.gpu
def test_times_and_peak_on_a_gpu() -> None:
    torch.cuda.reset_peak_memory_stats()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(6))).cuda()
    inputs = torch.randn(4096, 2048, device="cuda")
    chain = profile(model, inputs)
    plan = plan_of(chain, ["swap" if i % 2 else "recompute" for i in range(len(chain.stages))])
    with ckptplan.apply(model, plan, profile=chain) as handle:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(8):
            model.zero_grad()
            model(inputs).mean().backward()
        stats = handle.stats()
        step = handle.trace(lambda: model(inputs).mean().backward()).measured
    assert stats.timed_steps >= 6
    assert stats.step_s is not None
    # The device idles between stages where the host is slow, as it is beside other tests.
    assert stats.step_s == pytest.approx(sum(s.measured.total_s for s in stats.stages if s.measured), rel=0.25)
    assert stats.host_copies.out_bytes == plan.host_bytes
    assert stats.host_copies.out_s > 0
    assert stats.peak_bytes is not None
    assert step.peak_bytes is not None
    assert step.bytes_over("out") == step.bytes_over("in") == plan.host_bytes


# Peaks since a plan was applied


def test_peaks_are_those_since_the_plan_was_applied() -> None:
    """An earlier step was as large, its segments still lie in the cache, and the same plan is applied twice."""
    memory, plan = FakeMemory(), plan_of(traced_chain(), ["keep"] * len(traced_chain().stages))
    none = (0,) * len(plan.stages)
    empty = Stats(0, 0, 0, 0, 0, 0, none, none, 0.0)

    def told(peaks: Peaks) -> Stats:
        return stage_stats(empty, plan, [], None, {}, peaks)

    def step() -> None:
        memory.allocator.free(memory.allocate(40 << 20))

    with memory.installed():
        model = memory.allocate(3 << 20)
        memory.allocator.free(memory.allocate(1 << 30))
        for turn in (1, 2):
            peaks = Peaks(DEVICE)
            found = told(peaks)
            assert found.earlier is not None
            assert found.earlier.requested_bytes == ((1 << 30) if turn == 1 else (40 << 20)) + (3 << 20)
            assert (found.peak_bytes, found.reserved_bytes) == (3 << 20, 20 << 20)
            step()
            found = told(peaks)
            assert (found.peak_bytes, found.reserved_bytes) == (43 << 20, 60 << 20)
            step()
            assert peaks.bytes == 43 << 20
        # Another plan's own, without losing what was there before the first.
        after = Peaks(DEVICE, peaks)
        memory.allocator.free(memory.allocate(1 << 20))
        found = told(after)
        assert found.peak_bytes == 4 << 20
        assert found.earlier is not None
        assert found.earlier.reserved_bytes == 60 << 20
        # The user's own reset: since then.
        memory.reset_peak_memory_stats(DEVICE)
        assert after.bytes == 3 << 20
        memory.allocator.free(model)
