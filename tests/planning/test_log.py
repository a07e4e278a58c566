"""What a training's log says of its plans, and what a terminal shows meanwhile."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import IO

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.budget import Budget
from ckptplan.planning import log

BEGINS = "planning for 12.00 GiB before this step runs: profiling it, then solving for up to 10 s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """As in a program that sets no logging up: one without handlers, which pytest adds to all others."""
    found = logging.Logger("ckptplan")
    monkeypatch.setattr(log, "_LOG", found)
    return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def planned(stderr: IO[str]) -> None:
    with contextlib.redirect_stderr(stderr), log.planning(Budget.of(12, None), 10.0, None) as shown:
        (shown or str)("working")


def test_a_terminal_shows_what_is_being_done_and_a_file_one_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(terminal)
    assert terminal.getvalue().startswith(f"ckptplan: {BEGINS}\n")
    assert "working" in terminal.getvalue()
    file, found, given = io.StringIO(), [], io.StringIO()
    planned(file)
    with contextlib.redirect_stderr(given), log.planning(Budget.of(12, None), 10.0, found.append) as shown:
        assert shown is not None
        shown("working")
    assert found == ["working"]  # the user's own progress has it all
    assert file.getvalue() == given.getvalue() == f"ckptplan: {BEGINS}\n"
    monkeypatch.setattr(log, "is_first_rank", lambda: False)
    other = io.StringIO()
    planned(other)
    assert other.getvalue() == ""


@pytest.mark.parametrize("how", ["level", "level of handlers", "disabled"])
def test_nothing_is_shown_where_logging_hides_it(
    how: str, logger: logging.Logger, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "disabled":
        monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    else:
        logger.setLevel(logging.WARNING)
    if how == "level of handlers":
        logger.addHandler(logging.StreamHandler(terminal))
    planned(terminal)
    assert terminal.getvalue() == ""


def test_a_log_has_the_line(logger: logging.Logger, terminal: Terminal) -> None:
    file = io.StringIO()
    logger.addHandler(logging.StreamHandler(file))
    planned(terminal)
    assert file.getvalue() == f"ckptplan: {BEGINS}\n"
    assert BEGINS not in terminal.getvalue()


def test_no_line_is_drawn_below_another_display_of_rich(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), ckptplan.progress():
        planned(sys.stderr)  # which rich has replaced
    text = terminal.getvalue()
    assert BEGINS in " ".join(text.split())
    assert "working" not in text


def test_budgets_in_words() -> None:
    assert str(Budget.of(None, "50%")) == "50% of the way from the smallest peak to everything kept"
    assert str(Budget.of(None, None)) == "the device's free memory"
    assert str(Budget.of(None, "auto")) == "the device's free memory, less 5%"


def test_plans_that_a_training_makes_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    """The first forward's, and one for larger inputs, which a warning tells of afterwards."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), torch.randn(4, 8)
    with ckptplan.apply(model, budget="100%", time_limit_s=0.2):
        assert capsys.readouterr().err == ""
        model(x).sum().backward()
        begins, ends = capsys.readouterr().err.splitlines()
        assert begins.startswith("ckptplan: planning for 100% of the way")
        assert "keeps everything, which fits" in ends
        with pytest.warns(RuntimeWarning, match="planned again for"):
            model(torch.cat([x, x])).sum().backward()
        (again,) = capsys.readouterr().err.splitlines()
        assert again == begins
