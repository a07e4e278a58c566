"""Files that earlier versions saved load today, or an error says what is wrong and what to do."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.referee import simulate, validate

pytestmark = pytest.mark.planning

SAVED = Path(__file__).parents[1] / "saved"
NAMES = ("conv", "transformer", "chain")
LOAD: dict[str, Any] = {"profile": Profile.load, "plan": Plan.load}
ADDED = {
    "profile": {
        "outside": None,
        "uncalled": [],
        "differentiated": [],
        "foreign": None,
        "step_error": 0.0,
        "offload": ["activations"],
        "residents": [],
        "between": 0,
    },
    "storage": {"graph_until": None, "on_host": False, "origin": ""},
    "stage": {
        "forward_launch_s": 0.0,
        "backward_launch_s": 0.0,
        "rerun_overhead_s": 0.0,
        "rerun_overhead_launch_s": 0.0,
        "forward_wait_s": 0.0,
    },
    "option": {"launch_s": 0.0, "overhead_s": 0.0, "ratio": 0.0},
    "link": {"copy_s": 0.0},
    "fingerprint": {"accumulates": False, "optimizer": "", "parallel": "", "autocast": "", "compiled": []},
    "plan": {
        "outside": None,
        "uncalled": [],
        "differentiated": [],
        "foreign": None,
        "allocated_bytes": None,
        "saved_bytes": [],
        "kept_bytes": [],
        "launch_s": 0.0,
        "baseline_launch_s": 0.0,
        "forward_peak_bytes": None,
        "between_bytes": None,
        "least_peak_bytes": None,
        "most_peak_bytes": None,
        "budget_share": None,
        "notes": [],
        "asked": "",
        "offload": ["activations"],
        "residents": [],
        "between": 0,
    },
}
"""Fields that a file may lack since they were added later, and what their absence means."""


def saved(name: str) -> str:
    return gzip.decompress((SAVED / f"{name}.json.gz").read_bytes()).decode()


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.json"
    path.write_text(saved(name), encoding="utf-8")
    return path


def completed(data: dict[str, Any], kind: str) -> dict[str, Any]:
    """The object of an old file with the fields that were added later."""
    full = {**ADDED[kind], **data, "fingerprint": {**ADDED["fingerprint"], **data["fingerprint"]}}
    if kind == "plan":
        full["schema"] = Plan.SCHEMA
        full["choices"] = [with_transfers(choice) for choice in data["choices"]]
        return full
    full["link"] = {**ADDED["link"], **data["link"]}
    full["storages"] = [{**ADDED["storage"], **storage} for storage in data["storages"]]
    full["stages"] = [
        {**ADDED["stage"], **stage, "options": [{**ADDED["option"], **option} for option in stage["options"]]}
        for stage in data["stages"]
    ]
    return full


def with_transfers(choice: dict[str, Any]) -> dict[str, Any]:
    """A decision of "ckptplan.plan/3" in today's form."""
    points = {name: choice[name] for name in ("moves", "release", "prefetch")}
    rest = {"ratio": 0.0} | {name: value for name, value in choice.items() if name not in points}
    return {**rest, "transfers": [points] if points["moves"] else []}


@pytest.mark.parametrize("kind", LOAD)
@pytest.mark.parametrize("name", NAMES)
def test_fields_are_read_as_they_were_saved(name: str, kind: str, tmp_path: Path) -> None:
    path = unpacked(f"{name}_{kind}", tmp_path)
    loaded = LOAD[kind](path)
    again = tmp_path / "again.json"
    loaded.save(again)
    assert json.loads(again.read_text()) == completed(json.loads(path.read_text()), kind)
    assert LOAD[kind](again) == loaded


def test_a_plan_whose_step_left_out_the_host_is_read_with_it(tmp_path: Path) -> None:
    """Plans of before: `step_s` was compute and copies, and `launch_s` was beside it."""
    path = unpacked("chain_plan", tmp_path)
    data = json.loads(path.read_text())
    step_s, kept_s = data["step_s"], data["baseline_step_s"]
    for launch_s, kept_launch_s, wanted in (
        (0.5 * step_s, 0.25 * step_s, (step_s, kept_s, data["lower_bound_s"], data["status"])),
        (4 * step_s, 3 * step_s, (4 * step_s, 3 * step_s, 3 * step_s, "feasible")),
        (4 * step_s, 4 * step_s, (4 * step_s, 4 * step_s, 4 * step_s, "optimal")),
    ):
        path.write_text(json.dumps({**data, "launch_s": launch_s, "baseline_launch_s": kept_launch_s}))
        plan = Plan.load(path)
        assert (plan.step_s, plan.baseline_step_s, plan.lower_bound_s, plan.status) == wanted
        plan.save(path)
        assert Plan.load(path) == plan


@pytest.mark.parametrize(
    ("kind", "fields"), [("plan", {"in_flight": 1, "others_bytes": 0}), ("profile", {"input_bytes": 8})]
)
def test_fields_for_several_forwards_at_once_are_left_out(kind: str, fields: dict[str, int], tmp_path: Path) -> None:
    path = unpacked(f"chain_{kind}", tmp_path)
    loaded, data = LOAD[kind](path), json.loads(path.read_text())
    path.write_text(json.dumps({**data, **fields}))
    assert LOAD[kind](path) == loaded
    if kind == "plan":
        path.write_text(json.dumps({**data, "in_flight": 3, "others_bytes": 16}))
        with pytest.raises(InvalidInputError, match=r"for in_flight=3 forwards.*solve again with the budget less what"):
            Plan.load(path)


def test_a_storage_that_its_stage_drops_is_read_with_its_bytes(tmp_path: Path) -> None:
    """Profiles of before: `nbytes` was 0, and the bytes were beside it."""
    path = unpacked("chain_profile", tmp_path)
    data = json.loads(path.read_text())
    at = next(i for i, storage in enumerate(data["storages"]) if storage["name"].endswith(".inner"))
    for nbytes, graph_until in ((0, None), (7, data["storages"][at]["born"])):
        data["storages"][at] |= {"nbytes": 0, "dropped_bytes": nbytes}
        path.write_text(json.dumps(data))
        storage = Profile.load(path).storages[at]
        assert (storage.nbytes, storage.graph_until) == (nbytes, graph_until)


def test_saved_plans_fit_their_saved_profiles(tmp_path: Path) -> None:
    """They have every action, and nested segments."""
    plans = [Plan.load(unpacked(f"{name}_plan", tmp_path)) for name in NAMES]
    assert {choice.action for plan in plans for choice in plan.choices} == {"keep", "swap", "recompute"}
    assert any(segment.inner for plan in plans for segment in plan.segments)
    for name, plan in zip(NAMES, plans, strict=True):
        profile = Profile.load(unpacked(f"{name}_profile", tmp_path))
        plan.require_profile(profile)
        assert validate(profile, plan, plan.budget_bytes) == ()
        replayed = simulate(profile, plan)
        assert replayed.peak_bytes == plan.peak_bytes
        assert replayed.makespan_s == pytest.approx(plan.step_s, rel=1e-9)  # sums in another order


@pytest.mark.parametrize("kind", LOAD)
def test_another_schema_or_kind_is_named_with_the_remedy(kind: str, tmp_path: Path) -> None:
    path, newer = unpacked(f"schema_2_{kind}", tmp_path), tmp_path / "newer.json"
    newer.write_text(path.read_text().replace(f"ckptplan.{kind}/2", f"ckptplan.{kind}/5"))
    call, read = {
        "profile": ("ckptplan.profile", "'ckptplan.profile/3'"),
        "plan": ("ckptplan.solve", "'ckptplan.plan/4' and 'ckptplan.plan/3'"),
    }[kind]
    for file, version in ((path, 2), (newer, 5)):
        text = (
            f"{file} has schema 'ckptplan.{kind}/{version}'; this version reads {read}: make it again "
            f"with this version's {call}, or use the version of ckptplan that wrote it"
        )
        with pytest.raises(InvalidInputError, match=f"^{re.escape(text)}$"):
            LOAD[kind](file)
    other = {"profile": "plan", "plan": "profile"}[kind]
    with pytest.raises(InvalidInputError, match=rf"schema 'ckptplan.{other}/3'.*give a file that {call} made"):
        LOAD[kind](unpacked(f"conv_{other}", tmp_path))


@pytest.mark.parametrize("kind", LOAD)
def test_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    text, path = saved(f"chain_{kind}"), tmp_path / "file.json"
    for damaged in ("", text[: len(text) // 2], text.rstrip()[:-1], "[" * 100_000, "\x00", '{"a": NaN'):
        path.write_text(damaged)
        with pytest.raises(InvalidInputError, match=r"can't be read as JSON: .*if it was cut off, make it again"):
            LOAD[kind](path)
    packed = gzip.compress(text.encode())
    for damaged in (packed[: len(packed) // 2], packed[:20] + b"\xff" * 40 + packed[60:], packed[:3]):
        path.write_bytes(damaged)
        with pytest.raises(InvalidInputError, match=r"can't be read"):
            LOAD[kind](path)
    path.write_bytes(packed)
    assert LOAD[kind](path) == LOAD[kind](unpacked(f"chain_{kind}", tmp_path))
    for neither in ("[]", "3", "null", '{"schema": 2}', '{"schema": ["ckptplan.plan/2"]}'):
        path.write_text(neither)
        with pytest.raises(InvalidInputError, match=r"file\.json"):
            LOAD[kind](path)
    path.write_bytes(b'{"schema": "\xe9"}')
    for file in (path, tmp_path / "nowhere.json"):
        with pytest.raises(InvalidInputError, match="can't be read"):
            LOAD[kind](file)
    path.write_text(json.dumps({**json.loads(text), "colour": "blue"}))
    with pytest.raises(InvalidInputError, match=r"'colour'.*docs/formats\.md"):
        LOAD[kind](path)
