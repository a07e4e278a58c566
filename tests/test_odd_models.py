"""Odd but legal models and loops: right, refused or an error under every decision, never silently wrong or over.

The cases are in `odd`; `experiments/odd_models.py` prints their table.
"""

from __future__ import annotations

import odd  # noqa: F401 - registers the cases
import pytest
from odd.harness import CASES, DECISIONS, ITEMS, outcome

EQUAL = (
    "ema_buffer_through_data",
    "buffers_that_share_memory",
    "containers_in_containers",
    "iterators_and_partials",
    "attributes_of_a_tensor",
    "cached_parametrization",
    "context_variable",
    "copied_layer_that_is_trained",
    "dispatch_mode",
    "dispatch_mode_in_backward",
    "function_mode",
    "generators_in_a_list",
    "hook_on_all_modules",
    "hooks_registered_in_forward",
    "nothing_returned",
    "output_kept_for_the_next_step",
    "saved_tensors_hooks_of_the_user",
    "saved_tensors_read_twice",
    "set_attribute",
    "object_written_by_the_parent",
    "object_written_by_the_parent_later",
)
"""What is trained as without a plan, where an error of the checks would keep the promise too."""


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (i % 4 > 0)) for i, name in enumerate(CASES)]
)
def test_no_promise_is_broken(name: str, decision: str) -> None:
    found = outcome(name, decision)
    assert not found.broken, f"{found.kind}: {found.detail}"
    assert found.kind == "equal" or name not in EQUAL, f"{found.kind}: {found.detail}"


def test_fused_steps_inside_of_the_users_hooks_are_an_error_unchecked() -> None:
    """By the storages that the step has written to, in a stage that is swapped and nothing else guards."""
    found = outcome("fused_sgd_between_two_backwards_of_halves", "swap", check="off")
    assert found.kind == "error", f"{found.kind}: {found.detail}"


def test_every_item_has_a_case() -> None:
    assert {case.item for case in CASES.values()} == set(ITEMS)
