"""Profiles and plans: what can't be is refused with a reason, and what is written is read back the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_plans import plan_with, scheduled
from random_chains import random_chain, random_options, random_segments

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.plan import KEEP, Decision, Plan, Transfer
from ckptplan.core.profile import Fingerprint, Profile
from ckptplan.core.schedule import evaluate
from ckptplan.core.segment import Segment
from ckptplan.core.stage import InputTensor, Stage
from ckptplan.core.storage import Storage
from ckptplan.core.units import budget_to_bytes
from ckptplan.referee import validate

pytestmark = pytest.mark.planning


KEEPING = Option("keep", (0,), (), 10, 5)
AGAIN = Option("recompute", (), (), 4, 9, recompute_s=1.0, recomputes=True)


def chain() -> Profile:
    """Four stages; each saves its input and 10 bytes of its own; the second is glue."""
    storages = [Storage(f"x{i}", 4, i - 1, i) for i in range(4)] + [Storage(f"inner{i}", 10, i, i) for i in range(4)]
    stages = []
    for i, name in enumerate(("a", "(b)", "c", "d")):
        keep = Option("keep", (i, 4 + i), (), 14, 5)
        again = Option("recompute", (i,), (), 4, 15, recompute_s=1.0, recomputes=True)
        menu = (keep,)
        if name[0] != "(":
            menu += (
                replace(keep, name="swap", moves=(0, 1)),
                again,
                replace(again, name="recompute+swap", moves=(0,)),
                replace(again, name="selective-1", saved=(i, 4 + i), ops=(3,), recompute_s=0.5),
            )
        inputs = (
            None
            if name[0] == "("
            else (InputTensor("[0][0]", "float32", (1,)), InputTensor("[1]['scale']", "int64", ()))
        )
        stages.append(Stage(name, name, menu, 1.0, 2.0, linked=(3,) if i == 3 else (), inputs=inputs))
    return Profile(tuple(stages), tuple(storages), (100,) * 4, (100,) * 4, 90, Link(8.0, 4.0), disk=Link(2.0, 1.0))


def a_plan() -> Plan:
    again = Decision("recompute")
    moving = Decision.moving("recompute", (0,), 0, 3, "recompute+swap")
    return plan_with(chain(), (moving, KEEP, again, again), segments=(Segment(0, 3, (Segment(2, 2),)),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Storage("s", -1, 0, 0), "bytes"),
        (lambda: replace(KEEPING, forward_bytes=1 << 60), "bytes"),
        (lambda: replace(chain(), base_forward_bytes=(1, 1, 1, True)), "base_forward_bytes"),
        (lambda: replace(a_plan(), budget_bytes=10**5000), "bytes"),
        (lambda: Profile.from_chain([1.0], [1.0], [1], [1.5], input_bytes=0), "bytes"),
        (lambda: Profile.from_chain([1.0], [1.0], [1], [1], input_bytes=0, forward_temp_bytes=["12"]), "bytes"),
        (lambda: Profile.from_chain([1.0], [None], [1], [1], input_bytes=0), "finite number of seconds"),
        (lambda: replace(AGAIN, recompute_s=-0.5), "finite number of seconds"),
        (lambda: Link(1, 1, 1e10), "finite number of seconds"),
        (lambda: replace(a_plan(), step_s=10**400), "finite number of seconds"),
        (lambda: replace(KEEPING, saved=(0, 0)), "index twice"),
        (lambda: replace(chain().stages[3], linked=(1 << 70,)), "indices"),
        (lambda: Decision("recompute", ops=(True,)), "indices"),
    ],
)
def test_no_amounts(make: Callable[[], object], message: str) -> None:
    """For others: `test_values_of_another_type_are_refused`."""
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_no_bandwidth() -> None:
    for value in (0, -1, float("nan"), float("inf"), True, "1e9", None, 1e-300, 1e300, 10**400):
        for rates in ((value, 1), (1, value)):
            with pytest.raises(InvalidInputError, match="bytes per second"):
                Link(*rates)  # type: ignore[arg-type]


def stage(*options: Option, name: str = "s", linked: tuple[int, ...] = ()) -> Stage:
    return Stage(name, "s", options, 1, 1, linked=linked)


SWAPPED = replace(AGAIN, name="recompute+swap", saved=(1,), moves=(0,))
CONTRADICTIONS: dict[str, tuple[str, Callable[[], object]]] = {
    "made later than held last": ("program_until", lambda: Storage("s", 1, 3, 2)),
    "made before the step's beginning": ("born", lambda: Storage("s", 1, -2, 2)),
    "a graph that is dropped before it is made": ("graph_until", lambda: Storage("s", 1, 2, 2, graph_until=1)),
    "saved and pinned": ("saved and pinned", lambda: Option("keep", (1, 2), (2,), 1, 1)),
    "moves what it doesn't save": ("positions", lambda: Option("swap", (7,), (), 1, 1, moves=(1,))),
    "time without recompute": ("with recomputes=False", lambda: replace(AGAIN, recomputes=False)),
    "no options": ("begin with 'keep'", lambda: stage()),
    "keep isn't first": ("begin with 'keep'", lambda: stage(AGAIN, KEEPING)),
    "two options of one name": ("no name twice", lambda: stage(KEEPING, AGAIN, AGAIN)),
    "keep moves": ("'keep' must not recompute or move", lambda: stage(replace(KEEPING, moves=(0,)))),
    "keep recomputes": ("'keep' must not recompute", lambda: stage(replace(AGAIN, name="keep"))),
    "recompute keeps": (
        "'recompute' must have recomputes=True",
        lambda: stage(KEEPING, replace(KEEPING, name="recompute")),
    ),
    "recompute+swap holds other things": (
        r"'recompute\+swap' must hold all",
        lambda: stage(KEEPING, replace(AGAIN, saved=(0,)), SWAPPED),
    ),
    "recompute+swap without recompute": (r"'recompute\+swap' must hold all", lambda: stage(KEEPING, SWAPPED)),
    "glue that swaps": (
        "glue can only have 'keep'",
        lambda: stage(KEEPING, replace(KEEPING, name="swap", moves=(0,)), name="(s)"),
    ),
    "linked to what isn't held": ("linked", lambda: stage(KEEPING, AGAIN, linked=(0,))),
    "linked and can't recompute": ("linked", lambda: stage(KEEPING, linked=(0,))),
    "segment from below": ("first <= last", lambda: Segment(-1, 2)),
    "inner segment past the end": ("out of order", lambda: Segment(0, 3, (Segment(1, 4),))),
    "inner segments overlap": ("out of order", lambda: Segment(0, 9, (Segment(1, 4), Segment(4, 5)))),
    "unknown action": ("unknown action", lambda: Decision("offload")),  # type: ignore[arg-type]
    "kept and moved": ("can't move", lambda: Decision.moving("keep", (0,), 1, 1)),
    "swapped, and operations chosen": ("can't save operations", lambda: Decision("swap", ops=(1,))),
    "moved without points": ("indices", lambda: Transfer((0,), None, None)),  # type: ignore[arg-type]
    "points without moves": ("moves nothing", lambda: Transfer((), 1, 1)),
    "moved twice": ("twice", lambda: Decision("swap", (Transfer((0, 1), 1, 1), Transfer((1,), 2, 2)))),
    "a point below": ("stage indices", lambda: Decision.moving("swap", (0,), -1, 1)),
    "fingerprint": ("training", lambda: Fingerprint("", "", "yes", "", "", "")),  # type: ignore[arg-type]
}


def with_stage(i: int, **changes: Any) -> Profile:
    profile = chain()
    return replace(
        profile, stages=(*profile.stages[:i], replace(profile.stages[i], **changes), *profile.stages[i + 1 :])
    )


def linked_to(i: int, s: int) -> Profile:
    """Stage `i` takes storage `s`, as an unmodified output of an earlier stage, or so it says."""
    menu = (chain().stages[i].keep, replace(AGAIN, saved=(s,)))
    return with_stage(i, options=menu, linked=(s,))


def chosen(i: int, choice: Decision) -> Plan:
    """The plan with another decision for stage `i`."""
    choices = a_plan().choices
    return replace(a_plan(), choices=(*choices[:i], choice, *choices[i + 1 :]))


def holding(s: int) -> Profile:
    return with_stage(0, options=(Option("keep", (s,), (), 1, 1),))


def with_storages(*more: Storage) -> Profile:
    return replace(chain(), storages=(*chain().storages, *more))


IMPOSSIBLE: dict[str, tuple[str, Callable[[], object]]] = {
    "no stages": ("at least one", lambda: replace(chain(), stages=(), base_forward_bytes=(), base_backward_bytes=())),
    "lists of two lengths": (
        "one entry per stage",
        lambda: Profile.from_chain([1, 1], [1, 1], [1], [1], input_bytes=0),
    ),
    "saves less than its output": ("below its output", lambda: Profile.from_chain([1], [1], [2], [1], input_bytes=0)),
    "no link": ("Link", lambda: replace(chain(), link=None)),
    "too few base bytes": ("4 stages", lambda: replace(chain(), base_forward_bytes=(1, 1, 1))),
    "two of one name": ("'a' is used twice", lambda: with_stage(3, name="a")),
    "no such storage": ("there are 8", lambda: holding(8)),
    "held before it is made": ("made only in step 3", lambda: holding(7)),
    "made after the last stage": ("the last one is 3", lambda: with_storages(Storage("late", 1, 4, 4))),
    "takes its own product": ("own product", lambda: linked_to(2, 6)),
    "linked to a later stage's": ("made only in step 3", lambda: linked_to(2, 7)),
    "linked to glue's": ("no earlier module stage makes", lambda: linked_to(2, 2)),
    "absurd in all": ("in all", lambda: with_storages(*[Storage("s", (1 << 60) - 1, 0, 0)] * 2)),
    "notes": ("notes", lambda: replace(chain(), notes="abc")),
    "a plan of nothing": ("2 decisions", lambda: replace(a_plan(), choices=(KEEP, KEEP), segments=())),
    "a plan with a stage twice": ("used twice", lambda: replace(a_plan(), stages=("a", "(b)", "c", "a"))),
    "status": ("unknown status", lambda: replace(a_plan(), status="proven")),
    "a point past the end": (
        "no stage has index 4",
        lambda: replace(a_plan(), segments=(), choices=(Decision.moving("swap", (0,), 1, 4), KEEP, KEEP, KEEP)),
    ),
    "segment past the end": ("past the end", lambda: replace(a_plan(), segments=(Segment(2, 4),))),
    "segment of one": ("a single stage", lambda: replace(a_plan(), segments=(Segment(2, 2),))),
    "segments overlap": ("out of order", lambda: replace(a_plan(), segments=(Segment(0, 2), Segment(2, 3)))),
    "segment of a kept stage": ("'d' has action 'keep'; it must be 'recompute'", lambda: chosen(3, KEEP)),
    "segment with recomputed glue": (
        r"'\(b\)' has action 'recompute'; it must be 'keep'",
        lambda: chosen(1, Decision("recompute")),
    ),
    "segment with operations chosen": (
        "can't save operations' outputs",
        lambda: chosen(3, Decision("recompute", option="selective-1", ops=(3,))),
    ),
}


@pytest.mark.parametrize("case", [*CONTRADICTIONS, *IMPOSSIBLE])
def test_contradictions_and_impossible_profiles_and_plans(case: str) -> None:
    message, make = (CONTRADICTIONS | IMPOSSIBLE)[case]
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_a_segment_of_what_can_t_be_recomputed_has_no_schedule() -> None:
    profile = with_stage(2, options=chain().stages[2].options[:1], linked=())
    options = [stage.recompute or stage.keep for stage in profile.stages]
    with pytest.raises(InvalidInputError, match="stage 'c' has no option 'recompute'"):
        evaluate(profile, options, 10_000, (Segment(0, 3),))


def test_budgets_are_positive_numbers_and_round_down() -> None:
    for value in (0, -1, float("nan"), True, "12", None, 1e300, 10**400):
        with pytest.raises(InvalidInputError, match="budget_gb="):
            budget_to_bytes(value)  # type: ignore[arg-type]
    assert budget_to_bytes(1) == 1 << 30
    assert budget_to_bytes(1.9 / (1 << 30)) == 1


names = st.text(min_size=1, max_size=8)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), n=st.integers(1, 9), name=names, note=st.text(), share=st.floats(0, 1))
def test_what_is_written_is_read_back(tmp_path: Path, seed: int, n: int, name: str, note: str, share: float) -> None:
    rng = random.Random(seed)
    fingerprint = Fingerprint(name, note, rng.random() < 0.5, "(1, 2)", "cpu", "2.9")
    profile = replace(random_chain(seed, n), notes=(note, name), fingerprint=fingerprint)
    segments = random_segments(rng, profile, share=share)
    options = random_options(rng, profile, segments)
    plan = replace(scheduled(profile, options, segments), planner=name, space=note)
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    profile_again, plan_again = Profile.load(tmp_path / "profile.json"), Plan.load(tmp_path / "plan.json")
    assert profile_again == profile
    assert plan_again == plan
    assert hash(plan_again) == hash(plan)
    assert validate(profile_again, plan_again, plan.budget_bytes) == ()
    assert str(plan_again) == str(plan)
    assert plan.planner in str(plan)


def paths_in(data: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += paths_in(value, (*path, key))
    return found


def changed(data: Any, path: tuple[str | int, ...], change: Callable[[Any, str | int], None]) -> Any:
    copy = json.loads(json.dumps(data))
    at = copy
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return copy


LOADERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "profile": (lambda path: chain().save(path), Profile.load),
    "plan": (lambda path: a_plan().save(path), Plan.load),
}


def written(what: str, folder: Path) -> tuple[Any, Path, Callable[[Path], object]]:
    """What a file has, a path for a bad one, and what reads it."""
    save, load = LOADERS[what]
    save(folder / "good.json")
    return json.loads((folder / "good.json").read_text()), folder / "bad.json", load


@pytest.mark.parametrize("what", LOADERS)
@pytest.mark.long("profile")
def test_values_of_another_type_are_refused(what: str, tmp_path: Path) -> None:
    good, bad, load = written(what, tmp_path)
    of_same_type: dict[type, tuple[Any, ...]] = {
        int: ([], "x", True, -7, 0.5, 1 << 70),
        float: ({}, "x", True, -7, float("nan")),
        str: ([], 3, None),
        bool: ([], 3, 0, None, "true"),
        list: ({}, "x", 3, None),
        dict: ([], "x", 3, None),
        type(None): ({}, "x", True, -0.5),
    }
    tried = 0
    for path in paths_in(good):
        value = good
        for key in path:
            value = value[key]
        nullable = path[-1] in ("disk", "outside", "foreign") or (len(path) > 1 and "inputs" in (path[-1], path[-2]))
        for other in of_same_type[type(value)]:
            if nullable and other in (None, []):
                continue
            bad.write_text(json.dumps(changed(good, path, lambda at, key, other=other: at.__setitem__(key, other))))
            with pytest.raises(InvalidInputError):
                print(path, other, load(bad))
            tried += 1
    assert tried > 300


@pytest.mark.parametrize("what", LOADERS)
def test_unknown_and_missing_fields_are_named(what: str, tmp_path: Path) -> None:
    good, bad, load = written(what, tmp_path)
    optional = {
        "fingerprint", "notes", "resident_bytes", "to_end", "stays", "recompute_s", "recomputes", "moves", "ops",
        "linked", "inputs", "latency_s", "transfers", "option", "segments", "peak_bound_bytes",
        "reserved_bytes", "disk", "disk_bytes", "tier", "saved_bytes", "kept_bytes", "launch_s", "forward_launch_s",
        "backward_launch_s", "baseline_launch_s", "copy_s", "allocated_bytes", "accumulates", "forward_peak_bytes",
        "between_bytes", "outside", "uncalled", "differentiated", "foreign", "graph_until", "inner", "overhead_s",
        "step_error", "on_host",
        "rerun_overhead_s", "rerun_overhead_launch_s", "optimizer", "parallel", "least_peak_bytes", "most_peak_bytes",
        "budget_share", "asked", "origin", "autocast", "residents", "offload", "between",
        "forward_wait_s", "ratio", "compiled",
    }  # fmt: skip
    seen = 0
    for path in paths_in(good):
        if not isinstance(path[-1], str):
            continue
        bad.write_text(json.dumps(changed(good, path, lambda at, key: at.__setitem__("colour", "blue"))))
        with pytest.raises(InvalidInputError, match="colour"):
            load(bad)
        if path[-1] not in optional:
            bad.write_text(json.dumps(changed(good, path, lambda at, key: at.pop(key))))
            with pytest.raises(InvalidInputError, match=str(path[-1])):
                load(bad)
            seen += 1
    assert seen > 20


def test_segments_nested_too_deep_are_refused(tmp_path: Path) -> None:
    a_plan().save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    deep = '{"first": 0, "last": 3, "inner": [' * 5000 + "]}" * 5000
    data["segments"] = "HERE"
    (tmp_path / "plan.json").write_text(json.dumps(data).replace('"HERE"', f"[{deep}]"))
    with pytest.raises(InvalidInputError):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "fits 2.34 of 2.35 GiB, step +10.0%, within 4.76% of the best"),
        ({"lower_bound_s": 1.1, "status": "optimal"}, "fits 2.34 of 2.35 GiB, step +10.0%, no plan is faster"),
        ({"lower_bound_s": 0.0}, "fits 2.34 of 2.35 GiB, step +10.0%, how near to the best isn't known"),
        ({"budget_bytes": 3 << 40}, "fits 2.34 GiB of 3.00 TiB, step +10.0%, within 4.76% of the best"),
        ({"budget_bytes": 2 << 30}, "doesn't fit: 2.34 GiB needed, 2.00 GiB given; step +10.0%"),
        ({"reserved_bytes": int(2.346 * 2**30)}, "fits 2.35 of 2.35 GiB, step +10.0%, within 4.76% of the best"),
    ],
)
def test_a_plan_is_told_in_one_line(fields: dict[str, Any], verdict: str) -> None:
    nbytes = int(2.34 * 2**30)
    given = {"budget_bytes": int(2.35 * 2**30), "peak_bytes": nbytes, "step_s": 1.1, "lower_bound_s": 1.05, **fields}
    plan = replace(plan_with(chain(), (KEEP,) * 4), baseline_step_s=1.0, **given)
    assert plan.verdict == verdict
    first, *_, last = str(plan).splitlines()
    assert first == verdict
    assert last.endswith(plan.space)
