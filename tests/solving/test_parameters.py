"""The numbers that the search goes by: few, all in one place, and checked."""

from __future__ import annotations

import dataclasses
import math
import random
import re

import pytest
from random_chains import rich_chain

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import ACTIONS
from ckptplan.core.request import Limits
from ckptplan.referee import validate
from ckptplan.solving import smallest_peak, solve_profile
from ckptplan.solving.cost import menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.parameters import DEFAULT, Parameters
from ckptplan.solving.peak import step_bound

NAMES = [field.name for field in dataclasses.fields(Parameters)]


COUNTS = [field.name for field in dataclasses.fields(Parameters) if isinstance(field.default, int)]
LEAST = dict.fromkeys(COUNTS, 0) | {"least_width": 1, "width_factor": 2}
OTHERS = [name for name in NAMES if name not in COUNTS]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_count_and_no_amount_is_refused(name: str) -> None:
    count = name in COUNTS
    text = f"a whole number, {LEAST[name]} or more" if count else "a finite number above 0"
    for value in (-1, 2.5 if count else 0.0, math.nan, math.inf, True, "8", None):
        with pytest.raises(InvalidInputError, match=re.escape(f"{name}={value!r} must be {text}")):
            dataclasses.replace(DEFAULT, **{name: value})  # type: ignore[arg-type]
    if name.endswith("_share"):
        with pytest.raises(InvalidInputError, match=f"{name}=1.5 is a share: at most 1"):
            dataclasses.replace(DEFAULT, **{name: 1.5})


@pytest.mark.parametrize("number", [*LEAST.items(), *((name, 1e-9) for name in OTHERS)], ids=lambda n: n[0])
def test_with_any_number_a_search_ends_with_a_plan(number: tuple[str, float]) -> None:
    """Each at its least, on the way for longer chains; late or far from the optimum, but sound."""
    profile, limits = rich_chain(random.Random(6), 12), Limits(time_limit_s=0.1)
    budget = (everything_kept_bytes(profile) + step_bound(PlanSpace(profile, menus(profile, ACTIONS)))) // 2
    steered = dataclasses.replace(DEFAULT, **{"few_plans": 0, "many_plans": 0, number[0]: number[1]})  # type: ignore[arg-type]
    plan = solve_profile(profile, budget, limits, parameters=steered)
    assert validate(profile, plan, budget) == ()
    assert plan.lower_bound_s <= plan.step_s
    assert smallest_peak(profile, limits, parameters=steered).peak_bytes <= budget
