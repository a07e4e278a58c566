"""The public calls that run a model with a plan: apply and trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn

from ckptplan.core.arguments import LossFn
from ckptplan.core.budget import Budget
from ckptplan.core.errors import InvalidInputError, PlanMismatchError, RankError
from ckptplan.core.late import late
from ckptplan.core.plan import Plan, require_plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import (
    ApplyKeywords,
    ApplyOrSolveKeywords,
    Limits,
    SolveKeywords,
    Training,
    recalled,
    require_known,
    tier_bytes,
)
from ckptplan.core.trace import Trace
from ckptplan.core.units import format_bytes
from ckptplan.distributed import apart, ddp_under, parallel_of, unwrapped
from ckptplan.distributed.group import GroupCall, group_call
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.planning.adviser import SolverAdviser
from ckptplan.planning.enlarging import Enlarger, inside_forward
from ckptplan.planning.first_forward import FirstForward
from ckptplan.planning.job import Job
from ckptplan.planning.log import in_words, is_first_rank, planning, say
from ckptplan.planning.model_job import shared_by
from ckptplan.profiling.profiler import outside_tensors, replayed_bytes, training_step
from ckptplan.profiling.target import PLANNED, find_target
from ckptplan.runtime.guard.check import When
from ckptplan.runtime.handle import Handle, handle_of, without_plan
from ckptplan.runtime.handle import apply as apply_plan
from ckptplan.runtime.swap.stores import SwapOptions
from ckptplan.state.parameters import ParameterState
from ckptplan.state.process import in_own_context
from ckptplan.state.restore import restored
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.gradients import rewinding, starting_gradient_bytes
from ckptplan.training.measure import run_step
from ckptplan.training.step import check_supported, fingerprint, make_step, training_config


def apply(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    budget_gb: float | None = None,
    budget: str | None = None,
    swap_dir: str | Path | None = None,
    synchronous: bool = False,
    check: When = "sampled",
    strict: bool = False,
    profile: Profile | None = None,
    on_larger: Literal["follow", "replan"] | None = None,
    inputs: Any = None,
    replace: bool = False,
    **options: Unpack[ApplyOrSolveKeywords],
) -> Handle:
    """Apply `plan` to `model`: its training forwards keep, swap and recompute as planned.

    Without a plan, one is made by the first forward with gradients, for its inputs: `ckptplan.apply(model,
    budget_gb=12, loss_fn=..., optimizer=...)`.

    The model's classes, parameter names, `state_dict` and hooks don't change; only `forward` of the stages is replaced
    on the instances. Forwards without gradients run without the plan. The `use_cache` of a
    Hugging Face configuration is off while the plan is applied. On CUDA the allocator's cache is emptied and its peak
    statistics are reset, so that `handle.stats` has the plan's peaks (its `earlier` has those from before); it is
    emptied again before the first forward after an update that makes an optimizer's state.

    Parameters
    ----------
    plan : Plan, optional
    budget_gb, budget
        Without a plan: as in `solve`, by default what the device has free.
    swap_dir : path, optional
        Folder of the swap file of a CPU plan, or of a CUDA plan's disk tier; by default the system's temporary one. The
        file has no name, and at most the plan's swapped bytes per living graph.
    synchronous : bool
        Whether to wait for every copy where it is issued: the same results without overlap, for finding faults.
    check : "sampled", "always" or "off"
        Steps in which values are compared with those of forward: the values that each recomputed stage reads
        (parameters, buffers, inputs) and saves, and each swapped storage. A difference raises `CheckError` from that
        backward, before an optimizer steps. "sampled": the first three forwards, then one of a hundred on average; in
        the others a few elements are compared. docs/runtime.md lists which errors this detects.
    strict : bool
        Whether a step that differs from the planned one raises `PlanMismatchError`. By default it follows the plan's
        decisions, is warned of once for each kind of difference, and is counted in `handle.stats().differences`.
    profile : Profile, optional
        The profile that the plan was made from. With it, `handle.stats`, `handle.trace` and notes on out-of-memory
        errors have predictions for each stage, not only for the step.
    on_larger : "follow" or "replan", optional
        Action at a forward whose inputs are larger in a dimension than the plan is valid for, and after a step that
        differed from the planned one in another way. "follow": follow the plan's decisions. "replan": profile the
        forward before it runs, with the dimensions that grew extended by a quarter by repeating the inputs, and replace
        the plan by one for the same budget; if there is none, follow the present one. This needs a step of one forward,
        and `loss_fn`, `optimizer` and `amp` as given to `solve` (autocast around the forward counts as `amp`); those of
        a plan that was solved in this process are known. Default: "replan" for such a plan, unless `strict`, otherwise
        "follow".
    inputs : tensor, tuple, dict, optional
        As given to `solve`; needed (or `step`) for a plan made on another machine for this device. Such a plan is
        replayed with this device's operations, and has to stay within its budget.
    replace : bool
        Whether to take off a plan that is applied to the model now; if this call fails, that plan stays.
    **options
        As given to `solve`: `loss_fn`, `optimizer`, `step`, `amp` for that check and for new plans; `actions`,
        `segments`, `time_limit_s`, `gap`, `seed`, `workers`, `on_progress` for new plans. `host_gb` limits the pinned
        host memory of a CUDA plan, including 64 MiB of staging buffers for a disk tier, `disk_gb` the swap file, both
        in units of 2**30 bytes. The limits apply to new plans on any device.

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
        If the swap directory can't be written or is too small, or an argument is invalid. None of these errors changes
        the model.
    """
    with _replacing(model) if replace else contextlib.nullcontext():
        if plan is None:
            wanted: dict[str, Any] = {"budget_gb": budget_gb, "budget": budget, "swap_dir": swap_dir, **options}
            how: dict[str, Any] = {"swap_dir": swap_dir, "synchronous": synchronous, "check": check, "strict": strict}
            how |= {"profile": profile, "on_larger": on_larger}
            return _later(model, inputs, wanted, how)
        if (budget_gb, budget) != (None, None):
            raise InvalidInputError("a plan has its budget; leave out budget_gb= and budget=, or the plan to make one")
        handle = None
        try:
            with group_call("apply", model) as call:
                require_known(apply, options, ApplyKeywords)
                require_plan(plan)
                if call is not None:
                    _require_one_plan(call, plan)
                handle = _applied(
                    model, plan, profile, inputs, dict(options), 1 if call is None else call.local_count(),
                    on_larger=on_larger, swap_dir=swap_dir, synchronous=synchronous, check=check, strict=strict,
                )  # fmt: skip
        except BaseException:
            if handle is not None:  # only another rank failed
                handle.remove()
            raise
        return handle


@contextlib.contextmanager
def _replacing(model: nn.Module) -> Iterator[None]:
    """Take the present plan off a model, if there is one; put it back if the block fails."""
    former = handle_of(model)
    with without_plan(model):
        yield
        if former is not None:
            former.remove()


def _later(model: nn.Module, inputs: Any, wanted: dict[str, Any], how: dict[str, Any]) -> Handle:
    """Return a handle whose plan the first training forward makes, with the options `wanted`, and applies."""
    require_known(apply, wanted.keys() - {"budget_gb", "budget", "swap_dir"}, SolveKeywords)
    if inputs is not None or wanted.get("step") is not None or how["profile"] is not None:
        raise InvalidInputError(
            "without a plan, apply plans for the inputs of the first training forward; leave out inputs=, step= and "
            "profile=, or solve with them and apply that plan"
        )
    asked = Budget.of(wanted["budget_gb"], wanted["budget"])
    limits = Limits.of(wanted)
    Training.of(wanted)  # raises its errors now, not at the first forward
    check_supported(unwrapped(model))

    def planned(inputs: Any) -> Handle:
        begin = time.perf_counter()
        shown = planning(asked, limits.time_limit_s, wanted.get("on_progress"))
        with inside_forward(unwrapped(model), wanted.get("amp")) as amp, shown as on_progress:
            plan = late("api", "solve")(model, inputs=inputs, **{**wanted, "amp": amp, "on_progress": on_progress})
            handle = apply(model, plan, **how)
        if is_first_rank():
            say(in_words(plan, time.perf_counter() - begin))
        return handle

    return FirstForward(model, planned)


def _require_one_plan(call: GroupCall, plan: Plan) -> None:
    """Raise `RankError` if ranks apply different plans."""
    plans = call.exchange(plan.to_json())
    for rank, other in zip(call.ranks, plans, strict=True):
        if other != plans[0]:
            raise RankError(
                f"rank {rank} applies another plan than rank {call.ranks[0]}; solve in one call of all ranks, or load "
                "one file on all",
                rank=rank,
            )


def _applied(
    model: nn.Module,
    plan: Plan,
    profile: Profile | None,
    inputs: Any,
    options: dict[str, Any],
    local_ranks: int,
    *,
    on_larger: str | None,
    swap_dir: str | Path | None,
    **how: Any,
) -> Handle:
    """Apply a plan on one of the `local_ranks` of this machine, which share host memory and disk; see `apply`."""
    if profile is not None and not isinstance(profile, Profile):
        raise InvalidInputError(f"profile is a {type(profile).__name__}; pass the Profile from ckptplan.profile")
    host_gb, disk_gb = (options.pop(name, None) for name in ("host_gb", "disk_gb"))
    known = recalled(plan)
    options = {**{k: v for k, v in (known or {}).items() if k not in ("host_gb", "disk_gb")}, **options}
    limits = Limits.of(options)
    host_bytes, disk_bytes = (tier_bytes(*each) for each in (("host_gb", host_gb), ("disk_gb", disk_gb)))
    limits = shared_by(replace(limits, host_bytes=host_bytes, disk_bytes=disk_bytes), local_ranks)
    host_bytes, disk_bytes = limits.host_bytes, limits.disk_bytes
    if disk_bytes is None:
        limits = replace(limits, disk_bytes=plan.disk_bytes or None)
    training = Training.of(options, inputs)
    if plan.fingerprint.device.startswith(PLANNED):
        plan = _arrived(model, plan, training)
    if on_larger not in (None, "follow", "replan"):
        raise InvalidInputError(f"on_larger={on_larger!r}; it is 'follow' or 'replan' (strict=True raises an error)")
    if on_larger is None and known is not None and not how["strict"]:
        one = plan.fingerprint.inputs != "step()" and not parallel_of(model).in_step
        on_larger = "replan" if one else "follow"
    adviser = None
    if profile is not None:
        adviser = SolverAdviser(Job(plan.require_profile(profile), limits))
    enlarger = None
    if on_larger == "replan":
        training = replace(training, ddp=ddp_under(model, plan))
        enlarger = Enlarger(unwrapped(model), plan, limits, adviser, training, swap_dir)
    return apply_plan(
        model,
        plan,
        swap_dir=swap_dir,
        swap_options=SwapOptions(host_bytes, disk_bytes, how.pop("synchronous")),
        adviser=adviser,
        on_larger=enlarger,
        optimizer=training.optimizer if isinstance(training.optimizer, torch.optim.Optimizer) else None,
        **how,
    )


@in_own_context
def trace(
    model: nn.Module,
    plan: Plan,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    *,
    step: Callable[[], torch.Tensor] | None = None,
    accumulate: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    profile: Profile | None = None,
    swap_dir: str | Path | None = None,
    warm_up: int = 2,
) -> Trace:
    """Run a planned step and return its trace: the times of compute and copies, and the bytes on the device.

    Parameters, buffers, gradients and random states are restored afterwards.

    Parameters
    ----------
    inputs, loss_fn, step
        Those that the plan was made for (see `profile`). On the CPU, tensors held by a `step` callable don't count.
    accumulate : bool, optional
        Whether the step starts with gradients; default: whether the plan is for such steps.
    optimizer : Optimizer, optional
        The optimizer whose state counts as memory; no update is run.
    profile : Profile, optional
        The profile that the plan was made from; adds the predicted step to the trace.
    warm_up : int
        Steps before the measured one.

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
        raise InvalidInputError("trace needs the inputs that the plan was made for: pass inputs= (or step=)")
    require_plan(plan)
    if accumulate is None:
        accumulate = plan.fingerprint.accumulates
    options = Training(inputs, loss_fn, step=step, accumulate=accumulate, ddp=ddp_under(model, plan))
    training = make_step(model, options)
    made_for = plan.fingerprint
    made_for.require(fingerprint(training, compiles=made_for.compiled), ignore=("accumulates",))
    model = training.model
    with (
        apart(model, optimizer),
        ParameterState(model.parameters()).restored(),
        training_config(model),
        restored(model, training.reached()) as rewind,
        apply(model, plan, swap_dir=swap_dir, profile=profile, check="off") as handle,
    ):
        rewind = rewinding(model, rewind, accumulates=training.accumulates)
        for _ in range(warm_up):
            rewind()
            run_step(training)
        rewind()
        return handle.trace(lambda: run_step(training), inputs=training.tensors(), optimizer=optimizer)


def _arrived(model: nn.Module, plan: Plan, training: Training) -> Plan:
    """Return a plan that was made on another machine, checked and bound to this machine's device.

    Raises
    ------
    PlanMismatchError
        If this is another kind of device, its memory is too small, or the plan exceeds its budget here.
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
    if not training.has_forward:
        raise InvalidInputError(
            f"the plan was made for {planned_for!r} on another machine; pass inputs= (and loss_fn=, optimizer=, step=, "
            "amp= as given to solve) to check it on this device"
        )
    training = replace(training, accumulate=plan.fingerprint.accumulates, ddp=ddp_under(model, plan))
    step, _ = training_step(model, training, target)
    here = fingerprint(step)
    plan.fingerprint.require(here, ignore=("device", "torch_version"))
    bound = replace(plan, fingerprint=here)
    if target.is_cuda:
        peaks = TrainingBytes(model, target, Training(optimizer=training.optimizer)).peaks(step, bound)
        needs = peaks.reserved_bytes
        bound = replace(bound, allocated_bytes=peaks.allocated_bytes, reserved_bytes=needs)
    else:
        inputs, others = outside_tensors(step, target)
        held = unique_bytes([*model.parameters(), *model.buffers(), *inputs, *others])
        if step.accumulates:
            held += starting_gradient_bytes(model)
        held += step.parallel.added_bytes()
        needs = held + replayed_bytes(step, bound, target)
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
