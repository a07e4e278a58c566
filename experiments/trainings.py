"""Train without a plan and with one: the same bits, and each step's peak within the budget or its cause named.

A training is a function of a `Record`. It builds its models from a seed, trains them with or without a plan
(`record.planned`), and runs each step by `record.step`, which measures the step and keeps what it left. `compared` runs
it both ways and tells what became of it.

Outcomes
--------
equal
    The training ended, with the values of plain training.
infeasible
    No plan fits the budget of the first step; the error says which would.
refused
    The first plan raised another error of this package.
ended
    A step failed, which none did without a plan.
DIFFERENT
    Something isn't what plain training gives, without any error.

Steps over the budget
---------------------
silent
    No warning has named a cause since the present plan is in force.
first
    A warning has; it is the first step of its kind, or no plan was made since that.
no plan
    A warning says that no plan can be made or fits the budget.
again
    A warning has, although a plan was made at or after the first step of its kind.

Planning isn't measured: it runs with the recording paused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import documents
import measured_step
import numpy as np
import torch
from torch import nn

from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError
from ckptplan.integrations.lightning import ActivationPlanner
from ckptplan.integrations.transformers import _TrainerLoop
from ckptplan.planning.enlarging import Enlarger
from ckptplan.planning.first_forward import FirstForward
from ckptplan.tensors.storages import same_bits, tensors_in
from ckptplan.training.measure import blocks_of, recording

NAMED = "the peak may exceed the budget: "
"""Beginning of warnings of steps that differ from the planned one."""
NO_PLAN = re.compile("no plan can be made|the former plan stays applied|there is none for it")
LOSS_BYTES = 64
"""Losses of earlier steps to which loops and frameworks still refer; no plan counts them."""
OVER = ("silent", "first", "no plan", "again")


@dataclass
class Step:
    """What one step left, and what it took.

    `like` names its kind, `made` the step at which its plan was made, `since` the one from which it is in force.
    """

    values: dict[str, Any]
    like: str
    peak_bytes: int
    budget_bytes: int | None = None
    made: int = 0
    since: int = 0
    told: list[str] = field(default_factory=list)


class Record:
    """The steps of one training.

    Parameters
    ----------
    planned : bool
        Whether the training is to use a plan.
    plain : Record, optional
        The training without a plan, whose peaks a budget may be drawn from.
    measures : bool
        Whether peaks are recorded.

    Attributes
    ----------
    budget_bytes : int or None
        The budget, where it is known beforehand; None: that of the plans.
    """

    def __init__(self, plain: Record | None = None, *, planned: bool, measures: bool = True) -> None:
        self.planned, self.plain, self.measures = planned, plain, measures
        self.steps: list[Step] = []
        self.told: list[warnings.WarningMessage] = []
        self.differences: Counter[str] = Counter()
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._handle: Callable[[], Any] = lambda: None
        self._made: dict[int, int] = {}
        self._plans: list[Any] = []
        self._budgets: dict[int, tuple[int, Any]] = {}
        self.budget_bytes: int | None = None
        self._since = 0
        self._used = 0

    def watch(
        self, *models: nn.Module, optimizers: Iterable[Any] = (), handle: Callable[[], Any] | None = None
    ) -> None:
        """Compare these models after each step, and count their bytes and those of the optimizers' states."""
        self._models, self._optimizers = list(models), list(optimizers)
        if handle is not None:
            self._handle = handle

    def step(self, run: Callable[[], Any], inputs: Any = (), like: str = "") -> Any:
        """Run one step; return and compare what it returns."""
        held = nn.ModuleList(self._models[:1])
        if self.measures:
            with mock.patch("measured_step.recorded_blocks", _RECORDER.record):
                found, peak = measured_step.measured(run, held, self._optimizers, inputs)
        else:
            found, peak = run(), 0
        values = {"returned": [t.detach().clone() for t in tensors_in(found)] or found}
        values |= {name: t.detach().clone() for name, t in self._state()}
        step = Step(values, like, int(peak))
        self._note_plan(step)
        self.steps.append(step)
        return found

    def also(self, value: Any) -> None:
        """Compare a value that isn't a step's own."""
        self.steps[-1].values[f"also {len(self.steps[-1].values)}"] = [
            t.detach().clone() for t in tensors_in(value)
        ] or value

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, model in enumerate(self._models):
            for name, p in model.named_parameters():
                yield f"{i} parameter {name}", p
                if p.grad is not None:
                    yield f"{i} gradient of {name}", p.grad
            for name, b in model.named_buffers():
                yield f"{i} buffer {name}", b

    def _note_plan(self, step: Step) -> None:
        handle, at = self._handle(), len(self.steps)
        step.told = [str(w.message) for w in self.told[self._used :] if issubclass(w.category, RuntimeWarning)]
        self._used = len(self.told)
        plan = None
        with contextlib.suppress(CkptPlanError):  # not made yet
            plan = None if handle is None else handle.plan
        if plan is None:
            return
        if not self._plans or self._plans[-1] is not plan:
            self._since = at
            self._plans.append(plan)  # kept, so that ids stay theirs
        step.made = self._made.setdefault(id(plan), at)
        # A plan whose replay exceeded the budget was solved for a smaller one, which it has.
        most = max(plan.budget_bytes, self._budgets.get(id(handle), (0,))[0])
        self._budgets[id(handle)] = most, handle
        step.since, step.budget_bytes = self._since, self.budget_bytes or most
        self.differences = Counter(handle.stats().differences)


class _Recorder:
    """Records the blocks of a step, with pauses in which others record."""

    def __init__(self) -> None:
        self._now: contextlib.ExitStack | None = None
        self._parts: list[Any] = []

    def record(self, run: Callable[[], Any]) -> Any:
        self._parts = []
        try:
            self._begin()
            run()
        finally:
            self._end()
        return blocks_of(*self._parts)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self._now is None:
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._now = contextlib.ExitStack()
        # Spans of optimizers, in which closures run, would begin in one recording and end in another.
        nothing = mock.patch("torch.autograd.profiler.record_function", contextlib.nullcontext)
        self._now.enter_context(nothing)
        self._parts.append(self._now.enter_context(recording()))

    def _end(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            now.close()


_RECORDER = _Recorder()
aside = _RECORDER.paused
"""A context whose allocations are no part of a step."""


def unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the recording of a step paused."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _RECORDER.paused():
            return original(*args, **kwargs)

    return run


@contextlib.contextmanager
def planning_unrecorded() -> Iterator[None]:
    """Inside, no planning is recorded as a part of a step."""

    def first(self: FirstForward, model: nn.Module, planner: Callable[[Any], Any]) -> None:
        original(self, model, unrecorded(planner))

    original = FirstForward.__init__
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FirstForward, "__init__", first))
        for kind, name in ((Enlarger, "enlarged"), (_TrainerLoop, "_plan"), (ActivationPlanner, "_plan")):
            stack.enter_context(mock.patch.object(kind, name, unrecorded(getattr(kind, name))))
        yield


@dataclass
class Row:
    """The end of one training; `over` has for each kind the steps that exceeded the budget."""

    kind: str = "equal"
    detail: str = ""
    steps: int = 0
    peaks_bytes: list[int] = field(default_factory=list)
    plain_peaks_bytes: list[int] = field(default_factory=list)
    budgets_bytes: list[int | None] = field(default_factory=list)
    likes: list[str] = field(default_factory=list)
    plans: int = 0
    over: dict[str, list[int]] = field(default_factory=dict)
    differences: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def broken(self) -> str:
        """The promise that is broken, if one is."""
        if self.kind not in ("equal", "infeasible"):
            return self.kind
        return "over without a word" if self.over.get("silent") else ""


Training = Callable[[Record], None]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def run(training: Training, record: Record, seed: int) -> None:
    """Train once."""
    _seed(seed)
    level = logging.getLogger("ckptplan").level
    logging.getLogger("ckptplan").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as told, planning_unrecorded():
            warnings.simplefilter("always")
            record.told = told
            training(record)
    finally:
        logging.getLogger("ckptplan").setLevel(level)
    if record.steps:
        record.steps[-1].values["next random draws"] = [torch.rand(1), random.random(), float(np.random.rand())]  # noqa: NPY002


def compared(training: Training, seed: int = 7) -> Row:
    """Train without a plan and with one.

    Raises
    ------
    Exception
        What training without a plan raises: the training itself is wrong.
    """
    plain = Record(planned=False)
    run(training, plain, seed)
    planned = Record(plain, planned=True)
    row = Row()
    try:
        run(training, planned, seed)
    except Exception as error:
        first = not planned.steps
        row.kind = "ended"
        if first and isinstance(error, CkptPlanError):
            row.kind = "infeasible" if isinstance(error, InfeasibleBudgetError) else "refused"
        row.detail = _text(error)
    row.steps, row.plans = len(planned.steps), len({step.made for step in planned.steps if step.budget_bytes})
    row.peaks_bytes = [step.peak_bytes for step in planned.steps]
    row.plain_peaks_bytes = [step.peak_bytes for step in plain.steps]
    row.budgets_bytes = [step.budget_bytes for step in planned.steps]
    row.likes = [step.like for step in planned.steps]
    row.differences = dict(planned.differences)
    row.warnings = [
        text[: documents.LONGEST] for step in planned.steps for text in step.told if "peak" in text or "planned" in text
    ]
    row.over = over(planned.steps)
    differing = [
        f"step {i}: {name}"
        for i, (a, b) in enumerate(itertools.zip_longest(planned.steps, plain.steps))
        if a is not None and b is not None
        for name in {**b.values, **a.values}
        if not _same(a.values.get(name), b.values.get(name))
    ]
    if differing:
        again = Record(planned=False, measures=False)
        run(training, again, seed)
        repeats = all(_same(a.values, b.values) for a, b in zip(again.steps, plain.steps, strict=True))
        if not repeats:
            raise ValueError("the training isn't the same from one time to the next")
        text = f"{len(differing)} values, first {', '.join(differing[:4])}"
        row.kind, row.detail = "DIFFERENT", f"{text}; {row.detail}" if row.detail else text
    elif row.kind == "equal" and len(planned.steps) != len(plain.steps):
        row.kind, row.detail = "ended", f"{len(planned.steps)} of {len(plain.steps)} steps"
    return row


def tried(training: Training, seed: int = 7) -> tuple[Row, str, str]:
    """How a training ends that is trained both ways, the promise that is broken, and why it couldn't be trained."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            row = compared(training, seed)
            return row, row.broken, ""
        except Exception as error:
            return Row(), "not trained", documents.brief(error)


def over(steps: list[Step]) -> dict[str, list[int]]:
    """Steps above the budget, by kind."""
    found: dict[str, list[int]] = {}
    first: dict[str, int] = {}
    for i, step in enumerate(steps):
        first.setdefault(step.like, i)
        if step.budget_bytes is None or step.peak_bytes <= step.budget_bytes + LOSS_BYTES:
            continue
        told = [text for each in steps[step.since : i + 1] for text in each.told if text.startswith(NAMED)]
        kind = "again" if i > first[step.like] <= step.made else "first"
        if not told:
            kind = "silent"
        elif any(NO_PLAN.search(text) for text in told):
            kind = "no plan"
        found.setdefault(kind, []).append(i)
    return found


def shown(row: Row) -> str:
    """A row in full."""
    lines = [f"{row.kind} {row.detail}, over {row.over}, differences {row.differences}, {row.plans} plans"]
    for i, (peak, budget, plain, like) in enumerate(
        zip(row.peaks_bytes, row.budgets_bytes, row.plain_peaks_bytes, row.likes, strict=False)
    ):
        lines.append(f"  {i}: {peak} of {budget} ({f'{peak / budget:.3f}' if budget else '-'}), plain {plain}: {like}")
    return "\n".join([*lines, *(f"  {text}" for text in row.warnings), ""])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _text(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{documents.brief(error)} [{Path(where.filename).name}:{where.lineno}]"
