"""`solve`: plans for the budgets that matter, from profiles and rivals' peaks. Needs OR-Tools; torch in some modes."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits, Training
from ckptplan.planning.job import Job, job_of_profile
from ckptplan.referee import validate
from ckptplan.solving.peak import smallest_peak
from experiments.gpu.cases import Case
from experiments.gpu.results import OURS, OutOfTime, Results, Skipped, slug

MIDDLE = 0.4
"""Share of the way from the smallest peak to everything kept at which baselines are planned."""
TIGHTER = 0.85
"""Share of the way from the smallest peak to a budget at which the tighter one lies."""


@dataclass(frozen=True, slots=True)
class Choices:
    """How plans are made.

    Attributes
    ----------
    time_limit_s : float
        For each plan of ours.
    replay : str or None
        A known device: reserved bytes are predicted by a replay of the model on `meta` with the allocator's model,
        which takes torch; budgets are then kept in reserved bytes. None: what the plain step reserves beyond its
        prediction is taken off the budget.
    ahead : str or None
        A known device: cases without a profile are profiled for it without having it, which takes torch.
    fractions : bool
        Use the fixed fractions even where rivals' peaks are known.
    host_bytes : int or None
        Most that a plan may swap.
    """

    time_limit_s: float = 20.0
    replay: str | None = None
    ahead: str | None = None
    fractions: bool = False
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """A budget: by whom it is given, the bytes it allows on the device, and those of them for tensors.

    `reserved` says that the first are known, so that a replay is held against them.
    """

    label: str
    target_bytes: int
    budget_bytes: int
    reserved: bool = True


def solve_cases(results: Results, cases: list[Case], small: bool, choices: Choices) -> bool:
    """All plans of all cases; whether there was time for them."""
    try:
        for case in cases:
            solve_case(results, case, small, choices)
    except OutOfTime:
        return False
    return True


def solve_case(results: Results, case: Case, small: bool, choices: Choices) -> None:
    job = _job(results, case, small, choices)
    if job is None:
        return
    profile = job.profile

    def ends() -> dict[str, Any]:
        least = smallest_peak(profile, Limits(host_bytes=choices.host_bytes, time_limit_s=choices.time_limit_s))
        most = BASELINES["keep_all"](profile, 1 << 59).peak_bytes
        return {"smallest_peak_bytes": least.peak_bytes, "smallest_proven": least.proven, "keep_peak_bytes": most}

    found = results.run(f"solve/{case.name}", ends)
    if found is None:
        return
    least, most = found["smallest_peak_bytes"], found["keep_peak_bytes"]

    def plan(planner: str, goal: Goal) -> dict[str, Any] | None:
        name = f"{planner}.{slug(goal.label)}"
        return results.run(
            f"plans/{case.name}/{name}", functools.partial(_plan, results, job, case, planner, goal, name)
        )

    for goal in goals(results, case, least, most, choices):
        plan(OURS, goal)
        if goal.label == "cap":
            for planner in case.baselines:
                plan(planner, goal)
    if case.cap_bytes is not None:
        return
    outside = _outside(results, case, most, choices)
    budget = least + int((most - least) * MIDDLE)
    for planner in case.baselines:
        theirs = plan(planner, Goal(planner, budget + outside, budget, reserved=False))
        if theirs is not None:
            needed = theirs["reserved_bytes"] or theirs["peak_bytes"] + outside
            plan(OURS, Goal(planner, needed, needed - outside))


def _outside(results: Results, case: Case, most: int, choices: Choices) -> int:
    """Bytes that the plain step was measured to reserve beyond its prediction, where plans don't predict them."""
    kept = _peak(results, case, "keep")
    return max(kept - most, 0) if kept is not None and choices.replay is None else 0


def goals(results: Results, case: Case, least: int, most: int, choices: Choices) -> list[Goal]:
    """The cap; else each rival's measured peak; where none is known, fixed fractions. Each also tighter, if wanted."""
    outside = _outside(results, case, most, choices)
    found: list[Goal] = []
    if case.cap_bytes is not None and case.cap_bytes < most + outside:
        found = [Goal("cap", case.cap_bytes, case.cap_bytes - outside)]
    elif not choices.fractions:
        for name in case.rivals:
            target = _peak(results, case, name)
            if target is not None:
                found.append(Goal(name, target, target - outside))
    if not found:
        budgets = [least + int((most - least) * share) for share in case.fractions]
        labels = [f"{share * 100:.0f}pc" for share in case.fractions]  # goes into names of files
        found = [Goal(label, b + outside, b, reserved=False) for label, b in zip(labels, budgets, strict=True)]
    for goal in list(found):
        measured = (results.ok(f"measure/{case.name}/plans.{slug(goal.label)}") or {}).get("contenders", {})
        peaks = measured.get(f"{OURS}.{slug(goal.label)}", {}).get("peaks")
        if peaks and peaks["judged_bytes"] > goal.target_bytes:
            over = peaks["judged_bytes"] - goal.target_bytes
            found.append(replace(goal, label=f"{goal.label}-again", budget_bytes=goal.budget_bytes - over))
        elif case.tighter and goal.budget_bytes > least:
            budget = least + int((min(goal.budget_bytes, most) - least) * TIGHTER)
            found.append(Goal(f"{goal.label}-tighter", budget + outside, budget, goal.reserved))
    return found


def _peak(results: Results, case: Case, rival: str) -> int | None:
    found = results.ok(f"measure/{case.name}/rival.{slug(rival)}")
    peaks = (found or {}).get("contenders", {}).get(rival, {}).get("peaks")
    return None if peaks is None else int(peaks["judged_bytes"])


def _job(results: Results, case: Case, small: bool, choices: Choices) -> Job | None:
    limits = Limits(host_bytes=choices.host_bytes, time_limit_s=choices.time_limit_s, gap=0.0)
    path = results.file("profile", case.profiled_as or case.name)
    if not path.exists() and choices.ahead is not None:
        path = results.file("ahead", case.name)
        results.run(f"ahead/{case.name}", functools.partial(_ahead, path, case, small, choices.ahead))
    if not path.exists():
        return None
    job = job_of_profile(Profile.load(path), limits)
    if choices.replay is None:
        return job
    from ckptplan.memory.estimate import TrainingBytes
    from ckptplan.planning.model_job import replaying

    step, target = _on_meta(case, small, choices.replay)
    training = Training(optimizer=case.optimizer, amp=case.amp)
    return replaying(job, step, TrainingBytes(step.model, target, training, case.allocator))


def _on_meta(case: Case, small: bool, device: str) -> Any:
    import torch

    from ckptplan.profiling.target import find_target
    from experiments.gpu.subject import Subject

    subject = Subject(case, torch.device("meta"), small)
    target = find_target(subject.model, device)
    return subject.step_of(subject.copy(), target), target


def _ahead(path: Any, case: Case, small: bool, device: str) -> dict[str, Any]:
    from ckptplan.profiling.profiler import profile_step

    if case.compiled_layers:
        raise Skipped("compiled layers are profiled on the device")
    step, target = _on_meta(case, small, device)
    profile = profile_step(step, target, optimizer=case.optimizer)
    profile.save(path)
    return {"device": device, "plain_step_s": profile.baseline_step_s}


def _plan(results: Results, job: Job, case: Case, planner: str, goal: Goal, name: str) -> dict[str, Any]:
    began = time.perf_counter()
    facts: dict[str, Any] = {
        "planner": planner, "label": goal.label.removesuffix("-tighter").removesuffix("-again"),
        "target_bytes": goal.target_bytes, "budget_bytes": goal.budget_bytes,
    }  # fmt: skip
    if goal.budget_bytes < 1:
        raise Skipped(f"of {goal.target_bytes} bytes nothing is left beside what the plain step reserves unpredicted")
    try:
        plan = _solved(job, planner, goal)
    except InfeasibleBudgetError as error:
        raise Skipped(f"no plan fits {goal.budget_bytes} bytes; the smallest peak is {error.min_peak_bytes}") from error
    broken = validate(job.profile, plan, plan.budget_bytes)
    if broken:
        raise RuntimeError(f"the referee rejects the plan: {[v.kind for v in broken]}")
    plan.save(results.file(f"plans/{case.name}", name))
    return {
        **facts, "planning_s": time.perf_counter() - began, "gap": plan.gap, "peak_bytes": plan.peak_bytes,
        "reserved_bytes": plan.reserved_bytes, "step_s": plan.step_s, "launch_s": plan.launch_s,
        "plain_step_s": plan.baseline_step_s, "host_bytes": plan.host_bytes,
    }  # fmt: skip


def _solved(job: Job, planner: str, goal: Goal) -> Plan:
    if planner != OURS:
        return job.reserving(BASELINES[planner](job.profile, goal.budget_bytes))
    if goal.reserved:
        return job.solved(goal.budget_bytes)
    return job.reserving(replace(job, replayed=None).solved(goal.budget_bytes))
