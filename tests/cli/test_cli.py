from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from command_line import Run, assert_clean_error, output

from ckptplan.baselines import rotor
from ckptplan.core.device import Device
from ckptplan.core.estimate import CATEGORIES, Estimate, Phase, Tensors
from ckptplan.core.frontier import Frontier
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.overheads import Overheads
from ckptplan.core.plan import KEEP, Decision, Plan, Transfer
from ckptplan.core.profile import Fingerprint, Profile
from ckptplan.core.resident import Resident
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Differentiated, InputTensor, Stage
from ckptplan.core.storage import Storage
from ckptplan.core.units import GIB, format_bytes
from ckptplan.referee import simulate, validate

pytestmark = pytest.mark.planning

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"


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


def keep_all_bytes(profile: Profile) -> int:
    return simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes


def keep_all_gb(profile: Profile) -> float:
    return keep_all_bytes(profile) / GIB


def plain(text: str) -> str:
    """`text` without the terminal's escape sequences and with its wrapping undone."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).replace("│", " ").split())


COMMANDS = (
    "demo", "profile", "solve", "frontier", "explain", "show", "simulate", "compare", "calibrate", "estimate", "fit",
    "run",
)  # fmt: skip


def test_help_names_every_command_each_has_an_example_and_version_prints(run: Run) -> None:
    overview = run("--help")
    assert overview.exit_code == 0
    for command in COMMANDS:
        assert command in overview.stdout
        assert f"Example: ckptplan {command}" in plain(run(command, "--help").stdout)
    version = run("--version")
    assert version.exit_code == 0
    assert re.fullmatch(r"ckptplan \d+\S*\n", version.stdout)


def test_a_command_that_is_gone_says_what_there_is_instead(run: Run) -> None:
    assert_clean_error(run("snapshot", "file.pickle"), "no command snapshot any more", "memory_viz", "--allocator")


@pytest.mark.long
def test_solve_writes_a_plan_that_fits_and_simulate_accepts_it(
    run: Run, chain: Profile, profile_file: Path, tmp_path: Path
) -> None:
    out, budget_gb = tmp_path / "plan.json", 0.6 * keep_all_gb(chain)
    arguments = ("solve", profile_file, "--budget-gb", budget_gb, "-o", out)
    result = output(run(*arguments))
    plan = Plan.load(out)
    assert plan.budget_bytes == int(budget_gb * GIB)
    assert validate(chain, plan, plan.budget_bytes) == ()
    assert str(plan) in result
    replay = output(run("simulate", profile_file, out))
    assert "no violations" in replay
    explained = output(run("explain", profile_file, out))
    for text in ("recompute", "memory    binds in", "saves about", "with more memory", chain.stages[0].name):
        assert text in explained
    # With the actions given alone, and within the host's limit.
    assert run(*arguments, "--actions", "keep,recompute").exit_code == 0
    assert {choice.action for choice in Plan.load(out).choices} == {"keep", "recompute"}
    assert run(*arguments, "--host-gb", 0.05).exit_code == 0
    assert Plan.load(out).host_bytes <= 0.05 * GIB


@pytest.mark.parametrize(
    ("command", "arguments", "texts"),
    [
        ("solve", ("--budget-gb", 0.001), ["smallest feasible peak"]),
        ("solve", ("--budget-gb=12GB",), ["--budget-gb", "2**30 bytes"]),
        ("solve", ("--budget-gb=nan",), ["--budget-gb", "2**30 bytes"]),
        ("solve", ("--budget-gb=-1",), ["--budget-gb", "2**30 bytes"]),
        (
            "solve",
            ("--budget-gb", 1, "--in-flight", 2),
            ["no option --in-flight any more: a plan is for one forward at a time"],
        ),
        ("solve", ("--budget-gb", 1, "--actions", "keep,drop"), ["keep,drop", "keep, swap, recompute"]),
        ("solve", (), ["--budget-gb", "--max-overhead"]),
        ("solve", ("--budget-gb", 1, "--max-overhead", 0.1), ["--budget-gb", "--max-overhead"]),
        ("compare", (), ["--budget-gb"]),
        ("compare", ("--budget-gb", "1", "--budgets", "50"), ["either"]),
        ("compare", ("--budgets", "50,x"), ["'50,x'"]),
        ("compare", ("--budgets", "101"), ["0 to 100"]),
        ("compare", ("--budget-gb", "1", "--planners", "rotor,best"), ["'rotor,best'"]),
    ],
)
@pytest.mark.long("solve-arguments0-texts0")
def test_what_is_wrong_is_said_in_one_line(
    run: Run, profile_file: Path, command: str, arguments: tuple[object, ...], texts: list[str]
) -> None:
    assert_clean_error(run(command, profile_file, *arguments), *texts)


@pytest.mark.parametrize(
    ("command", "content", "text"),
    [
        ("show", None, "No such file"),
        ("solve", "not json", "can't be read as JSON"),
        ("compare", "[]", "schema None"),
        ("show", '{"schema": "ckptplan.profile/99"}', "'ckptplan.profile/99'"),
        ("solve", '{"schema": "ckptplan.profile/1"}', "'ckptplan.profile/1'"),
        ("compare", '{"schema": "ckptplan.profile/3"}', "docs/formats.md"),
        ("show", "\xff", "can't be read as JSON"),
    ],
)
def test_files_that_are_none_of_ours_are_refused(
    run: Run, tmp_path: Path, command: str, content: str | None, text: str
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    options = () if command == "show" else ("--budget-gb", "1")
    assert_clean_error(run(command, path, *options), str(path), text)


def test_a_directory_is_no_output_file(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    result = run("solve", profile_file, "--budget-gb", 2 * keep_all_gb(chain), "-o", tmp_path)
    assert result.exit_code == 2
    assert "can't be written" in result.stderr


def test_show_prints_stages_totals_and_the_graph_of_a_profile(run: Run, chain: Profile, profile_file: Path) -> None:
    result = output(run("show", profile_file))
    for stage in chain.stages:
        assert f" {stage.name} " in result
    for text in ("keep-all peak", "smallest feasible peak", "keep-all step", "180.0 ms"):
        assert text in result
    graph = run("show", profile_file, "--graph")
    assert "s0 │ itself │ │ 1 │ 36.00 MiB │ 4.00 MiB" in " ".join(graph.stdout.split())


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
    assert "violation (moves) s0:" in broken.stdout
    assert "99" in broken.stdout


def test_plans_of_another_profile_are_refused(run: Run, profile_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(_example("plan"))
    assert_clean_error(run("simulate", profile_file, plan_file), "'encoder'", "'s0'")
    assert_clean_error(run("explain", profile_file, plan_file), "of the plan")
    assert_clean_error(run("show", plan_file, "--graph"), "is a plan", "give the profile")


def test_compare_lists_every_planner(run: Run, chain: Profile, profile_file: Path) -> None:
    from ckptplan.baselines import BASELINES

    result = output(run("compare", profile_file, "--budget-gb", 0.6 * keep_all_gb(chain), "--time-limit", 2))
    lines = result.splitlines()
    for name in ("ckptplan", *BASELINES):
        assert any(name in line.split() for line in lines), name
    kept = next(line for line in lines if "keep_all" in line)
    assert f"needs {format_bytes(keep_all_gb(chain) * GIB)}" in kept
    assert max(map(len, lines)) <= 100


def test_compare_writes_what_it_prints(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    planners = ("rotor", "ckptplan", "keep_all")
    arguments = ("--budgets", "50,100", "--planners", ",".join(planners), "--time-limit", 2)
    result = output(run("compare", profile_file, *arguments, "--json", out, "--csv"))
    data = json.loads(out.read_text())
    assert data["stages"] == len(chain.stages)
    rows = data["rows"]
    assert [row["planner"] for row in rows] == ["ckptplan", "keep_all", "rotor"] * 2
    half, full = rows[0]["budget_bytes"], rows[3]["budget_bytes"]
    assert half < full == round(keep_all_gb(chain) * GIB)
    # 1e-9: the same seconds are added in another order.
    assert all(abs(row["overhead"]) < 1e-9 and abs(row["gap"]) < 1e-9 for row in rows[3:])
    kept, row = rows[1], rows[2]
    assert (kept["step_s"], kept["gap"], kept["needs_bytes"]) == (None, None, full)
    plan = rotor.plan(chain, half)
    assert (row["step_s"], row["peak_bytes"], row["needs_bytes"]) == (plan.step_s, plan.peak_bytes, None)
    assert row["bound_s"] == rows[0]["bound_s"] <= rows[0]["step_s"]
    assert row["gap"] == pytest.approx(plan.step_s / row["bound_s"] - 1)
    read = list(csv.DictReader(io.StringIO(result)))
    assert [row["planner"] for row in read] == [row["planner"] for row in rows]
    assert [row["step_s"] for row in read] == ["" if row["step_s"] is None else str(row["step_s"]) for row in rows]
    for field in {*data, *rows[0]}:
        assert f"`{field}`" in FORMATS.read_text(encoding="utf-8")


def test_solve_without_segments_plans_none(run: Run, tmp_path: Path) -> None:
    # Only segments get three stages under 80 bytes (tests/baselines/test_baselines.py, rotor).
    three = Profile.from_chain([1.0] * 3, [2.0] * 3, [10] * 3, [30] * 3, input_bytes=10, out_bytes_per_s=0.01)
    path, out = tmp_path / "three.json", tmp_path / "plan.json"
    three.save(path)
    slow = ("--actions", "keep,recompute", "-o", out)
    assert run("solve", path, "--budget-gb", 70.5 / GIB, *slow).exit_code == 0
    assert Plan.load(out).segments
    assert "together" in run("show", out).stdout
    assert_clean_error(run("solve", path, "--budget-gb", 70.5 / GIB, "--no-segments", *slow), "80 B")


def test_solve_within_a_slowdown_needs_less_memory(
    run: Run, chain: Profile, profile_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    result = output(run("solve", profile_file, "--max-overhead", 0.2, "--time-limit", 2, "-o", path))
    assert "no plan this fast has a peak below" in result
    plan = Plan.load(path)
    assert plan.overhead <= 0.2
    assert plan.peak_bytes < keep_all_bytes(chain)
    assert plan.peak_bound_bytes is not None


def test_frontier_prints_and_saves_its_plans(run: Run, chain: Profile, profile_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    result = output(run("frontier", profile_file, "--points", 4, "--time-limit", 4, "-o", folder))
    plans = sorted((Plan.load(path) for path in folder.glob("plan_*")), key=lambda plan: plan.budget_bytes)
    assert 2 <= len(plans) <= 4
    assert list(Frontier.load(folder / "frontier.json")) == plans
    assert all(validate(chain, plan, plan.budget_bytes) == () for plan in plans)
    for plan in plans:
        assert format_bytes(plan.peak_bytes) in result


def test_show_lists_options_and_stage_names_as_they_are(run: Run, tmp_path: Path) -> None:
    """Brackets in a name are no markup."""
    path = tmp_path / "profile.json"
    path.write_text(_example("profile"))
    result = output(run("show", path))
    assert "k s r +1" in result
    assert "selective-1" not in result
    listed = run("show", path, "--options").stdout
    for name in ("keep", "swap", "recompute", "selective-1"):
        assert any(name in line.split() for line in listed.splitlines()), name
    documented = json.loads(_example("profile"))
    documented["stages"][0]["name"] = "[red]h[/red][0]"
    path.write_text(json.dumps(documented))
    assert "[red]h[/red][0]" in run("show", path).stdout


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
    (tmp_path / "together.json").write_text(_example("segment plan"))
    together = Plan.load(tmp_path / "together.json")
    assert validate(profile, together, together.budget_bytes) == ()
    assert run("show", tmp_path / "profile.json").exit_code == 0
    assert run("solve", tmp_path / "profile.json", "--budget-gb", "6e-7").exit_code == 0
    assert run("simulate", tmp_path / "profile.json", tmp_path / "plan.json").exit_code == 0


def _keys(value: object) -> set[str]:
    """Every key of the objects in a JSON value, at any depth."""
    if isinstance(value, dict):
        return {*value, *(key for item in value.values() for key in _keys(item))}
    return {key for item in value for key in _keys(item)} if isinstance(value, list) else set()


IN_FILES = [
    Profile, Stage, InputTensor, Differentiated, Option, Storage, Link, Fingerprint, Resident, Plan, Decision, Transfer,
    Segment, Frontier, Device, Overheads, Estimate, Phase, Tensors,
]  # fmt: skip


@pytest.mark.parametrize("kind", IN_FILES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_file_is_described_once(kind: type) -> None:
    """In the docstring of its class, which one page shows."""
    described = re.findall(r"^ {4}(\w+(?:, \w+)*) : .+\n {8}\S", kind.__doc__ or "", re.MULTILINE)
    assert {field.name for field in dataclasses.fields(kind)} <= {name for n in described for name in n.split(", ")}
    pages = FORMATS.read_text(encoding="utf-8") + (FORMATS.parent / "reference.md").read_text(encoding="utf-8")
    assert len(re.findall(rf"^::: ckptplan\.(?:[\w.]+\.)?{kind.__name__}$", pages, re.MULTILINE)) == 1


def test_the_examples_have_nothing_that_is_not_written(chain: Profile, tmp_path: Path) -> None:
    text = FORMATS.read_text(encoding="utf-8")
    chain.save(tmp_path / "profile.json")
    plan = rotor.plan(chain, keep_all_bytes(chain) // 2)
    assert plan.segments
    plan.save(tmp_path / "plan.json")
    written = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("profile", "plan")}
    described = {field.name for kind in IN_FILES for field in dataclasses.fields(kind)}
    assert _keys(list(written.values())) <= {"schema", *described}
    for name, example in (("profile", "profile"), ("plan", "plan"), ("plan", "segment plan")):
        transfer = {field.name for field in dataclasses.fields(Transfer)}
        assert _keys(json.loads(_example(example))) <= _keys(written[name]) | transfer
    for schema in (written["profile"]["schema"], written["plan"]["schema"], Estimate.SCHEMA):
        assert f'`"{schema}"`' in text
    assert all(category in " ".join((Estimate.__doc__ or "").split()) for category in CATEGORIES)
