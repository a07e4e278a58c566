"""Traces drawn without running a model."""

from __future__ import annotations

import pytest

from ckptplan.core.trace import DrawnStep, Span, Trace

pytestmark = pytest.mark.planning


def test_disk_copies_have_lanes_of_their_own() -> None:
    spans = (
        Span("compute", "forward", "a", 0.0, 1.0),
        Span("disk out", "out", "", 0.5, 0.75, 100),
        Span("disk in", "in", "", 0.75, 1.0, 100),
    )
    trace = Trace(DrawnStep(spans, ((0.0, 1),), 1.0), None)
    names = [e["args"]["name"] for e in trace.events() if e["name"] == "thread_name"]
    assert names == ["compute", "device to host", "host to device", "device to disk", "disk to device"]
    assert [e["tid"] for e in trace.events() if e["ph"] == "X"] == [1, 4, 5]
