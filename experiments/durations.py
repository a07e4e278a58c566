"""A pytest plugin that appends each test's outcomes and durations to the file named by `DURATIONS`, one JSON a line.

PYTHONPATH=experiments DURATIONS=durations.jsonl python -m pytest -p durations
"""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the main process is told of it, too
        return
    with open(os.environ["DURATIONS"], "a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, report.when, report.outcome, report.duration]) + "\n")
