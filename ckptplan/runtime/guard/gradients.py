"""Gradients that exist when a step starts: their bytes, stand-ins for measured steps, and a guard for planned ones.

NOTE [Gradients from before]
A step may start with gradients: `zero_grad(set_to_none=False)` keeps them, and the second micro-batch of an
accumulating loop finds those of the first. Such gradients occupy memory from the start of the step, whereas a step
without them can use that memory until backward makes the gradients. So whether they exist is part of what is planned
(`TrainingStep.accumulates`). A forward that finds more bytes of gradients than planned, which don't fit into the budget
as well, is a difference from the planned step (NOTE [Differences]).

The engine of a sharded model keeps whole gradients of micro-batches that don't reduce them. These count, too: those
that exist, and those that a pass will leave.

Example: a plan without gradients at the start has a peak of 900 MiB and a budget of 1000 MiB. If 80 MiB of gradients
exist when a forward begins, the peak is at most 980 MiB. With 120 MiB it may reach 1020 MiB: a warning. A plan solved
with `accumulate=True` includes the gradients in its peak.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ckptplan.core.fsdp import WITH_WHOLE_GRADIENTS
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes
from ckptplan.distributed import parallel_of
from ckptplan.distributed.parallel import Parallel
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.observer import Observer
from ckptplan.tensors.storages import local_part
from ckptplan.training.gradients import existing_gradient_bytes, starting_gradient_bytes


class GradientGuard(Observer):
    """Notes gradients that a plan has no room for (NOTE [Gradients from before]), and models sharded otherwise."""

    def __init__(self, model: nn.Module, plan: Plan, differences: Differences) -> None:
        self._differences = differences
        self._tables = [module._parameters for module in model.modules() if module._parameters]
        self._all: Sequence[torch.Tensor | None] = ()
        self._leaves: list[torch.Tensor] = []
        self._seen: list[int] = []
        self._model = model
        self._parallel: Parallel | None = None
        self._kind = plan.fingerprint.parallel
        whole = self._kind.endswith(WITH_WHOLE_GRADIENTS)
        planned = functools.partial(starting_gradient_bytes, model, whole=whole)
        self._planned_bytes = planned() if plan.fingerprint.accumulates else 0
        self._needs_bytes = max(plan.peak_bytes, plan.reserved_bytes or 0)
        self._budget_bytes = plan.budget_bytes

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Note a forward at whose beginning more bytes of gradients exist than the budget has room for.

        Raises
        ------
        PlanMismatchError
            If the plan is for a model that is sharded otherwise.
        """
        now = [p for table in self._tables for p in table.values()]
        if len(now) != len(self._all) or not all(map(operator.is_, now, self._all)):
            self._all = now
            self._leaves = [p for p in now if p is not None and p.is_leaf]
        if self._parallel is None:  # the model may have been sharded since
            parallel = parallel_of(self._model)
            parallel.require(self._kind)
            self._parallel = parallel
        found = [gradient for p in self._leaves if (gradient := p.grad) is not None]
        found += (whole := self._parallel.whole_gradients())
        leaves_whole = self._parallel.keeps_whole
        if not found and not leaves_whole:
            return
        seen = [leaves_whole, *map(id, found)]
        if seen == self._seen:  # the same objects passed this check before
            return
        nbytes = existing_gradient_bytes(found)
        if leaves_whole:  # beside the reduced ones that are there
            # Those of parameters outside sharded units are among the whole ones.
            reduced = [g for g in found[: len(found) - len(whole)] if local_part(g) is not g]
            nbytes = max(nbytes, existing_gradient_bytes(reduced) + starting_gradient_bytes(self._model, whole=True))
        more = nbytes - self._planned_bytes
        if more > 0 and self._needs_bytes + more > self._budget_bytes:
            self._differences.note("gradients", self._left_whole(nbytes) if leaves_whole else self._over(nbytes))
            return
        self._seen = seen

    def _left_whole(self, nbytes: int) -> str:
        return (
            f"the micro-batches of this sharded model don't reduce their gradients, and with whole ones there are "
            f"{format_bytes(nbytes)}; the plan reckoned with {format_bytes(self._planned_bytes)}, and needs "
            f"{format_bytes(self._needs_bytes)} of {format_bytes(self._budget_bytes)}; solve with "
            "accumulate=True after model.set_requires_gradient_sync(False), or let each micro-batch reduce"
        )

    def _over(self, nbytes: int) -> str:
        reckoned = f"{format_bytes(self._planned_bytes)} of them" if self._planned_bytes else "none"
        remedy = "" if self._planned_bytes else ", or solve with accumulate=True for steps that start with gradients"
        return (
            f"gradients of {format_bytes(nbytes)} exist at the start of this forward; the plan reckoned with "
            f"{reckoned} and needs {format_bytes(self._needs_bytes)} of its budget of "
            f"{format_bytes(self._budget_bytes)} without more; call zero_grad(set_to_none=True) before the step{remedy}"
        )
