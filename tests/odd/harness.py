"""Train an odd model plainly and under a forced plan, and tell what became of it.

A case is a function that builds a model, its inputs and a training loop; `case` registers it, and `generated` makes
others at random. A plan forces one decision on every stage that has it in the profile, or a mixture. The training with
the plan is compared with the plain one, bit for bit: what the loop yields, gradients, parameters, buffers, what the
modules, their classes and the inputs keep in plain Python objects, and the next random draws.

Outcomes
--------
equal
    All as in plain training, and the stages really were swapped or recomputed.
refused
    Profiling, planning or applying raised an error of this package that says why.
not possible
    The profile offers the decision for no stage; its notes say why.
error
    Training raised an error of this package, or one that it raises on purpose.
raw error
    An error from inside, or from PyTorch, that plain training doesn't raise.
DIFFERENT
    Something isn't what plain training gives, without any error.
said
    The step's measured peak is above the plan's budget, since the step isn't the planned one; `stats().differences`,
    of each of which there is a warning, name why.
over
    The step's measured peak is above the plan's budget, without a word.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import linecache
import random
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from small_models import plan_of, products, saving, scheduled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

import ckptplan
from ckptplan.core.errors import CkptPlanError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.runtime.guard.check import When
from ckptplan.runtime.handle import Handle
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, peak_above_start

Kind = Literal["equal", "refused", "not possible", "error", "raw error", "DIFFERENT", "said", "over"]
Extras = list[Any]
Loop = Callable[[nn.Module, Any], Iterator[Extras]]

BROKEN: tuple[Kind, ...] = ("raw error", "DIFFERENT", "over")
"""Outcomes that break a promise."""
DECISIONS = ("profiled", "swap", "recompute", "segment", "selective")
"""`profiled`: the model is trained without a plan after it was profiled, which is to leave nothing behind."""
MIXED = "mixed"
"""Stages are kept, swapped, recomputed, recomputed in segments and but for their products, at random."""
STEPS = 3
WIDTH, BATCH = 32, 64  # an activation has 8 KiB, of which 4 would be enough to be swapped


LOSS_BYTES = 4
"""The loss of the step before, to which the loops still refer: no plan counts it."""


class BadCase(Exception):
    """The case itself is wrong: its plain training doesn't repeat, or nothing is swapped or recomputed in it."""


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The loss of all loops and profiles."""
    return output.square().mean()


def plain_step(model: nn.Module, x: Any) -> torch.Tensor:
    """Forward, loss and backward; returns the loss."""
    loss = loss_of(call(model, x))
    loss.backward()
    return loss.detach()


def call(model: nn.Module, inputs: Any) -> Any:
    """A forward on inputs as `profile` takes them: one tensor, a tuple of arguments, or a dictionary of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def update(model: nn.Module) -> None:
    """Plain gradient descent."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.5 * p.grad


def in_steps(step: Callable[[nn.Module, Any], Extras]) -> Loop:
    """Return a loop of steps that begin without gradients and end with an update."""

    def loop(model: nn.Module, x: Any) -> Iterator[Extras]:
        for _ in range(STEPS):
            model.zero_grad()
            extras = step(model, x)
            update(model)
            yield extras

    return loop


plain_loop = in_steps(lambda model, x: [plain_step(model, x)])


Around = Callable[..., contextlib.AbstractContextManager[Any]]


def one_forward_of(surroundings: Around, of_backward: Around = contextlib.nullcontext) -> Loop:
    """Return a loop whose forwards run inside `surroundings(model)`, and backwards inside `of_backward()`."""

    @in_steps
    def loop(model: nn.Module, x: Any) -> Extras:
        with surroundings(model):
            loss = loss_of(model(x))
        with of_backward():
            loss.backward()
        return [loss.detach()]

    return loop


def one_forward_around(surroundings: Around, of_backward: Around = contextlib.nullcontext) -> Loop:
    """The same with surroundings that the model is no part of."""
    return one_forward_of(lambda model: surroundings(), of_backward)


def between(change: Callable[[Any], object], back: Callable[[Any], object] = lambda model: None) -> Loop:
    """Return a loop that changes the model between forward and backward, and back behind it."""

    @in_steps
    def loop(model: nn.Module, x: Any) -> Extras:
        loss = loss_of(model(x))
        change(model)
        loss.backward()
        back(model)
        return [loss.detach()]

    return loop


@dataclass(frozen=True, slots=True)
class Odd:
    """A model to be trained.

    Attributes
    ----------
    model : nn.Module
    inputs : tensor or tuple
    loop : callable
        Trains the model for three steps and yields behind each what is to be compared besides the model's own.
    optimizer : torch.optim.Optimizer, optional
        Counted in the profile and in what is measured.
    accumulate : bool, optional
        Whether steps start with gradients, for the profile.
    """

    model: nn.Module
    inputs: Any
    loop: Loop = plain_loop
    optimizer: torch.optim.Optimizer | None = None
    accumulate: bool | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A named odd model.

    Attributes
    ----------
    name : str
    item : str
        The kind of fault that it looks for, as in `ITEMS`.
    about : str
    build : callable
    says : tuple of str
        Words of which an error of ours has to have one to be clear; none: any error of ours is.
    measured : bool
        Whether the training's peak is measured and held against the plan's budget, which is the peak that the plan
        expects, without the room that it has for other cases. Not under `selective`, whose products are chosen here and
        not by the profile, which knows no peak then.
    forced : bool
        Whether a plan that moves and recomputes nothing shows that the case is wrong.
    """

    name: str
    item: str
    about: str
    build: Callable[[], Odd]
    says: tuple[str, ...] = ()
    measured: bool = False
    forced: bool = True


ITEMS = {
    "1": "state written without a version counter",
    "2": "state not found",
    "3": "surroundings of forward that are gone in backward",
    "4": "parameters changed before the recompute",
    "5": "activations edited between stages",
    "6": "copies of a planned layer",
    "7": "profiling a model that registers things lazily",
    "8": "a stage without a tensor among its arguments",
    "9": "gradients that exist when a step starts",
    "10": "storages larger than their fake twins",
    "11": "checkpoints inside the model",
    "errors": "errors that are to be clear",
}
CASES: dict[str, Case] = {}


def case(
    item: str, says: tuple[str, ...] = (), *, measured: bool = False
) -> Callable[[Callable[[], Odd]], Callable[[], Odd]]:
    """Register a builder as a case; its name and docstring are the case's."""

    def register(build: Callable[[], Odd]) -> Callable[[], Odd]:
        name = build.__name__
        if name in CASES or item not in ITEMS:
            raise BadCase(f"{name}: a second one, or of an unknown item {item!r}")
        CASES[name] = Case(name, item, (build.__doc__ or "").split("\n")[0], build, says, measured)
        return build

    return register


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one case under one decision.

    Attributes
    ----------
    kind : str
    detail : str
        The error, the notes, or the names of what differs.
    stages : str
        How many of the module stages had the decision.
    step : int
        In which step of the training, from 1, it failed or first differed; 0: none of them.
    """

    kind: Kind
    detail: str = ""
    stages: str = ""
    step: int = 0

    @property
    def broken(self) -> bool:
        """Whether a promise is broken."""
        return self.kind in BROKEN


# ---------------------------------------------------------------- training and comparing


def _seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings are no errors: plain training has them too."""
    with warnings.catch_warnings(action="ignore"):
        yield


@_quiet()
def _built(case: Case) -> Odd:
    _seed()
    odd = case.build()
    odd.model.train()
    return odd


class _InStep(Exception):
    """A step of the training has failed; the error is the cause."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@_quiet()
def _train(odd: Odd) -> dict[str, Any]:
    """Train for all steps; what is to be compared, by name."""
    _seed()
    found: dict[str, Any] = {}
    number = 0
    try:
        for number, extras in enumerate(odd.loop(odd.model, odd.inputs), 1):
            for name, value in _left(odd, extras).items():
                found[f"step {number}: {name}"] = value
    except Exception as error:
        raise _InStep(number + 1) from error
    if number != STEPS:
        raise BadCase(f"the loop has {number} steps, not {STEPS}")
    return found


@_quiet()
def _peak(odd: Odd) -> int:
    """Most bytes held at once in the first two steps: the second begins with gradients and optimizer state."""
    _seed()
    inputs = [t for t in pytree.tree_leaves(odd.inputs) if isinstance(t, torch.Tensor)]
    held = unique_bytes([*held_tensors(odd.model), *inputs])
    steps = itertools.islice(odd.loop(odd.model, odd.inputs), 2)
    # Both steps are recorded, since a recording has no releases of what was allocated before it.
    return held + peak_above_start(lambda: collections.deque(steps, maxlen=0))


def _left(odd: Odd, extras: Extras) -> dict[str, Any]:
    """What a step leaves."""
    found: dict[str, Any] = {f"value {i} of the loop": _content(value) for i, value in enumerate(extras)}
    for name, p in odd.model.named_parameters():
        found[f"parameter {name}"] = _content(p.detach())
        found[f"gradient of {name}"] = _content(p.grad)
    for name, buffer in odd.model.named_buffers():
        found[f"buffer {name}"] = _content(buffer)
    for name, module in odd.model.named_modules():
        found[f"attributes of {name or 'the model'}"] = _attributes(module)
    found["inputs"] = _content(odd.inputs)
    found["next random draws"] = [
        torch.rand(1),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
    ]
    return found


_MODULES_OWN = frozenset(nn.Module().__dict__) | {"forward", "_compiled_call_impl"}


def _attributes(module: nn.Module, known: frozenset[int] = frozenset()) -> dict[str, Any]:
    """What a module and its class keep in plain attributes, the class only where it is a case's own."""
    attributes = {name: value for name, value in vars(module).items() if name not in _MODULES_OWN}
    for kind in type(module).__mro__:
        if kind.__module__.startswith("odd."):
            of_kind = {f"class {name}": value for name, value in vars(kind).items() if not name.startswith("__")}
            attributes.update(of_kind)
    return {name: _content(value, known) for name, value in attributes.items()}


def _content(value: Any, known: frozenset[int] = frozenset()) -> Any:
    """A copy of `value` that can be compared, without what is only code."""
    if id(value) in known:
        return "seen"
    if isinstance(value, FakeTensor):
        return "a fake tensor"
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        own = {name: _content(more, known) for name, more in vars(value).items()} if type(value) is torch.Tensor else {}
        return [dense.clone(), own]
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.SystemRandom):
        return "system"
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return _content(value.get_state(), known)
    if isinstance(value, np.random.Generator):
        return _content(value.bit_generator.state, known)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, bool | int | float | str | None):
        return value
    known |= {id(value)}
    if isinstance(value, dict):
        return {str(key): _content(item, known) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | collections.deque):
        return [_content(item, known) for item in value]
    if isinstance(value, nn.Module):
        state = {name: _content(t, known) for name, t in value.state_dict(keep_vars=True).items()}
        return [state, _attributes(value, known)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _content(getattr(value, field.name, None), known) for field in dataclasses.fields(value)}
    if isinstance(value, types.SimpleNamespace) or type(value).__module__.startswith("odd."):
        return _content(vars(value), known)
    if isinstance(value, types.FunctionType) and value.__module__.startswith("odd."):
        return [_content(cell.cell_contents, known) for cell in value.__closure__ or ()]
    return None


def _same(a: Any, b: Any) -> bool:
    """Bit for bit, NaNs and the signs of zeros included."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [name for name in {**wanted, **found} if not _same(found.get(name), wanted.get(name))]


# ---------------------------------------------------------------- planning


class _NotPossible(Exception):
    """The profile offers the decision for no stage."""


@_quiet()
def _profiled(odd: Odd) -> Profile:
    return ckptplan.profile(
        odd.model, odd.inputs, loss_fn=loss_of, optimizer=odd.optimizer, accumulate=odd.accumulate, menus=False
    )


def _plan(case: Case, profile: Profile, decision: str) -> tuple[Plan, str]:
    """A plan that decides alike for every stage that can, or a mixture, and how many of the stages are decided so."""
    if decision == MIXED:
        return _mixture(case, profile)
    action = "recompute" if decision in ("segment", "selective") else decision
    real = [i for i, stage in enumerate(profile.stages) if not stage.is_glue]
    able = [i for i in real if profile.stages[i].find(action) is not None]  # type: ignore[arg-type]
    notes = "; ".join(profile.notes) or "no note"
    if not able:
        raise _NotPossible(notes)
    options = [
        (stage.find(action) if i in able else None) or stage.keep  # type: ignore[arg-type]
        for i, stage in enumerate(profile.stages)
    ]
    stages = f"{len(able)} of {len(real)}"
    if decision == "segment":
        last = able[0]
        for i in real[real.index(able[0]) + 1 :]:
            if i not in able:
                break
            last = i
        if last == able[0]:
            raise _NotPossible(f"no two stages in a row; {notes}")
        return scheduled(profile, options, (Segment(able[0], last),)), stages
    plan = plan_of(profile, [option.name for option in options])  # type: ignore[misc]
    if decision == "selective":
        plan = _saving_products(case, plan, able)
        if not any(choice.ops for choice in plan.choices):
            raise _NotPossible(f"no stage that can be recomputed has a product; {notes}")
    return plan, stages


def _mixture(case: Case, profile: Profile) -> tuple[Plan, str]:
    """A plan that decides for each stage at random, the same for every run of a case."""
    rng = random.Random(case.name)
    real = [i for i, stage in enumerate(profile.stages) if not stage.is_glue]
    options = [stage.keep for stage in profile.stages]
    for i in real:
        able = [option for option in profile.stages[i].options if not option.ops]
        options[i] = rng.choice([*able, *(option for option in able if option.action != "keep")])
    segments = ()
    runs = [
        (a, b)
        for a, b in itertools.combinations(real, 2)
        if all(profile.stages[i].find("recompute") for i in real if a <= i <= b)
    ]
    if runs and rng.random() < 0.5:
        segments = (Segment(*rng.choice(runs)),)
        for i in real:
            if segments[0].first <= i <= segments[0].last:
                options[i] = profile.stages[i].find("recompute")
    decided = [i for i in real if options[i].action != "keep"]
    if not decided:
        raise _NotPossible("; ".join(profile.notes) or "all stages are kept by chance")
    plan = scheduled(profile, options, segments, share=rng.choice([0.0, 0.5]))
    if rng.random() < 0.3:
        outside = [i for i in decided if not any(s.first <= i <= s.last for s in segments)]
        plan = _saving_products(case, plan, [i for i in outside if rng.random() < 0.5])
    return plan, f"{len(decided)} of {len(real)}"


def _saving_products(case: Case, plan: Plan, stages: Collection[int]) -> Plan:
    """The plan, where these stages, as far as they recompute, save the outputs of their products."""
    odd = _built(case)
    with _quiet():
        return saving(plan, products(odd.model, odd.inputs, plan.stages), stages)


# ---------------------------------------------------------------- outcomes


class Trial:
    """A case, trained as often as need be; plain training and profiling are done once.

    Parameters
    ----------
    case : Case
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    @functools.cached_property
    def wanted(self) -> dict[str, Any]:
        """What plain training gives.

        Raises
        ------
        BadCase
            If it gives something else the second time.
        """
        wanted = _train(_built(self.case))
        differing = _differing(_train(_built(self.case)), wanted)
        if differing:
            raise BadCase(f"{self.case.name} isn't the same from one plain training to the next: {differing[:4]}")
        return wanted

    @functools.cached_property
    def profiled(self) -> tuple[Profile | Exception, Outcome]:
        """The profile, or why there is none, and the end of a plain training of the model behind it."""
        wanted = self.wanted
        odd = _built(self.case)
        profile: Profile | Exception
        try:
            profile = _profiled(odd)
        except Exception as error:
            profile = error
        try:
            found = _train(odd)
        except Exception as error:
            return profile, _failed(error, self.case)
        return profile, _compared(found, wanted)

    def plan_for(self, decision: str) -> Plan | None:
        """The plan that forces a decision; None where there is none."""
        profile, _ = self.profiled
        if isinstance(profile, Exception):
            return None
        try:
            return _plan(self.case, profile, decision)[0]
        except (_NotPossible, CkptPlanError):
            return None

    def outcome(self, decision: str, *, plan: Plan | None = None, check: When = "sampled") -> Outcome:
        """What becomes of the case under a decision, one of `DECISIONS` or `MIXED`.

        Parameters
        ----------
        plan : Plan, optional
            As `plan_for` gives it, in place of one from a profile that is made now.
        check : "sampled", "always" or "off"
            As for `apply`.

        Raises
        ------
        BadCase
        """
        case, wanted, stages = self.case, self.wanted, ""
        if plan is None:
            profile, after = self.profiled
            if decision == "profiled":
                return after
            if isinstance(profile, Exception):
                return _failed(profile, case, before=True)
        try:
            if plan is None:
                plan, stages = _plan(case, profile, decision)
            if case.measured:
                plan = dataclasses.replace(plan, budget_bytes=plan.peak_bytes)
            odd = _built(case)
            handle = _applied(odd, plan, check)
        except _NotPossible as why:
            return Outcome("not possible", str(why))
        except BadCase:
            raise
        except Exception as error:
            return _failed(error, case, before=True)
        with handle:
            try:
                found = _train(odd)
            except BadCase:
                raise
            except Exception as error:
                return dataclasses.replace(_failed(error, case), stages=stages)
            stats = handle.stats()
        ended = dataclasses.replace(_compared(found, wanted), stages=stages)
        done = stats.swapped_out_bytes if decision == "swap" else stats.recomputed_stages
        if ended.kind == "equal" and case.forced and not done:
            raise BadCase(f"{case.name}: nothing was moved or recomputed under {decision}, which was to be forced")
        if ended.kind == "equal" and case.measured and not any(choice.ops for choice in plan.choices):
            odd = _built(case)
            with _applied(odd, plan, check) as handle:
                peak_bytes = _peak(odd)
                differences = handle.stats().differences
            share = peak_bytes / plan.budget_bytes - 1
            text = f"{peak_bytes} bytes measured, {plan.budget_bytes} planned ({share:+.1%})"
            over = peak_bytes > plan.budget_bytes + LOSS_BYTES
            if over and differences:
                return Outcome("said", f"{text}: {', '.join(differences)}", stages)
            return Outcome("over" if over else "equal", text, stages)
        return ended


@functools.cache
def _trial(name: str) -> Trial:
    return Trial(CASES[name])


def outcome(name: str, decision: str, *, check: When = "sampled") -> Outcome:
    """What becomes of a registered case, as `Trial.outcome`.

    Raises
    ------
    BadCase
    """
    return _trial(name).outcome(decision, check=check)


@_quiet()
def _applied(odd: Odd, plan: Plan, check: When) -> Handle:
    return ckptplan.apply(odd.model, plan, check=check)


def _compared(found: dict[str, Any], wanted: dict[str, Any]) -> Outcome:
    differing = _differing(found, wanted)
    if not differing:
        return Outcome("equal")
    text = f"{len(differing)} of {len(wanted)} values, first {', '.join(differing[:4])}"
    step = int(differing[0].partition(":")[0].removeprefix("step "))
    return Outcome("DIFFERENT", text, step=step)


def _failed(error: Exception, case: Case, *, before: bool = False) -> Outcome:
    """The outcome of an error, by who raised it: this package on purpose, or anything else."""
    step = 0
    if isinstance(error, _InStep):
        step = error.step
        assert isinstance(error.__cause__, Exception)
        error = error.__cause__
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    ours = isinstance(error, CkptPlanError) and "failed while" not in str(error)
    if not ours and isinstance(error, RuntimeError):
        ours = _raised_on_purpose(error)
    if ours and case.says and not any(word in text for word in case.says):
        return Outcome("raw error", f"{text} [has none of {', '.join(map(repr, case.says))}]", step=step)
    return Outcome(("refused" if before else "error") if ours else "raw error", text, step=step)


_PACKAGE = str(Path(ckptplan.__file__).parent)


def _raised_on_purpose(error: BaseException) -> bool:
    """Whether a `raise` statement of this package raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    if last is None or not last.filename.startswith(_PACKAGE) or last.lineno is None:
        return False
    return linecache.getline(last.filename, last.lineno).lstrip().startswith("raise ")
