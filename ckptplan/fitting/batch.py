"""max_batch_size(): the largest batch that fits a device, with everything kept or with a plan, found on estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.checks import check_count
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import BatchKeywords, Limits, Training, ignore_progress, require_known
from ckptplan.core.units import budget_to_bytes, format_bytes
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.planning.job import Job
from ckptplan.planning.model_job import free_bytes, replaying
from ckptplan.profiling.bytes.operations import TensorSpec
from ckptplan.profiling.profiler import profile_step, traced_bytes
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.workload.optimizers import OptimizerLike
from ckptplan.runtime.guard.gradients import rewinding
from ckptplan.runtime.observe.measure import held_tensors, optimizer_tensors, run_step, step_peaks, unique_bytes
from ckptplan.runtime.state.parameters import ParameterState
from ckptplan.runtime.state.process import in_own_context
from ckptplan.runtime.state.restore import restored
from ckptplan.runtime.step import TrainingStep, training_config
from ckptplan.runtime.verify import Verification, verify
from ckptplan.solving.frontier import smallest_within
from ckptplan.solving.peak import MinPeak, smallest_peak

MakeInputs = Callable[[int], Any]
"""From a number of samples to the inputs of a batch that large."""

LIMIT = 65536
_LEAP = 16
"""So many times the largest batch that fits is the most that the next guess may be."""
_PEAK_SHARE = 0.25
"""Of the time limit, for the smallest peak of one batch."""


@dataclass(frozen=True, slots=True)
class BatchFit:
    """The largest batch that fits, and what the next larger one would need.

    Invariant: `batch` was itself checked (traced, planned, its plan replayed), and `next_batch`, one more, was tried
    and found not to fit, or `batch` is the limit. Bytes need not rise with every sample: a still larger one may fit.

    Attributes
    ----------
    batch : int
    budget_bytes : int
        What `peak_bytes` is held against.
    peak_bytes : int
        Predicted for `batch`: on CUDA what the allocator reserves, on the CPU what is in tensors.
    plan : Plan or None
        For `batch`; None where everything is kept.
    next_batch, next_bytes : int or None
        The next larger batch, and the smallest budget found for it, where that is known. None: the limit was reached.
    tried : mapping
        Batch -> the smallest budget found for it; infinite where that wasn't followed up.
    measured_peak_bytes : int or None
        Of one step of `batch` on the device that is here, forward to the end of backward, counted as `peak_bytes` is;
        an optimizer's state that isn't there yet is added. None for a device that isn't here.
    verification : Verification or None
        What `verify` measured of the plan; the plain step isn't run, lest it fill the device.
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
    """The largest batch that a device holds, by bisection on estimates; never by running out of memory.

    With everything kept, a batch fits if the estimate of two training steps does. With a plan, it fits if the smallest
    peak of its chain does, stages taken as wholes (options inside a stage hardly lower that: its saved tensors are all
    there in its backward). The largest such batch is then profiled with its menus, solved and replayed. On CUDA its
    plan's estimate must fit as well, reserved bytes included; where one doesn't, the budget is tightened, then the
    batch lowered.

    Parameters
    ----------
    model : nn.Module
        May lie on `meta` where `device` names one that isn't here.
    make_inputs : callable
        From a batch size to the inputs of the forward, as `profile` takes them. For a device that isn't here, floating
        inputs may lie on `meta`, which takes no memory for large batches.
    budget_gb : float, optional
        As in `solve`, units of 2**30 bytes, without the CUDA context. On CUDA what the allocator *reserves* is held
        against it, not only what is in tensors. None: what the device has free, or, for one that isn't here, has
        beside the context.
    plan : bool
        False: with everything kept.
    max_overhead : float, optional
        Largest slowdown that a plan may cost: 0.10 for ten per cent.
    limit : int
        Largest batch tried.
    **options
        As in `solve`: `loss_fn`, `optimizer`, `device`, `amp`, `accumulate`; `actions`, `segments`, `host_gb`,
        `time_limit_s`, `seed`, `workers`, `on_progress`. The time is for solving the final plan; a quarter of it for
        the smallest peak of each batch tried. Tracing isn't counted.

    Returns
    -------
    BatchFit
        Printable. Where the model lies on the device, its plan (or the plain step) was run and measured.

    Raises
    ------
    InfeasibleBudgetError
        If not even one sample fits; names the smallest budget that works.
    InvalidInputError
        If `make_inputs` can't be used: it fails, or makes the same inputs for every batch.
    UnsupportedModelError
    """
    require_known("max_batch_size", options, BatchKeywords)
    if not callable(make_inputs):
        raise InvalidInputError(
            f"make_inputs is a {type(make_inputs).__name__}; pass a function from a batch size to inputs, such as "
            "lambda n: torch.zeros(n, 3, 224, 224)"
        )
    check_count(limit=limit)
    if max_overhead is not None and not plan:
        raise InvalidInputError(f"max_overhead={max_overhead!r} speaks of plans; leave it out with plan=False")
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
    """Training steps of any number of samples.

    Parameters
    ----------
    make_inputs : callable
    sizes : TrainingBytes
    """

    def __init__(self, make_inputs: MakeInputs, sizes: TrainingBytes) -> None:
        self.make_inputs, self.sizes = make_inputs, sizes

    @property
    def target(self) -> Target:
        """Where they run."""
        return self.sizes.target

    def step(self, n: int) -> TrainingStep:
        """The step on `n` samples.

        Raises
        ------
        InvalidInputError
            If their inputs can't be made.
        """
        return self.sizes.step(self.inputs(n))

    def inputs(self, n: int) -> Any:
        """What `make_inputs` gives, its own errors as ours."""
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
        """Raise `InvalidInputError` if one and two samples make the same inputs."""
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
    """An operation alone would need more than the device has free."""


@dataclass(frozen=True)
class _CarefulTarget(Target):
    """The device that is here, on which no operation is run for its temporaries that may not fit.

    A batch grows from small ones on, so what an operation took per byte of its operands there tells what it will take.
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
            if nbytes >= 1 << 20:  # of small operands, fixed amounts would be most
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
    """The largest batch found that needs at most the budget, and the next one, which needs more.

    Bytes are nearly linear in the batch: two batches tell where to look next, and bisection helps where they mislead.

    Parameters
    ----------
    needs : callable
        Batch -> bytes, infinite where it is only known that they are too many.
    limit : int
        Largest batch tried.
    known : dict, optional
        Batches and what they need, where the search begins; filled with what was asked for.
    start : int, optional
        The first to try, where none is known to fit.

    Returns
    -------
    (int, int or None)
        0 if nothing fits; None where the limit does.
    """
    known = {} if known is None else known

    def ask(n: int) -> float:
        if n not in known:
            known[n] = needs(n)
        return known[n]

    low = max((n for n, needed in known.items() if needed <= budget_bytes), default=0)
    high = min((n for n, needed in known.items() if n > low and needed > budget_bytes), default=None)
    stride, turn = 1, 0
    while low < limit and (high is None or high - low > 1):
        guess = _guess(known, budget_bytes, low, high) if low else start
        if high is None:
            n = min(max(guess or 0, low + stride), _LEAP * low or 1, limit)
            stride = 2 * stride if n == low + stride and low else 1
        else:
            turn += 1
            n = (low + high) // 2 if guess is None or turn % 3 == 0 else min(max(guess, low + 1), high - 1)
        if ask(n) <= budget_bytes:
            low = n
        else:
            high = n
    return low, high


def _guess(known: Mapping[int, float], budget_bytes: int, low: int, high: int | None) -> int | None:
    """Where the line through the two batches nearest to the budget meets it."""
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
    """One answer of `max_batch_size`."""

    batches: Batches
    budget_bytes: int
    limits: Limits
    plan: bool
    max_overhead: float | None
    limit: int
    notes: list[str] = field(default_factory=list)
    plans: dict[int, tuple[Plan, int]] = field(default_factory=dict)
    """Batch -> its plan, and what that needs."""
    binding: tuple[str, str] = ("", "backward")

    @property
    def target(self) -> Target:
        return self.batches.target

    @property
    def optimizer(self) -> OptimizerLike | None:
        return self.batches.sizes.training.optimizer

    @property
    def peak_limits(self) -> Limits:
        """The limits of the search for one batch's smallest peak."""
        return replace(self.limits, time_limit_s=self.limits.time_limit_s * _PEAK_SHARE, on_progress=ignore_progress)

    def run(self) -> BatchFit:
        known: dict[int, float] = {}
        best, following = largest(self.needs, self.budget_bytes, self.limit, known)
        if best and self.plan and (needed := self.planned(best)) > self.budget_bytes:
            # The chain fits and its plan doesn't: below it, only plans count.
            start = int(best * self.budget_bytes / needed)
            firm = {best: needed}
            best, following = largest(self.planned, self.budget_bytes, self.limit, firm, start)
            known.update(firm)
        if best == 0:
            raise self.infeasible(known)
        chosen, peak_bytes = self.plans[best] if self.plan else (None, int(known[best]))
        if following is None:
            self.notes.append(f"limit={self.limit} was reached; larger batches weren't tried")
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
            tuple(self.notes),
        )

    def infeasible(self, known: dict[int, float]) -> Exception:
        """One sample doesn't fit."""
        least = known.get(1, math.inf)
        if least == math.inf:
            return InvalidInputError(
                f"a batch of 1 doesn't fit {format_bytes(self.budget_bytes)}: one operation needs more than is free"
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
        """The smallest budget found for a batch: of its chain, or with everything kept."""
        self.limits.on_progress(f"trying batch {n}")
        try:
            step = self.batches.step(n)
            if not self.plan:
                return self.batches.sizes.reserved(step)
            if self.max_overhead is not None:
                fast = smallest_within(
                    profile_step(step, self.target, optimizer=self.optimizer, menus=False),
                    self.max_overhead,
                    self.peak_limits,
                )
                return fast.peak_bytes
            least = self.smallest(traced_bytes(step, self.optimizer, self.target))
        except _TooLarge:
            return math.inf
        self.binding = (least.stage, least.phase)
        return least.peak_bytes

    def smallest(self, chain: Profile) -> MinPeak:
        return smallest_peak(chain, self.peak_limits)

    def planned(self, n: int) -> float:
        """What the plan of a batch needs, solved within the budget and tightened until what it reserves fits, too."""
        self.limits.on_progress(f"planning batch {n}")
        try:
            step = self.batches.step(n)
            measured = profile_step(step, self.target, optimizer=self.optimizer, on_progress=self.limits.on_progress)
        except _TooLarge:
            return math.inf
        try:
            plan = replaying(Job(measured, self.limits), step, self.batches.sizes).solved(self.budget_bytes)
        except InfeasibleBudgetError as error:
            return max(error.min_peak_bytes, self.budget_bytes + 1)
        except _TooLarge:  # in a replay
            return math.inf
        if self.max_overhead is not None and plan.overhead > self.max_overhead * (1 + 1e-9):
            return math.inf
        self.plans[n] = plan, plan.reserved_bytes or plan.peak_bytes
        return self.plans[n][1]

    @in_own_context
    def measured(self, n: int, plan: Plan | None) -> tuple[int | None, Verification | None]:
        """Peak of one step on the device, where it is here."""
        if self.target.spec is not None:
            return None, None
        sizes, model, device = self.batches.sizes, self.batches.sizes.model, self.target.device
        optimizer = self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None
        missing = sizes.missing_state_bytes()
        if missing:
            self.notes.append(
                f"the optimizer's state, {format_bytes(missing)}, isn't there yet; it is added to what was measured"
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
            parameters = ParameterState(model.parameters())
            with parameters.restored(), training_config(model), restored(model, step.reached()) as rewind:
                rewind = rewinding(model, rewind, accumulates=step.accumulates)
                rewind()
                tensors = [*held_tensors(model), *optimizer_tensors(optimizer), *step.tensors()]
                held = unique_bytes(tensors, device)
                peak = step_peaks(lambda: run_step(step), device, held, rewind).needed_bytes + missing
        if peak > self.budget_bytes:
            self.notes.append(
                f"measured {format_bytes(peak)} are over the budget of {format_bytes(self.budget_bytes)}; take a "
                "smaller batch, and please report it"
            )
        return peak, found
