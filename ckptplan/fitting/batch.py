"""max_batch_size(): the largest batch that fits a device, with everything kept or with a plan, by estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.arguments import OptimizerLike
from ckptplan.core.checks import check_count
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.request import BatchKeywords, Limits, Training, ignore_progress, require_known
from ckptplan.core.units import budget_to_bytes, format_bytes
from ckptplan.distributed import apart
from ckptplan.distributed.absent import as_asked
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.planning.job import Job
from ckptplan.planning.model_job import free_bytes, replaying
from ckptplan.profiling.bytes.operations import TensorSpec
from ckptplan.profiling.profiler import profile_step, traced_bytes
from ckptplan.profiling.target import Target, find_target
from ckptplan.runtime.verify import Verification, verify
from ckptplan.solving.peak import smallest_peak
from ckptplan.state.parameters import ParameterState
from ckptplan.state.process import in_own_context
from ckptplan.state.restore import restored
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.gradients import rewinding
from ckptplan.training.measure import held_tensors, optimizer_tensors, read_from_outside, run_step, step_peaks
from ckptplan.training.step import TrainingStep, training_config

MakeInputs = Callable[[int], Any]
"""Function from a number of samples to the inputs of a batch of that size."""

LIMIT = 65536
_MOST_GROWTH = 16
"""Largest ratio of the next batch tried to the largest one that fits: guesses far from known batches are unreliable."""
_PEAK_SHARE = 0.25
"""Share of the time limit for the smallest peak of one batch."""


@dataclass(frozen=True, slots=True)
class BatchFit:
    """The largest batch that fits, and the bytes that the next larger one needs.

    Invariant: `batch` was itself checked (traced, planned, its plan replayed), and `next_batch`, one more, was tried
    and doesn't fit, or `batch` is the limit. Bytes need not grow with every sample: a still larger batch may fit.

    Attributes
    ----------
    batch : int
    budget_bytes : int
        The limit for `peak_bytes`.
    peak_bytes : int
        Predicted peak of `batch`: on CUDA of the reserved bytes, on the CPU of the bytes in tensors.
    plan : Plan or None
        The plan of `batch`; None if everything is kept.
    next_batch, next_bytes : int or None
        The next larger batch (None: the limit was reached), and the smallest budget found for it (None: not known).
    tried : mapping
        Batch -> the smallest budget found for it; infinite if only a lower bound is known.
    measured_peak_bytes : int or None
        Measured peak of one step of `batch`, from forward to the end of backward, counted as `peak_bytes`; the state
        that the optimizer doesn't have yet is added. None for a device that isn't in this machine.
    verification : Verification or None
        The result of `verify` for the plan, without the plain step, which could run out of memory.
    notes : tuple of str
    """

    batch: int
    budget_bytes: int
    peak_bytes: int
    plan: Plan | None
    next_batch: int | None
    next_bytes: int | None
    tried: Mapping[int, float]
    measured_peak_bytes: int | None = None
    verification: Verification | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = "with everything kept" if self.plan is None else f"with a plan, step {self.plan.overhead:+.1%}"
        lines = [
            f"batch     {self.batch} fits {how}",
            f"peak      {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}",
        ]
        if self.measured_peak_bytes is not None:
            lines[-1] += f", measured {format_bytes(self.measured_peak_bytes)}"
        if self.next_batch is not None:
            needs = "" if self.next_bytes is None else f": needs {format_bytes(self.next_bytes)}"
            lines.append(f"next      {self.next_batch} does not fit{needs}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@as_asked
def max_batch_size(
    model: nn.Module,
    make_inputs: MakeInputs,
    budget_gb: float | None = None,
    *,
    plan: bool = True,
    max_overhead: float | None = None,
    limit: int = LIMIT,
    **options: Unpack[BatchKeywords],
) -> BatchFit:
    """Return the largest batch that fits a device, found by bisection on estimates, without running out of memory.

    With everything kept, a batch fits if the estimate of two training steps does. With a plan, it fits if the smallest
    peak of its chain of whole stages does. (Options inside a stage hardly lower that peak, since all saved tensors of a
    stage exist in its backward.) The largest such batch is profiled with all options, solved and replayed. On CUDA the
    estimate of its plan must fit too, including reserved bytes; if it doesn't, first the budget and then the batch is
    reduced.

    Parameters
    ----------
    model : nn.Module
        May be on `meta` if `device` names a device that isn't in this machine.
    make_inputs : callable
        Function from a batch size to the inputs of the forward, as in `profile`. For a device that isn't in this
        machine floating inputs may be on `meta`, which takes no memory.
    budget_gb : float, optional
        As in `solve`, in units of 2**30 bytes, without the CUDA context. On CUDA it limits the bytes that the allocator
        *reserves*, not only those in tensors. Default: the free memory of the device, or all memory without the context
        of a device that isn't in this machine.
    plan : bool
        Whether a plan may be used; False: everything is kept.
    max_overhead : float, optional
        Largest slowdown by a plan: 0.10 for ten per cent.
    limit : int
        Largest batch tried.
    **options
        As in `solve`: `loss_fn`, `optimizer`, `device`, `amp`, `accumulate`, `ddp`, `fsdp`; `actions`, `segments`,
        `host_gb`, `time_limit_s`, `gap`, `seed`, `workers`, `on_progress`. The time limit is that of the final plan;
        the smallest peak of each batch tried takes up to a quarter of it. Tracing isn't limited.

    Returns
    -------
    BatchFit
        If the model is on the device, a step with the plan (or the plain step) was run and measured.

    Raises
    ------
    InfeasibleBudgetError
        If a batch of one sample doesn't fit; the message has the smallest budget that works.
    InvalidInputError
        If `make_inputs` fails, or returns the same inputs for every batch.
    UnsupportedModelError
    """
    require_known(max_batch_size, options, BatchKeywords)
    if not callable(make_inputs):
        raise InvalidInputError(
            f"make_inputs is a {type(make_inputs).__name__}; pass a function from a batch size to inputs, such as "
            "lambda n: torch.zeros(n, 3, 224, 224)"
        )
    check_count(limit=limit)
    if max_overhead is not None and not plan:
        raise InvalidInputError(f"max_overhead={max_overhead!r} limits plans; leave it out with plan=False")
    training, limits = Training.of(options), Limits.of(options)
    budget_bytes = None if budget_gb is None else budget_to_bytes(budget_gb)
    target = find_target(model, training.device)
    if budget_bytes is None:
        budget_bytes = free_bytes(model, target)
    batches = Batches(make_inputs, TrainingBytes(model, _careful(model, target), training))
    if limit > 1:
        batches.check()
    return _Search(batches, budget_bytes, limits, plan=plan, max_overhead=max_overhead, limit=limit).run()


class Batches:
    """Training steps for batches of any size.

    Parameters
    ----------
    make_inputs : callable
    sizes : TrainingBytes
    """

    def __init__(self, make_inputs: MakeInputs, sizes: TrainingBytes) -> None:
        self.make_inputs, self.sizes = make_inputs, sizes

    @property
    def target(self) -> Target:
        """The device of the steps."""
        return self.sizes.target

    def step(self, n: int) -> TrainingStep:
        """Return the step on `n` samples.

        Raises
        ------
        InvalidInputError
            If their inputs can't be made.
        """
        return self.sizes.step(self.inputs(n))

    def inputs(self, n: int) -> Any:
        """Return the inputs from `make_inputs`; its errors are raised as `InvalidInputError`."""
        try:
            made = self.make_inputs(n)
        except CkptPlanError:
            raise
        except Exception as error:
            raise InvalidInputError(f"make_inputs({n}) failed: {type(error).__name__}: {error}") from error
        if made is None:
            raise InvalidInputError(f"make_inputs({n}) gave None; it must return the inputs of a batch of {n}")
        return made

    def check(self) -> None:
        """Raise `InvalidInputError` if the inputs of one and of two samples have the same shapes."""
        one, two = (self._shapes(n) for n in (1, 2))
        if one == two:
            raise InvalidInputError(
                f"make_inputs(1) and make_inputs(2) both give {', '.join(one) or 'no tensors'}, so the batch size "
                "doesn't reach the inputs; use the argument, such as lambda n: torch.zeros(n, 3, 224, 224)"
            )

    def _shapes(self, n: int) -> list[str]:
        leaves = pytree.tree_leaves(self.inputs(n))
        return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves if isinstance(t, torch.Tensor)]


class _TooLarge(CkptPlanError):
    """A single operation would need more memory than the device has free."""


@dataclass(frozen=True)
class _CarefulTarget(Target):
    """A device of this machine that doesn't run an operation, to measure its temporaries, if they may not fit.

    Batches are tried from small ones on, so the memory of an operation is predicted from its bytes per byte of operands
    in smaller batches.
    """

    limit_bytes: int = 0
    seen: dict[Any, float] = field(default_factory=dict)

    def workspaces(
        self, keys: Iterable[Hashable]
    ) -> tuple[dict[Hashable, int], list[str], dict[Hashable, tuple[int, ...]]]:
        wanted = [key for key in dict.fromkeys(keys) if key is not None]
        for key in wanted:
            nbytes = _operand_bytes(key)
            if nbytes * (1 + self.seen.get(key[0], 0.0)) > self.limit_bytes:  # type: ignore[index]
                raise _TooLarge
        peaks, failed, storages = Target.workspaces(self, wanted)
        for key, peak in peaks.items():
            func, nbytes = key[0], max(_operand_bytes(key), 1)  # type: ignore[index]
            if nbytes >= 1 << 20:  # for small operands, memory of fixed size dominates
                self.seen[func] = max(self.seen.get(func, 0.0), peak / nbytes)
        return peaks, failed, storages


def _careful(model: nn.Module, target: Target) -> Target:
    if target.spec is not None:
        return target
    return _CarefulTarget(target.device, answers=target.answers, limit_bytes=free_bytes(model, target))


def _operand_bytes(key: Any) -> int:
    return sum(math.prod(x.size) * x.dtype.itemsize for x in key[1] if isinstance(x, TensorSpec))


def largest(
    needs: Callable[[int], float],
    budget_bytes: int,
    limit: int,
    known: dict[int, float] | None = None,
    start: int | None = None,
) -> tuple[int, int | None]:
    """Return the largest batch found that needs at most the budget, and the next one, which needs more.

    Bytes are nearly linear in the batch, so the next guess is extrapolated from two batches; every third one bisects.
    For example, if batches of 1 and 2 need 3 and 4 GiB, the first guess for a budget of 10 GiB is 8.

    Parameters
    ----------
    needs : callable
        Function from a batch to its bytes, infinite if they are only known to exceed the budget.
    limit : int
        Largest batch tried.
    known : dict, optional
        Batch -> bytes, known at the start; the search adds those that it computes.
    start : int, optional
        The first batch to try if none is known to fit.

    Returns
    -------
    (int, int or None)
        The first is 0 if nothing fits; the second is None if the limit fits.
    """
    known = {} if known is None else known
    low = max((n for n, needed in known.items() if needed <= budget_bytes), default=0)
    high = min((n for n, needed in known.items() if n > low and needed > budget_bytes), default=None)
    stride, turn = 1, 0
    while low < limit and (high is None or high - low > 1):
        guess = _guess(known, budget_bytes, low, high) if low else start
        if high is None:
            n = min(max(guess or 0, low + stride), _MOST_GROWTH * low or 1, limit)
            stride = 2 * stride if n == low + stride and low else 1
        else:
            turn += 1
            n = (low + high) // 2 if guess is None or turn % 3 == 0 else min(max(guess, low + 1), high - 1)
        if n not in known:
            known[n] = needs(n)
        if known[n] <= budget_bytes:
            low = n
        else:
            high = n
    return low, high


def _guess(known: Mapping[int, float], budget_bytes: int, low: int, high: int | None) -> int | None:
    """Return the batch at which the line through the two batches nearest to the budget reaches it."""
    at = (low, known[low])
    if high is not None and known.get(high, math.inf) < math.inf:
        other = (high, known[high])
    else:
        below = [n for n in known if n < at[0]]
        if not below:
            return None
        other = (max(below), known[max(below)])
    slope = (other[1] - at[1]) / (other[0] - at[0])
    if not 0 < slope < math.inf:
        return None
    return at[0] + int(min((budget_bytes - at[1]) / slope, 1 << 40))


@dataclass
class _Search:
    """The search of one call of `max_batch_size`."""

    batches: Batches
    budget_bytes: int
    limits: Limits
    plan: bool
    max_overhead: float | None
    limit: int
    notes: list[str] = field(default_factory=list)
    plans: dict[int, tuple[Plan, int]] = field(default_factory=dict)
    """Batch -> its plan, and the bytes that the plan needs."""
    binding: tuple[str, str] = ("", "backward")

    @property
    def target(self) -> Target:
        return self.batches.target

    @property
    def optimizer(self) -> OptimizerLike | None:
        return self.batches.sizes.training.optimizer

    @property
    def peak_limits(self) -> Limits:
        """Limits of the search for one batch's smallest peak."""
        return replace(self.limits, time_limit_s=self.limits.time_limit_s * _PEAK_SHARE, on_progress=ignore_progress)

    def run(self) -> BatchFit:
        known: dict[int, float] = {}
        best, following = largest(self.needs, self.budget_bytes, self.limit, known)
        if best and self.plan and (needed := self.planned(best)) > self.budget_bytes:
            # The chain fits, but its plan doesn't: from here on, smaller batches are judged by their plans.
            start = int(best * self.budget_bytes / needed)
            firm = {best: needed}
            best, following = largest(self.planned, self.budget_bytes, self.limit, firm, start)
            known.update(firm)
        if best == 0:
            raise self.infeasible(known)
        chosen, peak_bytes = self.plans[best] if self.plan else (None, int(known[best]))
        if following is None:
            self.notes.append(f"limit={self.limit} was reached; raise it to try larger batches")
        measured, verification = self.measured(best, chosen)
        next_bytes = None if following is None or known[following] == math.inf else int(known[following])
        return BatchFit(
            best,
            self.budget_bytes,
            peak_bytes,
            chosen,
            following,
            next_bytes,
            known,
            measured,
            verification,
            (*self.batches.sizes.notes, *self.notes),
        )

    def infeasible(self, known: dict[int, float]) -> Exception:
        """Return the error for a batch of one sample that doesn't fit."""
        least = known.get(1, math.inf)
        if least == math.inf:
            return InvalidInputError(
                f"a batch of 1 doesn't fit {format_bytes(self.budget_bytes)}: one operation needs more than the free "
                "memory; use smaller inputs or a smaller model"
            )
        stage, phase = self.binding
        where = f" (stage {stage!r}, {phase})" if stage else ""
        remedy = "raise the budget" if self.plan else "raise the budget, or allow a plan (plan=True)"
        return InfeasibleBudgetError(
            f"budget {format_bytes(self.budget_bytes)} is below what a batch of 1 needs, {format_bytes(least)}{where}; "
            f"{remedy}",
            budget_bytes=self.budget_bytes,
            min_peak_bytes=int(least),
            stage=stage,
            phase=phase,
        )

    def needs(self, n: int) -> float:
        """Return the smallest budget found for a batch: of its chain, or with everything kept."""
        self.limits.on_progress(f"trying batch {n}")
        try:
            step = self.batches.step(n)
            if not self.plan:
                return self.batches.sizes.reserved(step)
            if self.max_overhead is not None:
                profile = profile_step(step, self.target, optimizer=self.optimizer, menus=False)
                return Job.of(profile, self.peak_limits).smallest_within(self.max_overhead).peak_bytes
            chain = Job.of(traced_bytes(step, self.optimizer, self.target), self.limits).leanest.profile
            least = smallest_peak(chain, self.peak_limits)
        except _TooLarge:
            return math.inf
        self.binding = (least.stage, least.phase)
        return least.peak_bytes

    def planned(self, n: int) -> float:
        """Return the bytes of a batch's plan, whose limit is tightened until its reserved bytes fit the budget too."""
        self.limits.on_progress(f"planning batch {n}")
        try:
            step = self.batches.step(n)
            measured = profile_step(step, self.target, optimizer=self.optimizer, on_progress=self.limits.on_progress)
            plan = replaying(Job.of(measured, self.limits), step, self.batches.sizes).solved(self.budget_bytes)
        except InfeasibleBudgetError as error:
            return max(error.min_peak_bytes, self.budget_bytes + 1)
        except _TooLarge:
            return math.inf
        if self.max_overhead is not None and plan.overhead > self.max_overhead * (1 + 1e-9):
            return math.inf
        self.plans[n] = plan, plan.reserved_bytes or plan.peak_bytes
        return self.plans[n][1]

    @in_own_context
    def measured(self, n: int, plan: Plan | None) -> tuple[int | None, Verification | None]:
        """Return the measured peak of one step, and the verification of its plan; None for a device elsewhere."""
        if self.target.spec is not None:
            return None, None
        sizes, model, device = self.batches.sizes, self.batches.sizes.model, self.target.device
        optimizer = self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None
        missing = sizes.missing_state_bytes()
        if missing:
            self.notes.append(
                f"the optimizer's state, {format_bytes(missing)}, doesn't exist yet; it is added to the measured peak"
            )
        if isinstance(self.target, _CarefulTarget) and self.budget_bytes > self.target.limit_bytes:
            free = format_bytes(self.target.limit_bytes)
            self.notes.append(f"not measured, since the budget is more than the device has free, {free}")
            return None, None
        step = self.batches.step(n)
        self.limits.on_progress(f"measuring batch {n}")
        if plan is not None:
            inputs = step.args or step.kwargs
            with step.autocasting():
                found = verify(
                    model,
                    plan,
                    inputs,
                    step.loss_fn,
                    accumulate=step.accumulates,
                    optimizer=optimizer,
                    repeats=1,
                    plain=False,
                )
            peak = found.measured.needed_bytes + missing
        else:
            found = None
            model = step.model
            with (
                apart(model),
                ParameterState(model.parameters()).restored(),
                training_config(model),
                restored(model, step.reached()) as rewind,
            ):
                rewind = rewinding(model, rewind, accumulates=step.accumulates)
                rewind()
                tensors = [*held_tensors(model), *optimizer_tensors(optimizer), *read_from_outside(step)]
                rewind()
                held = unique_bytes(tensors, device) + step.parallel.unseen_bytes()
                peak = step_peaks(lambda: run_step(step), device, held, rewind).needed_bytes + missing
        if peak > self.budget_bytes:
            self.notes.append(
                f"the measured {format_bytes(peak)} exceed the budget of {format_bytes(self.budget_bytes)}; use a "
                "smaller batch, and please report it"
            )
        return peak, found
