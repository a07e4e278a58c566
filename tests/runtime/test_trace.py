from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, output
from small_models import build, measured, planned

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.trace import Trace
from ckptplan.referee import simulate


def traced(name: str, what: str) -> tuple[Trace, Plan]:
    model, inputs = build(name)
    plan = planned(name, what)
    return ckptplan.trace(model, plan, inputs, profile=measured(name)), plan


def nested(spans: list[dict[str, Any]]) -> None:
    """Spans of one lane are disjoint or one lies in the other, and come in the order of their beginning."""
    open_: list[float] = []
    at = float("-inf")
    for span in spans:
        # 1e-6 µs: sums and differences of readings; touching spans may overlap by their last bit.
        assert span["ts"] >= at
        assert span["dur"] >= 0
        at, end = span["ts"], span["ts"] + span["dur"]
        while open_ and open_[-1] <= at + 1e-6:
            open_.pop()
        assert not open_ or end <= open_[-1] + 1e-6
        open_.append(end)


@pytest.mark.parametrize(("name", "what"), [("transformer", "segment"), ("mlp", "mixed"), ("mlp", "recompute")])
def test_trace_is_a_step_in_the_trace_event_format(name: str, what: str, tmp_path: Path) -> None:
    trace, plan = traced(name, what)
    trace.save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = data["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert data["displayTimeUnit"] == "ms"
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    for event in events:
        assert {"ph", "pid", "tid", "name", "args"} <= set(event)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
        else:
            assert isinstance(event["args"]["bytes"], int)
    for pid in (1, 2):
        assert [names[pid, tid] for tid in (1, 2, 3)] == ["compute", "device to host", "host to device"]
        times = [event["ts"] for event in events if event["pid"] == pid and event["ph"] != "M"]
        assert times == sorted(times)
        for tid in (1, 2, 3):
            nested(lanes[pid, tid])
        for i, stage in enumerate(plan.stages):
            own = [e for e in lanes[pid, 1] if e["args"]["stage"] == stage]
            whats = [e["cat"] for e in own]
            assert whats.count("forward") == 1
            if not stage.startswith("("):
                assert "backward" in whats
                runs = 1 + plan.segments[0].depth(i) if plan.segments and "recompute" in whats else None
                recomputed = runs is not None or plan.choices[i].action == "recompute"
                assert whats.count("recompute") == int(recomputed)
    # All time is somebody's: the outermost spans fill the step.
    outer = [s for s in trace.measured.spans if s.what in ("forward", "backward")]
    assert sum(s.end_s - s.start_s for s in outer) == pytest.approx(trace.measured.step_s, abs=1e-9)


@pytest.mark.parametrize("what", ["swap", "segment"])
def test_bytes_are_those_of_stats_and_verify(what: str) -> None:
    trace, plan = traced("transformer", what)
    model, inputs = build("transformer")
    found = ckptplan.verify(model, plan, inputs, repeats=1)
    assert trace.measured.bytes_over("out") == found.stats.swapped_out_bytes
    assert trace.measured.bytes_over("in") == found.stats.swapped_in_bytes
    assert trace.measured.peak_bytes == found.measured_peak_bytes
    assert trace.predicted is not None
    assert trace.predicted.bytes_over("out") == trace.predicted.bytes_over("in") == plan.host_bytes
    assert trace.predicted.peak_bytes == plan.peak_bytes
    assert trace.predicted.step_s == plan.step_s
    memory = [event["args"]["bytes"] for event in trace.events() if event["ph"] == "C" and event["pid"] == 1]
    assert max(memory) == found.measured_peak_bytes


def test_copies_lie_between_what_they_serve() -> None:
    """Out after the stage's forward began, in before its backward ends; nothing before the step, nothing after."""
    trace, _ = traced("transformer", "swap")
    step = trace.measured
    backward_s = min(s.start_s for s in step.spans if s.what == "backward")
    out = [s for s in step.spans if s.lane == "out"]
    back = [s for s in step.spans if s.lane == "in"]
    assert len(out) == len(back) > 0
    assert all(0 < s.start_s <= s.end_s < step.step_s for s in (*out, *back))
    assert all(s.start_s > backward_s for s in back)
    assert min(s.start_s for s in out) < backward_s


def test_memory_is_drawn_at_its_time() -> None:
    """The allocator's events and the marks are read from two clocks: the peak lies in the step, near where it is
    predicted."""
    trace, plan = traced("transformer", "recompute")
    step = trace.measured
    assert all(-0.05 < at_s < step.step_s + 0.05 for at_s, _ in step.memory)
    peak_s = next(at_s for at_s, nbytes in step.memory if nbytes == step.peak_bytes)
    phases = {s.what for s in step.spans if s.lane == "compute" and s.start_s <= peak_s <= s.end_s}
    assert simulate(measured("transformer"), plan).peak_phase in phases


def test_gradients_that_go_inside_hide_the_peak() -> None:
    """When they go isn't recorded, and a peak that is too high would count memory that nobody uses."""
    model, inputs = build("mlp")
    with ckptplan.apply(model, planned("mlp", "keep"), profile=measured("mlp")) as handle:

        def step() -> None:
            model.zero_grad()
            model(inputs).sum().backward()

        first = handle.trace(step, inputs=inputs)
        step()
        second = handle.trace(step, inputs=inputs)
        assert handle.stats().peak_bytes == first.measured.peak_bytes
        assert second.measured.peak_bytes > first.measured.peak_bytes
        assert not any("zero_grad" in note for note in first.notes)
        assert any("call zero_grad() before" in note for note in second.notes)


def test_without_a_profile_nothing_is_predicted(tmp_path: Path) -> None:
    model, inputs = build("mlp")
    trace = ckptplan.trace(model, planned("mlp", "swap"), inputs)
    assert trace.predicted is None
    assert {event["pid"] for event in trace.events()} == {1}
    assert "predicted" not in str(trace)
    with pytest.raises(InvalidInputError, match="can't be written"):
        trace.save(tmp_path / "no" / "trace.json")
    with pytest.raises(InvalidInputError, match="inputs="):
        ckptplan.trace(model, planned("mlp", "swap"))


def test_the_page_of_an_applied_plan() -> None:
    model, inputs = build("transformer")
    profile, plan = measured("transformer"), planned("transformer", "segment")
    verification = ckptplan.verify(model, plan, inputs, repeats=1)
    with ckptplan.apply(model, plan, profile=profile) as handle:
        trace = handle.trace(lambda: model(inputs).sum().backward(), inputs=inputs)
        report = handle.report(trace=trace, verification=verification)
    assert report.data["measured"]["bytes"] == tuple(nbytes for _, nbytes in trace.measured.memory)
    assert max(map(sum, zip(*report.data["stacked"], strict=True))) == plan.peak_bytes
    for told in ("gradients bitwise equal", "1 training forward"):
        assert told in report.html
        assert told in report.markdown
    with (
        ckptplan.apply(model, planned("transformer", "keep")) as handle,
        pytest.raises(InvalidInputError, match="report draws the profile that the plan was made from, which isn't"),
    ):
        handle.report()


def test_what_is_no_step_isn_t_traced() -> None:
    model, inputs = build("mlp")
    with ckptplan.apply(model, planned("mlp", "recompute")) as handle:
        with pytest.raises(InvalidInputError, match="ran 0 training forwards"):
            handle.trace(lambda: None)
        with pytest.raises(InvalidInputError, match="no backward ended"):
            handle.trace(lambda: model(inputs))
        with pytest.raises(InvalidInputError, match="ran 2 training forwards"):
            handle.trace(lambda: [model(inputs).mean().backward() for _ in range(2)])
        assert handle.trace(lambda: model(inputs).mean().backward(), inputs=inputs).measured.spans


def test_command_line_writes_a_trace(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    measured("mlp").save(tmp_path / "profile.json")
    planned("mlp", "swap").save(tmp_path / "plan.json")
    out = tmp_path / "trace.json"
    plan = (tmp_path / "plan.json", "--out", out)
    found = output(run("trace", "small_models:mlp", *plan, "--profile", tmp_path / "profile.json"))
    assert "measured" in found
    assert "predicted" in found
    assert {event["pid"] for event in json.loads(out.read_text(encoding="utf-8"))["traceEvents"]} == {1, 2}
    assert run("trace", "small_models:transformer", *plan).exit_code == 2
