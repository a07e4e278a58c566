"""The public calls that tie the parts together: model -> profile -> plan, checked by the referee and by a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ckptplan.core.chain import ACTIONS, Action
from ckptplan.core.errors import CkptPlanError, InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import budget_to_bytes, format_bytes
from ckptplan.profiling.profiler import profile, replayed_peak, training_step
from ckptplan.referee import validate
from ckptplan.runtime.measure import held_tensors, unique_bytes
from ckptplan.runtime.step import LossFn, TrainingStep, model_device
from ckptplan.solving.planner import solve_profile

_TIGHTENINGS = 3


def solve(
    model_or_profile: nn.Module | Profile,
    budget_gb: float | None = None,
    *,
    inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device | None = None,
    host_gb: float | None = None,
    actions: tuple[Action, ...] = ACTIONS,
    time_limit_s: float = 10.0,
    step: Callable[[], torch.Tensor] | None = None,
    swap_dir: str | Path | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan that fits the budget, and how far from the best possible it can be at most.

    Parameters
    ----------
    model_or_profile : nn.Module or Profile
        A model is profiled first, with `inputs`, `loss_fn`, `optimizer`, `device`, `step` and `swap_dir` as in
        `profile`; they don't go with a profile.
    budget_gb : float, optional
        Everything the step may hold on the device at any moment, in units of 2**30 bytes; rounded down to bytes. None:
        what the device has free, and what the model holds there already.
    host_gb : float, optional
        Limit on swapped bytes, in units of 2**30 bytes.
    actions : tuple of str
        Which of "keep", "swap" and "recompute" may be used; "keep" must be.
    time_limit_s : float
        For solving, profiling not counted.
    seed : int
        Of the solver.
    on_progress : callable, optional
        Told what is being done.

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
    host_bytes = None if host_gb is None else budget_to_bytes(host_gb, name="host_gb")
    budget_bytes = None if budget_gb is None else budget_to_bytes(budget_gb)
    report = on_progress or (lambda text: None)
    if isinstance(model_or_profile, Profile):
        given = {"inputs": inputs, "loss_fn": loss_fn, "optimizer": optimizer, "device": device, "step": step}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise InvalidInputError(f"{', '.join(extra)} can't be given with a profile, which is measured already")
        if budget_bytes is None:
            raise InvalidInputError("a profile says nothing of free memory; pass budget_gb=")
        report("solving")
        return _solve(model_or_profile, budget_bytes, actions, host_bytes, time_limit_s, seed)
    model = model_or_profile
    where = model_device(model)
    if budget_bytes is None:
        budget_bytes = free_bytes(model, where)
    # Once, so that profile and replay see the very same inputs, whether given or found.
    training, _ = training_step(model, inputs, loss_fn=loss_fn, step=step)
    measured = profile(
        model,
        inputs if training.fn is not None or inputs is not None else (training.args or training.kwargs),
        loss_fn=loss_fn,
        optimizer=optimizer,
        device=device,
        step=step,
        swap_dir=swap_dir,
        on_progress=on_progress,
    )
    report("solving")
    return _solve_and_replay(measured, training, where, budget_bytes, actions, host_bytes, time_limit_s, seed)


def _solve_and_replay(
    measured: Profile,
    training: TrainingStep,
    device: torch.device,
    budget_bytes: int,
    actions: tuple[Action, ...],
    host_bytes: int | None,
    time_limit_s: float,
    seed: int,
) -> Plan:
    limit = budget_bytes
    for _ in range(_TIGHTENINGS):
        plan = _solve(measured, limit, actions, host_bytes, time_limit_s, seed)
        over = replayed_peak(measured, training, plan, device) - budget_bytes
        if over <= 0:
            return plan
        # The chain model left something out; ask for that much less. The plan then names the smaller budget, which is
        # the one its status and bound speak of.
        limit -= over
    raise CkptPlanError(
        f"no plan kept within {format_bytes(budget_bytes)} when replayed ({format_bytes(over)} too much after "
        f"{_TIGHTENINGS} attempts); the model does something the memory model misses, please report it"
    )


def _solve(
    measured: Profile,
    budget_bytes: int,
    actions: tuple[Action, ...],
    host_bytes: int | None,
    time_limit_s: float,
    seed: int,
) -> Plan:
    plan = solve_profile(
        measured, budget_bytes, actions=tuple(actions), host_bytes=host_bytes, time_limit_s=time_limit_s, seed=seed
    )
    broken = validate(measured, plan, budget_bytes, host_bytes=host_bytes)
    if broken:
        raise CkptPlanError(
            "the solver gave a plan that the referee rejects, please report it: "
            + "; ".join(f"{v.kind} {v.stage}: {v.detail}" for v in broken)
        )
    return plan


def free_bytes(model: nn.Module, device: torch.device) -> int:
    """What a step may use on `device` now: free memory, and what the model holds there already."""
    held = unique_bytes(held_tensors(model))
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached + held
    return int(psutil.virtual_memory().available) + held
