"""The lists of promises, safeguards and mutants name what is there, and docs/guarantees.md is written from them.

Whether a test fails without its safeguard, experiments/mutations.py tries; with a mutant, experiments/mutants.py.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import odd  # noqa: F401 - registers the cases
import pytest
from odd.harness import CASES, DECISIONS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from mutants import AREAS as MUTATED  # noqa: E402
from mutants import Mutant, frozen  # noqa: E402
from mutations import table  # noqa: E402
from promises import AREAS, AT_SCALE, EXPERIMENTS, PROMISES, Promise  # noqa: E402
from safeguards import REQUIREMENTS, SAFEGUARDS, Safeguard  # noqa: E402
from source import AddressError, Package  # noqa: E402


@functools.cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@functools.cache
def package() -> Package:
    return Package(ROOT)


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda s: f"{s.item}-{s.what[:40]}")
def test_a_safeguard_is_there_and_so_are_its_tests(safeguard: Safeguard) -> None:
    # An AddressError says that the code has changed: take the safeguard out in another way.
    ast.parse(package().find(safeguard.where, safeguard.old).replaced(safeguard.old, safeguard.new))
    for test in (*safeguard.tests, *safeguard.gpu_tests):
        file, _, name = test.partition("::")
        assert name in functions(ROOT / file), test
    assert safeguard.tests
    assert {cell.partition("/")[0] for cell in safeguard.cells} <= set(CASES)
    assert {cell.partition("/")[2] for cell in safeguard.cells} <= set(DECISIONS)


@pytest.mark.parametrize("mutant", frozen(), ids=lambda m: f"{m.area}-{m.operator}-{m.name}")
def test_a_mutant_can_still_be_made(mutant: Mutant) -> None:
    # An AddressError says that the code has changed: make the same mistake in its new form (experiments/mutants.json).
    definition = package().find(mutant.name, mutant.old)
    compile(definition.replaced(mutant.old, mutant.new), definition.path, "exec")


def test_mutants_are_of_all_areas() -> None:
    areas = [mutant.area for mutant in frozen()]
    assert {area: areas.count(area) for area in MUTATED} == dict.fromkeys(MUTATED, 20)


def test_every_requirement_has_a_safeguard() -> None:
    assert {s.item for s in SAFEGUARDS} == set(REQUIREMENTS) == set(range(1, len(REQUIREMENTS) + 1))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda p: f"{p.area}-{p.what[:40]}")
def test_what_holds_a_promise_is_there(promise: Promise) -> None:
    assert promise.area in AREAS
    assert promise.tests or promise.contracts
    for test in promise.tests:
        file, _, name = test.partition("::")
        assert name in functions(ROOT / "tests" / file), test
    for contract in promise.contracts:
        assert f'name = "{contract}"' in (ROOT / "pyproject.toml").read_text()
    assert set(promise.experiments) <= {experiment.name for experiment in EXPERIMENTS}


def test_every_area_has_promises_and_every_script_is_an_experiment() -> None:
    assert {promise.area for promise in PROMISES} == set(AREAS)
    folder = ROOT / "experiments"
    scripts = {path.stem for path in folder.glob("*.py") if "main" in functions(path)}
    scripts |= {path.parent.name for path in folder.glob("*/__main__.py")}
    assert {experiment.name for experiment in EXPERIMENTS} == scripts
    named = [name for promise in PROMISES for name in promise.experiments]
    assert scripts == {
        *named,
        *(name for names in AT_SCALE.values() for name in names),
        "ablation",
        "mutations",
        "real_profiles",
        "walks",
    }  # these four hold no promise
    assert set(AT_SCALE) <= set(REQUIREMENTS)


def test_the_page_is_the_list() -> None:
    """But for the dates: no git is needed to test."""
    results = {experiment.result for experiment in EXPERIMENTS if experiment.result is not None}
    there = {name: "date" for name in results if (ROOT / "experiments" / "results" / name).exists()}
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert re.sub(r"\| \d{4}-\d\d-\d\d \|", "| date |", page) == table(there), (
        "run python experiments/mutations.py --docs docs/guarantees.md"
    )


def test_definitions_are_found_in_whichever_file_they_lie(tmp_path: Path) -> None:
    (tmp_path / "ckptplan" / "deep").mkdir(parents=True)
    (tmp_path / "ckptplan" / "one.py").write_text("class A:\n    LIMIT = 3\n\n    def go(self):\n        return 1\n")
    (tmp_path / "ckptplan" / "deep" / "two.py").write_text(
        "if True:\n    @cache\n    def go():\n        x = 1\n        x = 1\n\n\ndef both():\n    return 1\n"
    )
    (tmp_path / "ckptplan" / "three.py").write_text("def both():\n    return 2\n")
    found = Package(tmp_path)
    assert found.find("A.LIMIT").text == "    LIMIT = 3\n"
    assert found.find("go").first_line == 2  # with its decorator
    assert found.find("both", "return 2").path.name == "three.py"
    assert found.find("A.go").lines_of("return 1") == (5, 5)
    assert found.find("A.go").replaced("return 1", "return 2").endswith("        return 2\n")
    with pytest.raises(AddressError, match=r"defines no B\.go; there is A\.go, go"):
        found.find("B.go")
    with pytest.raises(AddressError, match=r"both: 2 definitions have this name.*three\.py:1"):
        found.find("both")
    with pytest.raises(AddressError, match="both: 0 definitions have this text"):
        found.find("both", "return 3")
    with pytest.raises(AddressError, match="2 times, not once"):
        found.find("go", "x = 1")
