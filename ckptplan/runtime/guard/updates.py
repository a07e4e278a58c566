"""Checks at the updates of the process's optimizers: whether the plan is idle, or lacks memory for their state."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckptplan.core.units import format_bytes
from ckptplan.distributed import parallel_of
from ckptplan.runtime.applied import Applied
from ckptplan.runtime.patching import COPIES
from ckptplan.tensors.private import is_fake
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import optimizer_tensors


@dataclasses.dataclass(slots=True)
class _Seen:
    """An optimizer, as of its last update."""

    ours: bool
    groups: int
    entries: int = -1
    steps: int = 0


@contextlib.contextmanager
def noticing_updates(applied: Applied) -> Iterator[None]:
    """Look at each optimizer's update within the block; what a plan lacks is a difference (NOTE [Differences]).

    If the update is of the model's parameters: either no forward has followed the plan, which is warned of once, at an
    optimizer's first update; or optimizers have made state for which the plan, made without `optimizer=`, has no room.
    If it is of others: they belong to a copy of the model, which has no plan; or a forward waits for its backward.

    State is looked at where it has other entries, and in steps 1, 2, 4, 8 and so on, since entries may grow (LBFGS).
    """
    for module in applied.model.modules():  # this one has a plan
        COPIES.pop(id(module), None)
    watched = weakref.ref(applied)  # the hook must not keep the model alive
    del applied
    every: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()
    noted_bytes = 0

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal noted_bytes
        applied, groups = watched(), optimizer.param_groups
        traced = any(is_fake(next(iter(group["params"]), None)) for group in groups)
        if applied is None or not applied.is_on or traced:
            return
        seen = every.get(optimizer)
        if seen is None or seen.groups != len(groups):
            updated = _updated_by(optimizer)
            ours = not updated.isdisjoint(_own(applied.model))
            alone = ours and not any(of.ours for other, of in every.items() if other is not optimizer)
            first = alone and not (seen is not None and seen.ours)
            seen = every[optimizer] = _Seen(ours, len(groups))
            if first and applied.controller.counters.forwards == 0:
                _warn_idle()
            if ours:
                applied.optimizer = weakref.ref(optimizer) if alone else None
                applied.controller.weights.knows(optimizer)
            if not ours and _is_of_copy(updated, applied.model):
                _note_copy(applied)
        seen.steps += 1
        if not seen.ours:
            applied.controller.note_beside("an optimizer updates other parameters")
        elif len(optimizer.state) != seen.entries or seen.steps.bit_count() == 1:
            seen.entries = len(optimizer.state)
            noted_bytes = _note_state(applied, [other for other, of in every.items() if of.ours], noted_bytes)

    def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        applied = watched()
        if applied is None or not applied.is_on or optimizer in every:
            return
        ours = applied.controller.weights.misses(optimizer) and _own(applied.model)
        if ours and not ours.isdisjoint(_updated_by(optimizer)):
            applied.controller.counters.differences.note(
                "weights state",
                f"{type(optimizer).__name__} had state before its first update under the plan, as after loading a "
                "checkpoint, and it stayed on the device until now; pass optimizer= to apply",
            )

    hooks = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _updated_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _own(model: nn.Module) -> set[int]:
    """Return the identities of a model's parameters, and of their shards, where a backward leaves them gathered."""
    return {id(p) for p in (*model.parameters(), *parallel_of(model).shards())}


def _is_of_copy(updated: set[int], model: nn.Module) -> bool:
    """Whether parameters are those of a deep copy of the model, or of a stage."""
    own = {id(module) for module in model.modules()}
    copies = [twin for twin_ref, of in list(COPIES.values()) if id(of()) in own and (twin := twin_ref()) is not None]
    return any(id(p) in updated for twin in copies for p in twin.parameters())


def _warn_idle() -> None:
    warnings.warn(
        "an optimizer has updated the model, and no forward has followed the plan: steps take as much memory as "
        "without it. Train the model that the plan was applied to, not a copy of it, with gradients on",
        RuntimeWarning,
        stacklevel=4,
    )


def _note_copy(applied: Applied) -> None:
    applied.controller.counters.differences.note(
        "copy",
        "an optimizer has updated a copy of the model, and copies have no plan: their steps take as much memory as "
        "without one; solve and apply for the copy, too",
    )


def _note_state(applied: Applied, optimizers: list[torch.optim.Optimizer], noted_bytes: int) -> int:
    """Note state of the model's optimizers for which the plan has no room, more than before; return its bytes.

    A plan that counts an optimizer counts the first of its class, or all if none is (it stands for several, then).
    If the model has one, the plan is taken to count it. Another plan is made for one that no plan counts.
    """
    plan, counted = applied.plan, applied.plan.fingerprint.optimizer
    alone = len(optimizers) == 1
    if counted:
        like = next((o for o in optimizers if type(o).__name__ == counted), None)
        optimizers = [] if alone or like is None else [o for o in optimizers if o is not like]
    state_bytes = unique_bytes([t for o in optimizers for t in optimizer_tensors(o)], applied.device)
    needs = max(plan.peak_bytes, plan.reserved_bytes or 0)
    if state_bytes <= noted_bytes or needs + state_bytes <= plan.budget_bytes:
        return noted_bytes
    names = " and ".join(sorted({type(o).__name__ for o in optimizers}))
    remedy = "solve with optimizer=" if alone else "give one as optimizer=, and a budget that is smaller by the others'"
    applied.controller.counters.differences.note(
        "state" if alone else "states",
        f"state of {names} takes {format_bytes(state_bytes)}, and the plan, made without it, needs "
        f"{format_bytes(needs)} of its budget of {format_bytes(plan.budget_bytes)}; {remedy}",
    )
    return state_bytes
