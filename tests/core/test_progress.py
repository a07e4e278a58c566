"""Messages of long work, and the line that shows them."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from random_chains import homogeneous_chain
from rich.console import Console

import ckptplan
from ckptplan.core.display import Line, drawn
from ckptplan.core.progress import Message, counted, in_notebook, limited, search_state
from ckptplan.core.request import Limits, ignore_progress, reporting
from ckptplan.solving.frontier import everything_kept_bytes

pytestmark = pytest.mark.planning


def text_of(renderable: Any) -> str:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue().strip()  # type: ignore[attr-defined]


def test_a_message_is_its_text_with_its_counts() -> None:
    message = counted("timing", 17, 40, "stages")
    assert message == "timing 17 of 40 stages"
    assert (message.done, message.total) == (17, 40)
    assert limited("searching", 10.0) == "searching, 0 s of 10 s"
    assert str(Message("plain")) == "plain"
    assert "━" in text_of(drawn(message))
    assert "[red]" in text_of(drawn("a stage named [red]"))  # no markup
    assert search_state(float("inf"), 0.0, None) == "no plan yet"
    assert search_state(0.102, 0.1, 3 << 29) == "step 102.0 ms, peak 1.50 GiB, gap 2.00%"


def test_the_clock_of_a_search_runs_on_between_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    line = Line("beginning")
    line(Message("searching", began_s=100.0, limit_s=10.0))
    monkeypatch.setattr("time.monotonic", lambda: 104.0)
    assert text_of(line.drawn()).endswith("searching, 4 s of 10 s")
    line("plain")
    assert text_of(line.drawn()).endswith("plain, 4 s")  # since the line began


def test_a_terminal_alone_shows_the_line_until_the_work_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with ckptplan.progress() as shown:
        shown("working")
    assert capsys.readouterr() == ("", "")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with ckptplan.progress("first", console=console) as shown:
        shown(counted("timing", 3, 4, "stages"))
    assert "timing 3 of 4 stages" in console.file.getvalue()  # type: ignore[attr-defined]


class Notebook:
    """A kernel's display, with the last state of each output."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, line: Any, *, display_id: bool) -> Any:
        assert display_id
        assert "text/html" in line._repr_mimebundle_((), ())
        at = len(self.outputs)
        self.outputs.append(text_of(line))
        return SimpleNamespace(update=lambda line: self.outputs.__setitem__(at, text_of(line)))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=found.display))  # type: ignore[arg-type]
    return found


def test_a_search_in_a_notebook_shows_one_line(notebook: Notebook) -> None:
    profile = homogeneous_chain(3, link_ratio=0.5)
    budget_gb = everything_kept_bytes(profile) / 2 / 2**30
    ckptplan.solve(profile, budget_gb)
    assert len(notebook.outputs) == 1
    ckptplan.solve(profile, budget_gb, on_progress=ignore_progress)
    assert len(notebook.outputs) == 1
    with ckptplan.progress() as shown:
        ckptplan.solve(profile, budget_gb, on_progress=shown)
        shown("done with all")
    assert len(notebook.outputs) == 2
    assert notebook.outputs[1].endswith("done with all")


def test_programs_and_terminals_show_nothing_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    assert reporting(None) is ignore_progress
    shell = SimpleNamespace()  # of `ipython` in a terminal
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert not in_notebook()
    assert Limits.of({"on_progress": None}).on_progress is ignore_progress
    assert reporting(print) is print


def test_plans_of_a_frontier_and_of_a_slowdown_are_counted_and_timed() -> None:
    profile = homogeneous_chain(3, link_ratio=0.5)
    seen: list[str] = []
    ckptplan.frontier(profile, points=3, time_limit_s=5, on_progress=seen.append)
    assert any(text.startswith("budget 2 of 3 (") and text.endswith(" s of 5 s") for text in seen)
    seen.clear()
    plan = ckptplan.solve(profile, max_overhead=0.1, time_limit_s=5, on_progress=seen.append)
    assert any(text.startswith("trying ") and "gap" in text for text in seen)
    seen.clear()
    ckptplan.explain(profile, plan, on_progress=seen.append)
    assert seen[-1].endswith("0 s of 10 s")
