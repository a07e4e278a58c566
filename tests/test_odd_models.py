"""Odd but legal models and loops: right, refused or an error under every decision, never silently wrong or over.

The cases are in `odd`; `experiments/odd_models.py` prints their table.
"""

from __future__ import annotations

import odd  # noqa: F401 - registers the cases
import pytest
from odd.harness import CASES, DECISIONS, ITEMS, outcome

KNOWN: dict[tuple[str, str], str] = {}
"""What breaks a promise today, with its item in `ITEMS`; "profiling": profiling leaves something behind.

An entry whose case no longer breaks one fails; delete it.
"""


EQUAL = (
    "ema_buffer_through_data",
    "buffers_that_share_memory",
    "attributes_of_a_tensor",
    "object_written_by_the_parent",
    "object_written_by_the_parent_later",
)
"""What is trained as without a plan, where an error of the checks would keep the promise too."""


def _marked() -> list[object]:
    return [
        pytest.param(
            name,
            decision,
            marks=[pytest.mark.xfail(raises=AssertionError, strict=True, reason=KNOWN[name, decision])]
            if (name, decision) in KNOWN
            else [],
        )
        for name in CASES
        for decision in DECISIONS
    ]


@pytest.mark.parametrize(("name", "decision"), _marked())
def test_no_promise_is_broken(name: str, decision: str) -> None:
    found = outcome(name, decision)
    assert not found.broken, f"{found.kind}: {found.detail}"


@pytest.mark.parametrize("decision", ["recompute", "segment", "selective"])
@pytest.mark.parametrize("name", EQUAL)
def test_what_can_be_put_back_is_equal(name: str, decision: str) -> None:
    found = outcome(name, decision)
    assert found.kind == "equal", f"{found.kind}: {found.detail}"


def test_fused_steps_inside_of_the_users_hooks_are_an_error_unchecked() -> None:
    """By the storages that the step has written to, in a stage that is swapped and nothing else guards."""
    found = outcome("fused_sgd_between_two_backwards_of_halves", "swap", check="off")
    assert found.kind == "error", f"{found.kind}: {found.detail}"


def test_what_is_known_is_there() -> None:
    assert {name for name, _ in KNOWN} <= set(CASES)
    assert {decision for _, decision in KNOWN} <= set(DECISIONS)
    assert set(KNOWN.values()) <= {*ITEMS, "profiling"}


def test_every_item_has_a_case() -> None:
    assert {case.item for case in CASES.values()} == set(ITEMS)
