"""What is measured of a running plan, and how stages are timed so that a machine's drift changes all alike."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.overheads import NO_OVERHEADS, Overheads
from ckptplan.core.request import Training
from ckptplan.profiling.times import overheads, timing
from ckptplan.profiling.times.stopwatch import Measurement, Stopwatch, Took
from ckptplan.runtime.recompute.segments import SegmentFrame
from ckptplan.training.step import make_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_often_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests time each stage once (torch_setup.py)."""
    monkeypatch.setattr(timing, "_LEAST_RUNS", 3)


def test_what_runs_in_a_sweep_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = SegmentFrame.fill

    def slow(*args: Any, **kwargs: Any) -> Any:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return fill(*args, **kwargs)

    monkeypatch.setattr(SegmentFrame, "fill", slow)
    # Each stage of the segment is filled once. 0.02: as busy as the machine may make the thread besides.
    assert 0.002 < overheads._measured(CPU, None).rerun_s < 0.02


@pytest.mark.parametrize("measured", [NO_OVERHEADS, Overheads(call_s=1e-6, rerun_s=5.0)], ids=["frame", "measured"])
def test_a_run_in_a_sweep_takes_no_less_than_a_recompute(measured: Overheads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.profiling.profiler.measure_overheads", lambda *_: measured)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8 + k, 9 + k), nn.Tanh()) for k in range(7)))
    profile = ckptplan.profile(model, torch.randn(4, 8))
    longer = []
    for stage in profile.stages:
        again = stage.recompute
        if again is None:
            assert stage.is_glue
            assert stage.rerun_overhead_s == 0
        else:
            longer.append(again.recompute_s > stage.forward_s)
            assert stage.rerun_overhead_s == max(measured.rerun_s, again.recompute_s - stage.forward_s)
        assert stage.rerun_overhead_launch_s == 0
    # The recompute alone is timed with the runtime's frame, which takes longer than so small a forward; most of the
    # seven, since the machine may have been busy while one ran.
    assert sum(longer) > len(longer) / 2


def test_options_that_move_take_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = overheads.Overheads(call_s=1e3, swap_s=10.0, storage_s=1.0, byte_s=1e-6)
    monkeypatch.setattr("ckptplan.profiling.profiler.measure_overheads", lambda *_: measured)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    profile = ckptplan.profile(nn.Sequential(*blocks), torch.randn(64, 64))
    moving = 0
    for stage in profile.stages:
        assert (stage.forward_s >= 1e3) != stage.is_glue
        assert stage.keep.overhead_s == 0
        for option in stage.options:
            nbytes = sum(profile.storages[s].nbytes for s in option.moved)
            wanted_s = 10.0 + len(option.saved) + 1e-6 * nbytes if option.moves else 0.0
            assert option.overhead_s == pytest.approx(wanted_s)
            moving += bool(option.moves)
    assert moving > 2


class Slowing(Stopwatch):
    """A watch on a machine that gets slower with every span, and what it timed, in order."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kinds: list[Any] = []

    def end(self, span: Measurement) -> Took:
        self.kinds.append(span.kind)
        return Took(1.0 + 0.01 * len(self.kinds), 0.0)


def test_stages_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed one after another, the last of ten equal stages would seem several times as slow as the first."""
    watches: list[Slowing] = []
    monkeypatch.setattr(timing, "Stopwatch", lambda device: watches.append(Slowing(device)) or watches[-1])
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(10)))
    kinds = {str(i): f"kind {i}" for i in range(10)}
    step = make_step(model, Training(torch.randn(2, 8), loss_fn=torch.mean))
    times, _, _ = timing.time_stages(step, timing.StageWork(kinds, Counter(kinds.values()), {}), CPU, lambda: None)
    # Of a round of ten stages, whose times differ by its own length at most.
    timed = [
        kind[0] for kind in watches[0].kinds if isinstance(kind, tuple) and kind[-1] == "forward" and len(kind) == 3
    ]
    # Behind the first visits, with a warm-up each; in later rounds only some may be timed.
    rounds = [timed[k : k + 10] for k in range(20, 10 + 10 * timing._LEAST_RUNS, 10)]
    assert all(sorted(one) == sorted(kinds.values()) for one in rounds)
    assert max(times.forward_s.values()) < 1.25 * min(times.forward_s.values())
    assert all(error_s > 0 for error_s in times.error_s.values())


def test_a_measured_profile_says_its_error() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    profile = ckptplan.profile(model, torch.randn(64, 64))
    assert 0 < profile.step_error <= 1  # 1 where the machine was too busy to tell
    assert f"± {profile.step_error:.1%}" in str(profile)
