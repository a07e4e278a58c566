"""Batches that run in turn: the steps they stand for, and whether two of them are one step for a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.checks import check_count
from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.request import Training
from ckptplan.profiling.profiler import training_step
from ckptplan.profiling.target import Target
from ckptplan.profiling.values.constants import is_mask
from ckptplan.runtime.guard.shapes import ByName, InputLimits
from ckptplan.training.measure import held_tensors
from ckptplan.training.step import TrainingStep, fingerprint

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types of arguments that are compared by value."""


def batch_steps(
    model: nn.Module, training: Training, target: Target, accumulation_steps: int
) -> tuple[list[TrainingStep], list[str]]:
    """Return the step of each batch in the list `training.inputs`, or the only step, and notes.

    Raises
    ------
    InvalidInputError
        If the list is empty, a batch can't be used, or the last update lacks micro-batches.
    """
    check_count(accumulation_steps=accumulation_steps)
    batches = training.inputs
    if not isinstance(batches, list) or training.step is not None:
        step, notes = training_step(model, training, target)
        return [step], notes
    if not batches:
        raise InvalidInputError("inputs=[]: a list is of batches that run in turn; give at least one, or no inputs=")
    if len(batches) > 1 and len(batches) % accumulation_steps:
        raise InvalidInputError(
            f"inputs has {len(batches)} batches, of which accumulation_steps={accumulation_steps} make an update; give "
            f"a multiple of {accumulation_steps}"
        )
    steps = []
    for number, inputs in enumerate(batches, 1):
        if inputs is None:
            raise InvalidInputError(f"batch {number} of inputs is None; pass a tensor, a tuple or a dict")
        try:
            step, notes = training_step(model, replace(training, inputs=inputs), target)
        except InvalidInputError as error:
            raise InvalidInputError(f"batch {number} of inputs: {error}") from error
        steps.append(step)
    return steps, notes


def does_the_same(step: TrainingStep, other: TrainingStep, *, reads: bool) -> bool:
    """Return whether two steps on one model run the same operations on equal sizes, whatever the model does.

    Parameters
    ----------
    reads : bool
        Whether the step reads values, so that only the same tensors make two steps the same.
    """
    (leaves, spec), (others, other_spec) = (pytree.tree_flatten((s.args, s.kwargs)) for s in (step, other))
    if step.fn is not None or spec != other_spec:
        return False
    if all(one is two for one, two in zip(leaves, others, strict=True)):
        return True
    found = None if reads else _layouts(leaves)
    if found is None or found != _layouts(others):
        return False
    own = {t.untyped_storage()._cdata for t in held_tensors(step.model)}
    return not any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in own for t in (*leaves, *others))


def _layouts(leaves: list[Any]) -> list[Any] | None:
    """Return inputs without the tensors' values; None if they can't be compared."""
    found: list[Any] = []
    storages: dict[int, int] = {}
    for leaf in leaves:
        if is_mask(leaf):
            return None
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.requires_grad and not vars(leaf):
            storage = leaf.untyped_storage()
            number = storages.setdefault(storage._cdata, len(storages))
            flags = (leaf.is_conj(), leaf.is_neg(), leaf.is_inference())
            where = (tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), storage.nbytes(), number)
            found.append((where, leaf.dtype, leaf.device, flags))
        elif type(leaf) in _PLAIN:
            found.append((type(leaf), leaf))
        else:
            return None
    return found


def require_planned(plan: Plan, steps: Sequence[TrainingStep], target: Target) -> None:
    """Check that `plan` holds for the inputs of each step: none is larger than planned, as in training.

    Raises
    ------
    PlanMismatchError
    """
    for number, step in enumerate(steps, 1):
        made_for = fingerprint(step, target.name)
        seen = step.fn is None and plan.fingerprint.inputs != "step()"
        ignored = ("device", "torch_version", "accumulates", "parallel", *(["inputs"] if seen else []))
        plan.fingerprint.require(made_for, ignore=ignored)
        if not seen or plan.fingerprint.inputs == made_for.inputs:
            continue
        by_name = ByName(step.model.forward)
        named = by_name(step.args, step.kwargs)
        beyond = InputLimits(by_name.planned(plan.fingerprint.inputs)).first_beyond(*named)
        if beyond is not None:
            given, limit = beyond
            what = f"batch {number} of inputs" if len(steps) > 1 else "inputs"
            holds = "no tensor there" if limit is None else f"up to {limit}"
            raise PlanMismatchError(
                f"{what}: {given}; the plan was made for inputs = {plan.fingerprint.inputs!r}, and holds for {holds} "
                "there; solve again with the largest batch"
            )
