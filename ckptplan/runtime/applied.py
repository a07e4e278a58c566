"""A plan applied to a model: its controller and stores, and its replacement by another plan."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckptplan.core.link import Tier
from ckptplan.core.plan import Plan
from ckptplan.runtime.adviser import Adviser
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.guard.shapes import Larger
from ckptplan.runtime.observe.stats import Peaks, Stats
from ckptplan.runtime.swap.stores import Store, close_all, handing_over
from ckptplan.training.compiled import stages_compiled

Place = Callable[[Plan, Controller | None], tuple[Controller, Mapping[Tier, Store]]]
"""Function that applies a plan to the model; the new controller goes on with the counters of the former one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replan:
    """The replacement of one plan by another while training.

    Attributes
    ----------
    before, after : Plan
    larger : Larger
        The cause: a forward's inputs were larger than planned.
    """

    before: Plan
    after: Plan
    larger: Larger


class Applied:
    """A plan applied to a model.

    Attributes
    ----------
    plan : Plan
        The plan that is applied now.
    controller : Controller
    stores : mapping of tier to Store
    adviser : Adviser or None
        Has the profile that the plan was made from; None: it isn't known.
    is_on : bool
        False while the plan is paused and after it was removed.
    replans : tuple of Replan
        Replacements of the plan, in order.
    returns : int
        Number of times that an earlier plan was put back.
    peaks : Peaks
        Peaks of the device's memory, since the present plan was applied and before.
    before_forward : callable or None
        Returns the controller that runs a forward with the given inputs (`Controller.before_forward`).
    on_error : callable or None
        Called with an error that leaves a forward of the model (`Controller.on_error`).
    optimizer : weakref to an optimizer, or None
        The one that has updated the model; None if none or several have.
    handle : object
        The user's handle, which so lives as long as the model's patches do.
    guards : ExitStack
        Contexts in which the model is while the plan is applied. What they register in the process refers to this
        object weakly.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, plan: Plan, place: Place, adviser: Adviser | None
    ) -> None:
        self.model, self.device, self.plan, self.adviser = model, device, plan, adviser
        self.replans: tuple[Replan, ...] = ()
        self.returns = 0
        self.before_forward: Callable[[tuple[Any, ...], dict[str, Any]], Controller] | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.handle: object = None
        self._place, self._compiles = place, plan.fingerprint.compiled
        self._compiled = contextlib.ExitStack()
        with self._compiled:
            self._compile()
            self.controller, self.stores = place(plan, None)
            self._compiled = self._compiled.pop_all()
        self.guards = contextlib.ExitStack()
        self.controller.holds = self
        self.peaks = Peaks(device)
        self.is_on = True
        self._removed = False

    def put(self, plan: Plan) -> None:
        """Apply `plan` after the present one was taken off the model; if that fails, put the present one back."""
        former, stores = self.controller, self.stores
        with handing_over(stores):
            try:
                self.controller, self.stores = self._place(plan, former)
            except BaseException:
                former.install()
                raise
            close_all(stores)
        self.plan = plan
        self.controller.holds = self
        self.controller.counters.meter.restart()
        self.controller.counters.differences.plan_again()
        self.peaks = Peaks(self.device, self.peaks)
        self.controller.before_forward, self.controller.on_error = self.before_forward, self.on_error

    def remove(self) -> bool:
        """Restore the model exactly; return False if it was restored before."""
        if self._removed:
            return False
        self._removed, self.is_on = True, False
        self.controller.remove()
        self._compiled.close()
        if self.controller.checks is not None:
            self.controller.checks.close()
        return True

    def _compile(self) -> None:
        """Compile the layers that the first plan has compiled: later ones are for the model with these."""
        self._compiled.enter_context(stages_compiled(self.model, self._compiles))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the plan off the model inside; afterwards it is applied again."""
        was_on, self.is_on = self.is_on, False
        self.controller.remove()
        self._compiled.close()
        try:
            yield
        finally:
            if was_on and not self._removed:
                self._compile()
                self.controller.install()
                self.is_on = True

    def counted(self) -> Stats:
        """Return the counts since the plan was applied, and the planned ones."""
        counters, checks = self.controller.counters, self.controller.checks
        planned = planned_runs(self.plan)
        return Stats(
            forwards=counters.forwards,
            recomputed_stages=counters.recomputed_stages,
            planned_recomputed_stages=sum(max(runs - 1, 0) for runs in planned),
            swapped_out_bytes=counters.swapped_out_bytes,
            swapped_in_bytes=counters.swapped_in_bytes,
            planned_swapped_bytes=self.plan.host_bytes,
            runs=tuple(counters.runs[i] for i in range(len(planned))),
            planned_runs=planned,
            host_wait_s=counters.host_wait_s,
            other_paths=counters.other_paths,
            differences=dict(counters.differences.counts),
            checked_forwards=0 if checks is None else checks.passes,
            compared_tensors=0 if checks is None else checks.tensors,
        )


def planned_runs(plan: Plan) -> tuple[int, ...]:
    """Return, per stage, the number of times that its forward runs in one step; 0 for glue."""
    followed = plan.decided
    return tuple(
        0 if is_glue(name) else 1 + max(choice.runs_again, sum(segment.depth(i) for segment in followed.segments))
        for i, (name, choice) in enumerate(zip(followed.stages, followed.choices, strict=True))
    )
