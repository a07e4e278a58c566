"""The public calls that plan: solve, frontier and explain. They load PyTorch for a model, not for a profile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckptplan.core.budget import Budget
from ckptplan.core.checks import check_kind, check_whole
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError, PlanMismatchError
from ckptplan.core.frontier import Frontier, beats
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.progress import limited, search_state
from ckptplan.core.request import Limits, SearchKeywords, SolveKeywords, Training, remember, require_known
from ckptplan.core.units import GIB, format_bytes
from ckptplan.planning.by_rules import plans_by_rules
from ckptplan.planning.job import Job, job_of_profile
from ckptplan.planning.plan_file import keep, plan_in, request_text
from ckptplan.referee.validate import examine
from ckptplan.report.explain import Explanation, Worth
from ckptplan.report.explain import explain as explanation
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.frontier import frontier_profile
from ckptplan.solving.peak import plan_space_of
from ckptplan.solving.room import Room

if TYPE_CHECKING:  # these import torch
    from torch import nn

    from ckptplan.planning.model_job import Together

FRONTIER_TIME_LIMIT_S = 60.0
"""Default time limit for all plans of a frontier together."""
RANGE_TIME_LIMIT_S = 0.5
"""Time limit for finding the smallest peak, which a plan's output shows."""


def solve(
    model_or_profile: nn.Module | Profile,
    budget_gb: float | None = None,
    *,
    budget: str | None = None,
    inputs: Any = None,
    max_overhead: float | None = None,
    swap_dir: str | Path | None = None,
    plan_file: str | Path | None = None,
    **options: Unpack[SolveKeywords],
) -> Plan:
    """Return the fastest plan found within a budget, with a proven bound on its distance from the best possible one.

    With `max_overhead` in place of a budget, return the plan with the smallest peak found within that slowdown.

    Parameters
    ----------
    model_or_profile : nn.Module or Profile
        A model is profiled first; with a profile, `inputs`, `swap_dir` and the options of `Training` can't be given.
    budget_gb : float, optional
        Everything the step may hold on the device at any moment, in units of 2**30 bytes; rounded down to bytes. None:
        the device's free memory and what the model holds there already.
    budget : str, optional
        The budget in words, in place of `budget_gb`: "12 GiB" or "800 MB"; "50%" of the way from the smallest peak to
        everything kept; "auto" for the device's free memory and what the model holds there, less 5 %.
    inputs : tensor, tuple, dict, optional
        Positional or keyword inputs of the forward, as in `profile`.
    max_overhead : float, optional
        Largest slowdown against keeping everything: 0.10 for ten per cent. Not together with a budget.
    swap_dir : path, optional
        As in `profile`.
    plan_file : path, optional
        File that keeps the plan for later runs. If it has a plan for the same budget, options of `Limits`, model with
        its settings, inputs, optimizer and device, that plan is returned without profiling; otherwise a new one is
        written there. Code isn't compared (of the loss, only the name): delete the file when code changes. Not
        together with `step`, whose tensors can't be compared; for one process only.
    **options
        What is trained: `loss_fn`, `optimizer`, `device`, `step`, `amp`, `accumulate`, `ddp`, `fsdp`
        (`ckptplan.core.request.Training`); what a plan may use: `actions`, `segments`, `menus`, `host_gb`, `disk_gb`,
        `time_limit_s`, `gap`, `seed`, `workers`, `on_progress`, `on_plan`; `compile`, to have its layers compiled
        (`ckptplan.core.request.Limits`).

    Returns
    -------
    Plan
        It has passed `validate`; for a model, also a replay of the applied plan that counts its tensors.

    Raises
    ------
    InfeasibleBudgetError
        With the smallest budget that works, and the stage and phase that bind.
    InvalidInputError, UnsupportedModelError
    """

    def alone(together: Together | None = None) -> Plan:
        require_known(solve, options, SolveKeywords)
        wanted = Budget.of(budget_gb, budget)
        if (budget_gb, budget) != (None, None) and max_overhead is not None:
            given = f"budget_gb={budget_gb!r}" if budget is None else f"budget={budget!r}"
            raise InvalidInputError(
                f"{given} and max_overhead={max_overhead!r} are both given; pass one: the budget to be as "
                "fast as possible within it, or the slowdown to need as little memory as possible"
            )
        training, limits = Training.of(options, inputs), Limits.of(options)
        notes: tuple[str, ...] = ()
        budget_bytes = wanted.nbytes
        if budget_bytes is None and wanted.share is None and max_overhead is None:
            budget_bytes, note = _free_bytes(model_or_profile, training, wanted.margin, together)
            notes = (note,)
        if wanted.nbytes is not None and not isinstance(model_or_profile, Profile):
            from ckptplan.planning.model_job import warn_of_more_than_there_is

            warn_of_more_than_there_is(wanted.nbytes, model_or_profile, training.device)
        asked = ""
        if plan_file is not None:
            _check_file_suits(training, together)
            asked = f"{request_text(wanted, limits, max_overhead)}; {_step_text(model_or_profile, training)}"
            found = plan_in(plan_file, asked)
            if found is not None and _holds(found, model_or_profile, budget_bytes):
                return found
        within = limits if together is None else together.shared(limits)
        if together is not None and training.inputs is not None and not isinstance(model_or_profile, Profile):
            training = together.widened_inputs(model_or_profile, training)

        with _job(model_or_profile, training, swap_dir, within) as job:

            def solved(budget_bytes: int | None) -> Plan:
                plan = _solved(job, budget_bytes, wanted.share, max_overhead)
                limits.on_progress(f"solved: {search_state(plan.step_s, plan.lower_bound_s, plan.peak_bytes)}")
                return replace(plan, notes=(*notes, *plan.notes))

            plan = solved(budget_bytes) if together is None else together.planned(job, budget_bytes, solved)
        return plan if plan_file is None else keep(plan, plan_file, asked)

    if isinstance(model_or_profile, Profile):
        return alone()
    from ckptplan.planning.model_job import solved_together

    plan = solved_together(model_or_profile, options.get("ddp"), options.get("fsdp"), alone)
    remember(plan, options)
    return plan


def _free_bytes(
    model_or_profile: nn.Module | Profile, training: Training, margin: float, together: Together | None
) -> tuple[int, str]:
    """Return the bytes that a device has free, less a share of them, and a note that says so."""
    if isinstance(model_or_profile, Profile):
        raise InvalidInputError("a profile doesn't record free memory; pass budget_gb=, budget= or max_overhead=")
    from ckptplan.planning.model_job import default_budget

    ranks = 1 if together is None else together.local_count
    free = default_budget(model_or_profile, training.device, ranks, training.optimizer)
    budget_bytes = int(free * (1 - margin))
    less = f", less {format_bytes(free - budget_bytes)}" if margin else ""
    return budget_bytes, f"the budget is the device's free memory, {format_bytes(free)}{less}"


def _check_file_suits(training: Training, together: Together | None) -> None:
    """Raise `InvalidInputError` for a training whose plan can't be kept by `plan_file=`."""
    if together is not None or training.step is not None:
        raise InvalidInputError(
            "plan_file= is for one process and for inputs=; "
            + ("save the plan of a group" if together is not None else "save the plan of a step=")
            + " (Plan.save), and apply it in the next run (Plan.load)"
        )


def _step_text(model_or_profile: nn.Module | Profile, training: Training) -> str:
    """Return the model and the step, as text, that a plan file's plan must have been made for."""
    if isinstance(model_or_profile, Profile):
        return repr(model_or_profile.fingerprint)
    from ckptplan.planning.model_job import step_text

    return step_text(model_or_profile, training)


def _holds(plan: Plan, model_or_profile: nn.Module | Profile, budget_bytes: int | None) -> bool:
    """Return whether a file's plan still holds: for this profile, or within the bytes that may be used now."""
    if isinstance(model_or_profile, Profile):
        return not _broken(model_or_profile, plan)
    return budget_bytes is None or plan.counted_bytes <= budget_bytes


def _solved(job: Job, budget_bytes: int | None, share: float | None, max_overhead: float | None) -> Plan:
    """Return the plan for a budget, for a share of the way to everything kept, or for a slowdown."""
    if share is not None:
        return job.solved_share(share)
    if budget_bytes is not None:
        try:
            plan = job.solved(budget_bytes)
        except InfeasibleBudgetError as error:
            error.args = (f"{error}{job.with_weights(error.min_peak_bytes)}{job.what_stays(error)}",)
            raise
        return _with_range(job, plan)
    assert max_overhead is not None
    plan = job.smallest_within(max_overhead)
    # No budget was given, so the plan's own becomes what its replay needs.
    plan = job.reserving(plan)
    needs = job.needs(plan)
    if needs > plan.budget_bytes:  # the plan's bound was proven for fewer bytes
        plan = plan.within(needs, job.profile.fastest_step_s)
    return _with_range(job, plan)


def _with_range(job: Job, plan: Plan) -> Plan:
    """Return `plan` with the range of peaks between which a budget makes a difference."""
    least, most = job.range_bytes(min(RANGE_TIME_LIMIT_S, job.limits.time_limit_s))
    return replace(plan, least_peak_bytes=min(least, plan.peak_bytes), most_peak_bytes=most)


def frontier(
    model_or_profile: nn.Module | Profile,
    *,
    points: int = 12,
    inputs: Any = None,
    swap_dir: str | Path | None = None,
    **options: Unpack[SolveKeywords],
) -> Frontier:
    """Return the plans along the time/memory trade-off, from the smallest peak to everything kept.

    Parameters
    ----------
    model_or_profile, inputs, swap_dir, **options
        As in `solve`; `time_limit_s` is for all plans together, 60 s where left out.
    points : int
        Largest number of plans, 2 to 1024.

    Returns
    -------
    Frontier
        A sequence of plans by rising peak and falling step time, each with its proven bound; checked as `solve` checks
        its plans.

    Raises
    ------
    InvalidInputError, UnsupportedModelError
    """
    require_known(frontier, options, SolveKeywords)
    options.setdefault("time_limit_s", FRONTIER_TIME_LIMIT_S)
    together = Limits.of(options)
    check_whole("frontier()", 2, 1 << 10, points=points)
    each = replace(together, time_limit_s=together.time_limit_s / points)
    sharding: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not isinstance(model_or_profile, Profile):
        from ckptplan.planning.model_job import sharded

        sharding = sharded(model_or_profile, options.get("fsdp"))
    with sharding, _job(model_or_profile, Training.of(options, inputs), swap_dir, each) as job:
        found = []
        for one in job.each(together):
            limits = replace(one.handing_out, time_limit_s=one.limits.time_limit_s)
            plans = frontier_profile(one.profile, points, limits)
            one = replace(one, limits=replace(one.limits, time_limit_s=each.time_limit_s))
            found.append(Frontier.of(_checked(one, plans)).improved(_checked(one, _better_rules(one, plans))))
        return _united(found, job.profile.fastest_step_s)


def _united(frontiers: Sequence[Frontier], fastest_s: float) -> Frontier:
    """Return the best plans of several frontiers of one job, with bounds that hold for the plans of all of them."""
    plans = []
    for frontier in frontiers:
        for plan in frontier:
            bounds = [plan.lower_bound_s]
            for other in frontiers:
                larger = [p for p in other if p.budget_bytes >= plan.budget_bytes]
                nearest = min(larger, key=lambda p: p.budget_bytes, default=None)
                bounds.append(fastest_s if nearest is None else nearest.lower_bound_s)
            plans.append(plan if len(frontiers) == 1 else plan.within(plan.budget_bytes, min(bounds)))
    return Frontier.of(plans)


def _better_rules(job: Job, plans: Sequence[Plan]) -> list[Plan]:
    """Return plans of published rules, within the peaks and with the bounds of `plans`, that beat one of these."""
    found = []
    for plan in plans:
        for other in plans_by_rules(job.profile, plan.peak_bytes, job.limits):
            if any(beats(other, than) for than in plans):
                found.append(other.within(plan.budget_bytes, plan.lower_bound_s, plan.space))
    return found


def _checked(job: Job, plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans that a replay of the model confirms, with the bytes that they need."""
    checked: list[Plan] = []
    plans = list(plans)
    for plan in plans:
        plan = job.reserving(job.sound(plan))
        if plan.reserved_bytes is not None:
            # The search's budget counts tensors alone; the plan's counts reserved bytes. A bound for at least as many
            # bytes of tensors holds for all plans within as many reserved bytes.
            budget_bytes = max(plan.budget_bytes, plan.reserved_bytes)
            above_s = (found.lower_bound_s for found in plans if found.budget_bytes >= budget_bytes)
            plan = plan.within(budget_bytes, max(above_s, default=job.profile.fastest_step_s))
        elif job.needs(plan) > plan.budget_bytes:
            try:
                plan = job.solved(plan.budget_bytes)
            except InfeasibleBudgetError:
                continue  # the smallest peak of the chain is below what its replay needs
        checked.append(plan)
    return checked


def explain(profile: Profile, plan: Plan, **options: Unpack[SearchKeywords]) -> Explanation:
    """Explain `plan`: the steps that limit it, the worth of more memory or faster links, and each stage's next choices.

    Parameters
    ----------
    profile : Profile
        The profile that the plan was made from.
    **options
        As given to `solve`: what the prices and the alternatives may use; `time_limit_s` is for the prices, and again
        for the alternatives, of the longest runs of equal stages first.

    Returns
    -------
    Explanation
        Printable.

    Raises
    ------
    PlanMismatchError
        If the plan isn't one of this profile.
    InvalidInputError
    """
    require_known(explain, options, SearchKeywords)
    limits = Limits.of(options)
    check_kind(Plan, plan=plan)
    profile = plan.require_profile(profile)
    _require_made_from(profile, plan)
    plan = replace(plan, budget_bytes=plan.tensor_budget_bytes)
    limits.on_progress(limited("finding what memory and links are worth", limits.time_limit_s))
    bound = lower_bound(
        plan_space_of(profile, limits.actions, limits.segments),
        plan.budget_bytes,
        host_bytes=Room(limits.host_bytes, plan.disk_bytes).total_bytes,
        deadline=time.monotonic() + limits.time_limit_s,
    )
    found = bound.prices
    worth = None
    if found is not None:
        steps = (tuple((prices * GIB).tolist()) for prices in (found.forward_s_per_byte, found.backward_s_per_byte))
        worth = Worth(found.budget_s_per_byte * GIB, found.out_s, found.in_s, *steps)
    deadline = time.monotonic() + limits.time_limit_s
    return explanation(profile, plan, worth=worth, actions=limits.actions, deadline=deadline)


def _require_made_from(profile: Profile, plan: Plan) -> None:
    """Raise `PlanMismatchError` unless the profile gives what the plan predicts."""
    if broken := _broken(profile, plan):
        raise PlanMismatchError(
            f"the plan was made from another profile of this model, or by an earlier version ({broken}); "
            "give the profile that it was solved from, or solve this one again"
        )


def _broken(profile: Profile, plan: Plan) -> str:
    """Return the first prediction of a plan that its profile contradicts, in words; empty if there is none."""
    if len(plan.stages) != len(profile.stages):
        return "their stages differ"
    broken, _ = examine(profile, plan, plan.budget_bytes, host_bytes=plan.host_bytes, disk_bytes=plan.disk_bytes)
    return broken[0].detail if broken else ""


def _job(
    model_or_profile: nn.Module | Profile, training: Training, swap_dir: str | Path | None, limits: Limits
) -> contextlib.AbstractContextManager[Job]:
    """Return a context that yields the job of planning a model, which is profiled first, or a profile."""
    if not isinstance(model_or_profile, Profile):
        from ckptplan.planning.model_job import job_of_model

        return job_of_model(model_or_profile, training, swap_dir, limits)
    extra = training.given() + ["swap_dir"] * (swap_dir is not None) + ["compile"] * limits.compile
    if extra:
        raise InvalidInputError(f"{', '.join(extra)} can't be given with a profile; leave it out, or pass the model")
    return contextlib.nullcontext(job_of_profile(model_or_profile, limits))
