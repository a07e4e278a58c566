"""What every test needs; loads no PyTorch, so that planning is tested without it (see `torch_setup` for the rest).

`pytest -m planning` runs the tests that carry the mark, with PyTorch out of reach: a marked test that imports it fails.
Files without the mark aren't even imported then, nor where PyTorch isn't installed. Tests marked `long` run in such a
run, by `-m long`, and by their name (`file::test`).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

if importlib.util.find_spec("hypothesis") is not None:  # the tests marked gpu do without (docs/gpu.md)
    from hypothesis import settings

    # No deadline: how long an example takes says more about the machine than about the code.
    settings.register_profile("ckptplan", deadline=None)
    settings.load_profile("ckptplan")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know the options of plugins that a machine with a GPU may lack; unknown ones are errors (--strict-config)."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds until a test is taken for hanging; without pytest-timeout none is")


def pytest_configure(config: pytest.Config) -> None:
    # Processes that tests start needn't compile the package again, wherever the variable is set.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not hasattr(config, "workerinput"):  # once, for all processes that run tests
        folder = tempfile.TemporaryDirectory(prefix="ckptplan-profiles-")
        os.environ["CKPTPLAN_TEST_PROFILES"] = folder.name
        config.add_cleanup(folder.cleanup)
    if config.option.markexpr.strip() == "planning" and "torch" not in sys.modules:
        importlib.import_module("no_torch")
    if has_torch():
        config.pluginmanager.register(importlib.import_module("torch_setup"))


def has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:  # put out of reach by no_torch
        return False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a planning test where no other can run."""
    if collection_path.suffix != ".py" or has_torch():
        return None
    return "mark.planning" not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_name = any("::" in argument for argument in config.args)
    found = {item.nodeid for item in items}
    for item in items:
        for mark in item.iter_markers("long"):
            function = item.nodeid.partition("[")[0]
            unknown = [i for i in (*mark.args, *mark.kwargs.get("but", ())) if f"{function}[{i}]" not in found]
            if unknown and not by_name:
                raise pytest.UsageError(f"{item.nodeid}: `long` names {unknown}, which no test has")
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "long" or _applies(mark, item)]
    if not by_name and not any(word in config.option.markexpr for word in ("long", "planning")):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if has_torch():
        return
    for item in items:
        if not item.get_closest_marker("planning"):
            item.add_marker(pytest.mark.skip(reason="needs PyTorch, which isn't installed"))


def _applies(mark: pytest.Mark, item: Any) -> bool:
    """Whether a mark `long(*ids)`, or `long(but=ids)`, holds for the values of an item; `long` without ids always."""
    if mark.args or mark.kwargs:
        return item.callspec.id in mark.args or item.callspec.id not in mark.kwargs.get("but", (item.callspec.id,))
    return True


def pytest_collection_finish() -> None:
    """Take what the imports made out of garbage collection, which would walk through all of it in every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _later_imports() -> None:
    """Leave out of garbage collection what the modules' own tests have imported since then as well."""
    pytest_collection_finish()


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """End each search after a little work, long before its time limit: the same plans on a busy machine as on another.

    The mixed-integer program, which takes all the time that it is given, is left out.
    """
    from steered import steer

    steer(monkeypatch, rounds=20, most_width=250, mixed_stages=0)


@pytest.fixture
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile two variants of each compiled layer in place of six, each of which takes seconds."""
    from ckptplan.profiling.values import variants

    monkeypatch.setattr(variants, "_MOST", 2)


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """As in a shell's foreground; a test run in the background inherits a SIGINT that is ignored.

    Hypothesis has the garbage collector call a function of Python; an interrupt that arrives in it is lost.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    called = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(called)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command of the command line."""
    from typer.testing import CliRunner

    from ckptplan.cli.app import app

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def no_leak() -> Iterator[None]:
    """No thread and no file outlives a test, whatever it did."""

    def left() -> list[str]:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("ckptplan")]
        links = [os.readlink(p) for fd in os.listdir("/proc/self/fd") if os.path.islink(p := f"/proc/self/fd/{fd}")]
        return sorted([*threads, *(link for link in links if "(deleted)" in link)])

    before = left()
    yield
    if left() != before:
        gc.collect()
    assert left() == before
