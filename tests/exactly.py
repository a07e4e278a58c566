"""The solver for tests that compare with the optimum: its search goes on until no gap is left."""

from __future__ import annotations

import functools
from typing import Any

from ckptplan import Plan, Profile
from ckptplan.core import request
from ckptplan.solving import planner

Limits = functools.partial(request.Limits, gap=0.0)


def solve_profile(profile: Profile, budget_bytes: int, limits: request.Limits = Limits(), **options: Any) -> Plan:  # noqa: B008
    """`ckptplan.solving.solve_profile` without a gap."""
    return planner.solve_profile(profile, budget_bytes, limits, **options)
