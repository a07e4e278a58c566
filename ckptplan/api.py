"""The public calls that plan: solve, frontier and explain. They load PyTorch for a model, not for a profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB, budget_to_bytes
from ckptplan.planning.job import Job, PlanLimits, Report, disk_limit, host_limit, job_of_profile, say_nothing
from ckptplan.report.explain import Explanation, Worth
from ckptplan.report.explain import explain as explanation
from ckptplan.solving.bound.pricing import lower_bound
from ckptplan.solving.cost import menus as menus_of
from ckptplan.solving.frontier import frontier_profile, smallest_within
from ckptplan.solving.tiers import all_bytes

if TYPE_CHECKING:  # these import torch
    import torch
    from torch import nn

    from ckptplan.profiling.target import DeviceLike
    from ckptplan.profiling.workload.optimizers import OptimizerLike
    from ckptplan.runtime.step import LossFn


def solve(
    model_or_profile: nn.Module | Profile,
    budget_gb: float | None = None,
    *,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike | None = None,
    device: DeviceLike = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
    actions: tuple[Action, ...] = ACTIONS,
    segments: bool = True,
    menus: bool = True,
    max_overhead: float | None = None,
    time_limit_s: float = 10.0,
    step: Callable[[], torch.Tensor] | None = None,
    amp: torch.dtype | str | None = None,
    accumulate: bool | None = None,
    swap_dir: str | Path | None = None,
    seed: int = 0,
    workers: int | None = None,
    on_progress: Report | None = None,
) -> Plan:
    """The fastest plan that fits the budget, and how far from the best possible it can be at most.

    With `max_overhead` in place of a budget: the plan with the smallest peak found among those within that slowdown.

    Parameters
    ----------
    model_or_profile : nn.Module or Profile
        A model is profiled first, with `inputs`, `loss_fn`, `optimizer`, `device`, `step`, `amp`, `accumulate` and
        `swap_dir` as in `profile`; they don't go with a profile.
    budget_gb : float, optional
        Everything the step may hold on the device at any moment, in units of 2**30 bytes; rounded down to bytes. None:
        what the device has free, and what the model holds there already.
    host_gb : float, optional
        Limit on swapped bytes, in units of 2**30 bytes; 0 lets nothing move, but to the disk where that is allowed.
    disk_gb : float, optional
        Most bytes on the disk tier, same unit: what the host can't hold goes there. Needs a `host_gb`, and a profile
        with such a tier (on CUDA, `swap_dir` has it measured). The disk's staging buffers, which are pinned host
        memory, count against `host_gb`. None: no disk.
    actions : tuple of str
        Which of "keep", "swap" and "recompute" may be used; "keep" must be.
    segments : bool
        Whether consecutive stages may be recomputed together, nested where that pays.
    menus : bool
        Whether a stage may also save, move or recompute some of its operations' outputs and not others.
    max_overhead : float, optional
        Largest slowdown against keeping everything: 0.10 for ten per cent. Not together with a budget.
    time_limit_s : float
        For solving, profiling not counted.
    seed, workers : int
        Of the solver: the same of both give the same plan, unless the time limit cuts the search.
    on_progress : callable, optional
        Told what is being done, in words.

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
    if budget_gb is not None and max_overhead is not None:
        raise InvalidInputError(
            f"budget_gb={budget_gb!r} and max_overhead={max_overhead!r} are both given; pass one: the budget to be as "
            "fast as possible within it, or the slowdown to need as little memory as possible"
        )
    budget_bytes = None if budget_gb is None else budget_to_bytes(budget_gb)
    if budget_bytes is None and max_overhead is None:
        if isinstance(model_or_profile, Profile):
            raise InvalidInputError("a profile says nothing of free memory; pass budget_gb= or max_overhead=")
        from ckptplan.planning.model_job import default_budget

        budget_bytes = default_budget(model_or_profile, device)
    job = _job(
        model_or_profile, inputs, loss_fn, optimizer, device, step, amp, accumulate, swap_dir, menus, actions, segments,
        host_gb, disk_gb, time_limit_s, seed, workers, on_progress,
    )  # fmt: skip
    if budget_bytes is not None:
        return job.solved(budget_bytes)
    assert max_overhead is not None
    plan = job.sound(
        smallest_within(
            job.profile,
            max_overhead,
            actions=job.actions,
            segments=segments,
            host_bytes=job.host_bytes,
            disk_bytes=job.disk_bytes,
            time_limit_s=time_limit_s,
            seed=seed,
            workers=workers,
            on_progress=job.report,
        )
    )
    # No budget was named that a replay could exceed, so the plan names the one it keeps.
    plan = job.reserving(plan)
    return replace(plan, budget_bytes=max(plan.budget_bytes, job.needs(plan)))


def frontier(
    model_or_profile: nn.Module | Profile,
    *,
    points: int = 12,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike | None = None,
    device: DeviceLike = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
    actions: tuple[Action, ...] = ACTIONS,
    segments: bool = True,
    menus: bool = True,
    time_limit_s: float = 60.0,
    step: Callable[[], torch.Tensor] | None = None,
    amp: torch.dtype | str | None = None,
    accumulate: bool | None = None,
    swap_dir: str | Path | None = None,
    seed: int = 0,
    workers: int | None = None,
    on_progress: Report | None = None,
) -> tuple[Plan, ...]:
    """The plans along the time/memory trade-off, from the smallest peak to everything kept.

    Parameters
    ----------
    points : int
        Most plans, 2 or more.
    time_limit_s : float
        For all of them together, profiling not counted.

    The others are those of `solve`.

    Returns
    -------
    tuple of Plan
        By rising peak and falling step time, each with its proven bound; checked as `solve` checks its plans.

    Raises
    ------
    InvalidInputError, UnsupportedModelError
    """
    job = _job(
        model_or_profile, inputs, loss_fn, optimizer, device, step, amp, accumulate, swap_dir, menus, actions, segments,
        host_gb, disk_gb, time_limit_s / max(points, 1), seed, workers, on_progress,
    )  # fmt: skip
    plans = frontier_profile(
        job.profile,
        points=points,
        actions=job.actions,
        segments=segments,
        host_bytes=job.host_bytes,
        disk_bytes=job.disk_bytes,
        time_limit_s=time_limit_s,
        seed=seed,
        workers=workers,
        on_progress=job.report,
    )
    checked = []
    for plan in plans:
        plan = job.reserving(job.sound(plan))
        if plan.reserved_bytes is not None:
            # The chain knows budgets in tensors alone: each plan names the one that it keeps on the device.
            plan = replace(plan, budget_bytes=max(plan.budget_bytes, plan.reserved_bytes))
        elif job.needs(plan) > plan.budget_bytes:
            try:
                plan = job.solved(plan.budget_bytes)
            except InfeasibleBudgetError:
                continue  # the smallest peak of the chain is below what its replay needs
        checked.append(plan)
    return _undominated(checked)


def _undominated(plans: list[Plan]) -> tuple[Plan, ...]:
    """By rising need of memory, those that are faster than all that need less."""
    out: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.reserved_bytes or p.peak_bytes, p.step_s)):
        if not out or plan.step_s < out[-1].step_s:
            out.append(plan)
    return tuple(out)


def explain(
    profile: Profile,
    plan: Plan,
    *,
    host_gb: float | None = None,
    actions: tuple[Action, ...] = ACTIONS,
    segments: bool = True,
    time_limit_s: float = 10.0,
) -> Explanation:
    """Why `plan` is as it is: what binds where, what more memory or faster links are worth, each stage's next choices.

    Parameters
    ----------
    profile : Profile
        The one that the plan was made from.
    host_gb, actions, segments
        As given to `solve`: what the prices and the alternatives may use.
    time_limit_s : float
        For the prices.

    Returns
    -------
    Explanation
        Printable.

    Raises
    ------
    PlanMismatchError
        If the plan isn't one of this profile.
    """
    plan.require_profile(profile)
    menu = menus_of(profile, actions)
    bound = lower_bound(
        profile,
        menu,
        plan.budget_bytes,
        # As one tier at the link's rate, to which the plan's disk bytes are added: the prices are estimates.
        host_bytes=all_bytes(host_limit(host_gb), plan.disk_bytes),
        segments=segments and "recompute" in actions,
        deadline=time.monotonic() + time_limit_s,
    )
    found = bound.prices
    worth = None if found is None else Worth(found.budget_s_per_byte * GIB, found.out_s, found.in_s)
    return explanation(profile, plan, worth=worth, actions=actions)


def _job(
    model_or_profile: nn.Module | Profile,
    inputs: Any,
    loss_fn: LossFn | None,
    optimizer: OptimizerLike | None,
    device: DeviceLike,
    step: Callable[[], torch.Tensor] | None,
    amp: torch.dtype | str | None,
    accumulate: bool | None,
    swap_dir: str | Path | None,
    menus: bool,
    actions: tuple[Action, ...],
    segments: bool,
    host_gb: float | None,
    disk_gb: float | None,
    time_limit_s: float,
    seed: int,
    workers: int | None,
    on_progress: Report | None,
) -> Job:
    limits = PlanLimits(
        tuple(actions),
        segments,
        host_limit(host_gb),
        time_limit_s,
        seed,
        workers,
        on_progress or say_nothing,
        disk_limit(disk_gb, host_gb),
    )
    if not isinstance(model_or_profile, Profile):
        from ckptplan.planning.model_job import job_of_model

        return job_of_model(
            model_or_profile, inputs, loss_fn, optimizer, device, step, amp, accumulate, swap_dir, menus, limits
        )
    given = {
        "inputs": inputs,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "device": device,
        "step": step,
        "amp": amp,
        "accumulate": accumulate,
        "swap_dir": swap_dir,
    }
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise InvalidInputError(f"{', '.join(extra)} can't be given with a profile, which is measured already")
    return job_of_profile(model_or_profile, limits, menus=menus)
