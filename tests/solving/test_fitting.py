"""Options that no plan within a budget has: no plan that fits has one, and bounds at tight budgets are higher."""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest
from exactly import LONG_S
from random_chains import homogeneous_chain, odd_chain, random_chain

from ckptplan.core.option import ACTIONS
from ckptplan.core.profile import Profile
from ckptplan.solving.bound.fitting import fitting
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import Evaluator, menus
from ckptplan.solving.enumerate import PlanSpace, smallest_of_all, vectors

pytestmark = pytest.mark.planning


def space_of(profile: Profile) -> PlanSpace:
    return PlanSpace(profile, menus(profile, ACTIONS))


def check_every_plan(space: PlanSpace, budget: int) -> int:
    """How many options are left out, of which no plan that fits has any."""
    fit, evaluator = fitting(space, budget), Evaluator(space.profile)
    for forest in space.forests():
        menu = fit.menu_in(forest)
        for block in vectors(space.menu_in(forest), 1 << 16):
            block = block[evaluator.smallest_peaks(block, forest) <= budget]
            for i, codes in enumerate(menu):
                assert np.isin(block[:, i], codes).all(), (i, forest)
    return sum(map(len, space.menu)) - sum(map(len, fit.menu))


@pytest.mark.long
def test_every_plan_that_fits_is_left() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng, n = random.Random(seed), 2 + seed % 4
        profile = random_chain(seed, n) if seed % 2 else odd_chain(rng, n)
        space = space_of(profile)
        if space.count(30_000, 300) > 30_000:
            continue
        *_, least, _ = smallest_of_all(Evaluator(profile), space, time.monotonic() + LONG_S)
        for budget in (least, int(least * (1 + rng.random()))):
            seen["fewer"] += check_every_plan(space, budget) > 0
            seen["all"] += 1
    assert seen["all"] >= 60
    assert seen["fewer"] >= 0.4 * seen["all"]


def test_a_bound_of_what_fits_is_higher() -> None:
    higher = lower = 0
    for seed in range(40):
        profile = random_chain(seed, 6)
        space = space_of(profile)
        budget = int(Evaluator(profile).smallest_peaks(next(vectors([c[-1:] for c in space.menu], 100))).min())
        found = [
            lower_bound(which, budget, deadline=time.monotonic() + LONG_S).bound_s
            for which in (space, fitting(space, budget))
        ]
        lower += found[1] < found[0] * (1 - 1e-6)  # who counts a storage may be another one
        higher += found[1] > found[0] * 1.0001
    assert higher >= 4 * lower, (higher, lower)


def test_where_nothing_fits_the_space_stays() -> None:
    space = space_of(homogeneous_chain(3, link_ratio=0.5))
    assert fitting(space, 1) is space
