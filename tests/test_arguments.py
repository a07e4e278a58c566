"""Arguments of another kind than the public calls take: errors that name the argument, before any work begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ckptplan

pytestmark = pytest.mark.planning

LINK = {"out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9}
PROFILE = ckptplan.Profile.from_chain([1e-3] * 3, [2e-3] * 3, [1] * 3, [8] * 3, input_bytes=1, **LINK)
PLAN = ckptplan.solve(PROFILE, budget_gb=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ckptplan.explain(PROFILE, PROFILE), r"plan=.* must be a Plan"),
        (lambda: ckptplan.simulate(PLAN, PROFILE), r"profile=.* must be a Profile"),
        (lambda: ckptplan.simulate(PROFILE, None), "plan=None must be a Sequence"),
        (lambda: ckptplan.simulate(PROFILE, "abc"), "decision 0='a' must be a Decision"),
        (lambda: ckptplan.validate(PROFILE, PROFILE, 1), r"plan=.* must be a Plan"),
        (lambda: ckptplan.validate(PROFILE, PLAN, "1"), "budget_bytes='1' must be a whole number of bytes"),
        (lambda: PLAN.report(3), "profile=3 must be a Profile"),
        (lambda: PLAN.report(PROFILE, trace=3), "trace=3 must be a Trace"),
        (lambda: ckptplan.frontier(PROFILE, points="a"), "points='a' must be a whole number, from 2"),
        (lambda: ckptplan.frontier(PROFILE, points=1), "points=1 must be a whole number, from 2"),
        (lambda: ckptplan.solve(PROFILE, budget_gb=1, on_progress=3), "on_progress=3 is not callable"),
        (lambda: ckptplan.solve(PROFILE, budget_gb=1, on_plan=3), "on_plan=3 is not callable"),
    ],
)
def test_an_argument_of_another_kind_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ckptplan.InvalidInputError, match=message):
        call()
