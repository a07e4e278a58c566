"""Commands that take a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run, assert_clean_error


def test_compare_takes_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_model.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), (torch.ones(256, 64),)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = run("compare", "tiny_model:make", "--budgets", "50", "--planners", "ckptplan,recompute_all")
    assert result.exit_code == 0, result.output
    assert "recompute_all" in result.stdout
    assert_clean_error(
        run("compare", "tiny_model:absent", "--budgets", "50"), "tiny_model:absent", "package.module:name"
    )
    assert_clean_error(run("compare", "tiny_model:number", "--budgets", "50"), "int", "torch.nn.Module")


def test_demo_trains_with_identical_losses_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from ckptplan.cli.demo import Size, run

    size = Size(blocks=3, width=32, heads=2, context=64, batch=8)
    assert run("cpu", steps=2, size=size, time_limit_s=2.0, console=Console(width=160))
    out = capsys.readouterr().out
    assert "same, same" in out
    assert "DIFFER" not in out
    for row in ("plain", "ckptplan", "recompute all", "pooch"):
        assert row in out
