"""Planning needs no PyTorch: what the package loads, and what works where PyTorch can't be imported."""

from __future__ import annotations

import ast
import os
import pkgutil
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ckptplan

pytestmark = pytest.mark.planning

TESTS = Path(__file__).parent
HEAVY = {"torch", "numpy", "ortools", "networkx", "matplotlib", "scipy", "pandas"}


def python(code: str, *, cwd: Path) -> str:
    """What `code` prints in a process of its own, in which `no_torch` can be imported."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))), "NO_COLOR": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_public_names_are_written_alike_in_all_three_places() -> None:
    """`__all__`, the table of modules, and the imports that type checkers and editors see."""
    seen = {}
    for node in ast.walk(ast.parse(Path(ckptplan.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptplan."):
            seen |= {alias.name: node.module for alias in node.names}
    assert seen == ckptplan._MODULES
    assert {*ckptplan.__all__, "__version__"} == set(seen)
    assert set(ckptplan.__all__) <= set(dir(ckptplan))
    # Importing a submodule sets it as an attribute, which would hide a public name.
    assert not set(seen) & {module.name for module in pkgutil.iter_modules(ckptplan.__path__)}
    with pytest.raises(AttributeError, match="'ckptplan' has no attribute 'slove'"):
        ckptplan.slove  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_and_its_help_load_nothing_heavy(tmp_path: Path) -> None:
    code = """
        import sys, {what}
        try:
            {run}
        except SystemExit as done:
            assert not done.code
        print(*sorted({{name.partition(".")[0] for name in sys.modules}}), sep="\\n")
    """
    loaded = set(python(code.format(what="ckptplan", run="pass"), cwd=tmp_path).split())
    assert "ckptplan" in loaded
    assert not loaded & {*HEAVY, "typer", "rich"}
    loaded = set(python(code.format(what="ckptplan.cli.app as cli", run="cli.app(['--help'])"), cwd=tmp_path).split())
    assert "typer" in loaded
    assert not loaded & HEAVY


CALLS = """
    import no_torch
    import sys
    import ckptplan

    mib = 1 << 20
    chain = ckptplan.Profile.from_chain([0.01] * 4, [0.02] * 4, [4 * mib] * 4, [40 * mib] * 4, input_bytes=mib)
    plan = ckptplan.solve(chain, 0.12)
    assert plan.status == "optimal"
    assert ckptplan.validate(chain, plan, plan.budget_bytes) == ()
    assert ckptplan.simulate(chain, plan).peak_bytes == plan.peak_bytes
    assert ckptplan.solve(chain, max_overhead=0.2).overhead <= 0.2
    assert len(ckptplan.frontier(chain, points=2, time_limit_s=60.0)) == 2
    assert "networkx" not in sys.modules
    assert str(ckptplan.explain(chain, plan))
    assert ckptplan.Device and ckptplan.AllocatorSettings()
    chain.save("profile.json")

    from typer.testing import CliRunner
    from ckptplan.cli.app import app

    def run(*arguments):
        return CliRunner().invoke(app, list(arguments))

    for command in (
        "solve profile.json --budget-gb 0.12 -o plan.json",
        "frontier profile.json --points 2 --time-limit 2 -o plans",
        "explain profile.json plan.json",
        "show profile.json --options",
        "show profile.json --graph",
        "show plan.json",
        "simulate profile.json plan.json",
        "compare profile.json --budgets 50 --json rows.json",
        "--version",
    ):
        done = run(*command.split())
        assert done.exit_code == 0, (command, done.output, done.exception)
    assert "torch" not in sys.modules
"""


def test_what_plans_a_profile_works_without_torch(tmp_path: Path) -> None:
    """Every public call and command that needs no model, each baseline among them."""
    python(CALLS, cwd=tmp_path)


COMMANDS = """
    import no_torch
    from typer.testing import CliRunner
    from ckptplan.cli.app import app

    for command in (
        "demo",
        "calibrate",
        "profile a_model:build",
        "solve a_model:build --budget-gb 1",
        "compare a_model:build --budgets 50",
        "estimate a_model:build",
        "trace a_model:build plan.json",
        "fit a_model:build",
    ):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 2, (command, done.output, done.exception)
        assert done.stdout == ""
        print(done.stderr, end="")
"""


def test_commands_that_need_torch_say_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a_model.py").write_text("import torch\n")
    chain = ckptplan.Profile.from_chain([1.0], [1.0], [1], [1], input_bytes=1)
    ckptplan.solve(chain, 1.0).save(tmp_path / "plan.json")
    lines = python(COMMANDS, cwd=tmp_path).splitlines()
    assert len(lines) == 8
    assert set(lines) == {"error: this needs PyTorch, which isn't installed; install it with: pip install torch"}


MARKED = """
    import pytest

    pytestmark = pytest.mark.planning


    def test_that_needs_none() -> None:
        import ckptplan.core.profile


    def test_that_imports_torch() -> None:
        import torch


    @pytest.mark.gpu
    def test_that_needs_more() -> None:
        pass
"""


@pytest.mark.parametrize("installed", [True, False])
def test_marked_tests_run_without_torch_and_others_are_left_out(tmp_path: Path, installed: bool) -> None:
    for name in ("conftest", "no_torch", "torch_setup", "command_line"):
        shutil.copy(TESTS / f"{name}.py", tmp_path)
    (tmp_path / "test_marked.py").write_text(textwrap.dedent(MARKED))
    (tmp_path / "test_other.py").write_text("import torch\n\n\ndef test_other() -> None:\n    pass\n")
    selected = ["-m", "planning"] if installed else []
    arguments = ["-q", "-n0", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    arguments += ["--rootdir", str(tmp_path)]
    code = f"""
        {"" if installed else "import no_torch"}
        import contextlib, io, pytest
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            pytest.main({[*arguments, *selected, str(tmp_path)]!r})
        print(out.getvalue())
    """
    out = python(code, cwd=tmp_path)
    assert "FAILED test_marked.py::test_that_imports_torch - ModuleNotFoundError" in out
    assert "1 failed, 2 passed" in out
    assert "test_other" not in out
