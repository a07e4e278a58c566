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
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.request import Report
from ckptplan.profiling.target import Target
from ckptplan.profiling.values.answers import Answers
from ckptplan.profiling.values.compiled import Noted, call_key, distinct_tensors, note_call, patched_calls
from ckptplan.profiling.values.cut import fresh
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.state.restore import random_state
from ckptplan.tensors.storages import same_bits
from ckptplan.training.compiled import compiled_modules, hooks_in, is_compiled, is_compiled_for_a_plan, ran_compiled
from ckptplan.training.step import TrainingStep
from ckptplan.training.variants import at_ratio, backend_of, calling, structure_of

_MOST = 6
_RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.01)
"""Those that are listed; not 0, under which the compiler doesn't save what a partitioner asks for."""
_LEAST_BYTES = 1 << 16
"""Least bytes that a stage must save of its own: less can't pay for a choice."""
_LESS = 0.95
"""Most that a variant may save, as a share of what the user's own code saves."""
ROUNDING = 2e-2
"""Most by which a gradient in low precision may differ, as a share of its largest element."""
_LOW = (torch.float16, torch.bfloat16)

Call = tuple[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The module's name, the module, its own code, and the arguments."""


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
        kind, name = answers.compiled[key].kind, call[0]
        if kind not in kinds:
            kinds[kind] = _variants(call, key, target, report)
        answers.compiled.update({(*key[:-1], ratio): its for ratio, its in kinds[kind].items()})
        ratios = ratios_of.get(name, (*kinds[kind],))  # those of all its calls
        ratios_of[name] = tuple(ratio for ratio in ratios if ratio in kinds[kind] and _is_taken(call, ratio))

    _run_for_real(step, found, answers, note)


def compilable(step: TrainingStep, stages: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run `step` for real; return which of its stages to compile, and notes on them.

    A module without parts has nothing to fuse. Others are traced as the compiler would, once for each structure.
    """
    modules = dict(step.model.named_modules())
    names = dict.fromkeys(stage.partition("#")[0] for stage in stages)
    found = {name: modules[name] for name in names if any(True for _ in modules[name].children())}
    there = tuple(name for name in found if is_compiled_for_a_plan(found[name]))
    called: dict[str, Hashable] = {}
    given: dict[Hashable, tuple[nn.Module, Any]] = {}

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            called[name] = kind = structure_of(module)
            if why := hooks_in(module):
                called[name] = kind = name, why
                given.setdefault(kind, (module, why))
            elif kind not in given:
                given[kind] = module, pytree.tree_map_only(torch.Tensor, fresh([], {}), (args, kwargs))
            return original(*args, **kwargs)

        return run

    compiled = {name: module for name, module in found.items() if not is_compiled(module)}
    with patched_calls(compiled, runner), OwnHooks(lambda tensor: None, lambda nothing: nothing):
        step.forward()
    tried = {
        kind: arguments if isinstance(arguments, str) else _not_compilable(module, *arguments)
        for kind, (module, arguments) in given.items()
    }
    taken = (*there, *(name for name, kind in called.items() if tried[kind] is None))
    kinds = len({structure_of(found[name]) for name in taken})
    notes = [f"{len(taken)} layers of {kinds} kind{'s' * (kinds != 1)} are compiled"] + [
        f"{next(name for name in called if called[name] == kind)!r} and its like aren't compiled: {why}"
        for kind, why in tried.items()
        if why is not None
    ]
    return taken, tuple(notes)


def _not_compilable(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    from ckptplan.training.partitioner import saved_bytes

    try:
        return None if saved_bytes(calling(module), args, kwargs, _RATIOS[:1]) else "no gradient passes through it"
    except Exception as error:  # the compiler's are of many kinds
        return _told(error)


def note_at(step: TrainingStep, target: Target, ratio: float) -> None:
    """Note the variants of this ratio, for the replay of a plan that was made in another run."""
    answers = target.answers
    assert answers is not None
    answers.noted_ratios.add(ratio)
    kinds: dict[str, Noted] = {}

    def note(call: Call, key: tuple[Any, ...]) -> None:
        name, module, original, args, kwargs = call
        kind, there = answers.compiled[key].kind, (*key[:-1], ratio)
        with at_ratio(ratio), contextlib.suppress(UnsupportedModelError):  # of a module that the plan leaves as it is
            if kind not in kinds:
                kinds[kind] = note_call(name, module, original, args, kwargs, target.device, there)
            answers.compiled[there] = kinds[kind]

    _run_for_real(step, compiled_modules(step.model), answers, note)


def _run_for_real(
    step: TrainingStep, modules: dict[str, nn.Module], answers: Answers, note: Callable[[Call, tuple[Any, ...]], None]
) -> None:
    """Run the step, saving nothing, and call `note` with each noted call of these modules and its key."""

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = call_key(name, module, args, kwargs)
            if torch.is_grad_enabled() and key in answers.compiled:
                with OwnHooks(lambda tensor: tensor, lambda tensor: tensor):
                    note((name, module, original, args, kwargs), key)
            return original(*args, **kwargs)

        return run

    with patched_calls(modules, runner), OwnHooks(lambda tensor: None, lambda nothing: nothing):
        step.forward()


def _is_taken(call: Call, ratio: float) -> bool:
    """Whether the compiler takes a call: layers of a kind may differ in what they are compiled for again, too often."""
    _, _, original, args, kwargs = call
    args, kwargs = pytree.tree_map_only(torch.Tensor, fresh([], {}), (args, kwargs))
    restore, taken = random_state(), False
    with at_ratio(ratio), contextlib.suppress(Exception):  # the compiler's are of many kinds
        taken = ran_compiled(original(*args, **kwargs)) is not False
    restore()
    return taken


def _variants(call: Call, key: tuple[Any, ...], target: Target, report: Report) -> dict[float, Noted]:
    """Ratio, falling -> the variant of a call of a kind."""
    name, module, original, args, kwargs = call
    answers = target.answers
    assert answers is not None
    restore = random_state()
    args, kwargs = pytree.tree_map_only(torch.Tensor, fresh([], {}), (args, kwargs))
    found: dict[float, Noted] = {}
    own = answers.compiled[key]
    if own.saved_bytes < _LEAST_BYTES:
        return found
    report(f"listing what variants of {name!r} would save")
    ratios, why = _listed(module, original, args, kwargs, own.saved_bytes)
    for ratio in ratios:
        report(f"compiling {name!r} to save less, under {ratio}")
        try:
            with at_ratio(ratio):
                noted = note_call(name, module, original, args, kwargs, target.device, (*key[:-1], ratio))
            why = _otherwise(own, noted, module, functools.partial(_ran, original, module, args, kwargs), ratio)
        except Exception as error:  # the compiler's are of many kinds, and the user's own code has run
            why = _told(error)
        restore()
        if why is None:
            found[ratio] = noted
        else:
            answers.notes.append(f"{name!r} isn't compiled under {ratio}: {why}")
    if why is not None and not ratios:
        answers.notes.append(f"{name!r} isn't compiled to save less: {why}")
    restore()
    return found


def _listed(
    module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], own_bytes: int
) -> tuple[list[float], str | None]:
    """The ratios to compile, or why there are none."""
    from ckptplan.training.partitioner import saved_bytes

    try:
        backend_of(module, original)
        if ran_compiled(original(*args, **kwargs)) is False:
            return [], "the compiler has given it up, and it runs as it is (TORCH_LOGS=recompiles tells why)"
        return _spread(saved_bytes(calling(module), args, kwargs, _RATIOS), own_bytes), None
    except Exception as error:  # as there
        return [], _told(error)


def _told(error: Exception) -> str:
    """What a reader needs of an error: the compiler's have long texts."""
    if isinstance(error, UnsupportedModelError):
        return str(error)
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


def _ran(
    original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs of a call, and the gradients for random ones that come in, the same in each run from a random state."""
    outputs = distinct_tensors(original(*args, **kwargs))
    differentiable = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in differentiable]
    wanting = [t for t in (*distinct_tensors((args, kwargs)), *module.parameters()) if t.requires_grad]
    gradients = torch.autograd.grad(differentiable, wanting, given, allow_unused=True) if differentiable else ()
    return [t.detach() for t in outputs], [*gradients]


def _otherwise(own: Noted, noted: Noted, module: nn.Module, ran: Callable[[], Any], ratio: float) -> str | None:
    """Why a variant isn't the user's own code; None if it is."""
    if not noted.does_as(own):
        return "it returns or writes something else than the model's own compiled code"
    if noted.saved_bytes > _LESS * own.saved_bytes:
        return "it saves as much as the model's own compiled code"
    restore = random_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    outputs, gradients = ran()
    restore()
    for buffer, value in buffers:
        buffer.detach().copy_(value)
    with at_ratio(ratio):
        others, other_gradients = ran()
    if not all(map(same_bits, outputs, others)):
        return "it returns other values than the model's own compiled code"
    low = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu") or any(t.dtype in _LOW for t in outputs)
    for a, b in zip(gradients, other_gradients, strict=True):
        if a is None or b is None:
            if a is not b:
                return "its gradients are of other tensors"
        elif not same_bits(a, b):
            largest = a.abs().max().item()
            beyond = (a - b).abs().max().item() / largest if largest else float("inf")
            if not low or not beyond <= ROUNDING:  # NaN isn't
                return f"its gradients differ, by {beyond:.1e} of their largest element"
    return None
