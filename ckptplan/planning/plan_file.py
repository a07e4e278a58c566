"""A plan in a file that later runs take: the one that was made there for the same request, or else a new one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptplan.core.budget import Budget
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.request import Limits


def request_text(budget: Budget, limits: Limits, max_overhead: float | None = None) -> str:
    """Return what a plan in a file has to have been asked for, beside the model and the step."""
    names = ("actions", "segments", "menus", "host_bytes", "disk_bytes", "in_flight")
    may = ", ".join(f"{name}={getattr(limits, name)!r}" for name in names)
    return f"{budget!r}, max_overhead={max_overhead!r}, {may}"


def plan_in(path: str | Path, asked: str) -> Plan | None:
    """Return the plan in a file; None if there is no file, or its plan was asked for otherwise.

    Raises
    ------
    InvalidInputError
        If the file has something else, or a plan that `keep` didn't write: it would be lost.
    """
    if not Path(path).exists():
        return None
    plan = Plan.load(path)
    if not plan.asked:
        raise InvalidInputError(
            f"plan_file={str(path)!r} has a plan that wasn't made with plan_file=, and would be replaced; give another "
            "name, or apply that plan: ckptplan.Plan.load(...)"
        )
    return plan if plan.asked == asked else None


def keep(plan: Plan, path: str | Path, asked: str) -> Plan:
    """Write a plan for later runs, and return it with what it was asked for."""
    plan = replace(plan, asked=asked)
    plan.save(path)
    return plan
