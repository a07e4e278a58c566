from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ckptplan.cli import app
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB
from ckptplan.referee import simulate, validate

FORMATS = Path(__file__).parent.parent / "docs" / "formats.md"
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def chain() -> Profile:
    n = 6
    mib = 1 << 20
    return Profile.from_chain([0.01] * n, [0.02] * n, [4 * mib] * n, [40 * mib] * n, input_bytes=mib)


@pytest.fixture
def profile_file(chain: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    chain.save(path)
    return path


def keep_all_gb(profile: Profile) -> float:
    return simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes / GIB


def assert_clean_error(result: Result, *texts: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for text in texts:
        assert text in result.stderr


def plain(text: str) -> str:
    """`text` without the terminal's escape sequences and with its wrapping undone."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).replace("│", " ").split())


def test_help_names_every_command_and_version_prints(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "solve", "show", "simulate", "baselines"):
        assert command in result.stdout
    version = run("--version")
    assert version.exit_code == 0
    assert re.fullmatch(r"ckptplan \d+\S*\n", version.stdout)


@pytest.mark.parametrize("command", ["demo", "solve", "show", "simulate", "baselines"])
def test_each_command_has_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: ckptplan {command}" in plain(result.stdout)


def test_solve_writes_a_plan_that_fits_and_simulate_accepts_it(
    run: Run, chain: Profile, profile_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    budget_gb = 0.6 * keep_all_gb(chain)
    result = run("solve", profile_file, "--budget-gb", budget_gb, "-o", out)
    assert result.exit_code == 0, result.output
    plan = Plan.load(out)
    assert plan.budget_bytes == int(budget_gb * GIB)
    assert validate(chain, plan, plan.budget_bytes) == ()
    assert str(plan) in result.stdout
    replay = run("simulate", profile_file, out)
    assert replay.exit_code == 0, replay.output
    assert "no violations" in replay.stdout


def test_solve_takes_only_the_actions_given(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    budget_gb = 0.6 * keep_all_gb(chain)
    result = run("solve", profile_file, "--budget-gb", budget_gb, "--actions", "keep,recompute", "-o", out)
    assert result.exit_code == 0, result.output
    assert {choice.action for choice in Plan.load(out).choices} == {"keep", "recompute"}


def test_solve_keeps_the_host_limit(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    limit_gb = 0.05
    arguments = ("--budget-gb", 0.6 * keep_all_gb(chain), "--host-gb", limit_gb, "-o", out)
    result = run("solve", profile_file, *arguments)
    assert result.exit_code == 0, result.output
    assert Plan.load(out).host_bytes <= limit_gb * GIB


def test_a_budget_that_is_too_small_names_the_smallest_that_works(run: Run, profile_file: Path) -> None:
    result = run("solve", profile_file, "--budget-gb", 0.001)
    assert_clean_error(result, "smallest feasible peak")


@pytest.mark.parametrize("budget", ["12GB", "nan", "inf", "-1", "0", ""])
def test_a_budget_that_is_no_size_is_refused_with_its_unit(run: Run, profile_file: Path, budget: str) -> None:
    result = run("solve", profile_file, f"--budget-gb={budget}")
    assert_clean_error(result, "--budget-gb", "2**30 bytes")


def test_unknown_actions_are_named(run: Run, profile_file: Path) -> None:
    result = run("solve", profile_file, "--budget-gb", 1, "--actions", "keep,drop")
    assert_clean_error(result, "keep,drop", "keep, swap, recompute")


@pytest.mark.parametrize(
    "arguments", [("show",), ("solve", "--budget-gb", "1"), ("baselines", "--budget-gb", "1")], ids=lambda a: a[0]
)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        ("not json", "can't be read as JSON"),
        ("[]", "schema None"),
        ('{"schema": "ckptplan.profile/99"}', "'ckptplan.profile/99'"),
        ('{"schema": "ckptplan.profile/1"}', "docs/formats.md"),
        ("\xff", "can't be read as JSON"),
    ],
)
def test_files_that_are_none_of_ours_are_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], content: str | None, text: str
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    command, *options = arguments
    assert_clean_error(run(command, path, *options), str(path), text)


def test_a_directory_is_no_output_file(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    result = run("solve", profile_file, "--budget-gb", 2 * keep_all_gb(chain), "-o", tmp_path)
    assert result.exit_code == 2
    assert "can't be written" in result.stderr


def test_show_prints_stages_and_totals_of_a_profile(run: Run, chain: Profile, profile_file: Path) -> None:
    result = run("show", profile_file)
    assert result.exit_code == 0, result.output
    for stage in chain.stages:
        assert f" {stage.name} " in result.stdout
    for text in ("keep-all peak", "smallest feasible peak", "keep-all step", "180.0 ms"):
        assert text in result.stdout


def test_show_prints_stage_names_as_they_are(run: Run, tmp_path: Path) -> None:
    """Brackets in a name are no markup."""
    path = tmp_path / "profile.json"
    documented = json.loads(_example("profile"))
    documented["stages"][0]["name"] = "[red]h[/red][0]"
    path.write_text(json.dumps(documented))
    assert "[red]h[/red][0]" in run("show", path).stdout


def test_simulate_names_what_a_plan_breaks(run: Run, profile_file: Path, chain: Profile, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run("solve", profile_file, "--budget-gb", 0.6 * keep_all_gb(chain), "-o", path).exit_code == 0
    tight = run("simulate", profile_file, path, "--budget-gb", 0.01)
    assert tight.exit_code == 1
    assert "violation (budget)" in tight.stdout
    data = json.loads(path.read_text())
    data["choices"][0] = {"action": "swap", "moves": [99], "release": 0, "prefetch": 0}
    path.write_text(json.dumps(data))
    broken = run("simulate", profile_file, path)
    assert broken.exit_code == 1
    assert "violation (moves) s0: position 99" in broken.stdout


def test_simulate_refuses_the_plan_of_another_profile(run: Run, profile_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(_example("plan"))
    assert_clean_error(run("simulate", profile_file, plan_file), "'encoder'", "'s0'")


def test_baselines_lists_every_planner(run: Run, chain: Profile, profile_file: Path) -> None:
    from ckptplan.baselines import BASELINES

    result = run("baselines", profile_file, "--budget-gb", 0.6 * keep_all_gb(chain))
    assert result.exit_code == 0, result.output
    for name in BASELINES:
        assert name in result.stdout
    assert "needs " in result.stdout  # keep_all, which can't fit


def _example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```json\n(.*?)```", FORMATS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_documented_examples_load_and_agree(run: Run, tmp_path: Path) -> None:
    for name in ("profile", "plan"):
        (tmp_path / f"{name}.json").write_text(_example(name))
    profile, plan = Profile.load(tmp_path / "profile.json"), Plan.load(tmp_path / "plan.json")
    assert validate(profile, plan, plan.budget_bytes) == ()
    # What the text next to the example says.
    assert simulate(profile, (KEEP, KEEP)).peak_bytes == 790
    assert run("show", tmp_path / "profile.json").exit_code == 0
    assert run("solve", tmp_path / "profile.json", "--budget-gb", "6e-7").exit_code == 0
    assert run("simulate", tmp_path / "profile.json", tmp_path / "plan.json").exit_code == 0


def test_the_documented_fields_are_those_written(chain: Profile, tmp_path: Path) -> None:
    text = FORMATS.read_text(encoding="utf-8")
    chain.save(tmp_path / "profile.json")
    plan = json.loads(_example("plan"))
    written = json.loads((tmp_path / "profile.json").read_text())
    fields = {*written, *written["stages"][0], *written["storages"][0], *written["link"], *written["fingerprint"]}
    for field in {*fields, *plan, *plan["choices"][0]}:
        assert f"`{field}`" in text


@pytest.mark.skipif(importlib.util.find_spec("ckptplan.api") is None, reason="ckptplan.api is not there yet")
def test_demo_trains_with_identical_losses_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from ckptplan.demo import Size, run

    size = Size(blocks=3, width=32, heads=2, context=64, batch=8)
    assert run("cpu", steps=2, size=size, time_limit_s=2.0, console=Console(width=160))
    out = capsys.readouterr().out
    assert "same, same" in out
    assert "DIFFER" not in out
    for row in ("plain", "ckptplan", "recompute all", "pooch"):
        assert row in out
