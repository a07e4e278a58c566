"""The public calls that tie the parts together: model -> profile -> plan, checked by the referee and by a replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from ckptplan.core.chain import ACTIONS, Action, Phase
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError, PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.shortage import Shortage
from ckptplan.core.units import GIB, budget_to_bytes, format_bytes, format_seconds
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling.optimizers import OptimizerLike
from ckptplan.profiling.profiler import outside_tensors, profile_step, replayed_bytes, training_step
from ckptplan.profiling.target import PLANNED, DeviceLike, Target, find_target
from ckptplan.referee import validate
from ckptplan.report.explain import Explanation, Worth
from ckptplan.report.explain import explain as explanation
from ckptplan.report.shortage import corrections, planned_bytes, told
from ckptplan.runtime.apply import Handle, OnOom
from ckptplan.runtime.apply import apply as apply_plan
from ckptplan.runtime.measure import held_tensors, unique_bytes
from ckptplan.runtime.step import LossFn, check_supported, fingerprint
from ckptplan.solving.evaluate import menus as menus_of
from ckptplan.solving.frontier import frontier_profile, smallest_within
from ckptplan.solving.planner import solve_profile
from ckptplan.solving.prices import lower_bound

_TIGHTENINGS = 6
PLAIN = ("keep", "swap", "recompute", "recompute+swap")
"""The options that every stage has where it can; the others of its menu are its operations' business."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What there is to plan, and within which limits.

    `replayed_bytes` says what a plan needs when the model is replayed with it: on CUDA (`on_cuda`) what the allocator
    reserves, elsewhere the bytes in tensors.
    """

    profile: Profile
    replayed_bytes: Callable[[Plan], int] | None
    on_cuda: bool
    actions: tuple[Action, ...]
    segments: bool
    host_bytes: int | None
    time_limit_s: float
    seed: int
    workers: int | None
    report: Report

    def solved(self, budget_bytes: int) -> Plan:
        """The plan for a budget; for a model, one whose replay keeps it.

        Raises
        ------
        InfeasibleBudgetError
            If none can, or none is found that does.
        CkptPlanError
            If the referee rejects a plan: a defect.
        """
        limit = budget_bytes
        for _ in range(_TIGHTENINGS):
            try:
                plan = self._within(limit)
            except InfeasibleBudgetError as error:
                if limit == budget_bytes and not self.on_cuda:
                    raise
                return self._leanest(budget_bytes, error)
            over = self.needs(plan) - budget_bytes
            if over <= 0:
                return plan
            # The allocator's fragments, or what the chain model left out: ask for that much less. The plan then names
            # the smaller budget, which is the one its status and bound speak of.
            # What the plan left of the limit was no use to it, and giving that up changes nothing.
            limit = max(min(limit, plan.peak_bytes) - over, 1)
        try:
            plan = self._within(1)
        except InfeasibleBudgetError as error:
            return self._leanest(budget_bytes, error)
        return plan

    def _within(self, limit: int) -> Plan:
        plan = self.sound(
            solve_profile(
                self.profile,
                limit,
                actions=self.actions,
                segments=self.segments,
                host_bytes=self.host_bytes,
                time_limit_s=self.time_limit_s,
                seed=self.seed,
                workers=self.workers,
                on_progress=self.progress,
            )
        )
        return self.reserving(plan)

    def _leanest(self, budget_bytes: int, error: InfeasibleBudgetError) -> Plan:
        """The plan with the smallest peak, if the budget holds what it needs with the allocator's fragments."""
        plan = self._within(error.min_peak_bytes)
        needs = self.needs(plan)
        if needs <= budget_bytes:
            return plan
        raise InfeasibleBudgetError(
            f"budget {format_bytes(budget_bytes)} is below the {format_bytes(needs)} that the leanest plan needs, of "
            f"which {format_bytes(plan.peak_bytes)} are in tensors at its peak (stage {error.stage!r}, {error.phase}); "
            "raise the budget, or allow more actions"
            + ("; PYTORCH_ALLOC_CONF=expandable_segments:True lessens fragments" if self.on_cuda else ""),
            budget_bytes=budget_bytes,
            min_peak_bytes=needs,
            stage=error.stage,
            phase=error.phase,
        ) from error

    def reserving(self, plan: Plan) -> Plan:
        """`plan` with what the allocator will reserve for it, on CUDA and where there is a model to replay."""
        if self.replayed_bytes is None or not self.on_cuda:
            return plan
        return replace(plan, reserved_bytes=self.replayed_bytes(plan))

    def needs(self, plan: Plan) -> int:
        """Bytes that the budget must hold for `plan`, by its replay; 0 where there is no model to replay."""
        if plan.reserved_bytes is not None:
            return plan.reserved_bytes
        return 0 if self.replayed_bytes is None else self.replayed_bytes(plan)

    def sound(self, plan: Plan) -> Plan:
        """`plan`, which the referee accepts."""
        broken = validate(self.profile, plan, plan.budget_bytes, host_bytes=self.host_bytes)
        if broken:
            raise CkptPlanError(
                "the solver gave a plan that the referee rejects, please report it: "
                + "; ".join(f"{v.kind} {v.stage}: {v.detail}" for v in broken)
            )
        return plan

    def progress(self, part: str, best_s: float, bound_s: float) -> None:
        """Put the solver's state into words."""
        found = "no plan yet" if best_s == math.inf else f"step {format_seconds(best_s)}"
        gap = f", gap {best_s / bound_s - 1:.2%}" if bound_s and best_s != math.inf else ""
        self.report(f"solving ({part}): {found}{gap}")


def solve(
    model_or_profile: nn.Module | Profile,
    budget_gb: float | None = None,
    *,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike | None = None,
    device: DeviceLike = None,
    host_gb: float | None = None,
    actions: tuple[Action, ...] = ACTIONS,
    segments: bool = True,
    menus: bool = True,
    max_overhead: float | None = None,
    time_limit_s: float = 10.0,
    step: Callable[[], torch.Tensor] | None = None,
    amp: torch.dtype | str | None = None,
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
        A model is profiled first, with `inputs`, `loss_fn`, `optimizer`, `device`, `step`, `amp` and `swap_dir` as in
        `profile`; they don't go with a profile.
    budget_gb : float, optional
        Everything the step may hold on the device at any moment, in units of 2**30 bytes; rounded down to bytes. None:
        what the device has free, and what the model holds there already.
    host_gb : float, optional
        Limit on swapped bytes, in units of 2**30 bytes; 0 lets nothing move.
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
        budget_bytes = free_bytes(model_or_profile, find_target(model_or_profile, device))
    job = _job(
        model_or_profile, inputs, loss_fn, optimizer, device, step, amp, swap_dir, menus, actions, segments, host_gb,
        time_limit_s, seed, workers, on_progress,
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
    actions: tuple[Action, ...] = ACTIONS,
    segments: bool = True,
    menus: bool = True,
    time_limit_s: float = 60.0,
    step: Callable[[], torch.Tensor] | None = None,
    amp: torch.dtype | str | None = None,
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
        model_or_profile, inputs, loss_fn, optimizer, device, step, amp, swap_dir, menus, actions, segments, host_gb,
        time_limit_s / max(points, 1), seed, workers, on_progress,
    )  # fmt: skip
    plans = frontier_profile(
        job.profile,
        points=points,
        actions=job.actions,
        segments=segments,
        host_bytes=job.host_bytes,
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
        host_bytes=host_limit(host_gb),
        segments=segments and "recompute" in actions,
        deadline=time.monotonic() + time_limit_s,
    )
    found = bound.prices
    worth = None if found is None else Worth(found.budget_s_per_byte * GIB, found.out_s, found.in_s)
    return explanation(profile, plan, worth=worth, actions=actions)


def host_limit(host_gb: float | None) -> int | None:
    """Whole bytes on the host tier; None: no limit."""
    if host_gb is None:
        return None
    return 0 if host_gb is not False and host_gb == 0 else budget_to_bytes(host_gb, name="host_gb")


def _job(
    model_or_profile: nn.Module | Profile,
    inputs: Any,
    loss_fn: LossFn | None,
    optimizer: OptimizerLike | None,
    device: DeviceLike,
    step: Callable[[], torch.Tensor] | None,
    amp: torch.dtype | str | None,
    swap_dir: str | Path | None,
    menus: bool,
    actions: tuple[Action, ...],
    segments: bool,
    host_gb: float | None,
    time_limit_s: float,
    seed: int,
    workers: int | None,
    on_progress: Report | None,
) -> Job:
    report = on_progress or (lambda text: None)
    limits = (tuple(actions), segments, host_limit(host_gb), time_limit_s, seed, workers, report)
    if isinstance(model_or_profile, Profile):
        given = {
            "inputs": inputs,
            "loss_fn": loss_fn,
            "optimizer": optimizer,
            "device": device,
            "step": step,
            "amp": amp,
        }
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise InvalidInputError(f"{', '.join(extra)} can't be given with a profile, which is measured already")
        return Job(model_or_profile if menus else _plain(model_or_profile), None, False, *limits)
    model = model_or_profile
    target = find_target(model, device)
    check_supported(model)
    # Once, so that profile and replay see the very same inputs, whether given or found.
    training, notes = training_step(model, inputs, loss_fn=loss_fn, step=step, target=target, amp=amp)
    measured = profile_step(
        training, target, optimizer=optimizer, swap_dir=swap_dir, menus=menus, notes=notes, on_progress=on_progress
    )
    training_bytes = TrainingBytes(model, target, optimizer=optimizer)

    def replayed(plan: Plan) -> int:
        if target.is_cuda:
            return training_bytes.reserved(training, plan)
        return measured.resident_bytes + replayed_bytes(training, plan, target)

    return Job(measured, replayed, target.is_cuda, *limits)


def _plain(profile: Profile) -> Profile:
    """`profile` without the options that choose among a stage's operations."""
    stages = (replace(s, options=tuple(o for o in s.options if o.name in PLAIN)) for s in profile.stages)
    return replace(profile, stages=tuple(stages))


def free_bytes(model: nn.Module, target: Target) -> int:
    """What a step may use: what is free or the model's own now, or the whole of a device that isn't here."""
    if target.spec is not None:
        return target.spec.usable_bytes
    device, held = target.device, unique_bytes(held_tensors(model))
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached + held
    return int(psutil.virtual_memory().available) + held


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    swap_dir: str | Path | None = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
    checksums: bool = False,
    synchronous: bool = False,
    on_oom: Literal["raise", "report", "replan"] = "raise",
    profile: Profile | None = None,
    retries: int = 3,
    actions: tuple[Action, ...] = ACTIONS,
    segments: bool = True,
    time_limit_s: float = 10.0,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike | None = None,
    step: Callable[[], torch.Tensor] | None = None,
    amp: torch.dtype | str | None = None,
) -> Handle:
    """Make every training forward of `model` follow `plan`.

    The model's classes, parameter names, `state_dict` and hooks stay as they are; only `forward` of the stages is
    replaced on the instances. Forwards without gradients, or in evaluation mode, run as if no plan were there. The
    `use_cache` of a Hugging Face configuration is off while the plan is applied.

    Parameters
    ----------
    swap_dir : path, optional
        Where the swap file of a CPU plan, or of a CUDA plan's disk tier, lives (unnamed, at most the plan's swapped
        bytes per living graph).
    host_gb : float, optional
        Limit on pinned host memory for a CUDA plan, in units of 2**30 bytes; new plans move no more on any device. A
        disk tier's `STAGING_BYTES` come on top.
    disk_gb : float, optional
        Limit on the swap file, in units of 2**30 bytes.
    checksums : bool
        Take a checksum of everything that leaves and compare it with what comes back: finds damage on any tier, and
        costs the time of reading all of it twice.
    synchronous : bool
        Wait for every copy where it is issued: the same results without overlap, for finding faults.
    on_oom : "raise", "report" or "replan"
        What `handle.step(fn)` does when memory runs out in `fn`. "raise": nothing, the error is the allocator's.
        "report": undo the step and raise `OutOfMemoryError`, which says what was alive and what was planned. "replan":
        undo it, correct the profile by what was measured, solve again, and run the step with the new plan. Steps that
        aren't run through `handle.step` are as with "raise".
    profile : Profile, optional
        The one that the plan was made from; needed for "replan". In a report it tells what was planned for the very
        moment, rather than for the step.
    retries : int
        So many new plans are tried for one step, 1 or more.
    actions, segments, time_limit_s
        For new plans, as in `solve`.
    inputs, loss_fn, optimizer, step, amp
        As given to `solve`; for a plan made for a device that wasn't there, which is checked again here: it is replayed
        on this device's operations, and must keep its budget.

    Returns
    -------
    Handle

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, device, library version or profile.
    UnsupportedModelError
        If a plan is applied already, or the model checkpoints by itself or is compiled.
    InvalidInputError
        If the swap directory can't be written or is too small, or an argument is impossible. The model is unchanged
        after any of these.
    """
    if plan.fingerprint.device.startswith(PLANNED):
        plan = _arrived(model, plan, inputs, loss_fn, optimizer, step, amp)
    if on_oom not in ("raise", "report", "replan"):
        raise InvalidInputError(f"on_oom={on_oom!r}; it is 'raise', 'report' or 'replan'")
    if on_oom == "replan" and profile is None:
        raise InvalidInputError(
            "on_oom='replan' solves again, for which it needs the profile that the plan was made from: "
            "p = ckptplan.profile(model, ...); plan = ckptplan.solve(p, ...); pass profile=p"
        )
    if on_oom == "replan" and retries == 0:
        raise InvalidInputError("retries=0 never tries another plan; raise it, or pass on_oom='report'")
    rule = None
    if on_oom != "raise":
        adviser = None
        if profile is not None:
            plan.require_profile(profile)
            limits = (tuple(actions), segments, host_limit(host_gb), time_limit_s, 0, None, lambda text: None)
            adviser = _Adviser(Job(profile, None, False, *limits))
        rule = OnOom(adviser, retries if on_oom == "replan" else 0)
    return apply_plan(
        model,
        plan,
        swap_dir=swap_dir,
        host_gb=host_gb,
        disk_gb=disk_gb,
        checksums=checksums,
        synchronous=synchronous,
        on_oom=rule,
    )


def _arrived(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    loss_fn: LossFn | None,
    optimizer: OptimizerLike | None,
    step: Callable[[], torch.Tensor] | None,
    amp: torch.dtype | str | None,
) -> Plan:
    """A plan made for a device that wasn't there, bound to the one that is here now.

    Raises
    ------
    PlanMismatchError
        If this is another kind of device, has too little memory, or the plan doesn't keep its budget here.
    InvalidInputError
        If the inputs are missing.
    """
    target = find_target(model)
    planned_for = plan.fingerprint.device.removeprefix(PLANNED)
    if target.is_cuda != (plan.reserved_bytes is not None):
        raise PlanMismatchError(
            f"the plan was made for {planned_for!r}, the model is on {str(target.device)!r}, where other operations "
            "run; move the model to such a device, or solve again"
        )
    if inputs is None and step is None:
        raise InvalidInputError(
            f"the plan was made for {planned_for!r} without having it; pass inputs= (and loss_fn=, optimizer=, step=, "
            "amp= as given to solve), so that it can be checked on this device"
        )
    training, _ = training_step(model, inputs, loss_fn=loss_fn, step=step, target=target, amp=amp)
    here = fingerprint(training)
    plan.fingerprint.require(here, ignore=("device", "torch_version"))
    bound = replace(plan, fingerprint=here)
    if target.is_cuda:
        needs = TrainingBytes(model, target, optimizer=optimizer).reserved(training, bound)
        bound = replace(bound, reserved_bytes=needs)
    else:
        outside = training.tensors() if step is None else outside_tensors(training, target)
        needs = unique_bytes([*held_tensors(model), *outside]) + replayed_bytes(training, bound, target)
    allowed = max(plan.budget_bytes, plan.reserved_bytes or 0)
    has = target.capacity_bytes
    if needs > allowed or (has is not None and needs + target.context_bytes > has):
        raise PlanMismatchError(
            f"the plan, made for {planned_for!r} within {format_bytes(allowed)}, needs {format_bytes(needs)} on "
            f"{target.description!r}"
            + ("" if has is None else f", which has {format_bytes(has)}")
            + "; solve again here"
        )
    return bound


class _Adviser:
    """Knows the profile of what is applied, as corrected so far (`runtime.apply.Adviser`)."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def planned(self, plan: Plan, phase: Phase, stage: int | None) -> tuple[int, int]:
        """Bytes at the start and at the worst moment of a stage."""
        return planned_bytes(self._job.profile, plan, phase, stage)

    def replan(self, plan: Plan, shortage: Shortage) -> Plan:
        """The fastest plan of the corrected profile.

        Raises
        ------
        InfeasibleBudgetError
            If none fits.
        """
        refused: list[InfeasibleBudgetError] = []
        for correction in corrections(self._job.profile, plan, shortage):
            job = replace(self._job, profile=correction.profile)
            try:
                leaner = job.solved(correction.limit_bytes)
            except InfeasibleBudgetError as error:
                refused.append(error)
                if correction.leaner_than_bytes is None or error.min_peak_bytes >= correction.leaner_than_bytes:
                    continue
                leaner = job.solved(error.min_peak_bytes)
            self._job = replace(job, profile=correction.means or correction.profile)
            return told(leaner, correction, plan)
        raise refused[0]
