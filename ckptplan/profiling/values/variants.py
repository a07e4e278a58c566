"""The variants of compiled stages that are worth a choice: found, compiled, checked and noted in a real run.

NOTE [Noted variants]
1. Once the stages are known, the step runs for real again, saving nothing. Of each distinct compiled stage a trace
   lists the bytes that code under ten ratios would save, without compiling (`saved_bytes` in training/partitioner.py).
   Those that save less than the user's own code are compiled, at most `_MOST` of them, spread over the bytes.
2. A variant is noted as the user's own code is (NOTE [Compiled calls] in compiled.py), under a key with its ratio.
3. It is left out, with a note, if it returns or writes something else, or if its outputs, or its gradients for random
   incoming gradients, aren't those of the user's own code from the same random state, bit for bit. In low precision
   (autocast, or outputs in 16 bits) gradients may differ by rounding, since fused code rounds where it stores.

Example: a block saves 24 MiB. Under 0.9 to 0.7 it would save 17 MiB, under 0.6 to 0.3 10 MiB and under 0.2 to 0.01 2
MiB; three variants are compiled, under 0.9, 0.6 and 0.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.request import Report
from ckptplan.profiling.target import Target
from ckptplan.profiling.values.answers import Answers
from ckptplan.profiling.values.compiled import (
    Call,
    ForwardDifferentiatesError,
    Noted,
    Output,
    call_key,
    distinct_tensors,
    note_call,
    run_for_real,
    unplayable,
)
from ckptplan.state.put_back import Steps, put_back
from ckptplan.state.restore import random_state
from ckptplan.state.surroundings import Surroundings
from ckptplan.tensors.storages import same_bits, tensors_in
from ckptplan.training.compiled import (
    CompiledForPlan,
    compiled_modules,
    hooks_in,
    is_compiled,
    ran_compiled,
    structure_of,
)
from ckptplan.training.step import TrainingStep
from ckptplan.training.variants import at_ratio, backend_of

_MOST = 6
_RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.01)
"""Ratios that are tried; not 0, under which the compiler doesn't save what a partitioner asks for."""
_LEAST_BYTES = 1 << 16
"""Least bytes that a stage must save of its own: less can't pay for a choice."""
_LESS = 0.95
"""Most that a variant may save, as a share of what the user's own code saves."""
ROUNDING = 2e-2
"""Most by which a gradient in low precision may differ, as a share of its largest element."""
_LOW = (torch.float16, torch.bfloat16)
_PROMISES = (
    "code compiled to save less gives the outputs and gradients of the model's own compiled code, bit for bit",
    "code compiled to save less gives the outputs of the model's own compiled code, bit for bit, and in low precision "
    f"gradients within {ROUNDING:.0%} of their largest element",
)
"""Notes for calls in full and in low precision."""


def note_variants(step: TrainingStep, target: Target, stages: Sequence[str], report: Report) -> None:
    """Note the variants of compiled stages in `target.answers` (NOTE [Noted variants])."""
    answers = target.answers
    if answers is None or answers.ratios is not None:
        return
    ratios_of = answers.ratios = dict[str, tuple[float, ...]]()
    names = {stage.partition("#")[0] for stage in stages}
    found = {name: module for name, module in compiled_modules(step.model).items() if name in names}
    kinds: dict[str, dict[float, Noted]] = {}

    def note(call: Call, key: tuple[Any, ...]) -> None:
        kind, name = answers.compiled[key].kind, call.name
        if kind not in kinds:
            kinds[kind] = _variants(call, key, target, report)
        answers.compiled.update({(*key[:-1], ratio): its for ratio, its in kinds[kind].items()})
        ratios = ratios_of.get(name, (*kinds[kind],))  # those of all its calls
        ratios_of[name] = tuple(ratio for ratio in ratios if ratio in kinds[kind] and _is_taken(call, ratio))

    run_for_real(step, found, _noted_alone(answers, note))


class _Given(NamedTuple):
    """A call to make again: behind forward autocast is off."""

    call: Call
    around: Surroundings

    @contextlib.contextmanager
    def again(self) -> Iterator[Call]:
        """Yield a call that can be made within the block as in forward."""
        undo: Steps = []
        try:
            self.around.put(undo, self.call.inputs)
            yield self.call.cut()
        finally:
            put_back(undo)


def compilable(
    step: TrainingStep, device: torch.device, stages: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run `step` for real; return which of its stages to compile, and notes on them.

    A module without parts has nothing to fuse. Others are traced as the compiler would, once for each structure, and
    then run compiled, each by itself: the compiler may take some and give others up.
    """
    modules = dict(step.model.named_modules())
    names = dict.fromkeys(stage.partition("#")[0] for stage in stages)
    found = {name: modules[name] for name in names if any(True for _ in modules[name].children())}
    called: dict[str, Hashable] = {}
    given: dict[Hashable, _Given] = {}

    def note(call: Call) -> None:
        kind = called[call.name] = structure_of(call.module)
        if kind not in given:
            given[kind] = _Given(call.cut(), Surroundings(device, call.inputs))

    try:
        run_for_real(step, {name: module for name, module in found.items() if not is_compiled(module)}, note)
    except ForwardDifferentiatesError as error:
        return (), (f"no layer is compiled: {error}",)
    traced = {kind: _not_traced(each) for kind, each in given.items()}
    why_not = {name: traced[kind] or _not_compilable(given[kind], found[name]) for name, kind in called.items()}
    taken = tuple(name for name, why in why_not.items() if why is None)
    kinds = len({called[name] for name in taken})
    notes = [f"{len(taken)} layer{'s' * (len(taken) != 1)} of {kinds} kind{'s' * (kinds != 1)} are compiled"]
    told = dict[tuple[Hashable, str], str]()  # by kind and reason, the first name
    for name, why in why_not.items():
        if why is not None:
            told.setdefault((called[name], why), name)
    notes += [f"{name!r} and its like aren't compiled: {why}" for (_, why), name in told.items()]
    return taken, tuple(notes)


def _not_traced(given: _Given) -> str | None:
    """Why the compiler can't take a call; None if it can."""
    from ckptplan.training.partitioner import saved_bytes

    try:
        with given.again() as trial:
            found = saved_bytes(trial.module, trial.args, trial.kwargs, _RATIOS[:1])
        return None if found else "no gradient passes through it"
    except Exception as error:  # the compiler's are of many kinds
        return _told(error)


def _not_compilable(like: _Given, module: nn.Module) -> str | None:
    """Why a module can't be compiled for a plan, by a call with the arguments of one like it; None if it can."""
    if why := hooks_in(module):
        return why
    try:
        with like.again() as trial:
            inputs = trial.inputs
            output = CompiledForPlan(module).compiled(module, *trial.args, **trial.kwargs)
        if ran_compiled(output) is False:
            return "the compiler has given it up (TORCH_LOGS=recompiles tells why)"
        if unplayed := unplayable(trial, inputs, pytree.tree_leaves(output)):
            return f"it {unplayed}"
    except Exception as error:  # as there
        return _told(error)
    left = (t for part in module.modules() for t in tensors_in(vars(part)))
    return "it leaves tensors with graphs in attributes" if any(t.grad_fn is not None for t in left) else None


def note_at(step: TrainingStep, target: Target, ratio: float) -> None:
    """Note the variants of this ratio, for the replay of a plan that was made in another run."""
    answers = target.answers
    assert answers is not None
    answers.noted_ratios.add(ratio)
    kinds: dict[str, Noted] = {}

    def note(call: Call, key: tuple[Any, ...]) -> None:
        kind, there = answers.compiled[key].kind, (*key[:-1], ratio)
        with at_ratio(ratio), contextlib.suppress(UnsupportedModelError):  # of a module that the plan leaves as it is
            if kind not in kinds:
                kinds[kind] = note_call(call, target.device, there)
            answers.compiled[there] = kinds[kind]

    run_for_real(step, compiled_modules(step.model), _noted_alone(answers, note))


def _noted_alone(answers: Answers, note: Callable[[Call, tuple[Any, ...]], None]) -> Callable[[Call], None]:
    """A function that calls `note` with a call and its key, if the user's own code was noted and makes a graph."""

    def before(call: Call) -> None:
        key = call_key(call)
        if torch.is_grad_enabled() and key in answers.compiled:
            note(call, key)

    return before


def _is_taken(call: Call, ratio: float) -> bool:
    """Whether the compiler takes a call: layers of a kind may differ in what they are compiled for again, too often."""
    trial, restore, taken = call.cut(), random_state(), False
    with at_ratio(ratio), contextlib.suppress(Exception):  # the compiler's are of many kinds
        taken = ran_compiled(trial()) is not False
    restore()
    return taken


def _variants(call: Call, key: tuple[Any, ...], target: Target, report: Report) -> dict[float, Noted]:
    """Ratio, falling -> the variant of a call of a kind."""
    answers, name = target.answers, call.name
    assert answers is not None
    trial, restore = call.cut(), random_state()
    found: dict[float, Noted] = {}
    own = answers.compiled[key]
    if own.saved_bytes < _LEAST_BYTES:
        return found
    report(f"listing what variants of {name!r} would save")
    ratios, why = _listed(trial, own.saved_bytes)
    for ratio in ratios:
        report(f"compiling {name!r} to save less, under {ratio}")
        try:
            with at_ratio(ratio):
                noted = note_call(call, target.device, (*key[:-1], ratio))
            why = _otherwise(own, noted, trial, ratio)
        except Exception as error:  # the compiler's are of many kinds, and the user's own code has run
            why = _told(error)
        if why is None:
            found[ratio] = noted
        else:
            answers.notes.append(f"{name!r} isn't compiled under {ratio}: {why}")
    if why is not None and not ratios:
        answers.notes.append(f"{name!r} isn't compiled to save less: {why}")
    if found and (promise := _PROMISES[_is_low(own)]) not in answers.notes:
        answers.notes.append(promise)
    restore()
    return found


def _listed(trial: Call, own_bytes: int) -> tuple[list[float], str | None]:
    """The ratios to compile, or why there are none."""
    from ckptplan.training.partitioner import saved_bytes

    try:
        backend_of(trial.module, trial.original)
        if ran_compiled(trial()) is False:
            return [], "the compiler has given it up, and it runs as it is (TORCH_LOGS=recompiles tells why)"
        return _spread(saved_bytes(trial.module, trial.args, trial.kwargs, _RATIOS), own_bytes), None
    except Exception as error:  # as there
        return [], _told(error)


def _told(error: Exception) -> str:
    """Return the error's class and first line, since the compiler's texts are long."""
    if isinstance(error, UnsupportedModelError):
        return str(error)
    error = getattr(error, "inner_exception", error)  # of a backend
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _spread(listed: dict[float, int], own_bytes: int) -> list[float]:
    """Ratios, falling, of at most `_MOST` distinct numbers of bytes below the user's own."""
    distinct: dict[int, float] = {}
    for ratio, nbytes in sorted(listed.items(), reverse=True):
        if nbytes <= _LESS * own_bytes:
            distinct.setdefault(nbytes, ratio)
    ratios = [distinct[nbytes] for nbytes in sorted(distinct, reverse=True)]
    last = len(ratios) - 1
    if last < _MOST:
        return ratios
    return [ratios[round(i * last / (_MOST - 1))] for i in range(_MOST)]


def _ran(trial: Call) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs of a call, and the gradients for random ones that come in, the same in each run from a random state."""
    outputs = distinct_tensors(trial())
    differentiable = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in differentiable]
    wanting = [t for t in (*trial.inputs, *trial.module.parameters()) if t.requires_grad]
    gradients = torch.autograd.grad(differentiable, wanting, given, allow_unused=True) if differentiable else ()
    return [t.detach() for t in outputs], [*gradients]


def _otherwise(own: Noted, noted: Noted, trial: Call, ratio: float) -> str | None:
    """Why a variant isn't the user's own code; None if it is."""
    if not noted.does_as(own):
        return "it returns or writes something else than the model's own compiled code"
    if noted.saved_bytes > _LESS * own.saved_bytes:
        return "it saves as much as the model's own compiled code"
    restore = random_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in trial.module.buffers()]
    outputs, gradients = _ran(trial)
    restore()
    for buffer, value in buffers:
        buffer.detach().copy_(value)
    with at_ratio(ratio):
        others, other_gradients = _ran(trial)
    if not all(map(same_bits, outputs, others)):
        return "it returns other values than the model's own compiled code"
    for a, b in zip(gradients, other_gradients, strict=True):
        if a is None or b is None:
            if a is not b:
                return "its gradients are of other tensors"
        elif not same_bits(a, b):
            largest = a.abs().max().item()
            beyond = (a - b).abs().max().item() / largest if largest else float("inf")
            if not _is_low(own) or not beyond <= ROUNDING:  # NaN isn't
                return f"its gradients differ, by {beyond:.1e} of their largest element"
    return None


def _is_low(noted: Noted) -> bool:
    """Whether a call runs in low precision: under autocast, or with outputs in 16 bits."""
    autocast = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
    return autocast or any(isinstance(t, Output) and t.lies.layout.dtype in _LOW for t in noted.outputs)
