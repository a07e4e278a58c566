"""The public calls that tie the parts together: model -> profile -> plan, checked by the referee and by a replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from ckptplan.core.chain import ACTIONS, Action, InputTensor, Phase, is_int
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError, PlanMismatchError
from ckptplan.core.measured import Measured, StageTimes
from ckptplan.core.plan import Plan, require_plan
from ckptplan.core.profile import Profile
from ckptplan.core.shortage import Shortage
from ckptplan.core.trace import DrawnStep, Trace
from ckptplan.core.units import GIB, budget_to_bytes, format_bytes, format_seconds
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling.enlarge import enlarged_calls, require_in_range
from ckptplan.profiling.optimizers import OptimizerLike
from ckptplan.profiling.profiler import as_ours, outside_tensors, profile_step, replayed_bytes, training_step
from ckptplan.profiling.target import PLANNED, DeviceLike, Target, find_target
from ckptplan.referee import simulate, validate
from ckptplan.report.explain import Explanation, Worth
from ckptplan.report.explain import explain as explanation
from ckptplan.report.refine import corrected, drawn, stage_times
from ckptplan.report.shortage import corrections, planned_bytes, told
from ckptplan.runtime.apply import Handle, OnOom
from ckptplan.runtime.apply import apply as apply_plan
from ckptplan.runtime.measure import held_tensors, run_step, unique_bytes
from ckptplan.runtime.shapes import ByName, Larger, Limits, input_tensors
from ckptplan.runtime.state import restored
from ckptplan.runtime.step import LossFn, TrainingStep, check_supported, fingerprint, make_step
from ckptplan.runtime.stores import STAGING_BYTES
from ckptplan.solving.evaluate import menus as menus_of
from ckptplan.solving.frontier import frontier_profile, smallest_within
from ckptplan.solving.peak import check_request
from ckptplan.solving.planner import solve_profile
from ckptplan.solving.prices import lower_bound
from ckptplan.solving.tiers import all_bytes, check_disk

_TIGHTENINGS = 6
PLAIN = ("keep", "swap", "recompute", "recompute+swap")
"""The options that every stage has where it can; the others of its menu are its operations' business."""

Report = Callable[[str], None]
_Limits = tuple[tuple[Action, ...], bool, int | None, float, int, int | None, Report, int | None]
"""The last fields of a `Job`."""


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
    disk_bytes: int | None = None

    def replaying(self, step: TrainingStep, sizes: TrainingBytes) -> Job:
        """The same job with each plan replayed on `step`, which the profile is of."""
        target = sizes.target

        def replayed(plan: Plan) -> int:
            if target.is_cuda:
                return sizes.reserved(step, plan)
            return self.profile.resident_bytes + replayed_bytes(step, plan, target)

        return replace(self, replayed_bytes=replayed, on_cuda=target.is_cuda)

    def solved(self, budget_bytes: int) -> Plan:
        """The plan for a budget; for a model, one whose replay keeps it.

        Raises
        ------
        InfeasibleBudgetError
            If none can, or none is found that does.
        CkptPlanError
            If the referee rejects a plan, or the replay of one that needs nothing exceeds the budget: defects.
        """
        limit = budget_bytes
        for attempt in range(_TIGHTENINGS + 1):
            if attempt == _TIGHTENINGS:
                limit = 1  # below every plan: what is left to try is the leanest
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
        raise CkptPlanError(
            f"a plan with a peak of {format_bytes(plan.peak_bytes)} needs {format_bytes(budget_bytes + over)} when the "
            f"model is replayed with it, more than the budget of {format_bytes(budget_bytes)}; please report it"
        )

    def _within(self, limit: int) -> Plan:
        plan = self.sound(
            solve_profile(
                self.profile,
                limit,
                actions=self.actions,
                segments=self.segments,
                host_bytes=self.host_bytes,
                disk_bytes=self.disk_bytes,
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
        broken = validate(self.profile, plan, plan.budget_bytes, host_bytes=self.host_bytes, disk_bytes=self.disk_bytes)
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
    disk_gb: float | None = None,
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
        budget_bytes = free_bytes(model_or_profile, find_target(model_or_profile, device))
    job = _job(
        model_or_profile, inputs, loss_fn, optimizer, device, step, amp, swap_dir, menus, actions, segments, host_gb,
        disk_gb, time_limit_s, seed, workers, on_progress,
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
        disk_gb, time_limit_s / max(points, 1), seed, workers, on_progress,
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


def host_limit(host_gb: float | None, *, name: str = "host_gb") -> int | None:
    """Whole bytes on the host tier, or another; None: no limit."""
    if host_gb is None:
        return None
    return 0 if host_gb is not False and host_gb == 0 else budget_to_bytes(host_gb, name=name)


def disk_limit(disk_gb: float | None, host_gb: float | None) -> int | None:
    """Whole bytes on the disk tier; None: there is none.

    Raises
    ------
    InvalidInputError
        If the host has no limit: then nothing would ever go to the disk.
    """
    if disk_gb and host_gb is None:
        raise InvalidInputError(
            f"disk_gb={disk_gb} without host_gb: only what the host can't hold goes to the disk, so say what it can "
            "hold; host_gb=0 sends all to the disk"
        )
    return host_limit(disk_gb, name="disk_gb")


def beside_staging(host_bytes: int, staging_bytes: int) -> int:
    """What is left of the host's limit for plans, when the disk's staging buffers have theirs.

    Raises
    ------
    InvalidInputError
        If there is less than these need.
    """
    if host_bytes < staging_bytes:
        raise InvalidInputError(
            f"host_gb={host_bytes / GIB:g} holds {format_bytes(host_bytes)}; the pinned buffers through which bytes go "
            f"to the disk need {format_bytes(staging_bytes)}; raise host_gb, or leave disk_gb out"
        )
    return host_bytes - staging_bytes


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
    disk_gb: float | None,
    time_limit_s: float,
    seed: int,
    workers: int | None,
    on_progress: Report | None,
) -> Job:
    host_bytes, disk_bytes = host_limit(host_gb), disk_limit(disk_gb, host_gb)
    rest = (time_limit_s, seed, workers, on_progress or (lambda text: None), disk_bytes)
    if isinstance(model_or_profile, Profile):
        given = {
            "inputs": inputs,
            "loss_fn": loss_fn,
            "optimizer": optimizer,
            "device": device,
            "step": step,
            "amp": amp,
            "swap_dir": swap_dir,
        }
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise InvalidInputError(f"{', '.join(extra)} can't be given with a profile, which is measured already")
        check_disk(model_or_profile, host_bytes, disk_bytes)
        # A hand-written profile is of no device, and on the CPU the host tier is a disk that needs no such buffers.
        staged = model_or_profile.fingerprint.device not in ("", "cpu")
        if host_bytes is not None and disk_bytes and staged:
            host_bytes = beside_staging(host_bytes, STAGING_BYTES)
        subject = model_or_profile if menus else _plain(model_or_profile)
        return Job(subject, None, False, tuple(actions), segments, host_bytes, *rest)
    model = model_or_profile
    target = find_target(model, device)
    check_supported(model)
    if host_bytes is not None and disk_bytes and target.is_cuda:
        host_bytes = beside_staging(host_bytes, STAGING_BYTES)
    # Once, so that profile and replay see the very same inputs, whether given or found.
    training, notes = training_step(model, inputs, loss_fn=loss_fn, step=step, target=target, amp=amp)
    limits = (tuple(actions), segments, host_bytes, *rest)
    return _job_of(training, notes, target, optimizer, swap_dir, menus, on_progress, limits)


def _job_of(
    training: TrainingStep,
    notes: Sequence[str],
    target: Target,
    optimizer: OptimizerLike | None,
    swap_dir: str | Path | None,
    menus: bool,
    on_progress: Report | None,
    limits: _Limits,
) -> Job:
    """The job of a step that is put together already."""
    measured = profile_step(
        training, target, optimizer=optimizer, swap_dir=swap_dir, menus=menus, notes=notes, on_progress=on_progress
    )
    job = Job(measured, None, False, *limits)
    check_disk(measured, job.host_bytes, job.disk_bytes)
    return job.replaying(training, TrainingBytes(training.model, target, optimizer=optimizer))


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
    on_larger: Literal["raise", "replan"] = "raise",
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
        disk tier's staging (64 MiB) counts.
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
        The one that the plan was made from; needed for "replan" and `handle.refine`. Reports, `handle.stats` and
        `handle.trace` tell by it what was planned for each stage, rather than for the step.
    retries : int
        So many new plans are tried for one step, 1 or more.
    on_larger : "raise" or "replan"
        What happens at a forward whose inputs are in some dimension larger than the plan holds for. "raise": a
        `PlanMismatchError`. "replan": before anything of that forward has run, it is profiled, with what grew extended
        by a quarter by repeating the inputs, and a plan for the same budget takes the present one's place. It needs
        `loss_fn`, `optimizer` and `amp` as given to `solve` (autocast around the forward counts as `amp`), and a step
        of one forward.
    actions, segments, time_limit_s
        For new plans, as in `solve`.
    inputs, loss_fn, optimizer, step, amp
        As given to `solve`; `inputs` and `step` for a plan made for a device that wasn't there, which is checked again
        here: it is replayed on this device's operations, and must keep its budget.

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
    require_plan(plan)
    if profile is not None and not isinstance(profile, Profile):
        raise InvalidInputError(f"profile is a {type(profile).__name__}; pass what ckptplan.profile returned")
    check_request(actions, time_limit_s)
    if not isinstance(segments, bool):
        raise InvalidInputError(f"segments={segments!r}; it is True or False")
    if plan.fingerprint.device.startswith(PLANNED):
        plan = _arrived(model, plan, inputs, loss_fn, optimizer, step, amp)
    if on_oom not in ("raise", "report", "replan"):
        raise InvalidInputError(f"on_oom={on_oom!r}; it is 'raise', 'report' or 'replan'")
    if on_oom == "replan" and profile is None:
        raise InvalidInputError(
            "on_oom='replan' solves again, for which it needs the profile that the plan was made from: "
            "p = ckptplan.profile(model, ...); plan = ckptplan.solve(p, ...); pass profile=p"
        )
    if not is_int(retries) or retries < (on_oom == "replan"):
        raise InvalidInputError(f"retries={retries!r}; give the number of plans to try for a step, 1 or more")
    if on_larger not in ("raise", "replan"):
        raise InvalidInputError(f"on_larger={on_larger!r}; it is 'raise' or 'replan'")
    disk_bytes = (plan.disk_bytes or None) if disk_gb is None else host_limit(disk_gb, name="disk_gb")
    limits = (tuple(actions), segments, host_limit(host_gb), time_limit_s, 0, None, lambda text: None, disk_bytes)
    adviser = None
    if profile is not None:
        plan.require_profile(profile)
        adviser = _Adviser(Job(profile, None, False, *limits))
    rule = None if on_oom == "raise" else OnOom(adviser, retries if on_oom == "replan" else 0)
    enlarger = None
    if on_larger == "replan":
        enlarger = _Enlarger(model, plan, limits, adviser, loss_fn, optimizer, amp, swap_dir)
    return apply_plan(
        model,
        plan,
        swap_dir=swap_dir,
        host_gb=host_gb,
        disk_gb=disk_gb,
        checksums=checksums,
        synchronous=synchronous,
        on_oom=rule,
        adviser=adviser,
        on_larger=enlarger,
    )


def trace(
    model: nn.Module,
    plan: Plan,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    *,
    step: Callable[[], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    profile: Profile | None = None,
    swap_dir: str | Path | None = None,
    warm_up: int = 2,
) -> Trace:
    """Run a planned step and draw it: what compute and copies did when, and the bytes on the device.

    Parameters, buffers, gradients and random states are as before afterwards.

    Parameters
    ----------
    inputs, loss_fn, step
        As the plan was made for (see `profile`). What a `step` callable holds on the device doesn't count on the CPU.
    optimizer : Optimizer, optional
        Its state counts to the memory; no update is run.
    profile : Profile, optional
        The one that the plan was made from: draws the predicted step beside the measured one.
    warm_up : int
        Steps before the one that is drawn.

    Returns
    -------
    Trace
        `save(path)` writes it for https://ui.perfetto.dev.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, shapes, device, library version or profile.
    InvalidInputError
        If the inputs don't fit.
    """
    if inputs is None and step is None:
        raise InvalidInputError("trace needs the inputs the plan was made for: pass inputs= (or step=)")
    require_plan(plan)
    training = make_step(model, inputs, loss_fn=loss_fn, step=step)
    plan.fingerprint.require(fingerprint(training))
    with restored(model) as rewind, apply(model, plan, swap_dir=swap_dir, profile=profile) as handle:
        for _ in range(warm_up):
            rewind()
            run_step(training)
        rewind()
        return handle.trace(lambda: run_step(training), inputs=training.tensors(), optimizer=optimizer)


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

    @property
    def job(self) -> Job:
        """The profile as corrected so far, and the limits."""
        return self._job

    def turn_to(self, job: Job) -> None:
        """A plan of another profile is applied from now on."""
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

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """What each stage is to take, told as a running step tells it."""
        return stage_times(self._job.profile, plan)

    def drawn(self, plan: Plan) -> DrawnStep:
        """The step as it is to run."""
        return drawn(self._job.profile, plan)

    def refined(self, plan: Plan, measured: Measured) -> tuple[Plan, Plan]:
        """The fastest plan found by what was measured, and `plan` with the predictions that this gives.

        Raises
        ------
        InfeasibleBudgetError
            If none fits.
        """
        job = replace(self._job, profile=corrected(self._job.profile, plan, measured))
        # What the allocator needs beyond tensors isn't known of another plan; taken to be as much as of this.
        slack = 0 if plan.reserved_bytes is None else max(plan.reserved_bytes - plan.peak_bytes, 0)
        limit = max(plan.budget_bytes - slack, 1)
        found = job.solved(limit)
        timeline = simulate(job.profile, plan)
        told = replace(
            plan,
            peak_bytes=timeline.peak_bytes,
            step_s=timeline.makespan_s,
            baseline_step_s=job.profile.baseline_step_s,
            lower_bound_s=min(found.lower_bound_s, timeline.makespan_s),
            status="feasible",
            space=found.space,
        )
        self._job = job
        if timeline.peak_bytes <= limit and timeline.makespan_s <= found.step_s:
            return replace(told, status=found.status if timeline.makespan_s == found.step_s else "feasible"), told
        return found, told


@dataclass(slots=True)
class _Known:
    """A plan that there is: what it holds for, and the profile that it is made from (None: not given)."""

    inputs: tuple[InputTensor, ...]
    plan: Plan
    job: Job | None

    @property
    def limits(self) -> Limits:
        return Limits(self.inputs)


class _Enlarger:
    """Plans for forwards with larger inputs (`runtime.shapes.OnLarger`).

    Plans that were made stay known: where inputs go beyond the present one and an earlier one holds for them, that one
    returns without any profiling. What no plan is found for is remembered too.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        limits: _Limits,
        adviser: _Adviser | None,
        loss_fn: LossFn | None,
        optimizer: OptimizerLike | None,
        amp: torch.dtype | str | None,
        swap_dir: str | Path | None,
    ) -> None:
        if plan.fingerprint.inputs == "step()":
            raise InvalidInputError(
                "on_larger='replan' plans for a forward's inputs, and this plan was made for a step=, whose inputs "
                "can't be seen; make it with inputs=, or pass on_larger='raise'"
            )
        self._model, self._limits, self._adviser = model, limits, adviser
        self._loss_fn, self._optimizer, self._amp, self._swap_dir = loss_fn, optimizer, amp, swap_dir
        self._by_name = ByName(model.forward)
        self._budget_bytes = max(plan.budget_bytes, plan.reserved_bytes or 0)
        self._now = _Known(
            self._by_name.planned(plan.fingerprint.inputs), plan, None if adviser is None else adviser.job
        )
        self._within = self._now.limits
        self._known = [self._now]
        self._refused: list[tuple[tuple[InputTensor, ...], InfeasibleBudgetError]] = []

    def beyond(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether some tensor is larger than planned."""
        return self._within.first_beyond(*self._by_name(args, kwargs)) is not None

    def enlarged(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Larger | None]:
        """A plan that holds for these inputs.

        Raises
        ------
        InfeasibleBudgetError
            If none fits the budget.
        PlanMismatchError
            If the step can't be profiled with them.
        """
        named = self._by_name(args, kwargs)
        given = input_tensors(*named)
        beyond = self._within.first_beyond(*named)
        assert beyond is not None
        if plan is not self._now.plan:  # a leaner one came after a shortage of memory
            self._now.plan = plan
            self._now.job = None if self._adviser is None else self._adviser.job
            self._budget_bytes = min(self._budget_bytes, max(plan.budget_bytes, plan.reserved_bytes or 0))
        earlier = next((k for k in reversed(self._known) if k.limits.first_beyond(*named) is None), None)
        if earlier is not None:
            return self._turn_to(earlier), None
        for shapes, error in self._refused:
            if _holds(given, shapes):
                raise _again(error)
        begin = time.perf_counter()
        found = self._plan_for((args, kwargs), named)
        larger = Larger(*beyond, found.inputs, time.perf_counter() - begin)
        self._known = [*self._known[-_REMEMBERED + 1 :], found]
        return self._turn_to(found), larger

    def _turn_to(self, known: _Known) -> Plan:
        self._now, self._within = known, known.limits
        if self._adviser is not None and known.job is not None:
            self._adviser.turn_to(known.job)
        return known.plan

    def _plan_for(self, call: tuple[tuple[Any, ...], dict[str, Any]], named: Any) -> _Known:
        target = find_target(self._model)
        kind = target.device.type
        amp = self._amp
        if amp is None and torch.is_autocast_enabled(kind):
            amp = torch.get_autocast_dtype(kind)
        calls = enlarged_calls(call, named, self._now.inputs, [known.inputs for known in self._known])
        # Autocast around the user's forward would go on into the loss and backward, and keep casts made in here.
        with torch.autocast(kind, enabled=False):
            for args, kwargs in calls:
                try:
                    training, _ = training_step(self._model, args, loss_fn=self._loss_fn, target=target, amp=amp)
                    training = replace(training, kwargs=kwargs)
                    training.on_device(target.device)
                    if args is not call[0]:
                        with restored(self._model), as_ours(training, "tracing"):
                            require_in_range(training, target)
                    job = _job_of(training, (), target, self._optimizer, self._swap_dir, True, None, self._limits)
                    plan = job.solved(self._budget_bytes)
                except CkptPlanError as error:
                    failed = error
                    continue
                # The replay goes with this forward's inputs, which nothing else should keep.
                job = replace(job, replayed_bytes=None, on_cuda=False)
                return _Known(input_tensors(*self._by_name(args, kwargs)), plan, job)
        given = input_tensors(*named)
        if isinstance(failed, InfeasibleBudgetError):
            self._refused = [*self._refused[-_REMEMBERED + 1 :], (given, failed)]
            raise _again(failed)
        raise PlanMismatchError(
            f"inputs {', '.join(map(str, given))} go beyond the plan and can't be planned for: {failed}"
        ) from failed


_REMEMBERED = 16
"""Plans, and shapes without one, that are kept in mind."""


def _holds(given: Sequence[InputTensor], shapes: Sequence[InputTensor]) -> bool:
    """Whether `given` is nowhere smaller than `shapes`, so that what is infeasible for these is so for those."""
    sizes = {t.path: t.shape for t in given}
    return all(
        len(sizes.get(t.path, ())) == len(t.shape) and all(a >= b for a, b in zip(sizes[t.path], t.shape, strict=True))
        for t in shapes
        if t.path in sizes or t.shape
    )


def _again(error: InfeasibleBudgetError) -> InfeasibleBudgetError:
    """A new error like `error`, which keeps no frames alive."""
    return InfeasibleBudgetError(
        f"{error}; the former plan goes on",
        budget_bytes=error.budget_bytes,
        min_peak_bytes=error.min_peak_bytes,
        stage=error.stage,
        phase=error.phase,
    )
