"""The list of safeguards is up to date; whether a test fails without its safeguard, experiments/mutations.py tries."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

from mutations import table  # noqa: E402
from safeguards import REQUIREMENTS, SAFEGUARDS, Safeguard  # noqa: E402


@functools.cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda s: f"{s.item}-{s.what[:40]}")
def test_a_safeguard_is_there_and_so_are_its_tests(safeguard: Safeguard) -> None:
    text = (ROOT / safeguard.file).read_text()
    assert text.count(safeguard.old) == 1, f"{safeguard.file} has changed: take the safeguard out in another way"
    ast.parse(text.replace(safeguard.old, safeguard.new))
    for test in (*safeguard.tests, *safeguard.gpu_tests):
        file, _, name = test.partition("::")
        assert name in functions(ROOT / file), test
    assert safeguard.tests


def test_every_requirement_has_a_safeguard() -> None:
    assert {s.item for s in SAFEGUARDS} == set(REQUIREMENTS) == set(range(1, 32))


def test_the_page_is_the_list() -> None:
    assert (ROOT / "docs" / "guarantees.md").read_text() == table(), (
        "run python experiments/mutations.py --docs docs/guarantees.md"
    )
