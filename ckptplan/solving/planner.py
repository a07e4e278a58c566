"""The planner: profile and budget in, plan with schedule and certificate out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptplan.core.chain import ACTIONS, Action, Phase
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import format_bytes
from ckptplan.solving import exact_search, local_search
from ckptplan.solving.evaluate import KEEP, Evaluator, Menu, Schedule, Segments, menus
from ckptplan.solving.exact_search import PlanSpace

OnProgress = Callable[[str, float, float], None]
"""Called with the part at work, the best makespan so far and the lower bound so far, in seconds."""

GAP = 1e-6
ENUMERATE = 20_000
"""Up to this many plans, looking at each is faster than any other proof."""
ENUMERATE_WITH_TIME = 4_000_000
"""Up to this many, it is the last resort where bounds leave a gap: seconds at most."""


@dataclass(frozen=True, slots=True)
class MinPeak:
    """The smallest budget for which a plan exists.

    Attributes
    ----------
    peak_bytes : int
        Peak of this plan; the smallest possible one where `proven`.
    bound_bytes : int
        No plan has a smaller peak; equal to `peak_bytes` where `proven`.
    codes : tuple of int
        One per stage: the option's position in its menu.
    segments : tuple of Segment
        Stages recomputed together.
    stage, phase : str
        Where this plan has its peak.
    proven : bool
        False where the search was cut short.
    """

    peak_bytes: int
    bound_bytes: int
    codes: tuple[int, ...]
    segments: Segments
    stage: str
    phase: Phase
    proven: bool


def solve_profile(
    profile: Profile,
    budget_bytes: int,
    *,
    actions: tuple[Action, ...] = ("keep", "swap", "recompute"),
    segments: bool = True,
    host_bytes: int | None = None,
    time_limit_s: float = 10,
    seed: int = 0,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """The fastest plan found that fits, and a proven bound on all of them.

    Parameters
    ----------
    profile : Profile
    budget_bytes : int
        Most bytes on the device at any moment of the step.
    actions : tuple of Action
        What stages may do; "keep" must be among them.
    segments : bool
        Whether stages may be recomputed together; needs "recompute" among `actions`.
    host_bytes : int, optional
        Most bytes on the host tier.
    time_limit_s : float
        Wall clock; small chains take far less.
    seed, workers : int
        For CP-SAT. Same seed, same workers: same plan, unless the time limit cuts the search.
    on_progress : callable, optional

    Returns
    -------
    Plan
        `status` is "optimal" where the gap is at most 1e-6 over `plan.space`.

    Raises
    ------
    InfeasibleBudgetError
        No plan fits; names the smallest feasible peak, and the stage and phase that bind.
    InvalidInputError
        On actions, limits or budgets that can't be used.
    """
    _check(actions, time_limit_s, budget_bytes=budget_bytes, host_bytes=host_bytes, workers=workers)
    search = _Search(
        profile,
        budget_bytes,
        actions,
        segments,
        host_bytes,
        time.monotonic() + time_limit_s,
        seed,
        workers,
        on_progress,
    )
    best, bound_s = search.run()
    return Plan(
        stages=tuple(stage.name for stage in profile.stages),
        choices=best.choices,
        status="optimal" if best.step_s <= bound_s * (1 + GAP) else "feasible",
        budget_bytes=budget_bytes,
        peak_bytes=best.peak_bytes,
        host_bytes=best.host_bytes,
        step_s=best.step_s,
        baseline_step_s=profile.baseline_step_s,
        lower_bound_s=bound_s,
        space=plan_space(actions, segments=segments),
        planner="ckptplan",
        fingerprint=profile.fingerprint,
        input_bytes=tuple(stage.input_bytes for stage in profile.stages),
        segments=best.segments,
    )


def plan_space(actions: Sequence[Action], *, segments: bool = True) -> str:
    """The sentence every certificate refers to."""
    menu = "/".join(a for a in ACTIONS if a in actions)
    together = "nested segments" if segments and "recompute" in actions else "no segments"
    return f"per-stage menus of {menu}, {together}, first-in-first-out links, compute in program order"


def smallest_peak(
    profile: Profile,
    *,
    actions: tuple[Action, ...] = ("keep", "swap", "recompute"),
    segments: bool = True,
    host_bytes: int | None = None,
    time_limit_s: float = 10,
) -> MinPeak:
    """The smallest budget for which a plan exists, in exact bytes.

    Raises
    ------
    InvalidInputError
        On actions or limits that can't be used.
    """
    _check(actions, time_limit_s, host_bytes=host_bytes)
    evaluator = Evaluator(profile, host_bytes)
    space = _space(profile, actions, segments, host_bytes)
    return _smallest_peak(evaluator, space, time.monotonic() + time_limit_s)


def _space(profile: Profile, actions: Sequence[Action], segments: bool, host_bytes: int | None) -> PlanSpace:
    menu = menus(profile, actions, host_bytes=host_bytes)
    return PlanSpace(profile, menu, segments=segments and "recompute" in actions)


def _smallest_peak(evaluator: Evaluator, space: PlanSpace, deadline: float) -> MinPeak:
    segments: Segments = ()
    if space.count() <= ENUMERATE:
        row, segments, peak = exact_search.smallest(evaluator, space)
        bound = peak
    else:
        starts = local_search.patterns(space.menu)
        start = starts[evaluator.smallest_peaks(starts).argmin()]
        row = local_search.improve(
            start, space.menu, lambda codes: evaluator.smallest_peaks(codes).astype(float), deadline
        )
        peak = evaluator.peak(row.tolist())
        bound = evaluator.profile.update_peak_bytes
    codes = tuple(row.tolist())
    stage, phase = evaluator.binding(codes, segments)
    return MinPeak(peak, bound, codes, segments, stage, phase, bound == peak)


def _check(actions: Sequence[str], time_limit_s: float, **whole: int | None) -> None:
    unknown = [a for a in actions if a not in ACTIONS]
    if unknown or "keep" not in actions:
        wrong = (
            f"unknown action {unknown[0]!r}"
            if unknown
            else "'keep' is missing, and every stage needs it as a last resort"
        )
        raise InvalidInputError(f"actions={tuple(actions)!r}: {wrong}; give 'keep' and any of 'swap', 'recompute'")
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, (int, float)) or not 0 < time_limit_s < math.inf:
        raise InvalidInputError(f"time_limit_s={time_limit_s!r} must be a finite number of seconds above 0")
    for name, value in whole.items():
        least = 1 if name == "workers" else 0
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 60
        ):
            raise InvalidInputError(f"{name}={value!r} must be a whole number, {least} or more")


@dataclass(slots=True)
class _Search:
    """One run: the best schedule so far and the bound so far."""

    profile: Profile
    budget_bytes: int
    actions: tuple[Action, ...]
    segments: bool
    host_bytes: int | None
    deadline: float
    seed: int
    workers: int | None
    on_progress: OnProgress | None
    best: Schedule | None = None
    bound_s: float = 0.0
    evaluator: Evaluator = field(init=False)
    space: PlanSpace = field(init=False)
    menu: Menu = field(init=False)

    def run(self) -> tuple[Schedule, float]:
        """Cheap answers first; each further part runs only while a gap is left."""
        self.evaluator = Evaluator(self.profile, self.host_bytes)
        self.space = _space(self.profile, self.actions, self.segments, self.host_bytes)
        self.menu = self.space.menu
        self.bound_s = self.profile.baseline_step_s
        self.offer([KEEP] * len(self.menu))
        if self.closed():
            return self.result("keep all")
        if self.space.count() <= ENUMERATE:
            self.enumerate()
            return self.result("exact search")
        self.start()
        self.polish(self.deadline)
        if not self.closed() and self.space.count() <= ENUMERATE_WITH_TIME:
            self.enumerate()
        return self.result("done")

    def closed(self) -> bool:
        """Whether the best schedule is proven optimal."""
        return self.best is not None and self.best.step_s <= self.bound_s * (1 + GAP)

    def offer(self, codes: Sequence[int], segments: Segments = ()) -> None:
        """Take this plan if it fits and is faster, or as fast with more stages kept."""
        found = self.evaluator.schedule(codes, self.budget_bytes, segments)
        if found is None:
            return
        if self.best is None or (found.step_s, -_kept(found)) < (self.best.step_s, -_kept(self.best)):
            self.best = found

    def report(self, part: str) -> None:
        """Tell the caller where the search stands."""
        if self.on_progress is not None:
            self.on_progress(part, math.inf if self.best is None else self.best.step_s, self.bound_s)

    def enumerate(self) -> None:
        """Exact search over every vector."""
        complete = exact_search.fastest(
            self.evaluator,
            self.space,
            self.budget_bytes,
            self.deadline,
            below_s=math.inf if self.best is None else self.best.step_s,
            on_found=self.offer,
        )
        if complete and self.best is not None:
            self.bound_s = self.best.step_s
        if self.best is None:
            self.refuse()
        self.report("exact search")

    def start(self) -> None:
        """First vectors that fit; where none is found, the one with the smallest peak."""
        starts = local_search.patterns(self.menu)
        costs = self.evaluator.makespans(starts, self.budget_bytes)
        self.offer(starts[costs.argmin()].tolist())
        if self.best is None:
            self.refuse()
        self.report("patterns")

    def refuse(self) -> None:
        """Raise where the budget is below the smallest peak; else start from the vector that has it."""
        deadline = max(self.deadline, time.monotonic() + 0.2)
        least = _smallest_peak(self.evaluator, self.space, deadline)
        if least.peak_bytes <= self.budget_bytes:
            self.offer(least.codes, least.segments)
        if self.best is not None:
            return
        missing = [a for a in ("swap", "recompute") if a not in self.actions and least.phase != "update"]
        allow = f", or allow {' or '.join(repr(a) for a in missing)}" if missing else ""
        known = "the smallest feasible peak" if least.proven else "the smallest peak found in the time given"
        where = "the optimizer update" if least.phase == "update" else f"stage {least.stage!r}, {least.phase}"
        raise InfeasibleBudgetError(
            f"budget {_exactly(self.budget_bytes, least.peak_bytes)} is below {known} "
            f"{_exactly(least.peak_bytes, self.budget_bytes)} ({where}); raise the budget{allow}",
            budget_bytes=self.budget_bytes,
            min_peak_bytes=least.peak_bytes,
            stage=least.stage,
            phase=least.phase,
        )

    def polish(self, deadline: float) -> None:
        """Local search from the best vector."""
        if self.best is None or self.closed():
            return
        start, segments = np.array(self.best.codes, np.int8), self.best.segments
        share = min(deadline, time.monotonic() + 0.25 * max(0.4, self.deadline - time.monotonic()))
        found = local_search.improve(
            start,
            self.space.menu_in(segments),
            lambda codes: self.evaluator.makespans(codes, self.budget_bytes, segments),
            share,
        )
        self.offer(found.tolist(), segments)
        self.report("local search")

    def result(self, part: str) -> tuple[Schedule, float]:
        """The best schedule without swaps that gain nothing, and the bound."""
        assert self.best is not None
        improved = True
        while improved and time.monotonic() < self.deadline + 0.5:
            improved = False
            codes, segments = np.array(self.best.codes, np.int8), self.best.segments
            inside = {i for segment in segments for i in range(segment.first, segment.last + 1)}
            stages = [i for i in reversed(range(len(codes))) if codes[i] != KEEP and i not in inside]
            if not stages:
                break
            trials = np.tile(codes, (len(stages), 1))
            trials[np.arange(len(stages)), stages] = KEEP
            costs = self.evaluator.makespans(trials, self.budget_bytes, segments)
            row = int(costs.argmin())
            # 1e-12: sums of the same seconds in another order are the same time.
            if costs[row] <= self.best.step_s * (1 + 1e-12):
                found = self.evaluator.schedule(trials[row].tolist(), self.budget_bytes, segments)
                assert found is not None
                self.best, improved = found, True
        if self.bound_s <= self.best.step_s * (1 + 1e-9):
            # Above by a rounding only: they are equal. By more it would be a defect, for the referee to name.
            self.bound_s = min(self.bound_s, self.best.step_s)
        self.report(part)
        return self.best, self.bound_s


def _kept(schedule: Schedule) -> int:
    return schedule.codes.count(KEEP)


def _exactly(nbytes: int, other: int) -> str:
    """`nbytes` for people, with every digit where rounding would hide the difference to `other`."""
    text = format_bytes(nbytes)
    return f"{text} ({nbytes} bytes)" if text == format_bytes(other) and not text.endswith(" B") else text
