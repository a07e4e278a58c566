"""Base of the frameworks' callbacks: solve and apply for the first batch of a loop, and log the plan."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.api import solve
from ckptplan.core.budget import Budget
from ckptplan.core.errors import CkptPlanError, InvalidInputError, PlanMismatchError, RankError
from ckptplan.core.plan import Plan
from ckptplan.core.request import ApplyKeywords, Limits, PlanKeywords, require_known
from ckptplan.core.units import format_bytes
from ckptplan.distributed import is_distributed, parallel_of
from ckptplan.distributed.group import Vote, alone
from ckptplan.planning.applying import apply
from ckptplan.planning.log import in_words, is_first_rank, planning, say
from ckptplan.planning.model_job import NoLargestStepError, default_budget
from ckptplan.planning.plan_file import keep, optimizer_text, plan_in, settings_of
from ckptplan.runtime.guard.check import When, require_when
from ckptplan.runtime.guard.shapes import InputLimits
from ckptplan.runtime.handle import Handle
from ckptplan.tensors.objects import MOST_OBJECTS, attributes_of
from ckptplan.training.inputs import input_tensors, tensors_at

_MOST_FAILURES = 3
"""Number of batches without a plan after which a training tries no more plans."""


class PlanningCallback:
    """Base of the frameworks' callbacks: their options, and the plan that is applied with them.

    Parameters
    ----------
    budget_gb, budget, swap_dir, plan_file, **options
        As in `ckptplan.solve`.
    check : "sampled", "always" or "off"
        As in `ckptplan.apply`.

    Attributes
    ----------
    handle : Handle or None
        The handle of the plan that is applied now, or was last; None before the first batch.
    took_s : float
        Seconds in which that plan was made and applied.
    plans_applied : int
        Number of plans applied by all callbacks of this process.

    Raises
    ------
    InvalidInputError
        If an option can't be used.
    """

    plans_applied: ClassVar[int] = 0

    def __init__(
        self,
        budget_gb: float | None = None,
        *,
        budget: str | None = None,
        swap_dir: str | Path | None = None,
        plan_file: str | Path | None = None,
        check: When = "sampled",
        **options: Unpack[PlanKeywords],
    ) -> None:
        require_known(type(self), options, PlanKeywords)
        self._wanted = Budget.of(budget_gb, budget)  # for their errors: a loop reaches its first batch late
        self._limits = Limits.of(options)
        require_when(check)
        self._budget: dict[str, Any] = {"budget_gb": budget_gb, "budget": budget}
        self._swap_dir, self._check, self._options, self._plan_file = swap_dir, check, options, plan_file
        if plan_file is not None:
            plan_in(plan_file, "")  # for its errors
        self.handle: Handle | None = None
        self.took_s = 0.0
        self._failures = 0

    @property
    def plan(self) -> Plan | None:
        """The plan that is applied now, or was last; None before the first batch."""
        return None if self.handle is None else self.handle.plan

    @property
    def tries_again(self) -> bool:
        """Whether another batch beyond the present plan is planned for: not after several that had no plan."""
        return self._failures < _MOST_FAILURES

    def follow(self, model: nn.Module, former: Plan | None, error: CkptPlanError) -> Handle:
        """Apply the former plan again, with a warning, after a batch beyond it for which there is no plan.

        Raises
        ------
        CkptPlanError
            `error`, if there was no plan before, or if the ranks of a group can't go on together.
        """
        if former is None or isinstance(error, RankError):
            raise error
        self._failures += 1
        rest = "" if self.tries_again else "; no more plans are tried in this training"
        warnings.warn(
            f"the peak may exceed the budget: a batch is larger than planned, and no plan was found for it: {error}; "
            f"the former plan is followed{rest}",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.begin(model, former, again=True)

    def begin(
        self, model: nn.Module, plan: Plan | None = None, *, again: bool = False, of: str = "", **training: Any
    ) -> Handle:
        """Apply a plan to `model`, by default a new one.

        The first plan is one for all ranks; of a sharded model, so are later ones for larger batches. Under DDP each
        rank makes the later ones alone, since the others don't plan then; so it does the first one, if that is made for
        a function and no rank's batch is the largest in every dimension.

        Parameters
        ----------
        again : bool
            Whether there was a plan in this training.
        of : str
            The batch and the settings that the plan is for, as far as `training` doesn't say them.
        **training
            The step, as in `ckptplan.solve`. With `inputs`, larger ones are planned for when they come.
        """
        if not again:
            self._failures = 0
            if plan is None and self._plan_file is not None:
                kind = "step" if "step" in training else "inputs"
                asked = (
                    f"{self.in_text()}; {of}; {optimizer_text(training.get('optimizer'))}; {settings_of(model)}; {kind}"
                )
                return self._apply_from_file(model, self._plan_file, asked, training)
        apart = not parallel_of(model).in_step
        if not (again and apart):
            try:
                return self._apply(model, plan, training, is_told=is_first_rank())
            except NoLargestStepError:
                if not apart:
                    raise
        with alone():
            return self._apply(model, plan, training, is_told=True)

    def _apply_from_file(self, model: nn.Module, file: str | Path, asked: str, training: dict[str, Any]) -> Handle:
        """Apply the plan in a file if it was made for this request, or else a new one, which is written there."""
        if is_distributed() and dist.get_world_size() > 1:
            raise InvalidInputError("plan_file= is for one process, and this training has several; leave it out")
        known = plan_in(file, asked)
        if known is not None and self.fits(known, model, training.get("optimizer")):
            with contextlib.suppress(PlanMismatchError):  # the file's plan is for another model
                return self._apply(model, known, training, is_told=True)
        handle = self._apply(model, None, training, is_told=True)
        keep(handle.plan, file, asked)
        return handle

    def fits(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether an earlier run's plan fits the memory that is free now, if no other budget was given."""
        wanted = self._wanted
        given = wanted.nbytes is not None or wanted.share is not None
        return given or plan.counted_bytes <= default_budget(model, None, optimizer=optimizer) * (1 - wanted.margin)

    def _apply(self, model: nn.Module, plan: Plan | None, training: dict[str, Any], *, is_told: bool) -> Handle:
        begin = time.perf_counter()
        if plan is None:
            with planning(self._wanted, self._limits.time_limit_s, self._options.get("on_progress")) as shown:
                options: PlanKeywords = {**self._options, "on_progress": shown}
                plan = solve(model, **self._budget, swap_dir=self._swap_dir, **training, **options)
        more: dict[str, Any] = {k: v for k, v in self._options.items() if k in ApplyKeywords.__optional_keys__}
        if "inputs" in training:
            more |= {"on_larger": "replan", "loss_fn": training.get("loss_fn"), "optimizer": training.get("optimizer")}
        self.handle = apply(model, plan, swap_dir=self._swap_dir, check=self._check, **more)
        self.took_s = time.perf_counter() - begin
        PlanningCallback.plans_applied += 1
        if is_told:
            say(in_words(plan, self.took_s))
        return self.handle

    def in_text(self) -> str:
        """Return the budget and the options of the plan, as text."""
        options = sorted((name, value) for name, value in self._options.items() if not callable(value))
        return repr((*self._budget.values(), str(self._swap_dir), options))

    def summary(self) -> str:
        """Return the plan in words, and counts of what ran under it."""
        if self.handle is None:
            return "ckptplan: no plan yet, it is made on the first batch of training"
        stats = self.handle.stats()
        return (
            f"{in_words(self.handle.plan, self.took_s)}\n{stats.forwards} forwards under it: "
            f"{stats.recomputed_stages} stages recomputed, {format_bytes(stats.swapped_out_bytes)} swapped, "
            f"{len(self.handle.replans)} new plans for larger inputs"
        )


class Together(torch.optim.Optimizer):
    """Several optimizers that step one after the other; their groups and states are shared with them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})
        self.param_groups = [group for o in optimizers for group in o.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for optimizer in self.optimizers:
            optimizer.step()


class PlannedBatch:
    """The batch that a step was planned for, whose plan holds for batches that are no larger.

    Many models skip a mask that has no zero, so a batch with the first padding counts as larger. Ranks of a sharded
    model decide together, and the plan holds if it does on all.
    """

    def __init__(self, batch: Any, model: nn.Module) -> None:
        self._vote = Vote(model)
        opened = _opened(batch)
        self.tensors = input_tensors((opened,), {})
        self._limits = InputLimits(self.tensors)
        self._full = _full_masks(opened)

    def holds_for(self, batch: Any) -> bool:
        """Return whether a batch is no larger."""
        opened = _opened(batch)
        fits = self._limits.first_beyond((opened,), {}) is None
        return not self._vote.any(not fits or not self._full <= _full_masks(opened))


def _opened(batch: Any, met: set[int] | None = None) -> Any:
    """Return a batch with the attributes of plain objects, such as a dataclass's, as dictionaries; each object once."""
    met = set() if met is None else met

    def opened(leaf: Any) -> Any:
        attributes = None if id(leaf) in met or len(met) >= MOST_OBJECTS else attributes_of(leaf)
        if attributes is None:
            return leaf
        met.add(id(leaf))
        return _opened(dict(attributes), met)

    return pytree.tree_map(opened, batch)


def _full_masks(opened: Any) -> set[str]:
    """Return the paths of a batch's masks that have only ones."""
    masks = ((path, t) for path, t in tensors_at((opened,)) if "mask" in path and t.dim() == 2)
    return {path for path, mask in masks if not mask.is_floating_point() and bool(mask.all())}


@contextlib.contextmanager
def unchanged(batch: Any) -> Iterator[None]:
    """Restore the values of a batch's tensors at the end: a step that is planned runs several times."""
    saved = [(tensor, tensor._version, tensor.detach().clone()) for _, tensor in tensors_at((_opened(batch),))]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in saved:
                if tensor._version != version:
                    tensor.copy_(value)
